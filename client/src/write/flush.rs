//! Makes written bytes stable: flushes of chains, and replays of what a restarted replica lost.

use futures_util::future::BoxFuture;
use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use strake_fabric::Message;
use strake_proto::{
    ChainId, Code, Error, Ino, Result,
    data::{BootId, DataRequest, FLAG_REPLAY, KEPT_WRITERS},
    opcode,
};
use tokio::sync::{Mutex as AsyncMutex, OwnedSemaphorePermit};

use crate::{
    config::Counters,
    data::{clocks::Copies, replica_attempts::NewCaps},
    inode::{Inode, UpdateAt},
    shared::{
        Attempts,
        retry::{DataVerdict, data_verdict},
    },
    write::{
        service::{Hold, Updates, room_for},
        unstable::{Entry, Replay},
        updates::Update,
    },
};

/// A chunk remembers a limited number of writers. With more unstable writes than that, stable ones
/// could not be distinguished from lost ones.
const WRITES_PER_CHUNK: usize = KEPT_WRITERS / 2;

/// Drops the cached bytes of a file when it is dropped.
struct Forget<'a>(&'a Updates, Ino);

/// An entry that stays unstable, and its position.
type Kept = (u64, Entry<Hold>);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.0.cache.lock().forget(self.1);
    }
}

impl Updates {
    /// Waits for memory for `len` unstable bytes. `ETIMEDOUT` when none becomes free in time.
    pub(crate) async fn reserve(self: &Arc<Self>, len: usize) -> Result<OwnedSemaphorePermit> {
        let total = room_for(self.shared.cfg.unstable_limit).max(1);
        let n = room_for(len).min(total);
        if let Ok(p) = self.room().clone().try_acquire_many_owned(n) {
            if self.room().available_permits() < total as usize / 2 {
                self.flush_wanted.notify_one();
            }
            return Ok(p);
        }
        let mut at = self.shared.attempts("waiting for earlier writes to become stable");
        let wait = self.room().clone().acquire_many_owned(n);
        tokio::pin!(wait);
        loop {
            self.flush_wanted.notify_one();
            let busy = || Error::new(Code::Overloaded, "too many bytes are not stable yet");
            tokio::select! {
                biased;
                p = &mut wait => return p.map_err(|_| Error::new(Code::Io, "the client is being shut down")),
                r = at.pause(&self.shared, busy()) => r?,
            }
        }
    }

    /// Starts flushes in the background for chains that need one.
    pub(crate) fn flush_due(self: &Arc<Self>) {
        let now = self.shared.env.boot().as_millis() as u64;
        let limit = self.shared.cfg.unstable_limit as u64;
        let due = {
            let u = self.unstable.lock();
            let short = self.room().available_permits()
                < room_for(self.shared.cfg.unstable_limit) as usize / 2;
            let old = now.saturating_sub(self.shared.cfg.flush_age.as_millis() as u64);
            u.due(old, if short { 0 } else { limit / 4 }, WRITES_PER_CHUNK)
        };
        for chain in due {
            let Ok(turn) = self.flush_lock(chain).try_lock_owned() else { continue };
            let core = self.clone();
            self.shared.env.spawn(async move {
                let mark = core.unstable.lock().mark();
                let mut at = core.shared.attempts("flushing in the background");
                if let Err(e) = core.flush_locked(chain, None, mark, &mut at).await {
                    tracing::warn!(chain, "{e}");
                }
                drop(turn);
            });
        }
    }

    fn flush_lock(&self, chain: ChainId) -> Arc<AsyncMutex<()>> {
        self.flushing.lock().entry(chain).or_default().clone()
    }

