//! What a target has of a chain that it has left. It may be the only good copy of something: damage
//! that nobody has found yet on those that took its place is no reason to trust them. So nothing
//! goes before every replica that the chain shall have is in sync and has read what it has of the
//! chunk, with the help of this target where it cannot (`copies.rs`).

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

/// Chunks that go in one step, and the pause after each.
const PAGE: usize = 256;
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// What is kept is asked about again so often. So is the chain told that this target is there.
pub(super) const ANNOUNCE: Duration = Duration::from_secs(30);
/// In VOUCH: no chunk is asked about.
pub(super) const NO_CHUNK: ChunkId = ChunkId { ino: 0, data: 0, index: 0 };

/// What a pass over a chain did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pass {
    gone: usize,
    /// Chunks that a replica in sync cannot read.
    kept: usize,
}

impl Replica {
    /// Offers what this target has of the chain, which it has left, to those that are in sync, and
    /// removes what they can do without, until the chain changes. `whole`: the chain has all the
    /// replicas that it shall have in sync.
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

    /// Says that it is there, if it has something of the chain.
    async fn announce(self: &Arc<Self>, epoch: u64) -> Result<Pass> {
        if !self.engine().list(self.chain, None, 1)?.is_empty() {
            Copies::Waits.taken();
            self.others_vouch(epoch, NO_CHUNK).await?;
        }
        Ok(Pass::default())
    }

    async fn forget_all(self: &Arc<Self>, epoch: u64) -> Result<Pass> {
        let mut pass = Pass::default();
        // That it left must not be forgotten by it before what it had is.
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

    /// Whether nobody can need what is here of a chunk.
    async fn can_go(self: &Arc<Self>, epoch: u64, e: &ListEntry) -> Result<bool> {
        // Nothing can be read of one whose header is damaged.
        let worthless = e.tombstone || e.version == Version::default();
        if worthless || !self.node.cfg.keep_until_read {
            return Ok(true);
        }
        let begun = Instant::now();
        let (can_go, busy) = self.others_vouch(epoch, e.chunk).await?;
        self.make_way(Duration::ZERO, begun.elapsed(), busy).await;
        Ok(can_go)
    }

    /// Whether all replicas in sync can read what they have of a chunk, and whether applications
    /// wait for one of them.
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
