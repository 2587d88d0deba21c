//! `strake mount` and `strake umount`.

use std::{
    fs,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Args;
use serde::Deserialize;
use strake_client::Client;
use strake_fabric::{Endpoint, Env, Identity, Pool, tcp::TcpFabric};
use strake_fuse::MountConfig;
use strake_proto::{Code, Error, Result};

use crate::{
    config::{self, Overrides},
    lifeline::{self, Lifeline},
};

#[derive(Args)]
pub struct MountArgs {
    /// Metadata servers (HOST:PORT, separated by commas), then an existing folder. With --config: the folder or nothing.
    #[arg(value_names = ["MDS", "MOUNTPOINT"], num_args = 0..=2)]
    what: Vec<String>,
    /// Configuration file (TOML).
    #[arg(long, short)]
    config: Option<PathBuf>,
    /// File with the client key.
    #[arg(long)]
    client_key: Option<PathBuf>,
    /// Let other users in.
    #[arg(long)]
    allow_other: bool,
    /// Mount read-only.
    #[arg(long)]
    read_only: bool,
    /// Read from this replica of each chain only (0 = first), to verify copies one by one.
    #[arg(long)]
    read_replica: Option<usize>,
    /// Stay in the foreground.
    #[arg(long, short)]
    foreground: bool,
    /// What to log: error, warn, info, debug, or per module.
    #[arg(long)]
    log: Option<String>,
}

/// The configuration file of a mount.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MountFile {
    client_key: PathBuf,
    #[serde(default = "default_log")]
    log: String,
    #[serde(default)]
    threads: usize,
    mount: MountSection,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MountSection {
    mds: Vec<String>,
    mountpoint: PathBuf,
    #[serde(default)]
    allow_other: bool,
    #[serde(default)]
    read_only: bool,
    #[serde(default = "one_second")]
    attr_timeout: f64,
    #[serde(default = "one_second")]
    entry_timeout: f64,
    #[serde(default = "sixty")]
    op_timeout_s: u64,
    read_replica: Option<usize>,
    run_dir: Option<PathBuf>,
}

fn default_log() -> String {
    "info".into()
}
fn one_second() -> f64 {
    1.0
}
fn sixty() -> u64 {
    60
}

/// The longest time that may be asked for, seconds: a year.
const LONGEST: u64 = 366 * 86_400;

impl MountSection {
    /// `EINVAL` naming the key that cannot be.
    fn check(&self) -> Result<()> {
        let bad = |key: &str| {
            let m = format!("mount configuration: `{key}` is 0 to {LONGEST} seconds");
            Err(Error::new(Code::Inval, m))
        };
        for (key, t) in [("attr_timeout", self.attr_timeout), ("entry_timeout", self.entry_timeout)] {
            if !(0.0..=LONGEST as f64).contains(&t) {
                return bad(key);
            }
        }
        if self.op_timeout_s > LONGEST {
            return bad("op_timeout_s");
        }
        client_config(&self.mds).map(drop)
    }
}

/// Reads a mount's configuration and checks it.
pub fn check(text: &str) -> Result<()> {
    config::parse::<MountFile>("text", text, Overrides::new())?.mount.check()
}

fn load(args: &MountArgs) -> Result<MountFile> {
    let mut o = Overrides::new();
    let (mds, mountpoint) = match &args.what[..] {
        [] if args.config.is_some() => (None, None),
        [mountpoint] if args.config.is_some() => (None, Some(mountpoint)),
        [mds, mountpoint] => (Some(mds), Some(mountpoint)),
        _ => return Err(Error::new(Code::Inval, "expected MDS[,MDS...] MOUNTPOINT, or --config FILE [MOUNTPOINT]")),
    };
    if let Some(mds) = mds {
        let list = mds.split(',').map(|s| toml::Value::String(s.into())).collect();
        o.push(("mount", "mds", toml::Value::Array(list)));
    }
    if let Some(m) = mountpoint {
        o.push(("mount", "mountpoint", m.clone().into()));
    }
    o.extend(args.client_key.as_ref().map(|p| ("", "client_key", p.display().to_string().into())));
    o.extend(args.allow_other.then_some(("mount", "allow_other", true.into())));
    o.extend(args.read_replica.map(|n| ("mount", "read_replica", (n as i64).into())));
    o.extend(args.read_only.then_some(("mount", "read_only", true.into())));
    o.extend(args.log.clone().map(|l| ("", "log", l.into())));
    config::load(args.config.as_deref(), o)
}

pub fn mount(args: MountArgs) -> Result<ExitCode> {
    let file = load(&args)?;
    file.mount.check()?;
    let log = config::log_filter(&file.log)?;
    let key = config::read_key(&file.client_key)?;
    if !args.foreground {
        return in_background(&file.mount);
    }
    crate::init_log(&log);
    crate::run(file.threads, serve(file.mount, key))
}

/// Connects a client of a running cluster.
pub async fn connect(mds: &[String], client_key: [u8; 32]) -> Result<Client> {
    connect_with(client_config(mds)?, client_key).await
}

fn client_config(mds: &[String]) -> Result<strake_client::Config> {
    let mds = mds.iter().map(|s| s.parse()).collect::<Result<Vec<Endpoint>>>()?;
    let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(strake_client::Config { hostname, ..strake_client::Config::new(mds) })
}

async fn connect_with(config: strake_client::Config, client_key: [u8; 32]) -> Result<Client> {
    let env = Env::system();
    let fabric = TcpFabric::new(env.clone(), Identity::client(client_key), None, Pool::default(), Default::default());
    Client::connect(config, env, Arc::new(fabric)).await
}

async fn serve(section: MountSection, key: [u8; 32]) -> Result<ExitCode> {
    let mut config = client_config(&section.mds)?;
    config.op_timeout = Duration::from_secs(section.op_timeout_s);
    config.read_replica = section.read_replica;
    let mut lifeline = lifeline(&section, &mut config);
    let client = connect_with(config, key).await?;
    if let Some(l) = &mut lifeline {
        l.told();
    }
    let config = MountConfig {
        allow_other: section.allow_other,
        read_only: section.read_only,
        attr_timeout: Duration::from_secs_f64(section.attr_timeout),
        entry_timeout: Duration::from_secs_f64(section.entry_timeout),
        ..MountConfig::new(&section.mountpoint)
    };
    let mount = strake_fuse::mount(config, client.clone()).await?;
    tracing::info!("mounted at {}", section.mountpoint.display());
    tokio::select! {
        biased;
        r = crate::serve::until_signal() => { r?; mount.unmount().await?; }
        r = mount.wait() => r?,
    }
    client.close().await?;
    Ok(ExitCode::SUCCESS)
}

/// Without one the mount works, and what a killed one before it had open is free a session's term later.
fn lifeline(section: &MountSection, config: &mut strake_client::Config) -> Option<Lifeline> {
    let folder = section.run_dir.clone().or_else(lifeline::default_folder)?;
    let uuid = Env::system().random_bytes();
    match Lifeline::start(&folder, &section.mds, uuid) {
        Ok(l) => {
            config.uuid = Some(uuid);
            config.dead.clone_from(&l.dead);
            Some(l)
        }
        Err(e) => {
            tracing::warn!("a mount that is killed will not be missed before its session's term: {e}");
            None
        }
    }
}

/// Starts this same command in the foreground of a new session and returns when it is mounted or has failed. What it
/// logs goes to a file, begun anew by each mount.
fn in_background(section: &MountSection) -> Result<ExitCode> {
    if is_mounted(&section.mountpoint)? {
        let m = format!("{} is mounted already; `strake umount` it first", section.mountpoint.display());
        return Err(Error::new(Code::Busy, m));
    }
    let log = section.run_dir.clone().or_else(lifeline::default_folder).and_then(|f| log_file(&f, &section.mountpoint));
    let mut child = Command::new(std::env::current_exe()?);
    child.args(std::env::args_os().skip(1)).arg("--foreground");
    child.stdin(Stdio::null()).stdout(Stdio::null());
    // Without a folder of its own: to this terminal.
    if let Some((file, _)) = &log {
        child.stderr(file.try_clone()?);
    }
    // SAFETY: setsid is async-signal-safe and touches nothing of the parent.
    unsafe {
        child.pre_exec(|| {
            libc::setsid();
            Ok(())
        });
    }
    let mut child = child.spawn()?;
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        if is_mounted(&section.mountpoint)? {
            if let Some((_, path)) = &log {
                let _ = writeln!(std::io::stdout(), "log: {}", path.display());
            }
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(status) = child.try_wait()? {
            let text = log.and_then(|(_, path)| fs::read(path).ok()).unwrap_or_default();
            std::io::stderr().write_all(&text)?;
            return Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    Err(Error::new(Code::TimedOut, "no answer from the cluster in 60 s; is it up? Try `strake status`"))
}

/// `None` where there is no such folder to be had.
fn log_file(folder: &Path, mountpoint: &Path) -> Option<(fs::File, PathBuf)> {
    let at = std::path::absolute(mountpoint).ok()?;
    // Another name for each mount point.
    let name = at.to_str()?.trim_matches('/').replace('-', "--").replace('/', "-");
    let path = folder.join(format!("{name}.log"));
    fs::create_dir_all(folder).ok()?;
    // Not written through a link that somebody else laid there, nor over the log of a mount that goes on.
    let _ = fs::remove_file(&path);
    Some((fs::File::options().append(true).create_new(true).open(&path).ok()?, path))
}

/// Whether a StrakeFS is mounted exactly there.
pub fn is_mounted(mountpoint: &Path) -> Result<bool> {
    let Ok(path) = std::path::absolute(mountpoint) else { return Ok(false) };
    // Not canonicalize(): it would hang on a mount whose daemon does not answer.
    let info = fs::read_to_string("/proc/self/mountinfo")?;
    Ok(info.lines().filter_map(strake_fuse::mount_line).any(|(at, kind)| at == path && kind == "fuse.strake"))
}

#[derive(Args)]
pub struct UmountArgs {
    mountpoint: PathBuf,
    /// Detach even if busy: open files go on until closed.
    #[arg(long, short)]
    lazy: bool,
}

pub fn umount(args: &UmountArgs) -> Result<ExitCode> {
    unmount(&args.mountpoint, args.lazy)?;
    Ok(ExitCode::SUCCESS)
}

pub fn unmount(mountpoint: &Path, lazy: bool) -> Result<()> {
    if !is_mounted(mountpoint)? {
        return Err(Error::new(Code::Inval, format!("{} is not a StrakeFS mount", mountpoint.display())));
    }
    let path = std::path::absolute(mountpoint)?;
    let flags = if lazy { rustix::mount::UnmountFlags::DETACH } else { rustix::mount::UnmountFlags::empty() };
    match rustix::mount::unmount(&path, flags) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::PERM) => {
            let mut c = Command::new("fusermount3");
            c.arg("-u").args(lazy.then_some("-z")).arg(&path);
            let status = c.status().map_err(|e| Error::from(e).context("fusermount3 (package fuse3)"))?;
            if status.success() { Ok(()) } else { Err(Error::new(Code::Busy, "fusermount3 could not unmount")) }
        }
        Err(rustix::io::Errno::BUSY) => {
            let m = format!("{} is in use; see `fuser -vm {0}`, or use --lazy", path.display());
            Err(Error::new(Code::Busy, m))
        }
        Err(e) => Err(Error::from(std::io::Error::from(e)).context(format!("unmount {}", path.display()))),
    }
}
