//! Incoming requests: checks rights and values, then passes them to a replica.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use prost::Message as _;
use strake_fabric::{Buf, Message, Peer, Role, Service, Turn, unknown_opcode};
use strake_links::{Relay, payloads};
use strake_proto::{
    Capability, ChunkId, Code, Error, Result, Rights, SessionId, TargetId,
    bound::Fits,
    checksum::{self, pieces},
    data::{
        DataReply, DataRequest, FLAG_GRANTED, FLAG_STABLE, FLAG_TOMBSTONE, Kind, ListEntry,
        MAX_EXTENTS,
    },
    layout::MAX_CHUNK,
    opcode, pb,
};
use strake_runtime::quiet::Quiet;
use tokio::time::Instant;

use super::{
    chain_member::ChainMember,
    links::{Forget, LIST_ONE, NO_CHUNK},
    node::{HEAVY, Node},
    replica::Replica,
    status::status,
    target::Target,
    trim::goes_on,
    update_request::UpdateRequest,
};
use crate::engine::{Ask, Key};

static REFUSED: Quiet = Quiet::new();

/// How long a client's request waits for its turn.
const TURN_WAIT: Duration = Duration::from_secs(2);
/// Most entries of a list in one answer.
const MAX_LIST: u32 = 4096;
const BLOCK: u32 = checksum::BLOCK as u32;

pub(super) struct OssService {
    pub node: Arc<Node>,
    pub relay: Arc<Relay>,
}

fn inval(m: impl Into<String>) -> Error {
    Error::new(Code::Inval, m)
}

/// Checks that offset, length, payload and checksums fit together and stay within a chunk.
fn check_shape(r: &DataRequest, payload: usize) -> Result<()> {
    if u64::from(r.offset) + u64::from(r.len) > MAX_CHUNK {
        return Err(inval(format!(
            "{} bytes at {} reach beyond a chunk of 16 MiB",
            r.len, r.offset
        )));
    }
    let carries = matches!(r.kind, Kind::Write | Kind::Replace);
    let (want, sums) = match r.kind {
        Kind::Write | Kind::Punch if r.len == 0 => {
            return Err(inval("a write must have at least one byte"));
        }
        Kind::Write | Kind::Replace => {
            (r.len as usize, pieces(u64::from(r.offset), r.len as usize))
        }
        _ => (0, 0),
    };
    if payload != want || r.sums.len() != sums {
        return Err(inval(format!(
            "{payload} bytes with {} checksums; expected {want} bytes with {sums}",
            r.sums.len()
        )));
    }
    if r.kind == Kind::Replace && r.offset != 0 {
        return Err(inval("a chunk is replaced as a whole"));
    }
    if r.flags & FLAG_GRANTED != 0 && (r.kind != Kind::Write || r.session == 0) {
        return Err(inval("only a session's write uses a grant"));
    }
    if carries && r.flags & FLAG_TOMBSTONE != 0 && r.len != 0 {
        return Err(inval("a tombstone has no bytes"));
    }
    Ok(())
}

/// Checks the damaged ranges of a SYNC_PUT: whole blocks of its chunk, in order.
fn check_damaged(r: &DataRequest) -> Result<()> {
    let mut at = 0;
    for d in &r.damaged {
        let to_border = d.end % BLOCK == 0 || d.end == r.len;
        if d.start < at || d.start % BLOCK != 0 || d.end <= d.start || d.end > r.len || !to_border {
            return Err(inval(format!(
                "bytes {d:?} cannot be the damaged part of a chunk of {}",
                r.len
            )));
        }
        at = d.end;
    }
    Ok(())
}

/// Whether only servers may send this.
fn is_server_only(op: u16) -> bool {
    matches!(
        op,
        opcode::TRIM
            | opcode::FORWARD
            | opcode::FORWARD_FLUSH
            | opcode::SYNC_LIST
            | opcode::SYNC_PUT
            | opcode::VOUCH
            | opcode::READ_COPY
            | opcode::LIST_CHUNKS
            | opcode::STATUS
    )
}

