//! What a client leaves to the next client of the same mount, in records that outlive the process:
//! see `docs/restart.md`.
//!
//! [`Handover`] is what the client wants of these records; the mount implements it. The client
//! records what only it knows (numbers it gave out, unreported sizes, unstable writes) before it
//! acts on it. A record lasts until its value is dropped, or until the next client takes it over.

pub(crate) mod operation;
pub(crate) mod takeover;

use std::{
    fmt,
    sync::{Arc, atomic::AtomicU64},
};

use strake_fabric::{Buf, Endpoint, Pool};
use strake_proto::{
    ChainId, ChunkId, Ino, SessionId,
    data::{BootId, Version},
    layout::Piece,
};

/// Records of one mount that outlive its daemons. A mount makes one for each client.
pub trait Handover: fmt::Debug + Send + Sync {
    /// The uuid of the mount's clients.
    fn uuid(&self) -> [u8; 16];

    /// The pool in which written data must lie to outlive the process.
    fn pool(&self) -> &Pool;

    /// The session of the previous client, 0 if there was none.
    fn former_session(&self) -> SessionId;

    /// Records the session of this client.
    fn set_session(&self, id: SessionId);

    /// The metadata servers that were last recorded; none at first.
    fn mds(&self) -> Vec<Endpoint>;

    /// Records the metadata servers of the newest map, as many as fit: the configuration may name
    /// only servers that are gone by now.
    fn set_mds(&self, endpoints: &[Endpoint]);

    /// The lowest number that no metadata mutation of any session has used.
    fn next_mutation(&self) -> u64;

    /// Records that all numbers of mutations below `next` are used.
    fn set_next_mutation(&self, next: u64);

    /// Takes `n` unused numbers for data writes; returns the first.
    fn take_data_numbers(&self, n: u64) -> u64;

    /// See [`strake_proto::data::DataRequest::round`]; shared by all sessions.
    fn round(&self) -> &AtomicU64;

    /// The mutations of `session` that the previous client may have sent, and that were not
    /// repeated yet.
    fn in_doubt(&self, session: SessionId) -> Vec<u64>;

    /// Records that this client may write a file; `None` when there is no space for it.
    fn keep_file(&self, ino: Ino) -> Option<Box<dyn FileRecord>>;

    /// The files that the previous client had open for writing. Returns them only once.
    fn left_files(&self) -> Vec<Box<dyn FileRecord>>;

    /// Records a write. `order`: the position among all writes of its kind. `None` when there is no
    /// space for it, or when the bytes of a write that is not answered yet do not outlive the
    /// process.
    fn keep_write(
        &self,
        order: u64,
        write: &KeptWrite,
        bytes: &[Buf],
    ) -> Option<Box<dyn WriteRecord>>;

    /// The writes that the previous client left, in their order. Returns them only once.
    fn left_writes(&self) -> Vec<LeftWrite>;
}

/// The record of a file that this client has open for writing. It is kept until the metadata
/// servers know that the file is no longer open for writing.
pub trait FileRecord: Send + Sync {
    /// The inode.
    fn ino(&self) -> Ino;

    /// Writes of this user (uid and gid), which are not reported yet, extend the file to at least
    /// `end`. `holes`: they may have left holes.
    fn wrote(&self, end: u64, holes: bool, user: (u32, u32));

    /// All writes are reported.
    fn reported(&self);

    /// The arguments of [`FileRecord::wrote`], if those writes are not reported yet.
    fn unreported(&self) -> Option<(u64, bool, (u32, u32))>;

    /// A failed write may have left bytes beyond the end.
    fn set_surplus(&self);

    /// Whether [`FileRecord::set_surplus`] was called.
    fn surplus(&self) -> bool;

    /// An error waits to be reported.
    fn set_failed(&self);

    /// Whether [`FileRecord::set_failed`] was called.
    fn failed(&self) -> bool;

    /// The lock of an append may be held.
    fn set_ends(&self);

    /// Whether [`FileRecord::set_ends`] was called.
    fn ends(&self) -> bool;

    /// The number under which the metadata servers have this client on record as a writer.
    fn set_writer(&self, index: u64);

    /// The number given to [`FileRecord::set_writer`], 0 for none.
    fn writer(&self) -> u64;
}

