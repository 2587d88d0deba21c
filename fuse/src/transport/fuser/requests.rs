//! `/dev/fuse` through the fuser crate: translates its calls into those of the [VFS
//! core](crate::vfs), and the answers back.
//!
//! fuser's threads parse requests, and answer reads of cached bytes. Every other request runs as a
//! task on the tokio runtime. When too many run, the threads stop reading requests from the kernel
//! until one ends.

use std::{
    ffi::OsStr,
    future::Future,
    io,
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType,
    Filesystem, FopenFlags, Generation, INodeNo, IoctlFlags, KernelConfig, LockOwner, OpenFlags,
    RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr,
    Request, TimeOrNow, WriteFlags,
};
use strake_fabric::{Buf, Pool};
use strake_proto::{Error, Result, pb};
use tokio::{runtime::Handle, sync::Semaphore};

use super::{
    session::{OPEN_FLAGS, negotiate},
    signals,
};
use crate::{
    config::MountConfig,
    vfs::{Caller, Change, Entry, Lock, LockKind, LockType, MAX_REQUEST, Place, Stat, Time, Vfs},
};

const GENERATION: Generation = Generation(0);

/// The requests of a mount.
pub(crate) struct Requests {
    shared: Arc<Shared>,
    runtime: Handle,
    room: Arc<Semaphore>,
}

/// State that the task of a request needs.
struct Shared {
    vfs: Arc<Vfs>,
    pool: Pool,
}

/// The kernel keeps no copies: fuser has no call that takes names back, and does not tell whether
/// an inode was known.
const NOT_KEPT: Duration = Duration::ZERO;

impl Requests {
    pub(crate) fn new(vfs: Arc<Vfs>, cfg: &MountConfig, runtime: Handle) -> Requests {
        let pool = vfs.pool().clone();
        Requests {
            shared: Arc::new(Shared { vfs, pool }),
            runtime,
            room: Arc::new(Semaphore::new(cfg.max_requests.max(1))),
        }
    }

    /// The lock of a request. `None` for a type that no kernel sends.
    fn lock(owner: LockOwner, start: u64, end: u64, typ: i32, pid: u32) -> Option<Lock> {
        let mode = match typ {
            libc::F_RDLCK => LockType::LockRead,
            libc::F_WRLCK => LockType::LockWrite,
            libc::F_UNLCK => LockType::LockUnlock,
            _ => return None,
        };
        Some(Lock { kind: LockKind::LockPosix, owner: owner.0, mode, start, end, pid })
    }

    /// Runs a request as a task, and waits for a free place first. Dropping an unanswered reply
    /// answers EIO, so a request is answered whatever becomes of its task.
    fn run<F>(&self, work: impl FnOnce(Arc<Shared>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let permit = match self.room.clone().try_acquire_owned() {
            Ok(p) => p,
            Err(_) => match self.runtime.block_on(self.room.clone().acquire_owned()) {
                Ok(p) => p,
                Err(_) => return,
            },
        };
        let work = work(self.shared.clone());
        self.runtime.spawn(async move {
            work.await;
            drop(permit);
        });
    }
}

fn entry(result: Result<pb::Attr>, reply: ReplyEntry) {
    match result {
        Ok(a) => reply.entry(&NOT_KEPT, &file_attr(&a.into()), GENERATION),
        Err(e) => reply.error(errno(&e)),
    }
}

fn attr(result: Result<Stat>, reply: ReplyAttr) {
    match result {
        Ok(a) => reply.attr(&NOT_KEPT, &file_attr(&a)),
        Err(e) => reply.error(errno(&e)),
    }
}

fn empty(result: Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(errno(&e)),
    }
}

fn data(parts: Vec<Buf>, pool: &Pool, reply: ReplyData) {
    match gather(parts, pool) {
        Some(whole) => reply.data(&whole),
        None => reply.data(&[]),
    }
}

/// One buffer of all parts: the only part itself, or a copy.
fn gather(mut parts: Vec<Buf>, pool: &Pool) -> Option<Buf> {
    if parts.len() < 2 {
        return parts.pop();
    }
    let mut whole = pool.get_now(parts.iter().map(Buf::len).sum());
    let mut at = 0;
    for p in &parts {
        whole[at..at + p.len()].copy_from_slice(p);
        at += p.len();
    }
    Some(whole.freeze())
}

/// An xattr's value or its length, depending on `room`.
fn xattr(result: Result<impl AsRef<[u8]>>, room: u32, reply: ReplyXattr) {
    match result {
        Err(e) => reply.error(errno(&e)),
        Ok(v) if v.as_ref().len() > 64 << 10 => reply.error(Errno::E2BIG),
        Ok(v) if room == 0 => reply.size(v.as_ref().len() as u32),
        Ok(v) if v.as_ref().len() > room as usize => reply.error(Errno::ERANGE),
        Ok(v) => reply.data(v.as_ref()),
    }
}

