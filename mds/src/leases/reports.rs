//! Reports: what writers must report before another client is told about the files that they write.
//! Separate from recalls: a report takes a round trip through the log, and recalls must not wait
//! for it.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use strake_proto::{Ino, SessionId};

use super::{
    ASKED, MAX_RECALLS, Number,
    rows::{Paging, Reporting},
};

/// A report that was not made for this long is asked for again: the question may have been lost.
const AGAIN: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Report {
    ino: Ino,
    since: Duration,
    sent: Option<Duration>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Writer {
    asked: BTreeMap<Number, Report>,
    /// Questions that were not sent yet: a later request may share one, as the report will be made
    /// later.
    unsent: BTreeMap<Ino, Number>,
}

/// Reports that were asked for and not made, see the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Reports {
    writers: BTreeMap<SessionId, Writer>,
    last: Number,
    waited_for: usize,
    /// The questions are not about reports: see [`Reports::of_pages`].
    of_pages: bool,
}

/// Numbers of questions about page locks have this bit, others do not.
const PAGES: Number = 1 << 31;

impl Reports {
    /// The table of the leader of `raft_term`.
    pub fn new(raft_term: u64) -> Reports {
        Reports { writers: BTreeMap::new(), last: raft_term << 32, waited_for: 0, of_pages: false }
    }

    /// The same, for questions that ask for page locks of mappings to be given back:
    /// `docs/mappings.md`. Their numbers are never those of reports.
    pub fn of_pages(raft_term: u64) -> Reports {
        Reports { last: raft_term << 32 | PAGES, of_pages: true, ..Reports::new(raft_term) }
    }

    fn took(&self, row: Reporting) {
        match (self.of_pages, row) {
            (false, row) => row.taken(),
            (true, Reporting::Asked) => Paging::Asked.taken(),
            (true, Reporting::Shared) => Paging::Shared.taken(),
            (true, Reporting::Sent) => Paging::Sent.taken(),
            (true, Reporting::SentAgain) => Paging::SentAgain.taken(),
            (true, Reporting::Working) => Paging::Working.taken(),
            (true, Reporting::Made) => Paging::Given.taken(),
            (true, Reporting::NotWaited) => Paging::NotWaited.taken(),
            (true, _) => {}
        }
    }

    /// Whether the session was asked about this file and has not answered.
    pub fn is_asked(&self, id: SessionId, ino: Ino) -> bool {
        self.writers.get(&id).is_some_and(|w| w.asked.values().any(|r| r.ino == ino))
    }

    /// A request came at `now` that needs to know about `ino` what this session has not reported.
    pub fn ask(&mut self, now: Duration, id: SessionId, ino: Ino) -> Number {
        let unsent = self.writers.get(&id).and_then(|w| w.unsent.get(&ino));
        if let Some(number) = unsent {
            self.took(Reporting::Shared);
            return *number;
        }
        self.took(Reporting::Asked);
        let w = self.writers.entry(id).or_default();
        self.last += 1;
        w.unsent.insert(ino, self.last);
        w.asked.insert(self.last, Report { ino, since: now, sent: None });
        self.waited_for += 1;
        self.last
    }

    /// The questions to send to a session now.
    pub fn take(&mut self, now: Duration, id: SessionId) -> Vec<(Number, Ino)> {
        let Some(w) = self.writers.get_mut(&id) else { return Vec::new() };
        let due = |r: &Report| r.sent.is_none_or(|at| now.saturating_sub(at) >= AGAIN);
        let (mut out, mut rows) = (Vec::new(), Vec::new());
        for (number, r) in w.asked.iter_mut().filter(|(_, r)| due(r)).take(MAX_RECALLS) {
            rows.push(if r.sent.is_some() { Reporting::SentAgain } else { Reporting::Sent });
            r.sent = Some(now);
            w.unsent.remove(&r.ino);
            out.push((*number, r.ino));
        }
        rows.into_iter().for_each(|row| self.took(row));
        out
    }

    /// The session has a new connection: questions sent on the former one may not have arrived.
    pub fn ask_again(&mut self, id: SessionId) {
        let asked = self.writers.get_mut(&id).into_iter().flat_map(|w| w.asked.values_mut());
        asked.for_each(|r| r.sent = None);
    }

