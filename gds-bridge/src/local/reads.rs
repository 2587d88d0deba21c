//! Parts that are read by cuFile: the threads that read, the verification of what they read, the
//! copies of a call, and the self-test.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use parking_lot::{Condvar, Mutex};
use strake_fabric::{BufMut, ByRoad, Road};
use strake_proto::{
    Code, Error,
    checksum::{BLOCK, crc32c},
};
use tokio::{sync::oneshot, task::spawn_blocking, time::timeout};

use super::{
    cufile::{self, CuFile},
    store::{Copy, Header, Making, Sealed, check_folder},
};
use crate::{
    Direction, Network, Policy, Tier, Transfer, Unavailable,
    bridge::Inner,
    copier::{Call, Flight, Work},
    direct::{Place, Stop, Went, no_sums, wanting},
    mem::{Fault, GpuMem, Stream},
    plan::{Measured, Standing},
    selftest::pattern,
};

const BLOCK64: u64 = BLOCK as u64;

/// The folder with copies, and the threads that read them.
pub(crate) struct Local {
    dir: PathBuf,
    cufile: Result<Arc<dyn CuFile>, Unavailable>,
    queue: Arc<Queue>,
    readers: Vec<JoinHandle<()>>,
    next: AtomicU64,
    /// A read of a self-test did not end: its thread is not waited for, and no other read begins.
    stuck: AtomicBool,
}

/// A copy that is registered with cuFile.
pub(crate) struct Open {
    copy: Copy,
    handle: u64,
    cufile: Arc<dyn CuFile>,
}

impl Open {
    fn new(copy: Copy, cufile: &Arc<dyn CuFile>) -> Result<Arc<Open>, Fault> {
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
struct Job {
    /// Its number, unique among the jobs of the bridge.
    number: u64,
    call: Arc<Call>,
    from: Arc<Open>,
    offset: u64,
    to: u64,
    len: u64,
    /// The device is to compute a checksum of what arrived.
    sum: bool,
    /// How long it waits for other reads.
    patience: Duration,
    /// It continues if there are no checksums.
    consent: bool,
    /// Memory of a self-test, which must stay as long as anything may write to it.
    _memory: Option<Arc<Memory>>,
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
    async fn read(
        &self,
        patience: Duration,
        job: impl FnOnce(u64, Answer) -> Job,
    ) -> Result<Went, Stop> {
        let failed = |code: Code, name: &str| {
            Stop::Tier(Fault::Driver { call: "a reader", code: code.errno(), name: name.into() })
        };
        let number = self.next.fetch_add(1, Relaxed);
        let (answer, mut answered) = oneshot::channel();
        self.queue.push(job(number, answer));
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
            let Some(landing) = job.call.clone().take_off() else { continue };
            let outcome = match &mut stream {
                Ok(stream) => job.run(&mut **stream),
                Err(e) => Err(e.clone().into()),
            };
            drop(landing);
            let _ = job.answer.send(outcome);
        }
    })?;
    Ok(thread)
}

impl Job {
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
            (ByRoad::of(Road::Local, self.len), self.len - last.saturating_sub(first));
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

/// The copies for the ranges of a call.
#[derive(Default)]
pub(crate) struct Copies {
    /// By range; empty: no range has one.
    of: Vec<Option<Arc<Open>>>,
    /// Why a file has none.
    pub missing: Option<Unavailable>,
}

impl Copies {
    pub fn of(&self, range: usize) -> Option<&Arc<Open>> {
        self.of.get(range)?.as_ref()
    }

    /// Whether there are no copies at all.
    pub fn is_empty(&self) -> bool {
        self.of.iter().all(Option::is_none)
    }
}

impl Inner {
    /// Finds the copies for a call. Asks the metadata servers each time how files are sealed, so
    /// that nothing is read that a file held before its seal was removed.
    pub async fn copies(&self, direction: Direction, all: &[Transfer], policy: Policy) -> Copies {
        let available =
            matches!(self.standings_of(direction)[Tier::LocalGds], Standing::Available(_));
        // Saves use no copies.
        let local = self.local.as_ref().filter(|_| available);
        let Some((local, Ok(cufile))) =
            local.filter(|_| policy.allows(Tier::LocalGds)).map(|l| (l, &l.cufile))
        else {
            return Copies::default();
        };
        let (mut found, mut missing) = (HashMap::new(), None);
        for t in all.iter().filter(|t| t.len > 0) {
            let ino = t.file.id();
            if let Entry::Vacant(place) = found.entry(ino) {
                let copy = copy_of(&*self.network, ino, &local.dir, cufile).await;
                let copy = copy.map_err(|why| missing.get_or_insert(why).clone()).ok();
                place.insert(copy);
            }
        }
        Copies {
            of: all.iter().map(|t| found.get(&t.file.id()).cloned().flatten()).collect(),
            missing,
        }
    }

