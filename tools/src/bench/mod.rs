//! `strake bench`: the file system beside what this machine can do at all, both measured in the same run.

mod limits;
mod machine;
mod stats;
mod through_client;
mod through_mount;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use limits::Pattern;
use machine::Meter;
use serde_json::{Value, json};
use strake_proto::{Code, Error, Result};

use crate::{
    config,
    dev::Cluster,
    mount,
    term::{Progress, table},
};

#[derive(Args)]
pub struct BenchArgs {
    /// Folder of a running local cluster (see `strake up`).
    #[arg(long, default_value = "strake-cluster")]
    dir: PathBuf,
    /// Bytes of the large-file rows, in MiB.
    #[arg(long, default_value_t = 1024)]
    size_mib: u64,
    /// Files of the create, stat and unlink rows.
    #[arg(long, default_value_t = 10_000)]
    files: u64,
    /// Random reads per run.
    #[arg(long, default_value_t = 40_000)]
    random_ops: u64,
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Only rows whose name contains this.
    #[arg(long)]
    only: Option<String>,
    #[arg(long)]
    json: bool,
}

/// Sizes shared by all rows.
#[derive(Clone, Copy)]
pub struct Scale {
    pub bytes: u64,
    pub files: u64,
    pub random_ops: u64,
}

pub const MIB: u64 = 1 << 20;
/// Threads or tasks of the rows with many small operations.
pub const JOBS: u64 = 8;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Unit {
    Bytes,
    Ops,
}

struct Row {
    name: &'static str,
    unit: Unit,
    limit: &'static str,
    ours: Vec<f64>,
    limits: Vec<f64>,
    /// CPU seconds per GB, or microseconds per operation.
    cpu: Vec<f64>,
}

type Work<'a> = Box<dyn FnMut() -> Result<f64> + 'a>;

struct Plan<'a> {
    name: &'static str,
    unit: Unit,
    /// Not timed: what must be there before each run.
    prepare: Work<'a>,
    work: Work<'a>,
    limit: &'static str,
}

pub fn bench(args: &BenchArgs) -> Result<ExitCode> {
    let cluster = Cluster::open(&args.dir)?;
    let mnt =
        cluster.mountpoint().ok_or_else(|| Error::new(Code::NoDev, "this cluster has no mount; run `strake up`"))?;
    if !mount::is_mounted(&mnt)? {
        return Err(Error::new(Code::NoDev, format!("{} is not mounted; run `strake up`", mnt.display())));
    }
    let scale = Scale { bytes: args.size_mib * MIB, files: args.files, random_ops: args.random_ops };
    let mut bench = Bench::new(&cluster, scale, args.runs)?;
    let mut rows = Vec::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let key = config::read_key(&cluster.client_key())?;
    let client = runtime.block_on(mount::connect(&cluster.mds_endpoints(), key))?;
    let on_mount = through_mount::Mounted::new(&mnt, scale)?;
    let by_client = runtime.block_on(through_client::ByClient::new(client, scale))?;
    let plans = plans(&on_mount, &by_client, &runtime);
    for plan in plans {
        if args.only.as_ref().is_none_or(|o| plan.name.contains(o.as_str())) {
            rows.push(bench.run(plan)?);
        }
    }
    on_mount.clean()?;
    runtime.block_on(by_client.clean())?;
    let checked = bench.fio_check();
    bench.clean()?;
    if args.json {
        println!("{:#}", as_json(&rows, checked, scale, args.runs));
    } else {
        print(&rows, checked, scale, args.runs);
    }
    Ok(ExitCode::SUCCESS)
}

