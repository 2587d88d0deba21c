//! When to read ahead, and how far: a pure policy, one per open file.
//!
//! A read that starts near the end of an earlier one is sequential. Two in a row open a window
//! ahead of the reader; each further one doubles it up to the limit. A seek closes it. The kernel's
//! requests arrive in any order, so "near" allows for some disorder.

use std::ops::Range;

const FIRST_WINDOW: u64 = 1 << 20;
/// How far out of order a sequential reader's requests may come.
const SLACK: u64 = 2 << 20;

/// The state of one open file.
#[derive(Clone, Debug)]
pub struct ReadAhead {
    limit: u64,
    /// End of the furthest read of the current run.
    front: u64,
    /// Reads in the current run.
    run: u32,
    window: u64,
    /// Everything below this offset was requested already.
    asked: u64,
}

impl ReadAhead {
    /// `limit`: longest window in bytes, 0 = never.
    pub fn new(limit: u64) -> ReadAhead {
        ReadAhead { limit, front: 0, run: 0, window: 0, asked: 0 }
    }

    /// A read of `len` bytes at `offset` in a file of `size` bytes arrived. Returns the range to
    /// fetch ahead.
    pub fn on_read(&mut self, offset: u64, len: u64, size: u64) -> Option<Range<u64>> {
        if self.limit == 0 || len == 0 {
            return None;
        }
        let end = offset.saturating_add(len);
        let near =
            offset <= self.front.saturating_add(SLACK) && end.saturating_add(SLACK) >= self.front;
        // The very first read of a file counts as sequential only from its start.
        if near && (self.run > 0 || offset == 0) {
            self.run = self.run.saturating_add(1);
            self.front = self.front.max(end);
        } else {
            *self = ReadAhead { front: end, run: 1, ..ReadAhead::new(self.limit) };
        }
        if self.run < 2 {
            self.asked = self.asked.max(self.front);
            return None;
        }
        let start = self.asked.max(self.front);
        let reach =
            self.front.saturating_add(self.window.max(FIRST_WINDOW.min(self.limit))).min(size);
        // Asking for more in small steps keeps servers, network and reader busy at the same time;
        // with large steps they take turns.
        let step = (self.window / 8).max(FIRST_WINDOW).min(self.window / 2);
        if start >= reach || (self.window > 0 && start - self.front > self.window - step) {
            return None;
        }
        self.window = (self.window * 2).clamp(FIRST_WINDOW.min(self.limit), self.limit);
        let reach = self.front.saturating_add(self.window).min(size);
        self.asked = reach;
        (start < reach).then_some(start..reach)
    }

    /// Whether the reads so far were sequential.
    pub fn is_in_order(&self) -> bool {
        self.run >= 2
    }

    /// The end of what was requested ahead.
    pub fn asked(&self) -> u64 {
        self.asked
    }

    /// Only the part below `end` is being read ahead: the cache has no memory for more.
    pub fn reached(&mut self, end: u64) {
        self.asked = self.asked.min(end);
    }

    /// Bytes that were to be read ahead are not cached when they are read: there was no memory for
    /// them, or not for long enough.
    pub fn wasted(&mut self) {
        self.window = (self.window / 2).max(FIRST_WINDOW.min(self.limit));
        self.asked = self.front;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_sequential_reader_gets_a_window_that_doubles_to_the_limit() {
        let mut r = ReadAhead::new(8 * MIB);
        let size = 1 << 40;
        let (mut at, mut longest) = (0, 0);
        assert_eq!(r.on_read(0, MIB, size), None, "one read says nothing");
        for _ in 0..64 {
            at += MIB;
            if let Some(a) = r.on_read(at, MIB, size) {
                assert!(a.start > at && a.end <= at + MIB + 8 * MIB);
                longest = longest.max(a.end - (at + MIB));
            }
        }
        assert_eq!(longest, 8 * MIB);
    }

    #[test]
    fn seeks_close_the_window_and_random_reads_never_open_it() {
        let mut r = ReadAhead::new(8 * MIB);
        for i in 0..10 {
            r.on_read(i * MIB, MIB, 1 << 40);
        }
        assert_eq!(r.on_read(1 << 30, 4096, 1 << 40), None);
        let mut state = 7;
        for _ in 0..1000 {
            let at = strake_proto::layout::splitmix64(&mut state) % (1 << 39);
            assert_eq!(r.on_read(at, 4096, 1 << 40), None);
        }
    }

    #[test]
    fn disorder_of_parallel_requests_is_still_sequential() {
        let mut r = ReadAhead::new(8 * MIB);
        let mut asked = 0;
        for base in (0..64).step_by(4) {
            for i in [1, 0, 3, 2] {
                asked += u32::from(r.on_read((base + i) * MIB / 4, MIB / 4, 1 << 40).is_some());
            }
        }
        assert!(asked > 2);
    }

    proptest! {
        #[test]
        fn nothing_is_asked_for_twice_in_a_run_or_beyond_the_end(lens in prop::collection::vec(1u64..(3 << 20), 1..60), size in 0u64..(100 << 20), limit in 0u64..(20 << 20)) {
            let mut r = ReadAhead::new(limit);
            let (mut at, mut asked) = (0, 0);
            for len in lens {
                if let Some(a) = r.on_read(at, len, size) {
                    prop_assert!(a.start >= asked && a.start < a.end && a.end <= size);
                    prop_assert!(a.end <= at + len + limit);
                    asked = a.end;
                }
                at += len;
            }
        }
    }
}
