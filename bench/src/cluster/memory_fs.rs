//! The FUSE memory limit: one big file, answered from memory through the same transport settings as
//! the mount. The throughput measured here is what `/dev/fuse` allows on this machine; rows are
//! divided by it.

use std::{
    ffi::OsStr,
    io,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, KernelConfig,
    LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use strake_fuse::{MAX_REQUEST, MountConfig, MountedSession, OPEN_FLAGS, can_mount, negotiate};
use strake_proto::{Error, Result};

/// Name of the only file.
pub const MEMORY_FILE: &str = "data";
const FILE_INO: u64 = 2;
const FOREVER: Duration = Duration::from_secs(3600);

/// Keeps the memory mount; dropping it unmounts.
pub struct MemoryLimit {
    session: MountedSession,
}

/// Mounts a file system whose only file, [`MEMORY_FILE`], has `size` bytes: byte `i` is `i * 31 mod
/// 251` within each MiB. Writes are accepted and discarded. `cfg` gives mountpoint and threads; its
/// timeouts are not used.
pub fn mount_memory_limit(cfg: &MountConfig, size: u64) -> Result<MemoryLimit> {
    can_mount(&cfg.mountpoint)?;
    let cfg = MountConfig { fsname: "strake-memory".into(), ..cfg.clone() };
    Ok(MemoryLimit { session: MountedSession::start(MemoryFs::new(size), &cfg)? })
}

impl MemoryLimit {
    /// Unmounts. Returns the mount with the error when it is in use.
    pub async fn unmount(self) -> Result<(), (Error, MemoryLimit)> {
        match self.session.unmount() {
            Ok(()) => self.session.ended().await.map_err(|e| (e, self)),
            Err(e) => Err((e, self)),
        }
    }

    /// Returns when it is unmounted.
    pub async fn ended(&self) -> Result<()> {
        self.session.ended().await
    }
}

/// The byte at `offset` of the file, for checking.
pub fn memory_byte(offset: u64) -> u8 {
    ((offset % u64::from(MAX_REQUEST)) * 31 % 251) as u8
}

struct MemoryFs {
    size: u64,
    /// Two periods, so that every request is one slice.
    pattern: Vec<u8>,
}

impl MemoryFs {
    fn new(size: u64) -> MemoryFs {
        let pattern = (0..2 * u64::from(MAX_REQUEST)).map(memory_byte).collect();
        MemoryFs { size, pattern }
    }

    fn attr(&self, ino: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match ino.0 {
            1 => (FileType::Directory, 0o755, 4096),
            FILE_INO => (FileType::RegularFile, 0o666, self.size),
            _ => return None,
        };
        let t: SystemTime = UNIX_EPOCH;
        Some(FileAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: t,
            mtime: t,
            ctime: t,
            crtime: t,
            kind,
            perm,
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: MAX_REQUEST,
            flags: 0,
        })
    }

    fn reply_attr(&self, ino: INodeNo, reply: ReplyAttr) {
        match self.attr(ino) {
            Some(a) => reply.attr(&FOREVER, &a),
            None => reply.error(Errno::ENOENT),
        }
    }
}

impl Filesystem for MemoryFs {
    fn init(&mut self, _: &Request, kernel: &mut KernelConfig) -> io::Result<()> {
        negotiate(kernel);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.attr(INodeNo(FILE_INO)) {
            Some(a) if parent == INodeNo::ROOT && name == MEMORY_FILE => {
                reply.entry(&FOREVER, &a, Generation(0))
            }
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.reply_attr(ino, reply);
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.reply_attr(ino, reply);
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), OPEN_FLAGS);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let len = u64::from(size.min(MAX_REQUEST)).min(self.size.saturating_sub(offset)) as usize;
        let start = (offset % u64::from(MAX_REQUEST)) as usize;
        reply.data(&self.pattern[start..start + len]);
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.written(data.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        if offset == 0 {
            let _ = reply.add(INodeNo(FILE_INO), 1, FileType::RegularFile, MEMORY_FILE);
        }
        reply.ok();
    }

    fn getxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, reply: ReplyXattr) {
        reply.error(Errno::ENOSYS);
    }
}

#[cfg(test)]
#[path = "memory_fs_tests.rs"]
mod tests;
