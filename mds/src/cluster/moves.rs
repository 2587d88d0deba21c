//! Replicas that move to other targets: which, where to, and how many at a time. Pure functions on
//! the map.
//!
//! A move changes the targets that a chain is to have; rows `joins` to `gone` of
//! `docs/replication.md` do the rest. The map alone tells which replicas are moving, so a new
//! leader continues where the last one stopped.

use std::collections::{BTreeMap, BTreeSet};

use strake_proto::{ChainId, Code, Error, Result, TargetId, map::ChainExt, pb};

use super::{
    chain_table::{self, RichAndPoor},
    domains::{Domains, Rack},
    recovery, slow,
    state::commit,
};

/// Action numbers of [`pb::TargetChange`].
pub mod target_action {
    pub const DRAIN: u32 = 1;
    pub const KEEP: u32 = 2;
    pub const REMOVE: u32 = 3;
    pub const GIVE_UP: u32 = 4;
}

/// Most replicas that one target gives away or takes at a time. A dead target does not count: its
/// data comes from all others.
pub const MOVES: usize = 8;
/// No replica moves to a target that would be fuller than this afterwards, percent.
pub(super) const FULL: u128 = 95;

/// What an administrator decided about a target. `ENOENT` if it is not registered; `EINVAL` for an
/// heir that cannot be one; `EBUSY` for a removal of a target that is alive or that a chain still
/// needs, and for a drain only because of slowness ([`slow::may_drain`]).
pub fn target_change(map: &mut pb::ClusterMap, c: &pb::TargetChange) -> Result<()> {
    let mut next = map.clone();
    let inval = |m: String| Err(Error::new(Code::Inval, m));
    let known = |id: TargetId| map.targets.iter().find(|t| t.id == id);
    let missing = |id| Error::new(Code::NoEnt, format!("target {id} is not registered"));
    let is = known(c.target).ok_or_else(|| missing(c.target))?;
    match c.action {
        target_action::DRAIN => {
            if c.slow.is_some() {
                slow::may_drain(map, is)?;
            }
            if let Some(heir) = c.heir {
                let h = known(heir).ok_or_else(|| missing(heir))?;
                if heir == c.target || h.draining {
                    return inval(format!(
                        "target {heir} cannot take the data of target {}: it is being drained",
                        c.target
                    ));
                }
            }
            next.targets
                .iter_mut()
                .filter(|t| t.heir == Some(c.target))
                .for_each(|t| t.heir = None);
        }
        _ if c.heir.is_some() => return inval("only a drained target has an heir".into()),
        _ if c.slow.is_some() => return inval("a slow target is drained, nothing else".into()),
        target_action::KEEP => {}
        target_action::GIVE_UP if is.alive => {
            let m = format!("target {} is alive; it is not lost", c.target);
            return Err(Error::new(Code::Busy, m));
        }
        target_action::GIVE_UP => {}
        target_action::REMOVE => {
            may_go(map, is)?;
            next.targets.retain(|t| t.id != c.target);
            next.targets
                .iter_mut()
                .filter(|t| t.heir == Some(c.target))
                .for_each(|t| t.heir = None);
            next.pools.iter_mut().for_each(|p| p.targets.retain(|t| *t != c.target));
            // Only lost chains still have it. They no longer want it: if it returns nevertheless,
            // it must not wait for them.
            for chain in &mut next.chains {
                chain.replicas.retain(|r| r.target != c.target);
                if chain.preferred.len() > 1 {
                    chain.preferred.retain(|t| *t != c.target);
                }
            }
            next.next_target = next.next_target.max(c.target.saturating_add(1));
            commit(map, next);
            return Ok(());
        }
        a => return inval(format!("unknown target action {a}")),
    }
    for t in next.targets.iter_mut().filter(|t| t.id == c.target) {
        t.draining = c.action != target_action::KEEP;
        t.given_up = c.action == target_action::GIVE_UP;
        t.heir = c.heir;
        t.slow = c.slow;
        if c.action == target_action::KEEP {
            t.kept = t.stamp;
        }
    }
    judge_lost(&mut next);
    commit(map, next);
    Ok(())
}

/// A chain is lost when every target that could be its source was given up, and is not lost any
/// more when one of them is kept after all.
fn judge_lost(map: &mut pb::ClusterMap) {
    let gone: BTreeSet<TargetId> =
        map.targets.iter().filter(|t| t.given_up).map(|t| t.id).collect();
    let open = recovery::in_doubt(map);
    for c in map.chains.iter_mut().filter(|c| !open.contains(&c.id) && c.head().is_none()) {
        let mut sources =
            c.replicas.iter().filter(|r| r.state() == pb::ReplicaState::ReplicaLastsrv).peekable();
        // The sources of a lost chain may have been removed.
        let lost = if sources.peek().is_some() {
            sources.all(|r| gone.contains(&r.target))
        } else {
            c.lost
        };
        if lost != c.lost {
            c.lost = lost;
            c.epoch += 1;
        }
    }
}

