//! The records of writes that are not stable, or not sent.

use std::collections::BTreeMap;

use strake_client::{KeptWrite, LeftWrite, WriteKind, WriteRecord};
use strake_fabric::{Buf, KeptAt, Pool};
use strake_proto::{
    ChunkId,
    data::{BootId, Version},
};
use strake_runtime::Record;

/// Most copies of a chunk.
const MOST_BOOT_IDS: usize = 3;

/// Words of a write's record.
mod word {
    pub const ORDER: usize = 0;
    /// The chain, and the offset in the chunk.
    pub const PLACE: usize = 1;
    pub const INO: usize = 2;
    pub const DATA_ID: usize = 3;
    pub const INDEX: usize = 4;
    pub const FILE_OFFSET: usize = 5;
    pub const SESSION: usize = 6;
    /// The number; for dirty data its owner's uid and gid.
    pub const SEQ: usize = 7;
    pub const EPOCH: usize = 8;
    pub const VERSION: usize = 9;
    pub const BOOT_IDS: usize = 10;
    pub const LEN: usize = 11;
    /// Where the bytes are: a block of the pool, its capacity (0: they are not kept), and the start.
    pub const BLOCK: usize = 12;
    pub const CAPACITY: usize = 13;
    pub const START: usize = 14;
    pub const KIND: usize = 15;
    /// The first of two words for each copy: target and number.
    pub const FIRST_BOOT_ID: usize = 16;
}

/// Values of the word `KIND`. Every other one is a punch.
mod kind {
    pub const UNSTABLE: u64 = 0;
    pub const PUNCH: u64 = 1;
    pub const SENT: u64 = 2;
    pub const HELD: u64 = 3;
}

/// Words of a record.
pub(super) const WORDS: usize = word::FIRST_BOOT_ID + 2 * MOST_BOOT_IDS;

pub(super) fn boxed(record: Record) -> Box<dyn WriteRecord> {
    Box::new(Write(record))
}

struct Write(Record);

impl WriteRecord for Write {
    fn cut(&self, len: u64) {
        self.0.set(word::LEN, len);
    }
}

/// The place of the bytes, if they are one piece of kept memory.
pub(super) fn place_of(bytes: &[Buf]) -> Option<KeptAt> {
    match bytes {
        [one] => one.kept(),
        _ => None,
    }
}

/// The words of a write whose bytes are at this place.
pub(super) fn words(order: u64, write: &KeptWrite, at: Option<KeptAt>) -> [u64; WORDS] {
    let mut w = [0; WORDS];
    w[word::ORDER] = order;
    w[word::PLACE] = u64::from(write.chain) << 32 | u64::from(write.offset);
    w[word::INO] = write.chunk.ino;
    w[word::DATA_ID] = write.chunk.data;
    w[word::INDEX] = write.chunk.index;
    w[word::FILE_OFFSET] = write.file_offset;
    w[word::SESSION] = write.session;
    w[word::EPOCH] = write.version.epoch;
    w[word::VERSION] = write.version.number;
    w[word::BOOT_IDS] = write.boot_ids.len() as u64;
    w[word::LEN] = write.len as u64;
    if let Some(at) = at {
        (w[word::BLOCK], w[word::CAPACITY]) = (at.block as u64, at.capacity as u64);
        w[word::START] = at.start as u64;
    }
    (w[word::KIND], w[word::SEQ]) = match write.kind {
        WriteKind::Unstable => (kind::UNSTABLE, write.seq),
        WriteKind::Punch => (kind::PUNCH, write.seq),
        WriteKind::Sent => (kind::SENT, write.seq),
        WriteKind::Held { uid, gid } => (kind::HELD, u64::from(uid) << 32 | u64::from(gid)),
    };
    for (i, s) in write.boot_ids.iter().take(MOST_BOOT_IDS).enumerate() {
        w[word::FIRST_BOOT_ID + 2 * i] = u64::from(s.target);
        w[word::FIRST_BOOT_ID + 2 * i + 1] = s.number;
    }
    w
}

fn read(r: &Record) -> (KeptWrite, Option<KeptAt>) {
    let boot_id = |i| {
        let at = word::FIRST_BOOT_ID + 2 * i;
        BootId { target: r.get(at) as u32, number: r.get(at + 1) }
    };
    let (len, seq) = (r.get(word::LEN) as usize, r.get(word::SEQ));
    let (capacity, start) = (r.get(word::CAPACITY) as usize, r.get(word::START) as usize);
    let at = KeptAt { block: r.get(word::BLOCK) as usize, capacity, start, len };
    let (kind, seq) = match r.get(word::KIND) {
        kind::UNSTABLE => (WriteKind::Unstable, seq),
        kind::SENT => (WriteKind::Sent, seq),
        kind::HELD => (WriteKind::Held { uid: (seq >> 32) as u32, gid: seq as u32 }, 0),
        _ => (WriteKind::Punch, seq),
    };
    let write = KeptWrite {
        kind,
        chain: (r.get(word::PLACE) >> 32) as u32,
        chunk: ChunkId {
            ino: r.get(word::INO),
            data: r.get(word::DATA_ID),
            index: r.get(word::INDEX),
        },
        offset: r.get(word::PLACE) as u32,
        file_offset: r.get(word::FILE_OFFSET),
        len,
        session: r.get(word::SESSION),
        seq,
        version: Version { epoch: r.get(word::EPOCH), number: r.get(word::VERSION) },
        boot_ids: (0..(r.get(word::BOOT_IDS) as usize).min(MOST_BOOT_IDS)).map(boot_id).collect(),
    };
    // A damaged place has no bytes.
    (write, (capacity != 0 && start.saturating_add(len) <= capacity).then_some(at))
}

/// The writes of these records, in their order, with their bytes.
pub(super) fn left(mut records: Vec<Record>, pool: &Pool) -> Vec<LeftWrite> {
    records.sort_by_key(|r| r.get(word::ORDER));
    let mut blocks = BTreeMap::new();
    let one = |record: Record| {
        let (write, at) = read(&record);
        let bytes = at.and_then(|at| bytes(pool, at, &mut blocks));
        LeftWrite { order: record.get(word::ORDER), write, bytes, record: boxed(record) }
    };
    records.into_iter().map(one).collect()
}

/// Bytes in kept memory. Several writes may share one block.
fn bytes(pool: &Pool, at: KeptAt, blocks: &mut BTreeMap<usize, Buf>) -> Option<Buf> {
    let block = match blocks.get(&at.block) {
        Some(b) => b.clone(),
        None => {
            let b = pool.take_kept(at.block, at.capacity)?.freeze();
            blocks.insert(at.block, b.clone());
            b
        }
    };
    let end = at.start.checked_add(at.len)?;
    (end <= block.len()).then(|| block.slice(at.start..end))
}
