//! A thread on its own CPU with one queue pair. It polls while commands are in progress, less often
//! the longer none ends, and sleeps when there is nothing to do.

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
    rc::Rc,
    sync::{Arc, atomic::Ordering::SeqCst},
    time::{Duration, Instant},
};

use strake_fabric::{Buf, Region};
use strake_proto::{Code, Error, Result};

use super::{Op, Shared, Work, control::Event, env::Dma, ffi::Completion};
use crate::device::{
    meter::{Begun, Class},
    nvme::Status,
};

/// How long it spins without a command ending before it rests.
const SPIN: Duration = Duration::from_micros(50);
/// How long it rests each time while commands are in progress.
const NAP: Duration = Duration::from_micros(50);
/// How often it checks while the controller is being reset.
const DOWN: Duration = Duration::from_millis(50);
/// How long operations wait for a queue pair.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the controller may end no command before it counts as dead, as in the kernel's driver.
const STALL: Duration = Duration::from_secs(30);
/// How often a command is retried for which the controller was not ready, and the pause between.
const TRIES: u32 = 40;
const APART: Duration = Duration::from_millis(250);
/// How often a command that was lost with its queue pair is retried, as in the kernel's driver: the
/// command may be the cause of the failure.
const LOSSES: u32 = 5;

struct Active {
    op: Op,
    pieces: Vec<Piece>,
    /// Pieces that have not ended, and how many of those the controller has.
    left: usize,
    under_way: usize,
    failed: Option<Error>,
    metered: Option<Begun>,
}

/// One command of an operation.
struct Piece {
    offset: u64,
    at: *mut u8,
    len: u64,
    /// The controller reaches the memory only through a copy, made while the command is in
    /// progress.
    copied: bool,
    copy: Option<Dma>,
    tries: u32,
    losses: u32,
}

impl Piece {
    fn new(offset: u64, at: *mut u8, len: u64, copied: bool) -> Piece {
        Piece { offset, at, len, copied, copy: None, tries: 0, losses: 0 }
    }
}

type Ended = Rc<RefCell<Vec<(u64, usize, Status)>>>;

/// Returned by SPDK when a command ends.
struct Ticket {
    ended: Ended,
    op: u64,
    piece: usize,
}

extern "C" fn done(ticket: *mut c_void, completion: *const Completion) {
    // SAFETY: made by `Box::into_raw` for this command alone, and SPDK calls back once, on the
    // thread of the queue pair.
    let t = unsafe { Box::from_raw(ticket.cast::<Ticket>()) };
    // SAFETY: SPDK gives a completion that is valid during the call.
    let status = Status::new(unsafe { (*completion).status } >> 1);
    t.ended.borrow_mut().push((t.op, t.piece, status));
}

pub(super) struct Reactor {
    shared: Arc<Shared>,
    index: usize,
    pair: Option<*mut c_void>,
    namespace: *mut c_void,
    /// Since when there is no queue pair.
    without: Option<Instant>,
    active: BTreeMap<u64, Active>,
    next: u64,
    /// Pieces to be submitted.
    todo: VecDeque<(u64, usize)>,
    /// Submit nothing before this time.
    pause: Option<Instant>,
    under_way: usize,
    ended: Ended,
    /// The generation of the controller that was reported as failing.
    told: Option<u64>,
    /// When a command last ended, or was submitted while there was no other.
    progress: Instant,
    /// When something was done last.
    busy: Instant,
}

impl Reactor {
    pub(super) fn new(shared: Arc<Shared>, index: usize) -> Reactor {
        Reactor {
            shared,
            index,
            pair: None,
            namespace: ptr::null_mut(),
            without: None,
            active: BTreeMap::new(),
            next: 0,
            todo: VecDeque::new(),
            pause: None,
            under_way: 0,
            ended: Rc::default(),
            told: None,
            progress: Instant::now(),
            busy: Instant::now(),
        }
    }

    /// Runs until the device is dropped and everything has ended.
    pub(super) fn serve(mut self) {
        if catch_unwind(AssertUnwindSafe(|| self.run())).is_err() {
            tracing::error!(
                "{}: a reactor panicked; its share of the operations fails from now on",
                self.shared.name
            );
            self.shared.queues[self.index].close();
            self.abandon();
            self.close_pair();
        }
    }

