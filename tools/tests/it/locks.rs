//! Locks between the mounts of a real cluster, held by programs (`locks.py`), and what happens to
//! the locks of a killed mount.

#[allow(dead_code, reason = "some of it is for other tests")]
use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use crate::common::{kill, ok, strake};

/// A cluster with one mount of its own, in a folder of its own; stopped when dropped.
struct Cluster {
    root: tempfile::TempDir,
    mounts: Vec<PathBuf>,
}

impl Cluster {
    fn new(mds: u32) -> Option<Cluster> {
        if !Path::new("/dev/fuse").exists() {
            println!("skipped: /dev/fuse is missing");
            return None;
        }
        let c = Cluster { root: tempfile::tempdir().unwrap(), mounts: Vec::new() };
        let up = ["--oss=1", "--targets-per-oss=1", "--mirror=1", "--target-gib=1"];
        let mut command = strake();
        command.arg("up").arg(format!("--mds={mds}")).args(up).arg("--dir").arg(c.dir());
        ok(&command.arg("--mount").arg(c.at("a")).output().unwrap());
        Some(c)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn dir(&self) -> PathBuf {
        self.at("cluster")
    }

    fn mount(&mut self, name: &str, transport: &str) -> PathBuf {
        let (at, config) = (self.at(name), self.at(&format!("{name}.toml")));
        fs::create_dir(&at).unwrap();
        let own = fs::read_to_string(self.dir().join("mount.toml")).unwrap();
        fs::write(&config, format!("{own}\ntransport = '{transport}'\n")).unwrap();
        ok(&strake().arg("mount").arg("--config").arg(config).arg(&at).output().unwrap());
        self.mounts.push(at.clone());
        at
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for m in &self.mounts {
            let _ = strake().arg("umount").arg("--lazy").arg(m).output();
        }
        let _ = strake().arg("down").arg("--dir").arg(self.dir()).output();
    }
}

fn programs(a: &Path, b: &Path, more: &[&str]) {
    script("locks.py", a, b, more);
}

fn script(name: &str, a: &Path, b: &Path, more: &[&str]) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name);
    let mut c = Command::new("timeout");
    let out = c.args(["300", "python3"]).arg(script).arg(a).arg(b).args(more).output().unwrap();
    println!("{}", ok(&out));
}

#[test]
fn a_lock_has_one_holder_and_is_gone_when_its_file_is_closed() {
    let Some(mut c) = Cluster::new(1) else { return };
    let b = c.mount("b", "dev");
    script("locks_closed.py", &c.at("a"), &c.at("a"), &["flock"]);
    script("locks_closed.py", &c.at("a"), &b, &["flock"]);
}

/// Programs count under locks of all kinds, on one mount and across two, while daemons and a
/// metadata leader are killed.
#[test]
fn programs_count_under_locks() {
    if let Err(e) = strake_fuse::can_mount(&std::env::temp_dir()) {
        println!("skipped: {e}");
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cluster-tests/posix/counters");
    let mut c = Command::new("timeout");
    println!(
        "{}",
        ok(&c
            .arg("280")
            .arg(script)
            .arg("0.5")
            .arg(env!("CARGO_BIN_EXE_strake"))
            .output()
            .unwrap())
    );
}

#[test]
fn programs_lock_files_between_mounts() {
    let Some(mut c) = Cluster::new(1) else { return };
    let b = c.mount("b", "dev");
    programs(&c.at("a"), &b, &["flock"]);
}

#[cfg(feature = "fuser")]
#[test]
fn programs_lock_files_between_mounts_through_fuser() {
    let Some(mut c) = Cluster::new(1) else { return };
    let (a, b) = (c.mount("b", "fuser"), c.mount("d", "fuser"));
    programs(&a, &b, &[]);
}

#[test]
fn locks_and_their_waiters_outlive_the_daemon_of_a_mount() {
    let Some(mut c) = Cluster::new(1) else { return };
    let b = c.mount("b", "dev");
    let supervisor = fs::read_to_string(c.dir().join("run/mount.pid")).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/locks_restart.py");
    let mut python = Command::new("timeout");
    python.args(["120", "python3"]).arg(script).arg(supervisor.trim()).arg(c.at("a")).arg(b);
    ok(&python.output().unwrap());
}

/// A Python program that locks a file and says so.
struct Locker(
    Child,
    BufReader<ChildStdout>,
    #[allow(dead_code, reason = "its end ends the program")] ChildStdin,
);

impl Locker {
    fn new(file: &Path, how: &str) -> Locker {
        let code = format!(
            "import fcntl, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\nprint('open', flush=True)\n\
             fcntl.{how}(fd, fcntl.LOCK_EX)\nprint('locked', flush=True)\nsys.stdin.read()\n"
        );
        let mut c = Command::new("python3");
        c.arg("-c").arg(code).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = c.spawn().unwrap();
        let (out, input) = (child.stdout.take().unwrap(), child.stdin.take().unwrap());
        let mut l = Locker(child, BufReader::new(out), input);
        assert_eq!(l.says(), "open");
        l
    }

    fn says(&mut self) -> String {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        line.trim().into()
    }
}

impl Drop for Locker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn leader(c: &Cluster) -> String {
    let out = strake().arg("status").arg("--dir").arg(c.dir()).arg("--json").output().unwrap();
    let v: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let all = v["servers"].as_array().unwrap();
    let leads =
        |s: &&serde_json::Value| s["raft"]["id"].is_u64() && s["raft"]["id"] == s["raft"]["leader"];
    all.iter().find(leads).map(|s| s["pid"].to_string()).expect("a leader")
}

/// The locks of a killed mount end when the next mount on its machine reports the death, not only
/// after the session's term. The locks of a living mount stay when the metadata leader is killed.
#[test]
fn locks_outlive_the_metadata_leader_and_not_their_mount() {
    let Some(mut c) = Cluster::new(3) else { return };
    let b = c.mount("b", "dev");
    fs::File::create(c.at("a/f")).unwrap().write_all(b"x").unwrap();
    let mut holder = Locker::new(&c.at("a/f"), "lockf");
    assert_eq!(holder.says(), "locked");
    let mut waiter = Locker::new(&b.join("f"), "lockf");
    kill(&leader(&c));
    let refused = "import fcntl, os, sys\nfd = os.open(sys.argv[1], os.O_RDWR)\ntry: fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n\
                   except BlockingIOError: print('refused')\n";
    let out = Command::new("python3").arg("-c").arg(refused).arg(b.join("f")).output().unwrap();
    assert_eq!(ok(&out).trim(), "refused");
    kill(&fs::read_to_string(c.dir().join("run/mount.pid")).unwrap());
    drop(holder);
    ok(&strake().arg("up").arg("--dir").arg(c.dir()).output().unwrap());
    assert_eq!(waiter.says(), "locked");
}
