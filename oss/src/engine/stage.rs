//! From an update to staged blocks: checks, allocation, merging with old bytes, writing, and the
//! records that will name the new blocks once the update is committed.

use std::{
    ops::Range,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use futures_util::future::try_join_all;
use strake_fabric::Buf;
use strake_proto::{
    Code, Error, Result, SessionId,
    checksum::{self, BLOCK, crc32c},
    data::{KEPT_WRITERS, Version, Writer},
    layout::MAX_CHUNK,
};

use super::{
    alloc::{Extent, push_block},
    api::Engine,
    chunk::{ChunkMeta, Key, Update, damaged},
    overlay::Slot,
    read::{View, find, segments_of},
    record::{HOLE, Header, MAX_SEGS, SEG_BLOCKS, Segment},
    reserve::{Claim, Want},
    shared::{Shared, add},
    superblock::DATA_START,
};

/// A write of more buffers than this is copied into one buffer first (the kernel's limit is 1,024).
const MAX_IOVECS: usize = 512;

/// How often, and for how long each time, an update on a full device waits for readers of deleted
/// blocks, and for other overwrites to give back the blocks that they replace.
const FULL_RETRIES: usize = 4;
const OVERWRITE_RETRIES: usize = 40;
const FULL_WAIT: Duration = Duration::from_millis(50);

/// An update whose bytes are on the device but not visible yet. Dropping it frees them.
pub struct Staged {
    slot: Slotted,
    /// Blocks the update takes.
    space: Space,
    /// Of the new header; version and writers come with the commit.
    len: u32,
    tombstone: bool,
    /// Writers before this update; empty when they are replaced.
    writers: Vec<Writer>,
    was_live: bool,
    /// Segment records that change.
    segments: Vec<(u8, Slot<Segment>)>,
    /// Blocks the update no longer needs.
    freed: Vec<Extent>,
    bytes: u64,
}

impl Staged {
    /// The chunk that the update is of.
    pub fn key(&self) -> Key {
        self.slot.key
    }
    /// The chunk's length once committed.
    pub fn len(&self) -> u32 {
        self.len
    }
    /// Whether the chunk has no bytes once committed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The right to update a chunk: at most one update of a chunk is staged at a time.
struct Slotted {
    shared: Arc<Shared>,
    key: Key,
}

impl Drop for Slotted {
    fn drop(&mut self) {
        self.shared.state.lock().staging.remove(&self.key);
    }
}

/// Allocated blocks that no record names yet.
struct Space {
    shared: Arc<Shared>,
    extents: Vec<Extent>,
    /// Blocks that this update gives back once it is committed and flushed.
    replaces: u64,
    /// The session whose grant they came from, and how many of them.
    granted: Option<(SessionId, u64)>,
    /// A write may still change the blocks. If dropped then, they wait for a flush, which waits for
    /// the write.
    in_flight: bool,
}

impl Space {
    /// Adds blocks that were allocated for another part of the same update.
    fn join(&mut self, mut other: Space) {
        self.extents.append(&mut other.extents);
        self.replaces += std::mem::take(&mut other.replaces);
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        if self.extents.is_empty() && self.replaces == 0 {
            return;
        }
        // A flush will give back the replaced blocks; an overwrite may be waiting for them.
        if self.replaces > 0 && self.shared.overwriters.load(Relaxed) > 0 {
            self.shared.reader_done.notify_waiters();
        }
        let mut s = self.shared.state.lock();
        s.replacing -= self.replaces;
        if let Some((session, blocks)) = self.granted {
            s.grants.give_back(session, blocks);
        }
        if self.in_flight {
            s.freed.append(&mut self.extents);
        } else {
            for e in self.extents.drain(..) {
                s.give_back(e);
            }
        }
    }
}

/// A place in the queue of overwrites that wait for blocks which other overwrites replace.
struct Overwriter<'a> {
    shared: &'a Shared,
    turn: Option<tokio::sync::MutexGuard<'a, ()>>,
}

impl<'a> Overwriter<'a> {
    /// Returns when it is first in the queue.
    async fn queue(shared: &'a Shared) -> Overwriter<'a> {
        shared.overwriters.fetch_add(1, Relaxed);
        let mut me = Overwriter { shared, turn: None };
        me.turn = Some(shared.overwriter.lock().await);
        me
    }
}

impl Drop for Overwriter<'_> {
    fn drop(&mut self) {
        self.turn = None;
        self.shared.overwriters.fetch_sub(1, Relaxed);
    }
}

/// Whole blocks to be written, from block `first` of the chunk on.
struct Image {
    first: usize,
    data: Vec<Buf>,
    sums: Vec<u32>,
}

/// The new contents of a chunk, see [`Update::Replace`].
#[derive(Default)]
struct Whole {
    data: Vec<Buf>,
    sums: Vec<u32>,
    tombstone: bool,
    damaged: Vec<Range<u32>>,
}

/// Consecutive segment records being rewritten, and the blocks that frees.
#[derive(Default)]
struct Rewrite {
    segments: Vec<(u8, Segment)>,
    freed: Vec<Extent>,
}

impl Rewrite {
    fn new(segments: &[(u8, Slot<Segment>)]) -> Rewrite {
        let own = |s: &Slot<Segment>| s.as_ref().map_or_else(Segment::empty, |s| (**s).clone());
        Rewrite {
            segments: segments.iter().map(|(n, s)| (*n, own(s))).collect(),
            freed: Vec::new(),
        }
    }

    fn set(&mut self, at: usize, block: u64, sum: u32) {
        let first = self.segments.first().map_or(0, |(n, _)| usize::from(*n));
        let index = (at / SEG_BLOCKS).wrapping_sub(first);
        let Some((_, s)) = self.segments.get_mut(index) else { return };
        let old = std::mem::replace(&mut s.blocks[at % SEG_BLOCKS], block);
        s.sums[at % SEG_BLOCKS] = sum;
        if old != HOLE {
            push_block(&mut self.freed, old);
        }
    }

    /// How many of these blocks are stored, not holes.
    fn stored(&self, blocks: Range<usize>) -> u64 {
        let first = self.segments.first().map_or(0, |(n, _)| usize::from(*n));
        let at = |b: usize| {
            self.segments
                .get((b / SEG_BLOCKS).wrapping_sub(first))
                .map(|(_, s)| s.blocks[b % SEG_BLOCKS])
        };
        blocks.filter(|b| at(*b).is_some_and(|block| block != HOLE)).count() as u64
    }

    /// Makes everything a hole.
    fn clear(&mut self) {
        for (_, s) in &mut self.segments {
            s.blocks.iter().filter(|b| **b != HOLE).for_each(|b| push_block(&mut self.freed, *b));
            *s = Segment::empty();
        }
    }
}

/// The chunk before the update: its header and the affected segments.
#[derive(Default)]
struct Old {
    header: Slot<Header>,
    segments: Vec<(u8, Slot<Segment>)>,
}

fn total(data: &[Buf]) -> usize {
    data.iter().map(Buf::len).sum()
}

fn check_data(offset: u32, data: &[Buf], sums: &[u32]) -> Result<()> {
    if u64::from(offset) + total(data) as u64 > MAX_CHUNK {
        let m = format!(
            "{} bytes at {offset} reach beyond the largest chunk, {MAX_CHUNK} bytes",
            total(data)
        );
        return Err(Error::new(Code::Inval, m));
    }
    match checksum::verify(u64::from(offset), data.iter().map(|b| &b[..]), sums) {
        None => Ok(()),
        Some(i) => {
            let m = format!(
                "block {i} of an update does not match its checksum; send it again from a private copy"
            );
            Err(Error::new(Code::Resend, m))
        }
    }
}

impl Engine {
    /// Checks an update (`Resend`: bytes do not match their sums), allocates space for it (`NoSpc`)
    /// and writes its bytes where no reader sees them. Waits for a flush when too much is
    /// unflushed. `Busy`: the chunk already has a staged update.
    pub async fn stage(&self, key: Key, update: Update) -> Result<Staged> {
        self.stage_of(key, update, None).await
    }

    /// As [`Engine::stage`]; `granted`: the session whose grant a write may use.
    pub async fn stage_of(
        &self,
        key: Key,
        update: Update,
        granted: Option<SessionId>,
    ) -> Result<Staged> {
        match &update {
            Update::Write { offset, data, sums } => check_data(*offset, data, sums)?,
            Update::Replace { data, tombstone: true, .. } if !data.is_empty() => {
                return Err(Error::new(Code::Inval, "a tombstone has no bytes"));
            }
            Update::Rewrite { data, sums } | Update::Replace { data, sums, .. } => {
                check_data(0, data, sums)?
            }
            Update::Punch { .. } | Update::Truncate { .. } | Update::Remove => {}
        }
        self.shared.throttle().await?;
        let slot = Slotted::take(&self.shared, key)?;
        match update {
            Update::Write { offset, data, sums } => {
                let claim = Claim::Data(granted);
                slot.stage_write(offset, data, sums, claim).await
            }
            Update::Punch { offset, len } => slot.stage_punch(offset, len).await,
            Update::Truncate { len } => slot.stage_truncate(len).await,
            Update::Remove => {
                slot.stage_whole(Whole { tombstone: true, ..Whole::default() }, true).await
            }
            Update::Rewrite { data, sums } => {
                slot.stage_whole(Whole { data, sums, ..Whole::default() }, true).await
            }
            Update::Replace { data, sums, tombstone, damaged } => {
                slot.stage_whole(Whole { data, sums, tombstone, damaged }, false).await
            }
        }
    }

    /// Makes a staged update visible at once; durable at the next flush. [`Update::Replace`] sets
    /// the chunk's list of writers, all others append `writers` to it. The last [`KEPT_WRITERS`]
    /// stay.
    pub fn commit(
        &self,
        mut staged: Staged,
        version: Version,
        writers: Vec<Writer>,
    ) -> Result<ChunkMeta> {
        let mut list = std::mem::take(&mut staged.writers);
        list.extend(writers);
        list.drain(..list.len().saturating_sub(KEPT_WRITERS));
        let meta =
            ChunkMeta { version, len: staged.len, tombstone: staged.tombstone, writers: list };
        self.make_visible(staged, Some(Arc::new(Header::new(meta.clone()))))?;
        Ok(meta)
    }

    /// Makes a staged removal visible without a tombstone, as if the chunk had never existed;
    /// durable at the next flush.
    pub fn forget(&self, staged: Staged) -> Result<()> {
        self.make_visible(staged, None)
    }

    fn make_visible(&self, mut staged: Staged, header: Slot<Header>) -> Result<()> {
        let key = staged.slot.key;
        debug_assert!(!staged.tombstone || staged.len == 0, "{key}: a tombstone has no bytes");
        debug_assert!(
            staged.freed.iter().all(|old| staged
                .space
                .extents
                .iter()
                .all(|new| !old.overlaps(new))),
            "{key}: an update was written over blocks that it replaces"
        );
        let mut s = self.shared.state.lock();
        s.check()?;
        assert!(s.staging.contains(&key), "{key}: an update is made visible that is not staged");
        s.chunks = s.chunks + u64::from(!staged.tombstone) - u64::from(staged.was_live);
        s.headers.put(key, header);
        for (n, segment) in staged.segments.drain(..) {
            s.segments.put((key, n), segment);
            s.lost.remove(&(key, n));
        }
        s.note_stored(
            key.chain,
            staged.bytes / BLOCK as u64,
            staged.freed.iter().map(|e| e.count).sum(),
        );
        s.freed.append(&mut staged.freed);
        s.dirty_bytes += staged.bytes;
        s.committed += 1;
        debug_assert!(s.flushed < s.committed);
        // The records own the blocks now. The flush gives back the replaced ones.
        staged.space.extents.clear();
        Ok(())
    }
}

impl Slotted {
    /// `Busy`: the chunk has a staged update already.
    fn take(shared: &Arc<Shared>, key: Key) -> Result<Slotted> {
        if let Some(used) = &shared.used {
            used.note(key.chain).map_err(|e| Error::from(e).context("recording a new chain"))?;
        }
        let mut s = shared.state.lock();
        s.check()?;
        if !s.staging.insert(key) {
            return Err(Error::new(Code::Busy, format!("{key}: an update is staged already")));
        }
        Ok(Slotted { shared: shared.clone(), key })
    }

    async fn stage_write(
        self,
        offset: u32,
        data: Vec<Buf>,
        sums: Vec<u32>,
        claim: Claim,
    ) -> Result<Staged> {
        let bytes = total(&data);
        let end = offset + bytes as u32;
        let old = self.look(|_| segments_of(offset, end))?.whole(&self.key)?;
        let mut rewrite = Rewrite::new(&old.segments);
        let mut space = self.no_space();
        let mut len = old.len();
        if bytes > 0 {
            let image = self.shared.image(&self.key, &old, offset, data, sums).await?;
            let replaced = rewrite.stored(image.first..image.first + image.sums.len());
            space = self.write(&image, claim, replaced).await?;
            rewrite.place(&image, &space.extents);
            len = len.max(end);
        }
        Ok(self.staged(&old, len, false, rewrite, space))
    }

    /// Bytes after a chunk's end are zeros in its last block, so that extending the chunk later
    /// need not look at them. So a truncation inside a block writes that block anew; it may take
    /// that one block from the reserve.
    async fn stage_truncate(self, len: u32) -> Result<Staged> {
        let old =
            self.look(|h| h.map_or(0..0, |h| segments_of(len, h.meta.len)))?.whole(&self.key)?;
        let tombstone = old.header.as_ref().is_some_and(|h| h.meta.tombstone);
        let mut rewrite = Rewrite::new(&old.segments);
        let mut space = self.no_space();
        if old.len() <= len {
            return Ok(self.staged(&old, old.len(), tombstone, rewrite, space));
        }
        for at in (len as usize).div_ceil(BLOCK)..(old.len() as usize).div_ceil(BLOCK) {
            rewrite.set(at, HOLE, 0);
        }
        let (at, kept) = (len as usize / BLOCK, len as usize % BLOCK);
        if kept > 0
            && let Some(bytes) = self.shared.old_block(&self.key, &old, at).await?
        {
            let mut block = self.shared.pool.get_now(BLOCK);
            block[..kept].copy_from_slice(&bytes[..kept]);
            block[kept..].fill(0);
            let sums = vec![crc32c(&block)];
            let image = Image { first: at, data: vec![block.freeze()], sums };
            space = self.write(&image, Claim::All, 1).await?;
            rewrite.place(&image, &space.extents);
        }
        Ok(self.staged(&old, len, tombstone, rewrite, space))
    }

    /// Whole blocks become holes. A block that is zeroed only in part is written anew, from the
    /// reserve if it must: punching gives space back.
    async fn stage_punch(self, offset: u32, len: u32) -> Result<Staged> {
        let end_in =
            |h: Option<&Header>| h.map_or(0, |h| h.meta.len.min(offset.saturating_add(len)));
        let old = self.look(|h| segments_of(offset, end_in(h)))?.whole(&self.key)?;
        let tombstone = old.header.as_ref().is_none_or(|h| h.meta.tombstone);
        let mut rewrite = Rewrite::new(&old.segments);
        let mut space = self.no_space();
        let (from, end) = (offset as usize, end_in(old.header.as_deref()) as usize);
        if from >= end {
            return Ok(self.staged(&old, old.len(), tombstone, rewrite, space));
        }
        // After the chunk's end the block holds zeros already.
        let to = if end == old.len() as usize { end.next_multiple_of(BLOCK) } else { end };
        for at in from.div_ceil(BLOCK)..to / BLOCK {
            rewrite.set(at, HOLE, 0);
        }
        let edges =
            [(from / BLOCK, !from.is_multiple_of(BLOCK)), (to / BLOCK, !to.is_multiple_of(BLOCK))];
        let one = edges[0].0 == edges[1].0 && edges[0].1;
        for (at, cut) in edges.into_iter().take(if one { 1 } else { 2 }) {
            if !cut {
                continue;
            }
            let Some(bytes) = self.shared.old_block(&self.key, &old, at).await? else { continue };
            let mut block = self.shared.pool.get_now(BLOCK);
            block.copy_from_slice(&bytes);
            block[from.max(at * BLOCK) - at * BLOCK..to.min((at + 1) * BLOCK) - at * BLOCK].fill(0);
            if block.iter().all(|b| *b == 0) {
                rewrite.set(at, HOLE, 0);
                continue;
            }
            let sums = vec![crc32c(&block)];
            let image = Image { first: at, data: vec![block.freeze()], sums };
            let more = self.write(&image, Claim::All, 1).await?;
            rewrite.place(&image, &more.extents);
            space.join(more);
        }
        Ok(self.staged(&old, old.len(), tombstone, rewrite, space))
    }

    /// Stages new contents for the whole chunk, or none. Damaged old records are dropped unread:
    /// when the target was opened, their blocks were not counted as used either.
    async fn stage_whole(self, whole: Whole, keep_writers: bool) -> Result<Staged> {
        let Whole { data, sums, tombstone, damaged } = whole;
        let old = self.look(|h| match h {
            Some(h) if h.damaged => 0..MAX_SEGS,
            h => segments_of(0, h.map_or(0, |h| h.meta.len)),
        })?;
        let bytes = total(&data);
        let mut rewrite = Rewrite::new(&old.segments);
        rewrite.clear();
        let mut replaced: u64 = rewrite.freed.iter().map(|e| e.count).sum();
        for n in segments_of(0, bytes as u32) {
            if !rewrite.segments.iter().any(|(have, _)| *have == n) {
                rewrite.segments.push((n, Segment::empty()));
            }
        }
        let mut space = self.no_space();
        if bytes > 0 {
            let mut image = self.shared.image(&self.key, &Old::default(), 0, data, sums).await?;
            if !damaged.is_empty() {
                image.spoil(&damaged)?;
            }
            for part in image.without_zeros(crc32c(&self.shared.zeros[..BLOCK])) {
                let of_part = replaced.min(part.sums.len() as u64);
                let more = self.write(&part, Claim::Data(None), of_part).await?;
                replaced -= of_part;
                rewrite.place(&part, &more.extents);
                space.join(more);
            }
        }
        let mut staged = self.staged(&old, bytes as u32, tombstone, rewrite, space);
        if !keep_writers {
            staged.writers.clear();
        }
        Ok(staged)
    }

    /// Allocates and writes. `replaced`: how many of the blocks replace others, which become free
    /// when the update is flushed. On failure, or if dropped halfway, the space is given back
    /// automatically.
    async fn write(&self, image: &Image, claim: Claim, replaced: u64) -> Result<Space> {
        let count = image.sums.len() as u64;
        debug_assert_eq!(total(&image.data), image.sums.len() * BLOCK, "whole blocks are written");
        let mut space = self.allocate(Want { count, replaced, claim }).await?;
        space.in_flight = true;
        let mut at = 0;
        let writes = space.extents.iter().map(|e| {
            let bufs = cut(&image.data, at..at + e.count as usize * BLOCK);
            at += e.count as usize * BLOCK;
            self.shared.device.write(e.start * BLOCK as u64, bufs)
        });
        try_join_all(writes).await.map_err(|e| e.context(self.key))?;
        space.in_flight = false;
        add(&self.shared.counters.writes, 1);
        add(&self.shared.counters.write_bytes, count * BLOCK as u64);
        Ok(space)
    }

    /// Allocates. If space is short, first waits for what deletions, other overwrites and finished
    /// readers give back.
    async fn allocate(&self, want: Want) -> Result<Space> {
        let (shared, overwrites) = (&self.shared, want.fresh() == 0);
        let alloc = || shared.alloc(want);
        // An overwrite does not pass those that wait already.
        if (!overwrites || shared.overwriters.load(Relaxed) == 0)
            && let Some(space) = alloc()
        {
            return Ok(space);
        }
        let _turn = if overwrites { Some(Overwriter::queue(shared).await) } else { None };
        for _ in 0..if overwrites { OVERWRITE_RETRIES } else { FULL_RETRIES } {
            let reader_done = self.shared.reader_done.notified();
            self.shared.flush_now().await?;
            if let Some(space) = alloc() {
                return Ok(space);
            }
            let nothing_comes = {
                let s = self.shared.state.lock();
                s.reclaim.is_empty() && (!overwrites || s.replacing == 0)
            };
            if nothing_comes {
                break;
            }
            let _ = tokio::time::timeout(FULL_WAIT, reader_done).await;
        }
        Err(self.out_of_space(want.count))
    }

    fn out_of_space(&self, count: u64) -> Error {
        let (free, granted) = {
            let s = self.shared.state.lock();
            (s.alloc.free_blocks(), s.grants.total())
        };
        let kept = self.shared.reserve.total();
        let [count, free, kept, granted] = [count, free, kept, granted].map(|n| n * BLOCK as u64);
        let m = format!(
            "{}: no space for {count} bytes on {} ({free} free, {kept} of them kept for truncation and overwriting, {granted} for \
             what mounts hold back); delete files or add targets",
            self.key,
            self.shared.device.name()
        );
        Error::new(Code::NoSpc, m)
    }
}

/// A part of a list of buffers, without copying.
fn cut(data: &[Buf], range: Range<usize>) -> Vec<Buf> {
    let (mut out, mut at) = (Vec::new(), 0);
    for b in data {
        let (from, to) = (range.start.max(at), range.end.min(at + b.len()));
        if from < to {
            out.push(b.slice(from - at..to - at));
        }
        at += b.len();
    }
    out
}

impl Slotted {
    /// The current state. This value keeps other updates of the chunk away, so its blocks stay.
    fn look(&self, want: impl Fn(Option<&Header>) -> Range<u8>) -> Result<Old> {
        let View { header, segments, .. } = self.shared.view(&self.key, want)?;
        Ok(Old { header, segments })
    }

    fn no_space(&self) -> Space {
        Space {
            shared: self.shared.clone(),
            extents: Vec::new(),
            replaces: 0,
            granted: None,
            in_flight: false,
        }
    }

    fn staged(
        self,
        old: &Old,
        len: u32,
        tombstone: bool,
        rewrite: Rewrite,
        space: Space,
    ) -> Staged {
        let slot = |s: Segment| if s.is_empty() { None } else { Some(Arc::new(s)) };
        Staged {
            bytes: space.extents.iter().map(|e| e.count * BLOCK as u64).sum(),
            space,
            len,
            tombstone,
            writers: old.header.as_ref().map_or_else(Vec::new, |h| h.meta.writers.clone()),
            was_live: old.header.as_ref().is_some_and(|h| h.is_live()),
            segments: rewrite.segments.into_iter().map(|(n, s)| (n, slot(s))).collect(),
            freed: rewrite.freed,
            slot: self,
        }
    }
}

impl Old {
    fn len(&self) -> u32 {
        self.header.as_ref().map_or(0, |h| h.meta.len)
    }

    /// `Corrupt` if the header or one of the segments is damaged.
    fn whole(self, key: &Key) -> Result<Old> {
        let bad = self.header.as_ref().is_some_and(|h| h.damaged)
            || self.segments.iter().any(|(_, s)| s.as_ref().is_some_and(|s| s.damaged));
        if bad { Err(damaged(key)) } else { Ok(self) }
    }
}

impl Image {
    /// Marks these parts as damaged: gives their blocks checksums that do not match.
    fn spoil(&mut self, parts: &[Range<u32>]) -> Result<()> {
        let good = self.sums.clone();
        for part in parts {
            let blocks = part.start as usize / BLOCK..(part.end as usize).div_ceil(BLOCK);
            let (Some(good), Some(sums)) = (good.get(blocks.clone()), self.sums.get_mut(blocks))
            else {
                return Err(Error::new(
                    Code::Inval,
                    format!("bytes {part:?} are outside of the chunk"),
                ));
            };
            sums.iter_mut().zip(good).for_each(|(sum, good)| *sum = !good);
        }
        Ok(())
    }

    /// Splits off blocks of zeros, which become holes, and returns the other parts. `zero_sum` is
    /// the checksum of a block of zeros.
    fn without_zeros(self, zero_sum: u32) -> Vec<Image> {
        let blocks = self.data.iter().flat_map(|b| b.chunks(BLOCK));
        let zero = |(bytes, sum): (&[u8], &u32)| *sum == zero_sum && bytes.iter().all(|b| *b == 0);
        let zeros: Vec<bool> = blocks.zip(&self.sums).map(zero).collect();
        let (mut parts, mut at) = (Vec::new(), 0);
        for run in zeros.chunk_by(|a, b| a == b) {
            if !run[0] {
                parts.push(Image {
                    first: self.first + at,
                    data: cut(&self.data, at * BLOCK..(at + run.len()) * BLOCK),
                    sums: self.sums[at..at + run.len()].to_vec(),
                });
            }
            at += run.len();
        }
        parts
    }
}

impl Rewrite {
    /// Records where an image's blocks were written.
    fn place(&mut self, image: &Image, extents: &[Extent]) {
        debug_assert_eq!(
            extents.iter().map(|e| e.count).sum::<u64>(),
            image.sums.len() as u64,
            "every block of an image has a place"
        );
        let blocks = extents.iter().flat_map(|e| e.start..e.start + e.count);
        for (i, (block, sum)) in blocks.zip(&image.sums).enumerate() {
            self.set(image.first + i, block, *sum);
        }
    }
}

impl Shared {
    /// `None` if there are not enough free blocks that this update may take.
    fn alloc(self: &Arc<Self>, want: Want) -> Option<Space> {
        // Not under the lock, because it asks the file system below.
        if want.fresh() > 0 && self.device.spare() < self.reserve.below {
            return None;
        }
        let mut s = self.state.lock();
        let (total, own) =
            (s.grants.total(), want.session().map_or(0, |session| s.grants.of(session)));
        let extents = s.alloc.alloc(want.count, self.reserve.from(want, total, own))?;
        let granted = want.session().map(|session| (session, s.grants.take(session, want.count)));
        s.replacing += want.replaced;
        debug_assert_eq!(extents.iter().map(|e| e.count).sum::<u64>(), want.count);
        debug_assert!(
            extents.iter().all(|e| e.start >= DATA_START),
            "blocks of the superblock were free"
        );
        Some(Space {
            shared: self.clone(),
            extents,
            replaces: want.replaced,
            granted,
            in_flight: false,
        })
    }

    /// A block of the chunk as stored, with its checksum checked; `None` for a hole.
    async fn old_block(&self, key: &Key, old: &Old, at: usize) -> Result<Option<Buf>> {
        let Some(s) = find(&old.segments, at) else { return Ok(None) };
        let (block, sum) = (s.blocks[at % SEG_BLOCKS], s.sums[at % SEG_BLOCKS]);
        if block == HOLE {
            return Ok(None);
        }
        self.read_blocks(key, block, at, &[sum], self.pool.get_now(BLOCK)).await.map(Some)
    }

    /// Makes whole aligned blocks. Aligned data is used as it is, other data is copied. A first or
    /// last block that is only partly written is completed with its old bytes.
    async fn image(
        &self,
        key: &Key,
        old: &Old,
        offset: u32,
        data: Vec<Buf>,
        mut sums: Vec<u32>,
    ) -> Result<Image> {
        let (from, to) = (offset as usize, offset as usize + total(&data));
        let (first, last) = (from / BLOCK, (to - 1) / BLOCK);
        let (head, tail) = (from % BLOCK, to % BLOCK);
        let old_head = if head > 0 && old.len() as usize > first * BLOCK {
            self.old_block(key, old, first).await?
        } else {
            None
        };
        let needs_tail = tail > 0 && old.len() as usize > to;
        let old_tail = match (&old_head, needs_tail) {
            (_, false) => None,
            (Some(b), true) if first == last => Some(b.clone()),
            (_, true) => self.old_block(key, old, last).await?,
        };
        if head == 0 && tail == 0 && is_aligned(&data) {
            return Ok(Image { first, data, sums });
        }
        let mut out = Vec::new();
        let whole = if head == 0 { to / BLOCK * BLOCK - from } else { 0 };
        let front = cut(&data, 0..whole);
        let copied_from = if is_aligned(&front) {
            out = front;
            whole
        } else {
            0
        };
        let base = from - head + copied_from;
        let mut buf = self.pool.get_now((last + 1) * BLOCK - base);
        let size = buf.len();
        fill(&mut buf[..from.max(base) - base], old_head.as_deref());
        let mut at = from.max(base) - base;
        for b in cut(&data, copied_from..to - from) {
            buf[at..at + b.len()].copy_from_slice(&b);
            at += b.len();
        }
        // `at` is now `to - base`; the rest of the last block follows.
        fill(&mut buf[at..], old_tail.as_deref().map(|b| &b[BLOCK - (size - at)..]));
        if head > 0 {
            sums[0] = crc32c(&buf[..BLOCK]);
        }
        if tail > 0 {
            sums[last - first] = crc32c(&buf[size - BLOCK..]);
        }
        out.push(buf.freeze());
        Ok(Image { first, data: out, sums })
    }
}

fn fill(to: &mut [u8], from: Option<&[u8]>) {
    match from.and_then(|f| f.get(..to.len())) {
        Some(f) => to.copy_from_slice(f),
        None => to.fill(0),
    }
}

/// Whether buffers can go to a device that bypasses the page cache without a copy.
fn is_aligned(data: &[Buf]) -> bool {
    data.len() <= MAX_IOVECS
        && data
            .iter()
            .all(|b| b.len().is_multiple_of(BLOCK) && (b.as_ptr() as usize).is_multiple_of(BLOCK))
}
