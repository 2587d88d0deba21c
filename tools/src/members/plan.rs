//! Chooses the next request that brings the group to the requested state. Pure, so that an
//! interrupted command can be repeated at any point, by the same person or another one.

use strake_proto::{Code, Error, Result, pb};

use pb::members_request::Change;

/// A learner this close may be asked to become a voter; the leader decides.
const CLOSE: u64 = 1000;
/// A member that was not heard from for longer is silent.
const SILENT_MS: u64 = 2000;

/// The requested state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Goal {
    /// These members vote.
    Add(Vec<u64>),
    /// This one is not a member.
    Remove(u64),
    /// This one is the leader.
    Transfer(u64),
    /// `new` votes and `old` is not a member.
    Replace { old: u64, new: u64 },
}

#[derive(Clone, Debug, PartialEq)]
pub enum Next {
    Done,
    Ask(Change),
    /// Nothing to do yet; the text says what is waited for.
    Wait(String),
}

/// The next step towards `goal`, given what the leader says. An error if the goal cannot be
/// reached.
pub fn next(goal: &Goal, now: &pb::MembersReply) -> Result<Next> {
    let get = |id: u64| now.members.iter().find(|m| m.id == id);
    let was_removed = |id: u64| now.former.iter().any(|f| u64::from(*f) == id);
    let vanished =
        |id: u64| Error::new(Code::NoEnt, format!("metadata server {id} is no longer a member"));
    Ok(match goal {
        Goal::Add(ids) => {
            let mut learners = Vec::new();
            for id in ids {
                learners.extend(Some(get(*id).ok_or_else(|| vanished(*id))?).filter(|m| !m.voter));
            }
            match behind(&learners, now.last_index) {
                _ if learners.is_empty() => Next::Done,
                Some(wait) => wait,
                None => step(learners.iter().map(|m| m.id).collect(), vec![]),
            }
        }
        Goal::Remove(id) => match get(*id) {
            None if was_removed(*id) => Next::Done,
            // Between the change and its record in the map.
            None => {
                Next::Wait(format!("metadata server {id} is out; the cluster map is being updated"))
            }
            Some(m) if m.leaving => Next::Wait(format!("metadata server {id} is leaving")),
            Some(_) => step(vec![], vec![*id]),
        },
        Goal::Transfer(id) if now.leader == *id => Next::Done,
        Goal::Transfer(id) => Next::Ask(Change::Transfer(pb::MemberTransfer { to: *id })),
        Goal::Replace { old, new } => {
            let m = get(*new).ok_or_else(|| vanished(*new))?;
            let out = get(*old);
            let (gone, heard): (Vec<&pb::Member>, _) =
                former_selves(m, now).partition(|o| is_silent(o, now));
            let mut gone: Vec<u64> = gone.iter().map(|o| o.id).collect();
            if m.voter {
                return match (gone.iter().any(|id| id != old), heard.iter().find(|o| o.id != *old))
                {
                    (true, _) => Ok(step(vec![], gone)),
                    (false, Some(o)) => Ok(Next::Wait(format!(
                        "metadata server {} had the address of {new} before and was heard from \
                         just now",
                        o.id
                    ))),
                    (false, None) => next(&Goal::Remove(*old), now),
                };
            }
            gone.extend(out.filter(|o| !gone.contains(&o.id)).map(|o| o.id));
            let stay = now.members.iter().filter(|m| m.voter && !gone.contains(&m.id)).count();
            match behind(&[m], now.last_index) {
                Some(wait) => wait,
                // A single voter cannot hand over to another one: first there must be two.
                None if stay == 0 => step(vec![*new], vec![]),
                None => step(vec![*new], gone),
            }
        }
    })
}

/// Members that had the address of `m` before. `m` answers there now, so they are gone for good
/// once they are silent. They are left by a replacement that did not finish before its new server
/// was lost, too.
fn former_selves<'a>(
    m: &'a pb::Member,
    now: &'a pb::MembersReply,
) -> impl Iterator<Item = &'a pb::Member> {
    let here = |o: &&pb::Member| {
        o.id != m.id && !m.endpoint.is_empty() && o.endpoint == m.endpoint && !o.leaving
    };
    now.members.iter().filter(here)
}

/// As far as the leader can know.
pub fn is_silent(m: &pb::Member, now: &pb::MembersReply) -> bool {
    m.id != now.leader && m.heard_ms.is_none_or(|ms| ms > SILENT_MS)
}

fn step(promote: Vec<u64>, remove: Vec<u64>) -> Next {
    Next::Ask(Change::Step(pb::MemberStep { promote, remove }))
}

/// How far learners are behind, unless all are close.
fn behind(learners: &[&pb::Member], last: u64) -> Option<Next> {
    let far: Vec<String> =
        learners.iter().filter(|m| !is_close(m, last)).map(|m| progress(m, last)).collect();
    (!far.is_empty()).then(|| Next::Wait(far.join("; ")))
}

pub fn is_close(m: &pb::Member, last: u64) -> bool {
    m.matched != 0 && m.matched + CLOSE >= last && !m.copying
}

