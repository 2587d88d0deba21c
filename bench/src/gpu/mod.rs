//! The measurements of `strake gds bench`: in one run, the bridge, the limit of the device itself,
//! and the copy loop that people write by hand.

mod command;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Instant};

pub use command::{BenchArgs, command};
use serde::Serialize;
use strake_client::File;
use strake_gds::{
    Direction, Failed, Fault, GpuMem, MIN_SLOT, Policy, Report, Slot, Tier, Transfer,
    session::{Memory, Session, Setup, Stripes},
};
use strake_proto::{Code, Error, Result, checksum::crc32c, layout::splitmix64};

const MIB: u64 = 1 << 20;
/// Size of each of the two pinned pieces with which the ceiling is measured. There are two so that
/// a copy of one is queued while the other is still being copied.
const PIECE: usize = 4 << 20;
const O_DIRECT: u32 = 0o40000;
const RDWR_CREATE_NEW: u32 = 2 | (libc::O_CREAT | libc::O_EXCL) as u32;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The cluster and the device. The number of workers is set for each row.
    pub setup: Setup,
    /// A file that is created for the run and removed at the end. `EEXIST` if it exists already.
    pub path: String,
    /// The file exists already, and is only loaded.
    pub loads: bool,
    /// Its size, a multiple of 1 MiB. Of an existing file, at most this much is loaded, in whole
    /// MiB.
    pub bytes: u64,
    /// Workers of each row.
    pub threads: Vec<usize>,
    /// For the calls of the bridge.
    pub policy: Policy,
    /// Refuse the run unless all bytes took one and the same tier.
    pub strict: bool,
}

/// Bytes per second, to the device and from it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Rates {
    /// To the device.
    pub load: f64,
    /// From the device; `None`: nothing was saved.
    pub save: Option<f64>,
}

/// The bridge with this number of workers.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Workers, with a thread and a stream each.
    pub threads: usize,
    /// Bytes per second.
    pub rates: Rates,
    /// Rate of a save including the fsync that makes it durable.
    pub save_and_fsync: Option<f64>,
    /// `rates` as parts of the ceiling.
    pub of_ceiling: Rates,
    /// `rates` as multiples of the pageable loop.
    pub of_pageable_loop: Rates,
    /// Which path the loaded bytes took.
    pub loaded: Report,
    /// Which path the saved bytes took.
    pub saved: Option<Report>,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Name of the device.
    pub device: String,
    /// False: the device is host memory, and the figures say nothing about a GPU.
    pub gpu: bool,
    /// Bytes of the file.
    pub bytes: u64,
    /// The file existed already, and was only loaded.
    pub loads: bool,
    /// The policy of the run.
    pub policy: Policy,
    /// Whether one tier was required.
    pub strict: bool,
    /// Copies between pinned host memory and the device, with one stream and nothing else.
    pub ceiling: Rates,
    /// One thread and ordinary memory: read 1 MiB, copy it to the device, wait, repeat; and in the
    /// other direction.
    pub pageable_loop: Rates,
    /// By number of workers.
    pub rows: Vec<Row>,
    /// Why the run was refused; then only the rows until then are present.
    pub refused: Option<String>,
}

/// Why a strict run with these reports is refused: not all bytes took one and the same tier.
pub fn refusal<'a>(reports: impl IntoIterator<Item = &'a Report>) -> Option<String> {
    let mut first: Option<Tier> = None;
    for r in reports {
        if let Some(s) = r.switches.first() {
            let to = s.to.map_or("nothing", Tier::name);
            return Some(format!(
                "the tier changed in the middle of a call, from {} to {to}: {}",
                s.from, s.why
            ));
        }
        for (tier, _) in r.by_tier.iter().filter(|(_, bytes)| **bytes > 0) {
            match first {
                Some(before) if before != tier => {
                    return Some(format!(
                        "some bytes used {before} and others {tier}: choose one with --policy"
                    ));
                }
                _ => first = Some(tier),
            }
        }
    }
    None
}

fn rate(bytes: u64, begun: Instant) -> f64 {
    bytes as f64 / begun.elapsed().as_secs_f64().max(1e-9)
}

/// Runs the measurement. `EINVAL` for an impossible plan; otherwise errors of the session or call.
/// In a strict run, the error of a call that its policy ended becomes the refusal.
pub fn run(plan: &Plan) -> Result<Figures> {
    run_with(plan, Session::open)
}

/// As [`run`], with sessions that the caller opens.
pub fn run_with(plan: &Plan, mut open: impl FnMut(&Setup) -> Result<Session>) -> Result<Figures> {
    if plan.bytes == 0 || !plan.bytes.is_multiple_of(MIB) || plan.threads.is_empty() {
        return Err(Error::new(
            Code::Inval,
            "the size must be a multiple of 1 MiB, and there must be at least one row",
        ));
    }
    let mut figures: Option<Figures> = None;
    let mut known = None;
    for n in &plan.threads {
        let mut setup = plan.setup.clone();
        setup.options.workers = *n;
        let mut bench = Bench::new(open(&setup)?, plan)?;
        if figures.is_none() {
            known = if plan.loads { Some(bench.sums()?) } else { None };
            figures = Some(bench.bare(plan)?);
        }
        let Some(f) = &mut figures else { continue };
        match bench.row(plan, *n, f, known.as_deref()) {
            Ok(row) => f.rows.push(row),
            Err(failed) if plan.strict => f.refused = Some(failed.to_string()),
            Err(failed) => return Err(failed.error),
        }
        let reports = f.rows.iter().flat_map(|r| r.saved.iter().chain([&r.loaded]));
        if plan.strict && f.refused.is_none() {
            f.refused = refusal(reports);
        }
        if f.refused.is_some() {
            break;
        }
    }
    figures.ok_or_else(|| Error::new(Code::Inval, "no row"))
}

