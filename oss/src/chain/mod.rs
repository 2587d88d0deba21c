//! Chain replication, the replica's side: a pure state machine for one target's part in one chain.
//!
//! `docs/replication.md` holds the tables that this implements, and the reason for each rule.
//! [`view`] is what a replica knows of its chain in one epoch. [`slot`] is the one update (or hold)
//! that a chunk has in flight. [`core`] is the machine: [`Input`]s go in, [`Output`]s come out, and
//! the shell in [`crate::server`] carries them out.

mod core;
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
    data::{Stamp, Version, Writer},
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
    pub id: OpId,
    pub chunk: ChunkId,
    /// The chain epoch that the sender assumes.
    pub epoch: u64,
    /// Forward while staging. False when space is short: then the update is staged here before any
    /// other replica hears of it.
    pub eager: bool,
    pub what: What,
}

#[derive(Clone, Debug, Hash)]
pub enum What {
    /// An update entering at the head.
    Client {
        session: SessionId,
        seq: u64,
        /// The version that the first attempt of an unstable write got
        /// ([`strake_proto::data::FLAG_REPLAY`]).
        replay: Option<Version>,
        /// [`strake_proto::data::DataRequest::round`].
        round: u64,
    },
    /// An update from the predecessor, which builds on version `prev`.
    Forward { session: SessionId, seq: u64, version: Version, prev: Version },
    /// Keeps updates off the chunk until released.
    Hold,
}

#[derive(Debug)]
pub enum Input {
    /// The chain in a newer map. Older or equal epochs are ignored.
    View(View),
    Op(Op),
    /// The update's bytes are stored, or cannot be.
    Staged {
        op: OpId,
        result: Result<()>,
    },
    /// The successor's answer to a forward: its stamp and those of the replicas behind it.
    Answer {
        op: OpId,
        attempt: u32,
        result: Result<Vec<Stamp>>,
    },
    /// The successor has, or has not, taken the whole chunk.
    Pushed {
        op: OpId,
        attempt: u32,
        result: Result<()>,
    },
    /// The pause asked for by [`Output::RetryLater`] is over.
    Retry {
        op: OpId,
        attempt: u32,
    },
    /// The holder is done.
    Release {
        op: OpId,
    },
}

#[derive(Debug)]
pub enum Output {
    /// Verify the update and write its bytes to fresh space; answer with [`Input::Staged`].
    Stage { op: OpId },
    /// Send it on; answer with [`Input::Answer`].
    Forward { op: OpId, attempt: u32, to: TargetId, epoch: u64, version: Version, prev: Version },
    /// Send the whole committed chunk to the SYNCING successor; answer with [`Input::Pushed`].
    Push { op: OpId, attempt: u32, to: TargetId, epoch: u64, chunk: ChunkId },
    /// Pause, then [`Input::Retry`].
    RetryLater { op: OpId, attempt: u32 },
    /// The operation's result; anything staged for it is dropped.
    Done { op: OpId, outcome: Outcome },
    /// Speak to the new successor once (FORWARD_FLUSH), until it answers or the epoch changes.
    Greet { to: TargetId, epoch: u64 },
    /// Another party knows a newer map: fetch it.
    RefreshMap,
    /// This target lacks what its successor committed, or cannot commit: report it failed.
    Failed { reason: Error },
    /// Warn the administrators: an invariant of the protocol does not hold.
    Alarm { message: String },
}

#[derive(Debug)]
pub enum Outcome {
    /// Committed here and on all replicas behind. `stamps` holds the stamps of all of them, this
    /// replica's first.
    Applied {
        version: Version,
        stamps: Vec<Stamp>,
    },
    /// Was committed before, here and on all replicas behind. Flush and answer as stable.
    Known {
        version: Version,
    },
    /// The hold is granted and lasts until [`Input::Release`].
    Granted,
    Refused(Error),
}

/// A chunk's committed state as the protocol sees it; the default is an absent chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Committed {
    pub version: Version,
    /// The last few changes, oldest first.
    pub writers: Vec<Writer>,
}

/// The replica's committed chunks.
pub trait Local {
    fn committed(&self, chunk: &ChunkId) -> Result<Committed>;
    /// Makes a staged update visible. Immediate: durability comes with a later flush.
    fn commit(&mut self, op: OpId, version: Version, writer: Writer) -> Result<()>;
}
