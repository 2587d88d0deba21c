//! Where each byte of a file lies: pure arithmetic over a layout and the cluster map.
//!
//! A file is divided into stripes of `stripe_size`, distributed round-robin over the component's
//! chains. A stripe is one chunk, or several of at most 16 MiB when it is larger. Chunk indices
//! grow with the offset in the file, so "everything beyond a size" is a range of indices on every
//! chain.

use crate::{ChainId, ChunkId, Code, Error, Ino, Result, map::MapView, pb};

/// Stripe sizes are multiples of this (Lustre's LOV_MIN_STRIPE_SIZE).
pub const STRIPE_UNIT: u32 = 64 << 10;
/// Bytes of the largest chunk.
pub const MAX_CHUNK: u64 = 16 << 20;
/// Bytes of a stripe where nobody chose otherwise.
pub const DEFAULT_STRIPE_SIZE: u32 = 4 << 20;
/// Lustre's LOV_MAX_STRIPE_COUNT.
pub const MAX_STRIPES: usize = 2000;
/// Largest file: chunk arithmetic stays far from overflow and offsets fit the kernel's signed type.
pub const MAX_FILE_SIZE: u64 = 1 << 50;
/// The end of a component that has none.
pub const EOF: u64 = u64::MAX;

/// A layout with its chains resolved, ready for arithmetic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripeMap {
    /// The file.
    pub ino: Ino,
    /// Its data.
    pub data: u64,
    /// Bytes.
    pub stripe_size: u64,
    /// The chain of each stripe; the next stripe has the first one again.
    pub chains: Vec<ChainId>,
}

/// A piece of a file that lies in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The chunk that it lies in.
    pub chunk: ChunkId,
    /// The chunk's chain.
    pub chain: ChainId,
    /// Bytes from the start of the chunk.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
    /// Bytes from the start of the file.
    pub file_offset: u64,
}

/// What truncation to a size removes on every chain: chunks from `first_gone` on are removed, chunk
/// `first_gone - 1` keeps `kept` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Index of the first chunk that is removed.
    pub first_gone: u64,
    /// `u32::MAX`: chunk `first_gone - 1` is kept as it is.
    pub kept: u32,
}

impl StripeMap {
    /// `EINVAL` for a layout that no mds of this version makes, `EIO` for one that names chains
    /// missing in the map.
    pub fn resolve(ino: Ino, layout: &pb::Layout, map: &MapView) -> Result<StripeMap> {
        let [c] = &layout.components[..] else {
            return Err(Error::new(
                Code::OpNotSupp,
                "composite layouts are not supported by this version",
            ));
        };
        if c.pattern != 0 || c.start != 0 || c.end != EOF {
            return Err(Error::new(
                Code::OpNotSupp,
                "this layout pattern is not supported by this version",
            ));
        }
        if c.stripe_size == 0 || !c.stripe_size.is_multiple_of(STRIPE_UNIT) {
            return Err(Error::new(
                Code::Inval,
                format!("stripe size {} is not a multiple of 64 KiB", c.stripe_size),
            ));
        }
        let chains = match &c.set {
            None => c.chains.clone(),
            Some(s) => {
                let set = map
                    .set(s.set)
                    .ok_or_else(|| Error::new(Code::Io, format!("chain set {} unknown", s.set)))?;
                set_members(&set.chains, s.seed, s.start, s.count)
            }
        };
        if chains.is_empty() || chains.len() > MAX_STRIPES {
            return Err(Error::new(Code::Inval, format!("a layout of {} stripes", chains.len())));
        }
        Ok(StripeMap { ino, data: c.data_id, stripe_size: u64::from(c.stripe_size), chains })
    }

    fn chunks_per_stripe(&self) -> u64 {
        self.stripe_size.div_ceil(MAX_CHUNK)
    }

    /// The chunk that holds a byte, and the file offset at which that chunk's bytes end.
    pub fn locate(&self, offset: u64) -> (Piece, u64) {
        let stripe = offset / self.stripe_size;
        let within = offset % self.stripe_size;
        let sub = within / MAX_CHUNK;
        // Saturating: an offset may come from a peer and lie beyond every file.
        let start = stripe * self.stripe_size;
        let end =
            start.saturating_add((sub + 1) * MAX_CHUNK).min(start.saturating_add(self.stripe_size));
        let piece = Piece {
            chunk: ChunkId {
                ino: self.ino,
                data: self.data,
                index: stripe * self.chunks_per_stripe() + sub,
            },
            chain: self.chains[(stripe % self.chains.len() as u64) as usize],
            offset: (within - sub * MAX_CHUNK) as u32,
            len: 0,
            file_offset: offset,
        };
        (piece, end)
    }

