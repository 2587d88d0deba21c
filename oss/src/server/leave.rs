//! The data of a chain that a target has left. It may be the only good copy of something: the
//! replicas that replaced it may have damage that was not found yet. So nothing is removed before
//! every replica that the chain should have is in sync and has read its copy of the chunk, with
//! the help of this target if it cannot (`copies.rs`).

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::{StreamExt, stream};
use strake_fabric::Message;
use strake_proto::{
    ChunkId, Code, Result,
    data::{DataRequest, ListEntry, Version},
    opcode,
};
use tokio::time::Instant;

use super::{peers::Lane, replica::Replica};
use crate::{chain::rows::Copies, engine::Update};

/// Chunks per step, and the pause after each step.
const PAGE: usize = 256;
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// How often the chain is asked again about chunks that are kept, and is told that this target is
/// there.
pub(super) const ANNOUNCE: Duration = Duration::from_secs(30);
/// In VOUCH: asks about no chunk.
pub(super) const NO_CHUNK: ChunkId = ChunkId { ino: 0, data: 0, index: 0 };

/// What a pass over a chain did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pass {
    gone: usize,
    /// Chunks that a replica in sync cannot read.
    kept: usize,
}

impl Replica {
    /// Offers this target's data of the chain, which it has left, to the in-sync replicas, and
    /// removes what they do not need, until the chain changes. `whole`: all the replicas that the
    /// chain should have are in sync.
    pub(super) async fn leave(self: Arc<Self>, epoch: u64, whole: bool) {
        let (mut pause, mut kept) = (PAUSE_MIN, 0);
        while self.goes_on(epoch) {
            let done =
                if whole { self.forget_all(epoch).await } else { self.announce(epoch).await };
            let wait = match done {
                Ok(pass) => {
                    if pass.gone > 0 {
                        tracing::info!(
                            "chain {}: {} chunks are gone from target {}, which has left it",
                            self.chain,
                            pass.gone,
                            self.id
                        );
                    }
                    if pass.kept > kept {
                        tracing::error!(
                            "chain {}: target {} has left it and keeps {} chunks that are damaged on replicas in sync",
                            self.chain,
                            self.id,
                            pass.kept
                        );
                    }
                    kept = pass.kept;
                    self.kept.store(kept as u64, Ordering::Relaxed);
                    if whole && kept == 0 {
                        return;
                    }
                    pause = PAUSE_MIN;
                    ANNOUNCE
                }
                Err(e) => {
                    tracing::debug!(
                        "chain {}: cannot remove what target {} has left of it: {e}",
                        self.chain,
                        self.id
                    );
                    self.target.note(&e);
                    let wait = pause;
                    pause = (pause * 2).min(PAUSE_MAX);
                    wait
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// Tells the chain that this target is there, if it has data of it.
    async fn announce(self: &Arc<Self>, epoch: u64) -> Result<Pass> {
        if !self.engine().list(self.chain, None, 1)?.is_empty() {
            Copies::Waits.taken();
            self.others_vouch(epoch, NO_CHUNK).await?;
        }
        Ok(Pass::default())
    }

    async fn forget_all(self: &Arc<Self>, epoch: u64) -> Result<Pass> {
        let mut pass = Pass::default();
        // The target must durably know that it left before it removes anything.
        let (mut known, mut after) = (false, None);
        loop {
            let page = self.engine().list(self.chain, after, PAGE)?;
            let Some(last) = page.last().map(|e| e.chunk) else { return Ok(pass) };
            if !std::mem::replace(&mut known, true) {
                self.engine().sync_chain_views().await?;
            }
            let asked =
                page.into_iter().map(|e| async move { (e.chunk, self.can_go(epoch, &e).await) });
            let mut answers = stream::iter(asked).buffered(self.node.cfg.sync_parallel);
            while let Some((chunk, can_go)) = answers.next().await {
                if !self.goes_on(epoch) {
                    return Ok(pass);
                }
                if !can_go? {
                    pass.kept += 1;
                    continue;
                }
                let staged = self.engine().stage(self.key(chunk), Update::Remove).await?;
                self.forget_staged(staged, epoch)?;
                pass.gone += 1;
            }
            after = Some(last);
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Whether this target's copy of a chunk is no longer needed.
    async fn can_go(self: &Arc<Self>, epoch: u64, e: &ListEntry) -> Result<bool> {
        // A chunk with a damaged header cannot be read.
        let worthless = e.tombstone || e.version == Version::default();
        if worthless || !self.node.cfg.keep_until_read {
            return Ok(true);
        }
        let begun = Instant::now();
        let (can_go, busy) = self.others_vouch(epoch, e.chunk).await?;
        self.make_way(Duration::ZERO, begun.elapsed(), busy).await;
        Ok(can_go)
    }

    /// Whether all in-sync replicas can read their copies of a chunk, and whether applications wait
    /// for one of them.
    async fn others_vouch(&self, epoch: u64, chunk: ChunkId) -> Result<(bool, bool)> {
        let (mut all, mut busy) = (true, false);
        for to in self.view().serving {
            let session = u64::from(self.id);
            let r = DataRequest { session, ..DataRequest::new(self.chain, epoch, to, chunk) };
            match self.call(to, Lane::Vouch, Message::new(opcode::VOUCH, r.encode())).await {
                Ok((answer, _)) => busy |= answer.len != 0,
                Err(e) if matches!(e.code, Code::Corrupt | Code::Overloaded) => all = false,
                Err(e) => return Err(e),
            }
        }
        Ok((all, busy))
    }
}
