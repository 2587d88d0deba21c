//! Operations that make and remove names: create, tmpfile, mkdir, mknod, symlink, link, unlink,
//! rmdir, rename.
//!
//! The order of the checks is that of Linux (`fs/namei.c`): search permission, existence, then
//! permission to change.

use bytes::Bytes;
use strake_proto::{
    Code, Ino,
    ids::{ROOT_INO, shard_of},
    pb,
};

use super::{
    opens::{may_open, open_as},
    run::{Run, check_name},
};
use crate::namespace::{
    acl,
    caller::is_root,
    fail::{Res, fail, holds, next},
    format::RULES_STEPS,
    inode::{
        DIR_SIZE, Inode, S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, S_IFSOCK,
        is_dir, is_file, opened, shown,
    },
    keys,
    perm::{self, W, X},
    removal, steps,
    txn::Spot,
};

pub(super) const LINK_MAX: u32 = 65_000;
const SYMLINK_MAX: usize = 4095;
/// Most names of an inode that are kept in its record.
const LINKS_KEPT: usize = 32;
const RENAME_NOREPLACE: u32 = 1;
const RENAME_EXCHANGE: u32 = 2;
const RENAME_WHITEOUT: u32 = 4;

/// The attributes of a new inode, without its name.
struct New {
    mode: u32,
    umask: u32,
    rdev: u32,
    symlink: Bytes,
    layout: Option<pb::LayoutSpec>,
}

impl New {
    fn plain(mode: u32, kind: u32, umask: u32) -> New {
        New { mode: mode & 0o7777 | kind, umask, rdev: 0, symlink: Bytes::new(), layout: None }
    }
}

/// One side of a rename.
struct Side<'a> {
    dir: pb::InodeRecord,
    name: &'a [u8],
    cookie: u64,
    inode: pb::InodeRecord,
}

impl Side<'_> {
    fn at(&self) -> Ino {
        self.dir.attr().ino
    }
    fn ino(&self) -> Ino {
        self.inode.attr().ino
    }
    fn is_dir(&self) -> bool {
        is_dir(self.inode.attr())
    }
}

/// The place of a new name, `EEXIST` if it is taken; then checks the permission to make it.
fn vacancy(run: &Run<'_, '_>, parent: Ino, name: &[u8]) -> Res<(pb::InodeRecord, u64)> {
    let dir = run.dir(parent, X)?;
    check_name(name, Code::Exist)?;
    match run.t.find(dir.attr().ino, name)? {
        Spot::Taken(..) => fail(Code::Exist, "the name exists"),
        Spot::Free(cookie) => {
            perm::check(run.by.creds, &dir, W | X)?;
            Ok((dir, room(cookie)?))
        }
    }
}

fn add(
    run: &mut Run<'_, '_>,
    mut dir: pb::InodeRecord,
    cookie: u64,
    name: &[u8],
    new: New,
) -> Res<pb::InodeRecord> {
    let mut r = make(run, &dir, new)?;
    let ino = r.attr().ino;
    run.t.put_name(dir.attr().ino, cookie, name, ino, r.attr().mode >> 12);
    r.links.push(pb::LinkRecord { parent: dir.attr().ino, name: Bytes::copy_from_slice(name) });
    run.t.put_inode(ino, r.clone());
    counted(&mut dir, 1, i32::from(is_dir(r.attr())))?;
    save_dir(run, dir);
    Ok(r)
}

