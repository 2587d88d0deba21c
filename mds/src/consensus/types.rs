//! Types for using a group of members, and the state machine that it drives.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use strake_fabric::Endpoint;
use strake_proto::{FEATURE_LEVEL, Incarnation, Result};

use super::leader_lease::START_WAIT;

/// A log entry that a majority holds. `data` is empty for a leader's first entry and for membership
/// changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    pub index: u64,
    pub term: u64,
    pub data: Bytes,
}

/// A frozen view of the applied state, and the entry that it is as of.
pub struct StateSnapshot {
    /// Index and term of the last entry applied to it.
    pub index: u64,
    pub term: u64,
    /// The membership as of that entry, as given to [`StateMachine::apply`].
    pub conf_state: Vec<u8>,
    pub view: Box<dyn strake_store::Reader>,
}

/// The replicated state. All methods are called from one task, except `sync` and reads of a
/// snapshot's view.
pub trait StateMachine: Send + Sync + 'static {
    /// Index and term of the last applied entry; zeros in the beginning.
    fn applied(&self) -> (u64, u64);
    /// The membership kept with the applied state, as opaque bytes; empty in the beginning.
    fn conf_state(&self) -> Vec<u8>;
    /// Applies entries in order, in one atomic commit that also records `last` and, if given, the
    /// membership. Returns one reply per entry, in order. It need not be durable. `NoSpc` (no
    /// space) and `Corrupt` (the state is damaged) mean that nothing was applied and that the same
    /// call may be repeated. Any other error stops the node, and so does `Corrupt` on the only
    /// voter.
    fn apply(
        &self,
        entries: Vec<Committed>,
        last: (u64, u64),
        conf_state: Option<Vec<u8>>,
    ) -> Result<Vec<Bytes>>;
    /// Makes the applied state durable; the log is cut only after that.
    fn sync(&self) -> Result<()>;
    fn snapshot(&self) -> Result<StateSnapshot>;
    /// Whether the state says that a member of this id was removed from the group. Once true, it
    /// stays true.
    fn is_former(&self, _id: u64) -> bool {
        false
    }
    /// The incarnation of the group that the state belongs to; `None` while there is no state.
    fn incarnation(&self) -> Option<Incarnation> {
        None
    }
    /// The feature level of the group's state, and the entry that set it.
    fn level(&self) -> (u32, u64) {
        (0, 0)
    }
    /// The feature level that a member must know to be sent an entry with this data.
    fn needed_by(&self, _data: &Bytes) -> u32 {
        0
    }
    /// Another member's state has this level since this entry. A state that is as of that entry or a
    /// later one and has a lower level was made by a program that did not know levels: it is
    /// damaged.
    fn compare_level(&self, _level: u32, _since: u64) {}
    /// The state is lost, and a copy will replace it: until `restore_end` it must not be shown to
    /// anyone.
    fn void(&self) {}
    /// The error, if the state was found damaged since it was begun. Reads then return whole data
    /// or an error, but some data is missing. Such a state is given up if another member has a good
    /// one.
    fn damage(&self) -> Option<strake_proto::Error> {
        None
    }
    /// Deletes everything: pairs of another member's state follow. Until `restore_end` the state is
    /// never read. `Busy`: an old view of it is still being read; try again.
    fn restore_begin(&self) -> Result<()>;
    fn restore_pairs(&self, pairs: Vec<(Bytes, Bytes)>) -> Result<()>;
    fn restore_end(&self, index: u64, term: u64, conf_state: Vec<u8>) -> Result<()>;
}

/// How a member behaves. [`Config::new`] has the defaults.
#[derive(Clone, Debug)]
pub struct Config {
    /// This member; never 0, never used again after the member was removed or lost its log.
    pub id: u64,
    /// Which cluster; batches of another one are refused.
    pub cluster: [u8; 16],
    /// Endpoints of the other members. Members added later come with the change that adds them, or
    /// by [`Node::set_peer`](super::Node::set_peer).
    pub peers: BTreeMap<u64, Endpoint>,
    /// Length of a tick. Election and heartbeat times are counted in ticks.
    pub tick: Duration,
    pub heartbeat_ticks: usize,
    /// A member that hears nothing for a random number of ticks in `min..max` asks to be elected.
    pub election_ticks: (usize, usize),
    /// Most append messages in flight to one follower.
    pub max_inflight: usize,
    /// Longest entry that may be proposed, bytes.
    pub max_entry: usize,
    /// Limit of bytes of uncommitted entries; beyond it proposals are refused as `Overloaded`.
    pub max_uncommitted: u64,
    /// The log is cut when it holds more bytes or entries than this (about half is kept for slow
    /// followers).
    pub log_bytes: usize,
    pub log_entries: usize,
    /// Most proposals, and most reads, that wait for the driver; more are `Overloaded`.
    pub queue: usize,
    /// A log write that takes longer is late; see [`health`](super::health). Zero: no write is.
    pub slow_write: Duration,
    /// The newest feature level that this program knows.
    pub level: u32,
    /// Whether a leader answers reads under a lease, without asking the others each time.
    pub lease_reads: bool,
}

impl Config {
    pub fn new(id: u64, cluster: [u8; 16], peers: BTreeMap<u64, Endpoint>) -> Config {
        Config {
            id,
            cluster,
            peers,
            tick: Duration::from_millis(50),
            heartbeat_ticks: 2,
            election_ticks: (8, 13),
            max_inflight: 64,
            max_entry: 2 << 20,
            max_uncommitted: 32 << 20,
            log_bytes: 64 << 20,
            log_entries: 100_000,
            queue: 4096,
            slow_write: Duration::from_millis(300),
            level: FEATURE_LEVEL,
            lease_reads: true,
        }
    }

    /// How long this member gives no vote after it has heard from its leader, at least: the next
    /// tick may come at once, each later one after a full tick.
    pub(super) fn vote_wait(&self) -> Duration {
        self.tick * self.election_ticks.0.saturating_sub(1) as u32
    }

    /// For how many ticks a restarted member gives no vote.
    pub(super) fn start_wait_ticks(&self) -> usize {
        let ticks = START_WAIT.as_nanos().div_ceil(self.tick.as_nanos().max(1)) as usize + 1;
        ticks.max(self.election_ticks.0)
    }
}

/// The leader, as this member sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leadership {
    pub term: u64,
    /// 0: not known.
    pub leader: u64,
    /// This member leads, has applied an entry of its own term, and is not handing leadership over.
    pub ready: bool,
    /// When this became so (time since boot, see [`strake_runtime::Env::boot`]).
    pub since: Duration,
}

/// A change of the group's members. Each is one log entry; only one can be under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    /// Starts to copy everything to a new member, which does not vote yet.
    AddLearner { id: u64, endpoint: Endpoint },
    /// Learners that have caught up become voters, and members are removed, all in one step: the
    /// quorum is never smaller in between. Joint consensus is used if more than one member changes.
    /// The leader itself cannot be removed.
    Step { promote: Vec<u64>, remove: Vec<u64> },
}
