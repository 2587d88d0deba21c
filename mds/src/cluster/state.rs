//! Changes of the cluster map, as pure functions called at apply. Either the whole change is made
//! and the version grows by one, or the map stays unchanged and the reason is returned. A change
//! without effect keeps the version.

use std::collections::{BTreeMap, BTreeSet};

use pb::ReplicaState;
use strake_proto::{
    ChainId, Code, Error, NodeId, Result, TargetId,
    ids::TARGET_UNASSIGNED,
    map::{ChainExt, MapView, ROLE_MDS, ROLE_OSS},
    pb,
};

use super::{chain_table, membership, recovery};

/// Smaller node ids are Raft ids of metadata servers; from here on they are those of storage
/// servers.
pub const FIRST_OSS_NODE: NodeId = 1001;
/// Most targets that one registration may name.
pub const MAX_NODE_TARGETS: usize = 256;
/// Most targets of a cluster; limits the size of the map.
pub const MAX_TARGETS: usize = 4096;
/// Longest pool name, as in Lustre.
pub const MAX_POOL_NAME: usize = 15;
/// Chain sets are made for 1 to this many copies.
pub const MAX_COPIES: usize = 3;
/// The last epoch that a chain may have: no counting on from here overflows.
const MAX_EPOCH: u64 = u64::MAX / 2;
/// Most replicas of a chain, with those that join and leave; storage servers keep a record of this
/// many.
const MAX_REPLICAS: usize = 16;

const MAX_NAME: usize = 255;
const MAX_ENDPOINTS: usize = 16;

fn inval(message: String) -> Error {
    Error::new(Code::Inval, message)
}

pub(super) fn commit(map: &mut pb::ClusterMap, mut next: pb::ClusterMap) {
    if next != *map {
        next.version = map.version + 1;
        *map = next;
    }
}

/// Registers a storage server and its targets. Idempotent by node name and target uuids: ids are
/// assigned once.
///
/// `EINVAL` for invalid requests or an identity of another cluster, `EBUSY` while the name or a
/// target is in use by a live node. `ESTALE` for a process that follows another one than the
/// registered: a registration may arrive late, after a later process has registered. A target is
/// alive from its first heartbeat on, not from its registration. A known target with another boot
/// id has restarted: it leaves the in-sync sets of its chains in this same change, so that no
/// decision about its former process can overtake it.
pub fn register(map: &mut pb::ClusterMap, r: &pb::RegisterRequest) -> Result<pb::RegisterReply> {
    check_register(map, r)?;
    let mut next = map.clone();
    let node = register_node(&mut next, r)?;
    let mut target_ids = Vec::with_capacity(r.targets.len());
    for t in &r.targets {
        target_ids.push(register_target(&mut next, node, t)?);
    }
    let heard: Vec<_> =
        target_ids.iter().copied().zip(r.targets.iter().map(|t| &t.sights[..])).collect();
    recovery::hear(&mut next, &heard);
    commit(map, next);
    Ok(pb::RegisterReply { node, target_ids, fs_uuid: map.fs_uuid.clone(), map: None })
}

fn check_text(what: &str, s: &str) -> Result<()> {
    if s.is_empty() || s.len() > MAX_NAME || s.chars().any(char::is_control) {
        return Err(inval(format!("{what} must be 1 to {MAX_NAME} bytes of printable text")));
    }
    Ok(())
}

fn check_register(map: &pb::ClusterMap, r: &pb::RegisterRequest) -> Result<()> {
    check_text("the node's name", &r.name)?;
    if r.endpoints.is_empty() || r.endpoints.len() > MAX_ENDPOINTS {
        return Err(inval(format!("node '{}' must have 1 to {MAX_ENDPOINTS} endpoints", r.name)));
    }
    for e in &r.endpoints {
        check_text("an endpoint", e)?;
    }
    if !r.rack.is_empty() {
        check_text("the node's rack", &r.rack)?;
    }
    if r.version.len() > MAX_NAME || r.targets.len() > MAX_NODE_TARGETS {
        return Err(inval(format!("node '{}' names more than {MAX_NODE_TARGETS} targets", r.name)));
    }
    if !r.fs_uuid.is_empty() && r.fs_uuid != map.fs_uuid {
        return Err(inval(format!(
            "the targets of node '{}' belong to another cluster; give it targets of this cluster",
            r.name
        )));
    }
    let mut seen = BTreeSet::new();
    if r.targets.iter().any(|t| t.uuid.len() != 16 || !seen.insert(&t.uuid)) {
        return Err(inval(format!("node '{}': target uuids must be 16 bytes and differ", r.name)));
    }
    if r.targets.iter().map(|t| t.sights.len()).sum::<usize>() > recovery::MAX_SIGHTS {
        return Err(inval(format!(
            "node '{}' names more than {} chains",
            r.name,
            recovery::MAX_SIGHTS
        )));
    }
    let Some(node) = map.nodes.iter().find(|n| n.role == ROLE_OSS && n.name == r.name) else {
        return Ok(());
    };
    let own: Vec<&pb::Target> = map.targets.iter().filter(|t| t.node == node.id).collect();
    let shared = own.iter().any(|t| seen.contains(&t.uuid));
    if !shared && own.iter().any(|t| t.alive) {
        return Err(Error::new(
            Code::Busy,
            format!(
                "another live node is registered as '{}' with other targets; give this one \
                 another name",
                r.name
            ),
        ));
    }
    Ok(())
}

