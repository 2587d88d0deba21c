//! `strake mds list|add|remove|transfer|replace|give-up`: the group of metadata servers, managed
//! while clients work; [`offline`] has the commands for one that is lost.
//!
//! Each command moves the group step by step to the requested state ([`plan`]) and can be repeated
//! at any time. It talks to the servers as they talk to each other, with the cluster key. See
//! `docs/membership.md`.

mod leader;
mod offline;
mod plan;

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use strake_proto::{Code, Error, Incarnation, Result, pb};
use strake_term::table;

use leader::address;
pub(crate) use leader::{Group, Reach, UNFINISHED, passes};
use pb::members_request::Change;
use plan::{Goal, Next};

#[derive(Subcommand)]
pub enum Command {
    /// Show the members, the leader, and who is behind.
    List(ListArgs),
    /// Add new, empty servers: they learn, catch up and then vote.
    Add(AddArgs),
    /// Remove a member.
    Remove(MemberArgs),
    /// Hand the leadership to a member.
    Transfer(MemberArgs),
    /// Replace a member by a new, empty server.
    Replace(ReplaceArgs),
    /// After a recovery: continue without storage targets that are lost for good.
    GiveUp(GiveUpArgs),
    /// Show what the folders of stopped metadata servers hold, and which one has most.
    Inspect(offline::InspectArgs),
    /// Begin a new group from the folder of a survivor when the majority is lost for good.
    Recover(offline::RecoverArgs),
    /// Write all metadata in a stopped server's folder to a file.
    Dump(offline::DumpArgs),
    /// Make the first server of a new group from a dump.
    Load(offline::LoadArgs),
}

