//! The store on disk: fjall, a log-structured merge tree with one journal.
//!
//! A commit is written to the journal file, so it survives the process. It is not fsynced, so it
//! may not survive the machine; [`sync`](MetaStore::sync) fsyncs the journal. The contents live in
//! one keyspace whose name counts how often the store was cleared. Clearing makes the next, empty
//! keyspace in a single durable step and then drops the old one, so a crash leaves either all of
//! the old contents or none.
//!
//! fjall takes no more writes after one that failed. If the cause was a full disk, the next commit
//! that finds space again reopens the store; until then reads continue on the open one. A failed
//! commit may still reach the journal when fjall closes, so after reopening, the earlier values of
//! its keys are written back first. If the cause was damage, or a read found some, only clearing
//! helps: it removes all files, fjall's own lists included, and makes an empty store.

use std::{
    collections::BTreeMap,
    fs::{self, File, TryLockError},
    io::ErrorKind,
    ops::Bound,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use fjall::{Database, Keyspace, KeyspaceCreateOptions, LsmError, PersistMode, Readable};
use parking_lot::RwLock;
use strake_proto::{Code, Error, Result};

use crate::{Batch, MetaStore, PairIter, Reader, check_key, is_empty_range, journal, manifest};

/// Memory for cached blocks when [`Options`] does not say otherwise.
pub const DEFAULT_CACHE: u64 = 64 << 20;
/// A store that met a full disk is not reopened with less free space than this, in bytes.
const REOPEN_ROOM: u64 = 1 << 20;
/// fjall does not report why a background write failed. With less free space than this, the cause
/// is taken to be a full disk. With more, a full disk that has space again is assumed, but at most
/// once per [`UNKNOWN_AGAIN`].
const LITTLE: u64 = 1 << 30;
const UNKNOWN_AGAIN: Duration = Duration::from_secs(60);
/// After a failed flush or compaction, space may still be short. The store is reopened only when
/// so many more bytes are free, or after [`BACKGROUND_PAUSE`].
const MORE: u64 = 64 << 20;
const BACKGROUND_PAUSE: Duration = Duration::from_secs(10);

/// Limits of a store.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of memory for cached blocks.
    pub cache_bytes: u64,
    /// Bytes of the journal on disk before memtables are forced out; at least 64 MiB.
    pub journal_bytes: u64,
    /// Bytes at which a table in memory is written to disk; fixed when the store is made.
    pub memtable_bytes: u64,
    /// Threads that flush and compact.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            cache_bytes: DEFAULT_CACHE,
            journal_bytes: 256 << 20,
            memtable_bytes: 64 << 20,
            threads: 2,
        }
    }
}

/// A [`MetaStore`] in a directory of its own, which it locks while open.
pub struct FjallStore {
    path: PathBuf,
    options: Options,
    /// Read-locked by commits, so that none lands in a keyspace that `clear` has already left.
    state: RwLock<State>,
}

struct State {
    /// `None` if reopening failed; the next commit tries again.
    open: Option<Arc<Open>>,
    failure: Option<Failure>,
    /// When a background write last failed; fjall does not report the cause.
    unknown: Option<Instant>,
}

struct Open {
    db: Database,
    generation: u64,
    keyspace: Keyspace,
    /// A read met damaged data.
    damaged: AtomicBool,
}

/// Why fjall takes no more writes.
struct Failure {
    cause: Error,
    /// What the keys of the failed commit held before it.
    undo: Batch,
    /// For a background write: when the failure was noticed and how much space was free then.
    background: Option<(Instant, u64)>,
}

impl FjallStore {
    /// Opens or makes the store in `path`. `Busy` if another process has it open.
    pub fn open(path: impl AsRef<Path>) -> Result<FjallStore> {
        FjallStore::open_with(path, &Options::default())
    }

    /// As [`FjallStore::open`], with other limits than the defaults.
    pub fn open_with(path: impl AsRef<Path>, options: &Options) -> Result<FjallStore> {
        let path = path.as_ref();
        let open = Some(Arc::new(Open::at(path, options)?));
        let state = RwLock::new(State { open, failure: None, unknown: None });
        Ok(FjallStore { path: path.to_path_buf(), options: options.clone(), state })
    }

    /// Whether any process, this one included, has the store in `path` open.
    pub fn is_open(path: impl AsRef<Path>) -> bool {
        let lock = File::open(path.as_ref().join("lock"));
        lock.is_ok_and(|f| matches!(f.try_lock(), Err(TryLockError::WouldBlock)))
    }

    fn view(&self) -> Result<FjallView> {
        self.state.read().view()
    }

