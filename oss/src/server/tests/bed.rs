//! A cluster of real storage servers in one thread with paused time: memory devices, a network of
//! function calls whose links can be cut, and a small authority that distributes maps by the rules
//! of `docs/replication.md`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{
    Buf, Connection, Endpoint, Fabric, Listener, Message, Peer, Pool, Role, Service,
};
use strake_proto::{
    CapKey, Capability, ChunkId, Code, Error, Result, Rights,
    checksum::{block_sums, verify},
    data::{DataReply, DataRequest, Extents, Kind, Version},
    map::{ChainExt, MAX_EVICTED, MapView},
    opcode,
    pb::{self, ReplicaState},
};
use strake_runtime::{Clock, Env};
use strake_store::MemStore;
use tokio::time::Instant;

use crate::{
    device::{MemDevice, mem::Tear},
    engine::{Engine, Options, TargetIdentity},
    server::{Config, OssServer, Parts, start},
};

pub(super) const CHAIN: u32 = 1;
pub(super) const SESSION: u64 = 77;
const LEASE: Duration = Duration::from_secs(2);

pub(super) fn chunk(index: u64) -> ChunkId {
    ChunkId { ino: 4, data: 9, index }
}

pub(super) fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut s = seed;
    (0..len).map(|_| strake_proto::layout::splitmix64(&mut s) as u8).collect()
}

struct TokioClock(Instant);

impl Clock for TokioClock {
    fn unix_ns(&self) -> i64 {
        1_700_000_000_000_000_000 + self.boot().as_nanos() as i64
    }
    fn boot(&self) -> Duration {
        self.0.elapsed() + Duration::from_secs(1)
    }
}

// --- the network

type Services = BTreeMap<u32, (u64, Arc<dyn Service>)>;

#[derive(Default)]
pub(super) struct Net {
    services: Mutex<Services>,
    /// Nodes that cannot reach others and cannot be reached.
    pub cut: Mutex<BTreeSet<u32>>,
    /// Counts requests for a replica's copy of a chunk, in sync or not.
    pub copies_asked: AtomicU64,
    generation: AtomicU64,
}

struct End {
    net: Arc<Net>,
    me: u32,
    role: Role,
    pool: Pool,
}

struct Conn {
    net: Arc<Net>,
    from: u32,
    to: u32,
    role: Role,
    generation: u64,
}

impl Net {
    fn reach(&self, from: u32, to: u32) -> Result<(u64, Arc<dyn Service>)> {
        let cut = self.cut.lock();
        let s = self.services.lock().get(&to).cloned();
        match s {
            Some(s) if !cut.contains(&from) && !cut.contains(&to) => Ok(s),
            _ => Err(Error::new(
                Code::Disconnected,
                format!("sim:{to} is not reached from sim:{from}"),
            )),
        }
    }
}

#[async_trait]
impl Connection for Conn {
    async fn call(&self, request: Message, timeout: Duration) -> Result<Message> {
        let (generation, service) = self.net.reach(self.from, self.to)?;
        if generation != self.generation {
            return Err(Error::new(Code::Disconnected, "the peer restarted"));
        }
        if request.opcode == opcode::READ_COPY {
            self.net.copies_asked.fetch_add(1, Ordering::Relaxed);
        }
        let peer = Peer {
            role: self.role,
            addr: format!("sim:{}", self.from),
            id: u64::from(self.from),
            back: None,
        };
        tokio::time::sleep(Duration::from_micros(50)).await;
        let work = tokio::spawn(async move { service.handle(&peer, request).await });
        let gone = |_| Error::new(Code::Disconnected, "the peer died");
        let reply = match tokio::time::timeout(timeout, work).await {
            Ok(r) => r.map_err(gone)?,
            Err(_) => return Err(Error::new(Code::TimedOut, "no answer")),
        };
        if self.net.reach(self.from, self.to)?.0 != self.generation {
            return Err(Error::new(Code::Disconnected, "the peer died"));
        }
        reply
    }
    fn is_closed(&self) -> bool {
        self.net.reach(self.from, self.to).is_ok_and(|(g, _)| g != self.generation)
    }
    fn addr(&self) -> String {
        format!("sim:{}", self.to)
    }
    fn close(&self) {}
}

