//! A cluster in this process for mount tests: the real namespace of the metadata server without
//! Raft, and storage servers that keep chunks in memory. Requests are function calls; these tests
//! exercise the mount.

mod data;
mod leases;

use std::sync::{Arc, atomic::AtomicBool};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message as _;
use strake_client::{Client, Config, Handover};
use strake_fabric::{Connection, Endpoint, Fabric, Listener, Message, Peer, Pool, Role, Service};
use strake_fuse::HandoverMemory;
use strake_mds::{
    cluster::chain_table::make_chains,
    namespace::{Namespace, RULES},
};
use strake_proto::{
    CapKey, Capability, Code, Error, Result, Rights,
    layout::StripeMap,
    opcode,
    pb::{self, log_command::Command, op::Op},
};
use strake_runtime::Env;
use strake_store::MemStore;
use tokio::sync::watch;

const MDS: u32 = 1;
const TARGETS: u32 = 4;

/// Metadata server: every mutation is one log entry, applied at once.
struct Mds {
    ns: Namespace,
    log: Mutex<u64>,
    key: CapKey,
    env: Env,
    data: Arc<data::Data>,
    leases: leases::Leases,
}

impl Mds {
    fn propose(&self, command: Command) -> Result<pb::LogReply> {
        let mut index = self.log.lock();
        *index += 1;
        let entry: Bytes = pb::LogCommand { now_ns: self.env.unix_ns(), command: Some(command) }
            .encode_to_vec()
            .into();
        let mut replies = self.ns.apply(&[(*index, 1, entry)], (*index, 1), None)?;
        let reply = replies.pop().unwrap();
        match reply.status.clone() {
            Some(s) if s.code != 0 => Err(s.into()),
            _ => Ok(reply),
        }
    }

    fn format(&self, endpoints: impl Fn(u32) -> String) {
        let format = pb::Format {
            fs_uuid: vec![7; 16].into(),
            fs_name: "lfstest".into(),
            name_hash_key: vec![1; 16].into(),
            default_copies: 1,
            root_mode: 0o777,
            root_uid: 0,
            root_gid: 0,
            placement: 1,
            level: 1,
        };
        self.propose(Command::Format(format)).unwrap();
        for t in 0..TARGETS {
            let target = pb::RegisterTarget {
                uuid: vec![t as u8 + 1; 16].into(),
                capacity: 1 << 40,
                stamp: 1,
                id: u32::MAX,
                ..Default::default()
            };
            let r = pb::RegisterRequest {
                name: format!("oss{t}"),
                endpoints: vec![endpoints(t)],
                targets: vec![target],
                ..Default::default()
            };
            self.propose(Command::Register(r)).unwrap();
        }
        let map = self.ns.map();
        let mut targets = map.map.targets.clone();
        targets.iter_mut().for_each(|t| t.alive = true);
        let alive = pb::MapUpdate { expect_version: map.version(), targets, ..Default::default() };
        self.propose(Command::MapUpdate(alive)).unwrap();
        let map = self.ns.map();
        let (chains, sets) = make_chains(&map.map, 1).unwrap();
        let made =
            pb::MapUpdate { expect_version: map.version(), chains, sets, ..Default::default() };
        self.propose(Command::MapUpdate(made)).unwrap();
        let pool = |action, targets| pb::PoolChange { pool: "flash".into(), action, targets };
        self.propose(Command::PoolChange(pool(1, vec![]))).unwrap();
        self.propose(Command::PoolChange(pool(2, vec![0, 1]))).unwrap();
    }

    fn meta(&self, request: pb::MetaRequest) -> Result<pb::MetaReply> {
        let (session, ops) = (request.session, request.ops.clone());
        let creds = request.creds.clone().unwrap_or_default();
        let mut reply = if Namespace::is_mutation(&ops) {
            let request = pb::MetaRequest { rules: RULES, ..request };
            match self.propose(Command::Meta(request))?.reply {
                Some(pb::log_reply::Reply::Meta(m)) => m,
                other => panic!("{other:?}"),
            }
        } else {
            self.ns.read(session, &creds, &ops)
        };
        for (op, result) in ops.iter().zip(&mut reply.results) {
            self.finish(op, result, session);
        }
        self.leases.grant(&ops, &mut reply);
        Ok(reply)
    }

