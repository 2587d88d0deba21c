//! The shell around each replica's core, modelled on `oss/src/server/{replica,sync,service}.rs`.

use strake_oss::chain::{Committed, Input, Local, Op, OpId, Outcome, Output, What};
use strake_proto::{
    ChunkId, Code, Error, Result,
    data::{BootId, Version, Writer},
};

use super::{
    Action, Asker, Awaits, Fault, Kind, Message, Pass, World,
    kinds::{CHUNK, Chunk, Replica, Work},
};

/// A replica's data, as its core sees them.
struct Store<'a> {
    chunk: &'a mut Chunk,
    work: &'a std::collections::BTreeMap<OpId, Work>,
    twice: Option<u8>,
}

impl Local for Store<'_> {
    fn committed(&self, _: &ChunkId) -> Result<Committed> {
        Ok(self.chunk.state.clone())
    }
    fn commit(&mut self, op: OpId, version: Version, writer: Writer) -> Result<()> {
        let Some(Kind::Update(w)) = self.work.get(&op).map(|w| &w.kind) else {
            return Err(err(Code::Io));
        };
        if self.chunk.list.contains(&w.value) {
            self.twice = Some(w.value);
        }
        self.chunk.list.push(w.value);
        self.chunk.state.version = version;
        self.chunk.state.writers.push(writer);
        Ok(())
    }
}

pub(super) fn err(code: Code) -> Error {
    Error::new(code, "")
}

impl World {
    pub(super) fn actions_of_replica(&self, i: usize, out: &mut Vec<Action>) {
        let r = &self.replicas[i];
        for op in &r.staging {
            out.push(Action::Staged { at: i, op: *op, full: false });
            if self.left.full > 0 {
                out.push(Action::Staged { at: i, op: *op, full: true });
            }
        }
        let view = r.core.view();
        let reaches = |to: Option<u32>| to.is_some_and(|to| self.reaches(to as usize, view.epoch));
        // Before that a retry would be refused again.
        let successor =
            view.successor.map(|(t, _)| t).filter(|t| reaches(Some(*t))).map(|t| t as usize);
        for (op, w) in r.work.iter().filter(|(_, w)| matches!(w.awaits, Awaits::Pause(_))) {
            let known = |to: usize| matches!(w.kind, Kind::Update(u) if self.replicas[to].chunk.list.contains(&u.value));
            if successor.is_some_and(|to| !known(to) || self.flush_path(to).is_ok()) {
                out.push(Action::Retry { at: i, op: *op });
            }
        }
        if view.tail && reaches(view.syncing_successor()) {
            match r.pass {
                Pass::Begin if !r.work.values().any(|w| matches!(w.kind, Kind::Push(_))) => {
                    out.push(Action::Compare(i))
                }
                Pass::Pushed => out.push(Action::FlushFilled(i)),
                _ => {}
            }
        }
        if r.left && r.chunk != Chunk::default() {
            out.push(Action::Forget(i));
        }
    }

    /// Whether a replica would take a request of this epoch.
    pub(super) fn reaches(&self, to: usize, epoch: u64) -> bool {
        let r = &self.replicas[to];
        !r.down && r.leased && r.core.check_member(epoch).is_ok()
    }

    // --- the core and what it asks for

    pub(super) fn feed(&mut self, i: usize, input: Input) {
        let Replica { core, chunk, work, .. } = &mut self.replicas[i];
        let mut local = Store { chunk, work, twice: None };
        let out = core.handle(input, &mut local);
        if let Some(value) = local.twice {
            self.broken.get_or_insert(format!("update {value} is applied twice at {i}"));
        }
        for o in out {
            self.carry_out(i, o);
        }
    }

    fn carry_out(&mut self, i: usize, o: Output) {
        match o {
            Output::Stage { op } if self.left.slow => {
                self.replicas[i].staging.insert(op);
            }
            Output::Stage { op } => self.feed(i, Input::Staged { op, result: Ok(()) }),
            Output::Forward { op, attempt, to, epoch, version, prev } => {
                let Some(w) = self.replicas[i].work.get_mut(&op) else { return };
                let Kind::Update(write) = w.kind else { return };
                w.awaits = Awaits::Forward(attempt);
                let mut asker = Asker::Replica { at: i, op, attempt };
                if self.fault == Fault::AnswersEarly {
                    asker = Asker::Nobody;
                    let result = Ok(Vec::new());
                    self.messages.push(Message::Answer { to: i, op, attempt, result });
                }
                self.messages.push(Message::Forward {
                    to: to as usize,
                    epoch,
                    version,
                    prev,
                    write,
                    asker,
                });
            }
            Output::Push { op, attempt, to, epoch, .. } => {
                let Some(w) = self.replicas[i].work.get_mut(&op) else { return };
                w.awaits = Awaits::Push(attempt);
                let body = self.replicas[i].chunk.clone();
                if !self.push(to as usize, epoch, body, Asker::Replica { at: i, op, attempt }) {
                    self.answered(i, op, attempt, Err(Code::StaleEpoch));
                }
            }
            Output::RetryLater { op, attempt } => {
                if let Some(w) = self.replicas[i].work.get_mut(&op) {
                    w.awaits = Awaits::Pause(attempt);
                }
            }
            Output::Greet { to, epoch } => self.greets.push((to as usize, epoch)),
            Output::RefreshMap => {}
            Output::Failed { .. } => self.crash(i, false),
            Output::Alarm { message } => {
                self.broken.get_or_insert(message);
            }
            Output::Done { op, outcome } => self.done(i, op, outcome),
        }
    }

