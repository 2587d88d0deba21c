//! Tests of which targets are found slow, and what is done about it.

use super::*;
use crate::cluster::{
    moves::{self, target_action::*},
    state::tests::with_chains,
};

const OPTIONS: Options = Options {
    factor: 8,
    floor: Duration::from_millis(20),
    lasts: Duration::from_secs(30),
    drain: true,
};

const NOBODY: [TargetId; 0] = [];

fn changes(count: u64, each_us: u64, median_us: u64, p99_us: u64) -> pb::DeviceTimes {
    let changes = pb::OpTimes { count, each_us, median_us, p99_us };
    pb::DeviceTimes { changes: Some(changes), ..Default::default() }
}

fn well() -> pb::DeviceTimes {
    changes(100, 400, 500, 3000)
}

fn bad() -> pb::DeviceTimes {
    changes(50, 100_000, 110_000, 300_000)
}

/// A leader with `nodes` of one target each, and what their servers report, four times a second.
struct Rig {
    map: MapView,
    slow: SlowTargets,
    now: u64,
    told: BTreeMap<TargetId, pb::DeviceTimes>,
    said: Vec<String>,
    /// Targets that were drained, in order.
    drained: Vec<TargetId>,
}

impl Rig {
    fn new(nodes: u8) -> Rig {
        let mut map = with_chains(nodes, 1);
        map.targets.iter_mut().for_each(|t| t.stamp = 1000 + u64::from(t.id));
        Rig {
            told: map.targets.iter().map(|t| (t.id, well())).collect(),
            map: MapView::new(map).unwrap(),
            slow: SlowTargets::new(OPTIONS),
            now: 1_000_000,
            said: Vec::new(),
            drained: Vec::new(),
        }
    }
    fn change(&mut self, c: &pb::TargetChange) -> Result<()> {
        let mut map = self.map.map.clone();
        moves::target_change(&mut map, c)?;
        self.map = MapView::new(map).unwrap();
        Ok(())
    }
    fn act(&mut self, target: TargetId, action: u32) {
        self.change(&pb::TargetChange { target, action, ..Default::default() }).unwrap();
    }
    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds * 4 {
            self.now += 250;
            let now = Duration::from_millis(self.now);
            for (id, told) in &self.told {
                self.slow.told(now, *id, self.map.target(*id).unwrap().stamp, told);
            }
            self.said.extend(self.slow.judge(now, self.now, &self.map));
            if let Some(c) = self.slow.to_drain(now, &self.map.map) {
                self.change(&c).unwrap();
                self.drained.push(c.target);
            }
        }
    }
    fn named(&self) -> Vec<TargetId> {
        self.slow.named().map(|(id, _)| id).collect()
    }
}

#[test]
fn one_that_stays_slow_is_named_and_drained_once() {
    let mut r = Rig::new(5);
    r.run(60);
    r.told.insert(3, bad());
    r.run(29);
    assert_eq!((r.named(), &r.said[..], &r.drained[..]), (vec![], &[][..], &[][..]));
    r.run(3);
    assert_eq!((r.named(), &r.drained[..]), (vec![3], &[3][..]));
    let t = r.map.target(3).unwrap();
    let slow = t.slow.unwrap();
    assert!(
        t.draining && (slow.what, slow.each_us, slow.peers_us) == (what::CHANGES, 100_000, 400),
        "{slow:?}"
    );
    assert!(slow.since_ms.abs_diff(1_060_250) < 1000, "{slow:?}");
    assert_eq!(
        r.said,
        [
            "target 3 is slow: each change costs its device 100 ms, others 0.4 ms; half of them take 110 ms or longer, one in a hundred 300 ms"
        ]
    );
    r.run(600);
    assert_eq!((r.said.len(), r.drained.len()), (1, 1));
    // Drained, it has nothing to do.
    r.told.insert(3, pb::DeviceTimes::default());
    r.run(40);
    assert_eq!((r.named(), r.said.len()), (vec![], 2));
    assert!(r.map.target(3).unwrap().slow.is_some(), "why it is drained is still to be seen");
}

