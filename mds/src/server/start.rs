//! Starts and stops a metadata server, made of its parts.

use futures_util::future::BoxFuture;
use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, OnceLock, atomic::AtomicU64},
    time::Duration,
};

use parking_lot::Mutex;
use strake_fabric::{Endpoint, Fabric, Listener};
use strake_links::Relay;
use strake_proto::{CapKey, Code, Error, Result, pb};
use strake_runtime::Env;
use strake_store::MetaStore;
use tokio::task::JoinHandle;

use super::{
    changes::Changes,
    chunks::Trims,
    config::{Config, ReadCheck},
    disk_space::DiskSpace,
    fair::Fair,
    followers::{self, Followers},
    leader::{self, Leader},
    links::Links,
    locks::LockService,
    machine::Machine,
    member::Member,
    membership::Membership,
    reads::Reads,
    recalls::Recalls,
    scrub,
    service::Mds,
    session_service::SessionService,
    status,
};
use crate::{
    consensus::{self, LogStore, Node},
    data_dir::{LOG_BYTES, Record, State},
};

/// Least bytes of the Raft log that are kept.
const LEAST_LOG_BYTES: u64 = 4 << 20;
const DISK_SPACE_TICK: Duration = Duration::from_millis(250);

/// What a server runs on; everything outside of it comes in here.
pub struct Parts {
    pub env: Env,
    pub fabric: Arc<dyn Fabric>,
    pub log: Arc<dyn LogStore>,
    pub store: Arc<dyn MetaStore>,
    /// For making capabilities.
    pub cap_key: CapKey,
    /// Names the group of metadata servers: the same on all its members, different in other
    /// clusters.
    pub cluster: [u8; 16],
}

/// A running metadata server. Dropping it stops it.
pub struct MdsServer {
    pub(super) mds: Arc<Mds>,
    endpoint: Endpoint,
    listener: Option<Listener>,
    pub(super) tasks: Vec<JoinHandle<()>>,
    /// The lock of the folder it runs on, if it has one.
    pub(super) lock: Option<std::fs::File>,
}

/// The disk that holds a server's folder.
pub(super) struct Disk {
    /// The file that reserves space, see [`super::disk_space`].
    pub reserve_file: Option<PathBuf>,
    /// Its size, bytes.
    pub reserve: u64,
    /// Bytes that the Raft log allocates at once.
    pub segment: u64,
    /// The error of a state that was set aside.
    pub set_aside: Option<Error>,
}

/// Starts a server on its parts and returns when it listens. It serves clients once a leader is
/// elected.
pub async fn start(cfg: Config, parts: Parts) -> Result<MdsServer> {
    let reserve = cfg.reserve_bytes.unwrap_or(0);
    start_with(
        cfg,
        parts,
        Disk { reserve_file: None, reserve, segment: LOG_BYTES, set_aside: None },
    )
    .await
}

pub(super) fn start_with(
    cfg: Config,
    parts: Parts,
    disk: Disk,
) -> BoxFuture<'static, Result<MdsServer>> {
    Box::pin(async move {
        cfg.check()?;
        let disk_space =
            DiskSpace::new(parts.store.clone(), disk.reserve_file, disk.reserve, disk.segment);
        // Done first, while no request waits.
        disk_space.look();
        let recalls = Arc::new(Recalls::new(parts.env.clone(), cfg.leases()));
        let machine = Arc::new(Machine::open(parts.store, recalls.clone(), cfg.feature_level)?);
        let peers: BTreeMap<u64, Endpoint> =
            cfg.peers.iter().filter(|p| p.0 != cfg.id).cloned().collect();
        let raft = consensus::Config {
            tick: Duration::from_millis(cfg.tick_ms),
            slow_write: Duration::from_millis(cfg.slow_disk_ms),
            log_bytes: disk.segment.max(LEAST_LOG_BYTES) as usize,
            level: cfg.feature_level,
            lease_reads: cfg.reads == ReadCheck::Lease,
            ..consensus::Config::new(cfg.id, parts.cluster, peers)
        };
        let node =
            Node::start(raft, parts.env.clone(), parts.fabric.clone(), parts.log, machine.clone())
                .await?;
        let member = Arc::new(Member {
            env: parts.env.clone(),
            machine: machine.clone(),
            recalls,
            leadership: node.leadership(),
            node,
            lead: Mutex::new(None),
            links: Links::new(parts.fabric.clone()),
            disk_space,
            advertised: OnceLock::new(),
            set_aside: disk.set_aside,
            started: parts.env.boot(),
            cfg,
        });
        let (mds, leader) = services(member, machine, parts.cap_key, parts.fabric.clone());
        let listener = parts.fabric.listen(&mds.member.cfg.listen, mds.clone()).await?;
        let endpoint = listener.endpoint().clone();
        let advertised = mds.member.cfg.advertise.clone().unwrap_or_else(|| endpoint.clone());
        mds.member.node.set_endpoint(advertised.clone());
        let _ = mds.member.advertised.set(advertised);
        let membership = mds.membership.clone();
        let mut tasks = vec![
            mds.member.env.spawn(leader::run(leader)),
            mds.member.env.spawn(async move { membership.follow_map().await }),
            mds.member.env.spawn(followers::run(mds.followers.clone())),
            mds.member.env.spawn(scrub::run(mds.member.clone())),
        ];
        if disk.reserve > 0 {
            tasks.push(mds.member.env.spawn(watch_disk_space(mds.member.clone())));
        }
        tracing::info!(id = mds.member.cfg.id, at = %endpoint, "metadata server listens");
        Ok(MdsServer { mds, endpoint, listener: Some(listener), tasks, lock: None })
    })
}

