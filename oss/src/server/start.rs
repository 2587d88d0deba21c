//! Starting and stopping a storage server.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use strake_fabric::{Endpoint, Listener};
use strake_links::Relay;
use strake_proto::{Code, Result, TargetId, pb};

use super::{
    add_targets::AddTargets,
    config::Config,
    node::{Node, Parts},
    peers::MdsLink,
    refused_targets::RefusedTarget,
    scrub::Ask,
    service::OssService,
    status::status,
};

/// A running server. Dropping it ends it without a flush; [`OssServer::shutdown`] flushes first.
pub struct OssServer {
    pub(super) node: Arc<Node>,
    listeners: Vec<Listener>,
    endpoints: Vec<Endpoint>,
    /// For adding targets, if the server was started from its folders.
    pub(super) more: Option<Arc<AddTargets>>,
    pub(super) tasks: Vec<tokio::task::JoinHandle<()>>,
}

/// Listens, registers (retrying until a metadata leader answers) and serves. `EINVAL` if a target
/// belongs to another cluster.
pub async fn start(cfg: Config, parts: Parts) -> Result<OssServer> {
    start_without(cfg, parts, Vec::new()).await
}

/// As [`start`], with some targets out of service.
pub(super) fn start_without(
    cfg: Config,
    parts: Parts,
    refused: Vec<Arc<RefusedTarget>>,
) -> BoxFuture<'static, Result<OssServer>> {
    Box::pin(async move {
        cfg.check()?;
        let (env, fabric) = (parts.env.clone(), parts.fabric.clone());
        let node = Node::new(cfg, parts, refused.clone());
        let mut listeners = Vec::new();
        let relay = Arc::new(Relay::new(fabric.clone()));
        for at in &node.ctx.cfg.listen {
            let service = OssService { node: node.clone(), relay: relay.clone() };
            listeners.push(fabric.listen(at, Arc::new(service)).await?);
        }
        let endpoints: Vec<Endpoint> = listeners.iter().map(|l| l.endpoint().clone()).collect();
        let mut mds = MdsLink::new(fabric, node.ctx.cfg.mds.clone());
        let mut pause = Duration::from_millis(50);
        while let Err(e) = node.membership.register(&mut mds, &endpoints).await {
            if e.code == Code::Inval {
                return Err(
                    e.context(format!("storage server '{}' cannot join", node.ctx.cfg.name))
                );
            }
            tracing::warn!("registration failed, trying again: {e}");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(1));
        }
        let tasks =
            vec![env.spawn(node.membership.clone().stay_registered(mds, endpoints.clone()))];
        // More targets may have been taken out since; those are looked after already.
        refused.into_iter().for_each(|o| node.targets.look_after(o));
        node.targets.all().iter().for_each(|t| node.targets.tend(t));
        Ok(OssServer { node, listeners, endpoints, more: None, tasks })
    })
}

impl OssServer {
    /// The first address that it listens on.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoints[0].clone()
    }

    /// What an administrator is told about this server and its targets.
    pub fn status(&self) -> pb::StatusReply {
        status(&self.node)
    }

    /// Applies a request to the scrubs of all targets. Returns how far each is and what was found
    /// damaged.
    pub fn scrub(&self, ask: Option<Ask>) -> Vec<pb::ScrubStatus> {
        self.node.targets.scrub(ask, &[]).unwrap_or_default()
    }

    /// Reads the configuration again: new targets join, and those out of service are looked at.
    /// Returns the numbers of the new ones.
    pub fn reload<'a>(&'a self) -> BoxFuture<'a, Result<Vec<TargetId>>> {
        Box::pin(async move {
            match &self.more {
                Some(more) => more.add(&self.node.targets).await,
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
            for t in self.node.targets.all().iter() {
                result = result.and(t.engine.flush().await);
                t.damage.sync().await;
            }
            let engines: Vec<_> =
                self.node.targets.all().iter().map(|t| Arc::downgrade(&t.engine)).collect();
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
        self.tasks.extend(self.node.targets.abort_tasks());
        self.node.stop();
    }
}

impl Drop for OssServer {
    fn drop(&mut self) {
        self.stop();
    }
}
