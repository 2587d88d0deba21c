//! The metadata server as a process: the thin shell around the pure cores and `consensus`.
//!
//! | file | idea |
//! |---|---|
//! | `service.rs` | requests as they arrive: who may ask what, dispatch |
//! | `reads.rs` | lists that change nothing: read after a barrier |
//! | `changes.rs` | lists that change something: through the log, each once ([`crate::request_dedup`]) |
//! | `recalls.rs` | the leases under which both are answered |
//! | `machine.rs` | what the log is applied to |
//! | `followers.rs` | reads while this server does not lead ([`crate::recent_changes`]) |
//! | `heavy.rs`, `fair.rs` | lists that are much work wait for each other; clients take turns |
//! | `leader.rs` | what only the leader does: membership ticks, session terms, orphans |
//! | `chunks.rs`, `size_recovery.rs` | the leader's workers at the storage servers: cut, delete, look how far a file goes |
//! | `anew.rs` | the leader's worker that brings back chains that hold nothing |
//! | `locks.rs` | clients wait for locks ([`crate::lock_waiters`]) |
//! | `members.rs` | changes of the group |
//! | `disk.rs`, `disk_space.rs` | starting from a folder; which changes its disk has space for |
//! | `scrub.rs` | looks for damage in the state |
//! | `config.rs`, `admin.rs`, `places.rs` | configuration keys; gRPC; paths of damaged files, for logs |

mod admin;
mod anew;
mod changes;
mod chunks;
pub mod config;
pub mod disk;
mod disk_space;
mod fair;
mod followers;
mod heavy;
mod leader;
mod locks;
mod machine;
mod members;
mod places;
mod reads;
mod recalls;
mod scrub;
mod service;
mod size_recovery;

#[cfg(test)]
mod tests;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
pub use config::{Config, parse_peer};
pub use disk::start_on_disk;
use machine::Machine;
use parking_lot::Mutex;
use prost::Message as _;
use strake_fabric::{Endpoint, Env, Fabric, Listener, Relay, traffic, watch};
use strake_proto::{CapKey, Code, Error, Result, map::MapView, pb};
use strake_store::MetaStore;
use tokio::{sync::Notify, task::JoinHandle};

use crate::{
    cluster::{manager::Manager, recovery, slow::words},
    consensus::{self, Leadership, LogStore, Node},
    lock_waiters::LockWaiters,
    request_dedup::RequestDedup,
    sessions::{Sessions, owners::Owners},
};
use disk_space::{DiskSpace, Need};
use fair::Fair;
use followers::Following;
use heavy::Heavy;
use recalls::Recalls;

/// What a server runs on; everything outside of it comes from here.
pub struct Parts {
    pub env: Env,
    pub fabric: Arc<dyn Fabric>,
    pub log: Arc<dyn LogStore>,
    pub store: Arc<dyn MetaStore>,
    /// For making capabilities.
    pub cap_key: CapKey,
    /// Names the group of metadata servers: the same on all its members, different in other clusters.
    pub cluster: [u8; 16],
}

/// A running metadata server. Dropping it stops it.
pub struct MdsServer {
    mds: Arc<Mds>,
    endpoint: Endpoint,
    listener: Option<Listener>,
    tasks: Vec<JoinHandle<()>>,
    /// Of the folder it runs on, if it does.
    lock: Option<std::fs::File>,
}

/// What the leader knows and nobody else: gone with its term.
struct Lead {
    term: u64,
    manager: Manager,
    sessions: Sessions,
    lock_waiters: LockWaiters,
}

/// What all parts of the shell share.
struct Mds {
    cfg: Config,
    env: Env,
    machine: Arc<Machine>,
    recalls: Arc<Recalls>,
    node: Node,
    cap_key: CapKey,
    leadership: watch::Receiver<Leadership>,
    lead: Mutex<Option<Lead>>,
    links: chunks::Links,
    relay: Relay,
    disk_space: DiskSpace,
    following: Following,
    heavy: Heavy,
    fair: Fair,
    owners: Mutex<Owners>,
    request_dedup: Mutex<RequestDedup>,
    /// A reply waits for a file to be cut.
    trim_wanted: Notify,
    cuts_made: Mutex<chunks::CutsMade>,
    /// Somebody who waits for a lock may have his turn.
    turns: watch::Sender<u64>,
    advertised: OnceLock<Endpoint>,
    /// Requests of clients that only servers may send.
    refused: AtomicU64,
    /// A state that was found damaged when this server started.
    set_aside: Option<Error>,
    started: Duration,
}

