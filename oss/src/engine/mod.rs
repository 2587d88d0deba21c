//! The chunk store of one target: chunks on a [`Device`], found through a table in a [`MetaStore`].
//!
//! Every update is copy-on-write: [`Engine::stage`] puts bytes into fresh device blocks,
//! [`Engine::commit`] makes the table in memory name them, [`Engine::flush`] makes that durable.
//! Crash safety rests on the order of a flush:
//!
//! 1. freeze the records changed since the last flush;
//! 2. flush the device: every byte those records name is durable;
//! 3. commit the records to the store in one batch, and sync it;
//! 4. mark on the device, without waiting, how far the table was synced;
//! 5. only now may the blocks that the batch replaced be used again, when no reader still holds
//!    them.
//!
//! So the durable table never names bytes that are not durable, and after a power loss each chunk
//! is as it was at some flush. Formats are in `docs/formats.md`, "Chunk store".
//!
//! | file | idea |
//! |---|---|
//! | `stage.rs` | from an update to staged blocks and the records that will name them |
//! | `read.rs` | consistent views of a chunk, verified reads |
//! | `check.rs`, `position.rs` | looking for decay, and how far the scrub got |
//! | `list.rs` | listings, extents, forgetting tombstones |
//! | `flush.rs` | the order above, shared by concurrent callers; reuse of space |
//! | `open.rs` | formatting, and rebuilding the allocator from the table |
//! | `target.rs` | the folder of a target: device, table, lock |
//! | `used.rs` | which chains ever stored something here, in case the table is lost |
//! | `record.rs`, `superblock.rs` | the formats |
//! | `table_digest.rs` | how a table that lost synced changes is noticed |
//! | `overlay.rs`, `alloc.rs` | the table's part in memory; free space |
//! | `reserve.rs` | free space that is kept from new data |
//! | `grants.rs` | free space that is promised to sessions |

mod alloc;
mod chain_views;
mod check;
mod findings;
mod flush;
mod grants;
mod list;
mod open;
mod overlay;
mod position;
mod read;
pub mod record;
mod reserve;
mod stage;
pub mod superblock;
pub mod table_digest;
mod target;
#[cfg(test)]
mod tests;
mod used;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use alloc::{Allocator, Extent};
use chain_views::ChainView;
pub use check::{Look, STEP};
pub use findings::Found;
pub use grants::Ask;
use grants::Grants;
pub use list::Forgot;
use overlay::Overlay;
use parking_lot::Mutex;
pub use position::Position;
use record::{Header, Segment};
use reserve::Reserve;
pub use stage::Staged;
use strake_fabric::{Buf, Pool};
pub use strake_proto::data::ListEntry;
use strake_proto::{
    ChainId, ChunkId, Code, Error, Result,
    data::{Version, Writer},
};
use strake_store::{MetaStore, fjall_store::DEFAULT_CACHE};
use superblock::Superblock;
use table_digest::TableDigest;
use target::Folder;
#[cfg(test)]
pub(crate) use target::open_device;
pub use target::{
    Damaged, Opened, TargetLayout, announce_device, create_target_dir, open_target_dir,
};
use used::Used;

use crate::device::{BLOCK, Device};

/// A chunk on this target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub chain: ChainId,
    pub chunk: ChunkId,
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "chunk {} of chain {}", self.chunk, self.chain)
    }
}

/// A chunk's properties, without its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkMeta {
    pub version: Version,
    /// Bytes; 0 for a tombstone.
    pub len: u32,
    /// Removed; kept so that resync knows the removal's version.
    pub tombstone: bool,
    /// The last [`KEPT_WRITERS`](strake_proto::data::KEPT_WRITERS) changes, oldest first.
    pub writers: Vec<Writer>,
}

