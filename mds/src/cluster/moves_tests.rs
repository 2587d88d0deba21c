use pb::ReplicaState::{ReplicaLastsrv, ReplicaOffline, ReplicaServing};
use strake_proto::NodeId;

use super::*;
use crate::cluster::{membership, state};

/// Four nodes with one target each, a chain of two headed by each, and one node with two
/// targets without chains.
fn map() -> pb::ClusterMap {
    let target = |(id, node): (TargetId, NodeId)| pb::Target {
        id,
        node,
        capacity: 100,
        alive: true,
        ..Default::default()
    };
    let nodes = [(0, 1001), (1, 1002), (2, 1003), (3, 1004), (4, 1005), (5, 1005)];
    let chain = |(id, on): (u32, [TargetId; 2])| pb::Chain {
        id,
        epoch: 1,
        replicas: on
            .iter()
            .map(|t| pb::Replica { target: *t, state: ReplicaServing as i32 })
            .collect(),
        preferred: on.to_vec(),
        lost: false,
    };
    pb::ClusterMap {
        version: 7,
        targets: nodes.into_iter().map(target).collect(),
        chains: [(1, [0, 1]), (2, [1, 2]), (3, [2, 3]), (4, [3, 0])]
            .into_iter()
            .map(chain)
            .collect(),
        pools: vec![pb::Pool { name: "p".into(), targets: vec![0, 5] }],
        ..Default::default()
    }
}

fn change(target: TargetId, action: u32, heir: Option<TargetId>) -> pb::TargetChange {
    pb::TargetChange { target, action, heir, slow: None }
}

fn planned(map: &pb::ClusterMap) -> Vec<(u32, Vec<TargetId>)> {
    plan(map, &[], &BTreeSet::new(), Some(1))
        .into_iter()
        .map(|(c, _)| (c.id, c.preferred))
        .collect()
}

#[test]
fn what_drains_moves_to_where_there_is_most_room_on_other_nodes() {
    let mut m = map();
    assert_eq!(planned(&m), []);
    target_change(&mut m, &change(0, target_action::DRAIN, None)).unwrap();
    assert_eq!(m.version, 8);
    // To the empty targets, one each.
    assert_eq!(planned(&m), [(1, vec![4, 1]), (4, vec![3, 5])]);
    // Never two copies on one node.
    (m.targets[4].used, m.targets[5].used) = (99, 99);
    (m.targets[2].used, m.targets[3].used) = (50, 60);
    assert_eq!(planned(&m), [(1, vec![2, 1]), (4, vec![3, 1])]);
    // Not to targets that are dead or drain.
    m.targets[2].alive = false;
    target_change(&mut m, &change(3, target_action::DRAIN, None)).unwrap();
    // Nor to targets that would be too full.
    assert_eq!(planned(&m), [(3, vec![2, 1]), (4, vec![3, 1])]);
    for (chain, _) in plan(&m, &[], &BTreeSet::new(), Some(1)) {
        let update =
            pb::MapUpdate { expect_version: m.version, chains: vec![chain], ..Default::default() };
        state::update(&mut m.clone(), &update).unwrap();
    }
}

#[test]
fn what_has_been_dead_for_long_is_made_good_elsewhere() {
    let mut m = map();
    m.targets[0].alive = false;
    m.chains[0].replicas[0].set_state(ReplicaOffline);
    m.chains[0].replicas.reverse();
    m.chains[3].replicas[1].set_state(ReplicaOffline);
    assert_eq!(planned(&m), []);
    let dead = BTreeSet::from([0]);
    let moved = |m: &pb::ClusterMap| -> Vec<_> {
        plan(m, &[], &dead, Some(1)).into_iter().map(|(c, _)| (c.id, c.preferred)).collect()
    };
    assert_eq!(moved(&m), [(1, vec![4, 1]), (4, vec![3, 5])]);
    // Not to a target without enough space.
    m.targets[0].used = 90;
    m.targets[1..].iter_mut().for_each(|t| t.used = 60);
    m.targets[2].used = 10;
    assert_eq!(moved(&m), [(1, vec![2, 1])]);
    // It is back.
    m.targets[0].alive = true;
    assert_eq!(moved(&m), []);
}

