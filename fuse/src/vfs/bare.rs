//! Which inodes were just seen to have no ACL.
//!
//! Linux asks for the ACLs of whatever somebody else than the owner uses, each time it has fetched new attributes. The
//! attributes tell whether there are any, so that question, which follows at once, needs no second round trip.

use std::{collections::BTreeMap, time::Duration};

use parking_lot::Mutex;
use strake_proto::{Ino, pb};
use tokio::time::Instant;

/// Bit of `Attr.acls`.
pub(super) const ACCESS: u32 = 1;
pub(super) const DEFAULT: u32 = 2;

/// How long an answer counts: long enough for the kernel's next request.
const FRESH: Duration = Duration::from_millis(100);
/// Inodes in one generation; two are kept.
const MOST: usize = 4096;

/// What was seen of an inode, and when that was asked for.
#[derive(Clone, Copy)]
struct Seen {
    at: Instant,
    acls: u32,
}

#[derive(Default)]
pub(super) struct Bare {
    young: BTreeMap<Ino, Seen>,
    old: BTreeMap<Ino, Seen>,
}

impl Bare {
    fn last(&self, ino: Ino) -> Option<Seen> {
        self.young.get(&ino).or_else(|| self.old.get(&ino)).copied()
    }

    fn put(&mut self, ino: Ino, seen: Seen) {
        if self.last(ino).is_some_and(|s| s.at > seen.at) {
            return;
        }
        if self.young.len() >= MOST {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(ino, seen);
    }

    /// Attributes that were asked for at `at`.
    pub(super) fn note(&mut self, a: &pb::Attr, at: Instant) {
        self.put(a.ino, Seen { at, acls: a.acls });
    }

    /// This mount has changed an ACL: nothing that was asked for before counts.
    pub(super) fn changed(&mut self, ino: Ino, now: Instant) {
        self.put(ino, Seen { at: now, acls: ACCESS | DEFAULT });
    }

    /// Whether the inode had no ACL of this kind a moment ago.
    pub(super) fn lacks(&self, ino: Ino, kind: u32, now: Instant) -> bool {
        self.last(ino).is_some_and(|s| s.acls & kind == 0 && now.duration_since(s.at) < FRESH)
    }
}

/// One for all requests of a mount.
pub(super) type Shared = Mutex<Bare>;

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(ino: Ino, acls: u32) -> pb::Attr {
        pb::Attr { ino, acls, ..Default::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_seen_counts_for_a_moment() {
        let (mut b, start) = (Bare::default(), Instant::now());
        b.note(&attr(5, 0), start);
        b.note(&attr(6, DEFAULT), start);
        assert!(b.lacks(5, ACCESS, start) && b.lacks(5, DEFAULT, start));
        assert!(b.lacks(6, ACCESS, start) && !b.lacks(6, DEFAULT, start) && !b.lacks(7, ACCESS, start));
        assert!(!b.lacks(5, ACCESS, start + FRESH));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_from_before_a_change_does_not_count() {
        let (mut b, start) = (Bare::default(), Instant::now());
        let after = start + Duration::from_millis(10);
        b.changed(5, after);
        b.note(&attr(5, 0), start);
        assert!(!b.lacks(5, ACCESS, after));
        b.note(&attr(5, 0), after + Duration::from_millis(1));
        assert!(b.lacks(5, ACCESS, after + Duration::from_millis(1)));
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded() {
        let (mut b, start) = (Bare::default(), Instant::now());
        (0..10 * MOST as u64).for_each(|ino| b.note(&attr(ino, 0), start));
        assert!(b.young.len() + b.old.len() <= 2 * MOST);
        assert!(b.lacks(10 * MOST as u64 - 1, ACCESS, start));
    }
}
