//! What only the leader knows about storage servers, their heartbeats and leases, and the map
//! changes that follow from it. A pure state machine: heartbeats, ticks and maps in; proposals and
//! grants out. A new leader starts a new one.
//!
//! A lease is counted here from the heartbeat's arrival and by its holder from when it sent it, so
//! the holder stops first. While a change that takes a target out of a chain is under way, its node
//! is granted nothing: it would go on serving by the map it has.

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

/// New targets wait this long for company before chains are made; as long lies between two looks at
/// what is missing.
pub(crate) const SETTLE: Duration = Duration::from_secs(1);
/// Small changes of a target's used bytes reach the map this often.
const USED_PERIOD: Duration = Duration::from_secs(10);
/// Between two looks at how full targets are.
const BALANCE_PERIOD: Duration = Duration::from_secs(1);
/// Between two looks at replicas that could stand better.
const TIDY_PERIOD: Duration = Duration::from_secs(1);
/// Longest `unreachable` list that is looked at.
const MAX_UNREACHABLE: usize = 1024;
/// A node that others report unreachable for this long, though it heartbeats itself, is taken out.
const SHUN_AFTER: Duration = Duration::from_millis(1500);
/// What was not repeated for this long is not continuous: reports, and a node's own heartbeats.
const GAP: Duration = Duration::from_millis(600);
/// How long it then stays out at first, and at most.
const SHUN_MIN: Duration = Duration::from_secs(10);
const SHUN_MAX: Duration = Duration::from_secs(300);
/// One that is asked to leave its chains does so within this time, or not at all: a storage server
/// waits less for the answer to a heartbeat.
const STEPS_OUT: Duration = Duration::from_secs(3);
/// Back for so long, it stays out as at first when it has to go again.
const FORGIVEN: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// How long a storage server may act on an answered heartbeat.
    pub lease: Duration,
    /// The first chains are made once so many targets are alive; 0: any.
    pub expect_targets: usize,
    /// Chains of each number of copies that a target heads.
    pub chains_per_target: usize,
    /// What a target has that was dead for so long is copied to others; zero: never.
    pub rebuild_after: Duration,
    /// Points that targets may differ in how full they are before replicas move; 0: they do not.
    pub balance_percent: u32,
    pub slow: slow::Options,
}

/// A map change to propose. [`Manager::resolved`] must be called with what became of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Proposal {
    pub update: pb::MapUpdate,
    /// One sentence per chain and target changed, for the log.
    pub why: Vec<String>,
}

#[derive(Default)]
struct Seen {
    at: Duration,
    /// Of the life that was heard of.
    stamp: u64,
    used: u64,
    capacity: u64,
    /// The stamp of the life whose device failed, and since when that is known.
    failed: Option<u64>,
    failed_at: Duration,
    /// Of the life with this stamp: how often it left its chains for lack of space, and came back.
    /// Odd: it is out.
    lapses: (u64, u32),
    synced: BTreeSet<ChainId>,
    /// Bytes of each chain, in order of the chains; `None`: it does not say.
    stored: Option<Vec<(ChainId, u64)>>,
    /// Map version the reporter acted on.
    version: u64,
    /// The number of the last heartbeat of this life.
    number: u64,
    /// It was shut out and has given its lease up.
    leaseless: bool,
    /// Its chunk table takes no writes for want of space.
    table_full: bool,
    /// When it was last asked to leave its chains for that.
    asked_out: Option<Duration>,
}

/// A node that its peers cannot reach.
#[derive(Default)]
struct Shun {
    /// Who says so, since when, and when last.
    reports: BTreeMap<NodeId, (Duration, Duration)>,
    until: Duration,
    /// How long the next time.
    backoff: Duration,
}

/// When the leader last did what it does now and then.
struct LastTimes {
    /// Looked for chains that are missing.
    chains: Duration,
    /// Put into the map how full targets are.
    usage: Duration,
    /// Looked for targets that are fuller than others.
    balance: Duration,
    /// Looked for replicas that could stand better.
    tidy: Duration,
}

