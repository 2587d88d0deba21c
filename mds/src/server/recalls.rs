//! The leader's table of leases and what surrounds it: applied entries mark what they change,
//! clients ask for what they must forget or report, and answers wait until that is done. The rules
//! are in `docs/leases.md`, the tables in `leases`.
//!
//! The lock here is taken while the namespace's is held, when entries are applied. So code that
//! holds it must not call the namespace.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Ino, Result, SessionId, pb};
use strake_runtime::{Env, watch};
use tokio::{sync::Notify, time::sleep};

use super::call::{Asker, Call};
use crate::{
    leases::{
        Connection, Leases, Limits, Number,
        checks::Checks,
        evicted::Evicted,
        pages::Pages,
        reports::Reports,
        rows::{Leader, Paging, Reporting},
        writers::Writers,
    },
    namespace::{Namespace, effects::Effect},
};

/// How long to wait for a session that is asked which locks it still holds.
const CHECK: Duration = Duration::from_secs(2);
/// How often sessions that do not answer are looked for.
const TICK: Duration = Duration::from_millis(250);
/// A check this late means that the process was stopped: it could hear no client.
const STALL: Duration = Duration::from_secs(1);
/// How long a request waits for a file's size to be found out; shorter than the time after which
/// clients give a try up.
const ENDS_WAIT: Duration = Duration::from_secs(4);

/// What an answer depends on: inodes as of a ticket, or all inodes if they are not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Depends {
    pub inos: Option<BTreeSet<Ino>>,
    pub ticket: Number,
}

struct Table {
    term: u64,
    leases: Leases,
    reports: Reports,
    checks: Checks,
    /// Sessions that are asked to give page locks back, and sessions that may write a file and were
    /// told that others have page locks of it.
    pages: Pages,
    writers: Writers,
    /// Files to which writes of an evicted session may still arrive, with the last such eviction.
    fences: BTreeMap<Ino, u64>,
    /// Files with an evicted writer beside other writers, with the last such eviction: their size
    /// is not known yet.
    ends: BTreeMap<Ino, u64>,
    /// When sessions that do not answer were last looked for.
    ticked: Duration,
    /// Wakes sessions that wait for what they must forget.
    bells: BTreeMap<SessionId, Arc<Notify>>,
    /// Requests in the log, and what their answers depend on once they are applied.
    expected: BTreeMap<(SessionId, u64), Option<Depends>>,
}

impl Table {
    fn ring(&self, id: SessionId) {
        if let Some(bell) = self.bells.get(&id) {
            bell.notify_waiters();
        }
    }

    /// An entry is applied; no reader has seen it yet.
    fn apply(&mut self, now: Duration, e: &Effect) {
        for (session, ino, comes) in &e.writers {
            self.writers.record(*session, *ino, *comes);
        }
        for (files, by) in [(&mut self.fences, &e.fences), (&mut self.ends, &e.ends)] {
            for (ino, eviction) in by {
                let last = files.entry(*ino).or_default();
                *last = (*last).max(*eviction);
            }
        }
        e.holds_back.into_iter().for_each(|id| self.writers.holds_back(id));
        let by = Asker { session: e.session, connection: e.connection };
        let named = |ino| {
            (e.connection != 0 && e.named.contains(ino)).then_some((by.session, by.connection))
        };
        for ino in self.leases.applied(now, e.changed.iter().map(|ino| (*ino, named(ino)))) {
            self.leases.owing(ino).for_each(|id| self.ring(id));
        }
        // The request's answer is as of now.
        let ticket = self.leases.ticket();
        for ino in &e.told {
            self.grant(now, by, *ino);
        }
        for (id, goodbye) in &e.ended {
            self.leases.ended(now, *id, *goodbye);
            self.reports.ended(*id);
            self.checks.ended(*id);
            self.pages.ended(*id);
            self.writers.ended(*id);
            self.ring(*id);
            self.bells.remove(id);
        }
        if let Some(expected) = self.expected.get_mut(&(e.session, e.seq)) {
            let inos = e.looked.union(&e.changed).copied().collect();
            *expected = Some(Depends { inos: Some(inos), ticket });
        }
    }

