//! The last good copy, on real processes. A block decays on the only server left, and the server
//! with the good copy returns: either still a member of its chains, or after another server has
//! taken its place. Either way nothing is lost.

#[allow(dead_code, reason = "some of it is for other tests")]
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
    process::{Child, Stdio},
};

use crate::cluster::{Cluster, pattern};
use crate::common::{kill, ok, strake, text};
use serde_json::Value;

const BLOCK: usize = 4096;
/// The block that decays, in the first chunk of the file.
const AT: usize = 100 * BLOCK;

/// A server that is run with a configuration of the test's own.
struct Own(Child);

impl Own {
    fn start(role: &str, config: &Path) -> Own {
        Own(strake().arg(role).arg("--config").arg(config).stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The device of a storage server, and the offsets of blocks with these bytes on it.
fn find(c: &Cluster, oss: usize, block: &[u8]) -> (File, Vec<u64>) {
    use rustix::fs::{SeekFrom, seek};
    let path = c.dir().join(format!("oss{oss}/target0/data"));
    let data = File::options().read(true).write(true).open(path).unwrap();
    let (mut found, mut here, mut at) = (Vec::new(), [0; BLOCK], 0);
    while let Ok(start) = seek(&data, SeekFrom::Data(at)) {
        at = seek(&data, SeekFrom::Hole(start)).unwrap();
        for place in (start / BLOCK as u64 * BLOCK as u64..at).step_by(BLOCK) {
            if data.read_exact_at(&mut here, place).is_ok() && here == *block {
                found.push(place);
            }
        }
    }
    (data, found)
}

/// Of the two servers with the block one dies, then the block decays on the other. Returns the
/// remaining one, the dead one and the third server.
fn last_copy_decays(c: &Cluster, want: &[u8]) -> [usize; 3] {
    let block = &want[AT..AT + BLOCK];
    let (with, without): (Vec<usize>, Vec<usize>) =
        (1..=3).partition(|oss| !find(c, *oss, block).1.is_empty());
    let [stays, goes] = with[..] else { panic!("{with:?} have the block") };
    let target = c.target_of(goes);
    c.kill_oss(goes);
    c.until("it is dead", || c.target(target)["alive"] == false);
    let (data, found) = find(c, stays, block);
    found.iter().for_each(|at| data.write_all_at(&[!block[1234]], at + 1234).unwrap());
    data.sync_all().unwrap();
    [stays, goes, without[0]]
}

/// Runs a scrub pass on all targets; returns how much is lost.
fn lost(c: &Cluster) -> u64 {
    let s: Value =
        serde_json::from_slice(&c.run(&["scrub", "start", "--wait", "--json"]).stdout).unwrap();
    s["lost"].as_u64().unwrap()
}

fn is_all_there(c: &Cluster, want: &[u8], servers: [usize; 2]) {
    let out = c.run(&["fsck", "--read-data"]);
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
    for oss in servers {
        c.until("its device has the block", || !find(c, oss, &want[AT..AT + BLOCK]).1.is_empty());
    }
}

fn put(c: &Cluster) -> Option<Vec<u8>> {
    let want = pattern(7, 3_000_000);
    let file = c.mnt().join("only");
    fs::write(&file, &want).unwrap();
    File::open(&file).unwrap().sync_all().unwrap();
    Some(want)
}

fn skipped() -> bool {
    let skipped = !Path::new("/dev/fuse").exists();
    if skipped {
        println!("skipped: /dev/fuse is missing");
    }
    skipped
}

#[test]
fn a_good_copy_that_returns_when_another_has_taken_its_place_is_asked() {
    if skipped() {
        return;
    }
    let c = Cluster::new("3");
    let Some(want) = put(&c) else { return };
    // The configuration that `up` made, but with a short wait for dead targets.
    let config = c.root.path().join("mds.toml");
    let made = fs::read_to_string(c.dir().join("mds1.toml")).unwrap();
    fs::write(&config, format!("{made}rebuild_after_ms = 3000\n")).unwrap();
    kill(&fs::read_to_string(c.dir().join("run/mds1.pid")).unwrap());
    let _mds = Own::start("mds", &config);
    c.until("it leads", || c.run(&["target", "list", "--json"]).status.success());
    let [stays, goes, third] = last_copy_decays(&c, &want);
    c.until("another one has taken its place, and the damage is found on both", || lost(&c) == 2);
    assert!(text(&c.run(&["scrub"]).stdout).contains("/only: 4096 bytes at 409600"));
    // `give-up` says which only copies the dead target may have.
    let dead = c.target_of(goes).to_string();
    let said = ok(&c.run(&["target", "give-up", &dead]));
    assert!(
        said.contains("the only good copy") && said.contains("/only: 4096 bytes at 409600"),
        "{said}"
    );
    ok(&c.run(&["target", "keep", &dead]));
    let _back = Own::start("oss", &c.dir().join(format!("oss{goes}.toml")));
    c.until("nothing is lost", || lost(&c) == 0);
    is_all_there(&c, &want, [stays, third]);
    let out = ok(&c.run(&["scrub"]));
    assert!(out.contains("repaired from target"), "{out}");
}

#[test]
fn a_good_copy_that_returns_is_not_overwritten_by_the_damage() {
    if skipped() {
        return;
    }
    let c = Cluster::new("3");
    let Some(mut want) = put(&c) else { return };
    let [stays, goes, _] = last_copy_decays(&c, &want);
    // Write another part of the chunk: the returning server is then behind, and resync gives it the
    // chunk again.
    let file = File::options().write(true).open(c.mnt().join("only")).unwrap();
    file.write_all_at(b"written meanwhile", 1_000_000).unwrap();
    file.sync_all().unwrap();
    want[1_000_000..1_000_017].copy_from_slice(b"written meanwhile");
    assert_eq!(lost(&c), 1);
    ok(&c.up());
    c.until("nothing is lost", || lost(&c) == 0);
    is_all_there(&c, &want, [stays, goes]);
    assert!(fs::read(c.mnt().join("only")).unwrap() == want);
}
