//! The connection to the server that led last: state, and times for requests over it.

use std::{sync::Arc, time::Duration};

use strake_fabric::{Connection, Endpoint};

/// One attempt at a request. A leader that is cut off says nothing; the next one answers the retry.
pub(crate) const META_TRY: Duration = Duration::from_secs(5);
/// One renewal. A leader that stopped must be found out before the leases are over.
pub(crate) const HELLO_TRY: Duration = Duration::from_secs(1);

/// The connection to the server that led last.
#[derive(Default)]
pub(crate) struct Link {
    pub current: Option<Leader>,
    pub made: u64,
    /// Of the last connection.
    pub number: u64,
    /// Servers in a row that accepted a connection and did not answer on it in time.
    pub slow: u32,
    /// Servers in a row that do not take this client's key, or do not prove theirs.
    pub refused: usize,
}

#[derive(Clone)]
pub(crate) struct Leader {
    pub conn: Arc<dyn Connection>,
    pub at: Endpoint,
    /// Rising, also from one process to the next that takes its place.
    pub number: u64,
}
