//! The rows of the table "Membership" in `docs/replication.md`.

strake_proto::rows! {
    /// "Membership".
    pub enum Membership {
        /// A SERVING replica of several leaves.
        Leaves = "leaves",
        /// All leave at once.
        AllLeave = "all-leave",
        /// One of the last in-sync set becomes the source.
        Source = "source",
        /// One returns, or its turn comes, and is filled.
        Fills = "fills",
        /// One returns and waits for its turn.
        Waits = "waits",
        /// One is filled.
        Filled = "filled",
        /// One that was being filled, or waited, leaves.
        FillEnds = "fill-ends",
        /// One of the last in-sync set restarted.
        LastRestarts = "last-restarts",
        /// One that holds nothing begins anew.
        Anew = "anew",
        /// A device failed.
        DeviceFailed = "device-failed",
        /// One that is wanted, and not among the replicas, joins.
        Joins = "joins",
        /// One that is not wanted is out of sync and leaves.
        Drops = "drops",
        /// One that is not wanted serves no reads any more.
        StepsBack = "steps-back",
        /// And knows that, or may serve nothing: it leaves.
        Gone = "gone",
    }
}
