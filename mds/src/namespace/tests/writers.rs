//! Writers are recorded, and what a vanished writer left is trimmed before a new one may write
//! there.

use super::*;
use crate::namespace::inode::Inode;

fn open(ino: Ino) -> Op {
    Op::Open(pb::Open { ino, flags: 1 })
}
fn release(ino: Ino, writer: u64, surplus: bool) -> Op {
    Op::Release(pb::Release { ino, writer, surplus })
}
fn extend(ino: Ino, end: u64) -> Op {
    Op::Extend(pb::Extend { ino, end, holes: false })
}
fn end(session: u64, evict: bool) -> Command {
    Command::SessionEnd(pb::SessionEnd { sessions: vec![session], evict })
}

impl Fs {
    /// The same as another session.
    fn of_session<T>(&mut self, session: u64, f: impl FnOnce(&mut Fs) -> T) -> T {
        let before = std::mem::replace(&mut self.session, session);
        let out = f(self);
        self.session = before;
        out
    }
}

fn cut_of(fs: &Fs, ino: Ino) -> Option<(u64, u64)> {
    fs.record(ino).unwrap().trim.map(|t| (t.size, t.fence))
}

#[test]
fn the_layout_of_a_file_that_is_open_for_writing_stays() {
    let mut fs = Fs::new();
    let made = fs.one(mk_create(ROOT, "f"));
    let set =
        || Op::Setlayout(pb::SetLayout { ino: made.ino, layout: Some(pb::LayoutSpec::default()) });
    fs.fails(set(), Code::Busy);
    fs.one(release(made.ino, made.writer, false));
    let data = fs.one(set()).attr.unwrap().data_id;
    assert_ne!(data, made.attr.unwrap().data_id);
}

#[test]
fn an_orderly_writer_leaves_nothing_to_cut() {
    let mut fs = Fs::new();
    let made = fs.one(mk_create(ROOT, "f"));
    let ino = made.ino;
    assert_eq!((made.writer, fs.record(ino).unwrap().writers), (fs.index, 1));
    let before = fs.attr(ino);
    let again = fs.one(open(ino));
    assert!(again.writer > made.writer);
    assert_eq!(fs.record(ino).unwrap().writers, 1, "a session counts once");
    fs.one(release(ino, made.writer, false));
    assert_eq!(fs.record(ino).unwrap().writers, 1, "it has opened the file again since");
    fs.one(extend(ino, 100));
    fs.one(release(ino, again.writer, false));
    fs.one(release(ino, again.writer, false));
    assert_eq!(fs.record(ino).unwrap().writers, 0);
    assert_eq!((fs.attr(ino).ctime_ns > before.ctime_ns, cut_of(&fs, ino)), (true, None));
    let ctime = fs.attr(ino).ctime_ns;
    assert_eq!(fs.one(Op::Open(pb::Open { ino, flags: 0 })).writer, 0, "readers are not on record");
    let third = fs.one(open(ino)).writer;
    fs.one(release(ino, third, false));
    assert_eq!(fs.attr(ino).ctime_ns, ctime, "an open is no change of the file");
    // Something that no longer exists is no reason to fail a list.
    fs.one(release(999, 5, true));
    let s = fs.session;
    fs.log(end(s, true));
    assert_eq!(cut_of(&fs, ino), None);
    fs.session = fs.open_session(1);
}

#[test]
fn a_writer_that_goes_silently_has_its_surplus_cut_behind_the_eviction() {
    let mut fs = Fs::new();
    let (dead, polite) = (fs.open_session(5), fs.open_session(6));
    let ino = fs.of_session(dead, |fs| {
        let ino = fs.create(ROOT, "f");
        fs.one(extend(ino, 4096));
        ino
    });
    fs.log(end(dead, true));
    let eviction = fs.ns.backlog().evicted_after(0)[0].number;
    assert_eq!(cut_of(&fs, ino), Some((4096, eviction)));
    let (_, trim, _) = fs.ns.backlog().trims(1).remove(0);
    assert!(trim.number > eviction);
    // A later shrink keeps the fence.
    fs.one(mk_size(ino, 10));
    assert_eq!(cut_of(&fs, ino), Some((10, eviction)));
    let number = fs.record(ino).unwrap().trim.unwrap().number;
    fs.log(Command::TrimDone(pb::TrimDone { ino, number }));
    assert_eq!(cut_of(&fs, ino), None);
    // A session that says goodbye with the file open, and one whose write failed: trimmed, too,
    // with no session to fence.
    fs.of_session(polite, |fs| fs.one(open(ino)));
    fs.log(end(polite, false));
    assert_eq!(cut_of(&fs, ino), Some((10, 0)));
    let number = fs.record(ino).unwrap().trim.unwrap().number;
    fs.log(Command::TrimDone(pb::TrimDone { ino, number }));
    let writer = fs.one(open(ino)).writer;
    fs.one(release(ino, writer, true));
    assert_eq!(cut_of(&fs, ino), Some((10, 0)));
}

