//! A directory of many entries, read through one mount while another changes it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use crate::common::Cluster;
use crate::unmounted::unmounted;
use strake_client::{Client, Creds};
use strake_fuse::{MountConfig, can_mount, mount};
use strake_proto::pb::{self, op::Op};

const STAY: usize = 100_000;
/// How many of the changing names exist at a time.
const COME: u64 = 500;

/// Makes a directory with [`STAY`] names, in few requests.
async fn fill(client: &Client, creds: &Creds) {
    let dir = client.mkdir(creds, client.root(), b"big", 0o777).await.unwrap().ino;
    let name = |i: usize| format!("stay-{i:06}").into_bytes().into();
    let make = |i| {
        Op::Mknod(pb::Mknod { parent: dir, name: name(i), mode: 0o100_644, ..Default::default() })
    };
    let all: Vec<_> = (0..STAY).map(|i| pb::Op { op: Some(make(i)) }).collect();
    for part in all.chunks(2_000) {
        let made = client.compound(creds, part.to_vec()).await.unwrap();
        assert!(made.iter().all(|r| r.status.is_none()));
    }
}

/// Makes, renames and removes names until told to stop.
fn churn(dir: &Path, stop: &AtomicBool, changes: &AtomicU64) {
    for i in 0.. {
        if stop.load(Relaxed) {
            return;
        }
        let name = |i: u64| dir.join(format!("come-{i}"));
        File::create(name(i)).unwrap();
        if i % 3 == 0 {
            fs::rename(name(i), dir.join(format!("gone-{i}"))).unwrap();
        }
        if let Some(old) = i.checked_sub(COME) {
            let kind = if old % 3 == 0 { "gone" } else { "come" };
            fs::remove_file(dir.join(format!("{kind}-{old}"))).unwrap();
        }
        changes.fetch_add(1, Relaxed);
    }
}

fn names(dir: &Path) -> BTreeMap<String, usize> {
    let mut seen = BTreeMap::new();
    for e in fs::read_dir(dir).unwrap() {
        *seen.entry(e.unwrap().file_name().into_string().unwrap()).or_default() += 1;
    }
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_that_stay_are_seen_exactly_once() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    if let Err(e) = can_mount(a.path()) {
        println!("skipped: {e}");
        return;
    }
    let (cluster, creds) = (Cluster::new(), Creds::default());
    fill(&cluster.client().await, &creds).await;
    let first = mount(MountConfig::new(a.path()), cluster.client().await).await.unwrap();
    let second = mount(MountConfig::new(b.path()), cluster.client().await).await.unwrap();
    let (stop, changes) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let other = b.path().join("big");
    let changing = tokio::task::spawn_blocking({
        let (stop, changes) = (stop.clone(), changes.clone());
        move || churn(&other, &stop, &changes)
    });
    let dir: PathBuf = a.path().join("big");
    let reading = tokio::task::spawn_blocking(move || {
        for pass in 0..3 {
            let before = changes.load(Relaxed);
            let seen = names(&dir);
            assert!(changes.load(Relaxed) > before, "nothing changed meanwhile");
            let stayed = seen.iter().filter(|(n, _)| n.starts_with("stay-")).count();
            assert_eq!(stayed, STAY, "pass {pass}");
            let twice: Vec<_> = seen.iter().filter(|(_, n)| **n > 1).collect();
            assert!(twice.is_empty(), "pass {pass}: {twice:?}");
        }
    });
    let read = reading.await;
    stop.store(true, Relaxed);
    changing.await.unwrap();
    read.unwrap();
    for m in [first, second] {
        unmounted(&m).await;
    }
}

/// Linux keeps one name of each directory, and moves it only where it gets the locks for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directories_that_another_mount_moves_are_found() {
    let at = tempfile::tempdir().unwrap();
    if let Err(e) = can_mount(at.path()) {
        println!("skipped: {e}");
        return;
    }
    let (cluster, creds) = (Cluster::new(), Creds::default());
    let other = cluster.client().await;
    let m = mount(MountConfig::new(at.path()), cluster.client().await).await.unwrap();
    let root = at.path().to_owned();
    let make = {
        let root = root.clone();
        move || {
            ["a", "b", "c", "a/d", "a/d/e"]
                .iter()
                .for_each(|d| fs::create_dir(root.join(d)).unwrap())
        }
    };
    tokio::task::spawn_blocking(make).await.unwrap();
    let mut inos = Vec::new();
    for name in ["a", "b", "c"] {
        inos.push(other.lookup(&creds, other.root(), name.as_bytes()).await.unwrap().ino);
    }
    let (stop, made) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let busy = tokio::task::spawn_blocking({
        let (root, stop, made) = (root.clone(), stop.clone(), made.clone());
        move || {
            while !stop.load(Relaxed) {
                for d in ["a", "b", "c"] {
                    let f = root.join(d).join("busy");
                    fs::write(&f, "").unwrap();
                    fs::remove_file(&f).unwrap();
                    made.fetch_add(1, Relaxed);
                }
            }
        }
    });
    let mut outcome = Ok(());
    for round in 0..60 {
        // The other mount moves `d` from one directory to the next, this mount moves it to the
        // third.
        let [from, to, third] = [0, 1, 2].map(|n| (2 * round + n) % 3);
        other.rename(&creds, (inos[from], b"d"), (inos[to], b"d"), 0).await.unwrap();
        let [to, third] = [to, third].map(|n| root.join(["a", "b", "c"][n]).join("d"));
        let moved = tokio::task::spawn_blocking(move || {
            if round % 2 == 0 {
                fs::metadata(to.join("e"))?;
            }
            fs::rename(&to, &third)?;
            fs::metadata(third.join("e")).map(drop)
        });
        outcome = moved.await.unwrap().map_err(|e| (round, e));
        if outcome.is_err() {
            break;
        }
    }
    stop.store(true, Relaxed);
    busy.await.unwrap();
    outcome.unwrap();
    assert!(made.load(Relaxed) > 60, "nobody was in the way");
    unmounted(&m).await;
}
