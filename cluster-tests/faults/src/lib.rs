//! SIGKILL of every role at random times under load, on a real cluster of real processes; the verifier lives outside it.
//!
//! Writers create files on the mount, fsync and rename them. After a call that promises durability has returned, the
//! promise is written to a journal outside the cluster and synced, and only then counts. Then processes die: some, or all
//! at once. The cluster is started again and every promise of every round is checked.

mod journal;
mod writers;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use journal::Journal;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What to run.
pub struct Options {
    /// The `strake` binary under test.
    pub strake: PathBuf,
    pub rounds: u32,
    /// Of the choice of victims, times and contents.
    pub seed: u64,
    /// A folder that does not exist yet: cluster, journal and mount point. Removed when all was well.
    pub dir: PathBuf,
    /// Copies of each file's data.
    pub mirror: u32,
    /// Every round kills every process: what only memory held is gone.
    pub all: bool,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Promises that did not hold, and findings of `strake fsck` at the end.
    pub broken: u64,
    /// Promises made and then checked.
    pub promises: u64,
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
        self.ready_to_restart()?.go()
    }

    /// A process that runs `strake up` once told to. It is made while this program has no file of the mount open: a
    /// child made later would inherit such files, and closing them in exec waits for the very servers it shall start.
    fn ready_to_restart(&self) -> Result<Restart> {
        let child = Command::new("sh")
            .args(["-c", "read -r go && exec \"$@\"", "sh"])
            .arg(&self.strake)
            .arg("up")
            .arg("--dir")
            .arg(&self.dir)
            .arg("--mount")
            .arg(&self.mount)
            .args(["--timeout", "90", "--mirror", &self.mirror.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Restart(child))
    }

    /// Findings of `strake fsck`, printed.
    fn fsck(&self) -> Result<u64> {
        let out = Command::new(&self.strake).arg("fsck").arg("--read-data").arg("--dir").arg(&self.dir).output()?;
        let text = String::from_utf8_lossy(&out.stdout);
        match out.status.code() {
            Some(0) => Ok(0),
            // The last line sums up.
            Some(4) => {
                let findings: Vec<&str> = text.lines().collect();
                findings.iter().for_each(|l| println!("BROKEN: fsck: {l}"));
                Ok((findings.len() as u64).saturating_sub(1).max(1))
            }
            _ => Err(format!("strake fsck: {text}{}", String::from_utf8_lossy(&out.stderr)).into()),
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

/// A `strake up` that waits for its start.
struct Restart(Child);

impl Restart {
    fn go(mut self) -> Result<()> {
        self.0.stdin.take().ok_or("no pipe to the restarting shell")?.write_all(b"go\n")?;
        let out = self.0.wait_with_output()?;
        if out.status.success() {
            Ok(())
        } else {
            Err(format!("strake up: {}", String::from_utf8_lossy(&out.stderr)).into())
        }
    }
}

/// Starts a cluster, harms it round by round and checks it. The cluster is stopped at the end.
pub fn run(o: &Options) -> Result<Outcome> {
    let strake = o.strake.clone();
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
    let result = rounds(o, &cluster, &journal).and_then(|broken| Ok(broken + cluster.fsck()?));
    cluster.down();
    if matches!(result, Ok(0)) {
        fs::remove_dir_all(&o.dir)?;
    } else {
        println!("everything is left in {} to look at", o.dir.display());
    }
    Ok(Outcome { broken: result?, promises: journal.len() })
}

fn rounds(o: &Options, cluster: &Cluster, journal: &Journal) -> Result<u64> {
    let mut rng = StdRng::seed_from_u64(o.seed);
    let mut broken = 0;
    for round in 1..=o.rounds {
        cluster.up()?;
        let before = journal.len();
        let victims = victims(&mut rng, o.all);
        let restart = cluster.ready_to_restart()?;
        let alive = Duration::from_millis(rng.random_range(300..2500));
        let up = writers::under_load(&cluster.mount, round, rng.random(), journal, || {
            sleep(alive);
            // All signals leave within microseconds of each other.
            victims.iter().try_for_each(|v| cluster.kill(v))?;
            // Writers whose mount lives go on through the failure and the recovery.
            let t = Instant::now();
            restart.go()?;
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
