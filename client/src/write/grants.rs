//! Disk space that storage targets have granted to this client, and how much of it is in use: pure
//! bookkeeping, see `docs/leases.md`, "Space". All numbers are blocks of
//! [`strake_proto::data::GRANT_UNIT`] bytes.
//!
//! The assumed grant is never more than what the target keeps free. It is lowered when an update is
//! answered that may have used some of it. The answer to a request is lowered, too, by all updates
//! that were answered while the request was on its way, since their order at the target is unknown.

use std::{collections::BTreeMap, time::Duration};

use strake_proto::{
    ChainId, SessionId, TargetId,
    data::{GRANT_TERM, MAX_GRANT},
};

/// Blocks that are requested beyond what is needed.
const AHEAD: u64 = MAX_GRANT / 2;
/// With fewer blocks left, more are requested.
const LOW: u64 = AHEAD / 2;
/// How many more blocks may be held back while a request is on its way: the target may take away
/// the rest.
const MEANWHILE: u64 = MAX_GRANT / 16;
/// How long a target is not asked again after it granted less than requested.
const PAUSE: Duration = Duration::from_millis(500);
/// How often a target is asked while dirty data uses its grant.
const RENEWAL: Duration = Duration::from_secs(2);

/// What an update may use of each target, with a chain that contains the target.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cost {
    session: SessionId,
    targets: BTreeMap<TargetId, (ChainId, u64)>,
}

impl Cost {
    pub fn new(session: SessionId) -> Cost {
        Cost { session, targets: BTreeMap::new() }
    }

    pub fn add(&mut self, target: TargetId, chain: ChainId, blocks: u64) {
        self.targets.entry(target).or_insert((chain, 0)).1 += blocks;
    }

    /// Adds another cost. A cost of an earlier session does not count.
    pub fn merge(&mut self, other: Cost) {
        if self.session != other.session {
            *self = other;
            return;
        }
        for (target, (chain, blocks)) in other.targets {
            self.add(target, chain, blocks);
        }
    }

    /// Each target, and a chain to reach it.
    pub fn targets(&self) -> impl Iterator<Item = (TargetId, ChainId)> + '_ {
        self.targets.iter().map(|(t, (chain, _))| (*t, *chain))
    }
}

/// Whether bytes may be held back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Yes,
    /// Some dirty data must be sent first.
    Full,
    /// Targets must be asked first.
    Ask,
    No,
}

/// A question to a target.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub target: TargetId,
    pub session: SessionId,
    /// How much of the present grant is needed.
    pub keep: u64,
    pub want: u64,
    /// On the boot clock.
    pub sent: Duration,
    settled: u64,
}

#[derive(Default)]
struct Account {
    granted: u64,
    /// On the boot clock.
    until: Duration,
    /// The most blocks that dirty data uses.
    held: u64,
    /// Blocks used since the account was opened.
    settled: u64,
    asked: Duration,
    is_asking: bool,
    /// Until this time, requesting more is not worth it.
    short_until: Duration,
    /// Whether the target has answered, so that its server knows grants.
    knows: bool,
}

impl Account {
    /// The blocks that may be used by dirty data. A little less than the grant: both pieces use the
    /// block at which they meet.
    fn usable(&self, now: Duration) -> u64 {
        if now < self.until { self.granted - self.granted.div_ceil(64) } else { 0 }
    }
}

/// See the module.
#[derive(Default)]
pub(crate) struct Grants {
    session: SessionId,
    accounts: BTreeMap<TargetId, Account>,
}

impl Grants {
    /// Drops the grants of another session.
    fn turn_to(&mut self, session: SessionId) {
        if self.session != session {
            *self = Grants { session, accounts: BTreeMap::new() };
        }
    }

    /// Bytes with this cost are to be held back. On `Yes` they are counted from now on.
    pub fn hold(&mut self, now: Duration, cost: &Cost) -> Verdict {
        self.turn_to(cost.session);
        let mut verdict = Verdict::Yes;
        for (target, (_, blocks)) in &cost.targets {
            let Some(a) = self.accounts.get(target) else {
                verdict = Verdict::Ask;
                continue;
            };
            let need = a.held + blocks;
            match a {
                _ if need <= a.usable(now) => {}
                _ if now < a.short_until => return Verdict::No,
                _ if need > MAX_GRANT - MAX_GRANT.div_ceil(64) => return Verdict::Full,
                _ => verdict = Verdict::Ask,
            }
        }
        if verdict == Verdict::Yes {
            self.count(cost);
        }
        verdict
    }

