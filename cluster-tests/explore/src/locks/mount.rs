//! A mount: its kernel and programs, its daemon, and the daemon's client.

use std::cell::{Cell, RefCell};

use strake_client::{unlocking, waiting_list::List};
use strake_fuse::vfs::owners::{Around, Ended, Key, Outcome as Became, Owners};
use strake_mds::{leases::Number, lock_waiters::Entry};
use strake_proto::{Ino, SessionId, pb};

use super::{
    World,
    kinds::{
        Asked, Body, Edit, FILE, Fault, Has, Job, Kept, Kind, MOUNTS, Message, Op, Outcome,
        Program, Request, Set, Stage, Taking, What,
    },
};

/// Threads of a daemon.
const THREADS: usize = 2;

#[derive(Clone, Debug, Hash)]
pub(super) struct Mount {
    pub session: SessionId,
    pub connection: u64,
    /// The term of the leader at the other end of the connection.
    pub term: u64,
    pub programs: Vec<Program>,
    pub queue: Vec<Request>,
    /// Requests that the kernel will send again.
    pub late: Vec<Request>,
    pub reading: Vec<Request>,
    /// The last number of handles, owners, waits and lists.
    pub last: u64,
    pub next_seq: u64,
    pub owners: Owners<Kept>,
    pub unlockings: unlocking::Table,
    pub list: List<()>,
    /// The list has changed and is to be sent.
    pub news: bool,
    /// The number of the last list that was sent.
    pub told: u64,
    pub jobs: Vec<Job>,
    pub ops: Vec<Op>,
    pub questions: Vec<(Number, Taking, Option<u64>)>,
}

/// What the table of owners uses of its surroundings.
struct Beside {
    fault: Fault,
    address: u64,
    last: Cell<u64>,
    unlockings: RefCell<unlocking::Table>,
}

impl Around for Beside {
    type Guard = (u64, Vec<Kept>);
    type Record = Kept;

    fn fresh(&self) -> u64 {
        if self.fault == Fault::KernelsNumbers {
            return self.address;
        }
        self.last.set(self.last.get() + 1);
        self.last.get()
    }

    fn keep(&self, key: Key, handle: u64, number: u64) -> Option<Kept> {
        Some(Kept { key, handle, number })
    }

    fn is_ending(&self, ino: Ino, number: u64) -> bool {
        self.unlockings.borrow().is_under_way(ino, number)
    }

    fn ends(&self, key: Key, number: u64, records: Vec<Kept>) -> Self::Guard {
        (self.unlockings.borrow_mut().begin(key.0, number), records)
    }
}

impl Mount {
    pub fn new(i: usize, programs: u8) -> Mount {
        let mut mount = Mount {
            session: i as SessionId + 1,
            connection: 1,
            term: 1,
            programs: Vec::new(),
            queue: Vec::new(),
            late: Vec::new(),
            reading: Vec::new(),
            last: 10,
            next_seq: 1,
            owners: Owners::default(),
            unlockings: unlocking::Table::default(),
            list: List::default(),
            news: false,
            told: 0,
            jobs: Vec::new(),
            ops: Vec::new(),
            questions: Vec::new(),
        };
        (0..programs).for_each(|_| mount.open());
        mount
    }

    /// A program opens the file. It gets the first free address.
    pub fn open(&mut self) {
        let used = |a: &u64| self.programs.iter().any(|p| !p.handles.is_empty() && p.address == *a);
        let address = (1..).find(|a| !used(a)).unwrap_or_default();
        self.last += 1;
        let new = Program { address, handles: vec![self.last], ..Program::default() };
        match self.programs.iter_mut().find(|p| p.handles.is_empty()) {
            Some(gone) => *gone = new,
            None => self.programs.push(new),
        }
    }

    fn beside<T>(
        &mut self,
        (fault, address): (Fault, u64),
        f: impl FnOnce(&mut Owners<Kept>, &Beside) -> T,
    ) -> T {
        let unlockings = RefCell::new(std::mem::take(&mut self.unlockings));
        let beside = Beside { fault, address, last: Cell::new(self.last), unlockings };
        let out = f(&mut self.owners, &beside);
        (self.last, self.unlockings) = (beside.last.get(), beside.unlockings.into_inner());
        out
    }

