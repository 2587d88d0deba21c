//! File locks as the kernel requests them. The rules are in `docs/locks.md`.
//! [`Owners`](super::owners) knows which owner took locks through which handles, so that closing a
//! file without locks costs nothing and no lock stays behind.
//!
//! close(2) does not wait for its RELEASE, so a lock may exist a moment longer than its open file.
//! Before a program is told of a conflict, the requests that the kernel has queued are read
//! ([`Queue`]), and the locks that they end are released.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use parking_lot::Mutex;
use strake_client::{Client, Holder, Lock, LockKind, LockType, Programs, Unlocking};
use strake_proto::{Code, Ino, Result, SessionId};
use strake_runtime::Record;
use tokio::time::timeout;

use super::{
    base::Base,
    handles::Table,
    open_file::OpenFile,
    owners::{Around, Ended, Key, Outcome, Owners},
    records::{ending, keep_owner},
};

/// The largest offset that the kernel knows; a lock up to it goes to the end of the file.
const OFFSET_MAX: u64 = i64::MAX as u64;
/// How long to wait for the kernel's queue and for unlocks in progress before a conflict is
/// reported: both take milliseconds, unless servers are away.
const SETTLING: Duration = Duration::from_secs(2);

/// A boxed future without a result.
pub type Soon = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Requests that the kernel has sent and that [`Locks`] does not know yet.
pub trait Queue: Send + Sync {
    /// Returns when all closes that the kernel had queued before this call are noted.
    fn taken(&self) -> Soon;
}

/// Lets the client ask the queue.
struct Settle(Arc<dyn Queue>);

impl Programs for Settle {
    fn settled(&self) -> Soon {
        self.0.taken()
    }
}

fn key(ino: Ino, lock: &Lock, handle: u64) -> Key {
    if lock.kind == LockKind::LockFlock { (ino, true, handle) } else { (ino, false, lock.owner) }
}

/// The kernel's range; an end of the largest offset means the end of the file.
fn read(lock: &Lock) -> Lock {
    let end = if lock.kind == LockKind::LockFlock || lock.end >= OFFSET_MAX {
        u64::MAX
    } else {
        lock.end
    };
    Lock { start: if lock.kind == LockKind::LockFlock { 0 } else { lock.start }, end, ..*lock }
}

fn unlock_all(flock: bool, number: u64) -> Lock {
    let kind = if flock { LockKind::LockFlock } else { LockKind::LockPosix };
    Lock { kind, owner: number, mode: LockType::LockUnlock, start: 0, end: u64::MAX, pid: 0 }
}

/// Owners that release all their locks in a file. A dying process's request is not waited for, so
/// the releases that were not requested when this is dropped are requested then.
pub(crate) struct Leaving {
    client: Client,
    ended: Vec<Ended<Unlocking>>,
}

impl Leaving {
    pub fn is_empty(&self) -> bool {
        self.ended.is_empty()
    }

    /// Returns when all the locks are released.
    pub async fn give_up(mut self) -> Result<()> {
        let mut outcome = Ok(());
        while let Some(ended) = self.ended.pop() {
            outcome = outcome.and(self.one(ended).await.map(drop));
        }
        outcome
    }

    fn one(
        &self,
        e: Ended<Unlocking>,
    ) -> impl Future<Output = Result<strake_client::Locked>> + Send + use<> {
        self.client.locks().give_up(e.key.0, &unlock_all(e.key.1, e.number), e.guard)
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        while let Some(ended) = self.ended.pop() {
            drop(self.one(ended));
        }
    }
}

/// The locks of the files that the kernel has open, and the requests for them.
pub struct Locks {
    base: Arc<Base>,
    files: Arc<Table<OpenFile>>,
    owners: Mutex<Owners<Record>>,
    /// The queue that closes come from.
    queue: OnceLock<Arc<dyn Queue>>,
}

impl Around for Base {
    type Guard = Unlocking;
    type Record = Record;

    fn fresh(&self) -> u64 {
        self.numbering.next()
    }

