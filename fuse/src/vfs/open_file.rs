//! A file that the kernel has open.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use strake_client::{Client, File};
use strake_proto::{Code, Error, Ino, Result, SessionId};
use strake_runtime::Record;

pub(super) struct OpenFile {
    /// An error: the file was open when an earlier daemon died, and could not be opened again.
    pub file: Result<File>,
    pub ino: Ino,
    pub flags: i32,
    /// The session in which locks were taken through this handle; 0: there are none.
    locked_in: AtomicU64,
    /// Kept for the next daemon, as long as the file is open.
    pub kept: Option<Record>,
}

impl OpenFile {
    pub fn new(file: Result<File>, ino: Ino, flags: i32, kept: Option<Record>) -> OpenFile {
        OpenFile { file, ino, flags, locked_in: AtomicU64::new(0), kept }
    }

    pub fn file(&self) -> Result<&File> {
        self.file.as_ref().map_err(Error::clone)
    }

    pub fn writes(&self) -> bool {
        self.flags & libc::O_ACCMODE != libc::O_RDONLY
    }

    /// A lock was taken through the handle in this session.
    pub fn locked(&self, session: SessionId) {
        let _ = self.locked_in.compare_exchange(0, session, Relaxed, Relaxed);
    }

    /// An earlier daemon had taken locks through the handle, in this session.
    pub fn was_locked(&self, session: SessionId) {
        self.locked_in.store(session, Relaxed);
    }

    /// There are no locks through the handle any more.
    pub fn unlocked(&self) {
        self.locked_in.store(0, Relaxed);
    }

    /// `EIO` for a file whose locks were lost with their session.
    pub fn check_locks(&self, client: &Client) -> Result<()> {
        if !self.lost_locks(client) {
            return Ok(());
        }
        let m = "the locks taken through this open file are lost, because the metadata servers \
                 evicted this client; close the file";
        Err(Error::new(Code::Io, m))
    }

    pub fn lost_locks(&self, client: &Client) -> bool {
        let session = self.locked_in.load(Relaxed);
        session != 0 && session != client.session()
    }
}
