//! The kernel's requests in plain types. Pure: bytes in, a [`Request`] out.
//!
//! The content of a request is trusted, its form is not. A request that is too short, or has a name
//! without its terminating NUL, is an error, never a panic: one bad request must not take the mount
//! down.

use strake_fabric::Buf;

use super::abi::{self, op};
use crate::vfs::{Lock, LockKind, LockType};

/// A request. `body` is owned, so that a request can be its own task.
#[derive(Debug)]
pub struct Request {
    pub head: Head,
    pub body: Body,
}

/// `fuse_in_header`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Length of the whole request.
    pub len: u32,
    pub opcode: u32,
    /// The request's number; its reply carries it.
    pub unique: u64,
    /// The inode it is about.
    pub node: u64,
    pub uid: u32,
    pub gid: u32,
    /// The calling thread; 0: it is not in this process-id namespace.
    pub pid: u32,
}

/// SETATTR, with the fields that are valid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    pub valid: u32,
    pub handle: u64,
    pub size: u64,
    pub atime: (i64, u32),
    pub mtime: (i64, u32),
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// INIT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Init {
    pub major: u32,
    pub minor: u32,
    pub max_readahead: u32,
    pub flags: u64,
}

/// COPY_FILE_RANGE; the source is the request's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    pub from: u64,
    pub from_offset: u64,
    pub to_node: u64,
    pub to: u64,
    pub to_offset: u64,
    pub len: u64,
    /// Whether the answer may have more than 32 bits (COPY_FILE_RANGE_64).
    pub wide: bool,
}

/// The operation. Names are without their NUL.
#[derive(Debug)]
pub enum Body {
    Init(Init),
    Lookup {
        name: Vec<u8>,
    },
    /// FORGET and BATCH_FORGET: never answered. Inodes that the kernel has dropped, and the number
    /// of replies that brought each.
    Forget(Vec<(u64, u64)>),
    Getattr,
    Statx,
    Setattr(SetAttr),
    Readlink,
    Symlink {
        name: Vec<u8>,
        target: Vec<u8>,
    },
    Mknod {
        name: Vec<u8>,
        mode: u32,
        rdev: u32,
        umask: u32,
    },
    Mkdir {
        name: Vec<u8>,
        mode: u32,
        umask: u32,
    },
    Unlink {
        name: Vec<u8>,
    },
    Rmdir {
        name: Vec<u8>,
    },
    Rename {
        name: Vec<u8>,
        to: u64,
        to_name: Vec<u8>,
        flags: u32,
    },
    /// Gives the inode `ino` a name in the request's node.
    Link {
        ino: u64,
        name: Vec<u8>,
    },
    Open {
        flags: u32,
    },
    Create {
        name: Vec<u8>,
        flags: u32,
        mode: u32,
        umask: u32,
    },
    Tmpfile {
        flags: u32,
        mode: u32,
        umask: u32,
    },
    Read {
        handle: u64,
        offset: u64,
        size: u32,
        /// The kernel keeps the bytes, for memory mappings.
        page_in: bool,
    },
    Write {
        handle: u64,
        offset: u64,
        flags: u32,
        from_mapping: bool,
        /// Whether the kernel wrote the bytes to its page cache first, and keeps those pages locked
        /// until the write is answered. Kernels before 6.6 do, with files that a daemon of an older
        /// version opened.
        through_pages: bool,
        /// Whether the write clears set-id bits.
        strips: bool,
        data: Buf,
    },
    /// This owner of POSIX locks closes a descriptor.
    Flush {
        handle: u64,
        owner: u64,
    },
    Release {
        handle: u64,
    },
    Fsync {
        handle: u64,
    },
    Statfs,
    Syncfs,
    Getxattr {
        name: Vec<u8>,
        size: u32,
    },
    Setxattr {
        name: Vec<u8>,
        value: Vec<u8>,
        flags: u32,
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: Vec<u8>,
    },
    Opendir,
    Readdir {
        handle: u64,
        offset: u64,
        size: u32,
        plus: bool,
    },
    Releasedir {
        handle: u64,
    },
    Fsyncdir,
    Access {
        mask: u32,
    },
    /// The request of this number must end early.
    Interrupt {
        unique: u64,
    },
    /// Asks for a lock that conflicts with this one.
    Getlk {
        handle: u64,
        lock: Lock,
    },
    Setlk {
        handle: u64,
        lock: Lock,
        wait: bool,
    },
    Destroy,
    Ioctl {
        handle: u64,
        command: u32,
        /// Most bytes of the answer.
        room: u32,
    },
    Fallocate {
        handle: u64,
        offset: u64,
        len: u64,
        mode: u32,
    },
    /// SEEK_DATA or SEEK_HOLE; the kernel handles the other ones.
    Lseek {
        handle: u64,
        offset: u64,
        whence: u32,
    },
    CopyRange(CopyRange),
    /// An unknown operation.
    Other,
}

