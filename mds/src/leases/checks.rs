//! Questions about locks. Before a client is told of a conflict with a session's lock, that session
//! releases what none of its programs holds any more, and answers. A program's close(2) does not
//! wait for the release. This is the table of the sessions that are asked and the answers they owe.
//! Pure, see `docs/locks.md`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use strake_proto::{Ino, SessionId};

use super::{MAX_RECALLS, Number, rows::Checking};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Question {
    ino: Ino,
    since: Duration,
    sent: bool,
    /// No request waits for the answer any more.
    late: bool,
}

/// Whether a session answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Answers {
    /// It said hello, and has not asked for its recalls yet.
    #[default]
    Perhaps,
    Yes,
    /// Its program is older than these questions.
    Never,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Holder {
    answers: Answers,
    /// It did not ask for its recalls in time.
    away: bool,
    asked: BTreeMap<Number, Question>,
    /// Questions that were not sent yet: a later request may share one, as its answer comes later.
    unsent: BTreeMap<Ino, Number>,
}

impl Holder {
    fn is_asked(&self) -> bool {
        self.answers != Answers::Never && !self.away && !self.asked.values().any(|q| q.late)
    }
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Checks {
    holders: BTreeMap<SessionId, Holder>,
    last: Number,
    waited_for: usize,
}

impl Checks {
    /// The table of the leader of `raft_term`.
    pub fn new(raft_term: u64) -> Checks {
        Checks { holders: BTreeMap::new(), last: raft_term << 32, waited_for: 0 }
    }

    /// The session has a new connection: questions sent on the former one may not have arrived.
    pub fn hello(&mut self, id: SessionId) {
        let h = self.holders.entry(id).or_default();
        h.away = false;
        let before = h.asked.len();
        h.asked.retain(|_, q| !q.late);
        self.waited_for -= before - h.asked.len();
        h.asked.values_mut().for_each(|q| q.sent = false);
    }

    /// Asks the session at `now`, for a request that would be told that the session has a lock of
    /// `ino`. `None`: it is not asked, because it has not said hello yet, unless it may still do so
    /// (`in_grace`), or does not answer.
    pub fn ask(
        &mut self,
        now: Duration,
        id: SessionId,
        ino: Ino,
        in_grace: bool,
    ) -> Option<Number> {
        if in_grace {
            self.holders.entry(id).or_default();
        }
        let Some(h) = self.holders.get_mut(&id).filter(|h| h.is_asked()) else {
            Checking::NotAsked.taken();
            return None;
        };
        if let Some(number) = h.unsent.get(&ino) {
            Checking::Shared.taken();
            return Some(*number);
        }
        Checking::Asked.taken();
        self.last += 1;
        h.unsent.insert(ino, self.last);
        h.asked.insert(self.last, Question { ino, since: now, sent: false, late: false });
        self.waited_for += 1;
        Some(self.last)
    }

    /// The session asks for its recalls: returns the questions to send. `answers`: whether it can
    /// answer.
    pub fn take(&mut self, id: SessionId, answers: bool) -> Vec<(Number, Ino)> {
        let h = self.holders.entry(id).or_default();
        h.away = false;
        if !answers {
            h.answers = Answers::Never;
            self.waited_for -= std::mem::take(&mut h.asked).len();
            h.unsent.clear();
            return Vec::new();
        }
        h.answers = Answers::Yes;
        let mut out = Vec::new();
        for (number, q) in h.asked.iter_mut().filter(|(_, q)| !q.sent).take(MAX_RECALLS) {
            Checking::Sent.taken();
            q.sent = true;
            if h.unsent.get(&q.ino) == Some(number) {
                h.unsent.remove(&q.ino);
            }
            out.push((*number, q.ino));
        }
        out
    }

    /// The session has checked, and still holds the locks that remain.
    pub fn answered(&mut self, id: SessionId, numbers: &[Number]) {
        let Some(h) = self.holders.get_mut(&id) else { return };
        for number in numbers {
            // A question that was not sent cannot have been answered.
            if h.asked.get(number).is_some_and(|q| q.sent) {
                h.asked.remove(number);
                self.waited_for -= 1;
                Checking::Answered.taken();
            }
        }
    }

    /// Whether no request needs to wait for this answer any more.
    pub fn is_in(&self, id: SessionId, number: Number) -> bool {
        self.holders.get(&id).and_then(|h| h.asked.get(&number)).is_none_or(|q| q.late)
    }

