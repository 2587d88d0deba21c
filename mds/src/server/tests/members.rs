//! The group changes while clients work.

use pb::members_request::Change;
use prost::Message as _;
use strake_fabric::Endpoint;

use super::*;
use crate::consensus::MemberChange;

fn learn(at: u64) -> Change {
    Change::Learn(pb::MemberLearn { endpoint: format!("sim:{at}") })
}
fn step(promote: &[u64], remove: &[u64]) -> Change {
    Change::Step(pb::MemberStep { promote: promote.to_vec(), remove: remove.to_vec() })
}
fn transfer(to: u64) -> Change {
    Change::Transfer(pb::MemberTransfer { to })
}

/// One attempt at the leader.
async fn once(w: &World, change: Option<Change>) -> Result<pb::MembersReply, strake_proto::Error> {
    let body = pb::MembersRequest { change, levels: false }.encode_to_vec();
    let i = w.leader().await;
    let m = w.ask_at(i, Role::Server, opcode::MEMBERS, body.into()).await?;
    Ok(pb::MembersReply::decode(m.body).unwrap())
}

/// As the command does: retries while the error is temporary.
async fn ask(w: &World, change: Change) -> Result<pb::MembersReply, strake_proto::Error> {
    for _ in 0..600 {
        match once(w, Some(change.clone())).await {
            Err(e) if e.is_retryable() || e.code == Code::Busy => {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            r => return r,
        }
    }
    panic!("not within 30 s: {change:?}");
}

async fn refused(w: &World, change: Change, word: &str) {
    let e = ask(w, change.clone()).await.unwrap_err();
    assert!(e.code == Code::Inval && e.message.contains(word), "{change:?}: {e:?}");
}

fn voters(r: &pb::MembersReply) -> Vec<u64> {
    r.members.iter().filter(|m| m.voter && !m.leaving).map(|m| m.id).collect()
}

/// Waits until the server numbered `i` stops because it is no longer a member.
async fn is_told(w: &World, i: usize) {
    let server = &w.mds[i].as_ref().unwrap().1;
    let cause =
        tokio::time::timeout(Duration::from_secs(30), server.stopped()).await.expect("it stops");
    assert_eq!(cause.code, Code::NotMember, "{cause}");
}

#[tokio::test(start_paused = true)]
async fn all_members_are_replaced_in_turn_and_clients_learn_of_it() {
    let mut w = World::new(3, |_| ()).await;
    for old in 1..=3u64 {
        let new = w.join().await as u64 + 1;
        let mut c = w.client(old as u8).await;
        c.one(mkdir(&format!("before-{old}"))).await;
        // If the leader is to be removed, it hands over first.
        if w.leader().await as u64 + 1 != old {
            ask(&w, transfer(old)).await.unwrap();
        }
        assert_eq!(ask(&w, learn(new)).await.unwrap().learner, new);
        assert_eq!(ask(&w, learn(new)).await.unwrap().learner, new, "once more");
        let r = ask(&w, step(&[new], &[old])).await.unwrap();
        assert!(voters(&r).contains(&new) && !voters(&r).contains(&old), "{r:?}");
        assert_eq!(ask(&w, learn(new)).await.unwrap().learner, new, "a member already");
        c.one(mkdir(&format!("after-{old}"))).await;
        is_told(&w, old as usize - 1).await;
        // What a client learns with its next renewal.
        let map = c.renew(false, &[]).await.unwrap().map.unwrap();
        let mds: Vec<u32> = map.nodes.iter().filter(|n| n.role == 1).map(|n| n.id).collect();
        assert!(mds.contains(&(new as u32)) && !mds.contains(&(old as u32)), "{mds:?}");
        w.kill(old as usize - 1);
    }
    let r = once(&w, None).await.unwrap();
    assert_eq!((voters(&r), r.former), (vec![4, 5, 6], vec![1, 2, 3]));
    // Any of the new ones may be lost, and everything is there.
    let leader = w.leader().await;
    w.kill(leader);
    let mut c = w.client(9).await;
    for old in 1..=3 {
        c.one(lookup(&format!("before-{old}"))).await;
        c.one(lookup(&format!("after-{old}"))).await;
    }
}

/// The client that asked for the change is gone, with its connection, when the group has changed
/// and the map has not.
#[tokio::test(start_paused = true)]
async fn the_map_follows_the_group_whoever_does_not_see_to_it() {
    let mut w = World::new(3, |_| ()).await;
    let new = w.join().await as u64 + 1;
    ask(&w, learn(new)).await.unwrap();
    let leader = w.leader().await;
    let old = (leader as u64 + 1) % 3 + 1;
    let node = w.mds[leader].as_ref().unwrap().1.mds.member.node.clone();
    // Until the learner has caught up.
    while let Err(e) =
        node.change_members(MemberChange::Step { promote: vec![new], remove: vec![old] }).await
    {
        assert_eq!(e.code, Code::Busy, "{e}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(!once(&w, None).await.unwrap().former.contains(&(old as u32)));
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(w.leader().await, leader, "the same one leads");
    assert!(once(&w, None).await.unwrap().former.contains(&(old as u32)));
}

/// Configurations by which a new server and those of the group cannot find each other.
fn strangers(cfg: &mut crate::server::Config) {
    match cfg.join {
        true => cfg.peers = vec![(99, Endpoint::Sim(99))],
        false => cfg.peers.truncate(3),
    }
}

/// The leader is lost when a server was added, before the map has its endpoint.
#[tokio::test(start_paused = true)]
async fn a_learner_is_met_after_all_who_took_it_in_were_lost() {
    let mut w = World::new(3, strangers).await;
    let new = w.join().await as u64 + 1;
    let add = MemberChange::AddLearner { id: new, endpoint: Endpoint::Sim(new as u32) };
    let leader = w.leader().await;
    let node = w.mds[leader].as_ref().unwrap().1.mds.member.node.clone();
    node.change_members(add).await.unwrap();
    (0..3).for_each(|i| w.kill(i));
    for i in 0..3 {
        w.start(i).await;
    }
    // Members that restart find it in their logs.
    let knows = async |w: &World| {
        once(w, None).await.unwrap().members.iter().any(|m| m.id == new && m.matched > 0)
    };
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        if knows(&w).await {
            break;
        }
    }
    assert!(knows(&w).await, "{:?}", once(&w, None).await);
    assert_eq!(ask(&w, learn(new)).await.unwrap().learner, new);
    let r = ask(&w, step(&[new], &[])).await.unwrap();
    assert_eq!(voters(&r), [1, 2, 3, new]);
}

/// The same where the log is cut: the command is repeated.
#[tokio::test(start_paused = true)]
async fn a_learner_that_nobody_knows_the_place_of_is_taken_in_again() {
    let mut w = World::new(3, strangers).await;
    let new = w.join().await as u64 + 1;
    w.net.cut_off.lock().insert(new as u32);
    let add = MemberChange::AddLearner { id: new, endpoint: Endpoint::Sim(new as u32) };
    let leader = w.leader().await;
    let node = w.mds[leader].as_ref().unwrap().1.mds.member.node.clone();
    node.change_members(add).await.unwrap();
    w.mds.iter().take(3).for_each(|m| m.as_ref().unwrap().1.mds.member.node.forget_peer(new));
    let of = |r: &pb::MembersReply| r.members.iter().find(|m| m.id == new).unwrap().clone();
    w.net.cut_off.lock().clear();
    assert_eq!(of(&once(&w, None).await.unwrap()).endpoint, "");
    assert_eq!(ask(&w, learn(new)).await.unwrap().learner, new);
    assert_eq!(of(&once(&w, None).await.unwrap()).endpoint, format!("sim:{new}"));
    ask(&w, step(&[new], &[])).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_wiped_leader_comes_back_under_a_new_id_and_so_does_the_next() {
    let mut w = World::new(3, |_| ()).await;
    let mut c = w.client(1).await;
    let made = c.one(mkdir("kept")).await;
    drop(c);
    for round in 0..2 {
        let dead = w.leader().await;
        w.kill(dead);
        w.wipe(dead, vec![1, 2, 3]);
        // Under its own id it is no member: no vote, no acknowledgement, and never again a member.
        w.start(dead).await;
        w.leader().await;
        refused(&w, learn(dead as u64 + 1), "lost its disk").await;
        w.kill(dead);
        let new = w.join().await as u64 + 1;
        ask(&w, learn(new)).await.unwrap();
        let r = ask(&w, step(&[new], &[dead as u64 + 1])).await.unwrap();
        assert_eq!(voters(&r).len(), 3, "round {round}: {r:?}");
        // The old folder, if it returns.
        w.start(dead).await;
        is_told(&w, dead).await;
        w.kill(dead);
    }
    let leader = w.leader().await;
    w.kill(leader);
    let mut c = w.client(2).await;
    assert_eq!(c.one(lookup("kept")).await.ino, made.ino);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_is_refused_with_its_reason() {
    let mut w = World::new(3, |_| ()).await;
    let leader = w.leader().await as u64 + 1;
    tokio::time::sleep(Duration::from_secs(5)).await;
    refused(&w, step(&[], &[9]), "not a member").await;
    refused(&w, step(&[9], &[]), "not a learner").await;
    refused(&w, step(&[], &[]), "at least one").await;
    refused(&w, transfer(9), "not another voter").await;
    refused(&w, learn(99), "start it first").await;
    let e =
        ask(&w, Change::Learn(pb::MemberLearn { endpoint: "nonsense".into() })).await.unwrap_err();
    assert_eq!(e.code, Code::Inval);
    // Of another cluster.
    w.cluster = [9; 16];
    let foreign = w.join().await as u64 + 1;
    refused(&w, learn(foreign), "another cluster").await;
    w.cluster = [3; 16];
    // A server with a group of its own.
    let own = w.logs.len();
    w.join().await;
    w.kill(own);
    w.wipe(own, vec![own as u64 + 1]);
    w.start(own).await;
    refused(&w, learn(own as u64 + 1), "join = true").await;
    w.kill(own);
    // Clients are not to ask.
    let at = w.leader().await;
    let body = pb::MembersRequest { change: Some(step(&[], &[leader % 3 + 1])), levels: false }
        .encode_to_vec();
    for opcode in [opcode::MEMBERS, opcode::PROBE, opcode::STATUS] {
        let e = w.ask_at(at, Role::Client, opcode, body.clone().into()).await.unwrap_err();
        assert_eq!(e.code, Code::Access);
    }
    assert_eq!(voters(&once(&w, None).await.unwrap()), [1, 2, 3], "nothing of all that was done");
    // A member that is needed.
    w.kill(leader as usize % 3);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let needed = (leader + 1) % 3 + 1;
    refused(&w, step(&[], &[needed]), &format!("start or replace {}", leader % 3 + 1)).await;
}

#[tokio::test(start_paused = true)]
async fn the_only_voter_is_not_removed_and_the_leader_not_before_it_handed_over() {
    let mut w = World::new(1, |_| ()).await;
    refused(&w, step(&[], &[1]), "only voter").await;
    let new = w.join().await as u64 + 1;
    ask(&w, learn(new)).await.unwrap();
    ask(&w, step(&[new], &[])).await.unwrap();
    let e = loop {
        match once(&w, Some(step(&[], &[1]))).await {
            Err(e) if e.code == Code::Busy => tokio::time::sleep(Duration::from_millis(50)).await,
            r => break r.unwrap_err(),
        }
    };
    assert_eq!((e.code, e.leader), (Code::NotLeader, 2));
    let r = ask(&w, step(&[], &[1])).await.unwrap();
    assert_eq!((voters(&r), r.former), (vec![2], vec![1]));
    is_told(&w, 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_followers_word_is_worth_something_without_a_leader() {
    let mut w = World::new(3, |_| ()).await;
    let leader = w.leader().await;
    let r = once(&w, None).await.unwrap();
    assert!(r.members.iter().all(|m| m.voter && m.matched > 0 && m.heard_ms.is_some()), "{r:?}");
    let (a, b) = ((leader + 1) % 3, (leader + 2) % 3);
    w.kill(leader);
    w.kill(a);
    tokio::time::sleep(Duration::from_secs(10)).await;
    let m = w.ask_at(b, Role::Server, opcode::MEMBERS, Default::default()).await.unwrap();
    let r = pb::MembersReply::decode(m.body).unwrap();
    assert_eq!((r.id, r.leader, voters(&r)), (b as u64 + 1, 0, vec![1, 2, 3]));
}
