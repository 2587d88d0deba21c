//! What a client leaves to the next client of the same mount, in memory that outlives the process:
//! see `docs/restart.md`.
//!
//! [`Handover`] is that memory with its tables. The client records what only it knows (numbers it
//! gave out, unreported sizes, unstable writes) before it acts on it. The owner of the client, the
//! mount, adds its handles and requests.

pub(crate) mod takeover;

use std::{
    any::Any,
    future::Future,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};

use parking_lot::Mutex;
use strake_fabric::{Buf, Endpoint, KeptAt, Pool, REGION};
use strake_proto::{
    ChainId, ChunkId, Ino, SessionId,
    data::{BootId, Version},
    layout::Piece,
};
use strake_runtime::{Record, Records, SharedMemory};

/// "strake" and the version of this layout.
const LAYOUT: u64 = u64::from_be_bytes(*b"strake\0\x05");
/// Earlier layouts, which are subsets of this one: without unanswered writes, without rounds, and
/// without lock owner numbers.
const LAYOUTS_BEFORE: [u64; 3] = [
    u64::from_be_bytes(*b"strake\0\x02"),
    u64::from_be_bytes(*b"strake\0\x03"),
    u64::from_be_bytes(*b"strake\0\x04"),
];

impl std::fmt::Debug for Handover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handover({} bytes)", self.memory.len())
    }
}

/// Words of the head, by position.
mod head {
    pub const LAYOUT: usize = 0;
    pub const UUID: usize = 1;
    pub const SESSION: usize = 3;
    pub const NEXT_MUTATION: usize = 4;
    pub const NEXT_DATA: usize = 5;
    pub const ROUND: usize = 6;
    /// Words for the owner of the client.
    pub const OWNER: usize = 16;
    pub const OWNER_WORDS: usize = 16;
    /// Which of the two texts below is valid (1 or 2), plus its length times 256. 0: none.
    pub const MDS: usize = 32;
    /// Addresses of the metadata servers, separated by commas.
    pub const MDS_TEXTS: [usize; 2] = [64, 192];
    pub const MDS_BYTES: usize = 1024;
}

const HEAD: usize = 4096;
const MOST_REQUESTS: usize = 8192;
const MOST_HANDLES: usize = 65_536;
const MOST_INODES: usize = 65_536;
const MOST_WRITES: usize = 131_072;
/// Most copies of a chunk.
const MOST_BOOT_IDS: usize = 3;
const REQUEST_WORDS: usize = 9;
const HANDLE_WORDS: usize = 6;
const INODE_WORDS: usize = 6;
const WRITE_WORDS: usize = 16 + 2 * MOST_BOOT_IDS;

const REQUESTS: usize = HEAD;
const HANDLES: usize = REQUESTS + Records::size(REQUEST_WORDS, MOST_REQUESTS);
const INODES: usize = HANDLES + Records::size(HANDLE_WORDS, MOST_HANDLES);
const WRITES: usize = INODES + Records::size(INODE_WORDS, MOST_INODES);
const BUFFERS: usize = (WRITES + Records::size(WRITE_WORDS, MOST_WRITES)).next_multiple_of(REGION);

/// Memory of one mount that outlives its daemons.
pub struct Handover {
    memory: Arc<SharedMemory>,
    pool: Pool,
    requests: Arc<Records>,
    handles: Arc<Records>,
    inodes: Arc<Records>,
    writes: Arc<Records>,
    left: Mutex<Left>,
    /// The session of the previous client, 0 without one.
    former: SessionId,
}

/// What the previous client left.
#[derive(Default)]
struct Left {
    requests: Vec<Record>,
    handles: Vec<Record>,
    inodes: Vec<Record>,
    writes: Vec<Record>,
}