/// What a server's folder is on.
struct Disk {
    /// The file that reserves space, see [`disk_space`].
    reserve_file: Option<PathBuf>,
    /// Its size, bytes.
    reserve: u64,
    /// Bytes the Raft log takes at once.
    segment: u64,
    /// What was wrong with a state that was set aside.
    set_aside: Option<Error>,
}

/// Starts a server on its parts and returns when it listens. It serves clients once a leader is elected.
pub async fn start(cfg: Config, parts: Parts) -> Result<MdsServer> {
    let reserve = cfg.reserve_bytes.unwrap_or(0);
    start_with(cfg, parts, Disk { reserve_file: None, reserve, segment: crate::data_dir::LOG_BYTES, set_aside: None })
        .await
}

/// Bytes of the Raft log that are kept at least.
const LEAST_LOG_BYTES: u64 = 4 << 20;

async fn start_with(cfg: Config, parts: Parts, disk: Disk) -> Result<MdsServer> {
    cfg.check()?;
    let disk_space = DiskSpace::new(parts.store.clone(), disk.reserve_file, disk.reserve, disk.segment);
    // Before there is anything that must not wait.
    disk_space.look();
    let recalls = Arc::new(Recalls::new(parts.env.clone(), cfg.leases()));
    let machine = Arc::new(Machine::open(parts.store, recalls.clone())?);
    let peers: BTreeMap<u64, Endpoint> = cfg.peers.iter().filter(|p| p.0 != cfg.id).cloned().collect();
    let raft = consensus::Config {
        tick: Duration::from_millis(cfg.tick_ms),
        slow_write: Duration::from_millis(cfg.slow_disk_ms),
        log_bytes: disk.segment.max(LEAST_LOG_BYTES) as usize,
        ..consensus::Config::new(cfg.id, parts.cluster, peers)
    };
    let node = Node::start(raft, parts.env.clone(), parts.fabric.clone(), parts.log, machine.clone()).await?;
    let mds = Arc::new(Mds {
        env: parts.env.clone(),
        machine,
        recalls,
        leadership: node.leadership(),
        node,
        cap_key: parts.cap_key,
        lead: Mutex::new(None),
        links: chunks::Links::new(parts.fabric.clone()),
        relay: Relay::new(parts.fabric.clone()),
        disk_space,
        following: Following::default(),
        heavy: Heavy::default(),
        fair: Fair::default(),
        owners: Mutex::default(),
        request_dedup: Mutex::default(),
        trim_wanted: Notify::new(),
        cuts_made: Mutex::default(),
        turns: watch::Sender::new(0),
        advertised: OnceLock::new(),
        refused: AtomicU64::new(0),
        set_aside: disk.set_aside,
        started: parts.env.boot(),
        cfg,
    });
    let listener = parts.fabric.listen(&mds.cfg.listen, mds.clone()).await?;
    let endpoint = listener.endpoint().clone();
    let advertised = mds.cfg.advertise.clone().unwrap_or_else(|| endpoint.clone());
    mds.node.set_endpoint(advertised.clone());
    let _ = mds.advertised.set(advertised);
    let follower = mds.clone();
    let follow = async move { follower.follow_map().await };
    let mut tasks = vec![
        mds.env.spawn(leader::run(mds.clone())),
        mds.env.spawn(follow),
        mds.env.spawn(followers::run(mds.clone())),
        mds.env.spawn(scrub::run(mds.clone())),
    ];
    if disk.reserve > 0 {
        tasks.push(mds.env.spawn(watch_disk_space(mds.clone())));
    }
    tracing::info!(id = mds.cfg.id, at = %endpoint, "metadata server listens");
    Ok(MdsServer { mds, endpoint, listener: Some(listener), tasks, lock: None })
}

