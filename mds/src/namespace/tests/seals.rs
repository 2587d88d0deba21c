//! Sealed files: the permission to seal, what is refused afterwards, and what a crash in the middle
//! leaves.

use strake_proto::seal::{self as arithmetic, EXTENT, PAGE};

use super::*;
use pb::seal::Step;

pub(super) fn begin(ino: Ino) -> Op {
    Op::Seal(pb::Seal { ino, id: 0, step: Some(Step::Begin(pb::SealBegin {})) })
}
pub(super) fn undo(ino: Ino) -> Op {
    Op::Seal(pb::Seal { ino, id: 0, step: Some(Step::Undo(pb::SealUndo {})) })
}
fn page(ino: Ino, id: u64, number: u64, digests: usize) -> Op {
    let page = pb::SealPage { number, digests: vec![number as u8; digests * 32].into() };
    Op::Seal(pb::Seal { ino, id, step: Some(Step::Page(page)) })
}
fn finish(ino: Ino, id: u64, size: u64) -> Op {
    let extent_size = arithmetic::extent_size(size);
    let (sha256, root) = (vec![1; 32].into(), vec![2; 32].into());
    let m = pb::Manifest { size, extent_size, sha256, root, time_ns: 0 };
    Op::Seal(pb::Seal { ino, id, step: Some(Step::Finish(m)) })
}
fn get(ino: Ino, page: Option<u64>) -> Op {
    Op::GetSeal(pb::GetSeal { ino, page })
}

/// A file in the root, writable for all, that no session has open.
pub(super) fn closed(fs: &mut Fs, name: &str, size: u64) -> Ino {
    let o = pb::Create {
        parent: ROOT,
        name: bytes(name),
        mode: 0o666,
        exclusive: true,
        flags: 2,
        ..Default::default()
    };
    let made = fs.one(Op::Create(o));
    let ino = made.ino;
    if size > 0 {
        fs.one(Op::Extend(pb::Extend { ino, end: size, holes: false }));
    }
    fs.one(Op::Release(pb::Release { ino, writer: made.writer, surplus: false }));
    ino
}

/// All the steps. Returns the id of the seal.
pub(super) fn seal(fs: &mut Fs, ino: Ino) -> u64 {
    let r = fs.one(begin(ino));
    let (id, size) = (r.seal.unwrap().id, r.attr.unwrap().size);
    for n in 0..arithmetic::pages(size) {
        fs.one(page(ino, id, n, arithmetic::digests_in(size, n)));
    }
    fs.one(finish(ino, id, size));
    id
}

#[test]
fn a_seal_in_all_its_steps() {
    let mut fs = Fs::new();
    // Two pages: one that is full, and one extent more.
    let size = EXTENT * PAGE as u64 + 1;
    let f = closed(&mut fs, "f", size);
    fs.fails(get(f, None), Code::NoData);
    let before = fs.attr(f);
    assert_eq!(fs.ns.header().format_version, 1);
    let r = fs.one(begin(f));
    let info = r.seal.unwrap();
    assert!(info.id > 0 && info.pages == 0 && info.manifest.is_none());
    assert_eq!((fs.ns.header().format_version, fs.effects[0].changed.clone()), (4, [f].into()));
    let after = fs.attr(f);
    assert!(
        after.change > before.change
            && after.ctime_ns > before.ctime_ns
            && after.mtime_ns == before.mtime_ns
    );
    assert_eq!(fs.one(begin(f)).seal.unwrap(), info, "it goes on where it was");

    let id = info.id;
    fs.fails(finish(f, id, size), Code::Inval);
    fs.fails(page(f, id, 1, 1), Code::Inval);
    fs.fails(page(f, id, 0, PAGE - 1), Code::Inval);
    fs.one(page(f, id, 0, PAGE));
    fs.fails(finish(f, id, size), Code::Inval);
    fs.fails(page(f, id, 1, 2), Code::Inval);
    fs.fails(page(f, id, 2, 1), Code::Inval);
    fs.fails(page(f, id, u64::MAX, 1), Code::Inval);
    fs.one(page(f, id, 1, 1));
    fs.one(page(f, id, 0, PAGE));
    assert_eq!(fs.record(f).unwrap().seal.unwrap().pages, 2, "a page that comes again counts once");
    fs.fails(finish(f, id, size - 1), Code::Inval);
    for other in [id + 1, 0] {
        fs.fails(page(f, other, 0, PAGE), Code::Stale);
        fs.fails(finish(f, other, size), Code::Stale);
    }
    fs.one(finish(f, id, size));
    let done = fs.one(get(f, Some(1)));
    let m = done.seal.unwrap().manifest.unwrap();
    assert_eq!(
        (m.size, m.extent_size, m.time_ns > T0, &done.data[..]),
        (size, EXTENT, true, &[1; 32][..])
    );
    fs.fails(get(f, Some(2)), Code::NoData);
    // A second run that read the same data succeeds, one that read something else does not.
    assert_eq!(fs.one(finish(f, id, size)).seal.unwrap().manifest.unwrap(), m);
    fs.one(page(f, id, 0, PAGE));
    let Op::Seal(pb::Seal { step: Some(Step::Page(mut other)), .. }) = page(f, id, 0, PAGE) else {
        panic!()
    };
    other.digests = vec![9; PAGE * 32].into();
    fs.fails(Op::Seal(pb::Seal { ino: f, id, step: Some(Step::Page(other)) }), Code::Exist);
    // Nor does a run that gives up undo what another one completed.
    for late in [id, id + 1] {
        fs.fails(
            Op::Seal(pb::Seal { ino: f, id: late, step: Some(Step::Undo(pb::SealUndo {})) }),
            Code::Stale,
        );
    }
    let Op::Seal(pb::Seal { step: Some(Step::Finish(mut other)), .. }) = finish(f, id, size) else {
        panic!()
    };
    other.sha256 = vec![9; 32].into();
    fs.fails(Op::Seal(pb::Seal { ino: f, id, step: Some(Step::Finish(other)) }), Code::Exist);
    assert_eq!(fs.one(begin(f)).seal.unwrap().manifest.unwrap(), m);
}

