//! The cluster map with its indices, as every process holds it: immutable, and replaced as a whole
//! by a newer one.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::OnceLock,
};

use bytes::Bytes;
use prost::{
    Message as _,
    encoding::{WireType, encode_key, encode_varint},
};

use crate::{ChainId, Code, Error, NodeId, Result, TargetId, pb};
use pb::ReplicaState;

/// Maximum number of evictions in one answer to a heartbeat. If an answer has this many, there may
/// be more: the storage server asks again at once, and takes no lease before it has all of them.
pub const MAX_EVICTED: usize = 1024;

/// A metadata server.
pub const ROLE_MDS: u32 = 1;
/// A storage server.
pub const ROLE_OSS: u32 = 2;

/// A map with its indices.
#[derive(Clone, Debug, Default)]
pub struct MapView {
    /// The map.
    pub map: pb::ClusterMap,
    chains: BTreeMap<ChainId, usize>,
    targets: BTreeMap<TargetId, usize>,
    nodes: BTreeMap<NodeId, usize>,
    sets: BTreeMap<u32, usize>,
    /// The encoded map, once it was needed.
    encoded: OnceLock<Bytes>,
}

fn index<T>(items: &[T], id: impl Fn(&T) -> u32, what: &str) -> Result<BTreeMap<u32, usize>> {
    let mut m = BTreeMap::new();
    for (i, x) in items.iter().enumerate() {
        if m.insert(id(x), i).is_some() {
            return Err(Error::new(
                Code::Protocol,
                format!("cluster map names {what} {} twice", id(x)),
            ));
        }
    }
    Ok(m)
}

impl MapView {
    /// Refuses a map that names an id twice, refers to a missing one, or has a target twice in a
    /// chain.
    pub fn new(map: pb::ClusterMap) -> Result<MapView> {
        let v = MapView {
            chains: index(&map.chains, |c| c.id, "chain")?,
            targets: index(&map.targets, |t| t.id, "target")?,
            nodes: index(&map.nodes, |n| n.id, "node")?,
            sets: index(&map.sets, |s| s.id, "chain set")?,
            map,
            encoded: OnceLock::new(),
        };
        for c in &v.map.chains {
            let mut targets = BTreeSet::new();
            for r in &c.replicas {
                if !targets.insert(r.target) {
                    let m = format!("cluster map: chain {} has target {} twice", c.id, r.target);
                    return Err(Error::new(Code::Protocol, m));
                }
                if !v.targets.contains_key(&r.target) {
                    let m = format!("cluster map: chain {} has unknown target {}", c.id, r.target);
                    return Err(Error::new(Code::Protocol, m));
                }
            }
        }
        Ok(v)
    }

    /// A message followed by this map as its field `tag`: equal to encoding the message with the
    /// map in that field, except perhaps for the order of fields. A new map goes to a thousand
    /// clients at once, so it is encoded only once.
    pub fn encode_behind(&self, message: &impl prost::Message, tag: u32) -> Vec<u8> {
        let map = self.encoded.get_or_init(|| self.map.encode_to_vec().into());
        let mut out = Vec::with_capacity(message.encoded_len() + map.len() + 16);
        message.encode_raw(&mut out);
        encode_key(tag, WireType::LengthDelimited, &mut out);
        encode_varint(map.len() as u64, &mut out);
        out.extend_from_slice(map);
        out
    }

    /// Counts the changes of the map.
    pub fn version(&self) -> u64 {
        self.map.version
    }
    /// A chain by id.
    pub fn chain(&self, id: ChainId) -> Option<&pb::Chain> {
        self.chains.get(&id).map(|i| &self.map.chains[*i])
    }
    /// A target by id.
    pub fn target(&self, id: TargetId) -> Option<&pb::Target> {
        self.targets.get(&id).map(|i| &self.map.targets[*i])
    }
    /// A node by id.
    pub fn node(&self, id: NodeId) -> Option<&pb::Node> {
        self.nodes.get(&id).map(|i| &self.map.nodes[*i])
    }
    /// A chain set by id.
    pub fn set(&self, id: u32) -> Option<&pb::ChainSet> {
        self.sets.get(&id).map(|i| &self.map.sets[*i])
    }
    /// The node that serves a target.
    pub fn node_of(&self, target: TargetId) -> Option<&pb::Node> {
        self.target(target).and_then(|t| self.node(t.node))
    }
    /// Endpoints of the metadata servers, one each; those that cannot be parsed are left out.
    pub fn mds<E: std::str::FromStr>(&self) -> Vec<E> {
        let mds = self.map.nodes.iter().filter(|n| n.role == ROLE_MDS);
        mds.filter_map(|n| n.endpoints.iter().find_map(|e| e.parse().ok())).collect()
    }
    /// The chains a target is a replica of.
    pub fn chains_of(&self, target: TargetId) -> impl Iterator<Item = &pb::Chain> {
        self.map.chains.iter().filter(move |c| c.replicas.iter().any(|r| r.target == target))
    }
}

