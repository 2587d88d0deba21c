//! The handle to a member, which the server calls. The driver's task does the work.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use prost::Message as _;
use protobuf::Message as _;
use raft::eraftpb;
use strake_fabric::{Endpoint, Fabric, Message};
use strake_proto::{Code, Error, Incarnation, Kin, Result, level, opcode, pb};
use strake_runtime::{Env, watch};
use tokio::sync::{mpsc, oneshot};

use super::{
    driver::{Batch, Control, Driver, Inputs, Proposal, RaftInput, Shared},
    leader_lease::{Covered, PublishedLease},
    log::LogStore,
    members::{DISK_FULL, Group},
    reads,
    transport::{Health, Peers, Sender},
    types::{Config, Leadership, MemberChange, StateMachine},
};

/// Messages from peers that wait for the driver.
const INBOX: usize = 4096;

/// A member of the group. Clones are the same member; it ends with [`Node::shutdown`] or
/// [`Env::kill`].
#[derive(Clone)]
pub struct Node {
    cfg: Arc<Config>,
    env: Env,
    shared: Arc<Shared>,
    peers: Arc<Peers>,
    raft: mpsc::Sender<RaftInput>,
    proposals: mpsc::Sender<Proposal>,
    reads: mpsc::Sender<reads::Reply>,
    control: mpsc::Sender<Control>,
    leadership: watch::Receiver<Leadership>,
}

impl Node {
    /// Loads the log and starts taking part. `Corrupt`: the log or the state is not whole; the
    /// message says more.
    pub async fn start(
        cfg: Config,
        env: Env,
        fabric: Arc<dyn Fabric>,
        log: Arc<dyn LogStore>,
        sm: Arc<dyn StateMachine>,
    ) -> Result<Node> {
        let image = log.load().await?;
        let cfg = Arc::new(cfg);
        let (words, words_rx) = mpsc::channel(64);
        let health = Arc::new(Health::default());
        let (id, cluster, stamp) = (cfg.id, cfg.cluster, image.stamp);
        let (level, sm_of_sender) = (cfg.level, sm.clone());
        let vote_wait = cfg.vote_wait();
        let sender = Sender {
            id,
            cluster,
            stamp,
            level,
            vote_wait,
            env: env.clone(),
            fabric,
            health,
            words,
            sm: sm_of_sender,
        };
        let peers = Arc::new(Peers::new(sender));
        let (raft, raft_rx) = mpsc::channel(INBOX);
        let (proposals, proposals_rx) = mpsc::channel(cfg.queue.max(1));
        let (reads, reads_rx) = mpsc::channel(cfg.queue.max(1));
        let (control, control_rx) = mpsc::channel(64);
        let (watch_tx, leadership) = watch::channel(Leadership::default());
        let shared = Arc::new(Shared {
            status: Mutex::default(),
            stopped: watch::channel(None).0,
            lease: PublishedLease::default(),
        });
        let inputs = Inputs {
            raft: raft_rx,
            proposals: proposals_rx,
            reads: reads_rx,
            control: control_rx,
            words: words_rx,
        };
        let driver = Driver::new(
            cfg.clone(),
            env.clone(),
            image,
            log,
            sm,
            peers.clone(),
            shared.clone(),
            watch_tx,
        )?;
        for (id, endpoint) in &cfg.peers {
            peers.set(*id, endpoint.clone());
        }
        env.spawn(driver.run(inputs));
        Ok(Node { cfg, env, shared, peers, raft, proposals, reads, control, leadership })
    }

    /// The error for callers, which may turn to another member. `NotMember`: this member will never
    /// serve again.
    fn gone(&self) -> Error {
        match self.shared.stopped.borrow().clone() {
            Some(e) if e.code == Code::NotMember => e,
            Some(e) => Error::new(
                Code::Disconnected,
                format!("this metadata server has stopped: {}", e.message),
            ),
            None => Error::new(Code::Disconnected, "this metadata server is no longer the leader"),
        }
    }

