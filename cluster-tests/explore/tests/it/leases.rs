//! Explores every order of events of small cases of `docs/leases.md`, and checks that the explorer
//! finds planted mistakes.

use strake_explore::{
    after, explore,
    leases::{Bounds, Fault, World},
};

const NOTHING: Bounds = Bounds {
    asks: 0,
    changes: 0,
    ticks: 0,
    repeats: 0,
    copies: 0,
    reconnects: 0,
    impatience: 0,
    failovers: 0,
    renewals: 0,
    writes: 0,
    full: false,
    polls: false,
};

fn holds(bounds: Bounds) {
    strake_explore::holds(&bounds, World::new(bounds, Fault::None));
}

#[test]
fn reads_and_changes() {
    holds(Bounds { asks: 2, changes: 1, ..NOTHING });
    holds(Bounds { asks: 1, changes: 2, ..NOTHING });
}

#[test]
fn time() {
    holds(Bounds { asks: 1, changes: 1, ticks: 3, renewals: 1, ..NOTHING });
}

#[test]
fn connections() {
    holds(Bounds { asks: 1, changes: 1, reconnects: 1, ..NOTHING });
}

#[test]
fn given_up() {
    holds(Bounds { asks: 1, changes: 1, impatience: 1, ..NOTHING });
}

#[test]
fn failover() {
    holds(Bounds { asks: 1, changes: 1, failovers: 1, ..NOTHING });
}

#[test]
fn repeated_and_late_acknowledgements() {
    holds(Bounds { asks: 1, changes: 1, repeats: 1, polls: true, ..NOTHING });
}

#[test]
fn reports() {
    holds(Bounds { asks: 1, changes: 1, writes: 1, ..NOTHING });
    holds(Bounds { asks: 1, writes: 2, ..NOTHING });
    holds(Bounds { asks: 1, writes: 1, reconnects: 1, ..NOTHING });
    holds(Bounds { asks: 1, writes: 1, failovers: 1, ..NOTHING });
}

#[test]
fn full_sessions() {
    holds(Bounds { asks: 1, changes: 1, full: true, ..NOTHING });
}

/// A client looks up the name and removes it, which gives back the lease on its inode, and is
/// answered. A copy of that request is still on the way.
const ANSWERED_WITH_A_COPY_LEFT: [&str; 11] = [
    "Ask(0, Lookup)",
    "Deliver(Message { client: 0, connection: 1, body: Read",
    "Step(Task { client: 0",
    "Step(Task { client: 0",
    "Step(Task { client: 0",
    "Deliver(Message { client: 0, connection: 1, body: Answer",
    "Alter(0, Name)",
    "Copy(Message { client: 0, connection: 1, body: Write",
    "Step(Task { client: 0",
    "Step(Task { client: 0",
    "Deliver(Message { client: 0, connection: 1, body: Done",
];

#[test]
fn copies_of_requests() {
    holds(Bounds { asks: 1, changes: 1, copies: 1, ..NOTHING });
    // From a state that is too far from the beginning to be reached in a full exploration.
    let bounds = Bounds { asks: 2, changes: 2, copies: 1, ..NOTHING };
    let explored =
        |fault| explore(after(World::new(bounds, fault), &ANSWERED_WITH_A_COPY_LEFT), 1_000_000);
    let seen = explored(Fault::None);
    assert!(seen.broken.is_none() && !seen.cut, "{seen:?}");
    println!("{} states, {} steps, depth {}", seen.states, seen.steps, seen.depth);
    let seen = explored(Fault::DropsAgain);
    let (story, why) = seen.broken.expect("found");
    println!("{} states, {} steps: {why}", seen.states, story.len());
}

/// Bounds in which the explorer finds each mistake. `SparesLater` needs two new connections:
/// `strake-explore --fault spares-later`.
fn mistakes_are_found() {
    let cases = [
        (Fault::Unsettled, Bounds { asks: 2, changes: 1, ..NOTHING }),
        (Fault::EarlyTicket, Bounds { asks: 2, changes: 1, ..NOTHING }),
        (Fault::LateGrant, Bounds { asks: 2, changes: 1, ..NOTHING }),
        (Fault::KeepsLate, Bounds { asks: 1, changes: 1, ..NOTHING }),
        (Fault::HelloRemembers, Bounds { asks: 1, changes: 1, reconnects: 1, ..NOTHING }),
        (Fault::NoGrace, Bounds { asks: 1, changes: 1, failovers: 1, ..NOTHING }),
        (Fault::ForgetsGivenUp, Bounds { asks: 2, changes: 1, impatience: 1, ..NOTHING }),
        (Fault::KeepsOwnLate, Bounds { changes: 2, ..NOTHING }),
        (Fault::Unentangled, Bounds { asks: 2, changes: 1, ..NOTHING }),
        (Fault::RoomAtOnce, Bounds { asks: 2, changes: 1, full: true, ..NOTHING }),
        (Fault::NotAsked, Bounds { asks: 1, writes: 1, ..NOTHING }),
        (Fault::SharesSent, Bounds { asks: 2, writes: 2, reconnects: 1, ..NOTHING }),
        (Fault::NotReread, Bounds { asks: 1, writes: 1, ..NOTHING }),
        (Fault::ReportsEarly, Bounds { asks: 1, writes: 1, ..NOTHING }),
        (Fault::CountsFromAnswer, Bounds { asks: 1, changes: 1, ticks: 4, renewals: 1, ..NOTHING }),
    ];
    for (fault, bounds) in cases {
        let seen = explore(World::new(bounds, fault), 2_000_000);
        let (story, why) = seen
            .broken
            .unwrap_or_else(|| panic!("{fault:?} was not found in {} states", seen.states));
        println!("{fault:?}: {} states, {} steps: {why}", seen.states, story.len());
    }
}

mod long {
    #[test]
    #[ignore = "long tier, 70 s: ./test --long"]
    fn mistakes_are_found() {
        super::mistakes_are_found();
    }
}
