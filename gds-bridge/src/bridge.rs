//! Calls: many ranges of many files, split into parts, to the device or from it.

use std::{
    fmt,
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use strake_fabric::{Buf, ByTransport, REGION};
use strake_proto::{Code, Error, Result, checksum::BLOCK, layout::MAX_FILE_SIZE};
use tokio::sync::Semaphore;

use crate::{
    ByTier, Direction, Failed, GpuMem, Network, Numa, Options, Policy, Report, Switch, Tier,
    Transfer, Unavailable,
    copier::{Done, Flight, Work},
    engine::Engine,
    fault::Fault,
    file::both,
    hands::Hands,
    local::{Copies, Local},
    pins::Regions,
    plan::{Run, Standing, choose},
    rest::{Asked, Rests},
    selftest,
    tier_counters::TierCounters,
    transfer::{Place, Stop, Went},
};

/// Moves bytes between files and one device. Clones are the same bridge. Must be dropped where it
/// is allowed to block for a moment.
#[derive(Clone)]
pub struct Bridge(Arc<Inner>);

struct Inner {
    engine: Engine,
    regions: Arc<Regions>,
    notice: Option<String>,
    numa: Numa,
    policy: Policy,
    /// Whether the device verifies copied parts; otherwise the reason why not.
    sums: Result<(), String>,
    /// Limits the parts under way, over all calls.
    room: Semaphore,
    width: usize,
    tier_counters: Arc<TierCounters>,
    rests: Rests,
    /// Held by a self-test: only one runs at a time.
    testing: tokio::sync::Mutex<()>,
}

/// A piece of a range.
struct Part {
    range: usize,
    offset: u64,
    gpu: u64,
    len: usize,
}

/// How a part was moved: its tier, its bytes by transport, and how it was copied.
type Moved = (Tier, ByTransport, Done);

/// What the parts of one call share.
struct Ongoing<'a> {
    all: &'a [Transfer],
    direction: Direction,
    flight: Flight,
    /// Copies on this node, by range.
    copies: Copies,
    run: Mutex<Run>,
    /// Bytes moved of each range.
    moved: Vec<AtomicU64>,
    /// Why the device did not compute the checksum of a part, although it should.
    unsummed: Mutex<Option<Fault>>,
}

impl Bridge {
    /// Makes a bridge to a device, for files of one client. Runs the self-tests. If they fail on a
    /// device, there is still a bridge, whose calls say why they fail.
    ///
    /// `EINVAL` for options out of range.
    pub async fn open(
        device: Arc<dyn GpuMem>,
        network: Arc<dyn Network>,
        options: Options,
    ) -> Result<Bridge> {
        options.check()?;
        let Hands { workers, part, width, regions, notice, numa, unpinned } =
            Hands::new(&device, &options)?;
        let device_sums = match device.refuses(Tier::GpuRdma) {
            Some(_) if !options.verify_on_gpu && options.local.is_none() => {
                Err("it was not requested".into())
            }
            _ => device.sums(),
        };
        let sums = if options.verify_on_gpu {
            device_sums.clone()
        } else {
            Err("it was not requested".into())
        };
        let local = open_local(&device, &options).await?;
        let engine = Engine {
            device,
            network,
            workers,
            part,
            unpinned,
            consent: options.accept_oss_checksum,
            device_sums,
            local,
            standings: Mutex::new(ByTier::new(|_| Standing::Unavailable(Unavailable::NotTested))),
            next: Default::default(),
        };
        let bridge = Bridge(Arc::new(Inner {
            engine,
            regions,
            notice,
            numa,
            policy: options.policy,
            sums,
            room: Semaphore::new(width),
            width,
            tier_counters: Arc::default(),
            rests: Rests::new(),
            testing: tokio::sync::Mutex::default(),
        }));
        bridge.test_all().await;
        Ok(bridge)
    }

    /// Moves a pattern through every tier and back. The results are the standings from now on.
    /// Tiers that rest after a failure may be used again.
    pub async fn self_test(&self) -> ByTier<Standing> {
        self.0.rests.end();
        self.test_all().await
    }

    async fn test_all(&self) -> ByTier<Standing> {
        let _one = self.0.testing.lock().await;
        // The direct tiers are measured relative to the others, so they come last.
        for tier in Tier::ALL.into_iter().cycle().skip(2).take(Tier::ALL.len()) {
            let standing = selftest::test(&self.0.engine, tier).await;
            self.0.engine.standings.lock()[tier] = standing;
        }
        let mut all = self.0.engine.standings.lock();
        // Both use the same path of the device, so a test does not tell which is faster: the better
        // tier comes first.
        if let (Standing::Available(_), Standing::Available(m)) =
            (&all[Tier::BounceRdma], all[Tier::BounceTcp].clone())
        {
            all[Tier::BounceRdma] = Standing::Available(m);
        }
        drop(all);
        self.standings()
    }

