//! The clocks of storage servers. An update carries the last known time of its server's clock, and
//! the server refuses it once that is too long ago. So a client that gave an update up knows from
//! when on no copy of it can be made any more, even if no server has been reached since. See
//! `docs/replication.md`, "Retries".

use std::{collections::BTreeMap, time::Duration};

use parking_lot::Mutex;
use strake_proto::{NodeId, data::Clock};

/// How long a server of an older version, which does not know the question, is not asked again.
const UNKNOWN_STANDS: Duration = Duration::from_secs(10);
/// What a server said.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Heard {
    /// `None`: the server does not tell its time.
    pub clock: Option<Clock>,
    /// When it was asked, on this client's clock.
    pub asked: Duration,
    pub answered: Duration,
    /// Whether it is being asked again.
    pub asking: bool,
}

impl Heard {
    /// The clock value for an update that is sent now; 0 for none.
    pub fn says(&self) -> u64 {
        self.clock.map_or(0, |c| c.now)
    }

    fn stands(&self, parts: u32) -> Duration {
        self.clock.map_or(UNKNOWN_STANDS, |c| Duration::from_millis(c.life.into()) / parts)
    }

    /// Whether an update with this clock value has enough time left for any answer that the client
    /// waits for.
    fn is_good(&self, now: Duration) -> bool {
        now < self.asked + self.stands(3)
    }

    /// Whether the server should be asked again soon.
    pub fn is_old(&self, now: Duration) -> bool {
        self.clock.is_some() && !self.asking && now >= self.asked + self.stands(6)
    }
}

/// Copies of an update that servers may still accept.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub(crate) enum Copies {
    /// None was sent.
    #[default]
    None,
    /// Until this time on this client's clock.
    Until(Duration),
    /// One was sent to a server that does not tell its time.
    Always,
}

impl Copies {
    /// Another copy is sent. Clocks may run at rates that differ by a tenth.
    pub fn sends(&mut self, heard: &Heard) {
        let one = match heard.clock {
            Some(c) => {
                Copies::Until(heard.answered + Duration::from_millis(c.life.into()) * 10 / 9)
            }
            None => Copies::Always,
        };
        if one > *self {
            *self = one;
        }
    }
}

#[derive(Default)]
pub(crate) struct Clocks(Mutex<BTreeMap<NodeId, Heard>>);

impl Clocks {
    pub fn of(&self, node: NodeId, now: Duration) -> Option<Heard> {
        self.0.lock().get(&node).copied().filter(|h| h.is_good(now))
    }

    /// The connection to the server ended: another process may run there now.
    pub fn forget(&self, node: NodeId) {
        self.0.lock().remove(&node);
    }

    /// Whether the caller must ask the server again: one caller does so for all.
    pub fn asks_again(&self, node: NodeId) -> bool {
        self.0.lock().get_mut(&node).is_some_and(|h| !std::mem::replace(&mut h.asking, true))
    }

    pub fn put(&self, node: NodeId, heard: Heard) {
        let mut all = self.0.lock();
        // An answer to an earlier question that was overtaken says less.
        if all.get(&node).is_none_or(|h| h.asked < heard.asked) {
            all.insert(node, heard);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn heard(at: u32, life: u32) -> Heard {
        let clock = (life != 0).then_some(Clock { now: 777, life });
        Heard { clock, asked: S * at, answered: S * (at + 1), asking: false }
    }

    #[test]
    fn what_is_said_is_good_for_a_third_of_a_life() {
        let h = heard(100, 15_000);
        assert_eq!(h.says(), 777);
        assert!(h.is_good(S * 104) && !h.is_good(S * 105));
        assert!(
            !h.is_old(S * 102) && h.is_old(S * 103) && !Heard { asking: true, ..h }.is_old(S * 103)
        );
        let none = heard(100, 0);
        assert_eq!(none.says(), 0);
        assert!(none.is_good(S * 109) && !none.is_good(S * 110) && !none.is_old(S * 109));
    }

    #[test]
    fn copies_live_as_long_as_the_last_one() {
        let mut c = Copies::default();
        c.sends(&heard(100, 9000));
        assert_eq!(c, Copies::Until(S * 111), "from the answer, and clocks may differ");
        c.sends(&heard(90, 9000));
        assert_eq!(c, Copies::Until(S * 111));
        c.sends(&heard(200, 9000));
        assert_eq!(c, Copies::Until(S * 211));
        c.sends(&heard(201, 0));
        c.sends(&heard(300, 9000));
        assert_eq!(c, Copies::Always);
    }

    #[test]
    fn later_answers_stand() {
        let clocks = Clocks::default();
        clocks.put(1, heard(100, 15_000));
        clocks.put(1, heard(99, 15_000));
        assert_eq!(clocks.of(1, S * 101), Some(heard(100, 15_000)));
        assert!(clocks.asks_again(1) && !clocks.asks_again(1) && !clocks.asks_again(2));
        assert_eq!((clocks.of(1, S * 105), clocks.of(2, S)), (None, None));
        clocks.forget(1);
        assert_eq!(clocks.of(1, S * 101), None);
    }
}
