//! Formatting a target, and opening one: its identity, and which blocks are free.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
};

use parking_lot::Mutex;
use strake_fabric::{Buf, Pool};
use strake_proto::{ChainId, Code, Error, Result};
use strake_store::{Batch, MetaStore};

use super::{
    alloc::{Allocator, Extent, coalesce},
    api::Engine,
    chunk::Key,
    folder::Folder,
    grants::Grants,
    notes::TargetNotes,
    options::Options,
    overlay::Overlay,
    record::{
        HEADER_PREFIX, HOLE, Header, SEGMENT_PREFIX, Segment, TABLE_DIGEST_KEY, TARGET_KEY,
        decode_target, encode_target, parse_header_key, parse_segment_key,
    },
    reserve::Reserve,
    shared::{Counters, InFlush, Shared, State},
    superblock::{DATA_START, Superblock, TargetIdentity},
    table_digest::{Mark, TableDigest},
    used::Used,
};
use crate::device::{BLOCK, Device};

/// Bytes of zeros that holes are read from.
const ZEROS: usize = 1 << 20;
/// Fewest data blocks of a target.
const MIN_DATA_BLOCKS: u64 = 256;

impl Engine {
    /// Makes an empty target. Everything the store held is deleted. `Inval` for a device of less
    /// than 2 MiB.
    pub async fn format(
        device: &dyn Device,
        table: &dyn MetaStore,
        id: TargetIdentity,
    ) -> Result<()> {
        let blocks = device.capacity() / BLOCK;
        if blocks < DATA_START + MIN_DATA_BLOCKS {
            let least = (DATA_START + MIN_DATA_BLOCKS) * BLOCK;
            let m = format!(
                "{} has {} bytes; a target needs {least}",
                device.name(),
                device.capacity()
            );
            return Err(Error::new(Code::Inval, m));
        }
        empty_table(table, &id.target_uuid, 0)?;
        // Write both copies, so that one of an earlier target cannot win.
        let pool = Pool::default();
        Mark::format(device, &pool, id.target_uuid).await?;
        for sequence in 1..=2 {
            Superblock { sequence, blocks, identity: id.clone() }.write(device, &pool).await?;
        }
        Ok(())
    }

    /// Opens a formatted target: reads the whole table once. `Corrupt` if device and table do not
    /// belong together, the table lost synced changes, or two chunks claim one block. A damaged
    /// record affects only its own chunk.
    pub async fn open(
        device: Arc<dyn Device>,
        table: Arc<dyn MetaStore>,
        pool: Pool,
        options: Options,
    ) -> Result<Arc<Engine>> {
        Engine::open_locked(device, table, pool, options, None).await
    }

    pub(super) async fn open_locked(
        device: Arc<dyn Device>,
        table: Arc<dyn MetaStore>,
        pool: Pool,
        options: Options,
        folder: Option<Folder>,
    ) -> Result<Arc<Engine>> {
        let superblock = Superblock::read(&*device, &pool).await?;
        check_table(&*table, &superblock, &device.name())?;
        let capacity = superblock.blocks - DATA_START;
        let counters = Counters::default();
        let mark = Mark::read(&*device, &pool, superblock.identity.target_uuid).await;
        let target_uuid = superblock.identity.target_uuid;
        let mut found = TableDigest::default();
        let (chunks, has) = count_chunks(&*table, &counters, &mut found)?;
        let Space { alloc, lost, stored } =
            rebuild(&*table, superblock.blocks, &counters, &mut found)
                .map_err(|e| e.context(device.name()))?;
        found.unsure = counters.damaged.load(Ordering::Relaxed) > 0;
        let digest = check_digest(&*table, found, mark).map_err(|e| e.context(device.name()))?;
        let state = State {
            headers: Overlay::new(options.cached_records),
            segments: Overlay::new(options.cached_records),
            alloc,
            grants: Grants::default(),
            replacing: 0,
            lost,
            staging: Default::default(),
            freed: Vec::new(),
            reclaim: Default::default(),
            epoch: 0,
            readers: Default::default(),
            committed: 0,
            flushed: 0,
            dirty_bytes: 0,
            in_flush: InFlush::default(),
            chunks,
            stored,
            digest,
            failed: None,
        };
        let shared = Shared {
            reserve: Reserve::of(capacity),
            capacity,
            identity: Mutex::new(superblock.identity.clone()),
            superblock: tokio::sync::Mutex::new(superblock),
            notes: TargetNotes::open(table.clone(), device.clone(), options.offload_store)?,
            state: Mutex::new(state),
            gate: Default::default(),
            overwriters: Default::default(),
            overwriter: Default::default(),
            reader_done: Default::default(),
            counters,
            zeros: Buf::copy_from(&vec![0; ZEROS]),
            device,
            table,
            pool,
            options,
            used: folder.as_ref().map(|f| Used::open(&f.path, target_uuid, &has)).transpose()?,
            folder,
        };
        Ok(Arc::new(Engine { shared: Arc::new(shared) }))
    }
}

/// Makes `table` the table of a target that holds nothing and whose device has recorded `flushes`
/// flushes. Deletes everything it held.
pub(super) fn empty_table(
    table: &dyn MetaStore,
    target_uuid: &[u8; 16],
    flushes: u64,
) -> Result<()> {
    table.clear()?;
    let mut batch = Batch::default();
    batch.put(TARGET_KEY, encode_target(target_uuid));
    batch.put(TABLE_DIGEST_KEY, TableDigest { flushes, ..TableDigest::default() }.encode());
    table.commit(batch)?;
    table.sync()
}

