//! The [`Tree`] as a FUSE file system. The kernel caches nothing, so that the disk sees every write
//! as it is made.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request,
    TimeOrNow, WriteFlags,
};
use parking_lot::Mutex;

use super::{
    content::Content,
    tree::{Dir, Ino, Inode, Node, ROOT, Result, Rule, Tree},
};

const NOT_KEPT: Duration = Duration::ZERO;
const GENERATION: Generation = Generation(0);
/// The size that statfs shows, in bytes.
const SIZE: u64 = 64 << 30;
/// After so many removed files, those that nothing refers to are dropped from memory.
const SWEEP: usize = 64;

pub struct Disk {
    pub tree: Tree,
    handles: HashMap<u64, Handle>,
    next: u64,
    removed: usize,
}

struct Handle {
    ino: Ino,
    /// For a directory: its entries at the time when reading it began.
    listing: Vec<(Vec<u8>, Ino)>,
}

impl Disk {
    pub fn new(rule: Rule) -> Disk {
        Disk { tree: Tree::new(rule), handles: HashMap::new(), next: 1, removed: 0 }
    }

    /// The directory or file at a path relative to the top.
    pub fn find(&self, path: &Path) -> crate::Result<Ino> {
        let step = |at, name: &OsStr| self.tree.lookup(at, name.as_bytes());
        path.iter().try_fold(ROOT, step).map_err(|e| {
            let e = io::Error::from_raw_os_error(e);
            format!("{} on the lossy disk: {e}", path.display()).into()
        })
    }

    /// Handles of files that lost their power become invalid. They are closed later, which is
    /// ignored.
    pub fn power_up(&mut self) {
        let tree = &self.tree;
        self.handles.retain(|_, h| !tree.is_dark(h.ino));
        self.tree.power_up();
        self.sweep();
    }

    fn sweep(&mut self) {
        let open: HashSet<Ino> = self.handles.values().map(|h| h.ino).collect();
        self.tree.sweep(&open);
        self.removed = 0;
    }

    fn removed(&mut self) {
        self.removed += 1;
        if self.removed == SWEEP {
            self.sweep();
        }
    }

    fn open(&mut self, ino: Ino) -> Result<FileHandle> {
        self.tree.inode(ino)?;
        let fh = self.next;
        self.next += 1;
        self.handles.insert(fh, Handle { ino, listing: vec![] });
        Ok(FileHandle(fh))
    }

