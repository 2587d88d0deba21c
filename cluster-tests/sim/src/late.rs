//! Updates that stay in the network longer than their client waits: the call fails, the program
//! writes something newer to the same place, and then the old updates arrive.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, File};
use strake_fabric::Buf;
use strake_proto::{Code, Error, Result};
use tokio::time::sleep;

use crate::{
    cluster::Cluster,
    nodes::FIRST_CLIENT,
    plant::Plant,
    run::in_cluster,
    workload::{RDWR, read_all, root},
};

const ROUNDS: u8 = 12;
const FILE_BYTES: usize = 64 << 10;
/// How long the client tries a call.
const PATIENCE: Duration = Duration::from_secs(3);

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Calls that failed because the client gave them up.
    pub given_up: u64,
    /// Calls that succeeded although their first copies were held up.
    pub lived: u64,
    /// Copies that arrived late.
    pub late: usize,
    pub violations: Vec<String>,
}

/// One run of a cluster without other faults.
pub fn run(seed: u64, plant: Option<Plant>) -> Result<Outcome> {
    in_cluster(seed, async |cluster| simulate(seed, plant, cluster).await)?
}

/// The bytes that the file must have. One half of the file is for calls that are given up, the
/// other for calls that succeed.
struct Writer {
    file: File,
    bytes: Vec<u8>,
    rng: StdRng,
}

impl Writer {
    /// A place in one half of the file.
    fn place(&mut self, half: usize) -> (usize, usize) {
        let len = self.rng.random_range(1..9000);
        (half * FILE_BYTES / 2 + self.rng.random_range(0..FILE_BYTES / 2 - len), len)
    }

    async fn write(&mut self, (at, len): (usize, usize), byte: u8) -> Result<()> {
        self.file.write(at as u64, vec![Buf::copy_from(&vec![byte; len])]).await?;
        self.bytes[at..at + len].fill(byte);
        Ok(())
    }
}

async fn simulate(seed: u64, plant: Option<Plant>, cluster: &mut Cluster) -> Result<Outcome> {
    for node in cluster.nodes() {
        cluster.start(node).await?;
    }
    while !cluster.whole() {
        sleep(Duration::from_millis(100)).await;
    }
    if let Some(plant) = plant {
        cluster.net.plant(plant);
    }
    let (mut config, env, fabric) = cluster.prepare(0);
    (config.op_timeout, config.write_back) = (PATIENCE, false);
    let client = Client::connect(config, env, fabric).await?;
    let (file, _) = client.create(&root(), client.root(), b"late", 0o644, RDWR, true, None).await?;
    let mut w = Writer { file, bytes: vec![1; FILE_BYTES], rng: StdRng::seed_from_u64(seed) };
    w.write((0, FILE_BYTES), 1).await?;
    let reader = cluster.client(1).await?;
    let mut out = Outcome::default();
    for round in 0..ROUNDS {
        one_round(cluster, &mut w, round, &mut out).await?;
        w.file.fsync().await?;
        let (file, _) = reader.open(&root(), w.file.ino(), RDWR).await?;
        let seen = read_all(&file, 2 * FILE_BYTES as u64).await?;
        if let Some(at) = (0..FILE_BYTES).find(|i| seen.get(*i) != Some(&w.bytes[*i])) {
            out.violations.push(format!(
                "round {round}: {:?} at {at}, {} was written",
                seen.get(at),
                w.bytes[at]
            ));
        }
        file.close().await?;
    }
    Ok(out)
}

async fn one_round(cluster: &Cluster, w: &mut Writer, round: u8, out: &mut Outcome) -> Result<()> {
    let (byte, lost, lives) = (10 * (round + 1), w.place(0), w.place(1));
    cluster.net.hold_up(Some(FIRST_CLIENT));
    let file = w.file.clone();
    let living = tokio::spawn(async move {
        sleep(PATIENCE / 2).await;
        file.write(lives.0 as u64, vec![Buf::copy_from(&vec![byte; lives.1])]).await
    });
    match w.file.write(lost.0 as u64, vec![Buf::copy_from(&vec![byte + 1; lost.1])]).await {
        Err(e) if e.code == Code::TimedOut => out.given_up += 1,
        other => drop(other?),
    }
    cluster.net.hold_up(None);
    living.await.map_err(|e| Error::new(Code::Io, format!("a writer failed: {e}")))??;
    w.bytes[lives.0..lives.0 + lives.1].fill(byte);
    out.lived += 1;
    // Newer bytes in both places; sometimes only over a part of the old ones.
    let half = |(at, len): (usize, usize)| (at, len.div_ceil(2));
    let newer = if w.rng.random_bool(0.5) { lost } else { half(lost) };
    w.bytes[lost.0..lost.0 + lost.1].fill(byte + 2);
    w.write(lost, byte + 2).await?;
    w.write(newer, byte + 3).await?;
    w.write(half(lives), byte + 4).await?;
    if w.rng.random_bool(0.3) {
        w.file.fsync().await?;
    }
    out.late += cluster.net.let_late_through();
    sleep(Duration::from_millis(w.rng.random_range(20..500))).await;
    Ok(())
}
