//! The binary as a user runs it: real processes, bad configurations, small clusters.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Output,
    thread,
    time::Duration,
};

use crate::common::{eventually, kill, ok, refused, signal, strake, text, up};
use rustix::process::Signal;
use serde_json::Value;

/// A small cluster in a folder of its own; stopped when dropped.
struct Small {
    _root: tempfile::TempDir,
    dir: PathBuf,
    mnt: PathBuf,
}

impl Small {
    fn new() -> Small {
        let root = tempfile::tempdir().unwrap();
        Small { dir: root.path().join("cluster"), mnt: root.path().join("mnt"), _root: root }
    }

    fn up(&self, extra: &[&str]) -> Output {
        up(1, 2).arg("--dir").arg(&self.dir).args(extra).output().unwrap()
    }

    fn on_cluster(&self, command: &str, extra: &[&str]) -> Output {
        strake().arg(command).arg("--dir").arg(&self.dir).args(extra).output().unwrap()
    }

    fn status(&self) -> Value {
        serde_json::from_slice(&self.on_cluster("status", &["--json"]).stdout).unwrap()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        if self.dir.exists() {
            let _ = self.on_cluster("down", &[]);
        }
    }
}

fn can_mount() -> bool {
    let there = Path::new("/dev/fuse").exists();
    if !there {
        println!("skipped: /dev/fuse is missing");
    }
    there
}

#[test]
fn an_unknown_key_is_an_error_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    for (role, section) in [("mds", "mds"), ("oss", "oss")] {
        let file = dir.path().join(format!("{role}.toml"));
        fs::write(
            &file,
            format!("cluster_key = '/k'\n\n[{section}]\nlisten = 'tcp:127.0.0.1:0'\nlisen = 'x'\n"),
        )
        .unwrap();
        refused(
            &strake().arg(role).arg("--config").arg(&file).output().unwrap(),
            &[&format!("{role}.toml:5"), "lisen"],
        );
    }
    let gone = dir.path().join("gone.toml");
    refused(
        &strake().args(["mds", "--config"]).arg(&gone).output().unwrap(),
        &["gone.toml", "No such file"],
    );
}

#[test]
fn missing_and_open_keys_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    let run = || {
        strake()
            .args(["mds", "--id", "1", "--listen", "tcp:127.0.0.1:0", "--dir"])
            .arg(dir.path().join("d"))
            .arg("--cluster-key")
            .arg(&key)
            .output()
            .unwrap()
    };
    refused(&run(), &["key", "No such file"]);
    fs::write(&key, "00".repeat(32)).unwrap();
    refused(&run(), &["chmod 600"]);
}

#[test]
fn a_missing_folder_is_named_and_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    fs::write(&key, "00".repeat(32)).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let disk = dir.path().join("disk");
    let folder = disk.join("data");
    let config = |role: &str, keys: &str| {
        let file = dir.path().join(format!("{role}.toml"));
        let common =
            format!("cluster_key = '{}'\n[{role}]\nlisten = 'tcp:127.0.0.1:0'\n", key.display());
        fs::write(&file, common + keys).unwrap();
        let mut server = strake();
        server.arg(role).arg("--config").arg(&file);
        server
    };
    let at = folder.display();
    let words = ["disk does not exist", "mount"];
    refused(&config("mds", &format!("id = 1\ndir = '{at}'\n")).output().unwrap(), &words);
    // A storage server goes on without that target.
    let oss = format!(
        "name = 'a'\nmds = ['tcp:127.0.0.1:1']\ntargets = [{{ path = '{at}', size = 67108864 }}]\n"
    );
    let log = dir.path().join("log");
    let to = fs::File::create(&log).unwrap();
    let mut server =
        config("oss", &oss).stdout(to.try_clone().unwrap()).stderr(to).spawn().unwrap();
    let said = || fs::read_to_string(&log).unwrap();
    let is_named = (0..600).any(|_| {
        thread::sleep(Duration::from_millis(100));
        words.iter().all(|w| said().contains(w))
    });
    let is_running = server.try_wait().unwrap().is_none();
    let _ = server.kill();
    server.wait().unwrap();
    assert!(is_named && is_running, "{}", said());
    assert!(!disk.exists());
}

#[test]
fn a_port_in_use_is_named() {
    let small = Small::new();
    ok(&small.up(&["--mount", "none"]));
    ok(&small.on_cluster("down", &[]));
    let config = fs::read_to_string(small.dir.join("mds1.toml")).unwrap();
    let port: u16 = config
        .lines()
        .find(|l| l.starts_with("listen"))
        .and_then(|l| l.rsplit(':').next())
        .and_then(|p| p.trim_end_matches('"').parse().ok())
        .unwrap();
    let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let out = strake().args(["mds", "--config"]).arg(small.dir.join("mds1.toml")).output().unwrap();
    refused(&out, &[&port.to_string(), "in use"]);
}