    /// As [`Inner::load_direct`], from a copy.
    pub async fn load_local(
        &self,
        flight: &Arc<Call>,
        from: &Arc<Open>,
        p: Place<'_>,
    ) -> Result<Went, Stop> {
        let size = from.copy.sealed.size;
        if p.offset + p.len > size {
            let m = format!("the file ends after {size} bytes, within the range to load");
            return Err(Stop::Call(Error::new(Code::Io, m)));
        }
        let gone = || {
            Stop::Tier(Fault::Driver {
                call: "local-gds",
                code: Code::Io.errno(),
                name: "it is not open".into(),
            })
        };
        let local = self.local.as_ref().ok_or_else(gone)?;
        let patience = from.cufile.patience();
        let job = |number, answer| Job {
            number,
            call: flight.clone(),
            from: from.clone(),
            offset: p.offset,
            to: p.gpu,
            len: p.len,
            sum: self.device_sums.is_ok(),
            patience,
            consent: self.consent,
            _memory: None,
            answer,
        };
        let went = local.read(patience, job).await?;
        // Fails if the memory was freed in the meantime.
        self.device.check(p.gpu, p.len)?;
        Ok(went)
    }
}

async fn copy_of(
    network: &dyn Network,
    ino: u64,
    dir: &Path,
    cufile: &Arc<dyn CuFile>,
) -> Result<Arc<Open>, Unavailable> {
    let none = move |why: String| Unavailable::NoCopy { ino, why };
    let sealed = network
        .sealed(ino)
        .await
        .map_err(|e| none(format!("its seal cannot be read: {}", e.message)))?;
    let sealed = sealed.ok_or(Unavailable::NotSealed { ino })?;
    let (dir, cufile) = (dir.to_path_buf(), cufile.clone());
    let open = move || match Copy::open(&dir, &sealed) {
        Ok(None) => {
            Err(none(format!("there is none in '{}': `strake gds stage` makes one", dir.display())))
        }
        Ok(Some(copy)) => {
            Open::new(copy, &cufile).map_err(|f| none(format!("cuFile does not accept it: {f}")))
        }
        Err(e) => Err(none(e.message)),
    };
    spawn_blocking(open)
        .await
        .unwrap_or_else(|e| Err(Unavailable::NoCopy { ino, why: e.to_string() }))
}

/// Device memory that is freed when it is no longer used.
struct Memory {
    device: Arc<dyn GpuMem>,
    addr: u64,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(e) = self.device.free(self.addr) {
            tracing::debug!("memory of a self-test was not freed: {e}");
        }
    }
}

