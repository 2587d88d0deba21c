//! What is sent, asked for and remembered in the world of pages.

use strake_client::pages::{Mode, Use};
use strake_mds::leases::{Number, pages::Telling};
use strake_proto::{Ino, SessionId};

pub const FILE: Ino = 2;
pub const CLIENTS: usize = 2;

/// The bytes of the page: for each client one that it stores to and one that it writes, by how
/// often it did.
pub type Cells = [u8; 2 * CLIENTS];

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Body {
    // To the leader.
    Hello,
    Asks(Mode),
    Unlocks,
    Opens,
    Closes,
    Acknowledges,
    Gave(Number),
    // To clients.
    Recall,
    Wanted(Number),
    Got(Mode),
    Unlocked,
    Opened { pages: bool, leased: bool },
    // To the storage server: a page as a whole, or one byte of it.
    WriteBack(Cells),
    Write(u8),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    pub client: usize,
    pub session: SessionId,
    /// 0: to the storage server.
    pub connection: u64,
    pub body: Body,
}

/// A request in work at the leader.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    pub client: usize,
    pub session: SessionId,
    pub stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Of an open: others are to forget.
    Opens,
    /// Of a lock: others have it.
    Waits(Mode),
    /// It is in the log, and others are told.
    Tells(Mode, Telling),
}

/// How a client has the file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Opened {
    No,
    ForReading,
    /// That is asked for.
    Asked,
    /// It was answered, and pages for looking are taken back.
    Answered,
    ForBoth,
    /// Its pages are given up before that is told.
    Closing,
}

/// A page-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageIn {
    Wants,
    /// A mistake's: that there is a lease was seen, and giving back leaves it out yet.
    Late(Use),
    /// Giving back waits for it from now on.
    Reads(Use),
    Read(Use, Cells),
}

/// A write(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Writes {
    Wants,
    /// The page is taken out of this node's own mapping.
    Uses(Use),
    Sent(Use),
}

/// A page that the kernel has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Page {
    pub cells: Cells,
    pub dirty: bool,
    /// In which it was handed out.
    pub session: SessionId,
}

/// Why pages are taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Why {
    /// The leader wants them.
    Wanted(Number),
    /// It wanted them before the lock was got.
    WantedBefore,
    /// Another lock, or none, is needed.
    Leave,
    Recall,
    Hello,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// What uses the file ends, and the lock is kept for a moment.
    Leaving,
    /// The kernel is told to give the page back under the lock. `waits`: for a page-in.
    UnderLock {
        waits: bool,
    },
    Unlock,
    /// Likewise without a lock.
    After {
        waits: bool,
    },
    /// Of a former daemon's lock.
    UnlockFormer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Job {
    pub why: Why,
    pub step: Step,
}

/// How often what may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bounds {
    /// The second client has the file open for reading from the beginning.
    pub reader: bool,
    /// The second client has it not open from the beginning; with `reader` neither has it open for
    /// writing. Otherwise both have.
    pub alone: bool,
    /// Opens for writing.
    pub opens: u8,
    /// Page-ins by both together.
    pub page_ins: u8,
    /// Stores to pages.
    pub stores: u8,
    /// write(2)s.
    pub writes: u8,
    /// Write-backs that the kernel begins by itself.
    pub write_backs: u8,
    pub closes: u8,
    pub evictions: u8,
    pub failovers: u8,
    /// Daemons that are replaced.
    pub restarts: u8,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Deliver(Message),
    /// The leader goes on with a request.
    Step(Task),
    /// A program touches the page.
    PageIn(usize),
    /// The client goes on with that.
    GoOn(usize),
    Store(usize),
    WriteBack(usize),
    /// A program writes.
    Write(usize),
    /// The client goes on with that.
    WriteOn(usize),
    Open(usize),
    /// It is answered to the program.
    IsOpen(usize),
    Close(usize),
    /// That is told.
    IsClosed(usize),
    /// The kernel gives the page back.
    TakeOut(usize),
    /// Giving back goes on.
    Job(usize, Job),
    /// A client has found the new leader.
    Reconnect(usize),
    /// The leader looks again who waits.
    Look,
    Evict(usize),
    /// The storage server hears of it.
    Hear,
    /// The client hears of it.
    Learn(usize),
    Failover,
    Restart(usize),
}

/// A mistake made on purpose: the exploration must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Fault {
    None,
    /// That pages are given back is said before the write-backs are there.
    AnswersEarly,
    /// It is said, and nothing is done.
    NotTakenBack,
    /// The lock is given up before the pages are.
    UnlocksFirst,
    /// A recall is acknowledged, and the pages stay.
    RecallKeepsPages,
    /// Uses without the lock are not waited for.
    FreeNotWaited,
    /// Pages are handed out without the lock though others have some.
    PagesUnlocked,
    /// Pages are handed out before their lock is there.
    PagesEarly,
    /// Pages that can be stored to are handed out under the lock for looking.
    StoresShared,
    /// Pages that were handed out for looking stay when the file is opened for writing.
    OpenKeepsShared,
    /// Giving back overlooks a page-in that has just seen its lease.
    AskedLate,
    /// A file's last close gives the lock up while it is mapped.
    ClosesMapped,
    /// Who writes is not told that somebody has pages.
    WritersNotTold,
    /// An open's answer does not say so.
    OpenNotMarked,
    /// An open for writing does not wait for the recall.
    OpensEarly,
    /// A new leader takes all who write for told.
    NewLeaderTold,
    /// Who has a new connection counts as told.
    RestartTold,
    /// A lock is given before the storage server has heard of an eviction.
    Unfenced,
    /// What was stored in a lost session is written back in the next one.
    WritesLost,
    /// A new daemon does not give up the lock of the former.
    FormerForgotten,
    /// Who waits for the lock itself does not answer.
    AskerSilent,
    /// The holder is not asked.
    HolderNotAsked,
}
