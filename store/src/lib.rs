//! The embedded ordered key-value store below the mds namespace and the oss chunk table.
//!
//! A commit is atomic and visible at once; it is durable after the next [`MetaStore::sync`]. Two
//! implementations: [`fjall`](fjall_store) on disk, and [`mem`] in memory, which models a crash:
//! what was not synced may be lost, but only a suffix of whole commits.

#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

pub mod fjall_store;
mod folder;
mod journal;
mod manifest;
pub mod mem;

use std::ops::Bound;

use bytes::Bytes;
pub use fjall_store::FjallStore;
pub use folder::make_folder;
pub use mem::{Fault, MemStore};
use strake_proto::{Code, Error, Result};

/// Longest key, in bytes. Keys are not empty.
pub const MAX_KEY: usize = 65_535;

/// Puts and deletes that become visible together, applied in order: the last one on a key counts.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// `None` deletes.
    pub ops: Vec<(Bytes, Option<Bytes>)>,
}

impl Batch {
    /// Sets the value of a key.
    pub fn put(&mut self, key: impl Into<Bytes>, value: impl Into<Bytes>) {
        self.ops.push((key.into(), Some(value.into())));
    }
    /// Removes a key; none is no error.
    pub fn delete(&mut self, key: impl Into<Bytes>) {
        self.ops.push((key.into(), None));
    }
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }
}

/// A key and its value.
pub type Pair = (Bytes, Bytes);
/// Pairs in key order; an error stands for one that cannot be read.
pub type PairIter<'a> = Box<dyn Iterator<Item = Result<Pair>> + Send + 'a>;

/// `EINVAL` for a key that no store can hold.
pub fn check_key(key: &[u8]) -> Result<()> {
    if key.is_empty() || key.len() > MAX_KEY {
        return Err(Error::new(
            Code::Inval,
            format!("store keys have 1 to {MAX_KEY} bytes, not {}", key.len()),
        ));
    }
    Ok(())
}

/// Whether no key can lie between the bounds (also when they are the wrong way round).
fn is_empty_range(from: Bound<&[u8]>, to: Bound<&[u8]>) -> bool {
    use Bound::*;
    match (from, to) {
        (Unbounded, _) | (_, Unbounded) => false,
        (Included(a), Included(b)) => a > b,
        (Included(a) | Excluded(a), Included(b) | Excluded(b)) => a >= b,
    }
}

/// Reads common to a store and to a frozen view of it. Keys are ordered bytewise.
pub trait Reader: Send + Sync {
    /// The value of a key; `None`: it has none. `Corrupt`, `Io`: it cannot be read.
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>>;
    /// Pairs in key order. Lazy: stop iterating when you have enough.
    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_>;

    /// Pairs whose keys start with `prefix`, in key order.
    fn prefix(&self, prefix: &[u8]) -> PairIter<'_> {
        match prefix_end(prefix) {
            Some(end) => self.range(Bound::Included(prefix), Bound::Excluded(&end)),
            None => self.range(Bound::Included(prefix), Bound::Unbounded),
        }
    }
}

/// A store that can be changed.
pub trait MetaStore: Reader {
    /// Makes a batch visible, all or nothing. It survives the process at once, the machine after
    /// [`MetaStore::sync`]. `NoSpc` when the disk is full: nothing changed, reads still work, and a
    /// later commit succeeds when there is space again. `Inval` for a key that is empty or longer
    /// than [`MAX_KEY`].
    fn commit(&self, batch: Batch) -> Result<()>;
    /// Makes every commit so far durable.
    fn sync(&self) -> Result<()>;
    /// A consistent view that later commits do not change.
    fn snapshot(&self) -> Result<Box<dyn Reader>>;
    /// Bytes on disk, roughly.
    fn disk_bytes(&self) -> u64;
    /// Free bytes of the file system below for this process; `u64::MAX` if there is no such limit.
    fn free_bytes(&self) -> u64 {
        u64::MAX
    }
    /// Deletes everything (before a snapshot from a peer is loaded). Earlier snapshots keep
    /// their view. `Busy` if the store is damaged and still being read: try again.
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
