//! Locks of two clients of a whole cluster without faults: callers that stop waiting at any moment,
//! and waiters that must not be overtaken for ever.

use std::{future::Future, time::Duration};

use strake_client::{Client, Lock, LockKind, LockType};
use strake_proto::{Code, Ino};
use strake_sim::{cluster::Cluster, workload::root};
use tokio::time::{Instant, sleep, timeout};

fn simulated<F: Future<Output = ()>>(test: impl FnOnce(Client, Client, Ino) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let mut cluster = Cluster::new(5);
        for node in cluster.nodes() {
            cluster.start(node).await.unwrap();
        }
        while !cluster.whole() {
            sleep(Duration::from_millis(100)).await;
        }
        let (a, b) = (cluster.client(1).await.unwrap(), cluster.client(2).await.unwrap());
        let file = a.mknod(&root(), a.root(), b"f", 0o100_644, 0).await.unwrap().ino;
        test(a, b, file).await;
    });
    runtime.shutdown_background();
}

fn lock(mode: LockType) -> Lock {
    Lock { kind: LockKind::LockPosix, owner: 1, mode, start: 10, end: u64::MAX, pid: 7 }
}
const READ: LockType = LockType::LockRead;
const WRITE: LockType = LockType::LockWrite;
const UNLOCK: LockType = LockType::LockUnlock;

/// Whether the lock can be had now. It is given back at once.
async fn can(c: &Client, file: Ino, mode: LockType) -> bool {
    let other = Lock { owner: 99, ..lock(mode) };
    match c.locks().set(file, &other, false).await {
        Ok(_) => c.locks().set(file, &Lock { mode: UNLOCK, ..other }, false).await.is_ok(),
        Err(e) => {
            assert_eq!(e.code, Code::LockConflict);
            false
        }
    }
}

#[test]
fn who_stops_waiting_at_any_moment_has_what_he_had_before() {
    simulated(|a, b, file| async move {
        // `b` stops between 20 ms before and 60 ms after `a` gives up: before, while and after `a`
        // is asked and answers.
        for (had, step) in [(None, 0..80), (Some(READ), 0..80)]
            .into_iter()
            .flat_map(|(h, s)| s.map(move |s| (h, s)))
        {
            a.locks().set(file, &lock(READ), false).await.unwrap();
            if let Some(mode) = had {
                b.locks().set(file, &lock(mode), false).await.unwrap();
            }
            let begun = Instant::now();
            let gives_up = async {
                sleep(Duration::from_millis(20)).await;
                a.locks().set(file, &lock(UNLOCK), false).await.unwrap();
            };
            let (patience, wanted) = (Duration::from_millis(step), lock(WRITE));
            let (got, ()) =
                tokio::join!(timeout(patience, b.locks().set(file, &wanted, true)), gives_up);
            let stopped = got.is_err();
            assert_eq!(got.is_ok_and(|r| r.is_ok()), !stopped, "{step}");
            if stopped {
                // Once the owner's next request is answered, nothing is on the way any more.
                let span = Lock { start: 0, end: 0, ..lock(READ) };
                b.locks().set(file, &span, false).await.unwrap();
                b.locks().set(file, &Lock { mode: UNLOCK, ..span }, false).await.unwrap();
                let others = (can(&a, file, READ).await, can(&a, file, WRITE).await);
                assert_eq!(others, (true, had.is_none()), "{had:?}, stopped after {step} ms");
            }
            b.locks().set(file, &lock(UNLOCK), false).await.unwrap();
            assert!(can(&a, file, WRITE).await);
            assert!(begun.elapsed() < Duration::from_secs(5));
        }
    });
}

#[test]
fn a_waiter_is_not_overtaken_by_who_takes_and_drops_it_all_the_time() {
    simulated(|a, b, file| async move {
        a.locks().set(file, &lock(WRITE), false).await.unwrap();
        let waiter = async {
            b.locks().set(file, &lock(WRITE), true).await.unwrap();
            b.locks().set(file, &lock(UNLOCK), false).await.unwrap();
        };
        let mut rounds = 0;
        let greedy = async {
            loop {
                sleep(Duration::from_millis(20)).await;
                a.locks().set(file, &lock(UNLOCK), false).await.unwrap();
                rounds += 1;
                // With or without waiting, `a` comes after the client that waits.
                while rounds % 2 == 0 && a.locks().set(file, &lock(WRITE), false).await.is_err() {}
                if rounds % 2 == 1 {
                    a.locks().set(file, &lock(WRITE), true).await.unwrap();
                }
            }
        };
        tokio::select! {
            biased;
            () = waiter => {}
            () = greedy => {}
            () = sleep(Duration::from_secs(30)) => panic!("it starves"),
        }
        assert!(rounds <= 2, "overtaken in {rounds} rounds");
    });
}

#[test]
fn all_waiters_of_a_client_get_it_one_after_the_other() {
    simulated(|a, b, file| async move {
        a.locks().set(file, &lock(WRITE), false).await.unwrap();
        let order = parking_lot::Mutex::new(Vec::new());
        let one = |owner: u64| {
            let (b, order) = (&b, &order);
            async move {
                let mine = Lock { owner, ..lock(WRITE) };
                // They ask in the order of their numbers.
                sleep(Duration::from_millis(owner * 50)).await;
                b.locks().set(file, &mine, true).await.unwrap();
                order.lock().push(owner);
                b.locks().set(file, &Lock { mode: UNLOCK, ..mine }, false).await.unwrap();
            }
        };
        let gives_up = async {
            sleep(Duration::from_secs(4)).await;
            a.locks().set(file, &lock(UNLOCK), false).await.unwrap();
        };
        let begun = Instant::now();
        tokio::join!(futures_util::future::join_all((0..50).map(one)), gives_up);
        assert_eq!(order.into_inner(), (0..50).collect::<Vec<_>>());
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        // Beyond the limit a wait is refused at once.
        let many = (0..strake_client::MAX_WAITS as u64 + 1).map(|owner| {
            let (b, mine) = (&b, Lock { owner: 1000 + owner, ..lock(WRITE) });
            async move { b.locks().set(file, &mine, true).await }
        });
        a.locks().set(file, &lock(WRITE), false).await.unwrap();
        let mut many: Vec<_> = many.map(Box::pin).collect();
        let last = many.pop().unwrap();
        let mut rest = Box::pin(futures_util::future::join_all(many));
        assert!(timeout(Duration::from_secs(2), &mut rest).await.is_err());
        assert_eq!(last.await.unwrap_err().code, Code::NoLock);
        drop(rest);
        a.locks().set(file, &lock(UNLOCK), false).await.unwrap();
        assert!(can(&a, file, WRITE).await, "they left nothing");
    });
}