/// A session with a file and device memory, both released on drop.
struct Bench {
    session: Session,
    file: Option<Arc<File>>,
    path: String,
    /// The file was created for this run.
    made: bool,
    bytes: u64,
    gpu: u64,
    seed: u64,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.file = None;
        let _ = self.session.device().free(self.gpu);
        if self.made
            && let Err(e) = self.session.unlink(&self.path)
        {
            tracing::warn!("'{}' stays: {e}", self.path);
        }
    }
}

impl Bench {
    fn new(session: Session, plan: &Plan) -> Result<Bench> {
        let gpu = session.device().alloc(plan.bytes)?;
        // Without the client's cache: loaded bytes come from the storage servers.
        let flags = if plan.loads { O_DIRECT } else { RDWR_CREATE_NEW | O_DIRECT };
        // Over all targets, so that no single target limits the result.
        let opened = session
            .open_striped(&plan.path, flags, 0o600, Stripes::ALL)
            .and_then(|f| Ok((if_large(&session, &f, plan)?, f)));
        match opened {
            Ok((bytes, f)) => {
                let (file, path) = (Some(Arc::new(f)), plan.path.clone());
                Ok(Bench { session, file, path, made: !plan.loads, bytes, gpu, seed: 1 })
            }
            Err(e) => {
                let _ = session.device().free(gpu);
                Err(e)
            }
        }
    }

    fn file(&self) -> Result<&Arc<File>> {
        self.file.as_ref().ok_or_else(|| Error::new(Code::BadF, "the file is closed"))
    }

    /// The measurements that do not use the bridge.
    fn bare(&mut self, plan: &Plan) -> Result<Figures> {
        let device = self.session.device().clone();
        let ceiling = Rates {
            load: ceiling(&device, self.gpu, self.bytes, true)?,
            save: Some(ceiling(&device, self.gpu, self.bytes, false)?),
        };
        if self.made {
            self.fill()?;
            let whole = [self.whole()?];
            self.session.save(&whole, Policy::Prefer).map_err(|f| f.error)?;
            self.session.fsync(self.file()?)?;
        }
        Ok(Figures {
            device: device.name(),
            gpu: matches!(plan.setup.memory, Memory::Cuda(_)),
            bytes: self.bytes,
            loads: plan.loads,
            policy: plan.policy,
            strict: plan.strict,
            ceiling,
            pageable_loop: Rates {
                load: self.pageable_loop(true)?,
                save: if self.made { Some(self.pageable_loop(false)?) } else { None },
            },
            rows: Vec::new(),
            refused: None,
        })
    }

    fn whole(&self) -> Result<Transfer> {
        Ok(Transfer { file: self.file()?.clone(), offset: 0, gpu: self.gpu, len: self.bytes })
    }

    /// Fills the device's memory with new bytes; returns their checksums by MiB.
    fn fill(&mut self) -> Result<Vec<u32>> {
        let mut block = vec![0u8; MIB as usize];
        let mut sums = Vec::new();
        for at in (0..self.bytes).step_by(MIB as usize) {
            for word in block.chunks_exact_mut(8) {
                word.copy_from_slice(&splitmix64(&mut self.seed).to_le_bytes());
            }
            self.session.put(self.gpu + at, &block)?;
            sums.push(crc32c(&block));
        }
        Ok(sums)
    }

    /// Checksum of each MiB of the file, as the client reads it.
    fn sums(&self) -> Result<Vec<u32>> {
        let block = |at| Ok(crc32c(&self.session.read(self.file()?, at, MIB as usize)?));
        (0..self.bytes).step_by(MIB as usize).map(block).collect()
    }

    /// One thread, one stream: 1 MiB between the file and ordinary memory, then between that and
    /// the device, and wait.
    fn pageable_loop(&self, load: bool) -> Result<f64> {
        let file = self.file()?;
        let mut block = vec![0; MIB as usize];
        let mut stream = self.session.device().stream()?;
        let begun = Instant::now();
        for at in (0..self.bytes).step_by(MIB as usize) {
            if load {
                block = self.session.read(file, at, MIB as usize)?;
            }
            let gpu = self.gpu + at;
            // SAFETY: the block has as many bytes, and nothing touches it until the stream was
            // drained.
            let given = unsafe {
                if load {
                    stream.load(gpu, block.as_ptr(), block.len())
                } else {
                    stream.save(block.as_mut_ptr(), gpu, block.len())
                }
            };
            let copied = given.and_then(|()| stream.mark()).and_then(|mark| stream.wait(mark));
            stream.drain();
            copied?;
            if !load {
                self.session.write(file, at, &block)?;
            }
        }
        Ok(rate(self.bytes, begun))
    }

