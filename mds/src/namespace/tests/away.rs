//! Which files wait for targets that are away, and which are told that there is no space.

use std::sync::Arc;

use strake_proto::{TargetId, map::MapView};

use super::*;
use crate::{
    cluster::{
        membership::{Facts, evaluate},
        state::tests::{cluster, with_chains},
    },
    namespace::placement::Placement,
};

/// The map once these targets are dead.
fn without(mut map: pb::ClusterMap, dead: &[TargetId]) -> pb::ClusterMap {
    map.targets.iter_mut().filter(|t| dead.contains(&t.id)).for_each(|t| t.alive = false);
    for c in &mut map.chains {
        let facts = Facts { alive: |t| !dead.contains(&t), synced: false, acts: |_| true };
        *c = evaluate(c, &facts).unwrap_or_else(|| c.clone());
    }
    map
}

fn place(map: pb::ClusterMap) -> Placement {
    Placement::new(Arc::new(MapView::new(map).unwrap()))
}

fn spec(pool: &str, copies: u32) -> pb::LayoutSpec {
    pb::LayoutSpec { stripe_count: 1, pool: pool.into(), copies, ..Default::default() }
}

/// For 1, 2 and 3 copies.
fn waits(map: pb::ClusterMap, pool: &str) -> [bool; 3] {
    let p = place(map);
    let all = [1, 2, 3].map(|copies| p.waits(&spec(pool, copies)));
    assert!(p.any_waits() || all == [false; 3]);
    all
}

#[test]
fn a_file_waits_while_no_chain_of_its_kind_serves_and_one_may_come_back() {
    let map = || with_chains(2, 2);
    assert_eq!(waits(map(), ""), [false; 3], "three copies never fit on two servers");
    assert!(!place(map()).any_waits());
    assert_eq!(waits(without(map(), &[0, 1, 2]), ""), [false; 3], "one serves");
    assert_eq!(waits(without(map(), &[0, 1, 2, 3]), ""), [true, true, false]);
    // Targets that were given up do not return.
    let given_up = |targets: &[TargetId]| {
        let mut map = without(map(), &[0, 1, 2, 3]);
        map.targets.iter_mut().filter(|t| targets.contains(&t.id)).for_each(|t| t.given_up = true);
        map
    };
    assert_eq!(
        waits(given_up(&[0, 1]), ""),
        [true, true, false],
        "others have chains of two copies"
    );
    assert_eq!(waits(given_up(&[0, 1, 2, 3]), ""), [false; 3]);
    assert_eq!(waits(pb::ClusterMap::default(), ""), [false; 3], "there never was one");
}

#[test]
fn a_file_waits_for_servers_that_are_too_few_for_its_first_chains() {
    let map = || cluster(3, 1);
    assert_eq!(waits(map(), ""), [false; 3], "chains come as soon as they can");
    assert_eq!(waits(without(map(), &[0]), ""), [false, false, true]);
    assert_eq!(waits(without(map(), &[0, 1, 2]), ""), [true; 3]);
    let mut drains = without(map(), &[0]);
    drains.targets[1].draining = true;
    assert_eq!(waits(drains, ""), [false, true, false], "two servers are left for new chains");
}

#[test]
fn pools_and_listed_targets_wait_for_their_own() {
    let pooled = |dead: &[TargetId]| {
        let mut map = with_chains(3, 1);
        map.pools.push(pb::Pool { name: "p".into(), targets: vec![0] });
        without(map, dead)
    };
    assert_eq!(waits(pooled(&[]), "p"), [false; 3]);
    assert_eq!(waits(pooled(&[1, 2]), "p"), [false; 3]);
    // It has no chains of its own yet, and the others that it heads have a copy elsewhere.
    assert_eq!(waits(pooled(&[0]), "p"), [true, false, false]);
    assert_eq!(waits(pooled(&[0]), ""), [false; 3]);
    assert_eq!(waits(pooled(&[0]), "none such"), [false; 3]);
    let listed = |targets: &[TargetId]| pb::LayoutSpec { targets: targets.to_vec(), ..spec("", 1) };
    assert!(
        !place(pooled(&[0])).waits(&listed(&[0])),
        "others serve, which is told at once as ever"
    );
    assert!(place(pooled(&[0, 1, 2])).waits(&listed(&[0])));
}

/// Marks all targets as dead, as a leader does.
fn kill(fs: &mut Fs) {
    let old = fs.ns.map();
    let all: Vec<TargetId> = old.map.targets.iter().map(|t| t.id).collect();
    let pb::ClusterMap { chains, targets, .. } = without(old.map.clone(), &all);
    let u = pb::MapUpdate { expect_version: old.version(), chains, targets, ..Default::default() };
    assert_eq!(fs.log(Command::MapUpdate(u)).status, None);
}

#[test]
fn only_lists_that_would_choose_chains_wait() {
    let mut fs = Fs::new();
    let dir = fs.mkdir(ROOT, "d");
    let create = |parent, name: &str| mk_create(parent, name);
    let mknod =
        |mode| Op::Mknod(pb::Mknod { parent: ROOT, name: bytes("n"), mode, rdev: 0, umask: 0 });
    let open = |exclusive| {
        let c = pb::Create {
            parent: dir,
            name: bytes("old"),
            mode: 0o644,
            exclusive,
            flags: 0,
            ..Default::default()
        };
        Op::Create(c)
    };
    let old = fs.one(open(true)).ino;
    let lookup = || Op::Lookup(pb::Lookup { parent: ROOT, name: bytes("d") });
    let tmpfile =
        || Op::Tmpfile(pb::Tmpfile { parent: ROOT, mode: 0o600, flags: 2, ..Default::default() });
    let layout = |ino, stripe_count| {
        let layout = Some(pb::LayoutSpec { stripe_count, ..Default::default() });
        Op::Setlayout(pb::SetLayout { ino, layout })
    };
    let mkdir = || Op::Mkdir(pb::Mkdir { parent: ROOT, name: bytes("e"), mode: 0o755, umask: 0 });
    let wait = [
        vec![create(dir, "new")],
        vec![tmpfile()],
        vec![mknod(0o644)],
        vec![mknod(inode::S_IFREG | 0o644)],
        vec![layout(old, 2)],
        vec![lookup(), create(0, "new")],
        vec![mkdir(), create(0, "new")],
    ];
    let pass = [
        vec![open(false)],
        vec![open(true)],
        vec![create(999, "new")],
        vec![mknod(inode::S_IFIFO | 0o644)],
        vec![layout(dir, 2)],
        vec![layout(old, 5000)],
        vec![mkdir()],
        vec![create(dir, "old"), create(dir, "new")],
    ];
    let asked = |fs: &Fs, ops: &[Op]| {
        let ops: Vec<pb::Op> = ops.iter().cloned().map(op).collect();
        fs.ns.waits_for_targets(fs.session, Some(&fs.creds), &ops).unwrap()
    };
    assert!(wait.iter().chain(&pass).all(|ops| !asked(&fs, ops)), "all targets are there");
    kill(&mut fs);
    let before = fs.store.prefix(&[]).map(Result::unwrap).collect::<Vec<_>>();
    for ops in &wait {
        assert!(asked(&fs, ops), "{ops:?}");
    }
    for ops in &pass {
        assert!(!asked(&fs, ops), "{ops:?}");
    }
    assert_eq!(
        fs.store.prefix(&[]).map(Result::unwrap).collect::<Vec<_>>(),
        before,
        "nothing was done"
    );
    // Applied entries give the usual result.
    fs.fails(create(dir, "new"), Code::NoSpc);
    fs.one(open(false));
}
