//! What the engine is asked for and answers: a chunk's name, its properties, changes of it and what
//! a read returns.

use std::ops::Range;

use strake_fabric::Buf;
use strake_proto::{
    ChainId, ChunkId, Code, Error,
    data::{Version, Writer},
};

/// A chunk on this target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The chain that it belongs to.
    pub chain: ChainId,
    /// File, data id and index.
    pub chunk: ChunkId,
}

impl std::fmt::Display for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "chunk {} of chain {}", self.chunk, self.chain)
    }
}

/// A chunk's properties, without its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkMeta {
    /// Of the newest committed update.
    pub version: Version,
    /// Bytes; 0 for a tombstone.
    pub len: u32,
    /// Removed; kept so that resync knows the removal's version.
    pub tombstone: bool,
    /// The last [`KEPT_WRITERS`](strake_proto::data::KEPT_WRITERS) changes, oldest first.
    pub writers: Vec<Writer>,
}

/// A change to a chunk.
#[derive(Clone, Debug)]
pub enum Update {
    /// Puts `data` at `offset`, extending the chunk; a gap reads as zeros. `sums`: CRC32C per 4 KiB
    /// block of the chunk touched, see [`strake_proto::checksum`].
    Write {
        /// Bytes from the start of the chunk.
        offset: u32,
        /// The bytes, one buffer after the other.
        data: Vec<Buf>,
        /// CRC32C of each 4 KiB block of the chunk that is touched, of the bytes in `data` alone.
        sums: Vec<u32>,
    },
    /// Makes `[offset, offset + len)` zeros up to the chunk's end: whole blocks become holes. A
    /// chunk that does not exist becomes a tombstone.
    Punch {
        /// Bytes from the start of the chunk.
        offset: u32,
        /// Bytes.
        len: u32,
    },
    /// Truncates to `len` bytes if longer.
    Truncate {
        /// Bytes that stay.
        len: u32,
    },
    /// Removes the bytes; the version stays as a tombstone.
    Remove,
    /// Writes the whole chunk anew, with the contents after an update that this one stands for.
    /// Earlier writers stay. The header must be intact.
    Rewrite {
        /// All bytes of the chunk.
        data: Vec<Buf>,
        /// As in [`Update::Write`].
        sums: Vec<u32>,
    },
    /// Writes the whole chunk anew, whatever its state, even damaged. Blocks in `damaged` (bytes
    /// from the start of the chunk) have no good copy anywhere: they are stored as damaged blocks
    /// and cannot be read. The checksum stored for such a block is the complement of that of its
    /// bytes. The caller picks the bytes so that it is the checksum of the lost block, which is
    /// then recognized when it turns up; if that checksum is unknown, the bytes are zeros.
    Replace {
        /// All bytes of the chunk; none for a tombstone.
        data: Vec<Buf>,
        /// As in [`Update::Write`].
        sums: Vec<u32>,
        /// The chunk is removed.
        tombstone: bool,
        /// Whole blocks without a good copy, in order.
        damaged: Vec<Range<u32>>,
    },
}

/// What a read found.
#[derive(Clone, Debug, Default)]
pub struct ReadOut {
    /// Segments in order, `len` bytes together.
    pub data: Vec<Buf>,
    /// One per 4 KiB block of the chunk touched by `[offset, offset + len)`.
    pub sums: Vec<u32>,
    /// How many of the requested bytes exist.
    pub len: u32,
    /// The version that all of them are of.
    pub version: Version,
}

/// The error for a chunk whose record is damaged.
pub(super) fn damaged(key: &Key) -> Error {
    Error::new(
        Code::Corrupt,
        format!("{key}: its record in the chunk table is damaged; a good copy must replace it"),
    )
}