fn may_go(map: &pb::ClusterMap, t: &pb::Target) -> Result<()> {
    let busy = |why: String| {
        Err(Error::new(Code::Busy, format!("target {} cannot be removed: {why}", t.id)))
    };
    let needs =
        |c: &&pb::Chain| !c.lost && (c.state_of(t.id).is_some() || c.preferred.contains(&t.id));
    match map.chains.iter().filter(needs).count() {
        0 => {}
        n => {
            return busy(format!(
                "it has replicas of {n} chains; drain it first, or give it up if it is lost"
            ));
        }
    }
    if map.doubts.iter().any(|d| d.replicas.iter().any(|r| r.target == t.id)) {
        return busy("since the recovery it is not known whether it is needed".into());
    }
    if t.alive {
        return busy(
            "it is alive; remove it from its server's `targets`, restart the server, and repeat \
             this command"
                .into(),
        );
    }
    Ok(())
}

/// Whether replicas of a chain are moving.
pub fn is_moving(c: &pb::Chain) -> bool {
    c.replicas.len() != c.preferred.len()
        || c.replicas.iter().any(|r| !c.preferred.contains(&r.target))
}

/// Whether a chain has all the replicas that it is to have, in sync, and no other.
pub fn is_whole(c: &pb::Chain) -> bool {
    let serves = |t: &TargetId| c.state_of(*t) == Some(pb::ReplicaState::ReplicaServing);
    c.replicas.len() == c.preferred.len() && c.preferred.iter().all(serves)
}

/// Whether a target is too full to take more.
fn is_full(t: &pb::Target) -> bool {
    u128::from(t.used) * 100 > u128::from(t.capacity) * FULL
}

/// How full targets are, and how many moves they take part in.
pub(super) struct Load<'a> {
    map: &'a pb::ClusterMap,
    targets: BTreeMap<TargetId, &'a pb::Target>,
    pub(super) domains: Domains<'a>,
    /// Racks with targets that are alive and do not drain.
    racks: BTreeSet<Rack<'a>>,
    /// The pool of each chain that was made for a pool that still exists.
    pub(super) pools: BTreeMap<ChainId, &'a pb::Pool>,
    /// How many replicas a target has, or is to have.
    replicas: BTreeMap<TargetId, usize>,
    /// How many of them it takes or gives away now.
    moving: BTreeMap<TargetId, usize>,
}

