//! Follower reads with real processes: a mount lists a directory at a follower, which is killed
//! meanwhile.

#[allow(dead_code, reason = "some of it is for other tests")]
use std::{
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use crate::common::{kill, ok, strake, up};
use serde_json::Value;

const NAMES: usize = 3000;
const LIMIT: Duration = Duration::from_secs(60);

struct Cluster(tempfile::TempDir);

impl Cluster {
    fn dir(&self) -> PathBuf {
        self.0.path().join("cluster")
    }
    fn mnt(&self) -> PathBuf {
        self.0.path().join("mnt")
    }

    /// A status field of each metadata server that answers, with the server's name.
    fn servers(&self, field: &str) -> Vec<(String, Value)> {
        let out = strake().args(["status", "--json", "--dir"]).arg(self.dir()).output().unwrap();
        let status: Value = serde_json::from_slice(&out.stdout).unwrap();
        let all = status["servers"].as_array().unwrap().iter().filter(|s| s["role"] == "mds");
        all.map(|s| (s["name"].as_str().unwrap().to_string(), s.pointer(field).unwrap().clone()))
            .collect()
    }

    /// How many listings each server has answered as a follower.
    fn followed(&self) -> Vec<(String, u64)> {
        self.servers("/follower_reads")
            .into_iter()
            .map(|(name, n)| (name, n.as_u64().unwrap()))
            .collect()
    }

    fn stats(&self, counter: &str) -> u64 {
        let said = ok(&strake().args(["stats", "--json"]).arg(self.mnt()).output().unwrap());
        serde_json::from_str::<Value>(&said).unwrap()[counter].as_u64().unwrap()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let _ = strake().args(["down", "--delete", "--dir"]).arg(self.dir()).output();
    }
}

fn names(at: &Path) -> usize {
    fs::read_dir(at).unwrap().filter(|e| !e.as_ref().unwrap().file_name().is_empty()).count()
}

#[test]
fn a_listing_is_answered_by_a_follower_and_goes_on_when_that_is_killed() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let c = Cluster(tempfile::tempdir().unwrap());
    let said =
        ok(&up(3, 1).args(["--mirror=1", "--mount=none", "--dir"]).arg(c.dir()).output().unwrap());
    let mds = said.lines().find_map(|l| l.strip_prefix("metadata")).unwrap().trim().to_string();
    fs::create_dir(c.mnt()).unwrap();
    let key = c.dir().join("client.key");
    let mut mount = strake();
    mount
        .arg("mount")
        .arg(&mds)
        .arg(c.mnt())
        .arg("--client-key")
        .arg(key)
        .args(["-o", "follower_reads=always"]);
    ok(&mount.output().unwrap());

    let large = c.mnt().join("large");
    fs::create_dir(&large).unwrap();
    (0..NAMES).for_each(|n| fs::create_dir(large.join(format!("name-{n:05}"))).unwrap());
    assert_eq!(names(&large), NAMES);
    let told = c.followed();
    let (follower, n) = told.iter().max_by_key(|(_, n)| *n).unwrap().clone();
    assert!(n > 0 && c.stats("follower_reads") > 0, "{told:?}");
    let leads = |(name, leader): &(String, Value)| {
        *name == follower
            && *leader == c.servers("/raft/id").iter().find(|s| s.0 == follower).unwrap().1
    };
    assert!(!c.servers("/raft/leader").iter().any(leads), "{follower} answers and leads");

    // Listings continue and stay complete, even after that server is killed.
    let (stop, listings) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let lister = thread::spawn({
        let (stop, listings, large) = (stop.clone(), listings.clone(), large.clone());
        move || {
            while !stop.load(Relaxed) {
                assert_eq!(names(&large), NAMES);
                listings.fetch_add(1, Relaxed);
            }
        }
    });
    let some = |more: u64| {
        let (began, from) = (Instant::now(), listings.load(Relaxed));
        while listings.load(Relaxed) < from + more {
            assert!(began.elapsed() < LIMIT && !lister.is_finished(), "the listings stopped");
            thread::sleep(Duration::from_millis(10));
        }
    };
    some(3);
    let before = c.stats("follower_reads");
    kill(&fs::read_to_string(c.dir().join("run").join(format!("{follower}.pid"))).unwrap());
    some(10);
    let others = |c: &Cluster| c.followed().iter().map(|(_, n)| n).sum::<u64>();
    let (began, at_others) = (Instant::now(), others(&c));
    while others(&c) <= at_others {
        assert!(began.elapsed() < LIMIT, "the other follower is not asked");
        some(1);
    }
    stop.store(true, Relaxed);
    lister.join().unwrap();
    assert!(c.stats("follower_reads") > before && c.stats("follower_refusals") > 0);
    ok(&strake().arg("umount").arg(c.mnt()).output().unwrap());
}
