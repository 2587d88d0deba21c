//! The kernel's side of `/dev/fuse`: numbers of `include/uapi/linux/fuse.h`, protocol 7.23 to 7.45.
//!
//! Everything is in the byte order of the machine. A request is a head of [`IN_HEAD`] bytes and its
//! arguments; a reply is a head of [`OUT_HEAD`] bytes and its results.

/// The only major version.
pub const MAJOR: u32 = 7;
/// The oldest minor version that is served (Linux 3.15): the first one with rename2 and always 80
/// bytes before the data of a write.
pub const OLDEST_MINOR: u32 = 23;
/// The newest minor version whose requests are known.
pub const NEWEST_MINOR: u32 = 45;

/// Bytes of `fuse_in_header`.
pub const IN_HEAD: usize = 40;
/// Bytes of `fuse_out_header`.
pub const OUT_HEAD: usize = 16;
/// Bytes in front of the data of a WRITE: its head and `fuse_write_in`.
pub const WRITE_HEAD: usize = 80;
/// `fuse_entry_out`.
pub const ENTRY: usize = 128;
/// `fuse_dirent` without its name.
pub const DIRENT: usize = 24;

/// Set in the number of a request that the kernel sends again ([`NOTIFY_RESEND`]).
pub const UNIQUE_RESEND: u64 = 1 << 63;

/// Operation codes of requests (`enum fuse_opcode`).
pub mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
    pub const COPY_FILE_RANGE_64: u32 = 53;
}

/// Flags of INIT (`flags` below bit 32, `flags2` above).
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const POSIX_LOCKS: u64 = 1 << 1;
    pub const ATOMIC_O_TRUNC: u64 = 1 << 3;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const DONT_MASK: u64 = 1 << 6;
    pub const FLOCK_LOCKS: u64 = 1 << 10;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const ABORT_ERROR: u64 = 1 << 21;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const HANDLE_KILLPRIV_V2: u64 = 1 << 28;
    pub const SETXATTR_EXT: u64 = 1 << 29;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// Flags in the answer to OPEN.
pub mod fopen {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Bits of `fuse_setattr_in.valid`.
pub mod fattr {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    pub const ATIME: u32 = 1 << 4;
    pub const MTIME: u32 = 1 << 5;
    pub const FH: u32 = 1 << 6;
    pub const ATIME_NOW: u32 = 1 << 7;
    pub const MTIME_NOW: u32 = 1 << 8;
}

/// `fuse_read_in.read_flags`: the read is a read(2), not a fill of the page cache.
pub const READ_LOCKOWNER: u32 = 1 << 1;
/// `fuse_write_in.write_flags`: pages of a mapping are written back, on behalf of no particular
/// program.
pub const WRITE_CACHE: u32 = 1 << 0;
/// `fuse_write_in.write_flags`: the write is a write(2) past the page cache.
pub const WRITE_LOCKOWNER: u32 = 1 << 1;
/// `fuse_write_in.write_flags`: the write clears set-id bits.
pub const WRITE_KILL_SUIDGID: u32 = 1 << 2;

/// `fuse_lk_in.lk_flags`: the lock is an flock(2).
pub const LK_FLOCK: u32 = 1 << 0;

/// Notifications from the daemon to the kernel (`enum fuse_notify_code`).
pub const NOTIFY_INVAL_INODE: i32 = 2;
pub const NOTIFY_INVAL_ENTRY: i32 = 3;
pub const NOTIFY_RESEND: i32 = 7;
pub const NOTIFY_INC_EPOCH: i32 = 8;
/// The minor version that introduced [`NOTIFY_INC_EPOCH`] (Linux 6.16).
pub const EPOCH_MINOR: u32 = 44;

/// Turns an open `/dev/fuse` into another descriptor of the same mount: `_IOR(229, 0, u32)`.
pub const IOC_CLONE: libc::Ioctl = 0x8004_e500u32 as libc::Ioctl;

/// Rounds up to the 8 bytes that directory entries are aligned to.
pub fn aligned(n: usize) -> usize {
    n.next_multiple_of(8)
}
