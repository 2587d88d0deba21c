//! What a replica knows of its chain in one epoch.

use strake_proto::{
    TargetId,
    map::ChainExt,
    pb::{self, ReplicaState},
};

/// A chain in one epoch, as one replica sees it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// The chain's epoch, which grows with each change of its replicas.
    pub epoch: u64,
    /// This replica's state; `ReplicaUnknown` when it is not in the chain.
    pub state: ReplicaState,
    /// Whether this replica is the first SERVING one, where updates enter.
    pub head: bool,
    /// The last SERVING replica: it answers reads of chunks that are being changed.
    pub tail: bool,
    /// The next replica that takes updates, and its state.
    pub successor: Option<(TargetId, ReplicaState)>,
    /// SERVING replicas, head to tail.
    pub serving: Vec<TargetId>,
}

impl View {
    /// The view of target `me`.
    pub fn of(chain: &pb::Chain, me: TargetId) -> View {
        let state = chain.state_of(me).unwrap_or(ReplicaState::ReplicaUnknown);
        let takes_part =
            matches!(state, ReplicaState::ReplicaServing | ReplicaState::ReplicaSyncing);
        View {
            epoch: chain.epoch,
            state,
            head: chain.head() == Some(me),
            tail: chain.tail() == Some(me),
            successor: if takes_part { chain.successor(me) } else { None },
            serving: chain.serving().collect(),
        }
    }

    /// The view before this replica's first map, or for an epoch about its earlier run.
    pub fn outside(epoch: u64) -> View {
        View {
            epoch,
            state: ReplicaState::ReplicaUnknown,
            head: false,
            tail: false,
            successor: None,
            serving: Vec::new(),
        }
    }

    /// Whether this replica is in sync.
    pub fn serving(&self) -> bool {
        self.state == ReplicaState::ReplicaServing
    }

    /// SERVING or SYNCING: updates run through this replica.
    pub fn takes_updates(&self) -> bool {
        matches!(self.state, ReplicaState::ReplicaServing | ReplicaState::ReplicaSyncing)
    }

    /// The successor if it is in sync.
    pub fn serving_successor(&self) -> Option<TargetId> {
        self.successor.filter(|(_, s)| *s == ReplicaState::ReplicaServing).map(|(t, _)| t)
    }

    /// The successor that the tail has to resync.
    pub fn syncing_successor(&self) -> Option<TargetId> {
        self.successor.filter(|(_, s)| *s == ReplicaState::ReplicaSyncing).map(|(t, _)| t)
    }
}
