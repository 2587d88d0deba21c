//! One client of a history as a process of its own. It writes each call and each answer to a file
//! at once, so that its death loses nothing.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::Args;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_client::{Client, Config, FollowerReads};
use strake_fabric::{Identity, Pool, TcpFabric};
use strake_histories::{
    Ino, Op, Outcome, Record,
    choose::{Chooser, Mix},
    library::Library,
    mount::Mount,
};
use strake_runtime::{Env, keyfile::read_client};

use super::cut::Cut;

/// Nanoseconds, see [`pause`].
const BEAT: u64 = 80_000_000;
/// How long the library tries an operation.
const OP_TIMEOUT: Duration = Duration::from_secs(20);

#[derive(Args)]
pub struct WorkerArgs {
    /// Its number in the history.
    #[arg(long)]
    client: u32,
    #[arg(long)]
    ops: u32,
    #[arg(long)]
    seed: u64,
    /// Where the records go.
    #[arg(long)]
    out: PathBuf,
    /// Also do operations that take more than one step through a mount.
    #[arg(long)]
    all: bool,
    /// Mostly do operations that only read.
    #[arg(long)]
    looks: bool,
    /// Ask metadata servers that do not lead for all that they may answer. For the library only; a
    /// mount has an option for it.
    #[arg(long)]
    follow: bool,
    /// The two directories, on a mount. Without it the library is used.
    #[arg(long)]
    path: Vec<PathBuf>,
    #[arg(long, value_delimiter = ',')]
    mds: Vec<String>,
    #[arg(long)]
    key: Option<PathBuf>,
    /// The two directories, by number.
    #[arg(long, value_delimiter = ',')]
    roots: Vec<Ino>,
}

/// The file in which a worker that ends regularly leaves the number of answers it got from
/// followers.
pub fn followed(out: &Path) -> PathBuf {
    out.with_extension("followed")
}

/// CLOCK_MONOTONIC in nanoseconds; all processes of a machine see the same value.
pub fn now() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a struct for the call to fill.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Writes records to the worker's file.
struct Log {
    client: u32,
    out: File,
}

impl Log {
    fn line(&mut self, r: &Record) -> io::Result<()> {
        // One write call, so that a line is there completely or not at all.
        self.out.write_all(format!("{}\n", serde_json::to_string(r)?).as_bytes())
    }

    fn call(&mut self, op: &Op) -> io::Result<Record> {
        let outcome = Outcome::Unknown("no answer".into());
        let r =
            Record { client: self.client, call: now(), reply: u64::MAX, op: op.clone(), outcome };
        self.line(&r)?;
        Ok(r)
    }

    fn answered(&mut self, r: Record, outcome: Outcome) -> io::Result<()> {
        self.line(&Record { reply: now(), outcome, ..r })
    }
}

pub fn run(args: WorkerArgs) -> io::Result<()> {
    let mut log = Log {
        client: args.client,
        out: File::options().create(true).append(true).open(&args.out)?,
    };
    let mut rng = StdRng::seed_from_u64(args.seed);
    let mix = match (args.looks, args.all) {
        (true, _) => Mix::Looks,
        (_, true) => Mix::All,
        _ => Mix::Kernel,
    };
    if args.path.is_empty() {
        let chooser = Chooser::new(mix, &args.roots, args.client);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        return runtime.block_on(by_library(&args, chooser, rng, log)).map_err(io::Error::other);
    }
    let mut mount = Mount::without_umask();
    let roots = args
        .path
        .iter()
        .map(|p| mount.enter(&p.display().to_string()))
        .collect::<io::Result<Vec<_>>>()?;
    let mut chooser = Chooser::new(mix, &roots, args.client);
    for _ in 0..args.ops {
        let op = chooser.next(&mut rng);
        let r = log.call(&op)?;
        let outcome = mount.perform(&op);
        chooser.learn(&op, &outcome);
        log.answered(r, outcome)?;
        if let Some(pause) = pause(&mut rng) {
            std::thread::sleep(pause);
        }
    }
    Ok(())
}

/// A pause until the next beat of a clock that all workers share: workers that pause continue
/// together, so that their operations overlap.
fn pause(rng: &mut StdRng) -> Option<Duration> {
    rng.random_bool(0.5).then(|| Duration::from_nanos(BEAT - now() % BEAT))
}

async fn by_library(
    args: &WorkerArgs,
    mut chooser: Chooser,
    mut rng: StdRng,
    mut log: Log,
) -> strake_proto::Result<()> {
    let cut = Cut::new(connector(args)?, rng.random());
    let mut config =
        Config::new(args.mds.iter().map(|e| e.parse()).collect::<strake_proto::Result<_>>()?);
    (config.op_timeout, config.hostname) = (OP_TIMEOUT, format!("history{}", args.client));
    config.follower_reads = if args.follow { FollowerReads::Always } else { FollowerReads::Auto };
    let mut library = Library::new(Client::connect(config, Env::system(), Arc::new(cut)).await?);
    for _ in 0..args.ops {
        let op = chooser.next(&mut rng);
        let r = log.call(&op)?;
        let outcome = library.perform(&op).await;
        chooser.learn(&op, &outcome);
        log.answered(r, outcome)?;
        if let Some(pause) = pause(&mut rng) {
            tokio::time::sleep(pause).await;
        }
    }
    std::fs::write(followed(&args.out), library.client.stats().follower_reads.to_string())?;
    library.client.close().await
}

fn connector(args: &WorkerArgs) -> strake_proto::Result<TcpFabric> {
    let key = read_client(args.key.as_deref().unwrap_or(Path::new("client.key")))?;
    Ok(TcpFabric::new(
        Env::system(),
        Identity::client(key),
        None,
        Pool::default(),
        Default::default(),
    ))
}
