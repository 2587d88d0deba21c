//! The protocol between StrakeFS processes: ids, errors, frames, data-plane headers, capabilities,
//! the cluster map and the arithmetic that turns a file offset into a chunk on a chain. No I/O, no
//! clock, no randomness.
//!
//! Every format here is specified in `docs/formats.md`.

#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

pub mod bound;
pub mod cap;
pub mod checksum;
pub mod data;
pub mod error;
pub mod frame;
pub mod health;
pub mod ids;
pub mod incarnation;
pub mod ioctl;
pub mod layout;
pub mod level;
pub mod map;
pub mod opcode;
pub mod ops;
pub mod rows;
pub mod seal;

/// Control messages generated from `schema/*.proto`.
// The schema has the comments.
#[allow(clippy::all, clippy::unwrap_used, clippy::expect_used, missing_docs, rustdoc::all)]
pub mod pb {
    include!(concat!(env!("OUT_DIR"), "/strake.v1.rs"));
}

pub use bound::Bound;
pub use cap::{CapKey, Capability, Rights};
pub use error::{Code, Error, Result};
pub use ids::{ChainId, ChunkId, DataId, Fid, Ino, NodeId, SessionId, TargetId};
pub use incarnation::{Incarnation, Kin};
pub use level::FEATURE_LEVEL;

/// Version of the wire protocol that this build speaks; the handshake picks the highest version
/// that both ends support.
pub const WIRE_VERSION: u16 = 1;
/// Oldest wire version this build still speaks.
pub const WIRE_VERSION_MIN: u16 = 1;