    /// The current standing of each tier.
    pub fn standings(&self) -> ByTier<Standing> {
        self.0.engine.standings.lock().clone()
    }

    /// Bytes of each file by tier, over all calls.
    pub fn tier_counters(&self) -> &Arc<TierCounters> {
        &self.0.tier_counters
    }

    /// What could not be had as wanted, as a text for people: slots, pinned buffers, memory and
    /// processors near the device.
    pub fn notice(&self) -> Option<&str> {
        self.0.notice.as_deref()
    }

    /// The NUMA node of the device, and what was placed there.
    pub fn numa(&self) -> &Numa {
        &self.0.numa
    }

    /// Bytes of the largest part, which is the size of a slot.
    pub fn part_bytes(&self) -> usize {
        self.0.engine.part
    }

    /// Bytes of the client's buffers that are pinned by now.
    pub fn pinned_buffers(&self) -> u64 {
        (self.0.regions.count() * REGION) as u64
    }

    /// Reads ranges of files into the device's memory. When it returns, all bytes are there and a
    /// kernel may use them. The policies of the bridge ([`Options::policy`]) and of the files
    /// ([`Strict`](crate::Strict)) apply in addition to `policy`.
    ///
    /// `EINVAL` when a range does not lie on this device, exceeds its allocation, or overlaps
    /// another one, or no tier meets all policies. `EOPNOTSUPP` when no tier that the policy allows
    /// is available. `EIO` when this happens during the call, or a file ends before its range does.
    /// `ENODEV` when the context is gone. Otherwise errors of the file system.
    pub async fn load(&self, all: &[Transfer], policy: Policy) -> Result<Report, Failed> {
        self.call(Direction::Load, all, policy).await
    }

    /// Writes the device's memory to ranges of files, as [`strake_client::File::write`] does: it is
    /// durable only after an fsync. Everything that writes the memory must have ended before.
    /// Errors as for [`Bridge::load`]; ranges may not overlap in a file.
    pub async fn save(&self, all: &[Transfer], policy: Policy) -> Result<Report, Failed> {
        self.call(Direction::Save, all, policy).await
    }

    /// Whether the standings may have changed: a tier failed, or RDMA has come or gone.
    fn is_changed(&self) -> bool {
        let all = self.standings();
        let lost = |s: &Standing| matches!(s, Standing::Unavailable(Unavailable::Lost(_)));
        let rdma = match &all[Tier::BounceRdma] {
            Standing::Available(_) => Some(true),
            Standing::Unavailable(Unavailable::NoRdma { .. }) => Some(false),
            Standing::Unavailable(_) => None,
        };
        all.iter().any(|(_, s)| lost(s))
            || rdma.is_some_and(|had| had != self.0.engine.network.no_rdma().is_none())
    }

    async fn call(
        &self,
        direction: Direction,
        all: &[Transfer],
        policy: Policy,
    ) -> Result<Report, Failed> {
        let (begun, inner) = (Instant::now(), &self.0);
        if self.is_changed() {
            self.test_all().await;
        }
        let asked = all.iter().fold(0u64, |sum, t| sum.saturating_add(t.len));
        let policy = inner.demanded(all, policy).map_err(|error| {
            let report = Box::new(Report::nothing(direction, policy, asked, all.len()));
            Failed { error, report }
        })?;
        let copies = inner.engine.copies(direction, all, policy).await;
        let mut run = inner.begin(asked, policy, direction, &copies);
        if let Err(e) = inner.check(direction, all) {
            run.refuse(e);
        }
        let ongoing = Ongoing {
            all,
            direction,
            flight: Flight(Arc::default()),
            copies,
            run: Mutex::new(run),
            moved: all.iter().map(|_| AtomicU64::new(0)).collect(),
            unsummed: Mutex::default(),
        };
        if ongoing.run.lock().tier().is_some() {
            let parts = Parts { all, size: inner.engine.part as u64, range: 0, done: 0 };
            let moves =
                stream::iter(parts).map(|p| inner.part(&ongoing, p)).buffer_unordered(inner.width);
            moves.for_each(|()| ready(())).await;
        }
        let ranges = ongoing.moved.iter().map(|n| n.load(Relaxed)).collect();
        let (mut report, outcome) = ongoing.run.into_inner().finish(ranges, begun.elapsed());
        let unsummed = ongoing
            .unsummed
            .into_inner()
            .map(|f| format!("the device did not sum all of the data: {f}"));
        report.not_on_gpu = inner.not_on_gpu(&report).or(unsummed);
        inner.remember(&report);
        match outcome {
            Ok(()) => Ok(report),
            Err(error) => Err(Failed { error, report: Box::new(report) }),
        }
    }
}

