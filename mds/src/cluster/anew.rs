//! Chains that hold nothing. When all replicas of a chain that were in sync are gone and no file
//! has data there, nothing is lost: the chain begins anew, with blank replicas. Pure functions.
//! `docs/replication.md`, "Chains without data", says why this proves it:
//!
//! Every change of a chain gives it a new epoch. So a chain that no replica serves at an epoch
//! stays unserved until its next epoch. Meanwhile no file gets the chain (`namespace::placement`
//! gives files only chains that are served), and no write is acknowledged there. So what the leader
//! finds when it reads all files at that epoch holds until the next one; and the log entry with
//! which the chain begins anew either makes that next epoch, or is refused.

use std::collections::{BTreeMap, BTreeSet};

use pb::ReplicaState::{ReplicaLastsrv, ReplicaOffline, ReplicaServing};
use strake_proto::{
    ChainId, Code, Error, Result, TargetId,
    layout::StripeMap,
    map::{ChainExt, MapView},
    pb,
};

use super::{
    domains::Domains,
    recovery,
    rows::Membership,
    state::{check_chain, commit},
};

/// Most chains in one log entry.
pub(crate) const AT_ONCE: usize = 256;

/// Chains that no replica serves, and whose in-sync replicas are all gone for good or long dead.
pub(crate) fn stranded(map: &pb::ClusterMap, dead: &BTreeSet<TargetId>) -> Vec<ChainId> {
    let targets: BTreeMap<TargetId, &pb::Target> = map.targets.iter().map(|t| (t.id, t)).collect();
    let open = recovery::in_doubt(map);
    let gone = |r: &pb::Replica| {
        r.state() != ReplicaLastsrv
            || targets
                .get(&r.target)
                .is_none_or(|t| !t.alive && (t.given_up || dead.contains(&t.id)))
    };
    let is =
        |c: &&pb::Chain| c.head().is_none() && !open.contains(&c.id) && c.replicas.iter().all(gone);
    map.chains.iter().filter(is).map(|c| c.id).collect()
}

/// Those of `chains` on which this file has data by the state, or may have data: it was written
/// there and not truncated, or it is not known yet how far it was written. A file that is open for
/// writing may have bytes that its writer has not reported yet.
pub(crate) fn held(
    map: &MapView,
    ino: u64,
    r: &pb::InodeRecord,
    chains: &BTreeSet<ChainId>,
) -> BTreeSet<ChainId> {
    let Some(layout) = &r.layout else { return BTreeSet::new() };
    let Ok(stripes) = StripeMap::resolve(ino, layout, map) else {
        // A layout that this program cannot read may name any chain.
        return chains.clone();
    };
    let open_end = r.writers > 0 || r.surplus || r.fence != 0;
    let size = r.attr.as_ref().map_or(u64::MAX, |a| a.size);
    let reached = |at: usize| open_end || (at as u64).saturating_mul(stripes.stripe_size) < size;
    let all = stripes.chains.iter().enumerate();
    all.filter(|(at, c)| chains.contains(c) && reached(*at)).map(|(_, c)| *c).collect()
}

/// How many copies a chain is made for.
fn copies(map: &pb::ClusterMap, c: &pb::Chain) -> usize {
    let of_set = map.sets.iter().find(|s| s.chains.contains(&c.id)).map(|s| s.copies as usize);
    of_set.unwrap_or(c.preferred.len())
}

/// Where chains can begin anew.
pub(crate) struct Homes<'a> {
    map: &'a pb::ClusterMap,
    domains: Domains<'a>,
    /// How many chains each target is to have.
    has: BTreeMap<TargetId, usize>,
}

