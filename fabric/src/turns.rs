//! Which request is worked on next, where only a limited number may be in work. A request has a
//! weight: a long read keeps a device busy as long as many short ones. Peers are sessions on
//! machines. A peer that asks for much leaves room for others, and its requests wait among its own:
//!
//! - A machine has no more requests in work than there is room left: half of all if it is alone, a
//!   third beside another one. A session has a quarter of all at most.
//! - A session with nothing in work may exceed its machine's share, but may not use the last
//!   eighth.
//! - A free turn goes to the machine with the least in work, and there to the session with the
//!   least; among equals, to the one whose last turn is the longest ago.
//! - Where a limit for one machine is set ([`Turns::shared`]), a machine has no more than that in
//!   work while a session other than the asking one is active, on any machine: a device works in
//!   order of arrival, so others wait for all that is in work. The limit is lower while turns are
//!   late ([`Share`]).
//!
//! [`Table`] is pure: it has no clock and waits for nothing. [`Turns`] waits.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result, SessionId};
use tokio::{
    sync::oneshot,
    task::yield_now,
    time::{Instant, sleep, timeout},
};

use crate::{endpoint::machine, share::Share};

/// Limit of waiting requests of one session.
const MOST_OF_SESSION: usize = 256;
/// Limit of waiting requests of one machine, per request that may be in work. Sessions with none
/// may have one more.
const MOST_OF_MACHINE: usize = 8;

/// A session counts as active for this long after its last request.
const ACTIVE: Duration = Duration::from_secs(1);

/// The weight of a request is at most the weight of all that may be in work, divided by this.
const HEAVIEST: usize = 16;

/// Something that waits for its turn.
trait Waits {
    /// The caller no longer waits for it.
    fn is_over(&self) -> bool;
}

impl Waits for oneshot::Sender<Turn> {
    fn is_over(&self) -> bool {
        self.is_closed()
    }
}

/// Weight of what is in work, and the number of the last turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    work: usize,
    turn: u64,
}

struct Session<T> {
    rank: Rank,
    waiting: VecDeque<(usize, T)>,
}

struct Machine<T> {
    rank: Rank,
    waiting: usize,
    sessions: BTreeMap<SessionId, Session<T>>,
    /// Sessions that have waiting requests.
    line: BTreeSet<(Rank, SessionId)>,
}

/// A peer's name.
type Name = (Arc<str>, SessionId);

/// The two sessions that were active most recently.
struct Latest {
    first: (SessionId, Duration),
    second: (SessionId, Duration),
}

impl Latest {
    fn note(&mut self, session: SessionId, now: Duration) {
        if self.first.0 != session {
            self.second = self.first;
        }
        self.first = (session, now);
    }

    /// Whether a session other than this one is active.
    fn others(&self, session: SessionId, now: Duration) -> bool {
        let (other, at) = if self.first.0 == session { self.second } else { self.first };
        other != 0 && now.saturating_sub(at) < ACTIVE
    }

    /// Whether two sessions are active.
    fn are_two(&self, now: Duration) -> bool {
        self.others(self.first.0, now)
    }
}

/// See the module. Times count from a moment before it was made.
struct Table<T> {
    max: usize,
    /// Limit of what a machine may have in work while others are active, where there is one.
    share: Option<Share>,
    latest: Latest,
    now: Duration,
    work: usize,
    turn: u64,
    machines: BTreeMap<Arc<str>, Machine<T>>,
    /// Machines that have waiting requests.
    line: BTreeSet<(Rank, Arc<str>)>,
}

/// The result of asking for a turn.
enum Asked<T> {
    Now,
    Waits,
    /// Too many requests of the peer wait already.
    Refused(T),
}

impl<T: Waits> Table<T> {
    fn new(max: usize) -> Table<T> {
        let max = max.max(1);
        let latest = Latest { first: (0, Duration::ZERO), second: (0, Duration::ZERO) };
        let (machines, line, now) = (BTreeMap::new(), BTreeSet::new(), Duration::ZERO);
        Table { max, share: None, latest, now, work: 0, turn: 0, machines, line }
    }

    /// Notes that a session is active.
    fn note(&mut self, session: SessionId, now: Duration) {
        self.now = now;
        self.latest.note(session, now);
    }

    fn of_session(&self) -> usize {
        (self.max / 4).max(1)
    }