fn plans<'a>(
    m: &'a through_mount::Mounted,
    c: &'a through_client::ByClient,
    rt: &'a tokio::runtime::Runtime,
) -> Vec<Plan<'a>> {
    fn nothing<'a>() -> Work<'a> {
        Box::new(|| Ok(0.0))
    }
    fn plan<'a>(name: &'static str, unit: Unit, prepare: Work<'a>, work: Work<'a>, limit: &'static str) -> Plan<'a> {
        Plan { name, unit, prepare, work, limit }
    }
    use Unit::{Bytes, Ops};
    let cold = || -> Work<'a> {
        Box::new(|| {
            machine::drop_caches();
            Ok(0.0)
        })
    };
    vec![
        plan("mount: write 1 MiB", Bytes, nothing(), Box::new(|| m.write()), "device write"),
        plan("mount: read 1 MiB", Bytes, cold(), Box::new(|| m.read(1)), "FUSE from memory"),
        plan("mount: read 1 MiB, 4 readers", Bytes, cold(), Box::new(|| m.read(4)), "device read"),
        plan("mount: read 4 KiB random", Ops, cold(), Box::new(|| m.random_read()), "device 4 KiB random"),
        plan("mount: create", Ops, Box::new(|| m.unlink_all()), Box::new(|| m.create()), "synced appends"),
        plan("mount: stat", Ops, Box::new(|| m.ensure_files()), Box::new(|| m.stat()), "socket round trips"),
        plan("mount: unlink", Ops, Box::new(|| m.ensure_files()), Box::new(|| m.unlink_all()), "synced appends"),
        plan("client: write 1 MiB", Bytes, nothing(), Box::new(|| rt.block_on(c.write())), "device write"),
        plan("client: read 1 MiB", Bytes, cold(), Box::new(|| rt.block_on(c.read())), "socket copy"),
        plan(
            "client: read 4 KiB random",
            Ops,
            cold(),
            Box::new(|| rt.block_on(c.random_read())),
            "device 4 KiB random",
        ),
        plan(
            "client: create",
            Ops,
            Box::new(|| rt.block_on(c.unlink_all())),
            Box::new(|| rt.block_on(c.create())),
            "synced appends",
        ),
        plan(
            "client: stat",
            Ops,
            Box::new(|| rt.block_on(c.ensure_files())),
            Box::new(|| rt.block_on(c.stat())),
            "socket round trips",
        ),
        plan(
            "client: unlink",
            Ops,
            Box::new(|| rt.block_on(c.ensure_files())),
            Box::new(|| rt.block_on(c.unlink_all())),
            "synced appends",
        ),
    ]
}

struct Bench {
    scale: Scale,
    runs: usize,
    dir: PathBuf,
    scratch: fs::File,
    progress: Progress,
}

impl Bench {
    fn new(cluster: &Cluster, scale: Scale, runs: usize) -> Result<Bench> {
        // On the same file system as the cluster's data: the limit is that device's.
        let dir = cluster.dir().join("bench");
        fs::create_dir_all(&dir)?;
        let mut progress = Progress::new();
        progress.say("preparing");
        let scratch = limits::scratch(&dir.join("scratch"), scale.bytes)?;
        Ok(Bench { scale, runs, dir, scratch, progress })
    }

    /// The limit's rate, per second.
    fn limit(&self, name: &str) -> Result<f64> {
        let (bytes, span) = (self.scale.bytes, self.scale.bytes);
        let sequential =
            |write| Pattern { write, block: MIB as usize, depth: 16, span, count: bytes / MIB, random: false };
        let meter = Meter::start()?;
        let amount = match name {
            "socket copy" => limits::socket_copy(bytes)? as f64,
            "device write" => limits::uring(&self.scratch, sequential(true)).map(|()| bytes as f64)?,
            "device read" => limits::uring(&self.scratch, sequential(false)).map(|()| bytes as f64)?,
            "device 4 KiB random" => {
                limits::uring(&self.scratch, random(self.scale))?;
                self.scale.random_ops as f64
            }
            "synced appends" => limits::synced_appends(&self.dir.join("appends"), Duration::from_secs(2))? as f64,
            "socket round trips" => limits::round_trips(JOBS, Duration::from_secs(1))? as f64,
            "FUSE from memory" => return through_mount::memory_limit(&self.dir.join("memory"), bytes),
            _ => return Err(Error::new(Code::Inval, format!("no limit named {name}"))),
        };
        Ok(amount / meter.stop()?.seconds)
    }

    fn run(&mut self, mut plan: Plan) -> Result<Row> {
        let (name, unit, limit) = (plan.name, plan.unit, plan.limit);
        let mut row = Row { name, unit, limit, ours: vec![], limits: vec![], cpu: vec![] };
        for n in 0..self.runs {
            self.progress.say(format!("{name}: run {} of {}", n + 1, self.runs));
            (plan.prepare)().map_err(|e| e.context(name))?;
            let meter = Meter::start()?;
            let amount = (plan.work)().map_err(|e| e.context(name))?;
            let cost = meter.stop()?;
            row.ours.push(amount / cost.seconds);
            row.cpu.push(cost.cpu_seconds / amount * if unit == Unit::Bytes { 1e9 } else { 1e6 });
            row.limits.push(self.limit(limit).map_err(|e| e.context(limit))?);
        }
        Ok(row)
    }

