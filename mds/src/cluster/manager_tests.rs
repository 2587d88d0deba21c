//! Tests of the leader's volatile part.

use super::*;
use crate::cluster::state::tests::{cluster, request, with_chains};
use ReplicaState::*;

#[path = "kept_waiting_tests.rs"]
mod kept_waiting;
#[path = "random_tests.rs"]
mod random;
#[path = "step_out_tests.rs"]
mod step_out;

const LEASE: Duration = Duration::from_secs(2);
const REBUILD: Duration = Duration::from_secs(60);

const SLOW: slow::Options = slow::Options {
    factor: 8,
    floor: Duration::from_millis(20),
    lasts: Duration::from_secs(30),
    drain: true,
};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn options(expect_targets: usize) -> Options {
    Options {
        lease: LEASE,
        expect_targets,
        rebuild_after: REBUILD,
        chains_per_target: 1,
        balance_percent: 4,
        slow: SLOW,
    }
}

/// A manager with its map, fed by hand.
struct Rig {
    map: MapView,
    m: Manager,
}

impl Rig {
    fn new(map: pb::ClusterMap, expect_targets: usize) -> Rig {
        let map = MapView::new(map).unwrap();
        Rig { m: Manager::new(options(expect_targets), ms(0), &map), map }
    }
    fn beat(&mut self, now: u64, target: TargetId) {
        self.beat_with(now, target, |_| ()).unwrap();
    }
    fn beat_with(
        &mut self,
        now: u64,
        target: TargetId,
        f: impl Fn(&mut pb::HeartbeatRequest),
    ) -> Result<u32> {
        let t = self.map.target(target).unwrap();
        let report = pb::TargetReport {
            target,
            stamp: t.stamp,
            capacity: t.capacity,
            used: t.used,
            ..Default::default()
        };
        let mut h = pb::HeartbeatRequest {
            node: t.node,
            map_version: self.map.version(),
            targets: vec![report],
            ..Default::default()
        };
        f(&mut h);
        self.m.heartbeat(ms(now), &h, &self.map)?;
        self.m.grant(ms(now), h.node, &self.map)
    }
    /// Ticks and applies the proposal; returns whether there was one.
    fn tick(&mut self, now: u64) -> bool {
        let Some(p) = self.m.tick(ms(now), &self.map) else { return false };
        assert!(!p.why.is_empty() || !p.update.targets.is_empty());
        self.apply(now, &p);
        true
    }
    fn apply(&mut self, now: u64, p: &Proposal) {
        let mut map = self.map.map.clone();
        state::update(&mut map, &p.update).unwrap();
        self.set(now, map);
        self.m.resolved(true);
    }
    fn set(&mut self, now: u64, map: pb::ClusterMap) {
        self.map = MapView::new(map).unwrap();
        self.m.map_changed(ms(now), &self.map);
    }
    /// States of the chain of `copies` that target 0 was made the head of, by target.
    fn states(&self, copies: usize) -> Vec<(TargetId, ReplicaState)> {
        self.chain(copies).replicas.iter().map(|r| (r.target, r.state())).collect()
    }
    fn chain(&self, copies: usize) -> &pb::Chain {
        self.map
            .map
            .chains
            .iter()
            .find(|c| c.preferred.len() == copies && c.preferred[0] == 0)
            .unwrap()
    }
}

#[test]
fn chains_are_made_when_all_expected_targets_live_and_a_second_has_passed() {
    let mut map = cluster(3, 1);
    for t in &mut map.targets {
        t.alive = false;
    }
    let mut r = Rig::new(map, 3);
    r.beat(100, 0);
    r.beat(100, 1);
    assert!(r.tick(1500), "two are alive now");
    assert!(r.map.map.sets.is_empty());
    r.beat(1600, 0);
    r.beat(1600, 1);
    r.beat(1600, 2);
    assert!(r.tick(1600), "the third is alive");
    assert!(r.map.map.sets.is_empty(), "chains are made alone");
    assert!(r.tick(1600));
    assert_eq!(r.map.map.sets.iter().map(|s| s.copies).collect::<Vec<_>>(), vec![1, 2, 3]);
    assert!(!r.tick(1700), "nothing is left to do");
    // A new target waits a second for more to come.
    let mut map = r.map.map.clone();
    state::register(&mut map, &request("late", &[77])).unwrap();
    r.set(1800, map);
    r.beat(1900, 3);
    assert!(r.tick(1900));
    assert_eq!(r.map.map.sets.len(), 3);
    for t in 0..4 {
        r.beat(2800, t);
    }
    assert!(r.tick(2800));
    assert_eq!(r.map.map.sets.len(), 6);
    // Nor for others, once there are chains: two are dead when the next one comes.
    let mut map = r.map.map.clone();
    state::register(&mut map, &request("later", &[78])).unwrap();
    r.set(3000, map);
    for now in (3100..=7000).step_by(300) {
        [0, 4].into_iter().for_each(|t| r.beat(now, t));
        r.tick(now);
    }
    assert!(r.map.map.sets.len() > 6 && r.map.map.targets.iter().filter(|t| t.alive).count() == 2);
}

