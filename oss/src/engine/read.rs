//! Consistent views of a chunk and verified reads of its bytes.

use std::{collections::BTreeMap, ops::Range, sync::Arc, time::Duration};

use futures_util::future::try_join_all;
use strake_fabric::{Buf, BufMut};
use strake_proto::{
    Code, Error, Result,
    checksum::{BLOCK, crc32c},
};

use super::{
    api::Engine,
    chunk::{Key, ReadOut, damaged},
    overlay::{Overlay, Slot},
    record::{
        HOLE, Header, SEG_BLOCKS, SEG_BYTES, Segment, header_key, parse_segment_key, segment_key,
    },
    shared::{Shared, add},
};

/// Most blocks of one device read.
const READ_BLOCKS: usize = 1024;
/// How long [`Engine::read_in_limit`] waits for memory.
const ROOM_WAIT: Duration = Duration::from_secs(1);

/// While it lives, blocks freed from now on are not used again.
pub(super) struct Ticket {
    shared: Arc<Shared>,
    epoch: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut s = self.shared.state.lock();
        if let Some(n) = s.readers.get_mut(&self.epoch) {
            *n -= 1;
            if *n == 0 {
                s.readers.remove(&self.epoch);
                self.shared.reader_done.notify_waiters();
            }
        }
    }
}

/// A chunk's header and some of its segments as of one moment.
pub(super) struct View {
    pub header: Slot<Header>,
    /// The segments asked for, in order.
    pub segments: Vec<(u8, Slot<Segment>)>,
    /// How many records were damaged in the store but intact in memory, and will be written again.
    pub healed: usize,
    pub _ticket: Ticket,
}

/// What was read from the store in an epoch; invalid in the next one.
#[derive(Default)]
struct Loaded {
    epoch: u64,
    header: Option<Slot<Header>>,
    segments: BTreeMap<u8, Slot<Segment>>,
}

/// Where the records of a view come from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Source {
    /// From memory if they are there.
    Memory,
    /// From the store, except for changes that are not flushed yet.
    Store,
}

impl Source {
    fn of<K: Ord + Copy, V>(self, records: &mut Overlay<K, V>, key: &K) -> Option<Slot<V>> {
        match self {
            Source::Memory => records.get(key),
            Source::Store => records.changed_one(key),
        }
    }
}

enum Missing {
    Header,
    Segments(Range<u8>),
}

/// Segments that bytes `[from, to)` of a chunk touch.
pub(super) fn segments_of(from: u32, to: u32) -> Range<u8> {
    if from >= to {
        return 0..0;
    }
    (from / SEG_BYTES) as u8..to.div_ceil(SEG_BYTES) as u8
}

impl Shared {
    /// The header, and the segments that `want` names when given the header. Reads the store
    /// without the lock, and reads again if a flush ended meanwhile: within one epoch, records that
    /// are not in memory are in the store as they were read.
    pub(super) fn view(
        self: &Arc<Self>,
        key: &Key,
        want: impl Fn(Option<&Header>) -> Range<u8>,
    ) -> Result<View> {
        self.view_of(key, want, Source::Memory)
    }

    pub(super) fn view_of(
        self: &Arc<Self>,
        key: &Key,
        want: impl Fn(Option<&Header>) -> Range<u8>,
        source: Source,
    ) -> Result<View> {
        let mut loaded = Loaded::default();
        let mut healed = 0;
        loop {
            let missing = match self.try_view(key, &want, source, &mut loaded) {
                Ok(view) => return Ok(View { healed, ..view }),
                Err(missing) => missing,
            };
            match missing {
                Missing::Header => loaded.header = Some(self.load_header(key)?),
                Missing::Segments(range) => self.load_segments(key, range, &mut loaded.segments)?,
            }
            if source == Source::Store {
                healed += self.heal(key, &loaded);
            }
        }
    }

    /// Marks records that are damaged in the store but intact in memory to be written again.
    /// Returns how many.
    fn heal(&self, key: &Key, loaded: &Loaded) -> usize {
        let mut state = self.state.lock();
        let s = &mut *state;
        if s.epoch != loaded.epoch || s.failed.is_some() {
            return 0;
        }
        let header = loaded
            .header
            .iter()
            .flatten()
            .filter(|h| h.damaged && s.headers.heal(key, |h| !h.damaged));
        let mut healed = header.count();
        for (seg, _) in
            loaded.segments.iter().filter(|(_, v)| v.as_ref().is_some_and(|v| v.damaged))
        {
            let at = (*key, *seg);
            healed += usize::from(!s.lost.contains(&at) && s.segments.heal(&at, |v| !v.damaged));
        }
        s.committed += healed as u64;
        healed
    }