#[test]
fn all_others_take_part_when_one_is_lost() {
    let mut m = map();
    m.chains.clear();
    m.pools.clear();
    m.nodes = (1001..=1005).map(|id| pb::Node { id, ..Default::default() }).collect();
    let (chains, sets) = crate::cluster::chain_table::make_chains(&m, 8).unwrap();
    (m.chains, m.sets) = (chains, sets);
    m.targets[0].alive = false;
    for c in m.chains.iter_mut().filter(|c| c.preferred.len() > 1) {
        c.replicas.sort_by_key(|r| r.target == 0);
        c.replicas.iter_mut().filter(|r| r.target == 0).for_each(|r| r.set_state(ReplicaOffline));
    }
    m.chains.retain(|c| c.preferred != [0]);
    let lost = m.chains.iter().filter(|c| c.preferred.contains(&0)).count();
    let planned = plan(&m, &[], &BTreeSet::from([0]), Some(8));
    let mut takes: BTreeMap<TargetId, usize> = BTreeMap::new();
    for (c, _) in &planned {
        let old = m.chains.iter().find(|o| o.id == c.id).unwrap();
        c.preferred
            .iter()
            .filter(|t| !old.preferred.contains(t))
            .for_each(|t| *takes.entry(*t).or_default() += 1);
    }
    // Two of the five others share a server.
    assert!(
        takes.len() >= 4 && takes.values().all(|n| (1..=MOVES).contains(n)),
        "{lost} lost: {takes:?}"
    );
    assert!(planned.len() > 3 * MOVES, "{} of {lost}", planned.len());
}

#[test]
fn a_move_whose_end_is_lost_goes_elsewhere() {
    let mut m = map();
    target_change(&mut m, &change(0, target_action::DRAIN, None)).unwrap();
    m.targets[4].alive = false;
    m.chains.truncate(1);
    m.chains[0].preferred = vec![4, 1];
    m.chains[0].replicas.push(pb::Replica { target: 4, state: ReplicaOffline as i32 });
    assert_eq!(planned(&m), [], "it may come back");
    let dead = BTreeSet::from([4]);
    let again: Vec<_> = plan(&m, &[], &dead, Some(1)).into_iter().map(|(c, _)| c).collect();
    assert_eq!(again.iter().map(|c| &c.preferred[..]).collect::<Vec<_>>(), [[2, 1]]);
    let update = pb::MapUpdate { expect_version: m.version, chains: again, ..Default::default() };
    state::update(&mut m.clone(), &update).unwrap();
    // Given up, it is not waited for either.
    target_change(&mut m, &change(4, target_action::GIVE_UP, None)).unwrap();
    assert_eq!(planned(&m), [(1, vec![2, 1])]);
    // A chain that is being resynced is left alone.
    m.chains[0].replicas[2].set_state(pb::ReplicaState::ReplicaSyncing);
    assert_eq!(planned(&m), []);
}

#[test]
fn a_move_to_what_has_become_full_goes_elsewhere_or_back() {
    let mut m = map();
    m.chains.truncate(1);
    m.chains[0].preferred = vec![4, 1];
    m.chains[0]
        .replicas
        .push(pb::Replica { target: 4, state: pb::ReplicaState::ReplicaSyncing as i32 });
    m.targets[4].used = 95;
    assert_eq!(planned(&m), []);
    // Back to where it is, though that target is full, rather than to an empty one.
    m.targets[4].used = 96;
    m.targets[0].used = 99;
    assert_eq!(planned(&m), [(1, vec![0, 1])]);
    // A chain still leaves a draining target.
    m.targets[0].draining = true;
    m.targets[0].used = 50;
    assert_eq!(planned(&m), [(1, vec![2, 1])]);
    // If there is nothing better, it stays.
    for t in [2, 3, 5] {
        m.targets[t].used = 95;
    }
    assert_eq!(planned(&m), []);
    // A target that is in sync already is not disturbed.
    m.targets[2].used = 0;
    m.chains[0].replicas[2].set_state(ReplicaServing);
    assert_eq!(planned(&m), []);
}

