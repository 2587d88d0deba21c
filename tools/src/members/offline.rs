//! `strake mds inspect|recover|dump|load`: work on folders of stopped metadata servers. Implemented
//! by `strake_mds::offline`.

use std::{
    fs::{self, File},
    io::{BufReader, BufWriter, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use serde_json::{Value, json};
use strake_mds::offline::{
    dump,
    inspect::{self, Known, Report},
    load,
    recover::{self, Plan, Recovery},
};
use strake_proto::{Code, Error, Result};
use strake_runtime::Env;
use strake_term::{Progress, size, table};

use crate::config;

#[derive(Args)]
pub struct InspectArgs {
    /// Folders of stopped metadata servers.
    #[arg(required = true)]
    dirs: Vec<PathBuf>,
    /// Print it as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct RecoverArgs {
    /// Folder of the surviving metadata server, which must be stopped.
    #[arg(long)]
    dir: PathBuf,
    /// Folders of other survivors, to make sure that none of them has more.
    #[arg(long, value_name = "DIR")]
    with: Vec<PathBuf>,
    /// The server's id from now on [default: the lowest that was never used].
    #[arg(long)]
    id: Option<u64>,
    /// Begin an era higher than this. Needed for a group that was recovered before from another
    /// folder.
    #[arg(long, value_name = "ERA", default_value_t = 0)]
    beyond: u64,
    /// Do it although changes that only the lost members had are lost. Without this option nothing
    /// is changed.
    #[arg(long)]
    accept_loss: bool,
    /// Print plan and outcome as JSON.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct DumpArgs {
    /// Folder of a stopped metadata server.
    #[arg(long)]
    dir: PathBuf,
    /// File to write, `-` for standard output. It must not exist yet.
    #[arg(long, short)]
    output: PathBuf,
    /// Print the outcome as JSON (to standard error if the dump goes to standard output).
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct LoadArgs {
    /// The dump, `-` for standard input.
    file: PathBuf,
    /// Folder to create. It is absent or empty.
    #[arg(long)]
    dir: PathBuf,
    /// File with the cluster key.
    #[arg(long)]
    cluster_key: PathBuf,
    /// The server's id [default: the lowest that was never used].
    #[arg(long)]
    id: Option<u64>,
    /// Begin an era higher than this. Needed for a cluster that was recovered after the dump was
    /// made.
    #[arg(long, value_name = "ERA", default_value_t = 0)]
    beyond: u64,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// Exit status of a `recover` that only showed its plan.
const NOT_ACCEPTED: u8 = 3;

fn known(all: &[Known]) -> Vec<Value> {
    all.iter().map(|(id, at)| json!({ "id": id, "address": at })).collect()
}

fn names(all: &[Known]) -> String {
    let one =
        |(id, at): &Known| at.as_ref().map_or_else(|| id.to_string(), |at| format!("{id} at {at}"));
    all.iter().map(one).collect::<Vec<_>>().join(", ")
}

fn word(r: &Report) -> String {
    format!("{:?}", r.identity).split(' ').next().unwrap_or_default().to_lowercase()
}

fn report_json(r: &Report) -> Value {
    let log = match &r.log {
        Ok(l) => json!({
            "term": l.term, "first_index": l.first, "last_index": l.last.0, "last_term": l.last.1, "unapplied": l.unapplied,
        }),
        Err(e) => json!({ "error": e.message }),
    };
    json!({
        "dir": r.dir, "member": r.member, "identity": word(r), "log": log, "fs_name": r.fs_name,
        "incarnation": r.incarnation.to_string(), "era": r.incarnation.era(), "map_version": r.map_version,
        "applied_index": r.applied.0, "applied_term": r.applied.1, "voters": known(&r.voters), "learners": known(&r.learners),
        "inodes": r.inodes, "unusable": r.void,
    })
}

pub fn inspect(args: &InspectArgs) -> Result<ExitCode> {
    let reports = args.dirs.iter().map(|d| inspect::inspect(d)).collect::<Result<Vec<Report>>>()?;
    let (best, complete) = (inspect::best(&reports), inspect::is_complete(&reports));
    if args.json {
        let all: Vec<Value> = reports.iter().map(report_json).collect();
        println!(
            "{:#}",
            json!({ "folders": all, "best": best.map(|r| &r.dir), "complete": complete })
        );
        return Ok(ExitCode::SUCCESS);
    }
    let head =
        ["FOLDER", "MEMBER", "STATE", "INCARNATION", "TERM", "LAST", "APPLIED", "INODES", "VOTERS"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for r in &reports {
        let (term, last) = match &r.log {
            Ok(l) => (l.term.to_string(), format!("{} of term {}", l.last.0, l.last.1)),
            Err(_) => ("-".into(), "log damaged".into()),
        };
        let voters = r.voters.iter().map(|v| v.0.to_string()).collect::<Vec<_>>().join(",");
        let cells = [
            r.member.to_string(),
            word(r),
            r.incarnation.to_string(),
            term,
            last,
            r.applied.0.to_string(),
        ];
        let row = std::iter::once(r.dir.display().to_string())
            .chain(cells)
            .chain([r.inodes.to_string(), voters]);
        rows.push(row.collect());
    }
    print!("{}", table(&rows));
    for r in &reports {
        if let Err(e) = &r.log {
            println!("{}: {}", r.dir.display(), e.message);
        }
        if let Some(why) = &r.void {
            println!("{}: nothing can be recovered from it: {why}", r.dir.display());
        }
    }
    match best {
        Some(r) => println!("{} has the most; {}", r.dir.display(), completeness(complete)),
        None => println!(
            "nothing can be recovered from {}",
            if reports.len() == 1 { "it" } else { "any of them" }
        ),
    }
    Ok(ExitCode::SUCCESS)
}

fn completeness(complete: bool) -> &'static str {
    match complete {
        true => "with these folders no acknowledged change can be missing",
        false => "the last acknowledged changes may be missing from all of these folders",
    }
}

fn plan_json(p: &Plan, done: bool) -> Value {
    json!({
        "done": done, "needless": p.needless, "from": report_json(&p.from), "id": p.to, "incarnation": p.incarnation.to_string(),
        "era": p.incarnation.era(), "last_index": p.last.0, "last_term": p.last.1, "entries": p.entries, "gone": known(&p.gone),
        "log_lost": p.log_lost, "may_lose": p.may_lose, "resumed": p.resumed,
    })
}

fn show_plan(p: &Plan) {
    let (member, to) = (p.from.member, p.to);
    println!(
        "folder {} of metadata server {member}, file system '{}', {} inodes",
        p.from.dir.display(),
        p.from.fs_name,
        p.from.inodes
    );
    println!("group of incarnation {}: voters {}", p.from.incarnation, names(&p.from.voters));
    if p.resumed {
        println!("continues a recovery that was begun before");
    }
    println!(
        "kept: everything up to entry {} of term {}, {} of them from the log",
        p.last.0, p.last.1, p.entries
    );
    if let Some(why) = &p.log_lost {
        println!("the log cannot be used; its entries beyond that are lost: {why}");
    }
    match p.may_lose {
        true => println!(
            "lost: acknowledged changes that only other members have, such as new, renamed and \
             removed files"
        ),
        false => println!("lost: nothing that was acknowledged"),
    }
    println!(
        "all client sessions end: data written but not synced fails with EIO, and locks are gone"
    );
    println!(
        "metadata server {member} becomes {to}, the only voter of incarnation {}",
        p.incarnation
    );
    if !p.gone.is_empty() {
        println!(
            "can never be members again: {}; stop them where they run, and keep them from being \
             started",
            names(&p.gone)
        );
    }
}

pub fn recover(args: &RecoverArgs) -> Result<ExitCode> {
    let env = Env::system();
    let options = recover::Options { id: args.id, beyond: args.beyond, others: args.with.clone() };
    let recovery = Recovery::prepare(&args.dir, &options, env.random_u64())?;
    let p = &recovery.plan;
    if p.needless {
        match args.json {
            true => println!("{:#}", plan_json(p, true)),
            false => println!(
                "nothing to do: metadata server {} is the only voter of its group (incarnation {}) and its folder is whole; start it",
                p.to, p.incarnation
            ),
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !args.json {
        show_plan(p);
    }
    if !args.accept_loss {
        if args.json {
            println!("{:#}", plan_json(p, false));
        }
        eprintln!("strake: nothing was changed; repeat it with --accept-loss");
        return Ok(ExitCode::from(NOT_ACCEPTED));
    }
    let mut progress = Progress::new();
    recovery.run(env.random_u64(), |line| progress.say(line))?;
    progress.done();
    match args.json {
        true => println!("{:#}", plan_json(p, true)),
        false => {
            println!(
                "done: set `id = {}` in this server's configuration, take the others out of `peers`, and start it;",
                p.to
            );
            println!(
                "then start new servers with empty folders and `join = true`, and take them in with `strake mds add`"
            );
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub fn dump(args: &DumpArgs) -> Result<ExitCode> {
    let mut progress = Progress::new();
    let stdout = args.output == Path::new("-");
    let outcome = match stdout {
        true => dump::dump(&args.dir, &mut BufWriter::new(std::io::stdout().lock()), |line| {
            progress.say(line)
        })?,
        false => dump_to_file(args, &mut progress)?,
    };
    progress.done();
    let told = match args.json {
        true => format!(
            "{:#}",
            json!({
                "records": outcome.records, "bytes": outcome.bytes, "index": outcome.head.index, "term": outcome.head.term,
                "incarnation": outcome.head.incarnation, "fs_name": outcome.head.fs_name, "unapplied": outcome.unapplied,
            })
        ),
        false => format!(
            "{} records, {}, of '{}' as of entry {} of term {}",
            outcome.records,
            size(outcome.bytes),
            outcome.head.fs_name,
            outcome.head.index,
            outcome.head.term
        ),
    };
    match stdout {
        true => eprintln!("{told}"),
        false => println!("{told}"),
    }
    if outcome.unapplied > 0 {
        eprintln!(
            "strake: the log has {} more entries that were not known to be committed when this \
             server stopped; they are not in the dump",
            outcome.unapplied
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes the file so that it appears complete or not at all.
fn dump_to_file(args: &DumpArgs, progress: &mut Progress) -> Result<dump::Outcome> {
    let path = &args.output;
    let named = |p: &Path, e: std::io::Error| Error::from(e).context(p.display());
    if path.exists() {
        return Err(Error::new(
            Code::Exist,
            format!("{} exists already; a dump never overwrites a file", path.display()),
        ));
    }
    let mut part = path.clone().into_os_string();
    part.push(".part");
    let part = PathBuf::from(part);
    let written = (|| {
        let mut out = BufWriter::new(File::create(&part).map_err(|e| named(&part, e))?);
        let outcome = dump::dump(&args.dir, &mut out, |line| progress.say(line))?;
        out.flush().and_then(|()| out.get_ref().sync_all()).map_err(|e| named(&part, e))?;
        fs::rename(&part, path).map_err(|e| named(path, e))?;
        Ok(outcome)
    })();
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written
}

pub fn load(args: &LoadArgs) -> Result<ExitCode> {
    let env = Env::system();
    let random = (env.random_u64(), env.random_u64());
    let cluster_key = config::read_key(&args.cluster_key)?;
    let options = load::Options { cluster_key, id: args.id, beyond: args.beyond, random };
    let mut progress = Progress::new();
    let mut say = |line: String| progress.say(line);
    let loaded = match args.file == Path::new("-") {
        true => load::load(&args.dir, &mut std::io::stdin().lock(), &options, &mut say),
        false => {
            let file =
                File::open(&args.file).map_err(|e| Error::from(e).context(args.file.display()))?;
            load::load(&args.dir, &mut BufReader::with_capacity(1 << 20, file), &options, &mut say)
        }
    };
    let outcome = loaded.map_err(|e| e.context(args.file.display()))?;
    progress.done();
    if args.json {
        println!(
            "{:#}",
            json!({
                "id": outcome.member, "incarnation": outcome.incarnation.to_string(), "era": outcome.incarnation.era(),
                "fs_name": outcome.fs_name, "records": outcome.records, "inodes": outcome.inodes,
            })
        );
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "{} is the folder of metadata server {}, the only voter of incarnation {} of '{}': {} records, {} inodes",
        args.dir.display(),
        outcome.member,
        outcome.incarnation,
        outcome.fs_name,
        outcome.records,
        outcome.inodes
    );
    println!(
        "start it with this id, folder and `fs_name`; then take others in with `strake mds add`"
    );
    Ok(ExitCode::SUCCESS)
}