fn make(run: &mut Run<'_, '_>, dir: &pb::InodeRecord, new: New) -> Res<pb::InodeRecord> {
    let h = &mut run.t.header;
    let ino = next(&mut h.next_ino, "inode ids")?;
    if shard_of(ino) != 0 {
        return fail(Code::NoSpc, "inode ids are used up");
    }
    h.inodes = h.inodes.saturating_add(1);
    let now = h.now_ns;
    let (mode, gid) = perm::born(run.by.creds, dir.attr(), new.mode);
    let born = acl::born(dir, mode, new.umask);
    let mut attr = pb::Attr {
        ino,
        mode: born.mode,
        uid: run.by.creds.uid,
        gid,
        nlink: 1,
        size: new.symlink.len() as u64,
        atime_ns: now,
        mtime_ns: now,
        ctime_ns: now,
        btime_ns: now,
        rdev: new.rdev,
        change: 1,
        data_id: 0,
        acls: 0,
        sparse: false,
    };
    let mut r = pb::InodeRecord {
        symlink: new.symlink,
        acl: born.acl,
        default_acl: born.default_acl,
        ..Default::default()
    };
    attr.acls = acl::kinds(&r);
    if is_dir(&attr) {
        attr.nlink = 2;
        attr.size = DIR_SIZE;
        // Copied, as Lustre does; the root's default is looked up when it is used.
        r.default_layout =
            if dir.attr().ino == ROOT_INO { None } else { dir.default_layout.clone() };
    } else if is_file(&attr) {
        attr.data_id = run.new_data_id()?;
        let spec = run.spec_in(dir, new.layout.as_ref())?;
        r.layout = Some(run.chosen(&spec, ino, attr.data_id, 0)?);
    }
    r.attr = Some(attr);
    Ok(r)
}

/// Stores a directory whose names changed.
fn save_dir(run: &mut Run<'_, '_>, mut dir: pb::InodeRecord) {
    dir.attr_mut().mtime_ns = run.t.now();
    run.save(dir);
}

pub(super) fn create(run: &mut Run<'_, '_>, o: &pb::Create) -> Res<pb::OpResult> {
    let dir = run.dir(o.parent, X)?;
    check_name(&o.name, Code::IsDir)?;
    let cookie = match run.t.find(dir.attr().ino, &o.name)? {
        Spot::Taken(..) if o.exclusive => return fail(Code::Exist, "the name exists"),
        Spot::Taken(_, d) => {
            let r = run.t.need(d.ino)?;
            if is_dir(r.attr()) {
                return fail(Code::IsDir, "the name is a directory");
            }
            may_open(run, &r, o.flags)?;
            return open_as(run, r, o.flags);
        }
        Spot::Free(cookie) => room(cookie)?,
    };
    perm::check(run.by.creds, &dir, W | X)?;
    let new = New { layout: o.layout.clone(), ..New::plain(o.mode, S_IFREG, o.umask) };
    let r = add(run, dir, cookie, &o.name, new)?;
    Ok(pb::OpResult { created: true, ..open_as(run, r, o.flags)? })
}

/// A file that only its opener can reach: an orphan from the start.
pub(super) fn tmpfile(run: &mut Run<'_, '_>, o: &pb::Tmpfile) -> Res<pb::OpResult> {
    let dir = run.dir(o.parent, W | X)?;
    let new = New { layout: o.layout.clone(), ..New::plain(o.mode, S_IFREG, o.umask) };
    let mut r = make(run, &dir, new)?;
    r.attr_mut().nlink = 0;
    r.linkable = o.linkable;
    let ino = r.attr().ino;
    run.t.put(keys::numbered(keys::ORPHAN, ino), Bytes::new());
    run.t.put_inode(ino, r.clone());
    Ok(pb::OpResult { created: true, ..open_as(run, r, o.flags)? })
}

pub(super) fn mkdir(run: &mut Run<'_, '_>, o: &pb::Mkdir) -> Res<pb::OpResult> {
    let (dir, cookie) = vacancy(run, o.parent, &o.name)?;
    // Linux ignores set-id bits asked of mkdir; the sticky bit counts.
    let r = add(run, dir, cookie, &o.name, New::plain(o.mode & 0o1777, S_IFDIR, o.umask))?;
    Ok(shown(&r))
}

