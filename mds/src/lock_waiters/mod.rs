//! Lock waiters, and whose turn it is: what only the leader knows about them. A pure table. Clients
//! repeat what they wait for (see `docs/locks.md`), so a new leader starts with an empty one.

pub mod verdict;

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use strake_proto::{Code, Error, Ino, Result, SessionId, pb::LockKind};

use crate::namespace::locks::{Owner, Want};

/// Most waits of one session, and of all.
pub const MAX_OF_SESSION: usize = 1_024;
pub const MAX_WAITS: usize = 65_536;
/// How long a lock is kept free for the waiter whose turn it is.
pub const TURN: Duration = Duration::from_secs(2);
/// Waits of a session that sends no list for this long are forgotten.
pub const SILENCE: Duration = Duration::from_secs(10);
/// Most owners that the search for a deadlock visits.
pub const MAX_SEARCH: usize = 1_000;
/// Most waits that the searches for one list visit.
pub const MAX_LOOKS: usize = 4_096;

/// One entry of a client's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Entry {
    /// The client's number for it.
    pub id: u64,
    pub want: Want,
    /// It was told of its turn and is trying.
    pub trying: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Waiter {
    id: u64,
    want: Want,
    trying: bool,
    /// It may have the lock now; others may not, until this time.
    turn: Option<Duration>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Member {
    waits: BTreeMap<u64, u64>,
    heard: Duration,
    /// The number of its last list.
    number: u64,
    /// Waits that are over; a list on its way may still name them.
    over: BTreeSet<u64>,
}

/// See the module.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LockWaiters {
    next: u64,
    /// By ticket: in the order of arrival.
    waiters: BTreeMap<u64, Waiter>,
    files: BTreeMap<Ino, BTreeSet<u64>>,
    owners: BTreeMap<Owner, BTreeSet<u64>>,
    members: BTreeMap<SessionId, Member>,
}

