//! The simulated network: an implementation of [`Fabric`] whose delays, losses and partitions come
//! from the seed.
//!
//! A connection is between two processes on two nodes. When either dies, calls on it end with
//! `Disconnected`. On a blocked link nothing arrives; the caller learns so as over TCP: after its
//! dead-peer limit the connection is closed. What a client had sent by then may still arrive,
//! seconds later: its kernel goes on sending what is in the buffer of a closed connection. The
//! server sees the end of the connection after that.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use sha2::{Digest, Sha256};
use strake_fabric::{Connection, Endpoint, Fabric, Listener, Message, Peer, Pool, Role, Service};
use strake_proto::{Code, Error, Result, opcode};
use strake_runtime::Env;
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    faults::Strike,
    ledger::{Kind, Ledger},
    plant::Plant,
};

/// With [`Plant::Repeat`]: the share of changes that run twice, and how long after the first time
/// at most.
const REPEATED: f64 = 0.2;
const REPEATED_WITHIN: Duration = Duration::from_millis(200);
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

/// What the network does to messages.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    pub min_delay: Duration,
    pub max_delay: Duration,
    /// How many connections, per thousand messages, break at a message.
    pub break_per_mille: u32,
}

struct Listening {
    service: Arc<dyn Service>,
    env: Env,
    life: u64,
}

struct State {
    rng: StdRng,
    weather: Weather,
    plant: Option<Plant>,
    listening: BTreeMap<u32, Listening>,
    /// Directed links over which nothing arrives: until when, and by which faults.
    blocked: BTreeMap<(u32, u32), Vec<Block>>,
    /// Directed links on which everything takes longer: how much, and until when.
    lags: BTreeMap<(u32, u32), (Duration, Instant)>,
    /// Faults that no operation has met yet.
    unmet: BTreeMap<u64, Kind>,
    /// Message faults that wait for the next message of a node.
    strikes: Vec<(u32, Strike)>,
    /// How many operations are on the way to, from or in each node, and how many of their messages
    /// have passed each link.
    under_way: BTreeMap<u32, u32>,
    passed: BTreeMap<(u32, u32), u64>,
    ledger: Ledger,
    /// Calls notice a silent peer. Otherwise a call waits for as long as its caller does.
    notices_silence: bool,
    /// No write of this node arrives until [`Network::let_late_through`].
    held_up: Option<u32>,
    late: Vec<Late>,
    /// When the last request that is still sent over a connection that was given up arrives.
    sent_on: Option<Instant>,
    /// The simulation has ended: nothing is sent any more.
    over: bool,
    connections: Vec<Weak<SimConnection>>,
    trace: Sha256,
    /// The same, one line per event, to see where two runs differ.
    events: Vec<String>,
    messages: u64,
}

/// A request that the network keeps, though its connection was given up.
struct Late {
    env: Env,
    far: Arc<Far>,
    request: Message,
}

/// The receiver's end of a connection. It ends when the connection is closed and nothing is on the
/// way over it any more.
struct Far {
    service: Arc<dyn Service>,
    /// How the receiver sees the sender.
    peer: Peer,
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

#[derive(Clone, Copy)]
struct Block {
    fault: u64,
    until: Option<Instant>,
}

impl State {
    fn blocks(&self, from: u32, to: u32, now: Instant) -> Vec<u64> {
        let on_link = self.blocked.get(&(from, to)).into_iter().flatten();
        on_link.filter(|b| b.until.is_none_or(|u| now < u)).map(|b| b.fault).collect()
    }

