//! The world of `docs/leases.md`: one leader, two clients, a directory with one name and the inode behind it. The tables are
//! the product's; what is around them (what the leader does with a request, in which steps) is written after its shell.
//!
//! The promise: every answer, from memory or not, is as new as any that was given before it was asked for, where whoever was told a part
//! of what an entry did was told all of it; and who asks for a file's attributes is told of every write that had returned.

mod kinds;

use std::time::Duration;

pub use kinds::{Alter, Ask, Fault, Versions};
use kinds::{DIR, FILE, History, NAME, implied};
use strake_client::leases::{Change, Name, Table, Token, Told};
use strake_mds::leases::{Leases, Limits, Number, reports::Reports};
use strake_proto::{Ino, SessionId};

use crate::Model;

/// The client that has the file open for writing, where there is one.
const WRITER: usize = 0;
/// Ticks of the clock.
const TERM: Duration = Duration::from_secs(2);

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Body {
    Hello { sent: u8 },
    Renew { sent: u8 },
    Poll { acknowledged: Number },
    Reported(Vec<Number>),
    Read { id: u8, ask: Ask },
    Write { seq: u8, alter: Alter, dropped: Vec<Ino> },
    // To clients.
    Renewed { sent: u8 },
    Recalls { recalls: Vec<(Number, Ino)>, reports: Vec<(Number, Ino)> },
    Answer { id: u8, ask: Ask, values: Versions, granted: Vec<Ino> },
    Done { seq: u8, values: Versions, granted: bool },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    client: usize,
    connection: u64,
    body: Body,
}

/// A request in work at the leader.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    client: usize,
    connection: u64,
    stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Stage {
    Noted {
        id: u8,
        ask: Ask,
        early: Number,
        reported: bool,
    },
    Read {
        id: u8,
        ask: Ask,
        values: Versions,
        ticket: Number,
        applied: u8,
        reported: bool,
    },
    /// The writer is to report first.
    Reporting {
        id: u8,
        ask: Ask,
        values: Versions,
        ticket: Number,
        number: Number,
    },
    Settling {
        id: u8,
        ask: Ask,
        values: Versions,
        ticket: Number,
    },
    Proposed {
        seq: u8,
        alter: Alter,
    },
    Applied {
        seq: u8,
        alter: Alter,
        values: Versions,
        ticket: Number,
    },
}

#[derive(Clone, Debug, Hash)]
struct Asking {
    id: u8,
    token: Token,
    /// What had been told before.
    floor: Versions,
}

#[derive(Clone, Debug, Hash)]
struct Changing {
    seq: u8,
    alter: Alter,
    change: Change,
    token: Token,
    /// Where it was sent last.
    connection: u64,
    /// Reports that are made by it.
    makes: Vec<Number>,
}

#[derive(Clone, Debug, Hash)]
struct Client {
    table: Table<u8>,
    /// The version of the name that is known, if it is.
    name: u8,
    connection: u64,
    /// The leader it is connected to.
    term: u64,
    said_hello: bool,
    /// When the last renewal was sent.
    renewed: Option<u8>,
    acknowledged: Number,
    asking: Option<Asking>,
    changing: Option<Changing>,
    next: u8,
    /// How much it has written, and of how much of that the servers know for certain.
    wrote: u8,
    known: u8,
    /// Reports that it is to make.
    reports: Vec<Number>,
}

#[derive(Clone, Debug, Hash)]
struct Leader {
    term: u64,
    leases: Leases,
    reports: Reports,
    /// The report that was asked for last.
    asked: Number,
    tasks: Vec<Task>,
    /// Clients that wait for recalls, by connection.
    polls: [Option<u64>; 2],
}

/// How often what may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bounds {
    pub asks: u8,
    pub changes: u8,
    pub ticks: u8,
    /// Requests for recalls that are sent again; any message may be lost in any case.
    pub repeats: u8,
    pub reconnects: u8,
    /// Changes that nobody waits for any more.
    pub impatience: u8,
    pub failovers: u8,
    pub renewals: u8,
    /// Writes by one client, which is on record as the file's writer then. Not together with ticks: nobody waits for a writer whose
    /// term is over.
    pub writes: u8,
    /// A session may hold one lease only.
    pub full: bool,
    /// Whether requests for recalls take time; otherwise they arrive at once.
    pub polls: bool,
}