impl<'a> Load<'a> {
    pub(super) fn new(map: &'a pb::ClusterMap) -> Load<'a> {
        let targets = map.targets.iter().map(|t| (t.id, t)).collect();
        let domains = Domains::new(map);
        let sets = map.sets.iter().filter(|s| !s.pool.is_empty());
        let of_pool = sets.filter_map(|s| Some((s, map.pools.iter().find(|p| p.name == s.pool)?)));
        let pools = of_pool.flat_map(|(s, p)| s.chains.iter().map(move |c| (*c, p))).collect();
        let usable = map.targets.iter().filter(|t| t.alive && !t.draining);
        let racks = usable.filter_map(|t| domains.rack(t.id)).collect();
        let (replicas, moving) = (BTreeMap::new(), BTreeMap::new());
        let mut load = Load { map, targets, domains, racks, pools, replicas, moving };
        let open = recovery::in_doubt(map);
        for c in &map.chains {
            c.preferred.iter().for_each(|t| *load.replicas.entry(*t).or_default() += 1);
            // Without a source nothing is copied; a chain that waits for one must not hold up
            // others.
            if is_whole(c) || c.lost || c.head().is_none() || open.contains(&c.id) {
                continue;
            }
            let has: BTreeSet<TargetId> = c.replicas.iter().map(|r| r.target).collect();
            let wants: BTreeSet<TargetId> = c.preferred.iter().copied().collect();
            // A replica that is being resynced has not used its space there yet.
            let filled = |t: &TargetId| {
                has.contains(t) && c.state_of(*t) != Some(pb::ReplicaState::ReplicaServing)
            };
            let alive = |t: &TargetId| load.targets.get(t).is_some_and(|t| t.alive);
            let coming: Vec<TargetId> =
                wants.iter().copied().filter(|t| filled(t) && alive(t)).collect();
            has.symmetric_difference(&wants)
                .chain(&coming)
                .for_each(|t| *load.moving.entry(*t).or_default() += 1);
        }
        load
    }

    pub(super) fn moving(&self, t: TargetId) -> usize {
        self.moving.get(&t).copied().unwrap_or(0)
    }

    /// About how many bytes one replica of a target takes.
    fn each(&self, t: &pb::Target) -> u64 {
        t.used / self.replicas.get(&t.id).copied().unwrap_or(0).max(1) as u64
    }

    /// The target that replaces `old` in a chain: the heir if it may, else a target that still has
    /// all of the chain, else the least full one, counting each incoming replica as large as the
    /// target's average replica. It is on none of the other replicas' servers, and in a rack with
    /// as few of them as possible; if the rack is the reason for the move, with fewer than `old`. A
    /// chain of a pool stays within it if a member may take it. If none may, it leaves the pool,
    /// unless the reason is only its rack or its pool.
    fn heir(&self, c: &pb::Chain, old: &pb::Target, why: Why) -> Option<TargetId> {
        use pb::ReplicaState::{ReplicaServing, ReplicaSyncing, ReplicaWaiting};
        let others: Vec<TargetId> = c.preferred.iter().copied().filter(|t| *t != old.id).collect();
        let crowd = |t: &pb::Target| self.domains.crowd(t.id, &others);
        // It was to leave and still serves: nothing is copied.
        let has = |t: &pb::Target| c.state_of(t.id) == Some(ReplicaServing);
        // A replica that has just begun to resync does not show its size.
        let begins = matches!(c.state_of(old.id), None | Some(ReplicaSyncing | ReplicaWaiting));
        let source = c.head().filter(|_| begins).and_then(|t| self.targets.get(&t).copied());
        let each = self.each(source.unwrap_or(old));
        let could = |t: &&pb::Target| {
            let apart = others.iter().all(|o| self.domains.servers_differ(*o, t.id));
            let then = u128::from(t.used) + u128::from(each) * (self.moving(t.id) as u128 + 1);
            let room = has(t) || then * 100 <= u128::from(t.capacity) * FULL;
            t.alive && !t.draining && t.id != old.id && apart && room
        };
        let mut could: Vec<&pb::Target> = self.map.targets.iter().filter(could).collect();
        if let Some(pool) = self.pools.get(&c.id) {
            let member = |t: &&pb::Target| pool.targets.contains(&t.id);
            if could.iter().any(member) || matches!(why, Why::Crowded | Why::Pool) {
                could.retain(member);
            }
        }
        let fewest = could.iter().map(|t| crowd(t)).min()?;
        if why == Why::Crowded && fewest >= crowd(old) {
            return None;
        }
        let fullness = |t: &&pb::Target| {
            let used = t.used.saturating_add(self.each(t).saturating_mul(self.moving(t.id) as u64));
            let own = self.replicas.get(&t.id).copied().unwrap_or(0);
            (!has(t), u128::from(used) * 1000 / u128::from(t.capacity.max(1)), own, t.id)
        };
        let free = |t: &&pb::Target| has(t) || self.moving(t.id) < MOVES;
        match old.heir.filter(|h| could.iter().any(|t| t.id == *h)) {
            // The heir takes as many as it may at a time, and will take this one later.
            Some(h) => Some(h).filter(|h| self.moving(*h) < MOVES),
            None => could
                .into_iter()
                .filter(|t| crowd(t) == fewest)
                .filter(free)
                .min_by_key(fullness)
                .map(|t| t.id),
        }
    }

    /// What to add to the sentence about a move out of the chain's pool.
    fn outside(&self, c: &pb::Chain, to: TargetId) -> String {
        let left = self.pools.get(&c.id).filter(|p| !p.targets.contains(&to));
        left.map(|p| format!("; no target of pool '{}' can take it", p.name)).unwrap_or_default()
    }

    /// The target, if its replica of a chain at rest is to move for this reason.
    fn leaves(
        &self,
        c: &pb::Chain,
        t: TargetId,
        why: Why,
        dead: &BTreeSet<TargetId>,
    ) -> Option<&'a pb::Target> {
        let is = self.targets.get(&t).copied()?;
        let yes = match why {
            Why::Dead => dead.contains(&t) && !is.alive,
            Why::Drains => is.draining,
            // A missing copy is restored first.
            Why::Crowded => is_whole(c) && self.may_spread(c, t),
            Why::Pool => {
                is_whole(c) && self.pools.get(&c.id).is_some_and(|p| !p.targets.contains(&t))
            }
            Why::Full | Why::Fuller | Why::Heads => false,
        };
        yes.then_some(is)
    }

