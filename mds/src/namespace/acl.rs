//! POSIX access control lists as in acl(5) and Linux (`fs/posix_acl.c`). Pure: bytes of the
//! extended attributes `system.posix_acl_access` and `system.posix_acl_default` in, decisions and
//! bytes out.
//!
//! An inode keeps an access list only where it says more than the permission bits. Where it has
//! one, the group bits of the mode are the list's mask.

use bytes::{BufMut, Bytes, BytesMut};
use strake_proto::{Code, Error, Result, pb};

use super::{
    caller::in_group,
    inode::{S_IFDIR, S_IFLNK, S_IFMT},
};

pub(super) const ACCESS: &[u8] = b"system.posix_acl_access";
pub(super) const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: u32 = 2;
const HEAD: usize = 4;
const ENTRY: usize = 8;
/// Longest encoding, as in Linux's FUSE: one page, 511 entries.
pub(super) const SIZE_MAX: usize = 4096;
/// The id of an entry without a user or group.
const NOBODY: u32 = u32::MAX;

/// The kind of user or group an entry is for. The numbers are those of the encoding; entries are
/// sorted by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    Owner,
    User(u32),
    Group,
    NamedGroup(u32),
    Mask,
    Other,
}

impl Tag {
    fn number(self) -> u16 {
        match self {
            Tag::Owner => 0x01,
            Tag::User(_) => 0x02,
            Tag::Group => 0x04,
            Tag::NamedGroup(_) => 0x08,
            Tag::Mask => 0x10,
            Tag::Other => 0x20,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub tag: Tag,
    /// `rwx`, 0 to 7.
    pub perm: u32,
}

/// A valid list: owner, named users, group, named groups, mask (required if a user or group is
/// named), others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Acl(Vec<Entry>);

fn bad<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::new(Code::Inval, what.into()))
}

fn entry(b: &[u8; ENTRY]) -> Result<Entry> {
    let [t0, t1, p0, p1, i0, i1, i2, i3] = *b;
    let (perm, id) =
        (u32::from(u16::from_le_bytes([p0, p1])), u32::from_le_bytes([i0, i1, i2, i3]));
    let tag = match u16::from_le_bytes([t0, t1]) {
        0x01 => Tag::Owner,
        0x02 => Tag::User(id),
        0x04 => Tag::Group,
        0x08 => Tag::NamedGroup(id),
        0x10 => Tag::Mask,
        0x20 => Tag::Other,
        other => return bad(format!("an ACL entry of the unknown kind {other:#x}")),
    };
    if perm > 7 {
        return bad(format!("an ACL entry with the permissions {perm:#o}"));
    }
    if matches!(tag, Tag::User(NOBODY) | Tag::NamedGroup(NOBODY)) {
        return bad("an ACL entry names user or group -1");
    }
    Ok(Entry { tag, perm })
}

impl Acl {
    /// Reads a list; `None` for a list without entries, which stands for no list. `EINVAL` for
    /// anything malformed, `EOPNOTSUPP` for another version, `E2BIG` beyond [`SIZE_MAX`].
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<Acl>> {
        if bytes.len() > SIZE_MAX {
            return Err(Error::new(
                Code::TooBig,
                format!("an ACL of {} bytes; {SIZE_MAX} are the limit", bytes.len()),
            ));
        }
        let Some((version, rest)) = bytes.split_first_chunk::<HEAD>() else {
            return bad("an ACL begins with its version");
        };
        match u32::from_le_bytes(*version) {
            VERSION => {}
            v => {
                return Err(Error::new(
                    Code::OpNotSupp,
                    format!("ACL version {v} is unknown; {VERSION} is known"),
                ));
            }
        }
        let (entries, []) = rest.as_chunks::<ENTRY>() else {
            return bad("an ACL with part of an entry");
        };
        if entries.is_empty() {
            return Ok(None);
        }
        let acl = Acl(entries.iter().map(entry).collect::<Result<_>>()?);
        acl.check_order()?;
        Ok(Some(acl))
    }

    /// Reads a stored list. Stored lists are valid; if one were not, it would count as none, and
    /// the mode alone would decide.
    pub(super) fn stored(bytes: &[u8]) -> Option<Acl> {
        Acl::parse(bytes).ok().flatten()
    }

    fn check_order(&self) -> Result<()> {
        let numbers = || self.0.iter().map(|e| e.tag.number());
        if !numbers().is_sorted() {
            return bad("the entries of an ACL are not in order");
        }
        let count = |tag: Tag| numbers().filter(|n| *n == tag.number()).count();
        if [Tag::Owner, Tag::Group, Tag::Other].into_iter().any(|t| count(t) != 1)
            || count(Tag::Mask) > 1
        {
            return bad(
                "an ACL has one entry each for the owner, the group and others, and at most one mask",
            );
        }
        if self.names_anybody() && count(Tag::Mask) == 0 {
            return bad("an ACL that names users or groups needs a mask");
        }
        Ok(())
    }