    /// What the real server adds outside the state machine: capabilities, and trimming chunks
    /// before it answers a shrink.
    fn finish(&self, op: &pb::Op, result: &mut pb::OpResult, session: u64) {
        let flags = match &op.op {
            Some(Op::Open(o)) => o.flags,
            Some(Op::Create(c)) => c.flags,
            Some(Op::Tmpfile(t)) => t.flags,
            Some(Op::Setattr(_)) => {
                for (ino, trim, layout) in self.ns.backlog().trims(100) {
                    let cut =
                        StripeMap::resolve(ino, &layout, &self.ns.map()).unwrap().cut(trim.size);
                    self.data.trim(ino, cut.first_gone, cut.kept);
                    self.propose(Command::TrimDone(pb::TrimDone { ino, number: trim.number }))
                        .unwrap();
                }
                return;
            }
            _ => return,
        };
        let Some(layout) = &result.layout else { return };
        let rights = match flags & 3 {
            0 => Rights::READ,
            1 => Rights::WRITE,
            _ => Rights::READ.and(Rights::WRITE),
        };
        let data = layout.components[0].data_id;
        let cap = Capability {
            ino: result.ino,
            data,
            session,
            session_epoch: 1,
            expiry_ms: u64::MAX / 2,
            rights,
            bound: strake_proto::Bound::Any,
            as_of: 0,
        };
        result.capability = self.key.seal(&cap).to_vec().into();
    }
}

fn body<M: prost::Message + Default>(m: &Message) -> Result<M> {
    M::decode(m.body.clone()).map_err(|e| Error::new(Code::Protocol, e.to_string()))
}

#[async_trait]
impl Service for Mds {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        let reply = match m.opcode {
            opcode::SESSION_OPEN => match self.propose(Command::SessionOpen(body(&m)?))?.reply {
                Some(pb::log_reply::Reply::SessionOpen(r)) => pb::SessionOpenReply {
                    map: Some(self.ns.map().map.clone()),
                    term_ms: 30_000,
                    ..r
                }
                .encode_to_vec(),
                other => panic!("{other:?}"),
            },
            opcode::SESSION_RENEW => {
                let lease_ms = self.leases.term_ms.load(std::sync::atomic::Ordering::Relaxed);
                pb::SessionRenewReply { lease_ms, ..Default::default() }.encode_to_vec()
            }
            opcode::RECALL => self.leases.asked(body(&m)?).await.encode_to_vec(),
            opcode::SESSION_CLOSE => vec![],
            opcode::MAP => {
                let have = body::<pb::MapRequest>(&m)?.have;
                let map = self.ns.map();
                pb::MapReply { map: (map.version() > have).then(|| map.map.clone()) }
                    .encode_to_vec()
            }
            opcode::META => self.meta(body(&m)?)?.encode_to_vec(),
            o => return Err(strake_fabric::unknown_opcode(o)),
        };
        Ok(Message::new(0, reply))
    }
}

/// Connects to services by number.
struct Calls {
    services: Vec<(u32, Arc<dyn Service>)>,
    pool: Pool,
    /// While true no server answers anything.
    stalled: watch::Sender<bool>,
}

#[async_trait]
impl Fabric for Calls {
    async fn connect(
        &self,
        to: &Endpoint,
        _: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let found = self.services.iter().find(|(n, _)| *to == Endpoint::Sim(*n));
        let found =
            found.ok_or_else(|| Error::new(Code::Disconnected, format!("nobody at {to}")))?;
        let stalled = self.stalled.subscribe();
        Ok(Arc::new(Call { service: found.1.clone(), stalled, closed: AtomicBool::new(false) }))
    }
    async fn listen(&self, _: &Endpoint, _: Arc<dyn Service>) -> Result<Listener> {
        Err(Error::new(Code::OpNotSupp, "clients do not listen"))
    }
    fn pool(&self) -> &Pool {
        &self.pool
    }
}

struct Call {
    service: Arc<dyn Service>,
    stalled: watch::Receiver<bool>,
    closed: AtomicBool,
}

