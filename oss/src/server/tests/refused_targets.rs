//! Targets whose chunk tables decay while their server is down: the others serve, and these come
//! back empty and are resynced.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use strake_fabric::{Identity, Listener, Pool, tcp::TcpFabric};
use strake_proto::{
    CapKey, Capability, Rights,
    checksum::block_sums,
    data::{DataRequest, FLAG_STABLE, Kind},
    opcode,
    pb::{self, ReplicaState},
};
use strake_runtime::Env;
use strake_store::{Batch, FjallStore, MetaStore};

use super::{
    bed::{Authority, CHAIN, SESSION, bytes, chunk},
    tcp::{KEY, authority, call, config},
};
use crate::{
    engine::{Options, open_target_dir},
    server::{Ask, Config, OssServer, Parts, start, start_on_disk},
};

/// Two servers: target 0 on the one, 1 and 2 on the other; the chain is on 0 and 1, or on 1 alone.
pub(super) struct Bed {
    pub dir: tempfile::TempDir,
    pub authority: Arc<Authority>,
    _mds: Listener,
    pub cfgs: [Config; 2],
    pub servers: [Option<OssServer>; 2],
}

impl Bed {
    pub(super) async fn new(chain: &[u32]) -> Bed {
        let dir = tempfile::tempdir().unwrap();
        let (authority, mds) = authority().await;
        let mut cfgs = [0, 1].map(|i| config(i, dir.path(), mds.endpoint()));
        let second = config(2, dir.path(), mds.endpoint()).targets.remove(0);
        cfgs[1].targets.push(second);
        let mut b = Bed { dir, authority, _mds: mds, cfgs, servers: [None, None] };
        b.start(0).await;
        b.start(1).await;
        let mut map = b.authority.map.lock();
        let serving = |target: &u32| pb::Replica {
            target: *target,
            state: ReplicaState::ReplicaServing as i32,
        };
        let replicas = chain.iter().map(serving).collect();
        map.chains =
            vec![pb::Chain { id: CHAIN, epoch: 1, replicas, preferred: chain.into(), lost: false }];
        map.version += 1;
        drop(map);
        b
    }

    pub(super) async fn start(&mut self, i: usize) {
        self.servers[i] =
            Some(start_on_disk(self.cfgs[i].clone(), Env::system(), KEY).await.unwrap());
    }

    pub(super) async fn stop(&mut self, i: usize) {
        self.servers[i].take().unwrap().shutdown().await.unwrap();
        // A task that ends a little later may still have a target open.
        let targets = &self.cfgs[i].targets;
        let is_free = |lock: PathBuf| fs::File::open(lock).is_ok_and(|f| f.try_lock().is_ok());
        until("the end of its tasks", || {
            targets.iter().map(|t| t.path.join("target.lock")).all(|l| !l.exists() || is_free(l))
        })
        .await;
    }

    pub(super) fn server(&self, i: usize) -> &OssServer {
        self.servers[i].as_ref().unwrap()
    }

    fn table(&self) -> PathBuf {
        self.dir.path().join("t1/table")
    }

    fn request(&self, to: u32, index: u64) -> DataRequest {
        let rights = Rights::READ.and(Rights::WRITE);
        let cap = Capability {
            ino: 4,
            data: 9,
            session: SESSION,
            session_epoch: 1,
            expiry_ms: u64::MAX,
            rights,
            bound: strake_proto::Bound::Any,
            as_of: 0,
        };
        let cap = Some(CapKey::from_cluster_key(&KEY).seal(&cap));
        DataRequest {
            cap,
            session: SESSION,
            ..DataRequest::new(CHAIN, self.authority.chain().epoch, to, chunk(index))
        }
    }

    pub(super) async fn write(&self, i: usize, head: u32, index: u64, data: &[u8]) {
        let make = || DataRequest {
            kind: Kind::Write,
            flags: FLAG_STABLE,
            len: data.len() as u32,
            seq: index + 1,
            sums: block_sums(0, [data]),
            ..self.request(head, index)
        };
        assert!(call(self.server(i), opcode::WRITE, make, data).await.0.stable);
    }

    pub(super) async fn is_whole(&self, i: usize, target: u32, want: &[Vec<u8>], what: &str) {
        for (index, data) in want.iter().enumerate() {
            let read = || DataRequest { len: 4 << 20, ..self.request(target, index as u64) };
            let got = call(self.server(i), opcode::READ, read, &[]).await.1;
            assert!(
                got == *data,
                "{what}: chunk {index} on target {target} has {} bytes",
                got.len()
            );
        }
    }

