//! Unlocks, from the moment an owner releases something until the servers know it. Before a program
//! is told that another owner has a lock, the unlocks of the file are waited for. See
//! `docs/locks.md`.

use std::{any::Any, collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use strake_proto::Ino;
use tokio::sync::Notify;

const COUNTS: usize = 64;

/// The pure part: unlocks in progress, by rising numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Table {
    last: u64,
    /// Owners, by file and in the order in which their unlocks began.
    all: BTreeMap<(Ino, u64), u64>,
    /// How many unlocks began; several files share one count.
    begun: [u64; COUNTS],
}

impl Default for Table {
    fn default() -> Table {
        Table { last: 0, all: BTreeMap::new(), begun: [0; COUNTS] }
    }
}

impl Table {
    /// An owner begins to unlock. Returns a number for [`Table::end`].
    pub fn begin(&mut self, ino: Ino, owner: u64) -> u64 {
        self.last += 1;
        self.all.insert((ino, self.last), owner);
        self.begun[ino as usize % COUNTS] += 1;
        self.last
    }

    /// The unlock is done.
    pub fn end(&mut self, ino: Ino, number: u64) {
        self.all.remove(&(ino, number));
    }

    /// Whether an owner is unlocking something in the file.
    pub fn is_under_way(&self, ino: Ino, owner: u64) -> bool {
        self.all.range((ino, 0)..=(ino, u64::MAX)).any(|(_, o)| *o == owner)
    }

    /// The state of the unlocks of a file, to be compared with a later state.
    pub fn of(&self, ino: Ino) -> Unlocks {
        Unlocks {
            begun: self.begun[ino as usize % COUNTS],
            under_way: !self.is_done(ino, u64::MAX),
        }
    }

    /// The number of the last unlock that was begun.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Whether no unlock of the file up to number `last` is in progress.
    pub fn is_done(&self, ino: Ino, last: u64) -> bool {
        self.all.range((ino, 0)..=(ino, last)).next().is_none()
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Unlockings {
    table: Mutex<Table>,
    ended: Notify,
}

/// An unlock in progress. Dropping it says that the unlock is done.
pub struct Unlocking {
    of: Arc<Unlockings>,
    at: (Ino, u64),
    kept: Vec<Box<dyn Any + Send + Sync>>,
}

/// The unlocks of a file at one moment: how many began, and whether one is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Unlocks {
    begun: u64,
    under_way: bool,
}

impl Unlocks {
    /// Whether an unlock was in progress.
    pub fn under_way(&self) -> bool {
        self.under_way
    }

    /// Whether a conflict that was seen after this state may be over now.
    pub fn ended_since(&self, now: Unlocks) -> bool {
        self.under_way || now.begun != self.begun
    }
}

impl Unlockings {
    pub fn begin(self: &Arc<Self>, ino: Ino, owner: u64) -> Unlocking {
        let at = (ino, self.table.lock().begin(ino, owner));
        Unlocking { of: self.clone(), at, kept: Vec::new() }
    }

    pub fn is_under_way(&self, ino: Ino, owner: u64) -> bool {
        self.table.lock().is_under_way(ino, owner)
    }

    pub fn of(&self, ino: Ino) -> Unlocks {
        self.table.lock().of(ino)
    }

    /// Returns when all unlocks that are in progress now are done.
    pub async fn done(&self, ino: Ino) {
        let last = self.table.lock().last();
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            // Registers for notifications, so that no end is missed from here on.
            ended.as_mut().enable();
            if self.table.lock().is_done(ino, last) {
                return;
            }
            ended.await;
        }
    }
}

impl Unlocking {
    /// Adds records that the next process needs until the unlock is done.
    #[must_use]
    pub fn keeping(mut self, records: impl Any + Send + Sync) -> Unlocking {
        self.kept.push(Box::new(records));
        self
    }
}

impl Drop for Unlocking {
    fn drop(&mut self) {
        self.kept.clear();
        self.of.table.lock().end(self.at.0, self.at.1);
        self.of.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn those_of_before_are_waited_for_and_later_ones_are_not() {
        let all = Arc::new(Unlockings::default());
        let before = all.of(5);
        assert!(all.done(5).now_or_never().is_some() && !before.ended_since(all.of(5)));
        let (first, other) = (all.begin(5, 70), all.begin(6, 71));
        assert!(all.is_under_way(5, 70) && !all.is_under_way(5, 71) && !all.is_under_way(7, 70));
        assert!(before.ended_since(all.of(5)), "it may have had what was in the way");
        let mut done = Box::pin(all.done(5));
        assert!(done.as_mut().now_or_never().is_none());
        let later = all.begin(5, 72);
        let seen = all.of(5);
        drop(first);
        assert!(done.now_or_never().is_some());
        assert!(seen.ended_since(all.of(5)), "it was under way");
        drop((later, other));
        let seen = all.of(5);
        assert!(!seen.ended_since(all.of(5)) && all.done(5).now_or_never().is_some());
    }
}