/// Splits all ranges into parts that end at multiples of `size` in their files.
struct Parts<'a> {
    all: &'a [Transfer],
    size: u64,
    range: usize,
    /// Bytes of the range that were returned as parts.
    done: u64,
}

impl Iterator for Parts<'_> {
    type Item = Part;
    fn next(&mut self) -> Option<Part> {
        while self.done == self.all.get(self.range)?.len {
            (self.range, self.done) = (self.range + 1, 0);
        }
        let t = &self.all[self.range];
        let offset = t.offset + self.done;
        let len = (self.size - offset % self.size).min(t.len - self.done);
        let part = Part { range: self.range, offset, gpu: t.gpu + self.done, len: len as usize };
        self.done += len;
        Some(part)
    }
}

impl Inner {
    /// Checks everything that can be known to be wrong before anything moves.
    fn check(&self, direction: Direction, all: &[Transfer]) -> Result<()> {
        let inval = |i: usize, m: String| Error::new(Code::Inval, format!("range {i}: {m}"));
        for (i, t) in all.iter().enumerate().filter(|(_, t)| t.len > 0) {
            if t.offset.checked_add(t.len).is_none_or(|end| end > MAX_FILE_SIZE) {
                return Err(inval(
                    i,
                    format!("{} bytes from {} on end beyond the largest file", t.len, t.offset),
                ));
            }
            self.engine
                .device
                .check(t.gpu, t.len)
                .map_err(|f| Error::from(f).context(format!("range {i}")))?;
        }
        let place = |i: usize| match direction {
            Direction::Load => (0, all[i].gpu),
            Direction::Save => (all[i].file.id(), all[i].offset),
        };
        let mut order: Vec<usize> = (0..all.len()).filter(|i| all[*i].len > 0).collect();
        order.sort_by_key(|i| place(*i));
        for w in order.windows(2) {
            let ((a, at), (b, next)) = (place(w[0]), place(w[1]));
            if a == b && next < at + all[w[0]].len {
                let wherein =
                    if direction == Direction::Load { "the device's memory" } else { "the file" };
                return Err(inval(w[1], format!("it overlaps range {} in {wherein}", w[0])));
            }
        }
        Ok(())
    }

    async fn part(&self, call: &Ongoing<'_>, p: Part) {
        let Ok(_one) = self.room.acquire().await else { return };
        let moved = match call.direction {
            Direction::Load => self.load_part(call, &p).await,
            Direction::Save => self.save_part(call, &p).await,
        };
        match moved {
            Ok(Some((tier, by, done))) => {
                if let Some(why) = done.unsummed {
                    call.unsummed.lock().get_or_insert(why);
                }
                let mut run = call.run.lock();
                if done.summed {
                    run.verified(tier, by.sum());
                }
                let staged = done.staged;
                let split = match call.direction {
                    Direction::Load => run.moved(tier, by, staged),
                    Direction::Save => run.saved(tier, by, staged),
                };
                drop(run);
                self.tier_counters.add(call.all[p.range].file.id(), call.direction, &split);
                call.moved[p.range].fetch_add(p.len as u64, Relaxed);
            }
            Ok(None) => {}
            Err(e) => {
                let (t, end) = (&call.all[p.range], p.offset + p.len as u64);
                let place = format!(
                    "range {}: bytes {} to {end} of inode {:#x}",
                    p.range,
                    p.offset,
                    t.file.id()
                );
                call.run.lock().fail(e.context(place));
            }
        }
    }

    /// Returns its tier, its bytes by transport, and how it was copied. `None`: the call has ended.
    async fn load_part(&self, call: &Ongoing<'_>, p: &Part) -> Result<Option<Moved>> {
        loop {
            // Before fetching: the call may have ended.
            let copy = call.copies.of(p.range);
            let Some(tier) = call.run.lock().tier_for(copy.is_some()) else { return Ok(None) };
            let went = match (tier, copy) {
                (Tier::GpuRdma, _) => {
                    let beside =
                        |tier, f: &Fault| call.run.lock().lost(tier, Unavailable::Lost(f.clone()));
                    self.engine.load_direct(&call.flight.0, p.place(call), &beside).await
                }
                (Tier::LocalGds, Some(copy)) => {
                    self.engine.load_local(&call.flight.0, copy, p.place(call)).await
                }
                _ => match self.load_by_host(call, p).await? {
                    Some(moved) => return Ok(Some(moved)),
                    None => continue,
                },
            };
            match went {
                Ok(went) => return Ok(Some(direct_done(tier, went))),
                Err(stop) => self.direct_failed(call, tier, p, stop)?,
            }
        }
    }

