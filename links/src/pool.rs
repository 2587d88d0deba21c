//! Connections to servers: made when first needed, shared by all who call the same server, and made
//! again after they broke.
//!
//! **One rule of failure** for all processes (`docs/decisions/connection-pool.md`). One caller
//! connects; the others who want the same connection wait for it. A failure is the answer to all
//! who asked before it was known, and to those who ask within [`Limits::failure_stands`] after that.
//! Whoever asks later tries anew. What the error says is the same everywhere, too: see [`connect`].

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use strake_fabric::{Connection, Fabric};
use strake_proto::{Code, Error, Result, pb};
use tokio::{
    sync::Mutex as AsyncMutex,
    time::{Instant, timeout},
};

/// Beyond this many servers, those without an open connection are forgotten: servers may return at
/// other addresses again and again.
const MAX_SERVERS: usize = 1024;

/// How a pool treats the connections to one server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections to each server, used in turn; at least one.
    pub per_server: usize,
    /// How long after a failure callers are answered with it before the server is tried again.
    pub failure_stands: Duration,
    /// When one connection to a server has ended, the others made before that are not used any
    /// more: they are as dead, and each would be waited for in turn.
    pub end_together: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { per_server: 1, failure_stands: Duration::ZERO, end_together: false }
    }
}

/// One connection, or why there is none. Locked while it is made.
#[derive(Default)]
struct Slot {
    open: Option<(Arc<dyn Connection>, Instant)>,
    failed: Option<(Instant, Error)>,
}

#[derive(Default)]
struct Place {
    slot: AsyncMutex<Slot>,
    /// How many attempts to connect have failed.
    failures: AtomicU64,
}

struct Server {
    places: Vec<Place>,
    turn: AtomicUsize,
    /// When a connection was last seen to have ended, if they end together.
    ended: Mutex<Option<Instant>>,
}

impl Server {
    fn new(places: usize) -> Server {
        let places = (0..places.max(1)).map(|_| Place::default()).collect();
        Server { places, turn: AtomicUsize::new(0), ended: Mutex::default() }
    }

    fn notice_ends(&self) {
        let mut any = false;
        for mut slot in self.places.iter().filter_map(|p| p.slot.try_lock().ok()) {
            any |= slot.open.take_if(|(c, _)| c.is_closed()).is_some();
        }
        if any {
            *self.ended.lock() = Some(Instant::now());
        }
    }

    /// The open connections, but not those that are being made.
    fn open(&self) -> impl Iterator<Item = Arc<dyn Connection>> {
        let slots = self.places.iter().filter_map(|p| p.slot.try_lock().ok());
        slots.filter_map(|s| Some(s.open.as_ref().filter(|(c, _)| !c.is_closed())?.0.clone()))
    }

    fn is_in_use(&self) -> bool {
        let in_use = |slot: &Slot| slot.open.as_ref().is_some_and(|(c, _)| !c.is_closed());
        self.places.iter().any(|p| p.slot.try_lock().map_or(true, |s| in_use(&s)))
    }
}

/// See the module. `K` names a server, or one purpose of connections to it.
pub struct ConnectionPool<K> {
    limits: Limits,
    servers: Mutex<BTreeMap<K, Arc<Server>>>,
}

impl<K: Ord + Clone> ConnectionPool<K> {
    /// A pool without connections.
    pub fn new(limits: Limits) -> ConnectionPool<K> {
        ConnectionPool { limits, servers: Mutex::default() }
    }