#[test]
fn up_adopts_status_tells_fsck_is_clean_down_stops() {
    let small = Small::new();
    let out = ok(&small.up(&["--mount", "none"]));
    assert!(out.contains("metadata  tcp:127.0.0.1:"), "{out}");
    let first = small.status();
    assert_eq!(first["map"]["whole"], true, "{first:#}");
    assert_eq!(first["map"]["targets"].as_array().map(Vec::len), Some(2));
    let pids = |s: &Value| {
        s["servers"].as_array().unwrap().iter().map(|v| v["pid"].clone()).collect::<Vec<_>>()
    };
    ok(&small.up(&["--mount", "none"]));
    assert_eq!(pids(&small.status()), pids(&first), "adopted, not restarted");
    assert!(ok(&small.on_cluster("status", &[])).contains("leader"));
    assert!(ok(&small.on_cluster("fsck", &[])).contains("clean"));
    ok(&small.on_cluster("down", &[]));
    assert!(small.status()["servers"].as_array().unwrap().iter().all(|s| s["reachable"] == false));
    refused(&small.on_cluster("fsck", &["--mds", "x"]), &["cannot be used with"]);
}

#[test]
fn a_target_of_another_cluster_is_refused() {
    let (a, b) = (Small::new(), Small::new());
    for c in [&a, &b] {
        ok(&c.up(&["--mount", "none"]));
        ok(&c.on_cluster("down", &[]));
    }
    let target = |c: &Small| c.dir.join("oss1/target0");
    fs::remove_dir_all(target(&a)).unwrap();
    fs::rename(target(&b), target(&a)).unwrap();
    refused(&a.up(&["--mount", "none", "--timeout", "20"]), &["oss1", "cluster"]);
}

#[test]
fn a_mount_keeps_its_files_over_a_restart_of_everything() {
    if !can_mount() {
        return;
    }
    let small = Small::new();
    let mount = ["--mount", small.mnt.to_str().unwrap()];
    ok(&small.up(&mount));
    let data: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    fs::write(small.mnt.join("a"), &data).unwrap();
    fs::create_dir(small.mnt.join("d")).unwrap();
    fs::rename(small.mnt.join("a"), small.mnt.join("d/b")).unwrap();
    let lfs =
        |args: &[&str]| strake().arg("lfs").args(args).current_dir(&small.mnt).output().unwrap();
    ok(&lfs(&["setstripe", "-c", "2", "-S", "64K", "d"]));
    fs::write(small.mnt.join("d/c"), &data[..500_000]).unwrap();
    assert_eq!(ok(&lfs(&["getstripe", "-c", "d/c"])).trim(), "2");
    ok(&small.on_cluster("down", &[]));
    ok(&small.up(&mount));
    assert!(fs::read(small.mnt.join("d/b")).unwrap() == data);
    assert!(fs::read(small.mnt.join("d/c")).unwrap() == data[..500_000]);
    assert!(ok(&small.on_cluster("fsck", &["--read-data"])).contains("2 files"));
    fs::remove_dir_all(small.mnt.join("d")).unwrap();
    assert_eq!(fs::read_dir(&small.mnt).unwrap().count(), 0);
}