    fn keep(&self, key: Key, handle: u64, number: u64) -> Option<Record> {
        keep_owner(self.keep.as_ref()?, key, handle, number)
    }

    fn is_ending(&self, ino: Ino, number: u64) -> bool {
        self.client.locks().is_unlocking(ino, number)
    }

    fn ends(&self, (ino, flock, _): Key, number: u64, records: Vec<Record>) -> Unlocking {
        records.iter().for_each(|r| ending(r, flock));
        self.client.locks().unlocking(ino, number).keeping(records)
    }
}

/// A request for a lock. If it is dropped before it has an outcome, it is undone.
struct Asking<'a> {
    locks: &'a Locks,
    key: Key,
    handle: u64,
    number: u64,
    outcome: Outcome,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.locks.owners.lock().asked(self.key, self.handle, self.number, self.outcome);
    }
}

impl Locks {
    pub(super) fn new(base: Arc<Base>, files: Arc<Table<OpenFile>>) -> Locks {
        Locks { base, files, owners: Mutex::default(), queue: OnceLock::new() }
    }

    /// Sets the queue that closes come from. Without one, only closes that are known already count.
    pub(crate) fn set_queue(&self, queue: Arc<dyn Queue>) {
        if self.queue.set(queue.clone()).is_ok() {
            self.base.client.locks().set_programs(Arc::new(Settle(queue)));
        }
    }

    /// Returns when all closes before this call are noted, or when that takes too long.
    async fn taken(&self) {
        if let Some(queue) = self.queue.get() {
            let _ = timeout(SETTLING, queue.taken()).await;
        }
    }

    /// `F_GETLK`: the first lock that conflicts with this one. An `end` of the kernel's largest
    /// offset means the end of the file.
    pub async fn getlk(&self, handle: u64, lock: &Lock) -> Result<Option<Holder>> {
        let ino = self.files.get(handle)?.ino;
        // Number 0 belongs to no owner.
        let owner = self.owners.lock().number(key(ino, lock, handle)).unwrap_or(0);
        let lock = Lock { owner, ..read(lock) };
        let ask = || self.base.client.locks().get(ino, &lock);
        let found = self.unless_over(ino, |found| matches!(found, Ok(Some(_))), ask).await?;
        Ok(found.map(|h| Holder {
            start: h.start.min(OFFSET_MAX),
            end: h.end.min(OFFSET_MAX),
            ..h
        }))
    }

    /// `F_SETLK`, `F_SETLKW` (`wait`), the same for open-file-description locks, and flock(2).
    /// `lock.end` may be the kernel's largest offset. `LockConflict` is the program's `EAGAIN`.
    ///
    /// Waits as long as it takes. Dropping the future (the program was interrupted: `EINTR`) leaves
    /// nothing behind. Call it without one of the places that other requests share: lock waiters
    /// have their own limit.
    pub async fn setlk(&self, handle: u64, lock: &Lock, wait: bool) -> Result<()> {
        let open = self.files.get(handle)?;
        let (ino, key) = (open.ino, key(open.ino, lock, handle));
        if lock.mode == LockType::LockUnlock {
            return self.unlock(key, &read(lock)).await;
        }
        let known = self.owners.lock().asks(key, handle, false, &*self.base);
        let number = match known {
            Some(number) => number,
            None => {
                self.taken().await;
                self.owners.lock().asks(key, handle, true, &*self.base).unwrap_or_default()
            }
        };
        let mut asking = Asking { locks: self, key, handle, number, outcome: Outcome::InDoubt };
        let lock = Lock { owner: number, ..read(lock) };
        let ask = || self.base.client.locks().set(ino, &lock, wait);
        let locked = if wait {
            // Closes that are not known yet end the wait once they are known.
            ask().await
        } else {
            self.unless_over(ino, |r| r.as_ref().is_err_and(|e| e.code == Code::LockConflict), ask)
                .await
        };
        // No other await from here on: a future that is dropped has either reported nothing or
        // noted everything.
        match &locked {
            Ok(locked) => {
                asking.outcome = Outcome::Holds;
                open.locked(locked.session);
            }
            Err(e) if matches!(e.code, Code::LockConflict | Code::Deadlock | Code::NoLock) => {
                asking.outcome = Outcome::Refused;
            }
            Err(_) => {}
        }
        locked.map(drop)
    }

