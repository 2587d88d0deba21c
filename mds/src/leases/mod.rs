//! Leases: which sessions may answer from their cache, and which must forget before anyone is
//! answered with something newer. Only the leader has this. A pure table, see `docs/leases.md`; a
//! new leader starts with a new one.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use rows::Leader;
use strake_proto::{Ino, SessionId};

pub mod checks;
pub mod evicted;
pub mod pages;
pub mod reports;
pub mod rows;
#[cfg(test)]
mod tests;
pub mod writers;

/// Limits of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// How long leases live after a renewal was answered.
    pub term: Duration,
    /// How long a recall may be unanswered before its holder is evicted.
    pub patience: Duration,
    /// How long a session may be silent before it is evicted because of a question that it was
    /// asked at least [`ASKED`] ago.
    pub silence: Duration,
    /// Most leases of one session, which then must forget the oldest ones, and of all sessions.
    pub of_session: usize,
    pub of_all: usize,
    /// Most sessions that hold one inode.
    pub of_inode: usize,
    /// After this many recalls of one inode within [`HOT`] it is not leased for as long.
    pub hot: u32,
    /// Most files that one session may be recorded as writing.
    pub of_writer: usize,
}

/// See [`Limits::hot`].
pub const HOT: Duration = Duration::from_secs(1);
/// A question to a silent session that is this old counts as unanswered. A client that returns has
/// as long to answer.
pub const ASKED: Duration = Duration::from_secs(1);
/// Recalls sent at a time.
pub const MAX_RECALLS: usize = 4096;

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            term: Duration::from_millis(1500),
            patience: Duration::from_secs(5),
            silence: Duration::from_millis(3500),
            of_session: 65_536,
            of_all: 1 << 22,
            of_inode: 1024,
            hot: 8,
            of_writer: 1 << 20,
        }
    }
}

/// A recall's number: grows, also from one leader to the next.
pub type Number = u64;

