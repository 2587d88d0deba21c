//! Sequence numbers of a session's mutations: pure bookkeeping behind exactly-once.

use std::collections::BTreeSet;

/// The numbers that were given out, and which of them still wait for an answer.
#[derive(Debug)]
pub struct RequestIds {
    next: u64,
    waiting: BTreeSet<u64>,
}

impl Default for RequestIds {
    fn default() -> RequestIds {
        RequestIds { next: 1, waiting: BTreeSet::new() }
    }
}

impl RequestIds {
    pub fn begin(&mut self) -> u64 {
        let seq = self.next;
        self.next += 1;
        self.waiting.insert(seq);
        seq
    }
    /// Continues where the previous client stopped: it gave out numbers below `next`, and those in
    /// `waiting` may be repeated.
    pub fn resume(next: u64, waiting: Vec<u64>) -> RequestIds {
        RequestIds { next: next.max(1), waiting: waiting.into_iter().collect() }
    }
    /// The next number to be given out.
    pub fn next(&self) -> u64 {
        self.next
    }
    /// `seq` was answered, or will never be repeated.
    pub fn end(&mut self, seq: u64) {
        self.waiting.remove(&seq);
    }
    /// Everything below this number was answered: the server may forget those replies.
    pub fn lowest_unanswered(&self) -> u64 {
        self.waiting.first().copied().unwrap_or(self.next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_waits_for_the_slowest() {
        let mut s = RequestIds::default();
        assert_eq!(s.lowest_unanswered(), 1);
        let (a, b, c) = (s.begin(), s.begin(), s.begin());
        assert_eq!((a, b, c), (1, 2, 3));
        s.end(b);
        assert_eq!(s.lowest_unanswered(), 1);
        s.end(a);
        assert_eq!(s.lowest_unanswered(), 3);
        s.end(c);
        assert_eq!(s.lowest_unanswered(), 4);
    }
}
