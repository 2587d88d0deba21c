//! Administration over gRPC, for clients that know the cluster key.

use std::{net::SocketAddr, sync::Arc};

use strake_fabric::admin;
use strake_proto::{Code, Result, pb};
use tonic::{Request, Response, Status};

use super::{add_targets::AddTargets, node::Node, scrub::Ask, status::status};
use pb::admin_server::{Admin, AdminServer};

struct Shell(Arc<Node>, Arc<AddTargets>);

#[tonic::async_trait]
impl Admin for Shell {
    async fn status(
        &self,
        _: Request<pb::StatusRequest>,
    ) -> Result<Response<pb::StatusReply>, Status> {
        Ok(Response::new(status(&self.0)))
    }
    async fn scrub(
        &self,
        r: Request<pb::ScrubRequest>,
    ) -> Result<Response<pb::ScrubReply>, Status> {
        let r = r.into_inner();
        let ask = match r.action {
            0 => None,
            1 => Some(Ask::Start),
            2 => Some(Ask::Stop),
            3 => Some(Ask::Resume),
            other => {
                return Err(Status::invalid_argument(format!(
                    "this version does not know action {other} of a scrub"
                )));
            }
        };
        let targets =
            self.0.targets.scrub(ask, &r.targets).map_err(|e| Status::not_found(e.message))?;
        Ok(Response::new(pb::ScrubReply { targets }))
    }
    async fn add_targets(
        &self,
        _: Request<pb::AddTargetsRequest>,
    ) -> Result<Response<pb::AddTargetsReply>, Status> {
        let (node, more) = (self.0.clone(), self.1.clone());
        // A task of its own, so that it finishes even if the caller does not wait.
        let added = tokio::spawn(async move { more.add(&node.targets).await }).await;
        let added = added.map_err(|e| Status::internal(e.to_string()))?;
        let targets = added.map_err(|e| match e.code {
            Code::Disconnected | Code::TimedOut => Status::unavailable(e.message),
            _ => Status::failed_precondition(e.message),
        })?;
        Ok(Response::new(pb::AddTargetsReply { targets }))
    }
    async fn pool_change(
        &self,
        _: Request<pb::PoolChangeRequest>,
    ) -> Result<Response<pb::PoolChangeReply>, Status> {
        Err(Status::unimplemented("this is a storage server; ask a metadata server"))
    }
}

/// Serves until the future is dropped. Fails at once if the address cannot be bound.
pub(super) fn serve(
    node: Arc<Node>,
    more: Arc<AddTargets>,
    at: SocketAddr,
    cluster_key: &[u8; 32],
) -> Result<impl Future<Output = ()> + Send + use<>> {
    let env = node.ctx.env.clone();
    let router = admin::builder().add_service(AdminServer::new(Shell(node, more)));
    admin::serve(at, env, cluster_key, router)
}
