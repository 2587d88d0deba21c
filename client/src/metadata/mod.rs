//! Access to the metadata leader: one connection, one session, exactly-once mutations.
//!
//! A mutation gets a sequence number once and keeps it through every retry and every leader, so
//! that the servers run it once. When a new leader answers, the session reasserts its open files
//! before it sends anything else. When the servers say that the session is gone, a new one is
//! opened; unstable bytes of the old one are lost to their handles (`EIO`).
//!
//! [`service::Metadata`] owns all of it. The other files are its parts: some hold state, the others
//! the operations on it.

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