struct Unlisten(Arc<Net>, u32);

impl Drop for Unlisten {
    fn drop(&mut self) {
        self.0.services.lock().remove(&self.1);
    }
}

#[async_trait]
impl Fabric for End {
    async fn connect(
        &self,
        to: &Endpoint,
        _: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let Endpoint::Sim(to) = *to else { return Err(Error::new(Code::Inval, "not sim")) };
        let (generation, _) = self.net.reach(self.me, to)?;
        Ok(Arc::new(Conn { net: self.net.clone(), from: self.me, to, role: self.role, generation }))
    }
    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        let Endpoint::Sim(n) = *at else { return Err(Error::new(Code::Inval, "not sim")) };
        let generation = self.net.generation.fetch_add(1, Ordering::Relaxed);
        self.net.services.lock().insert(n, (generation, service));
        Ok(Listener::new(at.clone(), Box::new(Unlisten(self.net.clone(), n))))
    }
    fn pool(&self) -> &Pool {
        &self.pool
    }
}

// --- the authority

#[derive(Default)]
pub(super) struct Authority {
    pub map: Mutex<pb::ClusterMap>,
    seen: Mutex<BTreeMap<u32, Instant>>,
    pub evicted: Mutex<Vec<pb::Evicted>>,
    /// Endings of rights. `None`: an older version, which does not know them.
    pub endings: Mutex<Option<pb::Endings>>,
    /// Entries per answer; 0: all.
    pub page: Mutex<usize>,
    /// The evictions that the last heartbeat acknowledged.
    pub evicted_seen: Mutex<u64>,
    pub failed: Mutex<BTreeSet<u32>>,
    /// Targets whose heartbeats count but that get no lease.
    pub shut_out: Mutex<BTreeSet<u32>>,
    /// Targets whose tables took no writes at their last heartbeat.
    pub full: Mutex<BTreeSet<u32>>,
    /// Targets that are asked to leave.
    pub step_out: Mutex<BTreeSet<u32>>,
    /// The chain states sent in the last registration.
    pub sights: Mutex<Vec<pb::ChainSight>>,
}

