//! Histories of real processes: workers on a running cluster, while faults are made.

mod cut;
mod harm;
pub mod worker;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, BufRead, BufReader},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use clap::Args;
use harm::{Cluster, Harm};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_histories::{
    Head, History, Outcome, Record, Verdict, check, explain::explain, search::LIMIT,
};

/// Workers at a time, and operations of each.
const WORKERS: u32 = 6;
const OPS: u32 = 40;
/// The share of operations that must overlap another worker's.
const OVERLAP: f64 = 0.3;
/// A run takes seconds; one that takes longer than this has failed.
const PATIENCE: Duration = Duration::from_secs(180);

/// How to reach the cluster, and what to do with it.
#[derive(Args, Clone)]
pub struct RealArgs {
    /// The strake program that runs the cluster.
    #[arg(long)]
    strake: PathBuf,
    /// Folder of the cluster, as given to `strake up`.
    #[arg(long)]
    dir: PathBuf,
    /// Metadata servers, separated by commas.
    #[arg(long)]
    mds: String,
    /// Mounts of the cluster.
    #[arg(long, required = true)]
    mount: Vec<PathBuf>,
    /// How many histories to record.
    #[arg(long, default_value_t = 50)]
    runs: u32,
    /// Seed for the choice of operations and faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Where to keep histories that are not linearizable.
    #[arg(long, default_value = "histories")]
    keep: PathBuf,
}

/// Through what the workers of a run do their operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    Library,
    Both,
    Mounts,
}

/// Records histories and checks them. Returns how many failed.
pub fn run(args: &RealArgs) -> io::Result<u32> {
    let cluster = Cluster::new(&args.strake, &args.dir, &args.mount);
    let (mut passed, mut rejected, mut other) = (0, 0, 0);
    for run in 1..=args.runs {
        let who = [Who::Library, Who::Both, Who::Mounts][run as usize % 3];
        let begun = Instant::now();
        let Recorded { history, harm, followed } = match record(args, &cluster, run, who) {
            Ok(recorded) => recorded,
            Err(e) => {
                println!("run {run}: FAILED: {e}");
                other += 1;
                continue;
            }
        };
        let (verdict, overlap) = (check(&history, LIMIT), history.overlap());
        let unknown =
            history.records.iter().filter(|r| matches!(r.outcome, Outcome::Unknown(_))).count();
        println!(
            "run {run}: {who:?}, {} operations, {:.0} % overlap, {harm}, {unknown} unknown, \
             {followed} answers of followers, {} steps, {:.1?}",
            history.records.len(),
            overlap * 100.0,
            verdict.steps(),
            begun.elapsed()
        );
        match verdict {
            Verdict::Linearizable { .. } if overlap >= OVERLAP => {
                passed += 1;
                continue;
            }
            Verdict::Linearizable { .. } => println!("  FAILED: too little overlaps"),
            _ => print!("{}", explain(&history, &verdict, LIMIT)),
        }
        match verdict.is_rejected() {
            true => rejected += 1,
            false => other += 1,
        }
        fs::create_dir_all(&args.keep)?;
        let kept = args.keep.join(format!("run-{}-{run}.jsonl", args.seed));
        history.write(File::create(&kept)?)?;
        println!("  kept as {}", kept.display());
    }
    println!("{passed} passed, {rejected} rejected, {other} failed otherwise");
    Ok(rejected + other)
}

/// A worker's process and its file of records.
struct Worker {
    id: u32,
    child: Child,
    is_library: bool,
    out: PathBuf,
}

/// What a run's workers need.
struct Ground<'a> {
    args: &'a RealArgs,
    seed: u64,
    who: Who,
    /// Half of the library's workers always ask followers; if all workers use the library, most
    /// operations only read.
    followers: bool,
    /// Names of the two directories in a mount.
    names: [String; 2],
    inos: [u64; 2],
    files: PathBuf,
}

impl Ground<'_> {
    fn start(&self, id: u32, ops: u32) -> io::Result<Worker> {
        let place = (id - 1) % WORKERS;
        let is_library = match self.who {
            Who::Library => true,
            Who::Both => place.is_multiple_of(2),
            Who::Mounts => false,
        };
        let out = self.files.join(format!("{id}.jsonl"));
        let mut c = Command::new(std::env::current_exe()?);
        c.args(["worker", "--client", &id.to_string(), "--ops", &ops.to_string()]);
        c.args(["--seed", &(self.seed << 8 | u64::from(id)).to_string(), "--out"]).arg(&out);
        if is_library {
            let roots = self.inos.map(|i| i.to_string()).join(",");
            c.args(["--mds", &self.args.mds, "--roots", &roots, "--key"])
                .arg(self.args.dir.join("client.key"));
        } else {
            let mount = &self.args.mount[place as usize % self.args.mount.len()];
            self.names.iter().for_each(|n| _ = c.arg("--path").arg(mount.join(n)));
        }
        if self.who == Who::Library {
            c.arg("--all");
        }
        if self.followers {
            c.args((self.who == Who::Library).then_some("--looks"));
            c.args((is_library && place < WORKERS / 2).then_some("--follow"));
        }
        Ok(Worker { id, child: c.stdin(Stdio::null()).spawn()?, is_library, out })
    }
}

