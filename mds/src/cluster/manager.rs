//! What only the leader knows about storage servers: their heartbeats and leases, and the map
//! changes that follow from them. A pure state machine: its inputs are heartbeats, ticks and maps;
//! its outputs proposals and grants. A new leader starts with a new one.
//!
//! The leader counts a lease from the heartbeat's arrival, its holder from when it sent the
//! heartbeat, so the holder stops first. While a change that takes a target out of a chain is under
//! way, its node is granted nothing: it would continue to serve by the map it has.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use pb::ReplicaState;
use strake_proto::{
    ChainId, Code, Error, NodeId, Result, TargetId,
    map::{ChainExt, MapView},
    pb,
};

use super::{
    anew,
    balance::Balance,
    chain_table,
    kept_waiting::KeptWaiting,
    membership, moves, recovery,
    rows::Membership,
    slow::{self, SlowTargets},
    state,
};

/// New targets wait this long for more to come before chains are made; the same time passes between
/// two searches for missing chains.
pub(crate) const SETTLE: Duration = Duration::from_secs(1);
/// How often small changes of a target's used bytes reach the map.
const USED_PERIOD: Duration = Duration::from_secs(10);
/// Time between two checks of how full targets are.
const BALANCE_PERIOD: Duration = Duration::from_secs(1);
/// Time between two searches for replicas that could be placed better.
const TIDY_PERIOD: Duration = Duration::from_secs(1);
/// Longest `unreachable` list that is accepted.
const MAX_UNREACHABLE: usize = 1024;
/// A node that others report unreachable for this long is shut out, though it sends heartbeats.
const SHUN_AFTER: Duration = Duration::from_millis(1500);
/// Reports, or a node's own heartbeats, with a longer gap than this are not continuous.
const GAP: Duration = Duration::from_millis(600);
/// How long such a node stays out: at first, and at most.
const SHUN_MIN: Duration = Duration::from_secs(10);
const SHUN_MAX: Duration = Duration::from_secs(300);
/// A target that is asked to leave its chains does so within this time, or not at all: a storage
/// server waits less long for the answer to a heartbeat.
const STEPS_OUT: Duration = Duration::from_secs(3);
/// If a node was back for this long, its next time out is as short as the first.
const FORGIVEN: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// How long a storage server may act on an answered heartbeat.
    pub lease: Duration,
    /// The first chains are made once this many targets are alive; 0: with any number.
    pub expect_targets: usize,
    /// How many chains of each number of copies a target heads.
    pub chains_per_target: usize,
    /// The data of a target that was dead for this long is copied to others; zero: never.
    pub rebuild_after: Duration,
    /// Percentage points that targets may differ in how full they are before replicas move; 0: they
    /// never move.
    pub balance_percent: u32,
    pub slow: slow::Options,
}

/// A map change to propose. [`Manager::resolved`] must be called with its outcome.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Proposal {
    pub update: pb::MapUpdate,
    /// One sentence per chain and target changed, for the log.
    pub why: Vec<String>,
}

#[derive(Default)]
struct Seen {
    at: Duration,
    /// The boot id of the process that was last heard of.
    stamp: u64,
    used: u64,
    capacity: u64,
    /// The boot id of the process whose device failed, and when that became known.
    failed: Option<u64>,
    failed_at: Duration,
    /// (boot id, count): how often this process left its chains for lack of space, and returned.
    /// Odd: it is out.
    lapses: (u64, u32),
    synced: BTreeSet<ChainId>,
    /// Bytes of each chain, in order of the chains; `None`: not reported.
    stored: Option<Vec<(ChainId, u64)>>,
    /// Map version the reporter acted on.
    version: u64,
    /// The number of the last heartbeat of this process.
    number: u64,
    /// It was shut out and has given its lease up.
    leaseless: bool,
    /// Its chunk table takes no writes for lack of space.
    table_full: bool,
    /// When it was last asked to leave its chains because of that.
    asked_out: Option<Duration>,
}

