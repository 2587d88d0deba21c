//! `strake gds bench`: performance of the bridge on this machine, and the figures to compare it
//! with.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Args, builder::RangedU64ValueParser};
use strake_fabric::Use;
use strake_gds::{
    Policy, Report, Tier,
    session::{self, Memory, Setup},
};
use strake_proto::Result;
use strake_term::{size, table};

use super::{Figures, Plan, run};

#[allow(missing_docs, reason = "clap shows what is written here as the help of the command")]
#[derive(Args)]
pub struct BenchArgs {
    /// Metadata servers, HOST[:PORT] with commas.
    mds: String,
    /// File with the client key.
    #[arg(long, default_value = session::KEY)]
    client_key: PathBuf,
    /// A file that is made for it, from the root of the file system, and removed at the end.
    #[arg(long, default_value = "/.strake-gds-bench")]
    file: String,
    /// A file that is there: rows are loads of it, and nothing is written.
    #[arg(long, value_name = "PATH", conflicts_with = "file")]
    load: Option<String>,
    /// Folder with copies on this node, for the tier local-gds; goes with `--load` of a sealed
    /// file.
    #[arg(long, requires = "load")]
    local: Option<PathBuf>,
    /// Also take gpu-rdma and local-gds where the device does not verify their bytes.
    #[arg(long)]
    accept_oss_checksum: bool,
    /// MiB of the file, with `--load` at most; the device must have as much room.
    #[arg(long, default_value_t = 256, value_parser = RangedU64ValueParser::<u64>::new().range(1..=65536))]
    mib: u64,
    /// Workers of each row.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 2, 4, 8], value_parser = RangedU64ValueParser::<usize>::new().range(1..=64))]
    threads: Vec<usize>,
    /// What calls may take: prefer, at-least:TIER or require:TIER.
    #[arg(long, default_value_t = Policy::Prefer)]
    policy: Policy,
    /// End with 1 unless every byte took one and the same tier.
    #[arg(long)]
    strict: bool,
    /// Have the GPU verify what arrives and what it gives, in the figures too.
    #[arg(long)]
    verify_on_gpu: bool,
    /// Transports to the storage servers.
    #[arg(long, value_enum, default_value_t = Fabric::Auto)]
    fabric: Fabric,
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Fabric {
    Auto,
    Tcp,
    Rdma,
}

/// `strake gds bench` on this memory. `prober` is the program (`strake`) that opens cuFile's driver
/// in another process first.
pub fn command(args: BenchArgs, memory: Memory, prober: &Path) -> Result<ExitCode> {
    let transports = match args.fabric {
        Fabric::Auto => Use::Best,
        Fabric::Tcp => Use::Tcp,
        Fabric::Rdma => Use::Rdma,
    };
    let mut setup = Setup { key: args.client_key, transports, ..Setup::new(&args.mds, memory) };
    setup.options.verify_on_gpu = args.verify_on_gpu;
    setup.options.accept_oss_checksum = args.accept_oss_checksum;
    (setup.options.local, setup.options.prober) = (args.local, prober.to_path_buf());
    let (loads, bytes) = (args.load.is_some(), args.mib << 20);
    let path = args.load.unwrap_or(args.file);
    let plan = Plan {
        setup,
        path,
        loads,
        bytes,
        threads: args.threads,
        policy: args.policy,
        strict: args.strict,
    };
    let figures = run(&plan)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&figures).map_err(std::io::Error::from)?);
    } else {
        print!("{}", text(&figures));
    }
    if let Some(why) = &figures.refused {
        eprintln!("error: this run is refused: {why}");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn text(f: &Figures) -> String {
    let rate = |n: f64| format!("{}/s", size(n as u64));
    let mut out = format!("device: {}\n", f.device);
    if !f.gpu {
        out += "note: no GPU was used: these are figures of this machine's host memory in place \
                of a GPU\n";
    }
    let whence = if f.loads { "of an existing file" } else { "on the cluster" };
    out += &format!(
        "file: {} {whence}, read past the client's cache; policy {}\n\n",
        size(f.bytes),
        f.policy
    );
    let maybe =
        |n: Option<f64>, shown: &dyn Fn(f64) -> String| n.map_or_else(|| "-".to_string(), shown);
    let row = |what: String, to: String, from: String, note: String| vec![what, to, from, note];
    let head = ["", "TO DEVICE", "FROM DEVICE", "TIERS"].map(String::from);
    let mut rows = vec![head.to_vec()];
    let (load, save) = (rate(f.ceiling.load), maybe(f.ceiling.save, &rate));
    rows.push(row("ceiling: pinned copies alone".into(), load, save, "-".into()));
    let (load, save) = (rate(f.pageable_loop.load), maybe(f.pageable_loop.save, &rate));
    rows.push(row("loop: 1 MiB by read or write, copy, wait".into(), load, save, "-".into()));
    for r in &f.rows {
        let what = format!("bridge, {} threads", r.threads);
        let tiers = tiers(r.saved.iter().chain([&r.loaded]));
        rows.push(row(what, rate(r.rates.load), maybe(r.rates.save, &rate), tiers));
        if let Some(n) = r.save_and_fsync {
            rows.push(row("  with the fsync".into(), "-".into(), rate(n), "-".into()));
        }
        let part = |n: f64| format!("{n:.2} of the ceiling");
        let times = |n: f64| format!("{n:.1} times the loop");
        let shown: [(_, &dyn Fn(f64) -> String); 2] =
            [(r.of_ceiling, &part), (r.of_pageable_loop, &times)];
        for (all, shown) in shown {
            rows.push(row("  ratio".into(), shown(all.load), maybe(all.save, shown), "-".into()));
        }
    }
    out += &table(&rows);
    if let Some(r) = f.rows.last().map(|r| &r.loaded) {
        let why = r
            .not_on_gpu
            .as_ref()
            .map(|why| format!(", not verified on the GPU: {why}"))
            .unwrap_or_default();
        out += &format!("\nchecksums: {}{why}\n", r.checksums);
    }
    out
}

/// The tiers that bytes took.
fn tiers<'a>(reports: impl Iterator<Item = &'a Report> + Clone) -> String {
    let took = |t: &Tier| reports.clone().any(|r| r.by_tier[*t] > 0);
    Tier::ALL.iter().filter(|t| took(t)).map(|t| t.name()).collect::<Vec<_>>().join(", ")
}
