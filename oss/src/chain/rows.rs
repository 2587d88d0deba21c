//! The rows of the replica's tables in `docs/replication.md`.

strake_proto::rows! {
    /// "Replica: events × state of the chunk's slot".
    pub enum Event {
        /// A client's update that was made before.
        ClientKnown = "client-known",
        /// Another copy of a client's update that was refused.
        ClientRefused = "client-refused",
        /// A client's update of a round that is over.
        ClientLate = "client-late",
        /// A client's update that was on its way for too long.
        ClientExpired = "client-expired",
        /// A copy of a client's update whose file was removed since.
        ClientGone = "client-gone",
        /// A repetition of a write that others have overtaken.
        ClientOvertaken = "client-overtaken",
        /// A client's update gets a version and the slot.
        ClientStarts = "client-starts",
        /// A client's update waits.
        ClientQueues = "client-queues",
        /// A forward of what is committed here.
        ForwardKnown = "forward-known",
        /// Another copy of a forward that was refused.
        ForwardRefused = "forward-refused",
        /// A forward gets the slot.
        ForwardStarts = "forward-starts",
        /// A copy of a forward whose file was removed since.
        ForwardGone = "forward-gone",
        /// A copy of a forward of its removal.
        ForwardForgotten = "forward-forgotten",
        /// A forward that builds on something else.
        ForwardGap = "forward-gap",
        /// A forward of what is in the slot.
        ForwardJoins = "forward-joins",
        /// Another forward waits.
        ForwardQueues = "forward-queues",
        /// A hold gets the slot.
        HoldGranted = "hold-granted",
        /// A hold waits.
        HoldQueues = "hold-queues",
        /// Too many wait.
        QueueFull = "queue-full",
    }
}

strake_proto::rows! {
    /// The second table there: the update in the slot.
    pub enum Progress {
        /// Committed by the last replica.
        CommitLast = "commit-last",
        /// Committed after the successor.
        CommitAnswered = "commit-answered",
        /// Sent on.
        Forward = "forward",
        /// The successor was faster than the own disk.
        AnsweredFirst = "answered-first",
        /// Not stored here, and by nobody else.
        StagingFailed = "staging-failed",
        /// Not stored here; the successor that was asked is gone; this is the head.
        FailedHead = "failed-head",
        /// The same at another replica.
        FailedMiddle = "failed-middle",
        /// Not stored here, and perhaps by the present successor.
        FailedAsks = "failed-asks",
        /// Not stored here, but by the successor.
        FailedBehind = "failed-behind",
        /// The successor refused for good.
        Refused = "refused",
        /// Asked again later.
        TryAgain = "try-again",
        /// The successor is given the whole chunk first.
        Push = "push",
        /// The successor lacks what it must have.
        Gap = "gap",
        /// What was staged could not be committed.
        CommitFailed = "commit-failed",
    }
}

strake_proto::rows! {
    /// "New epoch", for replicas with something in a slot.
    pub enum Epoch {
        /// SERVING, with a successor.
        Successor = "epoch-successor",
        /// SERVING, with none.
        Last = "epoch-last",
        /// LASTSRV.
        Kept = "epoch-kept",
        /// Out of sync.
        Dropped = "epoch-dropped",
        /// Who waited comes again.
        QueueStale = "epoch-queue",
    }
}

strake_proto::rows! {
    /// "Reads".
    pub enum Reads {
        /// Nothing in the slot.
        Clean = "read-clean",
        /// Being changed, not at the tail.
        Dirty = "read-dirty",
        /// Being changed, at the tail.
        Tail = "read-tail",
        /// A replica that was lost may have shown more.
        Shown = "read-shown",
        /// Not in sync.
        NotServing = "read-not-serving",
        /// In sync for so short that the predecessor may not know.
        Unconfirmed = "read-unconfirmed",
    }
}

strake_proto::rows! {
    /// "Copies that are not in sync".
    pub enum Copies {
        /// A block that is lost here has its checksum there.
        Same = "copy-same",
        /// Its checksum is not known, and the chunk there is at this version.
        Version = "copy-version",
        /// Neither.
        Other = "copy-other",
        /// A fill brings as damaged what the receiver has good.
        Keeps = "fill-keeps",
        /// A target that has left asks, and all can be read.
        Vouched = "vouched",
        /// Likewise, after a repair.
        Mended = "vouch-mended",
        /// Something is damaged still.
        Refused = "vouch-refused",
        /// A target that has left keeps all while the chain lacks a replica.
        Waits = "former-waits",
    }
}