/// A node that its peers cannot reach.
#[derive(Default)]
struct Shun {
    /// The nodes that report it, since when, and when last.
    reports: BTreeMap<NodeId, (Duration, Duration)>,
    until: Duration,
    /// How long it last stayed out; the next time is twice as long.
    backoff: Duration,
}

/// When the leader last did each of its periodic jobs.
struct LastTimes {
    /// Looked for chains that are missing.
    chains: Duration,
    /// Wrote into the map how full targets are.
    usage: Duration,
    /// Looked for targets that are fuller than others.
    balance: Duration,
    /// Looked for replicas that could be placed better.
    tidy: Duration,
}

/// See the module.
pub(crate) struct Manager {
    options: Options,
    elected: Duration,
    seen: BTreeMap<TargetId, Seen>,
    /// Targets that lose a SERVING or SYNCING place through the proposal under way.
    leaving: BTreeSet<TargetId>,
    in_flight: bool,
    in_doubt: bool,
    /// Version of the last map that was noted.
    known: Option<u64>,
    /// Per chain: its epoch, and the first map version known to have it.
    since: BTreeMap<ChainId, (u64, u64)>,
    targets: usize,
    last_registration: Duration,
    last: LastTimes,
    balance: Balance,
    /// The map's version, if the last search found no replica that could be placed better.
    tidy: Option<u64>,
    shuns: BTreeMap<NodeId, Shun>,
    /// Since when each node sends heartbeats without a gap, and its last one.
    beating: BTreeMap<NodeId, (Duration, Duration)>,
    /// When each node last reported up to which number it knows the evictions, and that number.
    told: BTreeMap<NodeId, (Duration, u64)>,
    kept_waiting: KeptWaiting,
    pub slow: SlowTargets,
}

impl Manager {
    /// `now` (time since boot) is the time of the election, or later; all leases count as renewed
    /// then.
    pub(crate) fn new(options: Options, now: Duration, map: &MapView) -> Manager {
        let mut m = Manager {
            options,
            elected: now,
            seen: BTreeMap::new(),
            leaving: BTreeSet::new(),
            in_flight: false,
            in_doubt: false,
            known: None,
            since: BTreeMap::new(),
            targets: map.map.targets.len(),
            last_registration: now,
            last: LastTimes { chains: now, usage: now, balance: now, tidy: now },
            balance: Balance::new(options.balance_percent),
            tidy: None,
            shuns: BTreeMap::new(),
            beating: BTreeMap::new(),
            told: BTreeMap::new(),
            kept_waiting: KeptWaiting::default(),
            slow: SlowTargets::new(options.slow),
        };
        m.map_changed(now, map);
        m
    }

    /// To be called with every map that was applied, before anything else that uses it.
    pub(crate) fn map_changed(&mut self, now: Duration, map: &MapView) {
        if self.known == Some(map.version()) {
            return;
        }
        self.known = Some(map.version());
        for c in &map.map.chains {
            let have = self.since.entry(c.id).or_insert((0, 0));
            if have.0 != c.epoch {
                *have = (c.epoch, map.version());
            }
        }
        if map.map.targets.len() != self.targets {
            self.targets = map.map.targets.len();
            self.last_registration = now;
        }
    }

    /// Counts all nodes as heard of now: for a server that did not run for a while and could not
    /// listen.
    pub(crate) fn all_heard(&mut self, now: Duration) {
        self.elected = now;
        self.slow.restart();
        for s in self.seen.values_mut() {
            s.at = s.at.max(now);
        }
    }