    /// As [`Inner::load_part`], over host memory. `None` also when the first remaining tier is a
    /// direct one.
    async fn load_by_host(&self, call: &Ongoing<'_>, p: &Part) -> Result<Option<Moved>> {
        let bufs = call.all[p.range].file.read(p.offset, p.len).await?;
        let got: usize = bufs.iter().map(Buf::len).sum();
        if got < p.len {
            let m = format!(
                "the file ends after {} bytes, within the range to load",
                p.offset + got as u64
            );
            return Err(Error::new(Code::Io, m));
        }
        let came = ByTransport::came(&bufs);
        loop {
            let tier = {
                let mut run = call.run.lock();
                // The fetched bytes are of no use if only a direct tier remains.
                match run.tier_for(call.copies.of(p.range).is_some()) {
                    Some(t) if t.is_straight() => None,
                    _ => run.tier_of(came),
                }
            };
            let Some(tier) = tier else { return Ok(None) };
            let work = Work::Load { from: bufs.clone(), to: p.gpu, sum: self.sums.is_ok() };
            match self.engine.worker().copy(&call.flight.0, tier, work).await {
                Ok(done) => return Ok(Some((tier, came, done))),
                Err(f) => self.tier_failed(call, tier, p, f)?,
            }
        }
    }

    /// As [`Inner::load_part`], for a save.
    async fn save_part(&self, call: &Ongoing<'_>, p: &Part) -> Result<Option<Moved>> {
        loop {
            let Some(mut tier) = call.run.lock().tier() else { return Ok(None) };
            if tier == Tier::GpuRdma && p.offset.is_multiple_of(BLOCK as u64) {
                match self.engine.save_direct(&call.flight.0, p.place(call)).await {
                    Ok(went) => return Ok(Some(direct_done(tier, went))),
                    Err(stop) => self.direct_failed(call, tier, p, stop)?,
                }
                continue;
            }
            if tier == Tier::GpuRdma {
                let run = call.run.lock();
                tier = run.beside(tier).ok_or_else(|| unaligned(p.offset, run.lost_beside()))?;
            }
            let into = self.engine.network.pool().get(p.len).await?;
            let work = Work::Save { from: p.gpu, into, sum: self.sums.is_ok() };
            match self.engine.worker().copy(&call.flight.0, tier, work).await {
                Ok(mut done) => {
                    let Some(saved) = done.saved.take() else { continue };
                    let went = call.all[p.range].file.write(p.offset, saved.freeze()).await?;
                    return Ok(Some((tier, went, done)));
                }
                Err(f) => self.tier_failed(call, tier, p, f)?,
            }
        }
    }

    /// As [`Inner::tier_failed`], for a direct tier, which does not use host memory.
    fn direct_failed(&self, call: &Ongoing<'_>, tier: Tier, p: &Part, stop: Stop) -> Result<()> {
        let rests = matches!(stop, Stop::Want(_));
        match stop {
            Stop::Call(e) => Err(e),
            Stop::Tier(f) => self.tier_failed(call, tier, p, f),
            Stop::Want(f) | Stop::Once(f) => {
                let f = self.engine.device.check(p.gpu, p.len as u64).err().unwrap_or(f);
                if f.is_of_call() {
                    return Err(f.into());
                }
                tracing::warn!("{}: {tier} failed for a call: {f}", self.engine.device.name());
                let why = if rests { Unavailable::Resting(f) } else { Unavailable::Lost(f) };
                call.run.lock().lost(tier, why);
                Ok(())
            }
        }
    }

    /// Notes for later calls which tiers failed for lack of something, and which worked.
    fn remember(&self, report: &Report) {
        let wanted = |s: &Switch| matches!(s.why, Unavailable::Resting(_));
        for (tier, _) in report.by_tier.iter().filter(|(_, bytes)| **bytes > 0) {
            if !report.switches.iter().any(|s| s.from == tier && wanted(s)) {
                self.rests.worked(tier, report.direction);
            }
        }
        for s in &report.switches {
            if let Unavailable::Resting(why) = &s.why {
                self.rests.failed(s.from, report.direction, why.clone(), Instant::now());
            }
        }
    }