#[derive(Args)]
pub struct GiveUpArgs {
    /// Targets, by number.
    #[arg(required = true)]
    target: Vec<u32>,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct AddArgs {
    /// Where the new servers listen, tcp:HOST:PORT.
    #[arg(required = true)]
    addr: Vec<String>,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct MemberArgs {
    /// The member: its id, or the address where it listens, tcp:HOST:PORT.
    member: String,
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct ReplaceArgs {
    /// The member to remove: its id, or the address where it listens, tcp:HOST:PORT.
    old: String,
    /// Where the new server listens, tcp:HOST:PORT.
    new: String,
    #[command(flatten)]
    reach: Reach,
}

/// How long `list` looks for a leader before it shows what other members know.
const LEADERLESS: Duration = Duration::from_secs(3);

pub fn run(command: Command) -> Result<ExitCode> {
    let reach = match &command {
        Command::List(a) => &a.reach,
        Command::Add(a) => &a.reach,
        Command::Remove(a) | Command::Transfer(a) => &a.reach,
        Command::Replace(a) => &a.reach,
        Command::GiveUp(a) => &a.reach,
        Command::Inspect(a) => return offline::inspect(a),
        Command::Recover(a) => return offline::recover(a),
        Command::Dump(a) => return offline::dump(a),
        Command::Load(a) => return offline::load(a),
    };
    let (json, mut group) = (reach.json, Group::new(reach)?);
    crate::run(1, async {
        let outcome = match &command {
            Command::List(_) => return group.list(json).await,
            Command::Add(a) => group.add(&a.addr).await,
            Command::Remove(a) => group.remove(&a.member).await,
            Command::Transfer(a) => group.transfer(&a.member).await,
            Command::Replace(a) => group.replace(&a.old, &a.new).await,
            Command::GiveUp(a) => group.give_up(&a.target).await,
            _ => {
                return Err(Error::new(
                    Code::Inval,
                    "this command works on folders, not on servers",
                ));
            }
        };
        group.done();
        match outcome {
            Ok((said, now)) => {
                match json {
                    true => println!("{:#}", as_json(&now, Some(&said))),
                    false => tell(&said, &now),
                }
                Ok(ExitCode::SUCCESS)
            }
            Err(e) if e.code == Code::TimedOut => {
                eprintln!("strake: {e}; completed steps stay: repeat the command to continue");
                Ok(ExitCode::from(UNFINISHED))
            }
            Err(e) => Err(e),
        }
    })
}

type Outcome = Result<(String, pb::MembersReply)>;

impl Group {
    /// Continues until the goal is reached. Returns whether there was anything to do.
    async fn reach(&mut self, goal: &Goal) -> Result<(bool, pb::MembersReply)> {
        let mut changed = false;
        loop {
            let now = self.ask(None).await?;
            // The leader that added the server was lost before it had recorded its address.
            let lost = now.members.iter().find(|m| !m.voter && m.endpoint.is_empty()).map(|m| m.id);
            let next = match lost.and_then(|id| self.taught.get(&id)) {
                Some(at) => Next::Ask(Change::Learn(pb::MemberLearn { endpoint: at.clone() })),
                None => plan::next(goal, &now)?,
            };
            match next {
                Next::Done => return Ok((changed, now)),
                Next::Wait(what) => self.pause(&what).await?,
                Next::Ask(change) => {
                    changed = true;
                    match self.ask_once(Some(change)).await {
                        Ok(_) => {}
                        // The change may have been made; the next list shows it.
                        Err(e) if passes(&e) => self.pause(&e.message).await?,
                        Err(e) => return Err(e),
                    }
                }
            }
        }
    }

    async fn learn(&mut self, addr: &str) -> Result<u64> {
        let endpoint = address(addr)?.to_string();
        let before = self.ask(None).await?;
        let r =
            self.ask(Some(Change::Learn(pb::MemberLearn { endpoint: endpoint.clone() }))).await?;
        if before.members.iter().all(|m| m.id != r.learner) {
            self.say(format!("metadata server {} at {endpoint} is a learner", r.learner));
        }
        self.taught.insert(r.learner, endpoint);
        Ok(r.learner)
    }

    async fn add(&mut self, addrs: &[String]) -> Outcome {
        let addrs =
            addrs.iter().map(|a| address(a).map(|e| e.to_string())).collect::<Result<Vec<_>>>()?;
        let mut ids = Vec::new();
        for addr in &addrs {
            ids.push(self.learn(addr).await?);
        }
        let (changed, now) = self.reach(&Goal::Add(ids.clone())).await?;
        let each = ids.iter().zip(&addrs).map(|(id, at)| match changed {
            true => format!("metadata server {id} at {at} is a member and votes"),
            false => format!("metadata server {id} at {at} is a member already"),
        });
        Ok((each.collect::<Vec<_>>().join("\n"), now))
    }

    /// The id of a member, or of a removed one.
    async fn id_of(&mut self, member: &str) -> Result<u64> {
        let now = self.ask(None).await?;
        let found = match member.parse::<u64>() {
            Ok(id) => {
                let known = now.members.iter().any(|m| m.id == id)
                    || now.former.iter().any(|f| u64::from(*f) == id);
                known.then_some(id)
            }
            Err(_) => {
                let at = address(member)?.to_string();
                now.members.iter().find(|m| m.endpoint == at).map(|m| m.id)
            }
        };
        found.ok_or_else(|| {
            let all: Vec<String> =
                now.members.iter().map(|m| format!("{} at {}", m.id, m.endpoint)).collect();
            Error::new(
                Code::NoEnt,
                format!(
                    "metadata server {member} is not in the group; the members are {}",
                    all.join(", ")
                ),
            )
        })
    }

    async fn remove(&mut self, member: &str) -> Outcome {
        let id = self.id_of(member).await?;
        let (changed, now) = self.reach(&Goal::Remove(id)).await?;
        let said = match changed {
            true => format!("metadata server {id} is no longer a member and stops"),
            false => format!("metadata server {id} was removed before"),
        };
        Ok((said, now))
    }

    async fn transfer(&mut self, member: &str) -> Outcome {
        let id = self.id_of(member).await?;
        let (changed, now) = self.reach(&Goal::Transfer(id)).await?;
        Ok((format!("metadata server {id} leads{}", if changed { "" } else { " already" }), now))
    }

    async fn replace(&mut self, old: &str, new: &str) -> Outcome {
        let old = self.id_of(old).await?;
        let new = self.learn(new).await?;
        if old == new {
            let m = format!(
                "metadata server {old} cannot replace itself; start a new one with an id of its own"
            );
            return Err(Error::new(Code::Inval, m));
        }
        let (changed, now) = self.reach(&Goal::Replace { old, new }).await?;
        let said = match changed {
            true => format!(
                "metadata server {new} replaced {old}, which is no longer a member and stops"
            ),
            false => format!("metadata server {new} had already replaced {old}"),
        };
        Ok((said, now))
    }

    async fn give_up(&mut self, targets: &[u32]) -> Outcome {
        let before = self.ask(None).await?.awaited;
        let change = Change::GiveUp(pb::GiveUp { targets: targets.to_vec() });
        let now = self.ask(Some(change)).await?;
        let given: Vec<String> =
            before.iter().filter(|t| targets.contains(t)).map(u32::to_string).collect();
        let said = match given.is_empty() {
            true => "no chain waits for them".into(),
            false => format!("chains go on without targets {}", given.join(", ")),
        };
        Ok((said, now))
    }

    async fn list(&mut self, json: bool) -> Result<ExitCode> {
        self.deadline = self.deadline.min(Instant::now() + LEADERLESS);
        let (now, note) = match self.ask(None).await {
            Ok(r) => (r, None),
            Err(e) if e.code == Code::TimedOut => {
                (self.anybody().await.ok_or(e)?, Some("no metadata server leads"))
            }
            Err(e) => return Err(e),
        };
        match json {
            true => println!("{:#}", as_json(&now, note)),
            false => {
                print!("{}", rows(&now));
                print!("{}", since_recovery(&now));
                if let Some(n) = note {
                    println!("{n}; this is what {} knows", now.id);
                }
            }
        }
        let in_order = note.is_none()
            && now.members.iter().all(|m| state(m, &now).iter().all(|s| s.starts_with("disk")));
        Ok(ExitCode::from(if in_order { 0 } else { UNFINISHED }))
    }

    /// The most complete answer of a group without a leader.
    async fn anybody(&mut self) -> Option<pb::MembersReply> {
        let mut best: Option<pb::MembersReply> = None;
        for at in self.finder.all() {
            if let Ok(r) = self.try_at(&at, None).await
                && best.as_ref().is_none_or(|b| (b.term, b.last_index) < (r.term, r.last_index))
            {
                best = Some(r);
            }
        }
        best
    }
}

fn role(m: &pb::Member, now: &pb::MembersReply) -> &'static str {
    match () {
        () if m.id == now.leader => "leader",
        () if m.voter => "follower",
        () => "learner",
    }
}

/// What is wrong, or still under way.
fn state(m: &pb::Member, now: &pb::MembersReply) -> Vec<&'static str> {
    // Only a leader knows about the others.
    let knows = now.id == now.leader || m.id == now.id;
    let silent = plan::is_silent(m, now);
    let all = [
        (m.leaving, "leaving"),
        (knows && silent, "silent"),
        (m.copying, "is receiving a copy of the state"),
        (knows && !silent && !m.copying && !plan::is_close(m, now.last_index), "behind"),
        (m.disk & 1 != 0, "disk full"),
        (m.disk & 2 != 0, "disk slow"),
        (m.disk & 4 != 0 && !m.copying, "waits for a copy of the state"),
    ];
    all.iter().filter(|(is, _)| *is).map(|(_, what)| *what).collect()
}

fn rows(now: &pb::MembersReply) -> String {
    let head = ["ID", "NAME", "ADDRESS", "ROLE", "MATCH", "APPLIED", "LAG", "HEARD", "STATE"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for m in &now.members {
        let knows = now.id == now.leader || m.id == now.id;
        let number = |n: u64| if knows { n.to_string() } else { "-".into() };
        let heard = match m.heard_ms {
            Some(_) if m.id == now.id => "-".into(),
            Some(ms) if ms < 10_000 => format!("{ms} ms ago"),
            Some(ms) => format!("{} s ago", ms / 1000),
            None => "never".into(),
        };
        rows.push(vec![
            m.id.to_string(),
            m.name.clone(),
            m.endpoint.clone(),
            role(m, now).into(),
            number(m.matched),
            number(m.applied),
            number(now.last_index.saturating_sub(m.matched)),
            heard,
            state(m, now).join(", "),
        ]);
    }
    table(&rows)
}

/// What configuration files should name: the metadata servers, and, for the metadata servers' own
/// files, those with their ids.
fn configured(now: &pb::MembersReply) -> (Vec<String>, Vec<String>) {
    let members = || now.members.iter().filter(|m| !m.leaving);
    let mds = members().map(|m| m.endpoint.clone()).collect();
    (mds, members().map(|m| format!("{}={}", m.id, m.endpoint)).collect())
}

/// The state of a group that was recovered once, and what it waits for.
fn since_recovery(now: &pb::MembersReply) -> String {
    let mut text = String::new();
    if now.incarnation != 0 {
        text += &format!("incarnation {}\n", Incarnation(now.incarnation));
    }
    if !now.awaited.is_empty() {
        let list = now.awaited.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        text += &format!(
            "chains wait to hear from targets {list}; start their servers, or give them up (`strake mds give-up`)\n"
        );
    }
    text
}

fn tell(said: &str, now: &pb::MembersReply) {
    println!("{said}");
    print!("{}{}", rows(now), since_recovery(now));
    let (mds, peers) = configured(now);
    println!("configuration files of mounts and storage servers: mds = {mds:?}");
    println!("those of metadata servers: peers = {peers:?}");
}

fn as_json(now: &pb::MembersReply, said: Option<&str>) -> Value {
    let member = |m: &pb::Member| {
        json!({
            "id": m.id, "name": m.name, "address": m.endpoint, "role": role(m, now), "voter": m.voter,
            "match": m.matched, "applied": m.applied, "lag": now.last_index.saturating_sub(m.matched),
            "heard_ms": m.heard_ms, "state": state(m, now),
        })
    };
    let (mds, peers) = configured(now);
    json!({
        "message": said, "leader": now.leader, "term": now.term, "last_index": now.last_index, "committed": now.committed,
        "members": now.members.iter().map(member).collect::<Vec<_>>(), "former": now.former, "incarnation": Incarnation(now.incarnation).to_string(), "awaited": now.awaited,
        "config": { "mds": mds, "peers": peers },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_is_what_the_answering_server_can_know() {
        let member = |id, heard_ms, matched| pb::Member {
            id,
            endpoint: format!("tcp:h:{id}"),
            voter: id < 4,
            matched,
            applied: matched,
            heard_ms,
            ..Default::default()
        };
        let mut now = pb::MembersReply {
            id: 1,
            leader: 1,
            last_index: 5000,
            members: vec![
                member(1, Some(0), 5000),
                member(2, Some(90), 4990),
                member(3, Some(65_000), 1000),
                member(4, None, 0),
            ],
            ..Default::default()
        };
        let text = rows(&now);
        let line = |n: usize| {
            text.lines().nth(n).unwrap().split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line(1), "1 tcp:h:1 leader 5000 5000 0 -");
        assert_eq!(line(2), "2 tcp:h:2 follower 4990 4990 10 90 ms ago");
        assert_eq!(line(3), "3 tcp:h:3 follower 1000 1000 4000 65 s ago silent");
        assert_eq!(line(4), "4 tcp:h:4 learner 0 0 5000 never silent");
        let json = as_json(&now, None);
        assert_eq!(json["members"][2]["lag"], 4000);
        assert_eq!(json["config"]["peers"][1], "2=tcp:h:2");
        // A follower without a leader knows only about itself.
        (now.id, now.leader) = (2, 0);
        assert!(state(&now.members[2], &now).is_empty());
        assert!(rows(&now).lines().nth(3).unwrap().contains("  -  "));
    }
}
