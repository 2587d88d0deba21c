//! The world of file locks, `docs/locks.md`: a log and its leader, and two mounts, each with a
//! kernel, a daemon and a few programs that lock one file. The tables of owners, of unlocks on the
//! way, of lock waiters, of questions and of attempts are the product's code, and so is the verdict
//! on a request; the rest is a model of the shell code.
//!
//! The kernel queues FLUSH and RELEASE. Once close(2) has returned, it may give the address of the
//! locks' owner to the next program, while the RELEASE is still queued. Threads of the daemon read
//! requests, and note them later.
//!
//! The promises, in every world: no two programs have conflicting locks. A program that was told
//! that it has a lock has it until it begins to give it up. A request is refused only if, while it
//! lasted, another program had a conflicting lock, or asked for one and got it; an owner whose
//! unlock, close or interrupted request had returned before does not count. And when no further
//! step happens by itself, every call was answered except waits for a lock that a program has, and
//! only locks that programs have are left.

mod kinds;
mod leader;
mod mount;

use std::{collections::BTreeMap, time::Duration};

pub use kinds::{Action, Bounds, Fault, Kind};
use kinds::{Asked, Body, Has, MOUNTS, Message, Program, Request};
use leader::{Leader, Log};
use mount::Mount;
use strake_mds::namespace::locks::Locks;

use crate::Model;

/// Time does not pass here.
const NOW: Duration = Duration::ZERO;

#[derive(Clone, Debug, Hash)]
pub struct World {
    fault: Fault,
    left: Bounds,
    log: Log,
    leader: Leader,
    mounts: [Mount; MOUNTS],
    messages: Vec<Message>,
}

fn conflict(a: bool, b: bool) -> bool {
    a || b
}

impl World {
    /// All programs have the file open, and there are no locks.
    pub fn new(left: Bounds, fault: Fault) -> World {
        let mut leader = Leader::new(1);
        leader.greeted = [Some(1); MOUNTS];
        for session in 1..=MOUNTS as u64 {
            leader.checks.hello(session);
            leader.checks.take(session, true);
        }
        let mounts = [0, 1].map(|i| Mount::new(i, left.programs[i]));
        let sessions = (1..=MOUNTS as u64).collect();
        let log = Log {
            sessions,
            locks: Locks::default(),
            replies: BTreeMap::new(),
            lowest: BTreeMap::new(),
        };
        World { fault, left, log, leader, mounts, messages: Vec::new() }
    }

    fn deliver(&mut self, m: &Message) -> Result<(), String> {
        if let Some(at) = self.messages.iter().position(|x| x == m) {
            self.messages.remove(at);
        }
        if matches!(m.body, Body::Hello | Body::Set(_) | Body::List(..) | Body::Checked(_)) {
            self.leader_takes(m.clone());
            return Ok(());
        }
        let mount = &self.mounts[m.mount];
        if mount.connection == m.connection { self.mount_takes(m.clone()) } else { Ok(()) }
    }

    /// The steps that happen by themselves.
    fn by_itself(&self) -> Vec<Action> {
        let mut out = Vec::new();
        let mut messages = self.messages.clone();
        messages.dedup();
        // Hello arrives before other messages of its connection.
        let is_late = |m: &Message| {
            let hello = |h: &&Message| {
                h.mount == m.mount && h.connection == m.connection && h.body == Body::Hello
            };
            m.body != Body::Hello && self.messages.iter().any(|h| hello(&h))
        };
        out.extend(messages.into_iter().filter(|m| !is_late(m)).map(Action::Deliver));
        out.extend(
            self.leader
                .tasks
                .iter()
                .filter(|t| self.can_step(t))
                .map(|t| Action::Step(t.mount, t.set.seq)),
        );
        for (i, m) in self.mounts.iter().enumerate() {
            out.extend((!m.late.is_empty()).then_some(Action::Resend(i)));
            out.extend(self.can_take(i).then_some(Action::Take(i)));
            out.extend(m.reading.iter().map(|r| Action::Note(i, *r)));
            let jobs = m.jobs.iter().map(|j| j.request.program);
            out.extend(
                jobs.filter(|p| self.clone().goes_on(i, *p) != Ok(false))
                    .map(|p| Action::GoOn(i, p)),
            );
            let questions = m.questions.iter().map(|q| q.0);
            out.extend(
                questions.filter(|q| self.clone().answers(i, *q)).map(|q| Action::Answer(i, q)),
            );
            out.extend((m.news && m.term == self.leader.term).then_some(Action::Tell(i)));
            let lost = !self.log.sessions.contains(&m.session);
            let greets = self
                .messages
                .iter()
                .any(|x| x.mount == i && x.connection == m.connection && x.body == Body::Hello);
            if m.term != self.leader.term {
                out.push(Action::Reconnect(i));
            } else if lost && !greets {
                out.push(Action::Learn(i));
            }
        }
        out
    }

