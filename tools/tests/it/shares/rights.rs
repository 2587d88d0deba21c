//! Capabilities that a client keeps after the right they stand for has ended.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;
use strake_fabric::{Buf, Connection, Message};
use strake_proto::{
    ChunkId, Code,
    cap::CAP_LEN,
    checksum,
    data::{DataRequest, Kind},
    layout::StripeMap,
    map::{ChainExt, MapView},
    opcode, pb,
};

use super::{LONG, Session, Victim};
use crate::common::{ok, strake};
use pb::op::Op;

/// What an attacker keeps of an open file: the session and the capability.
struct Kept<'a> {
    v: &'a Victim,
    session: u64,
    result: pb::OpResult,
    first: DataRequest,
    conn: Arc<dyn Connection>,
    seq: u64,
}

const BLOCK: u32 = 4096;
/// A folder in which all users may make files.
const OPEN: &str = "open";

impl<'a> Kept<'a> {
    /// A new file of a normal user, opened for writing.
    fn new(v: &'a Victim, s: &mut Session<'_>, name: &str) -> Kept<'a> {
        let op = pb::Create {
            parent: fs::metadata(v.mount().join(OPEN)).unwrap().ino(),
            name: name.to_owned().into(),
            mode: 0o666,
            flags: libc::O_RDWR as u32,
            ..Default::default()
        };
        let result = s.run(&user(), vec![Op::Create(op)]).unwrap();
        let map: pb::MapReply = v.call(&*s.conn, opcode::MAP, &pb::MapRequest::default()).unwrap();
        let map = MapView::new(map.map.unwrap()).unwrap();
        let ino = result.attr.as_ref().unwrap().ino;
        let stripes = StripeMap::resolve(ino, result.layout.as_ref().unwrap(), &map).unwrap();
        let chain = map.chain(stripes.chain_of(0)).unwrap();
        let target = chain.head().unwrap();
        let chunk = ChunkId { ino, data: stripes.data, index: 0 };
        let at = map.node_of(target).unwrap().endpoints[0].parse().unwrap();
        let first = DataRequest::new(chain.id, chain.epoch, target, chunk);
        Kept { v, session: s.id, first, conn: v.connect(&at).unwrap(), result, seq: 0 }
    }
    fn ino(&self) -> u64 {
        self.first.chunk.ino
    }
    /// Sends a request; repeats it while the server cannot answer yet.
    fn ask(&self, op: u16, r: &DataRequest, payload: &[Buf]) -> Result<(), Code> {
        let cap: [u8; CAP_LEN] = self.result.capability[..].try_into().unwrap();
        let body = DataRequest {
            cap: Some(cap),
            session: self.session,
            seq: self.seq,
            len: BLOCK,
            ..r.clone()
        };
        let began = Instant::now();
        loop {
            let m = Message::new(op, body.encode()).with_payload(payload.to_vec());
            match self.v.runtime.block_on(self.conn.call(m, LONG)) {
                Ok(_) => return Ok(()),
                Err(e) if e.code == Code::NotServing && began.elapsed() < LONG => {
                    thread::sleep(Duration::from_millis(20));
                }
                Err(e) => return Err(e.code),
            }
        }
    }
    fn write(&mut self, byte: u8) -> Result<(), Code> {
        let bytes = vec![byte; BLOCK as usize];
        self.seq += 1;
        let sums = checksum::block_sums(0, [&bytes[..]]);
        let r = DataRequest { kind: Kind::Write, sums, ..self.first.clone() };
        self.ask(opcode::WRITE, &r, &[Bytes::from(bytes).into()])
    }
    fn read(&self) -> Result<(), Code> {
        self.ask(opcode::READ, &self.first, &[])
    }
    /// Checks that requests are refused within 1 s of the end of the right (5 s in debug builds).
    fn ends(&mut self, what: &str, writes: bool) {
        let ended = Instant::now();
        loop {
            if let Err(e) = if writes { self.write(b'B') } else { self.read() } {
                println!("{what}: refused after {:?}", ended.elapsed());
                assert_eq!(e, Code::BadCap, "{what}");
                return;
            }
            let limit = if cfg!(debug_assertions) { 5 } else { 1 };
            assert!(ended.elapsed() < Duration::from_secs(limit), "{what}: still good");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn user() -> pb::Creds {
    pb::Creds { uid: 65534, gid: 65534, groups: vec![] }
}

#[test]
fn a_kept_capability_ends_with_its_right() {
    let Some(v) = Victim::new() else { return };
    let mut s = v.session();
    let folder = v.mount().join(OPEN);
    fs::create_dir(&folder).unwrap();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    let made = |name: &str, s: &mut Session<'_>| {
        let mut k = Kept::new(&v, s, name);
        k.write(b'A').unwrap();
        k.read().unwrap();
        let end = pb::Extend { ino: k.ino(), end: BLOCK.into(), ..Default::default() };
        s.run(&user(), vec![Op::Extend(end)]).unwrap();
        k
    };
    let close = |k: &Kept<'_>| {
        let release = pb::Release { ino: k.ino(), writer: k.result.writer, surplus: false };
        vec![Op::Close(pb::Close { ino: k.ino() }), Op::Release(release)]
    };

    let mut closed = made("closed", &mut s);
    s.run(&user(), close(&closed)).unwrap();
    closed.ends("write after close and release", true);

    // A file that is not open when its mode changes.
    let mut private = made("private", &mut s);
    s.run(&user(), close(&private)).unwrap();
    let path = folder.join("private");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    private.ends("read after chmod", false);

    let mut sealed = made("sealed", &mut s);
    s.run(&user(), close(&sealed)).unwrap();
    sealed.ends("write before a seal", true);
    let path = folder.join("sealed");
    ok(&strake().args(["lfs", "seal"]).arg(&path).output().unwrap());
    assert_eq!(sealed.write(b'Z'), Err(Code::BadCap));
    ok(&strake().args(["lfs", "verify"]).arg(&path).output().unwrap());

    let mut left = made("left", &mut s);
    let end = pb::SessionCloseRequest { session: s.id };
    let _: pb::SessionCloseReply = v.call(&*s.conn, opcode::SESSION_CLOSE, &end).unwrap();
    left.ends("write after the end of the session", true);
    assert_eq!(left.read(), Err(Code::BadCap));
}
