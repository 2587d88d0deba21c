//! `strake-sim`: runs seeds, prints what happened, exits 1 when a promise was broken.

use std::{fs::File, path::PathBuf, process::ExitCode};

use clap::Parser;
use serde_json::json;
use strake_histories::{explain::explain, search::LIMIT};
use strake_proto::Result;
use strake_sim::{
    baton, coverage, histories, lapse,
    ledger::Ledger,
    mix::{self, Mode},
    outage,
    plant::Plant,
    rivals,
    run::run,
    scenario::{Scenario, Sync},
    shrink::shrink,
};

/// Run the deterministic simulator over a range of seeds.
#[derive(Parser)]
struct Args {
    /// First seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of seeds.
    #[arg(long, default_value_t = 1)]
    count: u64,
    /// Simulated seconds under faults [default: the usual time].
    #[arg(long)]
    seconds: Option<u64>,
    /// Faults twice as often and of more kinds.
    #[arg(long)]
    harsh: bool,
    /// Also clocks that drift, scarce leases, clients that only read, and a client that breaks all
    /// rules.
    #[arg(long)]
    wide: bool,
    /// Blocks decay on disks while servers are down and others replace them.
    #[arg(long, conflicts_with_all = ["harsh", "wide"])]
    decay: bool,
    /// Disks decay: chunk tables, metadata states and logs.
    #[arg(long, conflicts_with_all = ["harsh", "wide", "decay"])]
    tables: bool,
    /// Also drain targets, and cancel some drains, in every run.
    #[arg(long)]
    moves: bool,
    /// At the end, print as JSON how often each row of the tables of docs/leases.md was taken.
    /// Without it: as a table.
    #[arg(long)]
    json: bool,
    /// Run with servers that leave out one kind of sync: most seeds must fail.
    #[arg(long)]
    skip_sync: Option<Sync>,
    /// Run each seed twice and compare the traces.
    #[arg(long)]
    replay: bool,
    /// Run histories of metadata operations instead: each must be linearizable.
    #[arg(long)]
    histories: bool,
    /// Run clients that hand files on instead: each must see what the one before wrote, although
    /// that was dirty data.
    #[arg(long, conflicts_with = "histories")]
    baton: bool,
    /// Run leases out under clients and storage servers instead.
    #[arg(long, conflicts_with_all = ["histories", "baton", "plant"])]
    lapse: bool,
    /// Break one thing at a time instead: no call may take five seconds.
    #[arg(long, conflicts_with_all = ["histories", "baton", "lapse", "plant"])]
    outage: bool,
    /// Run two clients that write to one file instead; one of them gives up what it sent.
    #[arg(long, conflicts_with_all = ["histories", "baton", "lapse", "outage"])]
    rivals: bool,
    /// With --histories, --baton or --rivals: plant a fault, which most runs must detect.
    #[arg(long)]
    plant: Option<Plant>,
    /// Where to keep failed runs: with --histories those that are not linearizable, for
    /// `strake-histories check`.
    #[arg(long, default_value = "histories")]
    keep: PathBuf,
    /// Run all kinds, each seed with the kind that it has in `./simulate`.
    #[arg(long, conflicts_with_all = ["harsh", "wide", "decay", "tables", "moves", "histories", "baton", "lapse", "outage", "rivals", "replay", "skip_sync"])]
    mixed: bool,
    /// With --mixed: print a line of JSON for each seed, and one at the end with the rows taken.
    #[arg(long, requires = "mixed")]
    jsonl: bool,
    /// Shorten a run that fails: fewer faults, clients and seconds, as long as the same promise
    /// breaks.
    #[arg(long, conflicts_with_all = ["histories", "baton", "lapse", "outage", "rivals"])]
    shrink: bool,
    /// With --shrink: the number of runs it may take.
    #[arg(long, default_value_t = 400)]
    shrink_runs: usize,
}