impl Handover {
    /// New memory for the client `uuid`, with space for `buffers` bytes of written data.
    pub fn create(uuid: [u8; 16], buffers: usize) -> io::Result<Arc<Handover>> {
        let memory = SharedMemory::create(BUFFERS + buffers.next_multiple_of(REGION))?;
        let (high, low) = uuid.split_at(8);
        for (i, half) in [high, low].into_iter().enumerate() {
            let half: [u8; 8] = half.try_into().unwrap_or_default();
            memory.word((head::UUID + i) * 8).store(u64::from_ne_bytes(half), Relaxed);
        }
        for counter in [head::NEXT_MUTATION, head::NEXT_DATA] {
            memory.word(counter * 8).store(1, Relaxed);
        }
        memory.word(head::LAYOUT * 8).store(LAYOUT, Release);
        Handover::of(memory)
    }

    /// Opens what a previous client left. `InvalidData` when that client used an unknown layout.
    pub fn open(fd: OwnedFd) -> io::Result<Arc<Handover>> {
        Handover::of(SharedMemory::map(fd)?)
    }

    fn of(memory: Arc<SharedMemory>) -> io::Result<Arc<Handover>> {
        let layout = memory.len().ge(&(BUFFERS + REGION)).then(|| memory.word(head::LAYOUT * 8));
        let known = |l| l == LAYOUT || LAYOUTS_BEFORE.contains(&l);
        let Some(layout) = layout.filter(|l| known(l.load(Acquire))) else {
            let m = "the handover memory of this mount has the layout of another version";
            return Err(io::Error::new(io::ErrorKind::InvalidData, m));
        };
        layout.store(LAYOUT, Release);
        let open = |offset, words, count| Records::open(memory.clone(), offset, words, count);
        let (requests, left_requests) = open(REQUESTS, REQUEST_WORDS, MOST_REQUESTS);
        let (handles, left_handles) = open(HANDLES, HANDLE_WORDS, MOST_HANDLES);
        let (inodes, left_inodes) = open(INODES, INODE_WORDS, MOST_INODES);
        let (writes, left_writes) = open(WRITES, WRITE_WORDS, MOST_WRITES);
        let left = Left {
            requests: left_requests,
            handles: left_handles,
            inodes: left_inodes,
            writes: left_writes,
        };
        let pool = Pool::kept(memory.clone(), BUFFERS);
        let former = memory.word(head::SESSION * 8).load(Acquire);
        Ok(Arc::new(Handover {
            memory,
            pool,
            requests,
            handles,
            inodes,
            writes,
            left: Mutex::new(left),
            former,
        }))
    }

