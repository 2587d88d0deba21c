//! The types of the world of chains.

use std::collections::{BTreeMap, BTreeSet};

use strake_oss::chain::{ChainCore, Committed, OpId};
use strake_proto::{
    ChunkId, Code,
    data::{BootId, Version},
};

/// Targets; some of them are replicas.
pub const N: usize = 3;
pub const CLIENTS: usize = 2;
pub const CHAIN: u32 = 1;
pub const CHUNK: ChunkId = ChunkId { ino: 2, data: 1, index: 0 };

/// How often each kind of event may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bounds {
    /// Copies that the chain is to have; the other targets stand by.
    pub copies: u8,
    /// Writes by both clients together.
    pub writes: u8,
    /// Flushes by both clients together.
    pub flushes: u8,
    /// Servers that die; they restart with what they had flushed, or with everything.
    pub crashes: u8,
    /// Leases of running servers that run out.
    pub expiries: u8,
    /// Connections that break under a request: the sender is told, and the request may arrive
    /// later.
    pub breaks: u8,
    /// Requests of clients that arrive a second time.
    pub doubles: u8,
    /// Requests between replicas that arrive a second time.
    pub repeats: u8,
    /// Writes that their client gives up without an answer: they arrive later, or not at all. They
    /// also count as writes.
    pub given_up: u8,
    /// Programs are told that these writes failed, and other writes follow.
    pub tells: bool,
    /// Changes of the chain by the metadata server, besides those by registrations.
    pub changes: u8,
    /// Changes of the set of targets that the chain is to have.
    pub plans: u8,
    /// Updates that find no space; only with `slow`.
    pub full: u8,
    /// Staging takes time; otherwise it is done at once.
    pub slow: bool,
    /// Space is short: an update is not forwarded before it is staged.
    pub short: bool,
    /// Requests that come too early, too late or without a lease are refused. Otherwise they wait,
    /// or are dropped, which comes to the same: they are sent again.
    pub refusals: bool,
    /// For one in so many worlds the exploration tries whether the chain becomes whole again; 0:
    /// only for worlds in which nothing can happen any more.
    pub settle: u64,
}

/// A mistake made on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Fault {
    None,
    /// A replica is reported as filled before it has flushed.
    FillsUnflushed,
    /// A replica is reported as filled while an update is in flight that a lost replica has shown.
    FillsShown,
    /// Replicas leave before they know that they must.
    LeavesUnheard,
    /// An update is answered before the successor has it.
    AnswersEarly,
    /// Reads are answered without a lease.
    NoLease,
    /// Clients count their writes as stable whoever flushed.
    AnyStamp,
    /// A restart changes nothing in the chain.
    RestartUnnoticed,
    /// Reads are answered before the predecessor has confirmed the epoch.
    Unconfirmed,
    /// A chunk is replaced whatever its version is.
    PutsUnchecked,
    /// Known updates count as stable without a flush.
    KnownUnflushed,
    /// A SYNCING successor is not flushed with the others.
    FlushesServing,
    /// Forwards are taken in any epoch.
    AnyEpoch,
    /// A chunk is pushed as it was when its slot was asked for.
    PushesUnheld,
    /// Clients do not say that they have given an update up.
    Roundless,
    /// A program gets an error for its write before the head of the chain knows of it, and copies
    /// of it stay in flight for ever.
    TellsAtOnce,
}

/// The updates that were applied; each update has its own number.
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

/// Who gets the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Asker {
    /// The answer is dropped.
    Nobody,
    /// The client that the session belongs to.
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
    Answer { to: usize, op: OpId, attempt: u32, result: Result<Vec<BootId>, Code> },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Update(Write),
    /// Holds the slot to replace the chunk.
    Put {
        body: Chunk,
        expected: Version,
    },
    /// Holds the slot to push the chunk. The chunk as it was when the slot was requested, for a
    /// [`Fault`].
    Push(Chunk),
}

/// What an operation waits for, outside of the core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Awaits {
    Nothing,
    /// The answer to a forward.
    Forward(u32),
    /// The answer to a pushed chunk. For a resync the number is the epoch.
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

/// How far the resync of the tail's SYNCING successor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    Begin,
    /// The successor has everything.
    Pushed,
    /// The successor has also flushed it.
    Synced,
}

#[derive(Clone, Debug, Hash)]
pub struct Replica {
    pub core: ChainCore,
    pub chunk: Chunk,
    /// What is left after a power loss.
    pub durable: Chunk,
    pub work: BTreeMap<OpId, Work>,
    /// Operations that are being staged.
    pub staging: BTreeSet<OpId>,
    pub life: u64,
    pub down: bool,
    pub leased: bool,
    /// The chain's losses as of the last contact with the metadata server.
    pub losses: u8,
    pub pass: Pass,
    /// By its map this replica has left the chain, and others have all of its data.
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

    /// The smallest free number. Nothing refers to a number that is free again (see `World::tidy`).
    pub fn free_op(&self) -> OpId {
        let used = |op: &OpId| self.work.contains_key(op) || self.staging.contains(op);
        (1..).find(|op| !used(op)).unwrap_or(0)
    }
}

/// A request of a client that was not answered with success yet.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Open {
    pub write: Write,
    pub replay: Option<Version>,
    /// It is on the way.
    pub sent: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Acked {
    pub write: Write,
    pub version: Version,
    pub boot_ids: Vec<BootId>,
    pub stable: bool,
    /// The chain's losses as the replica that answered knew them.
    pub losses: u8,
}

/// A write that its client gave up.
#[derive(Clone, Debug, Hash)]
pub struct GivenUp {
    pub write: Write,
    /// The epoch in which it was sent.
    pub epoch: u64,
    pub round: u64,
    /// It may still arrive.
    pub on_its_way: bool,
    /// The newest value when the program was told of the failure.
    pub told: Option<u8>,
}

#[derive(Clone, Debug, Default, Hash)]
pub struct Client {
    pub seq: u64,
    pub open: Option<Open>,
    pub acked: Vec<Acked>,
    /// The request that may arrive a second time: the write, its replay, and the epoch in which it
    /// was sent.
    pub last: Option<(Write, Option<Version>, u64)>,
    /// How many writes it has given up.
    pub round: u64,
    pub given_up: Vec<GivenUp>,
    /// The values of all its writes.
    pub values: Vec<u8>,
}
