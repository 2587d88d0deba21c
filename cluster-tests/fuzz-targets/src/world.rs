//! The environment in which whole servers run for one input: one thread, paused time, no sockets
//! and no disks.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_fabric::{Connection, Endpoint, Fabric, Listener, Message, Peer, Pool, Role, Service};
use strake_proto::{Code, Error, Result};
use strake_runtime::{Clock, Env};

struct TokioClock(tokio::time::Instant);

impl Clock for TokioClock {
    fn unix_ns(&self) -> i64 {
        1_700_000_000_000_000_000 + self.boot().as_nanos() as i64
    }
    fn boot(&self) -> Duration {
        self.0.elapsed() + Duration::from_secs(1)
    }
}

/// Time by tokio's clock, randomness from `seed`.
pub fn env(seed: u8) -> Env {
    Env::new(Arc::new(TokioClock(tokio::time::Instant::now())), [seed; 32])
}

/// Runs a future to its end. Time moves only when nothing else can run.
pub fn run<T>(what: impl Future<Output = T>) -> T {
    let built =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    built.expect("a runtime without drivers").block_on(what)
}

/// A network of function calls: endpoint `sim:N` is service N.
#[derive(Default)]
pub struct Net {
    services: Mutex<BTreeMap<u32, Arc<dyn Service>>>,
    pool: Pool,
}

impl Net {
    pub fn new() -> Arc<Net> {
        Arc::default()
    }
    pub fn put(&self, at: u32, service: Arc<dyn Service>) {
        self.services.lock().insert(at, service);
    }
    /// Ends all services; they refer to this network.
    pub fn end(&self) {
        let services = std::mem::take(&mut *self.services.lock());
        drop(services);
    }
    /// Sends a request to a service as a peer of this role. `None`: there is no such service.
    pub async fn ask(&self, at: u32, role: Role, request: Message) -> Option<Result<Message>> {
        let service = self.services.lock().get(&at).cloned()?;
        let peer = Peer { role, addr: "fuzz".into(), id: 1, back: None };
        let asked = tokio::spawn(async move { service.handle(&peer, request).await });
        match tokio::time::timeout(Duration::from_secs(60), asked).await {
            Ok(r) => Some(r.expect("a handler does not panic")),
            Err(_) => Some(Err(Error::new(Code::TimedOut, "no answer"))),
        }
    }
}

/// A server's access to a [`Net`].
pub struct End(pub Arc<Net>);

struct Conn(Arc<Net>, u32);

#[async_trait]
impl Connection for Conn {
    async fn call(&self, request: Message, timeout: Duration) -> Result<Message> {
        tokio::time::sleep(Duration::from_micros(50)).await;
        match tokio::time::timeout(timeout, self.0.ask(self.1, Role::Server, request)).await {
            Ok(Some(reply)) => reply,
            Ok(None) => Err(Error::new(Code::Disconnected, "nobody is there")),
            Err(_) => Err(Error::new(Code::TimedOut, "no answer")),
        }
    }
    fn is_closed(&self) -> bool {
        false
    }
    fn addr(&self) -> String {
        format!("sim:{}", self.1)
    }
    fn close(&self) {}
}

#[async_trait]
impl Fabric for End {
    async fn connect(
        &self,
        to: &Endpoint,
        _: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        match to {
            Endpoint::Sim(n) if self.0.services.lock().contains_key(n) => {
                Ok(Arc::new(Conn(self.0.clone(), *n)))
            }
            _ => Err(Error::new(Code::Disconnected, "nobody is there")),
        }
    }
    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        let Endpoint::Sim(n) = *at else {
            return Err(Error::new(Code::Inval, "not in this network"));
        };
        self.0.put(n, service);
        Ok(Listener::new(at.clone(), Box::new(())))
    }
    fn pool(&self) -> &Pool {
        &self.0.pool
    }
}
