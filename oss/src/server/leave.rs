//! The data of a chain that a target has left. It may be the only good copy of something: the
//! replicas that replaced it may have damage that was not found yet. So nothing is removed before
//! every replica that the chain should have is in sync and has read its copy of the chunk, with
//! the help of this target if it cannot (`copies.rs`).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
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

use super::{copies::ANNOUNCE, links::NO_CHUNK, peers::Lane, replica::Replica};
use crate::{chain::rows::Copies as Rows, engine::Update};

/// Chunks per step, and the pause after each step.
const PAGE: usize = 256;
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// What a pass over a chain did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Pass {
    gone: usize,
    /// Chunks that a replica in sync cannot read.
    kept: usize,
}

/// See the module.
pub(super) struct Departure {
    replica: Arc<Replica>,
    /// Chunks that this target keeps though it has left the chain.
    kept: AtomicU64,
}

impl Departure {
    pub(super) fn new(replica: Arc<Replica>) -> Arc<Departure> {
        Arc::new(Departure { replica, kept: AtomicU64::new(0) })
    }

    /// How many chunks this target keeps though it has left the chain.
    pub(super) fn kept(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// The chain has a new epoch.
    pub(super) fn begin_epoch(&self) {
        self.kept.store(0, Ordering::Relaxed);
    }

    /// Offers this target's data of the chain, which it has left, to the in-sync replicas, and
    /// removes what they do not need, until the chain changes. `whole`: all the replicas that the
    /// chain should have are in sync.
    pub(super) async fn leave(self: Arc<Self>, epoch: u64, whole: bool) {
        let (mut pause, mut kept) = (PAUSE_MIN, 0);
        while self.replica.goes_on(epoch) {
            let done =
                if whole { self.forget_all(epoch).await } else { self.announce(epoch).await };
            let wait = match done {
                Ok(pass) => {
                    if pass.gone > 0 {
                        tracing::info!(
                            "chain {}: removed {} chunks from target {}, which has left it",
                            self.replica.chain,
                            pass.gone,
                            self.replica.id
                        );
                    }
                    if pass.kept > kept {
                        tracing::error!(
                            "chain {}: target {} has left it, but keeps {} chunks that are \
                             damaged on replicas in sync",
                            self.replica.chain,
                            self.replica.id,
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
                        "chain {}: cannot remove the chunks that target {} still has of it: {e}",
                        self.replica.chain,
                        self.replica.id
                    );
                    self.replica.target.note(&e);
                    let wait = pause;
                    pause = (pause * 2).min(PAUSE_MAX);
                    wait
                }
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// Tells the chain that this target is there, if it has data of it.
    async fn announce(&self, epoch: u64) -> Result<Pass> {
        if !self.replica.engine().list(self.replica.chain, None, 1)?.is_empty() {
            Rows::Waits.taken();
            self.others_vouch(epoch, NO_CHUNK).await?;
        }
        Ok(Pass::default())
    }

    async fn forget_all(&self, epoch: u64) -> Result<Pass> {
        let mut pass = Pass::default();
        // The target must durably know that it left before it removes anything.
        let (mut known, mut after) = (false, None);
        loop {
            let page = self.replica.engine().list(self.replica.chain, after, PAGE)?;
            let Some(last) = page.last().map(|e| e.chunk) else { return Ok(pass) };
            if !std::mem::replace(&mut known, true) {
                self.replica.engine().notes().sync().await?;
            }
            let asked =
                page.into_iter().map(|e| async move { (e.chunk, self.can_go(epoch, &e).await) });
            let mut answers = stream::iter(asked).buffered(self.replica.ctx.cfg.sync_parallel);
            while let Some((chunk, can_go)) = answers.next().await {
                if !self.replica.goes_on(epoch) {
                    return Ok(pass);
                }
                if !can_go? {
                    pass.kept += 1;
                    continue;
                }
                let staged =
                    self.replica.engine().stage(self.replica.key(chunk), Update::Remove).await?;
                self.replica.forget_staged(staged, epoch)?;
                pass.gone += 1;
            }
            after = Some(last);
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Whether this target's copy of a chunk is no longer needed.
    async fn can_go(&self, epoch: u64, e: &ListEntry) -> Result<bool> {
        // A chunk with a damaged header cannot be read.
        let worthless = e.tombstone || e.version == Version::default();
        if worthless || !self.replica.ctx.cfg.keep_until_read {
            return Ok(true);
        }
        let begun = Instant::now();
        let (can_go, busy) = self.others_vouch(epoch, e.chunk).await?;
        self.replica.target.foreground.make_way(Duration::ZERO, begun.elapsed(), busy).await;
        Ok(can_go)
    }

    /// Whether all in-sync replicas can read their copies of a chunk, and whether applications wait
    /// for one of them.
    async fn others_vouch(&self, epoch: u64, chunk: ChunkId) -> Result<(bool, bool)> {
        let (mut all, mut busy) = (true, false);
        for to in self.replica.view().serving {
            let session = u64::from(self.replica.id);
            let r =
                DataRequest { session, ..DataRequest::new(self.replica.chain, epoch, to, chunk) };
            match self
                .replica
                .links
                .call(to, Lane::Vouch, Message::new(opcode::VOUCH, r.encode()))
                .await
            {
                Ok((answer, _)) => busy |= answer.len != 0,
                Err(e) if matches!(e.code, Code::Corrupt | Code::Overloaded) => all = false,
                Err(e) => return Err(e),
            }
        }
        Ok((all, busy))
    }
}
