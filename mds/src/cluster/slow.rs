//! Which targets are slow compared with the others, though they answer: judged by what storage
//! servers report about their devices in heartbeats (`oss/src/device/meter.rs`). A target that
//! stays slow is named, and drained if that is configured and harmless.
//!
//! A pure state machine of the leader; a new leader starts a new one. Its decisions are checked
//! again when they are applied ([`may_drain`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use strake_proto::{Code, Error, NodeId, Result, TargetId, map::MapView, pb};

use super::moves::target_action::DRAIN;

/// A class of operations is judged only with at least this many in the ten seconds reported.
const ENOUGH: u64 = 20;
/// With fewer operations than this the slowest in a hundred are chance.
const ENOUGH_FOR_P99: u64 = 200;
/// Least number of other targets to compare with.
const PEERS: usize = 3;
/// How long the last good measurement of an operation's cost counts: the others may have little to
/// do because they wait for the slow one.
const MEMORY: Duration = Duration::from_secs(60);
/// Targets that were not heard of for this long are not judged.
const FRESH: Duration = Duration::from_secs(2);
/// Costs of the others below this count as this.
const LEAST_US: u64 = 100;
/// A device that stalls for half of [`WINDOW_MS`] is slow, whatever it did in the rest.
const STALLS_MS: u64 = WINDOW_MS / 2;
const WINDOW_MS: u64 = 10_000;
/// The slowest in a hundred must reach this many times the floor.
const P99: u32 = 10;
/// Reported times and counts are limited to these.
const LONGEST_US: u64 = 3_600_000_000;
const MOST: u64 = 1_000_000_000;
const EVERY: Duration = Duration::from_millis(500);
/// A drain that was refused, or whose outcome is unknown, is asked for again after this time.
const AGAIN: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// A target this many times slower than the others is slow; 0: none is.
    pub factor: u64,
    /// But only if its answers take at least this long: the median, or a tenth of the slowest in a
    /// hundred.
    pub floor: Duration,
    /// And only if that lasts this long without a break.
    pub lasts: Duration,
    /// Whether slow targets are drained.
    pub drain: bool,
}

/// Values of [`pb::Slow::what`].
pub mod what {
    pub const READS: u32 = 1;
    pub const CHANGES: u32 = 2;
    pub const STALLS: u32 = 3;
}

struct Seen {
    at: Duration,
    stamp: u64,
    told: pb::DeviceTimes,
    /// The cost of a read and of a change when there were last enough of them, and when that was.
    usual: [Option<(Duration, u64)>; 2],
    /// Since when it is slower than allowed; and, once named, since when it is not.
    since: Option<Duration>,
    well: Option<Duration>,
    named: Option<pb::Slow>,
}

/// See the module.
pub struct SlowTargets {
    options: Options,
    seen: BTreeMap<TargetId, Seen>,
    judged: Duration,
    asked: Option<Duration>,
}

/// Values of targets, sorted, with the target that each is of.
type Ranking = Vec<(u64, TargetId)>;

/// The median of the other targets, the higher of two; `None` if there are too few.
fn median_without(own: TargetId, all: &Ranking) -> Option<u64> {
    let at = all.iter().position(|(_, t)| *t == own);
    let others = all.len() - usize::from(at.is_some());
    let middle = others / 2 + usize::from(at.is_some_and(|at| at <= others / 2));
    (others >= PEERS).then(|| all[middle].0)
}

fn classes(t: &pb::DeviceTimes) -> [pb::OpTimes; 2] {
    [t.reads.unwrap_or_default(), t.changes.unwrap_or_default()]
}

/// Limits reported numbers to the largest that are accepted.
fn bounded(t: &pb::DeviceTimes) -> pb::DeviceTimes {
    let op = |o: pb::OpTimes| pb::OpTimes {
        count: o.count.min(MOST),
        each_us: o.each_us.min(LONGEST_US),
        median_us: o.median_us.min(LONGEST_US),
        p99_us: o.p99_us.min(LONGEST_US),
    };
    pb::DeviceTimes {
        reads: t.reads.map(op),
        changes: t.changes.map(op),
        stalled_ms: t.stalled_ms.min(WINDOW_MS),
        rotates: t.rotates,
    }
}

impl SlowTargets {
    pub fn new(options: Options) -> SlowTargets {
        SlowTargets { options, seen: BTreeMap::new(), judged: Duration::ZERO, asked: None }
    }

