//! `strake target add`: adds a target to a running storage server. The target is written to the
//! server's configuration, so that it is there after a restart too, and the server is told to read
//! the configuration again.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use serde_json::json;
use strake_proto::{Code, Error, Result, pb};

use crate::{
    admin, config as file,
    dev::{Cluster, MAX_TARGET_GIB},
    server_config,
};

#[derive(Args)]
pub struct AddArgs {
    /// The storage server, by name, in a local cluster.
    #[arg(long, required_unless_present = "config")]
    server: Option<String>,
    /// Folder of a local cluster (see `strake up`).
    #[arg(long, default_value = "strake-cluster")]
    dir: PathBuf,
    /// The storage server's configuration file, instead of a local cluster. Run this on the
    /// server's machine.
    #[arg(long, conflicts_with_all = ["server", "dir"], requires = "path")]
    config: Option<PathBuf>,
    /// Folder of the target. It is absent or empty, or it holds a target of this cluster.
    #[arg(long, requires = "config")]
    path: Option<PathBuf>,
    /// Size of the file that holds the target's data, in GiB.
    #[arg(long, conflicts_with = "device", value_parser = clap::value_parser!(u64).range(1..=MAX_TARGET_GIB))]
    size_gib: Option<u64>,
    /// Block device or NVMe namespace (/dev/ngXnY) that holds the data, instead of a file; or
    /// spdk:TRANSPORT-ID.
    #[arg(long, requires = "config")]
    device: Option<PathBuf>,
    /// Use the device even if it is not blank. All data on it is lost.
    #[arg(long, requires = "device")]
    force: bool,
    /// Print the outcome as JSON.
    #[arg(long)]
    json: bool,
}

