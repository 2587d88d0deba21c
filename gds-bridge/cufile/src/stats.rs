//! Statistics of the calls. There are two: the real figures of our files, always, from the bridge's
//! reports; and cuFile's own counters, as far as they apply here, while a program has turned them
//! on.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde_json::{Value, json};
use strake_fabric::ByTransport;
use strake_gds::{ByTier, Checksums, Report, Tier};

use crate::{
    abi::{self, Counter, GPUS, Level1, Level2, Level3, PerGpu},
    errors::{CallError, Done},
    set,
};

/// The direction of a call, as a program sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    Write,
}

/// The kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// With or without a stream.
    Call,
    Vector,
    Batch,
}

/// One call that ended.
pub struct Ended<'a> {
    pub access: Access,
    pub by: By,
    /// Number and UUID of the memory's device; `None`: host memory, or the call failed before that
    /// was known.
    pub device: Option<(u32, [u8; 16])>,
    pub unaligned: bool,
    pub took: Duration,
    pub outcome: Done<usize>,
    /// The reports of all attempts.
    pub reports: &'a [Report],
    /// Bytes between host memory and the file.
    pub host: u64,
}

/// Totals of one direction.
#[derive(Default)]
struct Truth {
    calls: Counter,
    /// Bytes that the calls returned to programs.
    bytes: u64,
    by_tier: ByTier<u64>,
    by_transport: ByTransport,
    staged: u64,
    host: u64,
    /// Bytes by where they were verified: `gpu`, `host` or `none`.
    checksums: BTreeMap<&'static str, u64>,
    switches: u64,
    unavailable: BTreeMap<Tier, String>,
}

#[derive(Default)]
struct All {
    truth: [Truth; 2],
    /// Calls that went to the real library.
    passed_on: BTreeMap<&'static str, u64>,
    level: i32,
    /// When counting started; `None`: the counters are off.
    since: Option<Instant>,
    counted: Duration,
    counters: Level3,
}

/// Both kinds of statistics.
#[derive(Default)]
pub struct Stats(Mutex<All>);

/// Selects the counter of a control call.
pub type Place = fn(&mut Level1) -> &mut Counter;

fn count<T>(c: &mut Counter, outcome: &Done<T>) {
    if outcome.is_ok() { c.ok += 1 } else { c.err += 1 }
}

fn per_second(n: u64, us: u64) -> u64 {
    if us == 0 { 0 } else { (u128::from(n) * 1_000_000 / u128::from(us)) as u64 }
}

/// The index of a size in a histogram of powers of two, in KiB.
fn place(bytes: usize) -> usize {
    (usize::BITS - (bytes >> 10).leading_zeros()).min(31) as usize
}

impl Truth {
    fn add(&mut self, e: &Ended<'_>) {
        count(&mut self.calls, &e.outcome);
        self.bytes += e.outcome.map_or(0, |n| n as u64);
        self.host += e.host;
        for r in e.reports {
            for (tier, n) in r.by_tier.iter() {
                self.by_tier[tier] += n;
            }
            for (transport, n) in r.by_transport.iter() {
                self.by_transport.add(transport, n);
            }
            self.staged += r.staged;
            self.switches += r.switches.len() as u64;
            let verified = match r.checksums {
                Checksums::Gpu => "gpu",
                Checksums::Host => "host",
                Checksums::None => "none",
            };
            *self.checksums.entry(verified).or_default() += r.moved();
            self.unavailable
                .extend(r.unavailable.iter().map(|(tier, why)| (*tier, why.to_string())));
        }
    }

    fn json(&self) -> Value {
        let unavailable: BTreeMap<&str, &String> =
            self.unavailable.iter().map(|(t, why)| (t.name(), why)).collect();
        let transports: BTreeMap<&str, u64> =
            self.by_transport.iter().map(|(transport, n)| (transport.name(), n)).collect();
        json!({
            "calls": self.calls.ok, "failed": self.calls.err, "bytes": self.bytes, "by_tier": self.by_tier, "by_transport": transports,
            "staged": self.staged, "host_memory": self.host, "checksums": self.checksums, "switches": self.switches,
            "unavailable": unavailable,
        })
    }
}

