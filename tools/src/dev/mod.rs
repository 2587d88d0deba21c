//! `strake up` and `strake down`: a cluster of real processes on this machine, data in one folder.

mod layout;
mod process;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::Args;
use strake_proto::{Code, Error, Result, map::ChainExt, pb};

pub use layout::{Cluster, check};
use process::Role;

use crate::{mount, status, term::Progress};

/// One PiB.
pub(crate) const MAX_TARGET_GIB: u64 = 1 << 20;

#[derive(Args)]
pub struct UpArgs {
    /// Folder for everything the cluster keeps.
    #[arg(long, default_value = "strake-cluster")]
    dir: PathBuf,
    /// Where to mount; "none" for no mount. A new cluster's default is strake-mnt, later it is where it was.
    #[arg(long)]
    mount: Option<PathBuf>,
    /// Metadata servers of a new cluster [default: 3].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=7))]
    mds: Option<u32>,
    /// Object storage servers of a new cluster [default: 4].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    oss: Option<u32>,
    /// Targets of each object storage server of a new cluster [default: 2].
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
    let cluster = Cluster::open_or_create(&args)?;
    let mut started = 0;
    for role in cluster.roles() {
        started += usize::from(process::ensure_running(&cluster, &role)?);
    }
    progress.say(format!("{started} processes started, waiting for service"));
    wait_in_service(&cluster, Duration::from_secs(args.timeout), &mut progress)?;
    if let Some(mnt) = cluster.mountpoint().filter(|_| !args.no_mount) {
        ensure_mounted(&cluster, &mnt, &mut progress)?;
    }
    progress.say(if started == 0 { "everything was running" } else { "cluster is up" });
    progress.done();
    describe(&cluster);
    Ok(ExitCode::SUCCESS)
}

fn ensure_mounted(cluster: &Cluster, mnt: &Path, progress: &mut Progress) -> Result<()> {
    if mount::is_mounted(mnt)? {
        if process::running(cluster, &Role::Mount).is_some() {
            return Ok(());
        }
        // A mount whose daemon died answers ENOTCONN; take it away and mount anew.
        mount::unmount(mnt, true)?;
    }
    fs::create_dir_all(mnt)?;
    progress.say(format!("mounting {}", mnt.display()));
    let (start, mut started) = (Instant::now(), false);
    while !mount::is_mounted(mnt)? {
        let runs = process::running(cluster, &Role::Mount).is_some();
        if start.elapsed() > Duration::from_secs(30) || started && !runs {
            return Err(process::failure(cluster, &Role::Mount, "did not mount"));
        }
        if runs {
            // Just started, or unmounted a moment ago and still bringing its last writes home.
            std::thread::sleep(Duration::from_millis(20));
        } else {
            started = process::ensure_running(cluster, &Role::Mount)?;
        }
    }
    Ok(())
}

/// Waits until there is a leader, every target is alive and every chain has all its replicas in sync.
fn wait_in_service(cluster: &Cluster, limit: Duration, progress: &mut Progress) -> Result<()> {
    let start = Instant::now();
    crate::run(1, async {
        loop {
            for role in cluster.roles() {
                if process::running(cluster, &role).is_none() {
                    return Err(process::failure(cluster, &role, "ended"));
                }
            }
            let lacking = match status::leader_status(&cluster.admin_mds()).await {
                // After a restart of everything the map may still name targets alive that do not come back.
                Ok(s) => match lacking(&s, cluster) {
                    None => silent_oss(cluster).await,
                    some => some,
                },
                Err(_) => Some("no metadata leader yet".to_string()),
            };
            let Some(what) = lacking else { return Ok(()) };
            if start.elapsed() > limit {
                let m = format!("{what} after {} s; see the logs in {}", limit.as_secs(), cluster.logs().display());
                return Err(Error::new(Code::TimedOut, m));
            }
            progress.say(what);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    })
}

async fn silent_oss(cluster: &Cluster) -> Option<String> {
    for addr in cluster.admin_oss() {
        if status::ask(&addr).await.is_err() {
            return Some(format!("the object server at {addr} does not answer yet"));
        }
    }
    None
}

/// What a cluster in full service still lacks.
fn lacking(s: &pb::StatusReply, cluster: &Cluster) -> Option<String> {
    let map = s.map.as_ref()?;
    let alive = map.targets.iter().filter(|t| t.alive).count();
    if alive < cluster.target_count() {
        return Some(format!("{alive} of {} targets in service", cluster.target_count()));
    }
    if map.chains.is_empty() {
        return Some("chains are being made".into());
    }
    // What is lost is not waited for.
    let whole = map.chains.iter().filter(|c| c.lost || c.serving().count() == c.replicas.len()).count();
    (whole < map.chains.len()).then(|| format!("{whole} of {} chains in sync", map.chains.len()))
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
    roles.reverse(); // object servers first, so that the metadata servers see them go
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
