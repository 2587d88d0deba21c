//! Operations on one inode: attributes, sizes, layouts.

use strake_proto::{Code, pb};

use super::{
    run::{Run, check_size},
    xattrs::drop_capability,
};
use crate::namespace::{
    acl::Acl,
    caller::{in_group, is_root, owns},
    fail::{Res, fail},
    format::FORMAT_SPARSE,
    gc,
    inode::{Inode, S_IFDIR, S_IFMT, S_IFREG, S_ISGID, S_ISUID, is_dir, is_file, opened, shown},
    perm::{self, W},
    placement, writers,
};

pub(super) fn setattr(run: &mut Run<'_, '_>, o: &pb::SetAttr) -> Res<pb::OpResult> {
    let mut r = run.inode(o.ino)?;
    perm::changeable(&r)?;
    let before = r.clone();
    may_setattr(run, &r, o)?;
    let sets_ids = o.mode.is_some_and(|m| m & (S_ISUID | S_ISGID) != 0);
    if sets_ids || o.mtime_ns.is_some() && !o.mtime_now {
        writers::may_set(&run.by, &r)?;
    }
    let mut mode = r.attr().mode;
    let strips = o.drop_privileges && !is_dir(r.attr()) && perm::may_strip(run.by.creds, &r);
    if o.uid.is_some() || o.gid.is_some() || strips {
        mode = perm::after_chown(run.by.creds, r.attr());
        drop_capability(run, &mut r)?;
    }
    if let Some(size) = o.size {
        mode = after_write(run, r.attr().gid, mode);
        drop_capability(run, &mut r)?;
        set_size(run, &mut r, size, o.holes)?;
    }
    let now = run.t.now();
    let a = r.attr_mut();
    a.uid = o.uid.unwrap_or(a.uid);
    a.gid = o.gid.unwrap_or(a.gid);
    if let Some(m) = o.mode {
        mode = mode & S_IFMT | m & 0o7777;
        if !is_root(run.by.creds) && !in_group(run.by.creds, a.gid) {
            mode &= !S_ISGID;
        }
    }
    a.mode = mode;
    match (o.atime_now, o.atime_ns) {
        (true, _) => a.atime_ns = now,
        (false, Some(t)) => a.atime_ns = t,
        _ => {}
    }
    match (o.mtime_now || o.size.is_some(), o.mtime_ns) {
        (_, Some(t)) if !o.mtime_now => a.mtime_ns = t,
        (true, _) => a.mtime_ns = now,
        _ => {}
    }
    if o.mode.is_some()
        && let Some(mut acl) = Acl::stored(&r.acl)
    {
        acl.chmod(mode);
        r.acl = acl.encode();
    }
    run.end_rights(&before, &r);
    Ok(shown(&run.save(r)))
}

fn after_write(run: &Run<'_, '_>, gid: u32, mode: u32) -> u32 {
    perm::after_write(run.by.creds, gid, mode, run.by.rules >= 1)
}

fn may_setattr(run: &Run<'_, '_>, r: &pb::InodeRecord, o: &pb::SetAttr) -> Res<()> {
    let (c, a) = (run.by.creds, r.attr());
    let owner = c.uid == a.uid;
    if o.uid == Some(u32::MAX) || o.gid == Some(u32::MAX) {
        return fail(Code::Inval, "user and group -1 do not exist");
    }
    if o.uid.is_some_and(|uid| uid != a.uid || !owner) && !is_root(c) {
        return fail(Code::Perm, "only root may change the owner");
    }
    let own_group = |gid| owner && (gid == a.gid || in_group(c, gid));
    if o.gid.is_some_and(|gid| !own_group(gid)) && !is_root(c) {
        return fail(
            Code::Perm,
            "only the owner may change the group, and only to one of the owner's groups",
        );
    }
    if let Some(mode) = o.mode
        && !owns(c, a)
        && !perm::only_drops_set_ids(c, r, mode)
    {
        return fail(Code::Perm, "only the owner may change the mode");
    }
    if (o.atime_ns.is_some() && !o.atime_now || o.mtime_ns.is_some() && !o.mtime_now) && !owns(c, a)
    {
        return fail(Code::Perm, "only the owner may set times other than the current time");
    }
    if (o.atime_now || o.mtime_now) && !owns(c, a) {
        perm::check(c, r, W)?;
    }
    if o.size.is_some() {
        check_has_data(a)?;
        // The owner may, as it may hold the file open for writing whatever the mode says now
        // (ftruncate).
        if !owns(c, a) {
            perm::check(c, r, W)?;
        }
    }
    Ok(())
}

