//! The cluster map of a group that begins anew, and what its chains' replicas are worth then. Pure
//! functions called at apply.
//!
//! The state that a group is recovered from may be older than the last changes of its chains. A
//! replica that it calls in sync may have left the in-sync set since, and would serve old bytes. So
//! a recovery trusts no replica: each is LASTSRV, and its chain is in **doubt** until all targets
//! have reported that can know of a later in-sync set. Storage servers store what they last acted
//! on ([`pb::ChainSight`]) and report it when they register. See `docs/membership.md`, "After a
//! recovery".

use std::collections::BTreeSet;

use pb::ReplicaState::{self, ReplicaLastsrv, ReplicaOffline, ReplicaServing, ReplicaSyncing};
use strake_proto::{ChainId, Code, Error, Incarnation, Kin, Result, TargetId, map::ROLE_MDS, pb};

use super::state::{FIRST_OSS_NODE, commit};

/// Most chains that one target may report about.
pub(crate) const MAX_SIGHTS: usize = 65_536;
const MAX_REPLICAS: usize = 16;

/// The incarnation of a map's group.
pub(crate) fn incarnation(map: &pb::ClusterMap) -> Incarnation {
    Incarnation(map.incarnation)
}

/// Makes this the map of incarnation `r.incarnation`, in which no metadata server is known yet.
/// `EINVAL` if that is not later than the map's own.
pub(crate) fn recover(map: &mut pb::ClusterMap, r: &pb::Recover) -> Result<()> {
    let (own, new) = (incarnation(map), Incarnation(r.incarnation));
    if own.kin(new) != Kin::Newer {
        return Err(Error::new(Code::Inval, format!("incarnation {new} is not later than {own}")));
    }
    let members = map.nodes.iter().filter(|n| n.role == ROLE_MDS).map(|n| n.id);
    let gone: BTreeSet<u32> =
        members.chain(r.gone.iter().copied()).chain(map.former.iter().copied()).collect();
    map.former = gone.into_iter().filter(|id| (1..FIRST_OSS_NODE).contains(id)).collect();
    map.nodes.retain(|n| n.role != ROLE_MDS);
    map.targets.iter_mut().for_each(|t| t.alive = false);
    map.incarnation = new.0;
    map.version = new.beyond(map.version);
    let former = std::mem::take(&mut map.doubts);
    for c in &mut map.chains {
        let known = former.iter().find(|d| d.chain == c.id).cloned();
        let fresh = || pb::Doubt {
            chain: c.id,
            epoch: c.epoch,
            replicas: c.replicas.clone(),
            heard: Vec::new(),
        };
        map.doubts.push(pb::Doubt { heard: Vec::new(), ..known.unwrap_or_else(fresh) });
        c.epoch = new.beyond(c.epoch);
        c.replicas.iter_mut().for_each(|r| r.set_state(ReplicaLastsrv));
    }
    Ok(())
}

/// The chains whose in-sync set is not known.
pub(crate) fn in_doubt(map: &pb::ClusterMap) -> BTreeSet<ChainId> {
    map.doubts.iter().map(|d| d.chain).collect()
}

/// Notes what a registering server's targets know, and ends the doubts that this resolves.
pub(crate) fn hear(map: &mut pb::ClusterMap, targets: &[(TargetId, &[pb::ChainSight])]) {
    for d in &mut map.doubts {
        for (target, sights) in targets {
            let sight = sights.iter().find(|s| s.chain == d.chain);
            if sight.is_none() && d.replicas.iter().all(|r| r.target != *target) {
                continue;
            }
            // Reports of targets outside these replicas count, too: replicas move.
            if let Some(s) = sight.filter(|s| s.epoch > d.epoch && makes_sense(&s.replicas)) {
                (d.epoch, d.replicas) = (s.epoch, s.replicas.clone());
            }
            let lived = sight.is_some_and(|s| s.lived);
            d.heard.retain(|h| h.target != *target);
            d.heard.push(pb::Heard { target: *target, lived, given_up: false });
        }
    }
    settle(map);
}

fn makes_sense(replicas: &[pb::Replica]) -> bool {
    let targets: BTreeSet<TargetId> = replicas.iter().map(|r| r.target).collect();
    (1..=MAX_REPLICAS).contains(&replicas.len())
        && targets.len() == replicas.len()
        && replicas.iter().all(|r| r.state() != ReplicaState::ReplicaUnknown)
}