    /// The error for other members. They would take `NotMember` as their own end, and this member's
    /// end must not end them.
    fn gone_to_peer(&self) -> Error {
        Error { code: Code::Disconnected, ..self.gone() }
    }

    fn full<T>(&self, e: &mpsc::error::TrySendError<T>) -> Error {
        match e {
            mpsc::error::TrySendError::Full(_) => {
                Error::new(Code::Overloaded, "the metadata server is overloaded")
            }
            mpsc::error::TrySendError::Closed(_) => self.gone(),
        }
    }

    /// Gets `data` into the log and applied; returns the reply of applying it. `NotLeader`,
    /// `Overloaded`, `NoSpc`: it did not run. `Disconnected`: leadership was lost, it may or may
    /// not run.
    pub async fn propose(&self, data: Bytes) -> Result<Bytes> {
        if data.len() > self.cfg.max_entry {
            let m = format!(
                "a metadata change of {} bytes is longer than {}",
                data.len(),
                self.cfg.max_entry
            );
            return Err(Error::new(Code::TooBig, m));
        }
        let (reply, rx) = oneshot::channel();
        self.proposals.try_send(Proposal { data, reply }).map_err(|e| self.full(&e))?;
        rx.await.unwrap_or_else(|_| Err(self.gone()))
    }

