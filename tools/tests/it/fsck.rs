//! `strake fsck --repair` on real processes. The tests plant faults in the metadata of a stopped
//! cluster, or in chunks behind the clients' backs. fsck must find them and repair them while a
//! mount writes.

#[allow(dead_code, reason = "some of it is for other tests")]
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

use crate::common::{ok, strake, text, up};
use bytes::Bytes;
use prost::Message as _;
use serde_json::Value;
use strake_fabric::{Buf, Fabric, Identity, Message, Pool, Transports};
use strake_proto::{
    ChunkId, Code,
    checksum::block_sums,
    data::{DataRequest, Kind, Version, Writer},
    map::{ChainExt, MapView},
    opcode, pb,
};
use strake_runtime::{Env, keyfile};
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
        let mut c = up(1, 2);
        ok(&c
            .args(["--mirror=2", "--dir"])
            .arg(self.dir())
            .arg("--mount")
            .arg(self.mnt())
            .output()
            .unwrap());
        // fsck asks only replicas in sync, so wait for all of them.
        let start = Instant::now();
        while !self.run(&["status"]).status.success() {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{}",
                text(&self.run(&["status"]).stdout)
            );
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
    /// Writes a chunk with a server's rights: to any chain, on both replicas or only on the tail.
    fn plant(&self, chain: u32, (ino, data): (u64, u64), index: u64, both: bool) {
        let config = fs::read_to_string(self.dir().join("mds1.toml")).unwrap();
        let config: toml::Value = toml::from_str(&config).unwrap();
        let mds = config["mds"]["listen"].as_str().unwrap().parse().unwrap();
        let key = keyfile::read(&self.dir().join("cluster.key")).unwrap();
        let fabric = Transports::new(
            Env::system(),
            Identity::server(&key),
            None,
            Pool::default(),
            Default::default(),
        );
        let write = async || {
            let wait = Duration::from_secs(10);
            let mds = fabric.connect(&mds, None).await.unwrap();
            let m =
                Message::new(opcode::MAP, pb::MapRequest { have: 0, latest: true }.encode_to_vec());
            let map =
                pb::MapReply::decode(mds.call(m, wait).await.unwrap().body).unwrap().map.unwrap();
            let map = MapView::new(map).unwrap();
            let c = map.chain(chain).unwrap();
            let (to, bytes) = (if both { c.head() } else { c.tail() }.unwrap(), &b"planted"[..]);
            let mut r = DataRequest {
                kind: Kind::Write,
                len: bytes.len() as u32,
                sums: block_sums(0, [bytes]),
                session: 1,
                seq: 1,
                ..DataRequest::new(chain, c.epoch, to, ChunkId { ino, data, index })
            };
            if !both {
                r.version = Version { epoch: c.epoch, number: 1 };
                r.writers = vec![Writer { session: 0, seq: 0, version: Version::default() }];
            }
            let opcode = if both { opcode::WRITE } else { opcode::FORWARD };
            let m = Message::new(opcode, r.encode()).with_payload(vec![Buf::copy_from(bytes)]);
            let at = map.node_of(to).unwrap().endpoints[0].parse().unwrap();
            fabric.connect(&at, None).await.unwrap().call(m, wait).await
        };
        // Just after the start a chain may change, and its servers learn of it a little later.
        let ask = async {
            let late = Instant::now() + Duration::from_secs(20);
            while let Err(e) = write().await {
                assert!(e.code == Code::StaleEpoch && Instant::now() < late, "{e}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(ask);
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

fn component(store: &FjallStore, ino: u64) -> pb::Component {
    let r = pb::InodeRecord::decode(store.get(&key(ino)).unwrap().unwrap()).unwrap();
    r.layout.unwrap().components.remove(0)
}

fn chains(store: &FjallStore, ino: u64) -> Vec<u32> {
    component(store, ino).chains
}

/// Creates, renames, truncates, appends to and removes files until `stop` is set. Returns how many
/// files are left.
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
    let list: Vec<&str> =
        found["findings"].as_array().unwrap().iter().map(|f| f.as_str().unwrap()).collect();
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
    // The right chain does not have the chunk, so the misplaced one may be the only copy.
    let only = of(&report, "misplaced");
    assert!(
        !only.is_empty() && only.iter().all(|r| r["repaired"] == false && r["next"].is_string()),
        "{report:#}"
    );
    let left = c.run(&["fsck"]);
    assert_eq!(left.status.code(), Some(4));
    assert!(
        text(&left.stdout)
            .lines()
            .all(|l| ["misplaced", "missing"].iter().any(|k| l.starts_with(k))
                || l.contains("findings")),
        "{left:?}"
    );

    // A rewrite puts the data on the right chain, so the misplaced chunks may be deleted.
    fs::write(c.mnt().join("moved"), &data).unwrap();
    let out = c.run(&["fsck", "--repair"]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{said}\n{}", text(&out.stderr));
    assert!(
        said.contains("  repaired: the chunks are deleted") && said.contains("all repaired"),
        "{said}"
    );
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
    assert_eq!(
        whole[100_000..].iter().position(|b| *b != 0),
        None,
        "what was beyond the end is back"
    );
    drop(file);
    for name in ["d/kept", "moved"] {
        assert!(fs::read(c.mnt().join(name)).unwrap() == data, "{name}");
    }
    assert_eq!(c.fsck(&["--read-data", "--repair"], 0)["findings"], Value::Array(vec![]));
}

/// Leftover chunks of a removed file on one replica only, and misplaced chunks of existing files on
/// chains they do not use, as a writer with rights to any chain can leave them.
fn leftovers_on_some_replicas_and_on_other_chains_go() {
    if !Path::new("/dev/fuse").exists() {
        println!("skipped: /dev/fuse is missing");
        return;
    }
    let c = Small::new();
    c.up();
    let [one, two] = ["one", "two"].map(|name| c.mnt().join(name));
    for (dir, count) in [(&one, "1"), (&two, "2")] {
        fs::create_dir(dir).unwrap();
        ok(&strake()
            .args(["lfs", "setstripe", "-c", count, "-S", "64K"])
            .arg(dir)
            .output()
            .unwrap());
    }
    let data = pattern(5, 500_000);
    let paths = [one.join("gone"), one.join("f"), one.join("sparse"), two.join("wide")];
    for p in &paths {
        fs::write(p, &data).unwrap();
    }
    let [gone, f, sparse, wide] = paths.clone().map(|p| fs::metadata(p).unwrap().ino());
    fs::File::create(&paths[2]).unwrap().set_len(2_000_000).unwrap();
    let whole_again = || {
        assert!(fs::read(&paths[1]).unwrap() == data && fs::read(&paths[3]).unwrap() == data);
        assert!(fs::read(&paths[2]).unwrap() == vec![0; 2_000_000]);
    };
    ok(&c.run(&["down"]));
    let store = c.state();
    let [gone, f, sparse, wide] =
        [gone, f, sparse, wide].map(|ino| ((ino, component(&store, ino).data_id), ino));
    let used = chains(&store, wide.1);
    let foreign = |ino| *used.iter().find(|id| **id != chains(&store, ino)[0]).unwrap();
    let (of_gone, of_f, of_sparse) = (chains(&store, gone.1)[0], foreign(f.1), foreign(sparse.1));
    drop(store);
    c.up();
    fs::remove_file(&paths[0]).unwrap();
    let start = Instant::now();
    while c.fsck(&[], 0)["pending_deletion"] != 0 {
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    // Servers remember removed data until the chain changes, and would refuse the planted writes.
    // So restart.
    ok(&c.run(&["down"]));
    c.up();

    (0..5).for_each(|index| c.plant(of_gone, gone.0, index, false));
    // Chunks beyond the end of the file, on both replicas and on one; also on a chain that the file
    // uses.
    c.plant(of_f, f.0, 100, true);
    c.plant(of_f, f.0, 101, false);
    c.plant(used[1], wide.0, 100, true);
    // A chunk in a hole may be the only copy, so fsck keeps it and the other misplaced chunks of
    // that file.
    c.plant(of_sparse, sparse.0, 20, true);
    c.plant(of_sparse, sparse.0, 200, true);
    let found = c.fsck(&[], 4);
    let list: Vec<&str> =
        found["findings"].as_array().unwrap().iter().map(|f| f.as_str().unwrap()).collect();
    let count = |kind: &str| list.iter().filter(|f| f.starts_with(kind)).count();
    // Chunks planted on one replica only also count as diverged.
    assert_eq!((count("leaked: 5 chunks"), count("misplaced")), (1, 9), "{list:#?}");
    assert_eq!(count("diverged"), 6, "{list:#?}");

    // The size of a file that is open for writing is not known.
    let writer = fs::File::options().write(true).open(&paths[1]).unwrap();
    let report = c.fsck(&["--repair"], 4);
    let is = |r: &&Value, ino: (u64, u64)| {
        r["finding"].as_str().unwrap().contains(&format!(" {:x}.{:x}.", ino.0, ino.1))
    };
    let of_file = |report: &Value, ino| -> Vec<Value> {
        of(report, "misplaced").into_iter().filter(|r| is(r, ino)).cloned().collect()
    };
    let all_say = |list: Vec<Value>, word: &str| {
        assert!(!list.is_empty(), "{report:#}");
        for r in list {
            assert!(
                r["repaired"] == false && r["why"].as_str().unwrap().contains(word),
                "{word}: {r:#}"
            );
        }
    };
    assert!(of(&report, "leaked").iter().all(|r| r["repaired"] == true), "{report:#}");
    all_say(of_file(&report, f.0), "open for writing");
    assert!(of_file(&report, wide.0).iter().all(|r| r["repaired"] == true), "{report:#}");
    drop(writer);
    let report = c.fsck(&["--repair"], 4);
    assert!(of_file(&report, f.0).iter().all(|r| r["repaired"] == true), "{report:#}");
    let kept = of_file(&report, sparse.0);
    assert_eq!(kept.len(), 4, "{report:#}");
    let says =
        |word: &str| kept.iter().filter(|r| r["why"].as_str().unwrap().contains(word)).count();
    assert_eq!((says("a hole"), says("some of that may be the only copy")), (2, 2), "{kept:#?}");
    whole_again();

    // The chunk is deleted with its file: it waits while the file is being deleted, then it belongs
    // to no file.
    fs::remove_file(&paths[2]).unwrap();
    let start = Instant::now();
    while c.run(&["fsck"]).status.code() == Some(0) {
        assert!(start.elapsed() < Duration::from_secs(60));
    }
    let report = c.fsck(&["--repair"], 0);
    assert!(!of(&report, "leaked").is_empty(), "{report:#}");
    assert_eq!(c.fsck(&["--repair", "--read-data"], 0)["findings"], Value::Array(vec![]));
}

mod long {
    #[test]
    #[ignore = "long tier, 35 s: ./test --long"]
    fn leftovers_on_some_replicas_and_on_other_chains_go() {
        super::leftovers_on_some_replicas_and_on_other_chains_go();
    }
}
