//! Opens, and the end of a session's last open.

use strake_proto::{Code, pb};

use super::run::Run;
use crate::namespace::{
    fail::{Res, fail},
    inode::{Inode, S_IFDIR, S_IFLNK, S_IFMT, is_file, opened},
    perm::{self, W},
    writers::{self, Left},
};

pub(super) fn open(run: &mut Run<'_, '_>, o: &pb::Open) -> Res<pb::OpResult> {
    let r = run.inode(o.ino)?;
    may_open(run, &r, o.flags)?;
    open_as(run, r, o.flags)
}

/// The answer to an allowed open; one for writing makes the session a writer.
pub(super) fn open_as(
    run: &mut Run<'_, '_>,
    mut r: pb::InodeRecord,
    flags: u32,
) -> Res<pb::OpResult> {
    let mut result = opened(&r);
    if perm::asks_to_write(flags) && is_file(r.attr()) {
        writers::enlist(run.t, &run.by, &mut r)?;
        result.writer = run.by.index;
    }
    Ok(result)
}

pub(super) fn release(run: &mut Run<'_, '_>, o: &pb::Release) -> Res<pb::OpResult> {
    let ino = run.id(o.ino);
    let left = if o.surplus { Left::Surplus } else { Left::Clean };
    writers::release(run.t, run.by.session, ino, Some(o.writer), left)?;
    Ok(pb::OpResult { ino, ..Default::default() })
}

pub(super) fn may_open(run: &Run<'_, '_>, r: &pb::InodeRecord, flags: u32) -> Res<()> {
    let mask = perm::mask_of_open(flags);
    match r.attr().mode & S_IFMT {
        S_IFDIR if mask & W != 0 => {
            return fail(Code::IsDir, "a directory cannot be opened for writing");
        }
        S_IFLNK => return fail(Code::Loop, "a symbolic link cannot be opened"),
        _ => {}
    }
    Ok(perm::check(run.by.creds, r, mask)?)
}
