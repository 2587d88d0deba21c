//! Striped reads and writes: one request per piece of a chunk, in parallel, each repeated through failures.
//!
//! A write goes to the head of its chain and keeps its number through every retry, so that it is applied once. A read
//! goes to a replica of the reader's choice and is checked against the checksums in its reply.

pub(crate) mod buffers;
pub(crate) mod clocks;
pub(crate) mod connections;
pub(crate) mod holes;
pub(crate) mod rdma_connections;
pub(crate) mod relays;
pub(crate) mod route;

pub(crate) mod foreign;
pub(crate) mod replica_attempts;

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use strake_fabric::{Buf, ByRoad, Connection, Message, Road};
use strake_proto::{
    ChainId, ChunkId, Code, Error, Result, SessionId, TargetId,
    checksum::{block_sums, verify},
    data::{DataReply, DataRequest, FLAG_STABLE, Kind, Version},
    layout::Piece,
    map::{ChainExt, MapView},
    opcode, pb,
};

use self::replica_attempts::{Retry, Round, Way};
use crate::{
    config::Counters,
    core::{Core, Hold, room_for},
    data::buffers::Content,
    data::clocks::Copies,
    handover::{self, KeptWrite},
    inode::{Cap, Inode, UpdateAt},
    metadata::session::Session,
    shared::Attempts,
    shared::retry::{DataVerdict, data_verdict, in_doubt},
    shared::unreachable::Kind as Server,
    write::unstable::Entry,
};

/// One attempt at a request. A server that died is noticed by the transport and by the map much earlier.
const DATA_TRY: Duration = Duration::from_secs(10);
/// Copies of a write sent after its bytes arrived changed, before that is an error.
const MAX_RESENDS: u32 = 8;
/// Times all replicas may answer with bad bytes before the reader is told.
const MAX_CORRUPT_ROUNDS: u32 = 2;

/// Something to ask a replica of a chain, and how to read its answer.
pub(crate) struct Question<'a, T> {
    pub opcode: u16,
    pub chain: ChainId,
    /// Chunk, offset and length; the rest is filled in.
    pub request: DataRequest,
    /// `Corrupt`: another replica may do better.
    pub read: &'a (dyn Fn(TargetId, DataReply, Vec<Buf>) -> Result<T> + Sync),
}

/// An update that is under way. Dropped without having been settled it is given up, and may be on its way yet.
struct UnderWay<'a> {
    core: &'a Core,
    inode: &'a Inode,
    at: UpdateAt,
    session: u64,
    settled: bool,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if let Some(s) = self.core.session_of(self.session).filter(|_| !self.settled) {
            let (chain, chunk) = self.at;
            self.inode.given_up.lock().insert(chain, (chunk, s.next_round()));
        }
    }
}

/// One update of one chunk on its way.
pub(crate) struct Update<'a> {
    pub inode: &'a Inode,
    pub chain: ChainId,
    pub chunk: ChunkId,
    pub offset: u32,
    pub data: Content,
    pub session: u64,
    pub seq: u64,
    pub flags: u8,
    pub version: Version,
    /// That servers may take yet.
    pub copies: Copies,
}

fn not_serving(m: String) -> Error {
    Error::new(Code::NotServing, m)
}

pub(crate) fn chain_of(map: &MapView, id: ChainId) -> Result<&pb::Chain> {
    map.chain(id).ok_or_else(|| not_serving(format!("chain {id} is not in the cluster map")))
}

pub(crate) fn node_of(map: &MapView, target: TargetId) -> Result<&pb::Node> {
    map.node_of(target).ok_or_else(|| not_serving(format!("target {target} has no node")))
}

impl Core {
    pub(crate) async fn connection_to(&self, map: &MapView, target: TargetId) -> Result<Arc<dyn Connection>> {
        let node = node_of(map, target)?;
        self.connections.get(&self.shared.fabric, node).await
    }

    /// One request, and what it says of the server that it went to.
    async fn data_call(
        &self,
        map: &MapView,
        chain: &pb::Chain,
        target: TargetId,
        m: Message,
        way: Way<'_>,
    ) -> Result<Message> {
        let node = node_of(map, target)?;
        let reply = self.data_call_once(chain, node, m, way).await;
        match &reply {
            Err(e) if matches!(e.code, Code::Disconnected | Code::TimedOut) => {
                self.shared.failed(Server::Storage, &node.name, e);
                self.clocks.forget(node.id);
            }
            // The map changed: it says nothing.
            Err(e) if e.code == Code::StaleEpoch => {}
            _ => self.shared.answered(Server::Storage, &node.name),
        }
        reply
    }

