//! Which chunks of a file may be on which chains, in the 29 bits that a capability has for it.
//!
//! The mds puts it into each capability, and an oss refuses chunks elsewhere. For files of one
//! stripe, of few stripes, or along a chain set it is exact; for others it is a mask. Older storage
//! servers ignore the bits.

use crate::{
    ChainId,
    layout::{MAX_CHUNK, MAX_FILE_SIZE, STRIPE_UNIT, StripeMap, set_members},
    map::MapView,
    pb,
};

/// No file has chunks from this index on, whatever its layout.
const MAX_INDEX: u64 = MAX_FILE_SIZE / STRIPE_UNIT as u64;
/// Bits of a bound without its form.
const BITS: u32 = 26;
const CHAIN_BITS: u32 = 20;
const SET_BITS: u32 = 4;
const PLACE_BITS: u32 = 11;
/// Number of stripes that a list may have.
const LIST: std::ops::RangeInclusive<u32> = 2..=4;
/// Values of the form. 3 to 5 are lists of 2 to 4 chains.
const ONE: u32 = 1;
const SET: u32 = 2;
const MASK: u32 = 6;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Bound {
    /// Not given: by an older metadata server, or because it does not know the layout.
    #[default]
    Any,
    /// All on one chain, with indices below 2 to the power of `bits`.
    One {
        /// The chain.
        chain: ChainId,
        /// Limits the indices.
        bits: u32,
    },
    /// Chunk `i` on member `start + i % count` of a chain set, wrapping.
    Set {
        /// The id of the chain set.
        set: u32,
        /// The member with the first chunk.
        start: u32,
        /// Number of stripes.
        count: u32,
    },
    /// Chunk `i` on chain `i % count` of a list of 2 to 4.
    List {
        /// Number of stripes.
        count: u32,
        /// Their chains; those beyond `count` are 0.
        chains: [ChainId; 4],
    },
    /// All on chains whose number modulo 26 has its bit set here.
    Mask(u32),
}

/// Whether a chunk may be on a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fits {
    /// It may.
    Yes,
    /// It cannot be there.
    No,
    /// The map does not have the chain set yet.
    Unknown,
}

fn fits(is: bool) -> Fits {
    if is { Fits::Yes } else { Fits::No }
}

fn low(bits: u32) -> u32 {
    (1 << bits) - 1
}

impl Bound {
    /// The bound of a file with this layout. [`Bound::Any`] for a layout that this version does not
    /// know.
    pub fn of(layout: &pb::Layout, map: &MapView) -> Bound {
        let [c] = &layout.components[..] else { return Bound::Any };
        // One stripe is one chunk: then the chain follows from the index alone.
        let whole = u64::from(c.stripe_size) <= MAX_CHUNK;
        if let (Some(s), true) = (&c.set, whole)
            && s.seed == 0
            && let Some(b) = along(s.set, s.start, s.count)
        {
            return b;
        }
        let Ok(stripes) = StripeMap::resolve(0, layout, map) else { return Bound::Any };
        let chains = &stripes.chains[..];
        let mask = Bound::Mask(chains.iter().fold(0, |m, c| m | 1 << (c % BITS)));
        if chains.iter().all(|c| *c == chains[0]) && chains[0] <= low(CHAIN_BITS) {
            let last = stripes.locate(MAX_FILE_SIZE - 1).0.chunk.index;
            return Bound::One { chain: chains[0], bits: u64::BITS - last.leading_zeros() };
        }
        if !whole {
            return mask;
        }
        let count = chains.len() as u32;
        if LIST.contains(&count) && chains.iter().all(|c| *c <= low(BITS / count)) {
            let mut list = [0; 4];
            list[..chains.len()].copy_from_slice(chains);
            return Bound::List { count, chains: list };
        }
        let sets = map.map.sets.iter().filter(|s| s.copies == c.copies);
        let first =
            sets.filter_map(|s| Some((s, s.chains.iter().position(|c| *c == chains[0])? as u32)));
        let is_along =
            |(s, at): &(&pb::ChainSet, u32)| set_members(&s.chains, 0, *at, count) == chains;
        first.filter(is_along).find_map(|(s, at)| along(s.id, at, count)).unwrap_or(mask)
    }

