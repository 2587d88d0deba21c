//! State that all parts of a storage server share, and the cluster map. `node/registration.rs`
//! handles its membership in the cluster.

mod registration;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::{Mutex, RwLock};
use strake_fabric::{Pool, Turns};
use strake_proto::{
    CapKey, Capability, ChainId, Code, Error, Incarnation, Kin, Result, Rights, SessionId,
    TargetId,
    data::Clock,
    ids::TARGET_UNASSIGNED,
    map::{ChainExt, MapView},
    pb::{self, ReplicaState},
};
use strake_runtime::Env;
use tokio::{
    sync::{Notify, Semaphore, oneshot},
    task::JoinHandle,
    time::Instant,
};

use super::{
    Config, Parts, TargetConfig,
    backpressure::{Fills, Foreground},
    damage::Damage,
    endings::Endings,
    peers::Peers,
    places::Places,
    refused_targets::{self, RefusedTarget},
    replica::Replica,
    scrub::{self, Ask, Scrub},
};
use crate::{
    chain::View,
    engine::{Engine, Position, TargetIdentity},
};

/// Most evicted sessions remembered. Their capabilities expire long before so many more follow.
const KEPT_EVICTED: usize = 65_536;
/// With less free space than this, an update is staged before it is forwarded.
const ROOM: u64 = 256 << 20;
/// Requests of one machine in work while others are active: enough to keep a device busy.
const SHARED: usize = 64;
/// Limits of the bytes of client requests in work, in units of [`HEAVY`]: of all machines, and of
/// one machine while others are active.
const BULK: usize = 512;
const BULK_SHARED: usize = 16;
/// A request with more bytes than this also waits for its turn among large requests.
pub(super) const HEAVY: usize = 64 << 10;
/// How long a chunk table refuses writes before other servers are told.
const TABLE_FULL: Duration = Duration::from_secs(1);
/// How long the server tries to register a new target.
const JOIN: Duration = Duration::from_secs(20);
/// Chunks of one target that are repaired at a time.
const REPAIRS: usize = 4;

/// One target in this run of the process.
pub(super) struct Target {
    pub engine: Arc<Engine>,
    pub stamp: u64,
    /// `TARGET_UNASSIGNED` until registered.
    pub id: AtomicU32,
    pub damage: Damage,
    pub scrub: Scrub,
    /// Limits how many chunks repairs have in memory.
    pub repairs: Semaphore,
    pub foreground: Foreground,
    pub fills: Fills,
    failed: AtomicBool,
    /// Why its chunk table cannot be read, if so.
    unreadable: Mutex<Option<Error>>,
    /// How often it has left its chains for lack of space, plus how often it returned. Odd: it is
    /// out.
    lapses: AtomicU32,
    /// Since when its chunk table refuses writes for lack of space, on the boot clock.
    table_full: Mutex<Option<Duration>>,
}

impl Target {
    fn new(engine: Arc<Engine>, stamp: u64) -> Arc<Target> {
        let id = AtomicU32::new(engine.identity().target_id);
        let position = engine.scrub_position().unwrap_or_else(|e| {
            tracing::warn!("the scrub begins anew: {e}");
            Position::default()
        });
        let (damage, scrub, repairs) =
            (Damage::of(engine.clone()), Scrub::new(position), Semaphore::new(REPAIRS));
        let (failed, unreadable, lapses) =
            (AtomicBool::new(false), Mutex::default(), AtomicU32::new(0));
        let (foreground, fills, table_full) =
            (Foreground::default(), Fills::default(), Mutex::default());
        Arc::new(Target {
            engine,
            stamp,
            id,
            damage,
            scrub,
            repairs,
            foreground,
            fills,
            failed,
            unreadable,
            lapses,
            table_full,
        })
    }

