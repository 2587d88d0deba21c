//! `strake client list|evict`: the clients that have the file system mounted, as the leader of the
//! metadata servers knows them.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use strake_proto::{Code, Error, Result, SessionId, pb};
use strake_term::{span, table};

use crate::{
    answers::session_json,
    members::{Group, Reach, UNFINISHED, passes},
};
use pb::members_request::Change;

#[derive(Subcommand)]
pub enum Command {
    /// Show clients: host, process, version, what they have open and locked.
    List(ListArgs),
    /// End sessions of clients. What a client has not written yet is lost, and its open files and
    /// locks are gone. It may come back by itself with a new session.
    Evict(EvictArgs),
}

#[derive(Args)]
pub struct ListArgs {
    #[command(flatten)]
    reach: Reach,
}

#[derive(Args)]
pub struct EvictArgs {
    /// Sessions by number, or all sessions of a host by its name.
    #[arg(required = true)]
    client: Vec<String>,
    #[command(flatten)]
    reach: Reach,
}

/// Most sessions that one request ends.
const BATCH: usize = 1024;

pub fn run(command: Command) -> Result<ExitCode> {
    let (mut group, json, names) = match &command {
        Command::List(a) => (Group::to_list(&a.reach)?, a.reach.json, &[][..]),
        Command::Evict(a) => (Group::new(&a.reach)?, a.reach.json, &a.client[..]),
    };
    crate::run(1, async {
        let outcome = act(&mut group, names).await;
        group.done();
        match outcome {
            Ok((said, now)) if json => println!("{:#}", as_json(&now, &said)),
            Ok((said, now)) => {
                said.iter().for_each(|line| println!("{line}"));
                print!("{}", rows(&now));
            }
            Err(e) if e.code == Code::TimedOut => {
                eprintln!("strake: {e}; `strake client list` shows what was done");
                return Ok(ExitCode::from(UNFINISHED));
            }
            Err(e) => return Err(e),
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// Evicts the named clients, if any. Returns what was done, and the clients then.
async fn act(g: &mut Group, names: &[String]) -> Result<(Vec<String>, Vec<pb::SessionStatus>)> {
    let status = g.leader_status().await?;
    if status.sessions_left_out > 0 {
        let m = format!("{} clients are too many to be listed", status.sessions_left_out);
        return Err(Error::new(Code::TooBig, m));
    }
    let before = status.sessions;
    if names.is_empty() {
        return Ok((Vec::new(), before));
    }
    let those = named(&before, names)?;
    for batch in those.chunks(BATCH) {
        let sessions = batch.iter().map(|s| s.id).collect();
        let change = Change::Evict(pb::EvictRequest { sessions });
        loop {
            match g.ask_once(Some(change.clone())).await {
                Err(e) if passes(&e) => g.pause(&e.message).await?,
                r => break r.map(drop)?,
            }
        }
    }
    let now = g.leader_status().await?.sessions;
    // A leader from before this request takes it for a question.
    if let Some(s) = those.iter().find(|s| now.iter().any(|n| n.id == s.id)) {
        let m = format!(
            "session {} is still there: the leader's program does not know how to evict; upgrade \
             it, or unmount on {}",
            s.id, s.hostname
        );
        return Err(Error::new(Code::OpNotSupp, m));
    }
    let said = those
        .iter()
        .map(|s| format!("session {} of {} (process {}) was evicted", s.id, s.hostname, s.pid));
    Ok((said.collect(), now))
}

/// The sessions that are meant: each name is a number, or a host's name.
fn named(all: &[pb::SessionStatus], names: &[String]) -> Result<Vec<pb::SessionStatus>> {
    let mut out: Vec<pb::SessionStatus> = Vec::new();
    for name in names {
        let id: Option<SessionId> = name.parse().ok();
        // A host may be called by a number.
        let of_host = all.iter().filter(|s| s.hostname == *name);
        let mut found: Vec<&pb::SessionStatus> = all.iter().filter(|s| Some(s.id) == id).collect();
        if found.is_empty() {
            found = of_host.collect();
        }
        if found.is_empty() {
            let m = format!(
                "no client '{name}': neither a session's number nor a host with one; see \
                 `strake client list`"
            );
            return Err(Error::new(Code::NoEnt, m));
        }
        for s in found {
            if out.iter().all(|o| o.id != s.id) {
                out.push(s.clone());
            }
        }
    }
    Ok(out)
}

fn rows(all: &[pb::SessionStatus]) -> String {
    let head = ["SESSION", "HOST", "ADDRESS", "PID", "VERSION", "OPENS", "LOCKS", "LAST SEEN"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for s in all {
        let address = if s.address.is_empty() { "-" } else { &s.address };
        rows.push(vec![
            s.id.to_string(),
            s.hostname.clone(),
            address.to_string(),
            s.pid.to_string(),
            s.version.clone(),
            s.opens.to_string(),
            s.locks.to_string(),
            format!("{} ago", span(s.idle_ms / 1000)),
        ]);
    }
    table(&rows)
}

fn as_json(all: &[pb::SessionStatus], said: &[String]) -> Value {
    json!({ "message": said, "clients": all.iter().map(session_json).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(id: u64, hostname: &str) -> pb::SessionStatus {
        let idle_ms = 61_000;
        pb::SessionStatus { id, hostname: hostname.into(), idle_ms, ..Default::default() }
    }

    #[test]
    fn clients_are_named_by_session_or_host() {
        let all = [session(1, "a"), session(2, "b"), session(3, "b"), session(4, "2")];
        let ids = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|n| n.to_string()).collect();
            named(&all, &names).map(|l| l.iter().map(|s| s.id).collect::<Vec<_>>())
        };
        assert_eq!(ids(&["b", "1"]).unwrap(), [2, 3, 1]);
        assert_eq!(ids(&["2", "b"]).unwrap(), [2, 3], "a number is a session first");
        let e = ids(&["1", "c"]).unwrap_err();
        assert!(e.code == Code::NoEnt && e.message.contains("no client 'c'"), "{e}");
        assert_eq!(ids(&["9"]).unwrap_err().code, Code::NoEnt);
        assert!(rows(&all).contains("1 min 1 s ago"));
    }
}
