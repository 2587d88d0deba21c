//! Detects whether a descriptor belongs to one of our mounts, and whether the mount can be trusted.
//!
//! Any user-space file system may answer an ioctl(2) with anything, for example with the inode of
//! another file that only the program's user may write. So an answer is trusted only from a mount
//! made by root or by the program's own user: they could reach that file anyway.

use std::{ffi::c_int, os::fd::BorrowedFd};

use rustix::{
    fs::{FileType, Stat, fstat, fstatfs, major, minor},
    io::Errno,
};
use strake_mount_table::Mounted;
use strake_proto::{
    Code,
    ioctl::{self, FILE_BYTES, OpenedFile, SERVERS_BYTES, Servers},
};

use crate::{
    abi,
    errors::{CallError, Done, say},
};

/// `FUSE_SUPER_MAGIC`.
const FUSE: i64 = 0x6573_5546;
/// The type of our mounts in the table of mounts.
pub const KIND: &str = "fuse.strake";
/// The flags of a descriptor that a second open of its file keeps.
const KEPT: c_int = libc::O_ACCMODE | libc::O_DSYNC | libc::O_SYNC | libc::O_DIRECT;

/// A file of one of our mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub uuid: [u8; 16],
    pub ino: u64,
    /// The open flags taken from the descriptor.
    pub flags: u32,
    /// Device and inode number, which identify the file on this machine.
    pub id: (u64, u64),
}

/// What a descriptor is.
pub enum Kind {
    Ours(Found),
    /// A file of another file system, for the real library. The value: whether it is a regular
    /// file.
    Other(bool),
}

/// Finds out what a descriptor is. An error if it is not a descriptor, or if our mount refuses it.
pub fn look(fd: c_int) -> Done<Kind> {
    // SAFETY: only reads the flags; any number is allowed.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if fd < 0 || flags < 0 {
        return Err(CallError::Op(abi::INVALID_VALUE));
    }
    // SAFETY: it is open, and the program keeps it so for the time of the call.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let stat = asked(fd, "fstat", || fstat(file))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(Kind::Other(false));
    }
    let mount = mounted(&mounts(), device(&stat));
    // On other file systems the ioctl number may have another meaning.
    if !in_user_space(fd, &stat, mount.as_ref())? {
        return Ok(Kind::Other(true));
    }
    let named = mount.as_ref().is_some_and(|m| m.kind == KIND);
    let unknown = || {
        if !named {
            return Ok(Kind::Other(true));
        }
        // It is one of our mounts, but it does not know the ioctl or answers it in another way. Its
        // files never bypass the bridge, whatever the policy says.
        say(|| {
            format!(
                "descriptor {fd}: its mount is of type {KIND} but does not say which file it is"
            )
        });
        Err(CallError::Op(abi::DRIVER_VERSION_MISMATCH))
    };
    let Some(answer) = ask::<FILE_BYTES>(fd, ioctl::FILE)? else { return unknown() };
    let answer = match OpenedFile::decode(&answer[..]) {
        Ok(a) => a,
        Err(e) if e.code == Code::OpNotSupp => {
            say(|| format!("descriptor {fd}: {e}"));
            return Err(CallError::Op(abi::DRIVER_VERSION_MISMATCH));
        }
        // Another file system's answer, which uses the same ioctl number for something else.
        Err(_) => return unknown(),
    };
    believe(fd, &stat, &answer, mount.as_ref())?;
    if flags & libc::O_APPEND != 0 {
        say(|| format!("descriptor {fd}: O_APPEND gives no offset to write at"));
        return Err(CallError::Op(abi::INVALID_FILE_OPEN_FLAG));
    }
    Ok(Kind::Ours(Found {
        uuid: answer.uuid,
        ino: answer.ino,
        flags: (flags & KEPT) as u32,
        id: (stat.st_dev, stat.st_ino),
    }))
}

/// The addresses of the metadata servers, as the mount reports them.
pub fn servers(fd: c_int, of: &Found) -> Done<Option<String>> {
    let Some(answer) = ask::<SERVERS_BYTES>(fd, ioctl::SERVERS)? else { return Ok(None) };
    let Ok(answer) = Servers::decode(&answer[..]) else { return Ok(None) };
    Ok((answer.uuid == of.uuid && !answer.endpoints.is_empty()).then_some(answer.endpoints))
}

/// Repeats `f` while signals interrupt it. Other errors are errors of the call: a file that cannot
/// be checked now must not count as a foreign one.
fn asked<T>(fd: c_int, what: &str, mut f: impl FnMut() -> rustix::io::Result<T>) -> Done<T> {
    loop {
        match f() {
            Ok(v) => return Ok(v),
            Err(Errno::INTR) => {}
            Err(e) => {
                say(|| format!("descriptor {fd}: {what}: {e}"));
                return Err(CallError::Os(e.raw_os_error()));
            }
        }
    }
}