    fn try_view(
        self: &Arc<Self>,
        key: &Key,
        want: &impl Fn(Option<&Header>) -> Range<u8>,
        source: Source,
        loaded: &mut Loaded,
    ) -> Result<View, Missing> {
        let mut state = self.state.lock();
        let s = &mut *state;
        if loaded.epoch != s.epoch {
            *loaded = Loaded { epoch: s.epoch, ..Loaded::default() };
        }
        let known = source.of(&mut s.headers, key);
        let Some(header) = known.or_else(|| loaded.header.clone()) else {
            return Err(Missing::Header);
        };
        let mut segments = Vec::new();
        let mut missing: Option<Range<u8>> = None;
        for seg in want(header.as_deref()) {
            match source
                .of(&mut s.segments, &(*key, seg))
                .or_else(|| loaded.segments.get(&seg).cloned())
            {
                Some(_) if s.lost.contains(&(*key, seg)) => {
                    segments.push((seg, Some(Arc::new(Segment::damaged()))))
                }
                Some(v) => segments.push((seg, v)),
                None => missing = Some(missing.map_or(seg, |m| m.start)..seg + 1),
            }
        }
        if let Some(range) = missing {
            return Err(Missing::Segments(range));
        }
        if let Some(h) = loaded.header.take() {
            s.headers.cache(*key, h);
        }
        for (seg, v) in std::mem::take(&mut loaded.segments) {
            s.segments.cache((*key, seg), v);
        }
        let epoch = s.epoch;
        *s.readers.entry(epoch).or_default() += 1;
        drop(state);
        Ok(View { header, segments, healed: 0, _ticket: Ticket { shared: self.clone(), epoch } })
    }

    pub(super) fn header(self: &Arc<Self>, key: &Key) -> Result<Slot<Header>> {
        if let Some(h) = self.state.lock().headers.get(key) {
            return Ok(h);
        }
        self.view(key, |_| 0..0).map(|v| v.header)
    }

    fn load_header(&self, key: &Key) -> Result<Slot<Header>> {
        let k = header_key(key);
        Ok(self.table.get(&k)?.map(|v| {
            Arc::new(Header::decode(&k, &v).unwrap_or_else(|e| {
                self.note_damage(key, &e);
                Header::damaged()
            }))
        }))
    }

    fn load_segments(
        &self,
        key: &Key,
        range: Range<u8>,
        into: &mut BTreeMap<u8, Slot<Segment>>,
    ) -> Result<()> {
        let decode = |k: &[u8], v: &[u8]| {
            Arc::new(Segment::decode(k, v).unwrap_or_else(|e| {
                self.note_damage(key, &e);
                Segment::damaged()
            }))
        };
        let from = segment_key(key, range.start);
        if range.len() == 1 {
            into.insert(range.start, self.table.get(&from)?.map(|v| decode(&from, &v)));
            return Ok(());
        }
        for seg in range.clone() {
            into.insert(seg, None);
        }
        let to = segment_key(key, range.end);
        for pair in
            self.table.range(std::ops::Bound::Included(&from), std::ops::Bound::Excluded(&to))
        {
            let (k, v) = pair?;
            if let Some((_, seg)) = parse_segment_key(&k) {
                into.insert(seg, Some(decode(&k, &v)));
            }
        }
        Ok(())
    }

    pub(super) fn note_damage(&self, key: &Key, e: &Error) {
        add(&self.counters.damaged, 1);
        tracing::error!("{}: {key}: {e}", self.device.name());
    }

    /// Reads device blocks, unchecked, until the buffer is full.
    pub(super) async fn read_device(&self, key: &Key, block: u64, buf: BufMut) -> Result<BufMut> {
        let len = buf.len();
        let buf = self.device.read(block * BLOCK as u64, buf).await.map_err(|e| e.context(key))?;
        if buf.len() != len {
            return Err(Error::new(
                Code::Io,
                format!("{key}: {} read {} of {len} bytes", self.device.name(), buf.len()),
            ));
        }
        Ok(buf)
    }

