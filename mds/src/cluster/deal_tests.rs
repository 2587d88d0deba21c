//! Tests of how chains are dealt.

use strake_proto::{Code, map::MapView};

use super::*;
use crate::cluster::state::{
    count, register,
    tests::{cluster, code, deal, request, uuid, with_chains},
    update,
};

#[test]
fn copies_stand_in_different_racks_where_there_are_any() {
    let mut map = pb::ClusterMap { version: 1, fs_uuid: uuid(99), ..Default::default() };
    let racks = ["a", "a", "a", "b", "b", "c"];
    for (n, rack) in racks.iter().enumerate() {
        let uuids = [2 * n as u8, 2 * n as u8 + 1];
        let r = pb::RegisterRequest { rack: rack.to_string(), ..request(&format!("n{n}"), &uuids) };
        register(&mut map, &r).unwrap();
    }
    map.targets.iter_mut().for_each(|t| t.alive = true);
    let (chains, _) = make_chains(&map, 1).unwrap();
    let rack = |t: &TargetId| racks[*t as usize / 2];
    assert_eq!(chains.len(), 3 * 12);
    for c in &chains {
        let different: BTreeSet<&str> = c.preferred.iter().map(rack).collect();
        assert_eq!(different.len(), c.preferred.len(), "{c:?}");
    }
    // Three copies in two racks: two share one, on different servers.
    map.targets.retain(|t| rack(&t.id) != "c");
    let (chains, _) = make_chains(&map, 1).unwrap();
    for c in chains.iter().filter(|c| c.preferred.len() == 3) {
        let different: BTreeSet<&str> = c.preferred.iter().map(rack).collect();
        let servers: BTreeSet<TargetId> = c.preferred.iter().map(|t| t / 2).collect();
        assert_eq!((different.len(), servers.len()), (2, 3), "{c:?}");
    }
    // A server says where it stands each time that it registers.
    let moved = pb::RegisterRequest { rack: "b".into(), ..request("n0", &[0, 1]) };
    register(&mut map, &moved).unwrap();
    assert_eq!(map.nodes[0].rack, "b");
    let bad = pb::RegisterRequest { rack: "b\n".into(), ..request("n0", &[0, 1]) };
    assert_eq!(code(register(&mut map, &bad)), Code::Inval);
}

#[test]
fn chains_stand_on_different_nodes_and_are_dealt_evenly() {
    for (nodes, per) in [(1, 1), (1, 4), (2, 1), (2, 3), (3, 1), (3, 4), (5, 2), (8, 3)] {
        let map = with_chains(nodes, per);
        let n = usize::from(nodes) * usize::from(per);
        let kinds = usize::from(nodes).min(3);
        assert_eq!((map.sets.len(), map.chains.len()), (kinds, kinds * n), "{nodes}x{per}");
        for (k, set) in map.sets.iter().enumerate() {
            assert_eq!((set.copies as usize, set.chains.len()), (k + 1, n));
            let mut follows = vec![0; n];
            let mut partners = vec![BTreeSet::<u32>::new(); n];
            for (i, id) in set.chains.iter().enumerate() {
                let c = map.chains.iter().find(|c| c.id == *id).unwrap();
                assert_eq!((c.preferred[0] as usize, c.preferred.len(), c.epoch), (i, k + 1, 1));
                assert_eq!(count(c, ReplicaServing), k + 1);
                let on: BTreeSet<u32> = c.preferred.iter().map(|t| map.targets[*t as usize].node).collect();
                assert_eq!(on.len(), k + 1, "two copies on one node");
                for t in &c.preferred[1..] {
                    follows[*t as usize] += 1;
                }
                for a in &c.preferred {
                    partners[*a as usize].extend(c.preferred.iter().filter(|b| *b != a));
                }
            }
            let (min, max) = (follows.iter().min().unwrap(), follows.iter().max().unwrap());
            assert!(max - min <= 2, "{nodes}x{per} copies {}: {follows:?}", k + 1);
            // What a dead target served is taken over by several others.
            let elsewhere = n - usize::from(per);
            let want = (k * (k + 1)).min(elsewhere).div_ceil(2).max(k);
            assert!(partners.iter().all(|p| p.len() >= want), "{nodes}x{per} copies {}: {partners:?}", k + 1);
        }
        assert!(make_chains(&map, 1).is_none(), "everything has its chains");
    }
}

