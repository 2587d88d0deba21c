//! The clients, modelled on the shell code of the product's client.

use strake_client::leases::{Change, Dropped, Name, Table, Token, Told};
use strake_mds::leases::Number;

use super::{
    Action, Alter, Ask, Body, Fault, Message, TERM, Versions, WRITER, World,
    kinds::{DIR, FILE, NAME, implied},
    time,
};

#[derive(Clone, Debug, Hash)]
pub struct Asking {
    pub id: u8,
    pub token: Token,
    /// The newest versions that had been told when it was asked.
    pub floor: Versions,
}

#[derive(Clone, Debug, Hash)]
pub struct Changing {
    pub seq: u8,
    pub alter: Alter,
    pub change: Change,
    pub token: Token,
    /// The connection on which it was last sent.
    pub connection: u64,
    /// Reports that this change makes.
    pub makes: Vec<Number>,
}

#[derive(Clone, Debug, Hash)]
pub struct Client {
    pub table: Table<u8>,
    /// The version of the name in the cache, if it is there.
    pub name: u8,
    pub connection: u64,
    /// The leader it is connected to.
    pub term: u64,
    pub said_hello: bool,
    /// When the last renewal was sent.
    pub renewed: Option<u8>,
    pub acknowledged: Number,
    pub asking: Option<Asking>,
    pub changing: Option<Changing>,
    pub next: u8,
    /// How much it has written, and how much of that the servers are known to have.
    pub wrote: u8,
    pub known: u8,
    /// Reports that it still has to make.
    pub reports: Vec<Number>,
}

impl World {
    pub(super) fn client_actions(&self, i: usize, out: &mut Vec<Action>) {
        let (c, now) = (&self.clients[i], self.now());
        if c.asking.is_none() && self.left.asks > 0 {
            let known = [
                (Ask::Dir, c.table.attr(now, DIR).is_some()),
                (Ask::File, c.table.attr(now, FILE).is_some()),
                (Ask::Lookup, c.table.name(now, DIR, &NAME, 0).is_some()),
            ];
            out.extend(known.into_iter().filter(|k| !k.1).map(|k| Action::Ask(i, k.0)));
        }
        match &c.changing {
            // The clients are equivalent, so the first change may always be the first client's.
            None if self.left.changes > 0
                && (i == 0
                    || self.applied > 0
                    || !self.done.is_empty()
                    || self.clients[0].next > 0) =>
            {
                out.extend([Action::Alter(i, Alter::File), Action::Alter(i, Alter::Name)])
            }
            Some(x) if c.connection > x.connection => {
                out.extend([Action::Retry(i), Action::GiveUp(i)])
            }
            Some(_) if self.left.impatience > 0 => out.push(Action::GiveUp(i)),
            _ => {}
        }
        if i == WRITER && self.left.writes > 0 {
            out.push(Action::Write);
        }
        if !c.reports.is_empty() && c.changing.is_none() {
            out.push(Action::MakeReports(i));
        }
        if self.left.renewals > 0 && c.said_hello && c.renewed != Some(self.clock) {
            out.push(Action::Renew(i));
        }
        if self.left.polls && self.left.repeats > 0 && c.said_hello {
            out.push(Action::PollAgain(i));
        }
        if self.left.reconnects > 0 || c.term != self.leader.term {
            out.push(Action::Reconnect(i));
        }
    }

