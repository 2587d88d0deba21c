//! Answers requests from the fabric: clients', storage servers' and other metadata servers'.

use std::{sync::atomic::Ordering, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use prost::encoding::{self, WireType};
use strake_fabric::{Message, Peer, Role, Service, unknown_opcode};
use strake_proto::{
    Bound, Capability, Code, Error, Incarnation, Ino, Kin, NodeId, Result, Rights, SessionId,
    cap::{as_of, same_bytes},
    frame::MAX_BODY,
    map::MAX_EVICTED,
    opcode, pb,
};

use super::{
    Mds,
    heavy::{machine, order_groups},
    recalls::Asker,
};
use crate::{
    consensus::{StateMachine as _, twins},
    lock_waiters::MAX_OF_SESSION,
    namespace::{MAX_DEAD, Namespace},
    sessions::{MAX_SESSIONS, WasCounted},
};
use pb::{log_command::Command, op::Op};

/// Operations in one list.
const MAX_OPS: usize = 8192;
/// Their field number in a `MetaRequest`.
const OPS_TAG: u32 = 5;
/// The field number of the inodes that are given back in a `MetaRequest`, and how many there may be.
const DROPPED_TAG: u32 = 7;
const MAX_DROPPED: usize = 65_536;
/// The field number of the reports in a `RecallRequest`, and how many there may be.
const REPORTED_TAG: u32 = 4;
/// Likewise of those that are worked at, and of answered questions about locks.
const WORKING_TAG: u32 = 5;
const CHECKED_TAG: u32 = 7;
const MAX_REPORTED: usize = 65_536;
/// The field number of the dead clients in a `SessionOpenRequest`.
const DEAD_TAG: u32 = 5;
/// The field number of the waits in a `LockWaitRequest`.
const WAITS_TAG: u32 = 2;
/// How long the reply to a shrink waits for the bytes to be gone from every replica.
const TRIM_WAIT: Duration = Duration::from_secs(25);
/// How long the reply to an open does; then the client asks again.
const OPEN_WAIT: Duration = Duration::from_secs(4);
/// Items of one reply about what is to be deleted.
const MAX_PENDING: u32 = 10_000;
/// The field number of the chunks in a `PlacesRequest`, and how many there may be.
const PLACES_TAG: u32 = 1;
const MAX_PLACES: usize = 256;
/// Field numbers of the cluster map in answers.
mod tag {
    pub const SESSION_OPEN: u32 = 6;
    pub const SESSION_RENEW: u32 = 1;
    pub const MAP: u32 = 1;
    pub const REGISTER: u32 = 4;
    pub const HEARTBEAT: u32 = 2;
}

/// What is in the capabilities of one answer.
#[derive(Clone, Copy)]
pub(super) struct Gives {
    /// Of the session.
    pub epoch: u64,
    /// The first entry of the log that was not applied when it was looked who may read.
    pub looked: u64,
}

const S_IFMT: u32 = 0o170_000;
const S_IFREG: u32 = 0o100_000;

/// A heartbeat that waits until it is confirmed that this server leads. Dropped, it waits no
/// longer.
struct Unanswered<'a> {
    mds: &'a Mds,
    term: u64,
    node: NodeId,
    arrived: Duration,
}

impl<'a> Unanswered<'a> {
    /// Takes in what it says.
    fn begin(mds: &'a Mds, request: &pb::HeartbeatRequest) -> Result<Unanswered<'a>> {
        let (arrived, node) = (mds.env.boot(), request.node);
        let term = mds.with_lead(|l| {
            l.manager.heartbeat(arrived, request, &mds.map())?;
            l.manager.waits(arrived, node);
            Ok(l.term)
        })?;
        Ok(Unanswered { mds, term, node, arrived })
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let (mds, now) = (self.mds, self.mds.env.boot());
        // What waited for a former leader is nothing to the next one.
        let _ = mds.with_lead(|l| {
            if l.term == self.term {
                l.manager.answered(now, self.arrived, self.node, &mds.map());
            }
            Ok(())
        });
    }
}

#[async_trait]
impl Service for Mds {
    async fn handle(&self, peer: &Peer, request: Message) -> Result<Message> {
        match request.opcode {
            opcode::RAFT | opcode::SNAPSHOT => self.answer(peer, request).await,
            opcode::RELAY => {
                let map = self.map();
                let others = |to| map.node(to).filter(|_| to != self.own_id()).map(|n| n.endpoints.clone());
                self.relay.handle(peer, request, others).await
            }
            _ => self.vouch(self.answer(peer, request).await).await,
        }
    }