    fn names_anybody(&self) -> bool {
        self.0.iter().any(|e| matches!(e.tag, Tag::User(_) | Tag::NamedGroup(_)))
    }

    pub(super) fn encode(&self) -> Bytes {
        let mut b = BytesMut::with_capacity(HEAD + ENTRY * self.0.len());
        b.put_u32_le(VERSION);
        for e in &self.0 {
            b.put_u16_le(e.tag.number());
            b.put_u16_le(e.perm as u16);
            b.put_u32_le(match e.tag {
                Tag::User(id) | Tag::NamedGroup(id) => id,
                _ => NOBODY,
            });
        }
        b.freeze()
    }

    fn perm(&self, tag: Tag) -> Option<u32> {
        self.0.iter().find(|e| e.tag == tag).map(|e| e.perm)
    }

    fn perm_mut(&mut self, tag: Tag) -> Option<&mut u32> {
        self.0.iter_mut().find(|e| e.tag == tag).map(|e| &mut e.perm)
    }

    /// The entry that the group bits of the mode stand for.
    fn group_class(&self) -> Tag {
        if self.perm(Tag::Mask).is_some() { Tag::Mask } else { Tag::Group }
    }

    /// The permission bits of a mode with this list.
    pub(super) fn mode_bits(&self) -> u32 {
        let bits = |tag| self.perm(tag).unwrap_or(0);
        bits(Tag::Owner) << 6 | bits(self.group_class()) << 3 | bits(Tag::Other)
    }

    /// Whether the permission bits say everything that the list says.
    pub(super) fn is_mode_only(&self) -> bool {
        self.0.len() == 3
    }

    /// Changes the list as chmod(2) does.
    pub(super) fn chmod(&mut self, mode: u32) {
        for (tag, shift) in [(Tag::Owner, 6), (self.group_class(), 3), (Tag::Other, 0)] {
            if let Some(perm) = self.perm_mut(tag) {
                *perm = mode >> shift & 7;
            }
        }
    }

    /// Whether the list grants all of `want` to a caller who is not the owner. The first class that
    /// matches decides; among groups it is enough that one grants everything.
    pub(super) fn grants(&self, c: &pb::Creds, group: u32, want: u32) -> bool {
        let mask = self.perm(Tag::Mask).unwrap_or(7);
        if let Some(perm) = self.perm(Tag::User(c.uid)) {
            return want & !(perm & mask) == 0;
        }
        let of_caller = |e: &&Entry| match e.tag {
            Tag::Group => in_group(c, group),
            Tag::NamedGroup(id) => in_group(c, id),
            _ => false,
        };
        let mut groups = self.0.iter().filter(of_caller).peekable();
        if groups.peek().is_some() {
            return groups.any(|e| want & !(e.perm & mask) == 0);
        }
        want & !self.perm(Tag::Other).unwrap_or(0) == 0
    }

    /// For a directory's default list: mode and access list of an inode made in it with `mode`. The
    /// umask does not apply.
    pub(super) fn inherit(&self, mode: u32) -> (u32, Option<Acl>) {
        let mut acl = self.clone();
        for (tag, shift) in [(Tag::Owner, 6), (acl.group_class(), 3), (Tag::Other, 0)] {
            if let Some(perm) = acl.perm_mut(tag) {
                *perm &= mode >> shift;
            }
        }
        let mode = mode & !0o777 | acl.mode_bits();
        (mode, (!acl.is_mode_only()).then_some(acl))
    }
}

/// The value of `Attr.acls` for an inode.
pub(super) fn kinds(r: &pb::InodeRecord) -> u32 {
    u32::from(!r.acl.is_empty()) | u32::from(!r.default_acl.is_empty()) << 1
}

/// Lists and mode of an inode made with `mode` in a directory.
pub(super) struct Born {
    pub mode: u32,
    pub acl: Bytes,
    pub default_acl: Bytes,
}

