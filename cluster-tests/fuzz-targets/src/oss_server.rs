//! A whole storage server and peers that send it anything; and the state machine of a chain on its
//! own.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{Buf, Endpoint, Message, Peer, Pool, Role, Service};
use strake_oss::{
    chain::{ChainCore, Committed, Input as ChainInput, Local, Op, OpId, Output, View, What},
    device::MemDevice,
    engine::{Engine, Options, TargetIdentity},
    server::{Config, OssServer, Parts, start},
};
use strake_proto::{
    CapKey, Capability, ChunkId, Code, Error, Result, Rights,
    checksum::block_sums,
    data::{BootId, DataReply, DataRequest, Kind, Version, Writer},
    map::MapView,
    opcode,
    pb::{self, ReplicaState},
};
use strake_store::MemStore;

use crate::{
    input::Input,
    world::{self, End, Net},
};

const MDS: u32 = 9;
const ME: u32 = 1;

/// The first byte chooses between the state machine and a server.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    if i.u8().is_multiple_of(4) { core(&mut i) } else { world::run(server(i)) }
}

// --- the state machine

#[derive(Default)]
struct Store(BTreeMap<ChunkId, Committed>, BTreeMap<OpId, ChunkId>);

impl Local for Store {
    fn committed(&self, chunk: &ChunkId) -> Result<Committed> {
        if chunk.index == 3 {
            return Err(Error::new(Code::Corrupt, "damaged"));
        }
        Ok(self.0.get(chunk).cloned().unwrap_or_default())
    }
    fn commit(&mut self, op: OpId, version: Version, writer: Writer) -> Result<()> {
        let c = self.0.entry(self.1[&op]).or_default();
        c.version = version;
        c.writers.push(writer);
        let old = c.writers.len().saturating_sub(8);
        c.writers.drain(..old);
        Ok(())
    }
}

fn chunk(i: &mut Input) -> ChunkId {
    ChunkId { ino: 4, data: 9, index: u64::from(i.u8() % 4) }
}

fn version(i: &mut Input) -> Version {
    Version { epoch: i.number(), number: i.number() }
}

fn result<T>(i: &mut Input, ok: T) -> Result<T> {
    match i.u8() {
        n @ 0..128 => {
            Err(Error::new(Code::ALL[usize::from(n) % Code::ALL.len()], "as the input says"))
        }
        _ => Ok(ok),
    }
}

fn chain(i: &mut Input) -> pb::Chain {
    let states = i.u16();
    let replica = |t: u32| pb::Replica { target: t, state: i32::from(states >> (3 * t) & 7) };
    let mut order: Vec<u32> = (0..3).collect();
    order.rotate_left(usize::from(states >> 9) % 3);
    let epoch = i.number();
    pb::Chain {
        id: 1,
        epoch,
        replicas: order.into_iter().map(replica).collect(),
        preferred: vec![0, 1, 2],
        lost: false,
    }
}

fn core(i: &mut Input) {
    let mut core = ChainCore::new(1, BootId { target: 0, number: i.u64() }, i.number());
    let mut store = Store::default();
    let mut next = 0;
    let mut outputs = Vec::new();
    for _ in 0..200 {
        if i.is_empty() {
            break;
        }
        let op = u64::from(i.u8()) % (next + 1);
        let attempt = u32::from(i.u8() % 8);
        let input = match i.u8() % 12 {
            0 => ChainInput::View(View::of(&chain(i), 0)),
            1..5 => {
                next += 1;
                let what = match i.u8() % 5 {
                    0 | 1 => What::Client {
                        session: i.number(),
                        seq: i.number(),
                        replay: (i.u8() & 1 == 1).then(|| version(i)),
                        round: 0,
                    },
                    2 | 3 => What::Forward {
                        session: 1,
                        seq: i.number(),
                        version: version(i),
                        prev: version(i),
                    },
                    _ => What::Hold,
                };
                let chunk = chunk(i);
                store.1.insert(next, chunk);
                let epoch = if i.u8() == 255 { i.number() } else { core.view().epoch };
                ChainInput::Op(Op { id: next, chunk, epoch, eager: i.u8() & 1 == 1, what })
            }
            5 | 6 => ChainInput::Staged { op, result: result(i, ()) },
            7 | 8 => ChainInput::Answer {
                op,
                attempt,
                result: result(i, vec![BootId { target: 1, number: 1 }]),
            },
            9 => ChainInput::Pushed { op, attempt, result: result(i, ()) },
            10 => ChainInput::Retry { op, attempt },
            _ => ChainInput::Release { op },
        };
        outputs.extend(core.handle(input, &mut store));
        let chunk = chunk(i);
        let _ = (core.read(&chunk, core.view().epoch), core.check_member(i.number()));
        if i.u8() == 255 {
            core.heard_predecessor(core.view().epoch);
        }
    }
    // No operation is answered twice.
    let mut done = BTreeMap::new();
    for o in &outputs {
        if let Output::Done { op, .. } = o {
            *done.entry(*op).or_insert(0) += 1;
        }
    }
    assert!(done.values().all(|n| *n == 1), "{outputs:?}");
}

