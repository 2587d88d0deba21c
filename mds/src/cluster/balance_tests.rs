//! Moves simulated to the end.

use pb::ReplicaState::{ReplicaServing, ReplicaSyncing};
use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::*;
use crate::cluster::chain_table::make_chains;

const MIB: u64 = 1 << 20;
const CHUNK: u64 = 4 * MIB;

fn target(id: TargetId, node: u32, capacity: u64) -> pb::Target {
    pb::Target { id, node: 1001 + node, capacity, alive: true, ..Default::default() }
}

/// A cluster whose moves take a few checks to finish.
struct Bed {
    map: pb::ClusterMap,
    bytes: BTreeMap<ChainId, u64>,
    balance: Balance,
    /// Moves so far.
    moves: usize,
}

impl Bed {
    /// This many targets of this capacity, each on a separate node.
    fn new(targets: u32, capacity: u64) -> Bed {
        let targets = (0..targets).map(|t| target(t, t, capacity)).collect();
        let map = pb::ClusterMap { version: 1, targets, ..Default::default() };
        let mut bed = Bed { map, bytes: BTreeMap::new(), balance: Balance::new(4), moves: 0 };
        bed.deal();
        bed
    }

    fn deal(&mut self) {
        let (chains, sets) = make_chains(&self.map, 8).unwrap();
        self.map.chains.extend(chains);
        self.map.sets.extend(sets);
    }

    /// This many chunks of files with this many copies, on any of their chains.
    fn fill(&mut self, seed: u64, copies: usize, chunks: usize) {
        let mut rng = StdRng::seed_from_u64(seed);
        let of: Vec<ChainId> =
            self.map.chains.iter().filter(|c| c.preferred.len() == copies).map(|c| c.id).collect();
        for _ in 0..chunks {
            *self.bytes.entry(of[rng.random_range(0..of.len())]).or_default() += CHUNK;
        }
    }

    fn used(&self, t: TargetId) -> u64 {
        let on = self.map.chains.iter().filter(|c| c.preferred.contains(&t));
        on.filter_map(|c| self.bytes.get(&c.id)).sum()
    }

    fn full(&self) -> Vec<f64> {
        self.map.targets.iter().map(|t| self.used(t.id) as f64 / t.capacity as f64).collect()
    }

    fn spread(&self) -> f64 {
        let full = self.full();
        full.iter().copied().fold(0.0, f64::max) - full.iter().copied().fold(1.0, f64::min)
    }

    fn plan(&mut self) -> Vec<(pb::Chain, String)> {
        let mut stored: BTreeMap<TargetId, Vec<(ChainId, u64)>> =
            self.map.targets.iter().map(|t| (t.id, Vec::new())).collect();
        for c in &self.map.chains {
            for r in &c.replicas {
                let n = self.bytes.get(&c.id).copied().unwrap_or(0);
                // A replica that is being resynced has only a part.
                let n = if r.state() == ReplicaServing { n } else { n / 3 };
                stored.get_mut(&r.target).unwrap().push((c.id, n));
            }
        }
        for t in &mut self.map.targets {
            t.used = stored[&t.id].iter().map(|(_, n)| n).sum();
        }
        self.balance.plan(&self.map, &|t| stored.get(&t).map(|s| &s[..]))
    }

    /// One check, and one step of each move. Returns whether something moved.
    fn step(&mut self) -> bool {
        let before = self.full();
        let planned = self.plan();
        for c in &mut self.map.chains {
            let joins = c.preferred.iter().find(|t| c.state_of(**t).is_none()).copied();
            match (is_whole(c), joins) {
                (true, _) => {}
                (_, Some(t)) => {
                    c.replicas.push(pb::Replica { target: t, state: ReplicaSyncing as i32 })
                }
                _ => {
                    let serving =
                        |t: &TargetId| pb::Replica { target: *t, state: ReplicaServing as i32 };
                    c.replicas = c.preferred.iter().map(serving).collect();
                }
            }
        }
        for (new, why) in &planned {
            let old = self.map.chains.iter_mut().find(|c| c.id == new.id).unwrap();
            let node = |t: &TargetId| self.map.targets[*t as usize].node;
            let nodes: BTreeSet<u32> = new.preferred.iter().map(node).collect();
            assert_eq!(nodes.len(), new.preferred.len(), "{why}");
            *old = new.clone();
        }
        self.moves += planned.len();
        let mut at_once: BTreeMap<TargetId, usize> = BTreeMap::new();
        for c in self.map.chains.iter().filter(|c| !is_whole(c)) {
            for t in c.replicas.iter().map(|r| r.target).filter(|t| !c.preferred.contains(t)) {
                *at_once.entry(t).or_default() += 1;
            }
            c.preferred
                .iter()
                .filter(|t| c.state_of(**t).is_none())
                .for_each(|t| *at_once.entry(*t).or_default() += 1);
        }
        assert!(at_once.values().all(|n| *n <= MOVES), "{at_once:?}");
        // No target becomes fuller than the fullest was.
        let most = before.iter().copied().fold(0.0, f64::max);
        assert!(self.full().iter().all(|f| *f <= most + 1e-9));
        !planned.is_empty() || self.map.chains.iter().any(|c| !is_whole(c))
    }