/// Sends an ioctl. `None`: the descriptor's file system does not know it.
fn ask<const N: usize>(fd: c_int, number: u32) -> Done<Option<Box<[u8; N]>>> {
    asked(fd, "ioctl", || {
        let mut answer = Box::new([0; N]);
        // SAFETY: the ioctl number contains the size of the answer, which fits; the kernel enforces
        // that size for a user-space file system.
        let code = unsafe { libc::ioctl(fd, number as libc::Ioctl, answer.as_mut_ptr()) };
        if code >= 0 {
            return Ok(Some(answer));
        }
        let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        match errno {
            libc::ENOTTY | libc::EINVAL | libc::ENOSYS | libc::EOPNOTSUPP => Ok(None),
            _ => Err(Errno::from_raw_os_error(errno)),
        }
    })
}

/// The table of mounts; empty where it cannot be read.
pub fn mounts() -> Vec<Mounted> {
    strake_mount_table::mounts().unwrap_or_default()
}

fn device(stat: &Stat) -> (u32, u32) {
    (major(stat.st_dev), minor(stat.st_dev))
}

/// Whether the file is on a user-space file system. The table of mounts is read first, because
/// fstatfs(2) would send a request to the mount's servers.
fn in_user_space(fd: c_int, stat: &Stat, mount: Option<&MountOf>) -> Done<bool> {
    if let Some(m) = mount {
        return Ok(m.kind.starts_with("fuse"));
    }
    // The device is not in the table, for example because the file system has more device numbers
    // than mounts. Only a number with major 0 can be a user-space mount without a device.
    if major(stat.st_dev) != 0 {
        return Ok(false);
    }
    // SAFETY: it is open, and the program keeps it so for the time of the call.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    Ok(asked(fd, "fstatfs", || fstatfs(file))?.f_type == FUSE)
}

fn believe(fd: c_int, stat: &Stat, answer: &OpenedFile, mount: Option<&MountOf>) -> Done<()> {
    let mut why = None;
    if answer.ino != stat.st_ino {
        why = Some(format!(
            "the mount answers about inode {:#x} with inode {:#x}",
            stat.st_ino, answer.ino
        ));
    } else {
        let me = rustix::process::geteuid().as_raw();
        // The id is from the user namespace in which the mount was made.
        match mount.and_then(|m| m.user) {
            Some(user) if user == 0 || user == me => {}
            Some(user) => {
                why = Some(format!("its mount was made by user {user}, neither root nor user {me}"))
            }
            None => why = Some("/proc/self/mountinfo does not say who made its mount".into()),
        }
    }
    let Some(why) = why else { return Ok(()) };
    say(|| format!("descriptor {fd} is not accepted as one of a StrakeFS mount: {why}"));
    Err(CallError::Op(abi::PERMISSION_DENIED))
}

/// The entry of a device in the table of mounts.
#[derive(Debug, PartialEq, Eq)]
struct MountOf {
    kind: String,
    /// The user who made the mount, if it is a user-space file system.
    user: Option<u32>,
}

fn mounted(table: &[Mounted], device: (u32, u32)) -> Option<MountOf> {
    let device = format!("{}:{}", device.0, device.1);
    let m = table.iter().find(|m| m.device == device)?;
    let user = m.super_options.split(',').find_map(|o| o.strip_prefix("user_id=")?.parse().ok());
    Some(MountOf { user: user.filter(|_| m.kind.starts_with("fuse")), kind: m.kind.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_made_a_mount_is_read_from_its_line() {
        let table = "22 28 0:21 / /proc rw shared:5 - proc proc rw\n\
                     40 28 0:55 / /mnt/a rw,nosuid - fuse.strake ai rw,user_id=0,group_id=0,allow_other\n\
                     41 28 0:56 / /mnt/b\\040c rw - fuse.strake user_id=0 rw,user_id=1000,group_id=1000\n\
                     42 28 8:1 / / rw - ext4 /dev/sda1 rw,user_id=0\n\
                     junk\n";
        let table = strake_mount_table::parse(table.as_bytes());
        let found = |device| mounted(&table, device).map(|m| (m.kind, m.user));
        assert_eq!(found((0, 55)), Some((KIND.into(), Some(0))));
        assert_eq!(
            found((0, 56)),
            Some((KIND.into(), Some(1000))),
            "what it calls itself does not count"
        );
        assert_eq!(found((8, 1)), Some(("ext4".into(), None)), "not in user space");
        assert_eq!(found((0, 5)), None);
        assert_eq!(mounted(&[], (0, 55)), None);
    }

    #[test]
    fn what_is_no_descriptor_of_a_mount_is_told_apart() {
        for none in [-1, 1_000_000] {
            assert!(matches!(look(none), Err(CallError::Op(abi::INVALID_VALUE))));
        }
        let kind = |path: &str| {
            use std::os::fd::AsRawFd;
            look(std::fs::File::open(path).unwrap().as_raw_fd()).unwrap()
        };
        assert!(matches!(kind("/proc/self/exe"), Kind::Other(true)));
        assert!(
            matches!(kind("/dev/null"), Kind::Other(false))
                && matches!(kind("/"), Kind::Other(false))
        );
    }
}
