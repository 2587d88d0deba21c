//! The log and its leader.

use std::collections::{BTreeMap, BTreeSet};

use strake_mds::{
    leases::checks::Checks,
    lock_waiters::{
        Entry, LockWaiters, MAX_LOOKS,
        verdict::{self, Verdict},
    },
    namespace::{
        locks::{Locks, Owner, Want},
        spans::{self, Span},
    },
    request_dedup::{Begun, RequestDedup},
};
use strake_proto::{Code, Error, SessionId, pb::LockKind};

use super::{
    NOW, World,
    kinds::{Body, Edit, FILE, Fault, Kind, MOUNTS, Message, Outcome, Set, Step, Task},
};

/// The state that every leader has: the log.
#[derive(Clone, Debug, Hash)]
pub(super) struct Log {
    pub sessions: BTreeSet<SessionId>,
    pub locks: Locks,
    /// Outcomes of requests that may be sent again.
    pub replies: BTreeMap<(SessionId, u64), Outcome>,
    pub lowest: BTreeMap<SessionId, u64>,
}

/// The state of one leader.
#[derive(Clone, Debug, Hash)]
pub(super) struct Leader {
    pub term: u64,
    pub checks: Checks,
    pub lock_waiters: LockWaiters,
    pub request_dedup: RequestDedup,
    /// The connections on which mounts have said hello.
    pub greeted: [Option<u64>; MOUNTS],
    /// Lists that are still to be answered, with their connections.
    pub polls: [Option<(u64, u64)>; MOUNTS],
    pub tasks: Vec<Task>,
}

impl Leader {
    pub fn new(term: u64) -> Leader {
        Leader {
            term,
            checks: Checks::new(term),
            lock_waiters: LockWaiters::default(),
            request_dedup: RequestDedup::default(),
            greeted: [None; MOUNTS],
            polls: [None; MOUNTS],
            tasks: Vec::new(),
        }
    }
}

impl Log {
    pub fn of(&self, who: &Owner) -> Option<bool> {
        let mine = self.locks.held.iter().find(|(o, _)| o == who)?;
        mine.1.first().map(|s| s.write)
    }

    fn edit(&mut self, who: Owner, change: impl FnOnce(&mut Vec<Span>)) {
        let mut mine = Vec::new();
        if let Some(at) = self.locks.held.iter().position(|(o, _)| *o == who) {
            mine = self.locks.held.remove(at).1;
        }
        change(&mut mine);
        if !mine.is_empty() {
            self.locks.held.push((who, mine));
            self.locks.held.sort_by_key(|(o, _)| *o);
        }
    }

    /// As the state machine of the log does it.
    fn set(&mut self, want: &Want, edit: Edit) -> Outcome {
        let before = self.of(&want.who);
        let lock = |write| Want { span: Span { write, ..want.span }, ..*want };
        let free = |log: &Log, write| log.locks.barring(&lock(write)).next().is_none();
        match edit {
            Edit::Unlock | Edit::Restore(None) => {
                self.edit(want.who, |s| spans::unlock(s, 0, u64::MAX))
            }
            Edit::Lock(write) if free(self, write) => {
                self.edit(want.who, |s| spans::lock(s, lock(write).span))
            }
            Edit::Lock(_) => return Outcome::Conflict,
            Edit::Restore(Some(write)) => {
                // Others may have got read locks where it had a write lock.
                let write = write && free(self, true);
                self.edit(want.who, |s| spans::lock(s, lock(write).span));
            }
        }
        Outcome::Done(before)
    }
}

impl World {
    pub(super) fn owner(&self, session: SessionId, number: u64) -> Owner {
        let kind =
            if self.left.kind == Kind::Flock { LockKind::LockFlock } else { LockKind::LockPosix };
        Owner { kind, session, owner: number }
    }

    pub(super) fn want(&self, session: SessionId, number: u64, write: bool) -> Want {
        let who = self.owner(session, number);
        Want { ino: FILE, who, span: Span { start: 0, end: u64::MAX, write, pid: 0 } }
    }

    fn barring(&self, want: &Want) -> Vec<(Owner, Span)> {
        self.log.locks.barring(want).collect()
    }

