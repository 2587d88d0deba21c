//! The settings of a client, and its counters.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use strake_fabric::Endpoint;

use crate::handover::Handover;

/// For [`Config::op_timeout`]: retry without end. It is a hundred years, because time is added to
/// it.
pub const FOREVER: Duration = Duration::from_secs(100 * 366 * 86_400);

/// Which requests go to metadata servers other than the leader. Their answers are as good, but
/// cannot be cached under a lease. See `docs/follower-reads.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FollowerReads {
    /// Only reads whose answers would not be cached anyway, or that are too large for it.
    #[default]
    Auto,
    /// Every read whose answer is not cached.
    Always,
    /// No requests.
    Never,
}

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
    /// Memory for bytes of files that were read or read ahead, over all files; at most half of the
    /// fabric's buffer pool is used. 0: no bytes are cached or read ahead.
    pub cache_bytes: usize,
    /// Data requests in flight, over all files.
    pub max_inflight_pieces: usize,
    /// Limit of the bytes that are written but not yet stable, and kept to be sent again; writers
    /// wait beyond it.
    pub unstable_limit: usize,
    /// Age at which unstable bytes are flushed in the background.
    pub flush_age: Duration,
    /// How often sizes that grew are reported to the metadata server in the background.
    pub extend_interval: Duration,
    /// How long one operation is retried through failures before it fails with `ETIMEDOUT`;
    /// [`FOREVER`] for no end.
    pub op_timeout: Duration,
    /// How long [`crate::Client::connect`] tries to get a session.
    pub connect_timeout: Duration,
    /// Change nothing: see [`crate::Client::set_read_only`].
    pub read_only: bool,
    /// Delay writes to files that no other client may write, and send them later in larger pieces;
    /// see `docs/client.md`.
    pub write_back: bool,
    /// Keep pages of memory mappings coherent with what other clients map and write; see
    /// `docs/mappings.md`.
    pub page_locks: bool,
    /// Connections to each storage server.
    pub connections_per_node: usize,
    /// Read only from this replica of each chain (0 = first), to verify copies one by one. `None`:
    /// from any.
    pub read_replica: Option<usize>,
    /// Which requests go to metadata servers other than the leader.
    pub follower_reads: FollowerReads,
    /// Reach servers that are not reached directly through other servers.
    pub relay: bool,
    /// This client's uuid; random unless given.
    pub uuid: Option<[u8; 16]>,
    /// The longest time that the end of a file is kept for the next piece of an append
    /// ([`crate::File::append_part`]); 0 for not at all.
    pub append_hold: Duration,
    /// Uuids of clients that are certainly gone; their sessions end when this client's session
    /// begins. At most 64.
    pub dead: Vec<[u8; 16]>,
    /// Records for state that must outlive this process. The uuid in them overrides `uuid`.
    pub handover: Option<Arc<dyn Handover>>,
    /// The newest feature level that the metadata servers are told this program knows: lower than
    /// [`strake_proto::FEATURE_LEVEL`] only in tests.
    pub feature_level: u32,
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
            max_inflight_pieces: 32,
            unstable_limit: 256 << 20,
            flush_age: Duration::from_secs(1),
            extend_interval: Duration::from_millis(400),
            op_timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(60),
            read_only: false,
            write_back: false,
            page_locks: true,
            connections_per_node: 2,
            read_replica: None,
            follower_reads: FollowerReads::Auto,
            relay: true,
            uuid: None,
            append_hold: Duration::from_millis(500),
            dead: Vec::new(),
            handover: None,
            feature_level: strake_proto::FEATURE_LEVEL,
        }
    }
}

macro_rules! stats {
    ({ $($(#[$doc:meta])* $name:ident,)* } { $($(#[$gauge_doc:meta])* $gauge:ident,)* }) => {
        /// Counters since start.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
            $($(#[$gauge_doc])* pub $gauge: u64,)*
        }

        impl Stats {
            /// All counters and gauges with their names.
            pub fn fields(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)* $((stringify!($gauge), self.$gauge),)*]
            }
        }

        #[derive(Default)]
        pub(crate) struct Counters { $(pub $name: AtomicU64,)* }

        impl Counters {
            /// The counters; gauges are 0.
            pub fn read(&self) -> Stats {
                Stats { $($name: self.$name.load(Relaxed),)* ..Stats::default() }
            }
        }
    };
}

stats!({
    /// Bytes that reads returned.
    read_bytes,
    /// Of those, bytes that were in memory already.
    cached_bytes,
    /// Bytes that writes took.
    written_bytes,
    /// Writes that were held back, to be sent later.
    held_writes,
    /// Opens that were answered from the open cache.
    cached_opens,
    /// Requests to metadata servers, including retries. The requests that wait for recalls are not
    /// counted.
    meta_requests,
    /// Of those, requests about names and files: all but those that keep the session, its leases
    /// and the cluster map.
    operations,
    /// Of those, lists that a metadata server other than the leader answered.
    follower_reads,
    /// Lists that such a server could not answer, so that the leader was asked.
    follower_refusals,
    /// Connections that were made through another server, because the direct link was cut.
    relayed,
    /// Requests to storage servers, including retries.
    data_requests,
    /// Of those, reads of bytes, and writes.
    data_reads,
    /// See `data_reads`.
    data_writes,
    /// Requests to storage targets for space for dirty data; not included in the data requests.
    grant_requests,
    /// Inodes that this client forgot because the metadata servers recalled them.
    recalls,
    /// Requests repeated after a transient error.
    retries,
    /// Writes repeated because their bytes changed on the way.
    resends,
    /// Unstable writes repeated because a replica restarted.
    replays,
    /// Replies whose bytes did not match their checksums.
    corrupt_replies,
    /// Times another metadata leader (or a new connection to it) took over.
    failovers,
    /// Sessions that were lost and replaced.
    sessions_lost,
    /// Longest time one request was retried, milliseconds.
    longest_stall_ms,
} {
    /// Bytes that are written and not yet known to be stable now.
    unstable_bytes,
    /// Bytes that are held back now.
    held_bytes,
    /// Memory in use now for bytes that were read.
    cache_bytes,
});

impl Counters {
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Relaxed);
    }
    pub fn stalled(&self, how_long: Duration) {
        self.longest_stall_ms.fetch_max(how_long.as_millis() as u64, Relaxed);
    }
}