/// Killed when dropped.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_storage_server_that_no_transport_leads_to_holds_up_only_what_is_on_it() {
    if !can_mount() {
        return;
    }
    if strake_fabric::rdma::probe().is_ok() {
        println!("skipped: this machine has RDMA");
        return;
    }
    let small = Small::new();
    ok(&small.up(&["--mount", small.mnt.to_str().unwrap()]));
    fs::write(small.mnt.join("f"), b"there").unwrap();
    let config = small.dir.join("oss1.toml");
    let mds = fs::read_to_string(&config)
        .unwrap()
        .lines()
        .find(|l| l.starts_with("mds = "))
        .unwrap()
        .to_string();
    let (key, target) = (small.dir.join("cluster.key"), small.dir.join("oss3"));
    let theirs = small.dir.join("oss3.toml");
    let text = format!(
        "cluster_key = {key:?}\n[oss]\nname = 'oss3'\nlisten = 'tcp:127.0.0.1:0'\nadvertise = 'rdma:127.0.0.1:9'\n{mds}\n\
         [[oss.targets]]\npath = {target:?}\nsize = 1073741824\n"
    );
    fs::write(&theirs, text).unwrap();
    let _server = Server(strake().arg("oss").arg("--config").arg(&theirs).spawn().unwrap());
    let is_known = || small.status().to_string().contains("rdma:127.0.0.1:9");
    eventually("the server's address", Duration::from_secs(60), is_known);
    // The next daemon of an existing mount.
    let mount = fs::read_to_string(small.dir.join("run/mount.pid")).unwrap();
    let daemon =
        || fs::read_to_string(format!("/proc/{0}/task/{0}/children", mount.trim())).unwrap();
    let former = daemon();
    kill(former.trim());
    let read = std::process::Command::new("timeout")
        .arg("30")
        .arg("cat")
        .arg(small.mnt.join("f"))
        .output()
        .unwrap();
    assert_eq!(ok(&read), "there");
    assert_ne!(daemon(), former);
    // A new mount is refused if the required transport is missing.
    let second = small.dir.with_file_name("second");
    fs::create_dir(&second).unwrap();
    let start = |more: &[&str]| {
        strake()
            .arg("mount")
            .arg("--config")
            .arg(small.dir.join("mount.toml"))
            .args(more)
            .arg(&second)
            .output()
            .unwrap()
    };
    refused(
        &start(&["--fabric", "tcp"]),
        &["storage server 'oss3'", "the server has no TCP endpoint"],
    );
    // This test runs where there is no RDMA: a mount that asks for it says what is missing.
    refused(&start(&["--fabric", "rdma"]), &["RDMA is not available"]);
    ok(&start(&[]));
    let there = fs::read(second.join("f"));
    ok(&strake().arg("umount").arg(&second).output().unwrap());
    assert_eq!(there.unwrap(), b"there");
}

/// Whether it ignores SIGPIPE, and where its stderr goes.
fn pipes_of(pid: u32) -> (bool, PathBuf) {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let ignored = status.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap().trim();
    let ignored = u64::from_str_radix(ignored, 16).unwrap();
    (ignored & 1 << (libc::SIGPIPE - 1) != 0, fs::read_link(format!("/proc/{pid}/fd/2")).unwrap())
}

#[test]
fn a_peer_or_a_log_reader_that_goes_ends_nobody() {
    if !can_mount() {
        return;
    }
    let small = Small::new();
    ok(&small.up(&["--mount", small.mnt.to_str().unwrap()]));
    for role in ["mds1", "oss1", "mount"] {
        let pid = fs::read_to_string(small.dir.join("run").join(format!("{role}.pid")))
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        assert!(pipes_of(pid).0, "{role} dies of a connection that closes");
    }
    // A mount in the background outlives the command that started it, and the reader of that
    // command's output.
    let second = small.dir.with_file_name("second");
    fs::create_dir(&second).unwrap();
    let config = small.dir.join("mount.toml");
    let out = strake().arg("mount").arg("--config").arg(&config).arg(&second).output().unwrap();
    let log = ok(&out).trim().strip_prefix("log: ").map(PathBuf::from);
    let daemon = fs::read_dir("/proc").unwrap().find_map(|e| {
        let pid: u32 = e.ok()?.file_name().to_str()?.parse().ok()?;
        let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let line = text(&line);
        (line.contains("mount\0--foreground\0")
            && line.ends_with(&format!("{}\0", second.display())))
        .then_some(pid)
    });
    let pipes = daemon.map(pipes_of);
    let written = fs::write(second.join("f"), b"x");
    // Unmount before any assert: removing the test's folder with a mount in it would wait for the
    // cluster.
    ok(&strake().arg("umount").arg(&second).output().unwrap());
    written.unwrap();
    let (ignores, stderr) = pipes.expect("the mount's process");
    assert!(ignores && !stderr.to_string_lossy().starts_with("pipe:"), "{}", stderr.display());
    if let Some(log) = log {
        assert_eq!(stderr, log);
        assert!(fs::read_to_string(&log).unwrap().contains("mounted at"));
        fs::remove_file(log).unwrap();
    }
}