impl Args {
    fn scenario(&self, seed: u64) -> Option<Scenario> {
        let mode = match (self.mixed, self.harsh, self.wide) {
            (true, ..) => Mode::of(seed),
            (_, true, _) => Mode::Harsh,
            (_, _, true) => Mode::Wide,
            _ if self.decay => Mode::Decay,
            _ if self.tables => Mode::Tables,
            _ => Mode::Plain,
        };
        let base = mode.scenario(seed)?;
        let length = self.seconds.map_or(base.length, std::time::Duration::from_secs);
        let (wide, moves) = (self.wide || base.wide, self.moves || base.moves);
        Some(Scenario { length, skip: self.skip_sync, wide, moves, ..base })
    }
}

/// Runs the seeds, each as the kind of run that it is in `./simulate`.
fn sweep_mixed(args: &Args) -> u64 {
    let (mut failed, mut sum) = (0, Ledger::default());
    for seed in args.seed..args.seed + args.count {
        let done = mix::one(Mode::of(seed), seed);
        sum.add(&done.faults);
        let mut kept = None;
        if !done.violations.is_empty() {
            failed += 1;
            let file = args.keep.join(format!("seed-{seed}-{}.txt", done.mode.name()));
            match std::fs::create_dir_all(&args.keep)
                .and_then(|()| std::fs::write(&file, done.text()))
            {
                Ok(()) => kept = Some(file.display().to_string()),
                Err(e) => eprintln!("seed {seed} is not kept in {}: {e}", file.display()),
            }
        }
        if args.jsonl {
            let faults: serde_json::Map<_, _> = done
                .faults
                .rows()
                .map(|(name, made, counted)| (name.into(), json!([made, counted])))
                .collect();
            let line = json!({ "seed": seed, "mode": done.mode.name(), "counted": done.faults.counted(), "faults": faults,
                "simulated": done.simulated.as_secs_f64(), "violations": done.violations, "kept": kept });
            println!("{line}");
        } else {
            println!("{done}");
            kept.iter().for_each(|k| println!("  kept as {k}"));
        }
    }
    if !args.jsonl {
        println!("{} faults counted:", sum.counted());
        print!("{}", sum.text());
    }
    failed
}

