//! `strake-scale`: many clients and many targets. Starts a cluster of real processes, opens the
//! sessions in its own process, and measures what `docs/performance.md` says about many clients.

mod clients;
mod cluster;
mod counting;
mod failover;
mod idle;
mod map;
mod reads;
mod report;
mod storm;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, ValueEnum};

use clients::Clients;
use cluster::Cluster;
use report::Report;

/// Clients of each kind that read at the same time.
const READERS: usize = 32;

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Measures a cluster of real processes with many targets under many client sessions.
#[derive(Parser)]
struct Args {
    /// The program under test
    #[arg(long, env = "STRAKE")]
    strake: PathBuf,
    /// Folder of the cluster, which must not exist yet; removed at the end
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Client sessions, all in this process
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(2..=4000))]
    clients: u32,
    /// Object storage servers
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..=64))]
    oss: u32,
    /// Targets of each, sparse files of 1 GiB
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=16))]
    targets_per_oss: u32,
    /// Recall storms of each kind; a tenth as many map changes and failovers, at least two
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(2..=1000))]
    rounds: u32,
    /// Seconds of each measurement of CPU time
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=600))]
    idle_seconds: u64,
    /// Run only these parts
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    #[arg(long)]
    json: bool,
    /// The table as Markdown, as in docs/performance.md
    #[arg(long, conflicts_with = "json")]
    markdown: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    Idle,
    Map,
    Storm,
    Failover,
    /// Stats and listings, at the leader only and with followers
    Reads,
}

impl Args {
    fn does(&self, part: Part) -> bool {
        self.only.is_empty() || self.only.contains(&part)
    }
    fn few(&self) -> u32 {
        (self.rounds / 10).max(2)
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let outcome = runtime.map_err(Into::into).and_then(|rt| rt.block_on(run(&args)));
    match outcome {
        Ok(report) => {
            match args.json {
                true => println!("{:#}", report.json()),
                false => print!("{}", report.text(args.markdown)),
            }
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("strake-scale: {e}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: &Args) -> Result<Report> {
    raise_file_limit();
    let mut report = Report::new(args);
    let cluster = Cluster::start(args)?;
    eprintln!("the cluster is up; {} server processes", cluster.pids()?.len());
    let alone = if args.does(Part::Idle) {
        Some(idle::sample(&cluster, args.idle_seconds).await?)
    } else {
        None
    };
    let clients = Clients::connect(&cluster, args.clients as usize, &mut report).await?;
    if let Some(alone) = alone {
        eprintln!("idle, {} sessions", args.clients);
        idle::report(&alone, &idle::sample(&cluster, args.idle_seconds).await?, &mut report);
    }
    if args.does(Part::Map) {
        map::measure(&cluster, &clients, args.few(), &mut report).await?;
    }
    if args.does(Part::Storm) {
        storm::measure(&clients, args.rounds as usize, &mut report).await?;
    }
    if args.does(Part::Reads) {
        reads::measure(&cluster, READERS, &mut report).await?;
    }
    if args.does(Part::Failover) {
        failover::measure(&cluster, &clients, args.few(), &mut report).await?;
    }
    idle::memory(&cluster, &mut report)?;
    clients.close().await;
    Ok(report)
}

/// Raises the limit of open files: a thousand clients need more than a thousand sockets.
fn raise_file_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls only read or fill `limit`, which outlives them. Should they fail,
    // connecting says so.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        }
    }
}
