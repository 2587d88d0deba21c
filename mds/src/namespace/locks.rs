//! File locks as part of the state, so that they outlive leaders and restarts. `docs/locks.md` has
//! the rules. Waiters are not part of the state, see `lock_waiters`.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message;
use strake_proto::{Code, Error, Ino, Result, SessionId, pb};
use strake_store::Batch;
use tokio::sync::Notify;

use super::{
    FORMAT_RANGES, RULES_PAGES, RULES_RANGES, keys,
    ops::{Inode, Run},
    perm, ranges,
    spans::{self, Span},
    txn::{Res, Txn, decode, fail},
};
use pb::{LockKind, LockType};

/// Most ranges locked in one file, and by one session. Unlocks that split ranges may reach twice as
/// many.
pub const MAX_IN_FILE: u64 = 4_096;
pub const MAX_OF_SESSION: u64 = 65_536;
/// At most this many of the ranges that a lock replaces are reported.
const MAX_UNDO: usize = 64;
/// The format that has locks.
const FORMAT: u32 = 2;
/// The owner number of a client's page locks (`client/src/locks/page_locks.rs`).
pub const PAGES: u64 = 1;

/// The owner of a lock: a process or an open file of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner {
    pub kind: LockKind,
    pub session: SessionId,
    pub owner: u64,
}

/// The lock that an owner wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Want {
    pub ino: Ino,
    pub who: Owner,
    pub span: Span,
}

impl Want {
    /// Whether the two exclude each other.
    pub fn conflicts(&self, other: &Want) -> bool {
        self.ino == other.ino && self.is_barred_by(&other.who, &other.span)
    }

    pub(super) fn is_barred_by(&self, who: &Owner, span: &Span) -> bool {
        self.who.kind == who.kind && self.who != *who && self.span.conflicts(span)
    }
}

/// All locks of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Locks {
    /// By owner.
    pub held: Vec<(Owner, Vec<Span>)>,
    /// The eviction that every storage server must know before another lock is given, 0: none.
    pub fence: u64,
}

impl Locks {
    /// The conflicting locks; all are of other owners.
    pub fn barring<'a>(&'a self, want: &'a Want) -> impl Iterator<Item = (Owner, Span)> + 'a {
        let all = self.held.iter().flat_map(|(who, spans)| spans.iter().map(|s| (*who, *s)));
        all.filter(|(who, span)| want.is_barred_by(who, span))
    }
}

