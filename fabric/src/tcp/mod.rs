//! Frames over TCP.
//!
//! `handshake.rs` says who is there, `conn.rs` holds what a connection is, `read.rs` and `write.rs` move its frames. All but
//! the sockets below works on any byte stream: see [`TcpFabric::connect_over`] and [`TcpFabric::accept_over`].

mod conn;
pub mod handshake;
mod read;
mod write;

use std::{
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use conn::{Handle, Setup, Shared};
use handshake::{Agreed, Party};
use parking_lot::RwLock;
pub use read::Incoming;
use rustix::net::sockopt;
use strake_proto::{Code, Error, Result};
use tokio::{
    io::AsyncWrite,
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};

use crate::{Connection, Endpoint, Env, Fabric, Identity, Listener, Pool, Role, Service};

/// Connections that nobody has accepted yet. The kernel takes no more than `net.core.somaxconn`, and has who comes then try again
/// after a second.
const BACKLOG: u32 = 4096;

/// Limits and times of a [`TcpFabric`].
#[derive(Clone, Debug)]
pub struct Options {
    /// Requests in flight per connection and direction; further callers wait.
    pub max_inflight: usize,
    /// Bytes of their payloads, likewise, and of the payloads of running handlers.
    pub max_inflight_bytes: usize,
    /// Requests of one connection handled at a time.
    pub max_handlers: usize,
    pub connect_timeout: Duration,
    pub handshake_timeout: Duration,
    /// Accepted connections whose handshake is not over. As many as a thousand clients make when their leader dies: fewer, and they
    /// come so slowly that those behind give up and begin anew.
    pub max_half_open: usize,
    /// Accepted connections of one listener.
    pub max_connections: usize,
    /// A peer that owes an answer and sends nothing for this long is taken for dead.
    pub silence: Duration,
    /// How long the reader waits for a handler's place or for memory before it refuses a request.
    pub room_wait: Duration,
    /// How long requests may still run when a listener is dropped.
    pub drain: Duration,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            max_inflight: 256,
            max_inflight_bytes: 64 << 20,
            max_handlers: 256,
            connect_timeout: Duration::from_secs(1),
            handshake_timeout: Duration::from_secs(5),
            max_half_open: 1024,
            max_connections: 4096,
            silence: Duration::from_secs(2),
            room_wait: Duration::from_secs(1),
            drain: Duration::from_secs(1),
        }
    }
}

/// The [`Fabric`] over TCP. Clones share everything.
#[derive(Clone)]
pub struct TcpFabric {
    env: Env,
    identity: Identity,
    cluster: Arc<RwLock<Option<[u8; 16]>>>,
    pool: Pool,
    options: Options,
    next_id: Arc<AtomicU64>,
}

impl TcpFabric {
    /// `cluster_uuid`: peers that name another one are refused. A process that learns it later calls
    /// [`TcpFabric::set_cluster`].
    pub fn new(
        env: Env,
        identity: Identity,
        cluster_uuid: Option<[u8; 16]>,
        pool: Pool,
        options: Options,
    ) -> TcpFabric {
        let cluster = Arc::new(RwLock::new(cluster_uuid));
        TcpFabric { env, identity, cluster, pool, options, next_id: Arc::new(AtomicU64::new(1)) }
    }

    /// For handshakes from now on.
    pub fn set_cluster(&self, uuid: [u8; 16]) {
        *self.cluster.write() = Some(uuid);
    }

    /// The handshake and all that follows over any stream: the dialer's end.
    pub async fn connect_over<R, W>(
        &self,
        rd: R,
        wr: W,
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
        Ok(Arc::new(Handle(conn::start(self.setup(peer, addr, back), rd, wr))))
    }

