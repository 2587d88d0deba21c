//! The leader, in the steps of its shell: `mds/src/server/recalls.rs` and `reads.rs`.

use strake_mds::leases::{Leases, Limits, Number, reports::Reports, writers::Writers};
use strake_proto::SessionId;

use super::{
    Fault, TERM, World, id,
    kinds::{Body, FILE, Message, Seen, Stage, Task, What},
};

/// The state of one leader.
#[derive(Clone, Debug, Hash)]
pub struct Leader {
    pub term: u64,
    pub leases: Leases,
    pub reports: Reports,
    pub writers: Writers,
    /// The last eviction of a session that could write the file, until nothing of such a session
    /// can arrive any more.
    pub fence: usize,
    /// The last such eviction while there is another writer, until it is known how far the file
    /// reaches; and what the storage server said about that.
    pub endless: usize,
    pub seen: Option<Seen>,
    pub tasks: Vec<Task>,
    /// Clients that wait for recalls, with their connections.
    pub polls: [Option<u64>; 2],
}

impl World {
    pub(super) fn limits() -> Limits {
        Limits {
            term: TERM,
            patience: std::time::Duration::MAX,
            hot: u32::MAX,
            ..Limits::default()
        }
    }

    pub(super) fn leader_takes(&mut self, m: Message) {
        let (now, client, connection) = (self.now(), m.client, m.connection);
        let is_hello = matches!(m.body, Body::Hello { .. });
        if is_hello {
            if self.leader.leases.hello(id(client), connection, false) {
                self.leader.reports.ask_again(id(client));
            }
            if self.log.is_evicted(client) {
                self.leader.leases.ended(now, id(client), true);
            }
        }
        if self.log.is_evicted(client) {
            if self.clients[client].connection == connection {
                self.session_lost(client);
            }
            return;
        }
        let meets = self.leader.leases.meets(id(client), connection);
        match m.body {
            Body::Hello { sent } | Body::Renew { sent }
                if meets && self.leader.leases.renewed(now, id(client)) =>
            {
                self.send(client, connection, Body::Renewed { sent });
            }
            Body::Reported(numbers) if meets => self.leader.reports.reported(id(client), &numbers),
            Body::Asks { id: n, what } => {
                let task = |stage| Task { client, connection, id: n, what, stage };
                match what {
                    What::Look => self.look(client, connection, n, false),
                    _ => {
                        let ran = !self.log.done.insert((client, n));
                        if !ran {
                            self.apply(client, connection, n, what);
                        }
                        let ticket = (!ran).then(|| self.leader.leases.ticket());
                        if !ran {
                            self.grant(client, connection);
                        }
                        self.add_task(task(Stage::Settling { size: self.log.size, ticket }));
                    }
                }
            }
            Body::Release { opened } => {
                let last = self.log.writers.get(&client).copied();
                if last.is_some_and(|last| last == opened || self.fault == Fault::ReleasesLater) {
                    self.log.writers.remove(&client);
                    self.leader.writers.record(id(client), FILE, false);
                    if self.log.writers.is_empty() && self.log.endless > 0 {
                        (self.log.cut, self.log.endless) = (true, 0);
                    }
                }
            }
            _ => {}
        }
    }

    pub(super) fn poll(&mut self, client: usize) {
        let (now, c) = (self.now(), &self.clients[client]);
        let (connection, acknowledged) = (c.connection, c.acknowledged);
        if c.term == self.leader.term && self.leader.leases.meets(id(client), connection) {
            self.leader.leases.recalls(now, id(client), acknowledged);
            self.leader.polls[client] = Some(connection);
        }
    }

    pub(super) fn send_recalls(&mut self, client: usize) {
        let now = self.now();
        let recalls =
            self.leader.leases.recalls(now, id(client), 0).into_iter().map(|r| r.0).collect();
        let reports = self.leader.reports.take(now, id(client)).into_iter().map(|r| r.0).collect();
        if let Some(connection) = self.leader.polls[client].take() {
            self.send(client, connection, Body::Recalls { recalls, reports });
        }
    }

    /// Whether there is something to send to a client that waits for it.
    pub(super) fn has_recalls(&self, client: usize) -> bool {
        let (mut leases, mut reports, now) =
            (self.leader.leases.clone(), self.leader.reports.clone(), self.now());
        self.leader.polls[client].is_some()
            && (!leases.recalls(now, id(client), 0).is_empty()
                || !reports.take(now, id(client)).is_empty())
    }

