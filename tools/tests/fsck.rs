//! `strake fsck --repair` on real processes: what is planted in the metadata of a stopped cluster is found, repaired under a mount that
//! is written to, and gone.

#[allow(dead_code, reason = "some of it is for other tests")]
mod common;

use std::{
    fs,
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use common::{ok, strake, text};
use prost::Message as _;
use serde_json::Value;
use strake_proto::pb;
use strake_store::{Batch, FjallStore, MetaStore as _, Reader as _};

/// One metadata server, two storage servers with one target each, mounted; stopped when dropped.
struct Small {
    root: tempfile::TempDir,
}

impl Small {
    fn new() -> Small {
        Small { root: tempfile::tempdir().unwrap() }
    }
    fn dir(&self) -> PathBuf {
        self.root.path().join("cluster")
    }
    fn mnt(&self) -> PathBuf {
        self.root.path().join("mnt")
    }
    fn up(&self) {
        let mut c = strake();
        c.args(["up", "--mds=1", "--oss=2", "--targets-per-oss=1", "--target-gib=1", "--mirror=2", "--dir"]);
        ok(&c.arg(self.dir()).arg("--mount").arg(self.mnt()).output().unwrap());
        // Only replicas in sync are asked what they have.
        let start = Instant::now();
        while !self.run(&["status"]).status.success() {
            assert!(start.elapsed() < Duration::from_secs(60), "{}", text(&self.run(&["status"]).stdout));
            thread::sleep(Duration::from_millis(100));
        }
    }
    fn run(&self, command: &[&str]) -> Output {
        strake().args(command).arg("--dir").arg(self.dir()).output().unwrap()
    }
    #[track_caller]
    fn fsck(&self, args: &[&str], exit: i32) -> Value {
        let out = self.run(&[&["fsck", "--json"], args].concat());
        assert_eq!(out.status.code(), Some(exit), "{}\n{}", text(&out.stdout), text(&out.stderr));
        serde_json::from_slice(&out.stdout).unwrap()
    }
    /// The metadata of the stopped server.
    fn state(&self) -> FjallStore {
        FjallStore::open(self.dir().join("mds1/state")).unwrap()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        if self.dir().exists() {
            let _ = self.run(&["down"]);
        }
    }
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(seed * 2 + 7) / 251 + i + seed) as u8).collect()
}

fn key(ino: u64) -> Bytes {
    [&b"i"[..], &ino.to_be_bytes()].concat().into()
}

fn change(store: &FjallStore, ino: u64, change: impl FnOnce(&mut pb::InodeRecord)) {
    let mut r = pb::InodeRecord::decode(store.get(&key(ino)).unwrap().unwrap()).unwrap();
    change(&mut r);
    let mut batch = Batch::default();
    batch.put(key(ino), r.encode_to_vec());
    store.commit(batch).unwrap();
}

fn chains(store: &FjallStore, ino: u64) -> Vec<u32> {
    let r = pb::InodeRecord::decode(store.get(&key(ino)).unwrap().unwrap()).unwrap();
    r.layout.unwrap().components.remove(0).chains
}

/// Makes, renames, cuts, appends to and removes files until it is told to stop; how many there are then.
fn work(dir: &Path, stop: &AtomicBool) -> u64 {
    let mut held = fs::File::create(dir.join("held")).unwrap();
    let mut n = 0;
    while !stop.load(Ordering::Relaxed) || n < 10 {
        let (new, name) = (dir.join("new"), dir.join(format!("f{n}")));
        let mut f = fs::File::create(&new).unwrap();
        let data = pattern(n, 200_000);
        f.write_all(&data[..150_000]).unwrap();
        f.sync_all().unwrap();
        f.write_all(&data[150_000..]).unwrap();
        f.set_len(180_000).unwrap();
        drop(f);
        fs::rename(new, name).unwrap();
        let doomed = dir.join("doomed");
        fs::write(&doomed, &data).unwrap();
        fs::remove_file(doomed).unwrap();
        held.write_all(&data[..10_000]).unwrap();
        n += 1;
    }
    held.sync_all().unwrap();
    n
}

fn all_right(dir: &Path, files: u64) {
    let held = fs::read(dir.join("held")).unwrap();
    assert_eq!(held.len() as u64, files * 10_000);
    for n in 0..files {
        let data = pattern(n, 200_000);
        assert!(fs::read(dir.join(format!("f{n}"))).unwrap() == data[..180_000], "file {n}");
        assert!(held[n as usize * 10_000..][..10_000] == data[..10_000], "part {n}");
    }
}