    /// The listener's end of [`TcpFabric::connect_over`]. Returns when the connection is over; drains it when `stop`'s sender is
    /// dropped.
    pub async fn accept_over<R, W>(
        &self,
        rd: R,
        wr: W,
        addr: String,
        service: Arc<dyn Service>,
        stop: watch::Receiver<()>,
    ) -> Result<()>
    where
        R: Incoming,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let shared = self.welcome(rd, wr, addr, service).await?;
        self.attend(&shared, stop).await;
        Ok(())
    }

    async fn welcome<R, W>(&self, rd: R, wr: W, addr: String, service: Arc<dyn Service>) -> Result<Arc<Shared>>
    where
        R: Incoming,
        W: AsyncWrite + Send + Unpin + 'static,
    {
        let mut stream = tokio::io::join(rd, wr);
        let party = self.party();
        let agreed = self.within(handshake::answer(&mut stream, &party)).await;
        let agreed = agreed.inspect_err(|e| tracing::warn!(peer = %addr, "refused a connection: {e}"))?;
        let (rd, wr) = stream.into_inner();
        Ok(conn::start(self.setup(agreed, addr, Some(service)), rd, wr))
    }

    async fn attend(&self, shared: &Shared, mut stop: watch::Receiver<()>) {
        tokio::select! {
            biased;
            () = shared.closed() => {}
            _ = stopped(&mut stop) => shared.drain(self.options.drain).await,
        }
    }

    async fn within<T>(&self, handshake: impl Future<Output = Result<T>>) -> Result<T> {
        let limit = self.options.handshake_timeout;
        timeout(limit, handshake)
            .await
            .unwrap_or_else(|_| Err(Error::new(Code::TimedOut, format!("the handshake took longer than {limit:?}"))))
    }

    fn party(&self) -> Party {
        Party::new(self.identity.clone(), *self.cluster.read(), self.env.random_bytes())
    }

    fn setup(&self, agreed: Agreed, addr: String, service: Option<Arc<dyn Service>>) -> Setup {
        Setup {
            env: self.env.clone(),
            options: self.options.clone(),
            pool: self.pool.clone(),
            version: agreed.version,
            role: agreed.role,
            addr,
            id: self.next_id.fetch_add(1, Relaxed),
            service,
        }
    }

    async fn accept_all(self, listener: TcpListener, service: Arc<dyn Service>, mut stop: watch::Receiver<()>) {
        let half_open = Arc::new(Semaphore::new(self.options.max_half_open));
        let open = Arc::new(Semaphore::new(self.options.max_connections));
        loop {
            let accepted = async {
                let half = half_open.clone().acquire_owned().await;
                (half, listener.accept().await)
            };
            let (half, accepted) = tokio::select! {
                biased;
                _ = stopped(&mut stop) => return,
                a = accepted => a,
            };
            let (mut stream, from) = match accepted {
                Ok(a) => a,
                Err(e) => {
                    // Most likely out of descriptors; those of others' connections may come free.
                    tracing::warn!("cannot accept a connection: {e}");
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let (fabric, service, stop, room) = (self.clone(), service.clone(), stop.clone(), open.clone());
            self.env.spawn(async move {
                let Ok(_room) = room.try_acquire_owned() else {
                    let e = Error::new(Code::Overloaded, "this server has too many connections; try again later");
                    let _ = timeout(fabric.options.handshake_timeout, handshake::refuse(&mut stream, &e)).await;
                    return;
                };
                tune(&stream);
                let (rd, wr) = stream.into_split();
                if let Ok(shared) = fabric.welcome(rd, wr, format!("tcp:{from}"), service).await {
                    drop(half);
                    fabric.attend(&shared, stop).await;
                }
            });
        }
    }
}

/// Resolves when the sender is gone.
async fn stopped(stop: &mut watch::Receiver<()>) {
    while stop.changed().await.is_ok() {}
}

/// No delay for small frames, and probes that find a peer which died while nothing was in flight. Failures cost only that.
fn tune(stream: &TcpStream) {
    let fd = stream.as_fd();
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(fd, true);
    let _ = sockopt::set_tcp_keepidle(fd, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepintvl(fd, Duration::from_secs(5));
    let _ = sockopt::set_tcp_keepcnt(fd, 3);
}

/// Host and port; brackets around an IPv6 address are for the text form only.
fn host_port(e: &Endpoint) -> Result<(&str, u16)> {
    match e {
        Endpoint::Tcp(h, p) => Ok((h.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(h), *p)),
        Endpoint::Sim(_) => Err(Error::new(Code::Inval, format!("{e} is not an address of a network"))),
    }
}

/// As [`TcpListener::bind`], with a longer queue.
async fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let mut failed = std::io::Error::other("the name has no address");
    for at in tokio::net::lookup_host((host, port)).await? {
        let socket = if at.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        match socket.bind(at).and_then(|()| socket.listen(BACKLOG)) {
            Ok(l) => return Ok(l),
            Err(e) => failed = e,
        }
    }
    Err(failed)
}

#[async_trait]
impl Fabric for TcpFabric {
    async fn connect(&self, to: &Endpoint, back: Option<Arc<dyn Service>>) -> Result<Arc<dyn Connection>> {
        let limit = self.options.connect_timeout;
        let stream = match timeout(limit, TcpStream::connect(host_port(to)?)).await {
            Ok(Ok(s)) => s,
            Ok(Err(e)) => return Err(Error::new(Code::Disconnected, format!("cannot connect to {to}: {e}"))),
            Err(_) => {
                return Err(Error::new(Code::TimedOut, format!("cannot connect to {to}: no answer within {limit:?}")));
            }
        };
        tune(&stream);
        let (rd, wr) = stream.into_split();
        self.connect_over(rd, wr, to.to_string(), back).await
    }

    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        let (host, port) = host_port(at)?;
        let failed = |e: std::io::Error| Error::from(e).context(format!("cannot listen at {at}"));
        let listener = bind(host, port).await.map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let Endpoint::Tcp(name, _) = at else { return Err(Error::new(Code::Inval, "not a TCP endpoint")) };
        let endpoint = Endpoint::Tcp(name.clone(), port);
        let (stop, stopping) = watch::channel(());
        self.env.spawn(self.clone().accept_all(listener, service, stopping));
        Ok(Listener::new(endpoint, Box::new(stop)))
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}
