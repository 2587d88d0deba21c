//! A group of metadata servers, fake storage servers and hand-driven clients in one thread under
//! paused time, on a network that is a map of services.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{
    Buf, Connection, Endpoint, Fabric, Listener, Message, Peer, Pool, Role, Service,
};
use strake_proto::{
    CapKey, Capability, Code, Error, Result, Rights,
    cap::index_near,
    data::{DataReply, DataRequest, Extent, Extents, FLAG_TOMBSTONE, Version},
    ids::TARGET_UNASSIGNED,
    opcode, pb,
};
use strake_runtime::{Clock, Env};
use tokio::time::{Instant, sleep, timeout};

use super::spoilt::Spoilt;
use crate::{
    consensus::MemLog,
    server::{Config, MdsServer, Parts, start},
};

pub(super) const KEY: [u8; 32] = [5; 32];

struct TestClock(Instant);

impl Clock for TestClock {
    fn unix_ns(&self) -> i64 {
        1_700_000_000_000_000_000 + self.0.elapsed().as_nanos() as i64
    }
    fn boot(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Services by `sim:N`.
#[derive(Default)]
pub(super) struct Net {
    services: Mutex<BTreeMap<u32, Arc<dyn Service>>>,
    peers: AtomicU64,
    /// Members that no other server reaches, and that reach none. Clients reach them.
    pub cut_off: Mutex<BTreeSet<u32>>,
}

pub(super) struct NetFabric {
    net: Arc<Net>,
    /// 0: no particular server.
    from: u32,
    role: Role,
    pool: Pool,
}

pub(super) struct NetConnection {
    net: Arc<Net>,
    from: u32,
    to: u32,
    role: Role,
    id: u64,
    closed: AtomicBool,
}

struct Unlisten(Arc<Net>, u32);

impl Drop for Unlisten {
    fn drop(&mut self) {
        self.0.services.lock().remove(&self.1);
    }
}

fn sim(at: &Endpoint) -> Result<u32> {
    match at {
        Endpoint::Sim(n) => Ok(*n),
        _ => Err(Error::new(Code::Inval, "not of this network")),
    }
}

impl Net {
    pub(super) fn connect(self: &Arc<Self>, to: u32, role: Role) -> Arc<NetConnection> {
        self.connect_from(0, to, role)
    }
    fn connect_from(self: &Arc<Self>, from: u32, to: u32, role: Role) -> Arc<NetConnection> {
        let id = self.peers.fetch_add(1, Ordering::Relaxed);
        Arc::new(NetConnection {
            net: self.clone(),
            from,
            to,
            role,
            id,
            closed: AtomicBool::new(false),
        })
    }
    pub(super) fn fabric(self: &Arc<Self>, role: Role) -> Arc<NetFabric> {
        self.fabric_of(0, role)
    }
    fn fabric_of(self: &Arc<Self>, from: u32, role: Role) -> Arc<NetFabric> {
        Arc::new(NetFabric { net: self.clone(), from, role, pool: Pool::default() })
    }
    fn is_cut(&self, from: u32, to: u32) -> bool {
        let cut = self.cut_off.lock();
        from != 0 && (cut.contains(&from) || cut.contains(&to))
    }
}

#[async_trait]
impl Fabric for NetFabric {
    async fn connect(
        &self,
        to: &Endpoint,
        _back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let to = sim(to)?;
        if !self.net.services.lock().contains_key(&to) {
            return Err(Error::new(Code::Disconnected, format!("nobody listens at sim:{to}")));
        }
        Ok(self.net.connect_from(self.from, to, self.role))
    }
    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        let n = sim(at)?;
        self.net.services.lock().insert(n, service);
        Ok(Listener::new(at.clone(), Box::new(Unlisten(self.net.clone(), n))))
    }
    fn pool(&self) -> &Pool {
        &self.pool
    }
}

#[async_trait]
impl Connection for NetConnection {
    async fn call(&self, request: Message, limit: Duration) -> Result<Message> {
        let gone = || Error::new(Code::Disconnected, "the peer is gone");
        if self.net.is_cut(self.from, self.to) {
            sleep(limit).await;
            return Err(Error::new(Code::TimedOut, "no answer"));
        }
        let service = self.net.services.lock().get(&self.to).cloned().ok_or_else(gone)?;
        let peer =
            Peer { role: self.role, addr: format!("test-{}", self.id), id: self.id, back: None };
        let answer = tokio::spawn(async move { service.handle(&peer, request).await });
        let (to, net) = (self.to, self.net.clone());
        let died = async move {
            while net.services.lock().contains_key(&to) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            biased;
            r = timeout(limit, answer) => match r {
                Ok(r) => r.unwrap_or_else(|_| Err(gone())),
                Err(_) => Err(Error::new(Code::TimedOut, "no answer")),
            },
            () = died => Err(gone()),
        }
    }
    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed) || !self.net.services.lock().contains_key(&self.to)
    }
    fn addr(&self) -> String {
        format!("sim:{}", self.to)
    }
    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }
}