    /// Takes the first message fault that waits for one of these nodes.
    fn strike(&mut self, from: u32, to: u32, is_reply: bool) -> Option<Strike> {
        let fits = |(node, what): &(u32, Strike)| {
            (*node == from || *node == to) && !(is_reply && matches!(what, Strike::Repeat(_)))
        };
        let at = self.strikes.iter().position(fits)?;
        Some(self.strikes.remove(at).1)
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

/// The network all nodes of one simulation share.
#[derive(Clone)]
pub struct Network {
    state: Arc<Mutex<State>>,
    start: Instant,
    ids: Arc<AtomicU64>,
}

impl Network {
    pub fn new(seed: u64, weather: Weather) -> Network {
        let state = State {
            rng: StdRng::seed_from_u64(seed),
            weather,
            plant: None,
            listening: BTreeMap::new(),
            blocked: BTreeMap::new(),
            lags: BTreeMap::new(),
            unmet: BTreeMap::new(),
            strikes: Vec::new(),
            under_way: BTreeMap::new(),
            passed: BTreeMap::new(),
            ledger: Ledger::default(),
            notices_silence: false,
            held_up: None,
            late: Vec::new(),
            sent_on: None,
            over: false,
            connections: Vec::new(),
            trace: Sha256::new(),
            events: Vec::new(),
            messages: 0,
        };
        Network { state: Arc::new(Mutex::new(state)), start: Instant::now(), ids: Arc::default() }
    }

    /// Access to the network for one process on a node.
    pub fn fabric(&self, node: u32, role: Role, env: Env) -> SimFabric {
        let life = self.ids.fetch_add(1, Ordering::Relaxed);
        SimFabric { net: self.clone(), node, life, role, env, pool: Pool::default() }
    }

    /// Registers a fault of links and returns its number, for [`Network::block`].
    pub fn cutting(&self, kind: Kind) -> u64 {
        let fault = self.ids.fetch_add(1, Ordering::Relaxed);
        let mut s = self.state.lock();
        s.ledger.made(kind);
        s.unmet.insert(fault, kind);
        fault
    }

    /// Stops everything that `from` sends to `to`, for ever or until a given time. The fault counts
    /// once it stops an operation.
    pub fn block(&self, from: u32, to: u32, fault: u64, until: Option<Instant>) {
        self.state.lock().blocked.entry((from, to)).or_default().push(Block { fault, until });
    }
    pub fn heal(&self) {
        self.state.lock().blocked.clear();
    }

    /// Delays everything that `from` sends to `to`, until a given time.
    pub fn lag(&self, from: u32, to: u32, by: Duration, until: Instant) {
        self.state.lock().lags.insert((from, to), (by, until));
    }
    pub fn is_blocked(&self, from: u32, to: u32) -> bool {
        !self.state.lock().blocks(from, to, Instant::now()).is_empty()
    }

    /// Makes connections notice that the other end is silent, as real transports do.
    pub fn notices_silence(&self) {
        self.state.lock().notices_silence = true;
    }

    /// Strikes the next message of an operation from or to this node.
    pub fn strike(&self, node: u32, what: Strike) {
        self.state.lock().strikes.push((node, what));
    }

    /// Drops the message faults that have not struck yet.
    pub fn end_strikes(&self) {
        self.state.lock().strikes.clear();
    }

    /// Whether an operation is under way to, from or in this node.
    pub fn is_busy(&self, node: u32) -> bool {
        self.state.lock().under_way.get(&node).is_some_and(|n| *n > 0)
    }

    /// Counts a fault that was made.
    pub fn made(&self, kind: Kind, counts: bool) {
        let mut s = self.state.lock();
        s.ledger.made(kind);
        if counts {
            s.ledger.counts(kind);
        }
    }

    /// Notes that a fault that was made earlier counts.
    pub fn counts(&self, kind: Kind) {
        self.state.lock().ledger.counts(kind);
    }

    pub fn ledger(&self) -> Ledger {
        self.state.lock().ledger
    }

    /// Holds up the writes that this node sends: they do not arrive, their connections are given
    /// up, and the network keeps them.
    pub fn hold_up(&self, node: Option<u32>) {
        self.state.lock().held_up = node;
    }

    /// Delivers what was held up, and returns how many requests that was.
    pub fn let_late_through(&self) -> usize {
        let late = std::mem::take(&mut self.state.lock().late);
        let count = late.len();
        for Late { env, far, request } in late {
            self.made(Kind::Late, true);
            env.spawn(async move { drop(far.service.handle(&far.peer, request).await) });
        }
        count
    }

    /// Waits until nothing is on the way over a connection that was given up.
    pub async fn wait_sent_on(&self) {
        loop {
            let until = self.state.lock().sent_on.filter(|until| *until >= Instant::now());
            let Some(until) = until else { return };
            sleep_until(until + Duration::from_millis(1)).await;
        }
    }

    /// Drops all nodes, so that their memory is freed.
    pub fn end(&self) {
        let (late, listening, connections) = {
            let mut s = self.state.lock();
            s.events = Vec::new();
            s.over = true;
            let late = std::mem::take(&mut s.late);
            (late, std::mem::take(&mut s.listening), std::mem::take(&mut s.connections))
        };
        drop((late, listening));
        for c in connections.iter().filter_map(Weak::upgrade) {
            c.close();
        }
    }

    pub fn set_weather(&self, weather: Weather) {
        self.state.lock().weather = weather;
    }

    /// From now on the network behaves as the planted fault says.
    pub fn plant(&self, plant: Plant) {
        self.state.lock().plant = Some(plant);
    }

    fn planted(&self) -> Option<Plant> {
        self.state.lock().plant
    }

    /// The message to deliver a second time, if any, and when.
    fn repetition(&self, request: &Message) -> Option<(Message, Duration)> {
        let mut s = self.state.lock();
        let again = s.plant?.repetition(request)?;
        let late = REPEATED_WITHIN.mul_f64(s.rng.random());
        s.rng.random_bool(REPEATED).then_some((again, late))
    }

    /// Called when the process of a node dies: it no longer listens and its connections are gone.
    pub fn node_died(&self, node: u32) {
        let connections = {
            let mut s = self.state.lock();
            s.listening.remove(&node);
            let all = std::mem::take(&mut s.connections);
            let (gone, stay): (Vec<_>, Vec<_>) = all
                .into_iter()
                .filter(|c| c.strong_count() > 0)
                .partition(|c| c.upgrade().is_some_and(|c| c.touches(node)));
            s.connections = stay;
            gone
        };
        for c in connections.iter().filter_map(Weak::upgrade) {
            c.close();
        }
    }

    /// Adds an event to the trace, which must be the same in two runs of one seed.
    pub fn note(&self, what: &str) {
        let at = self.start.elapsed().as_nanos();
        let mut s = self.state.lock();
        s.trace.update(at.to_le_bytes());
        s.trace.update(what.as_bytes());
        s.events.push(format!("{at} {what}"));
        tracing::info!("{what}");
    }

    /// The number of events so far.
    pub fn events(&self) -> usize {
        self.state.lock().events.len()
    }

    /// Hash of everything that happened so far, the number of messages delivered, and a line per
    /// event.
    pub fn trace(&self) -> ([u8; 32], u64, Vec<String>) {
        let s = self.state.lock();
        (s.trace.clone().finalize().into(), s.messages, s.events.clone())
    }

    fn delay(&self, from: u32, to: u32) -> Duration {
        let mut s = self.state.lock();
        let (lo, hi) =
            (s.weather.min_delay.as_nanos() as u64, s.weather.max_delay.as_nanos() as u64);
        let usual = Duration::from_nanos(s.rng.random_range(lo..=hi.max(lo)));
        let lag = s.lags.get(&(from, to)).filter(|l| Instant::now() < l.1);
        usual + lag.map_or(Duration::ZERO, |l| l.0)
    }

    /// Whether this message breaks its connection.
    fn breaks(&self) -> bool {
        let mut s = self.state.lock();
        let p = s.weather.break_per_mille;
        p > 0 && s.rng.random_range(0..1000) < p
    }

    fn delivered(&self, from: u32, to: u32, m: &Message) {
        let at = self.start.elapsed().as_nanos();
        let mut s = self.state.lock();
        s.messages += 1;
        s.trace.update(at.to_le_bytes());
        s.trace.update([from.to_le_bytes(), to.to_le_bytes()].concat());
        s.trace.update(m.opcode.to_le_bytes());
        // A 64-bit sum stands for the bytes: hashing all of them takes an eighth of a run.
        let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
        sum.update(&m.body);
        m.payload.iter().for_each(|b| sum.update(&b[..]));
        s.trace.update(sum.finalize().to_le_bytes());
        let body = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &m.body);
        let payload: usize = m.payload.iter().map(|b| b.len()).sum();
        let (opcode, len) = (m.opcode, m.body.len());
        s.events.push(format!(
            "{at} {from} > {to}: opcode {opcode:#x}, body {len} bytes crc {body:08x}, payload {payload}"
        ));
    }
}

/// One end of a connection: a process on a node.
#[derive(Clone)]
struct End {
    node: u32,
    life: u64,
    env: Env,
}

struct SimConnection {
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
    fn touches(&self, node: u32) -> bool {
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

pub struct SimFabric {
    net: Network,
    node: u32,
    life: u64,
    role: Role,
    env: Env,
    pool: Pool,
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
