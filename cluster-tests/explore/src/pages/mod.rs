//! The world of pages of memory mappings, "Between nodes" in `docs/mappings.md`: a leader, two
//! clients with their kernels, and a storage server with one page of a file. The client's table and
//! the leader's tables (of locks, of writers and of clients that were asked) are the product's
//! code; the rest is a model of the shell code.
//!
//! Each client has two bytes of the page: one that its programs store to through a mapping, and one
//! that they write with write(2). Both are counters, so a byte that gets lower was lost.
//!
//! The promises: no byte gets lower at the storage server. No client has or gets a page in which a
//! byte of another client is older than at the storage server, unless its session is evicted. And
//! when no further step happens by itself, every request was answered, and every byte is at the
//! storage server or in a dirty page, except for those of evicted sessions.

#[expect(clippy::collapsible_match, reason = "a guard of a match changes nothing")]
mod client;
mod kinds;
#[expect(clippy::collapsible_match, reason = "a guard of a match changes nothing")]
mod leader;

use std::{collections::BTreeSet, time::Duration};

use client::Client;
pub use kinds::{Action, Bounds, Fault};
use kinds::{Body, CLIENTS, Cells, FILE, Job, Message, Opened, Stage, Step, Why, Writes};
use leader::Leader;
use strake_mds::{
    leases::{pages::Pages, writers::Writers},
    namespace::locks::Locks,
};
use strake_proto::SessionId;

use crate::Model;

/// Time does not pass here: what lasts a while may be over at any moment.
const NOW: Duration = Duration::ZERO;
/// How often the leader may check the waiting requests again when nothing else can happen.
const LOOKS: u8 = 3;

/// The state that every leader has: the log.
#[derive(Clone, Debug, Hash)]
struct Log {
    sessions: BTreeSet<SessionId>,
    writers: BTreeSet<SessionId>,
    evicted: BTreeSet<SessionId>,
    locks: Locks,
}

#[derive(Clone, Debug, Hash)]
struct Storage {
    cells: Cells,
    /// The evicted sessions that it knows of.
    refuses: BTreeSet<SessionId>,
}

#[derive(Clone, Debug, Hash)]
pub struct World {
    fault: Fault,
    left: Bounds,
    looks: u8,
    log: Log,
    leader: Leader,
    clients: [Client; CLIENTS],
    storage: Storage,
    messages: Vec<Message>,
}

fn is_for_leader(body: &Body) -> bool {
    use Body::{Acknowledges, Asks, Closes, Gave, Hello, Opens, Unlocks};
    matches!(body, Hello | Asks(_) | Unlocks | Opens | Closes | Acknowledges | Gave(_))
}

impl World {
    /// The first client has the file open for writing, with a lease if no other client has it open
    /// so.
    pub fn new(left: Bounds, fault: Fault) -> World {
        let mut clients = [0, 1].map(Client::new);
        let readers = left.reader && left.alone;
        let alone = left.reader || left.alone;
        clients[0].opened = if readers { Opened::ForReading } else { Opened::ForBoth };
        clients[0].leased = alone && !readers;
        clients[1].opened = match (left.reader, left.alone) {
            (true, _) => Opened::ForReading,
            (_, true) => Opened::No,
            _ => Opened::ForBoth,
        };
        let writers: BTreeSet<SessionId> = match (readers, alone) {
            (true, _) => BTreeSet::new(),
            (_, true) => [1].into(),
            _ => [1, 2].into(),
        };
        let leader = Leader {
            term: 1,
            pages: Pages::new(1),
            writers: Writers::new(writers.iter().map(|s| (*s, FILE)), []),
            leased: if clients[0].leased { [0].into() } else { BTreeSet::new() },
            recalled: BTreeSet::new(),
            greeted: [Some(1); CLIENTS],
            tasks: Vec::new(),
        };
        World {
            fault,
            left,
            looks: 0,
            log: Log {
                sessions: [1, 2].into(),
                writers,
                evicted: BTreeSet::new(),
                locks: Locks::default(),
            },
            leader,
            clients,
            storage: Storage { cells: Cells::default(), refuses: BTreeSet::new() },
            messages: Vec::new(),
        }
    }

    fn client_of(session: SessionId) -> usize {
        (session as usize - 1) % CLIENTS
    }

    /// Sends a message to or from the leader. One that cannot arrive is not sent.
    fn send(&mut self, client: usize, body: Body) {
        let c = &self.clients[client];
        let (session, connection) = (c.session, c.connection);
        let hello =
            |m: &Message| m.client == client && m.connection == connection && m.body == Body::Hello;
        let known = self.leader.greeted[client] == Some(connection);
        let says = is_for_leader(&body) && (body == Body::Hello || self.messages.iter().any(hello));
        let greeted = known || says;
        if c.term == self.leader.term && greeted {
            self.messages.push(Message { client, session, connection, body });
            self.messages.sort();
        }
    }