    /// Runs a write. Reopens the store first if an earlier write met a full disk.
    fn write(
        &self,
        undo: impl FnOnce(&State) -> Result<Batch>,
        f: impl FnOnce(&Open) -> fjall::Result<()>,
    ) -> Result<()> {
        let state = self.healthy()?;
        let Some(open) = &state.open else { return Err(closed()) };
        let Err(e) = f(open) else { return Ok(()) };
        // `Poisoned` means that an earlier write failed: this one changed nothing.
        let undo =
            if matches!(e, fjall::Error::Poisoned) { Batch::default() } else { undo(&state)? };
        drop(state);
        Err(self.state.write().failed(&e, undo, self.free_bytes()))
    }

    fn healthy(&self) -> Result<parking_lot::RwLockReadGuard<'_, State>> {
        let state = self.state.read();
        if state.failure.is_none() {
            return Ok(state);
        }
        drop(state);
        let mut state = self.state.write();
        self.recover(&mut state)?;
        Ok(parking_lot::RwLockWriteGuard::downgrade(state))
    }

    fn recover(&self, state: &mut State) -> Result<()> {
        let Some(failure) = &state.failure else { return Ok(()) };
        let refused =
            |why: &str| Err(failure.cause.clone().context(format!("metadata store: {why}")));
        if failure.cause.code != Code::NoSpc {
            return refused("it takes no more writes after an error; fix the cause and restart");
        }
        let free = self.free_bytes();
        let early = |(when, had): (Instant, u64)| {
            when.elapsed() < BACKGROUND_PAUSE && free < had.saturating_add(MORE)
        };
        if free < REOPEN_ROOM || failure.background.is_some_and(early) {
            return refused("it takes no writes until there is space");
        }
        if let Some(open) = state.open.take() {
            match Arc::try_unwrap(open) {
                Ok(open) => drop(open),
                Err(open) => {
                    state.open = Some(open);
                    return refused("it takes writes again when all reads in progress have ended");
                }
            }
        }
        let open = match Open::at(&self.path, &self.options) {
            Ok(open) => Arc::new(open),
            // Another descriptor of the lock may take a moment to close.
            Err(e) if matches!(e.code, Code::Busy | Code::NoSpc) => return refused(&e.message),
            Err(e) => return Err(e),
        };
        state.open = Some(open.clone());
        if let Err(e) = open.commit(&failure.undo) {
            let error = map_error(&e);
            return Err(error.context("metadata store, after it was opened again"));
        }
        state.failure = None;
        tracing::info!(path = %self.path.display(), "the store takes writes again");
        Ok(())
    }
}

impl FjallStore {
    fn next_generation(&self) -> fjall::Result<()> {
        let mut state = self.state.write();
        let Some(old) = state.open.clone() else { return Err(fjall::Error::Poisoned) };
        let generation = old.generation + 1;
        let keyspace = open_keyspace(&old.db, &self.path, generation, &self.options)?;
        state.open = Some(Arc::new(Open {
            db: old.db.clone(),
            generation,
            keyspace,
            damaged: AtomicBool::new(false),
        }));
        old.db.delete_keyspace(old.keyspace.clone())
    }

    /// Replaces a store that takes no more writes with an empty one. `Busy` while it is still
    /// being read.
    fn begin_anew(&self) -> Result<()> {
        let mut state = self.state.write();
        if let Some(open) = state.open.take()
            && let Err(open) = Arc::try_unwrap(open).map(drop)
        {
            state.open = Some(open);
            return Err(Error::new(Code::Busy, "metadata store: reads are still in progress"));
        }
        let what =
            |e: Error| e.context(format!("metadata store {}, created again", self.path.display()));
        remove_contents(&self.path).map_err(|e| what(e.into()))?;
        state.open = Some(Arc::new(Open::at(&self.path, &self.options).map_err(what)?));
        (state.failure, state.unknown) = (None, None);
        Ok(())
    }
}

fn remove_contents(path: &Path) -> std::io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    File::open(path)?.sync_all()
}

fn closed() -> Error {
    Error::new(Code::NoSpc, "metadata store: cannot be opened again after the disk was full")
}

impl State {
    fn view(&self) -> Result<FjallView> {
        let open = self.open.clone().ok_or_else(closed)?;
        Ok(FjallView { snapshot: open.db.snapshot(), open })
    }

    /// What the keys of a batch hold now.
    fn undo(&self, batch: &Batch) -> Result<Batch> {
        let view = self.view()?;
        let old = |(key, _): &(Bytes, Option<Bytes>)| Ok((key.clone(), view.get(key)?));
        Ok(Batch { ops: batch.ops.iter().map(old).collect::<Result<_>>()? })
    }

