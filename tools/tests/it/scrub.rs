//! The scrub on real processes. It finds bytes that decay on the device of a running server,
//! reports them by path and offset, and repairs them from another copy. Without another copy a read
//! is an error, never wrong bytes.

#[allow(dead_code, reason = "some of it is for other tests")]
use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Output,
};

use crate::common::{eventually, ok, strake, text};
use serde_json::Value;

const BLOCK: usize = 4096;
const LEN: usize = 6_000_000;

/// One metadata server, two storage servers with one target each, mounted; stopped when dropped.
struct Small {
    root: tempfile::TempDir,
}

impl Small {
    fn up(copies: u32) -> Small {
        let s = Small { root: tempfile::tempdir().unwrap() };
        let mut c = strake();
        c.args(["up", "--mds=1", "--oss=2", "--targets-per-oss=1", "--target-gib=1", "--dir"])
            .arg(s.dir());
        ok(&c.arg(format!("--mirror={copies}")).arg("--mount").arg(s.mnt()).output().unwrap());
        s
    }
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn mnt(&self) -> PathBuf {
        self.root.path().join("mnt")
    }
    fn scrub(&self, args: &[&str]) -> Output {
        strake().arg("scrub").args(args).arg("--dir").arg(self.dir()).output().unwrap()
    }

