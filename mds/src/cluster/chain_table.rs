//! Which chains there are: new ones for targets that head too few, laid out so that many targets
//! share the resync after a failure. Pure functions on the map; the leader proposes their results.

use std::collections::{BTreeMap, BTreeSet};

use pb::ReplicaState::ReplicaServing;
use strake_proto::{ChainId, NodeId, TargetId, map::ChainExt, pb};

use super::{
    domains::{Domains, Rack},
    recovery,
    state::MAX_COPIES,
};

/// Most chains of a map: every change of a chain sends the map to all clients and servers.
pub const MAX_CHAINS: usize = 32_768;
/// Chain ids of an era are below (era + 1) times two to the power of this.
const ERA_CHAINS: u32 = 16;

/// The ids for new chains are above the first number and below the second. A recovered group must
/// not give out again an id that was given out after the state that it was recovered from.
pub(super) fn ids(map: &pb::ClusterMap) -> (u64, u64) {
    let era = recovery::incarnation(map).era();
    (era << ERA_CHAINS, (era + 1) << ERA_CHAINS)
}

/// New chains and chain sets for targets that are alive, do not drain, and head too few chains. For
/// each number of copies that the live nodes allow there is one set, in which each such target is
/// given enough to head `per` of them, fewer if the map would become too long. The same for each
/// pool, with chains that have all replicas on its members. `None` if nothing is missing, or the
/// map has no space for it.
///
/// A target heads too few if it heads at most half of `per`: chains that moved away are not
/// replaced one by one. Nor are they if they moved to other targets, so that the map does not grow
/// with every target that goes and returns: no more chains of a kind are made once there are `per`
/// for each target; then [`rich_and_poor`] is evened out. The chains of a set are in an order that
/// cycles through their heads.
pub fn make_chains(
    map: &pb::ClusterMap,
    per: usize,
) -> Option<(Vec<pb::Chain>, Vec<pb::ChainSet>)> {
    let groups = groups(map);
    let Deals { per, mut left, all } = Deals::new(map, &groups, per);
    let before = ids(map).0 as u32;
    let mut next_chain: ChainId =
        map.chains.iter().map(|c| c.id).max().unwrap_or(0).max(before) + 1;
    let mut next_set = map.sets.iter().map(|s| s.id).max().unwrap_or(0).max(before) + 1;
    let (mut new, mut sets) = (Vec::new(), Vec::new());
    for mut d in all {
        let first = next_chain;
        for preferred in d.missing(per, left) {
            let serving = |t: &TargetId| pb::Replica { target: *t, state: ReplicaServing as i32 };
            let replicas = preferred.iter().map(serving).collect();
            new.push(pb::Chain { id: next_chain, epoch: 1, replicas, preferred, lost: false });
            next_chain += 1;
        }
        if next_chain > first {
            let chains = (first..next_chain).collect::<Vec<_>>();
            left -= chains.len();
            sets.push(pb::ChainSet {
                id: next_set,
                pool: d.group.pool.to_owned(),
                copies: d.copies as u32,
                chains,
            });
            next_set += 1;
        }
    }
    if sets.is_empty() { None } else { Some((new, sets)) }
}

/// Chains of one kind whose head has more than its share, and targets that head too few.
pub(super) struct RichAndPoor {
    /// How many chains each target heads.
    pub heads: BTreeMap<TargetId, usize>,
    /// The share of each.
    pub per: usize,
    pub chains: Vec<ChainId>,
    /// Targets that head at most half of their share.
    pub poor: Vec<TargetId>,
}

/// The kinds in which some targets head too few chains, and others more than `per`.
pub(super) fn rich_and_poor(map: &pb::ClusterMap, per: usize) -> Vec<RichAndPoor> {
    let groups = groups(map);
    let deals = Deals::new(map, &groups, per);
    deals.all.iter().filter_map(|d| d.rich_and_poor(deals.per)).collect()
}

/// Targets that may share chains: all of them, or those of a pool.
struct Group<'a> {
    pool: &'a str,
    places: Vec<Place<'a>>,
    /// The highest number of copies that their nodes allow.
    kinds: usize,
}

/// Where a target is.
#[derive(Clone, Copy)]
struct Place<'a> {
    id: TargetId,
    node: NodeId,
    rack: Option<Rack<'a>>,
}

fn groups(map: &pb::ClusterMap) -> Vec<Group<'_>> {
    let domains = Domains::new(map);
    let usable = map.targets.iter().filter(|t| t.alive && !t.draining);
    let all: Vec<Place> =
        usable.map(|t| Place { id: t.id, node: t.node, rack: domains.rack(t.id) }).collect();
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

/// All kinds of chains: one for each group and each number of copies.
struct Deals<'a> {
    /// How many chains of each kind each target heads, lowered so that the map does not become too
    /// long.
    per: usize,
    /// How many more chains fit into the map.
    left: usize,
    all: Vec<Deal<'a>>,
}

