//! What a client may answer from memory: what it was told under leases, and when that becomes void.
//! A pure table, see `docs/leases.md`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bytes::Bytes;
use strake_proto::Ino;

use crate::rows::Holder;

/// The time of an event, as a number in the order of this table's events. They are counted while
/// requests are in progress.
type Event = u64;

/// A request in progress. Must be given back by [`Table::end`].
#[derive(Debug, PartialEq, Eq, Hash, Clone, Copy, PartialOrd, Ord)]
pub struct Token(Event);

/// Inodes whose names a change may remove. Their leases are given back with the change, so this
/// client is not told of later changes by others, and all copies must be forgotten before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Dropped {
    /// The inodes.
    pub inos: Vec<Ino>,
    /// Whether names in one of them may have been given out.
    pub names: bool,
}

/// What an own request may change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Change {
    /// Inodes of which everything may change.
    pub inodes: Vec<Ino>,
    /// Names in directories; the attributes of the directories change as well.
    pub names: Vec<(Ino, Bytes)>,
}

/// What the answer to an own change says.
#[derive(Clone, Debug)]
pub struct Told<A> {
    /// Attributes of inodes.
    pub attrs: Vec<(Ino, A)>,
    /// Inodes that names refer to.
    pub names: Vec<Name>,
    /// Files, and the users that were allowed to open them for reading.
    pub openers: Vec<(Ino, u64)>,
}

/// The inode that a name refers to, as it was told to a user who may search the directory.
#[derive(Clone, Debug)]
pub struct Name {
    /// The directory.
    pub dir: Ino,
    /// The name in it.
    pub name: Bytes,
    /// `None`: there is no such name.
    pub to: Option<Ino>,
    /// The user that asked, if the answer shows that this user may search the directory.
    pub searcher: Option<u64>,
}

/// What is known of an inode.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Known<A> {
    attr: Option<A>,
    /// For a directory: the inode that a name refers to; `None`: there is no such name.
    names: BTreeMap<Bytes, Option<Ino>>,
    /// Users that have looked up names here and were allowed to.
    searchers: BTreeSet<u64>,
    /// Users that have opened it for reading and were allowed to.
    openers: BTreeSet<u64>,
}

impl<A> Default for Known<A> {
    fn default() -> Known<A> {
        Known {
            attr: None,
            names: BTreeMap::new(),
            searchers: BTreeSet::new(),
            openers: BTreeSet::new(),
        }
    }
}

/// What became void while requests are in progress: their answers may be older.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Voids {
    all: Event,
    /// All requests in progress began at this event or later.
    forgotten: Event,
    inodes: BTreeMap<Ino, Event>,
    attrs: BTreeMap<Ino, Event>,
    names: BTreeMap<(Ino, Bytes), Event>,
}

/// See the module. `A`: attributes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Table<A> {
    /// When the leases are over; `None`: there are none.
    until: Option<Duration>,
    now: Event,
    voids: Voids,
    /// Requests in progress, by the event at which they began.
    requests: BTreeMap<Event, u32>,
    /// Own changes in progress, with their number.
    changing: BTreeMap<Ino, u32>,
    changing_names: BTreeMap<(Ino, Bytes), u32>,
    known: BTreeMap<Ino, Known<A>>,
    /// Number of names known in all directories, and whether names were dropped because there were
    /// too many.
    names: usize,
    forgot_names: bool,
    /// Counts how often a file's known openers were forgotten.
    forgot_openers: u64,
}

impl<A> Default for Table<A> {
    fn default() -> Table<A> {
        Table {
            until: None,
            now: 0,
            voids: Voids::default(),
            requests: BTreeMap::new(),
            changing: BTreeMap::new(),
            changing_names: BTreeMap::new(),
            known: BTreeMap::new(),
            names: 0,
            forgot_names: false,
            forgot_openers: 0,
        }
    }
}

impl<A> Table<A> {
    /// Whether there are leases.
    pub fn lives(&self, now: Duration) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// All inodes about which anything is known.
    pub fn known(&self) -> Vec<Ino> {
        self.known.keys().copied().collect()
    }

    /// When the leases end.
    pub fn until(&self) -> Option<Duration> {
        self.until
    }