    /// Returns when this member's applied state includes everything that any member answered before
    /// the call, and this member led during the call. `NotLeader` otherwise.
    pub async fn read_barrier(&self) -> Result<()> {
        let (reply, rx) = oneshot::channel();
        match self.shared.lease.covers(|| self.env.boot()) {
            Covered::Yes => return Ok(()),
            Covered::Renew => {
                // If it cannot be asked for now, the first read after the lease's end asks.
                let _ = self.reads.try_send(reply);
                return Ok(());
            }
            Covered::No => {}
        }
        self.reads.try_send(reply).map_err(|e| self.full(&e))?;
        rx.await.unwrap_or_else(|_| Err(self.gone()))
    }

    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.clone()
    }

    pub fn status(&self) -> pb::RaftStatus {
        self.shared.status.lock().clone()
    }

    /// Waits until this member has stopped for good, and says why. The process should end then.
    pub async fn stopped(&self) -> Error {
        let mut rx = self.shared.stopped.subscribe();
        let found = rx.wait_for(Option::is_some).await.ok().and_then(|e| e.clone());
        found.unwrap_or_else(|| self.gone())
    }

    /// Answers [`opcode::RAFT`] and [`opcode::SNAPSHOT`]; to be called only for servers of this
    /// cluster.
    pub async fn handle(&self, request: Message) -> Result<Message> {
        match request.opcode {
            opcode::RAFT => self.batch(&request.body).await,
            opcode::SNAPSHOT => self.chunk(&request.body).await,
            other => Err(strake_fabric::unknown_opcode(other)),
        }
    }

    fn check_address(
        &self,
        from: u64,
        to: u64,
        cluster: &[u8],
        incarnation: Option<u64>,
    ) -> Result<()> {
        if cluster != self.cfg.cluster {
            return Err(Error::new(
                Code::Unauthenticated,
                "this metadata server belongs to another cluster",
            ));
        }
        // Before the ids are checked: a member of a former incarnation may know this address as
        // another member's.
        if let Some(theirs) = incarnation {
            self.meet(Incarnation(theirs), Some(from))?;
        }
        if to != self.cfg.id || from == 0 || from == self.cfg.id {
            let m = format!(
                "a raft message from {from} to {to} reached metadata server {}",
                self.cfg.id
            );
            return Err(Error::new(Code::Inval, m));
        }
        Ok(())
    }

    /// `Stale` for a member whose program does not know the level of this member's state. Older
    /// programs log this error, and no other, where everybody sees it.
    fn check_level(&self, from: u64, knows: u32) -> Result<()> {
        let (cluster, _) = self.peers.sender().sm.level();
        level::check(knows, cluster, Code::Stale, || format!("metadata server {from}"))
    }

    fn ack(&self) -> Vec<u8> {
        pb::RaftAck { level: self.cfg.level }.encode_to_vec()
    }

    /// Compares incarnations with another server of this cluster; `member` if it is a metadata
    /// server. `NotMember`: the other server belongs to an incarnation of the group that is over.
    /// `NotLeader`: this one does, and stops, or the two were recovered separately.
    pub fn meet(&self, theirs: Incarnation, member: Option<u64>) -> Result<()> {
        let Some(own) = self.peers.sender().sm.incarnation() else { return Ok(()) };
        match own.kin(theirs) {
            Kin::Same => Ok(()),
            Kin::Older => match member {
                Some(id) => Err(superseded(id, theirs, own)),
                None => Ok(()),
            },
            Kin::Newer => {
                let e = superseded(self.cfg.id, own, theirs);
                let _ = self.control.try_send(Control::Retire(e.clone()));
                Err(Error { code: Code::NotLeader, ..e })
            }
            Kin::Twin => Err(twins(own, theirs)),
        }
    }

    async fn batch(&self, body: &[u8]) -> Result<Message> {
        let batch =
            pb::RaftBatch::decode(body).map_err(|e| Error::new(Code::Protocol, e.to_string()))?;
        self.check_address(batch.from, batch.to, &batch.cluster, batch.incarnation)?;
        self.check_level(batch.from, batch.level)?;
        self.peers.sender().sm.compare_level(batch.cluster_level, batch.level_index);
        let decode = |b: &Bytes| {
            let m = eraftpb::Message::parse_from_bytes(b)
                .map_err(|e| Error::new(Code::Protocol, e.to_string()))?;
            if m.from == batch.from {
                Ok(m)
            } else {
                Err(Error::new(Code::Protocol, "a raft message of another sender"))
            }
        };
        let messages = batch.messages.iter().map(decode).collect::<Result<Vec<_>>>()?;
        let (reply, rx) = oneshot::channel();
        let batch = Batch {
            from: batch.from,
            stamp: batch.stamp,
            applied: batch.applied,
            disk: batch.disk,
            level: batch.level,
            vote_wait: Duration::from_millis(batch.vote_wait_ms.into()),
            endpoint: batch.endpoint.parse().ok(),
            messages,
        };
        self.input(RaftInput::Batch(batch, reply), rx).await?;
        Ok(Message::new(opcode::RAFT, self.ack()))
    }

    async fn input(&self, input: RaftInput, answer: oneshot::Receiver<Result<()>>) -> Result<()> {
        self.raft.try_send(input).map_err(|e| match e {
            mpsc::error::TrySendError::Full(_) => self.full(&e),
            mpsc::error::TrySendError::Closed(_) => self.gone_to_peer(),
        })?;
        answer.await.unwrap_or_else(|_| Err(self.gone_to_peer()))
    }

    async fn chunk(&self, body: &[u8]) -> Result<Message> {
        let chunk = pb::SnapshotChunk::decode(body)
            .map_err(|e| Error::new(Code::Protocol, e.to_string()))?;
        self.check_address(chunk.from, chunk.to, &chunk.cluster, chunk.incarnation)?;
        self.check_level(chunk.from, chunk.level)?;
        chunk.pairs.iter().try_for_each(|p| strake_store::check_key(&p.key))?;
        let (reply, rx) = oneshot::channel();
        self.input(RaftInput::Chunk(chunk, reply), rx).await?;
        Ok(Message::new(opcode::SNAPSHOT, self.ack()))
    }

    /// Hands leadership to `to`, or with 0 to the best successor. Returns when this member no
    /// longer leads, `TimedOut` if it still does after a while. `Inval`: `to` is not a voter or
    /// does not answer. `Busy`: no member can take over yet.
    pub async fn transfer(&self, to: u64) -> Result<()> {
        let (reply, rx) = oneshot::channel();
        self.control.try_send(Control::Transfer(to, reply)).map_err(|e| self.full(&e))?;
        rx.await.unwrap_or_else(|_| Err(self.gone()))?;
        let mut watch = self.leadership();
        let me = self.cfg.id;
        let limit = self.cfg.tick * (2 * self.cfg.election_ticks.1) as u32;
        match tokio::time::timeout(limit, watch.wait_for(|l| l.leader != me && l.leader != 0)).await
        {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::new(
                Code::TimedOut,
                "the other metadata server did not take over; is it up?",
            )),
        }
    }

    /// Changes the members; returns when the change is in force. `Inval`: it would be wrong, see
    /// [`Group::check_change`]. `Busy`: another change is under way, or a learner has not caught
    /// up. `Disconnected`: it may or may not happen.
    pub async fn change_members(&self, change: MemberChange) -> Result<()> {
        let (reply, rx) = oneshot::channel();
        self.control.try_send(Control::Change(change, reply)).map_err(|e| self.full(&e))?;
        rx.await.unwrap_or_else(|_| Err(self.gone()))
    }

    /// Whether this member has given up its state because it is damaged. If it has not, it does so
    /// now, provided that another member has a state.
    pub async fn gave_up_state(&self) -> bool {
        let (reply, rx) = oneshot::channel();
        self.control.try_send(Control::Damaged(reply)).is_ok() && rx.await.unwrap_or(false)
    }

    /// The group as this member knows it; a leader knows more.
    pub async fn group(&self) -> Result<Group> {
        let (reply, rx) = oneshot::channel();
        self.control.try_send(Control::Group(reply)).map_err(|e| self.full(&e))?;
        rx.await.map_err(|_| self.gone())
    }

    /// The stamp of this member's log: it differs from that of any later log of the same id.
    pub fn stamp(&self) -> u64 {
        self.peers.sender().stamp
    }

    /// The cluster that this member is configured for.
    pub fn cluster(&self) -> [u8; 16] {
        self.cfg.cluster
    }

    /// The endpoint at which the others reach this member; set once it listens.
    pub fn set_endpoint(&self, own: Endpoint) {
        let _ = self.peers.sender().health.endpoint.set(own);
    }

    /// Reports whether this member's disk is almost full. If it is, and another member's is not,
    /// that one is to lead.
    pub fn set_disk_full(&self, full: bool) {
        let sender = self.peers.sender();
        let disk = &sender.health.disk;
        if full {
            disk.fetch_or(DISK_FULL, Relaxed)
        } else {
            disk.fetch_and(!DISK_FULL, Relaxed)
        };
    }

    /// Stops calling a server that is no longer a member.
    pub fn forget_peer(&self, id: u64) {
        self.peers.remove(id);
    }

    /// Sets the endpoint of a member (it moved, or was added before this process started).
    pub fn set_peer(&self, id: u64, endpoint: Endpoint) {
        self.peers.set(id, endpoint);
    }

    /// The endpoint of another member, if known.
    pub fn endpoint_of(&self, id: u64) -> Option<Endpoint> {
        self.peers.endpoint(id)
    }

    /// Stops taking part. Proposals without an answer may or may not run.
    pub async fn shutdown(&self) {
        if self.control.send(Control::Stop).await.is_ok() {
            self.control.closed().await;
        }
    }
}

/// The error for metadata server `id` of incarnation `former`, when its group has the later
/// incarnation `now`.
fn superseded(id: u64, former: Incarnation, now: Incarnation) -> Error {
    let m = format!(
        "metadata server {id} is of incarnation {former} of its group, which was recovered \
         without it as {now}: its folder is of no further use, and its id must not be used again \
         (docs/operations.md, 'When the group is lost')"
    );
    Error::new(Code::NotMember, m)
}

/// The error for two incarnations that were both made from what was left of one group.
pub fn twins(own: Incarnation, theirs: Incarnation) -> Error {
    let m = format!(
        "the group was recovered twice: this metadata server is of incarnation {own}, the sender \
         of {theirs}; stop one of the two and discard it (docs/operations.md, 'When the group is \
         lost')"
    );
    Error::new(Code::NotLeader, m)
}
