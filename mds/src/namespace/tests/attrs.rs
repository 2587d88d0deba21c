//! Attributes, sizes, truncation, extended attributes, and removal after the name is gone.

use super::*;

fn set(ino: Ino) -> pb::SetAttr {
    pb::SetAttr { ino, ..Default::default() }
}
fn chmod(ino: Ino, mode: u32) -> Op {
    Op::Setattr(pb::SetAttr { mode: Some(mode), ..set(ino) })
}
fn chown(ino: Ino, uid: Option<u32>, gid: Option<u32>) -> Op {
    Op::Setattr(pb::SetAttr { uid, gid, ..set(ino) })
}
fn mode(fs: &mut Fs, ino: Ino) -> u32 {
    fs.attr(ino).mode & 0o7777
}

#[test]
fn chmod_and_chown_follow_the_rules() {
    let mut fs = Fs::new();
    let f = fs.as_user(5, |fs| fs.create(ROOT, "f"));
    fs.as_user(6, |fs| {
        fs.fails(chmod(f, 0o777), Code::Perm);
        fs.fails(chown(f, Some(6), None), Code::Perm);
        fs.fails(chown(f, None, Some(6)), Code::Perm);
    });
    fs.as_user(5, |fs| {
        fs.one(chmod(f, 0o6755));
        assert_eq!(mode(fs, f), 0o6755);
        fs.fails(chown(f, Some(6), None), Code::Perm);
        fs.fails(chown(f, None, Some(77)), Code::Perm);
        fs.creds.groups = vec![77];
        fs.one(chown(f, Some(5), Some(77)));
        assert_eq!((mode(fs, f), fs.attr(f).gid), (0o755, 77));
        fs.creds.groups.clear();
        fs.one(chmod(f, 0o2755));
        assert_eq!(mode(fs, f), 0o755, "not a member of group 77");
    });
    fs.one(chown(f, Some(9), Some(10)));
    let a = fs.attr(f);
    assert_eq!((a.uid, a.gid, a.ctime_ns), (9, 10, fs.now));
    fs.fails(chown(f, Some(u32::MAX), None), Code::Inval);
}

#[test]
fn times_follow_the_rules() {
    let mut fs = Fs::new();
    let f = fs.as_user(5, |fs| fs.create(ROOT, "f"));
    let explicit = Op::Setattr(pb::SetAttr { atime_ns: Some(-5), mtime_ns: Some(7), ..set(f) });
    let now = Op::Setattr(pb::SetAttr { atime_now: true, mtime_now: true, ..set(f) });
    fs.as_user(6, |fs| {
        fs.fails(explicit.clone(), Code::Perm);
        fs.fails(now.clone(), Code::Access);
    });
    fs.as_user(5, |fs| {
        let a = fs.one(explicit.clone()).attr.unwrap();
        assert_eq!((a.atime_ns, a.mtime_ns, a.ctime_ns), (-5, 7, fs.now));
        fs.one(chmod(f, 0o666));
    });
    fs.as_user(6, |fs| {
        let a = fs.one(now.clone()).attr.unwrap();
        assert_eq!((a.atime_ns, a.mtime_ns), (fs.now, fs.now));
        fs.fails(explicit.clone(), Code::Perm);
    });
}

#[test]
fn time_never_runs_backwards() {
    let mut fs = Fs::new();
    let before = fs.now;
    fs.now = T0 - 1_000_000_000_000;
    let f = fs.create(ROOT, "f");
    assert_eq!(fs.attr(f).btime_ns, before);
}