    /// The number up to which every storage server that may hold a lease refuses the sessions
    /// evicted by then; `u64::MAX` when none holds one.
    pub(crate) fn known_to_all(&self, now: Duration, map: &MapView) -> u64 {
        let servers = map.map.nodes.iter().filter(|n| n.role == strake_proto::map::ROLE_OSS);
        let told = servers.map(|n| self.told.get(&n.id).copied().unwrap_or((self.elected, 0)));
        let holds = |at: Duration| now.saturating_sub(at.max(self.elected)) <= self.options.lease;
        told.filter(|(at, _)| holds(*at)).map(|(_, number)| number).min().unwrap_or(u64::MAX)
    }

    /// Whether no write of sessions evicted up to this number can arrive any more.
    pub(crate) fn all_know(&self, now: Duration, eviction: u64, map: &MapView) -> bool {
        self.known_to_all(now, map) >= eviction
    }

    /// Whether no replica in sync of a chain is working on a request of a session evicted up to
    /// this number, or will accept one. A replica that comes into sync later does so in a newer
    /// epoch.
    pub(crate) fn chain_knows(&self, eviction: u64, chain: &pb::Chain, map: &MapView) -> bool {
        self.known_of(chain, map) >= eviction
    }

    /// The last eviction that all replicas in sync of a chain know; 0 while one of them has not
    /// been heard of.
    pub(crate) fn known_of(&self, chain: &pb::Chain, map: &MapView) -> u64 {
        let number = |t| self.told.get(&map.node_of(t)?.id).map(|told| told.1);
        chain.serving().map(|t| number(t).unwrap_or(0)).min().unwrap_or(u64::MAX)
    }

    /// A heartbeat arrived at `now`. `ESTALE` asks the sender to register first: its node, target
    /// or boot id is not the registered one.
    pub(crate) fn heartbeat(
        &mut self,
        now: Duration,
        h: &pb::HeartbeatRequest,
        map: &MapView,
    ) -> Result<()> {
        if map.node(h.node).is_none_or(|n| n.role != strake_proto::map::ROLE_OSS) {
            return Err(Error::new(
                Code::Stale,
                format!("storage server {} is not registered; register first", h.node),
            ));
        }
        if h.targets.len() > state::MAX_NODE_TARGETS || h.unreachable.len() > MAX_UNREACHABLE {
            return Err(Error::new(Code::Inval, "heartbeat lists too long"));
        }
        for r in &h.targets {
            if map.target(r.target).is_none_or(|t| t.node != h.node || t.stamp != r.stamp) {
                let m = format!(
                    "target {} is registered by another node or start; register it again",
                    r.target
                );
                return Err(Error::new(Code::Stale, m));
            }
        }
        // This counts also for a node that is shut out: others may not reach it because its device
        // hangs.
        for (r, device) in h.targets.iter().filter_map(|r| Some((r, r.device.as_ref()?))) {
            self.slow.told(now, r.target, r.stamp, device);
        }
        if self.shunned(now, h.node) {
            self.note_leaseless(h);
            return Ok(());
        }
        self.told.insert(h.node, (now, h.evicted_seen));
        let stored: usize = h.targets.iter().map(|r| r.stored.len()).sum();
        for r in &h.targets {
            let s = self.seen.entry(r.target).or_default();
            let before = if s.stamp == r.stamp { s.number } else { 0 };
            (s.at, s.stamp, s.number, s.leaseless) = (now, r.stamp, before.max(h.number), false);
            s.used = r.used;
            s.capacity = r.capacity;
            s.table_full = r.table_full;
            if r.failed && s.failed != Some(r.stamp) {
                (s.failed, s.failed_at) = (Some(r.stamp), now);
            }
            // A later heartbeat may overtake this one: the number only grows.
            let before = if s.lapses.0 == r.stamp { s.lapses.1 } else { 0 };
            s.lapses = (r.stamp, before.max(r.lapses));
            // Only chains that the target is in: so the map limits the list.
            let own = |c: &&ChainId| map.chain(**c).is_some_and(|c| c.state_of(r.target).is_some());
            s.synced = r.synced_chains.iter().filter(own).copied().collect();
            // An empty list from a target with data comes from a server of a version that does not
            // report it. An overlong list is ignored; it is no reason to refuse a lease.
            let says = (!r.stored.is_empty() || r.used == 0) && stored <= recovery::MAX_SIGHTS;
            let known = r.stored.iter().filter(|c| map.chain(c.chain).is_some());
            s.stored = says.then(|| known.map(|c| (c.chain, c.bytes)).collect());
            s.version = h.map_version;
        }
        self.note_unreachable(now, h, map);
        Ok(())
    }