fn errno(e: &Error) -> Errno {
    Errno::from_i32(crate::transport::errno(e))
}

fn caller(req: &Request) -> Caller<'static> {
    Caller { uid: req.uid(), gid: req.gid(), pid: req.pid(), operation: None }
}

fn name(n: &OsStr) -> Vec<u8> {
    n.as_bytes().to_vec()
}

fn file_type(mode: u32) -> FileType {
    match mode & libc::S_IFMT {
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFSOCK => FileType::Socket,
        libc::S_IFCHR => FileType::CharDevice,
        libc::S_IFBLK => FileType::BlockDevice,
        _ => FileType::RegularFile,
    }
}

fn system_time(ns: i64) -> SystemTime {
    let d = Duration::from_nanos(ns.unsigned_abs());
    if ns < 0 { UNIX_EPOCH - d } else { UNIX_EPOCH + d }
}

fn time(t: TimeOrNow) -> Time {
    let ns = |d: Duration| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX);
    match t {
        TimeOrNow::Now => Time::Now,
        TimeOrNow::SpecificTime(t) => Time::At(match t.duration_since(UNIX_EPOCH) {
            Ok(after) => ns(after),
            Err(before) => {
                // fuser subtracts the nanoseconds of a time before 1970 where it should add them:
                // correct that.
                let d = before.duration();
                let seconds = i64::try_from(d.as_secs()).unwrap_or(i64::MAX / 1_000_000_000);
                i64::from(d.subsec_nanos()) - seconds.saturating_mul(1_000_000_000)
            }
        }),
    }
}

fn file_attr(s: &Stat) -> FileAttr {
    let a = &s.attr;
    FileAttr {
        ino: INodeNo(a.ino),
        size: a.size,
        blocks: s.blocks(),
        atime: system_time(a.atime_ns),
        mtime: system_time(a.mtime_ns),
        ctime: system_time(a.ctime_ns),
        crtime: system_time(a.btime_ns),
        kind: file_type(a.mode),
        perm: (a.mode & 0o7777) as u16,
        nlink: a.nlink,
        uid: a.uid,
        gid: a.gid,
        rdev: a.rdev,
        blksize: if a.mode & libc::S_IFMT == libc::S_IFREG { MAX_REQUEST } else { 4096 },
        flags: 0,
    }
}

impl Filesystem for Requests {
    fn init(&mut self, _: &Request, kernel: &mut KernelConfig) -> io::Result<()> {
        negotiate(kernel);
        Ok(())
    }

    fn lookup(&self, req: &Request, parent: INodeNo, n: &OsStr, reply: ReplyEntry) {
        let (who, n) = (caller(req), name(n));
        self.run(async move |s| entry(s.vfs.names.lookup(who, parent.0, &n).await, reply));
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.run(async move |s| attr(s.vfs.names.getattr(ino.0).await, reply));
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        fh: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let who = caller(req);
        let (atime, mtime) = (atime.map(time), mtime.map(time));
        let change = Change { mode, uid, gid, size, atime, mtime, handle: fh.map(|h| h.0) };
        self.run(async move |s| {
            attr(s.vfs.names.setattr(who, ino.0, change).await.map(Stat::from), reply)
        });
    }

