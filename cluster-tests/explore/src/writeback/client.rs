//! A client, in the steps of its shell: `client/src/write/writeback.rs`, `recalls.rs` and
//! `memory.rs`.

use std::time::Duration;

use bytes::Bytes;
use strake_client::{
    dirty::Dirty,
    leases::{Change, Table, Told},
};
use strake_mds::leases::Number;

use super::{
    Fault, TERM, World,
    kinds::{Action, Body, Due, FILE, Message, Request, Version, Versions, What, Write, has},
    time,
};

/// Dirty data never reach this limit here.
const MOST: u64 = 1 << 20;

#[derive(Clone, Debug, Hash)]
pub struct Client {
    /// The size of the file, cached under the lease.
    pub table: Table<u64>,
    /// The client still has the tenure in which it last saw its lease.
    pub leased: bool,
    pub connection: u64,
    /// The leader it is connected to.
    pub term: u64,
    pub said_hello: bool,
    /// When the last renewal was sent.
    pub renewed: Option<u8>,
    pub acknowledged: Number,
    /// The open that it writes with.
    pub opened: Option<u8>,
    pub held: Dirty<()>,
    /// How many pieces are on the way.
    pub sending: u8,
    /// With a [`Fault`]: a write for which it was found that it may be held back.
    pub checked: Option<Version>,
    /// A write that waits for the storage server.
    pub writing: Option<Version>,
    /// The end of the last byte that has arrived, and the end that the leader was told.
    pub arrived: u64,
    pub told: u64,
    pub request: Option<Request>,
    pub extending: Option<Request>,
    pub reports: Vec<Due>,
    pub next: u8,
    /// It has learned that its session has ended.
    pub ended: bool,
}

impl Client {
    pub fn new(now: Duration) -> Client {
        let mut table = Table::default();
        table.connected();
        table.renewed(now, now, TERM);
        Client {
            table,
            leased: false,
            connection: 1,
            term: 1,
            said_hello: true,
            renewed: Some(0),
            acknowledged: 0,
            opened: None,
            held: Dirty::default(),
            sending: 0,
            checked: None,
            writing: None,
            arrived: 0,
            told: 0,
            request: None,
            extending: None,
            reports: Vec::new(),
            next: 1,
            ended: false,
        }
    }

    /// Whether a write may be held back.
    fn may_hold(&self, now: Duration, fault: Fault) -> bool {
        let lives = self.table.lives(now) || fault == Fault::HoldsOn;
        self.opened.is_some() && (self.table.attr(now, FILE).is_some() || self.leased && lives)
    }

    /// Whether a report can be made: all that was dirty when it was asked for has arrived.
    fn is_made(&self, r: &Due, fault: Fault) -> bool {
        let sent = r.sent || self.held.bytes() == 0;
        match fault {
            Fault::EmptyReport => true,
            Fault::EarlyReport => sent,
            _ => sent && self.sending == 0,
        }
    }

    fn makes(&self, fault: Fault) -> bool {
        self.reports.iter().any(|r| self.is_made(r, fault))
    }

    fn is_clean(&self) -> bool {
        let idle = self.request.is_none() && self.extending.is_none() && self.writing.is_none();
        idle && self.checked.is_none() && self.held.is_empty() && self.told >= self.arrived
    }
}

impl World {
    pub(super) fn client_actions(&self, i: usize, out: &mut Vec<Action>) {
        let (c, now, left, fault) = (&self.clients[i], self.now(), &self.left, self.fault);
        if c.ended {
            return;
        }
        let idle = c.writing.is_none() && c.checked.is_none();
        if idle && c.request.is_none() && c.opened.is_none() && left.opens > 0 {
            out.push(Action::Open(i));
        }
        // Before it looks, a client sends its dirty data.
        let known = c.table.attr(now, FILE).is_some();
        if c.request.is_none() && c.held.is_empty() && !known && left.looks > 0 {
            out.push(Action::Look(i));
        }
        let beside = c.held.is_empty() || c.may_hold(now, fault) || fault == Fault::Overtakes;
        if idle && c.opened.is_some() && beside && left.writes > 0 {
            out.extend((0..=u64::from(left.more_blocks)).map(|block| Action::Write(i, block)));
        }
        if c.checked.is_some() {
            out.push(Action::HoldLate(i));
        }
        if c.held.bytes() > 0 && (c.sending == 0 || fault == Fault::TwoOnTheirWay) {
            out.push(Action::Send(i));
        }
        let tells = c.told < c.arrived && left.releases > 0 || c.makes(fault);
        if tells && c.extending.is_none() {
            out.push(Action::Tell(i));
        }
        if c.opened.is_some() && left.releases > 0 && c.is_clean() {
            out.push(Action::Release(i));
        }
        if [&c.request, &c.extending].into_iter().flatten().any(|r| r.connection < c.connection) {
            out.push(Action::Retry(i));
        }
        if left.reconnects > 0 || c.term != self.leader.term {
            out.push(Action::Reconnect(i));
        }
        if left.renewals > 0 && c.said_hello && c.renewed != Some(self.clock) {
            out.push(Action::Renew(i));
        }
        if left.repeats > 0 && c.said_hello {
            out.push(Action::PollAgain(i));
        }
        if self.log.is_evicted(i) {
            out.push(Action::Learn(i));
        }
    }

