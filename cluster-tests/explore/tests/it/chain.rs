//! Explores every order of events of small cases of chains (`docs/replication.md`), and checks that
//! the explorer finds planted mistakes.

use strake_explore::{
    chain::{Bounds, Fault, World},
    explore,
};

/// One write to three replicas.
fn three() -> Bounds {
    Bounds { copies: 3, writes: 1, ..Bounds::default() }
}

/// One to two replicas; a third target stands by.
fn two() -> Bounds {
    Bounds { copies: 2, ..three() }
}

fn holds(bounds: Bounds) {
    strake_explore::holds(&bounds, World::new(bounds, Fault::None));
}

#[test]
fn connections() {
    holds(Bounds { writes: 2, flushes: 1, breaks: 1, doubles: 1, ..three() });
    holds(Bounds { writes: 2, breaks: 1, refusals: true, ..three() });
}

#[test]
fn updates_that_were_given_up() {
    holds(Bounds { writes: 3, given_up: 1, breaks: 1, ..three() });
    holds(Bounds { writes: 3, given_up: 1, flushes: 1, expiries: 1, changes: 2, ..two() });
    holds(Bounds { writes: 2, given_up: 1, crashes: 1, changes: 2, ..two() });
}

/// Other clients write after the programs have been told of the failure.
#[test]
fn updates_that_have_failed() {
    holds(Bounds { writes: 3, given_up: 1, tells: true, ..three() });
    holds(Bounds { writes: 2, given_up: 1, tells: true, expiries: 1, changes: 2, ..two() });
    holds(Bounds { writes: 2, given_up: 1, tells: true, crashes: 1, changes: 2, ..two() });
}

#[test]
fn disks() {
    holds(Bounds { writes: 2, breaks: 1, slow: true, full: 1, ..three() });
    holds(Bounds { writes: 2, breaks: 1, slow: true, full: 1, short: true, ..three() });
}

/// An update that a successor refused for lack of space arrives a second time.
#[test]
fn repetitions() {
    holds(Bounds { writes: 2, repeats: 1, slow: true, full: 1, ..two() });
    holds(Bounds { writes: 2, repeats: 1, slow: true, full: 1, ..three() });
    holds(Bounds { writes: 2, repeats: 1, expiries: 1, changes: 2, ..two() });
}

#[test]
fn leases() {
    holds(Bounds { flushes: 1, expiries: 1, changes: 3, ..three() });
    holds(Bounds { writes: 2, flushes: 1, expiries: 1, changes: 3, refusals: true, ..two() });
}

#[test]
fn crashes() {
    holds(Bounds { flushes: 1, crashes: 1, changes: 3, ..three() });
    holds(Bounds { flushes: 1, crashes: 2, changes: 2, ..two() });
}

#[test]
fn becomes_whole_again() {
    holds(Bounds { flushes: 1, crashes: 1, changes: 3, settle: 1, ..two() });
    holds(Bounds { flushes: 1, expiries: 1, changes: 2, settle: 1, ..three() });
}

#[test]
fn moves() {
    holds(Bounds { plans: 1, changes: 3, ..two() });
}

/// Bounds in which the explorer finds each mistake.
#[test]
fn mistakes_are_found() {
    let cases = [
        (Fault::FillsShown, Bounds { crashes: 1, changes: 2, ..three() }),
        (Fault::FillsUnflushed, Bounds { flushes: 1, expiries: 1, changes: 3, ..two() }),
        (Fault::LeavesUnheard, Bounds { plans: 1, changes: 4, ..two() }),
        (Fault::AnswersEarly, three()),
        (Fault::NoLease, Bounds { expiries: 1, changes: 1, ..three() }),
        (Fault::AnyStamp, Bounds { copies: 1, flushes: 1, crashes: 1, changes: 2, ..three() }),
        (Fault::RestartUnnoticed, Bounds { crashes: 1, expiries: 1, changes: 1, ..three() }),
        (Fault::Unconfirmed, Bounds { expiries: 1, changes: 3, ..two() }),
        (Fault::PutsUnchecked, Bounds { writes: 2, expiries: 1, breaks: 1, changes: 2, ..two() }),
        (Fault::KnownUnflushed, Bounds { flushes: 1, breaks: 1, ..two() }),
        (Fault::FlushesServing, Bounds { flushes: 1, expiries: 1, changes: 3, ..two() }),
        (Fault::AnyEpoch, Bounds { expiries: 1, changes: 3, refusals: true, ..three() }),
        (Fault::Roundless, Bounds { writes: 2, given_up: 1, ..three() }),
        (Fault::TellsAtOnce, Bounds { writes: 2, given_up: 1, tells: true, ..two() }),
        (Fault::PushesUnheld, Bounds { writes: 2, expiries: 1, changes: 3, ..two() }),
    ];
    for (fault, bounds) in cases {
        let seen = explore(World::new(bounds, fault), 1_000_000);
        let (story, why) = seen
            .broken
            .unwrap_or_else(|| panic!("{fault:?} was not found in {} states", seen.states));
        println!("{fault:?}: {} states, {} steps: {why}", seen.states, story.len());
    }
}
