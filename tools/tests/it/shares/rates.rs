//! The rates of a mount beside a hostile process on the same machine. That process has a share of
//! the CPU in its own cgroup. Its own CPU use does not count as an attack: the baseline is a plain
//! loop in the same cgroup.

use std::{
    env, fs,
    io::{BufRead, Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use super::{
    Victim,
    neighbours::{self, KINDS},
};
use crate::common::{kill, ok, strake};

const ROUNDS: usize = 3;
const EACH: Duration = Duration::from_millis(2500);
/// The attacker's share of one CPU, in per cent.
const SHARE: u32 = 50;
const LIMIT: Duration = Duration::from_secs(20);

/// Removed when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    /// The error says why no cgroup can be made.
    fn new() -> Result<Cgroup, String> {
        let name = format!("strake-rates-{}", std::process::id());
        let root = Path::new("/sys/fs/cgroup");
        let v2 = root.join("cgroup.controllers").exists();
        let at = if v2 { root.join(&name) } else { root.join("cpu").join(&name) };
        let said = |what: &str, e: std::io::Error| format!("{what} {}: {e}", at.display());
        fs::create_dir(&at).map_err(|e| said("cannot make the cgroup", e))?;
        let group = Cgroup(at.clone());
        let limits = match v2 {
            true => vec![("cpu.max", format!("{}000 100000", SHARE))],
            false => vec![
                ("cpu.cfs_period_us", "100000".into()),
                ("cpu.cfs_quota_us", format!("{SHARE}000")),
            ],
        };
        for (file, value) in limits {
            fs::write(at.join(file), value).map_err(|e| said("cannot limit the cgroup", e))?;
        }
        Ok(group)
    }
    /// Starts an attacker in the cgroup.
    fn start(&self, kind: &str, dir: &Path) -> Attacker {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--ignored", "--exact", "shares::rates::neighbour", "--nocapture"])
            .envs([("STRAKE_ATTACK", kind), ("STRAKE_ATTACKED", dir.to_str().unwrap())])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        fs::write(self.0.join("cgroup.procs"), child.id().to_string()).unwrap();
        writeln!(child.stdin.as_mut().unwrap(), "begin").unwrap();
        Attacker(child)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let began = Instant::now();
        while fs::remove_dir(&self.0).is_err() && began.elapsed() < Duration::from_secs(5) {
            thread::sleep(Duration::from_millis(50));
        }
    }
}

struct Attacker(Child);

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The attacker process. It ends when it is killed, or with its parent.
#[test]
#[ignore = "is started by the test below"]
fn neighbour() {
    let (Ok(kind), Ok(dir)) = (env::var("STRAKE_ATTACK"), env::var("STRAKE_ATTACKED")) else {
        return;
    };
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
    thread::spawn(|| {
        let _ = std::io::stdin().lock().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    neighbours::attack(&kind, Path::new(&dir));
}

/// The measurements beside one attacker.
#[derive(Default)]
struct Rates {
    mib: Vec<f64>,
    stats: Vec<f64>,
    creates: Vec<f64>,
    /// The longest lookup in ms; `mounts` and `leaders`: the times of a new mount and of a leader's
    /// replacement.
    longest: Vec<f64>,
    mounts: Vec<f64>,
    leaders: Vec<f64>,
}

fn median(of: &[f64]) -> f64 {
    let mut all = of.to_vec();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}

/// How often `what` runs per second, and its longest run in ms.
fn often(mut what: impl FnMut(u64)) -> (f64, f64) {
    let (began, mut n, mut longest) = (Instant::now(), 0, Duration::ZERO);
    while began.elapsed() < EACH {
        let at = Instant::now();
        what(n);
        (n, longest) = (n + 1, longest.max(at.elapsed()));
    }
    (n as f64 / began.elapsed().as_secs_f64(), ms(longest))
}

fn ms(t: Duration) -> f64 {
    t.as_secs_f64() * 1000.0
}

fn measure(v: &Victim, r: &mut Rates) {
    let (mount, tag) = (v.mount(), Instant::now());
    let data = vec![7; 8 << 20];
    let (writes, _) = often(|n| {
        let mut f = fs::File::create(mount.join(format!("written-{}", n % 4))).unwrap();
        f.write_all(&data).unwrap();
        f.sync_all().unwrap();
    });
    r.mib.push(writes * 8.0);
    let unknown = |n| mount.join(format!("unknown-{n}-{}", tag.elapsed().as_nanos()));
    let (stats, longest) = often(|n| assert!(!unknown(n).exists()));
    r.stats.push(stats);
    r.longest.push(longest);
    let (creates, _) = often(|n| {
        let at = mount.join(format!("made-{n}"));
        fs::File::create(&at).unwrap();
        fs::remove_file(&at).unwrap();
    });
    r.creates.push(creates);
    r.mounts.push(mounts(v).map_or(f64::INFINITY, ms));
}

/// How long a new mount takes until a lookup in it is answered; `None` if it fails.
fn mounts(v: &Victim) -> Option<Duration> {
    let at = v.root.path().join("second");
    fs::create_dir_all(&at).unwrap();
    let mds: Vec<String> =
        v.servers("mds").iter().map(|e| e.to_string().replace("tcp:", "")).collect();
    let options = format!("retry=0,run_dir={}", v.root.path().join("run").display());
    let began = Instant::now();
    let mut mount = strake();
    mount.args(["mount", "-f", "--client-key"]).arg(v.dir().join("client.key"));
    mount.arg(format!("{}:/", mds.join(","))).arg(&at).args(["-o", &options]);
    let mut child = mount.stdout(Stdio::null()).spawn().unwrap();
    let line = format!(" {} fuse", at.display());
    while !fs::read_to_string("/proc/mounts").unwrap().contains(&line) || fs::read_dir(&at).is_err()
    {
        if began.elapsed() > LIMIT || child.try_wait().unwrap().is_some() {
            println!("nothing is mounted after {:?}", began.elapsed());
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        thread::sleep(Duration::from_millis(5));
    }
    let took = began.elapsed();
    ok(&strake().arg("umount").arg(&at).output().unwrap());
    child.wait().unwrap();
    Some(took)
}

/// How long a mount waits for its next change when the leader is killed.
fn replaced(v: &Victim, n: usize) -> Duration {
    let (leads, conn) = v.leader();
    drop(conn);
    let at = v.servers("mds").iter().position(|e| *e == leads).unwrap() + 1;
    let pid = fs::read_to_string(v.dir().join(format!("run/mds{at}.pid"))).unwrap();
    let began = Instant::now();
    kill(&pid);
    fs::create_dir(v.mount().join(format!("after-{n}"))).unwrap();
    let took = began.elapsed();
    ok(&strake().args(["up", "--no-mount", "--dir"]).arg(v.dir()).output().unwrap());
    thread::sleep(Duration::from_secs(2));
    took
}

#[test]
#[ignore = "takes minutes: cluster-tests/attacks/run rates"]
fn a_mount_keeps_its_rates_beside_a_hostile_neighbour() {
    let group = match Cgroup::new() {
        Ok(g) => g,
        Err(why) => return println!("skipped: {why}"),
    };
    let Some(v) = Victim::new() else { return };
    let only = env::var("STRAKE_KINDS").ok();
    let wanted = |k: &str| only.as_ref().is_none_or(|o| o.split(',').any(|o| o == k));
    // The first is the plain loop.
    let kinds: Vec<&str> =
        KINDS.into_iter().enumerate().filter(|(i, k)| *i == 0 || wanted(k)).map(|k| k.1).collect();
    let mut all: Vec<Rates> = kinds.iter().map(|_| Rates::default()).collect();
    measure(&v, &mut Rates::default());
    for round in 0..ROUNDS {
        for (n, (kind, r)) in kinds.iter().zip(&mut all).enumerate() {
            let attacker = group.start(kind, &v.dir());
            thread::sleep(Duration::from_millis(1500));
            measure(&v, r);
            if round + 1 == ROUNDS {
                r.leaders.push(ms(replaced(&v, n)));
            }
            drop(attacker);
            println!(
                "{round} {kind}: {:.0} MiB/s, {:.0} stats/s, {:.0} files/s, longest stat {:.0} ms, mount {:.0} ms",
                r.mib[round], r.stats[round], r.creates[round], r.longest[round], r.mounts[round]
            );
            thread::sleep(Duration::from_millis(500));
        }
    }
    let wrong = judge(&kinds, &all);
    // A debug build is slower at everything, so the limits count only when `STRAKE` names a
    // program.
    assert!(wrong.is_empty() || env::var_os("STRAKE").is_none(), "{wrong:#?}");
}

/// Prints the medians; returns the violated limits.
fn judge(kinds: &[&str], all: &[Rates]) -> Vec<String> {
    let mut wrong = Vec::new();
    println!(
        "| neighbour | fsynced MiB/s | stats/s | files/s | longest stat | new mount | leader replaced |"
    );
    println!("|---|---|---|---|---|---|---|");
    let base = &all[0];
    for (kind, r) in kinds.iter().zip(all) {
        let mut rates = Vec::new();
        for (what, own, alone) in [
            ("MiB/s", &r.mib, &base.mib),
            ("stats/s", &r.stats, &base.stats),
            ("files/s", &r.creates, &base.creates),
        ] {
            let part = median(own) / median(alone);
            rates.push(format!("{:.0} ({:.0} %)", median(own), part * 100.0));
            if part < 0.8 {
                wrong.push(format!(
                    "{kind}: {what} are {:.0} % of those beside a plain loop",
                    part * 100.0
                ));
            }
        }
        let (longest, mount, leader) = (median(&r.longest), median(&r.mounts), median(&r.leaders));
        println!(
            "| {kind} | {} | {longest:.0} ms | {mount:.0} ms | {leader:.0} ms |",
            rates.join(" | ")
        );
        if longest > median(&base.longest) + 50.0 {
            wrong.push(format!("{kind}: a stat took {longest:.0} ms"));
        }
        for (what, took) in [("a new mount", mount), ("another leader", leader)] {
            if took > 5000.0 {
                wrong.push(format!("{kind}: {what} took {took:.0} ms"));
            }
        }
    }
    wrong
}
