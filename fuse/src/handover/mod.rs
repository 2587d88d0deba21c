//! What a daemon leaves to the next daemon of the same mount: memory that outlives the process. See
//! `docs/restart.md`.
//!
//! [`HandoverMemory`] has a head of single words, four tables of records and space for buffers. The
//! client keeps its part there through the trait [`Handover`]; the mount adds its handles and the
//! requests of the kernel.

mod files;
mod requests;
mod writes;

use std::{
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
use strake_client::{FileRecord, Handover, KeptWrite, LeftWrite, Operation, WriteRecord};
use strake_fabric::{Buf, Endpoint, Pool, REGION};
use strake_proto::{Ino, SessionId};
use strake_runtime::{Record, Records, SharedMemory};

pub use requests::LeftRequest;

/// "strake" and the version of this layout.
const LAYOUT: u64 = u64::from_be_bytes(*b"strake\0\x05");
/// Earlier layouts, which are subsets of this one: without unanswered writes, without rounds, and
/// without lock owner numbers.
const LAYOUTS_BEFORE: [u64; 3] = [
    u64::from_be_bytes(*b"strake\0\x02"),
    u64::from_be_bytes(*b"strake\0\x03"),
    u64::from_be_bytes(*b"strake\0\x04"),
];

/// Words of the head, by position.
mod head {
    pub const LAYOUT: usize = 0;
    pub const UUID: usize = 1;
    pub const SESSION: usize = 3;
    pub const NEXT_MUTATION: usize = 4;
    pub const NEXT_DATA: usize = 5;
    pub const ROUND: usize = 6;
    /// Words for the mount.
    pub const MOUNT: usize = 16;
    pub const MOUNT_WORDS: usize = 16;
    /// Which of the two texts below is valid (1 or 2), plus its length times 256. 0: none.
    pub const MDS: usize = 32;
    /// Addresses of the metadata servers, separated by commas.
    pub const MDS_TEXTS: [usize; 2] = [64, 192];
    pub const MDS_BYTES: usize = 1024;
}

const HEAD: usize = 4096;
const MOST_REQUESTS: usize = 8192;
const MOST_HANDLES: usize = 65_536;
const MOST_FILES: usize = 65_536;
const MOST_WRITES: usize = 131_072;
const HANDLE_WORDS: usize = 6;

const REQUESTS: usize = HEAD;
const HANDLES: usize = REQUESTS + Records::size(requests::WORDS, MOST_REQUESTS);
const FILES: usize = HANDLES + Records::size(HANDLE_WORDS, MOST_HANDLES);
const WRITES: usize = FILES + Records::size(files::WORDS, MOST_FILES);
const BUFFERS: usize =
    (WRITES + Records::size(writes::WORDS, MOST_WRITES)).next_multiple_of(REGION);

/// Memory of one mount that outlives its daemons.
pub struct HandoverMemory {
    memory: Arc<SharedMemory>,
    pool: Pool,
    requests: Arc<Records>,
    handles: Arc<Records>,
    files: Arc<Records>,
    writes: Arc<Records>,
    left: Mutex<Left>,
    /// The session of the previous client, 0 without one.
    former: SessionId,
}

/// What the previous daemon left.
#[derive(Default)]
struct Left {
    requests: Vec<Record>,
    handles: Vec<Record>,
    files: Vec<Record>,
    writes: Vec<Record>,
}

impl std::fmt::Debug for HandoverMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HandoverMemory({} bytes)", self.memory.len())
    }
}

impl HandoverMemory {
    /// New memory for clients with this uuid, with space for `buffers` bytes of written data.
    pub fn create(uuid: [u8; 16], buffers: usize) -> io::Result<Arc<HandoverMemory>> {
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
        HandoverMemory::of(memory)
    }

    /// Opens what a previous daemon left. `InvalidData` when that daemon used an unknown layout.
    pub fn open(fd: OwnedFd) -> io::Result<Arc<HandoverMemory>> {
        HandoverMemory::of(SharedMemory::map(fd)?)
    }