    /// Whether a file with this bound may have its chunk `index` on a chain; without an index,
    /// whether it may have any chunk there.
    pub fn fits(self, chain: ChainId, index: Option<u64>, map: &MapView) -> Fits {
        let below = |bits: u32| index.is_none_or(|i| i.checked_shr(bits).unwrap_or(0) == 0);
        let known = index.is_none_or(|i| i < MAX_INDEX);
        let turn = |count: u32| index.map(|i| (i % u64::from(count)) as usize);
        match self {
            Bound::Any => Fits::Yes,
            Bound::One { chain: own, bits } => fits(chain == own && below(bits)),
            Bound::Mask(mask) => fits(known && mask >> (chain % BITS) & 1 == 1),
            Bound::List { count, chains } => {
                let chains = &chains[..count as usize];
                fits(known && turn(count).map_or(chains.contains(&chain), |at| chains[at] == chain))
            }
            Bound::Set { set, start, count } => {
                let Some(set) = map.set(set).filter(|s| !s.chains.is_empty()) else {
                    return Fits::Unknown;
                };
                let member = |at: usize| set.chains[(start as usize + at) % set.chains.len()];
                let any = || (0..count as usize).any(|at| member(at) == chain);
                fits(known && turn(count).map_or_else(any, |at| member(at) == chain))
            }
        }
    }

    /// Encodes it in the lowest 29 bits.
    pub fn encode(self) -> u32 {
        let (form, rest) = match self {
            Bound::Any => (0, 0),
            Bound::One { chain, bits } => (ONE, chain & low(CHAIN_BITS) | bits << CHAIN_BITS),
            Bound::Set { set, start, count } => {
                (SET, set | start << SET_BITS | count << (SET_BITS + PLACE_BITS))
            }
            Bound::List { count, chains } => {
                let each = BITS / count;
                (count + 1, (0..count).fold(0, |all, i| all | chains[i as usize] << (i * each)))
            }
            Bound::Mask(mask) => (MASK, mask),
        };
        form | (rest & low(BITS)) << 3
    }

    /// Reads what [`Bound::encode`] wrote. An unknown form is [`Bound::Any`].
    pub fn decode(word: u32) -> Bound {
        let (form, rest) = (word & 7, word >> 3 & low(BITS));
        match form {
            ONE => Bound::One { chain: rest & low(CHAIN_BITS), bits: rest >> CHAIN_BITS },
            SET => {
                let (set, start) = (rest & low(SET_BITS), rest >> SET_BITS & low(PLACE_BITS));
                along(set, start, rest >> (SET_BITS + PLACE_BITS)).unwrap_or(Bound::Mask(0))
            }
            MASK => Bound::Mask(rest),
            0 => Bound::Any,
            7 => Bound::Mask(0),
            _ => {
                let count = form - 1;
                let each = BITS / count;
                let mut chains = [0; 4];
                (0..count).for_each(|i| chains[i as usize] = rest >> (i * each) & low(each));
                Bound::List { count, chains }
            }
        }
    }
}

