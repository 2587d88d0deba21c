//! Workers: threads that feed one stream each and wait for it, so that no task of the runtime has
//! to block.

use std::{
    collections::VecDeque,
    sync::Arc,
    thread::{self, JoinHandle},
};

use parking_lot::{Condvar, Mutex};
use rustix::thread::{CpuSet, sched_setaffinity};
use strake_fabric::{Buf, BufMut, Region, Transport};
use strake_proto::{
    Code, Result,
    checksum::{combine, crc32c},
};
use tokio::sync::{mpsc, oneshot};

use crate::{
    Tier,
    fault::Fault,
    mem::{GpuMem, Mark, Stream},
    pins::{Regions, Slot},
};

/// Bytes that came by RDMA may be copied once more if they are fewer than this in one piece:
/// payloads that came with their frame, and what the client's cache has copied.
const SMALL: usize = 64 << 10;

/// Connects the copies of one call: when the call is abandoned, its end waits for the copies that
/// the device has begun.
#[derive(Default)]
pub struct Call {
    state: Mutex<CallState>,
    landed: Condvar,
}

#[derive(Default)]
struct CallState {
    given_up: bool,
    flying: usize,
}

impl Call {
    /// Permits a copy to begin; `None`: the call was abandoned.
    pub fn take_off(self: Arc<Self>) -> Option<Landing> {
        let mut s = self.state.lock();
        if s.given_up {
            return None;
        }
        s.flying += 1;
        drop(s);
        Some(Landing(self))
    }

    /// Lets no more copies begin, and waits for those under way.
    fn give_up(&self) {
        let mut s = self.state.lock();
        s.given_up = true;
        self.landed.wait_while(&mut s, |s| s.flying > 0);
    }
}

/// A copy that was begun. Held until the device no longer uses memory for it.
pub struct Landing(Arc<Call>);

impl Drop for Landing {
    fn drop(&mut self) {
        self.0.state.lock().flying -= 1;
        self.0.landed.notify_all();
    }
}

/// Abandons the call when it is dropped.
pub struct Flight(pub Arc<Call>);

impl Drop for Flight {
    fn drop(&mut self) {
        self.0.give_up();
    }
}

/// One part's copy.
pub enum Work {
    /// To the device.
    Load {
        /// The bytes, of one slot at most.
        from: Vec<Buf>,
        /// Address.
        to: u64,
        /// The device computes a checksum of what arrived, and it is compared.
        sum: bool,
    },
    /// From the device, as many bytes as the buffer has.
    Save {
        /// Address.
        from: u64,
        /// The destination; returned in [`Done`].
        into: BufMut,
        /// As for a load.
        sum: bool,
    },
    /// No copy: the device computes a checksum of its memory.
    Sum {
        /// Address.
        from: u64,
        /// Bytes.
        len: usize,
    },
}

/// A copy that is done.
pub struct Done {
    /// Bytes that were copied once more in host memory.
    pub staged: u64,
    /// The buffer of a [`Work::Save`].
    pub saved: Option<BufMut>,
    /// The device's checksum of its end equals the host's.
    pub summed: bool,
    /// Why the device did not compute it, although it should.
    pub unsummed: Option<Fault>,
    /// Result of a [`Work::Sum`]: the checksum of each 4 KiB.
    pub sums: Vec<u32>,
}

type Answer = oneshot::Sender<Result<Done, Fault>>;

struct Job {
    call: Arc<Call>,
    tier: Tier,
    work: Work,
    answer: Answer,
}