#[test]
fn nobody_is_slow_where_all_are_alike_or_idle() {
    for told in [well(), bad(), pb::DeviceTimes::default()] {
        let mut r = Rig::new(6);
        r.told.values_mut().for_each(|t| *t = told);
        r.run(300);
        assert!(r.named().is_empty() && r.drained.is_empty(), "{told:?}");
    }
    // Most of them: the others are fast.
    let mut r = Rig::new(6);
    (0..4).for_each(|t| _ = r.told.insert(t, bad()));
    r.run(300);
    assert_eq!(r.drained, NOBODY);
}

#[test]
fn few_operations_few_peers_and_hiccups_say_nothing() {
    let mut r = Rig::new(5);
    r.told.insert(3, changes(ENOUGH - 1, 900_000, 900_000, 900_000));
    r.run(300);
    assert_eq!(r.named(), NOBODY, "few operations");
    // A busy one among idle ones.
    let mut r = Rig::new(6);
    (2..6).for_each(|t| _ = r.told.insert(t, changes(ENOUGH - 1, 10, 10, 10)));
    r.told.insert(0, bad());
    r.run(300);
    assert_eq!(r.named(), NOBODY, "one peer");
    let mut r = Rig::new(5);
    for _ in 0..20 {
        r.told.insert(3, bad());
        r.run(28);
        r.told.insert(3, well());
        r.run(1);
    }
    assert_eq!(r.named(), NOBODY, "it never lasts");
    // Below the floor, or not much slower than the others.
    for told in [changes(500, 10_000, 15_000, 190_000), changes(500, 3000, 60_000, 900_000)] {
        let mut r = Rig::new(5);
        r.told.insert(3, told);
        r.run(300);
        assert_eq!(r.named(), NOBODY, "{told:?}");
    }
    // The slowest of few operations is chance, of many it is not.
    for (count, slow) in [(ENOUGH_FOR_P99 - 1, 0), (ENOUGH_FOR_P99, 1)] {
        let mut r = Rig::new(5);
        r.told.insert(3, changes(count, 10_000, 300, 200_000));
        r.run(60);
        assert_eq!(r.drained.len(), slow);
    }
}

#[test]
fn a_device_that_hangs_is_slow_without_an_answer_also_when_all_wait_for_it() {
    let mut r = Rig::new(5);
    r.run(20);
    r.told.values_mut().for_each(|t| *t = pb::DeviceTimes::default());
    r.told.insert(1, pb::DeviceTimes { stalled_ms: 8000, ..Default::default() });
    r.run(32);
    assert_eq!(r.drained, [1]);
    assert_eq!(r.said, ["target 1 is slow: its device hangs 80 % of the time, others 0 %"]);
    // All of them: something else is wrong. And what others did an hour ago does not count any
    // more.
    for (hang, idle) in [(0..5, 0), (1..2, 3600)] {
        let mut r = Rig::new(5);
        r.run(20);
        r.told.values_mut().for_each(|t| *t = pb::DeviceTimes::default());
        r.run(idle);
        hang.for_each(|t| r.told.get_mut(&t).unwrap().stalled_ms = 10_000);
        r.run(300);
        assert_eq!(r.drained, NOBODY);
    }
}

#[test]
fn of_two_one_is_drained_until_somebody_has_seen_to_it() {
    for seen_to in [KEEP, DRAIN] {
        let mut r = Rig::new(6);
        r.told.insert(1, bad());
        r.told.insert(4, changes(50, 200_000, 110_000, 300_000));
        r.run(600);
        assert_eq!((r.named(), &r.drained[..]), (vec![1, 4], &[4][..]), "the slower one");
        r.act(4, seen_to);
        assert_eq!(r.map.target(4).unwrap().slow, None);
        r.run(30);
        assert_eq!(r.drained, [4, 1]);
        assert_eq!(r.map.target(4).unwrap().draining, seen_to == DRAIN);
    }
}

