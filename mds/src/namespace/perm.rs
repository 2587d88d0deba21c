//! Permission checks: mode bits and ACL against credentials, as Linux decides it (`fs/namei.c`,
//! `fs/attr.c`).

use strake_proto::{Code, Error, Result, ops::O_ACCMODE, pb};

use super::{
    acl::Acl,
    caller::{in_group, is_root, owns},
    inode::{Inode, S_IFDIR, S_IFMT, S_IFREG, S_ISGID, S_ISUID, S_ISVTX, is_dir, is_file},
};

const S_IXGRP: u32 = 0o010;

pub(super) const R: u32 = 4;
pub(super) const W: u32 = 2;
pub(super) const X: u32 = 1;

/// Linux x86-64 open flags that decide what an open may do.
/// Set by the kernel for the open of a program to run: it needs the x bit and not the r bit.
const FMODE_EXEC: u32 = 0x20;

/// `EPERM` if the file is sealed: no caller may change it, root included.
pub(super) fn changeable(r: &pb::InodeRecord) -> Result<()> {
    if r.seal.is_none() {
        return Ok(());
    }
    let m = format!("inode {} is sealed; it can be changed after `lfs seal --undo`", r.attr().ino);
    Err(Error::new(Code::Perm, m))
}

/// `EACCES` unless mode bits and ACL grant all of `mask` ([`R`] | [`W`] | [`X`]). `EPERM`: a write
/// to a sealed file.
pub(super) fn check(c: &pb::Creds, r: &pb::InodeRecord, mask: u32) -> Result<()> {
    let a = r.attr();
    if mask & W != 0 {
        changeable(r)?;
    }
    if is_granted(c, r, mask & 7) {
        return Ok(());
    }
    let m = format!(
        "the mode {:04o} of inode {} does not allow this to user {}",
        a.mode & 0o7777,
        a.ino,
        c.uid
    );
    Err(Error::new(Code::Access, m))
}

fn is_granted(c: &pb::Creds, r: &pb::InodeRecord, mask: u32) -> bool {
    let a = r.attr();
    if is_root(c) {
        // Root may execute only files with an x bit.
        return mask & X == 0 || is_dir(a) || a.mode & 0o111 != 0;
    }
    if c.uid == a.uid {
        return mask & !(a.mode >> 6) == 0;
    }
    // Like Linux, which does not look at an ACL whose mask is empty.
    if !r.acl.is_empty()
        && a.mode & 0o070 != 0
        && let Some(acl) = Acl::stored(&r.acl)
    {
        return acl.grants(c, a.gid, mask);
    }
    let class = if in_group(c, a.gid) { a.mode >> 3 } else { a.mode };
    mask & !class == 0
}

/// The mode bits that an open with these flags needs.
pub(super) fn mask_of_open(flags: u32) -> u32 {
    match flags & O_ACCMODE {
        0 if flags & FMODE_EXEC != 0 => X,
        0 => R,
        1 => W,
        _ => R | W,
    }
}

/// Whether an open with these flags may write.
pub(super) fn asks_to_write(flags: u32) -> bool {
    flags & O_ACCMODE != 0
}

/// Whether a name of `victim` may be taken out of `dir`.
pub(super) fn may_delete(
    c: &pb::Creds,
    dir: &pb::InodeRecord,
    victim: &pb::InodeRecord,
) -> Result<()> {
    check(c, dir, W | X)?;
    changeable(victim)?;
    let (dir, victim) = (dir.attr(), victim.attr());
    if dir.mode & S_ISVTX != 0 && !owns(c, victim) && !owns(c, dir) {
        let m = format!(
            "directory {} is sticky, and the caller owns neither it nor inode {}",
            dir.ino, victim.ino
        );
        return Err(Error::new(Code::Perm, m));
    }
    Ok(())
}

/// Mode and group of an inode made in `dir`.
pub(super) fn born(c: &pb::Creds, dir: &pb::Attr, mode: u32) -> (u32, u32) {
    if dir.mode & S_ISGID == 0 {
        return (mode, c.gid);
    }
    if mode & S_IFMT == S_IFDIR {
        return (mode | S_ISGID, dir.gid);
    }
    let stranger = !is_root(c) && !in_group(c, dir.gid);
    let keeps = mode & (S_ISGID | S_IXGRP) != (S_ISGID | S_IXGRP) || !stranger;
    (if keeps { mode } else { mode & !S_ISGID }, dir.gid)
}

