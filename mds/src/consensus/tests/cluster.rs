//! Whole members over a network in memory.

use super::*;

#[tokio::test(start_paused = true)]
async fn one_member_serves_at_once_and_keeps_its_state() {
    let mut c = Cluster::new(1, 1, |_| {}).await;
    assert_eq!(c.put("a", "1").await, Bytes::new());
    assert_eq!(c.put("a", "2").await, "1");
    c.node(1).read_barrier().await.unwrap();
    c.kill(1, false).await;
    c.start(1).await.unwrap();
    assert_eq!(c.put("a", "3").await, "2");
}

#[tokio::test(start_paused = true)]
async fn killing_the_leader_loses_nothing_and_the_rest_goes_on() {
    let mut c = Cluster::new(3, 2, |_| {}).await;
    for round in 0..10 {
        let key = format!("k{round}");
        c.put(&key, "x").await;
        let leader = c.leader().await;
        c.kill(leader, round % 2 == 0).await;
        let at = tokio::time::Instant::now();
        c.put(&key, "y").await;
        assert!(at.elapsed() < Duration::from_secs(5), "{:?}", at.elapsed());
        c.start(leader).await.unwrap();
    }
    c.settled(&[1, 2, 3]).await;
    assert!((0..10).all(|r| c.kv(1).value(&format!("k{r}")).unwrap() == "y"));
}

/// Whenever the leader dies between two heartbeats, and however far apart the members' ticks are.
#[tokio::test(start_paused = true)]
async fn an_election_takes_less_than_a_second() {
    const ROUNDS: u64 = 300;
    let mut c = Cluster::new(3, 2, |_| {}).await;
    let mut took = Vec::new();
    for round in 0..ROUNDS {
        (1..=3).for_each(|id| c.members[&id].log.set_latency(Duration::from_millis(25)));
        c.put("key", "value").await;
        tokio::time::sleep(Duration::from_millis(1000 + round * 37 % 151)).await;
        let leader = c.leader().await;
        c.kill(leader, true).await;
        let at = tokio::time::Instant::now();
        c.leader().await;
        took.push(at.elapsed());
        tokio::time::sleep(Duration::from_millis(round * 13 % 50)).await;
        c.start(leader).await.unwrap();
    }
    took.sort_unstable();
    println!("median {:?}, worst {:?}", took[took.len() / 2], &took[took.len() - 5..]);
    assert!(took.last() < Some(&Duration::from_secs(1)), "{:?}", &took[took.len() - 20..]);
}

#[tokio::test(start_paused = true)]
async fn followers_say_who_leads() {
    let c = Cluster::new(3, 3, |_| {}).await;
    let leader = c.leader().await;
    for id in (1..=3).filter(|id| *id != leader) {
        within("the hint", || (c.node(id).leadership().borrow().leader == leader).then_some(()))
            .await;
        let e = c.node(id).propose("a=1".into()).await.unwrap_err();
        assert_eq!((e.code, u64::from(e.leader)), (Code::NotLeader, leader));
        assert_eq!(c.node(id).read_barrier().await.unwrap_err().code, Code::NotLeader);
    }
}

#[tokio::test(start_paused = true)]
async fn a_leader_cut_off_stops_leading_and_gives_no_stale_reads() {
    let c = Cluster::new(3, 4, |_| {}).await;
    c.put("a", "1").await;
    let old = c.leader().await;
    c.net.cut_off.lock().insert(old as u32);
    let (write, read) = tokio::join!(c.node(old).propose("a=lost".into()), async {
        c.node(old).read_barrier().await
    });
    assert_eq!(write.unwrap_err().code, Code::Disconnected);
    assert_eq!(read.unwrap_err().code, Code::NotLeader);
    assert!(!c.node(old).leadership().borrow().ready);
    assert_eq!(c.put("a", "2").await, "1");
    c.net.cut_off.lock().clear();
    assert_eq!(c.put("a", "3").await, "2");
    c.settled(&[1, 2, 3]).await;
}

#[tokio::test(start_paused = true)]
async fn reads_see_every_answered_write_and_share_a_round() {
    let c = Cluster::new(3, 5, |_| {}).await;
    for i in 0..50 {
        c.put("n", &i.to_string()).await;
        let leader = c.leader().await;
        let barriers = (0..100).map(|_| c.node(leader).read_barrier());
        for r in futures_util::future::join_all(barriers).await {
            r.unwrap();
        }
        assert_eq!(c.kv(leader).value("n").unwrap(), i.to_string());
    }
}

