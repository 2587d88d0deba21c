//! Mounting and unmounting.

use std::{
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, OnceLock},
    time::Duration,
};

use rustix::mount::MountFlags;
use strake_client::Client;
use strake_proto::{Code, Error, Ino, Result, ids::ROOT_INO};

use crate::{
    handover::HandoverMemory,
    mountpoint, table,
    transport::{dev, dev::interim::Interim, fuser, kernel::MountedSession},
    vfs::Vfs,
};

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountConfig {
    pub mountpoint: PathBuf,
    /// Allow users other than the mounting one. Permissions are checked by the kernel and by the
    /// metadata server either way.
    pub allow_other: bool,
    pub read_only: bool,
    /// Flags of mount(2), without the read-only flag; [`crate::table::DEFAULT_FLAGS`] unless set
    /// otherwise.
    pub flags: MountFlags,
    /// Threads that receive requests from the kernel; 1 to 64. The work itself runs on the tokio
    /// runtime.
    pub threads: usize,
    /// One `/dev/fuse` descriptor per thread.
    pub clone_fd: bool,
    /// First column of `df` and `/proc/mounts`; empty: the name of the file system.
    pub fsname: String,
    /// The displayed type is `fuse.SUBTYPE`. `lfs` looks for `fuse.strake`.
    pub subtype: String,
    /// How long the kernel may use attributes without asking again, at most: its copies expire with
    /// the leases. 0: it asks each time.
    pub attr_timeout: Duration,
    /// The same for names. If it is not 0, the kernel detaches what is mounted on a folder inside
    /// this mount when names are taken back.
    pub entry_timeout: Duration,
    /// Requests worked on at a time; more wait in the kernel.
    pub max_requests: usize,
    pub transport: Transport,
    /// For tests: uses of the kernel only what those before 6.6 offer.
    pub old_kernel: bool,
    /// The folder that is the root of the mount.
    pub root: Ino,
}

impl MountConfig {
    /// Defaults for a mount at `mountpoint`.
    pub fn new(mountpoint: impl Into<PathBuf>) -> MountConfig {
        MountConfig {
            mountpoint: mountpoint.into(),
            allow_other: false,
            read_only: false,
            flags: table::DEFAULT_FLAGS,
            threads: 2,
            clone_fd: true,
            fsname: String::new(),
            subtype: "strake".into(),
            attr_timeout: Duration::from_secs(3600),
            entry_timeout: Duration::ZERO,
            max_requests: 256,
            transport: Transport::default(),
            old_kernel: false,
            root: ROOT_INO,
        }
    }
}

impl MountConfig {
    fn is_sync(&self) -> bool {
        self.flags.contains(MountFlags::SYNCHRONOUS)
    }
}

/// The implementation that speaks with the kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transport {
    /// Our own.
    #[default]
    Dev,
    /// The fuser crate. It cannot release killed programs, has no `O_TMPFILE`, and does not let the
    /// kernel keep copies.
    Fuser,
}

/// A live mount. Dropping it unmounts, unless it belongs to a supervisor.
pub struct Mount {
    session: Session,
    /// `None`: another process unmounts it.
    mountpoint: Option<PathBuf>,
    vfs: Arc<Vfs>,
    lost: OnceLock<Error>,
}

enum Session {
    Dev(dev::Session),
    Fuser(MountedSession),
}

/// Mounts `client`'s file system. Must be called on a tokio runtime, which then runs the work.
///
/// Errors say what to do: `ENOENT` and `ENOTDIR` for the mountpoint, `EBUSY` when StrakeFS is
/// mounted there already, `ENODEV` without `/dev/fuse`, `EPERM` when the caller is not root and
/// there is no fusermount3.
pub async fn mount(mut cfg: MountConfig, client: Client) -> Result<Mount> {
    mountpoint::check(&cfg)?;
    if cfg.fsname.is_empty() {
        cfg.fsname.clone_from(&client.servers().map().map.fs_name);
    }
    let vfs = Arc::new(Vfs::new(client, None).within(cfg.root).synchronous(cfg.is_sync()));
    vfs.learn().await?;
    let session = match cfg.transport {
        Transport::Dev => {
            let agreed = Arc::default();
            let serve = dev::Serve::new(vfs.clone(), &cfg, Arc::clone(&agreed), None).await;
            Session::Dev(dev::start(dev::attach(&cfg)?, serve, agreed, None)?)
        }
        Transport::Fuser => {
            let runtime = tokio::runtime::Handle::current();
            Session::Fuser(MountedSession::start(
                fuser::Transport::new(vfs.clone(), &cfg, runtime),
                &cfg,
            )?)
        }
    };
    tracing::info!(mountpoint = %mountpoint::shown(&cfg.mountpoint), "mounted");
    Ok(Mount { session, mountpoint: Some(cfg.mountpoint), vfs, lost: OnceLock::new() })
}

