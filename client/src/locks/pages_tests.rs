use std::collections::{HashSet, VecDeque};

use super::*;

const F: Ino = 7;

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn begun(e: Enter) -> Use {
    match e {
        Enter::Begun(what) => what,
        other => panic!("{other:?}"),
    }
}

fn got(p: &mut Pages, now: Duration, mode: Mode, session: SessionId) -> Use {
    assert_eq!(p.enter(now, F, (mode, false), session), Enter::Ask);
    p.granted(now, F, mode, session);
    begun(p.enter(ms(0), F, (mode, false), session))
}

#[test]
fn nothing_is_asked_for_and_nothing_left_while_nobody_else_maps_a_file() {
    let mut p = Pages::default();
    let first = begun(p.enter(ms(0), F, (Mode::Write, true), 0));
    let second = begun(p.enter(ms(0), F, (Mode::Read, true), 0));
    assert_eq!((first, p.lasts(F, first)), (Use::Free, true));
    p.ended(ms(0), F, first);
    p.ended(ms(0), F, second);
    assert!(p.files.is_empty());
    assert_eq!(p.leave(ms(0), F, false), Leave::Done);
}

#[test]
fn who_wants_pages_waits_for_what_was_begun_before_and_for_nothing_later() {
    let mut p = Pages::default();
    let before = begun(p.enter(ms(0), F, (Mode::Write, true), 1));
    p.wanted(F);
    assert_eq!(p.leave(ms(0), F, false), Leave::Wait(None));
    assert_eq!(
        p.enter(ms(0), F, (Mode::Write, true), 1),
        Enter::Ask,
        "from now on the lock is needed"
    );
    assert_eq!(p.enter(ms(0), F, (Mode::Read, false), 1), Enter::Wait);
    p.ended(ms(1), F, before);
    assert!(!p.lasts(F, before));
    assert_eq!(
        p.leave(ms(1), F, false),
        Leave::Done,
        "who waits for the lock may wait for this answer"
    );
}

#[test]
fn pages_that_are_being_taken_back_are_known() {
    let mut p = Pages::default();
    assert!(!p.is_taking_back(F));
    p.takes_back(F);
    p.takes_back(F);
    p.took_back(F);
    assert!(p.is_taking_back(F));
    p.took_back(F);
    assert!(!p.is_taking_back(F) && p.files.is_empty());
    let what = got(&mut p, ms(0), Mode::Write, 1);
    p.ended(ms(0), F, what);
    assert!(!p.is_taking_back(F));
    assert_eq!((p.number(F, 1), p.number(F, 2)), (Some(1), None));
    assert!(matches!(p.leave(ms(0), F, true), Leave::Go(_)));
    assert!(p.is_taking_back(F) && p.number(F, 1) == Some(1), "it is still held");
    p.left(F);
    assert!(!p.is_taking_back(F) && p.number(F, 1).is_none());
    let what = got(&mut p, ms(0), Mode::Read, 1);
    p.ended(ms(0), F, what);
    assert!(matches!(p.leave(ms(0), F, true), Leave::Go(_)));
    assert!(!p.is_taking_back(F), "others may have such pages, too");
    p.left(F);
    assert!(p.leave_former(ms(0), F, 1));
    assert!(!p.is_taking_back(F) && p.number(F, 1).is_none());
}

