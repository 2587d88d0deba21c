//! The rows of the replica's tables in `docs/replication.md`.

strake_proto::rows! {
    /// "Replica: events × state of the chunk's slot".
    pub enum Event {
        /// A client's update that was applied before.
        ClientKnown = "client-known",
        /// Another copy of a client's update that was refused.
        ClientRefused = "client-refused",
        /// A client's update of a round that is over.
        ClientLate = "client-late",
        /// A client's update that was in flight for too long.
        ClientExpired = "client-expired",
        /// A copy of a client's update whose file was removed since.
        ClientGone = "client-gone",
        /// A repeated write after which others changed the chunk.
        ClientOvertaken = "client-overtaken",
        /// A client's update gets a version and the slot.
        ClientStarts = "client-starts",
        /// A client's update waits.
        ClientQueues = "client-queues",
        /// A forward of a version that is committed here.
        ForwardKnown = "forward-known",
        /// Another copy of a forward that was refused.
        ForwardRefused = "forward-refused",
        /// A forward gets the slot.
        ForwardStarts = "forward-starts",
        /// A copy of a forward whose file was removed since.
        ForwardGone = "forward-gone",
        /// A late copy of the forward of its removal, after the chunk was forgotten here.
        ForwardForgotten = "forward-forgotten",
        /// A forward that builds on another version than the one committed here.
        ForwardGap = "forward-gap",
        /// A forward of the update in the slot.
        ForwardJoins = "forward-joins",
        /// Another forward waits.
        ForwardQueues = "forward-queues",
        /// A hold gets the slot.
        HoldGranted = "hold-granted",
        /// A hold waits.
        HoldQueues = "hold-queues",
        /// The queue is full.
        QueueFull = "queue-full",
    }
}

strake_proto::rows! {
    /// The second table there: "the update in the slot".
    pub enum Progress {
        /// Committed by the last replica.
        CommitLast = "commit-last",
        /// Committed after the successor.
        CommitAnswered = "commit-answered",
        /// Forwarded to the successor.
        Forward = "forward",
        /// The successor answered before this replica's own disk.
        AnsweredFirst = "answered-first",
        /// Not stored here, nor on any other replica.
        StagingFailed = "staging-failed",
        /// Not stored here; the successor that was asked is gone; this is the head.
        FailedHead = "failed-head",
        /// The same at another replica.
        FailedMiddle = "failed-middle",
        /// Not stored here, but perhaps on the current successor.
        FailedAsks = "failed-asks",
        /// Not stored here, but on the successor.
        FailedBehind = "failed-behind",
        /// The successor refused for good.
        Refused = "refused",
        /// Asked again later.
        TryAgain = "try-again",
        /// The successor gets the whole chunk first.
        Push = "push",
        /// The successor lacks a version that it must have.
        Gap = "gap",
        /// The staged update could not be committed.
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
        /// Queued operations are refused; their senders ask again.
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
        /// A replica that was lost may have shown a newer version.
        Shown = "read-shown",
        /// Not in sync.
        NotServing = "read-not-serving",
        /// In sync for so short a time that the predecessor may not know it.
        Unconfirmed = "read-unconfirmed",
    }
}

strake_proto::rows! {
    /// "Copies that are not in sync".
    pub enum Copies {
        /// The copy has a block with the checksum of the block that is lost here.
        Same = "copy-same",
        /// The lost block's checksum is not known, but the copy's chunk is at this version.
        Version = "copy-version",
        /// Neither of the two.
        Other = "copy-other",
        /// A resync brings a block as damaged that the receiver has intact.
        Keeps = "fill-keeps",
        /// A target that has left asks, and this replica can read everything.
        Vouched = "vouched",
        /// The same, after a repair.
        Mended = "vouch-mended",
        /// Something is still damaged.
        Refused = "vouch-refused",
        /// A target that has left keeps everything while the chain lacks a replica.
        Waits = "former-waits",
    }
}