    /// A renewal that was sent at `sent` is answered: the leases live for `term` from then.
    pub fn renewed(&mut self, now: Duration, sent: Duration, term: Duration) {
        self.expire(now);
        // Clocks may run at rates that differ by a tenth.
        let until = sent + term / 10 * 9;
        if self.until.is_none() {
            // Void what was requested while there were no leases: its lease may be over at the
            // leader, and its recall forgotten.
            Holder::Anew.taken();
            self.void_all();
        } else {
            Holder::Renewed.taken();
        }
        self.until = Some(self.until.map_or(until, |u| u.max(until)));
        self.expire(now);
    }

    /// Voids everything if the leases are over. Returns whether they were, and something was known.
    pub fn expire(&mut self, now: Duration) -> bool {
        if self.until.is_none() || self.lives(now) {
            return false;
        }
        Holder::Over.taken();
        self.until = None;
        let knew = !self.known.is_empty();
        self.void_all();
        knew
    }

    /// A new connection is made, on which hello has not been said yet.
    pub fn connected(&mut self) {
        Holder::Connected.taken();
        self.until = None;
        self.void_all();
        // Given-up changes were sent on an earlier connection, and no longer count as this
        // session's own.
        self.changing.retain(|_, n| {
            *n &= !GIVEN_UP;
            *n > 0
        });
        self.changing_names.retain(|_, n| {
            *n &= !GIVEN_UP;
            *n > 0
        });
    }

    /// A request is about to be sent.
    pub fn begin(&mut self) -> Token {
        *self.requests.entry(self.now).or_insert(0) += 1;
        Token(self.now)
    }

    /// A request was answered and everything in the answer has been kept, or it was given up.
    pub fn end(&mut self, token: Token) {
        if let Some(n) = self.requests.get_mut(&token.0) {
            *n -= 1;
            if *n == 0 {
                self.requests.remove(&token.0);
            }
        }
        // Drop what became void before the oldest request in progress began: it is not needed any
        // more.
        match self.requests.keys().next().copied() {
            None => (self.now, self.voids) = (0, Voids::default()),
            Some(oldest) if oldest > self.voids.forgotten => {
                self.voids.forgotten = oldest;
                self.voids.inodes.retain(|_, at| *at > oldest);
                self.voids.attrs.retain(|_, at| *at > oldest);
                self.voids.names.retain(|_, at| *at > oldest);
            }
            Some(_) => {}
        }
    }

    /// Whether an answer that was granted for `ino` is still true, except for what own changes
    /// touch.
    fn is_valid(&self, now: Duration, token: Token, ino: Ino) -> bool {
        let voided = self.voids.inodes.get(&ino).is_some_and(|at| *at > token.0);
        self.lives(now) && self.voids.all <= token.0 && !voided
    }

    fn stands(&self, now: Duration, token: Token, ino: Ino) -> bool {
        self.is_valid(now, token, ino) && !self.changing.contains_key(&ino)
    }

    fn changes_names_in(&self, dir: Ino) -> bool {
        self.changing_names.range((dir, Bytes::new())..).next().is_some_and(|((d, _), _)| *d == dir)
    }

    /// Keeps attributes that were granted with the answer to a request. Returns false if they may
    /// be outdated already.
    pub fn keep_attr(&mut self, now: Duration, token: Token, ino: Ino, attr: A) -> bool {
        let voided = self.voids.attrs.get(&ino).is_some_and(|at| *at > token.0);
        if voided || self.changes_names_in(ino) || !self.stands(now, token, ino) {
            Holder::NotKept.taken();
            return false;
        }
        Holder::Kept.taken();
        self.known.entry(ino).or_default().attr = Some(attr);
        true
    }

    /// Keeps the inode that a name refers to, under the same conditions as [`Table::keep_attr`].
    pub fn keep_name(&mut self, now: Duration, token: Token, n: Name) -> bool {
        let key = (n.dir, n.name.clone());
        let voided = self.voids.names.get(&key).is_some_and(|at| *at > token.0);
        if voided || self.changing_names.contains_key(&key) || !self.stands(now, token, n.dir) {
            return false;
        }
        self.put_name(n);
        true
    }

    fn put_name(&mut self, n: Name) {
        if self.names >= MOST_NAMES {
            // Knowing less is always safe.
            self.known.values_mut().for_each(|k| k.names.clear());
            (self.names, self.forgot_names) = (0, true);
        }
        let known = self.known.entry(n.dir).or_default();
        self.names += usize::from(known.names.insert(n.name, n.to).is_none());
        known.searchers.extend(n.searcher);
    }