/// The parts that serve requests, and what this member does while it leads.
fn services(
    member: Arc<Member>,
    machine: Arc<Machine>,
    cap_key: CapKey,
    fabric: Arc<dyn Fabric>,
) -> (Arc<Mds>, Arc<Leader>) {
    let fair = Arc::new(Fair::new(machine));
    let sessions = Arc::new(SessionService::new(member.clone(), cap_key));
    let locks = Arc::new(LockService::new(member.clone()));
    let trims = Arc::new(Trims::new(member.clone()));
    let changes = Arc::new(Changes {
        member: member.clone(),
        sessions: sessions.clone(),
        locks: locks.clone(),
        trims: trims.clone(),
        fair: fair.clone(),
        request_dedup: Mutex::default(),
    });
    let reads = Reads {
        member: member.clone(),
        sessions: sessions.clone(),
        locks: locks.clone(),
        fair: fair.clone(),
    };
    let leader = Arc::new(Leader {
        member: member.clone(),
        sessions: sessions.clone(),
        changes: changes.clone(),
        locks: locks.clone(),
        trims,
    });
    let mds = Arc::new(Mds {
        sessions,
        locks,
        reads,
        changes,
        followers: Arc::new(Followers::new(member.clone(), fair)),
        membership: Arc::new(Membership { member: member.clone() }),
        relay: Relay::new(fabric),
        refused: AtomicU64::new(0),
        member,
    });
    (mds, leader)
}

/// Members that do not lead give up their reserve, too, when they need it.
async fn watch_disk_space(member: Arc<Member>) {
    loop {
        member.node.set_disk_full(member.disk_space.look().0);
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
        status::status(&self.mds)
    }

    /// Whether this server is the leader and serves clients.
    pub fn leads(&self) -> bool {
        self.mds.member.leading().is_ok()
    }

    /// The consensus handle: leadership, transfer, membership of the group.
    pub fn node(&self) -> &Node {
        &self.mds.member.node
    }

    /// Hands leadership over if it can, then stops. Acknowledged changes are durable already.
    pub fn shutdown(mut self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            if self.mds.member.leading().is_ok() {
                let _ =
                    tokio::time::timeout(Duration::from_secs(1), self.mds.member.node.transfer(0))
                        .await;
            }
            self.listener = None;
            self.mds.member.node.shutdown().await;
        })
    }

    /// Waits until this server has stopped by itself for good, and returns the reason: its log or
    /// state failed, or (`NotMember`) it was removed from the group, which is then recorded in its
    /// folder. The process should end then.
    pub async fn stopped(&self) -> Error {
        let cause = self.mds.member.node.stopped().await;
        if cause.code == Code::NotMember && self.lock.is_some() {
            mark_removed(&self.mds.member.cfg, self.mds.member.node.cluster());
        }
        cause
    }
}

impl Drop for MdsServer {
    fn drop(&mut self) {
        for t in self.tasks.drain(..) {
            t.abort();
        }
        // Without a runtime nothing is running that would have to be stopped.
        if tokio::runtime::Handle::try_current().is_ok() {
            let node = self.mds.member.node.clone();
            self.mds.member.env.spawn(async move { node.shutdown().await });
        }
    }
}

/// Records in the folder that its member was removed, so that it is refused from now on.
pub(super) fn mark_removed(cfg: &Config, cluster: [u8; 16]) {
    if let Err(e) = (Record { member: cfg.id, cluster, state: State::Removed }).write(&cfg.dir) {
        tracing::warn!("cannot mark the folder as a removed member's: {e}");
    }
}
