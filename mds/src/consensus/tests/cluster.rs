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

#[tokio::test(start_paused = true)]
async fn followers_say_who_leads() {
    let c = Cluster::new(3, 3, |_| {}).await;
    let leader = c.leader().await;
    for id in (1..=3).filter(|id| *id != leader) {
        within("the hint", || (c.node(id).leadership().borrow().leader == leader).then_some(())).await;
        let e = c.node(id).propose("a=1".into()).await.unwrap_err();
        assert_eq!((e.code, u64::from(e.leader)), (Code::NotLeader, leader));
        assert_eq!(c.node(id).read_barrier().await.unwrap_err().code, Code::NotLeader);
    }
}
