//! Clients that lock, wait, stop waiting, unlock, and close. Two checks. No two clients may have a
//! conflicting lock: if an unlock is answered for the session that took the lock, its owner had the
//! lock until then, and no other may have got it meanwhile. And no client may be told of a conflict
//! with a lock that nobody had any more: an owner that closes has its locks no longer, even if its
//! unlock is sent later, when the next owner in its place has locks again.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, Lock, LockKind, LockType, Locked};
use strake_mds::leases::rows::Checking;
use strake_proto::{Code, Error, Ino, Result, SessionId};
use tokio::time::{sleep, timeout};

use crate::workload::{Shared, root};

pub const FILES: usize = 2;
const CELLS: u64 = 8;
const CELL: u64 = 100;
const OWNERS: u64 = 3;
/// After the faults every lock that was given up must become free within this time.
const SETTLED: Duration = Duration::from_secs(120);

/// How long the unlock of a close is held back, at most.
const HELD_BACK_MS: u64 = 300;

/// File, whether it is an flock, client, owner.
type Who = (usize, bool, u32, u64);

#[derive(Clone, Copy)]
struct Held {
    write: bool,
    session: SessionId,
    /// Another owner that was told that it has a conflicting lock meanwhile.
    doubted: Option<(u32, u64)>,
}

/// Which locks each owner was told that it has, by cells.
#[derive(Default)]
pub struct LockModel {
    held: BTreeMap<Who, BTreeMap<u64, Held>>,
    /// Owners whose locks are not known after an error.
    unknown: Vec<Who>,
    /// The cells that each owner may have, and whether for writing, from the moment it asked for
    /// them.
    may_have: BTreeMap<(Who, u64), (bool, Until)>,
    /// A counter of events, used as time.
    now: u64,
}

/// The time until which an owner may have had a cell; `None`: it may still have it.
type Until = Option<u64>;

impl LockModel {
    /// `who` was told that it has these cells.
    fn given(&mut self, who: Who, cells: std::ops::Range<u64>, write: bool, session: SessionId) {
        for (other, theirs) in self.held.iter_mut() {
            if (other.0, other.1) != (who.0, who.1) || (other.2, other.3) == (who.2, who.3) {
                continue;
            }
            for (_, h) in theirs.range_mut(cells.clone()).filter(|(_, h)| h.write || write) {
                h.doubted = h.doubted.or(Some((who.2, who.3)));
            }
        }
        let mine = self.held.entry(who).or_default();
        mine.extend(cells.map(|c| (c, Held { write, session, doubted: None })));
    }

    /// `who` asks for these cells.
    fn asks(&mut self, who: Who, cells: std::ops::Range<u64>, write: bool) -> u64 {
        self.now += 1;
        for c in cells {
            let (w, until) = self.may_have.entry((who, c)).or_insert((write, None));
            (*w, *until) = (*w || write, None);
        }
        self.now
    }

    /// From now on no other owner can see a lock of `who` on these cells.
    fn has_not(&mut self, who: Who, cells: std::ops::Range<u64>) {
        self.now += 1;
        for c in cells {
            if let Some((_, until)) = self.may_have.get_mut(&(who, c)) {
                *until = until.or(Some(self.now));
            }
        }
    }

    /// Whether another owner may have had a conflicting lock at some time after `since`.
    fn was_in_the_way(
        &self,
        who: Who,
        cells: &std::ops::Range<u64>,
        write: bool,
        since: u64,
    ) -> bool {
        self.may_have.iter().any(|((other, c), (w, until))| {
            (other.0, other.1) == (who.0, who.1)
                && (other.2, other.3) != (who.2, who.3)
                && cells.contains(c)
                && (*w || write)
                && until.is_none_or(|u| u > since)
        })
    }

    /// Before an unlock is sent: takes these cells from `who`, and returns the locks that it had
    /// there.
    fn giving_up(&mut self, who: Who, cells: std::ops::Range<u64>) -> Vec<Held> {
        let Some(mine) = self.held.get_mut(&who) else { return Vec::new() };
        cells.filter_map(|c| mine.remove(&c)).collect()
    }

