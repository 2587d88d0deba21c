//! A file or block device by io_uring: one thread and one ring per device. Callers queue operations, at most a set number
//! at a time; the thread submits all that wait in one system call and sleeps in the kernel until one ends or another is
//! queued.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use async_trait::async_trait;
use io_uring::{IoUring, opcode, squeue, types};
use parking_lot::Mutex;
use strake_fabric::{Buf, BufMut, Pool, REGION, Region};
use strake_proto::{Code, Error, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::{
    Device, Meter, check_range,
    meter::{Begun, Class},
    node::Node,
};

/// Operations in the kernel at a time, unless told otherwise.
pub const DEPTH: usize = 256;
/// Largest single operation: lengths are 32 bits in the ring.
const MAX_LEN: u64 = 1 << 30;
/// Regions registered with a ring at most: 4 GiB of buffers.
const MAX_REGIONS: usize = 1024;
/// `user_data` of the poll that wakes the thread; others are indices.
const WAKE: u64 = u64::MAX;

pub struct UringDevice {
    node: Arc<Node>,
    queue: Arc<Queue>,
    depth: Arc<Semaphore>,
    pool: Pool,
    thread: Option<JoinHandle<()>>,
}

/// From callers to the thread. Bounded by the semaphore of the device.
struct Queue {
    ops: Mutex<VecDeque<Op>>,
    /// The thread is or goes to sleep and must be woken.
    sleeping: AtomicBool,
    /// No more operations are taken.
    closed: AtomicBool,
    /// Reads and writes that used registered memory.
    fixed: AtomicU64,
    meter: Meter,
    wake: OwnedFd,
}

enum Work {
    Read(BufMut),
    Write(Vec<Buf>),
    Flush,
    Discard,
}

type Reply = oneshot::Sender<Result<Option<BufMut>>>;

struct Op {
    work: Work,
    offset: u64,
    len: u64,
    reply: Reply,
    _permit: OwnedSemaphorePermit,
}

impl UringDevice {
    /// Fails where the path cannot be opened, and where io_uring cannot be used (an old kernel, a container's filter).
    pub fn open(path: &Path, depth: usize) -> Result<UringDevice> {
        UringDevice::on(Arc::new(Node::open(path)?), depth)
    }

    pub(super) fn on(node: Arc<Node>, depth: usize) -> Result<UringDevice> {
        let depth = depth.clamp(1, 4096);
        let context = |e: std::io::Error| Error::from(e).context(format!("io_uring for {}", node.name));
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags).map_err(|e| context(e.into()))?;
        let queue = Arc::new(Queue {
            ops: Mutex::default(),
            sleeping: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            fixed: AtomicU64::new(0),
            meter: Meter::default(),
            wake,
        });
        let (started, ready) = std::sync::mpsc::sync_channel(1);
        let (n, q) = (node.clone(), queue.clone());
        // A ring with a single issuer belongs to the thread that makes it.
        let thread = std::thread::Builder::new()
            .name("uring".into())
            .spawn(move || match Ring::new(n, q, depth) {
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
            })
            .map_err(context)?;
        ready.recv().map_err(|_| Error::new(Code::Io, "the io_uring thread ended"))?.map_err(context)?;
        let depth = Arc::new(Semaphore::new(depth));
        Ok(UringDevice { node, queue, depth, pool: Pool::default(), thread: Some(thread) })
    }

    /// Reads and writes so far whose memory was registered, so that the kernel did not have to pin it for each.
    pub fn fixed_operations(&self) -> u64 {
        self.queue.fixed.load(Ordering::Relaxed)
    }

    async fn submit(&self, work: Work, offset: u64, len: u64) -> Result<Option<BufMut>> {
        let gone = || Error::new(Code::Io, format!("{}: its io_uring thread has ended", self.node.name));
        if len > MAX_LEN && !matches!(work, Work::Discard) {
            return Err(Error::new(Code::Inval, format!("{}: {len} bytes in one operation", self.node.name)));
        }
        let permit = self.depth.clone().acquire_owned().await.map_err(|_| gone())?;
        let (reply, answer) = oneshot::channel();
        {
            let mut ops = self.queue.ops.lock();
            if self.queue.closed.load(Ordering::SeqCst) {
                return Err(gone());
            }
            ops.push_back(Op { work, offset, len, reply, _permit: permit });
        }
        self.queue.wake();
        answer.await.map_err(|_| gone())?
    }
}

