//! Histories for which it is known whether they are linearizable.

use strake_histories::{
    Answer, Attr, Errno, Head, History, How, Ino, Op, Outcome, Record, Verdict, check,
    explain::{explain, first_impossible},
    search::LIMIT,
};

const ROOT: Ino = 10;

/// One operation: client, call, answer, and what it was.
type Told = (u32, u64, u64, Op, Outcome);

fn history(told: &[Told]) -> History {
    let head = Head { source: "a test".into(), roots: vec![ROOT], kernel: false };
    let record = |(client, call, reply, op, outcome): &Told| Record {
        client: *client,
        call: *call,
        reply: *reply,
        op: op.clone(),
        outcome: outcome.clone(),
    };
    History { head, records: told.iter().map(record).collect() }
}

fn holds(told: &[Told]) {
    let h = history(told);
    let verdict = check(&h, LIMIT);
    assert!(verdict.is_linearizable(), "{}", explain(&h, &verdict, LIMIT));
}

fn fails(told: &[Told]) {
    let verdict = check(&history(told), LIMIT);
    assert!(verdict.is_rejected(), "{verdict:?}");
}

fn create(name: &str) -> Op {
    Op::Create { dir: ROOT, name: name.into(), exclusive: true }
}
fn open(name: &str) -> Op {
    Op::Create { dir: ROOT, name: name.into(), exclusive: false }
}
fn mkdir(name: &str) -> Op {
    Op::Mkdir { dir: ROOT, name: name.into() }
}
fn lookup(name: &str) -> Op {
    Op::Lookup { dir: ROOT, name: name.into() }
}
fn unlink(name: &str) -> Op {
    Op::Unlink { dir: ROOT, name: name.into() }
}
fn rmdir(name: &str) -> Op {
    Op::Rmdir { dir: ROOT, name: name.into() }
}
fn link(ino: Ino, name: &str) -> Op {
    Op::Link { ino, dir: ROOT, name: name.into() }
}
fn rename(from: &str, to: &str, how: How) -> Op {
    Op::Rename { dir: ROOT, name: from.into(), to_dir: ROOT, to_name: to.into(), how }
}
fn chmod(ino: Ino, mode: u32) -> Op {
    Op::Chmod { ino, mode }
}
fn stat(ino: Ino) -> Op {
    Op::Getattr { ino }
}
fn list() -> Op {
    Op::Readdir { dir: ROOT }
}
fn inode(ino: Ino) -> Outcome {
    Outcome::Done(Answer::Inode { ino, attr: None })
}
fn file(ino: Ino, nlink: u32, mode: u32) -> Outcome {
    Outcome::Done(Answer::Inode { ino, attr: Some(Attr { dir: false, nlink, mode }) })
}
fn dir(ino: Ino, nlink: u32) -> Outcome {
    Outcome::Done(Answer::Inode { ino, attr: Some(Attr { dir: true, nlink, mode: 0o755 }) })
}
fn names(all: &[(&str, Ino)]) -> Outcome {
    Outcome::Done(Answer::Names(all.iter().map(|(n, i)| (n.to_string(), *i)).collect()))
}
fn done() -> Outcome {
    Outcome::Done(Answer::Done)
}
fn no(errno: Errno) -> Outcome {
    Outcome::Failed(errno)
}
fn unknown() -> Outcome {
    Outcome::Unknown("no answer".into())
}

