//! Whether this member's log is slow: judged by how long its writes take. The caller gives the
//! times.
//!
//! A write that takes longer than the limit is late. Late writes form an episode, which a few
//! timely ones in a row end. An episode that lasts makes the log slow. It stays slow for a while
//! after the last late write, so that a disk that is slow at times does not move the leadership
//! back and forth.

use std::time::Duration;

/// An episode of at least this many late writes,
const LATE: u32 = 3;
/// that lasts at least this long makes the log slow; so does one write that takes this long.
const EPISODE: Duration = Duration::from_secs(3);
/// This many timely writes in a row end an episode.
const TIMELY: u32 = 5;
/// After this long without a late write the episode is over, however few writes there were.
const PAUSE: Duration = Duration::from_secs(10);
/// A log counts as slow for this long after its last late write.
const PROBATION: Duration = Duration::from_secs(60);

/// See the module. Times may be of any clock that never goes back.
#[derive(Debug)]
pub(super) struct SlowLog {
    /// A write that takes longer is late; zero: no write is.
    limit: Duration,
    /// When the write under way began.
    running: Option<Duration>,
    /// When the first late write of the episode began, and how many there were.
    since: Option<Duration>,
    late: u32,
    timely: u32,
    last_late: Duration,
    slow: bool,
}

impl SlowLog {
    pub(super) fn new(limit: Duration) -> SlowLog {
        SlowLog {
            limit,
            running: None,
            since: None,
            late: 0,
            timely: 0,
            last_late: Duration::ZERO,
            slow: false,
        }
    }

    /// A write begins.
    pub(super) fn begin(&mut self, now: Duration) {
        self.running = Some(now);
    }

    /// The write that was begun has ended.
    pub(super) fn end(&mut self, now: Duration) {
        let Some(began) = self.running.take() else { return };
        if self.is_late(now.saturating_sub(began)) {
            self.forget_old(now);
            (self.late, self.timely, self.last_late) = (self.late + 1, 0, now);
            self.since.get_or_insert(began);
        } else {
            self.timely += 1;
            if self.timely >= TIMELY {
                (self.since, self.late) = (None, 0);
            }
        }
    }

    fn is_late(&self, took: Duration) -> bool {
        !self.limit.is_zero() && took > self.limit
    }

    fn forget_old(&mut self, now: Duration) {
        if now.saturating_sub(self.last_late) > PAUSE.max(2 * self.limit) {
            (self.since, self.late) = (None, 0);
        }
    }

    /// Whether the log is slow.
    pub(super) fn is_slow(&mut self, now: Duration) -> bool {
        let age = self.running.map_or(Duration::ZERO, |began| now.saturating_sub(began));
        if self.is_late(age) {
            self.last_late = now;
        } else {
            self.forget_old(now);
        }
        let lasts = self.since.is_some_and(|since| now.saturating_sub(since) >= EPISODE);
        if lasts && self.late >= LATE || self.is_late(age) && age >= EPISODE {
            self.slow = true;
        } else if now.saturating_sub(self.last_late) >= PROBATION {
            self.slow = false;
        }
        self.slow
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 300;

    fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    /// Makes writes one after the other from `at` on, one for each number of milliseconds; returns
    /// when the last ended.
    fn write(s: &mut SlowLog, mut at: u64, each: &[u64]) -> u64 {
        for took in each {
            s.begin(ms(at));
            at += took;
            s.end(ms(at));
        }
        at
    }

    #[test]
    fn late_writes_for_a_while_make_a_log_slow() {
        let mut s = SlowLog::new(ms(LIMIT));
        let at = write(&mut s, 1000, &[10; 100]);
        assert!(!s.is_slow(ms(at)));
        let at = write(&mut s, at, &[400; 7]);
        assert!(!s.is_slow(ms(at)), "2.8 s");
        let at = write(&mut s, at, &[400]);
        assert!(s.is_slow(ms(at)), "3.2 s");
        // Timely again: on probation for a minute.
        let well = write(&mut s, at, &[1; 50]);
        assert!(s.is_slow(ms(well)) && s.is_slow(ms(at + 59_999)));
        assert!(!s.is_slow(ms(at + 60_000)));
    }

    #[test]
    fn one_write_that_hangs_is_enough_and_counts_while_it_hangs() {
        let mut s = SlowLog::new(ms(LIMIT));
        s.begin(ms(5000));
        assert!(!s.is_slow(ms(7999)) && s.is_slow(ms(8000)));
        s.end(ms(30_000));
        assert!(s.is_slow(ms(89_000)));
        assert!(!s.is_slow(ms(90_000)));
    }

    #[test]
    fn a_late_write_now_and_then_is_nothing() {
        let mut s = SlowLog::new(ms(LIMIT));
        let mut at = 0;
        for _ in 0..100 {
            at = write(&mut s, at, &[700, 1, 1, 1, 1, 1]);
            assert!(!s.is_slow(ms(at)));
        }
        // Rare late writes with no others in between.
        for _ in 0..20 {
            at = write(&mut s, at + 20_000, &[700]);
            assert!(!s.is_slow(ms(at)));
        }
        // A few timely writes among many late ones do not help.
        at = write(&mut s, at + 20_000, &[400, 400, 400, 10, 10, 400, 400, 400, 400, 400]);
        assert!(s.is_slow(ms(at)));
    }

    #[test]
    fn without_a_limit_no_log_is_slow() {
        let mut s = SlowLog::new(Duration::ZERO);
        let at = write(&mut s, 0, &[5000; 10]);
        s.begin(ms(at));
        assert!(!s.is_slow(ms(at + 100_000)));
    }
}
