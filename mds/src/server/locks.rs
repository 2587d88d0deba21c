//! The leader's part in locks: it refuses conflicting locks without a log entry, keeps a free lock
//! for the waiter whose turn it is, and tells clients of their turns. The rules are in
//! `docs/locks.md`, the table in `lock_waiters`.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use bytes::Bytes;
use strake_proto::{Code, Error, Ino, Result, SessionId, pb};
use strake_runtime::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{call::Call, member::Member, recalls::bump, wire::encode};
use crate::{
    lock_waiters::{
        Entry, LockWaiters, MAX_LOOKS, MAX_SEARCH, is_of_pages,
        verdict::{self, Verdict},
    },
    namespace::{
        locks::{self, Owner, Want},
        spans::Span,
    },
};
use pb::op::Op;

/// How long the request with a list of waits is held. Less than a client waits for an answer.
const POLL: Duration = Duration::from_secs(3);
/// Most conflicting locks whose holders are asked at once. Those that they keep conflict, whatever
/// the others do.
const MAX_ASKED: usize = 64;
/// How often turns that were not taken are looked for.
const TICK: Duration = Duration::from_millis(250);

/// The locks that a list of operations asks for. An operation that the log is to refuse counts as
/// none.
fn wants(session: SessionId, ops: &[pb::Op]) -> Vec<Want> {
    let want = |o: &pb::Op| {
        let Some(Op::SetLock(o)) = &o.op else { return None };
        let (who, span, _) = locks::want(o.ino, session, o.owner, o.kind, o.span.as_ref()).ok()?;
        Some(Want { ino: o.ino, who, span: span? })
    };
    ops.iter().filter_map(want).collect()
}

/// See the module.
pub(super) struct LockService {
    member: Arc<Member>,
    /// Changes when a lock waiter may have its turn.
    turns: watch::Sender<u64>,
}

impl LockService {
    pub(super) fn new(member: Arc<Member>) -> LockService {
        LockService { member, turns: watch::Sender::new(0) }
    }

    /// Call this before a client's new list goes to the log. `LockConflict` for a lock that another
    /// owner has. While it is another waiter's turn, this waits until that is decided; a patient
    /// request is told of a conflict at once. `Overloaded` while writes of an evicted session may
    /// still arrive.
    pub(super) async fn check_locks(&self, call: &Call<'_>, ops: &[pb::Op]) -> Result<()> {
        let wants = wants(call.session(), ops);
        if wants.is_empty() {
            return Ok(());
        }
        self.member.node.read_barrier().await?;
        if self.member.machine.namespace.has_reply(call.session(), call.seq) {
            return Ok(());
        }
        for want in &wants {
            let fence = match (wants.len(), ops) {
                // In a list, one operation may free what the next one needs.
                (1, [op]) => self.check_lock(call.term, want, op).await?,
                _ => self.member.machine.namespace.barring(want, 0)?.1,
            };
            self.member.check_fence(fence)?;
        }
        Ok(())
    }

    /// See [`LockService::check_locks`]. Returns the fence of the file.
    async fn check_lock(&self, term: u64, want: &Want, op: &pb::Op) -> Result<u64> {
        let patient = matches!(&op.op, Some(Op::SetLock(o)) if o.patient);
        let mut turns = self.turns.subscribe();
        let mut asked = BTreeSet::new();
        loop {
            let now = self.member.env.boot();
            let (barring, fence, turn) = self.member.with_lead(|l| {
                // A lock that was released a moment ago may belong to a waiter by now.
                if l.lock_waiters.look(now, want.ino, |w| self.is_barred(w))? {
                    self.tell_turns();
                }
                let turn = l.lock_waiters.is_anothers_turn(now, want);
                let (barring, fence) = self.member.machine.namespace.barring(want, MAX_ASKED)?;
                Ok((barring, fence, turn))
            })?;
            let verdict = verdict::judge(want, patient, &barring, turn, &asked);
            if let Verdict::Ask(new) = verdict {
                self.ask_holders(term, want.ino, new, &mut asked).await?;
                continue;
            }
            if is_of_pages(want) {
                self.want_pages(
                    term,
                    want.ino,
                    &barring.iter().map(|(who, _)| who.session).collect(),
                )?;
            }
            match verdict {
                Verdict::Refused(m) => return Err(Error::new(Code::LockConflict, m)),
                Verdict::Free => return Ok(fence),
                Verdict::AfterTurn | Verdict::Ask(_) => {}
            }
            // Woken when a turn ends; the timeout covers changes that wake nothing.
            let _ = timeout(TICK, turns.changed()).await;
        }
    }

