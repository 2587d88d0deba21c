//! `strake umount`.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use clap::Args;
use strake_proto::{Code, Error, Result};

use super::is_mounted;

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