#[test]
fn what_was_dead_for_long_is_copied_to_others() {
    let mut r = Rig::new(with_chains(3, 1), 0);
    let wanted = |r: &Rig, copies| {
        let of = r.map.map.chains.iter().filter(|c| c.preferred.len() == copies);
        of.filter(|c| c.preferred.contains(&0)).count()
    };
    // All report that the replicas they resync have everything.
    let until_with = |r: &mut Rig, from: u64, to: u64, alive: &[TargetId]| {
        for now in (from..to).step_by(500) {
            let all: Vec<ChainId> = r.map.map.chains.iter().map(|c| c.id).collect();
            for t in alive {
                r.beat_with(now, *t, |h| h.targets[0].synced_chains = all.clone()).unwrap();
            }
            r.tick(now);
        }
    };
    let until = |r: &mut Rig, from, to| until_with(r, from, to, &[1, 2]);
    until(&mut r, 0, 60_000);
    assert_eq!([1, 2, 3].map(|copies| wanted(&r, copies)), [1, 2, 3]);
    until(&mut r, 60_000, 61_000);
    // With one copy no target has it, and with three all others have it.
    assert_eq!([1, 2, 3].map(|copies| wanted(&r, copies)), [1, 0, 3]);
    // When it returns, it gets a chain again from a target that heads two now, and leaves the
    // others.
    until(&mut r, 61_000, 66_000);
    let chains = r.map.map.chains.len();
    until_with(&mut r, 66_000, 76_000, &[0, 1, 2]);
    assert_eq!((wanted(&r, 2), r.map.map.chains.len()), (1, chains));
    assert!(r.map.target(0).unwrap().alive && r.chain(2).replicas.len() == 2);
}

#[test]
fn a_new_leader_counts_leases_from_its_election() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    r.m = Manager::new(options(0), ms(10_000), &r.map);
    assert!(!r.tick(11_900), "renewed at the election");
    r.beat(11_900, 1);
    assert!(r.tick(12_000));
    assert_eq!(r.states(2), vec![(1, ReplicaServing), (0, ReplicaOffline)]);
    assert_eq!(r.states(1), vec![(0, ReplicaLastsrv)]);
    // A target that was dead before the election does not become alive through it.
    r.m = Manager::new(options(0), ms(20_000), &r.map);
    assert!(!r.tick(20_100));
}

#[test]
fn the_last_ones_come_back_by_one_source() {
    let mut r = Rig::new(with_chains(3, 1), 0);
    assert!(r.tick(2000));
    assert!(
        r.states(3).iter().all(|s| s.1 == ReplicaLastsrv),
        "all leases ran out in one evaluation"
    );
    // Two return, one of them restarted: the other is the source.
    let mut map = r.map.map.clone();
    let mut again = request("n0", &[0]);
    again.targets[0].stamp = 99;
    state::register(&mut map, &again).unwrap();
    r.set(2100, map);
    r.beat(2200, 0);
    r.beat(2200, 2);
    assert!(r.tick(2200));
    assert_eq!(r.states(3)[0], (2, ReplicaServing));
    assert!(r.tick(2300));
    let states = r.states(3);
    assert_eq!((states[0], states[1]), ((2, ReplicaServing), (0, ReplicaSyncing)));
    assert_eq!(states[2], (1, ReplicaOffline));
}

/// It does not know its new registration yet, nor its chains: what it gets then it would take as
/// meant for its former process.
#[test]
fn who_has_registered_is_alive_from_its_own_first_heartbeat_on() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    let mut map = r.map.map.clone();
    let mut again = request("n0", &[0]);
    again.targets[0].stamp = 99;
    r.beat(100, 0);
    r.beat(100, 1);
    assert!(!r.tick(100));
    state::register(&mut map, &again).unwrap();
    r.set(200, map);
    assert!(!r.tick(300), "its former life was heard of a moment ago");
    r.beat(400, 0);
    assert!(r.tick(400));
    assert_eq!(r.states(2)[1], (0, ReplicaSyncing));
}

