//! The client library with servers that answer anything: programs may get errors, but the client
//! must not panic.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use prost::Message as _;
use strake_client::{Client, Config, Creds, File};
use strake_fabric::{Buf, Endpoint, Message, Peer, Service};
use strake_proto::{
    CapKey, Capability, Code, Error, Result, Rights,
    checksum::block_sums,
    data::{BootId, Clock, DataReply, DataRequest, Extent, Extents, Kind, Version},
    opcode,
    pb::{self, ReplicaState, op::Op},
};

use crate::{
    input::Input,
    world::{self, End, Net},
};

const MDS: u32 = 1;
const OSS: u32 = 2;

/// Servers that answer properly unless the input says otherwise.
struct Servers {
    /// The rest of the input, which decides about the answers.
    answers: Mutex<Vec<u8>>,
}

fn map() -> pb::ClusterMap {
    let node = |id: u32, role: u32, at: u32| pb::Node {
        id,
        role,
        endpoints: vec![format!("sim:{at}")],
        ..Default::default()
    };
    let replica = |target| pb::Replica { target, state: ReplicaState::ReplicaServing as i32 };
    pb::ClusterMap {
        version: 1,
        nodes: vec![node(1, 1, MDS), node(1001, 2, OSS)],
        targets: (0..2).map(|id| pb::Target { id, node: 1001, ..Default::default() }).collect(),
        chains: (0..2)
            .map(|t| pb::Chain {
                id: t + 1,
                epoch: 1,
                replicas: vec![replica(t)],
                preferred: vec![t],
                lost: false,
            })
            .collect(),
        sets: vec![pb::ChainSet { id: 1, copies: 1, chains: vec![1, 2], ..Default::default() }],
        ..Default::default()
    }
}

impl Servers {
    fn good(&self, m: &Message) -> Result<(Vec<u8>, Vec<Buf>)> {
        let body = match m.opcode {
            opcode::SESSION_OPEN => {
                let session = pb::SessionOpenReply {
                    session: 7,
                    epoch: 1,
                    term_ms: 4000,
                    root: 1,
                    ..Default::default()
                };
                pb::SessionOpenReply { map: Some(map()), ..session }.encode_to_vec()
            }
            opcode::SESSION_RENEW => {
                pb::SessionRenewReply { lease_ms: 1500, ..Default::default() }.encode_to_vec()
            }
            opcode::RECALL => {
                let r = pb::RecallRequest::decode(m.body.clone()).expect("the client's own");
                let next =
                    vec![pb::Recall { number: r.acknowledged + 1, ino: 5, ..Default::default() }];
                pb::RecallReply { recalls: next.clone(), reports: next.clone(), locks: next }
                    .encode_to_vec()
            }
            opcode::SESSION_CLOSE => Vec::new(),
            opcode::MAP => pb::MapReply { map: Some(map()) }.encode_to_vec(),
            opcode::META => {
                let r = pb::MetaRequest::decode(m.body.clone()).expect("the client's own");
                pb::MetaReply { results: r.ops.iter().map(result).collect(), granted: vec![1, 5] }
                    .encode_to_vec()
            }
            opcode::CLOCK => Clock { now: 1, life: 15_000 }.encode().to_vec(),
            _ => return data(m),
        };
        Ok((body, Vec::new()))
    }
}

fn result(op: &pb::Op) -> pb::OpResult {
    let attr = pb::Attr {
        ino: 5,
        mode: 0o100_644,
        nlink: 1,
        size: 300_000,
        data_id: 6,
        ..Default::default()
    };
    let mut r = pb::OpResult { ino: 5, attr: Some(attr), ..Default::default() };
    match &op.op {
        Some(Op::Open(_) | Op::Create(_)) => {
            let set = Some(pb::ChainSetRef { set: 1, seed: 0, start: 0, count: 2 });
            let c = pb::Component {
                end: u64::MAX,
                stripe_size: 65_536,
                data_id: 6,
                set,
                ..Default::default()
            };
            r.layout = Some(pb::Layout { generation: 1, components: vec![c], drafts: 0 });
            let all = Rights::READ.and(Rights::WRITE).and(Rights::TRIM);
            let cap = Capability {
                ino: 5,
                data: 6,
                session: 7,
                session_epoch: 1,
                expiry_ms: u64::MAX / 2,
                rights: all,
                bound: strake_proto::Bound::Any,
                as_of: 0,
            };
            r.capability = CapKey::from_cluster_key(&[7; 32]).seal(&cap).to_vec().into();
            r.created = true;
        }
        Some(Op::Readdir(_)) => {
            r.entries = vec![pb::DirEntry {
                name: "a".into(),
                ino: 5,
                r#type: 8,
                cookie: 300,
                attr: Some(attr),
            }];
            r.end = true;
        }
        Some(Op::Statfs(_)) => r.statfs = Some(pb::StatfsReply::default()),
        _ => {}
    }
    r
}