/// The path of a call in cuFile's terms: straight to GPU memory (`P2p`), by nvidia-fs (`Nvfs`), or
/// any other (`Posix`).
enum Transport {
    P2p,
    Nvfs,
    Posix,
}

fn transport(e: &Ended<'_>) -> Transport {
    let sum = |tier: Tier| e.reports.iter().map(|r| r.by_tier[tier]).sum::<u64>();
    let all: u64 = e.reports.iter().map(Report::moved).sum();
    match () {
        () if all > 0 && sum(Tier::GpuRdma) == all => Transport::P2p,
        () if all > 0 && sum(Tier::LocalGds) == all => Transport::Nvfs,
        () => Transport::Posix,
    }
}

fn add_call(l: &mut Level2, e: &Ended<'_>) {
    let (n, us) = (e.outcome.unwrap_or(0), e.took.as_micros() as u64);
    let b = &mut l.basic;
    let (calls, bytes, lat) = match (e.by, e.access) {
        (By::Vector, Access::Read) => (&mut b.readv_ops, &mut b.readv_bytes, &mut b.readv_lat_sum),
        (By::Vector, Access::Write) => {
            (&mut b.writev_ops, &mut b.writev_bytes, &mut b.writev_lat_sum)
        }
        (By::Batch, access) => {
            count(&mut b.batch_processed_ops, &e.outcome);
            count(&mut b.batch_posix_processed_ops, &e.outcome);
            let read = access == Access::Read;
            (
                &mut b.batch_complete_ops,
                if read { &mut b.batch_read_bytes } else { &mut b.batch_write_bytes },
                &mut b.batch_completion_lat_sum,
            )
        }
        (By::Call, Access::Read) => (&mut b.read_ops, &mut b.read_bytes, &mut b.read_lat_sum),
        (By::Call, Access::Write) => (&mut b.write_ops, &mut b.write_bytes, &mut b.write_lat_sum),
    };
    count(calls, &e.outcome);
    *bytes += n as u64;
    *lat += us;
    let sizes = if e.access == Access::Read { &mut l.read_sizes } else { &mut l.write_sizes };
    if e.outcome.is_ok() {
        sizes[place(n)] += 1;
    }
}

fn add_gpu(g: &mut PerGpu, e: &Ended<'_>) {
    let (n, us, ok) = (e.outcome.unwrap_or(0) as u64, e.took.as_micros() as u64, e.outcome.is_ok());
    let (all, err, bytes, time, unaligned, transports) = match e.access {
        Access::Read => (
            &mut g.reads,
            &mut g.reads_err,
            &mut g.read_bytes,
            &mut g.read_duration,
            &mut g.unaligned_reads,
            [&mut g.p2p_reads, &mut g.nvfs_reads, &mut g.posix_reads],
        ),
        Access::Write => (
            &mut g.writes,
            &mut g.writes_err,
            &mut g.write_bytes,
            &mut g.write_duration,
            &mut g.unaligned_writes,
            [&mut g.p2p_writes, &mut g.nvfs_writes, &mut g.posix_writes],
        ),
    };
    *all += 1;
    *bytes += n;
    *time += us;
    *unaligned += u64::from(e.unaligned);
    if ok {
        let [p2p, nvfs, posix] = transports;
        *match transport(e) {
            Transport::P2p => p2p,
            Transport::Nvfs => nvfs,
            Transport::Posix => posix,
        } += 1;
    } else {
        *err += 1;
    }
}

impl All {
    fn counts(&self) -> bool {
        self.since.is_some() && self.level > 0
    }

