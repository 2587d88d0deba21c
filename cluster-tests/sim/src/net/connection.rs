//! The connections of the simulated network: what becomes of each message.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use rand::RngExt;
use strake_fabric::{Connection, Endpoint, Fabric, Listener, Message, Peer, Pool, Role, Service};
use strake_proto::{Code, Error, Result, opcode};
use strake_runtime::Env;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};

use super::{Listening, Network};
use crate::{faults::Strike, ledger::Kind};

/// As the real transport's dead-peer detection.
const DEAD_PEER: Duration = Duration::from_secs(2);
/// The connection of a request that is held up is given up after this time.
const HELD_UP: Duration = Duration::from_millis(500);
/// The share of requests that still arrive when their client gives the connection up while they are
/// on the way, and how much later at most.
const SENT_ON: f64 = 0.8;
const SENT_ON_WITHIN: Duration = Duration::from_secs(15);
/// A batch of Raft messages that is longer than this carries entries; shorter ones are heartbeats
/// and acknowledgements.
const RAFT_ENTRIES: usize = 200;

/// How often a connection checks whether the other end is silent, and how often in a row it must
/// be: two seconds, as in `strake_fabric::conn::Options`.
const SILENT_TICK: Duration = Duration::from_millis(200);
const SILENT_TICKS: u32 = 10;

/// A request that the network keeps, though its connection was given up.
pub(super) struct Late {
    pub env: Env,
    pub far: Arc<Far>,
    pub request: Message,
}

/// The receiver's end of a connection. It ends when the connection is closed and nothing is on the
/// way over it any more.
pub(super) struct Far {
    pub service: Arc<dyn Service>,
    /// How the receiver sees the sender.
    pub peer: Peer,
    closed: AtomicBool,
}

impl Drop for Far {
    fn drop(&mut self) {
        if self.closed.load(Ordering::SeqCst) {
            self.service.disconnected(&self.peer);
        }
    }
}

/// A client's request that has not arrived yet. If the caller stops waiting, the network still has
/// it and may deliver it.
struct Sent<'a> {
    connection: &'a SimConnection,
    far: Option<Arc<Far>>,
    request: Option<Message>,
}

impl<'a> Sent<'a> {
    fn new(connection: &'a SimConnection, request: &Message) -> Sent<'a> {
        let far = connection.far.lock().clone().filter(|far| far.peer.role == Role::Client);
        let request = far.is_some().then(|| request.clone());
        Sent { connection, far, request }
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        if let (Some(far), Some(request)) = (self.far.take(), self.request.take()) {
            self.connection.send_on(far, request);
        }
    }
}

/// Whether a message is an operation that a caller waits for, or a step of one, and not background
/// traffic of servers and clients.
fn is_operation(m: &Message) -> bool {
    let opcode =
        if m.opcode == opcode::RELAY { strake_links::relay::asked(&m.body) } else { m.opcode };
    match opcode {
        opcode::RAFT => m.body.len() > RAFT_ENTRIES,
        opcode::META
        | opcode::LOCK_WAIT
        | opcode::SNAPSHOT
        | opcode::READ
        | opcode::WRITE
        | opcode::FLUSH
        | opcode::TRIM
        | opcode::EXTENTS
        | opcode::GRANT
        | opcode::FORWARD
        | opcode::FORWARD_FLUSH
        | opcode::SYNC_LIST
        | opcode::SYNC_PUT => true,
        _ => false,
    }
}

/// Marks an operation between two nodes as under way until it is dropped.
struct UnderWay(Network, [u32; 2]);

impl UnderWay {
    fn new(net: &Network, nodes: [u32; 2]) -> UnderWay {
        let mut s = net.state.lock();
        nodes.iter().for_each(|n| *s.under_way.entry(*n).or_default() += 1);
        UnderWay(net.clone(), nodes)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut s = self.0.state.lock();
        for n in self.1 {
            if let Some(count) = s.under_way.get_mut(&n) {
                *count -= 1;
            }
        }
    }
}

/// One end of a connection: a process on a node.
#[derive(Clone)]
struct End {
    node: u32,
    life: u64,
    env: Env,
}

pub(super) struct SimConnection {
    net: Network,
    from: End,
    to: End,
    /// The receiver, until the connection is closed: otherwise servers that are connected to each
    /// other would keep each other in memory at the end.
    far: Mutex<Option<Arc<Far>>>,
    closed: Arc<AtomicBool>,
    /// Both ends know that the connection is gone: nothing more arrives over it.
    broken: AtomicBool,
    closing: tokio::sync::Notify,
    other: Mutex<Weak<SimConnection>>,
}

impl SimConnection {
    pub(super) fn touches(&self, node: u32) -> bool {
        self.from.node == node || self.to.node == node
    }