#[test]
fn living_writers_keep_their_unreported_bytes() {
    let mut fs = Fs::new();
    let (dead, alive) = (fs.open_session(5), fs.open_session(6));
    let ino = fs.of_session(dead, |fs| fs.create(ROOT, "f"));
    let writer = fs.of_session(alive, |fs| fs.one(open(ino)).writer);
    assert_eq!(fs.record(ino).unwrap().writers, 2);
    fs.log(end(dead, true));
    assert_eq!((fs.record(ino).unwrap().writers, cut_of(&fs, ino)), (1, None));
    let eviction = fs.ns.backlog().evicted_after(0)[0].number;
    fs.of_session(alive, |fs| {
        fs.one(extend(ino, 1 << 20));
        fs.one(release(ino, writer, false));
    });
    assert_eq!(
        cut_of(&fs, ino),
        Some((1 << 20, eviction)),
        "cut once the last writer has reported its end"
    );
    assert!(!fs.record(ino).unwrap().surplus);
}

/// A file that another session also writes when its maker is evicted; returns the eviction, the
/// other session and the number of its open.
fn left_beside(fs: &mut Fs, mode: u32) -> (Ino, u64, u64, u64) {
    let (dead, alive) = (fs.open_session(5), fs.open_session(6));
    let ino = fs.of_session(dead, |fs| {
        let ino = fs.create(ROOT, "f");
        fs.one(extend(ino, 100));
        fs.one(Op::Setattr(pb::SetAttr { ino, mode: Some(mode), ..Default::default() }));
        ino
    });
    let writer = fs.of_session(alive, |fs| fs.one(open(ino)).writer);
    fs.log(end(dead, true));
    (ino, fs.ns.backlog().evicted_after(0).last().unwrap().number, alive, writer)
}

impl Fs {
    /// The result of an end that was found.
    fn found(&mut self, ino: Ino, fence: u64, change: u64, end: u64) -> Option<Code> {
        let reply = self.log(Command::EndFound(pb::EndFound { ino, fence, change, end }));
        code_of(reply.status.as_ref())
    }
}

#[test]
fn an_end_that_is_found_is_the_end_and_what_is_there_stays() {
    let mut fs = Fs::new();
    let (ino, fence, alive, writer) = left_beside(&mut fs, 0o4755);
    let before = fs.record(ino).unwrap();
    let getattr = op(Op::Getattr(pb::GetAttr { ino }));
    let endless =
        |fs: &Fs| fs.ns.read_at(0, &creds(0), std::slice::from_ref(&getattr)).unwrap().endless;
    assert_eq!(
        (before.fence, before.surplus, fs.ns.backlog().endless(ino).unwrap().is_some()),
        (fence, true, true)
    );
    assert_eq!(
        (endless(&fs), fs.ns.survey(|s| s.ends).unwrap()),
        ([ino].into(), vec![(ino, fence)])
    );
    assert_eq!(fs.found(ino, fence, before.attr().change, 5_000), None);
    let told = fs.effects.last().unwrap();
    assert_eq!(
        (told.session, &told.changed, told.named.len()),
        (0, &[ino].into(), 0),
        "all who hold a lease are told"
    );
    let (r, a) = (fs.record(ino).unwrap(), fs.attr(ino));
    assert_eq!((a.size, a.sparse, a.mode & 0o7777, r.written), (5_000, true, 0o755, true));
    assert!(a.mtime_ns > before.attr().mtime_ns && a.change == before.attr().change + 1);
    assert_eq!((r.fence, fs.ns.backlog().endless(ino).unwrap().is_some()), (0, false));
    assert_eq!(
        (endless(&fs), fs.ns.survey(|s| (s.ends, s.fences)).unwrap()),
        ([].into(), (vec![], vec![]))
    );
    // It was done: it cannot be done again.
    for change in [before.attr().change, a.change] {
        assert_eq!(fs.found(ino, fence, change, 9_000), Some(Code::Stale));
        assert_eq!(fs.found(ino, 0, change, 9_000), Some(Code::Stale));
    }
    assert_eq!(fs.attr(ino).size, 5_000);
    // A failed write of another session may have left something: trimmed when the last writer
    // leaves, and only beyond the end.
    fs.of_session(alive, |fs| fs.one(release(ino, writer, false)));
    assert_eq!(cut_of(&fs, ino), Some((5_000, 0)));
}

