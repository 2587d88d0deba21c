//! The types of the world of the leader's lease.

use std::time::Duration;

pub const MEMBERS: u64 = 3;
/// Ticks for which a member gives no vote after it has heard from its leader.
pub const PROMISE: usize = 3;
/// Shortest time between two ticks, by the member's own clock.
pub const TICK: Duration = Duration::from_millis(50);

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Body {
    /// From the leader, in this round.
    Beat(u64),
    /// The answer to it; how long its sender gives no vote from now on.
    Heard(u64, Duration),
    /// Asks for a vote; whether the leader has chosen the sender as its successor.
    Ask {
        chosen: bool,
    },
    Vote,
    /// The leader has chosen the receiver.
    Successor,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    pub from: u64,
    pub to: u64,
    pub term: u64,
    pub body: Body,
}

/// How often each kind of event may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bounds {
    /// What each member's clock does while 50 ms pass.
    pub clocks: [u64; MEMBERS as usize],
    /// How often 50 ms pass.
    pub steps: u8,
    /// Rounds of messages by leaders.
    pub rounds: u8,
    /// Members that ask to be elected by themselves.
    pub campaigns: u8,
    pub crashes: u8,
    /// Leaders that choose a successor.
    pub handovers: u8,
    /// The last member runs a program that knows no promise, and does not say that it waits.
    pub older: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Deliver(Message),
    /// 50 ms pass.
    Pass,
    Tick(u64),
    /// A leader begins a round of messages.
    Round(u64),
    /// A member asks to be elected.
    Campaign(u64),
    /// A member restarts.
    Crash(u64),
    /// The leader chooses this member as its successor.
    Handover(u64, u64),
}

/// A mistake made on purpose: the exploration must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    None,
    /// The lease is not shorter than the promise: clocks are taken for equal.
    ClocksAgree,
    /// The tick that is due counts as a whole one.
    WholeTicks,
    /// The lease lasts from the answers, not from the sending.
    FromAnswers,
    /// Answers to an earlier round count for a later one.
    AnyRound,
    /// Answers are not waited for.
    NobodyAnswers,
    /// Members give votes in spite of their promise.
    VotesAnyway,
    /// A restarted member does not wait.
    RestartForgets,
    /// The lease goes on when a successor is chosen.
    HandoverKeepsLease,
    /// The lease ends when a successor is chosen, and may be won again in that term.
    HandoverOnlySuspends,
    /// A member that does not say that it waits counts as one that does.
    OlderCounts,
    /// A leader that has stepped down answers until its lease ends.
    FormerLeaderAnswers,
}
