//! The meaning of kernel requests: the file system as a set of calls in plain types, for any
//! transport.
//!
//! Inode numbers are StrakeFS inode numbers, which are never reused, so there is no inode table and
//! no lookup count. Open files and directories are in tables by handle number. Every call may run
//! concurrently with any other.

mod calls;
mod claims;
mod dirs;
mod files;
mod gone;
mod groups;
mod handles;
mod ioctl;
mod known;
mod locks;
mod names;
#[doc(hidden)]
pub mod owners;
mod restart;
mod subtree;
mod telling;
mod xattr;

use std::{
    sync::{Arc, OnceLock, atomic::AtomicU64},
    time::Duration,
};

use parking_lot::Mutex;
use strake_client::{Client, File, Operation};
use strake_fabric::{Buf, Pool};
use strake_proto::{Code, Error, Ino, Result, ids::ROOT_INO, pb};
use strake_runtime::Record;
use tokio::{sync::watch, time::Instant};

use claims::Claims;
pub use dirs::Entry;
use dirs::OpenDir;
use gone::Folders;
pub(crate) use gone::is_dir;
use handles::{Numbering, Table};
pub(crate) use known::Known;
pub(crate) use locks::{Leaving, Queue, Soon};
use owners::Owners;
pub use strake_client::{Holder, Lock, LockKind, LockType};
pub use subtree::find_subtree;
pub use xattr::{MAP_HEAD, MAP_PART};

use crate::handover::HandoverMemory;

/// For the fuzz targets: parsers of external input.
#[doc(hidden)]
pub mod fuzzing {
    pub use super::{groups::parse as read_groups, xattr::map_part};

    /// Parses a request as the kernel could send it; returns whether it is well formed.
    pub fn read_request(bytes: &[u8], setxattr_ext: bool) -> bool {
        crate::transport::dev::read_request(bytes, setxattr_ext)
    }

    /// Parses `/proc/TID/status` and `/proc/TID/stat` of a caller that may be dying.
    pub fn read_caller(text: &str) -> bool {
        crate::transport::dev::is_dying(text)
    }
}

/// The caller of a request, as the kernel reports it.
#[derive(Clone, Copy, Debug)]
pub struct Caller<'a> {
    pub uid: u32,
    pub gid: u32,
    /// Thread id; 0 if the thread is in a process-id namespace that is not visible here.
    pub pid: u32,
    /// What the request is to the client, if it may come again after a restart of the mount.
    pub operation: Option<&'a Operation>,
}

impl<'a> Caller<'a> {
    /// The caller of a change, with its credentials: see [`Vfs::creds`].
    fn with(self, creds: &'a pb::Creds) -> strake_client::Caller<'a> {
        strake_client::Caller { creds, operation: self.operation }
    }
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
    /// The handle of ftruncate(2): the permission to truncate the file comes from its open, not
    /// from its mode.
    pub handle: Option<u64>,
}

/// A file opened for the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opened {
    pub handle: u64,
}

/// Where a write goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    At(u64),
    /// The end of the file at the moment of writing (`O_APPEND`).
    End {
        /// Where the kernel assumes the end to be.
        at: u64,
        /// The writing thread; 0 if it is not known.
        tid: u32,
    },
}

/// Where [`Vfs::copy_range`] copies from and to: handles and offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    pub from: u64,
    pub from_offset: u64,
    pub to: u64,
    pub to_offset: u64,
}

pub struct Vfs {
    client: Client,
    keep: Option<Arc<HandoverMemory>>,
    numbering: Numbering,
    files: Table<OpenFile>,
    dirs: Table<OpenDir>,
    owners: Mutex<Owners<Record>>,
    /// The queue that closes come from.
    queue: OnceLock<Arc<dyn Queue>>,
    /// Number of handles that the kernel has closed and whose close is still in progress.
    closings: watch::Sender<usize>,
    /// When the storage servers last failed to say in time how much they store.
    uncounted: Mutex<Option<Instant>>,
    folders: Folders,
    claims: Claims,
    /// Flags that are added to every open.
    always: i32,
    /// The inode that the kernel knows as the root.
    root: Ino,
    known: Known,
}

/// A handle that the kernel has closed.
pub(crate) struct Released {
    open: Arc<OpenFile>,
    locks: Leaving,
    _one: Counted,
}

/// Counts one for as long as it lives.
struct Counted(watch::Sender<usize>);

