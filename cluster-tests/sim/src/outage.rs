//! One thing at a time is broken, while clients make small calls without a pause: no call may take
//! five seconds, and none may fail. One server is broken, or its links to all others or to one, or
//! its disk. Then everything is repaired, and all chains are in sync again, before the next round.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, File};
use strake_proto::{Code, Error, Ino, Result};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use crate::{
    cluster::Cluster,
    faults::Harm,
    ledger::Ledger,
    nodes::{FIRST_CLIENT, FIRST_OSS, called},
    oracle::{CELL, fill},
    run::{in_cluster, wait_whole},
    workload::{Findings, RDWR, Shared, read_all, root},
};

const CLIENTS: u32 = 2;
const ROUNDS: u32 = 4;
/// The longest time that a call may take when any one thing fails.
const LIMIT: Duration = Duration::from_secs(5);
/// How long each fault lasts: longer than the limit.
const LASTS_MS: std::ops::Range<u64> = 6000..15_000;
const CELLS: u64 = 200;

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    pub calls: u64,
    /// The longest call.
    pub longest: Duration,
    pub violations: Vec<String>,
    pub trace: [u8; 32],
    /// What happened, a line per event, if a promise was broken.
    pub events: Vec<String>,
    pub faults: Ledger,
    pub simulated: Duration,
}

/// What is broken now, and what the clients have seen.
#[derive(Default)]
struct Now {
    broken: String,
    calls: u64,
    longest: Duration,
}

/// A client that makes small calls.
#[derive(Clone)]
struct Steady {
    id: u32,
    client: Client,
    found: Shared,
    now: Arc<Mutex<Now>>,
    stop: Arc<AtomicBool>,
}

/// Runs a seed.
pub fn run(seed: u64) -> Result<Outcome> {
    in_cluster(seed, async |cluster| {
        let begun = Instant::now();
        cluster.net.notices_silence();
        let found: Shared = Arc::new(Mutex::new(Findings::new(cluster.net.clone())));
        let now: Arc<Mutex<Now>> = Arc::default();
        if let Err(e) = simulate(seed, cluster, &found, &now).await {
            found.lock().broken(e.to_string());
        }
        let violations = std::mem::take(&mut found.lock().violations);
        let (trace, _, events) = cluster.net.trace();
        let now = now.lock();
        Outcome {
            calls: now.calls,
            longest: now.longest,
            events: if violations.is_empty() { Vec::new() } else { events },
            violations,
            trace,
            faults: cluster.net.ledger(),
            simulated: begun.elapsed(),
        }
    })
}

async fn simulate(
    seed: u64,
    cluster: &mut Cluster,
    found: &Shared,
    now: &Arc<Mutex<Now>>,
) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed ^ 0x0a7e);
    for node in cluster.nodes() {
        cluster.start(node).await?;
    }
    wait_whole(cluster, "after the start").await?;
    let (stop, mut tasks) = (Arc::new(AtomicBool::new(false)), Vec::new());
    for id in 1..=CLIENTS {
        let client = cluster.client(id).await?;
        let of_client =
            Steady { id, client, found: found.clone(), now: now.clone(), stop: stop.clone() };
        tasks.extend(of_client.start(rng.random()).await?);
    }
    for _ in 0..ROUNDS {
        sleep(Duration::from_millis(rng.random_range(500..2000))).await;
        one(cluster, &mut rng, now).await?;
        now.lock().broken = "what was broken before is mended".into();
        cluster.repair().await?;
        wait_whole(cluster, "after one thing was broken").await?;
        now.lock().broken.clear();
    }
    stop.store(true, Relaxed);
    for t in tasks {
        let late =
            |_| Error::new(Code::TimedOut, "a client did not finish 300 s after the last fault");
        timeout(Duration::from_secs(300), t)
            .await
            .map_err(late)?
            .map_err(|e| Error::new(Code::Io, e.to_string()))?;
    }
    Ok(())
}

/// Breaks one thing and waits for as long as that is to last.
async fn one(cluster: &mut Cluster, rng: &mut StdRng, now: &Arc<Mutex<Now>>) -> Result<()> {
    let nodes = cluster.nodes();
    let node = nodes[rng.random_range(0..nodes.len())];
    let other = nodes.iter().copied().chain((1..=CLIENTS).map(|n| FIRST_CLIENT + n));
    let others: Vec<u32> = other.filter(|n| *n != node).collect();
    let other = others[rng.random_range(0..others.len())];
    let lasts = Duration::from_millis(rng.random_range(LASTS_MS));
    let until = Some(Instant::now() + lasts);
    let broken = |what: String| now.lock().broken = what;
    match rng.random_range(0..10) {
        0..=3 => {
            let power = rng.random_bool(0.5);
            broken(format!("{} is gone, power={power}", called(node)));
            cluster.kill(node, power);
        }
        4 | 5 => {
            let one_way = rng.random_bool(0.3);
            broken(format!("{} is cut off, one_way={one_way}", called(node)));
            cluster.isolate(node, one_way, until);
        }
        6 | 7 => {
            let (one_way, a, b) = match rng.random_bool(0.5) {
                true => (rng.random_bool(0.5), node, other),
                false => (rng.random_bool(0.5), other, node),
            };
            broken(format!(
                "the link from {} to {} is cut, one_way={one_way}",
                called(a),
                called(b)
            ));
            cluster.net.cut(a, b, one_way, until);
        }
        _ => {
            // A full disk of a storage server is left out: the writer gets that error.
            let what = match rng.random_bool(0.5) {
                true => Harm::Crawl(Duration::from_millis(rng.random_range(5..100))),
                false if node >= FIRST_OSS => Harm::Error,
                false => Harm::Filled,
            };
            broken(format!("the disk of {}: {what:?}", called(node)));
            cluster.harm_disk(node, what, rng.random());
        }
    }
    sleep(lasts).await;
    Ok(())
}

