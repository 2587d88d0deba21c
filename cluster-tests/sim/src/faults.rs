//! The faults of a run as data: a list of timed events. [`crate::draw`] draws them from the seed
//! before the run begins. A run can be given any part of its list; [`crate::shrink`] uses this to
//! find a short failing run.

use std::{fmt, time::Duration};

use strake_proto::TargetId;

use crate::{ledger::Kind, nodes::called};

/// A fault, and when it is made: the time since faults may begin.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    pub at: Duration,
    pub fault: Fault,
}

/// One fault. Nodes have their numbers on the network. A fault that needs a running node does
/// nothing to a node that is down.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// A server dies and is started again after `down`. With `power` its machine loses what was not
    /// synced; `dice` decides what.
    Crash {
        node: u32,
        power: bool,
        dice: u64,
        down: Duration,
    },
    /// A node is cut off from all others.
    Isolate {
        node: u32,
        one_way: bool,
        lasts: Duration,
    },
    /// A link is cut in both directions, or only from `a` to `b`.
    Cut {
        a: u32,
        b: u32,
        one_way: bool,
        lasts: Duration,
    },
    /// A client is cut off from all metadata servers, and from no other node.
    Exile {
        client: u32,
        lasts: Duration,
    },
    /// From now on: the maximum delay of messages, and how many connections break, per thousand
    /// messages.
    Weather {
        max_delay: Duration,
        break_per_mille: u32,
    },
    /// Strikes the next message of an operation from or to a node.
    Message {
        node: u32,
        what: Strike,
    },
    /// Sets the offset of a server's wall clock from now on.
    Jump {
        node: u32,
        seconds: i64,
    },
    /// From now on all boot clocks run at other rates, within the allowed difference.
    Drift {
        dice: u64,
    },
    Disk {
        node: u32,
        what: Harm,
        lasts: Duration,
    },
    /// A stored block of a storage server decays that another one has a good copy of.
    Decay {
        node: u32,
        dice: u64,
    },
    /// Something on a server's disk decays, while it runs or in a crash after which it is started
    /// again once `down` is over. A server whose log decays is replaced.
    Spoil {
        node: u32,
        what: Stored,
        dice: u64,
        down: Option<Duration>,
    },
    /// A storage server with a new target joins.
    Join,
    /// An administrator replaces this metadata server by a new one.
    Replace {
        old: u32,
    },
    /// An administrator drains a target, or keeps it after all.
    Move(Change),
}

/// What is done to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strike {
    /// It does not arrive, and its connection is given up therefore.
    Lose,
    /// It arrives, and once more after this time.
    Repeat(Duration),
    /// It arrives this much later; others overtake it.
    Hold(Duration),
    /// Its connection breaks.
    Break,
}

/// What is done to a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Harm {
    /// Writes and flushes take this long.
    Slow(Duration),
    /// Reads, writes and flushes take this long.
    Crawl(Duration),
    /// The next five writes find no space (for a metadata server: all writes until the disk is
    /// mended).
    Full,
    /// No write finds space until it is mended.
    Filled,
    /// A write fails.
    Error,
    /// A read gives a wrong bit.
    Corrupt,
}

/// What decays on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// A bit of a record in a chunk table, below the store's own checksums: only the record's
    /// checksum can show it.
    Table,
    /// A record of the metadata state; the store finds its checksum wrong.
    State,
    /// The Raft log, at a place that its member may have acknowledged.
    Log,
}

impl Stored {
    pub fn kind(self) -> Kind {
        match self {
            Stored::Table => Kind::TableDecay,
            Stored::State => Kind::StateDecay,
            Stored::Log => Kind::LogDecay,
        }
    }
}

/// A decision of the administrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Drain { target: TargetId, heir: Option<TargetId> },
    Keep { target: TargetId },
}

impl fmt::Display for Timed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:8.3} s  {}", self.at.as_secs_f64(), self.fault)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = |one_way: &bool| if *one_way { "one way" } else { "both ways" };
        match self {
            Fault::Crash { node, power, down, .. } => {
                let how = if *power { "loses its power" } else { "crashes" };
                write!(f, "{} {how}, down for {down:?}", called(*node))
            }
            Fault::Isolate { node, one_way, lasts } => {
                write!(f, "{} is cut off from all, {}, for {lasts:?}", called(*node), way(one_way))
            }
            Fault::Cut { a, b, one_way, lasts } => {
                write!(
                    f,
                    "{} is cut off from {}, {}, for {lasts:?}",
                    called(*a),
                    called(*b),
                    way(one_way)
                )
            }
            Fault::Exile { client, lasts } => {
                write!(f, "{} is cut off from the metadata servers for {lasts:?}", called(*client))
            }
            Fault::Weather { max_delay, break_per_mille } => {
                write!(
                    f,
                    "messages take up to {max_delay:?}, {break_per_mille} in 1000 break their connection"
                )
            }
            Fault::Message { node, what } => struck(f, &called(*node), what),
            Fault::Jump { node, seconds } => {
                write!(f, "the clock of {} is {seconds} s off", called(*node))
            }
            Fault::Drift { .. } => write!(f, "clocks drift"),
            Fault::Disk { node, what, lasts } => harmed(f, &called(*node), what, *lasts),
            Fault::Spoil { node, what, down, .. } => {
                let what = match what {
                    Stored::Table => "a record of the chunk table",
                    Stored::State => "a record of the state",
                    Stored::Log => "the log",
                };
                match down {
                    Some(down) => {
                        write!(f, "{} crashes and {what} decays, down for {down:?}", called(*node))
                    }
                    None => write!(f, "{what} of {} decays", called(*node)),
                }
            }
            Fault::Replace { old } => write!(f, "{} is to be replaced by a new one", called(*old)),
            Fault::Decay { node, .. } => {
                write!(f, "a block on the disk of {} decays", called(*node))
            }
            Fault::Join => write!(f, "a storage server with a new target joins"),
            Fault::Move(Change::Drain { target, heir: None }) => {
                write!(f, "target {target} is to be emptied")
            }
            Fault::Move(Change::Drain { target, heir: Some(h) }) => {
                write!(f, "target {target} is to be replaced by {h}")
            }
            Fault::Move(Change::Keep { target }) => write!(f, "target {target} is to be kept"),
        }
    }
}

fn struck(f: &mut fmt::Formatter<'_>, node: &str, what: &Strike) -> fmt::Result {
    match what {
        Strike::Lose => write!(f, "a message of {node} is lost"),
        Strike::Repeat(late) => write!(f, "a message of {node} arrives again {late:?} later"),
        Strike::Hold(late) => write!(f, "a message of {node} arrives {late:?} late"),
        Strike::Break => write!(f, "a message of {node} breaks its connection"),
    }
}

fn harmed(f: &mut fmt::Formatter<'_>, node: &str, what: &Harm, lasts: Duration) -> fmt::Result {
    match what {
        Harm::Slow(by) => write!(f, "writes to the disk of {node} take {by:?} for {lasts:?}"),
        Harm::Crawl(by) => write!(f, "everything takes the disk of {node} {by:?} for {lasts:?}"),
        Harm::Full => write!(f, "writes to the disk of {node} find no space"),
        Harm::Filled => write!(f, "the disk of {node} is full for {lasts:?}"),
        Harm::Error => write!(f, "a write to the disk of {node} fails"),
        Harm::Corrupt => write!(f, "a read from the disk of {node} gives a wrong bit"),
    }
}
