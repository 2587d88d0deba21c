//! The one operation that a chunk has in flight, and what is due for it next.

use std::collections::VecDeque;

use strake_proto::{
    Code, Error, Result, TargetId,
    data::{BootId, Version, Writer},
};

use super::{
    Local, Op, OpId, View,
    rows::{Progress, Reads},
};

#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Slot {
    pub current: Option<Current>,
    pub queue: VecDeque<Op>,
}

impl Slot {
    /// Whether the committed version may be older than what a reader saw on another replica.
    pub(crate) fn is_dirty(&self, at_tail: bool) -> bool {
        let Some(Current::Update(u)) = &self.current else { return false };
        let (row, dirty) = match (u.shown, at_tail) {
            _ if u.dropped => return false,
            (true, true) => (Reads::Shown, true),
            (false, true) => (Reads::Tail, false),
            (_, false) if u.shown || u.exposed => (Reads::Dirty, true),
            // No other replica has it yet.
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

/// Where the update stands with the successor, in the current epoch.
#[derive(Clone, Debug, Hash)]
pub(crate) enum Next {
    /// Not asked.
    Idle,
    Asked,
    /// The successor is getting the whole chunk first.
    Pushing,
    /// Asked without success; to be asked again after a pause.
    Paused,
    Done(Vec<BootId>),
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
    /// It was sent to a replica behind, which may have committed it.
    pub exposed: bool,
    /// It was sent to a SERVING replica, which may have committed it and shown it to readers.
    pub shown: bool,
    /// Answered with `NotServing`; only the end of staging is awaited.
    pub dropped: bool,
}

/// The step that is due according to the tables of `docs/replication.md`.
#[derive(Debug)]
pub(crate) enum Due {
    Wait,
    Forward(TargetId),
    Commit(Vec<BootId>),
    Refuse(Error),
    /// The successor has the update and this replica cannot store it.
    Fail(Error),
    /// The update was dropped, and staging is over.
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
            (Staging::Ok, Next::Done(boot_ids), Some(_)) => {
                (Progress::CommitAnswered, Due::Commit(std::mem::take(boot_ids)))
            }
            (Staging::Ok, Next::Idle, Some(s)) => (Progress::Forward, Due::Forward(s)),
            (Staging::Ok, Next::Refused(e), Some(_)) => (Progress::Refused, Due::Refuse(e.clone())),
            (Staging::Failed(_), Next::Refused(e), Some(_)) => {
                (Progress::StagingFailed, Due::Refuse(e.clone()))
            }
            // The lost successor may have shown it to readers, and the replicas before this one may
            // have it.
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
            // It was sent in an earlier epoch: the current successor may have it from then.
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

    /// Makes the update visible here.
    pub(crate) fn commit(&self, op: OpId, local: &mut dyn Local) -> Result<()> {
        assert!(
            matches!(self.staging, Staging::Ok) && !self.dropped,
            "an update is committed that is not stored here, or was refused"
        );
        local.commit(op, self.version, self.writer)
    }

    /// Forgets the exchange with the successor of the epoch before.
    pub(crate) fn new_epoch(&mut self) {
        self.next = Next::Idle;
        self.attempt = self.attempt.wrapping_add(1);
    }
}

/// What a successor's refusal means.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It has not made the update, and will not in this epoch, whichever attempt arrives.
    Final,
    /// Not now; or there is no answer, and it may have made the update.
    Transient,
    /// It does not have the version that the update builds on.
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
