//! A network in memory: nodes are services by number; they can die, fall silent, or lose replies.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_client::Config;
use strake_fabric::{
    Buf, Connection, Endpoint, Fabric, Foreign, Lend, Listener, Message, Peer, Pool, Role, Service,
    Transport,
};
use strake_proto::{Code, Error, Result};
use strake_runtime::{Clock, Env};

#[derive(Default)]
pub struct Net {
    services: Mutex<BTreeMap<u32, Arc<dyn Service>>>,
    /// Refuse connections and break the present ones.
    down: Mutex<BTreeSet<u32>>,
    /// Take requests and never answer.
    silent: Mutex<BTreeSet<u32>>,
    /// How many requests to a node lose their reply: they run, and the connection breaks.
    lose: Mutex<BTreeMap<u32, u32>>,
    /// What the transport to a node reports about payloads. A node that is not listed has none.
    transports: Mutex<BTreeMap<u32, Transport>>,
    /// How many answers written into foreign memory get one byte changed there.
    damaged: AtomicU64,
    /// Answers come with their frames, even where the caller lent memory for them.
    streams: AtomicBool,
    /// The number of requests that lent foreign memory, and (`lanes`) the connections they came by.
    lent: AtomicU64,
    lanes: Mutex<BTreeSet<u64>>,
    pool: Pool,
    calls: AtomicU64,
}

/// The bytes of foreign memory.
fn looked_at(m: &Foreign) -> Buf {
    let from = std::ptr::with_exposed_provenance::<u8>(m.addr() as usize);
    // SAFETY: the lender keeps the memory in place while the call is under way.
    Buf::copy_from(unsafe { std::slice::from_raw_parts(from, m.len() as usize) })
}

impl Net {
    pub fn put(&self, node: u32, service: Arc<dyn Service>) {
        self.services.lock().insert(node, service);
    }
    pub fn service(&self, node: u32) -> Arc<dyn Service> {
        self.services.lock()[&node].clone()
    }
    pub fn set_down(&self, node: u32, down: bool) {
        if down {
            self.down.lock().insert(node)
        } else {
            self.down.lock().remove(&node)
        };
    }
    pub fn set_silent(&self, node: u32, silent: bool) {
        if silent {
            self.silent.lock().insert(node)
        } else {
            self.silent.lock().remove(&node)
        };
    }
    pub fn lose_replies(&self, node: u32, n: u32) {
        self.lose.lock().insert(node, n);
    }
    /// From now on the transport to this node reports `transport` for payloads from and to it.
    pub fn set_transport(&self, node: u32, transport: Transport) {
        self.transports.lock().insert(node, transport);
    }
    /// Changes a byte in foreign memory after each of the next `n` answers is written there.
    pub fn damage(&self, n: u64) {
        self.damaged.store(n, SeqCst);
    }
    /// From now on servers send payloads with their answers instead of writing them into foreign
    /// memory, as for memory that cannot be registered.
    pub fn stream(&self, on: bool) {
        self.streams.store(on, SeqCst);
    }
    /// Requests that lent foreign memory so far, and by how many connections.
    pub fn lent(&self) -> (u64, usize) {
        (self.lent.load(SeqCst), self.lanes.lock().len())
    }
    /// Places an answer's payload into the memory that the request lent, as RDMA does.
    fn placed(&self, lend: Option<&Lend>, mut m: Message) -> Message {
        let Some(Lend::Room(room)) =
            lend.filter(|_| m.payload_len() > 4096 && !self.streams.load(SeqCst))
        else {
            return m;
        };
        let mut to = std::ptr::with_exposed_provenance_mut::<u8>(room.addr() as usize);
        assert!(m.payload_len() as u64 <= room.len());
        m.placed = m.payload_len() as u32;
        let damaged = self.damaged.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1)).is_ok();
        for b in std::mem::take(&mut m.payload) {
            // SAFETY: as in `looked_at`, and no references to the memory exist.
            unsafe {
                to.copy_from(b.as_ptr(), b.len());
                *to.add(b.len() / 2) ^= u8::from(damaged);
            }
            to = to.wrapping_add(b.len());
        }
        m
    }
    fn transport(&self, node: u32) -> Transport {
        self.transports.lock().get(&node).copied().unwrap_or_default()
    }
    /// The answer with its payload marked as the node's transport would mark it.
    fn marked(&self, node: u32, m: Message) -> Message {
        let transport = self.transport(node);
        let mark = |b: &Buf| {
            let mut to = self.pool.get_now(b.len());
            to.copy_from_slice(b);
            to.came_by(transport);
            to.freeze()
        };
        Message { went: transport, payload: m.payload.iter().map(mark).collect(), ..m }
    }
    fn is_down(&self, node: u32) -> bool {
        self.down.lock().contains(&node)
    }
    fn loses(&self, node: u32) -> bool {
        let mut l = self.lose.lock();
        let n = l.entry(node).or_default();
        let lost = *n > 0;
        *n = n.saturating_sub(1);
        lost
    }
}