fn register_node(next: &mut pb::ClusterMap, r: &pb::RegisterRequest) -> Result<NodeId> {
    if let Some(n) = next.nodes.iter_mut().find(|n| n.role == ROLE_OSS && n.name == r.name) {
        n.endpoints = r.endpoints.clone();
        n.version = r.version.clone();
        n.rack = r.rack.clone();
        return Ok(n.id);
    }
    let last = next.nodes.iter().map(|n| n.id).max().unwrap_or(0);
    let Some(id) = last.checked_add(1).map(|id| id.max(FIRST_OSS_NODE)) else {
        return Err(Error::new(Code::NoSpc, "node ids are used up"));
    };
    next.nodes.push(pb::Node {
        id,
        role: ROLE_OSS,
        endpoints: r.endpoints.clone(),
        name: r.name.clone(),
        version: r.version.clone(),
        rack: r.rack.clone(),
    });
    Ok(id)
}

fn register_target(
    next: &mut pb::ClusterMap,
    node: NodeId,
    t: &pb::RegisterTarget,
) -> Result<TargetId> {
    if let Some(have) = next.targets.iter_mut().find(|h| h.uuid == t.uuid) {
        if t.id != TARGET_UNASSIGNED && t.id != have.id {
            return Err(inval(format!(
                "the superblock says target {}, the cluster knows it as {}",
                t.id, have.id
            )));
        }
        if have.node != node && have.alive {
            let m =
                format!("target {} is alive on node {}; stop it there first", have.id, have.node);
            return Err(Error::new(Code::Busy, m));
        }
        if have.stamp != t.stamp && t.follows.is_some_and(|f| f != have.stamp) {
            let m = format!("target {} has registered anew; get the map first", have.id);
            return Err(Error::new(Code::Stale, m));
        }
        have.node = node;
        have.capacity = t.capacity;
        let id = have.id;
        if have.stamp != t.stamp {
            have.stamp = t.stamp;
            have.alive = false;
            let open = recovery::in_doubt(next);
            for c in next.chains.iter_mut().filter(|c| !open.contains(&c.id)) {
                if let Some(changed) = membership::restarted(c, id) {
                    *c = changed;
                }
            }
        }
        return Ok(id);
    }
    new_target(next, node, t)
}

/// A target that the map does not know.
fn new_target(next: &mut pb::ClusterMap, node: NodeId, t: &pb::RegisterTarget) -> Result<TargetId> {
    if t.id != TARGET_UNASSIGNED {
        let since = match recovery::incarnation(next).era() {
            0 => "",
            _ => {
                ": it joined after the state from which the metadata servers were recovered, so \
                 it holds only data of files that are lost. Remove it from `targets`, or create \
                 it again in an empty folder"
            }
        };
        let m = format!(
            "the superblock says target {}, which this cluster does not know by its uuid{since}",
            t.id
        );
        return Err(inval(m));
    }
    if next.targets.len() >= MAX_TARGETS {
        return Err(Error::new(
            Code::NoSpc,
            format!("the cluster already has {MAX_TARGETS} targets"),
        ));
    }
    let ids = next.targets.iter().map(|h| h.id.saturating_add(1));
    let id = ids.max().unwrap_or(0).max(next.next_target);
    if id == TARGET_UNASSIGNED {
        return Err(Error::new(Code::NoSpc, "target ids are used up"));
    }
    next.targets.push(pb::Target {
        id,
        node,
        uuid: t.uuid.clone(),
        capacity: t.capacity,
        stamp: t.stamp,
        ..Default::default()
    });
    Ok(id)
}

