//! Replies in the kernel's form. Pure: plain types in, bytes out.

use std::{ops::Range, time::Duration};

use strake_fabric::Buf;
use strake_proto::{Ino, pb};

use super::abi;
use crate::vfs::{Entry, Holder, Lock, LockType, MAX_REQUEST, Stat};

/// The answer to a request.
#[derive(Debug)]
pub enum Reply {
    /// An errno.
    Error(i32),
    /// Results; empty for success without any.
    Bytes(Vec<u8>),
    /// File data, sent from where it lies in memory.
    Data(Vec<Buf>),
    /// Data that the kernel may cache. If it is sent unchanged, the kernel may not.
    Told(Told),
}

impl Reply {
    /// Success without results.
    pub fn ok() -> Reply {
        Reply::Bytes(Vec::new())
    }
}

/// How long the kernel may use attributes and names.
#[derive(Clone, Copy, Debug)]
pub struct Timeouts {
    pub attr: Duration,
    pub entry: Duration,
}

/// How the kernel treats a reply if a notice voided its content before the kernel processed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taken {
    /// It notices that, and does not use the content.
    InOrder,
    /// As `InOrder`, unless it did not have the inode before.
    Found,
    /// As `InOrder` for attributes. It would use names, so it gets none with a time.
    Listed,
    /// It would use the content, so it gets nothing with a time.
    Blindly,
}

/// Attributes and names without their validity times, which are filled in when they are sent.
#[derive(Debug)]
pub struct Told {
    /// The bytes to be sent, and after those names that are not sent.
    bytes: Vec<u8>,
    len: usize,
    marks: Vec<Mark>,
    taken: Taken,
}

/// A validity time to be filled in.
#[derive(Debug)]
struct Mark {
    at: usize,
    /// `None`: there is no such name.
    stat: Option<Stat>,
    /// If set, there is a `fuse_entry_out` at `at` for this directory and name. `None`: it is a
    /// `fuse_attr_out` or `fuse_statx_out`.
    name: Option<(Ino, Range<usize>)>,
}

impl Told {
    fn new(mut f: Fields, stat: Option<Stat>, name: Option<(Ino, &[u8])>, taken: Taken) -> Told {
        let len = f.0.len();
        let name = name.map(|(dir, name)| {
            f.0.extend_from_slice(name);
            (dir, len..len + name.len())
        });
        Told { bytes: f.0, len, marks: vec![Mark { at: 0, stat, name }], taken }
    }

    pub fn taken(&self) -> Taken {
        self.taken
    }

    /// The inodes that the reply brings, with repetitions.
    pub fn nodes(&self) -> impl Iterator<Item = u64> {
        self.marks.iter().filter(|m| m.name.is_some()).filter_map(|m| m.stat.map(|s| s.attr.ino))
    }

    /// The bytes with validity times of 0.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Fills in the validity times: `attr` gives the time for attributes, `name` that for a name in
    /// a directory.
    pub fn finish(
        mut self,
        attr: impl Fn(&Stat) -> Duration,
        name: impl Fn(Ino, &[u8], Option<Ino>) -> Duration,
    ) -> Reply {
        for mark in &self.marks {
            let attr = mark.stat.as_ref().map_or(Duration::ZERO, &attr);
            let Some((dir, range)) = &mark.name else {
                put(&mut self.bytes[mark.at..], [0, 8], attr);
                continue;
            };
            let ino = mark.stat.map(|s| s.attr.ino);
            let entry = name(*dir, &self.bytes[range.clone()], ino);
            if ino.is_none() && entry.is_zero() {
                return Reply::Error(libc::ENOENT);
            }
            put(&mut self.bytes[mark.at..], [16, 32], entry);
            put(&mut self.bytes[mark.at..], [24, 36], attr);
        }
        self.bytes.truncate(self.len);
        Reply::Bytes(self.bytes)
    }
}

/// Writes seconds and nanoseconds.
fn put(out: &mut [u8], [seconds, nanos]: [usize; 2], d: Duration) {
    out[seconds..seconds + 8].copy_from_slice(&d.as_secs().to_ne_bytes());
    out[nanos..nanos + 4].copy_from_slice(&d.subsec_nanos().to_ne_bytes());
}

/// `fuse_lk_out`: the conflicting lock, or that there is none.
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

/// Writes fields in sequence.
struct Fields(Vec<u8>);

impl Default for Fields {
    /// With space for the largest of the frequent replies, [`created`].
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

