//! Storage servers in memory: one state for all, one copy, everything stable at once.

use std::collections::BTreeMap;

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_fabric::{Buf, Message, Peer, Service};
use strake_proto::{
    CapKey, ChunkId, Code, Error, Result, Rights,
    checksum::{block_sums, verify},
    data::{DataReply, DataRequest, Stamp, Version},
    opcode,
};

#[derive(Default)]
struct Chunk {
    bytes: Vec<u8>,
    number: u64,
}

pub struct Data {
    key: CapKey,
    chunks: Mutex<BTreeMap<ChunkId, Chunk>>,
}

impl Data {
    pub fn new(key: CapKey) -> Data {
        Data { key, chunks: Mutex::default() }
    }

    /// Cuts a file as the metadata server's TRIM does.
    pub fn trim(&self, ino: u64, first_gone: u64, kept: u32) {
        let mut chunks = self.chunks.lock();
        chunks.retain(|c, _| c.ino != ino || c.index < first_gone);
        for (c, k) in chunks.iter_mut().filter(|(c, _)| c.ino == ino && c.index + 1 == first_gone) {
            let _ = c;
            k.bytes.truncate(kept as usize);
        }
    }

    fn check(&self, r: &DataRequest, rights: Rights) -> Result<()> {
        let cap = r.cap.ok_or_else(|| Error::new(Code::BadCap, "no capability"))?;
        let cap = self.key.open(&cap, 0)?;
        if cap.ino != r.chunk.ino || cap.data != r.chunk.data || cap.session != r.session || !cap.rights.has(rights) {
            return Err(Error::new(Code::BadCap, "capability for something else"));
        }
        Ok(())
    }
}

#[async_trait]
impl Service for Data {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        let r = DataRequest::decode(&m.body)?;
        let stamps = vec![Stamp { target: r.target, stamp: 1 }];
        let mut reply = DataReply { stable: true, epoch: r.epoch, stamps, ..Default::default() };
        let (from, len) = (r.offset as usize, r.len as usize);
        match m.opcode {
            opcode::WRITE => {
                self.check(&r, Rights::WRITE)?;
                if verify(u64::from(r.offset), m.payload.iter().map(|b| &b[..]), &r.sums).is_some() {
                    return Err(Error::new(Code::Resend, "checksum mismatch"));
                }
                let mut chunks = self.chunks.lock();
                let c = chunks.entry(r.chunk).or_default();
                if c.bytes.len() < from + len {
                    c.bytes.resize(from + len, 0);
                }
                let mut at = from;
                for b in &m.payload {
                    c.bytes[at..at + b.len()].copy_from_slice(b);
                    at += b.len();
                }
                c.number += 1;
                reply.version = Version { epoch: r.epoch, number: c.number };
                Ok(Message::new(0, reply.encode()))
            }
            opcode::READ => {
                self.check(&r, Rights::READ)?;
                let chunks = self.chunks.lock();
                let all = chunks.get(&r.chunk).map_or(&[][..], |c| &c.bytes[..]);
                let part = &all[from.min(all.len())..(from + len).min(all.len())];
                reply.len = part.len() as u32;
                reply.sums = block_sums(u64::from(r.offset), [part]);
                let payload = if part.is_empty() { vec![] } else { vec![Buf::copy_from(part)] };
                Ok(Message::new(0, reply.encode()).with_payload(payload))
            }
            opcode::FLUSH => Ok(Message::new(0, reply.encode())),
            o => Err(strake_fabric::unknown_opcode(o)),
        }
    }
}
