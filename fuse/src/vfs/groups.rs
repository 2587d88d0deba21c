//! Supplementary groups of callers. The kernel sends uid, gid and thread id; the other groups are
//! in `/proc/TID/status`.

use std::fs;

use strake_proto::pb;

use super::types::Caller;

/// Linux's NGROUPS_MAX is 65,536; requests carry at most this many.
const MOST_GROUPS: usize = 4096;

impl Caller<'_> {
    /// The credentials with which the servers check the caller's permissions.
    pub(super) fn creds(self) -> pb::Creds {
        pb::Creds { uid: self.uid, gid: self.gid, groups: of(self) }
    }
}

/// The caller's groups now. They are not cached: a thread may change them, and reading them costs
/// far less than a request to the metadata server. Empty for root, which needs none, and where the
/// caller is not visible (another process-id namespace, or gone).
fn of(caller: Caller<'_>) -> Vec<u32> {
    if caller.uid == 0 || caller.pid == 0 {
        return Vec::new();
    }
    parse(&fs::read_to_string(format!("/proc/{}/status", caller.pid)).unwrap_or_default())
}

/// The groups in the text of `/proc/TID/status`.
pub fn parse(status: &str) -> Vec<u32> {
    let line = status.lines().find_map(|l| l.strip_prefix("Groups:")).unwrap_or_default();
    line.split_whitespace().filter_map(|g| g.parse().ok()).take(MOST_GROUPS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_status_line() {
        assert_eq!(parse("Name:\tx\nGroups:\t4 24 1000 \nNStgid:\t1\n"), vec![4, 24, 1000]);
        assert_eq!(parse("Groups:\t \n"), Vec::<u32>::new());
        assert_eq!(parse(""), Vec::<u32>::new());
    }

    #[test]
    fn root_and_strangers_have_none() {
        for (uid, pid) in [(0, 1), (5, 0), (5, u32::MAX)] {
            assert!(of(Caller { uid, gid: uid, pid, operation: None }).is_empty());
        }
    }
}
