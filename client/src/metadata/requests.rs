//! Lists of operations, sent to the leader or to a follower; mutations run exactly once.

use futures_util::future::BoxFuture;
use std::{sync::Arc, time::Duration};

use prost::Message as _;
use strake_proto::{Code, Error, Result, SessionId, opcode, pb};

use super::{
    link::META_TRY,
    ops::{alters, check, decode, is_mutation, is_repeatable, is_resize, keeps_number, one, op},
    service::Metadata,
};
use crate::{
    config::FollowerReads, handover::operation::Caller, leases::lease_cache::forgotten,
    shared::retry::in_doubt,
};

/// Time limit for one attempt at a resize. A truncate is answered only when the bytes are gone from
/// every replica.
const SHRINK_TRY: Duration = Duration::from_secs(30);

impl Metadata {
    /// Runs one operation that changes nothing.
    pub(crate) async fn read_op(
        self: &Arc<Self>,
        creds: &pb::Creds,
        o: pb::op::Op,
    ) -> Result<pb::OpResult> {
        one(self.meta(creds, vec![op(o)]).await?)
    }

    /// Runs one operation that changes something, to its end, even if the future is dropped.
    pub(crate) fn write_op<'a>(
        self: &'a Arc<Self>,
        Caller { creds, operation }: Caller<'_>,
        o: pb::op::Op,
    ) -> BoxFuture<'a, Result<pb::OpResult>> {
        let (me, creds, operation) = (self.clone(), creds.clone(), operation.cloned());
        let writing = async move {
            let caller = Caller { creds: &creds, operation: operation.as_ref() };
            one(me.meta_for(caller, vec![op(o)]).await?)
        };
        Box::pin(self.shared.detached(writing))
    }

    /// Runs a list of operations; mutations run exactly once. The answer ends with the first
    /// failure, if any.
    ///
    /// `EIO` when the session was lost while a mutation was in doubt: it may or may not have run.
    pub(crate) async fn meta(
        self: &Arc<Self>,
        creds: &pb::Creds,
        ops: Vec<pb::Op>,
    ) -> Result<Vec<pb::OpResult>> {
        self.meta_for(creds.into(), ops).await
    }

    /// As [`Metadata::meta`]. The mutation of an operation that comes again after a restart of the
    /// mount has the number that it had before.
    pub(crate) async fn meta_for(
        self: &Arc<Self>,
        caller: Caller<'_>,
        ops: Vec<pb::Op>,
    ) -> Result<Vec<pb::OpResult>> {
        self.meta_within(None, caller, ops).await
    }

    /// As [`Metadata::meta_for`], for a list that makes sense in one session only: `NoSession` when
    /// there is another.
    pub(crate) fn meta_within<'a>(
        self: &'a Arc<Self>,
        only: Option<SessionId>,
        Caller { creds, operation }: Caller<'a>,
        ops: Vec<pb::Op>,
    ) -> BoxFuture<'a, Result<Vec<pb::OpResult>>> {
        Box::pin(async move {
            if alters(&ops) {
                self.shared.may_alter()?;
            }
            let mut at = self.shared.attempts("metadata request");
            let mutation = is_mutation(&ops);
            // Opens and closes must count once, however often the request arrives.
            let counts = ops
                .iter()
                .any(|o| matches!(o.op, Some(pb::op::Op::Open(_) | pb::op::Op::Close(_))));
            let one_try = if is_resize(&ops) { SHRINK_TRY } else { META_TRY };
            let sent = ops.len();
            let operation = operation.filter(|_| mutation && keeps_number(&ops));
            let mut request =
                pb::MetaRequest { creds: Some(creds.clone()), ops, ..Default::default() };
            loop {
                let s = self.session().await?;
                if only.is_some_and(|id| id != s.id) {
                    return Err(Error::new(Code::NoSession, "the session was lost"));
                }
                let turn = if mutation || counts { Some(s.begin(operation)?) } else { None };
                request.session = s.id;
                request.seq = turn.as_ref().map_or(0, |t| t.1);
                request.lowest_unanswered = s.lowest_unanswered();
                if !mutation && let Some(results) = self.ask_follower(&request).await {
                    return Ok(results);
                }
                let mut asking = self.lease_cache.begin(&request.ops);
                request.dropped = std::mem::take(&mut asking.dropped);
                forgotten(asking.forgetting.take()).await;
                let body = request.encode_to_vec();
                let on = |connection| {
                    // Protobuf fields may come in any order, so the number of the connection is
                    // appended.
                    let last = pb::MetaRequest { connection, ..Default::default() };
                    [&body[..], &last.encode_to_vec()].concat().into()
                };
                let reply = self.call(opcode::META, on, one_try, &mut at).await;
                drop(turn);
                match reply {
                    Ok(m) => {
                        let reply = check(decode::<pb::MetaReply>(&m)?, sent)?;
                        asking.answered(self.shared.env.boot(), creds, &request.ops, &reply);
                        if !mutation && self.shared.cfg.follower_reads != FollowerReads::Never {
                            self.followers.told_by_leader(&request.ops, &reply);
                        }
                        return Ok(reply.results);
                    }
                    Err(e) if e.code == Code::NoSession => {
                        self.session_gone(&s, &e);
                        if at.in_doubt && !is_repeatable(&request.ops) {
                            return Err(e.context(
                                "the session was lost, and with it the answer to \
                                this request",
                            ));
                        }
                        at.pause(&self.shared, e).await?;
                    }
                    Err(e) => {
                        if !at.in_doubt && !in_doubt(&e) {
                            asking.never_ran();
                        }
                        return Err(e);
                    }
                }
            }
        })
    }
}
