//! While all storage targets are away, or only seem to be.

use super::*;
use tokio::time::timeout;

fn alive(w: &World) -> usize {
    let status = w.mds.iter().flatten().find(|(_, s)| s.leads()).map(|(_, s)| s.status());
    status.map_or(0, |s| s.map.unwrap().targets.iter().filter(|t| t.alive).count())
}

#[tokio::test(start_paused = true)]
async fn a_file_is_made_when_one_of_the_dead_targets_is_back() {
    let w = World::new(1, |_| ()).await;
    let mut c = w.client(1).await;
    assert_eq!(c.fails(create("f", 2)).await, Code::NoSpc, "no target was ever there");
    let all = [w.oss(1).await, w.oss(2).await];
    until("chains", || w.mds[0].as_ref().unwrap().1.status().map.unwrap().sets.len() == 2).await;
    let old = c.one(create("old", 2)).await.ino;
    all.iter().for_each(|o| o.up.store(false, Ordering::Relaxed));
    until("all are dead", || alive(&w) == 0).await;
    // Operations that need no target succeed.
    c.one(mkdir("d")).await;
    assert_eq!(c.one(create("old", 2)).await.ino, old);
    let request = c.request(vec![create("new", 2)]);
    let waits = timeout(Duration::from_secs(20), c.send(&request)).await;
    assert!(waits.is_err(), "{waits:?}");
    let (made, _oss) = tokio::join!(c.send(&request), w.oss(2));
    let made = made.unwrap().remove(0);
    assert!(made.status.is_none() && made.layout.is_some(), "{made:?}");
    assert_eq!(c.one(lookup("new")).await.ino, made.ino);
}

/// The others are away for longer than a lease, and the leader has no majority.
#[tokio::test(start_paused = true)]
async fn servers_whose_heartbeats_had_to_wait_are_not_taken_for_dead() {
    let w = World::new(3, |c| c.lease_ms = 400).await;
    let _oss = w.oss(1).await;
    until("chains", || alive(&w) == 1).await;
    sleep(Duration::from_secs(2)).await;
    let leader = w.leader().await;
    let others: Vec<u32> = (0..3).filter(|i| *i != leader).map(|i| i as u32 + 1).collect();
    let epochs = || {
        let map = w.mds[leader].as_ref().unwrap().1.status().map.unwrap();
        map.chains.iter().map(|c| c.epoch).collect::<Vec<_>>()
    };
    let before = epochs();
    assert!(!before.is_empty());
    for _ in 0..5 {
        w.net.cut_off.lock().extend(&others);
        sleep(Duration::from_millis(700)).await;
        w.net.cut_off.lock().clear();
        sleep(Duration::from_secs(3)).await;
    }
    assert_eq!(epochs(), before, "a chain has left a target that was there");
}
