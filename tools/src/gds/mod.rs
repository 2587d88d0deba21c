//! `strake gds`: which paths between files and GPU memory this machine has, and why it lacks the
//! others.

mod child;
mod copies;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use strake_gds::{Numa, Policy, session, status::TierStatus};
use strake_proto::Result;
use strake_term::{size, table};

/// This program.
const SELF: &str = "/proc/self/exe";

#[derive(Subcommand)]
pub enum Command {
    /// Show what this machine has, without moving any data.
    Status(LookArgs),
    /// Move a pattern through every tier and back, and show how fast that was.
    Probe {
        #[command(flatten)]
        look: LookArgs,
        /// Exit with 1 if no tier passed that this policy allows: prefer, at-least:TIER or
        /// require:TIER.
        #[arg(long, default_value_t = Policy::Prefer)]
        policy: Policy,
    },
    /// Measure loads and saves in one run with the limit of the device and with a loop of read and
    /// copy.
    Bench {
        #[command(flatten)]
        at: Device,
        #[command(flatten)]
        args: strake_bench::gpu::BenchArgs,
    },
    /// Copy sealed files to a folder of this node, for the tier local-gds.
    Stage(copies::StageArgs),
    /// List the copies in a folder of this node.
    Copies(copies::ListArgs),
    /// Remove copies from a folder of this node.
    Unstage(copies::UnstageArgs),
    /// The program that `status` and `probe` start to look for devices.
    #[command(hide = true)]
    Look {
        #[command(flatten)]
        at: Device,
        #[arg(long)]
        test: bool,
        #[arg(long)]
        local: Option<PathBuf>,
    },
    /// The program that opens cuFile's driver before another process does.
    #[command(hide = true)]
    LookCufile,
}

#[derive(Args)]
pub struct LookArgs {
    #[command(flatten)]
    at: Device,
    /// Seconds after which a driver that does not answer counts as hung.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=600))]
    timeout: u64,
    /// Folder with copies on this node, for the tier local-gds.
    #[arg(long)]
    local: Option<PathBuf>,
    #[arg(long)]
    json: bool,
}

#[derive(Args, Clone, Copy)]
pub struct Device {
    /// Number of the GPU, as CUDA counts them.
    #[arg(long, default_value_t = 0)]
    device: u32,
    /// Where the memory is.
    #[arg(long, value_enum, default_value_t = Memory::Cuda)]
    memory: Memory,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Memory {
    /// On an NVIDIA GPU.
    Cuda,
    /// In this machine's host memory, in place of a device, to see how it works. The figures say
    /// nothing about a GPU.
    Host,
}

impl Device {
    /// The same for a session.
    fn of_session(self) -> session::Memory {
        match self.memory {
            Memory::Cuda => session::Memory::Cuda(self.device),
            Memory::Host => session::Memory::Host,
        }
    }
}

/// What is printed.
#[derive(Serialize)]
struct Shown {
    device: Option<String>,
    /// What could not be had as wanted.
    notice: Option<String>,
    /// The NUMA node of the device, or why it is unknown; for `probe` also what a bridge placed
    /// there.
    numa: Option<Numa>,
    tiers: Vec<TierStatus>,
    /// Only for `probe`.
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<Policy>,
    /// Whether a tier passed that the policy allows.
    #[serde(skip_serializing_if = "Option::is_none")]
    met: Option<bool>,
}

pub fn run(command: Command) -> Result<ExitCode> {
    let (args, policy) = match command {
        Command::Look { at, test, local } => return child::look(at, test, local),
        Command::LookCufile => return Ok(child::look_cufile()),
        Command::Stage(args) => return copies::stage(args),
        Command::Copies(args) => return copies::list(args),
        Command::Unstage(args) => return copies::unstage(args),
        Command::Bench { at, args } => {
            return strake_bench::gpu::command(args, at.of_session(), SELF.as_ref());
        }
        Command::Status(args) => (args, None),
        Command::Probe { look, policy } => (look, Some(policy)),
    };
    let found = child::ask(args.at, args.local.as_deref(), policy.is_some(), args.timeout)?;
    let met = policy.map(|p| {
        found.tiers.iter().any(|t| t.available && t.tier.parse().is_ok_and(|t| p.allows(t)))
    });
    let shown = Shown {
        device: found.device,
        notice: found.notice,
        numa: found.numa,
        tiers: found.tiers,
        policy,
        met,
    };
    if args.json {
        println!("{}", serde_json::to_string_pretty(&shown).map_err(std::io::Error::from)?);
    } else {
        print(&shown);
    }
    Ok(if met == Some(false) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn print(shown: &Shown) {
    println!("device: {}", shown.device.as_deref().unwrap_or("none"));
    if let Some(Numa { node: Some(node), .. }) = &shown.numa {
        println!("NUMA node: {node}");
    }
    if let Some(n) = &shown.notice {
        println!("note: {n}");
    }
    println!();
    let mut rows = vec![["TIER", "STATE", "TO DEVICE", "FROM DEVICE"].map(String::from).to_vec()];
    for t in &shown.tiers {
        let rate =
            |r: Option<f64>| r.map_or_else(|| "-".into(), |r| format!("{}/s", size(r as u64)));
        let state = match t.reason.as_deref() {
            None => "available",
            Some("not-tested") => "not tested",
            Some(_) => "not available",
        };
        rows.push(vec![
            t.tier.clone(),
            state.into(),
            rate(t.load_bytes_per_s),
            rate(t.save_bytes_per_s),
        ]);
    }
    print!("{}", table(&rows));
    println!();
    for t in &shown.tiers {
        if let Some(why) = &t.why {
            println!("{}: {why}", t.tier);
        }
    }
    if let (Some(policy), Some(met)) = (shown.policy, shown.met) {
        println!("\nthe policy {policy} {}", if met { "can be met" } else { "cannot be met here" });
    }
}
