//! Answers lists of operations that change something. Each runs once, however often it arrives. See
//! `docs/leases.md`.

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Ino, Result, cap::long_ago, pb};

use super::{
    call::Call,
    chunks::Trims,
    disk_space::Need,
    fair::Fair,
    heavy,
    locks::LockService,
    member::{Member, never_ran},
    reads::shown,
    session_service::SessionService,
    wire::{misread, ok},
};
use crate::{
    leases::rows::Reporting,
    namespace::{Namespace, effects, level},
    request_dedup::{Begun, RequestDedup},
};

/// A request that is being checked; if this is dropped, the request may come again.
struct Looking<'a> {
    changes: &'a Changes,
    call: &'a Call<'a>,
}

impl Drop for Looking<'_> {
    fn drop(&mut self) {
        self.changes.request_dedup.lock().not_looked(self.call.session(), self.call.seq);
    }
}

impl Looking<'_> {
    fn pass(self) -> Result<()> {
        self.changes.request_dedup.lock().passed(self.call.session(), self.call.seq)
    }
}

/// The answer to a list if nothing of it ran.
fn refusal(e: &Error) -> pb::MetaReply {
    pb::MetaReply {
        results: vec![pb::OpResult { status: Some(e.to_status()), ..Default::default() }],
        granted: vec![],
    }
}

/// Whether a heavy list may run.
fn check_moves(turn: &mut heavy::Turn, ops: &[pb::Op]) -> Result<()> {
    if !Namespace::has_too_many_moves(ops) {
        return Ok(());
    }
    turn.refused = true;
    let m = "a list that moves several names between deep directories is too much work for one \
             request; split it";
    Err(Error::new(Code::TooBig, m))
}

/// The answer to a request for a lock that need not have been refused.
const RELEASED: &str = "the lock in the way was released meanwhile; try again";

/// See the module.
pub(super) struct Changes {
    pub member: Arc<Member>,
    pub sessions: Arc<SessionService>,
    pub locks: Arc<LockService>,
    pub trims: Arc<Trims>,
    pub fair: Arc<Fair>,
    pub request_dedup: Mutex<RequestDedup>,
}

impl Changes {
    /// Forgets the requests of sessions that have ended.
    pub(super) fn forget_ended(&self) {
        self.request_dedup.lock().retain(|id| self.member.machine.namespace.session(id).is_some());
    }

    /// Answers a list that changes something.
    pub(super) async fn change(
        &self,
        call: &Call<'_>,
        mut request: pb::MetaRequest,
    ) -> Result<pb::MetaReply> {
        let (term, recalls) = (call.term, &self.member.recalls);
        // Read before the check whether the list ran: if it did not, its entry comes later.
        let before = self.member.machine.namespace.version();
        recalls.in_time(term, call.by)?;
        recalls.dropped(call, &std::mem::take(&mut request.dropped))?;
        let rules = level::rules(self.member.map().map.level);
        (request.follower, request.ends_matter, request.rules) = (false, true, rules);
        let looking = match self.begin(&request)? {
            Begun::Refused(e) => return Ok(refusal(&e)),
            Begun::First => Some(Looking { changes: self, call }),
            Begun::Again => None,
        };
        // The entry of a list that ran already is not known: its rights are checked once more.
        let looked = if looking.is_some() { before + 1 } else { long_ago(before) };
        if let (Some(_), Err(e)) = (&looking, self.check_space(call, &request.ops)?) {
            return Ok(self.refuse_list(call, &e));
        }
        // Writes that others made before come before this: a size and times that are set now must
        // stay.
        self.have_reported(call, &request.ops).await?;
        if looking.is_some() {
            match self.locks.check_locks(call, &request.ops).await {
                Err(e) if !e.is_retryable() => return Ok(self.refuse_list(call, &e)),
                r => r?,
            }
        }
        let mut turn = self.fair.heavy_turn(call.peer, request.session, &request.ops).await?;
        let refused = turn.as_mut().and_then(|turn| check_moves(turn, &request.ops).err());
        if let (Some(_), Some(e)) = (&looking, refused) {
            return Ok(self.refuse_list(call, &e));
        }
        let in_log = self.fair.change_turn(call.peer, call.session(), request.ops.len()).await?;
        looking.as_ref().map_or(Ok(()), |_| self.check_targets(&request))?;
        let expected = recalls.expect(call)?;
        // Checked again after all the waiting.
        recalls.in_time(term, call.by)?;
        looking.map_or(Ok(()), Looking::pass)?;
        let ops = request.ops.clone();
        let mut reply = match self.propose_list(request).await? {
            Ok(reply) => reply,
            Err(e) => return Ok(refusal(&e)),
        };
        drop((turn, in_log));
        let depends = recalls.outcome(term, &expected)?;
        drop(expected);
        if reply.results.iter().all(ok) {
            self.locks.note_locks(call, &ops);
            self.trims.wait_for_trims(term, &ops, &reply.results).await?;
            self.sessions.note_handles(call, looked, &ops, &mut reply.results)?;
        }
        recalls.settled(term, &depends).await?;
        if self.locks.was_refused_for_nothing(call, &ops, &reply.results).await? {
            return Ok(refusal(&Error::new(Code::Overloaded, RELEASED)));
        }
        if reply.results.iter().all(ok) {
            self.wait_for_held_back(call, &ops, &reply.results).await?;
            recalls.settled(term, &depends).await?;
            self.locks.tell_writers(call, &ops).await?;
            self.locks.mark_pages(call, &ops, &mut reply.results)?;
        }
        recalls.leave_out_of_names(term, &ops, &mut reply.results)?;
        recalls.ends_known(term, &shown(&reply)).await?;
        reply.granted = recalls.held(call, &effects::told(&ops, &reply.results))?;
        Ok(reply)
    }

