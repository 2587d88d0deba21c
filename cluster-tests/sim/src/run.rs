//! One simulated run: a seed decides everything, and the same seed gives the same trace to the byte.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use strake_proto::{Code, Error, Result};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    cluster::{Cluster, FIRST_CLIENT, FIRST_OSS, MDS, Sync},
    ghost::Ghost,
    lockers::{self, Locker, Model},
    net::Weather,
    truth::{self, Truth},
    wide,
    workload::{Actor, Findings, Shared},
};

const CLIENTS: u32 = 3;
/// Clients that die on the way.
const GHOSTS: u32 = 2;
/// Longer than a report is waited for.
const EXILE: Duration = Duration::from_secs(9);
const SESSION_TERM: Duration = Duration::from_secs(30);

/// How long and how hard.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    pub seed: u64,
    /// Simulated time under faults.
    pub length: Duration,
    /// Mean simulated time between faults.
    pub fault_every: Duration,
    /// Also: single links cut, clocks that jump, full and failing disks, slow disks.
    pub harsh: bool,
    /// The servers leave out this sync: a run that must end in violations.
    pub skip: Option<Sync>,
    /// Also: clocks that drift, scarce leases, clients that only look, and one that keeps to no rule ([`crate::wide`]).
    pub wide: bool,
}

impl Scenario {
    pub fn new(seed: u64) -> Scenario {
        let (length, fault_every) = (Duration::from_secs(15), Duration::from_millis(1500));
        Scenario { seed, length, fault_every, harsh: false, skip: None, wide: false }
    }

    /// Faults three times as often and of more kinds.
    pub fn harsh(seed: u64) -> Scenario {
        Scenario { fault_every: Duration::from_millis(500), harsh: true, ..Scenario::new(seed) }
    }

    /// With what takes every row of the tables of leases; faults about as often as in [`Scenario::new`].
    pub fn wide(seed: u64) -> Scenario {
        Scenario { wide: true, ..Scenario::new(seed) }
    }
}

#[derive(Clone, Debug)]
pub struct Outcome {
    pub seed: u64,
    /// SHA-256 over everything every message carried and when, and every fault.
    pub trace: [u8; 32],
    /// The same, a line per event.
    pub events: Vec<String>,
    pub messages: u64,
    pub faults: u64,
    pub simulated: Duration,
    pub writes: u64,
    pub punches: u64,
    pub seeks: u64,
    pub syncs: u64,
    pub reads: u64,
    pub names: u64,
    pub locks: u64,
    pub looks: u64,
    /// Chunks that storage servers read through to find damage, in their last passes.
    pub scrubbed: u64,
    pub errors: u64,
    /// Promises broken, in words. Empty is the only good answer.
    pub violations: Vec<String>,
}

impl Outcome {
    /// Where another run of the same seed first took another course: a few events before it, and both events.
    pub fn parting(&self, other: &Outcome) -> Option<String> {
        let (a, b) = (&self.events, &other.events);
        let at = (0..a.len().max(b.len())).find(|i| a.get(*i) != b.get(*i));
        if at.is_none() && self.trace == other.trace {
            return None;
        }
        let at = at.unwrap_or(a.len());
        let line = |e: &[String]| e.get(at).cloned().unwrap_or_else(|| "the end".into());
        let before = a.get(at.saturating_sub(5)..at).unwrap_or_default().join("\n    ");
        Some(format!("event {at}:\n    {before}\n  first  {}\n  second {}", line(a), line(b)))
    }
}

thread_local! {
    static BEGUN: std::cell::Cell<Option<Instant>> = const { std::cell::Cell::new(None) };
}

/// Simulated time since this thread's run began, for log lines.
pub fn simulated() -> Duration {
    BEGUN.get().map_or(Duration::ZERO, |b| b.elapsed())
}

/// From now on [`simulated`] counts.
pub(crate) fn begin() {
    BEGUN.set(Some(Instant::now()));
}

/// Runs it on a single-threaded runtime whose clock only moves when nothing else can.
pub fn run(s: Scenario) -> Result<Outcome> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let outcome = runtime.block_on(simulate(s));
    runtime.shutdown_background();
    outcome
}