impl<'a> Deals<'a> {
    fn new(map: &'a pb::ClusterMap, groups: &'a [Group<'a>], per: usize) -> Deals<'a> {
        let chains: BTreeMap<ChainId, &pb::Chain> =
            map.chains.iter().filter(|c| !c.lost).map(|c| (c.id, c)).collect();
        let mut all = Vec::new();
        for group in groups {
            for copies in 1..=group.kinds {
                let own =
                    map.sets.iter().filter(|s| s.pool == group.pool && s.copies as usize == copies);
                let own = own.flat_map(|s| &s.chains).filter_map(|id| chains.get(id).copied());
                all.push(Deal::new(group, copies, own));
            }
        }
        let last = map.chains.iter().map(|c| u64::from(c.id)).max().unwrap_or(0);
        let (first, end) = ids(map);
        let ids = end.saturating_sub(last.max(first) + 1) as usize;
        let left = ids.min(MAX_CHAINS.saturating_sub(map.chains.len()));
        let fits = |per: &usize| all.iter().map(|d| d.lacks(*per)).sum::<usize>() <= left;
        let per = (1..=per).rev().find(fits).unwrap_or(1);
        Deals { per, left, all }
    }
}

/// The chains with one number of copies, for each target of a group; targets are given by their
/// position in the group.
struct Deal<'a> {
    group: &'a Group<'a>,
    copies: usize,
    places: &'a [Place<'a>],
    /// Existing chains, and their heads.
    chains: Vec<(ChainId, TargetId)>,
    heads: Vec<usize>,
    follows: Vec<u32>,
    /// The targets that it shares chains with, once for each chain.
    partners: Vec<Vec<usize>>,
}

impl<'a> Deal<'a> {
    fn new(
        group: &'a Group<'a>,
        copies: usize,
        own: impl Iterator<Item = &'a pb::Chain>,
    ) -> Deal<'a> {
        let places = &group.places[..];
        let n = places.len();
        let (heads, follows, partners) = (vec![0; n], vec![0; n], vec![Vec::new(); n]);
        let mut d = Deal { group, copies, places, chains: Vec::new(), heads, follows, partners };
        let at: BTreeMap<TargetId, usize> =
            places.iter().enumerate().map(|(i, p)| (p.id, i)).collect();
        for c in own {
            let known: Vec<usize> = c.preferred.iter().filter_map(|t| at.get(t).copied()).collect();
            d.chains.push((c.id, c.ost_index()));
            if let Some(head) = at.get(&c.ost_index()) {
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

    /// How many chains are missing.
    fn lacks(&self, per: usize) -> usize {
        let known: BTreeSet<TargetId> =
            self.places.iter().map(|p| p.id).chain(self.chains.iter().map(|c| c.1)).collect();
        let more = (per * known.len()).saturating_sub(self.chains.len());
        self.heads.iter().map(|h| short(*h, per)).sum::<usize>().min(more)
    }

    /// At most `most` chains for the targets that head too few, one for each of them in turn.
    fn missing(&mut self, per: usize, most: usize) -> Vec<Vec<TargetId>> {
        let most = most.min(self.lacks(per));
        let short: Vec<usize> = self.heads.iter().map(|h| short(*h, per)).collect();
        let rounds = 0..short.iter().copied().max().unwrap_or(0);
        let turns = rounds.flat_map(|round| (0..short.len()).map(move |t| (round, t)));
        let heads = turns.filter(|(round, t)| short[*t] > *round).take(most);
        heads.map(|(_, head)| self.chain(head)).collect()
    }

    /// `None` unless there are both.
    fn rich_and_poor(&self, per: usize) -> Option<RichAndPoor> {
        let heads: BTreeMap<TargetId, usize> =
            self.places.iter().map(|p| p.id).zip(self.heads.iter().copied()).collect();
        let poor: Vec<TargetId> =
            heads.iter().filter(|(_, n)| short(**n, per) > 0).map(|(t, _)| *t).collect();
        let rich = |t: &TargetId| heads.get(t).is_some_and(|n| *n > per);
        let chains: Vec<ChainId> = self.chains.iter().filter(|c| rich(&c.1)).map(|c| c.0).collect();
        (!poor.is_empty() && !chains.is_empty()).then_some(RichAndPoor { heads, per, chains, poor })
    }

    /// Followers are on other nodes, in racks with as few replicas of this chain as possible. Among
    /// these, targets that follow in the fewest chains come first, so that all get equally many;
    /// then those that share the fewest chains with this one's other replicas, so that the data of
    /// a lost target is spread over as many targets as possible.
    fn chain(&mut self, head: usize) -> Vec<TargetId> {
        let n = self.places.len();
        let mut chain = vec![head];
        let mut shared = vec![0u32; n];
        while chain.len() < self.copies {
            let last = chain[chain.len() - 1];
            self.partners[last].iter().for_each(|t| shared[*t] += 1);
            let cost = |t: usize| {
                let crowd =
                    chain.iter().filter(|c| self.places[**c].rack == self.places[t].rack).count();
                // Ties are broken by the distance from the head, so that neighbours do not all pick
                // the same target.
                (crowd, self.follows[t], shared[t], (t + n - head) % n)
            };
            let apart =
                |t: &usize| chain.iter().all(|c| self.places[*c].node != self.places[*t].node);
            let Some(t) = (0..n).filter(apart).min_by_key(|t| cost(*t)) else { break };
            self.join(&chain, t);
            chain.push(t);
        }
        chain.into_iter().map(|t| self.places[t].id).collect()
    }
}

/// How many more chains a target is to head that heads `heads` of them: none unless that is at most
/// half of `per`.
fn short(heads: usize, per: usize) -> usize {
    if heads * 2 <= per { per.saturating_sub(heads) } else { 0 }
}

#[cfg(test)]
#[path = "chain_table_tests.rs"]
mod tests;