impl Body {
    /// Whether it changes nothing. Such a request is simply done again when it comes again, so it
    /// need not be recorded that it was begun.
    pub fn only_asks(&self) -> bool {
        use Body::*;
        matches!(
            self,
            Lookup { .. }
                | Getattr
                | Statx
                | Readlink
                | Read { .. }
                | Statfs
                | Getxattr { .. }
                | Listxattr { .. }
                | Opendir
                | Readdir { .. }
                | Releasedir { .. }
                | Fsyncdir
                | Access { .. }
                | Getlk { .. }
                | Ioctl { .. }
                | Lseek { .. }
        )
    }
}

/// A request that cannot be parsed. Its head may still be good enough to refuse it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// The result of parsing a request.
pub type Parsed = Result<Body, Malformed>;

/// Reads fields in sequence.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (field, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed("too short"))?;
        self.0 = rest;
        Ok(*field)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_ne_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_ne_bytes(self.take()?))
    }

    fn skip(&mut self, n: usize) -> Result<(), Malformed> {
        self.0 = self.0.get(n..).ok_or(Malformed("too short"))?;
        Ok(())
    }

    /// A name up to its NUL.
    fn name(&mut self) -> Result<Vec<u8>, Malformed> {
        let end = self
            .0
            .iter()
            .position(|b| *b == 0)
            .ok_or(Malformed("a name without its terminating zero"))?;
        let name = self.0[..end].to_vec();
        self.0 = &self.0[end + 1..];
        Ok(name)
    }
}

impl Head {
    /// The first [`abi::IN_HEAD`] bytes of a request.
    pub fn read(bytes: &[u8]) -> Result<Head, Malformed> {
        let mut f = Fields(bytes);
        let (len, opcode, unique, node) = (f.u32()?, f.u32()?, f.u64()?, f.u64()?);
        let (uid, gid, pid) = (f.u32()?, f.u32()?, f.u32()?);
        f.skip(4)?;
        Ok(Head { len, opcode, unique, node, uid, gid, pid })
    }
}

/// `fuse_batch_forget_in` and what follows.
fn forgotten(f: &mut Fields<'_>) -> Result<Vec<(u64, u64)>, Malformed> {
    let count = f.u32()?;
    f.skip(4)?;
    // Reads as many as are there: the count is not trusted.
    (0..count).map(|_| Ok((f.u64()?, f.u64()?))).collect()
}