#[test]
fn nothing_of_a_sealed_file_changes() {
    let mut fs = Fs::new();
    let f = closed(&mut fs, "f", 100);
    fs.one(mk_link(f, ROOT, "hard"));
    fs.one(Op::Setxattr(pb::SetXattr {
        ino: f,
        name: bytes("user.a"),
        value: bytes("1"),
        flags: 0,
    }));
    let (g, d) = (closed(&mut fs, "g", 0), fs.mkdir(ROOT, "d"));
    // From the first step on, and with its manifest.
    for finished in [false, true] {
        if finished {
            seal(&mut fs, f);
        } else {
            fs.one(begin(f));
        }
        let before = (fs.record(f), fs.names(ROOT, 10));
        let set = |set: pb::SetAttr| Op::Setattr(pb::SetAttr { ino: f, ..set });
        let acl = [&[2u8, 0, 0, 0][..], &[1, 0, 6, 0, 255, 255, 255, 255]].concat();
        let changes = [
            set(pb::SetAttr { mode: Some(0o600), ..Default::default() }),
            set(pb::SetAttr { uid: Some(0), ..Default::default() }),
            set(pb::SetAttr { gid: Some(0), ..Default::default() }),
            set(pb::SetAttr { atime_now: true, ..Default::default() }),
            set(pb::SetAttr { mtime_now: true, ..Default::default() }),
            set(pb::SetAttr { atime_ns: Some(1), ..Default::default() }),
            set(pb::SetAttr { mtime_ns: Some(1), ..Default::default() }),
            set(pb::SetAttr { size: Some(0), ..Default::default() }),
            set(pb::SetAttr { size: Some(100), ..Default::default() }),
            set(pb::SetAttr { size: Some(1 << 30), holes: true, ..Default::default() }),
            set(pb::SetAttr { drop_privileges: true, ..Default::default() }),
            Op::Extend(pb::Extend { ino: f, end: 50, holes: false }),
            Op::Extend(pb::Extend { ino: f, end: 1000, holes: true }),
            Op::Setxattr(pb::SetXattr {
                ino: f,
                name: bytes("user.a"),
                value: bytes("2"),
                flags: 0,
            }),
            Op::Setxattr(pb::SetXattr {
                ino: f,
                name: bytes("trusted.a"),
                value: bytes("2"),
                flags: 0,
            }),
            Op::Setxattr(pb::SetXattr {
                ino: f,
                name: bytes("system.posix_acl_access"),
                value: acl.into(),
                flags: 0,
            }),
            Op::Removexattr(pb::RemoveXattr { ino: f, name: bytes("user.a") }),
            Op::Removexattr(pb::RemoveXattr { ino: f, name: bytes("security.capability") }),
            Op::Setlayout(pb::SetLayout { ino: f, layout: Some(Default::default()) }),
            Op::Open(pb::Open { ino: f, flags: 1 }),
            Op::Open(pb::Open { ino: f, flags: 2 }),
            Op::Open(pb::Open { ino: f, flags: 0o2001 }),
            Op::Create(pb::Create {
                parent: ROOT,
                name: bytes("f"),
                mode: 0o666,
                flags: 2,
                ..Default::default()
            }),
            Op::Access(pb::Access { ino: f, mask: 2 }),
            mk_link(f, ROOT, "more"),
            mk_unlink(ROOT, "f"),
            mk_unlink(ROOT, "hard"),
            mk_rename(ROOT, "f", ROOT, "h", 0),
            mk_rename(ROOT, "f", d, "f", 0),
            mk_rename(ROOT, "g", ROOT, "f", 0),
            mk_rename(ROOT, "g", ROOT, "f", 2),
            mk_rename(ROOT, "f", ROOT, "g", 0),
            mk_rename(ROOT, "f", ROOT, "g", 2),
        ];
        for change in changes {
            // Root is no exception. A caller without rights gets the same error, or one about
            // permission.
            fs.fails(change.clone(), Code::Perm);
            fs.as_user(7, |fs| {
                let e = fs.try_one(change.clone()).map(|r| r.ino);
                assert!(matches!(e, Err(Code::Perm | Code::Access)), "{change:?}: {e:?}");
            });
        }
        assert_eq!((fs.record(f), fs.names(ROOT, 10)), before);
        // Reads still work, and so do operations that do not change the file.
        assert!(fs.one(Op::Open(pb::Open { ino: f, flags: 0 })).layout.is_some());
        fs.one(Op::Access(pb::Access { ino: f, mask: 4 }));
        assert_eq!(fs.one(Op::Getxattr(pb::GetXattr { ino: f, name: bytes("user.a") })).data, "1");
        fs.one(Op::Release(pb::Release { ino: f, writer: 1, surplus: true }));
        let span = Some(pb::LockSpan { start: 0, end: 9, r#type: 2, pid: 1 });
        fs.one(Op::SetLock(pb::SetLock { ino: f, owner: 1, span, ..Default::default() }));
        // Both names are the same file: there is nothing to do.
        fs.one(mk_rename(ROOT, "f", ROOT, "hard", 0));
        fs.one(undo(f));
    }
    // A folder with sealed files in it moves.
    fs.one(mk_rename(ROOT, "g", d, "g", 0));
    seal(&mut fs, g);
    fs.one(mk_rename(ROOT, "d", ROOT, "e", 0));
    assert_eq!(fs.path(g).unwrap(), "/e/g");
    fs.fails(mk_rmdir(ROOT, "e"), Code::NotEmpty);
}

#[test]
fn who_may_seal_and_undo() {
    let mut fs = Fs::new();
    let f = fs.as_user(5, |fs| closed(fs, "f", 100));
    fs.one(Op::Setattr(pb::SetAttr { ino: f, mode: Some(0o400), ..Default::default() }));
    fs.as_user(6, |fs| {
        for o in [begin(f), undo(f), page(f, 1, 0, 1), finish(f, 1, 100)] {
            fs.fails(o, Code::Perm);
        }
        fs.fails(get(f, None), Code::Access);
    });
    // The owner needs no right to write it, and may go back as long as there is no manifest.
    fs.as_user(5, |fs| {
        fs.one(begin(f));
        fs.fails(mk_size(f, 1), Code::Perm);
        fs.one(undo(f));
        fs.fails(undo(f), Code::NoData);
        seal(fs, f);
        fs.fails(undo(f), Code::Perm);
        fs.fails(mk_unlink(ROOT, "f"), Code::Perm);
        fs.one(get(f, Some(0)));
    });
    fs.as_user(6, |fs| fs.fails(get(f, Some(0)), Code::Access));
    fs.one(undo(f));
    fs.as_user(5, |fs| fs.one(mk_unlink(ROOT, "f")));
}

#[test]
fn what_cannot_be_sealed() {
    let mut fs = Fs::new();
    let d = fs.mkdir(ROOT, "d");
    let link = pb::Symlink { parent: ROOT, name: bytes("soft"), target: bytes("d") };
    let soft = fs.one(Op::Symlink(link)).ino;
    for other in [ROOT, d, soft] {
        fs.fails(begin(other), Code::Inval);
    }
    fs.fails(begin(999), Code::NoEnt);
    fs.fails(Op::Seal(pb::Seal { ino: ROOT, id: 0, step: None }), Code::OpNotSupp);
    // Open for writing, by this session or another one.
    let f = closed(&mut fs, "f", 100);
    fs.fails(page(f, 0, 0, 1), Code::Stale);
    fs.fails(finish(f, 0, 100), Code::Stale);
    let other = fs.open_session(2);
    for session in [fs.session, other] {
        let own = std::mem::replace(&mut fs.session, session);
        let writer = fs.one(Op::Open(pb::Open { ino: f, flags: 2 })).writer;
        fs.session = own;
        fs.fails(begin(f), Code::Busy);
        let own = std::mem::replace(&mut fs.session, session);
        fs.one(Op::Release(pb::Release { ino: f, writer, surplus: false }));
        fs.session = own;
    }
    // A writer that died: not before bytes that it may have left beyond the end are gone.
    let own = std::mem::replace(&mut fs.session, other);
    fs.one(Op::Open(pb::Open { ino: f, flags: 1 }));
    fs.session = own;
    assert_eq!(
        fs.log(Command::SessionEnd(pb::SessionEnd { sessions: vec![other], evict: true })).status,
        None
    );
    fs.fails(begin(f), Code::Busy);
    let number = fs.ns.backlog().trim_of(f).unwrap().number;
    assert_eq!(fs.log(Command::TrimDone(pb::TrimDone { ino: f, number })).status, None);
    fs.one(begin(f));
    // Without a name.
    let g = closed(&mut fs, "g", 0);
    fs.one(mk_unlink(ROOT, "g"));
    fs.fails(begin(g), Code::NoEnt);
    let made = fs.one(Op::Tmpfile(pb::Tmpfile {
        parent: ROOT,
        mode: 0o600,
        linkable: true,
        ..Default::default()
    }));
    fs.fails(begin(made.ino), Code::NoEnt);
}

#[test]
fn an_undone_seal_leaves_nothing_and_takes_no_late_step() {
    let mut fs = Fs::new();
    let f = closed(&mut fs, "f", 3 * EXTENT);
    let id = seal(&mut fs, f);
    let pages = |fs: &Fs| dump(&fs.store).iter().filter(|(k, _)| k[0] == keys::EXTENTS).count();
    assert_eq!(pages(&fs), 1);
    let r = fs.one(undo(f));
    assert_eq!((r.seal, pages(&fs), fs.effects[0].changed.contains(&f)), (None, 0, true));
    fs.one(mk_size(f, 2 * EXTENT));
    let number = fs.ns.backlog().trim_of(f).unwrap().number;
    fs.log(Command::TrimDone(pb::TrimDone { ino: f, number }));
    // A run that read the earlier contents must not attach its manifest to the new ones.
    let new = fs.one(begin(f)).seal.unwrap().id;
    assert!(new > id);
    fs.fails(page(f, id, 0, 2), Code::Stale);
    fs.one(page(f, new, 0, 2));
    fs.fails(finish(f, id, 2 * EXTENT), Code::Stale);
    fs.one(finish(f, new, 2 * EXTENT));
    fs.one(undo(f));
    fs.one(mk_unlink(ROOT, "f"));
    assert_eq!(fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![f] })).status, None);
    assert!(fs.record(f).is_none());
}