    /// A request of `who` failed: it may have in these cells only what it was given before.
    fn keeps(&mut self, who: Who, cells: &std::ops::Range<u64>) {
        if self.unknown.contains(&who) {
            return;
        }
        self.now += 1;
        for c in cells.clone() {
            let has = self.held.get(&who).is_some_and(|m| m.contains_key(&c));
            if let Some((_, until)) = self.may_have.get_mut(&(who, c)).filter(|_| !has) {
                *until = until.or(Some(self.now));
            }
        }
    }

    /// `who` closes the file. Returns whether there may be something to unlock.
    fn closes(&mut self, who: Who) -> bool {
        let asked = self.may_have.range((who, 0)..=(who, CELLS)).next().is_some();
        self.has_not(who, 0..CELLS);
        asked
    }

    /// After an unlock in this session: another owner that had one of these locks at the same time,
    /// if any.
    fn overlap(given_up: &[Held], session: SessionId) -> Option<(u32, u64)> {
        given_up.iter().filter(|h| h.session == session).find_map(|h| h.doubted)
    }
}

pub type Model = Arc<Mutex<LockModel>>;

/// One client that locks.
pub struct Locker {
    pub id: u32,
    pub client: Client,
    pub rng: StdRng,
    pub found: Shared,
    pub model: Model,
    pub files: [Ino; FILES],
    /// The owner number that each place has now.
    places: [u64; OWNERS as usize],
}

fn lock(flock: bool, owner: u64, mode: LockType, cells: &std::ops::Range<u64>) -> Lock {
    let kind = if flock { LockKind::LockFlock } else { LockKind::LockPosix };
    let all = cells.end == CELLS;
    let (start, end) = (cells.start * CELL, if all { u64::MAX } else { cells.end * CELL - 1 });
    Lock { kind, owner, mode, start, end, pid: owner as u32 }
}

/// The files to be locked.
pub async fn files(client: &Client) -> Result<[Ino; FILES]> {
    let mut out = [0; FILES];
    for (n, ino) in out.iter_mut().enumerate() {
        let name = format!("locked{n}");
        *ino = match client.lookup(&root(), client.root(), name.as_bytes()).await {
            Err(e) if e.code == Code::NoEnt => {
                client.mknod(&root(), client.root(), name.as_bytes(), 0o100_644, 0).await?.ino
            }
            r => r?.ino,
        };
    }
    Ok(out)
}

impl Locker {
    pub fn new(
        id: u32,
        client: Client,
        seed: u64,
        found: Shared,
        model: Model,
        files: [Ino; FILES],
    ) -> Locker {
        let places = std::array::from_fn(|n| n as u64);
        Locker { id, client, rng: StdRng::seed_from_u64(seed), found, model, files, places }
    }

    pub async fn run(mut self, stop: Arc<AtomicBool>) -> Locker {
        while !stop.load(Ordering::Relaxed) {
            let (file, flock) = (self.rng.random_range(0..FILES), self.rng.random_bool(0.3));
            let place = self.rng.random_range(0..OWNERS as usize);
            let who = (file, flock, self.id, self.places[place]);
            let (a, b) = (self.rng.random_range(0..CELLS), self.rng.random_range(1..=CELLS));
            let cells = if flock { 0..CELLS } else { a.min(b - 1)..b.max(a + 1) };
            match self.rng.random_range(0..10) {
                0..=3 => self.unlock(who, cells).await,
                4..=5 => self.close(who, place),
                6 => self.ask(who, &cells).await,
                _ => self.lock(who, cells).await,
            }
            sleep(Duration::from_millis(self.rng.random_range(0..60))).await;
        }
        self
    }

    async fn ask(&mut self, who: Who, cells: &std::ops::Range<u64>) {
        let l = lock(who.1, who.3, LockType::LockWrite, cells);
        if let Err(e) = self.client.locks().get(self.files[who.0], &l).await {
            tracing::info!("client {}: who is in the way: {e:?}", self.id);
        }
    }

