//! Which chains there are: new ones for targets that head too few, dealt so that what fails is made good by many. Pure functions
//! on the map; the leader proposes what they give.

use std::collections::{BTreeMap, BTreeSet};

use pb::ReplicaState::ReplicaServing;
use strake_proto::{ChainId, NodeId, TargetId, pb};

use super::{
    domains::{Domains, Rack},
    recovery,
    state::MAX_COPIES,
};

/// Chains of a map, about: with more targets than that allows, each heads fewer. Every change of a chain sends the map to everybody.
pub const MAX_CHAINS: usize = 32_768;
/// Chain ids of an era are below the next era times two to this.
const ERA_CHAINS: u32 = 16;

/// Chains and chain sets for what is alive, stays, and heads too few: per number of copies that the live nodes allow, one set in
/// which each such target heads so many that it has `per` of them, fewer where the map would become too long. The same for
/// each pool, of chains that have all replicas on its members. `None` if nothing is missing.
///
/// A target heads too few if it heads at most half of `per`: what moved away is not made up for chain by chain, or the map would grow
/// with every move. A set's order goes round its heads.
pub fn make_chains(map: &pb::ClusterMap, per: usize) -> Option<(Vec<pb::Chain>, Vec<pb::ChainSet>)> {
    let groups = groups(map);
    let wanted: usize = groups.iter().map(|g| g.places.len() * g.kinds).sum();
    let fits = if map.chains.len() < MAX_CHAINS { MAX_CHAINS / wanted.max(1) } else { 1 };
    let per = per.min(fits).max(1);
    let chains: BTreeMap<ChainId, &pb::Chain> = map.chains.iter().filter(|c| !c.lost).map(|c| (c.id, c)).collect();
    // A group that was recovered must not give out again what was given out after the state that it has.
    let before = (recovery::incarnation(map).era() as u32) << ERA_CHAINS;
    let mut next_chain: ChainId = map.chains.iter().map(|c| c.id).max().unwrap_or(0).max(before) + 1;
    let mut next_set = map.sets.iter().map(|s| s.id).max().unwrap_or(0).max(before) + 1;
    let (mut new, mut sets) = (Vec::new(), Vec::new());
    for g in &groups {
        for copies in 1..=g.kinds {
            let own = map.sets.iter().filter(|s| s.pool == g.pool && s.copies as usize == copies);
            let own = own.flat_map(|s| &s.chains).filter_map(|id| chains.get(id)).map(|c| &c.preferred[..]);
            let first = next_chain;
            for preferred in Deal::new(&g.places, own).missing(per, copies) {
                let serving = |t: &TargetId| pb::Replica { target: *t, state: ReplicaServing as i32 };
                let replicas = preferred.iter().map(serving).collect();
                new.push(pb::Chain { id: next_chain, epoch: 1, replicas, preferred, lost: false });
                next_chain += 1;
            }
            if next_chain > first {
                let chains = (first..next_chain).collect();
                sets.push(pb::ChainSet { id: next_set, pool: g.pool.to_owned(), copies: copies as u32, chains });
                next_set += 1;
            }
        }
    }
    if sets.is_empty() { None } else { Some((new, sets)) }
}

/// Targets that have chains among themselves: all of them, or those of a pool.
struct Group<'a> {
    pool: &'a str,
    places: Vec<Place<'a>>,
    /// Most copies that their nodes allow.
    kinds: usize,
}

/// Where a target stands.
#[derive(Clone, Copy)]
struct Place<'a> {
    id: TargetId,
    node: NodeId,
    rack: Option<Rack<'a>>,
}

