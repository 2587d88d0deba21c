//! Checks whether there is space for more bytes of a file.

use std::{collections::BTreeMap, sync::Arc};

use strake_proto::{ChainId, Code, Error, Result, TargetId, layout::StripeMap, map::MapView, pb};

use crate::{api::space::Space, core::Core, inode::Inode};

/// How many of `new` bytes of a range lie on each chain.
fn shares(stripes: &StripeMap, offset: u64, len: u64, new: u64) -> BTreeMap<ChainId, u64> {
    let mut of = BTreeMap::<ChainId, u64>::new();
    let row = stripes.stripe_size.saturating_mul(stripes.chains.len() as u64);
    let mut add = |chain, n: u64| {
        let sum = of.entry(chain).or_default();
        *sum = sum.saturating_add(n);
    };
    // Whole rows of stripes are spread evenly.
    let rows = len / row;
    stripes.chains.iter().for_each(|c| add(*c, rows.saturating_mul(stripes.stripe_size)));
    stripes.split(offset, len % row).for_each(|p| add(p.chain, u64::from(p.len)));
    let part = |n: u64| {
        u64::try_from(u128::from(n) * u128::from(new) / u128::from(len.max(1))).unwrap_or(u64::MAX)
    };
    of.into_iter().map(|(c, n)| (c, part(n))).collect()
}

/// The reason why so many more bytes of each chain do not fit, if they do not.
fn lacking(map: &MapView, of: &BTreeMap<ChainId, u64>, space: &[pb::TargetSpace]) -> Option<Error> {
    let mut wanted = BTreeMap::<TargetId, u64>::new();
    for (chain, n) in of.iter().filter_map(|(c, n)| Some((map.chain(*c)?, n))) {
        for r in &chain.replicas {
            let sum = wanted.entry(r.target).or_default();
            *sum = sum.saturating_add(*n);
        }
    }
    let (t, n) = wanted
        .iter()
        .filter_map(|(t, n)| Some((space.iter().find(|s| s.target == *t)?, *n)))
        .find(|(t, n)| *n > t.free)?;
    let m =
        format!("{n} more bytes would be needed on target {}, which has {} free", t.target, t.free);
    Some(Error::new(Code::NoSpc, m))
}

/// `ENOSPC` if the range does not fit on the chains of the file, see [`super::File::check_room`].
pub(super) async fn check_room(
    core: &Arc<Core>,
    inode: &Arc<Inode>,
    offset: u64,
    len: u64,
) -> Result<()> {
    let space = Space { core };
    core.writeback.send_held(inode).await;
    let size = core.files.fresh_size(inode).await?;
    let overlap = size.min(offset.saturating_add(len)).saturating_sub(offset);
    let there = match overlap {
        0 => 0,
        n if inode.may_have_holes() => n.min(space.allocated(inode.ino).await?),
        n => n,
    };
    let of = shares(&inode.placed().stripes, offset, len, len - there);
    if of.values().all(|n| *n == 0) {
        return Ok(());
    }
    let known = space.statfs(&pb::Creds::default(), "").await?;
    lacking(&core.shared.map(), &of, &known.targets).map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stripes(chains: &[ChainId]) -> StripeMap {
        StripeMap { ino: 1, data: 2, stripe_size: 1 << 20, chains: chains.to_vec() }
    }

    #[test]
    fn rows_are_even_and_the_rest_is_where_it_lies() {
        const MIB: u64 = 1 << 20;
        let of = |offset, len, new| {
            shares(&stripes(&[7, 8, 9]), offset, len, new).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(of(0, 3 * MIB, 3 * MIB), [(7, MIB), (8, MIB), (9, MIB)]);
        assert_eq!(of(MIB, MIB + 5, MIB + 5), [(7, 0), (8, MIB), (9, 5)]);
        assert_eq!(of(0, 7 * MIB, 7 * MIB), [(7, 3 * MIB), (8, 2 * MIB), (9, 2 * MIB)]);
        assert_eq!(of(0, 6 * MIB, 3 * MIB), [(7, MIB), (8, MIB), (9, MIB)], "half of it is there");
        assert_eq!(of(0, 6 * MIB, 0), [(7, 0), (8, 0), (9, 0)]);
        assert_eq!(shares(&stripes(&[7, 7]), 0, 1 << 50, 1 << 50), BTreeMap::from([(7, 1 << 50)]));
        // The largest range there can be: sums must not overflow.
        assert!(of(0, u64::MAX, u64::MAX).iter().all(|(_, n)| *n > u64::MAX / 4));
    }

    #[test]
    fn each_copy_needs_its_place() {
        let chain = |id, targets: &[TargetId]| pb::Chain {
            id,
            epoch: 1,
            replicas: targets
                .iter()
                .map(|t| pb::Replica { target: *t, state: pb::ReplicaState::ReplicaServing as i32 })
                .collect(),
            ..Default::default()
        };
        let targets = (1..=3)
            .map(|id| pb::Target {
                id,
                node: 1000 + id,
                uuid: vec![id as u8; 16].into(),
                ..Default::default()
            })
            .collect();
        let map = pb::ClusterMap {
            chains: vec![chain(7, &[1, 2]), chain(8, &[2, 3])],
            targets,
            ..Default::default()
        };
        let map = MapView::new(map).unwrap();
        let space = |free: [u64; 3]| {
            (1..=3)
                .map(|t| pb::TargetSpace {
                    target: t,
                    free: free[t as usize - 1],
                    ..Default::default()
                })
                .collect::<Vec<_>>()
        };
        let of = BTreeMap::from([(7, 10), (8, 20)]);
        assert_eq!(lacking(&map, &of, &space([10, 30, 20])), None);
        for short in [[9, 30, 20], [10, 29, 20], [10, 30, 19]] {
            let e = lacking(&map, &of, &space(short)).unwrap();
            assert!(e.code == Code::NoSpc && e.message.contains("free"), "{e}");
        }
        // Unknown chains and targets cause no error.
        assert_eq!(lacking(&map, &BTreeMap::from([(99, 1)]), &space([0; 3])), None);
        assert_eq!(lacking(&map, &of, &[]), None);
    }
}