impl<'a> Homes<'a> {
    pub(crate) fn new(map: &'a pb::ClusterMap) -> Homes<'a> {
        let mut has = BTreeMap::new();
        map.chains.iter().flat_map(|c| &c.preferred).for_each(|t| *has.entry(*t).or_default() += 1);
        Homes { map, domains: Domains::new(map), has }
    }

    /// The chain with new replicas: its own targets where possible, others for the rest. `blank`:
    /// whether a target holds nothing of this chain, and knows that it must accept nothing of it.
    /// `None`: there are too few targets.
    pub(crate) fn of(
        &mut self,
        chain: ChainId,
        blank: impl Fn(TargetId, &pb::Chain) -> bool,
    ) -> Option<pb::Chain> {
        let c = self.map.chains.iter().find(|c| c.id == chain)?;
        let want = copies(self.map, c);
        let set = self.map.sets.iter().find(|s| s.chains.contains(&c.id));
        let pool = set.and_then(|s| self.map.pools.iter().find(|p| p.name == s.pool));
        let could = self.map.targets.iter().filter(|t| t.alive && !t.draining && blank(t.id, c));
        let could: Vec<&pb::Target> = could.collect();
        let mut chosen: Vec<TargetId> = Vec::new();
        let apart = |chosen: &[TargetId], t| {
            chosen.iter().all(|o| *o != t && self.domains.servers_differ(*o, t))
        };
        while chosen.len() < want {
            let fitness = |t: &&&pb::Target| {
                let outside = pool.is_some_and(|p| !p.targets.contains(&t.id));
                let full = u128::from(t.used) * 10 / u128::from(t.capacity.max(1));
                let has = self.has.get(&t.id).copied().unwrap_or(0);
                (
                    !c.preferred.contains(&t.id),
                    outside,
                    self.domains.crowd(t.id, &chosen),
                    full,
                    has,
                    t.id,
                )
            };
            match could.iter().filter(|t| apart(&chosen, t.id)).min_by_key(fitness) {
                Some(t) => chosen.push(t.id),
                None => break,
            }
        }
        // Missing targets join when they return, and are resynced.
        let serving = chosen.len();
        for t in &c.preferred {
            let stays = self.map.targets.iter().any(|h| h.id == *t && !h.given_up);
            if stays && chosen.len() < want && apart(&chosen, *t) {
                chosen.push(*t);
            }
        }
        if serving == 0 || chosen.len() < want {
            return None;
        }
        chosen.iter().for_each(|t| *self.has.entry(*t).or_default() += 1);
        let state = |i: usize| if i < serving { ReplicaServing } else { ReplicaOffline };
        let replica = |(i, target): (usize, &TargetId)| pb::Replica {
            target: *target,
            state: state(i) as i32,
        };
        let replicas = chosen.iter().enumerate().map(replica).collect();
        Some(pb::Chain { id: c.id, epoch: c.epoch + 1, replicas, preferred: chosen, lost: false })
    }
}

/// `EBUSY` if a chain has changed since it was found to hold nothing.
pub(crate) fn begin(map: &mut pb::ClusterMap, b: &pb::ChainsAnew) -> Result<()> {
    let (mut next, open) = (map.clone(), recovery::in_doubt(map));
    let no = |code, id: ChainId, why: &str| {
        Err(Error::new(code, format!("chain {id} does not start anew: {why}")))
    };
    if b.chains.len() > AT_ONCE {
        return Err(Error::new(Code::Inval, format!("more than {AT_ONCE} chains at once")));
    }
    for new in &b.chains {
        let Some(old) = next.chains.iter_mut().find(|c| c.id == new.id) else {
            return no(Code::Inval, new.id, "it does not exist");
        };
        if new.epoch != old.epoch + 1 || old.head().is_some() || open.contains(&new.id) {
            return no(Code::Busy, new.id, "it was changed after the search for its files");
        }
        check_chain(new)?;
        let registered = |t: &TargetId| map.targets.iter().any(|h| h.id == *t);
        let members = new.replicas.iter().map(|r| r.target);
        let states =
            new.replicas.iter().all(|r| matches!(r.state(), ReplicaServing | ReplicaOffline));
        if new.lost
            || new.preferred.len() != copies(map, old)
            || !members.eq(new.preferred.iter().copied())
            || !new.preferred.iter().all(registered)
            || !states
        {
            return no(Code::Inval, new.id, "it cannot start with these replicas");
        }
        *old = new.clone();
        Membership::Anew.taken();
    }
    commit(map, next);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Targets 0 to 3 on separate nodes, 0 dead; chain 1 was on 0 alone, chain 2 on 0 and 1, chain
    /// 3 is served.
    fn map() -> pb::ClusterMap {
        let target = |id| pb::Target {
            id,
            node: 1001 + id,
            capacity: 100,
            alive: id > 0,
            ..Default::default()
        };
        let chain = |id, on: &[(u32, pb::ReplicaState)]| pb::Chain {
            id,
            epoch: 4,
            replicas: on
                .iter()
                .map(|(t, s)| pb::Replica { target: *t, state: *s as i32 })
                .collect(),
            preferred: on.iter().map(|r| r.0).collect(),
            lost: false,
        };
        let set = |copies, chains: &[u32]| pb::ChainSet {
            id: copies,
            copies,
            chains: chains.to_vec(),
            ..Default::default()
        };
        pb::ClusterMap {
            version: 7,
            targets: (0..4).map(target).collect(),
            chains: vec![
                chain(1, &[(0, ReplicaLastsrv)]),
                chain(2, &[(0, ReplicaLastsrv), (1, ReplicaOffline)]),
                chain(3, &[(2, ReplicaServing)]),
            ],
            sets: vec![set(1, &[1, 3]), set(2, &[2])],
            ..Default::default()
        }
    }

    fn replicas(c: &pb::Chain) -> Vec<(u32, bool)> {
        c.replicas.iter().map(|r| (r.target, r.state() == ReplicaServing)).collect()
    }

    fn code<T: std::fmt::Debug>(r: Result<T>) -> Code {
        r.unwrap_err().code
    }

    #[test]
    fn only_what_is_gone_for_good_is_stranded() {
        let mut m = map();
        assert!(stranded(&m, &BTreeSet::new()).is_empty());
        assert_eq!(stranded(&m, &BTreeSet::from([0])), [1, 2]);
        m.targets[0].given_up = true;
        assert_eq!(stranded(&m, &BTreeSet::new()), [1, 2]);
        m.targets[0].alive = true;
        assert!(stranded(&m, &BTreeSet::from([0])).is_empty(), "it is back");
        m.targets.remove(0);
        m.chains[0].replicas.clear();
        assert_eq!(stranded(&m, &BTreeSet::new()), [1, 2], "it was taken out");
        m.doubts = vec![pb::Doubt { chain: 1, ..Default::default() }];
        assert_eq!(stranded(&m, &BTreeSet::new()), [2]);
    }

    #[test]
    fn new_replicas_are_blank_apart_and_as_many_as_the_chain_is_for() {
        let m = map();
        let of = |m: &pb::ClusterMap, c, blank: &dyn Fn(u32) -> bool| {
            Homes::new(m).of(c, |t, _| blank(t)).map(|c| (c.epoch, replicas(&c)))
        };
        // To the target with the fewest chains.
        assert_eq!(of(&m, 1, &|_| true), Some((5, vec![(3, true)])));
        // Its own live target stays, if it holds nothing of the chain.
        assert_eq!(of(&m, 2, &|_| true), Some((5, vec![(1, true), (3, true)])));
        assert_eq!(of(&m, 2, &|t| t != 1), Some((5, vec![(3, true), (2, true)])));
        // The dead one joins when it returns, unless it was given up.
        assert_eq!(of(&m, 2, &|t| t == 3), Some((5, vec![(3, true), (0, false)])));
        assert_eq!(of(&m, 2, &|_| false), None);
        let mut gone = m.clone();
        gone.targets.remove(0);
        gone.chains[1].preferred = vec![1];
        assert_eq!(of(&gone, 2, &|t| t == 3), Some((5, vec![(3, true), (1, false)])));
        assert_eq!(
            of(&gone, 2, &|_| true),
            Some((5, vec![(1, true), (3, true)])),
            "two copies, as ever"
        );
    }

    #[test]
    fn a_chain_begins_anew_only_at_the_epoch_in_which_that_was_found() {
        let begins = |m: &pb::ClusterMap| {
            let chains =
                [1, 2].iter().map(|c| Homes::new(m).of(*c, |_, _| true).unwrap()).collect();
            pb::ChainsAnew { chains }
        };
        let mut m = map();
        let b = begins(&m);
        let mut moved = m.clone();
        moved.chains[1].epoch += 1;
        assert_eq!(code(begin(&mut moved, &b)), Code::Busy, "it was changed");
        let mut back = m.clone();
        back.chains[1].replicas[0].set_state(ReplicaServing);
        assert_eq!(code(begin(&mut back, &b)), Code::Busy, "it is served");
        let mut doubt = m.clone();
        doubt.doubts = vec![pb::Doubt { chain: 2, ..Default::default() }];
        assert_eq!(code(begin(&mut doubt, &b)), Code::Busy, "since a recovery nobody knows");
        for spoil in [
            |c: &mut pb::Chain| c.preferred.push(3),
            |c: &mut pb::Chain| c.replicas[0].target = 77,
            |c: &mut pb::Chain| c.id = 99,
            |c: &mut pb::Chain| c.lost = true,
            |c: &mut pb::Chain| c.replicas[0].set_state(ReplicaLastsrv),
        ] {
            let mut bad = b.clone();
            spoil(&mut bad.chains[0]);
            let before = m.clone();
            assert_eq!(code(begin(&mut m, &bad)), Code::Inval);
            assert_eq!(m, before);
        }
        m.chains[0].lost = true;
        begin(&mut m, &b).unwrap();
        assert_eq!(
            (m.version, m.chains[0].lost, replicas(&m.chains[0])),
            (8, false, vec![(3, true)])
        );
        assert_eq!(code(begin(&mut m, &b)), Code::Busy, "not twice");
    }

    #[test]
    fn a_file_has_data_where_its_size_reaches_or_may_reach() {
        let view = MapView::new(map()).unwrap();
        let stripe = 1 << 20;
        let component = pb::Component {
            end: u64::MAX,
            stripe_size: stripe,
            data_id: 5,
            chains: vec![3, 1, 2, 1],
            ..Default::default()
        };
        let file = |size: u64| pb::InodeRecord {
            attr: Some(pb::Attr { size, ..Default::default() }),
            layout: Some(pb::Layout { components: vec![component.clone()], ..Default::default() }),
            ..Default::default()
        };
        let both = BTreeSet::from([1, 2]);
        let held = |r: &pb::InodeRecord| Vec::from_iter(held(&view, 9, r, &both));
        let stripe = u64::from(stripe);
        for (size, want) in [
            (0, vec![]),
            (stripe, vec![]),
            (stripe + 1, vec![1]),
            (2 * stripe, vec![1]),
            (2 * stripe + 1, vec![1, 2]),
        ] {
            assert_eq!(held(&file(size)), want, "{size}");
        }
        for open in [
            |r: &mut pb::InodeRecord| r.writers = 1,
            |r: &mut pb::InodeRecord| r.surplus = true,
            |r: &mut pb::InodeRecord| r.fence = 3,
            |r: &mut pb::InodeRecord| r.attr = None,
            |r: &mut pb::InodeRecord| r.layout.as_mut().unwrap().components[0].pattern = 7,
        ] {
            let mut r = file(0);
            open(&mut r);
            assert_eq!(held(&r), [1, 2]);
        }
        assert_eq!(held(&pb::InodeRecord::default()), Vec::<u32>::new(), "no file");
    }
}
