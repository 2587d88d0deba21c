//! One file that clients hand to each other like a baton. The player with the baton must read what
//! the previous players wrote, even if they neither synced nor closed the file; then it may write
//! some cells. Writes of a client that lost its session may be lost, but a write that was found
//! missing must not appear later.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng, seq::IndexedRandom};
use strake_client::{Client, File};
use strake_proto::{Ino, Result};
use tokio::{
    sync::{Mutex as AsyncMutex, Notify},
    time::{Instant, sleep, timeout},
};

use crate::{
    cluster::Cluster,
    draw,
    ledger::Ledger,
    net::Weather,
    nodes::{FIRST_CLIENT, MDS, servers},
    oracle::{CELL, fill},
    plant::Plant,
    run::in_cluster,
    workload::{RDWR, read_all, root},
};

const CLIENTS: u32 = 3;
const CELLS: usize = 64;
const LENGTH: Duration = Duration::from_secs(25);
/// Mean time between faults of single messages.
const MESSAGE_EVERY: Duration = Duration::from_millis(100);

/// The last write of a cell that returned: its tag, its writer, and how many sessions the writer
/// had lost by then.
#[derive(Clone, Copy, Default)]
struct Cell {
    tag: u32,
    writer: usize,
    lost: u64,
    /// The last write failed: the next read may find it or not.
    unknown: bool,
}

/// A write that a read did not find. It is excused if the writer has lost a session since.
struct Missing {
    what: String,
    writer: usize,
    lost: u64,
}

#[derive(Default)]
struct Model {
    cells: Vec<Cell>,
    missing: Vec<Missing>,
}

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    pub handed_on: u64,
    pub writes: u64,
    /// Of those, writes that were held back.
    pub held: u64,
    /// Writes that were lost with a session.
    pub lost: u64,
    pub violations: Vec<String>,
    pub trace: [u8; 32],
    /// What happened, a line per event, if a promise was broken.
    pub events: Vec<String>,
    pub faults: Ledger,
    pub simulated: Duration,
}

/// Rung when a player has handed the file on while its client still holds dirty data. `by` is the
/// number of the last such client.
#[derive(Default)]
struct Bell {
    rung: Notify,
    by: AtomicU32,
}

struct Player {
    id: usize,
    bell: Arc<Bell>,
    client: Client,
    ino: Ino,
    rng: StdRng,
    baton: Arc<AsyncMutex<Model>>,
    out: Arc<Mutex<Outcome>>,
    next_tag: u32,
    kept: Option<File>,
}

fn tag_of(bytes: &[u8]) -> u32 {
    bytes.first_chunk::<8>().map_or(0, |w| (u64::from_le_bytes(*w) >> 32) as u32)
}

fn cell_of(tag: u32, cell: usize) -> [u8; CELL] {
    let mut bytes = [0; CELL];
    if tag != 0 {
        fill(tag, (cell * CELL) as u64, &mut bytes);
    }
    bytes
}

impl Player {
    async fn run(mut self, stop: Arc<AtomicBool>) -> Client {
        while !stop.load(Relaxed) {
            let baton = self.baton.clone();
            let mut model = baton.lock().await;
            if let Err(e) = self.play(&mut model).await {
                tracing::info!("player {}: {e}", self.id);
            }
            drop(model);
            if self.client.stats().held_bytes > 0 {
                self.bell.by.store(self.id as u32 + 1, Relaxed);
                self.bell.rung.notify_waiters();
            }
            self.out.lock().handed_on += 1;
            sleep(Duration::from_millis(self.rng.random_range(0..150))).await;
        }
        if let Some(f) = self.kept.take() {
            let _ = f.close().await;
        }
        self.client
    }