#[tokio::test(start_paused = true)]
async fn proposals_share_log_writes() {
    let c = Cluster::new(3, 6, |_| {}).await;
    c.put("warm", "up").await;
    let leader = c.leader().await;
    let before = c.members[&leader].log.writes();
    let all = (0..1000).map(|i| c.node(leader).propose(format!("k{i}=v").into()));
    assert!(futures_util::future::join_all(all).await.iter().all(Result::is_ok));
    let writes = c.members[&leader].log.writes() - before;
    assert!(writes < 20, "{writes} durable writes for 1000 proposals");
}

#[tokio::test(start_paused = true)]
async fn too_much_is_refused_and_not_lost() {
    let c = Cluster::new(1, 7, |cfg| cfg.queue = 10).await;
    c.put("a", "1").await;
    let all = (0..100).map(|i| c.node(1).propose(format!("k{i}=v").into()));
    let results = futures_util::future::join_all(all).await;
    let refused =
        results.iter().filter(|r| r.as_ref().is_err_and(|e| e.code == Code::Overloaded)).count();
    assert_eq!(refused, 90);
    let long = Bytes::from(vec![b'x'; 3 << 20]);
    assert_eq!(c.node(1).propose(long).await.unwrap_err().code, Code::TooBig);
}

fn small_logs(cfg: &mut Config) {
    cfg.log_entries = 20;
}

#[tokio::test(start_paused = true)]
async fn a_member_far_behind_gets_a_copy_and_keeps_up_again() {
    let mut c = Cluster::new(3, 8, small_logs).await;
    c.put("first", "1").await;
    let lagging = c.leader().await % 3 + 1;
    c.kill(lagging, true).await;
    let long = "v".repeat(100_000);
    for i in 0..100 {
        c.put(&format!("k{i}"), &long).await;
    }
    let leader = c.leader().await;
    within("a cut", || (c.node(leader).status().first_index > 50).then_some(())).await;
    c.start(lagging).await.unwrap();
    c.settled(&[1, 2, 3]).await;
    assert!(c.members[&lagging].log.image().base.0 > 50, "it came as a copy");
    c.put("after", "1").await;
    c.settled(&[1, 2, 3]).await;
}

#[tokio::test(start_paused = true)]
async fn a_copy_broken_in_the_middle_is_made_again() {
    let mut c = Cluster::new(3, 9, small_logs).await;
    c.put("first", "1").await;
    let lagging = c.leader().await % 3 + 1;
    c.kill(lagging, true).await;
    let long = "v".repeat(100_000);
    for i in 0..100 {
        c.put(&format!("k{i}"), &long).await;
    }
    for keep in [false, true, false] {
        c.start(lagging).await.unwrap();
        within("the copy to begin", || c.members[&lagging].log.image().restoring).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        c.kill(lagging, keep).await;
        assert!(c.members[&lagging].log.image().restoring.is_some());
    }
    c.start(lagging).await.unwrap();
    c.settled(&[1, 2, 3]).await;
    assert_eq!(c.members[&lagging].log.image().restoring, None);
}

#[tokio::test(start_paused = true)]
async fn a_member_whose_state_was_lost_copies_it() {
    let mut c = Cluster::new(3, 10, small_logs).await;
    for i in 0..60 {
        c.put(&format!("k{i}"), "v").await;
    }
    let id = c.leader().await % 3 + 1;
    c.settled(&[1, 2, 3]).await;
    c.kill(id, true).await;
    c.members.get_mut(&id).unwrap().kv = Kv::new();
    c.start(id).await.unwrap();
    c.settled(&[1, 2, 3]).await;
}