#[test]
fn synced_counts_from_the_tail_at_the_current_epoch_only() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    r.beat(1000, 1);
    assert!(r.tick(2000));
    let offline = r.map.version();
    r.beat(2100, 0);
    r.beat(2100, 1);
    assert!(r.tick(2100));
    assert_eq!(r.states(2), vec![(1, ReplicaServing), (0, ReplicaSyncing)]);
    let id = r.chain(2).id;
    let synced = |h: &mut pb::HeartbeatRequest| h.targets[0].synced_chains = vec![id, 4000];
    r.beat_with(2300, 0, synced).unwrap();
    assert!(!r.tick(2300), "the successor does not judge itself");
    r.beat_with(2300, 1, |h| {
        synced(h);
        h.map_version = offline;
    })
    .unwrap();
    assert!(!r.tick(2300), "said by one who does not know this epoch");
    r.beat_with(2400, 1, synced).unwrap();
    assert!(r.tick(2400));
    assert_eq!(r.states(2), vec![(1, ReplicaServing), (0, ReplicaServing)]);
}

#[test]
fn a_failed_device_is_out_until_it_is_registered_anew() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    r.beat(100, 1);
    r.beat_with(100, 0, |h| h.targets[0].failed = true).unwrap();
    assert!(r.tick(100), "no need to wait for its lease");
    assert_eq!(r.states(2)[1], (0, ReplicaOffline));
    r.beat(200, 0);
    assert!(!r.tick(200), "the same life is not trusted again");
    let mut map = r.map.map.clone();
    let mut again = request("n0", &[0]);
    again.targets[0].stamp = 99;
    state::register(&mut map, &again).unwrap();
    r.set(300, map);
    r.beat(400, 0);
    assert!(r.tick(400));
    assert_eq!(r.states(2)[1], (0, ReplicaSyncing));
}

#[test]
fn a_target_that_lacks_space_is_out_until_it_says_that_it_is_back() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    r.beat(100, 1);
    let lapses = |n| move |h: &mut pb::HeartbeatRequest| h.targets[0].lapses = n;
    r.beat_with(100, 0, lapses(1)).unwrap();
    assert!(r.tick(100), "no need to wait for its lease");
    assert_eq!(r.states(2)[1], (0, ReplicaOffline));
    r.beat_with(200, 0, lapses(0)).unwrap();
    assert!(!r.tick(200), "a heartbeat that was overtaken says nothing");
    r.beat_with(300, 0, lapses(2)).unwrap();
    r.beat(300, 1);
    assert!(r.tick(300));
    assert_eq!(r.states(2)[1], (0, ReplicaSyncing));
}

#[test]
fn nothing_is_granted_to_a_node_that_is_being_taken_out() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    r.beat(1000, 1);
    let p = r.m.tick(ms(2000), &r.map).unwrap();
    assert!(r.m.tick(ms(2000), &r.map).is_none(), "one proposal at a time");
    assert_eq!(r.beat_with(2050, 0, |_| ()).unwrap_err().code, Code::Overloaded);
    assert_eq!(r.beat_with(2050, 1, |_| ()).unwrap(), 2000);
    r.m.resolved(false);
    assert_eq!(
        r.beat_with(2060, 0, |_| ()).unwrap_err().code,
        Code::Overloaded,
        "it may still be applied"
    );
    r.apply(2100, &p);
    assert_eq!(r.beat_with(2200, 0, |_| ()).unwrap(), 2000);
}

#[test]
fn heartbeats_of_unregistered_lives_ask_for_registration() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    let mut code = |f: &dyn Fn(&mut pb::HeartbeatRequest)| r.beat_with(100, 0, f).unwrap_err().code;
    assert_eq!(code(&|h| h.node = 5), Code::Stale);
    assert_eq!(code(&|h| h.node = 1002), Code::Stale);
    assert_eq!(code(&|h| h.targets[0].stamp += 1), Code::Stale);
    assert_eq!(code(&|h| h.targets[0].target = 9), Code::Stale);
    assert_eq!(code(&|h| h.unreachable = vec![1; 5000]), Code::Inval);
    assert!(r.m.seen.is_empty(), "nothing of a refused heartbeat counts");
}

#[test]
fn used_bytes_reach_the_map_when_they_matter() {
    let mut r = Rig::new(with_chains(1, 1), 0);
    r.beat_with(100, 0, |h| h.targets[0].used = 5).unwrap();
    assert!(!r.tick(100), "half a percent");
    r.beat_with(200, 0, |h| h.targets[0].used = 500).unwrap();
    assert!(r.tick(200));
    assert_eq!(r.map.map.targets[0].used, 500);
    for t in (300..10_100).step_by(500) {
        r.beat_with(t, 0, |h| h.targets[0].used = 501).unwrap();
        let changed = r.tick(t);
        assert_eq!(changed, t >= 10_000, "at {t}");
    }
}

