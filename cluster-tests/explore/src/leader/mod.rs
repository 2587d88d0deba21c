//! The world of the leader's lease, `docs/leader-lease.md`: three members that elect a leader, with
//! clocks of different rates. The lease and the promise are the product's code; elections and
//! rounds of messages are a model of Raft without a log.
//!
//! The promise: while a member has a lease, no other member leads in a later term.

mod kinds;

use std::{collections::BTreeSet, time::Duration};

pub use kinds::{Action, Bounds, Fault};
use kinds::{Body, MEMBERS, Message, PROMISE, TICK};
use strake_mds::consensus::leader_lease::{LeaderLease, Promise};

use crate::Model;

/// How long a member gives no vote after it has heard from its leader, at least: the next tick may
/// come at once.
const WAIT: Duration = Duration::from_millis(50 * (PROMISE as u64 - 1));

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Role {
    Follows,
    /// It asks to be elected; who has voted for it.
    Asks(BTreeSet<u64>),
    Leads,
}

#[derive(Clone, Debug, Hash)]
struct Member {
    term: u64,
    /// Whom it has voted for in this term; 0: nobody.
    voted: u64,
    role: Role,
    /// The last term in which it led.
    led: u64,
    clock: Duration,
    /// When its next tick may come.
    due: Duration,
    promise: Promise,
    lease: LeaderLease,
    /// The last round of messages and who has answered it.
    round: u64,
    answered: BTreeSet<u64>,
}

#[derive(Clone, Debug, Hash)]
pub struct World {
    fault: Fault,
    left: Bounds,
    members: Vec<Member>,
    messages: BTreeSet<Message>,
}

impl World {
    /// The first member leads, and nobody has promised anything.
    pub fn new(left: Bounds, fault: Fault) -> World {
        let member = |id| Member {
            term: 1,
            voted: 1,
            role: if id == 1 { Role::Leads } else { Role::Follows },
            led: if id == 1 { 1 } else { 0 },
            clock: Duration::ZERO,
            due: Duration::ZERO,
            promise: Promise::new(PROMISE, 0),
            lease: LeaderLease::new(true),
            round: 0,
            answered: BTreeSet::new(),
        };
        let members = Self::ids().map(member).collect();
        let mut w = World { fault, left, members, messages: BTreeSet::new() };
        for id in Self::ids() {
            let wait = w.told_wait(id);
            w.members.iter_mut().for_each(|m| m.lease.note_vote_wait(id, wait));
        }
        w
    }

    /// How long a member says that it gives no vote after it has heard from its leader.
    fn told_wait(&self, id: u64) -> Duration {
        match self.fault {
            Fault::WholeTicks => TICK * PROMISE as u32,
            Fault::ClocksAgree => WAIT * 11 / 9,
            Fault::OlderCounts => WAIT,
            _ if self.is_older(id) => Duration::ZERO,
            _ => WAIT,
        }
    }

    fn of(&mut self, id: u64) -> &mut Member {
        &mut self.members[id as usize - 1]
    }

    fn ids() -> impl Iterator<Item = u64> {
        1..=MEMBERS
    }

    fn is_older(&self, id: u64) -> bool {
        self.left.older && id == MEMBERS
    }

    fn send(&mut self, from: u64, to: u64, body: Body) {
        let term = self.of(from).term;
        self.messages.insert(Message { from, to, term, body });
    }

    fn send_all(&mut self, from: u64, body: &Body) {
        Self::ids().filter(|to| *to != from).for_each(|to| self.send(from, to, body.clone()));
    }

    fn may_vote(&self, id: u64, chosen: bool) -> bool {
        self.fault == Fault::VotesAnyway || self.members[id as usize - 1].promise.may_vote(chosen)
    }

    fn round(&mut self, id: u64) {
        let m = self.of(id);
        m.round += 1;
        m.answered.clear();
        let (number, term, now) = (m.round, m.term, m.clock);
        m.lease.begin(number, term, now);
        if self.fault == Fault::NobodyAnswers {
            self.confirm(id);
        }
        self.send_all(id, &Body::Beat(number));
    }

    fn campaign(&mut self, id: u64, chosen: bool) {
        let m = self.of(id);
        (m.term, m.voted, m.role) = (m.term + 1, id, Role::Asks([id].into()));
        self.send_all(id, &Body::Ask { chosen });
    }

    fn crash(&mut self, id: u64) {
        // Longer than any lease, as the product's `START_WAIT`.
        let start = if self.fault == Fault::RestartForgets { 0 } else { PROMISE };
        let m = self.of(id);
        (m.role, m.due, m.answered) = (Role::Follows, m.clock, BTreeSet::new());
        (m.promise, m.lease) = (Promise::new(PROMISE, start), LeaderLease::new(true));
    }

    fn hand_over(&mut self, from: u64, to: u64) {
        let fault = self.fault;
        let m = self.of(from);
        match fault {
            Fault::HandoverKeepsLease => {}
            Fault::HandoverOnlySuspends => m.lease.suspend(),
            _ => m.lease.give_up(m.term),
        }
        self.send(from, to, Body::Successor);
    }

