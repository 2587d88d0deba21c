//! Moving requests, replies and bulk bytes between StrakeFS processes.
//!
//! A [`Fabric`] connects and listens; a [`Connection`] carries calls, many at a time, in both
//! directions; a [`Service`] answers them. TCP and RDMA are implementations, the simulator's
//! network another. Bulk bytes travel in [`Buf`]s: aligned, pooled, shared by reference from socket
//! to disk.

#[cfg(feature = "admin")]
pub mod admin;
pub mod buf;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod conn;
pub mod endpoint;
pub mod env;
pub mod foreign;
pub mod kept;
pub mod keyfile;
pub mod leader;
pub mod places;
pub mod private;
pub mod quiet;
pub mod rdma;
pub mod region;
pub mod relay;
pub mod roads;
mod share;
pub mod tcp;
pub mod traffic;
pub mod turns;
pub mod watch;

use std::sync::Arc;

use async_trait::async_trait;
pub use buf::{Buf, BufMut, KeptAt, Pool, PoolStats};
use bytes::Bytes;
use ed25519_dalek::{SigningKey, VerifyingKey};
pub use endpoint::Endpoint;
pub use env::{Clock, Env};
pub use foreign::{Foreign, Lend};
pub use kept::{Kept, Record, Records};
pub use keyfile::ClientKey;
pub use leader::LeaderFinder;
pub use rdma::RdmaFabric;
pub use region::{REGION, Region};
pub use relay::{Relay, Relayed};
pub use roads::{Roads, Use};
use strake_proto::{Error, Result};
pub use tcp::TcpFabric;
pub use traffic::{ByRoad, Road, RoadCounter, Traffic};
pub use turns::{Turn, Turns};

/// What a connection's other end proved to be in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Knows the client key: may open sessions and present capabilities.
    Client,
    /// Knows the cluster key: an mds or oss.
    Server,
}

/// A request, or what a service answers to it.
#[derive(Clone, Debug, Default)]
pub struct Message {
    pub opcode: u16,
    /// Carried along to every request made on behalf of this one.
    pub trace: u64,
    pub body: Bytes,
    /// Bulk bytes in order. A received payload is one segment, from the receiver's pool.
    pub payload: Vec<Buf>,
    /// Of an answer as [`Connection::call`] returns it: how the request's payload went. The
    /// answer's own payload tells by [`Buf::road`] how it came.
    pub went: Road,
    /// Of a request: memory that is lent in place of its payload, or for that of the answer. READ
    /// and WRITE only, and only over a connection that [`Connection::lends`].
    pub lend: Option<Lend>,
    /// Of an answer: bytes of its payload that the peer wrote to what was lent, from the start.
    /// [`Message::payload`] is empty then.
    pub placed: u32,
}

impl Message {
    pub fn new(opcode: u16, body: impl Into<Bytes>) -> Message {
        Message { opcode, body: body.into(), ..Message::default() }
    }
    #[must_use]
    pub fn with_payload(mut self, payload: Vec<Buf>) -> Message {
        self.payload = payload;
        self
    }
    pub fn payload_len(&self) -> usize {
        self.payload.iter().map(Buf::len).sum()
    }
}

/// The other end of a connection, as a service sees it.
#[derive(Clone)]
pub struct Peer {
    pub role: Role,
    /// Where it connected from, for messages to people.
    pub addr: String,
    /// Unique per connection within this process.
    pub id: u64,
    /// For requests in the other direction (lease recalls). Fails when the connection is gone.
    pub back: Option<Arc<dyn Connection>>,
}

/// Answers requests. Called concurrently, once per request; a bounded number at a time per
/// connection.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// The reply's opcode is ignored. An error reaches the caller as it is, code and message.
    async fn handle(&self, peer: &Peer, request: Message) -> Result<Message>;
    /// The connection is gone; nothing more comes from this peer.
    fn disconnected(&self, _peer: &Peer) {}
}

