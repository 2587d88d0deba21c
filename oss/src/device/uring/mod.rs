//! A file, block device or NVMe namespace through io_uring: one thread and one ring per device.
//! Callers queue operations, up to a limit. The thread submits all waiting ones in one system call
//! and sleeps in the kernel until one ends or another is queued.

pub(super) mod passthrough;
mod ring;

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use ring::Ring;
use strake_fabric::{Buf, BufMut, Pool};
use strake_proto::{Code, Error, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::{
    api::{Device, check_range},
    meter::Meter,
    node::Node,
};

/// Most operations in the kernel at a time, by default.
pub(super) const DEPTH: usize = 256;
/// Largest single operation: lengths are 32 bits in the ring.
const MAX_LEN: u64 = 1 << 30;

/// A file, block device or NVMe namespace through io_uring, with a thread of its own.
pub struct UringDevice {
    node: Arc<Node>,
    queue: Arc<Queue>,
    depth: Arc<Semaphore>,
    pool: Pool,
    thread: Option<JoinHandle<()>>,
}

/// From callers to the thread. The device's semaphore limits its length.
struct Queue {
    ops: Mutex<VecDeque<Op>>,
    /// The thread sleeps or is about to, and must be woken.
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
    /// Fails if the path cannot be opened, or io_uring cannot be used (an old kernel, a container's
    /// filter).
    pub fn open(path: &Path, depth: usize) -> Result<UringDevice> {
        UringDevice::on(Arc::new(Node::open(path)?), depth)
    }

    pub(super) fn on(node: Arc<Node>, depth: usize) -> Result<UringDevice> {
        let depth = depth.clamp(1, 4096);
        let context =
            |e: std::io::Error| Error::from(e).context(format!("io_uring for {}", node.name));
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
            .spawn(move || match n.namespace.is_some() {
                true => {
                    ring::serve(Ring::<ring::Large, ring::LargeAnswer>::new(n, q, depth), &started)
                }
                false => {
                    ring::serve(Ring::<ring::Small, ring::SmallAnswer>::new(n, q, depth), &started)
                }
            })
            .map_err(context)?;
        ready
            .recv()
            .map_err(|_| Error::new(Code::Io, "the io_uring thread ended"))?
            .map_err(context)?;
        let depth = Arc::new(Semaphore::new(depth));
        Ok(UringDevice { node, queue, depth, pool: Pool::default(), thread: Some(thread) })
    }

    /// Reads and writes so far in registered memory, which the kernel did not have to pin each
    /// time.
    pub fn fixed_operations(&self) -> u64 {
        self.queue.fixed.load(Ordering::Relaxed)
    }

    async fn submit(&self, work: Work, offset: u64, len: u64) -> Result<Option<BufMut>> {
        let gone =
            || Error::new(Code::Io, format!("{}: its io_uring thread has ended", self.node.name));
        if len > MAX_LEN && !matches!(work, Work::Discard) {
            return Err(Error::new(
                Code::Inval,
                format!("{}: {len} bytes in one operation", self.node.name),
            ));
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

    /// Closes the queue. Waiting operations are dropped, which answers them.
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
