//! Storage servers in memory: one state for all, one replica, every write stable at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_fabric::{Buf, Message, Peer, Service};
use strake_proto::{
    CapKey, ChunkId, Code, Error, Result, Rights,
    checksum::{block_sums, verify},
    data::{BootId, DataReply, DataRequest, Extent, Extents, Kind, Version},
    opcode,
};

#[derive(Default)]
struct Chunk {
    bytes: Vec<u8>,
    /// Blocks that hold data.
    stored: BTreeSet<usize>,
    chain: u32,
    number: u64,
}

pub struct Data {
    key: CapKey,
    chunks: Mutex<BTreeMap<ChunkId, Chunk>>,
    /// Requests for extents get no answer.
    pub silent: AtomicBool,
}

impl Data {
    pub fn new(key: CapKey) -> Data {
        Data { key, chunks: Mutex::default(), silent: AtomicBool::new(false) }
    }

    /// Truncates a file as the metadata server's TRIM does.
    pub fn trim(&self, ino: u64, first_gone: u64, kept: u32) {
        let mut chunks = self.chunks.lock();
        chunks.retain(|c, _| c.ino != ino || c.index < first_gone);
        for (c, k) in chunks.iter_mut().filter(|(c, _)| c.ino == ino && c.index + 1 == first_gone) {
            let _ = c;
            k.bytes.truncate(kept as usize);
            k.stored.retain(|b| b * 4096 < kept as usize);
        }
    }

    /// Where a file's chunks on a chain hold data.
    fn extents(&self, r: &DataRequest) -> Extents {
        let (mut out, most) = (Extents::default(), r.len as usize);
        let (chunks, last) = (self.chunks.lock(), ChunkId { index: u64::MAX, ..r.chunk });
        let of_chain = chunks.range(r.chunk..=last).filter(|(_, c)| c.chain == r.chain);
        let blocks =
            of_chain.flat_map(|(id, c)| c.stored.iter().map(|b| (id.index, *b as u32 * 4096)));
        for (index, offset) in blocks.filter(|at| *at >= (r.chunk.index, r.offset)) {
            let full = out.found.len() == most;
            match out.found.last_mut() {
                _ if most == 0 => {}
                Some(e) if (e.index, e.offset + e.len) == (index, offset) => e.len += 4096,
                _ if full => {
                    out.next = Some((index, offset));
                    break;
                }
                _ => out.found.push(Extent { index, offset, len: 4096 }),
            }
            out.bytes += 4096;
        }
        out
    }

    fn check(&self, r: &DataRequest, rights: Rights) -> Result<()> {
        let cap = r.cap.ok_or_else(|| Error::new(Code::BadCap, "no capability"))?;
        let cap = self.key.open(&cap, 0)?;
        if cap.ino != r.chunk.ino
            || cap.data != r.chunk.data
            || cap.session != r.session
            || !cap.rights.has(rights)
        {
            return Err(Error::new(Code::BadCap, "capability for something else"));
        }
        Ok(())
    }
}

#[async_trait]
impl Service for Data {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        let r = DataRequest::decode(&m.body)?;
        let boot_ids = vec![BootId { target: r.target, number: 1 }];
        let mut reply = DataReply { stable: true, epoch: r.epoch, boot_ids, ..Default::default() };
        let (from, len) = (r.offset as usize, r.len as usize);
        match m.opcode {
            opcode::WRITE => {
                self.check(&r, Rights::WRITE)?;
                if verify(u64::from(r.offset), m.payload.iter().map(|b| &b[..]), &r.sums).is_some()
                {
                    return Err(Error::new(Code::Resend, "checksum mismatch"));
                }
                let mut chunks = self.chunks.lock();
                let c = chunks.entry(r.chunk).or_default();
                c.chain = r.chain;
                c.number += 1;
                reply.version = Version { epoch: r.epoch, number: c.number };
                if r.kind == Kind::Punch {
                    let end = (from + len).min(c.bytes.len());
                    c.bytes[from.min(end)..end].fill(0);
                    let all = &c.bytes;
                    c.stored.retain(|b| {
                        all[b * 4096..((b + 1) * 4096).min(all.len())].iter().any(|b| *b != 0)
                    });
                    return Ok(Message::new(0, reply.encode()));
                }
                c.stored.extend(from / 4096..(from + len).div_ceil(4096));
                if c.bytes.len() < from + len {
                    c.bytes.resize(from + len, 0);
                }
                let mut at = from;
                for b in &m.payload {
                    c.bytes[at..at + b.len()].copy_from_slice(b);
                    at += b.len();
                }
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
            opcode::EXTENTS => {
                if self.silent.load(Relaxed) {
                    std::future::pending::<()>().await;
                }
                self.check(&r, Rights::READ).or_else(|_| self.check(&r, Rights::WRITE))?;
                Ok(Message::new(0, reply.encode())
                    .with_payload(vec![Buf::copy_from(&self.extents(&r).encode())]))
            }
            opcode::FLUSH => Ok(Message::new(0, reply.encode())),
            opcode::GRANT => {
                self.check(&r, Rights::WRITE)?;
                reply.len = r.len;
                Ok(Message::new(0, reply.encode()))
            }
            o => Err(strake_fabric::unknown_opcode(o)),
        }
    }
}