    /// A chain without any replica that may answer waits for the servers of all of them.
    pub(crate) fn deserted(&self, map: &MapView, chain: &pb::Chain) -> Error {
        if chain.lost {
            let m = format!("the last copies were on targets that an administrator gave up (chain {})", chain.id);
            return Error::new(Code::Io, m);
        }
        let e = not_serving(format!("chain {} has no replica in sync", chain.id));
        self.wait_for_absent(map, chain, &e);
        e
    }

    /// For people: who is waited for.
    fn wait_for_absent(&self, map: &MapView, chain: &pb::Chain, e: &Error) {
        let absent = chain.replicas.iter().filter(|r| r.state() != pb::ReplicaState::ReplicaServing);
        for node in absent.filter_map(|r| map.node_of(r.target)) {
            self.shared.failed(Server::Storage, &node.name, e);
        }
    }

    /// One request. Ends early when the chain changes meanwhile: the addressed replica may never answer.
    async fn data_call_once(&self, chain: &pb::Chain, node: &pb::Node, m: Message, way: Way<'_>) -> Result<Message> {
        let mut changed = self.shared.map_changes();
        let is_old = || self.shared.map().chain(chain.id).is_none_or(|c| c.epoch != chain.epoch);
        let conn = match way {
            Way::Shared(_) => self.connections.get(&self.shared.fabric, node).await?,
            Way::Lane(_) => self.rdma_connections.get(&self.shared.fabric, node, &self.connections).await?,
        };
        if is_old() {
            return Err(Error::new(Code::StaleEpoch, format!("chain {} changed", chain.id)));
        }
        Counters::add(&self.shared.stats.data_requests, 1);
        Counters::add(&self.shared.stats.data_reads, u64::from(m.opcode == opcode::READ));
        Counters::add(&self.shared.stats.data_writes, u64::from(m.opcode == opcode::WRITE));
        way.hands(1);
        let call = conn.call(m, DATA_TRY);
        tokio::pin!(call);
        loop {
            tokio::select! {
                biased;
                r = &mut call => {
                    // Memory that cannot be lent: nothing was sent.
                    if r.as_ref().is_err_and(|e| e.code == Code::OpNotSupp) {
                        way.hands(-1);
                    }
                    return r;
                }
                _ = changed.changed() => {
                    if is_old() {
                        return Err(Error::new(Code::StaleEpoch, format!("chain {} changed under a request", chain.id)));
                    }
                }
            }
        }
    }

    /// Sends an update or a flush to the head of a chain, which is returned with the answer and the road that the bytes took. `handed` counts what
    /// it may have had.
    pub(crate) async fn to_head(
        &self,
        map: &MapView,
        chain: ChainId,
        m: Message,
        r: DataRequest,
        handed: Option<&AtomicI64>,
    ) -> Result<(TargetId, DataReply, Road)> {
        let chain = chain_of(map, chain)?;
        let head = chain.head().ok_or_else(|| self.deserted(map, chain))?;
        let body = DataRequest { chain: chain.id, epoch: chain.epoch, target: head, ..r }.encode();
        let reply = self.data_call(map, chain, head, Message { body, ..m }, Way::Shared(handed)).await?;
        Ok((head, DataReply::decode(&reply.body)?, reply.went))
    }

    /// The pause after a failed attempt, with a new map if that may help.
    pub(crate) async fn refresh_and_pause(self: &Arc<Self>, map: &MapView, at: &mut Attempts, e: Error) -> Result<()> {
        if e.code != Code::Overloaded {
            self.metadata.refresh_map(map.version()).await;
        }
        at.pause(&self.shared, e).await
    }

    /// An oss does not know the session: asks the metadata servers, who decide.
    pub(crate) async fn verify_session(self: &Arc<Self>) {
        if let Some(s) = self.metadata.current_session() {
            self.metadata.clone().renew().await;
            if self.metadata.current_session().is_some_and(|n| n.id == s.id) {
                tracing::debug!(session = s.id, "an oss refused the session that the metadata servers still know");
            }
        }
    }

    fn session_of(&self, id: SessionId) -> Option<Arc<Session>> {
        self.metadata.current_session().filter(|s| s.id == id)
    }

