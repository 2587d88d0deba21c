//! Tests of how chains are laid out.

use strake_proto::{Code, map::MapView};

use super::*;
use crate::cluster::{
    moves::plan,
    state::{
        count, register,
        tests::{cluster, code, deal, request, uuid, with_chains},
        update,
    },
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
    // A server names its rack each time it registers.
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
                let on: BTreeSet<u32> =
                    c.preferred.iter().map(|t| map.targets[*t as usize].node).collect();
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
            // Several others take over what a dead target served.
            let elsewhere = n - usize::from(per);
            let want = (k * (k + 1)).min(elsewhere).div_ceil(2).max(k);
            assert!(
                partners.iter().all(|p| p.len() >= want),
                "{nodes}x{per} copies {}: {partners:?}",
                k + 1
            );
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
    // One chain of one and of two copies for the new target, and now three copies are possible for
    // all five.
    assert_eq!(
        sets.iter().map(|s| (s.copies, s.chains.len())).collect::<Vec<_>>(),
        vec![(1, 1), (2, 1), (3, 5)]
    );
    let u = pb::MapUpdate { expect_version: map.version, chains, sets, ..Default::default() };
    update(&mut map, &u).unwrap();
    assert_eq!(&map.sets[..before.sets.len()], &before.sets[..]);
    assert_eq!(&map.chains[..before.chains.len()], &before.chains[..]);
    MapView::new(map).unwrap();
}

/// How many chains with this many copies each two targets share.
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
            let with: Vec<u32> =
                pairs.iter().filter(|((a, _), n)| *a == t && **n > 0).map(|(_, n)| *n).collect();
            let mean = f64::from(with.iter().sum::<u32>()) / f64::from(others);
            assert_eq!(with.len() as u32, others, "target {t} of {copies} copies: {with:?}");
            assert!(
                with.iter().all(|n| f64::from(*n) <= 2.0 * mean),
                "target {t} of {copies} copies: {with:?}"
            );
        }
    }
    // The order of a set cycles through its heads.
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
    let heads = |map: &pb::ClusterMap, t| {
        map.chains.iter().filter(|c| c.preferred.len() == 2 && c.preferred[0] == t).count()
    };
    assert_eq!((map.chains.len(), heads(&map, 0), heads(&map, 3)), (first * 8, 8, 8));
    // Chains that moved to others are not replaced by new ones, whether they are more than half or
    // all.
    let mut gone = map.clone();
    let mut leave = |n: usize| {
        let own = gone.chains.iter_mut().filter(|c| c.preferred.len() == 2 && c.preferred[0] == 0);
        own.take(n).for_each(|c| c.preferred.rotate_left(1));
        (heads(&gone, 0), make_chains(&gone, 8))
    };
    assert_eq!((leave(4), leave(4)), ((4, None), (0, None)));
    // Lost chains are replaced.
    let one = map.chains.iter_mut().filter(|c| c.preferred == [0]);
    one.take(4).for_each(|c| c.lost = true);
    let (chains, sets) = make_chains(&map, 8).unwrap();
    assert_eq!((chains.len(), sets.len()), (4, 1));
    assert!(chains.iter().all(|c| c.preferred == [0]));
    // A target that drains, or is lost, gets none.
    map.targets[0].draining = true;
    assert!(make_chains(&map, 8).is_none());
}

/// As if all that is under way were done.
fn done(map: &mut pb::ClusterMap, chains: Vec<pb::Chain>) {
    for mut c in chains {
        c.replicas = c
            .preferred
            .iter()
            .map(|t| pb::Replica { target: *t, state: ReplicaServing as i32 })
            .collect();
        let id = c.id;
        *map.chains.iter_mut().find(|h| h.id == id).unwrap() = c;
    }
}