/// A reply with an encoded [`DataReply`] and a payload.
fn reply(r: &DataReply, payload: Vec<Buf>) -> Message {
    Message::new(0, r.encode()).with_payload(payload)
}

#[async_trait]
impl Service for OssService {
    async fn handle(&self, peer: &Peer, mut m: Message) -> Result<Message> {
        let server_only = is_server_only(m.opcode);
        if server_only && peer.role != Role::Server {
            REFUSED.warn(|| {
                format!("{} sent {:#06x}, which only servers may send", peer.addr, m.opcode)
            });
            return Err(Error::new(
                Code::Access,
                "only servers of this cluster may send this request",
            ));
        }
        let ctx = &self.node.ctx;
        match m.opcode {
            opcode::RELAY => {
                let (map, own) = (ctx.map.load_full(), ctx.id());
                let others = |to| map.node(to).filter(|_| to != own).map(|n| n.endpoints.clone());
                return self.relay.handle(peer, m, others).await;
            }
            opcode::ECHO => {
                let answer = Message::new(opcode::ECHO, m.body).with_payload(m.payload);
                return Ok(payloads::answer(opcode::ECHO, answer));
            }
            opcode::STATUS => {
                let request =
                    pb::StatusRequest::decode(m.body).map_err(|e| inval(e.to_string()))?;
                let mut s = status(&self.node);
                s.map = s.map.filter(|_| !request.brief);
                return Ok(Message::new(m.opcode, s.encode_to_vec()));
            }
            opcode::CLOCK => {
                let clock = ctx.clock().ok_or_else(|| unknown_opcode(m.opcode))?;
                return Ok(Message::new(m.opcode, clock.encode()));
            }
            opcode::READ | opcode::WRITE | opcode::FLUSH | opcode::EXTENTS | opcode::GRANT => {}
            _ if server_only => {}
            other => return Err(unknown_opcode(other)),
        }
        // A waiting request does not keep the memory of a long body.
        let r = DataRequest::decode(&std::mem::take(&mut m.body))?;
        if !r.damaged.is_empty() && m.opcode != opcode::SYNC_PUT {
            return Err(inval("only a resynced chunk may have damaged parts"));
        }
        let op = m.opcode;
        let answer = match op {
            opcode::LIST_CHUNKS => self.list_chunks(&r),
            opcode::READ_COPY => self.read_copy(&r).await,
            _ => self.of_replica(peer, r, m).await,
        }?;
        Ok(payloads::answer(op, answer))
    }

    fn answer_len(&self, m: &Message) -> usize {
        payloads::answer_len(m.opcode, &m.body)
    }

    fn disconnected(&self, peer: &Peer) {
        self.relay.disconnected(peer);
    }
}

impl OssService {
    /// Requests to one replica of a chain.
    async fn of_replica(&self, peer: &Peer, r: DataRequest, m: Message) -> Result<Message> {
        // Servers need no capability.
        let cap = match peer.role {
            Role::Client => Some(self.open_cap(&r)?),
            Role::Server => None,
        };
        // Waits before any check whose result may change meanwhile. Servers do not wait for a turn:
        // the turns of clients limit their requests, too.
        let _turn = match &cap {
            Some(cap) => {
                let bytes = if m.opcode == opcode::READ { r.len as usize } else { m.payload_len() };
                let turn = self.turn(peer, cap.session, bytes).await?;
                cap.check_expiry(self.node.ctx.env.unix_ms())?;
                Some(turn)
            }
            None => {
                if m.opcode == opcode::FORWARD {
                    self.node.turns.note(r.session);
                }
                None
            }
        };
        self.node.lease.check()?;
        let member = self.node.replicas.get(r.target, r.chain)?;
        let for_client = cap.is_some() || m.opcode == opcode::FORWARD && r.session != 0;
        let _awaited = for_client.then(|| member.replica.target.foreground.begin());
        if m.payload_len() > 0
            && !matches!(m.opcode, opcode::WRITE | opcode::FORWARD | opcode::SYNC_PUT)
        {
            return Err(inval("this request has no payload"));
        }
        let replica = &member.replica;
        match m.opcode {
            opcode::READ => self.read(cap, &member, r).await,
            opcode::EXTENTS => self.extents(cap, replica, &r),
            opcode::GRANT => self.grant(cap, replica, &r),
            opcode::FLUSH => self.flush(cap, replica, &r).await,
            opcode::WRITE | opcode::FORWARD | opcode::SYNC_PUT => {
                self.update(cap, &member, r, m).await
            }
            opcode::TRIM => Ok(reply(&member.trims.trim(&r, m.trace).await?, Vec::new())),
            opcode::FORWARD_FLUSH => forward_flush(&member, &r).await,
            opcode::SYNC_LIST => sync_list(replica, &r),
            opcode::VOUCH => Ok(reply(&member.vouching.vouch(&r).await?, Vec::new())),
            other => Err(unknown_opcode(other)),
        }
    }