impl Counted {
    fn new(count: &watch::Sender<usize>) -> Counted {
        count.send_modify(|n| *n += 1);
        Counted(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

/// How long an answer is waited for while servers are away, before the last known one is used.
const PATIENCE: Duration = Duration::from_secs(1);

struct OpenFile {
    /// An error: the file was open when an earlier daemon died, and could not be opened again.
    file: Result<File>,
    ino: Ino,
    flags: i32,
    /// The session in which locks were taken through this handle; 0: there are none.
    locked_in: AtomicU64,
    /// Kept for the next daemon, as long as the file is open.
    kept: Option<Record>,
}

impl Vfs {
    /// `keep`: the memory of the mount, for what must outlive this process.
    pub fn new(client: Client, keep: Option<Arc<HandoverMemory>>) -> Vfs {
        Vfs {
            client,
            numbering: Numbering::new(keep.clone()),
            files: Table::default(),
            dirs: Table::default(),
            owners: Mutex::default(),
            queue: OnceLock::new(),
            closings: watch::Sender::new(0),
            known: Known::new(keep.clone()),
            keep,
            uncounted: Mutex::default(),
            folders: Folders::default(),
            claims: Claims::default(),
            always: 0,
            root: ROOT_INO,
        }
    }

    /// Whether every write is stable before it returns, as if opened with `O_SYNC`.
    #[must_use]
    pub fn synchronous(mut self, yes: bool) -> Vfs {
        self.always = if yes { libc::O_SYNC } else { 0 };
        self
    }

    /// The space of the file system, counted with the default layout of the mount's root.
    pub async fn statfs(&self) -> Result<pb::StatfsReply> {
        self.or_last(
            &self.known.space,
            self.client.space().statfs_in(&pb::Creds::default(), "", self.root),
        )
        .await
    }

    /// An answer, or the last known one when the servers have been away for a while. For what
    /// umount(8) looks at before it unmounts: it must not wait for the servers.
    async fn or_last<T: Clone>(
        &self,
        last: &Mutex<Option<T>>,
        asking: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let instead = async {
            loop {
                tokio::time::sleep(PATIENCE).await;
                let last = last.lock().clone();
                if let Some(known) = last.filter(|_| !self.client.servers().away().is_empty()) {
                    return known;
                }
            }
        };
        tokio::select! {
            biased;
            answer = asking => {
                let answer = answer?;
                *last.lock() = Some(answer.clone());
                self.known.write();
                Ok(answer)
            }
            known = instead => Ok(known),
        }
    }

    /// Returns after `limit`, or as soon as a server is known not to answer.
    pub(crate) async fn while_served(&self, limit: Duration) {
        const LOOK: Duration = Duration::from_millis(10);
        let end = Instant::now() + limit;
        while self.client.servers().away().is_empty() && Instant::now() < end {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Fetches what the mount must show when servers are away. Call this before there is a mount:
    /// see [`Vfs::or_last`].
    pub(crate) async fn learn(&self) -> Result<()> {
        tokio::try_join!(self.getattr(ROOT_INO), self.statfs()).map(drop)
    }

    /// Flushes all files that are still open, after the kernel is gone. They are closed by the end
    /// of the session. Returns the first error about bytes that may be lost and that no close
    /// reported.
    pub async fn close_all(&self) -> Result<()> {
        let mut outcome = Ok(());
        for open in self.files.drain().into_iter().filter(|o| o.writes()) {
            let flushed = match open.file() {
                Ok(file) => file.flush().await,
                Err(e) => Err(e),
            };
            if let Err(e) = flushed {
                tracing::warn!(
                    ino = open.ino,
                    "a file was open when the mount ended, and closing it failed: {e}"
                );
                outcome = outcome.and(Err(e));
            }
        }
        self.dirs.drain();
        // Waits for handles that were closed before.
        let _ = self.closings.subscribe().wait_for(|n| *n == 0).await;
        outcome
    }

    /// The pool for the transport's buffers.
    pub(crate) fn pool(&self) -> &Pool {
        self.client.pool()
    }

    fn creds(&self, caller: Caller<'_>) -> pb::Creds {
        pb::Creds { uid: caller.uid, gid: caller.gid, groups: groups::of(caller) }
    }

    /// One buffer for a transport that accepts only one: the only segment itself, or a copy of all.
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

/// Converts the error of a request about an inode, not a name. An inode that is gone is stale
/// (`ESTALE`). Then the kernel looks the names of a path up again, and finds what is there now, or
/// `ENOENT`.
fn stale(e: Error) -> Error {
    if e.code == Code::NoEnt { Error::new(Code::Stale, e.message) } else { e }
}

/// The result of stat(2).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stat {
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

impl OpenFile {
    fn file(&self) -> Result<&File> {
        self.file.as_ref().map_err(Error::clone)
    }

    fn writes(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }
}
