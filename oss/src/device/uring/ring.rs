//! The thread of an io_uring device, and its operations in the kernel.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::AsRawFd,
    sync::{Arc, atomic::Ordering, mpsc::SyncSender},
};

use io_uring::{IoUring, cqueue, opcode, squeue, types};
pub(super) use io_uring::{
    cqueue::{Entry as SmallAnswer, Entry32 as LargeAnswer},
    squeue::{Entry as Small, Entry128 as Large},
};
use strake_fabric::{
    Buf, REGION, Region,
    rdma::{self, Locked},
};
use strake_proto::{Code, Error, Result};

use super::{Op, Queue, Work, passthrough::Data};
use crate::device::{
    meter::{Begun, Class},
    node::Node,
    nvme::{FLUSH, READ, Status, WRITE},
};

/// Most regions registered with a ring: 4 GiB of buffers.
const MAX_REGIONS: usize = 1024;
/// `user_data` of the poll that wakes the thread. Others consist of an index and, from bit
/// [`PIECE`] on, the number of a piece.
const WAKE: u64 = u64::MAX;
const PIECE: u32 = 16;
/// Bit in `user_data`: not the piece itself, but the pause before it is retried.
const PAUSE: u64 = 1 << 62;
/// How often a command is retried that a reset of the controller took back, and the pause between:
/// ten seconds in all.
const TRIES: u32 = 40;
static APART: types::Timespec = types::Timespec::new().nsec(250_000_000);

/// An operation in the kernel.
struct Active {
    op: Op,
    /// Order of arrival.
    seq: u64,
    pieces: Vec<Piece>,
    /// Pieces that have not ended.
    left: usize,
    /// The error of the first piece that failed.
    failed: Option<Error>,
    metered: Option<Begun>,
}

/// A part of an operation that the kernel takes at once.
#[derive(Default)]
struct Piece {
    /// Offset in the operation, after what earlier, short completions did.
    at: u64,
    len: u64,
    tries: u32,
    /// Its memory is registered.
    fixed: bool,
    /// Read by the kernel while it writes; must not move.
    iovecs: Box<[libc::iovec]>,
}

/// The pool's regions that a ring has registered.
struct Registered {
    /// Their indices in the ring's table, by id.
    slots: BTreeMap<u64, u16>,
    /// Held until the ring is gone, because the kernel knows their pages, not their addresses.
    held: Vec<(Arc<Region>, Locked)>,
    /// More may be registered.
    open: bool,
}

impl Registered {
    fn new<S: squeue::EntryMarker, C: cqueue::EntryMarker>(ring: &IoUring<S, C>) -> Registered {
        let open = ring.submitter().register_buffers_sparse(MAX_REGIONS as u32).is_ok();
        Registered { slots: BTreeMap::new(), held: Vec::new(), open }
    }

    /// The index of a buffer's region, which is registered now if needed; `None` if that fails.
    fn slot<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
        &mut self,
        ring: &IoUring<S, C>,
        region: Option<&Arc<Region>>,
        device: &str,
    ) -> Option<u16> {
        let region = region?;
        if let Some(slot) = self.slots.get(&region.id()) {
            return Some(*slot);
        }
        if !self.open || self.held.len() == MAX_REGIONS {
            return None;
        }
        let have = (self.held.len() * REGION) >> 20;
        let Some(room) = rdma::for_ring() else {
            self.open = false;
            tracing::warn!(
                "{device}: only {have} MiB of buffers are registered with io_uring, because RDMA \
                 needs the rest of the limit of locked memory; unregistered buffers cost more \
                 CPU. Raise the limit (ulimit -l, LimitMEMLOCK=)."
            );
            return None;
        };
        let slot = self.held.len() as u16;
        let memory = libc::iovec { iov_base: region.as_ptr().cast(), iov_len: REGION };
        // SAFETY: the region is held, and so mapped, until after the ring is gone.
        match unsafe { ring.submitter().register_buffers_update(u32::from(slot), &[memory], None) }
        {
            Ok(()) => {
                self.held.push((region.clone(), room));
                self.slots.insert(region.id(), slot);
                Some(slot)
            }
            Err(e) => {
                self.open = false;
                tracing::warn!(
                    "{device}: cannot register more than {have} MiB of buffers with io_uring \
                     ({e}); unregistered buffers cost more CPU. Raise the limit of locked memory \
                     (ulimit -l, LimitMEMLOCK=)."
                );
                None
            }
        }
    }
}

/// Entries of a ring: small ones for files and block devices, large ones for NVMe commands.
pub(super) trait Entries: squeue::EntryMarker {
    fn of(entry: squeue::Entry) -> Self;
    fn command(entry: squeue::Entry128) -> Option<Self>;
}

impl Entries for Small {
    fn of(entry: squeue::Entry) -> Small {
        entry
    }
    fn command(_: squeue::Entry128) -> Option<Small> {
        None
    }
}