// --- a server

/// A metadata server whose maps come from the input.
struct Authority {
    map: Mutex<pb::ClusterMap>,
    raw: Mutex<Vec<u8>>,
    beats: AtomicU64,
}

#[async_trait]
impl Service for Authority {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        let map = self.map.lock().clone();
        if m.opcode == opcode::REGISTER {
            let r = pb::RegisterRequest::decode(&m.body[..]).expect("the server's own");
            let target_ids = (0..r.targets.len() as u32).collect();
            let reply = pb::RegisterReply {
                node: 1001,
                target_ids,
                fs_uuid: map.fs_uuid.clone(),
                map: Some(map),
            };
            return Ok(Message::new(0, reply.encode_to_vec()));
        }
        if m.opcode == opcode::MAP {
            return Ok(Message::new(0, pb::MapReply { map: Some(map) }.encode_to_vec()));
        }
        self.beats.fetch_add(1, Relaxed);
        let raw = std::mem::take(&mut *self.raw.lock());
        if !raw.is_empty() {
            return Ok(Message::new(0, raw));
        }
        let evicted = vec![pb::Evicted { number: 1, session: 66, min_epoch: 2, below: false }];
        let step_out = vec![0, 1, 2];
        let reply =
            pb::HeartbeatReply { lease_ms: 2000, map: Some(map), evicted, endings: None, step_out };
        Ok(Message::new(0, reply.encode_to_vec()))
    }
}

/// One node with three targets, which form the chain.
fn map() -> pb::ClusterMap {
    let target = |id: u32| pb::Target {
        id,
        node: 1001,
        uuid: vec![id as u8 + 1; 16].into(),
        ..Default::default()
    };
    let serving = |target| pb::Replica { target, state: ReplicaState::ReplicaServing as i32 };
    let (replicas, preferred) = ((0..3).map(serving).collect(), vec![0, 1, 2]);
    pb::ClusterMap {
        version: 1,
        fs_uuid: vec![1; 16].into(),
        nodes: vec![pb::Node {
            id: 1001,
            role: 2,
            endpoints: vec!["sim:1".into()],
            ..Default::default()
        }],
        targets: (0..3).map(target).collect(),
        chains: vec![pb::Chain { id: 1, epoch: 1, replicas, preferred, lost: false }],
        ..Default::default()
    }
}

async fn boot(net: &Arc<Net>, env: strake_runtime::Env) -> OssServer {
    let mut targets = Vec::new();
    for t in 0..3 {
        let (device, table) = (Arc::new(MemDevice::new(8 << 20)), MemStore::new());
        let id = TargetIdentity {
            fs_uuid: [0; 16],
            target_uuid: [t + 1; 16],
            target_id: u32::MAX,
            node: "n".into(),
            incarnation: 0,
        };
        Engine::format(&*device, &table, id).await.expect("a device of 8 MiB");
        let engine =
            Engine::open(device, Arc::new(table), Pool::default(), Options::default()).await;
        targets.push(engine.expect("what was just made"));
    }
    let cfg = Config::new("n", Endpoint::Sim(ME), vec![Endpoint::Sim(MDS)]);
    let cap_key = CapKey::from_cluster_key(&[7; 32]);
    let parts = Parts { env, fabric: Arc::new(End(net.clone())), targets, cap_key };
    start(cfg, parts).await.expect("it can register")
}

