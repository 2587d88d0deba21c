//! Targets that the server does not serve: they are missing, belong to another cluster or server,
//! are in use, or were found damaged. The other targets serve. The cluster takes such a target for
//! dead, and its chains continue without it.
//!
//! The server looks at it again from time to time, and when an administrator asks for it, so that a
//! disk that is put back returns without a restart. Such a look never makes a target, unless asked
//! to: an empty folder may be a disk that is not mounted.
//!
//! If the device is intact and only the chunk table is damaged, the target has lost its data and
//! nothing else. It may come back with an empty table under the same identity, and be resynced like
//! any replica that was away, **once no chain counts on what it had**: the newest map, agreed on
//! after its last run ended, says that it is dead and OFFLINE in each of its chains. From there
//! only a resync leads back into sync (`docs/replication.md`, "Membership"), and no resync happens
//! before it has come back. While it is in sync, LASTSRV or in a chain in doubt, it may be the last
//! one to hold something, so it stays out until an administrator decides.

use std::{collections::BTreeSet, path::PathBuf, sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_proto::{
    ChainId, Code, Error,
    ids::TARGET_UNASSIGNED,
    map::{ChainExt, MapView},
    pb::{self, Chain, ReplicaState},
};
use tokio::sync::Notify;

use super::{config::TargetConfig, group::follows};
use crate::engine::{Damaged, TargetIdentity};

/// What an administrator can do.
pub(super) const NEXT_STEP: &str = "see docs/operations.md, \"A target that is refused\"";

/// Why a target does not serve.
#[derive(Clone)]
pub(super) enum What {
    Damaged(Arc<Damaged>),
    Refused(Error),
}

/// A target out of service, until it is back.
pub(super) struct RefusedTarget {
    pub path: PathBuf,
    what: Mutex<What>,
    /// What happens with it next, for the status.
    now: Mutex<String>,
    /// An administrator asked for a look, with this configuration.
    asked: Mutex<Option<TargetConfig>>,
    news: Notify,
}

impl RefusedTarget {
    fn new(path: PathBuf, what: What) -> Arc<RefusedTarget> {
        let refused = RefusedTarget {
            path,
            what: Mutex::new(what),
            now: Mutex::default(),
            asked: Mutex::default(),
            news: Notify::new(),
        };
        tracing::error!(
            "a target is out of service; the others continue: {}; {NEXT_STEP}",
            refused.why()
        );
        *refused.now.lock() = NEXT_STEP.into();
        Arc::new(refused)
    }

    pub(super) fn damaged(damaged: Damaged) -> Arc<RefusedTarget> {
        RefusedTarget::new(damaged.path.clone(), What::Damaged(Arc::new(damaged)))
    }

    pub(super) fn refused(path: PathBuf, why: Error) -> Arc<RefusedTarget> {
        RefusedTarget::new(path, What::Refused(why))
    }

    /// Its identity, if known.
    pub(super) fn id(&self) -> Option<TargetIdentity> {
        match &*self.what.lock() {
            What::Damaged(d) => d.id.clone(),
            What::Refused(_) => None,
        }
    }

    pub(super) fn why(&self) -> Error {
        match &*self.what.lock() {
            What::Damaged(d) => d.why.clone(),
            What::Refused(e) => e.clone(),
        }
    }

    /// For the status. `number`: its number, if its folder does not tell.
    pub(super) fn status(&self, number: Option<u32>) -> pb::RefusedTarget {
        let number =
            self.id().map(|id| id.target_id).filter(|id| *id != TARGET_UNASSIGNED).or(number);
        pb::RefusedTarget {
            path: self.path.display().to_string(),
            target: number,
            why: self.why().to_string(),
            now: self.now.lock().clone(),
        }
    }

    /// Looks at it now, on an administrator's request. Makes what is missing if its configuration
    /// says so.
    pub(super) fn look_again(&self, as_configured: &TargetConfig) {
        *self.asked.lock() = Some(as_configured.clone());
        self.news.notify_one();
    }

    /// Whether an administrator asked for a look.
    pub(super) fn is_asked(&self) -> bool {
        self.asked.lock().is_some()
    }

    /// Waits, until an administrator asks for a look.
    pub(super) async fn nap(&self, long: Duration) {
        tokio::select! {
            biased;
            () = self.news.notified() => {}
            () = tokio::time::sleep(long) => {}
        }
    }

    /// Its state.
    pub(super) fn what(&self) -> What {
        self.what.lock().clone()
    }

    /// What an administrator asked for, once.
    pub(super) fn take_asked(&self) -> Option<TargetConfig> {
        self.asked.lock().take()
    }

    /// Releases the lock that a damaged target keeps on its folder, so that it can be opened.
    pub(super) fn release(&self) {
        let why = self.why();
        *self.what.lock() = What::Refused(why);
    }

    /// It is looked at from time to time.
    pub(super) fn is_looked_at(&self, every: Duration) {
        *self.now.lock() =
            format!("it is checked again every {every:?}, and at SIGHUP; {NEXT_STEP}");
    }

    /// Sets its state. Logs a change once.
    pub(super) fn is(&self, what: What) {
        let (before, is_damaged) = (self.why().message, matches!(what, What::Damaged(_)));
        *self.what.lock() = what;
        let why = self.why();
        if why.message != before {
            tracing::warn!("{} is still out of service: {why}", self.path.display());
        }
        if is_damaged {
            *self.now.lock() = NEXT_STEP.into();
        }
    }

    /// What happens with it next. Logs a change once.
    pub(super) fn is_now(&self, what: String) {
        let mut now = self.now.lock();
        if *now != what {
            tracing::warn!("{}: {what}", self.path.display());
            *now = what;
        }
    }
}

/// Its state as text.
pub(super) fn notice(r: &pb::RefusedTarget) -> String {
    let name = r.target.map_or_else(|| "a target".into(), |id| format!("target {id}"));
    format!("{name} is out of service: {}; {}", r.why, r.now)
}

/// Why a target cannot join the cluster of this map, if so; retrying does not help.
pub(super) fn unfit(map: &pb::ClusterMap, node: &str, of: &TargetIdentity) -> Option<Error> {
    if map.fs_uuid.is_empty() {
        return None;
    }
    if of.fs_uuid != [0; 16] && map.fs_uuid[..] != of.fs_uuid {
        let m = format!("target {} belongs to another cluster and was not changed", of.target_id);
        return Some(Error::new(Code::Inval, m));
    }
    // A metadata group that was given up does not know what came later.
    if !follows(of, map.incarnation) {
        return None;
    }
    let Some(have) = map.targets.iter().find(|t| t.uuid[..] == of.target_uuid) else {
        let m = || {
            format!(
                "the cluster does not have target {}: it was removed, or joined after the state \
                 from which the metadata servers were recovered. Remove it from `targets`, or \
                 create it again in an empty folder",
                of.target_id
            )
        };
        return (of.target_id != TARGET_UNASSIGNED).then(|| Error::new(Code::Inval, m()));
    };
    if of.target_id != TARGET_UNASSIGNED && of.target_id != have.id {
        let m = format!(
            "its superblock says target {}, but the cluster knows it as {}",
            of.target_id, have.id
        );
        return Some(Error::new(Code::Inval, m));
    }
    let at =
        map.nodes.iter().find(|n| n.id == have.node).filter(|n| have.alive && n.name != node)?;
    let m = format!("target {} is alive on '{}'; stop it there first", have.id, at.name);
    Some(Error::new(Code::Busy, m))
}

/// Why data of a target may still be needed. If `None`, it is out of sync in all its chains, and
/// its data is worthless. `used`: the chains that ever stored something on it, `None` if not known.
/// A chain that is not among them loses nothing, even if the target is its last in-sync replica.
pub(super) fn needed(
    map: &MapView,
    of: &TargetIdentity,
    used: Option<&BTreeSet<ChainId>>,
) -> Option<String> {
    let known = map.map.targets.iter().find(|t| t.uuid[..] == of.target_uuid);
    let Some(t) = known else {
        // It never held anything, or the cluster has removed it.
        let new = of.target_id == TARGET_UNASSIGNED;
        return (!new)
            .then(|| format!("the cluster no longer has target {}; {NEXT_STEP}", of.target_id));
    };
    let joined = of.fs_uuid != [0; 16];
    if joined && map.map.fs_uuid[..] != of.fs_uuid || !follows(of, map.map.incarnation) {
        return Some("it belongs to another cluster".into());
    }
    if !map.map.doubts.is_empty() {
        return Some(
            "since the recovery of the metadata servers it is not known yet which replicas are in \
             sync"
                .into(),
        );
    }
    if t.alive {
        return Some("its last lease is not over yet".into());
    }
    let is_no_loss = |c: &&Chain| match c.state_of(t.id) {
        Some(ReplicaState::ReplicaOffline) => true,
        Some(ReplicaState::ReplicaLastsrv) => used.is_some_and(|used| !used.contains(&c.id)),
        _ => false,
    };
    let counted = map.chains_of(t.id).filter(|c| !is_no_loss(c)).map(|c| c.id.to_string());
    let counted: Vec<String> = counted.collect();
    let m = || {
        format!("it may be the last replica in sync of chains {}; {NEXT_STEP}", counted.join(", "))
    };
    (!counted.is_empty()).then(m)
}

#[cfg(test)]
mod tests {
    use strake_proto::pb;

    use super::*;

    fn of() -> TargetIdentity {
        TargetIdentity {
            fs_uuid: [1; 16],
            target_uuid: [2; 16],
            target_id: 2,
            node: "oss1".into(),
            incarnation: 0,
        }
    }

    /// Targets 1 and 2; chains of the two with these states of target 2.
    fn map(states: &[ReplicaState]) -> pb::ClusterMap {
        use ReplicaState::{ReplicaLastsrv, ReplicaServing};
        let target =
            |id: u8| pb::Target { id: id.into(), uuid: vec![id; 16].into(), ..Default::default() };
        let chain = |(id, state): (usize, &ReplicaState)| {
            let other = if *state == ReplicaLastsrv { ReplicaLastsrv } else { ReplicaServing };
            let mut replicas = vec![
                pb::Replica { target: 1, state: other as i32 },
                pb::Replica { target: 2, state: *state as i32 },
            ];
            if *state == ReplicaServing {
                replicas.reverse();
            }
            pb::Chain { id: id as u32, epoch: 3, replicas, preferred: vec![1, 2], lost: false }
        };
        pb::ClusterMap {
            version: 9,
            fs_uuid: vec![1; 16].into(),
            targets: vec![target(1), target(2)],
            chains: states.iter().enumerate().map(chain).collect(),
            ..Default::default()
        }
    }

    pub(super) fn why(map: pb::ClusterMap, of: &TargetIdentity) -> String {
        needed(&MapView::new(map).unwrap(), of, None).unwrap_or_default()
    }

    #[test]
    fn what_is_not_of_this_cluster_is_refused_by_itself() {
        let mut m = map(&[]);
        m.nodes = vec![pb::Node { id: 1001, name: "oss1".into(), ..Default::default() }];
        m.targets.iter_mut().for_each(|t| (t.node, t.alive) = (1001, true));
        let said = |m: &pb::ClusterMap, node: &str, of: &TargetIdentity| {
            unfit(m, node, of).map(|e| (e.code, e.message)).unwrap_or((Code::Io, String::new()))
        };
        assert_eq!(said(&m, "oss1", &of()).1, "");
        let new = TargetIdentity {
            fs_uuid: [0; 16],
            target_uuid: [9; 16],
            target_id: TARGET_UNASSIGNED,
            ..of()
        };
        assert_eq!(said(&m, "oss1", &new).1, "");
        for (of, code, what) in [
            (TargetIdentity { fs_uuid: [7; 16], ..of() }, Code::Inval, "another cluster"),
            (
                TargetIdentity { target_uuid: [9; 16], ..of() },
                Code::Inval,
                "does not have target 2",
            ),
            (TargetIdentity { target_id: 5, ..of() }, Code::Inval, "knows it as 2"),
        ] {
            let (is, said) = said(&m, "oss1", &of);
            assert!(is == code && said.contains(what), "{said}");
            // A map without a cluster proves nothing.
            assert!(unfit(&pb::ClusterMap::default(), "oss1", &of).is_none());
        }
        let elsewhere = said(&m, "oss2", &of());
        assert!(
            elsewhere.0 == Code::Busy && elsewhere.1.contains("alive on 'oss1'"),
            "{elsewhere:?}"
        );
        m.targets[1].alive = false;
        assert_eq!(said(&m, "oss2", &of()).1, "", "it moves");
        let later = TargetIdentity { incarnation: 7 << 48, target_uuid: [9; 16], ..of() };
        assert_eq!(said(&m, "oss1", &later).1, "", "this group was given up");
    }

    #[test]
    fn the_last_replica_of_a_chain_that_never_had_anything_is_no_loss() {
        use ReplicaState::*;
        let why = |states: &[ReplicaState], used: &[ChainId]| {
            let used = used.iter().copied().collect();
            needed(&MapView::new(map(states)).unwrap(), &of(), Some(&used)).unwrap_or_default()
        };
        assert_eq!(why(&[ReplicaOffline, ReplicaLastsrv], &[0]), "");
        assert!(why(&[ReplicaOffline, ReplicaLastsrv], &[1]).contains("chains 1;"));
        for state in [ReplicaServing, ReplicaSyncing, ReplicaWaiting] {
            assert!(
                why(&[state], &[]).contains("chains 0;"),
                "{state:?}: the map is to say that it is out"
            );
        }
    }

    #[test]
    fn only_what_is_out_of_sync_everywhere_may_be_emptied() {
        use ReplicaState::*;
        assert_eq!(why(map(&[ReplicaOffline, ReplicaOffline]), &of()), "");
        assert_eq!(why(map(&[]), &of()), "", "it has no chain");
        for state in [ReplicaServing, ReplicaSyncing, ReplicaWaiting, ReplicaLastsrv] {
            let said = why(map(&[ReplicaOffline, state]), &of());
            assert!(
                said.starts_with("it may be the last replica in sync of chains 1;"),
                "{state:?}: {said}"
            );
        }
        let mut alive = map(&[ReplicaOffline]);
        alive.targets[1].alive = true;
        assert!(why(alive, &of()).contains("lease"));
        let mut doubt = map(&[ReplicaOffline]);
        doubt.doubts = vec![pb::Doubt { chain: 0, ..Default::default() }];
        assert!(why(doubt, &of()).contains("recovery"));
        let mut gone = map(&[]);
        gone.targets.pop();
        assert!(why(gone.clone(), &of()).contains("no longer has target 2"));
        let new = TargetIdentity { fs_uuid: [0; 16], target_id: TARGET_UNASSIGNED, ..of() };
        assert_eq!(why(gone, &new), "", "it was never in a cluster");
        let (elsewhere, later) = (
            TargetIdentity { fs_uuid: [7; 16], ..of() },
            TargetIdentity { incarnation: 7 << 48, ..of() },
        );
        for of in [elsewhere, later] {
            assert!(why(map(&[ReplicaOffline]), &of).contains("another cluster"));
        }
    }
}
