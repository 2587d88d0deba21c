//! Raft messages to the other members: one task and one bounded queue per peer. A message that
//! finds its queue full is dropped; Raft sends it again. One batch is in flight at a time, which
//! keeps messages in order.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use prost::Message as _;
use protobuf::Message as _;
use raft::eraftpb;
use strake_fabric::{Connection, Endpoint, Fabric, Message};
use strake_proto::{Code, Result, level, opcode, pb};
use strake_runtime::Env;
use tokio::{sync::mpsc, task::JoinHandle};

use super::types::StateMachine;

const QUEUE: usize = 1024;
/// Bytes of messages in one batch; one message may be longer.
const BATCH: usize = 2 << 20;
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// What every batch from this member says about it, and what its sending tasks use.
pub(super) struct Sender {
    pub id: u64,
    pub cluster: [u8; 16],
    pub stamp: u64,
    /// The newest feature level that this program knows.
    pub level: u32,
    /// For how long this member gives no vote after it has heard from its leader.
    pub vote_wait: Duration,
    pub env: Env,
    pub fabric: Arc<dyn Fabric>,
    pub health: Arc<Health>,
    pub words: mpsc::Sender<Word>,
    pub sm: Arc<dyn StateMachine>,
}

/// What this member reports about itself with every batch.
#[derive(Default)]
pub(super) struct Health {
    pub applied: AtomicU64,
    /// Bits as in [`super::members`].
    pub disk: AtomicU32,
    /// The endpoint of this member; set once it listens.
    pub endpoint: OnceLock<Endpoint>,
}

/// What the transport reports to the driver.
pub(super) enum Word {
    /// A batch to this peer may be lost.
    Lost(u64),
    /// A peer says that this member was removed, or that its group was recovered without it.
    Removed(strake_proto::Error),
}

struct Peer {
    endpoint: Endpoint,
    queue: mpsc::Sender<eraftpb::Message>,
    task: JoinHandle<()>,
}

pub(super) struct Peers {
    sender: Arc<Sender>,
    peers: Mutex<BTreeMap<u64, Peer>>,
}

impl Sender {
    pub(super) fn batch(&self, to: u64, messages: &[eraftpb::Message]) -> Result<Message> {
        let encode = |m: &eraftpb::Message| {
            m.write_to_bytes()
                .map(Into::into)
                .map_err(|e| strake_proto::Error::new(Code::Inval, e.to_string()))
        };
        let (cluster_level, level_index) = self.sm.level();
        let batch = pb::RaftBatch {
            from: self.id,
            to,
            messages: messages.iter().map(encode).collect::<Result<_>>()?,
            cluster: self.cluster.to_vec().into(),
            stamp: self.stamp,
            applied: self.health.applied.load(Relaxed),
            disk: self.health.disk.load(Relaxed),
            endpoint: self.health.endpoint.get().map(Endpoint::to_string).unwrap_or_default(),
            incarnation: self.sm.incarnation().map(|i| i.0),
            level: self.level,
            cluster_level,
            level_index,
            vote_wait_ms: self.vote_wait.as_millis() as u32,
        };
        Ok(Message::new(opcode::RAFT, batch.encode_to_vec()))
    }

    /// Sends an empty batch on a new connection: the peer learns the stamp of this member's log, and
    /// its answer says which feature level its program knows.
    pub(super) async fn greet(&self, to: u64, conn: &dyn Connection) -> Result<u32> {
        let answer = conn.call(self.batch(to, &[])?, CALL_TIMEOUT).await?;
        let ack = pb::RaftAck::decode(answer.body);
        Ok(ack.map_err(|e| strake_proto::Error::new(Code::Protocol, e.to_string()))?.level)
    }

    /// `Stale` if a peer whose program knows levels up to `knows` must not get these messages: it
    /// would apply an entry by other rules. The state of this member may not have the level yet that
    /// an entry needs.
    pub(super) fn may_have(
        &self,
        to: u64,
        knows: u32,
        messages: &[eraftpb::Message],
    ) -> Result<()> {
        if knows >= self.level {
            return Ok(());
        }
        let entries = messages.iter().flat_map(|m| m.entries.iter());
        let needed = entries.map(|e| self.sm.needed_by(&e.data)).max().unwrap_or(0);
        let cluster = self.sm.level().0.max(needed);
        level::check(knows, cluster, Code::Stale, || format!("metadata server {to}"))
    }
}

