//! State folders of each format, written once and kept: every later program opens them and finds
//! what is in them.

use std::{fs, path::Path, sync::Arc};

use strake_store::{Batch, FjallStore, MetaStore};

use super::*;

/// Formats with a state of their own: the folder, and every kind of record that is in it.
const GOLDEN: [(u32, &str, &[u8]); 6] = [
    (1, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/state-v1"), b"HMdegiorstwx"),
    (2, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/state-v2"), b"HMdegiklorstwx"),
    (3, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/state-v3"), b"HMdegiklorstwx"),
    (4, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/state-v4"), b"HMdegiklmorstwx"),
    (5, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/state-v5"), b"HMdegiklmorstwx"),
    (8, concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/state-v8"), b"HMdegijklmorstwx"),
];

/// One of everything that a state of a format can hold.
fn fill(format: u32) -> Fs {
    let mut fs = if format >= 5 { Fs::with_chains(1) } else { Fs::new() };
    // As its lists were logged then.
    fs.rules = if format >= 8 { RULES } else { 0 };
    let d = fs.mkdir(ROOT, "dir");
    let f = fs.create(d, "file");
    fs.one(mk_link(f, ROOT, "hard"));
    fs.one(Op::Extend(pb::Extend { ino: f, end: 12_345, holes: false }));
    let set = pb::SetXattr {
        ino: f,
        name: bytes("user.colour"),
        value: bytes("blue"),
        ..Default::default()
    };
    fs.one(Op::Setxattr(set));
    let link = pb::Symlink { parent: ROOT, name: bytes("soft"), target: bytes("dir/file") };
    fs.one(Op::Symlink(link));
    let layout = Some(pb::LayoutSpec {
        stripe_count: 3,
        stripe_size: 1 << 20,
        copies: 1,
        ..Default::default()
    });
    fs.one(Op::Setlayout(pb::SetLayout { ino: d, layout }));
    // An orphan, chunks to delete, a cut, an eviction.
    let held = fs.create(ROOT, "held");
    fs.one(mk_unlink(ROOT, "held"));
    let freed = fs.create(ROOT, "freed");
    fs.one(mk_unlink(ROOT, "freed"));
    assert_eq!(fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![freed] })).status, None);
    let cut = fs.create(ROOT, "cut");
    fs.one(mk_size(cut, 5000));
    fs.one(mk_size(cut, 100));
    let other = fs.open_session(2);
    if format >= 2 {
        let span = |start, r#type| Some(pb::LockSpan { start, end: u64::MAX, r#type, pid: 77 });
        fs.one(Op::SetLock(pb::SetLock {
            ino: f,
            owner: 5,
            kind: 0,
            span: span(100, 2),
            undo: false,
            ..Default::default()
        }));
        fs.one(Op::SetLock(pb::SetLock {
            ino: f,
            owner: 5,
            kind: 0,
            span: span(1 << 40, 1),
            undo: false,
            ..Default::default()
        }));
        let first = std::mem::replace(&mut fs.session, other);
        fs.one(Op::SetLock(pb::SetLock {
            ino: cut,
            owner: 6,
            kind: 1,
            span: span(0, 1),
            undo: false,
            ..Default::default()
        }));
        fs.session = first;
    }
    if format >= 3 {
        let sparse = fs.create(ROOT, "sparse");
        fs.one(Op::Extend(pb::Extend { ino: sparse, end: 1 << 40, holes: true }));
    }
    if format >= 4 {
        let (whole, begun) =
            (seals::closed(&mut fs, "sealed", 5 << 20), seals::closed(&mut fs, "begun", 0));
        seals::seal(&mut fs, whole);
        fs.one(seals::begin(begun));
    }
    if format >= 5 {
        assert_eq!(fs.log(Command::Settings(pb::Settings { min_copies: 2 })).status, None);
    }
    assert_eq!(
        fs.log(Command::SessionEnd(pb::SessionEnd { sessions: vec![other], evict: true })).status,
        None
    );
    if format >= 8 {
        assert_eq!(fs.log(Command::RaiseLevel(pb::RaiseLevel { to: 1 })).status, None);
    }
    assert!(fs.ns.backlog().orphans(9).contains(&held));
    fs
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for e in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(e.file_name());
        if e.file_type().unwrap().is_dir() {
            copy(&e.path(), &to);
        } else {
            fs::copy(e.path(), to).unwrap();
        }
    }
}

/// The journal is made 64 MiB long.
fn cut_zeros(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let end = bytes.iter().rposition(|b| *b != 0).map_or(0, |n| n + 1);
    bytes.truncate(end.next_multiple_of(4096));
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_state_of_format_1_is_read_for_ever() {
    read_for_ever(1);
}

#[test]
fn a_state_of_format_2_is_read_for_ever() {
    let fs = read_for_ever(2);
    let f = fs
        .ns
        .locks_of(2)
        .map(|l| (l, 2))
        .into_iter()
        .chain((3..9).map(|i| (fs.ns.locks_of(i).unwrap(), i)));
    let all: Vec<_> = f.filter(|(l, _)| *l != Default::default()).collect();
    let (held, _) = all.iter().find(|(l, _)| !l.held.is_empty()).unwrap();
    let (who, spans) = &held.held[0];
    assert_eq!((who.owner, spans.len(), spans[0].end, spans[1].pid), (5, 2, (1 << 40) - 1, 77));
    assert!(
        all.iter().any(|(l, _)| l.held.is_empty() && l.fence > 0),
        "of the session that was evicted"
    );
}

#[test]
fn a_state_of_format_3_is_read_for_ever() {
    let mut fs = read_for_ever(3);
    let sparse = fs.lookup(ROOT, "sparse").unwrap();
    assert_eq!((fs.attr(sparse).sparse, fs.attr(sparse).size), (true, 1 << 40));
    let whole = fs.lookup(ROOT, "hard").unwrap();
    assert!(!fs.attr(whole).sparse);
}

#[test]
fn a_state_of_format_4_is_read_for_ever() {
    let mut fs = read_for_ever(4);
    let sealed = fs.lookup(ROOT, "sealed").unwrap();
    let r = fs.one(Op::GetSeal(pb::GetSeal { ino: sealed, page: Some(0) }));
    let m = r.seal.and_then(|s| s.manifest).unwrap();
    assert_eq!((m.size, m.extent_size, r.data.len()), (5 << 20, 4 << 20, 64));
    fs.fails(mk_unlink(ROOT, "sealed"), Code::Perm);
    let begun = fs.lookup(ROOT, "begun").unwrap();
    let r = fs.one(Op::GetSeal(pb::GetSeal { ino: begun, page: None }));
    assert!(r.seal.is_some_and(|s| s.manifest.is_none()));
    fs.fails(mk_size(begun, 7), Code::Perm);
}

#[test]
fn a_state_of_format_5_is_read_for_ever() {
    let map = read_for_ever(5).ns.map();
    assert_eq!((map.map.placement, map.map.min_copies), (1, 2));
}

/// Format 8 has also what came with 7: a record for each locked range.
#[test]
fn a_state_of_format_8_is_read_for_ever() {
    let fs = read_for_ever(8);
    assert_eq!(fs.ns.map().map.level, 1);
    assert!(fs.ns.map().map.level_index > 0);
}

fn read_for_ever(format: u32) -> Fs {
    let (_, golden, all_kinds) = GOLDEN.into_iter().find(|g| g.0 == format).unwrap();
    if std::env::var("STRAKE_WRITE_GOLDEN").is_ok_and(|v| v == format!("state-v{format}")) {
        let store = FjallStore::open(golden).unwrap();
        let ops = dump(&fill(format).store).into_iter().map(|(k, v)| (k, Some(v))).collect();
        store.commit(Batch { ops }).unwrap();
        store.sync().unwrap();
        drop(store);
        cut_zeros(&Path::new(golden).join("0.jnl"));
    }
    let dir = tempfile::tempdir().unwrap();
    copy(Path::new(golden), dir.path());
    // An empty folder, which git does not keep.
    fs::create_dir_all(dir.path().join("keyspaces/1/tables")).unwrap();
    let kept = dump(&FjallStore::open(dir.path()).unwrap());
    let kinds: BTreeSet<u8> = kept.iter().map(|(k, _)| k[0]).collect();
    assert_eq!(kinds.into_iter().collect::<Vec<_>>(), all_kinds, "every kind of record is in it");
    let store = MemStore::new();
    store.commit(Batch { ops: kept.into_iter().map(|(k, v)| (k, Some(v))).collect() }).unwrap();

    let wanted = fill(format);
    let ns = Namespace::open(Arc::new(store.clone())).unwrap();
    assert_eq!(ns.header(), wanted.ns.header());
    assert_eq!(ns.header().format_version, format);
    assert_eq!(ns.map().map, wanted.ns.map().map);
    assert_eq!(ns.sessions(), wanted.ns.sessions());
    assert_eq!(ns.backlog().evicted_after(0).len(), 1);
    assert_eq!(
        (ns.backlog().gc_queue(9), ns.backlog().orphans(9), ns.backlog().trims(9)),
        (
            wanted.ns.backlog().gc_queue(9),
            wanted.ns.backlog().orphans(9),
            wanted.ns.backlog().trims(9)
        )
    );
    // And the file system can be used further.
    let (index, now, seq, session) = (wanted.index, wanted.now, wanted.seq, wanted.session);
    let mut fs =
        Fs { store, ns, index, now, seq, session, creds: creds(0), rules: 0, effects: vec![] };
    let f = fs.lookup(ROOT, "hard").unwrap();
    assert_eq!((fs.attr(f).size, fs.attr(f).nlink), (12_345, 2));
    assert_eq!(fs.path(f).unwrap(), "/dir/file");
    assert_eq!(
        fs.one(Op::Getxattr(pb::GetXattr { ino: f, name: bytes("user.colour") })).data,
        "blue"
    );
    assert_eq!(fs.names(ROOT, 10), fill(format).names(ROOT, 10));
    let dir = fs.lookup(ROOT, "dir").unwrap();
    let new = fs.one(mk_create(dir, "new"));
    assert_eq!(new.layout.unwrap().components[0].stripe_size, 1 << 20);
    fs.one(mk_unlink(dir, "file"));
    fs
}