    /// The descriptor to pass to the next daemon.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    /// The pool in which written data must lie to outlive the process.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The client's uuid.
    pub fn uuid(&self) -> [u8; 16] {
        let half = |i: usize| self.word(head::UUID + i).load(Relaxed).to_ne_bytes();
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&half(0));
        uuid[8..].copy_from_slice(&half(1));
        uuid
    }

    fn word(&self, n: usize) -> &AtomicU64 {
        self.memory.word(n * 8)
    }

    /// A word of the head that belongs to the client's owner, 0 to 15; its initial value is 0.
    /// Panics for a larger `n`, like indexing.
    pub fn owner_word(&self, n: usize) -> &AtomicU64 {
        assert!(n < head::OWNER_WORDS, "word {n} of the owner");
        self.word(head::OWNER + n)
    }

    /// The session of the previous client, 0 if there was none.
    pub fn former_session(&self) -> SessionId {
        self.former
    }

    pub(crate) fn set_session(&self, id: SessionId) {
        self.word(head::SESSION).store(id, Release);
    }

    /// Records the metadata servers of the newest map, as many as fit: the configuration may name
    /// only servers that are gone by now.
    pub(crate) fn set_mds(&self, endpoints: &[Endpoint]) {
        let mut text = String::new();
        for e in endpoints.iter().map(Endpoint::to_string) {
            if text.len() + 1 + e.len() > head::MDS_BYTES {
                break;
            }
            if !text.is_empty() {
                text.push(',');
            }
            text.push_str(&e);
        }
        if text == self.mds_text() {
            return;
        }
        // A process killed in the middle of this leaves the other text valid.
        let other = usize::from(self.word(head::MDS).load(Relaxed) & 0xff == 1);
        for (i, bytes) in text.as_bytes().chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            self.word(head::MDS_TEXTS[other] + i).store(u64::from_le_bytes(word), Relaxed);
        }
        self.word(head::MDS).store((text.len() as u64) << 8 | (other as u64 + 1), Release);
    }

    /// The metadata servers that were last recorded; none at first.
    pub(crate) fn mds(&self) -> Vec<Endpoint> {
        self.mds_text().split(',').filter_map(|e| e.parse().ok()).collect()
    }

    fn mds_text(&self) -> String {
        let selector = self.word(head::MDS).load(Acquire);
        let Some(at) =
            (selector & 0xff).checked_sub(1).and_then(|i| head::MDS_TEXTS.get(i as usize))
        else {
            return String::new();
        };
        let len = ((selector >> 8) as usize).min(head::MDS_BYTES);
        let words =
            (0..len.div_ceil(8)).flat_map(|i| self.word(at + i).load(Relaxed).to_le_bytes());
        String::from_utf8_lossy(&words.take(len).collect::<Vec<u8>>()).into_owned()
    }

    /// The lowest number that no metadata mutation of any session has used.
    pub(crate) fn next_mutation(&self) -> &AtomicU64 {
        self.word(head::NEXT_MUTATION)
    }

    /// Takes `n` unused numbers for data writes; returns the first.
    pub(crate) fn take_data_numbers(&self, n: u64) -> u64 {
        self.word(head::NEXT_DATA).fetch_add(n, Relaxed)
    }

    /// See [`strake_proto::data::DataRequest::round`]; shared by all sessions.
    pub(crate) fn round(&self) -> &AtomicU64 {
        self.word(head::ROUND)
    }

    /// Records an open handle's words; `None` when the table is full.
    pub fn put_handle(&self, words: &[u64]) -> Option<Record> {
        self.handles.put(words)
    }

    /// The handles that the previous client left. Returns them only once.
    pub fn left_handles(&self) -> Vec<Record> {
        std::mem::take(&mut self.left.lock().handles)
    }

    /// Records the numbers of a request about `ino`; `None` when the table is full.
    pub fn begin(&self, unique: u64, owner_word: u64, ino: Ino) -> Option<Arc<Numbers>> {
        let record = self.requests.put(&[unique, owner_word, 0, 0, 0, 0, 0, 0, ino])?;
        Some(Numbers::new(record))
    }

    /// The requests that were in progress when the previous client died. Returns them only once.
    pub fn left_requests(&self) -> Vec<Arc<Numbers>> {
        let left = std::mem::take(&mut self.left.lock().requests);
        left.into_iter().map(Numbers::new).collect()
    }

    /// The mutations of `session` that the previous client may have sent, and that were not
    /// repeated yet.
    pub(crate) fn in_doubt(&self, session: SessionId) -> Vec<u64> {
        let number = |r: &Record| {
            (r.get(number::SESSION) == session).then(|| r.get(number::MUTATION)).filter(|n| *n != 0)
        };
        self.left.lock().requests.iter().filter_map(number).collect()
    }

    pub(crate) fn put_inode(&self, ino: Ino) -> Option<KeptInode> {
        self.inodes.put(&[ino]).map(KeptInode)
    }

    pub(crate) fn left_inodes(&self) -> Vec<KeptInode> {
        std::mem::take(&mut self.left.lock().inodes).into_iter().map(KeptInode).collect()
    }

    /// `order`: the position among all unstable writes.
    pub(crate) fn put_write(&self, order: u64, w: &KeptWrite) -> Option<Record> {
        self.writes.put(&w.words(order))
    }

    /// The writes that the previous client left, in their order.
    pub(crate) fn left_writes(&self) -> Vec<(u64, KeptWrite, Record)> {
        let mut left = std::mem::take(&mut self.left.lock().writes);
        left.sort_by_key(|r| r.get(0));
        left.into_iter().map(|r| (r.get(0), KeptWrite::read(&r), r)).collect()
    }
}

