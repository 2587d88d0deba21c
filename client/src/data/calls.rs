//! One request to one storage server, and what its outcome says about the server.

use futures_util::future::BoxFuture;
use std::{
    sync::{Arc, atomic::AtomicI64},
    time::Duration,
};

use strake_fabric::{Connection, Message, Transport};
use strake_links::payloads;
use strake_proto::{
    ChainId, Code, Error, Result, SessionId, TargetId,
    data::{DataReply, DataRequest},
    map::{ChainExt, MapView},
    opcode, pb,
};

use crate::{
    config::Counters,
    data::{
        chains::{chain_of, node_of, not_serving},
        replica_attempts::Way,
        service::Storage,
    },
    metadata::session::Session,
    shared::{Attempts, retry::in_doubt, unreachable::Kind as Server},
};

/// Time limit of one attempt at a request. The transport and the map notice a dead server much
/// earlier.
const DATA_TRY: Duration = Duration::from_secs(10);

impl Storage {
    pub(crate) async fn connection_to(
        &self,
        map: &MapView,
        target: TargetId,
    ) -> Result<Arc<dyn Connection>> {
        let node = node_of(map, target)?;
        self.connections.get(&self.shared.fabric, node).await
    }

    /// One request; notes what its outcome says about the server that it went to.
    pub(crate) async fn data_call(
        &self,
        map: &MapView,
        chain: &pb::Chain,
        target: TargetId,
        m: Message,
        way: Way<'_>,
    ) -> Result<Message> {
        let node = node_of(map, target)?;
        let reply = self.data_call_once(chain, node, m, way).await;
        match &reply {
            Err(e) if matches!(e.code, Code::Disconnected | Code::TimedOut) => {
                self.shared.failed(Server::Storage, &node.name, e);
                self.clocks.forget(node.id);
            }
            // The map changed: the error says nothing about the server.
            Err(e) if e.code == Code::StaleEpoch => {}
            _ => self.shared.answered(Server::Storage, &node.name),
        }
        reply
    }

    /// The error for a chain without any replica that may answer: it waits for the servers of all
    /// its replicas.
    pub(crate) fn deserted(&self, map: &MapView, chain: &pb::Chain) -> Error {
        if chain.lost {
            let m = format!(
                "chain {} was given up: an administrator gave up the targets with its last copies",
                chain.id
            );
            return Error::new(Code::Io, m);
        }
        let e = not_serving(format!("chain {} has no replica in sync", chain.id));
        self.wait_for_absent(map, chain, &e);
        e
    }

    /// Notes which servers are waited for, to show it to the user.
    pub(super) fn wait_for_absent(&self, map: &MapView, chain: &pb::Chain, e: &Error) {
        let absent =
            chain.replicas.iter().filter(|r| r.state() != pb::ReplicaState::ReplicaServing);
        for node in absent.filter_map(|r| map.node_of(r.target)) {
            self.shared.failed(Server::Storage, &node.name, e);
        }
    }

    /// One request. Ends early when the chain changes meanwhile, since the addressed replica may
    /// never answer.
    async fn data_call_once(
        &self,
        chain: &pb::Chain,
        node: &pb::Node,
        m: Message,
        way: Way<'_>,
    ) -> Result<Message> {
        let mut changed = self.shared.map_changes();
        let is_old = || self.shared.map().chain(chain.id).is_none_or(|c| c.epoch != chain.epoch);
        let conn = match way {
            Way::Shared(_) => self.connections.get(&self.shared.fabric, node).await?,
            Way::Lane(_) => {
                self.rdma_connections.get(&self.shared.fabric, node, &self.connections).await?
            }
        };
        if is_old() {
            return Err(Error::new(Code::StaleEpoch, format!("chain {} changed", chain.id)));
        }
        Counters::add(&self.shared.stats.data_requests, 1);
        Counters::add(&self.shared.stats.data_reads, u64::from(m.opcode == opcode::READ));
        Counters::add(&self.shared.stats.data_writes, u64::from(m.opcode == opcode::WRITE));
        way.hands(1);
        let call = conn.call(payloads::request(m), DATA_TRY);
        tokio::pin!(call);
        loop {
            tokio::select! {
                biased;
                r = &mut call => {
                    // The memory cannot be lent: nothing was sent.
                    if r.as_ref().is_err_and(|e| e.code == Code::OpNotSupp) {
                        way.hands(-1);
                    }
                    return r;
                }
                _ = changed.changed() => {
                    if is_old() {
                        return Err(Error::new(Code::StaleEpoch, format!("chain {} changed while the request was under way", chain.id)));
                    }
                }
            }
        }
    }

    /// Sends an update or a flush to the head of a chain. Returns the answer, the head and the
    /// transport that the bytes took. `handed` counts the requests that the head may have received.
    pub(crate) async fn to_head(
        &self,
        map: &MapView,
        chain: ChainId,
        m: Message,
        r: DataRequest,
        handed: Option<&AtomicI64>,
    ) -> Result<(TargetId, DataReply, Transport)> {
        let chain = chain_of(map, chain)?;
        let head = chain.head().ok_or_else(|| self.deserted(map, chain))?;
        let body = DataRequest { chain: chain.id, epoch: chain.epoch, target: head, ..r }.encode();
        let reply =
            self.data_call(map, chain, head, Message { body, ..m }, Way::Shared(handed)).await?;
        Ok((head, DataReply::decode(&reply.body)?, reply.went))
    }

    /// The pause after a failed attempt; refreshes the map if that may help.
    pub(crate) fn refresh_and_pause<'a>(
        self: &'a Arc<Self>,
        map: &'a MapView,
        at: &'a mut Attempts,
        e: Error,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            if e.code != Code::Overloaded {
                self.metadata.refresh_map(map.version()).await;
            }
            at.pause(&self.shared, e).await
        })
    }

    /// A storage server does not know the session: asks the metadata servers, which decide.
    pub(crate) fn verify_session<'a>(self: &'a Arc<Self>) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            if let Some(s) = self.metadata.current_session() {
                self.metadata.clone().renew().await;
                if self.metadata.current_session().is_some_and(|n| n.id == s.id) {
                    tracing::debug!(
                        session = s.id,
                        "an oss refused the session that the metadata servers still know"
                    );
                }
            }
        })
    }

    pub(crate) fn session_of(&self, id: SessionId) -> Option<Arc<Session>> {
        self.metadata.current_session().filter(|s| s.id == id)
    }

    pub(crate) fn round_of(&self, session: SessionId) -> u64 {
        self.session_of(session).map_or(0, |s| s.round())
    }

    /// Notes how an attempt at an update ended: where a copy may still be on its way, the next
    /// attempt is made in another round than this one.
    pub(crate) fn attempted(&self, session: SessionId, round: u64, handed: bool, e: &Error) {
        if let Some(s) = self.session_of(session).filter(|_| handed && in_doubt(e)) {
            s.leave_round(round);
        }
    }
}