    /// Makes stable what this client wrote to an inode: on every chain that it touched, in
    /// parallel.
    pub(crate) fn flush_inode<'a>(self: &'a Arc<Self>, ino: Ino) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let (chains, mark) = {
                let u = self.unstable.lock();
                (u.chains_of(ino), u.mark())
            };
            let flushes = chains.into_iter().map(|chain| async move {
                let mut at = self.shared.attempts("fsync");
                let _turn = self.flush_lock(chain).lock_owned().await;
                self.flush_locked(chain, Some(ino), mark, &mut at).await
            });
            join_all(flushes).await.into_iter().collect()
        })
    }

    /// Returns when updates of the file that were given up, and may still be on their way, can no
    /// longer overwrite what any client writes or truncates from now on: the heads of their chains
    /// have seen the present round.
    pub(crate) async fn fence(self: &Arc<Self>, inode: &Arc<Inode>) -> Result<()> {
        let chains = inode.given_up.lock().clone();
        let fences = chains.into_iter().map(|(chain, (chunk, round))| async move {
            let fenced = self.fence_at(inode, (chain, chunk), self.shared.cfg.op_timeout).await;
            // A head that gives any other answer has seen the round; a chain that is lost applies
            // nothing.
            fenced.or_else(|e| if e.is_retryable() { Err(e) } else { Ok(()) })?;
            let mut given_up = inode.given_up.lock();
            if given_up.get(&chain).is_some_and(|(_, newest)| *newest == round) {
                given_up.remove(&chain);
            }
            Ok(())
        });
        join_all(fences).await.into_iter().collect()
    }

    /// Returns when the head of the chain has seen the present round, or the file is deleted.
    pub(crate) async fn fence_at(
        self: &Arc<Self>,
        inode: &Inode,
        (chain, chunk): UpdateAt,
        limit: Duration,
    ) -> Result<()> {
        let mut at = self.shared.attempts_for("flush after a write that was given up", limit);
        self.send_flush(chain, inode, DataRequest::new(chain, 0, 0, chunk), &mut at).await.map(drop)
    }

    /// One flush of a chain at a time: tasks that waited may find their bytes stable already.
    async fn flush_locked(
        self: &Arc<Self>,
        chain: ChainId,
        ino: Option<Ino>,
        mark: u64,
        at: &mut Attempts,
    ) -> Result<()> {
        loop {
            let (sample, covered) = {
                let u = self.unstable.lock();
                if !u.pending(chain, mark, ino) {
                    return Ok(());
                }
                let Some(e) = u.sample(chain) else { return Ok(()) };
                ((e.tag.inode.clone(), e.chunk), u.mark())
            };
            let request = DataRequest::new(chain, 0, 0, sample.1);
            let boot_ids = match self.send_flush(chain, &sample.0, request, at).await? {
                Some(head) => [head],
                None => continue,
            };
            let lost = self.unstable.lock().flushed(chain, covered, &boot_ids);
            for hold in lost.into_values() {
                self.replay(chain, &hold.inode, &boot_ids, covered, at).await?;
            }
            if at.left().is_zero() {
                return Err(Error::new(
                    Code::TimedOut,
                    format!("chain {chain} does not become stable"),
                ));
            }
        }
    }

    /// Sends a flush until it is answered; returns the head's boot id. Only the head counts:
    /// members join at the tail, so the head has been in sync longest. A member behind it may have
    /// been resynced, within the same boot, from a source that had lost bytes. `None`: the file
    /// whose capability was used can no longer be opened; its bytes were given up.
    fn send_flush<'a>(
        self: &'a Arc<Self>,
        chain: ChainId,
        inode: &'a Inode,
        request: DataRequest,
        at: &'a mut Attempts,
    ) -> BoxFuture<'a, Result<Option<BootId>>> {
        Box::pin(async move {
            let (mut refused, mut new_caps) = (None, NewCaps::default());
            loop {
                let cap = match self.files.capability(inode, true, refused.as_ref()).await {
                    Ok(c) => c,
                    Err(e) if e.code == Code::TimedOut => return Err(e),
                    Err(e) => {
                        inode.fail(e.context("written bytes cannot be made stable"));
                        self.unstable.lock().forget_inode(inode.ino);
                        return Ok(None);
                    }
                };
                let map = self.shared.map();
                let request = DataRequest {
                    session: cap.session,
                    cap: Some(cap.bytes),
                    round: self.storage.round_of(cap.session),
                    ..request.clone()
                };
                let m = Message::new(opcode::FLUSH, Vec::new());
                let e = match self.storage.to_head(&map, chain, m, request, None).await {
                    Ok((head, r, _)) => {
                        match r.boot_ids.iter().find(|s| s.target == head && r.stable) {
                            Some(s) => return Ok(Some(*s)),
                            None => {
                                let m = format!(
                                    "chain {chain} answered a flush without its head's boot id"
                                );
                                return Err(Error::new(Code::Protocol, m));
                            }
                        }
                    }
                    Err(e) => e,
                };
                match data_verdict(&e) {
                    DataVerdict::NewCapability => {
                        new_caps.next(&self.shared, at, e).await.map_err(|e| e.context("flush"))?;
                        refused = Some(cap);
                    }
                    DataVerdict::SessionLost => {
                        self.storage.verify_session().await;
                        at.pause(&self.shared, e).await?;
                        if self.unstable.lock().sample(chain).is_none() {
                            return Ok(None);
                        }
                    }
                    DataVerdict::Refresh | DataVerdict::AskTail => {
                        self.storage.refresh_and_pause(&map, at, e).await?
                    }
                    _ => return Err(e.context("flush")),
                }
            }
        })
    }

    /// Sends the lost bytes of one inode on one chain again. No write of this client to the inode
    /// is in progress meanwhile, so replayed bytes never overwrite newer ones.
    async fn replay(
        self: &Arc<Self>,
        chain: ChainId,
        inode: &Arc<Inode>,
        boot_ids: &[BootId],
        mark: u64,
        at: &mut Attempts,
    ) -> Result<()> {
        let _all = inode.ranges.lock_all().await;
        let (plan, bereft) = {
            let u = self.unstable.lock();
            (
                u.plan(chain, inode.ino, mark, boot_ids),
                u.is_bereft(chain, inode.ino, mark, boot_ids),
            )
        };
        if bereft {
            inode.fail_loudly(
                "bytes written before the mount was restarted were lost with a storage server",
            );
        }
        tracing::warn!(
            chain,
            ino = inode.ino,
            writes = plan.len(),
            "a replica restarted: writing unstable bytes again"
        );
        Counters::add(&self.shared.stats.replays, plan.len() as u64);
        // Bytes read since the loss do not contain the lost ones.
        let _forget = Forget(self, inode.ino);
        let limit = at.left();
        let ranges: Vec<_> =
            plan.iter().map(|p| p.file_offset..p.file_offset + p.data.span()).collect();
        let parts =
            join_all(plan.into_iter().map(|p| self.replay_part(chain, inode, p, limit))).await;
        let mut again = Vec::new();
        let mut dead = None;
        for (p, range) in parts.into_iter().zip(ranges) {
            match p {
                Ok(entry) => again.extend(entry),
                // Nothing is forgotten: the next flush finds the same bytes lost.
                Err(e) if e.code == Code::TimedOut => return Err(e),
                Err(e) => {
                    // Where other clients have written since, there is something newer.
                    if e.code != Code::Overtaken {
                        inode.misses(range);
                    }
                    dead = Some(e);
                }
            }
        }
        if let Some(e) = dead {
            inode.fail(Error {
                code: Code::Io,
                ..e.context("unstable bytes could not be written again")
            });
        }
        let mut u = self.unstable.lock();
        u.replayed(chain, inode.ino, mark);
        for (order, e) in again {
            u.add_again(chain, order, e);
        }
        Ok(())
    }

    /// Sends one lost part again. Returns the entry to keep if the part is still not stable.
    fn replay_part<'a>(
        self: &'a Arc<Self>,
        chain: ChainId,
        inode: &'a Arc<Inode>,
        p: Replay<Hold>,
        limit: Duration,
    ) -> BoxFuture<'a, Result<Option<Kept>>> {
        Box::pin(async move {
            let lost = || Error::new(Code::Io, "the session was lost");
            let session =
                self.metadata.current_session().filter(|s| s.id == p.session).ok_or_else(lost)?;
            let seq = p.seq.unwrap_or_else(|| session.take_data_numbers(1));
            let mut at = self.shared.attempts_for("repeating a write", limit);
            let mut u = Update {
                inode,
                chain,
                chunk: p.chunk,
                offset: p.offset,
                data: p.data,
                session: p.session,
                seq,
                cap: None,
                flags: FLAG_REPLAY,
                version: p.version,
                copies: Copies::default(),
            };
            let r = self.update(&mut u, &mut at).await?;
            let mut entry = Entry {
                kept: None,
                chunk: p.chunk,
                offset: p.offset,
                file_offset: p.file_offset,
                data: u.data,
                session: p.session,
                seq,
                version: r.version,
                boot_ids: r.boot_ids,
                at_ms: self.shared.env.boot().as_millis() as u64,
                tag: p.tag,
            };
            if r.stable {
                return Ok(None);
            }
            self.keep_write(chain, p.order, &mut entry);
            Ok(Some((p.order, entry)))
        })
    }
}
