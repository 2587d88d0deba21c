//! The lowest keys of a work queue, in memory.
//!
//! A queue is processed from its start, where a log-structured store keeps deleted records until a
//! compaction: each search for the first record would step over all of them. The store has the
//! state itself; this is only what is known about it.

use std::collections::BTreeSet;

/// Most keys that are kept. The workers ask for fewer.
const MOST: usize = 65_536;

#[derive(Default)]
pub(super) struct Queue {
    keys: BTreeSet<u64>,
    /// Every live key below is in `keys`.
    known_below: u64,
}

/// What a search through the store found: keys in order, and whether there are no more.
pub(super) struct Found {
    pub keys: Vec<u64>,
    pub all: bool,
}

impl Queue {
    /// A commit added or removed a key.
    pub(super) fn note(&mut self, key: u64, live: bool) {
        if !live {
            self.keys.remove(&key);
        } else if key < self.known_below {
            self.keys.insert(key);
            if self.keys.len() > MOST
                && let Some(last) = self.keys.pop_last()
            {
                self.known_below = last;
            }
        }
    }

    /// The lowest `limit` keys. `search(from, most)` finds keys in the store from `from` on, if
    /// more are needed.
    pub(super) fn lowest(
        &mut self,
        limit: usize,
        search: impl FnOnce(u64, usize) -> Found,
    ) -> Vec<u64> {
        if self.keys.len() < limit && self.known_below < u64::MAX {
            let found = search(self.known_below, MOST - self.keys.len().min(MOST));
            self.known_below = match found.keys.last() {
                _ if found.all => u64::MAX,
                Some(last) => last + 1,
                None => self.known_below,
            };
            self.keys.extend(found.keys);
        }
        self.keys.iter().take(limit).copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_names_what_the_store_has(steps in prop::collection::vec((0u64..200_000, 0u8..4, 1usize..40_000), 1..40)) {
            let (mut store, mut queue) = (BTreeSet::new(), Queue::default());
            for (key, what, n) in steps {
                match what {
                    // A run of keys is added or removed.
                    0 | 1 => {
                        for key in key..key + n as u64 {
                            let changed = if what == 0 { store.insert(key) } else { store.remove(&key) };
                            if changed {
                                queue.note(key, what == 0);
                            }
                        }
                    }
                    // A search that returns only some keys, as after a read error.
                    2 => {
                        queue.lowest(n, |from, most| {
                            Found { keys: store.range(from..).take(most.min(10)).copied().collect(), all: false }
                        });
                    }
                    _ => {
                        let seen = queue.lowest(n, |from, most| {
                            let keys: Vec<_> = store.range(from..).take(most).copied().collect();
                            let all = keys.len() < most;
                            Found { keys, all }
                        });
                        let there: Vec<_> = store.iter().take(n).copied().collect();
                        prop_assert_eq!(seen, there);
                        prop_assert!(queue.keys.len() <= MOST);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_known_is_not_searched_again() {
        let mut q = Queue::default();
        assert_eq!(q.lowest(10, |_, _| Found { keys: vec![5, 7], all: true }), [5, 7]);
        q.note(5, false);
        q.note(9, true);
        assert_eq!(q.lowest(10, |_, _| panic!("searched")), [7, 9]);
    }
}