/// Also members that do not lead give up their reserve when they need it.
async fn watch_disk_space(mds: Arc<Mds>) {
    loop {
        mds.node.set_disk_full(mds.disk_space.look().0);
        tokio::time::sleep(DISK_SPACE_TICK).await;
    }
}

impl MdsServer {
    /// Where it listens.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint.clone()
    }

    /// What `strake status` shows.
    pub fn status(&self) -> pb::StatusReply {
        self.mds.status()
    }

    /// Whether this server is the leader and serves clients.
    pub fn leads(&self) -> bool {
        self.mds.leading().is_ok()
    }

    /// The consensus handle: leadership, transfer, membership of the group.
    pub fn node(&self) -> &Node {
        &self.mds.node
    }

    /// Hands leadership over if it can, then stops. What was acknowledged is durable already.
    pub async fn shutdown(mut self) {
        if self.mds.leading().is_ok() {
            let _ = tokio::time::timeout(Duration::from_secs(1), self.mds.node.transfer(0)).await;
        }
        self.listener = None;
        self.mds.node.shutdown().await;
    }

    /// LockWaiters until this server has stopped by itself for good, and says why: its log or state failed, or (`NotMember`) it
    /// was removed from the group, which its folder then says, too. The process should end then.
    pub async fn stopped(&self) -> Error {
        let cause = self.mds.node.stopped().await;
        if cause.code == Code::NotMember && self.lock.is_some() {
            disk::mark_removed(&self.mds.cfg, self.mds.node.cluster());
        }
        cause
    }
}

impl Drop for MdsServer {
    fn drop(&mut self) {
        for t in self.tasks.drain(..) {
            t.abort();
        }
        // Without a runtime nothing runs any more that would have to be stopped.
        if tokio::runtime::Handle::try_current().is_ok() {
            let node = self.mds.node.clone();
            self.mds.env.spawn(async move { node.shutdown().await });
        }
    }
}

impl Mds {
    /// This server's node id in the map: its Raft id, which the configuration keeps small.
    fn own_id(&self) -> u32 {
        u32::try_from(self.cfg.id).unwrap_or(0)
    }

    fn map(&self) -> Arc<MapView> {
        self.machine.namespace.map()
    }

    fn leading(&self) -> Result<u64> {
        self.with_lead(|l| Ok(l.term))
    }

    /// Runs `f` on the leader's knowledge, or says who leads.
    fn with_lead<R>(&self, f: impl FnOnce(&mut Lead) -> Result<R>) -> Result<R> {
        let l = *self.leadership.borrow();
        let mut lead = self.lead.lock();
        match lead.as_mut() {
            Some(lead) if l.ready && lead.term == l.term => f(lead),
            _ => {
                let hint = if l.leader == self.cfg.id { 0 } else { l.leader };
                Err(Error::not_leader(u32::try_from(hint).unwrap_or(0)))
            }
        }
    }

    /// Has a command agreed on and applied. Errors of consensus and of the command itself alike; `NoSpc`: this server's
    /// disk has no room for it.
    async fn propose(&self, command: pb::log_command::Command) -> Result<pb::LogReply> {
        self.disk_space.check(Need::of(&command))?;
        self.propose_anyway(command).await
    }

    async fn propose_anyway(&self, command: pb::log_command::Command) -> Result<pb::LogReply> {
        let command = pb::LogCommand { now_ns: self.env.unix_ns(), command: Some(command) };
        let bytes: Bytes = self.node.propose(command.encode_to_vec().into()).await?;
        let reply = pb::LogReply::decode(bytes)
            .map_err(|e| Error::new(Code::Io, format!("a command's reply cannot be read: {e}")))?;
        match reply.status {
            Some(s) if s.code != 0 => Err(s.into()),
            _ => Ok(reply),
        }
    }

    /// What was wrong with this server's own state, and what becomes of it.
    fn damage_notices(&self) -> Vec<String> {
        let raft = self.node.status();
        let mut all = Vec::new();
        match (raft.no_state, raft.damage.as_str()) {
            (true, "") => all.push("waits for a copy of the metadata state from the leader".into()),
            (true, why) => all.push(format!("its metadata state was damaged ({why}): waits for a copy from the leader")),
            (false, "") if raft.damages > 0 => all.push(format!(
                "its metadata state was found damaged {} times since it started, and copied anew: look after its disk",
                raft.damages
            )),
            (false, "") => {}
            (false, why) => all.push(format!(
                "its metadata state is damaged ({why}), and no other member has one to copy: see docs/operations.md, 'Damaged metadata'"
            )),
        }
        all.extend(self.set_aside.as_ref().map(|why| {
            format!("its metadata state was damaged when it started ({why}), was set aside and made anew: look after its disk")
        }));
        all
    }

