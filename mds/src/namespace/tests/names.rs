//! Names: making, finding, listing, removing and renaming them.

use strake_proto::layout::splitmix64;

use super::*;

#[test]
fn a_tree_is_made_found_listed_and_removed() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let f = fs.create(d, "f");
    assert_eq!(fs.lookup(d, "f"), Ok(f));
    assert_eq!(fs.lookup(d, ".."), Ok(ROOT));
    assert_eq!(fs.lookup(d, "."), Ok(d));
    assert_eq!(fs.lookup(ROOT, ".."), Ok(ROOT));
    assert_eq!(fs.lookup(d, "g"), Err(Code::NoEnt));
    assert_eq!(fs.lookup(f, "g"), Err(Code::NotDir));
    assert_eq!(fs.path(f).unwrap(), "/d/f");
    assert_eq!(fs.path(ROOT).unwrap(), "/");
    assert_eq!(fs.attr(ROOT).nlink, 3);
    fs.fails(mk_create(d, "f"), Code::Exist);
    fs.fails(mk_rmdir(ROOT, "d"), Code::NotEmpty);
    fs.fails(mk_unlink(ROOT, "d"), Code::IsDir);
    fs.fails(mk_rmdir(d, "f"), Code::NotDir);
    fs.one(mk_unlink(d, "f"));
    fs.fails(mk_unlink(d, "f"), Code::NoEnt);
    fs.one(mk_rmdir(ROOT, "d"));
    assert_eq!(fs.attr(ROOT).nlink, 2);
    fs.fails(mk_create(d, "f"), Code::NoEnt);
    fs.fails(Op::Readdir(pb::Readdir { dir: d, ..Default::default() }), Code::NoEnt);
}

#[test]
fn names_have_limits() {
    let mut fs = Fs::new();
    fs.create(ROOT, &"n".repeat(255));
    fs.fails(mk_create(ROOT, &"n".repeat(256)), Code::NameTooLong);
    for (name, code) in
        [("", Code::NoEnt), ("a/b", Code::Inval), ("a\0", Code::Inval), (".", Code::IsDir)]
    {
        fs.fails(mk_create(ROOT, name), code);
    }
    fs.fails(
        Op::Mkdir(pb::Mkdir { parent: ROOT, name: bytes(".."), mode: 0, umask: 0 }),
        Code::Exist,
    );
    fs.fails(mk_rmdir(ROOT, "."), Code::Inval);
    fs.fails(mk_rename(ROOT, ".", ROOT, "x", 0), Code::Busy);
    let link = |target: &str| {
        Op::Symlink(pb::Symlink { parent: ROOT, name: bytes("s"), target: bytes(target) })
    };
    fs.fails(link(""), Code::NoEnt);
    fs.fails(link(&"t".repeat(4096)), Code::NameTooLong);
    let s = fs.one(link(&"t".repeat(4095))).ino;
    assert_eq!(fs.one(Op::Readlink(pb::Readlink { ino: s })).data.len(), 4095);
    assert_eq!(fs.attr(s).size, 4095);
    fs.fails(Op::Readlink(pb::Readlink { ino: ROOT }), Code::Inval);
    fs.fails(Op::Open(pb::Open { ino: s, flags: 0 }), Code::Loop);
}

#[test]
fn parents_get_new_times_and_changes() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let ops = [
        mk_create(d, "a"),
        mk_rename(d, "a", d, "b", 0),
        mk_unlink(d, "b"),
        Op::Mkdir(pb::Mkdir { parent: d, name: bytes("e"), mode: 0, umask: 0 }),
        mk_rmdir(d, "e"),
    ];
    for o in ops {
        let before = fs.attr(d);
        fs.one(o);
        let after = fs.attr(d);
        assert_eq!((after.mtime_ns, after.ctime_ns), (fs.now, fs.now));
        assert!(after.change > before.change);
    }
}