    fn disconnected(&self, peer: &Peer) {
        self.owners.lock().disconnected(peer.id);
        self.relay.disconnected(peer);
    }
}

impl Mds {
    /// What a damaged state says is no answer where another member has a good one: who asks is sent there.
    async fn vouch(&self, answer: Result<Message>) -> Result<Message> {
        let damaged = self.machine.damage().is_some();
        // Found damaged, and replaced since: what a lone member has is never replaced.
        let replaced = !damaged && answer.as_ref().is_err_and(|e| e.code == Code::Corrupt);
        if replaced || damaged && self.node.gave_up_state().await {
            return Err(Error::not_leader(0));
        }
        answer
    }

    async fn answer(&self, peer: &Peer, mut request: Message) -> Result<Message> {
        // What waits keeps nothing of it that it does not need: long bodies share a room.
        let body = std::mem::take(&mut request.body);
        let reply = match request.opcode {
            opcode::META => {
                let body = few_numbers(MAX_DROPPED, DROPPED_TAG, at_most(MAX_OPS, OPS_TAG, body)?)?;
                self.meta(peer, decode(body)?).await?
            }
            opcode::SESSION_OPEN => {
                let r: pb::SessionOpenRequest = decode(at_most(MAX_DEAD, DEAD_TAG, body)?)?;
                self.of_this_life(peer, r.incarnation)?;
                self.session_open(peer, r).await?
            }
            opcode::SESSION_RENEW => {
                let r: pb::SessionRenewRequest = decode(body)?;
                self.of_this_life(peer, r.incarnation)?;
                self.session_renew(peer, r).await?
            }
            opcode::SESSION_CLOSE => self.session_close(peer, decode(body)?).await?,
            opcode::LOCK_WAIT => self.lock_wait(peer, decode(at_most(MAX_OF_SESSION, WAITS_TAG, body)?)?).await?,
            opcode::RECALL => {
                let lists = [REPORTED_TAG, WORKING_TAG, CHECKED_TAG];
                let body = lists.into_iter().try_fold(body, |body, tag| few_numbers(MAX_REPORTED, tag, body))?;
                self.recall(peer, decode(body)?).await?
            }
            opcode::MAP => self.send_map(peer, &decode(body)?).await?,
            opcode::ECHO => return Ok(Message::new(opcode::ECHO, body).with_payload(request.payload)),
            opcode::REGISTER
            | opcode::HEARTBEAT
            | opcode::PENDING
            | opcode::PLACES
            | opcode::RAFT
            | opcode::SNAPSHOT
            | opcode::MEMBERS
            | opcode::PROBE
            | opcode::FRONTIER
                if peer.role != Role::Server =>
            {
                return Err(self.refuse(peer, request.opcode));
            }
            opcode::REGISTER => {
                let r: pb::RegisterRequest = decode(body)?;
                self.of_this_life(peer, r.incarnation)?;
                self.register(r).await?
            }
            opcode::HEARTBEAT => {
                let r: pb::HeartbeatRequest = decode(body)?;
                self.of_this_life(peer, r.incarnation)?;
                self.heartbeat(r).await?
            }
            opcode::PENDING => self.pending(decode(body)?).await?,
            opcode::PLACES => self.places(&decode(at_most(MAX_PLACES, PLACES_TAG, body)?)?)?,
            opcode::MEMBERS => self.members(decode(body)?).await?,
            opcode::PROBE => self.probed().await?,
            opcode::FRONTIER => {
                let r: pb::FrontierRequest = decode(body)?;
                self.of_this_life(peer, r.incarnation)?;
                self.frontier(r).await?
            }
            opcode::RAFT | opcode::SNAPSHOT => return self.node.handle(Message { body, ..request }).await,
            other => return Err(unknown_opcode(other)),
        };
        if reply.len() > MAX_BODY as usize {
            return Err(Error::new(Code::TooBig, "the answer is longer than a reply may be; ask for less at once"));
        }
        Ok(Message::new(request.opcode, reply))
    }
}

fn decode<M: prost::Message + Default>(body: Bytes) -> Result<M> {
    M::decode(body).map_err(unreadable)
}

fn unreadable(e: prost::DecodeError) -> Error {
    Error::new(Code::Protocol, format!("the request's body cannot be read: {e}"))
}

/// Passes on a body in which a list has at most so many items: empty ones are 2 bytes there, and many once decoded.
fn at_most(limit: usize, list: u32, body: Bytes) -> Result<Bytes> {
    count(limit, list, body, |_, _| 1)
}

/// Likewise for a list of numbers, which come many to a field, each ending with a byte below 128.
pub(super) fn few_numbers(limit: usize, list: u32, body: Bytes) -> Result<Bytes> {
    count(limit, list, body, |wire_type, field| match wire_type {
        // With the field's length, which is one more of them.
        WireType::LengthDelimited => field.iter().filter(|b| **b < 128).count() - 1,
        _ => 1,
    })
}

fn count(limit: usize, list: u32, body: Bytes, items_in: impl Fn(WireType, &[u8]) -> usize) -> Result<Bytes> {
    let (mut rest, mut items) = (&body[..], 0);
    while !rest.is_empty() {
        let (tag, wire_type) = encoding::decode_key(&mut rest).map_err(unreadable)?;
        let field = rest;
        encoding::skip_field(wire_type, tag, &mut rest, encoding::DecodeContext::default()).map_err(unreadable)?;
        if tag == list {
            items += items_in(wire_type, &field[..field.len() - rest.len()]);
        }
        if items > limit {
            return Err(Error::new(Code::TooBig, format!("a list of more than {limit} items")));
        }
    }
    Ok(body)
}

pub(super) fn encode(m: &impl prost::Message) -> Bytes {
    m.encode_to_vec().into()
}

pub(super) fn ok(r: &pb::OpResult) -> bool {
    r.status.as_ref().is_none_or(|s| s.code == 0)
}

pub(super) fn misread() -> Error {
    Error::new(Code::Io, "the log answered something else than was asked")
}

impl Mds {
    /// Refuses a client what only servers may ask. Logged ever more rarely: it must not fill the log.
    fn refuse(&self, peer: &Peer, opcode: u16) -> Error {
        let count = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            tracing::warn!(from = peer.addr, opcode, count, "a client sent a request of servers; refused");
        }
        Error::new(Code::Access, "only servers of this cluster may ask this")
    }

