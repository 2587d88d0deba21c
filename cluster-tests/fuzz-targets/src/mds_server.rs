//! A whole metadata server, and peers that send it anything: clients, storage servers and other
//! metadata servers.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use prost::Message as _;
use protobuf::Message as _;
use strake_fabric::{Buf, Endpoint, Message, Role};
use strake_mds::{
    consensus::MemLog,
    server::{Config, MdsServer, Parts, start},
};
use strake_proto::{CapKey, opcode, pb};
use strake_store::MemStore;

use crate::{
    input::Input,
    namespace, raft_core,
    world::{self, End, Net},
};

const CLUSTER: [u8; 16] = [4; 16];
const ME: u32 = 1;

/// The first byte chooses between a server that leads alone and one of three that gets messages
/// from the others.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    let alone = i.u8() % 2 == 0;
    world::run(async move {
        let net = Net::new();
        let env = world::env(1);
        let server = boot(&net, env.clone(), alone).await;
        if alone {
            tokio::time::sleep(Duration::from_secs(3)).await;
            assert!(server.leads(), "the only member leads");
        }
        for _ in 0..64 {
            if i.is_empty() {
                break;
            }
            let (role, request) = request(&mut i);
            let _ = net.ask(ME, role, request).await;
            if i.u8() == 0 {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        }
        let _ = server.status();
        if alone {
            let map = Message::new(opcode::MAP, pb::MapRequest::default().encode_to_vec());
            net.ask(ME, Role::Client, map).await.expect("it is there").expect("it answers");
        }
        env.kill();
        net.end();
    });
}

async fn boot(net: &Arc<Net>, env: strake_runtime::Env, alone: bool) -> MdsServer {
    let at = |n: u64| Endpoint::Sim(n as u32);
    let mut cfg = Config::new(1, at(1), "/none".into());
    let voters = if alone { vec![1] } else { vec![1, 2, 3] };
    cfg.peers = voters.iter().map(|n| (*n, at(*n))).collect();
    let parts = Parts {
        env,
        fabric: Arc::new(End(net.clone())),
        log: Arc::new(MemLog::new(voters, 7, Duration::from_micros(100))),
        store: Arc::new(MemStore::new()),
        cap_key: CapKey::from_cluster_key(&[7; 32]),
        cluster: CLUSTER,
    };
    start(cfg, parts).await.expect("a new server")
}

fn request(i: &mut Input) -> (Role, Message) {
    let role = if i.u8() & 1 == 0 { Role::Client } else { Role::Server };
    let (op, body): (u16, Vec<u8>) = match i.u8() % 16 {
        0 => (i.u16(), i.bytes().to_vec()),
        1 => {
            let r = pb::SessionOpenRequest {
                level: strake_proto::FEATURE_LEVEL,
                client_uuid: vec![i.u8() % 4; 16].into(),
                ..Default::default()
            };
            (opcode::SESSION_OPEN, r.encode_to_vec())
        }
        2 => {
            let opens = i.bytes().iter().map(|b| u64::from(*b)).collect();
            let (session, map_version) = (i.number(), i.number());
            let r = pb::SessionRenewRequest {
                level: strake_proto::FEATURE_LEVEL,
                session,
                map_version,
                reassert: i.u8() & 1 == 1,
                opens,
                connection: u64::from(i.u8() % 4),
                hello: i.u8() & 1 == 1,
                lives_on: i.u8() & 1 == 1,
                incarnation: if i.u8() == 255 { i.number() } else { 0 },
                ..Default::default()
            };
            (opcode::SESSION_RENEW, r.encode_to_vec())
        }
        3 => {
            (opcode::SESSION_CLOSE, pb::SessionCloseRequest { session: i.number() }.encode_to_vec())
        }
        4 => (opcode::REGISTER, register(i)),
        5 => (opcode::HEARTBEAT, heartbeat(i)),
        6 | 7 => (opcode::RAFT, batch(i)),
        8 => (opcode::SNAPSHOT, chunk(i)),
        9 => (opcode::META, i.bytes().to_vec()),
        10 => (opcode::LOCK_WAIT, lock_wait(i)),
        11 => (opcode::RECALL, recall(i)),
        _ => (opcode::META, meta(i)),
    };
    let payload = if i.u8() == 255 { vec![Buf::copy_from(i.bytes())] } else { Vec::new() };
    (role, Message::new(op, body).with_payload(payload))
}

/// The request inside a command, as a client sends it.
fn meta(i: &mut Input) -> Vec<u8> {
    let bytes = namespace::command(i);
    match pb::LogCommand::decode(bytes.clone()).map(|c| c.command) {
        Ok(Some(pb::log_command::Command::Meta(m))) => {
            // Requests without a number are often reads, which a follower may also answer.
            let follower = m.seq % 2 == 0;
            pb::MetaRequest { follower, ..m }.encode_to_vec()
        }
        _ => bytes.to_vec(),
    }
}

fn recall(i: &mut Input) -> Vec<u8> {
    if i.u8() == 0 {
        return i.bytes().to_vec();
    }
    let (session, connection) = (u64::from(i.u8() % 4), u64::from(i.u8() % 4));
    let reported: Vec<u64> = i.bytes().iter().map(|b| 1 << 32 | u64::from(*b)).collect();
    pb::RecallRequest {
        session,
        connection,
        acknowledged: i.number(),
        working: reported.clone(),
        checks_locks: reported.len() != 1,
        locks_checked: reported.clone(),
        reported,
    }
    .encode_to_vec()
}