#[test]
fn create_opens_what_exists_unless_exclusive() {
    let mut fs = Fs::new();
    let c = |exclusive, flags| {
        Op::Create(pb::Create {
            parent: ROOT,
            name: bytes("f"),
            mode: 0o400,
            exclusive,
            layout: None,
            flags,
            umask: 0,
        })
    };
    fs.as_user(5, |fs| {
        let first = fs.one(c(false, 2));
        assert!(
            first.created && first.layout.is_some(),
            "opened for writing although its mode forbids it"
        );
        let again = fs.one(c(false, 0));
        assert!(!again.created && again.ino == first.ino && again.layout == first.layout);
        fs.fails(c(false, 2), Code::Access);
        fs.fails(c(true, 0), Code::Exist);
    });
    fs.mkdir(ROOT, "d");
    fs.fails(
        Op::Create(pb::Create {
            parent: ROOT,
            name: bytes("d"),
            mode: 0o600,
            ..Default::default()
        }),
        Code::IsDir,
    );
}

#[test]
fn mknod_makes_what_it_may() {
    let mut fs = Fs::new();
    let node = |name: &str, mode, rdev| {
        Op::Mknod(pb::Mknod { parent: ROOT, name: bytes(name), mode, rdev, umask: 0 })
    };
    assert!(fs.one(node("reg", 0o644, 9)).layout.is_some());
    let a = fs.one(node("blk", inode::S_IFBLK | 0o600, 0x801)).attr.unwrap();
    assert_eq!((a.mode, a.rdev), (inode::S_IFBLK | 0o600, 0x801));
    fs.fails(node("x", inode::S_IFDIR, 0), Code::Perm);
    fs.fails(node("x", inode::S_IFLNK, 0), Code::Inval);
    fs.as_user(3, |fs| {
        fs.fails(node("x", inode::S_IFCHR, 0x103), Code::Perm);
        fs.one(node("fifo", inode::S_IFIFO | 0o644, 0));
        fs.one(node("sock", inode::S_IFSOCK | 0o644, 0));
    });
    // Only files leave something to clean up.
    fs.one(mk_unlink(ROOT, "fifo"));
    assert!(fs.ns.backlog().orphans(9).is_empty() && fs.ns.backlog().gc_queue(9).is_empty());
}

#[test]
fn hard_links_count_and_are_found_again() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let f = fs.create(ROOT, "f");
    assert_eq!(fs.one(mk_link(f, d, "g")).attr.unwrap().nlink, 2);
    fs.fails(mk_link(f, d, "g"), Code::Exist);
    fs.fails(mk_link(d, ROOT, "e"), Code::Perm);
    assert_eq!(fs.one(mk_unlink(ROOT, "f")).attr.unwrap().nlink, 1);
    assert_eq!(fs.path(f).unwrap(), "/d/g");
    fs.one(mk_unlink(d, "g"));
    fs.fails(mk_link(f, d, "h"), Code::NoEnt);
    assert_eq!(fs.attr(f).nlink, 0, "an orphan can be looked at");
    assert_eq!(fs.path(f), Err(Code::NoEnt));
}

#[test]
fn more_links_than_are_kept() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "0");
    for i in 1..40 {
        fs.one(mk_link(f, ROOT, &i.to_string()));
    }
    assert_eq!(fs.record(f).unwrap().links.len(), 32);
    for i in 0..39 {
        fs.one(mk_unlink(ROOT, &i.to_string()));
    }
    assert_eq!(fs.attr(f).nlink, 1);
    assert_eq!(fs.path(f), Err(Code::NoEnt), "its last name was never on record");
    fs.one(mk_rename(ROOT, "39", ROOT, "x", 0));
    assert_eq!(fs.path(f).unwrap(), "/x");
}