/// Between execve(2) and its first instruction a program's files are closed, which may wait for
/// servers. Reading `/proc/PID/stat` of such a program waits, too.
#[test]
fn programs_begin_with_files_of_a_mount_whose_servers_stand_still() {
    if !can_mount() {
        return;
    }
    let small = Small::new();
    ok(&small.up(&["--mount", small.mnt.to_str().unwrap()]));
    let pid = |name: &str| fs::read_to_string(small.dir.join(format!("run/{name}.pid"))).unwrap();
    let open: Vec<fs::File> =
        (0..4).map(|i| fs::File::create(small.mnt.join(format!("f{i}"))).unwrap()).collect();
    // This makes sure that the storage servers know their chains.
    open.iter().for_each(|mut f| f.write_all(&[1; 5000]).unwrap());
    signal(&pid("mds1"), Signal::STOP);
    for mut f in &open {
        f.write_all(&[1; 5000]).unwrap();
    }
    let (done, all) = std::sync::mpsc::channel();
    for _ in 0..6 {
        let done = done.clone();
        std::thread::spawn(move || done.send(std::process::Command::new("true").status().unwrap()));
    }
    let early = all.recv_timeout(Duration::from_secs(2));
    signal(&pid("mds1"), Signal::CONT);
    for _ in u8::from(early.is_ok())..6 {
        if let Err(e) = all.recv_timeout(Duration::from_secs(60)) {
            kill(&pid("mount"));
            panic!("programs do not begin: {e}");
        }
    }
    assert!(early.is_err(), "nothing was waited for");
}

/// A mount that dies between a write and the report of its size leaves bytes beyond the end. The
/// next mount sees by the dead one's lifeline that it has ended, so nothing here waits for a
/// session's term.
#[test]
fn what_a_killed_mount_wrote_beyond_the_end_never_shows() {
    if !can_mount() {
        return;
    }
    let small = Small::new();
    let mount = ["--mount", small.mnt.to_str().unwrap()];
    ok(&small.up(&mount));
    let files: Vec<PathBuf> = (0..8).map(|i| small.mnt.join(format!("f{i}"))).collect();
    let synced = vec![1; 5000];
    for f in &files {
        let mut f = fs::File::create(f).unwrap();
        f.write_all(&synced).unwrap();
        f.sync_all().unwrap();
    }
    let open: Vec<fs::File> = files
        .iter()
        .map(|f| {
            let f = fs::File::options().write(true).open(f).unwrap();
            f.write_all_at(&[0xee; 300_000], 5000).unwrap();
            f
        })
        .collect();
    let pid = fs::read_to_string(small.dir.join("run/mount.pid")).unwrap();
    kill(&pid);
    drop(open);
    ok(&small.up(&mount));
    // The old session ends at once, not after its term.
    let status = small.status();
    let servers = status["servers"].as_array().unwrap();
    let leader = servers
        .iter()
        .find(|s| s["raft"]["id"].is_u64() && s["raft"]["id"] == s["raft"]["leader"])
        .unwrap();
    let sessions = leader["sessions"].as_array().unwrap();
    assert!(!sessions.is_empty(), "{status}");
    assert!(
        sessions.iter().all(|s| s["pid"].as_u64() != pid.trim().parse().ok()),
        "the dead client is missed: {status}"
    );
    for f in &files {
        let mut f = fs::File::options().read(true).write(true).open(f).unwrap();
        let size = f.metadata().unwrap().len() as usize;
        assert!(size >= synced.len(), "{size}");
        f.set_len(1 << 20).unwrap();
        let mut all = Vec::new();
        f.read_to_end(&mut all).unwrap();
        assert!(all.len() == 1 << 20 && all[..5000] == synced);
        assert!(all[5000..size].iter().all(|b| *b == 0xee || *b == 0));
        assert_eq!(all[size..].iter().position(|b| *b != 0), None, "old bytes beyond {size}");
    }
    assert!(ok(&small.on_cluster("fsck", &[])).contains("clean"));
}

/// Soft and hard limit of open files of a process.
fn file_limits(pid: &str) -> (String, String) {
    let text = fs::read_to_string(format!("/proc/{}/limits", pid.trim())).unwrap();
    let line = text.lines().find_map(|l| l.strip_prefix("Max open files")).unwrap();
    let mut words = line.split_whitespace().map(String::from);
    (words.next().unwrap(), words.next().unwrap())
}

#[test]
fn servers_take_as_many_descriptors_as_they_may_have() {
    let c = Small::new();
    let up = "ulimit -Sn 300 && exec \"$0\" up --mds 1 --oss 1 --mirror 1 --targets-per-oss 1 --target-gib 1 --mount none --dir \"$1\"";
    let out = std::process::Command::new("sh")
        .args(["-c", up, env!("CARGO_BIN_EXE_strake")])
        .arg(&c.dir)
        .output()
        .unwrap();
    ok(&out);
    for server in ["mds1", "oss1"] {
        let (soft, hard) =
            file_limits(&fs::read_to_string(c.dir.join(format!("run/{server}.pid"))).unwrap());
        assert!(soft == hard && soft != "300", "{server}: {soft} of {hard}");
    }
}
