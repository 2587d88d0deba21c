//! Making commits durable, and giving replaced blocks back afterwards. The module documentation of
//! [`engine`](super) gives the order of steps.

use std::sync::Arc;

use strake_proto::{Code, Error, Result};
use strake_store::Batch;
use tokio::sync::OwnedMutexGuard;

use super::{
    alloc::{Extent, coalesce},
    api::Engine,
    record::{self, TABLE_DIGEST_KEY, header_key, segment_key},
    shared::{Shared, State},
    table_digest::{Mark, TableDigest},
};
use crate::device::BLOCK;

/// Shorter runs of free blocks are not discarded on the device.
const DISCARD_BLOCKS: u64 = 16;

impl State {
    /// The error if nothing may be changed any more.
    pub(super) fn check(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    pub(super) fn give_back(&mut self, e: Extent) {
        if !self.alloc.free(e) {
            // Losing space until the target is opened again is better than using it twice.
            tracing::error!(
                "blocks {}+{} were freed twice; this is a bug, please report it",
                e.start,
                e.count
            );
            debug_assert!(false, "double free of {e:?}");
        }
    }

    /// Ends a flush that did not reach the store: the records it froze are dirty again.
    fn abort(&mut self) {
        self.headers.abort();
        self.segments.abort();
        let freed = std::mem::take(&mut self.in_flush.freed);
        self.freed.extend(freed);
    }
}

impl Engine {
    /// Everything committed before the call is durable when this returns. Concurrent callers share
    /// one flush.
    pub async fn flush(&self) -> Result<()> {
        self.shared.flush().await
    }
}

impl Shared {
    async fn flush(self: &Arc<Self>) -> Result<()> {
        let want = self.state.lock().committed;
        let gate = self.gate.clone().lock_owned().await;
        if self.state.lock().flushed >= want {
            return self.state.lock().check();
        }
        self.flush_with(gate).await
    }

    /// Flushes even if nothing was committed, to give back the space of abandoned writes, too.
    pub(super) async fn flush_now(self: &Arc<Self>) -> Result<()> {
        let gate = self.gate.clone().lock_owned().await;
        self.flush_with(gate).await
    }

    /// Backpressure: waits for a flush while too much is unflushed.
    pub(super) async fn throttle(self: &Arc<Self>) -> Result<()> {
        let o = &self.options;
        let full = {
            let s = self.state.lock();
            s.check()?;
            s.headers.dirty_len() + s.segments.dirty_len() >= o.dirty_records
                || s.dirty_bytes >= o.dirty_bytes
        };
        if full { self.flush().await } else { Ok(()) }
    }

    async fn flush_with(self: &Arc<Self>, gate: OwnedMutexGuard<()>) -> Result<()> {
        {
            let mut s = self.state.lock();
            s.check()?;
            s.abort(); // left by a flush whose caller was dropped
            s.headers.begin();
            s.segments.begin();
            s.in_flush.freed = std::mem::take(&mut s.freed);
            s.in_flush.committed = s.committed;
            s.in_flush.dirty_bytes = s.dirty_bytes;
        }
        if let Err(e) = self.device.flush().await {
            // The kernel reports a lost write once; a second flush would claim success.
            let e = Error::new(
                Code::Io,
                format!("flush failed ({e}); unflushed writes may be lost, restart this target"),
            );
            let mut s = self.state.lock();
            s.abort();
            s.failed = Some(e.clone());
            return Err(e);
        }
        let done = if self.options.offload_store {
            let shared = self.clone();
            // The task keeps the gate: even if the caller is dropped, no other flush starts before
            // this one has ended.
            let task = tokio::task::spawn_blocking(move || shared.commit_frozen(gate));
            task.await.map_err(|e| Error::new(Code::Io, format!("flush: {e}")))?
        } else {
            self.commit_frozen(gate)
        };
        done?;
        self.reclaim().await
    }

