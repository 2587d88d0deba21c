//! Locks as state: conflicts, splits, what the end of a session and of a file drops, bounds.

use super::{random::Dice, *};
use crate::namespace::locks::{MAX_IN_FILE, MAX_OF_SESSION};
use pb::{LockKind, LockType};
use strake_store::{Batch, MetaStore};

const END: u64 = u64::MAX;

fn set(ino: Ino, owner: u64, kind: LockKind, r#type: LockType, start: u64, end: u64) -> Op {
    let span = Some(pb::LockSpan { start, end, r#type: r#type as i32, pid: 7 });
    Op::SetLock(pb::SetLock {
        ino,
        owner,
        kind: kind as i32,
        span,
        undo: true,
        ..Default::default()
    })
}
fn read(ino: Ino, owner: u64, start: u64, end: u64) -> Op {
    set(ino, owner, LockKind::LockPosix, LockType::LockRead, start, end)
}
fn write(ino: Ino, owner: u64, start: u64, end: u64) -> Op {
    set(ino, owner, LockKind::LockPosix, LockType::LockWrite, start, end)
}
fn unlock(ino: Ino, owner: u64, start: u64, end: u64) -> Op {
    set(ino, owner, LockKind::LockPosix, LockType::LockUnlock, start, end)
}
fn flock(ino: Ino, owner: u64, r#type: LockType) -> Op {
    set(ino, owner, LockKind::LockFlock, r#type, 0, END)
}

impl Fs {
    fn in_session<T>(&mut self, session: u64, f: impl FnOnce(&mut Fs) -> T) -> T {
        let before = std::mem::replace(&mut self.session, session);
        let out = f(self);
        self.session = before;
        out
    }

    /// The lock that conflicts with a write lock of this range.
    fn in_the_way(
        &mut self,
        ino: Ino,
        owner: u64,
        start: u64,
        end: u64,
    ) -> Option<(u64, u64, u64, i32)> {
        let span = Some(pb::LockSpan { start, end, r#type: LockType::LockWrite as i32, pid: 0 });
        let get = pb::GetLock { ino, owner, kind: LockKind::LockPosix as i32, span };
        let lock = self.one(Op::GetLock(get)).lock?;
        Some((lock.session, lock.spans[0].start, lock.spans[0].end, lock.spans[0].r#type))
    }
}

#[test]
fn locks_of_pages_meet_no_others_and_are_unknown_to_entries_of_before() {
    let mut fs = Fs::new();
    let (f, other) = (fs.create(ROOT, "f"), fs.open_session(2));
    let pages = |r#type| set(f, 1, LockKind::LockPages, r#type, 0, END);
    fs.rules = 1;
    fs.fails(pages(LockType::LockWrite), Code::Inval);
    assert!(fs.ns.header().format_version < 7);
    fs.rules = RULES;
    fs.one(write(f, 2, 0, END));
    fs.one(pages(LockType::LockRead));
    assert_eq!(fs.ns.header().format_version, 7);
    let first = fs.session;
    let others = |fs: &Fs, of| fs.ns.pages_of_others(f, of).unwrap();
    assert!(!others(&fs, first) && others(&fs, other));
    fs.in_session(other, |fs| {
        fs.one(pages(LockType::LockRead));
        fs.fails(pages(LockType::LockWrite), Code::LockConflict);
    });
    fs.one(pages(LockType::LockUnlock));
    assert!(others(&fs, first) && !others(&fs, other));
    fs.in_session(other, |fs| fs.one(pages(LockType::LockWrite)));
    fs.fails(pages(LockType::LockRead), Code::LockConflict);
}

#[test]
fn owners_exclude_each_other_by_ranges() {
    let mut fs = Fs::new();
    let (f, other) = (fs.create(ROOT, "f"), fs.open_session(2));
    fs.one(write(f, 1, 10, 19));
    fs.one(read(f, 1, 20, 29));
    fs.fails(write(f, 2, 15, 15), Code::LockConflict);
    fs.fails(write(f, 2, 25, END), Code::LockConflict);
    fs.one(read(f, 2, 20, END));
    fs.one(write(f, 2, 0, 9));
    let first = fs.session;
    fs.in_session(other, |fs| {
        // The same owner number of another client is another owner.
        fs.fails(read(f, 1, 0, 100), Code::LockConflict);
        assert_eq!(fs.in_the_way(f, 1, 5, 100), Some((first, 0, 9, 2)));
        assert_eq!(fs.in_the_way(f, 1, 100, 100), Some((first, 20, END, 1)));
        fs.one(read(f, 1, 25, END));
    });
    assert_eq!(fs.in_the_way(f, 2, 0, 9), None, "its own are not in the way");
    // The replaced ranges are reported, clipped, for an owner that gives up.
    fs.fails(write(f, 1, 15, 24), Code::LockConflict);
    let replaced = fs.one(read(f, 1, 15, 24)).lock.unwrap();
    assert_eq!(
        replaced.spans.iter().map(|s| (s.start, s.end, s.r#type)).collect::<Vec<_>>(),
        [(15, 19, 2), (20, 24, 1)]
    );
    assert_eq!(fs.ns.locks_of(f).unwrap().held.len(), 3);
    let left = |fs: &mut Fs, op| fs.one(op).lock.unwrap().left;
    assert_eq!(left(&mut fs, unlock(f, 1, 12, 12)), 3, "10-11 w, 13-14 w, 15-29 r");
    assert_eq!(left(&mut fs, unlock(f, 1, 0, END)), 0);
    assert_eq!(left(&mut fs, unlock(f, 1, 0, END)), 0);
    assert_eq!(fs.ns.locked_by(fs.session), 2);
    assert_eq!((fs.ns.locked_by(other), fs.ns.locked_by(0)), (1, 3));
}

#[test]
fn flock_and_posix_locks_do_not_see_each_other() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    fs.one(flock(f, 1, LockType::LockWrite));
    fs.one(write(f, 2, 0, END));
    fs.fails(flock(f, 2, LockType::LockRead), Code::LockConflict);
    fs.one(flock(f, 1, LockType::LockRead));
    fs.one(flock(f, 2, LockType::LockRead));
    fs.fails(flock(f, 1, LockType::LockWrite), Code::LockConflict);
    fs.one(flock(f, 2, LockType::LockUnlock));
    fs.one(flock(f, 1, LockType::LockWrite));
}

#[test]
fn what_cannot_be_a_lock_is_refused_and_changes_nothing() {
    let mut fs = Fs::new();
    let (f, d) = (fs.create(ROOT, "f"), fs.mkdir(ROOT, "d"));
    fs.fails(read(f, 1, 5, 4), Code::Inval);
    fs.fails(set(f, 1, LockKind::LockFlock, LockType::LockRead, 0, 9), Code::Inval);
    fs.fails(read(d, 1, 0, 1), Code::Inval);
    fs.fails(read(999, 1, 0, 1), Code::NoEnt);
    fs.one(unlock(999, 1, 0, END));
    let none = pb::SetLock { ino: f, owner: 1, ..Default::default() };
    fs.fails(Op::SetLock(none), Code::Inval);
    let span = Some(pb::LockSpan { r#type: 9, ..Default::default() });
    fs.fails(Op::SetLock(pb::SetLock { ino: f, span, ..Default::default() }), Code::Inval);
    fs.fails(Op::SetLock(pb::SetLock { ino: f, kind: 2, span, ..Default::default() }), Code::Inval);
    assert_eq!(fs.ns.locked_by(0), 0);
    assert_eq!(fs.ns.header().format_version, 1, "an older program can still read it");
    fs.one(read(f, 1, 0, 1));
    assert_eq!(fs.ns.header().format_version, 7);
    let mut fs = Fs::new();
    fs.rules = 2;
    let f = fs.create(ROOT, "f");
    fs.one(read(f, 1, 0, 1));
    assert_eq!(fs.ns.header().format_version, 2);
}

#[test]
fn the_end_of_a_session_drops_its_locks_in_the_same_entry() {
    for evict in [false, true] {
        let mut fs = Fs::new();
        let (f, g, other) = (fs.create(ROOT, "f"), fs.create(ROOT, "g"), fs.open_session(2));
        fs.in_session(other, |fs| {
            fs.one(write(f, 1, 0, 9));
            fs.one(write(f, 2, 20, 29));
            fs.one(flock(g, 3, LockType::LockWrite));
        });
        fs.one(write(f, 1, 100, END));
        fs.fails(flock(g, 1, LockType::LockRead), Code::LockConflict);
        assert_eq!(
            fs.log(Command::SessionEnd(pb::SessionEnd { sessions: vec![other], evict })).status,
            None
        );
        let number = fs.ns.backlog().evicted_after(0).last().map_or(0, |e| e.number);
        assert_eq!(number != 0, evict);
        assert_eq!(
            (fs.ns.locks_of(f).unwrap().fence, fs.ns.locks_of(g).unwrap().fence),
            (number, number)
        );
        assert_eq!((fs.ns.locked_by(0), fs.ns.locked_by(other)), (1, 0));
        fs.one(unlock(f, 1, 200, END));
        assert_eq!(fs.ns.locks_of(f).unwrap().fence, number, "an unlock gives nobody anything");
        fs.one(write(f, 1, 0, END));
        assert_eq!(fs.ns.locks_of(f).unwrap().fence, 0, "whoever let it be given has waited");
        fs.one(flock(g, 1, LockType::LockRead));
    }
}

#[test]
fn locks_outlive_a_restart_and_go_with_the_file() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    fs.one(read(f, 1, 0, 9));
    fs.one(write(f, 2, 10, 19));
    fs.ns = Namespace::open(std::sync::Arc::new(fs.store.clone())).unwrap();
    fs.fails(read(f, 3, 10, 10), Code::LockConflict);
    fs.one(mk_unlink(ROOT, "f"));
    fs.fails(read(f, 3, 10, 10), Code::LockConflict);
    assert_eq!(fs.log(Command::FreeOrphans(pb::FreeOrphans { inos: vec![f] })).status, None);
    assert_eq!(fs.ns.locked_by(0), 0);
    assert!(
        dump(&fs.store)
            .iter()
            .all(|(k, _)| ![keys::LOCK, keys::LOCK_TOTAL, keys::LOCK_INDEX].contains(&k[0]))
    );
}

#[test]
fn ranges_are_bounded_and_unlocks_have_room_of_their_own() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    let many = |at: u64, n: u64| {
        (0..n).map(|i| op(read(f, 1 + at % 7, 2 * (at + i), 2 * (at + i)))).collect::<Vec<_>>()
    };
    for at in (0..MAX_IN_FILE).step_by(512) {
        assert!(fs.list(many(at, 512)).iter().all(|r| r.status.is_none()));
    }
    assert_eq!(fs.ns.locked_by(0), MAX_IN_FILE);
    fs.fails(read(f, 99, 1 << 40, 1 << 40), Code::NoLock);
    // More of the same is not more ranges.
    fs.one(read(f, 1, 0, 0));
    fs.one(unlock(f, 1, 0, END));
    fs.one(write(f, 50, 1 << 40, END));
    // An unlock in the middle makes one more, and may, though a lock could not.
    let room = MAX_IN_FILE - fs.ns.locked_by(0);
    for i in 0..room {
        fs.one(write(f, 51 + i % 3, (1 << 30) + 2 * i, (1 << 30) + 2 * i));
    }
    fs.fails(write(f, 52, 0, 0), Code::NoLock);
    for i in 0..MAX_IN_FILE {
        fs.one(unlock(f, 50, (1 << 41) + 2 * i, (1 << 41) + 2 * i));
    }
    fs.fails(unlock(f, 50, 1 << 50, 1 << 50), Code::NoLock);
    fs.one(unlock(f, 50, 0, END));
    // Of a session, over all files; as if it had locked so many elsewhere.
    (51..54).for_each(|owner| drop(fs.one(unlock(f, owner, 0, END))));
    let total = keys::lock_total(fs.session, 0);
    let elsewhere = |ranges| pb::LockTotal { ranges, ..Default::default() }.encode_to_vec().into();
    let commit = |fs: &Fs, v| fs.store.commit(Batch { ops: vec![(total.clone(), v)] }).unwrap();
    let real = fs.ns.locked_by(fs.session);
    commit(&fs, Some(elsewhere(MAX_OF_SESSION - 1)));
    fs.one(write(f, 1, 0, 0));
    fs.fails(write(f, 1, 2, 2), Code::NoLock);
    fs.one(write(f, 1, 1, 1));
    let other = fs.open_session(3);
    fs.in_session(other, |fs| fs.one(write(f, 1, 2, 2)));
    commit(&fs, Some(elsewhere(real + 1)));
}

/// The answer to a lock request. An owner's remaining ranges are counted fully only if there are
/// none, so only that is compared.
fn answer(r: Result<pb::OpResult, Code>) -> Result<Option<(Vec<pb::LockSpan>, u64, bool)>, Code> {
    r.map(|r| r.lock.map(|l| (l.spans, l.session, l.left == 0)))
}

#[test]
fn both_forms_of_locks_are_the_same_to_clients() {
    for seed in 0..40 {
        let mut d = Dice(seed);
        // In the first form, in the second, and converted in between.
        let mut all = [Fs::new(), Fs::new(), Fs::new()];
        let (mut f, mut sessions) = (0, [0; 2]);
        for fs in &mut all {
            f = fs.create(ROOT, "f");
            sessions = [fs.session, fs.open_session(2)];
        }
        let turn = 20 + d.below(40);
        for step in 0..120 {
            let rules = [2, 3, if step < turn { 2 } else { 3 }];
            let (owner, session) = (d.below(3), sessions[d.below(2) as usize]);
            let (a, b) = if d.one_in(3) {
                (d.below(1 << 40), d.below(1 << 40))
            } else {
                (d.below(60), d.below(60))
            };
            let (start, end) = (a.min(b), if d.one_in(8) { END } else { a.max(b) });
            let op = match d.below(7) {
                0 | 1 => read(f, owner, start, end),
                2 | 3 => write(f, owner, start, end),
                4 => flock(
                    f,
                    owner,
                    [LockType::LockRead, LockType::LockWrite, LockType::LockUnlock]
                        [d.below(3) as usize],
                ),
                _ => unlock(f, owner, start, end),
            };
            let seen: Vec<_> = all
                .iter_mut()
                .zip(rules)
                .map(|(fs, rules)| {
                    (fs.rules, fs.session) = (rules, session);
                    let done = answer(fs.try_one(op.clone()));
                    let way = fs.in_the_way(f, 9, start, end);
                    (done, way, fs.ns.locks_of(f).unwrap().held, fs.ns.locked_by(session))
                })
                .collect();
            assert_eq!(seen[0], seen[1], "seed {seed}, step {step}: {op:?}");
            assert_eq!(seen[0], seen[2], "seed {seed}, step {step}: {op:?}");
            if d.one_in(40) {
                let end = pb::SessionEnd { sessions: vec![sessions[1]], evict: d.one_in(2) };
                for fs in &mut all {
                    fs.log(Command::SessionEnd(end.clone()));
                    sessions[1] = fs.open_session(2);
                }
            }
        }
        let bytes: Vec<_> = all[1..].iter().map(|fs| dump(&fs.store)).collect();
        let locks = |d: &[(Bytes, Bytes)]| {
            d.iter().filter(|(k, _)| b"jl".contains(&k[0])).cloned().collect::<Vec<_>>()
        };
        assert_eq!(
            locks(&bytes[0]),
            locks(&bytes[1]),
            "seed {seed}: what was brought into the new form is as if made there"
        );
        all.iter_mut().for_each(|fs| fs.session = sessions[0]);
    }
}

#[test]
fn a_lock_among_thousands_writes_itself_alone() {
    let mut fs = Fs::new();
    let f = fs.create(ROOT, "f");
    for at in (0..4000).step_by(500) {
        let many: Vec<_> = (at..at + 500).map(|i| op(write(f, i % 5, 4 * i, 4 * i + 1))).collect();
        assert!(fs.list(many).iter().all(|r| r.status.is_none()), "at {at}");
    }
    let before: BTreeSet<_> = dump(&fs.store).into_iter().collect();
    fs.one(write(f, 3, 50_000, 50_001));
    let written: usize = dump(&fs.store)
        .iter()
        .filter(|p| !before.contains(p))
        .map(|(k, v)| k.len() + v.len())
        .sum();
    assert!(written < 1000, "{written} bytes");
    fs.fails(write(f, 4, 9, 9), Code::LockConflict);
    fs.fails(read(f, 4, 0, END), Code::LockConflict);
    fs.one(write(f, 4, 10, 11));
}