    /// Refuses (`NotLeader`) who has been with a later life of this group, or with one that was recovered from it apart from this one:
    /// what this server would answer is over for them. To hear so from a server ends this one; a client might claim anything.
    fn of_this_life(&self, peer: &Peer, theirs: u64) -> Result<()> {
        let Some(own) = self.machine.incarnation() else { return Ok(()) };
        let theirs = Incarnation(theirs);
        if peer.role == Role::Server {
            return self.node.meet(theirs, None);
        }
        match own.kin(theirs) {
            Kin::Same | Kin::Older => Ok(()),
            Kin::Twin => Err(twins(own, theirs)),
            Kin::Newer => {
                let m = format!(
                    "this metadata server is of incarnation {own} of its group, which was recovered without it as {theirs}"
                );
                Err(Error::new(Code::NotLeader, m))
            }
        }
    }

    /// The session's epoch, after noting that it was heard of.
    pub(super) fn heard(&self, session: SessionId) -> Result<u64> {
        let now = self.env.boot();
        self.with_lead(|l| {
            if let Some(epoch) = l.sessions.heard(now, session)? {
                return Ok(epoch);
            }
            let gone = || Error::new(Code::NoSession, format!("session {session} has ended; mount again"));
            let record = self.machine.namespace.session(session).ok_or_else(gone)?;
            l.sessions.learn(now, session, record.epoch);
            Ok(record.epoch)
        })
    }

    /// Refuses (`Access`) who speaks for a session of which it did not prove that it is its own. What has ended is for others to tell.
    pub(super) fn owns(&self, peer: &Peer, session: SessionId) -> Result<()> {
        if peer.role == Role::Server || self.owners.lock().has_proved(peer.id, session) {
            return Ok(());
        }
        match self.machine.namespace.session(session) {
            Some(s) if s.proves => {
                let m = format!("session {session} is another client's, or was not named on this connection before");
                Err(Error::new(Code::Access, m))
            }
            _ => Ok(()),
        }
    }

