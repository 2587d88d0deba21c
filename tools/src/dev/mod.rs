//! `strake up` and `strake down`: a cluster of real processes on this machine, with its data in one
//! folder.

mod layout;
mod process;
mod service;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use rustix::fs::Mode;
use strake_proto::Result;
use strake_runtime::private;

pub use layout::{Cluster, check};
use process::Role;
use strake_term::Progress;

use crate::mount;

/// One PiB.
pub(crate) const MAX_TARGET_GIB: u64 = 1 << 20;

/// Exit status of a cluster that is up but lacks something, as in `strake status`.
const NOT_WHOLE: u8 = 2;

#[derive(Args)]
pub struct UpArgs {
    /// Folder for all files of the cluster.
    #[arg(long, default_value = "strake-cluster")]
    dir: PathBuf,
    /// Where to mount; "none" for no mount. The default is strake-mnt for a new cluster, and the
    /// last mountpoint for an existing one.
    #[arg(long)]
    mount: Option<PathBuf>,
    /// Metadata servers of a new cluster [default: 3].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=7))]
    mds: Option<u32>,
    /// Storage servers of a new cluster [default: 4].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    oss: Option<u32>,
    /// Targets of each storage server of a new cluster [default: 2].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=16))]
    targets_per_oss: Option<u32>,
    /// Copies of each file's data in a new cluster [default: 2].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3))]
    mirror: Option<u32>,
    /// Size of each target of a new cluster, in GiB (files are sparse) [default: 16].
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=MAX_TARGET_GIB))]
    target_gib: Option<u64>,
    /// Only restart servers that do not run; do not mount.
    #[arg(long)]
    no_mount: bool,
    /// How long to wait until everything is in service, in seconds.
    #[arg(long, default_value_t = 60)]
    timeout: u64,
}

#[derive(Args)]
pub struct DownArgs {
    /// The folder given to `strake up`.
    #[arg(long, default_value = "strake-cluster")]
    dir: PathBuf,
    /// Also delete the folder with all data.
    #[arg(long)]
    delete: bool,
}

pub fn up(args: UpArgs) -> Result<ExitCode> {
    let mut progress = Progress::new();
    // For everything except the path to the mount, which other users may need.
    let theirs = private::umask();
    let (is_new, cluster) = (!Cluster::is_in(&args.dir), Cluster::open_or_create(&args, theirs)?);
    let mut started = 0;
    for role in cluster.roles() {
        started += usize::from(process::ensure_running(&cluster, &role)?);
    }
    progress.say(format!("{started} processes started, waiting for service"));
    let without =
        service::wait(&cluster, Duration::from_secs(args.timeout), is_new, &mut progress)?;
    if let Some(mnt) = cluster.mountpoint().filter(|_| !args.no_mount) {
        ensure_mounted(&cluster, &mnt, theirs, &mut progress)?;
    }
    progress.say(match (started, &without[..]) {
        (0, []) => "everything was running",
        (_, []) => "cluster is up",
        _ => "cluster is up, but not whole; `strake status` says what is missing",
    });
    progress.done();
    without.iter().for_each(|what| eprintln!("strake: {what}"));
    describe(&cluster);
    Ok(ExitCode::from(if without.is_empty() { 0 } else { NOT_WHOLE }))
}

fn ensure_mounted(
    cluster: &Cluster,
    mnt: &Path,
    theirs: Mode,
    progress: &mut Progress,
) -> Result<()> {
    if mount::is_mounted(mnt)? {
        if process::running(cluster, &Role::Mount).is_some() {
            return Ok(());
        }
        mount::make_way(mnt)?;
    }
    private::under(theirs, || fs::create_dir_all(mnt))?;
    progress.say(format!("mounting {}", mnt.display()));
    let (start, mut started) = (Instant::now(), false);
    while !mount::is_mounted(mnt)? {
        let runs = process::running(cluster, &Role::Mount).is_some();
        if start.elapsed() > Duration::from_secs(30) || started && !runs {
            return Err(process::failure(cluster, &Role::Mount, "did not mount"));
        }
        if runs {
            // Just started, or unmounted a moment ago and still writing its last data.
            std::thread::sleep(Duration::from_millis(20));
        } else {
            started = process::ensure_running(cluster, &Role::Mount)?;
        }
    }
    Ok(())
}

fn describe(cluster: &Cluster) {
    println!("data      {}", cluster.dir().display());
    println!("logs      {}", cluster.logs().display());
    println!("metadata  {}", cluster.mds_endpoints().join(","));
    println!("key       {}", cluster.client_key().display());
    if let Some(m) = cluster.mountpoint() {
        println!("mount     {}", m.display());
    }
}

pub fn down(args: &DownArgs) -> Result<ExitCode> {
    let cluster = Cluster::open(&args.dir)?;
    let mut progress = Progress::new();
    if let Some(mnt) = cluster.mountpoint()
        && mount::is_mounted(&mnt)?
    {
        progress.say(format!("unmounting {}", mnt.display()));
        mount::unmount(&mnt, false)?;
        process::wait_end(&cluster, &Role::Mount, Duration::from_secs(30));
    }
    process::stop(&cluster, &Role::Mount);
    let mut roles = cluster.roles();
    roles.reverse(); // storage servers first, so that the metadata servers see them leave
    for role in &roles {
        progress.say(format!("stopping {}", role.name()));
        process::stop(&cluster, role);
    }
    progress.say("cluster is down");
    progress.done();
    if args.delete {
        fs::remove_dir_all(cluster.dir())?;
    }
    Ok(ExitCode::SUCCESS)
}
