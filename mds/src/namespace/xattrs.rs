//! Extended attributes, xattr(7): `user.`, `trusted.` and `security.` are separate records; the two
//! POSIX ACLs are in the inode, where the permission checks find them.

use bytes::Bytes;
use strake_proto::{Code, Ino, pb};

use super::{
    acl::{self, Acl},
    keys,
    ops::{Inode, Run},
    perm::{self, R, S_ISGID, W},
    txn::{Res, fail},
    writers,
};

/// Longest name and value of an extended attribute, as in Linux.
const NAME_MAX: usize = 255;
const SIZE_MAX: usize = 64 << 10;
/// Bytes of the names that listxattr(2) can return, each with a NUL, besides those of the two ACLs,
/// which have no records.
const LIST_MAX: usize = SIZE_MAX - (acl::ACCESS.len() + 1 + acl::DEFAULT.len() + 1);
/// Most extended attributes of one inode.
const XATTRS_MAX: u32 = 1_024;
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;
/// File capabilities (capabilities(7)): removed as soon as the file is written, truncated or given
/// to another owner.
const CAPABILITY: &[u8] = b"security.capability";

fn is_acl(name: &[u8]) -> bool {
    name == acl::ACCESS || name == acl::DEFAULT
}

/// The field of an inode that an ACL's name stands for.
fn acl_field<'a>(r: &'a mut pb::InodeRecord, name: &[u8]) -> &'a mut Bytes {
    if name == acl::ACCESS { &mut r.acl } else { &mut r.default_acl }
}

fn no_xattr<T>() -> Res<T> {
    fail(Code::NoData, "no such extended attribute")
}