/// Replaces parts of the map by id, in this order: nodes, targets, chains, sets. `EBUSY` unless the
/// map is at `expect_version`; `EINVAL` for a change that the membership rules never make (see
/// `docs/replication.md`); `ENOSPC` for chains that are too many.
pub fn update(map: &mut pb::ClusterMap, u: &pb::MapUpdate) -> Result<()> {
    if u.expect_version != map.version {
        let m = format!(
            "the map is at version {}, the update expects {}",
            map.version, u.expect_version
        );
        return Err(Error::new(Code::Busy, m));
    }
    let mut next = map.clone();
    replace_servers(&mut next, u)?;
    replace_chains(map, &mut next, &u.chains)?;
    add_sets(&mut next, &u.sets)?;
    MapView::new(next.clone()).map_err(|e| inval(e.message))?;
    commit(map, next);
    Ok(())
}

/// The nodes and targets of an update.
fn replace_servers(next: &mut pb::ClusterMap, u: &pb::MapUpdate) -> Result<()> {
    for n in &u.nodes {
        let have = find(&mut next.nodes, |h| h.id == n.id, "node", n.id)?;
        if have.role != n.role || have.name != n.name {
            return Err(inval(format!("node {} cannot change its role or name", n.id)));
        }
        *have = n.clone();
    }
    for t in &u.targets {
        let have = find(&mut next.targets, |h| h.id == t.id, "target", t.id)?;
        if have.uuid != t.uuid || have.node != t.node {
            return Err(inval(format!(
                "only a registration can change the node or uuid of target {}",
                t.id
            )));
        }
        *have = t.clone();
    }
    Ok(())
}

/// The chains of an update.
fn replace_chains(
    map: &pb::ClusterMap,
    next: &mut pb::ClusterMap,
    chains: &[pb::Chain],
) -> Result<()> {
    let open = recovery::in_doubt(map);
    let targets: BTreeSet<TargetId> = map.targets.iter().map(|t| t.id).collect();
    let mut at: BTreeMap<ChainId, usize> =
        map.chains.iter().enumerate().map(|(i, c)| (c.id, i)).collect();
    for c in chains {
        let have = at.get(&c.id).copied();
        if c.lost || have.is_some_and(|i| next.chains[i].lost) {
            return Err(inval(format!(
                "chain {}: only an administrator decides what is lost",
                c.id
            )));
        }
        if open.contains(&c.id) {
            let m = format!(
                "chain {}: since the recovery it is not known yet which replicas are \
                             in sync",
                c.id
            );
            return Err(Error::new(Code::Busy, m));
        }
        check_chain(c)?;
        if let Some(t) = c.preferred.iter().find(|t| !targets.contains(t)) {
            return Err(inval(format!("chain {}: target {t} is not registered", c.id)));
        }
        match have {
            Some(i) => {
                check_transition(&next.chains[i], c)?;
                next.chains[i] = c.clone();
            }
            None => {
                check_new_chain(c)?;
                if next.chains.len() >= chain_table::MAX_CHAINS
                    || u64::from(c.id) >= chain_table::ids(map).1
                {
                    let m = format!(
                        "chain {}: the cluster already has the largest number of chains",
                        c.id
                    );
                    return Err(Error::new(Code::NoSpc, m));
                }
                at.insert(c.id, next.chains.len());
                next.chains.push(c.clone());
            }
        }
    }
    Ok(())
}

/// The chain sets of an update.
fn add_sets(next: &mut pb::ClusterMap, sets: &[pb::ChainSet]) -> Result<()> {
    let chains: BTreeSet<ChainId> = next.chains.iter().map(|c| c.id).collect();
    for s in sets {
        if next.sets.iter().any(|h| h.id == s.id) {
            return Err(inval(format!("chain set {} exists; sets never change", s.id)));
        }
        if s.chains.is_empty() || s.chains.iter().any(|c| !chains.contains(c)) {
            return Err(inval(format!("chain set {} must name chains of the map", s.id)));
        }
        next.sets.push(s.clone());
    }
    Ok(())
}

fn find<'a, T>(
    items: &'a mut [T],
    is: impl Fn(&T) -> bool,
    what: &str,
    id: u32,
) -> Result<&'a mut T> {
    items.iter_mut().find(|x| is(x)).ok_or_else(|| inval(format!("{what} {id} is not registered")))
}

fn rank(s: ReplicaState) -> u8 {
    match s {
        ReplicaState::ReplicaServing => 0,
        ReplicaState::ReplicaSyncing => 1,
        _ => 2,
    }
}

pub(crate) fn count(c: &pb::Chain, state: ReplicaState) -> usize {
    c.replicas.iter().filter(|r| r.state() == state).count()
}