    fn waited_for(&self) -> usize {
        self.reports.len() + self.checks.len() + self.pages.len()
    }

    fn grant(&mut self, now: Duration, to: Asker, ino: Ino) -> bool {
        if to.connection == 0 || self.writers.others(to.session, ino).next().is_some() {
            Leader::WrittenElsewhere.taken();
            return false;
        }
        let before = self.leases.ticket();
        let granted = self.leases.grant(now, to.session, to.connection, ino);
        if self.leases.ticket() != before {
            // It must forget others to make space.
            self.ring(to.session);
        }
        granted
    }

    /// Whether no write of evicted sessions to these files can arrive any more; `None`: to any
    /// file.
    fn is_fenced(&self, inos: Option<&BTreeSet<Ino>>) -> bool {
        self.fences.is_empty()
            || inos.is_some_and(|inos| !inos.iter().any(|ino| self.fences.contains_key(ino)))
    }

    /// When the next thing ends through time.
    fn next_end(&self, now: Duration) -> Option<Duration> {
        let grace = self.leases.in_grace(now).then(|| self.leases.grace_ends());
        self.leases.next_end().into_iter().chain(grace).chain(self.checks.next_end(CHECK)).min()
    }
}

/// See the module. There is a table only while this server leads.
pub(super) struct Recalls {
    env: Env,
    pub(super) limits: Limits,
    table: Mutex<Option<Table>>,
    /// Kept on every server, for the time when it leads.
    evicted: Mutex<Evicted>,
    /// Grows with every event that waiting requests may wait for.
    news: watch::Sender<u64>,
    /// Something new may be the next to end.
    alarm: Notify,
}

/// A request in the log; dropping this removes it from the table.
pub(super) struct Expected<'a> {
    recalls: &'a Recalls,
    key: (SessionId, u64),
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        if let Some(t) = self.recalls.table.lock().as_mut() {
            t.expected.remove(&self.key);
        }
    }
}

/// Wakes all that watch a counter.
pub(super) fn bump(counter: &watch::Sender<u64>) {
    counter.send_if_modified(|n| {
        *n += 1;
        true
    });
}

impl Recalls {
    pub(super) fn new(env: Env, limits: Limits) -> Recalls {
        let (news, alarm) = (watch::Sender::new(0), Notify::new());
        let recalls = Recalls {
            env,
            limits,
            table: Mutex::new(None),
            evicted: Mutex::default(),
            news,
            alarm,
        };
        recalls.begin();
        recalls
    }

    /// From now on this learns of everything that is applied.
    pub(super) fn begin(&self) {
        self.evicted.lock().begin(self.env.boot());
    }

    /// This server leads from now on.
    pub(super) fn start(&self, term: u64, namespace: &Namespace) -> Result<()> {
        // Done first: from here on this learns of every eviction.
        let in_state = || namespace.backlog().evicted_after(0).iter().map(|e| e.session).collect();
        let before = self.evicted.lock().may_live(self.env.boot(), self.limits.term, in_state);
        namespace.survey(|found| {
            let gone = self.evicted.lock().may_live(self.env.boot(), self.limits.term, || before);
            let sessions = found.sessions.iter().map(|s| s.0).chain(gone);
            let holding = found.sessions.iter().filter(|s| s.1).map(|s| s.0);
            *self.table.lock() = Some(Table {
                term,
                leases: Leases::new(self.limits, self.env.boot(), term, sessions),
                reports: Reports::new(term),
                checks: Checks::new(term),
                pages: Pages::new(term),
                writers: Writers::new(found.writers, holding),
                fences: found.fences.into_iter().collect(),
                ends: found.ends.into_iter().collect(),
                ticked: self.env.boot(),
                bells: BTreeMap::new(),
                expected: BTreeMap::new(),
            });
        })
    }

    /// This server no longer leads: waiting requests are sent elsewhere.
    pub(super) fn stop(&self) {
        if let Some(t) = self.table.lock().take() {
            t.bells.values().for_each(|bell| bell.notify_waiters());
        }
        bump(&self.news);
    }

