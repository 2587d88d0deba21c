//! A mount in the background.

use std::{
    fs,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use strake_proto::{Code, Error, Result};

use super::{MountSection, is_mounted};
use crate::lifeline;

/// Starts this same command in the foreground of a new session and returns when it is mounted or has failed. What it
/// logs goes to a file, begun anew by each mount.
pub(super) fn in_background(section: &MountSection) -> Result<ExitCode> {
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