/// The numbers that one request of the mount's kernel uses. A repetition of the request uses the
/// same numbers, so that its effect does not happen twice.
pub struct Numbers {
    record: Record,
    /// Bit 0: the mutation's number was used by this process. Bit 1: the data's number. Bit 2: the
    /// append's offset.
    used: AtomicU64,
    /// Dropped together with the request's numbers.
    awaited: Mutex<Option<Box<dyn Any + Send + Sync>>>,
}

mod number {
    pub const UNIQUE: usize = 0;
    pub const OWNER: usize = 1;
    pub const SESSION: usize = 2;
    pub const MUTATION: usize = 3;
    pub const DATA_SESSION: usize = 4;
    pub const DATA: usize = 5;
    /// The append's offset plus one, in the session of the data's numbers; 0 for none.
    pub const APPEND: usize = 6;
    pub const APPEND_END: usize = 7;
    pub const INO: usize = 8;
}

tokio::task_local! {
    static NUMBERS: Option<Arc<Numbers>>;
}

/// Runs `work` on behalf of a request with these numbers.
pub fn numbered<F: Future>(
    numbers: Option<Arc<Numbers>>,
    work: F,
) -> impl Future<Output = F::Output> {
    NUMBERS.scope(numbers, work)
}

/// The numbers of the request that this task works for.
pub(crate) fn numbers() -> Option<Arc<Numbers>> {
    NUMBERS.try_with(Option::clone).ok().flatten()
}

impl Numbers {
    fn new(record: Record) -> Arc<Numbers> {
        Arc::new(Numbers { record, used: AtomicU64::new(0), awaited: Mutex::default() })
    }

    /// The kernel's number of the request.
    pub fn unique(&self) -> u64 {
        self.record.get(number::UNIQUE)
    }

    /// The `owner_word` that was given to [`Handover::begin`].
    pub fn owner_word(&self) -> u64 {
        self.record.get(number::OWNER)
    }

    /// What the previous client was about to append, and the inode.
    pub(crate) fn appended(&self) -> Option<(Ino, Appended)> {
        let get = |word| self.record.get(word);
        let (next, end, session) =
            (get(number::APPEND), get(number::APPEND_END), get(number::DATA_SESSION));
        (next != 0).then(|| (get(number::INO), Appended { offset: next - 1, end, session }))
    }

    /// As [`Numbers::appended`], for the task that repeats the append: only once.
    pub(crate) fn append_again(&self) -> Option<Appended> {
        self.first_use(4).then(|| self.appended()).flatten().map(|(_, a)| a)
    }

    /// Keeps `append` until the request is answered or given up, so that its append is awaited.
    pub(crate) fn await_append(&self, append: impl Any + Send + Sync) {
        *self.awaited.lock() = Some(Box::new(append));
    }

    /// Whether other work waits for the append of this request.
    pub fn is_awaited(&self) -> bool {
        self.awaited.lock().is_some()
    }

    fn first_use(&self, bit: u64) -> bool {
        self.used.fetch_or(bit, Relaxed) & bit == 0
    }

    /// The session and number of the request's mutation that the previous client may have sent.
    /// `None`: it sent none, or this client has used it already.
    pub(crate) fn mutation(&self) -> Option<(SessionId, u64)> {
        let n = self.record.get(number::MUTATION);
        (n != 0 && self.first_use(1)).then(|| (self.record.get(number::SESSION), n))
    }

    /// Records the number of a mutation that is about to be sent for the first time. Only the first
    /// mutation of a request is recorded: it is the one that must not run twice.
    pub(crate) fn set_mutation(&self, session: SessionId, n: u64) {
        if self.first_use(1) {
            self.record.set(number::SESSION, session);
            self.record.set(number::MUTATION, n);
        }
    }

