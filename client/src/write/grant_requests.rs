//! Requests disk space for dirty data from storage targets. The rules are in `docs/leases.md`,
//! "Space"; [`Grants`] keeps the numbers.
//!
//! [`Grants`]: crate::write::grants::Grants

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use futures_util::future::join_all;
use strake_fabric::Message;
use strake_proto::{
    ChainId, ChunkId, Result, SessionId, TargetId,
    data::{DataReply, DataRequest, GRANT_UNIT},
    layout::Piece,
    map::{ChainExt, MapView},
    opcode,
    pb::{self, ReplicaState},
};

use tokio::sync::OwnedMutexGuard;

use crate::{
    data::chains::{chain_of, session_lost},
    inode::{Inode, caps::Cap},
    shared::retry::{DataVerdict, data_verdict},
    write::grants::{Ask, Cost},
    write::held_writes::WriteBack,
};

/// A write that could be held back waits at most this long for an answer.
const ASK_TRY: Duration = Duration::from_secs(1);

/// The replicas that receive the updates of a chain.
fn takers(chain: &pb::Chain) -> impl Iterator<Item = TargetId> + '_ {
    let takes = |s| matches!(s, ReplicaState::ReplicaServing | ReplicaState::ReplicaSyncing);
    chain.replicas.iter().filter(move |r| takes(r.state())).map(|r| r.target)
}

/// Blocks that an update of a piece touches: each is written to a new place.
fn blocks(p: &Piece) -> u64 {
    (u64::from(p.offset) % GRANT_UNIT + u64::from(p.len)).div_ceil(GRANT_UNIT)
}

impl WriteBack {
    /// The most blocks that writing a range takes of each target. `joins`: the first block is
    /// counted already by the write just before it. `None`: a chain accepts no updates now.
    pub(crate) fn cost(
        &self,
        inode: &Inode,
        session: SessionId,
        at: u64,
        len: u64,
        joins: bool,
    ) -> Option<Cost> {
        let (map, stripes) = (self.shared.map(), inode.placed().stripes);
        let mut cost = Cost::new(session);
        for p in stripes.split(at, len) {
            let n = blocks(&p) - u64::from(joins && p.file_offset == at);
            let chain = map.chain(p.chain)?;
            chain.head()?;
            takers(chain).for_each(|t| cost.add(t, p.chain, n));
        }
        Some(cost)
    }

    /// Whether every replica of a chain understands writes that use a grant.
    pub(crate) fn may_take_granted(&self, map: &MapView, chain: ChainId) -> bool {
        map.chain(chain).is_some_and(|c| self.grants.lock().all_know(takers(c)))
    }

    /// Requests the space that a write needs to be held back.
    pub(crate) async fn ask_space(self: &Arc<Self>, inode: &Arc<Inode>, at: u64, len: u64) {
        let Some(session) = self.metadata.current_session() else { return };
        let Some(cost) = self.cost(inode, session.id, at, len, false) else { return };
        let lacking = self.grants.lock().lacking(self.shared.env.boot(), &cost);
        let asking = lacking.into_iter().map(async |(target, chain, more)| {
            let _one = self.turn_to_ask(target).await;
            // Another task may have requested enough while this one waited.
            if self
                .grants
                .lock()
                .lacking(self.shared.env.boot(), &cost)
                .iter()
                .any(|(t, ..)| *t == target)
            {
                self.ask_target(inode, target, chain, more).await;
            }
        });
        join_all(asking).await;
    }

    /// Renews the grants for dirty data, and requests more before it is needed.
    pub(crate) fn renew_space(self: &Arc<Self>, holding: &[Arc<Inode>]) {
        let mut due: BTreeSet<TargetId> =
            self.grants.lock().due(self.shared.env.boot()).into_iter().collect();
        for inode in holding {
            if due.is_empty() {
                return;
            }
            for (target, chain) in inode.back.targets().into_iter().filter(|(t, _)| due.remove(t)) {
                let (core, inode) = (self.clone(), inode.clone());
                self.shared.env.spawn(async move {
                    let _one = core.turn_to_ask(target).await;
                    core.ask_target(&inode, target, chain, 0).await;
                });
            }
        }
    }

    /// One request to a target at a time: otherwise it would be unclear which of two answers is
    /// valid.
    async fn turn_to_ask(&self, target: TargetId) -> OwnedMutexGuard<()> {
        let turn = self.asking_grants.lock().entry(target).or_default().clone();
        turn.lock_owned().await
    }

    async fn ask_target(
        self: &Arc<Self>,
        inode: &Inode,
        target: TargetId,
        chain: ChainId,
        more: u64,
    ) {
        let ask = self.grants.lock().ask(self.shared.env.boot(), target, more);
        let granted = tokio::time::timeout(ASK_TRY, self.ask_grant(inode, &ask, chain)).await;
        let granted = granted
            .ok()
            .and_then(|r| r.inspect_err(|e| tracing::debug!(target, "no grant: {e}")).ok());
        self.grants.lock().answered(self.shared.env.boot(), &ask, granted);
    }

    async fn ask_grant(self: &Arc<Self>, inode: &Inode, ask: &Ask, chain: ChainId) -> Result<u64> {
        let cap = self.files.capability(inode, true, None).await?;
        match self.ask_grant_with(&cap, inode, ask, chain).await {
            Err(e) if data_verdict(&e) == DataVerdict::NewCapability => {
                let cap = self.files.capability(inode, true, Some(&cap)).await?;
                self.ask_grant_with(&cap, inode, ask, chain).await
            }
            answer => answer,
        }
    }

    async fn ask_grant_with(
        &self,
        cap: &Cap,
        inode: &Inode,
        ask: &Ask,
        chain: ChainId,
    ) -> Result<u64> {
        if cap.session != ask.session {
            return Err(session_lost());
        }
        let map = self.shared.map();
        let chain = chain_of(&map, chain)?;
        let chunk = ChunkId { ino: inode.ino, data: inode.placed().stripes.data, index: 0 };
        let request = DataRequest {
            offset: ask.keep as u32,
            len: ask.want as u32,
            session: ask.session,
            seq: ask.sent.as_nanos() as u64,
            cap: Some(cap.bytes),
            ..DataRequest::new(chain.id, chain.epoch, ask.target, chunk)
        };
        self.shared.stats.grant_requests.fetch_add(1, Relaxed);
        let conn = self.storage.connection_to(&map, ask.target).await?;
        let reply = conn.call(Message::new(opcode::GRANT, request.encode()), ASK_TRY).await?;
        Ok(u64::from(DataReply::decode(&reply.body)?.len))
    }
}
