//! Whether a descriptor is of one of our mounts, and may be believed to be.
//!
//! Any file system in user space may answer an ioctl(2) with anything, for example with the inode of another file that only the program's user may
//! write. So an answer is believed only of a mount that root made, or the program's own user: those could reach that file anyway.

use std::{ffi::c_int, fs, os::fd::BorrowedFd};

use rustix::fs::{FileType, Stat, fstat, fstatfs, major, minor};
use strake_proto::{
    Code,
    ioctl::{self, FILE_BYTES, OpenedFile, SERVERS_BYTES, Servers},
};

use crate::{
    abi,
    wrong::{Done, Wrong, say},
};

/// `FUSE_SUPER_MAGIC`.
const FUSE: i64 = 0x6573_5546;
/// What a descriptor's flags mean for a second open of its file.
const KEPT: c_int = libc::O_ACCMODE | libc::O_DSYNC | libc::O_SYNC | libc::O_DIRECT;

/// A file of one of our mounts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub uuid: [u8; 16],
    pub ino: u64,
    /// To open it with: the descriptor's access mode.
    pub flags: u32,
    /// What tells the descriptor's file from others on this machine.
    pub id: (u64, u64),
}

/// What a descriptor is.
pub enum Kind {
    Ours(Found),
    /// Of another file system: for the real library. Whether it is a regular file.
    Other(bool),
}

/// Looks at a descriptor. An error: it is none, or our mount has something against it.
pub fn look(fd: c_int) -> Done<Kind> {
    // SAFETY: asks for the flags of a descriptor, if it is one.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if fd < 0 || flags < 0 {
        return Err(Wrong::Op(abi::INVALID_VALUE));
    }
    // SAFETY: it is open, and the program keeps it so for the time of the call.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let Ok(stat) = fstat(file) else { return Ok(Kind::Other(false)) };
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    // Elsewhere the number may mean something.
    if !regular || fstatfs(file).map_or(true, |s| s.f_type != FUSE) {
        return Ok(Kind::Other(regular));
    }
    let Some(answer) = ask::<FILE_BYTES>(fd, ioctl::FILE) else { return Ok(Kind::Other(true)) };
    let answer = match OpenedFile::decode(&answer[..]) {
        Ok(a) => a,
        Err(e) if e.code == Code::OpNotSupp => {
            say(|| format!("descriptor {fd}: {e}"));
            return Err(Wrong::Op(abi::DRIVER_VERSION_MISMATCH));
        }
        // Somebody else's answer to a number of his own.
        Err(_) => return Ok(Kind::Other(true)),
    };
    believe(fd, &stat, &answer)?;
    if flags & libc::O_APPEND != 0 {
        say(|| format!("descriptor {fd}: O_APPEND has no offset to write at"));
        return Err(Wrong::Op(abi::INVALID_FILE_OPEN_FLAG));
    }
    Ok(Kind::Ours(Found {
        uuid: answer.uuid,
        ino: answer.ino,
        flags: (flags & KEPT) as u32,
        id: (stat.st_dev, stat.st_ino),
    }))
}

/// Where the metadata servers are, by the mount.
pub fn servers(fd: c_int, of: &Found) -> Option<String> {
    let answer = Servers::decode(&ask::<SERVERS_BYTES>(fd, ioctl::SERVERS)?[..]).ok()?;
    (answer.uuid == of.uuid && !answer.endpoints.is_empty()).then_some(answer.endpoints)
}

fn ask<const N: usize>(fd: c_int, number: u32) -> Option<Box<[u8; N]>> {
    let mut answer = Box::new([0; N]);
    // SAFETY: the number says how many bytes are written, and there is room for them; the kernel holds a file system in user space to it.
    let code = unsafe { libc::ioctl(fd, number as libc::Ioctl, answer.as_mut_ptr()) };
    (code >= 0).then_some(answer)
}

fn believe(fd: c_int, stat: &Stat, answer: &OpenedFile) -> Done<()> {
    let mut why = None;
    if answer.ino != stat.st_ino {
        why = Some(format!("the mount says that inode {:#x} is {:#x}", stat.st_ino, answer.ino));
    } else {
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let me = rustix::process::geteuid().as_raw();
        match mounter(&table, (major(stat.st_dev), minor(stat.st_dev))) {
            Some(user) if user == 0 || user == me => {}
            Some(user) => why = Some(format!("its mount was made by user {user}, neither root nor user {me}")),
            None => why = Some("/proc/self/mountinfo does not say who made its mount".into()),
        }
    }
    let Some(why) = why else { return Ok(()) };
    say(|| format!("descriptor {fd} is not believed to be of a StrakeFS mount: {why}"));
    Err(Wrong::Op(abi::PERMISSION_DENIED))
}

/// Who made the mount of a device in user space.
fn mounter(table: &str, device: (u32, u32)) -> Option<u32> {
    let device = format!("{}:{}", device.0, device.1);
    table.lines().find_map(|line| {
        let (mount, source) = line.split_once(" - ")?;
        if mount.split(' ').nth(2)? != device || !source.starts_with("fuse") {
            return None;
        }
        // The last field: options of the file system.
        source.rsplit(' ').next()?.split(',').find_map(|o| o.strip_prefix("user_id=")?.parse().ok())
    })
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
        assert_eq!(mounter(table, (0, 55)), Some(0));
        assert_eq!(mounter(table, (0, 56)), Some(1000), "what it calls itself does not count");
        assert_eq!(mounter(table, (8, 1)), None, "not in user space");
        assert_eq!(mounter(table, (0, 5)), None);
        assert_eq!(mounter("", (0, 55)), None);
    }

    #[test]
    fn what_is_no_descriptor_of_a_mount_is_told_apart() {
        for none in [-1, 1_000_000] {
            assert!(matches!(look(none), Err(Wrong::Op(abi::INVALID_VALUE))));
        }
        let kind = |path: &str| {
            use std::os::fd::AsRawFd;
            look(fs::File::open(path).unwrap().as_raw_fd()).unwrap()
        };
        assert!(matches!(kind("/proc/self/exe"), Kind::Other(true)));
        assert!(matches!(kind("/dev/null"), Kind::Other(false)) && matches!(kind("/"), Kind::Other(false)));
    }
}
