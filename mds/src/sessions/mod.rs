//! What only the leader knows about client sessions: when each was last heard of, and what it holds
//! open. A pure table. A new leader starts with all sessions as just heard of and nothing open, and
//! clients report what they hold.

pub(crate) mod owners;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use strake_proto::{Code, Error, Ino, Result, SessionId};

/// Most sessions at the same time.
pub(crate) const MAX_SESSIONS: usize = 65_536;
/// Most inodes that one session may hold open.
pub(crate) const MAX_OPENS: usize = 1 << 20;
/// Most inodes that all sessions together may hold open; one that several hold counts for each.
pub(crate) const MAX_ALL_OPENS: usize = 1 << 23;
/// Each session may hold this many open whatever the others hold, so that some cannot shut out the
/// rest.
pub(crate) const FREE_OPENS: usize = 128;
/// For at most this many requests of a session with awaited answers it is known whether they were
/// counted.
const KEPT: usize = 4096;
/// For at most this many evicted sessions it is known why.
const KEPT_REASONS: usize = 1024;

/// Requests of a session's connection whose opens and closes were counted. The network may deliver
/// a copy of one, and a client that is told to ask again uses the same number.
#[derive(Default)]
struct Counted {
    connection: u64,
    seqs: BTreeSet<u64>,
    /// The client waits for no answer below this number.
    answered: u64,
    /// Below this number it is not known any more.
    forgotten: u64,
}

/// A file that counts too often is freed too late, one that counts too seldom too early. So when in
/// doubt, opens count and closes do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WasCounted {
    Yes,
    No,
    /// Too many are waited for: it is not known any more.
    Perhaps,
}

struct Entry {
    heard: Duration,
    epoch: u64,
    opens: BTreeMap<Ino, u32>,
    counted: Counted,
    /// Its end was proposed.
    ending: bool,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Sessions {
    entries: BTreeMap<SessionId, Entry>,
    /// How many sessions hold an inode open.
    holders: BTreeMap<Ino, u32>,
    /// The sum of `holders`.
    held: usize,
    /// Sessions that existed when this server began to lead and have not reported yet what they
    /// hold open.
    untold: BTreeSet<SessionId>,
    /// Orphans that are being freed: they cannot be opened any more.
    freeing: BTreeSet<Ino>,
    /// Orphans that no session had open, and since when that was seen.
    idle: BTreeMap<Ino, Duration>,
    /// Why sessions were evicted, for those that ask with one of them.
    why: BTreeMap<SessionId, String>,
}

fn gone(id: SessionId) -> Error {
    Error::new(Code::NoSession, format!("session {id} has ended; mount again"))
}

impl Sessions {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds a session that the namespace knows. Keeps what is known about it.
    pub(crate) fn learn(&mut self, now: Duration, id: SessionId, epoch: u64) {
        let fresh = || Entry {
            heard: now,
            epoch,
            opens: BTreeMap::new(),
            counted: Counted::default(),
            ending: false,
        };
        self.entries.entry(id).or_insert_with(fresh);
    }

    /// Adds a session that a former leader may have let open files.
    pub(crate) fn inherit(&mut self, now: Duration, id: SessionId, epoch: u64) {
        self.learn(now, id, epoch);
        self.untold.insert(id);
    }

    /// Whether everything that is open is in this table: all inherited sessions have reported what
    /// they hold, or have ended.
    pub(crate) fn all_told(&self) -> bool {
        self.untold.is_empty()
    }

    /// A session was heard of at `now`; returns its epoch. `None`: not in this table. `Overloaded`
    /// while its end is proposed: only the log decides that it has ended. If this leader is
    /// replaced before the end is in the log, the session lives. A client that was told otherwise
    /// would use it again and count its requests from 1, and all those numbers have answers
    /// already.
    pub(crate) fn heard(&mut self, now: Duration, id: SessionId) -> Result<Option<u64>> {
        match self.entries.get_mut(&id) {
            None => Ok(None),
            Some(e) if e.ending => {
                let m = format!("session {id} was silent for its term and is being evicted");
                Err(Error::new(Code::Overloaded, m))
            }
            Some(e) => {
                e.heard = e.heard.max(now);
                Ok(Some(e.epoch))
            }
        }
    }