    /// Reads as many device blocks as there are sums into a buffer, and checks each block against
    /// its checksum.
    pub(super) async fn read_blocks(
        &self,
        key: &Key,
        block: u64,
        at: usize,
        sums: &[u32],
        buf: BufMut,
    ) -> Result<Buf> {
        let buf = self.read_device(key, block, buf).await?;
        if let Some(i) = buf.chunks(BLOCK).zip(sums).position(|(bytes, sum)| crc32c(bytes) != *sum)
        {
            let e = Error::new(
                Code::Corrupt,
                format!(
                    "{key}: block {} does not match its checksum (device block {} of {})",
                    at + i,
                    block + i as u64,
                    self.device.name()
                ),
            );
            self.note_damage(key, &e);
            return Err(e);
        }
        Ok(buf.freeze())
    }
}

/// Adjoining blocks of a chunk that are one run on the device, or are all holes.
pub(super) struct Piece {
    /// First block, counted in the chunk.
    pub at: usize,
    /// Where on the device; [`HOLE`] for holes.
    pub block: u64,
    pub sums: Vec<u32>,
}

/// The record of a block, from segments that follow each other.
pub(super) fn find(segments: &[(u8, Slot<Segment>)], at: usize) -> Option<&Segment> {
    let first = usize::from(segments.first()?.0);
    segments.get((at / SEG_BLOCKS).checked_sub(first)?)?.1.as_deref()
}

/// Splits blocks into pieces. `Corrupt` if the record of one of them is damaged.
pub(super) fn pieces(
    key: &Key,
    segments: &[(u8, Slot<Segment>)],
    blocks: Range<usize>,
    zero_sum: u32,
) -> Result<Vec<Piece>> {
    let mut out: Vec<Piece> = Vec::new();
    let end = blocks.end;
    for at in blocks {
        let (block, sum) = match find(segments, at) {
            Some(s) if s.damaged => return Err(damaged(key)),
            Some(s) if s.blocks[at % SEG_BLOCKS] != HOLE => {
                (s.blocks[at % SEG_BLOCKS], s.sums[at % SEG_BLOCKS])
            }
            _ => (HOLE, zero_sum),
        };
        match out.last_mut() {
            Some(p)
                if p.sums.len() < READ_BLOCKS
                    && ((p.block == HOLE && block == HOLE)
                        || (p.block != HOLE
                            && block != HOLE
                            && p.block + p.sums.len() as u64 == block)) =>
            {
                p.sums.push(sum);
            }
            _ => {
                let mut sums = Vec::with_capacity((end - at).min(READ_BLOCKS));
                sums.push(sum);
                out.push(Piece { at, block, sums });
            }
        }
    }
    Ok(out)
}

impl Engine {
    /// The committed bytes of `[offset, offset + len)`, as far as they exist. Every block is
    /// checked against its checksum (`Corrupt` on a mismatch) and all are of one version. An absent
    /// or removed chunk has none.
    ///
    /// Takes memory beyond the pool's limit if it must, because writes that hold pool memory may
    /// wait for this read.
    pub async fn read(&self, key: &Key, offset: u32, len: u32) -> Result<ReadOut> {
        let pool = &self.shared.pool;
        self.read_into(key, offset, len, async |lens| {
            Ok(lens.iter().map(|l| pool.get_now(*l)).collect())
        })
        .await
    }

    /// The expected checksums of the blocks in `part`, including damaged blocks; `None` if a
    /// checksum is not known. `Corrupt` if the chunk's header is damaged.
    pub fn sums(&self, key: &Key, part: Range<u32>) -> Result<Vec<Option<u32>>> {
        let shared = &self.shared;
        let view = shared.view(key, |_| segments_of(part.start, part.end))?;
        if view.header.as_ref().is_some_and(|h| h.damaged) {
            return Err(damaged(key));
        }
        let zero_sum = crc32c(&shared.zeros[..BLOCK]);
        let sum = |at: usize| match find(&view.segments, at) {
            Some(s) if s.damaged => None,
            // The complement of `zero_sum` stands for an unknown checksum, see `Update::Replace`.
            Some(s) if s.blocks[at % SEG_BLOCKS] != HOLE => {
                Some(s.sums[at % SEG_BLOCKS]).filter(|s| *s != !zero_sum)
            }
            _ => Some(zero_sum),
        };
        Ok((part.start as usize / BLOCK..(part.end as usize).div_ceil(BLOCK)).map(sum).collect())
    }

