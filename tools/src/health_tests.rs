use strake_proto::{Error, Result, pb::ReplicaState};

use super::*;

fn answer(addr: &str, reply: Result<pb::StatusReply>) -> Answer {
    Answer { addr: addr.into(), asked_ms: 1_000_000, reply, at: Vec::new(), is_mds: false }
}

fn mds(id: u64, leader: u64) -> Answer {
    let raft = Some(pb::RaftStatus { id, leader, ..Default::default() });
    answer("m", Ok(pb::StatusReply { name: format!("mds{id}"), raft, ..Default::default() }))
}

fn oss(reply: pb::StatusReply) -> Answer {
    answer("o", Ok(pb::StatusReply { name: "oss1".into(), ..reply }))
}

fn silent() -> Answer {
    answer("x:1", Err(Error::new(Code::Disconnected, "no answer in 2 s")))
}

/// A chain that is to be on `preferred`, with replicas in these states.
fn chain(preferred: &[u32], replicas: &[(u32, ReplicaState)]) -> pb::Chain {
    let replica = |(target, state): &(u32, ReplicaState)| pb::Replica {
        target: *target,
        state: *state as i32,
    };
    pb::Chain {
        epoch: 1,
        preferred: preferred.to_vec(),
        replicas: replicas.iter().map(replica).collect(),
        ..Default::default()
    }
}

const SERVES: ReplicaState = ReplicaState::ReplicaServing;
const SYNCS: ReplicaState = ReplicaState::ReplicaSyncing;
const AWAY: ReplicaState = ReplicaState::ReplicaOffline;
const LAST: ReplicaState = ReplicaState::ReplicaLastsrv;

/// Three targets in three racks with 60 MiB of 1 GiB each.
fn map(chains: Vec<pb::Chain>) -> pb::ClusterMap {
    let target = |id| pb::Target {
        id,
        node: 1000 + id,
        alive: true,
        used: 60 << 20,
        capacity: 1 << 30,
        ..Default::default()
    };
    let node = |id: u32| pb::Node {
        id: 1000 + id,
        name: format!("oss{id}"),
        rack: format!("r{id}"),
        ..Default::default()
    };
    pb::ClusterMap {
        targets: (1..4).map(target).collect(),
        nodes: (1..4).map(node).collect(),
        chains,
        default_copies: 2,
        ..Default::default()
    }
}

fn whole() -> pb::ClusterMap {
    map(vec![chain(&[1, 2], &[(1, SERVES), (2, SERVES)])])
}

fn of(map: &pb::ClusterMap) -> Health {
    Health::of(&[mds(1, 1)], Some(map), &[])
}

fn codes(h: &Health) -> Vec<&'static str> {
    h.reasons.iter().map(|r| r.check.code).collect()
}

#[test]
fn exit_statuses() {
    let whole = whole();
    let away = map(vec![chain(&[1, 2], &[(1, SERVES), (2, AWAY)])]);
    let gone = map(vec![chain(&[1, 2], &[(1, LAST), (2, AWAY)])]);
    let none = map(vec![]);
    let with = |answers: &[Answer], map: Option<&pb::ClusterMap>| {
        let h = Health::of(answers, map, &[]);
        (h.word(), h.exit_status(), codes(&h))
    };
    let quiet = || oss(pb::StatusReply::default());
    assert_eq!(with(&[], None), ("ERROR", 1, vec!["no-answer"]));
    assert_eq!(with(&[silent(), silent()], None), ("ERROR", 1, vec!["no-answer"]));
    for answers in [vec![mds(1, 2), mds(2, 2), quiet()], vec![mds(1, 2)], vec![quiet()]] {
        assert_eq!(with(&answers, Some(&whole)), ("OK", 0, vec![]));
    }
    let old = answer("y", Err(Error::new(Code::OpNotSupp, "too old")));
    assert_eq!(with(&[mds(1, 1), old], Some(&whole)), ("WARN", 0, vec!["old-program"]));
    let said = Health::of(&[silent()], None, &[]).text();
    assert!(said.contains("no server answers\n    x:1: no answer in 2 s; start"), "{said}");
    let two = [mds(1, 2), mds(2, 2), silent()];
    assert_eq!(with(&two, Some(&whole)), ("WARN", 2, vec!["server-silent"]));
    for answers in [[mds(1, 0), mds(2, 0)], [mds(1, 2), mds(2, 0)]] {
        assert_eq!(with(&answers, Some(&whole)), ("ERROR", 2, vec!["no-leader"]));
    }
    assert_eq!(with(&[mds(1, 1)], Some(&away)), ("WARN", 2, vec!["copies-missing"]));
    assert_eq!(with(&[mds(1, 1)], Some(&gone)), ("ERROR", 2, vec!["no-copy-in-service"]));
    for map in [Some(&none), None] {
        assert_eq!(with(&[mds(1, 1)], map), ("ERROR", 2, vec!["no-chains"]));
    }
    let late = Behind::of(
        &pb::StatusReply {
            raft: Some(pb::RaftStatus { committed: 9, ..Default::default() }),
            ..Default::default()
        },
        &[mds(2, 1).reply.unwrap()],
    );
    let h = Health::of(&[mds(1, 1)], Some(&whole), &late);
    assert_eq!((codes(&h), h.exit_status()), (vec!["member-behind"], 2));
}

