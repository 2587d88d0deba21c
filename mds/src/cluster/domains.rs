//! What fails together: all targets of a storage server, and all servers of a rack. A server
//! without a rack name is a rack of its own.

use std::collections::BTreeMap;

use strake_proto::{NodeId, TargetId, pb};

/// A rack, or a server without a rack name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rack<'a> {
    Named(&'a str),
    Alone(NodeId),
}

/// Where each target is.
pub(crate) struct Domains<'a> {
    of: BTreeMap<TargetId, (NodeId, Rack<'a>)>,
}

impl<'a> Domains<'a> {
    pub(crate) fn new(map: &'a pb::ClusterMap) -> Domains<'a> {
        let racks: BTreeMap<NodeId, &str> = map.nodes.iter().map(|n| (n.id, &*n.rack)).collect();
        let rack = |node| match racks.get(&node) {
            Some(&name) if !name.is_empty() => Rack::Named(name),
            _ => Rack::Alone(node),
        };
        Domains { of: map.targets.iter().map(|t| (t.id, (t.node, rack(t.node)))).collect() }
    }

    /// The rack of a target, `None` if it is not registered.
    pub(crate) fn rack(&self, t: TargetId) -> Option<Rack<'a>> {
        self.of.get(&t).map(|o| o.1)
    }

    /// Whether both are registered and on different servers.
    pub(crate) fn servers_differ(&self, a: TargetId, b: TargetId) -> bool {
        matches!((self.of.get(&a), self.of.get(&b)), (Some(a), Some(b)) if a.0 != b.0)
    }

    /// How many of the others are in the rack of `t`.
    pub(crate) fn crowd<'b>(
        &self,
        t: TargetId,
        others: impl IntoIterator<Item = &'b TargetId>,
    ) -> usize {
        others.into_iter().filter(|o| **o != t && self.rack(**o) == self.rack(t)).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_and_racks() {
        let node =
            |(id, rack): (NodeId, &str)| pb::Node { id, rack: rack.into(), ..Default::default() };
        let target = |(id, node): (TargetId, NodeId)| pb::Target { id, node, ..Default::default() };
        let map = pb::ClusterMap {
            nodes: [(1001, "a"), (1002, "a"), (1003, "b"), (1004, ""), (1005, "")]
                .map(node)
                .to_vec(),
            targets: [(0, 1001), (1, 1001), (2, 1002), (3, 1003), (4, 1004), (5, 1005)]
                .map(target)
                .to_vec(),
            ..Default::default()
        };
        let d = Domains::new(&map);
        assert!(
            !d.servers_differ(0, 1)
                && d.servers_differ(0, 2)
                && !d.servers_differ(0, 9)
                && !d.servers_differ(8, 9)
        );
        let all = [0, 1, 2, 3, 4, 5];
        assert_eq!(all.map(|t| d.crowd(t, &all)), [2, 2, 2, 0, 0, 0]);
        assert_eq!((d.crowd(0, &[0]), d.crowd(3, &[0, 1, 2])), (0, 0));
    }
}
