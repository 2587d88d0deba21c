//! The connection to the last known leader: the state, and time limits for requests over it.

use std::{sync::Arc, time::Duration};

use strake_fabric::{Connection, Endpoint};

/// Time limit of one attempt at a request. A leader that is cut off does not answer; the next one
/// answers the retry.
pub(crate) const META_TRY: Duration = Duration::from_secs(5);
/// Time limit of one renewal. A stopped leader must be detected before the leases expire.
pub(crate) const HELLO_TRY: Duration = Duration::from_secs(1);

/// The connection to the last known leader.
#[derive(Default)]
pub(crate) struct Link {
    pub current: Option<Leader>,
    pub made: u64,
    /// The number of the last connection.
    pub number: u64,
    /// Servers in a row that accepted a connection and did not answer on it in time.
    pub slow: u32,
    /// Servers in a row that do not accept this client's key, or do not prove theirs.
    pub refused: usize,
}

#[derive(Clone)]
pub(crate) struct Leader {
    pub conn: Arc<dyn Connection>,
    pub at: Endpoint,
    /// The number of the connection. It rises, also from one process of the mount to the next.
    pub number: u64,
}
