//! File locks between all clients: flock(2), POSIX and open-file-description locks. The rules are
//! in `docs/locks.md`.
//!
//! A caller may stop waiting at any time: a result that it did not receive is undone. Until that is
//! done, and while a request of an owner is on its way, the same owner's other requests wait
//! ([`OwnerQueues`]), so that none of them overtakes it.

pub(crate) mod lock_waiters;
pub(crate) mod owner_queues;
pub(crate) mod page_locks;
pub(crate) mod page_uses;
#[doc(hidden)]
pub mod pages;
#[doc(hidden)]
pub mod unlocking;
#[doc(hidden)]
pub mod waiting_list;

use futures_util::future::BoxFuture;
use std::{sync::Arc, time::Duration};

use strake_proto::{Code, Error, Ino, Result, SessionId, pb};
use tokio::sync::{OwnedMutexGuard, oneshot};

use crate::{
    core::Core,
    handover::FileRecord,
    inode::Inode,
    locks::lock_waiters::Place,
    locks::unlocking::{Unlocking, Unlockings, Unlocks},
    metadata::ops::{ok, op},
    shared::retry::in_doubt,
};
pub use owner_queues::{MAX_WAITS, Programs};
pub use pb::{LockKind, LockType};

/// How often a request is tried when the servers' log refused it because of locks that are released
/// meanwhile.
const TRIES: u32 = 3;

/// A lock that is requested or released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lock {
    /// The kind; [`LockKind::LockPosix`] is also for open-file-description locks.
    pub kind: LockKind,
    /// The owner, a process or an open file, as a number that the caller chooses.
    pub owner: u64,
    /// The type: a lock for reading or writing, or an unlock.
    pub mode: LockType,
    /// First byte.
    pub start: u64,
    /// Last byte; `u64::MAX` is the end of the file, however long it gets. An flock spans from 0 to
    /// `u64::MAX`.
    pub end: u64,
    /// The process id, reported to callers that ask which lock is in the way.
    pub pid: u32,
}

impl Lock {
    fn span(&self) -> pb::LockSpan {
        pb::LockSpan { start: self.start, end: self.end, r#type: self.mode as i32, pid: self.pid }
    }

    fn set(&self, ino: Ino) -> pb::Op {
        let (kind, span) = (self.kind as i32, Some(self.span()));
        op(pb::op::Op::SetLock(pb::SetLock {
            ino,
            owner: self.owner,
            kind,
            span,
            ..Default::default()
        }))
    }

    fn take(&self, ino: Ino, patient: bool, wait: u64) -> pb::Op {
        let (kind, span) = (self.kind as i32, Some(self.span()));
        op(pb::op::Op::SetLock(pb::SetLock {
            ino,
            owner: self.owner,
            kind,
            span,
            undo: true,
            patient,
            wait,
        }))
    }
}

/// The result of [`Locks::get`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// For reading or for writing.
    pub mode: LockType,
    /// First byte.
    pub start: u64,
    /// Last byte, `u64::MAX` for the end of the file.
    pub end: u64,
    /// The process id; 0 when another client holds the lock, whose process ids mean nothing here.
    pub pid: u32,
}

/// The result of [`Locks::set`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Locked {
    /// The session that holds the lock, and with which it is lost.
    pub session: SessionId,
    /// How many ranges the owner has locked in the file now.
    pub left: u64,
}

/// A lock that was granted and whose caller does not know yet. Dropping it gives the lock back.
struct Given {
    core: Arc<Core>,
    ino: Ino,
    owner: u64,
    undo: Vec<pb::Op>,
    locked: Locked,
    lane: Option<OwnedMutexGuard<()>>,
    leftover: Leftover,
}

impl Given {
    /// The caller holds the lock from here on.
    fn take(mut self) -> Locked {
        self.lane = None;
        self.locked
    }
}