    /// Whether some rack has fewer of a target's fellow copies than its own rack: a cheap answer
    /// where there are more copies than racks.
    fn may_spread(&self, c: &pb::Chain, t: TargetId) -> bool {
        let others = || c.preferred.iter().filter(|o| **o != t);
        let least = |crowd: usize| {
            let has = |r: &Rack| others().filter(|o| self.domains.rack(**o) == Some(*r)).count();
            self.racks.len() > others().count() || self.racks.iter().any(|r| has(r) < crowd)
        };
        match self.domains.crowd(t, others()) {
            0 => false,
            crowd => least(crowd),
        }
    }

    /// The target, if a chain waits for it in vain: it is to join, but is long dead, was given up,
    /// or has become too full.
    fn waits_for(
        &self,
        c: &pb::Chain,
        t: TargetId,
        dead: &BTreeSet<TargetId>,
    ) -> Option<(&'a pb::Target, Why)> {
        use pb::ReplicaState::{ReplicaServing, ReplicaSyncing};
        let is = self.targets.get(&t).copied()?;
        let state = c.state_of(t);
        let takes_part = matches!(state, Some(ReplicaServing | ReplicaSyncing));
        if !takes_part && !is.alive && (is.given_up || dead.contains(&t)) {
            Some((is, Why::Dead))
        } else if state != Some(ReplicaServing) && is.alive && is_full(is) {
            Some((is, Why::Full))
        } else {
            None
        }
    }

    /// Whether `to` may replace `from` in a chain: it is on none of the other replicas' servers, as
    /// far from them as `from`, and does not take the chain out of its pool.
    pub(super) fn suits(&self, c: &pb::Chain, from: TargetId, to: TargetId) -> bool {
        let others = || c.preferred.iter().filter(|t| **t != from);
        let pool = self.pools.get(&c.id);
        !c.preferred.contains(&to)
            && pool.is_none_or(|p| p.targets.contains(&to) || !p.targets.contains(&from))
            && others().all(|o| self.domains.servers_differ(*o, to))
            && self.domains.crowd(to, others()) <= self.domains.crowd(from, others())
    }

    /// Whether `to` may head a chain instead of `from`: it is in the chain already, or may take
    /// that replica without becoming fuller than `from` is. So this does not undo a move that
    /// balanced how full targets are.
    fn may_head(&self, c: &pb::Chain, from: TargetId, to: TargetId) -> bool {
        if c.preferred.contains(&to) {
            return true;
        }
        let (Some(a), Some(b)) = (self.targets.get(&from), self.targets.get(&to)) else {
            return false;
        };
        let then = u128::from(b.used) + u128::from(self.each(a)) * (self.moving(to) as u128 + 1);
        let even = then.saturating_mul(u128::from(a.capacity))
            <= u128::from(a.used) * u128::from(b.capacity);
        let room = then * 100 <= u128::from(b.capacity) * FULL;
        let free = [from, to].iter().all(|t| self.moving(*t) < MOVES);
        even && room && free && self.suits(c, from, to)
    }

    pub(super) fn moves(&mut self, from: TargetId, to: TargetId) {
        for t in [from, to] {
            *self.moving.entry(t).or_default() += 1;
        }
        *self.replicas.entry(to).or_default() += 1;
    }
}

type Planned = BTreeMap<ChainId, (pb::Chain, String)>;

/// Why a replica is to move.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Why {
    Dead,
    /// The taker of a move under way has become too full.
    Full,
    Drains,
    Crowded,
    /// Decided by [`Balance`](super::balance::Balance).
    Fuller,
    Pool,
    /// Another target heads too few of this kind.
    Heads,
}

impl Why {
    pub(super) fn words(self) -> &'static str {
        match self {
            Why::Dead => "the old target has been dead for long",
            Why::Full => "the old target has become too full",
            Why::Drains => "the old target is being drained",
            Why::Crowded => "another copy is in the same rack",
            Why::Fuller => "the old target is fuller",
            Why::Pool => "the old target is not in the pool of these files",
            Why::Heads => "the old target heads more than its share of chains",
        }
    }
}

