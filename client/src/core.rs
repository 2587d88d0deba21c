//! What all handles of one client share: the cluster map, the session, connections, bounded resources, and the
//! background tasks that keep them fresh.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::{Arc, Weak, atomic::AtomicU64},
    time::Duration,
};

use futures_util::stream::{self, StreamExt};
use parking_lot::Mutex;
use strake_fabric::{Env, Fabric, watch};
use strake_proto::{Ino, Result, SessionId, TargetId};
use tokio::{sync::Mutex as AsyncMutex, time::Instant};

use crate::{
    config::Config,
    data::{relays::Relays, service::Storage},
    inode::{Inode, files::Files},
    leases::{
        lease_cache::{Forgetting, LeaseCache},
        open_cache::OpenCache,
        recalls::{self, Acknowledged},
        recent_lookups::RecentLookups,
    },
    locks::{OwnerQueues, lock_waiters::LockWaiters, page_locks::PageLocks},
    metadata::service::{Metadata, SessionOwner},
    read::cache::Cache,
    shared::Shared,
    write::{grants::Grants, service::Updates, writeback},
};

pub(crate) struct Core {
    pub shared: Arc<Shared>,
    pub metadata: Arc<Metadata>,
    pub files: Arc<Files>,
    pub storage: Arc<Storage>,
    pub updates: Arc<Updates>,
    pub locks: OwnerQueues,
    pub lock_waiters: LockWaiters,
    pub(crate) pages: PageLocks,
    pub lease_cache: Arc<LeaseCache>,
    pub recent_lookups: RecentLookups,
    pub open_cache: OpenCache,
    pub(crate) recalls: Acknowledged,
    /// Ways to servers that are not reached.
    pub(crate) relays: Arc<Relays>,
    /// Bytes of files that were read.
    pub cache: Arc<Mutex<Cache>>,
    /// Files of which something is held back or on its way. Taken within the lock of what is held back.
    pub(crate) holding: Mutex<BTreeMap<Ino, Arc<Inode>>>,
    /// Places of writes that are held back among them.
    pub(crate) held_order: AtomicU64,
    /// What a former process held back, wrote and did not report is known.
    pub(crate) inherited: watch::Sender<bool>,
    /// What may be held back, by the space that is granted. Taken within the lock of what is held back.
    pub(crate) grants: Mutex<Grants>,
    pub(crate) asking_grants: Mutex<BTreeMap<TargetId, Arc<AsyncMutex<()>>>>,
}

/// Sizes that are being reported at a time.
const SIZES_AT_ONCE: usize = 32;
/// How long a release may wait for others.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);

impl Core {
    pub fn new(cfg: Config, env: Env, fabric: Arc<dyn Fabric>) -> Arc<Core> {
        let shared = Arc::new(Shared::new(cfg, env, fabric));
        Arc::new_cyclic(|core: &Weak<Core>| Core::of(shared, core.clone()))
    }

    fn of(shared: Arc<Shared>, owner: Weak<dyn SessionOwner>) -> Core {
        let (cfg, pool) = (&shared.cfg, shared.fabric.pool());
        let relays = Arc::new(Relays::new(shared.env.clone(), cfg.relay, &shared.uuid));
        let lease_cache: Arc<LeaseCache> = Arc::default();
        let metadata = Arc::new(Metadata::new(shared.clone(), relays.clone(), lease_cache.clone(), owner));
        let files = Arc::new(Files::new(shared.clone(), metadata.clone(), lease_cache.clone()));
        let storage = Arc::new(Storage::new(shared.clone(), metadata.clone(), files.clone(), relays.clone()));
        let cache = Cache::new((cfg.cache_bytes as u64).min(pool.stats().limit / 2));
        let cache = Arc::new(Mutex::new(cache));
        let services = (shared.clone(), metadata.clone(), files.clone(), storage.clone());
        let updates = Updates::new(services.0, services.1, services.2, services.3, cache.clone());
        Core {
            metadata,
            files,
            storage,
            updates: Arc::new(updates),
            lease_cache,
            cache,
            relays,
            locks: OwnerQueues::default(),
            lock_waiters: LockWaiters::default(),
            pages: PageLocks::default(),
            recent_lookups: RecentLookups::default(),
            open_cache: OpenCache::default(),
            recalls: Acknowledged::default(),
            holding: Mutex::default(),
            held_order: AtomicU64::new(1),
            inherited: watch::Sender::new(shared.cfg.handover.as_ref().is_none_or(|k| k.former_session() == 0)),
            grants: Mutex::default(),
            asking_grants: Mutex::default(),
            shared,
        }
    }