pub(super) struct World {
    pub net: Arc<Net>,
    started: Instant,
    pub logs: Vec<Arc<MemLog>>,
    pub stores: Vec<Arc<Spoilt>>,
    pub mds: Vec<Option<(Env, MdsServer)>>,
    /// The cluster of the members that start from now on.
    pub cluster: [u8; 16],
    change: Box<dyn Fn(&mut Config)>,
}

impl World {
    pub(super) async fn new(members: usize, change: impl Fn(&mut Config) + 'static) -> World {
        let voters: Vec<u64> = (1..=members as u64).collect();
        let log =
            |i: &u64| Arc::new(MemLog::new(voters.clone(), 1000 + i, Duration::from_micros(500)));
        let mut w = World {
            net: Arc::default(),
            started: Instant::now(),
            logs: voters.iter().map(log).collect(),
            stores: voters.iter().map(|_| Arc::new(Spoilt::default())).collect(),
            mds: Vec::new(),
            cluster: [3; 16],
            change: Box::new(change),
        };
        for i in 0..members {
            w.mds.push(None);
            w.start(i).await;
        }
        w
    }

    fn env(&self, seed: u8) -> Env {
        Env::new(Arc::new(TestClock(self.started)), [seed; 32])
    }

    pub(super) async fn start(&mut self, i: usize) {
        let env = self.env(i as u8 + 1);
        let mut cfg = Config::new(i as u64 + 1, Endpoint::Sim(i as u32 + 1), "/unused".into());
        cfg.chains_per_target = 1;
        cfg.peers = (1..=self.logs.len()).map(|n| (n as u64, Endpoint::Sim(n as u32))).collect();
        cfg.join = self.logs[i].image().voters.is_empty();
        if cfg.join {
            // An old configuration: it does not know later members.
            cfg.peers.truncate(3);
        }
        (self.change)(&mut cfg);
        let parts = Parts {
            env: env.clone(),
            fabric: self.net.fabric_of(i as u32 + 1, Role::Server),
            log: self.logs[i].clone(),
            store: self.stores[i].clone(),
            cap_key: CapKey::from_cluster_key(&KEY),
            cluster: self.cluster,
        };
        self.mds[i] = Some((env, start(cfg, parts).await.unwrap()));
    }

    /// Starts a new, empty server that waits to be added; returns its number.
    pub(super) async fn join(&mut self) -> usize {
        let i = self.logs.len();
        self.logs.push(Arc::new(MemLog::new(vec![], 1001 + i as u64, Duration::from_micros(500))));
        self.stores.push(Arc::new(Spoilt::default()));
        self.mds.push(None);
        self.start(i).await;
        i
    }

    /// What a member kept is gone. It must not run.
    pub(super) fn wipe(&mut self, i: usize, voters: Vec<u64>) {
        assert!(self.mds[i].is_none());
        self.logs[i] = Arc::new(MemLog::new(voters, 5000 + i as u64, Duration::from_micros(500)));
        self.stores[i] = Arc::new(Spoilt::default());
    }

