//! Kills every role with SIGKILL at random times under load, on a real cluster of real processes.
//! The checks are made outside of the cluster.
//!
//! Writers create files on the mount, fsync and rename them. After a call that promises durability
//! has returned, the promise is written to a journal outside the cluster and synced; only then it
//! counts. Then some processes are killed, or all at once. The cluster is started again and every
//! promise of every round is checked.
//!
//! What a killed process wrote without a sync stays in the kernel, so SIGKILL alone cannot find a
//! missing fsync. With [`Options::power`] the cluster is on a disk that loses power as well, and
//! with it what was not synced.

mod disk;
mod journal;
mod lossy;
mod power;
mod writers;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::Write,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use journal::Journal;
pub use lossy::{Lossy, Rule};
use power::Disks;
pub use power::Power;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// The options of a test.
pub struct Options {
    /// The `strake` binary under test.
    pub strake: PathBuf,
    pub rounds: u32,
    /// Seed for the choice of victims, times and contents.
    pub seed: u64,
    /// A folder that does not exist yet, for cluster, journal and mount point. Removed if no
    /// promise was broken.
    pub dir: PathBuf,
    /// Copies of each file's data.
    pub mirror: u32,
    /// Every round kills every process, so nothing that was only in memory remains.
    pub all: bool,
    /// What is lost beside the processes.
    pub power: Power,
}

/// The result of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Promises that did not hold, processes that ended without being killed, and findings of
    /// `strake fsck` at the end.
    pub broken: u64,
    /// Promises made and then checked.
    pub promises: u64,
}

/// The cluster under test.
struct Cluster {
    strake: PathBuf,
    dir: PathBuf,
    mount: PathBuf,
    mirror: u32,
    /// The disks that `dir` is on.
    disks: Disks,
}

/// How long after the last kill `strake fsck` may still find something.
const FSCK_PATIENCE: Duration = Duration::from_secs(90);

const ROLES: [&str; 8] = ["mds1", "mds2", "mds3", "oss1", "oss2", "oss3", "oss4", "mount"];

impl Cluster {
    fn up(&self) -> Result<()> {
        self.ready_to_restart()?.go()
    }

    /// A process that runs `strake up` once told to. It is forked while this program has no file of
    /// the mount open: a child forked later would inherit such files, and closing them at exec
    /// waits for the servers that the child is to start.
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

    /// Prints the findings of `strake fsck` and returns how many there are. What a dead client left
    /// past the end of a file is removed when its session ends, so fsck is repeated for a while.
    fn fsck(&self) -> Result<u64> {
        let start = Instant::now();
        loop {
            let out = Command::new(&self.strake)
                .arg("fsck")
                .arg("--read-data")
                .arg("--dir")
                .arg(&self.dir)
                .output()?;
            let text = String::from_utf8_lossy(&out.stdout);
            if !matches!(out.status.code(), Some(0 | 4)) {
                return Err(
                    format!("strake fsck: {text}{}", String::from_utf8_lossy(&out.stderr)).into()
                );
            }
            let mut found: Vec<&str> = text.lines().collect();
            let sum = found.pop().unwrap_or_default();
            if out.status.success() {
                // Tombstones that the power loss brought back are reported, but are no finding.
                found.clear();
            }
            if found.is_empty() || start.elapsed() > FSCK_PATIENCE {
                found.iter().for_each(|l| println!("BROKEN: fsck: {l}"));
                println!("fsck after {:.0?}: {sum}", start.elapsed());
                return Ok(found.len() as u64);
            }
            sleep(Duration::from_millis(500));
        }
    }

