//! File locks as the kernel asks for them. `docs/locks.md` has the rules; what is kept here is which owner took locks
//! through which handles, so that closing a file without locks costs nothing and none stays behind.

use std::{
    collections::BTreeMap,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use parking_lot::Mutex;
use strake_client::{Client, Holder, Keep, Lock, LockKind, LockType};
use strake_fabric::Record;
use strake_proto::{Code, Error, Ino, Result, SessionId};

use super::{OpenFile, Vfs, restart::keep_owner};

/// The largest offset the kernel knows; a lock to there is one to the end of the file.
const OFFSET_MAX: u64 = i64::MAX as u64;

/// All of an owner's locks in a file.
type Key = (Ino, bool, u64);

fn key(ino: Ino, kind: LockKind, owner: u64) -> Key {
    (ino, kind == LockKind::LockFlock, owner)
}

/// Owners with locks, and the handles through which they took them.
#[derive(Default)]
pub(super) struct Owners {
    all: Mutex<BTreeMap<Key, BTreeMap<u64, Option<Record>>>>,
    keep: Option<Arc<Keep>>,
}

impl Owners {
    /// With `keep` the next daemon knows them too.
    pub(super) fn new(keep: Option<Arc<Keep>>) -> Owners {
        Owners { all: Mutex::default(), keep }
    }

    fn took(&self, key: Key, handle: u64) {
        let record = || self.keep.as_ref().and_then(|k| keep_owner(k, key, handle));
        self.all.lock().entry(key).or_default().entry(handle).or_insert_with(record);
    }

    fn has(&self, key: Key) -> bool {
        self.all.lock().contains_key(&key)
    }

    /// The owner has no lock there any more. Which handles have none left of anybody.
    fn gave_up(&self, key: Key) -> Vec<u64> {
        let mut all = self.all.lock();
        let handles = all.remove(&key).unwrap_or_default();
        let of_file = |handle: &u64| {
            let (first, last) = ((key.0, false, 0), (key.0, true, u64::MAX));
            all.range(first..=last).any(|(_, h)| h.contains_key(handle))
        };
        handles.into_keys().filter(|h| !of_file(h)).collect()
    }

    /// The handle goes: owners that have locks through it alone.
    fn closed(&self, ino: Ino, handle: u64) -> Vec<Key> {
        let mut all = self.all.lock();
        let of_file = all.range_mut((ino, false, 0)..=(ino, true, u64::MAX));
        of_file.filter_map(|(key, h)| (h.remove(&handle).is_some() && h.is_empty()).then_some(*key)).collect()
    }
}

/// The kernel's range, whose ends are the largest offset when there is none.
fn read(lock: &Lock) -> Lock {
    let end = if lock.kind == LockKind::LockFlock || lock.end >= OFFSET_MAX { u64::MAX } else { lock.end };
    Lock { start: if lock.kind == LockKind::LockFlock { 0 } else { lock.start }, end, ..*lock }
}

/// Owners that give up all they have in a file. A dying process's request is not waited for; so what was not asked for when
/// this is dropped is asked for then.
pub(super) struct Leaving {
    client: Client,
    keys: Vec<Key>,
}

impl Leaving {
    /// Returns when nobody has them any more.
    pub(super) async fn give_up(mut self) -> Result<()> {
        let mut outcome = Ok(());
        while let Some((ino, lock)) = self.next() {
            outcome = outcome.and(self.client.set_lock(ino, &lock, false).await.map(drop));
        }
        outcome
    }

    fn next(&mut self) -> Option<(Ino, Lock)> {
        let (ino, flock, owner) = self.keys.pop()?;
        let kind = if flock { LockKind::LockFlock } else { LockKind::LockPosix };
        Some((ino, Lock { kind, owner, mode: LockType::LockUnlock, start: 0, end: u64::MAX, pid: 0 }))
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        while let Some((ino, lock)) = self.next() {
            self.client.unlock_later(ino, &lock);
        }
    }
}

impl Vfs {
    /// `F_GETLK`: the first lock in the way of this one. Its `end` is the kernel's largest offset for one to the end.
    pub async fn getlk(&self, handle: u64, lock: &Lock) -> Result<Option<Holder>> {
        let ino = self.files.get(handle)?.ino;
        let found = self.client.get_lock(ino, &read(lock)).await?;
        Ok(found.map(|h| Holder { start: h.start.min(OFFSET_MAX), end: h.end.min(OFFSET_MAX), ..h }))
    }

    /// `F_SETLK`, `F_SETLKW` (`wait`), their open-file-description kin, and flock(2). `lock.end` may be the kernel's
    /// largest offset. `LockConflict` is the program's `EAGAIN`.
    ///
    /// Waits as long as it takes. Dropping the future (the program was interrupted: `EINTR`) leaves nothing behind.
    /// To be called without the room that other requests share: those who wait have a limit of their own.
    pub async fn setlk(&self, handle: u64, lock: &Lock, wait: bool) -> Result<()> {
        let open = self.files.get(handle)?;
        let lock = read(lock);
        let key = key(open.ino, lock.kind, lock.owner);
        if lock.mode != LockType::LockUnlock {
            // Noted before it is asked for, and kept whatever is answered: should the answer be lost with this daemon, the
            // next one still gives it up when the owner closes the file.
            self.owners.took(key, handle);
        }
        let locked = self.client.set_lock(open.ino, &lock, wait).await?;
        // No other await from here on: a dropped future has either told nobody or noted everything.
        if locked.left == 0 {
            self.unlocked(key);
        } else if lock.mode != LockType::LockUnlock {
            self.owners.took(key, handle);
            let _ = open.locked_in.compare_exchange(0, locked.session, Relaxed, Relaxed);
        }
        Ok(())
    }

    /// The owner has nothing there any more, or is about to.
    fn unlocked(&self, key: Key) {
        for handle in self.owners.gave_up(key) {
            if let Ok(open) = self.files.get(handle) {
                open.locked_in.store(0, Relaxed);
            }
        }
    }

    /// close(2) of a descriptor by `owner`: its POSIX locks on the file.
    pub(super) fn closing(&self, ino: Ino, owner: u64) -> Leaving {
        let key = key(ino, LockKind::LockPosix, owner);
        let keys = if self.owners.has(key) { vec![key] } else { Vec::new() };
        keys.iter().for_each(|key| self.unlocked(*key));
        Leaving { client: self.client.clone(), keys }
    }

    /// Whether [`Vfs::closing`] finds nothing.
    pub(super) fn has_no_locks(&self, ino: Ino, owner: u64) -> bool {
        !self.owners.has(key(ino, LockKind::LockPosix, owner))
    }

    /// The handle's last close: its flock, and what was locked through it alone and is still there.
    pub(super) fn released(&self, handle: u64, ino: Ino) -> Leaving {
        let keys = self.owners.closed(ino, handle);
        keys.iter().for_each(|key| self.unlocked(*key));
        Leaving { client: self.client.clone(), keys }
    }

    /// Goes on with what an owner took through a handle of a former daemon of the same mount, in `session`, whose the
    /// locks are.
    pub(super) fn adopt_lock(&self, key: Key, handle: u64, session: SessionId, kept: Record) {
        self.owners.all.lock().entry(key).or_default().insert(handle, Some(kept));
        if let Ok(open) = self.files.get(handle) {
            open.locked_in.store(session, Relaxed);
        }
    }
}

impl OpenFile {
    /// `EIO` for a file whose locks were lost with the session that had them.
    pub(super) fn check_locks(&self, vfs: &Vfs) -> Result<()> {
        if !self.lost_locks(vfs) {
            return Ok(());
        }
        let m = "the locks taken through this open file are lost: the metadata servers gave this client up; close it";
        Err(Error::new(Code::Io, m))
    }

    pub(super) fn lost_locks(&self, vfs: &Vfs) -> bool {
        let session = self.locked_in.load(Relaxed);
        session != 0 && session != vfs.client.session()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_go_with_their_last_handle_or_by_their_own() {
        let o = Owners::default();
        let (posix, ofd, flock) = ((5, false, 1), (5, false, 77), (5, true, 77));
        o.took(posix, 1);
        o.took(posix, 2);
        o.took(ofd, 2);
        o.took(flock, 2);
        o.took((6, false, 1), 3);
        assert!(o.has(posix) && !o.has((5, false, 2)));
        assert_eq!(o.closed(5, 1), [], "the process may have locks through the other handle");
        assert_eq!(o.closed(5, 2), [posix, ofd, flock]);
        assert_eq!(o.gave_up(posix), Vec::<u64>::new());
        o.took(posix, 4);
        o.took(ofd, 4);
        assert_eq!(o.gave_up(ofd), Vec::<u64>::new(), "another owner has locks through it");
        assert_eq!(o.gave_up(posix), [4]);
        assert_eq!(o.closed(6, 3), [(6, false, 1)]);
    }

    #[test]
    fn the_kernels_end_of_file_is_ours() {
        let l =
            Lock { kind: LockKind::LockPosix, owner: 1, mode: LockType::LockRead, start: 5, end: OFFSET_MAX, pid: 1 };
        assert_eq!((read(&l).start, read(&l).end), (5, u64::MAX));
        assert_eq!(read(&Lock { end: 9, ..l }).end, 9);
        let flock = read(&Lock { kind: LockKind::LockFlock, end: 0, ..l });
        assert_eq!((flock.start, flock.end), (0, u64::MAX));
    }
}