async fn server(mut i: Input<'_>) {
    let net = Net::new();
    let mds = Arc::new(Authority {
        map: Mutex::new(map()),
        raw: Mutex::default(),
        beats: AtomicU64::new(0),
    });
    net.put(MDS, mds.clone());
    let env = world::env(1);
    let server = boot(&net, env.clone()).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    for _ in 0..48 {
        if i.is_empty() {
            break;
        }
        match i.u8() % 16 {
            0 => {
                let mut m = mds.map.lock();
                let mut c = chain(&mut i);
                c.epoch = m.chains[0].epoch + 1 + c.epoch % 2;
                m.version += 1;
                m.chains[0] = c;
            }
            1 => *mds.raw.lock() = i.bytes().to_vec(),
            2 => tokio::time::sleep(Duration::from_millis(50 * u64::from(i.u8()))).await,
            _ => {
                let epoch = mds.map.lock().chains[0].epoch;
                let (role, request) = request(&mut i, epoch);
                let op = request.opcode;
                if let Some(Ok(reply)) = net.ask(ME, role, request).await
                    && ![opcode::ECHO, opcode::STATUS].contains(&op)
                {
                    DataReply::decode(&reply.body).expect("a reply of the data plane");
                }
            }
        }
    }
    let _ = server.status();
    if MapView::new(mds.map.lock().clone()).is_ok() {
        let before = mds.beats.load(Relaxed);
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(mds.beats.load(Relaxed) > before, "it goes on sending heartbeats");
    }
    env.kill();
    net.end();
}

const OPCODES: [u16; 11] = [
    opcode::READ,
    opcode::WRITE,
    opcode::WRITE,
    opcode::FLUSH,
    opcode::TRIM,
    opcode::FORWARD,
    opcode::FORWARD_FLUSH,
    opcode::SYNC_LIST,
    opcode::SYNC_PUT,
    opcode::LIST_CHUNKS,
    opcode::EXTENTS,
];

fn request(i: &mut Input, epoch: u64) -> (Role, Message) {
    let role = if i.u8() & 1 == 0 { Role::Client } else { Role::Server };
    let op = match i.u8() {
        255 => i.u16(),
        254 => opcode::GRANT,
        n => OPCODES[usize::from(n) % OPCODES.len()],
    };
    if i.u8() == 0 {
        let (body, payload) = (i.bytes(), i.bytes());
        let payload = if payload.is_empty() { Vec::new() } else { vec![Buf::copy_from(payload)] };
        return (role, Message::new(op, body.to_vec()).with_payload(payload));
    }
    let chunk = chunk(i);
    let epoch = if i.u8() == 255 { i.number() } else { epoch };
    let target = u32::from(i.u8() % 4);
    let mut r = DataRequest::new(1, epoch, target, chunk);
    r.kind = [
        Kind::Write,
        Kind::Write,
        Kind::None,
        Kind::Truncate,
        Kind::Remove,
        Kind::Replace,
        Kind::Punch,
    ][usize::from(i.u8()) % 7];
    (r.offset, r.session, r.seq) = (u32::from(i.u16()), 77, i.number());
    r.flags = i.u8() & 0x1e;
    r.version = version(i);
    for _ in 0..i.u8() % 3 {
        r.writers.push(Writer { session: i.number(), seq: i.number(), version: version(i) });
    }
    let mut payload = Vec::new();
    if matches!(r.kind, Kind::Write | Kind::Replace) {
        payload = i.bytes().to_vec();
        if r.kind == Kind::Replace {
            r.offset = 0;
            let at = |i: &mut Input| u32::from(i.u8() % 8) * 1024;
            r.damaged = (0..i.u8() % 3).map(|_| at(i)..at(i)).collect();
        }
        r.sums = block_sums(u64::from(r.offset), [&payload[..]]);
        r.len = payload.len() as u32;
    } else {
        r.len = if i.u8() == 255 { i.u32() } else { u32::from(i.u16()) };
    }
    match i.u8() {
        0 => r.sums.push(i.u32()),
        1 => r.len = i.u32(),
        2 => r.offset = i.u32(),
        3 => r.chain = i.u32(),
        _ => {}
    }
    let all = Rights::READ.and(Rights::WRITE).and(Rights::TRIM);
    let (session, session_epoch) = if i.u8() == 255 { (66, 1) } else { (77, 1) };
    let cap = Capability {
        ino: 4,
        data: 9,
        session,
        session_epoch,
        expiry_ms: u64::MAX,
        rights: all,
        bound: strake_proto::Bound::Any,
        as_of: 0,
    };
    r.cap = Some(CapKey::from_cluster_key(&[7; 32]).seal(&cap));
    let payload = if payload.is_empty() { Vec::new() } else { vec![Buf::copy_from(&payload)] };
    (role, Message::new(op, r.encode()).with_payload(payload))
}