    fn attr(&self, ino: Ino) -> Result<FileAttr> {
        let i = self.tree.inode(ino)?;
        let (kind, size, held, nlink) = match &i.node {
            Node::File(c) => (FileType::RegularFile, c.size(), c.allocated(), i.nlink),
            Node::Dir(_) => (FileType::Directory, 4096, 4096, 2),
            Node::Symlink(to) => (FileType::Symlink, to.len() as u64, 0, i.nlink),
        };
        Ok(FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: held / 512,
            atime: i.time,
            mtime: i.time,
            ctime: i.time,
            crtime: i.time,
            kind,
            perm: i.mode,
            nlink,
            uid: i.uid,
            gid: i.gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn make(
        &mut self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        node: Node,
        mode: u32,
    ) -> Result<FileAttr> {
        let inode = Inode::new(node, (mode & 0o7777) as u16, req.uid(), req.gid());
        let ino = self.tree.make(parent.0, name.as_bytes(), inode)?;
        self.attr(ino)
    }
}

pub struct Transport(pub Arc<Mutex<Disk>>, pub Arc<Latency>);

/// How long each read, write and fsync of a file takes; they run one at a time.
#[derive(Default)]
pub struct Latency(Mutex<Duration>);

impl Latency {
    pub fn set(&self, by: Duration) {
        *self.0.lock() = by;
    }

    fn pass(&self) {
        let by = self.0.lock();
        if !by.is_zero() {
            std::thread::sleep(*by);
        }
    }
}

fn error(e: i32) -> Errno {
    Errno::from_i32(e)
}

fn entry(result: Result<FileAttr>, reply: ReplyEntry) {
    match result {
        Ok(a) => reply.entry(&NOT_KEPT, &a, GENERATION),
        Err(e) => reply.error(error(e)),
    }
}

fn empty(result: Result<()>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(error(e)),
    }
}

fn opened(result: Result<FileHandle>, flags: FopenFlags, reply: ReplyOpen) {
    match result {
        Ok(fh) => reply.opened(fh, flags),
        Err(e) => reply.error(error(e)),
    }
}

const DIRECT: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

impl Filesystem for Transport {
    fn init(&mut self, _: &Request, kernel: &mut KernelConfig) -> io::Result<()> {
        // An error only means that this kernel does not have the feature.
        for flag in [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            InitFlags::FUSE_PARALLEL_DIROPS,
        ] {
            let _ = kernel.add_capabilities(flag);
        }
        let _ = kernel.set_max_write(1 << 20);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let d = self.0.lock();
        entry(d.tree.lookup(parent.0, name.as_bytes()).and_then(|ino| d.attr(ino)), reply);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.lock().attr(ino.0) {
            Ok(a) => reply.attr(&NOT_KEPT, &a),
            Err(e) => reply.error(error(e)),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut d = self.0.lock();
        let mut set = || {
            if let Some(size) = size {
                d.tree.content_mut(ino.0)?.set_size(size);
            }
            let i = d.tree.inode_mut(ino.0)?;
            i.mode = mode.map_or(i.mode, |m| (m & 0o7777) as u16);
            i.uid = uid.unwrap_or(i.uid);
            i.gid = gid.unwrap_or(i.gid);
            if let Some(TimeOrNow::SpecificTime(t)) = mtime {
                i.time = t;
            }
            d.attr(ino.0)
        };
        match set() {
            Ok(a) => reply.attr(&NOT_KEPT, &a),
            Err(e) => reply.error(error(e)),
        }
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self.0.lock().tree.inode(ino.0).map(|i| &i.node) {
            Ok(Node::Symlink(to)) => reply.data(to),
            Ok(_) => reply.error(Errno::EINVAL),
            Err(e) => reply.error(error(e)),
        }
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        if mode & libc::S_IFMT != libc::S_IFREG {
            return reply.error(Errno::EOPNOTSUPP);
        }
        entry(self.0.lock().make(req, parent, name, Node::File(Content::default()), mode), reply);
    }

    fn mkdir(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        reply: ReplyEntry,
    ) {
        entry(self.0.lock().make(req, parent, name, Node::Dir(Dir::default()), mode), reply);
    }

    fn symlink(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let to = Node::Symlink(target.as_os_str().as_bytes().to_vec());
        entry(self.0.lock().make(req, parent, name, to, 0o777), reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut d = self.0.lock();
        let r = d.tree.remove(parent.0, name.as_bytes(), false);
        d.removed();
        empty(r, reply);
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(self.0.lock().tree.remove(parent.0, name.as_bytes(), true), reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((parent.0, name.as_bytes()), (newparent.0, newname.as_bytes()));
        let mut d = self.0.lock();
        let r = d.tree.rename(from, to, flags.bits());
        d.removed();
        empty(r, reply);
    }

    fn link(
        &self,
        _: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let mut d = self.0.lock();
        let r = d.tree.link(ino.0, newparent.0, newname.as_bytes());
        entry(r.and_then(|()| d.attr(ino.0)), reply);
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        opened(self.0.lock().open(ino.0), DIRECT, reply);
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let mut d = self.0.lock();
        let found = d.make(req, parent, name, Node::File(Content::default()), mode).or_else(|e| {
            // Another process made it between the kernel's lookup and this call.
            if e != libc::EEXIST || flags & libc::O_EXCL != 0 {
                return Err(e);
            }
            let ino = d.tree.lookup(parent.0, name.as_bytes())?;
            d.attr(ino)
        });
        match found.and_then(|a| Ok((a, d.open(a.ino.0)?))) {
            Ok((a, fh)) => reply.created(&NOT_KEPT, &a, GENERATION, fh, DIRECT),
            Err(e) => reply.error(error(e)),
        }
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.1.pass();
        let read = self.0.lock().tree.content(ino.0).map(|c| c.read(offset, size as usize));
        match read {
            Ok(bytes) => reply.data(&bytes),
            Err(e) => reply.error(error(e)),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.1.pass();
        // Pages of a mapping are written at their own offset, even if the handle was opened with
        // `O_APPEND`.
        let append =
            flags.0 & libc::O_APPEND != 0 && !write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let written = self.0.lock().tree.content_mut(ino.0).map(|c| {
            let at = if append { c.size() } else { offset };
            c.write(at, data);
        });
        match written {
            Ok(()) => reply.written(data.len() as u32),
            Err(e) => reply.error(error(e)),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
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
        self.0.lock().handles.remove(&fh.0);
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.1.pass();
        empty(self.0.lock().tree.sync_file(ino.0), reply);
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        opened(self.0.lock().open(ino.0), FopenFlags::empty(), reply);
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let mut d = self.0.lock();
        let Disk { tree, handles, .. } = &mut *d;
        let Some(handle) = handles.get_mut(&fh.0) else { return reply.error(Errno::EIO) };
        if offset == 0 {
            match tree.list(ino.0) {
                Ok(l) => {
                    handle.listing =
                        [vec![(b".".to_vec(), ino.0), (b"..".to_vec(), ino.0)], l].concat()
                }
                Err(e) => return reply.error(error(e)),
            }
        }
        for (i, (name, ino)) in handle.listing.iter().enumerate().skip(offset as usize) {
            let kind = match tree.inode(*ino).map(|i| &i.node) {
                Ok(Node::File(_)) => FileType::RegularFile,
                Ok(Node::Symlink(_)) => FileType::Symlink,
                _ => FileType::Directory,
            };
            if reply.add(INodeNo(*ino), i as u64 + 1, kind, OsStr::from_bytes(name)) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, fh: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.0.lock().handles.remove(&fh.0);
        reply.ok();
    }

    fn fsyncdir(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        empty(self.0.lock().tree.sync_dir(ino.0), reply);
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let (all, free) = (SIZE / 4096, SIZE.saturating_sub(self.0.lock().tree.allocated()) / 4096);
        reply.statfs(all, free, free, 1 << 20, 1 << 19, 4096, 255, 4096);
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let mut d = self.0.lock();
        let done = d.tree.content_mut(ino.0).and_then(|c| {
            match mode {
                0 => c.set_size(c.size().max(offset + len)),
                libc::FALLOC_FL_KEEP_SIZE => (),
                PUNCH => c.zero(offset, len),
                _ => return Err(libc::EOPNOTSUPP),
            }
            Ok(())
        });
        empty(done, reply);
    }
}
