//! What a client is told at start, and what it counts while it runs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use strake_fabric::Endpoint;

use crate::keep::Keep;

/// As [`Config::op_timeout`]: without end. A hundred years, because time is added to it.
pub const FOREVER: Duration = Duration::from_secs(100 * 366 * 86_400);

/// Settings of a [`crate::Client`]. Start from [`Config::new`] and change what differs.
#[derive(Clone, Debug)]
pub struct Config {
    /// Metadata servers to ask first; the others are learned from the cluster map.
    pub mds: Vec<Endpoint>,
    /// Shown in `strake status`; replicas on a node of this name are read first.
    pub hostname: String,
    /// The software's version, shown in `strake status`.
    pub version: String,
    /// Process id, shown in `strake status`.
    pub pid: u64,
    /// Longest read-ahead window of one open file, bytes; 0 turns read-ahead off.
    pub read_ahead_bytes: usize,
    /// Memory for data that was read ahead, bytes, over all files.
    pub cache_bytes: usize,
    /// Age at which data that was read ahead is no longer served.
    pub cache_ttl: Duration,
    /// Data requests in flight, over all files.
    pub max_inflight_pieces: usize,
    /// Bytes written but not yet stable that are kept for repetition; writers wait beyond it.
    pub unstable_limit: usize,
    /// Age at which unstable bytes are flushed in the background.
    pub flush_age: Duration,
    /// How often sizes that grew are reported to the metadata server in the background.
    pub extend_interval: Duration,
    /// How long one operation is retried through failures before it fails with `ETIMEDOUT`; [`FOREVER`] for no end.
    pub op_timeout: Duration,
    /// How long [`crate::Client::connect`] tries to get a session.
    pub connect_timeout: Duration,
    /// Change nothing: see [`crate::Client::set_read_only`].
    pub read_only: bool,
    /// Connections to each object storage server.
    pub connections_per_node: usize,
    /// Read from this replica of each chain only (0 = first), to verify copies one by one. `None`: from any.
    pub read_replica: Option<usize>,
    /// This client's uuid; random unless given.
    pub uuid: Option<[u8; 16]>,
    /// Uuids of clients that are certainly gone; their sessions end when this one's begins. At most 64.
    pub dead: Vec<[u8; 16]>,
    /// Memory for what must outlive this process. Its uuid goes over `uuid`.
    pub keep: Option<Arc<Keep>>,
}

impl Config {
    /// The defaults, for a cluster reached at `mds`.
    pub fn new(mds: Vec<Endpoint>) -> Config {
        Config {
            mds,
            hostname: String::new(),
            version: env!("CARGO_PKG_VERSION").into(),
            pid: u64::from(std::process::id()),
            read_ahead_bytes: 16 << 20,
            cache_bytes: 128 << 20,
            cache_ttl: Duration::from_secs(1),
            max_inflight_pieces: 32,
            unstable_limit: 256 << 20,
            flush_age: Duration::from_secs(1),
            extend_interval: Duration::from_millis(400),
            op_timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(60),
            read_only: false,
            connections_per_node: 2,
            read_replica: None,
            uuid: None,
            dead: Vec::new(),
            keep: None,
        }
    }
}

/// Counters since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes that reads returned.
    pub read_bytes: u64,
    /// Bytes that writes took.
    pub written_bytes: u64,
    /// Requests to metadata servers, retries included.
    pub meta_requests: u64,
    /// Requests to object storage servers, retries included.
    pub data_requests: u64,
    /// Requests repeated after an error that passes.
    pub retries: u64,
    /// Writes repeated because their bytes changed on the way.
    pub resends: u64,
    /// Unstable writes repeated because a replica restarted.
    pub replays: u64,
    /// Replies whose bytes did not match their checksums.
    pub corrupt_replies: u64,
    /// Times another metadata leader (or a new connection to it) took over.
    pub failovers: u64,
    /// Sessions that were lost and replaced.
    pub sessions_lost: u64,
    /// Bytes served from read-ahead.
    pub read_ahead_bytes: u64,
    /// Longest time one request was retried, milliseconds.
    pub longest_stall_ms: u64,
    /// Bytes that are written and not yet known to be stable, now.
    pub unstable_bytes: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        #[derive(Default)]
        pub(crate) struct Counters { $(pub $name: AtomicU64,)* pub longest_stall_ms: AtomicU64 }
        impl Counters {
            pub fn read(&self, unstable_bytes: u64) -> Stats {
                Stats { $($name: self.$name.load(Relaxed),)*
                    longest_stall_ms: self.longest_stall_ms.load(Relaxed), unstable_bytes }
            }
        }
    };
}
counters!(
    read_bytes,
    written_bytes,
    meta_requests,
    data_requests,
    retries,
    resends,
    replays,
    corrupt_replies,
    failovers,
    sessions_lost,
    read_ahead_bytes
);

impl Counters {
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Relaxed);
    }
    pub fn stalled(&self, how_long: Duration) {
        self.longest_stall_ms.fetch_max(how_long.as_millis() as u64, Relaxed);
    }
}
