//! Extended attributes, xattr(7): `user.`, `trusted.` and `security.` are separate records; the two
//! POSIX ACLs are in the inode, where the permission checks find them.

use bytes::Bytes;
use strake_proto::{Code, Ino, pb};

use super::run::Run;
use crate::namespace::{
    acl::{self, Acl},
    caller::{in_group, is_root, owns},
    fail::{Res, fail},
    inode::{Inode, S_IFLNK, S_IFMT, S_ISGID, S_ISVTX, is_dir, is_file},
    keys,
    perm::{self, R, W},
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

pub(super) fn getxattr(run: &mut Run<'_, '_>, o: &pb::GetXattr) -> Res<pb::OpResult> {
    let mut r = run.inode(o.ino)?;
    may_xattr(run, &r, &o.name, false)?;
    let ino = r.attr().ino;
    let value = if is_acl(&o.name) {
        Some(std::mem::take(acl_field(&mut r, &o.name))).filter(|v| !v.is_empty())
    } else if r.xattrs == 0 {
        None
    } else {
        run.t.get(&keys::xattr(ino, &o.name))?
    };
    match value {
        Some(data) => Ok(pb::OpResult { ino, data, ..Default::default() }),
        None => no_xattr(),
    }
}

pub(super) fn listxattr(run: &mut Run<'_, '_>, ino: Ino) -> Res<pb::OpResult> {
    let r = run.inode(ino)?;
    let ino = r.attr().ino;
    let mut names = Vec::new();
    let lists = [(acl::ACCESS, &r.acl), (acl::DEFAULT, &r.default_acl)];
    names.extend(
        lists.iter().filter(|(_, acl)| !acl.is_empty()).map(|(name, _)| Bytes::from_static(name)),
    );
    if r.xattrs > 0 {
        run.t.scan(&keys::numbered(keys::XATTR, ino), &[], |key, _| {
            let name = key.get(9..).unwrap_or_default();
            // Older versions stored ACLs here, without effect.
            let hidden = name.starts_with(b"trusted.") && !is_root(run.by.creds) || is_acl(name);
            if !hidden {
                names.push(Bytes::copy_from_slice(name));
            }
            Ok(true)
        })?;
    }
    Ok(pb::OpResult { ino, names, ..Default::default() })
}

pub(super) fn setxattr(run: &mut Run<'_, '_>, o: &pb::SetXattr) -> Res<pb::OpResult> {
    let mut r = run.inode(o.ino)?;
    perm::changeable(&r)?;
    if o.flags & !(XATTR_CREATE | XATTR_REPLACE) != 0 {
        return fail(Code::Inval, format!("extended attribute flags {:#x} are unknown", o.flags));
    }
    if o.value.len() > SIZE_MAX {
        return fail(
            Code::TooBig,
            format!("a value of {} bytes; {SIZE_MAX} are the limit", o.value.len()),
        );
    }
    may_xattr(run, &r, &o.name, true)?;
    if o.name == CAPABILITY {
        writers::may_set(&run.by, &r)?;
    }
    if is_acl(&o.name) {
        return set_acl(run, r, &o.name, Acl::parse(&o.value)?);
    }
    let key = keys::xattr(r.attr().ino, &o.name);
    let exists = r.xattrs > 0 && run.t.get(&key)?.is_some();
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
        if run.by.rules >= 1 {
            check_list(run, &r, &o.name)?;
        }
        r.xattrs += 1;
    }
    run.t.put(key, o.value.clone());
    let ino = run.save(r).attr().ino;
    Ok(pb::OpResult { ino, ..Default::default() })
}

