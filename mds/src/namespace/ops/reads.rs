//! Operations that only read.

use bytes::Bytes;
use prost::Message;
use strake_proto::{Code, Ino, ids::ROOT_INO, pb};

use super::run::{Run, check_name};
use crate::namespace::{
    fail::{Fail, Res, decode, fail},
    inode::{Inode, S_IFLNK, S_IFMT, is_dir, is_file, shown},
    keys,
    perm::{self, R, X},
    placement,
    steps::READDIR_MAX,
    txn::Spot,
};

const READDIR_DEFAULT: u32 = 1_000;
/// Longest path that `path_of` answers.
const MAX_PATH: usize = 64 << 10;

pub(super) fn lookup(run: &mut Run<'_, '_>, o: &pb::Lookup) -> Res<pb::OpResult> {
    let dir = run.dir(o.parent, X)?;
    let name = &o.name[..];
    if name == b"." {
        return Ok(shown(&dir));
    }
    if name == b".." {
        let up = dir.links.first().map_or(ROOT_INO, |l| l.parent);
        return Ok(shown(&run.t.need(up)?));
    }
    check_name(name, Code::Inval)?;
    match run.t.find(dir.attr().ino, name)? {
        Spot::Taken(_, d) => {
            let r = run.t.need(d.ino)?;
            // The link's contents are asked for next, and it may be gone by then.
            Ok(pb::OpResult { data: r.symlink.clone(), ..shown(&r) })
        }
        Spot::Free(_) => fail(Code::NoEnt, "no such name"),
    }
}

pub(super) fn readdir(run: &mut Run<'_, '_>, o: &pb::Readdir) -> Res<pb::OpResult> {
    let dir = run.dir(o.dir, R)?.attr().ino;
    let limit = if o.limit == 0 { READDIR_DEFAULT } else { o.limit.min(READDIR_MAX) } as usize;
    let prefix = &keys::dentry(dir, 0)[..11];
    let after = keys::dentry(dir, o.cookie);
    let mut entries = Vec::new();
    let mut room = run.room.saturating_sub(64);
    let t = &*run.t;
    let end = t.scan(prefix, &after, |key, value| {
        let d: pb::DentryRecord = decode(key, value)?;
        if d.ino == 0 {
            return Ok(true);
        }
        if entries.len() == limit {
            return Ok(false);
        }
        let attr = if o.attrs { t.inode(d.ino)?.and_then(|r| r.attr) } else { None };
        let cookie = keys::last_number(key).unwrap_or_default();
        let e = pb::DirEntry { name: d.name, ino: d.ino, r#type: d.r#type, cookie, attr };
        let need = e.encoded_len() + 8;
        if need > room {
            return Ok(false);
        }
        room -= need;
        entries.push(e);
        Ok(true)
    })?;
    if entries.is_empty() && !end {
        return fail(Code::TooBig, "the reply would be too long; split the list of operations");
    }
    Ok(pb::OpResult { ino: dir, entries, end, ..Default::default() })
}

pub(super) fn readlink(run: &mut Run<'_, '_>, ino: Ino) -> Res<pb::OpResult> {
    let r = run.inode(ino)?;
    if r.attr().mode & S_IFMT != S_IFLNK {
        return fail(Code::Inval, format!("inode {} is not a symbolic link", r.attr().ino));
    }
    Ok(pb::OpResult { ino: r.attr().ino, data: r.symlink, ..Default::default() })
}

pub(super) fn statfs(run: &mut Run<'_, '_>, o: &pb::Statfs) -> Res<pb::OpResult> {
    let dir = if o.dir == 0 { ROOT_INO } else { run.id(o.dir) };
    // A directory that is gone, or whose default names something that is gone, uses the default
    // of the file system.
    let spec = match run.inode(dir).and_then(|r| run.spec_in(&r, None)) {
        Ok(spec) => Some(spec),
        Err(Fail::Op(_)) => None,
        Err(e) => return Err(e),
    };
    let copies = spec.map_or(run.t.place.view.map.default_copies.max(1), |s| s.copies);
    let s = placement::statfs(&run.t.place, &run.t.header, &o.pool, copies)?;
    Ok(pb::OpResult { ino: run.prev, statfs: Some(s), ..Default::default() })
}

pub(super) fn access(run: &mut Run<'_, '_>, o: &pb::Access) -> Res<pb::OpResult> {
    let r = run.inode(o.ino)?;
    if o.mask & !7 != 0 {
        return fail(Code::Inval, format!("access mask {:#o} has unknown bits", o.mask));
    }
    perm::check(run.by.creds, &r, o.mask)?;
    Ok(shown(&r))
}

pub(super) fn getlayout(run: &mut Run<'_, '_>, ino: Ino) -> Res<pb::OpResult> {
    let r = run.inode(ino)?;
    let mut result = pb::OpResult { ino: r.attr().ino, ..Default::default() };
    if is_dir(r.attr()) {
        // Absent if a default names something that is gone, such as a pool; a create here
        // returns that error.
        result.effective = match run.spec_in(&r, None) {
            Ok(spec) => run.t.place.effective(&spec).ok(),
            Err(Fail::Op(_)) => None,
            Err(e) => return Err(e),
        };
        result.spec = r.default_layout;
    } else if is_file(r.attr()) {
        result.layout = r.layout;
    } else {
        return fail(Code::NoData, "only regular files and directories have a layout");
    }
    Ok(result)
}

/// The path from the root by the first recorded name. The caller must have search permission on
/// its directories.
pub(super) fn path_of(run: &mut Run<'_, '_>, ino: Ino) -> Res<pb::OpResult> {
    let ino = run.id(ino);
    let mut names: Vec<Bytes> = Vec::new();
    let mut len = 0;
    let mut at = run.t.need(ino)?;
    while at.attr().ino != ROOT_INO {
        let Some(link) = at.links.first() else {
            return fail(Code::NoEnt, format!("inode {} has no name on record", at.attr().ino));
        };
        len += link.name.len() + 1;
        if len > MAX_PATH {
            return fail(Code::NameTooLong, format!("the path is longer than {MAX_PATH} bytes"));
        }
        names.push(link.name.clone());
        at = run.dir(link.parent, X)?;
    }
    let mut path = Vec::with_capacity(len.max(1));
    for name in names.iter().rev() {
        path.push(b'/');
        path.extend_from_slice(name);
    }
    if path.is_empty() {
        path.push(b'/');
    }
    Ok(pb::OpResult { ino, data: path.into(), ..Default::default() })
}