#[test]
fn what_a_write_undoes_is_set_when_the_end_is_known() {
    let mut fs = Fs::new();
    let (ino, fence, ..) = left_beside(&mut fs, 0o644);
    let set = |o: pb::SetAttr| Op::Setattr(pb::SetAttr { ino, ..o });
    let sets = [
        set(pb::SetAttr { mtime_ns: Some(7), ..Default::default() }),
        set(pb::SetAttr { mode: Some(0o4755), ..Default::default() }),
        Op::Setxattr(pb::SetXattr {
            ino,
            name: b"security.capability".as_slice().into(),
            value: b"c".as_slice().into(),
            flags: 0,
        }),
    ];
    let before = fs.record(ino).unwrap();
    let numbered = |fs: &mut Fs, o| {
        fs.seq += 1;
        let (session, seq, creds) = (fs.session, fs.seq, Some(fs.creds.clone()));
        Command::Meta(pb::MetaRequest {
            session,
            seq,
            creds,
            ops: vec![op(o)],
            ends_matter: true,
            ..Default::default()
        })
    };
    let requests = sets.map(|o| numbered(&mut fs, o));
    for r in &requests {
        let reply = fs.log(r.clone());
        assert_eq!(
            (code_of(reply.status.as_ref()), reply.reply),
            (Some(Code::Overloaded), None),
            "{r:?}"
        );
    }
    assert_eq!(fs.record(ino).unwrap(), before);
    // An entry of a leader from before this rule keeps its old effect on every member.
    let Command::Meta(old) =
        numbered(&mut fs, set(pb::SetAttr { mtime_ns: Some(5), ..Default::default() }))
    else {
        unreachable!()
    };
    let reply = fs.log(Command::Meta(pb::MetaRequest { ends_matter: false, ..old }));
    assert_eq!(code_of(reply.status.as_ref()), None);
    assert_eq!(fs.record(ino).unwrap().attr().mtime_ns, 5);
    // Attributes that a write does not change, and what it sets itself, need no wait.
    let rest = set(pb::SetAttr {
        mode: Some(0o600),
        atime_ns: Some(3),
        mtime_now: true,
        ..Default::default()
    });
    let rest = numbered(&mut fs, rest);
    assert_eq!(fs.log(rest).status, None);
    assert_eq!(fs.attr(ino).mode & 0o7777, 0o600);
    let change = fs.attr(ino).change;
    assert_eq!(fs.found(ino, fence, change, 5_000), None);
    // Under the same numbers.
    for r in requests {
        assert_eq!(fs.log(r).status, None);
    }
    let (a, r) = (fs.attr(ino), fs.record(ino).unwrap());
    assert_eq!((a.size, a.mtime_ns, a.mode & 0o7777, r.xattrs), (5_000, 7, 0o4755, 1));
}