    /// The pieces of `[offset, offset + len)` in order of the file.
    pub fn split(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + '_ {
        let end = offset.saturating_add(len).min(MAX_FILE_SIZE);
        let mut at = offset;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (mut piece, chunk_end) = self.locate(at);
            piece.len = (chunk_end.min(end) - at) as u32;
            at += u64::from(piece.len);
            Some(piece)
        })
    }

    /// The file offset of a chunk's first byte, and how many bytes belong in the chunk. `None` for
    /// a chunk beyond every file.
    pub fn place_of(&self, index: u64) -> Option<(u64, u64)> {
        let k = self.chunks_per_stripe();
        let (stripe, sub) = (index / k, index % k);
        let start = stripe.checked_mul(self.stripe_size)?.checked_add(sub * MAX_CHUNK)?;
        (start < MAX_FILE_SIZE).then(|| (start, MAX_CHUNK.min(self.stripe_size - sub * MAX_CHUNK)))
    }

    /// The first chunk after `index` on the same chain, by the layout alone.
    pub fn next_on_chain(&self, index: u64) -> u64 {
        let (k, chain) = (self.chunks_per_stripe(), self.chain_of(index));
        let next = index.saturating_add(1);
        if !next.is_multiple_of(k) {
            return next;
        }
        // A chain may be in the layout more than once.
        let after = next / k;
        let n = self.chains.len() as u64;
        let on = |s: &u64| self.chains[(s % n) as usize] == chain;
        (after..after.saturating_add(n)).find(on).unwrap_or(after).saturating_mul(k)
    }

    /// The first chunk from `index` on that lies on a chain of the layout.
    pub fn first_on_chain(&self, index: u64, chain: ChainId) -> u64 {
        let (k, n) = (self.chunks_per_stripe(), self.chains.len() as u64);
        if self.chain_of(index) == chain {
            return index;
        }
        let after = (index / k).saturating_add(1);
        let on = |s: &u64| self.chains[(s % n) as usize] == chain;
        (after..after.saturating_add(n)).find(on).unwrap_or(after).saturating_mul(k)
    }

    /// The chain of a chunk.
    pub fn chain_of(&self, index: u64) -> ChainId {
        self.chains[((index / self.chunks_per_stripe()) % self.chains.len() as u64) as usize]
    }

    /// What truncating the file to `size` removes.
    pub fn cut(&self, size: u64) -> Cut {
        let (piece, _) = self.locate(size);
        if piece.offset == 0 {
            Cut { first_gone: piece.chunk.index, kept: u32::MAX }
        } else {
            Cut { first_gone: piece.chunk.index + 1, kept: piece.offset }
        }
    }
}

/// `count` chains of a set: the set's members in a seeded order (seed 0: their own order), from
/// position `start`, wrapping around. The order is a Fisher-Yates shuffle driven by SplitMix64,
/// from the last position down.
pub fn set_members(chains: &[ChainId], seed: u64, start: u32, count: u32) -> Vec<ChainId> {
    if chains.is_empty() {
        return Vec::new();
    }
    let mut order = chains.to_vec();
    if seed != 0 {
        let mut state = seed;
        for i in (1..order.len()).rev() {
            order.swap(i, (splitmix64(&mut state) % (i as u64 + 1)) as usize);
        }
    }
    (0..(count as usize).min(MAX_STRIPES))
        .map(|i| order[(start as usize + i) % order.len()])
        .collect()
}

