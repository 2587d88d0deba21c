//! Traffic of a fabric, as servers and clients report it.

use strake_fabric::{Fabric, Traffic};
use strake_proto::pb;

/// Traffic of each transport, for `strake status` and `lfs`.
pub fn roads(fabric: &dyn Fabric) -> Vec<pb::RoadStatus> {
    let of = |(road, t): (&str, Traffic)| pb::RoadStatus {
        road: road.into(),
        connections: t.connections,
        sent: t.sent,
        received: t.received,
    };
    fabric.roads().into_iter().map(of).collect()
}
