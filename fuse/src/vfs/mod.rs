//! What a kernel request means: the file system as a set of calls in plain types, for any transport.
//!
//! Inode numbers are StrakeFS inode ids, which are never reused, so there is no inode table and no lookup count. Open
//! files and directories are kept in tables by handle number. Every call may run beside any other.

mod dirs;
mod files;
mod groups;
mod handles;
mod names;
mod xattr;

use strake_client::{Client, File};
use strake_fabric::{Buf, Pool};
use strake_proto::{Ino, Result, pb};

pub use dirs::Entry;
use dirs::OpenDir;
use groups::Groups;
use handles::Table;
pub use xattr::{MAP_HEAD, MAP_PART};

/// For the fuzz targets: readers of what comes from outside.
#[doc(hidden)]
pub mod fuzzing {
    pub use super::{groups::parse as read_groups, xattr::map_part};
}

/// Who asks, as the kernel reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    /// Thread id, 0 when it lives in a process-id namespace that this one cannot see.
    pub pid: u32,
}

/// A new value for a time stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    Now,
    /// Nanoseconds since 1970-01-01 UTC.
    At(i64),
}

/// What setattr changes; `None` leaves a field as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<Time>,
    pub mtime: Option<Time>,
    /// The handle of ftruncate(2): the right to cut the file comes from its open, not from its mode.
    pub handle: Option<u64>,
}

/// A file opened for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    pub handle: u64,
    /// Opened for reading only: there is nothing to flush when it is closed.
    pub clean_close: bool,
}

/// Where a write goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    At(u64),
    /// The end of the file at the moment of writing (`O_APPEND`).
    End,
}

pub struct Vfs {
    client: Client,
    groups: Groups,
    files: Table<OpenFile>,
    dirs: Table<OpenDir>,
}

struct OpenFile {
    file: File,
    ino: Ino,
    flags: i32,
}

impl Vfs {
    pub fn new(client: Client) -> Vfs {
        Vfs { client, groups: Groups::default(), files: Table::default(), dirs: Table::default() }
    }

    /// Space, inodes and targets.
    pub async fn statfs(&self) -> Result<pb::StatfsReply> {
        self.client.statfs(&pb::Creds::default(), "").await
    }

    /// Flushes and closes whatever is still open, after the kernel is gone.
    pub async fn close_all(&self) {
        for open in self.files.drain() {
            self.end_file(open).await;
        }
        self.dirs.drain();
    }

    /// Where the transport takes its buffers.
    pub(crate) fn pool(&self) -> &Pool {
        self.client.pool()
    }

    fn creds(&self, caller: Caller) -> pb::Creds {
        pb::Creds { uid: caller.uid, gid: caller.gid, groups: self.groups.of(caller) }
    }

    /// One buffer for a transport that takes one: the only segment itself, or a copy of all.
    pub(crate) fn gather(mut parts: Vec<Buf>, pool: &Pool) -> Option<Buf> {
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
}

impl OpenFile {
    fn writes(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }
}
