//! The storage server: a thin shell that connects chains, engines and the fabric.
//!
//! | file | idea |
//! |---|---|
//! | `service.rs` | incoming requests: rights, checks, dispatch |
//! | `replica.rs` | carries out what a chain's state machine asks for |
//! | `trim.rs` | removing a file's data after its end |
//! | `resync.rs`, `backpressure.rs` | resyncing a replica; how that yields to applications |
//! | `repair.rs`, `damage.rs` | repairing a damaged chunk; what was found damaged |
//! | `copies.rs` | copies that are not in sync, as sources for repair |
//! | `leave.rs` | the data of a chain that a target has left |
//! | `scrub.rs` | reading everything from time to time, to find damage before a reader does |
//! | `refused_targets.rs` | missing or damaged targets, and how they return to service |
//! | `node.rs` | shared state, cluster map; `node/registration.rs`: membership, heartbeats, lease |
//! | `peers.rs` | connections to other servers |
//! | `places.rs` | paths of damaged files, for the log |
//! | `config.rs` | configuration keys |
//! | `disk.rs`, `admin.rs` | starting from target folders; gRPC status |

mod admin;
mod backpressure;
mod config;
mod copies;
mod damage;
mod disk;
mod endings;
mod leave;
mod node;
mod peers;
mod places;
mod refused_targets;
mod repair;
mod replica;
mod resync;
mod scrub;
mod service;
#[cfg(test)]
mod tests;
mod trim;

use futures_util::future::BoxFuture;
use std::{sync::Arc, time::Duration};

pub use config::{Config, TargetConfig};
pub use disk::{Reread, start_on_disk, start_on_disk_with};
use node::Node;
use peers::{MdsLink, Peers};
use places::Places;
use refused_targets::RefusedTarget;
pub use scrub::Ask;
use strake_fabric::{Endpoint, Fabric, Listener, Relay};
use strake_proto::{CapKey, Code, Result, TargetId, pb};
use strake_runtime::Env;

use crate::engine::Engine;

/// The parts of a server; the simulator brings its own.
pub struct Parts {
    pub env: Env,
    pub fabric: Arc<dyn Fabric>,
    /// One per target, opened.
    pub targets: Vec<Arc<Engine>>,
    pub cap_key: CapKey,
}

/// A running server. Dropping it ends it without a flush; [`OssServer::shutdown`] flushes first.
pub struct OssServer {
    node: Arc<Node>,
    listeners: Vec<Listener>,
    endpoints: Vec<Endpoint>,
    /// For adding targets, if the server was started from its folders.
    more: Option<Arc<disk::More>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

/// Listens, registers (retrying until a metadata leader answers) and serves. `EINVAL` if a target
/// belongs to another cluster.
pub async fn start(cfg: Config, parts: Parts) -> Result<OssServer> {
    start_without(cfg, parts, Vec::new()).await
}

/// As [`start`], with some targets out of service.
fn start_without(
    cfg: Config,
    parts: Parts,
    refused: Vec<Arc<RefusedTarget>>,
) -> BoxFuture<'static, Result<OssServer>> {
    Box::pin(async move {
        cfg.check()?;
        let (env, fabric) = (parts.env.clone(), parts.fabric.clone());
        let peers = Peers::new(env.clone(), fabric.clone());
        let places = Places::new(fabric.clone(), cfg.mds.clone());
        let node = Node::new(cfg, parts, (peers, places), refused.clone());
        let mut listeners = Vec::new();
        let relay = Arc::new(Relay::new(fabric.clone()));
        for at in &node.cfg.listen {
            let service = service::OssService { node: node.clone(), relay: relay.clone() };
            listeners.push(fabric.listen(at, Arc::new(service)).await?);
        }
        let endpoints: Vec<Endpoint> = listeners.iter().map(|l| l.endpoint().clone()).collect();
        let mut mds = MdsLink::new(fabric, node.cfg.mds.clone());
        let mut pause = Duration::from_millis(50);
        while let Err(e) = node.register(&mut mds, &endpoints).await {
            if e.code == Code::Inval {
                return Err(e.context(format!("storage server '{}' cannot join", node.cfg.name)));
            }
            tracing::warn!("registration failed, trying again: {e}");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
        let tasks = vec![env.spawn(node.clone().stay_registered(mds, endpoints.clone()))];
        // More targets may have been taken out since; those are looked after already.
        refused.into_iter().for_each(|o| node.look_after(o));
        node.targets().iter().for_each(|t| node.tend(t));
        Ok(OssServer { node, listeners, endpoints, more: None, tasks })
    })
}

impl OssServer {
    /// The first address that it listens on.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoints[0].clone()
    }

    pub fn status(&self) -> pb::StatusReply {
        self.node.status()
    }

    /// Applies a request to the scrubs of all targets. Returns how far each is and what was found
    /// damaged.
    pub fn scrub(&self, ask: Option<Ask>) -> Vec<pb::ScrubStatus> {
        self.node.scrub(ask, &[]).unwrap_or_default()
    }

    /// Reads the configuration again: new targets join, and those out of service are looked at.
    /// Returns the numbers of the new ones.
    pub fn reload<'a>(&'a self) -> BoxFuture<'a, Result<Vec<TargetId>>> {
        Box::pin(async move {
            match &self.more {
                Some(more) => more.add(&self.node).await,
                None => Ok(Vec::new()),
            }
        })
    }

    /// Stops serving, flushes, and ends; its targets may be opened again. Chains continue without
    /// it once its lease has expired.
    pub fn shutdown(mut self) -> BoxFuture<'static, Result<()>> {
        Box::pin(async move {
            self.stop();
            for t in std::mem::take(&mut self.tasks) {
                let _ = t.await; // ended by `stop`
            }
            let mut result = Ok(());
            for t in self.node.targets().iter() {
                result = result.and(t.engine.flush().await);
                t.damage.sync().await;
            }
            let engines: Vec<_> =
                self.node.targets().iter().map(|t| Arc::downgrade(&t.engine)).collect();
            drop(self);
            // Requests in progress and connections still hold the engines for a moment.
            let until = tokio::time::Instant::now() + Duration::from_secs(5);
            while engines.iter().any(|e| e.strong_count() > 0)
                && tokio::time::Instant::now() < until
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            result
        })
    }

    fn stop(&mut self) {
        self.listeners.clear();
        for t in &self.tasks {
            t.abort();
        }
        self.tasks.extend(self.node.untended());
        self.node.stop();
    }
}

impl Drop for OssServer {
    fn drop(&mut self) {
        self.stop();
    }
}
