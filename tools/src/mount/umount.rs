//! `strake umount`. Never waits for a server without a limit.

use std::{
    path::PathBuf,
    process::{Command, ExitCode},
    time::{Duration, Instant},
};

use clap::Args;
use rustix::mount::UnmountFlags;
use strake_fuse::{
    supervisor::control::{Asker, End},
    table::{self, Mounted},
};
use strake_proto::{Code, Error, Result};

use super::{mounted_at, not_mounted, users};

#[derive(Args)]
pub struct UmountArgs {
    mountpoint: PathBuf,
    /// Detach even if busy. Open files keep working until they are closed.
    #[arg(long, short)]
    lazy: bool,
    /// First end calls that wait for an answer: they get ECONNABORTED, and every later call gets
    /// ENOTCONN.
    #[arg(long, short)]
    force: bool,
    /// How long to wait until all written data is safe, in seconds.
    #[arg(long, default_value_t = PATIENCE, value_parser = clap::value_parser!(u64).range(..=super::LONGEST))]
    timeout: u64,
}

/// See [`UmountArgs::timeout`].
const PATIENCE: u64 = 10;
/// How long processes whose calls were aborted by force may take to leave.
const LEAVING: Duration = Duration::from_secs(1);
/// How long the mount's process may take to notice that it is unmounted.
const NOTICING: Duration = Duration::from_secs(2);
/// How long the mount's process may take to report its state.
const ANSWER: Duration = Duration::from_secs(2);
/// The answer of a mount's process when all data written so far is safe.
const NOTHING_UNSAFE: &str = "state 0 written bytes are not on disk yet";
/// Exit status if it is unmounted but not everything is safe.
const NOT_SAFE: u8 = 64;

impl UmountArgs {
    pub fn new(mountpoint: PathBuf, lazy: bool, force: bool) -> UmountArgs {
        UmountArgs { mountpoint, lazy, force, timeout: PATIENCE }
    }
}

pub fn umount(args: &UmountArgs) -> Result<ExitCode> {
    let mount = mounted_at(&args.mountpoint)?.ok_or_else(|| not_mounted(&args.mountpoint))?;
    let stays = table::stays_mounted(&table::mounts()?, &mount);
    let mut process = Asker::connect(&mount.device, owner_of(&mount));
    // Force aborts everything that waits for an answer, in all mounts of the file system. So it is
    // not used if other mounts need the file system.
    detach(&mount, args.lazy, args.force && !stays)?;
    // After a lazy unmount it may be in use for long. If it stays mounted elsewhere, written data
    // is made safe as before.
    if args.lazy || stays {
        return Ok(ExitCode::SUCCESS);
    }
    match &mut process {
        Ok(p) => Ok(safe(&mount, p, Duration::from_secs(args.timeout))),
        Err(e) => {
            eprintln!("{}: unmounted, but {}", mount.at.display(), unasked(e));
            Ok(ExitCode::from(NOT_SAFE))
        }
    }
}

/// Text for a mount whose process could not be asked.
fn unasked(e: &std::io::Error) -> String {
    match e.kind() {
        // No process has the socket.
        std::io::ErrorKind::ConnectionRefused => {
            "its process was not found: if it was killed, data that was not safe yet is lost".into()
        }
        _ => format!(
            "it is not known whether all data is safe, because its process cannot be \
                      asked: {e}"
        ),
    }
}

/// The user who runs the mount, according to the kernel.
pub(super) fn owner_of(mount: &Mounted) -> u32 {
    let id = mount.super_options.split(',').find_map(|o| o.strip_prefix("user_id="));
    id.and_then(|id| id.parse().ok()).unwrap_or(0)
}

/// Waits until the mount's process reports that everything is safe.
fn safe(mount: &Mounted, process: &mut Asker, limit: Duration) -> ExitCode {
    let at = mount.at.display();
    let (start, mut end) = (Instant::now(), process.wait(limit.min(NOTICING)));
    if end == End::NotYet {
        if is_elsewhere(mount, process) {
            eprintln!(
                "{at}: unmounted here, but another mount namespace still has it. All written data \
                 is safe"
            );
            return ExitCode::SUCCESS;
        }
        end = process.wait(limit.saturating_sub(start.elapsed()));
    }
    let said = match end {
        End::Said(lost) if lost.is_empty() => return ExitCode::SUCCESS,
        End::Said(lost) => lost,
        End::Silent => "its process was killed before it reported that all data is safe".into(),
        End::NotYet => {
            let state = process.ask("state", ANSWER).unwrap_or_default();
            let state =
                state.strip_prefix("state ").unwrap_or("its process does not say what is missing");
            format!("{state}; its process keeps trying; SIGTERM makes it give up")
        }
    };
    eprintln!("{at}: unmounted, but {said}");
    ExitCode::from(NOT_SAFE)
}

/// Whether the file system is still mounted where this namespace does not show it, and all its data
/// is safe. Its process accepts no new connection once it is unmounted.
fn is_elsewhere(mount: &Mounted, process: &mut Asker) -> bool {
    Asker::connect(&mount.device, owner_of(mount)).is_ok()
        && process.ask("state", ANSWER).is_ok_and(|state| state == NOTHING_UNSAFE)
}

/// Unmounts what is mounted at `mountpoint`.
pub fn unmount(mountpoint: &std::path::Path, lazy: bool) -> Result<()> {
    detach(&mounted_at(mountpoint)?.ok_or_else(|| not_mounted(mountpoint))?, lazy, false)
}

/// Unmounts a mount that is no longer served.
pub(super) fn take_off(mount: &Mounted) -> Result<()> {
    detach(mount, true, false)
}

fn detach(mount: &Mounted, lazy: bool, force: bool) -> Result<()> {
    let at = &mount.at;
    if force {
        let until = Instant::now() + LEAVING;
        loop {
            match rustix::mount::unmount(at, UnmountFlags::FORCE) {
                Ok(()) => return Ok(()),
                // No call waits for an answer any more, but a process still uses the mount, perhaps
                // while it ends.
                Err(rustix::io::Errno::BUSY) if Instant::now() < until => {
                    std::thread::sleep(LEAVING / 100)
                }
                Err(rustix::io::Errno::BUSY) => break,
                Err(e) => {
                    return Err(Error::from(std::io::Error::from(e))
                        .context(format!("unmount {}", at.display())));
                }
            }
        }
    }
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(at, flags) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::BUSY) => Err(busy(mount)),
        Err(rustix::io::Errno::PERM) => {
            let mut c =
                Command::new(strake_fuse::fusermount().unwrap_or_else(|| "fusermount3".into()));
            let out = c.arg("-u").args(lazy.then_some("-z")).arg("--").arg(at).output();
            let out = out.map_err(|e| Error::from(e).context("fusermount3 (package fuse3)"))?;
            let said = String::from_utf8_lossy(&out.stderr);
            match out.status.success() {
                true => Ok(()),
                false if said.contains("busy") => Err(busy(mount)),
                false => Err(Error::new(Code::Perm, format!("{}: {}", at.display(), said.trim()))),
            }
        }
        Err(e) => {
            Err(Error::from(std::io::Error::from(e)).context(format!("unmount {}", at.display())))
        }
    }
}

/// The error that names the processes.
fn busy(mount: &Mounted) -> Error {
    let who = users::of(mount).join("\n  ");
    Error::new(Code::Busy, format!("{} is in use:\n  {who}", mount.at.display()))
}
