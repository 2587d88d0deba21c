//! What was written to one file and has not arrived yet: pure bookkeeping, see `docs/leases.md`.
//!
//! Two layers lie over the bytes of the servers: the lower one is being sent, the upper one was
//! written since. A byte leaves the lower layer only when it has arrived or is lost. So a reader
//! that looks here first and asks the servers then misses none.

use std::{
    collections::BTreeMap,
    hash::{Hash, Hasher},
    ops::Range,
    time::Duration,
};

use strake_fabric::Buf;

/// Non-overlapping bytes by their start, each with the tag that it keeps alive.
type Layer<T> = BTreeMap<u64, (Buf, T)>;

/// Bytes that are sent in one piece, as a list of parts.
pub struct Run<T> {
    pub at: u64,
    pub parts: Vec<(Buf, T)>,
}

/// See the module. `T`: the tag of a write, shared by the parts that later writes leave of it.
#[derive(Clone, Debug)]
pub struct Dirty<T> {
    lower: Layer<T>,
    upper: Layer<T>,
    bytes: u64,
    /// When the oldest bytes of the upper layer were written.
    since: Duration,
    /// Number of changes in progress that do not allow writes to be held back.
    barred: usize,
}

impl<T> Default for Dirty<T> {
    fn default() -> Dirty<T> {
        Dirty {
            lower: Layer::new(),
            upper: Layer::new(),
            bytes: 0,
            since: Duration::ZERO,
            barred: 0,
        }
    }
}

impl<T: Hash> Hash for Dirty<T> {
    fn hash<H: Hasher>(&self, h: &mut H) {
        for layer in [&self.lower, &self.upper] {
            layer.len().hash(h);
            layer.iter().for_each(|(at, (bytes, tag))| (at, &bytes[..], tag).hash(h));
        }
        (self.since, self.barred).hash(h);
    }
}

impl<T> Run<T> {
    pub fn end(&self) -> u64 {
        self.parts.iter().fold(self.at, |at, (b, _)| at + b.len() as u64)
    }
}

fn end<T>(layer: &Layer<T>) -> u64 {
    layer.last_key_value().map_or(0, |(at, (b, _))| at + b.len() as u64)
}

/// Starts of the entries that overlap a range.
fn within<T>(layer: &Layer<T>, r: &Range<u64>) -> Vec<u64> {
    let before =
        layer.range(..r.start).next_back().filter(|(at, (b, _))| **at + b.len() as u64 > r.start);
    before.into_iter().chain(layer.range(r.clone())).map(|(at, _)| *at).collect()
}

impl<T: Clone> Dirty<T> {
    /// Whether there are no bytes in either layer.
    pub fn is_empty(&self) -> bool {
        self.lower.is_empty() && self.upper.is_empty()
    }

    /// Bytes of the upper layer.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The end of the last byte in both layers; 0 without any.
    pub fn end(&self) -> u64 {
        end(&self.lower).max(end(&self.upper))
    }

    /// Whether bytes that begin here continue an earlier write within a block of this size.
    pub fn joins(&self, at: u64, block: u64) -> bool {
        !at.is_multiple_of(block) && !within(&self.upper, &(at - 1..at)).is_empty()
    }

    /// Whether bytes have waited since `before` or longer.
    pub fn is_due(&self, before: Duration) -> bool {
        !self.upper.is_empty() && self.since <= before
    }

    /// From now on no write is held back, until [`Dirty::unbar`].
    pub fn bar(&mut self) {
        self.barred += 1;
    }

    pub fn unbar(&mut self) {
        self.barred -= 1;
    }

    pub fn is_barred(&self) -> bool {
        self.barred > 0
    }

    /// Bytes were written at `now`. They override what was written before.
    pub fn hold(&mut self, now: Duration, at: u64, bytes: Buf, tag: T) {
        if self.upper.is_empty() {
            self.since = now;
        }
        self.cut(at..at + bytes.len() as u64);
        self.bytes += bytes.len() as u64;
        self.upper.insert(at, (bytes, tag));
    }

