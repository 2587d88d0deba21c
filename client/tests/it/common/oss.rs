//! Storage servers in memory: chunks per target, an applied but unflushed state that a restart
//! loses, and injected faults.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_fabric::{Buf, Message, Peer, Service};
use strake_proto::{
    CapKey, ChunkId, Code, Error, Result, Rights,
    checksum::{block_sums, verify},
    data::{
        BootId, DataReply, DataRequest, Extent, Extents, FLAG_GRANTED, FLAG_REPLAY, FLAG_STABLE,
        KEPT_WRITERS, Kind, Version, Writer,
    },
    map::{ChainExt, MapView},
    opcode, pb,
};

#[derive(Clone, Default, PartialEq, Debug)]
struct Chunk {
    chain: u32,
    bytes: Vec<u8>,
    /// Blocks that hold data.
    stored: BTreeSet<usize>,
    version: Version,
    writers: Vec<Writer>,
}

impl Chunk {
    /// A write, or a punch without bytes.
    fn change(&mut self, kind: Kind, offset: usize, len: usize, bytes: &[u8]) {
        let mut end = offset + len;
        if kind == Kind::Punch {
            end = end.min(self.bytes.len());
            self.bytes[offset.min(end)..end].fill(0);
            let all = &self.bytes;
            self.stored
                .retain(|b| all[b * 4096..((b + 1) * 4096).min(all.len())].iter().any(|b| *b != 0));
            return;
        }
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        self.bytes[offset..end].copy_from_slice(bytes);
        self.stored.extend(offset / 4096..end.div_ceil(4096));
    }
}

#[derive(Default)]
struct Target {
    stamp: u64,
    chunks: BTreeMap<ChunkId, Chunk>,
    flushed: BTreeMap<ChunkId, Chunk>,
}

#[derive(Default)]
pub struct Faults {
    /// Replies of reads from these targets have a flipped byte.
    pub corrupt: BTreeSet<u32>,
    /// These targets say that every chunk is dirty.
    pub dirty: BTreeSet<u32>,
    /// Every write is refused because no space is left.
    pub full: bool,
    /// The servers act like an older version that grants no space.
    pub no_grants: bool,
    /// This many writes are answered "resend".
    pub resend: u32,
    /// This many replays are answered "overtaken".
    pub overtaken: u32,
    /// Writes take this long before they are applied.
    pub write_delay: Duration,
    /// This many requests are answered "no session".
    pub no_session: u32,
    /// This many requests are answered "bad capability".
    pub bad_cap: u32,
    /// Capabilities up to this number have ended.
    pub ended: u32,
}

#[derive(Default)]
pub struct Counts {
    pub applied: u64,
    pub known: u64,
    pub flushes: u64,
    /// Writes that said that they use granted space.
    pub granted: u64,
    /// The round of the last write.
    pub round: u64,
    pub reads: BTreeMap<u32, u64>,
}

struct State {
    map: MapView,
    targets: BTreeMap<u32, Target>,
    faults: Faults,
    counts: Counts,
    next_stamp: u64,
}

pub struct Oss {
    key: CapKey,
    state: Mutex<State>,
}

fn err<T>(code: Code, m: &str) -> Result<T> {
    Err(Error::new(code, m))
}

impl Oss {
    pub fn new(map: pb::ClusterMap, key: CapKey) -> Oss {
        let targets =
            map.targets.iter().map(|t| (t.id, Target { stamp: 1, ..Default::default() })).collect();
        let map = MapView::new(map).unwrap();
        let state = State {
            map,
            targets,
            faults: Faults::default(),
            counts: Counts::default(),
            next_stamp: 2,
        };
        Oss { key, state: Mutex::new(state) }
    }
    pub fn set_map(&self, map: pb::ClusterMap) {
        self.state.lock().map = MapView::new(map).unwrap();
    }
    pub fn faults<T>(&self, f: impl FnOnce(&mut Faults) -> T) -> T {
        f(&mut self.state.lock().faults)
    }
    pub fn counts<T>(&self, f: impl FnOnce(&Counts) -> T) -> T {
        f(&self.state.lock().counts)
    }
    pub fn lose_unflushed(&self, target: u32) {
        let mut s = self.state.lock();
        s.next_stamp += 1;
        let stamp = s.next_stamp;
        let t = s.targets.get_mut(&target).unwrap();
        t.chunks = t.flushed.clone();
        t.stamp = stamp;
    }
    /// Makes the members of every chain equal after restarts: one that did not restart is the
    /// source, if there is any.
    pub fn resync(&self, restarted: &[u32]) {
        let s = &mut *self.state.lock();
        for chain in &s.map.map.chains {
            let members: Vec<u32> = chain.serving().collect();
            let source = members.iter().find(|t| !restarted.contains(t)).or(members.first());
            let Some(source) = source else { continue };
            let of_chain = |_: &ChunkId, c: &mut Chunk| c.chain != chain.id;
            let chunks = s.targets[source].chunks.clone();
            for t in members.iter().filter(|t| *t != source) {
                let t = s.targets.get_mut(t).unwrap();
                let mine = |(_, c): &(&ChunkId, &Chunk)| c.chain == chain.id;
                for m in [&mut t.chunks, &mut t.flushed] {
                    m.retain(of_chain);
                    m.extend(chunks.iter().filter(mine).map(|(id, c)| (*id, c.clone())));
                }
            }
        }
    }
    /// Truncates a file as the mds's TRIM does: on all targets, stable.
    pub fn trim(&self, ino: u64, first_gone: u64, kept: u32) {
        let mut s = self.state.lock();
        for t in s.targets.values_mut() {
            t.chunks.retain(|c, _| c.ino != ino || c.index < first_gone);
            for (c, k) in &mut t.chunks {
                if c.ino == ino && c.index + 1 == first_gone {
                    k.bytes.truncate(kept as usize);
                    k.stored.retain(|b| b * 4096 < kept as usize);
                }
            }
            t.flushed = t.chunks.clone();
        }
    }
    /// What a target holds of a chunk.
    pub fn chunk(&self, target: u32, chunk: ChunkId) -> Option<Vec<u8>> {
        self.state.lock().targets[&target].chunks.get(&chunk).map(|c| c.bytes.clone())
    }