#[test]
fn rename_moves_replaces_and_exchanges() {
    let mut fs = Fs::new();
    let (a, b) = (fs.mkdir(ROOT, "a"), fs.mkdir(ROOT, "b"));
    let f = fs.create(a, "f");
    let g = fs.create(b, "g");
    fs.fails(mk_rename(a, "x", b, "y", 0), Code::NoEnt);
    fs.fails(mk_rename(a, "f", b, "g", 1), Code::Exist);
    fs.fails(mk_rename(a, "f", b, "x", 2), Code::NoEnt);
    fs.fails(mk_rename(a, "f", b, "x", 3), Code::Inval);
    for flags in [6, 7, 8] {
        fs.fails(mk_rename(a, "f", b, "x", flags), Code::Inval);
    }
    fs.fails(mk_rename(a, "f", ROOT, "b", 0), Code::IsDir);
    fs.fails(mk_rename(ROOT, "a", b, "g", 0), Code::NotDir);
    fs.fails(mk_rename(ROOT, "a", ROOT, "b", 0), Code::NotEmpty);
    fs.one(mk_rename(a, "f", b, "g", 2));
    assert_eq!((fs.lookup(a, "f"), fs.lookup(b, "g")), (Ok(g), Ok(f)));
    fs.one(mk_rename(a, "f", b, "g", 0));
    assert_eq!((fs.lookup(a, "f"), fs.lookup(b, "g")), (Err(Code::NoEnt), Ok(g)));
    assert_eq!(fs.ns.backlog().orphans(9), vec![f]);
    // A directory in place of an empty one, and into another parent.
    fs.one(mk_rename(ROOT, "b", ROOT, "a", 0));
    let e = fs.mkdir(ROOT, "e");
    fs.one(mk_rename(ROOT, "a", e, "deep", 1));
    assert_eq!(fs.path(g).unwrap(), "/e/deep/g");
    assert_eq!(fs.lookup(b, ".."), Ok(e));
    assert_eq!((fs.attr(ROOT).nlink, fs.attr(e).nlink), (3, 3));
    // A directory and a file change places.
    fs.create(ROOT, "file");
    fs.one(mk_rename(ROOT, "file", e, "deep", 2));
    assert_eq!((fs.attr(ROOT).nlink, fs.attr(e).nlink), (4, 2));
    assert_eq!(fs.path(g).unwrap(), "/file/g");
}

#[test]
fn a_whiteout_takes_the_place_of_what_moved() {
    let mut fs = Fs::new();
    let (a, b) = (fs.mkdir(ROOT, "a"), fs.mkdir(ROOT, "b"));
    let (f, g) = (fs.create(a, "f"), fs.create(b, "g"));
    let d = fs.mkdir(a, "d");
    let whiteout = |fs: &mut Fs, name: &str| {
        let ino = fs.lookup(a, name).unwrap();
        let at = fs.attr(ino);
        (at.mode, at.rdev, at.nlink, at.uid, fs.path(ino).unwrap())
    };
    fs.fails(mk_rename(a, "f", b, "g", 5), Code::Exist);
    fs.one(mk_rename(a, "f", b, "g", 4));
    assert_eq!((fs.lookup(b, "g"), fs.ns.backlog().orphans(9)), (Ok(f), vec![g]));
    assert_eq!(whiteout(&mut fs, "f"), (inode::S_IFCHR, 0, 1, 0, "/a/f".into()));
    fs.one(mk_rename(a, "d", b, "d", 5));
    assert_eq!((fs.lookup(b, "d"), fs.lookup(d, "..")), (Ok(d), Ok(b)));
    assert_eq!(whiteout(&mut fs, "d"), (inode::S_IFCHR, 0, 1, 0, "/a/d".into()));
    assert_eq!((fs.attr(a).nlink, fs.attr(b).nlink, fs.names(a, 9).len()), (2, 3, 2));
    // In its place again, over the whiteout; and within one directory.
    fs.one(mk_rename(b, "g", a, "f", 0));
    fs.one(mk_rename(a, "f", a, "h", 4));
    assert_eq!((fs.lookup(a, "h"), fs.names(a, 9).len()), (Ok(f), 3));
    // A caller that may make names may make this one.
    let open = fs
        .one(Op::Mkdir(pb::Mkdir { parent: ROOT, name: bytes("open"), mode: 0o777, umask: 0 }))
        .ino;
    fs.one(Op::Setattr(pb::SetAttr { ino: open, mode: Some(0o777), ..Default::default() }));
    fs.as_user(7, |fs| {
        fs.create(open, "f");
        fs.one(mk_rename(open, "f", open, "g", 4));
        let ino = fs.lookup(open, "f").unwrap();
        assert_eq!(fs.attr(ino).uid, 7);
        fs.fails(mk_rename(a, "h", open, "h", 4), Code::Access);
    });
    // Renaming a file to another name of it does nothing.
    fs.one(mk_link(f, a, "k"));
    fs.one(mk_rename(a, "h", a, "k", 4));
    assert_eq!(fs.lookup(a, "h"), Ok(f));
    // An entry from before this flag is refused, as it was then.
    fs.rules = 0;
    fs.fails(mk_rename(a, "h", b, "x", 4), Code::Inval);
}