    /// Ends a member without a goodbye.
    pub(super) fn kill(&mut self, i: usize) {
        if let Some((env, server)) = self.mds[i].take() {
            env.kill();
            drop(server);
            self.logs[i].crash(true);
        }
    }

    /// The member that leads, once there is one.
    pub(super) async fn leader(&self) -> usize {
        let find = async {
            loop {
                if let Some(i) =
                    self.mds.iter().position(|m| m.as_ref().is_some_and(|(_, s)| s.leads()))
                {
                    return i;
                }
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(30), find).await.expect("a leader within 30 s")
    }

    pub(super) async fn server(&self) -> &MdsServer {
        let i = self.leader().await;
        &self.mds[i].as_ref().unwrap().1
    }

    /// Asks the current leader until it answers.
    pub(super) async fn ask<R: prost::Message + Default>(
        &self,
        role: Role,
        opcode: u16,
        body: &impl prost::Message,
    ) -> Result<R> {
        for _ in 0..600 {
            let i = self.leader().await;
            match self.ask_at(i, role, opcode, body.encode_to_vec().into()).await {
                Err(e)
                    if matches!(
                        e.code,
                        Code::NotLeader | Code::Disconnected | Code::Overloaded
                    ) =>
                {
                    sleep(Duration::from_millis(50)).await;
                }
                r => return r.map(|m| R::decode(m.body).unwrap()),
            }
        }
        panic!("no answer for 30 s");
    }

    pub(super) async fn ask_at(
        &self,
        i: usize,
        role: Role,
        opcode: u16,
        body: Bytes,
    ) -> Result<Message> {
        let conn = self.net.connect(i as u32 + 1, role);
        conn.call(Message::new(opcode, body), Duration::from_secs(40)).await
    }

    pub(super) async fn client(&self, uuid: u8) -> Client<'_> {
        self.client_that(uuid, false, &[]).await
    }

    /// A client that may keep dirty data, and that knows that others are dead.
    pub(super) async fn client_that(&self, uuid: u8, write_back: bool, dead: &[u8]) -> Client<'_> {
        let dead = dead.iter().map(|n| vec![*n; 16].into()).collect();
        let body = pb::SessionOpenRequest {
            level: strake_proto::FEATURE_LEVEL,
            client_uuid: vec![uuid; 16].into(),
            write_back,
            dead,
            ..Default::default()
        };
        let r: pb::SessionOpenReply =
            self.ask(Role::Client, opcode::SESSION_OPEN, &body).await.unwrap();
        Client { world: self, session: r.session, open: r, seq: 0 }
    }

    /// Starts a storage server with one target that lives until its [`FakeOss::up`] is cleared.
    pub(super) async fn oss(&self, n: u8) -> Arc<FakeOss> {
        let oss = Arc::new(FakeOss {
            up: AtomicBool::new(true),
            refuse: AtomicBool::new(false),
            ..Default::default()
        });
        let at = Endpoint::Sim(100 + u32::from(n));
        let listener = self.net.fabric(Role::Server).listen(&at, oss.clone()).await.unwrap();
        let stamp = 1 + self.started.elapsed().as_nanos() as u64;
        let register = pb::RegisterRequest {
            level: strake_proto::FEATURE_LEVEL,
            name: format!("oss-{n}"),
            endpoints: vec![at.to_string()],
            targets: vec![pb::RegisterTarget {
                uuid: vec![n; 16].into(),
                capacity: 1 << 40,
                stamp,
                id: TARGET_UNASSIGNED,
                sights: Vec::new(),
                follows: None,
            }],
            ..Default::default()
        };
        let r: pb::RegisterReply =
            self.ask(Role::Server, opcode::REGISTER, &register).await.unwrap();
        tokio::spawn(oss.clone().beat(self.net.clone(), self.logs.len(), r, stamp, listener));
        oss
    }
}

