//! The rows of the client's tables in `docs/leases.md` and `docs/mappings.md`.

strake_proto::rows! {
    /// The client's table.
    pub enum Holder {
        /// Answered from memory.
        Remembered = "remembered",
        /// Kept of an answer.
        Kept = "kept",
        /// Not kept, because it was voided meanwhile or an own change is under way.
        NotKept = "not-kept",
        /// A recall.
        Recalled = "voided",
        /// An own change of a name.
        OwnName = "own-name",
        /// An own change of an inode.
        OwnInode = "own-inode",
        /// Kept of the answer to an own change.
        OwnKept = "own-kept",
        /// Not kept of the answer to an own change.
        OwnNotKept = "own-not-kept",
        /// An own change was given up.
        GivenUp = "own-given-up",
        /// Leases renewed.
        Renewed = "lives",
        /// Leases that had been over begin anew.
        Anew = "lives-anew",
        /// The term is over.
        Over = "over",
        /// A new connection.
        Connected = "connected",
        /// A renewal was answered without leases.
        NoLeases = "no-leases",
    }
}

strake_proto::rows! {
    /// Pages of mappings, in `docs/mappings.md`.
    pub enum Paged {
        /// A file is marked.
        Marked = "page-marked",
        /// Used without the lock.
        Free = "page-free",
        /// The lock is asked for.
        Asked = "page-asked",
        /// Another one here asks for it, or it is being given up.
        Waited = "page-waited",
        /// It was got.
        Granted = "page-granted",
        /// Used under the lock.
        Used = "page-used",
        /// One for looking is given up for one for changes.
        Exchanged = "page-exchanged",
        /// It went with the session.
        Lost = "page-lost",
        /// Wanted by others before it was got.
        WantedEarly = "page-wanted-early",
        /// To be given up once uses without it are over.
        FreeEnds = "page-free-ends",
        /// To be given up once uses of it are over.
        UsersEnd = "page-users-end",
        /// To be given up, but kept for a moment.
        Kept = "page-kept",
        /// Given up.
        Left = "page-left",
    }
}