pub(super) fn mknod(run: &mut Run<'_, '_>, o: &pb::Mknod) -> Res<pb::OpResult> {
    let (dir, cookie) = vacancy(run, o.parent, &o.name)?;
    let kind = match o.mode & S_IFMT {
        0 => S_IFREG,
        k @ (S_IFREG | S_IFIFO | S_IFSOCK) => k,
        // A 0:0 character device is overlayfs's whiteout, which any user may make.
        k @ (S_IFCHR | S_IFBLK) => {
            let whiteout = k == S_IFCHR && o.rdev == 0;
            if !whiteout && !is_root(run.by.creds) {
                return fail(Code::Perm, "only root may make device nodes");
            }
            k
        }
        S_IFDIR => return fail(Code::Perm, "mknod does not make directories; use mkdir"),
        k => return fail(Code::Inval, format!("file type {k:#o} cannot be made by mknod")),
    };
    let rdev = if matches!(kind, S_IFCHR | S_IFBLK) { o.rdev } else { 0 };
    let new = New { rdev, ..New::plain(o.mode, kind, o.umask) };
    let r = add(run, dir, cookie, &o.name, new)?;
    Ok(opened(&r))
}

pub(super) fn symlink(run: &mut Run<'_, '_>, o: &pb::Symlink) -> Res<pb::OpResult> {
    if o.target.is_empty() {
        return fail(Code::NoEnt, "empty symbolic link target");
    }
    if o.target.len() > SYMLINK_MAX {
        let m = format!(
            "a symbolic link target of {} bytes; {SYMLINK_MAX} are the limit",
            o.target.len()
        );
        return fail(Code::NameTooLong, m);
    }
    if o.target.contains(&0) {
        return fail(Code::Inval, "a symbolic link target cannot contain NUL");
    }
    let (dir, cookie) = vacancy(run, o.parent, &o.name)?;
    let new = New { symlink: o.target.clone(), ..New::plain(0o777, S_IFLNK, 0) };
    let r = add(run, dir, cookie, &o.name, new)?;
    Ok(shown(&r))
}

pub(super) fn link(run: &mut Run<'_, '_>, o: &pb::Link) -> Res<pb::OpResult> {
    let mut r = run.inode(o.ino)?;
    let (mut dir, cookie) = vacancy(run, o.parent, &o.name)?;
    if is_dir(r.attr()) {
        return fail(Code::Perm, "a directory cannot have a second name");
    }
    perm::changeable(&r)?;
    if r.attr().nlink == 0 && !r.linkable {
        return fail(Code::NoEnt, "the file was removed");
    }
    if r.linkable {
        // It was made without a name, and is no longer an orphan.
        r.linkable = false;
        run.t.delete(keys::numbered(keys::ORPHAN, r.attr().ino));
    }
    if r.attr().nlink >= LINK_MAX {
        return fail(Code::MLink, format!("the file has {LINK_MAX} names already"));
    }
    let at = dir.attr().ino;
    run.t.put_name(at, cookie, &o.name, r.attr().ino, r.attr().mode >> 12);
    r.attr_mut().nlink += 1;
    remember(&mut r, at, &o.name);
    let r = run.save(r);
    counted(&mut dir, 1, 0)?;
    save_dir(run, dir);
    Ok(shown(&r))
}

/// A directory has one name, and knows it. Of a file's names only some are known.
fn is_in(r: &pb::InodeRecord, dir: Ino, name: &[u8]) -> Res<()> {
    let own = |l: &pb::LinkRecord| l.parent == dir && l.name == name;
    let is = !is_dir(r.attr()) || r.links.first().is_some_and(own) && r.links.len() == 1;
    holds(is, || format!("directory {} is elsewhere by its own record", r.attr().ino))
}

/// An existing name and its inode.
fn side<'n>(run: &Run<'_, '_>, parent: Ino, name: &'n [u8], here: Code) -> Res<Side<'n>> {
    let dir = run.dir(parent, X)?;
    check_name(name, here)?;
    match run.t.find(dir.attr().ino, name)? {
        Spot::Taken(cookie, d) => {
            let inode = run.t.need(d.ino)?;
            is_in(&inode, dir.attr().ino, name)?;
            Ok(Side { dir, name, cookie, inode })
        }
        Spot::Free(_) => fail(Code::NoEnt, "no such name"),
    }
}

