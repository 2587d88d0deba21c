//! Telling a target that has left the chain whether its copy of a chunk is still needed.

use std::{sync::Arc, time::Duration};

use strake_proto::{
    ChunkId, Code, Error, Result, TargetId,
    data::{DataReply, DataRequest},
};
use tokio::time::Instant;

use super::{copies::Copies, links::NO_CHUNK, repair::Repair, replica::Replica};
use crate::{chain::rows::Copies as Rows, engine::Look};

/// See the module.
pub(super) struct Vouching {
    replica: Arc<Replica>,
    copies: Arc<Copies>,
    repair: Arc<Repair>,
}

impl Vouching {
    pub(super) fn new(
        replica: Arc<Replica>,
        copies: Arc<Copies>,
        repair: Arc<Repair>,
    ) -> Arc<Vouching> {
        Arc::new(Vouching { replica, copies, repair })
    }

    /// Handles a VOUCH: whether this in-sync replica can read its whole copy of the chunk, if need
    /// be after a repair with the help of the asking target. `Corrupt` if not.
    pub(super) async fn vouch(self: &Arc<Self>, r: &DataRequest) -> Result<DataReply> {
        self.check_in_sync(r.epoch)?;
        let asks = TargetId::try_from(r.session)
            .map_err(|_| Error::new(Code::Inval, "no target's number"))?;
        if self.copies.heard_former(asks) {
            // The asking target may have data that was lost so far.
            let me = self.clone();
            self.replica.ctx.env.spawn(async move { me.retry_repairs().await });
        }
        if r.chunk != NO_CHUNK {
            let patience = Duration::from_millis(self.replica.ctx.cfg.peer_timeout_ms) * 3 / 4;
            let late = |_| {
                Error::new(Code::Overloaded, format!("reading chunk {} takes too long", r.chunk))
            };
            tokio::time::timeout(patience, self.can_read(r.chunk)).await.map_err(late)??;
            self.check_in_sync(r.epoch)?;
        }
        let busy = self.replica.target.foreground.is_busy(Instant::now());
        Ok(DataReply { epoch: r.epoch, len: u32::from(busy), ..DataReply::default() })
    }

    fn check_in_sync(&self, epoch: u64) -> Result<()> {
        self.replica.check_member(epoch)?;
        self.replica.target.check_in()?;
        if self.replica.view().serving() {
            return Ok(());
        }
        Err(Error::new(
            Code::NotServing,
            format!("chain {} is not in sync on target {}", self.replica.chain, self.replica.id),
        ))
    }

    async fn can_read(&self, chunk: ChunkId) -> Result<()> {
        let key = self.replica.key(chunk);
        let whole = |l: Option<Look>| l.is_none_or(|l| l.is_whole());
        let look = async || {
            self.replica
                .engine()
                .check_whole(&key)
                .await
                .inspect_err(|e| self.replica.target.cannot_look(e))
        };
        if whole(look().await?) {
            Rows::Vouched.taken();
            return Ok(());
        }
        // Search again even for data known as lost: the asking target may not have been there
        // before.
        let repaired = self.repair.repair(chunk, None).await;
        if repaired.is_ok() && whole(look().await?) {
            Rows::Mended.taken();
            return Ok(());
        }
        Rows::Refused.taken();
        repaired?;
        Err(Error::new(
            Code::Corrupt,
            format!("chunk {chunk} is damaged on target {}", self.replica.id),
        ))
    }

    /// Tries again to repair the chunks known to be damaged.
    async fn retry_repairs(self: Arc<Self>) {
        for (key, _) in self
            .replica
            .target
            .damage
            .open()
            .into_iter()
            .filter(|(k, _)| k.chain == self.replica.chain)
        {
            if let Err(e) = self.repair.repair_patiently(key.chunk).await {
                tracing::debug!("{key}: {e}");
            }
        }
    }
}
