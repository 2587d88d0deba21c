//! Management of the group of metadata servers while clients work: the requests of `strake mds
//! list|add|remove|transfer|replace`, and the cluster map that tells clients and storage servers
//! which members there are. See `docs/membership.md`.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use prost::Message as _;
use strake_fabric::{Endpoint, Message};
use strake_proto::{Code, Error, Ino, Result, SessionId, map::ROLE_MDS, opcode, pb};
use tokio::time::timeout;

use super::{evictions, levels, member::Member, wire::encode};
use crate::{
    cluster::{
        recovery,
        state::{self, FIRST_OSS_NODE},
    },
    consensus::{MemberChange, members::Group},
};
use pb::{log_command::Command, members_request::Change, repair::What};

/// How long a new server may take to answer which server it is.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Most pools of a cluster.
const MOST_POOLS: usize = 256;
/// Most sessions that one request ends.
const MOST_EVICTED: usize = 1024;
/// Most members that one step names.
const MAX_STEP: usize = 16;

fn inval(m: impl Into<String>) -> Error {
    Error::new(Code::Inval, m)
}

/// The node id of a member in the map.
fn node_id(id: u64) -> u32 {
    u32::try_from(id).unwrap_or(0)
}

/// See the module.
pub(super) struct Membership {
    pub member: Arc<Member>,
}

impl Membership {
    /// Lists or changes the members. `NotLeader`: the change was not made; ask the server that the
    /// error names.
    pub(super) async fn members(&self, request: pb::MembersRequest) -> Result<Bytes> {
        let (mut learner, asks_levels) = (0, request.levels);
        match request.change {
            None => {}
            Some(Change::Learn(l)) => learner = self.learn(&l.endpoint).await?,
            Some(Change::Step(s)) => self.step(s).await?,
            Some(Change::Transfer(t)) => self.transfer(t.to).await?,
            Some(Change::GiveUp(g)) => {
                self.member.leading()?;
                self.member.propose(Command::GiveUp(g)).await?;
            }
            Some(Change::Target(c)) => {
                self.member.leading()?;
                self.member.propose(Command::TargetChange(c)).await?;
            }
            Some(Change::Pool(p)) => self.change_pool(p).await?,
            Some(Change::Raise(r)) => levels::raise(&self.member, r).await?,
            Some(Change::Evict(e)) => self.evict(e).await?,
            Some(Change::Repair(r)) => {
                self.member.leading()?;
                self.member.node.read_barrier().await?;
                named(&r)
                    .into_iter()
                    .try_for_each(|ino| self.member.machine.namespace.check_record(ino))?;
                self.member.propose(Command::Repair(r)).await?;
            }
        }
        let group = self.member.node.group().await?;
        let leads = asks_levels && self.member.leading().is_ok();
        let levels = if leads { Some(levels::report(&self.member).await?) } else { None };
        Ok(encode(&pb::MembersReply { learner, levels, ..self.members_reply(&group) }))
    }

    /// Ends the sessions of clients that an administrator wants gone.
    async fn evict(&self, e: pb::EvictRequest) -> Result<()> {
        self.member.leading()?;
        if e.sessions.len() > MOST_EVICTED {
            return Err(inval(format!("at most {MOST_EVICTED} sessions at once")));
        }
        self.member.node.read_barrier().await?;
        let why = |id: SessionId| format!("session {id} was evicted by an administrator");
        let those = e.sessions.into_iter().map(|id| (id, why(id))).collect();
        evictions::evict(&self.member, those).await
    }

    /// Every client has the map, so the number of pools is limited to a sensible one. The request
    /// is checked before it is in the log.
    pub(super) async fn change_pool(&self, p: pb::PoolChange) -> Result<()> {
        self.member.leading()?;
        self.member.node.read_barrier().await?;
        let map = self.member.map();
        state::pool_change(&mut map.map.clone(), &p)?;
        if p.action == state::pool_action::NEW && map.map.pools.len() >= MOST_POOLS {
            return Err(Error::new(
                Code::NoSpc,
                format!(
                    "there are {MOST_POOLS} pools, which is the limit; destroy one that is \
                         not needed"
                ),
            ));
        }
        self.member.propose(Command::PoolChange(p)).await.map(drop)
    }

    fn members_reply(&self, group: &Group) -> pb::MembersReply {
        let map = self.member.map();
        let member = |m: &crate::consensus::members::Member| {
            let node = map.node(node_id(m.id));
            let known = node.and_then(|n| n.endpoints.first().cloned());
            pb::Member {
                id: m.id,
                endpoint: known
                    .or_else(|| m.endpoint.as_ref().map(Endpoint::to_string))
                    .unwrap_or_default(),
                name: node.map(|n| n.name.clone()).unwrap_or_default(),
                voter: m.voter,
                leaving: m.leaving,
                matched: m.matched,
                applied: m.applied,
                heard_ms: m.heard.map(|ago| ago.as_millis() as u64),
                copying: m.copying,
                disk: m.disk,
            }
        };
        pb::MembersReply {
            id: self.member.cfg.id,
            leader: group.leader,
            term: group.term,
            last_index: group.last,
            committed: group.committed,
            members: group.members.iter().map(member).collect(),
            former: map.map.former.clone(),
            learner: 0,
            incarnation: map.map.incarnation,
            awaited: recovery::all_awaited(&map.map),
            slow: slow_targets(&self.member),
            levels: None,
        }
    }

