//! Applies committed entries to the state and answers the callers that wait for them. Once the
//! state is durable the log may be cut.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use bytes::Bytes;
use raft::eraftpb::{ConfState, Entry, EntryType};
use strake_proto::{Code, Error, Result};
use tokio::runtime::RuntimeFlavor;

use super::{
    super::{
        core::is_only_voter,
        log::{LogImage, entry_cost},
        types::{Committed, Config},
    },
    Driver, Shared, conf_bytes,
    log_queue::{Event, Job},
    stall::ToApply,
};

impl Driver {
    pub(super) fn apply(&mut self, work: ToApply) -> Result<()> {
        let Some(last) = work.entries.last().map(|e| (e.index, e.term)) else { return Ok(()) };
        let committed = |e: &Entry| Committed {
            index: e.index,
            term: e.term,
            data: if e.get_entry_type() == EntryType::EntryNormal {
                e.data.clone()
            } else {
                Bytes::new()
            },
        };
        let entries: Vec<Committed> = work.entries.iter().map(committed).collect();
        let conf = match &work.conf {
            Some(c) => Some(conf_bytes(c)?),
            None if self.conf_unknown => Some(conf_bytes(self.core.conf())?),
            None => None,
        };
        let replies =
            match unless_it_panics(&self.shared, &work, || self.sm.apply(entries, last, conf)) {
                Ok(r) => r,
                Err(e) if e.code == Code::NoSpc => {
                    self.stall(e);
                    self.stall.backlog = Some(work);
                    return Ok(());
                }
                // The other members apply these entries; this member must not answer in their place.
                Err(e) if e.code == Code::Corrupt && !is_only_voter(&self.core) => {
                    self.stall.backlog = Some(work);
                    self.damage.note(e.clone());
                    self.mind_damage();
                    if self.stall.backlog.is_some() {
                        self.stall(e);
                    }
                    return Ok(());
                }
                Err(e) => return Err(e.context("applying metadata changes")),
            };
        self.conf_unknown = false;
        self.waiters.answer(&work.entries, replies, !self.core.conf().voters_outgoing.is_empty());
        self.core.applied(last.0, last.1);
        if let Some(conf) = work.conf {
            self.membership_changed(&conf);
        }
        Ok(())
    }

    fn membership_changed(&mut self, conf: &ConfState) {
        tracing::info!(voters = ?conf.voters, learners = ?conf.learners, "members of the metadata group");
        if self.core.is_leader()
            && conf.voters_outgoing.is_empty()
            && !conf.voters.contains(&self.cfg.id)
        {
            self.core.step_down();
        }
        let member = [&conf.voters, &conf.voters_outgoing, &conf.learners]
            .iter()
            .any(|l| l.contains(&self.cfg.id));
        if !member && self.standing.removed.is_none() {
            tracing::warn!("this metadata server was removed from its group and will stop");
            self.standing.removed = Some(0);
        }
    }

    /// Cuts the log when it is long. The state must be durable first.
    pub(super) fn maybe_sync(&mut self) {
        let image = self.core.image();
        let long = image.bytes() > self.cfg.log_bytes || image.entries.len() > self.cfg.log_entries;
        let (index, _) = self.core.applied_to();
        let oldest_copy = self.copies.oldest();
        if !long
            || self.syncing
            || self.core.has_lost_state()
            || cut_target(&self.cfg, image, oldest_copy, index) <= image.base.0
        {
            return;
        }
        self.syncing = true;
        let (sm, events) = (self.sm.clone(), self.events_tx.clone());
        let task = self.env.spawn(async move {
            // This blocks on the disk, and elections must not wait for it.
            let result = match tokio::runtime::Handle::current().runtime_flavor() {
                RuntimeFlavor::MultiThread => tokio::task::block_in_place(|| sm.sync()),
                _ => sm.sync(),
            };
            let _ = events.send(Event::Synced(index, result)).await;
        });
        self.tasks.retain(|t| !t.is_finished());
        self.tasks.push(task);
    }

    pub(super) fn synced(&mut self, index: u64, result: Result<()>) -> Result<()> {
        self.syncing = false;
        match result {
            Ok(()) if !self.core.has_lost_state() => {
                let target = cut_target(&self.cfg, self.core.image(), self.copies.oldest(), index);
                match self.core.cut(target) {
                    Some(op) => self.log.write(Job::of(op)),
                    None => Ok(()),
                }
            }
            Ok(()) => Ok(()),
            Err(e) if e.code == Code::NoSpc => {
                tracing::error!(
                    "the metadata state cannot be made durable, the raft log grows: {e}"
                );
                Ok(())
            }
            Err(e) if e.code == Code::Corrupt && !is_only_voter(&self.core) => {
                self.damage.note(e);
                Ok(())
            }
            Err(e) => Err(e.context("making the metadata state durable")),
        }
    }
}

/// Makes a panic the reason why this member has stopped: its process ends, instead of hanging
/// without a driver.
fn unless_it_panics<T>(shared: &Shared, work: &ToApply, apply: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(apply)).unwrap_or_else(|panic| {
        let [first, last] =
            [work.entries.first(), work.entries.last()].map(|e| e.map_or(0, |e| e.index));
        let m = format!(
            "applying log entries {first} to {last} panicked; see docs/operations.md, \
             'A group that stops on an entry'"
        );
        tracing::error!("this metadata server cannot go on: {m}");
        shared.stopped.send_replace(Some(Error::new(Code::Io, m)));
        resume_unwind(panic)
    })
}

/// The index to cut up to if everything up to `durable` may go. Keeps half the limit, and the
/// entries that copies under way need; the oldest of those is as of entry `oldest_copy`.
fn cut_target(cfg: &Config, image: &LogImage, oldest_copy: Option<u64>, durable: u64) -> u64 {
    let (mut kept, mut index) = (0, image.last());
    while let Some(e) = image.get(index) {
        kept += entry_cost(e);
        if kept > cfg.log_bytes / 2 || image.last() - index >= cfg.log_entries as u64 / 2 {
            break;
        }
        index -= 1;
    }
    let hard_limit = image.bytes() > cfg.log_bytes.saturating_mul(4);
    let copies = oldest_copy.filter(|_| !hard_limit).unwrap_or(u64::MAX);
    index.min(durable).min(copies)
}
