//! The types of the world of file locks.

use std::collections::BTreeSet;

use strake_client::unlocking::Unlocks;
use strake_fuse::vfs::owners::{Key, Known};
use strake_mds::{leases::Number, lock_waiters::Entry, namespace::locks::Want};
use strake_proto::{Ino, SessionId};

pub const FILE: Ino = 2;
pub const MOUNTS: usize = 2;

/// The kind of lock that all programs of a world use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// flock(2): the kernel names the handle.
    Flock,
    /// The kernel names the address of the open file.
    #[default]
    Ofd,
    /// The kernel names the address of the process's table of descriptors.
    Posix,
}

/// A request to a mount's daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Asked {
    Lock { write: bool, wait: bool },
    Unlock,
    Flush,
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Request {
    /// The program that asks. A RELEASE belongs to no program.
    pub program: usize,
    pub handle: u64,
    pub address: u64,
    pub asked: Asked,
}

/// A lock that a program was told it has, and has not begun to give up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Has {
    pub write: bool,
    pub number: u64,
    pub session: SessionId,
}

/// A process, or an open file of one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// The address of the owner of its locks. The next program may get it when this one is gone.
    pub address: u64,
    /// Empty: the program is gone.
    pub handles: Vec<u64>,
    /// The request that it waits for.
    pub call: Option<Request>,
    pub has: Option<Has>,
    /// What it may still have, for writing or not, until the call that gives it up has returned.
    pub may: Option<bool>,
    /// Its request may be refused: since it began, another program had, or may have had, a
    /// conflicting lock.
    pub excused: bool,
    pub is_dying: bool,
    /// The request number that is kept for its call, and whether this daemon has used it.
    pub kept_seq: Option<(u64, bool)>,
}

/// What the next daemon finds about an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kept {
    pub key: Key,
    pub handle: u64,
    pub number: u64,
}

/// Progress of taking all that the kernel had queued: `None` until the queue is empty, then the
/// requests that threads had read at that time and have not noted yet.
pub type Taking = Option<Vec<Request>>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    Begins,
    /// Its owner is known by another handle: closes are to be noted first.
    Settles(Taking),
    /// Waits for unlocks that are on the way, before it asks the servers.
    Earlier(u64),
    Asks(Unlocks),
    /// It was refused; closes that the kernel has queued are noted first.
    Refused(Unlocks, Taking),
    /// Then waits until those locks are given up.
    GivesUp(Unlocks, u64),
    AsksAgain,
    /// The lock was given.
    Given,
    /// Waits, with this number in the list of lock waiters.
    Waits(u64),
    /// Tries in its turn.
    Tries(u64),
    /// An unlock or FLUSH is on the way.
    Unlocks(Option<Known>),
}

/// A request that the daemon works on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Job {
    pub request: Request,
    pub number: u64,
    pub stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum What {
    Take {
        write: bool,
        patient: bool,
        wait: u64,
    },
    Unlock,
    /// Restores what the owner had before.
    Undo(Option<bool>),
}

