//! Operations through Linux: system calls on a mounted file system, of which each is one step of
//! its servers.
//!
//! Directories and inodes are held by `O_PATH` descriptors, so that no path is walked. What a
//! lookup found is looked at by a call of its own, which is an operation of its own in the history.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString},
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
};

use crate::{
    history::{Answer, Attr, Errno, Ino, NEW_DIR, NEW_FILE, Op, Outcome},
    library::rename_flags,
};

/// Names of a directory are listed by one call if they fit.
const LISTING: usize = 32 << 10;

/// One program's view of a mount.
pub struct Mount {
    /// `O_PATH` descriptors of the inodes that it has met.
    met: BTreeMap<Ino, OwnedFd>,
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn c(text: &str) -> io::Result<CString> {
    Ok(CString::new(text)?)
}

/// Where /proc shows a descriptor: what it is of, without a name.
fn by_fd(fd: RawFd) -> io::Result<CString> {
    c(&format!("/proc/self/fd/{fd}"))
}

fn open(dir: RawFd, name: &CStr, flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: a string with its end; the descriptor that comes is nobody else's.
    unsafe {
        Ok(OwnedFd::from_raw_fd(checked(libc::openat(
            dir,
            name.as_ptr(),
            flags | libc::O_CLOEXEC,
            NEW_FILE,
        ))?))
    }
}

fn stat(fd: RawFd) -> io::Result<libc::stat> {
    // SAFETY: all bytes zero is a value of this struct of numbers; it is the callee's to fill.
    let mut s: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    checked(unsafe { libc::fstat(fd, &mut s) })?;
    Ok(s)
}

impl Mount {
    /// From here on this process has no umask.
    pub fn without_umask() -> Mount {
        // SAFETY: a number is set.
        unsafe { libc::umask(0) };
        Mount { met: BTreeMap::new() }
    }

    /// A folder of the mount, by which histories name it.
    pub fn enter(&mut self, path: &str) -> io::Result<Ino> {
        let fd = open(libc::AT_FDCWD, &c(path)?, libc::O_PATH | libc::O_DIRECTORY)?;
        let ino = stat(fd.as_raw_fd())?.st_ino;
        self.met.insert(ino, fd);
        Ok(ino)
    }

    fn fd(&self, ino: Ino) -> io::Result<RawFd> {
        let unmet = || io::Error::other("an inode that this program has not met");
        Ok(self.met.get(&ino).ok_or_else(unmet)?.as_raw_fd())
    }

    /// One operation to its end.
    pub fn perform(&mut self, op: &Op) -> Outcome {
        self.try_perform(op).map_or_else(|e| failed(&e), Outcome::Done)
    }