    fn deliver(&mut self, m: &Message) -> Result<(), String> {
        if let Some(i) = self.messages.iter().position(|x| x == m) {
            self.messages.remove(i);
        }
        if m.connection == 0 {
            return self.storage_takes(m.clone());
        }
        if is_for_leader(&m.body) {
            self.leader_takes(m.clone());
        } else {
            self.client_takes(m.clone());
        }
        Ok(())
    }

    /// The steps that happen by themselves.
    fn goes_on(&self) -> Vec<Action> {
        let mut out = Vec::new();
        let mut messages = self.messages.clone();
        messages.dedup();
        // Hello arrives before other messages of its connection.
        let is_late = |m: &Message| {
            let hello = |h: &&Message| {
                h.client == m.client && h.connection == m.connection && h.body == Body::Hello
            };
            m.body != Body::Hello && self.messages.iter().any(|h| hello(&h))
        };
        out.extend(messages.into_iter().filter(|m| !is_late(m)).map(Action::Deliver));
        out.extend(
            self.leader.tasks.iter().filter(|t| self.can_step(t)).cloned().map(Action::Step),
        );
        for (i, c) in self.clients.iter().enumerate() {
            if c.page_in.is_some() && self.clone().page_in_goes_on(i) != Ok(false) {
                out.push(Action::GoOn(i));
            }
            if c.writes.is_some() && self.clone().write_goes_on(i) {
                out.push(Action::WriteOn(i));
            }
            let leaves = c.leaves();
            if c.opened == Opened::Answered && !leaves {
                out.push(Action::IsOpen(i));
            }
            if c.opened == Opened::Closing && !leaves {
                out.push(Action::IsClosed(i));
            }
            if self.can_take_out(i) {
                out.push(Action::TakeOut(i));
            }
            out.extend(
                c.jobs
                    .iter()
                    .filter(|j| self.clone().job_goes_on(i, **j))
                    .map(|j| Action::Job(i, *j)),
            );
            if c.term != self.leader.term {
                out.push(Action::Reconnect(i));
            }
            if self.log.evicted.contains(&c.session) {
                out.push(Action::Learn(i));
            }
        }
        if !self.log.evicted.is_subset(&self.storage.refuses) {
            out.push(Action::Hear);
        }
        if out.is_empty()
            && self.looks < LOOKS
            && self.leader.tasks.iter().any(|t| matches!(t.stage, Stage::Waits(_)))
        {
            out.push(Action::Look);
        }
        out
    }

    /// What programs may do, and the faults that may happen.
    fn chances(&self) -> Vec<Action> {
        let (mut out, left) = (Vec::new(), &self.left);
        for (i, c) in self.clients.iter().enumerate() {
            let is_open = matches!(c.opened, Opened::ForReading | Opened::ForBoth);
            let mut may = |can: bool, left: u8, action: Action| {
                out.extend((can && left > 0).then_some(action))
            };
            may(
                is_open && c.page.is_none() && c.page_in.is_none(),
                left.page_ins,
                Action::PageIn(i),
            );
            may(c.opened == Opened::ForBoth && c.page.is_some(), left.stores, Action::Store(i));
            may(!c.back && c.page.is_some_and(|p| p.dirty), left.write_backs, Action::WriteBack(i));
            may(!c.back && c.page.is_some_and(|p| !p.dirty), left.drops, Action::Drop(i));
            may(c.out && c.page.is_some(), left.checks, Action::Check(i));
            may(c.opened == Opened::ForBoth && c.writes.is_none(), left.writes, Action::Write(i));
            may(matches!(c.opened, Opened::No | Opened::ForReading), left.opens, Action::Open(i));
            let idle = c.page_in.is_none() && c.writes.is_none() && !c.back;
            let clean = c.page.is_none_or(|p| !p.dirty) || self.fault == Fault::ClosesMapped;
            may(is_open && idle && clean, left.closes, Action::Close(i));
            may(self.log.sessions.contains(&c.session), left.evictions, Action::Evict(i));
            may(!self.log.evicted.contains(&c.session), left.restarts, Action::Restart(i));
        }
        out.extend((left.failovers > 0).then_some(Action::Failover));
        out
    }

