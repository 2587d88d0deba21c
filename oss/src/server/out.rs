//! Targets that were damaged when the server opened them, or whose chunk table cannot be read since. The others serve; the cluster takes such a one for dead, and its chains go on
//! without it.
//!
//! Where the device is whole and the chunk table is what is damaged, the target has lost its data and nothing else. It may come back
//! with an empty table under the same identity, and be filled like any replica that was away, **once no chain counts on what it had**: the newest
//! map, agreed on after its last life ended, says that it is dead and OFFLINE in each of its chains. From there only a fill leads back into
//! sync (`docs/replication.md`, "Membership"), and there is none before it has come back. In sync, LASTSRV or in a chain in doubt it may be the
//! last one to hold something, so it stays out until somebody sees to it.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_proto::{
    ChainId, Code, Error, Result,
    ids::TARGET_UNASSIGNED,
    map::{ChainExt, MapView},
    pb::{Chain, ReplicaState},
};

use super::node::{Node, follows};
use crate::engine::{Damaged, Engine, Options, TargetIdentity};

/// Between two looks at the map.
const LOOK: Duration = Duration::from_millis(500);
/// Before what failed is tried again.
const AGAIN: Duration = Duration::from_secs(30);
const NEXT_STEP: &str = "see docs/operations.md, \"A target that is refused\"";

/// One of them, until it is back.
pub struct Out {
    damaged: Damaged,
    /// What becomes of it.
    now: Mutex<String>,
}

impl Out {
    pub fn new(damaged: Damaged) -> Arc<Out> {
        tracing::error!("a target is out of service, the others go on: {}; {NEXT_STEP}", damaged.why);
        Arc::new(Out { damaged, now: Mutex::new(NEXT_STEP.into()) })
    }

    /// Whose it is, where that is known.
    pub fn id(&self) -> Option<&TargetIdentity> {
        self.damaged.id.as_ref()
    }

    /// For the status.
    pub fn notice(&self) -> String {
        let name = self.id().map_or_else(|| "a target".into(), |id| format!("target {}", id.target_id));
        format!("{name} is out of service: {}; {}", self.damaged.why, self.now.lock())
    }

    fn is_now(&self, what: String) {
        let mut now = self.now.lock();
        if *now != what {
            tracing::warn!("{}: {what}", self.damaged.path.display());
            *now = what;
        }
    }
}

