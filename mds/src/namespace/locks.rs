//! File locks as part of the state, so that they outlive leaders and restarts. `docs/locks.md` has
//! the rules. Waiters are not part of the state, see `lock_waiters`.

pub(super) mod cache;
pub(super) mod ranges;
pub mod spans;
pub(super) mod table;

use std::collections::BTreeSet;

use bytes::Bytes;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Ino, Result, SessionId, pb};
use strake_store::Batch;
use tokio::sync::Notify;

use super::keys;
use pb::{LockKind, LockType};
use spans::Span;

/// Most ranges locked in one file, and by one session. Unlocks that split ranges may reach twice as
/// many.
pub const MAX_IN_FILE: u64 = 4_096;
pub const MAX_OF_SESSION: u64 = 65_536;
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

/// The error for a lock that another owner has.
pub(super) fn conflict(who: &Owner, span: &Span) -> Error {
    let how = if span.write { "writing" } else { "reading" };
    let m = format!(
        "bytes {} to {} are locked for {how} by session {}",
        span.start, span.end, who.session
    );
    Error::new(Code::LockConflict, m)
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
