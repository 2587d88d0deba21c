//! Sessions with dirty data: which requests wait for them, and what is left of evicted ones.

use std::{future::Future, pin::pin};

use tokio::time::{Instant, timeout};

use super::{
    leases::{Holder, extend, getattr, open, size, with_files},
    *,
};

const AWHILE: Duration = Duration::from_millis(700);

/// Whether it still waits after a while.
async fn waits<T>(f: &mut (impl Future<Output = T> + Unpin)) -> bool {
    timeout(AWHILE, f).await.is_err()
}

async fn dies(w: &World, by: u8, uuid: u8) -> u64 {
    w.client_that(by, false, &[uuid]).await.session
}

/// Writes of an evicted session may still be on their way: requests that read the file, open it or
/// become its writer wait until no storage server accepts them any more. No other request waits.
#[tokio::test(start_paused = true)]
async fn nobody_is_told_of_what_an_evicted_session_may_yet_write() {
    let (w, oss) = with_files().await;
    let mut a = w.client(1).await;
    let (f, other) = (a.one(create("f", 2)).await.ino, a.one(create("g", 0)).await.ino);
    let mut b = Holder::new(&w, 2).await;
    let mut c = Holder::new(&w, 3).await;
    oss.busy.store(true, Ordering::Relaxed);
    dies(&w, 9, 1).await;
    let (look, read, write) = (b.request(getattr(f)), c.request(open(f, 0)), c.request(open(f, 2)));
    {
        let (b, c) = (&b, &c);
        let mut all = pin!(async { tokio::join!(b.send(&look), c.send(&read), c.send(&write)) });
        let each = [b.send(&look), c.send(&read), c.send(&write)];
        for one in each {
            assert!(waits(&mut pin!(one)).await);
        }
        // Its heartbeats continue: its lease is not over.
        for _ in 0..10 {
            assert!(waits(&mut all).await);
            b.renew().await;
            c.renew().await;
        }
        let unrelated = Holder::new(&w, 4).await.one(getattr(other)).await;
        assert_eq!(unrelated.granted, [other]);
        oss.busy.store(false, Ordering::Relaxed);
        let began = Instant::now();
        let (look, ..) = all.await;
        // The writer waits for the trim, too, which was tried in vain meanwhile, and then has time
        // for its report, which it does not make.
        assert!(
            began.elapsed() < Duration::from_secs(11) && size(&look) == 0,
            "{:?}",
            began.elapsed()
        );
    }
}

