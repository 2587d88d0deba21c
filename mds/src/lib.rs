//! The metadata server: a namespace agreed on by Raft, the cluster map, sessions and their opens.
//!
//! `namespace`, `cluster` and `leases` are pure state machines; `consensus` wraps raft-rs and its log; `server` is the thin shell
//! that connects them to the fabric.

pub mod cluster;
pub mod consensus;
pub mod leases;
pub mod namespace;
pub mod server;
