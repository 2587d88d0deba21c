//! Feature levels: which messages, log entries and formats the members of a cluster may use. See
//! `docs/feature-levels.md`.

use crate::{Code, Error, Result};

/// The newest feature level that this program knows. It knows all lower ones, too.
pub const FEATURE_LEVEL: u32 = 1;

/// What each level brings, from 0 on.
pub const LEVELS: [&str; FEATURE_LEVEL as usize + 1] = [
    "programs from before feature levels, which say nothing of them",
    "feature levels: `RaiseLevel`, `Format.level`, and format 8 of the metadata state",
];

/// `code`, in one sentence, unless a program that knows `knows` may take part in a cluster of level
/// `cluster`. `who`: the process that runs the program.
pub fn check(knows: u32, cluster: u32, code: Code, who: impl FnOnce() -> String) -> Result<()> {
    if knows >= cluster { Ok(()) } else { Err(too_old(knows, cluster, code, &who())) }
}

/// The error for a program that knows less than the cluster has.
pub fn too_old(knows: u32, cluster: u32, code: Code, who: &str) -> Error {
    let m = format!(
        "this cluster has feature level {cluster}, and the program of {who} knows level {knows}: run a newer strake"
    );
    Error::new(code, m)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_program_is_refused_in_one_sentence() {
        check(1, 1, Code::Stale, || unreachable!()).unwrap();
        check(2, 1, Code::Stale, || unreachable!()).unwrap();
        let e = check(0, 1, Code::Stale, || "metadata server 3".into()).unwrap_err();
        assert_eq!(e.code, Code::Stale);
        assert_eq!(
            e.message,
            "this cluster has feature level 1, and the program of metadata server 3 knows level 0: run a newer strake"
        );
    }
}
