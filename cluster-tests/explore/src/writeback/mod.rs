//! The world of write-back, `docs/leases.md`: one leader, two clients that hold back what they
//! write to one file, and a storage server. The tables are the product's; what is around them is
//! written after the shells.
//!
//! The first client has the file open for writing from the beginning, and is the only one who has.
//! Each write has a number, and the bytes that it writes are that number.
//!
//! The promises: whoever opened the file for writing, looked at it or reads it under a lease finds
//! every write that had returned before he asked, in the bytes and in the size, but for those of
//! evicted sessions. No bytes are put over those of a write that began when they had been written.
//! And nothing of an evicted session is put there when somebody was answered after its eviction,
//! nor is anything of one seen by anybody when somebody has been told that the file is shorter.

mod client;
mod kinds;
mod leader;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use client::Client;
pub use kinds::{Action, Bounds, Fault};
use kinds::{Body, FILE, Message, Seen, Version, Versions, What, Write, has};
use leader::Leader;
use strake_mds::leases::{Leases, evicted::Evicted, reports::Reports, writers::Writers};
use strake_proto::SessionId;

use crate::Model;

/// Ticks of the clock.
const TERM: Duration = Duration::from_secs(2);

/// What every leader knows.
#[derive(Clone, Debug, Hash)]
struct Log {
    /// Who may write, since which open.
    writers: BTreeMap<usize, u8>,
    size: u64,
    /// In order; an eviction's number is how many there were with it.
    evicted: Vec<usize>,
    /// The last one of a session that could write.
    fence: usize,
    /// Likewise, if another one can and the end that it did not report is not found yet.
    endless: usize,
    /// The file is to be cut at its end.
    cut: bool,
    /// Counts the changes of the file.
    change: u8,
    done: BTreeSet<(usize, u8)>,
}

impl Log {
    fn is_evicted(&self, client: usize) -> bool {
        self.evicted.contains(&client)
    }
}

#[derive(Clone, Debug, Hash)]
struct Storage {
    blocks: Vec<Version>,
    /// Evictions that it has heard of.
    heard: usize,
    /// Updates that it has accepted.
    work: Vec<Message>,
}

#[derive(Clone, Debug, Hash)]
pub struct World {
    fault: Fault,
    left: Bounds,
    clock: u8,
    log: Log,
    leader: Leader,
    clients: [Client; 2],
    storage: Storage,
    messages: Vec<Message>,
    /// Writes of programs, in the order in which they began.
    writes: Vec<Write>,
    /// Evictions before the last answer.
    depended: usize,
    /// Writes of evicted clients that somebody found beyond the end.
    denied: Versions,
    /// What leaders that have died saw of the file's end: on its way into the log.
    strays: Vec<Seen>,
    /// What every server knows of evictions.
    evicted: Evicted,
}

fn id(client: usize) -> SessionId {
    client as SessionId + 1
}

fn time(clock: u8) -> Duration {
    Duration::from_secs(u64::from(clock))
}

impl World {
    /// Both clients are connected and hold leases as from now; the first has the file open for
    /// writing, and knows it.
    pub fn new(left: Bounds, fault: Fault) -> World {
        let mut leases = Leases::new(World::limits(), time(0), 1, []);
        let mut clients = [0, 1].map(|c| {
            leases.hello(id(c), 1, false);
            leases.renewed(time(0), id(c));
            Client::new(time(0))
        });
        let c = &mut clients[0];
        c.opened = Some(0);
        leases.grant(time(0), id(0), 1, FILE);
        let token = c.table.begin();
        c.table.keep_attr(time(0), token, FILE, 0);
        c.table.end(token);
        let mut writers = Writers::default();
        [0, 1].map(id).into_iter().for_each(|s| writers.holds_back(s));
        writers.record(id(0), FILE, true);
        let leader = Leader {
            term: 1,
            leases,
            reports: Reports::new(1),
            writers,
            fence: 0,
            endless: 0,
            seen: None,
            tasks: Vec::new(),
            polls: [Some(1), Some(1)],
        };
        World {
            fault,
            left,
            clock: 0,
            log: Log {
                writers: BTreeMap::from([(0, 0)]),
                size: 0,
                evicted: Vec::new(),
                fence: 0,
                endless: 0,
                cut: false,
                change: 0,
                done: BTreeSet::new(),
            },
            leader,
            clients,
            storage: Storage {
                blocks: vec![0; 1 + usize::from(left.more_blocks)],
                heard: 0,
                work: Vec::new(),
            },
            messages: Vec::new(),
            writes: Vec::new(),
            depended: 0,
            denied: 0,
            strays: Vec::new(),
            evicted: Evicted::default(),
        }
    }