/// The mode after a caller other than root changed the contents of a file of group `gid`.
/// `strangers`: callers outside of the group remove set-group-id also where the group has no x bit,
/// as Linux does since 6.1.
pub(super) fn after_write(c: &pb::Creds, gid: u32, mode: u32, strangers: bool) -> u32 {
    if is_root(c) || mode & S_IFMT != S_IFREG {
        return mode;
    }
    let mode = without_set_ids(mode);
    if strangers && !in_group(c, gid) { mode & !S_ISGID } else { mode }
}

/// The mode after a change of owner or group, by any caller.
pub(super) fn after_chown(c: &pb::Creds, a: &pb::Attr) -> u32 {
    if is_dir(a) {
        return a.mode;
    }
    let mode = without_set_ids(a.mode);
    if is_root(c) || in_group(c, a.gid) { mode } else { mode & !S_ISGID }
}

/// Whether a caller may remove set-id bits and capabilities from a file: its owner, and callers who
/// may write it.
pub(super) fn may_strip(c: &pb::Creds, r: &pb::InodeRecord) -> bool {
    owns(c, r.attr()) || is_file(r.attr()) && is_granted(c, r, W)
}

/// Whether the caller may set this mode because it only removes set-id bits: a kernel that removes
/// them itself sets it so for a writer.
pub(super) fn only_drops_set_ids(c: &pb::Creds, r: &pb::InodeRecord, mode: u32) -> bool {
    let now = r.attr().mode & 0o7777;
    mode & 0o7777 == now & !(S_ISUID | S_ISGID) | mode & now & S_ISGID && may_strip(c, r)
}

/// Whether a change of a file may take a right to its data from another caller.
pub(super) fn takes_away(before: &pb::InodeRecord, after: &pb::InodeRecord) -> bool {
    let (b, a) = (before.attr(), after.attr());
    let lists = before.acl != after.acl;
    is_file(a) && ((b.uid, b.gid) != (a.uid, a.gid) || b.mode & 0o777 & !a.mode != 0 || lists)
}