    /// Counts all as heard of now: for a server that did not run for a while and could not listen.
    pub(crate) fn all_heard(&mut self, now: Duration) {
        for e in self.entries.values_mut() {
            e.heard = e.heard.max(now);
        }
    }

    /// Which of these sessions were not heard of for `silence`; for those of a former leader,
    /// counted from when this server began to lead.
    pub(crate) fn silent(
        &self,
        now: Duration,
        silence: Duration,
        of: BTreeSet<SessionId>,
    ) -> BTreeSet<SessionId> {
        let is = |id: &SessionId| {
            self.entries.get(id).is_some_and(|e| now.saturating_sub(e.heard) >= silence)
        };
        of.into_iter().filter(is).collect()
    }

    /// Marks sessions that were silent for `term` as ending and returns them, along with those that
    /// were marked earlier and still exist.
    pub(crate) fn expire(&mut self, now: Duration, term: Duration) -> Vec<SessionId> {
        let mut out = Vec::new();
        for (id, e) in &mut self.entries {
            e.ending |= now.saturating_sub(e.heard) >= term;
            if e.ending {
                out.push(*id);
            }
        }
        out
    }

    /// The session has ended: it has nothing open.
    pub(crate) fn remove(&mut self, id: SessionId) {
        self.untold.remove(&id);
        if let Some(e) = self.entries.remove(&id) {
            for ino in e.opens.keys() {
                self.unhold(*ino);
            }
        }
    }

    /// The session is about to be evicted for this reason.
    pub(crate) fn note_why(&mut self, id: SessionId, why: String) {
        self.why.insert(id, why);
        while self.why.len() > KEPT_REASONS {
            self.why.pop_first();
        }
    }

    /// Why a session was evicted, if that is known.
    pub(crate) fn why(&self, id: SessionId) -> Option<&str> {
        self.why.get(&id).map(String::as_str)
    }

    fn unhold(&mut self, ino: Ino) {
        if let Some(n) = self.holders.get_mut(&ino) {
            self.held -= 1;
            *n = n.saturating_sub(1);
            if *n == 0 {
                self.holders.remove(&ino);
            }
        }
    }

    /// Whether the opens and closes of request `seq` were counted on this connection; its sender
    /// waits for answers from `lowest` on. `Disconnected`: it was sent on an older connection, and
    /// everything open has been reported since.
    pub(crate) fn was_counted(
        &mut self,
        id: SessionId,
        connection: u64,
        (seq, lowest): (u64, u64),
    ) -> Result<WasCounted> {
        let e = self.entries.get_mut(&id).ok_or_else(|| gone(id))?;
        if connection == 0 || seq == 0 {
            return Ok(WasCounted::No);
        }
        if connection < e.counted.connection {
            return Err(Error::new(Code::Disconnected, "the session has a newer connection"));
        }
        if e.counted.connection != connection {
            e.counted = Counted { connection, ..Counted::default() };
        }
        let c = &mut e.counted;
        if lowest.min(seq) > c.answered {
            c.answered = lowest.min(seq);
            c.seqs = c.seqs.split_off(&c.answered);
        }
        Ok(match seq {
            _ if seq < c.answered || c.seqs.contains(&seq) => WasCounted::Yes,
            _ if seq < c.forgotten => WasCounted::Perhaps,
            _ => WasCounted::No,
        })
    }

    /// All opens and closes of the request have been counted.
    pub(crate) fn count(&mut self, id: SessionId, connection: u64, seq: u64) {
        let Some(c) = self.entries.get_mut(&id).map(|e| &mut e.counted) else { return };
        if seq == 0 || c.connection != connection || seq < c.answered.max(c.forgotten) {
            return;
        }
        c.seqs.insert(seq);
        if c.seqs.len() > KEPT
            && let Some(lowest) = c.seqs.pop_first()
        {
            c.forgotten = lowest + 1;
        }
    }