    /// Takes blocks that no durable record and no reader uses, discards them, then frees them.
    async fn reclaim(self: &Arc<Self>) -> Result<()> {
        let mut back = GiveBack { shared: self.clone(), extents: Vec::new() };
        {
            let mut s = self.state.lock();
            let oldest = s.readers.keys().next().copied().unwrap_or(u64::MAX);
            while s.reclaim.front().is_some_and(|(epoch, _)| *epoch < oldest) {
                back.extents
                    .extend(s.reclaim.pop_front().map(|(_, list)| list).unwrap_or_default());
            }
        }
        back.extents = coalesce(std::mem::take(&mut back.extents));
        if self.options.discard {
            for e in back.extents.iter().filter(|e| e.count >= DISCARD_BLOCKS) {
                if let Err(e) = self.device.discard(e.start * BLOCK, e.count * BLOCK).await {
                    tracing::warn!("{}: discard: {e}", self.device.name());
                    break;
                }
            }
        }
        let mut s = self.state.lock();
        for e in back.extents.drain(..) {
            s.give_back(e);
        }
        Ok(())
    }
}

/// Blocks being discarded. If the discard is abandoned, they wait for the next flush, which waits
/// for the discard.
struct GiveBack {
    shared: Arc<Shared>,
    extents: Vec<Extent>,
}

impl Drop for GiveBack {
    fn drop(&mut self) {
        if !self.extents.is_empty() {
            self.shared.state.lock().freed.append(&mut self.extents);
        }
    }
}

impl Shared {
    /// Steps 3 to 5 of a flush.
    fn commit_frozen(&self, _gate: OwnedMutexGuard<()>) -> Result<()> {
        let mut batch = self.frozen();
        let changed = !batch.is_empty();
        let mut digest = self.state.lock().digest;
        if changed {
            if let Err(e) =
                self.sum_up(&mut batch, &mut digest).and_then(|()| self.table.commit(batch))
            {
                self.state.lock().abort();
                return Err(e.context("chunk table"));
            }
            // The next flush continues from what the table holds, durable or not.
            self.state.lock().digest = digest;
            if let Err(e) = self.table.sync() {
                if e.code == Code::NoSpc {
                    // The store did not try, so nothing is lost: the next flush commits the same
                    // records again.
                    self.state.lock().abort();
                    return Err(e.context("chunk table"));
                }
                let m = format!(
                    "chunk table: sync failed ({e}); unflushed writes may be lost, restart this target"
                );
                let mut s = self.state.lock();
                s.abort();
                s.failed = Some(Error::new(Code::Io, m));
                return s.check();
            }
            Mark { uuid: self.identity.lock().target_uuid, flushes: digest.flushes }
                .send(&*self.device, &self.pool);
        }
        let mut s = self.state.lock();
        s.digest = digest;
        s.headers.end();
        s.segments.end();
        s.flushed = s.in_flush.committed;
        debug_assert!(s.flushed <= s.committed, "more is durable than was committed");
        s.dirty_bytes -= s.in_flush.dirty_bytes;
        let (epoch, freed) = (s.epoch, std::mem::take(&mut s.in_flush.freed));
        if !freed.is_empty() {
            s.reclaim.push_back((epoch, freed));
        }
        s.epoch += 1;
        Ok(())
    }

    /// Adds to the batch the digest of the table with the batch applied.
    fn sum_up(&self, batch: &mut Batch, digest: &mut TableDigest) -> Result<()> {
        for (key, new) in &batch.ops {
            let old = match self.table.get(key) {
                // A store that met a full disk may be closed until the next commit opens it again.
                Err(e) if e.code == Code::NoSpc => {
                    self.table.commit(Batch::default())?;
                    self.table.get(key)?
                }
                other => other?,
            };
            if let Some(old) = old {
                // The old value has decayed since it was added: its share of the digest is unknown.
                digest.unsure |= record::unseal(key, &old).is_err();
                digest.remove(key, &old);
            }
            if let Some(new) = new {
                digest.add(key, new);
            }
        }
        digest.flushes = digest.flushes.saturating_add(1);
        batch.put(TABLE_DIGEST_KEY, digest.encode());
        Ok(())
    }

    fn frozen(&self) -> Batch {
        let (headers, segments) = {
            let s = self.state.lock();
            (s.headers.flushing(), s.segments.flushing())
        };
        let mut batch = Batch::default();
        for (key, header) in headers.iter() {
            let k = header_key(key);
            match header {
                Some(h) => batch.put(k.clone(), h.encode(&k)),
                None => batch.delete(k),
            }
        }
        for ((key, n), segment) in segments.iter() {
            let k = segment_key(key, *n);
            match segment {
                Some(v) => batch.put(k.clone(), v.encode(&k)),
                None => batch.delete(k),
            }
        }
        batch
    }
}