    pub(super) fn id(&self) -> TargetId {
        self.id.load(Ordering::Acquire)
    }
    pub(super) fn failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
    /// A replica lacks what its successor has. If for lack of space, the target is out until there
    /// is space. Otherwise it is out for good.
    pub(super) fn fail(&self, why: &Error) {
        if why.code == Code::NoSpc {
            let is_in = |n: u32| n.is_multiple_of(2).then_some(n + 1);
            if self.lapses.fetch_update(Ordering::AcqRel, Ordering::Acquire, is_in).is_ok() {
                tracing::error!(
                    "target {} leaves its chains until there is space: {why}",
                    self.id()
                );
            }
        } else if !self.failed.swap(true, Ordering::AcqRel) {
            tracing::error!("target {} has failed and leaves its chains: {why}", self.id());
        }
    }
    /// Fails the target because its table cannot be read. If the table is damaged, the target is
    /// taken out of service once nothing on it is needed.
    pub(super) fn cannot_be_read(&self, why: &Error) {
        if why.code == Code::Corrupt {
            self.unreadable.lock().get_or_insert_with(|| why.clone());
        }
        self.fail(why);
    }
    pub(super) fn lacks_space(&self) -> bool {
        self.lapses.load(Ordering::Acquire) % 2 == 1
    }
    /// `NotServing` if this target is out. It holds before the mds is told, because from then on
    /// the target may be behind in each of its chains.
    pub(super) fn check_in(&self) -> Result<()> {
        if self.failed() || self.lacks_space() {
            return Err(Error::new(
                Code::NotServing,
                format!("target {} is out of its chains", self.id()),
            ));
        }
        Ok(())
    }
    fn come_back(&self) {
        if self
            .lapses
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n % 2 == 1).then_some(n + 1))
            .is_ok()
        {
            tracing::info!("target {} has space again and comes back", self.id());
        }
    }
    /// Notes the result of the latest flush.
    fn flushed(&self, now: Duration, result: &Result<()>) {
        let mut full = self.table_full.lock();
        match result {
            Err(e) if e.code == Code::NoSpc => *full = full.or(Some(now)),
            _ => *full = None,
        }
        drop(full);
        if let Err(e) = result {
            self.note(e);
        }
    }
    /// Whether its chunk table has refused writes for lack of space for a while.
    fn table_is_full(&self, now: Duration) -> bool {
        self.table_full.lock().is_some_and(|since| now.saturating_sub(since) >= TABLE_FULL)
    }
    /// Notes an error of the engine: an error of the device takes the target out.
    pub(super) fn note(&self, e: &Error) {
        if e.code == Code::Io {
            self.fail(e);
        }
    }
    /// Latencies of its device.
    fn times(&self) -> pb::DeviceTimes {
        let device = self.engine.device();
        pb::DeviceTimes { rotates: device.rotates(), ..device.meter().summary() }
    }
    pub(super) fn has_room(&self) -> bool {
        let u = self.engine.usage();
        u.capacity.saturating_sub(u.used + u.granted) > ROOM.min(u.capacity / 8)
            && self.engine.device().spare() > ROOM
    }
}

/// Minimum epochs of evicted sessions.
#[derive(Default)]
struct Evictions {
    seen: u64,
    min_epoch: BTreeMap<SessionId, (u64, u64)>,
    order: BTreeMap<u64, SessionId>,
    /// All sessions with lower ids are evicted, by the eviction with this number.
    below: (SessionId, u64),
    /// How many updates of each session are in work.
    in_work: BTreeMap<SessionId, usize>,
}

/// An update of a session, in work until this is dropped.
pub(super) struct InWork {
    node: Arc<Node>,
    session: SessionId,
}

impl Drop for InWork {
    fn drop(&mut self) {
        let mut ev = self.node.revoked.evictions.lock();
        if let Some(n) = ev.in_work.get_mut(&self.session) {
            *n -= 1;
            if *n == 0 {
                ev.in_work.remove(&self.session);
            }
        }
    }
}

