//! What all handles of one client share: the cluster map, the session, connections, bounded resources, and the
//! background tasks that keep them fresh.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::{Arc, LazyLock, Weak, atomic::AtomicU64},
    time::Duration,
};

use futures_util::stream::{self, StreamExt};
use parking_lot::Mutex;
use strake_fabric::{Buf, BufMut, Env, Fabric, watch};
use strake_proto::{ChainId, Ino, SessionId, TargetId, pb};
use tokio::{
    sync::{Mutex as AsyncMutex, Notify, OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use crate::{
    api::names::op,
    config::Config,
    data::{clocks::Clocks, connections::Connections, rdma_connections::RdmaConnections, relays::Relays},
    inode::{Inode, Release},
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
    write::{grants::Grants, unstable::Unstable, writeback},
};

/// What an unstable write keeps alive until it is stable.
pub(crate) struct Hold {
    pub inode: Arc<Inode>,
    /// Its share of [`Config::unstable_limit`].
    pub _room: Option<OwnedSemaphorePermit>,
}

pub(crate) struct Core {
    pub shared: Arc<Shared>,
    pub metadata: Arc<Metadata>,
    inodes: Mutex<BTreeMap<Ino, Weak<Inode>>>,
    /// Files that are to be released, see [`Core::release_later`], and the last opening before that.
    releases: Mutex<BTreeMap<Ino, (Release, u64)>>,
    pub locks: OwnerQueues,
    pub lock_waiters: LockWaiters,
    pub(crate) pages: PageLocks,
    pub lease_cache: Arc<LeaseCache>,
    pub recent_lookups: RecentLookups,
    pub open_cache: OpenCache,
    pub(crate) recalls: Acknowledged,
    pub connections: Connections,
    /// Ways to servers that are not reached.
    pub(crate) relays: Arc<Relays>,
    /// How late it is at storage servers.
    pub(crate) clocks: Clocks,
    /// For foreign memory.
    pub rdma_connections: RdmaConnections,
    /// Data requests in flight.
    pub pieces: Arc<Semaphore>,
    /// Room for unstable bytes, in [`ROOM_UNIT`]s.
    pub unstable_room: Arc<Semaphore>,
    /// Bytes of files that were read.
    pub cache: Mutex<Cache>,
    pub unstable: Mutex<Unstable<Hold>>,
    pub flush_wanted: Notify,
    /// Files of which something is held back or on its way. Taken within the lock of what is held back.
    pub(crate) holding: Mutex<BTreeMap<Ino, Arc<Inode>>>,
    /// Places of writes that are held back among them.
    pub(crate) held_order: AtomicU64,
    /// What a former process held back, wrote and did not report is known.
    pub(crate) inherited: watch::Sender<bool>,
    /// What may be held back, by the space that is granted. Taken within the lock of what is held back.
    pub(crate) grants: Mutex<Grants>,
    pub(crate) asking_grants: Mutex<BTreeMap<TargetId, Arc<AsyncMutex<()>>>>,
    pub(crate) flushing: Mutex<BTreeMap<ChainId, Arc<AsyncMutex<()>>>>,
    /// A run of zeros, for holes.
    pub zero: Buf,
}

/// Sizes that are being reported at a time.
const SIZES_AT_ONCE: usize = 32;
/// How long a release may wait for others, and how many make one request.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);
const RELEASES_AT_ONCE: usize = 1024;

/// Zeros for holes, of all clients of the process; memory that nobody writes to takes none.
static ZEROS: LazyLock<Buf> = LazyLock::new(|| BufMut::unpooled(1 << 20).freeze());

/// Granularity of the memory limits, bytes.
pub(crate) const ROOM_UNIT: usize = 4096;

pub(crate) fn room_for(bytes: usize) -> u32 {
    bytes.div_ceil(ROOM_UNIT).min(u32::MAX as usize) as u32
}

impl Core {
    pub fn new(cfg: Config, env: Env, fabric: Arc<dyn Fabric>) -> Arc<Core> {
        let shared = Arc::new(Shared::new(cfg, env, fabric));
        Arc::new_cyclic(|core: &Weak<Core>| Core::of(shared, core.clone()))
    }

    fn of(shared: Arc<Shared>, owner: Weak<dyn SessionOwner>) -> Core {
        let rooms = |bytes: usize| Arc::new(Semaphore::new((bytes / ROOM_UNIT).clamp(1, Semaphore::MAX_PERMITS)));
        let (cfg, pool) = (&shared.cfg, shared.fabric.pool());
        let relays = Arc::new(Relays::new(shared.env.clone(), cfg.relay, &shared.uuid));
        let lease_cache: Arc<LeaseCache> = Arc::default();
        let metadata = Metadata::new(shared.clone(), relays.clone(), lease_cache.clone(), owner);
        Core {
            metadata: Arc::new(metadata),
            lease_cache,
            inodes: Mutex::default(),
            releases: Mutex::default(),
            locks: OwnerQueues::default(),
            lock_waiters: LockWaiters::default(),
            pages: PageLocks::default(),
            recent_lookups: RecentLookups::default(),
            open_cache: OpenCache::default(),
            recalls: Acknowledged::default(),
            clocks: Clocks::default(),
            connections: Connections::relayed(cfg.connections_per_node.max(1), relays.clone()),
            relays,
            rdma_connections: RdmaConnections::new(cfg.connections_per_node),
            pieces: Arc::new(Semaphore::new(cfg.max_inflight_pieces.max(1))),
            unstable_room: rooms(cfg.unstable_limit),
            cache: Mutex::new(Cache::new((cfg.cache_bytes as u64).min(pool.stats().limit / 2))),
            unstable: Mutex::default(),
            flush_wanted: Notify::new(),
            holding: Mutex::default(),
            held_order: AtomicU64::new(1),
            inherited: watch::Sender::new(shared.cfg.handover.as_ref().is_none_or(|k| k.former_session() == 0)),
            grants: Mutex::default(),
            asking_grants: Mutex::default(),
            flushing: Mutex::default(),
            zero: ZEROS.clone(),
            shared,
        }
    }

    // --- inodes ---

    /// The shared state of an inode if this client has it in use.
    pub fn live_inode(&self, ino: Ino) -> Option<Arc<Inode>> {
        self.inodes.lock().get(&ino).and_then(Weak::upgrade)
    }

    /// The shared state of an inode, made by `new` if it is not in use yet.
    pub fn inode(&self, ino: Ino, new: impl FnOnce() -> Inode) -> Arc<Inode> {
        let mut all = self.inodes.lock();
        if let Some(i) = all.get(&ino).and_then(Weak::upgrade) {
            return i;
        }
        if all.len() >= 64 && all.len().is_power_of_two() {
            all.retain(|_, w| w.strong_count() > 0);
        }
        let i = Arc::new(new());
        all.insert(ino, Arc::downgrade(&i));
        i
    }

    pub fn live_inodes(&self) -> Vec<Arc<Inode>> {
        self.inodes.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// The metadata servers learn in a while, many files in one request, that this client does not write them any more.
    pub fn release_later(&self, ino: Ino, release: Option<Release>) {
        let Some(mut new) = release.filter(|r| r.writer.index != 0) else { return };
        let mut all = self.releases.lock();
        if let Some((old, _)) = all.get(&ino).filter(|(old, _)| old.writer.session == new.writer.session) {
            new.writer.index = new.writer.index.max(old.writer.index);
            new.surplus |= old.surplus;
            new.kept.extend(old.kept.iter().cloned());
        }
        all.insert(ino, (new, self.metadata.openings().last()));
    }

    /// What may be told now of what was released in this session; what belongs to a lost one was released by its end. The servers take
    /// the end of a file's last open for the end of all before it, so those must have been answered, and none of them be in use.
    fn due_releases(&self, session: SessionId) -> Vec<(Ino, Release)> {
        let mut all = self.releases.lock();
        let mine = std::mem::take(&mut *all).into_iter().filter(|(_, (r, _))| r.writer.session == session);
        let (due, later): (Vec<_>, Vec<_>) = mine.partition(|(ino, (r, last))| {
            let needed = |i: Arc<Inode>| i.is_open_before(r.writer);
            !self.metadata.openings().may_open(*ino, *last) && !self.live_inode(*ino).is_some_and(needed)
        });
        all.extend(later);
        due.into_iter().map(|(ino, (r, _))| (ino, r)).collect()
    }

    /// Tells what was released.
    pub async fn send_releases(self: Arc<Self>) {
        let Some(session) = self.metadata.current_session() else { return };
        let all = self.due_releases(session.id);
        for part in all.chunks(RELEASES_AT_ONCE) {
            let one = |(ino, r): &(Ino, Release)| {
                op(pb::op::Op::Release(pb::Release { ino: *ino, writer: r.writer.index, surplus: r.surplus }))
            };
            if let Err(e) = self.metadata.meta(&pb::Creds::default(), part.iter().map(one).collect()).await {
                tracing::debug!("releasing files: {e}");
                part.iter().for_each(|(ino, r)| self.release_later(*ino, Some(r.clone())));
            }
        }
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
        let release = |c: Arc<Core>| async move { c.send_releases().await };
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
        let dirty = self.live_inodes().into_iter().filter(|inode| inode.is_dirty());
        let report = |inode: Arc<Inode>| {
            let core = self.clone();
            async move {
                if let Err(e) = core.push_size(&inode).await {
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
            () = c.flush_wanted.notified() => {}
            () = tokio::time::sleep((c.shared.cfg.flush_age / 4).max(Duration::from_millis(1))) => {}
        }
        c.flush_due();
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
        let inodes = self.live_inodes();
        inodes.iter().flat_map(|i| std::iter::repeat_n(i.ino, i.handles_of(session))).collect()
    }

    fn forget_ends(&self, session: SessionId) {
        self.live_inodes().iter().for_each(|i| i.forget_end(session));
    }

    fn lost(&self, session: SessionId) {
        {
            let mut unstable = self.unstable.lock();
            unstable.forget_session(session).values().for_each(|h| h.inode.lost_with(session, Vec::new()));
        }
        self.live_inodes().iter().for_each(|i| i.back.lose(|parts| i.lost_with(session, parts)));
        self.holding.lock().clear();
    }

    fn reopen_all(self: Arc<Self>) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move { self.reopen_strangers().await })
    }
}
