//! Making holes. See `docs/client.md`.

use futures_util::future::BoxFuture;
use std::{collections::BTreeSet, ops::Range, sync::Arc};

use futures_util::{
    future::join_all,
    stream::{self, StreamExt},
};
use strake_proto::{
    ChainId, ChunkId, Result, SessionId,
    data::FLAG_STABLE,
    layout::{Piece, StripeMap},
};

use crate::{
    data::{
        buffers::Content,
        holes::{PAGE, block_of, chains},
    },
    handover::operation::Operation,
    inode::Inode,
    write::{service::Updates, updates::Numbers},
};

/// How many chunks are punched at a time.
const PUNCHES_AT_ONCE: usize = 8;

impl Updates {
    /// Makes a range zeros without stored blocks, on all chains. The caller holds the range's lock.
    pub(crate) async fn punch_range(
        self: &Arc<Self>,
        inode: &Arc<Inode>,
        range: Range<u64>,
        stable: bool,
        operation: Option<&Operation>,
    ) -> Result<()> {
        let stripes = inode.placed().stripes;
        // One number for all chunks, each of which remembers it. A repetition after a restart of
        // the mount may find other chunks, and requests of the last daemon may arrive late.
        let numbers = Numbers { operation, only: None };
        let (cap, seq) = self.data_numbers(inode, 1, numbers).await?;
        let number = (cap.session, seq);
        let punch = |chain| self.punch_chain(inode, &stripes, chain, range.clone(), stable, number);
        let punches = chains(&stripes).into_iter().map(punch);
        join_all(punches).await.into_iter().collect()
    }

    /// Chunks without data need no punch, unless unstable bytes of this client may be written to
    /// them again.
    fn punch_chain<'a>(
        self: &'a Arc<Self>,
        inode: &'a Arc<Inode>,
        stripes: &'a StripeMap,
        chain: ChainId,
        range: Range<u64>,
        stable: bool,
        number: (SessionId, u64),
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let last = stripes.locate(range.end - 1).0.chunk.index;
            let mut from = block_of(stripes, range.start);
            let unstable = self.unstable.lock().chunks_of(chain, inode.ino);
            let mut wanted: BTreeSet<u64> =
                unstable.into_iter().filter(|i| (from.0..=last).contains(i)).collect();
            loop {
                let page = self.storage.extents(inode, stripes, chain, from, PAGE).await?;
                wanted.extend(page.found.iter().map(|e| e.index).filter(|i| *i <= last));
                let next = page.next.filter(|n| n.0 <= last);
                // The last chunk may continue on the next page: then it is punched with that page.
                let rest = next.map_or_else(BTreeSet::new, |n| wanted.split_off(&n.0));
                let punches = std::mem::replace(&mut wanted, rest).into_iter();
                let pieces: Vec<Piece> =
                    punches.filter_map(|i| piece(stripes, chain, i, &range)).collect();
                let flags = if stable { FLAG_STABLE } else { 0 };
                let punch = |p: Piece| {
                    self.write_piece(inode, p, Content::Hole(p.len), flags, number, None, None)
                };
                // Waits for all, even if one fails: none may arrive after the range lock is
                // released.
                let done: Vec<Result<()>> = stream::iter(pieces)
                    .map(punch)
                    .buffer_unordered(PUNCHES_AT_ONCE)
                    .collect()
                    .await;
                done.into_iter().collect::<Result<()>>()?;
                match next {
                    Some(n) => from = n,
                    None => return Ok(()),
                }
            }
        })
    }
}

/// The part of a file range that lies in a chunk.
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
    use crate::data::holes::file_offset;

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
