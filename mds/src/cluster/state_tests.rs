//! Tests of the map's pure functions.

use super::*;
use crate::cluster::chain_table::make_chains;
use ReplicaState::*;

pub(crate) fn uuid(n: u8) -> bytes::Bytes {
    bytes::Bytes::from(vec![n; 16])
}

fn target(n: u8) -> pb::RegisterTarget {
    pb::RegisterTarget {
        uuid: uuid(n),
        capacity: 1000,
        stamp: 7,
        id: TARGET_UNASSIGNED,
        ..Default::default()
    }
}

pub(crate) fn request(name: &str, uuids: &[u8]) -> pb::RegisterRequest {
    pb::RegisterRequest {
        name: name.into(),
        endpoints: vec!["tcp:h:1".into()],
        targets: uuids.iter().map(|n| target(*n)).collect(),
        version: "0.1".into(),
        fs_uuid: bytes::Bytes::new(),
        incarnation: 0,
        rack: String::new(),
        level: 0,
    }
}

/// A map of `nodes` with `per` live targets each.
pub(crate) fn cluster(nodes: u8, per: u8) -> pb::ClusterMap {
    let mut map =
        pb::ClusterMap { version: 1, fs_uuid: uuid(99), default_copies: 2, ..Default::default() };
    for n in 0..nodes {
        let uuids: Vec<u8> = (0..per).map(|t| n * per + t).collect();
        register(&mut map, &request(&format!("n{n}"), &uuids)).unwrap();
    }
    for t in &mut map.targets {
        t.alive = true;
    }
    map
}

/// The same with one chain headed by each target for each number of copies.
pub(crate) fn with_chains(nodes: u8, per: u8) -> pb::ClusterMap {
    let mut map = cluster(nodes, per);
    deal(&mut map, 1);
    map
}

/// Adds the missing chains, for this many headed by each target.
pub(crate) fn deal(map: &mut pb::ClusterMap, per: usize) {
    let (chains, sets) = make_chains(map, per).unwrap();
    let u = pb::MapUpdate { expect_version: map.version, chains, sets, ..Default::default() };
    update(map, &u).unwrap();
}

pub(crate) fn code<T: std::fmt::Debug>(r: Result<T>) -> Code {
    r.unwrap_err().code
}

#[test]
fn registration_is_idempotent_and_assigns_ids_once() {
    let mut map = pb::ClusterMap { version: 1, fs_uuid: uuid(99), ..Default::default() };
    let a = register(&mut map, &request("a", &[1, 2])).unwrap();
    assert_eq!((a.node, &a.target_ids[..], map.version), (1001, &[0, 1][..], 2));
    let again = register(&mut map, &request("a", &[2, 1])).unwrap();
    assert_eq!((again.node, &again.target_ids[..], map.version), (1001, &[1, 0][..], 2));
    let b = register(&mut map, &request("b", &[3])).unwrap();
    assert_eq!((b.node, &b.target_ids[..], map.version), (1002, &[2][..], 3));
    // New endpoint, capacity, and one more target.
    let mut more = request("a", &[1, 2, 4]);
    more.endpoints = vec!["tcp:other:1".into()];
    more.targets[0].capacity = 5;
    more.targets[0].id = 0;
    more.fs_uuid = uuid(99);
    assert_eq!(register(&mut map, &more).unwrap().target_ids, vec![0, 1, 3]);
    assert_eq!(
        (map.targets[0].capacity, map.nodes[0].endpoints[0].as_str(), map.version),
        (5, "tcp:other:1", 4)
    );
    assert!(!map.targets[0].alive, "only a heartbeat makes a target alive");
}

#[test]
fn registration_refuses_what_could_harm() {
    let mut map = cluster(2, 1);
    let before = map.clone();
    let mut other = request("n0", &[0]);
    other.fs_uuid = uuid(1);
    assert_eq!(code(register(&mut map, &other)), Code::Inval);
    assert_eq!(
        code(register(&mut map, &request("n0", &[50]))),
        Code::Busy,
        "same name, other targets, alive"
    );
    assert_eq!(
        code(register(&mut map, &request("n0", &[0, 1]))),
        Code::Busy,
        "target 1 lives on n1"
    );
    assert_eq!(code(register(&mut map, &request("", &[5]))), Code::Inval);
    assert_eq!(code(register(&mut map, &request("x", &[5, 5]))), Code::Inval);
    let mut short = request("x", &[5]);
    short.targets[0].uuid = bytes::Bytes::from_static(b"short");
    assert_eq!(code(register(&mut map, &short)), Code::Inval);
    let mut claims = request("x", &[5]);
    claims.targets[0].id = 1;
    assert_eq!(code(register(&mut map, &claims)), Code::Inval, "an id that is another's");
    claims.targets[0].uuid = uuid(1);
    claims.targets[0].id = 0;
    assert_eq!(code(register(&mut map, &claims)), Code::Inval, "its own uuid with another id");
    assert_eq!(
        code(register(&mut map, &request("x", &(0..=255).map(|_| 1).collect::<Vec<_>>()))),
        Code::Inval
    );
    assert_eq!(map, before, "a refused change changes nothing");
}

