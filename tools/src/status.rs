//! `strake status`: which servers run, and whether the cluster is complete.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use serde_json::{Value, json};
use strake_proto::{
    Result,
    map::{ChainExt, ROLE_MDS},
    pb,
    pb::ReplicaState,
};
use strake_term::{size, table};

use crate::{
    admin::{DIR, KEY_VARIABLE, ask, key_for},
    dev::Cluster,
    targets::{percent, slow_json},
};

#[derive(Args)]
pub struct StatusArgs {
    /// Folder of a local cluster (see `strake up`) [default: strake-cluster].
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Admin addresses of servers, HOST:PORT, instead of a local cluster.
    #[arg(long, value_delimiter = ',')]
    admin: Vec<String>,
    /// File with the cluster key, for --admin [default: that of --dir, else
    /// /etc/strake/cluster.key].
    #[arg(long, env = KEY_VARIABLE)]
    cluster_key: Option<PathBuf>,
    #[arg(long)]
    json: bool,
    /// Also list every chain.
    #[arg(long, short)]
    verbose: bool,
}

pub fn status(args: &StatusArgs) -> Result<ExitCode> {
    let (addrs, key) = if args.admin.is_empty() {
        let c = Cluster::open(args.dir.as_deref().unwrap_or(Path::new(DIR)))?;
        ([c.admin_mds(), c.admin_oss()].concat(), c.key()?)
    } else {
        (args.admin.clone(), key_for(args.cluster_key.as_deref(), args.dir.as_deref())?)
    };
    let answers = crate::run(1, async {
        let mut all = Vec::new();
        for a in addrs {
            let r = ask(&a, &key).await;
            all.push((a, r));
        }
        Ok(all)
    })?;
    let map = newest_map(&answers);
    let behind = crate::run(1, async { Ok(stay_behind(&answers, &key).await) })?;
    if args.json {
        println!("{:#}", as_json(&answers, map, &behind));
    } else {
        print_nodes(&answers);
        behind.iter().for_each(|b| println!("note: {}", b.why()));
        for (target, n) in without_good_copy(&answers) {
            println!(
                "note: target {target}: {n} chunks have no good copy; `strake scrub` names the files"
            );
        }
        if let Some(map) = map {
            print_map(map, args.verbose);
        }
        print_sessions(&answers);
    }
    Ok(ExitCode::from(match verdict(&answers, map) {
        0 if !behind.is_empty() => 2,
        v => v,
    }))
}

/// A metadata server that has not applied what the leader had committed a moment before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behind {
    name: String,
    applied: u64,
    committed: u64,
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

/// How long a member may take to apply what the leader had committed.
const CATCH_UP: Duration = Duration::from_secs(3);

/// Metadata servers that do not catch up with the leader's first answer.
async fn stay_behind(answers: &Answers, key: &[u8; 32]) -> Vec<Behind> {
    let leads =
        |s: &&pb::StatusReply| s.raft.as_ref().is_some_and(|r| r.leader == r.id && r.id != 0);
    let known = || answers.iter().filter_map(|(a, r)| Some((a, r.as_ref().ok()?)));
    let Some(leader) = known().map(|(_, s)| s).find(leads) else { return Vec::new() };
    let mut late: Vec<String> = known()
        .filter(|(_, s)| !Behind::of(leader, &[(*s).clone()]).is_empty())
        .map(|(a, _)| a.clone())
        .collect();
    let start = std::time::Instant::now();
    loop {
        let mut behind = Vec::new();
        for a in std::mem::take(&mut late) {
            let now = ask(&a, key).await.map_or_else(|_| Vec::new(), |s| Behind::of(leader, &[s]));
            if let Some(b) = now.into_iter().next() {
                behind.push(b);
                late.push(a);
            }
        }
        if behind.is_empty() || start.elapsed() > CATCH_UP {
            return behind;
        }
        tokio::time::sleep(CATCH_UP / 30).await;
    }
}