pub(super) fn unlink(run: &mut Run<'_, '_>, parent: Ino, name: &[u8]) -> Res<pb::OpResult> {
    let mut s = side(run, parent, name, Code::IsDir)?;
    perm::may_delete(run.by.creds, &s.dir, &s.inode)?;
    if s.is_dir() {
        return fail(Code::IsDir, "the name is a directory; use rmdir");
    }
    run.t.remove_name(s.at(), s.cookie)?;
    counted(&mut s.dir, -1, 0)?;
    let (ino, at) = (s.ino(), s.at());
    save_dir(run, s.dir);
    let left = drop_name(run, s.inode, at, name)?;
    Ok(pb::OpResult { ino, attr: left.and_then(|r| r.attr), ..Default::default() })
}

pub(super) fn rmdir(run: &mut Run<'_, '_>, parent: Ino, name: &[u8]) -> Res<pb::OpResult> {
    let mut s = side(run, parent, name, if name == b".." { Code::NotEmpty } else { Code::Inval })?;
    perm::may_delete(run.by.creds, &s.dir, &s.inode)?;
    if !s.is_dir() {
        return fail(Code::NotDir, "the name is not a directory");
    }
    if s.inode.entries > 0 {
        return fail(Code::NotEmpty, format!("the directory has {} entries", s.inode.entries));
    }
    run.t.remove_name(s.at(), s.cookie)?;
    counted(&mut s.dir, -1, -1)?;
    let (ino, at) = (s.ino(), s.at());
    save_dir(run, s.dir);
    drop_name(run, s.inode, at, name)?;
    Ok(pb::OpResult { ino, ..Default::default() })
}

/// Takes one name off an inode. An inode without names is removed: a regular file waits as an
/// orphan for its last close, everything else goes at once. Returns the inode if it remains.
fn drop_name(
    run: &mut Run<'_, '_>,
    mut r: pb::InodeRecord,
    parent: Ino,
    name: &[u8],
) -> Res<Option<pb::InodeRecord>> {
    let ino = r.attr().ino;
    if is_dir(r.attr()) {
        removal::remove_inode(run.t, &r)?;
        return Ok(None);
    }
    r.links.retain(|l| l.parent != parent || l.name != name);
    let nlink = &mut r.attr_mut().nlink;
    holds(*nlink > 0, || format!("inode {ino} has more names than it counts"))?;
    *nlink -= 1;
    debug_assert!(r.links.len() <= r.attr().nlink as usize, "names of inode {ino}");
    if r.attr().nlink == 0 && !is_file(r.attr()) {
        removal::remove_inode(run.t, &r)?;
        return Ok(None);
    }
    if r.attr().nlink == 0 {
        run.t.put(keys::numbered(keys::ORPHAN, ino), Bytes::new());
    }
    Ok(Some(run.save(r)))
}

