//! Two clients write to one file. The network holds up what the first sends until its calls fail,
//! and may then cut that client off from the storage servers, or from all servers. What the second
//! client writes after that must stay, whenever the held-up copies arrive.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, File};
use strake_fabric::Buf;
use strake_proto::{Code, Error, Ino, Result};
use tokio::time::{Instant, sleep, timeout};

use crate::{
    cluster::Cluster,
    ledger::Ledger,
    nodes::{FIRST_CLIENT, FIRST_OSS, MDS, OSS},
    plant::Plant,
    run::in_cluster,
    workload::{RDWR, read_all, root},
};

const ROUNDS: u8 = 8;
const FILE_BYTES: usize = 64 << 10;
/// How long the client tries a call.
const PATIENCE: Duration = Duration::from_secs(3);
/// How much longer a call may take until its copies can do no harm.
const HARMLESS: Duration = Duration::from_secs(17);
/// How late copies may arrive.
const LATE: Duration = Duration::from_secs(15);

/// What came of a run.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Calls that failed.
    pub failed: u64,
    /// Of those, the calls that failed within a second after their time limit; and the longest
    /// call.
    pub soon: u64,
    pub longest: Duration,
    /// Copies that arrived late.
    pub late: usize,
    pub violations: Vec<String>,
    pub trace: [u8; 32],
    /// What happened, a line per event, if a promise was broken.
    pub events: Vec<String>,
    pub faults: Ledger,
    pub simulated: Duration,
}

/// What the first client can reach.
#[derive(Clone, Copy, Debug)]
enum Reach {
    /// All servers: only its updates are held up.
    All,
    /// Only the metadata servers.
    Metadata,
    Nobody,
}

/// Runs a seed.
pub fn run(seed: u64, plant: Option<Plant>) -> Result<Outcome> {
    in_cluster(seed, async |cluster| {
        let (mut out, begun) = (Outcome::default(), Instant::now());
        if let Err(e) = simulate(seed, plant, cluster, &mut out).await {
            out.violations.push(e.to_string());
        }
        let (trace, _, events) = cluster.net.trace();
        let events = if out.violations.is_empty() { Vec::new() } else { events };
        Outcome { trace, events, faults: cluster.net.ledger(), simulated: begun.elapsed(), ..out }
    })
}

async fn simulate(
    seed: u64,
    plant: Option<Plant>,
    cluster: &mut Cluster,
    out: &mut Outcome,
) -> Result<()> {
    for node in cluster.nodes() {
        cluster.start(node).await?;
    }
    while !cluster.whole() {
        sleep(Duration::from_millis(100)).await;
    }
    plant.into_iter().for_each(|p| cluster.net.plant(p));
    let (mut config, env, fabric) = cluster.prepare(0);
    (config.op_timeout, config.write_back) = (PATIENCE, false);
    let client = Client::connect(config, env, fabric).await?;
    let (file, _) =
        client.create(&root(), client.root(), b"rivals", 0o644, RDWR, true, None).await?;
    let ino = file.ino();
    file.write(0, vec![Buf::copy_from(&[1; FILE_BYTES])]).await?;
    file.close().await?;
    let (other, reader) = (cluster.client(1).await?, cluster.client(2).await?);
    let (theirs, _) = other.open(&root(), ino, RDWR).await?;
    let mut rng = StdRng::seed_from_u64(seed ^ 0x717a);
    for round in 0..ROUNDS {
        let file = reopen(&client, ino).await?;
        one_round(cluster, (&file, &theirs, &reader), round, &mut rng, out).await?;
        // The result does not matter: its writes are lost.
        let _ = file.close().await;
    }
    Ok(())
}

/// Opens the file; the client may have to open a new session first.
async fn reopen(client: &Client, ino: Ino) -> Result<File> {
    let mut last = Error::new(Code::TimedOut, "not opened");
    for _ in 0..20 {
        match client.open(&root(), ino, RDWR).await {
            Ok((file, _)) => return Ok(file),
            Err(e) => last = e,
        }
        sleep(Duration::from_secs(1)).await;
    }
    Err(last.context("a client that is cut off no more cannot open its file"))
}