#[tokio::test(start_paused = true)]
async fn a_member_without_its_log_is_refused_by_itself_and_by_the_others() {
    let mut c = Cluster::new(3, 11, |_| {}).await;
    for i in 0..10 {
        c.put(&format!("k{i}"), "v").await;
    }
    c.settled(&[1, 2, 3]).await;
    let id = c.leader().await % 3 + 1;
    c.kill(id, true).await;
    // The state is there, the log is new: the member notices by itself.
    let fresh = || Arc::new(MemLog::new(vec![1, 2, 3], 5, Duration::ZERO));
    let old = std::mem::replace(&mut c.members.get_mut(&id).unwrap().log, fresh());
    let e = c.start(id).await.unwrap_err();
    assert!(
        e.code == Code::Corrupt && e.message.contains("Changing the group of metadata servers"),
        "{e}"
    );
    // Both are new: the others know its old log's stamp, and it never gets to vote.
    c.members.get_mut(&id).unwrap().kv = Kv::new();
    c.start(id).await.unwrap();
    c.put("while", "away").await;
    let leader = c.leader().await;
    c.kill(leader, true).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    let lone = (1..=3).find(|i| *i != id && *i != leader).unwrap();
    assert!(
        !c.node(lone).leadership().borrow().ready,
        "one member and one that lost its log are no majority"
    );
    // The right log returns.
    c.kill(id, true).await;
    c.members.get_mut(&id).unwrap().log = old;
    c.start(id).await.unwrap();
    c.put("again", "1").await;
}

fn step(promote: &[u64], remove: &[u64]) -> MemberChange {
    MemberChange::Step { promote: promote.to_vec(), remove: remove.to_vec() }
}

#[tokio::test(start_paused = true)]
async fn members_are_added_promoted_replaced_and_removed() {
    let mut c = Cluster::new(3, 12, small_logs).await;
    for i in 0..60 {
        c.put(&format!("k{i}"), "v").await;
    }
    c.add(4, vec![]).await;
    let leader = c.leader().await;
    let add = MemberChange::AddLearner { id: 4, endpoint: Endpoint::Sim(4) };
    let e = c.node(leader).change_members(step(&[4], &[])).await.unwrap_err();
    assert_eq!(e.code, Code::Inval);
    c.node(leader).change_members(add.clone()).await.unwrap();
    assert_eq!(c.node(leader).change_members(add).await.unwrap_err().code, Code::Inval);
    // The new one reaches the others, too.
    (1..=3u64).for_each(|id| c.node(4).set_peer(id, Endpoint::Sim(id as u32)));
    c.settled(&[1, 2, 3, 4]).await;
    assert_eq!(c.node(4).status().state, "learner");
    let old = leader % 3 + 1;
    c.node(leader).change_members(step(&[4], &[old])).await.unwrap();
    let status = c.node(leader).status();
    assert!(
        status.voters.contains(&4) && !status.voters.contains(&old) && status.voters.len() == 3
    );
    // It learns of it, votes for a while, and ends.
    assert_eq!(c.node(old).stopped().await.code, Code::NotMember);
    use prost::Message as _;
    // Its end is not theirs: a member that still calls it must not take that for its own end.
    let batch = strake_proto::pb::RaftBatch {
        from: leader,
        to: old,
        cluster: c.node(leader).cluster().to_vec().into(),
        ..Default::default()
    };
    let answer =
        c.node(old).handle(Message::new(strake_proto::opcode::RAFT, batch.encode_to_vec())).await;
    assert_eq!(answer.unwrap_err().code, Code::Disconnected);
    c.kill(old, true).await;
    c.put("x", "1").await;
    // Any two of the three now suffice.
    c.kill(leader, true).await;
    c.put("x", "2").await;
    let now = c.leader().await;
    let e = c.node(now).change_members(step(&[], &[now])).await.unwrap_err();
    assert!(e.message.contains("transfer"), "{e}");
    c.node(now).change_members(step(&[], &[leader])).await.unwrap();
    assert_eq!(c.node(now).status().voters.len(), 2);
    c.put("x", "3").await;
}

/// A leader that still has its whole log does not give a new member a copy by itself; and the
/// member's first entries are of another term.
#[tokio::test(start_paused = true)]
async fn a_new_member_gets_the_state_from_a_leader_whose_log_is_whole_and_of_several_terms() {
    let mut c = Cluster::new(3, 21, |_| {}).await;
    let long = "v".repeat(700_000);
    for i in 0..4 {
        c.put(&format!("k{i}"), &long).await;
    }
    let former = c.leader().await;
    c.kill(former, true).await;
    c.put("x", "1").await;
    c.add(4, vec![]).await;
    let leader = c.leader().await;
    let status = c.node(leader).status();
    assert!(status.first_index == 1 && status.term > 1, "{status:?}");
    c.node(leader)
        .change_members(MemberChange::AddLearner { id: 4, endpoint: Endpoint::Sim(4) })
        .await
        .unwrap();
    (1..=3u64).for_each(|id| c.node(4).set_peer(id, Endpoint::Sim(id as u32)));
    c.settled(&[leader, 4]).await;
    c.node(leader).change_members(step(&[4], &[former])).await.unwrap();
    c.put("y", "1").await;
    c.settled(&[leader, 4]).await;
}

