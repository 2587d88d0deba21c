//! What each fuzz target does with an input. The targets cover all code that decodes bytes from
//! outside, and the code that then acts on them.
//!
//! The targets are here and not in the libFuzzer crate so that the normal test run replays the
//! committed corpus through them (`tests/corpus.rs`). `cluster-tests/fuzz/run` runs them under
//! libFuzzer. [`input::Input`] reads the inputs: a choice or two first, then the bytes, so that one
//! target covers related formats.

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

/// A target: its name, which is also its folder in `cluster-tests/fuzz/corpus`, and its function.
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