    pub(crate) fn round_of(&self, session: SessionId) -> u64 {
        self.session_of(session).map_or(0, |s| s.round())
    }

    /// An attempt at an update ended so: where a copy may be on its way yet, the next one is made in another round than this one was.
    fn attempted(&self, session: SessionId, round: u64, handed: bool, e: &Error) {
        if let Some(s) = self.session_of(session).filter(|_| handed && in_doubt(e)) {
            s.leave_round(round);
        }
    }

    /// One update, repeated with the same number until it is answered. Where it is given up, a new round begins, and no copy of it is
    /// made any more when this returns.
    pub(crate) async fn update(self: &Arc<Self>, u: &mut Update<'_>, at: &mut Attempts) -> Result<DataReply> {
        let (inode, at_chunk, session) = (u.inode, (u.chain, u.chunk), u.session);
        let mut under_way = UnderWay { core: self, inode, at: at_chunk, session, settled: false };
        let r = self.repeat_update(u, at).await;
        under_way.settled = match &r {
            Ok(_) => true,
            // Its head remembers what it refused for good.
            Err(e) => !e.is_retryable() && !at.in_doubt,
        };
        if !under_way.settled {
            drop(under_way);
            self.outlive(inode, at_chunk, session, u.copies).await;
        }
        r
    }

    async fn repeat_update(self: &Arc<Self>, u: &mut Update<'_>, at: &mut Attempts) -> Result<DataReply> {
        let mut resends = 0;
        let mut retry = Retry::begin(self, u.inode, true, 0).await?;
        let sums_of = |u: &Update| block_sums(u64::from(u.offset), u.data.bytes().iter().map(|b| &b[..]));
        let mut sums = sums_of(u);
        loop {
            if retry.cap.session != u.session {
                return Err(session_lost());
            }
            let map = self.shared.map();
            let e = match self.try_update(&map, &mut *u, &retry.cap, &sums).await {
                Ok(r) => return Ok(r),
                Err(e) => e,
            };
            if data_verdict(&e) != DataVerdict::Resend || resends == MAX_RESENDS {
                retry.after(&map, at, e).await?;
                continue;
            }
            // Somebody changes the caller's memory, or a link is bad: from now on send what nobody can change.
            resends += 1;
            Counters::add(&self.shared.stats.resends, 1);
            if let Content::Bytes(b) = &mut u.data {
                *b = vec![buffers::copy(self.shared.fabric.pool(), b)];
            }
            sums = sums_of(u);
            if resends > 1 {
                at.pause(&self.shared, e).await?;
            }
        }
    }

    async fn try_update(
        self: &Arc<Self>,
        map: &MapView,
        u: &mut Update<'_>,
        cap: &Cap,
        sums: &[u32],
    ) -> Result<DataReply> {
        let _slot = self.pieces.acquire().await.map_err(|_| shut_down())?;
        let (node, heard) = self.clock_of_head(map, u.chain).await?;
        let round = self.round_of(u.session);
        let request = DataRequest {
            kind: if matches!(u.data, Content::Bytes(_)) { Kind::Write } else { Kind::Punch },
            flags: u.flags,
            offset: u.offset,
            len: u.data.span() as u32,
            session: u.session,
            seq: u.seq,
            version: u.version,
            cap: Some(cap.bytes),
            round,
            heard: heard.says(),
            sums: sums.to_vec(),
            ..DataRequest::new(u.chain, 0, 0, u.chunk)
        };
        let m = Message::new(opcode::WRITE, Vec::new()).with_payload(u.data.bytes().to_vec());
        let (handed, before) = (AtomicI64::new(0), u.copies);
        u.copies.sends(&heard);
        let sent = self.to_head(map, u.chain, m, request, Some(&handed)).await;
        let sent = sent.inspect_err(|e| self.attempted(u.session, round, handed.load(Relaxed) > 0, e));
        if handed.load(Relaxed) == 0 || sent.as_ref().map_or_else(is_answer, |_| true) {
            u.copies = before;
        }
        let (_, reply, road) = sent.map_err(|e| self.knows_no_clock(node, &heard, e))?;
        for b in u.data.bytes() {
            b.sent_by(road);
            u.inode.sent.add(ByRoad::of(road, b.len() as u64));
        }
        Ok(reply)
    }

    // --- writes ---