#[test]
fn a_lock_is_kept_until_its_uses_are_over_and_for_a_moment() {
    let mut p = Pages::default();
    let what = got(&mut p, ms(100), Mode::Write, 1);
    p.wanted(F);
    assert_eq!(p.leave(ms(500), F, false), Leave::Wait(None));
    let other = begun(p.enter(ms(0), F, (Mode::Read, false), 1));
    p.ended(ms(500), F, what);
    p.ended(ms(505), F, other);
    assert_eq!(p.leave(ms(505), F, false), Leave::Wait(Some(ms(510))), "counted from the first");
    let mut other = p.clone();
    assert!(matches!(p.leave(ms(505), F, true), Leave::Go(_)), "this client itself need not wait");
    assert!(matches!(other.leave(ms(510), F, false), Leave::Go(_)));
    assert_eq!(p.enter(ms(0), F, (Mode::Read, true), 1), Enter::Wait, "it is being given up");
    assert!(p.is_mine(F) && !p.has(F, None));
    p.left(F);
    assert!(!p.is_mine(F) && !p.lasts(F, what));
    assert_eq!(p.enter(ms(0), F, (Mode::Read, true), 1), Enter::Ask);
}

#[test]
fn a_lock_is_kept_for_half_as_long_as_it_took_to_get_it() {
    for (took, kept) in [(3, 10), (70, 35), (9000, 100)] {
        let mut p = Pages::default();
        assert_eq!(p.enter(ms(100), F, (Mode::Write, false), 1), Enter::Ask);
        p.granted(ms(100 + took), F, Mode::Write, 1);
        let what = begun(p.enter(ms(100 + took), F, (Mode::Write, false), 1));
        p.ended(ms(110 + took), F, what);
        assert_eq!(p.leave(ms(110 + took), F, false), Leave::Wait(Some(ms(110 + took + kept))));
    }
}

#[test]
fn a_lock_that_nobody_uses_is_kept_longer_but_not_for_ever() {
    let mut p = Pages::default();
    assert_eq!(p.enter(ms(0), F, (Mode::Write, false), 1), Enter::Ask);
    p.wanted(F);
    assert!(p.granted(ms(100), F, Mode::Write, 1), "whoever was told before is to give it up, too");
    assert_eq!(p.leave(ms(100), F, false), Leave::Wait(Some(ms(300))));
    assert!(matches!(p.leave(ms(300), F, false), Leave::Go(_)));
    assert_eq!(p.leave(ms(300), F, false), Leave::Wait(None));
}

#[test]
fn a_lock_for_looking_is_exchanged_for_one_for_changes() {
    let mut p = Pages::default();
    let looks = got(&mut p, ms(0), Mode::Read, 1);
    assert_eq!(p.enter(ms(0), F, (Mode::Write, false), 1), Enter::GiveUp);
    assert_eq!(p.leave(ms(0), F, true), Leave::Wait(None));
    p.ended(ms(0), F, looks);
    assert!(matches!(p.leave(ms(0), F, true), Leave::Go(held) if held.mode == Mode::Read));
    p.left(F);
    let changes = got(&mut p, ms(1), Mode::Write, 1);
    assert!(matches!(p.enter(ms(0), F, (Mode::Read, false), 1), Enter::Begun(_)));
    assert!(!p.lasts(F, looks) && p.lasts(F, changes));
}

#[test]
fn a_lock_goes_with_its_session() {
    let mut p = Pages::default();
    let lost = got(&mut p, ms(0), Mode::Write, 1);
    assert_eq!(p.enter(ms(0), F, (Mode::Write, false), 2), Enter::Ask);
    p.granted(ms(1), F, Mode::Write, 2);
    let now = begun(p.enter(ms(0), F, (Mode::Write, false), 2));
    p.ended(ms(2), F, lost);
    assert_eq!(
        p.leave(ms(900), F, false),
        Leave::Wait(None),
        "only one use is over, of the lost one"
    );
    assert!(!p.lasts(F, lost) && p.lasts(F, now));
}

#[test]
fn the_lock_of_a_former_process_is_not_given_up_once_this_one_asks_for_it() {
    let mut p = Pages::default();
    assert!(p.leave_former(ms(0), F, 1) && !p.leave_former(ms(0), F, 1));
    assert_eq!(p.enter(ms(0), F, (Mode::Write, false), 1), Enter::Wait);
    p.left(F);
    assert!(p.files.is_empty());
    assert_eq!(p.enter(ms(0), F, (Mode::Write, false), 1), Enter::Ask);
    assert!(!p.leave_former(ms(0), F, 1));
    p.granted(ms(0), F, Mode::Write, 1);
    assert!(!p.leave_former(ms(0), F, 1));
}

