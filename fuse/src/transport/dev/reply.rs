//! Replies in the kernel's form. Pure: plain types in, bytes out.

use std::time::Duration;

use strake_fabric::Buf;
use strake_proto::pb;

use super::abi;
use crate::vfs::{Entry, Holder, Lock, LockType, Stat};

/// What a request is answered with.
#[derive(Debug)]
pub enum Reply {
    /// An errno.
    Error(i32),
    /// Results, or nothing but success.
    Bytes(Vec<u8>),
    /// File data, as it lies in memory.
    Data(Vec<Buf>),
}

impl Reply {
    /// Success without results.
    pub fn ok() -> Reply {
        Reply::Bytes(Vec::new())
    }
}

/// How long the kernel may use what it is told.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    pub attr: Duration,
    pub entry: Duration,
}

impl Timeouts {
    fn of(self, a: &Stat) -> Duration {
        a.timeout(self.attr)
    }
}

/// `fuse_lk_out`: a lock in the way, or that there is none.
pub fn lock(asked: &Lock, found: Option<Holder>) -> Reply {
    let mut f = Fields::default();
    match found {
        Some(h) => {
            let mode = if h.mode == LockType::LockWrite { libc::F_WRLCK } else { libc::F_RDLCK };
            f.u64(h.start).u64(h.end).u32(mode as u32).u32(h.pid)
        }
        None => f.u64(asked.start).u64(asked.end).u32(libc::F_UNLCK as u32).u32(0),
    };
    Reply::Bytes(f.0)
}

/// Writes fields one after the other.
struct Fields(Vec<u8>);

impl Default for Fields {
    /// With room for the largest of the frequent replies, [`created`].
    fn default() -> Fields {
        Fields(Vec::with_capacity(abi::ENTRY + 16))
    }
}

impl Fields {
    fn u16(&mut self, n: u16) -> &mut Fields {
        self.0.extend_from_slice(&n.to_ne_bytes());
        self
    }

    fn u32(&mut self, n: u32) -> &mut Fields {
        self.0.extend_from_slice(&n.to_ne_bytes());
        self
    }

    fn u64(&mut self, n: u64) -> &mut Fields {
        self.0.extend_from_slice(&n.to_ne_bytes());
        self
    }

    fn zeros(&mut self, n: usize) -> &mut Fields {
        self.0.resize(self.0.len() + n, 0);
        self
    }

    fn attr(&mut self, s: &Stat) -> &mut Fields {
        let a = &s.attr;
        let (at, mt, ct) = (Time::of(a.atime_ns), Time::of(a.mtime_ns), Time::of(a.ctime_ns));
        self.u64(a.ino).u64(a.size).u64(s.blocks()).u64(at.seconds as u64).u64(mt.seconds as u64);
        self.u64(ct.seconds as u64).u32(at.nanos).u32(mt.nanos).u32(ct.nanos);
        self.u32(a.mode).u32(a.nlink).u32(a.uid).u32(a.gid).u32(a.rdev).u32(block_size(a)).u32(0)
    }

    fn entry(&mut self, a: &pb::Attr, t: Timeouts) -> &mut Fields {
        // Inode ids are never reused, so every inode is of generation 0.
        let s = Stat::from(*a);
        let attr = t.of(&s);
        self.u64(a.ino).u64(0).u64(t.entry.as_secs()).u64(attr.as_secs());
        self.u32(t.entry.subsec_nanos()).u32(attr.subsec_nanos()).attr(&s)
    }
}

/// Seconds rounded down and the nanoseconds on top, as `struct timespec` has a time before 1970.
struct Time {
    seconds: i64,
    nanos: u32,
}

impl Time {
    const SECOND: i64 = 1_000_000_000;

    fn of(ns: i64) -> Time {
        Time { seconds: ns.div_euclid(Time::SECOND), nanos: ns.rem_euclid(Time::SECOND) as u32 }
    }
}

fn block_size(a: &pb::Attr) -> u32 {
    if a.mode & libc::S_IFMT == libc::S_IFREG { super::MAX_REQUEST } else { 4096 }
}

pub fn entry(a: &pb::Attr, t: Timeouts) -> Reply {
    let mut f = Fields::default();
    f.entry(a, t);
    Reply::Bytes(f.0)
}