    fn gone(&self) -> Error {
        Error::new(Code::Disconnected, format!("connection to sim:{} is gone", self.to.node))
    }

    async fn closed(&self) {
        while !self.closed.load(Ordering::SeqCst) {
            self.closing.notified().await;
        }
    }

    /// Sends one message in one direction: delays it, applies message faults, and returns an error
    /// if it does not arrive. If it is to arrive a second time, returns how much later.
    async fn travel(
        &self,
        from: u32,
        to: u32,
        is_operation: bool,
        is_reply: bool,
    ) -> Result<Option<Duration>> {
        sleep(self.net.delay(from, to)).await;
        let (blocks, strike) = {
            let mut s = self.net.state.lock();
            let blocks = s.blocks(from, to, Instant::now());
            if is_operation {
                for fault in &blocks {
                    if let Some(kind) = s.unmet.remove(fault) {
                        s.ledger.counts(kind);
                    }
                }
            }
            let strike =
                if is_operation && blocks.is_empty() { s.strike(from, to, is_reply) } else { None };
            (blocks, strike)
        };
        if !blocks.is_empty() {
            sleep(DEAD_PEER).await;
            self.close();
        }
        let again = self.struck(from, to, strike).await;
        if self.net.breaks() {
            self.net.made(Kind::Broken, is_operation && !self.is_closed());
            self.break_off();
        }
        if self.is_closed() {
            return Err(self.gone());
        }
        if is_operation {
            *self.net.state.lock().passed.entry((from, to)).or_default() += 1;
        }
        Ok(again)
    }

    /// Applies a message fault to a message of an operation.
    async fn struck(&self, from: u32, to: u32, strike: Option<Strike>) -> Option<Duration> {
        let strike = strike?;
        self.net.note(&format!("{from} > {to}: {strike:?}"));
        match strike {
            Strike::Lose => {
                self.net.made(Kind::Lost, true);
                sleep(DEAD_PEER).await;
                self.close();
            }
            Strike::Break => {
                self.net.made(Kind::Broken, true);
                self.break_off();
            }
            Strike::Hold(late) => {
                let passed = || self.net.state.lock().passed.get(&(from, to)).copied();
                self.net.made(Kind::Delayed, true);
                let before = passed();
                sleep(late).await;
                if passed() != before {
                    self.net.state.lock().ledger.was(Kind::Delayed, Kind::Reordered);
                }
            }
            Strike::Repeat(late) => {
                self.net.made(Kind::Repeated, true);
                return Some(late);
            }
        }
        None
    }

