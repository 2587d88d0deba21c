//! Holes: making them, finding them, and how much of a file is stored. See `docs/client.md`.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use futures_util::{
    future::{join_all, try_join_all},
    stream::{self, StreamExt},
};
use strake_fabric::Buf;
use strake_proto::{
    ChainId, ChunkId, Ino, Result, SessionId, TargetId,
    checksum::BLOCK,
    data::{DataReply, DataRequest, Extents, FLAG_STABLE},
    layout::{MAX_FILE_SIZE, Piece, StripeMap},
    opcode, pb,
};

use crate::{
    Client,
    core::Core,
    data::Question,
    data::buffers::{self, Content},
    inode::Inode,
};

/// Chunks punched at a time, and extents asked for at once.
const PUNCHES_AT_ONCE: usize = 8;
const PAGE: u32 = 256;
/// Requests to one chain for the size of what it stores, each about 256 MiB of data. What they do not reach is taken for data.
const MOST_COUNTS: usize = 128;

impl Client {
    /// Bytes that the servers store of a regular file, each copy but the first left out; holes take none.
    pub async fn allocated(&self, ino: Ino) -> Result<u64> {
        let core = &self.core;
        let opened;
        let inode = match core.live_inode(ino) {
            Some(inode) => inode,
            None => {
                // Like stat(2) it needs no right on the file itself.
                let (file, _) = self.open(&pb::Creds::default(), ino, 0).await?;
                opened = file;
                opened.inode().clone()
            }
        };
        core.send_held(&inode).await;
        let (stripes, size) = (inode.placed().stripes, inode.size());
        let counts = chains(&stripes).into_iter().map(|chain| core.stored(&inode, &stripes, chain, size));
        Ok(try_join_all(counts).await?.into_iter().sum())
    }
}

/// The chains of a layout, each once.
fn chains(stripes: &StripeMap) -> BTreeSet<ChainId> {
    stripes.chains.iter().copied().collect()
}

/// The chunk of an offset, and where in it the block of the offset begins.
fn block_of(stripes: &StripeMap, offset: u64) -> (u64, u32) {
    let (p, _) = stripes.locate(offset);
    (p.chunk.index, p.offset - p.offset % BLOCK as u32)
}

/// The place in the file of an offset in a chunk, beyond all files for what is in none.
fn file_offset(stripes: &StripeMap, (index, offset): (u64, u32)) -> u64 {
    stripes.place_of(index).map_or(MAX_FILE_SIZE, |(start, _)| start + u64::from(offset))
}

impl Core {
    async fn extents(
        self: &Arc<Self>,
        inode: &Inode,
        stripes: &StripeMap,
        chain: ChainId,
        from: (u64, u32),
        most: u32,
    ) -> Result<Extents> {
        let chunk = ChunkId { ino: stripes.ino, data: stripes.data, index: from.0 };
        let read = |_: TargetId, _: DataReply, payload: Vec<Buf>| {
            let whole =
                if let [one] = &payload[..] { one.clone() } else { buffers::copy(self.shared.fabric.pool(), &payload) };
            Extents::decode(&whole, from)
        };
        let request = DataRequest { offset: from.1, len: most, ..DataRequest::new(chain, 0, 0, chunk) };
        let question = Question { opcode: opcode::EXTENTS, chain, request, read: &read };
        self.ask(inode, "looking for holes", !inode.is_readable(), &question).await
    }

    async fn stored(self: &Arc<Self>, inode: &Inode, stripes: &StripeMap, chain: ChainId, size: u64) -> Result<u64> {
        let (mut sum, mut from) = (0u64, (0, 0));
        for _ in 0..MOST_COUNTS {
            let found = self.extents(inode, stripes, chain, from, 0).await?;
            sum = sum.saturating_add(found.bytes);
            match found.next {
                Some(next) => from = next,
                None => return Ok(sum),
            }
        }
        let rest = size.saturating_sub(file_offset(stripes, from)) / chains(stripes).len() as u64;
        Ok(sum.saturating_add(rest))
    }

    /// The first data at or behind `offset`, `None` where only a hole is left.
    pub(crate) async fn seek_data(self: &Arc<Self>, inode: &Inode, offset: u64) -> Result<Option<u64>> {
        let stripes = inode.placed().stripes;
        let firsts = chains(&stripes).into_iter().map(|c| self.first_data(inode, &stripes, c, offset));
        let first = try_join_all(firsts).await?.into_iter().flatten().min();
        Ok(first.map(|at| at.max(offset)))
    }

    async fn first_data(
        self: &Arc<Self>,
        inode: &Inode,
        stripes: &StripeMap,
        chain: ChainId,
        offset: u64,
    ) -> Result<Option<u64>> {
        let mut from = block_of(stripes, offset);
        loop {
            let page = self.extents(inode, stripes, chain, from, 1).await?;
            match (page.found.first(), page.next) {
                (Some(e), _) => return Ok(Some(file_offset(stripes, (e.index, e.offset)))),
                (None, Some(next)) => from = next,
                (None, None) => return Ok(None),
            }
        }
    }

    /// The first hole at or behind `offset`, which is below `size`, where the last one begins.
    pub(crate) async fn seek_hole(self: &Arc<Self>, inode: &Inode, offset: u64, size: u64) -> Result<u64> {
        let stripes = inode.placed().stripes;
        let first = AtomicU64::new(size);
        let walks = chains(&stripes).into_iter().map(|c| self.first_hole(inode, &stripes, c, offset, &first));
        try_join_all(walks).await?;
        Ok(first.into_inner().max(offset))
    }

