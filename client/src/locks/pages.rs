//! Whether this client may have pages of memory mappings of a file, or change a file of which other
//! clients may have pages: the pure part of "Between nodes" in `docs/mappings.md`.
//!
//! There is no entry for a file that no other client maps, and every use is free. Once a file is
//! **marked**, every use needs the lock of its pages. One client can have it for changes, or
//! several for reading.

use std::{collections::BTreeMap, time::Duration};

use strake_proto::{Ino, SessionId};

use crate::rows::Paged;

/// The lock is kept after its first use for half as long as it took to get it, so that a client
/// that waited for it makes progress. Two clients that contend use it about as long as passing it
/// on takes. These are the lower and upper limits.
const HOLD: Duration = Duration::from_millis(10);
const LONGEST_HOLD: Duration = Duration::from_millis(100);
/// How long an unused lock is kept: the requester is about to use it.
const UNUSED: Duration = Duration::from_millis(200);
/// Above this number of marked files, all files count as marked.
const MOST_MARKED: usize = 65_536;

/// The purpose of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Mode {
    /// For pages that cannot be stored to.
    Read,
    /// For pages that can be stored to, and for other changes.
    Write,
}

/// Number of one acquisition of a lock: never used twice.
pub type Number = u64;
/// The number of a lock that an earlier process had.
const FORMER: Number = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Held {
    pub mode: Mode,
    pub session: SessionId,
    pub number: Number,
    since: Duration,
    hold: Duration,
    /// The end of its first use.
    used: Option<Duration>,
    /// The size of the file is known as it is under this lock.
    sized: bool,
}

impl Held {
    fn until(&self) -> Duration {
        self.used.map_or(self.since + UNUSED, |at| at + self.hold)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Lock {
    #[default]
    None,
    /// The lock is requested. `wanted`: another client wanted it meanwhile.
    Asked {
        since: Duration,
        wanted: bool,
    },
    Held(Held),
    /// Pages are taken back, then the lock is released.
    Leaving(Held),
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct File {
    marked: bool,
    /// Number of uses without the lock.
    free: usize,
    /// Number of uses under the lock.
    users: usize,
    /// How often pages of it that programs may have stored to are being taken back now.
    taking_back: usize,
    lock: Lock,
}

/// A use of a file, from its beginning to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Use {
    /// Without the lock: no other client maps the file.
    Free,
    Locked {
        number: Number,
        session: SessionId,
        sized: bool,
    },
}

/// What to do before a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enter {
    Begun(Use),
    /// Request the lock; then call [`Pages::granted`] or [`Pages::refused`].
    Ask,
    /// Release the lock that is held, and call again.
    GiveUp,
    /// Call again when something has changed.
    Wait,
}

/// What to do to release the lock of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// There is no lock.
    Done,
    /// Not yet: call again when something has changed, or at this time.
    Wait(Option<Duration>),
    /// Take the pages back, unlock, then call [`Pages::left`].
    Go(Held),
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Pages {
    files: BTreeMap<Ino, File>,
    last: Number,
    marked: usize,
    all_marked: bool,
}

impl Pages {
    fn is_file_marked(&self, ino: Ino) -> bool {
        self.all_marked || self.files.get(&ino).is_some_and(|f| f.marked)
    }

    fn tidy(&mut self, ino: Ino) {
        if self.files.get(&ino).is_some_and(|f| *f == File::default()) {
            self.files.remove(&ino);
        }
    }

    /// Other clients have pages of this file, or want some. The mark stays as long as this client
    /// lives, so the leader does not have to send it twice.
    pub fn mark(&mut self, ino: Ino) {
        if !self.is_file_marked(ino) {
            Paged::Marked.taken();
            self.files.entry(ino).or_default().marked = true;
            self.marked += 1;
            self.all_marked = self.marked >= MOST_MARKED;
        }
    }

    /// The servers do not support the lock of pages.
    pub fn unmark(&mut self, ino: Ino) {
        if let Some(f) = self.files.get_mut(&ino).filter(|f| f.marked) {
            f.marked = false;
            self.marked -= 1;
        }
    }

