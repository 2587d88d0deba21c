//! The types of the world of write-back.

use strake_client::leases::{Change, Token};
use strake_mds::leases::{Number, writers::Holders};
use strake_proto::{Ino, SessionId};

pub const FILE: Ino = 2;

/// A byte of the file: the number of the write that it is of; 0: never written.
pub type Version = u8;

/// A set of versions.
pub type Versions = u32;

pub fn has(all: Versions, v: Version) -> bool {
    all & 1 << v != 0
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Body {
    // To the leader.
    Hello {
        sent: u8,
    },
    Renew {
        sent: u8,
    },
    Reported(Vec<Number>),
    Asks {
        id: u8,
        what: What,
    },
    /// Of the open with this id.
    Release {
        opened: u8,
    },
    // To clients.
    Renewed {
        sent: u8,
    },
    Recalls {
        recalls: Vec<Number>,
        reports: Vec<Number>,
    },
    Answer {
        id: u8,
        size: u64,
        granted: bool,
    },
    // To the storage server.
    Update {
        at: u64,
        bytes: Vec<Version>,
        through: bool,
    },
}

/// The kinds of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum What {
    /// Reads the attributes.
    Look,
    /// Opens the file for writing.
    Open,
    /// Reports how far the file reaches at least.
    Extend { end: u64 },
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    pub client: usize,
    /// 0: to the storage server.
    pub connection: u64,
    pub body: Body,
}

/// A request that the leader works on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    pub client: usize,
    pub connection: u64,
    pub id: u8,
    pub what: What,
    pub stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Other writers are to report before the state is read again.
    Reporting { asked: Vec<(SessionId, Number)> },
    /// Waits until other clients have forgotten the old state. No `ticket`: it depends on
    /// everything.
    Settling { size: u64, ticket: Option<Number> },
    /// An open: the sessions that may hold dirty data are to report.
    Holding { size: u64, holders: Holders, asked: Vec<(SessionId, Number)> },
    /// An open: no session holds older dirty data any more.
    Opened { size: u64 },
}

/// How far the file reaches at the storage server, as the leader saw it; and the last eviction and
/// the last change that the leader knew of then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Seen {
    pub end: u64,
    pub eviction: usize,
    pub change: u8,
}

/// A client's request.
#[derive(Clone, Debug, Hash)]
pub struct Request {
    pub id: u8,
    pub what: What,
    pub token: Token,
    /// The connection on which it was last sent.
    pub connection: u64,
    /// Writes that had returned before it.
    pub floor: Versions,
    pub change: Option<Change>,
}

/// A report that a client has still to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Due {
    pub number: Number,
    /// What was dirty when it was asked for is on the way or has arrived.
    pub sent: bool,
}

/// A write of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Write {
    pub client: usize,
    pub block: u64,
    /// Writes that had returned when it began.
    pub before: Versions,
    pub returned: bool,
}

/// How often each kind of event may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bounds {
    /// Opens for writing; the first client has the file open from the beginning.
    pub opens: u8,
    /// Looks at the attributes, with a read of the file.
    pub looks: u8,
    pub writes: u8,
    /// Blocks of the file beyond the first.
    pub more_blocks: u8,
    pub releases: u8,
    pub ticks: u8,
    /// Requests for recalls that are sent again.
    pub repeats: u8,
    pub reconnects: u8,
    pub failovers: u8,
    pub renewals: u8,
    pub evictions: u8,
    /// Whether the storage server works on updates for a while before they are applied.
    pub chain: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Deliver(Message),
    /// The leader continues with a request.
    Step(Task),
    SendRecalls(usize),
    Open(usize),
    Look(usize),
    /// A program writes a block.
    Write(usize, u64),
    /// With a [`Fault`]: it holds back a write after a check that was made earlier.
    HoldLate(usize),
    /// A client sends its dirty data.
    Send(usize),
    /// A client tells the leader of its writes.
    Tell(usize),
    Release(usize),
    Retry(usize),
    Reconnect(usize),
    Renew(usize),
    PollAgain(usize),
    Evict(usize),
    /// A client learns that its session has ended.
    Learn(usize),
    /// The storage server learns of evictions.
    Hear,
    /// The leader learns that it did, and truncates the file if that is pending.
    Fenced,
    /// The leader asks the storage server how far the file reaches.
    See,
    /// Its answer is applied.
    Found,
    /// The same for an answer that a dead leader got.
    Stray,
    /// An update that the storage server works on is applied.
    Apply(Message),
    Tick,
    Failover,
}

/// A mistake made on purpose: the exploration must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Fault {
    None,
    /// An open for writing does not wait for clients that may hold dirty data.
    HoldersNotAsked,
    /// It does not wait until other clients have forgotten the file.
    Unsettled,
    /// A client that was asked counts as one without dirty data, though it has not reported.
    AskedCounts,
    /// A client that has reported counts as one without dirty data, though it was left as the only
    /// writer since.
    ReportedForGood,
    /// A new leader assumes that no client holds dirty data.
    NewLeaderForgets,
    /// Becoming a writer recalls nothing.
    NoRecall,
    /// A read of the file does not wait for what writers have to report.
    NotAsked,
    /// A lease is granted although another client may write.
    GrantsWritten,
    /// Answers do not wait until storage servers know of evictions.
    NotFenced,
    /// Answers do not wait until storage servers have completed the updates they had accepted.
    FencedInWork,
    /// Sizes that an evicted session did not report are ignored while there is another writer.
    EndIgnored,
    /// The leader looks for the size before the storage server knows of the eviction.
    SeenEarly,
    /// A client that read the file before its size was found gets the old answer.
    NotReadAgain,
    /// A new leader does not know of files that evicted sessions could write.
    NewLeaderUnfenced,
    /// A new leader does not know of evicted sessions whose leases may still be alive.
    NewLeaderIgnoresEvicted,
    /// A release removes its session from the writers though it has opened the file again.
    ReleasesLater,
    /// A recall is acknowledged but not obeyed.
    NotHeeded,
    /// A report is made before the bytes are sent.
    EmptyReport,
    /// A report is made when the bytes are on their way.
    EarlyReport,
    /// Whether a write may become dirty data is checked before the data is stored there.
    HoldsLate,
    /// Dirty data is kept after the term is over.
    HoldsOn,
    /// A program's write overtakes earlier dirty data.
    Overtakes,
    /// Later bytes do not lie over bytes in flight.
    TwoOnTheirWay,
}