    /// Targets that the server serves.
    pub(super) fn serves(&self, i: usize) -> Vec<u32> {
        let mut all: Vec<u32> = self.server(i).status().targets.iter().map(|t| t.id).collect();
        all.sort_unstable();
        all
    }

    pub(super) fn notices(&self) -> String {
        self.server(1).status().notices.join("\n")
    }
}

fn files(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        if entry.path().is_dir() { files(&entry.path(), out) } else { out.push(entry.path()) }
    }
    out.sort();
}

/// Inverts a bit of a non-zero byte in the middle of the file. In the file with the format's
/// version it is a bit that makes another version of it.
fn flip(file: &Path) -> bool {
    let mut bytes = fs::read(file).unwrap();
    let used: Vec<usize> = (0..bytes.len()).filter(|i| bytes[*i] != 0).collect();
    let is_version = file.ends_with("version");
    let Some(at) = used.get(if is_version { used.len() - 1 } else { used.len() / 2 }) else {
        return false;
    };
    bytes[*at] ^= if is_version { 1 } else { 0x10 };
    fs::write(file, bytes).unwrap();
    true
}

fn kept(b: &Bed) -> usize {
    let entries = fs::read_dir(b.table().parent().unwrap()).unwrap();
    entries
        .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with("table.damaged-"))
        .count()
}