    async fn lock(&mut self, who: Who, cells: std::ops::Range<u64>) {
        let write = self.rng.random_bool(0.5);
        let mode = if write { LockType::LockWrite } else { LockType::LockRead };
        let (l, wait) = (lock(who.1, who.3, mode, &cells), self.rng.random_bool(0.5));
        if !write {
            // A write lock may turn into the read lock as soon as that is asked for.
            let mut model = self.model.lock();
            let mine =
                model.held.get_mut(&who).into_iter().flat_map(|m| m.range_mut(cells.clone()));
            mine.for_each(|(_, h)| h.write = false);
        }
        let patience = Duration::from_millis(self.rng.random_range(0..1_000));
        let (since, unanswered) = (self.model.lock().asks(who, cells.clone(), write), unanswered());
        let setting = self.set_lock(self.files[who.0], &l, wait);
        // A wait that is given up gets no lock, at whatever moment it ends.
        let result = if wait { timeout(patience, setting).await } else { Ok(setting.await) };
        match result {
            Ok(Ok(locked)) => {
                self.model.lock().given(who, cells, write, locked.session);
                self.found.lock().locks += 1;
            }
            Ok(Err(e)) if matches!(e.code, Code::LockConflict | Code::Deadlock) => {
                let was = self.model.lock().was_in_the_way(who, &cells, write, since);
                if e.code == Code::LockConflict && !was && unanswered == self::unanswered() {
                    let m = format!("{who:?} was told of a lock on {cells:?} that nobody had: {e}");
                    self.found.lock().broken(m);
                }
                self.model.lock().keeps(who, &cells);
            }
            Ok(Err(e)) => {
                tracing::info!("client {}: locking: {e:?}", self.id);
                let mut model = self.model.lock();
                model.giving_up(who, cells);
                model.unknown.push(who);
            }
            Err(_) => {
                self.model.lock().keeps(who, &cells);
                self.found.lock().waits_given_up += 1;
            }
        }
    }

    /// As a mount does: before it tells a program of a conflict, it waits for unlocks of its own
    /// client that are still on the way, and tries again.
    async fn set_lock(&self, ino: Ino, l: &Lock, wait: bool) -> Result<Locked> {
        let before = self.client.locks().unlocks(ino);
        let locked = self.client.locks().set(ino, l, wait).await;
        if wait || !locked.as_ref().is_err_and(|e| e.code == Code::LockConflict) {
            return locked;
        }
        self.client.locks().unlocked(ino).await;
        if before.ended_since(self.client.locks().unlocks(ino)) {
            self.client.locks().set(ino, l, wait).await
        } else {
            locked
        }
    }

    /// The owner closes, and another owner takes its place, before its unlock is sent.
    fn close(&mut self, who: Who, place: usize) {
        let numbers: Vec<Who> = {
            let mut model = self.model.lock();
            let mine =
                (0..FILES).flat_map(|file| [false, true].map(|flock| (file, flock, who.2, who.3)));
            mine.filter(|w| model.closes(*w)).collect()
        };
        self.places[place] += OWNERS;
        for w in numbers {
            let had = self.model.lock().giving_up(w, 0..CELLS);
            let (client, found, ino) = (self.client.clone(), self.found.clone(), self.files[w.0]);
            let held_back = Duration::from_millis(self.rng.random_range(0..HELD_BACK_MS));
            let unlocking = client.locks().unlocking(ino, w.3);
            tokio::spawn(async move {
                sleep(held_back).await;
                let l = lock(w.1, w.3, LockType::LockUnlock, &(0..CELLS));
                if let Ok(locked) = client.locks().give_up(ino, &l, unlocking).await
                    && let Some(other) = LockModel::overlap(&had, locked.session)
                {
                    let m = format!(
                        "{w:?}, closed, and client {} owner {} had the same lock",
                        other.0, other.1
                    );
                    found.lock().broken(m);
                }
            });
        }
    }

    async fn unlock(&mut self, who: Who, cells: std::ops::Range<u64>) {
        let had = self.model.lock().giving_up(who, cells.clone());
        let l = lock(who.1, who.3, LockType::LockUnlock, &cells);
        match self.client.locks().set(self.files[who.0], &l, false).await {
            Ok(locked) => {
                self.model.lock().has_not(who, cells);
                if let Some(other) = LockModel::overlap(&had, locked.session) {
                    let m = format!(
                        "{who:?} and client {} owner {} had the same lock",
                        other.0, other.1
                    );
                    self.found.lock().broken(m);
                }
            }
            Err(e) => {
                tracing::info!("client {}: unlocking: {e:?}", self.id);
                self.model.lock().unknown.push(who);
            }
        }
    }

