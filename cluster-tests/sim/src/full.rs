//! Small targets that several clients with write-back fill, empty and fill again. The write that
//! lacks disk space must return the error; a sync must never fail for the bytes of a write that has
//! already returned.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, File};
use strake_fabric::Buf;
use strake_proto::{Code, Error, Result};
use tokio::time::{Instant, sleep};

use crate::{
    cluster::Cluster,
    run::in_cluster,
    workload::{RDWR, read_all, root},
};

const CLIENTS: u32 = 3;
const TARGET_BYTES: u64 = 10 << 20;
const FILE_BYTES: u64 = 8 << 20;
const LENGTH: Duration = Duration::from_secs(20);

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    pub writes: u64,
    /// Of those, writes that were held back.
    pub held: u64,
    /// Writes that were refused for lack of space.
    pub refused: u64,
    pub violations: Vec<String>,
}

/// One client with a file of its own.
struct Filler {
    name: String,
    client: Client,
    file: File,
    bytes: Vec<u8>,
    rng: StdRng,
    out: Arc<Mutex<Outcome>>,
}

impl Filler {
    async fn new(id: u32, client: Client, seed: u64, out: Arc<Mutex<Outcome>>) -> Result<Filler> {
        let name = format!("full{id}");
        let (file, _) =
            client.create(&root(), client.root(), name.as_bytes(), 0o644, RDWR, true, None).await?;
        Ok(Filler { name, client, file, bytes: Vec::new(), rng: StdRng::seed_from_u64(seed), out })
    }

    fn violation(&self, what: String) {
        self.out.lock().violations.push(format!("{}: {what}", self.name));
    }

    /// Writes a few bytes or many blocks, at the end of the file or at any place in it. Returns
    /// whether there was space.
    async fn write(&mut self) -> Result<bool> {
        let most = [300, 5000, 60_000][self.rng.random_range(0..3)];
        let len = self.rng.random_range(1..most);
        let end = self.bytes.len();
        let at =
            if end == 0 || self.rng.random_bool(0.8) { end } else { self.rng.random_range(0..end) };
        let data = vec![self.rng.random(); len];
        let done = match self.file.write(at as u64, vec![Buf::copy_from(&data)]).await {
            Err(e) if e.code == Code::NoSpc => 0,
            other => other?,
        };
        let mut out = self.out.lock();
        (out.writes, out.refused) = (out.writes + 1, out.refused + u64::from(done < len));
        self.bytes.resize(end.max(at + done), 0);
        self.bytes[at..at + done].copy_from_slice(&data[..done]);
        Ok(done == len)
    }

    async fn sync(&self) -> Result<()> {
        match self.file.fsync().await {
            Err(e) if e.code == Code::NoSpc => {
                self.violation(format!("a sync found no space: {e}"))
            }
            other => other?,
        }
        Ok(())
    }

    /// Empties the file and opens it anew, because writes to a file that had an error are no longer
    /// held back.
    async fn start_over(&mut self) -> Result<()> {
        self.sync().await?;
        self.file.truncate(0).await?;
        self.bytes.clear();
        self.file.clone().close().await?;
        self.file = self.client.open(&root(), self.file.ino(), RDWR).await?.0;
        Ok(())
    }

    async fn fill(mut self, until: Instant) -> Result<()> {
        while Instant::now() < until {
            let fits = self.write().await?;
            if !fits || self.bytes.len() as u64 > FILE_BYTES {
                self.start_over().await?;
            }
            match self.rng.random_range(0..100) {
                0 => self.sync().await?,
                1..10 => sleep(Duration::from_millis(self.rng.random_range(1..400))).await,
                _ => {}
            }
        }
        self.sync().await?;
        let seen = read_all(&self.file, FILE_BYTES * 2).await?;
        if seen != self.bytes {
            let at = seen.iter().zip(&self.bytes).position(|(a, b)| a != b);
            self.violation(format!(
                "{} bytes differ from {} at {at:?}",
                seen.len(),
                self.bytes.len()
            ));
        }
        self.out.lock().held += self.client.stats().held_writes;
        self.file.close().await
    }
}

/// One run of a cluster.
pub fn run(seed: u64) -> Result<Outcome> {
    in_cluster(seed, async |cluster| simulate(seed, cluster).await)?
}

async fn simulate(seed: u64, cluster: &mut Cluster) -> Result<Outcome> {
    cluster.write_back = None;
    cluster.shrink(TARGET_BYTES);
    for node in cluster.nodes() {
        cluster.start(node).await?;
    }
    while !cluster.whole() {
        sleep(Duration::from_millis(100)).await;
    }
    let out = Arc::new(Mutex::new(Outcome::default()));
    let until = Instant::now() + LENGTH;
    let mut fillers = Vec::new();
    for id in 0..CLIENTS {
        let client = cluster.client(id).await?;
        let filler = Filler::new(id, client, seed << 8 | u64::from(id), out.clone()).await?;
        fillers.push(tokio::spawn(filler.fill(until)));
    }
    for f in fillers {
        f.await.map_err(|e| Error::new(Code::Io, format!("a client panicked: {e}")))??;
    }
    let outcome = std::mem::take(&mut *out.lock());
    Ok(outcome)
}