/// A new leader knows of it from the state, also while others write the file, so that it is not
/// trimmed.
#[tokio::test(start_paused = true)]
async fn a_new_leader_waits_for_storage_servers_too() {
    for others in [false, true] {
        let (mut w, oss) = with_files().await;
        let f = {
            let (mut a, mut d) = (w.client(1).await, w.client(4).await);
            let f = a.one(create("f", 2)).await.ino;
            if others {
                d.one(open(f, 2)).await;
            }
            f
        };
        oss.busy.store(true, Ordering::Relaxed);
        dies(&w, 9, 1).await;
        w.kill(0);
        w.start(0).await;
        w.leader().await;
        let mut b = Holder::new(&w, 2).await;
        let look = b.request(getattr(f));
        let mut answer = pin!(b.send(&look));
        for _ in 0..5 {
            assert!(waits(&mut answer).await, "others write: {others}");
            b.renew().await;
        }
        oss.busy.store(false, Ordering::Relaxed);
        assert_eq!(answer.await.granted.is_empty(), others);
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_writer_waits_for_what_the_first_holds_back() {
    let (w, _oss) = with_files().await;
    let held_back = w.client_that(1, true, &[]).await;
    assert!(held_back.open.write_back);
    let mut a = Holder::of(&w, held_back).await;
    let mut b = Holder::new(&w, 2).await;
    let f = a.one(create("f", 2)).await.results[0].ino;
    let request = b.request(open(f, 2));
    let mut opened = pin!(b.send(&request));
    assert!(waits(&mut opened).await);
    // First it must forget, then it is asked.
    let first = a.poll(vec![]).await;
    assert_eq!((first.recalls.len(), first.reports.len()), (1, 0));
    let (report, _) = tokio::join!(a.poll(vec![]), waits(&mut opened));
    assert_eq!((report.reports[0].ino, report.recalls.len()), (f, 0));
    // A session that is working on it is not evicted, however long that takes.
    for _ in 0..10 {
        let (_, alive) = tokio::join!(waits(&mut opened), a.renew());
        assert_eq!(alive, 1500);
        let work =
            pb::RecallRequest { working: vec![report.reports[0].number], ..a.recall(vec![]) };
        let _: pb::RecallReply = w.ask(Role::Client, opcode::RECALL, &work).await.unwrap();
        a.renew().await;
    }
    assert!(waits(&mut opened).await);
    a.one(extend(f, 77)).await;
    a.poll(vec![report.reports[0].number]).await;
    opened.await;
    // Opening it once more asks again: whether it has dirty data since then is not known.
    let again = a.one(open(f, 2)).await;
    assert!(again.granted.is_empty());
}

/// A session that reported after it was no longer alone has no dirty data: a later writer waits for
/// nothing, an earlier one waits, too. It is asked again if it was alone since.
#[tokio::test(start_paused = true)]
async fn the_third_writer_waits_for_nobody_unless_one_was_alone_again() {
    let (w, _oss) = with_files().await;
    let mut a = Holder::of(&w, w.client_that(1, true, &[]).await).await;
    let mut b = Holder::of(&w, w.client_that(2, true, &[]).await).await;
    let mut c = Holder::of(&w, w.client_that(3, true, &[]).await).await;
    let f = a.one(create("f", 2)).await.results[0].ino;
    let (second, third) = (b.request(open(f, 2)), c.request(open(f, 2)));
    let mut writers = Vec::new();
    {
        let (mut second, mut third) = (pin!(b.send(&second)), pin!(c.send(&third)));
        let (recall, ..) = tokio::join!(a.poll(vec![]), waits(&mut second));
        assert_eq!(recall.recalls.len(), 1);
        let (report, ..) = tokio::join!(a.poll(vec![]), waits(&mut second));
        let first = report.reports[0].number;
        assert!(waits(&mut third).await, "the report is on its way, and may tell of too little");
        let (report, ..) = tokio::join!(a.poll(vec![first]), waits(&mut third));
        let next = report.reports[0].number;
        let (opened, ..) = tokio::join!(&mut second, waits(&mut third));
        writers.push(opened.results[0].writer);
        let (_, opened) = tokio::join!(a.poll(vec![next]), third);
        writers.push(opened.results[0].writer);
    }
    // From now on no session is asked, neither a nor those that were never alone.
    for by in 4..8 {
        let mut d = Holder::new(&w, by).await;
        let request = d.request(open(f, 2));
        let opened = timeout(AWHILE, d.send(&request)).await.expect("nobody is asked");
        let writer = opened.results[0].writer;
        d.one(Op::Release(pb::Release { ino: f, writer, surplus: false })).await;
        tokio::join!(a.renew(), b.renew(), c.renew());
    }
    for (by, writer) in [&mut b, &mut c].into_iter().zip(writers) {
        by.one(Op::Release(pb::Release { ino: f, writer, surplus: false })).await;
    }
    a.renew().await;
    let request = b.request(open(f, 2));
    let mut opened = pin!(b.send(&request));
    assert!(waits(&mut opened).await);
    let report = a.poll(vec![]).await;
    assert_eq!(report.reports[0].ino, f);
    tokio::join!(a.poll(vec![report.reports[0].number]), opened);
}

/// The log does not say which session was alone and when: a new leader asks all recorded sessions
/// that keep dirty data, once.
#[tokio::test(start_paused = true)]
async fn a_new_leader_asks_all_who_may_hold_something_back() {
    let (mut w, _oss) = with_files().await;
    let (sessions, f) = {
        let mut a = Holder::of(&w, w.client_that(1, true, &[]).await).await;
        let mut b = Holder::of(&w, w.client_that(2, true, &[]).await).await;
        let f = a.one(create("f", 2)).await.results[0].ino;
        let second = b.request(open(f, 2));
        let mut second = pin!(b.send(&second));
        a.poll(vec![]).await;
        let (report, _) = tokio::join!(a.poll(vec![]), waits(&mut second));
        tokio::join!(a.poll(vec![report.reports[0].number]), second);
        ([a.c.session, b.c.session], f)
    };
    w.kill(0);
    w.start(0).await;
    w.leader().await;
    let mut a = Holder::of(&w, w.client_that(1, true, &[]).await).await;
    let mut b = Holder::of(&w, w.client_that(2, true, &[]).await).await;
    assert_eq!([a.c.session, b.c.session], sessions);
    let (mut c, mut d) = (Holder::new(&w, 3).await, Holder::new(&w, 4).await);
    let third = c.request(open(f, 2));
    {
        let mut third = pin!(c.send(&third));
        for holder in [&mut a, &mut b] {
            let (report, waits) = tokio::join!(holder.poll(vec![]), waits(&mut third));
            assert!(waits && report.reports[0].ino == f);
            holder.poll(vec![report.reports[0].number]).await;
            holder.renew().await;
        }
        third.await;
    }
    let fourth = d.request(open(f, 2));
    timeout(AWHILE, d.send(&fourth)).await.expect("nobody is asked any more");
}

/// A session that only writes through is not asked when others become writers: all its data is
/// there.
#[tokio::test(start_paused = true)]
async fn writers_who_hold_nothing_back_are_not_waited_for() {
    let (w, _oss) = with_files().await;
    let mut a = Holder::new(&w, 1).await;
    assert!(!a.c.open.write_back);
    let f = a.one(create("f", 2)).await.results[0].ino;
    let mut b = Holder::new(&w, 2).await;
    let request = b.request(open(f, 2));
    let (_, forgotten) = tokio::join!(b.send(&request), a.poll(vec![]));
    assert_eq!(forgotten.recalls.len(), 1);
    a.one(getattr(f)).await;
}

/// While cut off, it may have dirty data: it is waited for, and evicted if it does not return.
#[tokio::test(start_paused = true)]
async fn one_that_is_cut_off_is_waited_for_and_then_evicted() {
    let (w, oss) = with_files().await;
    let held_back = w.client_that(1, true, &[]).await;
    let session = held_back.session;
    let mut a = Holder::of(&w, held_back).await;
    let f = a.one(create("f", 2)).await.results[0].ino;
    let mut b = Holder::new(&w, 2).await;
    // Its leases are over.
    sleep(Duration::from_secs(3)).await;
    b.hello_again().await;
    oss.busy.store(true, Ordering::Relaxed);
    let look = b.request(getattr(f));
    let mut answer = pin!(b.send(&look));
    let began = Instant::now();
    while !oss.evicted.lock().contains(&session) {
        assert!(waits(&mut answer).await);
        assert!(began.elapsed() < Duration::from_secs(4));
    }
    assert!(began.elapsed() > Duration::from_millis(900), "asked first");
    assert!(waits(&mut answer).await, "what it sent may be on its way");
    oss.busy.store(false, Ordering::Relaxed);
    answer.await;
}
