//! The store on disk: fjall, a log-structured merge tree with one journal.
//!
//! A commit is written to the journal file (so it survives the process) but not fsynced (so it may not survive the
//! machine); [`sync`](MetaStore::sync) fsyncs the journal. The contents live in one keyspace whose name counts how often
//! the store was cleared: clearing makes the next, empty one in a single durable step and then drops the old one, so that
//! a crash leaves either all of the old contents or none.

use std::{collections::BTreeMap, ops::Bound, path::Path};

use bytes::Bytes;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, LsmError, PersistMode, Readable};
use parking_lot::{Mutex, RwLock};
use strake_proto::{Code, Error, Result};

use crate::{Batch, MetaStore, PairIter, Reader, check_key, is_empty_range};

/// Memory for cached blocks when [`Options`] does not say otherwise.
pub const DEFAULT_CACHE: u64 = 64 << 20;

#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of memory for cached blocks.
    pub cache_bytes: u64,
    /// Bytes of the journal on disk before memtables are forced out; at least 64 MiB.
    pub journal_bytes: u64,
    /// Threads that flush and compact.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options { cache_bytes: DEFAULT_CACHE, journal_bytes: 256 << 20, threads: 2 }
    }
}

/// A [`MetaStore`] in a directory of its own, which it locks while open.
pub struct FjallStore {
    db: Database,
    /// Read-locked by commits, so that none lands in a keyspace that `clear` has already left.
    current: RwLock<Current>,
    /// What made fjall refuse further writes, told again by each refusal.
    cause: Mutex<Option<Error>>,
}

struct Current {
    generation: u64,
    keyspace: Keyspace,
}

impl FjallStore {
    /// Opens or makes the store in `path`. `Busy` if another process has it open.
    pub fn open(path: impl AsRef<Path>) -> Result<FjallStore> {
        FjallStore::open_with(path, &Options::default())
    }

    pub fn open_with(path: impl AsRef<Path>, options: &Options) -> Result<FjallStore> {
        let path = path.as_ref();
        let what = |e: fjall::Error| map_error(&e).context(format!("metadata store {}", path.display()));
        let db = Database::builder(path)
            .cache_size(options.cache_bytes)
            .max_journaling_size(options.journal_bytes.max(64 << 20))
            .worker_threads(options.threads.max(1))
            .open()
            .map_err(what)?;
        let mut generations: Vec<u64> =
            db.list_keyspace_names().iter().filter_map(|n| n.strip_prefix("meta-")?.parse().ok()).collect();
        generations.sort_unstable();
        let generation = generations.pop().unwrap_or(0);
        let keyspace = open_keyspace(&db, generation).map_err(what)?;
        for old in generations {
            // Left by a crash in the middle of `clear`.
            db.delete_keyspace(open_keyspace(&db, old).map_err(what)?).map_err(what)?;
        }
        Ok(FjallStore { db, current: RwLock::new(Current { generation, keyspace }), cause: Mutex::new(None) })
    }

    fn view(&self) -> FjallView {
        let current = self.current.read();
        FjallView { snapshot: self.db.snapshot(), keyspace: current.keyspace.clone() }
    }

    fn failed(&self, e: &fjall::Error) -> Error {
        let error = map_error(e);
        let mut cause = self.cause.lock();
        if matches!(e, fjall::Error::Poisoned) {
            let first = cause.clone().unwrap_or_else(|| Error::new(Code::Io, "a background write failed, see the log"));
            return first.context("metadata store takes no more writes after an error; fix the cause and restart");
        }
        cause.get_or_insert_with(|| error.clone());
        error.context("metadata store")
    }
}

fn open_keyspace(db: &Database, generation: u64) -> fjall::Result<Keyspace> {
    db.keyspace(&format!("meta-{generation}"), KeyspaceCreateOptions::default)
}

/// Keeps the errno where there is one; damage is `Corrupt`.
fn map_error(e: &fjall::Error) -> Error {
    let io = |e: &std::io::Error| {
        let copy = match e.raw_os_error() {
            Some(n) => std::io::Error::from_raw_os_error(n),
            None => std::io::Error::new(e.kind(), e.to_string()),
        };
        Error::from(copy)
    };
    match e {
        fjall::Error::Io(e) | fjall::Error::Storage(LsmError::Io(e)) => io(e),
        fjall::Error::Locked => Error::new(Code::Busy, "another process has it open"),
        fjall::Error::InvalidVersion(_) => Error::new(Code::OpNotSupp, format!("made by another version: {e}")),
        fjall::Error::Storage(_)
        | fjall::Error::JournalRecovery(_)
        | fjall::Error::Decompress(_)
        | fjall::Error::InvalidTrailer
        | fjall::Error::InvalidTag(_)
        | fjall::Error::Unrecoverable => {
            Error::new(Code::Corrupt, format!("damaged ({e}); rebuild this member from its peers"))
        }
        _ => Error::new(Code::Io, e.to_string()),
    }
}

