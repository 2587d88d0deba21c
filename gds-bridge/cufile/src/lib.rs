//! The bridge for unmodified programs that use cuFile: a library with cuFile's interface. Files of
//! our mounts go through the bridge, everything else goes to NVIDIA's library. `docs/gds.md`,
//! "Unmodified programs", says what that means for a program.
//!
//! Overview: [`api`] has the functions, guarded so that a panic is an error of its call;
//! `mount_detection.rs` detects our descriptors; `driver.rs` keeps what is open; `io.rs` moves
//! bytes; `batch.rs`, `stats.rs`, `params.rs` and `policy.rs` do what their names say; `vendor.rs`
//! calls NVIDIA's library.

pub mod abi;
pub mod api;
mod batch;
mod driver;
mod errors;
mod host;
mod io;
mod mount_detection;
mod params;
mod policy;
mod set;
mod stats;
mod vendor;
