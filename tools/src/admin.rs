//! The administration of servers: the key for it, and requests for their status.

use std::{path::Path, time::Duration};

use strake_proto::{Code, Error, Result, pb, pb::admin_client::AdminClient};
use tonic::transport::Channel;

use crate::{config, dev::Cluster};

/// Time limit of one answer.
pub const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum size of one answer in bytes: as many sessions as there may be, with the longest names.
const MAX_STATUS: usize = 64 << 20;

/// Environment variable that names the cluster key file.
pub const KEY_VARIABLE: &str = "STRAKE_CLUSTER_KEY";
/// Where servers usually have the key file.
pub const KEY: &str = "/etc/strake/cluster.key";
/// Folder of a local cluster that is not named otherwise.
pub const DIR: &str = "strake-cluster";

/// The cluster key for servers that are given by address: from the given file, from the one that
/// the variable names, of a local cluster, or from the usual place.
pub fn key_for(given: Option<&Path>, dir: Option<&Path>) -> Result<[u8; 32]> {
    let variable = std::env::var_os(KEY_VARIABLE).filter(|v| !v.is_empty());
    if let Some(path) = given.or(variable.as_ref().map(Path::new)) {
        return config::read_key(path);
    }
    let of = |dir: &Path| Cluster::open(dir).and_then(|c| c.key());
    if let Some(dir) = dir {
        return of(dir);
    }
    if Path::new(KEY).exists() {
        return config::read_key(Path::new(KEY));
    }
    if Cluster::is_in(Path::new(DIR)) {
        return of(Path::new(DIR));
    }
    let m = format!(
        "administration needs the cluster key: name its file by --cluster-key or {KEY_VARIABLE}, or put it at {KEY}"
    );
    Err(Error::new(Code::Unauthenticated, m))
}

/// Connects to the administration of one server.
pub async fn connect(addr: &str, key: &[u8; 32]) -> Result<AdminClient<Channel>> {
    let connected = tokio::time::timeout(PATIENCE, strake_fabric::admin::connect(addr, key)).await;
    let late =
        |_| Err(Error::new(Code::Disconnected, format!("{addr}: no answer in {PATIENCE:?}")));
    Ok(AdminClient::new(connected.unwrap_or_else(late)?).max_decoding_message_size(MAX_STATUS))
}

/// Asks one server.
pub async fn ask(addr: &str, key: &[u8; 32]) -> Result<pb::StatusReply> {
    let failed = |e: &dyn std::fmt::Display| Error::new(Code::Disconnected, format!("{addr}: {e}"));
    let call = async {
        let reply = connect(addr, key)
            .await?
            .status(pb::StatusRequest::default())
            .await
            .map_err(|e| failed(&e.message()))?;
        Ok(reply.into_inner())
    };
    tokio::time::timeout(PATIENCE, call).await.map_err(|_| failed(&"no answer in 2 s"))?
}

/// The status of the leading mds.
pub async fn leader_status(mds: &[String], key: &[u8; 32]) -> Result<pb::StatusReply> {
    let mut cause = Error::new(Code::NoDev, "no metadata server leads");
    for addr in mds {
        match ask(addr, key).await {
            Ok(s) if s.raft.as_ref().is_some_and(|r| r.leader == r.id && r.id != 0) => {
                return Ok(s);
            }
            Ok(_) => {}
            Err(e) => cause = e,
        }
    }
    Err(cause)
}
