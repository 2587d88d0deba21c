//! Frames over RDMA: reliable connections set up by the RDMA connection manager, payloads moved
//! one-sided. See `docs/rdma.md`.
//!
//! `verbs.rs` opens the libraries, `probe.rs` finds the devices, `cm.rs` makes connections,
//! `device.rs` holds what the connections of a device share, `registered.rs` is one registration,
//! `locked.rs` limits how much memory is registered, `stage.rs` holds registered memory for
//! payloads that cannot be registered themselves, `rails.rs` chooses the ports, `queue.rs` is one
//! connection, `stream.rs` the stream of frames over it, `lend.rs` its payloads, `loans.rs` what it
//! has lent.

mod cm;
mod device;
#[cfg(test)]
mod foreign_tests;
pub mod greeting;
#[cfg(test)]
mod key_tests;
mod lend;
mod limits;
#[cfg(test)]
mod link_tests;
mod loans;
mod locked;
mod probe;
mod queue;
mod rails;
mod registered;
mod stage;
mod stream;
#[cfg(test)]
mod tests;
mod verbs;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Weak},
    time::Duration,
};

use async_trait::async_trait;
use cm::{Event, Id};
use device::Device;
use greeting::Greeting;
use limits::{FEWEST, MESSAGE};
use locked::Budget;
pub use locked::{Locked, for_ring, pool_limit, whole_pool};
use parking_lot::Mutex;
pub use probe::probe;
use queue::{CREDITS, Queue};
use rails::{Ledger, Path};
use strake_proto::{Code, Error, Result};
use strake_runtime::{Env, quiet::Quiet};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    time::{sleep, timeout},
};
use verbs::{Lib, event};

use crate::{
    Connection, Endpoint, Fabric, Identity, Listener, Pool, Service, Traffic,
    conn::{Bulk, Options, Streams, stopped},
};

static REFUSED: Quiet = Quiet::new();
static STARVED: Quiet = Quiet::new();

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// Receive buffers of a device, where the limit for locked memory allows.
const RECEIVES: u32 = 512;
/// How long to resolve an address, ms.
const RESOLVE_MS: i32 = 2000;
/// How often to check whether a removed device is back.
const RETURN: Duration = Duration::from_secs(1);
/// Setting up a connection takes a few messages of the connection manager, which repeats lost ones
/// after seconds.
const SETUP: Duration = Duration::from_secs(5);

/// The [`Fabric`] over RDMA. Clones share everything.
#[derive(Clone)]
pub struct RdmaFabric {
    streams: Streams,
    lib: &'static Lib,
    /// Number of devices at the start.
    usable: usize,
    /// By the address of their context. The connections hold the devices: an unplugged device is
    /// dropped with its last connection.
    devices: Arc<Mutex<BTreeMap<usize, Weak<Device>>>>,
    rails: Arc<Ledger>,
}

impl RdmaFabric {
    /// As [`crate::TcpFabric::new`]. `OpNotSupp` with one sentence where this machine has no RDMA.
    /// See [`pool_limit`] for the size of the pool.
    pub fn new(
        env: Env,
        identity: Identity,
        cluster_uuid: Option<[u8; 16]>,
        pool: Pool,
        options: Options,
    ) -> Result<RdmaFabric> {
        let usable = probe()?.len();
        Budget::here().keep_for_rdma();
        let streams = Streams::new(env, identity, cluster_uuid, pool, options);
        let rails = Arc::<Ledger>::default();
        rails.order(&[], false); // Looks at the ports here, where devices are looked at anyway.
        Ok(RdmaFabric { streams, lib: verbs::lib()?, usable, devices: Arc::default(), rails })
    }

    /// Sets the cluster id for handshakes from now on.
    pub fn set_cluster(&self, uuid: [u8; 16]) {
        self.streams.set_cluster(uuid);
    }

    /// Checks that each device may register all of the pool; `NoMem` says in a sentence why not.
    pub fn with_all_memory(&self) -> Result<()> {
        whole_pool(self.streams.pool.stats().limit, self.usable)
    }

    fn device(&self, id: &Id) -> Result<Arc<Device>> {
        let ctx = id.verbs();
        if ctx.is_null() {
            return Err(Error::new(Code::Disconnected, "an RDMA connection without a device"));
        }
        let mut all = self.devices.lock();
        if let Some(d) = all.get(&ctx.addr()).and_then(Weak::upgrade).filter(|d| !d.is_spoilt()) {
            return Ok(d);
        }
        let few = Budget::here().receives(MESSAGE, self.usable);
        let messages = u64::from(RECEIVES).min(few).max(FEWEST.into()) as u32;
        let d = Device::open(self.lib, ctx, self.streams.pool.clone(), messages, self.usable)?;
        all.insert(ctx.addr(), Arc::downgrade(&d));
        Ok(d)
    }

