//! The integration tests of the crate, as one program: most of the time of a test program goes into
//! linking it.

mod cluster;
#[path = "../../../client/tests/it/common/mod.rs"]
mod common;
mod cuda;
mod cufile;
mod direct;
mod engine;
mod kernel;
mod local;
mod numa;
mod policies;
mod ptx;
mod python;
mod ram;
mod served;
mod session;
mod shared;
mod standin;
mod transports;
mod wants;