pub(super) fn rename(run: &mut Run<'_, '_>, o: &pb::Rename) -> Res<pb::OpResult> {
    let known =
        RENAME_NOREPLACE | RENAME_EXCHANGE | if run.by.rules >= 1 { RENAME_WHITEOUT } else { 0 };
    let [exchange, noreplace, whiteout] =
        [RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT].map(|flag| o.flags & flag != 0);
    if o.flags & !known != 0 || exchange && (noreplace || whiteout) {
        return fail(Code::Inval, format!("rename flags {:#x} are not supported", o.flags));
    }
    let from = side(run, o.parent, &o.name, Code::Busy)?;
    let new_dir = run.dir(o.new_parent, X)?;
    check_name(&o.new_name, if noreplace { Code::Exist } else { Code::Busy })?;
    let to_dir = new_dir.attr().ino;
    let to = match run.t.find(to_dir, &o.new_name)? {
        Spot::Taken(..) if noreplace => return fail(Code::Exist, "the new name exists"),
        Spot::Taken(cookie, d) => {
            Some(Side { dir: new_dir, name: &o.new_name, cookie, inode: run.t.need(d.ino)? })
        }
        Spot::Free(_) if exchange => {
            return fail(Code::NoEnt, "no such new name to exchange with");
        }
        Spot::Free(_) => {
            check_not_within(run, to_dir, &from, Code::Inval)?;
            perm::may_delete(run.by.creds, &from.dir, &from.inode)?;
            perm::check(run.by.creds, &new_dir, W | X)?;
            check_move(run, &from, to_dir)?;
            None
        }
    };
    let Some(to) = to else {
        let at = from.at();
        let moved = move_name(run, from, to_dir, &o.new_name)?;
        leave_whiteout(run, whiteout, at, &o.name)?;
        return Ok(moved);
    };
    check_not_within(run, to_dir, &from, Code::Inval)?;
    check_not_within(run, from.at(), &to, if exchange { Code::Inval } else { Code::NotEmpty })?;
    if from.ino() == to.ino() {
        return Ok(shown(&from.inode));
    }
    perm::may_delete(run.by.creds, &from.dir, &from.inode)?;
    perm::may_delete(run.by.creds, &to.dir, &to.inode)?;
    if exchange {
        check_move(run, &from, to.at())?;
        check_move(run, &to, from.at())?;
        return exchange_names(run, from, to);
    }
    match (from.is_dir(), to.is_dir()) {
        (true, false) => return fail(Code::NotDir, "a directory can only replace a directory"),
        (false, true) => {
            return fail(Code::IsDir, "only a directory can replace a directory");
        }
        _ => {}
    }
    check_move(run, &from, to.at())?;
    if to.inode.entries > 0 {
        return fail(
            Code::NotEmpty,
            format!("the directory to replace has {} entries", to.inode.entries),
        );
    }
    let at = from.at();
    let moved = replace(run, from, to)?;
    leave_whiteout(run, whiteout, at, &o.name)?;
    Ok(moved)
}

/// Leaves a whiteout, by which overlayfs(5) hides a name of a lower layer: a character device
/// 0:0, here in the place of the moved name.
fn leave_whiteout(run: &mut Run<'_, '_>, wanted: bool, dir: Ino, name: &[u8]) -> Res<()> {
    if !wanted {
        return Ok(());
    }
    let dir = run.t.need(dir)?;
    let Spot::Free(cookie) = run.t.find(dir.attr().ino, name)? else {
        return fail(Code::Exist, "the old name exists");
    };
    add(run, dir, room(cookie)?, name, New::plain(0, S_IFCHR, 0)).map(drop)
}

/// A directory must not move into itself: `code` if `dir` is `side`'s inode or below it.
fn check_not_within(run: &Run<'_, '_>, dir: Ino, side: &Side<'_>, code: Code) -> Res<()> {
    if !side.is_dir() || dir == side.at() {
        return Ok(());
    }
    let mut at = dir;
    let bounded = run.by.rules >= RULES_STEPS;
    // Each step goes up; more steps than there are inodes mean a circle.
    for level in 0..=run.t.header.inodes {
        if bounded && level > steps::DEPTH {
            let m = format!(
                "inode {dir} is more than {} levels deep: no directory can be moved there",
                steps::DEPTH
            );
            return fail(Code::TooBig, m);
        }
        if at == side.ino() {
            return fail(
                code,
                "a directory cannot be moved into itself or replace one of its ancestors",
            );
        }
        if at == ROOT_INO {
            return Ok(());
        }
        at = run.t.need(at)?.links.first().map_or(ROOT_INO, |l| l.parent);
    }
    fail(Code::Corrupt, format!("directory {dir} is not below the root; check the file system"))
}

/// Moving a directory elsewhere changes its "..", which needs write permission on it.
fn check_move(run: &Run<'_, '_>, side: &Side<'_>, to_dir: Ino) -> Res<()> {
    if side.is_dir() && side.at() != to_dir {
        perm::check(run.by.creds, &side.inode, W)?;
    }
    Ok(())
}

fn move_name(run: &mut Run<'_, '_>, from: Side<'_>, to_dir: Ino, name: &[u8]) -> Res<pb::OpResult> {
    run.t.remove_name(from.at(), from.cookie)?;
    // Looked up again: the removal may have freed a better slot.
    let Spot::Free(cookie) = run.t.find(to_dir, name)? else {
        return fail(Code::Exist, "the new name exists");
    };
    let inode = from.inode.attr();
    run.t.put_name(to_dir, room(cookie)?, name, inode.ino, inode.mode >> 12);
    let dirs = i32::from(from.is_dir());
    count(run, from.at(), -1, -dirs)?;
    count(run, to_dir, 1, dirs)?;
    let r = renamed(run, from.inode, (from.dir.attr().ino, from.name), (to_dir, name));
    Ok(shown(&r))
}

