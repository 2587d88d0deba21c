//! Recent changes, to tell whether what was read now is the same as some entries ago. A pure table,
//! see `docs/follower-reads.md`.

pub(crate) mod endings;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use strake_proto::Ino;

/// Most changes that are remembered.
const MOST: usize = 16_384;

/// See the module.
pub(crate) struct RecentChanges {
    /// The last entry that changed an inode.
    last: BTreeMap<Ino, u64>,
    /// The same and earlier changes, by their entries.
    order: VecDeque<(u64, Ino)>,
    /// The changes of all entries after this one are here.
    floor: u64,
}

impl RecentChanges {
    /// A table that does not know the changes of entries up to `applied`.
    pub(crate) fn new(applied: u64) -> RecentChanges {
        RecentChanges { last: BTreeMap::new(), order: VecDeque::new(), floor: applied }
    }

    /// The entries after those noted before, up to `index`, changed these inodes.
    pub(crate) fn note(&mut self, index: u64, changed: impl IntoIterator<Item = Ino>) {
        for ino in changed {
            if self.last.insert(ino, index) != Some(index) {
                self.order.push_back((index, ino));
            }
        }
        while self.order.len() > MOST
            && let Some((index, ino)) = self.order.pop_front()
        {
            self.floor = index;
            if self.last.get(&ino) == Some(&index) {
                self.last.remove(&ino);
            }
        }
    }

    /// Whether certainly none of these inodes changed after entry `index`.
    pub(crate) fn same_since(&self, index: u64, inos: &BTreeSet<Ino>) -> bool {
        index >= self.floor
            && inos.iter().all(|ino| self.last.get(ino).is_none_or(|last| *last <= index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_changed_is_known_for_a_while() {
        let set = |inos: &[Ino]| inos.iter().copied().collect::<BTreeSet<_>>();
        let mut r = RecentChanges::new(10);
        assert!(
            r.same_since(10, &set(&[7])) && !r.same_since(9, &set(&[])),
            "what was before the start is not known"
        );
        r.note(12, [7, 8, 7]);
        r.note(14, [8]);
        for (index, inos, same) in [
            (14, [7, 8], true),
            (13, [7, 9], true),
            (13, [8, 9], false),
            (12, [7, 9], true),
            (11, [7, 9], false),
            (10, [1, 2], true),
        ] {
            assert_eq!(r.same_since(index, &set(&inos)), same, "{inos:?} since {index}");
        }
        // Full: the changes of the oldest entries are forgotten, and the table knows that.
        (0..MOST as Ino - 2).for_each(|n| r.note(15 + n, [100 + n]));
        assert!(!r.same_since(11, &set(&[1])), "one of its changes had to go");
        assert!(
            r.same_since(12, &set(&[1]))
                && r.same_since(13, &set(&[7]))
                && !r.same_since(13, &set(&[8]))
        );
        r.note(1 << 20, 0..4 * MOST as Ino);
        assert!(
            !r.same_since((1 << 20) - 1, &set(&[1 << 40])) && r.same_since(1 << 20, &set(&[1]))
        );
        assert!(r.order.len() <= MOST && r.last.len() <= MOST);
    }
}