impl Evictions {
    fn add(&mut self, e: &pb::Evicted) {
        self.seen = self.seen.max(e.number);
        if e.below {
            self.below = self.below.max((e.session, e.number));
            return;
        }
        self.min_epoch.insert(e.session, (e.min_epoch, e.number));
        self.order.insert(e.number, e.session);
        while self.order.len() > KEPT_EVICTED {
            let Some((number, session)) = self.order.pop_first() else { return };
            if self.min_epoch.get(&session).is_some_and(|(_, n)| *n == number) {
                self.min_epoch.remove(&session);
            }
        }
    }

    /// The number up to which evictions are complete here: no update of those sessions is in work
    /// any more.
    fn over(&self) -> u64 {
        let evicted_by = |session: &SessionId| {
            let one = self.min_epoch.get(session).map(|(_, number)| *number);
            one.into_iter().chain((*session < self.below.0).then_some(self.below.1)).min()
        };
        let first = self.in_work.keys().filter_map(evicted_by).min();
        first.map_or(self.seen, |number| self.seen.min(number.saturating_sub(1)))
    }
}

/// Chains for which the metadata servers do not know yet which replicas are in sync.
fn doubted(map: &MapView) -> BTreeSet<ChainId> {
    map.map.doubts.iter().map(|d| d.chain).collect()
}

/// Whether a target is not, and will not become, a replica of a chain, and another one is in sync.
fn has_left(chain: &pb::Chain, target: TargetId) -> bool {
    chain.head().is_some() && chain.state_of(target).is_none() && !chain.preferred.contains(&target)
}

/// Whether all replicas that a chain should have are in sync.
fn is_whole(chain: &pb::Chain) -> bool {
    chain.preferred.iter().all(|t| chain.state_of(*t) == Some(ReplicaState::ReplicaServing))
}

/// Whether a target may work with the metadata group of incarnation `now`.
pub(super) fn follows(target: &TargetIdentity, now: u64) -> bool {
    let was = Incarnation(target.incarnation);
    // A target that never joined has no group.
    target.fs_uuid == [0; 16] || matches!(was.kin(Incarnation(now)), Kin::Same | Kin::Newer)
}

/// A target to be registered while the others serve.
struct Joining {
    target: Arc<Target>,
    until: Instant,
    done: oneshot::Sender<Result<TargetId>>,
}

/// Background work for targets: those out of service, and tasks for those in service.
#[derive(Default)]
struct Duty {
    /// Configured targets that are out of service.
    refused: Mutex<Vec<Arc<RefusedTarget>>>,
    /// Targets that came back empty in this run of the server.
    emptied: Mutex<BTreeSet<TargetId>>,
    /// Targets that wait to be registered.
    joining: Mutex<VecDeque<Joining>>,
    /// Background tasks of each target, by its stamp.
    tending: Mutex<Vec<(u64, JoinHandle<()>)>>,
}

/// The metadata group that this server belongs to.
#[derive(Default)]
struct Group {
    /// The cluster's UUID, once known.
    fs: Mutex<Option<[u8; 16]>>,
    /// Incarnation of the metadata group that it last registered with.
    joined: AtomicU64,
}

/// Decides which client's request is worked on next.
pub(super) struct RequestTurns {
    pub(super) clients: Turns,
    /// The same for requests with many bytes, which wait here first.
    pub(super) bulk: Turns,
}

/// The lease that this server holds from the metadata servers.
#[derive(Default)]
struct Lease {
    /// When it expires, on the boot clock.
    until: Mutex<Duration>,
    /// Heartbeats sent. One at a time: the answer to an earlier one grants no lease.
    beats: AtomicU64,
}

/// Sessions and rights that have ended.
#[derive(Default)]
struct Revoked {
    evictions: Mutex<Evictions>,
    endings: RwLock<Endings>,
}

pub(super) struct Node {
    pub cfg: Config,
    pub env: Env,
    /// For targets that are opened while the server runs.
    pub pool: Pool,
    pub cap_key: CapKey,
    pub peers: Peers,
    pub places: Places,
    /// Changed only by the task that registers them.
    targets: ArcSwap<Vec<Arc<Target>>>,
    duty: Duty,
    group: Group,
    pub id: AtomicU32,
    pub map: ArcSwap<MapView>,
    /// Send a heartbeat now: the map is stale, or there is news.
    pub kick: Notify,
    pub turns: RequestTurns,
    pub started: Duration,
    replicas: Mutex<BTreeMap<(TargetId, ChainId), Arc<Replica>>>,
    lease: Lease,
    revoked: Revoked,
    next_op: AtomicU64,
    stopped: AtomicBool,
    /// Maps are applied one at a time, in order.
    applying: Mutex<()>,
}