#[test]
fn the_size_is_known_as_long_as_the_lock() {
    let mut p = Pages::default();
    let Use::Locked { number, sized: false, .. } = got(&mut p, ms(0), Mode::Read, 1) else {
        panic!()
    };
    p.sized(F, number + 1);
    assert!(matches!(
        begun(p.enter(ms(0), F, (Mode::Read, false), 1)),
        Use::Locked { sized: false, .. }
    ));
    p.sized(F, number);
    assert!(matches!(
        begun(p.enter(ms(0), F, (Mode::Read, false), 1)),
        Use::Locked { sized: true, .. }
    ));
}

#[test]
fn when_too_many_files_are_marked_all_are() {
    let mut p = Pages::default();
    (1..=MOST_MARKED as u64).for_each(|ino| p.mark(ino));
    assert!(p.is_marked(1 << 40));
    assert_eq!(p.enter(ms(0), 1 << 40, (Mode::Write, true), 1), Enter::Ask);
}

// Explores all orders of events of two clients and a server that grants the lock to one writer or
// several readers.

/// Look: a page-in for reading. Map: a page-in that can be stored to. Both are for a file that
/// other clients may write. Write: a write(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum What {
    Look,
    Map,
    Write,
}

impl What {
    fn mode(self) -> Mode {
        if self == What::Look { Mode::Read } else { Mode::Write }
    }
}

/// What a program does on one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Doing {
    Nothing,
    /// Wants to begin, and was told to wait.
    Wants(What),
    Asks(What),
    Uses(What, Use),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct World {
    files: [Option<File>; 2],
    last: [Number; 2],
    now: u64,
    doing: [Doing; 2],
    /// Who has the lock according to the log. The answer is held back until the other client was
    /// told.
    held: [Option<Mode>; 2],
    telling: [bool; 2],
    /// Was asked to release the lock, and is doing it.
    asked: [bool; 2],
    leaving: [bool; 2],
    /// Was told once that others have pages.
    told: [bool; 2],
    /// How many more things each client may begin.
    left: [u8; 2],
}

fn table(w: &World, i: usize) -> Pages {
    let files = w.files[i].iter().map(|f| (F, f.clone())).collect();
    Pages { files, last: w.last[i], marked: 0, all_marked: false }
}

fn put(w: &mut World, i: usize, p: Pages) {
    (w.files[i], w.last[i]) = (p.files.get(&F).cloned(), p.last);
}

fn conflicts(a: Mode, b: Mode) -> bool {
    a == Mode::Write || b == Mode::Write
}

