//! What is committed goes into the state, and who waits for it is answered; once the state is durable the log may be cut.

use bytes::Bytes;
use raft::eraftpb::{ConfState, Entry, EntryType};
use strake_proto::{Code, Error, Result};
use tokio::runtime::RuntimeFlavor;

use super::{
    super::{Committed, log::entry_cost},
    Driver, Event, Job, ToApply, Waiter, conf_bytes, lost,
};

impl Driver {
    pub(super) fn apply(&mut self, work: ToApply) -> Result<()> {
        let Some(last) = work.entries.last().map(|e| (e.index, e.term)) else { return Ok(()) };
        let committed = |e: &Entry| Committed {
            index: e.index,
            term: e.term,
            data: if e.get_entry_type() == EntryType::EntryNormal { e.data.clone() } else { Bytes::new() },
        };
        let entries: Vec<Committed> = work.entries.iter().map(committed).collect();
        let conf = match &work.conf {
            Some(c) => Some(conf_bytes(c)?),
            None if self.conf_unknown => Some(conf_bytes(self.core.conf())?),
            None => None,
        };
        let replies = match self.sm.apply(entries, last, conf) {
            Ok(r) => r,
            Err(e) if e.code == Code::NoSpc => {
                self.stall(e);
                self.backlog = Some(work);
                return Ok(());
            }
            // Whatever these entries ask for, the others do it: this member must not answer in their place.
            Err(e) if e.code == Code::Corrupt && !self.alone() => {
                self.backlog = Some(work);
                self.note_damage(e.clone());
                self.mind_damage();
                if self.backlog.is_some() {
                    self.stall(e);
                }
                return Ok(());
            }
            Err(e) => return Err(e.context("applying metadata changes")),
        };
        self.conf_unknown = false;
        self.answer(&work, replies);
        self.core.applied(last.0, last.1);
        if let Some(conf) = work.conf {
            self.membership_changed(&conf);
        }
        Ok(())
    }

    fn answer(&mut self, work: &ToApply, replies: Vec<Bytes>) {
        for (e, reply) in work.entries.iter().zip(replies) {
            let Some((term, waiter)) = self.waiters.remove(&e.index) else { continue };
            match waiter {
                Waiter::Proposal(w) if term == e.term => drop(w.send(Ok(reply))),
                Waiter::Proposal(w) => drop(w.send(Err(lost()))),
                Waiter::Change(w) if term != e.term => drop(w.send(Err(lost()))),
                Waiter::Change(w) if e.get_entry_type() == EntryType::EntryNormal => {
                    let _ = w.send(Err(Error::new(Code::Busy, "another membership change was under way; try again")));
                }
                Waiter::Change(w) => self.leaving_joint.push(w),
            }
        }
        if self.core.conf().voters_outgoing.is_empty() && !self.leaving_joint.is_empty() && self.joint_left.is_none() {
            self.joint_left = work.entries.last().map(|e| e.index);
        }
    }

    pub(super) fn answer_changes(&mut self) {
        if self.joint_left.take_if(|index| self.core.majority_knows(*index)).is_some() {
            self.leaving_joint.drain(..).for_each(|w| drop(w.send(Ok(()))));
        }
    }

    fn membership_changed(&mut self, conf: &ConfState) {
        tracing::info!(voters = ?conf.voters, learners = ?conf.learners, "members of the metadata group");
        if self.core.is_leader() && conf.voters_outgoing.is_empty() && !conf.voters.contains(&self.cfg.id) {
            self.core.step_down();
        }
        let member = [&conf.voters, &conf.voters_outgoing, &conf.learners].iter().any(|l| l.contains(&self.cfg.id));
        if !member && self.removed.is_none() {
            tracing::warn!("this metadata server was removed from its group and will stop");
            self.removed = Some(0);
        }
    }

    /// Cuts the log when it is long: first the state must be durable.
    pub(super) fn maybe_sync(&mut self) {
        let image = self.core.image();
        let long = image.bytes() > self.cfg.log_bytes || image.entries.len() > self.cfg.log_entries;
        let (index, _) = self.core.applied_to();
        if !long || self.syncing || self.core.has_lost_state() || self.cut_target(index) <= image.base.0 {
            return;
        }
        self.syncing = true;
        let (sm, events) = (self.sm.clone(), self.events_tx.clone());
        let task = self.env.spawn(async move {
            // Blocks on the disk; elections must not wait for that.
            let result = match tokio::runtime::Handle::current().runtime_flavor() {
                RuntimeFlavor::MultiThread => tokio::task::block_in_place(|| sm.sync()),
                _ => sm.sync(),
            };
            let _ = events.send(Event::Synced(index, result)).await;
        });
        self.tasks.retain(|t| !t.is_finished());
        self.tasks.push(task);
    }

    /// Up to where to cut if everything up to `durable` may go: half the limit stays, and what copies under way need.
    fn cut_target(&self, durable: u64) -> u64 {
        let image = self.core.image();
        let (mut kept, mut index) = (0, image.last());
        while let Some(e) = image.get(index) {
            kept += entry_cost(e);
            if kept > self.cfg.log_bytes / 2 || image.last() - index >= self.cfg.log_entries as u64 / 2 {
                break;
            }
            index -= 1;
        }
        let hard_limit = image.bytes() > self.cfg.log_bytes.saturating_mul(4);
        let copies = self.outgoing.values().map(|o| o.1).min().filter(|_| !hard_limit).unwrap_or(u64::MAX);
        index.min(durable).min(copies)
    }

    pub(super) fn synced(&mut self, index: u64, result: Result<()>) -> Result<()> {
        self.syncing = false;
        match result {
            Ok(()) if !self.core.has_lost_state() => {
                let target = self.cut_target(index);
                match self.core.cut(target) {
                    Some(op) => self.write(Job { ops: vec![op], number: None, restoring: None }),
                    None => Ok(()),
                }
            }
            Ok(()) => Ok(()),
            Err(e) if e.code == Code::NoSpc => {
                tracing::error!("the metadata state cannot be made durable, the raft log grows: {e}");
                Ok(())
            }
            Err(e) if e.code == Code::Corrupt && !self.alone() => {
                self.note_damage(e);
                Ok(())
            }
            Err(e) => Err(e.context("making the metadata state durable")),
        }
    }
}