/// See the module.
pub(crate) struct Manager {
    options: Options,
    elected: Duration,
    seen: BTreeMap<TargetId, Seen>,
    /// Targets that lose a SERVING or SYNCING place by the proposal under way.
    leaving: BTreeSet<TargetId>,
    in_flight: bool,
    in_doubt: bool,
    /// Version of the map that was noted last.
    known: Option<u64>,
    /// Per chain: its epoch, and the first map version known to have it.
    since: BTreeMap<ChainId, (u64, u64)>,
    targets: usize,
    last_registration: Duration,
    last: LastTimes,
    balance: Balance,
    /// The map's version, if no replica could stand better when that was last looked for.
    tidy: Option<u64>,
    shuns: BTreeMap<NodeId, Shun>,
    /// Since when each node heartbeats without a gap, and its last one.
    beating: BTreeMap<NodeId, (Duration, Duration)>,
    /// When each node last said up to which number it knows the evictions, and that number.
    told: BTreeMap<NodeId, (Duration, u64)>,
    kept_waiting: KeptWaiting,
    pub slow: SlowTargets,
}

impl Manager {
    /// `now` (time since boot) is the election, or later; all leases count as renewed then.
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

    /// All were heard of just now: for a server that did not run for a while and could not listen.
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

    /// Whether nothing that sessions evicted by this number and before wrote can arrive any more.
    pub(crate) fn all_know(&self, now: Duration, eviction: u64, map: &MapView) -> bool {
        self.known_to_all(now, map) >= eviction
    }

    /// Whether no replica in sync of a chain has anything in work, or will have, that sessions sent
    /// which were evicted by this number and before. A replica that comes into sync later does so
    /// in a newer epoch.
    pub(crate) fn chain_knows(&self, eviction: u64, chain: &pb::Chain, map: &MapView) -> bool {
        self.known_of(chain, map) >= eviction
    }

    /// The last eviction that all replicas in sync of a chain know of; 0 while one of them has not
    /// been heard of.
    pub(crate) fn known_of(&self, chain: &pb::Chain, map: &MapView) -> u64 {
        let number = |t| self.told.get(&map.node_of(t)?.id).map(|told| told.1);
        chain.serving().map(|t| number(t).unwrap_or(0)).min().unwrap_or(u64::MAX)
    }

