//! All replicas on the targets of this server, by target and chain.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use strake_proto::{ChainId, Code, Error, Result, TargetId};

use super::{chain_member::ChainMember, context::Context, target::Target};

/// See the module.
pub(super) struct Replicas {
    ctx: Arc<Context>,
    all: Mutex<BTreeMap<(TargetId, ChainId), Arc<ChainMember>>>,
}

impl Replicas {
    pub(super) fn new(ctx: Arc<Context>) -> Arc<Replicas> {
        Arc::new(Replicas { ctx, all: Mutex::default() })
    }

    /// The replica of a chain on a target of this server. `NotServing`: there is none in the map
    /// that this server has; it fetches the map.
    pub(super) fn get(&self, target: TargetId, chain: ChainId) -> Result<Arc<ChainMember>> {
        self.all.lock().get(&(target, chain)).cloned().ok_or_else(|| {
            self.ctx.kick.notify_one();
            let m = format!(
                "target {target} of storage server '{}' has no replica of chain {chain}",
                self.ctx.cfg.name
            );
            Error::new(Code::NotServing, m)
        })
    }

    /// The replica with the lowest chain from `from` on, on a target of this server.
    pub(super) fn next(&self, target: TargetId, from: ChainId) -> Option<Arc<ChainMember>> {
        let all = self.all.lock();
        all.range((target, from)..=(target, ChainId::MAX)).next().map(|(_, r)| r.clone())
    }

    /// All of them, by target and chain.
    pub(super) fn all(&self) -> Vec<Arc<ChainMember>> {
        self.all.lock().values().cloned().collect()
    }

    /// Makes a replica if there is none. `stale_through`: see [`crate::chain::ChainCore::new`].
    pub(super) fn ensure(&self, target: &Arc<Target>, chain: ChainId, stale_through: u64) {
        let id = target.id();
        let new = || ChainMember::new(self.ctx.clone(), target.clone(), id, chain, stale_through);
        self.all.lock().entry((id, chain)).or_insert_with(new);
    }

    /// The target is no longer served.
    pub(super) fn remove_of(&self, target: TargetId) {
        self.all.lock().retain(|(id, _), _| *id != target);
    }

    pub(super) fn clear(&self) {
        self.all.lock().clear();
    }
}