impl Entries for Large {
    fn of(entry: squeue::Entry) -> Large {
        entry.into()
    }
    fn command(entry: squeue::Entry128) -> Option<Large> {
        Some(entry)
    }
}

pub(super) struct Ring<S: Entries, C: cqueue::EntryMarker> {
    // Before `registered`: the ring goes first.
    ring: IoUring<S, C>,
    registered: Registered,
    node: Arc<Node>,
    queue: Arc<Queue>,
    active: Vec<Option<Active>>,
    vacant: Vec<usize>,
    seq: u64,
    /// Changes in the kernel, by order of arrival. A flush starts when none before it is left.
    changes: BTreeSet<u64>,
    flushes: VecDeque<(u64, Op)>,
    wake_armed: bool,
    /// Do not use registered memory: this kernel counts all of its pages for each NVMe command, and
    /// refuses.
    plain: bool,
}

fn build<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    entries: u32,
) -> std::io::Result<IoUring<S, C>> {
    let best = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    match best {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            tracing::info!(
                "this kernel's io_uring lacks deferred task running (Linux 6.1); continuing \
                 without it"
            );
            IoUring::builder().build(entries)
        }
        other => other,
    }
}

/// Reports whether there is a ring, and runs it until its device is dropped.
pub(super) fn serve<S: Entries, C: cqueue::EntryMarker + Into<cqueue::Entry>>(
    made: std::io::Result<Ring<S, C>>,
    started: &SyncSender<std::io::Result<()>>,
) {
    match made {
        Ok(mut ring) => {
            let _ = started.send(Ok(()));
            let run = std::panic::AssertUnwindSafe(|| ring.run());
            if std::panic::catch_unwind(run).is_err() {
                ring.give_up(&std::io::Error::other("its thread panicked"));
            }
        }
        Err(e) => {
            let _ = started.send(Err(e));
        }
    }
}

impl<S: Entries, C: cqueue::EntryMarker + Into<cqueue::Entry>> Ring<S, C> {
    pub(super) fn new(
        node: Arc<Node>,
        queue: Arc<Queue>,
        depth: usize,
    ) -> std::io::Result<Ring<S, C>> {
        // Space for the wake-up and one entry per operation; more entries are submitted in between.
        let ring = build((depth as u32 + 1).next_power_of_two())?;
        ring.submitter().register_files(&[node.file.as_raw_fd()])?;
        let registered = Registered::new(&ring);
        Ok(Ring {
            ring,
            registered,
            node,
            queue,
            active: (0..depth).map(|_| None).collect(),
            vacant: (0..depth).rev().collect(),
            seq: 0,
            changes: BTreeSet::new(),
            flushes: VecDeque::new(),
            wake_armed: false,
            plain: false,
        })
    }

