//! One open file: its sides for reading and writing, and its end.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result, pb};

use super::{appends::Appends, reads::Reads, told::Teller, writes::Writes};
use crate::{
    core::Core,
    inode::{Inode, O_ACCMODE, O_RDWR, O_WRONLY, Open},
};

pub(super) struct Handle {
    pub(super) core: Arc<Core>,
    pub(super) inode: Arc<Inode>,
    pub(super) flags: u32,
    /// `Some` until the file is closed.
    open: Mutex<Option<Arc<Open>>>,
    closed: AtomicBool,
    /// See [`Inode::handle_opened`].
    since: u64,
    pub(super) reads: Reads,
    pub(super) writes: Writes,
    pub(super) appends: Appends,
}

impl Handle {
    pub fn new(core: &Arc<Core>, open: Arc<Open>, creds: &pb::Creds, flags: u32) -> Handle {
        let inode = open.inode.clone();
        let writes = Writes::new(core, &inode, creds, flags);
        let since = inode.handle_opened(flags);
        Handle {
            core: core.clone(),
            flags,
            open: Mutex::new(Some(open)),
            closed: AtomicBool::new(false),
            since,
            reads: Reads::new(core, &inode, flags, since),
            writes,
            appends: Appends::new(core, &inode),
            inode,
        }
    }

    pub fn is_writable(&self) -> bool {
        matches!(self.flags & O_ACCMODE, O_WRONLY | O_RDWR)
    }

    /// `EBADF` when the file is closed.
    pub fn check_open(&self) -> Result<()> {
        match self.closed.load(Relaxed) {
            true => Err(Error::new(Code::BadF, "the file is closed")),
            false => Ok(()),
        }
    }

    fn check(&self, ok: bool, what: &str) -> Result<()> {
        self.check_open()?;
        match ok {
            true => Ok(()),
            false => Err(Error::new(Code::BadF, format!("the file is not open for {what}"))),
        }
    }

    /// The side for reading; `EBADF` when the file is not open for that.
    pub fn for_reading(&self) -> Result<&Reads> {
        self.check(self.flags & O_ACCMODE != O_WRONLY, "reading").map(|()| &self.reads)
    }

    /// The side for writing; `EBADF` when the file is not open for that.
    pub fn for_writing(&self) -> Result<&Writes> {
        self.check(self.is_writable(), "writing").map(|()| &self.writes)
    }

    /// Makes all that was written stable, and reports lost writes.
    pub async fn sync(self: &Arc<Self>, by: Teller) -> Result<()> {
        let me = self.clone();
        self.core.shared.detached(async move { me.writes.sync(by).await }).await
    }

    pub async fn close(self: Arc<Self>) -> Result<()> {
        if self.closed.swap(true, Relaxed) {
            return Err(Error::new(Code::BadF, "the file is closed"));
        }
        self.appends.forget_end();
        let outcome = self.sync(Teller::Close).await;
        let Some(open) = self.open.lock().take().and_then(Arc::into_inner) else { return outcome };
        let core = self.core.clone();
        let gone = self.core.shared.detached(async move {
            forget(core, open).await;
            Ok(())
        });
        let gone = gone.await;
        outcome.and(gone)
    }
}

/// Tells the metadata server that a handle is closed.
async fn forget(core: Arc<Core>, open: Open) {
    let inode = &open.inode;
    let (now, since) =
        (core.metadata.current_session().map(|s| s.id), core.metadata.reassertions());
    let counted = inode.openings.closed(open.session, now);
    if inode.openings.count() == 0 {
        // The write or append of a killed program goes on by itself. Wait for it: once this client
        // is no longer on record, nothing waits for its writes.
        drop((inode.appending.lock().await, inode.ranges.lock_all().await));
    }
    // Send the dirty data of a write that ran beside the close: once this client is no longer on
    // record, the next writer does not wait for it.
    core.writeback.send_held(inode).await;
    if inode.openings.count() == 0 {
        core.leave_closed_pages(inode.ino).await;
    }
    if counted {
        core.metadata.tell_closed(&[inode.ino], since).await;
    }
    core.files.release_later(inode.ino, inode.openings.release());
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.inode.handle_closed(self.since, self.flags);
        if self.closed.load(Relaxed)
            || self.core.shared.is_closed()
            || tokio::runtime::Handle::try_current().is_err()
        {
            return;
        }
        let (core, inode) = (self.core.clone(), self.inode.clone());
        let open = self.open.get_mut().take().and_then(Arc::into_inner);
        self.core.shared.env.spawn(async move {
            if let Err(e) = core.sync_inode(&inode).await {
                tracing::warn!(
                    ino = inode.ino,
                    "a file that was dropped without close could not be flushed: {e}"
                );
            }
            if let Some(open) = open {
                forget(core, open).await;
            }
        });
    }
}