/// Why something that a target had may still be needed; else it is out of sync wherever it was, and whatever it has worth nothing.
/// `used`: the chains that it was ever given something of, `None`: that is not known. Of another one it is no loss, even as the last replica in sync.
pub(super) fn needed(map: &MapView, of: &TargetIdentity, used: Option<&BTreeSet<ChainId>>) -> Option<String> {
    let known = map.map.targets.iter().find(|t| t.uuid[..] == of.target_uuid);
    let Some(t) = known else {
        // It never had anything, or the cluster has taken it out.
        let new = of.target_id == TARGET_UNASSIGNED;
        return (!new).then(|| format!("the cluster has no target {} any more; {NEXT_STEP}", of.target_id));
    };
    let joined = of.fs_uuid != [0; 16];
    if joined && map.map.fs_uuid[..] != of.fs_uuid || !follows(of, map.map.incarnation) {
        return Some("it belongs to another cluster".into());
    }
    if !map.map.doubts.is_empty() {
        return Some("what is in sync is not known yet since the metadata servers were recovered".into());
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
    let m = || format!("of chains {} it may be the last replica in sync; {NEXT_STEP}", counted.join(", "));
    (!counted.is_empty()).then(m)
}

/// Has a target come back empty when nothing that it had is needed.
pub(super) async fn come_back(node: Arc<Node>, out: Arc<Out>) {
    let Some(of) = out.id().filter(|_| out.damaged.table_only) else { return };
    let engine = loop {
        tokio::time::sleep(LOOK).await;
        if let Some(why) = needed(&node.map.load(), of, out.damaged.used.as_ref()) {
            out.is_now(why);
            continue;
        }
        match empty(&node, &out.damaged).await {
            Ok(engine) => break engine,
            // Whoever used it last, while it was in service, still does.
            Err(e) if e.code == Code::Busy => out.is_now(e.message),
            Err(e) => {
                out.is_now(format!("it cannot be made empty: {e}; {NEXT_STEP}"));
                tokio::time::sleep(AGAIN).await;
            }
        }
    };
    loop {
        match node.add_target(engine.clone()).await {
            Ok(id) => return node.is_back(&out, id),
            Err(e) if e.code == Code::Disconnected => return, // the server stops
            Err(e) => {
                out.is_now(format!("it is empty and cannot be registered: {e}"));
                tokio::time::sleep(LOOK).await;
            }
        }
    }
}

/// Before anybody hears of it, it knows durably what it is not: in sync. Metadata servers that are recovered from an older state ask for that.
async fn empty(node: &Node, damaged: &Damaged) -> Result<Arc<Engine>> {
    let (engine, kept) = damaged.empty(node.pool.clone(), Options::default()).await?;
    let (id, kept) = (engine.identity().target_id, kept.display());
    tracing::warn!(
        "target {id} lost its chunk table and comes back empty, to be filled; what was damaged is kept as {kept}"
    );
    engine.note_sights(node.map.load().chains_of(id))?;
    engine.sync_sights().await?;
    Ok(engine)
}

/// What to say where no target is left to serve.
pub(super) fn none_left(out: &[Damaged]) -> Error {
    let all: Vec<String> = out.iter().map(|d| d.why.to_string()).collect();
    Error::new(Code::Corrupt, format!("no target can be served: {}; {NEXT_STEP}", all.join("; ")))
}

#[cfg(test)]
mod tests {
    use strake_proto::pb;

    use super::*;

    fn of() -> TargetIdentity {
        TargetIdentity { fs_uuid: [1; 16], target_uuid: [2; 16], target_id: 2, node: "oss1".into(), incarnation: 0 }
    }

    /// Targets 1 and 2; chains of the two with these states of target 2.
    fn map(states: &[ReplicaState]) -> pb::ClusterMap {
        use ReplicaState::{ReplicaLastsrv, ReplicaServing};
        let target = |id: u8| pb::Target { id: id.into(), uuid: vec![id; 16].into(), ..Default::default() };
        let chain = |(id, state): (usize, &ReplicaState)| {
            let other = if *state == ReplicaLastsrv { ReplicaLastsrv } else { ReplicaServing };
            let mut replicas =
                vec![pb::Replica { target: 1, state: other as i32 }, pb::Replica { target: 2, state: *state as i32 }];
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

    fn why(map: pb::ClusterMap, of: &TargetIdentity) -> String {
        needed(&MapView::new(map).unwrap(), of, None).unwrap_or_default()
    }

    #[test]
    fn the_last_replica_of_a_chain_that_never_had_anything_is_no_loss() {
        use ReplicaState::*;
        let why = |states: &[ReplicaState], used: &[ChainId]| {
            let used = used.iter().copied().collect();
            needed(&MapView::new(map(states)).unwrap(), &of(), Some(&used)).unwrap_or_default()
        };
        assert_eq!(why(&[ReplicaOffline, ReplicaLastsrv], &[0]), "");
        assert!(why(&[ReplicaOffline, ReplicaLastsrv], &[1]).contains("chains 1 "));
        for state in [ReplicaServing, ReplicaSyncing, ReplicaWaiting] {
            assert!(why(&[state], &[]).contains("chains 0 "), "{state:?}: the map is to say that it is out");
        }
    }

    #[test]
    fn only_what_is_out_of_sync_everywhere_may_be_emptied() {
        use ReplicaState::*;
        assert_eq!(why(map(&[ReplicaOffline, ReplicaOffline]), &of()), "");
        assert_eq!(why(map(&[]), &of()), "", "it has no chain");
        for state in [ReplicaServing, ReplicaSyncing, ReplicaWaiting, ReplicaLastsrv] {
            let said = why(map(&[ReplicaOffline, state]), &of());
            assert!(said.starts_with("of chains 1 it may be the last"), "{state:?}: {said}");
        }
        let mut alive = map(&[ReplicaOffline]);
        alive.targets[1].alive = true;
        assert!(why(alive, &of()).contains("lease"));
        let mut doubt = map(&[ReplicaOffline]);
        doubt.doubts = vec![pb::Doubt { chain: 0, ..Default::default() }];
        assert!(why(doubt, &of()).contains("recovered"));
        let mut gone = map(&[]);
        gone.targets.pop();
        assert!(why(gone.clone(), &of()).contains("no target 2 any more"));
        let new = TargetIdentity { fs_uuid: [0; 16], target_id: TARGET_UNASSIGNED, ..of() };
        assert_eq!(why(gone, &new), "", "it was never in a cluster");
        let (elsewhere, later) =
            (TargetIdentity { fs_uuid: [7; 16], ..of() }, TargetIdentity { incarnation: 7 << 48, ..of() });
        for of in [elsewhere, later] {
            assert!(why(map(&[ReplicaOffline]), &of).contains("another cluster"));
        }
    }
}
