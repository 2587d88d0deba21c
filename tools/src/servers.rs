//! Asks servers by the port that clients use, with the cluster key.

use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use strake_fabric::{Endpoint, Fabric, Identity, Message, Pool, Transports};
use strake_proto::{
    Code, Error, Result,
    map::{ROLE_MDS, ROLE_OSS},
    opcode, pb,
};
use strake_runtime::Env;
use tokio::task::JoinSet;

use crate::{
    address::Place,
    admin::PATIENCE,
    answers::{Answer, unix_ms},
};

/// Connections as a holder of the cluster key.
#[derive(Clone)]
pub(crate) struct Servers(std::sync::Arc<Transports>);

impl Servers {
    pub fn new(key: &[u8; 32]) -> Servers {
        let identity = Identity::server(key);
        Servers(std::sync::Arc::new(Transports::new(
            Env::system(),
            identity,
            None,
            Pool::default(),
            Default::default(),
        )))
    }

    /// One request, for at most `limit`. `Disconnected`: the server cannot be reached.
    pub async fn call(&self, at: &Endpoint, message: Message, limit: Duration) -> Result<Bytes> {
        let ask = async {
            let unreachable = |e: Error| match e.code {
                Code::Unauthenticated => e.context("the key is not this cluster's cluster key"),
                _ => Error::new(Code::Disconnected, e.message),
            };
            let conn = self.0.connect(at, None).await.map_err(unreachable)?;
            let answer = conn.call(message, limit).await;
            conn.close();
            answer.map(|m| m.body)
        };
        let answer = tokio::time::timeout(limit, ask).await;
        answer.unwrap_or_else(|_| Err(Error::new(Code::TimedOut, "no answer")))
    }

    /// A server's status, from the first of its endpoints that answers. `brief`: without map and
    /// clients.
    pub async fn status(&self, endpoints: &[Endpoint], brief: bool) -> Result<pb::StatusReply> {
        let mut last = Error::new(Code::NoDev, "no endpoint is known");
        for at in endpoints {
            let request = Message::new(opcode::STATUS, pb::StatusRequest { brief }.encode_to_vec());
            match self.call(at, request, PATIENCE).await {
                Ok(body) => {
                    let mut s = pb::StatusReply::decode(body)
                        .map_err(|e| Error::new(Code::Protocol, e.to_string()))?;
                    s.admin = reachable(&s.admin, at);
                    return Ok(s);
                }
                Err(e) if e.code == Code::OpNotSupp => {
                    let m = "its program is too old to be asked for its status";
                    return Err(Error::new(e.code, m));
                }
                Err(e) => last = e,
            }
        }
        Err(last)
    }
}

/// The admin address of a server that is reached at this endpoint: it may listen on all addresses
/// of its host.
fn reachable(admin: &str, at: &Endpoint) -> String {
    match (admin.parse::<std::net::SocketAddr>(), at) {
        (Ok(a), Endpoint::Tcp(host, _) | Endpoint::Rdma(host, _)) if a.ip().is_unspecified() => {
            format!("{host}:{}", a.port())
        }
        _ => admin.to_string(),
    }
}