#[test]
fn a_directory_cannot_move_into_itself() {
    let mut fs = Fs::new();
    let a = fs.mkdir(ROOT, "a");
    let b = fs.mkdir(a, "b");
    let c = fs.mkdir(b, "c");
    fs.fails(mk_rename(ROOT, "a", c, "x", 0), Code::Inval);
    fs.fails(mk_rename(ROOT, "a", a, "x", 0), Code::Inval);
    fs.fails(mk_rename(ROOT, "a", b, "c", 2), Code::Inval);
    fs.fails(mk_rename(b, "c", ROOT, "a", 2), Code::Inval);
    fs.fails(mk_rename(b, "c", ROOT, "a", 0), Code::NotEmpty);
    fs.one(mk_rename(ROOT, "a", ROOT, "a", 0));
}

#[test]
fn every_operation_checks_the_names_that_it_is_given() {
    let mut fs = Fs::new();
    let (f, d) = (fs.create(ROOT, "f"), fs.mkdir(ROOT, "d"));
    let long = "n".repeat(256);
    let huge = "n".repeat(1 << 20);
    let wrong = [("a/b", Code::Inval), ("/", Code::Inval), ("a\0", Code::Inval)];
    let too_long = [&long[..], &huge].map(|name| (name, Code::NameTooLong));
    for (bad, code) in wrong.into_iter().chain(too_long) {
        let name = bytes(bad);
        let ops = [
            mk_create(ROOT, bad),
            Op::Mkdir(pb::Mkdir { parent: ROOT, name: name.clone(), mode: 0o755, umask: 0 }),
            Op::Mknod(pb::Mknod {
                parent: ROOT,
                name: name.clone(),
                mode: 0o100_644,
                ..Default::default()
            }),
            Op::Symlink(pb::Symlink { parent: ROOT, name, target: bytes("t") }),
            mk_link(f, ROOT, bad),
            mk_rename(ROOT, "f", d, bad, 0),
        ];
        for op in ops {
            fs.fails(op, code);
        }
        // What cannot be there is not there, or is refused as a name.
        let no_name =
            |r: Result<pb::OpResult, Code>| r.is_err_and(|c| c == code || c == Code::NoEnt);
        for op in [
            Op::Lookup(pb::Lookup { parent: ROOT, name: bytes(bad) }),
            mk_unlink(ROOT, bad),
            mk_rmdir(ROOT, bad),
            mk_rename(ROOT, bad, d, "x", 0),
        ] {
            assert!(no_name(fs.try_one(op.clone())), "{op:?}");
        }
    }
    assert_eq!(fs.names(ROOT, 10).len(), 2);
    fsck(&fs);
}

/// Directories are moved below each other, exchanged and replaced at random: the tree stays one.
#[test]
fn renames_never_make_a_loop() {
    let mut fs = Fs::new();
    let mut seed = 7;
    let mut dirs = vec![(ROOT, String::new(), ROOT)];
    for n in 0..12 {
        let name = format!("d{n}");
        let ino = fs.mkdir(ROOT, &name);
        dirs.push((ROOT, name, ino));
    }
    let (mut moved, mut refused) = (0, 0);
    for round in 0..3000 {
        let mut pick = |n: usize| splitmix64(&mut seed) as usize % n;
        let (from, to, other) = (1 + pick(12), pick(13), 1 + pick(12));
        let (parent, name, ino) = dirs[from].clone();
        let exchange = pick(3) == 0;
        let result = if exchange {
            let (parent2, name2, _) = dirs[other].clone();
            let r = fs.try_one(mk_rename(parent, &name, parent2, &name2, 2));
            if r.is_ok() {
                (dirs[from].0, dirs[from].1) = (parent2, name2);
                (dirs[other].0, dirs[other].1) = (parent, name);
            }
            r
        } else {
            let new = format!("r{round}");
            let r = fs.try_one(mk_rename(parent, &name, dirs[to].2, &new, 0));
            if r.is_ok() {
                (dirs[from].0, dirs[from].1) = (dirs[to].2, new);
            }
            r
        };
        match result {
            Ok(_) => moved += 1,
            Err(code) => {
                assert_eq!(code, Code::Inval);
                refused += 1;
            }
        }
        assert!(fs.path(ino).is_ok(), "after round {round}");
    }
    assert!(moved > 500 && refused > 50, "{moved} moved, {refused} refused");
    for (_, _, ino) in dirs {
        fs.path(ino).unwrap();
    }
    fsck(&fs);
}

