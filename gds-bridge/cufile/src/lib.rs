//! The bridge for programs that use cuFile, as they are: a library of cuFile's interface. Files of
//! our mounts go through the bridge, everything else goes to NVIDIA's library. `docs/gds.md`,
//! "Unmodified programs", says what that means for a program.
//!
//! Where to read: [`api`] has the functions, guarded so that a panic is an error of its call;
//! `found.rs` tells whether a descriptor is ours; `driver.rs` keeps what is open; `io.rs` moves
//! bytes; `batch.rs`, `stats.rs`, `params.rs`, `policy.rs` as they are named; `real.rs` is the
//! other library.

pub mod abi;
pub mod api;
mod batch;
mod driver;
mod found;
mod host;
mod io;
mod params;
mod policy;
mod real;
mod set;
mod stats;
mod wrong;
