//! The request in a frame. Wire format: append only.

/// Client to mds; bodies in `schema/meta.proto`.
pub const SESSION_OPEN: u16 = 0x0001;
/// Client to mds: a sign of life, and what it has open.
pub const SESSION_RENEW: u16 = 0x0002;
/// Client to mds: the session ends, everything was reported.
pub const SESSION_CLOSE: u16 = 0x0003;
/// Client to mds: a list of operations.
pub const META: u16 = 0x0004;
/// Anyone to mds: the cluster map.
pub const MAP: u16 = 0x0005;
/// Client to mds: waits for locks. Sends a list and is answered when one of them is available.
pub const LOCK_WAIT: u16 = 0x0006;
/// Client to mds: asks what it must forget or report (recalls).
pub const RECALL: u16 = 0x0007;

/// oss to mds; bodies in `schema/cluster.proto`.
pub const REGISTER: u16 = 0x0041;
/// oss to mds: a sign of life, and how full targets are.
pub const HEARTBEAT: u16 = 0x0042;
/// Data that is about to be deleted or truncated, for fsck.
pub const PENDING: u16 = 0x0043;
/// Which files chunks belong to, for people.
pub const PLACES: u16 = 0x0044;

/// mds to mds.
pub const RAFT: u16 = 0x0061;
/// mds to mds: parts of a copy of the state.
pub const SNAPSHOT: u16 = 0x0062;
/// From a holder of the cluster key to an mds: the group's members, and changes of them.
pub const MEMBERS: u16 = 0x0063;
/// mds to a new mds: asks who it is.
pub const PROBE: u16 = 0x0064;
/// mds to the leading mds: up to where reads may be answered, see `docs/follower-reads.md`.
pub const FRONTIER: u16 = 0x0065;
/// From a holder of the cluster key to any server: its status.
pub const STATUS: u16 = 0x0066;

/// Within the transport, RDMA only: asks for memory for the payload of a reply, see `docs/rdma.md`.
pub const ROOM: u16 = 0x0081;
/// Anyone to any server: a request for another server, and its answer back, see `docs/formats.md`.
pub const RELAY: u16 = 0x0082;

/// Data plane; bodies are [`crate::data`] headers.
pub const READ: u16 = 0x0101;
/// Writes to a chunk.
pub const WRITE: u16 = 0x0102;
/// Makes every write of a chain stable.
pub const FLUSH: u16 = 0x0103;
/// Truncates a file's chunks on one chain to a size (0 removes them all).
pub const TRIM: u16 = 0x0104;
/// Where a file's chunks on one chain hold data, and how much: an [`crate::data::Extents`].
pub const EXTENTS: u16 = 0x0105;
/// Keeps space of a target free for dirty data that a session holds back.
pub const GRANT: u16 = 0x0106;
/// The time at a storage server: a [`crate::data::Clock`].
pub const CLOCK: u16 = 0x0107;
/// Chain-internal: forwards the same update to the next replica.
pub const FORWARD: u16 = 0x0111;
/// Chain-internal: makes every write of a chain stable.
pub const FORWARD_FLUSH: u16 = 0x0112;
/// Chain-internal resync: lists versions of the successor, puts a whole chunk, finishes.
pub const SYNC_LIST: u16 = 0x0113;
/// Chain-internal resync: puts a whole chunk.
pub const SYNC_PUT: u16 = 0x0114;
/// A target that has left a chain asks a replica in sync whether that replica can read all of a
/// chunk (0.0.0: says that it is alive).
pub const VOUCH: u16 = 0x0115;
/// Reads a target's copy of a chunk, whatever its position in the chain: the reader checks
/// checksums.
pub const READ_COPY: u16 = 0x0116;
/// Lists the chunks of a target, for fsck.
pub const LIST_CHUNKS: u16 = 0x0121;

/// Every service answers with the request's body, for measuring round trips.
pub const ECHO: u16 = 0x01ff;
