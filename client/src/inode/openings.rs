//! Which handles of a file are open, as the metadata servers know them, and how they have this
//! client on record as a writer of it.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use strake_proto::{Ino, SessionId};

use crate::handover::{FileRecord, Handover};

/// The session in which a file was opened for writing, and the highest `writer` of the answers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Writer {
    pub session: SessionId,
    pub index: u64,
}

/// A file that this client no longer writes.
#[derive(Clone)]
pub(crate) struct Release {
    pub writer: Writer,
    pub surplus: bool,
    /// Kept until the metadata servers know of the release.
    pub kept: Vec<Arc<dyn FileRecord>>,
}

#[derive(Default)]
struct State {
    /// Open handles by the session that opened them.
    handles: BTreeMap<SessionId, usize>,
    /// The entry under which the metadata servers have this client on record as a writer, while any
    /// handle is open.
    writer: Option<Writer>,
    /// There may be bytes of this client beyond the end of the file.
    surplus: bool,
    /// The record that outlives this process, while this client may write the file.
    kept: Option<Arc<dyn FileRecord>>,
}

impl State {
    fn enlisted(&mut self, session: SessionId, index: u64) {
        if index != 0 && self.writer.is_none_or(|w| w.session != session || w.index < index) {
            self.writer = Some(Writer { session, index });
            if let Some(k) = &self.kept {
                k.set_writer(index);
            }
        }
    }

    fn release(&mut self) -> Option<Release> {
        if !self.handles.is_empty() {
            return None;
        }
        let writer = self.writer.take()?;
        let kept = self.kept.take().into_iter().collect();
        Some(Release { writer, surplus: std::mem::take(&mut self.surplus), kept })
    }
}

/// See the module.
pub(crate) struct Openings {
    ino: Ino,
    state: Mutex<State>,
}

impl Openings {
    pub fn new(ino: Ino) -> Openings {
        Openings { ino, state: Mutex::default() }
    }

    /// A handle was opened. `keep` is given for one that may write.
    pub fn opened(&self, session: SessionId, writer: u64, keep: Option<&dyn Handover>) {
        let mut s = self.state.lock();
        if s.kept.is_none() {
            s.kept = keep.and_then(|k| k.keep_file(self.ino)).map(Arc::from);
        }
        *s.handles.entry(session).or_default() += 1;
        s.enlisted(session, writer);
    }

    /// An open was answered that adds no handle. Returns what to release, if there is no handle
    /// left.
    pub fn opened_again(&self, session: SessionId, writer: u64) -> Option<Release> {
        let mut s = self.state.lock();
        s.enlisted(session, writer);
        s.release()
    }

    /// A handle is closed. Returns whether the metadata server counts it.
    pub fn closed(&self, opened_in: SessionId, now: Option<SessionId>) -> bool {
        let mut s = self.state.lock();
        // A handle that was opened in a lost session may have been moved to the present one.
        let session = if s.handles.contains_key(&opened_in) { Some(opened_in) } else { now };
        let Some(session) = session else { return false };
        let Some(n) = s.handles.get_mut(&session) else { return false };
        *n -= 1;
        if *n == 0 {
            s.handles.remove(&session);
        }
        now == Some(session)
    }

    /// What to release when the last handle is closed.
    pub fn release(&self) -> Option<Release> {
        self.state.lock().release()
    }

    /// The number of handles that the metadata servers know.
    pub fn count(&self) -> usize {
        self.state.lock().handles.values().sum()
    }

    /// The number of handles that this session has opened.
    pub fn of(&self, session: SessionId) -> usize {
        self.state.lock().handles.get(&session).copied().unwrap_or(0)
    }

    /// The number of handles that the present session does not know yet.
    pub fn strangers(&self, session: SessionId) -> usize {
        self.state.lock().handles.iter().filter(|(s, _)| **s != session).map(|(_, n)| n).sum()
    }