impl Queue {
    fn wake(&self) {
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // Fails only when the counter is full, and then the thread is awake.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Ends the queue; what waits in it is answered by dropping it.
    fn close(&self) {
        let waiting = {
            let mut ops = self.ops.lock();
            self.closed.store(true, Ordering::SeqCst);
            std::mem::take(&mut *ops)
        };
        drop(waiting);
    }
}

impl Drop for UringDevice {
    fn drop(&mut self) {
        {
            let _ops = self.queue.ops.lock();
            self.queue.closed.store(true, Ordering::SeqCst);
        }
        self.queue.wake();
        if let Some(t) = self.thread.take() {
            let _ = t.join();
        }
    }
}

#[async_trait]
impl Device for UringDevice {
    fn capacity(&self) -> u64 {
        self.node.capacity
    }
    fn direct(&self) -> bool {
        self.node.direct
    }
    fn name(&self) -> String {
        self.node.name.clone()
    }
    fn spare(&self) -> u64 {
        self.node.spare()
    }
    fn meter(&self) -> &Meter {
        &self.queue.meter
    }
    fn rotates(&self) -> bool {
        self.node.rotates
    }
    async fn read(&self, offset: u64, buf: BufMut) -> Result<BufMut> {
        let len = buf.len() as u64;
        check_range(&self.node.name, self.node.capacity, offset, len)?;
        let buf = self.submit(Work::Read(buf), offset, len).await?;
        buf.ok_or_else(|| Error::new(Code::Io, format!("{}: read lost its buffer", self.node.name)))
    }
    async fn write(&self, offset: u64, bufs: Vec<Buf>) -> Result<()> {
        let len = bufs.iter().map(|b| b.len() as u64).sum();
        check_range(&self.node.name, self.node.capacity, offset, len)?;
        let bufs = self.node.aligned(&self.pool, bufs);
        self.submit(Work::Write(bufs), offset, len).await.map(|_| ())
    }
    async fn flush(&self) -> Result<()> {
        self.submit(Work::Flush, 0, 0).await.map(|_| ())
    }
    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        check_range(&self.node.name, self.node.capacity, offset, len)?;
        if !self.node.can_discard {
            return Ok(());
        }
        self.submit(Work::Discard, offset, len).await.map(|_| ())
    }
}

/// An operation in the kernel.
struct Active {
    op: Op,
    /// Order of arrival.
    seq: u64,
    /// Bytes done by earlier, short completions.
    done: u64,
    /// What the kernel reads while it writes; must not move.
    iovecs: Box<[libc::iovec]>,
    metered: Option<Begun>,
}

/// The pool's regions that a ring has registered.
struct Registered {
    /// Their indices in the ring's table, by id.
    slots: BTreeMap<u64, u16>,
    /// Held until the ring is gone: the kernel knows their pages, not their addresses.
    held: Vec<Arc<Region>>,
    /// More may be registered.
    open: bool,
}

impl Registered {
    fn new(ring: &IoUring) -> Registered {
        let open = ring.submitter().register_buffers_sparse(MAX_REGIONS as u32).is_ok();
        Registered { slots: BTreeMap::new(), held: Vec::new(), open }
    }

    /// The index of the region of a buffer, registered now if need be; `None` where that cannot be had.
    fn slot(&mut self, ring: &IoUring, region: Option<&Arc<Region>>, device: &str) -> Option<u16> {
        let region = region?;
        if let Some(slot) = self.slots.get(&region.id()) {
            return Some(*slot);
        }
        if !self.open || self.held.len() == MAX_REGIONS {
            return None;
        }
        let slot = self.held.len() as u16;
        let memory = libc::iovec { iov_base: region.as_ptr().cast(), iov_len: REGION };
        // SAFETY: the region is held, and so mapped, until after the ring is gone.
        match unsafe { ring.submitter().register_buffers_update(u32::from(slot), &[memory], None) } {
            Ok(()) => {
                self.held.push(region.clone());
                self.slots.insert(region.id(), slot);
                Some(slot)
            }
            Err(e) => {
                self.open = false;
                tracing::warn!(
                    "{device}: cannot register more than {} MiB of buffers with io_uring ({e}); the rest costs more CPU. \
                     Raise the limit of locked memory (ulimit -l, LimitMEMLOCK=).",
                    (self.held.len() * REGION) >> 20
                );
                None
            }
        }
    }
}

struct Ring {
    // Before `registered`: the ring goes first.
    ring: IoUring,
    registered: Registered,
    node: Arc<Node>,
    queue: Arc<Queue>,
    active: Vec<Option<Active>>,
    vacant: Vec<usize>,
    seq: u64,
    /// Changes in the kernel, by order of arrival: a flush starts when none before it is left.
    changes: BTreeSet<u64>,
    flushes: VecDeque<(u64, Op)>,
    wake_armed: bool,
}

fn build(entries: u32) -> std::io::Result<IoUring> {
    let best = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    match best {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            tracing::info!("this kernel's io_uring lacks deferred task running (Linux 6.1); going on without");
            IoUring::new(entries)
        }
        other => other,
    }
}

