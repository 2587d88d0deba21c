//! Administration over gRPC, for clients that prove the cluster key.

use std::{net::SocketAddr, sync::Arc};

use strake_fabric::admin;
use strake_proto::{Code, Error, pb};
use tonic::{Request, Response, Status};

use super::{service::Mds, status};
use pb::admin_server::{Admin, AdminServer};

struct Shell(Arc<Mds>);

fn refusal(e: Error) -> Status {
    let code = match e.code {
        Code::NoEnt => tonic::Code::NotFound,
        Code::Exist => tonic::Code::AlreadyExists,
        Code::Inval => tonic::Code::InvalidArgument,
        Code::NotEmpty | Code::NotLeader | Code::Busy | Code::OpNotSupp => {
            tonic::Code::FailedPrecondition
        }
        Code::Overloaded | Code::Disconnected | Code::TimedOut => tonic::Code::Unavailable,
        _ => tonic::Code::Internal,
    };
    let hint = if e.code == Code::NotLeader && e.leader != 0 {
        format!("; node {} leads", e.leader)
    } else {
        "".into()
    };
    Status::new(code, format!("{e}{hint}"))
}

#[tonic::async_trait]
impl Admin for Shell {
    async fn status(
        &self,
        _: Request<pb::StatusRequest>,
    ) -> Result<Response<pb::StatusReply>, Status> {
        Ok(Response::new(status::status(&self.0)))
    }

    async fn scrub(
        &self,
        _: Request<pb::ScrubRequest>,
    ) -> Result<Response<pb::ScrubReply>, Status> {
        Err(Status::unimplemented("this is a metadata server; ask a storage server"))
    }

    async fn add_targets(
        &self,
        _: Request<pb::AddTargetsRequest>,
    ) -> Result<Response<pb::AddTargetsReply>, Status> {
        Err(Status::unimplemented("this is a metadata server; ask a storage server"))
    }

    async fn pool_change(
        &self,
        r: Request<pb::PoolChangeRequest>,
    ) -> Result<Response<pb::PoolChangeReply>, Status> {
        let r = r.into_inner();
        let change = pb::PoolChange { pool: r.pool, action: r.action, targets: r.targets };
        self.0.membership.change_pool(change).await.map_err(refusal)?;
        Ok(Response::new(pb::PoolChangeReply {}))
    }
}

/// Serves until the future is dropped. Fails at once if the address is not available.
pub(super) fn serve(
    mds: Arc<Mds>,
    at: SocketAddr,
    cluster_key: &[u8; 32],
) -> strake_proto::Result<impl Future<Output = ()> + Send + use<>> {
    let env = mds.member.env.clone();
    let router = admin::builder().add_service(AdminServer::new(Shell(mds)));
    admin::serve(at, env, cluster_key, router)
}
