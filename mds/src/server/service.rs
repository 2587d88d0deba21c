//! Answers requests from the fabric: clients', storage servers' and other metadata servers'.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use strake_fabric::{Message, Peer, Role, Service, unknown_opcode};
use strake_links::{Relay, payloads};
use strake_proto::{
    Code, Error, Incarnation, Kin, NodeId, Result, frame::MAX_BODY, map::MAX_EVICTED, opcode, pb,
};

use super::{
    call::Call,
    changes::Changes,
    followers::Followers,
    heavy::order_groups,
    lease_service, levels,
    locks::LockService,
    member::Member,
    membership::Membership,
    places::places,
    reads::Reads,
    session_service::SessionService,
    status,
    wire::{at_most, decode, encode, few_numbers, misread, tag},
};
use crate::{
    consensus::{StateMachine as _, twins},
    lock_waiters::MAX_OF_SESSION,
    namespace::{MAX_DEAD, Namespace},
};
use pb::log_command::Command;

/// Most operations in one list.
const MAX_OPS: usize = 8192;
/// The field number of the operations in a `MetaRequest`.
const OPS_TAG: u32 = 5;
/// The field number of the inodes that are given back in a `MetaRequest`, and how many there may
/// be.
const DROPPED_TAG: u32 = 7;
const MAX_DROPPED: usize = 65_536;
/// The field number of the reports in a `RecallRequest`, and how many there may be.
const REPORTED_TAG: u32 = 4;
/// The same for reports in progress, and for answered questions about locks.
const WORKING_TAG: u32 = 5;
const CHECKED_TAG: u32 = 7;
const MAX_REPORTED: usize = 65_536;
/// The field number of the dead clients in a `SessionOpenRequest`.
const DEAD_TAG: u32 = 5;
/// The field number of the waits in a `LockWaitRequest`.
const WAITS_TAG: u32 = 2;
/// Most items in one reply about what is to be deleted.
const MAX_PENDING: u32 = 10_000;
/// The field number of the chunks in a `PlacesRequest`, and how many there may be.
const PLACES_TAG: u32 = 1;
const MAX_PLACES: usize = 256;

/// A heartbeat that waits until it is confirmed that this server leads. The wait ends when this is
/// dropped.
struct Unanswered<'a> {
    member: &'a Member,
    term: u64,
    node: NodeId,
    arrived: Duration,
}

impl<'a> Unanswered<'a> {
    /// Passes its contents to the leader's manager.
    fn begin(member: &'a Member, request: &pb::HeartbeatRequest) -> Result<Unanswered<'a>> {
        let (arrived, node) = (member.env.boot(), request.node);
        let term = member.with_lead(|l| {
            l.manager.heartbeat(arrived, request, &member.map())?;
            l.levels.heard_server(arrived, node, request.level);
            l.manager.waits(arrived, node);
            Ok(l.term)
        })?;
        Ok(Unanswered { member, term, node, arrived })
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        let (member, now) = (self.member, self.member.env.boot());
        // A wait that began under a former leader does not count for the next one.
        let _ = member.with_lead(|l| {
            if l.term == self.term {
                l.manager.answered(now, self.arrived, self.node, &member.map());
            }
            Ok(())
        });
    }
}

/// A metadata server as the fabric knows it.
pub(super) struct Mds {
    pub member: Arc<Member>,
    pub sessions: Arc<SessionService>,
    pub locks: Arc<LockService>,
    pub reads: Reads,
    pub changes: Arc<Changes>,
    pub followers: Arc<Followers>,
    pub membership: Arc<Membership>,
    pub relay: Relay,
    /// How many requests of clients were refused because only servers may send them.
    pub refused: AtomicU64,
}

#[async_trait]
impl Service for Mds {
    async fn handle(&self, peer: &Peer, request: Message) -> Result<Message> {
        match request.opcode {
            opcode::RAFT | opcode::SNAPSHOT => self.answer(peer, request).await,
            opcode::RELAY => {
                let map = self.member.map();
                let others = |to| {
                    map.node(to).filter(|_| to != self.member.own_id()).map(|n| n.endpoints.clone())
                };
                self.relay.handle(peer, request, others).await
            }
            _ => self.vouch(self.answer(peer, request).await).await,
        }
    }

    fn answer_len(&self, m: &Message) -> usize {
        payloads::answer_len(m.opcode, &m.body)
    }

    fn disconnected(&self, peer: &Peer) {
        self.sessions.disconnected(peer);
        self.relay.disconnected(peer);
    }
}

impl Mds {
    /// A damaged state's answer does not count if another member has a good one: the client is sent
    /// there.
    async fn vouch(&self, answer: Result<Message>) -> Result<Message> {
        let damaged = self.member.machine.damage().is_some();
        // The state was found damaged, and has been replaced since; a lone member's state is never
        // replaced.
        let replaced = !damaged && answer.as_ref().is_err_and(|e| e.code == Code::Corrupt);
        if replaced || damaged && self.member.node.gave_up_state().await {
            return Err(Error::not_leader(0));
        }
        answer
    }