    fn done(&mut self, i: usize, op: OpId, outcome: Outcome) {
        if matches!(outcome, Outcome::Granted) {
            return self.granted(i, op);
        }
        let Some(w) = self.replicas[i].work.remove(&op) else { return };
        let result = match outcome {
            Outcome::Known { version } if self.fault == Fault::KnownUnflushed => {
                Ok((version, vec![self.replicas[i].core.boot_id()], true))
            }
            Outcome::Known { version } => {
                self.flush_from(i).map(|boot_ids| (version, boot_ids, true))
            }
            Outcome::Applied { version, boot_ids } => Ok((version, boot_ids, false)),
            Outcome::Granted => return,
            Outcome::Refused(e) => Err(e.code),
        };
        match (w.asker, w.kind) {
            (Asker::Client, Kind::Update(write)) => self.client_answered(i, write, result),
            (asker, _) => self.answer(asker, result.map(|(_, boot_ids, _)| boot_ids)),
        }
    }

    fn answer(&mut self, asker: Asker, result: Result<Vec<BootId>, Code>) {
        if let Asker::Replica { at, op, attempt } = asker {
            self.messages.push(Message::Answer { to: at, op, attempt, result });
        }
    }

    fn granted(&mut self, i: usize, op: OpId) {
        let Some(w) = self.replicas[i].work.get(&op).cloned() else { return };
        match w.kind {
            Kind::Put { body, expected } => {
                let result = self.put(i, body, expected);
                self.replicas[i].work.remove(&op);
                self.answer(w.asker, result);
                self.feed(i, Input::Release { op });
            }
            Kind::Push(then) => {
                let r = &mut self.replicas[i];
                let epoch = r.epoch();
                let body = if self.fault == Fault::PushesUnheld { then } else { r.chunk.clone() };
                let to = r.core.view().syncing_successor().filter(|_| r.core.view().tail);
                let attempt = epoch as u32;
                if let Some(w) = r.work.get_mut(&op) {
                    w.awaits = Awaits::Push(attempt);
                }
                let asker = Asker::Replica { at: i, op, attempt };
                if !to.is_some_and(|to| self.push(to as usize, epoch, body, asker)) {
                    self.answered(i, op, attempt, Err(Code::StaleEpoch));
                }
            }
            Kind::Update(_) => {}
        }
    }

    /// A chunk arrives, and its slot is held.
    fn put(&mut self, i: usize, body: Chunk, expected: Version) -> Result<Vec<BootId>, Code> {
        let r = &mut self.replicas[i];
        let now = r.chunk.state.version;
        if now != expected && now != body.state.version && self.fault != Fault::PutsUnchecked {
            return Err(Code::VersionGap);
        }
        if now != body.state.version || now == Version::default() {
            r.chunk = body;
        }
        Ok(Vec::new())
    }

    /// Pushes a chunk to a replica after asking it what it has. Returns false if it did not answer.
    fn push(&mut self, to: usize, epoch: u64, body: Chunk, asker: Asker) -> bool {
        let reached = self.reaches(to, epoch);
        if reached {
            let expected = self.replicas[to].chunk.state.version;
            self.messages.push(Message::Put { to, epoch, body, expected, asker });
        }
        reached
    }

    /// The tail begins the resync of its successor: pushes the chunk if the successor's differs.
    pub(super) fn compare(&mut self, i: usize) {
        let Some(to) = self.replicas[i].core.view().syncing_successor() else { return };
        let theirs = self.replicas[to as usize].chunk.state.version;
        let r = &mut self.replicas[i];
        if r.chunk.state.version == theirs {
            r.pass = Pass::Pushed;
            return;
        }
        let (op, epoch) = (r.free_op(), r.epoch());
        let then =
            if self.fault == Fault::PushesUnheld { r.chunk.clone() } else { Chunk::default() };
        r.work.insert(
            op,
            Work { kind: Kind::Push(then), asker: Asker::Nobody, awaits: Awaits::Nothing },
        );
        self.feed(i, Input::Op(Op { id: op, chunk: CHUNK, epoch, eager: true, what: What::Hold }));
    }