    pub(super) fn leader_takes(&mut self, m: Message) {
        let Message { mount, session, connection, body } = m;
        if !self.log.sessions.contains(&session) && body != Body::Hello {
            return;
        }
        match body {
            Body::Hello => {
                self.log.sessions.insert(session);
                self.leader.greeted[mount] = Some(connection);
                self.leader.checks.hello(session);
            }
            Body::Set(set) => self.takes_set(mount, connection, session, set),
            Body::List(number, entries) => {
                let before = self.leader.lock_waiters.clone();
                let Ok(files) = self.leader.lock_waiters.set(NOW, session, number, &entries) else {
                    return;
                };
                let mut looks = MAX_LOOKS;
                let owners = |w: &Want| Ok(self.log.locks.barring(w).map(|(who, _)| who).collect());
                let is_dead = |e: &&Entry| {
                    e.want.who.kind == LockKind::LockPosix
                        && !e.trying
                        && self.leader.lock_waiters.is_deadlock(&e.want, &mut looks, owners)
                            == Ok(true)
                };
                let dead: Vec<u64> = entries.iter().filter(is_dead).map(|e| e.id).collect();
                let looked = self.fault != Fault::LeftNotLooked || entries.len() >= before.len();
                if files.contains(&FILE) && looked {
                    self.look();
                }
                // A list that was overtaken by a newer one is answered, but changes nothing.
                if !self.leader.lock_waiters.is_newest(session, number) {
                    return self.send(
                        mount,
                        connection,
                        Body::Turns(number, Vec::new(), Vec::new()),
                    );
                }
                self.leader.polls[mount] = Some((number, connection));
                if entries.is_empty() || !dead.is_empty() {
                    self.answer_poll(mount, session, dead);
                }
            }
            Body::Checked(number) => self.leader.checks.answered(session, &[number]),
            Body::Question(_) | Body::Outcome(..) | Body::Turns(..) => {}
        }
        self.tell();
    }

    fn takes_set(&mut self, mount: usize, connection: u64, session: SessionId, set: Set) {
        let lowest = self.log.lowest.entry(session).or_default();
        *lowest = set.lowest.max(*lowest);
        let lowest = *lowest;
        self.log.replies.retain(|(id, seq), _| *id != session || *seq >= lowest);
        if let Some(outcome) = self.log.replies.get(&(session, set.seq)) {
            let outcome = *outcome;
            self.leader.request_dedup.ran(session, set.seq);
            return self.send(mount, connection, Body::Outcome(set.seq, outcome));
        }
        if set.seq < lowest {
            return;
        }
        let write = matches!(set.edit, Edit::Lock(true));
        let want = self.want(session, set.number, write);
        let step = match self.leader.request_dedup.begin(session, set.seq, set.lowest) {
            Ok(Begun::Refused(_)) if self.fault != Fault::RefusedForgotten => {
                return self.send(mount, connection, Body::Outcome(set.seq, Outcome::Conflict));
            }
            Ok(Begun::Again) => Step::Passed,
            Ok(_) if !matches!(set.edit, Edit::Lock(_)) => {
                let _ = self.leader.request_dedup.passed(session, set.seq);
                Step::Passed
            }
            Ok(_) => Step::Looks,
            Err(e) => {
                // It arrives again while another attempt is being worked on: that one's answer also
                // goes to this one.
                let same = |t: &&mut Task| t.mount == mount && t.set.seq == set.seq;
                if e.code == Code::Overloaded
                    && let Some(t) = self.leader.tasks.iter_mut().find(same)
                {
                    t.connection = t.connection.max(connection);
                }
                return;
            }
        };
        let (asked, waits_for) = (BTreeSet::new(), Vec::new());
        self.leader.tasks.push(Task { mount, connection, set, want, asked, waits_for, step });
        self.leader.tasks.sort_by_key(|t| (t.mount, t.set.seq, t.connection));
    }

    /// Checks the lock waiters.
    fn look(&mut self) {
        let locks = &self.log.locks;
        let barred = |w: &Want| Ok(locks.barring(w).next().is_some());
        let _ = self.leader.lock_waiters.look(NOW, FILE, barred);
    }

    fn answer_poll(&mut self, mount: usize, session: SessionId, dead: Vec<u64>) {
        if let Some((number, connection)) = self.leader.polls[mount].take() {
            let mut ready = self.leader.lock_waiters.ready(session);
            ready.retain(|id| !dead.contains(id));
            self.send(mount, connection, Body::Turns(number, ready, dead));
        }
    }

    /// Tells mounts of turns and questions.
    pub(super) fn tell(&mut self) {
        for mount in 0..MOUNTS {
            let session = self.mounts[mount].session;
            if let Some((number, _)) = self.leader.polls[mount] {
                let stale = !self.leader.lock_waiters.is_newest(session, number);
                if stale || !self.leader.lock_waiters.ready(session).is_empty() {
                    self.answer_poll(mount, session, Vec::new());
                }
            }
            if let Some(connection) =
                self.leader.greeted[mount].filter(|c| *c == self.mounts[mount].connection)
            {
                for (number, _) in self.leader.checks.take(session, true) {
                    self.send(mount, connection, Body::Question(number));
                }
            }
        }
    }

    /// What the tables say about this task now.
    fn verdict(&self, t: &Task) -> Verdict {
        let turn = self.leader.lock_waiters.is_anothers_turn(NOW, &t.want);
        let barring = self.barring(&t.want);
        match verdict::judge(&t.want, t.set.patient, &barring, turn, &t.asked) {
            Verdict::Ask(_) if self.fault == Fault::NotAsked => Verdict::Refused(""),
            v => v,
        }
    }