    async fn play(&mut self, model: &mut Model) -> Result<()> {
        let writes = self.rng.random_bool(0.6);
        let file = match self.kept.take() {
            Some(f) => f,
            None => self.client.open(&root(), self.ino, if writes { RDWR } else { 0 }).await?.0,
        };
        self.look(&file, model).await?;
        for _ in 0..self.rng.random_range(0..6) {
            if file.flags() & RDWR != 0 {
                self.write(&file, model).await?;
            }
        }
        match self.rng.random_range(0..10) {
            0 => file.fsync().await?,
            1..=6 => file.close().await?,
            7 => drop(file),
            _ => self.kept = Some(file),
        }
        Ok(())
    }

    async fn look(&self, file: &File, model: &mut Model) -> Result<()> {
        let seen = read_all(file, (CELLS * CELL) as u64).await?;
        check(model, &seen, self.id, &self.out);
        Ok(())
    }

    async fn write(&mut self, file: &File, model: &mut Model) -> Result<()> {
        let first = self.rng.random_range(0..CELLS);
        let count = self.rng.random_range(1..=(CELLS - first).min(12));
        self.next_tag += 1;
        let tag = self.next_tag;
        let bytes: Vec<u8> = (first..first + count).flat_map(|c| cell_of(tag, c)).collect();
        let lost = self.client.stats().sessions_lost;
        let wrote = file.write_all_at((first * CELL) as u64, &bytes).await;
        for c in &mut model.cells[first..first + count] {
            *c = Cell { tag, writer: self.id, lost, unknown: wrote.is_err() };
        }
        self.out.lock().writes += 1;
        wrote
    }
}

fn check(model: &mut Model, seen: &[u8], by: usize, out: &Mutex<Outcome>) {
    for i in 0..CELLS {
        let mut there = [0; CELL];
        let part = seen.get(i * CELL..).map_or(&[][..], |s| &s[..s.len().min(CELL)]);
        there[..part.len()].copy_from_slice(part);
        let tag = tag_of(&there);
        let c = model.cells[i];
        if there != cell_of(tag, i) {
            out.lock()
                .violations
                .push(format!("player {by}: cell {i} is torn or of another place"));
        } else if tag != c.tag && !c.unknown {
            let what = format!(
                "player {by}: cell {i} has {tag:#x} and not {:#x}, which player {} wrote",
                c.tag, c.writer
            );
            model.missing.push(Missing { what, writer: c.writer, lost: c.lost });
            model.cells[i].tag = tag;
            // The last writer is not known any more. From here on the cell must keep what was read.
            (model.cells[i].writer, model.cells[i].lost) = (usize::MAX, 0);
        }
        model.cells[i].tag = tag;
        model.cells[i].unknown = false;
    }
}

/// Runs a seed on a single-threaded runtime whose clock only moves when nothing else can.
pub fn run(seed: u64, plant: Option<Plant>) -> Result<Outcome> {
    in_cluster(seed, async |cluster| simulate(seed, plant, cluster).await)?
}

