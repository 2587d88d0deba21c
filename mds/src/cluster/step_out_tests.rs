//! Tests of which targets are asked to leave their chains because their chunk table takes no
//! writes.

use super::*;

#[test]
fn a_target_with_a_full_table_steps_out_where_another_replica_stays() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    let says = |full| {
        move |h: &mut pb::HeartbeatRequest| {
            h.targets[0].table_full = full;
            h.targets[0].used = 1; // and not where
        }
    };
    let asked = |r: &mut Rig, now, target| {
        let node = r.map.target(target).unwrap().node;
        r.m.step_out(ms(now), node, &r.map)
    };
    r.beat(1000, 1);
    r.beat_with(1000, 0, says(true)).unwrap();
    assert!(
        asked(&mut r, 1000, 0).is_empty(),
        "the leader before may have asked the other one just now"
    );
    r.beat(3000, 1);
    r.beat_with(3000, 0, says(true)).unwrap();
    assert!(asked(&mut r, 3000, 1).is_empty(), "it has space");
    // It has something of the chain of one copy.
    let alone = r.chain(1).id;
    assert!(asked(&mut r, 3000, 0).is_empty());
    let of = |chain, full| {
        move |h: &mut pb::HeartbeatRequest| {
            h.targets[0].table_full = full;
            h.targets[0].used = 5;
            h.targets[0].stored = vec![pb::ChainBytes { chain, bytes: 5 }];
        }
    };
    r.beat_with(3100, 0, of(alone, true)).unwrap();
    assert!(asked(&mut r, 3100, 0).is_empty());
    // Of the one of two copies only, and the other server was heard of just now.
    let both = r.chain(2).id;
    r.beat_with(3900, 0, of(both, true)).unwrap();
    assert!(asked(&mut r, 3900, 0).is_empty(), "the other one is silent");
    r.beat_with(4000, 1, of(both, true)).unwrap();
    assert!(asked(&mut r, 4000, 0).is_empty(), "the other one is full, too");
    r.beat_with(4100, 1, of(both, false)).unwrap();
    assert_eq!(asked(&mut r, 4100, 0), [0]);
    // From then on the other one is the chain's only replica.
    r.beat_with(4200, 0, of(both, false)).unwrap();
    r.beat_with(4200, 1, of(both, true)).unwrap();
    assert!(asked(&mut r, 4200, 1).is_empty(), "the first may still go");
    r.beat_with(7200, 0, of(both, false)).unwrap();
    r.beat_with(7200, 1, of(both, true)).unwrap();
    assert_eq!(asked(&mut r, 7200, 1), [1], "it did not");
    let lapses = |h: &mut pb::HeartbeatRequest| h.targets[0].lapses = 1;
    r.beat_with(7300, 1, lapses).unwrap();
    assert!(r.tick(7300));
    assert_eq!(r.states(2), [(0, ReplicaServing), (1, ReplicaOffline)]);
    r.beat_with(11_000, 0, of(both, true)).unwrap();
    assert!(asked(&mut r, 11_000, 0).is_empty(), "the last one of the chain");
}
