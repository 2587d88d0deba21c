//! Handles a rename(2) when another mount's rename falls between its two lookups.
//!
//! Linux looks up the old name and then the new one. When both refer to one inode there is nothing
//! to do: rename(2) returns 0 and sends no request. If another mount renames the file in the same
//! way between the two lookups, both show one inode although the old name is gone, and both
//! programs would be told that they renamed it.
//!
//! So when a thread finds a file by one name and then by another, the metadata servers are asked
//! whether the first name still refers to it. If it does not, the second lookup is answered with
//! `ESTALE`. Then the kernel starts again, and finds the old name gone. A program that only looked
//! at both names gets the right answer when the kernel asks again. Where the kernel has another
//! inode for the second name, it asks once more before it starts again (it revalidates, then looks
//! up): then `ESTALE` is answered twice.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher, RandomState},
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Ino, Result};

use super::base::Base;

/// Most threads whose last lookup is remembered.
const MOST_THREADS: usize = 4096;
/// Most names in each of two generations of those that the kernel was last told.
const MOST_NAMES: usize = 8192;

/// A name that referred to a file: the inode number of its directory, as the kernel knows it, and
/// the name.
type Name = (Ino, Vec<u8>);

/// The last lookup of a thread.
struct Last {
    name: Name,
    ino: Ino,
    /// How often the thread was told since then that another name of the file is stale.
    refused: u32,
}

#[derive(Default)]
pub(super) struct Claims {
    /// The kernel keeps names: then it is unknown how often it asks before it starts again.
    off: AtomicBool,
    last: Mutex<HashMap<u32, Last>>,
    told: Mutex<[HashSet<u64>; 2]>,
    names: RandomState,
}

impl Claims {
    /// The kernel keeps names: then two equal renames cannot be distinguished.
    pub fn keeps_names(&self) {
        self.off.store(true, Relaxed);
    }

    /// A thread looked up a name that is not a directory's, and it refers to `ino`. `ESTALE`: see
    /// the module.
    pub async fn check(
        &self,
        base: &Base,
        thread: u32,
        name: (Ino, &[u8]),
        ino: Ino,
    ) -> Result<()> {
        if self.off.load(Relaxed) {
            return Ok(());
        }
        let Some(former) = self.found(thread, name, ino) else { return Ok(()) };
        let there = match base.client.lookup_now(base.inner(former.0), &former.1).await {
            Ok(a) => a.ino == ino,
            Err(e) => e.code != Code::NoEnt,
        };
        if !there && self.refuses(thread, name) {
            return Err(Error::new(Code::Stale, "the file was renamed during the lookup"));
        }
        self.settle(thread, name, ino);
        Ok(())
    }

    /// The kernel was told, or has made it so itself, that this name refers to something other than
    /// a directory.
    pub fn told(&self, dir: Ino, name: &[u8]) {
        let [new, old] = &mut *self.told.lock();
        new.insert(self.names.hash_one((dir, name)));
        if new.len() >= MOST_NAMES {
            *old = std::mem::take(new);
        }
    }

    fn was_told(&self, dir: Ino, name: &[u8]) -> bool {
        let n = self.names.hash_one((dir, name));
        self.told.lock().iter().any(|s| s.contains(&n))
    }

    /// A thread finds a file. Returns the other name by which it found the file just before, if
    /// any.
    fn found(&self, thread: u32, (dir, name): (Ino, &[u8]), ino: Ino) -> Option<Name> {
        let mut all = self.last.lock();
        if let Some(last) = all.get(&thread)
            && last.ino == ino
            && (last.name.0, &last.name.1[..]) != (dir, name)
        {
            return Some(last.name.clone());
        }
        settle(&mut all, thread, (dir, name), ino);
        None
    }

    /// Remembers what the thread found last.
    fn settle(&self, thread: u32, name: (Ino, &[u8]), ino: Ino) {
        settle(&mut self.last.lock(), thread, name, ino);
    }

    /// The former name does not refer to the file any more. Returns whether to call the new name
    /// stale.
    fn refuses(&self, thread: u32, (dir, name): (Ino, &[u8])) -> bool {
        let times = if self.was_told(dir, name) { 2 } else { 1 };
        let mut all = self.last.lock();
        let Some(last) = all.get_mut(&thread) else { return false };
        last.refused += 1;
        last.refused <= times
    }
}

fn settle(all: &mut HashMap<u32, Last>, thread: u32, (dir, name): (Ino, &[u8]), ino: Ino) {
    if let Some(last) = all.get_mut(&thread) {
        last.name.0 = dir;
        last.name.1.clear();
        last.name.1.extend_from_slice(name);
        (last.ino, last.refused) = (ino, 0);
        return;
    }
    if all.len() >= MOST_THREADS {
        all.clear();
    }
    all.insert(thread, Last { name: (dir, name.to_vec()), ino, refused: 0 });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_found_just_before() {
        let c = Claims::default();
        assert_eq!(c.found(1, (2, b"a"), 9), None);
        assert_eq!(c.found(2, (3, b"b"), 9), None, "another thread");
        assert_eq!(c.found(1, (2, b"a"), 9), None, "the same name");
        assert_eq!(c.found(1, (3, b"b"), 9), Some((2, b"a".to_vec())));
        assert_eq!(c.found(1, (3, b"a"), 9), Some((2, b"a".to_vec())), "still");
        assert_eq!(c.found(1, (3, b"b"), 8), None, "something else");
        assert_eq!(c.found(1, (2, b"a"), 9), None);
        for thread in 10..10 + MOST_THREADS as u32 {
            c.found(thread, (2, b"a"), 9);
        }
        assert!(c.last.lock().len() <= MOST_THREADS);
    }

    #[test]
    fn a_stale_name_is_refused_as_often_as_the_kernel_asks_before_it_begins_anew() {
        let c = Claims::default();
        for (known, times) in [(false, 1), (true, 2)] {
            if known {
                c.told(3, b"b");
            }
            c.settle(1, (2, b"a"), 9);
            for _ in 0..times {
                assert!(c.found(1, (3, b"b"), 9).is_some() && c.refuses(1, (3, b"b")));
            }
            assert!(c.found(1, (3, b"b"), 9).is_some() && !c.refuses(1, (3, b"b")));
            c.settle(1, (3, b"b"), 9);
            assert_eq!(c.found(1, (3, b"b"), 9), None);
            // After a restart by way of its directories, it is told immediately.
            assert_eq!(c.found(1, (1, b"d"), 3), None);
            assert_eq!(c.found(1, (3, b"b"), 9), None);
        }
        for n in 0..2 * MOST_NAMES as u32 {
            c.told(7, &n.to_le_bytes());
        }
        assert!(!c.was_told(3, b"b") && c.was_told(7, &(2 * MOST_NAMES as u32 - 1).to_le_bytes()));
    }
}
