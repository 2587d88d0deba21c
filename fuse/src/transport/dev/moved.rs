//! Directories that another mount has moved.
//!
//! Linux keeps one name of each directory. When a lookup finds a directory in another place than
//! the kernel knows, the kernel moves its name, if it gets the necessary locks immediately. It does
//! not get them where a program creates or removes names in the former place, nor inside a
//! rename(2) between two directories. Then it restarts the call once, and looks the name up again.
//! So at the second lookup in the new place, the kernel is told to forget the former name before
//! the lookup is answered: then there is nothing to move. If the first lookup moved the name, the
//! kernel no longer has the former one. The notice waits only briefly for the former place's lock,
//! because the caller may hold it.
//!
//! The first lookup sends no notice: when a name is forgotten, the mounts below it go with it.
//!
//! A directory that a program works in, or has open, keeps its name in the kernel nevertheless.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasher, RandomState},
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{sync::Semaphore, task::spawn_blocking, time::timeout};

use super::{channel::Channel, notify};

/// Most directories whose place is remembered. Above that, all are forgotten at once.
const MOST_PLACES: usize = 8192;
/// Most notices that wait for a lock of the kernel, each in a thread.
const MOST_NOTICES: usize = 8;
/// How long a lookup waits for the kernel to forget a name.
const PATIENCE: Duration = Duration::from_millis(50);

/// A directory and a name in it.
type Place = (u64, Vec<u8>);

/// Where a directory is.
struct Known {
    place: Place,
    /// A former place in another directory that the kernel may still have, until the directory was
    /// looked up twice.
    former: Option<Place>,
}

/// Where the kernel has directories, according to what it was told.
#[derive(Default)]
struct Places {
    of: HashMap<u64, Known>,
    /// The directory that is or was at a place, by the hash of the place.
    at: HashMap<u64, u64>,
    hash: RandomState,
}

impl Places {
    fn key(&self, (parent, name): (u64, &[u8])) -> u64 {
        self.hash.hash_one((parent, name))
    }

    /// A lookup found a directory here. Returns the place that the kernel must forget, if known.
    fn found(&mut self, node: u64, place: (u64, &[u8])) -> Option<Place> {
        let Some(known) = self.of.get_mut(&node) else {
            self.set(node, place, None);
            return None;
        };
        if (known.place.0, &known.place.1[..]) == place {
            let former = known.former.take()?;
            let key = self.key((former.0, &former.1));
            // What was found at the former place since then keeps its name.
            let Entry::Occupied(at) = self.at.entry(key) else { return None };
            return (*at.get() == node).then(|| {
                at.remove();
                former
            });
        }
        let known = self.forget(node)?;
        // Within one directory the kernel needs no other lock.
        let former = Some(known.place).filter(|p| p.0 != place.0);
        if let Some((parent, name)) = &former {
            self.at.insert(self.key((*parent, name)), node);
        }
        self.set(node, place, former);
        None
    }

    fn set(&mut self, node: u64, place: (u64, &[u8]), former: Option<Place>) {
        if self.of.len() >= MOST_PLACES {
            self.of.clear();
            self.at.clear();
        }
        // Whatever was at this place is gone.
        self.left(place);
        self.at.insert(self.key(place), node);
        self.of.insert(node, Known { place: (place.0, place.1.to_vec()), former });
    }

    /// Forgets all places of a directory.
    fn forget(&mut self, node: u64) -> Option<Known> {
        let known = self.of.remove(&node)?;
        for (parent, name) in std::iter::once(&known.place).chain(&known.former) {
            if let Entry::Occupied(at) = self.at.entry(self.hash.hash_one((*parent, &name[..])))
                && *at.get() == node
            {
                at.remove();
            }
        }
        Some(known)
    }

    /// The directory that was here is gone. Returns which one it was.
    fn left(&mut self, place: (u64, &[u8])) -> Option<u64> {
        if self.at.is_empty() {
            return None;
        }
        let node = self.at.remove(&self.key(place))?;
        let known = self.of.get_mut(&node)?;
        if (known.place.0, &known.place.1[..]) != place {
            known.former = None;
            return None;
        }
        self.forget(node);
        Some(node)
    }

    /// A rename by this mount: the kernel moves the name itself.
    fn renamed(&mut self, from: (u64, &[u8]), to: (u64, &[u8]), exchanged: bool) {
        let (moved, replaced) = (self.left(from), self.left(to));
        if let Some(node) = moved {
            self.set(node, to, None);
        }
        if let Some(node) = replaced.filter(|_| exchanged) {
            self.set(node, from, None);
        }
    }
}