/// One connection to a peer. Calls are answered in any order.
#[async_trait]
pub trait Connection: Send + Sync + 'static {
    /// Sends and waits. Waits for room first when the window is full. Dropping the future abandons
    /// the answer, never the connection. Errors of the transport: `Disconnected`, `TimedOut` (the
    /// request may have run), `Protocol`.
    async fn call(&self, request: Message, timeout: std::time::Duration) -> Result<Message>;
    fn is_closed(&self) -> bool;
    /// Whether a request may lend foreign memory ([`Message::lend`]). When such a call has ended,
    /// in whatever way, the peer reaches nothing of it any more; one that is given up or whose
    /// answer does not come ends the connection for that.
    fn lends(&self) -> bool {
        false
    }
    /// What the peer is reached at, for messages to people.
    fn addr(&self) -> String;
    /// What went over it so far, payloads and all.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
    /// Stops it; calls in flight end with `Disconnected`.
    fn close(&self);
}

#[async_trait]
pub trait Fabric: Send + Sync + 'static {
    /// Connects and completes the handshake. `back` answers requests that the peer sends over this
    /// connection.
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>>;
    /// As [`Fabric::connect`], proving no more than the client key: what is asked over it has the
    /// rights of a client, and whoever answers is a server. For servers that pass on what clients
    /// ask.
    async fn connect_as_client(&self, to: &Endpoint) -> Result<Arc<dyn Connection>> {
        let m = format!("this fabric does not connect to {to} for a client");
        Err(Error::new(strake_proto::Code::OpNotSupp, m))
    }
    /// Listens until the returned guard is dropped. Port 0 picks one: see [`Listener::endpoint`].
    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener>;
    /// Where received payloads come from and where senders should take their buffers.
    fn pool(&self) -> &Pool;
    /// The endpoints of a server that lead there, the best first. An error says why none does.
    fn ways(&self, endpoints: &[String]) -> Result<Vec<Endpoint>> {
        Ok(endpoints.iter().filter_map(|e| e.parse().ok()).collect())
    }
    /// What went over each road that it has, by the name that endpoints begin with.
    fn roads(&self) -> Vec<(&'static str, Traffic)> {
        Vec::new()
    }
}

/// Keeps a listening socket and its connections alive.
pub struct Listener {
    endpoint: Endpoint,
    _stop: Box<dyn std::any::Any + Send + Sync>,
}

impl Listener {
    pub fn new(endpoint: Endpoint, stop: Box<dyn std::any::Any + Send + Sync>) -> Listener {
        Listener { endpoint, _stop: stop }
    }
    /// Where it really listens.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }
}

/// What a process proves in the handshake: that it knows the key of its role. Derived from the
/// cluster key by [`strake_proto::cap::derive_key`] with purposes "strake server v1" and "strake
/// client v1"; what servers sign with, likewise, with "strake signing v1".
#[derive(Clone)]
pub struct Identity {
    pub role: Role,
    /// Servers hold both keys, clients only the client key.
    pub server_key: Option<[u8; 32]>,
    pub client_key: [u8; 32],
    /// Of servers: what clients tell them by.
    pub signing: Option<SigningKey>,
    /// Of clients: what servers must have signed with. Without it any holder of the client key
    /// passes for a server.
    pub servers: Option<VerifyingKey>,
}

impl Identity {
    pub fn server(cluster_key: &[u8; 32]) -> Identity {
        use strake_proto::cap::derive_key;
        Identity {
            role: Role::Server,
            server_key: Some(derive_key(cluster_key, "strake server v1")),
            client_key: derive_key(cluster_key, "strake client v1"),
            signing: Some(keyfile::signing_key(cluster_key)),
            servers: None,
        }
    }
    pub fn client(key: impl Into<ClientKey>) -> Identity {
        let ClientKey { key, servers } = key.into();
        Identity { role: Role::Client, server_key: None, client_key: key, signing: None, servers }
    }
    /// Of a server: as a client that tells servers from other clients.
    pub fn as_client(&self) -> Identity {
        let servers = self.signing.as_ref().map(SigningKey::verifying_key).or(self.servers);
        Identity {
            role: Role::Client,
            server_key: None,
            client_key: self.client_key,
            signing: None,
            servers,
        }
    }
}

/// The answer to an opcode a service does not know.
pub fn unknown_opcode(opcode: u16) -> Error {
    Error::new(
        strake_proto::Code::OpNotSupp,
        format!("this server does not know request {opcode:#06x}"),
    )
}