    /// Puts bytes on their replicas. The caller holds the range's lock. `stable`: on disk, not only in memory. `only`: in no other
    /// session; see [`Core::data_numbers`].
    pub(crate) async fn write_range(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        offset: u64,
        data: &[Buf],
        (stable, only): (bool, Option<SessionId>),
        mut room: Option<tokio::sync::OwnedSemaphorePermit>,
    ) -> (SessionId, u64, Result<()>) {
        let stripes = inode.placed().stripes;
        let len = buffers::total(data) as u64;
        let (session, first) = match self.data_numbers(inode, stripes.split(offset, len).count() as u64, only).await {
            Ok(n) => n,
            Err(e) => return (0, 0, Err(e)),
        };
        let flags = if stable { FLAG_STABLE } else { 0 };
        let writes = stripes.split(offset, len).zip(first..).map(|(p, seq)| {
            let part = buffers::cut(data, (p.file_offset - offset) as usize, p.len as usize);
            let share = room.as_mut().and_then(|r| {
                let n = (room_for(p.len as usize) as usize).min(r.num_permits());
                r.split(n)
            });
            self.write_piece(inode, p, Content::Bytes(part), flags, (session, seq), share)
        });
        let writes: Vec<_> = writes.collect();
        let mut done = 0;
        let mut first_error = None;
        for (p, r) in stripes.split(offset, len).zip(join_all(writes).await) {
            match r {
                Ok(()) if first_error.is_none() => done += u64::from(p.len),
                Ok(()) => {}
                Err(e) => first_error = first_error.or(Some(e)),
            }
        }
        Counters::add(&self.shared.stats.written_bytes, done);
        (session, done, first_error.map_or(Ok(()), Err))
    }

    /// Numbers for the pieces of one write: the present session, and the first of them. `NoSession` if that is another one than `only`.
    pub(crate) async fn data_numbers(
        self: &Arc<Self>,
        inode: &Inode,
        n: u64,
        only: Option<SessionId>,
    ) -> Result<(SessionId, u64)> {
        let lost = || Error::new(Code::NoSession, "the session was lost before a write");
        let is_other = |id: SessionId| only.is_some_and(|only| only != id);
        // Before a capability is asked for in another one.
        if is_other(self.metadata.current_session().map_or(0, |s| s.id)) {
            return Err(lost());
        }
        let cap = self.capability(inode, true, None).await?;
        if is_other(cap.session) {
            return Err(lost());
        }
        let gone = || if only.is_some() { lost() } else { session_lost() };
        let session = self.metadata.current_session().filter(|s| s.id == cap.session).ok_or_else(gone)?;
        let take = || session.take_data_numbers(n);
        let first = match handover::numbers() {
            Some(numbers) => numbers.data(session.id, take),
            None => take(),
        };
        Ok((session.id, first))
    }

    pub(crate) async fn write_piece(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        p: Piece,
        data: Content,
        flags: u8,
        (session, seq): (SessionId, u64),
        room: Option<tokio::sync::OwnedSemaphorePermit>,
    ) -> Result<()> {
        let mut at = self.shared.attempts("write");
        let mut u = Update {
            inode,
            chain: p.chain,
            chunk: p.chunk,
            offset: p.offset,
            data,
            session,
            seq,
            flags,
            version: Version::default(),
            copies: Copies::default(),
        };
        let r = self.update(&mut u, &mut at).await?;
        let data = u.data;
        self.keep_unstable(p, data, (session, seq), &r, inode, room)
    }

    /// Makes an unstable write outlive this process.
    pub(crate) fn keep_write(&self, chain: ChainId, order: u64, entry: &mut Entry<Hold>) {
        if let Some(k) = &self.shared.cfg.handover {
            entry.kept = k.put_write(order, &KeptWrite::of(chain, entry));
        }
    }

    fn keep_unstable(
        &self,
        p: Piece,
        data: Content,
        (session, seq): (u64, u64),
        r: &DataReply,
        inode: &Arc<Inode>,
        room: Option<tokio::sync::OwnedSemaphorePermit>,
    ) -> Result<()> {
        let mut unstable = self.unstable.lock();
        if r.stable && !unstable.overlaps(p.chain, p.chunk, p.offset, u64::from(p.len)) {
            return Ok(());
        }
        if self.metadata.current_session().is_none_or(|s| s.id != session) {
            // It would never be replayed under its number.
            return Err(session_lost());
        }
        let mut entry = Entry {
            kept: None,
            chunk: p.chunk,
            offset: p.offset,
            file_offset: p.file_offset,
            data,
            session,
            seq,
            version: r.version,
            stamps: r.stamps.clone(),
            at_ms: self.shared.env.boot().as_millis() as u64,
            tag: Arc::new(Hold { inode: inode.clone(), _room: room }),
        };
        self.keep_write(p.chain, unstable.mark(), &mut entry);
        unstable.add(p.chain, entry);
        Ok(())
    }