/// Makes the kernel forget where directories were before.
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
    /// Sets the channel over which notices are sent.
    pub fn connect(&self, channel: &Arc<Channel>) {
        let _ = self.channel.set(Arc::downgrade(channel));
    }

    /// A lookup found a directory. Returns when the kernel has no former name left that it did not
    /// move, or after a short time.
    pub async fn found(&self, node: u64, place: (u64, &[u8])) {
        let former = self.places.lock().found(node, place);
        let Some((parent, name)) = former else { return };
        let Some(channel) = self.channel.get().and_then(Weak::upgrade) else { return };
        // Too many notices wait for locks already: then the kernel tries to move the name itself.
        let Ok(one) = self.notices.clone().try_acquire_owned() else { return };
        let telling = spawn_blocking(move || {
            let _one = one;
            // The kernel may no longer have such a name.
            let _ = channel.notify(&notify::name_changed(parent, &name));
        });
        let _ = timeout(PATIENCE, telling).await;
    }

    /// This mount created a directory.
    pub fn made(&self, node: u64, place: (u64, &[u8])) {
        let mut places = self.places.lock();
        places.forget(node);
        places.set(node, place, None);
    }

    /// There is no directory at this place.
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
    fn a_directory_that_another_mount_moved_has_a_former_place_at_the_second_lookup() {
        let mut p = Places::default();
        assert_eq!(p.found(9, (1, b"d")), None);
        assert_eq!(p.found(9, (1, b"d")), None);
        assert_eq!(p.found(9, (1, b"e")), None);
        assert_eq!(p.found(9, (1, b"e")), None, "the kernel needs no lock of another directory");
        assert_eq!(p.found(9, (2, b"e")), None, "the kernel tries for itself");
        assert_eq!(p.found(9, (2, b"e")), Some((1, b"e".to_vec())));
        assert_eq!(p.found(9, (2, b"e")), None);
        assert_eq!(p.found(9, (1, b"d")), None);
        assert_eq!(p.found(9, (1, b"d")), Some((2, b"e".to_vec())));
        assert_eq!((p.of.len(), p.at.len()), (1, 1));
    }

    #[test]
    fn what_is_in_the_former_place_now_keeps_its_name() {
        let mut p = Places::default();
        p.found(9, (1, b"d"));
        p.found(9, (2, b"d"));
        p.found(8, (1, b"d"));
        assert_eq!(p.found(9, (2, b"d")), None, "another directory is there");
        p.found(8, (3, b"d"));
        p.left((1, b"d"));
        assert_eq!(p.found(8, (3, b"d")), None, "a file is there");
        assert_eq!((p.of.len(), p.at.len()), (2, 2));
    }

    #[test]
    fn the_kernel_knows_of_this_mounts_renames() {
        let mut p = Places::default();
        p.found(9, (1, b"d"));
        p.renamed((1, b"d"), (2, b"e"), false);
        assert_eq!((p.found(9, (2, b"e")), p.found(9, (2, b"e"))), (None, None));
        p.found(9, (3, b"e"));
        p.renamed((3, b"e"), (5, b"e"), false);
        assert_eq!(
            (p.found(9, (5, b"e")), p.found(9, (5, b"e"))),
            (None, None),
            "it moved the name"
        );
        p.found(8, (4, b"f"));
        p.renamed((5, b"e"), (4, b"f"), true);
        assert_eq!((p.found(9, (4, b"f")), p.found(8, (5, b"e"))), (None, None));
        p.renamed((5, b"e"), (4, b"f"), false);
        assert_eq!((p.of.len(), p.at.len()), (1, 1), "what was replaced is gone");
        p.renamed((6, b"x"), (4, b"f"), false);
        assert_eq!((p.of.len(), p.at.len()), (0, 0), "by a file");
    }

    #[test]
    fn places_are_bounded() {
        let mut p = Places::default();
        for n in 0..3 * MOST_PLACES as u64 {
            p.found(n, (1, &n.to_le_bytes()));
            p.found(n, (2, &n.to_le_bytes()));
            p.found(n, (3, &n.to_le_bytes()));
            assert!(p.of.len() <= MOST_PLACES && p.at.len() <= 2 * p.of.len());
        }
    }
}
