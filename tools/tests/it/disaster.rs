//! Recovery of a metadata group that lost its majority or everything: `strake mds
//! inspect|recover|dump|load` on real processes.

use std::{
    fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Output, Stdio},
    time::Duration,
};

use crate::common::{eventually, kill, ok, refused, strake, text, up};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(90);
const FILES: usize = 40;

#[track_caller]
fn until(what: &str, f: impl FnMut() -> bool) {
    eventually(what, LIMIT, f);
}

/// A mounted local cluster of three metadata servers and two storage servers, plus servers that the
/// test starts later.
struct World {
    root: tempfile::TempDir,
    extra: Vec<Child>,
    /// Addresses of metadata servers that may be asked.
    known: Vec<String>,
}

impl World {
    /// `None` where nothing can be mounted.
    fn new() -> Option<World> {
        if let Err(e) = strake_fuse::can_mount(&std::env::temp_dir()) {
            println!("skipped: {e}");
            return None;
        }
        let w = World { root: tempfile::tempdir().unwrap(), extra: Vec::new(), known: Vec::new() };
        let mut up = up(3, 2);
        ok(&up
            .arg("--mirror=2")
            .arg("--dir")
            .arg(w.dir())
            .arg("--mount")
            .arg(w.mnt())
            .output()
            .unwrap());
        Some(w)
    }

    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn mnt(&self) -> PathBuf {
        self.root.path().join("mnt")
    }
    fn folder(&self, id: usize) -> PathBuf {
        self.dir().join(format!("mds{id}"))
    }
    fn key(&self) -> PathBuf {
        self.dir().join("cluster.key")
    }
    fn address(&self, id: usize) -> String {
        let config = fs::read_to_string(self.dir().join(format!("mds{id}.toml"))).unwrap();
        config.lines().find_map(|l| l.strip_prefix("listen = ")).unwrap().trim_matches('"').into()
    }
    fn data(n: usize) -> Vec<u8> {
        (0..20_000 + n * 777).map(|i| (i * 31 + n * 7) as u8).collect()
    }

    /// Makes files, and waits until every member of the group has all of them.
    fn fill(&mut self) {
        fs::create_dir(self.mnt().join("d")).unwrap();
        for n in 0..FILES {
            let path = self.mnt().join(format!("d/f{n}"));
            fs::write(&path, World::data(n)).unwrap();
            fs::File::open(&path).unwrap().sync_all().unwrap();
        }
        fs::File::open(self.mnt().join("d")).unwrap().sync_all().unwrap();
        self.known = (1..=3).map(|id| self.address(id)).collect();
        until("all members have it", || {
            let l = self.list();
            let all = l["members"].as_array().map(|a| a.to_vec()).unwrap_or_default();
            all.len() == 3 && all.iter().all(|m| m["applied"] == l["last_index"])
        });
    }

    fn all_is_there(&self) {
        for n in 0..FILES {
            let path = self.mnt().join(format!("d/f{n}"));
            // The first calls may find that the session was ended.
            until("a file can be read", || fs::read(&path).is_ok());
            assert!(fs::read(&path).unwrap() == World::data(n), "{}", path.display());
        }
        assert_eq!(fs::read_dir(self.mnt().join("d")).unwrap().count(), FILES);
    }