#[derive(Clone, Debug, Hash)]
pub struct World {
    fault: Fault,
    left: Bounds,
    clock: u8,
    state: Versions,
    applied: u8,
    history: History,
    written: bool,
    done: Vec<(usize, u8)>,
    leader: Leader,
    clients: [Client; 2],
    messages: Vec<Message>,
    /// The newest that anybody was told.
    floor: Versions,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Deliver(Message),
    /// The leader goes on with a request.
    Step(Task),
    SendRecalls(usize),
    Ask(usize, Ask),
    Alter(usize, Alter),
    Renew(usize),
    /// The recalls did not come.
    PollAgain(usize),
    /// A program's write returns.
    Write,
    MakeReports(usize),
    Reconnect(usize),
    Retry(usize),
    GiveUp(usize),
    Tick,
    /// The leader dies; what was proposed is in the log or not.
    Failover {
        keeps: bool,
    },
}

fn id(client: usize) -> SessionId {
    client as SessionId + 1
}

fn time(clock: u8) -> Duration {
    Duration::from_secs(u64::from(clock))
}

impl World {
    fn limits(left: &Bounds) -> Limits {
        let of_session = if left.full { 1 } else { Limits::default().of_session };
        Limits { term: TERM, patience: Duration::MAX, hot: u32::MAX, of_session, ..Limits::default() }
    }

    /// Both clients are connected, hold leases as from now, and know nothing.
    pub fn new(left: Bounds, fault: Fault) -> World {
        let limits = World::limits(&left);
        let mut leases = Leases::new(limits, time(0), 1, []);
        let clients = [0, 1].map(|c| {
            leases.hello(id(c), 1, false);
            leases.renewed(time(0), id(c));
            let mut table = Table::default();
            table.connected();
            table.renewed(time(0), time(0), TERM);
            Client {
                table,
                name: 0,
                connection: 1,
                term: 1,
                said_hello: true,
                renewed: Some(0),
                acknowledged: 0,
                asking: None,
                changing: None,
                next: 0,
                wrote: 0,
                known: 0,
                reports: Vec::new(),
            }
        });
        let polls = [Some(1), Some(1)];
        World {
            fault,
            left,
            clock: 0,
            state: Versions::default(),
            applied: 0,
            history: History::new(),
            written: left.writes > 0,
            done: Vec::new(),
            leader: Leader { term: 1, leases, reports: Reports::new(1), asked: 0, tasks: Vec::new(), polls },
            clients,
            messages: Vec::new(),
            floor: Versions::default(),
        }
    }

    fn now(&self) -> Duration {
        time(self.clock)
    }

    /// What can arrive nowhere is not sent: to a leader that has died, or on a connection that its client has given up.
    fn send(&mut self, client: usize, connection: u64, body: Body) {
        let (m, c) = (Message { client, connection, body }, &self.clients[client]);
        let arrives = if World::is_for_leader(&m) { c.term == self.leader.term } else { c.connection == connection };
        if arrives {
            self.messages.push(m);
            self.messages.sort();
        }
    }

    fn add_task(&mut self, task: Task) {
        self.leader.tasks.push(task);
        self.leader.tasks.sort();
    }

    fn is_for_leader(m: &Message) -> bool {
        matches!(
            m.body,
            Body::Hello { .. }
                | Body::Renew { .. }
                | Body::Poll { .. }
                | Body::Reported(_)
                | Body::Read { .. }
                | Body::Write { .. }
        )
    }

    /// Whether the leader can go on with a request.
    fn can_step(&self, t: &Task) -> bool {
        let grace = self.leader.leases.in_grace(self.now()) && self.fault != Fault::NoGrace;
        let settled = |ticket, inodes: &[Ino]| {
            self.fault == Fault::Unsettled || self.leader.leases.is_settled(ticket, inodes.iter().copied())
        };
        match &t.stage {
            Stage::Proposed { .. } => true,
            _ if grace => false,
            Stage::Reporting { number, .. } => self.leader.reports.is_in(id(WRITER), *number),
            Stage::Settling { ask, values, ticket, .. } => settled(*ticket, &ask.depends(*values)),
            Stage::Applied { alter, ticket, .. } => settled(*ticket, alter.changes()),
            _ => true,
        }
    }

