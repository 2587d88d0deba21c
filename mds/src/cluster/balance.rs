//! Replicas that move so that targets get equally full. A pure function of the map and of what
//! storage servers report that they store.
//!
//! How full a target is, is judged by the chains that it is to have: incoming replicas count
//! already, outgoing ones no longer. So moves under way, and chunks that a target has yet to
//! remove, are not balanced a second time.

use std::collections::{BTreeMap, BTreeSet};

use strake_proto::{ChainId, TargetId, map::ChainExt, pb};

use super::moves::{FULL, Load, Why, is_whole, moved};

/// Balancing adds a move to a target only while it gives away or takes fewer replicas than this,
/// for whatever reason: balance is no emergency.
const MOVES: usize = 2;
/// For each chain that might move, at most this many of the emptiest targets are considered.
const LOOK: usize = 32;
/// A move that evens out less than this share of a target is not worth it.
const LEAST: f64 = 0.001;

/// Bytes that a target stores of each chain; `None` if it did not report them.
pub(crate) type Stored<'a> = dyn Fn(TargetId) -> Option<&'a [(ChainId, u64)]> + 'a;

/// A target that may give and take.
struct Level<'a> {
    target: &'a pb::Target,
    /// Bytes of the chains that it is to have.
    used: u64,
}

impl Level<'_> {
    fn capacity(&self) -> f64 {
        self.target.capacity.max(1) as f64
    }

    fn full(&self) -> f64 {
        self.used as f64 / self.capacity()
    }

    /// The bytes to move from here to `to` so that both are equally full.
    fn half_way(&self, to: &Level) -> u64 {
        let [a, b] = [self, to].map(|l| (u128::from(l.used), u128::from(l.target.capacity.max(1))));
        ((a.0 * b.1).saturating_sub(b.0 * a.1) / (a.1 + b.1)) as u64
    }

    fn has_room(&self, bytes: u64) -> bool {
        let then = u128::from(self.used.max(self.target.used).saturating_add(bytes));
        then * 100 <= u128::from(self.target.capacity) * FULL
    }
}

/// Balances when the fullest and the emptiest target that are alive and not draining differ by more
/// than `percent` points.
pub(crate) struct Balance {
    percent: u32,
    /// Balancing has begun; it continues until they differ by only half as much.
    going: bool,
}

impl Balance {
    /// `percent` 0: nothing is moved.
    pub(crate) fn new(percent: u32) -> Balance {
        Balance { percent, going: false }
    }

    /// Chains that are to get other targets now, with a sentence about each. Only chains at rest
    /// with all replicas in sync move: the largest that does not make its new target fuller than
    /// the old one is then. The rules for the new place are those of any move; copies get no closer
    /// to each other, and chains of a pool stay within it.
    pub(crate) fn plan(
        &mut self,
        map: &pb::ClusterMap,
        stored: &Stored,
    ) -> Vec<(pb::Chain, String)> {
        if self.percent == 0 {
            return Vec::new();
        }
        let mut floor = Floor::new(map, stored);
        let percent = f64::from(self.percent) / 100.0;
        let mut out = Vec::new();
        loop {
            floor
                .levels
                .sort_by(|a, b| b.full().total_cmp(&a.full()).then(a.target.id.cmp(&b.target.id)));
            let (Some(first), Some(last)) = (floor.levels.first(), floor.levels.last()) else {
                return out;
            };
            let differ = first.full() - last.full();
            self.going = differ > if self.going { percent / 2.0 } else { percent };
            if !self.going {
                return out;
            }
            let Some(m) = floor.next(percent / 2.0) else {
                // No move can help: balancing has ended, unless it only waits for moves under way.
                self.going = !out.is_empty() || floor.is_busy();
                return out;
            };
            out.push(floor.make(m));
        }
    }
}

/// A replica that is to move: its source and destination as positions in the levels, and its size.
struct Move<'a> {
    chain: &'a pb::Chain,
    bytes: u64,
    from: usize,
    to: usize,
}

struct Floor<'a> {
    load: Load<'a>,
    levels: Vec<Level<'a>>,
    /// Chains at rest, and their bytes, by target.
    on: BTreeMap<TargetId, Vec<(&'a pb::Chain, u64)>>,
    taken: BTreeSet<ChainId>,
    /// Targets that have nothing to give that another target may take.
    stuck: BTreeSet<TargetId>,
}

