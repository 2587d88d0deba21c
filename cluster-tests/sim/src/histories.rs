//! Histories of metadata operations: a few clients use a few names while servers and clients are
//! killed and cut off. Some single order must explain each history. See docs/histories.md.

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use strake_client::{Client, FollowerReads, Stats};
use strake_histories::{
    Head, History, Ino, Op, Outcome, Record, Verdict, check,
    choose::{Chooser, Mix},
    library::Library,
    search::LIMIT,
};
use strake_proto::{Code, Error, Result};
use strake_runtime::Env;
use tokio::time::{Instant, sleep};

use crate::{
    cluster::Cluster,
    draw,
    ledger::{Kind, Ledger},
    net::Weather,
    nodes::{FIRST_CLIENT, MDS},
    plant::Plant,
    run::in_cluster,
    workload::root,
};

/// Clients at a time, and operations of each.
pub const CLIENTS: u32 = 6;
pub const OPS: u32 = 40;
/// The share of operations that must overlap another client's.
const OVERLAP: f64 = 0.3;
/// Clients that die in one run, at most.
const DEATHS: u32 = 2;
/// How long faults are made, unless all clients finish earlier.
const FAULTS: Duration = Duration::from_secs(8);
/// Mean time between faults of single messages.
const MESSAGE_EVERY: Duration = Duration::from_millis(60);
/// How long the last operations may take once nothing is broken any more.
const PATIENCE: Duration = Duration::from_secs(300);

/// One run.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub seed: u64,
    /// A fault that is planted: the run must show it.
    pub plant: Option<Plant>,
}

/// The result of a run.
pub struct Report {
    pub history: History,
    pub verdict: Verdict,
    pub counts: Counts,
    /// As [`crate::run::Outcome::trace`].
    pub trace: [u8; 32],
    pub faults: Ledger,
    pub simulated: Duration,
}

/// What happened in a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Servers killed, servers cut off, clients cut off, clients killed.
    pub kills: u32,
    pub isolations: u32,
    pub partitions: u32,
    pub deaths: u32,
    /// Operations for which it is not known whether they ran.
    pub unknown: u32,
    /// Requests that were sent again.
    pub retries: u64,
    /// Read requests that followers answered.
    pub followed: u64,
}

impl Counts {
    pub fn faults(&self) -> u32 {
        self.kills + self.isolations + self.partitions + self.deaths
    }
}

impl Report {
    /// Why this run does not count as passed.
    pub fn failure(&self) -> Option<String> {
        let overlap = self.history.overlap();
        match &self.verdict {
            Verdict::Rejected { .. } => Some("not linearizable".into()),
            Verdict::Undecided { .. } => Some("not decided".into()),
            _ if overlap < OVERLAP => {
                Some(format!("only {:.0} % of the operations overlap", overlap * 100.0))
            }
            _ => None,
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (c, trace) = (&self.counts, hex::encode(&self.trace[..8]));
        write!(
            f,
            "{} operations, {:.0} % overlap, {} kills, {} isolations, {} partitions, {} deaths, {} unknown, {} retries, \
             {} followed, {} steps, {:.0?} simulated, trace {trace}",
            self.history.records.len(),
            self.history.overlap() * 100.0,
            c.kills,
            c.isolations,
            c.partitions,
            c.deaths,
            c.unknown,
            c.retries,
            c.followed,
            self.verdict.steps(),
            self.simulated
        )
    }
}

/// Totals of many runs.
#[derive(Default)]
pub struct Sum {
    runs: u64,
    verdicts: [u64; 3],
    operations: u64,
    overlap: f64,
    least_overlap: f64,
    faults: u64,
    faultless: u64,
    unknown: u64,
    retries: u64,
    followed: u64,
    /// Runs in which followers answered something.
    following: u64,
    most_steps: u64,
}

impl Sum {
    pub fn add(&mut self, r: &Report) {
        let overlap = r.history.overlap();
        self.least_overlap = if self.runs == 0 { overlap } else { self.least_overlap.min(overlap) };
        self.runs += 1;
        let verdict = match r.verdict {
            Verdict::Linearizable { .. } => 0,
            Verdict::Rejected { .. } => 1,
            Verdict::Undecided { .. } => 2,
        };
        self.verdicts[verdict] += 1;
        self.operations += r.history.records.len() as u64;
        self.overlap += overlap;
        self.faults += u64::from(r.counts.faults());
        self.faultless += u64::from(r.counts.faults() == 0);
        self.unknown += u64::from(r.counts.unknown);
        self.retries += r.counts.retries;
        self.followed += r.counts.followed;
        self.following += u64::from(r.counts.followed > 0);
        self.most_steps = self.most_steps.max(r.verdict.steps());
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [good, bad, open] = self.verdicts;
        let runs = self.runs.max(1) as f64;
        write!(
            f,
            "{good} linearizable, {bad} rejected, {open} not decided; {} operations, {:.0} % overlap ({:.0} % at least), \
             {:.1} faults a run ({} runs without), {} unknown, {} retries, {} answers of followers in {} runs, {} steps at most",
            self.operations,
            self.overlap / runs * 100.0,
            self.least_overlap * 100.0,
            self.faults as f64 / runs,
            self.faultless,
            self.unknown,
            self.retries,
            self.followed,
            self.following,
            self.most_steps
        )
    }
}

/// The records so far. Only the order of events matters, and all of them happen in one thread.
#[derive(Default)]
struct Recorder {
    events: u64,
    records: Vec<Record>,
}

impl Recorder {
    fn tick(&mut self) -> u64 {
        self.events += 1;
        self.events
    }