#[test]
fn a_crash_between_the_steps_leaves_it_immutable_and_another_run_completes_it() {
    let mut fs = Fs::new();
    let f = closed(&mut fs, "f", EXTENT + 1);
    let id = fs.one(begin(f)).seal.unwrap().id;
    fs.one(page(f, id, 0, 2));
    // The sealing client died, and so did the server.
    fs.ns = Namespace::open(std::sync::Arc::new(fs.store.clone())).unwrap();
    let info = fs.one(get(f, None)).seal.unwrap();
    assert_eq!((info.id, info.pages, info.manifest), (id, 1, None));
    fs.fails(Op::Open(pb::Open { ino: f, flags: 2 }), Code::Perm);
    seal(&mut fs, f);
    let info = fs.one(get(f, Some(0))).seal.unwrap();
    assert_eq!((info.id, info.pages, info.manifest.is_some()), (id, 1, true));
}

#[test]
fn an_empty_file_has_a_manifest_without_pages() {
    let mut fs = Fs::new();
    let f = closed(&mut fs, "f", 0);
    let id = fs.one(begin(f)).seal.unwrap().id;
    fs.fails(page(f, id, 0, 1), Code::Inval);
    fs.fails(page(f, id, 0, 0), Code::Inval);
    fs.one(finish(f, id, 0));
    fs.fails(get(f, Some(0)), Code::NoData);
    assert_eq!(fs.record(f).unwrap().seal.unwrap().manifest.unwrap().size, 0);
}
