//! Reads by members that do not lead: `docs/follower-reads.md` says when they may be answered, and
//! why that is linearizable.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{Connection, Message, Peer};
use strake_proto::{Code, Error, Ino, Result, opcode, ops::only_looks, pb};
use tokio::{
    sync::{Notify, oneshot},
    time::timeout,
};

use super::{
    fair::Fair,
    levels,
    member::Member,
    wire::{encode, few_numbers},
};
use crate::{consensus::StateMachine as _, namespace::ReadAt};

/// Most inodes that a frontier names.
const MAX_UNSETTLED: usize = 4096;
const UNSETTLED_TAG: u32 = 2;
/// Most reads that wait for one frontier.
const MAX_GATHERED: usize = 4096;
/// How long to wait for the leader's answer, and for its log.
const ASK: Duration = Duration::from_millis(300);
const BEHIND: Duration = Duration::from_millis(200);
/// How many tries a read gets while its answer depends on inodes that are not settled.
const LOOKS: usize = 3;

/// What the leader allows this member to answer: everything up to an entry, except about these
/// inodes.
struct Frontier {
    index: u64,
    unsettled: BTreeSet<Ino>,
}

type Waiting = oneshot::Sender<Result<Arc<Frontier>>>;

/// Reads that wait on this member, which does not lead.
#[derive(Default)]
struct Gathering {
    /// Reads that wait for the next frontier.
    gathered: Mutex<Vec<Waiting>>,
    wanted: Notify,
}

impl Gathering {
    /// A frontier that is requested after this call.
    async fn frontier(&self) -> Result<Arc<Frontier>> {
        let (tell, told) = oneshot::channel();
        {
            let mut gathered = self.gathered.lock();
            if gathered.len() >= MAX_GATHERED {
                return Err(cannot("too many reads wait here"));
            }
            gathered.push(tell);
        }
        self.wanted.notify_one();
        told.await.unwrap_or_else(|_| Err(cannot("this server is stopping")))
    }
}

/// The error of a server that cannot answer now.
fn cannot(why: &str) -> Error {
    Error::new(
        Code::NotServing,
        format!("this metadata server is not the leader, and cannot answer now: {why}"),
    )
}

/// Requests frontiers for ever: one at a time, for all waiting reads.
pub(super) async fn run(followers: Arc<Followers>) {
    let mut link = None;
    loop {
        followers.gathering.wanted.notified().await;
        let waiting = std::mem::take(&mut *followers.gathering.gathered.lock());
        if waiting.is_empty() {
            continue;
        }
        let asked = timeout(ASK, followers.ask_frontier(&mut link)).await;
        let frontier =
            asked.unwrap_or_else(|_| Err(cannot("the leader does not answer"))).map(Arc::new);
        if frontier.is_err()
            && let Some((_, conn)) = link.take()
        {
            conn.close();
        }
        waiting.into_iter().for_each(|w| drop(w.send(frontier.clone())));
    }
}

/// See the module.
pub(super) struct Followers {
    member: Arc<Member>,
    fair: Arc<Fair>,
    gathering: Gathering,
    pub answered: AtomicU64,
    pub refused: AtomicU64,
}