impl Authority {
    pub(super) fn chain(&self) -> pb::Chain {
        self.map.lock().chains[0].clone()
    }
    pub(super) fn states(&self) -> Vec<(u32, ReplicaState)> {
        self.chain().replicas.iter().map(|r| (r.target, r.state())).collect()
    }
    fn change(map: &mut pb::ClusterMap, change: impl Fn(&mut pb::Replica)) {
        let c = &mut map.chains[0];
        let before = c.replicas.clone();
        c.replicas.iter_mut().for_each(change);
        if c.replicas == before {
            return;
        }
        c.replicas.sort_by_key(|r| match r.state() {
            ReplicaState::ReplicaServing => 0,
            ReplicaState::ReplicaSyncing => 1,
            _ => 2,
        });
        c.epoch += 1;
        map.version += 1;
    }
    /// The rows `leaves`, `all-leave` and `fill-ends`.
    fn gone(map: &mut pb::ClusterMap, lost: impl Fn(u32) -> bool) {
        use ReplicaState::*;
        if map.chains.is_empty() {
            return;
        }
        let all = map.chains[0].serving().all(&lost) && map.chains[0].head().is_some();
        Self::change(map, |r| match r.state() {
            ReplicaServing if all => r.set_state(ReplicaLastsrv),
            ReplicaSyncing if all => r.set_state(ReplicaOffline),
            ReplicaServing | ReplicaSyncing | ReplicaWaiting if lost(r.target) => {
                r.set_state(ReplicaOffline)
            }
            _ => {}
        });
    }
    fn endings_after(&self, known: Option<u64>) -> Option<pb::Endings> {
        let mut e = self.endings.lock().clone()?;
        let known = known.filter(|k| *k <= e.through)?;
        e.all.retain(|x| x.index > known);
        if known >= e.floor {
            e.floor = 0;
        }
        let page = *self.page.lock();
        if page != 0 && e.all.len() > page {
            e.all.truncate(page);
            (e.more, e.through) = (true, e.all[page - 1].index);
        }
        Some(e)
    }
    /// A session loses rights in the next entry of the log.
    pub(super) fn end(&self, session: u64, ino: u64, rights: Rights) -> u64 {
        let mut all = self.endings.lock();
        let e = all.get_or_insert_default();
        e.through += 1;
        e.all.push(pb::Ending { index: e.through, session, ino, rights: rights.0 });
        e.through
    }
    pub(super) fn tick(&self) {
        let (seen, failed, out) = (self.seen.lock(), self.failed.lock(), self.shut_out.lock());
        let lost = |t: u32| {
            failed.contains(&t)
                || out.contains(&t)
                || seen.get(&t).is_none_or(|at| at.elapsed() >= LEASE)
        };
        Self::gone(&mut self.map.lock(), lost);
    }
    /// The rows `source`, `fills`, `waits` and `filled`.
    fn returned(&self, h: &pb::HeartbeatRequest, t: &pb::TargetReport) {
        use ReplicaState::*;
        let mut map = self.map.lock();
        if map.chains.is_empty() || t.failed || t.lapses % 2 == 1 {
            return;
        }
        let c = map.chains[0].clone();
        let state = c.state_of(t.target);
        let free = !c.replicas.iter().any(|r| r.state() == ReplicaSyncing);
        let synced = c.tail() == Some(t.target)
            && h.map_version == map.version
            && t.synced_chains.contains(&c.id);
        Self::change(&mut map, |r| match (r.target == t.target, r.state()) {
            (true, ReplicaLastsrv) if c.head().is_none() => r.set_state(ReplicaServing),
            (false, ReplicaLastsrv) if state == Some(ReplicaLastsrv) && c.head().is_none() => {
                r.set_state(ReplicaOffline)
            }
            (true, ReplicaOffline | ReplicaWaiting) if c.head().is_some() && free => {
                r.set_state(ReplicaSyncing)
            }
            (true, ReplicaOffline) => r.set_state(ReplicaWaiting),
            (false, ReplicaSyncing) if synced => r.set_state(ReplicaServing),
            _ => {}
        });
    }
    fn register(&self, r: pb::RegisterRequest) -> Result<pb::RegisterReply> {
        let mut map = self.map.lock();
        let follows = |t: &pb::RegisterTarget| {
            map.targets
                .iter()
                .all(|h| h.uuid != t.uuid || h.stamp == t.stamp || t.follows == Some(h.stamp))
        };
        if !r.targets.iter().all(follows) {
            return Err(Error::new(Code::Stale, "another life has registered meanwhile"));
        }
        let node = 1001 + map.nodes.len() as u32;
        let node = map.nodes.iter().find(|n| n.name == r.name).map_or(node, |n| n.id);
        map.nodes.retain(|n| n.id != node);
        let pb::RegisterRequest { name, endpoints, targets, .. } = r;
        map.nodes.push(pb::Node { id: node, role: 2, endpoints, name, ..Default::default() });
        let mut ids = Vec::new();
        *self.sights.lock() = targets.iter().flat_map(|t| t.sights.clone()).collect();
        for t in targets {
            let known = map
                .targets
                .iter_mut()
                .find(|h| h.uuid == t.uuid)
                .map(|h| (h.id, h.stamp != t.stamp));
            let (id, restarted) = known.unwrap_or((map.targets.len() as u32, false));
            if restarted {
                Self::gone(&mut map, |lost| lost == id);
                self.failed.lock().remove(&id); // left from its earlier life
            }
            map.targets.retain(|h| h.id != id);
            map.targets.push(pb::Target {
                id,
                node,
                uuid: t.uuid,
                stamp: t.stamp,
                ..Default::default()
            });
            ids.push(id);
        }
        map.version += 1;
        Ok(pb::RegisterReply {
            node,
            target_ids: ids,
            fs_uuid: map.fs_uuid.clone(),
            map: Some(map.clone()),
        })
    }
}

