//! The storage server: chunks on targets, replicated along chains.
//!
//! `chain` is the replication protocol as a pure state machine; `engine` keeps chunks on a
//! `device`; `server` is the thin shell that connects them to the fabric.

#![warn(missing_docs, unreachable_pub)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

#[warn(clippy::disallowed_methods, clippy::disallowed_types, clippy::iter_over_hash_type)]
pub mod chain;
pub mod device;
pub mod engine;
pub mod server;