/// When a change is answered, a majority of the new members must be able to work without the
/// others.
#[tokio::test(start_paused = true)]
async fn the_leader_may_die_as_soon_as_it_answered_a_replacement() {
    for seed in 0..20 {
        let mut c = Cluster::new(3, 100 + seed, |_| {}).await;
        c.put("a", "1").await;
        let leader = c.leader().await;
        let old = leader % 3 + 1;
        c.kill(old, true).await;
        c.add(4, vec![]).await;
        let add = MemberChange::AddLearner { id: 4, endpoint: Endpoint::Sim(4) };
        c.node(leader).change_members(add).await.unwrap();
        (1..=3u64).for_each(|id| c.node(4).set_peer(id, Endpoint::Sim(id as u32)));
        while let Err(e) = c.node(leader).change_members(step(&[4], &[old])).await {
            assert_eq!(e.code, Code::Busy, "{e}");
            tokio::time::sleep(Duration::from_millis(1 + seed)).await;
        }
        c.kill(leader, true).await;
        assert_eq!(c.put("a", "2").await, "1", "seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn leadership_is_handed_over() {
    let c = Cluster::new(3, 13, |_| {}).await;
    c.put("a", "1").await;
    for _ in 0..5 {
        let from = c.leader().await;
        let to = from % 3 + 1;
        c.node(from).transfer(to).await.unwrap();
        within("the new one to be ready", || c.node(to).leadership().borrow().ready.then_some(()))
            .await;
        c.put("a", "2").await;
    }
    let leader = c.leader().await;
    assert_eq!(c.node(leader).transfer(9).await.unwrap_err().code, Code::Inval);
    assert_eq!(c.node(leader % 3 + 1).transfer(leader).await.unwrap_err().code, Code::NotLeader);
}

#[tokio::test(start_paused = true)]
async fn a_full_log_disk_moves_the_leadership_and_heals() {
    let c = Cluster::new(3, 14, |_| {}).await;
    c.put("a", "1").await;
    let full = c.leader().await;
    c.members[&full].log.set_fault(Some(Error::new(Code::NoSpc, "log disk full")));
    c.put("a", "2").await;
    assert_ne!(c.leader().await, full);
    for i in 0..20 {
        c.put(&format!("k{i}"), "v").await;
    }
    c.members[&full].log.set_fault(None);
    c.settled(&[1, 2, 3]).await;
}

/// Proposals under way when the disk filled get no result, later ones are told that it is full; all
/// can read.
#[tokio::test(start_paused = true)]
async fn a_lone_member_reads_on_with_a_full_disk_and_heals() {
    let c = Cluster::new(1, 15, |_| {}).await;
    c.put("a", "1").await;
    c.members[&1].log.set_fault(Some(Error::new(Code::NoSpc, "log disk full")));
    assert_eq!(c.node(1).propose("a=2".into()).await.unwrap_err().code, Code::Disconnected);
    assert_eq!(c.node(1).propose("a=3".into()).await.unwrap_err().code, Code::NoSpc);
    c.node(1).read_barrier().await.unwrap();
    assert_eq!(c.kv(1).value("a").unwrap(), "1");
    c.members[&1].log.set_fault(None);
    assert_eq!(c.put("a", "4").await, "2");
    // The state's disk.
    *c.kv(1).full.lock() = true;
    let (term, node) = (c.node(1).leadership().borrow().term, c.node(1));
    let proposal = node.propose("a=5".into());
    let reads = async {
        tokio::time::sleep(Duration::from_millis(20)).await;
        futures_util::future::join_all((0..10).map(|_| node.read_barrier())).await
    };
    let (e, reads) = tokio::join!(proposal, reads);
    assert_eq!(e.unwrap_err().code, Code::Disconnected);
    assert!(reads.iter().all(Result::is_ok));
    assert_eq!(c.node(1).propose("a=6".into()).await.unwrap_err().code, Code::NoSpc);
    c.node(1).read_barrier().await.unwrap();
    assert_eq!(c.kv(1).value("a").unwrap(), "4");
    let l = *c.node(1).leadership().borrow();
    assert!(l.ready && l.term == term, "{l:?}");
    *c.kv(1).full.lock() = false;
    assert_eq!(c.put("a", "7").await, "5");
}

#[tokio::test(start_paused = true)]
async fn a_follower_with_a_full_disk_hurts_nobody_and_catches_up() {
    let c = Cluster::new(3, 19, small_logs).await;
    c.put("a", "1").await;
    let leader = c.leader().await;
    let full = leader % 3 + 1;
    *c.kv(full).full.lock() = true;
    c.members[&full].log.set_fault(Some(Error::new(Code::NoSpc, "log disk full")));
    for i in 0..200 {
        c.node(leader).propose(format!("k{i}=v").into()).await.unwrap();
    }
    assert_eq!(c.leader().await, leader);
    c.members[&full].log.set_fault(None);
    c.put("b", "1").await;
    *c.kv(full).full.lock() = false;
    c.settled(&[1, 2, 3]).await;
    assert_eq!(c.leader().await, leader);
}

#[tokio::test(start_paused = true)]
async fn a_broken_log_disk_ends_the_member_with_the_cause() {
    let c = Cluster::new(3, 16, |_| {}).await;
    c.put("a", "1").await;
    let broken = c.leader().await;
    c.members[&broken].log.set_fault(Some(Error::new(Code::Io, "medium error")));
    c.put("a", "2").await;
    assert_eq!(c.node(broken).stopped().await.message, "medium error");
    let e = c.node(broken).propose("a=3".into()).await.unwrap_err();
    assert!(
        e.code == Code::Disconnected && e.message.contains("medium error"),
        "{e}: others may take it"
    );
}

#[tokio::test(start_paused = true)]
async fn foreign_and_malformed_requests_are_refused() {
    use prost::Message as _;
    let c = Cluster::new(1, 17, |_| {}).await;
    let n = c.node(1);
    let batch = |from, to, cluster: &[u8], messages: Vec<Bytes>| {
        let b = strake_proto::pb::RaftBatch {
            from,
            to,
            messages,
            cluster: cluster.to_vec().into(),
            stamp: 1,
            ..Default::default()
        };
        Message::new(strake_proto::opcode::RAFT, b.encode_to_vec())
    };
    let code = async |m: Message| n.handle(m).await.unwrap_err().code;
    assert_eq!(code(batch(2, 1, &[9; 16], vec![])).await, Code::Unauthenticated);
    assert_eq!(code(batch(2, 3, &CLUSTER, vec![])).await, Code::Inval);
    assert_eq!(
        code(batch(2, 1, &CLUSTER, vec![Bytes::from_static(b"\xff\xff")])).await,
        Code::Protocol
    );
    assert_eq!(
        code(Message::new(strake_proto::opcode::RAFT, &b"\x0f\xff"[..])).await,
        Code::Protocol
    );
    assert_eq!(
        code(Message::new(strake_proto::opcode::SNAPSHOT, &b"\x0f\xff"[..])).await,
        Code::Protocol
    );
    assert_eq!(code(Message::new(strake_proto::opcode::META, &b""[..])).await, Code::OpNotSupp);
    c.put("still", "here").await;
}

/// Gives time for what a disk makes the leader do.
async fn minutes(n: u64) {
    tokio::time::sleep(Duration::from_secs(60 * n)).await;
}

/// Writes all the time; returns the leaders, one after the other, in this many minutes.
async fn leaders_in(c: &Cluster, n: u64) -> Vec<u64> {
    let mut led = vec![c.leader().await];
    let end = tokio::time::Instant::now() + Duration::from_secs(60 * n);
    while tokio::time::Instant::now() < end {
        c.put("a", "1").await;
        let now = c.leader().await;
        if led.last() != Some(&now) {
            led.push(now);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    led
}

/// Followers acknowledge heartbeats behind their writes: half a second for each would cost any
/// leader its majority.
const LATE: Duration = Duration::from_millis(150);

fn impatient(cfg: &mut Config) {
    cfg.slow_write = Duration::from_millis(100);
}

#[tokio::test(start_paused = true)]
async fn a_leader_with_a_slow_disk_hands_over_once() {
    let c = Cluster::new(3, 20, impatient).await;
    c.put("a", "1").await;
    minutes(1).await;
    let slow = c.leader().await;
    c.members[&slow].log.set_latency(LATE);
    let led = leaders_in(&c, 10).await;
    assert!(led.len() == 2 && led[0] == slow, "{led:?}");
    // The disk is fast and slow in turn: the leadership does not follow.
    for round in 0..10 {
        let latency = if round % 2 == 0 { Duration::ZERO } else { LATE };
        c.members[&slow].log.set_latency(latency);
        assert_eq!(leaders_in(&c, 1).await, led[1..], "round {round}");
    }
    // With a fast disk again, it takes over when the other one becomes slow.
    c.members[&slow].log.set_latency(Duration::ZERO);
    for id in (1..=3).filter(|id| *id != slow) {
        c.members[&id].log.set_latency(LATE);
    }
    let led = leaders_in(&c, 10).await;
    assert_eq!(led.last(), Some(&slow), "{led:?}");
    assert!(led.len() <= 3, "{led:?}");
}

#[tokio::test(start_paused = true)]
async fn where_all_disks_are_slow_nobody_hands_over() {
    let c = Cluster::new(3, 21, impatient).await;
    c.put("a", "1").await;
    minutes(1).await;
    (1..=3).for_each(|id| c.members[&id].log.set_latency(LATE));
    let leader = c.leader().await;
    assert_eq!(leaders_in(&c, 10).await, [leader]);
}

#[tokio::test(start_paused = true)]
async fn a_leader_with_a_full_disk_hands_over_to_one_with_space() {
    let c = Cluster::new(3, 22, |_| {}).await;
    c.put("a", "1").await;
    minutes(1).await;
    let full = c.leader().await;
    let other = full % 3 + 1;
    c.node(full).set_disk_full(true);
    c.node(other).set_disk_full(true);
    let third = 6 - full - other;
    assert_eq!(leaders_in(&c, 10).await, [full, third]);
    // No member can take over.
    c.node(third).set_disk_full(true);
    assert_eq!(leaders_in(&c, 10).await, [third]);
    c.node(other).set_disk_full(false);
    assert_eq!(leaders_in(&c, 10).await, [third, other]);
}

/// A member that was removed while it was away learns it from the others, and never leads or votes
/// again.
#[tokio::test(start_paused = true)]
async fn a_member_removed_while_it_was_away_is_told_so() {
    let mut c = Cluster::new(4, 23, |_| {}).await;
    c.put("a", "1").await;
    let leader = c.leader().await;
    let gone = leader % 4 + 1;
    c.kill(gone, true).await;
    minutes(1).await;
    c.node(leader).change_members(step(&[], &[gone])).await.unwrap();
    // What the state of the real server says.
    (1..=4).for_each(|id| c.kv(id).former.lock().extend([gone]));
    c.start(gone).await.unwrap();
    assert_eq!(c.node(gone).stopped().await.code, Code::NotMember);
    c.put("a", "2").await;
}

#[tokio::test(start_paused = true)]
async fn the_last_and_the_needed_are_not_removed() {
    let mut c = Cluster::new(3, 24, |_| {}).await;
    c.put("a", "1").await;
    minutes(1).await;
    let leader = c.leader().await;
    let (dead, live) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    c.kill(dead, true).await;
    minutes(1).await;
    let e = c.node(leader).change_members(step(&[], &[live])).await.unwrap_err();
    assert!(
        e.code == Code::Inval && e.message.contains(&format!("start or replace {dead}")),
        "{e}"
    );
    c.node(leader).change_members(step(&[], &[dead])).await.unwrap();
    c.node(leader).change_members(step(&[], &[live])).await.unwrap();
    assert_eq!(c.node(leader).status().voters, [leader]);
    let e = c.node(leader).change_members(step(&[], &[leader])).await.unwrap_err();
    assert_eq!(e.code, Code::Inval);
    c.put("a", "2").await;
}

#[tokio::test(start_paused = true)]
async fn of_two_changes_at_once_one_is_told_to_come_again() {
    let c = Cluster::new(4, 25, |_| {}).await;
    c.put("a", "1").await;
    minutes(1).await;
    let leader = c.leader().await;
    let others: Vec<u64> = (1..=4).filter(|id| *id != leader).collect();
    let n = c.node(leader);
    let (a, b) = tokio::join!(
        n.change_members(step(&[], &[others[0]])),
        n.change_members(step(&[], &[others[1]]))
    );
    a.unwrap();
    assert_eq!(b.unwrap_err().code, Code::Busy);
    assert_eq!(n.status().voters.len(), 3);
}