    fn add_task(&mut self, task: Task) {
        self.leader.tasks.push(task);
        self.leader.tasks.sort();
    }

    fn others_write(&self, client: usize) -> Vec<SessionId> {
        self.leader.writers.others(id(client), FILE).collect()
    }

    fn grant(&mut self, client: usize, connection: u64) {
        if self.others_write(client).is_empty() || self.fault == Fault::GrantsWritten {
            let now = self.now();
            self.leader.leases.grant(now, id(client), connection, FILE);
        }
    }

    fn ask(&mut self, those: Vec<SessionId>) -> Vec<(SessionId, Number)> {
        let now = self.now();
        those.into_iter().map(|s| (s, self.leader.reports.ask(now, s, FILE))).collect()
    }

    /// Grants a lease and reads the state. Before that is answered, other writers report (once),
    /// and an unknown end of the file is found out.
    fn look(&mut self, client: usize, connection: u64, n: u8, reported: bool) {
        self.grant(client, connection);
        let (size, ticket) = (self.log.size, Some(self.leader.leases.ticket()));
        let mut others = self.others_write(client);
        if reported || self.fault == Fault::NotAsked {
            others.clear();
        }
        let endless = self.log.endless > 0 && self.fault != Fault::NotReadAgain;
        let stage = if others.is_empty() && !endless {
            Stage::Settling { size, ticket }
        } else {
            Stage::Reporting { asked: self.ask(others) }
        };
        self.add_task(Task { client, connection, id: n, what: What::Look, stage });
    }

    /// Applies an entry of the log.
    fn apply(&mut self, client: usize, connection: u64, n: u8, what: What) {
        let (now, mut changed) = (self.now(), false);
        match what {
            What::Open => {
                changed = self.log.writers.insert(client, n).is_none();
                if changed {
                    self.leader.writers.record(id(client), FILE, true);
                }
                changed &= self.fault != Fault::NoRecall;
            }
            What::Extend { end } => {
                self.log.size = self.log.size.max(end);
                self.log.change += 1;
                changed = true;
            }
            What::Look => {}
        }
        if changed {
            self.leader.leases.applied(now, [(FILE, Some((id(client), connection)))]);
        }
    }

    /// Applies an entry of the log: a session is evicted.
    pub(super) fn evict(&mut self, client: usize) {
        let now = self.now();
        self.log.evicted.push(client);
        self.evicted.note(now, TERM, id(client));
        if self.log.writers.remove(&client).is_some() {
            self.leader.writers.record(id(client), FILE, false);
            self.log.fence = self.log.evicted.len();
            self.leader.fence = self.log.fence;
            if self.log.writers.is_empty() {
                (self.log.cut, self.log.endless) = (true, 0);
            } else if self.fault != Fault::EndIgnored {
                self.log.endless = self.log.fence;
                self.leader.endless = self.log.fence;
            }
        }
        self.leader.leases.ended(now, id(client), false);
        self.leader.reports.ended(id(client));
        self.leader.writers.ended(id(client));
    }

    /// The leader looks for the end that an evicted session did not report, unless that is not
    /// needed any more.
    pub(super) fn see(&mut self) {
        let (eviction, change) = (self.log.endless, self.log.change);
        if eviction == 0 {
            self.leader.endless = 0;
            self.cut();
            return;
        }
        let end = self.storage.blocks.iter().rposition(|b| *b != 0).map_or(0, |i| i as u64 + 1);
        self.leader.seen = Some(Seen { end, eviction, change });
    }

    /// Removes what lies past the end, if it can only be of evicted sessions.
    pub(super) fn cut(&mut self) {
        if std::mem::take(&mut self.log.cut) {
            let end = self.log.size as usize;
            self.storage.blocks.iter_mut().skip(end).for_each(|b| *b = 0);
        }
    }

    /// Applies an entry of the log. Returns false if the entry is refused.
    pub(super) fn found(&mut self, seen: Seen) -> bool {
        if self.log.endless == 0
            || seen.eviction != self.log.endless
            || seen.change != self.log.change
        {
            return false;
        }
        self.log.endless = 0;
        if seen.end > self.log.size {
            self.log.size = seen.end;
            self.log.change += 1;
            let now = self.now();
            self.leader.leases.applied(now, [(FILE, None)]);
        }
        true
    }