fn lock_wait(i: &mut Input) -> Vec<u8> {
    if i.u8() == 0 {
        return i.bytes().to_vec();
    }
    let wait = |i: &mut Input| {
        let (owner, kind, span) = namespace::lock(i);
        let (id, ino) = (u64::from(i.u8() % 4), u64::from(i.u8() % 16));
        pb::LockWait { id, ino, owner, kind, span, trying: i.u8() & 1 == 1 }
    };
    let session = u64::from(i.u8() % 4);
    let number = u64::from(i.u8());
    pb::LockWaitRequest { session, number, waits: (0..i.u8() % 6).map(|_| wait(i)).collect() }
        .encode_to_vec()
}

fn sight(i: &mut Input) -> pb::ChainSight {
    let replica =
        |i: &mut Input| pb::Replica { target: i.number() as u32, state: i32::from(i.u8() % 7) };
    pb::ChainSight {
        chain: i.number() as u32,
        epoch: i.number(),
        replicas: (0..i.u8() % 4).map(|_| replica(i)).collect(),
        lived: i.u8() & 1 == 1,
    }
}

fn register(i: &mut Input) -> Vec<u8> {
    if i.u8() == 0 {
        return i.bytes().to_vec();
    }
    let target = |i: &mut Input| pb::RegisterTarget {
        uuid: vec![i.u8() % 4; 16].into(),
        capacity: i.number() << 30,
        stamp: i.number(),
        id: if i.u8() & 1 == 0 { u32::MAX } else { i.number() as u32 },
        sights: (0..i.u8() % 3).map(|_| sight(i)).collect(),
        follows: (i.u8() & 1 == 0).then(|| i.number()),
    };
    pb::RegisterRequest {
        level: strake_proto::FEATURE_LEVEL,
        name: format!("oss{}", i.u8() % 4),
        endpoints: vec!["sim:50".into()],
        targets: (0..i.u8() % 4).map(|_| target(i)).collect(),
        ..Default::default()
    }
    .encode_to_vec()
}

fn device(i: &mut Input) -> pb::DeviceTimes {
    let op = |i: &mut Input| pb::OpTimes {
        count: i.number(),
        each_us: i.number(),
        median_us: i.number(),
        p99_us: i.number(),
    };
    pb::DeviceTimes {
        reads: Some(op(i)),
        changes: Some(op(i)),
        stalled_ms: i.number(),
        rotates: false,
    }
}

fn heartbeat(i: &mut Input) -> Vec<u8> {
    if i.u8() == 0 {
        return i.bytes().to_vec();
    }
    let report = |i: &mut Input| pb::TargetReport {
        target: i.number() as u32,
        stamp: i.number(),
        capacity: i.number() << 30,
        used: i.number(),
        failed: i.u8() == 0,
        synced_chains: vec![i.number() as u32],
        chunks: 0,
        lapses: i.number() as u32,
        stored: (0..i.u8() % 4)
            .map(|_| pb::ChainBytes { chain: i.number() as u32, bytes: i.number() })
            .collect(),
        device: (i.u8() & 1 == 1).then(|| device(i)),
        table_full: i.u8() & 1 == 1,
    };
    pb::HeartbeatRequest {
        level: strake_proto::FEATURE_LEVEL,
        node: 1001 + u32::from(i.u8() % 4),
        map_version: i.number(),
        targets: (0..i.u8() % 4).map(|_| report(i)).collect(),
        unreachable: vec![i.number() as u32],
        evicted_seen: i.number(),
        // A later incarnation, from a peer server, would end the server under test.
        incarnation: 0,
        leaseless: i.u8() & 1 == 1,
        number: i.number(),
        endings_known: (i.u8() & 1 == 1).then(|| i.number()),
    }
    .encode_to_vec()
}

fn batch(i: &mut Input) -> Vec<u8> {
    if i.u8() == 0 {
        return i.bytes().to_vec();
    }
    let from = 2 + u64::from(i.u8() & 1);
    let messages = (0..1 + i.u8() % 3)
        .map(|_| {
            let mut m = raft_core::message(i);
            m.from = from;
            m.write_to_bytes().expect("in memory").into()
        })
        .collect();
    pb::RaftBatch {
        level: strake_proto::FEATURE_LEVEL,
        from,
        to: 1,
        messages,
        cluster: Bytes::copy_from_slice(&CLUSTER),
        stamp: from,
        ..Default::default()
    }
    .encode_to_vec()
}

fn chunk(i: &mut Input) -> Vec<u8> {
    if i.u8() == 0 {
        return i.bytes().to_vec();
    }
    let pair = |i: &mut Input| pb::Pair {
        key: Bytes::copy_from_slice(i.bytes()),
        value: Bytes::copy_from_slice(i.bytes()),
    };
    pb::SnapshotChunk {
        from: 2 + u64::from(i.u8() & 1),
        to: 1,
        snapshot: 1,
        index: i.number(),
        number: u64::from(i.u8() % 4),
        last: i.u8() & 1 == 1,
        total_keys: 0,
        pairs: (0..i.u8() % 4).map(|_| pair(i)).collect(),
        term: i.number(),
        cluster: Bytes::copy_from_slice(&CLUSTER),
        incarnation: (i.u8() & 1 == 1).then_some(0),
        level: strake_proto::FEATURE_LEVEL,
    }
    .encode_to_vec()
}