/// A change to a chunk.
#[derive(Clone, Debug)]
pub enum Update {
    /// Puts `data` at `offset`, extending the chunk; a gap reads as zeros. `sums`: CRC32C per 4 KiB
    /// block of the chunk touched, see [`strake_proto::checksum`].
    Write { offset: u32, data: Vec<Buf>, sums: Vec<u32> },
    /// Makes `[offset, offset + len)` zeros up to the chunk's end: whole blocks become holes. A
    /// chunk that does not exist becomes a tombstone.
    Punch { offset: u32, len: u32 },
    /// Truncates to `len` bytes if longer.
    Truncate { len: u32 },
    /// Removes the bytes; the version stays as a tombstone.
    Remove,
    /// Writes the whole chunk anew, with the contents after an update that this one stands for.
    /// Earlier writers stay. The header must be intact.
    Rewrite { data: Vec<Buf>, sums: Vec<u32> },
    /// Writes the whole chunk anew, whatever its state, even damaged. Blocks in `damaged` (bytes
    /// from the start of the chunk) have no good copy anywhere: they are stored as damaged blocks
    /// and cannot be read. The checksum stored for such a block is the complement of that of its
    /// bytes. The caller picks the bytes so that it is the checksum of the lost block, which is
    /// then recognized when it turns up; if that checksum is unknown, the bytes are zeros.
    Replace { data: Vec<Buf>, sums: Vec<u32>, tombstone: bool, damaged: Vec<Range<u32>> },
}

/// What a read found.
#[derive(Clone, Debug, Default)]
pub struct ReadOut {
    /// Segments in order, `len` bytes together.
    pub data: Vec<Buf>,
    /// One per 4 KiB block of the chunk touched by `[offset, offset + len)`.
    pub sums: Vec<u32>,
    /// How many of the requested bytes exist.
    pub len: u32,
    pub version: Version,
}

/// Which cluster and node a target belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetIdentity {
    /// All zeros until the target has joined a cluster.
    pub fs_uuid: [u8; 16],
    pub target_uuid: [u8; 16],
    /// [`strake_proto::ids::TARGET_UNASSIGNED`] until the mds has assigned one.
    pub target_id: u32,
    /// Name of the node it belongs to, at most 255 bytes.
    pub node: String,
    /// Incarnation of the metadata group that it last registered with. Only this group, or one of a
    /// later incarnation, may use the target.
    pub incarnation: u64,
}

/// Limits of an engine.
#[derive(Clone, Debug)]
pub struct Options {
    /// Changed records kept in memory before updates wait for a flush (a record is up to about 2
    /// KiB).
    pub dirty_records: usize,
    /// Staged bytes not flushed before updates wait for a flush.
    pub dirty_bytes: u64,
    /// Unchanged records cached.
    pub cached_records: usize,
    /// Bytes of memory for blocks that the metadata store caches.
    pub store_cache: u64,
    /// Tell the device which blocks are free.
    pub discard: bool,
    /// Commit to the store on tokio's blocking threads: for a store that waits for a disk. Off in
    /// the simulator.
    pub offload_store: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            dirty_records: 80_000,
            dirty_bytes: 256 << 20,
            cached_records: 80_000,
            store_cache: DEFAULT_CACHE,
            discard: true,
            offload_store: false,
        }
    }
}

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
    pub reads: u64,
    pub writes: u64,
    pub read_bytes: u64,
    pub write_bytes: u64,
    /// Blocks and records found damaged.
    pub checksum_errors: u64,
}

#[derive(Default)]
struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    read_bytes: AtomicU64,
    write_bytes: AtomicU64,
    damaged: AtomicU64,
}

fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// The part of [`State`] that the running flush has taken.
#[derive(Default)]
struct InFlush {
    freed: Vec<Extent>,
    committed: u64,
    dirty_bytes: u64,
}