    /// Call this before an owner is told that others hold conflicting locks: their sessions release
    /// locks that their programs closed before this. Each is asked once. Returns whether some were
    /// asked, so that the caller must look again. A request that another owner gave up may still
    /// arrive, so holders that appear meanwhile are asked, too. The client itself checks locks of
    /// its own session.
    async fn settle(
        &self,
        term: u64,
        want: &Want,
        barring: &[(Owner, Span)],
        asked: &mut BTreeSet<SessionId>,
    ) -> Result<bool> {
        let new = verdict::to_ask(want, barring, asked);
        if new.is_empty() {
            return Ok(false);
        }
        self.ask_holders(term, want.ino, new, asked).await?;
        Ok(true)
    }

    async fn ask_holders(
        &self,
        term: u64,
        ino: Ino,
        new: BTreeSet<SessionId>,
        asked: &mut BTreeSet<SessionId>,
    ) -> Result<()> {
        self.member.recalls.check_locks(term, ino, &new).await?;
        asked.extend(new);
        Ok(())
    }

    /// Whether the log refused a lock because of another one that is released by now. Between
    /// [`LockService::check_locks`] and the log a lock may arrive whose caller has gone, and which
    /// is released at once: its holder is asked before a conflict is reported, as there.
    pub(super) async fn was_refused_for_nothing(
        &self,
        call: &Call<'_>,
        ops: &[pb::Op],
        results: &[pb::OpResult],
    ) -> Result<bool> {
        let ([op], [result]) = (ops, results) else { return Ok(false) };
        let patient = matches!(&op.op, Some(Op::SetLock(o)) if o.patient);
        let refused = result.status.as_ref().is_some_and(|s| s.code == Code::LockConflict as u32);
        let Some(want) = wants(call.session(), ops).pop().filter(|_| refused && !patient) else {
            return Ok(false);
        };
        let mut asked = BTreeSet::new();
        let barring = || self.member.machine.namespace.barring(&want, MAX_ASKED);
        while self.settle(call.term, &want, &barring()?.0, &mut asked).await? {}
        Ok(barring()?.0.is_empty())
    }

    fn want_pages(&self, term: u64, ino: Ino, holders: &BTreeSet<SessionId>) -> Result<()> {
        if holders.is_empty() { Ok(()) } else { self.member.recalls.want_pages(term, ino, holders) }
    }

    /// Asks sessions to give back pages that others wait for.
    fn want_all_pages(&self) -> Result<()> {
        let term = self.member.leading()?;
        let wanted = self.member.with_lead(|l| {
            let barring = |want: &Want| {
                let found = self.member.machine.namespace.barring(want, MAX_ASKED)?.0;
                Ok(found.into_iter().map(|(who, _)| who).collect())
            };
            let holders = |ino| Ok((ino, l.lock_waiters.keep_waiting(ino, barring)?));
            l.lock_waiters.pages_wanted().into_iter().map(holders).collect::<Result<Vec<_>>>()
        })?;
        wanted.into_iter().try_for_each(|(ino, holders)| self.want_pages(term, ino, &holders))
    }

    /// Call this after a client's list ran: it may use the page locks it got once all sessions that
    /// may write the file know of them.
    pub(super) async fn tell_writers(&self, call: &Call<'_>, ops: &[pb::Op]) -> Result<()> {
        for want in wants(call.session(), ops).iter().filter(|want| is_of_pages(want)) {
            self.member.recalls.tell_writers(call.term, call.session(), want.ino).await?;
        }
        Ok(())
    }

    /// Marks results for files that may be written from now on, or were truncated, if other
    /// sessions have page locks of them.
    pub(super) fn mark_pages(
        &self,
        call: &Call<'_>,
        ops: &[pb::Op],
        results: &mut [pb::OpResult],
    ) -> Result<()> {
        for (op, r) in ops.iter().zip(results) {
            let marks = match &op.op {
                Some(Op::Setattr(s)) => s.size.is_some(),
                _ => r.writer != 0,
            };
            if marks {
                let ino = r.attr.as_ref().map_or(r.ino, |a| a.ino);
                r.pages = self.member.machine.namespace.pages_of_others(ino, call.session())?;
            }
        }
        Ok(())
    }

    /// Call this before reading for a list that asks which lock conflicts.
    pub(super) async fn settle_questions(&self, call: &Call<'_>, ops: &[pb::Op]) -> Result<()> {
        for op in ops {
            if let Some(Op::GetLock(o)) = &op.op
                && let Ok((who, Some(span), _)) =
                    locks::want(o.ino, call.session(), o.owner, o.kind, o.span.as_ref())
            {
                let (want, mut asked) = (Want { ino: o.ino, who, span }, BTreeSet::new());
                let barring = || self.member.machine.namespace.barring(&want, MAX_ASKED);
                while self.settle(call.term, &want, &barring()?.0, &mut asked).await? {}
            }
        }
        Ok(())
    }