    /// Keeps that a user was allowed to open a file for reading. Returns false if that may be
    /// outdated already.
    pub fn keep_opener(&mut self, now: Duration, token: Token, ino: Ino, opener: u64) -> bool {
        let stands = self.stands(now, token, ino);
        if stands {
            self.known.entry(ino).or_default().openers.insert(opener);
        }
        stands
    }

    /// The attributes, for a user who has opened the file for reading before: the permission still
    /// holds.
    pub fn open(&self, now: Duration, ino: Ino, opener: u64) -> Option<&A> {
        self.known
            .get(&ino)
            .filter(|k| self.lives(now) && k.openers.contains(&opener))?
            .attr
            .as_ref()
    }

    /// Whether any user is known to be allowed to open the file.
    pub fn has_openers(&self, ino: Ino) -> bool {
        self.known.get(&ino).is_some_and(|k| !k.openers.is_empty())
    }

    /// How often a file's known openers were forgotten.
    pub fn forgot_openers(&self) -> u64 {
        self.forgot_openers
    }

    /// Attributes, if they are known.
    pub fn attr(&self, now: Duration, ino: Ino) -> Option<&A> {
        self.known.get(&ino).filter(|_| self.lives(now))?.attr.as_ref()
    }

    /// As [`Table::name`], for a caller that checks the search permission itself.
    pub fn name_for_all(&self, now: Duration, dir: Ino, name: &[u8]) -> Option<Option<Ino>> {
        self.known.get(&dir).filter(|_| self.lives(now))?.names.get(name).copied()
    }

    /// The inode that a name refers to, if known; `Some(None)`: there is no such name.
    pub fn name(&self, now: Duration, dir: Ino, name: &[u8], searcher: u64) -> Option<Option<Ino>> {
        let known =
            self.known.get(&dir).filter(|k| self.lives(now) && k.searchers.contains(&searcher))?;
        known.names.get(name).copied()
    }

    /// The inode was recalled. Returns whether names in it may have been given out.
    pub fn void(&mut self, ino: Ino) -> bool {
        let known = self.known.remove(&ino);
        let names = known.as_ref().map_or(0, |k| k.names.len());
        self.names -= names;
        self.forgot_openers += u64::from(known.is_some_and(|k| !k.openers.is_empty()));
        if !self.requests.is_empty() {
            self.now += 1;
            self.voids.inodes.insert(ino, self.now);
            self.bound_voids();
        }
        names > 0 || self.forgot_names
    }

    /// Limits the memory: above the limit, no answer of a request in progress is kept.
    fn bound_voids(&mut self) {
        let v = &mut self.voids;
        if v.inodes.len() + v.attrs.len() + v.names.len() > MOST_VOIDS {
            *v = Voids { all: self.now, forgotten: v.forgotten, ..Default::default() };
        }
    }

    fn void_all(&mut self) {
        self.known.clear();
        self.forgot_openers += 1;
        (self.names, self.forgot_names) = (0, false);
        if !self.requests.is_empty() {
            self.now += 1;
            self.voids =
                Voids { all: self.now, forgotten: self.voids.forgotten, ..Default::default() };
        }
    }

    /// A request that changes something is about to be sent. Returns what it may change, to be
    /// given to [`Table::change_ends`], and the inodes whose leases it gives back.
    pub fn change_begins(&mut self, mut change: Change) -> (Change, Dropped) {
        if change.names.is_empty() {
            Holder::OwnInode.taken()
        } else {
            Holder::OwnName.taken()
        }
        let behind =
            |(dir, name): &(Ino, Bytes)| self.known.get(dir)?.names.get(name).copied().flatten();
        let mut inos: Vec<Ino> = change.names.iter().filter_map(behind).collect();
        inos.retain(|ino| !change.inodes.contains(ino));
        let mut names = false;
        for ino in &inos {
            names |= self.void(*ino);
        }
        change.inodes.extend(&inos);
        self.void_change(&change);
        for ino in &change.inodes {
            *self.changing.entry(*ino).or_insert(0) += 1;
        }
        for name in &change.names {
            *self.changing_names.entry(name.clone()).or_insert(0) += 1;
        }
        (change, Dropped { inos, names })
    }