/// Parses the arguments of every request but WRITE, for which see [`write`]: its data is already in
/// a buffer of the caller.
pub fn read(head: Head, args: &[u8], setxattr_ext: bool) -> Result<Body, Malformed> {
    let f = &mut Fields(args);
    Ok(match head.opcode {
        op::INIT => Body::Init(init(f)?),
        op::LOOKUP => Body::Lookup { name: f.name()? },
        op::FORGET => Body::Forget(vec![(head.node, f.u64()?)]),
        op::BATCH_FORGET => Body::Forget(forgotten(f)?),
        op::GETATTR => Body::Getattr,
        op::STATX => Body::Statx,
        op::SETATTR => Body::Setattr(setattr(f)?),
        op::READLINK => Body::Readlink,
        op::STATFS => Body::Statfs,
        op::SYNCFS => Body::Syncfs,
        op::DESTROY => Body::Destroy,
        op::SYMLINK
        | op::MKNOD
        | op::MKDIR
        | op::UNLINK
        | op::RMDIR
        | op::RENAME
        | op::RENAME2
        | op::LINK => naming(head.opcode, f)?,
        op::OPEN | op::CREATE | op::TMPFILE | op::OPENDIR => opening(head.opcode, f)?,
        op::READ
        | op::FLUSH
        | op::RELEASE
        | op::FSYNC
        | op::READDIR
        | op::READDIRPLUS
        | op::RELEASEDIR
        | op::FALLOCATE
        | op::LSEEK => of_handle(head.opcode, f)?,
        op::GETLK | op::SETLK | op::SETLKW => locking(head.opcode, f)?,
        op::FSYNCDIR => Body::Fsyncdir,
        op::GETXATTR | op::SETXATTR | op::LISTXATTR | op::REMOVEXATTR => {
            xattr(head.opcode, f, setxattr_ext)?
        }
        op::ACCESS => Body::Access { mask: f.u32()? },
        op::INTERRUPT => Body::Interrupt { unique: f.u64()? },
        op::IOCTL => {
            let handle = f.u64()?;
            f.skip(4)?;
            let command = f.u32()?;
            f.skip(12)?;
            Body::Ioctl { handle, command, room: f.u32()? }
        }
        op::COPY_FILE_RANGE | op::COPY_FILE_RANGE_64 => {
            let (from, from_offset, to_node, to, to_offset, len) =
                (f.u64()?, f.u64()?, f.u64()?, f.u64()?, f.u64()?, f.u64()?);
            let wide = head.opcode == op::COPY_FILE_RANGE_64;
            Body::CopyRange(CopyRange { from, from_offset, to_node, to, to_offset, len, wide })
        }
        _ => Body::Other,
    })
}

/// `fuse_write_in` and the data that followed it.
pub fn write(args: &[u8], data: Buf) -> Result<Body, Malformed> {
    let f = &mut Fields(args);
    let (handle, offset, size, write_flags) = (f.u64()?, f.u64()?, f.u32()?, f.u32()?);
    f.skip(8)?;
    let flags = f.u32()?;
    if size as usize != data.len() {
        return Err(Malformed("a write whose size differs from its data"));
    }
    let has = |flag| write_flags & flag != 0;
    let from_mapping = has(abi::WRITE_CACHE);
    let through_pages = !from_mapping && !has(abi::WRITE_LOCKOWNER);
    let strips = has(abi::WRITE_KILL_SUIDGID);
    Ok(Body::Write { handle, offset, flags, from_mapping, through_pages, strips, data })
}

fn init(f: &mut Fields) -> Result<Init, Malformed> {
    let (major, minor) = (f.u32()?, f.u32()?);
    let (max_readahead, low) = (f.u32()?, f.u32()?);
    let mut flags = u64::from(low);
    if flags & abi::init::INIT_EXT != 0 {
        flags |= u64::from(f.u32()?) << 32;
    }
    Ok(Init { major, minor, max_readahead, flags })
}

fn setattr(f: &mut Fields) -> Result<SetAttr, Malformed> {
    let valid = f.u32()?;
    f.skip(4)?;
    let (handle, size) = (f.u64()?, f.u64()?);
    f.skip(8)?;
    let (atime, mtime) = (f.u64()? as i64, f.u64()? as i64);
    f.skip(8)?;
    let (atime_ns, mtime_ns) = (f.u32()?, f.u32()?);
    f.skip(4)?;
    let mode = f.u32()?;
    f.skip(4)?;
    let (uid, gid) = (f.u32()?, f.u32()?);
    Ok(SetAttr {
        valid,
        handle,
        size,
        atime: (atime, atime_ns),
        mtime: (mtime, mtime_ns),
        mode,
        uid,
        gid,
    })
}