    /// Sends what is held back of a file, and reports its size and mtime: from here on whoever asks is told all of it.
    pub(crate) async fn tell_all(self: &Arc<Self>, inode: &Arc<Inode>) -> Result<()> {
        self.send_held(inode).await;
        self.files.push_size(inode).await
    }

    // --- background ---

    pub fn start_background(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.shared.env.spawn(every(
            weak.clone(),
            |c| c.metadata.renew_interval(),
            |c| async move { c.metadata.clone().renew().await },
        ));
        let extend = self.shared.cfg.extend_interval;
        self.shared.env.spawn(every(weak.clone(), move |_| extend, |c| async move { c.push_sizes().await }));
        let release = |c: Arc<Core>| async move { c.files.clone().send_releases().await };
        self.shared.env.spawn(every(weak.clone(), |_| RELEASE_INTERVAL, release));
        let close = |c: Arc<Core>| async move { c.close_idle().await };
        self.shared.env.spawn(every(weak.clone(), |_| RELEASE_INTERVAL, close));
        if self.shared.cfg.write_back || !*self.inherited.borrow() {
            self.shared.env.spawn(every(weak.clone(), |_| writeback::LOOK, |c| async move { c.send_due().await }));
        }
        self.shared.env.spawn(recalls::serve(weak.clone()));
        self.shared.env.spawn(flush_loop(weak));
    }

    /// Reports all sizes that grew, some at a time.
    async fn push_sizes(self: Arc<Self>) {
        self.cache.lock().age(Instant::now());
        let dirty = self.files.live_inodes().into_iter().filter(|inode| inode.is_dirty());
        let report = |inode: Arc<Inode>| {
            let core = self.clone();
            async move {
                if let Err(e) = core.files.push_size(&inode).await {
                    tracing::warn!(ino = inode.ino, "could not report the size of a file: {e}");
                }
            }
        };
        stream::iter(dirty.map(report)).buffer_unordered(SIZES_AT_ONCE).collect::<()>().await;
    }
}

/// Calls `f` again and again until the client is gone.
async fn every<F>(core: Weak<Core>, pause: impl Fn(&Core) -> Duration, f: impl Fn(Arc<Core>) -> F)
where
    F: Future<Output = ()>,
{
    loop {
        let Some(c) = core.upgrade() else { return };
        let pause = pause(&c);
        drop(c);
        tokio::time::sleep(pause).await;
        match core.upgrade() {
            Some(c) if !c.shared.is_closed() => f(c).await,
            _ => return,
        }
    }
}

/// Flushes chains whose unstable bytes are old or many, on a timer and when somebody waits for room.
async fn flush_loop(core: Weak<Core>) {
    loop {
        let Some(c) = core.upgrade() else { return };
        if c.shared.is_closed() {
            return;
        }
        tokio::select! {
            biased;
            () = c.updates.flush_wanted() => {}
            () = tokio::time::sleep((c.shared.cfg.flush_age / 4).max(Duration::from_millis(1))) => {}
        }
        c.updates.flush_due();
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
        self.retire_kept();
    }

    fn open_in(&self, session: SessionId) -> Vec<Ino> {
        let inodes = self.files.live_inodes();
        inodes.iter().flat_map(|i| std::iter::repeat_n(i.ino, i.handles_of(session))).collect()
    }

    fn forget_ends(&self, session: SessionId) {
        self.files.live_inodes().iter().for_each(|i| i.forget_end(session));
    }

    fn lost(&self, session: SessionId) {
        self.updates.lose(session);
        self.files.live_inodes().iter().for_each(|i| i.back.lose(|parts| i.lost_with(session, parts)));
        self.holding.lock().clear();
    }

    fn reopen_all(self: Arc<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move { self.files.reopen_strangers().await })
    }
}