/// An administrator declares these targets lost for good. `ENOENT` for a target that is neither
/// registered nor waited for; targets that no chain waits for are skipped.
pub(crate) fn give_up(map: &mut pb::ClusterMap, targets: &[TargetId]) -> Result<()> {
    let awaited = all_awaited(map);
    if let Some(t) =
        targets.iter().find(|t| map.targets.iter().all(|h| h.id != **t) && !awaited.contains(t))
    {
        return Err(Error::new(Code::NoEnt, format!("target {t} is not registered")));
    }
    let mut next = map.clone();
    for d in &mut next.doubts {
        for t in targets {
            let member = d.replicas.iter().any(|r| r.target == *t);
            if member && d.heard.iter().all(|h| h.target != *t) {
                d.heard.push(pb::Heard { target: *t, lived: false, given_up: true });
            }
        }
    }
    settle(&mut next);
    commit(map, next);
    Ok(())
}

/// The targets that a doubt waits for. Only a replica that was in sync, or was being resynced, in
/// the newest known in-sync set can have been in a later one. A resync needs a source that acts on
/// that set, and the set is stored before the resync counts.
fn awaited(d: &pb::Doubt) -> impl Iterator<Item = TargetId> + '_ {
    let can_know = d
        .replicas
        .iter()
        .filter(|r| matches!(r.state(), ReplicaServing | ReplicaSyncing | ReplicaLastsrv));
    can_know.map(|r| r.target).filter(|t| d.heard.iter().all(|h| h.target != *t))
}

/// All targets that chains wait for.
pub(crate) fn all_awaited(map: &pb::ClusterMap) -> Vec<TargetId> {
    map.doubts.iter().flat_map(awaited).collect::<BTreeSet<_>>().into_iter().collect()
}

fn settle(map: &mut pb::ClusterMap) {
    let known: BTreeSet<TargetId> = map.targets.iter().map(|t| t.id).collect();
    for d in std::mem::take(&mut map.doubts) {
        let replicas = if awaited(&d).next().is_none() { settled(&d, &known) } else { None };
        match (replicas, map.chains.iter_mut().find(|c| c.id == d.chain)) {
            (Some(replicas), Some(c)) => {
                c.replicas = replicas;
                c.epoch += 1;
            }
            (None, Some(_)) => map.doubts.push(d),
            (_, None) => {}
        }
    }
}