    pub(super) fn ask_leader(&mut self, client: usize, what: What) {
        let floor = self.returned();
        let c = &mut self.clients[client];
        let id = c.next;
        c.next += 1;
        let change = matches!(what, What::Extend { .. })
            .then(|| c.table.change_begins(Change { inodes: vec![FILE], names: vec![] }).0);
        let (token, connection) = (c.table.begin(), c.connection);
        let request = Some(Request { id, what, token, connection, floor, change });
        match what {
            What::Extend { .. } => c.extending = request,
            _ => c.request = request,
        }
        self.send(client, connection, Body::Asks { id, what });
    }

    pub(super) fn retry(&mut self, client: usize) {
        let c = &mut self.clients[client];
        let connection = c.connection;
        let old = [&mut c.request, &mut c.extending]
            .into_iter()
            .flatten()
            .filter(|r| r.connection < connection);
        let mut again = Vec::new();
        for r in old {
            r.connection = connection;
            again.push(Body::Asks { id: r.id, what: r.what });
        }
        again.into_iter().for_each(|body| self.send(client, connection, body));
    }

    /// A program writes a block. The write is held back if that is allowed.
    pub(super) fn write(&mut self, client: usize, block: u64) {
        self.left.writes -= 1;
        let (now, before, fault) = (self.now(), self.returned(), self.fault);
        self.writes.push(Write { client, block, before, returned: false });
        let version = self.writes.len() as Version;
        let c = &mut self.clients[client];
        c.leased |= c.table.attr(now, FILE).is_some();
        if !c.may_hold(now, fault) {
            c.writing = Some(version);
            self.update(client, block, vec![version], true);
        } else if fault == Fault::HoldsLate {
            c.checked = Some(version);
        } else {
            self.hold(client, version);
        }
    }

    pub(super) fn hold(&mut self, client: usize, version: Version) {
        let w = &mut self.writes[usize::from(version) - 1];
        w.returned = true;
        let bytes = Bytes::copy_from_slice(&[version]);
        self.clients[client].held.hold(Duration::ZERO, w.block, bytes.into(), ());
    }

    /// Sends all dirty data.
    pub(super) fn send_held(&mut self, client: usize) {
        let c = &mut self.clients[client];
        if c.sending > 0 {
            // Only with a [`Fault`]: the previous pieces count as arrived.
            c.held.settled(0..MOST);
        }
        let runs = c.held.take(MOST, |(), ()| true);
        c.sending += runs.len() as u8;
        c.reports.iter_mut().for_each(|r| r.sent = true);
        for run in runs {
            let bytes = run.parts.iter().flat_map(|(b, ())| b.to_vec()).collect();
            self.update(client, run.at, bytes, false);
        }
    }

    fn update(&mut self, client: usize, at: u64, bytes: Vec<Version>, through: bool) {
        self.messages.push(Message {
            client,
            connection: 0,
            body: Body::Update { at, bytes, through },
        });
        self.messages.sort();
    }

    /// One of its updates was applied.
    pub(super) fn has_arrived(&mut self, client: usize, at: u64, bytes: &[Version], through: bool) {
        let c = &mut self.clients[client];
        let range = at..at + bytes.len() as u64;
        if through {
            if let Some(version) = c.writing.take() {
                self.writes[usize::from(version) - 1].returned = true;
                c.arrived = c.arrived.max(range.end);
            }
        } else if c.held.settled(range.clone()) && !c.ended {
            c.sending -= 1;
            c.arrived = c.arrived.max(range.end);
        }
    }

    /// Its session has ended: all its dirty data are lost.
    pub(super) fn session_lost(&mut self, client: usize) {
        let c = &mut self.clients[client];
        c.held.lose();
        c.table.connected();
        (c.ended, c.leased, c.opened, c.writing, c.checked, c.sending) =
            (true, false, None, None, None, 0);
        (c.request, c.extending) = (None, None);
        c.reports.clear();
    }

