//! The engine of a target as its callers see it. `open.rs`, `read.rs`, `stage.rs`, `flush.rs`,
//! `check.rs` and `list.rs` add the operations.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use strake_proto::{ChainId, Code, Error, Result};

use super::{
    chunk::{ChunkMeta, Key, damaged},
    grants::Ask,
    notes::TargetNotes,
    shared::Shared,
    superblock::{Superblock, TargetIdentity},
};
use crate::device::{BLOCK, Device};

/// Space and counters. Bytes, except where said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// What chunks can use: without the reserves for truncating and overwriting.
    pub capacity: u64,
    /// Allocated, including what a flush has not yet given back.
    pub used: u64,
    /// Not used, but granted to sessions.
    pub granted: u64,
    /// Chunks that are no tombstones.
    pub chunks: u64,
    /// Reads of chunks since the target was opened.
    pub reads: u64,
    /// Writes to the device since the target was opened.
    pub writes: u64,
    /// Bytes returned by reads.
    pub read_bytes: u64,
    /// Bytes written to the device.
    pub write_bytes: u64,
    /// Blocks and records found damaged.
    pub checksum_errors: u64,
}

/// The chunk store of one target. See the module documentation.
///
/// At most one update per chunk may be staged at a time (another is refused with `Busy`); reads run
/// at any time.
pub struct Engine {
    pub(super) shared: Arc<Shared>,
}

impl Engine {
    /// Metadata of a chunk; `None` if it was never written or its tombstone is forgotten. `Corrupt`
    /// if its record is damaged.
    pub fn meta(&self, key: &Key) -> Result<Option<ChunkMeta>> {
        match self.shared.header(key)? {
            Some(h) if h.damaged => Err(damaged(key)),
            h => Ok(h.map(|h| h.meta.clone())),
        }
    }

    /// Which cluster and node the target belongs to, as its superblock says.
    pub fn identity(&self) -> TargetIdentity {
        self.shared.identity.lock().clone()
    }

    /// Writes the superblock durably. The target uuid cannot change, because the table holds it,
    /// too.
    pub async fn set_identity(&self, id: TargetIdentity) -> Result<()> {
        let mut current = self.shared.superblock.lock().await;
        if id.target_uuid != current.identity.target_uuid {
            return Err(Error::new(
                Code::Inval,
                "a target keeps its uuid for life; format it again instead",
            ));
        }
        let sequence = current.sequence.checked_add(1).ok_or_else(|| {
            Error::new(Code::Corrupt, "the superblock's sequence number is the last one")
        })?;
        let next = Superblock { sequence, identity: id.clone(), ..*current };
        next.write(&*self.shared.device, &self.shared.pool).await?;
        *current = next;
        *self.shared.identity.lock() = id;
        Ok(())
    }

    /// Space in use and counters, as of now.
    pub fn usage(&self) -> Usage {
        let (s, c) = (self.shared.state.lock(), &self.shared.counters);
        let waiting: u64 = s.reclaim.iter().flat_map(|(_, list)| list).map(|e| e.count).sum();
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        Usage {
            capacity: self.shared.capacity.saturating_sub(self.shared.reserve.total()) * BLOCK,
            used: (self.shared.capacity - s.alloc.free_blocks()).saturating_sub(waiting) * BLOCK,
            granted: s.grants.total() * BLOCK,
            chunks: s.chunks,
            reads: get(&c.reads),
            writes: get(&c.writes),
            read_bytes: get(&c.read_bytes),
            write_bytes: get(&c.write_bytes),
            checksum_errors: get(&c.damaged),
        }
    }

    /// Bytes that the chunks of each chain take, in order of the chains. Chains without any are
    /// left out.
    pub fn stored(&self) -> Vec<(ChainId, u64)> {
        self.shared
            .state
            .lock()
            .stored
            .iter()
            .map(|(chain, blocks)| (*chain, blocks * BLOCK))
            .collect()
    }

    /// Keeps space free for the updates of a session. Returns how many blocks are granted to it
    /// until [`strake_proto::data::GRANT_TERM`] from `now` (boot clock). `Stale`: a newer request
    /// of the session was answered already.
    pub fn grant(&self, now: Duration, ask: Ask) -> Result<u64> {
        let spare = self.shared.device.spare() / BLOCK;
        let mut s = self.shared.state.lock();
        let free = s.alloc.free_blocks().saturating_sub(self.shared.reserve.total()).min(spare);
        s.grants
            .ask(now, ask, free)
            .ok_or_else(|| Error::new(Code::Stale, "a later request for space was answered"))
    }

    /// Frees grants that have expired by `now`.
    pub fn expire_grants(&self, now: Duration) {
        self.shared.state.lock().grants.expire(now);
    }

    /// What the server notes about this target in the chunk table, beside the chunks.
    pub fn notes(&self) -> &TargetNotes {
        &self.shared.notes
    }

    /// The device that the chunks are on.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.shared.device
    }

    /// Whether commits wait for a flush.
    pub fn is_dirty(&self) -> bool {
        let s = self.shared.state.lock();
        s.committed > s.flushed
    }
}
