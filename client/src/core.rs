//! What all handles of one client share: the cluster map, the session, connections, bounded resources, and the
//! background tasks that keep them fresh.

use std::{
    collections::BTreeMap,
    future::Future,
    sync::{
        Arc, LazyLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{Buf, BufMut, Endpoint, Env, Fabric, LeaderFinder, watch};
use strake_proto::{
    ChainId, Code, Error, Incarnation, Ino, Kin, NodeId, Result, SessionId, TargetId, map::MapView, opcode, pb,
};
use tokio::{
    sync::{Mutex as AsyncMutex, Notify, OwnedSemaphorePermit, RwLock, Semaphore},
    time::Instant,
};

use crate::{
    api::names::op,
    config::{Config, Counters},
    data::clocks::Clocks,
    data::connections::Connections,
    data::rdma_connections::RdmaConnections,
    data::relays::Relays,
    data::route,
    handover,
    inode::{Inode, Release},
    leases::lease_cache::LeaseCache,
    leases::open_cache::OpenCache,
    leases::recalls::{self, Acknowledged},
    leases::recent_lookups::RecentLookups,
    locks::OwnerQueues,
    locks::lock_waiters::LockWaiters,
    locks::page_locks::PageLocks,
    metadata::followers::Followers,
    metadata::opens::Openings,
    metadata::{Link, Session},
    read::cache::Cache,
    shared::retry::{Backoff, in_doubt},
    shared::unreachable::{Kind, Unreachable},
    write::grants::Grants,
    write::unstable::Unstable,
    write::writeback,
};

/// What an unstable write keeps alive until it is stable.
pub(crate) struct Hold {
    pub inode: Arc<Inode>,
    /// Its share of [`Config::unstable_limit`].
    pub _room: Option<OwnedSemaphorePermit>,
}

pub(crate) struct Core {
    pub cfg: Config,
    pub env: Env,
    pub fabric: Arc<dyn Fabric>,
    pub stats: Counters,
    pub uuid: [u8; 16],
    map: ArcSwap<MapView>,
    pub map_changed: watch::Sender<u64>,
    map_refresh: AsyncMutex<()>,
    /// Ended requests for a map.
    map_refreshes: AtomicU64,
    pub(crate) finder: Mutex<LeaderFinder>,
    pub(crate) link: AsyncMutex<Link>,
    pub(crate) followers: Followers,
    pub(crate) session: Mutex<Option<Arc<Session>>>,
    pub(crate) session_change: AsyncMutex<()>,
    inodes: Mutex<BTreeMap<Ino, Weak<Inode>>>,
    /// Files that are to be released, see [`Core::release_later`], and the last opening before that.
    releases: Mutex<BTreeMap<Ino, (Release, u64)>>,
    pub(crate) openings: Openings,
    pub locks: OwnerQueues,
    pub lock_waiters: LockWaiters,
    pub(crate) pages: PageLocks,
    pub lease_cache: LeaseCache,
    pub recent_lookups: RecentLookups,
    pub open_cache: OpenCache,
    /// See [`Core::reassertions`].
    pub(crate) reassertions: AtomicU64,
    /// Held to tell of closes, alone to tell of everything on the same connection.
    pub(crate) closing: RwLock<()>,
    /// Leases began on a new connection.
    pub(crate) greeted: Notify,
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
    closed: AtomicBool,
    /// Its session ends, and there will be no other.
    ending: AtomicBool,
    pub(crate) read_only: AtomicBool,
    pub(crate) unreachable: Mutex<Unreachable>,
}

/// Sizes that are being reported at a time.
const SIZES_AT_ONCE: usize = 32;
/// How long a release may wait for others, and how many make one request.
const RELEASE_INTERVAL: Duration = Duration::from_millis(200);
const RELEASES_AT_ONCE: usize = 1024;

/// Whoever waits longer for servers has it told in the log.
const TOO_LONG: Duration = Duration::from_secs(3);

/// Zeros for holes, of all clients of the process; memory that nobody writes to takes none.
static ZEROS: LazyLock<Buf> = LazyLock::new(|| BufMut::unpooled(1 << 20).freeze());

/// Granularity of the memory limits, bytes.
pub(crate) const ROOM_UNIT: usize = 4096;

pub(crate) fn room_for(bytes: usize) -> u32 {
    bytes.div_ceil(ROOM_UNIT).min(u32::MAX as usize) as u32
}

/// One operation's time limit and pauses.
pub(crate) struct Attempts {
    what: &'static str,
    began: Instant,
    deadline: Instant,
    backoff: Backoff,
    /// An attempt may have run without an answer.
    pub in_doubt: bool,
}

impl Attempts {
    pub fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// After a failed attempt: pauses, or gives up with the cause when the time is over. A new cluster map ends the
    /// pause early.
    pub async fn pause(&mut self, core: &Core, cause: Error) -> Result<()> {
        self.in_doubt |= in_doubt(&cause);
        Counters::add(&core.stats.retries, 1);
        let waited = self.began.elapsed();
        core.stats.stalled(waited);
        let left = self.left();
        if waited >= TOO_LONG {
            core.tell_stuck();
        }
        if left.is_zero() || core.is_closed() {
            let m = format!("{}: gave up after {:.1} s: {cause}", self.what, waited.as_secs_f64());
            return Err(Error::new(Code::TimedOut, m));
        }
        let mut changed = core.map_changed.subscribe();
        let pause = self.backoff.next(core.env.random_u64()).min(left);
        tokio::select! {
            biased;
            _ = changed.changed() => {}
            () = tokio::time::sleep(pause) => {}
        }
        Ok(())
    }
}

impl Core {
    pub fn new(cfg: Config, env: Env, fabric: Arc<dyn Fabric>) -> Core {
        let rooms = |bytes: usize| Arc::new(Semaphore::new((bytes / ROOM_UNIT).clamp(1, Semaphore::MAX_PERMITS)));
        let mut finder = LeaderFinder::new(cfg.mds.clone());
        finder.learn(cfg.handover.iter().flat_map(|k| k.mds()));
        let uuid = cfg.handover.as_ref().map(|k| k.uuid()).or(cfg.uuid).unwrap_or_else(|| env.random_bytes());
        let relays = Arc::new(Relays::new(env.clone(), cfg.relay, &uuid));
        Core {
            uuid,
            map: ArcSwap::default(),
            map_changed: watch::Sender::new(0),
            map_refresh: AsyncMutex::default(),
            map_refreshes: AtomicU64::new(0),
            finder: Mutex::new(finder),
            link: AsyncMutex::default(),
            followers: Followers::default(),
            session: Mutex::new(None),
            session_change: AsyncMutex::default(),
            inodes: Mutex::default(),
            releases: Mutex::default(),
            openings: Openings::default(),
            locks: OwnerQueues::default(),
            lock_waiters: LockWaiters::default(),
            pages: PageLocks::default(),
            lease_cache: LeaseCache::default(),
            recent_lookups: RecentLookups::default(),
            open_cache: OpenCache::default(),
            reassertions: AtomicU64::new(0),
            closing: RwLock::default(),
            greeted: Notify::new(),
            recalls: Acknowledged::default(),
            clocks: Clocks::default(),
            connections: Connections::relayed(cfg.connections_per_node.max(1), relays.clone()),
            relays,
            rdma_connections: RdmaConnections::new(cfg.connections_per_node),
            pieces: Arc::new(Semaphore::new(cfg.max_inflight_pieces.max(1))),
            unstable_room: rooms(cfg.unstable_limit),
            cache: Mutex::new(Cache::new((cfg.cache_bytes as u64).min(fabric.pool().stats().limit / 2))),
            unstable: Mutex::default(),
            flush_wanted: Notify::new(),
            holding: Mutex::default(),
            held_order: AtomicU64::new(1),
            inherited: watch::Sender::new(cfg.handover.as_ref().is_none_or(|k| k.former_session() == 0)),
            grants: Mutex::default(),
            asking_grants: Mutex::default(),
            flushing: Mutex::default(),
            zero: ZEROS.clone(),
            closed: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            unreachable: Mutex::default(),
            read_only: AtomicBool::new(cfg.read_only),
            stats: Counters::default(),
            fabric,
            env,
            cfg,
        }
    }

    pub fn attempts(&self, what: &'static str) -> Attempts {
        self.attempts_for(what, self.cfg.op_timeout)
    }

    pub fn attempts_for(&self, what: &'static str, limit: Duration) -> Attempts {
        let began = Instant::now();
        Attempts { what, began, deadline: began + limit, backoff: Backoff::default(), in_doubt: false }
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Relaxed)
    }
    pub fn set_closed(&self) {
        self.closed.store(true, Relaxed);
    }
    pub fn is_ending(&self) -> bool {
        self.ending.load(Relaxed)
    }
    pub fn set_ending(&self) {
        self.ending.store(true, Relaxed);
    }

    /// Runs an operation to its end even if the caller goes away: what was begun is finished or retried, never left
    /// half done.
    pub async fn detached<T, F>(&self, f: F) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let running = self.env.spawn(handover::numbered(handover::numbers(), f));
        running.await.map_err(|_| Error::new(Code::Io, "the client is being shut down"))?
    }

    // --- servers that are away ---

    /// A server did not answer, or cannot do what it is for.
    pub fn failed(&self, kind: Kind, who: &str, e: &Error) {
        self.unreachable.lock().failed(kind, who, &e.message, Instant::now());
    }

    pub fn answered(&self, kind: Kind, who: &str) {
        let back = self.unreachable.lock().answered(kind, who, Instant::now());
        if let Some((what, after)) = back {
            tracing::info!("{what} again after {:.1} s", after.as_secs_f64());
        }
    }

    fn tell_stuck(&self) {
        let Some(list) = self.unreachable.lock().stuck() else { return };
        let limit = self.cfg.op_timeout;
        match limit >= crate::FOREVER {
            true => tracing::warn!("waiting for {list}; programs wait until they answer"),
            false => tracing::warn!("waiting for {list}; calls fail after {} s", limit.as_secs()),
        }
    }

    // --- cluster map ---

    pub fn map(&self) -> Arc<MapView> {
        self.map.load_full()
    }

    /// Takes a map if it is newer.
    pub fn install_map(&self, map: pb::ClusterMap) -> Result<()> {
        let have = self.map.load();
        if map.version <= have.version() && have.version() != 0 {
            return Ok(());
        }
        // Numbers of versions say nothing between two groups that were made from what was left of one.
        let (own, theirs) = (Incarnation(have.map.incarnation), Incarnation(map.incarnation));
        if have.version() != 0 && own.kin(theirs) == Kin::Twin {
            let m = format!(
                "a metadata server of incarnation {theirs} answered, which was recovered apart from {own}; one of the two must be stopped"
            );
            return Err(Error::new(Code::NotLeader, m));
        }
        let view = MapView::new(map)?;
        let mds: Vec<Endpoint> = view.mds();
        {
            // One at a time writes them down.
            let mut finder = self.finder.lock();
            if let Some(k) = self.cfg.handover.as_ref().filter(|_| !mds.is_empty()) {
                k.set_mds(&mds);
            }
            finder.learn(mds);
        }
        let version = view.version();
        let view = Arc::new(view);
        self.relays.learn(&view);
        self.map.store(view);
        self.map_changed.send_replace(version);
        Ok(())
    }

    /// Asks for a map newer than `than`; one request serves all who ask at once. Quiet when there is none yet.
    pub async fn refresh_map(self: &Arc<Self>, than: u64) {
        let ended = self.map_refreshes.load(Relaxed);
        let _one = self.map_refresh.lock().await;
        if self.map.load().version() > than || self.map_refreshes.load(Relaxed) != ended {
            return;
        }
        let body = Bytes::from(pb::MapRequest { have: than, latest: false }.encode_to_vec());
        let mut at = self.attempts_for("fetching the cluster map", Duration::from_secs(1));
        let reply = self.mds_call(opcode::MAP, |_| body.clone(), Duration::from_secs(1), &mut at).await;
        match reply.and_then(|m| crate::metadata::decode::<pb::MapReply>(&m)) {
            Ok(pb::MapReply { map: Some(map) }) => {
                if let Err(e) = self.install_map(map) {
                    tracing::warn!("{e}");
                }
            }
            Ok(_) => {}
            Err(e) => tracing::debug!("{e}"),
        }
        self.map_refreshes.fetch_add(1, Relaxed);
    }

    pub fn local_node(&self, map: &MapView) -> Option<NodeId> {
        route::local_node(map, &self.cfg.hostname)
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
        all.insert(ino, (new, self.openings.last()));
    }

    /// What may be told now of what was released in this session; what belongs to a lost one was released by its end. The servers take
    /// the end of a file's last open for the end of all before it, so those must have been answered, and none of them be in use.
    fn due_releases(&self, session: SessionId) -> Vec<(Ino, Release)> {
        let mut all = self.releases.lock();
        let mine = std::mem::take(&mut *all).into_iter().filter(|(_, (r, _))| r.writer.session == session);
        let (due, later): (Vec<_>, Vec<_>) = mine.partition(|(ino, (r, last))| {
            let needed = |i: Arc<Inode>| i.is_open_before(r.writer);
            !self.openings.may_open(*ino, *last) && !self.live_inode(*ino).is_some_and(needed)
        });
        all.extend(later);
        due.into_iter().map(|(ino, (r, _))| (ino, r)).collect()
    }

    /// Tells what was released.
    pub async fn send_releases(self: Arc<Self>) {
        let Some(session) = self.current_session() else { return };
        let all = self.due_releases(session.id);
        for part in all.chunks(RELEASES_AT_ONCE) {
            let one = |(ino, r): &(Ino, Release)| {
                op(pb::op::Op::Release(pb::Release { ino: *ino, writer: r.writer.index, surplus: r.surplus }))
            };
            if let Err(e) = self.meta(&pb::Creds::default(), part.iter().map(one).collect()).await {
                tracing::debug!("releasing files: {e}");
                part.iter().for_each(|(ino, r)| self.release_later(*ino, Some(r.clone())));
            }
        }
    }

    // --- background ---

    pub fn start_background(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.env.spawn(every(weak.clone(), |c| c.renew_interval(), |c| async move { c.renew().await }));
        let extend = self.cfg.extend_interval;
        self.env.spawn(every(weak.clone(), move |_| extend, |c| async move { c.push_sizes().await }));
        let release = |c: Arc<Core>| async move { c.send_releases().await };
        self.env.spawn(every(weak.clone(), |_| RELEASE_INTERVAL, release));
        let close = |c: Arc<Core>| async move { c.close_idle().await };
        self.env.spawn(every(weak.clone(), |_| RELEASE_INTERVAL, close));
        if self.cfg.write_back || !*self.inherited.borrow() {
            self.env.spawn(every(weak.clone(), |_| writeback::LOOK, |c| async move { c.send_due().await }));
        }
        self.env.spawn(recalls::serve(weak.clone()));
        self.env.spawn(flush_loop(weak));
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
            Some(c) if !c.is_closed() => f(c).await,
            _ => return,
        }
    }
}

/// Flushes chains whose unstable bytes are old or many, on a timer and when somebody waits for room.
async fn flush_loop(core: Weak<Core>) {
    loop {
        let Some(c) = core.upgrade() else { return };
        if c.is_closed() {
            return;
        }
        tokio::select! {
            biased;
            () = c.flush_wanted.notified() => {}
            () = tokio::time::sleep((c.cfg.flush_age / 4).max(Duration::from_millis(1))) => {}
        }
        c.flush_due();
    }
}
