//! Reads that metadata servers other than the leader may answer. See `docs/follower-reads.md`.
//!
//! An answer of a follower is not cached. Whatever goes wrong there, the leader is asked instead.

use std::{sync::Arc, time::Duration};

use prost::Message as _;
use strake_fabric::{Endpoint, Message};
use strake_proto::{Code, Error, Result, opcode, ops::only_looks, pb};
use tokio::time::{Instant, timeout};

use super::{
    ops::{check, decode},
    service::Metadata,
};
use crate::config::{Counters, FollowerReads};

/// Time limit for a follower's answer, including the connection.
const TRY: Duration = Duration::from_millis(700);

impl Metadata {
    /// The answer of a follower, if one should be asked and can answer.
    pub(crate) async fn ask_follower(
        self: &Arc<Self>,
        request: &pb::MetaRequest,
    ) -> Option<Vec<pb::OpResult>> {
        let mode = self.shared.cfg.follower_reads;
        if mode == FollowerReads::Never || !request.ops.iter().all(only_looks) {
            return None;
        }
        let at = {
            let (policy, now) = (self.followers.policy.lock(), Instant::now());
            if !policy.wants(now, mode, &request.ops) {
                return None;
            }
            let leader = self.followers.leader.lock().clone()?;
            let turn = u64::from_le_bytes(self.shared.uuid[..8].try_into().unwrap_or_default());
            policy.whom(now, &self.shared.map().mds::<Endpoint>(), Some(&leader), turn)?
        };
        let body = pb::MetaRequest { follower: true, ..request.clone() };
        let m = Message::new(opcode::META, body.encode_to_vec());
        let asked = timeout(TRY, self.send_to_follower(&at, m, request.ops.len())).await;
        let outcome = asked.unwrap_or_else(|_| Err(Error::new(Code::TimedOut, "does not answer")));
        let mut policy = self.followers.policy.lock();
        match outcome {
            Ok(reply) => {
                policy.misses = 0;
                policy.answered(&request.ops, &reply.results);
                Counters::add(&self.shared.stats.follower_reads, 1);
                Some(reply.results)
            }
            Err(e) => {
                tracing::debug!("metadata server {at} cannot answer reads: {e}");
                let (now, miss) = (Instant::now(), e.code == Code::NotLeader);
                policy.failed(now, &at, miss);
                if miss {
                    policy.hint(now, &request.ops, false, |_| true);
                }
                Counters::add(&self.shared.stats.follower_refusals, 1);
                None
            }
        }
    }

    async fn send_to_follower(
        &self,
        at: &Endpoint,
        m: Message,
        sent: usize,
    ) -> Result<pb::MetaReply> {
        let conn = {
            let mut link = self.followers.link.lock().await;
            match link.as_ref() {
                Some((to, conn)) if to == at && !conn.is_closed() => conn.clone(),
                _ => {
                    *link = None;
                    let conn = self.shared.fabric.connect(at, None).await?;
                    link.insert((at.clone(), conn)).1.clone()
                }
            }
        };
        Counters::add(&self.shared.stats.meta_requests, 1);
        Counters::add(&self.shared.stats.operations, 1);
        check(decode(&conn.call(m, TRY).await?)?, sent)
    }
}