    fn is_damaged(&self) -> bool {
        let met = self.open.as_ref().is_some_and(|open| open.damaged.load(Relaxed));
        met || self.failure.as_ref().is_some_and(|f| f.cause.code == Code::Corrupt)
    }

    /// Reads everything and returns the first error.
    fn walk(&self) -> Result<()> {
        self.view()?.pairs(Bound::Unbounded, Bound::Unbounded).try_for_each(|pair| pair.map(drop))
    }

    /// Records why the store takes no more writes.
    fn failed(&mut self, e: &fjall::Error, undo: Batch, free: u64) -> Error {
        if let Some(first) = &self.failure {
            return first.cause.clone().context("metadata store");
        }
        let background = matches!(e, fjall::Error::Poisoned).then(|| (Instant::now(), free));
        let cause = match background {
            Some((now, free)) => self.background_failure(now, free),
            None => map_error(e),
        };
        tracing::error!("the store takes no more writes: {cause}");
        self.failure = Some(Failure {
            cause: cause.clone(),
            undo,
            background: background.filter(|b| b.1 < LITTLE),
        });
        cause.context("metadata store")
    }

    fn background_failure(&mut self, now: Instant, free: u64) -> Error {
        let before = self.unknown.replace(now);
        if free >= LITTLE
            && let Err(e) = self.walk()
        {
            return e;
        }
        if free >= LITTLE && before.is_some_and(|b| now.duration_since(b) < UNKNOWN_AGAIN) {
            return Error::new(Code::Io, "background writes fail, see the log");
        }
        Error::new(Code::NoSpc, "a background write failed, is the disk full?")
    }
}

impl Open {
    fn at(path: &Path, options: &Options) -> Result<Open> {
        let named = |e: Error| e.context(format!("metadata store {}", path.display()));
        let what = |e: fjall::Error| named(map_error(&e));
        manifest::check(path).map_err(named)?;
        let open = || {
            guarded(|| {
                Database::builder(path)
                    .cache_size(options.cache_bytes)
                    .max_journaling_size(options.journal_bytes.max(64 << 20))
                    .worker_threads(options.threads.max(1))
                    .open()
            })
        };
        let db = match open() {
            Err(fjall::Error::JournalRecovery(e)) => match journal::cut_torn_end(path)? {
                Some(bytes) => {
                    let path = path.display();
                    tracing::warn!(%path, "cut the journal before a torn batch ({e:?}), as after \
                        a loss of power; {bytes} bytes are dropped");
                    open()
                }
                None => Err(fjall::Error::JournalRecovery(e)),
            },
            other => other,
        }
        .map_err(what)?;
        match guarded(|| newest(&db, path, options)) {
            Ok((generation, keyspace)) => {
                Ok(Open { db, generation, keyspace, damaged: AtomicBool::new(false) })
            }
            Err(e) => {
                let _ = catch_unwind(AssertUnwindSafe(|| drop(db))); // may panic, too
                Err(what(e))
            }
        }
    }

    /// Maps the error of a read; notes damage.
    fn unread(&self, e: &fjall::Error) -> Error {
        let e = map_error(e).context("metadata store");
        self.damaged.fetch_or(e.code == Code::Corrupt, Relaxed);
        e
    }

    fn commit(&self, batch: &Batch) -> fjall::Result<()> {
        // All operations of a batch get one sequence number, so only the last of several operations
        // on one key may go in.
        let ops: BTreeMap<_, _> = batch.ops.iter().map(|(k, v)| (&k[..], v)).collect();
        let mut b = self.db.batch().durability(Some(PersistMode::Buffer));
        for (key, value) in ops {
            match value {
                Some(v) => b.insert(&self.keyspace, key, &v[..]),
                None => b.remove(&self.keyspace, key),
            }
        }
        b.commit()
    }
}

/// The current generation and its keyspace.
fn newest(db: &Database, path: &Path, options: &Options) -> fjall::Result<(u64, Keyspace)> {
    let mut generations: Vec<u64> = db
        .list_keyspace_names()
        .iter()
        .filter_map(|n| n.strip_prefix("meta-")?.parse().ok())
        .collect();
    generations.sort_unstable();
    let generation = generations.pop().unwrap_or(0);
    let keyspace = open_keyspace(db, path, generation, options)?;
    for old in generations {
        // Left by a crash in the middle of `clear`.
        db.delete_keyspace(open_keyspace(db, path, old, options)?)?;
    }
    Ok((generation, keyspace))
}

