//! A client's network that is cut now and then: either its requests are lost, or the replies.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_fabric::{Connection, Endpoint, Fabric, Listener, Message, Pool, Service, TcpFabric};
use strake_proto::{Code, Error, Result};

/// Milliseconds between two cuts, and of a cut.
const WHOLE: std::ops::Range<u64> = 500..5000;
const LASTS: std::ops::Range<u64> = 100..2500;
/// How many cuts are planned: more than any run has time for.
const CUTS: usize = 200;

/// When the network is cut; whether that loses requests (true) or replies.
struct Plan {
    begun: Instant,
    cuts: Vec<(Duration, Duration, bool)>,
}

impl Plan {
    /// The current cut, if there is one: whether it loses requests.
    fn now(&self) -> Option<bool> {
        let now = self.begun.elapsed();
        self.cuts.iter().find(|(from, to, _)| (*from..*to).contains(&now)).map(|c| c.2)
    }
}

/// TCP with cuts.
pub struct Cut {
    tcp: TcpFabric,
    plan: Arc<Plan>,
}

impl Cut {
    pub fn new(tcp: TcpFabric, seed: u64) -> Cut {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut at = Duration::ZERO;
        let cut = |_| {
            let from = at + Duration::from_millis(rng.random_range(WHOLE));
            at = from + Duration::from_millis(rng.random_range(LASTS));
            (from, at, rng.random_bool(0.5))
        };
        let cuts = (0..CUTS).map(cut).collect();
        Cut { tcp, plan: Arc::new(Plan { begun: Instant::now(), cuts }) }
    }
}

#[async_trait]
impl Fabric for Cut {
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        if self.plan.now().is_some() {
            tokio::time::sleep(Duration::from_millis(100)).await;
            return Err(Error::new(Code::TimedOut, format!("the network to {to} is cut")));
        }
        let inner = self.tcp.connect(to, back).await?;
        Ok(Arc::new(Line { inner, plan: self.plan.clone() }))
    }

    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        self.tcp.listen(at, service).await
    }

    fn pool(&self) -> &Pool {
        self.tcp.pool()
    }
}

struct Line {
    inner: Arc<dyn Connection>,
    plan: Arc<Plan>,
}

impl Line {
    async fn lost(&self, until: Instant) -> Result<Message> {
        tokio::time::sleep_until(until.into()).await;
        Err(Error::new(Code::TimedOut, "the network is cut"))
    }
}

#[async_trait]
impl Connection for Line {
    async fn call(&self, request: Message, timeout: Duration) -> Result<Message> {
        let until = Instant::now() + timeout;
        if self.plan.now() == Some(true) {
            return self.lost(until).await;
        }
        let reply = self.inner.call(request, timeout).await;
        match self.plan.now() {
            Some(false) => self.lost(until).await,
            _ => reply,
        }
    }

    fn is_closed(&self) -> bool {
        self.inner.is_closed()
    }
    fn addr(&self) -> String {
        self.inner.addr()
    }
    fn close(&self) {
        self.inner.close();
    }
}
