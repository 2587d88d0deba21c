//! `strake status`, `wait` and `client` on clusters of real processes: found by any of its metadata
//! servers; whole, without a storage server, without a leader; a client that is thrown out.

use std::{
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Output},
    time::Duration,
};

use serde_json::Value;

use crate::common::{eventually, kill, ok, refused, strake, text, up};

struct Cluster {
    root: tempfile::TempDir,
}

impl Cluster {
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn up(&self) {
        let mut c = up(3, 2);
        ok(&c.args(["--mirror=2", "--mount=none", "--dir"]).arg(self.dir()).output().unwrap());
    }
    fn kill(&self, role: &str) {
        kill(&fs::read_to_string(self.dir().join("run").join(format!("{role}.pid"))).unwrap());
    }
    /// Where a metadata server listens for everybody.
    fn listen(&self, n: usize) -> String {
        let config = fs::read_to_string(self.dir().join(format!("mds{n}.toml"))).unwrap();
        let (_, rest) = config.split_once("listen = \"tcp:").unwrap();
        rest.split_once('"').unwrap().0.to_string()
    }
    /// A command in a folder without a cluster, with the key by the variable.
    fn far(&self, args: &[&str]) -> Command {
        let mut c = strake();
        c.args(args).current_dir(self.root.path());
        c.env("STRAKE_CLUSTER_KEY", self.dir().join("cluster.key"));
        c
    }
    fn run(&self, args: &[&str]) -> Output {
        strake().args(args).arg("--dir").arg(self.dir()).output().unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.run(&["down"]);
    }
}

fn codes(out: &Output) -> Vec<String> {
    let v: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|_| panic!("{out:?}"));
    let health = if v["health"].is_null() { &v } else { &v["health"] };
    let reasons = health["reasons"].as_array().unwrap();
    reasons.iter().map(|r| r["code"].as_str().unwrap().to_string()).collect()
}

#[test]
fn any_metadata_server_tells_of_all_and_what_is_wrong_has_a_code() {
    let c = Cluster { root: tempfile::tempdir().unwrap() };
    c.up();
    assert_eq!(ok(&c.run(&["wait", "--healthy", "--timeout=60"])), "OK\n");
    assert!(ok(&c.run(&["status"])).starts_with("OK\n\nNODE"));
    // Each of them alone, leader or follower, by option and by variable.
    for n in 1..4 {
        let out = c.far(&["status", "--json", "--mds", &c.listen(n)]).output().unwrap();
        let v: Value = serde_json::from_str(&ok(&out)).unwrap();
        let names: Vec<&str> =
            v["servers"].as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["mds1", "mds2", "mds3", "oss1", "oss2"]);
        let list = c.far(&["target", "list"]).env("STRAKE_MDS", c.listen(n)).output().unwrap();
        assert!(ok(&list).contains("oss2"));
        let scrub = c.far(&["scrub", "--mds", &c.listen(n)]).output().unwrap();
        assert!(ok(&scrub).lines().count() > 2);
    }
    refused(&c.far(&["target", "list"]).output().unwrap(), &["which cluster", "--mds"]);
    let one = c.listen(2);
    let bad = c.far(&["status"]).env("STRAKE_MDS", "no port:").output().unwrap();
    refused(&bad, &["is not HOST[:PORT]"]);

    c.kill("oss2");
    let far = |args: &[&str]| c.far(args).env("STRAKE_MDS", &one).output().unwrap();
    let out = far(&["wait", "--redundant", "--timeout=8"]);
    assert_eq!(out.status.code(), Some(2), "{out:?}");
    let said = text(&out.stdout);
    for line in
        ["WARN\n", "  server-silent: oss2 (tcp:127", "  copies-missing: ", "  target-dead: "]
    {
        assert!(said.contains(line), "'{line}' is not in: {said}");
    }
    assert!(text(&out.stderr).contains("not redundant after 8 s"), "{out:?}");
    let out = far(&["status", "--json"]);
    assert_eq!(out.status.code(), Some(2));
    let single = "single-copy-away";
    assert_eq!(codes(&out), [single, "copies-missing", "server-silent", "target-dead"]);
    c.up();
    assert_eq!(codes(&c.run(&["wait", "--redundant", "--json", "--timeout=60"])), [""; 0]);

    // Without a majority the survivor still tells of the others.
    c.kill("mds1");
    c.kill("mds3");
    let out = far(&["wait", "--healthy", "--timeout=10"]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.starts_with("ERROR\n  no-leader: no metadata server leads; a majority"), "{said}");
    for n in [1, 3] {
        assert!(said.contains(&format!("(tcp:{}) does not answer", c.listen(n))), "{said}");
    }
    let out = far(&["target", "list", "--timeout=1"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("the timeout is over"), "{out:?}");
}

#[test]
fn a_client_that_is_evicted_is_told_so_and_comes_back() {
    if let Err(e) = strake_fuse::can_mount(&std::env::temp_dir()) {
        println!("skipped: {e}");
        return;
    }
    let c = Cluster { root: tempfile::tempdir().unwrap() };
    let mnt = c.root.path().join("mnt");
    let mut up = up(1, 1);
    ok(&up.arg("--mirror=1").arg("--mount").arg(&mnt).arg("--dir").arg(c.dir()).output().unwrap());
    let list = || -> Vec<Value> {
        let v: Value = serde_json::from_str(&ok(&c.run(&["client", "list", "--json"]))).unwrap();
        v["clients"].as_array().unwrap().clone()
    };
    let mut open = fs::File::create(mnt.join("open")).unwrap();
    open.write_all(b"before").unwrap();
    open.sync_all().unwrap();
    let before = list();
    assert_eq!(before.len(), 1, "{before:?}");
    let (id, host) = (&before[0]["id"], before[0]["hostname"].as_str().unwrap());
    assert_eq!((&before[0]["opens"], &before[0]["address"]), (&1.into(), &"127.0.0.1".into()));
    refused(&c.run(&["client", "evict", "nobody-here"]), &["no client 'nobody-here'"]);
    assert_eq!(list()[0]["id"], *id);

    let said = ok(&c.run(&["client", "evict", host]));
    assert!(said.starts_with(&format!("session {id} of {host} (process ")), "{said}");
    let log = c.dir().join("logs/mount.log");
    let limit = Duration::from_secs(30);
    eventually("the mount says why", limit, || {
        let told = format!("session {id} was evicted by an administrator");
        fs::read_to_string(&log).unwrap_or_default().contains(&told)
    });
    // What was open is lost to it; everything else goes on with a new session.
    let lost = open.write_all(b"after").and_then(|()| open.sync_all());
    assert!(lost.is_err(), "{lost:?}");
    drop(open);
    eventually("it writes again", limit, || fs::write(mnt.join("new"), b"new").is_ok());
    assert_eq!(fs::read(mnt.join("open")).unwrap(), b"before");
    let now = list();
    assert!(now.len() == 1 && now[0]["id"] != *id, "{now:?}");
}