impl LockWaiters {
    /// How many waits there are.
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }

    /// Replaces a session's last list by this one, unless this one is older. Returns the files it
    /// waits for, all of which must be checked. `Overloaded` when there are too many waits.
    pub fn set(
        &mut self,
        now: Duration,
        session: SessionId,
        number: u64,
        list: &[Entry],
    ) -> Result<BTreeSet<Ino>> {
        if self.members.get(&session).is_some_and(|m| m.number > number) {
            return Ok(BTreeSet::new());
        }
        let had = self.members.get(&session).map_or(0, |m| m.waits.len());
        if self.waiters.len() - had + list.len() > MAX_WAITS || list.len() > MAX_OF_SESSION {
            let m =
                format!("{} requests wait for locks already; try again later", self.waiters.len());
            return Err(Error::new(Code::Overloaded, m));
        }
        let member = self.members.entry(session).or_default();
        (member.heard, member.number) = (now, number);
        let listed: BTreeSet<u64> = list.iter().map(|e| e.id).collect();
        member.over.retain(|id| listed.contains(id));
        let over = member.over.clone();
        let mut old = std::mem::take(&mut member.waits);
        let mut waits = BTreeMap::new();
        for e in list.iter().filter(|e| !over.contains(&e.id)) {
            let same = |t: &u64| self.waiters.get(t).is_some_and(|w| w.want == e.want);
            let ticket = match old.get(&e.id).copied().filter(same) {
                Some(ticket) => {
                    old.remove(&e.id);
                    ticket
                }
                None => self.enter(e),
            };
            if let Some(w) = self.waiters.get_mut(&ticket) {
                w.trying = e.trying;
            }
            // The same number twice: the later one counts.
            if let Some(twin) = waits.insert(e.id, ticket).filter(|twin| *twin != ticket) {
                self.leave(twin);
            }
        }
        old.into_values().for_each(|ticket| self.leave(ticket));
        self.members.entry(session).or_default().waits = waits;
        Ok(list.iter().map(|e| e.want.ino).collect())
    }

    fn enter(&mut self, e: &Entry) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.files.entry(e.want.ino).or_default().insert(ticket);
        self.owners.entry(e.want.who).or_default().insert(ticket);
        self.waiters
            .insert(ticket, Waiter { id: e.id, want: e.want, trying: e.trying, turn: None });
        ticket
    }

    fn leave(&mut self, ticket: u64) {
        let Some(w) = self.waiters.remove(&ticket) else { return };
        forget(&mut self.files, &w.want.ino, ticket);
        forget(&mut self.owners, &w.want.who, ticket);
        if let Some(m) = self.members.get_mut(&w.want.who.session)
            && m.waits.get(&w.id) == Some(&ticket)
        {
            m.waits.remove(&w.id);
        }
    }

    /// A session has ended.
    pub fn remove(&mut self, session: SessionId) {
        let waits = self.members.remove(&session).map(|m| m.waits).unwrap_or_default();
        waits.into_values().for_each(|ticket| self.leave(ticket));
    }

    /// Forgets sessions that were not heard of, and waits whose turn was not taken. Returns the
    /// files to check.
    pub fn expire(&mut self, now: Duration) -> BTreeSet<Ino> {
        let silent = |m: &Member| now.saturating_sub(m.heard) >= SILENCE;
        let gone: Vec<_> =
            self.members.iter().filter(|(_, m)| silent(m)).map(|(id, _)| *id).collect();
        let mut files = BTreeSet::new();
        for id in gone {
            let waits = self.members.get(&id).into_iter().flat_map(|m| m.waits.values());
            files.extend(waits.filter_map(|t| Some(self.waiters.get(t)?.want.ino)));
            self.remove(id);
        }
        let over = |w: &Waiter| w.turn.is_some_and(|until| until <= now);
        let over: Vec<_> =
            self.waiters.iter().filter(|(_, w)| over(w)).map(|(t, w)| (*t, w.want.ino)).collect();
        for (ticket, ino) in over {
            files.insert(ino);
            self.leave(ticket);
        }
        files
    }

    /// Whether there are waits for locks of a file.
    #[cfg(test)]
    fn waits_for(&self, ino: Ino) -> bool {
        self.files.contains_key(&ino)
    }

    /// Gives turns, in order, to waits that nothing blocks, and takes them back from waits that are
    /// blocked. `barred` says whether held locks block one. Returns whether there is a new turn.
    pub fn look(
        &mut self,
        now: Duration,
        ino: Ino,
        mut barred: impl FnMut(&Want) -> Result<bool>,
    ) -> Result<bool> {
        let tickets: Vec<u64> = self.files.get(&ino).into_iter().flatten().copied().collect();
        let (mut turns, mut news): (Vec<Want>, bool) = (Vec::new(), false);
        // Later waits that conflict with a wait for page locks do not pass it.
        let mut before: Vec<Want> = Vec::new();
        for ticket in tickets {
            let Some(w) = self.waiters.get_mut(&ticket) else { continue };
            if turns.iter().chain(&before).any(|other| other.conflicts(&w.want)) || barred(&w.want)?
            {
                w.turn = None;
                if is_of_pages(&w.want) {
                    before.push(w.want);
                }
                continue;
            }
            news |= w.turn.is_none();
            w.turn.get_or_insert(now + TURN);
            turns.push(w.want);
        }
        Ok(news)
    }

    /// Whether this must wait because it is another's turn.
    pub fn is_anothers_turn(&self, now: Duration, want: &Want) -> bool {
        let waiters =
            || self.files.get(&want.ino).into_iter().flatten().filter_map(|t| self.waiters.get(t));
        let mut turns = waiters().filter(|w| w.turn.is_some_and(|until| now < until));
        // A request for page locks that is not on the list comes after those that are.
        let passes = is_of_pages(want) && !waiters().any(|w| w.want.who == want.who);
        turns.any(|w| w.want.conflicts(want)) || passes && waiters().any(|w| w.want.conflicts(want))
    }

    /// Files with waits for page locks.
    pub fn pages_wanted(&self) -> BTreeSet<Ino> {
        self.waiters
            .values()
            .filter(|w| is_of_pages(&w.want) && w.turn.is_none())
            .map(|w| w.want.ino)
            .collect()
    }

    /// The sessions that have page locks of a file which others wait for.
    pub fn keep_waiting(
        &self,
        ino: Ino,
        mut barring: impl FnMut(&Want) -> Result<Vec<Owner>>,
    ) -> Result<BTreeSet<SessionId>> {
        let mut keep = BTreeSet::new();
        let waiters =
            self.files.get(&ino).into_iter().flatten().filter_map(|t| self.waiters.get(t));
        for w in waiters.filter(|w| is_of_pages(&w.want)) {
            keep.extend(barring(&w.want)?.into_iter().map(|who| who.session));
        }
        Ok(keep)
    }

    /// A session got the lock that it waited for under this number.
    pub fn given(&mut self, now: Duration, session: SessionId, id: u64) {
        let member = self.members.entry(session).or_default();
        member.heard = member.heard.max(now);
        member.over.insert(id);
        if member.over.len() > MAX_OF_SESSION {
            member.over.pop_first();
        }
        if let Some(ticket) = member.waits.get(&id).copied() {
            self.leave(ticket);
        }
    }

    /// The waits of a session that have their turn and are not trying yet, by the client's numbers.
    pub fn ready(&self, session: SessionId) -> Vec<u64> {
        let waits = self.members.get(&session).into_iter().flat_map(|m| m.waits.values());
        let all = waits.filter_map(|t| self.waiters.get(t));
        all.filter(|w| w.turn.is_some() && !w.trying).map(|w| w.id).collect()
    }

    /// Whether a list is a session's last one.
    pub fn is_newest(&self, session: SessionId, number: u64) -> bool {
        self.members.get(&session).is_some_and(|m| m.number == number)
    }

    /// Whether this wait would never end: its owner blocks another one, which blocks ... this one.
    /// `barring` names the owners that block a wait; `looks` is how often it may still be called.
    pub fn is_deadlock(
        &self,
        want: &Want,
        looks: &mut usize,
        mut barring: impl FnMut(&Want) -> Result<Vec<Owner>>,
    ) -> Result<bool> {
        let (mut todo, mut seen) = (vec![*want], BTreeSet::new());
        while let Some(next) = todo.pop() {
            let Some(left) = looks.checked_sub(1) else { break };
            *looks = left;
            for who in barring(&next)? {
                if who == want.who {
                    return Ok(true);
                }
                if seen.len() < MAX_SEARCH && seen.insert(who) {
                    let waits = self.owners.get(&who).into_iter().flatten();
                    todo.extend(waits.filter_map(|t| Some(self.waiters.get(t)?.want)));
                }
            }
        }
        Ok(false)
    }
}