    fn deliver(&mut self, m: &Message) {
        if let Body::Ask { chosen } = m.body
            && !self.may_vote(m.to, chosen)
        {
            return;
        }
        let to = self.of(m.to);
        if m.term > to.term {
            (to.term, to.voted, to.role) = (m.term, 0, Role::Follows);
        }
        if m.term < to.term {
            return;
        }
        match &m.body {
            Body::Beat(number) => self.beat(m, *number),
            Body::Heard(number, wait) => self.heard(m, *number, *wait),
            Body::Ask { .. } => {
                if to.voted == 0 {
                    to.voted = m.from;
                    self.send(m.to, m.from, Body::Vote);
                }
            }
            Body::Vote => {
                if let Role::Asks(votes) = &mut to.role {
                    votes.insert(m.from);
                    if votes.len() as u64 > MEMBERS / 2 {
                        (to.role, to.led) = (Role::Leads, to.term);
                    }
                }
            }
            Body::Successor => {
                if to.promise.has_started() {
                    self.campaign(m.to, true);
                }
            }
        }
    }

    fn beat(&mut self, m: &Message, number: u64) {
        let (older, wait) = (self.is_older(m.to), self.told_wait(m.to));
        let to = self.of(m.to);
        to.role = Role::Follows;
        if !older {
            to.promise.heard();
        }
        self.send(m.to, m.from, Body::Heard(number, wait));
    }

    fn heard(&mut self, m: &Message, number: u64, wait: Duration) {
        let fault = self.fault;
        let to = self.of(m.to);
        if to.role != Role::Leads {
            return;
        }
        to.lease.note_vote_wait(m.from, wait);
        if number != to.round && fault != Fault::AnyRound {
            return;
        }
        to.answered.insert(m.from);
        if fault == Fault::FromAnswers {
            let (number, term, now) = (to.round, to.term, to.clock);
            to.lease.begin(number, term, now);
        }
        if to.answered.len() as u64 + 1 > MEMBERS / 2 {
            self.confirm(m.to);
        }
    }

    fn confirm(&mut self, id: u64) {
        let others: Vec<u64> = Self::ids().filter(|o| *o != id).collect();
        let m = self.of(id);
        m.lease.confirm(m.round, WAIT, &others);
    }

    /// Removes messages that change nothing when they arrive.
    fn forget(&mut self) {
        let (members, any) = (&self.members, self.fault == Fault::AnyRound);
        self.messages.retain(|m| {
            let to = &members[m.to as usize - 1];
            match m.body {
                _ if m.term < to.term => false,
                Body::Heard(number, _) => to.role == Role::Leads && (number == to.round || any),
                Body::Vote => matches!(to.role, Role::Asks(_)),
                _ => true,
            }
        });
    }

    fn check(&self) -> Result<(), String> {
        for (i, m) in self.members.iter().enumerate() {
            let answers = m.role == Role::Leads || self.fault == Fault::FormerLeaderAnswers;
            if !answers || m.clock >= m.lease.end(m.led) {
                continue;
            }
            let later = |o: &&Member| o.role == Role::Leads && o.term > m.led;
            if let Some(o) = self.members.iter().find(later) {
                return Err(format!(
                    "{} has a lease in term {} and another member leads in term {}",
                    i + 1,
                    m.led,
                    o.term
                ));
            }
        }
        Ok(())
    }
}

impl Model for World {
    type Action = Action;

    fn actions(&self) -> Vec<Action> {
        let mut all: Vec<Action> = self.messages.iter().cloned().map(Action::Deliver).collect();
        let due: Vec<u64> = Self::ids()
            .filter(|id| self.members[*id as usize - 1].clock >= self.members[*id as usize - 1].due)
            .collect();
        // A late tick only makes a promise last longer.
        if self.left.steps > 0 && due.is_empty() {
            all.push(Action::Pass);
        }
        all.extend(due.into_iter().map(Action::Tick));
        for (id, m) in Self::ids().zip(&self.members) {
            let leads = m.role == Role::Leads;
            if leads && self.left.rounds > 0 {
                all.push(Action::Round(id));
            }
            if !leads && self.left.campaigns > 0 && self.may_vote(id, false) {
                all.push(Action::Campaign(id));
            }
            if self.left.crashes > 0 {
                all.push(Action::Crash(id));
            }
            if leads && self.left.handovers > 0 {
                let to = Self::ids().filter(|to| *to != id);
                all.extend(to.map(|to| Action::Handover(id, to)));
            }
        }
        all
    }

    fn act(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Deliver(m) => {
                self.messages.remove(m);
                self.deliver(m);
            }
            Action::Pass => {
                self.left.steps -= 1;
                let clocks = self.left.clocks;
                for (m, ms) in self.members.iter_mut().zip(clocks) {
                    m.clock += Duration::from_millis(ms);
                }
            }
            Action::Tick(id) => {
                let m = self.of(*id);
                m.due = m.clock + TICK;
                m.promise.tick();
            }
            Action::Round(id) => {
                self.left.rounds -= 1;
                self.round(*id);
            }
            Action::Campaign(id) => {
                self.left.campaigns -= 1;
                self.campaign(*id, false);
            }
            Action::Crash(id) => {
                self.left.crashes -= 1;
                self.crash(*id);
            }
            Action::Handover(from, to) => {
                self.left.handovers -= 1;
                self.hand_over(*from, *to);
            }
        }
        self.forget();
        self.check()
    }
}