#[test]
fn what_moves_is_no_reason() {
    let third = map(vec![
        chain(&[3, 2], &[(1, SERVES), (2, SERVES), (3, SYNCS)]),
        chain(&[1, 2], &[(1, SERVES), (2, SERVES)]),
    ]);
    let h = of(&third);
    assert_eq!((h.word(), h.exit_status(), h.copies.moving), ("OK", 0, 1));
    assert!(h.text().starts_with("OK\n  1 of 2 chains move"), "{}", h.text());
}

#[test]
fn bytes_that_lack_a_copy_are_estimated() {
    let chains = vec![
        chain(&[1, 2, 3], &[(1, SERVES), (2, AWAY), (3, AWAY)]),
        chain(&[1, 2], &[(1, SERVES), (2, SYNCS)]),
        chain(&[1, 3], &[(1, SERVES), (3, SERVES)]),
    ];
    // Target 1 has 60 MiB in three chains.
    let want = Copies { chains: 3, lacking: 2, moving: 0, to_copy: 60 << 20, single: 40 << 20 };
    let h = of(&map(chains));
    assert_eq!(h.copies, want);
    assert!(h.text().contains("2 of 3 chains lack a copy, about 40.0 MiB have one copy;"));
    assert_eq!(h.json()["bytes_with_one_copy"], 40 << 20);
}

#[test]
fn chains_of_one_copy_are_told_apart_where_files_have_more() {
    let mut m = map(vec![chain(&[1], &[(1, LAST)]), chain(&[1, 2], &[(1, SERVES), (2, SERVES)])]);
    let judged = |m: &pb::ClusterMap| (of(m).word(), codes(&of(m)));
    assert_eq!(judged(&m), ("WARN", vec!["single-copy-away"]));
    m.default_copies = 1;
    assert_eq!(judged(&m), ("ERROR", vec!["no-copy-in-service"]));
    m.chains[0].lost = true;
    assert_eq!(judged(&m), ("ERROR", vec!["data-lost"]));
    m.chains.remove(0);
    m.min_copies = 2;
    assert_eq!(judged(&m), ("OK", vec![]));
    m.chains[0].replicas[1].state = AWAY as i32;
    assert_eq!(judged(&m), ("ERROR", vec!["writes-refused", "copies-missing"]));
}

#[test]
fn full_and_dead_targets_are_named() {
    let mut m = whole();
    m.targets[0].used = (1 << 30) / 100 * 90;
    let h = of(&m);
    assert_eq!((codes(&h), h.exit_status()), (vec!["nearly-full"], 0));
    assert_eq!(h.reasons[0].texts, ["target 1 is 90 % full", "rack r1 is 90 % full"]);
    m.targets[0].used = 1 << 30;
    assert_eq!((codes(&of(&m)), of(&m).exit_status()), (vec!["target-full", "nearly-full"], 2));
    // What is being emptied is no place for new data.
    m.targets[0].draining = true;
    assert_eq!(codes(&of(&m)), [""; 0]);
    m.targets[2].alive = false;
    let h = of(&m);
    assert_eq!((codes(&h), h.exit_status()), (vec!["target-dead"], 0));
    assert_eq!(h.reasons[0].texts, ["target 3 of oss3 is out of service"]);
    m.targets[2].given_up = true;
    assert_eq!(of(&m).word(), "OK");
}

#[test]
fn notices_of_servers_are_judged_by_their_codes() {
    let say = |notices: &[(&str, &str)], unix_ms| {
        let (texts, codes) = notices.iter().map(|(c, t)| (t.to_string(), c.to_string())).unzip();
        pb::StatusReply { notices: texts, notice_codes: codes, unix_ms, ..Default::default() }
    };
    let judge = |replies: Vec<pb::StatusReply>| {
        let answers: Vec<Answer> = replies.into_iter().map(oss).collect();
        Health::of(&answers, Some(&whole()), &[])
    };
    let h = judge(vec![
        say(&[("target-slow", "target 1 is slow"), ("", "no direct I/O")], 0),
        say(&[("target-slow", "target 1 is slow"), ("of-tomorrow", "?")], 0),
        say(&[("no-good-copy", "target 2: 3 chunks have no good copy")], 0),
    ]);
    assert_eq!((codes(&h), h.exit_status()), (vec!["no-good-copy", "target-slow"], 2));
    let said = "ERROR\n  no-good-copy: oss1: target 2: 3 chunks have no good copy\n  \
                target-slow: target 1 is slow\n";
    assert_eq!(h.text(), said);
    // A program from before codes.
    let old = pb::StatusReply {
        refused: vec![pb::RefusedTarget::default()],
        targets: vec![pb::TargetStatus { lost: 3, ..Default::default() }],
        ..Default::default()
    };
    assert_eq!(codes(&judge(vec![old])), ["no-good-copy", "target-refused"]);
    // A server from before clocks, two that agree, and one that is late.
    let clocks = [0, 1_000_900, 1_000_950, 996_000];
    let h = judge(clocks.iter().map(|ms| say(&[], *ms)).collect());
    assert_eq!((codes(&h), h.exit_status()), (vec!["clock-off"], 0));
    assert_eq!(h.reasons[0].texts, ["the clock of oss1 is 4 s behind the others'"]);
    assert_eq!(judge(clocks[..3].iter().map(|ms| say(&[], *ms)).collect()).word(), "OK");
    assert_eq!(judge(vec![say(&[], u64::MAX / 2), say(&[], 0), say(&[], 1)]).word(), "WARN");
}