    /// The outcome is unknown until the operation is answered.
    fn call(&mut self, client: u32, op: Op) -> usize {
        let call = self.tick();
        let outcome = Outcome::Unknown("no answer".into());
        self.records.push(Record { client, call, reply: u64::MAX, op, outcome });
        self.records.len() - 1
    }

    fn answer(&mut self, at: usize, outcome: Outcome) {
        let reply = self.tick();
        let r = &mut self.records[at];
        (r.reply, r.outcome) = (reply, outcome);
    }

    /// Ends the open operation of a client that died, so that it does not overlap everything after
    /// it.
    fn died(&mut self, client: u32) {
        let now = self.tick();
        let open = |r: &&mut Record| r.client == client && r.reply == u64::MAX;
        self.records.iter_mut().filter(open).for_each(|r| r.reply = now);
    }
}

type Shared = Arc<Mutex<Recorder>>;

/// One client, and what the run knows of it.
struct Worker {
    /// Its number in the history. A client that replaces a dead one has a new number.
    id: u32,
    /// Its number on the network, from 1.
    place: u32,
    uuid: [u8; 16],
    env: Env,
    /// Operations it has still to do.
    left: Arc<Mutex<u32>>,
    client: Arc<Mutex<Option<Client>>>,
}

impl Worker {
    fn works(&self) -> bool {
        *self.left.lock() > 0
    }

