//! How a fill makes way for what applications wait for.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::node::Target;

/// After a piece a fill waits so many times as long as that took, while applications wait for the same targets: it takes a quarter
/// of them at most.
const YIELD: u32 = 3;
/// But it stays above this part of its limit.
const LEAST: u32 = 8;
/// Applications count for so long after their last request: the next one mostly follows at once. Also how often a fill that waits looks again.
pub const QUIET: Duration = Duration::from_millis(10);

/// The requests of one target that an application waits for: those of clients, and updates that another replica forwards for them.
#[derive(Default)]
pub struct Foreground(Mutex<State>);

#[derive(Default)]
struct State {
    in_work: usize,
    /// When the last one ended.
    ended: Option<Instant>,
}

impl Foreground {
    pub fn is_busy(&self, now: Instant) -> bool {
        let s = self.0.lock();
        s.in_work > 0 || s.ended.is_some_and(|at| now.saturating_duration_since(at) < QUIET)
    }
}

/// A request that an application waits for, in work until this is dropped.
pub struct Awaited(Arc<Target>);

impl Awaited {
    pub fn new(target: Arc<Target>) -> Awaited {
        target.foreground.0.lock().in_work += 1;
        Awaited(target)
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        let mut s = self.0.foreground.0.lock();
        (s.in_work, s.ended) = (s.in_work - 1, Some(Instant::now()));
    }
}

/// How long a fill waits after a piece that took so long. `limit`: how long the piece takes at the fill's highest rate, zero if that has none.
pub fn pause(limit: Duration, took: Duration, busy: bool) -> Duration {
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
    fn a_fill_yields_only_to_those_who_wait() {
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
            // The part that waiting adds; what the piece itself takes cannot be helped.
            assert!(took + wait <= (limit * LEAST).max(took + limit), "{took:?}: {wait:?}");
        }
        assert_eq!(pause(limit, ms(60), true), ms(180));
        assert_eq!(pause(limit, ms(120), true), ms(280), "an eighth");
        assert_eq!(pause(limit, ms(500), true), limit);
    }
}