/// Time limit for the server to make the target, which takes a while for a large file on a slow
/// disk, and to register it.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn run(a: &AddArgs) -> Result<ExitCode> {
    let targets = match (&a.config, &a.path) {
        (Some(config), Some(path)) => in_file(config, path, a)?,
        _ => {
            let _alone = alone_in(&a.dir)?;
            let mut c = Cluster::open(&a.dir)?;
            let key = c.key()?;
            let admin = c.add_target(a.server.as_deref().unwrap_or_default(), a.size_gib)?;
            tell(&admin, &key).map_err(|e| taken_back(e, || c.take_target_back()))?
        }
    };
    let said = match &targets[..] {
        [] => "the server had it already".to_string(),
        new => {
            let names: Vec<String> = new.iter().map(u32::to_string).collect();
            format!(
                "target {} was added; data moves there by itself: `strake target list` shows the \
                 progress",
                names.join(", ")
            )
        }
    };
    match a.json {
        true => println!("{:#}", json!({ "message": said, "targets": targets })),
        false => println!("{said}"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Undoes what was written and returns the error. Undoes nothing where the server may have the
/// target anyway.
fn taken_back(e: Error, back: impl FnOnce() -> Result<()>) -> Error {
    if e.code == Code::TimedOut {
        return e.context(
            "the target stays in the configuration; `strake target list` shows whether it is there",
        );
    }
    match back() {
        Ok(()) => e.context("nothing was added"),
        Err(b) => e.context(format_args!(
            "the target was not added, but it is still in the configuration ({b}); remove it there"
        )),
    }
}

/// Locks the folder: other commands that add targets by the files in this folder wait until it is
/// closed.
fn alone_in(folder: &Path) -> Result<fs::File> {
    let f = fs::File::open(folder).map_err(|e| Error::from(e).context(folder.display()))?;
    f.lock().map_err(|e| Error::from(e).context(folder.display()))?;
    Ok(f)
}

fn in_file(config: &Path, path: &Path, a: &AddArgs) -> Result<Vec<u32>> {
    let about = |e: std::io::Error| Error::from(e).context(config.display());
    let config = &fs::canonicalize(config).map_err(about)?;
    let folder = config.parent().unwrap_or(Path::new("/"));
    if folder.join("cluster.toml").exists() {
        let name = config.file_stem().unwrap_or_default().display();
        let m = format!(
            "`strake up` writes {}: use --server {name} --dir {}",
            config.display(),
            folder.display()
        );
        return Err(Error::new(Code::Inval, m));
    }
    let _alone = alone_in(folder)?;
    let before = fs::read_to_string(config).map_err(about)?;
    let path = std::path::absolute(path)?;
    let after = with_target(&before, &path, a, a.force)?;
    let cfg = server_config::oss_config(&config.display().to_string(), &after).map_err(|e| {
        e.context(
            "with one more [[oss.targets]] at its end it is no valid configuration of a \
                   storage server; add the target by hand",
        )
    })?;
    if cfg.targets.iter().filter(|t| t.path == path).count() > 1 {
        return Err(Error::new(
            Code::Exist,
            format!("{} names {} already", config.display(), path.display()),
        ));
    }
    let admin = cfg.admin.ok_or_else(|| {
        let m = "has no `admin` address, so the server cannot be told: add the target there by \
                 hand and restart the server";
        Error::new(Code::Inval, format!("{} {m}", config.display()))
    })?;
    let key = file::read_key(&server_config::cluster_key_of(&before)?)?;
    replace(config, &after).map_err(about)?;
    let targets = tell(&admin.to_string(), &key)
        .map_err(|e| taken_back(e, || replace(config, &before).map_err(about)))?;
    if a.force {
        // `--force` was meant for one time only.
        replace(config, &with_target(&before, &path, a, false)?).map_err(about)?;
    }
    Ok(targets)
}

/// A storage server's configuration with one more target.
fn with_target(text: &str, path: &Path, a: &AddArgs, force: bool) -> Result<String> {
    let mut s = text.to_string();
    if !s.is_empty() && !s.ends_with('\n') {
        s.push('\n');
    }
    let _ = writeln!(s, "\n[[oss.targets]]\npath = {}", quoted(path)?);
    if let Some(device) = &a.device {
        let _ = writeln!(s, "device = {}", quoted(&whole(device)?)?);
    }
    if force {
        let _ = writeln!(s, "force = true");
    }
    if let Some(gib) = a.size_gib {
        let _ = writeln!(s, "size = {}", gib << 30);
    }
    Ok(s)
}

/// The absolute path. SPDK's devices are not paths.
fn whole(device: &Path) -> Result<PathBuf> {
    Ok(if device.as_os_str().as_encoded_bytes().starts_with(b"spdk:") {
        device.into()
    } else {
        std::path::absolute(device)?
    })
}

fn quoted(path: &Path) -> Result<toml::Value> {
    let text = path.to_str().ok_or_else(|| {
        Error::new(Code::Inval, format!("{} is not UTF-8; a configuration must be", path.display()))
    })?;
    Ok(toml::Value::String(text.into()))
}

/// Replaces a file as a whole, keeping its mode: after a crash it is the old file or the new one.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.new", std::process::id()));
    let (new, had) = (path.with_file_name(name), fs::metadata(path)?);
    let mut f = fs::File::create(&new)?;
    f.set_permissions(had.permissions())?;
    std::os::unix::fs::fchown(&f, Some(had.uid()), Some(had.gid()))?;
    f.write_all(text.as_bytes())?;
    f.sync_all()?;
    fs::rename(new, path)?;
    fs::File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

/// Has a server read its configuration again, and returns the targets that are new to it.
/// `ETIMEDOUT`: it is unknown whether it has them.
fn tell(at: &str, key: &[u8; 32]) -> Result<Vec<u32>> {
    use tonic::Code::{FailedPrecondition, Unimplemented};
    crate::run(1, async {
        let server = tokio::time::timeout(admin::PATIENCE, admin::connect(at, key)).await;
        let server = server.unwrap_or_else(|_| Err(Error::new(Code::Disconnected, at)));
        let mut server =
            server.map_err(|e| e.context("the storage server does not answer; start it first"))?;
        match tokio::time::timeout(PATIENCE, server.add_targets(pb::AddTargetsRequest {})).await {
            Ok(Ok(answer)) => Ok(answer.into_inner().targets),
            Ok(Err(e)) if matches!(e.code(), FailedPrecondition | Unimplemented) => {
                Err(Error::new(Code::Inval, e.message()))
            }
            Ok(Err(e)) => Err(Error::new(Code::TimedOut, format!("{at}: {}", e.message()))),
            Err(_) => Err(Error::new(
                Code::TimedOut,
                format!("{at}: no answer in {} s", PATIENCE.as_secs()),
            )),
        }
    })
}