    /// Gives up questions that are `limit` old or older. Returns whether there were any.
    pub fn expire(&mut self, now: Duration, limit: Duration) -> bool {
        let mut any = false;
        for h in self.holders.values_mut() {
            let over = |q: &Question| !q.late && now.saturating_sub(q.since) >= limit;
            let over: BTreeSet<Number> =
                h.asked.iter().filter(|(_, q)| over(q)).map(|(n, _)| *n).collect();
            for number in over {
                Checking::GivenUp.taken();
                any = true;
                match h.asked.get_mut(&number) {
                    Some(q) if q.sent => q.late = true,
                    _ => {
                        h.away = true;
                        h.asked.remove(&number);
                        h.unsent.retain(|_, n| *n != number);
                        self.waited_for -= 1;
                    }
                }
            }
        }
        any
    }

    /// When the first of the questions is given up.
    pub fn next_end(&self, limit: Duration) -> Option<Duration> {
        let open = self.holders.values().flat_map(|h| h.asked.values()).filter(|q| !q.late);
        open.map(|q| q.since + limit).min()
    }

    /// The session has ended, and its locks with it.
    pub fn ended(&mut self, id: SessionId) {
        if let Some(h) = self.holders.remove(&id) {
            self.waited_for -= h.asked.len();
        }
    }

    /// Questions without an answer.
    pub fn len(&self) -> usize {
        self.waited_for
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.waited_for == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn greeted() -> Checks {
        let mut c = Checks::new(2);
        c.hello(1);
        c
    }

    #[test]
    fn an_answer_counts_for_those_who_asked_before_it_was_sent() {
        let mut c = greeted();
        let first = c.ask(ms(0), 1, 7, false).unwrap();
        assert_eq!((c.ask(ms(1), 1, 7, false), c.ask(ms(1), 2, 7, false)), (Some(first), None));
        c.answered(1, &[first]);
        assert!(!c.is_in(1, first), "it was not sent");
        assert_eq!(c.take(1, true), [(first, 7)]);
        let second = c.ask(ms(2), 1, 7, false).unwrap();
        assert!(second > first, "a close since then is not in the answer");
        c.answered(2, &[first]);
        assert!(!c.is_in(1, first));
        c.answered(1, &[first, second, 99]);
        assert!(c.is_in(1, first) && !c.is_in(1, second));
        assert_eq!((c.take(1, true), c.take(1, true)), (vec![(second, 7)], vec![]));
        c.hello(1);
        assert_eq!(c.take(1, true), [(second, 7)], "it may not have arrived");
        c.answered(1, &[second]);
        assert!(c.is_empty() && c.next_end(ms(5)).is_none());
    }

    #[test]
    fn who_does_not_answer_is_not_asked_again_until_it_does() {
        let mut c = greeted();
        let n = c.ask(ms(0), 1, 7, false).unwrap();
        assert_eq!(c.take(1, true), [(n, 7)]);
        assert!(!c.expire(ms(1999), ms(2000)) && c.next_end(ms(2000)) == Some(ms(2000)));
        assert!(c.expire(ms(2000), ms(2000)) && c.is_in(1, n) && !c.expire(ms(9000), ms(2000)));
        assert_eq!(c.ask(ms(2001), 1, 8, false), None);
        c.answered(1, &[n]);
        let n = c.ask(ms(2002), 1, 8, false).unwrap();
        // It does not even ask for its recalls.
        assert!(c.expire(ms(4002), ms(2000)) && c.is_in(1, n) && c.is_empty());
        assert_eq!(c.ask(ms(4003), 1, 8, false), None);
        assert!(c.take(1, true).is_empty() && c.ask(ms(4004), 1, 8, false).is_some());
        c.ended(1);
        assert!(c.is_empty() && c.ask(ms(4005), 1, 8, false).is_none());
    }

    #[test]
    fn programs_of_before_and_those_that_were_not_heard_of_yet() {
        let mut c = greeted();
        let n = c.ask(ms(0), 1, 7, false).unwrap();
        assert!(c.take(1, false).is_empty() && c.is_in(1, n) && c.is_empty());
        assert_eq!(c.ask(ms(1), 1, 7, false), None);
        assert_eq!(c.ask(ms(1), 2, 7, false), None, "it has leases of nobody");
        let n = c.ask(ms(1), 3, 7, true).unwrap();
        c.hello(3);
        assert_eq!(c.take(3, true), [(n, 7)]);
    }
}