#[test]
fn writes_extend_and_take_set_id_bits() {
    let mut fs = Fs::new();
    let f = fs.as_user(5, |fs| fs.create(ROOT, "f"));
    let extend = |end| Op::Extend(pb::Extend { ino: f, end, holes: false });
    fs.one(chmod(f, 0o6755));
    assert_eq!(fs.one(extend(100)).attr.unwrap().size, 100);
    assert_eq!(mode(&mut fs, f), 0o6755, "root keeps them");
    let a = fs.as_user(6, |fs| fs.one(extend(50)).attr.unwrap());
    assert_eq!((a.size, a.mode & 0o7777, a.mtime_ns), (100, 0o755, fs.now));
    // If its group may not execute it, a caller outside of the group removes the bit nevertheless,
    // by the newer rules.
    for (rules, uid, left) in [(RULES, 6, 0o767), (RULES, 5, 0o2767), (0, 6, 0o2767)] {
        fs.rules = RULES;
        fs.one(chmod(f, 0o6767));
        fs.rules = rules;
        fs.as_user(uid, |fs| fs.one(extend(50)));
        assert_eq!(mode(&mut fs, f), left, "written by {uid} by rules {rules}");
        fs.one(chmod(f, 0o6767));
        fs.as_user(uid, |fs| fs.one(mk_size(f, 100)));
        assert_eq!(mode(&mut fs, f), left, "cut by {uid} by rules {rules}");
    }
    fs.fails(extend((1 << 50) + 1), Code::FBig);
    fs.fails(mk_size(f, (1 << 50) + 1), Code::FBig);
    fs.fails(Op::Extend(pb::Extend { ino: ROOT, end: 1, holes: false }), Code::IsDir);
    fs.fails(mk_size(ROOT, 0), Code::IsDir);
}

#[test]
fn a_shrink_leaves_a_cut_to_do() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    fs.one(mk_size(f, 1000));
    assert_eq!(fs.ns.backlog().trim_of(f), None, "growing cuts nothing");
    assert_eq!(fs.one(mk_size(f, 100)).attr.unwrap().size, 100);
    let first = fs.ns.backlog().trim_of(f).unwrap();
    assert_eq!(first.size, 100);
    fs.one(mk_size(f, 500));
    assert_eq!(fs.ns.backlog().trim_of(f), Some(first), "growing again changes no cut");
    fs.one(mk_size(f, 300));
    let second = fs.ns.backlog().trim_of(f).unwrap();
    assert_eq!(second.size, 100, "the lowest size ever shrunk to counts");
    assert!(second.number > first.number);
    let (ino, trim, layout) = fs.ns.backlog().trims(10).remove(0);
    assert_eq!((ino, trim), (f, second));
    assert_eq!(Some(layout), fs.record(f).unwrap().layout);
    fs.log(Command::TrimDone(pb::TrimDone { ino: f, number: first.number }));
    assert_eq!(fs.ns.backlog().trim_of(f), Some(second), "an overtaken cut does not count");
    fs.log(Command::TrimDone(pb::TrimDone { ino: f, number: second.number }));
    assert_eq!(fs.ns.backlog().trim_of(f), None);
    assert!(fs.ns.backlog().trims(10).is_empty());
    fs.as_user(5, |fs| fs.fails(mk_size(f, 0), Code::Access));
    // The owner may, whatever the mode says, as it may hold the file open for writing.
    let g = fs.as_user(5, |fs| fs.create(ROOT, "g"));
    fs.one(chmod(g, 0o444));
    fs.as_user(5, |fs| fs.one(mk_size(g, 1)));
}

#[test]
fn an_unlinked_file_waits_for_its_last_close_and_its_chunks_for_deletion() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    fs.one(Op::Setxattr(pb::SetXattr {
        ino: f,
        name: bytes("user.a"),
        value: bytes("1"),
        flags: 0,
    }));
    fs.one(mk_size(f, 10));
    fs.one(mk_size(f, 5));
    let layout = fs.record(f).unwrap().layout;
    fs.one(mk_unlink(ROOT, "f"));
    assert_eq!(fs.ns.backlog().orphans(10), vec![f]);
    fs.one(Op::Extend(pb::Extend { ino: f, end: 20, holes: false }));
    assert_eq!(fs.ns.header().inodes, 2);
    // Not an orphan: left alone.
    fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![ROOT, f, 999] }));
    assert_eq!(fs.ns.header().inodes, 1);
    fs.fails(Op::Getattr(pb::GetAttr { ino: f }), Code::NoEnt);
    let (number, gc) = fs.ns.backlog().gc_queue(10).remove(0);
    assert_eq!(gc, pb::GcRecord { ino: f, layout, size: 20 });
    fs.log(Command::GcDone(pb::GcDone { numbers: vec![number, 12345] }));
    assert!(
        fs.ns.backlog().gc_queue(10).is_empty()
            && fs.ns.backlog().orphans(10).is_empty()
            && fs.ns.backlog().trims(10).is_empty()
    );
}

