//! A cluster in the simulator: real metadata servers, storage servers and clients on simulated
//! disks, clocks and networks.

mod tables;

use std::{future::Future, path::PathBuf, sync::Arc, time::Duration};

pub use tables::Stored;

use parking_lot::Mutex;
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, FollowerReads};
use strake_fabric::{Endpoint, Pool, Role};
use strake_mds::{
    cluster::moves::is_moving,
    consensus::MemLog,
    leases::Limits,
    server::{self as mds_server, MdsServer},
};
use strake_oss::{
    device::mem::{MemDevice, Op, Tear},
    engine::{Engine, Options, TargetIdentity},
    server::{self as oss_server, Ask, OssServer},
};
use strake_proto::{CapKey, Code, Error, Result};
use strake_runtime::Env;
use strake_store::MemStore;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    clock::SimClock,
    faults::Harm,
    ledger::Kind,
    members::Replacement,
    net::{Network, SimFabric, Weather},
};

const CALM: Weather =
    Weather { min_delay: Duration::ZERO, max_delay: Duration::from_millis(3), break_per_mille: 0 };
/// Secret of every simulated cluster.
const KEY: [u8; 32] = [0x5e; 32];
/// How long a write of the Raft log takes.
const LOG_LATENCY: Duration = Duration::from_millis(1);
const TARGET_BYTES: u64 = 256 << 20;
/// Storage servers scrub all the time.
const SCRUB_EVERY_S: u64 = 3;
/// Clock rates: no two differ by more than a tenth.
const DRIFT: std::ops::Range<f64> = 0.955..1.045;
/// Limits of leases low enough that three clients reach them.
const SCARCE: Limits = Limits {
    term: Duration::from_millis(1500),
    patience: Duration::from_secs(5),
    silence: Duration::from_millis(3500),
    of_session: 8,
    of_all: 20,
    of_inode: 3,
    hot: 4,
    of_writer: 1 << 20,
};
pub const MDS: u32 = 3;
pub const OSS: u32 = 3;
/// Node numbers of all metadata servers that may be members at some time of a run: one may be
/// replaced.
pub const ANY_MDS: std::ops::RangeInclusive<u32> = 1..=MDS + 1;
/// Copies of each file, unless a run sets another number.
const COPIES: u32 = 2;
/// Node numbers on the network: metadata servers from 1, storage servers from 101, clients from
/// 201.
pub const FIRST_OSS: u32 = 101;
pub const FIRST_CLIENT: u32 = 201;

/// The client that always tries followers for reads. The other clients use the default.
const FOLLOWING: u32 = 2;

/// A sync that a build might forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sync {
    /// Of the Raft log.
    Log,
    /// Of a storage server's device.
    Device,
    /// Of a storage server's chunk table.
    Table,
}

/// One run of a server's process: the server, or the error of its start, once either is known.
struct Life<S> {
    env: Env,
    server: Arc<Mutex<Option<Result<S>>>>,
}

impl<S: Send + 'static> Life<S> {
    fn begin(env: Env, starting: impl Future<Output = Result<S>> + Send + 'static) -> Life<S> {
        let server = Arc::new(Mutex::new(None));
        let started = server.clone();
        env.spawn(async move {
            let s = starting.await;
            *started.lock() = Some(s);
        });
        Life { env, server }
    }

    /// Asks the server for something, if it is up.
    fn ask<T>(&self, what: impl FnOnce(&S) -> T) -> Option<T> {
        self.server.lock().as_ref().and_then(|s| s.as_ref().ok()).map(what)
    }

    /// Whether the server is up. Returns an error if it could not start.
    fn is_up(&self) -> Result<bool> {
        match &*self.server.lock() {
            None => Ok(false),
            Some(Ok(_)) => Ok(true),
            Some(Err(e)) => Err(e.clone()),
        }
    }

    fn end(self) {
        self.env.kill();
        let server = self.server.lock().take();
        drop(server);
    }
}

