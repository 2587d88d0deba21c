//! Which feature level each process knows, as it last said to the leader, and who is in the way of
//! a higher level. A pure table. It is gone with the leader's term, and everybody reports again. See
//! `docs/feature-levels.md`.

use std::{collections::BTreeMap, time::Duration};

use strake_proto::{NodeId, SessionId, map::ROLE_OSS, pb};

/// A metadata server must have been heard of within this time.
pub(crate) const RECENT: Duration = Duration::from_secs(60);
/// Most sessions in one answer.
const MOST_SESSIONS: usize = 1000;
/// Most processes that an error names.
const MOST_NAMED: usize = 8;

/// What a process said, and when.
#[derive(Clone, Copy)]
struct Report {
    knows: u32,
    at: Duration,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Levels {
    servers: BTreeMap<NodeId, Report>,
    sessions: BTreeMap<SessionId, Report>,
}

fn told(now: Duration, r: Option<&Report>) -> (Option<u32>, Option<u64>) {
    (r.map(|r| r.knows), r.map(|r| now.saturating_sub(r.at).as_millis() as u64))
}

impl Levels {
    /// A storage server reported.
    pub(crate) fn heard_server(&mut self, at: Duration, node: NodeId, knows: u32) {
        self.servers.insert(node, Report { knows, at });
    }

    /// A client reported.
    pub(crate) fn heard_session(&mut self, at: Duration, session: SessionId, knows: u32) {
        self.sessions.insert(session, Report { knows, at });
    }

    /// Forgets what sessions said that have ended.
    pub(crate) fn retain(&mut self, lives: impl Fn(SessionId) -> bool) {
        self.sessions.retain(|id, _| lives(*id));
    }

    /// Sessions whose clients said that they know less, and what they know.
    pub(crate) fn below(&self, level: u32) -> Vec<(SessionId, u32)> {
        let below = self.sessions.iter().filter(|(_, r)| r.knows < level);
        below.map(|(id, r)| (*id, r.knows)).collect()
    }