    /// What a target's server reports about its device. Another boot id means another process,
    /// about which nothing is known.
    pub fn told(&mut self, now: Duration, target: TargetId, stamp: u64, device: &pb::DeviceTimes) {
        let told = bounded(device);
        let new = || Seen {
            at: now,
            stamp,
            told,
            usual: [None; 2],
            since: None,
            well: None,
            named: None,
        };
        let s = self.seen.entry(target).or_insert_with(new);
        if s.stamp != stamp {
            *s = new();
        }
        (s.at, s.told) = (now, told);
        for (usual, class) in s.usual.iter_mut().zip(classes(&told)) {
            if class.count >= ENOUGH {
                *usual = Some((now, class.each_us));
            }
        }
    }

    /// No target was heard for a while, for a reason on this server: periods that had begun are not
    /// continuous.
    pub fn restart(&mut self) {
        self.seen.values_mut().for_each(|s| (s.since, s.well) = (None, None));
    }

    /// Judges all targets. Returns a sentence about each that is slow from now on, or no longer.
    /// `unix_ms`: the time of day.
    pub fn judge(&mut self, now: Duration, unix_ms: u64, map: &MapView) -> Vec<String> {
        if self.options.factor == 0 || now.saturating_sub(self.judged) < EVERY {
            return Vec::new();
        }
        self.judged = now;
        self.seen.retain(|id, s| map.target(*id).is_some_and(|t| t.stamp == s.stamp));
        let all: Vec<(TargetId, Option<pb::Slow>)> = {
            let peers = [false, true].map(|rotates| self.peers(now, rotates));
            self.seen
                .iter()
                .map(|(id, s)| {
                    (*id, self.verdict(now, *id, s, &peers[usize::from(s.told.rotates)]))
                })
                .collect()
        };
        let lasts = self.options.lasts;
        let mut said = Vec::new();
        for (id, verdict) in all {
            let Some(s) = self.seen.get_mut(&id) else { continue };
            match verdict {
                Some(slow) => {
                    s.well = None;
                    let long = now.saturating_sub(*s.since.get_or_insert(now));
                    if long >= lasts {
                        let since_ms =
                            s.named.map_or(unix_ms.saturating_sub(long.as_millis() as u64), |n| {
                                n.since_ms
                            });
                        let slow = pb::Slow { since_ms, ..slow };
                        if s.named.replace(slow).is_none() {
                            said.push(format!("target {id} is slow: {}", words(&slow)));
                        }
                    }
                }
                None => {
                    s.since = None;
                    if s.named.is_some() && now.saturating_sub(*s.well.get_or_insert(now)) >= lasts
                    {
                        (s.named, s.well) = (None, None);
                        said.push(format!("target {id} is not slow any more, or has little to do"));
                    }
                }
            }
        }
        said
    }

    /// Targets that are slow now.
    pub fn named(&self) -> impl Iterator<Item = (TargetId, &pb::Slow)> {
        self.seen.iter().filter_map(|(id, s)| Some((*id, s.named.as_ref()?)))
    }

    /// The target to drain now, to be proposed: the slowest that may be drained.
    pub fn to_drain(&mut self, now: Duration, map: &pb::ClusterMap) -> Option<pb::TargetChange> {
        if !self.options.drain || self.asked.is_some_and(|at| now.saturating_sub(at) < AGAIN) {
            return None;
        }
        let target = |id| map.targets.iter().find(|t| t.id == id);
        let may =
            self.named().filter(|(id, _)| target(*id).is_some_and(|t| may_drain(map, t).is_ok()));
        let (target, slow) =
            may.max_by_key(|(id, s)| (s.each_us / s.peers_us.max(LEAST_US), *id))?;
        let change = pb::TargetChange { target, action: DRAIN, heir: None, slow: Some(*slow) };
        self.asked = Some(now);
        Some(change)
    }

    /// The values to compare with: reads, changes, and stalls of the targets for which either of
    /// them is known.
    fn peers(&self, now: Duration, rotates: bool) -> [Ranking; 3] {
        let mut all = [Vec::new(), Vec::new(), Vec::new()];
        for (id, s) in
            self.seen.iter().filter(|(_, s)| s.told.rotates == rotates && self.is_fresh(now, s))
        {
            let usual = s
                .usual
                .map(|u| u.filter(|(at, _)| now.saturating_sub(*at) < MEMORY).map(|(_, us)| us));
            let stalls = usual.iter().any(Option::is_some).then_some(s.told.stalled_ms);
            for (ranking, value) in all.iter_mut().zip([usual[0], usual[1], stalls]) {
                ranking.extend(value.map(|v| (v, *id)));
            }
        }
        all.iter_mut().for_each(|r| r.sort_unstable());
        all
    }