#[test]
fn new_targets_make_new_sets_and_leave_the_old_alone() {
    let mut map = with_chains(2, 2);
    let before = map.clone();
    register(&mut map, &request("late", &[200])).unwrap();
    assert!(make_chains(&map, 1).is_none(), "not alive yet");
    map.targets.last_mut().unwrap().alive = true;
    let (chains, sets) = make_chains(&map, 1).unwrap();
    // One chain of one and of two copies for the new target, and now three copies are possible for all five.
    assert_eq!(sets.iter().map(|s| (s.copies, s.chains.len())).collect::<Vec<_>>(), vec![(1, 1), (2, 1), (3, 5)]);
    let u = pb::MapUpdate { expect_version: map.version, chains, sets, ..Default::default() };
    update(&mut map, &u).unwrap();
    assert_eq!(&map.sets[..before.sets.len()], &before.sets[..]);
    assert_eq!(&map.chains[..before.chains.len()], &before.chains[..]);
    MapView::new(map).unwrap();
}

/// How many chains of so many copies each two targets share.
fn shared(map: &pb::ClusterMap, copies: usize) -> BTreeMap<(TargetId, TargetId), u32> {
    let mut pairs = BTreeMap::new();
    for c in map.chains.iter().filter(|c| c.preferred.len() == copies) {
        for (a, b) in c.preferred.iter().flat_map(|a| c.preferred.iter().map(move |b| (*a, *b))) {
            *pairs.entry((a, b)).or_default() += u32::from(a != b);
        }
    }
    pairs
}

#[test]
fn a_lost_target_is_made_good_by_all_others() {
    let mut map = cluster(8, 1);
    deal(&mut map, 8);
    assert_eq!((map.chains.len(), map.sets.len()), (3 * 64, 3));
    let mut racks = cluster(9, 1);
    for (n, node) in racks.nodes.iter_mut().enumerate() {
        node.rack = ["a", "b", "c"][n % 3].into();
    }
    deal(&mut racks, 8);
    for (map, copies, others) in [(&map, 2, 7), (&map, 3, 7), (&racks, 3, 6), (&racks, 2, 6)] {
        let pairs = shared(map, copies);
        for t in 0..others + 1 {
            let with: Vec<u32> = pairs.iter().filter(|((a, _), n)| *a == t && **n > 0).map(|(_, n)| *n).collect();
            let mean = f64::from(with.iter().sum::<u32>()) / f64::from(others);
            assert_eq!(with.len() as u32, others, "target {t} of {copies} copies: {with:?}");
            assert!(with.iter().all(|n| f64::from(*n) <= 2.0 * mean), "target {t} of {copies} copies: {with:?}");
        }
    }
    // The order of a set goes round its heads.
    for s in &map.sets {
        let head = |id: &u32| map.chains.iter().find(|c| c.id == *id).unwrap().preferred[0];
        assert!(s.chains.iter().map(head).eq((0..64).map(|i| i % 8)));
    }
}

#[test]
fn who_heads_at_most_half_gets_all_of_them() {
    let mut map = with_chains(4, 1);
    let first = map.chains.len();
    // After an upgrade: each had one.
    deal(&mut map, 8);
    let heads =
        |map: &pb::ClusterMap, t| map.chains.iter().filter(|c| c.preferred.len() == 2 && c.preferred[0] == t).count();
    assert_eq!((map.chains.len(), heads(&map, 0), heads(&map, 3)), (first * 8, 8, 8));
    // What moved away is not made up for before half of it is gone.
    let mut gone = map.clone();
    let mut leave = |n: usize| {
        let own = gone.chains.iter_mut().filter(|c| c.preferred.len() == 2 && c.preferred[0] == 0);
        own.take(n).for_each(|c| c.preferred.rotate_left(1));
        (heads(&gone, 0), make_chains(&gone, 8))
    };
    assert_eq!(leave(3), (5, None));
    let (left, new) = leave(1);
    let (chains, sets) = new.unwrap();
    assert_eq!((left, chains.len(), sets.len()), (4, 4, 1));
    assert!(chains.iter().all(|c| c.preferred[0] == 0));
    // Who leaves, or is lost, gets none.
    gone.targets[0].draining = true;
    assert!(make_chains(&gone, 8).is_none());
}

