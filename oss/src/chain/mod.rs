//! Chain replication, the replica's side: a pure state machine for one target's part in one chain.
//!
//! `docs/replication.md` holds the tables that this implements and why each rule is there. [`view`]
//! is what a replica knows of its chain at one epoch, [`slot`] the one update (or hold) that a
//! chunk has in flight, [`core`] the machine: [`Input`]s go in, [`Output`]s come out, and the shell
//! in [`crate::server`] carries them out.

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

/// Names an operation between the core and its shell; the shell chooses, never twice in one life.
pub type OpId = u64;

/// Longest queue of one chunk; beyond it senders are told `Overloaded`.
pub const MAX_QUEUE: usize = 64;

/// Something that wants a chunk's slot.
#[derive(Clone, Debug, Hash)]
pub struct Op {
    pub id: OpId,
    pub chunk: ChunkId,
    /// The chain epoch its sender believes in.
    pub epoch: u64,
    /// Forward while staging. False when space is short: then nobody hears of it before it is
    /// staged here.
    pub eager: bool,
    pub what: What,
}

#[derive(Clone, Debug, Hash)]
pub enum What {
    /// An update entering at the head.
    Client {
        session: SessionId,
        seq: u64,
        /// The version that the first attempt of an unstable write was given
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
    /// The update's bytes are in place, or cannot be.
    Staged {
        op: OpId,
        result: Result<()>,
    },
    /// The successor's answer to a forward: stamps of itself and those behind it.
    Answer {
        op: OpId,
        attempt: u32,
        result: Result<Vec<Stamp>>,
    },
    /// The successor has (or has not) taken the whole chunk.
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
    /// Somebody knows a newer map.
    RefreshMap,
    /// This target lacks what its successor committed, or cannot commit: report it failed.
    Failed { reason: Error },
    /// Tell people: an invariant of the protocol does not hold.
    Alarm { message: String },
}

#[derive(Debug)]
pub enum Outcome {
    /// Committed here and on all behind, whose stamps these are (this replica's first).
    Applied {
        version: Version,
        stamps: Vec<Stamp>,
    },
    /// Was committed before, here and on all behind. Flush and answer as stable.
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