fn of<'a>(report: &'a Value, kind: &str) -> Vec<&'a Value> {
    let all = report["repairs"].as_array().unwrap().iter();
    all.filter(|r| r["finding"].as_str().unwrap().starts_with(kind)).collect()
}

#[test]
fn what_is_planted_is_repaired_under_a_mount_that_is_used() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let c = Small::new();
    c.up();
    let d = c.mnt().join("d");
    fs::create_dir(&d).unwrap();
    ok(&strake().args(["lfs", "setstripe", "-c", "2", "-S", "64K"]).arg(&d).output().unwrap());
    let names = ["d/gone", "d/cut", "d/kept", "moved"];
    let data = pattern(3, 500_000);
    let inos = names.map(|n| {
        fs::write(c.mnt().join(n), &data).unwrap();
        fs::metadata(c.mnt().join(n)).unwrap().ino()
    });
    fs::create_dir(d.join("empty")).unwrap();
    let empty = fs::metadata(d.join("empty")).unwrap().ino();
    let [gone, cut, kept, moved] = inos;
    assert_eq!(c.fsck(&[], 0)["clean"], true);
    ok(&c.run(&["down"]));

    let store = c.state();
    let mut batch = Batch::default();
    [gone, empty].into_iter().for_each(|ino| batch.delete(key(ino)));
    store.commit(batch).unwrap();
    change(&store, cut, |r| r.attr.as_mut().unwrap().size = 100_000);
    let from = chains(&store, moved);
    let to = chains(&store, kept).into_iter().find(|id| *id != from[0]).unwrap();
    change(&store, moved, |r| r.layout.as_mut().unwrap().components[0].chains = vec![to]);
    store.sync().unwrap();
    drop(store);
    c.up();

    // Without --repair nothing changes.
    let found = c.fsck(&[], 4);
    let kinds = ["leaked", "dangling", "beyond the end", "misplaced", "missing"];
    let list: Vec<&str> = found["findings"].as_array().unwrap().iter().map(|f| f.as_str().unwrap()).collect();
    for kind in kinds {
        assert!(list.iter().any(|f| f.starts_with(kind)), "{kind}: {list:?}");
    }
    assert_eq!(c.fsck(&[], 4)["findings"], found["findings"]);
    assert!(fs::read_dir(&d).unwrap().any(|e| e.unwrap().file_name() == "gone"));

    let busy = c.mnt().join("busy");
    fs::create_dir(&busy).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let (told, at) = (stop.clone(), busy.clone());
    let worker = thread::spawn(move || work(&at, &told));
    let report = c.fsck(&["--repair"], 4);
    assert_eq!(report["clean"], false);
    for kind in &kinds[..3] {
        let all = of(&report, kind);
        assert!(!all.is_empty() && all.iter().all(|r| r["repaired"] == true), "{kind}: {report:#}");
    }
    // Its chain does not have it: it may be the only copy.
    let only = of(&report, "misplaced");
    assert!(!only.is_empty() && only.iter().all(|r| r["repaired"] == false && r["next"].is_string()), "{report:#}");
    let left = c.run(&["fsck"]);
    assert_eq!(left.status.code(), Some(4));
    assert!(
        text(&left.stdout)
            .lines()
            .all(|l| ["misplaced", "missing"].iter().any(|k| l.starts_with(k)) || l.contains("findings")),
        "{left:?}"
    );

    // Written anew, it is where it should be, and what is elsewhere may go.
    fs::write(c.mnt().join("moved"), &data).unwrap();
    let out = c.run(&["fsck", "--repair"]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}\n{}", text(&out.stderr));
    assert!(said.contains("  repaired: the chunks are deleted") && said.contains("all repaired"), "{said}");
    stop.store(true, Ordering::Relaxed);
    let files = worker.join().unwrap();
    assert!(files > 10);
    all_right(&busy, files);

    let left: Vec<_> = fs::read_dir(&d).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    fs::write(d.join("gone"), &data).unwrap();
    fs::remove_dir(d.join("empty")).unwrap_err();
    let file = fs::File::options().write(true).open(d.join("cut")).unwrap();
    file.set_len(500_000).unwrap();
    let whole = fs::read(d.join("cut")).unwrap();
    assert!(whole[..100_000] == data[..100_000]);
    assert_eq!(whole[100_000..].iter().position(|b| *b != 0), None, "what was beyond the end is back");
    drop(file);
    for name in ["d/kept", "moved"] {
        assert!(fs::read(c.mnt().join(name)).unwrap() == data, "{name}");
    }
    assert_eq!(c.fsck(&["--read-data", "--repair"], 0)["findings"], Value::Array(vec![]));
}
