//! Operations through Linux: system calls on a mounted file system, each of which is one step for
//! the servers.
//!
//! `O_PATH` descriptors hold directories and inodes, so that no path is walked. The attributes of
//! an inode that a lookup found are read by another call, which is an operation of its own in the
//! history.

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

/// Size of the buffer for a listing: one call must return all names of a directory.
const LISTING: usize = 32 << 10;

/// One program's view of a mount.
pub struct Mount {
    /// `O_PATH` descriptors of the inodes that it has seen.
    met: BTreeMap<Ino, OwnedFd>,
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn c(text: &str) -> io::Result<CString> {
    Ok(CString::new(text)?)
}

/// The path in /proc by which a descriptor's inode can be opened without a name.
fn by_fd(fd: RawFd) -> io::Result<CString> {
    c(&format!("/proc/self/fd/{fd}"))
}

fn open(dir: RawFd, name: &CStr, flags: libc::c_int) -> io::Result<OwnedFd> {
    // SAFETY: the name ends with NUL; nothing else owns the new descriptor.
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
    // SAFETY: all zeros is a valid value of this struct of numbers.
    let mut s: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `s` is a struct for the call to fill, and lives through it.
    checked(unsafe { libc::fstat(fd, &mut s) })?;
    Ok(s)
}

impl Mount {
    /// Also sets the umask of this process to 0.
    pub fn without_umask() -> Mount {
        // SAFETY: the call only sets a number.
        unsafe { libc::umask(0) };
        Mount { met: BTreeMap::new() }
    }

    /// Opens a folder of the mount and returns its inode number, for use in histories.
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

    /// Does one operation and waits for its end.
    pub fn perform(&mut self, op: &Op) -> Outcome {
        self.try_perform(op).map_or_else(|e| failed(&e), Outcome::Done)
    }

    fn try_perform(&mut self, op: &Op) -> io::Result<Answer> {
        // SAFETY (all calls below): strings end with NUL and live through the call, and descriptors
        // are open.
        match op {
            Op::Create { dir, name, exclusive } => {
                let excl = if *exclusive { libc::O_EXCL } else { 0 };
                let fd = open(self.fd(*dir)?, &c(name)?, libc::O_CREAT | libc::O_RDWR | excl)?;
                self.meet(fd)
            }
            Op::Mkdir { dir, name } => {
                // SAFETY: as above.
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
                // SAFETY: as above.
                checked(unsafe { libc::chmod(by_fd(self.fd(*ino)?)?.as_ptr(), *mode) })?;
                Ok(Answer::Done)
            }
            Op::Link { ino, dir, name } => {
                let (old, dir, name) = (by_fd(self.fd(*ino)?)?, self.fd(*dir)?, c(name)?);
                let follow = libc::AT_SYMLINK_FOLLOW;
                // SAFETY: as above.
                checked(unsafe {
                    libc::linkat(libc::AT_FDCWD, old.as_ptr(), dir, name.as_ptr(), follow)
                })?;
                Ok(Answer::Done)
            }
            Op::Unlink { dir, name } | Op::Rmdir { dir, name } => {
                let flags = if matches!(op, Op::Rmdir { .. }) { libc::AT_REMOVEDIR } else { 0 };
                // SAFETY: as above.
                checked(unsafe { libc::unlinkat(self.fd(*dir)?, c(name)?.as_ptr(), flags) })?;
                Ok(Answer::Done)
            }
            Op::Rename { dir, name, to_dir, to_name, how } => {
                let (dir, to_dir, name, to_name) =
                    (self.fd(*dir)?, self.fd(*to_dir)?, c(name)?, c(to_name)?);
                let flags = rename_flags(*how);
                // SAFETY: as above.
                checked(unsafe {
                    libc::renameat2(dir, name.as_ptr(), to_dir, to_name.as_ptr(), flags)
                })?;
                Ok(Answer::Done)
            }
            Op::Readdir { dir } => self.list(*dir),
        }
    }

    /// Asks the kernel for the number of the inode that it has opened; no server is asked.
    fn meet(&mut self, fd: OwnedFd) -> io::Result<Answer> {
        // SAFETY: as in `stat`.
        let mut s: libc::statx = unsafe { std::mem::zeroed() };
        let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
        // SAFETY: the empty string ends with NUL, and `s` is a struct for the call to fill.
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
        // SAFETY: the buffer has this length.
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