    /// The kernel sends the unanswered requests again.
    pub fn resend(&mut self) {
        self.queue.splice(0..0, std::mem::take(&mut self.late));
    }

    pub fn job(&self, program: usize) -> Option<&Job> {
        self.jobs.iter().find(|j| j.request.program == program)
    }

    fn set_job(&mut self, job: Job) {
        self.jobs.retain(|j| j.request.program != job.request.program);
        self.jobs.push(job);
        self.jobs.sort_by_key(|j| j.request.program);
    }

    /// Continues until all that the kernel had queued is noted. Returns whether it is.
    fn takes(&self, taking: &mut Taking) -> bool {
        if taking.is_none() && self.queue.is_empty() {
            *taking = Some(self.reading.clone());
        }
        if let Some(read) = taking {
            read.retain(|r| self.reading.contains(r));
        }
        taking.as_ref().is_some_and(Vec::is_empty)
    }

    /// The lowest request number whose answer may still be waited for.
    fn lowest(&self) -> u64 {
        let sent = self.ops.iter().filter_map(|o| o.seq);
        let kept = self
            .programs
            .iter()
            .filter_map(|p| p.kept_seq)
            .filter(|(_, used)| !used)
            .map(|(seq, _)| seq);
        sent.chain(kept).min().unwrap_or(self.next_seq)
    }
}

impl World {
    pub(super) fn key(&self, r: &Request) -> Key {
        match self.left.kind {
            Kind::Flock => (FILE, true, r.handle),
            _ => (FILE, false, r.address),
        }
    }

    /// Sends a message to or from the leader. One that cannot arrive is not sent.
    pub(super) fn send(&mut self, mount: usize, connection: u64, body: Body) {
        let m = &self.mounts[mount];
        if m.connection == connection && m.term == self.leader.term {
            self.messages.push(Message { mount, session: m.session, connection, body });
            self.messages.sort();
        }
    }

    fn send_up(&mut self, i: usize, body: Body) {
        self.send(i, self.mounts[i].connection, body);
    }

    // --- programs and the kernel ---

    /// A program makes a call.
    pub(super) fn call(&mut self, i: usize, program: usize, handle: u64, asked: Asked) {
        let flock_or_ofd = self.left.kind != Kind::Posix;
        let p = &mut self.mounts[i].programs[program];
        let request = Request { program, handle, address: p.address, asked };
        match asked {
            Asked::Lock { write, .. } => {
                if let Some(has) = &mut p.has {
                    has.write &= write;
                }
                p.excused = false;
            }
            _ => p.has = None,
        }
        if asked == Asked::Flush && flock_or_ofd {
            // Here FLUSH names no owner.
            return self.closes(i, program, handle);
        }
        p.call = Some(request);
        self.mounts[i].queue.push(request);
    }

    /// close(2) returns, and RELEASE is queued.
    fn closes(&mut self, i: usize, program: usize, handle: u64) {
        let m = &mut self.mounts[i];
        let p = &mut m.programs[program];
        p.handles.retain(|h| *h != handle);
        (p.call, p.may, p.has, p.kept_seq) = (None, None, None, None);
        m.queue.push(Request { program: usize::MAX, handle, address: 0, asked: Asked::Release });
        let (next, is_dying) = (p.handles.first().copied(), p.is_dying);
        if let Some(next) = next.filter(|_| is_dying) {
            self.call(i, program, next, Asked::Flush);
        }
    }

    /// Whether a program waits for a lock and can be interrupted.
    pub(super) fn can_signal(&self, i: usize, program: usize) -> bool {
        let m = &self.mounts[i];
        let waits = |r: &Request| matches!(r.asked, Asked::Lock { wait: true, .. });
        m.programs[program].call.as_ref().is_some_and(|r| waits(r) && !m.reading.contains(r))
    }

