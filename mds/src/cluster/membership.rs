//! Which replicas of a chain are in sync: the rules of `docs/replication.md`, "Membership", one
//! chain at a time.
//!
//! `leaves`, `all-leave` and `fill-ends` have two forms. The leader sees that a lease ran out
//! ([`evaluate`]). A restart is seen at apply, when the new process registers ([`restarted`]), so
//! that a promotion decided earlier can never overtake it.

use pb::ReplicaState::{
    self, ReplicaLastsrv, ReplicaOffline, ReplicaServing, ReplicaSyncing, ReplicaWaiting,
};
use strake_proto::{TargetId, map::ChainExt, pb};

use super::rows::Membership;

/// A chain with changed replicas: in the order of the format, with the next epoch. `None` if
/// nothing changed.
fn next(old: &pb::Chain, mut replicas: Vec<pb::Replica>) -> Option<pb::Chain> {
    replicas.sort_by_key(|r| match r.state() {
        ReplicaServing => 0,
        ReplicaSyncing => 1,
        _ => 2,
    });
    if replicas == old.replicas {
        return None;
    }
    let new = pb::Chain { epoch: old.epoch + 1, replicas, ..old.clone() };
    count(old, &new);
    Some(new)
}

/// Counts the rows of the table that a change follows.
fn count(old: &pb::Chain, new: &pb::Chain) {
    for r in &new.replicas {
        match (old.state_of(r.target), r.state()) {
            (Some(ReplicaServing), ReplicaOffline) => Membership::Leaves.taken(),
            (Some(ReplicaServing), ReplicaLastsrv) => Membership::AllLeave.taken(),
            (Some(ReplicaLastsrv), ReplicaServing) => Membership::Source.taken(),
            (Some(ReplicaOffline | ReplicaWaiting), ReplicaSyncing) => Membership::Fills.taken(),
            (Some(ReplicaOffline), ReplicaWaiting) => Membership::Waits.taken(),
            (Some(ReplicaSyncing), ReplicaServing) => Membership::Filled.taken(),
            (Some(ReplicaSyncing | ReplicaWaiting), ReplicaOffline) => Membership::FillEnds.taken(),
            (Some(ReplicaServing), ReplicaSyncing) => Membership::StepsBack.taken(),
            (None, _) => Membership::Joins.taken(),
            _ => {}
        }
    }
    for r in old.replicas.iter().filter(|r| new.state_of(r.target).is_none()) {
        match r.state() {
            ReplicaSyncing => Membership::Gone.taken(),
            _ => Membership::Drops.taken(),
        }
    }
}

fn any(replicas: &[pb::Replica], state: ReplicaState) -> bool {
    replicas.iter().any(|r| r.state() == state)
}

/// The facts an evaluation uses, besides the chain.
pub struct Facts<A, B> {
    /// Whether a target holds a lease and its device works.
    pub alive: A,
    /// The tail reports, at this epoch, that the SYNCING replica holds all it has.
    pub synced: bool,
    /// Whether a target's node acts on this epoch.
    pub acts: B,
}

/// The chain after one evaluation, `None` if it does not change.
pub fn evaluate<A, B>(chain: &pb::Chain, facts: &Facts<A, B>) -> Option<pb::Chain>
where
    A: Fn(TargetId) -> bool,
    B: Fn(TargetId) -> bool,
{
    if chain.head().is_some() {
        with_source(chain, facts)
    } else {
        without_source(chain, &facts.alive)
    }
}

fn with_source<A, B>(chain: &pb::Chain, facts: &Facts<A, B>) -> Option<pb::Chain>
where
    A: Fn(TargetId) -> bool,
    B: Fn(TargetId) -> bool,
{
    let Facts { alive, synced, .. } = facts;
    let survives = chain.serving().any(alive);
    let wanted = |t: TargetId| chain.preferred.contains(&t);
    let mut replicas = chain.replicas.clone();
    for r in &mut replicas {
        let to = match r.state() {
            ReplicaServing if !survives => ReplicaLastsrv,
            ReplicaSyncing if !survives => ReplicaOffline,
            ReplicaServing | ReplicaSyncing | ReplicaWaiting if !alive(r.target) => ReplicaOffline,
            ReplicaSyncing if *synced && wanted(r.target) => ReplicaServing,
            ReplicaOffline if alive(r.target) => ReplicaWaiting,
            s => s,
        };
        r.set_state(to);
    }
    if survives {
        join_and_leave(chain, facts, &mut replicas);
    }
    next(chain, replicas)
}

