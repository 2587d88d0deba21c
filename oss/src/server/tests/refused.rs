//! Targets that are missing, or wrong: the others serve, and the same process takes in what is put
//! back.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use strake_fabric::Pool;
use strake_proto::pb;
use strake_runtime::Env;

use super::{
    bed::bytes,
    refused_targets::{Bed, until},
    tcp::{KEY, config},
};
use crate::{
    engine::{Options, open_target_dir},
    server::{TargetConfig, start_on_disk, start_on_disk_with},
};

/// The only target that server `i` refuses.
fn refused(b: &Bed, i: usize) -> pb::RefusedTarget {
    let all = b.server(i).status().refused;
    assert_eq!(all.len(), 1, "{all:?}");
    all.into_iter().next().unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for e in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(e.file_name());
        if e.path().is_dir() {
            copy(&e.path(), &to)
        } else {
            fs::copy(e.path(), to).map(drop).unwrap()
        }
    }
}

/// The target's folder, or its contents, are missing, as with a disk that is not mounted. Nothing
/// is made there, whatever the configuration says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_disk_costs_its_target_alone_and_is_taken_in_when_it_is_back() {
    let mut b = Bed::new(&[0, 1]).await;
    let want = [bytes(1, 700_000)];
    b.write(0, 0, 0, &want[0]).await;
    b.cfgs[1].targets.iter_mut().for_each(|t| t.create = false);
    let (own, away) = (b.dir.path().join("t1"), b.dir.path().join("away"));
    for empty in [false, true] {
        b.stop(1).await;
        fs::rename(&own, &away).unwrap();
        if empty {
            fs::create_dir(&own).unwrap();
        }
        b.start(1).await;
        assert_eq!(b.serves(1), [2], "{:?}", b.server(1).status().refused);
        let r = refused(&b, 1);
        assert_eq!((r.target, Path::new(&r.path)), (Some(1), own.as_path()), "{r:?}");
        assert!(
            r.why.contains(if empty { "data is missing" } else { "no such target folder" }),
            "{r:?}"
        );
        until("a look", || refused(&b, 1).now.contains("checked again every 5s")).await;
        assert!(b.notices().contains("target 1 is out of service"));
        // Its chain continues, and the folder is left alone.
        b.is_whole(0, 0, &want, "without it").await;
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!((b.serves(1), own.join("data").exists()), (vec![2], false));
        if empty {
            fs::remove_dir_all(&own).unwrap();
        }
        fs::rename(&away, &own).unwrap();
        until("target 1", || b.serves(1) == [1, 2]).await;
        assert!(b.server(1).status().refused.is_empty() && !b.notices().contains("out of service"));
        b.is_whole(1, 1, &want, "put back").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_all_of_whose_targets_are_missing_registers_and_takes_them_in() {
    let mut b = Bed::new(&[0, 1]).await;
    let want = [bytes(1, 700_000)];
    b.write(0, 0, 0, &want[0]).await;
    b.stop(0).await;
    let (own, away) = (b.dir.path().join("t0"), b.dir.path().join("away"));
    fs::rename(&own, &away).unwrap();
    b.cfgs[0].targets[0].create = false;
    b.start(0).await;
    assert_eq!((b.serves(0), refused(&b, 0).target), (vec![], Some(0)));
    assert!(b.authority.map.lock().nodes.iter().any(|n| n.name == "oss0"));
    fs::rename(&away, &own).unwrap();
    until("target 0", || b.serves(0) == [0]).await;
    b.is_whole(0, 0, &want, "put back").await;
}

/// The wrong target comes first in the list, so that the right ones need not prove that they are
/// right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_of_another_cluster_and_a_copy_are_refused_by_name() {
    let mut b = Bed::new(&[0, 1]).await;
    let want = [bytes(1, 700_000)];
    b.write(0, 0, 0, &want[0]).await;
    let (authority, mds) = super::tcp::authority().await;
    authority.map.lock().fs_uuid = vec![2; 16].into();
    let other =
        start_on_disk(config(7, b.dir.path(), mds.endpoint()), Env::system(), KEY).await.unwrap();
    other.shutdown().await.unwrap();
    let good = b.cfgs[1].targets.clone();
    let at = |path: PathBuf| TargetConfig { path, ..good[0].clone() };
    let foreign = at(b.dir.path().join("t7"));
    b.stop(1).await;
    b.cfgs[1].targets = [vec![foreign], good.clone()].concat();
    b.start(1).await;
    assert_eq!(b.serves(1), [1, 2]);
    let r = refused(&b, 1);
    assert!(r.path.ends_with("t7") && r.why.contains("another cluster"), "{r:?}");
    b.is_whole(1, 1, &want, "beside a foreign one").await;
    b.stop(1).await;
    let twin = at(b.dir.path().join("twin"));
    copy(&good[0].path, &twin.path);
    b.cfgs[1].targets = [good.clone(), vec![twin]].concat();
    b.start(1).await;
    assert_eq!(b.serves(1), [1, 2]);
    let r = refused(&b, 1);
    assert!(r.path.ends_with("twin") && r.why.contains("one of them is a copy"), "{r:?}");
    b.is_whole(1, 1, &want, "beside its copy").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_administrator_has_mended_is_looked_at_when_asked() {
    let mut b = Bed::new(&[1]).await;
    let want = [bytes(1, 700_000)];
    b.write(1, 1, 0, &want[0]).await;
    b.stop(1).await;
    // This is the only replica: it is never emptied.
    let journal = b.dir.path().join("t1/table/0.jnl");
    let good = fs::read(&journal).unwrap();
    let mut bad = good.clone();
    let used: Vec<usize> = (0..bad.len()).filter(|i| bad[*i] != 0).collect();
    bad[used[used.len() / 2]] ^= 0x10;
    fs::write(&journal, bad).unwrap();
    // The other one is in use by another engine.
    let held = open_target_dir(&b.dir.path().join("t2"), None, Pool::default(), Options::default())
        .await
        .unwrap();
    let cfg = b.cfgs[1].clone();
    let reread = Box::new(move || Ok(cfg.clone()));
    b.servers[1] =
        Some(start_on_disk_with(b.cfgs[1].clone(), Env::system(), KEY, reread).await.unwrap());
    until("why", || {
        b.notices().contains("may be the last replica") && b.notices().contains("another process")
    })
    .await;
    assert_eq!(b.serves(1), []);
    drop(held);
    until("target 2", || b.serves(1) == [2]).await;
    fs::write(&journal, good).unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(b.serves(1), [2], "nobody has asked");
    assert_eq!(b.server(1).reload().await.unwrap(), []);
    until("target 1", || b.serves(1) == [1, 2]).await;
    b.is_whole(1, 1, &want, "put back").await;
}