    /// Requests that bring bytes or change a chunk.
    async fn update(
        &self,
        cap: Option<Capability>,
        member: &ChainMember,
        r: DataRequest,
        m: Message,
    ) -> Result<Message> {
        // Taken before the check whether its session is evicted.
        let in_work = (m.opcode != opcode::SYNC_PUT && r.session != 0)
            .then(|| self.node.revocations.in_work(r.session));
        let bytes = m.payload_len();
        let update = |request| UpdateRequest {
            request,
            payload: m.payload,
            trace: m.trace,
            _in_work: in_work,
        };
        let done = match m.opcode {
            opcode::WRITE => {
                self.check_write(cap, &r, bytes)?;
                let stable = r.flags & FLAG_STABLE != 0;
                self.check_copies(&member.replica)?;
                let done = member.updates.update(update(r), stable).await?;
                self.check_copies(&member.replica)?;
                done
            }
            opcode::FORWARD => {
                check_shape(&r, bytes)?;
                member.updates.forwarded(update(r)).await?
            }
            _ => {
                check_shape(&r, bytes)?;
                if r.kind != Kind::Replace {
                    return Err(inval("SYNC_PUT replaces a chunk"));
                }
                check_damaged(&r)?;
                member.resync.put(update(r)).await?
            }
        };
        Ok(reply(&done, Vec::new()))
    }

    /// Waits for the turn of a client's session. Large requests wait among themselves first.
    async fn turn(
        &self,
        peer: &Peer,
        session: SessionId,
        bytes: usize,
    ) -> Result<(Option<Turn>, Turn)> {
        let turns = &self.node.turns;
        turns.note(session);
        let bulk = match bytes / HEAVY {
            0 => None,
            weight => Some(turns.bulk.take(&peer.addr, session, weight, TURN_WAIT).await?),
        };
        Ok((bulk, turns.clients.take(&peer.addr, session, 1, TURN_WAIT).await?))
    }

    /// The request's capability, as this cluster's metadata servers gave it. It also says whose turn
    /// the request takes: a client may not use another's.
    fn open_cap(&self, r: &DataRequest) -> Result<Capability> {
        let sealed = r
            .cap
            .as_ref()
            .ok_or_else(|| Error::new(Code::BadCap, "request without a capability"))?;
        self.node.cap_key.open(sealed, self.node.ctx.env.unix_ms())
    }

    /// Checks a client's right to do this to this file; `None`: a server, which needs none. `any`:
    /// one of these rights is enough. `index`: the chunk's index, if the request is about one chunk;
    /// otherwise it is about any of the file's chunks on the chain.
    fn check_cap(
        &self,
        cap: Option<&Capability>,
        r: &DataRequest,
        any: &[Rights],
        index: Option<u64>,
    ) -> Result<()> {
        let Some(c) = cap else { return Ok(()) };
        let bad = |m: &str| Error::new(Code::BadCap, m);
        if c.ino != r.chunk.ino || c.data != r.chunk.data {
            return Err(bad("capability is for another file"));
        }
        if !any.iter().any(|need| c.rights.has(*need)) {
            return Err(bad("capability does not give this right"));
        }
        self.check_bound(c, r, index)?;
        let revocations = &self.node.revocations;
        revocations.check_session(c.session, c.session_epoch)?;
        let left = revocations.rights_left(c);
        if !any.iter().any(|need| left.has(*need)) {
            return Err(bad("what the capability gave a right to has ended; open the file again"));
        }
        Ok(())
    }

