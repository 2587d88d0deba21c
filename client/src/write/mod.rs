//! Writes: dirty data, the disk space for it, and writes that are not stable yet.

pub(crate) mod back;
#[doc(hidden)]
pub mod dirty;
pub(crate) mod flush;
pub(crate) mod foreign_writes;
pub(crate) mod grant_requests;
pub(crate) mod grants;
pub(crate) mod held_writes;
pub(crate) mod punches;
pub(crate) mod ranges;
pub(crate) mod service;
pub(crate) mod unstable;
pub(crate) mod updates;
pub(crate) mod writeback;