    fn run(&mut self) {
        loop {
            let arrived = std::mem::take(&mut *self.queue.ops.lock());
            for op in arrived {
                self.arrive(op);
            }
            self.start_flushes();
            if !self.wake_armed {
                self.arm_wake();
            }
            let idle = self.vacant.len() == self.active.len() && self.flushes.is_empty();
            self.queue.sleeping.store(true, Ordering::SeqCst);
            if !self.queue.ops.lock().is_empty() {
                self.queue.sleeping.store(false, Ordering::SeqCst);
                continue;
            }
            if idle && self.queue.closed.load(Ordering::SeqCst) {
                return;
            }
            let waited = self.ring.submit_and_wait(1);
            self.queue.sleeping.store(false, Ordering::SeqCst);
            if let Err(e) = waited
                && !matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY | libc::EAGAIN))
            {
                self.give_up(&e);
                return;
            }
            self.reap();
        }
    }

    /// Gives up an unusable ring. The kernel may still use the buffers of operations in progress,
    /// so they are never freed.
    fn give_up(&mut self, e: &std::io::Error) {
        tracing::error!(
            "{}: io_uring fails ({e}); this device answers no more requests",
            self.node.name
        );
        self.queue.close();
        for a in std::mem::take(&mut self.active).into_iter().flatten() {
            let Active { op, pieces, .. } = a;
            let Op { work, reply, .. } = op;
            std::mem::forget((work, pieces));
            drop(reply);
        }
        self.flushes.clear();
    }

    fn arm_wake(&mut self) {
        let fd = types::Fd(self.queue.wake.as_raw_fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE);
        self.wake_armed = self.push(S::of(entry));
    }

    fn push(&mut self, entry: S) -> bool {
        if self.ring.submission().is_full() && self.ring.submit().is_err() {
            return false;
        }
        // SAFETY: what the entry points to lives in `active` until its completion is reaped (or for
        // good, as a timeout's time); `give_up` leaks it, and `run` returns otherwise only when
        // nothing but the wake-up poll is under way, which points to nothing.
        unsafe { self.ring.submission().push(&entry).is_ok() }
    }

    fn arrive(&mut self, op: Op) {
        self.seq += 1;
        match op.work {
            Work::Flush => self.flushes.push_back((self.seq, op)),
            _ => self.start(self.seq, op),
        }
    }

    fn start_flushes(&mut self) {
        while let Some((seq, _)) = self.flushes.front() {
            if self.changes.first().is_some_and(|oldest| oldest < seq) {
                return;
            }
            if let Some((seq, op)) = self.flushes.pop_front() {
                self.start(seq, op);
            }
        }
    }

    fn start(&mut self, seq: u64, op: Op) {
        let Some(index) = self.vacant.pop() else {
            let _ = op.reply.send(Err(Error::new(
                Code::Overloaded,
                "more operations than the ring has room for",
            )));
            return;
        };
        if matches!(op.work, Work::Write(_) | Work::Discard) {
            self.changes.insert(seq);
        }
        let metered = match op.work {
            Work::Read(_) => Some(self.queue.meter.begin(Class::Read, op.len)),
            Work::Write(_) => Some(self.queue.meter.begin(Class::Change, op.len)),
            Work::Flush => Some(self.queue.meter.begin_flush()),
            Work::Discard => None,
        };
        let most = match (&op.work, &self.node.namespace) {
            (Work::Read(_) | Work::Write(_), Some(ns)) => ns.most,
            _ => u64::MAX,
        };
        let cuts = (0..op.len.max(1)).step_by(usize::try_from(most).unwrap_or(usize::MAX));
        let pieces: Vec<Piece> =
            cuts.map(|at| Piece { at, len: most.min(op.len - at), ..Piece::default() }).collect();
        let left = pieces.len();
        self.active[index] = Some(Active { op, seq, pieces, left, failed: None, metered });
        for piece in 0..left {
            self.submit(index, piece);
        }
    }

    /// Queues the rest of a piece.
    fn submit(&mut self, index: usize, piece: usize) {
        let id = index as u64 | (piece as u64) << PIECE;
        let Some(a) = self.active[index].as_mut() else { return };
        let p = &mut a.pieces[piece];
        let (at, offset, len) = (p.at as usize, a.op.offset + p.at, p.len);
        let slot = match &a.op.work {
            _ if self.plain => None,
            Work::Read(buf) => self.registered.slot(&self.ring, buf.region(), &self.node.name),
            Work::Write(bufs) if bufs.len() == 1 => {
                self.registered.slot(&self.ring, bufs[0].region(), &self.node.name)
            }
            _ => None,
        };
        p.fixed = slot.is_some();
        self.queue.fixed.fetch_add(u64::from(slot.is_some()), Ordering::Relaxed);
        if let Work::Write(bufs) = &a.op.work
            && bufs.len() > 1
        {
            p.iovecs = iovecs(bufs, p.at, len);
        }
        let entry = match &self.node.namespace {
            Some(ns) => {
                let (opcode, data) = match &mut a.op.work {
                    Work::Read(buf) => (READ, Data::One(buf[at..].as_mut_ptr(), slot)),
                    Work::Write(bufs) if bufs.len() == 1 => {
                        (WRITE, Data::One(bufs[0][at..].as_ptr(), slot))
                    }
                    Work::Write(_) => (WRITE, Data::Many(p.iovecs.as_ptr(), p.iovecs.len())),
                    // A discard does not get here: namespaces do not set `can_discard`.
                    Work::Flush | Work::Discard => (FLUSH, Data::None),
                };
                S::command(ns.entry(opcode, offset, len, &data, id))
            }
            None => {
                let fd = types::Fixed(0);
                let entry = match &mut a.op.work {
                    Work::Read(buf) => {
                        let to = buf[at..].as_mut_ptr();
                        match slot {
                            Some(slot) => opcode::ReadFixed::new(fd, to, len as u32, slot)
                                .offset(offset)
                                .build(),
                            None => opcode::Read::new(fd, to, len as u32).offset(offset).build(),
                        }
                    }
                    Work::Write(bufs) if bufs.len() == 1 => {
                        let from = bufs[0][at..].as_ptr();
                        match slot {
                            Some(slot) => opcode::WriteFixed::new(fd, from, len as u32, slot)
                                .offset(offset)
                                .build(),
                            None => opcode::Write::new(fd, from, len as u32).offset(offset).build(),
                        }
                    }
                    Work::Write(_) => {
                        let n = p.iovecs.len() as u32;
                        opcode::Writev::new(fd, p.iovecs.as_ptr(), n).offset(offset).build()
                    }
                    Work::Flush => {
                        opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build()
                    }
                    Work::Discard => opcode::Fallocate::new(fd, len)
                        .offset(offset)
                        .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
                        .build(),
                };
                Some(S::of(entry.user_data(id)))
            }
        };
        if !entry.is_some_and(|e| self.push(e)) {
            self.ended(
                index,
                Err(Error::new(Code::Overloaded, "the io_uring submission queue is full")),
            );
        }
    }

    /// Retries a piece after a pause.
    fn pause(&mut self, index: usize, piece: usize) {
        let id = index as u64 | (piece as u64) << PIECE | PAUSE;
        let entry = opcode::Timeout::new(&raw const APART).build().user_data(id);
        if !self.push(S::of(entry)) {
            self.ended(
                index,
                Err(Error::new(Code::Overloaded, "the io_uring submission queue is full")),
            );
        }
    }

    fn reap(&mut self) {
        let answers = self.ring.completion().map(|c| {
            let c: cqueue::Entry = c.into();
            (c.user_data(), c.result())
        });
        let done: Vec<(u64, i32)> = answers.collect();
        for (id, result) in done {
            let (index, piece) = ((id & 0xffff) as usize, ((id & !PAUSE) >> PIECE) as usize);
            match id {
                WAKE => {
                    self.wake_armed = false;
                    let _ = rustix::io::read(&self.queue.wake, &mut [0u8; 8]); // resets the counter
                }
                _ if id & PAUSE != 0 => self.submit(index, piece),
                _ => self.complete(index, piece, result),
            }
        }
    }

    fn complete(&mut self, index: usize, piece: usize, result: i32) {
        let namespace = self.node.namespace.is_some();
        let Some(a) = self.active.get_mut(index).and_then(Option::as_mut) else { return };
        let p = &mut a.pieces[piece];
        let (what, moves) = match a.op.work {
            Work::Read(_) => ("read", true),
            Work::Write(_) => ("write", true),
            Work::Flush => ("flush", false),
            Work::Discard => ("discard", false),
        };
        let (offset, len) = (a.op.offset + p.at, p.len);
        // A reset of the controller shows as an interruption, or as a status.
        let status = Status::new(result as u16);
        let again = matches!(-result, libc::EAGAIN | libc::EINTR)
            || result > 0 && namespace && status.is_transient();
        if again && !namespace {
            return self.submit(index, piece);
        }
        if namespace && p.fixed && result == -libc::EINVAL {
            if !std::mem::replace(&mut self.plain, true) {
                tracing::info!(
                    "{}: this kernel supports no registered buffers for NVMe commands",
                    self.node.name
                );
            }
            return self.submit(index, piece);
        }
        if again && p.tries < TRIES {
            p.tries += 1;
            return self.pause(index, piece);
        }
        let ended = match result {
            0 if moves && !namespace => {
                let m = format!(
                    "{}: {what} at {offset} reached the end; was it truncated?",
                    self.node.name
                );
                Err(Error::new(Code::Io, m))
            }
            0 => Ok(()),
            _ if result < 0 => Err(self.node.error(
                what,
                offset,
                len,
                std::io::Error::from_raw_os_error(-result).into(),
            )),
            _ if namespace => Err(self.node.error(what, offset, len, status.error())),
            _ if moves && (result as u64) < p.len => {
                (p.at, p.len) = (p.at + result as u64, p.len - result as u64);
                return self.submit(index, piece);
            }
            _ => Ok(()),
        };
        self.ended(index, ended);
    }

    /// A piece has left the kernel. Other pieces may still be there, and use the operation's
    /// buffers.
    fn ended(&mut self, index: usize, result: Result<()>) {
        let Some(a) = self.active[index].as_mut() else { return };
        a.left -= 1;
        a.failed = a.failed.take().or(result.err());
        if a.left == 0 {
            let result = a.failed.take().map_or(Ok(()), Err);
            self.finish(index, result);
        }
    }

    fn finish(&mut self, index: usize, result: Result<()>) {
        let Some(Active { op, seq, metered, .. }) = self.active[index].take() else { return };
        metered.into_iter().for_each(|m| self.queue.meter.end(m));
        self.vacant.push(index);
        self.changes.remove(&seq);
        let Op { work, reply, .. } = op;
        let buf = match work {
            Work::Read(b) => Some(b),
            _ => None,
        };
        let _ = reply.send(result.map(|()| buf)); // the caller may have gone
    }
}

/// `len` bytes of the buffers, from `skip` on.
fn iovecs(bufs: &[Buf], mut skip: u64, mut len: u64) -> Box<[libc::iovec]> {
    let mut out = Vec::with_capacity(bufs.len());
    for b in bufs {
        let from = skip.min(b.len() as u64) as usize;
        skip -= from as u64;
        let n = len.min((b.len() - from) as u64) as usize;
        if n > 0 {
            out.push(libc::iovec { iov_base: b[from..].as_ptr().cast_mut().cast(), iov_len: n });
            len -= n as u64;
        }
    }
    out.into()
}
