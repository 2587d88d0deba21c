//! The leader, and the storage server.

use std::collections::BTreeSet;

use strake_client::pages::Mode;
use strake_mds::{
    leases::{pages::Pages, writers::Writers},
    namespace::{
        locks::{Owner, PAGES, Want},
        spans::Span,
    },
};
use strake_proto::{SessionId, pb::LockKind};

use super::{
    NOW, World,
    kinds::{Body, CLIENTS, FILE, Fault, Message, Stage, Task},
};

/// The state of one leader.
#[derive(Clone, Debug, Hash)]
pub(super) struct Leader {
    pub term: u64,
    pub pages: Pages,
    pub writers: Writers,
    pub leased: BTreeSet<usize>,
    pub recalled: BTreeSet<usize>,
    /// The connections on which clients have said hello.
    pub greeted: [Option<u64>; CLIENTS],
    pub tasks: Vec<Task>,
}

pub(super) fn want(session: SessionId, mode: Mode) -> Want {
    let who = Owner { kind: LockKind::LockPages, session, owner: PAGES };
    Want {
        ino: FILE,
        who,
        span: Span { start: 0, end: u64::MAX, write: mode == Mode::Write, pid: 0 },
    }
}

impl World {
    fn connection(greeted: &[Option<u64>; CLIENTS], session: SessionId) -> Option<u64> {
        greeted[World::client_of(session)]
    }

    /// Whether the log has a lock for this session.
    fn has(&self, session: SessionId) -> bool {
        self.log.locks.held.iter().any(|(who, _)| who.session == session)
    }

    pub(super) fn holders_against(&self, session: SessionId, mode: Mode) -> BTreeSet<SessionId> {
        self.log.locks.barring(&want(session, mode)).map(|(who, _)| who.session).collect()
    }

    fn add_task(&mut self, task: Task) {
        self.leader.tasks.push(task);
        self.leader.tasks.sort();
        self.leader.tasks.dedup();
    }

    pub(super) fn leader_takes(&mut self, m: Message) {
        let Message { client, session, connection, body } = m;
        if self.log.evicted.contains(&session)
            || !self.log.sessions.contains(&session) && body != Body::Hello
        {
            return;
        }
        match body {
            Body::Hello => {
                self.log.sessions.insert(session);
                self.leader.greeted[client] = Some(connection);
                if self.fault != Fault::RestartTold {
                    self.leader.pages.hello(session);
                }
                self.leader.leased.remove(&client);
                self.leader.recalled.remove(&client);
                self.leader.tasks.retain(|t| t.client != client);
            }
            Body::Asks(mode) => {
                let waits = Task { client, session, stage: Stage::Waits(mode) };
                if self.has(session) {
                    self.lock_is_got(waits, mode);
                } else {
                    self.want_pages(session, mode);
                    self.add_task(waits);
                }
            }
            Body::Unlocks => {
                self.log.locks.held.retain(|(who, _)| who.session != session);
                self.send(client, Body::Unlocked);
                self.look_at_waits();
            }
            Body::Opens => {
                if self.log.writers.insert(session) {
                    self.leader.writers.record(session, FILE, true);
                }
                for other in std::mem::take(&mut self.leader.leased) {
                    if other == client {
                        self.leader.leased.insert(other);
                    } else {
                        self.leader.recalled.insert(other);
                        self.send(other, Body::Recall);
                    }
                }
                self.add_task(Task { client, session, stage: Stage::Opens });
            }
            Body::Closes => {
                if self.log.writers.remove(&session) {
                    self.leader.writers.record(session, FILE, false);
                }
            }
            Body::Acknowledges => {
                self.leader.recalled.remove(&client);
            }
            Body::Gave(number) => self.leader.pages.given(session, &[number]),
            _ => {}
        }
        self.send_wanted();
    }

    /// Asks the clients whose locks are in the way for their pages.
    fn want_pages(&mut self, session: SessionId, mode: Mode) {
        if self.fault != Fault::HolderNotAsked {
            let holders = self.holders_against(session, mode);
            self.leader.pages.want(NOW, FILE, &holders);
        }
    }

    /// A lock has changed: asks again for the requests that wait.
    pub(super) fn look_at_waits(&mut self) {
        for t in self.leader.tasks.clone() {
            if let Stage::Waits(mode) = t.stage {
                self.want_pages(t.session, mode);
            }
        }
        self.send_wanted();
    }

    fn send_wanted(&mut self) {
        for client in 0..CLIENTS {
            let session = self.clients[client].session;
            if self.leader.greeted[client] == Some(self.clients[client].connection) {
                for (number, _) in self.leader.pages.take(NOW, session) {
                    self.send(client, Body::Wanted(number));
                }
            }
        }
    }

