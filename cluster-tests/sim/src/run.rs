//! One simulated run: a seed decides everything, and the same seed gives the same trace to the
//! byte.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::Client;
use strake_proto::{Code, Error, Result};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use crate::{
    cluster::{Cluster, tables},
    copies, draw,
    faults::{Fault, Stored, Timed},
    ghost::Ghost,
    leaks,
    ledger::{Kind, Ledger},
    lockers::{self, Locker, Model},
    members::Upgrade,
    moves,
    net::Weather,
    nodes::{ANY_MDS, CLIENTS, FIRST_CLIENT, OSS},
    savers::Saver,
    scenario::{Scenario, TASKS, flavour},
    truth::{self, Truth},
    wide,
    workload::{Actor, Findings, Shared},
};

/// Clients that are killed during the run.
const GHOSTS: u32 = 2;
/// Tasks at each client that save and remove files, in gentle runs.
const SAVERS: u64 = 4;
const SESSION_TERM: Duration = Duration::from_secs(30);
/// Where blocks decay: how long the leader waits for a dead target before it rebuilds.
const REBUILD: Duration = Duration::from_millis(1500);

#[derive(Clone, Debug)]
pub struct Outcome {
    pub seed: u64,
    /// SHA-256 over all messages and their times, and all faults.
    pub trace: [u8; 32],
    /// The same, a line per event.
    pub events: Vec<String>,
    pub messages: u64,
    /// The faults, by kind.
    pub faults: Ledger,
    /// How many faults were scheduled.
    pub scheduled: usize,
    pub simulated: Duration,
    pub writes: u64,
    pub punches: u64,
    pub cuts: u64,
    pub seeks: u64,
    pub syncs: u64,
    pub reads: u64,
    pub names: u64,
    /// Files that replaced another under its name.
    pub replaced: u64,
    pub locks: u64,
    pub looks: u64,
    /// Chunks that storage servers scrubbed, in their last passes.
    pub scrubbed: u64,
    pub errors: u64,
    /// Blocks that could not be read at the end, where blocks decay.
    pub lost: u64,
    /// Broken promises, as sentences. A good run has none.
    pub violations: Vec<String>,
    /// The number of events before the first broken promise was found.
    pub broken_at: Option<usize>,
}

impl Outcome {
    /// Where another run of the same seed first differs: a few events before that, and both events.
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

/// Runs something in the cluster of a seed, on a single-threaded runtime whose clock moves only
/// when nothing else can run.
pub(crate) fn in_cluster<T>(seed: u64, happens: impl AsyncFnOnce(&mut Cluster) -> T) -> Result<T> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    let outcome = runtime.block_on(async {
        BEGUN.set(Some(Instant::now()));
        let mut cluster = Cluster::new(seed);
        let outcome = happens(&mut cluster).await;
        cluster.end();
        outcome
    });
    runtime.shutdown_background();
    Ok(outcome)
}

/// Runs a scenario with the faults of its seed.
pub fn run(s: Scenario) -> Result<Outcome> {
    run_with(s, &draw::draw(&s))
}

/// The same with these faults. If the system does not recover, that is a broken promise, too.
pub fn run_with(s: Scenario, faults: &[Timed]) -> Result<Outcome> {
    in_cluster(s.seed, async |cluster| {
        let begun = Instant::now();
        let found: Shared = Arc::new(Mutex::new(Findings::new(cluster.net.clone())));
        if let Err(e) = simulate(s, faults, cluster, &found).await {
            found.lock().broken(e.to_string());
        }
        let mut f = found.lock();
        report(s.seed, faults.len(), cluster, &mut f, begun)
    })
}

