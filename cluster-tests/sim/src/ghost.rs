//! Clients that die while they write. What they synced stays. What they wrote beyond the recorded
//! end of the file must never be read, even when another client makes the file longer. Some have
//! removed their file before, while they still have it open: its chunks must be deleted, too.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::Client;
use strake_proto::{Code, Result};
use strake_runtime::Env;
use tokio::time::{Instant, sleep};

use crate::{
    cluster::Cluster,
    lockers,
    oracle::{CELL, FileModel, fill},
    workload::{RDWR, Shared, read_all, root},
};

const FILE_BYTES: u64 = 4 << 20;
/// How much longer the file is made afterwards.
const GROWTH: u64 = 2 * FILE_BYTES;

/// One such client and its file.
pub struct Ghost {
    pub node: u32,
    pub uuid: [u8; 16],
    dies: Instant,
    dead: bool,
    env: Env,
    name: String,
    model: Arc<Mutex<FileModel>>,
}

impl Ghost {
    /// Starts a client that writes. [`Ghost::die`] kills it once `dies` has come.
    pub fn start(
        client: Client,
        env: Env,
        node: u32,
        uuid: [u8; 16],
        (seed, orphans): (u64, bool),
        dies: Instant,
    ) -> Ghost {
        let name = format!("ghost{node}");
        let model: Arc<Mutex<FileModel>> = Arc::default();
        // With `orphans` every second client removes its file.
        let removes = orphans && seed.is_multiple_of(2);
        let rng = StdRng::seed_from_u64(seed);
        let work = haunt(client, (name.clone(), removes), node << 24 | 1, rng, model.clone());
        env.spawn(async move {
            if let Err(e) = work.await {
                tracing::info!("ghost {node}: {e}");
            }
        });
        Ghost { node, uuid, dies, dead: false, env, name, model }
    }

    /// Kills the client if its time has come, or at once.
    pub fn die(&mut self, cluster: &Cluster, at_once: bool) {
        if !self.dead && (at_once || Instant::now() >= self.dies) {
            self.dead = true;
            cluster.net.kill_client(self.node, &self.env);
        }
    }

    /// Checks what it left, makes the file longer and checks again.
    pub async fn check(&self, other: &Client, found: &Shared) -> Result<()> {
        // Its locks must be free.
        match other.lookup(&root(), other.root(), format!("{}.lock", self.name).as_bytes()).await {
            Err(e) if e.code == Code::NoEnt => {}
            r => lockers::all_free(other, &[r?.ino]).await?,
        }
        let ino = match other.lookup(&root(), other.root(), self.name.as_bytes()).await {
            Err(e) if e.code == Code::NoEnt => return Ok(()),
            r => r?.ino,
        };
        let (file, attr) = other.open(&root(), ino, RDWR).await?;
        let before = read_all(&file, FILE_BYTES + GROWTH).await?;
        let (size, longer) = (before.len() as u64, attr.size + GROWTH);
        file.truncate(longer).await?;
        let after = read_all(&file, FILE_BYTES + GROWTH).await?;
        let model = self.model.lock().clone();
        let mut wrong = Vec::new();
        wrong.extend(model.check_size(size).err());
        wrong.extend(model.check(0, &before).err());
        let same = after.get(..before.len()).is_some_and(|a| a == before);
        let zeros = after.get(before.len()..).is_some_and(|a| a == vec![0; a.len()]);
        if size != attr.size || after.len() as u64 != longer || !same || !zeros {
            let at = after.iter().skip(before.len()).position(|b| *b != 0);
            wrong.push(format!(
                "size {size}, then {longer}: same {same}, zeros beyond {zeros}, first other {at:?}"
            ));
        }
        wrong.into_iter().for_each(|w| found.lock().broken(format!("{}: {w}", self.name)));
        file.close().await
    }
}

async fn haunt(
    client: Client,
    (name, mut removes): (String, bool),
    mut tag: u32,
    mut rng: StdRng,
    model: Arc<Mutex<FileModel>>,
) -> Result<()> {
    lockers::last_will(&client, &name).await?;
    let (file, _) =
        client.create(&root(), client.root(), name.as_bytes(), 0o644, RDWR, false, None).await?;
    loop {
        // Mostly near the end, so that there are nearly always bytes beyond the reported end.
        let end = model.lock().most_size / CELL as u64;
        let first = if rng.random_bool(0.8) {
            end + rng.random_range(0..20)
        } else {
            rng.random_range(0..=end)
        };
        let (first, count) = (first.min(FILE_BYTES / CELL as u64 - 40), rng.random_range(1..=40));
        let (offset, len) = (first * CELL as u64, count as usize * CELL);
        let mut bytes = vec![0; len];
        fill(tag, offset, &mut bytes);
        model.lock().wrote(tag, offset, len);
        match file.write_all_at(offset, &bytes).await {
            Ok(()) => model.lock().answered(offset + len as u64),
            Err(_) => model.lock().write_failed(tag),
        }
        tag += 1;
        if removes && tag.is_multiple_of(8) {
            client.unlink(&root(), client.root(), name.as_bytes()).await?;
            removes = false;
        }
        if rng.random_bool(0.2) {
            match file.fsync().await {
                Ok(()) => model.lock().synced(),
                Err(_) => model.lock().sync_failed(),
            }
        }
        sleep(Duration::from_millis(rng.random_range(0..200))).await;
    }
}