/// Chains that are to get other targets now, with a sentence about each. In this order: a copy is
/// missing because its target is long dead; a target drains; copies share a rack that need not; a
/// pool's chain is on targets that are not members; a target heads too few. Chains in `changed` are
/// left alone. The last three are no emergency, and may find nothing for ever at the cost of all
/// chains times all targets: they are done only with `tidy`, the number of chains of each kind that
/// a target heads.
pub fn plan(
    map: &pb::ClusterMap,
    changed: &[pb::Chain],
    dead: &BTreeSet<TargetId>,
    tidy: Option<usize>,
) -> Vec<(pb::Chain, String)> {
    let racks = map.nodes.iter().any(|n| !n.rack.is_empty());
    let pools = map.sets.iter().any(|s| !s.pool.is_empty());
    let heads = tidy.map(|per| chain_table::rich_and_poor(map, per)).unwrap_or_default();
    let tidy = tidy.is_some() && (racks || pools);
    let full = map.targets.iter().any(is_full) && map.chains.iter().any(is_moving);
    if !tidy
        && heads.is_empty()
        && dead.is_empty()
        && !full
        && map.targets.iter().all(|t| !t.draining)
    {
        return Vec::new();
    }
    let mut load = Load::new(map);
    let open = recovery::in_doubt(map);
    let busy: BTreeSet<u32> = changed.iter().map(|c| c.id).chain(open).collect();
    let rests = |c: &&pb::Chain| !busy.contains(&c.id) && !is_moving(c) && c.head().is_some();
    let resting: Vec<&pb::Chain> = map.chains.iter().filter(rests).collect();
    let mut out = Planned::new();
    let under_way = |c: &&pb::Chain| !busy.contains(&c.id) && is_moving(c) && c.head().is_some();
    for c in map.chains.iter().filter(under_way) {
        // The replacement is long dead or too full: another place is needed.
        let Some((old, why)) = c.preferred.iter().find_map(|t| load.waits_for(c, *t, dead)) else {
            continue;
        };
        if let Some(heir) = load.heir(c, old, why) {
            load.moves(old.id, heir);
            out.insert(
                c.id,
                moved(c, old.id, heir, &(why.words().to_owned() + &load.outside(c, heir))),
            );
        }
    }
    let reasons = [Why::Dead, Why::Drains, Why::Crowded, Why::Pool];
    for &why in if tidy { &reasons[..] } else { &reasons[..2] } {
        for c in &resting {
            if out.contains_key(&c.id) {
                continue;
            }
            let Some(old) = c.preferred.iter().rev().find_map(|t| load.leaves(c, *t, why, dead))
            else {
                continue;
            };
            if why != Why::Dead && load.moving(old.id) >= MOVES {
                continue;
            }
            if let Some(heir) = load.heir(c, old, why) {
                load.moves(old.id, heir);
                out.insert(
                    c.id,
                    moved(c, old.id, heir, &(why.words().to_owned() + &load.outside(c, heir))),
                );
            }
        }
    }
    for kind in heads {
        spread_heads(&mut load, &resting, kind, &mut out);
    }
    out.into_values().collect()
}

/// Gives chains another head: a target that heads too few, in place of one that heads more than its
/// share.
fn spread_heads(load: &mut Load, resting: &[&pb::Chain], mut kind: RichAndPoor, out: &mut Planned) {
    let rich: BTreeSet<ChainId> = kind.chains.into_iter().collect();
    for c in resting.iter().filter(|c| rich.contains(&c.id) && is_whole(c)) {
        let from = c.ost_index();
        if out.contains_key(&c.id) || kind.heads[&from] <= kind.per {
            continue;
        }
        let may = |t: &&TargetId| kind.heads[*t] * 2 <= kind.per && load.may_head(c, from, **t);
        let Some(to) = kind.poor.iter().filter(may).min_by_key(|t| kind.heads[*t]).copied() else {
            continue;
        };
        kind.heads.entry(from).and_modify(|n| *n -= 1);
        kind.heads.entry(to).and_modify(|n| *n += 1);
        if !c.preferred.contains(&to) {
            load.moves(from, to);
        }
        out.insert(c.id, moved(c, from, to, Why::Heads.words()));
    }
}

/// The chain with `to` in the place of `from`, and a sentence about it. The two change places if
/// both are in the chain.
pub(super) fn moved(c: &pb::Chain, from: TargetId, to: TargetId, why: &str) -> (pb::Chain, String) {
    let mut n = pb::Chain { epoch: c.epoch + 1, ..c.clone() };
    for t in &mut n.preferred {
        *t = if *t == from {
            to
        } else if *t == to {
            from
        } else {
            *t
        };
    }
    let what = if c.preferred.contains(&to) { "changes places with" } else { "moves to" };
    (n, format!("chain {}: its replica on target {from} {what} target {to}: {why}", c.id))
}

#[cfg(test)]
#[path = "moves_tests.rs"]
mod tests;
