//! The threads that have cuFile read parts, and the verification of what it read.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use parking_lot::{Condvar, Mutex};
use strake_fabric::{ByTransport, Transport};
use strake_proto::{
    Code,
    checksum::{BLOCK, crc32c},
};
use tokio::{sync::oneshot, time::timeout};

use super::{
    cufile::{self, CuFile},
    store::Copy,
};
use crate::{
    Tier, Unavailable,
    copier::Call,
    fault::Fault,
    mem::{GpuMem, Stream},
    scratch::Scratch,
    transfer::{Stop, Went, no_sums, wanting},
};

const BLOCK64: u64 = BLOCK as u64;

/// The folder with copies, and the threads that read them.
pub(crate) struct Local {
    dir: PathBuf,
    pub(super) cufile: Result<Arc<dyn CuFile>, Unavailable>,
    queue: Arc<Queue>,
    readers: Vec<JoinHandle<()>>,
    next: AtomicU64,
    /// A read of a self-test did not end: its thread is not waited for, and no other read begins.
    pub(super) stuck: AtomicBool,
}

/// A copy that is registered with cuFile.
pub(crate) struct Open {
    pub(super) copy: Copy,
    handle: u64,
    pub(super) cufile: Arc<dyn CuFile>,
}

impl Open {
    pub(super) fn new(copy: Copy, cufile: &Arc<dyn CuFile>) -> Result<Arc<Open>, Fault> {
        let handle = cufile.register(std::os::fd::AsFd::as_fd(&copy))?;
        Ok(Arc::new(Open { copy, handle, cufile: cufile.clone() }))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.cufile.deregister(self.handle);
    }
}

type Answer = oneshot::Sender<Result<Went, Stop>>;

/// One part.
pub(super) struct Read {
    pub call: Arc<Call>,
    pub from: Arc<Open>,
    pub offset: u64,
    pub to: u64,
    pub len: u64,
    /// The device is to compute a checksum of what arrived.
    pub sum: bool,
    /// How long it waits for other reads.
    pub patience: Duration,
    /// It continues if there are no checksums.
    pub consent: bool,
    /// Memory of a self-test, which must stay as long as anything may write to it.
    pub _memory: Option<Arc<Scratch>>,
}

/// A part that waits for a thread.
struct Job {
    /// Unique among the jobs of the bridge.
    number: u64,
    read: Read,
    answer: Answer,
}

/// Parts that no thread has begun. One queue for all threads: a read that does not end blocks
/// nothing that another thread can do.
#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Queue {
    fn push(&self, job: Job) {
        self.waiting.lock().jobs.push_back(job);
        self.changed.notify_one();
    }

    /// Waits for a job; `None`: there will be no more.
    fn next(&self) -> Option<Job> {
        let mut w = self.waiting.lock();
        self.changed.wait_while(&mut w, |w| w.jobs.is_empty() && !w.closed);
        w.jobs.pop_front()
    }

    /// Withdraws a job that no thread has begun.
    fn withdraw(&self, number: u64) -> bool {
        let jobs = &mut self.waiting.lock().jobs;
        let at = jobs.iter().position(|j| j.number == number);
        at.and_then(|at| jobs.remove(at)).is_some()
    }

    fn close(&self) {
        self.waiting.lock().closed = true;
        self.changed.notify_all();
    }
}

