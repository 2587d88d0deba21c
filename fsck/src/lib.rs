//! The check of a whole file system while it is in use: what metadata servers say against the
//! chunks that targets have.
//!
//! A [`Checker`] walks the namespace through the client library, and every target lists its chunks.
//! Differences are looked at a second time after a pause, because a file may have changed in
//! between, and are reported only if they are still there. Chunks that the metadata servers are
//! about to delete are counted apart: a removed file keeps them for a grace period. A check changes
//! nothing; [`Checker::repair`] does.

#![warn(missing_docs)]

mod findings;
mod look;
mod repair;

pub use findings::{Finding, Place, text};
pub use look::{Checker, Outcome};
pub use repair::Fate;