impl Drop for Given {
    fn drop(&mut self) {
        let Some(lane) = self.lane.take().filter(|_| can_spawn()) else { return };
        let (core, undo, session) =
            (self.core.clone(), std::mem::take(&mut self.undo), self.locked.session);
        let unlocking = self.core.locks.unlockings.begin(self.ino, self.owner);
        let leftover = std::mem::take(&mut self.leftover);
        self.core.shared.env.spawn(async move {
            let undone = core.surely(session, &undo, None).await;
            if undone.is_err_and(|e| e.code == Code::LockConflict) {
                // A lock for writing may have become one for reading meanwhile, and other owners
                // may hold read locks there by now.
                let _ = core.surely(session, &weakened(undo), None).await;
            }
            drop((lane, unlocking, leftover));
        });
    }
}

/// Marks a request that is still in progress when its caller stops waiting, and that will be
/// undone. It lasts until the undoing is done. Others wait for this marker, because the undoing
/// itself begins later.
#[derive(Clone, Default)]
struct Leftover(Arc<parking_lot::Mutex<Option<Unlocking>>>);

/// The caller of a request. If it is dropped before the answer came, the result of the request is
/// undone.
struct Caller {
    unlockings: Arc<Unlockings>,
    ino: Ino,
    owner: u64,
    leftover: Option<Leftover>,
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Some(l) = &self.leftover {
            *l.0.lock() = Some(self.unlockings.begin(self.ino, self.owner));
        }
    }
}

/// The same list, with read locks in place of write locks.
fn weakened(mut ops: Vec<pb::Op>) -> Vec<pb::Op> {
    for o in &mut ops {
        if let Some(pb::op::Op::SetLock(pb::SetLock { span: Some(span), .. })) = &mut o.op
            && span.r#type == LockType::LockWrite as i32
        {
            span.set_type(LockType::LockRead);
        }
    }
    ops
}

/// File locks between all clients: [`crate::Client::locks`].
#[derive(Clone, Copy)]
pub struct Locks<'a> {
    pub(crate) core: &'a Arc<Core>,
}