    pub fn is_marked(&self, ino: Ino) -> bool {
        self.is_file_marked(ino)
    }

    // --- uses ---

    /// Bytes of a file are to be changed, or pages of it handed out. `free`: the lock is not needed
    /// while the file is not marked.
    pub fn enter(
        &mut self,
        now: Duration,
        ino: Ino,
        (mode, free): (Mode, bool),
        session: SessionId,
    ) -> Enter {
        let marked = self.is_file_marked(ino);
        let f = self.files.entry(ino).or_default();
        if free && !marked {
            Paged::Free.taken();
            f.free += 1;
            return Enter::Begun(Use::Free);
        }
        if let Lock::Held(held) = f.lock
            && held.session != session
        {
            // The lock was lost with its session.
            Paged::Lost.taken();
            (f.lock, f.users) = (Lock::None, 0);
        }
        match f.lock {
            Lock::None => {
                Paged::Asked.taken();
                f.lock = Lock::Asked { since: now, wanted: false };
                Enter::Ask
            }
            Lock::Asked { .. } | Lock::Leaving(_) => {
                Paged::Waited.taken();
                Enter::Wait
            }
            Lock::Held(held) if held.mode < mode => {
                Paged::Exchanged.taken();
                Enter::GiveUp
            }
            Lock::Held(Held { number, session, sized, .. }) => {
                Paged::Used.taken();
                f.users += 1;
                Enter::Begun(Use::Locked { number, session, sized })
            }
        }
    }

    pub fn ended(&mut self, now: Duration, ino: Ino, what: Use) {
        let Some(f) = self.files.get_mut(&ino) else { return };
        match (what, &mut f.lock) {
            (Use::Free, _) => f.free -= 1,
            (Use::Locked { number, .. }, Lock::Held(held)) if held.number == number => {
                f.users -= 1;
                held.used.get_or_insert(now);
            }
            // A use of a lock that was lost with its session.
            (Use::Locked { .. }, _) => {}
        }
        self.tidy(ino);
    }

    /// The size was asked for under this lock: from now on only this client changes it.
    pub fn sized(&mut self, ino: Ino, of: Number) {
        if let Some(File { lock: Lock::Held(held), .. }) = self.files.get_mut(&ino)
            && held.number == of
        {
            held.sized = true;
        }
    }

    /// Whether no other client has changed the file since this use.
    pub fn lasts(&self, ino: Ino, what: Use) -> bool {
        match what {
            Use::Free => !self.is_file_marked(ino),
            Use::Locked { number, .. } => self.holds(ino, number).is_some(),
        }
    }

    /// The session in which this lock is held, if it is held.
    pub fn holds(&self, ino: Ino, number: Number) -> Option<SessionId> {
        match self.files.get(&ino)?.lock {
            Lock::Held(held) | Lock::Leaving(held) => {
                Some(held.session).filter(|_| held.number == number)
            }
            Lock::None | Lock::Asked { .. } => None,
        }
    }

    /// The lock that is held, or is being released, in this session. Not one of an earlier process.
    pub fn number(&self, ino: Ino, session: SessionId) -> Option<Number> {
        match self.files.get(&ino)?.lock {
            Lock::Held(held) | Lock::Leaving(held) => {
                Some(held.number).filter(|number| *number != FORMER && held.session == session)
            }
            Lock::None | Lock::Asked { .. } => None,
        }
    }

    /// Whether no other client can change the file.
    pub fn is_mine(&self, ino: Ino) -> bool {
        matches!(self.files.get(&ino).map(|f| f.lock), Some(Lock::Held(_) | Lock::Leaving(_)))
    }

    /// Whether any lock is held, in this mode if one is given.
    pub fn has(&self, ino: Ino, mode: Option<Mode>) -> bool {
        let lock = self.files.get(&ino).map(|f| f.lock);
        matches!(lock, Some(Lock::Held(held)) if mode.is_none_or(|m| m == held.mode))
    }