    fn gpu(&mut self, (device, uuid): (u32, [u8; 16])) -> Option<&mut PerGpu> {
        let g =
            self.counters.per_gpu.get_mut(device as usize).filter(|_| (device as usize) < GPUS)?;
        g.uuid = uuid;
        self.counters.gpus = self.counters.gpus.max(device + 1);
        Some(g)
    }

    /// The counters with their derived values: rates and averages.
    fn level3(&self) -> Level3 {
        let mut all = self.counters;
        let us =
            (self.counted + self.since.map_or(Duration::ZERO, |s| s.elapsed())).as_micros() as u64;
        let b = &mut all.detailed.basic;
        let calls = |c: Counter| c.ok + c.err;
        let avg = |sum: u64, c: Counter| sum.checked_div(calls(c)).unwrap_or(0);
        b.read_bw = per_second(b.read_bytes, b.read_lat_sum);
        b.write_bw = per_second(b.write_bytes, b.write_lat_sum);
        b.readv_bw = per_second(b.readv_bytes, b.readv_lat_sum);
        b.writev_bw = per_second(b.writev_bytes, b.writev_lat_sum);
        b.batch_read_bw = per_second(b.batch_read_bytes, b.batch_completion_lat_sum);
        b.batch_write_bw = per_second(b.batch_write_bytes, b.batch_completion_lat_sum);
        b.read_lat_avg = avg(b.read_lat_sum, b.read_ops);
        b.write_lat_avg = avg(b.write_lat_sum, b.write_ops);
        b.readv_lat_avg = avg(b.readv_lat_sum, b.readv_ops);
        b.writev_lat_avg = avg(b.writev_lat_sum, b.writev_ops);
        b.batch_submit_lat_avg = avg(b.batch_submit_lat_sum, b.batch_submit_ops);
        b.batch_completion_lat_avg = avg(b.batch_completion_lat_sum, b.batch_complete_ops);
        b.read_ops_per_sec = per_second(calls(b.read_ops), us);
        b.write_ops_per_sec = per_second(calls(b.write_ops), us);
        b.readv_ops_per_sec = per_second(calls(b.readv_ops), us);
        b.writev_ops_per_sec = per_second(calls(b.writev_ops), us);
        b.batch_submit_ops_per_sec = per_second(calls(b.batch_submit_ops), us);
        b.batch_complete_ops_per_sec = per_second(calls(b.batch_complete_ops), us);
        for g in &mut all.per_gpu {
            g.read_bw = per_second(g.read_bytes, g.read_duration);
            g.write_bw = per_second(g.write_bytes, g.write_duration);
            g.read_utilization = (per_second(g.read_duration, us) / 10_000).min(100);
            g.write_utilization = (per_second(g.write_duration, us) / 10_000).min(100);
        }
        all
    }
}

impl Stats {
    pub fn ended(&self, e: &Ended<'_>) {
        let mut all = self.0.lock();
        all.truth[e.access as usize].add(e);
        if !all.counts() {
            return;
        }
        add_call(&mut all.counters.detailed, e);
        if let Some(device) = e.device
            && let Some(g) = all.gpu(device)
        {
            add_gpu(g, e);
        }
    }

    /// A control call ended.
    pub fn control<T>(&self, at: Place, outcome: &Done<T>) {
        let mut all = self.0.lock();
        if all.counts() {
            count(at(&mut all.counters.detailed.basic), outcome);
        }
    }

    /// A batch was submitted.
    pub fn submitted(&self, entries: usize, took: Duration, outcome: &Done<()>) {
        let mut all = self.0.lock();
        if !all.counts() {
            return;
        }
        let b = &mut all.counters.detailed.basic;
        count(&mut b.batch_submit_ops, outcome);
        count(&mut b.batch_total_submit_ops, outcome);
        b.batch_submit_lat_sum += took.as_micros() as u64;
        if outcome.is_ok() {
            b.batch_enqueued_ops.ok += entries as u64;
            b.batch_posix_enqueued_ops.ok += entries as u64;
        }
    }

