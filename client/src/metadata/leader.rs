//! The connection to the metadata leader: finding it, and calls that follow it.

use futures_util::future::BoxFuture;
use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use prost::Message as _;
use strake_fabric::{Endpoint, Message};
use strake_proto::{Code, Error, Result, opcode, pb};
use tokio::time::timeout;

use super::{
    link::{HELLO_TRY, Leader, Link, META_TRY},
    ops::decode,
    service::Metadata,
};
use crate::{
    config::Counters,
    shared::{Attempts, retry::meta_passes, unreachable::Kind},
};

const CONNECT_TIMEOUT: Duration = Duration::from_millis(1500);
/// The time limit of a last attempt, when no time is left.
const MIN_TRY: Duration = Duration::from_millis(1);

impl Metadata {
    /// Sends a request to the leader, whichever server that is, until it is answered or the time is
    /// over. `body`: makes the request for the connection of this number.
    pub(crate) async fn call(
        self: &Arc<Self>,
        opcode: u16,
        body: impl Fn(u64) -> Bytes,
        one_try: Duration,
        at: &mut Attempts,
    ) -> Result<Message> {
        loop {
            // Other tasks may be connecting before this one's turn comes.
            let none = || Error::new(Code::Disconnected, "no connection to a metadata server");
            let leader = timeout(at.left().max(MIN_TRY), self.leader()).await;
            let cause = match leader.unwrap_or_else(|_| Err(none())) {
                Ok(leader) => {
                    Counters::add(&self.shared.stats.meta_requests, 1);
                    Counters::add(&self.shared.stats.operations, u64::from(opcode == opcode::META));
                    let limit = one_try.min(at.left()).max(MIN_TRY);
                    match leader.conn.call(Message::new(opcode, body(leader.number)), limit).await {
                        Ok(m) => {
                            self.shared.answered(Kind::Metadata, "");
                            return Ok(m);
                        }
                        Err(e) => {
                            self.leader_failed(&leader, &e).await;
                            e
                        }
                    }
                }
                Err(e) => e,
            };
            if !meta_passes(&cause) {
                self.shared.answered(Kind::Metadata, "");
                return Err(cause);
            }
            at.pause(&self.shared, cause).await?;
        }
    }

    /// The connection to the leader. If there is none, connects to the next candidate; fails when
    /// that fails.
    pub(crate) fn leader<'a>(self: &'a Arc<Self>) -> BoxFuture<'a, Result<Leader>> {
        Box::pin(async move {
            let mut link = self.link.lock().await;
            if let Some(l) = link.current.as_ref().filter(|l| !l.conn.is_closed()) {
                return Ok(l.clone());
            }
            link.current = None;
            let none = || Error::new(Code::Inval, "no metadata server is configured");
            let at = self.finder.lock().whom().ok_or_else(none)?;
            let map = self.shared.map();
            let node = map
                .map
                .nodes
                .iter()
                .find(|n| n.endpoints.iter().any(|e| e.parse() == Ok(at.clone())));
            let silent = || Err(Error::new(Code::TimedOut, "does not answer"));
            let direct = async {
                timeout(CONNECT_TIMEOUT, self.shared.fabric.connect(&at, None))
                    .await
                    .unwrap_or_else(|_| silent())
            };
            let asked = match node {
                Some(node) => {
                    timeout(CONNECT_TIMEOUT, self.relays.reach(&self.shared.fabric, node, direct))
                        .await
                }
                None => Ok(direct.await),
            };
            let conn = match asked.unwrap_or_else(|_| silent()) {
                Ok(conn) => conn,
                Err(e) => return Err(self.unreachable(&mut link, &at, e)),
            };
            link.refused = 0;
            let leader = Leader {
                conn,
                at,
                number: (link.number + 1).max(self.shared.env.boot().as_nanos() as u64),
            };
            link.number = leader.number;
            if let Some(s) = self.current_session() {
                let patience = (HELLO_TRY * 2u32.saturating_pow(link.slow)).min(META_TRY);
                match self.renew_on(&leader, &s, true, patience).await {
                    Ok(()) => self.shared.answered(Kind::Metadata, ""),
                    // The leader is the right one, but the session must be replaced, which the next
                    // user does.
                    Err(e) if e.code == Code::NoSession => {
                        tracing::warn!(session = s.id, "no session any more: {}", e.message);
                    }
                    Err(e) => {
                        // The server is probably overloaded: starting again each time adds to that.
                        link.slow =
                            if e.code == Code::TimedOut { (link.slow + 1).min(8) } else { 0 };
                        self.learn_leader(&leader, &e).await;
                        self.note_failure(&leader, &e);
                        return Err(e);
                    }
                }
            }
            link.made += 1;
            if link.made > 1 {
                Counters::add(&self.shared.stats.failovers, 1);
            }
            link.slow = 0;
            self.finder.lock().found(&leader.at);
            self.followers.leader_is(&leader.at);
            link.current = Some(leader.clone());
            Ok(leader)
        })
    }

    /// A host that does not resolve or refuses now may work later; a wrong key never does. But one
    /// server among several may not belong to the cluster, and an open session shows that the key
    /// is right.
    fn unreachable(&self, link: &mut Link, at: &Endpoint, e: Error) -> Error {
        self.finder.lock().failed(at);
        self.shared.failed(Kind::Metadata, &at.to_string(), &e);
        let e = e.context(format_args!("metadata server {at}"));
        link.refused = if e.code == Code::Unauthenticated { link.refused + 1 } else { 0 };
        let by_all = link.refused >= self.finder.lock().all().len();
        if by_all && self.current_session().is_none() {
            e
        } else {
            Error { code: Code::Disconnected, ..e }
        }
    }

    /// A server that does not lead may name a leader that joined a moment ago: its map has the
    /// leader's address.
    async fn learn_leader(&self, asked: &Leader, e: &Error) {
        let map = self.shared.map();
        if e.code != Code::NotLeader || e.leader == 0 || map.node(e.leader).is_some() {
            return;
        }
        let m = Message::new(
            opcode::MAP,
            pb::MapRequest { have: map.version(), latest: false }.encode_to_vec(),
        );
        let reply = asked.conn.call(m, Duration::from_secs(1)).await;
        let map = reply
            .and_then(|m| decode::<pb::MapReply>(&m))
            .and_then(|r| r.map.map_or(Ok(()), |m| self.install_map(m)));
        if let Err(e) = map {
            tracing::debug!("asking {} for the leader: {e}", asked.at);
        }
    }

    fn note_failure(&self, leader: &Leader, e: &Error) {
        self.shared.failed(Kind::Metadata, &leader.at.to_string(), e);
        let mut finder = self.finder.lock();
        finder.failed(&leader.at);
        if e.code == Code::NotLeader && e.leader != 0 {
            let map = self.shared.map();
            let hint =
                map.node(e.leader).and_then(|n| n.endpoints.iter().find_map(|e| e.parse().ok()));
            if let Some(h) = hint {
                finder.hint(h);
            }
        }
    }

    /// Whether the error ends the connection.
    pub(crate) async fn leader_failed(&self, leader: &Leader, e: &Error) -> bool {
        if !matches!(e.code, Code::NotLeader | Code::Disconnected | Code::TimedOut) {
            return false;
        }
        let mut link = self.link.lock().await;
        if link.current.as_ref().is_some_and(|l| l.number == leader.number) {
            link.current = None;
            self.learn_leader(leader, e).await;
            self.note_failure(leader, e);
        }
        true
    }
}