    fn close(&mut self, i: usize) {
        let c = &mut self.clients[i];
        if self.fault == Fault::ClosesMapped {
            if let strake_client::pages::Leave::Go(_) = c.table.leave(Duration::MAX, FILE, true) {
                c.add_job(Job { why: Why::Leave, step: Step::Unlock });
                self.send(i, Body::Unlocks);
            }
            return;
        }
        (c.page, c.out, c.opened) = (None, false, Opened::Closing);
        if c.table.has(FILE, None) {
            c.add_job(Job { why: Why::Leave, step: Step::Leaving });
        }
    }

    /// The promises that hold when no further step happens by itself.
    fn is_at_rest(&self) -> Result<(), String> {
        if let Some(t) = self.leader.tasks.first() {
            return Err(format!("the leader never answers {t:?}"));
        }
        for (i, c) in self.clients.iter().enumerate() {
            let pending = matches!(c.opened, Opened::Asked | Opened::Answered | Opened::Closing);
            if c.page_in.is_some()
                || c.writes.is_some()
                || !c.jobs.is_empty()
                || c.asks.is_some()
                || pending
            {
                return Err(format!("client {i} never goes on: {c:?}"));
            }
            if self.log.evicted.iter().any(|s| World::client_of(*s) == i) {
                continue;
            }
            for k in [2 * i, 2 * i + 1] {
                let in_page = c.page.is_some_and(|p| p.dirty && p.cells[k] == c.made[k]);
                if self.storage.cells[k] != c.made[k] && !in_page {
                    return Err(format!("byte {k} of client {i} is nowhere"));
                }
            }
        }
        Ok(())
    }

    fn spend(&mut self, action: &Action) {
        let left = &mut self.left;
        let of = match action {
            Action::PageIn(_) => &mut left.page_ins,
            Action::Store(_) => &mut left.stores,
            Action::WriteBack(_) => &mut left.write_backs,
            Action::Drop(_) => &mut left.drops,
            Action::Check(_) => &mut left.checks,
            Action::Write(_) => &mut left.writes,
            Action::Open(_) => &mut left.opens,
            Action::Close(_) => &mut left.closes,
            Action::Evict(_) => &mut left.evictions,
            Action::Restart(_) => &mut left.restarts,
            Action::Failover => &mut left.failovers,
            Action::Look => {
                self.looks += 1;
                return;
            }
            _ => return,
        };
        *of -= 1;
    }
}

impl Model for World {
    type Action = Action;

    fn actions(&self) -> Vec<Action> {
        let mut out = self.goes_on();
        out.extend(self.chances());
        out
    }

    fn act(&mut self, action: &Action) -> Result<(), String> {
        self.spend(action);
        match action {
            Action::Deliver(m) => self.deliver(m)?,
            Action::Step(t) => self.step(t.clone()),
            Action::PageIn(i) => self.clients[*i].touches(),
            Action::GoOn(i) => self.page_in_goes_on(*i).map(drop)?,
            Action::Store(i) => {
                let c = &mut self.clients[*i];
                c.made[2 * i] += 1;
                if let Some(p) = &mut c.page {
                    (p.cells[2 * i], p.dirty) = (c.made[2 * i], true);
                }
            }
            Action::WriteBack(i) => self.write_back(*i),
            Action::Drop(i) => self.clients[*i].page = None,
            Action::Check(i) => self.begin_job(*i, Why::Check),
            Action::Write(i) => {
                let c = &mut self.clients[*i];
                c.made[2 * i + 1] += 1;
                c.writes = Some(Writes::Wants);
            }
            Action::WriteOn(i) => drop(self.write_goes_on(*i)),
            Action::Open(i) => {
                (self.clients[*i].opened, self.clients[*i].voided) = (Opened::Asked, false);
                self.send(*i, Body::Opens);
            }
            Action::IsOpen(i) => self.clients[*i].opened = Opened::ForBoth,
            Action::Close(i) => self.close(*i),
            Action::IsClosed(i) => {
                self.clients[*i].opened = Opened::No;
                self.send(*i, Body::Closes);
            }
            Action::TakeOut(i) => self.take_out(*i),
            Action::Job(i, job) => drop(self.job_goes_on(*i, *job)),
            Action::Reconnect(i) => self.reconnect(*i),
            Action::Look => self.look_at_waits(),
            Action::Evict(i) => self.evict(*i),
            Action::Hear => self.storage.refuses = self.log.evicted.clone(),
            Action::Learn(i) => self.learn(*i),
            Action::Failover => self.failover(),
            Action::Restart(i) => self.restart(*i),
        }
        if self.goes_on().is_empty() { self.is_at_rest() } else { Ok(()) }
    }
}
