//! What ends a right to a file's data, and what does not.

use strake_proto::Rights;

use super::{
    seals::{begin, closed, undo},
    *,
};
use crate::namespace::effects::Ending;

const TO_WRITE: Rights = Rights::WRITE.and(Rights::TRIM);
const ACCESS: &str = "system.posix_acl_access";

fn set(ino: Ino) -> pb::SetAttr {
    pb::SetAttr { ino, ..Default::default() }
}

/// Of the last entry.
fn ended(fs: &Fs) -> Vec<(u64, Ino, Rights)> {
    let of = |e: &Effect| {
        assert_eq!(e.index, fs.index);
        e.endings
            .iter()
            .map(|Ending { session, ino, rights }| (*session, *ino, *rights))
            .collect::<Vec<_>>()
    };
    fs.effects.iter().flat_map(of).collect()
}

#[test]
fn rights_end_with_what_takes_them_and_with_nothing_else() {
    let mut fs = Fs::with_chains(1);
    let f = closed(&mut fs, "f", 0);
    assert_eq!(ended(&fs), [(fs.session, f, TO_WRITE)], "released");
    let first = fs.one(Op::Open(pb::Open { ino: f, flags: 2 })).writer;
    let last = fs.one(Op::Open(pb::Open { ino: f, flags: 1 })).writer;
    fs.one(Op::Release(pb::Release { ino: f, writer: first, surplus: false }));
    assert_eq!(ended(&fs), [], "it was opened again since");
    fs.one(Op::Release(pb::Release { ino: f, writer: last, surplus: true }));
    assert_eq!(ended(&fs), [(fs.session, f, TO_WRITE)]);
    fs.one(Op::Release(pb::Release { ino: f, writer: last, surplus: false }));
    assert_eq!(ended(&fs), [], "of one who is no writer");

    let all = [(0, f, Rights::ALL)];
    let mode = |m| Op::Setattr(pb::SetAttr { mode: Some(m), ..set(f) });
    let own = |uid, gid| Op::Setattr(pb::SetAttr { uid, gid, ..set(f) });
    let list: Vec<u8> = [(1u8, 6u8, -1i32), (2, 6, 6), (4, 4, -1), (16, 6, -1), (32, 4, -1)]
        .into_iter()
        .fold(vec![2, 0, 0, 0], |mut b, (tag, perm, id)| {
            b.extend([tag, 0, perm, 0]);
            b.extend(id.to_le_bytes());
            b
        });
    let acl =
        Op::Setxattr(pb::SetXattr { ino: f, name: bytes(ACCESS), value: list.into(), flags: 0 });
    for (op, ends) in [
        (mode(0o777), &[][..]),
        (mode(0o4777), &[]),
        (mode(0o777), &[]),
        (mode(0o775), &all),
        (own(Some(5), None), &all),
        (own(Some(5), None), &[]),
        (own(None, Some(5)), &all),
        (acl.clone(), &all),
        (acl, &[]),
        (Op::Removexattr(pb::RemoveXattr { ino: f, name: bytes(ACCESS) }), &all),
        (mk_size(f, 100), &[]),
        (Op::Setattr(pb::SetAttr { mtime_now: true, ..set(f) }), &[]),
        (Op::Extend(pb::Extend { ino: f, end: 200, holes: false }), &[]),
        (
            Op::Rename(pb::Rename {
                parent: ROOT,
                name: bytes("f"),
                new_parent: ROOT,
                new_name: bytes("g"),
                flags: 0,
            }),
            &[],
        ),
    ] {
        fs.one(op.clone());
        assert_eq!(ended(&fs), ends, "{op:?}");
    }
    let d = fs.mkdir(ROOT, "d");
    fs.one(Op::Setattr(pb::SetAttr { mode: Some(0), ..set(d) }));
    assert_eq!(ended(&fs), [], "there are no capabilities of directories");
    // A list that fails took nothing away.
    fs.list(vec![op(mode(0)), op(mk_unlink(ROOT, "nothing"))]);
    assert_eq!(ended(&fs), []);
}

#[test]
fn rights_end_with_seals_sessions_and_files() {
    let mut fs = Fs::with_chains(1);
    let f = closed(&mut fs, "f", 0);
    if let Some(trim) = fs.record(f).unwrap().trim {
        fs.log(Command::TrimDone(pb::TrimDone { ino: f, number: trim.number }));
    }
    fs.one(begin(f));
    assert_eq!(ended(&fs), [(0, f, TO_WRITE)]);
    fs.one(undo(f));
    assert_eq!(ended(&fs), []);
    // Closed, and never released.
    let g = fs.create(ROOT, "g");
    fs.one(mk_unlink(ROOT, "g"));
    assert_eq!(ended(&fs), []);
    fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![g] }));
    assert_eq!(ended(&fs), [(0, g, TO_WRITE)]);
    let (own, other) = (fs.session, fs.open_session(2));
    fs.create(ROOT, "h");
    fs.log(Command::SessionEnd(pb::SessionEnd { sessions: vec![own], evict: false }));
    assert_eq!(ended(&fs), [(own, 0, Rights::ALL)], "of all its files at once");
    fs.log(Command::SessionEnd(pb::SessionEnd { sessions: vec![other], evict: true }));
    assert_eq!(ended(&fs), [], "storage servers hear of an eviction as such");
}