/// The replicas of a chain whose last in-sync set is known: its members become LASTSRV, so that one
/// of them becomes the source and resyncs the others. Members that did not restart come first: they
/// lost the least. `None`: only targets that the map does not have (`known`) were in sync, so no
/// replica can be trusted.
fn settled(d: &pb::Doubt, known: &BTreeSet<TargetId>) -> Option<Vec<pb::Replica>> {
    let heard = |t: TargetId| d.heard.iter().find(|h| h.target == t);
    let was_in_sync = |r: &&pb::Replica| matches!(r.state(), ReplicaServing | ReplicaLastsrv);
    let members = || d.replicas.iter().filter(|r| known.contains(&r.target));
    let candidates: Vec<TargetId> = members().filter(was_in_sync).map(|r| r.target).collect();
    let mut sources: Vec<TargetId> =
        candidates.iter().copied().filter(|t| heard(*t).is_none_or(|h| !h.given_up)).collect();
    if sources.is_empty() {
        // All are declared lost. One that returns after all is better than none.
        sources = candidates;
    }
    sources.sort_by_key(|t| !heard(*t).is_some_and(|h| h.lived));
    let others = members().map(|r| r.target).filter(|t| !sources.contains(t));
    let as_state = |state: ReplicaState| move |target| pb::Replica { target, state: state as i32 };
    let all = sources
        .iter()
        .copied()
        .map(as_state(ReplicaLastsrv))
        .chain(others.map(as_state(ReplicaOffline)))
        .collect();
    (!sources.is_empty()).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::state;

    /// `S1 y2 o3`: as in the tests of `membership`.
    fn replicas(text: &str) -> Vec<pb::Replica> {
        let one = |w: &str| {
            let state = match &w[..1] {
                "S" => ReplicaServing,
                "y" => ReplicaSyncing,
                "w" => ReplicaState::ReplicaWaiting,
                "o" => ReplicaOffline,
                _ => ReplicaLastsrv,
            };
            pb::Replica { target: w[1..].parse().unwrap(), state: state as i32 }
        };
        text.split_whitespace().map(one).collect()
    }

    fn text(replicas: &[pb::Replica]) -> String {
        let word = |r: &pb::Replica| match r.state() {
            ReplicaServing => format!("S{}", r.target),
            ReplicaLastsrv => format!("L{}", r.target),
            ReplicaSyncing => format!("y{}", r.target),
            _ => format!("o{}", r.target),
        };
        replicas.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    fn recovered(chain: &str, epoch: u64) -> pb::ClusterMap {
        let target = |id| pb::Target { id, alive: true, ..Default::default() };
        let node = |id, role| pb::Node { id, role, ..Default::default() };
        let mut map = pb::ClusterMap {
            version: 40,
            targets: (1..=3).map(target).collect(),
            nodes: vec![node(1, ROLE_MDS), node(2, ROLE_MDS), node(1001, 2)],
            chains: vec![pb::Chain {
                id: 5,
                epoch,
                replicas: replicas(chain),
                preferred: vec![1, 2, 3],
                lost: false,
            }],
            former: vec![7],
            ..Default::default()
        };
        recover(
            &mut map,
            &pb::Recover { incarnation: Incarnation::new(1, 99).unwrap().0, gone: vec![3, 2] },
        )
        .unwrap();
        map
    }

    fn sight(epoch: u64, text: &str, lived: bool) -> Vec<pb::ChainSight> {
        vec![pb::ChainSight { chain: 5, epoch, replicas: replicas(text), lived }]
    }

    #[test]
    fn a_recovered_map_is_beyond_all_others_and_believes_no_replica() {
        let map = recovered("S1 y2 o3", 9);
        assert_eq!((map.version, map.chains[0].epoch), (1 << 32, 1 << 32));
        assert_eq!(map.former, [1, 2, 3, 7]);
        assert!(
            map.nodes.iter().all(|n| n.role != ROLE_MDS) && map.targets.iter().all(|t| !t.alive)
        );
        assert_eq!(text(&map.chains[0].replicas), "L1 L2 L3");
        assert!(in_doubt(&map).contains(&5));
        assert_eq!(all_awaited(&map), [1, 2]);
        let mut chains = map.chains.clone();
        chains[0].epoch += 1;
        let update = pb::MapUpdate { expect_version: map.version, chains, ..Default::default() };
        assert_eq!(state::update(&mut map.clone(), &update).unwrap_err().code, Code::Busy);
        // Incarnations only grow.
        for old in [0, map.incarnation, map.incarnation + 1] {
            let again = pb::Recover { incarnation: old, gone: vec![] };
            assert_eq!(recover(&mut map.clone(), &again).unwrap_err().code, Code::Inval);
        }
    }

    /// Recorded chain; reports in order: target, epoch, its sight, whether it lived; the resulting
    /// chain, or the awaited targets.
    #[test]
    fn the_newest_sight_of_all_that_can_know_decides() {
        for (what, recorded, heard, after) in [
            (
                "as recorded",
                "S1 S2 o3",
                &[(1, 9, "S1 S2 o3", true), (2, 9, "S1 S2 o3", true)][..],
                "L1 L2 o3",
            ),
            ("one is missing", "S1 S2 o3", &[(1, 9, "S1 S2 o3", true)], "awaited 2"),
            (
                "left out since",
                "S1 S2 o3",
                &[(1, 9, "S1 S2 o3", true), (2, 11, "S2 o1 o3", true)],
                "L2 o1 o3",
            ),
            (
                "it knows that nobody else can know",
                "S1 S2 o3",
                &[(2, 11, "S2 o1 o3", true)],
                "L2 o1 o3",
            ),
            ("filled since", "S1 o2 o3", &[(1, 12, "S1 y2 o3", true)], "awaited 2"),
            (
                "filled and alone since",
                "S1 o2 o3",
                &[(1, 12, "S1 y2 o3", true), (2, 14, "S2 o1 o3", true)],
                "L2 o1 o3",
            ),
            (
                "restarted stand behind",
                "S1 S2 o3",
                &[(1, 9, "S1 S2 o3", false), (2, 9, "S1 S2 o3", true)],
                "L2 L1 o3",
            ),
            ("an older sight", "S1 o2 o3", &[(1, 5, "S1 S2 S3", true)], "L1 o2 o3"),
            ("no sight at all", "S1 o2 o3", &[(1, 0, "", false)], "L1 o2 o3"),
            (
                "moved to another since",
                "S1 S2",
                &[(1, 99, "S1 S3 y2", true), (2, 99, "S1 S3 y2", true)],
                "awaited 3",
            ),
            (
                "and gone",
                "S1 S2",
                &[(2, 98, "S1 S3 y2", true), (1, 99, "S1 S3", true), (3, 99, "S1 S3", true)],
                "L1 L3",
            ),
            ("who has left says so", "S1", &[(1, 99, "S3", true)], "awaited 3"),
            (
                "who joined may be heard first",
                "S1",
                &[(3, 98, "S1 S3", true), (1, 99, "S3 y1", true)],
                "L3 o1",
            ),
            ("one that this map never had", "S1 o2 o3", &[(1, 99, "S1 S4 o3", true)], "awaited 4"),
            ("no sense", "S1 o2 o3", &[(1, 99, "S1 S1", true)], "L1 o2 o3"),
            ("nobody was serving", "L1 L2 o3", &[(1, 9, "L1 L2 o3", true)], "awaited 2"),
        ] {
            let mut map = recovered(recorded, 9);
            for (target, epoch, s, lived) in heard {
                hear(&mut map, &[(*target, &sight(*epoch, s, *lived))]);
            }
            let awaited = all_awaited(&map);
            let now = match awaited.is_empty() {
                true => text(&map.chains[0].replicas),
                false => format!(
                    "awaited {}",
                    awaited.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
                ),
            };
            assert_eq!(now, after, "{what}");
            assert_eq!(map.doubts.is_empty(), awaited.is_empty(), "{what}");
        }
    }

    #[test]
    fn nobody_is_believed_in_the_place_of_a_target_that_the_map_does_not_have() {
        let mut map = recovered("S1", 9);
        hear(&mut map, &[(1, &sight(99, "S4", true))]);
        assert_eq!(give_up(&mut map, &[5]).unwrap_err().code, Code::NoEnt);
        give_up(&mut map, &[4]).unwrap();
        assert!(in_doubt(&map).contains(&5) && all_awaited(&map).is_empty());
        // If another target had it as well, the chain continues there.
        let mut map = recovered("S1", 9);
        hear(&mut map, &[(1, &sight(99, "S4 S2", true)), (2, &sight(99, "S4 S2", true))]);
        give_up(&mut map, &[4]).unwrap();
        assert_eq!(text(&map.chains[0].replicas), "L2");
    }

    #[test]
    fn a_second_recovery_keeps_what_the_first_one_heard() {
        let mut map = recovered("S1 S2 o3", 9);
        hear(&mut map, &[(1, &sight(11, "S1 S2 S3", true))]);
        recover(
            &mut map,
            &pb::Recover { incarnation: Incarnation::new(2, 1).unwrap().0, gone: vec![4] },
        )
        .unwrap();
        assert_eq!((map.doubts[0].epoch, map.chains[0].epoch), (11, 2 << 32));
        assert_eq!(all_awaited(&map), [1, 2, 3]);
        assert_eq!(map.former, [1, 2, 3, 4, 7]);
    }

    #[test]
    fn what_is_lost_for_good_is_no_longer_awaited() {
        let mut map = recovered("S1 S2 o3", 9);
        assert_eq!(give_up(&mut map, &[2, 9]).unwrap_err().code, Code::NoEnt);
        hear(&mut map, &[(1, &sight(9, "S1 S2 o3", true))]);
        let version = map.version;
        give_up(&mut map, &[2]).unwrap();
        assert_eq!(
            (text(&map.chains[0].replicas).as_str(), map.version),
            ("L1 o2 o3", version + 1)
        );
        // Nothing is awaited: nothing changes.
        give_up(&mut map, &[2]).unwrap();
        assert_eq!(map.version, version + 1);
        // All are given up: one that returns is accepted all the same.
        let mut map = recovered("S1 S2 o3", 9);
        give_up(&mut map, &[1, 2]).unwrap();
        assert_eq!(text(&map.chains[0].replicas), "L1 L2 o3");
        // One that returns while others are awaited is heard after all.
        let mut map = recovered("S1 S2 o3", 9);
        give_up(&mut map, &[1]).unwrap();
        hear(&mut map, &[(1, &sight(9, "S1 S2 o3", false))]);
        hear(&mut map, &[(2, &sight(9, "S1 S2 o3", true))]);
        assert_eq!(text(&map.chains[0].replicas), "L2 L1 o3");
    }
}