/// A bound along a set, if the numbers are small enough.
fn along(set: u32, start: u32, count: u32) -> Option<Bound> {
    let small =
        set <= low(SET_BITS) && start <= low(PLACE_BITS) && (1..=low(PLACE_BITS)).contains(&count);
    small.then_some(Bound::Set { set, start, count })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::EOF;

    fn map() -> MapView {
        let set =
            pb::ChainSet { id: 3, copies: 1, chains: (100..120).collect(), ..Default::default() };
        MapView::new(pb::ClusterMap { sets: vec![set], ..Default::default() }).unwrap()
    }

    fn layout(units: u32, chains: &[ChainId], set: Option<pb::ChainSetRef>) -> pb::Layout {
        let stripe_size = units * STRIPE_UNIT;
        let c = pb::Component {
            end: EOF,
            stripe_size,
            copies: 1,
            chains: chains.to_vec(),
            set,
            ..Default::default()
        };
        pb::Layout { generation: 1, components: vec![c], drafts: 0 }
    }

    #[test]
    fn each_layout_has_the_tightest_form_that_it_fits_in() {
        let map = map();
        let of = |units, chains: &[ChainId]| Bound::of(&layout(units, chains, None), &map);
        // 2^50 bytes in stripes of 64 KiB, of 4 MiB, and of 17 MiB (two chunks each).
        assert_eq!(of(1, &[9]), Bound::One { chain: 9, bits: 34 });
        assert_eq!(of(64, &[9, 9]), Bound::One { chain: 9, bits: 28 });
        assert_eq!(of(272, &[9]), Bound::One { chain: 9, bits: 27 });
        assert_eq!(of(64, &[9, 7]), Bound::List { count: 2, chains: [9, 7, 0, 0] });
        assert_eq!(of(64, &[9, 7, 1, 9]), Bound::List { count: 4, chains: [9, 7, 1, 9] });
        let along: Vec<_> = (104..112).collect();
        assert_eq!(of(64, &along), Bound::Set { set: 3, start: 4, count: 8 });
        assert_eq!(of(64, &[1, 27, 2, 3, 4, 5]), Bound::Mask(0b11_1110));
        assert_eq!(of(272, &[9, 7]), Bound::Mask(1 << 9 | 1 << 7));
        assert_eq!(of(64, &[1 << 20]), Bound::Mask(1 << ((1 << 20) % BITS)));
        let set = |set, seed| Some(pb::ChainSetRef { set, seed, start: 19, count: 17 });
        assert_eq!(
            Bound::of(&layout(64, &[], set(3, 0)), &map),
            Bound::Set { set: 3, start: 19, count: 17 }
        );
        assert!(matches!(Bound::of(&layout(64, &[], set(3, 5)), &map), Bound::Mask(_)));
        assert_eq!(Bound::of(&pb::Layout::default(), &map), Bound::Any);
        assert_eq!(Bound::Set { set: 9, start: 0, count: 1 }.fits(1, Some(0), &map), Fits::Unknown);
    }

    #[test]
    fn what_no_server_makes_lets_nothing_in() {
        // A form of a later version; a set without members.
        for word in [7, SET | 3 << 3] {
            assert_eq!(Bound::decode(word), Bound::Mask(0));
        }
    }

    proptest! {
        #[test]
        fn own_chunks_fit_and_others_do_not(
            units in 1u32..600,
            chains in prop::collection::vec(0u32..64, 1..7),
            offset in 0u64..MAX_FILE_SIZE,
            other in 0u32..64,
            wide in 1u32..40,
            start in 0u32..20,
            seed in 0u64..2,
        ) {
            let map = map();
            let set = pb::ChainSetRef { set: 3, seed, start, count: wide };
            for l in [layout(units, &chains, None), layout(units, &[], Some(set))] {
                let b = Bound::of(&l, &map);
                prop_assert!(b.encode() < 1 << 29);
                prop_assert_eq!(Bound::decode(b.encode()), b);
                let s = StripeMap::resolve(1, &l, &map).unwrap();
                let (p, _) = s.locate(offset);
                prop_assert_eq!(b.fits(p.chain, Some(p.chunk.index), &map), Fits::Yes);
                prop_assert_eq!(b.fits(p.chain, None, &map), Fits::Yes);
                if let Bound::Mask(_) = b {
                    continue;
                }
                let is = s.chain_of(p.chunk.index) == other;
                prop_assert_eq!(b.fits(other, Some(p.chunk.index), &map), fits(is));
                prop_assert_eq!(b.fits(other, None, &map), fits(s.chains.contains(&other)));
            }
        }

        #[test]
        fn no_chunk_beyond_every_file_fits(units in 1u32..600, chains in prop::collection::vec(0u32..64, 1..7)) {
            let map = map();
            let l = layout(units, &chains, None);
            let b = Bound::of(&l, &map);
            for index in [MAX_INDEX, 1 << 40, u64::MAX] {
                prop_assert!(chains.iter().all(|c| b.fits(*c, Some(index), &map) == Fits::No));
            }
        }
    }
}
