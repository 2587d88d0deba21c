//! Callers that wait for their proposals.

use std::collections::BTreeMap;

use bytes::Bytes;
use raft::eraftpb::{Entry, EntryType};
use strake_proto::{Code, Error, Result};
use tokio::sync::oneshot;

use super::inputs::Reply;

pub(super) enum Waiter {
    Proposal(oneshot::Sender<Result<Bytes>>),
    Change(Reply),
}

/// See the module.
#[derive(Default)]
pub(super) struct Waiters {
    /// By the index of the entry, with its term.
    proposed: BTreeMap<u64, (u64, Waiter)>,
    /// Membership changes that are applied and wait until the joint configuration has ended and a
    /// majority knows that it has. Until then a member that does not know still needs a majority of
    /// the old members to be elected.
    leaving_joint: Vec<Reply>,
    /// The last entry of those changes, once the joint configuration has ended.
    joint_left: Option<u64>,
}

impl Waiters {
    pub(super) fn add(&mut self, index: u64, term: u64, waiter: Waiter) {
        self.proposed.insert(index, (term, waiter));
    }

    /// These entries are applied, with these replies. `joint`: the configuration is a joint one.
    pub(super) fn answer(&mut self, entries: &[Entry], replies: Vec<Bytes>, joint: bool) {
        for (e, reply) in entries.iter().zip(replies) {
            let Some((term, waiter)) = self.proposed.remove(&e.index) else { continue };
            match waiter {
                Waiter::Proposal(w) if term == e.term => drop(w.send(Ok(reply))),
                Waiter::Proposal(w) => drop(w.send(Err(lost()))),
                Waiter::Change(w) if term != e.term => drop(w.send(Err(lost()))),
                Waiter::Change(w) if e.get_entry_type() == EntryType::EntryNormal => {
                    let _ = w.send(Err(Error::new(
                        Code::Busy,
                        "another membership change was in progress; try again",
                    )));
                }
                Waiter::Change(w) => self.leaving_joint.push(w),
            }
        }
        if !joint && !self.leaving_joint.is_empty() && self.joint_left.is_none() {
            self.joint_left = entries.last().map(|e| e.index);
        }
    }

    /// Answers the changes once a majority knows that their joint configuration has ended.
    pub(super) fn answer_changes(&mut self, majority_knows: impl FnOnce(u64) -> bool) {
        if self.joint_left.take_if(|index| majority_knows(*index)).is_some() {
            self.leaving_joint.drain(..).for_each(|w| drop(w.send(Ok(()))));
        }
    }

    /// Fails all waiters: it is not known (yet) whether their proposals will happen.
    pub(super) fn fail(&mut self) {
        for (_, waiter) in std::mem::take(&mut self.proposed).into_values() {
            match waiter {
                Waiter::Proposal(w) => drop(w.send(Err(lost()))),
                Waiter::Change(w) => drop(w.send(Err(lost()))),
            }
        }
        self.joint_left = None;
        self.leaving_joint.drain(..).for_each(|w| drop(w.send(Err(lost()))));
    }
}

fn lost() -> Error {
    let m = "this metadata server could not finish a change; it is not known whether the change \
             was made";
    Error::new(Code::Disconnected, m)
}
