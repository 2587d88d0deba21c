//! The rows of the client's table in `docs/leases.md`.

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