/// `joins`, `drops`, `steps-back` and `gone`, and which replica is resynced next.
fn join_and_leave<A, B>(chain: &pb::Chain, facts: &Facts<A, B>, replicas: &mut Vec<pb::Replica>)
where
    A: Fn(TargetId) -> bool,
    B: Fn(TargetId) -> bool,
{
    let Facts { alive, acts, .. } = facts;
    let wanted = |t: TargetId| chain.preferred.contains(&t);
    // A SYNCING replica serves no reads, but one that acts on an older epoch may believe that it
    // does.
    let stays = |r: &pb::Replica| match r.state() {
        ReplicaServing => true,
        ReplicaSyncing => wanted(r.target) || !acts(r.target),
        // A replica that has just lost its place leaves with the next change: a serving replica
        // must not disappear in one step.
        _ => wanted(r.target) || chain.state_of(r.target) == Some(ReplicaServing),
    };
    replicas.retain(stays);
    for t in chain.preferred.iter().filter(|t| chain.state_of(**t).is_none()) {
        let state = if alive(*t) { ReplicaWaiting } else { ReplicaOffline };
        replicas.push(pb::Replica { target: *t, state: state as i32 });
    }
    if any(replicas, ReplicaSyncing) {
        return;
    }
    // A replica that has not heard yet that its replacements serve may take itself for the tail.
    let whole =
        chain.preferred.iter().all(|t| alive(*t) && chain.state_of(*t) == Some(ReplicaServing));
    let leaves = |r: &pb::Replica| whole && !wanted(r.target) && acts(r.target);
    if let Some(r) = replicas.iter_mut().find(|r| leaves(r) || r.state() == ReplicaWaiting) {
        r.set_state(ReplicaSyncing);
    }
}

fn without_source(chain: &pb::Chain, alive: &impl Fn(TargetId) -> bool) -> Option<pb::Chain> {
    // Replicas that restarted are listed after those that did not (see `restarted`): the first one
    // lost the least.
    let source = chain
        .replicas
        .iter()
        .find(|r| r.state() == ReplicaLastsrv && alive(r.target))
        .map(|r| r.target);
    let mut replicas = chain.replicas.clone();
    for r in &mut replicas {
        let to = match r.state() {
            ReplicaLastsrv if Some(r.target) == source => ReplicaServing,
            ReplicaLastsrv if source.is_some() => ReplicaOffline,
            ReplicaOffline if alive(r.target) => ReplicaWaiting,
            ReplicaWaiting if !alive(r.target) => ReplicaOffline,
            s => s,
        };
        r.set_state(to);
    }
    next(chain, replicas)
}

