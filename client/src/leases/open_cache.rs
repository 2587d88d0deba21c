//! Files that were opened for reading stay open at the metadata servers when programs close them,
//! as long as the lease lives under which it is known who may open them: to open one again costs no
//! message, and what a name leads to is there until it is really closed. See `docs/leases.md`.

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

/// Files kept open for later. Times a thousand clients they are still half of what metadata servers
/// allow.
const MOST: usize = 4096;
/// Closed in one request.
const CLOSES_AT_ONCE: usize = 1024;

#[derive(Default)]
struct Table {
    /// With the time of the last use.
    files: BTreeMap<Ino, (Arc<Open>, u64)>,
    by_use: BTreeMap<u64, Ino>,
    uses: u64,
    /// As counted by what is remembered.
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

    /// The file, now in use.
    fn used(&self, ino: Ino) -> Option<Arc<Open>> {
        let mut all = self.table.lock();
        let open = all.take(ino)?;
        all.put(open.clone());
        Some(open)
    }

    /// Whether it is open only because it is kept so.
    pub fn holds_alone(&self, ino: Ino) -> bool {
        let all = self.table.lock();
        all.files
            .get(&ino)
            .is_some_and(|(open, _)| Arc::strong_count(open) == 1 && open.inode.handles() == 1)
    }

    /// Keeps a file open. Returns what is not kept open any more for it.
    fn keep(&self, open: Arc<Open>) -> Vec<Arc<Open>> {
        let mut all = self.table.lock();
        // A file that is written here is to be released when nobody has it open.
        if open.inode.is_written() {
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

    /// Somebody opens the file for writing.
    pub(crate) fn stop_keeping(self: &Arc<Self>, ino: Ino) {
        let kept = self.table.lock().take(ino);
        self.close_kept(kept.into_iter().collect());
    }

    /// Closes the files that nobody has open without a word: the metadata servers are about to be
    /// told what is, or know of no session any more.
    pub(crate) fn retire_kept(&self) {
        let all = std::mem::take(&mut *self.table.lock());
        for (open, _) in all.files.into_values() {
            let _ = self.retire(open);
        }
    }

    /// Closes what cannot be opened from memory any more.
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

    /// All at once, many in one request.
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

    /// Closes a file, if nobody has it open any more. The inode, if the metadata servers are to be
    /// told.
    fn retire(&self, open: Arc<Open>) -> Option<Ino> {
        let Open { inode, session } = Arc::into_inner(open)?;
        let counts = inode.closed(session, self.metadata.current_session().map(|s| s.id));
        self.files.release_later(inode.ino, inode.release());
        counts.then_some(inode.ino)
    }
}

/// Whether a file opened so is kept open when it is closed: one for reading.
pub(crate) fn is_kept(flags: u32) -> bool {
    flags & (O_ACCMODE | O_APPEND | O_EXEC) == 0
}