    /// Which server this is and what it knows of a group.
    pub(super) async fn probed(&self) -> Result<Bytes> {
        let group = self.member.node.group().await?;
        Ok(encode(&pb::MemberInfo {
            id: self.member.cfg.id,
            stamp: self.member.node.stamp(),
            cluster: self.member.node.cluster().to_vec().into(),
            voters: group.voters().map(|m| m.id).collect(),
            version: env!("CARGO_PKG_VERSION").into(),
            name: self.member.cfg.name(),
            level: self.member.cfg.feature_level,
        }))
    }

    /// Adds the new server at `endpoint` as a learner; returns its id. Nothing happens if it is a
    /// member already.
    async fn learn(&self, endpoint: &str) -> Result<u64> {
        self.member.leading()?;
        let at: Endpoint = endpoint.parse()?;
        let info =
            self.probe(&at).await.map_err(|e| e.context(format_args!("the server at {at}")))?;
        let group = self.member.node.group().await?;
        let map = self.member.map();
        let named = |e: Error| e.context(format_args!("the server at {at}"));
        let who = || format!("metadata server {}", info.id);
        levels::check(&self.member, info.level, Code::Inval, who).map_err(named)?;
        match group.get(info.id) {
            // Repeated. A member that was not heard of yet is recognised by its address.
            Some(m) if m.stamp == Some(info.stamp) => {}
            Some(m) if m.stamp.is_none() && m.endpoint.as_ref() == Some(&at) => {}
            // Or not even by that: the leader that added it was lost before it told others.
            Some(m) if m.stamp.is_none() && m.endpoint.is_none() && !m.voter => {
                check_new(&info, &self.member.node.cluster(), &[]).map_err(named)?;
                self.member.node.set_peer(info.id, at.clone());
            }
            Some(m) if m.stamp.is_some() && m.endpoint.as_ref() == Some(&at) => {
                return Err(named(lost_log(info.id)));
            }
            _ => {
                let former = map.map.former.iter().map(|id| u64::from(*id));
                let used: Vec<u64> = group.members.iter().map(|m| m.id).chain(former).collect();
                check_new(&info, &self.member.node.cluster(), &used).map_err(named)?;
                self.member
                    .node
                    .change_members(MemberChange::AddLearner { id: info.id, endpoint: at.clone() })
                    .await?;
                tracing::info!(id = info.id, at = endpoint, "a new metadata server is a learner");
            }
        }
        if map.node(node_id(info.id)).is_some() {
            return Ok(info.id);
        }
        // For clients, and for members that restart with an older configuration.
        let node = pb::Node {
            id: node_id(info.id),
            role: ROLE_MDS,
            endpoints: vec![endpoint.into()],
            name: if info.name.is_empty() { format!("mds-{}", info.id) } else { info.name },
            version: info.version,
            ..Default::default()
        };
        self.member
            .propose(Command::MdsNodes(pb::MdsNodes { nodes: vec![node], gone: Vec::new() }))
            .await?;
        Ok(info.id)
    }

    async fn probe(&self, at: &Endpoint) -> Result<pb::MemberInfo> {
        let unreachable = |why: &str| inval(format!("cannot be reached ({why}); start it first"));
        let conn = match timeout(PROBE_TIMEOUT, self.member.links.fabric().connect(at, None)).await
        {
            Err(_) => return Err(unreachable("no answer")),
            Ok(Err(e)) if e.code == Code::Unauthenticated => {
                return Err(inval("belongs to another cluster: its cluster key differs"));
            }
            Ok(r) => r.map_err(|e| unreachable(&e.message))?,
        };
        let answer = conn
            .call(Message::new(opcode::PROBE, pb::MemberProbe {}.encode_to_vec()), PROBE_TIMEOUT)
            .await;
        conn.close();
        let no_mds = |e: &dyn std::fmt::Display| {
            inval(format!("is not a metadata server that can join ({e})"))
        };
        pb::MemberInfo::decode(answer.map_err(|e| no_mds(&e))?.body).map_err(|e| no_mds(&e))
    }