/// Checks what holds for every chain in every map.
pub(super) fn check_chain(c: &pb::Chain) -> Result<()> {
    let bad = |why: &str| Err(inval(format!("chain {}: {why}", c.id)));
    let members: BTreeSet<TargetId> = c.replicas.iter().map(|r| r.target).collect();
    if c.replicas.is_empty() || members.len() != c.replicas.len() {
        return bad("it has no replicas, or one twice");
    }
    let wanted: BTreeSet<TargetId> = c.preferred.iter().copied().collect();
    if wanted.is_empty() || wanted.len() != c.preferred.len() {
        return bad("it has no wanted targets, or one twice");
    }
    if c.replicas.len() > MAX_REPLICAS || c.preferred.len() > MAX_REPLICAS {
        return bad("it has more replicas than a chain can have");
    }
    if count(c, ReplicaState::ReplicaUnknown) > 0 {
        return bad("it has a replica without a state");
    }
    if !c.replicas.is_sorted_by_key(|r| rank(r.state())) {
        return bad("its replicas are out of order: SERVING, then SYNCING, then the rest");
    }
    let serving = count(c, ReplicaState::ReplicaServing);
    let last = count(c, ReplicaState::ReplicaLastsrv);
    if (serving == 0) == (last == 0) {
        return bad("it needs a SERVING replica or known last ones, but not both");
    }
    let syncing = count(c, ReplicaState::ReplicaSyncing);
    if syncing > 1 || (syncing == 1 && serving == 0) {
        return bad("only one replica may be SYNCING, and only beside a SERVING one");
    }
    Ok(())
}

fn check_new_chain(c: &pb::Chain) -> Result<()> {
    let members = c.replicas.iter().map(|r| r.target);
    if c.epoch != 1
        || count(c, ReplicaState::ReplicaServing) != c.replicas.len()
        || !members.eq(c.preferred.iter().copied())
    {
        return Err(inval(format!(
            "chain {}: a new chain must be SERVING at epoch 1, on its wanted targets",
            c.id
        )));
    }
    Ok(())
}

/// The second half of the membership rules' assertion: whoever proposed the change, a replica that
/// missed an epoch must not serve. `EINVAL` if a chain cannot become this one.
pub fn check_transition(old: &pb::Chain, new: &pb::Chain) -> Result<()> {
    use ReplicaState::*;
    let bad = |why: &str| {
        Err(inval(format!("chain {} from epoch {} to {}: {why}", old.id, old.epoch, new.epoch)))
    };
    if new.epoch <= old.epoch {
        return bad("epochs only increase");
    }
    if new.epoch > MAX_EPOCH {
        return bad("it has had all its epochs");
    }
    if new.preferred.len() != old.preferred.len() {
        return bad("the number of its copies never changes");
    }
    let before: BTreeMap<TargetId, ReplicaState> =
        old.replicas.iter().map(|r| (r.target, r.state())).collect();
    for (target, was) in &before {
        let now = new.state_of(*target);
        if now.is_none()
            && (new.preferred.contains(target) || matches!(was, ReplicaServing | ReplicaLastsrv))
        {
            return bad(&format!("target {target} cannot leave it: it is wanted, or {was:?}"));
        }
    }
    let had_source = count(old, ReplicaServing) > 0;
    for r in &new.replicas {
        let was = before.get(&r.target).copied().unwrap_or(ReplicaUnknown);
        let allowed = match r.state() {
            ReplicaServing if had_source => matches!(was, ReplicaServing | ReplicaSyncing),
            ReplicaServing => was == ReplicaLastsrv && count(new, ReplicaServing) == 1,
            ReplicaLastsrv => matches!(was, ReplicaServing | ReplicaLastsrv),
            _ => was != ReplicaUnknown || new.preferred.contains(&r.target),
        };
        if !allowed {
            return bad(&format!("target {} cannot go from {was:?} to {:?}", r.target, r.state()));
        }
    }
    Ok(())
}

/// `EINVAL` for more copies than a chain can have.
pub fn settings(map: &mut pb::ClusterMap, s: &pb::Settings) -> Result<()> {
    if s.min_copies as usize > MAX_COPIES {
        return Err(Error::new(
            Code::Inval,
            format!(
                "{} is not possible as the lowest number of copies; the most is {MAX_COPIES}",
                s.min_copies
            ),
        ));
    }
    if map.min_copies != s.min_copies {
        map.min_copies = s.min_copies;
        map.version += 1;
    }
    Ok(())
}