#[test]
fn one_after_the_other_it_is_a_file_system() {
    holds(&[
        (1, 1, 2, create("a"), file(20, 1, 0o644)),
        (1, 3, 4, create("a"), no(Errno::Exist)),
        (1, 5, 6, open("a"), inode(20)),
        (1, 7, 8, link(20, "b"), file(20, 2, 0o644)),
        (1, 9, 10, chmod(20, 0o600), file(20, 2, 0o600)),
        (1, 11, 12, rename("a", "b", How::Replace), done()),
        (1, 13, 14, list(), names(&[("b", 20), ("a", 20)])),
        (1, 15, 16, rename("a", "c", How::NoReplace), done()),
        (1, 17, 18, rename("b", "c", How::NoReplace), no(Errno::Exist)),
        (1, 19, 20, unlink("b"), done()),
        (1, 21, 22, stat(20), file(20, 1, 0o600)),
        (1, 23, 24, mkdir("s"), dir(21, 2)),
        (1, 25, 26, stat(ROOT), dir(ROOT, 3)),
        (1, 27, 28, rename("s", "c", How::Replace), no(Errno::NotDir)),
        (1, 29, 30, rename("c", "s", How::Replace), no(Errno::IsDir)),
        (1, 31, 32, rename("c", "s", How::Exchange), done()),
        (1, 33, 34, lookup("s"), file(20, 1, 0o600)),
        (1, 35, 36, rename("s", "x", How::Exchange), no(Errno::NoEnt)),
        (1, 37, 38, Op::Create { dir: 21, name: "a".into(), exclusive: true }, file(22, 1, 0o644)),
        (1, 39, 40, rmdir("c"), no(Errno::NotEmpty)),
        (
            1,
            41,
            42,
            Op::Rename {
                dir: ROOT,
                name: "c".into(),
                to_dir: 21,
                to_name: "d".into(),
                how: How::Replace,
            },
            no(Errno::Inval),
        ),
        (1, 43, 44, Op::Unlink { dir: 21, name: "a".into() }, done()),
        (1, 45, 46, rmdir("c"), done()),
        (1, 47, 48, Op::Mkdir { dir: 21, name: "e".into() }, no(Errno::NoEnt)),
        (1, 49, 50, link(21, "e"), no(Errno::NoEnt)),
        (1, 51, 52, unlink("s"), done()),
        (1, 53, 54, stat(20), no(Errno::NoEnt)),
        (1, 55, 56, list(), names(&[])),
    ]);
}

#[test]
fn what_overlaps_may_be_in_either_order() {
    for seen in [no(Errno::NoEnt), inode(20)] {
        holds(&[(1, 1, 4, create("a"), inode(20)), (2, 2, 3, lookup("a"), seen)]);
    }
    // Two clients create the same name: only one may succeed.
    holds(&[(1, 1, 3, create("a"), inode(20)), (2, 2, 4, create("a"), no(Errno::Exist))]);
    fails(&[(1, 1, 3, create("a"), inode(20)), (2, 2, 4, create("a"), inode(21))]);
    fails(&[(1, 1, 3, create("a"), no(Errno::Exist)), (2, 2, 4, create("a"), no(Errno::Exist))]);
}

#[test]
fn a_stale_read_is_rejected() {
    let begin = [(1, 1, 2, create("a"), inode(20)), (2, 3, 4, lookup("a"), inode(20))];
    let with = |rest: &[Told]| [&begin[..], rest].concat();
    fails(&with(&[(1, 5, 6, unlink("a"), done()), (2, 7, 8, lookup("a"), inode(20))]));
    holds(&with(&[(1, 5, 8, unlink("a"), done()), (2, 6, 7, lookup("a"), inode(20))]));
    fails(&with(&[(1, 5, 6, chmod(20, 0o600), done()), (2, 7, 8, stat(20), file(20, 1, 0o644))]));
    fails(&with(&[(1, 5, 6, link(20, "b"), done()), (2, 7, 8, stat(20), file(20, 1, 0o644))]));
    fails(&with(&[(1, 5, 6, create("b"), inode(21)), (2, 7, 8, list(), names(&[("a", 20)]))]));
    // Once a client was told of the change, no client may be told of the state before, even if the
    // change is not answered yet.
    fails(&with(&[
        (1, 5, 20, unlink("a"), done()),
        (2, 6, 7, lookup("a"), no(Errno::NoEnt)),
        (3, 8, 9, lookup("a"), inode(20)),
    ]));
}