    /// The program stops waiting.
    pub(super) fn signal(&mut self, i: usize, program: usize) {
        let silently = self.fault == Fault::LeavesSilently;
        let counts = self.fault != Fault::LeftoverUncounted;
        let m = &mut self.mounts[i];
        let Some(request) = m.programs[program].call.take() else { return };
        m.programs[program].kept_seq = None;
        m.queue.retain(|r| *r != request);
        let Some(at) = m.jobs.iter().position(|j| j.request.program == program) else { return };
        let job = m.jobs.remove(at);
        if let Stage::Waits(id) | Stage::Tries(id) = job.stage {
            m.news |= m.list.leave(id, silently) && !silently;
        }
        let mut given = None;
        for op in m.ops.iter_mut().filter(|o| o.program == Some(program)) {
            op.program = None;
            if counts {
                op.guards.push(m.unlockings.begin(FILE, op.number));
            }
            given = op.given.take().map(|before| (op.number, before)).or(given);
        }
        if job.number != 0 {
            let key = self.key(&request);
            self.mounts[i].owners.asked(key, request.handle, job.number, Became::InDoubt);
        }
        if let Some((number, before)) = given {
            self.undo(i, number, before);
        }
    }

    /// The program gets the result of its request.
    fn answer(&mut self, i: usize, job: &Job, became: Result<(), Became>) -> Result<(), String> {
        let (program, session) = (job.request.program, self.mounts[i].session);
        let key = self.key(&job.request);
        let m = &mut self.mounts[i];
        m.jobs.retain(|j| j.request.program != program);
        let lives = self.log.sessions.contains(&session);
        let p = &mut m.programs[program];
        (p.call, p.kept_seq) = (None, None);
        match job.request.asked {
            Asked::Lock { write, wait } => {
                if job.number != 0 {
                    let became = became.err().unwrap_or(Became::Holds);
                    m.owners.asked(key, job.request.handle, job.number, became);
                }
                match became {
                    Ok(()) if lives => {
                        (p.has, p.may) =
                            (Some(Has { write, number: job.number, session }), Some(write));
                    }
                    Err(Became::Refused) if !wait && !p.excused => {
                        return Err(format!(
                            "program {program} of mount {i} is told of a lock that nobody has"
                        ));
                    }
                    _ => {}
                }
            }
            Asked::Unlock => p.may = None,
            Asked::Flush => self.closes(i, program, job.request.handle),
            Asked::Release => {}
        }
        Ok(())
    }

    /// A killed program no longer waits for its end.
    pub(super) fn let_go(&mut self, i: usize, program: usize) -> Result<(), String> {
        let m = &mut self.mounts[i];
        m.ops.iter_mut().filter(|o| o.program == Some(program)).for_each(|o| o.program = None);
        let Some(job) = m.job(program).cloned() else { return Ok(()) };
        self.answer(i, &job, Ok(()))
    }

    /// Whether a thread of the daemon can read a request.
    pub(super) fn can_take(&self, i: usize) -> bool {
        let m = &self.mounts[i];
        !m.queue.is_empty() && m.reading.len() < THREADS && m.term == self.leader.term
    }

    pub(super) fn note(&mut self, i: usize, request: Request) -> Result<(), String> {
        let with = (self.fault, request.address);
        let m = &mut self.mounts[i];
        m.reading.retain(|r| *r != request);
        let number = 0;
        match request.asked {
            Asked::Lock { .. } => m.set_job(Job { request, number, stage: Stage::Begins }),
            Asked::Unlock => {
                let key = self.key(&request);
                let m = &mut self.mounts[i];
                let known = m.owners.known(key);
                let job = Job { request, number, stage: Stage::Unlocks(known) };
                let Some(known) = known else { return self.answer(i, &job, Ok(())) };
                let guards = vec![m.unlockings.begin(FILE, known.number)];
                m.set_job(job);
                self.unlock(i, Some(request.program), known.number, (guards, Vec::new()));
            }
            Asked::Flush => {
                let key = (FILE, false, request.address);
                let ended = m.beside(with, |o, b| o.gives_up(key, b));
                let job = Job { request, number, stage: Stage::Unlocks(None) };
                let Some(ended) = ended else { return self.answer(i, &job, Ok(())) };
                m.set_job(job);
                self.ended(i, Some(request.program), ended);
            }
            Asked::Release => {
                let ended = m.beside(with, |o, b| o.closed(FILE, request.handle, b));
                ended.into_iter().for_each(|e| self.ended(i, None, e));
            }
        }
        Ok(())
    }