    /// Whether there is room for one more request of a machine, and of a session there. The last
    /// one may exceed the limit by a part of its weight.
    fn has_room(&self, machine: usize, session: usize, name: SessionId) -> bool {
        // Requests that wait for this reason are looked at again when a request of their machine is
        // done.
        if self.is_beyond_share(machine) && self.latest.others(name, self.now) {
            return false;
        }
        let free = self.max.saturating_sub(self.work);
        let share = machine < free || session == 0 && free > self.max / 8 && free > 0;
        share && session < self.of_session()
    }

    fn is_beyond_share(&self, machine: usize) -> bool {
        self.share.as_ref().is_some_and(|s| machine >= s.bound())
    }

    /// Whether to measure how late a turn that is given now continues.
    fn is_due(&mut self) -> bool {
        self.latest.are_two(self.now) && self.share.as_mut().is_some_and(|s| s.is_due(self.now))
    }

    /// A new request. All waiting peers have no room now, so a peer that has room and no waiting
    /// requests goes first.
    fn ask(&mut self, (at, session): &Name, weight: usize, what: T) -> Asked<T> {
        let max = self.max;
        let known = self.machines.get(at);
        let of = known.and_then(|m| m.sessions.get(session));
        let works = (known.map_or(0, |m| m.rank.work), of.map_or(0, |s| s.rank.work));
        if of.is_none_or(|s| s.waiting.is_empty()) && self.has_room(works.0, works.1, *session) {
            self.begin(at, *session, weight);
            return Asked::Now;
        }
        let (m, s) = self.peer(at, *session);
        if s.waiting.len() >= MOST_OF_SESSION {
            let before = s.waiting.len();
            s.waiting.retain(|(_, w)| !w.is_over());
            *m.1 -= before - s.waiting.len();
        }
        if s.waiting.len() >= MOST_OF_SESSION
            || *m.1 >= max * MOST_OF_MACHINE && !s.waiting.is_empty()
        {
            return Asked::Refused(what);
        }
        s.waiting.push_back((weight, what));
        *m.1 += 1;
        m.0.insert((s.rank, *session));
        let rank = self.machines.get(at).map_or(Rank::default(), |m| m.rank);
        self.line.insert((rank, at.clone()));
        Asked::Waits
    }

    /// The parts of a peer that change when requests begin or end to wait.
    #[allow(clippy::type_complexity, reason = "borrows of two parts of one machine")]
    fn peer(
        &mut self,
        at: &Arc<str>,
        session: SessionId,
    ) -> ((&mut BTreeSet<(Rank, SessionId)>, &mut usize), &mut Session<T>) {
        let m = self.machines.entry(at.clone()).or_insert_with(|| Machine {
            rank: Rank::default(),
            waiting: 0,
            sessions: BTreeMap::new(),
            line: BTreeSet::new(),
        });
        let new = || Session { rank: Rank::default(), waiting: VecDeque::new() };
        ((&mut m.line, &mut m.waiting), m.sessions.entry(session).or_insert_with(new))
    }

    /// Changes what a peer has in work, and with it its position in the lines.
    fn change(&mut self, at: &Arc<str>, session: SessionId, to: impl Fn(&mut Rank)) {
        let ((line, _), s) = self.peer(at, session);
        let was = s.rank;
        to(&mut s.rank);
        if line.remove(&(was, session)) {
            line.insert((s.rank, session));
        }
        if let Some(m) = self.machines.get_mut(at) {
            let was = m.rank;
            to(&mut m.rank);
            let now = m.rank;
            if self.line.remove(&(was, at.clone())) {
                self.line.insert((now, at.clone()));
            }
        }
    }

    fn begin(&mut self, at: &Arc<str>, session: SessionId, weight: usize) {
        (self.work, self.turn) = (self.work + weight, self.turn + 1);
        let turn = self.turn;
        self.change(at, session, |r| *r = Rank { work: r.work + weight, turn });
    }

    /// A request of that peer is done. Returns the requests that begin now.
    fn done(&mut self, (at, session): &Name, weight: usize) -> Vec<(Name, usize, T)> {
        self.work -= weight;
        self.change(at, *session, |r| r.work -= weight);
        self.forget(at, *session);
        let mut begun = Vec::new();
        while let Some(next) = self.next() {
            if let Some((weight, what)) = self.take(&next) {
                self.begin(&next.0, next.1, weight);
                begun.push((next.clone(), weight, what));
            }
            self.forget(&next.0, next.1);
        }
        begun
    }

