//! How the state stores locked ranges: one record per range, so that a lock writes one record and
//! not all ranges of its owner, and an index that finds conflicting ranges without reading all. In
//! the first form, from before rule 3, an owner's ranges in a file are one record without an index;
//! the next lock or unlock in a file converts it.
//!
//! **Index.** Ranges of one kind and type are sorted into classes by length, and within a class by
//! their last byte. A range of a class that overlaps `start..=end` ends at `start` or after it, and
//! at most the class's greatest length after `end`. Write locks do not overlap each other, so at
//! most two write locks of a class are read that do not overlap `start..=end`.

use std::ops::Bound;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use strake_proto::{Code, Error, Ino, Result, pb};
use strake_store::prefix_end;

use super::{Owner, Want, spans::Span};
use crate::namespace::{
    fail::{Fail, Res, decode},
    keys,
    txn::Txn,
};
use pb::LockKind;

/// At most this many of the ranges that an owner has left are counted for the answer.
const COUNTED: u64 = 16;
/// The last class has all lengths that no other class has.
const CLASSES: u8 = 64;

/// The class of a range: 0 for one byte, `n` for up to 2^n bytes.
fn class(s: &Span) -> u8 {
    let more = s.end - s.start;
    (more.checked_ilog2().map_or(0, |n| n as u8 + 1)).min(CLASSES - 1)
}

/// How far a range of the class extends beyond its first byte, at most.
fn reach(class: u8) -> u64 {
    if class == CLASSES - 1 { u64::MAX } else { (1 << class) - 1 }
}

fn key(ino: Ino, who: &Owner, s: &Span) -> Bytes {
    keys::lock_range(ino, who.session, who.owner, who.kind, s.end)
}

fn index_key(ino: Ino, who: &Owner, s: &Span) -> Bytes {
    keys::lock_index(ino, who.kind, (s.write, class(s)), s.end, who.session, who.owner)
}

fn index_value(s: &Span) -> Bytes {
    let mut b = BytesMut::with_capacity(12);
    b.put_u64(s.start);
    b.put_u32(s.pid);
    b.freeze()
}

/// The lock that an index record stands for.
fn indexed(key: &[u8], mut value: Bytes) -> Res<(Owner, Span)> {
    let parsed = keys::parse_lock_index(key).filter(|_| value.len() == 12);
    let Some((kind, write, end, session, owner)) = parsed else {
        return Err(Fail::Store(Error::new(
            Code::Corrupt,
            "a record of the index of locks is damaged",
        )));
    };
    let span = Span { start: value.get_u64(), end, write, pid: value.get_u32() };
    Ok((Owner { kind, session, owner }, span))
}

/// The classes in use, one bit each.
fn classes(total: &pb::LockTotal, kind: LockKind, write: bool) -> u64 {
    match (kind, write) {
        // These always lock the whole file.
        (LockKind::LockFlock, _) => 1 << (CLASSES - 1),
        (_, false) => total.read_classes,
        (_, true) => total.write_classes,
    }
}

/// Notes a new range in the file.
pub(super) fn note(total: &mut pb::LockTotal, kind: LockKind, s: &Span) {
    total.ranged = true;
    if kind != LockKind::LockFlock {
        let of = if s.write { &mut total.write_classes } else { &mut total.read_classes };
        *of |= 1 << class(s);
    }
}

/// Passes the conflicting locks to `each`, until it returns false.
pub(super) fn barring(
    t: &Txn<'_>,
    total: &pb::LockTotal,
    want: &Want,
    mut each: impl FnMut(Owner, Span) -> bool,
) -> Res<()> {
    let mut go_on = true;
    for write in [true, false] {
        // Read locks do not conflict with each other.
        let mut left =
            if write || want.span.write { classes(total, want.who.kind, write) } else { 0 };
        while left != 0 && go_on {
            let class = left.trailing_zeros() as u8;
            left &= left - 1;
            let edge = |end| keys::lock_index(want.ino, want.who.kind, (write, class), end, 0, 0);
            let (from, last) =
                (edge(want.span.start), edge(want.span.end.saturating_add(reach(class))));
            let to = prefix_end(&last[..keys::LOCK_INDEX_END]);
            let to = to.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
            t.range(Bound::Included(&from), to, |key, value| {
                let (who, span) = indexed(key, value)?;
                if want.is_barred_by(&who, &span) {
                    go_on = each(who, span);
                }
                Ok(go_on)
            })?;
        }
    }
    Ok(())
}