/// The chain after one of its targets restarted, `None` if it does not change.
pub fn restarted(chain: &pb::Chain, target: TargetId) -> Option<pb::Chain> {
    let others_serve = chain.serving().any(|t| t != target);
    let mut replicas = chain.replicas.clone();
    let at = replicas.iter().position(|r| r.target == target)?;
    let was = replicas[at].state();
    let to = match was {
        ReplicaServing if !others_serve => ReplicaLastsrv,
        ReplicaLastsrv => ReplicaLastsrv,
        _ => ReplicaOffline,
    };
    replicas[at].set_state(to);
    if was == ReplicaServing && !others_serve {
        for r in replicas.iter_mut().filter(|r| r.state() == ReplicaSyncing) {
            r.set_state(ReplicaOffline);
        }
    }
    if was == ReplicaLastsrv {
        Membership::LastRestarts.taken();
        let r = replicas.remove(at);
        replicas.push(r);
    }
    next(chain, replicas)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::state;

    fn chain(text: &str) -> pb::Chain {
        let replicas: Vec<pb::Replica> = text
            .split_whitespace()
            .map(|w| {
                let state = match &w[..1] {
                    "S" => ReplicaServing,
                    "y" => ReplicaSyncing,
                    "w" => ReplicaWaiting,
                    "o" => ReplicaOffline,
                    _ => ReplicaLastsrv,
                };
                pb::Replica { target: w[1..].parse().unwrap(), state: state as i32 }
            })
            .collect();
        let preferred = replicas.iter().map(|r| r.target).collect();
        pb::Chain { id: 1, epoch: 5, replicas, preferred, lost: false }
    }

    fn text(c: Option<pb::Chain>) -> String {
        let Some(c) = c else { return "-".into() };
        assert_eq!(c.epoch, 6);
        let word = |r: &pb::Replica| {
            let s = match r.state() {
                ReplicaServing => "S",
                ReplicaSyncing => "y",
                ReplicaWaiting => "w",
                ReplicaOffline => "o",
                _ => "L",
            };
            format!("{s}{}", r.target)
        };
        c.replicas.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    /// Every row: chain, live targets, synced, result.
    #[test]
    fn evaluation_follows_the_table() {
        for (row, before, live, synced, after) in [
            ("none", "S1 S2 S3", &[1, 2, 3][..], false, "-"),
            ("1 head", "S1 S2 S3", &[2, 3], false, "S2 S3 o1"),
            ("1 tail", "S1 S2 S3", &[1, 2], false, "S1 S2 o3"),
            ("1 two", "S1 S2 S3", &[2], false, "S2 o1 o3"),
            ("2", "S1 S2 y3", &[3], false, "L1 L2 o3"),
            ("2 last one", "S1 o2", &[], false, "L1 o2"),
            ("3", "L1 L2 o3", &[2], false, "S2 o1 o3"),
            ("3 both return: the first", "L1 L2", &[1, 2], false, "S1 o2"),
            ("3 not by an OFFLINE one", "L1 o2", &[2], false, "L1 w2"),
            ("3 with a WAITING one", "L1 w2", &[1, 2], false, "S1 w2"),
            ("4 first", "S1 o2 o3", &[1, 2], false, "S1 y2 o3"),
            ("4 both", "S1 o2 o3", &[1, 2, 3], false, "S1 y2 w3"),
            ("4 another syncs", "S1 y2 o3", &[1, 2, 3], false, "S1 y2 w3"),
            ("4 its turn", "S1 w3 o2", &[1, 3], false, "S1 y3 o2"),
            ("5", "S1 y2", &[1, 2], true, "S1 S2"),
            ("5 and the next one's turn", "S1 y2 w3", &[1, 2, 3], true, "S1 S2 y3"),
            ("5 not when it is dead", "S1 y2", &[1], true, "S1 o2"),
            ("5 not when the source is dead", "S1 y2", &[2], true, "L1 o2"),
            ("6 SYNCING", "S1 y2 w3", &[1, 3], false, "S1 y3 o2"),
            ("6 WAITING", "S1 y2 w3", &[1, 2], false, "S1 y2 o3"),
            ("6 WAITING, no source", "L1 w2", &[], false, "L1 o2"),
        ] {
            let facts = Facts { alive: |t| live.contains(&t), synced, acts: |_| true };
            let (old, next) = (chain(before), evaluate(&chain(before), &facts));
            if let Some(next) = &next {
                state::check_transition(&old, next).unwrap_or_else(|e| panic!("row {row}: {e}"));
            }
            assert_eq!(text(next), after, "row {row}");
        }
    }

    /// Replicas that join and leave: chain, wanted targets, live ones, synced, acknowledged,
    /// result.
    #[test]
    fn who_is_wanted_joins_and_who_is_not_leaves() {
        let (all, none) = (&[1, 2, 3, 4][..], &[][..]);
        for (what, before, wanted, live, synced, acts, after) in [
            ("joins", "S1 S2", &[1, 3][..], all, false, all, "S1 S2 y3"),
            ("joins, dead", "S1 S2", &[1, 3], &[1, 2], false, all, "S1 S2 o3"),
            ("two join", "S1", &[2, 3], all, false, all, "S1 y2 w3"),
            ("is filled", "S1 S2 y3", &[1, 3], all, false, all, "-"),
            ("is in sync: both serve", "S1 S2 y3", &[1, 3], all, true, all, "S1 S2 S3"),
            (
                "and both know: the other one reads no more",
                "S1 S2 S3",
                &[1, 3],
                all,
                false,
                all,
                "S1 S3 y2",
            ),
            ("it does not know yet", "S1 S2 S3", &[1, 3], all, false, &[1, 3], "-"),
            ("stays until it knows", "S1 S3 y2", &[1, 3], all, false, &[1, 3], "-"),
            ("stays though it has all", "S1 S3 y2", &[1, 3], all, true, none, "-"),
            ("goes when it knows", "S1 S3 y2", &[1, 3], all, true, all, "S1 S3"),
            ("goes when its lease is over", "S1 S3 y2", &[1, 3], &[1, 3], false, none, "S1 S3"),
            (
                "not wanted, and dies while another is filled",
                "S1 S2 y3",
                &[2, 3],
                &[2, 3, 4],
                false,
                all,
                "S2 y3 o1",
            ),
            ("and is dropped then", "S2 y3 o1", &[2, 3], &[2, 3, 4], false, all, "S2 y3"),
            (
                "not wanted, and dies as one of three",
                "S1 S2 S3 o4",
                &[3, 4],
                &[2, 3],
                false,
                all,
                "S2 S3 o1 o4",
            ),
            (
                "not while one that is wanted is missing",
                "S1 S2 o3",
                &[1, 3],
                &[1, 2],
                false,
                all,
                "-",
            ),
            ("nor when that dies now", "S1 S2 S3", &[1, 3], &[1, 2], false, all, "S1 S2 o3"),
            ("one after the other", "S1 S2 S3 S4", &[3, 4], all, false, all, "S2 S3 S4 y1"),
            ("and the next", "S2 S3 S4 y1", &[3, 4], all, false, all, "S3 S4 y2"),
            ("out of sync: at once", "S1 o2", &[1, 3], all, false, all, "S1 y3"),
            ("out of sync and back: at once", "S1 w2 y3", &[1, 3], all, false, none, "S1 y3"),
            ("the only copy, to another place", "S1 y2", &[2], all, true, all, "S1 S2"),
            ("and no more reads", "S1 S2", &[2], all, false, all, "S2 y1"),
            ("and gone", "S2 y1", &[2], all, false, all, "S2"),
            ("a source that is not wanted", "L1 o2", &[2], all, false, all, "S1 w2"),
            ("nobody else has it", "L1 o2", &[2], &[2], false, all, "L1 w2"),
            ("dies before the other is in sync", "S1 y2", &[2], &[2], false, all, "L1 o2"),
        ] {
            let chain = pb::Chain { preferred: wanted.to_vec(), ..chain(before) };
            let facts = Facts { alive: |t| live.contains(&t), synced, acts: |t| acts.contains(&t) };
            let next = evaluate(&chain, &facts);
            if let Some(next) = &next {
                state::check_transition(&chain, next)
                    .unwrap_or_else(|e| panic!("{what}: {before}: {e}"));
            }
            assert_eq!(text(next), after, "{what}: {before}");
        }
    }

    #[test]
    fn restarts_follow_the_table() {
        for (row, before, who, after) in [
            ("1", "S1 S2", 1, "S2 o1"),
            ("2", "S1 y2", 1, "L1 o2"),
            ("2 others wait", "S1 w2", 1, "L1 w2"),
            ("6", "S1 y2", 2, "S1 o2"),
            ("6", "S1 w2", 2, "S1 o2"),
            ("offline already", "S1 o2", 2, "-"),
            ("of the last ones, behind those that lost nothing", "L1 L2 o3", 1, "L2 o3 L1"),
            ("the only last one", "o2 L1", 1, "-"),
            ("not a member", "S1 S2", 9, "-"),
        ] {
            assert_eq!(text(restarted(&chain(before), who)), after, "row {row}: {before}");
        }
    }
}
