//! The arithmetic of locked ranges: the ranges that one owner has locked in one file, sorted, with
//! gaps between them or of different types. Pure.

use strake_proto::pb::{self, LockType};

/// Bytes `start..=end`, locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Span {
    pub start: u64,
    /// The last one; 2^64-1 is the end of any file.
    pub end: u64,
    pub write: bool,
    pub pid: u32,
}

impl Span {
    /// `None` for a range that locks nothing: an unlock, or an end before the start.
    pub fn from_pb(s: &pb::LockSpan) -> Option<Span> {
        let write = match LockType::try_from(s.r#type).ok()? {
            LockType::LockRead => false,
            LockType::LockWrite => true,
            LockType::LockUnlock => return None,
        };
        (s.start <= s.end).then_some(Span { start: s.start, end: s.end, write, pid: s.pid })
    }

    pub fn to_pb(self) -> pb::LockSpan {
        let kind = if self.write { LockType::LockWrite } else { LockType::LockRead };
        pb::LockSpan { start: self.start, end: self.end, r#type: kind as i32, pid: self.pid }
    }

    pub fn meets(&self, other: &Span) -> bool {
        self.start <= other.end && other.start <= self.end
    }

    /// Whether two owners cannot have both.
    pub fn conflicts(&self, other: &Span) -> bool {
        (self.write || other.write) && self.meets(other)
    }

    /// The part within another range.
    pub fn within(&self, other: &Span) -> Option<Span> {
        self.meets(other).then(|| Span {
            start: self.start.max(other.start),
            end: self.end.min(other.end),
            ..*self
        })
    }
}

/// Frees `start..=end`; parts of ranges outside of it stay.
pub fn unlock(spans: &mut Vec<Span>, start: u64, end: u64) {
    let hole = Span { start, end, write: true, pid: 0 };
    let mut left = Vec::with_capacity(spans.len() + 2);
    for s in spans.iter() {
        if !s.meets(&hole) {
            left.push(*s);
            continue;
        }
        if s.start < start {
            left.push(Span { end: start - 1, ..*s });
        }
        if s.end > end {
            left.push(Span { start: end + 1, ..*s });
        }
    }
    *spans = left;
}

/// Locks a range, whatever was locked in it before. Ranges of the same type that it touches are
/// merged with it.
pub fn lock(spans: &mut Vec<Span>, new: Span) {
    unlock(spans, new.start, new.end);
    let at = spans.partition_point(|s| s.start < new.start);
    spans.insert(at, new);
    spans.dedup_by(|next, s| {
        let joins = s.write == next.write && s.end.checked_add(1) == Some(next.start);
        if joins {
            s.end = next.end;
        }
        joins
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BYTES: usize = 24;

    fn r(start: u64, end: u64) -> Span {
        Span { start, end, write: false, pid: 1 }
    }
    fn w(start: u64, end: u64) -> Span {
        Span { write: true, ..r(start, end) }
    }

    #[test]
    fn splits_merges_upgrades_and_downgrades() {
        let mut s = vec![];
        lock(&mut s, r(10, 19));
        lock(&mut s, r(30, 39));
        lock(&mut s, r(20, 29));
        assert_eq!(s, [r(10, 39)], "neighbours become one");
        lock(&mut s, w(15, 24));
        assert_eq!(s, [r(10, 14), w(15, 24), r(25, 39)], "an upgrade in the middle");
        lock(&mut s, r(0, u64::MAX));
        assert_eq!(s, [r(0, u64::MAX)], "a downgrade of all");
        unlock(&mut s, 5, 5);
        assert_eq!(s, [r(0, 4), r(6, u64::MAX)]);
        unlock(&mut s, 100, u64::MAX);
        unlock(&mut s, 0, 0);
        assert_eq!(s, [r(1, 4), r(6, 99)]);
        unlock(&mut s, 0, u64::MAX);
        assert_eq!(s, []);
        lock(&mut s, w(u64::MAX, u64::MAX));
        lock(&mut s, w(0, 0));
        assert_eq!(s, [w(0, 0), w(u64::MAX, u64::MAX)], "the two ends of a file are no neighbours");
    }

    #[test]
    fn only_readers_share() {
        assert!(
            !r(0, 9).conflicts(&r(5, 6))
                && w(0, 9).conflicts(&r(9, 20))
                && r(0, 9).conflicts(&w(0, 0))
        );
        assert!(!w(0, 9).conflicts(&w(10, 20)));
        assert_eq!(r(0, 9).within(&w(5, 20)), Some(r(5, 9)));
    }

    /// What is locked, byte by byte.
    fn bytes(spans: &[Span]) -> [u8; BYTES] {
        let mut out = [0; BYTES];
        for s in spans {
            for (i, b) in out.iter_mut().enumerate() {
                if (s.start..=s.end).contains(&(i as u64)) {
                    assert_eq!(*b, 0, "locked twice: {spans:?}");
                    *b = 1 + u8::from(s.write);
                }
            }
        }
        out
    }

    proptest! {
        #[test]
        fn bytes_and_spans_agree(steps in prop::collection::vec((0..BYTES, 0..BYTES, 0..3u8, any::<bool>()), 1..60)) {
            let (mut spans, mut model) = (vec![], [0; BYTES]);
            for (a, b, kind, to_end) in steps {
                let (start, last) = (a.min(b), if to_end { BYTES - 1 } else { a.max(b) });
                let end = if to_end { u64::MAX } else { last as u64 };
                match kind {
                    0 => unlock(&mut spans, start as u64, end),
                    k => lock(&mut spans, Span { start: start as u64, end, write: k == 2, pid: 1 }),
                }
                model[start..=last].fill(kind);
                prop_assert_eq!(bytes(&spans), model);
                for pair in spans.windows(2) {
                    prop_assert!(pair[0].end < pair[1].start);
                    prop_assert!(pair[0].write != pair[1].write || pair[0].end + 1 < pair[1].start, "not merged");
                }
            }
        }
    }
}
