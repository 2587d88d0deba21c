//! Calls: many ranges of many files, split into parts, to the device or from it.

use std::{
    fmt,
    future::ready,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Instant,
};

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use strake_fabric::{Buf, ByRoad, REGION};
use strake_proto::{Code, Error, Result, checksum::BLOCK, layout::MAX_FILE_SIZE};
use tokio::sync::Semaphore;

use crate::{
    ByTier, Direction, Failed, FileIo, Network, Numa, Policy, Report, Switch, Tier, Unavailable,
    copier::{Call, Copier, Done, Flight, Work},
    direct::{Place, Stop, Went},
    file::both,
    local::{Copies, Local},
    mem::{Fault, GpuMem},
    numa::Placing,
    pins::{MIN_SLOT, Pins, Regions},
    plan::{Measured, Run, Standing, choose},
    rest::{Asked, Rests},
    selftest,
    tier_counters::TierCounters,
};

/// Where the kernel describes the machine.
pub(crate) const SYSFS: &str = "/sys";

/// Options of a bridge. The defaults are for one device.
#[derive(Clone, Debug)]
pub struct Options {
    /// Threads with a stream each, 1 to 64.
    pub workers: usize,
    /// Parts that each worker has under way, and its slots; 2 to 16.
    pub slots: usize,
    /// Largest part, bytes: a power of two from 256 KiB to 4 MiB.
    pub slot_bytes: usize,
    /// Limit of host memory that all bridges of the process have pinned when this one pins more, in
    /// bytes; memory that several use counts once. `None`: half of `RLIMIT_MEMLOCK`, or 512 MiB for
    /// this bridge alone where that is unlimited.
    pub pinned_limit: Option<u64>,
    /// Allows `GpuRdma` and `LocalGds` although the device does not verify their bytes: those are
    /// only verified at the storage server, or when the copy was made.
    pub accept_oss_checksum: bool,
    /// The device computes checksums of what it received and sent, and these are compared with the
    /// host's. This costs a part of the device's and the processor's time. Where the device cannot,
    /// reports say so.
    pub verify_on_gpu: bool,
    /// The tiers that bytes may take, in addition to the policy of each call.
    pub policy: Policy,
    /// Folder with copies of sealed files on this node, for `LocalGds`.
    pub local: Option<PathBuf>,
    /// The program that opens cuFile before this process does: `strake`, by its path or name.
    pub prober: PathBuf,
    /// Where the kernel tells which memory and processors are near the device. A folder other than
    /// `/sys` is for tests.
    pub sysfs: PathBuf,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            workers: 4,
            slots: 3,
            slot_bytes: REGION,
            pinned_limit: None,
            accept_oss_checksum: false,
            verify_on_gpu: false,
            policy: Policy::Prefer,
            local: None,
            prober: "strake".into(),
            sysfs: SYSFS.into(),
        }
    }
}

impl Options {
    fn check(&self) -> Result<()> {
        let sizes = MIN_SLOT..=REGION;
        let what = match self {
            o if !(1..=64).contains(&o.workers) => "workers must be 1 to 64",
            o if !(2..=16).contains(&o.slots) => "slots must be 2 to 16",
            o if !sizes.contains(&o.slot_bytes) || !o.slot_bytes.is_power_of_two() => {
                "slot_bytes must be a power of two from 256 KiB to 4 MiB"
            }
            _ => return Ok(()),
        };
        Err(Error::new(Code::Inval, what))
    }
}

/// A range of a file, and where it lies in the device's memory.
#[derive(Clone)]
pub struct Transfer {
    /// The file.
    pub file: Arc<dyn FileIo>,
    /// First byte in the file.
    pub offset: u64,
    /// First byte in the device's memory.
    pub gpu: u64,
    /// Bytes.
    pub len: u64,
}

/// Moves bytes between files and one device. Clones are the same bridge. Must be dropped where it
/// is allowed to block for a moment.
#[derive(Clone)]
pub struct Bridge(Arc<Inner>);

