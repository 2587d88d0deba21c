//! The metadata server: a namespace agreed on by Raft, the cluster map, sessions and their opens.
//!
//! `namespace`, `cluster` and `leases` are pure state machines; `consensus` wraps raft-rs and its log; `server` is the thin shell
//! that connects them to the fabric. `folder` is what a server keeps on disk, `offline` works on it while no server does.

pub mod cluster;
pub mod consensus;
mod folder;
pub mod leases;
pub mod namespace;
pub mod offline;
pub mod server;