    async fn exchange(&self, request: Message) -> Result<Message> {
        let counts = is_operation(&request);
        let _under_way = counts.then(|| UnderWay::new(&self.net, [self.from.node, self.to.node]));
        let mut sent = Sent::new(self, &request);
        let repeated = self.travel(self.from.node, self.to.node, counts, false).await?;
        sent.request = None;
        let mut request = request;
        if let Some(plant) = self.net.planted() {
            plant.tamper_request(&mut request);
        }
        let far =
            self.far.lock().clone().ok_or_else(|| strake_fabric::unknown_opcode(request.opcode))?;
        if request.opcode == opcode::WRITE && self.net.state.lock().held_up == Some(self.from.node)
        {
            let late = Late { env: self.to.env.clone(), far, request };
            self.net.state.lock().late.push(late);
            sleep(HELD_UP).await;
            self.close();
            return Err(self.gone());
        }
        self.net.delivered(self.from.node, self.to.node, &request);
        let (answer, answered) = oneshot::channel();
        let (trace, opcode) = (request.trace, request.opcode);
        let same = repeated.map(|late| (request.clone(), late));
        let again = self.net.repetition(&request).or(same);
        let closed = self.closed.clone();
        // A handler that is at work does not keep the connection's end open.
        let (service, peer) = (far.service.clone(), far.peer.clone());
        drop((far, sent));
        self.to.env.spawn(async move {
            let _ = answer.send(service.handle(&peer, request).await);
            if let Some((request, late)) = again {
                sleep(late).await;
                // A repetition arrives only if the connection still lives.
                if !closed.load(Ordering::SeqCst) {
                    let _ = service.handle(&peer, request).await;
                }
            }
        });
        // If the handler's node dies, its task is aborted and the channel ends.
        let mut reply = answered.await.map_err(|_| self.gone())?;
        if let Some(plant) = self.net.planted() {
            let delay = plant.delay(opcode);
            if !delay.is_zero() {
                sleep(delay).await;
            }
        }
        self.travel(self.to.node, self.from.node, counts, true).await?;
        if let Ok(m) = &mut reply {
            m.trace = trace;
            if let Some(plant) = self.net.planted() {
                plant.tamper(opcode, m);
            }
            self.net.delivered(self.to.node, self.from.node, m);
        }
        reply
    }

    /// Breaks the connection at both ends at once.
    fn break_off(&self) {
        self.broken.store(true, Ordering::SeqCst);
        self.close();
    }