fn data(m: &Message) -> Result<(Vec<u8>, Vec<Buf>)> {
    let q = DataRequest::decode(&m.body).expect("the client's own");
    let version = Version { epoch: 1, number: 1 };
    let boot_ids = vec![BootId { target: q.target, number: 1 }];
    let mut r = DataReply {
        stable: q.kind == Kind::None,
        version,
        epoch: 1,
        boot_ids,
        ..Default::default()
    };
    let mut payload = Vec::new();
    if m.opcode == opcode::READ {
        let bytes = vec![0x5a; q.len.min(65_536) as usize];
        (r.len, r.sums) = (bytes.len() as u32, block_sums(u64::from(q.offset), [&bytes[..]]));
        if !bytes.is_empty() {
            payload.push(Buf::copy_from(&bytes));
        }
    }
    if m.opcode == opcode::EXTENTS {
        let found = vec![Extent { index: q.chunk.index + 1, offset: 8192, len: 4096 }];
        let found = if q.len == 0 { Vec::new() } else { found };
        payload.push(Buf::copy_from(&Extents { found, bytes: 4096, next: None }.encode()));
    }
    Ok((r.encode().to_vec(), payload))
}

#[async_trait]
impl Service for Servers {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        let rest = std::mem::take(&mut *self.answers.lock());
        let mut i = Input(&rest);
        let reply =
            self.good(&m).and_then(|(body, payload)| strange(&mut i, m.opcode, body, payload));
        *self.answers.lock() = i.0.to_vec();
        let pause = if m.opcode == opcode::RECALL {
            Duration::from_secs(1)
        } else {
            Duration::from_micros(200)
        };
        tokio::time::sleep(pause).await;
        reply
    }
}

/// The proper answer, changed as the input says.
fn strange(i: &mut Input, op: u16, mut body: Vec<u8>, mut payload: Vec<Buf>) -> Result<Message> {
    match i.u8() {
        1 => {
            let code = Code::ALL[usize::from(i.u8()) % Code::ALL.len()];
            return Err(Error {
                code,
                message: "as the input says".into(),
                leader: u32::from(i.u8() % 4),
            });
        }
        2 => body = i.bytes().to_vec(),
        // Fields that are appended to a control message replace earlier ones.
        3 => body.extend_from_slice(i.bytes()),
        4 => {
            let (at, with) = (usize::from(i.u16()), i.u8());
            if let Some(b) = body.get_mut(at) {
                *b = with;
            }
        }
        5 => payload = vec![Buf::copy_from(i.bytes())],
        6 => body.truncate(usize::from(i.u8())),
        7 => payload.clear(),
        8 => {
            // Replaces one operation's result: sizes, layouts and capabilities of all kinds.
            let results = vec![pb::OpResult::decode(i.bytes()).unwrap_or_default()];
            body = pb::MetaReply { results, granted: vec![i.number(), 5] }.encode_to_vec();
        }
        9 => {
            let n = usize::from(i.u8() % 32);
            let r = DataReply {
                stable: i.u8() & 1 == 1,
                version: Version { epoch: i.number(), number: i.number() },
                epoch: i.number(),
                len: i.number() as u32,
                sums: vec![i.u32(); n],
                boot_ids: (0..i.u8() % 4)
                    .map(|_| BootId { target: i.number() as u32, number: i.number() })
                    .collect(),
            };
            body = r.encode().to_vec();
        }
        _ => {}
    }
    Ok(Message::new(op, body).with_payload(payload))
}