    /// The change was answered. `told`: what the granted answer says about the new state. It is
    /// kept where nothing else has changed since the request's token was taken, which was after
    /// [`Table::change_begins`].
    pub fn change_answered(&mut self, now: Duration, token: Token, change: &Change, told: Told<A>) {
        let since = |at: Option<&Event>| at.is_some_and(|at| *at > token.0);
        let alone = |ino: &Ino| {
            let in_work = self.changing.get(ino).copied().unwrap_or(0);
            self.is_valid(now, token, *ino) && in_work == u32::from(change.inodes.contains(ino))
        };
        let told_of = told.attrs.len() + told.names.len();
        let attrs = told.attrs.into_iter();
        let attrs = attrs.filter(|(i, _)| {
            alone(i) && !since(self.voids.attrs.get(i)) && !self.changes_names_in(*i)
        });
        let attrs: Vec<_> = attrs.collect();
        let names = told.names.into_iter().filter(|n| {
            let key = (n.dir, n.name.clone());
            let in_work = self.changing_names.get(&key).copied().unwrap_or(0);
            alone(&n.dir)
                && !since(self.voids.names.get(&key))
                && in_work == u32::from(change.names.contains(&key))
        });
        let names: Vec<_> = names.collect();
        if !attrs.is_empty() || !names.is_empty() {
            Holder::OwnKept.taken();
        }
        if attrs.len() + names.len() < told_of {
            Holder::OwnNotKept.taken();
        }
        self.change_ends(change, true);
        for (ino, attr) in attrs {
            self.known.entry(ino).or_default().attr = Some(attr);
        }
        names.into_iter().for_each(|n| self.put_name(n));
    }

    /// The change was answered, or given up. A change that was given up may still run, so what it
    /// may change is not kept until there is a new connection.
    pub fn change_ends(&mut self, change: &Change, answered: bool) {
        if !answered {
            Holder::GivenUp.taken();
        }
        self.void_change(change);
        let less = |n: &mut u32| {
            *n = (*n - 1) | if answered { 0 } else { GIVEN_UP };
            *n > 0
        };
        for ino in &change.inodes {
            if self.changing.get_mut(ino).is_some_and(|n| !less(n)) {
                self.changing.remove(ino);
            }
        }
        for name in &change.names {
            if self.changing_names.get_mut(name).is_some_and(|n| !less(n)) {
                self.changing_names.remove(name);
            }
        }
    }

    fn void_change(&mut self, change: &Change) {
        for ino in &change.inodes {
            self.void(*ino);
        }
        let asked = !self.requests.is_empty();
        self.now += u64::from(asked);
        for (dir, name) in &change.names {
            if let Some(k) = self.known.get_mut(dir) {
                k.attr = None;
                self.names -= usize::from(k.names.remove(name).is_some());
            }
            if asked {
                self.voids.attrs.insert(*dir, self.now);
                self.voids.names.insert((*dir, name.clone()), self.now);
                self.bound_voids();
            }
        }
    }
}