    /// The next peer in turn. The search is short. For lack of room a machine is passed over only
    /// while more than an eighth is free, and few machines have that much in work; or if the
    /// session has its quarter. While others are active, the first machine beyond its share ends
    /// the search.
    fn next(&self) -> Option<Name> {
        let free = self.max.saturating_sub(self.work);
        let two = self.latest.are_two(self.now);
        for (rank, at) in &self.line {
            let of = self.machines.get(at).and_then(|m| m.line.first());
            if let Some((session, name)) = of
                && self.has_room(rank.work, session.work, *name)
            {
                return Some((at.clone(), *name));
            }
            let all_beyond = two && self.is_beyond_share(rank.work);
            if all_beyond || free <= self.max / 8 && rank.work >= free {
                return None;
            }
        }
        None
    }

    /// The oldest waiting request of a peer; `None` if its caller has given up.
    fn take(&mut self, (at, session): &Name) -> Option<(usize, T)> {
        let ((line, waiting), s) = self.peer(at, *session);
        let what = s.waiting.pop_front()?;
        *waiting -= 1;
        if s.waiting.is_empty() {
            line.remove(&(s.rank, *session));
        }
        if let Some(m) = self.machines.get(at).filter(|m| m.line.is_empty()) {
            let rank = m.rank;
            self.line.remove(&(rank, at.clone()));
        }
        (!what.1.is_over()).then_some(what)
    }

    /// Forgets peers with nothing in work and nothing waiting.
    fn forget(&mut self, at: &Arc<str>, session: SessionId) {
        let Some(m) = self.machines.get_mut(at) else { return };
        if m.sessions.get(&session).is_some_and(|s| s.rank.work == 0 && s.waiting.is_empty()) {
            m.sessions.remove(&session);
        }
        if m.sessions.is_empty() {
            self.machines.remove(at);
        }
    }
}

/// See the module. Clones share one table.
#[derive(Clone)]
pub struct Turns {
    table: Arc<Mutex<Table<oneshot::Sender<Turn>>>>,
    since: Instant,
}

/// While it lives, a request is in work.
pub struct Turn {
    /// `None`: dropping it gives nothing back.
    of: Option<(Turns, Name, usize)>,
    /// When it was given; `None`: its delay is not measured.
    given: Option<Duration>,
}

impl Turns {
    /// `max`: limit of the weight in work.
    pub fn new(max: usize) -> Turns {
        Turns { table: Arc::new(Mutex::new(Table::new(max))), since: Instant::now() }
    }

    /// As [`Turns::new`]; `shared` limits the weight of one machine while others are active, as far
    /// as they were noted.
    pub fn shared(max: usize, shared: usize) -> Turns {
        let turns = Turns::new(max);
        turns.table.lock().share = Some(Share::new(shared));
        turns
    }

    /// Notes that a session is active, whatever it asked for, or others on its behalf. 0: no
    /// session.
    pub fn note(&self, session: SessionId) {
        if session != 0 {
            self.table.lock().note(session, self.since.elapsed());
        }
    }

    /// Waits for the turn of a request from that peer. `weight`: 1 or more. `Overloaded`, after
    /// `limit`: it had no turn, or too many requests wait already.
    pub async fn take(
        &self,
        addr: &str,
        session: SessionId,
        weight: usize,
        limit: Duration,
    ) -> Result<Turn> {
        let name: Name = (machine(addr).into(), session);
        let full = |why: &str| {
            let m = format!(
                "this server already works on the most requests it allows for this client{why}; \
                 try again"
            );
            Error::new(Code::Overloaded, m)
        };
        let turn = {
            let (tx, rx) = oneshot::channel();
            let mut table = self.table.lock();
            table.now = self.since.elapsed();
            let weight = weight.min(table.max / HEAVIEST).max(1);
            match table.ask(&name, weight, tx) {
                Asked::Now => Ok(self.give(&mut table, name, weight)),
                Asked::Waits => Err(Some(rx)),
                Asked::Refused(_) => Err(None),
            }
        };
        let turn = match turn {
            Ok(turn) => turn,
            Err(Some(turn)) => match timeout(limit, turn).await {
                Ok(Ok(turn)) => turn,
                _ => return Err(full("")),
            },
            Err(None) => {
                // If it were refused at once, it would be sent again at once; refusing is work,
                // too.
                sleep(limit).await;
                return Err(full(", and too many wait"));
            }
        };
        self.look(&turn).await;
        Ok(turn)
    }

    /// The turn of a request that has begun in the table.
    fn give(&self, table: &mut Table<oneshot::Sender<Turn>>, name: Name, weight: usize) -> Turn {
        let given = table.is_due().then_some(table.now);
        Turn { of: Some((self.clone(), name, weight)), given }
    }

