//! The one thing a chunk has in flight, and what is to be done about it next.

use std::collections::VecDeque;

use strake_proto::{
    Code, Error, TargetId,
    data::{Stamp, Version, Writer},
};

use super::{
    Op, OpId, View,
    rows::{Progress, Reads},
};

#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Slot {
    pub current: Option<Current>,
    pub queue: VecDeque<Op>,
}

impl Slot {
    /// Whether what is committed may be older than what a reader was told elsewhere.
    pub(crate) fn is_dirty(&self, at_tail: bool) -> bool {
        let Some(Current::Update(u)) = &self.current else { return false };
        let (row, dirty) = match (u.shown, at_tail) {
            _ if u.dropped => return false,
            (true, true) => (Reads::Shown, true),
            (false, true) => (Reads::Tail, false),
            (_, false) if u.shown || u.exposed => (Reads::Dirty, true),
            // Nobody else has it yet.
            (_, false) => return false,
        };
        row.taken();
        dirty
    }
}

#[derive(Clone, Debug, Hash)]
pub(crate) enum Current {
    Hold(OpId),
    Update(Box<Update>),
}

#[derive(Clone, Debug, Hash)]
pub(crate) enum Staging {
    Pending,
    Ok,
    Failed(Error),
}

/// Where the update stands with the successor, in the present epoch.
#[derive(Clone, Debug, Hash)]
pub(crate) enum Next {
    /// Not asked.
    Idle,
    Asked,
    /// Being given the whole chunk first.
    Pushing,
    /// Asked without success; to be asked again after a pause.
    Paused,
    Done(Vec<Stamp>),
    Refused(Error),
}

#[derive(Clone, Debug, Hash)]
pub(crate) struct Update {
    pub op: OpId,
    /// Repetitions of the same forward, answered with it.
    pub also: Vec<OpId>,
    pub eager: bool,
    pub version: Version,
    pub prev: Version,
    pub writer: Writer,
    pub staging: Staging,
    pub next: Next,
    /// Counts messages to the successor; answers to older ones are ignored.
    pub attempt: u32,
    /// Some replica behind has been sent it: it may be committed there.
    pub exposed: bool,
    /// It was sent to a SERVING one, which may have committed it and shown it to readers.
    pub shown: bool,
    /// Answered `NotServing`; only staging is waited for.
    pub dropped: bool,
}

/// What the tables of `docs/replication.md` say is due.
#[derive(Debug)]
pub(crate) enum Due {
    Wait,
    Forward(TargetId),
    Commit(Vec<Stamp>),
    Refuse(Error),
    /// The successor has what this replica cannot have.
    Fail(Error),
    /// Dropped, and staging is over.
    Free,
}

impl Update {
    pub(crate) fn new(op: &Op, version: Version, prev: Version, writer: Writer) -> Update {
        Update {
            op: op.id,
            also: Vec::new(),
            eager: op.eager,
            version,
            prev,
            writer,
            staging: Staging::Pending,
            next: Next::Idle,
            attempt: 0,
            exposed: false,
            shown: false,
            dropped: false,
        }
    }

    pub(crate) fn due(&mut self, view: &View) -> Due {
        if self.dropped {
            return if matches!(self.staging, Staging::Pending) { Due::Wait } else { Due::Free };
        }
        if !view.takes_updates() {
            return Due::Wait; // LASTSRV: kept until this replica knows whether it is the source
        }
        let successor = view.successor.map(|(t, _)| t);
        let head = view.head;
        let (row, due) = match (&self.staging, &mut self.next, successor) {
            (Staging::Pending, Next::Idle, Some(s)) if self.eager || self.exposed => {
                (Progress::Forward, Due::Forward(s))
            }
            (Staging::Pending, _, _) => return Due::Wait,
            (Staging::Ok, _, None) => (Progress::CommitLast, Due::Commit(Vec::new())),
            (Staging::Ok, Next::Done(stamps), Some(_)) => {
                (Progress::CommitAnswered, Due::Commit(std::mem::take(stamps)))
            }
            (Staging::Ok, Next::Idle, Some(s)) => (Progress::Forward, Due::Forward(s)),
            (Staging::Ok, Next::Refused(e), Some(_)) => (Progress::Refused, Due::Refuse(e.clone())),
            (Staging::Failed(_), Next::Refused(e), Some(_)) => {
                (Progress::StagingFailed, Due::Refuse(e.clone()))
            }
            // The lost successor may have shown it to readers; those before this replica may have
            // it.
            (Staging::Failed(e), _, None) if self.exposed && !head => {
                (Progress::FailedMiddle, Due::Fail(e.clone()))
            }
            (Staging::Failed(e), _, None) if self.exposed => {
                (Progress::FailedHead, Due::Refuse(e.clone()))
            }
            (Staging::Failed(e), _, None) => (Progress::StagingFailed, Due::Refuse(e.clone())),
            (Staging::Failed(e), Next::Done(_), Some(_)) => {
                (Progress::FailedBehind, Due::Fail(e.clone()))
            }
            // Sent to somebody in an earlier epoch: the present successor may have it from there.
            (Staging::Failed(_), Next::Idle, Some(s)) if self.exposed => {
                (Progress::FailedAsks, Due::Forward(s))
            }
            (Staging::Failed(e), Next::Idle, Some(_)) => {
                (Progress::StagingFailed, Due::Refuse(e.clone()))
            }
            (_, Next::Asked | Next::Pushing | Next::Paused, Some(_)) => return Due::Wait,
        };
        row.taken();
        due
    }

    /// Forgets what was said to the successor of the epoch before.
    pub(crate) fn new_epoch(&mut self) {
        self.next = Next::Idle;
        self.attempt = self.attempt.wrapping_add(1);
    }
}

/// How a successor's refusal is to be taken.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It has not made the update and will not, in this epoch, whichever attempt arrives.
    Final,
    /// Not now; or there is no answer, and it may have made it.
    Transient,
    /// It does not have what the update builds on.
    Gap,
}

impl Refusal {
    pub(crate) fn of(code: Code) -> Refusal {
        match code {
            Code::VersionGap => Refusal::Gap,
            Code::StaleEpoch
            | Code::NotServing
            | Code::LeaseExpired
            | Code::Overloaded
            | Code::NotLeader
            | Code::Disconnected
            | Code::TimedOut => Refusal::Transient,
            _ => Refusal::Final,
        }
    }
}