    /// Notes that a tier failed for this call, so that another may continue. An error: none would
    /// help.
    fn tier_failed(&self, call: &Ongoing<'_>, tier: Tier, p: &Part, f: Fault) -> Result<()> {
        // A driver's error code does not tell that memory was freed in the meantime.
        let f = self.engine.device.check(p.gpu, p.len as u64).err().unwrap_or(f);
        if f.is_of_call() {
            return Err(f.into());
        }
        // A self-test would not find this: it has one buffer for each worker.
        if let Fault::NotStraight { .. } = f {
            tracing::warn!("{}: {tier} failed for a call: {f}", self.engine.device.name());
            call.run.lock().lost(tier, Unavailable::Resting(f));
        } else {
            self.engine.lose(tier, &f);
            call.run.lock().lost(tier, Unavailable::Lost(f));
        }
        Ok(())
    }

    /// The combined policy of the call, the bridge and the files.
    fn demanded(&self, all: &[Transfer], policy: Policy) -> Result<Policy> {
        let of_bridge =
            both(("the policy of the call", policy), ("that of the bridge", self.policy))?;
        let mut own = all.iter().enumerate().filter(|(_, t)| t.file.policy() != Policy::Prefer);
        own.try_fold(of_bridge, |policy, (i, t)| {
            both(
                (&format!("the policy of the file of range {i}"), t.file.policy()),
                ("the rest of the call's policies", policy),
            )
        })
    }

    /// Begins a call. The tier of copies on this node is unavailable to it if no file has a copy,
    /// or if a file without one may take no other tier.
    fn begin(&self, asked: u64, policy: Policy, direction: Direction, copies: &Copies) -> Run {
        let (mut standings, consent) = (self.engine.standings_of(direction), self.accepts());
        if let Some(why) = &copies.missing {
            let (able, _) = choose(policy, direction, &standings, consent);
            if copies.is_empty() || able.iter().all(|t| *t == Tier::LocalGds) {
                standings[Tier::LocalGds] = Standing::Unavailable(why.clone());
            }
        }
        // A tier that only some files can take does not serve for all.
        let partly = copies.missing.is_some().then_some(Tier::LocalGds);
        self.rests.take_out(
            &mut standings,
            Asked { policy, direction, consent, partly },
            Instant::now(),
        );
        let mut run = Run::begin(asked, policy, direction, &standings, consent);
        if let Some(why) = &copies.missing {
            run.not_for_all(Tier::LocalGds, why.clone());
        }
        run
    }

    /// Whether direct tiers may be used: the device verifies their bytes, or the caller accepts
    /// that it does not.
    fn accepts(&self) -> bool {
        self.engine.consent || self.engine.device_sums.is_ok()
    }

    fn not_on_gpu(&self, report: &Report) -> Option<String> {
        let straight: u64 =
            report.by_tier.iter().filter(|(t, _)| t.is_straight()).map(|(_, n)| n).sum();
        let direct = straight == report.asked && straight > 0;
        if direct { self.engine.device_sums.clone().err() } else { self.sums.clone().err() }
    }
}

impl Part {
    fn place<'a>(&self, call: &'a Ongoing<'_>) -> Place<'a> {
        Place {
            file: &*call.all[self.range].file,
            offset: self.offset,
            gpu: self.gpu,
            len: self.len as u64,
        }
    }
}

async fn open_local(device: &Arc<dyn GpuMem>, options: &Options) -> Result<Option<Local>> {
    let Some(dir) = options.local.clone() else { return Ok(None) };
    let (device, prober, workers) = (device.clone(), options.prober.clone(), options.workers);
    // This may wait for another process.
    let open = tokio::task::spawn_blocking(move || Local::open(&device, &dir, &prober, workers));
    open.await.map_err(|e| Error::new(Code::Io, format!("opening cuFile: {e}")))?.map(Some)
}

fn direct_done(tier: Tier, w: Went) -> Moved {
    let done = Done {
        staged: w.staged,
        saved: None,
        summed: w.summed,
        unsummed: w.unsummed,
        sums: Vec::new(),
    };
    (tier, w.by, done)
}

/// `lost`: the failure of a tier that would have taken it.
fn unaligned(offset: u64, lost: Option<String>) -> Error {
    if let Some(lost) = lost {
        let m = format!(
            "this part begins at {offset} in the file, so it needs a tier over host memory, and \
             none is left; {lost}"
        );
        return Error::new(Code::Io, m);
    }
    let m = format!(
        "storage servers read the device's memory only for parts that begin at a multiple of 4096 \
         in the file, but this one begins at {offset}: allow a tier over host memory beside \
         gpu-rdma"
    );
    Error::new(Code::Inval, m)
}

impl fmt::Debug for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bridge")
            .field("device", &self.0.engine.device.name())
            .field("standings", &self.standings())
            .finish()
    }
}
