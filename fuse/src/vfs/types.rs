//! The plain types of the file system's calls.

use std::time::Duration;

use strake_client::Operation;
use strake_proto::{Code, Error, Ino, pb};

/// Largest read or write request: 256 pages of 4 KiB, the kernel's default limit.
pub const MAX_REQUEST: u32 = 1 << 20;

/// The caller of a request, as the kernel reports it.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    /// The user who calls.
    pub uid: u32,
    /// Its group; the supplementary ones are looked up where they are needed.
    pub gid: u32,
    /// Thread id; 0 if the thread is in a process-id namespace that is not visible here.
    pub pid: u32,
    /// What the request is to the client, if it may come again after a restart of the mount.
    pub operation: Option<&'a Operation>,
}

impl<'a> Caller<'a> {
    /// The caller of a change, with its credentials: see [`Caller::creds`].
    pub(super) fn with(self, creds: &'a pb::Creds) -> strake_client::Caller<'a> {
        strake_client::Caller { creds, operation: self.operation }
    }
}

/// A new value for a time stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// The time at which the change is made.
    Now,
    /// Nanoseconds since 1970-01-01 UTC.
    At(i64),
}

/// What setattr changes; `None` leaves a field as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "most fields are named after those of stat(2)")]
pub struct Change {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
    /// The handle of ftruncate(2): the permission to truncate the file comes from its open, not
    /// from its mode.
    pub handle: Option<u64>,
}

/// A file opened for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Its number in all later requests.
    pub handle: u64,
}

/// Where a write goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// This offset.
    At(u64),
    /// The end of the file at the moment of writing (`O_APPEND`).
    End {
        /// Where the kernel assumes the end to be.
        at: u64,
        /// The writing thread; 0 if it is not known.
        tid: u32,
    },
}

/// Where [`super::Files::copy_range`] copies from and to: handles and offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the line above says what they are")]
pub struct CopyRange {
    pub from: u64,
    pub from_offset: u64,
    pub to: u64,
    pub to_offset: u64,
}

/// A directory entry as the kernel wants it.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its name, without a terminating NUL.
    pub name: Vec<u8>,
    /// The inode that the name refers to.
    pub ino: Ino,
    /// `S_IFMT` bits >> 12.
    pub kind: u32,
    /// The offset of the next entry.
    pub offset: u64,
    /// With readdirplus, except for "." and "..".
    pub attr: Option<pb::Attr>,
}

/// The result of stat(2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stat {
    /// The inode's attributes.
    pub attr: pb::Attr,
    /// Stored bytes of a file that may have holes; `None` if they were not counted.
    pub allocated: Option<u64>,
}

impl From<pb::Attr> for Stat {
    fn from(attr: pb::Attr) -> Stat {
        Stat { attr, allocated: None }
    }
}

impl Stat {
    /// Space in units of 512 bytes, as `st_blocks`.
    pub fn blocks(&self) -> u64 {
        self.allocated.unwrap_or(self.attr.size).div_ceil(512)
    }

    /// How long the kernel may use this: not at all where the space is not known, so that the next
    /// caller asks again.
    pub fn timeout(&self, usual: Duration) -> Duration {
        if self.attr.sparse && self.allocated.is_none() { Duration::ZERO } else { usual }
    }
}

pub(crate) fn is_dir(attr: &pb::Attr) -> bool {
    attr.mode & libc::S_IFMT == libc::S_IFDIR
}

/// Converts the error of a request about an inode, not a name. An inode that is gone is stale
/// (`ESTALE`). Then the kernel looks the names of a path up again, and finds what is there now, or
/// `ENOENT`.
pub(super) fn stale(e: Error) -> Error {
    if e.code == Code::NoEnt { Error::new(Code::Stale, e.message) } else { e }
}
