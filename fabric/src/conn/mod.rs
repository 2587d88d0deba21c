//! Frames over any stream of bytes: all of a connection but the socket below it.
//!
//! `handshake.rs` proves the identity of both ends. `start.rs` starts the tasks of a connection:
//! `read.rs` and `write.rs` move its frames, `liveness.rs` finds out that a peer is dead.
//! `shared.rs` holds the state of a connection; `request.rs` and `answer.rs` serve what the peer
//! asks. A transport gives a stream ([`Streams::connect_over`], [`Streams::accept_over`]) and, if
//! payloads do not go through it, a [`Bulk`].

mod answer;
pub mod bulk;
pub mod handshake;
mod inbox;
mod liveness;
mod options;
mod read;
mod request;
mod room;
mod shared;
mod start;
#[cfg(test)]
mod tests;
mod write;

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

pub(crate) use bulk::{Bulk, Loan};
use handshake::{Agreed, Party};
pub use inbox::Incoming;
pub use options::Options;
use parking_lot::RwLock;
use room::{Room, Shares};
pub(crate) use shared::Shared;
use shared::{Handle, Setup};
use start::start;
use strake_proto::{Code, Error, Result};
use strake_runtime::{Env, quiet::Quiet};
use tokio::{io::AsyncWrite, sync::watch, time::timeout};

use crate::{Connection, Identity, Pool, Role, Service, traffic::Totals};

static REFUSED: Quiet = Quiet::new();

/// Id of the next connection, over whichever transport: services tell connections apart by it.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// What the connections of one fabric share. Clones share everything.
#[derive(Clone)]
pub(crate) struct Streams {
    pub env: Env,
    identity: Identity,
    cluster: Arc<RwLock<Option<[u8; 16]>>>,
    pub pool: Pool,
    pub options: Options,
    /// Memory for long bodies, see [`Options::max_body_bytes`].
    bodies: Arc<Shares>,
    /// See [`Options::max_answer_bytes`].
    answers: Arc<Shares>,
    /// The pool's memory for answers to clients.
    payloads: Arc<Shares>,
    /// The pool's memory for what clients send.
    uploads: Arc<Shares>,
    /// Answers that arrive over these connections are passed on to clients.
    passes_on: bool,
    pub totals: Totals,
}

impl Streams {
    pub fn new(
        env: Env,
        identity: Identity,
        cluster_uuid: Option<[u8; 16]>,
        pool: Pool,
        options: Options,
    ) -> Streams {
        let cluster = Arc::new(RwLock::new(cluster_uuid));
        Streams {
            bodies: Arc::new(Shares::new(options.max_body_bytes)),
            answers: Arc::new(Shares::new(options.max_answer_bytes)),
            payloads: Arc::new(Shares::new(pool.stats().limit as usize)),
            uploads: Arc::new(Shares::new(pool.stats().limit as usize)),
            passes_on: false,
            env,
            identity,
            cluster,
            pool,
            options,
            totals: Totals::default(),
        }
    }

    /// A copy that proves only the client key, for requests that are passed on.
    pub fn as_client(&self) -> Streams {
        Streams { identity: self.identity.as_client(), passes_on: true, ..self.clone() }
    }

    pub fn set_cluster(&self, uuid: [u8; 16]) {
        *self.cluster.write() = Some(uuid);
    }

    /// Handshake and service of a connection: the dialer's end.
    pub async fn connect_over<R, W>(
        &self,
        rd: R,
        wr: W,
        bulk: Option<Arc<dyn Bulk>>,
        addr: String,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>>
    where
        R: Incoming,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let mut stream = tokio::io::join(rd, wr);
        let party = self.party();
        let agreed = self.within(handshake::dial(&mut stream, &party)).await;
        let agreed = agreed.map_err(|e| e.context(format!("cannot talk to {addr}")))?;
        let (rd, wr) = stream.into_inner();
        let peer = Agreed { role: Role::Server, ..agreed };
        Ok(Arc::new(Handle::owner(start(self.setup(peer, bulk, addr, back), rd, wr))))
    }

    /// The listener's end of the handshake. Then serves the connection, if `admit` has a place for
    /// the peer.
    pub async fn welcome<R, W, P>(
        &self,
        rd: R,
        wr: W,
        bulk: Option<Arc<dyn Bulk>>,
        addr: String,
        service: Arc<dyn Service>,
        admit: impl FnOnce(Role) -> Result<P>,
    ) -> Result<(Arc<Shared>, P)>
    where
        R: Incoming,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let mut stream = tokio::io::join(rd, wr);
        let party = self.party();
        let agreed = self.within(handshake::answer_if(&mut stream, &party, admit)).await;
        let (agreed, place) = agreed
            .inspect_err(|e| REFUSED.warn(|| format!("refused a connection from {addr}: {e}")))?;
        let (rd, wr) = stream.into_inner();
        Ok((start(self.setup(agreed, bulk, addr, Some(service)), rd, wr), place))
    }

    /// Returns when the connection is over. Drains it when `stop`'s sender is dropped.
    pub async fn attend(&self, shared: &Shared, mut stop: watch::Receiver<()>) {
        tokio::select! {
            biased;
            () = shared.closed() => {}
            _ = stopped(&mut stop) => shared.drain(self.options.drain).await,
        }
    }

    async fn within<T>(&self, handshake: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = self.options.handshake_timeout;
        timeout(limit, handshake).await.unwrap_or_else(|_| {
            Err(Error::new(Code::TimedOut, format!("the handshake took longer than {limit:?}")))
        })
    }

    fn party(&self) -> Party {
        Party::new(self.identity.clone(), *self.cluster.read(), self.env.random_bytes())
    }

    fn setup(
        &self,
        agreed: Agreed,
        bulk: Option<Arc<dyn Bulk>>,
        addr: String,
        service: Option<Arc<dyn Service>>,
    ) -> Setup {
        Setup {
            env: self.env.clone(),
            options: self.options.clone(),
            pool: self.pool.clone(),
            version: agreed.version,
            role: agreed.role,
            room: Room::new(
                &self.options,
                self.bodies.of(&addr),
                self.answers.of(&addr),
                self.payloads.of(&addr),
                self.uploads.of(&addr),
            ),
            bulk,
            addr,
            id: NEXT_ID.fetch_add(1, Relaxed),
            counter: self.totals.open(),
            service,
            passes_on: self.passes_on,
        }
    }
}

/// Resolves when the sender is dropped.
pub(crate) async fn stopped(stop: &mut watch::Receiver<()>) {
    while stop.changed().await.is_ok() {}
}
