//! The simulated network: an implementation of [`Fabric`] whose delays, losses and partitions come
//! from the seed.
//!
//! A connection is between two processes on two nodes. When either dies, calls on it end with
//! `Disconnected`. On a blocked link nothing arrives; the caller learns so as over TCP: after its
//! dead-peer limit the connection is closed. What a client had sent by then may still arrive,
//! seconds later: its kernel goes on sending what is in the buffer of a closed connection. The
//! server sees the end of the connection after that.

mod connection;

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

pub use connection::SimFabric;
use connection::{Late, SimConnection};
use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use sha2::{Digest, Sha256};
use strake_fabric::{Connection, Message, Pool, Role, Service};
use strake_runtime::Env;
use tokio::time::{Instant, sleep_until};

use crate::{
    faults::Strike,
    ledger::{Kind, Ledger},
    plant::Plant,
};

/// With [`Plant::Repeat`]: the share of changes that run twice, and how long after the first time
/// at most.
const REPEATED: f64 = 0.2;
const REPEATED_WITHIN: Duration = Duration::from_millis(200);

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

    /// Cuts the link between two nodes, in both directions or only from `a` to `b`, until a given
    /// time or for ever.
    pub fn cut(&self, a: u32, b: u32, one_way: bool, until: Option<Instant>) {
        self.note(&format!("cut {a} {b} one_way={one_way}"));
        let fault = self.cutting(if one_way { Kind::OneWay } else { Kind::Partition });
        self.block(a, b, fault, until);
        if !one_way {
            self.block(b, a, fault, until);
        }
    }

    /// Cuts a node off from these others, which counts as one fault: in both directions, or only
    /// what they send to it.
    pub fn cut_off(&self, node: u32, from: &[u32], one_way: bool, until: Option<Instant>) {
        self.note(&format!("cut off {node} from {from:?} one_way={one_way}"));
        let fault = self.cutting(if one_way { Kind::OneWay } else { Kind::Partition });
        for n in from {
            self.block(*n, node, fault, until);
            if !one_way {
                self.block(node, *n, fault, until);
            }
        }
    }

    /// Ends all cuts.
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

    /// Ends a client at once.
    pub fn kill_client(&self, node: u32, env: &Env) {
        self.note(&format!("kill client {node}"));
        self.made(Kind::ClientDeath, self.is_busy(node));
        env.kill();
        self.node_died(node);
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