/// Counters of a node's disk when a fault of the disk began.
#[derive(Clone, Copy)]
struct Harmed {
    what: Harm,
    kind: Kind,
    /// Operations so far (of a metadata server: writes of its log), and those that had failed or
    /// returned wrong data.
    done: u64,
    failed: u64,
    /// An operation was under way at the node when the fault began.
    busy: bool,
}

struct Mds {
    node: u32,
    clock: SimClock,
    log: Arc<MemLog>,
    store: Arc<MemStore>,
    disk: Option<Harmed>,
    life: Option<Life<MdsServer>>,
}

struct Oss {
    node: u32,
    clock: SimClock,
    device: Arc<MemDevice>,
    table: Arc<MemStore>,
    formatted: bool,
    disk: Option<Harmed>,
    /// The disk had a fault other than slowness since the last start: a target that met it serves
    /// again only after a restart.
    harmed: bool,
    life: Option<Life<OssServer>>,
}

impl Oss {
    fn new(node: u32, clock: SimClock) -> Oss {
        Oss {
            node,
            clock,
            device: Arc::new(MemDevice::new(TARGET_BYTES)),
            table: Arc::new(MemStore::new()),
            formatted: false,
            disk: None,
            harmed: false,
            life: None,
        }
    }
}

pub struct Cluster {
    pub net: Network,
    copies: u32,
    rng: StdRng,
    start: Instant,
    /// The session term, if it is not the default.
    pub session_term: Option<Duration>,
    /// How long the leader waits for a dead target before it rebuilds, if not the default.
    pub rebuild_after: Option<Duration>,
    /// The feature level of the cluster at first, if it is not the newest.
    pub first_level: Option<u32>,
    /// See [`Cluster::widen`].
    wide: Option<StdRng>,
    client_clocks: Vec<SimClock>,
    client_envs: Vec<Env>,
    /// Clients whose number has this remainder modulo 2 use write-back; `None`: all clients do.
    write_back: Option<u32>,
    mds: Vec<Mds>,
    oss: Vec<Oss>,
    /// What servers that were killed had scrubbed.
    scrubbed: Scrubbed,
    replacement: Option<Replacement>,
}

/// Chunks that storage servers have scrubbed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scrubbed {
    /// Chunks in the last pass of each server, summed over all its runs.
    pub chunks: u64,
    /// Chunks found damaged, in any pass. Simulated disks do not decay by themselves, so this is 0
    /// unless reads are made to go wrong.
    pub damaged: u64,
}

impl Scrubbed {
    fn add(&mut self, server: &OssServer) {
        for t in server.scrub(None) {
            self.chunks += t.chunks;
            self.damaged += t.damaged;
        }
    }
}

fn bytes32(rng: &mut StdRng) -> [u8; 32] {
    let mut b = [0; 32];
    rng.fill_bytes(&mut b);
    b
}

impl Cluster {
    /// Creates a cluster in which nothing runs yet.
    pub fn new(seed: u64) -> Cluster {
        let mut rng = StdRng::seed_from_u64(seed);
        let start = Instant::now();
        let net = Network::new(rng.random(), CALM);
        let voters: Vec<u64> = (1..=u64::from(MDS)).collect();
        let skew =
            |rng: &mut StdRng| SimClock::new(start, rng.random_range(-20_000_000..20_000_000));
        let mds = (1..=MDS)
            .map(|node| Mds {
                node,
                clock: skew(&mut rng),
                log: Arc::new(MemLog::new(voters.clone(), rng.random(), LOG_LATENCY)),
                store: Arc::new(MemStore::new()),
                disk: None,
                life: None,
            })
            .collect();
        let oss = (0..OSS).map(|n| Oss::new(FIRST_OSS + n, skew(&mut rng))).collect();
        Cluster {
            net,
            copies: COPIES,
            rng,
            start,
            session_term: None,
            rebuild_after: None,
            first_level: None,
            wide: None,
            client_clocks: Vec::new(),
            client_envs: Vec::new(),
            write_back: Some(seed as u32 % 2),
            mds,
            oss,
            scrubbed: Scrubbed::default(),
            replacement: None,
        }
    }