    /// The process numbers of all roles, from the files that `strake up` has written.
    fn pids(&self) -> Result<Pids> {
        let pid = |role| -> Result<(&'static str, i32)> { Ok((role, self.pid(role)?)) };
        ROLES.into_iter().map(pid).collect()
    }

    fn pid(&self, role: &str) -> Result<i32> {
        Ok(fs::read_to_string(self.dir.join("run").join(format!("{role}.pid")))?.trim().parse()?)
    }

    /// Copies the logs if they are on a disk that ends with this process.
    fn keep_logs(&self, to: &Path) {
        if matches!(self.disks, Disks::Lossy(_)) {
            let _ = Command::new("cp").arg("-r").arg(self.dir.join("logs")).arg(to).output();
        }
    }

    fn down(&self) {
        let _ = Command::new(&self.strake).arg("down").arg("--dir").arg(&self.dir).output();
    }

    /// Sends all signals within microseconds, right after it has cut the disk's power, if there is
    /// such a disk. `strake up` waits for dying processes, which still hold their locks and ports;
    /// here they are only waited for if the disk needs it. Returns a text that says what the disk
    /// lost.
    fn kill(&self, roles: &[&str], seed: u64) -> Result<String> {
        let open = |role: &&str| -> Result<OwnedFd> {
            let pid = self.pid(role)?;
            // SAFETY: a system call without pointers; the pid is of a process of the cluster this
            // program started.
            let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
            if fd < 0 {
                return Err(
                    format!("{role}, pid {pid}: {}", std::io::Error::last_os_error()).into()
                );
            }
            // SAFETY: a descriptor the kernel just made for us.
            Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
        };
        let processes = roles.iter().map(open).collect::<Result<Vec<OwnedFd>>>()?;
        let servers = roles.iter().filter(|r| **r != "mount").map(|r| self.dir.join(r));
        let lost = self.disks.cut_power(&servers.collect::<Vec<_>>(), seed)?;
        for p in &processes {
            // SAFETY: no siginfo is passed; the descriptor is open.
            unsafe {
                libc::syscall(libc::SYS_pidfd_send_signal, p.as_raw_fd(), libc::SIGKILL, 0, 0)
            };
        }
        if self.disks.stay() {
            return Ok(lost);
        }
        for (p, role) in processes.iter().zip(roles) {
            let mut poll = libc::pollfd { fd: p.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one pollfd that lives through the call. Readable means that every thread has
            // ended.
            if unsafe { libc::poll(&mut poll, 1, 30_000) } != 1 {
                return Err(format!("{role} still runs 30 s after SIGKILL").into());
            }
        }
        self.disks.power_up()?;
        Ok(lost)
    }
}

type Pids = BTreeMap<&'static str, i32>;

/// Roles that ended without being killed: their process no longer runs, or `strake up` had to start
/// them again.
fn ended_unasked(
    before: &Pids,
    now: &Pids,
    victims: &[&str],
    runs: impl Fn(i32) -> bool,
) -> Vec<&'static str> {
    let same = |role: &str, pid: i32| victims.contains(&role) || before.get(role) == Some(&pid);
    now.iter()
        .filter(|(role, pid)| !same(role, **pid) || !runs(**pid))
        .map(|(role, _)| *role)
        .collect()
}

/// Whether the process runs; a zombie does not.
fn runs(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // After the command, which may contain blanks.
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
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

/// Whether this machine has what [`Power`] needs here; the error says what is missing. `dir` must
/// exist.
pub fn can_lose(power: Power, dir: &Path) -> Result<()> {
    let dir = dir.join("probe");
    fs::create_dir(&dir)?;
    let made = Disks::new(power, &dir).map(drop);
    fs::remove_dir_all(dir)?;
    made
}

/// Starts a cluster, harms it in rounds and checks it. At the end the cluster is stopped.
pub fn run(o: &Options) -> Result<Outcome> {
    let strake = o.strake.clone();
    if !strake.exists() {
        return Err(format!("{} is missing; build it first", strake.display()).into());
    }
    if o.dir.exists() {
        return Err(format!("{} exists; remove it or name another --dir", o.dir.display()).into());
    }
    fs::create_dir_all(&o.dir)?;
    let disks = Disks::new(o.power, &o.dir)?;
    let dir = disks.at(&o.dir).join("cluster");
    let cluster = Cluster { strake, dir, mount: o.dir.join("mnt"), mirror: o.mirror, disks };
    let journal = Journal::create(&o.dir.join("journal"))?;
    println!("seed {}, {} rounds in {}", o.seed, o.rounds, o.dir.display());
    let result = rounds(o, &cluster, &journal);
    cluster.down();
    if matches!(result, Ok(0)) {
        drop(cluster);
        fs::remove_dir_all(&o.dir)?;
    } else {
        cluster.keep_logs(&o.dir);
        println!("what is left of it is in {} to look at", o.dir.display());
    }
    Ok(Outcome { broken: result?, promises: journal.len() })
}

/// Runs the rounds and `strake fsck` at the end. Returns how many promises are broken, findings
/// included.
fn rounds(o: &Options, cluster: &Cluster, journal: &Journal) -> Result<u64> {
    let mut rng = StdRng::seed_from_u64(o.seed);
    // By name: a broken promise stays broken in later rounds, and counts once.
    let mut broken = BTreeSet::new();
    cluster.up()?;
    for round in 1..=o.rounds {
        let before = journal.len();
        let victims = victims(&mut rng, o.all || o.power == Power::Ext4);
        let pids = cluster.pids()?;
        let restart = cluster.ready_to_restart()?;
        let alive = Duration::from_millis(rng.random_range(300..2500));
        let seed = rng.random();
        let mut lost = String::new();
        let up = writers::under_load(&cluster.mount, round, rng.random(), journal, || {
            sleep(alive);
            // On a slow machine the first promise may take longer; a round without one would show
            // nothing.
            let late = Instant::now() + Duration::from_secs(60);
            while journal.len() == before && Instant::now() < late {
                sleep(Duration::from_millis(10));
            }
            lost = cluster.kill(&victims, seed)?;
            // Writers whose mount was not killed continue during the failure and the recovery.
            let t = Instant::now();
            Ok(restart.go().map(|()| t.elapsed()))
        })?;
        let made = journal.len() - before;
        let who = format!(
            "round {round}: killed {} after {alive:.1?}{lost}; {made} promises",
            victims.join(" ")
        );
        match up {
            Ok(up) => {
                let known = broken.len();
                verify(&cluster.mount, journal, &mut broken)?;
                for role in ended_unasked(&pids, &cluster.pids()?, &victims, runs) {
                    println!("BROKEN: {role} ended in round {round}, and nobody had killed it");
                    broken.insert(format!("{role} in round {round}"));
                }
                println!("{who}; up again in {up:.1?}; {} broken", broken.len() - known);
            }
            Err(e) => {
                println!(
                    "{who}\nBROKEN: the cluster did not come back, and with it everything promised: {e}"
                );
                return Ok(journal.current()?.len() as u64);
            }
        }
    }
    Ok(broken.len() as u64 + cluster.fsck()?)
}

/// The roles to kill: one, a few, or all.
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

/// Checks all promises and adds the names of the broken ones.
fn verify(mount: &Path, journal: &Journal, broken: &mut BTreeSet<String>) -> Result<()> {
    for p in journal.current()? {
        if let Err(e) = p.check(mount)
            && broken.insert(p.name.clone())
        {
            println!("BROKEN: {}: {e}", p.name);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_ends_by_itself_is_seen() {
        let before = Pids::from([("mds1", 1), ("oss1", 2), ("mount", 3)]);
        let all = |_| true;
        assert!(ended_unasked(&before, &before, &[], all).is_empty());
        let restarted = Pids::from([("mds1", 1), ("oss1", 7), ("mount", 3)]);
        assert!(ended_unasked(&before, &restarted, &["oss1"], all).is_empty());
        assert_eq!(ended_unasked(&before, &restarted, &["mds1"], all), ["oss1"]);
        assert_eq!(ended_unasked(&before, &before, &["oss1"], |pid| pid != 3), ["mount"]);
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        let deadline = Instant::now() + Duration::from_secs(30);
        while runs(pid) && Instant::now() < deadline {
            sleep(Duration::from_millis(5));
        }
        assert!(!runs(pid), "a zombie");
        child.wait().unwrap();
        assert!(runs(std::process::id() as i32));
    }
}