impl<'a> Floor<'a> {
    fn new(map: &'a pb::ClusterMap, stored: &Stored) -> Floor<'a> {
        let chains: BTreeMap<ChainId, &pb::Chain> = map.chains.iter().map(|c| (c.id, c)).collect();
        let mut bytes: BTreeMap<ChainId, u64> = BTreeMap::new();
        for t in &map.targets {
            for (chain, n) in stored(t.id).unwrap_or_default() {
                if chains.get(chain).is_some_and(|c| c.serving().any(|s| s == t.id)) {
                    let most = bytes.entry(*chain).or_default();
                    *most = (*most).max(*n);
                }
            }
        }
        let mut used: BTreeMap<TargetId, u64> = BTreeMap::new();
        let mut on: BTreeMap<TargetId, Vec<(&pb::Chain, u64)>> = BTreeMap::new();
        for c in map.chains.iter().filter(|c| !c.lost) {
            let n = bytes.get(&c.id).copied().unwrap_or(0);
            for t in &c.preferred {
                // A server may report any number.
                let used = used.entry(*t).or_default();
                *used = used.saturating_add(n);
                if n > 0 && is_whole(c) {
                    on.entry(*t).or_default().push((c, n));
                }
            }
        }
        let judged = |t: &&pb::Target| t.alive && !t.draining && stored(t.id).is_some();
        let level = |target: &'a pb::Target| Level {
            target,
            used: used.get(&target.id).copied().unwrap_or(0),
        };
        let levels = map.targets.iter().filter(judged).map(level).collect();
        Floor { load: Load::new(map), levels, on, taken: BTreeSet::new(), stuck: BTreeSet::new() }
    }

    fn is_busy(&self) -> bool {
        self.levels.iter().any(|l| self.load.moving(l.target.id) > 0)
    }

    /// The next move between two targets that differ by more than `least`: from the fullest to the
    /// emptiest, where possible.
    fn next(&mut self, least: f64) -> Option<Move<'a>> {
        let free = |i: &usize| self.load.moving(self.levels[*i].target.id) < MOVES;
        let takers: Vec<usize> = (0..self.levels.len()).rev().filter(free).collect();
        let emptiest = self.levels[*takers.first()?].full();
        let givers: Vec<usize> = (0..self.levels.len()).filter(free).collect();
        for from in givers {
            let giver = &self.levels[from];
            if giver.full() - emptiest <= least {
                return None;
            }
            if self.stuck.contains(&giver.target.id) {
                continue;
            }
            if let Some(m) = self.best(from, &takers, least) {
                return Some(m);
            }
            self.stuck.insert(giver.target.id);
        }
        None
    }

    /// The largest of a giver's chains that the emptiest of these takers may have, or else the next
    /// taker. Among chains of similar size one that the giver does not head is preferred: its OST
    /// index stays.
    fn best(&self, from: usize, takers: &[usize], least: f64) -> Option<Move<'a>> {
        let giver = &self.levels[from];
        let id = giver.target.id;
        let taker = |c: &pb::Chain, bytes: u64| {
            let pool = self.load.pools.get(&c.id).filter(|p| p.targets.contains(&id));
            let member =
                |to: &&usize| pool.is_none_or(|p| p.targets.contains(&self.levels[**to].target.id));
            let may = |to: &&usize| {
                let to = &self.levels[**to];
                let worth = LEAST * giver.capacity().min(to.capacity());
                bytes <= giver.half_way(to)
                    && bytes as f64 >= worth
                    && to.has_room(bytes)
                    && self.load.suits(c, id, to.target.id)
            };
            let differs = |to: &&usize| giver.full() - self.levels[**to].full() > least;
            takers.iter().take_while(differs).filter(member).take(LOOK).find(may).copied()
        };
        let chains =
            self.on.get(&id).into_iter().flatten().filter(|(c, _)| !self.taken.contains(&c.id));
        let may = chains.filter_map(|(chain, bytes)| {
            Some(Move { chain, bytes: *bytes, from, to: taker(chain, *bytes)? })
        });
        may.max_by_key(|m| (m.to, m.bytes.ilog2(), m.chain.ost_index() != id, m.bytes))
    }

    fn make(&mut self, m: Move<'a>) -> (pb::Chain, String) {
        let (from, to) = (self.levels[m.from].target.id, self.levels[m.to].target.id);
        self.levels[m.from].used = self.levels[m.from].used.saturating_sub(m.bytes);
        self.levels[m.to].used = self.levels[m.to].used.saturating_add(m.bytes);
        self.taken.insert(m.chain.id);
        self.load.moves(from, to);
        moved(m.chain, from, to, Why::Fuller.words())
    }
}

#[cfg(test)]
#[path = "balance_tests.rs"]
mod tests;
