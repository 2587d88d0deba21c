//! Reads never go back: after any client has read a version of some bytes, or a write of it has
//! returned, no client may read an older one. Each client writes one file, and all clients read all
//! files, from any replica. For clusters whose storage servers are not killed: with a server dies
//! what is not synced, so bytes could be seen and then be gone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, File};
use strake_proto::{Ino, Result};
use tokio::{task::JoinHandle, time::sleep};

use crate::{
    oracle::{CELL, fill},
    workload::{RDWR, Shared, read_all, root},
};

const CELLS: usize = 16;
/// Readers at each client.
const READERS: u64 = 2;

/// The newest version of a cell that was read or whose write has returned, and the newest whose
/// write has begun.
#[derive(Clone, Copy)]
struct Cell {
    told: u32,
    begun: u32,
}

/// The cells of each file.
#[derive(Clone)]
pub struct Model(Arc<Mutex<Vec<Vec<Cell>>>>);

/// One writer or reader.
pub struct Scribe {
    /// The number of the file that it writes, from 0.
    id: usize,
    rng: StdRng,
    found: Shared,
    model: Model,
    files: Vec<File>,
}

fn cell_of(version: u32, cell: usize) -> [u8; CELL] {
    let mut bytes = [0; CELL];
    fill(version, (cell * CELL) as u64, &mut bytes);
    bytes
}

/// Makes a file for each of `count` clients.
pub async fn files(client: &Client, count: usize) -> Result<(Model, Vec<Ino>)> {
    let (mut inos, first) =
        (Vec::new(), (0..CELLS).flat_map(|c| cell_of(1, c)).collect::<Vec<u8>>());
    for n in 0..count {
        let name = format!("bytes{n}");
        let (file, attr) =
            client.create(&root(), client.root(), name.as_bytes(), 0o644, RDWR, true, None).await?;
        file.write_all_at(0, &first).await?;
        file.fsync().await?;
        file.close().await?;
        inos.push(attr.ino);
    }
    let cells = vec![vec![Cell { told: 1, begun: 1 }; CELLS]; count];
    Ok((Model(Arc::new(Mutex::new(cells))), inos))
}

/// Starts a writer and some readers at this client.
pub async fn start(
    id: usize,
    client: &Client,
    seed: u64,
    found: &Shared,
    (model, inos): &(Model, Vec<Ino>),
    stop: &Arc<AtomicBool>,
) -> Result<Vec<JoinHandle<()>>> {
    let mut tasks = Vec::new();
    for n in 0..=READERS {
        let rng = StdRng::seed_from_u64(seed ^ n << 40);
        let (found, model) = (found.clone(), model.clone());
        let mut scribe = Scribe { id, rng, found, model, files: Vec::new() };
        for (file, ino) in inos.iter().enumerate() {
            let flags = if n == 0 && file == id { RDWR } else { 0 };
            scribe.files.push(client.open(&root(), *ino, flags).await?.0);
        }
        let stop = stop.clone();
        tasks.push(tokio::spawn(async move { scribe.run(n == 0, &stop).await }));
    }
    Ok(tasks)
}

/// At the end, when nothing is broken any more: another client reads everything once more.
pub async fn finish(
    client: &Client,
    found: &Shared,
    (model, inos): &(Model, Vec<Ino>),
) -> Result<()> {
    let (rng, model) = (StdRng::seed_from_u64(0), model.clone());
    let mut last = Scribe { id: inos.len(), rng, found: found.clone(), model, files: Vec::new() };
    for (n, ino) in inos.iter().enumerate() {
        last.files.push(client.open(&root(), *ino, 0).await?.0);
        last.read(n).await?;
    }
    for f in last.files {
        f.close().await?;
    }
    Ok(())
}

impl Scribe {
    async fn run(mut self, writes: bool, stop: &AtomicBool) {
        while !stop.load(Relaxed) {
            let done = if writes { self.write().await } else { self.read_any().await };
            if let Err(e) = done {
                self.found.lock().errors += 1;
                tracing::info!("scribe {}: {e}", self.id);
            }
            sleep(Duration::from_millis(self.rng.random_range(0..20))).await;
        }
        for f in std::mem::take(&mut self.files) {
            let _ = f.close().await;
        }
    }

    async fn write(&mut self) -> Result<()> {
        let cell = self.rng.random_range(0..CELLS);
        let version = {
            let c = &mut self.model.0.lock()[self.id][cell];
            c.begun += 1;
            c.begun
        };
        tracing::debug!("scribe {}: writes version {version} of cell {cell}", self.id);
        self.files[self.id].write_all_at((cell * CELL) as u64, &cell_of(version, cell)).await?;
        tracing::debug!("scribe {}: wrote version {version} of cell {cell}", self.id);
        let c = &mut self.model.0.lock()[self.id][cell];
        c.told = c.told.max(version);
        self.found.lock().writes += 1;
        Ok(())
    }

    async fn read_any(&mut self) -> Result<()> {
        let file = self.rng.random_range(0..self.files.len());
        self.read(file).await
    }

    async fn read(&mut self, file: usize) -> Result<()> {
        let before = self.model.0.lock()[file].clone();
        let seen = read_all(&self.files[file], (CELLS * CELL) as u64).await?;
        self.found.lock().reads += 1;
        for (i, told) in before.iter().map(|c| c.told).enumerate() {
            let there = seen.get(i * CELL..(i + 1) * CELL).unwrap_or_default();
            let version =
                there.first_chunk::<8>().map_or(0, |w| (u64::from_le_bytes(*w) >> 32) as u32);
            let begun = {
                let c = &mut self.model.0.lock()[file][i];
                c.told = c.told.max(version.min(c.begun));
                c.begun
            };
            let whole = there == cell_of(version, i);
            if !whole || version < told || version > begun {
                let what = if whole {
                    format!("version {version}")
                } else {
                    "torn or foreign bytes".into()
                };
                let (id, at) = (self.id + 1, crate::run::simulated());
                self.found.lock().broken(format!(
                    "client {id}: cell {i} of file {file} ({:#x}) has {what}; {told} had been told, {begun} was begun ({at:.3?})",
                    self.files[file].ino()
                ));
            }
        }
        Ok(())
    }
}