    /// The first number of the request's data writes in `session`: the one that the previous client
    /// used, else a new one from `take`.
    pub(crate) fn data(&self, session: SessionId, take: impl FnOnce() -> u64) -> u64 {
        if !self.first_use(2) {
            return take();
        }
        let n = self.record.get(number::DATA);
        if n != 0 && self.record.get(number::DATA_SESSION) == session {
            return n;
        }
        let n = take();
        self.record.set(number::DATA, 0);
        self.record.set(number::DATA_SESSION, session);
        self.record.set(number::DATA, n);
        n
    }

    /// Records that nothing was appended.
    pub(crate) fn clear_append(&self) {
        self.record.set(number::APPEND, 0);
    }

    /// Records that `len` bytes are about to be appended at `offset`, in this session.
    pub(crate) fn set_append(&self, session: SessionId, offset: u64, len: u64) {
        self.record.set(number::APPEND, 0);
        self.record.set(number::DATA, 0);
        self.record.set(number::DATA_SESSION, session);
        self.record.set(number::APPEND_END, offset.saturating_add(len));
        self.record.set(number::APPEND, offset.saturating_add(1));
    }
}

/// Where the previous client wrote an append, or was about to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Appended {
    pub offset: u64,
    pub end: u64,
    /// The session of the append.
    pub session: SessionId,
}

/// The record of a file that this client has open for writing. It is kept until the metadata
/// servers know that the file is no longer open for writing.
pub(crate) struct KeptInode(Record);

mod inode {
    pub const INO: usize = 0;
    pub const END: usize = 1;
    pub const FLAGS: usize = 2;
    pub const OWNER: usize = 3;
    pub const WRITER: usize = 4;
    /// Own writes are not reported yet.
    pub const DIRTY: u64 = 1;
    pub const SURPLUS: u64 = 2;
    /// An error waits to be reported.
    pub const FAILED: u64 = 4;
    /// Unreported writes may have left holes.
    pub const HOLES: u64 = 8;
    /// The lock of an append may be held.
    pub const ENDS: u64 = 16;
}

impl KeptInode {
    pub fn ino(&self) -> Ino {
        self.0.get(inode::INO)
    }

    fn flag(&self, bit: u64, on: bool) {
        let flags = self.0.get(inode::FLAGS);
        self.0.set(inode::FLAGS, if on { flags | bit } else { flags & !bit });
    }

    /// Writes of this user, which are not reported yet, extend the file to at least `end`.
    pub fn wrote(&self, end: u64, holes: bool, (uid, gid): (u32, u32)) {
        if holes {
            self.flag(inode::HOLES, true);
        }
        self.0.set(inode::END, end);
        self.0.set(inode::OWNER, u64::from(uid) << 32 | u64::from(gid));
        self.flag(inode::DIRTY, true);
    }

    pub fn reported(&self) {
        self.flag(inode::DIRTY | inode::HOLES, false);
        self.0.set(inode::END, 0);
    }

    /// The arguments of [`KeptInode::wrote`], if those writes are not reported yet.
    pub fn unreported(&self) -> Option<(u64, bool, (u32, u32))> {
        let (owner, flags) = (self.0.get(inode::OWNER), self.0.get(inode::FLAGS));
        let dirty = flags & inode::DIRTY != 0;
        dirty.then(|| {
            (
                self.0.get(inode::END),
                flags & inode::HOLES != 0,
                ((owner >> 32) as u32, owner as u32),
            )
        })
    }

    pub fn set_surplus(&self) {
        self.flag(inode::SURPLUS, true);
    }

    pub fn surplus(&self) -> bool {
        self.0.get(inode::FLAGS) & inode::SURPLUS != 0
    }

    pub fn set_failed(&self) {
        self.flag(inode::FAILED, true);
    }

