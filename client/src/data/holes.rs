//! Finding holes, and how much of a file is stored. See `docs/client.md`.

use futures_util::future::BoxFuture;
use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use futures_util::future::try_join_all;
use strake_fabric::Buf;
use strake_proto::{
    ChainId, ChunkId, Result, TargetId,
    checksum::BLOCK,
    data::{DataReply, DataRequest, Extents},
    layout::{MAX_FILE_SIZE, StripeMap},
    opcode,
};

use crate::{
    data::{
        buffers::{self},
        service::{Question, Storage},
    },
    inode::Inode,
};

/// Most extents in one answer.
pub(crate) const PAGE: u32 = 256;
/// Most requests to one chain for the size of what it stores, each about 256 MiB of data. What they
/// do not reach counts as data.
const MOST_COUNTS: usize = 128;

/// The chains of a layout, each once.
pub(crate) fn chains(stripes: &StripeMap) -> BTreeSet<ChainId> {
    stripes.chains.iter().copied().collect()
}

/// The chunk that contains an offset, and where in it the block of the offset begins.
pub(crate) fn block_of(stripes: &StripeMap, offset: u64) -> (u64, u32) {
    let (p, _) = stripes.locate(offset);
    (p.chunk.index, p.offset - p.offset % BLOCK as u32)
}

/// The file offset of an offset in a chunk; beyond all files for a chunk that the layout does not
/// have.
pub(crate) fn file_offset(stripes: &StripeMap, (index, offset): (u64, u32)) -> u64 {
    stripes.place_of(index).map_or(MAX_FILE_SIZE, |(start, _)| start + u64::from(offset))
}

impl Storage {
    pub(crate) fn extents<'a>(
        self: &'a Arc<Self>,
        inode: &'a Inode,
        stripes: &'a StripeMap,
        chain: ChainId,
        from: (u64, u32),
        most: u32,
    ) -> BoxFuture<'a, Result<Extents>> {
        Box::pin(async move {
            let chunk = ChunkId { ino: stripes.ino, data: stripes.data, index: from.0 };
            let read = |_: TargetId, _: DataReply, payload: Vec<Buf>| {
                let whole = if let [one] = &payload[..] {
                    one.clone()
                } else {
                    buffers::copy(self.shared.fabric.pool(), &payload)
                };
                Extents::decode(&whole, from)
            };
            let request =
                DataRequest { offset: from.1, len: most, ..DataRequest::new(chain, 0, 0, chunk) };
            let question = Question { opcode: opcode::EXTENTS, chain, request, read: &read };
            self.ask(inode, "looking for holes", !inode.caps.may_read(), &question).await
        })
    }

    pub(crate) async fn stored(
        self: &Arc<Self>,
        inode: &Inode,
        stripes: &StripeMap,
        chain: ChainId,
        size: u64,
    ) -> Result<u64> {
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

    /// The offset of the first data at or behind `offset`, `None` where only a hole is left.
    pub(crate) async fn seek_data(
        self: &Arc<Self>,
        inode: &Inode,
        offset: u64,
    ) -> Result<Option<u64>> {
        let stripes = inode.placed().stripes;
        let firsts =
            chains(&stripes).into_iter().map(|c| self.first_data(inode, &stripes, c, offset));
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

    /// The offset of the first hole at or behind `offset`, which is below `size`. The last hole
    /// begins at `size`.
    pub(crate) async fn seek_hole(
        self: &Arc<Self>,
        inode: &Inode,
        offset: u64,
        size: u64,
    ) -> Result<u64> {
        let stripes = inode.placed().stripes;
        let first = AtomicU64::new(size);
        let walks = chains(&stripes)
            .into_iter()
            .map(|c| self.first_hole(inode, &stripes, c, offset, &first));
        try_join_all(walks).await?;
        Ok(first.into_inner().max(offset))
    }

    /// Lowers `first` to the first hole on one chain. Looks no further than `first`.
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
        // Everything before `at` is data.
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
}
