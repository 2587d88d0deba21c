//! A cluster in the simulator: real metadata servers, storage servers and clients on simulated
//! disks, clocks and networks.

mod clocks;
mod disks;
mod life;
pub(crate) mod tables;

use std::{path::PathBuf, sync::Arc, time::Duration};

use clocks::{Clocks, DRIFT};
use disks::Harmed;
use life::Life;
use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, FollowerReads};
use strake_fabric::{Endpoint, Pool, Role};
use strake_mds::{
    cluster::moves::is_moving,
    consensus::MemLog,
    leases::Limits,
    server::{self as mds_server, MdsServer, ReadCheck},
};
use strake_oss::{
    device::mem::{MemDevice, Tear},
    engine::{Engine, Options, TargetIdentity},
    server::{self as oss_server, Ask, OssServer},
};
use strake_proto::{CapKey, Code, Error, Result};
use strake_runtime::Env;
use strake_store::MemStore;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    clock::SimClock,
    ledger::Kind,
    members::Replacement,
    net::{Network, SimFabric, Weather},
    nodes::{FIRST_CLIENT, FIRST_OSS, MDS, OSS},
    scenario::Sync,
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
/// Copies of each file, unless a run sets another number.
const COPIES: u32 = 2;
/// The client that always tries followers for reads. The other clients use the default.
const FOLLOWING: u32 = 2;

struct Mds {
    node: u32,
    log: Arc<MemLog>,
    store: Arc<MemStore>,
    disk: Option<Harmed>,
    life: Option<Life<MdsServer>>,
}

struct Oss {
    node: u32,
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
    fn new(node: u32) -> Oss {
        Oss {
            node,
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
    /// Copies of each file. To be set before anything is started.
    pub copies: u32,
    rng: StdRng,
    start: Instant,
    /// How leaders make sure that they still lead when they answer a read.
    reads: ReadCheck,
    /// The session term, if it is not the default.
    pub session_term: Option<Duration>,
    /// How long the leader waits for a dead target before it rebuilds, if not the default.
    pub rebuild_after: Option<Duration>,
    /// The feature level of the cluster at first, if it is not the newest.
    pub first_level: Option<u32>,
    /// See [`Cluster::widen`].
    wide: Option<StdRng>,
    clocks: Clocks,
    client_envs: Vec<Env>,
    /// Clients whose number has this remainder modulo 2 use write-back; `None`: all clients do.
    pub write_back: Option<u32>,
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
        let (mut clocks, mut mds, mut oss) = (Clocks::default(), Vec::new(), Vec::new());
        for node in 1..=MDS {
            clocks.servers.insert(node, skew(&mut rng));
            mds.push(Mds {
                node,
                log: Arc::new(MemLog::new(voters.clone(), rng.random(), LOG_LATENCY)),
                store: Arc::new(MemStore::new()),
                disk: None,
                life: None,
            });
        }
        for node in FIRST_OSS..FIRST_OSS + OSS {
            clocks.servers.insert(node, skew(&mut rng));
            oss.push(Oss::new(node));
        }
        Cluster {
            net,
            copies: COPIES,
            rng,
            start,
            reads: if seed % 8 == 5 { ReadCheck::Quorum } else { ReadCheck::Lease },
            session_term: None,
            rebuild_after: None,
            first_level: None,
            wide: None,
            clocks,
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

    /// Wide runs only: gives each boot clock another rate from now on, and lets some clients' wall
    /// clocks jump.
    pub fn drift(&mut self) {
        let Some(dice) = self.wide.as_mut().map(|rng| rng.random()) else { return };
        self.drift_by(dice);
    }

    /// The same in any kind of run; `dice` is the seed.
    pub fn drift_by(&mut self, dice: u64) {
        self.clocks.drift_by(dice);
        let counts = self.nodes().iter().any(|n| self.net.is_busy(*n));
        self.net.made(Kind::ClockDrift, counts);
    }

    /// Gives a node's boot clock the slowest rate that is allowed and all others the fastest.
    pub fn slow_clock(&mut self, node: u32) {
        self.net.note(&format!("the clock of {node} is slow"));
        self.clocks.slow(node);
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
            let env = self.clocks.of(node).env(seed);
            let parts = mds_server::Parts {
                env: env.clone(),
                fabric: Arc::new(self.net.fabric(node, Role::Server, env.clone())),
                log: m.log.clone(),
                store: m.store.clone(),
                cap_key: CapKey::from_cluster_key(&KEY),
                cluster: [7; 16],
            };
            let mut config = mds_config(node, self.copies);
            config.reads = self.reads;
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
            let env = self.clocks.of(node).env(seed);
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
    pub(crate) fn are_up(&self, nodes: &[u32]) -> Result<bool> {
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
        self.clocks.clients.push(clock);
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

    /// Cuts a node off from all others, in both directions or one.
    pub fn isolate(&mut self, node: u32, one_way: bool, until: Option<Instant>) {
        let clients = (0..10).map(|n| FIRST_CLIENT + n);
        let others: Vec<u32> =
            self.nodes().into_iter().filter(|n| *n != node).chain(clients).collect();
        self.net.cut_off(node, &others, one_way, until);
    }

    /// Sets the offset of a node's wall clock.
    pub fn jump_clock(&mut self, node: u32, seconds: i64) {
        self.net.note(&format!("clock of {node} jumps to {seconds} s"));
        self.net.made(Kind::ClockJump, self.is_up(node) && self.net.is_busy(node));
        self.clocks.set(node, seconds);
    }

    /// Adds a storage server with a new target and returns its node; it is not started yet.
    pub fn join(&mut self) -> u32 {
        let node = FIRST_OSS + self.oss.len() as u32;
        self.clocks.servers.insert(node, SimClock::new(self.start, 0));
        self.oss.push(Oss::new(node));
        let counts = self.nodes().iter().any(|n| self.net.is_busy(*n));
        self.net.made(Kind::Joined, counts);
        node
    }

    /// Starts a new metadata server that is to replace `old`.
    pub async fn replace_mds(&mut self, old: u32) -> Result<()> {
        let (node, stamp) = (MDS + 1, self.rng.random());
        let log = Arc::new(MemLog::new(Vec::new(), stamp, LOG_LATENCY));
        let store = Arc::new(MemStore::new());
        self.clocks.servers.insert(node, SimClock::new(self.start, 0));
        self.mds.push(Mds { node, log, store, disk: None, life: None });
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
            self.clocks.servers.remove(&r.old);
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
            self.clocks.set(node, 0);
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