/// The ranges of an owner that overlap or touch a range, in order.
pub(crate) fn near(t: &Txn<'_>, ino: Ino, who: &Owner, start: u64, end: u64) -> Res<Vec<Span>> {
    let mut out = Vec::new();
    each_of(t, ino, who, start.saturating_sub(1), |s| {
        let meets = s.start <= end.saturating_add(1);
        out.extend(meets.then_some(s));
        meets
    })?;
    Ok(out)
}

/// How many ranges an owner has in a file, counted up to [`COUNTED`].
pub(crate) fn left(t: &Txn<'_>, ino: Ino, who: &Owner) -> Res<u64> {
    let mut n = 0;
    each_of(t, ino, who, 0, |_| {
        n += 1;
        n < COUNTED
    })?;
    Ok(n)
}

/// Passes the ranges of an owner that do not end before a byte to `each`, until it returns false.
fn each_of(
    t: &Txn<'_>,
    ino: Ino,
    who: &Owner,
    from: u64,
    mut each: impl FnMut(Span) -> bool,
) -> Res<()> {
    let first = keys::lock_range(ino, who.session, who.owner, who.kind, from);
    let end = prefix_end(&first[..keys::LOCK_OWNER]);
    let to = end.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
    t.range(Bound::Included(&first), to, |key, value| {
        let record: pb::LockRecord = decode(key, value)?;
        Ok(record.spans.iter().filter_map(Span::from_pb).all(&mut each))
    })?;
    Ok(())
}

/// Replaces the ranges `had` of an owner by `has`.
pub(super) fn replace(t: &mut Txn<'_>, ino: Ino, who: &Owner, had: &[Span], has: &[Span]) {
    for s in had.iter().filter(|s| !has.contains(s)) {
        remove(t, ino, who, s);
    }
    for s in has.iter().filter(|s| !had.contains(s)) {
        insert(t, ino, who, s);
    }
}

pub(super) fn insert(t: &mut Txn<'_>, ino: Ino, who: &Owner, s: &Span) {
    let record = pb::LockRecord { spans: vec![s.to_pb()] };
    t.put(key(ino, who, s), record.encode_to_vec());
    t.put(index_key(ino, who, s), index_value(s));
}

pub(super) fn remove(t: &mut Txn<'_>, ino: Ino, who: &Owner, s: &Span) {
    t.delete(key(ino, who, s));
    t.delete(index_key(ino, who, s));
}

/// Checks that a key and a value are a record of the index.
pub fn is_index(key: &[u8], value: &[u8]) -> Result<()> {
    match indexed(key, Bytes::copy_from_slice(value)) {
        Ok((_, s)) if s.start <= s.end => Ok(()),
        _ => Err(Error::new(Code::Corrupt, "a record of the index of locks is damaged")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_in_the_class_of_their_length() {
        for (start, end, want) in [
            (0, 0, 0),
            (7, 8, 1),
            (7, 9, 2),
            (7, 10, 2),
            (7, 11, 3),
            (0, (1 << 62) - 1, 62),
            (0, 1 << 62, 63),
            (0, u64::MAX, 63),
        ] {
            let s = Span { start, end, write: false, pid: 0 };
            assert_eq!(class(&s), want, "{start}..={end}");
            assert!(end - start <= reach(class(&s)));
            assert!(want == 0 || end - start > reach(want - 1));
        }
    }
}