    fn check(
        &self,
        s: &State,
        r: &DataRequest,
        target: u32,
        rights: Rights,
        now_ms: u64,
    ) -> Result<()> {
        let chain =
            s.map.chain(r.chain).ok_or_else(|| Error::new(Code::NotServing, "no such chain"))?;
        if chain.epoch != r.epoch {
            return err(Code::StaleEpoch, "another epoch");
        }
        if r.target != target || chain.state_of(target) != Some(pb::ReplicaState::ReplicaServing) {
            return err(Code::NotServing, "not serving");
        }
        let cap = self
            .key
            .open(&r.cap.ok_or_else(|| Error::new(Code::BadCap, "no capability"))?, now_ms)?;
        if cap.ino != r.chunk.ino || cap.session != r.session || !cap.rights.has(rights) {
            return err(Code::BadCap, "capability for something else");
        }
        if cap.as_of <= s.faults.ended {
            return err(Code::BadCap, "what the capability gave a right to has ended");
        }
        Ok(())
    }

    fn take(n: &mut u32) -> bool {
        let some = *n > 0;
        *n = n.saturating_sub(1);
        some
    }

    fn boot_ids(s: &State, chain: &pb::Chain) -> Vec<BootId> {
        chain.serving().map(|t| BootId { target: t, number: s.targets[&t].stamp }).collect()
    }

    async fn write(&self, target: u32, r: DataRequest, payload: Vec<Buf>) -> Result<DataReply> {
        let delay = self.state.lock().faults.write_delay;
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let s = &mut *self.state.lock();
        self.check(s, &r, target, Rights::WRITE, 0)?;
        let chain = s.map.chain(r.chain).unwrap().clone();
        if chain.head() != Some(target) {
            return err(Code::NotServing, "not the head");
        }
        let bytes: Vec<u8> = payload.iter().flat_map(|b| b.to_vec()).collect();
        assert_eq!(bytes.len(), if r.kind == Kind::Punch { 0 } else { r.len as usize });
        if Self::take(&mut s.faults.resend)
            || verify(u64::from(r.offset), [&bytes[..]], &r.sums).is_some()
        {
            return err(Code::Resend, "checksum mismatch");
        }
        if s.faults.full {
            return err(Code::NoSpc, "no space");
        }
        let at = &s.targets[&target].chunks.get(&r.chunk).cloned().unwrap_or_default();
        let known = at.writers.iter().find(|w| (w.session, w.seq) == (r.session, r.seq)).copied();
        let version = match known {
            Some(w) => {
                s.counts.known += 1;
                w.version
            }
            None => {
                if r.flags & FLAG_REPLAY != 0 {
                    let theirs = at.writers.last().is_some_and(|w| w.session != r.session);
                    if Self::take(&mut s.faults.overtaken) || (at.version > r.version && theirs) {
                        return err(Code::Overtaken, "overtaken");
                    }
                }
                s.counts.applied += 1;
                s.counts.granted += u64::from(r.flags & FLAG_GRANTED != 0);
                s.counts.round = r.round;
                let version = Version { epoch: chain.epoch, number: at.version.number + 1 };
                for t in chain.serving() {
                    let c = s.targets.get_mut(&t).unwrap().chunks.entry(r.chunk).or_default();
                    c.chain = r.chain;
                    c.change(r.kind, r.offset as usize, r.len as usize, &bytes);
                    c.version = version;
                    c.writers.push(Writer { session: r.session, seq: r.seq, version });
                    if c.writers.len() > KEPT_WRITERS {
                        c.writers.remove(0);
                    }
                }
                version
            }
        };
        let stable = r.flags & FLAG_STABLE != 0 || known.is_some();
        if stable {
            Self::flush_chain(s, &chain);
        }
        Ok(DataReply {
            stable,
            version,
            epoch: chain.epoch,
            boot_ids: Self::boot_ids(s, &chain),
            ..Default::default()
        })
    }