    /// Saves new bytes, unless the checksums of the file are known already. Then wipes the memory,
    /// loads the file, and compares the checksums.
    fn row(
        &mut self,
        plan: &Plan,
        threads: usize,
        f: &Figures,
        known: Option<&[u32]>,
    ) -> Result<Row, Failed> {
        let direction = if plan.loads { Direction::Load } else { Direction::Save };
        let all = self.bytes;
        let nothing = |e: Error| Failed {
            error: e,
            report: Box::new(Report::nothing(direction, plan.policy, all, 1)),
        };
        let whole = [self.whole().map_err(nothing)?];
        let (sums, saved, save_and_fsync) = match known {
            Some(sums) => (sums.to_vec(), None, None),
            None => {
                let sums = self.fill().map_err(nothing)?;
                let begun = Instant::now();
                let saved = self.session.save(&whole, plan.policy)?;
                let file = self.file().map_err(nothing)?;
                self.session.fsync(file).map_err(nothing)?;
                (sums, Some(saved), Some(rate(all, begun)))
            }
        };
        self.wipe().map_err(nothing)?;
        let loaded = self.session.load(&whole, plan.policy)?;
        self.compare(&sums).map_err(nothing)?;
        let of = |r: &Report| r.moved() as f64 / r.took.as_secs_f64().max(1e-9);
        let rates = Rates { load: of(&loaded), save: saved.as_ref().map(of) };
        let of_both = |n: Rates, all: Rates| Rates {
            load: n.load / all.load,
            save: n.save.zip(all.save).map(|(n, all)| n / all),
        };
        Ok(Row {
            threads,
            rates,
            save_and_fsync,
            of_ceiling: of_both(rates, f.ceiling),
            of_pageable_loop: of_both(rates, f.pageable_loop),
            loaded,
            saved,
        })
    }

    fn wipe(&self) -> Result<()> {
        let zeros = vec![0; MIB as usize];
        for at in (0..self.bytes).step_by(MIB as usize) {
            self.session.put(self.gpu + at, &zeros)?;
        }
        Ok(())
    }

    fn compare(&self, sums: &[u32]) -> Result<()> {
        let mut block = vec![0; MIB as usize];
        for (i, sum) in sums.iter().enumerate() {
            self.session.get(self.gpu + i as u64 * MIB, &mut block)?;
            if crc32c(&block) != *sum {
                return Err(Error::new(
                    Code::Corrupt,
                    format!("MiB {i} of the loaded data differs from the file"),
                ));
            }
        }
        Ok(())
    }
}

/// How many bytes are measured: of an existing file whole MiB, at least one.
fn if_large(session: &Session, file: &File, plan: &Plan) -> Result<u64> {
    let whole = if plan.loads { session.size(file)? / MIB * MIB } else { plan.bytes };
    if whole == 0 {
        return Err(Error::new(Code::Inval, format!("'{}' is smaller than 1 MiB", plan.path)));
    }
    Ok(whole.min(plan.bytes))
}

/// Two pinned slots of this size, or smaller ones where the limit for locked memory requires it.
fn two_slots(device: &Arc<dyn GpuMem>, mut bytes: usize) -> Result<(usize, [Slot; 2]), Fault> {
    loop {
        let slot = || Slot::new(device, bytes, u64::MAX, &|_, _| {});
        match (slot(), slot()) {
            (Ok(a), Ok(b)) => return Ok((bytes, [a, b])),
            (Err(e), _) | (_, Err(e)) if bytes <= MIN_SLOT => return Err(e),
            _ => bytes /= 2,
        }
    }
}

/// Rate of copies through pinned memory by one stream, in bytes per second.
fn ceiling(device: &Arc<dyn GpuMem>, gpu: u64, bytes: u64, load: bool) -> Result<f64, Fault> {
    let (piece, mut slots) = two_slots(device, PIECE.min(bytes as usize))?;
    // Dropped before the slots: its drop waits.
    let mut stream = device.stream()?;
    let mut once = || {
        let begun = Instant::now();
        let mut marks = [None, None];
        let mut at = 0;
        while at < bytes {
            let (n, which) = (piece.min((bytes - at) as usize), (at as usize / piece) % 2);
            if let Some(mark) = marks[which].take() {
                stream.wait(mark)?;
            }
            let host = slots[which].as_mut_ptr();
            // SAFETY: the slot has `n` bytes, nobody looks at them, and it lives until the stream,
            // dropped first, has been waited for.
            unsafe {
                if load {
                    stream.load(gpu + at, host, n)?
                } else {
                    stream.save(host, gpu + at, n)?
                }
            }
            marks[which] = Some(stream.mark()?);
            at += n as u64;
        }
        for mark in marks.into_iter().flatten() {
            stream.wait(mark)?;
        }
        Ok::<_, Fault>(rate(bytes, begun))
    };
    // The first run warms up.
    once()?;
    once()
}
