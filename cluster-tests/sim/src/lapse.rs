//! Leases that run out while they are in use. Two cases: a client is cut off from the metadata
//! servers while the leader that gave it its leases dies. Before the next leader lets others change
//! anything, this client must have stopped answering from these leases. And a storage server gets
//! the answers that renew its lease late, and then no server hears from it, while clients still
//! reach it: once its chains go on without it, it must not serve reads. Storage servers are not
//! killed here.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_proto::{Code, Error, Result};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    cluster::Cluster,
    draw,
    faults::Strike,
    ledger::{Kind, Ledger},
    nodes::{FIRST_CLIENT, FIRST_OSS, MDS, OSS, servers},
    run::{in_cluster, wait_whole},
    scribes,
    truth::{self, Truth},
    workload::{Findings, Shared},
};

const CLIENTS: u32 = 3;
const ROUNDS: u32 = 4;
/// Mean time between faults of single messages.
const MESSAGE_EVERY: Duration = Duration::from_millis(100);
/// A client that looks in a hurry waits no longer than this, so it gets answers from its cache
/// only.
const HURRY: Duration = Duration::from_millis(15);
/// Extra delay of answers to heartbeats; a heartbeat is given up after half a second.
const LATE_MS: std::ops::Range<u64> = 300..490;
/// Longer than any lease of a storage server, and shorter than the leader waits for a session's
/// report.
const CUT_MS: std::ops::Range<u64> = 2500..4500;

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    pub looks: u64,
    pub reads: u64,
    pub writes: u64,
    pub errors: u64,
    pub violations: Vec<String>,
    pub trace: [u8; 32],
    /// What happened, a line per event, if a promise was broken.
    pub events: Vec<String>,
    pub faults: Ledger,
    pub simulated: Duration,
}

/// Runs a seed.
pub fn run(seed: u64) -> Result<Outcome> {
    in_cluster(seed, async |cluster| {
        let begun = Instant::now();
        let found: Shared = Arc::new(Mutex::new(Findings::new(cluster.net.clone())));
        if let Err(e) = simulate(seed, cluster, &found).await {
            found.lock().broken(e.to_string());
        }
        let mut f = found.lock();
        let (trace, _, events) = cluster.net.trace();
        Outcome {
            looks: f.looks,
            reads: f.reads,
            writes: f.writes,
            errors: f.errors,
            trace,
            events: if f.violations.is_empty() { Vec::new() } else { events },
            violations: std::mem::take(&mut f.violations),
            faults: cluster.net.ledger(),
            simulated: begun.elapsed(),
        }
    })
}

async fn simulate(seed: u64, cluster: &mut Cluster, found: &Shared) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x1a95);
    for node in cluster.nodes() {
        cluster.start(node).await?;
    }
    wait_whole(cluster, "after the start").await?;
    let (first, stop) = (cluster.client(0).await?, Arc::new(AtomicBool::new(false)));
    let counted = truth::files(&first, CLIENTS as usize).await?;
    let written = scribes::files(&first, CLIENTS as usize).await?;
    let mut tasks = Vec::new();
    for id in 0..CLIENTS as usize {
        let client = cluster.client(id as u32 + 1).await?;
        tasks.extend(scribes::start(id, &client, rng.random(), found, &written, &stop).await?);
        let truth = |seed| Truth::new(id, client.clone(), seed, found.clone(), counted.clone());
        tasks.push(tokio::spawn(truth(rng.random()).run(stop.clone())));
        tasks.push(tokio::spawn(truth(rng.random()).in_a_hurry(HURRY).run(stop.clone())));
    }
    let storm = draw::storm_of(cluster.net.clone(), seed, servers(), MESSAGE_EVERY, strike);
    for _ in 0..ROUNDS {
        sleep(Duration::from_millis(rng.random_range(100..1000))).await;
        match rng.random_bool(0.5) {
            true => leader_dies(cluster, &mut rng).await?,
            false => storage_server_lapses(cluster, &mut rng).await?,
        }
        wait_whole(cluster, "after leases had run out").await?;
    }
    storm.abort();
    cluster.repair().await?;
    stop.store(true, Relaxed);
    for t in tasks {
        let late =
            |_| Error::new(Code::TimedOut, "a client did not finish 300 s after the last fault");
        timeout(Duration::from_secs(300), t)
            .await
            .map_err(late)?
            .map_err(|e| Error::new(Code::Io, e.to_string()))?;
    }
    scribes::finish(&first, found, &written).await
}

/// As in other runs, except that repetitions over one connection, which no real transport makes,
/// come earlier: before the chunk has changed so often that its record no longer knows the first
/// copy. Copies over connections that were given up may come at any time.
fn strike(rng: &mut StdRng) -> Strike {
    match draw::strike(rng) {
        Strike::Repeat(late) => Strike::Repeat(late / 8),
        other => other,
    }
}

/// The leader dies while one client is cut off from all metadata servers and so does not hear of
/// it.
async fn leader_dies(cluster: &mut Cluster, rng: &mut StdRng) -> Result<()> {
    let Some(leader) = cluster.leader() else { return Ok(()) };
    cluster.drift_by(rng.random());
    let (client, all): (u32, Vec<u32>) =
        (FIRST_CLIENT + rng.random_range(1..=CLIENTS), (1..=MDS).collect());
    let until = Instant::now() + Duration::from_millis(rng.random_range(CUT_MS));
    cluster.net.cut_off(client, &all, false, Some(until));
    sleep(Duration::from_millis(rng.random_range(0..200))).await;
    cluster.kill(leader, rng.random_bool(0.5));
    tokio::time::sleep_until(until).await;
    cluster.start(leader).await
}

/// A storage server, sometimes with a slow clock, gets the renewals of its lease late; then no
/// other server hears from it any more.
async fn storage_server_lapses(cluster: &mut Cluster, rng: &mut StdRng) -> Result<()> {
    let (node, late) =
        (FIRST_OSS + rng.random_range(0..OSS), Duration::from_millis(rng.random_range(LATE_MS)));
    if rng.random_bool(0.5) {
        cluster.slow_clock(node);
    } else {
        cluster.drift_by(rng.random());
    }
    let until = Instant::now() + Duration::from_millis(1000 + rng.random_range(CUT_MS));
    cluster.net.note(&format!("answers of metadata servers to {node} take {late:?} more"));
    cluster.net.made(Kind::Delayed, false);
    (1..=MDS).for_each(|mds| cluster.net.lag(mds, node, late, until));
    sleep(Duration::from_millis(rng.random_range(600..1100))).await;
    cluster.net.note(&format!("servers hear nothing of {node}"));
    let fault = cluster.net.cutting(Kind::OneWay);
    for other in cluster.nodes().into_iter().filter(|n| *n != node) {
        cluster.net.block(node, other, fault, Some(until));
    }
    tokio::time::sleep_until(until).await;
    Ok(())
}