    /// Resolves, connects, and starts the task that polls.
    async fn dial(&self, to: &Endpoint) -> Result<Arc<Queue>> {
        let name = to.to_string();
        let addresses = addresses(to).await?;
        self.rails.ports.refresh_in_time().await;
        let paths = |at: SocketAddr| {
            self.rails.order(&[at.ip()], false).into_iter().map(move |path| (at, path))
        };
        let all = addresses.into_iter().flat_map(paths).collect();
        // Callers give up after little more than a second: every path must have its turn within
        // that time.
        let limit = self.streams.options.connect_timeout;
        let name = name.as_str();
        let dialed = rails::in_turn(all, limit, |(at, path)| self.dial_one(at, path, name)).await;
        let nowhere = || {
            Error::new(
                Code::Disconnected,
                format!("cannot connect to {name}: the name has no address"),
            )
        };
        dialed.unwrap_or_else(|| Err(nowhere()))
    }

    async fn dial_one(&self, at: SocketAddr, path: Path, name: &str) -> Result<Arc<Queue>> {
        // A connect that is abandoned counts as failed on this path, too, but one that is refused
        // does not.
        let mut rail = self.rails.take(path);
        let id = Id::new(self.lib)?;
        id.resolve(path.from, at, RESOLVE_MS, name).await?;
        let device = self.device(&id)?;
        let reads = device.reads;
        let mut q = Queue::new(device, id, name.to_string());
        q.make()?;
        q.id().connect(&greeting().encode(), reads)?;
        let e = q.id().events.next().await?;
        if matches!(e.kind, event::ESTABLISHED | event::REJECTED) {
            rail.well();
        }
        let e = cm::expected(e, event::ESTABLISHED, name)?;
        q.set_peer(&Greeting::decode(&e.private)?);
        q.rail = Some(rail);
        Ok(self.up(q))
    }

    /// Starts the polling of a connection that is established, but not authenticated yet.
    fn up(&self, q: Queue) -> Arc<Queue> {
        let q = Arc::new(q);
        q.device.enter(q.clone());
        self.streams.env.spawn(q.clone().drive());
        q
    }

    /// Sorts endpoints, the best first: by the rails that lead to each and by the connections that
    /// are open there. Equal ones take turns. Names come after addresses.
    pub fn by_rail(&self, endpoints: Vec<Endpoint>) -> Vec<Endpoint> {
        if endpoints.len() < 2 {
            return endpoints;
        }
        let ips: Vec<Option<IpAddr>> =
            endpoints.iter().map(|e| host(e).ok()?.0.parse().ok()).collect();
        let known: Vec<IpAddr> = ips.iter().flatten().copied().collect();
        let mut order: Vec<IpAddr> =
            self.rails.order(&known, true).into_iter().map(|p| p.to).collect();
        order.dedup();
        let place =
            |ip: &Option<IpAddr>| order.iter().position(|o| Some(*o) == *ip).unwrap_or(usize::MAX);
        let mut all: Vec<(usize, Endpoint)> = ips.iter().map(place).zip(endpoints).collect();
        all.sort_by_key(|(place, _)| *place);
        all.into_iter().map(|(_, e)| e).collect()
    }

    /// `at`: where it listens, with the actual port.
    async fn accept_all(
        self,
        mut listening: Id,
        at: SocketAddr,
        service: Arc<dyn Service>,
        stop: watch::Receiver<()>,
    ) {
        let mut stopping = stop.clone();
        loop {
            tokio::select! {
                biased;
                _ = stopped(&mut stopping) => return,
                () = self.accept_until_removed(&listening, &service, &stop) => {}
            }
            tracing::warn!(
                "the RDMA device of {at} was removed; listening starts again when it is back"
            );
            // The device can be removed only when nothing uses it.
            drop(listening);
            listening = loop {
                tokio::select! {
                    biased;
                    _ = stopped(&mut stopping) => return,
                    () = sleep(RETURN) => {}
                }
                let Ok(id) = Id::new(self.lib) else { continue };
                if id.listen(at, BACKLOG).is_ok() {
                    break id;
                }
            };
            tracing::info!("listening at {at} by RDMA again");
        }
    }

