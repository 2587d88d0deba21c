//! What every StrakeFS process needs from its environment, below the network and the file system.
//!
//! [`Env`] gives time, randomness and tasks, so that the simulator can replace them. [`watch`] tells
//! tasks of changes in an order that a seed repeats. [`keyfile`] and [`private`] are about files
//! that only their owner may read. [`quiet`] limits log lines that strangers can cause.
//! [`SharedMemory`] outlives a process that is killed.
#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

pub mod env;
pub mod keyfile;
pub mod private;
pub mod quiet;
pub mod shared_memory;
pub mod watch;

pub use env::{Clock, Env};
pub use keyfile::ClientKey;
pub use shared_memory::{Record, Records, SharedMemory};