    /// Removes a range from the upper layer.
    fn cut(&mut self, r: Range<u64>) {
        for at in within(&self.upper, &r) {
            let Some((b, tag)) = self.upper.remove(&at) else { continue };
            let end = at + b.len() as u64;
            self.bytes -= b.len() as u64;
            for left in
                [at..end.min(r.start), at.max(r.end)..end].into_iter().filter(|l| l.start < l.end)
            {
                let part = b.slice((left.start - at) as usize..(left.end - at) as usize);
                self.bytes += part.len() as u64;
                self.upper.insert(left.start, (part, tag.clone()));
            }
        }
    }

    /// Takes all of the upper layer to be sent; the lower layer must be empty. Neighbours that
    /// `join` form one run, of at most `most` bytes unless a single part is longer.
    pub fn take(&mut self, most: u64, join: impl Fn(&T, &T) -> bool) -> Vec<Run<T>> {
        assert!(self.lower.is_empty(), "earlier bytes must arrive first");
        self.lower = std::mem::take(&mut self.upper);
        self.bytes = 0;
        let mut runs: Vec<Run<T>> = Vec::new();
        for (at, (b, tag)) in &self.lower {
            let part = (b.clone(), tag.clone());
            match runs.last_mut() {
                Some(r)
                    if r.end() == *at
                        && *at + b.len() as u64 - r.at <= most
                        && r.parts.last().is_some_and(|(_, t)| join(t, tag)) =>
                {
                    r.parts.push(part);
                }
                _ => runs.push(Run { at: *at, parts: vec![part] }),
            }
        }
        runs
    }

    /// Adds bytes that were already being sent by an earlier process, to be sent again. The lower
    /// layer may hold only such bytes.
    pub fn put_lower(&mut self, at: u64, bytes: Buf, tag: T) {
        self.lower.insert(at, (bytes, tag));
    }

    /// These bytes have arrived, or are lost. Returns whether they were still in the lower layer.
    pub fn settled(&mut self, r: Range<u64>) -> bool {
        within(&self.lower, &r).into_iter().filter_map(|at| self.lower.remove(&at)).count() > 0
    }

    /// All bytes are lost: returns their ranges.
    pub fn lose(&mut self) -> Vec<Range<u64>> {
        let part = |(at, b): (&u64, &Buf)| *at..*at + b.len() as u64;
        let lower = self.lower.iter().map(|(at, (b, _))| (at, b));
        let lost = self.upper.iter().map(|(at, (b, _))| (at, b)).chain(lower).map(part).collect();
        self.lower.clear();
        self.upper.clear();
        self.bytes = 0;
        lost
    }

    /// The bytes of a range that are here, in order and without overlaps.
    pub fn look(&self, r: &Range<u64>) -> Vec<(u64, Buf)> {
        let mut seen: BTreeMap<u64, Buf> = BTreeMap::new();
        let clipped = |at: u64, b: &Buf, r: &Range<u64>| {
            let (from, to) = (at.max(r.start), (at + b.len() as u64).min(r.end));
            (from < to).then(|| (from, b.slice((from - at) as usize..(to - at) as usize)))
        };
        for at in within(&self.upper, r) {
            seen.extend(clipped(at, &self.upper[&at].0, r));
        }
        let gaps = gaps(r, seen.iter().map(|(at, b)| *at..*at + b.len() as u64));
        for gap in gaps {
            for at in within(&self.lower, &gap) {
                seen.extend(clipped(at, &self.lower[&at].0, &gap));
            }
        }
        seen.into_iter().collect()
    }
}

