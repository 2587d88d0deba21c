//! Metadata never goes back: once a client has been shown a version, or its change has been
//! acknowledged, no client may be shown an older one. Each client changes one file and its name,
//! and looks at the files of all, mostly from its cache (`docs/leases.md`).

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, SetAttr};
use strake_proto::{Code, Ino, Result};
use tokio::time::{sleep, timeout};

use crate::workload::{Shared, root};

/// Versions of something that one client increments.
#[derive(Clone, Copy, Default)]
pub struct Counted {
    /// The newest version that any client was shown or whose change was acknowledged, and the
    /// newest whose change has begun.
    told: u64,
    begun: u64,
    /// A change failed: it may still take effect later.
    lost: bool,
}

impl Counted {
    fn is_still(&self) -> bool {
        !self.lost && self.told == self.begun
    }
}

/// For each file: its modification time in nanoseconds, and the number in its name.
pub type Model = Arc<Mutex<Vec<[Counted; 2]>>>;

const TIME: usize = 0;
const NAME: usize = 1;

/// One task of a client.
pub struct Truth {
    id: usize,
    client: Client,
    rng: StdRng,
    found: Shared,
    model: Model,
    inos: Vec<Ino>,
    /// It only looks, and gives up after this time, so it gets answers from the cache only.
    hurried: Option<Duration>,
}

fn name(file: usize, number: u64) -> String {
    format!("truth{file}-{number}")
}

/// Makes a file for each of `count` clients.
pub async fn files(client: &Client, count: usize) -> Result<(Model, Vec<Ino>)> {
    let mut inos = Vec::new();
    for file in 0..count {
        let attr =
            client.mknod(&root(), client.root(), name(file, 0).as_bytes(), 0o100_644, 0).await?;
        client
            .setattr(&root(), SetAttr { ino: attr.ino, mtime_ns: Some(0), ..Default::default() })
            .await?;
        inos.push(attr.ino);
    }
    Ok((Arc::new(Mutex::new(vec![Default::default(); count])), inos))
}

impl Truth {
    /// `id`: the number of the file that it changes, from 0.
    pub fn new(
        id: usize,
        client: Client,
        seed: u64,
        found: Shared,
        (model, inos): (Model, Vec<Ino>),
    ) -> Truth {
        Truth { id, client, rng: StdRng::seed_from_u64(seed), found, model, inos, hurried: None }
    }

    /// A task that only looks, and never waits longer than this.
    pub fn in_a_hurry(self, patience: Duration) -> Truth {
        Truth { hurried: Some(patience), ..self }
    }

    pub async fn run(mut self, stop: Arc<AtomicBool>) {
        while !stop.load(Relaxed) {
            let file = self.rng.random_range(0..self.inos.len());
            if let Some(patience) = self.hurried {
                let look = async {
                    match self.rng.random_bool(0.5) {
                        true => self.stat(file).await,
                        false => self.look_up(file).await,
                    }
                };
                let _ = timeout(patience, look).await;
                sleep(Duration::from_millis(self.rng.random_range(0..20))).await;
                continue;
            }
            match self.rng.random_range(0..20) {
                0 => self.change(TIME).await,
                1 => self.change(NAME).await,
                2..=10 => self.stat(file).await,
                _ => self.look_up(file).await,
            }
            sleep(Duration::from_millis(self.rng.random_range(0..20))).await;
        }
    }

    fn violation(&self, what: String) {
        self.found.lock().broken(format!("client {}: {what}", self.id + 1));
    }

    async fn change(&mut self, what: usize) {
        let (me, next) = {
            let c = &mut self.model.lock()[self.id][what];
            if c.lost {
                return;
            }
            c.begun += 1;
            (self.id, c.begun)
        };
        let result = if what == TIME {
            let set =
                SetAttr { ino: self.inos[me], mtime_ns: Some(next as i64), ..Default::default() };
            self.client.setattr(&root(), set).await.map(drop)
        } else {
            let (dir, old, new) = (self.client.root(), name(me, next - 1), name(me, next));
            self.client.rename(&root(), (dir, old.as_bytes()), (dir, new.as_bytes()), 0).await
        };
        let c = &mut self.model.lock()[me][what];
        match result {
            Ok(()) => {
                c.told = c.told.max(next);
                tracing::debug!("client {}: changed {what} of file {me} to version {next}", me + 1);
            }
            Err(e) => {
                tracing::info!("client {}: {e:?}", me + 1);
                c.lost = true;
            }
        }
    }

    async fn stat(&mut self, file: usize) {
        let before = self.model.lock()[file][TIME];
        let Ok(attr) = self.client.getattr(&root(), self.inos[file]).await else { return };
        self.check_time(file, before, attr.mtime_ns as u64);
    }

    fn check_time(&self, file: usize, before: Counted, seen: u64) {
        self.found.lock().looks += 1;
        tracing::debug!("client {}: file {file} has version {seen}", self.id + 1);
        let c = &mut self.model.lock()[file][TIME];
        let begun = c.begun;
        if !c.lost {
            c.told = c.told.max(seen);
        }
        if !before.lost && (seen < before.told || seen > begun) {
            let told = before.told;
            self.violation(format!(
                "file {file} has version {seen}; {told} had been told, {begun} was begun"
            ));
        }
    }

    /// Looks up the newest name that was told, or the one before.
    async fn look_up(&mut self, file: usize) {
        let [time, before] = self.model.lock()[file];
        let number = before.told.saturating_sub(self.rng.random_range(0..2));
        let looked =
            self.client.lookup(&root(), self.client.root(), name(file, number).as_bytes()).await;
        let after = self.model.lock()[file][NAME];
        self.found.lock().looks += 1;
        match looked {
            Ok(attr) => {
                if number < before.told && !before.lost {
                    self.violation(format!(
                        "file {file} has the name {number}, and {} had been told",
                        before.told
                    ));
                }
                self.check_time(file, time, attr.mtime_ns as u64);
            }
            Err(e) if e.code == Code::NoEnt => {
                if before.is_still()
                    && after.is_still()
                    && number == before.told
                    && after.told == before.told
                {
                    self.violation(format!(
                        "file {file} does not have the name {number}, and nobody took it"
                    ));
                }
            }
            Err(_) => {}
        }
    }
}