    fn status(&self) -> pb::StatusReply {
        let ns = &self.machine.namespace;
        let (header, map, now) = (ns.header(), self.map(), self.env.boot());
        let mut notices = Vec::new();
        if self.leading().is_err() {
            notices.push("not the leader: idle times and opens of sessions are known to the leader only".into());
        }
        if self.disk_space.look().0 {
            notices.push("the disk is almost full: nothing new is accepted here until there is space".into());
        }
        notices.extend(self.damage_notices());
        let awaited = recovery::all_awaited(&map.map);
        if !awaited.is_empty() {
            notices.push(format!(
                "since the recovery {} chains wait to hear from targets {awaited:?}: start their servers, or see `strake mds give-up`",
                map.map.doubts.len()
            ));
        }
        let slow = self.slow_targets();
        notices.extend(slow_notices(&map.map, &slow));
        let lead = self.lead.lock();
        let sessions = ns.sessions().into_iter().map(|(id, s)| pb::SessionStatus {
            id,
            hostname: s.hostname,
            pid: s.pid,
            version: s.version,
            idle_ms: lead.as_ref().and_then(|l| l.sessions.idle_of(now, id)).map_or(0, |d| d.as_millis() as u64),
            opens: lead.as_ref().map_or(0, |l| l.sessions.opens_of(id) as u32),
            locks: ns.locked_by(id),
        });
        let targets = map.map.targets.iter().map(|t| pb::TargetStatus {
            id: t.id,
            capacity: t.capacity,
            used: t.used,
            lease_left_ms: lead.as_ref().map_or(0, |l| l.manager.lease_left(now, t).as_millis() as u64),
            slow: slow.iter().find(|s| s.target == t.id).and_then(|s| s.slow),
            ..Default::default()
        });
        pb::StatusReply {
            refused: Vec::new(),
            role: "mds".into(),
            node: self.own_id(),
            name: self.cfg.name(),
            version: env!("CARGO_PKG_VERSION").into(),
            pid: u64::from(std::process::id()),
            uptime_ms: now.saturating_sub(self.started).as_millis() as u64,
            raft: Some(self.node.status()),
            sessions: sessions.collect(),
            targets: targets.collect(),
            inodes: header.inodes,
            orphans: ns.orphans(STATUS_LIMIT).len() as u64,
            gc_queue: ns.gc_waiting(STATUS_LIMIT) as u64,
            notices,
            roads: traffic::roads(self.links.fabric()),
            map: Some(map.map.clone()),
            locks: ns.locked_by(0),
            lock_waits: lead.as_ref().map_or(0, |l| l.lock_waiters.len() as u64),
            follower_reads: self.following.answered.load(Relaxed),
            follower_refusals: self.following.refused.load(Relaxed),
        }
    }
}

/// What is slow, and what is drained for that.
fn slow_notices(map: &pb::ClusterMap, slow: &[pb::SlowTarget]) -> Vec<String> {
    let drained = map.targets.iter().filter_map(|t| Some((t.id, t.slow.as_ref()?)));
    let named = |(id, s): (u32, &pb::Slow)| {
        format!(
            "target {id} is drained because it was slow ({}): replace its device, or `strake target keep {id}`",
            words(s)
        )
    };
    let mut all: Vec<String> = drained.clone().map(named).collect();
    let others = slow.iter().filter(|s| drained.clone().all(|(id, _)| id != s.target));
    all.extend(others.filter_map(|s| Some(format!("target {} is slow: {}", s.target, words(s.slow.as_ref()?)))));
    all
}

const DISK_SPACE_TICK: Duration = Duration::from_millis(250);

/// Queues are counted up to here for `status`.
const STATUS_LIMIT: usize = 10_000;
