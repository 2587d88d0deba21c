//! What a record of an inode says: shorthands for its attributes, file types, and results that show
//! it.

use strake_proto::pb;

pub(super) const S_IFMT: u32 = 0o170_000;
pub(super) const S_IFSOCK: u32 = 0o140_000;
pub(super) const S_IFLNK: u32 = 0o120_000;
pub(super) const S_IFREG: u32 = 0o100_000;
pub(super) const S_IFBLK: u32 = 0o060_000;
pub(super) const S_IFDIR: u32 = 0o040_000;
pub(super) const S_IFCHR: u32 = 0o020_000;
pub(super) const S_IFIFO: u32 = 0o010_000;
pub(super) const S_ISUID: u32 = 0o4000;
pub(super) const S_ISGID: u32 = 0o2000;
pub(super) const S_ISVTX: u32 = 0o1000;

/// The size that every directory shows.
pub(super) const DIR_SIZE: u64 = 4096;

pub(super) fn is_dir(a: &pb::Attr) -> bool {
    a.mode & S_IFMT == S_IFDIR
}

pub(super) fn is_file(a: &pb::Attr) -> bool {
    a.mode & S_IFMT == S_IFREG
}

/// Shorthands for a record whose attributes are always there.
pub(super) trait Inode {
    fn attr(&self) -> &pb::Attr;
    fn attr_mut(&mut self) -> &mut pb::Attr;
}

static NO_ATTR: pb::Attr = pb::Attr {
    ino: 0,
    mode: 0,
    uid: 0,
    gid: 0,
    nlink: 0,
    size: 0,
    atime_ns: 0,
    mtime_ns: 0,
    ctime_ns: 0,
    btime_ns: 0,
    rdev: 0,
    change: 0,
    data_id: 0,
    acls: 0,
    sparse: false,
};

impl Inode for pb::InodeRecord {
    fn attr(&self) -> &pb::Attr {
        self.attr.as_ref().unwrap_or(&NO_ATTR)
    }
    fn attr_mut(&mut self) -> &mut pb::Attr {
        self.attr.get_or_insert_default()
    }
}

/// A result that ends on an inode and shows its attributes.
pub(super) fn shown(r: &pb::InodeRecord) -> pb::OpResult {
    pb::OpResult { ino: r.attr().ino, attr: r.attr, ..Default::default() }
}

/// A result with the fields that the holder of an open file needs.
pub(super) fn opened(r: &pb::InodeRecord) -> pb::OpResult {
    pb::OpResult { layout: r.layout.clone(), ..shown(r) }
}