    /// Asks. If the answer is a conflict, asks again after everything that programs had released
    /// before is released at the servers.
    async fn unless_over<T, F: Future<Output = T>>(
        &self,
        ino: Ino,
        is_conflict: impl Fn(&T) -> bool,
        ask: impl Fn() -> F,
    ) -> T {
        let settle = async {
            self.taken().await;
            let _ = timeout(SETTLING, self.base.client.locks().unlocked(ino)).await;
        };
        if self.base.client.locks().unlocks(ino).under_way() {
            let _ = timeout(SETTLING, self.base.client.locks().unlocked(ino)).await;
        }
        let before = self.base.client.locks().unlocks(ino);
        let answer = ask().await;
        if !is_conflict(&answer) {
            return answer;
        }
        settle.await;
        if before.ended_since(self.base.client.locks().unlocks(ino)) { ask().await } else { answer }
    }

    async fn unlock(&self, key: Key, lock: &Lock) -> Result<()> {
        // The owner never requested a lock in the file.
        let known = self.owners.lock().known(key);
        let Some(known) = known else { return Ok(()) };
        let locked = self
            .base
            .client
            .locks()
            .set(key.0, &Lock { owner: known.number, ..*lock }, false)
            .await?;
        if locked.left == 0 {
            let free = self.owners.lock().has_none(key, known);
            self.freed(free);
        }
        Ok(())
    }

    /// No owner has locks through these handles any more.
    fn freed(&self, handles: Vec<u64>) {
        for handle in handles {
            if let Ok(open) = self.files.get(handle) {
                open.unlocked();
            }
        }
    }

    fn leaving(&self, ended: Vec<Ended<Unlocking>>) -> Leaving {
        ended.iter().for_each(|e| self.freed(e.free.clone()));
        Leaving { client: self.base.client.clone(), ended }
    }

    /// close(2) of a descriptor by `owner`: releases its POSIX locks on the file.
    pub(super) fn closing(&self, ino: Ino, owner: u64) -> Leaving {
        let ended = self.owners.lock().gives_up((ino, false, owner), &*self.base);
        self.leaving(ended.into_iter().collect())
    }

    /// The handle's last close: releases its flock, and remaining locks that were taken only
    /// through it.
    pub(super) fn released(&self, handle: u64, ino: Ino) -> Leaving {
        let ended = self.owners.lock().closed(ino, handle, &*self.base);
        self.leaving(ended)
    }

    /// Takes over an owner's locks that were taken through a handle of an earlier daemon of this
    /// mount. They belong to `session`.
    pub(super) fn adopt(
        &self,
        key: Key,
        number: u64,
        handle: u64,
        session: SessionId,
        kept: Record,
    ) {
        self.owners.lock().adopt(key, number, handle, kept);
        if let Ok(open) = self.files.get(handle) {
            open.was_locked(session);
        }
    }

    /// Continues to release the locks of an owner that ended under an earlier daemon.
    pub(super) fn adopt_ending(&self, (ino, flock): (Ino, bool), number: u64, kept: Record) {
        let guard = self.base.client.locks().unlocking(ino, number).keeping(vec![kept]);
        drop(self.base.client.locks().give_up(ino, &unlock_all(flock, number), guard));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_end_of_file_is_ours() {
        let l = Lock {
            kind: LockKind::LockPosix,
            owner: 1,
            mode: LockType::LockRead,
            start: 5,
            end: OFFSET_MAX,
            pid: 1,
        };
        assert_eq!((read(&l).start, read(&l).end), (5, u64::MAX));
        assert_eq!(read(&Lock { end: 9, ..l }).end, 9);
        let flock = read(&Lock { kind: LockKind::LockFlock, end: 0, ..l });
        assert_eq!((flock.start, flock.end), (0, u64::MAX));
        assert_eq!((key(7, &l, 3), key(7, &flock, 3)), ((7, false, 1), (7, true, 3)));
    }
}
