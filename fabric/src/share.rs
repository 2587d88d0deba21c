//! How much of one machine may be in work while others are active: less while turns go on late.
//! What the runtime has to do lies in front of each step of everybody's requests, so one machine's
//! many small ones make another's few wait many times.
//!
//! [`Share`] is pure: it is told how late a turn went on. It is halved while turns go on late, and
//! grows by one at a time while they do not.

use std::time::Duration;

/// A share is no smaller, unless it was from the start.
const LEAST: usize = 4;
/// A turn that goes on after more than this is late.
const LATE: Duration = Duration::from_micros(100);
/// One turn says no more than this, and only a part of it counts: one alone is no reason.
const LATEST: Duration = Duration::from_micros(300);
/// A turn counts as one of so many.
const SMOOTH: u32 = 4;
/// Turns are looked at no more often.
const EACH: Duration = Duration::from_millis(1);
/// A share grows no faster than by one in this time.
const GROWS: Duration = Duration::from_millis(10);
/// What was seen this long ago says nothing any more.
const FORGOTTEN: Duration = Duration::from_secs(1);

/// See the module. Times are since a moment before it was made.
pub struct Share {
    most: usize,
    now: usize,
    /// How late turns go on, smoothed.
    late: Duration,
    /// When a turn was last taken to be looked at.
    asked: Duration,
    heard: Duration,
    changed: Duration,
}

impl Share {
    pub fn new(most: usize) -> Share {
        let (most, zero) = (most.max(1), Duration::ZERO);
        Share { most, now: most, late: zero, asked: zero, heard: zero, changed: zero }
    }

    /// What a machine may have in work.
    pub fn bound(&self) -> usize {
        self.now
    }

    /// Whether a turn that is given now is to be looked at.
    pub fn is_due(&mut self, now: Duration) -> bool {
        let due = now.saturating_sub(self.asked) >= EACH;
        if due {
            self.asked = now;
        }
        due
    }

    /// A turn went on so much after it was given.
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

    /// What the share is after each of so many turns, one in a millisecond, that went on so late.
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
