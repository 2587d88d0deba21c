//! The tier `local-gds`: cuFile reads copies of sealed files from a disk of this node. See
//! `docs/gds.md`, "A copy on this node".
//!
//! `store.rs` has the copies, `cufile.rs` the interface to cuFile and when its results are trusted,
//! `rounds.rs` handles its counters when several reads overlap, `library.rs` finds NVIDIA's
//! library, `nvidia.rs` calls it, `probe.rs` opens it in another process first, `reads.rs` moves a
//! part and tests the tier. How copies are made: `session/stage.rs`.

mod cufile;
mod host;
pub mod library;
mod nvidia;
mod probe;
mod reads;
mod rounds;
mod store;

pub use cufile::{Counters, CuFile};
pub use nvidia::Nvidia;
pub use probe::{REFUSED, look};
pub use rounds::Rounds;
pub use store::{Copy, Header, Listed, Making, Sealed, check_folder, list, remove};

pub(crate) use host::HostCuFile;
pub(crate) use reads::{Copies, Local, test};
pub(crate) use store::remove_named;