    fn works(&self) {
        let path = self.mnt().join("d/after");
        fs::write(&path, b"after").unwrap();
        fs::File::open(&path).unwrap().sync_all().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"after");
        fs::remove_file(&path).unwrap();
    }

    fn kill_mds(&self, id: usize) {
        kill(&fs::read_to_string(self.dir().join(format!("run/mds{id}.pid"))).unwrap());
        until("its folder is free", || offline(&["inspect"], &[&self.folder(id)]).status.success());
    }

    fn kill_oss(&self, n: usize) {
        kill(&fs::read_to_string(self.dir().join(format!("run/oss{n}.pid"))).unwrap());
    }

    /// Starts a storage server of the cluster again.
    fn start_oss(&mut self, n: usize) {
        let log = fs::File::create(self.root.path().join(format!("oss{n}.log"))).unwrap();
        let mut c = strake();
        c.args(["oss", "--config"])
            .arg(self.dir().join(format!("oss{n}.toml")))
            .stdin(Stdio::null());
        self.extra.push(c.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
    }

    /// Starts a server with the first server's configuration, except for this id, folder, address
    /// and these members.
    fn start(&mut self, id: usize, dir: &Path, at: &str, peers: &[String], join: bool) -> usize {
        let first = fs::read_to_string(self.dir().join("mds1.toml")).unwrap();
        let line = |l: &str| match l.split(" = ").next().unwrap_or_default() {
            "id" => format!("id = {id}\njoin = {join}\n"),
            "name" => format!("name = \"mds{id}\"\n"),
            "dir" => format!("dir = {dir:?}\n"),
            "listen" => format!("listen = \"{at}\"\n"),
            "peers" => format!("peers = {peers:?}\n"),
            "admin" => String::new(),
            _ => format!("{l}\n"),
        };
        let file = self.root.path().join(format!("mds{id}-{}.toml", self.extra.len()));
        fs::write(&file, first.lines().map(line).collect::<String>()).unwrap();
        let log = fs::File::create(file.with_extension("log")).unwrap();
        let mut c = strake();
        c.args(["mds", "--config"]).arg(&file).stdin(Stdio::null());
        self.extra.push(c.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap());
        self.extra.len() - 1
    }

    fn log_of(&self, id: usize, n: usize) -> String {
        fs::read_to_string(self.root.path().join(format!("mds{id}-{n}.log"))).unwrap()
    }

    fn mds(&self, args: &[&str]) -> Output {
        let mut c = strake();
        let known = self.known.join(",");
        c.arg("mds")
            .args(args)
            .args(["--timeout", "60", "--mds", &known, "--cluster-key"])
            .arg(self.key())
            .output()
            .unwrap()
    }
    fn list(&self) -> Value {
        serde_json::from_slice(&self.mds(&["list", "--json"]).stdout).unwrap_or_default()
    }
    fn leads(&self, id: u64) {
        until("it leads", || self.list()["leader"] == id);
    }

    fn is_clean(&self) {
        let mut last = String::new();
        until("fsck finds nothing", || {
            let mut c = strake();
            c.args(["fsck", "--read-data", "--mds", &self.known.join(","), "--cluster-key"])
                .arg(self.key());
            let out = c.output().unwrap();
            last = format!("{}{}", text(&out.stdout), text(&out.stderr));
            println!("{last}");
            out.status.success()
        });
    }

    /// Adds two new servers to the group.
    fn grow(&mut self, first: &str, ids: [usize; 2]) {
        let mut args = vec!["add".to_string()];
        for id in ids {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let at = format!("tcp:127.0.0.1:{port}");
            let dir = self.root.path().join(format!("mds{id}"));
            self.start(id, &dir, &at, &[first.to_string()], true);
            self.known.push(at.clone());
            args.push(at);
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        until("both are taken in", || self.mds(&args).status.success());
    }

    fn voters(&self) -> Vec<u64> {
        let l = self.list();
        let members = l["members"].as_array().unwrap();
        members.iter().filter(|m| m["voter"] == true).map(|m| m["id"].as_u64().unwrap()).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for mnt in [self.mnt(), self.root.path().join("again")] {
            let _ = strake().arg("umount").arg("--force").arg(mnt).output();
        }
        let _ = strake().args(["down", "--dir"]).arg(self.dir()).output();
        for child in &mut self.extra {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn offline(args: &[&str], paths: &[&Path]) -> Output {
    strake().arg("mds").args(args).args(paths).output().unwrap()
}

fn json(out: &Output) -> Value {
    serde_json::from_slice(&out.stdout)
        .unwrap_or_else(|e| panic!("{e}: {}{}", text(&out.stdout), text(&out.stderr)))
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for e in fs::read_dir(from).unwrap() {
        let e = e.unwrap();
        let target = to.join(e.file_name());
        match e.file_type().unwrap().is_dir() {
            true => copy(&e.path(), &target),
            false => drop(fs::copy(e.path(), target).unwrap()),
        }
    }
}

#[test]
fn a_group_without_a_majority_goes_on_from_a_survivor() {
    let Some(mut w) = World::new() else { return };
    w.fill();
    let survivor = w.folder(1);
    // While the survivor's server runs, `recover` refuses.
    refused(
        &offline(&["recover", "--accept-loss", "--dir"], &[&survivor]),
        &["in use", "stop that server first"],
    );
    for id in 1..=3 {
        w.kill_mds(id);
    }
    // All three folders still exist, and any two of them hold everything that was acknowledged.
    let all = json(&offline(&["inspect", "--json"], &[&w.folder(1), &w.folder(2), &w.folder(3)]));
    assert!(all["complete"] == true && all["folders"][0]["member"] == 1, "{all}");
    // A copy of an old member's folder, which comes back later.
    let old = w.root.path().join("old2");
    copy(&w.folder(2), &old);
    for id in [2, 3] {
        fs::remove_dir_all(w.folder(id)).unwrap();
    }

    let identity = || fs::read_to_string(survivor.join("identity")).unwrap();
    let before = identity();
    let plan = offline(&["recover", "--json", "--dir"], &[&survivor]);
    assert_eq!(plan.status.code(), Some(3), "{}", text(&plan.stderr));
    let plan = json(&plan);
    assert!(
        plan["done"] == false && plan["id"] == 4 && plan["may_lose"] == true && plan["era"] == 1,
        "{plan}"
    );
    assert_eq!(identity(), before, "nothing was changed");
    refused(
        &offline(&["recover", "--id", "2", "--dir"], &[&survivor]),
        &["cannot be used again", "4 is free"],
    );
    let done = ok(&offline(&["recover", "--accept-loss", "--dir"], &[&survivor]));
    assert!(done.contains("metadata server 1 becomes 4") && done.contains("id = 4"), "{done}");
    assert!(identity().contains("member 4") && identity().contains("state complete"));
    let again = ok(&offline(&["recover", "--accept-loss", "--dir"], &[&survivor]));
    assert!(again.contains("nothing to do"), "{again}");

    let at = w.address(1);
    w.known = vec![at.clone()];
    let first = format!("4={at}");
    w.start(4, &survivor, &at, std::slice::from_ref(&first), false);
    w.leads(4);
    w.grow(&first, [5, 6]);
    assert_eq!(w.voters(), [4, 5, 6]);
    let list = w.list();
    assert_eq!(list["former"], serde_json::json!([1, 2, 3]));
    assert!(list["incarnation"].as_str().unwrap().starts_with("1-"), "{list}");
    until("all storage servers were heard", || w.list()["awaited"] == serde_json::json!([]));
    w.all_is_there();
    w.works();
    w.is_clean();

    // The old member comes back with its old configuration: it learns of the recovery and ends.
    let peers: Vec<String> = (1..=3).map(|id| format!("{id}={}", w.address(id))).collect();
    let n = w.start(2, &old, &w.address(2), &peers, false);
    until("it ends", || w.extra[n].try_wait().unwrap().is_some_and(|s| s.success()));
    assert!(w.log_of(2, n).contains("recovered without it as 1-"), "{}", w.log_of(2, n));
    assert!(fs::read_to_string(old.join("identity")).unwrap().contains("state removed"));
    assert_eq!(w.voters(), [4, 5, 6]);
    ok(&strake().arg("umount").arg(w.mnt()).output().unwrap());
}

#[test]
fn a_group_that_lost_everything_goes_on_from_a_dump() {
    let Some(mut w) = World::new() else { return };
    w.fill();
    let file = w.root.path().join("meta.dump");
    let dump =
        |dir: &Path, to: &Path| offline(&["dump", "--json", "--dir"], &[dir, Path::new("-o"), to]);
    refused(&dump(&w.folder(1), &file), &["in use"]);
    assert!(!file.exists());
    for id in 1..=3 {
        w.kill_mds(id);
    }
    let made = dump(&w.folder(1), &file);
    ok(&made);
    assert!(json(&made)["records"].as_u64().unwrap() > FILES as u64);
    refused(&dump(&w.folder(1), &file), &["exists already"]);
    // The dump is readable for people.
    let lines = fs::read_to_string(&file).unwrap();
    assert!(
        lines.lines().any(|l| l.contains("\"record\":\"name\"") && l.contains("\"name\":\"f7\""))
    );
    for id in 1..=3 {
        fs::remove_dir_all(w.folder(id)).unwrap();
    }

    // `load` makes nothing from a damaged dump.
    let new = w.root.path().join("new");
    let key = w.key();
    let load = |file: &Path, args: &[&str]| {
        let mut c = strake();
        c.args(["mds", "load"])
            .arg(file)
            .args(args)
            .arg("--dir")
            .arg(&new)
            .arg("--cluster-key")
            .arg(&key);
        c.output().unwrap()
    };
    let bad = w.root.path().join("bad.dump");
    let whole = fs::read(&file).unwrap();
    let mut flipped = whole.clone();
    let middle = whole.len() / 2;
    flipped[middle] ^= 1;
    let newer = lines.replacen("dump\":1,", "dump\":2,", 1);
    for (bytes, words) in [
        (whole[..middle].to_vec(), &["line", "byte", "cut short"][..]),
        (flipped, &["line", "checksum"]),
        (b"PK\x03\x04 something else\n".to_vec(), &["not a dump"]),
        (Vec::new(), &["not a dump"]),
        (newer.into_bytes(), &["line 1", "checksum"]),
    ] {
        fs::write(&bad, bytes).unwrap();
        refused(&load(&bad, &[]), words);
        assert!(!new.exists(), "nothing is left of it");
    }
    refused(&load(&file, &["--id", "3"]), &["cannot be used again"]);
    assert!(!new.exists());
    let loaded = load(&file, &["--json"]);
    ok(&loaded);
    let id = json(&loaded)["id"].as_u64().unwrap();
    assert_eq!(id, 4);
    refused(&load(&file, &[]), &["is the folder of metadata server 4"]);

    let at = w.address(2);
    w.known = vec![at.clone()];
    let first = format!("4={at}");
    w.start(4, &new, &at, std::slice::from_ref(&first), false);
    w.leads(4);
    w.grow(&first, [5, 6]);
    until("all storage servers were heard", || w.list()["awaited"] == serde_json::json!([]));
    w.all_is_there();
    w.works();
    w.is_clean();
    ok(&strake().arg("umount").arg(w.mnt()).output().unwrap());
}

/// The survivor missed that a storage server was out of sync. That server then comes back before
/// the one with the newer bytes.
#[test]
fn a_survivor_that_was_behind_does_not_bring_old_bytes_back() {
    let Some(mut w) = World::new() else { return };
    w.fill();
    w.kill_mds(1);
    w.kill_oss(2);
    let newer = |n: usize| World::data(n).iter().map(|b| b ^ 0x5a).collect::<Vec<u8>>();
    for n in 0..FILES {
        let path = w.mnt().join(format!("d/f{n}"));
        let mut f = fs::File::options().write(true).open(path).unwrap();
        std::io::Write::write_all(&mut f, &newer(n)).unwrap();
        f.sync_all().unwrap();
    }
    ok(&strake().arg("umount").arg(w.mnt()).output().unwrap());
    for id in [2, 3] {
        w.kill_mds(id);
    }
    w.kill_oss(1);
    ok(&offline(&["recover", "--accept-loss", "--dir"], &[&w.folder(1)]));
    let at = w.address(1);
    w.known = vec![at.clone()];
    let survivor = w.folder(1);
    w.start(4, &survivor, &at, &[format!("4={at}")], false);
    w.leads(4);
    // The out-of-sync server is there but not trusted: nothing on it is served.
    w.start_oss(2);
    until("it is heard", || w.list()["awaited"].as_array().is_some_and(|a| a.len() == 1));
    let again = w.root.path().join("again");
    fs::create_dir(&again).unwrap();
    let config = w.dir().join("mount.toml");
    ok(&strake()
        .args(["mount", "--config"])
        .arg(&config)
        .arg(&again)
        .args(["-o", "soft,timeout=3"])
        .output()
        .unwrap());
    assert!(fs::read(again.join("d/f0")).is_err(), "old bytes were served");
    w.start_oss(1);
    until("both were heard", || w.list()["awaited"] == serde_json::json!([]));
    for n in 0..FILES {
        let path = again.join(format!("d/f{n}"));
        until("a file can be read", || fs::read(&path).is_ok());
        assert!(fs::read(&path).unwrap() == newer(n), "{}", path.display());
    }
    w.is_clean();
    ok(&strake().arg("umount").arg(&again).output().unwrap());
}