    /// Memory of a device was registered (with its size) or deregistered.
    pub fn buffer(
        &self,
        device: Option<(u32, [u8; 16])>,
        registered: Option<u64>,
        outcome: &Done<()>,
    ) {
        let at: Place = if registered.is_some() {
            |b| &mut b.buf_register_ops
        } else {
            |b| &mut b.buf_deregister_ops
        };
        self.control(at, outcome);
        let mut all = self.0.lock();
        if !all.counts() {
            return;
        }
        let Some(g) = device.and_then(|d| all.gpu(d)) else { return };
        match (registered, outcome.is_ok()) {
            (Some(bytes), ok) => {
                g.mmap += 1;
                *(if ok { &mut g.mmap_ok } else { &mut g.mmap_err }) += 1;
                g.reg_bytes += if ok { bytes } else { 0 };
            }
            (None, ok) => g.mmap_free += u64::from(ok),
        }
    }

    /// A call went to the real library.
    pub fn passed_on(&self, what: &'static str) {
        *self.0.lock().passed_on.entry(what).or_default() += 1;
    }

    pub fn set_level(&self, level: i32) -> Done<()> {
        if !(0..=3).contains(&level) {
            return Err(CallError::Op(abi::INVALID_VALUE));
        }
        self.0.lock().level = level;
        Ok(())
    }

    pub fn level(&self) -> i32 {
        self.0.lock().level
    }

    pub fn start(&self) {
        let mut all = self.0.lock();
        all.since = all.since.or_else(|| Some(Instant::now()));
    }

    pub fn stop(&self) {
        let mut all = self.0.lock();
        if let Some(since) = all.since.take() {
            all.counted += since.elapsed();
        }
    }

    pub fn reset(&self) {
        let mut all = self.0.lock();
        all.counters = Level3::default();
        all.counted = Duration::ZERO;
        all.since = all.since.map(|_| Instant::now());
    }

    /// The counters, if the current level is at least `at_least`.
    pub fn level3(&self, at_least: i32) -> Done<Level3> {
        let all = self.0.lock();
        if all.level < at_least { Err(CallError::Op(abi::INVALID_VALUE)) } else { Ok(all.level3()) }
    }

    /// The real figures, for people and tests.
    pub fn json(&self) -> Value {
        let all = self.0.lock();
        json!({
            "version": 1, "pid": std::process::id(), "read": all.truth[0].json(), "write": all.truth[1].json(), "passed_on": all.passed_on,
        })
    }
}