    fn settle(&mut self) {
        for _ in 0..10_000 {
            if !self.step() && self.plan().is_empty() {
                return;
            }
        }
        panic!("it does not end: {:?}", self.full());
    }
}

#[test]
fn an_empty_target_gets_its_share() {
    for seed in 0..20 {
        let mut b = Bed::new(8, 4400 * MIB);
        b.fill(seed, 2, 8 * 520 / 2);
        b.map.targets.push(target(8, 8, 4400 * MIB));
        b.deal();
        let (all, one) = (
            b.bytes.values().sum::<u64>() * 2,
            b.bytes.values().sum::<u64>() / b.bytes.len() as u64,
        );
        let least = (all / 9 / one) as usize;
        b.settle();
        assert!(b.spread() <= 0.05, "seed {seed}: {:?}", b.full());
        assert!(b.moves <= least + least / 2, "seed {seed}: {} moves, {least} at least", b.moves);
        let heads =
            b.map.chains.iter().filter(|c| c.preferred.len() == 2 && c.preferred[0] == 8).count();
        assert!((8..=14).contains(&heads), "seed {seed}: it heads {heads}");
    }
}

#[test]
fn capacities_may_differ() {
    for seed in 0..20 {
        let mut b = Bed::new(9, 4000 * MIB);
        for (t, times) in b.map.targets.iter_mut().zip([1, 1, 2, 2, 3, 1, 4, 1, 2]) {
            t.capacity *= times;
        }
        b.fill(seed, 1, 1000);
        b.fill(seed, 2, 2000);
        b.fill(seed, 3, 300);
        let before = b.spread();
        b.settle();
        assert!(before > 0.3 && b.spread() <= 0.045, "seed {seed}: {before} {:?}", b.full());
    }
}

#[test]
fn copies_stay_in_their_racks_and_pools() {
    let mut b = Bed::new(9, 4000 * MIB);
    let rack = |t: u32| ["a", "b", "c"][t as usize % 3];
    b.map.chains.clear();
    b.map.sets.clear();
    b.map.nodes = (0..9)
        .map(|t| pb::Node { id: 1001 + t, rack: rack(t).into(), ..Default::default() })
        .collect();
    b.map.pools = vec![pb::Pool { name: "p".into(), targets: vec![0, 1, 2, 3] }];
    b.deal();
    // Those of rack a have most, and the pool has some.
    let chains = b.map.chains.clone();
    for c in &chains {
        let n =
            c.preferred.iter().filter(|t| rack(**t) == "a").count() as u64 * u64::from(c.id) % 7;
        b.bytes.insert(c.id, n * 5 * CHUNK);
    }
    let pool: BTreeSet<ChainId> =
        b.map.sets.iter().filter(|s| !s.pool.is_empty()).flat_map(|s| s.chains.clone()).collect();
    let before = b.spread();
    b.settle();
    assert!(b.moves > 0 && b.spread() < before);
    for c in b.map.chains.iter().filter(|c| c.preferred.len() > 1) {
        let racks: BTreeSet<&str> = c.preferred.iter().map(|t| rack(*t)).collect();
        assert!(racks.len() == c.preferred.len() || pool.contains(&c.id), "{c:?}");
    }
    let within = |c: &&pb::Chain| c.preferred.iter().all(|t| *t < 4);
    assert!(b.map.chains.iter().filter(|c| pool.contains(&c.id)).all(|c| within(&c)));
}

