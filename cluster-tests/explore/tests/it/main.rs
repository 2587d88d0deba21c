//! The integration tests of the crate, as one program: most of the time of a test program goes into
//! linking it.

mod chain;
mod leader;
mod leases;
mod locks;
mod pages;
mod writeback;