    /// One more handle. `ENOENT` for an orphan that is being freed.
    pub(crate) fn open(&mut self, id: SessionId, ino: Ino) -> Result<()> {
        if self.freeing.contains(&ino) {
            return Err(Error::new(Code::NoEnt, "the file was removed"));
        }
        let e = self.entries.get_mut(&id).ok_or_else(|| gone(id))?;
        if e.opens.len() >= MAX_OPENS && !e.opens.contains_key(&ino) {
            return Err(Error::new(
                Code::Overloaded,
                format!("session {id} holds {MAX_OPENS} files open; close some"),
            ));
        }
        if self.held >= MAX_ALL_OPENS && e.opens.len() >= FREE_OPENS && !e.opens.contains_key(&ino)
        {
            let m = format!("all sessions together hold {MAX_ALL_OPENS} files open; close some");
            return Err(Error::new(Code::Overloaded, m));
        }
        let n = e.opens.entry(ino).or_insert(0);
        *n = n.saturating_add(1);
        if *n == 1 {
            self.held += 1;
            *self.holders.entry(ino).or_insert(0) += 1;
        }
        self.idle.remove(&ino);
        Ok(())
    }

    /// One handle less; an unknown one is ignored.
    pub(crate) fn close(&mut self, id: SessionId, ino: Ino) {
        let Some(e) = self.entries.get_mut(&id) else { return };
        let Some(n) = e.opens.get_mut(&ino) else { return };
        *n -= 1;
        if *n == 0 {
            e.opens.remove(&ino);
            self.unhold(ino);
        }
    }

    /// All that a session holds open, once per handle; replaces what was known before.
    pub(crate) fn reassert(&mut self, id: SessionId, opens: &[Ino]) -> Result<()> {
        let e = self.entries.get_mut(&id).ok_or_else(|| gone(id))?;
        let had = std::mem::take(&mut e.opens);
        // Requests without an answer are not in the list: if one comes again, it counts in
        // addition.
        e.counted.seqs.clear();
        for ino in had.into_keys() {
            self.unhold(ino);
        }
        for ino in opens {
            // An inode that is being freed is lost to its holder; the others count.
            match self.open(id, *ino) {
                Err(e) if e.code != Code::NoEnt => return Err(e),
                _ => (),
            }
        }
        self.untold.remove(&id);
        Ok(())
    }

    /// Ids of all sessions in the table.
    pub(crate) fn ids(&self) -> Vec<SessionId> {
        self.entries.keys().copied().collect()
    }

    /// Inodes a session holds open, 0 for an unknown one.
    pub(crate) fn opens_of(&self, id: SessionId) -> usize {
        self.entries.get(&id).map_or(0, |e| e.opens.len())
    }
    pub(crate) fn idle_of(&self, now: Duration, id: SessionId) -> Option<Duration> {
        self.entries.get(&id).map(|e| now.saturating_sub(e.heard))
    }