/// Heartbeats, and notes what it is asked to trim, and for the ends of files.
#[derive(Default)]
pub(super) struct FakeOss {
    pub up: AtomicBool,
    /// Trims are refused.
    pub refuse: AtomicBool,
    /// Its program knows feature level 0 only.
    pub older: AtomicBool,
    /// It has not finished the requests of evicted sessions.
    pub busy: AtomicBool,
    pub trims: Mutex<Vec<DataRequest>>,
    /// Bytes of the chunks of the one file that is written, by index.
    pub stored: Mutex<BTreeMap<u64, u32>>,
    pub looks: Mutex<Vec<DataRequest>>,
    pub evicted: Mutex<BTreeSet<u64>>,
    /// All ends of rights that it knows.
    pub endings: Mutex<pb::Endings>,
    pub map: Mutex<pb::ClusterMap>,
}

impl FakeOss {
    async fn beat(
        self: Arc<Self>,
        net: Arc<Net>,
        mds: usize,
        r: pb::RegisterReply,
        stamp: u64,
        listener: Listener,
    ) {
        *self.map.lock() = r.map.unwrap();
        let mut seen = 0;
        while self.up.load(Ordering::Relaxed) {
            let h = pb::HeartbeatRequest {
                level: match self.older.load(Ordering::Relaxed) {
                    true => 0,
                    false => strake_proto::FEATURE_LEVEL,
                },
                node: r.node,
                map_version: self.map.lock().version,
                targets: vec![pb::TargetReport {
                    target: r.target_ids[0],
                    stamp,
                    capacity: 1 << 40,
                    ..Default::default()
                }],
                evicted_seen: seen,
                endings_known: Some(self.endings.lock().through),
                ..Default::default()
            };
            for i in 0..mds {
                let conn = net.connect(i as u32 + 1, Role::Server);
                let m = Message::new(opcode::HEARTBEAT, h.encode_to_vec());
                let Ok(m) = conn.call(m, Duration::from_millis(500)).await else { continue };
                let reply = pb::HeartbeatReply::decode(m.body).unwrap();
                assert!(reply.lease_ms > 0);
                if let Some(map) = reply.map {
                    *self.map.lock() = map;
                }
                self.take(reply.endings.expect("asked for"));
                for e in reply.evicted {
                    seen =
                        if self.busy.load(Ordering::Relaxed) { seen } else { seen.max(e.number) };
                    self.evicted.lock().insert(e.session);
                }
            }
            sleep(Duration::from_millis(250)).await;
        }
        drop(listener);
    }
}

impl FakeOss {
    fn take(&self, mut new: pb::Endings) {
        let mut e = self.endings.lock();
        assert!(new.through >= e.through && new.all.iter().all(|x| x.index > e.through));
        (e.through, e.floor) = (new.through, e.floor.max(new.floor));
        e.all.append(&mut new.all);
    }

    /// Whether it would now refuse all these rights by a capability.
    pub(super) fn refuses(&self, cap: &Capability, rights: Rights) -> bool {
        let e = self.endings.lock();
        let as_of = index_near(cap.as_of, e.through);
        let meets = |x: &&pb::Ending| {
            [0, cap.ino].contains(&x.ino) && [0, cap.session].contains(&x.session)
        };
        let ended = e
            .all
            .iter()
            .filter(|x| x.index >= as_of)
            .filter(meets)
            .fold(0, |all, x| all | x.rights);
        as_of <= e.floor || ended & rights.0 == rights.0
    }

    fn look(&self, op: u16, r: &DataRequest) -> Message {
        let stored = self.stored.lock();
        let message = |len, payload| {
            Message::new(op, DataReply { len, ..DataReply::default() }.encode())
                .with_payload(payload)
        };
        if op == opcode::READ {
            message(stored[&r.chunk.index].saturating_sub(r.offset).min(r.len), Vec::new())
        } else {
            let whole = |(index, len): (&u64, &u32)| {
                let offset = if *index == r.chunk.index { r.offset } else { 0 };
                let end = len.next_multiple_of(4096);
                (end > offset).then(|| Extent { index: *index, offset, len: end - offset })
            };
            // One at a time.
            let mut found = stored.range(r.chunk.index..).filter_map(whole);
            let first: Vec<Extent> = found.next().into_iter().collect();
            let bytes = first.iter().map(|e| u64::from(e.len)).sum();
            let page =
                Extents { next: found.next().map(|e| (e.index, e.offset)), found: first, bytes };
            message(0, vec![Buf::copy_from(&page.encode())])
        }
    }
}