#[test]
fn copies_get_out_of_each_others_racks() {
    let mut m = map();
    let node =
        |(id, rack): (NodeId, &str)| pb::Node { id, rack: rack.into(), ..Default::default() };
    m.nodes = [(1001, "a"), (1002, "a"), (1003, "b"), (1004, "b"), (1005, "")].map(node).to_vec();
    // 0 and 1 share a rack, 2 and 3 too.
    assert_eq!(planned(&m), [(1, vec![0, 4]), (3, vec![2, 5])]);
    assert_eq!(plan(&m, &[], &BTreeSet::new(), None), [], "not at every look");
    // A copy that moves for another reason finds its rack at once.
    m.targets[4].alive = false;
    m.targets[5].alive = false;
    target_change(&mut m, &change(1, target_action::DRAIN, None)).unwrap();
    assert_eq!(planned(&m), [(1, vec![0, 2]), (2, vec![0, 2]), (3, vec![2, 0])]);
    // Three copies in two racks: nothing can be done, and that is known without checking any
    // target.
    m = map();
    m.chains.truncate(1);
    m.chains[0].preferred = vec![0, 1, 2];
    m.chains[0].replicas =
        [0, 1, 2].map(|target| pb::Replica { target, state: ReplicaServing as i32 }).to_vec();
    m.nodes = [(1001, "a"), (1002, "a"), (1003, "b"), (1004, "b"), (1005, "b")].map(node).to_vec();
    assert!((0..3).all(|t| !Load::new(&m).may_spread(&m.chains[0], t)));
    assert_eq!(planned(&m), []);
    // A third rack.
    m.nodes[4].rack = "c".into();
    assert!(
        [(0, true), (1, true), (2, false)]
            .iter()
            .all(|(t, is)| Load::new(&m).may_spread(&m.chains[0], *t) == *is)
    );
    assert_eq!(planned(&m), [(1, vec![0, 4, 2])]);
    // All in one of two racks.
    m.nodes.iter_mut().for_each(|n| n.rack = if n.id == 1005 { "b".into() } else { "a".into() });
    assert_eq!(planned(&m), [(1, vec![0, 1, 4])]);
    // With only one rack nothing moves.
    m = map();
    m.nodes = (1001..=1005).map(|id| node((id, "a"))).collect();
    assert_eq!(planned(&m), []);
}

#[test]
fn a_pools_chain_stays_with_its_members() {
    let mut m = map();
    m.sets = vec![pb::ChainSet { id: 1, pool: "p".into(), copies: 2, chains: vec![1] }];
    let members = |m: &mut pb::ClusterMap, of: &[TargetId]| m.pools[0].targets = of.to_vec();
    members(&mut m, &[0, 1]);
    assert_eq!(planned(&m), []);
    // 1 was removed from the pool; an emptier target that is not a member does not count.
    members(&mut m, &[0, 2, 3]);
    assert_eq!(planned(&m), [(1, vec![0, 2])]);
    // No member is left that could take it, or the pool is gone.
    members(&mut m, &[0]);
    assert_eq!(planned(&m), []);
    members(&mut m, &[]);
    assert_eq!(planned(&m), []);
    m.pools.clear();
    assert_eq!(planned(&m), []);
    // A replica that leaves for another reason goes to a member, or elsewhere where no member
    // can take it.
    m.pools = vec![pb::Pool { name: "p".into(), targets: vec![0, 1, 2] }];
    m.targets[1].draining = true;
    m.targets[2].used = 50;
    m.chains.truncate(1);
    assert_eq!(planned(&m), [(1, vec![0, 2])]);
    assert!(!plan(&m, &[], &BTreeSet::new(), None)[0].1.contains("pool"));
    members(&mut m, &[0, 1]);
    assert_eq!(planned(&m), [(1, vec![0, 3])]);
    let (_, sentence) = plan(&m, &[], &BTreeSet::new(), None).remove(0);
    assert!(sentence.ends_with("being drained; no target of pool 'p' can take it"), "{sentence}");
}

