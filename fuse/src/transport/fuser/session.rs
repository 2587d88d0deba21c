//! A session of the fuser crate, and its negotiation with the kernel. It serves any file system, so
//! that one that answers from memory has the settings of the mount.

use std::{io, path::PathBuf};

use fuser::{
    Config, Filesystem, FopenFlags, InitFlags, KernelConfig, MountOption, Session, SessionACL,
};
use strake_proto::{Code, Error, Result};
use tokio::sync::watch;

use crate::{config::MountConfig, mountpoint, table, vfs::MAX_REQUEST};

/// Flags that are used where the kernel offers them. Left out on purpose:
/// - the writeback cache: with it the kernel would own size and mtime;
/// - remote flock: fuser does not distinguish it from a POSIX lock, so the kernel handles it, local
///   to the mount;
/// - shared mappings of direct I/O files: this transport has no page locks, so a page that a
///   mapping changed would be written back over newer bytes. mmap(2) fails with `ENODEV` instead.
const WANTED: [InitFlags; 12] = [
    InitFlags::FUSE_POSIX_LOCKS,
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_READDIRPLUS_AUTO,
    InitFlags::FUSE_ASYNC_DIO,
    InitFlags::FUSE_AUTO_INVAL_DATA,
    // Symlinks never change and inode numbers are never reused.
    InitFlags::FUSE_CACHE_SYMLINKS,
    InitFlags::FUSE_MAX_PAGES,
    InitFlags::FUSE_BIG_WRITES,
    // The kernel checks ACLs as it checks modes; the metadata server keeps ACL and mode consistent.
    InitFlags::FUSE_POSIX_ACL,
    // A directory's default ACL replaces the umask, so the metadata server applies one or the
    // other.
    InitFlags::FUSE_DONT_MASK,
    // Writes, truncates and chowns clear set-id bits and file capabilities at the metadata server.
    InitFlags::FUSE_HANDLE_KILLPRIV_V2,
];

/// Flags in the answer to every open: another mount may write the data, so the kernel caches none
/// of it.
pub const OPEN_FLAGS: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

/// Answers the kernel's INIT.
pub fn negotiate(kernel: &mut KernelConfig) {
    for flag in WANTED {
        // An error only means that this kernel does not offer the flag.
        let _ = kernel.add_capabilities(flag);
    }
    let _ = kernel.set_max_write(MAX_REQUEST);
    if let Err(most) = kernel.set_max_readahead(MAX_REQUEST) {
        let _ = kernel.set_max_readahead(most);
    }
    let _ = kernel.set_max_background(128);
    let _ = kernel.set_congestion_threshold(96);
}

fn session_config(cfg: &MountConfig) -> Config {
    let mut c = Config::default();
    c.mount_options = vec![
        MountOption::FSName(cfg.fsname.clone()),
        // As a custom option: fuser passes `Subtype` only to fusermount3, and root mounts without
        // it.
        MountOption::CUSTOM(format!("subtype={}", cfg.subtype)),
        MountOption::DefaultPermissions,
        if cfg.read_only { MountOption::RO } else { MountOption::RW },
    ];
    c.mount_options.extend(table::flag_options(cfg.flags).into_iter().filter_map(|name| {
        Some(match name {
            "suid" => MountOption::Suid,
            "dev" => MountOption::Dev,
            "noexec" => MountOption::NoExec,
            "noatime" => MountOption::NoAtime,
            "sync" => MountOption::Sync,
            "dirsync" => MountOption::DirSync,
            // fuser has no options for the other flags, which change only what is displayed.
            _ => return None,
        })
    }));
    c.acl = if cfg.allow_other { SessionACL::All } else { SessionACL::Owner };
    c.n_threads = Some(cfg.threads.clamp(1, 64));
    c.clone_fd = cfg.clone_fd;
    c
}

/// A mounted fuser session, which runs on its own threads.
pub struct MountedSession {
    ended: watch::Receiver<Option<Result<()>>>,
    mountpoint: PathBuf,
}

impl MountedSession {
    /// Mounts the file system as `cfg` says, and serves it.
    pub fn start<FS: Filesystem>(fs: FS, cfg: &MountConfig) -> Result<MountedSession> {
        let explain = |e: io::Error| mountpoint::explain(cfg, &e);
        let session = Session::new(fs, &cfg.mountpoint, &session_config(cfg)).map_err(explain)?;
        let (tell, ended) = watch::channel(None);
        std::thread::Builder::new()
            .name("strake-fuse".into())
            .spawn(move || {
                let result = session.run().map_err(|e| Error::from(e).context("FUSE session"));
                let _ = tell.send(Some(result));
            })
            .map_err(|e| Error::from(e).context("starting the FUSE session's thread"))?;
        Ok(MountedSession { ended, mountpoint: cfg.mountpoint.clone() })
    }

    /// Returns when it is unmounted.
    pub async fn ended(&self) -> Result<()> {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or(Ok(())),
            Err(_) => Err(Error::new(Code::Io, "the FUSE session's thread died")),
        }
    }

    /// Unmounts; an error while it is in use.
    pub fn unmount(&self) -> Result<()> {
        mountpoint::detach(&self.mountpoint, false)
    }
}

impl Drop for MountedSession {
    fn drop(&mut self) {
        if self.ended.borrow().is_none()
            && let Err(e) = mountpoint::detach(&self.mountpoint, true)
        {
            tracing::warn!("{e}");
        }
    }
}