    pub(super) fn client_takes(&mut self, m: Message) -> Result<(), String> {
        let now = self.now();
        let (fault, clock, floor) = (self.fault, self.clock, self.floor);
        let c = &mut self.clients[m.client];
        if m.connection != c.connection {
            return Ok(());
        }
        match m.body {
            Body::Renewed { sent } => {
                let sent = if fault == Fault::CountsFromAnswer { clock } else { sent };
                c.table.renewed(now, time(sent), TERM);
                if !c.said_hello {
                    c.said_hello = true;
                    let acknowledged = c.acknowledged;
                    self.poll(m.client, m.connection, acknowledged);
                }
            }
            Body::Recalls { recalls, reports } => {
                for (number, ino) in recalls {
                    c.table.void(ino);
                    c.acknowledged = c.acknowledged.max(number);
                }
                let (acknowledged, numbers) =
                    (c.acknowledged, reports.iter().map(|r| r.0).collect::<Vec<_>>());
                c.reports.extend(&numbers);
                self.poll(m.client, m.connection, acknowledged);
                if fault == Fault::ReportsEarly && !numbers.is_empty() {
                    self.send(m.client, m.connection, Body::Reported(numbers));
                }
            }
            Body::Answer { id, ask, values, granted } => {
                let Some(asking) = c.asking.take_if(|a| a.id == id) else { return Ok(()) };
                let mut before = asking.floor;
                // The client itself adds the size that it has not reported to every answer.
                if m.client == WRITER || !ask.depends(values).contains(&FILE) {
                    before.size = 0;
                }
                if values.max(before) != values {
                    return Err(format!(
                        "client {} was told {values:?}; before it asked {before:?} was known",
                        m.client
                    ));
                }
                let token = if fault == Fault::KeepsLate { c.table.begin() } else { asking.token };
                if granted.contains(&DIR) && ask == Ask::Dir {
                    c.table.keep_attr(now, token, DIR, values.dir);
                }
                if granted.contains(&DIR) && ask == Ask::Lookup {
                    let to = values.is_there().then_some(FILE);
                    let name = Name { dir: DIR, name: NAME, to, searcher: Some(0) };
                    if c.table.keep_name(now, token, name) {
                        c.name = values.name;
                    }
                }
                if granted.contains(&FILE) {
                    c.table.keep_attr(now, token, FILE, values.file);
                }
                if fault == Fault::KeepsLate {
                    c.table.end(token);
                }
                c.table.end(asking.token);
                self.floor = implied(floor.max(ask.told(values)), &self.history);
            }
            Body::Done { seq, values, granted } => {
                let Some(x) = c.changing.take_if(|x| x.seq == seq) else { return Ok(()) };
                let mut told = Told { attrs: vec![], names: vec![], openers: vec![] };
                match x.alter {
                    Alter::File | Alter::Extend { .. } if granted => {
                        told.attrs.push((FILE, values.file))
                    }
                    Alter::Name if granted => {
                        let to = values.is_there().then_some(FILE);
                        told.names.push(Name { dir: DIR, name: NAME, to, searcher: Some(0) });
                    }
                    _ => {}
                }
                let token = if fault == Fault::KeepsOwnLate { c.table.begin() } else { x.token };
                c.table.change_answered(now, token, &x.change, told);
                if fault == Fault::KeepsOwnLate {
                    c.table.end(token);
                }
                c.table.end(x.token);
                if x.alter == Alter::Name && c.table.name(now, DIR, &NAME, 0).is_some() {
                    c.name = values.name;
                }
                if let Alter::Extend { size } = x.alter {
                    c.known = c.known.max(size);
                }
                self.floor = implied(floor.max(values), &self.history);
                if !x.makes.is_empty() {
                    self.send(m.client, m.connection, Body::Reported(x.makes));
                }
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn ask(&mut self, client: usize, ask: Ask) {
        self.left.asks -= 1;
        let floor = self.floor;
        let c = &mut self.clients[client];
        let n = c.next;
        c.next += 1;
        c.asking = Some(Asking { id: n, token: c.table.begin(), floor });
        let connection = c.connection;
        self.send(client, connection, Body::Read { id: n, ask });
    }

    pub(super) fn alter(&mut self, client: usize, alter: Alter, makes: Vec<Number>) {
        let c = &mut self.clients[client];
        let seq = c.next;
        c.next += 1;
        let (change, Dropped { inos: dropped, .. }) = c.table.change_begins(alter.change());
        let (token, connection) = (c.table.begin(), c.connection);
        c.changing = Some(Changing { seq, alter, change, token, connection, makes });
        self.send(client, connection, Body::Write { seq, alter, dropped });
    }

    /// Has the size applied that was not reported yet, and then confirms the reports.
    pub(super) fn make_reports(&mut self, client: usize) {
        let c = &mut self.clients[client];
        let makes = if self.fault == Fault::ReportsEarly { Vec::new() } else { c.reports.clone() };
        c.reports.clear();
        let (size, connection) = (c.wrote, c.connection);
        if c.known < size {
            self.alter(client, Alter::Extend { size }, makes);
        } else if !makes.is_empty() {
            self.send(client, connection, Body::Reported(makes));
        }
    }

    pub(super) fn reconnect(&mut self, client: usize) {
        let (clock, term, fault) = (self.clock, self.leader.term, self.fault);
        let c = &mut self.clients[client];
        if c.term == term {
            self.left.reconnects -= 1;
        }
        c.connection += 1;
        c.term = term;
        c.said_hello = false;
        // The new leader or connection asks for them again.
        c.reports.clear();
        c.renewed = Some(clock);
        if fault != Fault::HelloRemembers {
            c.table.connected();
        }
        if let Some(a) = c.asking.take() {
            c.table.end(a.token);
        }
        let connection = c.connection;
        self.messages.retain(|m| m.client != client || World::is_for_leader(m));
        self.send(client, connection, Body::Hello { sent: clock });
    }

    pub(super) fn poll(&mut self, client: usize, connection: u64, acknowledged: Number) {
        let m = Message { client, connection, body: Body::Poll { acknowledged } };
        if self.left.polls {
            self.send(client, connection, m.body);
        } else if self.clients[client].term == self.leader.term {
            self.leader_takes(m);
        }
    }
}
