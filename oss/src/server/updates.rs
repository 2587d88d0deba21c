//! Updates from clients and from other replicas: they run through the chain, and their bytes are
//! staged on this target.

use std::sync::Arc;

use strake_proto::{
    Code, Error, Result,
    data::{DataReply, FLAG_GRANTED, FLAG_REPLAY, FLAG_TOMBSTONE, Kind},
};

use super::{
    repair::{Repair, Unrepaired},
    replica::Replica,
    update_request::UpdateRequest,
};
use crate::{
    chain::{OpId, Outcome, What, slot::Refusal},
    engine::Staged,
};

/// See the module.
pub(super) struct Updates {
    replica: Arc<Replica>,
    repair: Arc<Repair>,
}

impl Updates {
    pub(super) fn new(replica: Arc<Replica>, repair: Arc<Repair>) -> Arc<Updates> {
        Arc::new(Updates { replica, repair })
    }

    /// Handles a FORWARD.
    pub(super) async fn forwarded(&self, request: UpdateRequest) -> Result<DataReply> {
        let r = &request.request;
        let [prev] = r.writers[..] else {
            return Err(Error::new(
                Code::Protocol,
                "FORWARD does not say which version it builds on",
            ));
        };
        let (epoch, version) = (r.epoch, r.version);
        let mut prev = prev.version;
        self.repair.prepare(r.chunk, Some(prev)).await;
        if r.kind == Kind::Remove && r.session == 0 && r.flags & FLAG_TOMBSTONE != 0 {
            // The data is gone for good, so this chunk is removed whatever its version here, even
            // if other replicas do not have it.
            prev = self
                .replica
                .engine()
                .meta(&self.replica.key(r.chunk))?
                .map(|m| m.version)
                .unwrap_or_default();
        }
        let what = What::Forward { session: r.session, seq: r.seq, version, prev };
        let outcome = self.replica.submit(request, what).await?;
        // The update is applied: a failing flush must not be taken for a refusal.
        self.answer(outcome, epoch, false).await.map_err(|e| match Refusal::of(e.code) {
            Refusal::Transient => e,
            _ => {
                Error::new(Code::NotServing, format!("the update is applied but not flushed: {e}"))
            }
        })
    }

    /// Handles an update from a client, or from the mds (session 0).
    pub(super) async fn update(&self, request: UpdateRequest, stable: bool) -> Result<DataReply> {
        let r = &request.request;
        let epoch = r.epoch;
        let replay = (r.flags & FLAG_REPLAY != 0).then_some(r.version);
        self.repair.prepare(r.chunk, None).await;
        let what = What::Client { session: r.session, seq: r.seq, replay, round: r.round };
        self.answer(self.replica.submit(request, what).await?, epoch, stable).await
    }

    async fn answer(&self, outcome: Outcome, epoch: u64, stable: bool) -> Result<DataReply> {
        let reply = |version, stable, boot_ids| DataReply {
            stable,
            version,
            epoch,
            boot_ids,
            ..DataReply::default()
        };
        Ok(match outcome {
            Outcome::Applied { version, boot_ids } if !stable => reply(version, false, boot_ids),
            Outcome::Applied { version, .. } | Outcome::Known { version } => {
                let epoch = self.replica.view().epoch;
                reply(version, true, self.replica.flush_chain(epoch).await?)
            }
            Outcome::Granted => {
                return Err(Error::new(Code::Io, "an update got the answer of a hold"));
            }
            Outcome::Refused(e) => return Err(e),
        })
    }

    /// Stages an update that is in its chunk's slot. If it builds on damaged bytes, repairs them
    /// first, or takes the chunk as the update leaves it from the successor.
    pub(super) async fn stage(&self, op: OpId, c: &UpdateRequest) -> Result<Staged> {
        let (chunk, key) = (c.request.chunk, self.replica.key(c.request.chunk));
        let granted = (c.request.flags & FLAG_GRANTED != 0).then_some(c.request.session);
        let mut unasked = None;
        let engine = self.replica.engine();
        let mut result = match c.update() {
            Ok(update) => engine.stage_of(key, update, granted).await,
            Err(e) => Err(e),
        };
        if matches!(&result, Err(e) if e.code == Code::Corrupt)
            && let Ok(update) = c.update()
        {
            // Stage again even if some part has no good copy: this update may not build on it.
            let repaired = self.repair.repair_held_at(chunk, None).await;
            result = engine.stage_of(key, update, granted).await;
            if let (Err(e), Err(Unrepaired { unasked: true, cause, .. })) = (&result, repaired)
                && e.code == Code::Corrupt
            {
                unasked = Some(cause);
            }
        }
        if matches!(&result, Err(e) if e.code == Code::Corrupt)
            && let Some(staged) = self.repair.take_over(op, chunk).await
        {
            result = Ok(staged);
        }
        match (result, unasked) {
            // A possible source did not answer. It will later, or it leaves the chain.
            (Err(_), Some(cause)) => Err(Error::new(Code::NotServing, cause.message)),
            // Only at the head: the head takes refusals of the replicas behind for final.
            (Err(e), None) if self.replica.view().head => Err(self.repair.told_damaged(chunk, e)),
            (result, _) => result,
        }
    }
}
