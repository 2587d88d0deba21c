//! `strake status`: whether the cluster is healthy, which servers run, and how full it is.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use serde_json::{Value, json};
use strake_proto::{
    Code, Result,
    map::{ChainExt, ROLE_MDS},
    pb,
    pb::ReplicaState,
};
use strake_term::{size, table};
use tokio::task::JoinSet;

use crate::{
    address::{Address, Place},
    admin::{ask, key_for},
    answers::{Answer, Behind, percent, session_json, slow_json, unix_ms},
    health::{self, Health, is_short},
    servers::{Servers, statuses},
};

/// Which servers to ask.
#[derive(Args)]
pub(crate) struct ServerArgs {
    #[command(flatten)]
    address: Address,
    /// Admin addresses of servers, HOST:PORT: asks these and no others.
    #[arg(long, value_delimiter = ',', conflicts_with = "mds")]
    admin: Vec<String>,
    /// Print the outcome as JSON.
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct StatusArgs {
    #[command(flatten)]
    servers: ServerArgs,
    /// Also list every chain, and what each server has sent.
    #[arg(long, short)]
    verbose: bool,
}

/// What all servers answered, and what follows from it.
pub(crate) struct Seen {
    answers: Vec<Answer>,
    behind: Vec<Behind>,
    pub health: Health,
}

/// Servers that were found.
pub(crate) enum Found {
    /// By admin addresses, with the cluster key.
    Admin(Vec<String>, [u8; 32]),
    /// By metadata servers, which name the others.
    Cluster(Place, Servers),
}

impl ServerArgs {
    pub(crate) fn find(&self) -> Result<Found> {
        if !self.admin.is_empty() {
            let (key, dir) = (self.address.cluster_key.as_deref(), self.address.dir.as_deref());
            return Ok(Found::Admin(self.admin.clone(), key_for(key, dir)?));
        }
        let place = self.address.find()?;
        Ok(match &place.local {
            Some(c) => Found::Admin([c.admin_mds(), c.admin_oss()].concat(), place.key),
            None => {
                let servers = Servers::new(&place.key);
                Found::Cluster(place, servers)
            }
        })
    }
}

impl Found {
    async fn ask(&self) -> Result<Vec<Answer>> {
        let (addrs, key) = match self {
            Found::Cluster(place, servers) => return statuses(servers, place).await,
            Found::Admin(addrs, key) => (addrs, key),
        };
        let mut asked = JoinSet::new();
        for (i, addr) in addrs.iter().cloned().enumerate() {
            let key = *key;
            asked.spawn(async move { (i, answer_of(addr, &key).await) });
        }
        let mut answers = asked.join_all().await;
        answers.sort_by_key(|(i, _)| *i);
        Ok(answers.into_iter().map(|(_, a)| a).collect())
    }

    /// Asks one server again.
    async fn again(&self, a: &Answer) -> Result<pb::StatusReply> {
        match self {
            Found::Cluster(_, servers) => servers.status(&a.at, true).await,
            Found::Admin(_, key) => ask(&a.addr, key).await,
        }
    }
}

impl Seen {
    /// Asks all servers at once. `catch_up`: how long a metadata server that lacks something may
    /// take to apply it.
    pub(crate) async fn ask(found: &Found, catch_up: Duration) -> Result<Seen> {
        let answers = found.ask().await?;
        let behind = stay_behind(&answers, found, catch_up).await;
        let health = Health::of(&answers, newest_map(&answers), &behind);
        Ok(Seen { answers, behind, health })
    }