async fn simulate(s: Scenario) -> Result<Outcome> {
    let begun = Instant::now();
    begin();
    let mut cluster = Cluster::new(s.seed);
    let mut rng = StdRng::seed_from_u64(s.seed ^ 0x0fau64);
    if s.wide {
        cluster.widen(s.seed);
    }
    for node in cluster.nodes() {
        cluster.start(node).await.map_err(|e| e.context(format!("starting node {node}")))?;
    }
    wait_whole(&cluster, "after the start").await?;
    if let Some(sync) = s.skip {
        cluster.skip(sync);
    }
    let found: Shared = Arc::new(Mutex::new(Findings::default()));
    let stop = Arc::new(AtomicBool::new(false));
    let (mut tasks, mut locking, mut looking, mut counted) = (Vec::new(), Vec::new(), Vec::new(), None);
    let model = Model::default();
    for id in 1..=CLIENTS {
        let client = cluster.client(id).await?;
        let files = lockers::files(&client).await?;
        let locker = Locker::new(id, client.clone(), rng.random(), found.clone(), model.clone(), files);
        locking.push(tokio::spawn(locker.run(stop.clone())));
        let counted = match &counted {
            Some(counted) => counted,
            None => counted.insert(truth::files(&client, CLIENTS as usize).await?),
        };
        let truth = Truth::new(id as usize - 1, client.clone(), rng.random(), found.clone(), counted.clone());
        looking.push(tokio::spawn(truth.run(stop.clone())));
        let mut actor = Actor::new(id, client, rng.random(), found.clone()).await?;
        let stop = stop.clone();
        tasks.push(tokio::spawn(async move {
            actor.run(stop).await;
            actor
        }));
    }
    let mut ghosts = Vec::new();
    for id in CLIENTS + 1..=CLIENTS + GHOSTS {
        let uuid = (u128::from(s.seed) << 8 | u128::from(id)).to_be_bytes();
        let (client, env) = cluster.mortal(id, Some(uuid), Vec::new()).await?;
        let dies = Instant::now() + s.length.mul_f64(rng.random());
        ghosts.push(Ghost::start(client, env, FIRST_CLIENT + id, uuid, rng.random(), dies));
    }
    if s.wide {
        looking.extend(wide::start(&mut cluster, s.seed, CLIENTS, &found, &stop).await?);
    }
    let faults = harm(&mut cluster, &mut rng, s, &mut ghosts).await?;
    cluster.repair().await?;
    stop.store(true, Ordering::Relaxed);
    for g in ghosts.iter_mut().filter_map(|g| g.die(true).then_some(g.node)) {
        cluster.net.node_died(g);
    }
    // The dead are reported, or missed when their term is over.
    let told = s.seed.is_multiple_of(2);
    let (other, _) = cluster.mortal(7, None, ghosts.iter().filter(|_| told).map(|g| g.uuid).collect()).await?;
    if !told {
        sleep(SESSION_TERM + Duration::from_secs(2)).await;
    }
    for g in &ghosts {
        g.check(&other, &found).await.map_err(|e| e.context(format!("after client {} had died", g.node)))?;
    }
    for t in looking {
        ended(t).await?;
    }
    for t in locking {
        let locker = ended(t).await?;
        locker.finish().await;
    }
    lockers::all_free(&other, &lockers::files(&other).await?).await?;
    for t in tasks {
        let actor = ended(t).await?;
        actor.finish(&other).await?;
    }
    wait_whole(&cluster, "after the last fault").await?;
    let (trace, messages, events) = cluster.net.trace();
    let mut f = found.lock();
    let scrubbed = cluster.scrubbed();
    if scrubbed.damaged > 0 {
        f.violations.push(format!("{} chunks were found damaged on disks that do not decay", scrubbed.damaged));
    }
    Ok(Outcome {
        seed: s.seed,
        trace,
        events,
        messages,
        faults,
        simulated: begun.elapsed(),
        writes: f.writes,
        punches: f.punches,
        seeks: f.seeks,
        syncs: f.syncs,
        reads: f.reads,
        names: f.names,
        locks: f.locks,
        looks: f.looks,
        scrubbed: scrubbed.chunks,
        errors: f.errors,
        violations: f.violations.clone(),
    })
}

async fn ended<T>(task: tokio::task::JoinHandle<T>) -> Result<T> {
    timeout(Duration::from_secs(300), task)
        .await
        .map_err(|_| Error::new(Code::TimedOut, "a client did not finish 300 s after the last fault"))?
        .map_err(|e| Error::new(Code::Io, format!("a client failed: {e}")))
}

