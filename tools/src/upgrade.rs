//! `strake upgrade status|finish`: which feature level each process of a cluster knows, and raising
//! the cluster's. See `docs/upgrading.md`.

use std::{collections::BTreeSet, process::ExitCode, time::Duration};

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use strake_proto::{Code, Error, FEATURE_LEVEL, Result, level::LEVELS, pb};
use strake_term::table;

use crate::members::{Group, Reach, UNFINISHED, passes};
use pb::members_request::Change;

#[derive(Subcommand)]
pub enum Command {
    /// Show the cluster's feature level, which one each process knows, and who is in the way of a
    /// higher one.
    Status(StatusArgs),
    /// Raise the cluster's feature level to the newest. Older programs are refused from then on.
    Finish(FinishArgs),
}

#[derive(Args)]
pub struct StatusArgs {
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct FinishArgs {
    /// Do not wait for mounts of older programs: their sessions end, and their unwritten data is
    /// lost.
    #[arg(long)]
    evict_clients: bool,
    #[command(flatten)]
    reach: Reach,
}

/// How long `finish` waits for reports: a new leader has those of storage servers and mounts after
/// a second.
const REPORTS: Duration = Duration::from_secs(5);

pub fn run(command: Command) -> Result<ExitCode> {
    let reach = match &command {
        Command::Status(a) => &a.reach,
        Command::Finish(a) => &a.reach,
    };
    let json = reach.json;
    let mut group = match &command {
        Command::Status(_) => Group::to_list(reach)?,
        Command::Finish(_) => Group::new(reach)?,
    };
    group.asks_levels = true;
    crate::run(1, async {
        let outcome = match &command {
            Command::Status(_) => ask(&mut group).await.map(|found| (found, None)),
            Command::Finish(a) => finish(&mut group, a.evict_clients).await,
        };
        group.done();
        match outcome {
            Ok((found, said)) => {
                show(&found, said.as_deref(), json);
                Ok(ExitCode::SUCCESS)
            }
            Err(e) if e.code == Code::TimedOut => {
                eprintln!("strake: {e}; `strake upgrade status` shows what was done");
                Ok(ExitCode::from(UNFINISHED))
            }
            Err(e) => Err(e),
        }
    })
}

/// What the leader knows of everybody.
struct Found {
    levels: pb::Levels,
    /// The newest level that this program or a metadata server knows.
    newest: u32,
}

/// Who is in the way, by kind.
#[derive(Default)]
struct InTheWay {
    servers: Vec<String>,
    clients: Vec<String>,
    /// Some have not reported yet, which may pass by itself.
    unheard: bool,
}

impl Found {
    fn in_the_way(&self) -> InTheWay {
        let l = &self.levels;
        let mut way = InTheWay::default();
        let lists = [
            ("metadata server", &l.members, false),
            ("storage server", &l.servers, false),
            ("mount", &l.sessions, true),
        ];
        for (kind, reports, is_client) in lists {
            let of_kind = if is_client { &mut way.clients } else { &mut way.servers };
            // Once the level is raised, who has said nothing is refused when it comes.
            let silent = l.level < self.newest;
            for r in reports.iter().filter(|r| r.knows.map_or(silent, |k| k < self.newest)) {
                way.unheard |= r.knows.is_none();
                of_kind.push(format!("{kind} {} {}", named(kind, r), what_it_knows(r)));
            }
        }
        way
    }
}

fn named(kind: &str, r: &pb::LevelReport) -> String {
    match kind {
        "metadata server" => r.id.to_string(),
        "mount" => format!("{} (session {})", r.name, r.id),
        _ => r.name.clone(),
    }
}

fn what_it_knows(r: &pb::LevelReport) -> String {
    match r.knows {
        Some(k) => format!("knows feature level {k}"),
        None => "has not said lately which feature level it knows".into(),
    }
}

/// One question to the leader, repeated while there is none.
async fn ask(group: &mut Group) -> Result<Found> {
    let r = group.ask(None).await?;
    let Some(levels) = r.levels else {
        let m = format!(
            "metadata server {} leads, and its program knows no feature levels: upgrade it first, or `strake mds transfer` the leadership",
            r.leader
        );
        return Err(Error::new(Code::OpNotSupp, m));
    };
    let known = levels.members.iter().filter_map(|m| m.knows).max().unwrap_or(0);
    Ok(Found { newest: FEATURE_LEVEL.max(known), levels })
}

async fn finish(group: &mut Group, evict: bool) -> Result<(Found, Option<String>)> {
    let before = ready(group, evict).await?;
    let (from, to) = (before.levels.level, before.newest);
    if from == to {
        let said = format!("the cluster has feature level {to} already");
        return Ok((before, Some(said)));
    }
    for level in from + 1..=to {
        group.say(format!("raising the feature level to {level}"));
        loop {
            let change = Change::Raise(pb::RaiseRequest { to: level, evict });
            match group.ask_once(Some(change)).await {
                // The level may have been raised; asking once more changes nothing then.
                Err(e) if passes(&e) => group.pause(&e.message).await?,
                r => break r.map(drop)?,
            }
        }
    }
    let said =
        format!("the cluster has feature level {to}; older programs are refused from now on");
    Ok((ask(group).await?, Some(said)))
}

/// Waits a moment for reports that are missing. An error that names everybody who is in the way of
/// the newest level.
async fn ready(group: &mut Group, evict: bool) -> Result<Found> {
    let begun = std::time::Instant::now();
    loop {
        let found = ask(group).await?;
        if found.levels.level >= found.newest {
            return Ok(found);
        }
        let InTheWay { servers, clients, unheard } = found.in_the_way();
        let (stop, clients) = if evict { (servers, vec![]) } else { (servers, clients) };
        if stop.is_empty() && clients.is_empty() {
            return Ok(found);
        }
        if unheard && begun.elapsed() < REPORTS {
            group.pause("waiting for reports").await?;
            continue;
        }
        let hint = match clients.is_empty() {
            true => "",
            false => " (for mounts, --evict-clients ends their sessions)",
        };
        let all: Vec<String> = stop.into_iter().chain(clients).collect();
        let m = format!(
            "feature level {} cannot be reached: {}; start them with a newer strake, or take them out of the cluster{hint}",
            found.newest,
            all.join("; ")
        );
        return Err(Error::new(Code::OpNotSupp, m));
    }
}

fn show(found: &Found, said: Option<&str>, json: bool) {
    if json {
        println!("{:#}", as_json(found, said));
        return;
    }
    if let Some(said) = said {
        println!("{said}");
    }
    print!("{}", text(found));
}

fn lists(l: &pb::Levels) -> [(&'static str, &Vec<pb::LevelReport>); 3] {
    [("metadata server", &l.members), ("storage server", &l.servers), ("mount", &l.sessions)]
}

fn text(found: &Found) -> String {
    let l = &found.levels;
    let mut rows = vec![["PROCESS", "ID", "NAME", "VERSION", "KNOWS", "STATE"].map(String::from)];
    for (kind, r) in lists(l).iter().flat_map(|(kind, all)| all.iter().map(move |r| (kind, r))) {
        let behind = r.knows.is_none_or(|k| k < found.newest);
        rows.push([
            (*kind).to_string(),
            r.id.to_string(),
            r.name.clone(),
            r.version.clone(),
            r.knows.map_or("-".into(), |k| k.to_string()),
            if behind { "in the way".into() } else { String::new() },
        ]);
    }
    let rows: Vec<Vec<String>> = rows.into_iter().map(|r| r.to_vec()).collect();
    let mut out = table(&rows);
    if l.sessions_left_out > 0 {
        out += &format!("and {} more mounts\n", l.sessions_left_out);
    }
    out += &format!("feature level of the cluster: {}\n", l.level);
    let way = found.in_the_way();
    let count = way.servers.len() + way.clients.len();
    out += &match (l.level == found.newest, count) {
        (true, 0) => "nothing is left to do\n".to_string(),
        (true, _) => format!("{count} do not know it, and are refused\n"),
        (false, 0) => {
            let new = (l.level + 1..=found.newest).map(brings).collect::<Vec<_>>().join("; ");
            format!("`strake upgrade finish` raises it to {} ({new})\n", found.newest)
        }
        (false, _) => {
            format!(
                "{count} are in the way of feature level {}: start them with a newer strake\n",
                found.newest
            )
        }
    };
    out
}

fn brings(level: u32) -> String {
    LEVELS.get(level as usize).map_or_else(|| format!("level {level}"), |s| (*s).to_string())
}

fn as_json(found: &Found, said: Option<&str>) -> Value {
    let l = &found.levels;
    let way = found.in_the_way();
    let list = |all: &[pb::LevelReport]| {
        let one = |r: &pb::LevelReport| {
            json!({
                "id": r.id, "name": r.name, "version": r.version, "knows": r.knows,
                "heard_ms": r.heard_ms, "in_the_way": r.knows.is_none_or(|k| k < found.newest),
            })
        };
        all.iter().map(one).collect::<Vec<_>>()
    };
    let in_the_way: BTreeSet<&String> = way.servers.iter().chain(&way.clients).collect();
    json!({
        "level": l.level, "newest": found.newest, "said": said, "in_the_way": in_the_way,
        "metadata_servers": list(&l.members), "storage_servers": list(&l.servers),
        "sessions": list(&l.sessions), "sessions_left_out": l.sessions_left_out,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(id: u64, name: &str, knows: Option<u32>) -> pb::LevelReport {
        pb::LevelReport { id, name: name.into(), knows, ..Default::default() }
    }

    fn found(level: u32, knows: [Option<u32>; 3]) -> Found {
        let levels = pb::Levels {
            level,
            members: vec![report(1, "mds1", Some(1)), report(2, "mds2", knows[0])],
            servers: vec![report(1001, "oss1", knows[1])],
            sessions: vec![report(7, "host", knows[2])],
            sessions_left_out: 0,
        };
        Found { levels, newest: 1 }
    }

    #[test]
    fn those_in_the_way_are_named() {
        let f = found(0, [Some(0), Some(0), None]);
        let way = f.in_the_way();
        assert_eq!(
            way.servers,
            [
                "metadata server 2 knows feature level 0",
                "storage server oss1 knows feature level 0"
            ]
        );
        assert_eq!(
            way.clients,
            ["mount host (session 7) has not said lately which feature level it knows"]
        );
        assert!(way.unheard);
        let shown = text(&f);
        assert!(shown.contains("feature level of the cluster: 0\n"), "{shown}");
        assert!(shown.contains("3 are in the way of feature level 1"), "{shown}");
        let json = as_json(&f, None);
        assert_eq!(json["in_the_way"].as_array().map(Vec::len), Some(3));
        assert_eq!(json["metadata_servers"][1]["in_the_way"], true);
        assert_eq!(json["sessions"][0]["knows"], Value::Null);
    }

    #[test]
    fn what_is_left_to_do_is_said() {
        let ready = text(&found(0, [Some(1); 3]));
        assert!(
            ready.contains("`strake upgrade finish` raises it to 1 (feature levels"),
            "{ready}"
        );
        let done = text(&found(1, [Some(1); 3]));
        assert!(
            done.ends_with("feature level of the cluster: 1\nnothing is left to do\n"),
            "{done}"
        );
        let refused = text(&found(1, [Some(0), Some(1), Some(1)]));
        assert!(refused.contains("1 do not know it, and are refused"), "{refused}");
    }
}
