//! Mounting and unmounting, with the usual mistakes explained in words.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use fuser::{Filesystem, Session, SessionUnmounter};
use parking_lot::Mutex;
use strake_client::Client;
use strake_proto::{Code, Error, Result};
use tokio::sync::watch;

use crate::{
    transport::{fuser::Transport, kernel},
    vfs::Vfs,
};

/// How to mount.
#[derive(Clone, Debug)]
pub struct MountConfig {
    pub mountpoint: PathBuf,
    /// Let other users than the mounting one in. Permissions are checked by the kernel and by the mds either way.
    pub allow_other: bool,
    pub read_only: bool,
    /// Threads that take requests from the kernel; 1 to 64. The work itself runs on the tokio runtime.
    pub threads: usize,
    /// One `/dev/fuse` descriptor per thread.
    pub clone_fd: bool,
    /// First column of `df` and `/proc/mounts`; empty: the name of the file system.
    pub fsname: String,
    /// The type shown is `fuse.SUBTYPE`. `lfs` looks for `fuse.strake`.
    pub subtype: String,
    /// How long the kernel may use attributes without asking again; 0 asks each time.
    pub attr_timeout: Duration,
    /// How long the kernel may use a name without asking again; 0 asks each time.
    pub entry_timeout: Duration,
    /// Requests worked on at a time; more wait in the kernel.
    pub max_requests: usize,
}

impl MountConfig {
    /// Defaults for a mount at `mountpoint`.
    pub fn new(mountpoint: impl Into<PathBuf>) -> MountConfig {
        MountConfig {
            mountpoint: mountpoint.into(),
            allow_other: false,
            read_only: false,
            threads: 2,
            clone_fd: true,
            fsname: String::new(),
            subtype: "strake".into(),
            attr_timeout: Duration::from_secs(1),
            entry_timeout: Duration::from_secs(1),
            max_requests: 256,
        }
    }
}

/// A live mount. Dropping it unmounts.
pub struct Mount {
    session: MountedSession,
    vfs: Arc<Vfs>,
}

/// Mounts `client`'s file system. Must be called on a tokio runtime, which then does the work.
///
/// Errors say what to do: `ENOENT` and `ENOTDIR` for the mountpoint, `EBUSY` when StrakeFS is mounted there already,
/// `ENODEV` without `/dev/fuse`, `EPERM` when neither root nor fusermount3 is there to mount.
pub async fn mount(mut cfg: MountConfig, client: Client) -> Result<Mount> {
    check(&cfg)?;
    if cfg.fsname.is_empty() {
        cfg.fsname.clone_from(&client.map().map.fs_name);
    }
    let vfs = Arc::new(Vfs::new(client));
    let transport = Transport::new(vfs.clone(), &cfg, tokio::runtime::Handle::current());
    let session = MountedSession::start(transport, &cfg)?;
    tracing::info!(mountpoint = %kernel::shown(&cfg.mountpoint), "mounted");
    Ok(Mount { session, vfs })
}

impl Mount {
    /// Returns when it is unmounted, by [`Mount::unmount`] or by `umount(8)`, and every handle is closed.
    pub async fn wait(&self) -> Result<()> {
        let result = self.session.ended().await;
        self.vfs.close_all().await;
        result
    }

    /// Unmounts. `EBUSY` while files are open or a process stands in it.
    pub async fn unmount(&self) -> Result<()> {
        self.session.unmount()?;
        self.wait().await
    }
}

/// A mounted fuser session running on threads of its own.
pub(crate) struct MountedSession {
    unmounter: Mutex<SessionUnmounter>,
    ended: watch::Receiver<Option<Result<()>>>,
    mountpoint: PathBuf,
}

impl MountedSession {
    pub(crate) fn start<FS: Filesystem>(fs: FS, cfg: &MountConfig) -> Result<MountedSession> {
        let explain = |e: io::Error| explain_mount_error(cfg, &e);
        let mut session = Session::new(fs, &cfg.mountpoint, &kernel::session_config(cfg)).map_err(explain)?;
        let unmounter = Mutex::new(session.unmount_callable());
        let (tell, ended) = watch::channel(None);
        std::thread::Builder::new()
            .name("strake-fuse".into())
            .spawn(move || {
                let result = session.run().map_err(|e| Error::from(e).context("FUSE session"));
                let _ = tell.send(Some(result));
            })
            .map_err(|e| Error::from(e).context("starting the FUSE session's thread"))?;
        Ok(MountedSession { unmounter, ended, mountpoint: cfg.mountpoint.clone() })
    }

