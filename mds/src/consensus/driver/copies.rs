//! Copies of a state that are being sent or received.

use std::collections::BTreeMap;

use raft::eraftpb::SnapshotMetadata;
use strake_proto::{Code, Error, Result, pb};
use tokio::task::JoinHandle;

use super::{
    super::{snapshot::Incoming, types::StateMachine},
    inputs::Reply,
};

/// See the module.
#[derive(Default)]
pub(super) struct Copies {
    /// Being sent: peer → (id, index, task).
    pub(super) outgoing: BTreeMap<u64, (u64, u64, JoinHandle<()>)>,
    pub(super) incoming: Option<Incoming>,
}

impl Copies {
    pub(super) fn abort(&self) {
        self.outgoing.values().for_each(|(_, _, task)| task.abort());
    }

    pub(super) fn abort_and_forget(&mut self) {
        self.abort();
        self.outgoing.clear();
    }

    pub(super) fn is_sending(&self, to: u64) -> bool {
        self.outgoing.contains_key(&to)
    }

    /// A sending task has ended. Returns whether it was the newest copy to this peer.
    pub(super) fn sent(&mut self, to: u64, id: u64) -> bool {
        let last = self.outgoing.get(&to).is_some_and(|o| o.0 == id);
        if last {
            self.outgoing.remove(&to);
        }
        last
    }

    /// The lowest index that a copy being sent is as of.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.outgoing.values().map(|o| o.1).min()
    }

    /// Whether this copy has arrived completely.
    pub(super) fn has_come(&self, from: u64, id: Option<u64>, meta: &SnapshotMetadata) -> bool {
        self.incoming.as_ref().is_some_and(|i| {
            i.complete
                && i.from == from
                && Some(i.id) == id
                && (i.index, i.term) == (meta.index, meta.term)
        })
    }

    pub(super) fn expects(&self, chunk: &pb::SnapshotChunk) -> bool {
        self.incoming.as_ref().is_some_and(|i| {
            i.first.is_none()
                && !i.complete
                && (i.from, i.id, i.next) == (chunk.from, chunk.snapshot, chunk.number)
        })
    }

    /// The log now records that the state is void; from here on it may be overwritten.
    pub(super) fn restore_marked(&mut self, sm: &dyn StateMachine, id: u64) -> Result<()> {
        let first = self.incoming.as_mut().filter(|i| i.id == id).and_then(|i| i.first.take());
        let Some((chunk, reply)) = first else { return Ok(()) };
        match sm.restore_begin() {
            Ok(()) => self.take_pairs(sm, chunk, reply),
            Err(e) if comes_again(&e) => {
                self.incoming = None;
                let _ = reply.send(Err(e));
                Ok(())
            }
            Err(e) => Err(e.context("dropping the old state")),
        }
    }

    pub(super) fn take_pairs(
        &mut self,
        sm: &dyn StateMachine,
        chunk: pb::SnapshotChunk,
        reply: Reply,
    ) -> Result<()> {
        let pairs = chunk.pairs.into_iter().map(|p| (p.key, p.value)).collect();
        match sm.restore_pairs(pairs) {
            Ok(()) => {
                if let Some(i) = &mut self.incoming {
                    (i.next, i.complete) = (chunk.number.saturating_add(1), chunk.last);
                }
                let _ = reply.send(Ok(()));
                Ok(())
            }
            Err(e) if comes_again(&e) => {
                self.incoming = None;
                let _ = reply.send(Err(e));
                Ok(())
            }
            Err(e) => Err(e.context("taking over the leader's state")),
        }
    }
}

/// Whether the leader will send the copy again: once there is space, the old state is no longer
/// being read, or the damaged data is gone.
fn comes_again(e: &Error) -> bool {
    matches!(e.code, Code::NoSpc | Code::Busy | Code::Corrupt)
}
