//! A cluster in the simulator: real metadata servers, object servers and clients on simulated disks, clocks and network.

use std::{path::PathBuf, sync::Arc, time::Duration};

use rand::{Rng, RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, FollowerReads};
use strake_fabric::{Endpoint, Env, Pool, Role};
use strake_mds::{
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
use strake_store::MemStore;
use tokio::time::{Instant, timeout};

use crate::{
    clock::SimClock,
    net::{Network, SimFabric, Weather},
};

const CALM: Weather = Weather { min_delay: Duration::ZERO, max_delay: Duration::from_millis(3), break_per_mille: 0 };
/// Secret of every simulated cluster.
const KEY: [u8; 32] = [0x5e; 32];
const TARGET_BYTES: u64 = 256 << 20;
/// Storage servers look for damage all the time.
const SCRUB_EVERY_S: u64 = 3;
/// Rates of clocks of which no two differ by more than a tenth.
const DRIFT: std::ops::Range<f64> = 0.955..1.045;
/// Bounds of leases that three clients reach.
const SCARCE: Limits = Limits {
    term: Duration::from_millis(1500),
    patience: Duration::from_secs(5),
    of_session: 8,
    of_all: 20,
    of_inode: 3,
    hot: 4,
    of_writer: 1 << 20,
};
pub const MDS: u32 = 3;
pub const OSS: u32 = 3;
pub const COPIES: u32 = 2;
/// Node numbers on the network: metadata servers from 1, object servers from 101, clients from 201.
pub const FIRST_OSS: u32 = 101;
pub const FIRST_CLIENT: u32 = 201;

/// The client that asks followers whatever they may answer; the others, what they do by default.
const FOLLOWING: u32 = 2;

/// A sync that a build might forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Sync {
    /// Of the Raft log.
    Log,
    /// Of an object server's device.
    Device,
    /// Of an object server's chunk table.
    Table,
}

struct Mds {
    node: u32,
    clock: SimClock,
    log: Arc<MemLog>,
    store: Arc<MemStore>,
    life: Option<(Env, MdsServer)>,
}

struct Oss {
    node: u32,
    clock: SimClock,
    device: Arc<MemDevice>,
    table: Arc<MemStore>,
    formatted: bool,
    /// Its device failed in this life: a target that saw that serves again only after a restart.
    harmed: bool,
    life: Option<(Env, OssServer)>,
}

pub struct Cluster {
    pub net: Network,
    rng: StdRng,
    start: Instant,
    /// A session's term, where it is not the default.
    pub session_term: Option<Duration>,
    /// See [`Cluster::widen`].
    wide: Option<StdRng>,
    client_clocks: Vec<SimClock>,
    /// Clients with even or with odd numbers hold back what they write; or all.
    write_back: Option<u32>,
    mds: Vec<Mds>,
    oss: Vec<Oss>,
    /// Of servers that were killed.
    scrubbed: Scrubbed,
}