    /// Counts bytes that are held back in any case.
    pub fn count(&mut self, cost: &Cost) {
        self.turn_to(cost.session);
        for (target, (_, blocks)) in &cost.targets {
            self.accounts.entry(*target).or_default().held += blocks;
        }
    }

    /// Removes bytes that were counted but are not held back after all.
    pub fn release(&mut self, cost: &Cost) {
        if cost.session == self.session {
            for (target, (_, blocks)) in &cost.targets {
                let Some(a) = self.accounts.get_mut(target) else { continue };
                a.held = a.held.saturating_sub(*blocks);
            }
        }
    }

    /// The bytes were sent and answered: the targets may have used all of the cost.
    pub fn settle(&mut self, cost: &Cost) {
        self.release(cost);
        if cost.session == self.session {
            for (target, (_, blocks)) in &cost.targets {
                let Some(a) = self.accounts.get_mut(target) else { continue };
                a.granted = a.granted.saturating_sub(*blocks);
                a.settled += blocks;
            }
        }
    }

    /// Whether all these targets understand updates that use a grant.
    pub fn all_know(&self, mut targets: impl Iterator<Item = TargetId>) -> bool {
        targets.all(|t| self.accounts.get(&t).is_some_and(|a| a.knows))
    }

    /// The targets to ask before bytes with this cost may be held back.
    pub fn lacking(&mut self, now: Duration, cost: &Cost) -> Vec<(TargetId, ChainId, u64)> {
        self.turn_to(cost.session);
        let lacks = |(target, (chain, blocks)): (&TargetId, &(ChainId, u64))| {
            let a = self.accounts.get(target);
            let lacks = a.is_none_or(|a| a.held + blocks > a.usable(now) && a.short_until <= now);
            lacks.then_some((*target, *chain, *blocks))
        };
        cost.targets.iter().filter_map(lacks).collect()
    }

    /// The targets to ask now, so that grants for dirty data stay valid and more are available when
    /// needed.
    pub fn due(&mut self, now: Duration) -> Vec<TargetId> {
        self.accounts.retain(|_, a| a.held > 0 || a.is_asking || now < a.until);
        let is_due = |a: &Account| {
            let is_low = a.usable(now) < a.held + LOW && a.short_until <= now;
            a.held > 0 && !a.is_asking && (is_low || now >= a.asked + RENEWAL)
        };
        self.accounts.iter().filter(|(_, a)| is_due(a)).map(|(t, _)| *t).collect()
    }

    /// A target is asked, for `more` blocks than dirty data uses.
    pub fn ask(&mut self, now: Duration, target: TargetId, more: u64) -> Ask {
        let session = self.session;
        let a = self.accounts.entry(target).or_default();
        a.granted = a.granted.min(a.held + MEANWHILE);
        (a.asked, a.is_asking) = (now, true);
        let want = (a.held + more + AHEAD).min(MAX_GRANT);
        // The assumed grant may be less than what dirty data uses, and less than what the target
        // reserves for it.
        let keep = a.granted.max(a.held).min(MAX_GRANT);
        Ask { target, session, keep, want, sent: now, settled: a.settled }
    }

