//! `strake-faults`: the kill test on a cluster of its own. Exit status 0: all promises held; 2:
//! some were broken; 1: it could not run.

use std::{env, process::ExitCode};

use strake_faults::{Options, Outcome, Power, Result, Rule};

const USAGE: &str = "usage: strake-faults [--rounds N] [--seed N] [--dir DIR] [--mirror N] [--all-at-once]\n\
    \x20   [--power-loss | --lossy | --lossy-journal]\n\
    --all-at-once: every round kills every process\n\
    --power-loss: and cuts the power of the disk under them (needs root, ext4, a loop device)\n\
    --lossy: cuts the power of the killed servers' folders, which lie on a file system that loses all that was not synced,\n\
    \x20   names included, in any order (needs root, /dev/fuse)\n\
    --lossy-journal: the same, but any fsync makes all names durable, as with ext4's journal";

fn options() -> Result<Options> {
    let strake = env::current_exe()?.with_file_name("strake");
    let dir = env::temp_dir().join("strake-faults");
    let mut o =
        Options { strake, rounds: 30, seed: 1, dir, mirror: 2, all: false, power: Power::Stays };
    let mut args = env::args().skip(1);
    while let Some(a) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{a} needs a value\n{USAGE}"));
        match a.as_str() {
            "--rounds" => o.rounds = value()?.parse()?,
            "--seed" => o.seed = value()?.parse()?,
            "--dir" => o.dir = value()?.into(),
            "--mirror" => o.mirror = value()?.parse()?,
            "--power-loss" => o.power = Power::Ext4,
            "--lossy" => o.power = Power::Lossy(Rule::Posix),
            "--lossy-journal" => o.power = Power::Lossy(Rule::Journal),
            "--all-at-once" => o.all = true,
            _ => return Err(USAGE.into()),
        }
    }
    o.dir = std::path::absolute(o.dir)?;
    Ok(o)
}

fn main() -> ExitCode {
    match options().and_then(|o| strake_faults::run(&o)) {
        Ok(Outcome { broken: 0, promises }) => {
            println!("no promise of {promises} was broken");
            ExitCode::SUCCESS
        }
        Ok(Outcome { broken, promises }) => {
            println!("{broken} broken or found by fsck, of {promises} promises");
            ExitCode::from(2)
        }
        Err(e) => {
            eprintln!("strake-faults: {e}");
            ExitCode::FAILURE
        }
    }
}
