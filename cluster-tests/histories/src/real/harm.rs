//! The faults that are made while a history is recorded.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rand::{RngExt, rngs::StdRng, seq::IndexedRandom};

const MDS: [&str; 3] = ["mds1", "mds2", "mds3"];
/// Limits for one run: workers that die, and faults of each other kind.
const DEATHS: u32 = 2;
const MOST: u32 = 4;

/// The processes of a cluster.
pub struct Cluster {
    strake: PathBuf,
    dir: PathBuf,
    mounts: Vec<PathBuf>,
}

impl Cluster {
    pub fn new(strake: &Path, dir: &Path, mounts: &[PathBuf]) -> Cluster {
        Cluster { strake: strake.into(), dir: dir.into(), mounts: mounts.into() }
    }

    fn server(&self, role: &str) -> Option<i32> {
        fs::read_to_string(self.dir.join("run").join(format!("{role}.pid")))
            .ok()?
            .trim()
            .parse()
            .ok()
    }

    /// Starts the servers that do not run.
    fn up(&self) -> io::Result<Child> {
        let mut c = Command::new(&self.strake);
        c.args(["up", "--no-mount", "--timeout", "90", "--dir"]).arg(&self.dir);
        c.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
    }

    /// The supervisor and the daemon of a mount, each with the number of its parent process.
    fn mount(&self, at: &Path) -> Vec<(i32, i32)> {
        let at = at.display().to_string();
        let known = |entry: fs::DirEntry| {
            let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
            let comm = fs::read_to_string(entry.path().join("comm")).ok()?;
            // Reading the files of other processes may block if they map files of the mount.
            if comm.trim() != "strake" {
                return None;
            }
            let line = fs::read_to_string(entry.path().join("cmdline")).ok()?;
            let is_it =
                line.split('\0').nth(1) == Some("mount") && line.split('\0').any(|a| a == at);
            let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
            let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
            is_it.then_some((pid, parent))
        };
        fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(known).collect()
    }
}

fn signal(pid: i32, signal: libc::c_int) {
    // SAFETY: no memory is passed; the process is one of the cluster or of the workers that this
    // program started.
    unsafe { libc::kill(pid, signal) };
}

/// What was done, and what must be undone.
#[derive(Default)]
pub struct Harm {
    kills: u32,
    stops: u32,
    worker_stops: u32,
    deaths: u32,
    daemon_kills: u32,
    /// Stopped processes, and when each continues.
    stopped: Vec<(i32, Instant)>,
    /// When the cluster is started again.
    start: Option<Instant>,
    starting: Option<Child>,
}

impl fmt::Display for Harm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} servers killed, {} stopped, {} workers or mounts stopped, {} workers and {} mount daemons killed",
            self.kills, self.stops, self.worker_stops, self.deaths, self.daemon_kills
        )
    }
}

impl Harm {
    /// Undoes what is over, and may make one more fault. `stoppable` and `killable` are processes
    /// of workers; if it returns a number, the caller must kill that worker. `by_mounts`: some
    /// workers use mounts.
    pub fn next(
        &mut self,
        cluster: &Cluster,
        rng: &mut StdRng,
        stoppable: Vec<i32>,
        killable: Vec<i32>,
        by_mounts: bool,
    ) -> io::Result<Option<i32>> {
        self.undo(cluster, Instant::now())?;
        let role = MDS.choose(rng).copied().unwrap_or("mds1");
        let for_a_while =
            |rng: &mut StdRng| Instant::now() + Duration::from_millis(rng.random_range(200..3000));
        match rng.random_range(0..24) {
            // One server at a time, so that the others are a majority.
            0 | 1 if self.calm() && self.kills < MOST => {
                if let Some(pid) = cluster.server(role) {
                    signal(pid, libc::SIGKILL);
                    self.kills += 1;
                    self.start =
                        Some(Instant::now() + Duration::from_millis(rng.random_range(0..1000)));
                }
            }
            2 | 3 if self.calm() && self.stops < MOST => {
                if let Some(pid) = cluster.server(role) {
                    self.stop(pid, for_a_while(rng));
                    self.stops += 1;
                }
            }
            4 | 5 if self.worker_stops < MOST => {
                if let Some(pid) = stoppable.choose(rng) {
                    self.stop(*pid, for_a_while(rng));
                    self.worker_stops += 1;
                }
            }
            6 if by_mounts && self.worker_stops < MOST => {
                let until = for_a_while(rng);
                let at = cluster.mounts.choose(rng).map(|at| cluster.mount(at)).unwrap_or_default();
                at.iter().for_each(|(pid, _)| self.stop(*pid, until));
                self.worker_stops += u32::from(!at.is_empty());
            }
            7 if by_mounts && self.daemon_kills < MOST => {
                let at = cluster.mounts.choose(rng).map(|at| cluster.mount(at)).unwrap_or_default();
                // The daemon is the one whose parent is the other process.
                if let Some((pid, _)) =
                    at.iter().find(|(_, parent)| at.iter().any(|(p, _)| p == parent))
                {
                    signal(*pid, libc::SIGKILL);
                    self.daemon_kills += 1;
                }
            }
            8 if self.deaths < DEATHS => {
                self.deaths += u32::from(!killable.is_empty());
                return Ok(killable.choose(rng).copied());
            }
            _ => {}
        }
        Ok(None)
    }

    /// Whether all servers run.
    fn calm(&self) -> bool {
        self.start.is_none() && self.starting.is_none() && self.stopped.is_empty()
    }

    fn stop(&mut self, pid: i32, until: Instant) {
        signal(pid, libc::SIGSTOP);
        self.stopped.push((pid, until));
    }

    fn undo(&mut self, cluster: &Cluster, now: Instant) -> io::Result<()> {
        self.stopped.retain(|(pid, until)| {
            if *until <= now {
                signal(*pid, libc::SIGCONT);
            }
            *until > now
        });
        if self.start.is_some_and(|at| at <= now) {
            self.start = None;
            self.starting = Some(cluster.up()?);
        }
        if let Some(up) = &mut self.starting
            && let Some(status) = up.try_wait()?
        {
            self.starting = None;
            if !status.success() {
                return Err(io::Error::other("strake up failed"));
            }
        }
        Ok(())
    }

    /// Makes everything run again.
    pub fn repair(&mut self, cluster: &Cluster) -> io::Result<()> {
        for (pid, _) in self.stopped.drain(..) {
            signal(pid, libc::SIGCONT);
        }
        if let Some(mut up) = self.starting.take() {
            up.wait()?;
        }
        self.start = None;
        match cluster.up()?.wait()?.success() {
            true => Ok(()),
            false => Err(io::Error::other("strake up failed")),
        }
    }
}