impl Local {
    /// Opens cuFile and starts as many threads as there are `workers`. A problem with cuFile is
    /// reported by the self-test.
    pub fn open(
        device: &Arc<dyn GpuMem>,
        dir: &Path,
        prober: &Path,
        workers: usize,
    ) -> strake_proto::Result<Local> {
        let cufile = match device.refuses(Tier::LocalGds) {
            Some(why) => Err(why),
            None => device.cufile(prober),
        };
        let count = if cufile.is_ok() { workers } else { 0 };
        let (queue, stuck) = (Arc::<Queue>::default(), AtomicBool::new(false));
        let mut local = Local {
            dir: dir.into(),
            cufile,
            queue,
            readers: Vec::new(),
            next: AtomicU64::new(0),
            stuck,
        };
        for _ in 0..count {
            local.readers.push(reader(device.clone(), local.queue.clone())?);
        }
        Ok(local)
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Has a part read by any free thread. Reads that do not end may occupy all threads; a read
    /// that has begun is waited for, because its memory must not be given back before.
    pub(super) async fn read(&self, read: Read) -> Result<Went, Stop> {
        let failed = |code: Code, name: &str| {
            Stop::Tier(Fault::Driver { call: "a reader", code: code.errno(), name: name.into() })
        };
        let number = self.next.fetch_add(1, Relaxed);
        let (answer, mut answered) = oneshot::channel();
        let patience = read.patience;
        self.queue.push(Job { number, read, answer });
        loop {
            match timeout(patience, &mut answered).await {
                Ok(answer) => {
                    return answer
                        .unwrap_or_else(|_| Err(failed(Code::Io, "its thread has ended")));
                }
                Err(_) if self.queue.withdraw(number) => {
                    return Err(failed(
                        Code::TimedOut,
                        "other reads have not ended and block this one",
                    ));
                }
                Err(_) => {}
            }
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.queue.close();
        for r in self.readers.drain(..).filter(|_| !self.stuck.load(Relaxed)) {
            // A panic was reported by the thread itself.
            let _ = r.join();
        }
    }
}

/// A thread that reads, with a stream of its own.
fn reader(device: Arc<dyn GpuMem>, queue: Arc<Queue>) -> strake_proto::Result<JoinHandle<()>> {
    let thread = thread::Builder::new().name("strake-gds-local".into()).spawn(move || {
        // With a stream the thread has the device's context, which cuFile needs.
        let mut stream = device.stream();
        while let Some(job) = queue.next() {
            let Some(landing) = job.read.call.clone().take_off() else { continue };
            let outcome = match &mut stream {
                Ok(stream) => job.read.run(&mut **stream),
                Err(e) => Err(e.clone().into()),
            };
            drop(landing);
            let _ = job.answer.send(outcome);
        }
    })?;
    Ok(thread)
}

impl Read {
    /// Bytes that differ are fetched once more. If they differ again, either the copy is damaged or
    /// it is unknown which side is wrong.
    fn run(&self, stream: &mut dyn Stream) -> Result<Went, Stop> {
        let first = self.once(stream);
        match first {
            Err(Stop::Call(e)) if e.code == Code::Corrupt => self.once(stream),
            r => r,
        }
    }

    fn once(&self, stream: &mut dyn Stream) -> Result<Went, Stop> {
        let end = self.offset + self.len;
        let (first, last) = (self.offset.next_multiple_of(BLOCK64), end / BLOCK64 * BLOCK64);
        let unsummed = if first >= last {
            // No whole block.
            let one = self.end(stream, self.offset, end.min(first))?;
            one.or(self.end(stream, end.min(first), end)?)
        } else {
            let one = self.end(stream, self.offset, first)?;
            let two = self.middle(stream, first, last)?;
            one.or(two).or(self.end(stream, last, end)?)
        };
        let (by, staged) =
            (ByTransport::of(Transport::Local, self.len), self.len - last.saturating_sub(first));
        Ok(Went { by, staged, summed: self.sum && unsummed.is_none(), unsummed })
    }

    /// After a failure of the device to compute a checksum: continues only if the caller has
    /// agreed.
    fn without(&self, f: Fault) -> Result<Fault, Stop> {
        if self.consent && !f.is_of_call() { Ok(f) } else { Err(wanting(no_sums(f))) }
    }

    /// Reads whole blocks by cuFile. Returns why the device computed no checksum, if it should.
    fn middle(
        &self,
        stream: &mut dyn Stream,
        first: u64,
        last: u64,
    ) -> Result<Option<Fault>, Stop> {
        let (to, len) = (self.to + (first - self.offset), (last - first) as usize);
        let from = &self.from;
        if let Err(f) = cufile::read(&*from.cufile, self.patience, from.handle, to, len, first) {
            return Err(self.blame(first, last, f.into()));
        }
        if !self.sum {
            return Ok(None);
        }
        let number = match stream.sum(to, len) {
            Ok(number) => number,
            Err(f) => return self.without(f).map(Some),
        };
        let said = wait(stream).map(|()| stream.summed_blocks(number))?;
        let want = from
            .copy
            .sums(first / BLOCK64, len / BLOCK)
            .map_err(|e| self.damaged(first, e.to_string()))?;
        if said.is_some_and(|said| said == want) {
            return Ok(None);
        }
        Err(self.blame(first, last, Fault::Damaged { addr: to, len: len as u64 }.into()))
    }

    /// Less than a block, at the beginning or the end of a part: the block is read and verified
    /// here, and the device copies the wanted part of it.
    fn end(&self, stream: &mut dyn Stream, first: u64, last: u64) -> Result<Option<Fault>, Stop> {
        if first == last {
            return Ok(None);
        }
        let block = first / BLOCK64;
        let bytes = self.from.copy.read(block, 1).map_err(|(at, why)| self.damaged(at, why))?;
        let within = (first - block * BLOCK64) as usize..(last - block * BLOCK64) as usize;
        let (bytes, to) = (&bytes[within], self.to + (first - self.offset));
        // SAFETY: the buffer lives, unchanged, until the stream was drained.
        let begun = unsafe { stream.load(to, bytes.as_ptr(), bytes.len()) };
        let number = (begun.is_ok() && self.sum).then(|| stream.sum(to, bytes.len()));
        let ended = wait(stream);
        stream.drain();
        begun.and(ended)?;
        match number {
            None => Ok(None),
            Some(Err(f)) => self.without(f).map(Some),
            Some(Ok(n)) if stream.summed(n) == Some(crc32c(bytes)) => Ok(None),
            Some(Ok(_)) => Err(Fault::Damaged { addr: to, len: bytes.len() as u64 }.into()),
        }
    }

    /// Finds the cause why blocks did not arrive: the copy is damaged if the disk no longer holds
    /// what it held.
    fn blame(&self, first: u64, last: u64, otherwise: Stop) -> Stop {
        match self.from.copy.read(first / BLOCK64, ((last - first) / BLOCK64) as usize) {
            Ok(_) => otherwise,
            Err((at, why)) => self.damaged(at, why),
        }
    }

    /// Takes the copy out of use for everyone; the tier stays in use for other files.
    fn damaged(&self, at: u64, why: String) -> Stop {
        let copy = &self.from.copy;
        let aside = copy.put_aside();
        let fault = Fault::BadCopy { copy: copy.path().display().to_string(), at, why, aside };
        tracing::warn!("{fault}");
        Stop::Once(fault)
    }
}

/// Waits for everything that the stream was given.
fn wait(stream: &mut dyn Stream) -> Result<(), Fault> {
    let mark = stream.mark()?;
    stream.wait(mark)
}