pub fn attr(s: &Stat, t: Timeouts) -> Reply {
    let mut f = Fields::default();
    let t = t.of(s);
    f.u64(t.as_secs()).u32(t.subsec_nanos()).u32(0).attr(s);
    Reply::Bytes(f.0)
}

/// `fuse_statx_out`: what [`attr`] says, and the time of birth.
pub fn statx(s: &Stat, t: Timeouts) -> Reply {
    const BASIC: u32 = 0x7ff;
    const BTIME: u32 = 0x800;
    let (mut f, a) = (Fields::default(), &s.attr);
    let t = t.of(s);
    f.u64(t.as_secs()).u32(t.subsec_nanos()).u32(0).zeros(16);
    f.u32(BASIC | BTIME).u32(block_size(a)).u64(0).u32(a.nlink).u32(a.uid).u32(a.gid).u16(a.mode as u16).u16(0);
    f.u64(a.ino).u64(a.size).u64(s.blocks()).u64(0);
    for ns in [a.atime_ns, a.btime_ns, a.ctime_ns, a.mtime_ns] {
        let t = Time::of(ns);
        f.u64(t.seconds as u64).u32(t.nanos).u32(0);
    }
    let (major, minor) = device(a.rdev);
    f.u32(major).u32(minor).u32(0).u32(0).zeros(8 * 14);
    Reply::Bytes(f.0)
}

/// Major and minor number in Linux's 32 bit encoding.
fn device(rdev: u32) -> (u32, u32) {
    ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xfff00))
}

pub fn opened(handle: u64, flags: u32) -> Reply {
    let mut f = Fields::default();
    f.u64(handle).u32(flags).u32(0);
    Reply::Bytes(f.0)
}

pub fn created(a: &pb::Attr, t: Timeouts, handle: u64, flags: u32) -> Reply {
    let mut f = Fields::default();
    f.entry(a, t).u64(handle).u32(flags).u32(0);
    Reply::Bytes(f.0)
}

pub fn written(n: usize) -> Reply {
    let mut f = Fields::default();
    f.u32(n as u32).u32(0);
    Reply::Bytes(f.0)
}

/// Of COPY_FILE_RANGE_64 and LSEEK.
pub fn number(n: u64) -> Reply {
    let mut f = Fields::default();
    f.u64(n);
    Reply::Bytes(f.0)
}

/// In blocks of 4 KiB.
pub fn statfs(s: &pb::StatfsReply) -> Reply {
    const BLOCK: u32 = 4096;
    const LONGEST_NAME: u32 = 255;
    let (total, free) = (s.total_bytes / u64::from(BLOCK), s.free_bytes / u64::from(BLOCK));
    let mut f = Fields::default();
    f.u64(total).u64(free).u64(free).u64(s.inodes.saturating_add(s.free_inodes)).u64(s.free_inodes);
    f.u32(BLOCK).u32(LONGEST_NAME).u32(BLOCK).u32(0).zeros(24);
    Reply::Bytes(f.0)
}

/// An extended attribute's value (or the list of names), or its length when `room` is 0.
pub fn xattr(value: &[u8], room: u32) -> Reply {
    /// XATTR_SIZE_MAX and XATTR_LIST_MAX of Linux.
    const MOST: usize = 64 << 10;
    if value.len() > MOST {
        return Reply::Error(libc::E2BIG);
    }
    if room == 0 {
        return written(value.len());
    }
    if value.len() > room as usize { Reply::Error(libc::ERANGE) } else { Reply::Bytes(value.to_vec()) }
}

/// Directory entries up to `room` bytes.
pub struct Entries {
    out: Fields,
    room: usize,
    plus: Option<Timeouts>,
}

impl Entries {
    /// `plus`: with attributes.
    pub fn new(room: usize, plus: Option<Timeouts>) -> Entries {
        Entries { out: Fields::default(), room, plus }
    }