/// The store as it was at one commit.
struct FjallView {
    snapshot: fjall::Snapshot,
    keyspace: Keyspace,
}

impl FjallView {
    fn pairs(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'static> {
        if is_empty_range(from, to) {
            return Box::new(std::iter::empty());
        }
        let pair = |g: fjall::Guard| {
            let (k, v) = g.into_inner().map_err(|e| map_error(&e).context("metadata store"))?;
            Ok((Bytes::copy_from_slice(&k), Bytes::copy_from_slice(&v)))
        };
        Box::new(self.snapshot.range::<&[u8], _>(&self.keyspace, (from, to)).map(pair))
    }
}

impl Reader for FjallView {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        let value = self.snapshot.get(&self.keyspace, key).map_err(|e| map_error(&e).context("metadata store"))?;
        Ok(value.map(|v| Bytes::copy_from_slice(&v)))
    }

    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        self.pairs(from, to)
    }
}

impl Reader for FjallStore {
    // Through a snapshot, because fjall's direct reads can see a batch while it is being applied.
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.view().get(key)
    }

    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        self.view().pairs(from, to)
    }
}

impl MetaStore for FjallStore {
    fn commit(&self, batch: Batch) -> Result<()> {
        // All operations of a batch get one sequence number, so of several on one key only the last may go in.
        let mut ops = BTreeMap::new();
        for (key, value) in &batch.ops {
            check_key(key)?;
            ops.insert(&key[..], value);
        }
        let current = self.current.read();
        let mut b = self.db.batch().durability(Some(PersistMode::Buffer));
        for (key, value) in ops {
            match value {
                Some(v) => b.insert(&current.keyspace, key, &v[..]),
                None => b.remove(&current.keyspace, key),
            }
        }
        b.commit().map_err(|e| self.failed(&e))
    }

    fn sync(&self) -> Result<()> {
        self.db.persist(PersistMode::SyncAll).map_err(|e| self.failed(&e))
    }

    fn snapshot(&self) -> Result<Box<dyn Reader>> {
        Ok(Box::new(self.view()))
    }

    fn disk_bytes(&self) -> u64 {
        self.db.disk_space().unwrap_or(0)
    }

    fn clear(&self) -> Result<()> {
        let mut current = self.current.write();
        let generation = current.generation + 1;
        let keyspace = open_keyspace(&self.db, generation).map_err(|e| self.failed(&e))?;
        let old = std::mem::replace(&mut *current, Current { generation, keyspace });
        self.db.delete_keyspace(old.keyspace).map_err(|e| self.failed(&e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errno_survives_and_damage_is_named() {
        let full = || std::io::Error::from_raw_os_error(28);
        assert_eq!(map_error(&fjall::Error::Io(full())).code, Code::NoSpc);
        assert_eq!(map_error(&fjall::Error::Storage(LsmError::Io(full()))).code, Code::NoSpc);
        assert_eq!(map_error(&fjall::Error::Unrecoverable).code, Code::Corrupt);
        assert_eq!(map_error(&fjall::Error::Locked).code, Code::Busy);
    }

    #[test]
    fn a_refusal_after_a_full_disk_still_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let s = FjallStore::open(dir.path()).unwrap();
        assert_eq!(s.failed(&fjall::Error::Poisoned).code, Code::Io);
        s.failed(&fjall::Error::Io(std::io::Error::from_raw_os_error(28)));
        assert_eq!(s.failed(&fjall::Error::Poisoned).code, Code::NoSpc);
    }

    #[test]
    fn an_interrupted_clear_is_finished_at_open() {
        let dir = tempfile::tempdir().unwrap();
        let s = FjallStore::open(dir.path()).unwrap();
        let mut b = Batch::default();
        b.put("a", "1");
        s.commit(b).unwrap();
        s.sync().unwrap();
        open_keyspace(&s.db, 1).unwrap();
        drop(s);
        let s = FjallStore::open(dir.path()).unwrap();
        assert_eq!(s.prefix(b"").count(), 0);
        assert_eq!(s.db.keyspace_count(), 1);
    }

    #[test]
    fn a_second_open_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let _s = FjallStore::open(dir.path()).unwrap();
        let e = FjallStore::open(dir.path()).err().unwrap();
        assert_eq!(e.code, Code::Busy, "{e}");
    }
}