/// All worlds that can follow.
fn next(w: &World) -> Vec<World> {
    let mut out = Vec::new();
    let mut one = |f: &dyn Fn(&mut World) -> bool| {
        let mut new = w.clone();
        if f(&mut new) {
            out.push(new);
        }
    };
    for i in 0..2 {
        let (o, session) = (1 - i, i as u64 + 1);
        let enters = move |w: &mut World, what: What| {
            let mut p = table(w, i);
            let e = p.enter(ms(w.now), F, (what.mode(), what == What::Write), session);
            put(w, i, p);
            w.doing[i] = match e {
                Enter::Begun(begun) => Doing::Uses(what, begun),
                Enter::Ask => Doing::Asks(what),
                Enter::GiveUp | Enter::Wait => Doing::Wants(what),
            };
            if e == Enter::GiveUp {
                w.leaving[i] = true;
            }
        };
        for what in [What::Look, What::Map, What::Write] {
            one(&|w| {
                let begins = w.doing[i] == Doing::Nothing && w.left[i] > 0;
                if begins {
                    w.left[i] -= 1;
                    enters(w, what);
                }
                begins
            });
        }
        one(&|w| match w.doing[i] {
            Doing::Wants(what) => {
                let before = w.clone();
                enters(w, what);
                *w != before
            }
            _ => false,
        });
        one(&|w| {
            let Doing::Uses(_, what) = w.doing[i] else { return false };
            let mut p = table(w, i);
            p.ended(ms(w.now), F, what);
            put(w, i, p);
            w.doing[i] = Doing::Nothing;
            true
        });
        // The log grants the lock, or the holder is asked to release it.
        one(&|w| {
            let Doing::Asks(what) = w.doing[i] else { return false };
            let mode = what.mode();
            if w.held[i].is_some() {
                return false;
            }
            if w.held[o].is_some_and(|h| conflicts(h, mode)) {
                return !std::mem::replace(&mut w.asked[o], true);
            }
            (w.held[i], w.telling[i]) = (Some(mode), !w.told[o]);
            w.asked[o] |= w.telling[i];
            true
        });
        one(&|w| {
            let Doing::Asks(what) = w.doing[i] else { return false };
            if w.held[i].is_none() || w.telling[i] {
                return false;
            }
            let mut p = table(w, i);
            p.mark(F);
            if p.granted(ms(w.now), F, what.mode(), session) {
                w.leaving[i] = true;
            }
            put(w, i, p);
            w.told[i] = true;
            enters(w, what);
            true
        });
        one(&|w| {
            if !w.asked[i] || w.leaving[i] {
                return false;
            }
            let mut p = table(w, i);
            p.wanted(F);
            put(w, i, p);
            w.leaving[i] = true;
            true
        });
        one(&|w| {
            if !w.leaving[i] {
                return false;
            }
            let mut p = table(w, i);
            match p.leave(ms(w.now), F, false) {
                Leave::Wait(None) => return false,
                Leave::Wait(Some(until)) => w.now = u64::try_from(until.as_millis()).unwrap(),
                Leave::Go(_) => {
                    p.left(F);
                    w.held[i] = None;
                    w.leaving[i] = false;
                }
                Leave::Done => w.leaving[i] = false,
            }
            if !w.leaving[i] && w.asked[i] {
                (w.asked[i], w.told[i]) = (false, true);
                w.telling[o] = false;
            }
            put(w, i, p);
            true
        });
    }
    out
}

#[test]
fn in_every_order_two_clients_exclude_each_other_and_both_go_on() {
    let first = World {
        files: [None, None],
        last: [0; 2],
        now: 0,
        doing: [Doing::Nothing; 2],
        held: [None; 2],
        telling: [false; 2],
        asked: [false; 2],
        leaving: [false; 2],
        told: [false; 2],
        left: [2; 2],
    };
    let (mut seen, mut todo) = (HashSet::from([first.clone()]), VecDeque::from([first]));
    let (mut ends, mut together) = (0, 0);
    while let Some(w) = todo.pop_front() {
        let locked = |i: usize| match w.doing[i] {
            Doing::Uses(what, Use::Locked { .. }) => Some((what.mode(), true)),
            Doing::Uses(what, Use::Free) => Some((what.mode(), false)),
            _ => None,
        };
        // Two uses without a lock only write and do not map: the page lock does not order those.
        if let (Some((a, x)), Some((b, y))) = (locked(0), locked(1))
            && (x || y)
        {
            assert!(!conflicts(a, b), "{w:?}");
            together += 1;
        }
        let all = next(&w);
        if all.is_empty() {
            assert!(w.doing == [Doing::Nothing; 2] && w.left == [0; 2], "nobody goes on: {w:?}");
            ends += 1;
        }
        for new in all {
            if seen.insert(new.clone()) {
                todo.push_back(new);
            }
        }
    }
    println!("{} states, {ends} ends, {together} times two look together", seen.len());
    assert!(ends > 0 && together > 0);
}
