//! ACLs, removal of set-id bits and file capabilities, and files without a name.

use super::*;

const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";
const CAPABILITY: &str = "security.capability";

/// Owner, user 6, group, mask, others.
fn list(owner: u8, six: u8, group: u8, mask: u8, other: u8) -> Bytes {
    let mut b = vec![2, 0, 0, 0];
    for (tag, perm, id) in
        [(1, owner, -1), (2, six, 6), (4, group, -1), (16, mask, -1), (32, other, -1i32)]
    {
        b.extend([tag, 0, perm, 0]);
        b.extend(id.to_le_bytes());
    }
    b.into()
}

fn setx(ino: Ino, name: &str, value: Bytes) -> Op {
    Op::Setxattr(pb::SetXattr { ino, name: bytes(name), value, flags: 0 })
}
fn getx(ino: Ino, name: &str) -> Op {
    Op::Getxattr(pb::GetXattr { ino, name: bytes(name) })
}
fn delx(ino: Ino, name: &str) -> Op {
    Op::Removexattr(pb::RemoveXattr { ino, name: bytes(name) })
}
fn chmod(ino: Ino, mode: u32) -> Op {
    Op::Setattr(pb::SetAttr { ino, mode: Some(mode), ..Default::default() })
}
fn access(ino: Ino, mask: u32) -> Op {
    Op::Access(pb::Access { ino, mask })
}
fn names(fs: &mut Fs, ino: Ino) -> Vec<Bytes> {
    fs.one(Op::Listxattr(pb::ListXattr { ino })).names
}
fn tmpfile(parent: Ino, linkable: bool) -> Op {
    Op::Tmpfile(pb::Tmpfile { parent, mode: 0o666, umask: 0o027, flags: 2, linkable, layout: None })
}

#[test]
fn an_access_list_and_the_mode_are_one_thing() {
    let mut fs = Fs::new();
    let f = fs.as_user(5, |fs| fs.create(ROOT, "f"));
    fs.as_user(6, |fs| {
        fs.fails(access(f, 2), Code::Access);
        fs.fails(setx(f, ACCESS, list(6, 6, 4, 7, 0)), Code::Perm);
    });
    fs.as_user(5, |fs| fs.one(setx(f, ACCESS, list(6, 6, 4, 6, 0))));
    assert_eq!(fs.attr(f).mode & 0o7777, 0o660, "the group bits are the mask");
    fs.as_user(6, |fs| fs.one(access(f, 6)));
    fs.as_user(7, |fs| fs.fails(access(f, 4), Code::Access));
    fs.one(chmod(f, 0o644));
    assert_eq!(fs.one(getx(f, ACCESS)).data, list(6, 6, 4, 4, 4), "chmod sets mask and others");
    fs.as_user(6, |fs| fs.fails(access(f, 2), Code::Access));
    assert_eq!(names(&mut fs, f), vec![bytes(ACCESS)]);
    fs.one(delx(f, ACCESS));
    fs.one(delx(f, ACCESS));
    fs.fails(getx(f, ACCESS), Code::NoData);
    assert_eq!((fs.attr(f).mode & 0o7777, names(&mut fs, f).len()), (0o644, 0));
}

#[test]
fn a_list_that_says_no_more_than_the_mode_is_not_kept() {
    let mut fs = Fs::new();
    let f = fs.as_user(5, |fs| fs.create(ROOT, "f"));
    fs.one(Op::Setattr(pb::SetAttr { ino: f, gid: Some(77), ..Default::default() }));
    fs.one(chmod(f, 0o2755));
    let small = |owner: u8, group: u8, other: u8| {
        let none = [255u8; 4];
        let e = |tag, perm| [&[tag, 0u8, perm, 0][..], &none].concat();
        Bytes::from([vec![2, 0, 0, 0], e(1, owner), e(4, group), e(32, other)].concat())
    };
    fs.one(setx(f, ACCESS, small(7, 5, 1)));
    assert_eq!(fs.attr(f).mode & 0o7777, 0o2751);
    fs.as_user(5, |fs| fs.one(setx(f, ACCESS, small(6, 4, 0))));
    assert_eq!(
        fs.attr(f).mode & 0o7777,
        0o640,
        "set-group-id goes: its owner is no member of group 77"
    );
    fs.fails(getx(f, ACCESS), Code::NoData);
}