/// The names must fit what listxattr(2) can return: otherwise none of them could be listed or
/// copied.
fn check_list(run: &Run<'_, '_>, r: &pb::InodeRecord, name: &[u8]) -> Res<()> {
    if (r.xattrs as usize + 1) * (NAME_MAX + 1) <= LIST_MAX {
        return Ok(());
    }
    let mut len = name.len() + 1;
    // A key is a prefix byte, the inode's number and the name.
    run.t.scan(&keys::numbered(keys::XATTR, r.attr().ino), &[], |key, _| {
        len += key.len().saturating_sub(9) + 1;
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

pub(super) fn removexattr(run: &mut Run<'_, '_>, o: &pb::RemoveXattr) -> Res<pb::OpResult> {
    let mut r = run.inode(o.ino)?;
    perm::changeable(&r)?;
    let weakens = o.name == CAPABILITY && perm::may_strip(run.by.creds, &r);
    if !weakens {
        may_xattr(run, &r, &o.name, true)?;
    }
    if is_acl(&o.name) {
        return set_acl(run, r, &o.name, None);
    }
    let key = keys::xattr(r.attr().ino, &o.name);
    if r.xattrs == 0 || run.t.get(&key)?.is_none() {
        return no_xattr();
    }
    run.t.delete(key);
    r.xattrs = r.xattrs.saturating_sub(1);
    let ino = run.save(r).attr().ino;
    Ok(pb::OpResult { ino, ..Default::default() })
}

/// Sets an ACL, or removes it. An access list also sets the permission bits, and is kept only
/// if it says more than they do.
fn set_acl(
    run: &mut Run<'_, '_>,
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
        let stranger = !is_root(run.by.creds) && !in_group(run.by.creds, r.attr().gid);
        let a = r.attr_mut();
        a.mode = a.mode & !0o777 | list.mode_bits();
        if stranger {
            a.mode &= !S_ISGID;
        }
    }
    *acl_field(&mut r, name) = kept;
    r.attr_mut().acls = acl::kinds(&r);
    run.end_rights(&before, &r);
    let ino = run.save(r).attr().ino;
    Ok(pb::OpResult { ino, ..Default::default() })
}

/// The contents or the owner change: removes what the file's program may do beyond its caller's
/// rights.
pub(super) fn drop_capability(run: &mut Run<'_, '_>, r: &mut pb::InodeRecord) -> Res<()> {
    if r.xattrs == 0 {
        return Ok(());
    }
    let key = keys::xattr(r.attr().ino, CAPABILITY);
    if run.t.get(&key)?.is_some() {
        run.t.delete(key);
        r.xattrs = r.xattrs.saturating_sub(1);
    }
    Ok(())
}

/// The rules of each namespace.
fn may_xattr(run: &Run<'_, '_>, r: &pb::InodeRecord, name: &[u8], write: bool) -> Res<()> {
    if name.is_empty() || name.len() > NAME_MAX {
        return fail(Code::Range, format!("extended attribute names have 1 to {NAME_MAX} bytes"));
    }
    if name.contains(&0) || [&b"user."[..], b"trusted.", b"security."].contains(&name) {
        return fail(Code::Inval, "the extended attribute has no valid name");
    }
    let (c, a) = (run.by.creds, r.attr());
    if name.starts_with(b"user.") {
        if !is_file(a) && !is_dir(a) {
            return if write {
                fail(Code::Perm, "only files and directories have user attributes")
            } else {
                no_xattr()
            };
        }
        if write && is_dir(a) && a.mode & S_ISVTX != 0 && !owns(c, a) {
            return fail(
                Code::Perm,
                "only the owner of a sticky directory may set its user attributes",
            );
        }
        perm::check(c, r, if write { W } else { R })?;
    } else if name.starts_with(b"trusted.") {
        if !is_root(c) {
            return if write {
                fail(Code::Perm, "only root may use trusted attributes")
            } else {
                no_xattr()
            };
        }
    } else if name.starts_with(b"security.") {
        if write && !is_root(c) {
            return fail(Code::Perm, "only root may set security attributes");
        }
    } else if is_acl(name) {
        may_acl(run, a, name, write)?;
    } else {
        return fail(
            Code::OpNotSupp,
            "extended attributes are user., trusted., security. or POSIX ACLs",
        );
    }
    Ok(())
}

fn may_acl(run: &Run<'_, '_>, a: &pb::Attr, name: &[u8], write: bool) -> Res<()> {
    if a.mode & S_IFMT == S_IFLNK {
        return fail(Code::OpNotSupp, "symbolic links have no ACL");
    }
    if write && name == acl::DEFAULT && !is_dir(a) {
        return fail(Code::Access, "only directories have a default ACL");
    }
    if write && !owns(run.by.creds, a) {
        return fail(Code::Perm, "only the owner may change an ACL");
    }
    Ok(())
}
