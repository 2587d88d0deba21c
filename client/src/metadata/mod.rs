//! The way to the metadata leader: one connection, one session, exactly-once mutations.
//!
//! A mutation gets a sequence number once and keeps it through every retry and every leader, so
//! that the servers run it once. When a new leader answers, the session reasserts what it holds
//! open before anything else is sent there. When the servers say that the session is gone, a new
//! one is opened; unstable bytes of the old one are lost to their handles (`EIO`).
//!
//! [`service::Metadata`] owns all of it; the files beside it are its parts: state first, then what
//! is done with it.

pub(crate) mod cluster_map;
pub(crate) mod follower_policy;
pub(crate) mod followers;
pub(crate) mod leader;
pub(crate) mod link;
pub(crate) mod openings;
pub(crate) mod opens;
pub(crate) mod ops;
pub(crate) mod renewal;
pub(crate) mod request_ids;
pub(crate) mod requests;
pub(crate) mod service;
pub(crate) mod session;