    fn step(&mut self, task: &Task) {
        let Some(i) = self.leader.tasks.iter().position(|t| t == task) else { return };
        self.leader.tasks.remove(i);
        let (client, connection) = (task.client, task.connection);
        let next = |stage| Task { client, connection, stage };
        match task.stage.clone() {
            Stage::Noted { id: n, ask, early, reported } => {
                let ticket = if self.fault == Fault::EarlyTicket { early } else { self.leader.leases.ticket() };
                let stage = Stage::Read { id: n, ask, values: self.state, ticket, applied: self.applied, reported };
                self.add_task(next(stage));
            }
            Stage::Read { id: n, ask, values, ticket, applied, reported } => {
                for ino in ask.depends(values) {
                    self.grant(client, connection, ino);
                }
                let asks = !reported && self.others_write(client) && ask.depends(values).contains(&FILE);
                let stage = if applied != self.applied && self.fault != Fault::LateGrant {
                    Stage::Noted { id: n, ask, early: ticket, reported }
                } else if asks && self.fault != Fault::NotAsked {
                    let number = self.ask_to_report();
                    Stage::Reporting { id: n, ask, values, ticket, number }
                } else {
                    Stage::Settling { id: n, ask, values, ticket }
                };
                self.add_task(next(stage));
            }
            Stage::Reporting { id: n, ask, values, ticket, .. } => {
                let stage = match self.fault {
                    Fault::NotReread => Stage::Settling { id: n, ask, values, ticket },
                    _ => {
                        for ino in ask.depends(self.state) {
                            self.grant(client, connection, ino);
                        }
                        Stage::Noted { id: n, ask, early: ticket, reported: true }
                    }
                };
                self.add_task(next(stage));
            }
            Stage::Settling { id: n, ask, values, .. } => {
                let mut granted = ask.depends(values);
                granted.retain(|ino| self.leader.leases.holds(id(client), connection, *ino));
                self.send(client, connection, Body::Answer { id: n, ask, values, granted });
            }
            Stage::Proposed { seq, alter } => {
                self.apply(client, Some(connection), seq, alter);
                let ticket = self.leader.leases.ticket();
                self.add_task(next(Stage::Applied { seq, alter, values: self.state, ticket }));
            }
            Stage::Applied { seq, alter, values, .. } => {
                let values = alter.told(values);
                let granted = self.leader.leases.holds(id(client), connection, alter.named());
                self.send(client, connection, Body::Done { seq, values, granted });
            }
        }
    }

    fn others_write(&self, client: usize) -> bool {
        self.written && client != WRITER
    }

    fn grant(&mut self, client: usize, connection: u64, ino: Ino) {
        if ino == FILE && self.others_write(client) {
            return;
        }
        let (now, before) = (self.now(), self.leader.leases.ticket());
        self.leader.leases.grant(now, id(client), connection, ino);
        if self.fault == Fault::RoomAtOnce && self.leader.leases.ticket() != before {
            self.leader.leases.recalls(now, id(client), Number::MAX);
        }
    }

    fn ask_to_report(&mut self) -> Number {
        let (now, asked) = (self.now(), self.leader.asked);
        let is_open = asked != 0 && !self.leader.reports.is_in(id(WRITER), asked);
        if self.fault != Fault::SharesSent || !is_open {
            self.leader.asked = self.leader.reports.ask(now, id(WRITER), FILE);
        }
        self.leader.asked
    }

    /// The log's entry, on a leader that took the request on this connection, or on a new one.
    fn apply(&mut self, client: usize, connection: Option<u64>, seq: u8, alter: Alter) {
        if self.done.contains(&(client, seq)) {
            return;
        }
        self.done.push((client, seq));
        self.done.sort();
        let now = self.now();
        let spared = match self.fault {
            Fault::SparesLater => Some(self.clients[client].connection),
            _ => connection,
        };
        let by = |ino| spared.filter(|_| alter.names(ino)).map(|c| (id(client), c));
        let changed: Vec<_> = alter.changes().iter().map(|ino| (*ino, by(*ino))).collect();
        // Without the rest of its entry, each inode is alone.
        let entangled = if self.fault == Fault::Unentangled { 1 } else { changed.len() };
        for part in changed.chunks(entangled) {
            self.leader.leases.applied(now, part.iter().copied());
        }
        self.applied += 1;
        self.state.file += 1;
        match alter {
            Alter::File => {}
            Alter::Name => {
                self.state.dir += 1;
                self.state.name += 1;
            }
            Alter::Extend { size } => self.state.size = self.state.size.max(size),
        }
        self.history.push((alter, self.state));
    }

    fn deliver(&mut self, m: Message) -> Result<(), String> {
        if let Some(i) = self.messages.iter().position(|x| *x == m) {
            self.messages.remove(i);
        }
        if World::is_for_leader(&m) {
            self.leader_takes(m)
        } else {
            self.client_takes(m)?
        }
        Ok(())
    }