#[test]
fn an_end_that_was_seen_before_a_change_or_an_eviction_is_refused() {
    let mut fs = Fs::new();
    let (ino, fence, alive, _) = left_beside(&mut fs, 0o644);
    let seen = fs.attr(ino).change;
    // Another one is evicted meanwhile, which changes nothing that clients see.
    let third = fs.open_session(7);
    fs.of_session(third, |fs| fs.one(open(ino)));
    fs.log(end(third, true));
    let last = fs.ns.backlog().evicted_after(fence)[0].number;
    assert_eq!(
        (fs.attr(ino).change, fs.effects.iter().flat_map(|e| e.ends.clone()).next()),
        (seen, Some((ino, last)))
    );
    assert_eq!(fs.found(ino, fence, seen, 5_000), Some(Code::Stale));
    // It is truncated.
    fs.of_session(alive, |fs| fs.one(mk_size(ino, 10)));
    assert_eq!(fs.found(ino, last, seen, 5_000), Some(Code::Stale));
    assert_eq!((fs.attr(ino).size, fs.record(ino).unwrap().fence), (10, last));
    // There is nothing beyond, or not as far: no change, and no client must forget anything.
    let change = fs.attr(ino).change;
    assert_eq!(fs.found(ino, last, change, 10), None);
    assert_eq!(
        (fs.attr(ino).change, fs.attr(ino).size, fs.record(ino).unwrap().fence),
        (change, 10, 0)
    );
    assert!(fs.effects.iter().all(|e| e.changed.is_empty()));
    assert_eq!(fs.found(99, last, change, 10), Some(Code::NoEnt));
}

#[test]
fn an_end_that_cannot_be_is_refused_and_looked_for_again() {
    let mut fs = Fs::new();
    let (ino, fence, ..) = left_beside(&mut fs, 0o644);
    let change = fs.attr(ino).change;
    assert_eq!(fs.found(ino, fence, change, u64::MAX), Some(Code::FBig));
    assert_eq!((fs.attr(ino).size, fs.record(ino).unwrap().fence), (100, fence));
}

#[test]
fn nothing_is_to_be_found_where_everybody_has_left() {
    let mut fs = Fs::new();
    let (ino, fence, alive, writer) = left_beside(&mut fs, 0o644);
    let change = fs.attr(ino).change;
    fs.of_session(alive, |fs| fs.one(release(ino, writer, false)));
    assert_eq!(
        (cut_of(&fs, ino), fs.ns.backlog().endless(ino).unwrap()),
        (Some((100, fence)), None)
    );
    assert_eq!(fs.found(ino, fence, change, 5_000), Some(Code::Stale));
    assert_eq!(fs.attr(ino).size, 100);
    assert_eq!(fs.ns.survey(|s| (s.ends, s.fences)).unwrap(), (vec![], vec![(ino, fence)]));
}

/// A member that gets the state from another one continues as that one does.
#[test]
fn a_copy_of_the_state_has_the_ends_that_are_to_be_found() {
    let mut fs = Fs::new();
    let (ino, fence, ..) = left_beside(&mut fs, 0o644);
    let change = fs.attr(ino).change;
    fs.ns.reload().unwrap();
    assert_eq!(fs.ns.survey(|s| s.ends).unwrap(), [(ino, fence)]);
    assert_eq!(fs.found(ino, fence, change, 300), None);
    fs.ns.reload().unwrap();
    assert_eq!((fs.attr(ino).size, fs.ns.backlog().endless(ino).unwrap()), (300, None));
}

#[test]
fn a_new_client_reports_its_dead_predecessors() {
    let mut fs = Fs::new();
    let dead = fs.open_session(5);
    let ino = fs.of_session(dead, |fs| fs.create(ROOT, "f"));
    let open = |dead: Vec<Bytes>| {
        Command::SessionOpen(pb::SessionOpenRequest {
            client_uuid: vec![8; 16].into(),
            dead,
            ..Default::default()
        })
    };
    let too_many = fs.log(open(vec![Bytes::from_static(&[9; 16]); 65]));
    assert_eq!(code_of(too_many.status.as_ref()), Some(Code::Inval));
    // Unknown ones and its own are ignored.
    let uuids = [5u8, 77, 8].map(|n| Bytes::from(vec![n; 16])).to_vec();
    let reply = fs.log(open(uuids.clone()));
    assert_eq!(reply.status, None);
    assert!(fs.ns.session(dead).is_none() && fs.ns.backlog().evicted_after(0).len() == 1);
    assert!(cut_of(&fs, ino).is_some_and(|(size, fence)| size == 0 && fence > 0));
    // The same request again resumes the session.
    assert_eq!(fs.log(open(uuids)), reply);
    assert_eq!(fs.ns.backlog().evicted_after(0).len(), 1);
}