    /// Returns the orphans that no session has had open for `pause`: they count as being freed from
    /// now on. An open that was being answered while the last name was removed is in the table
    /// before the pause is over.
    pub(crate) fn free(&mut self, now: Duration, orphans: &[Ino], pause: Duration) -> Vec<Ino> {
        let current: BTreeSet<Ino> = orphans.iter().copied().collect();
        self.freeing.retain(|i| current.contains(i));
        self.idle.retain(|i, _| current.contains(i));
        let mut out = Vec::new();
        for ino in current {
            if self.holders.contains_key(&ino) {
                self.idle.remove(&ino);
                continue;
            }
            let since = *self.idle.entry(ino).or_insert(now);
            if now.saturating_sub(since) >= pause {
                self.freeing.insert(ino);
                out.push(ino);
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TERM: Duration = Duration::from_secs(30);

    #[test]
    fn the_last_reasons_of_evictions_are_known() {
        let mut t = Sessions::default();
        (1..=KEPT_REASONS as u64 + 1).for_each(|id| t.note_why(id, format!("why {id}")));
        assert_eq!((t.why(1), t.why(2)), (None, Some("why 2")));
    }

    fn s(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn sessions_end_when_silent_for_a_term() {
        let mut t = Sessions::default();
        t.learn(s(0), 1, 7);
        t.learn(s(0), 2, 8);
        assert_eq!(t.heard(s(20), 1).unwrap(), Some(7));
        assert_eq!(t.heard(s(20), 3).unwrap(), None);
        assert_eq!(t.expire(s(29), TERM), Vec::<u64>::new());
        assert_eq!(t.expire(s(30), TERM), vec![2]);
        assert_eq!(t.heard(s(31), 2).unwrap_err().code, Code::Overloaded, "its end is on the way");
        assert_eq!(t.expire(s(31), TERM), vec![2], "named until it is gone");
        t.remove(2);
        let silent = |t: &Sessions, now| t.silent(s(now), s(3), BTreeSet::from([1, 2]));
        assert_eq!((silent(&t, 22), silent(&t, 23)), (BTreeSet::new(), BTreeSet::from([1])));
        assert_eq!(t.expire(s(49), TERM), Vec::<u64>::new());
        t.all_heard(s(100));
        assert_eq!(t.expire(s(101), TERM), Vec::<u64>::new());
    }

    #[test]
    fn all_is_known_when_those_of_before_have_told_or_ended() {
        let mut t = Sessions::default();
        assert!(t.all_told(), "there was nobody");
        (1..=3).for_each(|id| t.inherit(s(0), id, 1));
        t.learn(s(1), 4, 1);
        t.reassert(1, &[5]).unwrap();
        t.remove(3);
        assert!(!t.all_told(), "the second may hold anything");
        t.open(2, 6).unwrap();
        assert!(!t.all_told(), "besides this");
        t.reassert(2, &[]).unwrap();
        assert!(t.all_told(), "the fourth came later");
        t.learn(s(2), 2, 1);
        assert!(t.all_told());
    }

    #[test]
    fn orphans_are_freed_when_nobody_has_them_open() {
        let mut t = Sessions::default();
        t.learn(s(0), 1, 1);
        t.learn(s(0), 2, 1);
        t.open(1, 50).unwrap();
        t.open(1, 50).unwrap();
        t.open(2, 50).unwrap();
        assert!(t.free(s(1), &[50, 60], s(1)).is_empty());
        assert_eq!(t.free(s(2), &[50, 60], s(1)), vec![60]);
        assert_eq!(t.open(1, 60).unwrap_err().code, Code::NoEnt);
        t.close(1, 50);
        t.close(2, 50);
        t.close(2, 50);
        assert!(t.free(s(3), &[50], s(0)).is_empty(), "session 1 has one handle left");
        t.remove(1);
        assert!(t.free(s(4), &[50], s(1)).is_empty());
        t.open(2, 50).unwrap();
        t.close(2, 50);
        assert!(t.free(s(5), &[50], s(1)).is_empty(), "the pause starts anew");
        assert_eq!(t.free(s(6), &[50], s(1)), vec![50]);
        assert_eq!(t.free(s(7), &[50], s(1)), vec![50], "again, if the first attempt failed");
        assert!(t.holders.is_empty());
        t.free(s(8), &[], s(1));
        assert!(t.freeing.is_empty() && t.idle.is_empty());
    }

    #[test]
    fn the_sum_of_all_opens_is_kept_and_limited() {
        let mut t = Sessions::default();
        t.learn(s(0), 1, 1);
        t.learn(s(0), 2, 1);
        t.reassert(1, &[5, 5, 6]).unwrap();
        t.open(2, 6).unwrap();
        let sum = |t: &Sessions| t.holders.values().map(|n| *n as usize).sum::<usize>();
        assert!(t.held == 3 && sum(&t) == 3);
        t.close(1, 5);
        t.close(1, 5);
        t.close(2, 77);
        assert!(t.held == 2 && sum(&t) == 2);
        t.reassert(1, &[8]).unwrap();
        t.remove(2);
        t.remove(2);
        assert!(t.held == 1 && sum(&t) == 1);

        // As if others held the most that may be held.
        t.held = MAX_ALL_OPENS;
        let some: Vec<Ino> = (1..=FREE_OPENS as u64).collect();
        t.reassert(1, &some).unwrap();
        t.open(1, 1).unwrap();
        assert_eq!(t.open(1, 1 << 40).unwrap_err().code, Code::Overloaded, "everybody has a few");
    }

    #[test]
    fn one_session_opens_a_million_files_and_no_more() {
        let mut t = Sessions::default();
        t.learn(s(0), 1, 1);
        t.learn(s(0), 2, 1);
        (1..=MAX_OPENS as u64).for_each(|ino| t.open(1, ino).unwrap());
        let e = t.open(1, 1 << 40).unwrap_err();
        assert!(e.code == Code::Overloaded && e.message.contains("close some"), "{e:?}");
        t.open(1, 5).unwrap();
        t.open(2, 1 << 40).unwrap();
        t.close(1, 6);
        t.open(1, 1 << 40).unwrap();
        let all: Vec<Ino> = (1..=MAX_OPENS as u64 + 1).collect();
        assert_eq!(t.reassert(1, &all).unwrap_err().code, Code::Overloaded, "nor all at once");
        assert_eq!(t.opens_of(1), MAX_OPENS);
        t.remove(1);
        assert_eq!((t.held, t.holders.len()), (1, 1), "and nothing stays when it goes");
    }

    #[test]
    fn what_comes_twice_on_a_connection_counts_once() {
        use WasCounted::{No, Perhaps, Yes};
        let mut t = Sessions::default();
        t.learn(s(0), 1, 1);
        let mut comes = |connection, seq, lowest| {
            let was = t.was_counted(1, connection, (seq, lowest)).map_err(|e| e.code);
            t.count(1, connection, seq);
            was
        };
        assert_eq!([7, 5, 7, 5].map(|seq| comes(3, seq, 2)), [Ok(No), Ok(No), Ok(Yes), Ok(Yes)]);
        assert_eq!([0, 0].map(|seq| comes(3, seq, 2)), [Ok(No), Ok(No)], "without a number");
        assert_eq!(
            [7, 7].map(|seq| comes(0, seq, 2)),
            [Ok(No), Ok(No)],
            "nor one of its connection"
        );
        assert_eq!(
            [7, 7].map(|seq| comes(4, seq, 2)),
            [Ok(No), Ok(Yes)],
            "on the next one all is told anew"
        );
        assert_eq!(
            comes(3, 8, 2),
            Err(Code::Disconnected),
            "what the former one brings late is told already"
        );
        // The client does not wait for the answer of 8, which had not come: then 8 opened nothing.
        assert_eq!(comes(4, 9, 9), Ok(No));
        assert_eq!([7, 8, 9, 10].map(|seq| comes(4, seq, 7)), [Ok(Yes), Ok(Yes), Ok(Yes), Ok(No)]);
        // More than are remembered.
        let last = 12 + KEPT as u64;
        assert!((12..last).all(|seq| comes(4, seq, 9) == Ok(No)));
        assert_eq!([9, 10, 11].map(|seq| comes(4, seq, 9)), [Ok(Perhaps), Ok(Perhaps), Ok(No)]);
        assert_eq!([last - 1, last].map(|seq| comes(4, seq, 9)), [Ok(Yes), Ok(No)]);
        assert_eq!(t.was_counted(9, 4, (1, 1)).unwrap_err().code, Code::NoSession);
    }

    #[test]
    fn what_is_not_counted_yet_when_all_is_told_anew_counts_on_top() {
        let mut t = Sessions::default();
        t.learn(s(0), 1, 1);
        for (seq, ino) in [(5, 50), (6, 60)] {
            assert_eq!(t.was_counted(1, 3, (seq, 5)).unwrap(), WasCounted::No);
            t.open(1, ino).unwrap();
            t.count(1, 3, seq);
        }
        // 5 is answered; the answer of 6 is on its way, or its sender is to ask again.
        t.reassert(1, &[50]).unwrap();
        assert_eq!(t.was_counted(1, 3, (6, 6)).unwrap(), WasCounted::No);
        assert_eq!(
            t.was_counted(1, 3, (5, 6)).unwrap(),
            WasCounted::Yes,
            "a late copy of what is in the list"
        );
    }

    #[test]
    fn reasserted_opens_replace_what_was_known() {
        let mut t = Sessions::default();
        t.learn(s(0), 1, 1);
        t.open(1, 5).unwrap();
        t.reassert(1, &[6, 6, 7]).unwrap();
        assert_eq!(t.opens_of(1), 2);
        assert_eq!(t.holders.keys().copied().collect::<Vec<_>>(), vec![6, 7]);
        t.close(1, 6);
        t.close(1, 7);
        t.close(1, 99);
        assert_eq!(t.holders.keys().copied().collect::<Vec<_>>(), vec![6]);
        assert_eq!(t.reassert(9, &[]).unwrap_err().code, Code::NoSession);
        assert_eq!(t.open(9, 1).unwrap_err().code, Code::NoSession);
    }
}
