//! What servers say of themselves, and how parts of it are shown.

use std::time::SystemTime;

use serde_json::{Value, json};
use strake_fabric::Endpoint;
use strake_mds::cluster::slow::what;
use strake_proto::{Result, pb};

/// A server's answer, or why there is none.
#[derive(Clone)]
pub(crate) struct Answer {
    /// The admin address that was asked.
    pub addr: String,
    /// Local time half-way between question and answer, in milliseconds since 1970.
    pub asked_ms: u64,
    pub reply: Result<pb::StatusReply>,
    /// Where it was asked, if not at its admin address.
    pub at: Vec<Endpoint>,
    /// Whether it is known to be a metadata server.
    pub is_mds: bool,
}

impl Answer {
    /// The server's number; 0: it has not answered.
    pub fn node(&self) -> u32 {
        self.reply.as_ref().map_or(0, |s| s.node)
    }
}

/// A metadata server that has not applied what the leader had committed a moment before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    pub name: String,
    pub applied: u64,
    pub committed: u64,
}

impl Behind {
    /// The members of `members`, asked after the leader, that are behind. Includes those that are
    /// just catching up.
    pub fn of(leader: &pb::StatusReply, members: &[pb::StatusReply]) -> Vec<Behind> {
        let committed = leader.raft.as_ref().map_or(0, |r| r.committed);
        let behind = |s: &pb::StatusReply| {
            let r = s.raft.as_ref().filter(|r| r.applied < committed)?;
            Some(Behind { name: s.name.clone(), applied: r.applied, committed })
        };
        members.iter().filter_map(behind).collect()
    }

    /// Why it does not catch up, if it does not.
    pub fn why(&self) -> String {
        format!(
            "{} has applied entry {} of {} and does not catch up, so it counts toward no \
             majority. If its folder was lost or emptied, the others do not take it back under \
             its id: run `strake mds replace` (docs/operations.md, 'Changing the group of \
             metadata servers'). Otherwise see its log",
            self.name, self.applied, self.committed
        )
    }
}

impl std::fmt::Display for Behind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} has applied entry {} of {}", self.name, self.applied, self.committed)
    }
}

/// The time by this machine's clock, in milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// How full a target is, with one decimal.
pub fn percent(t: &pb::Target) -> f64 {
    (t.used as f64 * 1000.0 / t.capacity.max(1) as f64).round() / 10.0
}

/// The JSON of `strake status` and `strake target list` about a slow target.
pub(crate) fn slow_json(s: &pb::Slow) -> Value {
    let what = match s.what {
        what::READS => "reads",
        what::CHANGES => "changes",
        _ => "stalls",
    };
    json!({
        "since_ms": s.since_ms, "what": what, "each_us": s.each_us, "peers_us": s.peers_us, "median_us": s.median_us, "p99_us": s.p99_us,
    })
}

/// A session in JSON, also in that of `strake status`.
pub(crate) fn session_json(s: &pb::SessionStatus) -> Value {
    json!({ "id": s.id, "hostname": s.hostname, "address": s.address, "pid": s.pid,
        "version": s.version, "idle_ms": s.idle_ms, "opens": s.opens, "locks": s.locks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lacks_what_was_agreed_is_behind() {
        let at = |name: &str, applied, committed| pb::StatusReply {
            name: name.into(),
            raft: Some(pb::RaftStatus { applied, committed, ..Default::default() }),
            ..Default::default()
        };
        let all = [
            at("a", 90, 90),
            at("b", 89, 95),
            at("c", 0, 0),
            at("d", 100, 100),
            pb::StatusReply::default(),
        ];
        let behind = Behind::of(&at("d", 80, 90), &all);
        assert_eq!(behind.iter().map(|b| b.name.as_str()).collect::<Vec<_>>(), ["b", "c"]);
        assert!(behind[1].why().starts_with("c has applied entry 0 of 90 and does not catch up"));
        assert_eq!(Behind::of(&pb::StatusReply::default(), &all), []);
    }
}
