//! Sessions that are asked to give page locks of memory mappings back, and writers that know that
//! others have some: the leader's part in "Between nodes" of `docs/mappings.md`. Pure.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use strake_proto::{Ino, SessionId};

use super::{Connection, Number, reports::Reports, rows::Paging};

/// Most files for which this remembers which writers were told.
const MOST_TOLD: usize = 65_536;

/// Writers that are being told that a session has page locks of a file now.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Telling(Vec<(SessionId, Option<Connection>, Number)>);

impl Telling {
    /// The sessions that are asked.
    pub fn sessions(&self) -> impl Iterator<Item = SessionId> + '_ {
        self.0.iter().map(|(id, ..)| *id)
    }

    /// Whether no session needs to be told.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pages {
    asked: Reports,
    /// Sessions that know, and may write the file.
    told: BTreeMap<Ino, BTreeSet<SessionId>>,
}

impl Pages {
    /// The table of the leader of `raft_term`: no session counts as told.
    pub fn new(raft_term: u64) -> Pages {
        Pages { asked: Reports::of_pages(raft_term), told: BTreeMap::new() }
    }

    /// A session got the lock. Asks the other sessions that may write the file and do not know yet.
    pub fn tell(
        &mut self,
        now: Duration,
        ino: Ino,
        others: impl Iterator<Item = SessionId>,
        connection: impl Fn(SessionId) -> Option<Connection>,
    ) -> Telling {
        let told = self.told.get(&ino);
        let new: Vec<_> = others.filter(|id| told.is_none_or(|told| !told.contains(id))).collect();
        let ask = |id| (id, connection(id), self.asked.ask(now, id, ino));
        let asked = Telling(new.into_iter().map(ask).collect());
        if asked.is_empty() {
            Paging::NobodyTold.taken()
        } else {
            Paging::WritersTold.taken()
        }
        asked
    }

    /// Whether all of them have answered, or no longer can.
    pub fn know(&self, telling: &Telling) -> bool {
        telling.0.iter().all(|(id, _, number)| self.asked.is_in(*id, *number))
    }

    /// Records that they have answered. `to`: the session with the lock, which knows by itself.
    pub fn told(
        &mut self,
        ino: Ino,
        to: SessionId,
        telling: &Telling,
        connection: impl Fn(SessionId) -> Option<Connection>,
    ) {
        // Sessions that are forgotten are told again.
        if self.told.len() >= MOST_TOLD {
            self.told.clear();
        }
        // A session with a new connection may be another process, which does not know.
        let same = telling.0.iter().filter(|(id, was, _)| connection(*id) == *was);
        let those: Vec<SessionId> = same.map(|(id, ..)| *id).chain([to]).collect();
        self.told.entry(ino).or_default().extend(those);
    }

    /// A waiter needs page locks that these sessions have: asks each, unless it was asked already.
    /// Returns those that are asked now.
    pub fn want(
        &mut self,
        now: Duration,
        ino: Ino,
        holders: &BTreeSet<SessionId>,
    ) -> Vec<SessionId> {
        let new: Vec<_> =
            holders.iter().copied().filter(|id| !self.asked.is_asked(*id, ino)).collect();
        new.iter().for_each(|id| {
            self.asked.ask(now, *id, ino);
        });
        new
    }

    /// The session has a new connection, and may be another process, which does not know.
    pub fn hello(&mut self, id: SessionId) {
        self.asked.ask_again(id);
        self.forget(id);
    }

    /// Nothing waits for the session any more.
    pub fn ended(&mut self, id: SessionId) {
        self.asked.ended(id);
        self.forget(id);
    }

    fn forget(&mut self, id: SessionId) {
        self.told.retain(|_, told| {
            told.remove(&id);
            !told.is_empty()
        });
    }

    // --- as of reports ---

    /// See [`Reports::take`].
    pub fn take(&mut self, now: Duration, id: SessionId) -> Vec<(Number, Ino)> {
        self.asked.take(now, id)
    }

    /// See [`Reports::reported`].
    pub fn given(&mut self, id: SessionId, numbers: &[Number]) {
        self.asked.reported(id, numbers);
    }

    /// See [`Reports::working`].
    pub fn working(&mut self, now: Duration, id: SessionId, numbers: &[Number]) {
        self.asked.working(now, id, numbers);
    }

    /// See [`Reports::all_heard`].
    pub fn all_heard(&mut self, now: Duration) {
        self.asked.all_heard(now);
    }

    /// See [`Reports::overdue`].
    pub fn overdue(
        &self,
        now: Duration,
        patience: Duration,
        silent: &BTreeSet<SessionId>,
    ) -> Vec<(SessionId, Ino)> {
        self.asked.overdue(now, patience, silent)
    }

    /// See [`Reports::asked`].
    pub fn asked(&self) -> impl Iterator<Item = SessionId> {
        self.asked.asked()
    }

    /// How many answers are waited for.
    pub fn len(&self) -> usize {
        self.asked.len()
    }

    /// Whether no session is asked for anything.
    pub fn is_empty(&self) -> bool {
        self.asked.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_told_once_for_each_connection_and_leader() {
        let (mut p, now) = (Pages::new(1), Duration::ZERO);
        let one = |_: SessionId| Some(1);
        let telling = p.tell(now, 7, [2, 3].into_iter(), one);
        assert_eq!(telling.sessions().collect::<Vec<_>>(), [2, 3]);
        let numbers: Vec<Number> = p.take(now, 2).into_iter().map(|(n, _)| n).collect();
        p.given(2, &numbers);
        assert!(!p.know(&telling));
        p.ended(3);
        assert!(p.know(&telling));
        p.told(7, 1, &telling, |id| if id == 2 { Some(1) } else { Some(9) });
        assert!(p.tell(now, 7, [1, 2].into_iter(), one).is_empty());
        assert_eq!(
            p.tell(now, 7, [3].into_iter(), one).sessions().count(),
            1,
            "its connection was another one"
        );
        p.hello(2);
        assert!(!p.tell(now, 7, [2].into_iter(), one).is_empty(), "it may be another process");
        assert!(p.want(now, 7, &BTreeSet::from([2])).is_empty(), "it is at it");
    }
}