/// Asks all servers of a cluster for their status. The metadata servers that are known name the
/// others; then those that were named and do not answer are no matter.
pub(crate) async fn statuses(servers: &Servers, place: &Place) -> Result<Vec<Answer>> {
    let given = place.mds.iter().map(|at| {
        Ok(Question { addr: at.clone(), at: vec![at.parse()?], is_mds: true, brief: false })
    });
    let mut all = ask_each(servers, given.collect::<Result<_>>()?).await;
    let maps = all.iter().filter_map(|a| a.reply.as_ref().ok()?.map.as_ref());
    let Some(map) = maps.max_by_key(|m| m.version).cloned() else { return Ok(all) };
    all.retain(|a| a.reply.is_ok());
    // Two addresses may be of one server.
    all.sort_by_key(Answer::node);
    all.dedup_by_key(|a| a.node());
    let asked: Vec<u32> = all.iter().map(Answer::node).collect();
    let is_mds = |n: &pb::Node| n.role == ROLE_MDS;
    let wanted = |n: &&pb::Node| !asked.contains(&n.id) && (is_mds(n) || serves(&map, n));
    let others = map.nodes.iter().filter(wanted).map(|n| Question {
        addr: format!("{} ({})", n.name, n.endpoints.join(", ")),
        at: n.endpoints.iter().filter_map(|e| e.parse().ok()).collect(),
        is_mds: is_mds(n),
        // The map is the same everywhere, and large.
        brief: !is_mds(n),
    });
    all.extend(ask_each(servers, others.collect()).await);
    all.sort_by_key(|a| (!a.is_mds, a.reply.as_ref().map_or(a.addr.clone(), |s| s.name.clone())));
    Ok(all)
}

/// What is to be asked, and where.
struct Question {
    /// The server, for people.
    addr: String,
    at: Vec<Endpoint>,
    is_mds: bool,
    brief: bool,
}

/// Servers that do not answer, or have no admin address, by name.
pub(crate) type Silent = Vec<(String, Error)>;

/// The admin addresses of the storage servers, and which have none.
pub(crate) async fn storage_admin(place: &Place) -> Result<(Vec<String>, Silent)> {
    if let Some(local) = &place.local {
        return Ok((local.admin_oss(), Vec::new()));
    }
    let (mut addrs, mut unknown) = (Vec::new(), Vec::new());
    let all = statuses(&Servers::new(&place.key), place).await?;
    if let (true, Some(e)) =
        (all.iter().all(|a| a.reply.is_err()), all.iter().find_map(|a| a.reply.as_ref().err()))
    {
        return Err(e.clone().context("no metadata server answers"));
    }
    for a in all.into_iter().filter(|a| !a.is_mds) {
        match a.reply {
            Ok(s) if s.admin.is_empty() => {
                let m = format!("{}: no `admin` address in its configuration", s.name);
                unknown.push((s.name, Error::new(Code::NoDev, m)));
            }
            Ok(s) => addrs.push(s.admin),
            Err(e) => {
                let e = e.context(&a.addr);
                unknown.push((a.addr, e));
            }
        }
    }
    Ok((addrs, unknown))
}

/// Whether a storage server has targets. One without is no part of the cluster any more.
fn serves(map: &pb::ClusterMap, n: &pb::Node) -> bool {
    n.role == ROLE_OSS && map.targets.iter().any(|t| t.node == n.id)
}

async fn ask_each(servers: &Servers, all: Vec<Question>) -> Vec<Answer> {
    let mut asked = JoinSet::new();
    for Question { addr, at, is_mds, brief } in all {
        let servers = servers.clone();
        asked.spawn(async move {
            let before = unix_ms();
            let reply = servers.status(&at, brief).await;
            let asked_ms = before.midpoint(unix_ms());
            let admin = reply.as_ref().map_or("", |s| &s.admin);
            let addr = if admin.is_empty() { addr } else { admin.to_string() };
            let is_mds = reply.as_ref().map_or(is_mds, |s| s.role == "mds");
            Answer { addr, at, asked_ms, reply, is_mds }
        });
    }
    asked.join_all().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admin_address_is_reached_where_its_server_is() {
        let at = |text: &str| text.parse::<Endpoint>().unwrap();
        assert_eq!(reachable("0.0.0.0:7401", &at("tcp:node1:7400")), "node1:7401");
        assert_eq!(reachable("[::]:7401", &at("tcp:[fe80::1]:7400")), "[fe80::1]:7401");
        assert_eq!(reachable("10.0.0.1:7401", &at("tcp:node1:7400")), "10.0.0.1:7401");
        assert_eq!(reachable("", &at("tcp:node1:7400")), "");
    }
}