    /// Makes all clocks drift, by as much as two clocks may differ, and makes leases scarce: low
    /// limits for a session, for an inode and in all. To be called before anything is started.
    pub fn widen(&mut self, seed: u64) {
        self.wide = Some(StdRng::seed_from_u64(seed ^ 0x71de));
        self.drift();
    }

    /// Sets the size of all targets in bytes. To be called before anything is started.
    pub fn shrink(&mut self, bytes: u64) {
        self.oss.iter_mut().for_each(|o| o.device = Arc::new(MemDevice::new(bytes)));
    }

    /// Gives each file a copy on every storage server. To be called before anything is started.
    pub fn copy_everywhere(&mut self) {
        self.copies = OSS;
    }

    /// Turns on write-back for all clients.
    pub fn hold_back(&mut self) {
        self.write_back = None;
    }

    fn clocks(&self) -> impl Iterator<Item = &SimClock> {
        let servers = self.mds.iter().map(|m| &m.clock).chain(self.oss.iter().map(|o| &o.clock));
        servers.chain(&self.client_clocks)
    }

    /// Wide runs only: gives each boot clock another rate from now on, and lets some clients' wall
    /// clocks jump.
    pub fn drift(&mut self) {
        let Some(dice) = self.wide.as_mut().map(|rng| rng.random()) else { return };
        self.drift_by(dice);
    }

    /// The same in any kind of run; `dice` is the seed.
    pub fn drift_by(&mut self, dice: u64) {
        let mut rng = StdRng::seed_from_u64(dice);
        self.clocks().for_each(|c| c.set_rate(rng.random_range(DRIFT)));
        for c in &self.client_clocks {
            if rng.random_bool(0.3) {
                c.set_skew(rng.random_range(-240..240) * 1_000_000_000);
            }
        }
        let counts = self.nodes().iter().any(|n| self.net.is_busy(*n));
        self.net.made(Kind::ClockDrift, counts);
    }

    /// Gives a node's boot clock the slowest rate that is allowed and all others the fastest.
    pub fn slow_clock(&mut self, node: u32) {
        self.net.note(&format!("the clock of {node} is slow"));
        self.clocks().for_each(|c| c.set_rate(DRIFT.end));
        let mds = self.mds.iter().filter(|m| m.node == node).map(|m| &m.clock);
        let oss = self.oss.iter().filter(|o| o.node == node).map(|o| &o.clock);
        mds.chain(oss).for_each(|c| c.set_rate(DRIFT.start));
        self.net.made(Kind::ClockDrift, self.net.is_busy(node));
    }

    pub fn nodes(&self) -> Vec<u32> {
        self.mds.iter().map(|m| m.node).chain(self.oss.iter().map(|o| o.node)).collect()
    }

    /// All nodes except the metadata server that is being replaced: once removed from the group it
    /// need not start.
    fn staying(&self) -> Vec<u32> {
        let leaves = self.replacement.as_ref().map(|r| r.old);
        self.nodes().into_iter().filter(|n| Some(*n) != leaves).collect()
    }

    /// Whether the node was started and not killed since.
    pub fn is_up(&self, node: u32) -> bool {
        self.mds.iter().any(|m| m.node == node && m.life.is_some())
            || self.oss.iter().any(|o| o.node == node && o.life.is_some())
    }

    /// Starts a server and waits until it is up.
    pub async fn start(&mut self, node: u32) -> Result<()> {
        self.launch(node).await?;
        self.wait_up(&[node]).await
    }