#[async_trait]
impl Service for Authority {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        if m.opcode == opcode::REGISTER {
            let r = pb::RegisterRequest::decode(&m.body[..]).unwrap();
            return Ok(Message::new(0, self.register(r)?.encode_to_vec()));
        }
        if m.opcode == opcode::MAP {
            return Ok(Message::new(
                0,
                pb::MapReply { map: Some(self.map.lock().clone()) }.encode_to_vec(),
            ));
        }
        if m.opcode == opcode::PLACES {
            return Err(Error::new(Code::Protocol, "an older version, which does not know that"));
        }
        let h = pb::HeartbeatRequest::decode(&m.body[..]).unwrap();
        if h.incarnation != self.map.lock().incarnation {
            return Err(Error::new(Code::Stale, "register again"));
        }
        let is_out = h.targets.iter().any(|t| self.shut_out.lock().contains(&t.target));
        for t in h.targets.iter().filter(|_| !is_out) {
            self.seen.lock().insert(t.target, Instant::now());
            self.full.lock().remove(&t.target);
            self.full.lock().extend(t.table_full.then_some(t.target));
            if t.failed || t.lapses % 2 == 1 {
                self.failed.lock().insert(t.target);
            } else if t.lapses > 0 {
                self.failed.lock().remove(&t.target);
            }
            self.returned(&h, t);
        }
        self.tick();
        *self.evicted_seen.lock() = h.evicted_seen;
        let map = Some(self.map.lock().clone()).filter(|m| m.version > h.map_version);
        let evicted = self
            .evicted
            .lock()
            .iter()
            .filter(|e| e.number > h.evicted_seen)
            .take(MAX_EVICTED)
            .cloned()
            .collect();
        let endings = self.endings_after(h.endings_known);
        let step_out = self.step_out.lock().iter().copied().collect();
        let lease_ms = if is_out { 0 } else { LEASE.as_millis() as u32 };
        let reply = pb::HeartbeatReply { lease_ms, map, evicted, endings, step_out };
        Ok(Message::new(0, reply.encode_to_vec()))
    }
}

// --- the cluster

pub(super) struct Node {
    pub device: Arc<MemDevice>,
    pub table: MemStore,
    env: Option<Env>,
    pub server: Option<OssServer>,
    life: u8,
}

pub(super) struct Cluster {
    pub net: Arc<Net>,
    pub authority: Arc<Authority>,
    pub nodes: Vec<Node>,
    pub key: CapKey,
    pub clock: Instant,
    _mds: Listener,
    client: End,
    tune: fn(&mut Config),
}

fn identity(i: u8) -> TargetIdentity {
    let (fs_uuid, target_uuid) = ([0; 16], [i + 1; 16]);
    TargetIdentity {
        fs_uuid,
        target_uuid,
        target_id: u32::MAX,
        node: String::new(),
        incarnation: 0,
    }
}

impl Cluster {
    /// `n` servers with one target each, which form one chain.
    pub(super) async fn start(n: u32) -> Cluster {
        Cluster::start_with(n, |_| {}).await
    }

    /// With a changed configuration.
    pub(super) async fn start_with(n: u32, tune: fn(&mut Config)) -> Cluster {
        let net = Arc::new(Net::default());
        let authority = Arc::new(Authority::default());
        authority.map.lock().fs_uuid = vec![1; 16].into();
        let mds = End { net: net.clone(), me: 900, role: Role::Server, pool: Pool::default() };
        let listener = mds.listen(&Endpoint::Sim(900), authority.clone()).await.unwrap();
        let client = End { net: net.clone(), me: 800, role: Role::Client, pool: Pool::default() };
        let key = CapKey::from_cluster_key(&[7; 32]);
        let clock = Instant::now();
        let mut c =
            Cluster { net, authority, nodes: Vec::new(), key, clock, _mds: listener, client, tune };
        for i in 0..n {
            let device = Arc::new(MemDevice::new(64 << 20));
            let table = MemStore::new();
            Engine::format(&*device, &table, identity(i as u8)).await.unwrap();
            c.nodes.push(Node { device, table, env: None, server: None, life: 0 });
            c.boot(i as usize).await;
        }
        {
            let mut map = c.authority.map.lock();
            let serving =
                |target| pb::Replica { target, state: ReplicaState::ReplicaServing as i32 };
            let replicas = (0..n).map(serving).collect();
            map.chains = vec![pb::Chain {
                id: CHAIN,
                epoch: 1,
                replicas,
                preferred: (0..n).collect(),
                lost: false,
            }];
            map.version += 1;
        }
        c
    }

