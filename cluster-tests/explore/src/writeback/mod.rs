//! The world of write-back, `docs/leases.md`: one leader, two clients with write-back that write
//! one file, and a storage server. The tables are the product's code; the rest is a model of the
//! shell code.
//!
//! At the beginning only the first client has the file open for writing. Each write has a number,
//! and its bytes are that number.
//!
//! The promises: a client that opens the file for writing, looks at it, or reads it under a lease
//! finds every write that had returned before, in the bytes and in the size, except those of
//! evicted sessions. No write overwrites bytes of a write that began after the first one had
//! returned. And bytes of an evicted session are not stored after a request was answered with
//! knowledge of the eviction, nor do they show up after a client was told that the file is shorter.

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

/// In ticks of the clock, which are seconds here.
const TERM: Duration = Duration::from_secs(2);

/// The state that every leader has: the log.
#[derive(Clone, Debug, Hash)]
struct Log {
    /// The clients that may write, and the open that they do it with.
    writers: BTreeMap<usize, u8>,
    size: u64,
    /// In order; the number of an eviction is its place in this list, from 1.
    evicted: Vec<usize>,
    /// The last eviction of a client that could write.
    fence: usize,
    /// The same, if another client can write, until the end that was not reported is found.
    endless: usize,
    /// The file is to be truncated to its size.
    cut: bool,
    /// A counter of the changes of the file.
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
    /// How many evictions it has learned of.
    heard: usize,
    /// Updates that it has accepted and not applied yet.
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
    /// The number of evictions when a request was last answered.
    depended: usize,
    /// Writes of evicted clients that were past the end when a client found the file's size.
    denied: Versions,
    /// Ends of the file that dead leaders had seen, on the way into the log.
    strays: Vec<Seen>,
    /// The evictions, as every server knows them.
    evicted: Evicted,
}

fn id(client: usize) -> SessionId {
    client as SessionId + 1
}

fn time(clock: u8) -> Duration {
    Duration::from_secs(u64::from(clock))
}

impl World {
    /// Both clients are connected and hold leases from now on; the first one has the file open for
    /// writing and has its attributes cached.
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

    /// A message that cannot arrive is not sent: to a leader that has died, or on a connection that
    /// its client has given up.
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

    /// The storage server refuses updates of clients that it knows to be evicted.
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

    /// Applies an update.
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

    /// Whether the storage server has learned of an eviction, and has finished the updates of all
    /// clients that it knows to be evicted.
    fn is_fenced(&self, eviction: usize) -> bool {
        let known = &self.log.evicted[..self.storage.heard];
        let in_work = self.storage.work.iter().any(|m| known.contains(&m.client));
        self.storage.heard >= eviction && (!in_work || self.fault == Fault::FencedInWork)
    }

    /// What a client may answer from its cache must include every write that has returned.
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

    /// A program of this client is told this size. Bytes of evicted clients are within it, or must
    /// never show up.
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
        // A message that is never delivered counts as lost.
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
