//! Administration over gRPC. Not authenticated: listens only where the configuration says.

use std::{net::SocketAddr, sync::Arc};

use strake_proto::{Code, Error, map::ROLE_MDS, pb};
use tonic::{Request, Response, Status, transport::server::TcpIncoming};

use super::Mds;
use crate::{cluster::state::FIRST_OSS_NODE, consensus::MemberChange};
use pb::{
    admin_server::{Admin, AdminServer},
    log_command::Command,
    mds_admin_server::{MdsAdmin, MdsAdminServer},
};

#[derive(Clone)]
struct Shell(Arc<Mds>);

fn status(e: Error) -> Status {
    let code = match e.code {
        Code::NoEnt => tonic::Code::NotFound,
        Code::Exist => tonic::Code::AlreadyExists,
        Code::Inval => tonic::Code::InvalidArgument,
        Code::NotEmpty | Code::NotLeader | Code::Busy => tonic::Code::FailedPrecondition,
        Code::Overloaded | Code::Disconnected | Code::TimedOut => tonic::Code::Unavailable,
        _ => tonic::Code::Internal,
    };
    let hint =
        if e.code == Code::NotLeader && e.leader != 0 { format!("; node {} leads", e.leader) } else { "".into() };
    Status::new(code, format!("{e}{hint}"))
}

#[tonic::async_trait]
impl Admin for Shell {
    async fn status(&self, _: Request<pb::StatusRequest>) -> Result<Response<pb::StatusReply>, Status> {
        Ok(Response::new(self.0.status()))
    }

    async fn transfer_leader(
        &self,
        r: Request<pb::TransferLeaderRequest>,
    ) -> Result<Response<pb::TransferLeaderReply>, Status> {
        self.0.node.transfer(r.into_inner().to).await.map_err(status)?;
        Ok(Response::new(pb::TransferLeaderReply {}))
    }

    async fn pool_change(&self, r: Request<pb::PoolChangeRequest>) -> Result<Response<pb::PoolChangeReply>, Status> {
        let r = r.into_inner();
        self.0.leading().map_err(status)?;
        let change = pb::PoolChange { pool: r.pool, action: r.action, targets: r.targets };
        self.0.propose(Command::PoolChange(change)).await.map_err(status)?;
        Ok(Response::new(pb::PoolChangeReply {}))
    }
}

#[tonic::async_trait]
impl MdsAdmin for Shell {
    async fn change_members(
        &self,
        r: Request<pb::ChangeMembersRequest>,
    ) -> Result<Response<pb::ChangeMembersReply>, Status> {
        let r = r.into_inner();
        let change = member_change(&r).map_err(status)?;
        let added = matches!(change, MemberChange::AddLearner { .. });
        let gone = match change {
            MemberChange::Remove { id } | MemberChange::Replace { old: id, .. } => u32::try_from(id).ok(),
            _ => None,
        };
        self.0.node.change_members(change).await.map_err(status)?;
        if let Some(id) = gone {
            // Clients need not try it any more. That the change itself is done counts more than this.
            let gone = pb::MdsNodes { nodes: Vec::new(), gone: vec![id] };
            if let Err(e) = self.0.propose(Command::MdsNodes(gone)).await {
                tracing::warn!("the map still names member {id}: {e}");
            }
        }
        if added {
            // For clients, and for members that restart with an older configuration.
            let id = u32::try_from(r.id).unwrap_or(0);
            let (name, endpoints) = (format!("mds-{id}"), vec![r.endpoint]);
            let node = pb::Node { id, role: ROLE_MDS, endpoints, name, version: String::new() };
            self.0
                .propose(Command::MdsNodes(pb::MdsNodes { nodes: vec![node], gone: Vec::new() }))
                .await
                .map_err(status)?;
        }
        Ok(Response::new(pb::ChangeMembersReply {}))
    }
}

fn member_change(r: &pb::ChangeMembersRequest) -> strake_proto::Result<MemberChange> {
    if r.id == 0 || r.id >= u64::from(FIRST_OSS_NODE) {
        return Err(Error::new(Code::Inval, format!("metadata server ids are 1 to {}", FIRST_OSS_NODE - 1)));
    }
    Ok(match r.action {
        1 => MemberChange::AddLearner { id: r.id, endpoint: r.endpoint.parse()? },
        2 => MemberChange::Promote { id: r.id },
        3 => MemberChange::Remove { id: r.id },
        4 => MemberChange::Replace { old: r.old, new: r.id },
        a => return Err(Error::new(Code::Inval, format!("unknown member change {a}"))),
    })
}

/// Serves until the future is dropped. Fails at once if the address cannot be had.
pub(super) fn serve(mds: Arc<Mds>, at: SocketAddr) -> strake_proto::Result<impl Future<Output = ()> + Send> {
    let incoming = TcpIncoming::bind(at).map_err(|e| Error::from(e).context(format_args!("admin address {at}")))?;
    let shell = Shell(mds);
    let server = tonic::transport::Server::builder()
        .concurrency_limit_per_connection(16)
        .add_service(AdminServer::new(shell.clone()))
        .add_service(MdsAdminServer::new(shell));
    Ok(async move {
        if let Err(e) = server.serve_with_incoming(incoming).await {
            tracing::error!("administration at {at} stopped: {e}");
        }
    })
}