    fn try_perform(&mut self, op: &Op) -> io::Result<Answer> {
        // SAFETY (all calls below): strings with their ends, which live through the call, and
        // descriptors that are open.
        match op {
            Op::Create { dir, name, exclusive } => {
                let excl = if *exclusive { libc::O_EXCL } else { 0 };
                let fd = open(self.fd(*dir)?, &c(name)?, libc::O_CREAT | libc::O_RDWR | excl)?;
                self.meet(fd)
            }
            Op::Mkdir { dir, name } => {
                // SAFETY: as said.
                checked(unsafe { libc::mkdirat(self.fd(*dir)?, c(name)?.as_ptr(), NEW_DIR) })?;
                Ok(Answer::Done)
            }
            Op::Lookup { dir, name } => {
                let fd = open(self.fd(*dir)?, &c(name)?, libc::O_PATH | libc::O_NOFOLLOW)?;
                self.meet(fd)
            }
            Op::Getattr { ino } => {
                let s = stat(self.fd(*ino)?)?;
                let dir = s.st_mode & libc::S_IFMT == libc::S_IFDIR;
                let attr = Attr { dir, nlink: s.st_nlink as u32, mode: s.st_mode & 0o7777 };
                Ok(Answer::Inode { ino: s.st_ino, attr: Some(attr) })
            }
            Op::Open { ino } => {
                open(libc::AT_FDCWD, &by_fd(self.fd(*ino)?)?, libc::O_RDONLY)?;
                Ok(Answer::Inode { ino: *ino, attr: None })
            }
            Op::Chmod { ino, mode } => {
                // SAFETY: as said.
                checked(unsafe { libc::chmod(by_fd(self.fd(*ino)?)?.as_ptr(), *mode) })?;
                Ok(Answer::Done)
            }
            Op::Link { ino, dir, name } => {
                let (old, dir, name) = (by_fd(self.fd(*ino)?)?, self.fd(*dir)?, c(name)?);
                let follow = libc::AT_SYMLINK_FOLLOW;
                // SAFETY: as said.
                checked(unsafe {
                    libc::linkat(libc::AT_FDCWD, old.as_ptr(), dir, name.as_ptr(), follow)
                })?;
                Ok(Answer::Done)
            }
            Op::Unlink { dir, name } | Op::Rmdir { dir, name } => {
                let flags = if matches!(op, Op::Rmdir { .. }) { libc::AT_REMOVEDIR } else { 0 };
                // SAFETY: as said.
                checked(unsafe { libc::unlinkat(self.fd(*dir)?, c(name)?.as_ptr(), flags) })?;
                Ok(Answer::Done)
            }
            Op::Rename { dir, name, to_dir, to_name, how } => {
                let (dir, to_dir, name, to_name) =
                    (self.fd(*dir)?, self.fd(*to_dir)?, c(name)?, c(to_name)?);
                let flags = rename_flags(*how);
                // SAFETY: as said.
                checked(unsafe {
                    libc::renameat2(dir, name.as_ptr(), to_dir, to_name.as_ptr(), flags)
                })?;
                Ok(Answer::Done)
            }
            Op::Readdir { dir } => self.list(*dir),
        }
    }

    /// The kernel knows the number of what it has opened; no server is asked.
    fn meet(&mut self, fd: OwnedFd) -> io::Result<Answer> {
        // SAFETY: as in `stat`.
        let mut s: libc::statx = unsafe { std::mem::zeroed() };
        let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
        // SAFETY: an empty string with its end, and a struct for the callee to fill.
        checked(unsafe {
            libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, libc::STATX_INO, &mut s)
        })?;
        let ino = s.stx_ino;
        self.met.insert(ino, open(libc::AT_FDCWD, &by_fd(fd.as_raw_fd())?, libc::O_PATH)?);
        Ok(Answer::Inode { ino, attr: None })
    }

    fn list(&self, dir: Ino) -> io::Result<Answer> {
        let fd = open(self.fd(dir)?, c".", libc::O_RDONLY | libc::O_DIRECTORY)?;
        let mut bytes = vec![0u8; LISTING];
        // SAFETY: a buffer of that length.
        let n = unsafe {
            libc::syscall(libc::SYS_getdents64, fd.as_raw_fd(), bytes.as_mut_ptr(), LISTING)
        };
        let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
        let (mut names, mut rest) = (Vec::new(), &bytes[..n]);
        // struct linux_dirent64: the number (8), an offset (8), this record's length (2), a type
        // (1), the name.
        while let Some((head, _)) = rest.split_first_chunk::<19>() {
            let ino = u64::from_le_bytes([
                head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7],
            ]);
            let len = usize::from(u16::from_le_bytes([head[16], head[17]]));
            let name = CStr::from_bytes_until_nul(&rest[19..len]).map_err(io::Error::other)?;
            let name = name.to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push((name, ino));
            }
            rest = &rest[len..];
        }
        Ok(Answer::Names(names))
    }
}

fn failed(e: &io::Error) -> Outcome {
    match e.raw_os_error().and_then(Errno::from_raw) {
        Some(errno) => Outcome::Failed(errno),
        None => Outcome::Unknown(e.to_string()),
    }
}