    /// What programs may do, and the faults that may happen.
    fn chances(&self) -> Vec<Action> {
        let (mut out, left) = (Vec::new(), &self.left);
        let mut may =
            |can: bool, left: u8, action: Action| out.extend((can && left > 0).then_some(action));
        for (i, m) in self.mounts.iter().enumerate() {
            may(m.programs.iter().any(|p| p.handles.is_empty()), left.opens, Action::Open(i));
            for (n, p) in m.programs.iter().enumerate().filter(|(_, p)| !p.handles.is_empty()) {
                let idle = p.call.is_none() && !p.is_dying;
                may(idle, left.seconds, Action::Second(i, n));
                for handle in p.handles.iter().copied() {
                    for (write, wait) in
                        [(true, false), (true, true), (false, false), (false, true)]
                    {
                        let bound = if wait { left.waits } else { left.tries };
                        let bound = if write { bound } else { bound.min(left.reads) };
                        let same = p.has.is_some_and(|h| h.write == write);
                        may(
                            idle && !same,
                            bound,
                            Action::Lock { mount: i, program: n, handle, write, wait },
                        );
                    }
                    may(idle, left.closes, Action::Close(i, n, handle));
                }
                may(idle && p.has.is_some(), left.unlocks, Action::Unlock(i, n));
                may(self.can_signal(i, n) && !p.is_dying, left.signals, Action::Signal(i, n));
                may(!p.is_dying && (idle || self.can_signal(i, n)), left.kills, Action::Kill(i, n));
                let flushes = m.job(n).is_some_and(|j| j.request.asked == Asked::Flush);
                may(p.is_dying && flushes, 1, Action::LetGo(i, n));
            }
            may(self.log.sessions.contains(&m.session), left.evictions, Action::Evict(i));
            let lives = self.log.sessions.contains(&m.session) && m.term == self.leader.term;
            may(lives, left.restarts, Action::Restart(i));
        }
        let lists = self.messages.iter().filter(|m| matches!(m.body, Body::List(..)));
        lists.for_each(|m| may(true, left.losses, Action::Lose(m.clone())));
        may(true, left.failovers, Action::Failover);
        out
    }

    fn programs(&self) -> impl Iterator<Item = (usize, usize, &Program)> {
        self.mounts
            .iter()
            .enumerate()
            .flat_map(|(i, m)| m.programs.iter().enumerate().map(move |(n, p)| (i, n, p)))
    }

    /// The lock that a program has at the leader for a request that is not answered yet.
    fn has_got(&self, i: usize, n: usize) -> Option<bool> {
        let m = &self.mounts[i];
        let call = m.programs[n].call.filter(|r| matches!(r.asked, Asked::Lock { .. }))?;
        self.log.of(&self.owner(m.session, m.owners.number(self.key(&call))?))
    }

    /// The promises that hold in every world.
    fn check(&mut self) -> Result<(), String> {
        let mut excused = Vec::new();
        for (i, n, p) in self.programs() {
            if let Some(Has { write, number, session }) = p.has {
                let there = self.log.of(&self.owner(session, number));
                if there != Some(true) && there != Some(write) {
                    return Err(format!(
                        "program {n} of mount {i} has no longer what it was told that it has"
                    ));
                }
            }
            for (j, o, other) in self.programs().filter(|(j, o, _)| (*j, *o) != (i, n)) {
                if let (Some(a), Some(b)) = (p.has, other.has)
                    && conflict(a.write, b.write)
                {
                    return Err(format!(
                        "program {n} of mount {i} and {o} of mount {j} have the lock"
                    ));
                }
                let Some(Request { asked: Asked::Lock { write, .. }, .. }) = p.call else {
                    continue;
                };
                let theirs = [other.may, self.has_got(j, o)];
                if theirs.into_iter().flatten().any(|w| conflict(w, write)) {
                    excused.push((i, n));
                }
            }
        }
        excused.into_iter().for_each(|(i, n)| self.mounts[i].programs[n].excused = true);
        Ok(())
    }

