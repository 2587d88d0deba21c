//! The cluster map: the nodes and targets of the cluster, and which replicas of which chain are in
//! sync.
//!
//! [`state`] holds the part that Raft agrees on: pure functions on the map, called at apply.
//! [`membership`] holds the rules for one chain, [`chain_table`] decides which chains there are,
//! [`moves`] and [`balance`] which replicas move where, [`recovery`] has the rules for a group that
//! begins anew, [`anew`] those for chains that hold nothing. [`manager`] holds what only the leader
//! knows, heartbeats and leases, and turns it into proposals; [`kept_waiting`] distinguishes
//! waiting heartbeats from silence; [`slow`] judges what heartbeats report about devices.

pub(crate) mod anew;
pub(crate) mod balance;
pub mod chain_table;
pub(crate) mod domains;
pub(crate) mod kept_waiting;
pub(crate) mod manager;
pub mod membership;
pub mod moves;
pub(crate) mod recovery;
pub mod rows;
pub mod slow;
pub mod state;
