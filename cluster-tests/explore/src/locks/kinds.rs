//! What is asked, sent and remembered in the world of file locks.

use std::collections::BTreeSet;

use strake_client::unlocking::Unlocks;
use strake_fuse::vfs::owners::{Key, Known};
use strake_mds::{leases::Number, lock_waiters::Entry, namespace::locks::Want};
use strake_proto::{Ino, SessionId};

pub const FILE: Ino = 2;
pub const MOUNTS: usize = 2;

/// What all programs of a world lock with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// flock(2): the kernel says by which handle.
    Flock,
    /// The kernel says at which address the open file is.
    #[default]
    Ofd,
    /// The kernel says at which address the process's table of descriptors is.
    Posix,
}

/// What a mount's daemon is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Asked {
    Lock { write: bool, wait: bool },
    Unlock,
    Flush,
    Release,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Request {
    /// Whose; a RELEASE is nobody's.
    pub program: usize,
    pub handle: u64,
    pub address: u64,
    pub asked: Asked,
}

/// A program has been told that it has a lock, and has not begun to give it up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Has {
    pub write: bool,
    pub number: u64,
    pub session: SessionId,
}

/// A process, or an open file of one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// Of what owns its locks. The next one may get it when this one is gone.
    pub address: u64,
    /// None: it is gone.
    pub handles: Vec<u64>,
    /// What it waits for.
    pub call: Option<Request>,
    pub has: Option<Has>,
    /// It may have one for writing, or one, until what gives it up has returned.
    pub may: Option<bool>,
    /// Its try may be refused: somebody had, or may have had, what is in the way since it began.
    pub excused: bool,
    pub is_dying: bool,
    /// The mutation's number that is kept for its request, and whether this daemon has used it.
    pub kept_seq: Option<(u64, bool)>,
}

/// What the next daemon finds of an owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kept {
    pub key: Key,
    pub handle: u64,
    pub number: u64,
}

/// Whether all that the kernel had queued is taken: `None` until nothing was to be read, then what
/// threads had read and not noted.
pub type Taking = Option<Vec<Request>>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    Begins,
    /// Its owner is known by another handle: what was closed is to be noted first.
    Settles(Taking),
    /// What is given up is waited for, before the servers are asked.
    Earlier(u64),
    Asks(Unlocks),
    /// It was refused: what was closed is noted.
    Refused(Unlocks, Taking),
    /// And given up.
    GivesUp(Unlocks, u64),
    AsksAgain,
    /// The lock is there; whether the owner had one before, and for what.
    Given,
    /// Its place in the list of those who wait.
    Waits(u64),
    /// And it tries.
    Tries(u64),
    /// An unlock or FLUSH is under way.
    Unlocks(Option<Known>),
}

/// A request that the daemon works at.
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
    /// What an owner had before is its own again.
    Undo(Option<bool>),
}

/// What the client asks the leader for, one after the other for each owner.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Op {
    pub number: u64,
    /// Who waits for it.
    pub program: Option<usize>,
    pub what: What,
    pub seq: Option<u64>,
    /// The lock was given, and its caller does not know yet.
    pub given: Option<Option<bool>>,
    /// What counts as being given up until it is done.
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
    /// What the owner had before.
    Done(Option<bool>),
    Conflict,
    /// What was in the way is given up by now.
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
    // To the leader.
    Hello,
    Set(Set),
    List(u64, Vec<Entry>),
    Checked(Number),
    // To mounts.
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

/// A request in work at the leader.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Task {
    pub mount: usize,
    pub connection: u64,
    pub set: Set,
    pub want: Want,
    pub asked: BTreeSet<SessionId>,
    /// Answers that are waited for.
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

/// How often what may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bounds {
    pub kind: Kind,
    /// Programs that have the file open at each mount in the beginning.
    pub programs: [u8; 2],
    /// Opens of the file by others, when those are gone.
    pub opens: u8,
    /// Opens by a program that has it open.
    pub seconds: u8,
    /// Tries for a lock for writing.
    pub tries: u8,
    /// Likewise that wait.
    pub waits: u8,
    /// Locks, among both, that are for reading instead.
    pub reads: u8,
    pub unlocks: u8,
    pub closes: u8,
    /// Signals to programs that wait.
    pub signals: u8,
    /// Processes that are killed.
    pub kills: u8,
    /// Lists of waits that get lost.
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
    /// The leader goes on with a request, of this mount and number.
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
    /// And notes it.
    Note(usize, Request),
    /// The daemon goes on with a program's request.
    GoOn(usize, usize),
    /// The kernel sends again what a former daemon had taken.
    Resend(usize),
    /// A dying caller of FLUSH is let go.
    LetGo(usize, usize),
    /// The client goes on with the leader's question.
    Answer(usize, Number),
    /// It tells the leader who waits.
    Tell(usize),
    Reconnect(usize),
    Evict(usize),
    /// The client hears of it.
    Learn(usize),
    Failover,
    Restart(usize),
}

/// A mistake made on purpose: the exploration must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Fault {
    None,
    /// Servers are given the kernel's numbers.
    KernelsNumbers,
    /// Who comes through another handle is taken for the same owner at once.
    SureAtOnce,
    /// A conflict on the same mount is told before what was closed is noted.
    ToldUnsettled,
    /// It is told when that is noted, and not given up.
    ToldUngiven,
    /// A conflict with another mount is told and the holder not asked.
    NotAsked,
    /// The holder answers before it has taken what was queued.
    AnswersUntaken,
    /// It answers before what was closed is given up.
    AnswersUngiven,
    /// Who comes later shares a question that was sent.
    SharesSent,
    /// A new leader asks nobody who has said no hello.
    NewLeaderAsksNobody,
    /// What the log refuses is told at once.
    LogRefusalTold,
    /// A request whose caller has gone does not count as being given up.
    LeftoverUncounted,
    /// What such a request got is kept.
    NotUndone,
    /// All of it is given back, also what was there before.
    UndoneToNothing,
    /// A change of locks is not looked at for those who wait.
    TurnsNotGiven,
    /// Who stops to wait does not say so.
    LeavesSilently,
    /// A list that did not arrive is not sent again when it has become empty.
    EmptyNotRepeated,
    /// Who was behind one that waits no longer is not looked at.
    LeftNotLooked,
    /// A new leader is not told who waits.
    ListNotRepeated,
    /// A leader does not know what it refused.
    RefusedForgotten,
    /// A new daemon does not go on with what the former one was giving up.
    EndingsForgotten,
    /// Or does not know who had locks.
    OwnersForgotten,
    /// What is given up is kept until it is sent only.
    KeptTooShort,
    /// A new daemon answers the leader before the kernel sends again what was taken.
    AnswersBeforeResent,
}