pub(super) async fn until(what: &str, is: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is() {
        assert!(Instant::now() < end, "{what} does not come");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A bit of each file of the table in turn, including the journal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_table_costs_its_target_alone_and_is_filled_again() {
    let mut b = Bed::new(&[0, 1]).await;
    let want: Vec<Vec<u8>> = (0..3).map(|n| bytes(n, 700_000)).collect();
    for (index, data) in want.iter().enumerate() {
        b.write(0, 0, index as u64, data).await;
    }
    let mut all = Vec::new();
    files(&b.table(), &mut all);
    let names: Vec<PathBuf> =
        all.iter().map(|f| f.strip_prefix(b.table()).unwrap().to_path_buf()).collect();
    let (mut refused, mut told) = (0, 0);
    for name in names {
        b.stop(1).await;
        if !b.table().join(&name).exists() || !flip(&b.table().join(&name)) {
            b.start(1).await;
            continue;
        }
        let before = kept(&b);
        b.start(1).await;
        let what = name.display().to_string();
        assert!(b.serves(1).contains(&2), "{what}: the other target serves");
        let said = b.notices();
        let is_out = said.contains("target 1 is out of service") && said.contains("t1");
        if is_out || said.contains("came back empty") {
            refused += 1;
            told += u32::from(is_out);
            b.is_whole(0, 0, &want, &what).await;
            if what == "version" {
                // A newer store, or damage: the server cannot decide which.
                tokio::time::sleep(Duration::from_secs(4)).await;
                assert_eq!((b.serves(1), kept(&b)), (vec![2], before), "{}", b.notices());
                b.stop(1).await;
                assert!(flip(&b.table().join(&name)));
                b.start(1).await;
            } else {
                until(&what, || b.serves(1) == [1, 2]).await;
                assert_eq!(kept(&b), before + 1, "{what}");
                assert!(b.notices().contains("came back empty"), "{what}: {}", b.notices());
            }
        }
        b.is_whole(1, 1, &want, &what).await;
    }
    assert!(refused >= 4 && told > 0, "{refused}, {told}");
}

/// Puts more than the store keeps in memory, under a key that no target uses, so that the store
/// writes everything out.
fn write_out(table: &Path) {
    let store = FjallStore::open(table).unwrap();
    let is_big = |f: &PathBuf| {
        f.iter().any(|part| part == "tables") && f.metadata().is_ok_and(|m| m.len() > 1 << 20)
    };
    for n in 0..70u8 {
        let mut batch = Batch::default();
        batch.put(vec![b'z', n], bytes(n.into(), 1 << 20));
        store.commit(batch).unwrap();
    }
    store.sync().unwrap();
    for _ in 0..1000 {
        let mut all = Vec::new();
        files(table, &mut all);
        if all.iter().any(is_big) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the table is not written out");
}

/// The scrub (or a read) finds decay while the server runs, with the same result.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_decays_in_service_is_filled_again_without_a_restart() {
    let mut b = Bed::new(&[0, 1]).await;
    let want: Vec<Vec<u8>> = (0..3).map(|n| bytes(n, 700_000)).collect();
    for (index, data) in want.iter().enumerate() {
        b.write(0, 0, index as u64, data).await;
    }
    b.stop(1).await;
    write_out(&b.table());
    // Without a cache, the store keeps nothing that it has read in memory.
    let env = Env::system();
    let fabric = TcpFabric::new(
        env.clone(),
        Identity::server(&KEY),
        None,
        Pool::default(),
        Default::default(),
    );
    let options = Options { store_cache: 0, ..Options::default() };
    let mut targets = Vec::new();
    for t in &b.cfgs[1].targets {
        let opened = open_target_dir(&t.path, None, Pool::default(), options.clone()).await;
        targets.push(opened.unwrap().whole().unwrap());
    }
    let cap_key = CapKey::from_cluster_key(&KEY);
    let parts = Parts { env, fabric: Arc::new(fabric), targets, cap_key };
    b.servers[1] = Some(start(b.cfgs[1].clone(), parts).await.unwrap());
    until("the chain", || b.authority.states().iter().all(|s| s.1 == ReplicaState::ReplicaServing))
        .await;
    let mut all = Vec::new();
    files(&b.table(), &mut all);
    for f in all
        .iter()
        .filter(|f| f.iter().any(|part| part == "tables") && f.iter().any(|part| part != "0"))
    {
        let file = fs::File::options().read(true).write(true).open(f).unwrap();
        for at in (100..file.metadata().unwrap().len()).step_by(500) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[!byte[0]], at).unwrap();
        }
    }
    b.server(1).scrub(Some(Ask::Start));
    until("that the target is let go", || kept(&b) == 1).await;
    until("target 1", || b.serves(1) == [1, 2]).await;
    b.is_whole(0, 0, &want, "the other copy").await;
    b.is_whole(1, 1, &want, "filled").await;
    assert!(b.notices().contains("came back empty"), "{}", b.notices());
    // From then on it is like any other target.
    b.stop(1).await;
    b.start(1).await;
    b.is_whole(1, 1, &want, "after a restart").await;
    assert_eq!(b.serves(1), [1, 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_copy_is_never_emptied_nor_answered_as_absent() {
    let mut b = Bed::new(&[1]).await;
    let want = [bytes(1, 700_000)];
    b.write(1, 1, 0, &want[0]).await;
    b.stop(1).await;
    let journal = b.table().join("0.jnl");
    let good = fs::read(&journal).unwrap();
    assert!(flip(&journal));
    let bad = fs::read(&journal).unwrap();
    b.start(1).await;
    until("the end of its lease", || b.notices().contains("may be the last replica in sync")).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!((b.serves(1), kept(&b)), (vec![2], 0), "{}", b.notices());
    let state = b.authority.states()[0].1;
    assert!(
        state != ReplicaState::ReplicaServing && state != ReplicaState::ReplicaOffline,
        "{state:?}"
    );
    b.stop(1).await;
    // No byte of it was lost since: a table that an administrator puts back serves again.
    assert!(fs::read(&journal).unwrap().len() <= bad.len());
    fs::write(&journal, good).unwrap();
    b.start(1).await;
    b.is_whole(1, 1, &want, "put back").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_with_nothing_else_comes_back_or_says_why_it_has_no_target() {
    let mut b = Bed::new(&[0, 1]).await;
    let want = [bytes(1, 700_000)];
    b.write(0, 0, 0, &want[0]).await;
    b.stop(0).await;
    let table = b.dir.path().join("t0/table");
    assert!(flip(&table.join("0.jnl")));
    b.start(0).await;
    until("target 0", || b.serves(0) == [0]).await;
    b.is_whole(0, 0, &want, "filled").await;
    b.stop(0).await;
    let data = b.dir.path().join("t0/data");
    fs::File::options().write(true).open(&data).unwrap().set_len(1 << 20).unwrap();
    b.start(0).await;
    let status = b.server(0).status();
    let why = &status.refused[0].why;
    assert!(
        status.targets.is_empty() && why.contains("truncated") && why.contains("t0"),
        "{status:?}"
    );
}
