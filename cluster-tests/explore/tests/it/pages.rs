//! Explores every order of events of small cases of pages of memory mappings (`docs/mappings.md`,
//! "Between nodes"), and checks that the explorer finds planted mistakes.

use strake_explore::{
    explore,
    pages::{Bounds, Fault, World},
};

/// Both clients have the file open for writing and map it.
fn both() -> Bounds {
    Bounds { page_ins: 2, stores: 2, ..Bounds::default() }
}

/// Both have it open; there is one page-in with a store, and one write.
fn beside() -> Bounds {
    Bounds { page_ins: 1, stores: 1, writes: 1, ..Bounds::default() }
}

/// One client alone has the file open; the other opens it and writes.
fn second() -> Bounds {
    Bounds { alone: true, opens: 1, ..beside() }
}

/// One maps the file for writing; the other has it open for reading.
fn reader() -> Bounds {
    Bounds { reader: true, page_ins: 2, stores: 1, ..Bounds::default() }
}

fn holds(bounds: Bounds) {
    strake_explore::holds(&bounds, World::new(bounds, Fault::None));
}

#[test]
fn two_that_map() {
    holds(both());
    holds(Bounds { write_backs: 1, ..both() });
}

#[test]
fn one_that_maps_and_one_that_writes() {
    holds(beside());
    holds(Bounds { writes: 2, ..beside() });
}

#[test]
fn a_second_writer() {
    holds(second());
    holds(reader());
    holds(Bounds { opens: 1, ..reader() });
}

/// The page is asked for again while it is given back.
#[test]
fn pages_that_the_kernel_drops() {
    holds(Bounds { drops: 1, page_ins: 3, stores: 1, ..both() });
    holds(Bounds { drops: 1, page_ins: 2, ..beside() });
    holds(Bounds { drops: 1, page_ins: 2, ..second() });
    holds(Bounds { drops: 1, ..reader() });
}

/// Pages are taken back for two reasons at the same time.
#[test]
fn pages_that_a_node_takes_back_by_itself() {
    holds(Bounds { checks: 1, page_ins: 2, ..beside() });
    holds(Bounds { checks: 2, ..beside() });
    holds(Bounds { checks: 1, ..second() });
    holds(Bounds { checks: 1, ..reader() });
    holds(Bounds { checks: 1, failovers: 1, ..beside() });
}

#[test]
fn files_that_are_closed() {
    holds(Bounds { closes: 1, ..beside() });
}

#[test]
fn failover() {
    holds(Bounds { failovers: 1, stores: 1, ..both() });
    holds(Bounds { failovers: 1, ..beside() });
}

#[test]
fn evictions() {
    holds(Bounds { evictions: 1, ..beside() });
}

#[test]
fn daemons_that_are_replaced() {
    holds(Bounds { restarts: 1, stores: 1, ..both() });
    holds(Bounds { restarts: 1, ..beside() });
}

/// Bounds in which the explorer finds each mistake.
#[test]
fn mistakes_are_found() {
    let cases = [
        (Fault::AnswersEarly, both()),
        (Fault::NotTakenBack, second()),
        (Fault::UnlocksFirst, both()),
        (Fault::RecallKeepsPages, second()),
        (Fault::FreeNotWaited, beside()),
        (Fault::PagesUnlocked, Bounds { write_backs: 1, ..both() }),
        (Fault::PagesEarly, both()),
        (Fault::StoresShared, both()),
        (Fault::OpenKeepsShared, Bounds { alone: true, opens: 1, write_backs: 1, ..reader() }),
        (Fault::AskedLate, second()),
        (Fault::ClosesMapped, Bounds { closes: 1, ..beside() }),
        (Fault::WritersNotTold, beside()),
        (Fault::OpenNotMarked, Bounds { restarts: 1, ..beside() }),
        (Fault::OpensEarly, second()),
        (Fault::NewLeaderTold, Bounds { failovers: 1, ..beside() }),
        (Fault::RestartTold, Bounds { restarts: 1, ..beside() }),
        (Fault::Unfenced, Bounds { evictions: 1, ..beside() }),
        (Fault::WritesLost, Bounds { evictions: 1, ..both() }),
        (Fault::FormerForgotten, Bounds { restarts: 1, stores: 0, ..beside() }),
        (Fault::AskerSilent, both()),
        (Fault::HolderNotAsked, both()),
        (Fault::PageInsWait, Bounds { drops: 1, page_ins: 3, stores: 1, ..both() }),
        (Fault::KeptAtOnce, Bounds { drops: 1, page_ins: 3, ..both() }),
        (Fault::WritesBeside, Bounds { drops: 1, page_ins: 2, stores: 2, ..second() }),
        (Fault::OthersNotWaited, Bounds { checks: 1, page_ins: 2, ..beside() }),
    ];
    let mut missed = Vec::new();
    for (fault, bounds) in cases {
        let seen = explore(World::new(bounds, fault), 200_000);
        match seen.broken {
            Some((story, why)) => {
                println!("{fault:?}: {} states, {} steps: {why}", seen.states, story.len())
            }
            None => missed.push((fault, seen.states)),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
