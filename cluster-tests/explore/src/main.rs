//! `strake-explore`: explores larger cases than `./test` has time for.

use std::fmt::Debug;

use clap::{Parser, Subcommand};
use strake_explore::{Model, chain, explore, leases, writeback};

/// Explores every order of events of the lease protocol (docs/leases.md) within bounds.
#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    other: Option<Other>,
    #[command(flatten)]
    leases: OfLeases,
}

#[derive(Subcommand)]
enum Other {
    /// Explore write-back instead
    WriteBack(OfWriteBack),
    /// Explore chains of replicas instead (docs/replication.md)
    Chain(OfChain),
}

#[derive(clap::Args)]
struct OfLeases {
    /// Reads by both clients together
    #[arg(long, default_value_t = 2)]
    asks: u8,
    /// Changes by both clients together
    #[arg(long, default_value_t = 1)]
    changes: u8,
    /// Ticks of the clock; a term is two
    #[arg(long, default_value_t = 0)]
    ticks: u8,
    /// Recall requests that are sent again
    #[arg(long, default_value_t = 0)]
    repeats: u8,
    /// Changes of which a copy arrives later
    #[arg(long, default_value_t = 0)]
    copies: u8,
    /// Changes whose caller no longer waits
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
    /// Writes by one client; others wait for its reports
    #[arg(long, default_value_t = 0)]
    writes: u8,
    /// A session may hold one lease only
    #[arg(long)]
    full: bool,
    /// Recall requests take time, and may be lost like everything else
    #[arg(long)]
    polls: bool,
    /// A mistake made on purpose, which must be found
    #[arg(long, value_enum, default_value = "none")]
    fault: leases::Fault,
    /// Stop after so many different states (about 100 bytes each)
    #[arg(long, default_value_t = 50_000_000)]
    most: usize,
}

#[derive(clap::Args)]
struct OfWriteBack {
    /// Opens for writing; one client has the file open from the start
    #[arg(long, default_value_t = 1)]
    opens: u8,
    /// Reads of the file's size or data by clients
    #[arg(long, default_value_t = 0)]
    looks: u8,
    /// Writes of a block
    #[arg(long, default_value_t = 2)]
    writes: u8,
    /// Blocks of the file beyond the first
    #[arg(long, default_value_t = 0)]
    more_blocks: u8,
    /// Files that are closed
    #[arg(long, default_value_t = 0)]
    releases: u8,
    /// Ticks of the clock; a term is two
    #[arg(long, default_value_t = 0)]
    ticks: u8,
    /// Recall requests that are sent again
    #[arg(long, default_value_t = 0)]
    repeats: u8,
    /// New connections to a living leader
    #[arg(long, default_value_t = 0)]
    reconnects: u8,
    /// Leaders that die
    #[arg(long, default_value_t = 0)]
    failovers: u8,
    /// Renewals
    #[arg(long, default_value_t = 0)]
    renewals: u8,
    /// Sessions that are evicted
    #[arg(long, default_value_t = 0)]
    evictions: u8,
    /// Updates take some time at the storage server
    #[arg(long)]
    chain: bool,
    /// A mistake made on purpose, which must be found
    #[arg(long, value_enum, default_value = "none")]
    fault: writeback::Fault,
    /// Stop after so many different states (about 100 bytes each)
    #[arg(long, default_value_t = 50_000_000)]
    most: usize,
}

#[derive(clap::Args)]
struct OfChain {
    /// Copies that the chain wants, of three targets
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=3))]
    copies: u8,
    /// Writes by two clients together
    #[arg(long, default_value_t = 1)]
    writes: u8,
    /// Flushes by both
    #[arg(long, default_value_t = 0)]
    flushes: u8,
    /// Servers that die
    #[arg(long, default_value_t = 0)]
    crashes: u8,
    /// Leases of living servers that run out
    #[arg(long, default_value_t = 0)]
    expiries: u8,
    /// Connections that break under a request, which may arrive later
    #[arg(long, default_value_t = 0)]
    breaks: u8,
    /// Requests of clients that arrive once more
    #[arg(long, default_value_t = 0)]
    doubles: u8,
    /// Requests between replicas that arrive once more
    #[arg(long, default_value_t = 0)]
    repeats: u8,
    /// How many of the writes their client gives up without an answer
    #[arg(long, default_value_t = 0)]
    given_up: u8,
    /// Programs get an error for those, and others write after that
    #[arg(long, requires = "given_up")]
    tells: bool,
    /// Changes of the chain, besides those by registrations
    #[arg(long, default_value_t = 0)]
    changes: u8,
    /// Changes of the targets that the chain wants
    #[arg(long, default_value_t = 0)]
    plans: u8,
    /// Updates for which there is no space
    #[arg(long, default_value_t = 0, requires = "slow")]
    full: u8,
    /// Staging takes time
    #[arg(long)]
    slow: bool,
    /// Space is short: an update is announced only after it is staged
    #[arg(long)]
    short: bool,
    /// Messages that come too early or too late are refused, instead of waiting
    #[arg(long)]
    refusals: bool,
    /// Try for one state in so many whether the chain can become whole again (0: only for states in
    /// which nothing can happen any more)
    #[arg(long, default_value_t = 0)]
    settle: u64,
    /// A mistake made on purpose, which must be found
    #[arg(long, value_enum, default_value = "none")]
    fault: chain::Fault,
    /// Stop after so many different states (some 100 bytes each, and some 3,000 for each of the two
    /// farthest levels)
    #[arg(long, default_value_t = 50_000_000)]
    most: usize,
}

impl OfChain {
    fn bounds(&self) -> chain::Bounds {
        chain::Bounds {
            copies: self.copies,
            writes: self.writes,
            flushes: self.flushes,
            crashes: self.crashes,
            expiries: self.expiries,
            breaks: self.breaks,
            doubles: self.doubles,
            repeats: self.repeats,
            given_up: self.given_up,
            tells: self.tells,
            changes: self.changes,
            plans: self.plans,
            full: self.full,
            slow: self.slow,
            short: self.short,
            refusals: self.refusals,
            settle: self.settle,
        }
    }
}

fn tell<M: Model>(first: M, most: usize) -> std::process::ExitCode
where
    M::Action: Debug,
{
    let seen = explore(first, most);
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

fn main() -> std::process::ExitCode {
    let Args { other, leases: a } = Args::parse();
    if let Some(Other::Chain(a)) = &other {
        return tell(chain::World::new(a.bounds(), a.fault), a.most);
    }
    if let Some(Other::WriteBack(a)) = other {
        let bounds = writeback::Bounds {
            opens: a.opens,
            looks: a.looks,
            writes: a.writes,
            more_blocks: a.more_blocks,
            releases: a.releases,
            ticks: a.ticks,
            repeats: a.repeats,
            reconnects: a.reconnects,
            failovers: a.failovers,
            renewals: a.renewals,
            evictions: a.evictions,
            chain: a.chain,
        };
        return tell(writeback::World::new(bounds, a.fault), a.most);
    }
    let bounds = leases::Bounds {
        asks: a.asks,
        changes: a.changes,
        ticks: a.ticks,
        repeats: a.repeats,
        copies: a.copies,
        reconnects: a.reconnects,
        impatience: a.impatience,
        failovers: a.failovers,
        renewals: a.renewals,
        writes: a.writes,
        full: a.full,
        polls: a.polls,
    };
    tell(leases::World::new(bounds, a.fault), a.most)
}