#[test]
fn a_cut_link_takes_one_node_out_and_a_dead_node_is_not_punished() {
    let mut r = Rig::new(with_chains(3, 1), 0);
    let lost = |a: u32, b: u32| {
        move |h: &mut pb::HeartbeatRequest| {
            if h.node == a {
                h.unreachable = vec![b];
            } else if h.node == b {
                h.unreachable = vec![a];
            }
        }
    };
    let mut refused = None;
    for t in (0..6000).step_by(250) {
        for target in 0..3 {
            if r.beat_with(t, target, lost(1001, 1002)) == Ok(0) {
                refused.get_or_insert((t, target));
            }
        }
        r.tick(t);
    }
    let (at, who) = refused.unwrap();
    assert!(who == 1 && (1500..2500).contains(&at), "{at} {who}");
    assert_eq!(r.states(2).iter().filter(|s| s.1 == ReplicaServing).count(), 1);
    assert!(
        r.map.target(0).unwrap().alive
            && !r.map.target(1).unwrap().alive
            && r.map.target(2).unwrap().alive
    );
    // It may return later.
    for t in (6000..13_000).step_by(250) {
        for target in 0..3 {
            let _ = r.beat_with(t, target, |_| ());
        }
        r.tick(t);
    }
    assert!(r.map.target(1).unwrap().alive);

    // A silent node, however many report it, may return at once.
    let mut r = Rig::new(with_chains(3, 1), 0);
    for t in (0..4000).step_by(250) {
        for target in [0, 2] {
            r.beat_with(t, target, |h| h.unreachable = vec![1002]).unwrap();
        }
        r.tick(t);
    }
    r.beat(4000, 1);
}

/// A node that is shut out is not waited for once it reports that it gave its lease up, unless it
/// reported that before it had the lease.
#[test]
fn who_is_shut_out_gives_its_lease_up() {
    for (number, believed) in [(100, true), (3, false)] {
        let mut r = Rig::new(with_chains(3, 1), 0);
        let mut now = 0;
        let mut beat = |r: &mut Rig| {
            now += 250;
            let say = |h: &mut pb::HeartbeatRequest| {
                h.number = now / 250;
                h.unreachable.extend((h.node == 1001).then_some(1002));
            };
            let granted = [0, 1, 2].map(|target| r.beat_with(now, target, say).unwrap());
            r.tick(now);
            (now, granted[1])
        };
        let (now, _) = (0..20).map(|_| beat(&mut r)).find(|(_, granted)| *granted == 0).unwrap();
        let target = r.map.target(1).unwrap().clone();
        assert!(r.m.lease_left(ms(now), &target) > ms(1500) && target.alive);
        assert_eq!(r.beat_with(now, 1, |h| (h.leaseless, h.number) = (true, number)), Ok(0));
        assert_eq!(r.m.lease_left(ms(now), &target).is_zero(), believed);
        r.tick(now);
        assert_eq!(r.map.target(1).unwrap().alive, !believed);
        let left = r.states(2).iter().filter(|s| s.1 == ReplicaServing).count();
        assert_eq!(left, if believed { 1 } else { 2 });
    }
}

#[test]
fn who_is_cut_off_again_and_again_stays_out_longer_until_the_link_was_good_for_long() {
    let mut r = Rig::new(with_chains(3, 1), 0);
    let mut now = 0;
    let mut beat = |bad: bool| {
        now += 250;
        let mut out = false;
        for target in 0..3 {
            out |= r.beat_with(now, target, |h| {
                h.unreachable.extend((bad && h.node == 1001).then_some(1002))
            }) == Ok(0);
        }
        r.tick(now);
        out
    };
    // Seconds that it is out when the link is repaired at once.
    let cut_off = |beat: &mut dyn FnMut(bool) -> bool| {
        while !beat(true) {}
        let mut beats: u64 = 1;
        while beat(false) {
            beats += 1;
        }
        beats.div_ceil(4)
    };
    assert_eq!([10, 20, 40].map(|_| cut_off(&mut beat)), [10, 20, 40]);
    for _ in 0..4 * 500 {
        assert!(!beat(false));
    }
    assert_eq!(cut_off(&mut beat), 80);
    for _ in 0..4 * 601 {
        assert!(!beat(false));
    }
    assert_eq!(cut_off(&mut beat), 10);
}