/// Copies counters that begin with a [`Level1`] to the program, in the layout of the version that
/// it is told.
///
/// # Safety
/// `to` is null or has space for the counters of that version.
pub unsafe fn put<T: Copy>(to: *mut T, value: &T) -> Done<()> {
    if to.is_null() {
        return Err(CallError::Op(abi::INVALID_VALUE));
    }
    let new = size_of::<Level1>();
    let first = if set::version() < abi::VECTORS_SINCE { abi::OLD_LEVEL1 } else { new };
    let (from, to) = (std::ptr::from_ref(value).cast::<u8>(), to.cast::<u8>());
    // SAFETY: the ranges are within the value, and the program has space for its version's
    // counters.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, first);
        std::ptr::copy_nonoverlapping(from.add(new), to.add(first), size_of::<T>() - new);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(access: Access, by: By, outcome: Done<usize>) -> Ended<'static> {
        let took = Duration::from_micros(500);
        Ended {
            access,
            by,
            device: Some((1, [7; 16])),
            unaligned: true,
            took,
            outcome,
            reports: &[],
            host: 0,
        }
    }

    #[test]
    fn counters_count_only_while_they_are_wanted_and_the_truth_always() {
        let s = Stats::default();
        s.ended(&ended(Access::Read, By::Call, Ok(4096)));
        s.set_level(3).unwrap();
        s.ended(&ended(Access::Read, By::Call, Ok(4096)));
        s.start();
        s.ended(&ended(Access::Read, By::Call, Ok(1 << 20)));
        s.ended(&ended(Access::Read, By::Call, Err(CallError::Os(5))));
        s.ended(&ended(Access::Write, By::Batch, Ok(10)));
        s.stop();
        s.ended(&ended(Access::Read, By::Call, Ok(4096)));
        let l = s.level3(3).unwrap();
        let b = l.detailed.basic;
        assert_eq!(
            (b.read_ops, b.read_bytes, b.write_ops),
            (Counter { ok: 1, err: 1 }, 1 << 20, Counter::default())
        );
        assert_eq!(
            (b.batch_complete_ops.ok, b.batch_write_bytes, b.read_lat_sum, b.read_lat_avg),
            (1, 10, 1000, 500)
        );
        assert_eq!(b.read_bw, (1 << 20) * 1000, "bytes by the time that the calls took");
        assert_eq!((l.detailed.read_sizes[11], l.detailed.write_sizes[0], l.gpus), (1, 1, 2));
        let g = l.per_gpu[1];
        assert_eq!(
            (g.uuid, g.reads, g.posix_reads, g.nvfs_reads, g.p2p_reads, g.reads_err),
            ([7; 16], 2, 1, 0, 0, 1)
        );
        assert_eq!((g.writes, g.posix_writes, g.unaligned_writes), (1, 1, 1));
        let j = s.json();
        assert_eq!(
            (j["read"]["calls"].as_u64(), j["read"]["bytes"].as_u64()),
            (Some(4), Some((1 << 20) + 3 * 4096))
        );
        s.reset();
        assert_eq!(s.level3(3).unwrap().detailed.basic, Level1::default());
        assert_eq!(s.json()["read"]["failed"].as_u64(), Some(1));
    }

    /// A call counts as direct only if all of its bytes were.
    #[test]
    fn a_call_is_as_straight_as_its_least_straight_byte() {
        let report = |by: &[(Tier, u64)]| {
            let mut r =
                Report::nothing(strake_gds::Direction::Load, strake_gds::Policy::Prefer, 4096, 1);
            by.iter().for_each(|(tier, n)| r.by_tier[*tier] = *n);
            r
        };
        let (rdma, local, bounce) = (Tier::GpuRdma, Tier::LocalGds, Tier::BounceTcp);
        for (reports, want) in [
            (vec![report(&[(rdma, 4096)])], (1, 0, 0)),
            (vec![report(&[(local, 4096)])], (0, 1, 0)),
            (vec![report(&[(rdma, 4095), (bounce, 1)])], (0, 0, 1)),
            (vec![report(&[(rdma, 2048), (local, 2048)])], (0, 0, 1)),
            (vec![report(&[(rdma, 4096)]), report(&[(Tier::Pageable, 1)])], (0, 0, 1)),
            (vec![report(&[(local, 1)]), report(&[(local, 1)])], (0, 1, 0)),
            (vec![report(&[])], (0, 0, 1)),
        ] {
            let s = Stats::default();
            s.set_level(3).unwrap();
            s.start();
            s.ended(&Ended { reports: &reports, ..ended(Access::Read, By::Call, Ok(4096)) });
            let g = s.level3(3).unwrap().per_gpu[1];
            assert_eq!((g.p2p_reads, g.nvfs_reads, g.posix_reads), want, "{reports:?}");
        }
    }

    #[test]
    fn levels_are_0_to_3_and_what_is_not_kept_is_not_told() {
        let s = Stats::default();
        assert!(s.set_level(4).is_err() && s.set_level(-1).is_err() && s.level3(1).is_err());
        s.set_level(1).unwrap();
        assert!(s.level3(1).is_ok() && s.level3(2).is_err() && s.level() == 1);
    }

    #[test]
    fn sizes_go_to_powers_of_two() {
        assert_eq!([0, 1023, 1024, 2048, 4096, 1 << 20].map(place), [0, 0, 1, 2, 3, 11]);
        assert_eq!(place(usize::MAX), 31);
    }
}