/// Turns a panic of fjall into an error: fjall trusts some of what it reads, and damaged data must
/// not end this process.
fn guarded<T>(f: impl FnOnce() -> fjall::Result<T>) -> fjall::Result<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or(Err(fjall::Error::Unrecoverable))
}

/// Opens or makes the keyspace of a generation of the store in `path`.
fn open_keyspace(
    db: &Database,
    path: &Path,
    generation: u64,
    options: &Options,
) -> fjall::Result<Keyspace> {
    let options =
        || KeyspaceCreateOptions::default().max_memtable_size(options.memtable_bytes.max(1 << 20));
    let keyspace = db.keyspace(&format!("meta-{generation}"), options)?;
    // fjall (3.1.13) makes the folders of this keyspace and of its list of keyspaces in
    // `keyspaces` and does not sync their names. Without those names, what its journal holds is
    // ignored.
    File::open(path.join("keyspaces"))?.sync_all()?;
    Ok(keyspace)
}

fn damage(e: impl std::fmt::Display) -> Error {
    Error::new(Code::Corrupt, format!("damaged ({e})"))
}

/// Keeps the errno where there is one; damage is `Corrupt`.
fn map_error(e: &fjall::Error) -> Error {
    let io = |e: &std::io::Error| match e.raw_os_error() {
        Some(n) => Error::from(std::io::Error::from_raw_os_error(n)),
        // A file that is too short, or nonsense.
        None if matches!(e.kind(), ErrorKind::UnexpectedEof | ErrorKind::InvalidData) => damage(e),
        None => Error::from(std::io::Error::new(e.kind(), e.to_string())),
    };
    match e {
        fjall::Error::Io(e) | fjall::Error::Storage(LsmError::Io(e)) => io(e),
        fjall::Error::Locked => Error::new(Code::Busy, "another process has it open"),
        fjall::Error::InvalidVersion(None) => damage(e),
        fjall::Error::InvalidVersion(_) => {
            Error::new(Code::OpNotSupp, format!("made by another version: {e}"))
        }
        fjall::Error::Storage(_)
        | fjall::Error::JournalRecovery(_)
        | fjall::Error::Decompress(_)
        | fjall::Error::InvalidTrailer
        | fjall::Error::InvalidTag(_)
        | fjall::Error::Unrecoverable => damage(e),
        _ => Error::new(Code::Io, e.to_string()),
    }
}

/// The store as it was at one commit.
struct FjallView {
    snapshot: fjall::Snapshot,
    /// Also keeps the store from being reopened while this view exists.
    open: Arc<Open>,
}

impl FjallView {
    fn pairs(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'static> {
        if is_empty_range(from, to) {
            return Box::new(std::iter::empty());
        }
        let open = self.open.clone();
        let pair = move |g: fjall::Guard| {
            let (k, v) = g.into_inner().map_err(|e| open.unread(&e))?;
            Ok((Bytes::copy_from_slice(&k), Bytes::copy_from_slice(&v)))
        };
        Box::new(self.snapshot.range::<&[u8], _>(&self.open.keyspace, (from, to)).map(pair))
    }
}

impl Reader for FjallView {
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        let value =
            self.snapshot.get(&self.open.keyspace, key).map_err(|e| self.open.unread(&e))?;
        Ok(value.map(|v| Bytes::copy_from_slice(&v)))
    }

    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        self.pairs(from, to)
    }
}

impl Reader for FjallStore {
    // Through a snapshot, because fjall's direct reads can see a batch while it is being applied.
    fn get(&self, key: &[u8]) -> Result<Option<Bytes>> {
        self.view()?.get(key)
    }

    fn range(&self, from: Bound<&[u8]>, to: Bound<&[u8]>) -> PairIter<'_> {
        match self.view() {
            Ok(view) => view.pairs(from, to),
            Err(e) => Box::new(std::iter::once(Err(e))),
        }
    }
}

impl MetaStore for FjallStore {
    fn commit(&self, batch: Batch) -> Result<()> {
        batch.ops.iter().try_for_each(|(key, _)| check_key(key))?;
        self.write(|state| state.undo(&batch), |open| open.commit(&batch))
    }

    fn sync(&self) -> Result<()> {
        let state = self.healthy()?;
        let Some(open) = &state.open else { return Err(closed()) };
        let Err(e) = open.db.persist(PersistMode::SyncAll) else { return Ok(()) };
        drop(state);
        // After a failed flush the state of the disk is unknown, so the sync is not tried again.
        let e = if matches!(e, fjall::Error::Poisoned) {
            e
        } else {
            fjall::Error::Io(std::io::Error::other(e.to_string()))
        };
        Err(self.state.write().failed(&e, Batch::default(), self.free_bytes()))
    }