#[test]
fn few_move_at_a_time_and_one_after_the_other() {
    let mut m = map();
    target_change(&mut m, &change(0, target_action::DRAIN, Some(4))).unwrap();
    for id in 10..20 {
        m.chains.push(pb::Chain { id, ..m.chains[0].clone() });
    }
    let all = plan(&m, &[], &BTreeSet::new(), Some(1));
    assert_eq!(all.len(), MOVES, "{all:?}");
    for (n, _) in all {
        assert!(n.preferred.contains(&4));
        let at = m.chains.iter().position(|c| c.id == n.id).unwrap();
        m.chains[at] = n;
    }
    assert_eq!(planned(&m), [], "these are not there yet");
    let moved = m.chains.iter_mut().find(|c| is_moving(c)).unwrap();
    moved.replicas = moved.preferred.iter().map(|t| pb::Replica { target: *t, state: 1 }).collect();
    assert_eq!(planned(&m).len(), 1);
    // A chain that changes for another reason waits, as does one without a source.
    assert_eq!(plan(&m, &m.chains.clone(), &BTreeSet::new(), Some(1)), []);
    m.chains.iter_mut().for_each(|c| {
        c.replicas.iter_mut().for_each(|r| r.set_state(pb::ReplicaState::ReplicaLastsrv))
    });
    assert_eq!(planned(&m), []);
}

#[test]
fn what_has_no_source_holds_up_nobody() {
    let mut m = map();
    target_change(&mut m, &change(0, target_action::DRAIN, Some(4))).unwrap();
    let half_way = pb::Chain { preferred: vec![4, 1], ..m.chains[0].clone() };
    let add = |m: &mut pb::ClusterMap| {
        m.chains.extend((10..30).map(|id| pb::Chain { id, ..half_way.clone() }))
    };
    add(&mut m);
    assert_eq!(planned(&m), [], "all move");
    for (lost, doubt) in [(true, false), (false, false), (false, true)] {
        for c in m.chains.iter_mut().filter(|c| c.id >= 10) {
            c.lost = lost;
            c.replicas
                .iter_mut()
                .for_each(|r| r.set_state(if doubt { ReplicaServing } else { ReplicaLastsrv }));
        }
        let of = m.chains.iter().filter(|c| doubt && c.id >= 10);
        m.doubts = of.map(|c| pb::Doubt { chain: c.id, ..Default::default() }).collect();
        assert_eq!(planned(&m), [(1, vec![4, 1]), (4, vec![3, 4])]);
    }
}

#[test]
fn an_heir_takes_all_that_it_may() {
    let mut m = map();
    target_change(&mut m, &change(0, target_action::DRAIN, Some(3))).unwrap();
    // The second chain has a copy there already.
    assert_eq!(planned(&m), [(1, vec![3, 1]), (4, vec![3, 4])]);
    for (id, heir, code) in [
        (9, None, Code::NoEnt),
        (0, Some(9), Code::NoEnt),
        (0, Some(0), Code::Inval),
        (1, Some(0), Code::Inval),
    ] {
        let e = target_change(&mut m.clone(), &change(id, target_action::DRAIN, heir)).unwrap_err();
        assert_eq!(e.code, code, "{e}");
    }
    assert_eq!(target_change(&mut m.clone(), &change(0, 9, None)).unwrap_err().code, Code::Inval);
    // A target that drains itself inherits nothing.
    target_change(&mut m, &change(3, target_action::DRAIN, None)).unwrap();
    assert_eq!(m.targets[0].heir, None);
    target_change(&mut m, &change(0, target_action::KEEP, None)).unwrap();
    assert!(!m.targets[0].draining && m.targets[3].draining);
}