#[test]
fn a_map_does_not_grow_with_targets_that_go_and_come_back() {
    let mut map = cluster(6, 2);
    map.targets.iter_mut().for_each(|t| (t.used, t.capacity) = (10 << 30, 100 << 30));
    map.pools = vec![pb::Pool { name: "p".into(), targets: vec![0, 2, 4, 6] }];
    deal(&mut map, 8);
    let all = map.chains.len();
    let heads = |map: &pb::ClusterMap, t, copies: usize| {
        let own = |c: &&pb::Chain| c.preferred.len() == copies && c.preferred[0] == t;
        let general = map.sets.iter().filter(|s| s.pool.is_empty()).flat_map(|s| s.chains.clone());
        let general: BTreeSet<ChainId> = general.collect();
        map.chains.iter().filter(own).filter(|c| general.contains(&c.id)).count()
    };
    let settle = |map: &mut pb::ClusterMap, dead: &BTreeSet<TargetId>| {
        for _ in 0..100 {
            assert!(make_chains(map, 8).is_none());
            let moved: Vec<pb::Chain> =
                plan(map, &[], dead, Some(8)).into_iter().map(|(c, _)| c).collect();
            if moved.is_empty() {
                return;
            }
            done(map, moved);
        }
        panic!("it does not end");
    };
    for round in 0..6 {
        // One is drained and kept, or long dead and returns: without its old replicas.
        let (t, drain) = (round % 4, round % 2 == 0);
        let at = t as usize;
        (map.targets[at].draining, map.targets[at].alive) = (drain, drain);
        settle(&mut map, &BTreeSet::from([t]));
        assert!(map.chains.iter().all(|c| !c.preferred.contains(&t)), "{round}");
        (map.targets[at].draining, map.targets[at].alive, map.targets[at].used) = (false, true, 0);
        settle(&mut map, &BTreeSet::new());
        assert!((1..=3).all(|copies| heads(&map, t, copies) > 4), "{round}");
        assert_eq!(map.chains.len(), all, "{round}");
        map.targets[at].used = 10 << 30;
    }
    // One that is as full as the others gets no bytes; what it follows in, it heads.
    let mut full = map.clone();
    for c in full.chains.iter_mut().filter(|c| c.preferred[0] == 5 && c.preferred.len() > 1) {
        c.preferred.rotate_left(1);
    }
    for c in full.chains.iter_mut().filter(|c| c.preferred == [5]) {
        c.preferred = vec![7];
    }
    let rest = full.chains.clone();
    done(&mut full, rest);
    settle(&mut full, &BTreeSet::new());
    assert!(heads(&full, 5, 1) == 0 && heads(&full, 5, 2) > 4 && heads(&full, 5, 3) > 4);
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
    let of = |pool: &str| {
        sets.iter()
            .filter(|s| s.pool == pool)
            .map(|s| (s.copies, s.chains.len()))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (of("p"), of("one"), of("none"), of("")),
        (vec![(1, 12), (2, 12), (3, 12)], vec![(1, 4)], vec![], vec![])
    );
    for s in &sets {
        for c in chains.iter().filter(|c| s.chains.contains(&c.id)) {
            let pool = map.pools.iter().find(|p| p.name == s.pool).unwrap();
            assert!(
                c.id as usize > general && c.preferred.iter().all(|t| pool.targets.contains(t)),
                "{c:?}"
            );
        }
    }
    deal(&mut map, 4);
    assert!(make_chains(&map, 4).is_none());
    // A new member heads as many; existing chains stay.
    map.pools[0].targets.push(5);
    let (chains, sets) = make_chains(&map, 4).unwrap();
    assert_eq!(
        sets.iter().map(|s| (&*s.pool, s.copies, s.chains.len())).collect::<Vec<_>>(),
        [("p", 1, 4), ("p", 2, 4), ("p", 3, 4)]
    );
    assert!(chains.iter().all(|c| c.preferred[0] == 5));
    // A destroyed pool leaves its chains behind, and gets no more.
    map.pools.clear();
    assert!(make_chains(&map, 4).is_none());
}

#[test]
fn the_map_stays_of_bounded_length() {
    let mut map = pb::ClusterMap { version: 1, ..Default::default() };
    map.targets = (0..4096)
        .map(|id| pb::Target { id, node: 1001 + id / 8, alive: true, ..Default::default() })
        .collect();
    let (chains, _) = make_chains(&map, 64).unwrap();
    assert_eq!(chains.len(), 4096 * 3 * 2);
    // Later ones, when there is space for only this many more.
    let one = |id: usize| pb::Chain { id: id as u32, ..chains[0].clone() };
    map.chains = (1..).take(MAX_CHAINS - 10).map(one).collect();
    let (new, sets) = make_chains(&map, 64).unwrap();
    assert_eq!((new.len(), sets.len()), (10, 1));
    let u = pb::MapUpdate { chains: new, sets, ..Default::default() };
    let at = |map: &pb::ClusterMap| pb::MapUpdate { expect_version: map.version, ..u.clone() };
    let mut one_less = map.clone();
    one_less.chains.push(one(MAX_CHAINS + 1));
    assert_eq!(code(update(&mut one_less.clone(), &at(&one_less))), Code::NoSpc);
    let fits = at(&map);
    update(&mut map, &fits).unwrap();
    assert_eq!((map.chains.len(), make_chains(&map, 64)), (MAX_CHAINS, None));
    // Nor are there ids for more, until the next recovery.
    map.chains.truncate(1);
    map.sets.clear();
    map.chains[0].id = (1 << 16) - 3;
    let (chains, sets) = make_chains(&map, 64).unwrap();
    assert_eq!(chains.iter().map(|c| c.id).collect::<Vec<_>>(), [65_534, 65_535]);
    let mut beyond = pb::MapUpdate { chains, sets, ..at(&map) };
    update(&mut map.clone(), &beyond).unwrap();
    beyond.chains[1].id += 1;
    beyond.sets.clear();
    assert_eq!(code(update(&mut map, &beyond)), Code::NoSpc);
}

#[test]
fn many_are_made_and_applied_at_once() {
    let mut map = pb::ClusterMap { version: 1, ..Default::default() };
    map.targets = (0..512)
        .map(|id| pb::Target { id, node: 1001 + id / 4, alive: true, ..Default::default() })
        .collect();
    let (chains, sets) = make_chains(&map, 8).unwrap();
    assert_eq!(chains.len(), 512 * 8 * 3);
    let u = pb::MapUpdate { expect_version: 1, chains, sets, ..Default::default() };
    update(&mut map, &u).unwrap();
    assert!(make_chains(&map, 8).is_none());
}
