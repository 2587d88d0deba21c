//! What each fuzz target does with an input: everything that decodes bytes from outside, and what
//! then acts on them.
//!
//! The bodies live here and not beside libFuzzer so that the normal test run replays the committed
//! corpus through them (`tests/corpus.rs`). `cluster-tests/fuzz/run` runs them under libFuzzer.
//! Inputs are read by [`input::Input`]: a choice or two, then the bytes in question, so that one
//! target covers what belongs together.

pub mod client;
pub mod connection;
pub mod input;
pub mod kernel;
pub mod mds_server;
pub mod messages;
pub mod namespace;
pub mod oss_disk;
pub mod oss_server;
pub mod raft_core;
pub mod raft_log;
pub mod safetensors;
pub mod text;
pub mod world;

/// A target's name, which is also that of its folder in `cluster-tests/fuzz/corpus`, and what it
/// does.
pub type Target = (&'static str, fn(&[u8]));

/// All targets.
pub const TARGETS: &[Target] = &[
    ("client", client::run),
    ("connection", connection::run),
    ("kernel", kernel::run),
    ("mds_server", mds_server::run),
    ("messages", messages::run),
    ("namespace", namespace::run),
    ("oss_disk", oss_disk::run),
    ("oss_server", oss_server::run),
    ("raft_core", raft_core::run),
    ("raft_log", raft_log::run),
    ("safetensors", safetensors::run),
    ("text", text::run),
];
