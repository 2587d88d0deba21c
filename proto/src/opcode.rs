//! What a frame asks for. Wire format: append only.

/// Client to mds; bodies in `schema/meta.proto`.
pub const SESSION_OPEN: u16 = 0x0001;
pub const SESSION_RENEW: u16 = 0x0002;
pub const SESSION_CLOSE: u16 = 0x0003;
pub const META: u16 = 0x0004;
/// Anyone to mds: the cluster map.
pub const MAP: u16 = 0x0005;
/// Client to mds: waits for locks; a list that is answered when one of them may be had.
pub const LOCK_WAIT: u16 = 0x0006;
/// Client to mds: asks what is to be forgotten or reported.
pub const RECALL: u16 = 0x0007;

/// oss to mds; bodies in `schema/cluster.proto`.
pub const REGISTER: u16 = 0x0041;
pub const HEARTBEAT: u16 = 0x0042;
/// What is about to be deleted or cut, for fsck.
pub const PENDING: u16 = 0x0043;
/// Where chunks lie in files, for people.
pub const PLACES: u16 = 0x0044;

/// mds to mds.
pub const RAFT: u16 = 0x0061;
pub const SNAPSHOT: u16 = 0x0062;
/// Whoever has the cluster key to mds: the group's members, and their changes.
pub const MEMBERS: u16 = 0x0063;
/// mds to a new mds: who are you?
pub const PROBE: u16 = 0x0064;
/// mds to the mds that leads: what may be told of, see `docs/follower-reads.md`.
pub const FRONTIER: u16 = 0x0065;

/// Within the transport, RDMA only: room for the payload of a reply, see `docs/rdma.md`.
pub const ROOM: u16 = 0x0081;
/// Anyone to any server: a request for another server, and its answer back, see `docs/formats.md`.
pub const RELAY: u16 = 0x0082;

/// Data plane; bodies are [`crate::data`] headers.
pub const READ: u16 = 0x0101;
pub const WRITE: u16 = 0x0102;
/// Makes every write of a chain stable.
pub const FLUSH: u16 = 0x0103;
/// Cuts a file's chunks on one chain to a size (0 removes them all).
pub const TRIM: u16 = 0x0104;
/// Where a file's chunks on one chain hold data, and how much: an [`crate::data::Extents`].
pub const EXTENTS: u16 = 0x0105;
/// Keeps space of a target free for what a session holds back.
pub const GRANT: u16 = 0x0106;
/// How late it is at a storage server: a [`crate::data::Clock`].
pub const CLOCK: u16 = 0x0107;
/// Chain-internal: the same update going to the next replica.
pub const FORWARD: u16 = 0x0111;
pub const FORWARD_FLUSH: u16 = 0x0112;
/// Chain-internal resync: list versions of the successor, put a whole chunk, finish.
pub const SYNC_LIST: u16 = 0x0113;
pub const SYNC_PUT: u16 = 0x0114;
/// A target that has left a chain asks a replica in sync whether that can read all of a chunk
/// (0.0.0: says that it is there).
pub const VOUCH: u16 = 0x0115;
/// What a target has of a chunk, whatever its place in the chain: the reader judges by checksums.
pub const READ_COPY: u16 = 0x0116;
/// Chunks of a target, for fsck.
pub const LIST_CHUNKS: u16 = 0x0121;

/// Answered by every service with its own body, for measuring round trips.
pub const ECHO: u16 = 0x01ff;