    fn entry(&mut self, s: &Stat) -> &mut Fields {
        // Inode numbers are never reused, so every inode has generation 0.
        self.u64(s.attr.ino).zeros(32).attr(s)
    }
}

/// Seconds rounded down, plus nanoseconds, as `struct timespec` represents a time before 1970.
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
    if a.mode & libc::S_IFMT == libc::S_IFREG { MAX_REQUEST } else { 4096 }
}

/// The inode that a name in a directory refers to.
pub fn entry(a: &pb::Attr, name: (Ino, &[u8]), taken: Taken) -> Reply {
    let (mut f, s) = (Fields::default(), Stat::from(*a));
    f.entry(&s);
    Reply::Told(Told::new(f, Some(s), Some(name), taken))
}

/// Says that there is no such name in a directory.
pub fn missing(name: (Ino, &[u8])) -> Reply {
    let mut f = Fields::default();
    f.zeros(abi::ENTRY);
    Reply::Told(Told::new(f, None, Some(name), Taken::InOrder))
}

pub fn attr(s: &Stat, taken: Taken) -> Reply {
    let mut f = Fields::default();
    f.zeros(16).attr(s);
    Reply::Told(Told::new(f, Some(*s), None, taken))
}

/// `fuse_statx_out`: the content of [`attr`], and the time of birth.
pub fn statx(s: &Stat) -> Reply {
    const BASIC: u32 = 0x7ff;
    const BTIME: u32 = 0x800;
    let (mut f, a) = (Fields::default(), &s.attr);
    f.zeros(32);
    f.u32(BASIC | BTIME)
        .u32(block_size(a))
        .u64(0)
        .u32(a.nlink)
        .u32(a.uid)
        .u32(a.gid)
        .u16(a.mode as u16)
        .u16(0);
    f.u64(a.ino).u64(a.size).u64(s.blocks()).u64(0);
    for ns in [a.atime_ns, a.btime_ns, a.ctime_ns, a.mtime_ns] {
        let t = Time::of(ns);
        f.u64(t.seconds as u64).u32(t.nanos).u32(0);
    }
    let (major, minor) = device(a.rdev);
    f.u32(major).u32(minor).u32(0).u32(0).zeros(8 * 14);
    Reply::Told(Told::new(f, Some(*s), None, Taken::InOrder))
}

/// Major and minor number in Linux's 32 bit encoding.
fn device(rdev: u32) -> (u32, u32) {
    ((rdev >> 8) & 0xfff, (rdev & 0xff) | ((rdev >> 12) & 0xfff00))
}

/// `fuse_ioctl_out`, and the bytes for the program.
pub fn answer(bytes: &[u8]) -> Reply {
    let mut f = Fields::default();
    f.zeros(16);
    f.0.extend_from_slice(bytes);
    Reply::Bytes(f.0)
}

pub fn opened(handle: u64, flags: u32) -> Reply {
    let mut f = Fields::default();
    f.u64(handle).u32(flags).u32(0);
    Reply::Bytes(f.0)
}

/// A new open file. An empty name: it has none.
pub fn created(a: &pb::Attr, name: (Ino, &[u8]), handle: u64, flags: u32) -> Reply {
    let (mut f, s) = (Fields::default(), Stat::from(*a));
    f.entry(&s).u64(handle).u32(flags).u32(0);
    Reply::Told(Told::new(f, Some(s), Some(name), Taken::Blindly))
}

pub fn written(n: usize) -> Reply {
    let mut f = Fields::default();
    f.u32(n as u32).u32(0);
    Reply::Bytes(f.0)
}

/// The answer to COPY_FILE_RANGE_64 and LSEEK.
pub fn number(n: u64) -> Reply {
    let mut f = Fields::default();
    f.u64(n);
    Reply::Bytes(f.0)
}

/// The answer to STATFS, in blocks of 4 KiB.
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
    if value.len() > room as usize {
        Reply::Error(libc::ERANGE)
    } else {
        Reply::Bytes(value.to_vec())
    }
}

/// Directory entries up to `room` bytes.
pub struct Entries {
    out: Fields,
    room: usize,
    plus: Option<Ino>,
    marks: Vec<Mark>,
}

impl Entries {
    /// `plus`: with attributes; names the directory.
    pub fn new(room: usize, plus: Option<Ino>) -> Entries {
        Entries { out: Fields::default(), room, plus, marks: Vec::new() }
    }