    /// Measures now and then how late a turn continues: behind all tasks that are ready to run,
    /// where the next steps of its request will be. That it runs now says less, because a runtime
    /// runs first what was woken last.
    async fn look(&self, turn: &Turn) {
        let Some(given) = turn.given else { return };
        yield_now().await;
        let (now, mut table) = (self.since.elapsed(), self.table.lock());
        if let Some(share) = &mut table.share {
            share.heard(now.saturating_sub(given), now);
        }
    }

    /// Whether a session other than this one was noted within a second.
    pub fn others(&self, session: SessionId) -> bool {
        self.table.lock().latest.others(session, self.since.elapsed())
    }

    /// The weight of all requests in work.
    pub fn in_work(&self) -> usize {
        self.table.lock().work
    }

    fn done(&self, name: Name, weight: usize) {
        let mut over = vec![(name, weight)];
        while let Some((name, weight)) = over.pop() {
            let begun: Vec<_> = {
                let mut table = self.table.lock();
                table.now = self.since.elapsed();
                let begun = table.done(&name, weight);
                begun
                    .into_iter()
                    .map(|(name, weight, tx)| (self.give(&mut table, name, weight), tx))
                    .collect()
            };
            for (turn, tx) in begun {
                // A turn whose caller has given up is returned here, not by its drop: a chain of
                // drops would recurse as deep as the chain is long.
                if let Err(mut turn) = tx.send(turn)
                    && let Some((_, name, weight)) = turn.of.take()
                {
                    over.push((name, weight));
                }
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some((turns, name, weight)) = self.of.take() {
            turns.done(name, weight);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use super::*;

    /// Whether the caller has given up.
    struct Asks(Rc<Cell<bool>>);

    impl Waits for Asks {
        fn is_over(&self) -> bool {
            self.0.get()
        }
    }

    fn name(at: &str, session: u64) -> Name {
        (at.into(), session)
    }

    /// Asks `n` times; returns how many began.
    fn ask(t: &mut Table<Asks>, of: &Name, n: usize) -> usize {
        (0..n).filter(|_| matches!(t.ask(of, 1, Asks(Rc::default())), Asked::Now)).count()
    }

    fn check(t: &Table<Asks>) {
        assert_eq!(t.work, t.machines.values().map(|m| m.rank.work).sum::<usize>());
        assert!(t.work <= t.max);
        for (at, m) in &t.machines {
            assert_eq!(m.rank.work, m.sessions.values().map(|s| s.rank.work).sum::<usize>());
            assert_eq!(m.waiting, m.sessions.values().map(|s| s.waiting.len()).sum::<usize>());
            let line = m.sessions.iter().filter(|(_, s)| !s.waiting.is_empty());
            assert_eq!(m.line, line.map(|(id, s)| (s.rank, *id)).collect());
            assert_eq!(t.line.contains(&(m.rank, at.clone())), m.waiting > 0);
        }
        assert!(t.line.iter().all(|(_, at)| t.machines.contains_key(at)));
        assert!(t.next().is_none(), "who has room does not wait");
    }

    #[test]
    fn one_session_has_a_quarter_and_one_machine_half() {
        let mut t = Table::new(64);
        let (a, b) = (name("a", 1), name("a", 2));
        assert_eq!(ask(&mut t, &a, 100), 16);
        check(&t);
        assert_eq!(ask(&mut t, &b, 100), 16);
        let third = name("a", 3);
        assert_eq!(ask(&mut t, &third, 100), 1, "its machine has half, and it had nothing");
        assert_eq!(ask(&mut t, &name("b", 1), 100), 16);
        check(&t);
        // The next request to begin belongs to the machine with less in work.
        let mut begun = t.done(&a, 1);
        begun.extend(t.done(&a, 1));
        begun.extend(t.done(&name("b", 1), 1));
        assert!(begun.iter().all(|b| *b.0.0 == *"b"), "{:?}", begun.len());
        check(&t);
    }

    #[test]
    fn what_is_heavy_takes_as_much_room() {
        let mut t = Table::new(64);
        let (a, b) = (name("a", 1), name("b", 1));
        let heavy =
            |t: &mut Table<Asks>, of| matches!(t.ask(of, 5, Asks(Rc::default())), Asked::Now);
        assert_eq!(
            (0..20).filter(|_| heavy(&mut t, &a)).count(),
            4,
            "a quarter, and the rest of the last one"
        );
        assert_eq!(t.work, 20);
        assert_eq!(ask(&mut t, &b, 100), 16);
        check(&t);
        assert_eq!(t.done(&a, 5).len(), 1);
        check(&t);
        assert_eq!(t.work, 36);
    }

    #[test]
    fn while_others_are_active_a_machine_has_little_in_work() {
        let at = Duration::from_millis;
        let mut t = Table::new(64);
        t.share = Some(Share::new(4));
        let (a, b) = (name("a", 1), name("b", 2));
        t.note(1, at(0));
        assert_eq!(ask(&mut t, &a, 100), 16, "it is alone");
        t.note(2, at(10));
        assert_eq!(ask(&mut t, &b, 1), 1);
        // None of `a` begins until it has less than its share, although another of its sessions
        // waits, too.
        assert_eq!(ask(&mut t, &name("a", 3), 1), 0);
        let begun: Vec<usize> = (0..14).map(|_| t.done(&a, 1).len()).collect();
        assert_eq!((begun.iter().sum::<usize>(), &begun[..12]), (2, &[0; 12][..]));
        check(&t);
        // The other machine is gone.
        t.done(&b, 1);
        t.note(1, at(1011));
        let begun = t.done(&a, 1);
        assert!(begun.len() > 10, "{}", begun.len());
        check(&t);
    }

    #[test]
    fn a_machine_has_less_in_work_while_turns_go_on_late() {
        let at = Duration::from_millis;
        let mut t = Table::new(64);
        t.share = Some(Share::new(12));
        let (a, b) = (name("a", 1), name("b", 2));
        t.note(1, at(0));
        assert!(!t.is_due(), "nobody else is there");
        t.note(2, at(10));
        assert!(t.is_due() && !t.is_due());
        assert_eq!(ask(&mut t, &a, 20), 12);
        let late = |t: &mut Table<Asks>| t.share.as_mut().unwrap().heard(at(5), at(10));
        (0..3).for_each(|_| late(&mut t));
        assert!((0..8).all(|_| t.done(&a, 1).is_empty()), "more than 4 are in work");
        check(&t);
        assert_eq!((t.done(&a, 1).len(), t.work), (1, 4));
        assert_eq!(ask(&mut t, &b, 20), 4);
        // Heavy requests: one at a time.
        let mut t = Table::new(512);
        t.share = Some(Share::new(16));
        t.note(1, at(0));
        t.note(2, at(10));
        (0..3).for_each(|_| late(&mut t));
        let heavy = |t: &mut Table<Asks>| matches!(t.ask(&a, 16, Asks(Rc::default())), Asked::Now);
        assert!(heavy(&mut t) && !heavy(&mut t));
        assert_eq!(t.done(&a, 16).len(), 1);
        check(&t);
    }

    #[test]
    fn a_newcomer_has_the_next_turn() {
        let mut t = Table::new(4);
        let many: Vec<Name> = (0..4).map(|i| name(&format!("m{i}"), 1)).collect();
        many.iter().for_each(|n| {
            ask(&mut t, n, 200);
        });
        assert_eq!(t.work, 4);
        let new = name("new", 9);
        assert_eq!(ask(&mut t, &new, 1), 0);
        check(&t);
        let begun = t.done(&many[2], 1);
        assert!(begun.len() == 1 && begun[0].0 == new);
        // Then those take turns, whichever has more waiting.
        let mut turns = Vec::new();
        let mut last = new;
        for _ in 0..8 {
            let begun = t.done(&last, 1);
            assert_eq!(begun.len(), 1);
            last = begun[0].0.clone();
            turns.push(last.0.to_string());
        }
        check(&t);
        assert!(turns.contains(&"m2".into()), "{turns:?}");
    }

    #[test]
    fn sessions_take_turns() {
        let mut t = Table::new(1);
        assert_eq!(ask(&mut t, &name("a", 1), 3), 1);
        for s in 2..5 {
            assert_eq!(ask(&mut t, &name("a", s), 2), 0);
        }
        let (mut order, mut last) = (Vec::new(), name("a", 1));
        for _ in 0..8 {
            last = t.done(&last, 1)[0].0.clone();
            order.push(last.1);
        }
        assert_eq!(order, [2, 3, 4, 1, 2, 3, 4, 1]);
        check(&t);
    }

    #[test]
    fn what_waits_is_bounded_and_what_was_given_up_is_passed_over() {
        let mut t = Table::new(2);
        let a = name("a", 1);
        let given_up = Rc::new(Cell::new(false));
        assert!(matches!(t.ask(&a, 1, Asks(Rc::default())), Asked::Now));
        for i in 0usize.. {
            if let Asked::Refused(_) = t.ask(&a, 1, Asks(given_up.clone())) {
                assert_eq!(i, 2 * MOST_OF_MACHINE);
                break;
            }
        }
        // Another session still gets its place, in work and in the queue.
        assert_eq!(ask(&mut t, &name("a", 2), 1), 1);
        for s in 3..40 {
            assert!(matches!(t.ask(&name("a", s), 1, Asks(Rc::default())), Asked::Waits));
            assert!(matches!(t.ask(&name("a", s), 1, Asks(Rc::default())), Asked::Refused(_)));
        }
        given_up.set(true);
        let begun = t.done(&a, 1);
        assert!(begun.iter().all(|b| b.0 != a));
        let mut left: Vec<Name> = begun.into_iter().map(|b| b.0).chain([name("a", 2)]).collect();
        while let Some(n) = left.pop() {
            left.extend(t.done(&n, 1).into_iter().map(|b| b.0));
        }
        assert!(t.work == 0 && t.machines.is_empty() && t.line.is_empty(), "nothing is remembered");
    }

    #[test]
    fn at_random_nobody_is_forgotten_and_nobody_waits_who_has_room() {
        let mut seed = 7u64;
        let mut rnd = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % n
        };
        for max in [1, 2, 3, 8, 50] {
            let (mut t, mut running, mut asked, mut begun) = (Table::new(max), Vec::new(), 0, 0);
            for _ in 0..5000 {
                if rnd(5) < 3 {
                    let n = name(&format!("m{}", rnd(4)), rnd(5));
                    match t.ask(&n, 1, Asks(Rc::default())) {
                        Asked::Now => (asked, begun, _) = (asked + 1, begun + 1, running.push(n)),
                        Asked::Waits => asked += 1,
                        Asked::Refused(_) => {}
                    }
                } else if !running.is_empty() {
                    let n = running.swap_remove(rnd(running.len() as u64) as usize);
                    let more = t.done(&n, 1);
                    begun += more.len();
                    running.extend(more.into_iter().map(|b| b.0));
                }
                check(&t);
            }
            while let Some(n) = running.pop() {
                let more = t.done(&n, 1);
                begun += more.len();
                running.extend(more.into_iter().map(|b| b.0));
            }
            assert!(asked == begun && t.machines.is_empty(), "{max}: {asked} {begun}");
        }
    }

    /// The share after some turns, given while another task, if there is one, keeps the processor
    /// busy.
    async fn bound_beside(busy: Option<Duration>) -> usize {
        let t = Turns::shared(64, 32);
        for _ in 0..20 {
            t.note(1);
            t.note(2);
            sleep(Duration::from_millis(2)).await;
            let works = busy.map(|long| tokio::spawn(async move { std::thread::sleep(long) }));
            drop(t.take("tcp:a:1", 1, 1, ACTIVE).await.unwrap());
            if let Some(works) = works {
                works.await.unwrap();
            }
        }
        assert_eq!(t.in_work(), 0);
        t.table.lock().share.as_ref().unwrap().bound()
    }

    #[tokio::test]
    async fn turns_go_on_late_behind_what_keeps_the_processor() {
        assert_eq!(bound_beside(Some(Duration::from_millis(1))).await, 4);
    }

    #[tokio::test(start_paused = true)]
    async fn turns_that_go_on_at_once_leave_the_share_as_it_is() {
        assert_eq!(bound_beside(None).await, 32);
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_nobody_takes_is_given_back() {
        let t = Turns::new(1);
        let second = Duration::from_secs(1);
        let first = t.take("tcp:a:1", 1, 1, second).await.unwrap();
        let waits: Vec<_> = (0..200)
            .map(|_| {
                let t = t.clone();
                tokio::spawn(
                    async move { drop(t.take("tcp:a:2", 1, 1, Duration::from_secs(9)).await) },
                )
            })
            .collect();
        tokio::task::yield_now().await;
        let e = t.take("tcp:b:1", 2, 1, second).await.err().unwrap();
        assert_eq!(e.code, Code::Overloaded, "{e}");
        waits.iter().for_each(tokio::task::JoinHandle::abort);
        tokio::task::yield_now().await;
        drop(first);
        assert_eq!(t.in_work(), 0);
        drop(t.take("tcp:b:1", 2, 1, second).await.unwrap());
        assert_eq!(t.in_work(), 0);
    }
}
