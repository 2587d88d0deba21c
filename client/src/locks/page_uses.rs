//! Uses of files whose pages may be mapped here or on other clients: the state. See
//! `page_locks.rs`.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use parking_lot::Mutex;
use strake_proto::{Ino, SessionId};
use tokio::sync::Notify;

use super::pages::{Enter, Mode, Number, Pages, Use};
use crate::shared::Shared;

pub(crate) struct PageLocks {
    shared: Arc<Shared>,
    pub(super) table: Mutex<Pages>,
    pub(super) news: Notify,
    /// The servers do not support the lock.
    pub(super) unknown: AtomicBool,
}

/// A use of a file: while it lasts, other clients change nothing in the file and have no writable
/// page of it.
pub struct Using {
    locks: Arc<PageLocks>,
    ino: Ino,
    what: Use,
}

impl Using {
    pub(super) fn new(locks: &Arc<PageLocks>, ino: Ino, what: Use) -> Using {
        Using { locks: locks.clone(), ino, what }
    }

    /// The lock, and the session that holds it. `None`: no other client maps the file.
    pub(crate) fn lock(&self) -> Option<(Number, SessionId)> {
        match self.what {
            Use::Free => None,
            Use::Locked { number, session, .. } => Some((number, session)),
        }
    }

    /// The only session in which bytes may be written; `None`: any session.
    pub(crate) fn session(&self) -> Option<SessionId> {
        self.lock().map(|(_, session)| session)
    }

    pub(crate) fn is_sized(&self) -> bool {
        matches!(self.what, Use::Locked { sized: true, .. })
    }

    /// Ends the use. Pass the result to [`PageLocks::lasts`] to learn whether another client has
    /// changed the file since.
    pub(crate) fn over(self) -> Use {
        self.what
    }
}

impl Drop for Using {
    fn drop(&mut self) {
        let locks = &self.locks;
        locks.table.lock().ended(locks.shared.env.boot(), self.ino, self.what);
        locks.news.notify_waiters();
    }
}

impl PageLocks {
    pub fn new(shared: Arc<Shared>) -> PageLocks {
        PageLocks {
            shared,
            table: Mutex::default(),
            news: Notify::new(),
            unknown: AtomicBool::new(false),
        }
    }

    /// Whether pages of mappings are kept coherent with other clients.
    pub fn locks_pages(&self) -> bool {
        self.shared.cfg.page_locks && !self.unknown.load(Relaxed)
    }

    /// A use without the lock. `None`: other clients may have pages of the file.
    pub fn use_freely(self: &Arc<Self>, ino: Ino) -> Option<Using> {
        let mut table = self.table.lock();
        if table.is_marked(ino) {
            return None;
        }
        match table.enter(self.shared.env.boot(), ino, (Mode::Write, true), 0) {
            Enter::Begun(what) => Some(Using::new(self, ino, what)),
            _ => None,
        }
    }

    pub fn is_marked(&self, ino: Ino) -> bool {
        self.table.lock().is_marked(ino)
    }

    /// Notes that other clients have pages of the file.
    pub fn mark(&self, ino: Ino) {
        self.table.lock().mark(ino);
    }

    /// Whether no other client has changed the file since this use.
    pub fn lasts(&self, ino: Ino, what: Use) -> bool {
        self.table.lock().lasts(ino, what)
    }

    /// Notes that the size was asked for under this lock.
    pub fn sized(&self, ino: Ino, of: Number) {
        self.table.lock().sized(ino, of);
    }

    /// Whether a lock of the file is held, or is being released.
    pub fn is_mine(&self, ino: Ino) -> bool {
        self.table.lock().is_mine(ino)
    }

    /// The lock of the file that is held, or is being released, in this session.
    pub fn number(&self, ino: Ino, session: SessionId) -> Option<Number> {
        self.table.lock().number(ino, session)
    }

    /// The session in which this lock is held, if it is held.
    pub fn holds(&self, ino: Ino, number: Number) -> Option<SessionId> {
        self.table.lock().holds(ino, number)
    }
}