    /// An open connection, the next one in turn. If there is none, `connect` makes it, unless
    /// another caller's attempt failed meanwhile or just now: then that error is returned.
    pub async fn get<'a>(
        &self,
        server: &K,
        connect: impl FnOnce() -> Attempt<'a>,
    ) -> Result<Arc<dyn Connection>> {
        let server = self.server(server);
        let turn = server.turn.fetch_add(1, Relaxed) % server.places.len();
        if self.limits.end_together {
            server.notice_ends();
        }
        let place = &server.places[turn];
        let failures = place.failures.load(Relaxed);
        let mut slot = place.slot.lock().await;
        let ended = *server.ended.lock();
        if let Some((c, made)) = &slot.open
            && !c.is_closed()
            && ended.is_none_or(|ended| *made >= ended)
        {
            return Ok(c.clone());
        }
        if let Some((at, e)) = &slot.failed
            && (place.failures.load(Relaxed) != failures
                || at.elapsed() < self.limits.failure_stands)
        {
            return Err(e.clone());
        }
        slot.open = None;
        match connect().await {
            Ok(c) => {
                *slot = Slot { open: Some((c.clone(), Instant::now())), failed: None };
                Ok(c)
            }
            Err(e) => {
                place.failures.fetch_add(1, Relaxed);
                slot.failed = Some((Instant::now(), e.clone()));
                Err(e)
            }
        }
    }

    fn server(&self, key: &K) -> Arc<Server> {
        let mut servers = self.servers.lock();
        if let Some(known) = servers.get(key) {
            return known.clone();
        }
        if servers.len() >= MAX_SERVERS {
            servers.retain(|_, s| s.is_in_use());
        }
        let new = Arc::new(Server::new(self.limits.per_server));
        servers.insert(key.clone(), new.clone());
        new
    }

    /// The open connections.
    pub fn open(&self) -> Vec<(K, Arc<dyn Connection>)> {
        let servers = self.servers.lock();
        servers.iter().flat_map(|(key, s)| s.open().map(|c| (key.clone(), c))).collect()
    }

    /// Closes and forgets all connections.
    pub fn close(&self) {
        for server in std::mem::take(&mut *self.servers.lock()).into_values() {
            server.open().for_each(|c| c.close());
        }
    }
}

/// An attempt to connect.
pub type Attempt<'a> = BoxFuture<'a, Result<Arc<dyn Connection>>>;

/// Connects to a server at the best of its endpoints that answers, with a time limit for each.
///
/// Errors say what the caller can do: `Unauthenticated` and `Protocol`, the server refuses this
/// process or its version; `TimedOut`, the last endpoint that was tried does not answer;
/// `Disconnected`, everything else. A resource that is missing here or there may become available,
/// so a caller that may wait waits as for a server that is away, also where the server answered that
/// it has too many connections. With none of them the request was sent.
pub fn connect<'a>(fabric: &'a dyn Fabric, node: &'a pb::Node, limit: Duration) -> Attempt<'a> {
    Box::pin(async move {
        let name = match node.name.as_str() {
            "" => format!("node {}", node.id),
            name => name.to_owned(),
        };
        let failed = |e: Error| away(e).context(format_args!("connecting to {name}"));
        let mut last = Error::new(Code::Disconnected, format!("{name} has no usable endpoint"));
        for at in fabric.routes(&node.endpoints).map_err(failed)? {
            last = match timeout(limit, fabric.connect(&at, None)).await {
                Ok(Ok(c)) => return Ok(c),
                Ok(Err(e)) => away(e).context(format_args!("connecting to {name} at {at}")),
                Err(_) => Error::new(Code::TimedOut, format!("{name} at {at} does not answer")),
            };
        }
        Err(last)
    })
}