    /// The session has learned of `told` more handles. Returns how many of them are closed already.
    pub fn adopt(&self, session: SessionId, told: usize) -> usize {
        let (mut s, mut left) = (self.state.lock(), told);
        s.handles.retain(|of, n| {
            let known = if *of == session { 0 } else { left.min(*n) };
            (*n, left) = (*n - known, left - known);
            *n > 0
        });
        if told > left {
            *s.handles.entry(session).or_default() += told - left;
        }
        left
    }

    /// Whether there are handles, all of them from opens earlier than this one in the same session.
    pub fn are_before(&self, last: Writer) -> bool {
        let s = self.state.lock();
        !s.handles.is_empty()
            && s.writer.is_some_and(|w| w.session == last.session && w.index < last.index)
    }

    /// Whether the metadata servers have this client on record as a writer, as far as this client
    /// knows.
    pub fn is_written(&self) -> bool {
        self.state.lock().writer.is_some()
    }

    /// Whether the metadata servers have this session on record as a writer with a handle.
    pub fn is_written_in(&self, session: SessionId) -> bool {
        let s = self.state.lock();
        s.writer.is_some_and(|w| w.session == session) && s.handles.contains_key(&session)
    }

    /// There may be bytes beyond the end of the file: of a failed write, or of one while another
    /// client truncated the file.
    pub fn set_surplus(&self) {
        self.failed(true);
    }

    /// A write failed. `beyond`: it may have left bytes beyond the end of the file.
    pub fn failed(&self, beyond: bool) {
        let mut s = self.state.lock();
        s.surplus |= beyond;
        if s.surplus {
            s.kept.iter().for_each(|k| k.set_surplus());
        }
    }

    /// The lock of an append is about to be requested. The caller holds the returned record until
    /// the lock is released.
    pub fn note_end(&self) -> Option<Arc<dyn FileRecord>> {
        let kept = self.state.lock().kept.clone();
        kept.inspect(|k| k.set_ends())
    }

    /// Writes to the record that outlives this process, if there is one.
    pub fn record(&self, what: impl FnOnce(&dyn FileRecord)) {
        if let Some(k) = &self.state.lock().kept {
            what(&**k);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_handle_releases_the_writer() {
        let o = Openings::new(5);
        o.opened(1, 7, None);
        o.opened(1, 6, None);
        assert_eq!((o.count(), o.of(1), o.of(2)), (2, 2, 0));
        assert!(o.is_written() && o.is_written_in(1) && !o.is_written_in(2));
        assert!(o.are_before(Writer { session: 1, index: 8 }));
        assert!(!o.are_before(Writer { session: 1, index: 7 }), "one is from this open");
        assert!(!o.are_before(Writer { session: 2, index: 8 }));
        assert!(o.closed(1, Some(1)) && o.release().is_none());
        o.set_surplus();
        assert!(o.closed(1, Some(1)) && !o.closed(1, Some(1)));
        let r = o.release().unwrap();
        assert_eq!((r.writer, r.surplus), (Writer { session: 1, index: 7 }, true));
        assert!(o.release().is_none() && !o.is_written());
        assert!(!o.are_before(Writer { session: 1, index: 9 }), "there is no handle");
        let again = o.opened_again(1, 9).unwrap();
        assert_eq!((again.writer.index, again.surplus), (9, false));
    }

    #[test]
    fn a_new_session_learns_of_the_handles_of_a_lost_one() {
        let o = Openings::new(5);
        (0..3).for_each(|_| o.opened(1, 1, None));
        o.opened(2, 1, None);
        assert_eq!((o.strangers(2), o.strangers(1)), (3, 1));
        assert!(!o.closed(1, Some(2)), "the present session does not count it");
        assert_eq!(o.adopt(2, 3), 1, "one of them is closed already");
        assert_eq!((o.of(1), o.of(2), o.strangers(2)), (0, 3, 0));
        assert!(o.closed(1, Some(2)), "moved to the present session");
        assert!(!o.closed(1, None), "there is no session");
        assert_eq!(o.count(), 2);
    }
}