    pub fn failed(&self) -> bool {
        self.0.get(inode::FLAGS) & inode::FAILED != 0
    }

    pub fn set_ends(&self) {
        self.flag(inode::ENDS, true);
    }

    pub fn ends(&self) -> bool {
        self.0.get(inode::FLAGS) & inode::ENDS != 0
    }

    pub fn set_writer(&self, index: u64) {
        self.0.set(inode::WRITER, index);
    }

    pub fn writer(&self) -> u64 {
        self.0.get(inode::WRITER)
    }
}

/// The kind of a kept write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteKind {
    /// Answered, and not known to be stable.
    Unstable,
    /// As `Unstable`, but a punch, without bytes.
    Punch,
    /// About to be sent under its number. It may have arrived.
    Sent,
    /// Dirty data that was not sent. The record has only its offset in the file and, in place of a
    /// number, its owner.
    Held,
}

/// The record of a write.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeptWrite {
    pub chain: ChainId,
    pub chunk: ChunkId,
    pub offset: u32,
    pub file_offset: u64,
    pub session: SessionId,
    pub seq: u64,
    pub version: Version,
    pub boot_ids: Vec<BootId>,
    pub len: usize,
    /// `None`: the bytes are not kept, or it is a punch, which has none.
    pub at: Option<KeptAt>,
    pub kind: WriteKind,
}

/// Position of the length among a write's words.
const WRITE_LEN: usize = 11;
/// Position of the kind.
const WRITE_KIND: usize = 15;

impl KeptWrite {
    /// A write that is not sent yet: `bytes`, which must lie in kept memory, at offset `at` of the
    /// file, by `owner` (uid and gid).
    pub fn held(
        ino: Ino,
        session: SessionId,
        at: u64,
        bytes: &Buf,
        owner: (u32, u32),
    ) -> Option<KeptWrite> {
        Some(KeptWrite {
            chain: 0,
            chunk: ChunkId { ino, data: 0, index: 0 },
            offset: 0,
            file_offset: at,
            session,
            seq: u64::from(owner.0) << 32 | u64::from(owner.1),
            version: Version::default(),
            boot_ids: Vec::new(),
            len: bytes.len(),
            at: Some(bytes.kept()?),
            kind: WriteKind::Held,
        })
    }

    /// A write that is about to be sent; `None` if its bytes do not outlive the process.
    pub fn sent(p: &Piece, (session, seq): (SessionId, u64), bytes: &[Buf]) -> Option<KeptWrite> {
        Some(KeptWrite {
            chain: p.chain,
            chunk: p.chunk,
            offset: p.offset,
            file_offset: p.file_offset,
            session,
            seq,
            version: Version::default(),
            boot_ids: Vec::new(),
            len: p.len as usize,
            at: Some(place_of(bytes)?),
            kind: WriteKind::Sent,
        })
    }

    /// The owner of a write that is not sent yet.
    pub fn owner(&self) -> (u32, u32) {
        ((self.seq >> 32) as u32, self.seq as u32)
    }

    fn words(&self, order: u64) -> [u64; WRITE_WORDS] {
        let mut w = [0; WRITE_WORDS];
        let place = u64::from(self.chain) << 32 | u64::from(self.offset);
        w[..9].copy_from_slice(&[
            order,
            place,
            self.chunk.ino,
            self.chunk.data,
            self.chunk.index,
            self.file_offset,
            self.session,
            self.seq,
            self.version.epoch,
        ]);
        w[9] = self.version.number;
        w[10] = self.boot_ids.len() as u64;
        w[WRITE_LEN] = self.len as u64;
        if let Some(at) = self.at {
            w[12..15].copy_from_slice(&[at.block as u64, at.capacity as u64, at.start as u64]);
        }
        w[WRITE_KIND] = self.kind as u64;
        for (i, s) in self.boot_ids.iter().take(MOST_BOOT_IDS).enumerate() {
            w[16 + 2 * i] = u64::from(s.target);
            w[17 + 2 * i] = s.number;
        }
        w
    }