/// Reads patterns from an unnamed file in the folder to the device, and checks what arrived. Like
/// [`crate::direct::test`], it measures how much faster or slower that is than the same bytes from
/// a file of the cluster, and scales `bounce` by it; without a cluster, it measures the speed
/// itself.
pub(crate) async fn test(
    bridge: &Inner,
    bounce: Option<Measured>,
) -> Result<Measured, Unavailable> {
    let local = bridge.local.as_ref().ok_or(Unavailable::NoFolder)?;
    let cufile = local.cufile.clone()?;
    // A read that is delayed by others, in the queue and up to three times in rounds, must fail
    // before it is itself considered hung.
    let (patience, waits) = (cufile.patience(), cufile.patience() / 5);
    if local.stuck.load(Relaxed) {
        return Err(Unavailable::Hung { seconds: patience.as_secs() });
    }
    let (part, count) = (bridge.part as u64, bridge.workers.len() as u64);
    let mut seed = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
    let sent: Vec<_> =
        (0..count).map(|_| pattern(BufMut::unpooled(bridge.part), &mut seed)).collect();
    let addr = bridge
        .device
        .alloc(part)
        .map_err(|_| Unavailable::TestStopped(Fault::NoMemory { bytes: part }))?;
    let memory = Arc::new(Memory { device: bridge.device.clone(), addr });
    let bad = |why: String| Unavailable::BadFolder { dir: local.dir.display().to_string(), why };
    let (dir, all) = (local.dir.clone(), sent.clone());
    let made = spawn_blocking(move || scratch(&dir, &all)).await.map_err(|e| bad(e.to_string()))?;
    let from =
        Open::new(made.map_err(|e| bad(e.message))?, &cufile).map_err(Unavailable::TestStopped)?;
    // Dropped before the memory; nothing in it waits for a read that does not end.
    let flight = Flight(Arc::default());
    let mut took = Duration::ZERO;
    for (n, sent) in sent.iter().enumerate() {
        let begun = Instant::now();
        // Parts that begin or end within a block are handled differently, so they are tested, too.
        let (skip, len) = if n == 0 { (1000, part - 2000) } else { (0, part) };
        let job = |number, answer| Job {
            number,
            call: Arc::default(),
            from: from.clone(),
            offset: n as u64 * part + skip,
            to: addr + skip,
            len,
            sum: bridge.device_sums.is_ok(),
            patience: waits,
            consent: bridge.consent,
            _memory: Some(memory.clone()),
            answer,
        };
        let read = timeout(patience, local.read(waits, job)).await.map_err(|_| {
            local.stuck.store(true, Relaxed);
            Unavailable::Hung { seconds: patience.as_secs() }
        })?;
        read.map_err(|stop| match stop {
            Stop::Tier(f) | Stop::Want(f) | Stop::Once(f) => Unavailable::TestStopped(f),
            Stop::Call(e) => Unavailable::TestStopped(Fault::Driver {
                call: "a read",
                code: e.code.errno(),
                name: e.message,
            }),
        })?;
        took += begun.elapsed();
        let came =
            Work::Save { from: addr + skip, into: BufMut::unpooled(len as usize), sum: false };
        let came = bridge
            .worker()
            .copy(&flight.0, bridge.copies_as(), came)
            .await
            .map_err(Unavailable::TestStopped)?;
        let (came, sent) = (
            came.saved.unwrap_or_else(|| BufMut::unpooled(0)),
            &sent[skip as usize..][..len as usize],
        );
        if came[..] != *sent {
            let at = sent.iter().zip(came.iter()).position(|(a, b)| a != b).unwrap_or(came.len());
            return Err(Unavailable::TestFailed { at: at as u64 });
        }
    }
    let bytes = (part * count - 2000) as f64;
    let other = match bounce {
        Some(b) => by_the_cluster(bridge, &flight, addr, &sent).await.map(|t| (b.load, t)),
        None => None,
    };
    let seconds = took.as_secs_f64().max(1e-9);
    let load = other.map_or(bytes / seconds, |(rate, other)| rate * other.as_secs_f64() / seconds);
    Ok(Measured { load, save: 0.0 })
}

/// An unnamed copy that holds these parts.
fn scratch(dir: &Path, parts: &[strake_fabric::Buf]) -> strake_proto::Result<Copy> {
    check_folder(dir)?;
    let size = parts.iter().map(|p| p.len() as u64).sum();
    let sealed = Sealed { fs: [0; 16], ino: 0, size, sha256: [0; 32], root: [0; 32] };
    let mut making = Making::begin(dir, Header { sealed, staged_ns: 0, path: String::new() })?;
    parts.iter().try_for_each(|p| making.push(p))?;
    making.unnamed()
}

/// How long the same parts take from a file of the cluster over host memory. `None`: there is no
/// such file.
async fn by_the_cluster(
    bridge: &Inner,
    flight: &Flight,
    to: u64,
    parts: &[strake_fabric::Buf],
) -> Option<Duration> {
    let measure = async {
        let file = bridge.network.scratch().await.ok()?;
        let mut took = Duration::ZERO;
        for (n, part) in parts.iter().enumerate() {
            let offset = (n * part.len()) as u64;
            file.write(offset, part.clone()).await.ok()?;
            let begun = Instant::now();
            let from = file.read(offset, part.len()).await.ok()?;
            let work = Work::Load { from, to, sum: false };
            bridge.worker().copy(&flight.0, bridge.copies_as(), work).await.ok()?;
            took += begun.elapsed();
        }
        Some(took)
    };
    timeout(Duration::from_secs(15), measure).await.ok().flatten()
}
