//! The embedded ordered key-value store below the mds namespace and the oss chunk table.
//!
//! A commit is atomic and visible at once; it is durable after the next [`MetaStore::sync`]. Two implementations:
//! [`fjall`](fjall_store) on disk, and [`mem`] in memory, which models a crash: what was not synced may be lost, but only a
//! suffix of whole commits.

pub mod fjall_store;
pub mod mem;

use std::ops::Bound;

use bytes::Bytes;
pub use fjall_store::FjallStore;
pub use mem::MemStore;
use strake_proto::Result;

/// Puts and deletes that become visible together, applied in order.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// `None` deletes.
    pub ops: Vec<(Bytes, Option<Bytes>)>,
}

impl Batch {
    pub fn put(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) {
        self.ops.push((key.into(), Some(value.into())));
    }
    pub fn delete(&mut self, key: impl Into<Bytes>) {
        self.ops.push((key.into(), None));
    }
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }
}

pub type Pair = (Bytes, Bytes);
pub type PairIter<'a> = Box<dyn Iterator<Item = Result<Pair>> + Send + 'a>;

/// Reads common to a store and to a frozen view of it. Keys are ordered bytewise.
pub trait Reader: Send + Sync {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>>;
    /// Pairs in key order. Lazy: stop iterating when you have enough.
    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_>;

    /// Pairs whose keys start with `prefix`, in order.
    fn prefix(&self, prefix: &[u8]) -> PairIter<'_> {
        match prefix_end(prefix) {
            Some(end) => self.range(Bound::Included(prefix), Bound::Excluded(&end)),
            None => self.range(Bound::Included(prefix), Bound::Unbounded),
        }
    }
}

pub trait MetaStore: Reader {
    fn commit(&self, batch: Batch) -> Result<()>;
    /// Makes every commit so far durable.
    fn sync(&self) -> Result<()>;
    /// A consistent view that later commits do not change.
    fn snapshot(&self) -> Result<Box<dyn Reader>>;
    /// Bytes on disk, roughly.
    fn disk_bytes(&self) -> u64;
    /// Deletes everything (before a snapshot from a peer is loaded).
    fn clear(&self) -> Result<()>;
}

/// The first key after all keys that start with `prefix`, `None` if there is no such key.
pub fn prefix_end(prefix: &[u8]) -> Option<Vec<u8>> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return Some(end);
        }
    }
    None
}