#[async_trait]
impl Service for FakeOss {
    async fn handle(&self, peer: &Peer, request: Message) -> Result<Message> {
        assert_eq!(peer.role, Role::Server);
        let r = DataRequest::decode(&request.body).unwrap();
        let looks = matches!(request.opcode, opcode::EXTENTS | opcode::READ);
        if looks {
            self.looks.lock().push(r.clone());
        }
        if self.refuse.load(Ordering::Relaxed) {
            return Err(Error::new(Code::NotServing, "not now"));
        }
        if looks {
            return Ok(self.look(request.opcode, &r));
        }
        assert_eq!(request.opcode, opcode::TRIM);
        let asks = r.seq == 0 && r.flags & FLAG_TOMBSTONE == 0;
        let version = Version { number: if asks { r.chunk.ino } else { 0 }, ..Version::default() };
        if !asks {
            self.trims.lock().push(r);
        }
        Ok(Message::new(opcode::TRIM, DataReply { version, ..DataReply::default() }.encode()))
    }
}

/// A client that sends what it is told.
pub(super) struct Client<'a> {
    pub world: &'a World,
    pub session: u64,
    pub open: pb::SessionOpenReply,
    pub seq: u64,
}

impl Client<'_> {
    pub(super) fn request(&mut self, ops: Vec<pb::op::Op>) -> pb::MetaRequest {
        let ops: Vec<pb::Op> = ops.into_iter().map(|op| pb::Op { op: Some(op) }).collect();
        let seq = if crate::namespace::Namespace::is_mutation(&ops) { self.seq + 1 } else { 0 };
        self.seq = self.seq.max(seq);
        let lowest_unanswered = if seq == 0 { self.seq + 1 } else { seq };
        pb::MetaRequest {
            session: self.session,
            seq,
            lowest_unanswered,
            creds: Some(pb::Creds::default()),
            ops,
            ..Default::default()
        }
    }
    pub(super) async fn send(&self, request: &pb::MetaRequest) -> Result<Vec<pb::OpResult>> {
        self.world
            .ask::<pb::MetaReply>(Role::Client, opcode::META, request)
            .await
            .map(|r| r.results)
    }
    pub(super) async fn run(&mut self, ops: Vec<pb::op::Op>) -> Result<Vec<pb::OpResult>> {
        let r = self.request(ops);
        self.send(&r).await
    }
    /// One operation that must succeed.
    pub(super) async fn one(&mut self, op: pb::op::Op) -> pb::OpResult {
        let mut results = self.run(vec![op]).await.unwrap();
        let r = results.pop().unwrap();
        assert!(r.status.as_ref().is_none_or(|s| s.code == 0), "{:?}", r.status);
        r
    }
    pub(super) async fn fails(&mut self, op: pb::op::Op) -> Code {
        let results = self.run(vec![op]).await.unwrap();
        Code::from_wire(results[0].status.as_ref().map_or(0, |s| s.code))
    }
    pub(super) async fn renew(
        &self,
        reassert: bool,
        opens: &[u64],
    ) -> Result<pb::SessionRenewReply> {
        let r = pb::SessionRenewRequest {
            level: strake_proto::FEATURE_LEVEL,
            session: self.session,
            reassert,
            opens: opens.to_vec(),
            ..Default::default()
        };
        self.world.ask(Role::Client, opcode::SESSION_RENEW, &r).await
    }
}

/// Waits until `f` is true, at most a minute of the test's time.
pub(super) async fn until(what: &str, mut f: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if f() {
            return;
        }
        sleep(Duration::from_millis(10)).await;
    }
    panic!("not within a minute: {what}");
}
