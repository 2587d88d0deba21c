//! Servers that do not answer. Each is reported once when an operation has waited for it, and once
//! when it is back. Pure.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use tokio::time::Instant;

/// A failure is forgotten when nothing was heard of its server for this long and it was not
/// reported.
const FORGOTTEN: Duration = Duration::from_secs(30);
/// Longest reason that is kept, in bytes.
const LONGEST_REASON: usize = 160;

/// What a server does for this client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Any metadata server is enough: one that answers ends the wait for all.
    Metadata,
    /// Each storage server has bytes of its own.
    Storage,
}

#[derive(Debug)]
struct Server {
    since: Instant,
    last: Instant,
    reason: String,
    told: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Unreachable {
    servers: BTreeMap<(Kind, String), Server>,
}

impl Unreachable {
    /// A server did not answer, or said that it cannot.
    pub fn failed(&mut self, kind: Kind, who: &str, reason: &str, now: Instant) {
        self.servers.retain(|_, s| s.told || now.saturating_duration_since(s.last) < FORGOTTEN);
        let mut reason = reason.to_string();
        if reason.len() > LONGEST_REASON {
            let cut = (0..=LONGEST_REASON).rev().find(|i| reason.is_char_boundary(*i)).unwrap_or(0);
            reason.truncate(cut);
        }
        let new = || Server { since: now, last: now, reason: String::new(), told: false };
        let s = self.servers.entry((kind, who.to_string())).or_insert_with(new);
        (s.last, s.reason) = (now, reason);
    }

    /// A server answers. Returns the report about servers that were reported as away: their names,
    /// and for how long they were away.
    pub fn answered(&mut self, kind: Kind, who: &str, now: Instant) -> Option<(String, Duration)> {
        if self.servers.is_empty() {
            return None;
        }
        let back: Vec<_> = match kind {
            Kind::Metadata => self.servers.extract_if(.., |(k, _), _| *k == kind).collect(),
            Kind::Storage => {
                self.servers.remove_entry(&(kind, who.to_string())).into_iter().collect()
            }
        };
        let since = back.iter().filter(|(_, s)| s.told).map(|(_, s)| s.since).min()?;
        let text = match kind {
            Kind::Metadata => "metadata servers answer".into(),
            Kind::Storage => format!("storage server {who} answers"),
        };
        Some((text, now.saturating_duration_since(since)))
    }

    /// An operation has waited too long. Returns the report, if there is something new.
    pub fn stuck(&mut self) -> Option<String> {
        if self.servers.values().all(|s| s.told) {
            return None;
        }
        self.servers.values_mut().for_each(|s| s.told = true);
        Some(self.list())
    }

    /// Servers that do not answer, and why; empty when all answer.
    pub fn list(&self) -> String {
        let mut out = String::new();
        for (kind, name) in [(Kind::Metadata, "metadata"), (Kind::Storage, "storage")] {
            let all = self.servers.iter().filter(|((k, _), _)| *k == kind);
            let all: Vec<String> =
                all.map(|((_, who), s)| format!("{who} ({})", s.reason)).collect();
            if all.is_empty() {
                continue;
            }
            let (and, s) =
                (if out.is_empty() { "" } else { " and " }, if all.len() == 1 { "" } else { "s" });
            let _ = write!(out, "{and}{name} server{s} {}", all.join(", "));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn each_outage_is_told_once_at_its_start_and_once_at_its_end() {
        let (mut a, t) = (Unreachable::default(), Instant::now());
        assert_eq!((a.stuck(), a.answered(Kind::Metadata, "m1", t)), (None, None));
        a.failed(Kind::Metadata, "m1", "Connection refused", t);
        a.failed(Kind::Metadata, "m2", "does not answer", t + S);
        a.failed(Kind::Metadata, "m1", "Connection refused", t + 2 * S);
        assert_eq!(
            a.stuck().unwrap(),
            "metadata servers m1 (Connection refused), m2 (does not answer)"
        );
        a.failed(Kind::Metadata, "m2", "does not answer", t + 3 * S);
        assert_eq!(a.stuck(), None, "told already");
        a.failed(Kind::Storage, "oss1", "gone", t + 3 * S);
        assert!(a.stuck().unwrap().ends_with(" and storage server oss1 (gone)"));
        assert_eq!(a.answered(Kind::Storage, "oss2", t + 9 * S), None);
        assert_eq!(
            a.answered(Kind::Metadata, "m3", t + 9 * S),
            Some(("metadata servers answer".into(), 9 * S))
        );
        assert_eq!(a.answered(Kind::Metadata, "m3", t + 9 * S), None);
        assert_eq!(
            a.answered(Kind::Storage, "oss1", t + 9 * S),
            Some(("storage server oss1 answers".into(), 6 * S))
        );
        assert_eq!(a.list(), "");
    }

    #[test]
    fn what_nobody_waited_for_is_not_told() {
        let (mut a, t) = (Unreachable::default(), Instant::now());
        a.failed(Kind::Storage, "oss1", &"ä".repeat(200), t);
        assert!(a.list().len() < 200);
        assert_eq!(a.answered(Kind::Storage, "oss1", t + S), None);
        a.failed(Kind::Storage, "oss1", "x", t);
        a.failed(Kind::Storage, "oss2", "y", t + 60 * S);
        assert_eq!(a.list(), "storage server oss2 (y)", "the other failure is long past");
    }
}