    /// Whether the leader can continue with a request.
    pub(super) fn can_step(&self, t: &Task) -> bool {
        let l = &self.leader;
        let is_in =
            |asked: &[(SessionId, Number)]| asked.iter().all(|(s, n)| l.reports.is_in(*s, *n));
        let fenced = l.fence == 0 && l.endless == 0 || self.fault == Fault::NotFenced;
        let open = !l.leases.in_grace(self.now()) && fenced;
        match &t.stage {
            Stage::Reporting { asked } => is_in(asked) && l.endless == 0,
            Stage::Holding { asked, .. } => is_in(asked),
            Stage::Settling { ticket, .. } => {
                let early = self.fault == Fault::Unsettled && t.what == What::Open;
                let settled = match ticket {
                    Some(ticket) => l.leases.is_settled(*ticket, [FILE]),
                    None => l.leases.is_all_settled(l.leases.ticket()),
                };
                open && (settled || early)
            }
            Stage::Opened { .. } => open,
        }
    }

    pub(super) fn step(&mut self, task: &Task) {
        let Some(i) = self.leader.tasks.iter().position(|t| t == task) else { return };
        self.leader.tasks.remove(i);
        let (client, connection) = (task.client, task.connection);
        match task.stage.clone() {
            Stage::Reporting { .. } => self.look(client, connection, task.id, true),
            Stage::Settling { size, .. } if task.what == What::Open => {
                let holders = self.leader.writers.holders(&[FILE].into());
                let mut those = self.others_write(client);
                those.retain(|s| holders.are(FILE, *s) && self.fault != Fault::HoldersNotAsked);
                if those.is_empty() {
                    return self.answer(task, size);
                }
                let asked = self.ask(those);
                if self.fault == Fault::AskedCounts {
                    self.leader.writers.have_reported(holders.clone(), id(client));
                }
                self.add_task(Task {
                    stage: Stage::Holding { size, holders, asked },
                    ..task.clone()
                });
            }
            Stage::Holding { size, holders, .. } => {
                let holders = match self.fault {
                    Fault::ReportedForGood => self.leader.writers.holders(&[FILE].into()),
                    _ => holders,
                };
                self.leader.writers.have_reported(holders, id(client));
                self.add_task(Task { stage: Stage::Opened { size }, ..task.clone() });
            }
            Stage::Settling { size, .. } | Stage::Opened { size } => self.answer(task, size),
        }
    }

    fn answer(&mut self, task: &Task, size: u64) {
        if !matches!(task.what, What::Extend { .. }) {
            self.depended = self.log.evicted.len();
        }
        let granted = self.leader.leases.holds(id(task.client), task.connection, FILE);
        self.send(task.client, task.connection, Body::Answer { id: task.id, size, granted });
    }

    /// The leader dies, and the next one has only what is in the log.
    pub(super) fn failover(&mut self) {
        let term = self.leader.term + 1;
        let alive: Vec<SessionId> =
            [0, 1].into_iter().filter(|c| !self.log.is_evicted(*c)).map(id).collect();
        let mut graced = alive.clone();
        if self.fault != Fault::NewLeaderIgnoresEvicted {
            // Every server has seen all entries when they were applied.
            graced.extend(self.evicted.may_live(self.now(), TERM, Vec::new));
        }
        let holding = if self.fault == Fault::NewLeaderForgets { vec![] } else { alive };
        self.strays.extend(self.leader.seen);
        self.leader = Leader {
            term,
            leases: Leases::new(World::limits(), self.now(), term, graced),
            reports: Reports::new(term),
            writers: Writers::new(self.log.writers.keys().map(|c| (id(*c), FILE)), holding),
            fence: if self.fault == Fault::NewLeaderUnfenced { 0 } else { self.log.fence },
            endless: if self.fault == Fault::NewLeaderUnfenced { 0 } else { self.log.endless },
            seen: None,
            tasks: Vec::new(),
            polls: [None; 2],
        };
        self.messages.retain(|m| !World::is_for_leader(m));
    }
}
