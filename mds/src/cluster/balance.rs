//! Replicas that move so that targets get equally full. A pure function on the map and on what
//! storage servers say they store.
//!
//! How full a target is, is judged by the chains that it shall have: what comes counts already,
//! what goes counts no more. So moves that are under way, and what a target has yet to remove, are
//! not evened out a second time.

use std::collections::{BTreeMap, BTreeSet};

use strake_proto::{ChainId, TargetId, map::ChainExt, pb};

use super::moves::{FULL, Load, Why, is_whole, moved};

/// Replicas that one target gives away or takes at a time, whatever for, if another is to come on
/// top: it is no emergency.
const MOVES: usize = 2;
/// So many of the emptiest targets are looked at for each chain that might move.
const LOOK: usize = 32;
/// A move that evens out less than this share of a target is not worth it.
const LEAST: f64 = 0.001;

/// What a target stores of each chain, bytes; `None` if it did not say.
pub(crate) type Stored<'a> = dyn Fn(TargetId) -> Option<&'a [(ChainId, u64)]> + 'a;

/// A target that may give and take.
struct Level<'a> {
    target: &'a pb::Target,
    /// Of the chains that it shall have, bytes.
    used: u64,
}

impl Level<'_> {
    fn capacity(&self) -> f64 {
        self.target.capacity.max(1) as f64
    }

    fn full(&self) -> f64 {
        self.used as f64 / self.capacity()
    }

    /// With so many bytes less here and more there both would be equally full.
    fn half_way(&self, to: &Level) -> u64 {
        let [a, b] = [self, to].map(|l| (u128::from(l.used), u128::from(l.target.capacity.max(1))));
        ((a.0 * b.1).saturating_sub(b.0 * a.1) / (a.1 + b.1)) as u64
    }

    fn has_room(&self, bytes: u64) -> bool {
        let then = u128::from(self.used.max(self.target.used).saturating_add(bytes));
        then * 100 <= u128::from(self.target.capacity) * FULL
    }
}

/// Evens out what differs by more than `percent` points between the fullest and the emptiest of the
/// targets that are alive and stay.
pub(crate) struct Balance {
    percent: u32,
    /// It has begun, and goes on until they differ by half as much only.
    going: bool,
}

impl Balance {
    /// `percent` 0: nothing is moved.
    pub(crate) fn new(percent: u32) -> Balance {
        Balance { percent, going: false }
    }

    /// Chains that are to get other targets now, with a sentence about each: of chains that rest
    /// with all replicas in sync, the largest that does not make the taker fuller than the giver is
    /// then. Where they may stand is as for any other move; they get no closer to other copies, and
    /// chains of a pool stay within it.
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
                // What differs cannot be evened out: it has ended, unless it only waits for what is
                // under way.
                self.going = !out.is_empty() || floor.is_busy();
                return out;
            };
            out.push(floor.make(m));
        }
    }
}

/// A replica that is to move: whose by position in the levels, and how much it is.
struct Move<'a> {
    chain: &'a pb::Chain,
    bytes: u64,
    from: usize,
    to: usize,
}

struct Floor<'a> {
    load: Load<'a>,
    levels: Vec<Level<'a>>,
    /// Chains that rest, and their bytes, by target.
    on: BTreeMap<TargetId, Vec<(&'a pb::Chain, u64)>>,
    taken: BTreeSet<ChainId>,
    /// Those that have nothing to give that anybody may take.
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
                // What a server says may be anything.
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

    /// The next move between two that differ by more than this; from the fullest to the emptiest,
    /// where that can be.
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
    /// one; of about as many bytes rather one that it does not head: its OST index stays.
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