impl Run<'_, '_> {
    pub(super) fn getxattr(&mut self, o: &pb::GetXattr) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        self.may_xattr(&r, &o.name, false)?;
        let ino = r.attr().ino;
        let value = if is_acl(&o.name) {
            Some(std::mem::take(acl_field(&mut r, &o.name))).filter(|v| !v.is_empty())
        } else if r.xattrs == 0 {
            None
        } else {
            self.t.get(&keys::xattr(ino, &o.name))?
        };
        match value {
            Some(data) => Ok(pb::OpResult { ino, data, ..Default::default() }),
            None => no_xattr(),
        }
    }

    pub(super) fn listxattr(&mut self, ino: Ino) -> Res<pb::OpResult> {
        let r = self.inode(ino)?;
        let ino = r.attr().ino;
        let mut names = Vec::new();
        let lists = [(acl::ACCESS, &r.acl), (acl::DEFAULT, &r.default_acl)];
        names.extend(
            lists
                .iter()
                .filter(|(_, acl)| !acl.is_empty())
                .map(|(name, _)| Bytes::from_static(name)),
        );
        if r.xattrs > 0 {
            self.t.scan(&keys::numbered(keys::XATTR, ino), &[], |key, _| {
                let name = key.get(9..).unwrap_or_default();
                // Older versions stored ACLs here, without effect.
                let hidden =
                    name.starts_with(b"trusted.") && !perm::is_root(self.by.creds) || is_acl(name);
                if !hidden {
                    names.push(Bytes::copy_from_slice(name));
                }
                Ok(true)
            })?;
        }
        Ok(pb::OpResult { ino, names, ..Default::default() })
    }

    pub(super) fn setxattr(&mut self, o: &pb::SetXattr) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        perm::changeable(&r)?;
        if o.flags & !(XATTR_CREATE | XATTR_REPLACE) != 0 {
            return fail(
                Code::Inval,
                format!("extended attribute flags {:#x} are unknown", o.flags),
            );
        }
        if o.value.len() > SIZE_MAX {
            return fail(
                Code::TooBig,
                format!("a value of {} bytes; {SIZE_MAX} are the limit", o.value.len()),
            );
        }
        self.may_xattr(&r, &o.name, true)?;
        if o.name == CAPABILITY {
            writers::may_set(&self.by, &r)?;
        }
        if is_acl(&o.name) {
            return self.set_acl(r, &o.name, Acl::parse(&o.value)?);
        }
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
                return fail(
                    Code::NoSpc,
                    format!("the inode has {XATTRS_MAX} extended attributes already"),
                );
            }
            if self.by.rules >= 1 {
                self.check_list(&r, &o.name)?;
            }
            r.xattrs += 1;
        }
        self.t.put(key, o.value.clone());
        let ino = self.save(r).attr().ino;
        Ok(pb::OpResult { ino, ..Default::default() })
    }

    /// The names must fit what listxattr(2) can return: otherwise none of them could be listed or
    /// copied.
    fn check_list(&self, r: &pb::InodeRecord, name: &[u8]) -> Res<()> {
        if (r.xattrs as usize + 1) * (NAME_MAX + 1) <= LIST_MAX {
            return Ok(());
        }
        let mut len = name.len() + 1;
        // A key is a prefix byte, the inode's number and the name.
        self.t.scan(&keys::numbered(keys::XATTR, r.attr().ino), &[], |key, _| {
            len += key.len() - 9 + 1;
            Ok(true)
        })?;
        if len > LIST_MAX {
            return fail(
                Code::NoSpc,
                format!(
                    "the names of extended attributes would be {len} bytes; {LIST_MAX} can be listed"
                ),
            );
        }
        Ok(())
    }

    pub(super) fn removexattr(&mut self, o: &pb::RemoveXattr) -> Res<pb::OpResult> {
        let mut r = self.inode(o.ino)?;
        perm::changeable(&r)?;
        let weakens = o.name == CAPABILITY && perm::may_strip(self.by.creds, &r);
        if !weakens {
            self.may_xattr(&r, &o.name, true)?;
        }
        if is_acl(&o.name) {
            return self.set_acl(r, &o.name, None);
        }
        let key = keys::xattr(r.attr().ino, &o.name);
        if r.xattrs == 0 || self.t.get(&key)?.is_none() {
            return no_xattr();
        }
        self.t.delete(key);
        r.xattrs -= 1;
        let ino = self.save(r).attr().ino;
        Ok(pb::OpResult { ino, ..Default::default() })
    }

    /// Sets an ACL, or removes it. An access list also sets the permission bits, and is kept only
    /// if it says more than they do.
    fn set_acl(
        &mut self,
        mut r: pb::InodeRecord,
        name: &[u8],
        list: Option<Acl>,
    ) -> Res<pb::OpResult> {
        let before = r.clone();
        let mut kept = list.as_ref().map(Acl::encode).unwrap_or_default();
        if let Some(list) = &list
            && name == acl::ACCESS
        {
            if list.is_mode_only() {
                kept.clear();
            }
            let stranger =
                !perm::is_root(self.by.creds) && !perm::in_group(self.by.creds, r.attr().gid);
            let a = r.attr_mut();
            a.mode = a.mode & !0o777 | list.mode_bits();
            if stranger {
                a.mode &= !S_ISGID;
            }
        }
        *acl_field(&mut r, name) = kept;
        r.attr_mut().acls = acl::kinds(&r);
        self.end_rights(&before, &r);
        let ino = self.save(r).attr().ino;
        Ok(pb::OpResult { ino, ..Default::default() })
    }

    /// The contents or the owner change: removes what the file's program may do beyond its caller's
    /// rights.
    pub(super) fn drop_capability(&mut self, r: &mut pb::InodeRecord) -> Res<()> {
        if r.xattrs == 0 {
            return Ok(());
        }
        let key = keys::xattr(r.attr().ino, CAPABILITY);
        if self.t.get(&key)?.is_some() {
            self.t.delete(key);
            r.xattrs -= 1;
        }
        Ok(())
    }

    /// The rules of each namespace.
    fn may_xattr(&self, r: &pb::InodeRecord, name: &[u8], write: bool) -> Res<()> {
        if name.is_empty() || name.len() > NAME_MAX {
            return fail(
                Code::Range,
                format!("extended attribute names have 1 to {NAME_MAX} bytes"),
            );
        }
        if name.contains(&0) || [&b"user."[..], b"trusted.", b"security."].contains(&name) {
            return fail(Code::Inval, "the extended attribute has no valid name");
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
                return fail(
                    Code::Perm,
                    "only the owner of a sticky directory may set its user attributes",
                );
            }
            perm::check(c, r, if write { W } else { R })?;
        } else if name.starts_with(b"trusted.") {
            if !perm::is_root(c) {
                return if write {
                    fail(Code::Perm, "only root may use trusted attributes")
                } else {
                    no_xattr()
                };
            }
        } else if name.starts_with(b"security.") {
            if write && !perm::is_root(c) {
                return fail(Code::Perm, "only root may set security attributes");
            }
        } else if is_acl(name) {
            self.may_acl(a, name, write)?;
        } else {
            return fail(
                Code::OpNotSupp,
                "extended attributes are user., trusted., security. or POSIX ACLs",
            );
        }
        Ok(())
    }

    fn may_acl(&self, a: &pb::Attr, name: &[u8], write: bool) -> Res<()> {
        if a.mode & perm::S_IFMT == perm::S_IFLNK {
            return fail(Code::OpNotSupp, "symbolic links have no ACL");
        }
        if write && name == acl::DEFAULT && !perm::is_dir(a) {
            return fail(Code::Access, "only directories have a default ACL");
        }
        if write && !perm::owns(self.by.creds, a) {
            return fail(Code::Perm, "only the owner may change an ACL");
        }
        Ok(())
    }
}
