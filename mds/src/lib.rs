//! The metadata server: a namespace agreed on by Raft, the cluster map, sessions and their opens.
//!
//! | module | idea |
//! |---|---|
//! | `namespace` | the state machine that the log is applied to: files, locks, sessions |
//! | `cluster` | the cluster map and its rules |
//! | `leases` | what clients may cache |
//! | `sessions` | when the leader last heard of each session, and what each has open |
//! | `levels` | which feature level each process knows |
//! | `lock_waiters` | lock waiters, and whose turn it is |
//! | `request_dedup` | requests that are sent more than once have one outcome |
//! | `recent_changes` | what the last log entries changed, for followers and storage servers |
//! | `trim_progress` | how far trims and deletions have come at the storage servers |
//! | `consensus` | raft-rs and its log |
//! | `server` | the thin shell that connects all of these to the fabric |
//! | `data_dir` | what a server keeps on disk |
//! | `offline` | works on a folder while no server uses it |
//!
//! All but the last four are pure: they have no clock, socket, thread or randomness, as their lints
//! say (`clippy.toml`).

#![warn(unreachable_pub)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

#[warn(clippy::disallowed_methods, clippy::disallowed_types, clippy::iter_over_hash_type)]
pub mod cluster;
pub mod consensus;
mod data_dir;
#[warn(clippy::disallowed_methods, clippy::disallowed_types, clippy::iter_over_hash_type)]
pub mod leases;
mod levels;
#[warn(clippy::disallowed_methods, clippy::disallowed_types, clippy::iter_over_hash_type)]
pub mod lock_waiters;
#[warn(clippy::disallowed_methods, clippy::disallowed_types, clippy::iter_over_hash_type)]
pub mod namespace;
pub mod offline;
#[warn(clippy::disallowed_methods, clippy::disallowed_types, clippy::iter_over_hash_type)]
mod recent_changes;
#[warn(clippy::disallowed_methods, clippy::disallowed_types, clippy::iter_over_hash_type)]
pub mod request_dedup;
pub mod server;
#[warn(clippy::disallowed_methods, clippy::disallowed_types, clippy::iter_over_hash_type)]
mod sessions;
#[warn(clippy::disallowed_methods, clippy::disallowed_types, clippy::iter_over_hash_type)]
mod trim_progress;