    /// All reports. Storage servers without targets do not count.
    pub(crate) fn report(
        &self,
        now: Duration,
        map: &pb::ClusterMap,
        members: Vec<pb::LevelReport>,
        sessions: Vec<(SessionId, pb::SessionRecord)>,
    ) -> pb::Levels {
        let with_targets =
            |n: &&pb::Node| n.role == ROLE_OSS && map.targets.iter().any(|t| t.node == n.id);
        let server = |n: &pb::Node| {
            let (knows, heard_ms) = told(now, self.servers.get(&n.id));
            let (name, version) = (n.name.clone(), n.version.clone());
            pb::LevelReport { id: u64::from(n.id), name, version, knows, heard_ms }
        };
        let session = |(id, s): (SessionId, pb::SessionRecord)| {
            let (knows, heard_ms) = told(now, self.sessions.get(&id));
            pb::LevelReport { id, name: s.hostname, version: s.version, knows, heard_ms }
        };
        let mut sessions: Vec<_> = sessions.into_iter().map(session).collect();
        sessions.sort_by_key(|s| (s.knows, s.id));
        let sessions_left_out = sessions.len().saturating_sub(MOST_SESSIONS) as u64;
        sessions.truncate(MOST_SESSIONS);
        pb::Levels {
            level: map.level,
            members,
            servers: map.nodes.iter().filter(with_targets).map(server).collect(),
            sessions,
            sessions_left_out,
        }
    }
}

/// The report of a metadata server that was heard of so long ago.
pub(crate) fn of_member(
    (id, name, version): (u64, String, String),
    knows: Option<u32>,
    heard: Option<Duration>,
) -> pb::LevelReport {
    let recent = heard.is_some_and(|ago| ago <= RECENT);
    let heard_ms = heard.map(|ago| ago.as_millis() as u64);
    pb::LevelReport { id, name, version, knows: knows.filter(|_| recent), heard_ms }
}

/// Who keeps the cluster from this level, in words; empty: nobody. `evict`: clients do not.
pub(crate) fn in_the_way(levels: &pb::Levels, to: u32, evict: bool) -> Vec<String> {
    let lists = [
        ("metadata server", &levels.members),
        ("storage server", &levels.servers),
        ("the mount on", &levels.sessions),
    ];
    let clients = usize::from(!evict);
    let kinds = lists.into_iter().take(2 + clients);
    let named = kinds.flat_map(|(what, all)| {
        let below = all.iter().filter(|r| r.knows.is_none_or(|knows| knows < to));
        below.map(move |r| {
            let id = if what == "metadata server" { r.id.to_string() } else { r.name.clone() };
            match r.knows {
                Some(knows) => format!("{what} {id} knows level {knows}"),
                None => format!("{what} {id} has not said which level it knows"),
            }
        })
    });
    named.collect()
}

/// The first of these, and how many more there are.
pub(crate) fn some_of(all: &[String]) -> String {
    let mut text = all.iter().take(MOST_NAMED).cloned().collect::<Vec<_>>().join("; ");
    if all.len() > MOST_NAMED {
        text += &format!("; and {} more", all.len() - MOST_NAMED);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1000);

    fn map() -> pb::ClusterMap {
        let node = |id, role| pb::Node { id, role, name: format!("n{id}"), ..Default::default() };
        let target = |id, node| pb::Target { id, node, ..Default::default() };
        pb::ClusterMap {
            nodes: vec![
                node(1, 1),
                node(1001, ROLE_OSS),
                node(1002, ROLE_OSS),
                node(1003, ROLE_OSS),
            ],
            targets: vec![target(0, 1001), target(1, 1002)],
            ..Default::default()
        }
    }

    fn session(id: u64) -> (SessionId, pb::SessionRecord) {
        (id, pb::SessionRecord { hostname: format!("h{id}"), ..Default::default() })
    }

    fn member(id: u64, knows: u32, ago_s: u64) -> pb::LevelReport {
        let who = (id, format!("mds-{id}"), String::new());
        of_member(who, Some(knows), Some(Duration::from_secs(ago_s)))
    }

    fn all_know(level: u32) -> Levels {
        let mut l = Levels::default();
        for n in [1001, 1002] {
            l.heard_server(NOW, n, level);
        }
        for s in [7, 8] {
            l.heard_session(NOW, s, level);
        }
        l
    }

    fn way(l: &Levels, members: Vec<pb::LevelReport>, evict: bool) -> Vec<String> {
        in_the_way(&l.report(NOW, &map(), members, vec![session(7), session(8)]), 1, evict)
    }

    #[test]
    fn everybody_who_knows_less_is_in_the_way() {
        let l = all_know(1);
        let none: [&str; 0] = [];
        assert_eq!(way(&l, vec![member(1, 1, 0), member(2, 1, 60)], false), none);
        assert_eq!(way(&l, vec![member(1, 2, 0)], false), none);
        assert_eq!(
            way(&l, vec![member(1, 1, 0), member(2, 0, 0)], false),
            ["metadata server 2 knows level 0"]
        );
        assert_eq!(
            way(&l, vec![member(2, 1, 61)], false),
            ["metadata server 2 has not said which level it knows"],
            "it may have another program since"
        );
        let mut older = all_know(1);
        older.heard_server(NOW, 1002, 0);
        older.heard_session(NOW, 8, 0);
        assert_eq!(
            way(&older, vec![], false),
            ["storage server n1002 knows level 0", "the mount on h8 knows level 0"]
        );
        assert_eq!(way(&older, vec![], true), ["storage server n1002 knows level 0"]);
    }

    #[test]
    fn a_storage_server_that_is_away_counts_with_what_it_said_last() {
        let mut l = all_know(1);
        l.heard_server(Duration::ZERO, 1001, 1);
        assert!(way(&l, vec![], false).is_empty());
        l.servers.remove(&1001);
        assert_eq!(
            way(&l, vec![], false),
            ["storage server n1001 has not said which level it knows"],
            "the next leader does not know it"
        );
    }

    #[test]
    fn sessions_that_know_less_are_found_until_they_end() {
        let mut l = all_know(1);
        l.heard_session(NOW, 8, 0);
        assert_eq!(l.below(1), [(8, 0)]);
        l.retain(|id| id != 8);
        assert!(l.below(1).is_empty());
    }

    #[test]
    fn few_are_named() {
        let all: Vec<String> = (0..10).map(|n| n.to_string()).collect();
        assert_eq!(some_of(&all), "0; 1; 2; 3; 4; 5; 6; 7; and 2 more");
        assert_eq!(some_of(&all[..2]), "0; 1");
    }
}