/// Everything that changes, under one lock that is never held over I/O.
struct State {
    headers: Overlay<Key, Header>,
    segments: Overlay<(Key, u8), Segment>,
    alloc: Allocator,
    grants: Grants,
    /// Blocks that the commit of updates in progress will give back.
    replacing: u64,
    /// Segments found damaged when the target was opened. Their blocks were counted as free, so
    /// they stay damaged until they are written anew, even if a later read succeeds.
    lost: BTreeSet<(Key, u8)>,
    /// Chunks with an update between stage and commit.
    staging: BTreeSet<Key>,
    /// Blocks replaced by commits since the last flush began, or whose write was abandoned.
    freed: Vec<Extent>,
    /// Freed blocks whose flush is done, by the epoch of that flush; see [`State::epoch`].
    reclaim: VecDeque<(u64, Vec<Extent>)>,
    /// Counts flushes. A reader that began in epoch `e` may look at blocks freed in epoch `e` or
    /// later.
    epoch: u64,
    /// Active readers by the epoch they began in.
    readers: BTreeMap<u64, usize>,
    /// Number of commits so far, and of those that are durable.
    committed: u64,
    flushed: u64,
    /// Staged bytes that are not durable yet.
    dirty_bytes: u64,
    in_flush: InFlush,
    chunks: u64,
    /// Blocks stored for each chain that has any.
    stored: BTreeMap<ChainId, u64>,
    /// Digest of the table as it was last synced.
    digest: TableDigest,
    /// Set when durability can no longer be promised; nothing is changed any more.
    failed: Option<Error>,
}

impl State {
    /// A chunk of the chain got `more` new blocks and lost `fewer` old ones.
    fn note_stored(&mut self, chain: ChainId, more: u64, fewer: u64) {
        let blocks = self.stored.entry(chain).or_default();
        *blocks = (*blocks + more).saturating_sub(fewer);
        if *blocks == 0 {
            self.stored.remove(&chain);
        }
    }
}

struct Shared {
    device: Arc<dyn Device>,
    table: Arc<dyn MetaStore>,
    pool: Pool,
    options: Options,
    reserve: Reserve,
    /// Blocks that chunks can use.
    capacity: u64,
    superblock: tokio::sync::Mutex<Superblock>,
    identity: Mutex<TargetIdentity>,
    chain_views: Mutex<BTreeMap<ChainId, ChainView>>,
    state: Mutex<State>,
    /// Held by the running flush.
    gate: Arc<tokio::sync::Mutex<()>>,
    /// Overwrites that found no space: how many there are, and a lock for the one whose turn it is.
    overwriters: AtomicUsize,
    overwriter: tokio::sync::Mutex<()>,
    /// Notified when the last reader of an epoch ends, and, for overwriters, when another ends.
    reader_done: tokio::sync::Notify,
    counters: Counters,
    /// Zeros that holes are read from.
    zeros: Buf,
    /// The target's locked folder, if it has one.
    folder: Option<Folder>,
    used: Option<Used>,
}

/// The chunk store of one target. See the module documentation.
///
/// At most one update per chunk may be staged at a time (another is refused with `Busy`); reads run
/// at any time.
pub struct Engine {
    shared: Arc<Shared>,
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
                "a target keeps its uuid for life; format it anew instead",
            ));
        }
        let next = Superblock { sequence: current.sequence + 1, identity: id.clone(), ..*current };
        next.write(&*self.shared.device, &self.shared.pool).await?;
        *current = next;
        *self.shared.identity.lock() = id;
        Ok(())
    }

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
            .ok_or_else(|| Error::new(Code::Stale, "a later question for space was answered"))
    }

    /// Frees grants that have expired by `now`.
    pub fn expire_grants(&self, now: Duration) {
        self.shared.state.lock().grants.expire(now);
    }

    pub fn device(&self) -> &Arc<dyn Device> {
        &self.shared.device
    }

    /// Whether commits wait for a flush.
    pub fn is_dirty(&self) -> bool {
        let s = self.shared.state.lock();
        s.committed > s.flushed
    }
}

fn damaged(key: &Key) -> Error {
    Error::new(
        Code::Corrupt,
        format!("{key}: its record in the chunk table is damaged; a good copy must replace it"),
    )
}