fn replace(run: &mut Run<'_, '_>, from: Side<'_>, to: Side<'_>) -> Res<pb::OpResult> {
    run.t.remove_name(from.at(), from.cookie)?;
    let inode = from.inode.attr();
    run.t.put_name(to.at(), to.cookie, to.name, inode.ino, inode.mode >> 12);
    let (at, to_at) = (from.at(), to.at());
    count(run, at, -1, -i32::from(from.is_dir()))?;
    count(run, to_at, 0, i32::from(from.is_dir()) - i32::from(to.is_dir()))?;
    drop_name(run, to.inode, to_at, to.name)?;
    let r = renamed(run, from.inode, (at, from.name), (to_at, to.name));
    Ok(shown(&r))
}

fn exchange_names(run: &mut Run<'_, '_>, from: Side<'_>, to: Side<'_>) -> Res<pb::OpResult> {
    let (at, to_at) = (from.at(), to.at());
    run.t.put_name(at, from.cookie, from.name, to.ino(), to.inode.attr().mode >> 12);
    run.t.put_name(to_at, to.cookie, to.name, from.ino(), from.inode.attr().mode >> 12);
    let dirs = i32::from(to.is_dir()) - i32::from(from.is_dir());
    count(run, at, 0, dirs)?;
    count(run, to_at, 0, -dirs)?;
    renamed(run, to.inode, (to_at, to.name), (at, from.name));
    let r = renamed(run, from.inode, (at, from.name), (to_at, to.name));
    Ok(shown(&r))
}

/// Updates a directory whose names or subdirectories changed, whether or not their number did.
fn count(run: &mut Run<'_, '_>, dir: Ino, entries: i64, subdirs: i32) -> Res<()> {
    let mut d = run.t.need(dir)?;
    counted(&mut d, entries, subdirs)?;
    save_dir(run, d);
    Ok(())
}

/// Counts names and subdirectories of a directory. `EMLINK`: more subdirectories than can be
/// counted.
fn counted(dir: &mut pb::InodeRecord, entries: i64, subdirs: i32) -> Res<()> {
    let ino = dir.attr().ino;
    let Some(now) = dir.entries.checked_add_signed(entries) else {
        return holds(false, || format!("directory {ino} has more names than it counts"));
    };
    dir.entries = now;
    let nlink = &mut dir.attr_mut().nlink;
    *nlink = match nlink.checked_add_signed(subdirs) {
        Some(n) if n >= 2 => n,
        None if subdirs > 0 => {
            return fail(Code::MLink, format!("directory {ino} has too many subdirectories"));
        }
        _ => {
            return holds(false, || format!("directory {ino} has more links than it counts"));
        }
    };
    debug_assert!(u64::from(*nlink - 2) <= now, "each subdirectory of {ino} has a name");
    Ok(())
}

/// Records an inode's new name instead of the old one. A rename changes no other field of the
/// moved inode, so the record as the rename found it is still valid.
fn renamed(
    run: &mut Run<'_, '_>,
    mut r: pb::InodeRecord,
    old: (Ino, &[u8]),
    new: (Ino, &[u8]),
) -> pb::InodeRecord {
    r.links.retain(|l| l.parent != old.0 || l.name != old.1);
    remember(&mut r, new.0, new.1);
    run.save(r)
}

fn remember(r: &mut pb::InodeRecord, parent: Ino, name: &[u8]) {
    if r.links.len() < LINKS_KEPT {
        r.links.push(pb::LinkRecord { parent, name: Bytes::copy_from_slice(name) });
    }
}

fn room(cookie: Option<u64>) -> Res<u64> {
    match cookie {
        Some(c) => Ok(c),
        None => fail(Code::NoSpc, "too many names with the same hash in one directory"),
    }
}