impl Ring {
    fn new(node: Arc<Node>, queue: Arc<Queue>, depth: usize) -> std::io::Result<Ring> {
        // Every operation has at most one entry, and the wake-up one: the submission queue never fills.
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

    /// The ring is unusable. The kernel may still use buffers of operations under way: they are never freed.
    fn give_up(&mut self, e: &std::io::Error) {
        tracing::error!("{}: io_uring fails ({e}); this device answers nothing any more", self.node.name);
        self.queue.close();
        for a in std::mem::take(&mut self.active).into_iter().flatten() {
            let Active { op, iovecs, .. } = a;
            let Op { work, reply, .. } = op;
            std::mem::forget((work, iovecs));
            drop(reply);
        }
        self.flushes.clear();
    }

    fn arm_wake(&mut self) {
        let fd = types::Fd(self.queue.wake.as_raw_fd());
        let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE);
        self.wake_armed = self.push(entry);
    }

    fn push(&mut self, entry: squeue::Entry) -> bool {
        // SAFETY: what the entry points to lives in `active` until its completion is reaped; `give_up` leaks it, and `run`
        // returns otherwise only when nothing but the wake-up poll is under way, which points to nothing.
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
            let _ = op.reply.send(Err(Error::new(Code::Overloaded, "more operations than the ring was made for")));
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
        self.active[index] = Some(Active { op, seq, done: 0, iovecs: Box::default(), metered });
        self.submit(index);
    }

    /// Queues the rest of an operation.
    fn submit(&mut self, index: usize) {
        let Some(a) = self.active[index].as_mut() else { return };
        let (fd, offset, rest) = (types::Fixed(0), a.op.offset + a.done, (a.op.len - a.done) as u32);
        let slot = match &a.op.work {
            Work::Read(buf) => self.registered.slot(&self.ring, buf.region(), &self.node.name),
            Work::Write(bufs) if bufs.len() == 1 => self.registered.slot(&self.ring, bufs[0].region(), &self.node.name),
            _ => None,
        };
        self.queue.fixed.fetch_add(u64::from(slot.is_some()), Ordering::Relaxed);
        let entry = match &mut a.op.work {
            Work::Read(buf) => {
                let to = buf[a.done as usize..].as_mut_ptr();
                match slot {
                    Some(slot) => opcode::ReadFixed::new(fd, to, rest, slot).offset(offset).build(),
                    None => opcode::Read::new(fd, to, rest).offset(offset).build(),
                }
            }
            Work::Write(bufs) if bufs.len() == 1 => {
                let from = bufs[0][a.done as usize..].as_ptr();
                match slot {
                    Some(slot) => opcode::WriteFixed::new(fd, from, rest, slot).offset(offset).build(),
                    None => opcode::Write::new(fd, from, rest).offset(offset).build(),
                }
            }
            Work::Write(bufs) => {
                a.iovecs = iovecs(bufs, a.done);
                opcode::Writev::new(fd, a.iovecs.as_ptr(), a.iovecs.len() as u32).offset(offset).build()
            }
            Work::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Work::Discard => opcode::Fallocate::new(fd, a.op.len)
                .offset(a.op.offset)
                .mode(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
                .build(),
        };
        if !self.push(entry.user_data(index as u64)) {
            self.finish(index, Err(Error::new(Code::Overloaded, "the io_uring submission queue is full")));
        }
    }

    fn reap(&mut self) {
        let done: Vec<(u64, i32)> = self.ring.completion().map(|c| (c.user_data(), c.result())).collect();
        for (id, result) in done {
            match id {
                WAKE => {
                    self.wake_armed = false;
                    let _ = rustix::io::read(&self.queue.wake, &mut [0u8; 8]); // resets the counter
                }
                _ => self.complete(id as usize, result),
            }
        }
    }

    fn complete(&mut self, index: usize, result: i32) {
        let Some(a) = self.active.get_mut(index).and_then(Option::as_mut) else { return };
        let (what, moves) = match a.op.work {
            Work::Read(_) => ("read", true),
            Work::Write(_) => ("write", true),
            Work::Flush => ("flush", false),
            Work::Discard => ("discard", false),
        };
        if result < 0 {
            if matches!(-result, libc::EAGAIN | libc::EINTR) {
                return self.submit(index);
            }
            let e = std::io::Error::from_raw_os_error(-result);
            let e = self.node.error(what, a.op.offset, a.op.len, e);
            return self.finish(index, Err(e));
        }
        if moves {
            a.done += result as u64;
            if result == 0 {
                let m = format!("{}: {what} at {} reached the end; was it truncated?", self.node.name, a.op.offset);
                return self.finish(index, Err(Error::new(Code::Io, m)));
            }
            if a.done < a.op.len {
                return self.submit(index);
            }
        }
        self.finish(index, Ok(()));
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

fn iovecs(bufs: &[Buf], mut done: u64) -> Box<[libc::iovec]> {
    let mut out = Vec::with_capacity(bufs.len());
    for b in bufs {
        let skip = done.min(b.len() as u64) as usize;
        done -= skip as u64;
        if skip < b.len() {
            out.push(libc::iovec { iov_base: b[skip..].as_ptr().cast_mut().cast(), iov_len: b.len() - skip });
        }
    }
    out.into()
}
