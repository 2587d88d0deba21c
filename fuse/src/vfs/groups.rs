//! Supplementary groups of callers. The kernel sends uid, gid and thread id; the rest is in `/proc/TID/status`.

use std::{collections::BTreeMap, fs, time::Duration};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::Caller;

/// How long a thread's groups are believed. setgroups(2) takes effect on the mount within this time.
const FRESH: Duration = Duration::from_secs(1);
const MOST: usize = 1024;
/// Linux's NGROUPS_MAX is 65,536; requests carry no more than this many.
const MOST_GROUPS: usize = 4096;

type Key = (u32, u32, u32);

#[derive(Default)]
pub(super) struct Groups {
    known: Mutex<BTreeMap<Key, (Instant, Vec<u32>)>>,
}

impl Groups {
    /// Empty for root, who needs none, and where the caller cannot be seen (another process-id namespace, or gone).
    pub(super) fn of(&self, caller: Caller) -> Vec<u32> {
        if caller.uid == 0 || caller.pid == 0 {
            return Vec::new();
        }
        let key = (caller.pid, caller.uid, caller.gid);
        let now = Instant::now();
        let mut known = self.known.lock();
        if let Some((at, groups)) = known.get(&key)
            && now.duration_since(*at) < FRESH
        {
            return groups.clone();
        }
        let status = fs::read_to_string(format!("/proc/{}/status", caller.pid)).unwrap_or_default();
        let groups = parse(&status);
        if known.len() >= MOST {
            known.retain(|_, (at, _)| now.duration_since(*at) < FRESH);
            if known.len() >= MOST {
                known.clear();
            }
        }
        known.insert(key, (now, groups.clone()));
        groups
    }
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
        let g = Groups::default();
        assert!(g.of(Caller { uid: 0, gid: 0, pid: 1 }).is_empty());
        assert!(g.of(Caller { uid: 5, gid: 5, pid: 0 }).is_empty());
        assert!(g.of(Caller { uid: 5, gid: 5, pid: u32::MAX }).is_empty());
        for pid in 0..3000 {
            g.of(Caller { uid: 5, gid: 5, pid: u32::MAX - pid });
        }
        assert!(g.known.lock().len() <= MOST);
    }
}