    fn now(&self) -> Duration {
        time(self.clock)
    }

    /// The writes that have returned.
    fn returned(&self) -> Versions {
        self.writes
            .iter()
            .zip(1..)
            .filter(|(w, _)| w.returned)
            .fold(0, |all, (_, v): (_, u32)| all | 1 << v)
    }

    fn is_for_leader(m: &Message) -> bool {
        matches!(
            m.body,
            Body::Hello { .. }
                | Body::Renew { .. }
                | Body::Reported(_)
                | Body::Asks { .. }
                | Body::Release { .. }
        )
    }

    /// What can arrive nowhere is not sent: to a leader that has died, or on a connection that its
    /// client has given up.
    fn send(&mut self, client: usize, connection: u64, body: Body) {
        let (m, c) = (Message { client, connection, body }, &self.clients[client]);
        let arrives = if World::is_for_leader(&m) {
            c.term == self.leader.term
        } else {
            c.connection == connection
        };
        if arrives && !c.ended {
            self.messages.push(m);
            self.messages.sort();
        }
    }

    fn deliver(&mut self, m: Message) -> Result<(), String> {
        if let Some(i) = self.messages.iter().position(|x| *x == m) {
            self.messages.remove(i);
        }
        if World::is_for_leader(&m) {
            self.leader_takes(m);
            Ok(())
        } else if m.connection == 0 {
            self.storage_takes(m)
        } else {
            self.client_takes(m)
        }
    }

    /// Those of which it has heard that they are evicted it refuses.
    fn storage_takes(&mut self, m: Message) -> Result<(), String> {
        if self.log.evicted[..self.storage.heard].contains(&m.client) {
            self.session_lost(m.client);
            Ok(())
        } else if self.left.chain {
            self.storage.work.push(m);
            self.storage.work.sort();
            Ok(())
        } else {
            self.put(m)
        }
    }

    /// An update is made.
    fn put(&mut self, m: Message) -> Result<(), String> {
        let Body::Update { at, bytes, through } = m.body else { return Ok(()) };
        let number = self.log.evicted.iter().position(|c| *c == m.client).map(|i| i + 1);
        if number.is_some_and(|n| n <= self.depended) {
            return Err(format!(
                "bytes of client {} come after somebody was answered who knows it evicted",
                m.client
            ));
        }
        for (block, new) in (at as usize..).zip(&bytes) {
            let there = std::mem::replace(&mut self.storage.blocks[block], *new);
            if there != 0 && has(self.writes[usize::from(there) - 1].before, *new) {
                return Err(format!(
                    "version {new}, which was written before {there}, is put over it"
                ));
            }
        }
        self.has_arrived(m.client, at, &bytes, through);
        Ok(())
    }

    /// Whether the storage server has heard of an eviction, and has done with what sessions sent
    /// that it knows evicted.
    fn is_fenced(&self, eviction: usize) -> bool {
        let known = &self.log.evicted[..self.storage.heard];
        let in_work = self.storage.work.iter().any(|m| known.contains(&m.client));
        self.storage.heard >= eviction && (!in_work || self.fault == Fault::FencedInWork)
    }

    /// What a client may read from memory is as new as anything that was written.
    fn check(&mut self) -> Result<(), String> {
        let (floor, now) = (self.returned(), self.now());
        for i in 0..self.clients.len() {
            if let Some(size) = self.clients[i].table.attr(now, FILE).copied() {
                let told = |e| format!("client {i} has a lease and {e}");
                self.sees(i, floor, Some(size)).map_err(told)?;
                if !self.log.is_evicted(i) {
                    self.finds(i, floor, size).map_err(told)?;
                }
            }
        }
        Ok(())
    }

    /// A program of this client finds the file so long. What evicted clients had put there before
    /// is in it, or never will be.
    fn finds(&mut self, client: usize, floor: Versions, size: u64) -> Result<(), String> {
        let c = &self.clients[client];
        let end = size.max(c.arrived).max(c.held.end());
        for (version, w) in (1..).zip(&self.writes) {
            if !self.log.is_evicted(w.client) || self.storage.blocks[w.block as usize] != version {
                continue;
            }
            if end > w.block && has(self.denied, version) {
                return Err(format!(
                    "finds version {version} of an evicted client, which was beyond the end before"
                ));
            }
            if end <= w.block && has(floor, version) {
                self.denied |= 1 << version;
            }
        }
        Ok(())
    }
}

