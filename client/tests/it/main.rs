//! The integration tests of the crate, as one program: most of the time of a test program goes into
//! linking it.

mod cache;
mod common;
mod faults;
mod holes;
mod io;
mod left;
mod opens;
mod takeover;
mod writeback;