/// A request of the client to the leader; those of one owner run one after the other.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    pub number: u64,
    /// The program that waits for it.
    pub program: Option<usize>,
    pub what: What,
    pub seq: Option<u64>,
    /// The lock was given, and the program was not told yet; what the owner had before.
    pub given: Option<Option<bool>>,
    /// Unlocks that count as on the way until it is done.
    pub guards: Vec<u64>,
    pub kept: Vec<Kept>,
    pub tries: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Edit {
    Lock(bool),
    Unlock,
    Restore(Option<bool>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Outcome {
    /// Done; what the owner had before.
    Done(Option<bool>),
    Conflict,
    /// The conflicting lock has been given up meanwhile.
    Again,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Set {
    pub seq: u64,
    pub lowest: u64,
    pub number: u64,
    pub edit: Edit,
    pub patient: bool,
    pub wait: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Body {
    // To the leader:
    Hello,
    Set(Set),
    List(u64, Vec<Entry>),
    Checked(Number),
    // To mounts:
    Question(Number),
    Outcome(u64, Outcome),
    Turns(u64, Vec<u64>, Vec<u64>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    pub mount: usize,
    pub session: SessionId,
    pub connection: u64,
    pub body: Body,
}

/// A request that the leader works on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Task {
    pub mount: usize,
    pub connection: u64,
    pub set: Set,
    pub want: Want,
    pub asked: BTreeSet<SessionId>,
    /// Questions whose answers it waits for.
    pub waits_for: Vec<(SessionId, Number)>,
    pub step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    Looks,
    /// It goes to the log.
    Passed,
    /// The log has refused it.
    InTheLog,
}

/// How often each kind of event may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bounds {
    pub kind: Kind,
    /// Programs at each mount that have the file open at the beginning.
    pub programs: [u8; 2],
    /// Opens of the file by new programs, in the place of those that are gone.
    pub opens: u8,
    /// Further opens by a program that has the file open.
    pub seconds: u8,
    /// Requests for a write lock that do not wait.
    pub tries: u8,
    /// Requests for a write lock that wait.
    pub waits: u8,
    /// How many of these requests may be for a read lock instead.
    pub reads: u8,
    pub unlocks: u8,
    pub closes: u8,
    /// Signals to programs that wait for a lock.
    pub signals: u8,
    /// Processes that are killed.
    pub kills: u8,
    /// Lists of lock waiters that get lost.
    pub losses: u8,
    pub evictions: u8,
    pub failovers: u8,
    /// Daemons that are replaced.
    pub restarts: u8,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Deliver(Message),
    Lose(Message),
    /// The leader continues with the request of this mount and number.
    Step(usize, u64),
    Open(usize),
    Second(usize, usize),
    Lock {
        mount: usize,
        program: usize,
        handle: u64,
        write: bool,
        wait: bool,
    },
    Unlock(usize, usize),
    Close(usize, usize, u64),
    Signal(usize, usize),
    Kill(usize, usize),
    /// A thread of the daemon reads a request.
    Take(usize),
    /// The thread notes the request that it has read.
    Note(usize, Request),
    /// The daemon continues with a program's request.
    GoOn(usize, usize),
    /// The kernel sends again what a former daemon had read.
    Resend(usize),
    /// A killed program stops waiting for its FLUSH.
    LetGo(usize, usize),
    /// The client continues with the leader's question.
    Answer(usize, Number),
    /// The client tells the leader its list of lock waiters.
    Tell(usize),
    Reconnect(usize),
    Evict(usize),
    /// The client learns that it was evicted.
    Learn(usize),
    Failover,
    Restart(usize),
}

/// A mistake made on purpose: the exploration must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Fault {
    None,
    /// Servers get the kernel's addresses as owner numbers.
    KernelsNumbers,
    /// An owner that comes through another handle is taken for the same owner at once.
    SureAtOnce,
    /// A conflict is reported before closes on the same mount are noted.
    ToldUnsettled,
    /// A conflict is reported when these closes are noted, before their locks are given up.
    ToldUngiven,
    /// A conflict with another mount is reported without asking the holder.
    NotAsked,
    /// The holder answers before it has read what the kernel had queued.
    AnswersUntaken,
    /// The holder answers before the locks of closed files are given up.
    AnswersUngiven,
    /// A later request shares a question that was already sent.
    SharesSent,
    /// A new leader does not ask mounts that have not said hello.
    NewLeaderAsksNobody,
    /// A refusal by the log is reported at once, without another look at the holder.
    LogRefusalTold,
    /// A request whose caller is gone does not count as an unlock on the way.
    LeftoverUncounted,
    /// The lock that such a request got is kept.
    NotUndone,
    /// All of it is given back, including what the owner had before.
    UndoneToNothing,
    /// A change of locks does not give the turn to waiters.
    TurnsNotGiven,
    /// A waiter that stops waiting does not say so.
    LeavesSilently,
    /// A lost list is not sent again when the list has become empty.
    EmptyNotRepeated,
    /// When a waiter leaves, the waiters behind it are not checked.
    LeftNotLooked,
    /// A new leader does not get the lists of lock waiters.
    ListNotRepeated,
    /// The leader does not remember what it has refused.
    RefusedForgotten,
    /// A new daemon does not continue the unlocks of the former daemon.
    EndingsForgotten,
    /// A new daemon does not know which owners had locks.
    OwnersForgotten,
    /// The record of an unlock is kept only until the unlock is sent.
    KeptTooShort,
    /// A new daemon answers the leader before the kernel has sent the unanswered requests again.
    AnswersBeforeResent,
}