    pub(super) async fn boot(&mut self, i: usize) {
        let (clock, net) = (self.clock, self.net.clone());
        let n = &mut self.nodes[i];
        n.life += 1;
        let env = Env::new(Arc::new(TokioClock(clock)), [i as u8 * 16 + n.life; 32]);
        let table = Arc::new(n.table.clone());
        let engine = Engine::open(n.device.clone(), table, Pool::default(), Options::default())
            .await
            .unwrap();
        let fabric = Arc::new(End { net, me: i as u32, role: Role::Server, pool: Pool::default() });
        let mut cfg =
            Config::new(format!("oss{i}"), Endpoint::Sim(i as u32), vec![Endpoint::Sim(900)]);
        (self.tune)(&mut cfg);
        let parts =
            Parts { env: env.clone(), fabric, targets: vec![engine], cap_key: self.key.clone() };
        n.server = Some(start(cfg, parts).await.unwrap());
        n.env = Some(env);
    }

    /// Ends a server at once; it loses what it had not flushed.
    pub(super) fn kill(&mut self, i: usize) {
        let n = &mut self.nodes[i];
        if let Some(env) = n.env.take() {
            env.kill();
        }
        n.server = None;
        n.device.crash(u64::from(n.life), Tear::Sector);
        n.table.crash(|_| 0);
    }

    /// Removes all data of a server that was killed.
    pub(super) async fn wipe(&mut self, i: usize) {
        let n = &mut self.nodes[i];
        (n.device, n.table) = (Arc::new(MemDevice::new(64 << 20)), MemStore::new());
        Engine::format(&*n.device, &n.table, identity(i as u8)).await.unwrap();
    }

    pub(super) async fn call(
        &self,
        to: u32,
        op: u16,
        r: &DataRequest,
        data: &[u8],
    ) -> Result<(DataReply, Vec<u8>)> {
        self.call_as(Role::Client, to, op, r, data).await
    }

    pub(super) async fn call_as(
        &self,
        role: Role,
        to: u32,
        op: u16,
        r: &DataRequest,
        data: &[u8],
    ) -> Result<(DataReply, Vec<u8>)> {
        let (generation, _) = self.net.reach(self.client.me, to)?;
        let conn = Conn { net: self.net.clone(), from: self.client.me, to, role, generation };
        let payload = if data.is_empty() { Vec::new() } else { vec![Buf::copy_from(data)] };
        let m = Message::new(op, r.encode()).with_payload(payload);
        let reply = conn.call(m, Duration::from_secs(3)).await?;
        let got: Vec<u8> = reply.payload.iter().flat_map(|b| b.to_vec()).collect();
        Ok((DataReply::decode(&reply.body)?, got))
    }

    pub(super) fn cap(&self, rights: Rights) -> Capability {
        let expiry_ms = 1_700_000_000_000 + 3_600_000;
        Capability {
            ino: 4,
            data: 9,
            session: SESSION,
            session_epoch: 1,
            expiry_ms,
            rights,
            bound: strake_proto::Bound::Any,
            as_of: 0,
        }
    }

    /// A request to target `to` in the current epoch, with all rights.
    pub(super) fn request(&self, to: u32, index: u64) -> DataRequest {
        let all = Rights::READ.and(Rights::WRITE).and(Rights::TRIM);
        let cap = Some(self.key.seal(&self.cap(all)));
        DataRequest {
            cap,
            session: SESSION,
            ..DataRequest::new(CHAIN, self.authority.chain().epoch, to, chunk(index))
        }
    }