    /// Runs a scrub pass on all targets to its end.
    #[track_caller]
    fn pass(&self, exit: i32) -> Value {
        let out = self.scrub(&["start", "--wait", "--json"]);
        assert_eq!(out.status.code(), Some(exit), "{}\n{}", text(&out.stdout), text(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    }

    /// The device of a storage server, and the offsets of blocks with these bytes on it.
    fn find(&self, oss: u32, block: &[u8]) -> (File, Vec<u64>) {
        let path = self.dir().join(format!("oss{oss}/target0/data"));
        let data = File::options().read(true).write(true).open(path).unwrap();
        let mut here = [0; BLOCK];
        let is_it = |at: &u64| data.read_exact_at(&mut here, *at).is_ok() && here == block;
        let found = stored(&data).into_iter().filter(is_it).collect();
        (data, found)
    }

    /// Inverts a byte of each block with these bytes. Returns how many there were.
    fn damage(&self, oss: u32, block: &[u8]) -> usize {
        let (data, found) = self.find(oss, block);
        found.iter().for_each(|at| data.write_all_at(&[!block[1234]], at + 1234).unwrap());
        data.sync_all().unwrap();
        found.len()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = strake().arg("down").arg("--dir").arg(self.dir()).output();
    }
}

/// Offsets of the stored blocks of a sparse file.
fn stored(f: &File) -> Vec<u64> {
    use rustix::fs::{SeekFrom, seek};
    let mut all = Vec::new();
    let mut at = 0;
    while let Ok(start) = seek(f, SeekFrom::Data(at)) {
        at = seek(f, SeekFrom::Hole(start)).unwrap();
        all.extend((start / BLOCK as u64 * BLOCK as u64..at).step_by(BLOCK));
    }
    all
}

fn content(seed: u64) -> Vec<u8> {
    (1..=LEN as u64).map(|i| ((i ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53) as u8).collect()
}

fn put(path: &Path, bytes: &[u8]) {
    fs::write(path, bytes).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
}

fn skipped() -> bool {
    let skipped = !Path::new("/dev/fuse").exists();
    if skipped {
        println!("skipped: /dev/fuse is missing");
    }
    skipped
}

/// The findings of all targets, each with its target id.
fn findings(status: &Value) -> Vec<(u64, Value)> {
    let each = |t: &Value| {
        let (id, list) = (t["target"].as_u64().unwrap(), t["findings"].as_array().unwrap().clone());
        list.into_iter().map(move |f| (id, f))
    };
    status["targets"].as_array().unwrap().iter().flat_map(each).collect()
}

#[test]
fn decay_is_repaired_from_the_other_copy_and_named_by_path_and_offset() {
    if skipped() {
        return;
    }
    let c = Small::up(2);
    fs::create_dir(c.mnt().join("data")).unwrap();
    let (file, want) = (c.mnt().join("data/samples"), content(1));
    put(&file, &want);
    let clean = c.pass(0);
    assert_eq!((&clean["damaged"], &clean["lost"]), (&0.into(), &0.into()), "{clean:#}");
    assert!(
        clean["targets"]
            .as_array()
            .unwrap()
            .iter()
            .all(|t| t["pass"] == 1 && t["bytes"].as_u64() > Some(6_000_000))
    );
    // Damage one block on one server, and another, in the second chunk of 4 MiB, on the other
    // server.
    let places = [(1, 100 * BLOCK), (2, 1300 * BLOCK)];
    for (oss, at) in places {
        assert_eq!(c.damage(oss, &want[at..at + BLOCK]), 1);
    }
    let s = c.pass(0);
    assert_eq!(
        [&s["damaged"], &s["repaired"], &s["lost"]],
        [&Value::from(2), &2.into(), &0.into()],
        "{s:#}"
    );
    let found = findings(&s);
    for (_, at) in places {
        let f = found.iter().find(|(_, f)| f["offset"] == at).unwrap_or_else(|| panic!("{s:#}"));
        assert_eq!(
            (&f.1["path"], &f.1["length"]),
            (&"/data/samples".into(), &BLOCK.into()),
            "{s:#}"
        );
        assert_eq!(
            (&f.1["state"], &f.1["repaired_from"]),
            (&"repaired".into(), &(1 - f.0).into()),
            "{s:#}"
        );
    }
    assert_eq!(found.len(), 2);
    // The findings are in the servers' logs, too.
    let log = || {
        (1..=2)
            .map(|n| fs::read_to_string(c.dir().join(format!("logs/oss{n}.log"))).unwrap())
            .collect::<String>()
    };
    let lines =
        places.map(|(_, at)| format!("/data/samples: bytes {at} to {}, chunk ", at + BLOCK));
    eventually(format!("{lines:?}"), std::time::Duration::from_secs(10), || {
        lines.iter().all(|l| log().contains(l))
    });
    // The findings also appear in the readable output and in the status; a second pass reports
    // nothing new.
    let out = ok(&c.scrub(&[]));
    assert!(
        out.contains("/data/samples: 4096 bytes at 409600, ")
            && out.contains("repaired from target"),
        "{out}"
    );
    let status = strake().args(["status", "--json", "--dir"]).arg(c.dir()).output().unwrap();
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    let oss = status["servers"].as_array().unwrap().iter().filter(|s| s["role"] == "oss");
    assert!(
        oss.clone().count() == 2
            && oss.flat_map(|s| s["targets"].as_array().unwrap()).all(|t| t["repaired"] == 1)
    );
    assert_eq!(findings(&c.pass(0)).len(), 2);
    // Both replicas hold it again, on their devices; read once more without the mount's caches.
    ok(&strake().args(["down", "--dir"]).arg(c.dir()).output().unwrap());
    ok(&strake().args(["up", "--dir"]).arg(c.dir()).output().unwrap());
    for oss in 1..=2 {
        for (_, at) in places {
            assert!(!c.find(oss, &want[at..at + BLOCK]).1.is_empty(), "oss {oss}");
        }
        assert!(fs::read(&file).unwrap() == want, "oss {oss}");
    }
    let unknown = c.scrub(&["start", "--target", "77"]);
    crate::common::refused(&unknown, &["has target 77", "there are 0, 1"]);
}

#[test]
fn without_another_copy_it_is_an_error_and_the_scrub_says_what_is_lost() {
    if skipped() {
        return;
    }
    let c = Small::up(1);
    let (file, want) = (c.mnt().join("only"), content(2));
    put(&file, &want);
    let at = 77 * BLOCK;
    let hits = c.damage(1, &want[at..at + BLOCK]) + c.damage(2, &want[at..at + BLOCK]);
    assert_eq!(hits, 1);
    let s = c.pass(4);
    let found = findings(&s);
    assert_eq!((found.len(), &s["damaged"], &s["lost"]), (1, &1.into(), &1.into()), "{s:#}");
    let f = &found[0].1;
    assert_eq!(
        (&f["path"], &f["offset"], &f["state"]),
        (&"/only".into(), &at.into(), &"lost".into()),
        "{s:#}"
    );
    let out = c.scrub(&["status"]);
    assert_eq!(out.status.code(), Some(4));
    assert!(
        text(&out.stdout).contains("/only: 4096 bytes at 315392, ")
            && text(&out.stdout).contains("LOST")
    );
    let again = findings(&c.pass(4));
    assert_eq!(again.len(), 1, "reported once");
    // Killed servers still know the findings after a restart.
    for oss in 1..=2 {
        crate::common::kill(
            &fs::read_to_string(c.dir().join(format!("run/oss{oss}.pid"))).unwrap(),
        );
    }
    ok(&strake().args(["up", "--dir"]).arg(c.dir()).output().unwrap());
    let out = c.scrub(&["status"]);
    assert_eq!(out.status.code(), Some(4), "{}", text(&out.stdout));
    assert!(
        text(&out.stdout).contains("/only: 4096 bytes at 315392, ")
            && text(&out.stdout).contains("LOST")
    );
    let status = strake().args(["status", "--dir"]).arg(c.dir()).output().unwrap();
    assert_eq!(status.status.code(), Some(2), "{}", text(&status.stdout));
    assert!(
        text(&status.stdout).contains("1 chunks have no good copy"),
        "{}",
        text(&status.stdout)
    );
    // Read again through the mount, past its caches: an error at the lost block, the right bytes
    // elsewhere.
    let umount = |dir: &Path| strake().arg("umount").arg(dir).output().unwrap();
    ok(&umount(&c.mnt()));
    ok(&strake().args(["up", "--dir"]).arg(c.dir()).output().unwrap());
    let f = File::open(&file).unwrap();
    let mut block = vec![0; BLOCK];
    let e = f.read_exact_at(&mut block, at as u64).unwrap_err();
    assert_eq!(e.raw_os_error(), Some(libc::EIO), "{e}");
    f.read_exact_at(&mut block, 5_000_000).unwrap();
    assert!(block == want[5_000_000..][..BLOCK]);
    // A stopped scrub does nothing. When the file is written again, nothing is lost any more.
    let s: Value = serde_json::from_slice(&c.scrub(&["stop", "--json"]).stdout).unwrap();
    assert!(
        s["targets"]
            .as_array()
            .unwrap()
            .iter()
            .all(|t| t["paused"] == true && t["running"] == false),
        "{s:#}"
    );
    put(&file, &content(3));
    let s = c.pass(0);
    assert_eq!((&s["lost"], &findings(&s)[0].1["state"]), (&0.into(), &"gone".into()), "{s:#}");
    assert!(fs::read(&file).unwrap() == content(3));
    ok(&strake().args(["status", "--dir"]).arg(c.dir()).output().unwrap());
}