    async fn session_open(&self, peer: &Peer, request: pb::SessionOpenRequest) -> Result<Bytes> {
        let machine = machine(&peer.addr);
        self.with_lead(|_| self.owners.lock().may_open(peer.id, machine))?;
        self.with_lead(|l| {
            if l.sessions.len() < MAX_SESSIONS {
                return Ok(());
            }
            let m = "which is the limit of a file system; `strake status` shows whose they are";
            Err(Error::new(Code::Overloaded, format!("{} sessions are open, {m}", l.sessions.len())))
        })?;
        let reply = self.propose(Command::SessionOpen(request)).await?;
        let Some(pb::log_reply::Reply::SessionOpen(mut r)) = reply.reply else { return Err(misread()) };
        self.owners.lock().prove(peer.id, machine, r.session);
        // Resumed and ended meanwhile, or about to be: the next try gets a new one.
        let ending = |e: Error| if e.code == Code::NoSession { Error { code: Code::Overloaded, ..e } } else { e };
        self.heard(r.session).map_err(ending)?;
        r.term_ms = u32::try_from(self.cfg.session_term_ms).unwrap_or(u32::MAX);
        Ok(self.map().encode_behind(&r, tag::SESSION_OPEN).into())
    }

    async fn session_renew(&self, peer: &Peer, request: pb::SessionRenewRequest) -> Result<Bytes> {
        let own = |s: pb::SessionRecord| same_bytes(&s.client_uuid, &request.client_uuid);
        if self.machine.namespace.session(request.session).is_some_and(own) {
            self.owners.lock().prove(peer.id, machine(&peer.addr), request.session);
        }
        self.owns(peer, request.session)?;
        self.heard(request.session)?;
        let term = self.leading()?;
        self.hello(term, &request)?;
        // A leader that was replaced meanwhile must not promise another term.
        self.node.read_barrier().await?;
        if request.reassert {
            // What was told on a newer connection is newer.
            self.recalls.in_time(term, Asker { session: request.session, connection: request.connection })?;
            self.with_lead(|l| l.sessions.reassert(request.session, &request.opens))?;
        }
        let map = self.map();
        let newer = map.version() > request.map_version;
        let lease_ms = self.recalls.renewed(term, request.session, request.connection)?;
        let reply = pb::SessionRenewReply { map: None, lease_ms };
        Ok(if newer { map.encode_behind(&reply, tag::SESSION_RENEW).into() } else { encode(&reply) })
    }

    async fn session_close(&self, peer: &Peer, request: pb::SessionCloseRequest) -> Result<Bytes> {
        self.owns(peer, request.session)?;
        self.heard(request.session)?;
        self.propose(Command::SessionEnd(pb::SessionEnd { sessions: vec![request.session], evict: false })).await?;
        self.owners.lock().leave(request.session);
        let _ = self.with_lead(|l| {
            l.sessions.remove(request.session);
            l.lock_waiters.remove(request.session);
            Ok(())
        });
        Ok(encode(&pb::SessionCloseReply {}))
    }

    async fn send_map(&self, peer: &Peer, request: &pb::MapRequest) -> Result<Bytes> {
        if request.latest {
            if peer.role != Role::Server {
                return Err(self.refuse(peer, opcode::MAP));
            }
            self.leading()?;
            self.node.read_barrier().await?;
        }
        let map = self.map();
        let reply = pb::MapReply { map: None };
        let newer = map.version() > request.have;
        Ok(if newer { map.encode_behind(&reply, tag::MAP).into() } else { encode(&reply) })
    }

    async fn register(&self, request: pb::RegisterRequest) -> Result<Bytes> {
        self.leading()?;
        let mut request = request;
        if self.map().map.doubts.is_empty() {
            // Of no use then, and not worth its place in the log.
            request.targets.iter_mut().for_each(|t| t.sights.clear());
        }
        tracing::info!(name = request.name, targets = request.targets.len(), "a storage server registers");
        let reply = self.propose(Command::Register(request)).await?;
        let Some(pb::log_reply::Reply::Register(r)) = reply.reply else { return Err(misread()) };
        Ok(self.map().encode_behind(&r, tag::REGISTER).into())
    }

    async fn heartbeat(&self, request: pb::HeartbeatRequest) -> Result<Bytes> {
        let own = self.map().map.incarnation;
        if request.incarnation != own && !request.targets.is_empty() {
            let m = "the metadata group was recovered since this storage server registered; register again";
            return Err(Error::new(Code::Stale, m));
        }
        let unanswered = Unanswered::begin(self, &request)?;
        // The holder counts its lease from before this, so no later leader can count it as over while it is not.
        self.node.read_barrier().await?;
        drop(unanswered);
        let (lease_ms, step_out, map) = self.with_lead(|l| {
            // Under the lock: whatever was resolved is in this map.
            let (now, map) = (self.env.boot(), self.map());
            Ok((l.manager.grant(now, request.node, &map)?, l.manager.step_out(now, request.node, &map), map))
        })?;
        let mut evicted = self.machine.namespace.evicted_after(request.evicted_seen);
        evicted.truncate(MAX_EVICTED);
        let newer = map.version() > request.map_version;
        // After the barrier: nothing that was answered before is missing.
        let endings = request.endings_known.map(|known| self.machine.endings_after(known));
        let reply = pb::HeartbeatReply { lease_ms, map: None, evicted, endings, step_out };
        Ok(if newer { map.encode_behind(&reply, tag::HEARTBEAT).into() } else { encode(&reply) })
    }

