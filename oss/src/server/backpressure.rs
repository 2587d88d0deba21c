//! How a resync yields to requests that applications wait for, and to other resyncs.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use parking_lot::Mutex;
use strake_proto::ChainId;
use tokio::time::Instant;

/// While applications wait for the same targets, a resync pauses after each piece for this many
/// times as long as the piece took: it takes at most a quarter of the targets' time.
const YIELD: u32 = 3;
/// But it stays above this fraction (one part in so many) of its rate limit.
const LEAST: u32 = 8;
/// A target counts as busy for so long after the last request of an application, because the next
/// one mostly follows at once. A waiting resync also checks this often.
const QUIET: Duration = Duration::from_millis(10);

/// The requests of one target that applications wait for: those of clients, and updates that
/// another replica forwards for them.
#[derive(Default)]
pub(super) struct Foreground(Mutex<State>);

#[derive(Default)]
struct State {
    in_work: usize,
    /// When the last one ended.
    ended: Option<Instant>,
}

impl Foreground {
    /// A request that an application waits for is in work.
    pub(super) fn begin(self: &Arc<Self>) -> Awaited {
        self.0.lock().in_work += 1;
        Awaited(self.clone())
    }

    /// Waits after a piece of a resync: for the rate limit, and while applications wait for this
    /// target or, as reported with the piece, for the other one. `limit`: how long the piece takes
    /// at the rate limit, zero without one. `took`: how long it took.
    pub(super) async fn make_way(&self, limit: Duration, took: Duration, busy_there: bool) {
        let begun = Instant::now();
        loop {
            let busy = busy_there || self.is_busy(Instant::now());
            let left = pause(limit, took, busy).saturating_sub(begun.elapsed());
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(if busy { left.min(QUIET) } else { left }).await;
        }
    }

    /// Whether an application waits for the target, or did a moment ago.
    pub(super) fn is_busy(&self, now: Instant) -> bool {
        let s = self.0.lock();
        s.in_work > 0 || s.ended.is_some_and(|at| now.saturating_duration_since(at) < QUIET)
    }
}

/// A request that an application waits for; it counts as in work until this is dropped.
pub(super) struct Awaited(Arc<Foreground>);

impl Drop for Awaited {
    fn drop(&mut self) {
        let mut s = self.0.0.lock();
        (s.in_work, s.ended) = (s.in_work - 1, Some(Instant::now()));
    }
}

/// Most chains that resync one target at a time. A target that returns is out of sync in all of its
/// chains, each with another source.
const MAX_SOURCES: usize = 8;
/// A resync that sent nothing for so long no longer counts: its source may be gone, or waits
/// itself.
const IDLE: Duration = Duration::from_secs(1);

/// The chains that resync a target, and when each last sent something.
#[derive(Default)]
pub(super) struct ResyncSources(Mutex<BTreeMap<ChainId, Instant>>);

impl ResyncSources {
    /// Whether a chain may begin or continue to resync the target.
    pub(super) fn admits(&self, chain: ChainId, now: Instant) -> bool {
        let mut all = self.0.lock();
        all.retain(|_, at| now.saturating_duration_since(*at) < IDLE);
        let admits = all.len() < MAX_SOURCES || all.contains_key(&chain);
        if admits {
            all.insert(chain, now);
        }
        admits
    }

    /// A chain that resyncs the target sent something.
    pub(super) fn hears(&self, chain: ChainId, now: Instant) {
        self.0.lock().entry(chain).and_modify(|at| *at = now);
    }

    /// The chain no longer resyncs the target.
    pub(super) fn ends(&self, chain: ChainId) {
        self.0.lock().remove(&chain);
    }
}

/// How long a resync waits after a piece that took `took`. `limit`: how long the piece takes at the
/// resync's rate limit, zero if it has none.
fn pause(limit: Duration, took: Duration, busy: bool) -> Duration {
    if !busy {
        return limit;
    }
    let most = if limit.is_zero() { Duration::MAX } else { (limit * LEAST).saturating_sub(took) };
    (took * YIELD).min(most).max(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn so_many_resync_a_target_at_a_time() {
        let (sources, start) = (ResyncSources::default(), Instant::now());
        let first = MAX_SOURCES as ChainId;
        assert!((0..first).all(|c| sources.admits(c, start)));
        assert!(!sources.admits(first, start) && sources.admits(0, start), "who has begun goes on");
        sources.ends(3);
        assert!(sources.admits(first, start) && !sources.admits(3, start));
        // A silent chain loses its place, but not one that still sends.
        sources.hears(0, start + IDLE / 2);
        let later = start + IDLE;
        assert!((20..19 + first).all(|c| sources.admits(c, later)));
        assert!(!sources.admits(50, later) && sources.admits(0, later));
        // Hearing from a chain without a place gives it none.
        sources.hears(60, later);
        assert!(!sources.admits(60, later));
    }

    #[test]
    fn a_resync_yields_only_to_those_who_wait() {
        for limit in [0, 7] {
            assert_eq!(pause(ms(limit), ms(100), false), ms(limit), "as if nobody knew of them");
        }
        assert_eq!(pause(ms(0), ms(40), true), ms(120));
        assert_eq!(pause(ms(0), ms(0), true), ms(0));
    }

    #[test]
    fn it_keeps_within_its_limit_and_above_an_eighth_of_it() {
        let limit = ms(50);
        for took in (0..2000).map(ms) {
            let wait = pause(limit, took, true);
            assert!(wait >= limit, "{took:?}: above the limit");
            // The limit is on the waiting; the time of the piece itself cannot be avoided.
            assert!(took + wait <= (limit * LEAST).max(took + limit), "{took:?}: {wait:?}");
        }
        assert_eq!(pause(limit, ms(60), true), ms(180));
        assert_eq!(pause(limit, ms(120), true), ms(280), "an eighth");
        assert_eq!(pause(limit, ms(500), true), limit);
    }
}
