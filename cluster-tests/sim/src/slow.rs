//! A cluster in which the disk of one target becomes slow but does not fail: the target must be
//! found and drained while clients go on.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, File};
use strake_fabric::Buf;
use strake_proto::{Code, Error, Result, TargetId, map::ChainExt, pb};
use tokio::time::{Instant, sleep};

use crate::{
    cluster::Cluster,
    faults::Harm,
    nodes::FIRST_OSS,
    run::in_cluster,
    workload::{RDWR, read_all, root},
};

const CLIENTS: u32 = 3;
const FILES: usize = 8;
const FILE_BYTES: usize = 100_000;
/// How long the cluster runs before the disk becomes slow, so that its usual speed is known.
const EARLY: Duration = Duration::from_secs(15);
const LENGTH: Duration = Duration::from_secs(150);
/// Storage servers besides those that every cluster has.
const JOINED: u32 = 2;

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Targets that were drained because they are slow, and how many replicas each still has.
    pub drained: Vec<(TargetId, usize)>,
    /// How many replicas the target with the slow disk had before.
    pub had: usize,
    pub writes: u64,
    pub violations: Vec<String>,
}

struct Writer {
    files: Vec<(File, Vec<u8>)>,
    rng: StdRng,
    writes: u64,
}

impl Writer {
    async fn new(id: u32, client: &Client, seed: u64) -> Result<Writer> {
        let mut files = Vec::new();
        for n in 0..FILES {
            let name = format!("slow{id}.{n}");
            let (file, _) = client
                .create(&root(), client.root(), name.as_bytes(), 0o644, RDWR, true, None)
                .await?;
            file.write(0, vec![Buf::copy_from(&vec![id as u8; FILE_BYTES])]).await?;
            files.push((file, vec![id as u8; FILE_BYTES]));
        }
        Ok(Writer { files, rng: StdRng::seed_from_u64(seed), writes: 0 })
    }

    /// Writes and syncs until then. Returns the number of writes, and what differs at the end from
    /// what was written.
    async fn work(mut self, until: Instant) -> Result<(u64, Vec<String>)> {
        while Instant::now() < until {
            let (file, bytes) = &mut self.files[self.rng.random_range(0..FILES)];
            let len = self.rng.random_range(1..5000);
            let at = self.rng.random_range(0..FILE_BYTES - len);
            let data = vec![self.rng.random(); len];
            file.write(at as u64, vec![Buf::copy_from(&data)]).await?;
            bytes[at..at + len].copy_from_slice(&data);
            file.fsync().await?;
            self.writes += 1;
            sleep(Duration::from_millis(self.rng.random_range(1..50))).await;
        }
        let mut differ = Vec::new();
        for (n, (file, bytes)) in self.files.iter().enumerate() {
            if read_all(file, 2 * FILE_BYTES as u64).await? != *bytes {
                differ.push(format!("file {n} has other bytes than were written"));
            }
        }
        Ok((self.writes, differ))
    }
}

fn replicas(map: &pb::ClusterMap, target: TargetId) -> usize {
    map.chains
        .iter()
        .filter(|c| c.state_of(target).is_some() || c.preferred.contains(&target))
        .count()
}

/// One run. `slow`: how long the second target's disk takes for each write and flush, if it is
/// slow.
pub fn run(seed: u64, slow: Option<Duration>) -> Result<Outcome> {
    in_cluster(seed, async |cluster| simulate(seed, slow, cluster).await)?
}

async fn simulate(seed: u64, slow: Option<Duration>, cluster: &mut Cluster) -> Result<Outcome> {
    for _ in 0..JOINED {
        cluster.join();
    }
    for node in cluster.nodes() {
        cluster.start(node).await?;
    }
    while !cluster.whole() {
        sleep(Duration::from_millis(100)).await;
    }
    let mut writers = Vec::new();
    for id in 0..CLIENTS {
        let client = cluster.client(id).await?;
        let writer = Writer::new(id, &client, seed << 8 | u64::from(id)).await?;
        writers.push(tokio::spawn(writer.work(Instant::now() + LENGTH)));
    }
    sleep(EARLY).await;
    let map = |cluster: &Cluster| {
        cluster.map().ok_or_else(|| Error::new(Code::NotLeader, "no metadata server is up"))
    };
    let mut out = Outcome { had: replicas(&map(cluster)?, 1), ..Outcome::default() };
    if let Some(by) = slow {
        cluster.harm_disk(FIRST_OSS + 1, Harm::Slow(by), 0);
    }
    for w in writers {
        let (writes, differ) =
            w.await.map_err(|e| Error::new(Code::Io, format!("a client failed: {e}")))??;
        out.writes += writes;
        out.violations.extend(differ);
    }
    let map = map(cluster)?;
    let drained = map.targets.iter().filter(|t| t.draining && t.slow.is_some());
    out.drained = drained.map(|t| (t.id, replicas(&map, t.id))).collect();
    Ok(out)
}