impl Node {
    pub(super) fn new(
        cfg: Config,
        parts: Parts,
        (peers, places): (Peers, Places),
        refused: Vec<Arc<RefusedTarget>>,
    ) -> Arc<Node> {
        let Parts { env, fabric, targets, cap_key } = parts;
        let targets = targets.into_iter().map(|e| Target::new(e, env.random_u64())).collect();
        Arc::new(Node {
            turns: RequestTurns {
                clients: Turns::shared(cfg.max_requests, SHARED),
                bulk: Turns::shared(BULK, BULK_SHARED),
            },
            targets: ArcSwap::from_pointee(targets),
            duty: Duty { refused: Mutex::new(refused), ..Duty::default() },
            group: Group::default(),
            pool: fabric.pool().clone(),
            cap_key,
            peers,
            places,
            id: AtomicU32::new(0),
            map: ArcSwap::from_pointee(MapView::default()),
            kick: Notify::new(),
            started: env.boot(),
            replicas: Mutex::default(),
            lease: Lease::default(),
            revoked: Revoked::default(),
            next_op: AtomicU64::new(1),
            stopped: AtomicBool::new(false),
            applying: Mutex::default(),
            cfg,
            env,
        })
    }

    /// Notes that a session is active here, which limits what others have in work.
    pub(super) fn note(&self, session: SessionId) {
        self.turns.clients.note(session);
        self.turns.bulk.note(session);
    }

