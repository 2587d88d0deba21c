//! Which sessions may write which file, by the log, and which of them may keep dirty data. Rules:
//! `docs/leases.md`, "Write-back".

use std::collections::{BTreeMap, BTreeSet};

use strake_proto::{Ino, SessionId};

/// When a session was left as the only writer: a later time is a higher number.
type Since = u64;

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Writers {
    of: BTreeMap<Ino, BTreeSet<SessionId>>,
    /// How many files each session may write.
    files: BTreeMap<SessionId, usize>,
    /// Sessions that keep dirty data where they may.
    holding: BTreeSet<SessionId>,
    /// Of those, the sessions that may have dirty data of a file: each that was its only writer at
    /// some time since its last report.
    back: BTreeMap<Ino, BTreeMap<SessionId, Since>>,
    last: Since,
}

/// The sessions that may have dirty data of some files, as of a moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Holders(BTreeMap<Ino, BTreeMap<SessionId, Since>>);

impl Holders {
    pub fn are(&self, ino: Ino, session: SessionId) -> bool {
        self.0.get(&ino).is_some_and(|all| all.contains_key(&session))
    }
}

impl Writers {
    /// The table of a new leader. The state does not say which session was the only writer and
    /// when, so all that keep dirty data count.
    pub fn new(
        writers: impl IntoIterator<Item = (SessionId, Ino)>,
        holding: impl IntoIterator<Item = SessionId>,
    ) -> Writers {
        let mut w = Writers { holding: holding.into_iter().collect(), ..Writers::default() };
        for (session, ino) in writers {
            w.of.entry(ino).or_default().insert(session);
            *w.files.entry(session).or_insert(0) += 1;
            if w.holding.contains(&session) {
                w.back.entry(ino).or_default().insert(session, 0);
            }
        }
        w
    }

    /// A session may write a file from now on, or may not any more.
    pub fn record(&mut self, session: SessionId, ino: Ino, comes: bool) {
        let all = self.of.entry(ino).or_default();
        let files = self.files.entry(session).or_default();
        if comes {
            *files += usize::from(all.insert(session));
        } else {
            *files -= usize::from(all.remove(&session));
        }
        if *files == 0 {
            self.files.remove(&session);
        }
        if !comes {
            self.holds_nothing(session, ino);
        }
        let all = self.of.get(&ino);
        if all.is_some_and(BTreeSet::is_empty) {
            self.of.remove(&ino);
        } else if let Some(alone) = all.filter(|all| all.len() == 1).and_then(BTreeSet::first)
            && self.holding.contains(alone)
        {
            self.last += 1;
            self.back.entry(ino).or_default().insert(*alone, self.last);
        }
    }

    /// A session keeps dirty data where it may.
    pub fn holds_back(&mut self, session: SessionId) {
        self.holding.insert(session);
    }

    /// A session has ended. Its files are removed one by one.
    pub fn ended(&mut self, session: SessionId) {
        self.holding.remove(&session);
    }

    pub fn others(&self, session: SessionId, ino: Ino) -> impl Iterator<Item = SessionId> + '_ {
        self.of.get(&ino).into_iter().flatten().copied().filter(move |writer| *writer != session)
    }

    /// How many files a session may write.
    pub fn files(&self, session: SessionId) -> usize {
        self.files.get(&session).copied().unwrap_or(0)
    }

    /// The sessions that may have dirty data of these files now.
    pub fn holders(&self, inos: &BTreeSet<Ino>) -> Holders {
        Holders(inos.iter().filter_map(|ino| Some((*ino, self.back.get(ino)?.clone()))).collect())
    }

    /// The holders, except this session, have reported, and had forgotten the files before: they
    /// have no dirty data any more, unless one was left as the only writer since.
    pub fn have_reported(&mut self, holders: Holders, but: SessionId) {
        for (ino, all) in holders.0 {
            for (id, since) in all.into_iter().filter(|(id, _)| *id != but) {
                if self.back.get(&ino).is_some_and(|now| now.get(&id) == Some(&since)) {
                    self.holds_nothing(id, ino);
                }
            }
        }
    }

    fn holds_nothing(&mut self, session: SessionId, ino: Ino) {
        if let Some(all) = self.back.get_mut(&ino) {
            all.remove(&session);
            if all.is_empty() {
                self.back.remove(&ino);
            }
        }
    }
}