    fn run(&mut self) {
        loop {
            let closed = self.shared.is_closed();
            let arrived = std::mem::take(&mut *self.shared.queues[self.index].ops.lock());
            if !arrived.is_empty() {
                self.busy = Instant::now();
            }
            arrived.into_iter().for_each(|op| self.arrive(op));
            self.keep_pair();
            self.submit();
            self.poll();
            self.reap();
            self.expire(closed);
            if closed && self.active.is_empty() {
                return self.close_pair();
            }
            self.rest();
        }
    }

    /// Keeps a queue pair while the controller works, and none while it is reset.
    fn keep_pair(&mut self) {
        if !self.shared.is_up() {
            self.close_pair();
        } else if self.pair.is_none() && !self.is_broken() && !self.connect() {
            self.broken();
        }
        match self.pair {
            Some(_) => self.without = None,
            None => drop(self.without.get_or_insert_with(Instant::now)),
        }
    }

    /// Makes a queue pair. Returns whether there is one.
    pub(super) fn connect(&mut self) -> bool {
        // Counted first: the controller is not reset while a queue pair may exist.
        self.shared.pairs.fetch_add(1, SeqCst);
        if self.shared.is_up() {
            let c = *self.shared.controller.lock();
            // SPDK waits for the controller's answer for ever, with the controller locked.
            let pair = match c.works(&self.shared.transport) {
                // SAFETY: a connected controller; default options.
                true => unsafe {
                    (self.shared.env.api.spdk_nvme_ctrlr_alloc_io_qpair)(c.at, ptr::null(), 0)
                },
                false => ptr::null_mut(),
            };
            if !pair.is_null() {
                (self.pair, self.namespace) = (Some(pair), c.namespace);
                return true;
            }
        }
        self.shared.pairs.fetch_sub(1, SeqCst);
        false
    }

    /// Whether the control thread was told that the controller fails, and has not reset it yet.
    fn is_broken(&self) -> bool {
        self.told == Some(self.shared.generation.load(SeqCst))
    }

    fn broken(&mut self) {
        let generation = self.shared.generation.load(SeqCst);
        if self.told.replace(generation) != Some(generation) {
            self.shared.tell(Event::Failed(generation));
        }
    }

    /// Frees the queue pair; commands in progress end as aborted.
    fn close_pair(&mut self) {
        let Some(pair) = self.pair.take() else { return };
        // SAFETY: this thread's queue pair, not within one of its callbacks.
        unsafe { (self.shared.env.api.spdk_nvme_ctrlr_free_io_qpair)(pair) };
        self.reap();
        if self.under_way > 0 {
            tracing::error!(
                "{}: {} commands were lost with their queue",
                self.shared.name,
                self.under_way
            );
            self.abandon();
        }
        self.shared.pairs.fetch_sub(1, SeqCst);
    }

    /// Gives up operations whose commands SPDK may still have: their memory is never freed, and
    /// their callers get an error.
    fn abandon(&mut self) {
        let (lost, kept): (BTreeMap<_, _>, BTreeMap<_, _>) =
            std::mem::take(&mut self.active).into_iter().partition(|(_, a)| a.under_way > 0);
        (self.active, self.under_way) = (kept, 0);
        for Active { op: Op { work, .. }, pieces, .. } in lost.into_values() {
            std::mem::forget((work, pieces));
        }
    }

    fn arrive(&mut self, op: Op) {
        let (env, transport, most) = (self.shared.env, &self.shared.transport, self.shared.most);
        let metered = Some(match &op.work {
            Work::Read(_) => self.shared.meter.begin(Class::Read, op.len),
            Work::Write(_) => self.shared.meter.begin(Class::Change, op.len),
            Work::Flush => self.shared.meter.begin_flush(),
        });
        self.next += 1;
        let mut a = Active { op, pieces: Vec::new(), left: 0, under_way: 0, failed: None, metered };
        let mut offset = a.op.offset;
        let mut cut = |at: *mut u8, len: usize, region: Option<&Arc<Region>>| {
            let copied = !env.reaches(transport, region);
            for from in (0..len).step_by(most as usize) {
                let n = most.min((len - from) as u64);
                a.pieces.push(Piece::new(offset, at.wrapping_add(from), n, copied));
                offset += n;
            }
        };
        match &mut a.op.work {
            Work::Read(buf) => {
                let (at, len) = (buf.as_mut_ptr(), buf.len());
                cut(at, len, buf.region());
            }
            Work::Write(bufs) => {
                bufs.iter().for_each(|b: &Buf| cut(b.as_ptr().cast_mut(), b.len(), b.region()))
            }
            Work::Flush => a.pieces.push(Piece::new(0, ptr::null_mut(), 0, false)),
        }
        a.left = a.pieces.len();
        self.todo.extend((0..a.left).map(|n| (self.next, n)));
        self.active.insert(self.next, a);
    }