/// The exit status. 0: in full service. 1: no server answered. 2: something is missing.
fn verdict(answers: &Answers, map: Option<&pb::ClusterMap>) -> u8 {
    let known: Vec<&pb::StatusReply> =
        answers.iter().filter_map(|(_, r)| r.as_ref().ok()).collect();
    if known.is_empty() {
        return 1;
    }
    let rafts: Vec<&pb::RaftStatus> = known.iter().filter_map(|s| s.raft.as_ref()).collect();
    // If the leader itself was not asked, the word of the others counts. Storage servers alone know
    // no leader.
    let confirmed = |id: u64| rafts.iter().find(|r| r.id == id).is_none_or(|r| r.leader == id);
    let led = rafts.is_empty() || rafts.iter().any(|r| r.leader != 0 && confirmed(r.leader));
    let whole = map.is_some_and(|m| !m.chains.is_empty() && is_whole(m));
    let served = known.iter().all(|s| s.refused.is_empty());
    let good = without_good_copy(answers).next().is_none();
    if known.len() == answers.len() && led && whole && served && good { 0 } else { 2 }
}

/// Targets with chunks that have no good copy in sync, and the number of those chunks.
fn without_good_copy(answers: &Answers) -> impl Iterator<Item = (u32, u64)> {
    let targets = answers.iter().filter_map(|(_, r)| r.as_ref().ok()).flat_map(|s| &s.targets);
    targets.filter(|t| t.lost > 0).map(|t| (t.id, t.lost))
}

type Answers = [(String, Result<pb::StatusReply>)];

fn newest_map(answers: &Answers) -> Option<&pb::ClusterMap> {
    answers.iter().filter_map(|(_, r)| r.as_ref().ok()?.map.as_ref()).max_by_key(|m| m.version)
}

/// Whether all replicas are in sync. Chains that an administrator gave up do not count; they are
/// reported elsewhere.
fn is_whole(map: &pb::ClusterMap) -> bool {
    map.chains.iter().all(|c| c.lost || c.serving().count() == c.replicas.len())
}

/// Whether the chain takes no writes, because it has fewer copies in sync than the cluster
/// requires.
fn is_short(map: &pb::ClusterMap, c: &pb::Chain) -> bool {
    !c.lost && c.serving().count() < c.preferred.len().min(map.min_copies as usize)
}

