//! How the processes of a cluster reach each other over a fabric, which knows no cluster.
//!
//! [`pool`] keeps connections to servers and has the one rule of what a failed attempt means.
//! [`leader`] says which metadata server to ask next. [`relay`] passes requests on around a cut
//! link. [`payloads`] tells the fabric what it cannot know: which requests and answers bring
//! checksums of their payloads, and how long an answer's payload may be.
#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

pub mod leader;
pub mod payloads;
pub mod pool;
pub mod relay;
pub mod traffic;

pub use leader::LeaderFinder;
pub use pool::{ConnectionPool, connect};
pub use relay::{Relay, Relayed};
