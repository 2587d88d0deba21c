//! Takes the lock of a file's pages before the file is used, and releases it when other clients
//! want it: the stateful layer around [`Pages`].

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use strake_proto::{Code, Ino, Result, SessionId};
use tokio::time::sleep;

use crate::{
    core::Core,
    inode::Inode,
    leases::lease_cache::forgotten,
    locks::page_uses::Using,
    locks::pages::{Enter, Held, Leave, Mode, Use},
    locks::{Lock, LockKind, LockType, Locks},
};

/// Pause before another attempt at what could not be made stable.
const PAUSE: Duration = Duration::from_millis(250);

/// A client takes at most one such lock for each file at a time. Number 0 is used by appends.
fn lock(mode: Mode) -> Lock {
    let mode = match mode {
        Mode::Read => LockType::LockRead,
        Mode::Write => LockType::LockWrite,
    };
    Lock { kind: LockKind::LockPages, owner: 1, mode, start: 0, end: u64::MAX, pid: 0 }
}

impl Core {
    /// For a change of a file's bytes. Sends no request while no other client maps the file.
    pub(crate) async fn use_to_change(self: &Arc<Self>, ino: Ino) -> Result<Using> {
        self.use_pages(ino, Mode::Write, true).await
    }

    /// See [`Pages::enter`].
    pub(crate) async fn use_pages(
        self: &Arc<Self>,
        ino: Ino,
        mode: Mode,
        free: bool,
    ) -> Result<Using> {
        loop {
            let mut news = std::pin::pin!(self.pages.news.notified());
            news.as_mut().enable();
            let session = match self.metadata.current_session() {
                Some(s) => s.id,
                None if free && !self.pages.is_marked(ino) => 0,
                None => self.metadata.session().await?.id,
            };
            let enter =
                self.pages.table.lock().enter(self.shared.env.boot(), ino, (mode, free), session);
            match enter {
                Enter::Begun(what) => return Ok(Using::new(&self.pages, ino, what)),
                // Runs to its end, even if the caller goes away.
                Enter::Ask => {
                    let core = self.clone();
                    self.shared
                        .detached(async move { core.ask_for_pages(ino, mode).await })
                        .await?;
                }
                Enter::GiveUp => self.leave_pages(ino, true).await,
                Enter::Wait => news.await,
            }
        }
    }

    async fn ask_for_pages(self: &Arc<Self>, ino: Ino, mode: Mode) -> Result<()> {
        // Mark first: from the moment at which the log grants the lock, the leader does not tell
        // this client about the pages of others.
        self.pages.table.lock().mark(ino);
        let asked = Locks { core: self }.wait(ino, &lock(mode)).await;
        let wanted = match &asked {
            Ok(locked) => {
                let mut table = self.pages.table.lock();
                table.granted(self.shared.env.boot(), ino, mode, locked.session)
            }
            Err(e) => {
                if e.code == Code::Inval {
                    tracing::warn!(
                        "the metadata servers are too old to order stores by several mounts to \
                         one mapping: {e}"
                    );
                    self.pages.unknown.store(true, Relaxed);
                    self.pages.table.lock().unmark(ino);
                }
                self.pages.table.lock().refused(ino);
                false
            }
        };
        self.pages.news.notify_waiters();
        if wanted {
            let core = self.clone();
            self.shared.env.spawn(async move { core.leave_pages(ino, false).await });
        }
        asked.map(drop)
    }

    /// Other clients want pages of a file, or have some from now on. Returns when no use that was
    /// begun without the lock is in progress any more, and this client has neither a page of the
    /// file nor its lock.
    pub(crate) async fn give_pages_back(self: &Arc<Self>, ino: Ino) {
        self.pages.table.lock().wanted(ino);
        self.leave_pages(ino, false).await;
        // Takes back pages from before the file was marked, and dirty data.
        self.take_pages_back(ino, Mode::Write).await;
        let session = self.metadata.current_session().map_or(0, |s| s.id);
        if self.shared.cfg.handover.as_ref().is_some_and(|k| k.former_session() == session)
            && self.pages.table.lock().leave_former(self.shared.env.boot(), ino, session)
        {
            // A previous process of the mount may have held the lock.
            self.unlock_pages(ino).await;
            self.pages.table.lock().left(ino);
            self.pages.news.notify_waiters();
        }
    }