    /// Starts a server and does not wait until it is up: a storage server needs a metadata leader
    /// for that.
    pub async fn launch(&mut self, node: u32) -> Result<()> {
        self.net.note(&format!("start {node}"));
        let seed = bytes32(&mut self.rng);
        if let Some(i) = self.mds.iter().position(|m| m.node == node) {
            let m = &self.mds[i];
            if tables::set_aside_if_damaged(&m.store)? {
                self.net.note(&format!("the state of {node} is set aside"));
            }
            let env = m.clock.env(seed);
            let parts = mds_server::Parts {
                env: env.clone(),
                fabric: Arc::new(self.net.fabric(node, Role::Server, env.clone())),
                log: m.log.clone(),
                store: m.store.clone(),
                cap_key: CapKey::from_cluster_key(&KEY),
                cluster: [7; 16],
            };
            let mut config = mds_config(node, self.copies);
            if let Some(term) = self.session_term {
                config.session_term_ms = term.as_millis() as u64;
            }
            if let Some(after) = self.rebuild_after {
                config.rebuild_after_ms = after.as_millis() as u64;
            }
            if self.wide.is_some() {
                config.limit_leases(SCARCE);
            }
            if let Some(level) = self.first_level {
                config.begin_at_level(level);
            }
            self.mds[i].life = Some(Life::begin(env, mds_server::start(config, parts)));
        } else if let Some(i) = self.oss.iter().position(|o| o.node == node) {
            self.mend_disk(node);
            self.format_once(i).await?;
            let o = &self.oss[i];
            let env = o.clock.env(seed);
            let fabric = Arc::new(self.net.fabric(node, Role::Server, env.clone()));
            let (device, table, of_life) = (o.device.clone(), o.table.clone(), env.clone());
            let starting = async move {
                let engine =
                    Engine::open(device, table, Pool::default(), Options::default()).await?;
                let cap_key = CapKey::from_cluster_key(&KEY);
                let parts =
                    oss_server::Parts { env: of_life, fabric, targets: vec![engine], cap_key };
                let mds = (1..=MDS).map(Endpoint::Sim).collect();
                let mut config =
                    oss_server::Config::new(format!("oss{node}"), Endpoint::Sim(node), mds);
                config.scrub_every_s = SCRUB_EVERY_S;
                let server = oss_server::start(config, parts).await?;
                server.scrub(Some(Ask::Start));
                Ok(server)
            };
            self.oss[i].life = Some(Life::begin(env, starting));
            self.oss[i].harmed = false;
        }
        Ok(())
    }

    /// Whether all of these servers that were started are up. Returns an error if one could not
    /// start.
    fn are_up(&self, nodes: &[u32]) -> Result<bool> {
        let failed = |node: u32| move |e: Error| e.context(format!("starting node {node}"));
        let mut all = true;
        for m in self.mds.iter().filter(|m| nodes.contains(&m.node)) {
            all &= m.life.as_ref().map_or(Ok(true), Life::is_up).map_err(failed(m.node))?;
        }
        for o in self.oss.iter().filter(|o| nodes.contains(&o.node)) {
            all &= o.life.as_ref().map_or(Ok(true), Life::is_up).map_err(failed(o.node))?;
        }
        Ok(all)
    }

    /// Returns an error if a server that was started could not come up.
    pub fn check_starts(&self) -> Result<()> {
        self.are_up(&self.staying()).map(drop)
    }

    /// Waits until these nodes are up. A storage server needs a metadata leader to register; a
    /// start that takes longer than any election is reported as a failure.
    async fn wait_up(&self, nodes: &[u32]) -> Result<()> {
        let up = async {
            while !self.are_up(nodes)? {
                sleep(Duration::from_millis(1)).await;
            }
            Ok(())
        };
        let late = || Error::new(Code::TimedOut, format!("nodes {nodes:?} did not start in 60 s"));
        timeout(Duration::from_secs(60), up).await.map_err(|_| late())?
    }

    async fn format_once(&mut self, i: usize) -> Result<()> {
        if !self.oss[i].formatted {
            let target_uuid =
                u128::from(self.rng.next_u64()) << 64 | u128::from(self.rng.next_u64());
            let o = &mut self.oss[i];
            let id = TargetIdentity {
                fs_uuid: [0; 16],
                target_uuid: target_uuid.to_le_bytes(),
                target_id: u32::MAX,
                node: format!("oss{}", o.node),
                incarnation: 0,
            };
            Engine::format(&*o.device, &*o.table, id).await?;
            o.formatted = true;
        }
        Ok(())
    }

    /// From now on the servers leave out one kind of sync, so what they acknowledge is not durable.
    pub fn skip(&self, sync: Sync) {
        match sync {
            Sync::Log => self.mds.iter().for_each(|m| m.log.skip_sync()),
            Sync::Device => self.oss.iter().for_each(|o| o.device.skip_flush()),
            Sync::Table => self.oss.iter().for_each(|o| o.table.skip_sync()),
        }
    }