#[test]
fn extended_attributes() {
    let mut fs = Fs::new();
    let f = fs.as_user(5, |fs| fs.create(ROOT, "f"));
    let setx = |name: &str, value: &str, flags| {
        Op::Setxattr(pb::SetXattr { ino: f, name: bytes(name), value: bytes(value), flags })
    };
    let getx = |name: &str| Op::Getxattr(pb::GetXattr { ino: f, name: bytes(name) });
    fs.as_user(5, |fs| {
        fs.fails(getx("user.a"), Code::NoData);
        fs.fails(setx("user.a", "1", 2), Code::NoData);
        fs.one(setx("user.a", "1", 1));
        fs.fails(setx("user.a", "2", 1), Code::Exist);
        fs.one(setx("user.a", "3", 2));
        fs.one(setx("user.empty", "", 0));
        assert_eq!(fs.one(getx("user.a")).data, bytes("3"));
        fs.fails(setx("user.a", "", 4), Code::Inval);
        fs.fails(setx("trusted.t", "", 0), Code::Perm);
        fs.fails(setx("security.s", "", 0), Code::Perm);
        fs.fails(setx("other.o", "", 0), Code::OpNotSupp);
        fs.fails(setx("user.", "", 0), Code::Inval);
        fs.fails(setx("", "", 0), Code::Range);
        fs.fails(setx(&format!("user.{}", "n".repeat(251)), "", 0), Code::Range);
        fs.fails(setx("user.big", &"v".repeat(65_537), 0), Code::TooBig);
        fs.one(setx("user.big", &"v".repeat(65_536), 0));
        fs.fails(setx("system.posix_acl_access", "acl", 0), Code::Inval);
        fs.fails(setx("system.posix_acl_default", "acl", 0), Code::Access);
        fs.fails(setx("system.other", "", 0), Code::OpNotSupp);
    });
    fs.one(setx("trusted.t", "x", 0));
    fs.one(setx("security.capability", "x", 0));
    let list = Op::Listxattr(pb::ListXattr { ino: f });
    assert_eq!(fs.one(list.clone()).names.len(), 5);
    fs.as_user(6, |fs| {
        assert_eq!(fs.one(list.clone()).names.len(), 4, "trusted names are not shown");
        fs.fails(getx("trusted.t"), Code::NoData);
        fs.one(getx("user.a"));
        fs.fails(setx("user.a", "", 0), Code::Access);
        fs.fails(setx("system.posix_acl_access", "", 0), Code::Perm);
        fs.fails(Op::Removexattr(pb::RemoveXattr { ino: f, name: bytes("user.a") }), Code::Access);
    });
    fs.one(Op::Removexattr(pb::RemoveXattr { ino: f, name: bytes("user.a") }));
    fs.fails(Op::Removexattr(pb::RemoveXattr { ino: f, name: bytes("user.a") }), Code::NoData);
    let link = Op::Symlink(pb::Symlink { parent: ROOT, name: bytes("s"), target: bytes("t") });
    let ino = fs.one(link).ino;
    fs.fails(
        Op::Setxattr(pb::SetXattr { ino, name: bytes("user.a"), ..Default::default() }),
        Code::Perm,
    );
    fs.fails(Op::Getxattr(pb::GetXattr { ino, name: bytes("user.a") }), Code::NoData);
}