#[test]
fn renaming_one_file_onto_another_name_of_it_does_nothing() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    fs.one(mk_link(f, ROOT, "g"));
    let before = fs.attr(f);
    assert_eq!(fs.one(mk_rename(ROOT, "f", ROOT, "g", 0)).ino, f);
    assert_eq!(fs.attr(f), before);
    assert_eq!(fs.names(ROOT, 10).len(), 2);
}

#[test]
fn permissions_are_those_of_linux() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let f = fs.create(d, "f");
    fs.mkdir(d, "sub");
    fs.as_user(5, |fs| {
        fs.fails(mk_create(d, "f"), Code::Exist);
        fs.fails(mk_create(d, "g"), Code::Access);
        fs.fails(mk_unlink(d, "f"), Code::Access);
        fs.fails(mk_rename(d, "f", ROOT, "f", 0), Code::Access);
        fs.fails(Op::Open(pb::Open { ino: f, flags: 1 }), Code::Access);
        fs.one(Op::Open(pb::Open { ino: f, flags: 0 }));
        fs.fails(Op::Access(pb::Access { ino: f, mask: 2 }), Code::Access);
        fs.fails(Op::Open(pb::Open { ino: d, flags: 2 }), Code::IsDir);
    });
    // The root is sticky: names of others stay.
    fs.as_user(6, |fs| fs.create(ROOT, "mine"));
    fs.as_user(5, |fs| {
        fs.fails(mk_unlink(ROOT, "mine"), Code::Perm);
        fs.fails(mk_rename(ROOT, "mine", ROOT, "yours", 0), Code::Perm);
        fs.create(ROOT, "other");
        fs.fails(mk_rename(ROOT, "other", ROOT, "mine", 0), Code::Perm);
    });
    fs.as_user(6, |fs| fs.one(mk_unlink(ROOT, "mine")));
    // A directory one may not write cannot get a new "..".
    fs.one(Op::Setattr(pb::SetAttr { ino: d, mode: Some(0o777), ..Default::default() }));
    fs.as_user(5, |fs| {
        fs.fails(mk_rename(d, "sub", ROOT, "sub", 0), Code::Access);
        fs.one(mk_rename(d, "sub", d, "sub2", 0));
    });
    // Without search permission nothing below is found.
    fs.one(Op::Setattr(pb::SetAttr { ino: d, mode: Some(0o600), ..Default::default() }));
    fs.as_user(5, |fs| {
        assert_eq!(fs.lookup(d, "f"), Err(Code::Access));
        assert_eq!(fs.path(f), Err(Code::Access));
        fs.fails(Op::Readdir(pb::Readdir { dir: d, ..Default::default() }), Code::Access);
    });
}

#[test]
fn listings_go_on_where_they_stopped_whatever_others_do() {
    for mask in [u64::MAX, 1, 0] {
        let mut fs = Fs::with_mask(mask);
        let d = fs.mkdir(ROOT, "d");
        for i in 0..100 {
            fs.create(d, &format!("f{i}"));
        }
        let mut all: Vec<_> = (0..100).map(|i| format!("f{i}")).collect();
        all.sort();
        for limit in [1, 3, 50, 1000] {
            let mut seen = fs.names(d, limit);
            seen.sort();
            assert_eq!(seen, all, "mask {mask:#x} limit {limit}");
        }
        // Names come and go between pages; those that stay are listed exactly once.
        let (mut cookie, mut seen, mut n) = (0, Vec::new(), 0);
        loop {
            let r = fs.one(Op::Readdir(pb::Readdir { dir: d, cookie, limit: 7, attrs: false }));
            seen.extend(r.entries.iter().map(|e| String::from_utf8(e.name.to_vec()).unwrap()));
            if r.end {
                break;
            }
            cookie = r.entries.last().unwrap().cookie;
            for k in 0..4 {
                fs.try_one(mk_unlink(d, &format!("f{}", 3 * (4 * n + k)))).ok();
                fs.create(d, &format!("new{}", 4 * n + k));
            }
            n += 1;
        }
        for stays in all.iter().filter(|f| f[1..].parse::<u32>().unwrap() % 3 != 0) {
            assert_eq!(seen.iter().filter(|s| *s == stays).count(), 1, "mask {mask:#x} {stays}");
        }
        let once: BTreeSet<_> = seen.iter().collect();
        assert_eq!(once.len(), seen.len());
    }
}