    /// Ends a process at once. With `power` its machine loses power, too: disk writes that were not
    /// synced are lost or torn. Without `power`, what reached the kernel stays.
    pub fn kill(&mut self, node: u32, power: bool) {
        let dice = self.rng.next_u64();
        self.kill_by(node, power, dice);
    }

    /// The same; `dice` decides what is lost. Does nothing to a node that is not up.
    pub fn kill_by(&mut self, node: u32, power: bool, dice: u64) {
        if !self.is_up(node) {
            return;
        }
        self.net.note(&format!("kill {node} power={power}"));
        let (counts, keep, mut torn) = (self.net.is_busy(node), dice & 1 == 0, false);
        let kept = |n: usize| if power { (dice % (n as u64 + 1)) as usize } else { n };
        if let Some(m) = self.mds.iter_mut().find(|m| m.node == node)
            && let Some(life) = m.life.take()
        {
            life.end();
            if power {
                m.log.lose_unsynced();
            }
            m.log.crash(keep);
            m.store.crash(kept);
        }
        if let Some(o) = self.oss.iter_mut().find(|o| o.node == node)
            && let Some(life) = o.life.take()
        {
            life.ask(|server| self.scrubbed.add(server));
            life.end();
            if power {
                torn = o.device.crash(dice, Tear::Sector) > 0;
            }
            o.table.crash(kept);
        }
        let kind = match (power, torn) {
            (false, _) => Kind::Crash,
            (true, false) => Kind::Power,
            (true, true) => Kind::Torn,
        };
        self.net.made(kind, counts);
        self.net.node_died(node);
    }

    /// Stops a server. This does not count as a fault.
    pub fn end_life(&mut self, node: u32) {
        self.net.note(&format!("stop {node}"));
        let life = self.mds.iter_mut().find(|m| m.node == node).and_then(|m| m.life.take());
        life.into_iter().for_each(Life::end);
        if let Some(o) = self.oss.iter_mut().find(|o| o.node == node)
            && let Some(life) = o.life.take()
        {
            life.ask(|server| self.scrubbed.add(server));
            life.end();
            o.table.crash(|n| n);
        }
        self.net.node_died(node);
    }

    /// Ends a client at once.
    pub fn kill_client(&self, node: u32, env: &Env) {
        self.net.note(&format!("kill client {node}"));
        self.net.made(Kind::ClientDeath, self.net.is_busy(node));
        env.kill();
        self.net.node_died(node);
    }

    /// Chunks scrubbed so far.
    pub fn scrubbed(&self) -> Scrubbed {
        let mut all = self.scrubbed;
        for life in self.oss.iter().filter_map(|o| o.life.as_ref()) {
            life.ask(|server| all.add(server));
        }
        all
    }

    /// A client on a node of its own.
    pub async fn client(&mut self, n: u32) -> Result<Client> {
        Ok(self.mortal(n, None, Vec::new()).await?.0)
    }

    /// A client that can be killed. `dead` names clients whose death it reports.
    pub async fn mortal(
        &mut self,
        n: u32,
        uuid: Option<[u8; 16]>,
        dead: Vec<[u8; 16]>,
    ) -> Result<(Client, Env)> {
        let (mut config, env, fabric) = self.prepare(n);
        (config.uuid, config.dead) = (uuid, dead);
        Ok((Client::connect(config, env.clone(), fabric).await?, env))
    }

    /// A connection to the network for something that is neither a server of the cluster nor a
    /// client.
    pub fn fabric(&self, node: u32, role: Role) -> Arc<SimFabric> {
        let env = SimClock::new(self.start, 0).env([node as u8; 32]);
        Arc::new(self.net.fabric(node, role, env))
    }