/// What an inode inherits: from the directory's default list, or from the umask where there is
/// none.
pub(super) fn born(dir: &pb::InodeRecord, mode: u32, umask: u32) -> Born {
    let list = Acl::stored(&dir.default_acl).filter(|_| mode & S_IFMT != S_IFLNK);
    let Some(default) = list else {
        return Born {
            mode: mode & !(umask & 0o777),
            acl: Bytes::new(),
            default_acl: Bytes::new(),
        };
    };
    let (mode, acl) = default.inherit(mode);
    let default_acl = if mode & S_IFMT == S_IFDIR { dir.default_acl.clone() } else { Bytes::new() };
    Born { mode, acl: acl.map(|a| a.encode()).unwrap_or_default(), default_acl }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn acl(entries: &[(Tag, u32)]) -> Acl {
        Acl(entries.iter().map(|(tag, perm)| Entry { tag: *tag, perm: *perm }).collect())
    }
    fn creds(uid: u32, gid: u32, groups: &[u32]) -> pb::Creds {
        pb::Creds { uid, gid, groups: groups.to_vec() }
    }
    fn sample() -> Acl {
        use Tag::*;
        acl(&[(Owner, 7), (User(5), 6), (Group, 4), (NamedGroup(9), 7), (Mask, 5), (Other, 1)])
    }

    #[test]
    fn the_encoding_is_that_of_linux() {
        let bytes: &[u8] = b"\x02\0\0\0\
            \x01\0\x07\0\xff\xff\xff\xff\x02\0\x06\0\x05\0\0\0\x04\0\x04\0\xff\xff\xff\xff\
            \x08\0\x07\0\x09\0\0\0\x10\0\x05\0\xff\xff\xff\xff\x20\0\x01\0\xff\xff\xff\xff";
        assert_eq!(sample().encode(), bytes);
        assert_eq!(Acl::parse(bytes).unwrap(), Some(sample()));
    }

    #[test]
    fn what_is_no_list_is_refused() {
        use Tag::*;
        let code = |b: &[u8]| Acl::parse(b).unwrap_err().code;
        assert_eq!(Acl::parse(b"\x02\0\0\0").unwrap(), None);
        assert_eq!(code(b"\x02\0\0"), Code::Inval);
        assert_eq!(code(b"\x01\0\0\0"), Code::OpNotSupp);
        assert_eq!(code(&sample().encode()[..20]), Code::Inval, "part of an entry");
        assert_eq!(code(&vec![0; SIZE_MAX + 1]), Code::TooBig);
        let bad: [&[(Tag, u32)]; 8] = [
            &[(Owner, 7)],
            &[(Owner, 8), (Group, 0), (Other, 0)],
            &[(Owner, 7), (Other, 0), (Group, 0)],
            &[(Owner, 7), (User(1), 0), (Group, 0), (Other, 0)],
            &[(Owner, 7), (Group, 0), (NamedGroup(1), 0), (Other, 0)],
            &[(Owner, 7), (User(u32::MAX), 0), (Group, 0), (Mask, 0), (Other, 0)],
            &[(Owner, 7), (Group, 0), (Mask, 0), (Mask, 0), (Other, 0)],
            &[(Owner, 7), (Group, 0), (Group, 0), (Other, 0)],
        ];
        for entries in bad {
            assert_eq!(code(&acl(entries).encode()), Code::Inval, "{entries:?}");
        }
        let mut unknown = sample().encode().to_vec();
        unknown[4] = 0x40;
        assert_eq!(code(&unknown), Code::Inval);
    }

    #[test]
    fn mode_and_list_are_kept_in_step() {
        let mut a = sample();
        assert_eq!((a.mode_bits(), a.is_mode_only()), (0o751, false));
        a.chmod(0o640);
        assert_eq!(
            (a.perm(Tag::Mask), a.perm(Tag::Group), a.mode_bits()),
            (Some(4), Some(4), 0o640)
        );
        let mut small = acl(&[(Tag::Owner, 6), (Tag::Group, 4), (Tag::Other, 0)]);
        assert!(small.is_mode_only());
        small.chmod(0o124);
        assert_eq!(small.mode_bits(), 0o124);
    }

    #[test]
    fn the_mask_bounds_all_but_owner_and_others() {
        let a = sample();
        assert!(
            a.grants(&creds(5, 1, &[]), 2, 4) && !a.grants(&creds(5, 9, &[]), 2, 2),
            "the user's entry alone counts"
        );
        assert!(a.grants(&creds(6, 9, &[]), 2, 5) && !a.grants(&creds(6, 9, &[]), 2, 2));
        assert!(a.grants(&creds(6, 2, &[9]), 2, 1), "any of his groups");
        assert!(!a.grants(&creds(6, 2, &[]), 2, 1), "the group's entry, not that of others");
        assert!(a.grants(&creds(6, 1, &[]), 2, 1) && !a.grants(&creds(6, 1, &[]), 2, 4));
    }

    #[test]
    fn new_inodes_inherit_the_default_list() {
        let dir = pb::InodeRecord { default_acl: sample().encode(), ..Default::default() };
        let file = born(&dir, 0o100_640, 0o777);
        let list = Acl::stored(&file.acl).unwrap();
        assert_eq!((file.mode, list.mode_bits(), file.default_acl.len()), (0o100_640, 0o640, 0));
        assert_eq!((list.perm(Tag::Mask), list.perm(Tag::Group)), (Some(4), Some(4)));
        let sub = born(&dir, 0o040_777, 0);
        assert_eq!((sub.mode, sub.default_acl), (0o040_751, dir.default_acl.clone()));
        let plain = born(&pb::InodeRecord::default(), 0o100_666, 0o7022);
        assert_eq!((plain.mode, plain.acl.len()), (0o100_644, 0));
    }

    /// The "access check algorithm" of acl(5), word for word.
    fn naive(a: &Acl, c: &pb::Creds, group: u32, want: u32) -> bool {
        let mask = a.0.iter().find(|e| e.tag == Tag::Mask).map_or(7, |e| e.perm);
        for e in &a.0 {
            if e.tag == Tag::User(c.uid) {
                return (0..3)
                    .all(|bit| want >> bit & 1 == 0 || e.perm >> bit & mask >> bit & 1 == 1);
            }
        }
        let (mut matched, mut granted) = (false, false);
        for e in &a.0 {
            let gid = match e.tag {
                Tag::Group => group,
                Tag::NamedGroup(g) => g,
                _ => continue,
            };
            if c.gid == gid || c.groups.contains(&gid) {
                matched = true;
                granted |=
                    (0..3).all(|bit| want >> bit & 1 == 0 || e.perm >> bit & mask >> bit & 1 == 1);
            }
        }
        let other = a.0.iter().find(|e| e.tag == Tag::Other).map_or(0, |e| e.perm);
        if matched { granted } else { want & !other == 0 }
    }

    prop_compose! {
        fn any_acl()(
            users in proptest::collection::btree_map(0..4u32, 0..8u32, 0..3),
            groups in proptest::collection::btree_map(0..4u32, 0..8u32, 0..3),
            base in proptest::array::uniform3(0..8u32),
            mask in proptest::option::of(0..8u32),
        ) -> Acl {
            let mask = mask.or((!users.is_empty() || !groups.is_empty()).then_some(7));
            let mut all = vec![(Tag::Owner, base[0])];
            all.extend(users.into_iter().map(|(id, p)| (Tag::User(id), p)));
            all.push((Tag::Group, base[1]));
            all.extend(groups.into_iter().map(|(id, p)| (Tag::NamedGroup(id), p)));
            all.extend(mask.map(|p| (Tag::Mask, p)));
            all.push((Tag::Other, base[2]));
            acl(&all)
        }
    }

    proptest! {
        #[test]
        fn decisions_are_those_of_the_manual(
            a in any_acl(), uid in 0..5u32, gid in 0..5u32,
            groups in proptest::collection::btree_set(0..5u32, 0..3), owner in 0..5u32, want in 0..8u32,
        ) {
            let c = creds(uid, gid, &groups.into_iter().collect::<Vec<_>>());
            prop_assert_eq!(a.grants(&c, owner, want), naive(&a, &c, owner, want));
        }

        #[test]
        fn lists_survive_their_encoding(a in any_acl()) {
            prop_assert_eq!(Acl::parse(&a.encode()).unwrap(), Some(a));
        }

        #[test]
        fn no_bytes_panic(b in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Acl::parse(&b);
            let mut headed = vec![2, 0, 0, 0];
            headed.extend(b);
            if let Ok(Some(a)) = Acl::parse(&headed) {
                prop_assert_eq!(Acl::parse(&a.encode()).unwrap(), Some(a));
            }
        }

        #[test]
        fn nobody_gets_more_than_the_default_list_and_the_mode_grant(
            a in any_acl(), mode in 0..0o1000u32, uid in 0..5u32, gid in 0..5u32, want in 0..8u32,
        ) {
            let (born, list) = a.inherit(mode);
            prop_assert_eq!(born & !mode, 0);
            let c = creds(uid, gid, &[]);
            if let Some(list) = list {
                prop_assert_eq!(list.mode_bits(), born);
                prop_assert!(!list.grants(&c, 1, want) || a.grants(&c, 1, want));
            }
        }

        #[test]
        fn chmod_sets_the_mode(a in any_acl(), mode in 0..0o1000u32) {
            let mut a = a;
            a.chmod(mode);
            prop_assert_eq!(a.mode_bits(), mode);
        }
    }
}