    pub(super) fn flush_filled(&mut self, i: usize) {
        let Some(to) = self.replicas[i].core.view().syncing_successor() else { return };
        if self.fault != Fault::FillsUnflushed {
            let r = &mut self.replicas[to as usize];
            r.durable = r.chunk.clone();
        }
        self.replicas[i].pass = Pass::Synced;
    }

    /// The replicas that a flush from here reaches, if it succeeds.
    pub(super) fn flush_path(&self, i: usize) -> Result<Vec<usize>, Code> {
        let (mut at, epoch, mut path) = (i, self.replicas[i].epoch(), Vec::new());
        loop {
            let r = &self.replicas[at];
            if r.down || !r.leased {
                return Err(Code::Disconnected);
            }
            r.core.check_member(epoch).map_err(|e| e.code)?;
            path.push(at);
            let view = r.core.view();
            let behind = match self.fault {
                Fault::FlushesServing => view.serving_successor(),
                _ => view.successor.map(|(t, _)| t),
            };
            match behind {
                Some(to) => at = to as usize,
                None => return Ok(path),
            }
        }
    }

    /// Flushes a replica and all behind it, in one step.
    pub(super) fn flush_from(&mut self, i: usize) -> Result<Vec<BootId>, Code> {
        let path = self.flush_path(i)?;
        Ok(path
            .into_iter()
            .map(|at| {
                let r = &mut self.replicas[at];
                r.durable = r.chunk.clone();
                r.core.boot_id()
            })
            .collect())
    }

    // --- messages

    pub(super) fn receive(&mut self, m: Message) {
        let (to, epoch, asker, kind, what) = match m {
            Message::Answer { to, op, attempt, result } => {
                return self.answered(to, op, attempt, result);
            }
            Message::Forward { to, epoch, version, prev, write, asker } => {
                let what = What::Forward { session: write.session, seq: write.seq, version, prev };
                (to, epoch, asker, Kind::Update(write), what)
            }
            Message::Put { to, epoch, body, expected, asker } => {
                if self.replicas[to].core.view().serving() {
                    return self.answer(asker, Err(Code::NotServing));
                }
                (to, epoch, asker, Kind::Put { body, expected }, What::Hold)
            }
        };
        if !self.replicas[to].leased {
            return self.answer(asker, Err(Code::LeaseExpired));
        }
        self.admit(to, epoch, asker, kind, what);
    }

    pub(super) fn admit(&mut self, to: usize, epoch: u64, asker: Asker, kind: Kind, what: What) {
        let r = &mut self.replicas[to];
        let id = r.free_op();
        r.work.insert(id, Work { kind, asker, awaits: Awaits::Nothing });
        let epoch = if self.fault == Fault::AnyEpoch { r.epoch() } else { epoch };
        let eager = !self.left.short;
        self.feed(to, Input::Op(Op { id, chunk: CHUNK, epoch, eager, what }));
    }

    pub(super) fn answered(
        &mut self,
        i: usize,
        op: OpId,
        attempt: u32,
        result: Result<Vec<BootId>, Code>,
    ) {
        let r = &mut self.replicas[i];
        let epoch = r.epoch();
        let Some(w) = r.work.get_mut(&op) else { return };
        match (w.awaits, &w.kind) {
            (Awaits::Forward(a), _) if a == attempt => {
                w.awaits = Awaits::Nothing;
                self.feed(i, Input::Answer { op, attempt, result: result.map_err(err) });
            }
            (Awaits::Push(a), Kind::Push(_)) if a == attempt => {
                if result.is_ok() && u64::from(attempt) == epoch {
                    r.pass = Pass::Pushed;
                }
                r.work.remove(&op);
                self.feed(i, Input::Release { op });
            }
            (Awaits::Push(a), _) if a == attempt => {
                w.awaits = Awaits::Nothing;
                self.feed(i, Input::Pushed { op, attempt, result: result.map(drop).map_err(err) });
            }
            _ => {}
        }
    }

    /// A connection breaks: the asker is told.
    pub(super) fn broken_off(&mut self, asker: Asker, session: Option<u64>) {
        match (asker, session) {
            (Asker::Replica { at, op, attempt }, _) => {
                self.answered(at, op, attempt, Err(Code::Disconnected))
            }
            (Asker::Client, Some(session)) => self.hung_up(session),
            _ => {}
        }
    }

    pub(super) fn retry(&mut self, i: usize, op: OpId) {
        let Some(w) = self.replicas[i].work.get_mut(&op) else { return };
        let Awaits::Pause(attempt) = w.awaits else { return };
        w.awaits = Awaits::Nothing;
        self.feed(i, Input::Retry { op, attempt });
    }

    pub(super) fn staged(&mut self, i: usize, op: OpId, full: bool) {
        self.replicas[i].staging.remove(&op);
        self.left.full -= u8::from(full);
        let result = if full { Err(err(Code::NoSpc)) } else { Ok(()) };
        self.feed(i, Input::Staged { op, result });
    }
}
