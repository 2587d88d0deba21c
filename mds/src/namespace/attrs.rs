//! Operations on one inode: attributes, sizes, layouts.

use strake_proto::{Code, Rights, pb};

use super::{
    acl::Acl,
    effects::Ending,
    gc,
    ops::{Inode, Run, check_size, opened, shown},
    perm::{self, S_ISGID, S_ISUID, W},
    placement,
    txn::{Res, fail},
    writers,
};

/// The format of a state with a file that may have holes.
const FORMAT_SPARSE: u32 = 3;

impl Run<'_, '_> {
    pub(super) fn setattr(&mut self, o: &pb::SetAttr) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        perm::changeable(&r)?;
        let before = r.clone();
        self.may_setattr(&r, o)?;
        let sets_ids = o.mode.is_some_and(|m| m & (S_ISUID | S_ISGID) != 0);
        if sets_ids || o.mtime_ns.is_some() && !o.mtime_now {
            writers::may_set(&self.by, &r)?;
        }
        let mut mode = r.attr().mode;
        let strips =
            o.drop_privileges && !perm::is_dir(r.attr()) && perm::may_strip(self.by.creds, &r);
        if o.uid.is_some() || o.gid.is_some() || strips {
            mode = perm::after_chown(self.by.creds, r.attr());
            self.drop_capability(&mut r)?;
        }
        if let Some(size) = o.size {
            mode = self.after_write(r.attr().gid, mode);
            self.drop_capability(&mut r)?;
            self.set_size(&mut r, size, o.holes)?;
        }
        let now = self.t.now();
        let a = r.attr_mut();
        a.uid = o.uid.unwrap_or(a.uid);
        a.gid = o.gid.unwrap_or(a.gid);
        if let Some(m) = o.mode {
            mode = mode & perm::S_IFMT | m & 0o7777;
            if !perm::is_root(self.by.creds) && !perm::in_group(self.by.creds, a.gid) {
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
        self.end_rights(&before, &r);
        Ok(shown(&self.save(r)))
    }

    /// Ends what others were given for the file, if this change may have taken away their right to
    /// it.
    pub(super) fn end_rights(&mut self, before: &pb::InodeRecord, after: &pb::InodeRecord) {
        if perm::takes_away(before, after) {
            let ino = after.attr().ino;
            self.t.notes.endings.push(Ending { session: 0, ino, rights: Rights::ALL });
        }
    }

    fn after_write(&self, gid: u32, mode: u32) -> u32 {
        perm::after_write(self.by.creds, gid, mode, self.by.rules >= 1)
    }

    fn may_setattr(&self, r: &pb::InodeRecord, o: &pb::SetAttr) -> Res<()> {
        let (c, a) = (self.by.creds, r.attr());
        let owner = c.uid == a.uid;
        if o.uid == Some(u32::MAX) || o.gid == Some(u32::MAX) {
            return fail(Code::Inval, "user and group -1 do not exist");
        }
        if o.uid.is_some_and(|uid| uid != a.uid || !owner) && !perm::is_root(c) {
            return fail(Code::Perm, "only root may change the owner");
        }
        let own_group = |gid| owner && (gid == a.gid || perm::in_group(c, gid));
        if o.gid.is_some_and(|gid| !own_group(gid)) && !perm::is_root(c) {
            return fail(
                Code::Perm,
                "only the owner may change the group, and only to one of the owner's groups",
            );
        }
        if let Some(mode) = o.mode
            && !perm::owns(c, a)
            && !perm::only_drops_set_ids(c, r, mode)
        {
            return fail(Code::Perm, "only the owner may change the mode");
        }
        if (o.atime_ns.is_some() && !o.atime_now || o.mtime_ns.is_some() && !o.mtime_now)
            && !perm::owns(c, a)
        {
            return fail(Code::Perm, "only the owner may set times other than the current time");
        }
        if (o.atime_now || o.mtime_now) && !perm::owns(c, a) {
            perm::check(c, r, W)?;
        }
        if o.size.is_some() {
            check_has_data(a)?;
            // The owner may, as it may hold the file open for writing whatever the mode says now
            // (ftruncate).
            if !perm::owns(c, a) {
                perm::check(c, r, W)?;
            }
        }
        Ok(())
    }

    fn set_size(&mut self, r: &mut pb::InodeRecord, size: u64, holes: bool) -> Res<()> {
        check_size(size)?;
        if size < r.attr().size {
            gc::cut(self.t, r, size);
        } else if holes && size > r.attr().size {
            self.mark_sparse(r);
        }
        if size == 0 {
            r.attr_mut().sparse = false;
        }
        r.written |= size > 0;
        r.attr_mut().size = size;
        Ok(())
    }

    fn mark_sparse(&mut self, r: &mut pb::InodeRecord) {
        r.attr_mut().sparse = true;
        self.t.header.format_version = self.t.header.format_version.max(FORMAT_SPARSE);
    }

    /// Needs no permission of its own: a session that was allowed to write holds a capability.
    pub(super) fn extend(&mut self, o: &pb::Extend) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        perm::changeable(&r)?;
        check_has_data(r.attr())?;
        check_size(o.end)?;
        self.drop_capability(&mut r)?;
        let now = self.t.now();
        if o.holes {
            self.mark_sparse(&mut r);
        }
        r.written |= o.end > 0;
        let a = r.attr_mut();
        a.size = a.size.max(o.end);
        a.mtime_ns = now;
        a.mode = self.after_write(a.gid, a.mode);
        Ok(shown(&self.save(r)))
    }

    pub(super) fn setlayout(&mut self, o: &pb::SetLayout) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        perm::check(self.by.creds, &r, W)?;
        if perm::is_dir(r.attr()) {
            if let Some(s) = &o.layout {
                self.t.place.validate_default(s)?;
            }
            r.default_layout.clone_from(&o.layout);
            return Ok(shown(&self.save(r)));
        }
        if !perm::is_file(r.attr()) {
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
            return fail(
                Code::Busy,
                "the file is open for writing; set its layout when it is closed",
            );
        }
        self.relayout(&mut r, asked)?;
        let r = self.save(r);
        Ok(opened(&r))
    }

    fn relayout(&mut self, r: &mut pb::InodeRecord, asked: &pb::LayoutSpec) -> Res<()> {
        placement::validate(asked)?;
        let parent = match r.links.first() {
            Some(l) => self.t.inode(l.parent)?.unwrap_or_default(),
            None => pb::InodeRecord::default(),
        };
        let spec = self.spec_in(&parent, Some(asked))?;
        let data_id = self.new_data_id();
        let generation = r.layout.as_ref().map_or(0, |l| l.generation + 1);
        let mut layout = self.chosen(&spec, r.attr().ino, data_id, generation)?;
        if self.by.rules >= 1 {
            // No data was written under any of them: a layout is fixed with the first byte.
            layout.drafts = generation;
        }
        // Data that a dead writer may have sent under the old data id without reporting its end is
        // removed, too.
        gc::discard_data(self.t, r);
        r.layout = Some(layout);
        r.attr_mut().data_id = data_id;
        Ok(())
    }
}

fn check_has_data(a: &pb::Attr) -> Res<()> {
    match a.mode & perm::S_IFMT {
        perm::S_IFREG => Ok(()),
        perm::S_IFDIR => fail(Code::IsDir, "a directory has no data"),
        _ => fail(Code::Inval, "only regular files have a size to set"),
    }
}
