//! Recently evicted sessions. They may still rely on leases until their term is over, though the
//! state no longer has them, so a new leader must know of them. Every server notes evictions as it
//! applies their entries: a renewal sent later than that was not answered. A pure table, see
//! `docs/leases.md`.

use std::{collections::VecDeque, time::Duration};

use strake_proto::SessionId;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Evicted {
    /// Since when this sees entries as they are applied.
    since: Duration,
    /// Sessions evicted in about the last term, and when.
    last: VecDeque<(Duration, SessionId)>,
}

impl Evicted {
    /// From now on this sees entries; evictions in the state were applied earlier.
    pub fn begin(&mut self, now: Duration) {
        self.since = now;
    }

    /// An eviction is applied.
    pub fn note(&mut self, now: Duration, term: Duration, id: SessionId) {
        while self.last.front().is_some_and(|(at, _)| *at + term <= now) {
            self.last.pop_front();
        }
        self.last.push_back((now, id));
    }

    /// Sessions whose leases may still be alive. `in_state`: all sessions that the state has as
    /// evicted; it is not known here when they were.
    pub fn may_live(
        &self,
        now: Duration,
        term: Duration,
        in_state: impl FnOnce() -> Vec<SessionId>,
    ) -> Vec<SessionId> {
        let mut all = if now < self.since + term { in_state() } else { Vec::new() };
        all.extend(self.last.iter().filter(|(at, _)| now < *at + term).map(|(_, id)| *id));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: Duration = Duration::from_secs(2);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn they_count_for_a_term() {
        let mut e = Evicted::default();
        e.begin(at(1));
        assert_eq!(
            e.may_live(at(2), TERM, || vec![7]),
            [7],
            "evicted before this server began, perhaps just then"
        );
        e.note(at(3), TERM, 8);
        e.note(at(4), TERM, 9);
        assert_eq!(e.may_live(at(4), TERM, || vec![7]), [8, 9]);
        assert_eq!(e.may_live(at(5), TERM, || vec![7]), [9]);
        assert!(e.may_live(at(6), TERM, || vec![7]).is_empty());
        e.note(at(6), TERM, 10);
        assert_eq!(e.last.len(), 1);
        e.begin(at(8));
        assert_eq!(e.may_live(at(9), TERM, || vec![7]), [7]);
    }
}
