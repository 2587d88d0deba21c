//! What the metadata leader counts as open when a reassertion is lost or refused, or opens and
//! closes run beside it.

use std::{sync::Arc, time::Duration};

use crate::common::{Cluster, user};
use strake_client::{Client, File};
use tokio::time::{Instant, sleep};

const RW: u32 = 2;

async fn file(c: &Client) -> File {
    c.create(&user(), c.root(), b"f", 0o600, RW, true, None).await.unwrap().0
}

/// An open may be sent before a reassertion and answered after it, which needs another reassertion.
/// Constant opens must not cause endless ones.
#[tokio::test(start_paused = true)]
async fn programs_that_open_files_all_the_time_do_not_have_all_told_for_ever() {
    let c = Cluster::new(2, 1);
    let a = Arc::new(c.client(1).await);
    let f = file(&a).await;
    let (ino, end) = (f.ino(), Instant::now() + Duration::from_millis(500));
    c.mds.answer_opens_after(Duration::from_millis(3));
    let program = |n| {
        let a = a.clone();
        tokio::spawn(async move {
            sleep(Duration::from_millis(n)).await;
            while Instant::now() < end {
                a.open(&user(), ino, RW).await.unwrap().0.close().await.unwrap();
            }
        })
    };
    let programs: Vec<_> = (0..16).map(program).collect();
    sleep(Duration::from_millis(100)).await;
    c.mds.elect(2);
    for p in programs {
        p.await.unwrap();
    }
    let told = c.mds.reassertions();
    assert!((1..=4).contains(&told), "{told} reassertions");
    assert_eq!(c.mds.opens(), 1);
}

/// Otherwise the leader takes an open file for closed, and frees it when its last name is removed.
#[tokio::test(start_paused = true)]
async fn an_open_that_a_reassertion_left_out_is_told_though_the_leader_is_busy() {
    for loses in [false, true] {
        let c = Cluster::new(2, 1);
        let a = Arc::new(c.client(1).await);
        let f = file(&a).await;
        c.mds.answer_next_open_after(Duration::from_secs(3));
        let (client, ino) = (a.clone(), f.ino());
        let late = tokio::spawn(async move { client.open(&user(), ino, RW).await.unwrap().0 });
        sleep(Duration::from_millis(100)).await;
        assert_eq!(c.mds.opens(), 2);
        c.mds.elect(2);
        sleep(Duration::from_secs(2)).await;
        assert_eq!((c.mds.opens(), late.is_finished()), (1, false), "told without it");
        if loses {
            c.mds.lose_next_reassertion();
        } else {
            c.mds.refuse_reassertions(3);
        }
        let g = late.await.unwrap();
        sleep(Duration::from_secs(10)).await;
        assert_eq!(c.mds.opens(), 2, "loses: {loses}");
        g.close().await.unwrap();
        f.close().await.unwrap();
        assert_eq!(c.mds.opens(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_close_that_the_leader_is_too_busy_for_does_not_count_as_open_for_ever() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let f = file(&a).await;
    let (g, _) = a.open(&user(), f.ino(), RW).await.unwrap();
    c.mds.refuse_closes(true);
    g.close().await.unwrap();
    assert_eq!(c.mds.opens(), 2);
    sleep(Duration::from_secs(30)).await;
    assert_eq!(c.mds.opens(), 1);
}