    fn readlink(&self, req: &Request, ino: INodeNo, reply: ReplyData) {
        let who = caller(req);
        self.run(async move |s| match s.vfs.names.readlink(who, ino.0).await {
            Ok(target) => reply.data(&target),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        n: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let (who, n) = (caller(req), name(n));
        self.run(async move |s| {
            entry(s.vfs.names.mknod(who, parent.0, &n, mode, umask, rdev).await, reply)
        });
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        n: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let (who, n) = (caller(req), name(n));
        self.run(async move |s| {
            entry(s.vfs.names.mkdir(who, parent.0, &n, mode, umask).await, reply)
        });
    }

    fn unlink(&self, req: &Request, parent: INodeNo, n: &OsStr, reply: ReplyEmpty) {
        let (who, n) = (caller(req), name(n));
        self.run(async move |s| empty(s.vfs.names.unlink(who, parent.0, &n).await, reply));
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, n: &OsStr, reply: ReplyEmpty) {
        let (who, n) = (caller(req), name(n));
        self.run(async move |s| empty(s.vfs.names.rmdir(who, parent.0, &n).await, reply));
    }

    fn symlink(&self, req: &Request, parent: INodeNo, n: &OsStr, target: &Path, reply: ReplyEntry) {
        let (who, n, target) = (caller(req), name(n), name(target.as_os_str()));
        self.run(async move |s| {
            entry(s.vfs.names.symlink(who, parent.0, &n, &target).await, reply)
        });
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        n: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (who, n, newname) = (caller(req), name(n), name(newname));
        self.run(async move |s| {
            empty(
                s.vfs
                    .names
                    .rename(who, (parent.0, &n), (newparent.0, &newname), flags.bits())
                    .await,
                reply,
            );
        });
    }

    fn link(
        &self,
        req: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let (who, newname) = (caller(req), name(newname));
        self.run(async move |s| {
            entry(s.vfs.names.link(who, ino.0, newparent.0, &newname).await, reply)
        });
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let who = caller(req);
        self.run(async move |s| match s.vfs.files.open(who, ino.0, flags.0).await {
            Ok(o) => reply.opened(FileHandle(o.handle), OPEN_FLAGS),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        n: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (who, n) = (caller(req), name(n));
        self.run(async move |s| {
            match s.vfs.files.create(who, parent.0, &n, mode, umask, flags).await {
                Ok((attr, o)) => {
                    reply.created(
                        &NOT_KEPT,
                        &file_attr(&attr.into()),
                        GENERATION,
                        FileHandle(o.handle),
                        OPEN_FLAGS,
                    );
                }
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // A sequential reader finds most bytes read ahead: an answer from this thread wakes no
        // other thread.
        let ready = {
            let _tasks_go_there = self.runtime.enter();
            self.shared.vfs.files.read_ready(fh.0, offset, size as usize)
        };
        if let Some(parts) = ready {
            return data(parts, &self.shared.pool, reply);
        }
        self.run(async move |s| match s.vfs.files.read(fh.0, offset, size as usize).await {
            Ok(parts) => data(parts, &s.pool, reply),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn write(
        &self,
        req: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // The only copy: fuser's buffer is reused for the next request and its data is not aligned.
        let mut buf = self.shared.pool.get_now(data.len());
        buf.copy_from_slice(data);
        let data = buf.freeze();
        // Pages of a mapping are written where they are mapped, whatever the handle's flags say.
        let from_mapping = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let append = flags.0 & libc::O_APPEND != 0;
        let place =
            if append { Place::End { at: offset, tid: req.pid() } } else { Place::At(offset) };
        let strips = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let who = caller(req);
        self.run(async move |s| {
            if strips && let Err(e) = s.vfs.files.strip(who, fh.0).await {
                return reply.error(errno(&e));
            }
            let len = data.len();
            let written = match from_mapping {
                true => s.vfs.files.write_mapped(who, fh.0, offset, data, None).await.map(|()| len),
                false => s.vfs.files.write(who, fh.0, place, data, ()).await,
            };
            match written {
                Ok(n) => reply.written(n as u32),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn flush(&self, _: &Request, _: INodeNo, fh: FileHandle, owner: LockOwner, reply: ReplyEmpty) {
        let locks = self.shared.vfs.files.note_flush(fh.0, owner.0);
        if locks.is_empty() && self.shared.vfs.files.flush_ready(fh.0) {
            return reply.ok();
        }
        self.run(async move |s| empty(s.vfs.files.finish_flush(fh.0, locks).await, reply));
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let closed = self.shared.vfs.files.note_release(fh.0);
        self.run(async move |s| {
            if let Some(closed) = closed {
                s.vfs.files.finish_release(closed).await;
            }
            reply.ok();
        });
    }

    fn fsync(&self, _: &Request, _: INodeNo, fh: FileHandle, _: bool, reply: ReplyEmpty) {
        self.run(async move |s| empty(s.vfs.files.fsync(fh.0).await, reply));
    }

    fn opendir(&self, req: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let who = caller(req);
        reply.opened(FileHandle(self.shared.vfs.dirs.opendir(who, ino.0)), FopenFlags::empty());
    }

    fn readdir(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        self.run(async move |s| {
            let take = |e: &Entry| {
                !reply.add(
                    INodeNo(e.ino),
                    e.offset,
                    file_type(e.kind << 12),
                    OsStr::from_bytes(&e.name),
                )
            };
            match s.vfs.dirs.readdir(fh.0, offset, false, take).await {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn readdirplus(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        self.run(async move |s| {
            let take = |e: &Entry| {
                // The kernel ignores the attributes of "." and "..".
                let bare = pb::Attr { ino: e.ino, mode: e.kind << 12, ..Default::default() };
                let attr = file_attr(&e.attr.unwrap_or(bare).into());
                !reply.add(
                    INodeNo(e.ino),
                    e.offset,
                    OsStr::from_bytes(&e.name),
                    &NOT_KEPT,
                    &attr,
                    GENERATION,
                )
            };
            match s.vfs.dirs.readdir(fh.0, offset, true, take).await {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn releasedir(&self, _: &Request, _: INodeNo, fh: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.shared.vfs.dirs.releasedir(fh.0);
        reply.ok();
    }

    /// Every change of a directory is in the Raft log before it is answered.
    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.run(async move |s| match s.vfs.statfs().await {
            Ok(f) => {
                let block = 4096;
                let (total, free) = (f.total_bytes / block, f.free_bytes / block);
                let files = f.inodes.saturating_add(f.free_inodes);
                reply.statfs(
                    total,
                    free,
                    free,
                    files,
                    f.free_inodes,
                    block as u32,
                    255,
                    block as u32,
                );
            }
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        n: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let (who, n, value) = (caller(req), name(n), value.to_vec());
        self.run(async move |s| {
            empty(s.vfs.xattrs.set(who, ino.0, &n, &value, flags as u32).await, reply)
        });
    }

    fn getxattr(&self, req: &Request, ino: INodeNo, n: &OsStr, size: u32, reply: ReplyXattr) {
        let (who, n) = (caller(req), name(n));
        self.run(async move |s| xattr(s.vfs.xattrs.get(who, ino.0, &n).await, size, reply));
    }

    fn listxattr(&self, req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let who = caller(req);
        self.run(async move |s| xattr(s.vfs.xattrs.list(who, ino.0).await, size, reply));
    }

    fn removexattr(&self, req: &Request, ino: INodeNo, n: &OsStr, reply: ReplyEmpty) {
        let (who, n) = (caller(req), name(n));
        self.run(async move |s| empty(s.vfs.xattrs.remove(who, ino.0, &n).await, reply));
    }

    fn access(&self, req: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        let who = caller(req);
        self.run(async move |s| {
            empty(s.vfs.names.access(who, ino.0, mask.bits() as u32).await, reply)
        });
    }

    fn fallocate(
        &self,
        req: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let who = caller(req);
        self.run(async move |s| {
            empty(s.vfs.files.fallocate(who, fh.0, (offset, len), mode, ()).await, reply)
        });
    }

    fn getlk(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        let Some(lock) = Self::lock(owner, start, end, typ, pid) else {
            return reply.error(Errno::EINVAL);
        };
        self.run(async move |s| match s.vfs.locks.getlk(fh.0, &lock).await {
            Ok(None) => reply.locked(start, end, libc::F_UNLCK, 0),
            Ok(Some(h)) => {
                let typ = if h.mode == LockType::LockWrite { libc::F_WRLCK } else { libc::F_RDLCK };
                reply.locked(h.start, h.end, typ, h.pid);
            }
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn setlk(
        &self,
        req: &Request,
        _: INodeNo,
        fh: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        let Some(lock) = Self::lock(owner, start, end, typ, pid) else {
            return reply.error(Errno::EINVAL);
        };
        if !sleep {
            return self
                .run(async move |s| empty(s.vfs.locks.setlk(fh.0, &lock, false).await, reply));
        }
        // This does not take one of the places that other requests share: hundreds of lock waiters
        // must not keep the holder from unlocking.
        let (vfs, thread) = (self.shared.vfs.clone(), req.pid());
        self.runtime.spawn(async move {
            tokio::select! {
                biased;
                r = vfs.locks.setlk(fh.0, &lock, true) => empty(r, reply),
                () = signals::sent_to(thread) => reply.error(Errno::EINTR),
            }
        });
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.run(async move |s| match s.vfs.files.seek(fh.0, offset as u64, whence).await {
            Ok(at) => reply.offset(at as i64),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        _: IoctlFlags,
        command: u32,
        _: &[u8],
        room: u32,
        reply: ReplyIoctl,
    ) {
        match self.shared.vfs.ioctl(fh.0, command, room as usize) {
            Some(answer) => reply.ioctl(0, &answer),
            None => reply.error(Errno::ENOTTY),
        }
    }

    /// ENOSYS makes the kernel copy by reading and writing.
    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::ENOSYS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_survive_fuser() {
        // fuser reads -1 s + 500 ms as 1.5 s before 1970.
        let wrong = UNIX_EPOCH - Duration::from_millis(1500);
        assert_eq!(time(TimeOrNow::SpecificTime(wrong)), Time::At(-500_000_000));
        assert_eq!(
            time(TimeOrNow::SpecificTime(UNIX_EPOCH + Duration::from_nanos(7))),
            Time::At(7)
        );
        assert_eq!(system_time(-1), UNIX_EPOCH - Duration::from_nanos(1));
    }
}