/// SplitMix64 (Steele, Lea, Flood 2014): the only generator that placement may use.
pub fn splitmix64(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn map(stripe: u64, n: u32) -> StripeMap {
        StripeMap { ino: 9, data: 1, stripe_size: stripe, chains: (0..n).collect() }
    }

    #[test]
    fn the_shuffle_is_fixed_for_ever() {
        let chains: Vec<u32> = (0..8).collect();
        assert_eq!(set_members(&chains, 0, 6, 4), vec![6, 7, 0, 1]);
        assert_eq!(set_members(&chains, 1, 0, 8), set_members(&chains, 1, 0, 8));
        let mut state = 1234567;
        // Reference outputs of SplitMix64 for seed 1234567.
        assert_eq!(splitmix64(&mut state), 6_457_827_717_110_365_317);
        assert_eq!(splitmix64(&mut state), 3_203_168_211_198_807_973);
    }

    #[test]
    fn layouts_that_cannot_be_served_are_refused() {
        let map = MapView::default();
        let good = pb::Component {
            end: EOF,
            stripe_size: STRIPE_UNIT,
            chains: vec![1],
            ..Default::default()
        };
        let resolve = |components| {
            let layout = pb::Layout { generation: 1, components, drafts: 0 };
            StripeMap::resolve(1, &layout, &map).map(drop).map_err(|e| e.code)
        };
        assert_eq!(resolve(vec![good.clone()]), Ok(()));
        for pattern in [1, 2, 77] {
            assert_eq!(
                resolve(vec![pb::Component { pattern, ..good.clone() }]),
                Err(Code::OpNotSupp)
            );
        }
        assert_eq!(resolve(vec![]), Err(Code::OpNotSupp));
        assert_eq!(resolve(vec![good.clone(), good.clone()]), Err(Code::OpNotSupp));
        assert_eq!(resolve(vec![pb::Component { start: 1, ..good.clone() }]), Err(Code::OpNotSupp));
        assert_eq!(
            resolve(vec![pb::Component { stripe_size: 1, ..good.clone() }]),
            Err(Code::Inval)
        );
        assert_eq!(
            resolve(vec![pb::Component { chains: vec![], ..good.clone() }]),
            Err(Code::Inval)
        );
        let set = Some(pb::ChainSetRef { set: 5, count: 1, ..Default::default() });
        assert_eq!(resolve(vec![pb::Component { set, ..good }]), Err(Code::Io));
    }

    #[test]
    fn large_stripes_are_cut_into_chunks_of_at_most_16_mib() {
        let m = map(40 << 20, 2);
        let pieces: Vec<Piece> = m.split(0, 80 << 20).collect();
        let lens: Vec<u64> = pieces.iter().map(|p| u64::from(p.len) >> 20).collect();
        assert_eq!(lens, vec![16, 16, 8, 16, 16, 8]);
        assert_eq!(pieces.iter().map(|p| p.chain).collect::<Vec<_>>(), vec![0, 0, 0, 1, 1, 1]);
    }

    #[test]
    fn offsets_beyond_every_file_do_no_harm() {
        for stripe in [u64::from(STRIPE_UNIT), 4 << 20, 40 << 20, u64::from(u32::MAX - 65_535)] {
            let m = map(stripe, 3);
            for offset in [MAX_FILE_SIZE, u64::MAX - 1, u64::MAX] {
                let (piece, end) = m.locate(offset);
                assert!(end >= offset && m.chain_of(piece.chunk.index) == piece.chain);
                assert_eq!(m.split(offset, u64::MAX).count(), 0);
                assert!(m.cut(offset).first_gone >= piece.chunk.index);
            }
        }
    }

    proptest! {
        #[test]
        fn pieces_tile_the_range(units in 1u64..800, n in 1u32..9, offset in 0u64..(1 << 40), len in 0u64..(200 << 20)) {
            let m = map(units * u64::from(STRIPE_UNIT), n);
            let mut at = offset;
            let mut last = None;
            for p in m.split(offset, len) {
                prop_assert_eq!(p.file_offset, at);
                prop_assert!(p.len > 0 && u64::from(p.offset) + u64::from(p.len) <= MAX_CHUNK);
                prop_assert_eq!(m.chain_of(p.chunk.index), p.chain);
                prop_assert!(last.is_none_or(|l| l < p.chunk.index), "indices grow with the offset");
                last = Some(p.chunk.index);
                at += u64::from(p.len);
            }
            prop_assert_eq!(at, offset + len);
        }

        #[test]
        fn the_place_of_a_chunk_is_where_its_bytes_are(units in 1u64..800, n in 1u32..6, offset in 0u64..(1 << 40)) {
            let chains = (0..n).chain(0..n / 2).collect();
            let m = StripeMap { chains, ..map(units * u64::from(STRIPE_UNIT), 1) };
            let (p, end) = m.locate(offset);
            let (start, len) = m.place_of(p.chunk.index).unwrap();
            prop_assert_eq!((start + u64::from(p.offset), start + len), (offset, end));
            let next = m.next_on_chain(p.chunk.index);
            prop_assert!(next > p.chunk.index && m.chain_of(next) == p.chain);
            prop_assert!((p.chunk.index + 1..next).all(|i| m.chain_of(i) != p.chain));
            for c in 0..n {
                let first = m.first_on_chain(p.chunk.index, c);
                prop_assert!(first >= p.chunk.index && m.chain_of(first) == c);
                prop_assert!((p.chunk.index..first).all(|i| m.chain_of(i) != c));
            }
        }

        #[test]
        fn a_cut_keeps_exactly_what_lies_below(units in 1u64..800, size in 0u64..(1 << 34), probe in 0u64..(1 << 34)) {
            let m = map(units * u64::from(STRIPE_UNIT), 3);
            let cut = m.cut(size);
            let (p, _) = m.locate(probe);
            let gone = p.chunk.index >= cut.first_gone || (p.chunk.index + 1 == cut.first_gone && p.offset >= cut.kept);
            prop_assert_eq!(gone, probe >= size);
        }
    }
}