    /// As [`Core::give_pages_back`], for a client that no longer uses the file, or needs the lock
    /// in another mode.
    pub(crate) async fn leave_pages(self: &Arc<Self>, ino: Ino, at_once: bool) {
        loop {
            let mut news = std::pin::pin!(self.pages.news.notified());
            news.as_mut().enable();
            let now = self.shared.env.boot();
            let leave = self.pages.table.lock().leave(now, ino, at_once);
            match leave {
                Leave::Done => return,
                Leave::Wait(None) => news.await,
                Leave::Wait(Some(until)) => {
                    tokio::select! {
                        biased;
                        () = news => {}
                        () = sleep(until.saturating_sub(now)) => {}
                    }
                }
                Leave::Go(held) => {
                    // Runs to its end, even if the caller goes away.
                    let core = self.clone();
                    let _ = self
                        .shared
                        .env
                        .spawn(async move { core.unlock_held(ino, held).await })
                        .await;
                    return;
                }
            }
        }
    }

    async fn unlock_held(self: &Arc<Self>, ino: Ino, held: Held) {
        self.take_pages_back(ino, held.mode).await;
        if let Some(inode) = self.files.live_inode(ino) {
            self.settle_writes(&inode, held.session).await;
        }
        self.unlock_pages(ino).await;
        self.pages.table.lock().left(ino);
        self.pages.news.notify_waiters();
    }

    /// `mode`: of the lock of the pages.
    async fn take_pages_back(self: &Arc<Self>, ino: Ino, mode: Mode) {
        let stored = mode == Mode::Write;
        if stored {
            self.pages.table.lock().takes_back(ino);
            self.pages.news.notify_waiters();
        }
        forgotten(self.lease_cache.give_back(ino)).await;
        if let Some(inode) = self.files.live_inode(ino) {
            self.writeback.send_held(&inode).await;
        }
        if stored {
            self.pages.table.lock().took_back(ino);
        }
    }

    /// For a truncation: returns when no other client has pages of the file. The kernel writes no
    /// page back until it has the answer, so this does not wait for pages that are taken back here
    /// (`None`).
    pub(crate) async fn use_to_cut(self: &Arc<Self>, ino: Ino) -> Result<Option<Use>> {
        let taking_back = async {
            loop {
                let mut news = std::pin::pin!(self.pages.news.notified());
                news.as_mut().enable();
                if self.pages.table.lock().is_taking_back(ino) {
                    return;
                }
                news.await;
            }
        };
        tokio::select! {
            biased;
            () = taking_back => Ok(None),
            using = self.use_to_change(ino) => Ok(Some(using?.over())),
        }
    }

    /// Makes sure that no write made under the lock is sent again later: other clients may have
    /// written there since.
    async fn settle_writes(self: &Arc<Self>, inode: &Arc<Inode>, session: SessionId) {
        let is_same = || {
            self.metadata.current_session().is_some_and(|s| s.id == session)
                && !self.shared.is_closed()
        };
        while is_same() {
            let settled = match self.updates.fence(inode).await {
                Ok(()) => self.updates.flush_inode(inode.ino).await,
                Err(e) => Err(e),
            };
            match settled {
                Ok(()) => return,
                Err(e) => {
                    tracing::warn!(
                        ino = inode.ino,
                        "pages of a file were recalled, and data stored there is not safe: {e}"
                    )
                }
            }
            sleep(PAUSE).await;
        }
    }

    async fn unlock_pages(self: &Arc<Self>, ino: Ino) {
        let lock = Lock { mode: LockType::LockUnlock, ..lock(Mode::Read) };
        let locks = Locks { core: self };
        // This continues until it succeeds, or the session is lost.
        if let Err(e) = locks.give_up(ino, &lock, locks.unlocking(ino, lock.owner)).await {
            tracing::debug!(ino, "releasing a page lock: {e}");
        }
    }

    /// A file is opened so that it can be mapped for changes: from now on programs could store to
    /// pages that were handed out for reading.
    pub(crate) async fn leave_shared_pages(self: &Arc<Self>, ino: Ino) {
        if self.pages.table.lock().has(ino, Some(Mode::Read)) {
            self.leave_pages(ino, true).await;
        }
    }

    /// The file is no longer open here.
    pub(crate) async fn leave_closed_pages(self: &Arc<Self>, ino: Ino) {
        if self.pages.table.lock().has(ino, None) {
            self.leave_pages(ino, true).await;
        }
    }
}