    /// Runs `f` on the table of the leader of this term.
    fn with<T>(&self, term: u64, f: impl FnOnce(&mut Table, Duration) -> T) -> Result<T> {
        let now = self.env.boot();
        match self.table.lock().as_mut().filter(|t| t.term == term) {
            Some(t) => Ok(f(t, now)),
            None => Err(Error::not_leader(0)),
        }
    }

    /// Entries are being applied; no reader has seen their effects yet.
    pub(super) fn tell(&self, effects: &[Effect]) {
        let now = self.env.boot();
        for (id, _) in effects.iter().flat_map(|e| &e.ended).filter(|(_, goodbye)| !goodbye) {
            self.evicted.lock().note(now, self.limits.term, *id);
        }
        let mut table = self.table.lock();
        let Some(t) = table.as_mut() else { return };
        let before = t.leases.ticket();
        effects.iter().for_each(|e| t.apply(now, e));
        let new = t.leases.ticket() != before;
        drop(table);
        if new {
            self.alarm.notify_one();
        }
        if effects.iter().any(|e| !e.ended.is_empty()) {
            bump(&self.news);
        }
    }

    // --- a session's connection ---

    pub(super) fn hello(&self, term: u64, by: Asker, lives_on: bool) -> Result<()> {
        self.with_news(term, |t, _| {
            if t.leases.hello(by.session, by.connection, lives_on) {
                t.reports.ask_again(by.session);
                t.checks.hello(by.session);
                t.pages.hello(by.session);
                // A request that waits on a former connection waits in vain.
                t.ring(by.session);
            }
        })
    }

    /// A session that had ended before it said hello.
    pub(super) fn gone(&self, term: u64, id: SessionId, lives_on: bool) -> Result<()> {
        self.with_news(term, |t, now| t.leases.ended(now, id, !lives_on))
    }

    /// As [`Recalls::with`], but wakes waiting requests if this may have ended some of their waits.
    /// Only then: when a thousand sessions acknowledge what a thousand requests wait for, not every
    /// request may be checked at every acknowledgement.
    fn with_news<T>(&self, term: u64, f: impl FnOnce(&mut Table, Duration) -> T) -> Result<T> {
        let (result, news) = self.with(term, |t, now| {
            let before = (t.leases.in_grace(now), t.leases.unsettled(), t.waited_for());
            let result = f(t, now);
            let after = (t.leases.in_grace(now), t.leases.unsettled(), t.waited_for());
            (result, before.0 && !after.0 || after.1 < before.1 || after.2 < before.2)
        })?;
        if news {
            bump(&self.news);
        }
        Ok(result)
    }

    /// A renewal is answered. Returns for how many milliseconds the session may hold leases.
    pub(super) fn renewed(
        &self,
        term: u64,
        session: SessionId,
        connection: Connection,
    ) -> Result<u32> {
        self.with_news(term, |t, now| {
            let lives = t.leases.meets(session, connection) && t.leases.renewed(now, session);
            if lives { u32::try_from(self.limits.term.as_millis()).unwrap_or(u32::MAX) } else { 0 }
        })
    }

    /// Takes acknowledgements. Returns what else the session must forget and report, and the
    /// notifier that wakes it when there is more.
    pub(super) fn poll(
        &self,
        term: u64,
        r: &pb::RecallRequest,
    ) -> Result<(pb::RecallReply, Arc<Notify>)> {
        let id = r.session;
        self.with_news(term, |t, now| {
            if !t.leases.meets(id, r.connection) {
                let m = "this connection has had no hello; connect again and send one";
                return Err(Error::new(Code::Disconnected, m));
            }
            let recall = |(number, ino)| pb::Recall { number, ino, ..Default::default() };
            let recalls: Vec<_> =
                t.leases.recalls(now, id, r.acknowledged).into_iter().map(recall).collect();
            t.reports.reported(id, &r.reported);
            t.reports.working(now, id, &r.working);
            // The two never share a number.
            t.pages.given(id, &r.reported);
            t.pages.working(now, id, &r.working);
            let pages = t.pages.take(now, id).into_iter().map(|(number, ino)| pb::Recall {
                number,
                ino,
                pages: true,
            });
            let reports = t.reports.take(now, id).into_iter().map(recall).chain(pages).collect();
            t.checks.answered(id, &r.locks_checked);
            let locks = t.checks.take(id, r.checks_locks).into_iter().map(recall).collect();
            Ok((
                pb::RecallReply { recalls, reports, locks },
                t.bells.entry(id).or_default().clone(),
            ))
        })?
    }

