//! How much one machine may have in work while others are active. The share is smaller while turns
//! are delayed: the runtime's queue delays each step of every request, so many small requests of
//! one machine make the few of another machine wait many times.
//!
//! [`Share`] is pure: it is told how late a turn continued. It is halved while turns are late, and
//! grows by one at a time while they are not.

use std::time::Duration;

/// Minimum of a share, unless it was smaller from the start.
const LEAST: usize = 4;
/// A turn that continues after more than this is late.
const LATE: Duration = Duration::from_micros(100);
/// The delay of one turn is capped at this value, so that a single turn does not shrink the share.
const LATEST: Duration = Duration::from_micros(300);
/// Smoothing: a turn counts as one of this many.
const SMOOTH: u32 = 4;
/// Minimum time between two turns that are measured.
const EACH: Duration = Duration::from_millis(1);
/// Minimum time between two increases of a share.
const GROWS: Duration = Duration::from_millis(10);
/// Measurements older than this are forgotten.
const FORGOTTEN: Duration = Duration::from_secs(1);

/// See the module. Times count from a moment before it was made.
pub struct Share {
    most: usize,
    now: usize,
    /// Smoothed delay of turns.
    late: Duration,
    /// When a turn was last chosen to be measured.
    asked: Duration,
    heard: Duration,
    changed: Duration,
}

impl Share {
    pub fn new(most: usize) -> Share {
        let (most, zero) = (most.max(1), Duration::ZERO);
        Share { most, now: most, late: zero, asked: zero, heard: zero, changed: zero }
    }

    /// The limit of what a machine may have in work.
    pub fn bound(&self) -> usize {
        self.now
    }

    /// Whether a turn that is given now is to be measured.
    pub fn is_due(&mut self, now: Duration) -> bool {
        let due = now.saturating_sub(self.asked) >= EACH;
        if due {
            self.asked = now;
        }
        due
    }

    /// A turn continued this long after it was given.
    pub fn heard(&mut self, late: Duration, now: Duration) {
        if now.saturating_sub(self.heard) >= FORGOTTEN {
            (self.late, self.now) = (Duration::ZERO, self.most);
        }
        self.heard = now;
        self.late = (self.late * (SMOOTH - 1) + late.min(LATEST)) / SMOOTH;
        if self.late > LATE {
            (self.now, self.changed) = ((self.now / 2).max(LEAST.min(self.most)), now);
        } else if self.now < self.most && now.saturating_sub(self.changed) >= GROWS {
            (self.now, self.changed) = (self.now + 1, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The share after each of `n` turns, one per millisecond, that were this late.
    fn hear(s: &mut Share, at: &mut u64, n: usize, late: u64) -> Vec<usize> {
        let each = |_| {
            *at += 1;
            let now = Duration::from_millis(*at);
            assert!(s.is_due(now) && !s.is_due(now));
            s.heard(Duration::from_micros(late), now);
            s.bound()
        };
        (0..n).map(each).collect()
    }

    #[test]
    fn it_is_halved_while_turns_are_late_and_grows_slowly_again() {
        let (mut s, mut at) = (Share::new(64), 0);
        assert_eq!(hear(&mut s, &mut at, 100, 90), [64; 100], "not late");
        assert_eq!(hear(&mut s, &mut at, 6, 5_000), [32, 16, 8, 4, 4, 4]);
        assert_eq!(hear(&mut s, &mut at, 12, 10), [4; 12], "late a moment ago");
        let grows = hear(&mut s, &mut at, 1000, 10);
        assert!(grows.is_sorted_by(|a, b| *b == *a || *b == a + 1), "{grows:?}");
        assert!((8..=11).contains(&grows[50]) && grows[999] == 64, "{grows:?}");
    }

    #[test]
    fn one_late_turn_is_no_reason() {
        let (mut s, mut at) = (Share::new(64), 0);
        for _ in 0..20 {
            hear(&mut s, &mut at, 20, 0);
            assert_eq!(hear(&mut s, &mut at, 1, 1_000_000), [64]);
        }
        assert!(hear(&mut s, &mut at, 2, 1_000_000)[1] < 64, "several are");
    }

    #[test]
    fn a_small_share_stays_and_an_old_one_is_forgotten() {
        let (mut one, mut at) = (Share::new(1), 0);
        assert_eq!(hear(&mut one, &mut at, 3, 5_000), [1; 3]);
        let (mut s, mut at) = (Share::new(16), 0);
        assert_eq!(hear(&mut s, &mut at, 3, 5_000), [16, 8, 4]);
        at += 999;
        assert_eq!(hear(&mut s, &mut at, 1, 0), [16]);
    }
}