    pub(crate) async fn ended(&self) -> Result<()> {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(result) => result.clone().unwrap_or(Ok(())),
            Err(_) => Err(Error::new(Code::Io, "the FUSE session's thread died")),
        }
    }

    pub(crate) fn unmount(&self) -> Result<()> {
        let at = kernel::shown(&self.mountpoint);
        let in_use = || format!("cannot unmount {at}: it is in use; `fuser -vm {at}` shows by whom");
        // fuser forgets the mount at the first try, so ask the kernel first.
        match rustix::mount::unmount(&self.mountpoint, rustix::mount::UnmountFlags::empty()) {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::BUSY) => Err(Error::new(Code::Busy, in_use())),
            // Not root (then fusermount3 is asked), or unmounted already.
            Err(_) => self.unmounter.lock().unmount().map_err(|e| match e.raw_os_error() {
                Some(libc::EBUSY) => Error::new(Code::Busy, in_use()),
                _ => Error::from(e).context(format!("unmounting {at}")),
            }),
        }
    }
}

impl Drop for MountedSession {
    fn drop(&mut self) {
        if self.ended.borrow().is_none() {
            let detach = rustix::mount::UnmountFlags::DETACH;
            if rustix::mount::unmount(&self.mountpoint, detach).is_err() {
                let _ = self.unmounter.lock().unmount();
            }
        }
    }
}

/// Finds the mistakes that the kernel would answer with a bare number.
pub(crate) fn check(cfg: &MountConfig) -> Result<()> {
    let at = kernel::shown(&cfg.mountpoint);
    match fs::metadata(&cfg.mountpoint) {
        Ok(m) if m.is_dir() => {}
        Ok(_) => return Err(Error::new(Code::NotDir, format!("mountpoint {at} is not a folder; name one"))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(Error::new(Code::NoEnt, format!("mountpoint {at} does not exist; create it with mkdir")));
        }
        Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => {
            let m = format!("mountpoint {at} holds a mount whose daemon is gone; run `umount -l {at}` first");
            return Err(Error::new(Code::Busy, m));
        }
        Err(e) => return Err(Error::from(e).context(format!("mountpoint {at}"))),
    }
    if mounted_at(&cfg.mountpoint) {
        return Err(Error::new(Code::Busy, format!("StrakeFS is already mounted at {at}; run `umount {at}` first")));
    }
    if !Path::new("/dev/fuse").exists() {
        let m = "/dev/fuse is missing: run `modprobe fuse`, or give the container `--device /dev/fuse`";
        return Err(Error::new(Code::NoDev, m));
    }
    if !rustix::process::geteuid().is_root() && !in_path("fusermount3") {
        let m = "only root can mount without fusermount3, which is not installed; install the package fuse3";
        return Err(Error::new(Code::Perm, m));
    }
    Ok(())
}

fn in_path(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|p| std::env::split_paths(&p).any(|d| d.join(program).exists()))
}

/// Whether the topmost mount at this folder is a StrakeFS one.
fn mounted_at(folder: &Path) -> bool {
    let Ok(folder) = folder.canonicalize() else { return false };
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    table.lines().filter_map(mount_line).rfind(|(at, _)| *at == folder).is_some_and(|(_, t)| t == "fuse.strake")
}

/// Mountpoint and type of a line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
pub fn mount_line(line: &str) -> Option<(PathBuf, &str)> {
    let (front, back) = line.split_once(" - ")?;
    let at = front.split(' ').nth(4)?;
    Some((PathBuf::from(unescape(at)), back.split(' ').next()?))
}

/// The kernel writes blank, tab, newline and backslash in paths as `\ooo`.
fn unescape(s: &str) -> String {
    let mut out = Vec::with_capacity(s.len());
    let mut rest = s.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|_| first == b'\\').and_then(|d| std::str::from_utf8(d).ok());
        match octal.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn explain_mount_error(cfg: &MountConfig, e: &io::Error) -> Error {
    let at = kernel::shown(&cfg.mountpoint);
    let text = e.to_string();
    let mut err = Error::from(io::Error::new(e.kind(), text.clone())).context(format!("cannot mount at {at}"));
    if e.kind() == io::ErrorKind::PermissionDenied || text.contains("Operation not permitted") {
        err.code = Code::Perm;
        err.message.push_str("; mounting needs root or fusermount3, in a container `--cap-add SYS_ADMIN`");
        if cfg.allow_other {
            err.message.push_str("; allow_other as a user needs `user_allow_other` in /etc/fuse.conf");
        }
    }
    err
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_explained() {
        let dir = tempfile::tempdir().unwrap();
        let missing = check(&MountConfig::new(dir.path().join("nope"))).unwrap_err();
        assert_eq!(missing.code, Code::NoEnt);
        assert!(missing.message.contains("mkdir"), "{missing}");
        let file = dir.path().join("file");
        fs::write(&file, b"").unwrap();
        assert_eq!(check(&MountConfig::new(file)).unwrap_err().code, Code::NotDir);
    }

    #[test]
    fn mountinfo_lines() {
        let line = r"36 35 98:0 / /mnt/a\040b rw,noatime master:1 - fuse.strake strake rw,user_id=0";
        assert_eq!(mount_line(line), Some((PathBuf::from("/mnt/a b"), "fuse.strake")));
        assert_eq!(mount_line("nonsense"), None);
        assert_eq!(unescape(r"a\134b\04"), r"a\b\04");
    }
}
