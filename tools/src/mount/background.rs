//! Mounting in the background.

use std::{
    ffi::OsString,
    fs,
    io::Write as _,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use strake_proto::{Code, Error, Result};

use super::{MountSection, helper::FAILED, is_mounted, make_way};
use crate::lifeline;

/// With `bg`: how long the command waits for a mount before it leaves it to continue alone.
const PATIENCE: Duration = Duration::from_secs(5);
/// What a mount may take in addition to waiting for its servers.
const SLACK: Duration = Duration::from_secs(60);

/// Starts the same command in the foreground of a new session and returns when it is mounted or has
/// failed; with `bg` also while it keeps trying. Its log goes to a file.
pub(super) fn in_background(section: &MountSection, argv: Vec<OsString>) -> Result<ExitCode> {
    make_way(&section.mountpoint)?;
    strake_fuse::can_mount(&section.mountpoint)?;
    let log = log_file(section)?;
    let mut child = Command::new(std::env::current_exe()?);
    // Never under a helper's name, which has arguments of its own.
    child.arg0("strake").args(&argv[..1]).arg("--foreground").args(&argv[1..]);
    child.stdin(Stdio::null()).stdout(Stdio::null());
    // Without a folder for logs: to this terminal.
    let begin = match &log {
        Some((file, _)) => {
            child.stderr(file.try_clone()?);
            file.metadata()?.len()
        }
        None => 0,
    };
    // SAFETY: setsid is async-signal-safe and touches nothing of the parent.
    unsafe {
        child.pre_exec(|| {
            libc::setsid();
            Ok(())
        });
    }
    let started = child.spawn()?;
    wait(section, started, log.as_ref().map(|(_, path)| (path.as_path(), begin)))
}

/// `log`: the file, and the offset at which this mount's part begins.
fn wait(section: &MountSection, mut child: Child, log: Option<(&Path, u64)>) -> Result<ExitCode> {
    let start = Instant::now();
    let mut limit = section.retry() + SLACK;
    if section.background() {
        limit = limit.min(PATIENCE);
    }
    while start.elapsed() < limit {
        if is_mounted(&section.mountpoint)? {
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(status) = child.try_wait()? {
            let text =
                log.and_then(|(path, begin)| Some(fs::read(path).ok()?.split_off(begin as usize)));
            std::io::stderr().write_all(&text.unwrap_or_default())?;
            return Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    if section.background() {
        eprintln!(
            "{}: the cluster does not answer; still trying in the background",
            section.mountpoint.display()
        );
        log.iter().for_each(|(path, _)| eprintln!("log: {}", path.display()));
        return Ok(ExitCode::SUCCESS);
    }
    let _ = child.kill();
    Err(Error::new(Code::TimedOut, "the mount neither succeeded nor failed in time; see its log"))
}

/// The requested log file, which is appended to, or a new one in the mounts' folder; `None` where
/// that folder is not available.
fn log_file(section: &MountSection) -> Result<Option<(fs::File, PathBuf)>> {
    if let Some(path) = &section.asked.log_file {
        let file = fs::File::options().append(true).create(true).open(path);
        let file =
            file.map_err(|e| Error::from(e).context(format!("log file {}", path.display())))?;
        return Ok(Some((file, path.clone())));
    }
    let folder = section.run_dir.clone().or_else(lifeline::default_folder);
    Ok(folder.and_then(|f| new_log(&f, &section.mountpoint)))
}

fn new_log(folder: &Path, mountpoint: &Path) -> Option<(fs::File, PathBuf)> {
    let at = std::path::absolute(mountpoint).ok()?;
    // A different name for each mount point.
    let name = at.to_str()?.trim_matches('/').replace('-', "--").replace('/', "-");
    let path = folder.join(format!("{name}.log"));
    fs::create_dir_all(folder).ok()?;
    // Must not be written through a link that another user placed there, nor over the log of a
    // mount that still runs.
    let _ = fs::remove_file(&path);
    Some((fs::File::options().append(true).create_new(true).open(&path).ok()?, path))
}
