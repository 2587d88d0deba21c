//! The servers as this client knows and reaches them.

use std::sync::Arc;

use strake_fabric::{Endpoint, Transport};
use strake_links::traffic;
use strake_proto::{
    Ino, Result,
    map::{MapView, ROLE_MDS},
    pb::{self, Transports},
};

use crate::core::Core;

/// The servers of the file system, and the connections to them: [`crate::Client::servers`].
#[derive(Clone, Copy)]
pub struct Servers<'a> {
    pub(crate) core: &'a Arc<Core>,
}

impl Servers<'_> {
    /// The newest cluster map this client has.
    pub fn map(self) -> Arc<MapView> {
        self.core.shared.map()
    }

    /// The newest cluster map the metadata servers have.
    pub async fn fetch_map(self) -> Result<Arc<MapView>> {
        self.core.metadata.session().await?;
        self.core.metadata.refresh_map(self.core.shared.map().version()).await;
        Ok(self.core.shared.map())
    }

    /// The connections over which this client reaches the storage servers, and how many bytes went
    /// over each kind of fabric.
    pub fn transports(self) -> Transports {
        Transports {
            transports: traffic::transports(&*self.core.shared.fabric),
            connections: self.core.storage.statuses(),
            ..Default::default()
        }
    }

    /// As [`Servers::transports`], with the transports by which bytes of this file were read from and
    /// written to storage servers since this client first used it. The sums count everything that
    /// was moved, including zeros of holes and bytes that were sent again.
    pub fn file_transports(self, ino: Ino) -> Transports {
        let Some(inode) = self.core.files.live_inode(ino) else { return self.transports() };
        let (fetched, sent) = (inode.fetched.look(), inode.sent.look());
        let of = |transport: Transport| pb::FileTransport {
            transport: transport.name().into(),
            fetched: fetched[transport],
            sent: sent[transport],
        };
        Transports { file: Transport::ALL.into_iter().map(of).collect(), ..self.transports() }
    }

    /// Why no storage server is reached by RDMA; `None` when at least one is.
    pub fn no_rdma(self) -> Option<String> {
        let map = self.core.shared.map();
        let servers = map.map.nodes.iter().filter(|n| n.role != ROLE_MDS);
        let mut why = None;
        for node in servers {
            match self.core.shared.fabric.routes(&node.endpoints) {
                Ok(ways) if ways.iter().any(|w| matches!(w, Endpoint::Rdma(..))) => return None,
                Ok(_) => {}
                Err(e) => why = why.or(Some(e.message)),
            }
            // What is missing is missing on this node, so all servers would give the same reason.
            if node.endpoints.iter().any(|e| e.starts_with("rdma:")) {
                break;
            }
        }
        Some(why.unwrap_or_else(|| {
            "no storage server has an RDMA endpoint that this client may use".into()
        }))
    }

    /// Servers that did not answer last time, and why; empty when all answer.
    pub fn away(self) -> String {
        self.core.shared.unreachable()
    }
}
