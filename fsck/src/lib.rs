//! The check of a whole file system while it is in use: compares the metadata servers' state with
//! the chunks on the targets.
//!
//! A [`Checker`] walks the namespace through the client library and lists the chunks of every
//! target. A file may change between the two, so after a pause the checker looks a second time and
//! reports only the differences that are still there. Chunks that the metadata servers are about to
//! delete are counted apart: a removed file keeps its chunks for a grace period. A check changes
//! nothing; [`Checker::repair`] does.

#![warn(missing_docs)]

mod findings;
mod look;
mod repair;

pub use findings::{Finding, Place, text};
pub use look::{Checker, Outcome};
pub use repair::Fate;