/// The record of a write.
pub trait WriteRecord: Send + Sync {
    /// Only the first `len` bytes of the write still count.
    fn cut(&self, len: u64);
}

/// The record of an operation: see [`Operation`](crate::Operation).
pub trait OperationRecord: Send + Sync {
    /// The session and the number of the operation's mutation; `None` if it has sent none.
    fn mutation(&self) -> Option<(SessionId, u64)>;

    /// Records the mutation that is about to be sent.
    fn set_mutation(&self, session: SessionId, number: u64);

    /// The session and the first number of the operation's data writes.
    fn data(&self) -> Option<(SessionId, u64)>;

    /// Records the data writes that are about to be sent.
    fn set_data(&self, session: SessionId, first: u64);

    /// What the operation was about to append, and the inode.
    fn append(&self) -> Option<(Ino, Appended)>;

    /// Records what is about to be appended, whose data writes have no numbers yet; `None`: nothing
    /// was appended.
    fn set_append(&self, append: Option<Appended>);
}

/// Where an append was written, or was about to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Appended {
    /// The offset of its first byte.
    pub offset: u64,
    /// The offset behind its last byte.
    pub end: u64,
    /// The session of the append.
    pub session: SessionId,
}

/// The kind of a recorded write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteKind {
    /// Answered, and not known to be stable.
    Unstable,
    /// As `Unstable`, but a punch, without bytes.
    Punch,
    /// About to be sent under its number. It may have arrived.
    Sent,
    /// Dirty data that was not sent, of this user. The record has only its session and its offset
    /// in the file.
    Held {
        /// User id of the writer.
        uid: u32,
        /// Group id of the writer.
        gid: u32,
    },
}

impl WriteKind {
    /// Whether the write was answered. If not, it can only be repeated with its bytes.
    pub fn is_answered(self) -> bool {
        matches!(self, WriteKind::Unstable | WriteKind::Punch)
    }
}

/// What is recorded of a write to one chunk.
#[derive(Clone, Debug, PartialEq)]
pub struct KeptWrite {
    /// The kind.
    pub kind: WriteKind,
    /// The chain.
    pub chain: ChainId,
    /// The chunk.
    pub chunk: ChunkId,
    /// The offset in the chunk.
    pub offset: u32,
    /// The offset in the file.
    pub file_offset: u64,
    /// The number of bytes.
    pub len: usize,
    /// The session in which it was written.
    pub session: SessionId,
    /// Its number in that session.
    pub seq: u64,
    /// The chunk's version after it.
    pub version: Version,
    /// The boot ids of the replicas that have it.
    pub boot_ids: Vec<BootId>,
}

impl KeptWrite {
    /// A write that is not sent yet: `len` bytes at offset `at` of the file, by `owner` (uid and
    /// gid).
    pub(crate) fn held(
        ino: Ino,
        session: SessionId,
        at: u64,
        len: usize,
        (uid, gid): (u32, u32),
    ) -> KeptWrite {
        KeptWrite {
            kind: WriteKind::Held { uid, gid },
            chain: 0,
            chunk: ChunkId { ino, data: 0, index: 0 },
            offset: 0,
            file_offset: at,
            len,
            session,
            seq: 0,
            version: Version::default(),
            boot_ids: Vec::new(),
        }
    }

    /// A write that is about to be sent.
    pub(crate) fn sent(p: &Piece, (session, seq): (SessionId, u64)) -> KeptWrite {
        KeptWrite {
            kind: WriteKind::Sent,
            chain: p.chain,
            chunk: p.chunk,
            offset: p.offset,
            file_offset: p.file_offset,
            len: p.len as usize,
            session,
            seq,
            version: Version::default(),
            boot_ids: Vec::new(),
        }
    }
}

/// A write that the previous client left.
pub struct LeftWrite {
    /// Its position among all writes of its kind.
    pub order: u64,
    /// What was recorded.
    pub write: KeptWrite,
    /// Its bytes; `None`: they were lost with the process, or it is a punch, which has none.
    pub bytes: Option<Buf>,
    /// The record, which lasts until the write is stable or sent.
    pub record: Box<dyn WriteRecord>,
}

/// The handover of a client, if it has one.
pub(crate) type Keep = Option<Arc<dyn Handover>>;
