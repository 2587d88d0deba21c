//! Which replica a data request goes to: pure choices over the cluster map.

use strake_proto::{
    ChunkId, Code, Error, NodeId, Result, TargetId,
    layout::splitmix64,
    map::{ChainExt, MapView},
    pb,
};

/// Serving replicas in the order in which a reader tries them: the one on `local` first, if there
/// is one, then the others from a position that depends on the chunk, so that the readers of a file
/// use all copies.
pub fn read_order(
    map: &MapView,
    chain: &pb::Chain,
    chunk: ChunkId,
    local: Option<NodeId>,
) -> Vec<TargetId> {
    let mut order: Vec<TargetId> = chain.serving().collect();
    if order.len() > 1 {
        let mut seed = chunk.ino.wrapping_mul(31).wrapping_add(chunk.index);
        let by = (splitmix64(&mut seed) % order.len() as u64) as usize;
        order.rotate_left(by);
        let is_local = |t: &TargetId| local.is_some() && map.target(*t).map(|t| t.node) == local;
        if let Some(i) = order.iter().position(is_local) {
            let t = order.remove(i);
            order.insert(0, t);
        }
    }
    order
}

/// Only the `n`-th replica of the chain as it was created (0 = first): for verifying copies one by
/// one.
///
/// `Inval` if the chain has fewer copies, `NotServing` while that one is out of sync.
pub fn only_replica(chain: &pb::Chain, n: usize) -> Result<Vec<TargetId>> {
    let target = *chain.preferred.get(n).ok_or_else(|| {
        let m = format!(
            "chain {} has {} copies; there is no replica {n}",
            chain.id,
            chain.preferred.len()
        );
        Error::new(Code::Inval, m)
    })?;
    if chain.serving().any(|t| t == target) {
        return Ok(vec![target]);
    }
    Err(Error::new(
        Code::NotServing,
        format!("replica {n} of chain {} (target {target}) is out of sync", chain.id),
    ))
}

/// The node that runs on this host, if the map has one.
pub fn local_node(map: &MapView, hostname: &str) -> Option<NodeId> {
    map.map
        .nodes
        .iter()
        .find(|n| {
            n.role == strake_proto::map::ROLE_OSS && !hostname.is_empty() && n.name == hostname
        })
        .map(|n| n.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> MapView {
        let s = pb::ReplicaState::ReplicaServing as i32;
        let off = pb::ReplicaState::ReplicaOffline as i32;
        let replica = |target, state| pb::Replica { target, state };
        MapView::new(pb::ClusterMap {
            nodes: (1..=4)
                .map(|id| pb::Node { id, role: 2, name: format!("n{id}"), ..Default::default() })
                .collect(),
            targets: (1..=4).map(|id| pb::Target { id, node: id, ..Default::default() }).collect(),
            chains: vec![pb::Chain {
                id: 1,
                epoch: 1,
                replicas: vec![replica(1, s), replica(2, s), replica(3, s), replica(4, off)],
                preferred: vec![1, 2, 3],
                lost: false,
            }],
            ..Default::default()
        })
        .unwrap()
    }

    #[test]
    fn reads_spread_over_serving_replicas_only_and_prefer_the_own_node() {
        let m = map();
        let chain = m.chain(1).unwrap();
        let mut first = std::collections::BTreeMap::new();
        for index in 0..300 {
            let order = read_order(&m, chain, ChunkId { ino: 5, data: 1, index }, None);
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, vec![1, 2, 3]);
            *first.entry(order[0]).or_insert(0) += 1;
            let local = local_node(&m, "n3");
            assert_eq!(local, Some(3));
            assert_eq!(read_order(&m, chain, ChunkId { ino: 5, data: 1, index }, local)[0], 3);
        }
        assert!(first.values().all(|n| *n > 60), "{first:?}");
        assert_eq!(local_node(&m, ""), None);
    }

    #[test]
    fn one_replica_is_that_one_or_none() {
        let m = map();
        let mut chain = m.chain(1).unwrap().clone();
        assert_eq!(only_replica(&chain, 1).unwrap(), vec![2]);
        assert_eq!(only_replica(&chain, 3).unwrap_err().code, Code::Inval);
        chain.replicas[1].state = pb::ReplicaState::ReplicaSyncing as i32;
        assert_eq!(only_replica(&chain, 1).unwrap_err().code, Code::NotServing);
    }
}