    /// The heartbeat of this node that arrived at `now` waits until it is confirmed that this
    /// server leads.
    pub(crate) fn waits(&mut self, now: Duration, node: NodeId) {
        self.kept_waiting.begin(now, node);
    }

    /// The heartbeat that arrived at `arrived` no longer waits. Its targets count as heard of now:
    /// the next heartbeat was not sent earlier.
    pub(crate) fn answered(
        &mut self,
        now: Duration,
        arrived: Duration,
        node: NodeId,
        map: &MapView,
    ) {
        if !self.kept_waiting.end(now, arrived, node) || self.shunned(now, node) {
            return;
        }
        for t in map.map.targets.iter().filter(|t| t.node == node) {
            // Only the targets that it named: a server may have given up another target since.
            if let Some(s) =
                self.seen.get_mut(&t.id).filter(|s| s.stamp == t.stamp && s.at >= arrived)
            {
                s.at = s.at.max(now);
            }
        }
    }

    /// Whether a heartbeat that named this target has no answer yet.
    fn is_kept_waiting(&self, now: Duration, target: &pb::Target) -> bool {
        let since =
            self.kept_waiting.since(now, target.node).filter(|_| !self.shunned(now, target.node));
        since.zip(self.lease_from(target)).is_some_and(|(since, from)| from >= since)
    }

    /// Notes that a node that is shut out has given up its lease. A late heartbeat is ignored: the
    /// node may have been granted a lease since.
    fn note_leaseless(&mut self, h: &pb::HeartbeatRequest) {
        for r in h.targets.iter().filter(|_| h.leaseless) {
            if let Some(s) =
                self.seen.get_mut(&r.target).filter(|s| s.stamp == r.stamp && h.number > s.number)
            {
                s.leaseless = true;
            }
        }
    }

    /// The lease to answer a heartbeat with, in milliseconds; 0 for a node that is shut out, which
    /// then gives up its lease. Call this after leadership was confirmed for the heartbeat, and
    /// answer with the newest applied map. `Overloaded`: no lease now, ask again.
    pub(crate) fn grant(&self, now: Duration, node: NodeId, map: &MapView) -> Result<u32> {
        if self.shunned(now, node) {
            return Ok(0);
        }
        if map.map.targets.iter().any(|t| t.node == node && self.leaving.contains(&t.id)) {
            return Err(Error::new(
                Code::Overloaded,
                "a map change about this node is under way; ask again",
            ));
        }
        Ok(u32::try_from(self.options.lease.as_millis()).unwrap_or(u32::MAX))
    }

    /// Targets of a node that are to leave their chains until there is space, for the answer to its
    /// heartbeat. A chunk table that takes no writes cannot record a trim or a removal, which the
    /// other replicas could make.
    pub(crate) fn step_out(&mut self, now: Duration, node: NodeId, map: &MapView) -> Vec<TargetId> {
        let mut out = Vec::new();
        // A leader before this one may have asked others.
        if now.saturating_sub(self.elected) < STEPS_OUT {
            return out;
        }
        for t in map.map.targets.iter().filter(|t| t.node == node && t.alive) {
            let full = self.seen.get(&t.id).is_some_and(|s| s.stamp == t.stamp && s.table_full);
            if full && self.can_spare(now, t.id, map) {
                out.push(t.id);
                // Set before the next target of this node is checked: the two could be the only
                // replicas of a chain.
                self.seen.entry(t.id).or_default().asked_out = Some(now);
            }
        }
        out
    }

