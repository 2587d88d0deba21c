//! Directories that were removed, here or by another mount, while a program of this mount still
//! uses them.
//!
//! On a local disk such a directory has no links and no names, and fstat(2), fchmod(2) and
//! futimens(2) work on it. The metadata servers do not know who has a directory open, and forget a
//! removed one immediately. So the mount answers from what it knew last. Only programs that use the
//! directory can reach it, so no other program could see what they change of it.
//!
//! A removed directory that no program here is known to use is `ESTALE`: the kernel reached it by a
//! path, which it then walks again, or by a file handle.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::SystemTime,
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Ino, Result, pb};

use super::{Caller, Change, Time, Vfs, stale};

/// Most directories in each of two generations of those that were seen last.
const MOST_SEEN: usize = 4096;
/// Most removed directories that are remembered.
const MOST_GONE: usize = 1024;
/// A path of 4,096 bytes has no more names than this.
const DEEPEST: usize = 2048;
const S_ISGID: u32 = 0o2000;

pub(crate) fn is_dir(attr: &pb::Attr) -> bool {
    attr.mode & libc::S_IFMT == libc::S_IFDIR
}

/// What is known of a directory.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    attr: pb::Attr,
    /// The directory where a lookup found it, 0 for none.
    parent: Ino,
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

    fn bury(&self, attr: pb::Attr, here: bool) -> pb::Attr {
        let attr = pb::Attr { nlink: 0, ctime_ns: now(), ..attr };
        let mut gone = self.gone.lock();
        gone.retain(|g| g.attr.ino != attr.ino);
        gone.truncate(MOST_GONE - 1);
        gone.push_front(Gone { attr, here });
        attr
    }

    fn gone(&self, ino: Ino) -> Option<(pb::Attr, bool)> {
        self.gone.lock().iter().find(|g| g.attr.ino == ino).map(|g| (g.attr, g.here))
    }

    fn change(&self, ino: Ino, change: impl FnOnce(&mut pb::Attr)) -> Option<pb::Attr> {
        let mut gone = self.gone.lock();
        let g = gone.iter_mut().find(|g| g.attr.ino == ino)?;
        change(&mut g.attr);
        g.attr.ctime_ns = now();
        Some(g.attr)
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX))
}

impl Vfs {
    /// The attributes of a removed directory that a program has open, or that contains an open one
    /// (".." leads there), or that this mount removed.
    fn held(&self, ino: Ino) -> Option<pb::Attr> {
        let gone = self.folders.gone(ino);
        if let Some((attr, true)) = gone {
            return Some(attr);
        }
        let open: BTreeMap<Ino, Option<Seen>> =
            self.dirs.all().iter().map(|d| (d.ino(), d.seen())).collect();
        let seen = |at: Ino| self.folders.seen(at).or_else(|| open.get(&at).copied().flatten());
        let leads_here = |from: Ino| {
            let up = |at: &Ino| seen(*at).map(|s| s.parent).filter(|parent| *parent != 0);
            std::iter::successors(Some(from), up).take(DEEPEST).any(|at| at == ino)
        };
        let attr = gone.map(|g| g.0).or_else(|| seen(ino).map(|s| s.attr))?;
        if !open.keys().any(|from| leads_here(*from)) {
            return None;
        }
        Some(if gone.is_some() { attr } else { self.folders.bury(attr, false) })
    }

    /// After a request for an inode failed: the inode's last attributes, if it is a removed
    /// directory that a program still uses; else the error.
    pub(super) fn or_held(&self, ino: Ino, e: Error) -> Result<pb::Attr> {
        match e.code {
            Code::NoEnt => self.held(ino).ok_or_else(|| stale(e)),
            _ => Err(e),
        }
    }

    /// Changes the attributes of a removed directory. The kernel has checked the permission.
    pub(super) fn change_held(
        &self,
        caller: Caller<'_>,
        ino: Ino,
        change: &Change,
        e: Error,
    ) -> Result<pb::Attr> {
        let attr = self.or_held(ino, e)?;
        if change.size.is_some() {
            return Err(Error::new(Code::IsDir, "a directory has no data"));
        }
        let creds = self.creds(caller);
        let time = |t: Option<Time>, before| match t {
            Some(Time::Now) => now(),
            Some(Time::At(ns)) => ns,
            None => before,
        };
        let changed = self.folders.change(ino, |a| {
            (a.uid, a.gid) = (change.uid.unwrap_or(a.uid), change.gid.unwrap_or(a.gid));
            if let Some(mode) = change.mode {
                let stranger =
                    creds.uid != 0 && creds.gid != a.gid && !creds.groups.contains(&a.gid);
                let set_gid = if stranger { 0 } else { mode & S_ISGID };
                a.mode = a.mode & libc::S_IFMT | mode & 0o7777 & !S_ISGID | set_gid;
            }
            (a.atime_ns, a.mtime_ns) =
                (time(change.atime, a.atime_ns), time(change.mtime, a.mtime_ns));
        });
        Ok(changed.unwrap_or(attr))
    }
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