    /// What a client on a node of its own needs to connect.
    pub fn prepare(&mut self, n: u32) -> (strake_client::Config, Env, Arc<SimFabric>) {
        let node = FIRST_CLIENT + n;
        let clock = SimClock::new(self.start, 0);
        let env = clock.env(bytes32(&mut self.rng));
        if let Some(rng) = &mut self.wide {
            clock.set_rate(rng.random_range(DRIFT));
        }
        self.client_clocks.push(clock);
        self.client_envs.push(env.clone());
        let fabric = Arc::new(self.net.fabric(node, Role::Client, env.clone()));
        let mut config = strake_client::Config::new((1..=MDS).map(Endpoint::Sim).collect());
        config.pid = u64::from(node);
        config.op_timeout = Duration::from_secs(120);
        if n == FOLLOWING {
            config.follower_reads = FollowerReads::Always;
        }
        config.write_back = self.write_back.is_none_or(|some| n % 2 == some);
        (config, env, fabric)
    }

    /// The node of the metadata server that is leader and knows it, if there is one.
    pub fn leader(&self) -> Option<u32> {
        self.mds
            .iter()
            .find(|m| m.life.as_ref().and_then(|l| l.ask(MdsServer::leads)) == Some(true))
            .map(|m| m.node)
    }

    /// The newest map that a metadata server has.
    pub fn map(&self) -> Option<strake_proto::pb::ClusterMap> {
        let statuses = self.mds.iter().filter_map(|m| m.life.as_ref()?.ask(MdsServer::status));
        statuses.filter_map(|s| s.map).max_by_key(|m| m.version)
    }

    /// The feature level of the state of each metadata server that is up.
    pub fn levels(&self) -> Vec<u32> {
        let statuses = self.mds.iter().filter_map(|m| m.life.as_ref()?.ask(MdsServer::status));
        statuses.filter_map(|s| s.map).map(|m| m.level).collect()
    }

    /// Whether, by the newest map of a metadata server, all replicas of all chains are in sync and
    /// none is moving.
    pub fn whole(&self) -> bool {
        use strake_proto::map::ChainExt;
        let rests =
            |c: &strake_proto::pb::Chain| c.serving().count() == c.replicas.len() && !is_moving(c);
        self.map().is_some_and(|m| !m.chains.is_empty() && m.chains.iter().all(rests))
    }

    /// Cuts the link between two nodes, in both directions or only from `a` to `b`, until a given
    /// time or for ever.
    pub fn cut(&mut self, a: u32, b: u32, one_way: bool, until: Option<Instant>) {
        self.net.note(&format!("cut {a} {b} one_way={one_way}"));
        let fault = self.net.cutting(if one_way { Kind::OneWay } else { Kind::Partition });
        self.net.block(a, b, fault, until);
        if !one_way {
            self.net.block(b, a, fault, until);
        }
    }

    /// Cuts a node off from these others, which counts as one fault: in both directions, or only
    /// what they send to it.
    pub fn cut_off(&mut self, node: u32, from: &[u32], one_way: bool, until: Option<Instant>) {
        self.net.note(&format!("cut off {node} from {from:?} one_way={one_way}"));
        let fault = self.net.cutting(if one_way { Kind::OneWay } else { Kind::Partition });
        for n in from {
            self.net.block(*n, node, fault, until);
            if !one_way {
                self.net.block(node, *n, fault, until);
            }
        }
    }

    /// Cuts a node off from all others, in both directions or one.
    pub fn isolate(&mut self, node: u32, one_way: bool, until: Option<Instant>) {
        let clients = (0..10).map(|n| FIRST_CLIENT + n);
        let others: Vec<u32> =
            self.nodes().into_iter().filter(|n| *n != node).chain(clients).collect();
        self.cut_off(node, &others, one_way, until);
    }

    /// Sets the offset of a node's wall clock.
    pub fn jump_clock(&mut self, node: u32, seconds: i64) {
        self.net.note(&format!("clock of {node} jumps to {seconds} s"));
        self.net.made(Kind::ClockJump, self.is_up(node) && self.net.is_busy(node));
        self.set_clock(node, seconds);
    }

    fn set_clock(&self, node: u32, seconds: i64) {
        let mds = self.mds.iter().filter(|m| m.node == node).map(|m| &m.clock);
        let oss = self.oss.iter().filter(|o| o.node == node).map(|o| &o.clock);
        for clock in mds.chain(oss) {
            clock.set_skew(seconds * 1_000_000_000);
        }
    }

