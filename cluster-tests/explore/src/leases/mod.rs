//! The world of `docs/leases.md`: one leader, two clients, a directory with one name, and the inode
//! behind it. The tables are the product's code; the rest (the steps in which the leader works on a
//! request) is a model of its shell code.
//!
//! The promise: every answer, from the cache or not, is at least as new as every answer that had
//! been given when it was asked for. If a part of a log entry was told, this holds for the whole
//! entry. And a request for a file's attributes shows every write that had returned.

mod client;
mod kinds;
mod leader;

use std::time::Duration;

use client::Client;
pub use kinds::{Alter, Ask, Fault, Versions};
use kinds::{DIR, FILE, History, NAME};
use leader::{Leader, Task};
use strake_client::leases::Table;
use strake_mds::leases::{Leases, Limits, Number, reports::Reports};
use strake_proto::{Ino, SessionId};

use crate::Model;

/// The client that has the file open for writing, if any has.
const WRITER: usize = 0;
/// In ticks of the clock, which are seconds here.
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

/// How often each kind of event may happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bounds {
    pub asks: u8,
    pub changes: u8,
    pub ticks: u8,
    /// Requests for recalls that are sent again; any message may be lost anyway.
    pub repeats: u8,
    /// Changes of which a second copy arrives.
    pub copies: u8,
    pub reconnects: u8,
    /// Changes that the client stops waiting for.
    pub impatience: u8,
    pub failovers: u8,
    pub renewals: u8,
    /// Writes by one client, which is then on record as the file's writer. Not together with ticks:
    /// the leader does not wait for a writer whose term is over.
    pub writes: u8,
    /// A session may hold only one lease.
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
    /// The newest versions that any client was told.
    floor: Versions,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Deliver(Message),
    /// It arrives, and a second time later.
    Copy(Message),
    /// The leader continues with a request.
    Step(Task),
    SendRecalls(usize),
    Ask(usize, Ask),
    Alter(usize, Alter),
    Renew(usize),
    /// The client asks again, as the recalls did not come.
    PollAgain(usize),
    /// A program's write returns.
    Write,
    MakeReports(usize),
    Reconnect(usize),
    Retry(usize),
    GiveUp(usize),
    Tick,
    /// The leader dies. With `keeps` what it had proposed is in the log.
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
        Limits {
            term: TERM,
            patience: Duration::MAX,
            hot: u32::MAX,
            of_session,
            ..Limits::default()
        }
    }

    /// Both clients are connected and hold leases from now on, with empty caches.
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
            leader: Leader {
                term: 1,
                leases,
                reports: Reports::new(1),
                asked: 0,
                tasks: Vec::new(),
                polls,
            },
            clients,
            messages: Vec::new(),
            floor: Versions::default(),
        }
    }

    fn now(&self) -> Duration {
        time(self.clock)
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

    /// Every version in a client's cache must be at least as new as any that was told.
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
                    return Err(format!(
                        "client {i} answers with version {v} of {what}, and {floor} has been told"
                    ));
                }
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
        if self.left.copies > 0 {
            let changes = messages.iter().filter(|m| matches!(m.body, Body::Write { .. }));
            out.extend(changes.cloned().map(Action::Copy));
        }
        // A message that is never delivered counts as lost.
        out.extend(messages.into_iter().map(Action::Deliver));
        let mut tasks = self.leader.tasks.clone();
        tasks.dedup();
        out.extend(tasks.into_iter().filter(|t| self.can_step(t)).map(Action::Step));
        for i in 0..self.clients.len() {
            let (mut leases, mut reports, now) =
                (self.leader.leases.clone(), self.leader.reports.clone(), self.now());
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
            Action::Copy(m) => {
                self.leader_takes(m.clone());
                self.left.copies -= 1;
            }
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
                let (connection, acknowledged) =
                    (self.clients[*i].connection, self.clients[*i].acknowledged);
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