    // --- answers ---

    /// Notes leases on inodes about to be read. Returns those that are held then.
    pub(super) fn grant(&self, call: &Call<'_>, inos: &BTreeSet<Ino>) -> Result<BTreeSet<Ino>> {
        self.with(call.term, |t, now| {
            inos.iter().copied().filter(|ino| t.grant(now, call.by, *ino)).collect()
        })
    }

    /// Call this after the state was read. Returns the ticket of the answer, and the leases on what
    /// was read.
    pub(super) fn ticket(
        &self,
        call: &Call<'_>,
        inos: &BTreeSet<Ino>,
    ) -> Result<(Number, BTreeSet<Ino>)> {
        self.with(call.term, |t, now| {
            let ticket = t.leases.ticket();
            (ticket, inos.iter().copied().filter(|ino| t.grant(now, call.by, *ino)).collect())
        })
    }

    /// Call this before a change is checked. `Disconnected` if it was sent on a connection that its
    /// session has left.
    pub(super) fn in_time(&self, term: u64, by: Asker) -> Result<()> {
        if by.connection != 0
            && self.with(term, |t, _| t.leases.is_late(by.session, by.connection))?
        {
            let m = "the session has had no hello on this connection, or has a newer connection; \
                     connect again and send one";
            return Err(Error::new(Code::Disconnected, m));
        }
        Ok(())
    }

    /// Leases that a session gives back with a request.
    pub(super) fn dropped(&self, call: &Call<'_>, inos: &[Ino]) -> Result<()> {
        let by = call.by;
        self.with(call.term, |t, now| {
            t.leases.dropped(now, by.session, by.connection, call.seq, inos)
        })
    }

    /// Which of these inodes the asking session may cache.
    pub(super) fn held(&self, call: &Call<'_>, inos: &BTreeSet<Ino>) -> Result<Vec<Ino>> {
        let by = call.by;
        let holds = |t: &Table, ino| t.leases.holds(by.session, by.connection, ino);
        self.with(call.term, |t, _| inos.iter().copied().filter(|ino| holds(t, *ino)).collect())
    }

    /// Whether a session may become the writer of this many more files. Requests still in the log
    /// are not counted.
    pub(super) fn may_write(&self, call: &Call<'_>, more: usize) -> Result<bool> {
        let most = self.limits.of_writer;
        self.with(call.term, |t, _| more == 0 || t.writers.files(call.session()) + more <= most)
    }