    /// All sessions have said hello, and nothing that evicted sessions wrote can arrive any more.
    fn is_settled(&self) -> bool {
        let greeted = |c: usize| {
            self.leader.greeted[c].is_some()
                || !self.log.sessions.contains(&self.clients[c].session)
        };
        self.leader.recalled.is_empty() && (0..CLIENTS).all(greeted) && self.is_fenced()
    }

    fn is_fenced(&self) -> bool {
        self.log.evicted.is_subset(&self.storage.refuses)
    }

    pub(super) fn can_step(&self, t: &Task) -> bool {
        match &t.stage {
            Stage::Opens => self.is_settled() || self.fault == Fault::OpensEarly,
            Stage::Waits(mode) => {
                let fenced = self.is_fenced() || self.fault == Fault::Unfenced;
                fenced && self.holders_against(t.session, *mode).is_empty()
            }
            Stage::Tells(_, telling) => {
                let fenced = self.is_fenced() || self.fault == Fault::Unfenced;
                fenced && self.leader.pages.know(telling)
            }
        }
    }

    pub(super) fn step(&mut self, task: Task) {
        self.leader.tasks.retain(|t| *t != task);
        let (client, session) = (task.client, task.session);
        match &task.stage {
            Stage::Opens => {
                let others = self.log.locks.held.iter().any(|(who, _)| who.session != session);
                let leased = self.leader.writers.others(session, FILE).next().is_none();
                if leased {
                    self.leader.leased.insert(client);
                }
                self.send(
                    client,
                    Body::Opened { pages: others && self.fault != Fault::OpenNotMarked, leased },
                );
            }
            Stage::Waits(mode) => {
                let Want { who, span, .. } = want(session, *mode);
                self.log.locks.held.push((who, vec![span]));
                self.log.locks.held.sort_by_key(|(who, _)| *who);
                self.lock_is_got(task.clone(), *mode);
                self.look_at_waits();
            }
            Stage::Tells(mode, telling) => {
                let greeted = self.leader.greeted;
                self.leader
                    .pages
                    .told(FILE, session, telling, |id| World::connection(&greeted, id));
                self.send(client, Body::Got(*mode));
            }
        }
        self.send_wanted();
    }

    fn lock_is_got(&mut self, task: Task, mode: Mode) {
        let greeted = self.leader.greeted;
        let mut others: Vec<_> = self.leader.writers.others(task.session, FILE).collect();
        if self.fault == Fault::WritersNotTold
            || self.fault == Fault::NewLeaderTold && self.leader.term > 1
        {
            others.clear();
        }
        let telling = self
            .leader
            .pages
            .tell(NOW, FILE, others.into_iter(), |id| World::connection(&greeted, id));
        self.add_task(Task { stage: Stage::Tells(mode, telling), ..task });
    }

    /// Applies an entry of the log: a session is evicted.
    pub(super) fn evict(&mut self, client: usize) {
        let session = self.clients[client].session;
        self.log.evicted.insert(session);
        self.log.sessions.remove(&session);
        if self.log.writers.remove(&session) {
            self.leader.writers.record(session, FILE, false);
        }
        self.log.locks.held.retain(|(who, _)| who.session != session);
        self.leader.pages.ended(session);
        self.leader.writers.ended(session);
        self.leader.leased.remove(&client);
        self.leader.recalled.remove(&client);
        self.leader.tasks.retain(|t| t.client != client);
        self.look_at_waits();
    }

    /// The leader dies, and the next one has only what is in the log.
    pub(super) fn failover(&mut self) {
        let term = self.leader.term + 1;
        self.leader = Leader {
            term,
            pages: Pages::new(term),
            writers: Writers::new(self.log.writers.iter().map(|s| (*s, FILE)), []),
            leased: BTreeSet::new(),
            recalled: BTreeSet::new(),
            greeted: [None; CLIENTS],
            tasks: Vec::new(),
        };
        // Messages to it or from it are lost.
        self.messages.retain(|m| m.connection == 0);
    }

    /// A write or write-back arrives.
    pub(super) fn storage_takes(&mut self, m: Message) -> Result<(), String> {
        let i = m.client;
        if self.storage.refuses.contains(&m.session) {
            return self.not_written(&m);
        }
        let mut new = self.storage.cells;
        match m.body {
            Body::WriteBack(cells) => new = cells,
            Body::Write(n) => new[2 * i + 1] = n,
            _ => {}
        }
        if let Some(k) = (0..new.len()).find(|k| new[*k] < self.storage.cells[*k]) {
            return Err(format!(
                "byte {k} of client {} is lost: what client {i} sent is older",
                k / 2
            ));
        }
        self.storage.cells = new;
        for (o, c) in self.clients.iter().enumerate().filter(|(o, _)| *o != i) {
            let evicted = self.log.evicted.contains(&c.session);
            if c.page.is_some_and(|p| p.session == c.session && self.is_older(o, &p.cells))
                && !evicted
            {
                return Err(format!(
                    "client {o} has a page that is older than what client {i} wrote"
                ));
            }
        }
        self.written(&m);
        Ok(())
    }
}