#[test]
fn an_operation_that_runs_twice_is_rejected() {
    // The second run of the unlink removes the second file.
    fails(&[
        (1, 1, 2, create("a"), inode(20)),
        (1, 3, 4, unlink("a"), done()),
        (2, 5, 6, create("a"), inode(21)),
        (2, 7, 8, lookup("a"), no(Errno::NoEnt)),
    ]);
    // The rename runs a second time after its source was created again.
    fails(&[
        (1, 1, 2, create("a"), inode(20)),
        (1, 3, 4, rename("a", "b", How::Replace), done()),
        (2, 5, 6, create("a"), inode(21)),
        (2, 7, 8, lookup("b"), inode(21)),
    ]);
    // The answer of the second run instead of that of the first.
    fails(&[(1, 1, 2, create("a"), no(Errno::Exist)), (2, 3, 4, lookup("a"), inode(20))]);
    fails(&[
        (1, 1, 2, create("a"), inode(20)),
        (1, 3, 4, unlink("a"), no(Errno::NoEnt)),
        (1, 5, 6, lookup("a"), no(Errno::NoEnt)),
    ]);
}

#[test]
fn what_nobody_knows_of_ran_once_at_any_later_time_or_never() {
    let lost = (1, 1, 2, create("a"), unknown());
    holds(&[lost.clone(), (2, 3, 4, lookup("a"), no(Errno::NoEnt))]);
    holds(&[
        lost.clone(),
        (2, 3, 4, lookup("a"), no(Errno::NoEnt)),
        (2, 5, 6, lookup("a"), file(20, 1, 0o644)),
    ]);
    // It made one inode, which no other operation made.
    fails(&[lost.clone(), (2, 3, 4, lookup("a"), inode(20)), (2, 5, 6, lookup("a"), inode(21))]);
    fails(&[
        (2, 1, 2, create("b"), inode(20)),
        (1, 1, 2, create("a"), unknown()),
        (2, 3, 4, lookup("a"), inode(20)),
    ]);
    // It does not run twice.
    fails(&[
        lost.clone(),
        (2, 3, 4, lookup("a"), inode(20)),
        (2, 5, 6, unlink("a"), done()),
        (2, 7, 8, lookup("a"), inode(20)),
    ]);
    // It does not run before it was called.
    fails(&[(2, 1, 2, lookup("a"), inode(20)), (1, 3, 4, create("a"), unknown())]);
    // An operation that was not answered and that no later answer shows explains nothing either.
    fails(&[(1, 1, 2, unlink("a"), unknown()), (2, 3, 4, create("a"), no(Errno::Exist))]);
}

#[test]
fn a_number_is_given_out_once() {
    fails(&[
        (1, 1, 2, create("a"), inode(20)),
        (1, 3, 4, unlink("a"), done()),
        (1, 5, 6, create("a"), inode(20)),
    ]);
    fails(&[
        (1, 1, 2, create("a"), inode(20)),
        (1, 3, 4, unlink("a"), done()),
        (1, 5, 6, open("a"), inode(20)),
    ]);
}

#[test]
fn a_rename_is_one_step() {
    let begin =
        [(1, 1, 2, create("a"), inode(20)), (1, 3, 10, rename("a", "b", How::Replace), done())];
    let with = |rest: &[Told]| [&begin[..], rest].concat();
    holds(&with(&[(2, 4, 5, lookup("a"), inode(20)), (2, 6, 7, lookup("b"), inode(20))]));
    fails(&with(&[
        (2, 4, 5, lookup("a"), no(Errno::NoEnt)),
        (2, 6, 7, lookup("b"), no(Errno::NoEnt)),
    ]));
    fails(&with(&[(2, 4, 5, lookup("b"), inode(20)), (2, 6, 7, lookup("a"), inode(20))]));
    fails(&with(&[(2, 4, 5, list(), names(&[]))]));
    fails(&with(&[(2, 4, 5, list(), names(&[("a", 20), ("b", 20)]))]));
}