/// Set-group-id without group execution means mandatory locking and stays.
fn without_set_ids(mode: u32) -> u32 {
    let mode = mode & !S_ISUID;
    if mode & S_IXGRP != 0 { mode & !S_ISGID } else { mode }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn creds(uid: u32, gid: u32, groups: &[u32]) -> pb::Creds {
        pb::Creds { uid, gid, groups: groups.to_vec() }
    }
    fn attr(mode: u32, uid: u32, gid: u32) -> pb::Attr {
        pb::Attr { ino: 5, mode, uid, gid, ..Default::default() }
    }
    fn record(mode: u32, uid: u32, gid: u32) -> pb::InodeRecord {
        pb::InodeRecord { attr: Some(attr(mode, uid, gid)), ..Default::default() }
    }

    #[test]
    fn the_first_class_that_matches_decides() {
        let a = record(S_IFREG | 0o074, 1, 10);
        assert!(
            check(&creds(1, 10, &[]), &a, R).is_err(),
            "the owner has no bits although his group has"
        );
        assert!(check(&creds(2, 10, &[]), &a, R | W | X).is_ok());
        assert!(check(&creds(2, 11, &[10]), &a, R | W | X).is_ok(), "supplementary group");
        assert!(check(&creds(2, 11, &[]), &a, R).is_ok());
        assert!(check(&creds(2, 11, &[]), &a, W).is_err());
        assert!(check(&creds(0, 0, &[]), &a, R | W | X).is_ok());
        assert_eq!(
            check(&creds(0, 0, &[]), &record(S_IFREG | 0o666, 1, 1), X).unwrap_err().code,
            Code::Access
        );
        assert!(check(&creds(0, 0, &[]), &record(S_IFDIR, 1, 1), X).is_ok());
    }

    #[test]
    fn an_acl_decides_for_all_but_the_owner() {
        let mut r = record(S_IFREG | 0o670, 1, 10);
        // Owner rw, user 2 r, the group nothing, mask rwx, others nothing.
        let entry =
            |tag: u8, perm: u8, id: u32| [&[tag, 0, perm, 0][..], &id.to_le_bytes()].concat();
        let none = u32::MAX;
        let list = [
            entry(1, 6, none),
            entry(2, 4, 2),
            entry(4, 0, none),
            entry(16, 7, none),
            entry(32, 0, none),
        ];
        r.acl = [&[2, 0, 0, 0][..], &list.concat()].concat().into();
        assert!(
            check(&creds(1, 99, &[]), &r, R | W).is_ok()
                && check(&creds(1, 99, &[]), &r, X).is_err()
        );
        assert!(
            check(&creds(2, 10, &[]), &r, R).is_ok() && check(&creds(2, 10, &[]), &r, W).is_err()
        );
        assert!(check(&creds(3, 10, &[]), &r, R).is_err(), "the mode's group bits are the mask");
        assert!(check(&creds(0, 0, &[]), &r, R | W | X).is_ok());
        r.attr_mut().mode = S_IFREG | 0o604;
        assert!(
            check(&creds(3, 3, &[]), &r, R).is_ok(),
            "an empty mask: the mode alone, as in Linux"
        );
        r.acl = vec![1, 2, 3].into();
        r.attr_mut().mode = S_IFREG | 0o640;
        assert!(
            check(&creds(3, 10, &[]), &r, R).is_ok() && check(&creds(3, 3, &[]), &r, R).is_err(),
            "no list"
        );
    }

    #[test]
    fn open_flags_ask_for_the_right_bits() {
        assert_eq!([0, 1, 2, 3, 0o2001, 0x20].map(mask_of_open), [R, W, R | W, R | W, W, X]);
    }

    #[test]
    fn sticky_directories_protect_other_peoples_names() {
        let dir = record(S_IFDIR | 0o1777, 1, 1);
        let file = record(S_IFREG | 0o666, 2, 2);
        assert_eq!(may_delete(&creds(3, 3, &[]), &dir, &file).unwrap_err().code, Code::Perm);
        for uid in [0, 1, 2] {
            assert!(may_delete(&creds(uid, 9, &[]), &dir, &file).is_ok(), "uid {uid}");
        }
    }

    #[test]
    fn what_is_sealed_is_nobodys_to_change() {
        let dir = record(S_IFDIR | 0o777, 1, 1);
        let mut file = record(S_IFREG | 0o666, 2, 2);
        file.seal = Some(pb::SealInfo::default());
        for uid in [0, 1, 2] {
            let c = creds(uid, uid, &[]);
            assert!(check(&c, &file, R).is_ok(), "uid {uid}");
            for mask in [W, R | W, W | X] {
                assert_eq!(check(&c, &file, mask).unwrap_err().code, Code::Perm, "uid {uid}");
            }
            assert_eq!(may_delete(&c, &dir, &file).unwrap_err().code, Code::Perm, "uid {uid}");
        }
    }

    #[test]
    fn set_group_id_directories_hand_their_group_down() {
        let dir = attr(S_IFDIR | 0o2775, 1, 10);
        let user = creds(2, 20, &[]);
        assert_eq!(born(&user, &dir, S_IFDIR | 0o755), (S_IFDIR | 0o2755, 10));
        assert_eq!(
            born(&user, &dir, S_IFREG | 0o2755),
            (S_IFREG | 0o755, 10),
            "not a member of group 10"
        );
        assert_eq!(born(&creds(2, 10, &[]), &dir, S_IFREG | 0o2755), (S_IFREG | 0o2755, 10));
        assert_eq!(
            born(&user, &attr(S_IFDIR | 0o755, 1, 10), S_IFREG | 0o644),
            (S_IFREG | 0o644, 20)
        );
    }

    #[test]
    fn writing_and_chown_take_set_id_bits() {
        let user = creds(2, 20, &[]);
        let written = |c: &pb::Creds, gid, mode, strangers| {
            after_write(c, gid, S_IFREG | mode, strangers) & 0o7777
        };
        for strangers in [true, false] {
            assert_eq!(written(&user, 20, 0o6755, strangers), 0o755);
            assert_eq!(written(&user, 20, 0o6745, strangers), 0o2745);
            assert_eq!(written(&creds(2, 1, &[7, 20]), 20, 0o6767, strangers), 0o2767);
            assert_eq!(
                written(&creds(0, 0, &[]), 20, 0o6767, strangers),
                0o6767,
                "root is a stranger nowhere"
            );
        }
        assert_eq!(
            (written(&user, 21, 0o2767, true), written(&user, 21, 0o2767, false)),
            (0o767, 0o2767)
        );
        assert_eq!(after_write(&user, 21, S_IFDIR | 0o2767, true), S_IFDIR | 0o2767);
        assert_eq!(after_chown(&creds(0, 0, &[]), &attr(S_IFREG | 0o6755, 1, 1)), S_IFREG | 0o755);
        assert_eq!(after_chown(&user, &attr(S_IFDIR | 0o6755, 1, 1)), S_IFDIR | 0o6755);
    }
}
