//! Whether a file's creation waits for targets that are away. The leader asks before a list goes to
//! the log (`server::changes`). Applying an entry does not ask, so that every member, also of an
//! older version, gets the same result.

use std::collections::{BTreeMap, BTreeSet};

use pb::ReplicaState::ReplicaLastsrv;
use strake_proto::{NodeId, TargetId, map::ChainExt, pb};

use super::{
    inode::{S_IFMT, S_IFREG},
    placement::{MAX_COPIES, Placement},
};
use pb::op::Op;

/// Whether an operation of a list may choose chains.
pub(super) fn any_chooses(ops: &[pb::Op]) -> bool {
    ops.iter().any(|o| match &o.op {
        Some(Op::Create(_) | Op::Tmpfile(_)) => true,
        Some(Op::Mknod(o)) => matches!(o.mode & S_IFMT, 0 | S_IFREG),
        Some(Op::Setlayout(o)) => o.layout.is_some(),
        _ => false,
    })
}

impl Placement {
    /// Whether a file of any kind waits. Computed once for a map: almost always none does.
    pub(super) fn any_waits(&self) -> bool {
        *self.waiting.get_or_init(|| {
            let map = &self.view.map;
            let pools = map.pools.iter().map(|p| &p.name[..]).chain([""]);
            let kinds = || 1..=MAX_COPIES;
            let mut all = pools.flat_map(|p| kinds().map(move |copies| (p.to_owned(), copies)));
            map.targets.iter().any(is_away)
                && all.any(|(pool, copies)| {
                    self.waits(&pb::LayoutSpec { pool, copies, ..Default::default() })
                })
        })
    }

    /// Whether a file of this resolved specification gets no chain now, but would if targets that
    /// are away returned.
    pub(super) fn waits(&self, spec: &pb::LayoutSpec) -> bool {
        let Ok(pool) = self.pool(&spec.pool) else { return false };
        let members: Option<BTreeSet<TargetId>> = pool.map(|p| p.targets.iter().copied().collect());
        let member = |t| members.as_ref().is_none_or(|m| m.contains(&t));
        !self.is_served(spec)
            && (self.chain_is_away(spec, member) || self.node_is_away(spec, member))
    }

    /// Whether such a chain is served again once a replica of its last in-sync set returns.
    fn chain_is_away(&self, spec: &pb::LayoutSpec, member: impl Fn(TargetId) -> bool) -> bool {
        let comes_back = |r: &pb::Replica| {
            r.state() == ReplicaLastsrv && self.view.target(r.target).is_some_and(|t| !t.given_up)
        };
        let is_away =
            |c: &pb::Chain| !c.lost && c.head().is_none() && c.replicas.iter().any(comes_back);
        let sets = self.view.map.sets.iter().filter(|s| s.copies == spec.copies);
        let sets = sets.filter(|s| s.pool.is_empty() || s.pool == spec.pool);
        let mut chains = sets.flat_map(|s| s.chains.iter().map(move |id| (s, *id)));
        chains.any(|(set, id)| {
            let may = |c: &&pb::Chain| !set.pool.is_empty() || member(c.ost_index());
            self.view.chain(id).filter(may).is_some_and(is_away)
        })
    }

    /// Whether such chains would be made if all nodes were up, while too few are up now.
    fn node_is_away(&self, spec: &pb::LayoutSpec, member: impl Fn(TargetId) -> bool) -> bool {
        let mut nodes: BTreeMap<NodeId, bool> = BTreeMap::new();
        let fit = |t: &&pb::Target| !t.given_up && !t.draining && member(t.id);
        for t in self.view.map.targets.iter().filter(fit) {
            *nodes.entry(t.node).or_default() |= t.alive;
        }
        let there = nodes.values().filter(|alive| **alive).count();
        let needed = spec.copies as usize;
        there < needed && needed <= nodes.len()
    }
}

fn is_away(t: &pb::Target) -> bool {
    !t.alive && !t.given_up
}
