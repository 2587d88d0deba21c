//! The effects of applied entries that the leader gets. All tests check after every command that
//! every visible change is in them.

use super::*;

/// What clients can see of each inode, as bytes; `None` where there is too much to look at it each
/// time.
pub(super) fn visible(store: &dyn Reader) -> Option<BTreeMap<Ino, Vec<u8>>> {
    let mut out: BTreeMap<Ino, Vec<u8>> = BTreeMap::new();
    for (n, pair) in store.prefix(b"").enumerate() {
        let (k, v) = pair.unwrap();
        if n == 500 {
            return None;
        }
        let Some(ino) = k.get(1..9).and_then(keys::last_number) else { continue };
        match k[0] {
            keys::INODE => {
                let r = pb::InodeRecord::decode(v).unwrap();
                let shown =
                    pb::InodeRecord { trim: None, writers: 0, surplus: false, fence: 0, ..r };
                out.entry(ino).or_default().extend(shown.encode_to_vec());
            }
            keys::DENTRY if v.is_empty() => {}
            keys::DENTRY | keys::XATTR => {
                out.entry(ino).or_default().extend([&k[..], &v[..]].concat())
            }
            _ => {}
        }
    }
    Some(out)
}

/// Checks that the effects name every inode that looks different.
pub(super) fn check(before: Option<BTreeMap<Ino, Vec<u8>>>, after: &dyn Reader, told: &[Effect]) {
    let (Some(before), Some(after)) = (before, visible(after)) else { return };
    let inos: BTreeSet<Ino> = before.keys().chain(after.keys()).copied().collect();
    let differ: BTreeSet<Ino> =
        inos.into_iter().filter(|ino| before.get(ino) != after.get(ino)).collect();
    let changed: BTreeSet<Ino> = told.iter().flat_map(|e| &e.changed).copied().collect();
    assert!(
        differ.is_subset(&changed),
        "{differ:?} look different, and only {changed:?} are said to"
    );
}

fn changed(fs: &Fs) -> Vec<Ino> {
    assert_eq!(fs.effects.len(), 1);
    fs.effects[0].changed.iter().copied().collect()
}

#[test]
fn names_change_their_directories_and_what_is_behind_them() {
    let mut fs = Fs::new();
    let a = fs.mkdir(ROOT, "a");
    let e = fs.effects[0].clone();
    assert_eq!(
        (e.session, e.seq, e.named, e.told.clone()),
        (fs.session, fs.seq, [ROOT].into(), [ROOT, a].into())
    );
    assert!(
        e.changed == e.told
            && e.looked.contains(&ROOT)
            && e.ended.is_empty()
            && e.writers.is_empty()
    );
    let (b, f) = (fs.mkdir(ROOT, "b"), fs.create(a, "f"));
    let g = fs.create(b, "g");
    fs.one(mk_rename(a, "f", b, "g", 0));
    assert_eq!(changed(&fs), [a, b, f, g], "both directories, what moves and what it replaces");
    assert_eq!(fs.effects[0].named, [a, b].into());
    fs.one(mk_unlink(b, "g"));
    assert_eq!((changed(&fs), fs.effects[0].told.clone()), (vec![b, f], [b].into()));
    fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![f] }));
    assert_eq!(changed(&fs), [f]);
    assert!(fs.effects[0].named.is_empty() && fs.effects[0].session == 0);
}

#[test]
fn what_is_refused_changes_nothing_and_depends_on_what_it_looked_at() {
    let mut fs = Fs::new();
    let a = fs.mkdir(ROOT, "a");
    let b = fs.mkdir(a, "b");
    fs.fails(mk_rmdir(ROOT, "a"), Code::NotEmpty);
    assert!(
        changed(&fs).is_empty()
            && fs.effects[0].looked == [ROOT, a].into()
            && fs.effects[0].told == [ROOT].into()
    );
    let mkdir = pb::Mkdir { parent: b, name: bytes("c"), mode: 0o755, umask: 0 };
    let results = fs.list(vec![op(Op::Mkdir(mkdir)), op(mk_rmdir(ROOT, "x"))]);
    assert!(results[0].status.is_none() && results[1].status.is_some());
    assert!(
        changed(&fs).is_empty() && fs.effects[0].told.is_empty(),
        "what was undone is not remembered"
    );
    // Nothing ran: it was answered before.
    let again = pb::MetaRequest {
        session: fs.session,
        seq: fs.seq,
        creds: Some(creds(0)),
        ..Default::default()
    };
    fs.log(Command::Meta(again));
    assert!(fs.effects.is_empty());
}

#[test]
fn writers_come_as_a_change_and_go_unseen() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    let (first, other) = (fs.session, fs.open_session(9));
    assert!(fs.effects.is_empty());
    fs.session = other;
    let r = fs.one(Op::Open(pb::Open { ino: f, flags: 1 }));
    assert_eq!((changed(&fs), fs.effects[0].writers.clone()), (vec![f], vec![(other, f, true)]));
    let again = fs.one(Op::Open(pb::Open { ino: f, flags: 1 }));
    assert!(
        changed(&fs).is_empty()
            && fs.effects[0].writers.is_empty()
            && fs.effects[0].named == [f].into()
    );
    fs.one(Op::Release(pb::Release { ino: f, writer: r.writer, surplus: false }));
    assert!(fs.effects[0].writers.is_empty(), "it has opened the file again since");
    fs.one(Op::Release(pb::Release { ino: f, writer: again.writer, surplus: false }));
    assert!(changed(&fs).is_empty() && fs.effects[0].writers == [(other, f, false)]);
    fs.session = first;
    fs.one(mk_size(f, 100));
    fs.one(mk_size(f, 10));
    let number = fs.record(f).unwrap().trim.unwrap().number;
    fs.log(Command::TrimDone(pb::TrimDone { ino: f, number }));
    assert!(changed(&fs).is_empty() && fs.record(f).unwrap().trim.is_none());
    fs.log(Command::SessionEnd(pb::SessionEnd { sessions: vec![first, other, 77], evict: true }));
    let ended: Vec<_> = fs.effects.iter().flat_map(|e| e.ended.clone()).collect();
    assert_eq!(ended, [(first, false), (other, false)]);
    assert_eq!(
        fs.effects.iter().flat_map(|e| e.writers.clone()).collect::<Vec<_>>(),
        [(first, f, false)]
    );
    assert!(fs.effects.iter().all(|e| e.changed.is_empty()));
    let last = fs.open_session(10);
    fs.log(Command::SessionEnd(pb::SessionEnd { sessions: vec![last], evict: false }));
    assert_eq!(fs.effects.iter().flat_map(|e| e.ended.clone()).collect::<Vec<_>>(), [(last, true)]);
}

#[test]
fn a_survey_shows_all_sessions_and_writers() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    let other = fs.open_session(9);
    let s = fs.ns.survey(|s| s).unwrap();
    let sessions = vec![(fs.session, false), (other, false)];
    assert_eq!(
        s,
        crate::namespace::Survey { sessions, writers: vec![(fs.session, f)], ..Default::default() }
    );
    let getattr = op(Op::Getattr(pb::GetAttr { ino: f }));
    let r = fs.ns.read_at(fs.session, &creds(0), std::slice::from_ref(&getattr)).unwrap();
    assert_eq!((r.looked, r.version), ([f].into(), fs.ns.version()));
    let gone = fs.ns.read_at(99, &creds(0), &[getattr]).err();
    assert_eq!(
        gone.map(|e| e.code),
        Some(strake_proto::Code::NoSession),
        "no answer that somebody else might be told"
    );
}