    fn ended(&mut self, i: usize, program: Option<usize>, e: Ended<(u64, Vec<Kept>)>) {
        let (guard, kept) = e.guard;
        self.unlock(i, program, e.number, (vec![guard], kept));
    }

    // --- requests for locks ---

    /// Continues with a program's request. Returns `false` if it cannot continue.
    pub(super) fn goes_on(&mut self, i: usize, program: usize) -> Result<bool, String> {
        let fault = self.fault;
        let Some(mut job) = self.mounts[i].job(program).cloned() else { return Ok(false) };
        let Asked::Lock { write, wait } = job.request.asked else { return Ok(false) };
        let (key, handle, address) =
            (self.key(&job.request), job.request.handle, job.request.address);
        let m = &mut self.mounts[i];
        let mut sure = fault == Fault::SureAtOnce;
        match &mut job.stage {
            Stage::Settles(taking) => {
                if !m.takes(taking) {
                    return Ok(m.job(program) != Some(&job) && self.stays(i, job));
                }
                sure = true;
                job.stage = Stage::Begins;
            }
            Stage::Earlier(last) if !m.unlockings.is_done(FILE, *last) => return Ok(false),
            Stage::Refused(before, taking) => {
                if fault != Fault::ToldUnsettled && !m.takes(taking) {
                    return Ok(m.job(program) != Some(&job) && self.stays(i, job));
                }
                let last = if fault == Fault::ToldUngiven { 0 } else { m.unlockings.last() };
                job.stage = Stage::GivesUp(*before, last);
            }
            _ => {}
        }
        match job.stage.clone() {
            Stage::Begins => {
                let number = m.beside((fault, address), |o, b| o.asks(key, handle, sure, b));
                let Some(number) = number else {
                    job.stage = Stage::Settles(None);
                    return Ok(self.stays(i, job));
                };
                job.number = number;
                let last = m.unlockings.last();
                if !wait && m.unlockings.of(FILE).under_way() {
                    job.stage = Stage::Earlier(last);
                    return Ok(self.stays(i, job));
                }
                self.asks(i, job, write, wait);
            }
            Stage::Earlier(_) => self.asks(i, job, write, wait),
            Stage::GivesUp(before, last) => {
                if !m.unlockings.is_done(FILE, last) {
                    return Ok(m.job(program) != Some(&job) && self.stays(i, job));
                }
                if !before.ended_since(m.unlockings.of(FILE)) {
                    return self.answer(i, &job, Err(Became::Refused)).map(|()| true);
                }
                job.stage = Stage::AsksAgain;
                self.take(i, &job, write, 0, false);
                self.stays(i, job);
            }
            Stage::Given => {
                m.ops.retain(|o| o.program != Some(program));
                self.answer(i, &job, Ok(()))?;
                self.lanes(i);
            }
            Stage::Waits(id) => {
                match m.list.turn(id) {
                    None => return Ok(false),
                    Some(Err(_)) => {
                        let owns = m.programs[program].has.is_some();
                        m.news |= m.list.leave(id, false);
                        self.answer(i, &job, Err(Became::Refused))?;
                        return if owns {
                            Ok(true)
                        } else {
                            Err("a deadlock of one who has nothing".to_owned())
                        };
                    }
                    Some(Ok(())) => (job.stage, m.news) = (Stage::Tries(id), true),
                }
                self.take(i, &job, write, id, true);
                self.stays(i, job);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn stays(&mut self, i: usize, job: Job) -> bool {
        self.mounts[i].set_job(job);
        true
    }

    fn asks(&mut self, i: usize, mut job: Job, write: bool, wait: bool) {
        job.stage = Stage::Asks(self.mounts[i].unlockings.of(FILE));
        self.take(i, &job, write, 0, wait);
        self.stays(i, job);
    }

    fn take(&mut self, i: usize, job: &Job, write: bool, wait: u64, patient: bool) {
        let what = What::Take { write, patient, wait };
        self.begin(i, job.number, Some(job.request.program), what, (Vec::new(), Vec::new()));
    }

    fn unlock(
        &mut self,
        i: usize,
        program: Option<usize>,
        number: u64,
        held: (Vec<u64>, Vec<Kept>),
    ) {
        self.begin(i, number, program, What::Unlock, held);
    }

    fn begin(
        &mut self,
        i: usize,
        number: u64,
        program: Option<usize>,
        what: What,
        held: (Vec<u64>, Vec<Kept>),
    ) {
        let (guards, kept) = held;
        self.mounts[i].ops.push(Op {
            number,
            program,
            what,
            seq: None,
            given: None,
            guards,
            kept,
            tries: 0,
        });
        self.lanes(i);
    }

    /// Sends the next request of each owner once the previous one is done.
    fn lanes(&mut self, i: usize) {
        for at in 0..self.mounts[i].ops.len() {
            let m = &self.mounts[i];
            let op = &m.ops[at];
            let is_first = m.ops[..at].iter().all(|o| o.number != op.number);
            if is_first && op.seq.is_none() && op.given.is_none() {
                self.send_op(i, at);
            }
        }
    }

    fn send_op(&mut self, i: usize, at: usize) {
        let m = &mut self.mounts[i];
        let mut seq = m.next_seq;
        let program = m.ops[at].program;
        match program.map(|p| &mut m.programs[p].kept_seq) {
            Some(Some((kept, used @ false))) => (seq, *used) = (*kept, true),
            Some(kept) => {
                m.next_seq += 1;
                kept.get_or_insert((seq, true));
            }
            None => m.next_seq += 1,
        }
        m.ops[at].seq = Some(seq);
        if self.fault == Fault::KeptTooShort {
            m.ops[at].kept.clear();
        }
        self.repeat(i, at);
    }

    /// Sends a request, possibly again.
    fn repeat(&mut self, i: usize, at: usize) {
        let m = &self.mounts[i];
        let (op, lowest) = (&m.ops[at], m.lowest());
        let Some(seq) = op.seq else { return };
        let (edit, patient, wait) = match op.what {
            What::Take { write, patient, wait } => (Edit::Lock(write), patient, wait),
            What::Unlock => (Edit::Unlock, false, 0),
            What::Undo(before) => (Edit::Restore(before), false, 0),
        };
        let set = Set { seq, lowest, number: op.number, edit, patient, wait };
        self.send_up(i, Body::Set(set));
    }

    /// Gives back what a caller got that no longer waits, before any other request of that owner.
    fn undo(&mut self, i: usize, number: u64, before: Option<bool>) {
        let before = if self.fault == Fault::UndoneToNothing { None } else { before };
        let m = &mut self.mounts[i];
        let Some(at) = m.ops.iter().position(|o| o.number == number) else { return };
        if self.fault == Fault::NotUndone {
            self.op_done(i, at);
            return;
        }
        let guard = m.unlockings.begin(FILE, number);
        let op = &mut m.ops[at];
        (op.what, op.seq, op.given) = (What::Undo(before), None, None);
        if self.fault != Fault::LeftoverUncounted {
            op.guards.push(guard);
        } else {
            m.unlockings.end(FILE, guard);
        }
        self.lanes(i);
    }

    fn op_done(&mut self, i: usize, at: usize) -> Op {
        let m = &mut self.mounts[i];
        let op = m.ops.remove(at);
        op.guards.iter().for_each(|g| m.unlockings.end(FILE, *g));
        self.lanes(i);
        op
    }

    fn op_answered(&mut self, i: usize, seq: u64, outcome: Outcome) -> Result<(), String> {
        let m = &mut self.mounts[i];
        let Some(at) = m.ops.iter().position(|o| o.seq == Some(seq)) else { return Ok(()) };
        let op = &mut m.ops[at];
        match (&op.what, outcome) {
            (What::Take { .. }, Outcome::Again) if op.tries < 2 => {
                op.tries += 1;
                op.seq = None;
                self.lanes(i);
            }
            (What::Take { .. }, Outcome::Done(before)) => {
                let (number, program) = (op.number, op.program);
                match program {
                    Some(p) => {
                        (op.given, op.seq) = (Some(before), None);
                        if let Some(mut job) = m.job(p).cloned() {
                            if let Stage::Tries(id) = job.stage {
                                m.list.leave(id, true);
                            }
                            job.stage = Stage::Given;
                            self.stays(i, job);
                        }
                    }
                    None => self.undo(i, number, before),
                }
            }
            (What::Take { .. }, _) => {
                let op = self.op_done(i, at);
                op.program.map_or(Ok(()), |p| self.refused(i, p))?;
            }
            _ => {
                let op = self.op_done(i, at);
                let m = &mut self.mounts[i];
                let Some(job) = op.program.and_then(|p| m.job(p).cloned()) else { return Ok(()) };
                if let Stage::Unlocks(Some(known)) = job.stage {
                    let key = self.key(&job.request);
                    self.mounts[i].owners.has_none(key, known);
                }
                self.answer(i, &job, Ok(()))?;
            }
        }
        Ok(())
    }

    /// A request met a conflicting lock.
    fn refused(&mut self, i: usize, program: usize) -> Result<(), String> {
        let session = self.mounts[i].session;
        let m = &mut self.mounts[i];
        let Some(mut job) = m.job(program).cloned() else { return Ok(()) };
        let Asked::Lock { write, wait } = job.request.asked else { return Ok(()) };
        job.stage = match job.stage {
            Stage::Asks(_) if wait => {
                let id = m.list.number(m.last + 1);
                m.last = id;
                let want = self.want(session, job.number, write);
                let m = &mut self.mounts[i];
                let (owner, kind, span) =
                    (job.number, want.who.kind as i32, Some(want.span.to_pb()));
                m.list.enter(pb::LockWait { id, ino: FILE, owner, kind, span, trying: false }, ());
                m.list.waits(id);
                m.news = true;
                Stage::Waits(id)
            }
            Stage::Tries(id) => {
                m.list.waits(id);
                m.news = true;
                Stage::Waits(id)
            }
            Stage::Asks(before) => Stage::Refused(before, None),
            _ => return self.answer(i, &job, Err(Became::Refused)),
        };
        self.stays(i, job);
        Ok(())
    }

    // --- the leader ---

    pub(super) fn mount_takes(&mut self, m: Message) -> Result<(), String> {
        let i = m.mount;
        let mount = &mut self.mounts[i];
        match m.body {
            Body::Question(number) => mount.questions.push((number, None, None)),
            Body::Outcome(seq, outcome) => self.op_answered(i, seq, outcome)?,
            Body::Turns(number, ready, deadlock) if number == mount.told => {
                // If it is no waiter's turn, the same is told again later, which changes nothing.
                mount.list.answered(&pb::LockWaitReply { ready, deadlock });
            }
            _ => {}
        }
        Ok(())
    }

    /// Continues with the answer to a question. Returns `false` if it cannot continue.
    pub(super) fn answers(&mut self, i: usize, number: Number) -> bool {
        let fault = self.fault;
        let m = &mut self.mounts[i];
        let Some(at) = m.questions.iter().position(|q| q.0 == number) else { return false };
        let mut q = m.questions[at].clone();
        if q.2.is_none() {
            let taken = m.takes(&mut q.1) || fault == Fault::AnswersUntaken;
            q.2 = taken.then(|| m.unlockings.last());
        }
        let done = q
            .2
            .is_some_and(|last| m.unlockings.is_done(FILE, last) || fault == Fault::AnswersUngiven);
        if done {
            m.questions.remove(at);
            self.send_up(i, Body::Checked(number));
            return true;
        }
        std::mem::replace(&mut m.questions[at], q.clone()) != q
    }

    /// Sends the list of lock waiters, if it has changed.
    pub(super) fn tells(&mut self, i: usize) -> bool {
        let m = &mut self.mounts[i];
        if !std::mem::take(&mut m.news) {
            return false;
        }
        let Some(list) = m.list.told(false) else { return true };
        m.told = m.list.number(m.last + 1);
        m.last = m.told;
        let (session, number) = (m.session, m.told);
        let write =
            |w: &pb::LockWait| w.span.is_some_and(|s| s.r#type == pb::LockType::LockWrite as i32);
        let entry = |w: &pb::LockWait| Entry {
            id: w.id,
            want: self.want(session, w.owner, write(w)),
            trying: w.trying,
        };
        let list = list.iter().map(entry).collect();
        self.send_up(i, Body::List(number, list));
        true
    }

    /// A list did not arrive, and the client notices.
    pub(super) fn lost(&mut self, m: &Message) {
        let mount = &mut self.mounts[m.mount];
        if matches!(m.body, Body::List(number, _) if number == mount.told) {
            if self.fault != Fault::EmptyNotRepeated {
                mount.list.not_told();
            }
            mount.news = true;
        }
    }

    /// The mount has found the new leader, has a new session, or has a new daemon.
    pub(super) fn reconnect(&mut self, i: usize) {
        let m = &mut self.mounts[i];
        (m.connection, m.term) = (m.connection + 1, self.leader.term);
        m.questions.clear();
        if m.list != List::default() {
            m.list.not_told();
        }
        m.news = m.list != List::default() && self.fault != Fault::ListNotRepeated;
        self.send_up(i, Body::Hello);
        (0..self.mounts[i].ops.len()).for_each(|at| self.repeat(i, at));
    }

    /// The mount learns that its session has ended.
    pub(super) fn learn(&mut self, i: usize) -> Result<(), String> {
        let m = &mut self.mounts[i];
        m.session += MOUNTS as SessionId;
        let ops = std::mem::take(&mut m.ops);
        for op in &ops {
            op.guards.iter().for_each(|g| m.unlockings.end(FILE, *g));
        }
        // What was on the way may still arrive, and belongs to no session.
        self.reconnect(i);
        for job in self.mounts[i].jobs.clone() {
            match (job.request.asked, &job.stage) {
                (_, Stage::Unlocks(_)) => self.answer(i, &job, Ok(()))?,
                (_, Stage::Asks(_) | Stage::AsksAgain | Stage::Given | Stage::Tries(_)) => {
                    if let Stage::Tries(id) = job.stage {
                        self.mounts[i].list.leave(id, false);
                    }
                    self.answer(i, &job, Err(Became::InDoubt))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The daemon is replaced: the kernel sends the unanswered requests again, and the new daemon
    /// finds what was kept.
    pub(super) fn restart(&mut self, i: usize) {
        let m = &mut self.mounts[i];
        let mut again: Vec<Request> = std::mem::take(&mut m.reading);
        again.extend(std::mem::take(&mut m.jobs).into_iter().map(|j| j.request));
        m.late.splice(0..0, again);
        if self.fault != Fault::AnswersBeforeResent {
            m.resend();
        }
        for p in &mut m.programs {
            if let Some((_, used)) = &mut p.kept_seq {
                *used = false;
            }
        }
        let ops = std::mem::take(&mut m.ops);
        let (former, list) = (std::mem::take(&mut m.owners), std::mem::take(&mut m.list));
        m.unlockings = unlocking::Table::default();
        drop(list);
        if self.fault != Fault::OwnersForgotten {
            former.kept().for_each(|k| m.owners.adopt(k.key, k.number, k.handle, *k));
        }
        self.reconnect(i);
        let goes_on = self.fault != Fault::EndingsForgotten;
        for kept in ops.into_iter().filter(|_| goes_on).flat_map(|o| o.kept) {
            let guard = self.mounts[i].unlockings.begin(kept.key.0, kept.number);
            self.unlock(i, None, kept.number, (vec![guard], vec![kept]));
        }
    }
}