    /// The session has made these reports.
    pub fn reported(&mut self, id: SessionId, numbers: &[Number]) {
        let Some(w) = self.writers.get_mut(&id) else { return };
        // A report that was not asked for cannot have been made.
        let mut made = 0;
        for number in numbers {
            if w.asked.get(number).is_some_and(|r| r.sent.is_some()) {
                w.asked.remove(number);
                made += 1;
            }
        }
        if w.asked.is_empty() {
            self.writers.remove(&id);
        }
        self.waited_for -= made;
        (0..made).for_each(|_| self.took(Reporting::Made));
    }

    /// The session is working on these, which takes longer: its data is on its way.
    pub fn working(&mut self, now: Duration, id: SessionId, numbers: &[Number]) {
        let Some(w) = self.writers.get_mut(&id) else { return };
        let mut any = false;
        for number in numbers {
            if let Some(r) = w.asked.get_mut(number).filter(|r| r.sent.is_some()) {
                (r.since, r.sent) = (now, Some(now));
                any = true;
            }
        }
        if any {
            self.took(Reporting::Working);
        }
    }

    /// The session cannot make a report about this file yet, which is not its fault.
    pub fn excuse(&mut self, now: Duration, id: SessionId, ino: Ino) {
        Reporting::Excused.taken();
        let asked = self.writers.get_mut(&id).into_iter().flat_map(|w| w.asked.values_mut());
        asked.filter(|r| r.ino == ino).for_each(|r| r.since = now);
    }

    /// From now on reports about this file can be made.
    pub fn restart(&mut self, now: Duration, ino: Ino) {
        let asked = self.writers.values_mut().flat_map(|w| w.asked.values_mut());
        asked.filter(|r| r.ino == ino).for_each(|r| r.since = now);
    }

    /// Counts all sessions as heard of now: for a server that did not run for a while and could not
    /// listen.
    pub fn all_heard(&mut self, now: Duration) {
        self.writers.values_mut().flat_map(|w| w.asked.values_mut()).for_each(|r| r.since = now);
    }

    /// Whether no request needs to wait for a report any more.
    pub fn is_in(&self, id: SessionId, number: Number) -> bool {
        self.writers.get(&id).is_none_or(|w| !w.asked.contains_key(&number))
    }

    /// Nothing waits for the session any more: it has ended, or may have.
    pub fn ended(&mut self, id: SessionId) {
        if let Some(w) = self.writers.remove(&id) {
            self.took(Reporting::NotWaited);
            self.waited_for -= w.asked.len();
        }
    }

    /// How many reports are waited for.
    pub fn len(&self) -> usize {
        self.waited_for
    }

    /// Whether no session must report anything.
    pub fn is_empty(&self) -> bool {
        self.waited_for == 0
    }

    /// Questions that are this old; for sessions that are `silent`, those older than [`ASKED`].
    pub fn overdue(
        &self,
        now: Duration,
        patience: Duration,
        silent: &BTreeSet<SessionId>,
    ) -> Vec<(SessionId, Ino)> {
        let late = |id: &SessionId, r: &Report| {
            let waited = now.saturating_sub(r.since);
            waited >= patience || waited >= ASKED && silent.contains(id)
        };
        let of = |(id, w): (&SessionId, &Writer)| {
            w.asked.values().filter(|r| late(id, r)).map(|r| (*id, r.ino)).collect::<Vec<_>>()
        };
        self.writers.iter().flat_map(of).collect()
    }