fn report(
    seed: u64,
    scheduled: usize,
    cluster: &Cluster,
    f: &mut Findings,
    begun: Instant,
) -> Outcome {
    let (trace, messages, events) = cluster.net.trace();
    let scrubbed = cluster.scrubbed();
    let faults = cluster.net.ledger();
    let harms = [Kind::DiskCorrupt.name(), Kind::Decay.name(), Kind::TableDecay.name()];
    let misread = faults.rows().any(|(kind, made, _)| harms.contains(&kind) && made > 0);
    if scrubbed.damaged > 0 && !misread {
        f.broken(format!(
            "{} chunks were found damaged on disks that do not decay",
            scrubbed.damaged
        ));
    }
    Outcome {
        seed,
        trace,
        events,
        messages,
        faults,
        scheduled,
        simulated: begun.elapsed(),
        writes: f.writes,
        punches: f.punches,
        cuts: f.cuts,
        seeks: f.seeks,
        syncs: f.syncs,
        reads: f.reads,
        names: f.names,
        replaced: f.replaced,
        locks: f.locks,
        looks: f.looks,
        scrubbed: scrubbed.chunks,
        errors: f.errors,
        lost: f.lost.len() as u64,
        violations: std::mem::take(&mut f.violations),
        broken_at: f.broken_at,
    }
}

/// All tasks of a run.
struct Crew {
    stop: Arc<AtomicBool>,
    writing: Vec<JoinHandle<Actor>>,
    locking: Vec<JoinHandle<Locker>>,
    looking: Vec<JoinHandle<()>>,
    ghosts: Vec<Ghost>,
}

impl Crew {
    async fn start(s: Scenario, cluster: &mut Cluster, found: &Shared) -> Result<Crew> {
        let mut rng = StdRng::seed_from_u64(s.seed ^ 0xc1e7);
        let works = |task: u32| s.without & 1 << task == 0;
        let stop = Arc::new(AtomicBool::new(false));
        let (mut writing, mut locking, mut looking, mut counted) =
            (Vec::new(), Vec::new(), Vec::new(), None);
        let model = Model::default();
        for id in 1..=CLIENTS {
            let client = cluster.client(id).await?;
            let (of_locker, of_truth, of_actor) = (rng.random(), rng.random(), rng.random());
            let counted = match &counted {
                Some(counted) => counted,
                None => counted.insert(truth::files(&client, CLIENTS as usize).await?),
            };
            if works(CLIENTS + id - 1) {
                let files = lockers::files(&client).await?;
                let locker =
                    Locker::new(id, client.clone(), of_locker, found.clone(), model.clone(), files);
                locking.push(tokio::spawn(locker.run(stop.clone())));
            }
            if works(2 * CLIENTS + id - 1) {
                let truth = Truth::new(
                    id as usize - 1,
                    client.clone(),
                    of_truth,
                    found.clone(),
                    counted.clone(),
                );
                looking.push(tokio::spawn(truth.run(stop.clone())));
            }
            if works(id - 1) && s.gentle {
                let savers = (0..SAVERS).map(|n| {
                    let (folder, seed) =
                        (format!("saver{id}-{n}"), s.seed << 16 | u64::from(id) << 8 | n);
                    tokio::spawn(
                        Saver::new(client.clone(), folder, seed, found.clone()).run(stop.clone()),
                    )
                });
                looking.extend(savers);
            }
            if works(id - 1) {
                let mut actor =
                    Actor::new(id, client, of_actor, found.clone(), flavour(s.seed) >= 2).await?;
                let stop = stop.clone();
                writing.push(tokio::spawn(async move {
                    actor.run(stop).await;
                    actor
                }));
            }
        }
        let mut ghosts = Vec::new();
        for id in (CLIENTS + 1..=CLIENTS + GHOSTS).filter(|id| works(2 * CLIENTS + id - 1)) {
            let uuid = (u128::from(s.seed) << 8 | u128::from(id)).to_be_bytes();
            let (client, env) = cluster.mortal(id, Some(uuid), Vec::new()).await?;
            let dies = Instant::now() + s.length.mul_f64(rng.random());
            let how = (rng.random(), flavour(s.seed) >= 2);
            ghosts.push(Ghost::start(client, env, FIRST_CLIENT + id, uuid, how, dies));
        }
        if s.wide && works(TASKS - 1) {
            looking.extend(wide::start(cluster, s.seed, CLIENTS, found, &stop).await?);
        }
        Ok(Crew { stop, writing, locking, looking, ghosts })
    }

