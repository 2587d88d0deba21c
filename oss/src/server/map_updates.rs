//! Taking a newer cluster map: every replica gets its chain's new state.

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::Mutex;
use strake_proto::{
    ChainId, Code, Error, Incarnation, Kin, Result, TargetId,
    ids::TARGET_UNASSIGNED,
    map::{ChainExt, MapView},
    pb::{self, ReplicaState},
};

use super::{context::Context, replicas::Replicas, targets::Targets};
use crate::chain::View;

/// Chains for which the metadata servers do not know yet which replicas are in sync.
fn doubted(map: &MapView) -> BTreeSet<ChainId> {
    map.map.doubts.iter().map(|d| d.chain).collect()
}

/// Whether a target is not, and will not become, a replica of a chain, and another one is in sync.
fn has_left(chain: &pb::Chain, target: TargetId) -> bool {
    chain.head().is_some() && chain.state_of(target).is_none() && !chain.preferred.contains(&target)
}

/// Whether all replicas that a chain should have are in sync.
fn is_whole(chain: &pb::Chain) -> bool {
    chain.preferred.iter().all(|t| chain.state_of(*t) == Some(ReplicaState::ReplicaServing))
}

/// See the module.
pub(super) struct MapUpdates {
    ctx: Arc<Context>,
    targets: Arc<Targets>,
    replicas: Arc<Replicas>,
    /// Maps are applied one at a time, in order.
    applying: Mutex<()>,
}

impl MapUpdates {
    pub(super) fn new(
        ctx: Arc<Context>,
        targets: Arc<Targets>,
        replicas: Arc<Replicas>,
    ) -> MapUpdates {
        MapUpdates { ctx, targets, replicas, applying: Mutex::default() }
    }

    /// Takes a map if it is newer. `Stale`: it is of a group that this server did not join.
    pub(super) fn apply(&self, map: pb::ClusterMap) -> Result<()> {
        let _one = self.applying.lock();
        let before = self.ctx.map.load_full();
        if map.version <= before.version() {
            return Ok(());
        }
        let own = self.targets.incarnation();
        if own.kin(Incarnation(map.incarnation)) != Kin::Same && self.ctx.id() != 0 {
            return Err(Error::new(
                Code::Stale,
                "the metadata group was recovered; register again",
            ));
        }
        let first = before.version() == 0;
        let map = Arc::new(MapView::new(map)?);
        self.note_chain_views(&map);
        self.ctx.map.store(map.clone());
        self.make_replicas(&map, first);
        let doubted = doubted(&map);
        for r in self.replicas.all() {
            let (id, chain) = (r.replica.id, r.replica.chain);
            if let Some(chain) = map.chain(chain) {
                let left = !doubted.contains(&chain.id) && has_left(chain, id);
                r.take_view(View::of(chain, id), left.then(|| is_whole(chain)));
            }
        }
        self.ctx.kick.notify_one(); // acknowledges it
        Ok(())
    }

    /// A replica for every chain of a target. `first`: this is the server's first map.
    fn make_replicas(&self, map: &MapView, first: bool) {
        for target in self.targets.all().iter().filter(|t| t.id() != TARGET_UNASSIGNED) {
            let id = target.id();
            for chain in map.chains_of(id) {
                let in_former_life = first
                    && matches!(
                        chain.state_of(id),
                        Some(ReplicaState::ReplicaServing | ReplicaState::ReplicaSyncing)
                    );
                let stale_through = if in_former_life { chain.epoch } else { 0 };
                self.replicas.ensure(target, chain.id, stale_through);
            }
            // Data of chains that it left in an earlier run may still be there.
            for chain in target.engine.notes().known_chains() {
                self.replicas.ensure(target, chain, 0);
            }
        }
    }

    /// Stores the chain states that the targets act on from now on. Not for chains whose in-sync
    /// replicas the metadata servers do not know yet: those ask for the earlier states.
    fn note_chain_views(&self, map: &MapView) {
        let doubted = doubted(map);
        for t in self.targets.all().iter().filter(|t| t.id() != TARGET_UNASSIGNED) {
            let left: Vec<ChainId> = t.engine.notes().known_chains();
            let left =
                left.into_iter().filter_map(|id| map.chain(id)).filter(|c| has_left(c, t.id()));
            let chains = map.chains_of(t.id()).chain(left).filter(|c| !doubted.contains(&c.id));
            if let Err(e) = t.engine.notes().note_chain_views(chains) {
                tracing::warn!("target {}: cannot record the state of its chains: {e}", t.id());
            }
        }
    }
}
