//! States that are found damaged: leadership is handed over, the state given up and copied again.

use super::*;

async fn damaged(c: &Cluster, id: u64) -> (u64, bool, String) {
    let s = c.node(id).status();
    (s.damages, s.no_state, s.damage)
}

/// Found by an entry or by a read, on the leader or another, with changes going on.
#[tokio::test(start_paused = true)]
async fn a_damaged_state_is_handed_over_and_copied_anew() {
    for (round, (leads, applies)) in
        [(true, true), (true, false), (false, true), (false, false)].into_iter().enumerate()
    {
        let c = Cluster::new(3, 300 + round as u64, |_| {}).await;
        for i in 0..40 {
            c.put(&format!("k{i}"), "old").await;
        }
        c.settled(&[1, 2, 3]).await;
        let leader = c.leader().await;
        let id = if leads { leader } else { leader % 3 + 1 };
        let term = c.node(leader).status().term;
        let load = async {
            for i in 0..300 {
                c.put(&format!("k{}", i % 40 + 100), &i.to_string()).await;
            }
        };
        let meets = async {
            tokio::time::sleep(Duration::from_millis(50)).await;
            c.kv(id).spoil("k7");
            let at = tokio::time::Instant::now();
            if applies {
                c.put("k7", "new").await;
            } else {
                c.kv(id).read("k7").unwrap_err();
                assert!(c.node(id).gave_up_state().await);
                c.put("k7", "new").await;
            }
            // Sooner than the others would notice that no member leads.
            let soonest = Duration::from_millis(50)
                * Config::new(1, CLUSTER, BTreeMap::new()).election_ticks.0 as u32;
            assert!(at.elapsed() < soonest, "round {round}: {:?}", at.elapsed());
        };
        tokio::join!(load, meets);
        let now = c.leader().await;
        assert_eq!(
            (now != leader, c.node(now).status().term > term),
            (leads, leads),
            "round {round}"
        );
        within("its new state", || {
            (c.node(id).status().damages == 1 && !c.node(id).status().no_state).then_some(())
        })
        .await;
        c.settled(&[1, 2, 3]).await;
        assert_eq!(damaged(&c, id).await, (1, false, String::new()), "round {round}");
        assert_eq!(c.kv(id).read("k7").unwrap().unwrap(), "new");
        assert!(
            (1..=3).filter(|other| *other != id).all(|other| c.node(other).status().damages == 0)
        );
        // It may lead again.
        if now != id {
            c.node(now).transfer(id).await.unwrap();
        }
        assert_eq!(c.put("k7", "newer").await, "new");
    }
}

/// What it acknowledged before counts: with the third member away, nothing that was answered is
/// lost, whoever leads then.
#[tokio::test(start_paused = true)]
async fn a_member_without_its_state_still_has_its_log() {
    for seed in 0..10 {
        let mut c = Cluster::new(3, 330 + seed, |_| {}).await;
        c.put("a", "1").await;
        let leader = c.leader().await;
        let (id, away) = (leader % 3 + 1, (leader + 1) % 3 + 1);
        c.kill(away, true).await;
        c.put("a", "2").await;
        c.kv(id).spoil("a");
        c.kv(id).read("a").unwrap_err();
        // Its acknowledgement is needed for each of these.
        for i in 0..10 {
            c.put(&format!("b{i}"), "1").await;
        }
        c.start(away).await.unwrap();
        c.kill(leader, true).await;
        assert_eq!(c.put("a", "3").await, "2", "seed {seed}");
        assert!((0..10).all(|i| c.kv(away).value(&format!("b{i}")).is_some()), "seed {seed}");
        c.start(leader).await.unwrap();
        c.settled(&[1, 2, 3]).await;
    }
}

/// Two damaged states, with the third member away: one of the two continues with what it has until
/// the other has a copy.
#[tokio::test(start_paused = true)]
async fn the_last_state_is_not_given_up() {
    let mut c = Cluster::new(3, 350, |_| {}).await;
    for i in 0..40 {
        c.put(&format!("k{i}"), &"v".repeat(200_000)).await;
    }
    c.settled(&[1, 2, 3]).await;
    let leader = c.leader().await;
    let (other, away) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    c.kill(away, true).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    c.kv(other).spoil("k1");
    c.kv(other).read("k1").unwrap_err();
    assert!(c.node(other).gave_up_state().await);
    // The leader learns of it with the next message from there.
    tokio::time::sleep(Duration::from_millis(120)).await;
    assert!(c.node(other).status().no_state, "the copy takes longer");
    c.kv(leader).spoil("k2");
    c.kv(leader).read("k2").unwrap_err();
    assert!(!c.node(leader).gave_up_state().await);
    assert_eq!(damaged(&c, leader).await.2, "a flipped bit");
    c.put("k3", "while").await;
    within("the copy", || (!c.node(other).status().no_state).then_some(())).await;
    within("the other one leads, and gave its copy", || {
        let s = c.node(leader).status();
        (s.leader == other && s.damages == 1 && !s.no_state).then_some(())
    })
    .await;
    c.start(away).await.unwrap();
    c.settled(&[1, 2, 3]).await;
}

/// There is no member to copy it from: it ends with the cause, and nothing of the entry is done.
#[tokio::test(start_paused = true)]
async fn a_lone_member_keeps_what_it_has() {
    let c = Cluster::new(1, 360, |_| {}).await;
    c.put("a", "1").await;
    c.kv(1).spoil("a");
    c.kv(1).read("a").unwrap_err();
    assert!(!c.node(1).gave_up_state().await);
    c.put("b", "1").await;
    let before = c.kv(1).pairs();
    assert_eq!(c.node(1).propose("a=2".into()).await.unwrap_err().code, Code::Disconnected);
    let e = c.node(1).stopped().await;
    assert!(e.code == Code::Corrupt && e.message.contains("a flipped bit"), "{e}");
    assert_eq!(c.kv(1).pairs(), before);
}

/// A bug in applying an entry: the member says which entry it was, and ends instead of hanging.
#[tokio::test(start_paused = true)]
async fn an_entry_that_panics_is_named_as_the_cause() {
    let c = Cluster::new(1, 370, |_| {}).await;
    c.put("a", "1").await;
    // The state machine of these tests takes text only.
    let e = c.node(1).propose(Bytes::from_static(&[0xff])).await.unwrap_err();
    assert_eq!(e.code, Code::Disconnected);
    let e = c.node(1).stopped().await;
    assert!(e.message.contains("panicked") && e.message.contains("log entries"), "{e}");
    assert_eq!(c.kv(1).read("a").unwrap().unwrap(), "1");
}
