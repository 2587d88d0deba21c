//! Administration over gRPC. Not authenticated: listens only where the configuration says.

use std::{net::SocketAddr, sync::Arc};

use strake_proto::{Code, Error, Result, pb};
use tonic::{Request, Response, Status, transport::server::TcpIncoming};

use super::{disk::More, node::Node, scrub::Ask};
use pb::admin_server::{Admin, AdminServer};

struct Shell(Arc<Node>, Arc<More>);

#[tonic::async_trait]
impl Admin for Shell {
    async fn status(&self, _: Request<pb::StatusRequest>) -> Result<Response<pb::StatusReply>, Status> {
        Ok(Response::new(self.0.status()))
    }
    async fn scrub(&self, r: Request<pb::ScrubRequest>) -> Result<Response<pb::ScrubReply>, Status> {
        let r = r.into_inner();
        let ask = match r.action {
            0 => None,
            1 => Some(Ask::Start),
            2 => Some(Ask::Stop),
            3 => Some(Ask::Resume),
            other => return Err(Status::invalid_argument(format!("this version knows no action {other} of a scrub"))),
        };
        let targets = self.0.scrub(ask, &r.targets).map_err(|e| Status::not_found(e.message))?;
        Ok(Response::new(pb::ScrubReply { targets }))
    }
    async fn add_targets(&self, _: Request<pb::AddTargetsRequest>) -> Result<Response<pb::AddTargetsReply>, Status> {
        let (node, more) = (self.0.clone(), self.1.clone());
        // To its end, whether or not the caller waits for it.
        let added = tokio::spawn(async move { more.add(&node).await }).await;
        let added = added.map_err(|e| Status::internal(e.to_string()))?;
        let targets = added.map_err(|e| match e.code {
            Code::Disconnected | Code::TimedOut => Status::unavailable(e.message),
            _ => Status::failed_precondition(e.message),
        })?;
        Ok(Response::new(pb::AddTargetsReply { targets }))
    }
    async fn pool_change(&self, _: Request<pb::PoolChangeRequest>) -> Result<Response<pb::PoolChangeReply>, Status> {
        Err(Status::unimplemented("this is a storage server; ask a metadata server"))
    }
}

/// Serves until the future is dropped. Fails at once if the address cannot be had.
pub(super) fn serve(node: Arc<Node>, more: Arc<More>, at: SocketAddr) -> Result<impl Future<Output = ()> + Send> {
    let incoming = TcpIncoming::bind(at).map_err(|e| Error::from(e).context(format_args!("admin address {at}")))?;
    let server = tonic::transport::Server::builder()
        .concurrency_limit_per_connection(16)
        .add_service(AdminServer::new(Shell(node, more)));
    Ok(async move {
        if let Err(e) = server.serve_with_incoming(incoming).await {
            tracing::error!("administration at {at} stopped: {e}");
        }
    })
}
