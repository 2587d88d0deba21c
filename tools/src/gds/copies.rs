//! `strake gds stage`, `copies` and `unstage`: copies of sealed files in a folder of this node.

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use serde_json::json;
use strake_gds::{
    local::{self, Listed},
    session::{self, Session, Setup},
};
use strake_proto::{Code, Error, Result};
use strake_term::{Progress, size, table};

/// Work that takes longer than this shows its progress.
const SILENT: Duration = Duration::from_secs(2);

#[derive(Args)]
pub struct StageArgs {
    /// Metadata servers, HOST[:PORT] with commas.
    mds: String,
    /// Sealed files, by their paths from the root of the file system.
    #[arg(required = true)]
    paths: Vec<String>,
    /// Folder for the copies, on ext4 or XFS. No other user may be able to write to it.
    #[arg(long)]
    to: PathBuf,
    /// File with the client key.
    #[arg(long, default_value = session::KEY)]
    client_key: PathBuf,
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct ListArgs {
    /// Folder with copies.
    dir: PathBuf,
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct UnstageArgs {
    /// Folder with copies.
    dir: PathBuf,
    /// Copies, by the paths or names that `strake gds copies` shows.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    what: Vec<String>,
    /// Remove all copies in the folder.
    #[arg(long)]
    all: bool,
}

pub fn stage(args: StageArgs) -> Result<ExitCode> {
    // The device is not used.
    let setup = Setup { key: args.client_key, ..Setup::new(&args.mds, session::Memory::Host) };
    let session = Session::open(&setup)?;
    let mut progress = Progress::new();
    let (mut made, mut failed, begun) = (Vec::new(), Vec::new(), Instant::now());
    for path in &args.paths {
        let mut shown = Instant::now();
        let told = |done: u64, all: u64| {
            if begun.elapsed() > SILENT && shown.elapsed() > SILENT / 2 {
                shown = Instant::now();
                progress.say(format!("{path}: {} of {}", size(done), size(all)));
            }
        };
        let outcome = session.stage(path, &args.to, told);
        progress.clear();
        match outcome {
            Ok(s) => {
                if !args.json {
                    let how = if s.already { "is there" } else { "staged" };
                    println!("{path}: {how}, {}", size(s.size));
                }
                made.push(s);
            }
            Err(e) => {
                eprintln!("error: {e}");
                failed.push(json!({ "path": path, "error": e.message, "errno": e.code.errno() }));
            }
        }
    }
    if args.json {
        let all = json!({ "copies": made, "failed": failed });
        println!("{}", serde_json::to_string_pretty(&all).map_err(std::io::Error::from)?);
    }
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub fn list(args: ListArgs) -> Result<ExitCode> {
    let all = local::list(&args.dir)?;
    if args.json {
        let all = json!({ "copies": all });
        println!("{}", serde_json::to_string_pretty(&all).map_err(std::io::Error::from)?);
        return Ok(ExitCode::SUCCESS);
    }
    let mut rows = vec![["PATH", "SIZE", "INODE", "STATE", "NAME"].map(String::from).to_vec()];
    for c in &all {
        let or_none = |s: Option<String>| s.unwrap_or_else(|| "-".into());
        rows.push(vec![
            or_none(c.path.clone()),
            or_none(c.size.map(size)),
            or_none(c.inode.map(|n| format!("{n:#x}"))),
            c.why.clone().unwrap_or_else(|| "usable".into()),
            c.name.clone(),
        ]);
    }
    print!("{}", table(&rows));
    Ok(ExitCode::SUCCESS)
}

pub fn unstage(args: UnstageArgs) -> Result<ExitCode> {
    let all = local::list(&args.dir)?;
    let is = |c: &Listed, what: &str| c.name == what || c.path.as_deref() == Some(what);
    // All of them must be found before any is removed.
    if let Some(none) = args.what.iter().find(|what| !all.iter().any(|c| is(c, what))) {
        let m = format!(
            "'{}' has no copy of '{none}': `strake gds copies` shows what it has",
            args.dir.display()
        );
        return Err(Error::new(Code::NoEnt, m));
    }
    for c in all.iter().filter(|c| args.all || args.what.iter().any(|what| is(c, what))) {
        local::remove(&args.dir, c)?;
        println!("{}: removed", c.path.as_ref().unwrap_or(&c.name));
    }
    Ok(ExitCode::SUCCESS)
}