    /// Our own device figures beside fio's on the same file: (pattern, ours, fio's), bytes per second.
    fn fio_check(&self) -> Vec<(&'static str, f64, f64)> {
        let span = self.scale.bytes;
        let read = Pattern { write: false, block: MIB as usize, depth: 16, span, count: span / MIB, random: false };
        let mut out = Vec::new();
        for (name, p) in [("1 MiB read", read), ("4 KiB random read", random(self.scale))] {
            let Ok(meter) = Meter::start() else { continue };
            let Ok(()) = limits::uring(&self.scratch, p) else { continue };
            let Ok(cost) = meter.stop() else { continue };
            let ours = (p.count * p.block as u64) as f64 / cost.seconds;
            out.extend(limits::fio(&self.dir.join("scratch"), p).map(|f| (name, ours, f)));
        }
        out
    }

    fn clean(self) -> Result<()> {
        self.progress.done();
        Ok(fs::remove_dir_all(&self.dir)?)
    }
}

fn random(s: Scale) -> Pattern {
    Pattern { write: false, block: 4096, depth: 32, span: s.bytes, count: s.random_ops, random: true }
}

/// Runs `job(n)` for n in 0..JOBS on threads of their own and adds up what they return.
pub fn in_threads(job: impl Fn(u64) -> Result<u64> + Sync) -> Result<f64> {
    std::thread::scope(|s| {
        let job = &job;
        let threads: Vec<_> = (0..JOBS).map(|n| s.spawn(move || job(n))).collect();
        let mut sum = 0;
        for t in threads {
            sum += t.join().map_err(|_| Error::new(Code::Io, "a thread panicked"))??;
        }
        Ok(sum as f64)
    })
}

fn rate(unit: Unit, v: f64) -> String {
    if unit == Unit::Bytes { format!("{:.0} MB/s", v / 1e6) } else { format!("{v:.0} /s") }
}

fn print(rows: &[Row], fio: Vec<(&str, f64, f64)>, scale: Scale, runs: usize) {
    println!(
        "median of {runs} runs [95 % bootstrap interval]; {} MiB files, {} files, {} random reads, {JOBS} jobs\n",
        scale.bytes / MIB,
        scale.files,
        scale.random_ops
    );
    let mut out = vec![
        ["row", "StrakeFS", "interval", "limit", "limit's rate", "ratio", "CPU, whole machine"]
            .map(String::from)
            .to_vec(),
    ];
    for r in rows {
        let (ours, limit) = (stats::median(&r.ours), stats::median(&r.limits));
        let (lo, hi) = stats::interval(&r.ours);
        let cpu = stats::median(&r.cpu);
        out.push(vec![
            r.name.into(),
            rate(r.unit, ours),
            format!("[{} .. {}]", rate(r.unit, lo), rate(r.unit, hi)),
            r.limit.into(),
            rate(r.unit, limit),
            format!("{:.2}", ours / limit),
            if r.unit == Unit::Bytes { format!("{cpu:.2} s/GB") } else { format!("{cpu:.0} us/op") },
        ]);
    }
    print!("{}", table(&out));
    for (name, ours, theirs) in &fio {
        println!("check: device {name}: {:.0} MB/s here, {:.0} MB/s by fio", ours / 1e6, theirs / 1e6);
    }
    if fio.is_empty() {
        println!("check skipped: fio is not installed");
    }
}

fn as_json(rows: &[Row], fio: Vec<(&str, f64, f64)>, scale: Scale, runs: usize) -> Value {
    let list: Vec<Value> = rows
        .iter()
        .map(|r| {
            let ((lo, hi), (llo, lhi)) = (stats::interval(&r.ours), stats::interval(&r.limits));
            let unit = if r.unit == Unit::Bytes { "bytes/s" } else { "ops/s" };
            json!({ "name": r.name, "unit": unit, "runs": r.ours, "median": stats::median(&r.ours), "interval": [lo, hi],
                "limit": { "name": r.limit, "runs": r.limits, "median": stats::median(&r.limits), "interval": [llo, lhi] },
                "ratio": stats::median(&r.ours) / stats::median(&r.limits),
                "cpu": { "unit": if r.unit == Unit::Bytes { "s/GB" } else { "us/op" }, "runs": r.cpu, "median": stats::median(&r.cpu) } })
        })
        .collect();
    let fio: Vec<Value> = fio.iter().map(|(n, o, f)| json!({ "pattern": n, "ours": o, "fio": f })).collect();
    json!({ "version": env!("CARGO_PKG_VERSION"), "runs": runs, "bytes": scale.bytes, "files": scale.files,
        "random_ops": scale.random_ops, "rows": list, "fio": fio })
}

/// Where the files of a row lie below a folder.
pub fn nth(dir: &Path, n: u64) -> PathBuf {
    dir.join(format!("f{n:06}"))
}