/// The first byte says where the program's actions end and the servers' answers begin.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    let actions = usize::from(i.u8() % 64);
    let program = i.take(actions).to_vec();
    let answers = i.0.to_vec();
    world::run(async move {
        let net = Net::new();
        let servers = Arc::new(Servers { answers: Mutex::new(answers) });
        net.put(MDS, servers.clone());
        net.put(OSS, servers);
        let env = world::env(1);
        let at = |n| Endpoint::Sim(n);
        let cfg = Config {
            op_timeout: Duration::from_secs(3),
            cache_bytes: 4 << 20,
            read_ahead_bytes: 1 << 20,
            unstable_limit: 4 << 20,
            ..Config::new(vec![at(MDS)])
        };
        let fabric = Arc::new(End(net.clone()));
        if let Ok(client) = Client::connect(cfg, env.clone(), fabric).await {
            act(&client, &mut Input(&program)).await;
            let _ = client.close().await;
        }
        env.kill();
        net.end();
    });
}

async fn act(client: &Client, i: &mut Input<'_>) {
    let me = Creds::default();
    let mut file: Option<File> = None;
    for _ in 0..24 {
        if i.is_empty() {
            break;
        }
        match i.u8() % 24 {
            0 => drop(client.lookup(&me, 1, b"a").await),
            1 => {
                let sparse = client.getattr(&me, 5).await.is_ok_and(|a| a.sparse);
                if sparse || i.u8() == 1 {
                    let _ = client.space().allocated(5).await;
                }
            }
            2 => drop(
                client
                    .setattr(
                        &me,
                        pb::SetAttr { ino: 5, size: Some(i.number()), ..Default::default() },
                    )
                    .await,
            ),
            3 => drop(client.mkdir(&me, 1, b"d", 0o755).await),
            4 => drop(client.readdir(&me, 1, 0, 10, true).await),
            5 => drop(client.readlink(&me, 5).await),
            6 => drop(client.space().statfs(&me, "").await),
            7 => drop(client.layouts().get(&me, 5).await),
            8 => drop(client.xattrs().list(&me, 5).await),
            9 => drop(client.unlink(&me, 1, b"a").await),
            10 => drop(client.rename(&me, (1, b"a"), (1, b"b"), 0).await),
            11 => drop(client.servers().fetch_map().await),
            12 | 13 => {
                file = client
                    .create(&me, 1, b"a", 0o644, 2, false, None)
                    .await
                    .ok()
                    .map(|f| f.0)
                    .or(file)
            }
            14 => {
                file = client.open(&me, 5, u32::from(i.u8() % 4)).await.ok().map(|f| f.0).or(file)
            }
            15 => tokio::time::sleep(Duration::from_millis(500)).await,
            n => {
                if let Some(f) = &file {
                    of_file(f, n, i).await;
                } else {
                    file = client.open(&me, 5, 2).await.ok().map(|f| f.0);
                }
            }
        }
    }
    if let Some(f) = file {
        let _ = f.close().await;
    }
}

async fn of_file(f: &File, n: u8, i: &mut Input<'_>) {
    let offset = match i.u8() {
        255 => i.u64(),
        n => u64::from(n) << 11,
    };
    let len = usize::from(i.u8()) << 8 | 1;
    match n {
        16 | 17 => {
            if let Ok(bufs) = f.read(offset, len).await {
                assert!(bufs.iter().map(Buf::len).sum::<usize>() <= len, "more than was asked for");
            }
        }
        18 | 19 => drop(f.write_all_at(offset, &vec![7; len]).await),
        20 => drop(f.append(vec![Buf::copy_from(&vec![8; len])]).await),
        21 => drop(f.truncate(offset).await),
        22 => drop(f.fsync().await),
        _ => match offset >> 11 & 3 {
            0 => drop(f.flush().await),
            1 => drop(f.punch(offset, len as u64 * 8).await),
            2 => {
                let found = f.seek_data(offset).await;
                assert!(found.is_err() || found.is_ok_and(|at| at >= offset));
            }
            _ => {
                let found = f.seek_hole(offset).await;
                assert!(found.is_err() || found.is_ok_and(|at| at >= offset));
            }
        },
    }
}