async fn simulate(seed: u64, plant: Option<Plant>, cluster: &mut Cluster) -> Result<Outcome> {
    cluster.write_back = None;
    let begun = Instant::now();
    let mut rng = StdRng::seed_from_u64(seed ^ 0xba70);
    if rng.random_bool(0.5) {
        cluster.widen(seed);
    }
    for node in cluster.nodes() {
        cluster.start(node).await?;
    }
    while !cluster.whole() {
        sleep(Duration::from_millis(100)).await;
    }
    let first = cluster.client(0).await?;
    let (file, attr) =
        first.create(&root(), first.root(), b"baton", 0o644, RDWR, true, None).await?;
    file.close().await?;
    if let Some(plant) = plant {
        cluster.net.plant(plant);
    }
    let baton = Arc::new(AsyncMutex::new(Model {
        cells: vec![Cell::default(); CELLS],
        ..Model::default()
    }));
    let (out, stop) = (Arc::new(Mutex::new(Outcome::default())), Arc::new(AtomicBool::new(false)));
    let (mut players, bell) = (Vec::new(), Arc::<Bell>::default());
    for id in 1..=CLIENTS {
        let player = Player {
            id: id as usize - 1,
            bell: bell.clone(),
            client: cluster.client(id).await?,
            ino: attr.ino,
            rng: StdRng::seed_from_u64(rng.random()),
            baton: baton.clone(),
            out: out.clone(),
            next_tag: id << 24,
            kept: None,
        };
        players.push(tokio::spawn(player.run(stop.clone())));
    }
    let storm = draw::storm(cluster.net.clone(), seed, servers(), MESSAGE_EVERY);
    harm(cluster, &mut rng, &bell).await?;
    storm.abort();
    cluster.repair().await?;
    stop.store(true, Relaxed);
    let mut clients = Vec::new();
    for p in players {
        clients.push(
            p.await.map_err(|e| strake_proto::Error::new(strake_proto::Code::Io, e.to_string()))?,
        );
    }
    let mut model = baton.lock().await;
    let (file, _) = first.open(&root(), attr.ino, 0).await?;
    check(&mut model, &read_all(&file, (CELLS * CELL) as u64).await?, CLIENTS as usize, &out);
    let mut out = std::mem::take(&mut *out.lock());
    for m in std::mem::take(&mut model.missing) {
        match clients.get(m.writer).is_some_and(|c| c.stats().sessions_lost > m.lost) {
            true => out.lost += 1,
            false => out.violations.push(m.what),
        }
    }
    out.held = clients.iter().map(|c| c.stats().held_writes).sum();
    let (trace, _, events) = cluster.net.trace();
    (out.trace, out.faults, out.simulated) = (trace, cluster.net.ledger(), begun.elapsed());
    if !out.violations.is_empty() {
        out.events = events;
    }
    Ok(out)
}

/// Kills metadata servers, isolates servers, and cuts clients off from the metadata servers or from
/// all servers, sometimes for long enough that their sessions end.
async fn harm(cluster: &mut Cluster, rng: &mut StdRng, bell: &Bell) -> Result<()> {
    let end = Instant::now() + LENGTH;
    while Instant::now() < end {
        sleep(Duration::from_millis(rng.random_range(100..2500))).await;
        let nodes = cluster.nodes();
        let node = *nodes.choose(rng).unwrap_or(&1);
        match rng.random_range(0..10) {
            // Storage servers are not killed: what is not synced is missing for a while after such
            // a crash, until the client sends it again.
            0 | 1 if node <= MDS && cluster.is_up(node) => cluster.kill(node, false),
            2 => cluster.isolate(node, rng.random_bool(0.3), None),
            3 => {
                // The other players need the dirty data that this client can no longer send.
                let _ = timeout(Duration::from_secs(3), bell.rung.notified()).await;
                let client = FIRST_CLIENT + bell.by.load(Relaxed).max(1);
                cluster.net.cut_off(client, &nodes, false, None);
                sleep(Duration::from_millis(rng.random_range(6000..12_000))).await;
                cluster.net.heal();
            }
            4..=6 => {
                let client = FIRST_CLIENT + rng.random_range(1..=CLIENTS);
                let from = if rng.random_bool(0.5) { MDS } else { u32::MAX };
                let from: Vec<u32> = nodes.iter().copied().filter(|n| *n <= from).collect();
                cluster.net.cut_off(client, &from, false, None);
                sleep(Duration::from_millis(rng.random_range(500..12_000))).await;
                cluster.net.heal();
            }
            7 => {
                let max_delay = Duration::from_millis(rng.random_range(1..30));
                cluster.net.set_weather(Weather {
                    min_delay: Duration::ZERO,
                    max_delay,
                    break_per_mille: 2,
                });
            }
            _ => cluster.net.heal(),
        }
        cluster.drift();
        for node in nodes {
            if !cluster.is_up(node) && rng.random_bool(0.6) {
                cluster.net.heal();
                cluster.start(node).await?;
            }
        }
    }
    Ok(())
}