    /// Kills the ghosts whose time has come, or all.
    fn bury(&mut self, cluster: &Cluster, at_once: bool) {
        self.ghosts.iter_mut().for_each(|g| g.die(cluster, at_once));
    }

    /// Ends all tasks once nothing is broken any more, and checks what they left. Returns the
    /// client that checked.
    async fn finish(self, cluster: &mut Cluster, found: &Shared, told: bool) -> Result<Client> {
        // The dead clients are reported, or evicted when their session term is over.
        let dead = self.ghosts.iter().filter(|_| told).map(|g| g.uuid).collect();
        let (other, _) = cluster.mortal(7, None, dead).await?;
        if !told {
            sleep(SESSION_TERM + Duration::from_secs(2)).await;
        }
        for g in &self.ghosts {
            g.check(&other, found)
                .await
                .map_err(|e| e.context(format!("after client {} had died", g.node)))?;
        }
        for t in self.looking {
            ended(t).await?;
        }
        for t in self.locking {
            ended(t).await?.finish().await;
        }
        lockers::all_free(&other, &lockers::files(&other).await?).await?;
        for t in self.writing {
            ended(t).await?.finish(&other).await?;
        }
        Ok(other)
    }
}

async fn simulate(
    s: Scenario,
    faults: &[Timed],
    cluster: &mut Cluster,
    found: &Shared,
) -> Result<()> {
    if s.wide {
        cluster.widen(s.seed);
    }
    if flavour(s.seed) == 3 {
        cluster.copies = OSS;
    }
    if s.decays {
        cluster.rebuild_after = Some(REBUILD);
        found.lock().decays = true;
    }
    if s.upgrades {
        cluster.first_level = Some(0);
    }
    for node in cluster.nodes() {
        cluster.start(node).await.map_err(|e| e.context("at first"))?;
    }
    wait_whole(cluster, "after the start").await?;
    if let Some(sync) = s.skip {
        cluster.skip(sync);
    }
    if s.gentle {
        // A new leader removes no file before all clients had time to tell it what they have open.
        sleep(SESSION_TERM + Duration::from_secs(1)).await;
    }
    let mut crew = Crew::start(s, cluster, found).await?;
    let half = s.length / 2;
    let upgrade = s.upgrades.then(|| Upgrade::begin(cluster, half, s.seed.is_multiple_of(2)));
    harm(cluster, s.length, faults, &mut crew).await?;
    cluster.repair().await?;
    cluster.end_replacement().await?;
    if let Some(upgrade) = upgrade {
        upgrade.ends(cluster).await?;
    }
    if s.moves {
        moves::keep_all(cluster).await?;
    }
    crew.stop.store(true, Ordering::Relaxed);
    crew.bury(cluster, true);
    let other = crew.finish(cluster, found, s.seed.is_multiple_of(2)).await?;
    wait_whole(cluster, "after the last fault").await?;
    copies::check(cluster, &other, found).await?;
    leaks::check(cluster, &other, found).await
}

async fn ended<T>(task: tokio::task::JoinHandle<T>) -> Result<T> {
    timeout(Duration::from_secs(300), task)
        .await
        .map_err(|_| {
            Error::new(Code::TimedOut, "a client did not finish 300 s after the last fault")
        })?
        .map_err(|e| Error::new(Code::Io, format!("a client failed: {e}")))
}