    /// Lowers `first` to the first hole on one chain. Looks no further than that.
    async fn first_hole(
        self: &Arc<Self>,
        inode: &Inode,
        stripes: &StripeMap,
        chain: ChainId,
        offset: u64,
        first: &AtomicU64,
    ) -> Result<()> {
        let start = block_of(stripes, offset);
        let index = stripes.first_on_chain(start.0, chain);
        // All before here is data.
        let mut at = if index == start.0 { start } else { (index, 0) };
        let hole = |at| {
            first.fetch_min(file_offset(stripes, at), Relaxed);
        };
        loop {
            let page = self.extents(inode, stripes, chain, at, PAGE).await?;
            for e in &page.found {
                if (e.index, e.offset) < at {
                    continue; // of a chunk that the layout has elsewhere
                }
                if (e.index, e.offset) != at {
                    hole(at);
                    return Ok(());
                }
                at.1 += e.len;
                if stripes.place_of(at.0).is_none_or(|(_, len)| u64::from(at.1) >= len) {
                    at = (stripes.next_on_chain(at.0), 0);
                }
            }
            if page.next != Some(at) {
                hole(at);
            }
            if page.next != Some(at) || file_offset(stripes, at) >= first.load(Relaxed) {
                return Ok(());
            }
        }
    }

    /// Makes a range zeros that takes no space, on all chains. The caller holds the range's lock.
    pub(crate) async fn punch_range(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        range: Range<u64>,
        stable: bool,
    ) -> Result<()> {
        let stripes = inode.placed().stripes;
        // One number for all chunks, each of which remembers it: a repetition after a restart of the mount may find other chunks,
        // and what the last daemon sent may arrive late.
        let number = self.data_numbers(inode, 1, None).await?;
        let punch = |chain| self.punch_chain(inode, &stripes, chain, range.clone(), stable, number);
        let punches = chains(&stripes).into_iter().map(punch);
        join_all(punches).await.into_iter().collect()
    }

    /// Chunks that hold nothing need no punch, unless bytes of this client may be written to them once more.
    async fn punch_chain(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        stripes: &StripeMap,
        chain: ChainId,
        range: Range<u64>,
        stable: bool,
        number: (SessionId, u64),
    ) -> Result<()> {
        let last = stripes.locate(range.end - 1).0.chunk.index;
        let mut from = block_of(stripes, range.start);
        let unstable = self.unstable.lock().chunks_of(chain, inode.ino);
        let mut wanted: BTreeSet<u64> = unstable.into_iter().filter(|i| (from.0..=last).contains(i)).collect();
        loop {
            let page = self.extents(inode, stripes, chain, from, PAGE).await?;
            wanted.extend(page.found.iter().map(|e| e.index).filter(|i| *i <= last));
            let next = page.next.filter(|n| n.0 <= last);
            // The last one may go on on the next page: then it is punched with that.
            let rest = next.map_or_else(BTreeSet::new, |n| wanted.split_off(&n.0));
            let punches = std::mem::replace(&mut wanted, rest).into_iter();
            let pieces: Vec<Piece> = punches.filter_map(|i| piece(stripes, chain, i, &range)).collect();
            let flags = if stable { FLAG_STABLE } else { 0 };
            let punch = |p: Piece| self.write_piece(inode, p, Content::Hole(p.len), flags, number, None);
            // All, though one may fail: none may arrive after the range is free for others.
            let done: Vec<Result<()>> =
                stream::iter(pieces).map(punch).buffer_unordered(PUNCHES_AT_ONCE).collect().await;
            done.into_iter().collect::<Result<()>>()?;
            match next {
                Some(n) => from = n,
                None => return Ok(()),
            }
        }
    }
}

/// The part of a range of the file that lies in a chunk.
fn piece(stripes: &StripeMap, chain: ChainId, index: u64, range: &Range<u64>) -> Option<Piece> {
    let (start, len) = stripes.place_of(index)?;
    let (from, to) = (range.start.max(start), range.end.min(start + len));
    let chunk = ChunkId { ino: stripes.ino, data: stripes.data, index };
    let (offset, file_offset) = ((from - start.min(from)) as u32, from);
    (from < to).then(|| Piece { chunk, chain, offset, len: (to - from) as u32, file_offset })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_chunks_are_those_of_the_layout() {
        let stripes = StripeMap { ino: 1, data: 2, stripe_size: 40 << 20, chains: vec![7, 8, 9] };
        let range = (5 << 20) + 1..(200 << 20) - 7;
        for p in stripes.split(range.start, range.end - range.start) {
            assert_eq!(piece(&stripes, p.chain, p.chunk.index, &range), Some(p));
        }
        let last = stripes.locate(range.end).0.chunk.index;
        assert_eq!(piece(&stripes, 7, last + 1, &range), None);
        assert_eq!(piece(&stripes, 7, u64::MAX, &range), None);
        assert_eq!(block_of(&stripes, (41 << 20) + 5000), (3, (1 << 20) + 4096));
        assert_eq!(file_offset(&stripes, (3, 4096)), (40 << 20) + 4096);
    }
}