async fn one_round(
    cluster: &mut Cluster,
    (mine, theirs, reader): (&File, &File, &Client),
    round: u8,
    rng: &mut StdRng,
    out: &mut Outcome,
) -> Result<()> {
    let len = rng.random_range(2..9000);
    let (at, byte) = (rng.random_range(0..FILE_BYTES - len), 10 * (round + 1));
    let reach = [Reach::All, Reach::Metadata, Reach::Nobody][rng.random_range(0..3)];
    cluster.net.note(&format!(
        "round {round}: what {FIRST_CLIENT} sends is kept, then it reaches {reach:?}"
    ));
    // Sometimes the client has heard nothing from storage servers for a long time.
    sleep(Duration::from_millis(if rng.random_bool(0.3) {
        12_000
    } else {
        rng.random_range(0..500)
    }))
    .await;
    cluster.net.hold_up(Some(FIRST_CLIENT));
    let (begun, file) = (Instant::now(), mine.clone());
    let call =
        tokio::spawn(
            async move { file.write(at as u64, vec![Buf::copy_from(&vec![byte; len])]).await },
        );
    sleep(Duration::from_millis(rng.random_range(50..2500))).await;
    let (mds, oss): (Vec<u32>, Vec<u32>) =
        ((1..=MDS).collect(), (FIRST_OSS..FIRST_OSS + OSS).collect());
    match reach {
        Reach::All => {}
        Reach::Metadata => cluster.net.cut_off(FIRST_CLIENT, &oss, false, None),
        Reach::Nobody => cluster.net.cut_off(FIRST_CLIENT, &[mds, oss].concat(), false, None),
    }
    let ended = call.await.map_err(|e| Error::new(Code::Io, format!("a writer failed: {e}")))?;
    let took = begun.elapsed();
    cluster.net.note(&format!(
        "round {round}: the call ends after {took:?}: {:?}",
        ended.as_ref().map_err(|e| e.code)
    ));
    out.longest = out.longest.max(took);
    match ended {
        Err(e) if matches!(e.code, Code::TimedOut | Code::Io) => out.failed += 1,
        Err(e) => return Err(e),
        Ok(_) => return Err(Error::new(Code::Io, "a write is answered whose updates are kept")),
    }
    if took > PATIENCE + HARMLESS {
        out.violations.push(format!("round {round}: a call of {PATIENCE:?} took {took:?}"));
    }
    out.soon += u64::from(took < PATIENCE + Duration::from_secs(1));
    // All of the first client's range, or a part of it.
    let (from, to) =
        if rng.random_bool(0.5) { (0, len) } else { (len / 4, len / 4 + len.div_ceil(2)) };
    let newer = vec![Buf::copy_from(&vec![byte + 1; to - from])];
    if rng.random_bool(0.3) {
        out.late += cluster.net.let_late_through();
    }
    theirs.write((at + from) as u64, newer).await?;
    if rng.random_bool(0.3) {
        theirs.fsync().await?;
    }
    sleep(LATE.mul_f64(rng.random::<f64>().powi(2))).await;
    out.late += cluster.net.let_late_through();
    sleep(Duration::from_millis(rng.random_range(20..500))).await;
    let seen = timeout(Duration::from_secs(60), look(reader, theirs.ino())).await;
    let seen = seen.map_err(|_| Error::new(Code::TimedOut, "a read takes a minute"))??;
    let wrong = (at + from..at + to).find(|i| seen.get(*i) != Some(&(byte + 1)));
    if let Some(i) = wrong {
        let m = format!(
            "round {round}: {:?} at {i}, {} was written after the other's write had failed ({reach:?}, after {took:?})",
            seen.get(i),
            byte + 1
        );
        out.violations.push(m);
    }
    cluster.net.hold_up(None);
    cluster.net.heal();
    Ok(())
}

async fn look(reader: &Client, ino: Ino) -> Result<Vec<u8>> {
    let (file, _) = reader.open(&root(), ino, 0).await?;
    let seen = read_all(&file, 2 * FILE_BYTES as u64).await?;
    file.close().await?;
    Ok(seen)
}