#[test]
fn full_targets_take_nothing_and_even_ones_are_left_alone() {
    // The emptiest has no space either.
    let mut b = Bed::new(3, 1000 * MIB);
    let one = |b: &Bed, t| b.map.chains.iter().find(|c| c.preferred == [t]).unwrap().id;
    for (t, n) in [(0, 1000), (1, 1000), (2, 949)] {
        let chain = one(&b, t);
        b.bytes.insert(chain, (n - 10) * MIB);
        let other = b.map.chains.iter().rfind(|c| c.preferred == [t]).unwrap().id;
        b.bytes.insert(other, 10 * MIB);
    }
    assert!(b.plan().is_empty());
    // With space for one of those.
    let most = b.map.chains.iter().find(|c| c.preferred == [2]).unwrap().id;
    b.bytes.insert(most, 925 * MIB);
    assert_eq!(b.plan().len(), 1);
    // Within the limit nothing starts; what has started continues to half of it.
    let mut b = Bed::new(2, 1000 * MIB);
    let own: Vec<ChainId> =
        b.map.chains.iter().filter(|c| c.preferred == [0]).map(|c| c.id).collect();
    b.bytes.extend(own.iter().map(|c| (*c, 5 * MIB)));
    assert_eq!((b.spread(), b.plan().len()), (0.04, 0));
    b.bytes.insert(own[0], 7 * MIB);
    b.settle();
    assert!(b.moves > 0 && b.spread() <= 0.02, "{:?}", b.full());
    // Switched off, and without a report from the fullest.
    b.bytes.insert(own[0], 700 * MIB);
    b.bytes.insert(own[1], 200 * MIB);
    b.balance = Balance::new(0);
    assert!(b.plan().is_empty());
    b.balance = Balance::new(4);
    assert!(b.balance.plan(&b.map, &|_| None).is_empty());
    assert_eq!(b.plan().len(), 1);
}

#[test]
fn only_what_is_whole_moves() {
    let mut b = Bed::new(4, 1000 * MIB);
    let on = |b: &Bed| {
        b.map.chains.iter().position(|c| c.preferred.len() == 2 && c.preferred[0] == 0).unwrap()
    };
    let at = on(&b);
    let (id, follower) = (b.map.chains[at].id, b.map.chains[at].preferred[1]);
    b.bytes.insert(id, 90 * MIB);
    let id = b.map.chains.iter().find(|c| c.preferred == [0]).unwrap().id;
    b.bytes.insert(id, 200 * MIB);
    b.map.chains[at].replicas[1].set_state(pb::ReplicaState::ReplicaOffline);
    assert!(b.plan().is_empty(), "the other chain is too large, this one lacks a copy");
    b.map.chains[at].replicas[1].set_state(ReplicaServing);
    let planned = b.plan();
    assert!(planned.len() == 1 && !planned[0].0.preferred.contains(&0), "{planned:?}");
    // Nor to or from targets that are dead or drain.
    for t in b.map.targets.iter_mut().filter(|t| t.id != 0 && t.id != follower) {
        t.draining = true;
    }
    assert!(b.plan().is_empty());
}

#[test]
fn who_can_give_nothing_keeps_nobody_else_from_it() {
    let mut b = Bed::new(45, 1000 * MIB);
    let own = |b: &Bed, t, chains: &[u64]| {
        let of = b.map.chains.iter().filter(|c| c.preferred == [t]);
        of.map(|c| c.id).zip(chains.iter().copied()).collect::<Vec<_>>()
    };
    // The chains of the fullest are too large to move anywhere.
    for t in 0..40 {
        let one = own(&b, t, &[600 * MIB]);
        b.bytes.extend(one);
    }
    let two = own(&b, 40, &[200 * MIB, 200 * MIB]);
    b.bytes.extend(two);
    let planned = b.plan();
    assert!(planned.len() == 1 && planned[0].1.contains("on target 40 moves to"), "{planned:?}");
    // The emptiest are not in the pool.
    let mut b = Bed::new(45, 1000 * MIB);
    b.map.pools = vec![pb::Pool { name: "p".into(), targets: vec![0, 1, 2] }];
    b.deal();
    let single = b.map.sets.iter().find(|s| s.pool == "p" && s.copies == 1).unwrap().chains.clone();
    let head = |id: &ChainId| b.map.chains.iter().find(|c| c.id == *id).unwrap().preferred[0];
    let bytes: Vec<(ChainId, u64)> =
        single.iter().map(|c| (*c, if head(c) == 0 { 50 * MIB } else { 10 * MIB })).collect();
    b.bytes.extend(bytes);
    b.settle();
    let left = b.map.targets.iter().map(|t| b.used(t.id)).collect::<Vec<_>>();
    assert!(left[3..].iter().all(|n| *n == 0) && b.moves > 0 && left[0] < 300 * MIB, "{left:?}");
}

#[test]
fn what_cannot_be_evened_out_starts_nothing_for_later() {
    let mut b = Bed::new(2, 1000 * MIB);
    let own: Vec<ChainId> =
        b.map.chains.iter().filter(|c| c.preferred == [0]).map(|c| c.id).collect();
    b.bytes.insert(own[0], 70 * MIB);
    assert_eq!((b.spread(), b.plan().len()), (0.07, 0), "it is one piece");
    b.bytes = own.iter().take(3).map(|c| (*c, 10 * MIB)).collect();
    assert_eq!((b.spread(), b.plan().len()), (0.03, 0), "within the bound");
}
