//! The mountpoint: checks before a mount, mounting and unmounting.

use std::{
    fs,
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    path::{Display, Path, PathBuf},
    process::{Command, Stdio},
};

use rustix::{
    mount::{MountFlags, UnmountFlags},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags,
        SocketType,
    },
};
use strake_proto::{Code, Error, Result};

use crate::{config::MountConfig, table};

/// A path for messages.
pub(crate) fn shown(p: &Path) -> Display<'_> {
    p.display()
}

/// Mounts an open `/dev/fuse`, as root.
pub(crate) fn attach(cfg: &MountConfig, fd: BorrowedFd<'_>) -> Result<()> {
    let mut flags = cfg.flags;
    flags.set(MountFlags::RDONLY, cfg.read_only);
    let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let other = if cfg.allow_other { ",allow_other" } else { "" };
    let data = format!(
        "fd={},rootmode=40000,user_id={uid},group_id={gid},default_permissions{other}",
        fd.as_raw_fd()
    );
    let kind = format!("fuse.{}", cfg.subtype);
    let data = std::ffi::CString::new(data)
        .map_err(|_| Error::new(Code::Inval, "a mount option contains a NUL"))?;
    rustix::mount::mount(
        cfg.fsname.as_str(),
        &cfg.mountpoint,
        kind.as_str(),
        flags,
        data.as_c_str(),
    )
    .map_err(|e| explain(cfg, &io::Error::from(e)))
}

/// Mounts with fusermount3, for users other than root; returns the `/dev/fuse` that it opened.
pub(crate) fn attach_as_user(cfg: &MountConfig) -> Result<OwnedFd> {
    // Kept open over exec: fusermount3 gets its end by number.
    let (ours, its) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::empty(),
        None,
    )
    .map_err(io::Error::from)?;
    let mut options = format!(
        "fsname={},subtype={},default_permissions",
        escaped(&cfg.fsname),
        escaped(&cfg.subtype)
    );
    if cfg.allow_other {
        options.push_str(",allow_other");
    }
    if cfg.read_only {
        options.push_str(",ro");
    }
    for flag in table::flag_options(cfg.flags) {
        options.push(',');
        options.push_str(flag);
    }
    let mut child = fusermount_command();
    child.arg("-o").arg(options).arg("--").arg(&cfg.mountpoint);
    child
        .env("_FUSE_COMMFD", its.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let child = child.spawn().map_err(|e| Error::from(e).context("starting fusermount3"))?;
    drop(its);
    let fd = receive_fd(&ours);
    let out = child.wait_with_output().map_err(|e| Error::from(e).context("fusermount3"))?;
    match fd {
        Ok(Some(fd)) if out.status.success() => Ok(fd),
        _ => {
            let said = String::from_utf8_lossy(&out.stderr).trim().replace('\n', "; ");
            Err(explain(cfg, &io::Error::new(io::ErrorKind::PermissionDenied, said)))
        }
    }
}

/// In options of fusermount3 commas and backslashes are escaped with a backslash.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace(',', "\\,")
}

/// The first descriptor that a message brings.
fn receive_fd(from: &OwnedFd) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(
        from,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let fds = control.drain().find_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(fds)
}

/// Unmounts. `EBUSY` while the mount is in use, unless `lazy`: then it disappears for new users
/// only.
pub(crate) fn detach(at: &Path, lazy: bool) -> Result<()> {
    let shown = shown(at);
    let busy = || {
        Error::new(
            Code::Busy,
            format!("cannot unmount {shown}: it is in use; `fuser -vm {shown}` shows by whom"),
        )
    };
    let flags = if lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(at, flags) {
        Ok(()) => return Ok(()),
        Err(rustix::io::Errno::BUSY) => return Err(busy()),
        Err(rustix::io::Errno::PERM) if !rustix::process::geteuid().is_root() => {}
        Err(e) => {
            return Err(Error::from(io::Error::from(e)).context(format!("unmounting {shown}")));
        }
    }
    let out = fusermount_command().arg(if lazy { "-uz" } else { "-u" }).arg("--").arg(at).output();
    let out = out.map_err(|e| Error::from(e).context("starting fusermount3"))?;
    let said = String::from_utf8_lossy(&out.stderr);
    match out.status.success() {
        true => Ok(()),
        false if said.contains("busy") => Err(busy()),
        false => Err(Error::new(Code::Perm, format!("unmounting {shown}: {}", said.trim()))),
    }
}

