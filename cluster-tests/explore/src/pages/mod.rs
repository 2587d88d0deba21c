//! The world of pages of memory mappings, "Between nodes" in `docs/mappings.md`: a leader, two
//! clients with their kernels, and a storage server with one page of a file. The client's table and
//! the leader's, of locks, of writers and of who is asked, are the product's; what is around them
//! is written after the shells.
//!
//! Each client has two bytes of the page of its own: one that its programs store to, through a
//! mapping, and one that they write(2). Both count how often. So a byte that gets lower was lost.
//!
//! The promises: no byte gets lower at the storage server. Nobody has, nor gets, a page in which a
//! byte of somebody else is older than at the storage server, unless its session is evicted. And
//! where nothing more happens by itself everybody was answered, and every byte is at the storage
//! server or in a page that is out, but for those of evicted sessions.

#[expect(clippy::collapsible_match, reason = "a guard of a match changes nothing")]
mod client;
mod kinds;
#[expect(clippy::collapsible_match, reason = "a guard of a match changes nothing")]
mod leader;

use std::{collections::BTreeSet, time::Duration};

use client::Client;
pub use kinds::{Action, Bounds, Fault};
use kinds::{Body, CLIENTS, Cells, FILE, Job, Message, Opened, PageIn, Stage, Step, Why, Writes};
use leader::Leader;
use strake_mds::{
    leases::{pages::Pages, writers::Writers},
    namespace::locks::Locks,
};
use strake_proto::SessionId;

use crate::Model;

/// The time stands still: what lasts for a while is over at any moment.
const NOW: Duration = Duration::ZERO;
/// Looks at those who wait that help nobody.
const LOOKS: u8 = 3;

/// What every leader knows.
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
    /// Evicted sessions that it has heard of.
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
    /// The first client has the file open for writing, and its lease if it is the only one.
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

    /// To the leader or from it. What can arrive nowhere is not sent.
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

    /// What happens by itself.
    fn goes_on(&self) -> Vec<Action> {
        let mut out = Vec::new();
        let mut messages = self.messages.clone();
        messages.dedup();
        // Hello comes before what is said after it.
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

    /// What programs and misfortune may do.
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
        (c.page, c.opened) = (None, Opened::Closing);
        if c.table.has(FILE, None) {
            c.add_job(Job { why: Why::Leave, step: Step::Leaving });
        }
    }

    /// Nothing more happens by itself.
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
            Action::PageIn(i) => self.clients[*i].page_in = Some(PageIn::Wants),
            Action::GoOn(i) => self.page_in_goes_on(*i).map(drop)?,
            Action::Store(i) => {
                let c = &mut self.clients[*i];
                c.made[2 * i] += 1;
                if let Some(p) = &mut c.page {
                    (p.cells[2 * i], p.dirty) = (c.made[2 * i], true);
                }
            }
            Action::WriteBack(i) => self.write_back(*i),
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
