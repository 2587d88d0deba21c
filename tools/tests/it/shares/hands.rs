//! The protocol by hand, from another address than the mount's. Frames are built once and sent
//! repeatedly, which costs an attacker almost nothing.

use std::{net::SocketAddr, path::Path, time::Duration};

use bytes::Bytes;
use prost::Message as _;
use strake_fabric::{Endpoint, Identity, tcp::handshake};
use strake_proto::{
    ChunkId, Code, WIRE_VERSION,
    cap::CAP_LEN,
    checksum::{block_sums, crc32c},
    data::{DataRequest, Kind as Does},
    frame::{HEADER_LEN, Header, Kind},
    ids::ROOT_INO,
    layout::StripeMap,
    map::{ChainExt, MapView},
    opcode, pb,
};
use strake_runtime::{Env, keyfile};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

/// The attacker's address.
const FROM: &str = "127.0.0.2:0";
const LONG: Duration = Duration::from_secs(20);
/// Bytes of the file that is read.
pub const BYTES: u32 = 1 << 20;

pub type Answer<T> = Result<T, Code>;

fn broken<E>(_: E) -> Code {
    Code::Disconnected
}

/// A silent connection.
pub async fn silent(at: &Endpoint) -> std::io::Result<TcpStream> {
    let Endpoint::Tcp(host, port) = at else { unreachable!() };
    let socket = TcpSocket::new_v4()?;
    socket.bind(FROM.parse::<SocketAddr>().unwrap())?;
    socket.connect(format!("{host}:{port}").parse().unwrap()).await
}

pub fn frame(opcode: u16, id: u64, body: &[u8], payload: &[u8], payload_len: u32) -> Vec<u8> {
    let h = Header {
        version: WIRE_VERSION,
        kind: Kind::Request,
        flags: 0,
        opcode,
        status: 0,
        deadline_ms: 0,
        request_id: id,
        body_len: body.len() as u32,
        payload_len,
        body_crc: crc32c(body),
        payload_crc: 0,
        trace: 0,
    };
    [&h.encode()[..], body, payload].concat()
}