    /// Call this after a client's list ran: waiters that got their lock wait no longer.
    pub(super) fn note_locks(&self, call: &Call<'_>, ops: &[pb::Op]) {
        let over = |o: &pb::Op| match &o.op {
            Some(Op::SetLock(o)) if o.wait != 0 => Some(o.wait),
            _ => None,
        };
        let over: Vec<u64> = ops.iter().filter_map(over).collect();
        if !over.is_empty() {
            let now = self.member.env.boot();
            let _ = self.member.with_lead(|l| {
                over.into_iter().for_each(|id| l.lock_waiters.given(now, call.session(), id));
                Ok(())
            });
            self.tell_turns();
        }
    }

    pub(super) async fn wait(&self, request: pb::LockWaitRequest) -> Result<Bytes> {
        let session = request.session;
        let entry = |w: &pb::LockWait| {
            let (who, span, _) = locks::want(w.ino, session, w.owner, w.kind, w.span.as_ref())?;
            let span = span.ok_or_else(|| Error::new(Code::Inval, "an unlock has no waiters"))?;
            Ok(Entry { id: w.id, want: Want { ino: w.ino, who, span }, trying: w.trying })
        };
        let list: Vec<Entry> = request.waits.iter().map(entry).collect::<Result<_>>()?;
        self.member.node.read_barrier().await?;
        let mut turns = self.turns.subscribe();
        let number = request.number;
        let mut reply = self.enlist(session, number, &list)?;
        self.tell_turns();
        self.want_all_pages()?;
        let deadline = Instant::now() + POLL;
        while reply == pb::LockWaitReply::default() && !list.is_empty() {
            let over = timeout_at(deadline, turns.changed()).await.is_err();
            let newest = self.member.with_lead(|l| {
                reply.ready = l.lock_waiters.ready(session);
                Ok(l.lock_waiters.is_newest(session, number))
            })?;
            if over || !newest {
                break;
            }
        }
        Ok(encode(&reply))
    }

    /// Takes a list of waits and returns what is known at once.
    fn enlist(&self, session: SessionId, number: u64, list: &[Entry]) -> Result<pb::LockWaitReply> {
        let namespace = &self.member.machine.namespace;
        let now = self.member.env.boot();
        self.member.with_lead(|l| {
            if namespace.session(session).is_none() {
                return Err(Error::new(
                    Code::NoSession,
                    format!("session {session} has ended; mount again"),
                ));
            }
            let files = l.lock_waiters.set(now, session, number, list)?;
            let (mut reply, mut looks) = (pb::LockWaitReply::default(), MAX_LOOKS);
            let owners = |w: &Want| {
                Ok(namespace.barring(w, MAX_SEARCH)?.0.into_iter().map(|(who, _)| who).collect())
            };
            for e in list.iter().filter(|e| e.want.who.kind == pb::LockKind::LockPosix && !e.trying)
            {
                if l.lock_waiters.is_deadlock(&e.want, &mut looks, owners)? {
                    reply.deadlock.push(e.id);
                }
            }
            for ino in files {
                l.lock_waiters.look(now, ino, |w| self.is_barred(w))?;
            }
            reply.ready = l.lock_waiters.ready(session);
            reply.ready.retain(|id| !reply.deadlock.contains(id));
            Ok(reply)
        })
    }

    /// Serves the waiters while this server leads.
    pub(super) async fn serve(&self) {
        let news = self.member.machine.namespace.lock_news();
        loop {
            tokio::select! {
                biased;
                () = news.changed() => {}
                () = sleep(TICK) => {}
            }
            let (changed, now) = (news.take(), self.member.env.boot());
            let seen = self.member.with_lead(|l| {
                let mut files = l.lock_waiters.expire(now);
                files.extend(changed);
                self.look_at(now, &mut l.lock_waiters, &files);
                Ok(!files.is_empty())
            });
            if seen.unwrap_or(false) {
                self.tell_turns();
            }
            let _ = self.want_all_pages();
        }
    }

    /// Whether other locks conflict.
    fn is_barred(&self, want: &Want) -> Result<bool> {
        Ok(!self.member.machine.namespace.barring(want, 1)?.0.is_empty())
    }

    fn tell_turns(&self) {
        bump(&self.turns);
    }

    fn look_at(&self, now: Duration, waits: &mut LockWaiters, files: &BTreeSet<Ino>) {
        for ino in files {
            // If the state cannot be read now, it is tried again later.
            let _ = waits.look(now, *ino, |w| self.is_barred(w));
        }
    }
}