/// Whether the table belongs to another target: then it is in the wrong place, not damaged.
pub(super) fn is_of_another(table: &dyn MetaStore, target_uuid: &[u8; 16]) -> bool {
    let owner = table.get(TARGET_KEY).ok().flatten().and_then(|record| decode_target(&record).ok());
    owner.is_some_and(|uuid| uuid != *target_uuid)
}

fn check_table(table: &dyn MetaStore, superblock: &Superblock, device: &str) -> Result<()> {
    let record = table.get(TARGET_KEY)?.ok_or_else(|| {
        let m = format!("{device}: its chunk table is empty; restore the table or format the target and resync it");
        Error::new(Code::Corrupt, m)
    })?;
    if decode_target(&record)? != superblock.identity.target_uuid {
        let m = format!(
            "{device}: the chunk table belongs to another target; put back the one it was formatted with"
        );
        return Err(Error::new(Code::Corrupt, m));
    }
    Ok(())
}

/// The digest to continue from. `found`: digest of the records in the table; `mark`: how many
/// flushes the device has recorded.
fn check_digest(table: &dyn MetaStore, found: TableDigest, mark: u64) -> Result<TableDigest> {
    let lost = |what: String| {
        let m = format!(
            "the chunk table lost changes that were synced ({what}); remove the target from the \
             configuration; its replicas serve without it; create a new one in another folder \
             (docs/operations.md, \"A target that is refused\")"
        );
        Err(Error::new(Code::Corrupt, m))
    };
    let stored = match table.get(TABLE_DIGEST_KEY)? {
        Some(value) => TableDigest::decode(&value)?,
        // Made by a version without the digest, and never flushed since.
        None if mark == 0 => return Ok(found),
        None => return lost(format!("its digest, while the device knows of {mark} flushes")),
    };
    if stored.flushes < mark {
        return lost(format!(
            "it is as of flush {}, but the device knows of {mark}",
            stored.flushes
        ));
    }
    if !stored.fits(&found) {
        let (want, have) = (stored.records, found.records);
        return lost(format!("its {have} records are not the {want} of flush {}", stored.flushes));
    }
    Ok(TableDigest { flushes: stored.flushes, ..found })
}

/// The number of chunks, and the chains that have any record.
fn count_chunks(
    table: &dyn MetaStore,
    counters: &Counters,
    found: &mut TableDigest,
) -> Result<(u64, BTreeSet<ChainId>)> {
    let (mut live, mut chains) = (0, BTreeSet::new());
    for pair in table.prefix(&[HEADER_PREFIX]) {
        let (k, v) = pair?;
        found.add(&k, &v);
        chains.extend(parse_header_key(&k).map(|k| k.chain));
        match Header::decode(&k, &v) {
            Ok(h) if parse_header_key(&k).is_some() => live += u64::from(h.is_live()),
            _ => note(counters, &k),
        }
    }
    Ok((live, chains))
}

fn note(counters: &Counters, key: &[u8]) {
    counters.damaged.fetch_add(1, Ordering::Relaxed);
    let chunk = parse_header_key(key).or_else(|| parse_segment_key(key).map(|(k, _)| k));
    match chunk {
        Some(k) => tracing::error!("{k}: its record in the chunk table is damaged"),
        None => tracing::error!("the chunk table has an invalid key: {key:02x?}"),
    }
}

/// The use of the device's blocks, from the segment records.
struct Space {
    /// Blocks that no record names are free.
    alloc: Allocator,
    /// Segments whose records could not be read.
    lost: BTreeSet<(Key, u8)>,
    /// Blocks of each chain.
    stored: BTreeMap<ChainId, u64>,
}

fn rebuild(
    table: &dyn MetaStore,
    blocks: u64,
    counters: &Counters,
    found: &mut TableDigest,
) -> Result<Space> {
    let mut space = Space {
        alloc: Allocator::new(DATA_START, blocks),
        lost: BTreeSet::new(),
        stored: BTreeMap::new(),
    };
    for pair in table.prefix(&[SEGMENT_PREFIX]) {
        let (k, v) = pair?;
        found.add(&k, &v);
        let place = parse_segment_key(&k);
        let (Some((key, _)), Ok(segment)) = (place, Segment::decode(&k, &v)) else {
            note(counters, &k);
            space.lost.extend(place);
            continue;
        };
        for e in extents(&segment) {
            if !space.alloc.take(e) {
                return Err(conflict(table, blocks, key, e));
            }
            *space.stored.entry(key.chain).or_default() += e.count;
        }
    }
    Ok(space)
}

fn extents(s: &Segment) -> Vec<Extent> {
    coalesce(
        s.blocks.iter().filter(|b| **b != HOLE).map(|b| Extent { start: *b, count: 1 }).collect(),
    )
}

/// Finds the other record that claims a block, for the error message.
fn conflict(table: &dyn MetaStore, blocks: u64, key: Key, e: Extent) -> Error {
    let end = e.start.saturating_add(e.count);
    if e.start < DATA_START || end > blocks {
        let m =
            format!("{key} names device blocks {}+{} of {DATA_START}..{blocks}", e.start, e.count);
        return Error::new(Code::Corrupt, m);
    }
    let other = table.prefix(&[SEGMENT_PREFIX]).filter_map(Result::ok).find_map(|(k, v)| {
        let (other, _) = parse_segment_key(&k)?;
        let s = Segment::decode(&k, &v).ok()?;
        s.blocks.iter().any(|b| (e.start..end).contains(b)).then_some(other)
    });
    let other = other.map_or_else(|| "itself".into(), |k| k.to_string());
    let m = format!(
        "{key} and {other} both name device blocks {}+{}; format the target and resync it",
        e.start, e.count
    );
    Error::new(Code::Corrupt, m)
}