    fn read(r: &Record) -> KeptWrite {
        let boot_id = |i| BootId { target: r.get(16 + 2 * i) as u32, number: r.get(17 + 2 * i) };
        let (len, capacity) = (r.get(WRITE_LEN) as usize, r.get(13) as usize);
        let at = KeptAt { block: r.get(12) as usize, capacity, start: r.get(14) as usize, len };
        KeptWrite {
            chain: (r.get(1) >> 32) as u32,
            chunk: ChunkId { ino: r.get(2), data: r.get(3), index: r.get(4) },
            offset: r.get(1) as u32,
            file_offset: r.get(5),
            session: r.get(6),
            seq: r.get(7),
            version: Version { epoch: r.get(8), number: r.get(9) },
            boot_ids: (0..(r.get(10) as usize).min(MOST_BOOT_IDS)).map(boot_id).collect(),
            len,
            kind: match r.get(WRITE_KIND) {
                0 => WriteKind::Unstable,
                2 => WriteKind::Sent,
                3 => WriteKind::Held,
                _ => WriteKind::Punch,
            },
            at: (capacity != 0 && at.start.saturating_add(len) <= capacity).then_some(at),
        }
    }

    /// Truncates the record of a write to `len` bytes.
    pub fn cut(record: &Record, len: u64) {
        record.set(WRITE_LEN, len);
    }
}

