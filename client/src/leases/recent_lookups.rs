//! Recent results of name lookups, for programs that use a name in two steps. When the name is
//! removed in between, the second step must still succeed, as it does on a local disk.

use std::collections::BTreeMap;

use bytes::Bytes;
use parking_lot::Mutex;
use strake_proto::Ino;

/// Most inodes in each of two generations.
const MOST: usize = 4096;

/// The last few thousand inodes that were found by a name, with the target of a symbolic link.
#[derive(Default)]
pub(crate) struct RecentLookups(Mutex<[BTreeMap<Ino, Bytes>; 2]>);

impl RecentLookups {
    /// `target`: the target of a symbolic link, which never changes; empty if it is not known.
    pub fn note(&self, ino: Ino, target: Bytes) {
        let [new, old] = &mut *self.0.lock();
        let target = match (target.is_empty(), new.get(&ino).or_else(|| old.get(&ino))) {
            (true, Some(known)) => known.clone(),
            _ => target,
        };
        new.insert(ino, target);
        if new.len() >= MOST {
            *old = std::mem::take(new);
        }
    }

    pub fn has(&self, ino: Ino) -> bool {
        self.0.lock().iter().any(|m| m.contains_key(&ino))
    }

    pub fn target(&self, ino: Ino) -> Option<Bytes> {
        self.0.lock().iter().filter_map(|m| m.get(&ino)).find(|t| !t.is_empty()).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_few_thousand_are_known_with_their_targets() {
        let f = RecentLookups::default();
        f.note(1, Bytes::from_static(b"to"));
        f.note(1, Bytes::new());
        assert!(f.has(1) && !f.has(2) && f.target(1).as_deref() == Some(b"to"));
        for ino in 2..MOST as Ino + 2 {
            f.note(ino, Bytes::new());
        }
        assert_eq!((f.has(1), f.target(1).as_deref(), f.target(2)), (true, Some(&b"to"[..]), None));
        f.note(1, Bytes::new());
        for ino in 2 * MOST as Ino..4 * MOST as Ino {
            f.note(ino, Bytes::new());
        }
        assert!(!f.has(1) && f.target(1).is_none() && f.has(4 * MOST as Ino - 1));
    }
}
