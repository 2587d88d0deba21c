//! The types of the world of pages.

use strake_client::pages::{Mode, Use};
use strake_mds::leases::{Number, pages::Telling};
use strake_proto::{Ino, SessionId};

pub const FILE: Ino = 2;
pub const CLIENTS: usize = 2;

/// The bytes of the page, as counters: for each client the number of its stores and the number of
/// its writes.
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
    // To the storage server: a whole page, or one byte of it.
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

/// A request that the leader works on.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Task {
    pub client: usize,
    pub session: SessionId,
    pub stage: Stage,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// An open: other clients are to give up their leases.
    Opens,
    /// A lock that others still have.
    Waits(Mode),
    /// The lock is in the log, and the writers of the file are told.
    Tells(Mode, Telling),
}

/// How a client has the file open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Opened {
    No,
    ForReading,
    /// It has asked to open it for writing.
    Asked,
    /// That was answered; pages that were handed out for reading are taken back.
    Answered,
    ForBoth,
    /// Its pages are given up before it tells the leader.
    Closing,
}

/// A page-in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageIn {
    Wants,
    /// With a [`Fault`]: it has seen its lease, and giving back does not wait for it yet.
    Late(Use),
    /// From here on, giving back waits for it.
    Reads(Use),
    Read(Use, Cells),
    /// Answered without the leader and without a use, because the kernel may wait for it before it
    /// gives the page back.
    AtOnce(Cells),
}

/// A write(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Writes {
    /// This node's own mapping of the page is taken out.
    Wants,
    /// That is done. From here on page-ins wait.
    Ready,
    Sent(Use),
}

/// A page in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Page {
    pub cells: Cells,
    pub dirty: bool,
    /// The session in which it was handed out.
    pub session: SessionId,
}

/// Why pages are given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Why {
    /// The leader asked for them.
    Wanted(Number),
    /// The leader had asked for them before the lock was given.
    WantedBefore,
    /// Another lock is needed, or none any more.
    Leave,
    Recall,
    Hello,
    /// The node takes back pages that may be old by now.
    Check,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// Uses of the file end; the lock is kept for a moment.
    Leaving,
    /// The kernel gives the page back while the lock is held. `waits`: first for a page-in.
    /// `covers`: the page may be out, so the kernel is told to give it back, and may wait for later
    /// page-ins, too.
    UnderLock {
        waits: bool,
        covers: bool,
    },
    Unlock,
    /// The same without a lock.
    After {
        waits: bool,
        covers: bool,
    },
    /// Gives up the lock of a former daemon.
    UnlockFormer,
}

impl Step {
    /// The same step once the kernel has given the page back.
    pub fn given_back(self) -> Step {
        match self {
            Step::UnderLock { .. } => Step::UnderLock { waits: false, covers: false },
            Step::After { .. } => Step::After { waits: false, covers: false },
            other => other,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Job {
    pub why: Why,
    pub step: Step,
}

/// How often each kind of event may happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Bounds {
    /// The second client has the file open for reading at the beginning.
    pub reader: bool,
    /// The second client does not have the file open at the beginning; together with `reader`, no
    /// client has it open for writing. Otherwise both have.
    pub alone: bool,
    /// Opens for writing.
    pub opens: u8,
    /// Page-ins by both clients together.
    pub page_ins: u8,
    /// Stores to pages.
    pub stores: u8,
    /// write(2)s.
    pub writes: u8,
    /// Write-backs that the kernel begins on its own.
    pub write_backs: u8,
    /// Clean pages that the kernel drops on its own.
    pub drops: u8,
    /// Pages that a node takes back by itself.
    pub checks: u8,
    pub closes: u8,
    pub evictions: u8,
    pub failovers: u8,
    /// Daemons that are replaced.
    pub restarts: u8,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Deliver(Message),
    /// The leader continues with a request.
    Step(Task),
    /// A program touches the page.
    PageIn(usize),
    /// The client continues with the page-in.
    GoOn(usize),
    Store(usize),
    WriteBack(usize),
    /// The kernel drops the page, which is not dirty.
    Drop(usize),
    /// The node takes its pages back by itself.
    Check(usize),
    /// A program writes.
    Write(usize),
    /// The client continues with the write.
    WriteOn(usize),
    Open(usize),
    /// The program gets the answer to its open.
    IsOpen(usize),
    Close(usize),
    /// The client tells the leader of the close.
    IsClosed(usize),
    /// The kernel gives the page back.
    TakeOut(usize),
    /// The client continues with giving back.
    Job(usize, Job),
    /// A client has found the new leader.
    Reconnect(usize),
    /// The leader checks the waiting requests again.
    Look,
    Evict(usize),
    /// The storage server learns of the evictions.
    Hear,
    /// The client learns of its eviction.
    Learn(usize),
    Failover,
    Restart(usize),
}

/// A mistake made on purpose: the exploration must find it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, clap::ValueEnum)]
pub enum Fault {
    None,
    /// A client says that it has given its pages back before its write-backs have arrived.
    AnswersEarly,
    /// A client says so without giving them back.
    NotTakenBack,
    /// The lock is given up before the pages.
    UnlocksFirst,
    /// A recall is acknowledged although the pages stay.
    RecallKeepsPages,
    /// Giving the lock up does not wait for uses without the lock.
    FreeNotWaited,
    /// Pages are handed out without the lock although others have pages.
    PagesUnlocked,
    /// Pages are handed out before their lock is given.
    PagesEarly,
    /// Pages that can be stored to are handed out under a read lock.
    StoresShared,
    /// Pages that were handed out for reading stay when the file is opened for writing.
    OpenKeepsShared,
    /// Giving back does not wait for a page-in that has just seen its lease.
    AskedLate,
    /// The last close of a file gives up the lock while the file is still mapped.
    ClosesMapped,
    /// Writers are not told that another client has pages.
    WritersNotTold,
    /// The answer to an open does not say that another client has pages.
    OpenNotMarked,
    /// An open for writing does not wait for the recall of others' leases.
    OpensEarly,
    /// A new leader assumes that all writers were told.
    NewLeaderTold,
    /// A client with a new connection counts as told.
    RestartTold,
    /// A lock is given before the storage server knows of an eviction.
    Unfenced,
    /// What was stored in a session that was lost is written back in the next session.
    WritesLost,
    /// A new daemon does not give up the lock of the former daemon.
    FormerForgotten,
    /// A client that waits for the lock does not answer when it is asked for its pages.
    AskerSilent,
    /// The holder of the lock is not asked for its pages.
    HolderNotAsked,
    /// A page-in that the kernel may wait for before it gives pages back waits for the lock.
    PageInsWait,
    /// What such a page-in has brought stays in the kernel.
    KeptAtOnce,
    /// A write is sent although its page was handed out while it waited for the lock.
    WritesBeside,
    /// The lock is given up although pages are being given back for another reason, too, and are
    /// handed out at once meanwhile.
    OthersNotWaited,
}
