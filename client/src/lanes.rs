//! Connections of their own for foreign memory, several to each storage server: one queue pair into a GPU's memory is slower than its link, and
//! a call that is given up ends its connection, which is to hurt nobody else.

use std::sync::Arc;

use strake_fabric::{Connection, Fabric};
use strake_proto::{Code, Error, Result, pb};

use crate::conns::Conns;

/// Lanes to each storage server at least, whatever the number of other connections. They are spread over the rails as those are.
pub(crate) const LANES: usize = 4;

pub(crate) struct Lanes(Conns);

impl Lanes {
    pub fn new(wanted: usize) -> Lanes {
        Lanes(Conns::new(wanted.max(LANES)))
    }

    /// The next one in turn to a node, opened when it is first needed. `OpNotSupp`: there is none that lends memory.
    pub async fn get(&self, fabric: &Arc<dyn Fabric>, node: &pb::Node) -> Result<Arc<dyn Connection>> {
        let node = &without_tcp(node)?;
        // What is missing here does not come by waiting, and others can do without it.
        let missing = |e: Error| match fabric.ways(&node.endpoints) {
            Err(why) => Error { code: Code::OpNotSupp, ..why.context(format_args!("lending memory to {}", node.name)) },
            Ok(_) => e,
        };
        let conn = self.0.get(fabric, node).await.map_err(missing)?;
        if conn.lends() { Ok(conn) } else { Err(no_lane(node)) }
    }

    /// Those that are open.
    pub fn ways(&self) -> Vec<pb::WayStatus> {
        self.0.ways()
    }

    pub fn close(&self) {
        self.0.close();
    }
}

fn no_lane(node: &pb::Node) -> Error {
    let m = format!("{} is not reached by RDMA, so that no memory can be lent to it", node.name);
    Error::new(Code::OpNotSupp, m)
}

/// The same node, of which TCP is no endpoint.
fn without_tcp(node: &pb::Node) -> Result<pb::Node> {
    let endpoints: Vec<String> = node.endpoints.iter().filter(|e| !e.starts_with("tcp:")).cloned().collect();
    if endpoints.is_empty() {
        return Err(no_lane(node));
    }
    Ok(pb::Node { endpoints, ..node.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_without_rdma_has_no_lanes_and_is_named() {
        let node = |endpoints: &[&str]| pb::Node {
            name: "oss4".into(),
            endpoints: endpoints.iter().map(|e| (*e).into()).collect(),
            ..Default::default()
        };
        let e = without_tcp(&node(&["tcp:h:1"])).unwrap_err();
        assert!(e.code == Code::OpNotSupp && e.message.starts_with("oss4 is not reached by RDMA"), "{e}");
        assert_eq!(without_tcp(&node(&["tcp:h:1", "rdma:h:2"])).unwrap().endpoints, ["rdma:h:2"]);
    }
}