#[test]
fn a_full_run_of_collisions_is_refused_and_leaves_no_marks() {
    let mut fs = Fs::with_mask(0);
    for i in 0..256 {
        fs.create(ROOT, &i.to_string());
    }
    fs.fails(mk_create(ROOT, "one more"), Code::NoSpc);
    fs.one(mk_unlink(ROOT, "17"));
    let f = fs.create(ROOT, "one more");
    assert_eq!(fs.lookup(ROOT, "one more"), Ok(f));
    for i in (0..256).filter(|i| *i != 17) {
        fs.one(mk_unlink(ROOT, &i.to_string()));
    }
    fs.one(mk_rename(ROOT, "one more", ROOT, "last", 0));
    fs.one(mk_unlink(ROOT, "last"));
    assert_eq!(fs.store.prefix(&[keys::DENTRY]).count(), 0, "removed names left marks");
}

#[test]
fn lists_run_in_order_and_all_or_nothing() {
    let mut fs = Fs::new();
    let lookup = |name: &str| op(Op::Lookup(pb::Lookup { parent: ROOT, name: bytes(name) }));
    let before = fs.ns.header();
    let r = fs.list(vec![
        op(Op::Mkdir(pb::Mkdir { parent: ROOT, name: bytes("d"), mode: 0o755, umask: 0 })),
        op(mk_create(0, "f")),
        op(Op::Extend(pb::Extend { ino: 0, end: 10, holes: false })),
        op(Op::Getattr(pb::GetAttr { ino: 0 })),
        lookup("d"),
        op(Op::Readdir(pb::Readdir { dir: 0, ..Default::default() })),
        op(Op::Rmdir(pb::Rmdir { parent: ROOT, name: bytes("d") })),
    ]);
    assert_eq!(r.len(), 7);
    assert_eq!(r[3].attr.unwrap().size, 10);
    assert_eq!(r[5].entries.len(), 1);
    assert_eq!(code_of(r[6].status.as_ref()), Some(Code::NotEmpty));
    assert_eq!(fs.lookup(ROOT, "d"), Err(Code::NoEnt), "the failure undid all");
    let after = fs.ns.header();
    assert_eq!((after.next_ino, after.inodes), (before.next_ino, before.inodes));
    let r = fs.list(vec![lookup("none"), lookup("none")]);
    assert_eq!(r.len(), 1);
    let r = fs.ns.read(0, &creds(0), &[op(mk_create(ROOT, "f"))]);
    assert_eq!(code_of(r.results[0].status.as_ref()), Some(Code::Inval));
    assert!(
        code_of(fs.ns.read(0, &creds(0), &[pb::Op { op: None }]).results[0].status.as_ref())
            .is_some()
    );
}

#[test]
fn replies_have_a_size_limit() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    for i in 0..20 {
        fs.create(d, &format!("{i}-{}", "n".repeat(240)));
    }
    let list =
        |n| vec![op(Op::Readdir(pb::Readdir { dir: d, cookie: 0, limit: 0, attrs: true })); n];
    assert!(fs.list(list(100)).iter().all(|r| r.status.is_none() && r.entries.len() == 20));
    let results = fs.list(list(1000));
    let size: usize = results.iter().map(Message::encoded_len).sum();
    assert!(size < 4 << 20, "{size}");
    assert_eq!(code_of(results.last().unwrap().status.as_ref()), Some(Code::TooBig));
}
