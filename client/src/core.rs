//! Wires the services of one client, and owns what is shared between them. The services, from the
//! bottom up:
//!
//! [`Shared`] ← [`Metadata`] ← [`Files`] ← [`Storage`] ← [`Updates`] ← [`WriteBack`]
//!
//! Each is given those before it and calls only those. [`Metadata`] reports what becomes of the
//! session to the owner of its open files by the trait [`SessionOwner`], which is defined here.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use strake_fabric::Fabric;
use strake_proto::{Ino, Result, SessionId};
use strake_runtime::Env;

use crate::{
    config::Config,
    data::{relays::Relays, service::Storage},
    inode::{Inode, files::Files},
    leases::{
        acknowledged::Acknowledged,
        lease_cache::{Forgetting, LeaseCache},
        open_cache::OpenCache,
        recent_lookups::RecentLookups,
    },
    locks::{lock_waiters::LockWaiters, owner_queues::OwnerQueues, page_uses::PageLocks},
    metadata::service::{Metadata, SessionOwner},
    read::cache::Cache,
    shared::Shared,
    write::{
        held_writes::{Below, WriteBack},
        service::Updates,
    },
};

pub(crate) struct Core {
    pub shared: Arc<Shared>,
    pub metadata: Arc<Metadata>,
    pub files: Arc<Files>,
    pub storage: Arc<Storage>,
    pub updates: Arc<Updates>,
    pub locks: OwnerQueues,
    pub lock_waiters: Arc<LockWaiters>,
    pub pages: Arc<PageLocks>,
    pub writeback: Arc<WriteBack>,
    pub lease_cache: Arc<LeaseCache>,
    pub recent_lookups: RecentLookups,
    pub open_cache: Arc<OpenCache>,
    pub(crate) recalls: Acknowledged,
    /// Connections through other servers, for servers that are not reached directly.
    pub(crate) relays: Arc<Relays>,
    /// The read cache: bytes of files that were read.
    pub cache: Arc<Mutex<Cache>>,
}

impl Core {
    pub fn new(cfg: Config, env: Env, fabric: Arc<dyn Fabric>) -> Arc<Core> {
        let shared = Arc::new(Shared::new(cfg, env, fabric));
        Arc::new_cyclic(|core: &Weak<Core>| Core::of(shared, core.clone()))
    }

    fn of(shared: Arc<Shared>, owner: Weak<dyn SessionOwner>) -> Core {
        let (cfg, pool) = (&shared.cfg, shared.fabric.pool());
        let relays = Arc::new(Relays::new(shared.env.clone(), cfg.relay, &shared.uuid));
        let lease_cache: Arc<LeaseCache> = Arc::default();
        let metadata =
            Arc::new(Metadata::new(shared.clone(), relays.clone(), lease_cache.clone(), owner));
        let files = Arc::new(Files::new(shared.clone(), metadata.clone(), lease_cache.clone()));
        let storage =
            Arc::new(Storage::new(shared.clone(), metadata.clone(), files.clone(), relays.clone()));
        let cache = Cache::new((cfg.cache_bytes as u64).min(pool.stats().limit / 2));
        let cache = Arc::new(Mutex::new(cache));
        let updates = Updates::new(
            shared.clone(),
            metadata.clone(),
            files.clone(),
            storage.clone(),
            cache.clone(),
        );
        let (updates, pages) = (Arc::new(updates), Arc::new(PageLocks::new(shared.clone())));
        let lock_waiters = LockWaiters::new(shared.clone(), metadata.clone());
        let open_cache =
            OpenCache::new(shared.clone(), metadata.clone(), files.clone(), lease_cache.clone());
        let writeback = WriteBack::new(Below {
            shared: shared.clone(),
            metadata: metadata.clone(),
            files: files.clone(),
            storage: storage.clone(),
            updates: updates.clone(),
            pages: pages.clone(),
            lease_cache: lease_cache.clone(),
            cache: cache.clone(),
        });
        Core {
            metadata,
            files,
            storage,
            updates,
            lease_cache,
            cache,
            relays,
            lock_waiters: Arc::new(lock_waiters),
            pages,
            writeback: Arc::new(writeback),
            open_cache: Arc::new(open_cache),
            locks: OwnerQueues::default(),
            recent_lookups: RecentLookups::default(),
            recalls: Acknowledged::default(),
            shared,
        }
    }

    /// Sends the dirty data of a file, and reports its size and mtime: from here on every other
    /// client sees all of it.
    pub(crate) async fn tell_all(self: &Arc<Self>, inode: &Arc<Inode>) -> Result<()> {
        self.writeback.send_held(inode).await;
        self.files.push_size(inode).await
    }

    /// Returns when all bytes written through this client are stable and the size is in the
    /// metadata log.
    pub(crate) async fn sync_inode(self: &Arc<Self>, inode: &Arc<Inode>) -> Result<()> {
        self.writeback.send_held(inode).await;
        self.updates.fence(inode).await?;
        self.updates.flush_inode(inode.ino).await?;
        self.files.push_size(inode).await
    }
}

impl SessionOwner for Core {
    fn forget_all(&self) -> Option<Forgetting> {
        let forgetting = self.lease_cache.connected();
        self.forget_bytes();
        forgetting
    }

    fn forget_bytes(&self) {
        self.cache.lock().clear();
    }

    fn forget_kept(&self) {
        self.open_cache.retire_kept();
    }

    fn open_in(&self, session: SessionId) -> Vec<Ino> {
        let inodes = self.files.live_inodes();
        inodes.iter().flat_map(|i| std::iter::repeat_n(i.ino, i.openings.of(session))).collect()
    }

    fn forget_ends(&self, session: SessionId) {
        self.files.live_inodes().iter().for_each(|i| i.forget_end(session));
    }

    fn lost(&self, session: SessionId) {
        self.updates.lose(session);
        self.files
            .live_inodes()
            .iter()
            .for_each(|i| i.back.lose(|parts| i.lost_with(session, parts)));
        self.writeback.hold_nothing();
    }

    fn reopen_all(self: Arc<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move { self.files.reopen_strangers().await })
    }
}