#[test]
fn a_registration_of_a_life_that_is_over_changes_nothing() {
    let mut map = with_chains(2, 1);
    let life = |stamp, follows| {
        let mut r = request("n0", &[0]);
        (r.targets[0].stamp, r.targets[0].follows) = (stamp, follows);
        r
    };
    // Two processes asked for the map before either registered; the network delayed the first one's
    // registration.
    register(&mut map, &life(9, Some(7))).unwrap();
    for late in [life(8, Some(7)), life(8, Some(0))] {
        let before = map.clone();
        assert_eq!(code(register(&mut map, &late)), Code::Stale);
        assert_eq!(map, before, "a refused change changes nothing");
    }
    register(&mut map, &life(9, Some(7))).unwrap();
    register(&mut map, &life(10, Some(9))).unwrap();
    // A target's first process, delayed until its second one registered.
    let mut first = request("new", &[40]);
    first.targets[0].follows = Some(0);
    let mut second = first.clone();
    second.targets[0].stamp = 8;
    register(&mut map, &second).unwrap();
    assert_eq!(code(register(&mut map, &first)), Code::Stale);
    // Storage servers of former versions, and what is in the log of such.
    register(&mut map, &life(11, None)).unwrap();
    assert_eq!(map.targets[0].stamp, 11);
}

#[test]
fn a_new_life_leaves_the_in_sync_sets_as_it_registers() {
    let mut map = with_chains(2, 1);
    let mut again = request("n0", &[0]);
    let before = map.clone();
    register(&mut map, &again).unwrap();
    assert_eq!(map, before, "the same life, asked twice");
    again.targets[0].stamp = 8;
    register(&mut map, &again).unwrap();
    assert_eq!(
        (map.version, map.targets[0].stamp, map.targets[0].alive),
        (before.version + 1, 8, false)
    );
    for (c, old) in map.chains.iter().zip(&before.chains) {
        let state = c.replicas.iter().find(|r| r.target == 0).map(|r| r.state());
        match (state, c.replicas.len()) {
            (None, _) => assert_eq!(c, old),
            (Some(s), 1) => assert_eq!((s, c.epoch), (ReplicaLastsrv, 2)),
            (Some(s), _) => assert_eq!((s, c.epoch), (ReplicaOffline, 2)),
        }
        check_chain(c).unwrap();
        if c != old {
            check_transition(old, c).unwrap();
        }
    }
}

#[test]
fn a_dead_target_may_move_and_a_dead_name_be_reused() {
    let mut map = cluster(2, 1);
    map.targets[1].alive = false;
    assert_eq!(register(&mut map, &request("n0", &[0, 1])).unwrap().target_ids, vec![0, 1]);
    assert_eq!(map.targets[1].node, 1001);
    map.targets[0].alive = false;
    assert_eq!(register(&mut map, &request("n0", &[60])).unwrap().target_ids, vec![2]);
}