    /// The sessions that are asked for something.
    pub fn asked(&self) -> impl Iterator<Item = SessionId> {
        self.writers.keys().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn who_comes_before_it_is_sent_shares_a_report() {
        let mut r = Reports::new(2);
        let first = r.ask(ms(0), 1, 7);
        assert!(
            r.ask(ms(1), 1, 7) == first
                && r.ask(ms(1), 2, 7) != first
                && r.ask(ms(1), 1, 8) != first
        );
        r.reported(1, &[first]);
        assert!(!r.is_in(1, first), "nobody knew of it");
        assert_eq!(r.take(ms(2), 1).iter().map(|x| x.1).collect::<Vec<_>>(), [7, 8]);
        let second = r.ask(ms(3), 1, 7);
        assert!(second > first, "the one on its way may tell of too little");
        r.reported(2, &[first]);
        assert!(!r.is_in(1, first), "another's word counts for nothing");
        r.reported(1, &[first]);
        assert!(r.is_in(1, first) && !r.is_in(1, second));
        assert_eq!((r.take(ms(4), 1), r.len()), (vec![(second, 7)], 3));
        r.reported(1, &[second, second, 99]);
        assert_eq!(r.len(), 2);
    }

    #[test]
    fn what_is_not_answered_is_sent_again_and_told() {
        let mut r = Reports::new(2);
        let n = r.ask(ms(0), 1, 7);
        assert_eq!(r.take(ms(0), 1), [(n, 7)]);
        assert!(r.take(ms(999), 1).is_empty() && r.take(ms(999), 2).is_empty());
        assert_eq!(r.take(ms(1000), 1), [(n, 7)]);
        r.ask_again(1);
        assert!(
            r.ask(ms(1001), 1, 7) > n,
            "whoever comes now needs a later one than may be under way"
        );
        assert_eq!(r.take(ms(1001), 1), [(n, 7), (n + 1, 7)]);
        r.reported(1, &[n + 1]);
        assert!(r.overdue(ms(4999), ms(5000), &BTreeSet::new()).is_empty());
        assert_eq!(r.overdue(ms(5000), ms(5000), &BTreeSet::new()), [(1, 7)]);
        r.ended(1);
        assert!(
            r.is_in(1, n)
                && r.overdue(ms(9000), ms(0), &BTreeSet::new()).is_empty()
                && r.is_empty()
        );
    }

    #[test]
    fn a_silent_session_has_less_time() {
        let (mut r, silent) = (Reports::new(2), BTreeSet::from([1]));
        r.ask(ms(0), 1, 7);
        r.ask(ms(500), 2, 8);
        assert_eq!(r.asked().collect::<Vec<_>>(), [1, 2]);
        assert!(r.overdue(ms(999), ms(5000), &silent).is_empty());
        assert_eq!(r.overdue(ms(4000), ms(5000), &silent), [(1, 7)]);
        assert_eq!(r.overdue(ms(5500), ms(5000), &silent), [(1, 7), (2, 8)]);
    }

    #[test]
    fn one_that_is_worked_at_is_not_overdue() {
        let mut r = Reports::new(2);
        let n = r.ask(ms(0), 1, 7);
        r.working(ms(10), 1, &[n, 99]);
        assert_eq!(
            r.overdue(ms(5000), ms(5000), &BTreeSet::new()),
            [(1, 7)],
            "it was not sent, so nobody works at it"
        );
        r.take(ms(100), 1);
        r.working(ms(4000), 1, &[n]);
        r.working(ms(4000), 2, &[n]);
        assert!(
            r.overdue(ms(8999), ms(5000), &BTreeSet::new()).is_empty()
                && r.take(ms(4999), 1).is_empty()
        );
        assert_eq!(
            (r.overdue(ms(9000), ms(5000), &BTreeSet::new()), r.take(ms(5000), 1)),
            (vec![(1, 7)], vec![(n, 7)])
        );
        r.all_heard(ms(9000));
        assert!(r.overdue(ms(13_999), ms(5000), &BTreeSet::new()).is_empty() && !r.is_in(1, n));
        let other = r.ask(ms(9000), 1, 8);
        r.excuse(ms(14_000), 1, 7);
        assert_eq!(
            r.overdue(ms(18_999), ms(5000), &BTreeSet::new()),
            [(1, 8)],
            "it has its time again, for this file"
        );
        assert!(
            !r.is_in(1, n)
                && !r.is_in(1, other)
                && r.overdue(ms(19_000), ms(5000), &BTreeSet::new()).len() == 2
        );
        r.restart(ms(18_000), 8);
        assert_eq!(r.overdue(ms(19_000), ms(5000), &BTreeSet::new()), [(1, 7)]);
    }
}
