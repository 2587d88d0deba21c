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
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
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

/// How long after the last kill `strake fsck` may still find something.
const FSCK_PATIENCE: Duration = Duration::from_secs(60);

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

    /// Findings of `strake fsck`, printed. What a dead client left half done takes a while to be mended, so it is asked
    /// again for a while. Chunks beyond the end of their file are told but not counted: a writer that is killed between
    /// its data and its sync leaves them, and no call promised anything about them.
    fn fsck(&self) -> Result<u64> {
        let start = Instant::now();
        loop {
            let out = Command::new(&self.strake).arg("fsck").arg("--read-data").arg("--dir").arg(&self.dir).output()?;
            let text = String::from_utf8_lossy(&out.stdout);
            if !matches!(out.status.code(), Some(0 | 4)) {
                return Err(format!("strake fsck: {text}{}", String::from_utf8_lossy(&out.stderr)).into());
            }
            let mut lines: Vec<&str> = text.lines().collect();
            let sum = lines.pop().unwrap_or_default();
            let (left, found): (Vec<&str>, Vec<&str>) = lines.iter().partition(|l| l.starts_with("beyond the end:"));
            if found.is_empty() || start.elapsed() > FSCK_PATIENCE {
                found.iter().for_each(|l| println!("BROKEN: fsck: {l}"));
                println!("fsck: {sum}, {} of them chunks beyond the end of a file", left.len());
                return Ok(found.len() as u64);
            }
            sleep(Duration::from_millis(500));
        }
    }

    fn down(&self) {
        let _ = Command::new(&self.strake).arg("down").arg("--dir").arg(&self.dir).output();
    }

    /// All signals leave within microseconds of each other; returns when the processes are gone, because a dying one
    /// still holds its locks and ports.
    fn kill(&self, roles: &[&str]) -> Result<()> {
        let open = |role: &&str| -> Result<OwnedFd> {
            let pid: i32 = fs::read_to_string(self.dir.join("run").join(format!("{role}.pid")))?.trim().parse()?;
            // SAFETY: a system call without pointers; the pid is of a process of the cluster this program started.
            let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
            if fd < 0 {
                return Err(format!("{role}, pid {pid}: {}", std::io::Error::last_os_error()).into());
            }
            // SAFETY: a descriptor the kernel just made for us.
            Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
        };
        let processes = roles.iter().map(open).collect::<Result<Vec<OwnedFd>>>()?;
        for p in &processes {
            // SAFETY: no siginfo is passed; the descriptor is open.
            unsafe { libc::syscall(libc::SYS_pidfd_send_signal, p.as_raw_fd(), libc::SIGKILL, 0, 0) };
        }
        for (p, role) in processes.iter().zip(roles) {
            let mut poll = libc::pollfd { fd: p.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd that lives through the call. Readable means that every thread has ended.
            if unsafe { libc::poll(&mut poll, 1, 30_000) } != 1 {
                return Err(format!("{role} still runs 30 s after SIGKILL").into());
            }
        }
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
            cluster.kill(&victims)?;
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