    fn submit(&mut self) {
        let Some(pair) = self.pair.filter(|_| !self.is_broken()) else { return };
        if self.pause.is_some_and(|until| Instant::now() < until) {
            return;
        }
        self.pause = None;
        while let Some(&(id, n)) = self.todo.front() {
            if !self.active.contains_key(&id) {
                self.todo.pop_front();
                continue;
            }
            match self.start(pair, id, n) {
                Ok(true) => {}
                Ok(false) => return, // retried after some have ended
                Err(e) => self.end(id, Err(e)),
            }
            self.todo.pop_front();
        }
    }

    /// Submits the command; `false`: there is no room for it now.
    fn start(&mut self, pair: *mut c_void, id: u64, n: usize) -> Result<bool> {
        let (s, api) = (&self.shared, &self.shared.env.api);
        let Some(a) = self.active.get_mut(&id) else { return Ok(true) };
        let p = &mut a.pieces[n];
        if p.copied && p.copy.is_none() {
            let Some(mut copy) = s.env.allocate(p.len as usize) else {
                let m = format!(
                    "{}: SPDK has no memory left for buffers; give it more hugepages",
                    s.name
                );
                return if self.under_way > 0 {
                    Ok(false)
                } else {
                    Err(Error::new(Code::NoMem, m))
                };
            };
            if let Work::Write(_) = a.op.work {
                // SAFETY: the piece lies in a buffer of the operation, which is kept.
                copy.bytes()
                    .copy_from_slice(unsafe { std::slice::from_raw_parts(p.at, p.len as usize) });
            }
            p.copy = Some(copy);
            s.copied.fetch_add(p.len, SeqCst);
        }
        let at = p.copy.as_mut().map_or(p.at, |c| c.bytes().as_mut_ptr()).cast();
        let (lba, blocks) = s.format.range(p.offset, p.len);
        let is_flush = matches!(a.op.work, Work::Flush);
        if is_flush && s.lost.load(SeqCst) {
            let m = "the controller was reset with unflushed writes; restart this target";
            return Err(Error::new(Code::Io, format!("{}: flush: {m}", s.name)));
        }
        if is_flush {
            a.op.covers = s.written.load(SeqCst);
        }
        let ticket =
            Box::into_raw(Box::new(Ticket { ended: self.ended.clone(), op: id, piece: n })).cast();
        // SAFETY: this thread's queue pair and its namespace; the memory is the operation's or its
        // copy, kept until the command has ended, whether or not anyone waits for the answer;
        // `done` takes the ticket.
        let rc = unsafe {
            match a.op.work {
                Work::Read(_) => (api.spdk_nvme_ns_cmd_read)(
                    self.namespace,
                    pair,
                    at,
                    lba,
                    blocks,
                    done,
                    ticket,
                    0,
                ),
                Work::Write(_) => (api.spdk_nvme_ns_cmd_write)(
                    self.namespace,
                    pair,
                    at,
                    lba,
                    blocks,
                    done,
                    ticket,
                    0,
                ),
                Work::Flush => (api.spdk_nvme_ns_cmd_flush)(self.namespace, pair, done, ticket),
            }
        };
        if rc == 0 {
            if self.under_way == 0 {
                self.progress = Instant::now();
            }
            (a.under_way, self.under_way) = (a.under_way + 1, self.under_way + 1);
            return Ok(true);
        }
        // SAFETY: a command that was not taken is not called back.
        drop(unsafe { Box::from_raw(ticket.cast::<Ticket>()) });
        match -rc {
            libc::ENOMEM if self.under_way > 0 => Ok(false),
            libc::ENXIO | libc::EAGAIN => {
                self.broken();
                Ok(false)
            }
            n => {
                let code = if n == libc::ENOMEM { Code::NoMem } else { Code::Io };
                let why = format!(
                    "SPDK does not accept the command ({})",
                    std::io::Error::from_raw_os_error(n)
                );
                Err(s.error(&a.op, Error::new(code, why)))
            }
        }
    }

