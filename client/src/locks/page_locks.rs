//! Gets the lock of a file's pages before it is used, and gives it up when others want it: the
//! shell around [`Pages`].

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use strake_proto::{Code, Ino, Result, SessionId};
use tokio::time::sleep;

use crate::{
    Client,
    core::Core,
    inode::Inode,
    leases::lease_cache::forgotten,
    locks::page_uses::Using,
    locks::pages::{Enter, Leave, Mode},
    locks::{Lock, LockKind, LockType},
};

/// Before what could not be made stable is tried again.
const PAUSE: Duration = Duration::from_millis(250);

/// Of a client there is one at a time for each file; appends have number 0.
fn lock(mode: Mode) -> Lock {
    let mode = match mode {
        Mode::Read => LockType::LockRead,
        Mode::Write => LockType::LockWrite,
    };
    Lock { kind: LockKind::LockPages, owner: 1, mode, start: 0, end: u64::MAX, pid: 0 }
}

impl Core {
    /// Bytes of a file are to be changed. Nothing is asked for while nobody else maps it.
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
                // To its end, also if the caller goes away.
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
        // First: from the moment at which the log gives it the leader tells this client of nobody
        // else's.
        self.pages.table.lock().mark(ino);
        let asked = Client { core: self.clone() }.wait_for_lock(ino, &lock(mode)).await;
        let wanted = match &asked {
            Ok(locked) => {
                let mut table = self.pages.table.lock();
                table.granted(self.shared.env.boot(), ino, mode, locked.session)
            }
            Err(e) => {
                if e.code == Code::Inval {
                    tracing::warn!(
                        "the metadata servers are too old to keep mappings of several mounts in order: {e}"
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

    /// Others want pages of a file, or have some from now on: returns when nothing is in work any
    /// more that was begun without the lock, and this client has no page of it, nor its lock.
    pub(crate) async fn give_pages_back(self: &Arc<Self>, ino: Ino) {
        self.pages.table.lock().wanted(ino);
        self.leave_pages(ino, false).await;
        // Pages of before it was marked, and what was held back.
        self.take_pages_back(ino).await;
        let session = self.metadata.current_session().map_or(0, |s| s.id);
        if self.shared.cfg.handover.as_ref().is_some_and(|k| k.former_session() == session)
            && self.pages.table.lock().leave_former(self.shared.env.boot(), ino, session)
        {
            // A former process of the mount may have had it.
            self.unlock_pages(ino).await;
            self.pages.table.lock().left(ino);
            self.pages.news.notify_waiters();
        }
    }

    /// As [`Core::give_pages_back`], for whoever does not use the file any more, or has use for
    /// another lock of it.
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
                    // To its end, also if the caller goes away.
                    let core = self.clone();
                    let _ = self
                        .shared
                        .env
                        .spawn(async move { core.unlock_held(ino, held.session).await })
                        .await;
                    return;
                }
            }
        }
    }

    async fn unlock_held(self: &Arc<Self>, ino: Ino, session: SessionId) {
        self.take_pages_back(ino).await;
        if let Some(inode) = self.files.live_inode(ino) {
            self.settle_writes(&inode, session).await;
        }
        self.unlock_pages(ino).await;
        self.pages.table.lock().left(ino);
        self.pages.news.notify_waiters();
    }

    async fn take_pages_back(self: &Arc<Self>, ino: Ino) {
        forgotten(self.lease_cache.give_back(ino)).await;
        if let Some(inode) = self.files.live_inode(ino) {
            self.writeback.send_held(&inode).await;
        }
    }

    /// Nothing that was written under the lock is sent again later: others may have written there
    /// since.
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
                        "pages of a file are wanted, and what was stored is not safe: {e}"
                    )
                }
            }
            sleep(PAUSE).await;
        }
    }

    async fn unlock_pages(self: &Arc<Self>, ino: Ino) {
        let lock = Lock { mode: LockType::LockUnlock, ..lock(Mode::Read) };
        let client = Client { core: self.clone() };
        // Gone on with until it succeeds, or the session is lost.
        if let Err(e) = client.give_up(ino, &lock, client.unlocking(ino, lock.owner)).await {
            tracing::debug!(ino, "giving up the lock of pages: {e}");
        }
    }

    /// A file is opened so that it can be mapped for changes: pages that were handed out for
    /// looking could be stored to from now on.
    pub(crate) async fn leave_shared_pages(self: &Arc<Self>, ino: Ino) {
        if self.pages.table.lock().has(ino, Some(Mode::Read)) {
            self.leave_pages(ino, true).await;
        }
    }

    /// Nobody has a file open any more.
    pub(crate) async fn leave_closed_pages(self: &Arc<Self>, ino: Ino) {
        if self.pages.table.lock().has(ino, None) {
            self.leave_pages(ino, true).await;
        }
    }
}