#[test]
fn what_is_kept_stays_until_it_restarts() {
    let mut r = Rig::new(5);
    r.told.insert(3, bad());
    r.run(60);
    r.act(3, KEEP);
    r.run(600);
    assert_eq!((r.named(), &r.drained[..]), (vec![3], &[3][..]));
    assert!(!r.map.target(3).unwrap().draining);
    // A new leader knows it, too.
    r.slow = SlowTargets::new(OPTIONS);
    r.run(29);
    assert_eq!(r.named(), NOBODY, "and judges anew");
    r.run(600);
    assert_eq!((r.named(), r.drained.len()), (vec![3], 1));
    let mut map = r.map.map.clone();
    map.targets[3].stamp = 5;
    r.map = MapView::new(map).unwrap();
    r.run(29);
    assert_eq!(r.named(), NOBODY, "nothing is known of another life");
    r.run(3);
    assert_eq!(r.drained, [3, 3]);
}

#[test]
fn as_many_nodes_as_copies_are_left() {
    // There are chains of three copies.
    let mut r = Rig::new(4);
    r.told.insert(0, bad());
    let mut map = r.map.map.clone();
    map.targets[2].draining = true;
    let wait = MapView::new(map.clone()).unwrap();
    r.map = wait;
    r.run(100);
    assert_eq!((r.named(), &r.drained[..]), (vec![0], &[][..]));
    map.targets[2].draining = false;
    r.map = MapView::new(map).unwrap();
    r.run(10);
    assert_eq!(r.drained, [0]);
    // Switched off, it is named.
    for options in [Options { drain: false, ..OPTIONS }, Options { factor: 0, ..OPTIONS }] {
        let mut r = Rig::new(5);
        r.slow = SlowTargets::new(options);
        r.told.insert(0, bad());
        r.run(100);
        assert_eq!((r.named().len(), &r.drained[..]), (usize::from(options.factor > 0), &[][..]));
    }
}

#[test]
fn silence_a_stop_and_disks_of_another_kind_are_no_grounds() {
    // Not heard of for longer than that lasts: the count starts again.
    let mut r = Rig::new(5);
    r.told.insert(3, bad());
    r.run(20);
    r.told.remove(&3);
    r.run(3);
    r.told.insert(3, bad());
    r.run(20);
    assert_eq!(r.named(), NOBODY);
    r.slow.restart();
    r.run(29);
    assert_eq!(r.named(), NOBODY, "the leader itself was stopped");
    r.run(3);
    assert_eq!(r.named(), [3]);
    let mut r = Rig::new(6);
    (0..2).for_each(|t| _ = r.told.insert(t, pb::DeviceTimes { rotates: true, ..bad() }));
    r.run(300);
    assert_eq!(r.named(), NOBODY);
}

#[test]
fn nonsense_is_bounded() {
    let most =
        pb::OpTimes { count: u64::MAX, each_us: u64::MAX, median_us: u64::MAX, p99_us: u64::MAX };
    let all = pb::DeviceTimes {
        reads: Some(most),
        changes: Some(most),
        stalled_ms: u64::MAX,
        rotates: false,
    };
    let mut r = Rig::new(5);
    r.told.values_mut().for_each(|t| *t = all);
    r.run(100);
    assert_eq!(r.named(), NOBODY);
    let mut r = Rig::new(5);
    r.told.insert(2, all);
    r.run(100);
    assert_eq!(r.drained, [2]);
    assert_eq!(r.map.target(2).unwrap().slow.unwrap().each_us, LONGEST_US);
    // A change with a record of slowness is checked again when it is applied.
    let slow = Some(pb::Slow::default());
    let ask = |r: &mut Rig, target, action| {
        r.change(&pb::TargetChange { target, action, heir: None, slow }).unwrap_err().code
    };
    assert_eq!([ask(&mut r, 2, DRAIN), ask(&mut r, 1, DRAIN)], [Code::Busy, Code::Busy]);
    assert_eq!([ask(&mut r, 2, KEEP), ask(&mut r, 1, REMOVE)], [Code::Inval, Code::Inval]);
    assert_eq!(ask(&mut r, 99, DRAIN), Code::NoEnt);
}