    async fn answer(&self, peer: &Peer, mut request: Message) -> Result<Message> {
        // A waiting request keeps nothing of the body that it does not need: long bodies share a
        // memory limit.
        let body = std::mem::take(&mut request.body);
        let reply = match request.opcode {
            opcode::ECHO => {
                let answer = Message::new(opcode::ECHO, body).with_payload(request.payload);
                return Ok(payloads::answer(opcode::ECHO, answer));
            }
            opcode::REGISTER
            | opcode::HEARTBEAT
            | opcode::PENDING
            | opcode::PLACES
            | opcode::RAFT
            | opcode::SNAPSHOT
            | opcode::MEMBERS
            | opcode::PROBE
            | opcode::FRONTIER
            | opcode::STATUS
                if peer.role != Role::Server =>
            {
                return Err(self.refuse(peer, request.opcode));
            }
            opcode::RAFT | opcode::SNAPSHOT => {
                return self.member.node.handle(Message { body, ..request }).await;
            }
            opcode::REGISTER
            | opcode::HEARTBEAT
            | opcode::PENDING
            | opcode::PLACES
            | opcode::MEMBERS
            | opcode::PROBE
            | opcode::FRONTIER
            | opcode::STATUS => self.answer_server(peer, request.opcode, body).await?,
            _ => self.answer_client(peer, request.opcode, body).await?,
        };
        if reply.len() > MAX_BODY as usize {
            return Err(Error::new(
                Code::TooBig,
                "the answer would be too long; ask for less at once",
            ));
        }
        Ok(Message::new(request.opcode, reply))
    }

    async fn answer_client(&self, peer: &Peer, opcode: u16, body: Bytes) -> Result<Bytes> {
        match opcode {
            opcode::META => {
                let body = few_numbers(MAX_DROPPED, DROPPED_TAG, at_most(MAX_OPS, OPS_TAG, body)?)?;
                self.meta(peer, decode(body)?).await
            }
            opcode::SESSION_OPEN => {
                let r: pb::SessionOpenRequest = decode(at_most(MAX_DEAD, DEAD_TAG, body)?)?;
                self.of_this_life(peer, r.incarnation)?;
                self.sessions.open(peer, r).await
            }
            opcode::SESSION_RENEW => {
                let r: pb::SessionRenewRequest = decode(body)?;
                self.of_this_life(peer, r.incarnation)?;
                self.sessions.renew(peer, r).await
            }
            opcode::SESSION_CLOSE => self.sessions.close(peer, decode(body)?).await,
            opcode::LOCK_WAIT => {
                let r: pb::LockWaitRequest = decode(at_most(MAX_OF_SESSION, WAITS_TAG, body)?)?;
                self.sessions.owns(peer, r.session)?;
                self.sessions.heard(r.session)?;
                self.locks.wait(r).await
            }
            opcode::RECALL => {
                let lists = [REPORTED_TAG, WORKING_TAG, CHECKED_TAG];
                let body = lists
                    .into_iter()
                    .try_fold(body, |body, tag| few_numbers(MAX_REPORTED, tag, body))?;
                let r: pb::RecallRequest = decode(body)?;
                self.sessions.owns(peer, r.session)?;
                self.sessions.heard(r.session)?;
                lease_service::recall(&self.member, r).await
            }
            opcode::MAP => self.send_map(peer, &decode(body)?).await,
            other => Err(unknown_opcode(other)),
        }
    }

    async fn answer_server(&self, peer: &Peer, opcode: u16, body: Bytes) -> Result<Bytes> {
        match opcode {
            opcode::REGISTER => {
                let r: pb::RegisterRequest = decode(body)?;
                self.of_this_life(peer, r.incarnation)?;
                self.register(r).await
            }
            opcode::HEARTBEAT => {
                let r: pb::HeartbeatRequest = decode(body)?;
                self.of_this_life(peer, r.incarnation)?;
                self.heartbeat(r).await
            }
            opcode::PENDING => self.pending(decode(body)?).await,
            opcode::PLACES => {
                places(&self.member, &decode(at_most(MAX_PLACES, PLACES_TAG, body)?)?)
            }
            opcode::MEMBERS => self.membership.members(decode(body)?).await,
            opcode::PROBE => self.membership.probed().await,
            opcode::STATUS => Ok(status::encoded(self, &decode(body)?)),
            opcode::FRONTIER => {
                let r: pb::FrontierRequest = decode(body)?;
                self.of_this_life(peer, r.incarnation)?;
                self.followers.frontier(r).await
            }
            other => Err(unknown_opcode(other)),
        }
    }
}

impl Mds {
    /// Refuses a client a request that only servers may send. Logged ever more rarely, so that it
    /// does not fill the log.
    fn refuse(&self, peer: &Peer, opcode: u16) -> Error {
        let count = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        if count.is_power_of_two() {
            tracing::warn!(
                from = peer.addr,
                opcode,
                count,
                "refused a request of a client that only servers may send"
            );
        }
        Error::new(Code::Access, "only servers of this cluster may ask this")
    }

