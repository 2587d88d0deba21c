//! What a client is told at start, and what it counts while it runs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use strake_fabric::Endpoint;

use crate::handover::Handover;

/// As [`Config::op_timeout`]: without end. A hundred years, because time is added to it.
pub const FOREVER: Duration = Duration::from_secs(100 * 366 * 86_400);

/// What is asked of metadata servers that do not lead: their answers are as good, but cannot be
/// remembered. See `docs/follower-reads.md`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FollowerReads {
    /// Only what would not be remembered anyhow, or is too much for it.
    #[default]
    Auto,
    /// Everything that only looks and is not known.
    Always,
    /// Nothing.
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
    /// fabric's buffer pool is taken. 0: nothing is kept, and nothing read ahead.
    pub cache_bytes: usize,
    /// Data requests in flight, over all files.
    pub max_inflight_pieces: usize,
    /// Bytes written but not yet stable that are kept for repetition; writers wait beyond it.
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
    /// Hold back what is written to files that nobody else may write, and send it later in larger
    /// pieces; see `docs/client.md`.
    pub write_back: bool,
    /// Keep pages of memory mappings in order with what other clients map and write; see
    /// `docs/mappings.md`.
    pub page_locks: bool,
    /// Connections to each object storage server.
    pub connections_per_node: usize,
    /// Read from this replica of each chain only (0 = first), to verify copies one by one. `None`:
    /// from any.
    pub read_replica: Option<usize>,
    /// What is asked of metadata servers that do not lead.
    pub follower_reads: FollowerReads,
    /// Servers that are not reached are reached through others.
    pub relay: bool,
    /// This client's uuid; random unless given.
    pub uuid: Option<[u8; 16]>,
    /// How long the end of a file is kept for the next piece of an append at most
    /// ([`crate::File::append_part`]); 0: not at all.
    pub append_hold: Duration,
    /// Uuids of clients that are certainly gone; their sessions end when this one's begins. At most
    /// 64.
    pub dead: Vec<[u8; 16]>,
    /// Memory for what must outlive this process. Its uuid goes over `uuid`.
    pub handover: Option<Arc<Handover>>,
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
            /// All of them by their names.
            pub fn fields(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)* $((stringify!($gauge), self.$gauge),)*]
            }
        }

        #[derive(Default)]
        pub(crate) struct Counters { $(pub $name: AtomicU64,)* }

        impl Counters {
            /// The gauges are 0.
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
    /// Writes that were held back.
    held_writes,
    /// Opens that were answered from memory.
    cached_opens,
    /// Requests to metadata servers, retries included; those by which recalls are waited for are
    /// not.
    meta_requests,
    /// Of those, requests about names and files: all but what keeps the session, its leases and the
    /// cluster map.
    operations,
    /// Of those, lists that a metadata server answered which does not lead.
    follower_reads,
    /// And lists that such a one was asked in vain; the leader was asked then.
    follower_refusals,
    /// Connections that were made through another server, because the direct way was cut.
    relayed,
    /// Requests to object storage servers, retries included.
    data_requests,
    /// Of those, reads of bytes, and writes.
    data_reads,
    /// See `data_reads`.
    data_writes,
    /// Questions to storage targets for the space of what is held back; not among the data
    /// requests.
    grant_requests,
    /// Inodes that the metadata servers had this client forget.
    recalls,
    /// Requests repeated after an error that passes.
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
    /// Bytes that are written and not yet known to be stable, now.
    unstable_bytes,
    /// Bytes that are held back, now.
    held_bytes,
    /// Memory in use for bytes that were read, now.
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