    fn begin(&self, r: &pb::MetaRequest) -> Result<Begun> {
        let ran = || self.member.machine.namespace.has_reply(r.session, r.seq);
        if ran() {
            // An attempt whose waiter was dropped may still count as one that may run.
            self.request_dedup.lock().ran(r.session, r.seq);
            return Ok(Begun::Again);
        }
        self.member.machine.namespace.takes_number(r.session, r.seq)?;
        let begun = self.request_dedup.lock().begin(r.session, r.seq, r.lowest_unanswered)?;
        // It may have run meanwhile, and then is no longer among the proposed requests.
        if begun == Begun::First && ran() {
            self.request_dedup.lock().not_looked(r.session, r.seq);
            return Ok(Begun::Again);
        }
        Ok(begun)
    }

    fn refuse_list(&self, call: &Call<'_>, e: &Error) -> pb::MetaReply {
        self.request_dedup.lock().refused(call.session(), call.seq, e);
        refusal(e)
    }

    /// Whether there is space for the list; the inner error is its answer.
    fn check_space(&self, call: &Call<'_>, ops: &[pb::Op]) -> Result<Result<()>> {
        let writes = ops.iter().filter(|o| effects::enlists(o)).count();
        if !self.member.recalls.may_write(call, writes)? {
            let m = format!(
                "session {} has too many files open for writing; close some",
                call.session()
            );
            return Ok(Err(Error::new(Code::Overloaded, m)));
        }
        Ok(self.member.disk_space.check(Need::of_list(ops)))
    }

    /// Refuses a list for now if the answer would be that no target takes a file, while targets
    /// that would take it are away. An answer from the log would be final.
    fn check_targets(&self, r: &pb::MetaRequest) -> Result<()> {
        if self.member.machine.namespace.waits_for_targets(r.session, r.creds.as_ref(), &r.ops)? {
            let m = "no storage target that could take the file answers; see `strake status`";
            return Err(Error::new(Code::Overloaded, m));
        }
        Ok(())
    }

    async fn have_reported(&self, call: &Call<'_>, ops: &[pb::Op]) -> Result<()> {
        let set = ops.iter().filter(|o| effects::sets(o)).flat_map(effects::named).collect();
        let asked = self.member.recalls.ask(call, &set)?;
        if !asked.is_empty() {
            Reporting::AskedToSet.taken();
        }
        self.member.recalls.reported(call.term, &asked).await?;
        self.member.recalls.ends_known(call.term, &set).await
    }

    /// Gets a list into the log and applied. The inner error is its answer: the disk has no space
    /// for it.
    async fn propose_list(&self, request: pb::MetaRequest) -> Result<Result<pb::MetaReply>> {
        let (session, seq) = (request.session, request.seq);
        let ran = self.member.propose_anyway(pb::log_command::Command::Meta(request)).await;
        let e = match ran {
            Ok(ran) => {
                self.request_dedup.lock().ran(session, seq);
                let Some(pb::log_reply::Reply::Meta(reply)) = ran.reply else {
                    return Err(misread());
                };
                return Ok(Ok(reply));
            }
            Err(e) if !never_ran(&e) => return Err(e),
            Err(e) => e,
        };
        let full = e.code == Code::NoSpc;
        let last = self.request_dedup.lock().not_taken(session, seq, full.then_some(&e));
        match full {
            true if last => Ok(Err(e)),
            true => Err(Error::new(Code::Disconnected, e.message)),
            false => Err(e),
        }
    }

    /// A session that may write a file from now on waits for other sessions' dirty data of it: sent
    /// later, that would overwrite newer data. They know by now that they are not the only writer,
    /// and keep no more dirty data.
    async fn wait_for_held_back(
        &self,
        call: &Call<'_>,
        ops: &[pb::Op],
        results: &[pb::OpResult],
    ) -> Result<()> {
        let opened = ops.iter().zip(results).filter(|(o, _)| effects::enlists(o));
        let opened: BTreeSet<Ino> =
            opened.map(|(_, r)| r.attr.as_ref().map_or(r.ino, |a| a.ino)).collect();
        self.member.recalls.wait_for_holders(call, &opened).await
    }
}