/// Waits until all replicas of all chains are in sync.
pub(crate) async fn wait_whole(cluster: &Cluster, when: &str) -> Result<()> {
    let start = Instant::now();
    while !cluster.whole() {
        if start.elapsed() > Duration::from_secs(120) {
            return Err(Error::new(Code::TimedOut, format!("chains were not whole 120 s {when}")));
        }
        sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

/// What ends a fault.
enum Mend {
    Start(u32),
    Disk(u32),
}

/// Makes each fault at its time, and ends it when it is over.
async fn harm(
    cluster: &mut Cluster,
    length: Duration,
    faults: &[Timed],
    crew: &mut Crew,
) -> Result<()> {
    cluster.net.note("the faults begin");
    let begun = Instant::now();
    let mut to_mend: Vec<(Duration, Mend)> = Vec::new();
    let mut faults = faults.iter().peekable();
    loop {
        let next = faults.peek().map_or(length, |t| t.at).min(length);
        let mending = to_mend.iter().map(|m| m.0).min().filter(|at| *at < next);
        let now = mending.unwrap_or(next);
        sleep(now.saturating_sub(begun.elapsed())).await;
        crew.bury(cluster, false);
        cluster.retire();
        cluster.check_starts()?;
        for (_, mend) in to_mend.extract_if(.., |(at, _)| *at <= now).collect::<Vec<_>>() {
            match mend {
                Mend::Start(node) if cluster.nodes().contains(&node) && !cluster.is_up(node) => {
                    cluster.launch(node).await?
                }
                Mend::Start(_) => {}
                Mend::Disk(node) => {
                    if cluster.mend_disk(node) && cluster.is_up(node) {
                        // A supervisor restarts a server whose target failed.
                        cluster.end_life(node);
                        cluster.launch(node).await?;
                    }
                }
            }
        }
        if now >= length {
            return Ok(());
        }
        if mending.is_none()
            && let Some(t) = faults.next()
        {
            make(cluster, &t.fault, t.at, &mut to_mend).await?;
        }
    }
}

async fn make(
    cluster: &mut Cluster,
    fault: &Fault,
    at: Duration,
    to_mend: &mut Vec<(Duration, Mend)>,
) -> Result<()> {
    let until = |lasts: Duration| Some(Instant::now() + lasts);
    match *fault {
        Fault::Crash { node, power, dice, down } => {
            if cluster.is_up(node) {
                cluster.kill_by(node, power, dice);
                to_mend.push((at + down, Mend::Start(node)));
            }
        }
        Fault::Isolate { node, one_way, lasts } => cluster.isolate(node, one_way, until(lasts)),
        Fault::Cut { a, b, one_way, lasts } => cluster.net.cut(a, b, one_way, until(lasts)),
        Fault::Exile { client, lasts } => {
            let mds: Vec<u32> = ANY_MDS.collect();
            cluster.net.cut_off(client, &mds, false, until(lasts));
        }
        Fault::Weather { max_delay, break_per_mille } => {
            cluster.net.set_weather(Weather {
                min_delay: Duration::ZERO,
                max_delay,
                break_per_mille,
            });
        }
        Fault::Message { node, what } => cluster.net.strike(node, what),
        Fault::Jump { node, seconds } => cluster.jump_clock(node, seconds),
        Fault::Drift { dice } => cluster.drift_by(dice),
        Fault::Disk { node, what, lasts } => {
            if cluster.is_up(node) {
                cluster.harm_disk(node, what, at.as_nanos() as u64);
                to_mend.push((at + lasts, Mend::Disk(node)));
            }
        }
        Fault::Decay { node, dice } => cluster.decay(node, dice),
        Fault::Spoil { node, what, dice, down } if cluster.is_up(node) => {
            let busy = cluster.net.is_busy(node);
            if down.is_some() || what == Stored::Log {
                cluster.kill_by(node, dice & 2 == 0, dice);
            }
            cluster.spoil(node, what, dice, busy);
            to_mend.extend(down.map(|down| (at + down, Mend::Start(node))));
            if what == Stored::Log {
                tables::refuses(cluster, node).await?;
                cluster.replace_mds(node).await?;
            }
        }
        Fault::Spoil { .. } => {}
        Fault::Join => {
            let node = cluster.join();
            cluster.launch(node).await?;
        }
        Fault::Replace { old } => cluster.replace_mds(old).await?,
        Fault::Move(change) => moves::ask(cluster, change),
    }
    Ok(())
}