    fn poll(&mut self) {
        let Some(pair) = self.pair.filter(|_| self.under_way > 0 && !self.is_broken()) else {
            return;
        };
        // SAFETY: this thread's queue pair.
        let rc = unsafe { (self.shared.env.api.spdk_nvme_qpair_process_completions)(pair, 0) };
        let stalls = self.ended.borrow().is_empty() && self.progress.elapsed() > STALL;
        if stalls {
            tracing::warn!("{}: no command has ended for {} s", self.shared.name, STALL.as_secs());
        }
        if rc < 0 || stalls {
            self.broken();
        }
    }

    fn reap(&mut self) {
        let ended = std::mem::take(&mut *self.ended.borrow_mut());
        if !ended.is_empty() {
            self.busy = Instant::now();
            self.progress = self.busy;
        }
        let lost = self.pair.is_none() || self.is_broken();
        for (id, n, status) in ended {
            self.under_way = self.under_way.saturating_sub(1);
            let Some(a) = self.active.get_mut(&id) else { continue };
            a.under_way -= 1;
            let p = &mut a.pieces[n];
            let copy = p.copy.take();
            let (times, most) = if lost { (&mut p.losses, LOSSES) } else { (&mut p.tries, TRIES) };
            if status.is_transient() && *times < most {
                *times += 1;
                if !lost {
                    self.pause = Some(Instant::now() + APART);
                }
                self.todo.push_back((id, n));
                continue;
            }
            if !status.is_success() {
                let e = self.shared.error(&a.op, status.error());
                self.end(id, Err(e));
                continue;
            }
            if let (Some(mut copy), Work::Read(_)) = (copy, &a.op.work) {
                // SAFETY: the piece lies in the operation's buffer, which nobody else uses, and the
                // copy in memory of its own.
                unsafe { ptr::copy_nonoverlapping(copy.bytes().as_ptr(), p.at, p.len as usize) };
            }
            self.end(id, Ok(()));
        }
    }

    /// A piece has ended.
    fn end(&mut self, id: u64, result: Result<()>) {
        let Some(a) = self.active.get_mut(&id) else { return };
        a.left -= 1;
        a.failed = a.failed.take().or(result.err());
        if a.left > 0 {
            return;
        }
        let Some(Active { op, failed, metered, .. }) = self.active.remove(&id) else { return };
        metered.into_iter().for_each(|m| self.shared.meter.end(m));
        let Op { work, reply, covers, .. } = op;
        let result = failed.map_or(Ok(()), Err);
        match &work {
            // A failed write may have changed some of it.
            Work::Write(_) => drop(self.shared.written.fetch_add(1, SeqCst)),
            Work::Flush if result.is_ok() => drop(self.shared.flushed.fetch_max(covers, SeqCst)),
            _ => {}
        }
        let buf = match work {
            Work::Read(b) => Some(b),
            _ => None,
        };
        let _ = reply.send(result.map(|()| buf)); // the caller may have gone
    }

    /// Fails operations that wait for a queue pair, after too long or if it is gone for good.
    fn expire(&mut self, closed: bool) {
        let Some(since) = self.without.filter(|since| closed || since.elapsed() > PATIENCE) else {
            return;
        };
        self.todo.clear();
        let ids: Vec<u64> = self.active.keys().copied().collect();
        for id in ids {
            let Some(a) = self.active.get_mut(&id) else { continue };
            let m = format!("the controller has not worked for {} s", since.elapsed().as_secs());
            a.left = 1;
            let e = self.shared.error(&a.op, Error::new(Code::Io, m));
            self.end(id, Err(e));
        }
    }

    fn rest(&mut self) {
        let down = self.pair.is_none() || self.is_broken();
        if !down && self.busy.elapsed() < SPIN {
            return std::hint::spin_loop();
        }
        let waits = self.under_way > 0 || !self.todo.is_empty() || !self.ended.borrow().is_empty();
        let time = match waits {
            _ if down => (!self.active.is_empty()).then_some(DOWN),
            true => Some(NAP),
            false => None,
        };
        self.shared.queues[self.index].sleep(time);
    }
}
