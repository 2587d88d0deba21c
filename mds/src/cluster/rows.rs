//! The rows of the table "Membership" in `docs/replication.md`.

strake_proto::rows! {
    /// "Membership".
    pub enum Membership {
        /// One of several SERVING replicas leaves.
        Leaves = "leaves",
        /// All leave at once.
        AllLeave = "all-leave",
        /// A replica of the last in-sync set becomes the source.
        Source = "source",
        /// A replica returns, or its turn comes, and its resync begins.
        Fills = "fills",
        /// A replica returns and waits for its turn.
        Waits = "waits",
        /// A resync has ended.
        Filled = "filled",
        /// A replica that was being resynced, or waited, leaves.
        FillEnds = "fill-ends",
        /// A replica of the last in-sync set restarted.
        LastRestarts = "last-restarts",
        /// A chain that holds nothing begins anew.
        Anew = "anew",
        /// A device failed.
        DeviceFailed = "device-failed",
        /// A wanted target that is not among the replicas joins.
        Joins = "joins",
        /// A replica that is not wanted is out of sync and leaves.
        Drops = "drops",
        /// A replica that is not wanted stops serving reads.
        StepsBack = "steps-back",
        /// It knows that, or may serve nothing: it leaves.
        Gone = "gone",
    }
}