fn print_nodes(answers: &Answers) {
    let head = ["NODE", "ROLE", "ADDRESS", "STATE", "TERM", "LEADER", "APPLIED", "VERSION", "UP"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for (addr, r) in answers {
        rows.push(match r {
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
    for (addr, r) in answers {
        for n in r.iter().flat_map(|s| &s.notices) {
            println!("note: {addr}: {n}");
        }
    }
    for s in answers.iter().filter_map(|(_, r)| r.as_ref().ok()) {
        for r in s.transports.iter().filter(|r| r.sent + r.received > 0) {
            let (n, sent, received) = (r.connections, size(r.sent), size(r.received));
            println!(
                "{}: by {} {n} connections, {sent} sent, {received} received",
                s.name, r.transport
            );
        }
    }
    for s in answers
        .iter()
        .filter_map(|(_, r)| r.as_ref().ok())
        .filter(|s| s.follower_reads + s.follower_refusals > 0)
    {
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
    let whole =
        map.chains.iter().filter(|c| !c.lost && c.serving().count() == c.replicas.len()).count();
    let lost = match map.chains.iter().filter(|c| c.lost).count() {
        0 => String::new(),
        n => format!(", {n} given up: `strake fsck` names the files that had stripes there"),
    };
    let (name, version, all) = (&map.fs_name, map.version, map.chains.len());
    println!("\nfile system {name}, map version {version}: {whole} of {all} chains whole{lost}");
    match map.chains.iter().filter(|c| is_short(map, c)).count() {
        0 => (),
        n => println!(
            "{n} chains take no writes: fewer copies are in sync than min_copies = {} asks for",
            map.min_copies
        ),
    }
    for c in
        map.chains.iter().filter(|c| verbose || !c.lost && c.serving().count() < c.replicas.len())
    {
        let replicas: Vec<String> =
            c.replicas.iter().map(|r| format!("{}:{}", r.target, state_name(r.state()))).collect();
        let lost = if c.lost { ", given up" } else { "" };
        println!("  chain {} epoch {}: {}{lost}", c.id, c.epoch, replicas.join(" "));
    }
}

fn print_sessions(answers: &Answers) {
    let leader =
        answers.iter().filter_map(|(_, r)| r.as_ref().ok()).find(|s| !s.sessions.is_empty());
    let Some(s) = leader else { return };
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

fn as_json(answers: &Answers, map: Option<&pb::ClusterMap>, behind: &[Behind]) -> Value {
    let servers: Vec<Value> = answers
        .iter()
        .map(|(addr, r)| match r {
            Err(e) => json!({ "admin": addr, "reachable": false, "error": e.message }),
            Ok(s) => json!({
                "admin": addr, "reachable": true, "role": s.role, "node": s.node, "name": s.name, "version": s.version,
                "pid": s.pid, "uptime_ms": s.uptime_ms, "notices": s.notices,
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
                "sessions": s.sessions.iter().map(|c| json!({ "id": c.id, "hostname": c.hostname, "pid": c.pid,
                    "version": c.version, "idle_ms": c.idle_ms, "opens": c.opens,
                    "locks": c.locks })).collect::<Vec<_>>(),
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
    let behind: Vec<Value> = behind
        .iter()
        .map(|b| json!({ "name": b.name, "applied": b.applied, "committed": b.committed }))
        .collect();
    json!({ "servers": servers, "map": map, "behind": behind })
}

#[cfg(test)]
mod tests {
    use strake_proto::{Code, Error};

    use super::*;

    fn mds(id: u64, leader: u64) -> (String, Result<pb::StatusReply>) {
        let raft = Some(pb::RaftStatus { id, leader, ..Default::default() });
        (format!("m{id}"), Ok(pb::StatusReply { raft, ..Default::default() }))
    }

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

    #[test]
    fn exit_statuses() {
        let silent = || ("x".to_string(), Err(Error::new(Code::Disconnected, "x")));
        let oss = || ("o".to_string(), Ok(pb::StatusReply::default()));
        let replica = pb::Replica { target: 1, state: ReplicaState::ReplicaServing as i32 };
        let chain = pb::Chain { replicas: vec![replica], ..Default::default() };
        let good = pb::ClusterMap { chains: vec![chain.clone()], ..Default::default() };
        let mut lacking = good.clone();
        lacking.chains[0].replicas[0].state = ReplicaState::ReplicaOffline as i32;
        let empty = pb::ClusterMap::default();
        let refusing =
            pb::StatusReply { refused: vec![pb::RefusedTarget::default()], ..Default::default() };
        let of_targets = |lost| pb::StatusReply {
            targets: vec![pb::TargetStatus { id: 7, lost, ..Default::default() }],
            ..Default::default()
        };
        for (answers, map, want) in [
            (vec![], None, 1),
            (vec![silent(), silent()], None, 1),
            (vec![mds(1, 2), mds(2, 2), oss()], Some(&good), 0),
            (vec![mds(1, 2)], Some(&good), 0),
            (vec![oss()], Some(&good), 0),
            (vec![("o".to_string(), Ok(refusing))], Some(&good), 2),
            (vec![mds(1, 1), ("o".to_string(), Ok(of_targets(0)))], Some(&good), 0),
            (vec![mds(1, 1), ("o".to_string(), Ok(of_targets(1)))], Some(&good), 2),
            (vec![mds(1, 2), mds(2, 2), silent()], Some(&good), 2),
            (vec![mds(1, 0), mds(2, 0), oss()], Some(&good), 2),
            (vec![mds(1, 2), mds(2, 0)], Some(&good), 2),
            (vec![mds(1, 1)], Some(&lacking), 2),
            (vec![mds(1, 1)], Some(&empty), 2),
            (vec![mds(1, 1)], None, 2),
        ] {
            assert_eq!(verdict(&answers, map), want, "{answers:?}");
        }
    }
}