/// Whether this machine can mount at all: `/dev/fuse` is there and this process may use it.
pub fn can_mount(probe: &Path) -> Result<()> {
    check(&MountConfig::new(probe))
}

/// Detects mistakes that the kernel would answer with a bare error number.
pub(crate) fn check(cfg: &MountConfig) -> Result<()> {
    let at = shown(&cfg.mountpoint);
    match fs::metadata(&cfg.mountpoint) {
        Ok(m) if m.is_dir() => {}
        Ok(_) => {
            return Err(Error::new(
                Code::NotDir,
                format!("mountpoint {at} is not a folder; name one"),
            ));
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(Error::new(
                Code::NoEnt,
                format!("mountpoint {at} does not exist; create it with mkdir"),
            ));
        }
        Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => {
            let m = format!(
                "mountpoint {at} holds a mount whose daemon is gone; run `umount -l {at}` first"
            );
            return Err(Error::new(Code::Busy, m));
        }
        Err(e) => return Err(Error::from(e).context(format!("mountpoint {at}"))),
    }
    if mounted_at(&cfg.mountpoint) {
        return Err(Error::new(
            Code::Busy,
            format!("StrakeFS is already mounted at {at}; run `umount {at}` first"),
        ));
    }
    if !Path::new("/dev/fuse").exists() {
        let m =
            "/dev/fuse is missing: run `modprobe fuse`, or give the container `--device /dev/fuse`";
        return Err(Error::new(Code::NoDev, m));
    }
    if !rustix::process::geteuid().is_root() && fusermount().is_none() {
        let m = "only root can mount without fusermount3, which is not installed; install the package fuse3";
        return Err(Error::new(Code::Perm, m));
    }
    Ok(())
}

/// The path of fusermount3. For users, mount(8) calls its helpers without a `PATH`.
pub fn fusermount() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(usual).map(|d| d.join("fusermount3")).find(|f| f.is_file())
}

/// The command, ready to be started.
fn fusermount_command() -> Command {
    Command::new(fusermount().unwrap_or_else(|| "fusermount3".into()))
}

/// Whether the topmost mount at this folder is a StrakeFS one.
fn mounted_at(folder: &Path) -> bool {
    let Ok(folder) = folder.canonicalize() else { return false };
    table::topmost(&table::mounts().unwrap_or_default(), &folder)
        .is_some_and(|m| m.kind == "fuse.strake")
}

/// Changes a mount as `mount -o remount` does: read-only or not, and the other flags. `EBUSY` for
/// read-only while files are open for writing.
pub fn remount(at: &Path, read_only: bool, mut flags: MountFlags) -> Result<()> {
    flags.set(MountFlags::RDONLY, read_only);
    rustix::mount::mount_remount(at, flags, c"").map_err(|e| {
        let e = match e {
            rustix::io::Errno::BUSY => Error::new(Code::Busy, "files in it are open for writing"),
            e => Error::from(io::Error::from(e)),
        };
        e.context(format!("remounting {}", shown(at)))
    })
}

pub(crate) fn explain(cfg: &MountConfig, e: &io::Error) -> Error {
    let at = shown(&cfg.mountpoint);
    let text = e.to_string();
    let mut err = Error::from(io::Error::new(e.kind(), text.clone()))
        .context(format!("cannot mount at {at}"));
    if e.kind() == io::ErrorKind::PermissionDenied || text.contains("Operation not permitted") {
        err.code = Code::Perm;
        err.message
            .push_str("; mounting needs root or fusermount3, in a container `--cap-add SYS_ADMIN`");
        if cfg.allow_other {
            err.message
                .push_str("; allow_other as a user needs `user_allow_other` in /etc/fuse.conf");
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
}