fn groups(map: &pb::ClusterMap) -> Vec<Group<'_>> {
    let domains = Domains::new(map);
    let usable = map.targets.iter().filter(|t| t.alive && !t.draining);
    let all: Vec<Place> = usable.map(|t| Place { id: t.id, node: t.node, rack: domains.rack(t.id) }).collect();
    let of_pool = |p: &pb::Pool| {
        let members: BTreeSet<TargetId> = p.targets.iter().copied().collect();
        all.iter().copied().filter(|t| members.contains(&t.id)).collect()
    };
    let pools: Vec<Group> = map.pools.iter().map(|p| Group::new(&p.name, of_pool(p))).collect();
    std::iter::once(Group::new("", all)).chain(pools).collect()
}

impl<'a> Group<'a> {
    fn new(pool: &'a str, places: Vec<Place<'a>>) -> Group<'a> {
        let nodes: BTreeSet<NodeId> = places.iter().map(|p| p.node).collect();
        Group { pool, places, kinds: nodes.len().min(MAX_COPIES) }
    }
}

/// What the chains of one number of copies mean for each target of a group; targets by their position in it.
struct Deal<'a> {
    places: &'a [Place<'a>],
    heads: Vec<usize>,
    follows: Vec<u32>,
    /// With whom it shares chains, once for each chain.
    partners: Vec<Vec<usize>>,
}

impl<'a> Deal<'a> {
    fn new<'c>(places: &'a [Place<'a>], chains: impl Iterator<Item = &'c [TargetId]>) -> Deal<'a> {
        let n = places.len();
        let mut d = Deal { places, heads: vec![0; n], follows: vec![0; n], partners: vec![Vec::new(); n] };
        let at: BTreeMap<TargetId, usize> = places.iter().enumerate().map(|(i, p)| (p.id, i)).collect();
        for c in chains {
            let known: Vec<usize> = c.iter().filter_map(|t| at.get(t).copied()).collect();
            if let Some(head) = c.first().and_then(|t| at.get(t)) {
                d.heads[*head] += 1;
            }
            (1..known.len()).for_each(|i| d.join(&known[..i], known[i]));
        }
        d
    }

    fn join(&mut self, chain: &[usize], t: usize) {
        self.follows[t] += 1;
        for b in chain {
            self.partners[*b].push(t);
            self.partners[t].push(*b);
        }
    }

    /// Chains of so many copies for those who head at most half of `per`, one for each of them in turn.
    fn missing(&mut self, per: usize, copies: usize) -> Vec<Vec<TargetId>> {
        let short = |h: &usize| if h * 2 <= per { per - h } else { 0 };
        let missing: Vec<usize> = self.heads.iter().map(short).collect();
        let mut chains = Vec::new();
        for round in 0..missing.iter().copied().max().unwrap_or(0) {
            for head in (0..missing.len()).filter(|t| missing[*t] > round) {
                let chain = self.chain(head, copies);
                chains.push(chain.into_iter().map(|t| self.places[t].id).collect());
            }
        }
        chains
    }

    /// Followers stand on other nodes, in racks with as few of the others as can be. Of these places, first come those that follow in
    /// the fewest chains, so that all get as many; then those that share the fewest with the others of this one, so that what a
    /// lost target had is with as many as possible.
    fn chain(&mut self, head: usize, copies: usize) -> Vec<usize> {
        let n = self.places.len();
        let mut chain = vec![head];
        let mut shared = vec![0u32; n];
        while chain.len() < copies {
            let last = chain[chain.len() - 1];
            self.partners[last].iter().for_each(|t| shared[*t] += 1);
            let cost = |t: usize| {
                let crowd = chain.iter().filter(|c| self.places[**c].rack == self.places[t].rack).count();
                // The distance from the head rotates equals, so that neighbours do not all pick the same target.
                (crowd, self.follows[t], shared[t], (t + n - head) % n)
            };
            let apart = |t: &usize| chain.iter().all(|c| self.places[*c].node != self.places[*t].node);
            let Some(t) = (0..n).filter(apart).min_by_key(|t| cost(*t)) else { break };
            self.join(&chain, t);
            chain.push(t);
        }
        chain
    }
}

#[cfg(test)]
#[path = "deal_tests.rs"]
mod tests;