    /// Whether every chain that has data on this target, and that it serves or was the last to
    /// serve, has another replica in sync that stays.
    fn can_spare(&self, now: Duration, target: TargetId, map: &MapView) -> bool {
        let stored = self.seen.get(&target).and_then(|s| s.stored.as_ref());
        let has_data =
            |c: &pb::Chain| stored.is_none_or(|all| all.iter().any(|(id, _)| *id == c.id));
        let needed = |c: &&pb::Chain| {
            let state = c.state_of(target);
            matches!(state, Some(ReplicaState::ReplicaServing | ReplicaState::ReplicaLastsrv))
                && has_data(c)
        };
        let stays = |t: TargetId| t != target && map.target(t).is_some_and(|t| self.stays(now, t));
        map.map.chains.iter().filter(needed).all(|c| c.serving().any(stays))
    }

    /// Whether a target was heard of recently, can serve, and was not asked to leave its chains.
    fn stays(&self, now: Duration, target: &pb::Target) -> bool {
        let Some(s) = self.seen.get(&target.id).filter(|s| s.stamp == target.stamp) else {
            return false;
        };
        let asked = s.asked_out.is_some_and(|at| now.saturating_sub(at) < STEPS_OUT);
        let goes = asked || s.table_full || self.leaving.contains(&target.id);
        !goes && now.saturating_sub(s.at) <= GAP && !self.lease_left(now, target).is_zero()
    }

    /// How much longer the lease of a target counts, zero if it ran out.
    pub(crate) fn lease_left(&self, now: Duration, target: &pb::Target) -> Duration {
        self.lease_from(target)
            .map_or(Duration::ZERO, |from| (from + self.options.lease).saturating_sub(now))
    }

    /// The time that a target's lease counts from, `None` if it has none.
    fn lease_from(&self, target: &pb::Target) -> Option<Duration> {
        match self.seen.get(&target.id) {
            Some(s) if s.failed == Some(target.stamp) => None,
            Some(s) if s.stamp == target.stamp && s.leaseless => None,
            Some(s) if s.lapses.0 == target.stamp && s.lapses.1 % 2 == 1 => None,
            Some(s) if s.stamp == target.stamp => Some(s.at),
            _ if target.alive => Some(self.elected),
            // It has registered, but may not have received the answer: then it does not know its
            // chains.
            _ => None,
        }
    }

    /// All that is due at `now`, `None` if nothing is or a proposal is under way.
    pub(crate) fn tick(&mut self, now: Duration, map: &MapView) -> Option<Proposal> {
        if self.in_flight {
            return None;
        }
        self.judge_unreachable(now);
        let mut why = Vec::new();
        let targets = self.changed_targets(now, map, &mut why);
        let mut next = map.map.clone();
        for t in &targets {
            if let Some(have) = next.targets.iter_mut().find(|h| h.id == t.id) {
                *have = t.clone();
            }
        }
        let alive: BTreeSet<TargetId> =
            next.targets.iter().filter(|t| t.alive).map(|t| t.id).collect();
        let same = |n: &pb::Target| map.target(n.id).is_some_and(|t| t.alive == n.alive);
        if targets.iter().all(same)
            && let Some(new) = self.new_chains(now, map, alive.len())
        {
            return Some(self.proposes(map, new));
        }
        let mut chains = self.changed_chains(map, &alive, &mut why);
        let tidy =
            now.saturating_sub(self.last.tidy) >= TIDY_PERIOD && self.tidy != Some(map.version());
        let per = tidy.then_some(self.options.chains_per_target);
        let planned = moves::plan(&next, &chains, &self.long_dead(now, &next), per);
        if tidy {
            self.last.tidy = now;
            let nothing = planned.is_empty() && targets.is_empty() && chains.is_empty();
            self.tidy = nothing.then_some(map.version());
        }
        for (chain, sentence) in planned {
            why.push(sentence);
            chains.push(chain);
        }
        for (chain, sentence) in self.evened(now, next, &chains) {
            why.push(sentence);
            chains.push(chain);
        }
        if targets.is_empty() && chains.is_empty() {
            return None;
        }
        Some(self.proposes(
            map,
            Proposal { update: pb::MapUpdate { chains, targets, ..Default::default() }, why },
        ))
    }

