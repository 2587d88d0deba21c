//! The cost limit of one list: counted by what it reads and writes, equal on every member, and by
//! the rules that it was logged with.

use super::*;

fn lookup(parent: Ino, name: &str) -> pb::Op {
    op(Op::Lookup(pb::Lookup { parent, name: bytes(name) }))
}

fn mv(parent: Ino, name: &str, to: Ino, new: &str) -> Op {
    mk_rename(parent, name, to, new, 0)
}

/// An access list that names 506 groups.
fn long_acl() -> Bytes {
    let entry = |tag: u16, id: u32| {
        [&tag.to_le_bytes()[..], &7u16.to_le_bytes(), &id.to_le_bytes()].concat()
    };
    let mut all = vec![2, 0, 0, 0];
    all.extend([entry(1, u32::MAX), entry(4, u32::MAX)].concat());
    (0..506).for_each(|i| all.extend(entry(8, 1_000_000 + i)));
    all.extend([entry(16, u32::MAX), entry(32, u32::MAX)].concat());
    all.into()
}

/// A directory this many levels below another one.
fn deep(fs: &mut Fs, mut at: Ino, levels: usize) -> Ino {
    for n in (0..levels).step_by(500) {
        let mkdir = |first| {
            op(Op::Mkdir(pb::Mkdir { parent: first, name: bytes("d"), mode: 0o777, umask: 0 }))
        };
        let ops = (0..500.min(levels - n)).map(|i| mkdir(if i == 0 { at } else { 0 })).collect();
        at = fs.list(ops).last().unwrap().ino;
    }
    at
}

#[test]
fn groups_and_lists_of_rights_cannot_be_multiplied() {
    let mut fs = Fs::new();
    let dir = fs.mkdir(ROOT, "dir");
    let value = long_acl();
    fs.one(Op::Setxattr(pb::SetXattr {
        ino: dir,
        name: bytes("system.posix_acl_access"),
        value,
        ..Default::default()
    }));
    // Out of order, as in older entries of the log.
    fs.creds = pb::Creds { uid: 1000, gid: 1000, groups: (0..5000).rev().collect() };
    let mkdir = |name: &str| {
        op(Op::Mkdir(pb::Mkdir { parent: dir, name: bytes(name), mode: 0o755, umask: 0 }))
    };
    let list = |name: &str, n| {
        let mut ops = vec![mkdir(name)];
        ops.extend((0..n).map(|_| lookup(dir, name)));
        ops
    };
    let short = fs.list(list("a", 100));
    assert!(short.len() == 101 && short.iter().all(|r| r.status.is_none()));
    let before = dump(&fs.store).len();
    let long = fs.list(list("b", 2000));
    assert_eq!(code_of(long.last().unwrap().status.as_ref()), Some(Code::TooBig));
    assert_eq!(fs.lookup(dir, "b"), Err(Code::NoEnt), "all of it was undone");
    assert!(dump(&fs.store).len() <= before + 1, "nothing but the answer is kept");
    // Reads alike.
    let read = fs.list(list("b", 2000).split_off(1));
    assert_eq!(code_of(read.last().unwrap().status.as_ref()), Some(Code::NoEnt));
    let read = fs.list(list("a", 2000).split_off(1));
    assert_eq!(code_of(read.last().unwrap().status.as_ref()), Some(Code::TooBig));
    // Logged under the older rules, it keeps its old effect.
    fs.rules = 1;
    assert!(fs.list(list("b", 2000)).iter().all(|r| r.status.is_none()));
}

#[test]
fn long_lists_of_cheap_operations_are_answered() {
    let mut fs = Fs::new();
    let dir = fs.mkdir(ROOT, "dir");
    for i in 0..10 {
        fs.create(dir, &format!("f{i}"));
    }
    fs.creds = creds(1000);
    let many = (0..8192).map(|i| lookup(dir, &format!("f{}", i % 10))).collect();
    let results = fs.list(many);
    assert!(
        results.len() == 8192 && results.iter().all(|r| r.status.is_none()),
        "{:?}",
        results.last()
    );
    fs.creds = creds(0);
    let create = |i| op(mk_create(dir, &format!("new{i}")));
    let results = fs.list((0..2000).map(create).collect());
    assert!(results.iter().all(|r| r.status.is_none()), "{:?}", results.last());
}

#[test]
fn directories_move_down_to_a_depth_and_files_anywhere() {
    let mut fs = Fs::new();
    let (from, top) = (fs.mkdir(ROOT, "from"), fs.mkdir(ROOT, "top"));
    let within = deep(&mut fs, top, 4000);
    let below = deep(&mut fs, within, 200);
    let (v, _) = (fs.mkdir(from, "v"), fs.create(from, "file"));
    fs.one(mv(from, "v", within, "v"));
    fs.fails(mv(within, "v", below, "v"), Code::TooBig);
    fs.one(mv(within, "v", within, "w"));
    fs.one(mv(from, "file", below, "file"));
    fs.one(mv(within, "w", ROOT, "w"));
    assert_eq!(fs.path(v).unwrap(), "/w");
    // Each costs little enough, but not many of them in one list.
    let (a, b) = (fs.mkdir(within, "a"), fs.mkdir(within, "b"));
    fs.mkdir(a, "v");
    let there = |i| op(if i % 2 == 0 { mv(a, "v", b, "v") } else { mv(b, "v", a, "v") });
    assert!(fs.list((0..4).map(there).collect()).iter().all(|r| r.status.is_none()));
    let results = fs.list((0..100).map(there).collect());
    assert_eq!(code_of(results.last().unwrap().status.as_ref()), Some(Code::TooBig));
    fs.rules = 1;
    fs.one(mv(ROOT, "w", below, "v"));
}