    /// The target's answer; `None` if it did not answer.
    pub fn answered(&mut self, now: Duration, ask: &Ask, granted: Option<u64>) {
        let Some(a) = self.accounts.get_mut(&ask.target).filter(|_| ask.session == self.session)
        else {
            return;
        };
        a.is_asking = false;
        if let Some(n) = granted {
            a.granted = n.min(MAX_GRANT).saturating_sub(a.settled - ask.settled);
            // The target's clock may run at another rate.
            a.until = ask.sent + GRANT_TERM / 10 * 9;
            a.knows = true;
        }
        if granted.is_none_or(|n| n < ask.want) {
            a.short_until = now + PAUSE;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cost(session: SessionId, blocks: u64) -> Cost {
        let mut c = Cost::new(session);
        c.add(7, 3, blocks);
        c
    }

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn nothing_is_held_back_without_a_grant_or_when_it_has_run_out() {
        let mut b = Grants::default();
        assert_eq!(
            (b.hold(S, &cost(1, 10)), b.lacking(S, &cost(1, 10))),
            (Verdict::Ask, vec![(7, 3, 10)])
        );
        let ask = b.ask(S, 7, 10);
        assert_eq!((ask.keep, ask.want), (0, AHEAD + 10));
        b.answered(S, &ask, Some(AHEAD + 10));
        assert_eq!((b.hold(S, &cost(1, 10)), b.due(S)), (Verdict::Yes, vec![]));
        assert_eq!((b.due(S + RENEWAL), b.hold(S * 10, &cost(1, 1))), (vec![7], Verdict::Ask));
        // Grants of another session do not count, and a late answer for the earlier session is
        // ignored.
        let late = b.ask(S, 7, 0);
        assert_eq!(b.hold(S, &cost(2, 1)), Verdict::Ask);
        b.answered(S, &late, Some(99));
        b.settle(&cost(1, 10));
        assert_eq!((b.hold(S, &cost(2, 1)), b.all_know([7].into_iter())), (Verdict::Ask, false));
    }

    #[test]
    fn who_is_given_less_goes_through_for_a_while() {
        let mut b = Grants::default();
        b.count(&cost(1, 100));
        let ask = b.ask(S, 7, 10);
        b.answered(S, &ask, Some(50));
        assert_eq!((b.hold(S, &cost(1, 1)), b.due(S)), (Verdict::No, vec![]));
        assert_eq!((b.hold(S + PAUSE, &cost(1, 1)), b.due(S + PAUSE)), (Verdict::Ask, vec![7]));
        b.settle(&cost(1, 100));
        assert_eq!(b.hold(S, &cost(1, 1)), Verdict::No, "taken");
        let ask = b.ask(S, 7, 10);
        b.answered(S, &ask, None);
        assert_eq!(
            (b.hold(S, &cost(1, 1)), b.hold(S * 2, &cost(1, MAX_GRANT))),
            (Verdict::No, Verdict::Full)
        );
    }

    proptest! {
        /// For any order of updates and requests: the target has space for all dirty data.
        #[test]
        fn what_is_held_back_is_granted(ops in prop::collection::vec((0u8..7, 1u64..400, any::<bool>()), 1..200)) {
            let (mut b, mut now, mut at_target) = (Grants::default(), S, 0u64);
            let mut asks: Vec<(Ask, Option<u64>)> = Vec::new();
            let mut sent: Vec<(u64, bool)> = Vec::new();
            let mut waits = Vec::new();
            for (what, n, first) in ops {
                match what {
                    0 | 1 => if b.hold(now, &cost(1, n)) == Verdict::Yes {
                        waits.push(n);
                    },
                    2 if !waits.is_empty() => sent.push((waits.remove(0), false)),
                    3 => if let Some((blocks, arrived)) = sent.iter_mut().find(|(_, arrived)| !arrived) {
                        prop_assert!(*blocks <= at_target, "{blocks} of {at_target}");
                        at_target -= *blocks;
                        *arrived = true;
                    },
                    4 => if let Some(i) = sent.iter().position(|(_, arrived)| *arrived) {
                        b.settle(&cost(1, sent.remove(i).0));
                    },
                    5 if asks.is_empty() => asks.push((b.ask(now, 7, n), None)),
                    _ => match asks.pop() {
                        Some((ask, None)) => {
                            // The target grants as much as requested, or less.
                            at_target = ask.want.min(if first { n * 4 } else { u64::MAX }).max(at_target.min(ask.keep));
                            asks.push((ask, Some(at_target)));
                        }
                        Some((ask, answer)) => b.answered(now, &ask, answer),
                        None => now += Duration::from_millis(300),
                    },
                }
                let held: u64 = waits.iter().sum::<u64>() + sent.iter().filter(|(_, a)| !a).map(|(n, _)| n).sum::<u64>();
                prop_assert!(held <= at_target, "{held} held back, {at_target} granted");
            }
        }
    }
}
