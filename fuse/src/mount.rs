//! Mounting and unmounting.

use std::{
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use rustix::mount::MountFlags;
use strake_client::Client;
use strake_proto::{Code, Error, Result};

#[cfg(feature = "fuser")]
use crate::transport::fuser;
use crate::{
    config::{MountConfig, Transport},
    handover::HandoverMemory,
    mountpoint,
    transport::dev::{self, Interim},
    vfs::{Vfs, View},
};

fn view(cfg: &MountConfig) -> View {
    View { root: cfg.root, synchronous: cfg.flags.contains(MountFlags::SYNCHRONOUS) }
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
    #[cfg(feature = "fuser")]
    Fuser(fuser::MountedSession),
}

/// Mounts `client`'s file system. Must be called on a tokio runtime, which then runs the work.
///
/// Errors say what to do: `ENOENT` and `ENOTDIR` for the mountpoint, `EBUSY` when StrakeFS is
/// mounted there already, `ENODEV` without `/dev/fuse`, `EPERM` when the caller is not root and
/// there is no fusermount3.
pub async fn mount(mut cfg: MountConfig, client: Client) -> Result<Mount> {
    cfg.transport.check()?;
    mountpoint::check(&cfg)?;
    if cfg.fsname.is_empty() {
        cfg.fsname.clone_from(&client.servers().map().map.fs_name);
    }
    let vfs = Arc::new(Vfs::with(client, None, view(&cfg)));
    vfs.learn().await?;
    let session = match cfg.transport {
        #[cfg(feature = "fuser")]
        Transport::Fuser => {
            let runtime = tokio::runtime::Handle::current();
            let requests = fuser::Requests::new(vfs.clone(), &cfg, runtime);
            Session::Fuser(fuser::MountedSession::start(requests, &cfg)?)
        }
        #[cfg(not(feature = "fuser"))]
        Transport::Fuser => return Err(Transport::left_out()),
        Transport::Dev => {
            let agreed = Arc::default();
            let serve = dev::Serve::new(vfs.clone(), &cfg, Arc::clone(&agreed), None).await;
            Session::Dev(dev::start(dev::attach(&cfg)?, serve, agreed, None)?)
        }
    };
    tracing::info!(mountpoint = %mountpoint::shown(&cfg.mountpoint), "mounted");
    Ok(Mount { session, mountpoint: Some(cfg.mountpoint), vfs, lost: OnceLock::new() })
}

/// Fetches and keeps what the mount must show when servers are away. Call this before [`attach`]:
/// without it umount(8), which first looks at the mount, would wait for the servers.
pub async fn learn(cfg: &MountConfig, client: &Client, keep: &Arc<HandoverMemory>) -> Result<()> {
    Vfs::with(client.clone(), Some(keep.clone()), view(cfg)).learn().await
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
    let vfs = Arc::new(Vfs::with(client, Some(keep.clone()), view(cfg)));
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
            #[cfg(feature = "fuser")]
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
            #[cfg(feature = "fuser")]
            Session::Fuser(s) => s.unmount()?,
        }
        self.wait().await
    }

    /// Makes the kernel ask again about an inode: its attributes, and with `data` its pages.
    pub fn invalidate_inode(&self, ino: u64, data: bool) -> Result<()> {
        self.notify(&dev::inode_changed(ino, if data { 0 } else { -1 }, 0))
    }

    /// Makes the kernel look up a name again.
    pub fn invalidate_name(&self, parent: u64, name: &[u8]) -> Result<()> {
        self.notify(&dev::name_changed(parent, name))
    }

    /// Notifies the kernel. `ENOENT` is no error: what the kernel does not have it need not forget.
    fn notify(&self, notice: &dev::Notice) -> Result<()> {
        match &self.session {
            Session::Dev(s) => match s.notify(notice) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
                r => Ok(r?),
            },
            #[cfg(feature = "fuser")]
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
