//! The open cache. Files that were opened for reading stay open at the metadata servers when
//! programs close them, as long as the lease lives under which it is known who may open them.
//! Opening such a file again costs no message, and the file is not deleted until it is really
//! closed. See `docs/leases.md`.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use strake_proto::{Ino, pb};

use crate::{
    config::Counters,
    inode::{O_ACCMODE, O_APPEND, O_EXEC, Open, files::Files},
    leases::lease_cache::LeaseCache,
    metadata::service::Metadata,
    shared::Shared,
};

/// Most files kept open. With a thousand clients this is still half of what the metadata servers
/// allow.
const MOST: usize = 4096;
/// Most closes in one request.
const CLOSES_AT_ONCE: usize = 1024;

#[derive(Default)]
struct Table {
    /// Open files, with the time of the last use.
    files: BTreeMap<Ino, (Arc<Open>, u64)>,
    by_use: BTreeMap<u64, Ino>,
    uses: u64,
    /// The last seen count of [`LeaseCache::openable`].
    forgotten: u64,
}

impl Table {
    fn take(&mut self, ino: Ino) -> Option<Arc<Open>> {
        let (open, used) = self.files.remove(&ino)?;
        self.by_use.remove(&used);
        Some(open)
    }

    fn put(&mut self, open: Arc<Open>) {
        self.uses += 1;
        self.by_use.insert(self.uses, open.inode.ino);
        self.files.insert(open.inode.ino, (open, self.uses));
    }
}

/// See the module.
pub(crate) struct OpenCache {
    shared: Arc<Shared>,
    metadata: Arc<Metadata>,
    files: Arc<Files>,
    lease_cache: Arc<LeaseCache>,
    table: Mutex<Table>,
}

impl OpenCache {
    pub fn new(
        shared: Arc<Shared>,
        metadata: Arc<Metadata>,
        files: Arc<Files>,
        leases: Arc<LeaseCache>,
    ) -> OpenCache {
        OpenCache { shared, metadata, files, lease_cache: leases, table: Mutex::default() }
    }

    /// Takes a kept file into use and marks it as used last.
    fn used(&self, ino: Ino) -> Option<Arc<Open>> {
        let mut all = self.table.lock();
        let open = all.take(ino)?;
        all.put(open.clone());
        Some(open)
    }

    /// Whether the file is open only because the cache holds it.
    pub fn holds_alone(&self, ino: Ino) -> bool {
        let all = self.table.lock();
        all.files.get(&ino).is_some_and(|(open, _)| {
            Arc::strong_count(open) == 1 && open.inode.openings.count() == 1
        })
    }

    /// Keeps a file open. Returns the files that are dropped for it.
    fn keep(&self, open: Arc<Open>) -> Vec<Arc<Open>> {
        let mut all = self.table.lock();
        // A file that this client writes must be released when programs have closed it.
        if open.inode.openings.is_written() {
            return Vec::new();
        }
        let mut gone: Vec<_> = all.take(open.inode.ino).into_iter().collect();
        all.put(open);
        while all.files.len() > MOST {
            let oldest = all.by_use.values().next().copied();
            gone.extend(oldest.and_then(|ino| all.take(ino)));
        }
        gone
    }
}

impl OpenCache {
    /// Opens a file for reading without a message, if that is known to be allowed and the file is
    /// kept open.
    pub(crate) fn open_kept(&self, creds: &pb::Creds, ino: Ino) -> Option<(Arc<Open>, pb::Attr)> {
        let attr = self.lease_cache.open(self.shared.env.boot(), creds, ino)?;
        let open = self.used(ino)?;
        let attr = open.inode.take_attr(&attr);
        Counters::add(&self.shared.stats.cached_opens, 1);
        Some((open, attr))
    }

    /// A file was opened for reading. It stays open if it may be opened again from memory.
    pub(crate) fn keep_open(self: &Arc<Self>, open: &Arc<Open>, creds: &pb::Creds) {
        if !self.shared.is_closed()
            && self.lease_cache.open(self.shared.env.boot(), creds, open.inode.ino).is_some()
        {
            self.close_kept(self.keep(open.clone()));
        }
    }

    /// A program opens the file for writing.
    pub(crate) fn stop_keeping(self: &Arc<Self>, ino: Ino) {
        let kept = self.table.lock().take(ino);
        self.close_kept(kept.into_iter().collect());
    }

    /// Closes the files that no program has open, without telling the metadata servers: they are
    /// about to receive a full list, or no longer know the session.
    pub(crate) fn retire_kept(&self) {
        let all = std::mem::take(&mut *self.table.lock());
        for (open, _) in all.files.into_values() {
            let _ = self.retire(open);
        }
    }

    /// Closes files that can no longer be opened from memory.
    pub(crate) async fn close_idle(self: Arc<Self>) {
        let gone = {
            let mut all = self.table.lock();
            let all = &mut *all;
            let Some(open) = self.lease_cache.openable(&mut all.forgotten, all.files.keys()) else {
                return;
            };
            let gone: Vec<Ino> =
                all.files.keys().copied().filter(|ino| !open.contains(ino)).collect();
            gone.into_iter().filter_map(|ino| all.take(ino)).collect()
        };
        self.close_kept(gone);
    }

    /// Closes all of them, many in one request.
    fn close_kept(self: &Arc<Self>, files: Vec<Arc<Open>>) {
        let since = self.metadata.reassertions();
        let closed: Vec<Ino> = files.into_iter().filter_map(|open| self.retire(open)).collect();
        if closed.is_empty() {
            return;
        }
        let core = self.clone();
        self.shared.env.spawn(async move {
            for part in closed.chunks(CLOSES_AT_ONCE) {
                core.metadata.tell_closed(part, since).await;
            }
        });
    }

    /// Closes a file if it is no longer open. Returns the inode if the metadata servers must be
    /// told.
    fn retire(&self, open: Arc<Open>) -> Option<Ino> {
        let Open { inode, session } = Arc::into_inner(open)?;
        let counts = inode.openings.closed(session, self.metadata.current_session().map(|s| s.id));
        self.files.release_later(inode.ino, inode.openings.release());
        counts.then_some(inode.ino)
    }
}

/// Whether a file opened with these flags is kept open after its close: only files opened for
/// reading.
pub(crate) fn is_kept(flags: u32) -> bool {
    flags & (O_ACCMODE | O_APPEND | O_EXEC) == 0
}