    /// Whether the key is wrong for all of them: waiting does not help.
    pub(crate) fn is_refused(&self) -> bool {
        let refused = |a: &Answer| a.reply.as_ref().is_err_and(|e| e.code == Code::Unauthenticated);
        !self.answers.is_empty() && self.answers.iter().all(refused)
    }
}

async fn answer_of(addr: String, key: &[u8; 32]) -> Answer {
    let before = unix_ms();
    let reply = ask(&addr, key).await;
    let is_mds = reply.as_ref().is_ok_and(|s| s.role == "mds");
    Answer { addr, at: Vec::new(), asked_ms: before.midpoint(unix_ms()), reply, is_mds }
}

pub fn status(args: &StatusArgs) -> Result<ExitCode> {
    let found = args.servers.find()?;
    let seen = crate::run(1, Seen::ask(&found, CATCH_UP))?;
    let (answers, map) = (&seen.answers, newest_map(&seen.answers));
    if args.servers.json {
        println!("{:#}", as_json(&seen, map));
    } else {
        println!("{}", seen.health.text());
        print_nodes(answers, args.verbose);
        if let Some(map) = map {
            print_map(map, args.verbose);
        }
        print_sessions(answers);
    }
    Ok(ExitCode::from(seen.health.exit_status()))
}

/// How long a member may take to apply what the leader had committed.
pub(crate) const CATCH_UP: Duration = Duration::from_secs(3);

/// Metadata servers that do not catch up with the leader's first answer.
async fn stay_behind(answers: &[Answer], found: &Found, catch_up: Duration) -> Vec<Behind> {
    let leads =
        |s: &&pb::StatusReply| s.raft.as_ref().is_some_and(|r| r.leader == r.id && r.id != 0);
    let Some(leader) = replies(answers).find(leads) else { return Vec::new() };
    let behind =
        |s: &pb::StatusReply| Behind::of(leader, std::slice::from_ref(s)).into_iter().next();
    let mut late: Vec<(&Answer, Behind)> =
        answers.iter().filter_map(|a| Some((a, behind(a.reply.as_ref().ok()?)?))).collect();
    let start = std::time::Instant::now();
    while !late.is_empty() && start.elapsed() <= catch_up {
        tokio::time::sleep(CATCH_UP / 30).await;
        let mut still = Vec::new();
        for (a, _) in late {
            // One that does not answer now has answered before, so it is no matter here.
            if let Some(b) = found.again(a).await.ok().and_then(|s| behind(&s)) {
                still.push((a, b));
            }
        }
        late = still;
    }
    late.into_iter().map(|(_, b)| b).collect()
}

fn replies(answers: &[Answer]) -> impl Iterator<Item = &pb::StatusReply> {
    answers.iter().filter_map(|a| a.reply.as_ref().ok())
}

fn newest_map(answers: &[Answer]) -> Option<&pb::ClusterMap> {
    replies(answers).filter_map(|s| s.map.as_ref()).max_by_key(|m| m.version)
}

/// Whether all replicas are in sync. Chains that an administrator gave up do not count; they are
/// reported elsewhere.
fn is_whole(map: &pb::ClusterMap) -> bool {
    map.chains.iter().all(|c| c.lost || c.serving().count() == c.replicas.len())
}

fn print_nodes(answers: &[Answer], verbose: bool) {
    let head = ["NODE", "ROLE", "ADDRESS", "STATE", "TERM", "LEADER", "APPLIED", "VERSION", "UP"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for Answer { addr, reply, .. } in answers {
        rows.push(match reply {
            Err(e) => {
                vec!["-".into(), "-".into(), addr.clone(), format!("unreachable ({})", e.message)]
            }
            Ok(s) => {
                let raft = s.raft.clone().unwrap_or_default();
                let on_mds = |v: String| if s.raft.is_some() { v } else { "-".into() };
                vec![
                    s.name.clone(),
                    s.role.clone(),
                    addr.clone(),
                    on_mds(raft.state),
                    on_mds(raft.term.to_string()),
                    on_mds(raft.leader.to_string()),
                    on_mds(raft.applied.to_string()),
                    s.version.clone(),
                    format!("{} s", s.uptime_ms / 1000),
                ]
            }
        });
    }
    print!("{}", table(&rows));
    for s in replies(answers) {
        // Those with a code stand above, in the reasons.
        let codes = s.notice_codes.iter().map(String::as_str).chain(std::iter::repeat(""));
        for (n, _) in s.notices.iter().zip(codes).filter(|(_, code)| health::is_unknown(code)) {
            println!("note: {}: {n}", s.name);
        }
    }
    if !verbose {
        return;
    }
    for s in replies(answers) {
        for r in s.transports.iter().filter(|r| r.sent + r.received > 0) {
            let (n, sent, received) = (r.connections, size(r.sent), size(r.received));
            println!(
                "{}: by {} {n} connections, {sent} sent, {received} received",
                s.name, r.transport
            );
        }
    }
    for s in replies(answers).filter(|s| s.follower_reads + s.follower_refusals > 0) {
        let (told, sent) = (s.follower_reads, s.follower_refusals);
        println!("{}: {told} reads answered as a follower, {sent} sent to the leader", s.name);
    }
}

fn state_name(s: ReplicaState) -> &'static str {
    match s {
        ReplicaState::ReplicaServing => "serving",
        ReplicaState::ReplicaSyncing => "syncing",
        ReplicaState::ReplicaWaiting => "waiting",
        ReplicaState::ReplicaOffline => "offline",
        ReplicaState::ReplicaLastsrv => "lastsrv",
        ReplicaState::ReplicaUnknown => "unknown",
    }
}

fn print_map(map: &pb::ClusterMap, verbose: bool) {
    println!();
    let mut rows = vec![
        ["TARGET", "NODE", "STATE", "CAPACITY", "USED", "FULL", "CHAINS"]
            .map(String::from)
            .to_vec(),
    ];
    for t in &map.targets {
        let node = map
            .nodes
            .iter()
            .find(|n| n.id == t.node)
            .map_or_else(|| t.node.to_string(), |n| n.name.clone());
        let of = map.chains.iter().filter(|c| c.state_of(t.id).is_some());
        let (mut serving, mut all) = (0, 0);
        for c in of {
            all += 1;
            serving += usize::from(c.state_of(t.id) == Some(ReplicaState::ReplicaServing));
        }
        let state = [
            (t.alive, "alive"),
            (!t.alive, "dead"),
            (t.draining, "draining"),
            (t.slow.is_some(), "slow"),
        ];
        let words: Vec<&str> = state.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect();
        rows.push(vec![
            t.id.to_string(),
            node,
            words.join(", "),
            size(t.capacity),
            size(t.used),
            // For a silent server: the last known value.
            format!("{} %{}", percent(t), if t.alive { "" } else { ", last known" }),
            format!("{serving}/{all} in sync"),
        ]);
    }
    print!("{}", table(&rows));
    println!("\nfile system {}, map version {}", map.fs_name, map.version);
    if !verbose {
        return;
    }
    for c in &map.chains {
        let replicas: Vec<String> =
            c.replicas.iter().map(|r| format!("{}:{}", r.target, state_name(r.state()))).collect();
        let lost = if c.lost { ", given up" } else { "" };
        println!("  chain {} epoch {}: {}{lost}", c.id, c.epoch, replicas.join(" "));
    }
}

fn print_sessions(answers: &[Answer]) {
    // Only the leader knows what its sessions do.
    let knows = |s: &&pb::StatusReply| !s.sessions.is_empty();
    let leads = |s: &&pb::StatusReply| s.raft.as_ref().is_some_and(|r| r.leader == r.id);
    let leader = replies(answers).filter(knows).find(leads);
    let Some(s) = leader.or_else(|| replies(answers).find(knows)) else { return };
    println!("\n{} inodes, {} orphans, {} files being deleted", s.inodes, s.orphans, s.gc_queue);
    if s.locks + s.lock_waits > 0 {
        println!("{} ranges locked, {} requests wait for a lock", s.locks, s.lock_waits);
    }
    let mut rows = vec![
        ["SESSION", "HOST", "PID", "VERSION", "OPENS", "LOCKS", "IDLE"].map(String::from).to_vec(),
    ];
    for c in &s.sessions {
        let idle = format!("{} ms", c.idle_ms);
        rows.push(vec![
            c.id.to_string(),
            c.hostname.clone(),
            c.pid.to_string(),
            c.version.clone(),
            c.opens.to_string(),
            c.locks.to_string(),
            idle,
        ]);
    }
    print!("{}", table(&rows));
}

/// Times of a target's device.
fn times_json(t: &pb::DeviceTimes) -> Value {
    let of = |o: &Option<pb::OpTimes>| {
        let o = o.unwrap_or_default();
        json!({ "count": o.count, "each_us": o.each_us, "median_us": o.median_us, "p99_us": o.p99_us })
    };
    json!({ "reads": of(&t.reads), "changes": of(&t.changes), "stalled_ms": t.stalled_ms, "rotates": t.rotates })
}

fn as_json(seen: &Seen, map: Option<&pb::ClusterMap>) -> Value {
    let servers: Vec<Value> = seen
        .answers
        .iter()
        .map(|Answer { addr, reply, .. }| match reply {
            Err(e) => json!({ "admin": addr, "reachable": false, "error": e.message }),
            Ok(s) => json!({
                "admin": addr, "reachable": true, "role": s.role, "node": s.node, "name": s.name, "version": s.version,
                "pid": s.pid, "uptime_ms": s.uptime_ms, "unix_ms": s.unix_ms,
                "notices": s.notices, "notice_codes": s.notice_codes,
                "refused": s.refused.iter().map(|r| json!({ "path": r.path, "target": r.target, "why": r.why, "now": r.now }))
                    .collect::<Vec<_>>(),
                "raft": s.raft.as_ref().map(|r| json!({
                    "id": r.id, "term": r.term, "leader": r.leader, "state": r.state, "committed": r.committed,
                    "applied": r.applied, "first_index": r.first_index, "last_index": r.last_index,
                    "voters": r.voters, "learners": r.learners,
                    "no_state": r.no_state, "damage": r.damage, "damages": r.damages })),
                "inodes": s.inodes, "orphans": s.orphans, "gc_queue": s.gc_queue,
                "locks": s.locks, "lock_waits": s.lock_waits,
                "transports": s.transports.iter().map(|r| json!({ "transport": r.transport, "connections": r.connections, "sent": r.sent,
                    "received": r.received })).collect::<Vec<_>>(),
                "follower_reads": s.follower_reads, "follower_refusals": s.follower_refusals,
                "sessions": s.sessions.iter().map(session_json).collect::<Vec<_>>(),
                "targets": s.targets.iter().map(|t| json!({ "id": t.id, "device": t.device, "capacity": t.capacity,
                    "used": t.used, "chunks": t.chunks, "direct_io": t.direct_io, "reads": t.reads, "writes": t.writes,
                    "read_bytes": t.read_bytes, "write_bytes": t.write_bytes, "checksum_errors": t.checksum_errors,
                    "lease_left_ms": t.lease_left_ms, "damaged": t.damaged, "repaired": t.repaired, "lost": t.lost,
                    "slow": t.slow.as_ref().map(slow_json), "times": t.times.as_ref().map(times_json) })).collect::<Vec<_>>(),
            }),
        })
        .collect();
    let map = map.map(|m| {
        json!({
            "version": m.version, "fs_name": m.fs_name, "default_copies": m.default_copies,
            "min_copies": m.min_copies.max(1), "whole": is_whole(m),
            "nodes": m.nodes.iter().map(|n| json!({ "id": n.id, "name": n.name, "version": n.version,
                "role": if n.role == ROLE_MDS { "mds" } else { "oss" }, "endpoints": n.endpoints })).collect::<Vec<_>>(),
            "targets": m.targets.iter().map(|t| json!({ "id": t.id, "node": t.node, "alive": t.alive, "draining": t.draining,
                "drained_because_slow": t.slow.as_ref().map(slow_json), "capacity": t.capacity, "used": t.used, "percent": percent(t),
                "chains": m.chains.iter().filter(|c| c.state_of(t.id).is_some()).count(), "stamp": t.stamp.to_string() })).collect::<Vec<_>>(),
            "chains": m.chains.iter().map(|c| json!({ "id": c.id, "epoch": c.epoch, "ost_index": c.ost_index(),
                "in_sync": c.serving().collect::<Vec<_>>(), "given_up": c.lost, "takes_writes": !is_short(m, c),
                "replicas": c.replicas.iter().map(|r| json!({ "target": r.target, "state": state_name(r.state()) }))
                    .collect::<Vec<_>>() })).collect::<Vec<_>>(),
            "pools": m.pools.iter().map(|p| json!({ "name": p.name, "targets": p.targets })).collect::<Vec<_>>(),
        })
    });
    let behind: Vec<Value> = seen
        .behind
        .iter()
        .map(|b| json!({ "name": b.name, "applied": b.applied, "committed": b.committed }))
        .collect();
    json!({ "health": seen.health.json(), "servers": servers, "map": map, "behind": behind })
}
