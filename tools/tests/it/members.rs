//! The group of metadata servers changes under a mount in use: `strake mds
//! list|add|remove|transfer|replace`.

use std::{
    fs,
    io::Write,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::common::{eventually, kill, ok, refused, strake, text, up};
use serde_json::Value;

/// A cluster of three metadata servers, and more servers that this test starts.
struct Group {
    root: tempfile::TempDir,
    /// Addresses of all metadata servers that ever existed.
    known: Vec<String>,
    extra: Vec<Option<(Child, PathBuf)>>,
}

const LIMIT: Duration = Duration::from_secs(60);

#[track_caller]
fn until(what: &str, f: impl FnMut() -> bool) {
    eventually(what, LIMIT, f);
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Group {
    fn new(oss: u32, mount: bool) -> Group {
        let root = tempfile::tempdir().unwrap();
        let mut g = Group { root, known: Vec::new(), extra: Vec::new() };
        let mnt = if mount { g.mnt() } else { "none".into() };
        ok(&up(3, oss)
            .args([&format!("--mirror={}", oss.min(2)), "--dir"])
            .arg(g.dir())
            .arg("--mount")
            .arg(mnt)
            .output()
            .unwrap());
        for id in 1..=3 {
            let config = fs::read_to_string(g.dir().join(format!("mds{id}.toml"))).unwrap();
            let listen = config.lines().find_map(|l| l.strip_prefix("listen = ")).unwrap();
            g.known.push(listen.trim_matches('"').into());
        }
        g
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn mnt(&self) -> PathBuf {
        self.root.path().join("mnt")
    }
    fn pid_file(&self, role: &str) -> PathBuf {
        self.dir().join("run").join(format!("{role}.pid"))
    }

    /// Writes the configuration of a new server with this id, based on that of the first server.
    /// Returns the file and the server's address.
    fn configure(&self, id: usize) -> (PathBuf, String) {
        let first = fs::read_to_string(self.dir().join("mds1.toml")).unwrap();
        let at = format!("tcp:127.0.0.1:{}", free_port());
        let mut lines: Vec<String> = Vec::new();
        for l in first.lines() {
            let key = l.split(" = ").next().unwrap_or_default();
            lines.push(match key {
                "id" => format!("id = {id}\njoin = true"),
                "name" => format!("name = \"mds{id}\""),
                "dir" => format!("dir = {:?}", self.root.path().join(format!("mds{id}"))),
                "listen" => format!("listen = \"{at}\""),
                "admin" => continue,
                _ => l.into(),
            });
        }
        let file = self.root.path().join(format!("mds{id}.toml"));
        fs::write(&file, lines.join("\n") + "\n").unwrap();
        (file, at)
    }

    fn start(&self, file: &Path) -> Child {
        let log =
            fs::File::options().create(true).append(true).open(file.with_extension("log")).unwrap();
        let mut c = strake();
        c.args(["mds", "--config"]).arg(file);
        c.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
    }

    /// Starts a new, empty server; returns its address and its place in `extra`.
    fn join(&mut self, id: usize) -> (String, usize) {
        let (file, at) = self.configure(id);
        let child = self.start(&file);
        self.known.push(at.clone());
        self.extra.push(Some((child, file)));
        (at, self.extra.len() - 1)
    }

    fn mds(&self, args: &[&str]) -> Output {
        self.mds_at(&self.known.join(","), "cluster.key", "60", args)
    }
    /// Runs a command that knows only these servers and has this key.
    fn mds_at(&self, at: &str, key: &str, timeout: &str, args: &[&str]) -> Output {
        let key = self.dir().join(key);
        let mut c = strake();
        c.arg("mds")
            .args(args)
            .args(["--timeout", timeout, "--mds", at, "--cluster-key"])
            .arg(key)
            .output()
            .unwrap()
    }

    fn list(&self) -> Value {
        serde_json::from_slice(&self.mds(&["list", "--json"]).stdout).unwrap()
    }
    fn leader(&self) -> u64 {
        let mut leader = 0;
        until("a leader", || {
            leader = self.list()["leader"].as_u64().unwrap();
            leader != 0
        });
        leader
    }
    /// Waits until there is a leader and every member is up and has caught up.
    fn in_order(&self) {
        until("all members in order", || self.mds(&["list"]).status.code() == Some(0));
    }
    fn voters(&self) -> Vec<u64> {
        let l = self.list();
        let members = l["members"].as_array().unwrap();
        members.iter().filter(|m| m["voter"] == true).map(|m| m["id"].as_u64().unwrap()).collect()
    }
    /// Ids and addresses as a configuration should list them now.
    fn peers(&self) -> Value {
        self.list()["config"]["peers"].clone()
    }
    fn address(&self, id: u64) -> String {
        let l = self.list();
        let m = l["members"].as_array().unwrap().iter().find(|m| m["id"] == id).unwrap().clone();
        m["address"].as_str().unwrap().into()
    }

    /// Waits until one of the first three servers has ended by itself.
    fn first_ends(&self, id: u64) {
        let pid: u32 =
            fs::read_to_string(self.pid_file(&format!("mds{id}"))).unwrap().trim().parse().unwrap();
        // A zombie has ended, too: without an init process, no parent reaps the processes of
        // `strake up`.
        let stat = || fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        until("a removed server ends", || {
            stat().rsplit_once(')').is_none_or(|(_, s)| s.trim_start().starts_with('Z'))
        });
        let log = fs::read_to_string(self.dir().join(format!("logs/mds{id}.log"))).unwrap();
        assert!(log.contains("was removed from its group"), "{log}");
    }

    fn signal(child: &Child, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = strake().args(["down", "--dir"]).arg(self.dir()).output();
        for (child, _) in self.extra.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A program on the mount that makes, writes, syncs, renames, reads, lists and removes, until it is
/// stopped or a call fails.
struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<std::io::Result<(u64, Duration)>>,
}

impl Writer {
    fn start(dir: PathBuf) -> Writer {
        fs::create_dir(&dir).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = thread::spawn(move || {
            let (mut n, mut longest) = (0, Duration::ZERO);
            let mut log = fs::File::create(dir.join("log"))?;
            while !stopped.load(Ordering::Relaxed) {
                let start = Instant::now();
                round(&dir, n, &mut log)?;
                longest = longest.max(start.elapsed());
                n += 1;
            }
            assert_eq!(fs::read_to_string(dir.join("log"))?.lines().count() as u64, n);
            Ok((n, longest))
        });
        Writer { stop, thread }
    }

    /// Stops it. Returns the number of rounds and the longest one.
    fn end(self) -> (u64, Duration) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap().expect("no call of a program fails")
    }
}

fn round(dir: &Path, n: u64, log: &mut fs::File) -> std::io::Result<()> {
    let (a, b) = (dir.join(format!("a{n}")), dir.join(format!("b{n}")));
    let data: Vec<u8> = (0..30_000u64).map(|i| (i * 7 + n) as u8).collect();
    let mut f = fs::File::create_new(&a)?;
    f.write_all(&data)?;
    f.sync_all()?;
    fs::rename(&a, &b)?;
    assert!(fs::read(&b)? == data, "round {n}");
    assert!(fs::read_dir(dir)?.any(|e| e.is_ok_and(|e| e.path() == b)), "round {n}");
    writeln!(log, "{n}")?;
    if n >= 5 {
        fs::remove_file(dir.join(format!("b{}", n - 5)))?;
    }
    Ok(())
}

#[test]
fn members_are_added_transferred_replaced_and_restarted_under_a_mount() {
    if let Err(e) = strake_fuse::can_mount(&std::env::temp_dir()) {
        println!("skipped: {e}");
        return;
    }
    let mut g = Group::new(2, true);
    let writer = Writer::start(g.mnt().join("w"));
    g.in_order();
    assert_eq!(g.voters(), [1, 2, 3]);

    // A fourth server joins, becomes leader and is removed.
    let (at4, n4) = g.join(4);
    until("the new server answers", || g.mds(&["add", &at4]).status.success());
    assert!(ok(&g.mds(&["add", &at4])).contains("is a member already"));
    assert_eq!(g.voters(), [1, 2, 3, 4]);
    ok(&g.mds(&["transfer", &at4]));
    assert_eq!(g.leader(), 4);
    assert!(ok(&g.mds(&["transfer", "4"])).contains("leads already"));
    ok(&g.mds(&["remove", "4"]));
    assert!(ok(&g.mds(&["remove", "4"])).contains("was removed before"));
    assert_eq!(g.voters(), [1, 2, 3]);
    let mut gone = g.extra[n4].take().unwrap();
    assert!(gone.0.wait().unwrap().success(), "a removed server ends as it should");
    // From then on it cannot come back: it refuses to start with its old folder, and the others
    // refuse it.
    let mut again = g.start(&gone.1);
    assert!(!again.wait().unwrap().success());
    assert!(
        fs::read_to_string(gone.1.with_extension("log")).unwrap().contains("never used before")
    );

    // Each of the first three servers is replaced, the leader among them.
    for old in 1..=3u64 {
        let (at, _) = g.join(4 + old as usize);
        until("the replacement", || g.mds(&["replace", &old.to_string(), &at]).status.success());
        assert!(ok(&g.mds(&["replace", &old.to_string(), &at])).contains("already"));
        g.first_ends(old);
    }
    g.in_order();
    assert_eq!(g.voters(), [5, 6, 7]);

    // All servers in the configuration of the mount's daemon are gone; its successor knows the
    // current ones.
    let serving = || {
        let log = fs::read_to_string(g.dir().join("logs/mount.log")).unwrap();
        let last = log.rsplit_once(" serves").and_then(|(before, _)| before.rsplit_once("daemon "));
        last.expect("the log says who serves").1.to_string()
    };
    let daemon = serving();
    kill(&daemon);
    until("another daemon", || serving() != daemon);

    // A rolling restart, once with SIGTERM and once with SIGKILL.
    let peers = g.peers();
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::KILL] {
        for i in 1..=3 {
            let (mut child, file) = g.extra[i].take().unwrap();
            Group::signal(&child, signal);
            child.wait().unwrap();
            let config = fs::read_to_string(&file).unwrap();
            let kept = config.lines().filter(|l| !l.starts_with("peers") && !l.starts_with("join"));
            let text =
                kept.map(|l| format!("{l}\n")).collect::<String>() + &format!("peers = {peers}\n");
            fs::write(&file, text).unwrap();
            g.extra[i] = Some((g.start(&file), file));
            g.in_order();
        }
    }
    let (rounds, longest) = writer.end();
    println!("{rounds} rounds of a program, the longest took {longest:?}");
    assert!(
        rounds > 20 && longest < Duration::from_secs(20),
        "{rounds} rounds, the longest took {longest:?}"
    );
    // Unmount while the servers live: `strake down` knows none of them.
    ok(&strake().arg("umount").arg(g.mnt()).output().unwrap());
}

#[test]
fn a_wiped_leader_is_replaced_and_then_the_next_one() {
    let mut g = Group::new(1, false);
    g.in_order();
    // First: an ordinary member of the cluster loses its disk while it leads.
    let first = g.leader();
    kill(&fs::read_to_string(g.pid_file(&format!("mds{first}"))).unwrap());
    fs::remove_dir_all(g.dir().join(format!("mds{first}"))).unwrap();
    until("another leader", || {
        !matches!(g.list()["leader"].as_u64(), Some(0)) && g.list()["leader"] != first
    });
    assert_eq!(g.mds(&["list"]).status.code(), Some(2), "one member is silent");
    let (at, n) = g.join(4);
    until("the replacement", || g.mds(&["replace", &first.to_string(), &at]).status.success());
    assert!(g.voters().len() == 3 && g.voters().contains(&4));
    // Next: the replacement, after it was made the leader.
    ok(&g.mds(&["transfer", "4"]));
    let (mut child, file) = g.extra[n].take().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    fs::remove_dir_all(g.root.path().join("mds4")).unwrap();
    // It comes back empty under its old id: the others must not treat it as the old member.
    g.extra[n] = Some((g.start(&file), file));
    until("another leader", || !matches!(g.list()["leader"].as_u64(), Some(0 | 4)));
    until("it is seen through", || text(&g.mds(&["add", &at]).stderr).contains("lost its disk"));
    let (at5, _) = g.join(5);
    until("the replacement", || g.mds(&["replace", "4", &at5]).status.success());
    g.in_order();
    assert!(!g.voters().contains(&4) && g.voters().contains(&5));
    // A third server is lost before it becomes a voter, and another one takes its address. The
    // leader's log is complete and spans several terms.
    let (at, n) = g.join(6);
    let beside = "the server at tcp:127.0.0.1:1: ";
    until("it learns", || text(&g.mds(&["add", &at, "127.0.0.1:1"]).stderr).contains(beside));
    let (mut child, file) = g.extra[n].take().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    fs::remove_dir_all(g.root.path().join("mds6")).unwrap();
    let config = fs::read_to_string(&file).unwrap().replace("id = 6", "id = 7");
    fs::write(&file, config).unwrap();
    g.extra[n] = Some((g.start(&file), file));
    until("the replacement", || g.mds(&["replace", "5", &at]).status.success());
    g.in_order();
    assert!(g.voters().len() == 3 && g.voters().contains(&7));
    assert_eq!(g.list()["members"].as_array().unwrap().len(), 3, "{}", g.list());
}

#[test]
fn what_cannot_be_is_refused_with_words() {
    let mut g = Group::new(1, false);
    g.in_order();
    // The command also finds the servers by the cluster's folder.
    assert!(
        ok(&strake().args(["mds", "list", "--dir"]).arg(g.dir()).output().unwrap())
            .contains("leader")
    );
    refused(
        &g.mds(&["remove", "9"]),
        &["metadata server 9 is not in the group", "the members are 1 at tcp:"],
    );
    refused(
        &g.mds(&["transfer", "tcp:127.0.0.1:1"]),
        &["metadata server tcp:127.0.0.1:1 is not in the group"],
    );
    refused(&g.mds(&["transfer", "nonsense"]), &["'nonsense' is neither"]);
    refused(&g.mds(&["add", "127.0.0.1:1"]), &["127.0.0.1:1", "start it first"]);
    let other = g.address(2);
    refused(&g.mds(&["replace", "2", &other]), &["cannot replace itself"]);
    assert!(ok(&g.mds(&["add", &other])).contains("is a member already"));
    // Another cluster's server, and another cluster's key.
    let b = Group::new(1, false);
    refused(&g.mds(&["add", &b.address(1)]), &["another cluster"]);
    fs::copy(b.dir().join("cluster.key"), g.dir().join("other.key")).unwrap();
    for command in [&["list"][..], &["remove", "1"]] {
        refused(&g.mds_at(&other, "other.key", "5", command), &["not this cluster's cluster key"]);
        refused(&g.mds_at(&other, "client.key", "5", command), &["client.key", "a client key"]);
    }
    drop(b);
    // A new server with an id that is taken.
    let (file, at) = g.configure(2);
    g.extra.push(Some((g.start(&file), file)));
    until("it is refused", || {
        text(&g.mds(&["add", &at]).stderr).contains("never used before, such as 4")
    });
    // Without a majority `list` shows what is known, and changes are refused.
    let members = g.list();
    for id in [1, 2] {
        kill(&fs::read_to_string(g.pid_file(&format!("mds{id}"))).unwrap());
    }
    until("no leader", || g.list()["leader"] == 0);
    let out = g.mds(&["list"]);
    assert!(
        out.status.code() == Some(2) && text(&out.stdout).contains("no metadata server leads"),
        "{out:?}"
    );
    let at3 = members["members"][2]["address"].as_str().unwrap();
    let out = g.mds_at(at3, "cluster.key", "5", &["remove", "1"]);
    assert!(
        out.status.code() == Some(2) && text(&out.stderr).contains("repeat the command"),
        "{out:?}"
    );
}

/// The options that run a server and the commands for the group cannot be mixed.
#[test]
fn running_a_server_and_managing_them_are_told_apart() {
    let run = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_strake")).arg("mds").args(args).output().unwrap()
    };
    refused(&run(&["--id", "1", "list"]), &["list"]);
    refused(&run(&["list", "--dir", "/nonexistent"]), &["no cluster in"]);
    refused(&run(&["add"]), &["<ADDR>"]);
    assert!(ok(&run(&["--help"])).contains("replace"));
}