    fn flush_chain(s: &mut State, chain: &pb::Chain) {
        s.counts.flushes += 1;
        for t in chain.serving() {
            let t = s.targets.get_mut(&t).unwrap();
            t.flushed = t.chunks.clone();
        }
    }

    fn flush(&self, target: u32, r: &DataRequest) -> Result<DataReply> {
        let s = &mut *self.state.lock();
        self.check(s, r, target, Rights::WRITE, 0)?;
        let chain = s.map.chain(r.chain).unwrap().clone();
        if chain.head() != Some(target) {
            return err(Code::NotServing, "not the head");
        }
        Self::flush_chain(s, &chain);
        Ok(DataReply {
            stable: true,
            epoch: chain.epoch,
            boot_ids: Self::boot_ids(s, &chain),
            ..Default::default()
        })
    }

    /// Grants as much space as is wanted, or nothing.
    fn grant(&self, target: u32, r: &DataRequest) -> Result<DataReply> {
        let s = &*self.state.lock();
        self.check(s, r, target, Rights::WRITE, 0)?;
        if s.faults.no_grants {
            return Err(strake_fabric::unknown_opcode(opcode::GRANT));
        }
        Ok(DataReply {
            len: if s.faults.full { 0 } else { r.len },
            epoch: r.epoch,
            ..Default::default()
        })
    }

    fn extents(&self, target: u32, r: &DataRequest) -> Result<Message> {
        let s = &*self.state.lock();
        let of_reader = self.check(s, r, target, Rights::READ, 0);
        of_reader.or_else(|_| self.check(s, r, target, Rights::WRITE, 0))?;
        let chain = s.map.chain(r.chain).unwrap();
        if s.faults.dirty.contains(&target) && chain.tail() != Some(target) {
            return err(Code::NotServing, "dirty, ask the tail");
        }
        let (mut out, most) = (Extents::default(), r.len as usize);
        let last = ChunkId { index: u64::MAX, ..r.chunk };
        let of_chain =
            s.targets[&target].chunks.range(r.chunk..=last).filter(|(_, c)| c.chain == r.chain);
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
        let reply = DataReply { epoch: chain.epoch, ..Default::default() };
        Ok(Message::new(0, reply.encode()).with_payload(vec![Buf::copy_from(&out.encode())]))
    }

    fn read(&self, target: u32, r: &DataRequest) -> Result<Message> {
        let s = &mut *self.state.lock();
        self.check(s, r, target, Rights::READ, 0)?;
        *s.counts.reads.entry(target).or_default() += 1;
        let chain = s.map.chain(r.chain).unwrap();
        if s.faults.dirty.contains(&target) && chain.tail() != Some(target) {
            return err(Code::NotServing, "dirty, ask the tail");
        }
        let none = Chunk::default();
        let c = s.targets[&target].chunks.get(&r.chunk).unwrap_or(&none);
        let from = (r.offset as usize).min(c.bytes.len());
        let to = (r.offset as usize + r.len as usize).min(c.bytes.len());
        let mut bytes = c.bytes[from..to].to_vec();
        let sums = block_sums(u64::from(r.offset), [&bytes[..]]);
        if s.faults.corrupt.contains(&target) && !bytes.is_empty() {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }
        let reply = DataReply {
            version: c.version,
            epoch: chain.epoch,
            len: bytes.len() as u32,
            sums,
            ..Default::default()
        };
        let payload = if bytes.is_empty() { vec![] } else { vec![Buf::copy_from(&bytes)] };
        Ok(Message::new(0, reply.encode()).with_payload(payload))
    }
}

pub struct Front(pub Arc<Oss>, pub u32);

#[async_trait]
impl Service for Front {
    async fn handle(&self, _peer: &Peer, m: Message) -> Result<Message> {
        let r = DataRequest::decode(&m.body)?;
        {
            let f = &mut self.0.state.lock().faults;
            if Oss::take(&mut f.no_session) {
                return err(Code::NoSession, "evicted");
            }
            if Oss::take(&mut f.bad_cap) {
                return err(Code::BadCap, "expired");
            }
        }
        match m.opcode {
            opcode::READ => self.0.read(self.1, &r),
            opcode::EXTENTS => self.0.extents(self.1, &r),
            opcode::GRANT => Ok(Message::new(0, self.0.grant(self.1, &r)?.encode())),
            opcode::WRITE => {
                Ok(Message::new(0, self.0.write(self.1, r, m.payload).await?.encode()))
            }
            opcode::FLUSH => Ok(Message::new(0, self.0.flush(self.1, &r)?.encode())),
            o => Err(strake_fabric::unknown_opcode(o)),
        }
    }
}