    /// A heartbeat arrived at `now`. `ESTALE` asks the sender to register first: its node, target
    /// or stamp is not the registered one.
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
        // Also of one that is shut out: others may not reach it because its device hangs.
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
            // A heartbeat may be overtaken by a later one: the number only grows.
            let before = if s.lapses.0 == r.stamp { s.lapses.1 } else { 0 };
            s.lapses = (r.stamp, before.max(r.lapses));
            // Only chains it is a member of: the list is bounded by the map.
            let own = |c: &&ChainId| map.chain(**c).is_some_and(|c| c.state_of(r.target).is_some());
            s.synced = r.synced_chains.iter().filter(own).copied().collect();
            // Nothing is stored, or the server is of a version that does not say what. A list
            // without end is no reason to refuse a lease.
            let says = (!r.stored.is_empty() || r.used == 0) && stored <= recovery::MAX_SIGHTS;
            let known = r.stored.iter().filter(|c| map.chain(c.chain).is_some());
            s.stored = says.then(|| known.map(|c| (c.chain, c.bytes)).collect());
            s.version = h.map_version;
        }
        self.note_unreachable(now, h, map);
        Ok(())
    }

    /// The heartbeat of this node that arrived at `now` is kept waiting until it is confirmed that
    /// this server leads.
    pub(crate) fn waits(&mut self, now: Duration, node: NodeId) {
        self.kept_waiting.begin(now, node);
    }

    /// The one that arrived then waits no longer. Its targets count as heard of now: the next one
    /// was not sent before.
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
            // Only what it told of: a server may have given up another target since.
            if let Some(s) =
                self.seen.get_mut(&t.id).filter(|s| s.stamp == t.stamp && s.at >= arrived)
            {
                s.at = s.at.max(now);
            }
        }
    }

    /// Whether a heartbeat that told of this target has no answer yet.
    fn is_kept_waiting(&self, now: Duration, target: &pb::Target) -> bool {
        let since =
            self.kept_waiting.since(now, target.node).filter(|_| !self.shunned(now, target.node));
        since.zip(self.lease_from(target)).is_some_and(|(since, from)| from >= since)
    }

    /// What one says that is shut out. One that comes late is not believed: it may have been
    /// granted a lease since.
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
    /// gives up the one that it has. To be asked when leadership was confirmed after the heartbeat
    /// arrived, and answered together with the newest applied map. `Overloaded`: none now, ask
    /// again.
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
    /// heartbeat. A cut or a removal cannot be made where the chunk table takes no writes, though
    /// other replicas could make it.
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
                // Before the next of this node is looked at: both at once could be all that a chain
                // has.
                self.seen.entry(t.id).or_default().asked_out = Some(now);
            }
        }
        out
    }

    /// Whether each chain that this target serves, or is to serve, and has data of, has another
    /// replica in sync that stays.
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

    /// Whether a target was heard of just now, can serve, and was not asked to leave its chains.
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

    /// When the lease of a target counts from, `None` if it has none.
    fn lease_from(&self, target: &pb::Target) -> Option<Duration> {
        match self.seen.get(&target.id) {
            Some(s) if s.failed == Some(target.stamp) => None,
            Some(s) if s.stamp == target.stamp && s.leaseless => None,
            Some(s) if s.lapses.0 == target.stamp && s.lapses.1 % 2 == 1 => None,
            Some(s) if s.stamp == target.stamp => Some(s.at),
            _ if target.alive => Some(self.elected),
            // It has registered, and may not have had the answer: then it does not know the chains
            // it is in.
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

    /// What is missing of chains. It is long and goes alone, when nobody has come or gone; other
    /// changes have the next turn.
    fn new_chains(&mut self, now: Duration, map: &MapView, alive: usize) -> Option<Proposal> {
        // Not looked for at every tick: should the change be refused, others go on.
        let settled = now.saturating_sub(self.last_registration.max(self.last.chains)) >= SETTLE;
        // Later ones do not wait for those that are down just then.
        let waits = map.map.sets.is_empty() && alive < self.options.expect_targets;
        if !settled || waits {
            return None;
        }
        self.last.chains = now;
        let (chains, sets) = chain_table::make_chains(&map.map, self.options.chains_per_target)?;
        let why = vec![format!("{} new chains in {} sets", chains.len(), sets.len())];
        Some(Proposal { update: pb::MapUpdate { chains, sets, ..Default::default() }, why })
    }

    /// Moves that make targets equally full, in the map with these chains.
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

    /// The proposal was applied or refused (`known`), or its fate is unknown: then this manager
    /// proposes and grants nothing more to those concerned until it is, or the next leader's takes
    /// over.
    pub(crate) fn resolved(&mut self, known: bool) {
        self.in_doubt = !known;
        if known {
            self.in_flight = false;
            self.leaving.clear();
        }
    }

    /// Whether a proposal's fate is unknown. It is known, and [`Manager::resolved`], once anything
    /// proposed later in the same term has been applied.
    pub(crate) fn in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// Chains that nobody serves, and of which all that were in sync are gone for good or dead for
    /// long, with their epochs.
    pub(crate) fn stranded(&self, now: Duration, map: &MapView) -> Vec<(ChainId, u64)> {
        let all = anew::stranded(&map.map, &self.long_dead(now, &map.map));
        all.into_iter().filter_map(|c| Some((c, map.chain(c)?.epoch))).collect()
    }

    /// Whether a target has nothing of a chain that nobody serves, and takes nothing of it before
    /// that changes.
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

    /// Targets that nobody heard of for so long that they are not waited for any more.
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

    /// Whether the tail says, knowing the chain's current epoch, that its successor holds all it
    /// has.
    fn synced(&self, chain: &pb::Chain) -> bool {
        let Some(tail) = chain.tail() else { return false };
        self.acts(chain, tail) && self.seen.get(&tail).is_some_and(|s| s.synced.contains(&chain.id))
    }

    /// Whether a target's node has said that it acts on the chain's current epoch.
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

    /// A link between two nodes that both reach this server would stall their chains for ever. Of
    /// the two the one that more nodes complain about goes, of equals the one with the higher id;
    /// it is let in again after a while, later each time, unless it was in for long.
    fn judge_unreachable(&mut self, now: Duration) {
        let complaints = |node: &NodeId, s: &Shun| {
            // One that is silent or only just back is not cut off, it is dead or starting.
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
        // A node that is out already has no say: what it cannot reach is its own trouble.
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