impl Model for World {
    type Action = Action;

    fn actions(&self) -> Vec<Action> {
        let mut out = Vec::new();
        let mut messages = self.messages.clone();
        messages.dedup();
        // One that is never delivered is a lost one.
        out.extend(messages.into_iter().map(Action::Deliver));
        let mut tasks = self.leader.tasks.clone();
        tasks.dedup();
        out.extend(tasks.into_iter().filter(|t| self.can_step(t)).map(Action::Step));
        out.extend(self.storage.work.iter().cloned().map(Action::Apply));
        for i in 0..self.clients.len() {
            if self.has_recalls(i) {
                out.push(Action::SendRecalls(i));
            }
            self.client_actions(i, &mut out);
            if self.left.evictions > 0 && !self.log.is_evicted(i) {
                out.push(Action::Evict(i));
            }
        }
        if self.storage.heard < self.log.evicted.len() {
            out.push(Action::Hear);
        }
        if self.leader.fence > 0 && self.is_fenced(self.leader.fence) {
            out.push(Action::Fenced);
        }
        let endless = self.leader.endless;
        let may_see = self.is_fenced(endless) || self.fault == Fault::SeenEarly;
        if endless > 0 && self.leader.seen.is_none() && may_see {
            out.push(Action::See);
        }
        if self.leader.seen.is_some() {
            out.push(Action::Found);
        }
        if !self.strays.is_empty() {
            out.push(Action::Stray);
        }
        if self.left.ticks > 0 {
            out.push(Action::Tick);
        }
        if self.left.failovers > 0 {
            out.push(Action::Failover);
        }
        out
    }

    fn act(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Deliver(m) => self.deliver(m.clone())?,
            Action::Step(t) => self.step(t),
            Action::SendRecalls(i) => self.send_recalls(*i),
            Action::Open(i) => {
                self.left.opens -= 1;
                self.ask_leader(*i, What::Open);
            }
            Action::Look(i) => {
                self.left.looks -= 1;
                self.ask_leader(*i, What::Look);
            }
            Action::Write(i, block) => self.write(*i, *block),
            Action::HoldLate(i) => {
                if let Some(version) = self.clients[*i].checked.take() {
                    self.hold(*i, version);
                }
            }
            Action::Send(i) => self.send_held(*i),
            Action::Tell(i) => self.tell(*i),
            Action::Release(i) => self.release(*i),
            Action::Retry(i) => self.retry(*i),
            Action::Reconnect(i) => self.reconnect(*i),
            Action::Renew(i) => {
                self.left.renewals -= 1;
                let (sent, c) = (self.clock, &mut self.clients[*i]);
                c.renewed = Some(sent);
                let connection = c.connection;
                self.send(*i, connection, Body::Renew { sent });
            }
            Action::PollAgain(i) => {
                self.left.repeats -= 1;
                self.poll(*i);
            }
            Action::Evict(i) => {
                self.left.evictions -= 1;
                self.evict(*i);
            }
            Action::Learn(i) => self.session_lost(*i),
            Action::Hear => self.storage.heard = self.log.evicted.len(),
            Action::Fenced => {
                self.leader.fence = 0;
                self.cut();
            }
            Action::See => self.see(),
            Action::Found => {
                if let Some(seen) = self.leader.seen.take()
                    && self.found(seen)
                {
                    self.leader.endless = 0;
                }
            }
            Action::Stray => {
                let seen = self.strays.remove(0);
                self.found(seen);
            }
            Action::Apply(m) => {
                self.storage.work.retain(|x| x != m);
                self.put(m.clone())?;
            }
            Action::Tick => {
                self.left.ticks -= 1;
                self.clock += 1;
                let now = self.now();
                self.leader.leases.tick(now);
                for c in &mut self.clients {
                    c.leased &= c.table.lives(now) || self.fault == Fault::HoldsOn;
                    c.table.expire(now);
                }
            }
            Action::Failover => {
                self.left.failovers -= 1;
                self.failover();
            }
        }
        self.check()
    }
}
