//! Moving requests, replies and bulk bytes between StrakeFS processes.
//!
//! A [`Fabric`] connects and listens; a [`Connection`] carries calls, many at a time, in both
//! directions; a [`Service`] answers them. TCP and RDMA are implementations, the simulator's
//! network another. Bulk bytes travel in [`Buf`]s: aligned, pooled, shared by reference from socket
//! to disk.
#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

#[cfg(feature = "admin")]
pub mod admin;
pub mod buf;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
pub mod conn;
pub mod endpoint;
pub mod foreign;
pub mod places;
pub mod rdma;
pub mod region;
mod share;
pub mod tcp;
pub mod traffic;
pub mod transports;
pub mod turns;

use std::sync::Arc;

use async_trait::async_trait;
pub use buf::{Buf, BufMut, KeptAt, Pool, PoolStats};
use bytes::Bytes;
use ed25519_dalek::{SigningKey, VerifyingKey};
pub use endpoint::Endpoint;
pub use foreign::{Foreign, Lend};
pub use rdma::RdmaFabric;
pub use region::{REGION, Region};
use strake_proto::{Error, Result};
use strake_runtime::{ClientKey, keyfile};
pub use tcp::TcpFabric;
pub use traffic::{ByTransport, Traffic, Transport, TransportCounter};
pub use transports::{Transports, Use};
pub use turns::{Turn, Turns};

/// The role that a connection's other end has proved in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Knows the client key only. What it makes this end keep in memory is limited.
    Client,
    /// Knows the cluster key.
    Server,
}

/// A request, or what a service answers to it.
#[derive(Clone, Debug, Default)]
pub struct Message {
    /// What is asked for, see [`strake_proto::opcode`].
    pub opcode: u16,
    /// Copied to every request made on behalf of this one.
    pub trace: u64,
    /// The encoded request or answer.
    pub body: Bytes,
    /// Bulk bytes in order. A received payload is one segment, from the receiver's pool.
    pub payload: Vec<Buf>,
    /// Only in an answer as [`Connection::call`] returns it: how the request's payload was sent.
    /// For the answer's own payload, [`Buf::transport`] tells how it came.
    pub went: Transport,
    /// Only in what is sent: the body brings checksums of the payload, or the answer's body does, so
    /// the transport adds none and need not read the payload.
    pub is_covered: bool,
    /// Only in a request that is sent: most payload bytes that its answer may have; 0 where that is
    /// not known. Room for them is lent to the peer at once where the transport can.
    pub answer_room: usize,
    /// Only in a request: memory that is lent in place of its payload, or for the answer's payload.
    /// Only for a request that [`Message::is_covered`], and only over a connection that
    /// [`Connection::lends`].
    pub lend: Option<Lend>,
    /// Only in an answer: bytes of its payload that the peer wrote to the lent memory, from the
    /// start. [`Message::payload`] is empty then.
    pub placed: u32,
}

impl Message {
    /// A message without a payload.
    pub fn new(opcode: u16, body: impl Into<Bytes>) -> Message {
        Message { opcode, body: body.into(), ..Message::default() }
    }
    /// Sets the bulk bytes.
    #[must_use]
    pub fn with_payload(mut self, payload: Vec<Buf>) -> Message {
        self.payload = payload;
        self
    }
    /// Number of bulk bytes.
    pub fn payload_len(&self) -> usize {
        self.payload.iter().map(Buf::len).sum()
    }
}

/// The other end of a connection, as a service sees it.
#[derive(Clone)]
pub struct Peer {
    /// The role that it proved.
    pub role: Role,
    /// The address it connected from, for messages to people.
    pub addr: String,
    /// Unique per connection within this process.
    pub id: u64,
    /// For requests in the other direction. Fails when the connection is gone.
    pub back: Option<Arc<dyn Connection>>,
}

/// Answers requests. Called concurrently, once per request; the number of concurrent calls per
/// connection is limited.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// The reply's opcode is ignored. An error reaches the caller as it is, code and message.
    async fn handle(&self, peer: &Peer, request: Message) -> Result<Message>;
    /// Most payload bytes of the answer, where the request tells; 0 where it does not. Before a
    /// client's request is handled, memory for its answer is reserved.
    fn answer_len(&self, _request: &Message) -> usize {
        0
    }
    /// The connection is gone; nothing more comes from this peer.
    fn disconnected(&self, _peer: &Peer) {}
}