/// What the order and states of a chain's replicas mean.
pub trait ChainExt {
    /// In-sync replicas, head to tail.
    fn serving(&self) -> impl Iterator<Item = TargetId> + '_;
    /// The first in-sync replica, which orders updates.
    fn head(&self) -> Option<TargetId>;
    /// The last in-sync replica.
    fn tail(&self) -> Option<TargetId>;
    /// The replica to which updates of `target` are forwarded: the next SERVING one, or for the
    /// tail the SYNCING one.
    fn successor(&self, target: TargetId) -> Option<(TargetId, ReplicaState)>;
    /// The state of a target's replica; `None` if it has none.
    fn state_of(&self, target: TargetId) -> Option<ReplicaState>;
    /// The OST index of this chain.
    fn ost_index(&self) -> TargetId;
}

impl ChainExt for pb::Chain {
    fn serving(&self) -> impl Iterator<Item = TargetId> + '_ {
        self.replicas.iter().filter(|r| r.state() == ReplicaState::ReplicaServing).map(|r| r.target)
    }
    fn head(&self) -> Option<TargetId> {
        self.serving().next()
    }
    fn tail(&self) -> Option<TargetId> {
        self.serving().last()
    }
    fn successor(&self, target: TargetId) -> Option<(TargetId, ReplicaState)> {
        let mut after = self
            .replicas
            .iter()
            .filter(|r| {
                matches!(r.state(), ReplicaState::ReplicaServing | ReplicaState::ReplicaSyncing)
            })
            .skip_while(|r| r.target != target)
            .skip(1);
        after.next().map(|r| (r.target, r.state()))
    }
    fn state_of(&self, target: TargetId) -> Option<ReplicaState> {
        self.replicas.iter().find(|r| r.target == target).map(pb::Replica::state)
    }
    fn ost_index(&self) -> TargetId {
        self.preferred.first().copied().unwrap_or(crate::ids::TARGET_UNASSIGNED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replica(target: u32, state: ReplicaState) -> pb::Replica {
        pb::Replica { target, state: state as i32 }
    }

    #[test]
    fn order_and_states_give_head_tail_and_successors() {
        use ReplicaState::*;
        let c = pb::Chain {
            id: 1,
            epoch: 1,
            replicas: vec![
                replica(4, ReplicaServing),
                replica(2, ReplicaServing),
                replica(7, ReplicaSyncing),
            ],
            preferred: vec![2, 4, 7],
            lost: false,
        };
        assert_eq!((c.head(), c.tail(), c.ost_index()), (Some(4), Some(2), 2));
        assert_eq!(c.successor(4), Some((2, ReplicaServing)));
        assert_eq!(c.successor(2), Some((7, ReplicaSyncing)));
        assert_eq!(c.successor(7), None);
    }

    #[test]
    fn lying_maps_are_refused() {
        let t = pb::Target { id: 1, ..Default::default() };
        let twice = pb::ClusterMap { targets: vec![t.clone(), t], ..Default::default() };
        assert!(MapView::new(twice).is_err());
        let chain = pb::Chain {
            id: 1,
            replicas: vec![replica(9, ReplicaState::ReplicaServing)],
            ..Default::default()
        };
        assert!(
            MapView::new(pb::ClusterMap { chains: vec![chain], ..Default::default() }).is_err()
        );
        let targets = vec![
            pb::Target { id: 1, ..Default::default() },
            pb::Target { id: 2, ..Default::default() },
        ];
        let serving = |id| replica(id, ReplicaState::ReplicaServing);
        let chain = |replicas| pb::Chain { id: 1, replicas, ..Default::default() };
        let map = |c| {
            MapView::new(pb::ClusterMap {
                chains: vec![c],
                targets: targets.clone(),
                ..Default::default()
            })
        };
        assert!(map(chain(vec![serving(1), serving(2)])).is_ok());
        let circle = map(chain(vec![serving(1), serving(2), serving(1)]));
        assert!(circle.unwrap_err().message.contains("target 1 twice"));
    }
}