    /// Tells the leader of a new end first; once that is known, confirms the reports.
    pub(super) fn tell(&mut self, client: usize) {
        let fault = self.fault;
        let c = &mut self.clients[client];
        if c.told < c.arrived && fault != Fault::EmptyReport {
            let end = c.arrived;
            return self.ask_leader(client, What::Extend { end });
        }
        let made = c.reports.iter().copied().filter(|r| c.is_made(r, fault)).collect::<Vec<_>>();
        c.reports.retain(|r| !made.contains(r));
        let connection = c.connection;
        self.send(client, connection, Body::Reported(made.iter().map(|r| r.number).collect()));
    }

    pub(super) fn release(&mut self, client: usize) {
        self.left.releases -= 1;
        let c = &mut self.clients[client];
        let connection = c.connection;
        if let Some(opened) = c.opened.take() {
            self.send(client, connection, Body::Release { opened });
        }
    }

    pub(super) fn reconnect(&mut self, client: usize) {
        let (clock, term) = (self.clock, self.leader.term);
        let c = &mut self.clients[client];
        if c.term == term {
            self.left.reconnects -= 1;
        }
        c.connection += 1;
        (c.term, c.said_hello, c.renewed) = (term, false, Some(clock));
        // The leader asks for them again.
        c.reports.clear();
        c.table.connected();
        c.leased = false;
        // A program that looked tries again.
        if let Some(r) = c.request.take_if(|r| r.what == What::Look) {
            c.table.end(r.token);
        }
        let connection = c.connection;
        self.messages
            .retain(|m| m.client != client || m.connection == 0 || World::is_for_leader(m));
        self.send(client, connection, Body::Hello { sent: clock });
    }

    pub(super) fn client_takes(&mut self, m: Message) -> Result<(), String> {
        let (now, fault, i) = (self.now(), self.fault, m.client);
        let c = &mut self.clients[i];
        if m.connection != c.connection || c.ended {
            return Ok(());
        }
        match m.body {
            Body::Renewed { sent } => {
                c.leased &= c.table.lives(now);
                c.table.renewed(now, time(sent), TERM);
                if !c.said_hello {
                    c.said_hello = true;
                    self.poll(i);
                }
            }
            Body::Recalls { recalls, reports } => {
                if !recalls.is_empty() && fault != Fault::NotHeeded {
                    c.table.void(FILE);
                    c.leased = false;
                }
                c.acknowledged = recalls.into_iter().fold(c.acknowledged, Number::max);
                for number in reports {
                    if c.reports.iter().all(|r| r.number != number) {
                        c.reports.push(Due { number, sent: false });
                    }
                }
                self.poll(i);
            }
            Body::Answer { id, size, granted } => {
                if let Some(r) = c.request.take_if(|r| r.id == id) {
                    if granted {
                        c.table.keep_attr(now, r.token, FILE, size);
                    }
                    c.table.end(r.token);
                    if r.what == What::Open {
                        c.opened = Some(id);
                    }
                    let shown = (r.what == What::Look).then_some(size);
                    let who = if r.what == What::Look { "looked" } else { "opened the file" };
                    self.sees(i, r.floor, shown)
                        .map_err(|e| format!("client {i} {who} and {e}"))?;
                    if let Some(size) = shown {
                        self.finds(i, r.floor, size)
                            .map_err(|e| format!("client {i} {who} and {e}"))?;
                    }
                } else if let Some(r) = c.extending.take_if(|r| r.id == id) {
                    let attrs = if granted { vec![(FILE, size)] } else { vec![] };
                    let told = Told { attrs, names: vec![], openers: vec![] };
                    let change = r.change.unwrap_or_default();
                    c.table.change_answered(now, r.token, &change, told);
                    c.table.end(r.token);
                    if let What::Extend { end } = r.what {
                        c.told = c.told.max(end);
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Checks that a program of this client that reads now finds these writes, or newer ones.
    pub(super) fn sees(
        &self,
        client: usize,
        floor: Versions,
        size: Option<u64>,
    ) -> Result<(), String> {
        let c = &self.clients[client];
        let mut view = self.storage.blocks.clone();
        for (at, bytes) in c.held.look(&(0..view.len() as u64)) {
            view[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
        }
        let end = size.map(|s| s.max(c.arrived).max(c.held.end()));
        for (version, w) in (1..).zip(&self.writes) {
            if !has(floor, version) || self.log.is_evicted(w.client) {
                continue;
            }
            let there = view[w.block as usize];
            if there == 0
                || there != version && has(self.writes[usize::from(version) - 1].before, there)
            {
                return Err(format!(
                    "reads version {there}, and {version} had been written before"
                ));
            }
            if end.is_some_and(|end| end <= w.block) {
                return Err(format!(
                    "finds {} blocks, and block {} had been written before",
                    end.unwrap_or(0),
                    w.block
                ));
            }
        }
        Ok(())
    }
}
