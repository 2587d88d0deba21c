//! The connection to a server's administration (gRPC). Each connection begins with the handshake of
//! `conn/handshake.rs`, under a key of its own that is derived from the cluster key. A peer that
//! does not know this key never reaches the HTTP layer.

use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use hyper_util::rt::TokioIo;
use strake_proto::{Code, Error, Result, cap::derive_key};
use strake_runtime::{Env, quiet::Quiet};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::{AbortHandle, JoinSet},
    time::{sleep, timeout},
};
use tonic::transport::{Channel, server::Connected, server::Router};

use crate::{
    Identity, Role,
    conn::handshake::{self, Party},
};

/// Limit of connections that have not finished the handshake. One more takes the place of the
/// oldest: a stranger who holds such places loses them, while a peer with the key finishes in a
/// moment.
const HALF_OPEN: usize = 64;
/// Limit of connections of administrators.
const OPEN: usize = 32;
/// How long a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// A connection whose peer is silent for this long is probed, and closed if the peer does not
/// answer.
const SILENCE: Duration = Duration::from_secs(15);

/// The identity of an administrator: derived from the cluster key. Neither the client key nor a
/// handshake for another port is accepted in its place.
fn identity(cluster_key: &[u8; 32]) -> Identity {
    let key = derive_key(cluster_key, "strake admin v1");
    let nobody = derive_key(&key, "nobody");
    Identity {
        role: Role::Server,
        server_key: Some(key),
        client_key: nobody,
        signing: None,
        servers: None,
    }
}

/// Listens until the returned future is dropped. Fails at once if the address cannot be bound.
pub fn serve(
    at: SocketAddr,
    env: Env,
    cluster_key: &[u8; 32],
    router: Router,
) -> Result<impl Future<Output = ()> + Send + use<>> {
    let failed = |e: io::Error| Error::from(e).context(format_args!("admin address {at}"));
    let socket = std::net::TcpListener::bind(at).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    let listener = TcpListener::from_std(socket).map_err(failed)?;
    let identity = identity(cluster_key);
    Ok(async move {
        let (passed, streams) = mpsc::channel(1);
        let door = Door { env, identity, open: Arc::new(Semaphore::new(OPEN)), passed };
        tokio::select! {
            () = door.accept_all(listener) => {}
            r = router.serve_with_incoming(Streams(streams)) => {
                if let Err(e) = r {
                    tracing::error!("administration at {at} stopped: {e}");
                }
            }
        }
    })
}

/// The common settings of a server's builder.
pub fn builder() -> tonic::transport::Server {
    tonic::transport::Server::builder()
        .concurrency_limit_per_connection(16)
        .http2_keepalive_interval(Some(SILENCE))
        .http2_keepalive_timeout(Some(SILENCE))
}

/// Connects to a server's administration.
pub async fn connect(addr: &str, cluster_key: &[u8; 32]) -> Result<Channel> {
    let failed = |e: &dyn std::fmt::Display| Error::new(Code::Disconnected, format!("{addr}: {e}"));
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{addr}"))
        .map_err(|e| failed(&e))?;
    let mut stream = TcpStream::connect(addr).await.map_err(|e| failed(&e))?;
    let _ = stream.set_nodelay(true);
    let party = Party::new(identity(cluster_key), None, Env::system().random_bytes());
    handshake::dial(&mut stream, &party).await.map_err(|e| match e.code {
        Code::Unauthenticated => Error::new(
            e.code,
            format!("{addr}: administration needs the cluster key: {}", e.message),
        ),
        _ => failed(&e.message),
    })?;
    let mut stream = Some(TokioIo::new(stream));
    let once = tower::service_fn(move |_| {
        let stream = stream.take().ok_or_else(|| io::Error::other("the connection is gone"));
        async { stream }
    });
    endpoint.connect_with_connector(once).await.map_err(|e| failed(&e))
}

struct Door {
    env: Env,
    identity: Identity,
    open: Arc<Semaphore>,
    passed: mpsc::Sender<Admitted>,
}

impl Door {
    async fn accept_all(self, listener: TcpListener) {
        // Dropping the `JoinSet` ends connections that are still in their handshake.
        let (mut tasks, mut half_open) = (JoinSet::new(), VecDeque::<AbortHandle>::new());
        let (starved, refused) = (Quiet::new(), Arc::new(Quiet::new()));
        loop {
            let accepted = listener.accept().await;
            while tasks.try_join_next().is_some() {}
            half_open.retain(|t| !t.is_finished());
            let (stream, from) = match accepted {
                Ok(a) => a,
                Err(e) => {
                    starved.warn(|| format!("administration: cannot accept a connection: {e}"));
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            while half_open.len() >= HALF_OPEN {
                half_open.pop_front().iter().for_each(AbortHandle::abort);
            }
            let (party, refused) = (self.party(), refused.clone());
            let (open, passed) = (self.open.clone(), self.passed.clone());
            half_open.push_back(tasks.spawn(async move {
                match admit(stream, &party, open).await {
                    Ok(admitted) => drop(passed.send(admitted).await),
                    Err(e) => refused
                        .warn(|| format!("administration: refused a connection from {from}: {e}")),
                }
            }));
        }
    }

    fn party(&self) -> Party {
        Party::new(self.identity.clone(), None, self.env.random_bytes())
    }
}

async fn admit(mut stream: TcpStream, party: &Party, open: Arc<Semaphore>) -> Result<Admitted> {
    let _ = stream.set_nodelay(true);
    let late =
        |_| Error::new(Code::TimedOut, format!("the handshake took longer than {HANDSHAKE:?}"));
    let agreed =
        timeout(HANDSHAKE, handshake::answer(&mut stream, party)).await.map_err(late)??;
    if agreed.role != Role::Server {
        return Err(Error::new(
            Code::Unauthenticated,
            "the dialer does not have the administrators' key",
        ));
    }
    let full =
        |_| Error::new(Code::Overloaded, format!("{OPEN} administrators are connected already"));
    Ok(Admitted { stream, _place: open.try_acquire_owned().map_err(full)? })
}

/// A connection that has proved that it knows the cluster key.
struct Admitted {
    stream: TcpStream,
    _place: OwnedSemaphorePermit,
}

impl Connected for Admitted {
    type ConnectInfo = ();
    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Admitted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Admitted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Admitted connections, as the HTTP server takes them.
struct Streams(mpsc::Receiver<Admitted>);

impl futures_util::Stream for Streams {
    type Item = io::Result<Admitted>;
    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(cx).map(|a| a.map(Ok))
    }
}