    fn stats(&self) -> Option<Stats> {
        self.client.lock().as_ref().map(Client::stats)
    }
}

/// Runs a seed on a single-threaded runtime whose clock only moves when nothing else can.
pub fn run(s: Scenario) -> Result<Report> {
    in_cluster(s.seed, async |cluster| simulate(s, cluster).await)?
}

async fn simulate(s: Scenario, cluster: &mut Cluster) -> Result<Report> {
    let begun = Instant::now();
    let mut rng = StdRng::seed_from_u64(s.seed ^ 0x0415);
    // In some runs the sessions of clients that are cut off end.
    cluster.session_term = rng.random_bool(0.3).then_some(Duration::from_secs(3));
    for node in cluster.nodes() {
        cluster.start(node).await.map_err(|e| e.context(format!("starting node {node}")))?;
    }
    while !cluster.whole() {
        sleep(Duration::from_millis(100)).await;
    }
    let head = Head {
        source: format!("simulator seed {}", s.seed),
        roots: make_roots(cluster).await?,
        kernel: false,
    };
    if let Some(plant) = s.plant {
        cluster.net.plant(plant);
    }
    let recorder = Shared::default();
    // In half of the runs clients may ask followers. The generator is separate so that the other
    // half does not depend on it.
    let mut dice = StdRng::seed_from_u64(s.seed ^ 0xf011);
    let about_them = matches!(s.plant, Some(Plant::LateRecall | Plant::Unsettled));
    let followers = (dice.random_bool(0.5) || about_them).then_some(dice);
    let counts = Counts::default();
    let mut run = Run {
        s,
        recorder,
        roots: head.roots.clone(),
        workers: Vec::new(),
        followers,
        retired: (0, 0),
        counts,
    };
    for place in 1..=CLIENTS {
        run.start(cluster, &mut rng, place, OPS, Vec::new());
    }
    let storm = draw::storm(cluster.net.clone(), s.seed, (1..=MDS).collect(), MESSAGE_EVERY);
    run.harm(cluster, &mut rng).await?;
    storm.abort();
    cluster.repair().await?;
    let end = Instant::now() + PATIENCE;
    while run.workers.iter().any(Worker::works) {
        if Instant::now() > end {
            return Err(Error::new(
                Code::TimedOut,
                format!("clients had not finished {PATIENCE:?} after the last fault"),
            ));
        }
        sleep(Duration::from_millis(50)).await;
    }
    run.count();
    let mut counts = run.counts;
    let records = std::mem::take(&mut run.recorder.lock().records);
    counts.unknown =
        records.iter().filter(|r| matches!(r.outcome, Outcome::Unknown(_))).count() as u32;
    let history = History { head, records };
    let verdict = check(&history, LIMIT);
    let (trace, faults) = (cluster.net.trace().0, cluster.net.ledger());
    Ok(Report { verdict, history, counts, trace, faults, simulated: begun.elapsed() })
}

async fn make_roots(cluster: &mut Cluster) -> Result<Vec<Ino>> {
    let (client, env) = cluster.mortal(0, None, Vec::new()).await?;
    let mut roots = Vec::new();
    for name in ["one", "two"] {
        roots.push(client.mkdir(&root(), client.root(), name.as_bytes(), 0o755).await?.ino);
    }
    client.close().await?;
    env.kill();
    Ok(roots)
}

struct Run {
    s: Scenario,
    recorder: Shared,
    roots: Vec<Ino>,
    workers: Vec<Worker>,
    /// Chooses the clients that always ask followers; `None` if no client does.
    followers: Option<StdRng>,
    /// Retries and follower answers of clients that are gone.
    retired: (u64, u64),
    counts: Counts,
}

impl Run {
    /// Starts a client at one of the places, with `ops` operations to do.
    fn start(
        &mut self,
        cluster: &mut Cluster,
        rng: &mut StdRng,
        place: u32,
        ops: u32,
        dead: Vec<[u8; 16]>,
    ) {
        let id = place + CLIENTS * self.counts.deaths;
        let uuid = (u128::from(self.s.seed) << 8 | u128::from(id)).to_be_bytes();
        // A client with a short timeout has more operations with an unknown outcome.
        let op_timeout = Duration::from_secs(if rng.random_bool(0.2) { 2 } else { 120 });
        let (mut config, env, fabric) = cluster.prepare(place);
        (config.uuid, config.dead, config.op_timeout) = (Some(uuid), dead, op_timeout);
        let follows = self.followers.as_mut().is_some_and(|dice| dice.random_bool(0.5));
        config.follower_reads = if follows { FollowerReads::Always } else { FollowerReads::Auto };
        config.connect_timeout = PATIENCE;
        let connecting = Client::connect(config, env.clone(), fabric);
        let left = Arc::new(Mutex::new(ops));
        let worker = Worker {
            id,
            place,
            uuid,
            env: env.clone(),
            left: left.clone(),
            client: Arc::default(),
        };
        let mix = if self.followers.is_some() { Mix::Looks } else { Mix::All };
        let chooser = Chooser::new(mix, &self.roots, id);
        let rng = StdRng::seed_from_u64(rng.random());
        let (recorder, known) = (self.recorder.clone(), worker.client.clone());
        env.spawn(async move {
            match connecting.await {
                Ok(client) => {
                    *known.lock() = Some(client.clone());
                    work(id, client, chooser, rng, recorder, &left).await;
                }
                Err(e) => tracing::info!("client {id}: {e:?}"),
            }
            *left.lock() = 0;
        });
        self.workers.push(worker);
    }

    fn count(&mut self) {
        (self.counts.retries, self.counts.followed) = self.retired;
        for stats in self.workers.iter().filter_map(Worker::stats) {
            self.counts.retries += stats.retries;
            self.counts.followed += stats.follower_reads;
        }
    }

