//! Directories that another mount has moved.
//!
//! Linux has one name of each directory. When a lookup finds a directory in another place than the
//! kernel knows, the kernel moves its name, if it gets the locks for that at once. It does not get
//! them where a program makes or removes names in the former place, nor inside a rename(2) between
//! two directories; then the program is told `ESTALE`. So the kernel is told to forget the former
//! name before the lookup is answered: then there is nothing to move. This waits for the former
//! place's lock for a short time only, because the caller may hold it.
//!
//! A directory that a program works in, or has open, keeps its name in the kernel all the same.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasher, RandomState},
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

use super::{channel::Channel, notify};

/// Directories whose place is remembered. With more, all are forgotten at once.
const MOST_PLACES: usize = 8192;
/// Notices that wait for a lock of the kernel, each in a thread.
const MOST_NOTICES: usize = 8;
/// How long a lookup waits until the kernel has forgotten a name.
const PATIENCE: Duration = Duration::from_millis(50);

/// A directory and a name in it.
type Place = (u64, Vec<u8>);

/// Where the kernel has directories, as it was told.
#[derive(Default)]
struct Places {
    of: HashMap<u64, Place>,
    /// Which directory is there, by the hash of the place.
    at: HashMap<u64, u64>,
    hash: RandomState,
}

impl Places {
    fn key(&self, (parent, name): (u64, &[u8])) -> u64 {
        self.hash.hash_one((parent, name))
    }

    /// A lookup found a directory here. The place in another directory where the kernel has it.
    fn found(&mut self, node: u64, place: (u64, &[u8])) -> Option<Place> {
        let known = self.of.get(&node);
        if known.is_some_and(|(parent, name)| (*parent, &name[..]) == place) {
            return None;
        }
        // A bind mount of what is there now would be lost with the name.
        let is_there = |p: &Place| self.at.get(&self.key((p.0, &p.1))) == Some(&node);
        let former = known.filter(|p| p.0 != place.0 && is_there(p)).cloned();
        self.set(node, place);
        former
    }

    fn set(&mut self, node: u64, (parent, name): (u64, &[u8])) {
        if self.of.len() >= MOST_PLACES {
            self.of.clear();
            self.at.clear();
        }
        self.at.insert(self.key((parent, name)), node);
        if let Some((parent, name)) = self.of.insert(node, (parent, name.to_vec()))
            && let Entry::Occupied(at) = self.at.entry(self.hash.hash_one((parent, &name[..])))
            && *at.get() == node
            && self.of.get(&node) != Some(&(parent, name))
        {
            at.remove();
        }
    }

    /// The directory that was here is not here any more.
    fn left(&mut self, place: (u64, &[u8])) -> Option<u64> {
        if self.at.is_empty() {
            return None;
        }
        let node = self.at.remove(&self.key(place))?;
        self.of.remove(&node);
        Some(node)
    }

    /// This mount's rename: the kernel moves the name itself.
    fn renamed(&mut self, from: (u64, &[u8]), to: (u64, &[u8]), exchanged: bool) {
        let (moved, replaced) = (self.left(from), self.left(to));
        if let Some(node) = moved {
            self.set(node, to);
        }
        if let Some(node) = replaced.filter(|_| exchanged) {
            self.set(node, from);
        }
    }
}

/// Has the kernel forget where directories were before.
pub struct Moved {
    channel: OnceLock<Weak<Channel>>,
    places: Mutex<Places>,
    notices: Arc<Semaphore>,
}

impl Default for Moved {
    fn default() -> Moved {
        let notices = Arc::new(Semaphore::new(MOST_NOTICES));
        Moved { channel: OnceLock::new(), places: Mutex::default(), notices }
    }
}

impl Moved {
    /// Through which the kernel is told.
    pub fn connect(&self, channel: &Arc<Channel>) {
        let _ = self.channel.set(Arc::downgrade(channel));
    }

    /// A lookup found a directory. Returns when the kernel has no other name of it, or after a
    /// short time.
    pub async fn found(&self, node: u64, place: (u64, &[u8])) {
        let former = self.places.lock().found(node, place);
        let Some((parent, name)) = former else { return };
        let Some(channel) = self.channel.get().and_then(Weak::upgrade) else { return };
        // Others wait for locks already: then the kernel tries for itself.
        let Ok(one) = self.notices.clone().try_acquire_owned() else { return };
        let telling = spawn_blocking(move || {
            let _one = one;
            // It may have no such name any more.
            let _ = channel.notify(&notify::name_changed(parent, &name));
        });
        let _ = timeout(PATIENCE, telling).await;
    }

    /// This mount made a directory.
    pub fn made(&self, node: u64, place: (u64, &[u8])) {
        self.places.lock().set(node, place);
    }

    /// What is here is no directory, or nothing.
    pub fn left(&self, place: (u64, &[u8])) {
        self.places.lock().left(place);
    }

    /// This mount renamed something, or exchanged two names.
    pub fn renamed(&self, from: (u64, &[u8]), to: (u64, &[u8]), exchanged: bool) {
        self.places.lock().renamed(from, to, exchanged);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_another_mount_moved_has_a_former_place() {
        let mut p = Places::default();
        assert_eq!(p.found(9, (1, b"d")), None);
        assert_eq!(p.found(9, (1, b"d")), None);
        assert_eq!(p.found(9, (1, b"e")), None, "the kernel needs no lock of another directory");
        assert_eq!(p.found(9, (2, b"e")), Some((1, b"e".to_vec())));
        assert_eq!(p.found(9, (2, b"e")), None);
        assert_eq!(p.found(9, (1, b"d")), Some((2, b"e".to_vec())));
    }

    #[test]
    fn what_is_in_the_former_place_now_keeps_its_name() {
        let mut p = Places::default();
        p.found(9, (1, b"d"));
        p.found(8, (1, b"d"));
        assert_eq!(p.found(9, (2, b"d")), None, "another directory is there");
        p.left((1, b"d"));
        assert_eq!(p.found(8, (3, b"d")), None, "a file is there");
    }

    #[test]
    fn the_kernel_knows_of_this_mounts_renames() {
        let mut p = Places::default();
        p.found(9, (1, b"d"));
        p.renamed((1, b"d"), (2, b"e"), false);
        assert_eq!(p.found(9, (2, b"e")), None);
        assert_eq!(p.found(9, (3, b"e")), Some((2, b"e".to_vec())));
        p.found(8, (4, b"f"));
        p.renamed((3, b"e"), (4, b"f"), true);
        assert_eq!((p.found(9, (4, b"f")), p.found(8, (3, b"e"))), (None, None));
        p.renamed((3, b"e"), (4, b"f"), false);
        assert_eq!((p.of.len(), p.at.len()), (1, 1), "what was replaced is gone");
        p.renamed((5, b"x"), (4, b"f"), false);
        assert_eq!((p.of.len(), p.at.len()), (0, 0), "by a file");
    }

    #[test]
    fn places_are_bounded() {
        let mut p = Places::default();
        for n in 0..3 * MOST_PLACES as u64 {
            p.found(n, (1, &n.to_le_bytes()));
            p.found(n, (2, &n.to_le_bytes()));
        }
        assert!(p.of.len() <= MOST_PLACES && p.at.len() == p.of.len());
    }
}