impl Peers {
    pub(super) fn new(sender: Sender) -> Peers {
        Peers { sender: Arc::new(sender), peers: Mutex::default() }
    }
    pub(super) fn sender(&self) -> Arc<Sender> {
        self.sender.clone()
    }

    /// Sets the endpoint of a member. Connects at once, so that members know each other's logs
    /// before they need to.
    pub(super) fn set(&self, id: u64, endpoint: Endpoint) {
        let mut peers = self.peers.lock();
        if id == self.sender.id || peers.get(&id).is_some_and(|p| p.endpoint == endpoint) {
            return;
        }
        let (queue, rx) = mpsc::channel(QUEUE);
        let task = self.sender.env.spawn(run(self.sender.clone(), id, endpoint.clone(), rx));
        if let Some(old) = peers.insert(id, Peer { endpoint, queue, task }) {
            old.task.abort();
        }
    }
    pub(super) fn remove(&self, id: u64) {
        if let Some(p) = self.peers.lock().remove(&id) {
            p.task.abort();
        }
    }
    pub(super) fn endpoint(&self, id: u64) -> Option<Endpoint> {
        self.peers.lock().get(&id).map(|p| p.endpoint.clone())
    }
    pub(super) fn send(&self, m: eraftpb::Message) {
        if let Some(p) = self.peers.lock().get(&m.to) {
            let _ = p.queue.try_send(m);
        }
    }
}

impl Drop for Peers {
    fn drop(&mut self) {
        self.peers.lock().values().for_each(|p| p.task.abort());
    }
}

async fn run(
    s: Arc<Sender>,
    to: u64,
    endpoint: Endpoint,
    mut queue: mpsc::Receiver<eraftpb::Message>,
) {
    let mut backoff = BACKOFF.0;
    loop {
        match s.fabric.connect(&endpoint, None).await {
            Ok(conn) => {
                if let Err(e) = feed(&s, to, &*conn, &mut queue, &mut backoff).await {
                    match e.code {
                        Code::Stale | Code::Unauthenticated => {
                            tracing::error!(peer = to, %endpoint, "raft: {e}")
                        }
                        Code::NotMember => drop(s.words.try_send(Word::Removed(e))),
                        _ => tracing::debug!(peer = to, %endpoint, "raft connection: {e}"),
                    }
                }
                conn.close();
            }
            Err(e) => tracing::debug!(peer = to, %endpoint, "raft: cannot connect: {e}"),
        }
        if queue.is_closed() {
            return;
        }
        let _ = s.words.try_send(Word::Lost(to));
        let jitter =
            Duration::from_millis(s.env.random_u64() % (backoff.as_millis() as u64 / 4 + 1));
        tokio::time::sleep(backoff + jitter).await;
        backoff = (backoff * 2).min(BACKOFF.1);
        // Messages that waited are outdated.
        while queue.try_recv().is_ok() {}
    }
}

/// Sends until something fails.
async fn feed(
    s: &Sender,
    to: u64,
    conn: &dyn Connection,
    queue: &mut mpsc::Receiver<eraftpb::Message>,
    backoff: &mut Duration,
) -> Result<()> {
    let knows = s.greet(to, conn).await?;
    s.may_have(to, knows, &[])?;
    *backoff = BACKOFF.0;
    let mut next = None;
    loop {
        let first = match next.take() {
            Some(m) => m,
            None => match queue.recv().await {
                Some(m) => m,
                None => return Ok(()),
            },
        };
        let mut size = first.compute_size() as usize;
        let mut batch = vec![first];
        while let Ok(m) = queue.try_recv() {
            size += m.compute_size() as usize;
            if size > BATCH {
                next = Some(m);
                break;
            }
            batch.push(m);
        }
        s.may_have(to, knows, &batch)?;
        match conn.call(s.batch(to, &batch)?, CALL_TIMEOUT).await {
            Ok(_) => {}
            Err(e) if e.code == Code::Overloaded => drop(s.words.try_send(Word::Lost(to))),
            Err(e) => return Err(e),
        }
    }
}