    fn is_fresh(&self, now: Duration, s: &Seen) -> bool {
        now.saturating_sub(s.at) < FRESH
    }

    /// In which way a target is slow now, `None` if it is not.
    fn verdict(
        &self,
        now: Duration,
        id: TargetId,
        s: &Seen,
        peers: &[Ranking; 3],
    ) -> Option<pb::Slow> {
        if !self.is_fresh(now, s) {
            return None;
        }
        let Options { factor, floor, .. } = self.options;
        let floor_us = u64::try_from(floor.as_micros()).unwrap_or(u64::MAX);
        let exceeds = |own: u64, others: u64| own >= others.max(LEAST_US).saturating_mul(factor);
        for (what, (t, ranking)) in
            [what::READS, what::CHANGES].into_iter().zip(classes(&s.told).iter().zip(peers))
        {
            let Some(peers_us) = median_without(id, ranking).filter(|_| t.count >= ENOUGH) else {
                continue;
            };
            let far = t.median_us >= floor_us
                || t.count >= ENOUGH_FOR_P99 && t.p99_us >= floor_us.saturating_mul(u64::from(P99));
            if far && exceeds(t.each_us, peers_us) {
                let (median_us, p99_us) = (t.median_us, t.p99_us);
                return Some(pb::Slow {
                    since_ms: 0,
                    what,
                    each_us: t.each_us,
                    peers_us,
                    median_us,
                    p99_us,
                });
            }
        }
        let others = median_without(id, &peers[2])?;
        let of_second = |ms: u64| ms * 1_000_000 / WINDOW_MS;
        let stalls = s.told.stalled_ms >= STALLS_MS
            && exceeds(of_second(s.told.stalled_ms), of_second(others));
        let (each_us, peers_us) = (of_second(s.told.stalled_ms), of_second(others));
        stalls.then_some(pb::Slow {
            since_ms: 0,
            what: what::STALLS,
            each_us,
            peers_us,
            median_us: 0,
            p99_us: 0,
        })
    }
}

/// Whether a target may be drained because it is slow. `EBUSY`, with the reason, if not: it drains
/// already, an administrator decided that it stays, another target was drained for slowness and no
/// administrator has dealt with it yet, or too few nodes would be left.
pub fn may_drain(map: &pb::ClusterMap, t: &pb::Target) -> Result<()> {
    let busy = |why: String| {
        Err(Error::new(Code::Busy, format!("target {} is not drained for slowness: {why}", t.id)))
    };
    if t.draining {
        return busy("it is drained already".into());
    }
    if t.kept != 0 && t.kept == t.stamp {
        return busy("an administrator decided that it stays".into());
    }
    if let Some(other) = map.targets.iter().find(|o| o.slow.is_some()) {
        return busy(format!(
            "target {} is drained for slowness, and no administrator has dealt \
                             with that yet",
            other.id
        ));
    }
    let left: BTreeSet<NodeId> = map
        .targets
        .iter()
        .filter(|o| o.alive && !o.draining && o.id != t.id)
        .map(|o| o.node)
        .collect();
    let copies = map.chains.iter().map(|c| c.preferred.len()).max().unwrap_or(0);
    if left.len() < copies {
        return busy(format!("only {} nodes would be left, for {copies} copies", left.len()));
    }
    Ok(())
}

/// For people.
pub fn words(s: &pb::Slow) -> String {
    let ms = |us: u64| match us {
        0..10_000 => format!("{}.{} ms", us / 1000, us / 100 % 10),
        _ => format!("{} ms", us / 1000),
    };
    if s.what == what::STALLS {
        let percent = |us: u64| us / 10_000;
        return format!(
            "its device hangs {} % of the time, others {} %",
            percent(s.each_us),
            percent(s.peers_us)
        );
    }
    let op = if s.what == what::READS { "read" } else { "change" };
    format!(
        "each {op} costs its device {}, others {}; half of them take {} or longer, one in a hundred {}",
        ms(s.each_us),
        ms(s.peers_us),
        ms(s.median_us),
        ms(s.p99_us)
    )
}

#[cfg(test)]
#[path = "slow_tests.rs"]
mod tests;