    /// As [`Engine::read`], within the pool's limit. `Overloaded` if no memory becomes free within
    /// a second.
    pub async fn read_in_limit(&self, key: &Key, offset: u32, len: u32) -> Result<ReadOut> {
        let pool = &self.shared.pool;
        let room = async |lens: Vec<usize>| {
            let full = || Error::new(Code::Overloaded, "reads wait for memory; try again");
            tokio::time::timeout(ROOM_WAIT, pool.get_all(&lens)).await.map_err(|_| full())?
        };
        self.read_into(key, offset, len, room).await
    }

    async fn read_into(
        &self,
        key: &Key,
        offset: u32,
        len: u32,
        room: impl AsyncFnOnce(Vec<usize>) -> Result<Vec<BufMut>>,
    ) -> Result<ReadOut> {
        let shared = &self.shared;
        let end_in =
            |h: Option<&Header>| h.map_or(0, |h| h.meta.len.min(offset.saturating_add(len)));
        let view = shared.view(key, |h| segments_of(offset, end_in(h)))?;
        add(&shared.counters.reads, 1);
        let Some(header) = &view.header else { return Ok(ReadOut::default()) };
        if header.damaged {
            return Err(damaged(key));
        }
        let (version, end) = (header.meta.version, end_in(Some(header)));
        if offset >= end {
            return Ok(ReadOut { version, ..ReadOut::default() });
        }
        let (from, to) = (offset as usize, end as usize);
        let zero_sum = crc32c(&shared.zeros[..BLOCK]);
        let pieces = pieces(key, &view.segments, from / BLOCK..to.div_ceil(BLOCK), zero_sum)?;
        let stored: Vec<_> = pieces.iter().enumerate().filter(|(_, p)| p.block != HOLE).collect();
        let into = room(stored.iter().map(|(_, p)| p.sums.len() * BLOCK).collect()).await?;
        let reads = stored.into_iter().zip(into).map(|((i, p), buf)| async move {
            shared.read_blocks(key, p.block, p.at, &p.sums, buf).await.map(|buf| (i, buf))
        });
        let mut bufs: BTreeMap<usize, Buf> = try_join_all(reads).await?.into_iter().collect();

        let mut out = ReadOut { version, len: end - offset, ..ReadOut::default() };
        for (i, p) in pieces.into_iter().enumerate() {
            let (start, stop) = (p.at * BLOCK, (p.at + p.sums.len()) * BLOCK);
            let wanted = from.max(start) - start..to.min(stop) - start;
            match bufs.remove(&i) {
                Some(buf) => out.data.push(buf.slice(wanted)),
                None => shared.push_zeros(wanted, &mut out.data),
            }
            if out.sums.is_empty() {
                out.sums = p.sums;
            } else {
                out.sums.extend(p.sums);
            }
        }
        fix_partial_sums(from, to, &mut out);
        add(&shared.counters.read_bytes, u64::from(out.len));
        Ok(out)
    }
}

/// The first and last checksum cover whole blocks. If the range begins or ends inside a block, they
/// are recomputed over the bytes in the range.
fn fix_partial_sums(from: usize, to: usize, out: &mut ReadOut) {
    let one_block = from / BLOCK == (to - 1) / BLOCK;
    if !from.is_multiple_of(BLOCK) || (one_block && !to.is_multiple_of(BLOCK)) {
        let head = (BLOCK - from % BLOCK).min(to - from);
        if let (Some(sum), Some(first)) = (out.sums.first_mut(), out.data.first()) {
            *sum = crc32c(&first[..head]);
        }
    }
    if !to.is_multiple_of(BLOCK)
        && !one_block
        && let (Some(sum), Some(last)) = (out.sums.last_mut(), out.data.last())
    {
        *sum = crc32c(&last[last.len() - to % BLOCK..]);
    }
}

impl Shared {
    /// Adds zeros for a part of a hole, split at block borders only.
    fn push_zeros(&self, part: Range<usize>, into: &mut Vec<Buf>) {
        let mut at = part.start;
        while at < part.end {
            let n = (self.zeros.len() - at % BLOCK).min(part.end - at);
            into.push(self.zeros.slice(0..n));
            at += n;
        }
    }
}
