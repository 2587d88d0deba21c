//! Moves ranges of files into GPU memory and back, and reports the path that every byte took. See
//! `docs/gds.md`.
//!
//! ```no_run
//! # async fn example(client: strake_client::Client, file: strake_client::File) -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//!
//! use strake_gds::{Bridge, Cuda, GpuMem, Options, Policy, Tier, Transfer};
//!
//! let gpu = Arc::new(Cuda::open(0)?);
//! let bridge = Bridge::open(gpu.clone(), Arc::new(client), Options::default()).await?;
//! let tensor = gpu.alloc(1 << 30)?;
//! let all = [Transfer { file: Arc::new(file), offset: 0, gpu: tensor, len: 1 << 30 }];
//! let report = bridge.load(&all, Policy::AtLeast(Tier::BounceTcp)).await?;
//! println!("{report}");
//! # Ok(()) }
//! ```
//!
//! Where to read: [`plan`] decides which tier a part takes and is pure; [`Bridge`] (`bridge.rs`)
//! splits calls into parts and drives them; `engine.rs` is what all tiers use; `copier.rs` has the
//! threads that copy, which `hands.rs` starts; `direct.rs` is the path without a copy on this
//! machine, [`local`] the one from a copy on this node; `selftest.rs` tests the tiers; `rest.rs`
//! knows which tiers to avoid for a while; [`session`] combines all of it for programs that are not
//! asynchronous; `pins.rs` registers host memory, `numa.rs` says where it should lie; [`GpuMem`] is
//! the device, implemented by [`Cuda`] and [`HostMem`].

#![warn(missing_docs)]

// The tests' device names this crate so.
#[cfg(test)]
extern crate self as strake_gds;

mod bridge;
pub mod child;
mod copier;
mod cuda;
mod direct;
mod engine;
#[cfg(test)]
#[path = "../../cluster-tests/fake-gpu/src/lib.rs"]
#[allow(dead_code, unused_imports, reason = "other crates' tests use the rest")]
mod fake;
mod fault;
mod file;
mod hands;
mod host;
pub mod local;
mod mem;
mod numa;
mod options;
mod pins;
pub mod plan;
mod reason;
mod report;
mod rest;
mod scratch;
mod selftest;
pub mod session;
pub mod status;
pub mod tensors;
mod tier;
mod tier_counters;
mod transfer;

pub use bridge::Bridge;
pub use cuda::Cuda;
pub use fault::Fault;
pub use file::{FileIo, Network, Strict, Watched, not_direct};
pub use host::HostMem;
pub use mem::{Before, GpuMem, Mark, Stream};
pub use numa::Numa;
pub use options::Options;
pub use pins::{MIN_SLOT, Registry, Slot};
pub use reason::Unavailable;
pub use report::{Checksum, Checksums, Direction, Failed, Report, Switch};
pub use tier::{ByTier, Policy, Tier};
pub use tier_counters::{FileTiers, TierCounters};
pub use transfer::Transfer;