    pub(super) fn next_op(&self) -> u64 {
        self.next_op.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn lease_left(&self) -> Duration {
        self.lease.until.lock().saturating_sub(self.env.boot())
    }

    pub(super) fn check_lease(&self) -> Result<()> {
        if self.lease_left().is_zero() {
            let m = format!(
                "storage server '{}' has no lease: it does not reach the metadata leader",
                self.cfg.name
            );
            return Err(Error::new(Code::LeaseExpired, m));
        }
        Ok(())
    }

    pub(super) fn check_session(&self, session: SessionId, epoch: u64) -> Result<()> {
        let evictions = self.revoked.evictions.lock();
        let evicted = evictions.min_epoch.get(&session).is_some_and(|(min, _)| epoch < *min);
        if evicted || session < evictions.below.0 {
            return Err(Error::new(Code::NoSession, format!("session {session:x} was evicted")));
        }
        Ok(())
    }

    /// The rights of a capability that have not ended.
    pub(super) fn rights_left(&self, c: &Capability) -> Rights {
        if self.cfg.end_capabilities { self.revoked.endings.read().left(c) } else { c.rights }
    }

    /// The server's time, for clients to put into updates; `None`: updates live for ever.
    pub(super) fn clock(&self) -> Option<Clock> {
        let life = self.cfg.update_life_ms;
        (life != 0).then(|| Clock { now: self.env.boot().as_millis() as u64 + 1, life })
    }

    /// To be held while an update of a session is in work. Take it before checking whether the
    /// session is evicted.
    pub(super) fn in_work(self: &Arc<Self>, session: SessionId) -> InWork {
        *self.revoked.evictions.lock().in_work.entry(session).or_default() += 1;
        InWork { node: self.clone(), session }
    }

    /// The replica of a chain on a target of this server.
    pub(super) fn replica(&self, target: TargetId, chain: ChainId) -> Result<Arc<Replica>> {
        self.replicas.lock().get(&(target, chain)).cloned().ok_or_else(|| {
            self.kick.notify_one();
            let m = format!(
                "target {target} of storage server '{}' has no replica of chain {chain}",
                self.cfg.name
            );
            Error::new(Code::NotServing, m)
        })
    }

    /// The replica with the lowest chain from `from` on, on a target of this server.
    pub(super) fn next_replica(&self, target: TargetId, from: ChainId) -> Option<Arc<Replica>> {
        let replicas = self.replicas.lock();
        replicas.range((target, from)..=(target, ChainId::MAX)).next().map(|(_, r)| r.clone())
    }

    /// Whether the target is the only in-sync replica of a chain that ever stored something on it.
    pub(super) fn is_last(&self, target: TargetId) -> bool {
        let replicas: Vec<Arc<Replica>> =
            self.replicas.lock().values().filter(|r| r.id == target).cloned().collect();
        let used = self.target(target).and_then(|t| t.engine.used());
        let had = |r: &Arc<Replica>| used.as_ref().is_none_or(|used| used.contains(&r.chain));
        replicas.iter().any(|r| had(r) && r.view().serving == [target])
    }

    /// Applies a request to these targets (all if empty). Returns their state afterwards. `NoEnt`:
    /// no such target here.
    pub(super) fn scrub(
        &self,
        ask: Option<Ask>,
        targets: &[TargetId],
    ) -> Result<Vec<pb::ScrubStatus>> {
        if let Some(unknown) = targets.iter().find(|t| self.target(**t).is_none()) {
            let m = format!("storage server '{}' has no target {unknown}", self.cfg.name);
            return Err(Error::new(Code::NoEnt, m));
        }
        let own = self.targets();
        let chosen = own.iter().filter(|t| targets.is_empty() || targets.contains(&t.id()));
        let each = chosen.map(|t| {
            ask.into_iter().for_each(|a| t.scrub.ask(a));
            scrub::status(self, t)
        });
        Ok(each.collect())
    }

    pub(super) fn targets(&self) -> Arc<Vec<Arc<Target>>> {
        self.targets.load_full()
    }

    pub(super) fn target(&self, id: TargetId) -> Option<Arc<Target>> {
        self.targets.load().iter().find(|t| t.id() == id).cloned()
    }

    /// Starts the tasks that flush and scrub a target.
    pub(super) fn tend(self: &Arc<Self>, target: &Arc<Target>) {
        let (t, env, every) =
            (target.clone(), self.env.clone(), Duration::from_millis(self.cfg.flush_ms));
        let flush = async move {
            loop {
                tokio::time::sleep(every).await;
                let flushed = if t.engine.is_dirty() { t.engine.flush().await } else { Ok(()) };
                t.flushed(env.boot(), &flushed);
                t.damage.sync().await;
            }
        };
        let env = &self.env;
        let scrub = env.spawn(scrub::run(self.clone(), target.clone()));
        let heal = env.spawn(scrub::heal(self.clone(), target.clone()));
        self.duty
            .tending
            .lock()
            .extend([env.spawn(flush), scrub, heal].map(|task| (target.stamp, task)));
    }

    /// Registers one more target while the others serve; returns its number. After an error nothing
    /// has changed here. Whether the metadata servers know the target is not known then, and does
    /// not matter: the call may be repeated.
    pub(super) async fn add_target(&self, engine: Arc<Engine>) -> Result<TargetId> {
        let (done, answer) = oneshot::channel();
        let target = Target::new(engine, self.env.random_u64());
        {
            let mut joining = self.duty.joining.lock();
            if !self.stopped() {
                joining.push_back(Joining { target, until: Instant::now() + JOIN, done });
            }
        }
        self.kick.notify_one();
        answer
            .await
            .map_err(|_| Error::new(Code::Disconnected, "this storage server is stopping"))?
    }

    pub(super) fn refused_targets(&self) -> Vec<Arc<RefusedTarget>> {
        self.duty.refused.lock().clone()
    }

    /// Starts the task that brings a target back into service.
    pub(super) fn look_after(self: &Arc<Self>, refused: Arc<RefusedTarget>) {
        let task = self.env.spawn(refused_targets::come_back(self.clone(), refused));
        self.duty.tending.lock().push((0, task));
    }

    /// Targets whose tables cannot be read have left their chains. Once nothing on them is needed,
    /// they are treated like targets that were found damaged at the start.
    fn let_go(self: &Arc<Self>) {
        let map = self.map.load_full();
        for t in self.targets().iter() {
            let why = t.unreadable.lock().clone();
            let why = why.filter(|_| {
                refused_targets::needed(&map, &t.engine.identity(), t.engine.used().as_ref())
                    .is_none()
            });
            let Some(damaged) = why.and_then(|why| t.engine.as_damaged(why)) else { continue };
            self.take_out(t, RefusedTarget::damaged(damaged));
        }
    }

    /// Takes a target out of service and starts the task that brings it back.
    fn take_out(self: &Arc<Self>, t: &Arc<Target>, refused: Arc<RefusedTarget>) {
        let others = self.targets().iter().filter(|o| !Arc::ptr_eq(o, t)).cloned().collect();
        self.targets.store(Arc::new(others));
        self.replicas.lock().retain(|(id, _), _| *id != t.id());
        self.duty
            .tending
            .lock()
            .extract_if(.., |(stamp, _)| *stamp == t.stamp)
            .for_each(|(_, task)| task.abort());
        self.duty.refused.lock().push(refused.clone());
        self.look_after(refused);
    }

    /// Takes out targets that do not fit the cluster of this map: they would keep the others out.
    fn refuse_unfit(self: &Arc<Self>, map: &pb::ClusterMap) {
        let mut seen = BTreeSet::new();
        for t in self.targets().iter() {
            let id = t.engine.identity();
            let twice = (!seen.insert(id.target_uuid)).then(|| {
                let m = format!(
                    "another folder of this server holds target {}, too; it is a copy",
                    id.target_id
                );
                Error::new(Code::Inval, m)
            });
            // A target moved here may still have its lease at the old server: wait for its end.
            let waits = |e: &Error| {
                e.code == Code::Busy && self.env.boot().saturating_sub(self.started) < JOIN
            };
            let why = twice
                .or_else(|| refused_targets::unfit(map, &self.cfg.name, &id))
                .filter(|e| !waits(e));
            if let (Some(why), Some(path)) = (why, t.engine.path()) {
                self.take_out(t, RefusedTarget::refused(path.clone(), why.context(path.display())));
            }
        }
    }

    /// The UUID of the cluster, once known.
    pub(super) fn fs(&self) -> Option<[u8; 16]> {
        *self.group.fs.lock()
    }

    /// Forgets targets out of service whose folders an administrator has removed from the
    /// configuration. The others are looked at now, including targets that have failed.
    pub(super) fn look_again(self: &Arc<Self>, configured: &[TargetConfig]) {
        for t in self.targets().iter().filter(|t| t.failed()) {
            if let Some(path) = t.engine.path() {
                let why = Error::new(Code::Io, format!("{}: it had failed", path.display()));
                self.take_out(t, RefusedTarget::refused(path, why));
            }
        }
        self.duty.refused.lock().retain(|o| configured.iter().any(|t| t.path == o.path));
        for o in self.refused_targets() {
            configured.iter().filter(|t| t.path == o.path).for_each(|t| o.look_again(t));
        }
    }

    /// A target that was out serves again; empty at first if its table was lost.
    pub(super) fn is_back(&self, refused: &Arc<RefusedTarget>, id: TargetId, is_empty: bool) {
        self.duty.refused.lock().retain(|o| !Arc::ptr_eq(o, refused));
        if is_empty {
            self.duty.emptied.lock().insert(id);
        } else {
            tracing::info!("target {id} is back in service: {}", refused.path.display());
        }
    }

    /// Takes a newer map: every replica gets its chain's new state.
    pub(super) fn apply_map(self: &Arc<Self>, map: pb::ClusterMap) -> Result<()> {
        let _one = self.applying.lock();
        let before = self.map.load_full();
        if map.version <= before.version() {
            return Ok(());
        }
        let own = self.incarnation();
        if own.kin(Incarnation(map.incarnation)) != Kin::Same
            && self.id.load(Ordering::Acquire) != 0
        {
            return Err(Error::new(
                Code::Stale,
                "the metadata group was recovered; register again",
            ));
        }
        let first = before.version() == 0;
        let map = Arc::new(MapView::new(map)?);
        self.note_chain_views(&map);
        self.map.store(map.clone());
        for target in self.targets().iter().filter(|t| t.id() != TARGET_UNASSIGNED) {
            let id = target.id();
            for chain in map.chains_of(id) {
                let in_former_life = first
                    && matches!(
                        chain.state_of(id),
                        Some(ReplicaState::ReplicaServing | ReplicaState::ReplicaSyncing)
                    );
                let stale_through = if in_former_life { chain.epoch } else { 0 };
                let new =
                    || Replica::new(self.clone(), target.clone(), id, chain.id, stale_through);
                self.replicas.lock().entry((id, chain.id)).or_insert_with(new);
            }
            // Data of chains that it left in an earlier run may still be there.
            for chain in target.engine.known_chains() {
                let new = || Replica::new(self.clone(), target.clone(), id, chain, 0);
                self.replicas.lock().entry((id, chain)).or_insert_with(new);
            }
        }
        let doubted = doubted(&map);
        let replicas: Vec<Arc<Replica>> = self.replicas.lock().values().cloned().collect();
        for r in replicas {
            if let Some(chain) = map.chain(r.chain) {
                let left = !doubted.contains(&chain.id) && has_left(chain, r.id);
                r.take_view(View::of(chain, r.id), left.then(|| is_whole(chain)));
            }
        }
        self.kick.notify_one(); // acknowledges it
        Ok(())
    }

    /// Stores the chain states that the targets act on from now on. Not for chains whose in-sync
    /// replicas the metadata servers do not know yet: those ask for the earlier states.
    fn note_chain_views(&self, map: &MapView) {
        let doubted = doubted(map);
        for t in self.targets().iter().filter(|t| t.id() != TARGET_UNASSIGNED) {
            let left: Vec<ChainId> = t.engine.known_chains();
            let left =
                left.into_iter().filter_map(|id| map.chain(id)).filter(|c| has_left(c, t.id()));
            let chains = map.chains_of(t.id()).chain(left).filter(|c| !doubted.contains(&c.id));
            if let Err(e) = t.engine.note_chain_views(chains) {
                tracing::warn!("target {}: cannot write down the state of its chains: {e}", t.id());
            }
        }
    }

    /// The latest incarnation of the metadata group that the server or one of its targets has
    /// belonged to.
    fn incarnation(&self) -> Incarnation {
        let joined = self.group.joined.load(Ordering::Acquire);
        let known = self.identities().into_iter().map(|id| id.incarnation).chain([joined]);
        known.map(Incarnation).max_by_key(|i| i.era()).unwrap_or_default()
    }

    /// Identities of all targets, including those out of service if they are of this cluster.
    fn identities(&self) -> Vec<TargetIdentity> {
        let (serving, fs) = (self.targets(), self.fs());
        let own =
            |id: &TargetIdentity| id.fs_uuid == [0; 16] || fs.is_none_or(|fs| fs == id.fs_uuid);
        let refused = self.refused_targets().into_iter().filter_map(|o| o.id()).filter(own);
        serving.iter().map(|t| t.engine.identity()).chain(refused).collect()
    }

    /// Targets out of service. If one folder does not tell its target, and exactly one target of
    /// this server is missing in the cluster, it must be that one.
    fn refused(&self) -> Vec<pb::RefusedTarget> {
        let (refused, map, node) =
            (self.refused_targets(), self.map.load(), self.id.load(Ordering::Acquire));
        let known: BTreeSet<TargetId> = self.identities().iter().map(|id| id.target_id).collect();
        let mut missing = map
            .map
            .targets
            .iter()
            .filter(|t| t.node == node && !known.contains(&t.id))
            .map(|t| t.id);
        let only =
            (missing.next(), missing.next(), refused.iter().filter(|o| o.id().is_none()).count());
        let number = if let (Some(id), None, 1) = only { Some(id) } else { None };
        refused.iter().map(|o| o.status(number.filter(|_| o.id().is_none()))).collect()
    }

    /// Gives up the lease, and drops the replicas, which hold references to this node.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        *self.lease.until.lock() = Duration::ZERO;
        self.duty.joining.lock().clear(); // waiting callers get an error
        self.replicas.lock().clear();
    }