    fn leader_takes(&mut self, m: Message) {
        let (now, client, connection) = (self.now(), m.client, m.connection);
        let leases = &mut self.leader.leases;
        match m.body {
            Body::Hello { sent } if leases.hello(id(client), connection, false) && leases.renewed(now, id(client)) => {
                self.leader.reports.ask_again(id(client));
                self.send(client, connection, Body::Renewed { sent });
            }
            Body::Renew { sent } if leases.renewed(now, id(client)) => {
                self.send(client, connection, Body::Renewed { sent });
            }
            Body::Poll { acknowledged } => {
                leases.recalls(now, id(client), acknowledged);
                self.leader.polls[client] = Some(connection);
            }
            Body::Reported(numbers) => self.leader.reports.reported(id(client), &numbers),
            Body::Read { id: n, ask } => {
                let early = leases.ticket();
                if self.fault != Fault::LateGrant {
                    self.grant(client, connection, if ask == Ask::File { FILE } else { DIR });
                }
                let stage = Stage::Noted { id: n, ask, early, reported: false };
                self.add_task(Task { client, connection, stage });
            }
            Body::Write { seq, alter, dropped } => {
                for ino in dropped {
                    leases.dropped(now, id(client), connection, ino);
                }
                self.grant(client, connection, alter.named());
                self.add_task(Task { client, connection, stage: Stage::Proposed { seq, alter } });
            }
            _ => {}
        }
    }

