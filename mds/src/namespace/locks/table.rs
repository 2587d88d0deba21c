//! The locks of the state: which ranges are locked, in both forms of the records, and how many.

use std::collections::BTreeMap;

use bytes::Bytes;
use prost::Message;
use strake_proto::{Code, Ino, SessionId, pb};

use super::{Locks, MAX_IN_FILE, MAX_OF_SESSION, Owner, Want, ranges, spans::Span};
use crate::namespace::{
    fail::{Res, decode, fail},
    format::{FORMAT_LOCKS, FORMAT_RANGES},
    keys,
    txn::Txn,
};
use pb::LockKind;

/// Refuses more ranges than a file and a session may have.
pub(crate) fn check_room(t: &Txn<'_>, ino: Ino, who: &Owner, more: u64, factor: u64) -> Res<()> {
    for (session, file, most, what) in
        [(0, ino, MAX_IN_FILE, "in the file"), (who.session, 0, MAX_OF_SESSION, "by this client")]
    {
        if total(t, session, file)?.ranges.saturating_add(more) > most.saturating_mul(factor) {
            return fail(
                Code::NoLock,
                format!("{most} ranges are locked {what}, which is the limit"),
            );
        }
    }
    Ok(())
}

/// Writes what an owner has now instead of what it had.
pub(crate) fn put(
    t: &mut Txn<'_>,
    ino: Ino,
    who: &Owner,
    (had, has): (&[Span], &[Span]),
    ranged: bool,
    take: bool,
) -> Res<()> {
    if ranged {
        ranges::replace(t, ino, who, had, has);
    } else {
        let key = keys::lock(ino, who.session, who.owner, who.kind);
        if has.is_empty() {
            t.delete(key);
        } else {
            let record = pb::LockRecord { spans: has.iter().copied().map(Span::to_pb).collect() };
            t.put(key, record.encode_to_vec());
        }
    }
    if !has.is_empty() {
        let format = if ranged { FORMAT_RANGES } else { FORMAT_LOCKS };
        t.header.format_version = t.header.format_version.max(format);
    }
    count(t, who.session, ino, has.len() as i64 - had.len() as i64)?;
    add(t, 0, ino, 0, |total| {
        if ranged {
            has.iter().for_each(|s| ranges::note(total, who.kind, s));
        }
        if take {
            total.fence = 0;
        }
    })
}

/// At most `limit` conflicting locks, in any choice, and the eviction that every storage server
/// must know before another lock is given, 0: none.
pub(crate) fn barring(t: &Txn<'_>, want: &Want, limit: usize) -> Res<(Vec<(Owner, Span)>, u64)> {
    let total = total(t, 0, want.ino)?;
    let mut found = Vec::new();
    if total.ranges == 0 || limit == 0 {
        return Ok((found, total.fence));
    }
    if total.ranged {
        ranges::barring(t, &total, want, |who, span| {
            found.push((who, span));
            found.len() < limit
        })?;
    } else {
        found.extend(of_file(t, want.ino)?.barring(want).take(limit));
    }
    Ok((found, total.fence))
}

/// The ranges that one owner has locked.
pub(crate) fn of_owner(t: &Txn<'_>, ino: Ino, who: &Owner) -> Res<Vec<Span>> {
    let key = keys::lock(ino, who.session, who.owner, who.kind);
    let Some(value) = t.get(&key)? else { return Ok(Vec::new()) };
    let record: pb::LockRecord = decode(&key, value)?;
    Ok(record.spans.iter().filter_map(Span::from_pb).collect())
}

/// All locks of a file.
pub(crate) fn of_file(t: &Txn<'_>, ino: Ino) -> Res<Locks> {
    let mut locks = Locks { held: Vec::new(), fence: 0 };
    let total = total(t, 0, ino)?;
    locks.fence = total.fence;
    if total.ranges == 0 {
        return Ok(locks);
    }
    t.scan(&keys::numbered(keys::LOCK, ino), &[], |key, value| {
        let record: pb::LockRecord = decode(key, value)?;
        if let Some((_, session, owner, kind)) = keys::parse_lock(key) {
            let (who, spans) =
                (Owner { kind, session, owner }, record.spans.iter().filter_map(Span::from_pb));
            match locks.held.last_mut().filter(|(last, _)| *last == who) {
                Some((_, all)) => all.extend(spans),
                None => locks.held.push((who, spans.collect())),
            }
        }
        Ok(true)
    })?;
    Ok(locks)
}