async fn wait_whole(cluster: &Cluster, when: &str) -> Result<()> {
    let start = Instant::now();
    while !cluster.whole() {
        if start.elapsed() > Duration::from_secs(120) {
            return Err(Error::new(Code::TimedOut, format!("chains were not whole 120 s {when}")));
        }
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// What [`Scenario::harsh`] adds to one round of faults.
fn harsher(cluster: &mut Cluster, rng: &mut StdRng) {
    let nodes = cluster.nodes();
    let (Some(a), Some(b)) = (nodes.choose(rng).copied(), nodes.choose(rng).copied()) else { return };
    match rng.random_range(0..8) {
        0 | 1 => cluster.cut(a, b, rng.random_bool(0.5)),
        2 => cluster.jump_clock(a, rng.random_range(-240..240)),
        3 => cluster.set_disk_fault(Some((a, if rng.random_bool(0.5) { Code::NoSpc } else { Code::Io }))),
        4 => cluster.set_disk_fault(None),
        5 => cluster.slow_disk(a, Duration::from_micros(rng.random_range(0..20_000))),
        6 => cluster.net.heal(),
        _ => {}
    }
}

/// Cuts a client off from the metadata servers, not from the storage servers: for a moment, or for so long that it is evicted when
/// somebody looks at what it writes.
fn exile(cluster: &mut Cluster, rng: &mut StdRng, exiled: &mut Option<(u32, Instant)>) -> u64 {
    let now = Instant::now();
    let (client, new) = match exiled.filter(|(_, until)| now < *until) {
        Some((client, _)) => (client, false),
        None if rng.random_bool(0.3) => (FIRST_CLIENT + rng.random_range(1..=CLIENTS), true),
        None => return 0,
    };
    if new {
        *exiled = rng.random_bool(0.8).then(|| (client, now + EXILE));
    }
    (1..=MDS).for_each(|mds| cluster.cut(client, mds, false));
    u64::from(new)
}

/// Kills, restarts, partitions and bad weather, as the seed says. Returns how many struck a node that was up.
async fn harm(cluster: &mut Cluster, rng: &mut StdRng, s: Scenario, ghosts: &mut [Ghost]) -> Result<u64> {
    let (end, mut faults, mut exiled) = (Instant::now() + s.length, 0, None);
    while Instant::now() < end {
        sleep(s.fault_every.mul_f64(rng.random_range(0.2..1.8))).await;
        for node in ghosts.iter_mut().filter_map(|g| g.die(false).then_some(g.node)) {
            cluster.net.note(&format!("kill client {node}"));
            cluster.net.node_died(node);
        }
        let nodes = cluster.nodes();
        let up: Vec<u32> = nodes.iter().copied().filter(|n| cluster.is_up(*n)).collect();
        let down: Vec<u32> = nodes.iter().copied().filter(|n| !cluster.is_up(*n)).collect();
        match rng.random_range(0..10) {
            0..=3 if !up.is_empty() => {
                if let Some(node) = up.choose(rng) {
                    cluster.kill(*node, rng.random_bool(0.5));
                    faults += 1;
                }
            }
            4 => {
                // Power loss of everything, or of every object server.
                let power = rng.random_bool(0.7);
                let from = if rng.random_bool(0.5) { 0 } else { FIRST_OSS };
                for node in up.into_iter().filter(|n| *n >= from) {
                    cluster.kill(node, power);
                    faults += 1;
                }
            }
            5 => {
                if let Some(node) = up.choose(rng) {
                    cluster.isolate(*node, rng.random_bool(0.3));
                    faults += 1;
                }
            }
            6 => cluster.net.heal(),
            7 => {
                let break_per_mille = if rng.random_bool(0.5) { 3 } else { 0 };
                let max_delay = Duration::from_millis(rng.random_range(1..30));
                cluster.net.set_weather(Weather { min_delay: Duration::ZERO, max_delay, break_per_mille });
            }
            _ => {}
        }
        if s.harsh {
            harsher(cluster, rng);
        }
        cluster.drift();
        // A server that waits for a leader to register must not hold up the others.
        let mds_down: Vec<u32> = down.iter().copied().filter(|n| *n < FIRST_OSS).collect();
        for node in mds_down {
            if rng.random_bool(0.7) {
                cluster.start(node).await?;
            }
        }
        let leader_possible = nodes.iter().filter(|n| **n < FIRST_OSS && cluster.is_up(**n)).count() >= 2;
        for node in down.into_iter().filter(|n| *n >= FIRST_OSS) {
            if leader_possible && rng.random_bool(0.5) {
                cluster.net.heal();
                cluster.set_disk_fault(None);
                cluster.start(node).await?;
            }
        }
        if s.wide {
            faults += exile(cluster, rng, &mut exiled);
        }
    }
    Ok(faults)
}
