//! An NVMe namespace driven by SPDK in this process, bypassing the kernel: on PCIe, or remote by
//! NVMe/TCP and NVMe/RDMA.
//!
//! SPDK is opened at run time ([`ffi`]) and started once per process ([`env`]). A device has one
//! thread for its controller ([`control`]) and one for each of its CPUs, with its own queue pair
//! ([`reactor`]). Callers hand operations to those threads through queues, limited by the device's
//! depth, and wait for the answers. SPDK is never unloaded, and a process that has loaded it must
//! not fork.

mod control;
mod env;
mod ffi;
mod reactor;
mod transport;

use std::{
    collections::VecDeque,
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst},
        mpsc::{self, Sender},
    },
    thread::JoinHandle,
    time::Duration,
};

use async_trait::async_trait;
use control::{Controller, Event};
use env::Env;
use parking_lot::Mutex;
use reactor::Reactor;
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use strake_fabric::{Buf, BufMut, Pool};
use strake_proto::{Code, Error, Result};
use tokio::sync::{OwnedRwLockReadGuard, OwnedSemaphorePermit, RwLock, Semaphore, oneshot};
use transport::Transport;
pub use transport::{PREFIX, TransportId};

use super::{
    api::{BLOCK, Device, check_range},
    meter::Meter,
    nvme::Format,
};

/// Most operations at a time for each CPU.
const DEPTH: usize = 256;
/// A write of at most so many buffers makes one command per buffer; more are copied into one.
const MOST_BUFFERS: usize = 16;

/// An NVMe namespace, local or remote, driven by SPDK in this process.
pub struct SpdkDevice {
    shared: Arc<Shared>,
    depth: Arc<Semaphore>,
    /// Changes hold it shared until they end. A flush takes it exclusively for a moment, to wait
    /// for the changes before it.
    barrier: Arc<RwLock<()>>,
    turn: AtomicUsize,
    pool: Pool,
    reactors: Vec<JoinHandle<()>>,
    control: Option<JoinHandle<()>>,
    _claim: env::Claim,
}

/// What the threads of a device share.
struct Shared {
    name: String,
    transport: Transport,
    env: &'static Env,
    format: Format,
    /// Most bytes of one command.
    most: u64,
    /// Whether the controller's cache is volatile.
    volatile: bool,
    queues: Vec<Queue>,
    meter: Meter,
    controller: Mutex<Controller>,
    events: Mutex<Sender<Event>>,
    /// The controller works; otherwise it is being reset.
    up: AtomicBool,
    /// Grows with each reset.
    generation: AtomicU64,
    closed: AtomicBool,
    /// How many queue pairs exist, or are about to.
    pairs: AtomicUsize,
    /// Number of writes that ended, and of those that a flush covers.
    written: AtomicU64,
    flushed: AtomicU64,
    /// Some writes that no flush covered may be lost.
    lost: AtomicBool,
    /// See [`Device::copied`].
    copied: AtomicU64,
}

/// Operations from callers to one reactor.
struct Queue {
    ops: Mutex<VecDeque<Op>>,
    /// The reactor sleeps or is about to, and must be woken.
    sleeping: AtomicBool,
    /// The reactor has ended and takes nothing more. Changed with `ops` locked.
    closed: AtomicBool,
    wake: OwnedFd,
}

enum Work {
    Read(BufMut),
    Write(Vec<Buf>),
    Flush,
}

struct Op {
    work: Work,
    offset: u64,
    len: u64,
    /// For a flush: how many writes it covers.
    covers: u64,
    reply: oneshot::Sender<Result<Option<BufMut>>>,
    _permit: OwnedSemaphorePermit,
    _change: Option<OwnedRwLockReadGuard<()>>,
}

/// Announces a target's device before the first one is opened; does nothing if it is not SPDK's.
/// PCI devices can be opened only if they were announced in time.
pub fn announce(device: &str) -> Result<()> {
    if device.starts_with(PREFIX) {
        env::announce(&TransportId::parse(device)?);
    }
    Ok(())
}

/// CPUs that this process may use.
fn cpus() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_else(|_| CpuSet::new());
    (0..CpuSet::MAX_CPU).filter(|n| set.is_set(*n)).collect()
}

/// The CPU of `own` for a device that names none, after `others` such devices: from the last CPU
/// down, so that each device has its own while there are enough.
fn another(own: &[usize], others: usize) -> Option<usize> {
    own.iter().rev().cycle().nth(others % own.len().max(1)).copied()
}