    /// Refuses (`NotLeader`) a peer that has been with a later incarnation of this group, or with
    /// one that was recovered separately: this server's answers are outdated for it. If a server
    /// says so, this server stops; a client might claim anything.
    fn of_this_life(&self, peer: &Peer, theirs: u64) -> Result<()> {
        let Some(own) = self.member.machine.incarnation() else { return Ok(()) };
        let theirs = Incarnation(theirs);
        if peer.role == Role::Server {
            return self.member.node.meet(theirs, None);
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

    async fn send_map(&self, peer: &Peer, request: &pb::MapRequest) -> Result<Bytes> {
        if request.latest {
            if peer.role != Role::Server {
                return Err(self.refuse(peer, opcode::MAP));
            }
            self.member.leading()?;
            self.member.node.read_barrier().await?;
        }
        let map = self.member.map();
        let reply = pb::MapReply { map: None };
        let newer = map.version() > request.have;
        Ok(if newer { map.encode_behind(&reply, tag::MAP).into() } else { encode(&reply) })
    }

    async fn register(&self, request: pb::RegisterRequest) -> Result<Bytes> {
        self.member.leading()?;
        let who = || format!("storage server '{}'", request.name);
        // With this code also older programs end, instead of asking again and again.
        levels::check(&self.member, request.level, Code::Inval, who)?;
        let mut request = request;
        let level = std::mem::take(&mut request.level);
        if self.member.map().map.doubts.is_empty() {
            // Useless then, and not worth the space in the log.
            request.targets.iter_mut().for_each(|t| t.sights.clear());
        }
        tracing::info!(
            name = request.name,
            targets = request.targets.len(),
            "a storage server registers"
        );
        let reply = self.member.propose(Command::Register(request)).await?;
        let Some(pb::log_reply::Reply::Register(r)) = reply.reply else { return Err(misread()) };
        let now = self.member.env.boot();
        let _ = self.member.with_lead(|l| {
            l.levels.heard_server(now, r.node, level);
            Ok(())
        });
        Ok(self.member.map().encode_behind(&r, tag::REGISTER).into())
    }

    async fn heartbeat(&self, request: pb::HeartbeatRequest) -> Result<Bytes> {
        let own = self.member.map().map.incarnation;
        if request.incarnation != own && !request.targets.is_empty() {
            let m = "the metadata group was recovered after this storage server registered; \
                     register again";
            return Err(Error::new(Code::Stale, m));
        }
        let who = || levels::server_name(&self.member, request.node);
        levels::check(&self.member, request.level, Code::Stale, who)?;
        let unanswered = Unanswered::begin(&self.member, &request)?;
        // The holder counts its lease from a time before this, so no later leader can count it as
        // over while it is not.
        self.member.node.read_barrier().await?;
        drop(unanswered);
        let (lease_ms, step_out, map) = self.member.with_lead(|l| {
            // Read under the lock: all resolved changes are in this map.
            let (now, map) = (self.member.env.boot(), self.member.map());
            Ok((
                l.manager.grant(now, request.node, &map)?,
                l.manager.step_out(now, request.node, &map),
                map,
            ))
        })?;
        let mut evicted =
            self.member.machine.namespace.backlog().evicted_after(request.evicted_seen);
        evicted.truncate(MAX_EVICTED);
        let newer = map.version() > request.map_version;
        // Read after the barrier: nothing answered earlier is missing.
        let endings = request.endings_known.map(|known| self.member.machine.endings_after(known));
        let reply = pb::HeartbeatReply { lease_ms, map: None, evicted, endings, step_out };
        Ok(if newer { map.encode_behind(&reply, tag::HEARTBEAT).into() } else { encode(&reply) })
    }

    async fn pending(&self, request: pb::PendingRequest) -> Result<Bytes> {
        self.member.leading()?;
        self.member.node.read_barrier().await?;
        let limit = request.limit.min(MAX_PENDING) as usize;
        let items = self.member.machine.namespace.backlog().pending(&request, limit)?;
        Ok(encode(&pb::PendingReply { items }))
    }

    async fn meta(&self, peer: &Peer, mut request: pb::MetaRequest) -> Result<Bytes> {
        order_groups(&mut request.creds)?;
        if request.follower && self.member.leading().is_err() {
            return Ok(encode(&self.followers.follow(peer, request).await?));
        }
        self.sessions.owns(peer, request.session)?;
        let epoch = self.sessions.heard(request.session)?;
        let call = Call::new(peer, self.member.leading()?, epoch, &request);
        if !Namespace::is_mutation(&request.ops) {
            return Ok(encode(&self.reads.read(&call, request).await?));
        }
        if request.seq == 0 {
            return Err(Error::new(Code::Inval, "a list with changes needs a sequence number"));
        }
        Ok(encode(&self.changes.change(&call, request).await?))
    }
}
