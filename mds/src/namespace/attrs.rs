//! Operations on one inode: attributes, sizes, extended attributes, layouts.

use bytes::Bytes;
use strake_proto::{Code, Ino, pb};

use super::{
    gc, keys,
    ops::{Inode, Run, check_size, opened, shown},
    perm::{self, R, S_ISGID, W},
    placement,
    txn::{Res, fail},
};

/// Longest name and value of an extended attribute, as in Linux.
const XATTR_NAME_MAX: usize = 255;
const XATTR_SIZE_MAX: usize = 64 << 10;
/// Extended attributes of one inode.
const XATTRS_MAX: u32 = 1_024;
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;

impl Run<'_, '_> {
    pub fn setattr(&mut self, o: &pb::SetAttr) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        self.may_setattr(&r, o)?;
        let mut mode = r.attr().mode;
        if o.uid.is_some() || o.gid.is_some() {
            mode = perm::after_chown(self.by.creds, r.attr());
        }
        if let Some(size) = o.size {
            mode = perm::after_write(self.by.creds, mode);
            self.set_size(&mut r, size)?;
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
        Ok(shown(&self.save(r)))
    }

    fn may_setattr(&self, r: &pb::InodeRecord, o: &pb::SetAttr) -> Res<()> {
        let (c, a) = (self.by.creds, r.attr());
        let owner = c.uid == a.uid;
        if o.uid == Some(u32::MAX) || o.gid == Some(u32::MAX) {
            return fail(Code::Inval, "user and group -1 do not exist");
        }
        if o.uid.is_some_and(|uid| uid != a.uid || !owner) && !perm::is_root(c) {
            return fail(Code::Perm, "only root may give a file away");
        }
        let own_group = |gid| owner && (gid == a.gid || perm::in_group(c, gid));
        if o.gid.is_some_and(|gid| !own_group(gid)) && !perm::is_root(c) {
            return fail(Code::Perm, "only the owner may change the group, and only to one of his own");
        }
        if o.mode.is_some() && !perm::owns(c, a) {
            return fail(Code::Perm, "only the owner may change the mode");
        }
        if (o.atime_ns.is_some() && !o.atime_now || o.mtime_ns.is_some() && !o.mtime_now) && !perm::owns(c, a) {
            return fail(Code::Perm, "only the owner may set times other than now");
        }
        if (o.atime_now || o.mtime_now) && !perm::owns(c, a) {
            perm::check(c, a, W)?;
        }
        if o.size.is_some() {
            check_has_data(a)?;
            // The owner may: he may hold it open for writing whatever the mode says now (ftruncate).
            if !perm::owns(c, a) {
                perm::check(c, a, W)?;
            }
        }
        Ok(())
    }

    fn set_size(&mut self, r: &mut pb::InodeRecord, size: u64) -> Res<()> {
        check_size(size)?;
        if size < r.attr().size {
            gc::cut(self.t, r, size);
        }
        r.written |= size > 0;
        r.attr_mut().size = size;
        Ok(())
    }

