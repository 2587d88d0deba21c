//! The rows of the leader's tables in `docs/leases.md`.

strake_proto::rows! {
    /// The leader's table.
    pub enum Leader {
        Elected = "elected",
        Hello = "hello",
        HelloLate = "hello-late",
        ChangeLate = "change-late",
        LivesOn = "lives-on",
        Renewed = "renewed",
        NotRenewed = "not-renewed",
        Looked = "looked",
        LookedAgain = "looked-again",
        Granted = "granted",
        Owed = "owed",
        Spared = "spared",
        Entangled = "entangled",
        Acknowledged = "acknowledged",
        Recalled = "recalled",
        NothingRecalled = "nothing-recalled",
        TermOver = "term-over",
        Goodbye = "goodbye",
        EndedAlive = "ended-alive",
        GivenUp = "given-up",
        Waited = "waited",
        Unfenced = "unfenced",
        EndSought = "end-sought",
        EndFound = "end-found",
        EndMoved = "end-moved",
        MadeRoom = "made-room",
        InGrace = "in-grace",
        NoHello = "no-hello",
        WrittenElsewhere = "written-elsewhere",
        AllFull = "all-full",
        InodeFull = "inode-full",
        Hot = "hot",
        DoesNotForget = "does-not-forget",
    }
}

strake_proto::rows! {
    /// What writers have not reported.
    pub enum Reporting {
        Asked = "report-asked",
        AskedToSet = "report-asked-to-set",
        AskedToWrite = "report-asked-to-write",
        Shared = "report-shared",
        Sent = "report-sent",
        SentAgain = "report-sent-again",
        Working = "report-working",
        Made = "report-made",
        NotWaited = "report-not-waited",
        Late = "report-late",
        Excused = "report-excused",
        LeftOut = "report-left-out",
    }
}

strake_proto::rows! {
    /// Questions about locks, in `docs/locks.md`.
    pub enum Checking {
        Asked = "lock-asked",
        Shared = "lock-shared",
        NotAsked = "lock-not-asked",
        Sent = "lock-sent",
        Answered = "lock-answered",
        GivenUp = "lock-given-up",
    }
}

strake_proto::rows! {
    /// Questions about page locks of mappings, in `docs/mappings.md`.
    pub enum Paging {
        Asked = "pages-asked",
        Shared = "pages-shared",
        Sent = "pages-sent",
        SentAgain = "pages-sent-again",
        Working = "pages-working",
        Given = "pages-given",
        NotWaited = "pages-not-waited",
        Late = "pages-late",
        WritersTold = "pages-writers-told",
        NobodyTold = "pages-nobody-told",
    }
}