#[test]
fn by_way_of_linux_a_rename_may_find_one_inode_at_two_moments() {
    let told = [
        (1, 1, 2, create("a"), inode(20)),
        (1, 3, 4, link(20, "c"), done()),
        // It looks up `a`, then `b`.
        (1, 5, 10, rename("a", "b", How::Replace), done()),
        (2, 6, 7, unlink("a"), done()),
        (2, 8, 9, link(20, "b"), done()),
        (2, 11, 12, list(), names(&[("b", 20), ("c", 20)])),
    ];
    fails(&told);
    let mut h = history(&told);
    h.head.kernel = true;
    assert!(check(&h, LIMIT).is_linearizable());
    // Or another client has already done what this rename was to do.
    let mut told = [
        (1, 1, 2, create("a"), inode(20)),
        (1, 3, 10, rename("a", "b", How::Replace), done()),
        (2, 4, 9, rename("a", "b", How::NoReplace), done()),
        (1, 11, 12, list(), names(&[("b", 20)])),
    ];
    fails(&told);
    let by_linux = |told: &[Told]| {
        let mut h = history(told);
        h.head.kernel = true;
        check(&h, LIMIT)
    };
    assert!(by_linux(&told).is_linearizable());
    (told[1].1, told[1].2) = (10, 11);
    (told[3].1, told[3].2) = (12, 13);
    assert!(by_linux(&told).is_rejected(), "that one had been answered before");
    (told[1].1, told[1].2) = (5, 11);
    told[1].3 = rename("a", "c", How::Replace);
    assert!(by_linux(&told).is_rejected(), "to another name");
    // But no other case: the rename of a file with a single name is not lost.
    let mut h = history(&[
        (1, 1, 2, create("a"), inode(20)),
        (1, 3, 4, create("b"), inode(21)),
        (1, 5, 6, rename("a", "b", How::Replace), done()),
        (2, 7, 8, lookup("a"), inode(20)),
    ]);
    h.head.kernel = true;
    assert!(check(&h, LIMIT).is_rejected());
}

#[test]
fn what_cannot_be_decided_is_not_passed() {
    // Many operations that may or may not have run, and one that cannot be explained.
    let mut told: Vec<Told> =
        (0..40).map(|i| (i, 1, 2, chmod(ROOT, 0o700 + i), unknown())).collect();
    told.push((50, 3, 4, lookup("a"), inode(20)));
    assert!(matches!(check(&history(&told), 1000), Verdict::Undecided { .. }));
}

#[test]
fn the_explanation_names_the_first_answer_that_cannot_be() {
    let h = history(&[
        (1, 1, 2, create("a"), inode(20)),
        (1, 3, 4, unlink("a"), done()),
        (2, 5, 6, lookup("a"), inode(20)),
        (2, 7, 8, create("a"), inode(21)),
    ]);
    assert_eq!(first_impossible(&h, LIMIT).unwrap().0, 2);
    let text = explain(&h, &check(&h, LIMIT), LIMIT);
    for part in
        ["NOT LINEARIZABLE", "client 2 [5 6] look up 10/a: inode 20", "it would be refused: NoEnt"]
    {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn a_history_is_kept_as_it_was() {
    let h = history(&[
        (1, 1, 2, create("a"), file(20, 1, 0o644)),
        (2, 1, 3, rename("a", "b", How::Exchange), no(Errno::NoEnt)),
        (3, 2, u64::MAX, list(), names(&[("a", 20)])),
        (3, 4, 5, unlink("a"), unknown()),
    ]);
    let mut bytes = Vec::new();
    h.write(&mut bytes).unwrap();
    assert_eq!(bytes.iter().filter(|b| **b == b'\n').count(), 5);
    assert_eq!(History::read(&bytes[..]).unwrap(), h);
    assert!((h.overlap() - 0.75).abs() < f64::EPSILON, "{}", h.overlap());
}