pub fn is_of_pages(want: &Want) -> bool {
    want.who.kind == LockKind::LockPages
}

fn forget<K: Ord>(all: &mut BTreeMap<K, BTreeSet<u64>>, key: &K, ticket: u64) {
    if let Some(tickets) = all.get_mut(key) {
        tickets.remove(&ticket);
        if tickets.is_empty() {
            all.remove(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::{locks::Locks, spans::Span};

    fn s(n: u64) -> Duration {
        Duration::from_secs(n)
    }
    fn who(session: SessionId, owner: u64) -> Owner {
        Owner { kind: LockKind::LockPosix, session, owner }
    }
    fn span(start: u64, end: u64, write: bool) -> Span {
        Span { start, end, write, pid: 0 }
    }
    fn want(session: SessionId, owner: u64, ino: Ino, write: bool) -> Want {
        Want { ino, who: who(session, owner), span: span(0, 9, write) }
    }
    fn entry(id: u64, want: Want) -> Entry {
        Entry { id, want, trying: false }
    }
    fn held(by: &[(Owner, Span)]) -> Locks {
        Locks { held: by.iter().map(|(o, s)| (*o, vec![*s])).collect(), fence: 0 }
    }

    /// Whether there is a new turn.
    fn look(t: &mut LockWaiters, now: Duration, locks: &Locks) -> bool {
        t.look(now, 50, |w| Ok(locks.barring(w).next().is_some())).unwrap()
    }

    #[test]
    fn turns_go_in_order_and_keep_others_out() {
        let mut t = LockWaiters::default();
        let held_by_5 = held(&[(who(5, 1), span(0, 9, true))]);
        t.set(s(0), 1, 1, &[entry(7, want(1, 1, 50, true))]).unwrap();
        t.set(s(0), 2, 2, &[entry(7, want(2, 1, 50, false)), entry(8, want(2, 2, 50, false))])
            .unwrap();
        assert!(!look(&mut t, s(0), &held_by_5) && t.ready(1).is_empty());
        assert!(!t.is_anothers_turn(s(0), &want(5, 1, 50, true)), "nobody's yet");
        // Free: the first waiter has its turn; one that takes and drops the lock all the time has
        // not.
        assert!(look(&mut t, s(1), &held(&[])));
        assert_eq!((t.ready(1), t.ready(2)), (vec![7], vec![]));
        assert!(
            t.is_anothers_turn(s(1), &want(5, 1, 50, true))
                && !t.is_anothers_turn(s(1), &want(1, 1, 50, true))
        );
        assert!(!look(&mut t, s(1), &held(&[])), "no news");
        // It tries, and gets the lock.
        let trying = Entry { trying: true, ..entry(7, want(1, 1, 50, true)) };
        t.set(s(1), 1, 3, &[trying]).unwrap();
        assert!(t.ready(1).is_empty());
        t.given(s(1), 1, 7);
        // A list that was on its way does not bring it back.
        t.set(s(1), 1, 3, &[trying]).unwrap();
        assert_eq!(t.len(), 2);
        let by_1 = held(&[(who(1, 1), span(0, 9, true))]);
        assert!(!look(&mut t, s(1), &by_1) && t.len() == 2);
        // Readers share their turn.
        assert!(look(&mut t, s(2), &held(&[])));
        assert_eq!(t.ready(2), [7, 8]);
        assert!(
            !t.is_anothers_turn(s(2), &want(6, 1, 50, false))
                && t.is_anothers_turn(s(2), &want(6, 1, 50, true))
        );
        // Another one was faster, by a request that was under way: the turn comes again.
        assert!(!look(&mut t, s(2), &by_1) && t.ready(2).is_empty());
        assert!(look(&mut t, s(3), &held(&[])) && t.ready(2).len() == 2);
    }

    #[test]
    fn turns_end_and_silent_clients_are_forgotten() {
        let mut t = LockWaiters::default();
        t.set(s(0), 1, 4, &[entry(1, want(1, 1, 50, true))]).unwrap();
        t.set(s(0), 2, 5, &[entry(1, want(2, 1, 50, true))]).unwrap();
        look(&mut t, s(0), &held(&[]));
        assert_eq!((t.ready(1), t.ready(2)), (vec![1], vec![]));
        assert!(t.expire(s(1)).is_empty());
        assert_eq!(t.expire(s(2)), BTreeSet::from([50]));
        assert!(look(&mut t, s(2), &held(&[])));
        assert_eq!((t.ready(1), t.ready(2)), (vec![], vec![1]));
        // The first is alive after all: it comes again, at the end.
        let files = t.set(s(3), 1, 6, &[entry(1, want(1, 1, 50, true))]).unwrap();
        assert_eq!(files, BTreeSet::from([50]));
        look(&mut t, s(3), &held(&[]));
        assert!(t.ready(1).is_empty());
        t.remove(2);
        look(&mut t, s(3), &held(&[]));
        assert_eq!(t.ready(1), [1]);
        assert_eq!(t.expire(s(13)), BTreeSet::from([50]));
        assert!(
            t.waiters.is_empty()
                && t.files.is_empty()
                && t.owners.is_empty()
                && t.members.is_empty()
        );
    }

    #[test]
    fn a_list_replaces_the_last_one() {
        let mut t = LockWaiters::default();
        let (a, b) = (want(1, 1, 50, true), want(1, 2, 60, true));
        t.set(s(0), 1, 7, &[entry(1, a), entry(2, b)]).unwrap();
        t.set(s(0), 2, 8, &[entry(1, want(2, 1, 50, true))]).unwrap();
        t.set(s(1), 1, 9, &[entry(1, a)]).unwrap();
        assert!(t.len() == 2 && !t.waits_for(60) && t.waits_for(50));
        look(&mut t, s(1), &held(&[]));
        assert_eq!(t.ready(1), [1], "it kept its place");
        // The same number for something else is another wait.
        t.set(s(1), 1, 10, &[entry(1, b)]).unwrap();
        t.set(s(1), 1, 11, &[entry(1, b), entry(1, a)]).unwrap();
        look(&mut t, s(1), &held(&[]));
        assert_eq!((t.ready(1), t.ready(2), t.len()), (vec![], vec![1], 2));
        t.set(s(1), 1, 12, &[]).unwrap();
        assert_eq!(t.len(), 1);
        let many: Vec<_> =
            (0..=MAX_OF_SESSION as u64).map(|i| entry(i, want(1, i, 50, true))).collect();
        assert_eq!(t.set(s(1), 1, 13, &many).unwrap_err().code, Code::Overloaded);
    }

    fn in_the_way(locks: &Locks, want: &Want) -> Vec<Owner> {
        locks.barring(want).map(|(who, _)| who).collect()
    }

    #[test]
    fn circles_are_found_across_clients_and_files() {
        let mut t = LockWaiters::default();
        // 1 has file 10 and waits for 20; 2 has 20 and waits for 30; 3 has 30.
        let has = |w: &Want| Ok(in_the_way(&held(&[(who(w.ino / 10, 1), span(0, 9, true))]), w));
        t.set(s(0), 1, 14, &[entry(1, want(1, 1, 20, false))]).unwrap();
        t.set(s(0), 2, 15, &[entry(1, want(2, 1, 30, false))]).unwrap();
        assert!(!t.is_deadlock(&want(2, 1, 30, false), &mut MAX_LOOKS.clone(), has).unwrap());
        assert!(t.is_deadlock(&want(3, 1, 10, false), &mut MAX_LOOKS.clone(), has).unwrap());
        assert!(
            !t.is_deadlock(&want(3, 2, 10, false), &mut MAX_LOOKS.clone(), has).unwrap(),
            "another owner of the same client"
        );
        t.set(s(0), 2, 16, &[]).unwrap();
        assert!(!t.is_deadlock(&want(3, 1, 10, false), &mut MAX_LOOKS.clone(), has).unwrap());
        // Two readers that both want to write.
        let both = |w: &Want| {
            Ok(in_the_way(
                &held(&[(who(1, 1), span(0, 9, false)), (who(2, 1), span(0, 9, false))]),
                w,
            ))
        };
        t.set(s(0), 1, 17, &[entry(1, want(1, 1, 40, true))]).unwrap();
        assert!(t.is_deadlock(&want(2, 1, 40, true), &mut MAX_LOOKS.clone(), both).unwrap());
        assert!(
            !t.is_deadlock(&want(2, 1, 40, true), &mut 1, both).unwrap(),
            "it was not looked for to the end"
        );
    }
}