/// Shrinks the run of the first seed.
fn shrink_one(args: &Args) -> ExitCode {
    let Some(scenario) = args.scenario(args.seed) else {
        eprintln!(
            "seed {} is a run of the kind {}, which has no list of faults to make shorter",
            args.seed,
            Mode::of(args.seed).name()
        );
        return ExitCode::FAILURE;
    };
    match shrink(scenario, args.shrink_runs, &mut |step| eprintln!("{step}")) {
        Ok(Some(short)) => {
            print!("{}", short.text());
            ExitCode::FAILURE
        }
        Ok(None) => {
            println!("seed {} breaks no promise", args.seed);
            ExitCode::SUCCESS
        }
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the seeds as histories. Those that were not decided, or have too little overlap, count as
/// failed.
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

/// Runs the seeds one after the other. `one` returns a line of text, the broken promises, and the
/// trace.
fn sweep(args: &Args, one: impl Fn(u64) -> Result<(String, Vec<String>, [u8; 32])>) -> u64 {
    let mut failed = 0;
    for seed in args.seed..args.seed + args.count {
        match one(seed) {
            Ok((said, violations, trace)) => {
                println!("seed {seed}: {said}");
                violations.iter().for_each(|v| println!("  VIOLATION: {v}"));
                failed += u64::from(!violations.is_empty());
                if args.replay && one(seed).map_or([0; 32], |again| again.2) != trace {
                    println!("  NOT REPLAYED: the second run of seed {seed} took another course");
                    failed += 1;
                }
            }
            Err(e) => {
                println!("seed {seed}: FAILED: {e:?}");
                failed += 1;
            }
        }
    }
    failed
}

/// One run of [`baton`].
fn one_baton(seed: u64, plant: Option<Plant>) -> Result<(String, Vec<String>, [u8; 32])> {
    let o = baton::run(seed, plant)?;
    let said = format!(
        "{} times handed on, {} writes, {} held back, {} lost with sessions",
        o.handed_on, o.writes, o.held, o.lost
    );
    Ok((said, o.violations, o.trace))
}

/// One run of [`lapse`].
fn one_lapse(seed: u64) -> Result<(String, Vec<String>, [u8; 32])> {
    let o = lapse::run(seed)?;
    let hash = hex::encode(&o.trace[..8]);
    let said = format!(
        "{} looks, {} reads, {} writes, {} errors, {} faults counted, {:.0?} simulated, trace {hash}",
        o.looks,
        o.reads,
        o.writes,
        o.errors,
        o.faults.counted(),
        o.simulated
    );
    Ok((said, o.violations, o.trace))
}

/// One run of [`rivals`].
fn one_rivals(seed: u64, plant: Option<Plant>) -> Result<(String, Vec<String>, [u8; 32])> {
    let o = rivals::run(seed, plant)?;
    let said = format!(
        "{} calls failed, {} soon, the longest after {:.2?}, {} copies late",
        o.failed, o.soon, o.longest, o.late
    );
    Ok((said, o.violations, o.trace))
}

/// One run of [`outage`].
fn one_outage(seed: u64) -> Result<(String, Vec<String>, [u8; 32])> {
    let o = outage::run(seed)?;
    let (counted, simulated) = (o.faults.counted(), o.simulated);
    let said = format!(
        "{} calls, the longest {:.2?}, {counted} faults counted, {simulated:.0?} simulated",
        o.calls, o.longest
    );
    Ok((said, o.violations, o.trace))
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
    if args.shrink {
        return shrink_one(&args);
    }
    let failed = match (args.histories, args.baton, args.mixed) {
        (true, ..) => sweep_histories(&args),
        (_, true, _) => sweep(&args, |seed| one_baton(seed, args.plant)),
        _ if args.lapse => sweep(&args, one_lapse),
        _ if args.rivals => sweep(&args, |seed| one_rivals(seed, args.plant)),
        _ if args.outage => sweep(&args, one_outage),
        (_, _, true) => sweep_mixed(&args),
        _ => sweep_files(&args),
    };
    let taken = coverage::counts();
    match (args.jsonl, args.json) {
        (true, _) => println!("{}", json!({ "rows": coverage::value(&taken) })),
        (_, true) => print!("{}", coverage::json(&taken)),
        _ => print!("{}", coverage::text(&taken)),
    }
    if !args.jsonl {
        println!("{} passed, {failed} failed", args.count.saturating_sub(failed));
    }
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs the seeds as runs of files under faults.
fn sweep_files(args: &Args) -> u64 {
    let (mut failed, mut sum) = (0, Ledger::default());
    for scenario in (args.seed..args.seed + args.count).filter_map(|seed| args.scenario(seed)) {
        let seed = scenario.seed;
        let o = match run(scenario) {
            Ok(o) => o,
            Err(e) => {
                println!("seed {seed}: FAILED: {e:?}");
                failed += 1;
                continue;
            }
        };
        let hash = hex::encode(&o.trace[..8]);
        println!(
            "seed {seed}: {} of {} faults counted, {} writes, {} punches, {} cuts, {} seeks, {} syncs, {} reads, {} names, {} replaced, {} locks, {} looks, {} errors, {} lost, {} messages, {:.0?} simulated, trace {hash}",
            o.faults.counted(),
            o.scheduled,
            o.writes,
            o.punches,
            o.cuts,
            o.seeks,
            o.syncs,
            o.reads,
            o.names,
            o.replaced,
            o.locks,
            o.looks,
            o.errors,
            o.lost,
            o.messages,
            o.simulated
        );
        sum.add(&o.faults);
        o.violations.iter().for_each(|v| println!("  VIOLATION: {v}"));
        failed += u64::from(!o.violations.is_empty());
        if args.replay {
            let other = match run(scenario) {
                Ok(again) => o.parting(&again),
                Err(e) => Some(format!("it failed: {e:?}")),
            };
            if let Some(how) = other {
                println!(
                    "  NOT REPLAYED: the second run of seed {seed} took another course at {how}"
                );
                failed += 1;
            }
        }
    }
    println!("{} faults counted:", sum.counted());
    print!("{}", sum.text());
    failed
}