    // --- reads ---

    /// Bytes of a range that lies below the file's size; holes as zeros.
    pub(crate) async fn read_range(self: &Arc<Self>, inode: &Inode, range: Range<u64>) -> Result<Vec<Buf>> {
        let stripes = inode.placed().stripes;
        let reads = stripes.split(range.start, range.end - range.start).map(|p| self.read_piece(inode, p));
        let reads: Vec<_> = reads.collect();
        let mut out = Vec::new();
        for r in join_all(reads).await {
            out.extend(r?);
        }
        Ok(out)
    }

    async fn read_piece(self: &Arc<Self>, inode: &Inode, p: Piece) -> Result<Vec<Buf>> {
        let read = |target, r: DataReply, payload: Vec<Buf>| {
            let bad = |what: &str| {
                Counters::add(&self.shared.stats.corrupt_replies, 1);
                Error::new(Code::Corrupt, format!("chunk {} from target {target}: {what}", p.chunk))
            };
            if r.len > p.len || buffers::total(&payload) != r.len as usize {
                return Err(bad("the reply's length is wrong"));
            }
            if let Some(i) = verify(u64::from(p.offset), payload.iter().map(|b| &b[..]), &r.sums) {
                return Err(bad(&format!("block {i} does not match its checksum")));
            }
            let mut out = payload;
            buffers::push_zeros(&mut out, &self.zero, (p.len - r.len) as usize);
            inode.fetched.add(ByRoad::came(&out));
            Ok(out)
        };
        let request = DataRequest { offset: p.offset, len: p.len, ..DataRequest::new(p.chain, 0, 0, p.chunk) };
        let question = Question { opcode: opcode::READ, chain: p.chain, request, read: &read };
        self.ask(inode, "read", false, &question).await
    }

    /// Asks replicas until one answers. `as_writer`: under the right to write.
    pub(crate) async fn ask<T>(
        self: &Arc<Self>,
        inode: &Inode,
        what: &'static str,
        as_writer: bool,
        q: &Question<'_, T>,
    ) -> Result<T> {
        let mut at = self.shared.attempts(what);
        let mut retry = Retry::begin(self, inode, as_writer, MAX_CORRUPT_ROUNDS - 1).await?;
        loop {
            let map = self.shared.map();
            match self.ask_round(&map, q, &retry.cap).await {
                Ok(answer) => return Ok(answer),
                Err(e) => retry.after(&map, &mut at, e).await?,
            }
        }
    }

    async fn ask_round<T>(&self, map: &MapView, q: &Question<'_, T>, cap: &Cap) -> Result<T> {
        let mut round = Round::begin(self, map, q.chain, q.request.chunk)?;
        while let Some(target) = round.next() {
            match self.ask_one(map, round.chain, target, q, cap).await {
                Ok(answer) => return Ok(answer),
                Err(e) => round.failed(e)?,
            }
        }
        Err(round.over())
    }

    async fn ask_one<T>(
        &self,
        map: &MapView,
        chain: &pb::Chain,
        target: TargetId,
        q: &Question<'_, T>,
        cap: &Cap,
    ) -> Result<T> {
        let _slot = self.pieces.acquire().await.map_err(|_| shut_down())?;
        let (session, cap) = (cap.session, Some(cap.bytes));
        let request = DataRequest { chain: chain.id, epoch: chain.epoch, target, session, cap, ..q.request.clone() };
        let m = self.data_call(map, chain, target, Message::new(q.opcode, request.encode()), Way::Shared(None)).await?;
        (q.read)(target, DataReply::decode(&m.body)?, m.payload)
    }
}

/// Whether an error of an update is its server's answer, which makes no other copy of it.
fn is_answer(e: &Error) -> bool {
    !in_doubt(e) && e.code != Code::StaleEpoch
}

fn shut_down() -> Error {
    Error::new(Code::Io, "the client is being shut down")
}

pub(crate) fn session_lost() -> Error {
    Error::new(Code::Io, "the session was lost during a write; the bytes may be lost")
}
