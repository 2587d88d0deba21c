//! Listings of chunks and extents over the table in the store and the changes in memory, and
//! forgetting tombstones.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

use bytes::Bytes;
use strake_proto::{
    ChainId, ChunkId, Result,
    checksum::BLOCK,
    data::{Extent, Extents, ListEntry},
};

use super::{
    api::Engine,
    chunk::Key,
    overlay::{Overlay, Slot},
    record::{
        HOLE, Header, MAX_SEGS, SEG_BLOCKS, SEG_BYTES, Segment, header_key, parse_header_key,
        parse_segment_key, segment_key,
    },
    shared::{Shared, State},
};

/// Changed records looked at in one step.
const STEP: usize = 1024;

/// Most segment records that one search for extents reads: 256 MiB of a file without holes.
const EXTENT_LOOK: usize = 1024;

/// The result of forgetting tombstones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forgot {
    /// Tombstones that were dropped.
    pub forgotten: usize,
    /// Chunks that are no tombstones.
    pub left: Vec<u64>,
    /// Where to continue; `None`: all were looked at.
    pub next: Option<u64>,
}

/// Records of one chain, from a lower bound to `to`.
struct Span<K> {
    from: Bound<K>,
    to: K,
}

const LAST: ChunkId = ChunkId { ino: u64::MAX, data: u64::MAX, index: u64::MAX };

impl Engine {
    /// Chunks of a chain after `after` in order of their ids, tombstones included, at most `max`. A
    /// chunk whose record is damaged is listed with version 0 and no length. Each entry was true at
    /// some moment of the call.
    pub fn list(
        &self,
        chain: ChainId,
        after: Option<ChunkId>,
        max: usize,
    ) -> Result<Vec<ListEntry>> {
        let key = |chunk| Key { chain, chunk };
        let first = ChunkId { ino: 0, data: 0, index: 0 };
        let from = after.map_or(Bound::Included(key(first)), |c| Bound::Excluded(key(c)));
        self.shared.entries(Span { from, to: key(LAST) }, max)
    }

    /// As [`Engine::list`], of one file's data from `from_index` on.
    pub fn chunks_of(
        &self,
        chain: ChainId,
        ino: u64,
        data: u64,
        from_index: u64,
        max: usize,
    ) -> Result<Vec<ListEntry>> {
        let key = |index| Key { chain, chunk: ChunkId { ino, data, index } };
        self.shared.entries(Span { from: Bound::Included(key(from_index)), to: key(u64::MAX) }, max)
    }

    /// Drops the tombstones of a file's data on a chain, once no request for that data can come any
    /// more: those of the first `most` chunks from `from` on. The caller flushes between calls.
    pub fn forget_tombstones(
        &self,
        chain: ChainId,
        file: (u64, u64),
        from: u64,
        most: usize,
    ) -> Result<Forgot> {
        let (ino, data) = file;
        let page = self.chunks_of(chain, ino, data, from, most)?;
        let mut out = Forgot::default();
        for part in page.chunks(STEP) {
            let mut s = self.shared.state.lock();
            s.check()?;
            for e in part {
                let key = Key { chain, chunk: e.chunk };
                if !e.tombstone {
                    out.left.push(e.chunk.index);
                    continue;
                }
                // Skip a chunk with a staged update, or written again meanwhile.
                let again = s.headers.get(&key).flatten().is_some_and(|h| !h.meta.tombstone);
                if !again && !s.staging.contains(&key) {
                    s.headers.put(key, None);
                    s.committed += 1;
                    out.forgotten += 1;
                }
            }
        }
        if page.len() >= most {
            out.next = page.last().and_then(|e| e.chunk.index.checked_add(1));
        }
        Ok(out)
    }
}

impl Engine {
    /// Where chunks of one file's data on a chain hold data, from (`index`, `offset`) on. Returns
    /// at most `most` extents (0: only their sum) and reads a limited number of records. Unreadable
    /// parts count as data.
    pub fn extents(
        &self,
        chain: ChainId,
        ino: u64,
        data: u64,
        from: (u64, u32),
        most: usize,
    ) -> Result<Extents> {
        let key = |index| Key { chain, chunk: ChunkId { ino, data, index } };
        let first = (key(from.0), (from.1 / SEG_BYTES).min(u32::from(MAX_SEGS)) as u8);
        let span = Span { from: Bound::Included(first), to: (key(u64::MAX), u8::MAX) };
        let mut walk = Walk { out: Extents::default(), from, most, left: EXTENT_LOOK };
        self.shared.scan(span, |at, segment| walk.take(at, segment))?;
        Ok(walk.out)
    }
}

/// A walk over the segments of a file.
struct Walk {
    out: Extents,
    from: (u64, u32),
    most: usize,
    /// How many more segments may be looked at.
    left: usize,
}

