//! `strake wait`: waits until the cluster is redundant or healthy, and shows how far it is.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use strake_proto::Result;
use strake_term::{Progress, size, span};

use crate::{
    health::Health,
    members::UNFINISHED,
    status::{CATCH_UP, Seen, ServerArgs},
};

#[derive(Args)]
pub struct WaitArgs {
    /// Until nothing is wrong any more: `strake status` shows OK.
    #[arg(long, required_unless_present = "redundant", conflicts_with = "redundant")]
    healthy: bool,
    /// Until all servers are there and all data has the copies that it should. Slow or nearly full
    /// targets are not waited for.
    #[arg(long)]
    redundant: bool,
    /// How long to wait, in seconds.
    #[arg(long, default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    timeout: u64,
    #[command(flatten)]
    servers: ServerArgs,
}

const LOOK: Duration = Duration::from_secs(1);

pub fn wait(args: &WaitArgs) -> Result<ExitCode> {
    let found = args.servers.find()?;
    let (start, limit) = (Instant::now(), Duration::from_secs(args.timeout));
    let is_done = |h: &Health| match args.healthy {
        true => h.reasons.is_empty(),
        false => h.exit_status() == 0,
    };
    let mut progress = Progress::new();
    let (health, in_time) = crate::run(1, async {
        let mut first = None;
        loop {
            let left = limit.saturating_sub(start.elapsed());
            let seen = Seen::ask(&found, CATCH_UP.min(left.max(LOOK))).await?;
            if seen.is_refused() {
                return Ok((seen.health, false));
            }
            if is_done(&seen.health) || start.elapsed() >= limit {
                let in_time = is_done(&seen.health);
                return Ok((seen.health, in_time));
            }
            let first = *first.get_or_insert(seen.health.copies.to_copy);
            progress.say(line(&seen.health, first, start.elapsed()));
            tokio::time::sleep(LOOK.min(limit.saturating_sub(start.elapsed()))).await;
        }
    })?;
    progress.done();
    match args.servers.json {
        true => println!("{:#}", health.json()),
        false => print!("{}", health.text()),
    }
    if !in_time {
        let what = if args.healthy { "healthy" } else { "redundant" };
        let after = start.elapsed().as_secs();
        eprintln!("strake: not {what} after {after} s; the reasons are above");
    }
    Ok(if in_time { ExitCode::SUCCESS } else { ExitCode::from(UNFINISHED) })
}

/// One line about what is waited for. `first`: the bytes that were to be copied `taken` ago.
fn line(health: &Health, first: u64, taken: Duration) -> String {
    let codes: Vec<&str> = health.reasons.iter().map(|r| r.check.code).collect();
    let mut text = format!("{}: {}", health.word(), codes.join(", "));
    let copies = &health.copies;
    if copies.lacking > 0 {
        text += &format!(
            "; {} of {} chains lack a copy, about {} to copy",
            copies.lacking,
            copies.chains,
            size(copies.to_copy)
        );
        if copies.single > 0 {
            text += &format!(", {} with one copy", size(copies.single));
        }
        let done = first.saturating_sub(copies.to_copy);
        if done > 0 {
            let left = taken.as_secs_f64() / done as f64 * copies.to_copy as f64;
            text += &format!(", {} left", span(left.ceil() as u64));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::health::{Copies, Reason};

    #[test]
    fn the_line_says_what_is_missing_and_how_long_it_takes() {
        let check = strake_proto::health::COPIES_MISSING;
        let reason = Reason { check, texts: vec!["x".into()], next: String::new() };
        let copies = Copies { chains: 9, lacking: 3, moving: 0, to_copy: 2 << 30, single: 1 << 30 };
        let health = Health { reasons: vec![reason], copies };
        assert_eq!(
            line(&health, 3 << 30, Duration::from_secs(10)),
            "WARN: copies-missing; 3 of 9 chains lack a copy, about 2.0 GiB to copy, 1.0 GiB with \
             one copy, 20 s left"
        );
        assert!(line(&health, 2 << 30, Duration::from_secs(10)).ends_with("with one copy"));
    }
}