    /// The caller no longer waits for this request, which is on its way. Over a working connection
    /// it arrives soon. Over one that was given up it may arrive later, or not at all.
    fn send_on(&self, far: Arc<Far>, mut request: Message) {
        let (net, from, to) = (self.net.clone(), self.from.node, self.to.node);
        let given_up = self.is_closed() || net.is_blocked(from, to);
        let late = {
            let mut s = net.state.lock();
            if s.over
                || self.broken.load(Ordering::SeqCst)
                || given_up && !s.rng.random_bool(SENT_ON)
            {
                return;
            }
            // Short delays are more likely than long ones.
            let late = SENT_ON_WITHIN.mul_f64(s.rng.random::<f64>().powi(2));
            let late = if given_up { late } else { s.weather.max_delay };
            s.sent_on = s.sent_on.max(Some(Instant::now() + late));
            late
        };
        self.to.env.spawn(async move {
            sleep(late).await;
            if net.is_blocked(from, to) {
                return;
            }
            if given_up {
                net.made(Kind::Late, is_operation(&request));
                net.note(&format!(
                    "{from} > {to}: {:#x} arrives {late:?} after its connection was given up",
                    request.opcode
                ));
            }
            if let Some(plant) = net.planted() {
                plant.tamper_request(&mut request);
            }
            net.delivered(from, to, &request);
            let _ = far.service.handle(&far.peer, request).await;
        });
    }
}

impl SimConnection {
    /// Returns when nothing has passed for as long as a real connection waits. Never returns if
    /// silence is not noticed.
    async fn silent(&self) {
        if !self.net.state.lock().notices_silence {
            return std::future::pending().await;
        }
        let (from, to, mut ticks) = (self.from.node, self.to.node, 0);
        while ticks < SILENT_TICKS {
            sleep(SILENT_TICK).await;
            let blocked = self.net.is_blocked(from, to) || self.net.is_blocked(to, from);
            ticks = if blocked { ticks + 1 } else { 0 };
        }
    }
}

#[async_trait]
impl Connection for SimConnection {
    async fn call(&self, request: Message, limit: Duration) -> Result<Message> {
        let call = async {
            tokio::select! {
                biased;
                () = self.closed() => Err(self.gone()),
                r = self.exchange(request) => r,
                () = self.silent() => {
                    self.close();
                    Err(Error::new(Code::Disconnected, format!("sim:{} is silent and counts as dead", self.to.node)))
                }
            }
        };
        timeout(limit, call)
            .await
            .unwrap_or_else(|_| Err(Error::new(Code::TimedOut, "no answer in time")))
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn addr(&self) -> String {
        format!("sim:{}", self.to.node)
    }

    fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.closing.notify_waiters();
        self.closing.notify_one();
        let other = self.other.lock().upgrade();
        if let Some(o) = other {
            o.close();
        }
        let far = self.far.lock().take();
        if let Some(far) = far {
            far.closed.store(true, Ordering::SeqCst);
        }
    }
}

/// Access to the network for one process on a node.
pub struct SimFabric {
    pub(super) net: Network,
    pub(super) node: u32,
    pub(super) life: u64,
    pub(super) role: Role,
    pub(super) env: Env,
    pub(super) pool: Pool,
}

#[async_trait]
impl Fabric for SimFabric {
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let Endpoint::Sim(to) = *to else {
            return Err(Error::new(Code::Inval, format!("{to} is not a node of the simulator")));
        };
        sleep(self.net.delay(self.node, to)).await;
        if self.net.is_blocked(self.node, to) || self.net.is_blocked(to, self.node) {
            sleep(Duration::from_secs(1)).await;
            return Err(Error::new(Code::TimedOut, format!("sim:{to} does not answer")));
        }
        let (there, answers) = {
            let s = self.net.state.lock();
            let l = s
                .listening
                .get(&to)
                .ok_or_else(|| Error::new(Code::Disconnected, format!("sim:{to} refuses")))?;
            (End { node: to, life: l.life, env: l.env.clone() }, l.service.clone())
        };
        let here = End { node: self.node, life: self.life, env: self.env.clone() };
        let id = self.net.ids.fetch_add(1, Ordering::Relaxed);
        let make = |from: &End, to: &End, service: Option<Arc<dyn Service>>, peer| {
            let far = service
                .map(|service| Arc::new(Far { service, peer, closed: AtomicBool::new(false) }));
            Arc::new(SimConnection {
                net: self.net.clone(),
                from: from.clone(),
                to: to.clone(),
                far: Mutex::new(far),
                closed: Arc::default(),
                broken: AtomicBool::new(false),
                closing: tokio::sync::Notify::new(),
                other: Mutex::new(Weak::new()),
            })
        };
        let seen = |role, end: &End, back| Peer {
            role,
            addr: format!("sim:{}/{}", end.node, end.life),
            id,
            back,
        };
        let backward = make(&there, &here, back, seen(Role::Server, &there, None));
        let answering = seen(self.role, &here, Some(backward.clone() as Arc<dyn Connection>));
        let forth = make(&here, &there, Some(answers), answering);
        *forth.other.lock() = Arc::downgrade(&backward);
        *backward.other.lock() = Arc::downgrade(&forth);
        self.net.state.lock().connections.push(Arc::downgrade(&forth));
        Ok(forth)
    }

    async fn connect_as_client(&self, to: &Endpoint) -> Result<Arc<dyn Connection>> {
        let (net, env, pool) = (self.net.clone(), self.env.clone(), self.pool.clone());
        let (node, life, role) = (self.node, self.life, Role::Client);
        SimFabric { net, node, life, role, env, pool }.connect(to, None).await
    }

    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        let at = if *at == Endpoint::Sim(0) { Endpoint::Sim(self.node) } else { at.clone() };
        let listening = Listening { service, env: self.env.clone(), life: self.life };
        self.net.state.lock().listening.insert(self.node, listening);
        struct Stop(Network, u32, u64);
        impl Drop for Stop {
            fn drop(&mut self) {
                let mut s = self.0.state.lock();
                if s.listening.get(&self.1).is_some_and(|l| l.life == self.2) {
                    s.listening.remove(&self.1);
                }
            }
        }
        Ok(Listener::new(at, Box::new(Stop(self.net.clone(), self.node, self.life))))
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}