impl SpdkDevice {
    /// Blocks while SPDK starts and the controller is reached. `NoEnt`: no SPDK; `Inval`: not an
    /// SPDK device.
    pub fn open(text: &str) -> Result<SpdkDevice> {
        let mut id = TransportId::parse(text)?;
        let own = cpus();
        if let Some(foreign) = id.cores.iter().find(|c| !own.contains(c)) {
            return Err(Error::new(
                Code::Inval,
                format!("{id}: this process may not use CPU {foreign} ({own:?})"),
            ));
        }
        if id.cores.is_empty() {
            static UNNAMED: AtomicUsize = AtomicUsize::new(0);
            id.cores.extend(another(&own, UNNAMED.fetch_add(1, SeqCst)));
        }
        env::announce(&id);
        let env = env::get(id.cores.first().copied().unwrap_or(0)).map_err(|e| e.context(&id))?;
        let claim = env.claim(&id)?;
        let (made, ready) = mpsc::sync_channel(1);
        let (events, told) = mpsc::channel();
        let (of_control, cores) = (id.clone(), id.cores.clone());
        let control = std::thread::Builder::new().name("spdk-control".into()).spawn(move || {
            match Shared::connect(env, &of_control, events) {
                Ok(shared) => {
                    let c = *shared.controller.lock();
                    let _ = made.send(Ok(shared.clone()));
                    c.serve(&shared, &of_control, shared.format, &told);
                }
                Err(e) => drop(made.send(Err(e))),
            }
        })?;
        let gone = |_| Error::new(Code::Io, format!("{id}: its control thread ended"));
        let shared = ready.recv().map_err(gone)??;
        let mut device = SpdkDevice {
            depth: Arc::new(Semaphore::new(DEPTH * cores.len())),
            shared,
            barrier: Arc::default(),
            turn: AtomicUsize::new(0),
            pool: Pool::default(),
            reactors: Vec::new(),
            control: Some(control),
            _claim: claim,
        };
        for (n, core) in cores.into_iter().enumerate() {
            let (shared, (connected, has_pair)) = (device.shared.clone(), mpsc::sync_channel(1));
            let thread =
                std::thread::Builder::new().name(format!("spdk-{core}")).spawn(move || {
                    let mut only = CpuSet::new();
                    only.set(core);
                    if let Err(e) = sched_setaffinity(None, &only) {
                        tracing::warn!("{}: cannot keep to CPU {core} ({e})", shared.name);
                    }
                    let mut reactor = Reactor::new(shared, n);
                    let _ = connected.send(reactor.connect());
                    reactor.serve();
                })?;
            device.reactors.push(thread);
            if has_pair.recv() != Ok(true) {
                let m = format!(
                    "{id}: the controller gives no queue pair for CPU {core}; name fewer CPUs in \
                     cores"
                );
                return Err(Error::new(Code::Busy, m));
            }
        }
        Ok(device)
    }

    async fn submit(&self, work: Work, offset: u64, len: u64) -> Result<Option<BufMut>> {
        let gone = || {
            Error::new(
                Code::Io,
                format!("{}: its reactor has given up the operation", self.shared.name),
            )
        };
        let change = match work {
            Work::Write(_) => Some(self.barrier.clone().read_owned().await),
            _ => None,
        };
        let permit = self.depth.clone().acquire_owned().await.map_err(|_| gone())?;
        let (reply, answer) = oneshot::channel();
        let queue = &self.shared.queues[self.turn.fetch_add(1, SeqCst) % self.shared.queues.len()];
        {
            let mut ops = queue.ops.lock();
            if queue.closed.load(SeqCst) {
                return Err(gone());
            }
            ops.push_back(Op {
                work,
                offset,
                len,
                covers: 0,
                reply,
                _permit: permit,
                _change: change,
            });
        }
        queue.wake();
        answer.await.map_err(|_| gone())?
    }

    /// Makes few buffers, each aligned and of whole blocks.
    fn commands(&self, bufs: Vec<Buf>) -> Vec<Buf> {
        if bufs.len() <= MOST_BUFFERS && bufs.iter().all(|b| b.is_aligned() && !b.is_empty()) {
            return bufs;
        }
        let mut one = self.pool.get_now(bufs.iter().map(Buf::len).sum());
        let mut at = 0;
        for b in &bufs {
            one[at..at + b.len()].copy_from_slice(b);
            at += b.len();
        }
        vec![one.freeze()]
    }
}

impl Shared {
    fn connect(env: &'static Env, id: &TransportId, events: Sender<Event>) -> Result<Arc<Shared>> {
        let controller = Controller::connect(env, id)?;
        Shared::of(controller, env, id, events).inspect_err(|_| controller.detach(false))
    }