impl Followers {
    pub(super) fn new(member: Arc<Member>, fair: Arc<Fair>) -> Followers {
        let (answered, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        Followers { member, fair, gathering: Gathering::default(), answered, refused }
    }

    /// Asks the leader. `link`: the leader that was asked last, and the connection to it.
    async fn ask_frontier(
        &self,
        link: &mut Option<(u64, Arc<dyn Connection>)>,
    ) -> Result<Frontier> {
        let leader = self.member.leadership.borrow().leader;
        let conn = match link {
            Some((id, conn)) if *id == leader && !conn.is_closed() => conn.clone(),
            _ => {
                let at = self
                    .member
                    .node
                    .endpoint_of(leader)
                    .ok_or_else(|| cannot("it does not know the leader"))?;
                let conn = self
                    .member
                    .links
                    .fabric()
                    .connect(&at, None)
                    .await
                    .map_err(|e| cannot(&e.message))?;
                link.insert((leader, conn)).1.clone()
            }
        };
        let request = pb::FrontierRequest {
            member: self.member.cfg.id,
            incarnation: self.member.map().map.incarnation,
            level: self.member.cfg.feature_level,
        };
        let m = Message::new(opcode::FRONTIER, request.encode_to_vec());
        let m = conn.call(m, ASK).await.map_err(|e| cannot(&e.message))?;
        let body = few_numbers(MAX_UNSETTLED, UNSETTLED_TAG, m.body)?;
        let r = pb::FrontierReply::decode(body).map_err(|e| cannot(&e.to_string()))?;
        Ok(Frontier { index: r.index, unsettled: r.unsettled.into_iter().collect() })
    }

    /// Tells a member that does not lead what it may answer. `NotLeader`: this server does not
    /// lead; `NotServing`: nothing now; `NotMember`: the asking server was removed.
    pub(super) async fn frontier(&self, request: pb::FrontierRequest) -> Result<Bytes> {
        let term = self.member.leading()?;
        if self.member.machine.is_former(request.member) {
            let m = format!("metadata server {} was removed from its group", request.member);
            return Err(Error::new(Code::NotMember, m));
        }
        let who = || format!("metadata server {}", request.member);
        levels::check(&self.member, request.level, Code::NotServing, who)?;
        self.member.node.read_barrier().await?;
        let index = self.member.machine.namespace.version();
        // Read after the index, so that nothing applied up to it is missing.
        let unsettled = self.member.recalls.awaited(term, MAX_UNSETTLED)?;
        Ok(encode(&pb::FrontierReply { index, unsettled }))
    }

    /// Answers a list that a client sent to this server, which does not lead. `NotLeader`: only the
    /// leader can answer it; `NotServing`: this server cannot at the moment.
    pub(super) async fn follow(
        &self,
        peer: &Peer,
        request: pb::MetaRequest,
    ) -> Result<pb::MetaReply> {
        let outcome = self.read_following(peer, &request).await;
        let counter = if outcome.is_ok() { &self.answered } else { &self.refused };
        counter.fetch_add(1, Relaxed);
        outcome
    }

    async fn read_following(
        &self,
        peer: &Peer,
        request: &pb::MetaRequest,
    ) -> Result<pb::MetaReply> {
        let creds = request.creds.clone().unwrap_or_default();
        let elsewhere = || self.member.leading().err().unwrap_or_else(|| Error::not_leader(0));
        if !request.ops.iter().all(only_looks) {
            return Err(elsewhere());
        }
        for _ in 0..LOOKS {
            // Its session is not known here, so this is the connection's turn.
            let turn = self.fair.read_turn(peer, peer.id).await?;
            let frontier = self.gathering.frontier().await?;
            drop(turn);
            let mut applied = self.member.machine.applied_watch();
            match timeout(BEHIND, applied.wait_for(|index| *index >= frontier.index)).await {
                Ok(Ok(_)) => {}
                Ok(Err(_)) => return Err(cannot("it stops")),
                Err(_) => return Err(cannot("it is behind")),
            }
            let turn = self.fair.heavy_turn(peer, request.session, &request.ops).await?;
            let read =
                self.member.machine.namespace.read_following(request.session, &creds, &request.ops);
            drop(turn);
            // Only the leader may say that a session has ended.
            let read = read.map_err(|e| cannot(&e.message))?;
            if self.may_tell(&frontier, &read) {
                return leave_out(read).ok_or_else(elsewhere);
            }
        }
        Err(elsewhere())
    }

    /// Whether the leader could have given the same answer when it gave the frontier.
    fn may_tell(&self, frontier: &Frontier, read: &ReadAt) -> bool {
        let settled = read.looked.is_disjoint(&frontier.unsettled);
        settled && self.member.machine.same_since(frontier.index, &read.looked)
    }
}

/// Leaves attributes out of listings that another client may still have to report. `None`: other
/// results show such attributes, so the writer must be asked or the file's size found out.
fn leave_out(read: ReadAt) -> Option<pb::MetaReply> {
    let ReadAt { mut reply, written, endless, .. } = read;
    let written = |a: &pb::Attr| written.contains(&a.ino) || endless.contains(&a.ino);
    if reply.results.iter().filter_map(|r| r.attr.as_ref()).any(written) {
        return None;
    }
    for e in reply.results.iter_mut().flat_map(|r| &mut r.entries) {
        e.attr = e.attr.filter(|a| !written(a));
    }
    Some(reply)
}