    fn snapshot(&self) -> Result<Box<dyn Reader>> {
        Ok(Box::new(self.view()?))
    }

    fn disk_bytes(&self) -> u64 {
        self.state.read().open.as_ref().and_then(|o| o.db.disk_space().ok()).unwrap_or(0)
    }

    fn free_bytes(&self) -> u64 {
        rustix::fs::statvfs(&self.path).map_or(u64::MAX, |s| s.f_bavail.saturating_mul(s.f_frsize))
    }

    fn clear(&self) -> Result<()> {
        if self.state.read().is_damaged() {
            return self.begin_anew();
        }
        drop(self.healthy()?);
        let Err(e) = self.next_generation() else { return Ok(()) };
        let named = map_error(&e).context("metadata store");
        // Part of the store is damaged; clearing removes all of it anyway.
        let damaged = named.code == Code::Corrupt || matches!(e, fjall::Error::Poisoned);
        if damaged { self.begin_anew() } else { Err(named) }
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
        let short = std::io::Error::from(ErrorKind::UnexpectedEof);
        assert_eq!(map_error(&fjall::Error::Storage(LsmError::Io(short))).code, Code::Corrupt);
    }

    #[test]
    fn only_a_full_disk_is_waited_out() {
        let dir = tempfile::tempdir().unwrap();
        let s = FjallStore::open(dir.path()).unwrap();
        let mut b = Batch::default();
        b.put("a", "1");
        s.commit(b.clone()).unwrap();
        let mut undo = Batch::default();
        undo.put("a", "0");
        undo.delete("b");
        s.state.write().failed(&fjall::Error::Io(std::io::Error::from_raw_os_error(28)), undo, 0);
        // A view that is still in use keeps the store from being reopened, but no longer.
        let view = s.snapshot().unwrap();
        assert_eq!(s.commit(b.clone()).unwrap_err().code, Code::NoSpc);
        assert_eq!(view.get(b"a").unwrap().unwrap(), "1");
        drop(view);
        let mut c = Batch::default();
        c.put("c", "3");
        s.commit(c).unwrap();
        let all: Vec<_> = s.prefix(b"").map(Result::unwrap).collect();
        assert_eq!(
            all,
            [("a".into(), "0".into()), ("c".into(), "3".into())],
            "the failed commit was undone"
        );
        s.state.write().failed(
            &fjall::Error::Io(std::io::Error::from_raw_os_error(5)),
            Batch::default(),
            0,
        );
        assert_eq!(s.commit(b.clone()).unwrap_err().code, Code::Io);
        assert_eq!(s.commit(b).unwrap_err().code, Code::Io);
        assert_eq!(s.get(b"a").unwrap().unwrap(), "0");
    }

    #[test]
    fn background_writes_that_keep_failing_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let s = FjallStore::open(dir.path()).unwrap();
        assert_eq!(
            s.state.write().failed(&fjall::Error::Poisoned, Batch::default(), LITTLE).code,
            Code::NoSpc
        );
        s.sync().unwrap();
        assert_eq!(
            s.state.write().failed(&fjall::Error::Poisoned, Batch::default(), LITTLE).code,
            Code::Io
        );
        assert_eq!(s.sync().unwrap_err().code, Code::Io);
        // With little space the store waits before it tries again.
        s.state.write().failure = None;
        let e = s.state.write().failed(
            &fjall::Error::Poisoned,
            Batch::default(),
            s.free_bytes().min(LITTLE - 1),
        );
        assert_eq!(e.code, Code::NoSpc);
    }

    #[test]
    fn an_interrupted_clear_is_finished_at_open() {
        let dir = tempfile::tempdir().unwrap();
        let s = FjallStore::open(dir.path()).unwrap();
        let mut b = Batch::default();
        b.put("a", "1");
        s.commit(b).unwrap();
        s.sync().unwrap();
        open_keyspace(&s.state.read().open.as_ref().unwrap().db, &s.path, 1, &s.options).unwrap();
        drop(s);
        let s = FjallStore::open(dir.path()).unwrap();
        assert_eq!(s.prefix(b"").count(), 0);
        assert_eq!(s.state.read().open.as_ref().unwrap().db.keyspace_count(), 1);
    }

    #[test]
    fn a_second_open_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!FjallStore::is_open(dir.path()));
        let s = FjallStore::open(dir.path()).unwrap();
        let e = FjallStore::open(dir.path()).err().unwrap();
        assert_eq!(e.code, Code::Busy, "{e}");
        assert!(FjallStore::is_open(dir.path()));
        drop(s);
        assert!(!FjallStore::is_open(dir.path()));
    }
}