    async fn accept_until_removed(
        &self,
        listening: &Id,
        service: &Arc<dyn Service>,
        stop: &watch::Receiver<()>,
    ) {
        let half_open = Arc::new(Semaphore::new(self.streams.options.max_half_open));
        let open = Arc::new(Semaphore::new(self.streams.options.max_connections));
        loop {
            let Ok(half) = half_open.clone().acquire_owned().await else { return };
            match listening.events.next().await {
                Ok(e) if e.kind == event::CONNECT_REQUEST => {
                    let (f, service, stop, open) =
                        (self.clone(), service.clone(), stop.clone(), open.clone());
                    let id = Id::of_request(self.lib, e.id);
                    self.streams.env.spawn(async move {
                        let done = match id {
                            Ok(id) => f.accept(id, e, service, stop, half, &open).await,
                            Err(e) => Err(e),
                        };
                        if let Err(e) = done {
                            REFUSED.warn(|| format!("cannot accept an RDMA connection: {e}"));
                        }
                    });
                }
                Ok(e) if e.kind == event::DEVICE_REMOVAL => return,
                Ok(_) => {}
                Err(e) => {
                    STARVED.warn(|| format!("cannot accept RDMA connections: {e}"));
                    sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    async fn accept(
        &self,
        id: Id,
        request: Event,
        service: Arc<dyn Service>,
        stop: watch::Receiver<()>,
        half: OwnedSemaphorePermit,
        open: &Arc<Semaphore>,
    ) -> Result<()> {
        let from = format!("rdma:{}", id.peer());
        let refuse = |id: &Id, code: Code| {
            id.reject(&Greeting { message: 0, credits: 0, status: code as u16 }.encode());
        };
        let theirs = match Greeting::decode(&request.private) {
            Ok(g) => g,
            Err(e) => {
                refuse(&id, e.code);
                return Err(e.context(from));
            }
        };
        let Ok(_room) = open.clone().try_acquire_owned() else {
            refuse(&id, Code::Overloaded);
            return Err(Error::new(
                Code::Overloaded,
                format!("{from}: this server has too many connections"),
            ));
        };
        let device = self.device(&id).inspect_err(|_| refuse(&id, Code::Io))?;
        // As many READs as the other end asks for, within the limits of the device.
        let reads = (
            device.reads.0.min(request.reads.0.max(1)),
            device.reads.1.min(request.reads.1.max(1)),
        );
        let mut q = Queue::new(device, id, from.clone());
        q.make().inspect_err(|_| refuse(q.id(), Code::NoMem))?;
        q.set_peer(&theirs);
        q.id().accept(&greeting().encode(), reads)?;
        let up = timeout(SETUP, q.id().events.expect(event::ESTABLISHED, &from)).await;
        up.unwrap_or_else(|_| {
            Err(Error::new(
                Code::TimedOut,
                format!("{from} did not complete its connection in time"),
            ))
        })?;
        let q = self.up(q);
        let (rd, wr) = stream::halves(&q);
        let bulk: Arc<dyn Bulk> = q;
        // The handshake reports refusals itself.
        if let Ok((shared, ())) =
            self.streams.welcome(rd, wr, Some(bulk), from, service, |_| Ok(())).await
        {
            drop(half);
            self.streams.attend(&shared, stop).await;
        }
        Ok(())
    }
}

fn greeting() -> Greeting {
    Greeting { message: MESSAGE as u32, credits: CREDITS, status: 0 }
}

fn host(e: &Endpoint) -> Result<(&str, u16)> {
    match e {
        Endpoint::Rdma(h, port) => {
            Ok((h.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(h), *port))
        }
        _ => Err(Error::new(Code::Inval, format!("{e} is not an RDMA endpoint"))),
    }
}

async fn addresses(e: &Endpoint) -> Result<Vec<SocketAddr>> {
    let (host, port) = host(e)?;
    let found = tokio::net::lookup_host((host, port)).await;
    found
        .map(Iterator::collect)
        .map_err(|e| Error::new(Code::Disconnected, format!("cannot find {host}: {e}")))
}

#[async_trait]
impl Fabric for RdmaFabric {
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let q = timeout(SETUP, self.dial(to)).await.unwrap_or_else(|_| {
            Err(Error::new(
                Code::TimedOut,
                format!("cannot connect to {to}: no answer within {SETUP:?}"),
            ))
        })?;
        let (rd, wr) = stream::halves(&q);
        self.streams.connect_over(rd, wr, Some(q), to.to_string(), back).await
    }

    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        let failed = |e: Error| e.context(format!("cannot listen at {at}"));
        let addr = addresses(at).await.map_err(failed)?;
        let mut addr = *addr
            .first()
            .ok_or_else(|| failed(Error::new(Code::Inval, "the name has no address")))?;
        let id = Id::new(self.lib).map_err(failed)?;
        let port = id.listen(addr, BACKLOG).map_err(failed)?;
        addr.set_port(port);
        let Endpoint::Rdma(name, _) = at else {
            return Err(Error::new(Code::Inval, "not an RDMA endpoint"));
        };
        let endpoint = Endpoint::Rdma(name.clone(), port);
        let (stop, stopping) = watch::channel(());
        self.streams.env.spawn(self.clone().accept_all(id, addr, service, stopping));
        Ok(Listener::new(endpoint, Box::new(stop)))
    }

    fn pool(&self) -> &Pool {
        &self.streams.pool
    }

    fn transports(&self) -> Vec<(&'static str, Traffic)> {
        vec![("rdma", self.streams.totals.look())]
    }
}