fn progress(m: &pb::Member, last: u64) -> String {
    let id = m.id;
    match (m.heard_ms, m.copying, m.matched) {
        (None, ..) => format!("metadata server {id} has not been heard from yet"),
        (Some(ms), ..) if ms > 5000 => {
            format!("metadata server {id} was last heard from {} s ago", ms / 1000)
        }
        (_, true, _) | (_, _, 0) => {
            format!("metadata server {id} is receiving a copy of the state")
        }
        (_, _, at) => format!("metadata server {id} has {at} of {last} log entries"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Leader 1 at entry 5000. `v2` votes, `l4` learns, `l4~` is behind, `f3` was removed.
    fn group(text: &str) -> pb::MembersReply {
        let mut g = pb::MembersReply { leader: 1, last_index: 5000, ..Default::default() };
        for w in text.split_whitespace() {
            let id: u64 = w[1..].trim_end_matches('~').parse().unwrap();
            if w.starts_with('f') {
                g.former.push(id as u32);
                continue;
            }
            let matched = if w.ends_with('~') { 1000 } else { 5000 };
            g.members.push(pb::Member {
                id,
                voter: w.starts_with('v'),
                matched,
                heard_ms: Some(10),
                ..Default::default()
            });
        }
        g
    }

    #[track_caller]
    fn asks(goal: Goal, from: &str, promote: &[u64], remove: &[u64]) {
        assert_eq!(
            next(&goal, &group(from)).unwrap(),
            step(promote.to_vec(), remove.to_vec()),
            "{goal:?} from {from}"
        );
    }
    #[track_caller]
    fn is(goal: Goal, from: &str, want: &str) {
        let got = match next(&goal, &group(from)) {
            Ok(Next::Done) => "done",
            Ok(Next::Wait(_)) => "wait",
            Ok(Next::Ask(_)) => "ask",
            Err(_) => "error",
        };
        assert_eq!(got, want, "{goal:?} from {from}");
    }

    #[test]
    fn learners_are_promoted_together_once_all_are_close() {
        asks(Goal::Add(vec![4, 5]), "v1 v2 v3 l4 l5", &[4, 5], &[]);
        asks(Goal::Add(vec![4, 5]), "v1 v2 v3 v4 l5", &[5], &[]);
        is(Goal::Add(vec![4, 5]), "v1 v2 v3 l4 l5~", "wait");
        is(Goal::Add(vec![4]), "v1 v2 v3 v4", "done");
        is(Goal::Add(vec![4]), "v1 v2 v3 f4", "error");
    }

    #[test]
    fn a_member_is_removed_once() {
        asks(Goal::Remove(2), "v1 v2 v3", &[], &[2]);
        is(Goal::Remove(2), "v1 v3 f2", "done");
        is(Goal::Remove(2), "v1 v3", "wait");
    }

    #[test]
    fn leadership_is_given_once() {
        is(Goal::Transfer(1), "v1 v2", "done");
        is(Goal::Transfer(2), "v1 v2", "ask");
    }

    #[test]
    fn a_replacement_goes_on_from_wherever_it_is() {
        let goal = || Goal::Replace { old: 2, new: 4 };
        is(goal(), "v1 v2 v3 l4~", "wait");
        asks(goal(), "v1 v2 v3 l4", &[4], &[2]);
        asks(goal(), "v1 v2 v3 v4", &[], &[2]);
        is(goal(), "v1 v3 v4 f2", "done");
        is(goal(), "v1 v2 v3", "error");
        // Another command removed it in the meantime.
        asks(goal(), "v1 v3 l4 f2", &[4], &[]);
        asks(Goal::Replace { old: 1, new: 4 }, "v1 l4", &[4], &[]);
        asks(Goal::Replace { old: 1, new: 4 }, "v1 v4", &[], &[1]);
        asks(Goal::Replace { old: 1, new: 4 }, "v1 v2 l4", &[4], &[1]);
    }

    /// 2 was lost; 4, which was started at its address, was lost before it voted; now there is 5.
    #[test]
    fn a_replacement_takes_away_what_was_at_its_address_before() {
        let at = |text: &str, here: &[u64], heard_ms| {
            let mut g = group(text);
            for m in g.members.iter_mut().filter(|m| here.contains(&m.id)) {
                m.endpoint = "tcp:h:2".into();
                m.heard_ms = if m.id == 5 { Some(10) } else { heard_ms };
            }
            g
        };
        for (old, text, promote, remove) in [
            (4, "v1 v2 v3 l4 l5", &[5][..], &[2, 4][..]),
            (2, "v1 v2 v3 l4 l5", &[5], &[2, 4]),
            (2, "v1 v3 l4 l5 f2", &[5], &[4]),
            (2, "v1 v2 v3 l4 v5", &[], &[2, 4]),
            (4, "v1 v2 v3 v5 f4", &[], &[2]),
        ] {
            let got = next(&Goal::Replace { old, new: 5 }, &at(text, &[2, 4, 5], None)).unwrap();
            assert_eq!(got, step(promote.to_vec(), remove.to_vec()), "{old} from {text}");
        }
        // A former member that was heard from just now is waited for, but only once the new one
        // votes.
        let heard = |text: &str| {
            next(&Goal::Replace { old: 2, new: 5 }, &at(text, &[3, 5], Some(10))).unwrap()
        };
        assert_eq!(heard("v1 v2 v3 l5"), step(vec![5], vec![2]));
        assert!(
            matches!(heard("v1 v3 v5 f2"), Next::Wait(why) if why.contains("3 had the address"))
        );
        assert_eq!(
            next(&Goal::Replace { old: 2, new: 5 }, &at("v1 v3 v5 f2 f4", &[5], None)).unwrap(),
            Next::Done
        );
    }
}