#[test]
fn updates_are_checked_against_version_epoch_and_transitions() {
    let mut map = with_chains(3, 1);
    let before = map.clone();
    let chain = map.chains.iter().find(|c| c.preferred.len() == 3).unwrap().clone();
    let put = |map: &mut pb::ClusterMap, epoch: u64, states: [ReplicaState; 3]| {
        let mut c = chain.clone();
        c.epoch = epoch;
        for (r, s) in c.replicas.iter_mut().zip(states) {
            r.state = s as i32;
        }
        update(
            map,
            &pb::MapUpdate { expect_version: map.version, chains: vec![c], ..Default::default() },
        )
    };
    let stale = pb::MapUpdate { expect_version: map.version - 1, ..Default::default() };
    assert_eq!(code(update(&mut map, &stale)), Code::Busy);
    for (epoch, states) in [
        (1, [ReplicaServing, ReplicaServing, ReplicaOffline]),
        (2, [ReplicaOffline, ReplicaOffline, ReplicaOffline]),
        (2, [ReplicaServing, ReplicaOffline, ReplicaLastsrv]),
        (2, [ReplicaOffline, ReplicaServing, ReplicaServing]),
        (2, [ReplicaServing, ReplicaSyncing, ReplicaSyncing]),
        (2, [ReplicaServing, ReplicaServing, ReplicaUnknown]),
    ] {
        assert_eq!(code(put(&mut map, epoch, states)), Code::Inval, "{states:?}");
    }
    assert_eq!(map, before);
    put(&mut map, 2, [ReplicaServing, ReplicaServing, ReplicaOffline]).unwrap();
    // The third missed an epoch: it may not serve, nor count as last.
    assert_eq!(
        code(put(&mut map, 3, [ReplicaServing, ReplicaServing, ReplicaServing])),
        Code::Inval
    );
    assert_eq!(
        code(put(&mut map, 3, [ReplicaLastsrv, ReplicaLastsrv, ReplicaLastsrv])),
        Code::Inval
    );
    put(&mut map, 3, [ReplicaServing, ReplicaServing, ReplicaSyncing]).unwrap();
    put(&mut map, 4, [ReplicaServing, ReplicaServing, ReplicaServing]).unwrap();
    put(&mut map, 5, [ReplicaLastsrv, ReplicaLastsrv, ReplicaOffline]).unwrap();
    assert_eq!(
        code(put(&mut map, 6, [ReplicaServing, ReplicaServing, ReplicaOffline])),
        Code::Inval,
        "two sources"
    );
    put(&mut map, 6, [ReplicaServing, ReplicaOffline, ReplicaOffline]).unwrap();
    assert_eq!(map.version, before.version + 5);
}

#[test]
fn updates_refuse_nonsense() {
    let mut map = with_chains(2, 1);
    let before = map.clone();
    let v = map.version;
    let with = |f: &dyn Fn(&mut pb::MapUpdate)| {
        let mut u = pb::MapUpdate { expect_version: v, ..Default::default() };
        f(&mut u);
        u
    };
    let c = map.chains[0].clone();
    let set = map.sets[0].clone();
    let moved = pb::Target { node: 1002, ..map.targets[0].clone() };
    let renamed = pb::Node { name: "other".into(), ..map.nodes[0].clone() };
    let cases = [
        with(&|u| u.targets.push(pb::Target { id: 77, ..Default::default() })),
        with(&|u| u.targets.push(moved.clone())),
        with(&|u| u.nodes.push(renamed.clone())),
        with(&|u| u.nodes.push(pb::Node { id: 5, ..Default::default() })),
        with(&|u| u.chains.push(pb::Chain { id: 900, ..c.clone() })).tap(|u| u.chains[0].epoch = 2),
        with(&|u| u.chains.push(pb::Chain { id: 900, replicas: vec![], ..c.clone() })),
        with(&|u| u.chains.push(pb::Chain { epoch: 9, preferred: vec![44], ..c.clone() })),
        with(&|u| u.chains.push(pb::Chain { epoch: 9, preferred: vec![0, 1], ..c.clone() })),
        with(&|u| u.chains.push(pb::Chain { epoch: 9, preferred: vec![], ..c.clone() })),
        with(&|u| u.sets.push(set.clone())),
        with(&|u| u.sets.push(pb::ChainSet { id: 90, chains: vec![12345], ..set.clone() })),
        with(&|u| {
            let replicas = vec![pb::Replica { target: 44, state: ReplicaServing as i32 }];
            u.chains.push(pb::Chain {
                id: 900,
                epoch: 1,
                replicas,
                preferred: vec![44],
                lost: false,
            });
        }),
    ];
    for u in cases {
        assert_eq!(code(update(&mut map, &u)), Code::Inval, "{u:?}");
        assert_eq!(map, before);
    }
}

trait Tap: Sized {
    fn tap(mut self, f: impl Fn(&mut Self)) -> Self {
        f(&mut self);
        self
    }
}
impl Tap for pb::MapUpdate {}