pub(crate) struct Inner {
    pub device: Arc<dyn GpuMem>,
    pub network: Arc<dyn Network>,
    pub workers: Vec<Copier>,
    /// Largest part, bytes.
    pub part: usize,
    /// Why no memory is pinned.
    pub unpinned: Option<Fault>,
    regions: Arc<Regions>,
    notice: Option<String>,
    numa: Numa,
    pub consent: bool,
    policy: Policy,
    /// Whether the device verifies copied parts; otherwise the reason why not.
    sums: Result<(), String>,
    /// Whether the device can compute checksums of its memory; otherwise the reason why not. Parts
    /// on a direct path, which does not use host memory, are always verified by the device where it
    /// can.
    pub device_sums: Result<(), String>,
    /// Reads copies on this node; `None`: no folder with copies was named.
    pub local: Option<Local>,
    /// Limits the parts under way, over all calls.
    room: Semaphore,
    width: usize,
    next: AtomicUsize,
    standings: Mutex<ByTier<Standing>>,
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
type Moved = (Tier, ByRoad, Done);

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
        let bridge = Bridge(Arc::new(Inner {
            device,
            network,
            workers,
            part,
            unpinned,
            regions,
            notice,
            numa,
            consent: options.accept_oss_checksum,
            policy: options.policy,
            sums,
            device_sums,
            local,
            room: Semaphore::new(width),
            width,
            next: AtomicUsize::new(0),
            standings: Mutex::new(ByTier::new(|_| Standing::Unavailable(Unavailable::NotTested))),
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
            let standing = selftest::test(&self.0, tier).await;
            self.0.standings.lock()[tier] = standing;
        }
        let mut all = self.0.standings.lock();
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
        self.0.standings.lock().clone()
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
        self.0.part
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
            || rdma.is_some_and(|had| had != self.0.network.no_rdma().is_none())
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
        let copies = inner.copies(direction, all, policy).await;
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
            let parts = Parts { all, size: inner.part as u64, range: 0, done: 0 };
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
            self.device
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
                    self.load_direct(&call.flight.0, p.place(call), &beside).await
                }
                (Tier::LocalGds, Some(copy)) => {
                    self.load_local(&call.flight.0, copy, p.place(call)).await
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
        let came = ByRoad::came(&bufs);
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
            match self.worker().copy(&call.flight.0, tier, work).await {
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
                match self.save_direct(&call.flight.0, p.place(call)).await {
                    Ok(went) => return Ok(Some(direct_done(tier, went))),
                    Err(stop) => self.direct_failed(call, tier, p, stop)?,
                }
                continue;
            }
            if tier == Tier::GpuRdma {
                let run = call.run.lock();
                tier = run.beside(tier).ok_or_else(|| unaligned(p.offset, run.lost_beside()))?;
            }
            let into = self.network.pool().get(p.len).await?;
            let work = Work::Save { from: p.gpu, into, sum: self.sums.is_ok() };
            match self.worker().copy(&call.flight.0, tier, work).await {
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
                let f = self.device.check(p.gpu, p.len as u64).err().unwrap_or(f);
                if f.is_of_call() {
                    return Err(f.into());
                }
                tracing::warn!("{}: {tier} failed for a call: {f}", self.device.name());
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

    /// Makes a tier unavailable until a self-test passes.
    pub fn lose(&self, tier: Tier, why: &Fault) {
        tracing::warn!("{}: {tier} failed: {why}", self.device.name());
        self.standings.lock()[tier] = Standing::Unavailable(Unavailable::Lost(why.clone()));
    }

    pub fn is_available(&self, tier: Tier) -> bool {
        matches!(self.standings.lock()[tier], Standing::Available(_))
    }

    /// Notes that a tier failed for this call, so that another may continue. An error: none would
    /// help.
    fn tier_failed(&self, call: &Ongoing<'_>, tier: Tier, p: &Part, f: Fault) -> Result<()> {
        // A driver's error code does not tell that memory was freed in the meantime.
        let f = self.device.check(p.gpu, p.len as u64).err().unwrap_or(f);
        if f.is_of_call() {
            return Err(f.into());
        }
        // A self-test would not find this: it has one buffer for each worker.
        if let Fault::NotStraight { .. } = f {
            tracing::warn!("{}: {tier} failed for a call: {f}", self.device.name());
            call.run.lock().lost(tier, Unavailable::Resting(f));
        } else {
            self.lose(tier, &f);
            call.run.lock().lost(tier, Unavailable::Lost(f));
        }
        Ok(())
    }

    /// The standings for a direction: if the device computes no checksums, nothing is saved
    /// directly from its memory.
    pub fn standings_of(&self, direction: Direction) -> ByTier<Standing> {
        let mut all = self.standings.lock().clone();
        if let (Direction::Save, Standing::Available(_), Err(why)) =
            (direction, &all[Tier::GpuRdma], &self.device_sums)
        {
            all[Tier::GpuRdma] = Standing::Unavailable(Unavailable::NoSums { why: why.clone() });
        }
        if let (Direction::Save, Standing::Available(_)) = (direction, &all[Tier::LocalGds]) {
            all[Tier::LocalGds] = Standing::Unavailable(Unavailable::LoadsOnly);
        }
        all
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
        let (mut standings, consent) = (self.standings_of(direction), self.accepts());
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

    /// The folder for copies on this node.
    pub fn folder(&self) -> Option<&Path> {
        self.local.as_ref().map(Local::dir)
    }

    /// Whether direct tiers may be used: the device verifies their bytes, or the caller accepts
    /// that it does not.
    fn accepts(&self) -> bool {
        self.consent || self.device_sums.is_ok()
    }

    fn not_on_gpu(&self, report: &Report) -> Option<String> {
        let straight: u64 =
            report.by_tier.iter().filter(|(t, _)| t.is_straight()).map(|(_, n)| n).sum();
        let direct = straight == report.asked && straight > 0;
        if direct { self.device_sums.clone().err() } else { self.sums.clone().err() }
    }

    /// What the self-test of the bounce tier measured, or else that of the pageable tier.
    pub fn bounce(&self) -> Option<Measured> {
        let all = self.standings.lock();
        [Tier::BounceTcp, Tier::Pageable].into_iter().find_map(|t| match &all[t] {
            Standing::Available(m) => Some(*m),
            Standing::Unavailable(_) => None,
        })
    }

    /// The next worker in turn.
    pub fn worker(&self) -> &Copier {
        &self.workers[self.next.fetch_add(1, Relaxed) % self.workers.len()]
    }

    /// A copy by one worker, for self-tests.
    pub async fn copy_by(
        &self,
        worker: usize,
        call: &Arc<Call>,
        tier: Tier,
        work: Work,
    ) -> Result<Option<strake_fabric::BufMut>, Fault> {
        Ok(self.workers[worker].copy(call, tier, work).await?.saved)
    }
}

/// The workers and memory of a bridge.
struct Hands {
    workers: Vec<Copier>,
    /// Largest part, bytes.
    part: usize,
    /// Limit of parts under way.
    width: usize,
    regions: Arc<Regions>,
    notice: Option<String>,
    numa: Numa,
    /// Why no memory is pinned.
    unpinned: Option<Fault>,
}

impl Hands {
    /// Pinned memory and threads, near the device if possible.
    fn new(device: &Arc<dyn GpuMem>, options: &Options) -> Result<Hands> {
        let shape = (options.workers, options.slots, options.slot_bytes);
        let placing = Placing::of(&options.sysfs, device.pci());
        let near: (_, &dyn Fn(*mut u8, usize)) =
            (placing.moves_to(), &|start, len| placing.prepare(start, len));
        let pins = Pins::new(device, shape, options.pinned_limit, near);
        let (slots, part, regions, less, unpinned) = match pins {
            Ok(p) => (p.slots, p.slot_bytes, p.regions, p.notice, None),
            Err(e) => {
                let none = (0..options.workers).map(|_| Vec::new()).collect();
                (
                    none,
                    MIN_SLOT,
                    Regions::none(device),
                    Some(format!("nothing is pinned: {e}")),
                    Some(e),
                )
            }
        };
        let width = slots.iter().map(|s| s.len().max(2)).sum();
        let at: Vec<_> = slots.iter().flatten().map(|s| s.bytes().as_ptr()).collect();
        let start = |slots| Copier::start(device.clone(), slots, regions.clone(), placing.cpus());
        let started = slots.into_iter().map(start).collect::<Result<Vec<_>>>()?;
        let (workers, against): (Vec<_>, Vec<_>) = started.into_iter().unzip();
        let (numa, unplaced) = placing.done(&at, &against);
        let said: Vec<String> = less.into_iter().chain(unplaced).collect();
        let notice = (!said.is_empty()).then(|| said.join("; "));
        Ok(Hands { workers, part, width, regions, notice, numa, unpinned })
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
            .field("device", &self.0.device.name())
            .field("standings", &self.standings())
            .finish()
    }
}