#[test]
fn replicas_move_to_an_empty_target_by_what_heartbeats_say() {
    let mut r = Rig::new(with_chains(3, 1), 0);
    let two = |r: &Rig| {
        r.map.map.chains.iter().filter(|c| c.preferred.len() == 2).cloned().collect::<Vec<_>>()
    };
    // Each of the three has a part of two chains; capacity is 1000.
    let old = r.map.map.chains.len() as u32;
    let beat = |r: &mut Rig, now: u64| {
        for t in 0..r.map.map.targets.len() as u32 {
            let on: Vec<pb::Chain> =
                two(r).into_iter().filter(|c| c.state_of(t) == Some(ReplicaServing)).collect();
            let stored = on
                .iter()
                .filter(|c| c.id <= old)
                .map(|c| pb::ChainBytes { chain: c.id, bytes: 200 })
                .collect::<Vec<_>>();
            r.beat_with(now, t, |h| {
                h.targets[0].used = 200 * stored.len() as u64;
                h.targets[0].stored.clone_from(&stored);
            })
            .unwrap();
        }
    };
    let mut late = r.map.map.clone();
    state::register(&mut late, &request("late", &[77])).unwrap();
    r.set(0, late);
    // A target that reports nothing about its chains is left out.
    r.beat_with(500, 0, |h| h.targets[0].used = 400).unwrap();
    assert!(r.m.seen[&0].stored.is_none());
    let mut moved = 0;
    for now in (1000..20_000).step_by(250) {
        beat(&mut r, now);
        r.tick(now);
        // Resyncs finish at once.
        let mut map = r.map.map.clone();
        for c in map.chains.iter_mut().filter(|c| moves::is_moving(c)) {
            moved += 1;
            c.epoch += 1;
            c.replicas = c
                .preferred
                .iter()
                .map(|t| pb::Replica { target: *t, state: ReplicaServing as i32 })
                .collect();
        }
        map.version += 1;
        r.set(now, map);
    }
    let on_late = two(&r).iter().filter(|c| c.preferred.contains(&3)).count();
    // Its own new chain, which is empty, and one of those.
    assert_eq!((moved, on_late), (1, 2), "{:?}", two(&r));
}

#[test]
fn reports_of_what_is_stored_are_bounded() {
    let mut r = Rig::new(with_chains(2, 1), 0);
    let say = |n: u32| {
        move |h: &mut pb::HeartbeatRequest| {
            h.targets[0].stored = (0..n).map(|chain| pb::ChainBytes { chain, bytes: 1 }).collect();
        }
    };
    let most = recovery::MAX_SIGHTS as u32;
    r.beat_with(100, 0, say(most)).unwrap();
    let known = r.map.map.chains.len();
    assert_eq!(r.m.seen[&0].stored.as_ref().map(Vec::len), Some(known), "chains that there are");
    r.beat_with(200, 0, say(most + 1)).unwrap();
    assert!(r.m.seen[&0].stored.is_none(), "it is as if it had not said");
}

/// A final read of a chain must include everything of an evicted session: it does not matter
/// whether a server's lease is over.
#[test]
fn a_chain_knows_an_eviction_when_all_in_sync_do() {
    let mut r = Rig::new(with_chains(3, 1), 3);
    let knows = |r: &Rig, n| r.m.chain_knows(n, r.chain(2), &r.map);
    let [(head, ReplicaServing), (tail, _)] = r.states(2)[..] else { panic!("{:?}", r.states(2)) };
    assert!(!knows(&r, 1), "a new leader has heard of nobody");
    r.beat_with(100, head, |h| h.evicted_seen = 7).unwrap();
    assert!(!knows(&r, 7));
    r.beat_with(100, tail, |h| h.evicted_seen = 5).unwrap();
    assert!(knows(&r, 5) && !knows(&r, 6));
    r.beat_with(200, tail, |h| h.evicted_seen = 9).unwrap();
    assert!(knows(&r, 7) && !knows(&r, 8));
    // The others know nothing of it, and are in other chains.
    assert!(
        r.m.known_to_all(ms(200), &r.map) < 5
            && r.m.known_to_all(ms(9000), &r.map) == u64::MAX
            && !knows(&r, 8)
    );
    let mut map = r.map.map.clone();
    let chain = map.chains.iter_mut().find(|c| c.id == r.chain(2).id).unwrap();
    chain.epoch += 1;
    chain.replicas.iter_mut().find(|x| x.target == head).unwrap().set_state(ReplicaOffline);
    chain.replicas.rotate_left(1);
    r.set(300, map);
    assert!(knows(&r, 9), "who is not in sync does not count");
}