    /// Chunks may be only where the file's layout puts them: elsewhere nothing would remove them.
    fn check_bound(&self, c: &Capability, r: &DataRequest, index: Option<u64>) -> Result<()> {
        match c.bound.fits(r.chain, index, &self.node.ctx.map.load()) {
            Fits::Yes => Ok(()),
            Fits::No => {
                REFUSED.warn(|| {
                    format!("session {:x} asked for {} on chain {}", c.session, r.chunk, r.chain)
                });
                let m = format!(
                    "chunk {} does not belong on chain {} by its file's layout",
                    r.chunk, r.chain
                );
                Err(Error::new(Code::BadCap, m))
            }
            Fits::Unknown => {
                self.node.ctx.kick.notify_one();
                let m = format!(
                    "storage server '{}' does not have this chain set in its map yet",
                    self.node.ctx.cfg.name
                );
                Err(Error::new(Code::NotServing, m))
            }
        }
    }

    fn check_write(&self, cap: Option<Capability>, r: &DataRequest, payload: usize) -> Result<()> {
        let need = match r.kind {
            Kind::Write | Kind::Punch => Rights::WRITE,
            Kind::Truncate | Kind::Remove => Rights::TRIM,
            Kind::None | Kind::Replace => {
                return Err(inval("WRITE must write, punch, truncate or remove"));
            }
        };
        check_shape(r, payload)?;
        self.check_cap(cap.as_ref(), r, &[need], Some(r.chunk.index))?;
        if cap.is_some_and(|c| c.session != r.session || r.session == 0) {
            return Err(Error::new(Code::BadCap, "capability belongs to another session"));
        }
        Ok(())
    }

    /// Whether a client may take data as written: not while fewer replicas are in sync than the
    /// cluster's `min_copies`. Checked before and after the work, as the chain may lose a replica
    /// meanwhile. A replica that came into sync since has the data, too.
    fn check_copies(&self, replica: &Replica) -> Result<()> {
        let map = self.node.ctx.map.load();
        let copies = map.chain(replica.chain).map_or(0, |c| c.preferred.len());
        let least = copies.min(map.map.min_copies as usize);
        let in_sync = replica.view().serving.len();
        if in_sync >= least {
            return Ok(());
        }
        let m = format!(
            "chain {} has {in_sync} of the {least} copies in sync that writes need (min_copies)",
            replica.chain
        );
        Err(Error::new(Code::NotServing, m))
    }

    async fn read(
        &self,
        cap: Option<Capability>,
        member: &ChainMember,
        r: DataRequest,
    ) -> Result<Message> {
        let (replica, from_server) = (&member.replica, cap.is_none());
        self.check_cap(cap.as_ref(), &r, &[Rights::READ], Some(r.chunk.index))?;
        if u64::from(r.offset) + u64::from(r.len) > MAX_CHUNK {
            return Err(inval(format!(
                "{} bytes at {} reach beyond a chunk of 16 MiB",
                r.len, r.offset
            )));
        }
        // A replica that repairs its copy knows which version it needs, and checks that it gets it.
        let even_dirty = from_server && r.kind == Kind::Replace;
        match replica.check_read(&r.chunk, r.epoch) {
            Err(_) if even_dirty && replica.view().serving() => replica.check_member(r.epoch)?,
            other => self.check_read(replica, r.epoch, other)?,
        }
        let key = replica.key(r.chunk);
        let mut out = replica.engine().read_in_limit(&key, r.offset, r.len).await;
        // A replica that repairs must not make others repair: two damaged copies would wait for
        // each other.
        if !from_server && matches!(&out, Err(e) if e.code == Code::Corrupt) {
            let repaired = member.repair.repair_for_read(r.chunk, r.offset..r.offset + r.len).await;
            // Read again even if some part has no good copy: this read may not need it.
            out = replica.engine().read_in_limit(&key, r.offset, r.len).await;
            if matches!(&out, Err(e) if e.code == Code::Corrupt) {
                out = repaired.and(out).map_err(|e| member.repair.told_damaged(r.chunk, e));
            }
        }
        if let Err(e) = &out {
            replica.target.note(e);
        }
        let out = out?;
        let head = DataReply {
            version: out.version,
            epoch: r.epoch,
            len: out.len,
            sums: out.sums,
            boot_ids: vec![replica.boot_id()],
            ..DataReply::default()
        };
        Ok(reply(&head, out.data))
    }