/// Most names known at a time. The leader limits the number of inodes, by the leases it grants.
const MOST_NAMES: usize = 1 << 20;
/// See [`Table::bound_voids`].
const MOST_VOIDS: usize = 4096;
/// A bit in a count of changes: one of them was given up.
const GIVEN_UP: u32 = 1 << 31;

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: Ino = 1;
    const FILE: Ino = 2;
    const TERM: Duration = Duration::from_secs(10);
    const NAME: Bytes = Bytes::from_static(b"n");

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn table() -> Table<u8> {
        let mut t = Table::default();
        t.connected();
        t.renewed(at(0), at(0), TERM);
        t
    }

    fn found(name: &Bytes, to: Option<Ino>, searcher: u64) -> Name {
        Name { dir: DIR, name: name.clone(), to, searcher: Some(searcher) }
    }

    fn of_name() -> Change {
        Change { inodes: vec![], names: vec![(DIR, NAME)] }
    }

    #[test]
    fn what_was_granted_is_known_until_the_term_is_over() {
        let mut t = table();
        let token = t.begin();
        assert!(
            t.keep_attr(at(1), token, FILE, 7)
                && t.keep_name(at(1), token, found(&NAME, Some(FILE), 5))
        );
        t.end(token);
        assert_eq!(
            (t.attr(at(8), FILE), t.name(at(8), DIR, b"n", 5)),
            (Some(&7), Some(Some(FILE)))
        );
        assert_eq!(t.name(at(8), DIR, b"n", 6), None, "another may not be allowed to search");
        assert_eq!(t.name(at(8), DIR, b"m", 5), None);
        assert_eq!(
            (t.attr(at(9), FILE), t.name(at(9), DIR, b"n", 5)),
            (None, None),
            "0.9 of the term"
        );
        assert!(t.expire(at(9)) && !t.expire(at(9)));
        t.renewed(at(10), at(10), TERM);
        assert_eq!(t.attr(at(10), FILE), None, "voided for good");
    }

    #[test]
    fn a_renewal_answered_after_the_term_does_not_bring_anything_back() {
        let mut t = table();
        let token = t.begin();
        t.keep_attr(at(1), token, FILE, 7);
        // Sent in time, answered too late: the leader may have let other clients change the file
        // meanwhile.
        t.renewed(at(9), at(5), TERM);
        assert!(t.lives(at(9)) && t.attr(at(9), FILE).is_none());
        assert!(!t.keep_attr(at(9), token, FILE, 7), "asked in the former term");
    }

    #[test]
    fn what_was_asked_for_between_two_terms_is_not_kept() {
        let mut t = table();
        assert!(t.expire(at(9)) || !t.lives(at(9)));
        let token = t.begin();
        t.renewed(at(10), at(10), TERM);
        assert!(!t.keep_attr(at(10), token, FILE, 7));
        let token = t.begin();
        assert!(t.keep_attr(at(10), token, FILE, 7));
    }

    #[test]
    fn what_was_voided_since_a_request_began_is_not_kept() {
        let mut t = table();
        let old = t.begin();
        t.void(FILE);
        let new = t.begin();
        assert!(
            !t.keep_attr(at(0), old, FILE, 1)
                && t.keep_attr(at(0), old, DIR, 1)
                && t.keep_attr(at(0), new, FILE, 2)
        );
        t.void(FILE);
        assert_eq!(t.attr(at(0), FILE), None);
        t.end(old);
        assert!(!t.keep_attr(at(0), new, FILE, 2), "remembered as long as anybody asks");
        t.end(new);
        assert!(t.voids.inodes.is_empty());
    }

    #[test]
    fn an_own_change_keeps_other_names() {
        let mut t = table();
        let other = Bytes::from_static(b"m");
        let token = t.begin();
        for name in [&NAME, &other] {
            t.keep_name(at(0), token, found(name, Some(FILE), 0));
        }
        t.keep_attr(at(0), token, DIR, 1);
        t.keep_attr(at(0), token, FILE, 1);
        t.end(token);
        let (change, Dropped { inos: dropped, .. }) = t.change_begins(of_name());
        assert_eq!(dropped, [FILE]);
        let during = t.begin();
        assert_eq!(
            (t.name(at(0), DIR, b"n", 0), t.name(at(0), DIR, b"m", 0)),
            (None, Some(Some(FILE)))
        );
        assert_eq!((t.attr(at(0), DIR), t.attr(at(0), FILE)), (None, None));
        assert!(!t.keep_attr(at(0), during, DIR, 1) && !t.keep_attr(at(0), during, FILE, 1));
        assert!(
            !t.keep_name(at(0), during, found(&NAME, None, 0))
                && t.keep_name(at(0), during, found(&other, None, 0))
        );
        t.change_ends(&change, true);
        assert!(
            !t.keep_attr(at(0), during, DIR, 1)
                && !t.keep_name(at(0), during, found(&NAME, None, 0))
        );
        let after = t.begin();
        assert!(
            t.keep_attr(at(0), after, DIR, 2) && t.keep_name(at(0), after, found(&NAME, None, 0))
        );
    }

    #[test]
    fn a_change_that_was_given_up_may_run_until_there_is_another_connection() {
        let mut t = table();
        let (one, _) = t.change_begins(of_name());
        let (two, _) = t.change_begins(of_name());
        t.change_ends(&one, false);
        t.change_ends(&two, true);
        let token = t.begin();
        assert!(!t.keep_name(at(0), token, found(&NAME, None, 0)));
        let (three, _) = t.change_begins(Change { inodes: vec![DIR], names: vec![] });
        t.connected();
        t.renewed(at(0), at(0), TERM);
        let token = t.begin();
        assert!(!t.keep_name(at(0), token, found(&NAME, None, 0)), "this one is still under way");
        t.change_ends(&three, true);
        let token = t.begin();
        assert!(
            t.keep_name(at(0), token, found(&NAME, None, 0))
                && t.changing.is_empty()
                && t.changing_names.is_empty()
        );
    }

    #[test]
    fn what_is_remembered_of_voids_is_bounded() {
        let mut t = table();
        let token = t.begin();
        for ino in 10..10 + 2 * MOST_VOIDS as Ino {
            t.void(ino);
        }
        assert!(t.voids.inodes.len() <= MOST_VOIDS && !t.keep_attr(at(0), token, 10, 1));
    }
}
