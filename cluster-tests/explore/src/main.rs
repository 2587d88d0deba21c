//! `strake-explore`: larger cases than `./test` has time for.

use clap::Parser;
use strake_explore::{
    explore,
    leases::{Bounds, Fault, World},
};

/// Explores every order of events of the lease protocol (docs/leases.md) within bounds.
#[derive(Parser)]
struct Args {
    /// Reads by two clients together
    #[arg(long, default_value_t = 2)]
    asks: u8,
    /// Changes by both together
    #[arg(long, default_value_t = 1)]
    changes: u8,
    /// Ticks of the clock; a term is two
    #[arg(long, default_value_t = 0)]
    ticks: u8,
    /// Requests for recalls that are sent again
    #[arg(long, default_value_t = 0)]
    repeats: u8,
    /// Changes that nobody waits for any more
    #[arg(long, default_value_t = 0)]
    impatience: u8,
    /// New connections to a living leader
    #[arg(long, default_value_t = 0)]
    reconnects: u8,
    /// Leaders that die
    #[arg(long, default_value_t = 0)]
    failovers: u8,
    /// Renewals
    #[arg(long, default_value_t = 0)]
    renewals: u8,
    /// Writes by one client, for whose reports others wait
    #[arg(long, default_value_t = 0)]
    writes: u8,
    /// A session may hold one lease only
    #[arg(long)]
    full: bool,
    /// Requests for recalls take time, and may be lost like everything else
    #[arg(long)]
    polls: bool,
    /// A mistake made on purpose, to be found
    #[arg(long, value_enum, default_value = "none")]
    fault: Fault,
    /// Stop after so many different worlds (about 100 bytes each)
    #[arg(long, default_value_t = 50_000_000)]
    most: usize,
}

fn main() -> std::process::ExitCode {
    let a = Args::parse();
    let bounds = Bounds {
        asks: a.asks,
        changes: a.changes,
        ticks: a.ticks,
        repeats: a.repeats,
        reconnects: a.reconnects,
        impatience: a.impatience,
        failovers: a.failovers,
        renewals: a.renewals,
        writes: a.writes,
        full: a.full,
        polls: a.polls,
    };
    let seen = explore(World::new(bounds, a.fault), a.most);
    println!("{} states, {} steps, depth {}", seen.states, seen.steps, seen.depth);
    if let Some((story, why)) = &seen.broken {
        println!("broken: {why}");
        for action in story {
            println!("  {action:?}");
        }
        return 1.into();
    }
    if seen.cut {
        println!("there are more; nothing was broken in those");
    }
    0.into()
}