    pub(super) fn head(&self) -> u32 {
        MapView::new(self.authority.map.lock().clone())
            .unwrap()
            .chain(CHAIN)
            .unwrap()
            .head()
            .unwrap_or(0)
    }

    /// Retries until it succeeds or fails for good, as a client does.
    pub(super) async fn retry<F>(
        &self,
        op: u16,
        data: &[u8],
        make: F,
    ) -> Result<(DataReply, Vec<u8>)>
    where
        F: Fn() -> DataRequest,
    {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let r = make();
            match self.call(r.target, op, &r, data).await {
                Err(e) if e.is_retryable() && Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    self.authority.tick();
                }
                other => return other,
            }
        }
    }

    /// Like the metadata servers: removes the file's chunks from `index` on, retries until it is
    /// done.
    pub(super) async fn trim(&self, index: u64, len: u32) -> DataReply {
        let ask = async |seq| {
            let version = Version { epoch: 1, number: 0 };
            let cut = DataRequest {
                len,
                seq,
                version,
                session: 0,
                cap: None,
                ..self.request(self.head(), index)
            };
            self.call_as(Role::Server, self.head(), opcode::TRIM, &cut, &[]).await
        };
        loop {
            let done = match ask(0).await {
                Ok((number, _)) => ask(number.version.number).await,
                other => other,
            };
            match done {
                Ok((reply, _)) => return reply,
                Err(e) => assert!(e.is_retryable(), "{e}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            self.authority.tick();
        }
    }

    pub(super) fn write_request(
        &self,
        index: u64,
        offset: u32,
        data: &[u8],
        seq: u64,
    ) -> DataRequest {
        let sums = block_sums(u64::from(offset), [data]);
        let (kind, len) = (Kind::Write, data.len() as u32);
        DataRequest { kind, offset, len, seq, sums, ..self.request(self.head(), index) }
    }

    pub(super) async fn write(
        &self,
        index: u64,
        offset: u32,
        data: &[u8],
        seq: u64,
    ) -> Result<DataReply> {
        self.retry(opcode::WRITE, data, || self.write_request(index, offset, data, seq))
            .await
            .map(|r| r.0)
    }

    pub(super) async fn flush(&self) -> Result<DataReply> {
        self.retry(opcode::FLUSH, &[], || self.request(self.head(), 0)).await.map(|r| r.0)
    }

    /// A read at one replica, checked against its checksums.
    pub(super) async fn read(
        &self,
        to: u32,
        index: u64,
        offset: u32,
        len: u32,
    ) -> Result<(Version, Vec<u8>)> {
        let make = || DataRequest { offset, len, ..self.request(to, index) };
        let (r, data) = self.retry(opcode::READ, &[], make).await?;
        assert_eq!(data.len(), r.len as usize);
        assert_eq!(verify(u64::from(offset), [&data[..]], &r.sums), None);
        Ok((r.version, data))
    }

    /// Where a replica reports data, from (index, offset) on: index, offset, length.
    pub(super) async fn extents(&self, to: u32, from: (u64, u32)) -> Vec<(u64, u32, u32)> {
        let make = || DataRequest { offset: from.1, len: 100, ..self.request(to, from.0) };
        let (_, data) = self.retry(opcode::EXTENTS, &[], make).await.unwrap();
        let found = Extents::decode(&data, from).unwrap();
        assert_eq!(found.next, None);
        found.found.iter().map(|e| (e.index, e.offset, e.len)).collect()
    }

    /// Waits until all replicas serve.
    pub(super) async fn whole(&self) {
        let until = Instant::now() + Duration::from_secs(60);
        while self.authority.states().iter().any(|(_, s)| *s != ReplicaState::ReplicaServing) {
            assert!(Instant::now() < until, "the chain stays at {:?}", self.authority.states());
            tokio::time::sleep(Duration::from_millis(50)).await;
            self.authority.tick();
        }
    }
}
