//! `strake stats`: the counters of a mount.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Args;
use serde_json::{Map, Value};
use strake_fuse::supervisor::control::Asker;
use strake_proto::{Code, Error, Result};
use strake_term::table;

use super::{mounted_at, not_mounted, umount};

#[derive(Args)]
pub struct StatsArgs {
    mountpoint: PathBuf,
    #[arg(long)]
    json: bool,
}

/// How long the mount's processes may take to answer.
const ANSWER: Duration = Duration::from_secs(10);

pub fn stats(args: &StatsArgs) -> Result<ExitCode> {
    let mount = mounted_at(&args.mountpoint)?.ok_or_else(|| not_mounted(&args.mountpoint))?;
    let failed = |e: std::io::Error| {
        Error::from(e).context(format!("asking the process of {}", mount.at.display()))
    };
    let mut process = Asker::connect(&mount.device, umount::owner_of(&mount)).map_err(failed)?;
    let said = process.ask("stats", ANSWER).map_err(failed)?;
    let odd = || {
        Error::new(Code::Protocol, format!("the process of {} said: {said}", mount.at.display()))
    };
    let counts = parse(&said).ok_or_else(odd)?;
    if args.json {
        let all: Map<String, Value> =
            counts.into_iter().map(|(name, n)| (name.into(), n.into())).collect();
        println!("{}", Value::Object(all));
    } else {
        let row = |(name, n): &(&str, u64)| vec![name.to_string(), n.to_string()];
        print!("{}", table(&counts.iter().map(row).collect::<Vec<_>>()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Parses an answer; `None`: it is invalid.
fn parse(said: &str) -> Option<Vec<(&str, u64)>> {
    said.strip_prefix("stats ")?.split(' ').map(one).collect()
}

fn one(word: &str) -> Option<(&str, u64)> {
    let (name, n) = word.split_once('=')?;
    Some((name, n.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        assert_eq!(
            parse("stats a=1 b_c=18446744073709551615").unwrap(),
            [("a", 1), ("b_c", u64::MAX)]
        );
        for bad in ["", "stats", "stats a", "stats a=x", "stats a=1  b=2", "what?", "state a=1"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}
