//! The leader's lease: a time during which no other member can lead, so that the leader answers
//! reads without asking the others. It rests on the [`Promise`] of the other members. Why it holds
//! is in `docs/leader-lease.md`. Times are those of the clock since boot, given by the caller.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::SeqCst},
    time::Duration,
};

use super::core::{Core, is_only_voter};

/// The longest lease. A restarted member waits longer than this before it votes, whatever its
/// configuration (see [`START_WAIT`]).
const LONGEST: Duration = Duration::from_millis(250);
/// How long a restarted member gives no vote, at least.
pub(super) const START_WAIT: Duration = Duration::from_millis(350);

/// A member's promise to give no vote for a while. Counted in its own ticks.
#[derive(Clone, Debug, Hash)]
pub struct Promise {
    /// Ticks after a start during which no vote is given: what was promised before is not known.
    start: usize,
    /// Ticks during which a vote is given only to a candidate that the leader has chosen.
    left: usize,
    /// How long it lasts.
    ticks: usize,
}

impl Promise {
    /// A promise of `ticks`, by a member that gives no vote for its first `start` ticks.
    pub fn new(ticks: usize, start: usize) -> Promise {
        Promise { start, left: 0, ticks }
    }

    /// A tick has passed.
    pub fn tick(&mut self) {
        self.start = self.start.saturating_sub(1);
        self.left = self.left.saturating_sub(1);
    }

    /// This member has taken a message from the leader of its term.
    pub fn heard(&mut self) {
        self.left = self.ticks;
    }

    /// Whether a vote may be given; `chosen`: to a candidate that the leader has chosen.
    pub fn may_vote(&self, chosen: bool) -> bool {
        self.start == 0 && (self.left == 0 || chosen)
    }

    /// Whether enough time has passed since the start to ask for votes.
    pub fn has_started(&self) -> bool {
        self.start == 0
    }
}

/// The lease of this member, should it lead.
#[derive(Clone, Debug, Default, Hash)]
pub struct LeaderLease {
    enabled: bool,
    /// How long each other member gives no vote after it has taken a message from its leader, by
    /// its own clock.
    vote_waits: BTreeMap<u64, Duration>,
    /// A round of messages under way that renews the lease: its number, the term, and when it
    /// began.
    round: Option<(u64, u64, Duration)>,
    /// The term in which a lease was won, and its end.
    held: (u64, Duration),
    /// No lease is won in this term: its leader has begun to hand over.
    given_up: u64,
}

impl LeaderLease {
    /// `enabled`: leases may be won.
    pub fn new(enabled: bool) -> LeaderLease {
        LeaderLease { enabled, ..LeaderLease::default() }
    }

    /// Another member has said how long it waits before it votes; zero: it does not say.
    pub fn note_vote_wait(&mut self, id: u64, wait: Duration) {
        self.vote_waits.insert(id, wait);
    }

    /// A round of messages begins. If a majority answers it, the lease lasts from `now` on.
    pub fn begin(&mut self, number: u64, term: u64, now: Duration) {
        if self.enabled && self.given_up != term {
            self.round = Some((number, term, now));
        }
    }

    /// A majority of the voters has answered this round. `own`: this member's own wait; `others`:
    /// the other voters.
    pub fn confirm(&mut self, number: u64, own: Duration, others: &[u64]) {
        let Some((_, term, began)) = self.round.take_if(|r| r.0 == number) else { return };
        let end = began + self.length(own, others);
        self.held = if self.held.0 == term { (term, self.held.1.max(end)) } else { (term, end) };
    }

    /// Shorter than the shortest wait, even if this clock is 10 % slow and another 10 % fast.
    fn length(&self, own: Duration, others: &[u64]) -> Duration {
        let wait = |id| self.vote_waits.get(id).copied().unwrap_or_default();
        let shortest = others.iter().map(wait).min().unwrap_or(own);
        (shortest * 9 / 11).min(LONGEST)
    }

    /// The membership is about to change, or has changed: a majority of the former members is not
    /// one of the next.
    pub fn suspend(&mut self) {
        (self.round, self.held) = (None, (0, Duration::ZERO));
    }

    /// Leadership is being handed over. Votes for the successor do not wait, also if the transfer
    /// is given up, so there is no lease for the rest of the term.
    pub fn give_up(&mut self, term: u64) {
        self.suspend();
        self.given_up = term;
    }

    /// The end of the lease that was won in this term; zero: there is none.
    pub fn end(&self, term: u64) -> Duration {
        if self.held.0 == term { self.held.1 } else { Duration::ZERO }
    }
}

/// Until when this member may answer reads from what it has applied; zero: it may not. It has
/// applied an entry of its own term, and with it everything that was answered in earlier terms.
pub(super) fn lease_end(core: &Core) -> Duration {
    let serves =
        core.is_settled_leader() && !core.has_lost_state() && core.applied_to().1 == core.term();
    if serves { core.lease.end(core.term()) } else { Duration::ZERO }
}

