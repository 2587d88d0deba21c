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

use std::{collections::BTreeMap, sync::Arc};

use strake_proto::{Code, Error, Ino, Result, pb};

use super::{
    dirs::OpenDir,
    folders::{Folders, Seen, now},
    handles::Table,
    types::{Caller, Change, Time, stale},
};

/// A path of 4,096 bytes has no more names than this.
const DEEPEST: usize = 2048;
const S_ISGID: u32 = 0o2000;

/// Answers requests for removed directories.
pub(super) struct Gone {
    pub folders: Arc<Folders>,
    /// Those that programs have open.
    open: Arc<Table<OpenDir>>,
}

impl Gone {
    pub fn new(folders: Arc<Folders>, open: Arc<Table<OpenDir>>) -> Gone {
        Gone { folders, open }
    }

    /// The attributes of a removed directory that a program has open, or that contains an open one
    /// (".." leads there), or that this mount removed.
    fn held(&self, ino: Ino) -> Option<pb::Attr> {
        let gone = self.folders.gone(ino);
        if let Some((attr, true)) = gone {
            return Some(attr);
        }
        let open: BTreeMap<Ino, Option<Seen>> =
            self.open.all().iter().map(|d| (d.ino(), d.seen())).collect();
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
    pub fn or_held(&self, ino: Ino, e: Error) -> Result<pb::Attr> {
        match e.code {
            Code::NoEnt => self.held(ino).ok_or_else(|| stale(e)),
            _ => Err(e),
        }
    }

    /// Changes the attributes of a removed directory. The kernel has checked the permission.
    pub fn change_held(
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
        let creds = caller.creds();
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