/// A session's connection to the leader: growing numbers that the client chooses, never 0.
pub type Connection = u64;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Holder {
    /// The connection on which it last said hello: from then on it holds nothing that this table
    /// does not know.
    met: Option<Connection>,
    /// When its leases end, here and at the session.
    until: Duration,
    /// The inodes it holds, and since when.
    held: BTreeMap<Ino, Duration>,
    /// What it must forget and has not acknowledged, and since when.
    owes: BTreeMap<Number, (Ino, Duration)>,
    /// It did not answer in time: its leases are not renewed any more.
    given_up: bool,
    /// What it must forget to make space, and under which number. It stays among the inode's
    /// holders until it has forgotten it.
    leaving: BTreeMap<Ino, Number>,
    /// The highest number of its requests that gave leases back.
    gave_back: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Object {
    holders: BTreeSet<SessionId>,
    /// Sessions that have not acknowledged, by the recall's number.
    unsettled: BTreeMap<Number, BTreeSet<SessionId>>,
    /// Recalls since `counted_from`.
    recalls: u32,
    counted_from: Duration,
    /// The inode is not leased until then.
    hot_until: Duration,
}

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Leases {
    limits: Limits,
    sessions: BTreeMap<SessionId, Holder>,
    inodes: BTreeMap<Ino, Object>,
    last: Number,
    held: usize,
    /// Recalls of all inodes that some session has not acknowledged.
    unsettled: usize,
    /// For inodes changed by an entry that some session has not forgotten completely yet: the
    /// recalls that an answer about the inode depends on, see [`Leases::applied`].
    entangled: BTreeMap<Ino, Arc<BTreeSet<(Number, Ino)>>>,
    /// Inodes recalled in about the last second, and when.
    cooling: VecDeque<(Duration, Ino)>,
    /// Sessions that may hold leases of former leaders, and until when at the latest.
    grace: BTreeSet<SessionId>,
    grace_ends: Duration,
}

impl Leases {
    /// The table of the leader of `raft_term`, elected at `now`, with all sessions that the state
    /// has.
    pub fn new(
        limits: Limits,
        now: Duration,
        raft_term: u64,
        sessions: impl IntoIterator<Item = SessionId>,
    ) -> Leases {
        Leader::Elected.taken();
        Leases {
            limits,
            sessions: BTreeMap::new(),
            inodes: BTreeMap::new(),
            // An acknowledgement meant for a former leader is below all numbers of this one.
            last: raft_term << 32,
            held: 0,
            unsettled: 0,
            entangled: BTreeMap::new(),
            cooling: VecDeque::new(),
            grace: sessions.into_iter().collect(),
            grace_ends: now + limits.term,
        }
    }

    /// Whether leases of a former leader may still be alive: then nothing may be answered.
    pub fn in_grace(&self, now: Duration) -> bool {
        now < self.grace_ends && !self.grace.is_empty()
    }

    /// The first renewal of a session on a connection: the session has forgotten everything.
    /// `lives_on`: not everything, as the kernel of a mount whose daemon died may still cache
    /// something; it will be made to forget what is recalled. False: the session has a newer
    /// connection.
    pub fn hello(&mut self, id: SessionId, connection: Connection, lives_on: bool) -> bool {
        if self.sessions.get(&id).and_then(|h| h.met).is_some_and(|m| m >= connection) {
            Leader::HelloLate.taken();
            return false;
        }
        if lives_on {
            Leader::LivesOn.taken();
            // Leases from a former leader end with the grace period.
            self.sessions.entry(id).or_default().met = Some(connection);
            return true;
        }
        Leader::Hello.taken();
        self.grace.remove(&id);
        let until = self.sessions.get(&id).map_or(Duration::ZERO, |h| h.until);
        self.forget(id);
        self.sessions.insert(id, Holder { met: Some(connection), until, ..Default::default() });
        true
    }

    /// Whether a request on this connection was sent before its session said hello on a newer one,
    /// or to a former leader: its sender may have had the answer elsewhere since.
    pub fn is_late(&self, id: SessionId, connection: Connection) -> bool {
        let late = match self.sessions.get(&id).and_then(|h| h.met) {
            Some(met) => connection < met,
            None => self.grace.contains(&id),
        };
        if late {
            Leader::ChangeLate.taken();
        }
        late
    }

    /// A renewal of the session is answered at `now`. False: it must say hello first.
    pub fn renewed(&mut self, now: Duration, id: SessionId) -> bool {
        self.expire_one(now, id);
        match self.sessions.get_mut(&id) {
            Some(h) if h.met.is_some() && !h.given_up => {
                h.until = h.until.max(now + self.limits.term);
                Leader::Renewed.taken();
                true
            }
            _ => {
                Leader::NotRenewed.taken();
                false
            }
        }
    }

    /// Notes that a session may cache what it is about to be told about an inode on this
    /// connection. False: it may not.
    pub fn grant(
        &mut self,
        now: Duration,
        id: SessionId,
        connection: Connection,
        ino: Ino,
    ) -> bool {
        self.expire_one(now, id);
        let full = self.held >= self.limits.of_all;
        let Some(h) = self
            .sessions
            .get_mut(&id)
            .filter(|h| h.met == Some(connection) && !h.given_up && now < h.until)
        else {
            Leader::NoHello.taken();
            return false;
        };
        if h.held.contains_key(&ino) {
            return true;
        }
        // A session that does not forget gets no more leases.
        let owes = h.leaving.contains_key(&ino) || h.owes.len() >= self.limits.of_session;
        let o = self.inodes.entry(ino).or_default();
        let refused = [
            (full, Leader::AllFull),
            (owes, Leader::DoesNotForget),
            (o.holders.len() >= self.limits.of_inode, Leader::InodeFull),
            (now < o.hot_until, Leader::Hot),
        ];
        if let Some((_, row)) = refused.into_iter().find(|(refused, _)| *refused) {
            row.taken();
            self.tidy(now, ino);
            return false;
        }
        Leader::Granted.taken();
        o.holders.insert(id);
        if h.held.len() >= self.limits.of_session {
            self.make_room(now, id);
        }
        if let Some(h) = self.sessions.get_mut(&id) {
            h.held.insert(ino, now);
            self.held += 1;
        }
        true
    }

    /// Recalls the oldest eighth of a session's leases. No answer waits for that, unless one of
    /// these inodes changes before the session has forgotten it.
    fn make_room(&mut self, now: Duration, id: SessionId) {
        let Some(h) = self.sessions.get_mut(&id) else { return };
        Leader::MadeRoom.taken();
        let mut old: Vec<(Duration, Ino)> =
            h.held.iter().map(|(ino, since)| (*since, *ino)).collect();
        let n = (self.limits.of_session / 8).max(1);
        if n < old.len() {
            old.select_nth_unstable(n);
        }
        for (_, ino) in old.into_iter().take(n) {
            self.last += 1;
            self.held -= 1;
            h.held.remove(&ino);
            h.leaving.insert(ino, self.last);
            h.owes.insert(self.last, (ino, now));
        }
    }

    /// Whether a session holds an inode on this connection: it may cache what it was told since the
    /// grant.
    pub fn holds(&self, id: SessionId, connection: Connection, ino: Ino) -> bool {
        self.sessions
            .get(&id)
            .is_some_and(|h| h.met == Some(connection) && h.held.contains_key(&ino))
    }

    /// Whether the session's last hello was on this connection, and it is not being evicted.
    pub fn meets(&self, id: SessionId, connection: Connection) -> bool {
        self.sessions.get(&id).is_some_and(|h| h.met == Some(connection) && !h.given_up)
    }

    /// The connection of the session's last hello.
    pub fn connection(&self, id: SessionId) -> Option<Connection> {
        self.sessions.get(&id).and_then(|h| h.met)
    }

    /// When a session's leases end, unless it renews; `None` if it has none.
    pub fn ends(&self, now: Duration, id: SessionId) -> Option<Duration> {
        self.sessions.get(&id).map(|h| h.until).filter(|until| now < *until)
    }

    /// The holder has forgotten these inodes on its own, and says so with its request `seq`. Each
    /// request counts once: when a copy of it arrives, the sender may have had its answer and
    /// cached the inodes again. A request that a later one overtook gives nothing back; its sender
    /// gets recalls like any other.
    pub fn dropped(
        &mut self,
        now: Duration,
        id: SessionId,
        connection: Connection,
        seq: u64,
        inos: &[Ino],
    ) {
        let Some(h) =
            self.sessions.get_mut(&id).filter(|h| h.met == Some(connection) && h.gave_back < seq)
        else {
            return;
        };
        if inos.is_empty() {
            return;
        }
        h.gave_back = seq;
        let given: Vec<Ino> =
            inos.iter().copied().filter(|ino| h.held.remove(ino).is_some()).collect();
        self.held -= given.len();
        for ino in given {
            if let Some(o) = self.inodes.get_mut(&ino) {
                o.holders.remove(&id);
            }
            self.tidy(now, ino);
        }
    }

    /// An entry was applied that changed these inodes, and no reader has seen it yet. `named_by`,
    /// for each inode: the session and connection of a request that named it; that sender updates
    /// its own copy. Returns the inodes that some session must forget.
    ///
    /// An entry takes effect as a whole: a client that is told of its effect on one inode may infer
    /// its effect on the others, and earlier changes that those show. So these inodes are entangled
    /// until all of that is forgotten.
    pub fn applied(
        &mut self,
        now: Duration,
        changed: impl IntoIterator<Item = (Ino, Option<(SessionId, Connection)>)>,
    ) -> Vec<Ino> {
        let (mut all, mut told, mut recalls) = (Vec::new(), Vec::new(), BTreeSet::new());
        for (ino, named_by) in changed {
            if let Some(before) = self.entangled.get(&ino) {
                recalls.extend(before.iter().copied().filter(|r| self.is_unsettled(*r)));
            }
            if self.changed(now, named_by, ino) {
                recalls.insert((self.last, ino));
                told.push(ino);
            }
            all.push(ino);
        }
        if recalls.is_empty() {
            all.iter().for_each(|ino| drop(self.entangled.remove(ino)));
        } else {
            if all.len() > 1 {
                Leader::Entangled.taken();
            }
            let recalls = Arc::new(recalls);
            self.entangled.extend(all.into_iter().map(|ino| (ino, recalls.clone())));
        }
        told
    }

    fn is_unsettled(&self, (number, ino): (Number, Ino)) -> bool {
        self.inodes.get(&ino).is_some_and(|o| o.unsettled.contains_key(&number))
    }

    fn changed(
        &mut self,
        now: Duration,
        named_by: Option<(SessionId, Connection)>,
        ino: Ino,
    ) -> bool {
        let Some(o) = self.inodes.get_mut(&ino) else { return false };
        let mut owe = std::mem::take(&mut o.holders);
        if let Some((by, connection)) = named_by
            // What the session learned on a later connection is not covered by this request.
            && self.sessions.get(&by).is_some_and(|h| h.met == Some(connection))
            && owe.remove(&by)
        {
            o.holders.insert(by);
            Leader::Spared.taken();
        }
        let number = self.last + 1;
        owe.retain(|id| {
            let Some(h) = self.sessions.get_mut(id) else { return false };
            self.held -= usize::from(h.held.remove(&ino).is_some());
            h.leaving.remove(&ino);
            let lives = now < h.until;
            if lives {
                h.owes.insert(number, (ino, now));
            }
            lives
        });
        let told = !owe.is_empty();
        if told {
            Leader::Owed.taken();
            self.last = number;
            o.unsettled.insert(number, owe);
            self.unsettled += 1;
            if now.saturating_sub(o.counted_from) >= HOT {
                (o.counted_from, o.recalls) = (now, 0);
            }
            o.recalls += 1;
            if o.recalls >= self.limits.hot {
                o.hot_until = now + HOT;
            }
            self.cooling.push_back((now, ino));
        }
        self.tidy(now, ino);
        told
    }

    /// Takes an acknowledgement up to a number, and returns what else the session must forget, in
    /// order.
    pub fn recalls(
        &mut self,
        now: Duration,
        id: SessionId,
        acknowledged: Number,
    ) -> Vec<(Number, Ino)> {
        let Some(h) = self.sessions.get_mut(&id) else { return Vec::new() };
        let left = h.owes.split_off(&acknowledged.saturating_add(1));
        let done = std::mem::replace(&mut h.owes, left);
        let out: Vec<_> = h.owes.iter().take(MAX_RECALLS).map(|(n, (ino, _))| (*n, *ino)).collect();
        if !done.is_empty() {
            Leader::Acknowledged.taken();
        }
        if out.is_empty() {
            Leader::NothingRecalled.taken()
        } else {
            Leader::Recalled.taken()
        }
        self.settle(now, id, done);
        out
    }

    /// Sessions that have not acknowledged the last recall of an inode.
    pub fn owing(&self, ino: Ino) -> impl Iterator<Item = SessionId> + '_ {
        let last = self.inodes.get(&ino).and_then(|o| o.unsettled.last_key_value());
        last.into_iter().flat_map(|(_, owe)| owe.iter().copied())
    }

    /// The highest number given out.
    pub fn ticket(&self) -> Number {
        self.last
    }

    /// Whether an answer that was read from the state after `ticket` was taken, and that depends on
    /// `inodes`, may be sent.
    pub fn is_settled(&self, ticket: Number, inodes: impl IntoIterator<Item = Ino>) -> bool {
        inodes.into_iter().all(|ino| {
            let recalls = self
                .entangled
                .get(&ino)
                .into_iter()
                .flat_map(|all| all.range(..=(ticket, Ino::MAX)));
            !recalls.into_iter().any(|r| self.is_unsettled(*r))
        })
    }

    /// The inodes for which an answer would have to wait now; `None`: more than `most`.
    pub fn awaited(&self, most: usize) -> Option<Vec<Ino>> {
        if self.unsettled == 0 {
            return Some(Vec::new());
        }
        let awaited = self
            .entangled
            .iter()
            .filter(|(_, recalls)| recalls.iter().any(|r| self.is_unsettled(*r)));
        let inos: Vec<Ino> = awaited.map(|(ino, _)| *ino).take(most + 1).collect();
        (inos.len() <= most).then_some(inos)
    }

    /// The same for an answer that may depend on any inode.
    pub fn is_all_settled(&self, ticket: Number) -> bool {
        let waited_for = |(n, (ino, _)): (&Number, &(Ino, Duration))| {
            self.inodes.get(ino).is_some_and(|o| o.unsettled.contains_key(n))
        };
        self.sessions.values().all(|h| !h.owes.range(..=ticket).any(waited_for))
    }

    /// Ends leases whose term is over. Returns the sessions that did not answer in time: they must
    /// be evicted, and are returned again until they have [`ended`](Leases::ended).
    pub fn tick(&mut self, now: Duration) -> Vec<SessionId> {
        let over: Vec<SessionId> =
            self.sessions.iter().filter(|(_, h)| h.until <= now).map(|(id, _)| *id).collect();
        for id in over {
            self.expire_one(now, id);
        }
        let mut entangled = std::mem::take(&mut self.entangled);
        entangled.retain(|_, recalls| recalls.iter().any(|r| self.is_unsettled(*r)));
        self.entangled = entangled;
        while let Some((_, ino)) = self.cooling.front().copied().filter(|(at, _)| *at + HOT <= now)
        {
            self.cooling.pop_front();
            self.tidy(now, ino);
        }
        for h in self.sessions.values_mut().filter(|h| h.met.is_some()) {
            let first = h.owes.first_key_value();
            let late = first
                .is_some_and(|(_, (_, since))| now.saturating_sub(*since) >= self.limits.patience);
            if late && !h.given_up {
                Leader::GivenUp.taken();
                h.given_up = true;
            }
        }
        self.sessions.iter().filter(|(_, h)| h.given_up).map(|(id, _)| *id).collect()
    }

    /// When the term of the first session that owes an acknowledgement ends, and with it what it
    /// owes.
    pub fn next_end(&self) -> Option<Duration> {
        self.sessions.values().filter(|h| !h.owes.is_empty()).map(|h| h.until).min()
    }

    /// When leases of former leaders end at the latest.
    pub fn grace_ends(&self) -> Duration {
        self.grace_ends
    }

    /// The session has ended. Without a `goodbye` its leases live until the end of their term.
    pub fn ended(&mut self, now: Duration, id: SessionId, goodbye: bool) {
        let lives = self.sessions.get(&id).is_some_and(|h| now < h.until);
        if goodbye {
            Leader::Goodbye.taken();
            self.grace.remove(&id);
        }
        if goodbye || !lives {
            self.forget(id);
        } else if let Some(h) = self.sessions.get_mut(&id) {
            Leader::EndedAlive.taken();
            (h.met, h.given_up) = (None, false);
        }
    }

    /// How many leases a session has, 0 for an unknown one.
    pub fn held_by(&self, id: SessionId) -> usize {
        self.sessions.get(&id).map_or(0, |h| h.held.len())
    }

    /// How many recalls a session has not acknowledged.
    pub fn owed_by(&self, id: SessionId) -> usize {
        self.sessions.get(&id).map_or(0, |h| h.owes.len())
    }

    /// How many recalls are waited for. A wait can end only when this gets lower.
    pub fn unsettled(&self) -> usize {
        self.unsettled
    }

    /// How many recalls are not acknowledged.
    pub fn owed(&self) -> usize {
        self.sessions.values().map(|h| h.owes.len()).sum()
    }

    /// Ends a session's leases if their term is over.
    fn expire_one(&mut self, now: Duration, id: SessionId) {
        let Some(h) = self.sessions.get_mut(&id).filter(|h| h.until <= now) else { return };
        let Holder { met, given_up, until, gave_back, .. } = *h;
        if !h.held.is_empty() || !h.owes.is_empty() {
            Leader::TermOver.taken();
        }
        self.forget(id);
        if met.is_some() {
            self.sessions
                .insert(id, Holder { met, given_up, until, gave_back, ..Default::default() });
        }
    }

    /// Removes everything that a session holds and owes.
    fn forget(&mut self, id: SessionId) {
        let Some(h) = self.sessions.remove(&id) else { return };
        self.held -= h.held.len();
        for ino in h.held.into_keys().chain(h.leaving.into_keys()) {
            if let Some(o) = self.inodes.get_mut(&ino) {
                o.holders.remove(&id);
            }
            self.tidy(Duration::MAX, ino);
        }
        self.settle(Duration::MAX, id, h.owes);
    }

    fn settle(&mut self, now: Duration, id: SessionId, done: BTreeMap<Number, (Ino, Duration)>) {
        for (number, (ino, _)) in done {
            let Some(o) = self.inodes.get_mut(&ino) else { continue };
            if let Some(owe) = o.unsettled.get_mut(&number) {
                owe.remove(&id);
                if owe.is_empty() {
                    o.unsettled.remove(&number);
                    self.unsettled -= 1;
                }
            }
            if let Some(h) = self.sessions.get_mut(&id)
                && h.leaving.get(&ino) == Some(&number)
            {
                h.leaving.remove(&ino);
                o.holders.remove(&id);
            }
            self.tidy(now, ino);
        }
    }

    /// Forgets an inode that no session holds or owes, and that is not hot.
    fn tidy(&mut self, now: Duration, ino: Ino) {
        let idle = |o: &Object| {
            o.holders.is_empty()
                && o.unsettled.is_empty()
                && o.hot_until <= now
                && o.counted_from + HOT <= now
        };
        if self.inodes.get(&ino).is_some_and(|o| {
            o.recalls == 0 && o.holders.is_empty() && o.unsettled.is_empty() || idle(o)
        }) {
            self.inodes.remove(&ino);
        }
    }
}