fn naming(opcode: u32, f: &mut Fields) -> Result<Body, Malformed> {
    Ok(match opcode {
        op::SYMLINK => Body::Symlink { name: f.name()?, target: f.name()? },
        op::MKNOD => {
            let (mode, rdev, umask) = (f.u32()?, f.u32()?, f.u32()?);
            f.skip(4)?;
            Body::Mknod { name: f.name()?, mode, rdev, umask }
        }
        op::MKDIR => {
            let (mode, umask) = (f.u32()?, f.u32()?);
            Body::Mkdir { name: f.name()?, mode, umask }
        }
        op::UNLINK => Body::Unlink { name: f.name()? },
        op::RMDIR => Body::Rmdir { name: f.name()? },
        op::LINK => {
            let ino = f.u64()?;
            Body::Link { ino, name: f.name()? }
        }
        _ => {
            let to = f.u64()?;
            let mut flags = 0;
            if opcode == op::RENAME2 {
                flags = f.u32()?;
                f.skip(4)?;
            }
            Body::Rename { name: f.name()?, to, to_name: f.name()?, flags }
        }
    })
}

fn opening(opcode: u32, f: &mut Fields) -> Result<Body, Malformed> {
    let flags = f.u32()?;
    Ok(match opcode {
        op::OPEN => Body::Open { flags },
        op::OPENDIR => Body::Opendir,
        _ => {
            let (mode, umask) = (f.u32()?, f.u32()?);
            f.skip(4)?;
            if opcode == op::TMPFILE {
                // The name that follows is a placeholder.
                return Ok(Body::Tmpfile { flags, mode, umask });
            }
            Body::Create { name: f.name()?, flags, mode, umask }
        }
    })
}

fn of_handle(opcode: u32, f: &mut Fields) -> Result<Body, Malformed> {
    let handle = f.u64()?;
    Ok(match opcode {
        op::READ => {
            let (offset, size) = (f.u64()?, f.u32()?);
            Body::Read { handle, offset, size, page_in: f.u32()? & abi::READ_LOCKOWNER == 0 }
        }
        op::READDIR | op::READDIRPLUS => Body::Readdir {
            handle,
            offset: f.u64()?,
            size: f.u32()?,
            plus: opcode == op::READDIRPLUS,
        },
        op::FLUSH => {
            f.skip(8)?;
            Body::Flush { handle, owner: f.u64()? }
        }
        op::RELEASE => Body::Release { handle },
        op::RELEASEDIR => Body::Releasedir { handle },
        op::FSYNC => Body::Fsync { handle },
        op::LSEEK => Body::Lseek { handle, offset: f.u64()?, whence: f.u32()? },
        _ => Body::Fallocate { handle, offset: f.u64()?, len: f.u64()?, mode: f.u32()? },
    })
}

fn locking(opcode: u32, f: &mut Fields) -> Result<Body, Malformed> {
    let (handle, owner, start, end) = (f.u64()?, f.u64()?, f.u64()?, f.u64()?);
    let mode = match f.u32()? as i32 {
        libc::F_RDLCK => LockType::LockRead,
        libc::F_WRLCK => LockType::LockWrite,
        libc::F_UNLCK => LockType::LockUnlock,
        _ => return Err(Malformed("a lock of no known type")),
    };
    let (pid, flags) = (f.u32()?, f.u32()?);
    let kind = if flags & abi::LK_FLOCK != 0 { LockKind::LockFlock } else { LockKind::LockPosix };
    let lock = Lock { kind, owner, mode, start, end, pid };
    Ok(match opcode {
        op::GETLK => Body::Getlk { handle, lock },
        _ => Body::Setlk { handle, lock, wait: opcode == op::SETLKW },
    })
}

fn xattr(opcode: u32, f: &mut Fields, ext: bool) -> Result<Body, Malformed> {
    Ok(match opcode {
        op::REMOVEXATTR => Body::Removexattr { name: f.name()? },
        op::LISTXATTR => Body::Listxattr { size: f.u32()? },
        op::GETXATTR => {
            let size = f.u32()?;
            f.skip(4)?;
            Body::Getxattr { name: f.name()?, size }
        }
        _ => {
            let (size, flags) = (f.u32()?, f.u32()?);
            if ext {
                f.skip(8)?;
            }
            let name = f.name()?;
            let value =
                f.0.get(..size as usize)
                    .ok_or(Malformed("a value shorter than its size"))?
                    .to_vec();
            Body::Setxattr { name, value, flags }
        }
    })
}