    async fn pending(&self, request: pb::PendingRequest) -> Result<Bytes> {
        self.leading()?;
        self.node.read_barrier().await?;
        let limit = request.limit.min(MAX_PENDING) as usize;
        let items = self.machine.namespace.pending(&request, limit)?;
        Ok(encode(&pb::PendingReply { items }))
    }

    async fn meta(&self, peer: &Peer, mut request: pb::MetaRequest) -> Result<Bytes> {
        order_groups(&mut request.creds)?;
        if request.follower && self.leading().is_err() {
            return Ok(encode(&self.follow(peer, request).await?));
        }
        self.owns(peer, request.session)?;
        let epoch = self.heard(request.session)?;
        let term = self.leading()?;
        if !Namespace::is_mutation(&request.ops) {
            return Ok(encode(&self.read(peer, term, epoch, request).await?));
        }
        if request.seq == 0 {
            return Err(Error::new(Code::Inval, "a list that changes something needs a sequence number"));
        }
        Ok(encode(&self.change(peer, term, epoch, request).await?))
    }

    /// Opens and closes of an answered list go into the table, once however often it comes; opens get their capability. `Disconnected`
    /// for a list that comes late: what its sender has open it has told since, on a newer connection. `number`: of the request, and the
    /// lowest of those that its sender waits for.
    pub(super) fn note_handles(
        &self,
        term: u64,
        by: Asker,
        number: (u64, u64),
        gives: Gives,
        ops: &[pb::Op],
        results: &mut [pb::OpResult],
    ) -> Result<()> {
        let touches = |o: &pb::Op| matches!(o.op, Some(Op::Open(_) | Op::Create(_) | Op::Tmpfile(_) | Op::Close(_)));
        if !ops.iter().any(touches) {
            return Ok(());
        }
        self.recalls.in_time(term, by)?;
        let session = by.session;
        // It ran before its session ended: asked for again, the sender hears of that end.
        let ended = |e: Error| if e.code == Code::NoSession { Error { code: Code::Disconnected, ..e } } else { e };
        self.with_lead(|l| {
            let was = l.sessions.was_counted(session, by.connection, number).map_err(ended)?;
            for (op, r) in ops.iter().zip(results) {
                if !ok(r) {
                    // It may come again, and do better.
                    return Ok(());
                }
                let flags = match &op.op {
                    Some(Op::Open(o)) => o.flags,
                    Some(Op::Create(c)) => c.flags,
                    Some(Op::Tmpfile(t)) => t.flags,
                    Some(Op::Close(c)) => {
                        if was == WasCounted::No {
                            l.sessions.close(session, if c.ino == 0 { r.ino } else { c.ino });
                        }
                        continue;
                    }
                    _ => continue,
                };
                let ino = r.attr.as_ref().map_or(r.ino, |a| a.ino);
                if was != WasCounted::Yes
                    && let Err(e) = l.sessions.open(session, ino)
                {
                    *r = pb::OpResult { status: Some(e.to_status()), ..Default::default() };
                    return Ok(());
                }
                r.capability = self.capability(session, gives, flags, r).unwrap_or_default();
            }
            l.sessions.count(session, by.connection, number.0);
            Ok(())
        })
    }

    /// The right to a regular file's data, as its open flags ask for it; the open itself was allowed.
    fn capability(&self, session: SessionId, gives: Gives, flags: u32, r: &pb::OpResult) -> Option<Bytes> {
        let attr = r.attr.as_ref().filter(|a| a.mode & S_IFMT == S_IFREG)?;
        let layout = r.layout.as_ref()?;
        let data = layout.components.first()?.data_id;
        let rights = match flags & 3 {
            0 => Rights::READ,
            1 => Rights::WRITE.and(Rights::TRIM),
            2 => Rights::READ.and(Rights::WRITE).and(Rights::TRIM),
            _ => return None,
        };
        let expiry_ms = self.env.unix_ms() + self.cfg.capability_ms;
        let bound = Bound::of(layout, &self.map());
        // One to write is an entry of the log.
        let as_of = as_of(if r.writer != 0 { r.writer } else { gives.looked });
        let session_epoch = gives.epoch;
        let cap = Capability { ino: attr.ino, data, session, session_epoch, expiry_ms, rights, bound, as_of };
        Some(Bytes::copy_from_slice(&self.cap_key.seal(&cap)))
    }