    /// Aborts the background tasks of the targets and returns them, to be waited for.
    pub(super) fn untended(&self) -> Vec<JoinHandle<()>> {
        let tasks = std::mem::take(&mut *self.duty.tending.lock());
        tasks.iter().for_each(|(_, task)| task.abort());
        tasks.into_iter().map(|(_, task)| task).collect()
    }

    pub(super) fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    pub(super) fn status(&self) -> pb::StatusReply {
        let lease_left_ms = self.lease_left().as_millis() as u64;
        let target = |t: &Arc<Target>| {
            let u = t.engine.usage();
            let (device, found) = (t.engine.device(), t.damage.counts());
            pb::TargetStatus {
                id: t.id(),
                device: device.name(),
                capacity: u.capacity,
                used: u.used,
                chunks: u.chunks,
                direct_io: device.direct(),
                reads: u.reads,
                writes: u.writes,
                read_bytes: u.read_bytes,
                write_bytes: u.write_bytes,
                checksum_errors: u.checksum_errors,
                lease_left_ms,
                damaged: found.damaged,
                repaired: found.repaired,
                lost: found.lost,
                times: Some(t.times()),
                slow: None,
            }
        };
        let refused = self.refused();
        let mut notices: Vec<String> = refused.iter().map(refused_targets::notice).collect();
        for id in self.duty.emptied.lock().iter() {
            notices.push(format!(
                "target {id} had lost its chunk table since this server started, or before; it came back empty and is filled from other replicas"
            ));
        }
        for t in self.targets().iter() {
            let unreadable = t.unreadable.lock().as_ref().map(Error::to_string);
            match unreadable {
                Some(why) => notices.push(format!(
                    "target {} has failed and comes back empty when nothing that it has is needed: {why}",
                    t.id()
                )),
                None if t.failed() => {
                    notices
                        .push(format!("target {} has failed; replace its device, then SIGHUP to the server", t.id()));
                }
                None => {}
            }
            if t.lacks_space() {
                notices.push(format!(
                    "target {} is out of its chains: the file system it is in is full; make space there, it comes back by itself",
                    t.id()
                ));
            }
            let lost = t.damage.counts().lost;
            if lost > 0 {
                notices.push(format!(
                    "target {}: {lost} chunks have no good copy; see `strake scrub status`",
                    t.id()
                ));
            }
            let replicas = self.replicas.lock();
            let kept = |r: &&Arc<Replica>| r.id == t.id() && r.kept.load(Ordering::Relaxed) > 0;
            for r in replicas.values().filter(kept) {
                notices.push(format!(
                    "target {} has left chain {} and keeps {} chunks of it, which are damaged on replicas in sync; see `strake scrub status`",
                    t.id(),
                    r.chain,
                    r.kept.load(Ordering::Relaxed)
                ));
            }
            drop(replicas);
            if !t.engine.device().direct() {
                notices.push(format!(
                    "target {} runs without direct I/O: its file system refuses it",
                    t.id()
                ));
            }
        }
        pb::StatusReply {
            role: "oss".into(),
            node: self.id.load(Ordering::Acquire),
            name: self.cfg.name.clone(),
            version: env!("CARGO_PKG_VERSION").into(),
            pid: u64::from(std::process::id()),
            uptime_ms: self.env.boot().saturating_sub(self.started).as_millis() as u64,
            map: Some(self.map.load().map.clone()),
            notices,
            targets: self.targets().iter().map(target).collect(),
            roads: self.peers.roads(),
            refused,
            ..pb::StatusReply::default()
        }
    }
}