    pub(super) fn can_step(&self, t: &Task) -> bool {
        let is_in = |(id, n): &(SessionId, u64)| self.leader.checks.is_in(*id, *n);
        t.waits_for.iter().all(is_in)
            && (t.step != Step::Looks || self.verdict(t) != Verdict::AfterTurn)
    }

    fn ask(&mut self, t: &mut Task, new: BTreeSet<SessionId>) {
        let in_grace = self.leader.term > 1 && self.fault != Fault::NewLeaderAsksNobody;
        for id in &new {
            if self.fault == Fault::SharesSent {
                let open =
                    self.leader.tasks.iter().flat_map(|t| &t.waits_for).find(|(s, _)| s == id);
                if let Some(open) = open {
                    t.waits_for.push(*open);
                    continue;
                }
            }
            let number = self.leader.checks.ask(NOW, *id, FILE, in_grace);
            t.waits_for.extend(number.map(|n| (*id, n)));
        }
        t.asked.extend(new);
    }

    pub(super) fn step(&mut self, mount: usize, seq: u64) {
        let at = self
            .leader
            .tasks
            .iter()
            .position(|t| t.mount == mount && t.set.seq == seq && self.can_step(t));
        let Some(at) = at else { return };
        let mut t = self.leader.tasks.remove(at);
        t.waits_for.clear();
        let session = t.want.who.session;
        if !self.log.sessions.contains(&session) {
            return;
        }
        let mut outcome = None;
        match t.step {
            Step::Looks => {
                self.look();
                match self.verdict(&t) {
                    Verdict::Ask(new) => self.ask(&mut t, new),
                    Verdict::Refused(m) => {
                        let e = Error::new(Code::LockConflict, m);
                        self.leader.request_dedup.refused(session, seq, &e);
                        outcome = Some(Outcome::Conflict);
                    }
                    Verdict::AfterTurn => {}
                    Verdict::Free if self.leader.request_dedup.passed(session, seq).is_err() => {
                        return self.tell();
                    }
                    Verdict::Free => t.step = Step::Passed,
                }
            }
            Step::Passed => outcome = self.runs(&mut t),
            Step::InTheLog => {
                let barring = self.barring(&t.want);
                let new = verdict::to_ask(&t.want, &barring, &t.asked);
                if !new.is_empty() && !matches!(self.fault, Fault::LogRefusalTold | Fault::NotAsked)
                {
                    self.ask(&mut t, new);
                } else if barring.is_empty() && self.fault != Fault::LogRefusalTold {
                    outcome = Some(Outcome::Again);
                } else {
                    outcome = Some(Outcome::Conflict);
                }
            }
        }
        match outcome {
            Some(outcome) => self.send(mount, t.connection, Body::Outcome(seq, outcome)),
            None => {
                self.leader.tasks.push(t);
                self.leader.tasks.sort_by_key(|t| (t.mount, t.set.seq, t.connection));
            }
        }
        self.tell();
    }

    /// Applies an entry of the log. Returns its answer, if there is one yet.
    fn runs(&mut self, t: &mut Task) -> Option<Outcome> {
        let key = (t.want.who.session, t.set.seq);
        self.leader.request_dedup.ran(key.0, key.1);
        if self.log.lowest.get(&key.0).is_some_and(|l| key.1 < *l) {
            // Refused: its sender no longer waits for it.
            return Some(Outcome::Conflict);
        }
        let outcome = match self.log.replies.get(&key) {
            Some(before) => *before,
            None => self.log.set(&t.want, t.set.edit),
        };
        self.log.replies.insert(key, outcome);
        match outcome {
            Outcome::Conflict if !t.set.patient => {
                t.step = Step::InTheLog;
                None
            }
            outcome => {
                if t.set.wait != 0 && outcome != Outcome::Conflict {
                    self.leader.lock_waiters.given(NOW, key.0, t.set.wait);
                }
                if self.fault != Fault::TurnsNotGiven {
                    self.look();
                }
                Some(outcome)
            }
        }
    }

    /// Applies an entry of the log: a session is evicted, and its locks are removed.
    pub(super) fn evict(&mut self, mount: usize) {
        let session = self.mounts[mount].session;
        self.log.sessions.remove(&session);
        self.log.locks.held.retain(|(who, _)| who.session != session);
        self.log.replies.retain(|(id, _), _| *id != session);
        self.leader.checks.ended(session);
        self.leader.lock_waiters.remove(session);
        let sessions = self.log.sessions.clone();
        self.leader.request_dedup.retain(|id| sessions.contains(&id));
        self.leader.tasks.retain(|t| t.mount != mount);
        (self.leader.greeted[mount], self.leader.polls[mount]) = (None, None);
        for p in &mut self.mounts[mount].programs {
            (p.has, p.may) = (None, None);
        }
        self.look();
        self.tell();
    }

    /// The leader dies, and the next one has only what is in the log.
    pub(super) fn failover(&mut self) {
        self.leader = Leader::new(self.leader.term + 1);
        self.messages.clear();
    }
}