    /// New chains, if some are missing. This change is long and is proposed alone, when no target
    /// has come or gone; other changes have the next turn.
    fn new_chains(&mut self, now: Duration, map: &MapView, alive: usize) -> Option<Proposal> {
        // Not at every tick: if the change is refused, other changes must not wait.
        let settled = now.saturating_sub(self.last_registration.max(self.last.chains)) >= SETTLE;
        // Only the first chains wait for `expect_targets`, not later ones when some targets are
        // down.
        let waits = map.map.sets.is_empty() && alive < self.options.expect_targets;
        if !settled || waits {
            return None;
        }
        self.last.chains = now;
        let (chains, sets) = chain_table::make_chains(&map.map, self.options.chains_per_target)?;
        let why = vec![format!("{} new chains in {} sets", chains.len(), sets.len())];
        Some(Proposal { update: pb::MapUpdate { chains, sets, ..Default::default() }, why })
    }

    /// Moves that make targets equally full, in the map with these changed chains.
    fn evened(
        &mut self,
        now: Duration,
        mut map: pb::ClusterMap,
        changed: &[pb::Chain],
    ) -> Vec<(pb::Chain, String)> {
        if now.saturating_sub(self.last.balance) < BALANCE_PERIOD {
            return Vec::new();
        }
        self.last.balance = now;
        let changed: BTreeMap<ChainId, &pb::Chain> = changed.iter().map(|c| (c.id, c)).collect();
        let open = recovery::in_doubt(&map);
        for c in &mut map.chains {
            if let Some(new) = changed.get(&c.id) {
                *c = (*new).clone();
            }
        }
        let seen = &self.seen;
        let stored = |t| seen.get(&t).and_then(|s| s.stored.as_deref());
        let mut moves = self.balance.plan(&map, &stored);
        moves.retain(|(c, _)| !changed.contains_key(&c.id) && !open.contains(&c.id));
        moves
    }

    fn proposes(&mut self, map: &MapView, mut p: Proposal) -> Proposal {
        self.in_flight = true;
        self.leaving = leaving(map, &p.update.chains);
        p.update.expect_version = map.version();
        p
    }

    /// The proposal was applied or refused (`known`), or its outcome is unknown. In that case this
    /// manager proposes nothing more, and grants nothing to the nodes concerned, until it is known
    /// or the next leader takes over.
    pub(crate) fn resolved(&mut self, known: bool) {
        self.in_doubt = !known;
        if known {
            self.in_flight = false;
            self.leaving.clear();
        }
    }

    /// Whether a proposal's outcome is unknown. It becomes known, and [`Manager::resolved`], once
    /// any later proposal of the same term has been applied.
    pub(crate) fn in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// Chains that no replica serves, and whose in-sync replicas are all gone for good or long
    /// dead, with their epochs.
    pub(crate) fn stranded(&self, now: Duration, map: &MapView) -> Vec<(ChainId, u64)> {
        let all = anew::stranded(&map.map, &self.long_dead(now, &map.map));
        all.into_iter().filter_map(|c| Some((c, map.chain(c)?.epoch))).collect()
    }

    /// Whether a target holds nothing of a chain that no replica serves, and accepts nothing of it
    /// before that changes.
    pub(crate) fn is_blank(
        &self,
        now: Duration,
        target: TargetId,
        chain: &pb::Chain,
        map: &MapView,
    ) -> bool {
        let alive = |t: &pb::Target| !self.lease_left(now, t).is_zero();
        let seen = self
            .seen
            .get(&target)
            .filter(|s| map.target(target).is_some_and(|t| t.stamp == s.stamp && alive(t)));
        let has_none =
            |s: &Seen| s.stored.as_ref().is_some_and(|all| all.iter().all(|(c, _)| *c != chain.id));
        self.acts(chain, target) && seen.is_some_and(has_none)
    }

