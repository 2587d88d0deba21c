//! Agreement among the metadata servers of one group: Raft, its log, its transport and its
//! snapshots.
//!
//! A [`Node`] takes proposals, gets them durable on a majority and applies them in the same order
//! everywhere through a [`StateMachine`]. Inside, [`core`] is the pure protocol (raft-rs with
//! guards around it), [`leader_lease`] what lets its leader answer alone, [`driver`] the task that
//! feeds it, [`members`] the rules for changing the group, [`log`] what must be durable
//! ([`disk_log`] on disk, [`mem_log`] in memory with power loss), [`transport`] the queues to the
//! peers and [`snapshot`] the bulk copy of a state. Decisions: `docs/decisions/raft.md`; format:
//! `docs/formats.md`, "Raft log".

mod check;
pub mod core;
pub mod disk_log;
mod driver;
mod health;
pub mod leader_lease;
pub mod log;
mod logger;
mod mem_log;
pub(crate) mod members;
mod node;
mod pages;
mod reads;
mod snapshot;
mod transport;
mod types;

#[cfg(test)]
mod tests;

/// For the fuzz targets, which make pages with right checksums around wrong contents.
#[doc(hidden)]
pub mod fuzzing {
    pub use super::pages::{PAGE, SegmentHeader, decode_header, encode_batch, encode_header, scan};
}

pub use disk_log::{DiskLog, DiskOptions};
pub use log::{LogImage, LogOp, LogStore};
pub use mem_log::MemLog;
pub use node::{Node, twins};
pub use types::{Committed, Config, Leadership, MemberChange, StateMachine, StateSnapshot};