struct Recorded {
    history: History,
    harm: Harm,
    /// Answers of followers to workers that ended regularly.
    followed: u64,
}

fn record(args: &RealArgs, cluster: &Cluster, run: u32, who: Who) -> io::Result<Recorded> {
    let seed = args.seed << 16 | u64::from(run);
    let mut rng = StdRng::seed_from_u64(seed);
    let names = ["one", "two"].map(|n| format!("run{run}-{n}"));
    let mut inos = [0; 2];
    for (name, ino) in names.iter().zip(&mut inos) {
        let at = args.mount[0].join(name);
        fs::create_dir(&at)?;
        *ino = fs::metadata(at)?.ino();
    }
    let files = std::env::temp_dir().join(format!("strake-histories-{}-{run}", std::process::id()));
    fs::create_dir_all(&files)?;
    // Each kind of workers runs without and with follower reads in turn.
    let ground = Ground { args, seed, who, followers: run / 3 % 2 == 1, names, inos, files };
    let mut workers =
        (1..=WORKERS).map(|id| ground.start(id, OPS)).collect::<io::Result<Vec<_>>>()?;
    let mut harm = Harm::default();
    let mut dead: Vec<(Worker, u64)> = Vec::new();
    let end = Instant::now() + PATIENCE;
    let outcome = loop {
        if Instant::now() > end {
            break Err(io::Error::other(format!("workers had not finished after {PATIENCE:?}")));
        }
        let running: Vec<usize> = (0..workers.len())
            .filter(|i| matches!(workers[*i].child.try_wait(), Ok(None)))
            .collect();
        if running.is_empty() {
            break Ok(());
        }
        let pids = |library: bool| {
            let some = running.iter().map(|i| &workers[*i]).filter(|w| !library || w.is_library);
            some.map(|w| w.child.id() as i32).collect()
        };
        if let Some(victim) =
            harm.next(cluster, &mut rng, pids(true), pids(false), who != Who::Library)?
        {
            let victim =
                workers.iter().position(|w| w.child.id() as i32 == victim).unwrap_or_default();
            let mut victim = workers.swap_remove(victim);
            // Its end may have to wait until a server or a mount answers.
            victim.child.kill()?;
            let left = OPS.saturating_sub(read(&victim.out)?.len() as u32);
            // Another worker takes its place.
            workers.push(ground.start(victim.id + WORKERS, left)?);
            dead.push((victim, worker::now()));
        }
        std::thread::sleep(Duration::from_millis(rng.random_range(20..200)));
    };
    harm.repair(cluster)?;
    for w in dead
        .iter_mut()
        .map(|(w, _)| w)
        .chain(outcome.is_err().then_some(&mut workers).into_iter().flatten())
    {
        w.child.kill()?;
        w.child.wait()?;
    }
    outcome?;
    let (mut records, mut followed) = (Vec::new(), 0);
    for (w, died) in dead.into_iter().chain(workers.into_iter().map(|w| (w, worker::now()))) {
        let answers = fs::read_to_string(worker::followed(&w.out));
        followed += answers.ok().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        records.extend(
            read(&w.out)?
                .into_iter()
                .map(|r| Record { reply: if r.reply == u64::MAX { died } else { r.reply }, ..r }),
        );
    }
    fs::remove_dir_all(&ground.files)?;
    let source = format!("real processes, seed {}, run {run}, {who:?}", args.seed);
    let head = Head { source, roots: ground.inos.to_vec(), kernel: who != Who::Library };
    Ok(Recorded { history: History { head, records }, harm, followed })
}

/// Reads a worker's file: each operation is written when it is called, and again when it is
/// answered. The last line of a killed worker may be torn.
fn read(out: &Path) -> io::Result<Vec<Record>> {
    let file = match File::open(out) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        f => f?,
    };
    let mut records = BTreeMap::new();
    for line in BufReader::new(file).lines() {
        if let Ok(r) = serde_json::from_str::<Record>(&line?) {
            records.insert(r.call, r);
        }
    }
    Ok(records.into_values().collect())
}