/// The error of an attempt to connect, as [`connect`] returns it.
fn away(e: Error) -> Error {
    match e.code {
        Code::Unauthenticated | Code::Protocol | Code::TimedOut => e,
        _ => Error { code: Code::Disconnected, ..e },
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;
    use strake_fabric::conformance::Open;
    use tokio::time::sleep;

    use super::*;

    const LONG: Duration = Duration::from_secs(1);

    fn made() -> Attempt<'static> {
        Box::pin(async { Ok(Arc::new(Open::default()) as Arc<dyn Connection>) })
    }

    /// Attempts to connect, which take [`LONG`] and fail.
    #[derive(Default)]
    struct Attempts(AtomicUsize);

    impl Attempts {
        fn fail(&self) -> Attempt<'_> {
            let n = self.0.fetch_add(1, Relaxed) + 1;
            Box::pin(async move {
                sleep(LONG).await;
                Err(Error::new(Code::TimedOut, format!("attempt {n}")))
            })
        }
    }

    fn pool(limits: Limits) -> ConnectionPool<usize> {
        ConnectionPool::new(limits)
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_that_of_all_who_asked_before_it_and_stands_as_long_as_it_may() {
        for stands in [Duration::ZERO, LONG / 2] {
            let pool = pool(Limits { failure_stands: stands, ..Limits::default() });
            let (attempts, began) = (Attempts::default(), Instant::now());
            let late = async {
                sleep(LONG / 2).await;
                pool.get(&1, || attempts.fail()).await
            };
            let all = join_all((0..100).map(|_| pool.get(&1, || attempts.fail())));
            let (mut all, late) = tokio::join!(all, late);
            all.push(late);
            let said = |r: Result<Arc<dyn Connection>>| r.err().map(|e| e.message);
            assert!(all.into_iter().all(|r| said(r).as_deref() == Some("attempt 1")));
            assert_eq!((attempts.0.load(Relaxed), began.elapsed()), (1, LONG));
            // Another server is not waited for meanwhile.
            assert!(pool.get(&2, made).await.is_ok());
            let next = said(pool.get(&1, || attempts.fail()).await);
            let want = if stands.is_zero() { "attempt 2" } else { "attempt 1" };
            assert_eq!(next.as_deref(), Some(want));
            sleep(stands).await;
            assert!(pool.get(&1, made).await.is_ok(), "tried anew");
        }
    }

    /// An attempt that fails at once takes no time, by which it could be told from the next.
    #[tokio::test(start_paused = true)]
    async fn a_refusal_is_that_of_all_who_waited_for_it() {
        let (pool, gate) = (pool(Limits::default()), tokio::sync::Semaphore::new(0));
        let tried = AtomicUsize::new(0);
        let refused = || -> Attempt<'_> {
            tried.fetch_add(1, Relaxed);
            Box::pin(async {
                let _open = gate.acquire().await;
                Err(Error::new(Code::Disconnected, "refused"))
            })
        };
        let all = join_all((0..9).map(|_| pool.get(&1, refused)));
        let open = async { gate.add_permits(9) };
        let (all, ()) = tokio::join!(all, open);
        assert!(all.iter().all(Result::is_err));
        assert_eq!(tried.load(Relaxed), 1);
        assert!(pool.get(&1, refused).await.is_err());
        assert_eq!(tried.load(Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn connections_are_used_in_turn_and_end_together_if_they_are_to() {
        for end_together in [false, true] {
            let pool = pool(Limits { per_server: 3, end_together, ..Limits::default() });
            let first = join_all((0..3).map(|_| pool.get(&1, made))).await;
            assert_eq!(pool.open().len(), 3);
            sleep(LONG).await;
            first[0].as_ref().unwrap().close();
            let next = join_all((0..3).map(|_| pool.get(&1, made))).await;
            let is_old = |c: &Result<Arc<dyn Connection>>| {
                let c = c.as_ref().unwrap();
                first.iter().any(|f| Arc::ptr_eq(f.as_ref().unwrap(), c))
            };
            let old = next.iter().filter(|c| is_old(c)).count();
            assert_eq!(old, if end_together { 0 } else { 2 });
            pool.close();
            assert!(next.iter().all(|c| c.as_ref().unwrap().is_closed()));
            assert!(pool.open().is_empty());
        }
    }

    #[tokio::test]
    async fn servers_whose_connections_broke_are_forgotten_when_there_are_many() {
        let pool = pool(Limits::default());
        let kept = pool.get(&1, made).await.unwrap();
        for n in 2..=3 * MAX_SERVERS {
            pool.get(&n, made).await.unwrap().close();
            assert!(pool.servers.lock().len() <= MAX_SERVERS);
        }
        let again = pool.get(&1, made).await.unwrap();
        assert!(Arc::ptr_eq(&kept, &again), "one that works stays");
    }
}