    /// Holds the reply of a list that sets sizes or gives leave to write until no bytes beyond a cut are left anywhere:
    /// they must not come back when the file grows again, and what is written from now on must not be cut.
    pub(super) async fn wait_for_trims(&self, term: u64, ops: &[pb::Op], results: &[pb::OpResult]) -> Result<()> {
        for (op, r) in ops.iter().zip(results) {
            let (ino, limit) = match &op.op {
                Some(Op::Setattr(s)) if s.size.is_some() => (s.ino, TRIM_WAIT),
                Some(Op::Extend(e)) => (e.ino, TRIM_WAIT),
                Some(Op::Open(_) | Op::Create(_) | Op::Tmpfile(_)) if r.writer != 0 => (0, OPEN_WAIT),
                _ => continue,
            };
            self.wait_for_trim(term, if ino == 0 { r.ino } else { ino }, limit).await?;
        }
        Ok(())
    }

    async fn wait_for_trim(&self, term: u64, ino: Ino, limit: Duration) -> Result<()> {
        let mut applied = self.machine.applied_watch();
        let mut leadership = self.leadership.clone();
        let deadline = tokio::time::Instant::now() + limit;
        while self.machine.namespace.trim_of(ino).is_some() {
            if self.leading()? != term {
                return Err(Error::not_leader(0));
            }
            self.trim_wanted.notify_one();
            tokio::select! {
                biased;
                r = applied.changed() => r.map_err(|_| Error::new(Code::Disconnected, "the server stops"))?,
                r = leadership.changed() => r.map_err(|_| Error::new(Code::Disconnected, "the server stops"))?,
                () = tokio::time::sleep_until(deadline) => {
                    let m = format!("inode {ino:#x} was cut, but not all replicas have dropped the bytes yet");
                    // Asked again under the same number, a list that ran waits on.
                    return Err(Error::new(if limit < TRIM_WAIT { Code::Overloaded } else { Code::TimedOut }, m));
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use strake_proto::map::MapView;

    use super::*;

    #[test]
    fn the_map_in_answers_is_in_the_field_that_is_meant() {
        let node = pb::Node { id: 7, name: "a".into(), ..Default::default() };
        let map = pb::ClusterMap { version: 3, nodes: vec![node], fs_name: "x".repeat(300), ..Default::default() };
        let view = MapView::new(map.clone()).unwrap();
        for _ in 0..2 {
            let open = pb::SessionOpenReply { session: 9, ..Default::default() };
            let is = pb::SessionOpenReply::decode(&view.encode_behind(&open, tag::SESSION_OPEN)[..]).unwrap();
            assert_eq!(is, pb::SessionOpenReply { map: Some(map.clone()), ..open });
            let renew = pb::SessionRenewReply { map: None, lease_ms: 1500 };
            let is = pb::SessionRenewReply::decode(&view.encode_behind(&renew, tag::SESSION_RENEW)[..]).unwrap();
            assert_eq!(is, pb::SessionRenewReply { map: Some(map.clone()), ..renew });
            let is = pb::MapReply::decode(&view.encode_behind(&pb::MapReply { map: None }, tag::MAP)[..]).unwrap();
            assert_eq!(is.map.as_ref(), Some(&map));
            let register = pb::RegisterReply { node: 4, target_ids: vec![1, 2], ..Default::default() };
            let is = pb::RegisterReply::decode(&view.encode_behind(&register, tag::REGISTER)[..]).unwrap();
            assert_eq!(is, pb::RegisterReply { map: Some(map.clone()), ..register });
            let endings = Some(pb::Endings { through: 7, ..Default::default() });
            let evicted = vec![pb::Evicted::default()];
            let beat = pb::HeartbeatReply { lease_ms: 5, map: None, evicted, endings, step_out: vec![7] };
            let is = pb::HeartbeatReply::decode(&view.encode_behind(&beat, tag::HEARTBEAT)[..]).unwrap();
            assert_eq!(is, pb::HeartbeatReply { map: Some(map.clone()), ..beat });
        }
    }
}
