//! One target's part in one chain, with all its services. This only wires them.

use std::sync::{Arc, Weak};

use futures_util::future::BoxFuture;
use strake_proto::{ChainId, ChunkId, Result, TargetId};

use super::{
    context::Context,
    copies::Copies,
    leave::Departure,
    repair::Repair,
    replica::{ChunkData, Replica},
    resync::Resync,
    target::Target,
    trim::Trims,
    update_request::UpdateRequest,
    updates::Updates,
    vouch::Vouching,
};
use crate::{
    chain::{Input, OpId, View},
    engine::Staged,
};

/// See the module.
pub(super) struct ChainMember {
    pub replica: Arc<Replica>,
    pub repair: Arc<Repair>,
    pub updates: Arc<Updates>,
    pub trims: Trims,
    pub resync: Arc<Resync>,
    pub vouching: Arc<Vouching>,
    pub departure: Arc<Departure>,
}

impl ChainMember {
    /// `stale_through`: see [`crate::chain::ChainCore::new`].
    pub(super) fn new(
        ctx: Arc<Context>,
        target: Arc<Target>,
        id: TargetId,
        chain: ChainId,
        stale_through: u64,
    ) -> Arc<ChainMember> {
        Arc::new_cyclic(|me: &Weak<ChainMember>| {
            let data: Weak<dyn ChunkData> = me.clone();
            let replica = Replica::new(ctx, target, (id, chain), stale_through, data);
            let copies = Copies::new(replica.clone());
            let repair = Repair::new(replica.clone(), copies.clone());
            let updates = Updates::new(replica.clone(), repair.clone());
            ChainMember {
                trims: Trims::new(replica.clone(), updates.clone()),
                resync: Resync::new(replica.clone(), repair.clone()),
                vouching: Vouching::new(replica.clone(), copies, repair.clone()),
                departure: Departure::new(replica.clone()),
                replica,
                repair,
                updates,
            }
        })
    }

    /// Takes a new view. `left`: set if the target is no replica of the chain in this epoch; the
    /// value says whether all the replicas that the chain should have are in sync.
    pub(super) fn take_view(&self, view: View, left: Option<bool>) {
        let replica = &self.replica;
        let epoch = view.epoch;
        let before = replica.view().epoch;
        replica.feed(Input::View(view));
        let now = replica.view();
        replica.target.note_only_copy(replica.chain, now.serving == [replica.id]);
        if before >= epoch {
            return;
        }
        let env = &replica.ctx.env;
        replica.target.resync_sources.ends(replica.chain);
        self.departure.begin_epoch();
        if let Some(whole) = left {
            let departure = self.departure.clone();
            env.spawn(async move { departure.leave(epoch, whole).await });
        }
        if let (true, Some(to)) = (now.tail, now.syncing_successor()) {
            let resync = self.resync.clone();
            env.spawn(async move { resync.fill(to, epoch).await });
        }
    }

    /// Whether the tail may report that its successor is resynced.
    pub(super) fn has_synced(&self) -> bool {
        self.replica.may_report_synced(self.resync.synced())
    }
}

impl ChunkData for ChainMember {
    fn stage(
        self: Arc<Self>,
        op: OpId,
        update: Arc<UpdateRequest>,
    ) -> BoxFuture<'static, Result<Staged>> {
        Box::pin(async move { self.updates.stage(op, &update).await })
    }

    fn push(
        self: Arc<Self>,
        to: TargetId,
        epoch: u64,
        chunk: ChunkId,
    ) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move { self.resync.push(to, epoch, chunk).await.map(drop) })
    }
}