/// What storage servers looked at, in chunks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scrubbed {
    /// In the last pass of each life of a server.
    pub chunks: u64,
    /// Of which were found damaged, in any pass. No disk decays here, so there should be none.
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
    /// Nothing runs yet.
    pub fn new(seed: u64) -> Cluster {
        let mut rng = StdRng::seed_from_u64(seed);
        let start = Instant::now();
        let ms = Duration::from_millis;
        let net = Network::new(rng.random(), CALM);
        let voters: Vec<u64> = (1..=u64::from(MDS)).collect();
        let skew = |rng: &mut StdRng| SimClock::new(start, rng.random_range(-20_000_000..20_000_000));
        let mds = (1..=MDS)
            .map(|node| Mds {
                node,
                clock: skew(&mut rng),
                log: Arc::new(MemLog::new(voters.clone(), rng.random(), ms(1))),
                store: Arc::new(MemStore::new()),
                life: None,
            })
            .collect();
        let oss = (0..OSS)
            .map(|n| Oss {
                node: FIRST_OSS + n,
                clock: skew(&mut rng),
                device: Arc::new(MemDevice::new(TARGET_BYTES)),
                table: Arc::new(MemStore::new()),
                formatted: false,
                harmed: false,
                life: None,
            })
            .collect();
        Cluster {
            net,
            rng,
            start,
            session_term: None,
            wide: None,
            client_clocks: Vec::new(),
            write_back: Some(seed as u32 % 2),
            mds,
            oss,
            scrubbed: Scrubbed::default(),
        }
    }

    /// From now on all clocks drift, by as much as two may differ, and leases are scarce: few of one session, of an inode and of
    /// all. Before anything is started.
    pub fn widen(&mut self, seed: u64) {
        self.wide = Some(StdRng::seed_from_u64(seed ^ 0x71de));
        self.drift();
    }

    /// Targets have so many bytes. Before anything is started.
    pub fn shrink(&mut self, bytes: u64) {
        self.oss.iter_mut().for_each(|o| o.device = Arc::new(MemDevice::new(bytes)));
    }

    /// All clients hold back what they write.
    pub fn hold_back(&mut self) {
        self.write_back = None;
    }

    fn clocks(&self) -> impl Iterator<Item = &SimClock> {
        let servers = self.mds.iter().map(|m| &m.clock).chain(self.oss.iter().map(|o| &o.clock));
        servers.chain(&self.client_clocks)
    }

    /// Each clock since boot has another rate from now on, and some clients' wall clocks jump.
    pub fn drift(&mut self) {
        let Some(mut rng) = self.wide.take() else { return };
        self.clocks().for_each(|c| c.set_rate(rng.random_range(DRIFT)));
        for c in &self.client_clocks {
            if rng.random_bool(0.3) {
                c.set_skew(rng.random_range(-240..240) * 1_000_000_000);
            }
        }
        self.wide = Some(rng);
    }

    pub fn nodes(&self) -> Vec<u32> {
        self.mds.iter().map(|m| m.node).chain(self.oss.iter().map(|o| o.node)).collect()
    }

    pub fn is_up(&self, node: u32) -> bool {
        self.mds.iter().any(|m| m.node == node && m.life.is_some())
            || self.oss.iter().any(|o| o.node == node && o.life.is_some())
    }

    pub async fn start(&mut self, node: u32) -> Result<()> {
        self.net.note(&format!("start {node}"));
        let seed = bytes32(&mut self.rng);
        if let Some(i) = self.mds.iter().position(|m| m.node == node) {
            let m = &self.mds[i];
            let env = m.clock.env(seed);
            let parts = mds_server::Parts {
                env: env.clone(),
                fabric: Arc::new(self.net.fabric(node, Role::Server, env.clone())),
                log: m.log.clone(),
                store: m.store.clone(),
                cap_key: CapKey::from_cluster_key(&KEY),
                cluster: [7; 16],
            };
            let mut config = mds_config(node);
            if let Some(term) = self.session_term {
                config.session_term_ms = term.as_millis() as u64;
            }
            if self.wide.is_some() {
                config.limit_leases(SCARCE);
            }
            let server = mds_server::start(config, parts).await?;
            self.mds[i].life = Some((env, server));
        } else if let Some(i) = self.oss.iter().position(|o| o.node == node) {
            self.format_once(i).await?;
            let o = &self.oss[i];
            let env = o.clock.env(seed);
            let engine = Engine::open(o.device.clone(), o.table.clone(), Pool::default(), Options::default()).await?;
            let parts = oss_server::Parts {
                env: env.clone(),
                fabric: Arc::new(self.net.fabric(node, Role::Server, env.clone())),
                targets: vec![engine],
                cap_key: CapKey::from_cluster_key(&KEY),
            };
            let mds = (1..=MDS).map(Endpoint::Sim).collect();
            let mut config = oss_server::Config::new(format!("oss{node}"), Endpoint::Sim(node), mds);
            config.scrub_every_s = SCRUB_EVERY_S;
            // Registration needs a metadata leader; without one it goes on in the background of the real server, and a
            // start that takes longer than any election is a failure to report.
            let server = timeout(Duration::from_secs(60), oss_server::start(config, parts))
                .await
                .map_err(|_| Error::new(Code::TimedOut, "an oss did not start in 60 s"))??;
            server.scrub(Some(Ask::Start));
            self.oss[i].life = Some((env, server));
            self.oss[i].harmed = false;
        }
        Ok(())
    }

    async fn format_once(&mut self, i: usize) -> Result<()> {
        if !self.oss[i].formatted {
            let target_uuid = u128::from(self.rng.next_u64()) << 64 | u128::from(self.rng.next_u64());
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

    /// From now on the servers leave out one kind of sync; what they acknowledge is not durable.
    pub fn skip(&self, sync: Sync) {
        match sync {
            Sync::Log => self.mds.iter().for_each(|m| m.log.skip_sync()),
            Sync::Device => self.oss.iter().for_each(|o| o.device.skip_flush()),
            Sync::Table => self.oss.iter().for_each(|o| o.table.skip_sync()),
        }
    }

    /// The process is gone from one instruction to the next; with `power`, its machine too: unsynced disk writes are lost
    /// or torn. Without, what reached the kernel stays.
    pub fn kill(&mut self, node: u32, power: bool) {
        self.net.note(&format!("kill {node} power={power}"));
        let (dice, keep) = (self.rng.next_u64(), self.rng.random_bool(0.5));
        if let Some(m) = self.mds.iter_mut().find(|m| m.node == node)
            && let Some((env, server)) = m.life.take()
        {
            env.kill();
            drop(server);
            if power {
                m.log.lose_unsynced();
            }
            m.log.crash(keep);
            m.store.crash(|n| if power { (dice % (n as u64 + 1)) as usize } else { n });
        }
        if let Some(o) = self.oss.iter_mut().find(|o| o.node == node)
            && let Some((env, server)) = o.life.take()
        {
            self.scrubbed.add(&server);
            env.kill();
            drop(server);
            if power {
                o.device.crash(dice, Tear::Sector);
            }
            o.table.crash(|n| if power { (dice % (n as u64 + 1)) as usize } else { n });
        }
        self.net.node_died(node);
    }

    /// What storage servers looked at so far.
    pub fn scrubbed(&self) -> Scrubbed {
        let mut all = self.scrubbed;
        self.oss.iter().filter_map(|o| o.life.as_ref()).for_each(|(_, server)| all.add(server));
        all
    }

    /// A client on a node of its own.
    pub async fn client(&mut self, n: u32) -> Result<Client> {
        Ok(self.mortal(n, None, Vec::new()).await?.0)
    }

    /// A client that can be killed, which knows that some others were.
    pub async fn mortal(&mut self, n: u32, uuid: Option<[u8; 16]>, dead: Vec<[u8; 16]>) -> Result<(Client, Env)> {
        let (mut config, env, fabric) = self.prepare(n);
        (config.uuid, config.dead) = (uuid, dead);
        Ok((Client::connect(config, env.clone(), fabric).await?, env))
    }

    /// What a client on a node of its own connects with.
    pub fn prepare(&mut self, n: u32) -> (strake_client::Config, Env, Arc<SimFabric>) {
        let node = FIRST_CLIENT + n;
        let clock = SimClock::new(self.start, 0);
        let env = clock.env(bytes32(&mut self.rng));
        if let Some(rng) = &mut self.wide {
            clock.set_rate(rng.random_range(DRIFT));
            self.client_clocks.push(clock);
        }
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

    /// The metadata server that leads, if one does and knows it.
    pub fn leader(&self) -> Option<u32> {
        self.mds.iter().find(|m| m.life.as_ref().is_some_and(|(_, server)| server.leads())).map(|m| m.node)
    }

    /// The chains of the leader's map, and whether all replicas of all are in sync.
    pub fn whole(&self) -> bool {
        use strake_proto::map::ChainExt;
        let statuses = self.mds.iter().filter_map(|m| Some(m.life.as_ref()?.1.status()));
        let newest = statuses.filter_map(|s| s.map).max_by_key(|m| m.version);
        newest.is_some_and(|m| !m.chains.is_empty() && m.chains.iter().all(|c| c.serving().count() == c.replicas.len()))
    }

    /// Cuts the link between two nodes, in both directions or one.
    pub fn cut(&mut self, a: u32, b: u32, one_way: bool) {
        self.net.note(&format!("cut {a} {b} one_way={one_way}"));
        self.net.block(a, b);
        if !one_way {
            self.net.block(b, a);
        }
    }

    /// A node's wall clock is suddenly this far off.
    pub fn jump_clock(&mut self, node: u32, seconds: i64) {
        self.net.note(&format!("clock of {node} jumps to {seconds} s"));
        let mds = self.mds.iter().filter(|m| m.node == node).map(|m| &m.clock);
        let oss = self.oss.iter().filter(|o| o.node == node).map(|o| &o.clock);
        for clock in mds.chain(oss) {
            clock.set_skew(seconds * 1_000_000_000);
        }
    }

    /// The disk of a node is full (`NoSpc`: a metadata server's log refuses writes until told otherwise, an object
    /// server's device the next few) or broken (`Io`: one write of an object server fails). `None` ends what lasts.
    pub fn set_disk_fault(&mut self, fault: Option<(u32, Code)>) {
        self.net.note(&format!("disk fault {fault:?}"));
        let error = |code| Error::new(code, "injected fault");
        for m in &self.mds {
            let full = fault.filter(|(n, code)| *n == m.node && *code == Code::NoSpc);
            m.log.set_fault(full.map(|(_, code)| error(code)));
        }
        if fault.is_none() {
            self.oss.iter().for_each(|o| o.device.end_faults());
        }
        if let Some((node, code)) = fault
            && let Some(o) = self.oss.iter_mut().find(|o| o.node == node)
        {
            let times = if code == Code::NoSpc { 5 } else { 1 };
            o.harmed = true;
            (0..times).for_each(|n| o.device.fail(Op::Write, n, code));
        }
    }

    /// All nodes up, all links whole, disks and clocks right: what a system in order recovers under.
    pub async fn repair(&mut self) -> Result<()> {
        self.net.heal();
        self.net.set_weather(CALM);
        self.set_disk_fault(None);
        for node in self.nodes() {
            self.jump_clock(node, 0);
            if self.oss.iter().any(|o| o.node == node && o.harmed) {
                self.kill(node, false);
            }
        }
        for node in self.nodes() {
            if !self.is_up(node) {
                self.start(node).await?;
            }
        }
        Ok(())
    }

    /// Writes and flushes of an object server's disk take this long from now on.
    pub fn slow_disk(&mut self, node: u32, latency: Duration) {
        self.net.note(&format!("disk of {node} takes {latency:?}"));
        for o in self.oss.iter().filter(|o| o.node == node) {
            o.device.set_latency(&[Op::Write, Op::Flush], latency);
        }
    }

    /// Cuts a node off, in both directions or one.
    pub fn isolate(&mut self, node: u32, one_way: bool) {
        self.net.note(&format!("isolate {node} one_way={one_way}"));
        let others: Vec<u32> =
            self.nodes().into_iter().filter(|n| *n != node).chain((0..8).map(|n| FIRST_CLIENT + n)).collect();
        for n in others {
            self.net.block(n, node);
            if !one_way {
                self.net.block(node, n);
            }
        }
    }
}

fn mds_config(node: u32) -> mds_server::Config {
    let mut c = mds_server::Config::new(u64::from(node), Endpoint::Sim(node), PathBuf::new());
    c.peers = (1..=MDS).map(|n| (u64::from(n), Endpoint::Sim(n))).collect();
    c.default_copies = COPIES;
    c.expect_targets = OSS as usize;
    c
}