#[cfg(test)]
mod tests {
    use strake_fabric::Pool;

    use super::*;

    fn head(opcode: u32) -> Head {
        Head { len: 0, opcode, unique: 1, node: 1, uid: 0, gid: 0, pid: 0 }
    }

    #[test]
    fn what_changes_something_is_not_taken_for_a_question() {
        let name = || b"n".to_vec();
        let handle = 1;
        let changes = [
            Body::Setattr(SetAttr::default()),
            Body::Mkdir { name: name(), mode: 0, umask: 0 },
            Body::Unlink { name: name() },
            Body::Rename { name: name(), to: 1, to_name: name(), flags: 0 },
            Body::Link { ino: 2, name: name() },
            // Opens and closes are recorded at the metadata server.
            Body::Open { flags: 0 },
            Body::Create { name: name(), flags: 0, mode: 0, umask: 0 },
            Body::Release { handle },
            // These send written bytes and sizes to the servers.
            Body::Flush { handle, owner: 0 },
            Body::Fsync { handle },
            Body::Syncfs,
            Body::Fallocate { handle, offset: 0, len: 1, mode: 0 },
            Body::Removexattr { name: name() },
        ];
        for body in changes {
            assert!(!body.only_asks(), "{body:?}");
        }
        assert!(
            Body::Getattr.only_asks()
                && Body::Read { handle, offset: 0, size: 1, page_in: false }.only_asks()
        );
    }

    #[test]
    fn a_head_field_by_field() {
        let mut bytes = Vec::new();
        for n in [90u32, 16] {
            bytes.extend_from_slice(&n.to_ne_bytes());
        }
        for n in [7u64, 8] {
            bytes.extend_from_slice(&n.to_ne_bytes());
        }
        for n in [9u32, 10, 11, 0] {
            bytes.extend_from_slice(&n.to_ne_bytes());
        }
        let want = Head { len: 90, opcode: 16, unique: 7, node: 8, uid: 9, gid: 10, pid: 11 };
        assert_eq!(Head::read(&bytes), Ok(want));
        assert!(Head::read(&bytes[..39]).is_err());
    }

    #[test]
    fn forgotten_inodes_are_as_many_as_there_are() {
        let words = |words: &[u64]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
        let batch = |args: &[u64]| read(head(op::BATCH_FORGET), &words(args), false);
        assert!(
            matches!(batch(&[2, 5, 1, 6, 3]), Ok(Body::Forget(all)) if all == [(5, 1), (6, 3)])
        );
        assert!(matches!(batch(&[0]), Ok(Body::Forget(all)) if all.is_empty()));
        assert!(batch(&[2, 5, 1]).is_err() && batch(&[u32::MAX.into(), 5, 1]).is_err());
        assert!(
            matches!(read(head(op::FORGET), &words(&[4]), false), Ok(Body::Forget(all)) if all == [(1, 4)])
        );
    }

    /// Every request that is truncated at any point is an error or another request, never a panic;
    /// none may be read as complete.
    #[test]
    fn short_requests_are_refused() {
        for opcode in 1..64 {
            let args = [0; 200];
            for len in 0..args.len() {
                let _ = read(head(opcode), &args[..len], len % 2 == 0);
            }
        }
        for opcode in [
            op::SETATTR,
            op::MKNOD,
            op::RENAME2,
            op::READ,
            op::SETXATTR,
            op::CREATE,
            op::COPY_FILE_RANGE,
        ] {
            assert!(read(head(opcode), &[0; 7], true).is_err(), "opcode {opcode}");
        }
    }

    #[test]
    fn names_end_with_a_nul() {
        let two = b"old\0new\0";
        assert!(matches!(read(head(op::SYMLINK), two, false), Ok(Body::Symlink { name, target })
            if name == b"old" && target == b"new"));
        assert!(read(head(op::SYMLINK), &two[..7], false).is_err());
        assert!(read(head(op::LOOKUP), b"endless", false).is_err());
    }