    fn of(memory: Arc<SharedMemory>) -> io::Result<Arc<HandoverMemory>> {
        let layout = memory.len().ge(&(BUFFERS + REGION)).then(|| memory.word(head::LAYOUT * 8));
        let known = |l| l == LAYOUT || LAYOUTS_BEFORE.contains(&l);
        let Some(layout) = layout.filter(|l| known(l.load(Acquire))) else {
            let m = "the kept memory of this mount has the layout of another version";
            return Err(io::Error::new(io::ErrorKind::InvalidData, m));
        };
        layout.store(LAYOUT, Release);
        let open = |offset, words, count| Records::open(memory.clone(), offset, words, count);
        let (requests, left_requests) = open(REQUESTS, requests::WORDS, MOST_REQUESTS);
        let (handles, left_handles) = open(HANDLES, HANDLE_WORDS, MOST_HANDLES);
        let (files, left_files) = open(FILES, files::WORDS, MOST_FILES);
        let (writes, left_writes) = open(WRITES, writes::WORDS, MOST_WRITES);
        let left = Left {
            requests: left_requests,
            handles: left_handles,
            files: left_files,
            writes: left_writes,
        };
        let pool = Pool::kept(memory.clone(), BUFFERS);
        let former = memory.word(head::SESSION * 8).load(Acquire);
        Ok(Arc::new(HandoverMemory {
            memory,
            pool,
            requests,
            handles,
            files,
            writes,
            left: Mutex::new(left),
            former,
        }))
    }

    /// The descriptor to pass to the next daemon.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }

    fn word(&self, n: usize) -> &AtomicU64 {
        self.memory.word(n * 8)
    }

    /// A word of the head for the mount itself, 0 to 15; its initial value is 0. Panics for a
    /// larger `n`, like indexing.
    pub fn mount_word(&self, n: usize) -> &AtomicU64 {
        assert!(n < head::MOUNT_WORDS, "word {n} of the mount");
        self.word(head::MOUNT + n)
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

    /// Records an open handle's words; `None` when the table is full.
    pub fn put_handle(&self, words: &[u64]) -> Option<Record> {
        self.handles.put(words)
    }

    /// The handles that the previous daemon left. Returns them only once.
    pub fn left_handles(&self) -> Vec<Record> {
        std::mem::take(&mut self.left.lock().handles)
    }

    /// Records a request about `ino`, which has this number and came over this channel of the
    /// kernel. `None` when the table is full.
    pub fn begin(&self, unique: u64, channel: u64, ino: Ino) -> Option<Operation> {
        let record = self.requests.put(&requests::words(unique, channel, ino))?;
        Some(requests::operation(record))
    }

    /// The requests that were in progress when the previous daemon died. Returns them only once.
    pub fn left_requests(&self) -> Vec<LeftRequest> {
        let left = std::mem::take(&mut self.left.lock().requests);
        left.into_iter().map(LeftRequest::of).collect()
    }
}

impl Handover for HandoverMemory {
    fn uuid(&self) -> [u8; 16] {
        let half = |i: usize| self.word(head::UUID + i).load(Relaxed).to_ne_bytes();
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&half(0));
        uuid[8..].copy_from_slice(&half(1));
        uuid
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn former_session(&self) -> SessionId {
        self.former
    }

    fn set_session(&self, id: SessionId) {
        self.word(head::SESSION).store(id, Release);
    }

    fn mds(&self) -> Vec<Endpoint> {
        self.mds_text().split(',').filter_map(|e| e.parse().ok()).collect()
    }

    fn set_mds(&self, endpoints: &[Endpoint]) {
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

    fn next_mutation(&self) -> u64 {
        self.word(head::NEXT_MUTATION).load(Relaxed)
    }

    fn set_next_mutation(&self, next: u64) {
        self.word(head::NEXT_MUTATION).store(next, Relaxed);
    }

    fn take_data_numbers(&self, n: u64) -> u64 {
        self.word(head::NEXT_DATA).fetch_add(n, Relaxed)
    }

    fn round(&self) -> &AtomicU64 {
        self.word(head::ROUND)
    }

    fn in_doubt(&self, session: SessionId) -> Vec<u64> {
        let left = self.left.lock();
        let mutations = left.requests.iter().filter_map(requests::mutation);
        mutations.filter(|(of, _)| *of == session).map(|(_, n)| n).collect()
    }

    fn keep_file(&self, ino: Ino) -> Option<Box<dyn FileRecord>> {
        self.files.put(&[ino]).map(files::boxed)
    }

    fn left_files(&self) -> Vec<Box<dyn FileRecord>> {
        std::mem::take(&mut self.left.lock().files).into_iter().map(files::boxed).collect()
    }

    fn keep_write(
        &self,
        order: u64,
        write: &KeptWrite,
        bytes: &[Buf],
    ) -> Option<Box<dyn WriteRecord>> {
        let at = writes::place_of(bytes);
        if at.is_none() && !write.kind.is_answered() {
            return None;
        }
        self.writes.put(&writes::words(order, write, at)).map(writes::boxed)
    }

    fn left_writes(&self) -> Vec<LeftWrite> {
        writes::left(std::mem::take(&mut self.left.lock().writes), &self.pool)
    }
}

#[cfg(test)]
mod tests;
