//! `strake-sim`: runs seeds, prints what happened, exits 1 when a promise was broken.

use std::{fs::File, path::PathBuf, process::ExitCode};

use clap::Parser;
use strake_histories::{explain::explain, search::LIMIT};
use strake_sim::{
    baton,
    cluster::Sync,
    coverage, histories,
    plant::Plant,
    run::{Scenario, run},
};

/// Run the deterministic simulator over a range of seeds.
#[derive(Parser)]
struct Args {
    /// First seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How many seeds.
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// Simulated seconds under faults.
    #[arg(long, default_value_t = 15)]
    seconds: u64,
    /// Faults three times as often and of more kinds.
    #[arg(long)]
    harsh: bool,
    /// Also clocks that drift, scarce leases, clients that only look, and one that keeps to no rule.
    #[arg(long)]
    wide: bool,
    /// At the end, as JSON: how often each row of the tables of docs/leases.md was taken. Without it, as a table.
    #[arg(long)]
    json: bool,
    /// Run with servers that leave out one kind of sync: most seeds must fail.
    #[arg(long)]
    skip_sync: Option<Sync>,
    /// Run each seed twice and compare the traces.
    #[arg(long)]
    replay: bool,
    /// Histories of metadata operations instead: each must be linearizable.
    #[arg(long)]
    histories: bool,
    /// Files that clients hand on instead: each must see what the one before wrote, though that was held back.
    #[arg(long, conflicts_with = "histories")]
    baton: bool,
    /// With --histories or --baton: plant a fault, which most runs must show.
    #[arg(long)]
    plant: Option<Plant>,
    /// With --histories: where to keep those that are not linearizable, for `strake-histories check`.
    #[arg(long, requires = "histories", default_value = "histories")]
    keep: PathBuf,
}

/// Runs the seeds as histories. Those that were not decided, or in which too little overlaps, count as failed.
fn sweep_histories(args: &Args) -> u64 {
    let (mut failed, mut sum) = (0, histories::Sum::default());
    for seed in args.seed..args.seed + args.count {
        let scenario = histories::Scenario { seed, plant: args.plant };
        let report = match histories::run(scenario) {
            Ok(r) => r,
            Err(e) => {
                println!("seed {seed}: FAILED: {e:?}");
                failed += 1;
                continue;
            }
        };
        sum.add(&report);
        println!("seed {seed}: {report}");
        if let Some(what) = report.failure() {
            failed += 1;
            println!("  FAILED: {what}");
            let file = args.keep.join(format!("seed-{seed}.jsonl"));
            let kept = std::fs::create_dir_all(&args.keep).and_then(|()| File::create(&file));
            match kept.and_then(|f| report.history.write(f)) {
                Ok(()) => println!("  kept as {}", file.display()),
                Err(e) => println!("  not kept: {e}"),
            }
            print!("{}", explain(&report.history, &report.verdict, LIMIT));
        }
        let again = || histories::run(scenario).map_or([0; 32], |r| r.trace);
        if args.replay && again() != report.trace {
            println!("  NOT REPLAYED: the second run of seed {seed} took another course");
            failed += 1;
        }
    }
    println!("{sum}");
    failed
}

/// Runs the seeds as files that are handed on.
fn sweep_batons(args: &Args) -> u64 {
    let mut failed = 0;
    for seed in args.seed..args.seed + args.count {
        match baton::run(seed, args.plant) {
            Ok(o) => {
                println!(
                    "seed {seed}: {} times handed on, {} writes, {} held back, {} lost with sessions",
                    o.handed_on, o.writes, o.held, o.lost
                );
                o.violations.iter().for_each(|v| println!("  VIOLATION: {v}"));
                failed += u64::from(!o.violations.is_empty());
            }
            Err(e) => {
                println!("seed {seed}: FAILED: {e:?}");
                failed += 1;
            }
        }
    }
    failed
}

/// Log lines carry simulated time.
struct SimTime;

impl tracing_subscriber::fmt::time::FormatTime for SimTime {
    fn format_time(&self, w: &mut tracing_subscriber::fmt::format::Writer<'_>) -> std::fmt::Result {
        write!(w, "{:9.3}", strake_sim::run::simulated().as_secs_f64())
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_env("STRAKE_SIM_LOG"))
        .with_writer(std::io::stderr)
        .with_timer(SimTime)
        .init();
    let mut failed = match (args.histories, args.baton) {
        (true, _) => sweep_histories(&args),
        (_, true) => sweep_batons(&args),
        _ => 0,
    };
    let seeds = if args.histories || args.baton { 0..0 } else { args.seed..args.seed + args.count };
    for seed in seeds {
        let base = if args.harsh { Scenario::harsh(seed) } else { Scenario::new(seed) };
        let scenario = Scenario {
            length: std::time::Duration::from_secs(args.seconds),
            skip: args.skip_sync,
            wide: args.wide,
            ..base
        };
        match run(scenario) {
            Ok(o) => {
                let hash: String = o.trace[..8].iter().map(|b| format!("{b:02x}")).collect();
                println!(
                    "seed {seed}: {} faults, {} writes, {} punches, {} seeks, {} syncs, {} reads, {} names, {} locks, {} looks, {} errors, {} messages, {:.0?} simulated, trace {hash}",
                    o.faults,
                    o.writes,
                    o.punches,
                    o.seeks,
                    o.syncs,
                    o.reads,
                    o.names,
                    o.locks,
                    o.looks,
                    o.errors,
                    o.messages,
                    o.simulated
                );
                for v in &o.violations {
                    println!("  VIOLATION: {v}");
                }
                failed += u64::from(!o.violations.is_empty());
                if args.replay {
                    let other = match run(scenario) {
                        Ok(again) => o.parting(&again),
                        Err(e) => Some(format!("it failed: {e:?}")),
                    };
                    if let Some(how) = other {
                        println!("  NOT REPLAYED: the second run of seed {seed} took another course at {how}");
                        failed += 1;
                    }
                }
            }
            Err(e) => {
                println!("seed {seed}: FAILED: {e:?}");
                failed += 1;
            }
        }
    }
    let taken = coverage::counts();
    print!("{}", if args.json { coverage::json(&taken) } else { coverage::text(&taken) });
    println!("{} passed, {failed} failed", args.count.saturating_sub(failed));
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