/// One connection to a peer. Calls are answered in any order.
#[async_trait]
pub trait Connection: Send + Sync + 'static {
    /// Sends the request and waits for the answer. Waits for a slot first when the window is full.
    /// Dropping the future abandons the answer, never the connection. Errors of the transport:
    /// `Disconnected`, `TimedOut` (the request may have run), `Protocol`.
    async fn call(&self, request: Message, timeout: std::time::Duration) -> Result<Message>;
    /// Whether no more calls can succeed.
    fn is_closed(&self) -> bool;
    /// Whether a request may lend foreign memory ([`Message::lend`]). When such a call has ended in
    /// any way, the peer can no longer reach the memory. To ensure this, a call that is abandoned
    /// or not answered ends the connection.
    fn lends(&self) -> bool {
        false
    }
    /// The peer's address, for messages to people.
    fn addr(&self) -> String;
    /// Traffic so far, payloads included.
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
    /// Closes it; calls in flight end with `Disconnected`.
    fn close(&self);
}

/// A transport: connects to endpoints and listens at them.
#[async_trait]
pub trait Fabric: Send + Sync + 'static {
    /// Connects and completes the handshake. `back` answers requests that the peer sends over this
    /// connection.
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>>;
    /// As [`Fabric::connect`], but proves only the client key: requests over this connection have
    /// the rights of a client, and the peer must prove to be a server. For servers that pass on
    /// clients' requests.
    async fn connect_as_client(&self, to: &Endpoint) -> Result<Arc<dyn Connection>> {
        let m = format!("this fabric cannot connect to {to} for a client");
        Err(Error::new(strake_proto::Code::OpNotSupp, m))
    }
    /// Listens until the returned guard is dropped. Port 0 picks one: see [`Listener::endpoint`].
    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener>;
    /// The pool of received payloads, from which senders should take their buffers, too.
    fn pool(&self) -> &Pool;
    /// The usable ones of a server's endpoints, the best first. An error says why none is usable.
    fn routes(&self, endpoints: &[String]) -> Result<Vec<Endpoint>> {
        Ok(endpoints.iter().filter_map(|e| e.parse().ok()).collect())
    }
    /// Traffic of each transport of this fabric, by the prefix that its endpoints have.
    fn transports(&self) -> Vec<(&'static str, Traffic)> {
        Vec::new()
    }
}

/// Keeps a listening socket and its connections alive until dropped.
pub struct Listener {
    endpoint: Endpoint,
    _stop: Box<dyn std::any::Any + Send + Sync>,
}

impl Listener {
    /// Dropping `stop` ends the listening.
    pub fn new(endpoint: Endpoint, stop: Box<dyn std::any::Any + Send + Sync>) -> Listener {
        Listener { endpoint, _stop: stop }
    }
    /// The address at which it listens, with the actual port.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }
}

/// What a process proves in the handshake: that it knows the key of its role. The keys are derived
/// from the cluster key ([`keyfile`]).
#[derive(Clone)]
pub struct Identity {
    /// The role to prove.
    pub role: Role,
    /// Servers hold both keys, clients only the client key.
    pub server_key: Option<[u8; 32]>,
    /// The key that clients prove to know.
    pub client_key: [u8; 32],
    /// Servers only: the key they sign with, by which clients recognize them.
    pub signing: Option<SigningKey>,
    /// Clients only: the public key that servers must sign with. Without it, any holder of the
    /// client key is accepted as a server.
    pub servers: Option<VerifyingKey>,
}

impl Identity {
    /// The identity of a server.
    pub fn server(cluster_key: &[u8; 32]) -> Identity {
        Identity {
            role: Role::Server,
            server_key: Some(keyfile::server_key(cluster_key)),
            client_key: keyfile::client_key(cluster_key),
            signing: Some(keyfile::signing_key(cluster_key)),
            servers: None,
        }
    }
    /// The identity of a client.
    pub fn client(key: impl Into<ClientKey>) -> Identity {
        let ClientKey { key, servers } = key.into();
        Identity { role: Role::Client, server_key: None, client_key: key, signing: None, servers }
    }
    /// The client identity of a server: one that recognizes servers by their signature.
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
