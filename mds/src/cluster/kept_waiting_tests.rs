//! Tests of heartbeats that the leader itself keeps waiting.

use super::*;
use crate::cluster::kept_waiting::LONGEST;

impl Rig {
    fn node(&self, target: TargetId) -> NodeId {
        self.map.target(target).unwrap().node
    }
    /// A heartbeat about a target that has no answer yet.
    fn beat_and_wait(&mut self, now: u64, target: TargetId) {
        self.beat(now, target);
        self.m.waits(ms(now), self.node(target));
    }
    fn answer(&mut self, now: u64, arrived: u64, target: TargetId) {
        self.m.answered(ms(now), ms(arrived), self.node(target), &self.map);
    }
    fn is_alive(&self, target: TargetId) -> bool {
        self.map.target(target).unwrap().alive
    }
}

#[test]
fn who_is_kept_waiting_is_not_dead_and_has_the_ordinary_time_afterwards() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    r.beat_and_wait(1000, 0);
    r.beat(1000, 1);
    // Without an answer for longer than a lease; the other one is silent.
    assert!(r.tick(4000));
    assert!(r.is_alive(0) && !r.is_alive(1));
    assert_eq!(r.states(2), [(0, ReplicaServing), (1, ReplicaOffline)]);
    r.answer(5000, 1000, 0);
    r.tick(6900);
    assert!(r.is_alive(0), "its next heartbeat may still come");
    assert!(r.tick(7001));
    assert!(!r.is_alive(0));
    assert_eq!(r.states(2), [(0, ReplicaLastsrv), (1, ReplicaOffline)]);
}

#[test]
fn all_waits_of_a_node_have_to_end() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    for (now, target) in [(1000, 0), (1500, 0), (1500, 0)] {
        r.beat_and_wait(now, target);
    }
    r.answer(1600, 1000, 0);
    r.answer(1600, 1500, 0);
    r.tick(5000);
    assert!(r.is_alive(0) && !r.is_alive(1));
    r.answer(5000, 1500, 0);
    // A heartbeat that never existed.
    r.answer(6000, 1500, 0);
    assert!(r.tick(7001));
    assert!(!r.is_alive(0));
}

#[test]
fn a_wait_is_believed_for_a_while_only() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    let longest = u64::try_from(LONGEST.as_millis()).unwrap();
    r.beat_and_wait(1000, 0);
    r.tick(1000 + longest - 1);
    assert!(r.is_alive(0));
    assert!(r.tick(1000 + longest));
    assert!(!r.is_alive(0));
    r.answer(1001 + longest, 1000, 0);
    r.tick(1100 + longest);
    assert!(!r.is_alive(0), "its end comes too late to say anything");
    // A new one does.
    r.beat(1200 + longest, 0);
    assert!(r.tick(1200 + longest));
    assert!(r.is_alive(0));
}

#[test]
fn a_wait_says_nothing_of_a_target_that_its_heartbeat_did_not_name() {
    // Two targets of one server.
    let mut map = with_chains(2, 2);
    map.targets.iter_mut().for_each(|t| t.alive = true);
    let mut r = Rig::new(map, 0);
    let other = r.map.map.targets.iter().find(|t| t.id != 0 && t.node == r.node(0)).unwrap().id;
    r.beat(1000, other);
    r.beat_and_wait(1500, 0);
    r.tick(3400);
    assert!(r.is_alive(0) && !r.is_alive(other));
    r.answer(3500, 1500, 0);
    r.tick(3600);
    assert!(r.is_alive(0) && !r.is_alive(other));
}

#[test]
fn a_device_that_failed_is_out_at_once_and_so_is_who_was_shut_out() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    r.beat_and_wait(1000, 0);
    r.beat_with(1000, 1, |h| h.targets[0].failed = true).unwrap();
    r.m.waits(ms(1000), r.node(1));
    assert!(r.tick(1100));
    assert!(r.is_alive(0) && !r.is_alive(1));
    r.m.shuns.entry(r.node(0)).or_default().until = ms(60_000);
    r.answer(2900, 1000, 0);
    r.m.waits(ms(2950), r.node(0));
    assert!(r.tick(3001));
    assert!(!r.is_alive(0), "it gets no lease, whatever it waits for");
}
