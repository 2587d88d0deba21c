//! `strake bench`: compares the file system with the limits of this machine, both measured in the
//! same run.

mod limits;
mod machine;
#[cfg(feature = "fuser")]
mod memory;
#[cfg(feature = "fuser")]
pub mod memory_fs;
mod plans;
mod report;
mod scale;
mod series;
mod stats;
mod subject;
mod through_client;
mod through_mount;
mod transports;

use std::{
    cell::Cell,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use limits::Pattern;
use machine::{Cost, Meter};
#[cfg(feature = "fuser")]
pub use memory::{MemoryArgs, serve as memory_mount};
use plans::{
    APPENDS, DEVICE_RANDOM, DEVICE_READ, DEVICE_WRITE, OF_FUSE, Plan, ROUND_TRIPS, SOCKET,
    SOCKET_WRITE, plans,
};
#[cfg(feature = "fuser")]
use plans::{FUSE_READ, FUSE_READ_4, FUSE_WRITE};
use scale::{JOBS, MIB, Scale};
use series::{Row, Series};
use strake_proto::{Code, Error, Result};
use strake_term::Progress;
pub use subject::Subject;
use transports::{OwnMount, Transport};

#[allow(missing_docs, reason = "clap shows what is written here as the help of the command")]
#[derive(Args)]
pub struct BenchArgs {
    /// Folder of a running local cluster (see `strake up`).
    #[arg(long, default_value = "strake-cluster")]
    dir: PathBuf,
    /// Bytes of the large-file rows, in MiB; at least one for each of four readers.
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(4..=1 << 24))]
    size_mib: u64,
    /// Files of the create, stat and unlink rows; at least one for each job.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(JOBS..=1 << 32))]
    files: u64,
    /// Random reads per run; at least one for each job.
    #[arg(long, default_value_t = 40_000, value_parser = clap::value_parser!(u64).range(JOBS..=1 << 40))]
    random_ops: u64,
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Measure only rows whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Measure the mount rows through the bench's own mounts with these transports, in turn in
    /// every run: dev, fuser or dev,fuser (fuser in programs built with `--features fuser`).
    /// Without this option: through the cluster's mount.
    #[arg(long, value_enum, value_delimiter = ',')]
    transports: Vec<Transport>,
    #[arg(long)]
    json: bool,
    /// Print the table as Markdown, as in docs/performance.md.
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

impl BenchArgs {
    /// Folder of the cluster.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

/// Measures the cluster beside the limits of this machine, and prints the table.
pub fn run(args: &BenchArgs, cluster: &dyn Subject) -> Result<ExitCode> {
    if args.transports.iter().enumerate().any(|(i, t)| args.transports[..i].contains(t)) {
        return Err(Error::new(Code::Inval, "--transports: name each at most once"));
    }
    args.transports.iter().try_for_each(|t| t.check())?;
    if args.transports.is_empty() {
        cluster_mount(cluster)?;
    }
    let scale =
        Scale { bytes: args.size_mib * MIB, files: args.files, random_ops: args.random_ops };
    let mut bench = Bench::new(cluster, scale, args.runs as usize)?;
    let cores = std::thread::available_parallelism()?.get();
    let machine = machine::describe(cores, cluster.dir())?;
    let mut rows = Vec::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let client = cluster.connect(&runtime)?;
    bench.others = args.transports.iter().skip(1).map(|t| t.name()).collect();
    let own = own_mounts(cluster, &args.transports, &bench.dir)?;
    let mounted = if own.is_empty() {
        vec![through_mount::Mounted::new(&cluster_mount(cluster)?, "mount", scale)?]
    } else {
        let names = args.transports.iter().map(|t| t.name());
        own.iter()
            .zip(names)
            .map(|(m, name)| through_mount::Mounted::new(m.at(), name, scale))
            .collect::<Result<_>>()?
    };
    let by_client = runtime.block_on(through_client::ByClient::new(client, scale))?;
    let warm = Cell::new(false);
    for plan in plans(&mounted, &by_client, &runtime, &warm) {
        if args.only.as_ref().is_none_or(|o| plan.name.contains(o.as_str())) {
            rows.push(bench.run(plan)?);
        }
    }
    mounted.iter().try_for_each(|m| m.clean())?;
    drop(own);
    runtime.block_on(by_client.clean())?;
    if rows.is_empty() {
        bench.clean()?;
        let m = format!("no row's name contains '{}'", args.only.as_deref().unwrap_or_default());
        return Err(Error::new(Code::Inval, m));
    }
    let report = report::Report {
        cores,
        machine,
        copies: cluster.copies(),
        scale,
        runs: args.runs as usize,
        warm: warm.get(),
        transports: args.transports.iter().map(|t| t.name()).collect(),
        rows,
        fio: bench.fio_check(),
    };
    bench.clean()?;
    notes(report.warm);
    if args.json {
        println!("{:#}", report.json());
    } else {
        print!("{}", report.text(args.markdown));
    }
    Ok(ExitCode::SUCCESS)
}

/// Says what the figures lack. `warm`: caches could not be dropped before reads.
fn notes(warm: bool) {
    if warm {
        eprintln!(
            "note: the kernel's caches could not be dropped (that needs root); reads may have \
             been answered from memory"
        );
    }
    if cfg!(not(feature = "fuser")) {
        eprintln!(
            "note: the limit of FUSE is not measured; that needs a program built with \
             `--features fuser`"
        );
    }
}

/// Where the cluster is mounted.
fn cluster_mount(cluster: &dyn Subject) -> Result<PathBuf> {
    let mnt = cluster
        .mountpoint()
        .ok_or_else(|| Error::new(Code::NoDev, "this cluster has no mount; run `strake up`"))?;
    if !cluster.is_mounted(&mnt)? {
        return Err(Error::new(
            Code::NoDev,
            format!("{} is not mounted; run `strake up`", mnt.display()),
        ));
    }
    Ok(mnt)
}

fn own_mounts<'a>(
    cluster: &'a dyn Subject,
    transports: &[Transport],
    dir: &Path,
) -> Result<Vec<OwnMount<'a>>> {
    transports.iter().map(|t| OwnMount::start(cluster, *t, &dir.join(t.name()))).collect()
}

