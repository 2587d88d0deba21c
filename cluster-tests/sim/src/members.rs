//! What an administrator does to the metadata servers while everything else goes on: one is
//! replaced by a new one, as by `strake mds replace`, or the feature level of a cluster that was
//! made at level 0 is raised, as by `strake upgrade finish`.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use prost::Message as _;
use strake_fabric::{Endpoint, Fabric, Message, Role};
use strake_proto::{Code, Error, FEATURE_LEVEL, Result, opcode, pb};
use tokio::time::{Instant, sleep, timeout};

use crate::{cluster::Cluster, ledger::Kind, net::SimFabric, nodes::ANY_MDS};
use pb::members_request::Change;

/// The administrator's number on the network.
const ADMIN: u32 = 241;
/// That of the one who raises the feature level.
const UPGRADER: u32 = 243;
const PATIENCE: Duration = Duration::from_secs(2);
/// How many entries a learner may be behind when it is made a voter.
const CLOSE: u64 = 1000;
/// Longer than the group needs once nothing is broken any more.
const RECOVERY: Duration = Duration::from_secs(120);

/// A replacement, under way or complete.
pub struct Replacement {
    pub old: u32,
    over: Arc<AtomicBool>,
}

impl Replacement {
    /// Begins a replacement. `new` was started and belongs to no group yet.
    pub fn begin(cluster: &Cluster, old: u32, new: u32) -> Replacement {
        let (fabric, net) = (cluster.fabric(ADMIN, Role::Server), cluster.net.clone());
        let (over, nodes) = (Arc::new(AtomicBool::new(false)), cluster.nodes());
        let done = over.clone();
        tokio::spawn(async move {
            while !step(&fabric, old, new).await.unwrap_or(false) {
                sleep(Duration::from_millis(200)).await;
            }
            net.note(&format!("metadata server {new} has taken the place of {old}"));
            net.made(Kind::Replaced, nodes.iter().any(|n| net.is_busy(*n)));
            done.store(true, Ordering::Relaxed);
        });
        Replacement { old, over }
    }

    /// Whether the old server is no longer a member and may be removed.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Waits until it is complete; nothing may be broken any more.
    pub async fn ends(&self) -> Result<()> {
        let begun = Instant::now();
        while !self.is_over() {
            if begun.elapsed() > RECOVERY {
                let m = format!(
                    "metadata server {} is not replaced {RECOVERY:?} after the last fault",
                    self.old
                );
                return Err(Error::new(Code::TimedOut, m));
            }
            sleep(Duration::from_millis(500)).await;
        }
        Ok(())
    }
}

/// Does the next step by the leader's state. Returns whether nothing is left to do.
async fn step(fabric: &Arc<SimFabric>, old: u32, new: u32) -> Result<bool> {
    let (old, id) = (u64::from(old), u64::from(new));
    let (at, now) = leader(fabric).await?;
    let leads = u64::from(at) == old;
    let at_new = pb::MemberLearn { endpoint: Endpoint::Sim(new).to_string() };
    let stays = now.members.iter().find(|m| m.id == old);
    let next = match now.members.iter().find(|m| m.id == id) {
        None => Change::Learn(at_new),
        // The leader that added the learner was lost before it told the others its address.
        Some(m) if !m.voter && m.endpoint.is_empty() => Change::Learn(at_new),
        // A leader cannot be removed: another must take over first.
        Some(_) if leads => Change::Transfer(pb::MemberTransfer { to: 0 }),
        Some(m) if !m.voter => {
            if m.matched == 0 || m.copying || m.matched + CLOSE < now.last_index {
                return Ok(false);
            }
            Change::Step(pb::MemberStep { promote: vec![id], remove: vec![old] })
        }
        Some(_) => match stays {
            None => return Ok(now.former.contains(&(old as u32))),
            Some(m) if m.leaving => return Ok(false),
            Some(_) => Change::Step(pb::MemberStep { promote: vec![], remove: vec![old] }),
        },
    };
    ask(fabric, at, Some(next)).await.map(|_| false)
}

/// The server that says it leads, and its answer.
async fn leader(fabric: &Arc<SimFabric>) -> Result<(u32, pb::MembersReply)> {
    let mut last = Error::new(Code::NotLeader, "nobody was asked");
    for at in ANY_MDS {
        match ask(fabric, at, None).await {
            Ok(r) if r.leader == u64::from(at) => return Ok((at, r)),
            Ok(_) => {}
            Err(e) => last = e,
        }
    }
    Err(last)
}

async fn ask(fabric: &Arc<SimFabric>, at: u32, change: Option<Change>) -> Result<pb::MembersReply> {
    let asked = async {
        let link = fabric.connect(&Endpoint::Sim(at), None).await?;
        let body = pb::MembersRequest { change, levels: true }.encode_to_vec();
        let answer = link.call(Message::new(opcode::MEMBERS, body), PATIENCE).await;
        link.close();
        answer
    };
    let answer = timeout(PATIENCE, asked)
        .await
        .unwrap_or_else(|_| Err(Error::new(Code::TimedOut, "no answer")))?;
    pb::MembersReply::decode(answer.body).map_err(|e| Error::new(Code::Protocol, e.to_string()))
}

/// An upgrade, under way or complete.
pub struct Upgrade {
    over: Arc<AtomicBool>,
}

impl Upgrade {
    /// Raises the level from `after` on. `evict`: clients that have not reported do not count.
    pub fn begin(cluster: &Cluster, after: Duration, evict: bool) -> Upgrade {
        let (fabric, net) = (cluster.fabric(UPGRADER, Role::Server), cluster.net.clone());
        let over = Arc::new(AtomicBool::new(false));
        let done = over.clone();
        tokio::spawn(async move {
            sleep(after).await;
            while !raise(&fabric, evict).await.unwrap_or(false) {
                sleep(Duration::from_millis(200)).await;
            }
            net.note(&format!("the cluster has feature level {FEATURE_LEVEL}"));
            done.store(true, Ordering::Relaxed);
        });
        Upgrade { over }
    }

    /// Waits until it is complete and every metadata server has the level; nothing may be broken
    /// any more.
    pub async fn ends(&self, cluster: &Cluster) -> Result<()> {
        let begun = Instant::now();
        while !self.over.load(Ordering::Relaxed)
            || cluster.levels().iter().any(|l| *l != FEATURE_LEVEL)
        {
            if begun.elapsed() > RECOVERY {
                let m = format!(
                    "metadata servers have feature levels {:?} {RECOVERY:?} after the last fault",
                    cluster.levels()
                );
                return Err(Error::new(Code::TimedOut, m));
            }
            sleep(Duration::from_millis(500)).await;
        }
        Ok(())
    }
}

/// Asks the leader for the next level. Returns whether the cluster has the newest.
async fn raise(fabric: &Arc<SimFabric>, evict: bool) -> Result<bool> {
    let (at, now) = leader(fabric).await?;
    let level = now.levels.map_or(0, |l| l.level);
    if level == FEATURE_LEVEL {
        return Ok(true);
    }
    let request = pb::RaiseRequest { to: level + 1, evict };
    ask(fabric, at, Some(Change::Raise(request))).await.map(|_| false)
}