    /// Breaks a node's disk in some way until [`Cluster::mend_disk`]. A metadata server's disk can
    /// only be full or slow.
    pub fn harm_disk(&mut self, node: u32, what: Harm, dice: u64) {
        self.mend_disk(node);
        let kind = match what {
            Harm::Slow(_) | Harm::Crawl(_) => Kind::DiskSlow,
            Harm::Full | Harm::Filled => Kind::DiskFull,
            Harm::Error => Kind::DiskError,
            Harm::Corrupt => Kind::DiskCorrupt,
        };
        let busy = self.net.is_busy(node);
        if let Some(m) = self.mds.iter_mut().find(|m| m.node == node) {
            match what {
                Harm::Slow(by) | Harm::Crawl(by) => m.log.set_latency(LOG_LATENCY + by),
                Harm::Full | Harm::Filled => {
                    m.log.set_fault(Some(Error::new(Code::NoSpc, "injected fault")))
                }
                Harm::Error | Harm::Corrupt => return,
            }
            m.disk =
                Some(Harmed { what, kind, done: m.log.writes(), failed: m.log.refused(), busy });
        }
        if let Some(o) = self.oss.iter_mut().find(|o| o.node == node) {
            let c = o.device.counters();
            o.disk = Some(Harmed {
                what,
                kind,
                done: c.reads + c.writes + c.flushes,
                failed: c.failed,
                busy,
            });
            o.harmed |= !matches!(what, Harm::Slow(_) | Harm::Crawl(_));
            match what {
                Harm::Slow(by) => o.device.set_latency(&[Op::Write, Op::Flush], by),
                Harm::Crawl(by) => o.device.set_latency(&[Op::Read, Op::Write, Op::Flush], by),
                Harm::Full => (0..5).for_each(|n| o.device.fail(Op::Write, n, Code::NoSpc)),
                Harm::Filled => {
                    o.device.fill_up();
                    o.table.fail_next(strake_store::mem::Fault::Commit, u64::MAX, Code::NoSpc);
                }
                Harm::Error => o.device.fail(Op::Write, 0, Code::Io),
                Harm::Corrupt => o.device.corrupt_read(dice),
            }
        }
        self.net.note(&format!("disk of {node}: {what:?}"));
        self.net.made(kind, false);
    }

    /// From now on a block of a storage server's disk that another disk has, too, is stored with a
    /// wrong bit, whether the server is up or not.
    pub fn decay(&mut self, node: u32, dice: u64) {
        let Some(o) = self.oss.iter().find(|o| o.node == node) else { return };
        let elsewhere = |b: &[u8]| self.oss.iter().any(|o| o.node != node && o.device.holds(b));
        let Some(at) = o.device.pick(dice, |b| is_written(b) && elsewhere(b)) else { return };
        o.device.flip_bit(at + dice % 4096, (dice >> 40) as u8);
        self.net.note(&format!("block {at} of {node} decays"));
        self.net.made(Kind::Decay, self.nodes().iter().any(|n| self.net.is_busy(*n)));
    }

    /// Ends the fault of a node's disk. The fault counts if an operation of the disk met it, and an
    /// operation of the node was under way when it began or ends. Returns whether the server must
    /// be restarted to serve again.
    pub fn mend_disk(&mut self, node: u32) -> bool {
        let busy = self.net.is_busy(node);
        let counts = |h: Harmed, done: u64, failed: u64| {
            let met = match h.what {
                Harm::Slow(_) | Harm::Crawl(_) => done > h.done,
                _ => failed > h.failed,
            };
            met && (h.busy || busy)
        };
        if let Some(m) = self.mds.iter_mut().find(|m| m.node == node)
            && let Some(h) = m.disk.take()
        {
            if counts(h, m.log.writes(), m.log.refused()) {
                self.net.counts(h.kind);
            }
            m.log.set_fault(None);
            m.log.set_latency(LOG_LATENCY);
        }
        if let Some(o) = self.oss.iter_mut().find(|o| o.node == node)
            && let Some(h) = o.disk.take()
        {
            let c = o.device.counters();
            if counts(h, c.reads + c.writes + c.flushes, c.failed) {
                self.net.counts(h.kind);
            }
            o.device.end_faults();
            o.table.fail_next(strake_store::mem::Fault::Commit, 0, Code::NoSpc);
            o.device.set_latency(&[Op::Read, Op::Write, Op::Flush], Duration::ZERO);
            return o.harmed;
        }
        false
    }