/// How many ranges are locked; session 0: by all, inode 0: in all files.
pub(crate) fn total(t: &Txn<'_>, session: SessionId, ino: Ino) -> Res<pb::LockTotal> {
    let key = keys::lock_total(session, ino);
    Ok(t.get(&key)?.map(|v| decode(&key, v)).transpose()?.unwrap_or_default())
}

fn add(
    t: &mut Txn<'_>,
    session: SessionId,
    ino: Ino,
    more: i64,
    change: impl FnOnce(&mut pb::LockTotal),
) -> Res<()> {
    let before = total(t, session, ino)?;
    let mut now = before;
    now.ranges = now.ranges.saturating_add_signed(more);
    change(&mut now);
    if now.ranges == 0 {
        // The next lock starts again like the first one.
        now = pb::LockTotal { fence: now.fence, ..Default::default() };
    }
    let key = keys::lock_total(session, ino);
    if now == before {
        return Ok(());
    }
    if now == pb::LockTotal::default() {
        t.delete(key);
    } else {
        t.put(key, now.encode_to_vec());
    }
    Ok(())
}

/// Counts `more` ranges of a session in a file.
fn count(t: &mut Txn<'_>, session: SessionId, ino: Ino, more: i64) -> Res<()> {
    for (session, ino) in [(session, ino), (session, 0), (0, ino), (0, 0)] {
        add(t, session, ino, more, |_| ())?;
    }
    Ok(())
}

/// Removes all locks whose keys have a prefix.
fn drop_all(t: &mut Txn<'_>, prefix: &[u8]) -> Res<()> {
    let mut found: Vec<(Bytes, Vec<Span>)> = Vec::new();
    t.scan(prefix, &[], |key, value| {
        let record: pb::LockRecord = decode(key, value)?;
        found.push((
            Bytes::copy_from_slice(key),
            record.spans.iter().filter_map(Span::from_pb).collect(),
        ));
        Ok(true)
    })?;
    let mut counts: BTreeMap<(SessionId, Ino), i64> = BTreeMap::new();
    for (key, spans) in found {
        if let Some((ino, session, owner, kind)) = keys::parse_lock(&key) {
            *counts.entry((session, ino)).or_default() -= spans.len() as i64;
            if key.len() > keys::LOCK_OWNER {
                spans
                    .iter()
                    .for_each(|s| ranges::remove(t, ino, &Owner { kind, session, owner }, s));
            }
        }
        t.delete(key);
    }
    counts.into_iter().try_for_each(|((session, ino), more)| count(t, session, ino, more))
}

/// Removes the locks of a session that has ended. `fence`: the number of its eviction, if it was
/// evicted.
pub(crate) fn end_session(t: &mut Txn<'_>, session: SessionId, fence: u64) -> Res<()> {
    let mut inos = Vec::new();
    t.scan(&keys::numbered(keys::LOCK_TOTAL, session), &[], |key, _| {
        inos.extend(keys::last_number(key).filter(|ino| *ino != 0));
        Ok(true)
    })?;
    for ino in inos {
        drop_all(t, &keys::lock(ino, session, 0, LockKind::LockPosix)[..17])?;
        add(t, 0, ino, 0, |total| total.fence = total.fence.max(fence))?;
    }
    Ok(())
}

/// Removes all locks of a file that is removed.
pub(crate) fn forget_file(t: &mut Txn<'_>, ino: Ino) -> Res<()> {
    if total(t, 0, ino)? == pb::LockTotal::default() {
        return Ok(());
    }
    drop_all(t, &keys::numbered(keys::LOCK, ino))?;
    add(t, 0, ino, 0, |total| total.fence = 0)
}

/// Converts the locks of a file to one record per range. That costs the sender no steps: it is done
/// once, for locks that others left.
pub(crate) fn convert(t: &mut Txn<'_>, ino: Ino, total: &mut pb::LockTotal) -> Res<()> {
    let steps = t.steps.left();
    t.steps.allow(u64::MAX);
    for (who, spans) in of_file(t, ino)?.held {
        t.delete(keys::lock(ino, who.session, who.owner, who.kind));
        for s in &spans {
            ranges::insert(t, ino, &who, s);
            ranges::note(total, who.kind, s);
        }
    }
    t.steps.allow(steps);
    Ok(())
}
