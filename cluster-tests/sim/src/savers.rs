//! Several clients make files with data and remove or replace them at once: writes may be on the
//! way when a connection is given up, and their file is soon gone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, File};
use strake_proto::{Code, Ino, Result};
use tokio::time::sleep;

use crate::{
    oracle::{CELL, fill},
    workload::{RDWR, Shared, root},
};

/// Largest size of one write, in cells.
const CELLS: usize = 40;

/// A task that does this in its own folder.
pub struct Saver {
    client: Client,
    rng: StdRng,
    found: Shared,
    folder: String,
    next: u32,
}

impl Saver {
    pub fn new(client: Client, folder: String, seed: u64, found: Shared) -> Saver {
        Saver { client, rng: StdRng::seed_from_u64(seed), found, folder, next: 0 }
    }

    /// Runs until told to stop.
    pub async fn run(mut self, stop: Arc<AtomicBool>) {
        let mut folder = None;
        while !stop.load(Relaxed) {
            let saved = match folder {
                Some(dir) => self.save(dir).await,
                None => self.folder().await.map(|dir| folder = Some(dir)),
            };
            if let Err(e) = saved {
                self.found.lock().errors += 1;
                tracing::info!("saver of {}: {e:?}", self.folder);
            }
            sleep(Duration::from_millis(self.rng.random_range(0..40))).await;
        }
    }

    async fn folder(&self) -> Result<Ino> {
        let (client, name) = (&self.client, self.folder.as_bytes());
        match client.mkdir(&root(), client.root(), name, 0o755).await {
            Err(e) if e.code == Code::Exist => {
                Ok(client.lookup(&root(), client.root(), name).await?.ino)
            }
            made => Ok(made?.ino),
        }
    }

    async fn save(&mut self, dir: Ino) -> Result<()> {
        self.next += 1;
        let (client, new) = (self.client.clone(), format!("new{}", self.next));
        let (file, _) =
            client.create(&root(), dir, new.as_bytes(), 0o644, RDWR, true, None).await?;
        let written = self.write(&file).await;
        let closed = file.close().await;
        if self.rng.random_bool(0.5) {
            client.unlink(&root(), dir, new.as_bytes()).await?;
        } else {
            client.rename(&root(), (dir, new.as_bytes()), (dir, b"saved"), 0).await?;
        }
        self.found.lock().replaced += 1;
        written.and(closed)
    }

    async fn write(&mut self, file: &File) -> Result<()> {
        let mut bytes = vec![0; self.rng.random_range(1..=CELLS) * CELL];
        fill(self.next, 0, &mut bytes);
        file.write_all_at(0, &bytes).await?;
        file.fsync().await
    }
}
