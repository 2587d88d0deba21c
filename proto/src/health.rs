//! What is checked of a cluster's health: each check has a code, which scripts may rely on.
//! `docs/health.md` says what each means. Servers give the codes with the notices of their status;
//! the rest is found by `strake status` from all answers.

/// How bad something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// All data can be read and written.
    Warn,
    /// Data cannot be read or written, or is lost.
    Error,
}

/// A check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Check {
    /// Its code.
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// Whether one more failure may cost data or service, or has already.
    pub redundancy: bool,
}

/// Declares the checks, and the list of all of them.
macro_rules! checks {
    ($($(#[doc = $doc:literal])+ $name:ident = $code:literal, $severity:ident, $redundancy:literal;)*) => {
        $(
            $(#[doc = $doc])+
            pub const $name: Check =
                Check { code: $code, severity: Severity::$severity, redundancy: $redundancy };
        )*
        /// All checks, the worst first.
        pub const ALL: &[Check] = &[$($name),*];
    };
}

checks! {
    /// No server answers.
    NO_ANSWER = "no-answer", Error, true;
    /// No metadata server leads.
    NO_LEADER = "no-leader", Error, true;
    /// There are no chains, so no file data can be stored.
    NO_CHAINS = "no-chains", Error, true;
    /// All copies of some chains were on targets that were given up.
    DATA_LOST = "data-lost", Error, true;
    /// Chunks of which each copy in sync is damaged.
    NO_GOOD_COPY = "no-good-copy", Error, true;
    /// Chains without a copy in service.
    NO_COPY = "no-copy-in-service", Error, true;
    /// Chains that take no writes, because of `min_copies`.
    WRITES_REFUSED = "writes-refused", Error, true;
    /// A target has no more space for new data.
    TARGET_FULL = "target-full", Error, false;
    /// A metadata server's state is damaged, and no other member has one to copy.
    MEMBER_DAMAGED = "member-damaged", Error, true;
    /// Chains of one copy are out of service, where files usually have more.
    SINGLE_COPY_AWAY = "single-copy-away", Warn, true;
    /// Chains with fewer copies in sync than they are to have.
    COPIES_MISSING = "copies-missing", Warn, true;
    /// A server does not answer.
    SERVER_SILENT = "server-silent", Warn, true;
    /// A metadata server lacks what the leader had committed.
    MEMBER_BEHIND = "member-behind", Warn, true;
    /// A metadata server waits for a copy of the state.
    MEMBER_COPYING = "member-copying", Warn, true;
    /// After a recovery of the metadata group chains wait to hear from targets.
    RECOVERY_WAITS = "recovery-waits", Warn, true;
    /// A server does not serve a target of its configuration.
    TARGET_REFUSED = "target-refused", Warn, true;
    /// A target's device has failed.
    TARGET_FAILED = "target-failed", Warn, true;
    /// A target has left its chains, because the file system below it is full.
    TARGET_LACKS_SPACE = "target-lacks-space", Warn, true;
    /// A target keeps chunks that are damaged on the replicas in sync.
    CHUNKS_KEPT = "chunks-kept", Warn, true;
    /// A server's program is too old to say how it is.
    OLD_PROGRAM = "old-program", Warn, false;
    /// A target is out of service.
    TARGET_DEAD = "target-dead", Warn, false;
    /// A target, or a rack, has little space left.
    NEARLY_FULL = "nearly-full", Warn, false;
    /// A target is slower than the others.
    TARGET_SLOW = "target-slow", Warn, false;
    /// A target lost its chunk table, and was filled again.
    TARGET_EMPTIED = "target-emptied", Warn, false;
    /// The disk of a metadata server is almost full.
    METADATA_DISK_FULL = "metadata-disk-full", Warn, false;
    /// A metadata server's state was damaged, and has been replaced.
    MEMBER_REPAIRED = "member-repaired", Warn, false;
    /// A server's clock differs from the others'.
    CLOCK_OFF = "clock-off", Warn, false;
}

/// The check of a code. `None`: a newer program's.
pub fn check(code: &str) -> Option<Check> {
    ALL.iter().find(|c| c.code == code).copied()
}

/// The notices of a server's status: texts, each with its check where it has one.
#[derive(Debug, Default)]
pub struct Notices(Vec<(Option<Check>, String)>);

impl Notices {
    /// Adds something that is wrong.
    pub fn found(&mut self, check: Check, text: impl Into<String>) {
        self.0.push((Some(check), text.into()));
    }

    /// Adds something that is good to know, and not wrong.
    pub fn note(&mut self, text: impl Into<String>) {
        self.0.push((None, text.into()));
    }

    /// Texts and codes, as in `StatusReply`.
    pub fn split(self) -> (Vec<String>, Vec<String>) {
        self.0.into_iter().map(|(c, text)| (text, c.map_or("", |c| c.code).to_string())).unzip()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_check_has_a_code_of_its_own_and_is_in_the_docs() {
        let codes: BTreeSet<&str> = ALL.iter().map(|c| c.code).collect();
        assert_eq!(codes.len(), ALL.len());
        assert!(ALL.is_sorted_by_key(|c| std::cmp::Reverse(c.severity)));
        let page = include_str!("../../docs/health.md");
        let told: BTreeSet<&str> = page
            .lines()
            .filter_map(|l| l.strip_prefix("| `")?.split_once('`').map(|(code, _)| code))
            .collect();
        assert_eq!(told, codes);
        assert_eq!(check("no-leader"), Some(NO_LEADER));
        assert_eq!(check("of a later version"), None);
    }

    #[test]
    fn a_notice_without_a_check_has_no_code() {
        let mut n = Notices::default();
        n.note("a");
        n.found(TARGET_SLOW, "b");
        let all = |of: [&str; 2]| of.map(String::from).to_vec();
        assert_eq!(n.split(), (all(["a", "b"]), all(["", "target-slow"])));
    }
}