    /// Needs no permission of its own: whoever was let write holds a capability.
    pub fn extend(&mut self, o: &pb::Extend) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        check_has_data(r.attr())?;
        check_size(o.end)?;
        let now = self.t.now();
        r.written |= o.end > 0;
        let a = r.attr_mut();
        a.size = a.size.max(o.end);
        a.mtime_ns = now;
        a.mode = perm::after_write(self.by.creds, a.mode);
        Ok(shown(&self.save(r)))
    }

    pub fn getxattr(&mut self, o: &pb::GetXattr) -> Res<pb::OpResult> {
        let r = self.inode(o.ino)?;
        self.may_xattr(&r, &o.name, false)?;
        let ino = r.attr().ino;
        let value = if r.xattrs == 0 { None } else { self.t.get(&keys::xattr(ino, &o.name))? };
        match value {
            Some(data) => Ok(pb::OpResult { ino, data, ..Default::default() }),
            None => no_xattr(),
        }
    }

    pub fn listxattr(&mut self, ino: Ino) -> Res<pb::OpResult> {
        let r = self.inode(ino)?;
        let ino = r.attr().ino;
        let mut names = Vec::new();
        if r.xattrs > 0 {
            self.t.scan(&keys::numbered(keys::XATTR, ino), &[], |key, _| {
                let name = key.get(9..).unwrap_or_default();
                if perm::is_root(self.by.creds) || !name.starts_with(b"trusted.") {
                    names.push(Bytes::copy_from_slice(name));
                }
                Ok(true)
            })?;
        }
        Ok(pb::OpResult { ino, names, ..Default::default() })
    }

    pub fn setxattr(&mut self, o: &pb::SetXattr) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        if o.flags & !(XATTR_CREATE | XATTR_REPLACE) != 0 {
            return fail(Code::Inval, format!("extended attribute flags {:#x} are unknown", o.flags));
        }
        if o.value.len() > XATTR_SIZE_MAX {
            return fail(Code::TooBig, format!("a value of {} bytes; {XATTR_SIZE_MAX} are the limit", o.value.len()));
        }
        self.may_xattr(&r, &o.name, true)?;
        let key = keys::xattr(r.attr().ino, &o.name);
        let exists = r.xattrs > 0 && self.t.get(&key)?.is_some();
        if exists && o.flags & XATTR_CREATE != 0 {
            return fail(Code::Exist, "the extended attribute exists");
        }
        if !exists {
            if o.flags & XATTR_REPLACE != 0 {
                return no_xattr();
            }
            if r.xattrs >= XATTRS_MAX {
                return fail(Code::NoSpc, format!("the inode has {XATTRS_MAX} extended attributes already"));
            }
            r.xattrs += 1;
        }
        self.t.put(key, o.value.clone());
        let ino = self.save(r).attr().ino;
        Ok(pb::OpResult { ino, ..Default::default() })
    }

    pub fn removexattr(&mut self, o: &pb::RemoveXattr) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        self.may_xattr(&r, &o.name, true)?;
        let key = keys::xattr(r.attr().ino, &o.name);
        if r.xattrs == 0 || self.t.get(&key)?.is_none() {
            return no_xattr();
        }
        self.t.delete(key);
        r.xattrs -= 1;
        let ino = self.save(r).attr().ino;
        Ok(pb::OpResult { ino, ..Default::default() })
    }

    /// The rules of each namespace, xattr(7).
    fn may_xattr(&self, r: &pb::InodeRecord, name: &[u8], write: bool) -> Res<()> {
        if name.is_empty() || name.len() > XATTR_NAME_MAX {
            return fail(Code::Range, format!("extended attribute names have 1 to {XATTR_NAME_MAX} bytes"));
        }
        if name.contains(&0) || [&b"user."[..], b"trusted.", b"security."].contains(&name) {
            return fail(Code::Inval, "the extended attribute has no proper name");
        }
        let (c, a) = (self.by.creds, r.attr());
        if name.starts_with(b"user.") {
            if !perm::is_file(a) && !perm::is_dir(a) {
                return if write {
                    fail(Code::Perm, "only files and directories have user attributes")
                } else {
                    no_xattr()
                };
            }
            if write && perm::is_dir(a) && a.mode & perm::S_ISVTX != 0 && !perm::owns(c, a) {
                return fail(Code::Perm, "only the owner of a sticky directory may set its user attributes");
            }
            perm::check(c, a, if write { W } else { R })?;
        } else if name.starts_with(b"trusted.") {
            if !perm::is_root(c) {
                return if write { fail(Code::Perm, "trusted attributes are root's") } else { no_xattr() };
            }
        } else if name.starts_with(b"security.") {
            if write && !perm::is_root(c) {
                return fail(Code::Perm, "security attributes are set by root only");
            }
        } else if name == b"system.posix_acl_access" || name == b"system.posix_acl_default" {
            self.may_acl(a, name, write)?;
        } else {
            return fail(Code::OpNotSupp, "extended attributes are user., trusted., security. or POSIX ACLs");
        }
        Ok(())
    }

    fn may_acl(&self, a: &pb::Attr, name: &[u8], write: bool) -> Res<()> {
        if a.mode & perm::S_IFMT == perm::S_IFLNK {
            return fail(Code::OpNotSupp, "symbolic links have no ACL");
        }
        if write && name.ends_with(b"default") && !perm::is_dir(a) {
            return fail(Code::Access, "only directories have a default ACL");
        }
        if write && !perm::owns(self.by.creds, a) {
            return fail(Code::Perm, "only the owner may change an ACL");
        }
        Ok(())
    }

    pub fn setlayout(&mut self, o: &pb::SetLayout) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        perm::check(self.by.creds, r.attr(), W)?;
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
            return fail(Code::Exist, "the file has data; its layout is fixed (copy the file to change it)");
        }
        if r.writers > 0 {
            return fail(Code::Busy, "the file is open for writing; its layout can be set when it is closed");
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
        let layout = self.t.place.layout(&spec, r.attr().ino, data_id, generation)?;
        // What a writer that died may have sent under the old name without reporting its end goes too.
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

fn no_xattr<T>() -> Res<T> {
    fail(Code::NoData, "no such extended attribute")
}
