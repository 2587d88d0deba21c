//! Lists of operations that are as much work as possible.

use std::{thread, time::Duration};

use bytes::Bytes;
use strake_proto::{Code, ids::ROOT_INO, pb};

use super::{Victim, hands::acl_of_groups, looks, looks_while};
use pb::op::Op;

fn name(s: &str) -> Bytes {
    s.to_owned().into()
}

fn user(uid: u32, groups: Vec<u32>) -> pb::Creds {
    pb::Creds { uid, gid: uid, groups }
}

fn mkdir(parent: u64, at: &str) -> Op {
    Op::Mkdir(pb::Mkdir { parent, name: name(at), mode: 0o777, umask: 0 })
}

/// The limit for a lookup during the attack. A busy machine is slower at everything, and a debug
/// build is slow at counting the cost of a list: 40 ms of work take a second there.
fn bound(before: Duration) -> Duration {
    before * 2 + Duration::from_millis(if cfg!(debug_assertions) { 3000 } else { 50 })
}

#[test]
fn lists_that_are_much_work_do_not_stop_others() {
    let Some(v) = Victim::new() else { return };
    let mount = v.mount();
    let mut s = v.session();
    let root = user(0, vec![]);
    let leader = s.at.clone();
    let before = looks(&mount, Duration::from_secs(3));

    // An ACL of 506 groups, checked 8,000 times for a caller with the largest possible number of
    // groups.
    let dir = s.run(&root, vec![mkdir(ROOT_INO, "acl")]).unwrap().ino;
    s.run(&root, vec![acl_of_groups(dir)]).unwrap();
    let lookup = Op::Lookup(pb::Lookup { parent: dir, name: name("k") });
    let changes: Vec<Op> =
        std::iter::once(mkdir(dir, "k")).chain(vec![lookup.clone(); 8000]).collect();
    let during = looks_while(&mount, || {
        let many = user(1000, (0..65_000).collect());
        assert_eq!(s.run(&many, changes.clone()).unwrap_err(), Code::TooBig);
        assert_eq!(
            s.run(&user(1000, vec![5; 1_000_000]), changes.clone()).unwrap_err(),
            Code::TooBig
        );
        s.run(&many, vec![mkdir(dir, "k")]).unwrap();
        assert_eq!(s.run(&many, vec![lookup.clone(); 8000]).unwrap_err(), Code::TooBig);
    });
    println!("groups and rights: looks took {during:?}, {before:?} before");
    assert!(during < bound(before), "{during:?}, {before:?} before");

    // Renames deep in the tree, one after the other and many in a list.
    let mut at = s.run(&root, vec![mkdir(ROOT_INO, "deep")]).unwrap().ino;
    for _ in 0..20 {
        let down = (0..500).map(|i| mkdir(if i == 0 { at } else { 0 }, "d")).collect();
        at = s.run(&root, down).unwrap().ino;
    }
    let [a, b] = ["a", "b"].map(|n| s.run(&root, vec![mkdir(at, n)]).unwrap().ino);
    s.run(&root, vec![mkdir(a, "v")]).unwrap();
    let rename = Op::Rename(pb::Rename {
        parent: a,
        name: name("v"),
        new_parent: b,
        new_name: name("v"),
        flags: 0,
    });
    let during = looks_while(&mount, || {
        for _ in 0..50 {
            assert_eq!(s.run(&root, vec![rename.clone()]).unwrap_err(), Code::TooBig);
        }
        assert_eq!(s.run(&root, vec![rename.clone(); 1000]).unwrap_err(), Code::TooBig);
    });
    println!("renames 10,000 deep: looks took {during:?}, {before:?} before");
    assert!(during < bound(before), "{during:?}, {before:?} before");

    // Many locks in one file.
    let file = Op::Create(pb::Create {
        parent: ROOT_INO,
        name: name("locks"),
        mode: 0o666,
        ..Default::default()
    });
    let ino = s.run(&root, vec![file]).unwrap().attr.unwrap().ino;
    let lock = |i: u64| {
        let span = Some(pb::LockSpan { start: 4 * i, end: 4 * i + 1, r#type: 2, pid: 1 });
        Op::SetLock(pb::SetLock { ino, owner: 7, span, ..Default::default() })
    };
    let during = looks_while(&mount, || {
        for at in (0..4000).step_by(1000) {
            s.run(&root, (at..at + 1000).map(lock).collect()).unwrap();
            thread::sleep(Duration::from_millis(100));
        }
    });
    println!("4,000 locks: looks took {during:?}, {before:?} before");
    assert!(during < bound(before), "{during:?}, {before:?} before");
    assert_eq!(v.leader().0, leader, "another server leads");
}
