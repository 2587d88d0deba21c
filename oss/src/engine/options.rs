//! Limits of an engine.

use strake_store::fjall_store::DEFAULT_CACHE;

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