/// One worker.
pub struct Copier {
    jobs: Option<mpsc::UnboundedSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Copier {
    /// Starts the thread, on these processors if any are named. Also returns why it could not be
    /// placed there. It has as many copies under way as it has slots, and at least two.
    pub fn start(
        device: Arc<dyn GpuMem>,
        slots: Vec<Slot>,
        regions: Arc<Regions>,
        cpus: Option<CpuSet>,
    ) -> Result<(Copier, Option<String>)> {
        let (jobs, queue) = mpsc::unbounded_channel();
        let (placed, told) = std::sync::mpsc::channel();
        let thread = thread::Builder::new().name("strake-gds".into()).spawn(move || {
            let moved = cpus.map_or(Ok(()), |cpus| sched_setaffinity(None, &cpus));
            let _ = placed.send(moved.err().map(|e| e.to_string()));
            let depth = slots.len().max(2);
            match device.stream() {
                Ok(stream) => {
                    Worker { stream, slots, regions, depth, flying: VecDeque::new() }.run(queue)
                }
                Err(e) => refuse_all(queue, &e),
            }
        })?;
        let copier = Copier { jobs: Some(jobs), thread: Some(thread) };
        Ok((copier, told.recv().ok().flatten()))
    }

    /// Has a part copied; the caller limits how many. The tier determines whether the host memory
    /// must be pinned.
    pub async fn copy(&self, call: &Arc<Call>, tier: Tier, work: Work) -> Result<Done, Fault> {
        let (answer, answered) = oneshot::channel();
        let job = Job { call: call.clone(), tier, work, answer };
        let gone = || Fault::Driver {
            call: "a worker",
            code: Code::Io.errno(),
            name: "its thread has ended".into(),
        };
        self.jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        self.jobs = None;
        // It ends when its queue is empty. A panic was reported by the thread itself.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn refuse_all(mut queue: mpsc::UnboundedReceiver<Job>, why: &Fault) {
    while let Some(job) = queue.blocking_recv() {
        let _ = job.answer.send(Err(why.clone()));
    }
}

/// Host memory through which bytes are copied once more.
enum Stage {
    /// Pinned.
    Slot(Slot),
    /// Not pinned; for bytes of the pageable tier that lie in pinned memory.
    Plain(BufMut),
}

impl Stage {
    fn as_mut_ptr(&mut self) -> *mut u8 {
        match self {
            Stage::Slot(s) => s.as_mut_ptr(),
            Stage::Plain(b) => b.as_mut_ptr(),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Stage::Slot(s) => s.bytes(),
            Stage::Plain(b) => b,
        }
    }
}

/// Host memory of a copy, which the device may still use.
enum Held {
    Load {
        _from: Vec<Buf>,
    },
    Save {
        into: BufMut,
    },
    /// The number of a checksum.
    Sum(u64),
}

struct Flying {
    landing: Landing,
    mark: Mark,
    held: Held,
    stage: Option<Stage>,
    staged: u64,
    check: Option<Check>,
    unsummed: Option<Fault>,
    answer: Answer,
}

/// Whether the device computes a checksum of its end of a copy.
enum Checked {
    /// Not requested.
    No,
    By(Check),
    /// Requested, but not possible for this reason.
    Without(Fault),
}

/// The checksum that the device is to compute of its end of a copy.
struct Check {
    /// The number that the stream gave it.
    number: u64,
    /// The checksum of the host's end; for a save, known only when the bytes have arrived.
    want: Option<u32>,
    at: u64,
    len: u64,
}

struct Worker {
    /// Before the memory it copies from and to: dropped first, and waits then.
    stream: Box<dyn Stream>,
    flying: VecDeque<Flying>,
    slots: Vec<Slot>,
    regions: Arc<Regions>,
    depth: usize,
}

impl Worker {
    fn run(mut self, mut queue: mpsc::UnboundedReceiver<Job>) {
        loop {
            let next =
                if self.flying.is_empty() { queue.blocking_recv() } else { queue.try_recv().ok() };
            match next {
                Some(job) => {
                    while self.flying.len() >= self.depth {
                        self.land();
                    }
                    self.take_off(job);
                }
                None if self.flying.is_empty() => return,
                None => self.land(),
            }
        }
    }

    fn take_off(&mut self, job: Job) {
        let Job { call, tier, work, answer } = job;
        let Some(landing) = call.take_off() else { return };
        let mut stage = self.stage(tier, &work);
        let (begun, held) = match work {
            Work::Load { from, to, sum } => {
                let begun = self.begin_load(tier, &from, to, &mut stage);
                (
                    begun.and_then(|staged| Ok((staged, self.check_load(sum, &from, to)?))),
                    Held::Load { _from: from },
                )
            }
            Work::Save { from, mut into, sum } => {
                let begun = self.begin_save(tier, from, &mut into, &mut stage);
                (
                    begun.and_then(|staged| Ok((staged, self.check_save(sum, from, into.len())?))),
                    Held::Save { into },
                )
            }
            Work::Sum { from, len } => match self.stream.sum(from, len) {
                Ok(number) => (Ok((0, Checked::No)), Held::Sum(number)),
                Err(e) => (Err(e), Held::Sum(0)),
            },
        };
        match begun.and_then(|(staged, check)| Ok((staged, check, self.stream.mark()?))) {
            Ok((staged, checked, mark)) => {
                let (check, unsummed) = match checked {
                    Checked::No => (None, None),
                    Checked::By(c) => (Some(c), None),
                    Checked::Without(why) => (None, Some(why)),
                };
                self.flying.push_back(Flying {
                    landing,
                    mark,
                    held,
                    stage,
                    staged,
                    check,
                    unsummed,
                    answer,
                });
            }
            Err(e) => {
                // Some of its copies may have begun.
                self.stream.drain();
                drop(held);
                self.put_back(stage);
                drop(landing);
                let _ = answer.send(Err(e));
            }
        }
    }

    /// Has the device compute a checksum of what arrives. Meanwhile the host computes that of what
    /// it sent.
    fn check_load(&mut self, wanted: bool, from: &[Buf], to: u64) -> Result<Checked, Fault> {
        let len = from.iter().map(Buf::len).sum();
        let checked = self.check(wanted, to, len)?;
        let sum = || from.iter().fold(0, |sum, b| combine(sum, crc32c(b), b.len()));
        Ok(match checked {
            Checked::By(c) => Checked::By(Check { want: Some(sum()), ..c }),
            none => none,
        })
    }

    fn check_save(&mut self, wanted: bool, from: u64, len: usize) -> Result<Checked, Fault> {
        self.check(wanted, from, len)
    }

    /// A checksum that cannot be made does not fail the copy: it continues without.
    fn check(&mut self, wanted: bool, at: u64, len: usize) -> Result<Checked, Fault> {
        if !wanted || len == 0 {
            return Ok(Checked::No);
        }
        match self.stream.sum(at, len) {
            Ok(number) => Ok(Checked::By(Check { number, want: None, at, len: len as u64 })),
            Err(f) if f.is_of_call() => Err(f),
            Err(f) => Ok(Checked::Without(f)),
        }
    }

    /// The memory through which its bytes may have to be copied once more. For the pageable tier it
    /// is made when it is needed.
    fn stage(&mut self, tier: Tier, work: &Work) -> Option<Stage> {
        // There is one slot for each copy that may be under way.
        let slot = tier != Tier::Pageable && !matches!(work, Work::Sum { .. });
        if slot { self.slots.pop().map(Stage::Slot) } else { None }
    }

    fn put_back(&mut self, stage: Option<Stage>) {
        if let Some(Stage::Slot(slot)) = stage {
            self.slots.push(slot);
        }
    }

    /// Whether the memory is of the kind that the tier uses.
    fn suits(&self, tier: Tier, region: Option<&Arc<Region>>) -> bool {
        if tier == Tier::Pageable { !self.regions.knows(region) } else { self.regions.has(region) }
    }

    /// Returns the number of bytes that were copied once more.
    fn begin_load(
        &mut self,
        tier: Tier,
        from: &[Buf],
        to: u64,
        stage: &mut Option<Stage>,
    ) -> Result<u64, Fault> {
        let (mut done, mut staged) = (0, 0);
        let all = from.iter().map(Buf::len).sum();
        for b in from {
            let source = if self.suits(tier, b.region()) {
                b.as_ptr()
            } else if tier == Tier::BounceRdma
                && b.transport() == Transport::Rdma
                && b.len() >= SMALL
            {
                return Err(not_straight(b.len(), b.region().is_some()));
            } else {
                let room =
                    staging(tier, stage, all).filter(|s| s.bytes().len() - staged >= b.len());
                let room = room.ok_or_else(|| no_slot(b.len()))?.as_mut_ptr().wrapping_add(staged);
                // SAFETY: the stage has that room, and it is another one than that of the segments
                // before.
                unsafe { room.copy_from_nonoverlapping(b.as_ptr(), b.len()) };
                staged += b.len();
                room.cast_const()
            };
            // SAFETY: `from` and the stage are held, unchanged, until the copy's mark was waited
            // for or the stream drained.
            unsafe { self.stream.load(to + done, source, b.len())? };
            done += b.len() as u64;
        }
        Ok(staged as u64)
    }

    /// As [`Worker::begin_load`], from the device.
    fn begin_save(
        &mut self,
        tier: Tier,
        from: u64,
        into: &mut BufMut,
        stage: &mut Option<Stage>,
    ) -> Result<u64, Fault> {
        let len = into.len();
        if self.suits(tier, into.region()) {
            // SAFETY: `into` is held until the copy's mark was waited for or the stream drained,
            // and this is its only holder.
            unsafe { self.stream.save(into.as_mut_ptr(), from, len)? };
            return Ok(0);
        }
        if tier == Tier::BounceRdma && len >= SMALL {
            return Err(not_straight(len, into.region().is_some()));
        }
        let stage = staging(tier, stage, len)
            .filter(|s| s.bytes().len() >= len)
            .ok_or_else(|| no_slot(len))?;
        // SAFETY: the stage is held as long, and used by this copy alone.
        unsafe { self.stream.save(stage.as_mut_ptr(), from, len)? };
        Ok(len as u64)
    }

    /// Waits for the oldest copy and reports it.
    fn land(&mut self) {
        let Some(f) = self.flying.pop_front() else { return };
        let mut outcome = self.stream.wait(f.mark);
        if outcome.is_err() {
            self.stream.drain();
        }
        let mut sums = Vec::new();
        let saved = match f.held {
            Held::Load { .. } => None,
            Held::Sum(number) => {
                match self.stream.summed_blocks(number).filter(|_| outcome.is_ok()) {
                    Some(found) => sums = found,
                    None if outcome.is_ok() => outcome = Err(no_sums()),
                    None => {}
                }
                None
            }
            Held::Save { mut into } => {
                if let Some(stage) = f.stage.as_ref().filter(|_| f.staged > 0 && outcome.is_ok()) {
                    let len = into.len();
                    into.copy_from_slice(&stage.bytes()[..len]);
                }
                Some(into)
            }
        };
        self.put_back(f.stage);
        if let Some(c) = &f.check {
            let said = self.stream.summed(c.number);
            let want = c.want.or_else(|| saved.as_ref().map(|b| crc32c(b)));
            if outcome.is_ok() && (said.is_none() || said != want) {
                outcome = Err(Fault::Damaged { addr: c.at, len: c.len });
            }
        }
        drop(f.landing);
        let _ = f.answer.send(outcome.map(|()| Done {
            staged: f.staged,
            saved,
            summed: f.check.is_some(),
            unsummed: f.unsummed,
            sums,
        }));
    }
}

/// The memory through which a copy of this many bytes is staged. That of the pageable tier is not
/// pinned, and is touched only where it is used.
fn staging(tier: Tier, stage: &mut Option<Stage>, bytes: usize) -> Option<&mut Stage> {
    if tier == Tier::Pageable && stage.is_none() {
        *stage = Some(Stage::Plain(BufMut::unpooled(bytes)));
    }
    stage.as_mut()
}

/// The error for RDMA bytes that the device cannot copy directly from or to where they lie.
/// `pooled`: they lie in a region of the client's pool.
fn not_straight(bytes: usize, pooled: bool) -> Fault {
    let why = if pooled {
        "RDMA receives or sends them in memory that could not be registered with the device, too: \
         raise pinned_limit, or the limit for locked memory"
    } else {
        "the client's pool of buffers was full, so they are outside of the memory that is \
         registered for RDMA and the device: start fewer calls at a time"
    };
    Fault::NotStraight { bytes: bytes as u64, why: why.into() }
}

fn no_sums() -> Fault {
    Fault::Driver {
        call: "a sum",
        code: Code::Io.errno(),
        name: "the device gave no result".into(),
    }
}

fn no_slot(bytes: usize) -> Fault {
    Fault::Pin {
        bytes: bytes as u64,
        why: "the bytes are outside of pinned memory, and no slot is free for them".into(),
    }
}