impl Steady {
    /// Starts three tasks: one writes and syncs, one reads, one makes and renames files.
    async fn start(&self, seed: u64) -> Result<[JoinHandle<()>; 3]> {
        let (mut rng, name) = (StdRng::seed_from_u64(seed), format!("steady{}", self.id));
        let (client, top) = (&self.client, self.client.root());
        let dir = client.mkdir(&root(), top, name.as_bytes(), 0o755).await?.ino;
        let (file, _) = client.create(&root(), dir, b"file", 0o644, RDWR, false, None).await?;
        let (written, read): (u64, u64) = (rng.random(), rng.random());
        let file = Arc::new(file);
        Ok([
            tokio::spawn(self.clone().writes(file.clone(), written)),
            tokio::spawn(self.clone().reads(file, read)),
            tokio::spawn(self.clone().names(dir)),
        ])
    }

    /// A call that must neither fail nor take too long.
    async fn call<T>(&self, what: &str, call: impl Future<Output = Result<T>>) -> Option<T> {
        let (begun, broken) = (Instant::now(), self.now.lock().broken.clone());
        let done = call.await;
        let took = begun.elapsed();
        let after = {
            let mut now = self.now.lock();
            now.calls += 1;
            now.longest = now.longest.max(took);
            now.broken.clone()
        };
        let wrong = match &done {
            Err(e) => Some(format!("failed after {took:?}: {e}")),
            Ok(_) if took >= LIMIT => Some(format!("took {took:?}")),
            Ok(_) => None,
        };
        if let Some(wrong) = wrong {
            let while_ = if broken == after { broken } else { format!("{broken}, then {after}") };
            self.found.lock().broken(format!("client {}: {what} {wrong} ({while_})", self.id));
        }
        done.ok()
    }

    async fn pause(&self, rng: &mut StdRng) {
        sleep(Duration::from_millis(rng.random_range(5..60))).await;
    }

    async fn writes(self, file: Arc<File>, seed: u64) {
        let (mut rng, mut tag) = (StdRng::seed_from_u64(seed), self.id << 24 | 1);
        while !self.stop.load(Relaxed) {
            let (first, count) = (rng.random_range(0..CELLS), rng.random_range(1..=20));
            let (offset, mut bytes) = (first * CELL as u64, vec![0; count * CELL]);
            fill(tag, offset, &mut bytes);
            self.call("a write", file.write_all_at(offset, &bytes)).await;
            tag += 1;
            if rng.random_bool(0.3) {
                self.call("an fsync", file.fsync()).await;
            }
            self.pause(&mut rng).await;
        }
    }

    /// Reads past the page cache what the same client writes. Whether the bytes are right is
    /// checked in other kinds of run.
    async fn reads(self, file: Arc<File>, seed: u64) {
        const O_DIRECT: u32 = 0o40000;
        let mut rng = StdRng::seed_from_u64(seed);
        let Some((past, _)) =
            self.call("an open", self.client.open(&root(), file.ino(), O_DIRECT)).await
        else {
            return;
        };
        while !self.stop.load(Relaxed) {
            self.call("a read", read_all(&past, CELLS * 2 * CELL as u64)).await;
            self.pause(&mut rng).await;
        }
        self.call("a close", past.close()).await;
    }

    async fn names(self, dir: Ino) {
        let (mut rng, mut n) = (StdRng::seed_from_u64(dir), 0u64);
        while !self.stop.load(Relaxed) {
            n += 1;
            let (new, name, c) = (format!("n{n}"), b"name", &self.client);
            self.call("a create", c.mknod(&root(), dir, new.as_bytes(), 0o100_644, 0)).await;
            self.call("a rename", c.rename(&root(), (dir, new.as_bytes()), (dir, name), 0)).await;
            self.call("a lookup", c.lookup(&root(), dir, name)).await;
            self.call("a stat of the root", c.getattr(&root(), c.root())).await;
            self.call("an unlink", c.unlink(&root(), dir, name)).await;
            self.pause(&mut rng).await;
        }
    }
}
