//! The data path: requests to storage servers, and the choice of the server.
//!
//! [`service::Storage`] owns the connections; the other files use them.

pub(crate) mod buffers;
pub(crate) mod calls;
pub(crate) mod chains;
pub(crate) mod clock_questions;
pub(crate) mod clocks;
pub(crate) mod connections;
pub(crate) mod foreign;
pub(crate) mod foreign_reads;
pub(crate) mod holes;
pub(crate) mod rdma_connections;
pub(crate) mod reads;
pub(crate) mod relays;
pub(crate) mod replica_attempts;
pub(crate) mod route;
pub(crate) mod service;