/// Whether the operation takes a lock, and does not release one.
pub fn is_take(o: &pb::SetLock) -> bool {
    o.span.as_ref().is_some_and(|s| s.r#type != LockType::LockUnlock as i32)
}

/// Reads the owner and the range of a request. `EINVAL` for an impossible lock.
pub fn want(
    ino: Ino,
    session: SessionId,
    owner: u64,
    kind: i32,
    span: Option<&pb::LockSpan>,
) -> Result<(Owner, Option<Span>, pb::LockSpan)> {
    let invalid = |m: &str| Error::new(Code::Inval, format!("a lock of inode {ino}: {m}"));
    let kind = LockKind::try_from(kind).map_err(|_| invalid("its kind is unknown"))?;
    let raw = *span.ok_or_else(|| invalid("it has no range"))?;
    if LockType::try_from(raw.r#type).is_err() {
        return Err(invalid("its type is unknown"));
    }
    if raw.start > raw.end || kind == LockKind::LockFlock && (raw.start, raw.end) != (0, u64::MAX) {
        return Err(invalid("its range is empty"));
    }
    if session == 0 {
        return Err(invalid("it belongs to no session"));
    }
    Ok((Owner { kind, session, owner }, Span::from_pb(&raw), raw))
}

fn conflict(who: &Owner, span: &Span) -> Error {
    let how = if span.write { "writing" } else { "reading" };
    let m = format!(
        "bytes {} to {} are locked for {how} by session {}",
        span.start, span.end, who.session
    );
    Error::new(Code::LockConflict, m)
}

impl Run<'_, '_> {
    pub(super) fn get_lock(&mut self, o: &pb::GetLock) -> Res<pb::OpResult> {
        let ino = self.id(o.ino);
        let (who, span, _) = want(ino, self.by.session, o.owner, o.kind, o.span.as_ref())?;
        let Some(span) = span else {
            return fail(Code::Inval, "an unlock conflicts with nothing");
        };
        self.t.need(ino)?;
        let want = Want { ino, who, span };
        let (all, _) = barring(self.t, &want, usize::MAX)?;
        let first = all.into_iter().min_by_key(|(who, s)| (s.start, *who));
        let lock = first.map(|(who, s)| pb::LockReply {
            spans: vec![s.to_pb()],
            session: who.session,
            left: 0,
        });
        Ok(pb::OpResult { ino, lock, ..Default::default() })
    }

    pub(super) fn set_lock(&mut self, o: &pb::SetLock) -> Res<pb::OpResult> {
        let ino = self.id(o.ino);
        let (who, span, raw) = want(ino, self.by.session, o.owner, o.kind, o.span.as_ref())?;
        if who.kind == LockKind::LockPages && self.by.rules < RULES_PAGES {
            return fail(Code::Inval, format!("a lock of inode {ino}: its kind is unknown"));
        }
        let ranged = self.form(ino)?;
        let had = match ranged {
            true => ranges::near(self.t, ino, &who, raw.start, raw.end)?,
            false => of_owner(self.t, ino, &who)?,
        };
        let undo = had.iter().filter_map(|s| {
            s.within(&Span { start: raw.start, end: raw.end, write: true, pid: 0 })
        });
        let undo: Vec<_> =
            if o.undo { undo.take(MAX_UNDO).map(Span::to_pb).collect() } else { Vec::new() };
        let (mut has, mut limit) = (had.clone(), 2);
        match span {
            Some(span) => {
                let r = self.t.need(ino)?;
                if !perm::is_file(r.attr()) {
                    return fail(
                        Code::Inval,
                        format!(
                            "inode {ino} is not a regular file; only regular files have locks \
                                 here"
                        ),
                    );
                }
                if let Some((other, s)) = barring(self.t, &Want { ino, who, span }, 1)?.0.first() {
                    return Err(conflict(other, s).into());
                }
                spans::lock(&mut has, span);
                limit = 1;
            }
            None => spans::unlock(&mut has, raw.start, raw.end),
        }
        if has.len() > had.len() {
            check_room(self.t, ino, &who, (has.len() - had.len()) as u64, limit)?;
        }
        if span.is_some() || has != had {
            put(self.t, ino, &who, (&had, &has), ranged, span.is_some())?;
        }
        let left = if ranged { ranges::left(self.t, ino, &who)? } else { has.len() as u64 };
        let lock = Some(pb::LockReply { spans: undo, session: who.session, left });
        Ok(pb::OpResult { ino, lock, ..Default::default() })
    }

    /// Whether the locks of a file use one record per range: converts them first if they must.
    fn form(&mut self, ino: Ino) -> Res<bool> {
        let total = total(self.t, 0, ino)?;
        if total.ranged || self.by.rules < RULES_RANGES {
            return Ok(total.ranged);
        }
        if total.ranges > 0 {
            let mut now = total;
            ranges::convert(self.t, ino, &mut now)?;
            self.t.put(keys::lock_total(0, ino), now.encode_to_vec());
            self.t.header.format_version = self.t.header.format_version.max(FORMAT_RANGES);
        }
        Ok(true)
    }
}

fn check_room(t: &Txn<'_>, ino: Ino, who: &Owner, more: u64, factor: u64) -> Res<()> {
    for (session, file, most, what) in
        [(0, ino, MAX_IN_FILE, "in the file"), (who.session, 0, MAX_OF_SESSION, "by this client")]
    {
        if total(t, session, file)?.ranges + more > most * factor {
            return fail(
                Code::NoLock,
                format!("{most} ranges are locked {what}, which is the limit"),
            );
        }
    }
    Ok(())
}

/// Writes what an owner has now instead of what it had.
fn put(
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
        let format = if ranged { FORMAT_RANGES } else { FORMAT };
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
pub(super) fn barring(t: &Txn<'_>, want: &Want, limit: usize) -> Res<(Vec<(Owner, Span)>, u64)> {
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
fn of_owner(t: &Txn<'_>, ino: Ino, who: &Owner) -> Res<Vec<Span>> {
    let key = keys::lock(ino, who.session, who.owner, who.kind);
    let Some(value) = t.get(&key)? else { return Ok(Vec::new()) };
    let record: pb::LockRecord = decode(&key, value)?;
    Ok(record.spans.iter().filter_map(Span::from_pb).collect())
}

/// All locks of a file.
pub(super) fn of_file(t: &Txn<'_>, ino: Ino) -> Res<Locks> {
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
pub(super) fn total(t: &Txn<'_>, session: SessionId, ino: Ino) -> Res<pb::LockTotal> {
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
pub(super) fn end_session(t: &mut Txn<'_>, session: SessionId, fence: u64) -> Res<()> {
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
pub(super) fn forget_file(t: &mut Txn<'_>, ino: Ino) -> Res<()> {
    if total(t, 0, ino)? == pb::LockTotal::default() {
        return Ok(());
    }
    drop_all(t, &keys::numbered(keys::LOCK, ino))?;
    add(t, 0, ino, 0, |total| total.fence = 0)
}

/// The files whose locks a batch changes.
pub(super) fn touched(batch: &Batch) -> BTreeSet<Ino> {
    let lock =
        |key: &Bytes| (key.first() == Some(&keys::LOCK)).then(|| keys::parse_lock(key)).flatten();
    batch.ops.iter().filter_map(|(key, _)| Some(lock(key)?.0)).collect()
}

/// Files whose locks changed, for a leader with lock waiters.
#[derive(Default)]
pub struct News {
    inos: Mutex<Option<BTreeSet<Ino>>>,
    bell: Notify,
}

impl News {
    /// Starts noting changes (`on`), or stops.
    pub fn listen(&self, on: bool) {
        *self.inos.lock() = on.then(BTreeSet::new);
    }

    pub(super) fn add(&self, inos: BTreeSet<Ino>) {
        let mut all = self.inos.lock();
        let Some(all) = all.as_mut().filter(|_| !inos.is_empty()) else { return };
        all.extend(inos);
        self.bell.notify_one();
    }

    /// Returns when there may be changes.
    pub async fn changed(&self) {
        self.bell.notified().await;
    }

    pub fn take(&self) -> BTreeSet<Ino> {
        self.inos.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }
}