    fn of(
        controller: Controller,
        env: &'static Env,
        id: &TransportId,
        events: Sender<Event>,
    ) -> Result<Arc<Shared>> {
        let queue = |_: &usize| -> Result<Queue> {
            let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(std::io::Error::from)?;
            let (sleeping, closed) = (AtomicBool::new(false), AtomicBool::new(false));
            Ok(Queue { ops: Mutex::default(), sleeping, closed, wake })
        };
        Ok(Arc::new(Shared {
            name: id.to_string(),
            transport: id.transport.clone(),
            env,
            format: controller.format().map_err(|e| e.context(id))?,
            most: controller.most().max(BLOCK),
            volatile: controller.is_volatile(),
            queues: id.cores.iter().map(queue).collect::<Result<_>>()?,
            meter: Meter::default(),
            controller: Mutex::new(controller),
            events: Mutex::new(events),
            up: AtomicBool::new(true),
            generation: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            pairs: AtomicUsize::new(0),
            written: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            copied: AtomicU64::new(0),
        }))
    }

    fn is_up(&self) -> bool {
        self.up.load(SeqCst)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    fn set_up(&self, up: bool) {
        self.up.store(up, SeqCst);
        self.queues.iter().for_each(Queue::rouse);
    }

    fn tell(&self, event: Event) {
        let _ = self.events.lock().send(event); // the thread lives as long as the device
    }

    fn error(&self, op: &Op, e: Error) -> Error {
        let what = match op.work {
            Work::Read(_) => "read",
            Work::Write(_) => "write",
            Work::Flush => "flush",
        };
        e.context(format!("{}: {what} of {} bytes at {}", self.name, op.len, op.offset))
    }
}

impl Queue {
    /// Makes the reactor look at `ops`.
    fn wake(&self) {
        if self.sleeping.swap(false, SeqCst) {
            self.rouse();
        }
    }

    /// Makes the reactor look at everything, even if it is about to sleep.
    fn rouse(&self) {
        // Fails only when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn close(&self) {
        let waiting = {
            let mut ops = self.ops.lock();
            self.closed.store(true, SeqCst);
            std::mem::take(&mut *ops)
        };
        drop(waiting);
    }

    /// Sleeps until woken, or for so long.
    fn sleep(&self, time: Option<Duration>) {
        self.sleeping.store(true, SeqCst);
        if self.ops.lock().is_empty() {
            let time = time.and_then(|t| rustix::event::Timespec::try_from(t).ok());
            let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], time.as_ref());
        }
        self.sleeping.store(false, SeqCst);
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]); // resets the counter
    }
}

impl Drop for SpdkDevice {
    fn drop(&mut self) {
        let c = *self.shared.controller.lock();
        if self.shared.is_up() && !c.works(&self.shared.transport) {
            // It must be disconnected before queue pairs are freed, because a dead controller would
            // not answer that.
            let generation = self.shared.generation.load(SeqCst);
            self.shared.tell(Event::Failed(generation));
            let waits = || self.shared.is_up() && self.shared.generation.load(SeqCst) == generation;
            while waits() && self.control.as_ref().is_some_and(|t| !t.is_finished()) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.shared.closed.store(true, SeqCst);
        self.shared.queues.iter().for_each(Queue::rouse);
        self.reactors.drain(..).for_each(|t| drop(t.join()));
        self.shared.tell(Event::Close);
        self.control.take().into_iter().for_each(|t| drop(t.join()));
    }
}

#[async_trait]
impl Device for SpdkDevice {
    fn capacity(&self) -> u64 {
        self.shared.format.capacity()
    }
    fn direct(&self) -> bool {
        true
    }
    fn name(&self) -> String {
        self.shared.name.clone()
    }
    fn meter(&self) -> &Meter {
        &self.shared.meter
    }
    fn copied(&self) -> u64 {
        self.shared.copied.load(SeqCst)
    }
    async fn read(&self, offset: u64, buf: BufMut) -> Result<BufMut> {
        let len = buf.len() as u64;
        check_range(&self.shared.name, self.capacity(), offset, len)?;
        let buf = self.submit(Work::Read(buf), offset, len).await?;
        buf.ok_or_else(|| {
            Error::new(Code::Io, format!("{}: read lost its buffer", self.shared.name))
        })
    }
    async fn write(&self, offset: u64, bufs: Vec<Buf>) -> Result<()> {
        let len = bufs.iter().map(|b| b.len() as u64).sum();
        check_range(&self.shared.name, self.capacity(), offset, len)?;
        let bufs = self.commands(bufs);
        self.submit(Work::Write(bufs), offset, len).await.map(|_| ())
    }
    async fn flush(&self) -> Result<()> {
        drop(self.barrier.write().await);
        self.submit(Work::Flush, 0, 0).await.map(|_| ())
    }
    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        // Not passed on, as for block devices: many discard slowly.
        check_range(&self.shared.name, self.capacity(), offset, len)
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn devices_take_cpus_from_the_last_one_down() {
        let of = |n| {
            (0..5).filter_map(|others| super::another(&[0, 2, 3][..n], others)).collect::<Vec<_>>()
        };
        assert_eq!((of(3), of(1), of(0)), (vec![3, 2, 0, 3, 2], vec![0; 5], vec![]));
    }
}