#[test]
fn what_only_lost_targets_had_is_lost_until_one_of_them_is_kept() {
    let mut m = map();
    let give_up =
        |m: &mut pb::ClusterMap, t| target_change(m, &change(t, target_action::GIVE_UP, None));
    assert!(give_up(&mut m, 0).unwrap_err().message.contains("is alive"));
    for t in [0, 1] {
        m.targets[t].alive = false;
    }
    m.chains[0].replicas.iter_mut().for_each(|r| r.set_state(ReplicaLastsrv));
    give_up(&mut m, 0).unwrap();
    assert!(
        m.targets[0].draining && m.chains.iter().all(|c| !c.lost),
        "the other one may come back"
    );
    give_up(&mut m, 1).unwrap();
    assert_eq!(
        m.chains.iter().map(|c| (c.lost, c.epoch)).collect::<Vec<_>>(),
        [(true, 2), (false, 1), (false, 1), (false, 1)]
    );
    // Replicas of other chains move; the lost chain is left alone.
    assert_eq!(planned(&m), [(2, vec![4, 2]), (4, vec![3, 5])]);
    target_change(&mut m, &change(1, target_action::KEEP, None)).unwrap();
    assert_eq!((m.chains[0].lost, m.chains[0].epoch), (false, 3));
    give_up(&mut m, 1).unwrap();
    // The targets may be removed when only lost chains need them.
    assert!(
        target_change(&mut m.clone(), &change(0, target_action::REMOVE, None))
            .unwrap_err()
            .message
            .contains("drain")
    );
    for (n, to) in [(1, [4, 2]), (3, [3, 5])] {
        m.chains[n].preferred = to.to_vec();
        m.chains[n].replicas = to.iter().map(|t| pb::Replica { target: *t, state: 1 }).collect();
    }
    // One is removed, and the other returns nevertheless.
    target_change(&mut m, &change(0, target_action::REMOVE, None)).unwrap();
    let mut back = m.clone();
    target_change(&mut back, &change(1, target_action::KEEP, None)).unwrap();
    back.targets.iter_mut().for_each(|t| t.alive = true);
    assert_eq!((back.chains[0].lost, &back.chains[0].preferred[..]), (false, &[1][..]));
    let facts = membership::Facts { alive: |_| true, synced: false, acts: |_| true };
    let source = membership::evaluate(&back.chains[0], &facts).unwrap();
    let update =
        pb::MapUpdate { expect_version: back.version, chains: vec![source], ..Default::default() };
    state::update(&mut back, &update).unwrap();
    target_change(&mut m, &change(1, target_action::REMOVE, None)).unwrap();
    assert!(m.chains[0].lost && m.chains[0].replicas.is_empty());
    strake_proto::map::MapView::new(m).unwrap();
}

#[test]
fn only_what_nobody_needs_is_taken_out() {
    let mut m = map();
    let remove =
        |m: &mut pb::ClusterMap, t| target_change(m, &change(t, target_action::REMOVE, None));
    assert!(remove(&mut m, 0).unwrap_err().message.contains("drain it first"));
    assert!(remove(&mut m, 5).unwrap_err().message.contains("alive"));
    m.targets[5].alive = false;
    m.doubts = vec![pb::Doubt {
        chain: 1,
        replicas: vec![pb::Replica { target: 5, state: 1 }],
        ..Default::default()
    }];
    assert_eq!(remove(&mut m, 5).unwrap_err().code, Code::Busy);
    m.doubts.clear();
    remove(&mut m, 5).unwrap();
    assert!(m.targets.iter().all(|t| t.id != 5) && m.pools[0].targets == [0]);
    assert_eq!(m.next_target, 6, "its number is given to no other");
    assert_eq!(remove(&mut m, 5).unwrap_err().code, Code::NoEnt);
}
