//! What there is in the world of chains.

use std::collections::{BTreeMap, BTreeSet};

use strake_oss::chain::{ChainCore, Committed, OpId};
use strake_proto::{
    ChunkId, Code,
    data::{Stamp, Version},
};

/// Targets, of which some are replicas.
pub const N: usize = 3;
pub const CLIENTS: usize = 2;
pub const CHAIN: u32 = 1;
pub const CHUNK: ChunkId = ChunkId { ino: 2, data: 1, index: 0 };

/// How often what may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bounds {
    /// Copies that the chain shall have; the other targets stand by.
    pub copies: u8,
    /// Writes by both clients together.
    pub writes: u8,
    /// Flushes by both together.
    pub flushes: u8,
    /// Servers that die; they come back with what they had flushed, or with all.
    pub crashes: u8,
    /// Leases of living servers that run out.
    pub expiries: u8,
    /// Connections that break under a request: its sender is told, and it may arrive later.
    pub breaks: u8,
    /// Requests of clients that arrive once more.
    pub doubles: u8,
    /// Requests between replicas that arrive once more.
    pub repeats: u8,
    /// Writes that their client gives up without an answer: they arrive later, or not at all. They
    /// count as writes, too.
    pub given_up: u8,
    /// Programs are told that these failed, and others write after that.
    pub tells: bool,
    /// Changes of the chain by the metadata server, besides those that a registration makes.
    pub changes: u8,
    /// Changes of the targets that the chain shall have.
    pub plans: u8,
    /// Updates for which there is no space; not without `slow`.
    pub full: u8,
    /// Staging takes time; otherwise it is done at once.
    pub slow: bool,
    /// Space is short: nobody is told of an update before it is staged.
    pub short: bool,
    /// What comes too early, too late or without a lease is refused. Otherwise it waits, or is not
    /// noticed any more, which comes to the same: it is sent again.
    pub refusals: bool,
    /// One world of so many is tried whether it can become whole again; 0: only those in which
    /// nothing can happen any more.
    pub settle: u64,
}

/// A mistake made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Fault {
    None,
    /// A replica is reported as filled before it has flushed.
    FillsUnflushed,
    /// A replica is reported as filled while an update is in flight that one that was lost has
    /// shown.
    FillsShown,
    /// Replicas leave before they act on it.
    LeavesUnheard,
    /// An update is answered before the successor has it.
    AnswersEarly,
    /// Reads are answered without a lease.
    NoLease,
    /// Clients take what they wrote for stable whoever flushed.
    AnyStamp,
    /// A restart changes nothing in the chain.
    RestartUnnoticed,
    /// Reads are answered before the predecessor has spoken.
    Unconfirmed,
    /// A chunk is replaced whatever is there.
    PutsUnchecked,
    /// What is known is called stable without a flush.
    KnownUnflushed,
    /// A SYNCING successor is not flushed with the others.
    FlushesServing,
    /// Forwards are taken in any epoch.
    AnyEpoch,
    /// A chunk is pushed as it was when its slot was asked for.
    PushesUnheld,
    /// Clients do not say that they have given something up.
    Roundless,
    /// A program is told that its write failed before the head of the chain has heard of it, and
    /// copies of it live for ever.
    TellsAtOnce,
}

/// The updates that were applied; every update has a number of its own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Chunk {
    pub state: Committed,
    pub list: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Write {
    pub value: u8,
    pub session: u64,
    pub seq: u64,
}

/// Who waits for the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Asker {
    /// Nobody any more.
    Nobody,
    /// The client whose session it is.
    Client,
    Replica {
        at: usize,
        op: OpId,
        attempt: u32,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    Forward { to: usize, epoch: u64, version: Version, prev: Version, write: Write, asker: Asker },
    Put { to: usize, epoch: u64, body: Chunk, expected: Version, asker: Asker },
    Answer { to: usize, op: OpId, attempt: u32, result: Result<Vec<Stamp>, Code> },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Update(Write),
    /// The slot is held to replace the chunk.
    Put {
        body: Chunk,
        expected: Version,
    },
    /// The slot is held to push the chunk; with what was there when it was asked for.
    Push(Chunk),
}

/// What the shell of an operation waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Awaits {
    Nothing,
    /// The answer to a forward.
    Forward(u32),
    /// The answer to a chunk that was pushed. By a filling: in this epoch.
    Push(u32),
    /// The end of a pause.
    Pause(u32),
}

/// An operation in a slot or its queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    pub kind: Kind,
    pub asker: Asker,
    pub awaits: Awaits,
}

/// How far the tail is with its SYNCING successor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    Begin,
    /// It has all.
    Pushed,
    /// And has flushed it.
    Synced,
}

#[derive(Clone, Debug, Hash)]
pub struct Replica {
    pub core: ChainCore,
    pub chunk: Chunk,
    /// What is there after a loss of power.
    pub durable: Chunk,
    pub work: BTreeMap<OpId, Work>,
    /// What is being staged.
    pub staging: BTreeSet<OpId>,
    pub life: u64,
    pub down: bool,
    pub leased: bool,
    /// The chain's losses when this last reached the metadata server.
    pub losses: u8,
    pub pass: Pass,
    /// By the map that it has it left the chain, and others have all that it had.
    pub left: bool,
}

impl Replica {
    pub fn new(at: usize, life: u64, durable: Chunk) -> Replica {
        Replica {
            core: super::new_core(at, life, 0),
            chunk: durable.clone(),
            durable,
            work: BTreeMap::new(),
            staging: BTreeSet::new(),
            life,
            down: false,
            leased: false,
            losses: 0,
            pass: Pass::Begin,
            left: false,
        }
    }

    pub fn epoch(&self) -> u64 {
        self.core.view().epoch
    }

    /// The smallest free one. Nothing refers to one that was given back (see `World::tidy`).
    pub fn free_op(&self) -> OpId {
        let used = |op: &OpId| self.work.contains_key(op) || self.staging.contains(op);
        (1..).find(|op| !used(op)).unwrap_or(0)
    }
}

/// A request of a client that was not answered well yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Open {
    pub write: Write,
    pub replay: Option<Version>,
    /// It is on its way.
    pub sent: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Acked {
    pub write: Write,
    pub version: Version,
    pub stamps: Vec<Stamp>,
    pub stable: bool,
    /// The chain's losses, as the replica that answered knew of them.
    pub losses: u8,
}

/// A write that its client gave up.
#[derive(Clone, Debug, Hash)]
pub struct GivenUp {
    pub write: Write,
    /// In which it was sent.
    pub epoch: u64,
    pub round: u64,
    /// It may arrive yet.
    pub on_its_way: bool,
    /// The newest value when its program was told that it had failed.
    pub told: Option<u8>,
}

#[derive(Clone, Debug, Default, Hash)]
pub struct Client {
    pub seq: u64,
    pub open: Option<Open>,
    pub acked: Vec<Acked>,
    /// What may arrive once more, and in which epoch it was sent.
    pub last: Option<(Write, Option<Version>, u64)>,
    /// How many writes it has given up.
    pub round: u64,
    pub given_up: Vec<GivenUp>,
    /// Values of all that it wrote.
    pub values: Vec<u8>,
}