    // --- pages ---

    /// Begins to take back pages that programs may have stored to. Ends with [`Pages::took_back`].
    pub fn takes_back(&mut self, ino: Ino) {
        self.files.entry(ino).or_default().taking_back += 1;
    }

    pub fn took_back(&mut self, ino: Ino) {
        if let Some(f) = self.files.get_mut(&ino) {
            f.taking_back -= 1;
        }
        self.tidy(ino);
    }

    /// Whether pages that programs may have stored to are being taken back from the kernel, or are
    /// about to be. Until that is done no other client has pages of the file.
    pub fn is_taking_back(&self, ino: Ino) -> bool {
        let is_left = |held: Held| held.mode == Mode::Write && held.number != FORMER;
        self.files.get(&ino).is_some_and(|f| {
            f.taking_back > 0 || matches!(f.lock, Lock::Leaving(held) if is_left(held))
        })
    }

    // --- the lock ---

    /// The requested lock is granted. Returns whether another client wants it already.
    pub fn granted(&mut self, now: Duration, ino: Ino, mode: Mode, session: SessionId) -> bool {
        Paged::Granted.taken();
        self.last += 1;
        let f = self.files.entry(ino).or_default();
        let (asked, wanted) = match f.lock {
            Lock::Asked { since, wanted } => (since, wanted),
            _ => (now, false),
        };
        let hold = (now.saturating_sub(asked) / 2).clamp(HOLD, LONGEST_HOLD);
        let held =
            Held { mode, session, number: self.last, since: now, hold, used: None, sized: false };
        (f.lock, f.users) = (Lock::Held(held), 0);
        wanted
    }

    pub fn refused(&mut self, ino: Ino) {
        if let Some(f) = self.files.get_mut(&ino) {
            f.lock = Lock::None;
        }
        self.tidy(ino);
    }

    /// Another client wants pages of the file, or has some from now on.
    pub fn wanted(&mut self, ino: Ino) {
        self.mark(ino);
        if let Some(File { lock: Lock::Asked { wanted, .. }, .. }) = self.files.get_mut(&ino) {
            Paged::WantedEarly.taken();
            *wanted = true;
        }
    }

    /// The lock is to be released, and no use without the lock may stay in progress. `at_once`:
    /// this client itself wants that.
    pub fn leave(&mut self, now: Duration, ino: Ino, at_once: bool) -> Leave {
        let Some(f) = self.files.get_mut(&ino) else { return Leave::Done };
        if f.free > 0 {
            Paged::FreeEnds.taken();
            return Leave::Wait(None);
        }
        match f.lock {
            Lock::None | Lock::Asked { .. } => Leave::Done,
            Lock::Leaving(_) => Leave::Wait(None),
            Lock::Held(_) if f.users > 0 => {
                Paged::UsersEnd.taken();
                Leave::Wait(None)
            }
            Lock::Held(held) if !at_once && now < held.until() => {
                Paged::Kept.taken();
                Leave::Wait(Some(held.until()))
            }
            Lock::Held(held) => {
                Paged::Left.taken();
                f.lock = Lock::Leaving(held);
                Leave::Go(held)
            }
        }
    }

    /// A lock that an earlier process had in this session is to be released, unless this process
    /// requests or holds it. Then call [`Pages::left`].
    pub fn leave_former(&mut self, now: Duration, ino: Ino, session: SessionId) -> bool {
        let f = self.files.entry(ino).or_default();
        let none = f.lock == Lock::None;
        if none {
            let mode = Mode::Write;
            f.lock = Lock::Leaving(Held {
                mode,
                session,
                number: FORMER,
                since: now,
                hold: HOLD,
                used: None,
                sized: false,
            });
        }
        none
    }

    /// The lock is released.
    pub fn left(&mut self, ino: Ino) {
        if let Some(f) = self.files.get_mut(&ino)
            && matches!(f.lock, Lock::Leaving(_))
        {
            f.lock = Lock::None;
        }
        self.tidy(ino);
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