    /// Where the file's chunks hold data, for clients that may read or write them.
    fn extents(
        &self,
        cap: Option<Capability>,
        replica: &Replica,
        r: &DataRequest,
    ) -> Result<Message> {
        self.check_cap(cap.as_ref(), r, &[Rights::READ, Rights::WRITE], None)?;
        if u64::from(r.offset) > MAX_CHUNK || r.chunk.index == u64::MAX {
            return Err(inval(format!("extents from {} of chunk {} on", r.offset, r.chunk)));
        }
        self.check_read(replica, r.epoch, replica.check_read_from(&r.chunk, r.epoch))?;
        let (from, most) = ((r.chunk.index, r.offset), (r.len as usize).min(MAX_EXTENTS));
        let found = replica.engine().extents(replica.chain, r.chunk.ino, r.chunk.data, from, most);
        if let Err(e) = &found {
            replica.target.note(e);
        }
        let head =
            DataReply { epoch: r.epoch, boot_ids: vec![replica.boot_id()], ..DataReply::default() };
        Ok(reply(&head, vec![Buf::copy_from(&found?.encode())]))
    }

    /// Keeps space free for the session of the capability.
    fn grant(
        &self,
        cap: Option<Capability>,
        replica: &Replica,
        r: &DataRequest,
    ) -> Result<Message> {
        self.check_cap(cap.as_ref(), r, &[Rights::WRITE], None)?;
        let c = cap.filter(|c| c.session == r.session && r.session != 0);
        let c =
            c.ok_or_else(|| Error::new(Code::BadCap, "capability belongs to another session"))?;
        replica.check_member(r.epoch)?;
        let now = self.node.ctx.env.boot();
        let ask = Ask {
            session: c.session,
            seq: r.seq,
            keep: u64::from(r.offset),
            want: u64::from(r.len),
        };
        let units = replica.engine().grant(now, ask)?;
        let head = DataReply { epoch: r.epoch, len: units as u32, ..DataReply::default() };
        Ok(reply(&head, Vec::new()))
    }

    /// If a reader knows a newer epoch, this server fetches the map.
    fn check_read(&self, replica: &Replica, epoch: u64, may: Result<()>) -> Result<()> {
        may.inspect_err(|e| {
            if e.code == Code::StaleEpoch && epoch > replica.view().epoch {
                self.node.ctx.kick.notify_one();
            }
        })
    }

    async fn flush(
        &self,
        cap: Option<Capability>,
        replica: &Replica,
        r: &DataRequest,
    ) -> Result<Message> {
        // Only a client that may write to a file has something to flush; `chunk` names one of its
        // chunks.
        self.check_cap(cap.as_ref(), r, &[Rights::WRITE], None)?;
        let view = replica.view();
        if view.epoch == r.epoch && !view.head {
            return Err(Error::new(
                Code::NotServing,
                format!("chain {} is flushed at its head; this is not its head", r.chain),
            ));
        }
        if let Some(cap) = cap.filter(|_| r.round != 0) {
            replica.heard_round(r.epoch, cap.session, r.round)?;
        }
        let boot_ids = replica.flush_chain(r.epoch).await?;
        self.check_copies(replica)?;
        Ok(reply(
            &DataReply { stable: true, epoch: r.epoch, boot_ids, ..DataReply::default() },
            Vec::new(),
        ))
    }

