//! A local cluster with a mount, two copies of everything, and targets of 1 GiB on each storage
//! server.

use std::{
    fs,
    path::PathBuf,
    process::Output,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::common::{kill, ok, strake};

pub struct Cluster {
    pub root: tempfile::TempDir,
    servers: &'static str,
    targets: &'static str,
}

impl Cluster {
    pub fn new(servers: &'static str) -> Cluster {
        Cluster::with(servers, "1")
    }
    /// Makes a cluster of `servers` storage servers with `targets` targets on each.
    pub fn with(servers: &'static str, targets: &'static str) -> Cluster {
        let c = Cluster { root: tempfile::tempdir().unwrap(), servers, targets };
        ok(&c.up());
        c
    }
    pub fn up(&self) -> Output {
        let mut up = strake();
        up.args([
            "up",
            "--mds",
            "1",
            "--target-gib",
            "1",
            "--mirror",
            "2",
            "--targets-per-oss",
            self.targets,
            "--oss",
            self.servers,
        ]);
        up.arg("--dir").arg(self.dir()).arg("--mount").arg(self.mnt()).output().unwrap()
    }
    pub fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    pub fn mnt(&self) -> PathBuf {
        self.root.path().join("mnt")
    }
    pub fn run(&self, args: &[&str]) -> Output {
        strake().args(args).arg("--dir").arg(self.dir()).output().unwrap()
    }
    pub fn targets(&self) -> Vec<Value> {
        let v: Value =
            serde_json::from_slice(&self.run(&["target", "list", "--json"]).stdout).unwrap();
        v["targets"].as_array().unwrap().clone()
    }
    pub fn target(&self, id: usize) -> Value {
        self.targets().into_iter().find(|t| t["target"] == id).unwrap()
    }
    /// The id of a server's target. Servers register in any order, so the id is not the server's
    /// number.
    pub fn target_of(&self, oss: usize) -> usize {
        let name = format!("oss{oss}");
        let all = self.targets();
        all.iter().find(|t| t["server"] == name.as_str()).unwrap()["target"].as_u64().unwrap()
            as usize
    }
    pub fn kill_oss(&self, oss: usize) {
        kill(&fs::read_to_string(self.dir().join("run").join(format!("oss{oss}.pid"))).unwrap());
    }
    pub fn until(&self, what: &str, mut f: impl FnMut() -> bool) {
        let start = Instant::now();
        while !f() {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "not within a minute: {what}\n{:#?}",
                self.targets()
            );
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = self.run(&["down"]);
    }
}

pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    let mut x = seed as u64 * 0x9e37_79b9 + 1;
    let mut next = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..len).map(|_| next()).collect()
}