/// Folder below the bench's folder where the limits that answer from memory are mounted.
const MEMORY: &str = "memory";

struct Bench<'a> {
    cluster: &'a dyn Subject,
    scale: Scale,
    copies: u32,
    runs: usize,
    dir: PathBuf,
    scratch: fs::File,
    progress: Progress,
    /// Names of the transports beside the first.
    others: Vec<&'static str>,
}

impl Bench<'_> {
    fn new(cluster: &dyn Subject, scale: Scale, runs: usize) -> Result<Bench<'_>> {
        // On the same file system as the cluster's data, so that the limits are of that device.
        let dir = cluster.dir().join("bench");
        fs::create_dir_all(&dir)?;
        for own in [MEMORY, Transport::Dev.name(), Transport::Fuser.name()] {
            take_away_dead(cluster, &dir.join(own))?;
        }
        let mut progress = Progress::new();
        progress.say("preparing");
        let scratch = limits::scratch(&dir.join("scratch"), scale.bytes)?;
        let (copies, others) = (cluster.copies(), Vec::new());
        Ok(Bench { cluster, scale, copies, runs, dir, scratch, progress, others })
    }

    /// Measures a limit once. Returns the bytes moved or operations done, and their cost.
    fn limit(&self, name: &str) -> Result<(f64, Cost)> {
        let (bytes, copies) = (self.scale.bytes, u64::from(self.copies));
        let span = bytes;
        let device = |write, n| {
            let p = Pattern {
                write,
                block: MIB as usize,
                depth: 16,
                span,
                count: n / MIB,
                random: false,
            };
            limits::uring(&self.scratch, p).map(|()| bytes as f64)
        };
        #[cfg(feature = "fuser")]
        if OF_FUSE.contains(&name) {
            return self.fuse_limit(name);
        }
        let meter = Meter::start()?;
        let amount = match name {
            SOCKET => limits::socket_copy(bytes)? as f64,
            SOCKET_WRITE => limits::socket_copy(bytes * copies)? as f64 / copies as f64,
            DEVICE_WRITE => device(true, bytes * copies)?,
            DEVICE_READ => device(false, bytes)?,
            DEVICE_RANDOM => {
                limits::uring(&self.scratch, random(self.scale))?;
                self.scale.random_ops as f64
            }
            APPENDS => {
                limits::synced_appends(&self.dir.join("appends"), Duration::from_secs(2))? as f64
            }
            ROUND_TRIPS => limits::round_trips(JOBS, Duration::from_secs(1))? as f64,
            _ => return Err(Error::new(Code::Inval, format!("no limit named {name}"))),
        };
        Ok((amount, meter.stop()?))
    }

    /// As [`Bench::limit`], for a limit of FUSE: the same work on a file of a mount of the same kind
    /// that answers from memory.
    #[cfg(feature = "fuser")]
    fn fuse_limit(&self, name: &str) -> Result<(f64, Cost)> {
        let bytes = self.scale.bytes;
        let mount = memory::MemoryMount::start(&self.dir.join(MEMORY), bytes)?;
        let (file, meter) = (mount.file(), Meter::start()?);
        let amount = match name {
            FUSE_READ => through_mount::read_parts(&file, bytes, 1),
            FUSE_READ_4 => through_mount::read_parts(&file, bytes, 4),
            FUSE_WRITE => through_mount::write_file(&file, bytes),
            _ => through_mount::random_read(&file, self.scale),
        };
        Ok((amount?, meter.stop()?))
    }

    fn run(&mut self, mut plan: Plan) -> Result<Row> {
        let (name, unit) = (plan.name, plan.unit);
        let new = |name| Series { name, ..Series::default() };
        let mut ours: Vec<Series> = (0..plan.variants.len()).map(|_| new(name)).collect();
        let can = |name: &&&str| cfg!(feature = "fuser") || !OF_FUSE.contains(*name);
        let mut limits: Vec<Series> =
            plan.limits.iter().filter(can).map(|name| new(*name)).collect();
        for n in 0..self.runs {
            self.progress.say(format!("{name}: run {} of {}", n + 1, self.runs));
            let mut turns: Vec<_> = plan.variants.iter_mut().zip(&mut ours).collect();
            // Each goes first equally often, so that what the previous one leaves behind affects
            // all equally.
            if n % 2 == 1 {
                turns.reverse();
            }
            for (variant, series) in turns {
                (variant.prepare)().map_err(|e| e.context(name))?;
                let meter = Meter::start()?;
                let amount = (variant.work)().map_err(|e| e.context(name))?;
                series.add(unit, amount, &meter.stop()?);
            }
            for l in &mut limits {
                let (amount, cost) = self.limit(l.name).map_err(|e| e.context(l.name))?;
                l.add(unit, amount, &cost);
            }
        }
        let mut others = ours.split_off(1);
        others.iter_mut().zip(&self.others).for_each(|(series, name)| series.name = name);
        let ours = ours.remove(0);
        Ok(Row { unit, ours, others, limits })
    }

    /// Our own device figures beside fio's on the same file: (pattern, ours, fio's), bytes per
    /// second. Both take turns and medians are compared, because a disk's rate changes from one
    /// second to the next, and depends on what was read before.
    fn fio_check(&mut self) -> Vec<(&'static str, f64, f64)> {
        let span = self.scale.bytes;
        let read = Pattern {
            write: false,
            block: MIB as usize,
            depth: 16,
            span,
            count: span / MIB,
            random: false,
        };
        let mut out = Vec::new();
        let write = Pattern { write: true, ..read };
        let random = random(self.scale);
        for (name, p) in
            [("1 MiB write", write), ("1 MiB read", read), ("4 KiB random read", random)]
        {
            self.progress.say(format!("checking against fio: {name}"));
            let (mut ours, mut fios) = (Vec::new(), Vec::new());
            for _ in 0..self.runs {
                let Ok(meter) = Meter::start() else { continue };
                let Ok(()) = limits::uring_on_small_pages(&self.scratch, p) else { continue };
                let Ok(cost) = meter.stop() else { continue };
                let Some(fio) = limits::fio(&self.dir.join("scratch"), p) else { break };
                ours.push((p.count * p.block as u64) as f64 / cost.seconds);
                fios.push(fio);
            }
            if !fios.is_empty() {
                out.push((name, stats::median(&ours), stats::median(&fios)));
            }
        }
        out
    }

    fn clean(mut self) -> Result<()> {
        self.progress.done();
        for t in [Transport::Dev, Transport::Fuser] {
            // Otherwise the file system's content would be deleted with the folder.
            if self.cluster.is_mounted(&self.dir.join(t.name()))? {
                let m = format!("{} could not be unmounted", self.dir.join(t.name()).display());
                return Err(Error::new(Code::Busy, m));
            }
        }
        Ok(fs::remove_dir_all(&self.dir)?)
    }
}

/// Removes a dead mount that a killed bench has left behind. A mount that answers belongs to a
/// running bench.
fn take_away_dead(cluster: &dyn Subject, at: &Path) -> Result<()> {
    if !cluster.is_mounted(at)? {
        return Ok(());
    }
    if fs::metadata(at).is_ok() {
        let m = format!(
            "{} is mounted: another `strake bench` runs on this cluster; wait until it ends",
            at.display()
        );
        return Err(Error::new(Code::Busy, m));
    }
    cluster.unmount(at, true)
}

fn random(s: Scale) -> Pattern {
    Pattern {
        write: false,
        block: 4096,
        depth: 32,
        span: s.bytes,
        count: s.random_ops,
        random: true,
    }
}