    /// Announces that a request goes to the log.
    pub(super) fn expect(&self, call: &Call<'_>) -> Result<Expected<'_>> {
        let key = (call.session(), call.seq);
        self.with(call.term, |t, _| {
            t.expected.entry(key).or_insert(None);
        })?;
        Ok(Expected { recalls: self, key })
    }

    /// What the answer of a request that went through the log depends on. If it had run before: on
    /// anything.
    pub(super) fn outcome(&self, term: u64, of: &Expected<'_>) -> Result<Depends> {
        self.with(term, |t, _| {
            let known = t.expected.get(&of.key).cloned().flatten();
            known.unwrap_or(Depends { inos: None, ticket: t.leases.ticket() })
        })
    }

    /// Waits until no client caches the former state of what an answer depends on, and no write of
    /// an evicted session can arrive there any more.
    pub(super) async fn settled(&self, term: u64, on: &Depends) -> Result<()> {
        let mut waits = false;
        self.until(term, |t, now| {
            if t.leases.in_grace(now) {
                Leader::InGrace.taken();
                return false;
            }
            let settled = match &on.inos {
                Some(inos) => t.leases.is_settled(on.ticket, inos.iter().copied()),
                None => t.leases.is_all_settled(on.ticket),
            };
            let fenced = t.is_fenced(on.inos.as_ref());
            let over = settled && fenced;
            if !over && !std::mem::replace(&mut waits, true) {
                if settled { Leader::Unfenced.taken() } else { Leader::Waited.taken() }
            }
            over
        })
        .await
    }

    /// The inodes for which an answer would have to wait now. `NotServing`: all would, or there are
    /// more than `most`.
    pub(super) fn awaited(&self, term: u64, most: usize) -> Result<Vec<Ino>> {
        let awaited = |t: &mut Table, now| {
            let mut inos = t.leases.awaited(most).filter(|_| !t.leases.in_grace(now))?;
            inos.extend(
                t.fences.keys().chain(t.ends.keys().filter(|ino| !t.fences.contains_key(ino))),
            );
            (inos.len() <= most).then_some(inos)
        };
        self.with(term, awaited)?.ok_or_else(|| {
            Error::new(
                Code::NotServing,
                "too many changes are not settled yet to answer this; try again",
            )
        })
    }

    /// Whether writes of evicted sessions may still arrive somewhere.
    pub(super) fn fences(&self) -> bool {
        self.table.lock().as_ref().is_some_and(|t| !t.fences.is_empty())
    }

    /// All storage servers refuse the sessions evicted up to this number, and have finished their
    /// requests.
    pub(super) fn fenced(&self, term: u64, upto: u64) -> Result<()> {
        let less = self.with(term, |t, _| {
            let before = t.fences.len();
            t.fences.retain(|_, eviction| *eviction > upto);
            t.fences.len() < before
        })?;
        if less {
            bump(&self.news);
        }
        Ok(())
    }

    /// Some files whose size must be found out, with the last eviction.
    pub(super) fn endless(&self, limit: usize) -> Vec<(Ino, u64)> {
        let table = self.table.lock();
        table
            .iter()
            .flat_map(|t| &t.ends)
            .take(limit)
            .map(|(ino, eviction)| (*ino, *eviction))
            .collect()
    }

    /// The sizes of these files were found out, up to this eviction.
    pub(super) fn ends_found(&self, term: u64, found: &[(Ino, u64)]) -> Result<()> {
        self.with(term, |t, now| {
            for (ino, upto) in found {
                if t.ends.get(ino).is_some_and(|eviction| eviction <= upto) {
                    t.ends.remove(ino);
                    t.reports.restart(now, *ino);
                }
            }
        })?;
        bump(&self.news);
        Ok(())
    }

    /// Waits until the size of these files is known. That may take as long as one of their chains
    /// has no replica that answers; so this returns `Overloaded` before the client would take this
    /// server for dead, and the client asks again.
    pub(super) async fn ends_known(&self, term: u64, inos: &BTreeSet<Ino>) -> Result<()> {
        let mut waits = false;
        let known = self.until(term, |t, _| {
            let known = t.ends.is_empty() || !inos.iter().any(|ino| t.ends.contains_key(ino));
            if !known && !std::mem::replace(&mut waits, true) {
                Leader::Unfenced.taken();
            }
            known
        });
        tokio::time::timeout(ENDS_WAIT, known).await.unwrap_or_else(|_| {
            let m = "an evicted client wrote this file, and storage servers that know its size do \
                     not answer; see `strake status`";
            Err(Error::new(Code::Overloaded, m))
        })
    }

    async fn until(&self, term: u64, mut over: impl FnMut(&Table, Duration) -> bool) -> Result<()> {
        let mut news = self.news.subscribe();
        while !self.with(term, |t, now| over(t, now))? {
            news.changed()
                .await
                .map_err(|_| Error::new(Code::Disconnected, "this server is stopping"))?;
        }
        Ok(())
    }

    // --- reports ---

    /// Asks other writers of these files to report, and returns what to wait for.
    pub(super) fn ask(
        &self,
        call: &Call<'_>,
        inos: &BTreeSet<Ino>,
    ) -> Result<Vec<(SessionId, Number)>> {
        self.ask_those(call, inos, |_, _| true)
    }

    /// A session may write these files, and the other writers know it. Asks those that may have
    /// dirty data to report, and waits for that. They then keep no dirty data any more, unless one
    /// was left as the only writer meanwhile.
    pub(super) async fn wait_for_holders(
        &self,
        call: &Call<'_>,
        inos: &BTreeSet<Ino>,
    ) -> Result<()> {
        let term = call.term;
        let before = self.with(term, |t, _| t.writers.holders(inos))?;
        let asked = self.ask_those(call, inos, |ino, id| before.are(ino, id))?;
        if asked.is_empty() {
            return Ok(());
        }
        Reporting::AskedToWrite.taken();
        self.reported(term, &asked).await?;
        self.with(term, |t, _| t.writers.have_reported(before, call.session()))
    }

    fn ask_those(
        &self,
        call: &Call<'_>,
        inos: &BTreeSet<Ino>,
        are: impl Fn(Ino, SessionId) -> bool,
    ) -> Result<Vec<(SessionId, Number)>> {
        let asked = self.with(call.term, |t, now| {
            let mut asked = Vec::new();
            for ino in inos {
                let those = t.writers.others(call.session(), *ino).filter(|id| are(*ino, *id));
                for id in those.collect::<Vec<_>>() {
                    asked.push((id, t.reports.ask(now, id, *ino)));
                    t.ring(id);
                }
            }
            asked
        })?;
        if !asked.is_empty() {
            self.alarm.notify_one();
        }
        Ok(asked)
    }

    /// Waits until these sessions have reported, or no longer can.
    pub(super) async fn reported(&self, term: u64, asked: &[(SessionId, Number)]) -> Result<()> {
        self.until(term, |t, _| asked.iter().all(|(id, number)| t.reports.is_in(*id, *number)))
            .await
    }

    // --- locks ---

    /// These sessions hold conflicting locks. Asks each to release those that none of its programs
    /// holds any more, and waits for the answers, with a time limit.
    pub(super) async fn check_locks(
        &self,
        term: u64,
        ino: Ino,
        holders: &BTreeSet<SessionId>,
    ) -> Result<()> {
        let asked = self.with(term, |t, now| {
            let in_grace = t.leases.in_grace(now);
            let ask = |id: &SessionId| Some((*id, t.checks.ask(now, *id, ino, in_grace)?));
            let asked: Vec<_> = holders.iter().filter_map(ask).collect();
            asked.iter().for_each(|(id, _)| t.ring(*id));
            asked
        })?;
        if asked.is_empty() {
            return Ok(());
        }
        self.alarm.notify_one();
        self.until(term, |t, _| asked.iter().all(|(id, number)| t.checks.is_in(*id, *number))).await
    }

    // --- pages of mappings ---

    /// A session has page locks of a file from now on, so others that may write it must take its
    /// lock to change anything. Returns when they know, and their earlier changes are done.
    pub(super) async fn tell_writers(&self, term: u64, session: SessionId, ino: Ino) -> Result<()> {
        let telling = self.with(term, |t, now| {
            let others = t.writers.others(session, ino);
            let telling = t.pages.tell(now, ino, others, |id| t.leases.connection(id));
            telling.sessions().for_each(|id| t.ring(id));
            telling
        })?;
        if !telling.is_empty() {
            self.alarm.notify_one();
        }
        // A session evicted meanwhile was not told: its writes must not arrive any more.
        let inos = BTreeSet::from([ino]);
        self.until(term, |t, _| t.pages.know(&telling) && t.is_fenced(Some(&inos))).await?;
        self.with(term, |t, _| t.pages.told(ino, session, &telling, |id| t.leases.connection(id)))
    }

    /// A waiter needs page locks of a file that these sessions have: each is asked to give them
    /// back, unless it was asked and is working on it.
    pub(super) fn want_pages(
        &self,
        term: u64,
        ino: Ino,
        holders: &BTreeSet<SessionId>,
    ) -> Result<()> {
        let any = self.with(term, |t, now| {
            let new = t.pages.want(now, ino, holders);
            new.iter().for_each(|id| t.ring(*id));
            !new.is_empty()
        })?;
        if any {
            self.alarm.notify_one();
        }
        Ok(())
    }

    /// These sessions cannot report on these files yet.
    pub(super) fn excuse(&self, those: &[(SessionId, Ino)]) {
        let now = self.env.boot();
        if let Some(t) = self.table.lock().as_mut() {
            those.iter().for_each(|(id, ino)| t.reports.excuse(now, *id, *ino));
        }
    }

    /// Leaves attributes out of a listing that another session may still have to report, or that
    /// are not known yet.
    pub(super) fn leave_out(&self, call: &Call<'_>, results: &mut [pb::OpResult]) -> Result<()> {
        let session = call.session();
        self.with(call.term, |t, _| {
            let written =
                |ino| t.ends.contains_key(&ino) || t.writers.others(session, ino).next().is_some();
            for e in results.iter_mut().flat_map(|r| &mut r.entries).filter(|e| e.attr.is_some()) {
                if written(e.ino) {
                    Reporting::LeftOut.taken();
                    e.attr = None;
                }
            }
        })
    }

    /// Leaves out the attributes of a file whose name was removed or moved, if they are not known
    /// yet: only the name matters.
    pub(super) fn leave_out_of_names(
        &self,
        term: u64,
        ops: &[pb::Op],
        results: &mut [pb::OpResult],
    ) -> Result<()> {
        use pb::op::Op::{Rename, Unlink};
        self.with(term, |t, _| {
            for (op, r) in ops.iter().zip(results) {
                if matches!(op.op, Some(Rename(_) | Unlink(_)))
                    && r.attr.is_some_and(|a| t.ends.contains_key(&a.ino))
                {
                    Reporting::LeftOut.taken();
                    r.attr = None;
                }
            }
        })
    }

    // --- time ---

    /// Waits until something may end through time, and returns whether it may now. If not,
    /// something was added that may end first.
    pub(super) async fn next_end(&self) -> bool {
        let now = self.env.boot();
        let next = self.table.lock().as_ref().and_then(|t| t.next_end(now));
        let pause = next.map_or(TICK, |at| at.saturating_sub(now).min(TICK));
        tokio::select! {
            biased;
            () = sleep(pause) => true,
            () = self.alarm.notified() => false,
        }
    }

    /// The sessions that are asked to report, or to give back page locks.
    pub(super) fn asked(&self) -> BTreeSet<SessionId> {
        self.table
            .lock()
            .as_ref()
            .map(|t| t.reports.asked().chain(t.pages.asked()).collect())
            .unwrap_or_default()
    }

    /// Ends what is over. Returns the sessions that did not forget in time, and those that did not
    /// report, with the file. Sessions in `gone` have not been heard of for a while.
    pub(super) fn tick(
        &self,
        gone: &BTreeSet<SessionId>,
    ) -> (Vec<SessionId>, Vec<(SessionId, Ino)>) {
        let now = self.env.boot();
        let mut table = self.table.lock();
        let Some(t) = table.as_mut() else { return Default::default() };
        // A server that stood still for a term has no leases left to wait for, and cannot have
        // heard reports: it must evict nobody for its own fault.
        if now.saturating_sub(std::mem::replace(&mut t.ticked, now)) > STALL {
            t.reports.all_heard(now);
            t.pages.all_heard(now);
        }
        t.checks.expire(now, CHECK);
        let mut silent = t.leases.tick(now);
        let keep_pages = t.pages.overdue(now, self.limits.patience, gone);
        keep_pages.iter().for_each(|_| Paging::Late.taken());
        silent.extend(keep_pages.into_iter().map(|(id, _)| id));
        let late = t.reports.overdue(now, self.limits.patience, gone);
        drop(table);
        bump(&self.news);
        (silent, late)
    }
}