    /// Promotes and removes members. A leader that is to be removed hands over first and leaves the
    /// step to its successor.
    async fn step(&self, step: pb::MemberStep) -> Result<()> {
        self.member.leading()?;
        if step.promote.len() + step.remove.len() > MAX_STEP {
            return Err(inval(format!("a step names at most {MAX_STEP} members")));
        }
        if step.remove.contains(&self.member.cfg.id) {
            let others = self
                .member
                .node
                .group()
                .await?
                .voters()
                .filter(|m| m.id != self.member.cfg.id)
                .count();
            if others == 0 {
                return Err(inval(format!(
                    "metadata server {} is the only voter; add another one before it is removed",
                    self.member.cfg.id
                )));
            }
            tracing::info!("handing the leadership over, to be removed");
            self.transfer(0).await?;
            return Err(Error::not_leader(node_id(self.member.leadership.borrow().leader)));
        }
        let gone: Vec<u32> = step.remove.iter().map(|id| node_id(*id)).collect();
        self.member
            .node
            .change_members(MemberChange::Step { promote: step.promote, remove: step.remove })
            .await?;
        if !gone.is_empty() {
            // Clients need not try them any more. The change itself is done, so an error here is
            // not returned: the leader's `announce` does this, too.
            if let Err(e) = self
                .member
                .propose(Command::MdsNodes(pb::MdsNodes { nodes: Vec::new(), gone }))
                .await
            {
                tracing::warn!("the map still names removed members: {e}");
            }
        }
        Ok(())
    }

    async fn transfer(&self, to: u64) -> Result<()> {
        self.member.leading()?;
        if to == self.member.cfg.id {
            return Ok(());
        }
        self.member.node.transfer(to).await
    }

    /// Keeps the connections to the other members as the map has them: adds those that the
    /// configuration does not name, and drops those to removed servers.
    pub(super) async fn follow_map(&self) {
        let mut applied = self.member.machine.applied_watch();
        let mut version = u64::MAX;
        loop {
            let map = self.member.map();
            if map.version() != version {
                version = map.version();
                self.meet(&map.map);
            }
            if applied.changed().await.is_err() {
                return;
            }
        }
    }

    fn meet(&self, map: &pb::ClusterMap) {
        for n in map.nodes.iter().filter(|n| n.role == ROLE_MDS && n.id != self.member.own_id()) {
            let configured = self.member.cfg.peers.iter().any(|p| p.0 == u64::from(n.id));
            if let Some(at) =
                n.endpoints.iter().find_map(|e| e.parse().ok()).filter(|_| !configured)
            {
                self.member.node.set_peer(u64::from(n.id), at);
            }
        }
        map.former.iter().for_each(|id| self.member.node.forget_peer(u64::from(*id)));
    }
}

/// Targets that are slow; known only while this server leads.
pub(super) fn slow_targets(member: &Member) -> Vec<pb::SlowTarget> {
    let lead = member.lead.lock();
    let named = lead.iter().flat_map(|l| l.manager.slow.named());
    named.map(|(target, slow)| pb::SlowTarget { target, slow: Some(*slow) }).collect()
}

/// The inodes that a repair names.
fn named(r: &pb::Repair) -> Vec<Ino> {
    match &r.what {
        Some(What::Chunks(c)) => vec![c.ino],
        Some(What::End(e)) => vec![e.ino],
        Some(What::Name(n)) => vec![n.parent, n.ino],
        None => vec![],
    }
}

fn lost_log(id: u64) -> Error {
    inval(format!(
        "has the id of member {id} but not its log. A member that lost its disk never votes \
         again: stop it, give it an id never used before, an empty `dir` and `join = true`, and \
         then run `strake mds replace {id} ADDR`"
    ))
}

/// Whether a server that reports this about itself may become a learner of the group of `cluster`,
/// in which the ids `used` are or were used.
fn check_new(info: &pb::MemberInfo, cluster: &[u8; 16], used: &[u64]) -> Result<()> {
    if info.cluster[..] != cluster[..] {
        return Err(inval("belongs to another cluster: its `fs_name` differs"));
    }
    if info.id == 0 || info.id >= u64::from(FIRST_OSS_NODE) {
        return Err(inval(format!("has id {}; ids are 1 to {}", info.id, FIRST_OSS_NODE - 1)));
    }
    if used.contains(&info.id) {
        let free = (1..u64::from(FIRST_OSS_NODE)).find(|id| !used.contains(id)).unwrap_or(0);
        return Err(inval(format!(
            "has id {}, which is or was another server's; stop it, give it an id never used \
             before, such as {free}, and an empty `dir`",
            info.id
        )));
    }
    if !info.voters.is_empty() {
        return Err(inval(format!(
            "is a member of a group already (voters {:?}); stop it, empty its `dir` and start it with `join = true`",
            info.voters
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_new_server_of_this_cluster_may_join() {
        let good = pb::MemberInfo { id: 4, cluster: vec![3; 16].into(), ..Default::default() };
        check_new(&good, &[3; 16], &[1, 2, 3]).unwrap();
        for (info, word) in [
            (pb::MemberInfo { cluster: vec![4; 16].into(), ..good.clone() }, "another cluster"),
            (pb::MemberInfo { cluster: Bytes::new(), ..good.clone() }, "another cluster"),
            (pb::MemberInfo { id: 0, ..good.clone() }, "ids are"),
            (pb::MemberInfo { id: 1001, ..good.clone() }, "ids are"),
            (pb::MemberInfo { id: 3, ..good.clone() }, "such as 4"),
            (pb::MemberInfo { voters: vec![4], ..good.clone() }, "join = true"),
        ] {
            let e = check_new(&info, &[3; 16], &[1, 2, 3]).unwrap_err();
            assert!(e.code == Code::Inval && e.message.contains(word), "{e}");
        }
    }
}