    /// Targets that were not heard of for so long that nothing waits for them any more.
    fn long_dead(&self, now: Duration, map: &pb::ClusterMap) -> BTreeSet<TargetId> {
        let heard = |t: &pb::Target| {
            let at = |s: &Seen| if s.failed == Some(t.stamp) { s.failed_at } else { s.at };
            self.seen.get(&t.id).map_or(self.elected, |s| at(s).max(self.elected))
        };
        let gone = |t: &&pb::Target| {
            !t.alive && now.saturating_sub(heard(t)) >= self.options.rebuild_after
        };
        match self.options.rebuild_after.is_zero() {
            true => BTreeSet::new(),
            false => map.targets.iter().filter(gone).map(|t| t.id).collect(),
        }
    }

    fn changed_targets(
        &mut self,
        now: Duration,
        map: &MapView,
        why: &mut Vec<String>,
    ) -> Vec<pb::Target> {
        let period = now.saturating_sub(self.last.usage) >= USED_PERIOD;
        if period {
            self.last.usage = now;
        }
        let mut changed = Vec::new();
        for t in &map.map.targets {
            let mut n = t.clone();
            n.alive = !self.lease_left(now, t).is_zero() || t.alive && self.is_kept_waiting(now, t);
            if let Some(s) = self.seen.get(&t.id).filter(|_| n.alive) {
                let moved = s.used.abs_diff(t.used) > t.capacity / 100 || s.capacity != t.capacity;
                if moved || period || n.alive != t.alive {
                    (n.used, n.capacity) = (s.used, s.capacity);
                }
            }
            if t.alive && self.seen.get(&t.id).is_some_and(|s| s.failed == Some(t.stamp)) {
                Membership::DeviceFailed.taken();
            }
            if n.alive != t.alive {
                why.push(format!(
                    "target {} is {}",
                    t.id,
                    if n.alive { "alive" } else { "not alive: its lease ran out" }
                ));
            }
            if n != *t {
                changed.push(n);
            }
        }
        changed
    }

    fn changed_chains(
        &self,
        map: &MapView,
        alive: &BTreeSet<TargetId>,
        why: &mut Vec<String>,
    ) -> Vec<pb::Chain> {
        let mut changed = Vec::new();
        let open = recovery::in_doubt(&map.map);
        for c in map.map.chains.iter().filter(|c| !c.lost && !open.contains(&c.id)) {
            let facts = membership::Facts {
                alive: |t| alive.contains(&t),
                synced: self.synced(c),
                acts: |t| self.acts(c, t),
            };
            if let Some(n) = membership::evaluate(c, &facts) {
                why.push(format!(
                    "chain {} epoch {}: {} -> {}",
                    c.id,
                    n.epoch,
                    describe(c),
                    describe(&n)
                ));
                changed.push(n);
            }
        }
        changed
    }

    /// Whether the tail reports, knowing the chain's current epoch, that its successor holds all
    /// that it has.
    fn synced(&self, chain: &pb::Chain) -> bool {
        let Some(tail) = chain.tail() else { return false };
        self.acts(chain, tail) && self.seen.get(&tail).is_some_and(|s| s.synced.contains(&chain.id))
    }

    /// Whether a target's node has reported that it acts on the chain's current epoch.
    fn acts(&self, chain: &pb::Chain, target: TargetId) -> bool {
        let since = self.since.get(&chain.id).filter(|(epoch, _)| *epoch == chain.epoch);
        since.is_some_and(|(_, v)| self.seen.get(&target).is_some_and(|s| s.version >= *v))
    }