    /// Makes faults, drawn from the seed, until the clients are done or the time is over.
    async fn harm(&mut self, cluster: &mut Cluster, rng: &mut StdRng) -> Result<()> {
        let end = Instant::now() + FAULTS;
        // When the links that are cut now are healed.
        let mut links: Option<Instant> = None;
        let mut starts: Vec<(Instant, u32)> = Vec::new();
        while Instant::now() < end && self.workers.iter().any(Worker::works) {
            sleep(Duration::from_millis(rng.random_range(50..600))).await;
            let now = Instant::now();
            if links.is_some_and(|at| at <= now) {
                links = None;
                cluster.net.heal();
            }
            for (_, node) in starts.extract_if(.., |(at, _)| *at <= now) {
                cluster.start(node).await?;
            }
            let after =
                |rng: &mut StdRng, most| now + Duration::from_millis(rng.random_range(50..most));
            match rng.random_range(0..10) {
                0..=2 => {
                    let node = self.server(cluster, rng);
                    if cluster.is_up(node) && starts.is_empty() {
                        cluster.kill(node, rng.random_bool(0.5));
                        self.counts.kills += 1;
                        starts.push((after(rng, 1000), node));
                    }
                }
                3 | 4 if links.is_none() => {
                    cluster.isolate(self.server(cluster, rng), rng.random_bool(0.3), None);
                    self.counts.isolations += 1;
                    links = Some(after(rng, 2500));
                }
                5 | 6 if links.is_none() => {
                    self.cut_client(cluster, rng);
                    links = Some(after(rng, 2500));
                }
                7 => {
                    let break_per_mille = *[0, 10, 40].choose(rng).unwrap_or(&0);
                    let max_delay = Duration::from_millis(rng.random_range(1..20));
                    cluster.net.set_weather(Weather {
                        min_delay: Duration::ZERO,
                        max_delay,
                        break_per_mille,
                    });
                }
                8 if self.counts.deaths < DEATHS && rng.random_bool(0.5) => {
                    self.kill_client(cluster, rng)
                }
                9 if rng.random_bool(0.1) && starts.is_empty() => {
                    for node in 1..=MDS {
                        cluster.kill(node, true);
                        self.counts.kills += 1;
                        starts.push((after(rng, 500), node));
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// A metadata server; the leader more often than others.
    fn server(&self, cluster: &Cluster, rng: &mut StdRng) -> u32 {
        let any = rng.random_range(1..=MDS);
        cluster.leader().filter(|_| rng.random_bool(0.6)).unwrap_or(any)
    }

    fn cut_client(&mut self, cluster: &mut Cluster, rng: &mut StdRng) {
        let client = FIRST_CLIENT + rng.random_range(1..=CLIENTS);
        let (hears, is_heard) =
            *[(false, false), (false, true), (true, false)].choose(rng).unwrap_or(&(false, false));
        cluster.net.note(&format!("cut off client {client}: hears {hears}, is heard {is_heard}"));
        let fault =
            cluster.net.cutting(if hears || is_heard { Kind::OneWay } else { Kind::Partition });
        for server in 1..=MDS {
            if !hears {
                cluster.net.block(server, client, fault, None);
            }
            if !is_heard {
                cluster.net.block(client, server, fault, None);
            }
        }
        self.counts.partitions += 1;
    }

    /// Kills a client that still has operations to do. Often another takes its place, and may
    /// report its death.
    fn kill_client(&mut self, cluster: &mut Cluster, rng: &mut StdRng) {
        let at_work: Vec<usize> =
            (0..self.workers.len()).filter(|i| self.workers[*i].works()).collect();
        let Some(victim) = at_work.choose(rng) else { return };
        let victim = self.workers.swap_remove(*victim);
        cluster.net.kill_client(FIRST_CLIENT + victim.place, &victim.env);
        self.recorder.lock().died(victim.id);
        let stats = victim.stats().unwrap_or_default();
        self.retired.0 += stats.retries;
        self.retired.1 += stats.follower_reads;
        self.counts.deaths += 1;
        if rng.random_bool(0.7) {
            let dead = if rng.random_bool(0.5) { vec![victim.uuid] } else { Vec::new() };
            // Without the one that it was doing.
            let left = victim.left.lock().saturating_sub(1);
            self.start(cluster, rng, victim.place, left, dead);
        }
    }
}

/// One client's operations.
async fn work(
    id: u32,
    client: Client,
    mut chooser: Chooser,
    mut rng: StdRng,
    recorder: Shared,
    left: &Mutex<u32>,
) {
    let mut library = Library::new(client);
    while *left.lock() > 0 {
        let op = chooser.next(&mut rng);
        let at = recorder.lock().call(id, op.clone());
        let outcome = library.perform(&op).await;
        chooser.learn(&op, &outcome);
        recorder.lock().answer(at, outcome);
        *left.lock() -= 1;
        if rng.random_bool(0.5) {
            sleep(Duration::from_millis(rng.random_range(0..40))).await;
        }
    }
}