#[test]
fn a_default_list_replaces_the_umask() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let create = |parent, name: &str, mode, umask| {
        Op::Create(pb::Create {
            parent,
            name: bytes(name),
            mode,
            umask,
            flags: 2,
            ..Default::default()
        })
    };
    assert_eq!(fs.one(create(d, "a", 0o666, 0o027)).attr.unwrap().mode & 0o7777, 0o640);
    fs.one(setx(d, DEFAULT, list(7, 6, 5, 7, 4)));
    let a = fs.one(create(d, "b", 0o666, 0o077)).attr.unwrap();
    assert_eq!(a.mode & 0o7777, 0o664);
    assert_eq!(fs.one(getx(a.ino, ACCESS)).data, list(6, 6, 5, 6, 4));
    fs.fails(getx(a.ino, DEFAULT), Code::NoData);
    let sub =
        fs.one(Op::Mkdir(pb::Mkdir { parent: d, name: bytes("s"), mode: 0o750, umask: 0o777 })).ino;
    assert_eq!(fs.attr(sub).mode & 0o7777, 0o750);
    assert_eq!(fs.one(getx(sub, DEFAULT)).data, list(7, 6, 5, 7, 4));
    assert_eq!(fs.one(getx(sub, ACCESS)).data, list(7, 6, 5, 5, 0));
    let link = fs
        .one(Op::Symlink(pb::Symlink { parent: d, name: bytes("l"), target: bytes("t") }))
        .attr
        .unwrap();
    assert_eq!((link.mode & 0o777, names(&mut fs, link.ino).len()), (0o777, 0));
    fs.fails(setx(link.ino, ACCESS, list(7, 7, 7, 7, 7)), Code::OpNotSupp);
    fs.fails(setx(a.ino, DEFAULT, list(7, 7, 7, 7, 7)), Code::Access);
    // An empty list is none.
    fs.one(setx(d, DEFAULT, Bytes::from_static(&[2, 0, 0, 0])));
    fs.fails(getx(d, DEFAULT), Code::NoData);
}

#[test]
fn directories_are_searched_and_changed_by_list() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    fs.one(chmod(d, 0o700));
    fs.create(d, "f");
    fs.as_user(6, |fs| assert_eq!(fs.lookup(d, "f"), Err(Code::Access)));
    fs.one(setx(d, ACCESS, list(7, 5, 0, 7, 0)));
    fs.as_user(6, |fs| {
        fs.lookup(d, "f").unwrap();
        fs.fails(mk_unlink(d, "f"), Code::Access);
    });
    fs.one(setx(d, ACCESS, list(7, 7, 0, 7, 0)));
    fs.as_user(6, |fs| fs.one(mk_unlink(d, "f")));
}

#[test]
fn writes_cuts_and_chowns_take_file_capabilities() {
    let mut fs = Fs::new();
    let f = fs.as_user(5, |fs| fs.create(ROOT, "f"));
    let changes = [
        Op::Extend(pb::Extend { ino: f, end: 9, holes: false }),
        mk_size(f, 3),
        Op::Setattr(pb::SetAttr { ino: f, gid: Some(9), ..Default::default() }),
        Op::Setattr(pb::SetAttr { ino: f, drop_privileges: true, ..Default::default() }),
    ];
    for change in changes {
        fs.one(setx(f, CAPABILITY, bytes("x")));
        fs.one(chmod(f, 0o4755));
        fs.one(change.clone());
        fs.fails(getx(f, CAPABILITY), Code::NoData);
        let keeps = matches!(&change, Op::Extend(_))
            || matches!(&change, Op::Setattr(s) if s.size.is_some());
        assert_eq!(
            fs.attr(f).mode & 0o4000 != 0,
            keeps,
            "root's writes leave set-id bits: {change:?}"
        );
    }
    fs.one(setx(f, CAPABILITY, bytes("x")));
    fs.one(chmod(f, 0o6755));
    let strip = Op::Setattr(pb::SetAttr { ino: f, drop_privileges: true, ..Default::default() });
    fs.as_user(7, |fs| {
        fs.fails(delx(f, CAPABILITY), Code::Perm);
        fs.fails(chmod(f, 0o755), Code::Perm);
        fs.one(strip.clone());
    });
    assert_eq!(fs.attr(f).mode & 0o7777, 0o6755, "not by a stranger");
    fs.one(chmod(f, 0o6757));
    fs.as_user(7, |fs| {
        fs.one(delx(f, CAPABILITY));
        fs.fails(chmod(f, 0o747), Code::Perm);
        fs.one(chmod(f, 0o757));
    });
    assert_eq!(fs.attr(f).mode & 0o7777, 0o757, "a writer's kernel may take set-id bits off");
}

#[test]
fn a_file_without_a_name_gets_one_or_goes() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let before = fs.attr(d);
    let r = fs.one(tmpfile(d, true));
    let (f, a) = (r.ino, r.attr.unwrap());
    assert_eq!((a.nlink, a.mode, r.created, r.writer > 0), (0, inode::S_IFREG | 0o640, true, true));
    assert_eq!(fs.attr(d), before, "its directory does not change");
    assert_eq!(fs.ns.backlog().orphans(10), vec![f]);
    assert_eq!(fs.one(mk_link(f, d, "named")).attr.unwrap().nlink, 1);
    assert!(fs.ns.backlog().orphans(10).is_empty());
    assert_eq!(fs.lookup(d, "named"), Ok(f));
    fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![f] }));
    fs.one(mk_unlink(d, "named"));
    fs.fails(mk_link(f, d, "again"), Code::NoEnt);

    let g = fs.one(tmpfile(d, false)).ino;
    fs.fails(mk_link(g, d, "never"), Code::NoEnt);
    fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![f, g] }));
    assert!(fs.record(f).is_none() && fs.record(g).is_none());
    assert_eq!(fs.ns.backlog().gc_queue(10).len(), 2);
    fs.as_user(5, |fs| fs.fails(tmpfile(d, true), Code::Access));
    let named = fs.create(d, "f");
    fs.fails(tmpfile(named, true), Code::NotDir);
}