/// The place of the bytes, if they are one piece of kept memory.
pub(crate) fn place_of(data: &[Buf]) -> Option<KeptAt> {
    match data {
        [one] => one.kept(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(n: u64, at: Option<KeptAt>) -> KeptWrite {
        KeptWrite {
            chain: 7,
            chunk: ChunkId { ino: n, data: 2, index: 3 },
            offset: u32::MAX,
            file_offset: 5,
            session: 6,
            seq: 7,
            version: Version { epoch: 8, number: 9 },
            boot_ids: vec![
                BootId { target: 1, number: 2 },
                BootId { target: u32::MAX, number: u64::MAX },
            ],
            len: 100,
            at,
            kind: if n == 3 { WriteKind::Punch } else { WriteKind::Unstable },
        }
    }

    fn next_life(keep: &Handover) -> Arc<Handover> {
        Handover::open(keep.fd().try_clone_to_owned().unwrap()).unwrap()
    }

    #[test]
    fn everything_is_found_again() {
        let first = Handover::create([9; 16], 8 << 20).unwrap();
        let mut b = first.pool().get_now(5000);
        b.fill(42);
        let data = b.freeze();
        let at = place_of(&[data.slice(1000..1100)]).unwrap();
        let kept = [(8, write(1, None)), (9, write(2, Some(at))), (10, write(3, None))];
        let kept = kept.map(|(order, w)| first.put_write(order, &w).unwrap());
        KeptWrite::cut(&kept[1], 60);
        let inode = first.put_inode(77).unwrap();
        inode.wrote(1000, true, (1, 2));
        inode.wrote(1000, false, (1, 2));
        inode.set_surplus();
        let numbers = first.begin(55, 3, 77).unwrap();
        numbers.set_mutation(6, 10);
        assert_eq!(numbers.append_again(), None);
        numbers.set_append(5, 0, 9);
        numbers.set_append(6, 0, 10);
        assert_eq!(numbers.data(6, || 20), 20);
        first.set_session(6);
        // The process is killed here.
        kept.into_iter().for_each(std::mem::forget);
        std::mem::forget((inode, numbers, data));

        let second = next_life(&first);
        assert_eq!((second.uuid(), second.former_session()), ([9; 16], 6));
        assert_eq!((second.in_doubt(6), second.in_doubt(7)), (vec![10], vec![]));
        let writes = second.left_writes();
        assert_eq!((writes[0].0, &writes[0].1), (8, &write(1, None)));
        assert_eq!((writes[2].0, &writes[2].1), (10, &write(3, None)), "a punch");
        let at = writes[1].1.at.unwrap();
        assert_eq!((writes[1].1.len, at.len), (60, 60));
        let again = second.pool().take_kept(at.block, at.capacity).unwrap().freeze();
        assert!(again.slice(at.start..at.start + at.len).iter().all(|b| *b == 42));
        let inodes = second.left_inodes();
        assert_eq!(
            (inodes[0].ino(), inodes[0].unreported(), inodes[0].surplus()),
            (77, Some((1000, true, (1, 2))), true)
        );
        inodes[0].reported();
        assert_eq!(inodes[0].unreported(), None);
        inodes[0].wrote(5, false, (1, 2));
        assert_eq!(inodes[0].unreported(), Some((5, false, (1, 2))));
        let request = second.left_requests().pop().unwrap();
        let append = Appended { offset: 0, end: 10, session: 6 };
        assert_eq!(
            (request.unique(), request.owner_word(), request.appended()),
            (55, 3, Some((77, append)))
        );
        assert_eq!(request.mutation(), Some((6, 10)), "the same number");
        assert_eq!(request.mutation(), None, "once");
        assert_eq!((request.data(6, || 99), request.data(6, || 99)), (20, 99));
        assert_eq!((request.append_again(), request.append_again()), (Some(append), None));
        assert!(second.left_requests().is_empty() && second.left_writes().is_empty());
    }

    #[test]
    fn another_session_takes_other_numbers() {
        let keep = Handover::create([1; 16], 4 << 20).unwrap();
        let n = keep.begin(1, 0, 2).unwrap();
        assert_eq!(n.data(6, || 20), 20);
        std::mem::forget(n);
        let n = next_life(&keep).left_requests().pop().unwrap();
        assert_eq!((n.data(7, || 30), n.mutation()), (30, None));
    }

    #[test]
    fn another_version_is_refused() {
        let keep = Handover::create([1; 16], 4 << 20).unwrap();
        keep.word(head::LAYOUT).store(LAYOUT + 1, Relaxed);
        let again = Handover::open(keep.fd().try_clone_to_owned().unwrap());
        assert_eq!(again.err().unwrap().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn the_next_one_knows_the_newest_metadata_servers() {
        let keep = Handover::create([1; 16], 4 << 20).unwrap();
        assert_eq!(keep.mds(), []);
        let at = |host: &str, port| Endpoint::Tcp(host.into(), port);
        let (old, new) = ([at("a", 1), at("much-longer-name", 2)], [at("c", 3)]);
        keep.set_mds(&old);
        assert_eq!(next_life(&keep).mds(), old);
        keep.set_mds(&new);
        assert_eq!(next_life(&keep).mds(), new);
        // Killed while writing the next addresses: the previous ones stay valid.
        keep.word(head::MDS_TEXTS[0]).store(u64::MAX, Relaxed);
        assert_eq!(next_life(&keep).mds(), new);
        // More addresses than fit, and an invalid word.
        let many: Vec<Endpoint> = (0..200).map(|n| at(&format!("host-{n}"), 7400)).collect();
        keep.set_mds(&many);
        let kept = next_life(&keep).mds();
        assert!(kept.len() > 40 && kept[..] == many[..kept.len()], "{}", kept.len());
        keep.word(head::MDS).store(u64::MAX, Relaxed);
        assert_eq!(keep.mds(), []);
        keep.word(head::MDS).store(u64::MAX << 8 | 1, Relaxed);
        keep.mds();
    }

    #[test]
    fn a_damaged_place_has_no_bytes() {
        let keep = Handover::create([1; 16], 4 << 20).unwrap();
        let r = keep
            .put_write(
                1,
                &write(1, Some(KeptAt { block: 0, capacity: 4096, start: 4000, len: 100 })),
            )
            .unwrap();
        assert_eq!(KeptWrite::read(&r).at, None);
    }
}
