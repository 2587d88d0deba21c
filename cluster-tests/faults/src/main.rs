//! SIGKILL of every role at random times under load, on a real cluster of real processes; the verifier lives outside it.
//!
//! Writers create files on the mount, fsync and rename them. After a call that promises durability has returned, the
//! promise is written to a journal outside the cluster and synced, and only then counts. Then processes die: some, or all
//! at once. The cluster is started again and every promise of every round is checked.

mod journal;
mod writers;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use journal::Journal;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const USAGE: &str = "usage: strake-faults [--rounds N] [--seed N] [--dir DIR] [--mirror N] [--all-at-once]";

struct Options {
    rounds: u32,
    seed: u64,
    dir: PathBuf,
    mirror: u32,
    /// Every round kills every process: what only memory held is gone.
    all: bool,
}

fn options() -> Result<Options> {
    let mut o = Options { rounds: 30, seed: 1, dir: env::temp_dir().join("strake-faults"), mirror: 2, all: false };
    let mut args = env::args().skip(1);
    while let Some(a) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{a} needs a value\n{USAGE}"));
        match a.as_str() {
            "--rounds" => o.rounds = value()?.parse()?,
            "--seed" => o.seed = value()?.parse()?,
            "--dir" => o.dir = value()?.into(),
            "--mirror" => o.mirror = value()?.parse()?,
            "--all-at-once" => o.all = true,
            _ => return Err(USAGE.into()),
        }
    }
    o.dir = std::path::absolute(o.dir)?;
    Ok(o)
}

fn main() -> ExitCode {
    match options().and_then(|o| run(&o)) {
        Ok((0, promises)) => {
            println!("no promise of {promises} was broken");
            ExitCode::SUCCESS
        }
        Ok((broken, promises)) => {
            println!("{broken} of {promises} promises were broken");
            ExitCode::from(2)
        }
        Err(e) => {
            eprintln!("strake-faults: {e}");
            ExitCode::FAILURE
        }
    }
}

/// The cluster under test, from outside.
struct Cluster {
    strake: PathBuf,
    dir: PathBuf,
    mount: PathBuf,
    mirror: u32,
}

const ROLES: [&str; 8] = ["mds1", "mds2", "mds3", "oss1", "oss2", "oss3", "oss4", "mount"];

impl Cluster {
    fn up(&self) -> Result<()> {
        let out = Command::new(&self.strake)
            .arg("up")
            .arg("--dir")
            .arg(&self.dir)
            .arg("--mount")
            .arg(&self.mount)
            .args(["--timeout", "90", "--mirror", &self.mirror.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .output()?;
        if out.status.success() {
            Ok(())
        } else {
            Err(format!("strake up: {}", String::from_utf8_lossy(&out.stderr)).into())
        }
    }

    fn down(&self) {
        let _ = Command::new(&self.strake).arg("down").arg("--dir").arg(&self.dir).output();
    }

    fn kill(&self, role: &str) -> Result<()> {
        let file = self.dir.join("run").join(format!("{role}.pid"));
        let pid: i32 = fs::read_to_string(file)?.trim().parse()?;
        // SAFETY: plain kill(2) on a process of the cluster this program started.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        Ok(())
    }
}

/// Returns (promises broken, promises made).
fn run(o: &Options) -> Result<(u64, u64)> {
    let strake = env::current_exe()?.with_file_name("strake");
    if !strake.exists() {
        return Err(format!("{} is missing; build it first", strake.display()).into());
    }
    if o.dir.exists() {
        return Err(format!("{} exists; remove it or name another --dir", o.dir.display()).into());
    }
    fs::create_dir_all(&o.dir)?;
    let cluster = Cluster { strake, dir: o.dir.join("cluster"), mount: o.dir.join("mnt"), mirror: o.mirror };
    let journal = Journal::create(&o.dir.join("journal"))?;
    println!("seed {}, {} rounds in {}", o.seed, o.rounds, o.dir.display());
    let result = rounds(o, &cluster, &journal);
    cluster.down();
    if matches!(result, Ok(0)) {
        fs::remove_dir_all(&o.dir)?;
    } else {
        println!("everything is left in {} to look at", o.dir.display());
    }
    Ok((result?, journal.len()))
}

fn rounds(o: &Options, cluster: &Cluster, journal: &Journal) -> Result<u64> {
    let mut rng = StdRng::seed_from_u64(o.seed);
    let mut broken = 0;
    for round in 1..=o.rounds {
        cluster.up()?;
        let before = journal.len();
        let victims = victims(&mut rng, o.all);
        let alive = Duration::from_millis(rng.random_range(300..2500));
        let up = writers::under_load(&cluster.mount, round, rng.random(), journal, || {
            sleep(alive);
            // All signals leave within microseconds of each other.
            victims.iter().try_for_each(|v| cluster.kill(v))?;
            // Writers whose mount lives go on through the failure and the recovery.
            let t = Instant::now();
            cluster.up()?;
            Ok(t.elapsed())
        })?;
        let made = journal.len() - before;
        let lost = verify(&cluster.mount, journal)?;
        println!(
            "round {round}: killed {} after {alive:.1?}; {made} promises; up again in {up:.1?}; {lost} broken",
            victims.join(" ")
        );
        broken += lost;
    }
    Ok(broken)
}

/// One role, a few, or everything.
fn victims(rng: &mut StdRng, all: bool) -> Vec<&'static str> {
    match rng.random_range(0..4) {
        _ if all => ROLES.to_vec(),
        0 => ROLES.to_vec(),
        1 => vec![ROLES.choose(rng).copied().unwrap_or("oss1")],
        _ => {
            let n = rng.random_range(2..5);
            ROLES.sample(rng, n).copied().collect()
        }
    }
}

fn verify(mount: &Path, journal: &Journal) -> Result<u64> {
    let mut broken = 0;
    for p in journal.current()? {
        if let Err(e) = p.check(mount) {
            println!("BROKEN: {}: {e}", p.name);
            broken += 1;
        }
    }
    Ok(broken)
}
