//! `strake mount`: its arguments and configuration.

mod background;
mod daemon;
mod umount;

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use clap::Args;
use serde::Deserialize;
use strake_client::Client;
use strake_fabric::{Endpoint, Env, Identity, Pool, tcp::TcpFabric};
use strake_fuse::{MountConfig, Transport};
use strake_proto::{Code, Error, Result};

pub use umount::{UmountArgs, umount, unmount};

use crate::config::{self, Overrides};

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
    #[serde(default)]
    transport: TransportKey,
    read_replica: Option<usize>,
    run_dir: Option<PathBuf>,
}

/// See `docs/fuse.md`.
#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum TransportKey {
    #[default]
    Dev,
    Fuser,
}

impl From<TransportKey> for Transport {
    fn from(key: TransportKey) -> Transport {
        match key {
            TransportKey::Dev => Transport::Dev,
            TransportKey::Fuser => Transport::Fuser,
        }
    }
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

    fn client_config(&self) -> Result<strake_client::Config> {
        let config = client_config(&self.mds)?;
        let op_timeout = Duration::from_secs(self.op_timeout_s);
        Ok(strake_client::Config { op_timeout, read_replica: self.read_replica, ..config })
    }

    fn mount_config(&self) -> MountConfig {
        MountConfig {
            allow_other: self.allow_other,
            read_only: self.read_only,
            attr_timeout: Duration::from_secs_f64(self.attr_timeout),
            entry_timeout: Duration::from_secs_f64(self.entry_timeout),
            transport: self.transport.into(),
            ..MountConfig::new(&self.mountpoint)
        }
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
    let socket = daemon::socket();
    if socket.is_none() && !args.foreground {
        return background::in_background(&file.mount);
    }
    crate::init_log(&log);
    match (socket, file.mount.transport) {
        (Some(socket), _) => crate::run(file.threads, daemon::serve(file.mount, key, socket)),
        (None, TransportKey::Dev) => crate::run(1, daemon::supervise(file.mount)),
        (None, TransportKey::Fuser) => crate::run(file.threads, daemon::unsupervised(file.mount, key)),
    }
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

/// Whether a StrakeFS is mounted exactly there.
pub fn is_mounted(mountpoint: &Path) -> Result<bool> {
    let Ok(path) = std::path::absolute(mountpoint) else { return Ok(false) };
    // Not canonicalize(): it would hang on a mount whose daemon does not answer.
    let info = fs::read_to_string("/proc/self/mountinfo")?;
    Ok(info.lines().filter_map(strake_fuse::mount_line).any(|(at, kind)| at == path && kind == "fuse.strake"))
}