    fn shunned(&self, now: Duration, node: NodeId) -> bool {
        self.shuns.get(&node).is_some_and(|s| now < s.until)
    }

    fn note_unreachable(&mut self, now: Duration, h: &pb::HeartbeatRequest, map: &MapView) {
        let (since, last) = self.beating.entry(h.node).or_insert((now, now));
        if now.saturating_sub(*last) > GAP {
            *since = now;
        }
        *last = now;
        for n in h.unreachable.iter().filter(|n| **n != h.node && map.node(**n).is_some()) {
            let shun = self.shuns.entry(*n).or_default();
            let (since, last) = shun.reports.entry(h.node).or_insert((now, now));
            if now.saturating_sub(*last) > GAP {
                *since = now;
            }
            *last = now;
        }
        for (n, s) in &mut self.shuns {
            if !h.unreachable.contains(n) {
                s.reports.remove(&h.node);
            }
        }
    }

    /// A broken link between two nodes that both reach this server would stall their chains for
    /// ever. The node that more others report is shut out; on a tie the one with the higher id. It
    /// may return after a while, which doubles each time, unless it was back for long.
    fn judge_unreachable(&mut self, now: Duration) {
        let complaints = |node: &NodeId, s: &Shun| {
            // A node that is silent or has just returned is not cut off: it is dead or starting.
            let Some((beats_since, beat)) = self.beating.get(node) else { return 0 };
            if now.saturating_sub(*beat) > GAP {
                return 0;
            }
            let lasting = |(since, last): &&(Duration, Duration)| {
                now.saturating_sub(*last) <= GAP
                    && last.saturating_sub(*since.max(beats_since)) >= SHUN_AFTER
            };
            s.reports.values().filter(lasting).count()
        };
        // Reports of a node that is shut out do not count: the fault may be its own.
        let out: BTreeSet<NodeId> =
            self.shuns.iter().filter(|(_, s)| now < s.until).map(|(n, _)| *n).collect();
        for s in self.shuns.values_mut() {
            s.reports.retain(|from, _| !out.contains(from));
        }
        let worst = self
            .shuns
            .iter()
            .filter(|(n, _)| !out.contains(n))
            .map(|(n, s)| (complaints(n, s), *n))
            .filter(|(reports, _)| *reports > 0)
            .max();
        if let Some(s) = worst.and_then(|(_, n)| self.shuns.get_mut(&n)) {
            let before =
                if now.saturating_sub(s.until) < FORGIVEN { s.backoff } else { Duration::ZERO };
            s.backoff = (before * 2).clamp(SHUN_MIN, SHUN_MAX);
            s.until = now + s.backoff;
            s.reports.clear();
        }
    }
}

fn leaving(map: &MapView, chains: &[pb::Chain]) -> BTreeSet<TargetId> {
    let takes_part = |s: Option<ReplicaState>| {
        matches!(s, Some(ReplicaState::ReplicaServing | ReplicaState::ReplicaSyncing))
    };
    let mut out = BTreeSet::new();
    for n in chains {
        let Some(old) = map.chain(n.id) else { continue };
        let left = |t: &&pb::Replica| {
            takes_part(old.state_of(t.target)) && !takes_part(n.state_of(t.target))
        };
        out.extend(n.replicas.iter().filter(left).map(|r| r.target));
    }
    out
}

fn describe(c: &pb::Chain) -> String {
    let word = |r: &pb::Replica| {
        let state = match r.state() {
            ReplicaState::ReplicaUnknown => "unknown",
            ReplicaState::ReplicaServing => "serving",
            ReplicaState::ReplicaSyncing => "syncing",
            ReplicaState::ReplicaWaiting => "waiting",
            ReplicaState::ReplicaOffline => "offline",
            ReplicaState::ReplicaLastsrv => "last-serving",
        };
        format!("{}:{state}", r.target)
    };
    c.replicas.iter().map(word).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
#[path = "manager_tests.rs"]
mod tests;