/// The gaps in a range between these ranges, which lie within it in order.
pub(crate) fn gaps(r: &Range<u64>, filled: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut out = Vec::new();
    let mut at = r.start;
    for f in filled {
        if at < f.start {
            out.push(at..f.start);
        }
        at = f.end;
    }
    if at < r.end {
        out.push(at..r.end);
    }
    out
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn buf(byte: u8, len: u64) -> Buf {
        Buf::copy_from(&vec![byte; len as usize])
    }

    #[test]
    fn what_is_written_in_order_is_sent_in_one_piece() {
        let mut h = Dirty::default();
        for i in 0..10u64 {
            h.hold(ms(i), i * 10, buf(i as u8, 10), 0);
        }
        h.hold(ms(10), 100, buf(9, 1), 1);
        h.hold(ms(11), 200, buf(9, 1), 1);
        assert!(
            h.joins(101, 64)
                && h.joins(50, 64)
                && !h.joins(64, 64)
                && !h.joins(150, 64)
                && !h.joins(200, 64)
        );
        assert!(
            (h.bytes(), h.end()) == (102, 201)
                && h.is_due(ms(0))
                && !Dirty::<u8>::default().is_due(ms(9))
        );
        let runs = h.take(60, |a, b| a == b);
        assert_eq!(
            runs.iter().map(|r| r.at..r.end()).collect::<Vec<_>>(),
            [0..60, 60..100, 100..101, 200..201]
        );
        assert!(!h.is_empty() && h.bytes() == 0 && h.end() == 201 && !h.is_due(ms(99)));
        assert!(runs.iter().all(|r| h.settled(r.at..r.end())));
        assert!(h.is_empty() && h.end() == 0);
    }

    #[test]
    fn what_was_written_last_lies_on_top() {
        let mut h = Dirty::default();
        h.hold(ms(0), 0, buf(1, 30), ());
        h.take(99, |(), ()| true);
        h.hold(ms(1), 10, buf(2, 10), ());
        let look = |h: &Dirty<()>, r: Range<u64>| -> Vec<(u64, Vec<u8>)> {
            h.look(&r).into_iter().map(|(at, b)| (at, b.to_vec())).collect()
        };
        assert_eq!(look(&h, 5..40), [(5, vec![1; 5]), (10, vec![2; 10]), (20, vec![1; 10])]);
        assert!(h.settled(0..30));
        assert_eq!(look(&h, 5..40), [(10, vec![2; 10])]);
        let lost = h.lose();
        assert_eq!(
            (lost.len(), lost.first().cloned(), h.lose(), h.bytes()),
            (1, Some(10..20), vec![], 0)
        );
    }

    proptest! {
        /// For any order of writes, sends, arrivals and reads: the bytes here over those that have
        /// arrived equal a file that is written immediately; no byte is sent that was overwritten
        /// before; and no tag outlives its bytes.
        #[test]
        fn it_is_the_same_file(ops in prop::collection::vec((0u8..6, 0u64..60, 1u64..20), 1..120)) {
            let (mut h, mut file, mut disk) = (Dirty::default(), [0u8; 80], [0u8; 80]);
            let mut under_way: Vec<Run<Rc<u8>>> = Vec::new();
            let mut tags = Vec::new();
            for (i, (what, at, len)) in ops.into_iter().enumerate() {
                let byte = i as u8 + 1;
                let r = at as usize..(at + len) as usize;
                match what {
                    0..=2 => {
                        file[r].fill(byte);
                        let tag = Rc::new(byte);
                        tags.push(Rc::downgrade(&tag));
                        h.hold(ms(i as u64), at, buf(byte, len), tag);
                    }
                    3 if under_way.is_empty() => under_way = h.take(len, |a, b| (**a ^ **b) & 1 == 0),
                    4 if !under_way.is_empty() => {
                        let run = under_way.remove(at as usize % under_way.len());
                        let bytes: Vec<u8> = run.parts.iter().flat_map(|(b, _)| b.to_vec()).collect();
                        disk[run.at as usize..run.end() as usize].copy_from_slice(&bytes);
                        prop_assert!(h.settled(run.at..run.end()));
                    }
                    _ => {}
                }
                let mut seen = disk;
                let mut last = 0;
                for (at, b) in h.look(&(0..80)) {
                    prop_assert!(at >= last);
                    last = at + b.len() as u64;
                    seen[at as usize..last as usize].copy_from_slice(&b);
                }
                prop_assert_eq!(seen, file);
                let part = h.look(&(at..at + len));
                for (at, b) in &part {
                    prop_assert_eq!(&b[..], &file[*at as usize..*at as usize + b.len()]);
                }
                prop_assert_eq!(h.bytes(), h.upper.values().map(|(b, _)| b.len() as u64).sum::<u64>());
                prop_assert_eq!(h.is_empty(), h.end() == 0);
            }
            under_way.clear();
            h.lose();
            prop_assert!(tags.iter().all(|t| t.upgrade().is_none()));
        }
    }
}