    /// Returns a target's data, in sync or not, to a replica that has lost something. Repairs
    /// nothing.
    async fn read_copy(&self, r: &DataRequest) -> Result<Message> {
        if u64::from(r.offset) + u64::from(r.len) > MAX_CHUNK {
            return Err(inval(format!(
                "{} bytes at {} reach beyond a chunk of 16 MiB",
                r.len, r.offset
            )));
        }
        let target = self.target(r.target)?;
        let key = Key { chain: r.chain, chunk: r.chunk };
        let out = target
            .engine
            .read_in_limit(&key, r.offset, r.len)
            .await
            .inspect_err(|e| target.note(e))?;
        let head = DataReply {
            version: out.version,
            epoch: r.epoch,
            len: out.len,
            sums: out.sums,
            ..DataReply::default()
        };
        Ok(reply(&head, out.data))
    }

    fn target(&self, id: TargetId) -> Result<Arc<Target>> {
        let none = || {
            Error::new(
                Code::NoEnt,
                format!("storage server '{}' has no target {id}", self.node.ctx.cfg.name),
            )
        };
        self.node.targets.get(id).ok_or_else(none)
    }

    /// For fsck: lists the chunks of a target, in sync or not.
    fn list_chunks(&self, r: &DataRequest) -> Result<Message> {
        let entries = self.target(r.target)?.engine.list(
            r.chain,
            after(r.chunk),
            r.len.clamp(1, MAX_LIST) as usize,
        )?;
        list_reply(r, &entries)
    }
}

/// Chunk 0.0.0 stands for the start of the list.
fn after(c: ChunkId) -> Option<ChunkId> {
    (c != NO_CHUNK).then_some(c)
}

fn list_reply(r: &DataRequest, entries: &[ListEntry]) -> Result<Message> {
    let head = DataReply { epoch: r.epoch, len: entries.len() as u32, ..DataReply::default() };
    let payload = if entries.is_empty() {
        Vec::new()
    } else {
        vec![Buf::copy_from(&ListEntry::encode_all(entries))]
    };
    Ok(reply(&head, payload))
}

async fn forward_flush(member: &ChainMember, r: &DataRequest) -> Result<Message> {
    let replica = &member.replica;
    replica.check_member(r.epoch)?;
    replica.heard_predecessor(r.epoch);
    let (boot_ids, next) = match Forget::of(r) {
        Some(forget) => member.trims.forget_chain(r.epoch, forget).await?,
        None => (replica.flush_chain(r.epoch).await?, None),
    };
    Ok(reply(&DataReply { stable: true, boot_ids, ..goes_on(r.epoch, next) }, Vec::new()))
}

fn sync_list(replica: &Replica, r: &DataRequest) -> Result<Message> {
    replica.check_member(r.epoch)?;
    let entries = if r.offset == LIST_ONE {
        let entry =
            |version, len, tombstone| vec![ListEntry { chunk: r.chunk, version, len, tombstone }];
        match replica.engine().meta(&replica.key(r.chunk)) {
            Ok(None) => Vec::new(),
            Ok(Some(m)) => entry(m.version, m.len, m.tombstone),
            // A damaged record: listed as the engine lists it.
            Err(e) if e.code == Code::Corrupt => entry(Default::default(), 0, false),
            Err(e) => return Err(e),
        }
    } else {
        if !replica.target.resync_sources.admits(replica.chain, Instant::now()) {
            let m = format!(
                "target {} is being resynced for other chains; it is chain {}'s turn later",
                replica.id, replica.chain
            );
            return Err(Error::new(Code::Overloaded, m));
        }
        replica.engine().list(replica.chain, after(r.chunk), r.len.clamp(1, MAX_LIST) as usize)?
    };
    list_reply(r, &entries)
}
