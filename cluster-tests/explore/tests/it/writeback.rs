//! Explores every order of events of small cases of write-back (`docs/leases.md`), and checks that
//! the explorer finds planted mistakes.

use strake_explore::{
    after, explore,
    writeback::{Bounds, Fault, World},
};

/// Two writes, and a second open for writing.
fn some() -> Bounds {
    Bounds { opens: 1, writes: 2, ..Bounds::default() }
}

/// One write only.
fn one() -> Bounds {
    Bounds { writes: 1, ..some() }
}

fn holds(bounds: Bounds) {
    strake_explore::holds(&bounds, World::new(bounds, Fault::None));
}

#[test]
fn a_second_writer() {
    holds(Bounds { looks: 1, ..some() });
    holds(Bounds { writes: 3, more_blocks: 1, ..some() });
}

#[test]
fn files_that_are_closed() {
    holds(Bounds { looks: 1, releases: 1, ..some() });
    holds(Bounds { opens: 2, releases: 2, ..one() });
}

#[test]
fn connections() {
    holds(Bounds { reconnects: 1, ..some() });
    holds(Bounds { repeats: 2, ..some() });
}

#[test]
fn failover() {
    holds(Bounds { failovers: 1, ..some() });
    holds(Bounds { looks: 1, failovers: 1, ..one() });
}

#[test]
fn evictions() {
    holds(Bounds { evictions: 1, failovers: 1, ..one() });
    holds(Bounds { evictions: 1, looks: 1, ..one() });
}

fn evictions_of_more_than_one() {
    holds(Bounds { evictions: 1, chain: true, ..some() });
    holds(Bounds { evictions: 1, ticks: 2, ..some() });
}

#[test]
fn time() {
    holds(Bounds { writes: 3, ticks: 2, ..some() });
    holds(Bounds { ticks: 3, renewals: 1, ..one() });
}

/// A client opens the file, sends the same request again on a new connection, is answered and
/// closes the file. The first copy is still at the leader, which has got the report that it waited
/// for; that report is from before the other client became the only writer again.
const SENT_TWICE: [&str; 24] = [
    "Open(1)",
    "Deliver(Message { client: 1, connection: 1, body: Asks",
    "SendRecalls(0)",
    "Deliver(Message { client: 0, connection: 1, body: Recalls",
    "Step(Task { client: 1, connection: 1,",
    "SendRecalls(0)",
    "Deliver(Message { client: 0, connection: 1, body: Recalls",
    "Tell(0)",
    "Deliver(Message { client: 0, connection: 1, body: Reported",
    "Reconnect(1)",
    "Deliver(Message { client: 1, connection: 2, body: Hello",
    "Deliver(Message { client: 1, connection: 2, body: Renewed",
    "Retry(1)",
    "Deliver(Message { client: 1, connection: 2, body: Asks",
    "Step(Task { client: 1, connection: 2,",
    "SendRecalls(0)",
    "Deliver(Message { client: 0, connection: 1, body: Recalls",
    "Tell(0)",
    "Deliver(Message { client: 0, connection: 1, body: Reported",
    "Step(Task { client: 1, connection: 2,",
    "Step(Task { client: 1, connection: 2,",
    "Deliver(Message { client: 1, connection: 2, body: Answer",
    "Release(1)",
    "Deliver(Message { client: 1, connection: 2, body: Release",
];

/// From a state that is too far from the beginning to be reached in a full exploration.
#[test]
fn a_report_of_before_somebody_was_left_alone() {
    let bounds = Bounds { opens: 2, looks: 1, reconnects: 1, releases: 1, ..one() };
    let explored = |fault| explore(after(World::new(bounds, fault), &SENT_TWICE), 1_000_000);
    let seen = explored(Fault::None);
    assert!(seen.broken.is_none() && !seen.cut, "{seen:?}");
    println!("{} states, {} steps, depth {}", seen.states, seen.steps, seen.depth);
    let seen = explored(Fault::ReportedForGood);
    let (story, why) = seen.broken.expect("found");
    println!("{} states, {} steps: {why}", seen.states, story.len());
}

/// Bounds in which the explorer finds each mistake.
fn mistakes_are_found() {
    let cases = [
        (Fault::HoldersNotAsked, one()),
        (Fault::Unsettled, Bounds { releases: 1, ..one() }),
        (Fault::AskedCounts, Bounds { reconnects: 1, ..one() }),
        (Fault::NewLeaderForgets, Bounds { failovers: 1, ..one() }),
        (Fault::NoRecall, some()),
        (Fault::NotAsked, Bounds { opens: 0, looks: 1, ..one() }),
        (Fault::GrantsWritten, Bounds { looks: 1, ..some() }),
        (Fault::NotFenced, Bounds { evictions: 1, ..one() }),
        (Fault::FencedInWork, Bounds { evictions: 1, chain: true, ..one() }),
        (Fault::EndIgnored, Bounds { looks: 1, evictions: 1, more_blocks: 1, ..some() }),
        (Fault::SeenEarly, Bounds { looks: 1, evictions: 1, more_blocks: 1, ..some() }),
        (Fault::NotReadAgain, Bounds { evictions: 1, looks: 2, ..one() }),
        (Fault::NewLeaderUnfenced, Bounds { evictions: 1, failovers: 1, ..one() }),
        (Fault::NewLeaderIgnoresEvicted, Bounds { evictions: 1, failovers: 1, ..one() }),
        (Fault::ReleasesLater, Bounds { opens: 2, releases: 1, ..one() }),
        (Fault::NotHeeded, some()),
        (Fault::EmptyReport, some()),
        (Fault::EarlyReport, some()),
        (Fault::HoldsLate, some()),
        (Fault::HoldsOn, Bounds { writes: 3, ticks: 2, ..some() }),
        (Fault::Overtakes, some()),
        (Fault::TwoOnTheirWay, Bounds { opens: 0, ..some() }),
    ];
    for (fault, bounds) in cases {
        let seen = explore(World::new(bounds, fault), 1_000_000);
        let (story, why) = seen
            .broken
            .unwrap_or_else(|| panic!("{fault:?} was not found in {} states", seen.states));
        println!("{fault:?}: {} states, {} steps: {why}", seen.states, story.len());
    }
}

mod long {
    #[test]
    #[ignore = "long tier, 40 s: ./test --long"]
    fn evictions_of_more_than_one() {
        super::evictions_of_more_than_one();
    }

    #[test]
    #[ignore = "long tier, 50 s: ./test --long"]
    fn mistakes_are_found() {
        super::mistakes_are_found();
    }
}
