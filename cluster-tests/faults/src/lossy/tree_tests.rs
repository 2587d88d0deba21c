use super::*;
use rand::{SeedableRng, rngs::StdRng};
use std::collections::BTreeSet;

fn file() -> Inode {
    Inode::new(Node::File(Content::default()), 0o644, 0, 0)
}

fn dir() -> Inode {
    Inode::new(Node::Dir(Dir::default()), 0o755, 0, 0)
}

impl Tree {
    fn file(&mut self, at: Ino, name: &str, text: &str) -> Ino {
        let ino = self.make(at, name.as_bytes(), file()).unwrap();
        self.content_mut(ino).unwrap().write(0, text.as_bytes());
        self.sync_file(ino).unwrap();
        ino
    }

    fn mv(&mut self, from: (Ino, &str), to: (Ino, &str)) {
        self.rename((from.0, from.1.as_bytes()), (to.0, to.1.as_bytes()), 0).unwrap();
    }

    fn rm(&mut self, at: Ino, name: &str) {
        self.remove(at, name.as_bytes(), false).unwrap();
    }

    /// All paths with their contents, in order: "a=text d/ d/b=text".
    fn shown(&self, at: Ino, path: &str) -> String {
        let one = |(name, ino): (Name, Ino)| {
            let path = format!("{path}{}", String::from_utf8(name).unwrap());
            match &self.inode(ino).unwrap().node {
                Node::File(c) => format!("{path}={} ", String::from_utf8(c.read(0, 100)).unwrap()),
                Node::Dir(_) => format!("{path}/ {}", self.shown(ino, &format!("{path}/"))),
                Node::Symlink(to) => format!("{path}@{} ", String::from_utf8(to.clone()).unwrap()),
            }
        };
        self.list(at).unwrap().into_iter().map(one).collect()
    }
}

/// All states that a power cut may leave after `make`.
fn after_cut(rule: Rule, make: impl Fn(&mut Tree)) -> BTreeSet<String> {
    let left = |seed| {
        let mut t = Tree::new(rule);
        make(&mut t);
        t.cut_power(&[ROOT], &mut StdRng::seed_from_u64(seed));
        assert_eq!(t.lookup(ROOT, b"a"), Err(libc::EIO));
        t.power_up();
        assert!(t.ops.is_empty());
        t.shown(ROOT, "").trim_end().to_string()
    };
    (0..300).map(left).collect()
}

fn set(of: &[&str]) -> BTreeSet<String> {
    of.iter().map(|s| (*s).to_string()).collect()
}

#[test]
fn a_name_is_durable_after_its_directory_is_synced_and_not_before() {
    let synced_file = |t: &mut Tree| {
        t.file(ROOT, "a", "1");
    };
    assert_eq!(after_cut(Rule::Posix, synced_file), set(&["", "a=1"]));
    assert_eq!(after_cut(Rule::Journal, synced_file), set(&["a=1"]));
    let synced_both = |t: &mut Tree| {
        t.file(ROOT, "a", "1");
        t.sync_dir(ROOT).unwrap();
    };
    assert_eq!(after_cut(Rule::Posix, synced_both), set(&["a=1"]));
}

#[test]
fn a_rename_over_a_file_is_done_or_not() {
    let replace = |sync_dir: bool| {
        move |t: &mut Tree| {
            t.file(ROOT, "a", "old");
            t.sync_dir(ROOT).unwrap();
            t.file(ROOT, "tmp", "new");
            t.mv((ROOT, "tmp"), (ROOT, "a"));
            if sync_dir {
                t.sync_dir(ROOT).unwrap();
            }
        }
    };
    assert_eq!(after_cut(Rule::Posix, replace(false)), set(&["a=old", "a=old tmp=new", "a=new"]));
    assert_eq!(after_cut(Rule::Posix, replace(true)), set(&["a=new"]));
}

#[test]
fn operations_on_other_names_are_lost_in_any_order() {
    let left = after_cut(Rule::Posix, |t| {
        t.file(ROOT, "old", "");
        t.sync_dir(ROOT).unwrap();
        t.file(ROOT, "new", "");
        t.rm(ROOT, "old");
    });
    assert_eq!(
        left,
        set(&["", "new=", "new= old=", "old="]),
        "the later unlink without the earlier create, too"
    );
}

#[test]
fn what_another_operation_needs_goes_with_it() {
    let left = after_cut(Rule::Posix, |t| {
        for d in ["d", "e"] {
            t.make(ROOT, d.as_bytes(), dir()).unwrap();
        }
        let (d, e) = (t.lookup(ROOT, b"d").unwrap(), t.lookup(ROOT, b"e").unwrap());
        t.sync_dir(ROOT).unwrap();
        t.file(d, "x", "1");
        t.mv((d, "x"), (e, "x"));
        t.mv((e, "x"), (e, "y"));
    });
    assert_eq!(
        left,
        set(&["d/ e/", "d/ d/x=1 e/", "d/ e/ e/x=1", "d/ e/ e/y=1"]),
        "one place at a time"
    );
    let left = after_cut(Rule::Posix, |t| {
        t.make(ROOT, b"d", dir()).unwrap();
        t.make(ROOT, b"e", dir()).unwrap();
        t.sync_dir(ROOT).unwrap();
        let (d, e) = (t.lookup(ROOT, b"d").unwrap(), t.lookup(ROOT, b"e").unwrap());
        t.file(d, "x", "1");
        t.mv((d, "x"), (e, "x"));
        t.sync_dir(e).unwrap();
    });
    assert_eq!(left, set(&["d/ e/ e/x=1"]), "the sync of one end makes both durable");
}