#[test]
fn an_inode_has_so_many_extended_attributes() {
    let mut fs = Fs::new();
    let setx = |i: u32| {
        let name = Bytes::from(format!("user.{i}"));
        op(Op::Setxattr(pb::SetXattr { ino: ROOT, name, value: Bytes::new(), flags: 0 }))
    };
    for first in (0..1024).step_by(64) {
        assert!(
            fs.list((first..first + 64).map(setx).collect()).iter().all(|r| r.status.is_none())
        );
    }
    let r = fs.list(vec![setx(5), setx(1024)]);
    assert_eq!(code_of(r[1].status.as_ref()), Some(Code::NoSpc));
}

#[test]
fn names_of_extended_attributes_can_be_listed() {
    // With their NULs these are 256 bytes each; beside them there must be room for the names of
    // both ACLs.
    let setx = |i: u32, len: usize| {
        let name = Bytes::from(format!("user.{i:0>len$}", len = len - 5));
        Op::Setxattr(pb::SetXattr { ino: ROOT, name, value: Bytes::new(), flags: 0 })
    };
    let bytes = |fs: &mut Fs| {
        let names = fs.one(Op::Listxattr(pb::ListXattr { ino: ROOT })).names;
        names.iter().map(|n| n.len() + 1).sum::<usize>()
    };
    let mut fs = Fs::new();
    for i in 0..255 {
        fs.one(setx(i, 255));
    }
    fs.fails(setx(255, 255), Code::NoSpc);
    let left = (64 << 10)
        - 255 * 256
        - "system.posix_acl_access".len()
        - "system.posix_acl_default".len()
        - 2;
    fs.fails(setx(255, left), Code::NoSpc);
    fs.one(setx(255, left - 1));
    fs.one(setx(7, 255));
    fs.fails(setx(256, 8), Code::NoSpc);
    let name = super::bytes("system.posix_acl_default");
    let named = |tag: u8, id: u32| [&[tag, 0, 7, 0][..], &id.to_le_bytes()].concat();
    let none = u32::MAX;
    let list =
        [named(1, none), named(2, 9), named(4, none), named(16, none), named(32, none)].concat();
    let value = Bytes::from([&[2, 0, 0, 0][..], &list].concat());
    fs.one(Op::Setxattr(pb::SetXattr { ino: ROOT, name, value: value.clone(), flags: 0 }));
    let name = super::bytes("system.posix_acl_access");
    fs.one(Op::Setxattr(pb::SetXattr { ino: ROOT, name, value, flags: 0 }));
    assert_eq!(bytes(&mut fs), 64 << 10, "all that Linux can list");
    // Older entries are applied with their old effect.
    fs.rules = 0;
    fs.one(setx(256, 255));
    fs.rules = RULES;
    fs.fails(setx(257, 8), Code::NoSpc);
    for i in 0..2 {
        let Op::Setxattr(set) = setx(i, 255) else { unreachable!() };
        fs.one(Op::Removexattr(pb::RemoveXattr { ino: ROOT, name: set.name }));
    }
    fs.one(setx(257, 8));
}

#[test]
fn a_file_may_have_holes_from_when_somebody_said_so_until_it_is_empty() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    let set = |size, holes| {
        Op::Setattr(pb::SetAttr { ino: f, size: Some(size), holes, ..Default::default() })
    };
    let extend = |end, holes| Op::Extend(pb::Extend { ino: f, end, holes });
    for (op, sparse) in [
        (extend(100, false), false),
        (set(100, true), false),
        (set(50, true), false),
        (set(60, false), false),
        (set(61, true), true),
        (extend(200, false), true),
        (set(10, true), true),
        (set(0, true), false),
        (extend(10, false), false),
        (extend(0, true), true),
    ] {
        fs.one(op.clone());
        assert_eq!(fs.attr(f).sparse, sparse, "{op:?}");
    }
    assert_eq!(fs.ns.header().format_version, 3);
}
