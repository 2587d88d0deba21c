//! Fetches newer cluster maps.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use prost::Message as _;
use strake_fabric::Endpoint;
use strake_proto::{Code, Error, Incarnation, Kin, Result, map::MapView, opcode, pb};
use tokio::sync::Mutex as AsyncMutex;

use super::{ops::decode, service::Metadata};

/// Requests for a map: one at a time.
#[derive(Default)]
pub(super) struct Refresh {
    turn: AsyncMutex<()>,
    /// Number of requests that ended.
    ended: AtomicU64,
}

impl Metadata {
    /// Takes a map if it is newer.
    pub(super) fn install_map(&self, map: pb::ClusterMap) -> Result<()> {
        let have = self.shared.map();
        if map.version <= have.version() && have.version() != 0 {
            return Ok(());
        }
        // Version numbers cannot be compared between two groups of metadata servers that were both
        // recovered from the remains of one group.
        let (own, theirs) = (Incarnation(have.map.incarnation), Incarnation(map.incarnation));
        if have.version() != 0 && own.kin(theirs) == Kin::Twin {
            let m = format!(
                "a metadata server of incarnation {theirs} answered, which was recovered \
                 separately from {own}; one of the two groups must be stopped"
            );
            return Err(Error::new(Code::NotLeader, m));
        }
        let view = MapView::new(map)?;
        let mds: Vec<Endpoint> = view.mds();
        {
            // The lock also makes sure that only one task at a time writes to the handover memory.
            let mut finder = self.finder.lock();
            if let Some(k) = self.shared.cfg.handover.as_ref().filter(|_| !mds.is_empty()) {
                k.set_mds(&mds);
            }
            finder.learn(mds);
        }
        let view = Arc::new(view);
        self.relays.learn(&view);
        self.shared.put_map(view);
        Ok(())
    }

    /// Asks for a map newer than version `than`. One request serves all concurrent callers. Does
    /// not report an error when there is no newer map yet.
    pub async fn refresh_map(self: &Arc<Self>, than: u64) {
        let ended = self.refresh.ended.load(Relaxed);
        let _one = self.refresh.turn.lock().await;
        if self.shared.map().version() > than || self.refresh.ended.load(Relaxed) != ended {
            return;
        }
        let body = Bytes::from(pb::MapRequest { have: than, latest: false }.encode_to_vec());
        let mut at = self.shared.attempts_for("fetching the cluster map", Duration::from_secs(1));
        let reply = self.call(opcode::MAP, |_| body.clone(), Duration::from_secs(1), &mut at).await;
        match reply.and_then(|m| decode::<pb::MapReply>(&m)) {
            Ok(pb::MapReply { map: Some(map) }) => {
                if let Err(e) = self.install_map(map) {
                    tracing::warn!("{e}");
                }
            }
            Ok(_) => {}
            Err(e) => tracing::debug!("{e}"),
        }
        self.refresh.ended.fetch_add(1, Relaxed);
    }
}