impl<'a> Locks<'a> {
    /// The first lock of another owner that is in the way of this one, if any.
    pub async fn get(self, ino: Ino, lock: &Lock) -> Result<Option<Holder>> {
        let (owner, kind, span) = (lock.owner, lock.kind as i32, Some(lock.span()));
        let get = op(pb::op::Op::GetLock(pb::GetLock { ino, owner, kind, span }));
        let found = ok(self.core.metadata.meta(&pb::Creds::default(), vec![get]).await?)?
            .pop()
            .and_then(|r| r.lock);
        let own = self.core.metadata.current_session().map_or(0, |s| s.id);
        Ok(found.and_then(|l| {
            let s = l.spans.first()?;
            let mode = LockType::try_from(s.r#type).ok()?;
            Some(Holder {
                mode,
                start: s.start,
                end: s.end,
                pid: if l.session == own { s.pid } else { 0 },
            })
        }))
    }

    /// Locks or unlocks. Fails with `LockConflict` (`EAGAIN`) when another owner's lock is in the
    /// way and `wait` is false.
    ///
    /// With `wait` it returns when the lock is granted, however long that takes, or fails with
    /// `Deadlock` when waiting would never end. Dropping the future leaves everything as it was,
    /// with one exception: a write lock that the call was to change into a read lock may have
    /// become one. `NoLock` at a limit (see `docs/locks.md`). An unlock that fails with `TimedOut`
    /// or `NoSpc` continues in the background until it succeeds.
    pub async fn set(self, ino: Ino, lock: &Lock, wait: bool) -> Result<Locked> {
        if lock.mode == LockType::LockUnlock {
            return self.unlock(ino, lock).await;
        }
        if !wait {
            return self.try_lock(ino, lock, lock.take(ino, false, 0)).await.map(Given::take);
        }
        let full = |_| {
            Error::new(
                Code::NoLock,
                format!("{MAX_WAITS} programs of this mount wait for locks already"),
            )
        };
        let _one = self.core.locks.waits.try_acquire().map_err(full)?;
        self.wait(ino, lock).await
    }

    /// As [`Locks::set`] with `wait`.
    pub(crate) async fn wait(self, ino: Ino, lock: &Lock) -> Result<Locked> {
        let conflict = |r: &Result<Given>| r.as_ref().is_err_and(|e| e.code == Code::LockConflict);
        let mut given = self.try_lock(ino, lock, lock.take(ino, true, 0)).await;
        if conflict(&given) {
            let mut place =
                Place::new(&self.core.lock_waiters, ino, lock.owner, lock.kind, lock.span());
            while conflict(&given) {
                place.turn().await?;
                given = self.try_lock(ino, lock, lock.take(ino, true, place.id())).await;
            }
            place.done = given.is_ok();
        }
        given.map(Given::take)
    }

    fn try_lock(self, ino: Ino, lock: &'a Lock, take: pb::Op) -> BoxFuture<'a, Result<Given>> {
        Box::pin(async move {
            let (core, lock, leftover) = (self.core.clone(), *lock, Leftover::default());
            let unlockings = core.locks.unlockings.clone();
            let mut caller =
                Caller { unlockings, ino, owner: lock.owner, leftover: Some(leftover.clone()) };
            let asked = self
                .core
                .shared
                .detached(async move { core.try_lock(ino, &lock, take, leftover).await });
            let given = asked.await;
            caller.leftover = None;
            given
        })
    }

    async fn unlock(self, ino: Ino, lock: &Lock) -> Result<Locked> {
        self.give_up(ino, lock, self.unlocking(ino, lock.owner)).await
    }

    /// Unlocks what an owner gives up, beginning with this call, whether the future is awaited or
    /// not. It continues until it succeeds.
    pub fn give_up(
        self,
        ino: Ino,
        lock: &Lock,
        unlocking: Unlocking,
    ) -> impl Future<Output = Result<Locked>> + Send + use<> {
        let (tell, answer) = oneshot::channel();
        if can_spawn() {
            let (lock, kept) =
                (Lock { mode: LockType::LockUnlock, ..*lock }, Unlock::of(unlocking));
            self.core.spawn_unlock(ino, &lock, Some(tell), kept);
        }
        async { answer.await.map_err(|_| Error::new(Code::Io, "the client is being shut down"))? }
    }

    /// Announces that an owner is about to unlock. Until the result is dropped, callers that would
    /// be told of a conflict wait.
    pub fn unlocking(self, ino: Ino, owner: u64) -> Unlocking {
        self.core.locks.unlockings.begin(ino, owner)
    }

    /// Whether an owner is unlocking something in the file.
    pub fn is_unlocking(self, ino: Ino, owner: u64) -> bool {
        self.core.locks.unlockings.is_under_way(ino, owner)
    }

    /// The state of the unlocks of a file, to be compared with a later state.
    pub fn unlocks(self, ino: Ino) -> Unlocks {
        self.core.locks.unlockings.of(ino)
    }

    /// Returns when the servers know all unlocks of a file that are in progress now.
    pub async fn unlocked(self, ino: Ino) {
        self.core.locks.unlockings.done(ino).await;
    }

    /// Sets the component that knows which locks programs still hold. Returns `false` if one is set
    /// already.
    pub fn set_programs(self, programs: Arc<dyn Programs>) -> bool {
        let first = self.core.locks.programs.set(programs).is_ok();
        self.core.locks.has_programs.notify_waiters();
        first
    }
}

/// Without a runtime no task runs any more, and the session ends.
fn can_spawn() -> bool {
    tokio::runtime::Handle::try_current().is_ok()
}

/// The end of a file, after all dirty data was sent. Until this is dropped no other client appends:
/// it finds the lock taken. Where there is no lock, it asks for the size, and this client reports
/// none meanwhile.
pub(crate) struct End {
    placing: Option<OwnedMutexGuard<()>>,
    lock: Option<EndLock>,
    /// The session with which all this is lost.
    pub session: SessionId,
    pub size: u64,
}

/// This client's exclusive right to append to the file. Dropping it gives the right up.
struct EndLock {
    core: Arc<Core>,
    ino: Ino,
    /// Record for the next daemon of the mount, which gives the lock up.
    kept: Option<Arc<dyn FileRecord>>,
}

/// A client takes at most one such lock for each file at a time.
const END: Lock = Lock {
    kind: LockKind::LockAppend,
    owner: 0,
    mode: LockType::LockWrite,
    start: 0,
    end: u64::MAX,
    pid: 0,
};

impl Drop for EndLock {
    fn drop(&mut self) {
        self.core.unlock_end(self.ino, self.kept.take());
    }
}

type Tell = oneshot::Sender<Result<Locked>>;

/// Kept until an unlock is done.
#[derive(Default)]
struct Unlock {
    _unlocking: Option<Unlocking>,
    _inode: Option<Arc<dyn FileRecord>>,
}

impl Unlock {
    fn of(unlocking: Unlocking) -> Unlock {
        Unlock { _unlocking: Some(unlocking), ..Unlock::default() }
    }
}

fn locked(r: Vec<pb::OpResult>) -> Result<(Locked, Vec<pb::LockSpan>)> {
    let l = r.into_iter().next_back().and_then(|r| r.lock);
    let l = l.ok_or_else(|| {
        Error::new(Code::Protocol, "the metadata server's answer does not say what it locked")
    })?;
    Ok((Locked { session: l.session, left: l.left }, l.spans))
}

impl Core {
    /// Takes the end of the file for an append. No request is needed while no other client may
    /// write the file.
    pub(crate) async fn lock_end(self: &Arc<Self>, inode: &Arc<Inode>) -> Result<End> {
        let placing = inode.placing.clone().lock_owned().await;
        self.writeback.send_held(inode).await;
        let session = self.metadata.current_session().map_or(0, |s| s.id);
        // One lookup for both: that no other client may write, and the size.
        if let Some((size, _)) = self.files.known_size(inode) {
            return Ok(End { placing: Some(placing), lock: None, session, size });
        }
        // Release this first: other clients may be asked for reports, and may wait for a report
        // from here. A holder of the lock does not have to keep others from the size.
        drop(placing);
        let kept = inode.openings.note_end();
        let Locked { session, .. } = Locks { core: self }.set(inode.ino, &END, true).await?;
        let lock = EndLock { core: self.clone(), ino: inode.ino, kept };
        self.writeback.send_held(inode).await;
        let size = self.files.fresh_size(inode).await?;
        Ok(End { placing: None, lock: Some(lock), session, size })
    }

    /// For an append that takes long: other clients are told the size again, and still no other
    /// client appends. Returns false where another client has the lock; then the end is no longer
    /// kept.
    pub(crate) async fn lock_end_now(self: &Arc<Self>, inode: &Arc<Inode>, end: &mut End) -> bool {
        if end.lock.is_some() {
            return true;
        }
        let kept = inode.openings.note_end();
        let locked = Locks { core: self }.set(inode.ino, &END, false).await;
        let is_same = locked.is_ok_and(|l| {
            end.lock = Some(EndLock { core: self.clone(), ino: inode.ino, kept });
            l.session == end.session
        });
        end.placing = None;
        is_same
    }

    /// Releases the lock of an append, if there is one. `kept` is held until then.
    pub(crate) fn unlock_end(self: &Arc<Self>, ino: Ino, kept: Option<Arc<dyn FileRecord>>) {
        if can_spawn() {
            let kept = Unlock { _inode: kept, ..Unlock::default() };
            self.spawn_unlock(ino, &Lock { mode: LockType::LockUnlock, ..END }, None, kept);
        }
    }

    /// Another client is about to be told of a conflict. Returns when this client holds no lock of
    /// the file that no program holds any more.
    pub(crate) async fn check_locks(&self, ino: Ino) {
        // The programs of a mount become known a moment after its client has connected.
        while self.shared.cfg.handover.is_some() && self.locks.programs.get().is_none() {
            let _ = tokio::time::timeout(
                Duration::from_millis(100),
                self.locks.has_programs.notified(),
            )
            .await;
            if self.shared.is_closed() {
                return;
            }
        }
        if let Some(programs) = self.locks.programs.get() {
            programs.settled().await;
        }
        self.locks.unlockings.done(ino).await;
    }

    fn spawn_unlock(self: &Arc<Self>, ino: Ino, lock: &Lock, tell: Option<Tell>, kept: Unlock) {
        let (core, lock, lane) = (self.clone(), *lock, self.locks.enter(ino, lock.owner));
        self.shared.env.spawn(async move {
            let _lane = lane.await;
            let session = core.metadata.current_session().map_or(0, |s| s.id);
            let _ = core.surely(session, &[lock.set(ino)], tell).await;
            drop(kept);
        });
    }

    /// One request for a lock; it runs to its end.
    async fn try_lock(
        self: Arc<Self>,
        ino: Ino,
        lock: &Lock,
        take: pb::Op,
        leftover: Leftover,
    ) -> Result<Given> {
        let lane = self.locks.enter(ino, lock.owner).await;
        let unlock = Lock { mode: LockType::LockUnlock, ..*lock };
        let mut tries = TRIES;
        let given = loop {
            tries -= 1;
            match self
                .metadata
                .meta(&pb::Creds::default(), vec![take.clone()])
                .await
                .and_then(ok)
                .and_then(locked)
            {
                // The lock that was in the way may be released by now.
                Err(e) if e.code == Code::Overloaded && tries > 0 => {}
                r => break r,
            }
        };
        let (locked, before) = match given {
            // The request may have run: it is better to release the lock than to hold one that its
            // owner does not know of.
            Err(e) if in_doubt(&e) => {
                let (core, session) =
                    (self.clone(), self.metadata.current_session().map_or(0, |s| s.id));
                let unlocking = self.locks.unlockings.begin(ino, lock.owner);
                self.shared.env.spawn(async move {
                    let _ = core.surely(session, &[unlock.set(ino)], None).await;
                    drop((lane, unlocking, leftover));
                });
                return Err(e);
            }
            r => r?,
        };
        let mut undo = vec![unlock.set(ino)];
        for s in before {
            // The type is unknown to this version: assume the more exclusive one.
            let mode = LockType::try_from(s.r#type).unwrap_or(LockType::LockWrite);
            undo.push(Lock { mode, start: s.start, end: s.end, pid: s.pid, ..*lock }.set(ino));
        }
        Ok(Given { core: self, ino, owner: lock.owner, undo, locked, lane: Some(lane), leftover })
    }

    /// Runs a list that releases locks. It continues after the caller was told that it takes too
    /// long. Locks of a lost session are released already.
    async fn surely(
        self: &Arc<Self>,
        session: SessionId,
        ops: &[pb::Op],
        mut tell: Option<Tell>,
    ) -> Result<Locked> {
        loop {
            let r = self
                .metadata
                .meta(&pb::Creds::default(), ops.to_vec())
                .await
                .and_then(ok)
                .and_then(locked)
                .map(|l| l.0);
            // A server whose log cannot be written refuses unlocks, too, until there is space.
            let again = r.as_ref().is_err_and(|e| in_doubt(e) || e.code == Code::NoSpc);
            if let Some(tell) = tell.take() {
                let _ = tell.send(r.clone());
            }
            let lost = self.metadata.current_session().is_none_or(|s| s.id != session);
            if !again || lost || self.shared.is_closed() {
                return r;
            }
            tracing::warn!("a lock could not be given up yet");
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}