    /// The promises that hold when no further step happens by itself.
    fn is_at_rest(&self) -> Result<(), String> {
        for (i, n, p) in self.programs() {
            let Some(call) = p.call else { continue };
            let Asked::Lock { write, wait: true } = call.asked else {
                return Err(format!("program {n} of mount {i} is never answered"));
            };
            let others = self.programs().filter(|(j, o, _)| (*j, *o) != (i, n));
            if !others.filter_map(|(_, _, p)| p.has).any(|h| conflict(h.write, write)) {
                return Err(format!("program {n} of mount {i} waits for nobody's lock"));
            }
        }
        for (who, spans) in &self.log.locks.held {
            let whose = |h: Has| (h.session, h.number) == (who.session, who.owner);
            let Some(has) = self.programs().filter_map(|(_, _, p)| p.has).find(|h| whose(*h))
            else {
                return Err(format!("a lock of session {} stays that nobody has", who.session));
            };
            if spans.iter().any(|s| s.write != has.write) {
                return Err(format!(
                    "a lock of session {} is another than its program has",
                    who.session
                ));
            }
        }
        for (i, m) in self.mounts.iter().enumerate() {
            if m.programs.iter().all(|p| p.handles.is_empty()) && !m.owners.is_empty() {
                return Err(format!("mount {i} knows owners of files that are closed"));
            }
            if let Some(op) = m.ops.iter().find(|o| o.given.is_none()) {
                return Err(format!("the client of mount {i} never goes on with {op:?}"));
            }
        }
        Ok(())
    }

    fn spend(&mut self, action: &Action) {
        let left = &mut self.left;
        let of = match action {
            Action::Lock { write, wait, .. } => {
                left.reads -= u8::from(!write);
                if *wait { &mut left.waits } else { &mut left.tries }
            }
            Action::Open(_) => &mut left.opens,
            Action::Second(..) => &mut left.seconds,
            Action::Unlock(..) => &mut left.unlocks,
            Action::Close(..) => &mut left.closes,
            Action::Signal(..) => &mut left.signals,
            Action::Kill(..) => &mut left.kills,
            Action::Lose(_) => &mut left.losses,
            Action::Evict(_) => &mut left.evictions,
            Action::Failover => &mut left.failovers,
            Action::Restart(_) => &mut left.restarts,
            _ => return,
        };
        *of -= 1;
    }

    fn does(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Deliver(m) => self.deliver(m)?,
            Action::Lose(m) => {
                self.messages.retain(|x| x != m);
                self.lost(m);
            }
            Action::Step(mount, seq) => self.step(*mount, *seq),
            Action::Open(i) => self.mounts[*i].open(),
            Action::Second(i, n) => {
                let m = &mut self.mounts[*i];
                m.last += 1;
                m.programs[*n].handles.push(m.last);
            }
            Action::Lock { mount, program, handle, write, wait } => {
                self.call(*mount, *program, *handle, Asked::Lock { write: *write, wait: *wait });
            }
            Action::Unlock(i, n) => {
                let handle = self.mounts[*i].programs[*n].handles[0];
                self.call(*i, *n, handle, Asked::Unlock);
            }
            Action::Close(i, n, handle) => self.call(*i, *n, *handle, Asked::Flush),
            Action::Signal(i, n) => self.signal(*i, *n),
            Action::Kill(i, n) => {
                self.signal(*i, *n);
                let p = &mut self.mounts[*i].programs[*n];
                p.is_dying = true;
                let handle = p.handles[0];
                self.call(*i, *n, handle, Asked::Flush);
            }
            Action::Take(i) => {
                let m = &mut self.mounts[*i];
                let request = m.queue.remove(0);
                m.reading.push(request);
                m.reading.sort();
            }
            Action::Note(i, request) => self.note(*i, *request)?,
            Action::GoOn(i, n) => drop(self.goes_on(*i, *n)?),
            Action::Resend(i) => self.mounts[*i].resend(),
            Action::LetGo(i, n) => self.let_go(*i, *n)?,
            Action::Answer(i, number) => drop(self.answers(*i, *number)),
            Action::Tell(i) => drop(self.tells(*i)),
            Action::Reconnect(i) => self.reconnect(*i),
            Action::Evict(i) => self.evict(*i),
            Action::Learn(i) => self.learn(*i)?,
            Action::Failover => self.failover(),
            Action::Restart(i) => self.restart(*i),
        }
        Ok(())
    }
}

impl Model for World {
    type Action = Action;

    fn actions(&self) -> Vec<Action> {
        let mut out = self.by_itself();
        out.extend(self.chances());
        out
    }

    fn act(&mut self, action: &Action) -> Result<(), String> {
        self.spend(action);
        self.does(action)?;
        self.check()?;
        if self.by_itself().is_empty() { self.is_at_rest() } else { Ok(()) }
    }
}