/// The other voters, and none for a member that is the only one.
pub(super) fn other_voters(core: &Core, id: u64) -> Vec<u64> {
    if is_only_voter(core) {
        return vec![];
    }
    let conf = core.conf();
    conf.voters.iter().chain(&conf.voters_outgoing).copied().filter(|v| *v != id).collect()
}

/// The lease as readers see it, without asking the driver. Nanoseconds since boot.
#[derive(Default)]
pub(super) struct PublishedLease {
    end: AtomicU64,
    /// The first reader after this moment has the lease renewed.
    renew: AtomicU64,
}

/// What a reader does.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Covered {
    No,
    Yes,
    /// Yes, and the lease is to be renewed.
    Renew,
}

impl PublishedLease {
    /// To be called before anything leaves this member that could let another one lead.
    pub(super) fn set(&self, end: Duration) {
        let nanos = |d: Duration| d.as_nanos() as u64;
        if self.end.swap(nanos(end), SeqCst) != nanos(end) {
            self.renew.store(nanos(end.saturating_sub(LONGEST / 2)), SeqCst);
        }
    }

    /// `now` is asked after the end was read: so there was a moment at which this member led.
    pub(super) fn covers(&self, now: impl FnOnce() -> Duration) -> Covered {
        let end = self.end.load(SeqCst);
        let now = if end == 0 { return Covered::No } else { now().as_nanos() as u64 };
        if now >= end {
            return Covered::No;
        }
        let renew = self.renew.load(SeqCst);
        let first =
            now >= renew && self.renew.compare_exchange(renew, u64::MAX, SeqCst, SeqCst).is_ok();
        if first { Covered::Renew } else { Covered::Yes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    fn lease(waits: &[(u64, u64)]) -> LeaderLease {
        let mut l = LeaderLease::new(true);
        waits.iter().for_each(|(id, wait)| l.note_vote_wait(*id, ms(*wait)));
        l
    }

    #[test]
    fn a_lease_lasts_from_the_sending_and_less_than_the_shortest_wait() {
        let mut l = lease(&[(2, 220), (3, 350)]);
        l.begin(7, 5, ms(1000));
        assert_eq!(l.end(5), Duration::ZERO, "nobody has answered");
        l.confirm(6, ms(350), &[2, 3]);
        assert_eq!(l.end(5), Duration::ZERO, "another round");
        l.confirm(7, ms(350), &[2, 3]);
        assert_eq!((l.end(5), l.end(6)), (ms(1180), Duration::ZERO));
        // However long all wait, it is shorter than what a restarted member waits.
        let mut l = lease(&[(2, 5000)]);
        l.begin(1, 1, ms(0));
        l.confirm(1, ms(5000), &[2]);
        assert_eq!(l.end(1), LONGEST);
    }

    #[test]
    fn a_member_that_does_not_say_how_long_it_waits_leaves_none() {
        let mut l = lease(&[(2, 350)]);
        l.begin(1, 1, ms(1000));
        l.confirm(1, ms(350), &[2, 3]);
        assert_eq!(l.end(1), ms(1000));
    }

    #[test]
    fn a_change_of_members_ends_it_and_a_transfer_ends_it_for_the_term() {
        let mut l = lease(&[(2, 350)]);
        l.begin(1, 1, ms(1000));
        l.suspend();
        l.confirm(1, ms(350), &[2]);
        assert_eq!(l.end(1), Duration::ZERO, "a round from before the change");
        l.begin(2, 1, ms(1000));
        l.confirm(2, ms(350), &[2]);
        assert_eq!(l.end(1), ms(1250));
        l.give_up(1);
        l.begin(3, 1, ms(1100));
        l.confirm(3, ms(350), &[2]);
        assert_eq!(l.end(1), Duration::ZERO);
        l.begin(4, 2, ms(1200));
        l.confirm(4, ms(350), &[2]);
        assert_eq!(l.end(2), ms(1450), "another term");
    }

    #[test]
    fn switched_off_there_is_none() {
        let mut l = LeaderLease::new(false);
        l.note_vote_wait(2, ms(350));
        l.begin(1, 1, ms(1000));
        l.confirm(1, ms(350), &[2]);
        assert_eq!(l.end(1), Duration::ZERO);
    }

    #[test]
    fn readers_are_covered_until_the_end_and_one_of_them_renews() {
        let p = PublishedLease::default();
        assert_eq!(p.covers(|| ms(0)), Covered::No);
        p.set(ms(1250));
        assert_eq!(p.covers(|| ms(1100)), Covered::Yes);
        assert_eq!(p.covers(|| ms(1125)), Covered::Renew);
        assert_eq!(p.covers(|| ms(1249)), Covered::Yes);
        assert_eq!(p.covers(|| ms(1250)), Covered::No);
        // The same end again does not make another reader renew.
        p.set(ms(1250));
        assert_eq!(p.covers(|| ms(1130)), Covered::Yes);
        p.set(ms(1350));
        assert_eq!(p.covers(|| ms(1249)), Covered::Renew);
        p.set(Duration::ZERO);
        assert_eq!(p.covers(|| ms(1130)), Covered::No);
    }
}