#[test]
fn the_entries_of_a_lost_directory_are_lost_though_they_were_synced() {
    let make = |sync_root: bool| {
        move |t: &mut Tree| {
            let d = t.make(ROOT, b"d", dir()).unwrap();
            t.file(d, "x", "1");
            t.sync_dir(d).unwrap();
            if sync_root {
                t.sync_dir(ROOT).unwrap();
            }
        }
    };
    assert_eq!(after_cut(Rule::Posix, make(false)), set(&["", "d/ d/x=1"]));
    assert_eq!(after_cut(Rule::Posix, make(true)), set(&["d/ d/x=1"]));
}

#[test]
fn the_power_of_one_directory_goes_alone() {
    let mut t = Tree::new(Rule::Posix);
    let d = t.make(ROOT, b"d", dir()).unwrap();
    let e = t.make(ROOT, b"e", dir()).unwrap();
    let (x, y) = (t.file(d, "x", "1"), t.file(e, "y", "1"));
    let mut seed = 0;
    let lost = loop {
        let lost = t.cut_power(&[d], &mut StdRng::seed_from_u64(seed));
        if lost.names > 0 {
            break lost;
        }
        t = Tree::new(Rule::Posix);
        t.make(ROOT, b"d", dir()).unwrap();
        t.make(ROOT, b"e", dir()).unwrap();
        assert_eq!((x, y), (t.file(d, "x", "1"), t.file(e, "y", "1")));
        seed += 1;
    };
    assert_eq!((lost.names, lost.names_unsynced), (1, 1));
    assert_eq!(t.content(x).err(), Some(libc::EIO));
    assert_eq!(t.lookup(ROOT, b"d"), Err(libc::EIO));
    assert_eq!(t.make(d, b"z", file()), Err(libc::EIO));
    assert_eq!(t.rename((e, b"y"), (d, b"y"), 0), Err(libc::EIO));
    assert_eq!(t.content(y).unwrap().read(0, 9), b"1");
    t.power_up();
    t.sweep(&HashSet::new());
    assert_eq!(t.shown(ROOT, ""), "d/ e/ e/y=1 ");
    assert_eq!(t.content(x).err(), Some(libc::ESTALE));
}

#[test]
fn refuses_what_a_file_system_refuses() {
    let mut t = Tree::new(Rule::Posix);
    let d = t.make(ROOT, b"d", dir()).unwrap();
    let a = t.file(d, "a", "1");
    let b = t.file(d, "b", "2");
    assert_eq!(t.make(d, b"a", file()), Err(libc::EEXIST));
    assert_eq!(t.remove(ROOT, b"d", true), Err(libc::ENOTEMPTY));
    assert_eq!(t.remove(ROOT, b"d", false), Err(libc::EISDIR));
    assert_eq!(t.remove(d, b"a", true), Err(libc::ENOTDIR));
    assert_eq!(t.rename((d, b"a"), (d, b"b"), libc::RENAME_NOREPLACE), Err(libc::EEXIST));
    assert_eq!(t.rename((d, b"a"), (ROOT, b"d"), 0), Err(libc::EISDIR));
    t.rename((d, b"a"), (d, b"b"), libc::RENAME_EXCHANGE).unwrap();
    assert_eq!((t.lookup(d, b"a"), t.lookup(d, b"b")), (Ok(b), Ok(a)));
    t.link(a, ROOT, b"c").unwrap();
    assert_eq!(t.inode(a).unwrap().nlink, 2);
    t.rm(d, "b");
    assert_eq!(t.inode(a).unwrap().nlink, 1);
    assert_eq!(t.shown(ROOT, ""), "c=1 d/ d/a=2 ");
}

#[test]
fn an_unlinked_file_lives_until_it_is_closed_and_its_unlink_durable() {
    let mut t = Tree::new(Rule::Posix);
    let a = t.file(ROOT, "a", "1");
    t.sync_dir(ROOT).unwrap();
    t.rm(ROOT, "a");
    t.sweep(&HashSet::new());
    assert!(t.inode(a).is_ok(), "a cut would bring it back");
    t.sync_dir(ROOT).unwrap();
    t.sweep(&HashSet::from([a]));
    assert!(t.inode(a).is_ok(), "it is open");
    t.sweep(&HashSet::new());
    assert_eq!(t.inode(a).err(), Some(libc::ESTALE));
}