/// Sets an ACL of 506 groups.
pub fn acl_of_groups(ino: u64) -> pb::op::Op {
    let entry = |tag: u16, id: u32| {
        [&tag.to_le_bytes()[..], &7u16.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let mut value = [&[2, 0, 0, 0][..], &entry(1, u32::MAX), &entry(4, u32::MAX)].concat();
    (0..506).for_each(|i| value.extend(entry(8, 1_000_000 + i)));
    value.extend([entry(16, u32::MAX), entry(32, u32::MAX)].concat());
    let name = Bytes::from_static(b"system.posix_acl_access");
    pb::op::Op::Setxattr(pb::SetXattr { ino, name, value: value.into(), ..Default::default() })
}

pub struct Hand {
    pub stream: TcpStream,
    next: u64,
}

impl Hand {
    pub async fn reach(dir: &Path, at: &Endpoint) -> Answer<Hand> {
        let identity = Identity::client(keyfile::read_client(&dir.join("client.key")).unwrap());
        let mut stream = silent(at).await.map_err(broken)?;
        let party = handshake::Party::new(identity, None, Env::system().random_bytes());
        let shaken = timeout(LONG, handshake::dial(&mut stream, &party)).await;
        shaken.map_err(broken)?.map_err(broken)?;
        Ok(Hand { stream, next: 1 })
    }

    /// Sends a request and reads the answer's body.
    pub async fn ask(&mut self, op: u16, body: &[u8], payload: &[u8]) -> Answer<Bytes> {
        let f = frame(op, self.next, body, payload, payload.len() as u32);
        self.next += 1;
        timeout(LONG, self.asked(&f)).await.map_err(broken)?
    }

    async fn asked(&mut self, f: &[u8]) -> Answer<Bytes> {
        self.stream.write_all(f).await.map_err(broken)?;
        loop {
            let mut head = [0; HEADER_LEN];
            self.stream.read_exact(&mut head).await.map_err(broken)?;
            let h = Header::decode(&head).map_err(broken)?;
            let mut rest = vec![0; (h.body_len + h.payload_len) as usize];
            self.stream.read_exact(&mut rest).await.map_err(broken)?;
            match h.kind {
                Kind::Response if h.status == 0 => {
                    return Ok(Bytes::from(rest).slice(..h.body_len as usize));
                }
                Kind::Response => return Err(Code::from_wire(h.status.into())),
                _ => {}
            }
        }
    }

    pub async fn call<R: prost::Message + Default>(
        &mut self,
        op: u16,
        body: &impl prost::Message,
    ) -> Answer<R> {
        R::decode(self.ask(op, &body.encode_to_vec(), &[]).await?).map_err(broken)
    }
}

/// A session at the leader.
pub struct Visitor {
    pub hand: Hand,
    pub session: u64,
    seq: u64,
}

impl Visitor {
    pub async fn new(dir: &Path, mds: &[Endpoint]) -> Visitor {
        loop {
            for at in mds {
                let Ok(mut hand) = Hand::reach(dir, at).await else { continue };
                let client_uuid = Env::system().random_bytes::<16>().to_vec().into();
                let open = pb::SessionOpenRequest {
                    level: strake_proto::FEATURE_LEVEL,
                    client_uuid,
                    ..Default::default()
                };
                if let Ok(r) = hand.call::<pb::SessionOpenReply>(opcode::SESSION_OPEN, &open).await
                {
                    return Visitor { hand, session: r.session, seq: 0 };
                }
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// The encoded bytes of an operation list. `seq` rises if the list changes something.
    pub fn list(&mut self, creds: &pb::Creds, ops: Vec<pb::op::Op>) -> Vec<u8> {
        let ops: Vec<pb::Op> = ops.into_iter().map(|op| pb::Op { op: Some(op) }).collect();
        let changes = ops.iter().any(strake_proto::ops::is_mutation);
        self.seq += u64::from(changes);
        let m = pb::MetaRequest {
            session: self.session,
            seq: if changes { self.seq } else { 0 },
            lowest_unanswered: self.seq,
            creds: Some(creds.clone()),
            ops,
            ..Default::default()
        };
        m.encode_to_vec()
    }

    /// Runs an operation list; returns the answer to its last operation. After an outer error the
    /// connection is unusable.
    pub async fn run(
        &mut self,
        creds: &pb::Creds,
        ops: Vec<pb::op::Op>,
    ) -> Answer<Answer<pb::OpResult>> {
        let body = self.list(creds, ops);
        let r = match self.hand.ask(opcode::META, &body, &[]).await {
            Err(e @ (Code::Disconnected | Code::NotLeader | Code::NoSession)) => return Err(e),
            Err(e) => return Ok(Err(e)),
            Ok(b) => pb::MetaReply::decode(b).map_err(broken)?,
        };
        let last = r.results.last().cloned().unwrap_or_default();
        Ok(match last.status {
            Some(s) if s.code != 0 => Err(Code::from_wire(s.code)),
            _ => Ok(last),
        })
    }

    /// Makes a file with some bytes. Returns a read request for it, and the server to send it to.
    pub async fn readable(&mut self, dir: &Path) -> Answer<Vec<(Endpoint, DataRequest)>> {
        let name = format!("read-{:x}", self.session);
        let create = pb::Create {
            parent: ROOT_INO,
            name: name.into(),
            mode: 0o666,
            flags: libc::O_RDWR as u32,
            ..Default::default()
        };
        let made = self.run(&pb::Creds::default(), vec![pb::op::Op::Create(create)]).await??;
        let map: pb::MapReply = self.hand.call(opcode::MAP, &pb::MapRequest::default()).await?;
        let map = MapView::new(map.map.ok_or(Code::Stale)?).map_err(broken)?;
        let ino = made.attr.as_ref().unwrap().ino;
        let stripes =
            StripeMap::resolve(ino, made.layout.as_ref().unwrap(), &map).map_err(broken)?;
        let chain = map.chain(stripes.chain_of(0)).ok_or(Code::Stale)?;
        let cap: [u8; CAP_LEN] = made.capability[..].try_into().unwrap();
        let chunk = ChunkId { ino, data: stripes.data, index: 0 };
        let ask = |target| DataRequest {
            cap: Some(cap),
            session: self.session,
            len: BYTES,
            ..DataRequest::new(chain.id, chain.epoch, target, chunk)
        };
        let at = |target| map.node_of(target).unwrap().endpoints[0].parse::<Endpoint>().unwrap();
        let (head, data) = (chain.head().ok_or(Code::Stale)?, vec![7; BYTES as usize]);
        let write = DataRequest {
            kind: Does::Write,
            seq: 1,
            sums: block_sums(0, [&data[..]]),
            ..ask(head)
        };
        let mut hand = Hand::reach(dir, &at(head)).await?;
        hand.ask(opcode::WRITE, &write.encode(), &data).await?;
        Ok(chain.serving().map(|t| (at(t), ask(t))).collect())
    }
}