    fn client_takes(&mut self, m: Message) -> Result<(), String> {
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
                let (acknowledged, numbers) = (c.acknowledged, reports.iter().map(|r| r.0).collect::<Vec<_>>());
                c.reports.extend(&numbers);
                self.poll(m.client, m.connection, acknowledged);
                if fault == Fault::ReportsEarly && !numbers.is_empty() {
                    self.send(m.client, m.connection, Body::Reported(numbers));
                }
            }
            Body::Answer { id, ask, values, granted } => {
                let Some(asking) = c.asking.take_if(|a| a.id == id) else { return Ok(()) };
                let mut before = asking.floor;
                // What it has not reported itself its library adds to every answer.
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
                    Alter::File | Alter::Extend { .. } if granted => told.attrs.push((FILE, values.file)),
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

    fn poll(&mut self, client: usize, connection: u64, acknowledged: Number) {
        let m = Message { client, connection, body: Body::Poll { acknowledged } };
        if self.left.polls {
            self.send(client, connection, m.body);
        } else if self.clients[client].term == self.leader.term {
            self.leader_takes(m);
        }
    }

    fn ask(&mut self, client: usize, ask: Ask) {
        self.left.asks -= 1;
        let floor = self.floor;
        let c = &mut self.clients[client];
        let n = c.next;
        c.next += 1;
        c.asking = Some(Asking { id: n, token: c.table.begin(), floor });
        let connection = c.connection;
        self.send(client, connection, Body::Read { id: n, ask });
    }

    fn alter(&mut self, client: usize, alter: Alter, makes: Vec<Number>) {
        let c = &mut self.clients[client];
        let seq = c.next;
        c.next += 1;
        let (change, dropped) = c.table.change_begins(alter.change());
        let (token, connection) = (c.table.begin(), c.connection);
        c.changing = Some(Changing { seq, alter, change, token, connection, makes });
        self.send(client, connection, Body::Write { seq, alter, dropped });
    }

    /// Has what was not reported yet applied, and then says so.
    fn make_reports(&mut self, client: usize) {
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

    fn reconnect(&mut self, client: usize) {
        let (clock, term, fault) = (self.clock, self.leader.term, self.fault);
        let c = &mut self.clients[client];
        if c.term == term {
            self.left.reconnects -= 1;
        }
        c.connection += 1;
        c.term = term;
        c.said_hello = false;
        // They are asked for again.
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

    fn failover(&mut self, keeps: bool) {
        self.left.failovers -= 1;
        let term = self.leader.term + 1;
        let leases = Leases::new(World::limits(&self.left), self.now(), term, [0, 1].map(id));
        let (reports, tasks, polls) = (Reports::new(term), Vec::new(), [None; 2]);
        let new = Leader { term, leases, reports, asked: 0, tasks, polls };
        let old = std::mem::replace(&mut self.leader, new);
        self.messages.retain(|m| !World::is_for_leader(m));
        for t in old.tasks.into_iter().filter(|_| keeps) {
            if let Stage::Proposed { seq, alter } = t.stage {
                self.apply(t.client, None, seq, alter);
            }
        }
    }

    /// Every copy that a client may answer from is as new as anything that anybody was told.
    fn check(&self) -> Result<(), String> {
        for (i, c) in self.clients.iter().enumerate() {
            let now = self.now();
            let name = c.table.name(now, DIR, &NAME, 0).map(|_| c.name);
            let known = [
                ("the directory", c.table.attr(now, DIR).copied(), self.floor.dir),
                ("the file", c.table.attr(now, FILE).copied(), self.floor.file),
                ("the name", name, self.floor.name),
            ];
            for (what, version, floor) in known {
                if let Some(v) = version.filter(|v| *v < floor) {
                    return Err(format!("client {i} answers with version {v} of {what}, and {floor} has been told"));
                }
            }
        }
        Ok(())
    }

    fn client_actions(&self, i: usize, out: &mut Vec<Action>) {
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
            // The clients are alike, so the first change may be the first client's.
            None if self.left.changes > 0
                && (i == 0 || self.applied > 0 || !self.done.is_empty() || self.clients[0].next > 0) =>
            {
                out.extend([Action::Alter(i, Alter::File), Action::Alter(i, Alter::Name)])
            }
            Some(x) if c.connection > x.connection => out.extend([Action::Retry(i), Action::GiveUp(i)]),
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
        for i in 0..self.clients.len() {
            let (mut leases, mut reports, now) = (self.leader.leases.clone(), self.leader.reports.clone(), self.now());
            let tells = |l: &mut Leases, r: &mut Reports| {
                !l.recalls(now, id(i), 0).is_empty() || !r.take(now, id(i)).is_empty()
            };
            if self.leader.polls[i].is_some() && tells(&mut leases, &mut reports) {
                out.push(Action::SendRecalls(i));
            }
            self.client_actions(i, &mut out);
        }
        if self.left.ticks > 0 {
            out.push(Action::Tick);
        }
        if self.left.failovers > 0 {
            out.extend([Action::Failover { keeps: false }, Action::Failover { keeps: true }]);
        }
        out
    }

    fn act(&mut self, action: &Action) -> Result<(), String> {
        match action {
            Action::Deliver(m) => self.deliver(m.clone())?,
            Action::Step(t) => self.step(t),
            Action::SendRecalls(i) => {
                let recalls = self.leader.leases.recalls(self.now(), id(*i), 0);
                let reports = self.leader.reports.take(self.now(), id(*i));
                if let Some(connection) = self.leader.polls[*i].take() {
                    self.send(*i, connection, Body::Recalls { recalls, reports });
                }
            }
            Action::Ask(i, ask) => self.ask(*i, *ask),
            Action::Alter(i, alter) => {
                self.left.changes -= 1;
                self.alter(*i, *alter, Vec::new());
            }
            Action::Write => {
                self.left.writes -= 1;
                let c = &mut self.clients[WRITER];
                c.wrote += 1;
                self.floor.size = c.wrote;
            }
            Action::MakeReports(i) => self.make_reports(*i),
            Action::Renew(i) => {
                self.left.renewals -= 1;
                let (sent, c) = (self.clock, &mut self.clients[*i]);
                c.renewed = Some(sent);
                let connection = c.connection;
                self.send(*i, connection, Body::Renew { sent });
            }
            Action::PollAgain(i) => {
                self.left.repeats -= 1;
                let (connection, acknowledged) = (self.clients[*i].connection, self.clients[*i].acknowledged);
                self.send(*i, connection, Body::Poll { acknowledged });
            }
            Action::Reconnect(i) => self.reconnect(*i),
            Action::Retry(i) => {
                let c = &mut self.clients[*i];
                if let Some(x) = &mut c.changing {
                    x.connection = c.connection;
                    let (seq, alter, connection) = (x.seq, x.alter, x.connection);
                    self.send(*i, connection, Body::Write { seq, alter, dropped: vec![] });
                }
            }
            Action::GiveUp(i) => {
                let answered = self.fault == Fault::ForgetsGivenUp;
                let c = &mut self.clients[*i];
                self.left.impatience = self.left.impatience.saturating_sub(1);
                if let Some(x) = c.changing.take() {
                    c.table.change_ends(&x.change, answered);
                    c.table.end(x.token);
                }
            }
            Action::Tick => {
                self.left.ticks -= 1;
                self.clock += 1;
                let now = self.now();
                self.leader.leases.tick(now);
                for c in &mut self.clients {
                    c.table.expire(now);
                }
            }
            Action::Failover { keeps } => self.failover(*keeps),
        }
        self.check()
    }
}