    /// Adds an entry. Returns false when there is no space for it.
    pub fn take(&mut self, e: &Entry) -> bool {
        let head = abi::DIRENT + if self.plus.is_some() { abi::ENTRY } else { 0 };
        let len = abi::aligned(head + e.name.len());
        let at = self.out.0.len();
        if at + len > self.room {
            return false;
        }
        match (self.plus, e.attr) {
            (Some(dir), Some(a)) => {
                let stat = Stat::from(a);
                self.out.entry(&stat);
                let name = at + head..at + head + e.name.len();
                self.marks.push(Mark { at, stat: Some(stat), name: Some((dir, name)) });
            }
            // Node 0: an entry without attributes, as "." and "..".
            (Some(_), None) => drop(self.out.zeros(abi::ENTRY)),
            (None, _) => {}
        }
        self.out.u64(e.ino).u64(e.offset).u32(e.name.len() as u32).u32(e.kind);
        self.out.0.extend_from_slice(&e.name);
        self.out.zeros(len - head - e.name.len());
        true
    }

    pub fn reply(self) -> Reply {
        let (bytes, marks) = (self.out.0, self.marks);
        Reply::Told(Told { len: bytes.len(), bytes, marks, taken: Taken::Listed })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(r: Reply) -> Vec<u8> {
        match r {
            Reply::Bytes(b) => b,
            Reply::Told(t) => t.bytes().to_vec(),
            other => panic!("{other:?}"),
        }
    }

    const HALF: Duration = Duration::from_millis(1500);
    const NAME: (Ino, &[u8]) = (1, b"name");

    /// Validity times of 1.5 s for attributes and 2.5 s for names.
    fn believed(r: Reply) -> Reply {
        match r {
            Reply::Told(t) => {
                t.finish(|s| s.timeout(HALF), |_, _, _| HALF + Duration::from_secs(1))
            }
            other => panic!("{other:?}"),
        }
    }

    fn u64_at(b: &[u8], at: usize) -> u64 {
        u64::from_ne_bytes(b[at..at + 8].try_into().unwrap())
    }

    fn u32_at(b: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(b[at..at + 4].try_into().unwrap())
    }

    /// Seconds and nanoseconds for names, and for attributes.
    fn times(entry: &[u8]) -> [(u64, u32); 2] {
        [(u64_at(entry, 16), u32_at(entry, 32)), (u64_at(entry, 24), u32_at(entry, 36))]
    }

    /// Checks the sizes of the kernel's structures: one byte off shifts every field after it.
    #[test]
    fn replies_are_as_long_as_the_kernels_structures() {
        let a = pb::Attr { ino: 5, ..Default::default() };
        let both =
            |r: fn(&pb::Attr) -> Reply| [bytes(r(&a)), bytes(believed(r(&a)))].map(|b| b.len());
        assert_eq!(both(|a| entry(a, NAME, Taken::InOrder)), [abi::ENTRY; 2]);
        assert_eq!(both(|_| missing(NAME)), [abi::ENTRY; 2]);
        assert_eq!(both(|a| attr(&(*a).into(), Taken::InOrder)), [16 + 88; 2]);
        assert_eq!(both(|a| statx(&(*a).into())), [32 + 256; 2]);
        assert_eq!(both(|a| created(a, NAME, 1, 0)), [abi::ENTRY + 16; 2]);
        assert_eq!(bytes(opened(1, 0)).len(), 16);
        assert_eq!(bytes(statfs(&pb::StatfsReply::default())).len(), 80);
        assert_eq!(bytes(written(1)).len(), 8);
    }

    #[test]
    fn times_are_put_in_where_the_kernel_reads_them() {
        let a = pb::Attr { ino: 5, size: 7, ..Default::default() };
        for of in [|a| entry(a, NAME, Taken::InOrder), |a| created(a, NAME, 9, 0)] {
            let (plain, timed) = (bytes(of(&a)), bytes(believed(of(&a))));
            assert_eq!(
                (times(&plain), times(&timed)),
                ([(0, 0); 2], [(2, 500_000_000), (1, 500_000_000)])
            );
            assert_eq!(
                (u64_at(&timed, 0), u64_at(&timed, 40), u64_at(&timed, 48)),
                (5, 5, 7),
                "the rest stays"
            );
        }
        let stat = Stat::from(a);
        for of in [|s| attr(s, Taken::InOrder), statx] {
            let (plain, timed) = (bytes(of(&stat)), bytes(believed(of(&stat))));
            assert_eq!((u64_at(&plain, 0), u32_at(&plain, 8)), (0, 0));
            assert_eq!((u64_at(&timed, 0), u32_at(&timed, 8)), (1, 500_000_000));
            assert_eq!(plain[12..], timed[12..]);
        }
    }

    #[test]
    fn that_there_is_no_name_is_said_for_some_time_or_is_an_error() {
        let asked = |valid| {
            let Reply::Told(t) = missing(NAME) else { panic!() };
            t.finish(
                |_| panic!("there are no attributes"),
                |dir, name, to| {
                    assert_eq!(((dir, name), to), (NAME, None));
                    valid
                },
            )
        };
        let out = bytes(asked(HALF));
        assert_eq!((u64_at(&out, 0), times(&out)), (0, [(1, 500_000_000), (0, 0)]));
        assert!(matches!(asked(Duration::ZERO), Reply::Error(libc::ENOENT)));
    }

    #[test]
    fn the_space_of_a_sparse_file_is_told_only_where_it_was_counted() {
        let told = |s: Stat| {
            let out = bytes(believed(attr(&s, Taken::InOrder)));
            (u64_at(&out, 0), u64_at(&out, 32))
        };
        let plain = pb::Attr { size: 5000, ..Default::default() };
        assert_eq!(told(plain.into()), (1, 10));
        let sparse = pb::Attr { sparse: true, ..plain };
        assert_eq!(told(sparse.into()), (0, 10), "not to be believed");
        assert_eq!(told(Stat { attr: sparse, allocated: Some(4096) }), (1, 8));
        assert_eq!(
            u64_at(&bytes(statx(&Stat { attr: sparse, allocated: Some(4096) })), 32 + 48),
            8
        );
        assert_eq!(
            times(&bytes(believed(entry(&sparse, NAME, Taken::InOrder))))[1],
            (0, 0),
            "names bring no space"
        );
    }

    #[test]
    fn times_before_1970_have_positive_nanoseconds() {
        let t = Time::of(-500_000_000);
        assert_eq!((t.seconds, t.nanos), (-1, 500_000_000));
        let a = pb::Attr { mtime_ns: i64::MIN, ..Default::default() };
        assert_eq!(bytes(attr(&a.into(), Taken::InOrder)).len(), 104);
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
        let mut plus = Entries::new(200, Some(1));
        assert!(plus.take(&e) && !plus.take(&e));
        assert_eq!(bytes(plus.reply()).len(), 160);
    }

    #[test]
    fn each_entry_of_a_list_has_times_of_its_own() {
        let attr = |ino| Some(pb::Attr { ino, ..Default::default() });
        let entry = |name: &[u8], ino| Entry {
            name: name.to_vec(),
            ino,
            kind: 8,
            offset: ino,
            attr: attr(ino),
        };
        let mut list = Entries::new(1000, Some(77));
        assert!(list.take(&Entry { attr: None, ..entry(b".", 77) }));
        assert!(list.take(&entry(b"abc", 5)) && list.take(&entry(b"defghijkl", 6)));
        let Reply::Told(told) = list.reply() else { panic!() };
        let plain = told.bytes().to_vec();
        let name = |dir, name: &[u8], to| match (dir, name, to) {
            (77, b"abc", Some(5)) => Duration::from_secs(3),
            (77, b"defghijkl", Some(6)) => Duration::from_nanos(4),
            other => panic!("{other:?}"),
        };
        let out = bytes(told.finish(|s| Duration::from_secs(s.attr.ino), name));
        // Each entry has 160 bytes, the last one 8 more.
        assert_eq!((out.len(), plain.len()), (488, 488));
        assert_eq!(times(&out), [(0, 0); 2]);
        assert_eq!(times(&out[160..]), [(3, 0), (5, 0)]);
        assert_eq!(times(&out[320..]), [(0, 4), (6, 0)]);
        assert_eq!(
            (&out[160 + 152..][..3], &out[320 + 152..][..9]),
            (&b"abc"[..], &b"defghijkl"[..])
        );
        let differ = plain.iter().zip(&out).filter(|(a, b)| a != b).count();
        assert_eq!(differ, 4, "nothing but the times");
    }

    #[test]
    fn xattrs_answer_their_length_or_themselves() {
        assert_eq!(bytes(xattr(b"value", 0))[..4], 5u32.to_ne_bytes());
        assert_eq!(bytes(xattr(b"value", 5)), b"value");
        assert!(matches!(xattr(b"value", 4), Reply::Error(libc::ERANGE)));
        assert!(matches!(xattr(&vec![0; 65_537], 0), Reply::Error(libc::E2BIG)));
    }
}
