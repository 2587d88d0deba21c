//! What all parts of an engine share: its device and table, and everything that changes.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use strake_fabric::{Buf, Pool};
use strake_proto::{ChainId, Error};
use strake_store::MetaStore;

use super::{
    alloc::{Allocator, Extent},
    chunk::Key,
    folder::Folder,
    grants::Grants,
    notes::TargetNotes,
    options::Options,
    overlay::Overlay,
    record::{Header, Segment},
    reserve::Reserve,
    superblock::{Superblock, TargetIdentity},
    table_digest::TableDigest,
    used::Used,
};
use crate::device::Device;

/// What was done since the target was opened.
#[derive(Default)]
pub(super) struct Counters {
    pub reads: AtomicU64,
    pub writes: AtomicU64,
    pub read_bytes: AtomicU64,
    pub write_bytes: AtomicU64,
    pub damaged: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// The part of [`State`] that the running flush has taken.
#[derive(Default)]
pub(super) struct InFlush {
    pub freed: Vec<Extent>,
    pub committed: u64,
    pub dirty_bytes: u64,
}

/// Everything that changes, under one lock that is never held over I/O.
pub(super) struct State {
    pub headers: Overlay<Key, Header>,
    pub segments: Overlay<(Key, u8), Segment>,
    pub alloc: Allocator,
    pub grants: Grants,
    /// Blocks that the commit of updates in progress will give back.
    pub replacing: u64,
    /// Segments found damaged when the target was opened. Their blocks were counted as free, so
    /// they stay damaged until they are written anew, even if a later read succeeds.
    pub lost: BTreeSet<(Key, u8)>,
    /// Chunks with an update between stage and commit.
    pub staging: BTreeSet<Key>,
    /// Blocks replaced by commits since the last flush began, or whose write was abandoned.
    pub freed: Vec<Extent>,
    /// Freed blocks whose flush is done, by the epoch of that flush; see [`State::epoch`].
    pub reclaim: VecDeque<(u64, Vec<Extent>)>,
    /// Counts flushes. A reader that began in epoch `e` may look at blocks freed in epoch `e` or
    /// later.
    pub epoch: u64,
    /// Active readers by the epoch they began in.
    pub readers: BTreeMap<u64, usize>,
    /// Number of commits so far, and of those that are durable.
    pub committed: u64,
    pub flushed: u64,
    /// Staged bytes that are not durable yet.
    pub dirty_bytes: u64,
    pub in_flush: InFlush,
    pub chunks: u64,
    /// Blocks stored for each chain that has any.
    pub stored: BTreeMap<ChainId, u64>,
    /// Digest of the table as it was last synced.
    pub digest: TableDigest,
    /// Set when durability can no longer be promised; nothing is changed any more.
    pub failed: Option<Error>,
}

impl State {
    /// A chunk of the chain got `more` new blocks and lost `fewer` old ones.
    pub(super) fn note_stored(&mut self, chain: ChainId, more: u64, fewer: u64) {
        let blocks = self.stored.entry(chain).or_default();
        *blocks = (*blocks + more).saturating_sub(fewer);
        if *blocks == 0 {
            self.stored.remove(&chain);
        }
    }
}

/// An engine's parts, which reads and staged updates keep alive.
pub(super) struct Shared {
    pub device: Arc<dyn Device>,
    pub table: Arc<dyn MetaStore>,
    pub pool: Pool,
    pub options: Options,
    pub reserve: Reserve,
    /// Blocks that chunks can use.
    pub capacity: u64,
    pub superblock: tokio::sync::Mutex<Superblock>,
    pub identity: Mutex<TargetIdentity>,
    /// What the server notes in the table beside the chunks.
    pub notes: TargetNotes,
    pub state: Mutex<State>,
    /// Held by the running flush.
    pub gate: Arc<tokio::sync::Mutex<()>>,
    /// Overwrites that found no space: how many there are, and a lock for the one whose turn it is.
    pub overwriters: AtomicUsize,
    pub overwriter: tokio::sync::Mutex<()>,
    /// Notified when the last reader of an epoch ends, and, for overwriters, when another ends.
    pub reader_done: tokio::sync::Notify,
    pub counters: Counters,
    /// Zeros that holes are read from.
    pub zeros: Buf,
    /// The target's locked folder, if it has one.
    pub folder: Option<Folder>,
    pub used: Option<Used>,
}