#[async_trait]
impl Connection for Call {
    async fn call(&self, request: Message, limit: std::time::Duration) -> Result<Message> {
        let peer = Peer { role: Role::Client, addr: "test".into(), id: 1, back: None };
        let mut stalled = self.stalled.clone();
        let answers = tokio::time::timeout(limit, stalled.wait_for(|s| !s)).await;
        answers
            .map_err(|_| Error::new(Code::TimedOut, "does not answer"))?
            .map_err(|e| Error::new(Code::Disconnected, e.to_string()))?;
        let service = self.service.clone();
        let running = tokio::spawn(async move { service.handle(&peer, request).await });
        running.await.map_err(|e| Error::new(Code::Io, e.to_string()))?
    }
    fn is_closed(&self) -> bool {
        self.closed.load(std::sync::atomic::Ordering::Relaxed)
    }
    fn addr(&self) -> String {
        "test".into()
    }
    fn close(&self) {
        self.closed.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// A cluster that clients reach by calls.
pub struct Cluster {
    fabric: Arc<Calls>,
    mds: Arc<Mds>,
}

impl Cluster {
    pub fn new() -> Cluster {
        let key = CapKey::from_cluster_key(&[9; 32]);
        let data = Arc::new(data::Data::new(key.clone()));
        let ns = Namespace::open(Arc::new(MemStore::new())).unwrap();
        let mds = Arc::new(Mds {
            ns,
            log: Mutex::new(0),
            key,
            env: Env::system(),
            data: data.clone(),
            leases: Default::default(),
        });
        mds.format(|t| format!("sim:{}", 100 + t));
        let mut services: Vec<(u32, Arc<dyn Service>)> = vec![(MDS, mds.clone())];
        for t in 0..TARGETS {
            services.push((100 + t, data.clone()));
        }
        Cluster {
            fabric: Arc::new(Calls {
                services,
                pool: Pool::default(),
                stalled: watch::Sender::new(false),
            }),
            mds,
        }
    }

    /// Its servers, the metadata server first.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn services(&self) -> Vec<Arc<dyn Service>> {
        self.fabric.services.iter().map(|(_, s)| s.clone()).collect()
    }

    /// From now on the cluster map gives the servers these addresses, in the order of `services`.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn are_at(&self, places: &[String]) {
        let mds = pb::Node {
            id: MDS,
            role: strake_proto::map::ROLE_MDS,
            endpoints: vec![places[0].clone()],
            name: "mds1".into(),
            ..Default::default()
        };
        self.mds
            .propose(Command::MdsNodes(pb::MdsNodes { nodes: vec![mds], gone: vec![] }))
            .unwrap();
        let map = self.mds.ns.map();
        let mut nodes: Vec<pb::Node> =
            map.map.nodes.iter().filter(|n| n.id != MDS).cloned().collect();
        nodes.iter_mut().zip(&places[1..]).for_each(|(n, at)| n.endpoints = vec![at.clone()]);
        let moved = pb::MapUpdate { expect_version: map.version(), nodes, ..Default::default() };
        self.mds.propose(Command::MapUpdate(moved)).unwrap();
    }

    /// `true`: from now on no server answers. `false`: all answer again.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn stall(&self, stalled: bool) {
        self.fabric.stalled.send_replace(stalled);
    }

    /// From now on clients that connect get leases of this term.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn lease(&self, term: std::time::Duration) {
        self.mds
            .leases
            .term_ms
            .store(term.as_millis() as u32, std::sync::atomic::Ordering::Relaxed);
    }

    /// Has all clients forget these inodes.
    #[allow(dead_code, reason = "not every test needs it")]
    pub async fn recall(&self, inos: &[u64]) {
        self.mds.leases.recall(inos).await;
    }

    /// Metadata requests that were answered.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn requests(&self) -> u64 {
        self.mds.leases.requests.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// `true`: from now on storage servers do not answer requests for extents. `false`: they do
    /// again.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn hide_extents(&self, hide: bool) {
        self.mds.data.silent.store(hide, std::sync::atomic::Ordering::Relaxed);
    }

    /// Evicts a session, as if it had been silent for its term.
    #[allow(dead_code, reason = "not every test needs it")]
    pub fn evict(&self, session: u64) {
        self.mds
            .propose(Command::SessionEnd(pb::SessionEnd { sessions: vec![session], evict: true }))
            .unwrap();
    }

    #[allow(dead_code, reason = "not every test needs it")]
    pub async fn client(&self) -> Client {
        self.connect(None).await
    }

    /// A client with a handover: it keeps what the next client needs, or is the next client.
    #[allow(dead_code, reason = "not every test needs it")]
    pub async fn client_keeping(&self, keep: &Arc<HandoverMemory>) -> Client {
        self.connect(Some(keep.clone())).await
    }

    async fn connect(&self, keep: Option<Arc<dyn Handover>>) -> Client {
        let cfg = Config { handover: keep, ..Config::new(vec![Endpoint::Sim(MDS)]) };
        Client::connect(cfg, Env::system(), self.fabric.clone()).await.unwrap()
    }
}
