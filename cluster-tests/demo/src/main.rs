//! The main job from end to end, as `./demo` runs it: a real cluster and mount, real samples packed
//! into shards and read back, and a checkpoint written by eight ranks while the metadata leader and
//! a storage server are killed. SHA-256 sums prove all data. It uses the `strake` binary and the
//! mount from outside, like any user.

mod checkpoint;
mod cluster;
mod report;
mod samples;
mod shards;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use cluster::Cluster;
use report::Report;

pub type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const USAGE: &str = "usage: demo [--dir DIR] [--checkpoint-gib N] [FOLDER]";

struct Options {
    dir: PathBuf,
    folder: Option<PathBuf>,
    checkpoint_gib: u64,
}

fn options() -> Result<Options> {
    let mut o = Options { dir: PathBuf::from(".strake-demo"), folder: None, checkpoint_gib: 4 };
    let mut args = env::args().skip(1);
    while let Some(a) = args.next() {
        match a.as_str() {
            "-h" | "--help" => return Err(USAGE.into()),
            "--dir" => o.dir = args.next().ok_or(USAGE)?.into(),
            "--checkpoint-gib" => o.checkpoint_gib = args.next().ok_or(USAGE)?.parse()?,
            flag if flag.starts_with('-') => {
                return Err(format!("unknown option {flag}\n{USAGE}").into());
            }
            folder if o.folder.is_none() => o.folder = Some(folder.into()),
            _ => return Err(USAGE.into()),
        }
    }
    o.dir = std::path::absolute(o.dir)?;
    Ok(o)
}

fn main() -> ExitCode {
    match options().and_then(|o| run(&o)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("demo: {e}");
            ExitCode::FAILURE
        }
    }
}

/// Prints what is done next; every step of the demo prints one such line.
pub fn step(what: impl std::fmt::Display) {
    println!("==> {what}");
}

fn run(o: &Options) -> Result<()> {
    let start = Instant::now();
    let mut report = Report::default();
    fs::create_dir_all(&o.dir)?;
    let cluster = Cluster::new(&o.dir)?;
    step(
        "cluster up: 3 metadata servers, 4 storage servers with 2 targets each, 2 copies of everything",
    );
    let t = Instant::now();
    cluster.up()?;
    report.row("cluster up and mounted", 0, t.elapsed());

    let work = cluster.mount.join("demo");
    if work.exists() {
        fs::remove_dir_all(&work)?;
    }
    fs::create_dir(&work)?;
    step("lfs setstripe -c -1 -S 1M: new files stripe over all targets");
    cluster.lfs(&["setstripe", "-c", "-1", "-S", "1M", path(&work)?])?;

    let samples = samples::collect(o.folder.as_deref())?;
    let bytes = samples.iter().map(|s| s.len).sum::<u64>();
    step(format!(
        "{} real samples, {} MB, packed into WebDataset tar shards on the mount",
        samples.len(),
        bytes / 1_000_000
    ));
    let t = Instant::now();
    let shards = shards::pack(&samples, &work.join("shards"))?;
    report.row(
        &format!("packed {} samples into {} shards", samples.len(), shards.len()),
        bytes,
        t.elapsed(),
    );

    step(
        "caches dropped; all shards read by 4 readers, every sample's SHA-256 compared with its source",
    );
    cluster.drop_caches()?;
    let t = Instant::now();
    let verified = shards::verify(&shards, &samples, 4)?;
    report.row("read and verified every sample", verified, t.elapsed());
    report.verified(verified);

    checkpoint::run(&cluster, &work, o.checkpoint_gib << 30, &mut report)?;

    step("both restarted; waiting until every chain is in sync again");
    let t = Instant::now();
    cluster.up()?;
    cluster.wait_whole(Duration::from_secs(120))?;
    report.row("killed servers restarted and back in sync", 0, t.elapsed());

    step("verified once more, from each replica alone");
    let damage = cluster.damage()?;
    for replica in 0..2 {
        let mount = cluster.mount_replica(replica)?;
        let there = mount.path.join("demo");
        let t = Instant::now();
        let moved: Vec<PathBuf> = shards
            .iter()
            .map(|s| there.join("shards").join(s.file_name().unwrap_or_default()))
            .collect();
        let mut n = shards::verify(&moved, &samples, 4)?;
        n += checkpoint::verify(&there.join("checkpoint"), &cluster.state_file("checkpoint.json"))?;
        report.row(&format!("verified from replica {} alone", replica + 1), n, t.elapsed());
        report.verified(n);
    }
    // A server that finds a chunk damaged repairs it from the other replica and answers correctly:
    // then the data did not come from this replica alone.
    if cluster.damage()? != damage {
        return Err(
            "a chunk was damaged and repaired, or a server restarted, while each replica was to answer alone".into()
        );
    }
    report.print(start.elapsed());
    cluster.next_steps();
    Ok(())
}

pub fn path(p: &Path) -> Result<&str> {
    p.to_str().ok_or_else(|| format!("{} is not valid UTF-8", p.display()).into())
}
