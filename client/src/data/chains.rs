//! Chains and nodes of a map, and the errors of the data path.

use strake_proto::{ChainId, Code, Error, Result, TargetId, map::MapView, pb};

use crate::shared::retry::in_doubt;

pub(crate) fn not_serving(m: String) -> Error {
    Error::new(Code::NotServing, m)
}

pub(crate) fn chain_of(map: &MapView, id: ChainId) -> Result<&pb::Chain> {
    map.chain(id).ok_or_else(|| not_serving(format!("chain {id} is not in the cluster map")))
}

pub(crate) fn node_of(map: &MapView, target: TargetId) -> Result<&pb::Node> {
    map.node_of(target).ok_or_else(|| not_serving(format!("target {target} has no node")))
}

/// Whether an error of an update is the server's answer, so that no copy of the update can still be
/// made.
pub(crate) fn is_answer(e: &Error) -> bool {
    !in_doubt(e) && e.code != Code::StaleEpoch
}

pub(crate) fn shut_down() -> Error {
    Error::new(Code::Io, "the client is being shut down")
}

pub(crate) fn session_lost() -> Error {
    Error::new(Code::Io, "the session was lost during a write; the bytes may be lost")
}