fn set_size(run: &mut Run<'_, '_>, r: &mut pb::InodeRecord, size: u64, holes: bool) -> Res<()> {
    check_size(size)?;
    if size < r.attr().size {
        gc::cut(run.t, r, size)?;
    } else if holes && size > r.attr().size {
        mark_sparse(run, r);
    }
    if size == 0 {
        r.attr_mut().sparse = false;
    }
    r.written |= size > 0;
    r.attr_mut().size = size;
    Ok(())
}

fn mark_sparse(run: &mut Run<'_, '_>, r: &mut pb::InodeRecord) {
    r.attr_mut().sparse = true;
    run.t.header.format_version = run.t.header.format_version.max(FORMAT_SPARSE);
}

/// Needs no permission of its own: a session that was allowed to write holds a capability.
pub(super) fn extend(run: &mut Run<'_, '_>, o: &pb::Extend) -> Res<pb::OpResult> {
    let mut r = run.inode(o.ino)?;
    perm::changeable(&r)?;
    check_has_data(r.attr())?;
    check_size(o.end)?;
    drop_capability(run, &mut r)?;
    let now = run.t.now();
    if o.holes {
        mark_sparse(run, &mut r);
    }
    r.written |= o.end > 0;
    let a = r.attr_mut();
    a.size = a.size.max(o.end);
    a.mtime_ns = now;
    a.mode = after_write(run, a.gid, a.mode);
    Ok(shown(&run.save(r)))
}

pub(super) fn setlayout(run: &mut Run<'_, '_>, o: &pb::SetLayout) -> Res<pb::OpResult> {
    let mut r = run.inode(o.ino)?;
    perm::check(run.by.creds, &r, W)?;
    if is_dir(r.attr()) {
        if let Some(s) = &o.layout {
            run.t.place.validate_default(s)?;
        }
        r.default_layout.clone_from(&o.layout);
        return Ok(shown(&run.save(r)));
    }
    if !is_file(r.attr()) {
        return fail(Code::Inval, "only regular files and directories have a layout");
    }
    let Some(asked) = &o.layout else {
        return fail(Code::Inval, "the layout of a file cannot be removed");
    };
    if r.written || r.attr().size > 0 {
        return fail(
            Code::Exist,
            "the file has data; its layout is fixed (copy the file to change it)",
        );
    }
    if r.writers > 0 {
        return fail(Code::Busy, "the file is open for writing; set its layout when it is closed");
    }
    relayout(run, &mut r, asked)?;
    let r = run.save(r);
    Ok(opened(&r))
}

fn relayout(run: &mut Run<'_, '_>, r: &mut pb::InodeRecord, asked: &pb::LayoutSpec) -> Res<()> {
    placement::validate(asked)?;
    let parent = match r.links.first() {
        Some(l) => run.t.inode(l.parent)?.unwrap_or_default(),
        None => pb::InodeRecord::default(),
    };
    let spec = run.spec_in(&parent, Some(asked))?;
    let data_id = run.new_data_id()?;
    let generation = match &r.layout {
        Some(l) => l.generation.checked_add(1),
        None => Some(0),
    };
    let Some(generation) = generation else {
        return fail(Code::Overflow, "the layout was changed too often; make a new file");
    };
    let mut layout = run.chosen(&spec, r.attr().ino, data_id, generation)?;
    if run.by.rules >= 1 {
        // No data was written under any of them: a layout is fixed with the first byte.
        layout.drafts = generation;
    }
    // Data that a dead writer may have sent under the old data id without reporting its end is
    // removed, too.
    gc::discard_data(run.t, r)?;
    r.layout = Some(layout);
    r.attr_mut().data_id = data_id;
    Ok(())
}

fn check_has_data(a: &pb::Attr) -> Res<()> {
    match a.mode & S_IFMT {
        S_IFREG => Ok(()),
        S_IFDIR => fail(Code::IsDir, "a directory has no data"),
        _ => fail(Code::Inval, "only regular files have a size to set"),
    }
}
