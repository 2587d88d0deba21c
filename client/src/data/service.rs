//! The state that the client keeps to talk to storage servers. Other modules see only its methods.

use std::sync::{Arc, LazyLock};

use strake_fabric::{Buf, BufMut};
use strake_proto::{
    ChainId, Result, TargetId,
    data::{DataReply, DataRequest},
    pb,
};
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{
    data::{
        chains::shut_down, clocks::Clocks, connections::Connections,
        rdma_connections::RdmaConnections, relays::Relays,
    },
    inode::files::Files,
    metadata::service::Metadata,
    shared::Shared,
};

/// How often all replicas may answer with bad bytes before the reader gets an error.
pub(crate) const MAX_CORRUPT_ROUNDS: u32 = 2;

/// A question to a replica of a chain, and how to read the answer.
pub(crate) struct Question<'a, T> {
    pub opcode: u16,
    pub chain: ChainId,
    /// Chunk, offset and length; the other fields are filled in.
    pub request: DataRequest,
    /// Reads the answer. On `Corrupt` another replica is asked.
    pub read: &'a (dyn Fn(TargetId, DataReply, Vec<Buf>) -> Result<T> + Sync),
}

/// See the module.
pub(crate) struct Storage {
    pub(crate) shared: Arc<Shared>,
    pub(super) metadata: Arc<Metadata>,
    pub(super) files: Arc<Files>,
    pub(super) connections: Connections,
    /// Connections for foreign memory.
    pub(super) rdma_connections: RdmaConnections,
    /// The clocks of storage servers.
    pub(super) clocks: Clocks,
    /// Limits the data requests in flight.
    pieces: Semaphore,
    /// A run of zeros, for holes.
    pub(super) zero: Buf,
}

impl Storage {
    pub fn new(
        shared: Arc<Shared>,
        metadata: Arc<Metadata>,
        files: Arc<Files>,
        relays: Arc<Relays>,
    ) -> Storage {
        let (connections, pieces) =
            (shared.cfg.connections_per_node, shared.cfg.max_inflight_pieces.max(1));
        Storage {
            connections: Connections::relayed(connections.max(1), relays),
            rdma_connections: RdmaConnections::new(connections),
            clocks: Clocks::default(),
            pieces: Semaphore::new(pieces),
            zero: ZEROS.clone(),
            shared,
            metadata,
            files,
        }
    }

    /// Waits until another data request may be sent.
    pub async fn slot(&self) -> Result<SemaphorePermit<'_>> {
        self.pieces.acquire().await.map_err(|_| shut_down())
    }

    /// The connections that are open.
    pub fn statuses(&self) -> Vec<pb::ConnectionStatus> {
        [self.connections.statuses(), self.rdma_connections.statuses()].concat()
    }

    pub fn close(&self) {
        self.connections.close();
        self.rdma_connections.close();
    }
}

/// Zeros for holes, shared by all clients of the process. Memory that is never written takes no
/// physical pages.
static ZEROS: LazyLock<Buf> = LazyLock::new(|| BufMut::unpooled(1 << 20).freeze());
