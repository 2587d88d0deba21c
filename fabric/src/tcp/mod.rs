//! Frames over TCP: the sockets below [`crate::conn`]. The rest works on any byte stream: see
//! [`TcpFabric::connect_over`] and [`TcpFabric::accept_over`].

use std::{
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use rustix::net::sockopt;
use strake_proto::{Code, Error, Result};
use strake_runtime::{Env, quiet::Quiet};
use tokio::{
    io::AsyncWrite,
    net::{TcpListener, TcpSocket, TcpStream, tcp::OwnedReadHalf},
    sync::watch,
    time::{sleep, timeout},
};

pub use crate::conn::{Incoming, Options, handshake};
use crate::{
    Connection, Endpoint, Fabric, Identity, Listener, Pool, Service, Traffic,
    conn::{Streams, stopped},
    places::{HalfOpen, Places},
};

static STARVED: Quiet = Quiet::new();

/// Connections that wait to be accepted. The kernel takes no more than `net.core.somaxconn`;
/// clients beyond that try again after a second.
const BACKLOG: u32 = 4096;

/// How long the kernel keeps a connection that has sent nothing before this process accepts it. The
/// dialer sends first, so only silent connections wait.
const SILENT: Duration = Duration::from_secs(3);

/// The [`Fabric`] over TCP. Clones share everything.
#[derive(Clone)]
pub struct TcpFabric {
    streams: Streams,
}

impl TcpFabric {
    /// `cluster_uuid`: peers that name another cluster are refused. A process that learns it later
    /// calls [`TcpFabric::set_cluster`].
    pub fn new(
        env: Env,
        identity: Identity,
        cluster_uuid: Option<[u8; 16]>,
        pool: Pool,
        options: Options,
    ) -> TcpFabric {
        TcpFabric { streams: Streams::new(env, identity, cluster_uuid, pool, options) }
    }

    /// Sets the cluster id for handshakes from now on.
    pub fn set_cluster(&self, uuid: [u8; 16]) {
        self.streams.set_cluster(uuid);
    }

    /// Handshake and service of a connection over any stream: the dialer's end.
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
        self.streams.connect_over(rd, wr, None, addr, back).await
    }

    /// The listener's end of [`TcpFabric::connect_over`]. Returns when the connection is over;
    /// drains it when `stop`'s sender is dropped.
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
        let (shared, ()) = self.streams.welcome(rd, wr, None, addr, service, |_| Ok(())).await?;
        self.streams.attend(&shared, stop).await;
        Ok(())
    }

    async fn accept_all(
        self,
        listener: TcpListener,
        service: Arc<dyn Service>,
        mut stop: watch::Receiver<()>,
    ) {
        let places = Places::new(&self.streams.options);
        loop {
            let accepted = tokio::select! {
                biased;
                _ = stopped(&mut stop) => return,
                a = listener.accept() => a,
            };
            let (stream, from) = match accepted {
                Ok(a) => a,
                Err(e) => {
                    // Most likely out of descriptors; other connections may free some.
                    STARVED.warn(|| format!("cannot accept a connection: {e}"));
                    sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let half = loop {
                match places.enter(from.ip(), Instant::now()) {
                    Ok(half) => break half,
                    Err(wait) => tokio::select! {
                        biased;
                        _ = stopped(&mut stop) => return,
                        () = sleep(wait) => {}
                    },
                }
            };
            let (fabric, service, stop, places) =
                (self.clone(), service.clone(), stop.clone(), places.clone());
            self.streams.env.spawn(fabric.serve(stream, from, half, places, service, stop));
        }
    }

    /// One accepted connection, from its handshake to its end.
    async fn serve(
        self,
        stream: TcpStream,
        from: SocketAddr,
        mut half: HalfOpen,
        places: Places,
        service: Arc<dyn Service>,
        stop: watch::Receiver<()>,
    ) {
        tune(&stream);
        let (rd, wr) = stream.into_split();
        let admit = |role| places.admit(role, from.ip());
        let welcomed = tokio::select! {
            biased;
            w = self.streams.welcome(rd, wr, None, format!("tcp:{from}"), service, admit) => w,
            _ = &mut half.pushed => {
                tracing::debug!(%from, "a handshake was ended to make room for another one");
                return;
            }
        };
        drop(half);
        if let Ok((shared, _place)) = welcomed {
            self.streams.attend(&shared, stop).await;
        }
    }
}

/// Sets no delay for small frames, and probes that find a peer which died while nothing was in
/// flight. Failures cost only these features.
fn tune(stream: &TcpStream) {
    let fd = stream.as_fd();
    let _ = stream.set_nodelay(true);
    let _ = sockopt::set_socket_keepalive(fd, true);
    let _ = sockopt::set_tcp_keepidle(fd, Duration::from_secs(10));
    let _ = sockopt::set_tcp_keepintvl(fd, Duration::from_secs(5));
    let _ = sockopt::set_tcp_keepcnt(fd, 3);
}

/// The network has no route to the peer, which says no more about the peer than silence does.
fn leads_nowhere(e: &std::io::Error) -> bool {
    use std::io::ErrorKind::{HostUnreachable, NetworkUnreachable, TimedOut};
    matches!(e.kind(), HostUnreachable | NetworkUnreachable | TimedOut)
}

/// Host and port; brackets around an IPv6 address are for the text form only.
fn host_port(e: &Endpoint) -> Result<(&str, u16)> {
    match e {
        Endpoint::Tcp(h, p) => {
            Ok((h.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(h), *p))
        }
        _ => Err(Error::new(Code::Inval, format!("{e} is not a TCP endpoint"))),
    }
}

/// Sets an option of a socket that rustix does not name. Says whether it is set.
fn set(fd: &impl AsFd, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> bool {
    let (fd, at) = (fd.as_fd().as_raw_fd(), (&raw const value).cast());
    // SAFETY: `at` points to a `c_int`, whose size is given.
    unsafe { libc::setsockopt(fd, level, name, at, size_of::<libc::c_int>() as u32) == 0 }
}

/// As [`TcpListener::bind`], with a longer queue; silent connections wait in the kernel.
async fn bind(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let mut failed = std::io::Error::other("the name has no address");
    for at in tokio::net::lookup_host((host, port)).await? {
        let socket = if at.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        match socket.bind(at).and_then(|()| socket.listen(BACKLOG)) {
            Ok(l) => {
                // Without it silent connections only cost more.
                set(&l, libc::IPPROTO_TCP, libc::TCP_DEFER_ACCEPT, SILENT.as_secs() as libc::c_int);
                return Ok(l);
            }
            Err(e) => failed = e,
        }
    }
    Err(failed)
}

#[async_trait]
impl Fabric for TcpFabric {
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let limit = self.streams.options.connect_timeout;
        let stream = match timeout(limit, TcpStream::connect(host_port(to)?)).await {
            Ok(Ok(s)) => s,
            Ok(Err(e)) => {
                let code = if leads_nowhere(&e) { Code::TimedOut } else { Code::Disconnected };
                return Err(Error::new(code, format!("cannot connect to {to}: {e}")));
            }
            Err(_) => {
                return Err(Error::new(
                    Code::TimedOut,
                    format!("cannot connect to {to}: no answer within {limit:?}"),
                ));
            }
        };
        tune(&stream);
        let (rd, wr) = stream.into_split();
        self.connect_over(rd, wr, to.to_string(), back).await
    }

    async fn connect_as_client(&self, to: &Endpoint) -> Result<Arc<dyn Connection>> {
        TcpFabric { streams: self.streams.as_client() }.connect(to, None).await
    }

    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        let (host, port) = host_port(at)?;
        let failed = |e: std::io::Error| Error::from(e).context(format!("cannot listen at {at}"));
        let listener = bind(host, port).await.map_err(failed)?;
        let port = listener.local_addr().map_err(failed)?.port();
        let Endpoint::Tcp(name, _) = at else {
            return Err(Error::new(Code::Inval, "not a TCP endpoint"));
        };
        let endpoint = Endpoint::Tcp(name.clone(), port);
        let (stop, stopping) = watch::channel(());
        self.streams.env.spawn(self.clone().accept_all(listener, service, stopping));
        Ok(Listener::new(endpoint, Box::new(stop)))
    }

    fn pool(&self) -> &Pool {
        &self.streams.pool
    }

    fn transports(&self) -> Vec<(&'static str, Traffic)> {
        vec![("tcp", self.streams.totals.look())]
    }
}

impl Incoming for OwnedReadHalf {
    fn wake_at(&self, bytes: usize) -> bool {
        // Failure leaves the reader woken more often.
        set(self.as_ref(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes as libc::c_int)
    }
}
