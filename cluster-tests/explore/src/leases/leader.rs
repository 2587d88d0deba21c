//! The steps in which the leader works on a request, modelled on the product's shell code.

use strake_mds::leases::{Leases, Number, reports::Reports};
use strake_proto::Ino;

use super::{
    Body, Fault, Message, WRITER, World, id,
    kinds::{Alter, Ask, DIR, FILE, Versions},
};

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
    /// Waits for the writer's report.
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
pub struct Leader {
    pub term: u64,
    pub leases: Leases,
    pub reports: Reports,
    /// The report that was asked for last.
    pub asked: Number,
    pub tasks: Vec<Task>,
    /// Clients that wait for recalls, with their connections.
    pub polls: [Option<u64>; 2],
}

impl World {
    /// Whether the leader can go on with a request.
    pub(super) fn can_step(&self, t: &Task) -> bool {
        let grace = self.leader.leases.in_grace(self.now()) && self.fault != Fault::NoGrace;
        let settled = |ticket, inodes: &[Ino]| {
            self.fault == Fault::Unsettled
                || self.leader.leases.is_settled(ticket, inodes.iter().copied())
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

    pub(super) fn step(&mut self, task: &Task) {
        let Some(i) = self.leader.tasks.iter().position(|t| t == task) else { return };
        self.leader.tasks.remove(i);
        let (client, connection) = (task.client, task.connection);
        let next = |stage| Task { client, connection, stage };
        match task.stage.clone() {
            Stage::Noted { id: n, ask, early, reported } => {
                let ticket = if self.fault == Fault::EarlyTicket {
                    early
                } else {
                    self.leader.leases.ticket()
                };
                let stage = Stage::Read {
                    id: n,
                    ask,
                    values: self.state,
                    ticket,
                    applied: self.applied,
                    reported,
                };
                self.add_task(next(stage));
            }
            Stage::Read { id: n, ask, values, ticket, applied, reported } => {
                for ino in ask.depends(values) {
                    self.grant(client, connection, ino);
                }
                let asks =
                    !reported && self.others_write(client) && ask.depends(values).contains(&FILE);
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

    /// Applies an entry of the log: on the leader that took the request on this connection, or on a
    /// new leader.
    pub(super) fn apply(&mut self, client: usize, connection: Option<u64>, seq: u8, alter: Alter) {
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
        // With the fault each inode is on its own.
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

    pub(super) fn leader_takes(&mut self, m: Message) {
        let (now, client, connection) = (self.now(), m.client, m.connection);
        let leases = &mut self.leader.leases;
        match m.body {
            Body::Hello { sent }
                if leases.hello(id(client), connection, false)
                    && leases.renewed(now, id(client)) =>
            {
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
                // Numbers of changes begin with 1. With the fault, a copy gets another number.
                let own = if self.fault == Fault::DropsAgain {
                    u64::from(u8::MAX - self.left.copies)
                } else {
                    0
                };
                leases.dropped(
                    now,
                    id(client),
                    connection,
                    256 * own + u64::from(seq) + 1,
                    &dropped,
                );
                self.grant(client, connection, alter.named());
                self.add_task(Task { client, connection, stage: Stage::Proposed { seq, alter } });
            }
            _ => {}
        }
    }

    pub(super) fn failover(&mut self, keeps: bool) {
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
}
