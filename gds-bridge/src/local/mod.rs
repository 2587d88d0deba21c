//! The tier `local-gds`: cuFile reads copies of sealed files from a disk of this node. See
//! `docs/gds.md`, "A copy on this node".
//!
//! `store.rs` has the copies, `cufile.rs` the interface to cuFile and when its results are trusted,
//! `rounds.rs` handles its counters when several reads overlap, `library.rs` finds NVIDIA's
//! library, `nvidia.rs` calls it, `probe.rs` opens it in another process first, `readers.rs` has
//! the threads that read, `copies.rs` finds the copies for a call and loads a part, `selftest.rs`
//! tests the tier. How copies are made: `session/stage.rs`.

mod copies;
mod cufile;
mod host;
pub mod library;
mod nvidia;
mod probe;
mod readers;
mod rounds;
mod selftest;
mod store;

pub use cufile::{Counters, CuFile};
pub use nvidia::Nvidia;
pub use probe::{REFUSED, look};
pub use rounds::Rounds;
pub use store::{Copy, Header, Listed, Making, Sealed, check_folder, list, remove};

pub(crate) use copies::Copies;
pub(crate) use host::HostCuFile;
pub(crate) use readers::Local;
pub(crate) use selftest::test;
pub(crate) use store::remove_named;
