//! What is known of directories: the attributes that were seen last, and those of directories that
//! were removed. Pure tables, but for the clock.

use std::{
    collections::{HashMap, VecDeque},
    time::SystemTime,
};

use parking_lot::Mutex;
use strake_proto::{Ino, pb};

use super::types::is_dir;

/// Most directories in each of two generations of those that were seen last.
const MOST_SEEN: usize = 4096;
/// Most removed directories that are remembered.
const MOST_GONE: usize = 1024;

/// What is known of a directory.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    pub attr: pb::Attr,
    /// The directory where a lookup found it, 0 for none.
    pub parent: Ino,
}

struct Gone {
    attr: pb::Attr,
    /// This mount removed it: then the kernel asks for it only while a program uses it.
    here: bool,
}

#[derive(Default)]
pub(super) struct Folders {
    seen: Mutex<[HashMap<Ino, Seen>; 2]>,
    /// The directory that was removed last comes first.
    gone: Mutex<VecDeque<Gone>>,
}

impl Folders {
    /// A directory's attributes were received; `parent`: a lookup found it there.
    pub fn note(&self, attr: &pb::Attr, parent: Option<Ino>) {
        if !is_dir(attr) {
            return;
        }
        let [new, old] = &mut *self.seen.lock();
        let before = new.get(&attr.ino).or_else(|| old.get(&attr.ino)).map_or(0, |s| s.parent);
        new.insert(attr.ino, Seen { attr: *attr, parent: parent.unwrap_or(before) });
        if new.len() >= MOST_SEEN {
            *old = std::mem::take(new);
        }
    }

    pub fn seen(&self, ino: Ino) -> Option<Seen> {
        self.seen.lock().iter().find_map(|m| m.get(&ino)).copied()
    }

    /// This mount removed a directory.
    pub fn removed(&self, ino: Ino) {
        if let Some(seen) = self.seen(ino) {
            self.bury(seen.attr, true);
        }
    }

    /// Remembers a removed directory. `here`: this mount removed it.
    pub fn bury(&self, attr: pb::Attr, here: bool) -> pb::Attr {
        let attr = pb::Attr { nlink: 0, ctime_ns: now(), ..attr };
        let mut gone = self.gone.lock();
        gone.retain(|g| g.attr.ino != attr.ino);
        gone.truncate(MOST_GONE - 1);
        gone.push_front(Gone { attr, here });
        attr
    }

    /// The last attributes of a removed directory, and whether this mount removed it.
    pub fn gone(&self, ino: Ino) -> Option<(pb::Attr, bool)> {
        self.gone.lock().iter().find(|g| g.attr.ino == ino).map(|g| (g.attr, g.here))
    }

    /// Changes the attributes of a removed directory.
    pub fn change(&self, ino: Ino, change: impl FnOnce(&mut pb::Attr)) -> Option<pb::Attr> {
        let mut gone = self.gone.lock();
        let g = gone.iter_mut().find(|g| g.attr.ino == ino)?;
        change(&mut g.attr);
        g.attr.ctime_ns = now();
        Some(g.attr)
    }
}

/// The time now, in nanoseconds since 1970.
pub(super) fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(ino: Ino) -> pb::Attr {
        pb::Attr { ino, mode: libc::S_IFDIR | 0o755, nlink: 2, ..Default::default() }
    }

    #[test]
    fn the_last_few_thousand_are_known_and_where_they_were() {
        let f = Folders::default();
        f.note(&folder(5), Some(4));
        f.note(&pb::Attr { uid: 7, ..folder(5) }, None);
        f.note(&pb::Attr { mode: libc::S_IFREG, ..folder(6) }, Some(4));
        let seen = f.seen(5).unwrap();
        assert_eq!((seen.attr.uid, seen.parent, f.seen(6).is_none()), (7, 4, true));
        for ino in 0..2 * MOST_SEEN as Ino {
            f.note(&folder(100 + ino), None);
        }
        assert!(f.seen(5).is_none() && f.seen(100 + 2 * MOST_SEEN as Ino - 1).is_some());
    }

    #[test]
    fn the_removed_ones_remembered_have_a_bound() {
        let f = Folders::default();
        f.removed(1);
        assert!(f.gone(1).is_none(), "nothing was known of it");
        for ino in 1..=MOST_GONE as Ino + 1 {
            f.note(&folder(ino), None);
            f.removed(ino);
        }
        let (last, here) = f.gone(MOST_GONE as Ino + 1).unwrap();
        assert_eq!(
            (last.nlink, here, f.gone(1).is_none(), f.gone.lock().len()),
            (0, true, true, MOST_GONE)
        );
        assert_eq!(f.change(2, |a| a.mode = 0).unwrap().mode, 0);
        assert_eq!((f.gone(2).unwrap().0.mode, f.change(1, |_| ()).is_none()), (0, true));
    }
}
