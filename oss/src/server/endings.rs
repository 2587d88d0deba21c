//! Rights that ended before the capabilities for them expire. A pure table, see
//! `docs/ending-capabilities.md`.

use std::collections::{BTreeMap, VecDeque};

use strake_proto::{Capability, Ino, Rights, SessionId, cap::index_near, pb};

/// Most endings that are remembered.
const MOST: usize = 131_072;
/// Number of rights, one bit each.
const RIGHTS: usize = 3;

/// A file and a session; 0 stands for all.
type Whose = (Ino, SessionId);

/// See the module.
pub(super) struct Endings {
    most: usize,
    /// The log index up to which all endings are known.
    known: u64,
    /// Any right given up to this log index may have ended.
    floor: u64,
    /// The index of the last ending of each right.
    last: BTreeMap<Whose, [u64; RIGHTS]>,
    /// The same endings and earlier ones, in log order.
    order: VecDeque<(u64, Whose)>,
}

impl Default for Endings {
    fn default() -> Endings {
        Endings::new(MOST)
    }
}

impl Endings {
    fn new(most: usize) -> Endings {
        Endings { most, known: 0, floor: 0, last: BTreeMap::new(), order: VecDeque::new() }
    }

    /// The log index from which the metadata servers should continue.
    pub(super) fn known(&self) -> u64 {
        self.known
    }

    /// Adds the endings that follow the known ones.
    pub(super) fn take(&mut self, told: &pb::Endings) {
        if told.through < self.known {
            // This log is shorter than the known one, so it is another log. Start from its
            // beginning.
            *self = Endings::new(self.most);
        }
        self.floor = self.floor.max(told.floor);
        for e in &told.all {
            let whose = (e.ino, e.session);
            let last = self.last.entry(whose).or_default();
            let ended = last.iter_mut().enumerate().filter(|(bit, _)| e.rights >> bit & 1 == 1);
            ended.for_each(|(_, index)| *index = e.index.max(*index));
            self.order.push_back((e.index, whose));
        }
        self.known = told.through;
        self.forget();
    }

    /// Forgets endings beyond the limit, and those that the floor covers anyway.
    fn forget(&mut self) {
        while let Some(&(index, whose)) = self.order.front()
            && (index <= self.floor || self.order.len() > self.most)
        {
            self.order.pop_front();
            // A later ending of the same entry has its own place in the order.
            if self.last.get(&whose).is_some_and(|last| last.iter().all(|l| *l <= index)) {
                self.last.remove(&whose);
                self.floor = self.floor.max(index);
            }
        }
    }

    /// The rights of a capability that have not ended.
    pub(super) fn left(&self, c: &Capability) -> Rights {
        if c.as_of == 0 {
            // The metadata server does not send an index: the capability is valid until it expires.
            return c.rights;
        }
        let as_of = index_near(c.as_of, self.known);
        if as_of <= self.floor {
            return Rights(0);
        }
        let noted = [(c.ino, c.session), (c.ino, 0), (0, c.session)];
        let mut left = c.rights.0;
        for last in noted.iter().filter_map(|whose| self.last.get(whose)) {
            let ended = last.iter().enumerate().filter(|(_, index)| **index >= as_of);
            ended.for_each(|(bit, _)| left &= !(1 << bit));
        }
        Rights(left)
    }
}

#[cfg(test)]
mod tests {
    use strake_proto::{Bound, cap::as_of};

    use super::*;

    const TO_WRITE: Rights = Rights::WRITE.and(Rights::TRIM);

    fn cap(session: u64, ino: u64, index: u64) -> Capability {
        let bound = Bound::Any;
        Capability {
            ino,
            data: 1,
            session,
            session_epoch: 1,
            expiry_ms: 1,
            rights: Rights::ALL,
            bound,
            as_of: as_of(index),
        }
    }

    fn told(through: u64, floor: u64, all: &[(u64, u64, u64, Rights)]) -> pb::Endings {
        let all = all.iter().map(|&(index, session, ino, rights)| pb::Ending {
            index,
            session,
            ino,
            rights: rights.0,
        });
        pb::Endings { through, floor, all: all.collect(), more: false }
    }

    #[test]
    fn an_ending_is_for_what_was_given_before_it() {
        // Also where the low 32 bits of the index wrap between the two.
        for base in [0, (1 << 32) - 15, 5 << 32] {
            let mut e = Endings::default();
            e.take(&told(base + 10, base, &[]));
            e.take(&told(
                base + 20,
                0,
                &[(base + 15, 3, 7, TO_WRITE), (base + 18, 0, 8, Rights::ALL)],
            ));
            e.take(&told(base + 30, 0, &[(base + 22, 4, 0, Rights::ALL)]));
            for (session, ino, index, left) in [
                (3, 7, 14, Rights::READ),
                (3, 7, 15, Rights::READ),
                (3, 7, 17, Rights::ALL),
                (4, 7, 14, Rights(0)),
                (5, 7, 14, Rights::ALL),
                (3, 8, 18, Rights(0)),
                (5, 8, 18, Rights(0)),
                (5, 8, 19, Rights::ALL),
                (4, 9, 22, Rights(0)),
                // Newer than any known ending.
                (3, 7, 31, Rights::ALL),
                (3, 7, 1_000_000, Rights::ALL),
                // Older than any known ending.
                (9, 9, 0, Rights(0)),
            ] {
                assert_eq!(
                    e.left(&cap(session, ino, base + index)),
                    left,
                    "{session} {ino} {index} from {base}"
                );
            }
            let undated = Capability { as_of: 0, ..cap(3, 7, 0) };
            assert_eq!(e.left(&undated), Rights::ALL);
        }
    }

    #[test]
    fn a_full_table_raises_its_floor_and_a_shorter_log_begins_anew() {
        let mut e = Endings::new(100);
        for n in 1..=1000 {
            e.take(&told(n, 0, &[(n, n % 7 + 1, n, TO_WRITE), (n, 9, 5, Rights::READ)]));
            assert!(e.order.len() <= 100 && e.last.len() <= 100);
            // Whatever ended is refused.
            for old in [n, n.saturating_sub(20).max(1), n.saturating_sub(60).max(1), 1] {
                assert_eq!(e.left(&cap(old % 7 + 1, old, old)).0 & TO_WRITE.0, 0, "{old} of {n}");
            }
            assert!(!e.left(&cap(9, 5, n)).has(Rights::READ));
            assert_eq!(e.left(&cap(9, 5, n + 1)), Rights::ALL);
        }
        assert!((940..1000).contains(&e.floor), "{}", e.floor);
        e.take(&told(1010, 1005, &[]));
        assert_eq!((e.floor, e.last.len(), e.order.len()), (1005, 0, 0));
        assert_eq!(e.left(&cap(1, 1, 1005)), Rights(0));
        assert_eq!(e.left(&cap(1, 1, 1006)), Rights::ALL);
        // From a recovered group.
        e.take(&told(500, 400, &[(450, 1, 1, Rights::ALL)]));
        assert_eq!((e.known(), e.floor), (500, 400));
        assert_eq!(e.left(&cap(1, 1, 450)), Rights(0));
        assert_eq!(e.left(&cap(1, 1, 460)), Rights::ALL);
    }
}