    /// False when there is no room for it.
    pub fn take(&mut self, e: &Entry) -> bool {
        let head = abi::DIRENT + if self.plus.is_some() { abi::ENTRY } else { 0 };
        let len = abi::aligned(head + e.name.len());
        if self.out.0.len() + len > self.room {
            return false;
        }
        if let Some(t) = self.plus {
            match &e.attr {
                Some(a) => self.out.entry(a, t),
                // Node 0: an entry without attributes, as "." and "..".
                None => self.out.zeros(abi::ENTRY),
            };
        }
        self.out.u64(e.ino).u64(e.offset).u32(e.name.len() as u32).u32(e.kind);
        self.out.0.extend_from_slice(&e.name);
        self.out.zeros(len - head - e.name.len());
        true
    }

    pub fn reply(self) -> Reply {
        Reply::Bytes(self.out.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(r: Reply) -> Vec<u8> {
        match r {
            Reply::Bytes(b) => b,
            other => panic!("{other:?}"),
        }
    }

    const T: Timeouts = Timeouts { attr: Duration::from_millis(1500), entry: Duration::ZERO };

    /// Sizes of the kernel's structures: one byte off and every field after it is another.
    #[test]
    fn replies_are_as_long_as_the_kernels_structures() {
        let a = pb::Attr::default();
        assert_eq!(bytes(entry(&a, T)).len(), abi::ENTRY);
        assert_eq!(bytes(attr(&a.into(), T)).len(), 16 + 88);
        assert_eq!(bytes(statx(&a.into(), T)).len(), 32 + 256);
        assert_eq!(bytes(opened(1, 0)).len(), 16);
        assert_eq!(bytes(created(&a, T, 1, 0)).len(), abi::ENTRY + 16);
        assert_eq!(bytes(statfs(&pb::StatfsReply::default())).len(), 80);
        assert_eq!(bytes(written(1)).len(), 8);
    }

    #[test]
    fn the_space_of_a_sparse_file_is_told_only_where_it_was_counted() {
        let u64_at = |r: Vec<u8>, at: usize| u64::from_ne_bytes(r[at..at + 8].try_into().unwrap());
        let told = |s: Stat| (u64_at(bytes(attr(&s, T)), 0), u64_at(bytes(attr(&s, T)), 32));
        let plain = pb::Attr { size: 5000, ..Default::default() };
        assert_eq!(told(plain.into()), (1, 10));
        let sparse = pb::Attr { sparse: true, ..plain };
        assert_eq!(told(sparse.into()), (0, 10), "not to be believed");
        assert_eq!(told(Stat { attr: sparse, allocated: Some(4096) }), (1, 8));
        assert_eq!(u64_at(bytes(statx(&Stat { attr: sparse, allocated: Some(4096) }, T)), 32 + 48), 8);
        assert_eq!(u64_at(bytes(entry(&sparse, T)), 24), 0, "names bring no space");
    }

    #[test]
    fn times_before_1970_have_positive_nanoseconds() {
        let t = Time::of(-500_000_000);
        assert_eq!((t.seconds, t.nanos), (-1, 500_000_000));
        let a = pb::Attr { mtime_ns: i64::MIN, ..Default::default() };
        assert_eq!(bytes(attr(&a.into(), T)).len(), 104);
    }

    #[test]
    fn device_numbers_as_linux_splits_them() {
        assert_eq!(device(0x0010_3402), (0x34, 0x102));
    }

    #[test]
    fn entries_stop_where_the_room_ends() {
        let e = Entry { name: b"abc".to_vec(), ino: 5, kind: 8, offset: 77, attr: None };
        let mut plain = Entries::new(70, None);
        assert!(plain.take(&e) && plain.take(&e) && !plain.take(&e));
        let out = bytes(plain.reply());
        assert_eq!((out.len(), &out[24..27], out[8]), (64, &b"abc"[..], 77));
        let mut plus = Entries::new(200, Some(T));
        assert!(plus.take(&e) && !plus.take(&e));
        assert_eq!(bytes(plus.reply()).len(), 160);
    }

    #[test]
    fn xattrs_answer_their_length_or_themselves() {
        assert_eq!(bytes(xattr(b"value", 0))[..4], 5u32.to_ne_bytes());
        assert_eq!(bytes(xattr(b"value", 5)), b"value");
        assert!(matches!(xattr(b"value", 4), Reply::Error(libc::ERANGE)));
        assert!(matches!(xattr(&vec![0; 65_537], 0), Reply::Error(libc::E2BIG)));
    }
}