#[test]
fn a_node_of_an_unknown_role_is_refused() {
    let mut map = cluster(1, 1);
    let before = map.clone();
    let endpoints = vec!["tcp:h:2".into()];
    let n = pb::Node { id: 1, role: 77, endpoints, name: "m".into(), ..Default::default() };
    assert_eq!(
        code(mds_nodes(&mut map, &pb::MdsNodes { nodes: vec![n], gone: vec![] })),
        Code::Inval
    );
    let changed = pb::Node { role: 77, ..map.nodes[0].clone() };
    let u = pb::MapUpdate {
        expect_version: map.version,
        nodes: vec![changed.clone()],
        ..Default::default()
    };
    assert_eq!(code(update(&mut map, &u)), Code::Inval);
    assert_eq!(map, before);
    // If a map has one nevertheless, it counts as neither: it is not asked as a metadata server nor
    // counted as a storage server.
    map.nodes = vec![changed];
    assert!(MapView::new(map).unwrap().mds::<String>().is_empty());
}

#[test]
fn mds_nodes_keep_their_raft_ids() {
    let mut map = cluster(1, 1);
    let mds = |id| pb::Node {
        id,
        role: ROLE_MDS,
        endpoints: vec!["tcp:h:2".into()],
        name: format!("m{id}"),
        ..Default::default()
    };
    mds_nodes(&mut map, &pb::MdsNodes { nodes: vec![mds(1), mds(2)], gone: vec![] }).unwrap();
    let v = map.version;
    mds_nodes(&mut map, &pb::MdsNodes { nodes: vec![mds(2)], gone: vec![] }).unwrap();
    assert_eq!(map.version, v, "nothing new");
    assert_eq!(map.nodes.iter().map(|n| n.id).collect::<Vec<_>>(), vec![1, 2, 1001]);
    assert_eq!(
        code(mds_nodes(&mut map, &pb::MdsNodes { nodes: vec![mds(1001)], gone: vec![] })),
        Code::Inval
    );
    assert_eq!(
        code(mds_nodes(&mut map, &pb::MdsNodes { nodes: vec![mds(0)], gone: vec![] })),
        Code::Inval
    );
    // A replaced server is not asked any more; storage servers are not affected.
    mds_nodes(&mut map, &pb::MdsNodes { nodes: vec![], gone: vec![1, 1001] }).unwrap();
    assert_eq!(map.nodes.iter().map(|n| n.id).collect::<Vec<_>>(), vec![2, 1001]);
    assert_eq!(map.former, [1]);
    let v = map.version;
    mds_nodes(&mut map, &pb::MdsNodes { nodes: vec![], gone: vec![1] }).unwrap();
    assert_eq!(map.version, v, "known already");
    // Its id was used.
    assert_eq!(
        code(mds_nodes(&mut map, &pb::MdsNodes { nodes: vec![mds(1)], gone: vec![] })),
        Code::Inval
    );
    // A storage server registered later still gets an id of its own range.
    assert_eq!(register(&mut map, &request("z", &[9])).unwrap().node, 1002);
}

#[test]
fn pools_answer_as_lustre_does() {
    let mut map = cluster(3, 1);
    let mut change = |action, pool: &str, targets: &[u32]| {
        pool_change(
            &mut map,
            &pb::PoolChange { pool: pool.into(), action, targets: targets.to_vec() },
        )
    };
    use pool_action::*;
    assert_eq!(code(change(ADD, "fast", &[0])), Code::NoEnt);
    change(NEW, "fast", &[]).unwrap();
    assert_eq!(code(change(NEW, "fast", &[])), Code::Exist);
    change(ADD, "fast", &[2, 0]).unwrap();
    assert_eq!(code(change(ADD, "fast", &[1, 0])), Code::Exist);
    assert_eq!(code(change(ADD, "fast", &[9])), Code::NoEnt);
    assert_eq!(code(change(DESTROY, "fast", &[])), Code::NotEmpty);
    assert_eq!(code(change(REMOVE, "fast", &[1])), Code::NoEnt);
    change(REMOVE, "fast", &[0, 2]).unwrap();
    change(DESTROY, "fast", &[]).unwrap();
    assert_eq!(code(change(9, "fast", &[])), Code::Inval);
    for name in ["", "way-too-long-for-a-pool", "a/b", "a b", "none", "ignore"] {
        assert_eq!(code(change(NEW, name, &[])), Code::Inval);
    }
}

#[test]
fn settings_are_checked_and_change_the_map_once() {
    let mut map = pb::ClusterMap { version: 1, ..Default::default() };
    settings(&mut map, &pb::Settings { min_copies: 2 }).unwrap();
    assert_eq!((map.version, map.min_copies), (2, 2));
    settings(&mut map, &pb::Settings { min_copies: 2 }).unwrap();
    assert_eq!(map.version, 2);
    assert_eq!(code(settings(&mut map, &pb::Settings { min_copies: 4 })), Code::Inval);
    assert_eq!((map.version, map.min_copies), (2, 2));
}