/// Fetches and keeps what the mount must show when servers are away. Call this before [`attach`]:
/// without it umount(8), which first looks at the mount, would wait for the servers.
pub async fn learn(cfg: &MountConfig, client: &Client, keep: &Arc<HandoverMemory>) -> Result<()> {
    Vfs::new(client.clone(), Some(keep.clone())).within(cfg.root).learn().await
}

/// Mounts for a daemon that starts later. Returns the descriptors of `/dev/fuse` for [`serve`].
/// Errors as for [`mount`].
pub fn attach(cfg: &MountConfig) -> Result<Vec<OwnedFd>> {
    mountpoint::check(cfg)?;
    dev::attach(cfg)
}

/// Serves a mount that [`attach`] made, in the place of earlier daemons if there were any: see
/// `docs/restart.md`. `keep` is the handover that `client` was connected with. `interim`: what has
/// answered requests until now.
pub async fn serve(
    cfg: &MountConfig,
    client: Client,
    keep: Arc<HandoverMemory>,
    descriptors: Vec<OwnedFd>,
    interim: Option<Interim>,
) -> Result<Mount> {
    let vfs =
        Arc::new(Vfs::new(client, Some(keep.clone())).within(cfg.root).synchronous(cfg.is_sync()));
    let agreed = Arc::default();
    let serve = dev::Serve::new(vfs.clone(), cfg, Arc::clone(&agreed), Some(keep)).await;
    Ok(Mount {
        session: Session::Dev(dev::start(descriptors, serve, agreed, interim)?),
        mountpoint: None,
        vfs,
        lost: OnceLock::new(),
    })
}

impl Mount {
    /// Returns when it is unmounted; handles may still be open.
    pub async fn unmounted(&self) -> Result<()> {
        match &self.session {
            Session::Dev(s) => s.ended().await,
            Session::Fuser(s) => s.ended().await,
        }
    }

    /// Returns when it is unmounted, by [`Mount::unmount`] or by `umount(8)`, and every handle is
    /// closed.
    pub async fn wait(&self) -> Result<()> {
        let result = self.unmounted().await;
        if let Err(e) = self.vfs.close_all().await {
            let _ = self.lost.set(e);
        }
        result
    }

    /// After [`Mount::wait`]: why bytes may be lost of files that were still open at the end, as
    /// after `umount -f`.
    pub fn lost(&self) -> Option<&Error> {
        self.lost.get()
    }

    /// Unmounts. `EBUSY` while files are open or a process has its working directory in it.
    pub async fn unmount(&self) -> Result<()> {
        match &self.session {
            Session::Dev(s) if s.is_over() => {}
            Session::Dev(_) => match &self.mountpoint {
                Some(at) => mountpoint::detach(at, false)?,
                None => {
                    return Err(Error::new(
                        Code::Inval,
                        "only the supervisor can unmount this mount",
                    ));
                }
            },
            Session::Fuser(s) => s.unmount()?,
        }
        self.wait().await
    }

    /// Makes the kernel ask again about an inode: its attributes, and with `data` its pages.
    pub fn invalidate_inode(&self, ino: u64, data: bool) -> Result<()> {
        self.notify(&dev::notify::inode_changed(ino, if data { 0 } else { -1 }, 0))
    }

    /// Makes the kernel look up a name again.
    pub fn invalidate_name(&self, parent: u64, name: &[u8]) -> Result<()> {
        self.notify(&dev::notify::name_changed(parent, name))
    }

    /// Notifies the kernel. `ENOENT` is no error: what the kernel does not have it need not forget.
    fn notify(&self, notice: &dev::notify::Notice) -> Result<()> {
        match &self.session {
            Session::Dev(s) => match s.notify(notice) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                r => Ok(r?),
            },
            Session::Fuser(_) => Err(Error::new(
                Code::OpNotSupp,
                "notifications work only with StrakeFS's own transport",
            )),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let (Session::Dev(s), Some(at)) = (&self.session, &self.mountpoint)
            && !s.is_over()
            && let Err(e) = mountpoint::detach(at, true)
        {
            tracing::warn!("{e}");
        }
    }
}