/// Records the metadata servers by Raft id and forgets those that are gone, except for their ids: a
/// server with such an id can never be a member again. Others already in the map stay.
pub fn mds_nodes(map: &mut pb::ClusterMap, m: &pb::MdsNodes) -> Result<()> {
    let mut next = map.clone();
    for n in &m.nodes {
        if n.id == 0 || n.id >= FIRST_OSS_NODE || n.role != ROLE_MDS {
            return Err(inval(format!(
                "metadata server ids are 1 to {}, not {}",
                FIRST_OSS_NODE - 1,
                n.id
            )));
        }
        if map.former.contains(&n.id) || m.gone.contains(&n.id) {
            return Err(inval(format!(
                "metadata server {} was removed and can never be a member again",
                n.id
            )));
        }
        check_text("the node's name", &n.name)?;
        if n.endpoints.is_empty() || n.endpoints.len() > MAX_ENDPOINTS || n.version.len() > MAX_NAME
        {
            return Err(inval(format!(
                "metadata server {} must have 1 to {MAX_ENDPOINTS} endpoints",
                n.id
            )));
        }
        for e in &n.endpoints {
            check_text("an endpoint", e)?;
        }
        match next.nodes.iter_mut().find(|h| h.id == n.id) {
            Some(have) => *have = n.clone(),
            None => next.nodes.push(n.clone()),
        }
    }
    next.nodes.retain(|n| n.role != ROLE_MDS || !m.gone.contains(&n.id));
    next.nodes.sort_by_key(|n| n.id);
    next.former.extend(m.gone.iter().filter(|id| (1..FIRST_OSS_NODE).contains(*id)));
    next.former.sort_unstable();
    next.former.dedup();
    commit(map, next);
    Ok(())
}

/// Action numbers of [`pb::PoolChange`].
pub mod pool_action {
    pub const NEW: u32 = 1;
    pub const ADD: u32 = 2;
    pub const REMOVE: u32 = 3;
    pub const DESTROY: u32 = 4;
}

/// Makes, fills, empties and removes pools, with the errors of Lustre's `lctl pool_*`: `EEXIST` for
/// what exists already, `ENOENT` for what does not, `ENOTEMPTY` for removing a pool with members.
pub fn pool_change(map: &mut pb::ClusterMap, p: &pb::PoolChange) -> Result<()> {
    let name = &p.pool;
    let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || name.len() > MAX_POOL_NAME || !name.chars().all(ok) {
        return Err(inval(format!(
            "pool name '{name}': 1 to {MAX_POOL_NAME} of letters, digits, '_', '-' and '.'"
        )));
    }
    if let Some(t) = p.targets.iter().find(|t| map.targets.iter().all(|h| h.id != **t)) {
        return Err(Error::new(Code::NoEnt, format!("target {t} is not registered")));
    }
    let mut next = map.clone();
    let at = next.pools.iter().position(|h| h.name == *name);
    let missing = || Error::new(Code::NoEnt, format!("there is no pool '{name}'"));
    match p.action {
        pool_action::NEW if at.is_some() => {
            return Err(Error::new(Code::Exist, format!("pool '{name}' exists")));
        }
        // In a layout these names mean that there is no pool.
        pool_action::NEW if name == "none" || name == "ignore" => {
            return Err(inval(format!(
                "a pool cannot be named '{name}': `lfs setstripe -p {name}` means no pool"
            )));
        }
        pool_action::NEW => {
            let targets: BTreeSet<TargetId> = p.targets.iter().copied().collect();
            next.pools
                .push(pb::Pool { name: name.clone(), targets: targets.into_iter().collect() });
        }
        pool_action::ADD | pool_action::REMOVE => {
            let pool = &mut next.pools[at.ok_or_else(missing)?];
            let mut members: BTreeSet<TargetId> = pool.targets.iter().copied().collect();
            for t in &p.targets {
                if p.action == pool_action::ADD && !members.insert(*t) {
                    return Err(Error::new(
                        Code::Exist,
                        format!("target {t} is in pool '{name}' already"),
                    ));
                }
                if p.action == pool_action::REMOVE && !members.remove(t) {
                    return Err(Error::new(
                        Code::NoEnt,
                        format!("target {t} is not in pool '{name}'"),
                    ));
                }
            }
            pool.targets = members.into_iter().collect();
        }
        pool_action::DESTROY => {
            let at = at.ok_or_else(missing)?;
            if !next.pools[at].targets.is_empty() {
                return Err(Error::new(
                    Code::NotEmpty,
                    format!("pool '{name}' has members; remove them first"),
                ));
            }
            next.pools.remove(at);
        }
        a => return Err(inval(format!("unknown pool action {a}"))),
    }
    commit(map, next);
    Ok(())
}

#[cfg(test)]
#[path = "state_tests.rs"]
pub(crate) mod tests;
