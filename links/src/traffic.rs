//! Traffic of a fabric, as servers and clients report it.

use strake_fabric::{Fabric, Traffic};
use strake_proto::pb;

/// Traffic of each transport, for `strake status` and `lfs`.
pub fn transports(fabric: &dyn Fabric) -> Vec<pb::TransportStatus> {
    let of = |(transport, t): (&str, Traffic)| pb::TransportStatus {
        transport: transport.into(),
        connections: t.connections,
        sent: t.sent,
        received: t.received,
    };
    fabric.transports().into_iter().map(of).collect()
}