impl Walk {
    /// Returns whether to go on.
    fn take(&mut self, (key, seg): (Key, u8), segment: Option<&Segment>) -> bool {
        let Some(segment) = segment else { return true };
        let (index, start) = (key.chunk.index, u32::from(seg) * SEG_BYTES);
        let skipped = if index == self.from.0 {
            self.from.1.saturating_sub(start).div_ceil(BLOCK as u32)
        } else {
            0
        };
        if self.left == 0 {
            self.out.next = Some((index, start.max(skipped * BLOCK as u32 + start)));
            return false;
        }
        self.left -= 1;
        for n in skipped as usize..SEG_BLOCKS {
            if segment.blocks[n] == HOLE && !segment.damaged {
                continue;
            }
            let offset = start + (n * BLOCK) as u32;
            if self.most > 0 {
                let full = self.out.found.len() == self.most;
                match self.out.found.last_mut() {
                    Some(e) if e.index == index && e.offset + e.len == offset => {
                        e.len += BLOCK as u32
                    }
                    _ if full => {
                        self.out.next = Some((index, offset));
                        return false;
                    }
                    _ => self.out.found.push(Extent { index, offset, len: BLOCK as u32 }),
                }
            }
            self.out.bytes += BLOCK as u64;
        }
        true
    }
}

impl Table for Header {
    type Key = Key;
    const PART: fn(&State) -> &Overlay<Key, Header> = |s| &s.headers;

    fn key(at: &Key) -> Bytes {
        header_key(at)
    }
    fn parse(key: &[u8]) -> Option<Key> {
        parse_header_key(key)
    }
    fn read(at: &Key, key: &[u8], value: &[u8], shared: &Shared) -> Header {
        Header::decode(key, value).unwrap_or_else(|e| {
            shared.note_damage(at, &e);
            Header::damaged()
        })
    }
}

impl Table for Segment {
    type Key = (Key, u8);
    const PART: fn(&State) -> &Overlay<(Key, u8), Segment> = |s| &s.segments;

    fn key((chunk, seg): &(Key, u8)) -> Bytes {
        segment_key(chunk, *seg)
    }
    fn parse(key: &[u8]) -> Option<(Key, u8)> {
        parse_segment_key(key)
    }
    fn read(at: &(Key, u8), key: &[u8], value: &[u8], shared: &Shared) -> Segment {
        Segment::decode(key, value).unwrap_or_else(|e| {
            shared.note_damage(&at.0, &e);
            Segment::damaged()
        })
    }
}

/// A kind of record, in the store and in memory.
trait Table: Sized {
    type Key: Ord + Copy;
    const PART: fn(&State) -> &Overlay<Self::Key, Self>;

    fn key(at: &Self::Key) -> Bytes;
    /// `None`: no record of this kind.
    fn parse(key: &[u8]) -> Option<Self::Key>;
    /// Reads a record. Damage is counted, and returned as a record marked as damaged.
    fn read(at: &Self::Key, key: &[u8], value: &[u8], shared: &Shared) -> Self;
}

impl Shared {
    /// Gives records in key order to `take` until it returns `false`. Reads memory first, then the
    /// store: a record flushed in between is in both, and the one from memory counts.
    fn scan<T: Table>(
        self: &Arc<Self>,
        mut span: Span<T::Key>,
        mut take: impl FnMut(T::Key, Option<&T>) -> bool,
    ) -> Result<()> {
        loop {
            let (changed, more) =
                T::PART(&self.state.lock()).changed(span.from, Bound::Included(span.to), STEP);
            let end = match changed.last_key_value() {
                Some((last, _)) if more => *last,
                _ => span.to,
            };
            if !self.merge(&span, end, changed, &mut take)? || end == span.to {
                return Ok(());
            }
            span.from = Bound::Excluded(end);
        }
    }

    /// Records from the span's start to `end`, from `changed` and the store. Returns whether to go
    /// on.
    fn merge<T: Table>(
        &self,
        span: &Span<T::Key>,
        end: T::Key,
        mut changed: BTreeMap<T::Key, Slot<T>>,
        take: &mut impl FnMut(T::Key, Option<&T>) -> bool,
    ) -> Result<bool> {
        let (from, to) = (span.from.map(|k| T::key(&k)), T::key(&end));
        let from = from.as_ref().map(|b| &b[..]);
        for pair in self.table.range(from, Bound::Included(&to)) {
            let (k, v) = pair?;
            let Some(key) = T::parse(&k) else { continue };
            while let Some(entry) = changed.first_entry().filter(|e| *e.key() < key) {
                let (k, r) = entry.remove_entry();
                if !take(k, r.as_deref()) {
                    return Ok(false);
                }
            }
            let goes_on = match changed.remove(&key) {
                Some(newer) => take(key, newer.as_deref()),
                None => take(key, Some(&T::read(&key, &k, &v, self))),
            };
            if !goes_on {
                return Ok(false);
            }
        }
        Ok(changed.into_iter().all(|(k, r)| take(k, r.as_deref())))
    }

    fn entries(self: &Arc<Self>, span: Span<Key>, max: usize) -> Result<Vec<ListEntry>> {
        let mut out = Vec::new();
        let take = |key: Key, header: Option<&Header>| {
            if let Some(Header { meta, .. }) = header
                && out.len() < max
            {
                out.push(ListEntry {
                    chunk: key.chunk,
                    version: meta.version,
                    len: meta.len,
                    tombstone: meta.tombstone,
                });
            }
            out.len() < max
        };
        self.scan(span, take)?;
        Ok(out)
    }
}
