//! The rows of the client's tables in `docs/leases.md` and `docs/mappings.md`.

strake_proto::rows! {
    /// The client's table.
    pub enum Holder {
        /// Answered from memory.
        Remembered = "remembered",
        /// Kept from an answer.
        Kept = "kept",
        /// Not kept, because it was voided meanwhile or an own change is in progress.
        NotKept = "not-kept",
        /// A recall.
        Recalled = "voided",
        /// An own change of a name.
        OwnName = "own-name",
        /// An own change of an inode.
        OwnInode = "own-inode",
        /// Kept from the answer to an own change.
        OwnKept = "own-kept",
        /// Not kept from the answer to an own change.
        OwnNotKept = "own-not-kept",
        /// An own change was given up.
        GivenUp = "own-given-up",
        /// Leases renewed.
        Renewed = "lives",
        /// Leases that had ended begin again.
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
        /// The lock is requested.
        Asked = "page-asked",
        /// Another use here requests the lock, or it is being released.
        Waited = "page-waited",
        /// The lock was granted.
        Granted = "page-granted",
        /// Used under the lock.
        Used = "page-used",
        /// A read lock is released to get a write lock.
        Exchanged = "page-exchanged",
        /// The lock was lost with the session.
        Lost = "page-lost",
        /// Wanted by others before it was granted.
        WantedEarly = "page-wanted-early",
        /// To be released once uses without it are over.
        FreeEnds = "page-free-ends",
        /// To be released once uses of it are over.
        UsersEnd = "page-users-end",
        /// To be released, but kept for a moment.
        Kept = "page-kept",
        /// Released.
        Left = "page-left",
    }
}