#[test]
fn lists_that_may_be_much_work_are_known_before() {
    let mut fs = Fs::new();
    let (plain, top) = (fs.mkdir(ROOT, "plain"), fs.mkdir(ROOT, "top"));
    let bottom = deep(&mut fs, top, 3000);
    let heavy = |fs: &Fs, ops: &[pb::Op]| fs.ns.is_heavy(ops).unwrap();
    let lookups = |n| vec![lookup(plain, "x"); n];
    assert!(!heavy(&fs, &lookups(4)) && !heavy(&fs, &lookups(100)) && heavy(&fs, &lookups(1000)));
    let rename = |to| [op(mv(plain, "x", to, "x"))];
    assert!(
        !heavy(&fs, &rename(plain)) && !heavy(&fs, &rename(top)) && heavy(&fs, &rename(bottom))
    );
    assert!(heavy(&fs, &[op(Op::PathOf(pb::PathOf { ino: bottom }))]));
    let value = long_acl();
    fs.one(Op::Setxattr(pb::SetXattr {
        ino: plain,
        name: bytes("system.posix_acl_access"),
        value,
        ..Default::default()
    }));
    assert!(heavy(&fs, &lookups(20)));
    let list = |limit| [op(Op::Readdir(pb::Readdir { dir: plain, cookie: 0, limit, attrs: true }))];
    assert!(!heavy(&fs, &list(1000)) && heavy(&fs, &list(16_384)));
}

/// For choosing the limits: what a step takes here.
#[test]
#[ignore = "measures"]
fn what_a_step_takes() {
    let dir = tempfile::tempdir().unwrap();
    let store = std::sync::Arc::new(strake_store::FjallStore::open(dir.path()).unwrap());
    let mut fs = Fs::new();
    let ops = dump(&fs.store).into_iter().map(|(k, v)| (k, Some(v))).collect();
    strake_store::MetaStore::commit(&*store, strake_store::Batch { ops }).unwrap();
    let memory = std::mem::replace(&mut fs.ns, Namespace::open(store).unwrap());
    let top = fs.mkdir_in(ROOT, "top");
    let bottom = fs.deep_in(top, 4000);
    let (a, b) = (fs.mkdir_in(bottom, "a"), fs.mkdir_in(bottom, "b"));
    fs.mkdir_in(a, "v");
    let timed = |fs: &mut Fs, what: &str, ops: Vec<pb::Op>| {
        #[allow(clippy::disallowed_methods, reason = "the test measures")]
        let began = std::time::Instant::now();
        let n = fs.raw_list(ops).len();
        println!("{what}: {n} operations, {:?}", began.elapsed());
    };
    timed(&mut fs, "rename 4,000 deep", vec![op(mv(a, "v", b, "v"))]);
    timed(&mut fs, "8,192 lookups", vec![lookup(top, "d"); 8192]);
    let create = |i| op(mk_create(top, &format!("new{i}")));
    timed(&mut fs, "2,000 creates", (0..2000).map(create).collect());
    let value = long_acl();
    let set = pb::SetXattr {
        ino: top,
        name: bytes("system.posix_acl_access"),
        value,
        ..Default::default()
    };
    timed(&mut fs, "a list of rights", vec![op(Op::Setxattr(set))]);
    fs.creds = pb::Creds { uid: 1000, gid: 1000, groups: (0..65_536).collect() };
    timed(&mut fs, "lookups against 506 groups", vec![lookup(top, "d"); 100]);
    fs.ns = memory;
}

impl Fs {
    /// Runs a list without checking the whole state.
    fn raw_list(&mut self, ops: Vec<pb::Op>) -> Vec<pb::OpResult> {
        if !Namespace::is_mutation(&ops) {
            return self.ns.read(self.session, &self.creds, &ops).results;
        }
        (self.index, self.seq) = (self.index + 1, self.seq + 1);
        let m = pb::MetaRequest {
            session: self.session,
            seq: self.seq,
            lowest_unanswered: self.seq,
            creds: Some(self.creds.clone()),
            ops,
            rules: self.rules,
            ..Default::default()
        };
        let e = (self.index, 1, entry(self.now, Command::Meta(m)));
        match self.ns.apply(&[e], (self.index, 1), None).unwrap().remove(0).reply {
            Some(pb::log_reply::Reply::Meta(m)) => m.results,
            other => panic!("{other:?}"),
        }
    }

    fn mkdir_in(&mut self, parent: Ino, name: &str) -> Ino {
        let mkdir = pb::Mkdir { parent, name: bytes(name), mode: 0o777, umask: 0 };
        self.raw_list(vec![op(Op::Mkdir(mkdir))])[0].ino
    }

    fn deep_in(&mut self, mut at: Ino, levels: usize) -> Ino {
        for n in (0..levels).step_by(500) {
            let mkdir = |parent| {
                op(Op::Mkdir(pb::Mkdir { parent, name: bytes("d"), mode: 0o777, umask: 0 }))
            };
            let ops =
                (0..500.min(levels - n)).map(|i| mkdir(if i == 0 { at } else { 0 })).collect();
            at = self.raw_list(ops).last().unwrap().ino;
        }
        at
    }
}