#[test]
fn a_pool_has_chains_of_its_own_within_it() {
    let mut map = cluster(6, 1);
    deal(&mut map, 4);
    let general = map.chains.len();
    map.pools = vec![
        pb::Pool { name: "p".into(), targets: vec![1, 3, 4] },
        pb::Pool { name: "one".into(), targets: vec![2] },
        pb::Pool { name: "none".into(), targets: vec![] },
    ];
    let (chains, sets) = make_chains(&map, 4).unwrap();
    let of =
        |pool: &str| sets.iter().filter(|s| s.pool == pool).map(|s| (s.copies, s.chains.len())).collect::<Vec<_>>();
    assert_eq!(
        (of("p"), of("one"), of("none"), of("")),
        (vec![(1, 12), (2, 12), (3, 12)], vec![(1, 4)], vec![], vec![])
    );
    for s in &sets {
        for c in chains.iter().filter(|c| s.chains.contains(&c.id)) {
            let pool = map.pools.iter().find(|p| p.name == s.pool).unwrap();
            assert!(c.id as usize > general && c.preferred.iter().all(|t| pool.targets.contains(t)), "{c:?}");
        }
    }
    deal(&mut map, 4);
    assert!(make_chains(&map, 4).is_none());
    // A new member heads as many; what is there stays.
    map.pools[0].targets.push(5);
    let (chains, sets) = make_chains(&map, 4).unwrap();
    assert_eq!(
        sets.iter().map(|s| (&*s.pool, s.copies, s.chains.len())).collect::<Vec<_>>(),
        [("p", 1, 4), ("p", 2, 4), ("p", 3, 4)]
    );
    assert!(chains.iter().all(|c| c.preferred[0] == 5));
    // A pool that is destroyed leaves its chains behind, and gets no more.
    map.pools.clear();
    assert!(make_chains(&map, 4).is_none());
}

#[test]
fn the_map_stays_of_bounded_length() {
    let mut map = pb::ClusterMap { version: 1, ..Default::default() };
    map.targets =
        (0..4096).map(|id| pb::Target { id, node: 1001 + id / 8, alive: true, ..Default::default() }).collect();
    let (chains, _) = make_chains(&map, 64).unwrap();
    assert_eq!(chains.len(), 4096 * 3 * 2);
    map.chains = chains;
    map.chains.resize_with(MAX_CHAINS, Default::default);
    let (chains, _) = make_chains(&map, 64).unwrap();
    assert_eq!(chains.len(), 4096 * 3, "one for each that heads none");
}

/// The leader makes them between two looks at leases.
#[test]
fn many_are_made_quickly() {
    let mut map = pb::ClusterMap { version: 1, ..Default::default() };
    map.targets =
        (0..512).map(|id| pb::Target { id, node: 1001 + id / 4, alive: true, ..Default::default() }).collect();
    let start = std::time::Instant::now();
    let (chains, sets) = make_chains(&map, 8).unwrap();
    let made = start.elapsed();
    assert_eq!(chains.len(), 512 * 8 * 3);
    let u = pb::MapUpdate { expect_version: 1, chains, sets, ..Default::default() };
    update(&mut map, &u).unwrap();
    println!("made in {made:?}, applied in {:?}", start.elapsed() - made);
    // Without optimization it takes ten times as long.
    assert!(made.as_secs_f64() < if cfg!(debug_assertions) { 5.0 } else { 0.5 });
}