pub struct MemFabric(pub Arc<Net>);

#[async_trait]
impl Fabric for MemFabric {
    async fn connect(
        &self,
        to: &Endpoint,
        _back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let node = match to {
            Endpoint::Sim(node) => *node,
            Endpoint::Rdma(_, node) => u32::from(*node),
            Endpoint::Tcp(..) => return Err(Error::new(Code::Inval, "not a simulated node")),
        };
        if self.0.is_down(node) || !self.0.services.lock().contains_key(&node) {
            return Err(Error::new(Code::Disconnected, "connection refused"));
        }
        if self.0.silent.lock().contains(&node) {
            std::future::pending::<()>().await;
        }
        let id = self.0.calls.fetch_add(1, SeqCst);
        Ok(Arc::new(MemConn { net: self.0.clone(), node, id, broken: AtomicBool::new(false) }))
    }
    async fn listen(&self, _at: &Endpoint, _service: Arc<dyn Service>) -> Result<Listener> {
        Err(Error::new(Code::OpNotSupp, "clients do not listen"))
    }
    fn pool(&self) -> &Pool {
        &self.0.pool
    }
    fn routes(&self, endpoints: &[String]) -> Result<Vec<Endpoint>> {
        let way = |e: &String| match e.parse() {
            Ok(Endpoint::Sim(n)) if self.0.transport(n) == Transport::Rdma => {
                Some(Endpoint::Rdma("sim".into(), n as u16))
            }
            e => e.ok(),
        };
        Ok(endpoints.iter().filter_map(way).collect())
    }
}

struct MemConn {
    net: Arc<Net>,
    node: u32,
    /// Unique among all connections.
    id: u64,
    broken: AtomicBool,
}

#[async_trait]
impl Connection for MemConn {
    async fn call(&self, mut request: Message, timeout: Duration) -> Result<Message> {
        let lend = request.lend.take();
        if let Some(what) = &lend {
            if !self.lends() {
                return Err(Error::new(Code::OpNotSupp, "nothing can be lent to this node"));
            }
            self.net.lent.fetch_add(1, SeqCst);
            self.net.lanes.lock().insert(self.id);
            if let Lend::Payload(m) = what {
                request.payload = vec![looked_at(m)];
            }
        }
        let gone = || Error::new(Code::Disconnected, format!("node {} is gone", self.node));
        if self.is_closed() {
            return Err(gone());
        }
        self.net.calls.fetch_add(1, SeqCst);
        let service = self.net.services.lock().get(&self.node).cloned().ok_or_else(gone)?;
        let peer = Peer { role: Role::Client, addr: "client".into(), id: 1, back: None };
        let silent = self.net.silent.lock().contains(&self.node);
        // In a task: an abandoned call runs on, as on a real network.
        let running = tokio::spawn(async move { service.handle(&peer, request).await });
        let answered = async {
            if silent {
                std::future::pending::<()>().await;
            }
            running.await.map_err(|e| Error::new(Code::Io, e.to_string()))?
        };
        tokio::pin!(answered);
        let end = tokio::time::Instant::now() + timeout;
        loop {
            let step = tokio::time::Instant::now() + Duration::from_millis(2);
            match tokio::time::timeout_at(step.min(end), &mut answered).await {
                Ok(_) if self.net.loses(self.node) => {
                    self.broken.store(true, SeqCst);
                    return Err(gone());
                }
                Ok(r) => {
                    return r
                        .map(|m| self.net.placed(lend.as_ref(), self.net.marked(self.node, m)));
                }
                Err(_) if self.is_closed() => return Err(gone()),
                Err(_) if tokio::time::Instant::now() >= end => {
                    return Err(Error::new(Code::TimedOut, "no answer"));
                }
                Err(_) => {}
            }
        }
    }
    fn is_closed(&self) -> bool {
        if self.net.is_down(self.node) {
            self.broken.store(true, SeqCst);
        }
        self.broken.load(SeqCst)
    }
    fn lends(&self) -> bool {
        self.net.transport(self.node) == Transport::Rdma
    }
    fn addr(&self) -> String {
        format!("sim:{}", self.node)
    }
    fn close(&self) {
        self.broken.store(true, SeqCst);
    }
}

/// Tokio's clock, which tests pause.
struct TestClock(tokio::time::Instant);

impl Clock for TestClock {
    fn unix_ns(&self) -> i64 {
        1_700_000_000_000_000_000 + self.0.elapsed().as_nanos() as i64
    }
    fn boot(&self) -> Duration {
        Duration::from_secs(1000) + self.0.elapsed()
    }
}

pub fn env(seed: u8) -> Env {
    Env::new(Arc::new(TestClock(tokio::time::Instant::now())), [seed; 32])
}

pub fn config() -> Config {
    Config {
        hostname: "tester".into(),
        ..Config::new(vec![Endpoint::Sim(1), Endpoint::Sim(2), Endpoint::Sim(3)])
    }
}