    #[test]
    fn locks_field_by_field() {
        let mut args = Vec::new();
        for n in [5u64, 6, 7, i64::MAX as u64] {
            args.extend_from_slice(&n.to_ne_bytes());
        }
        for n in [libc::F_WRLCK as u32, 8, abi::LK_FLOCK, 0] {
            args.extend_from_slice(&n.to_ne_bytes());
        }
        let want = Lock {
            kind: LockKind::LockFlock,
            owner: 6,
            mode: LockType::LockWrite,
            start: 7,
            end: i64::MAX as u64,
            pid: 8,
        };
        for (opcode, waits) in [(op::SETLK, false), (op::SETLKW, true)] {
            assert!(
                matches!(read(head(opcode), &args, false), Ok(Body::Setlk { handle: 5, lock, wait })
                if lock == want && wait == waits)
            );
        }
        args[40] = 0;
        assert!(matches!(read(head(op::GETLK), &args, false), Ok(Body::Getlk { handle: 5, lock })
            if lock.kind == LockKind::LockPosix));
        args[32] = 9;
        assert!(read(head(op::SETLK), &args, false).is_err(), "an unknown type");
        let flush: Vec<u8> = [5u64, 0, 9].iter().flat_map(|n| n.to_ne_bytes()).collect();
        assert!(matches!(
            read(head(op::FLUSH), &flush, false),
            Ok(Body::Flush { handle: 5, owner: 9 })
        ));
    }

    #[test]
    fn an_ioctl_field_by_field() {
        let mut args = 5u64.to_ne_bytes().to_vec();
        for n in [1u32, 2, 3, 4, 6, 7] {
            args.extend_from_slice(&n.to_ne_bytes());
        }
        let of = |args: &[u8]| read(head(op::IOCTL), args, false);
        assert!(matches!(of(&args), Ok(Body::Ioctl { handle: 5, command: 2, room: 7 })));
        assert!(of(&args[..31]).is_err());
    }

    #[test]
    fn a_read_on_behalf_of_nobody_is_a_page_in() {
        let args = |flags: u32| {
            let numbers = [5u64, 8192].map(u64::to_ne_bytes).concat();
            [numbers, [4096, flags].map(u32::to_ne_bytes).concat(), vec![0; 16]].concat()
        };
        for (flags, want) in [(0, true), (abi::READ_LOCKOWNER, false), (1, true)] {
            assert!(matches!(read(head(op::READ), &args(flags), false),
                Ok(Body::Read { handle: 5, offset: 8192, size: 4096, page_in }) if page_in == want));
        }
    }

    #[test]
    fn a_value_is_as_long_as_it_says() {
        let mut args = 3u32.to_ne_bytes().to_vec();
        args.extend_from_slice(&[0; 4]);
        args.extend_from_slice(b"user.a\0abcdef");
        assert!(
            matches!(read(head(op::SETXATTR), &args, false), Ok(Body::Setxattr { name, value, .. })
            if name == b"user.a" && value == b"abc")
        );
        args[0] = 7;
        assert!(read(head(op::SETXATTR), &args, false).is_err());
    }

    #[test]
    fn a_write_brings_as_much_as_it_says() {
        let data = || Pool::default().get_now(5).freeze();
        let mut args = vec![0; 40];
        args[16..20].copy_from_slice(&5u32.to_ne_bytes());
        assert!(
            matches!(write(&args, data()), Ok(Body::Write { data, from_mapping: false, strips: false, through_pages: true, .. })
            if data.len() == 5)
        );
        args[20] = 4;
        assert!(matches!(
            write(&args, data()),
            Ok(Body::Write { from_mapping: false, strips: true, .. })
        ));
        for (flags, mapped, through) in [(1, true, false), (2, false, false), (3, true, false)] {
            args[20] = flags;
            assert!(
                matches!(write(&args, data()), Ok(Body::Write { from_mapping, through_pages, .. })
                    if (from_mapping, through_pages) == (mapped, through)),
                "{flags}"
            );
        }
        args[16] = 6;
        assert!(write(&args, data()).is_err());
        assert!(write(&args[..39], data()).is_err());
    }
}
