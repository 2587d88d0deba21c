//! Chain replication, the replica's side: a pure state machine for one target's part in one chain.
//!
//! `docs/replication.md` holds the tables that this implements, and the reason for each rule.
//! [`view`] is what a replica knows of its chain in one epoch. [`slot`] is the one update (or hold)
//! that a chunk has in flight. `epoch_memory` is what is remembered of one epoch. [`core`] is the
//! machine: [`Input`]s go in, [`Output`]s come out, and the shell in [`crate::server`] carries them
//! out.

mod core;
mod epoch_memory;
pub mod rows;
pub(crate) mod slot;
mod view;

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;

pub use self::core::ChainCore;
use strake_proto::{
    ChunkId, Error, Result, SessionId, TargetId,
    data::{BootId, Version, Writer},
};
pub use view::View;

/// Identifies an operation between the core and its shell. The shell chooses it, and never uses one
/// twice in one run.
pub type OpId = u64;

/// Longest queue of one chunk; beyond it senders get `Overloaded`.
pub const MAX_QUEUE: usize = 64;

/// An operation that needs a chunk's slot.
#[derive(Clone, Debug, Hash)]
pub struct Op {
    /// Its number; each operation is answered once ([`Output::Done`]).
    pub id: OpId,
    /// The chunk whose slot it needs.
    pub chunk: ChunkId,
    /// The chain epoch that the sender assumes.
    pub epoch: u64,
    /// Forward while staging. False when space is short: then the update is staged here before any
    /// other replica hears of it.
    pub eager: bool,
    /// What it does.
    pub what: What,
}

/// What an operation does.
#[derive(Clone, Debug, Hash)]
pub enum What {
    /// An update entering at the head.
    Client {
        /// Whose update it is; 0: a metadata server's.
        session: SessionId,
        /// The session's number for it, the same for all attempts.
        seq: u64,
        /// The version that the first attempt of an unstable write got
        /// ([`strake_proto::data::FLAG_REPLAY`]).
        replay: Option<Version>,
        /// [`strake_proto::data::DataRequest::round`].
        round: u64,
    },
    /// An update from the predecessor, which builds on version `prev`.
    Forward {
        /// As the head got it.
        session: SessionId,
        /// As the head got it.
        seq: u64,
        /// What the head assigned.
        version: Version,
        /// The version that the chunk must be at.
        prev: Version,
    },
    /// Keeps updates off the chunk until released.
    Hold,
}

/// What happened, for the state machine.
#[derive(Debug)]
pub enum Input {
    /// The chain in a newer map. Older or equal epochs are ignored.
    View(View),
    /// An operation arrived.
    Op(Op),
    /// The update's bytes are stored, or cannot be.
    Staged {
        /// The update.
        op: OpId,
        /// Why they cannot be stored, if so.
        result: Result<()>,
    },
    /// The successor's answer to a forward: its boot id and those of the replicas behind it.
    Answer {
        /// The update.
        op: OpId,
        /// As in [`Output::Forward`].
        attempt: u32,
        /// An error: refused, or no answer came.
        result: Result<Vec<BootId>>,
    },
    /// The successor has, or has not, taken the whole chunk.
    Pushed {
        /// The update that needs the chunk there.
        op: OpId,
        /// As in [`Output::Push`].
        attempt: u32,
        /// Why it has not, if so.
        result: Result<()>,
    },
    /// The pause asked for by [`Output::RetryLater`] is over.
    Retry {
        /// The update.
        op: OpId,
        /// As in [`Output::RetryLater`].
        attempt: u32,
    },
    /// The holder is done.
    Release {
        /// The hold.
        op: OpId,
    },
}

/// What the state machine asks its shell to do.
#[derive(Debug)]
pub enum Output {
    /// Verify the update and write its bytes to fresh space; answer with [`Input::Staged`].
    Stage {
        /// The update.
        op: OpId,
    },
    /// Send it on; answer with [`Input::Answer`].
    Forward {
        /// The update.
        op: OpId,
        /// Counts messages to the successor; to be returned with the answer.
        attempt: u32,
        /// The successor.
        to: TargetId,
        /// The epoch that the message is of.
        epoch: u64,
        /// The update's version.
        version: Version,
        /// The version that it builds on.
        prev: Version,
    },
    /// Send the whole committed chunk to the SYNCING successor; answer with [`Input::Pushed`].
    Push {
        /// The update that needs the chunk there.
        op: OpId,
        /// Counts messages to the successor; to be returned with the answer.
        attempt: u32,
        /// The successor.
        to: TargetId,
        /// The epoch that the message is of.
        epoch: u64,
        /// The chunk to send.
        chunk: ChunkId,
    },
    /// Pause, then [`Input::Retry`].
    RetryLater {
        /// The update.
        op: OpId,
        /// To be returned with the input.
        attempt: u32,
    },
    /// The operation's result; anything staged for it is dropped.
    Done {
        /// The operation.
        op: OpId,
        /// Its result.
        outcome: Outcome,
    },
    /// Speak to the new successor once (FORWARD_FLUSH), until it answers or the epoch changes.
    Greet {
        /// The successor.
        to: TargetId,
        /// The epoch that the message is of.
        epoch: u64,
    },
    /// Another party knows a newer map: fetch it.
    RefreshMap,
    /// This target lacks what its successor committed, or cannot commit: report it failed.
    Failed {
        /// Why.
        reason: Error,
    },
    /// Warn the administrators: an invariant of the protocol does not hold.
    Alarm {
        /// For the log.
        message: String,
    },
}

/// How an operation ended; a hold that is granted goes on.
#[derive(Debug)]
pub enum Outcome {
    /// Committed here and on all replicas behind.
    Applied {
        /// The update's version.
        version: Version,
        /// The boot ids of those replicas, this one's first.
        boot_ids: Vec<BootId>,
    },
    /// Was committed before, here and on all replicas behind. Flush and answer as stable.
    Known {
        /// The update's version.
        version: Version,
    },
    /// The hold is granted and lasts until [`Input::Release`].
    Granted,
    /// Not done. The error's code says whether the sender asks again.
    Refused(Error),
}

/// A chunk's committed state as the protocol sees it; the default is an absent chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Committed {
    /// Of the newest committed update.
    pub version: Version,
    /// The last few changes, oldest first.
    pub writers: Vec<Writer>,
}

/// The replica's committed chunks.
pub trait Local {
    /// A chunk's committed state. `Corrupt` if its record is damaged.
    fn committed(&self, chunk: &ChunkId) -> Result<Committed>;
    /// Makes a staged update visible. Immediate: durability comes with a later flush.
    fn commit(&mut self, op: OpId, version: Version, writer: Writer) -> Result<()>;
}
