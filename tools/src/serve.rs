//! `strake mds` and `strake oss`: read the configuration, then run the server until a signal ends
//! it.

use std::{path::PathBuf, process::ExitCode};

use clap::Args;
use strake_proto::{Code, Error, Result};
use strake_runtime::{Env, private};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    config::{self, Overrides},
    members, pretend,
    server_config::{MdsFile, OssFile},
    until_signal,
};

#[derive(Args)]
pub struct Common {
    /// Configuration file (TOML).
    #[arg(long, short)]
    config: Option<PathBuf>,
    /// File with the cluster key. All servers of a cluster share it.
    #[arg(long)]
    cluster_key: Option<PathBuf>,
    /// Address for requests of clients and servers, tcp:HOST:PORT.
    #[arg(long)]
    listen: Option<String>,
    /// Address for administration (gRPC), HOST:PORT.
    #[arg(long)]
    admin: Option<String>,
    /// What to log: error, warn, info or debug; or a level per module, MODULE=LEVEL.
    #[arg(long)]
    log: Option<String>,
    /// Worker threads; 0 means one per core.
    #[arg(long)]
    threads: Option<usize>,
}

impl Common {
    fn overrides(&self, section: &'static str) -> Overrides {
        let text = |p: &PathBuf| toml::Value::String(p.display().to_string());
        let mut o = Overrides::new();
        o.extend(self.cluster_key.as_ref().map(|p| ("", "cluster_key", text(p))));
        o.extend(self.listen.clone().map(|s| (section, "listen", s.into())));
        o.extend(self.admin.clone().map(|s| (section, "admin", s.into())));
        o.extend(self.log.clone().map(|s| ("", "log", s.into())));
        o.extend(self.threads.map(|n| ("", "threads", (n as i64).into())));
        o
    }
}

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct MdsArgs {
    #[command(subcommand)]
    group: Option<members::Command>,
    #[command(flatten)]
    common: Common,
    /// Id of this server in the metadata group, 1 or more.
    #[arg(long)]
    id: Option<u64>,
    /// Folder for the Raft log and the metadata.
    #[arg(long)]
    dir: Option<PathBuf>,
}

#[derive(Args)]
pub struct OssArgs {
    #[command(flatten)]
    common: Common,
    /// Unique name of this server in the cluster.
    #[arg(long)]
    name: Option<String>,
    /// Metadata servers, tcp:HOST:PORT, separated by commas.
    #[arg(long, value_delimiter = ',')]
    mds: Vec<String>,
}

pub fn mds(args: MdsArgs) -> Result<ExitCode> {
    private::umask();
    if let Some(command) = args.group {
        return members::run(command);
    }
    let mut o = args.common.overrides("mds");
    o.extend(args.id.map(|id| ("mds", "id", (id as i64).into())));
    o.extend(args.dir.as_ref().map(|d| ("mds", "dir", d.display().to_string().into())));
    let file: MdsFile = config::load(args.common.config.as_deref(), o)?;
    let log = config::log_filter(&file.log)?;
    let key = config::read_key(&file.cluster_key)?;
    crate::init_log(&log);
    raise_file_limit();
    crate::run(file.threads, async move {
        let mut cfg = file.mds;
        cfg.pretend_level(pretend::feature_level());
        let server = strake_mds::server::start_on_disk(cfg, Env::system(), key).await?;
        tracing::info!("metadata server is up at {}", server.endpoint());
        tokio::select! {
            biased;
            r = until_signal() => r?,
            cause = server.stopped() => match cause.code {
                // As intended, and no reason to start it again.
                Code::NotMember => {
                    tracing::warn!("{cause}");
                    return Ok(ExitCode::SUCCESS);
                }
                // Its log or its state cannot continue: the supervisor of this process must learn
                // about it.
                _ => return Err(cause),
            },
        }
        server.shutdown().await;
        Ok(ExitCode::SUCCESS)
    })
}

pub fn oss(args: OssArgs) -> Result<ExitCode> {
    private::umask();
    let mut o = args.common.overrides("oss");
    o.extend(args.name.map(|n| ("oss", "name", n.into())));
    if !args.mds.is_empty() {
        let list = args.mds.into_iter().map(toml::Value::String).collect();
        o.push(("oss", "mds", toml::Value::Array(list)));
    }
    let path = args.common.config;
    let file: OssFile = config::load(path.as_deref(), o.clone())?;
    let reread = Box::new(move || Ok(config::load::<OssFile>(path.as_deref(), o.clone())?.oss));
    let log = config::log_filter(&file.log)?;
    let key = config::read_key(&file.cluster_key)?;
    crate::init_log(&log);
    raise_file_limit();
    crate::run(file.threads, async move {
        let mut hup = signal(SignalKind::hangup()).map_err(Error::from)?;
        let cfg =
            strake_oss::server::Config { feature_level: pretend::feature_level(), ..file.oss };
        let server =
            strake_oss::server::start_on_disk_with(cfg, Env::system(), key, reread).await?;
        tracing::info!("storage server is up at {}", server.endpoint());
        let mut end = std::pin::pin!(until_signal());
        loop {
            tokio::select! {
                biased;
                r = &mut end => break r?,
                _ = hup.recv() => match server.reload().await {
                    Ok(new) => tracing::info!("the configuration was read again; {} targets are new", new.len()),
                    Err(e) => tracing::error!("the configuration was read again: {e}"),
                },
            }
        }
        server.shutdown().await?;
        Ok(ExitCode::SUCCESS)
    })
}

/// A server needs a descriptor for each client, and some for each target; a shell often allows only
/// a thousand. Raises the limit to the maximum allowed.
fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(e) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!("cannot raise the limit of open files: {e}");
    }
}