    /// Gives up all locks that it knows of or is unsure of.
    pub async fn finish(mut self) {
        let mine: Vec<Who> = {
            let model = self.model.lock();
            let held =
                model.held.iter().filter(|(_, cells)| !cells.is_empty()).map(|(who, _)| *who);
            held.chain(model.unknown.iter().copied()).filter(|who| who.2 == self.id).collect()
        };
        for who in mine {
            self.unlock(who, 0..CELLS).await;
        }
    }
}

/// How often a lock holder was not asked, or did not answer. A lock that was reported as held may
/// then be gone.
fn unanswered() -> u64 {
    let rows = Checking::counts();
    rows.iter()
        .filter(|(name, _)| matches!(*name, "lock-not-asked" | "lock-given-up"))
        .map(|(_, n)| n)
        .sum()
}

/// Nobody holds a lock any more except dead clients: `other` must get every lock, after a wait.
pub async fn all_free(other: &Client, inos: &[Ino]) -> Result<()> {
    for ino in inos {
        for flock in [false, true] {
            let l = lock(flock, 1, LockType::LockWrite, &(0..CELLS));
            let got = timeout(SETTLED, other.locks().set(*ino, &l, true)).await;
            let m = format!("a lock of inode {ino} (flock {flock}) that nobody has cannot be had");
            got.map_err(|_| Error::new(Code::TimedOut, m))??;
            other.locks().set(*ino, &Lock { mode: LockType::LockUnlock, ..l }, false).await?;
        }
    }
    Ok(())
}

/// Takes locks on a file of its own, for a client that will be killed.
pub async fn last_will(client: &Client, name: &str) -> Result<()> {
    let name = format!("{name}.lock");
    let ino = client.mknod(&root(), client.root(), name.as_bytes(), 0o100_644, 0).await?.ino;
    for flock in [false, true] {
        client.locks().set(ino, &lock(flock, 9, LockType::LockWrite, &(0..CELLS)), false).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_nobody_had_is_found() {
        let mut m = LockModel::default();
        let (a, b) = ((0, false, 1, 1), (0, false, 2, 1));
        m.asks(a, 0..4, true);
        let since = m.asks(b, 2..6, false);
        assert!(
            m.was_in_the_way(b, &(2..6), false, since)
                && !m.was_in_the_way(b, &(4..6), false, since)
        );
        assert!(m.closes(a) && !m.closes((1, false, 1, 1)));
        assert!(m.was_in_the_way(b, &(2..6), false, since), "it closed since");
        let since = m.asks(b, 2..6, false);
        assert!(!m.was_in_the_way(b, &(2..6), false, since));
        // A refused request leaves the locks that were given before.
        m.given(b, 2..3, false, 72);
        m.keeps(b, &(2..6));
        let since = m.asks(a, 2..6, true);
        assert!(
            m.was_in_the_way(a, &(2..3), true, since) && !m.was_in_the_way(a, &(3..6), true, since)
        );
    }

    #[test]
    fn two_who_had_the_same_are_found() {
        let mut m = LockModel::default();
        let (a, b) = ((0, false, 1, 1), (0, false, 2, 1));
        m.given(a, 0..4, true, 71);
        m.given(b, 4..8, true, 72);
        assert_eq!(LockModel::overlap(&m.giving_up(a, 0..4), 71), None);
        m.given(a, 0..4, false, 71);
        m.given(b, 0..1, false, 72);
        m.given((1, false, 3, 1), 0..8, true, 73);
        m.given((0, true, 3, 1), 0..8, true, 73);
        assert_eq!(
            LockModel::overlap(&m.giving_up(a, 0..2), 71),
            None,
            "readers, another file, another kind"
        );
        m.given(b, 3..4, true, 72);
        let had = m.giving_up(a, 0..8);
        assert_eq!(LockModel::overlap(&had, 99), None, "it was lost with its session");
        assert_eq!(LockModel::overlap(&had, 71), Some((2, 1)));
    }
}
