//! What all services of a storage server use: its configuration and clock, the cluster map, and
//! connections to other servers.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use strake_fabric::Fabric;
use strake_proto::{NodeId, data::Clock, map::MapView};
use strake_runtime::Env;
use tokio::sync::Notify;

use super::{config::Config, peers::Peers, places::Places};
use crate::chain::OpId;

/// See the module. Only the map and this server's own number change.
pub(super) struct Context {
    pub cfg: Config,
    pub env: Env,
    pub peers: Peers,
    pub places: Places,
    /// The newest map that this server acts on.
    pub map: ArcSwap<MapView>,
    /// Send a heartbeat now: the map is stale, or there is news.
    pub kick: Notify,
    /// When this server was started, on the boot clock.
    pub started: Duration,
    id: AtomicU32,
    next_op: AtomicU64,
    stopped: AtomicBool,
}

impl Context {
    pub(super) fn new(cfg: Config, env: Env, fabric: Arc<dyn Fabric>) -> Arc<Context> {
        Arc::new(Context {
            peers: Peers::new(env.clone(), fabric.clone()),
            places: Places::new(fabric, cfg.mds.clone()),
            map: ArcSwap::from_pointee(MapView::default()),
            kick: Notify::new(),
            started: env.boot(),
            id: AtomicU32::new(0),
            next_op: AtomicU64::new(1),
            stopped: AtomicBool::new(false),
            cfg,
            env,
        })
    }

    /// This server's number in the cluster; 0 until it is registered.
    pub(super) fn id(&self) -> NodeId {
        self.id.load(Ordering::Acquire)
    }

    pub(super) fn set_id(&self, id: NodeId) {
        self.id.store(id, Ordering::Release);
    }

    /// A number for an operation of a chain, which no other has in this run.
    pub(super) fn next_op(&self) -> OpId {
        self.next_op.fetch_add(1, Ordering::Relaxed)
    }

    /// The server's time, for clients to put into updates; `None`: updates live for ever.
    pub(super) fn clock(&self) -> Option<Clock> {
        let life = self.cfg.update_life_ms;
        (life != 0).then(|| Clock { now: self.env.boot().as_millis() as u64 + 1, life })
    }

    pub(super) fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// From now on no service begins anything new.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }
}