    /// Adds a storage server with a new target and returns its node; it is not started yet.
    pub fn join(&mut self) -> u32 {
        let node = FIRST_OSS + self.oss.len() as u32;
        self.oss.push(Oss::new(node, SimClock::new(self.start, 0)));
        let counts = self.nodes().iter().any(|n| self.net.is_busy(*n));
        self.net.made(Kind::Joined, counts);
        node
    }

    /// Starts a new metadata server that is to replace `old`.
    pub async fn replace_mds(&mut self, old: u32) -> Result<()> {
        let (node, stamp) = (MDS + 1, self.rng.random());
        let log = Arc::new(MemLog::new(Vec::new(), stamp, LOG_LATENCY));
        let (clock, store) = (SimClock::new(self.start, 0), Arc::new(MemStore::new()));
        self.mds.push(Mds { node, clock, log, store, disk: None, life: None });
        self.launch(node).await?;
        self.replacement = Some(Replacement::begin(self, old, node));
        Ok(())
    }

    /// Removes a metadata server once it is no longer a member.
    pub fn retire(&mut self) {
        if let Some(r) = self.replacement.take_if(|r| r.is_over()) {
            self.mend_disk(r.old);
            self.end_life(r.old);
            self.mds.retain(|m| m.node != r.old);
        }
    }

    /// Waits until a replacement under way is complete; nothing may be broken any more.
    pub async fn end_replacement(&mut self) -> Result<()> {
        if let Some(r) = &self.replacement {
            r.ends().await?;
        }
        self.retire();
        Ok(())
    }

    /// Starts all nodes, heals all links and mends disks and clocks: the conditions under which the
    /// system must recover.
    pub async fn repair(&mut self) -> Result<()> {
        self.net.note("repair");
        self.net.heal();
        self.net.end_strikes();
        self.net.set_weather(CALM);
        for node in self.nodes() {
            self.set_clock(node, 0);
            self.mend_disk(node);
            if self.oss.iter().any(|o| o.node == node && o.harmed) {
                self.end_life(node);
            }
        }
        for node in self.nodes() {
            if !self.is_up(node) {
                self.launch(node).await?;
            }
        }
        self.wait_up(&self.staying()).await
    }

    /// Ends everything, so that its memory is freed.
    pub fn end(&mut self) {
        self.client_envs.iter().for_each(Env::kill);
        self.mds.iter_mut().filter_map(|m| m.life.take()).for_each(Life::end);
        self.oss.iter_mut().filter_map(|o| o.life.take()).for_each(Life::end);
        self.net.end();
    }
}

/// Whether a block begins with a pattern that clients write.
fn is_written(block: &[u8]) -> bool {
    let word = |at: usize| block[at..].first_chunk().map_or(0, |w| u64::from_le_bytes(*w));
    word(0) != 0 && word(8) == word(0).wrapping_add(1)
}

/// A variant, 0 to 3, by which runs differ beside their faults. Kinds of run repeat every 20 seeds,
/// so all of 20 seeds in a row get the same variant.
pub fn flavour(seed: u64) -> u64 {
    seed / 20 % 4
}

fn mds_config(node: u32, copies: u32) -> mds_server::Config {
    let mut c = mds_server::Config::new(u64::from(node), Endpoint::Sim(node), PathBuf::new());
    c.peers = (1..=MDS).map(|n| (u64::from(n), Endpoint::Sim(n))).collect();
    c.default_copies = copies;
    c.join = node > MDS;
    c.expect_targets = OSS as usize;
    // Several, but few: each one makes a run slower.
    c.chains_per_target = 2;
    c
}
