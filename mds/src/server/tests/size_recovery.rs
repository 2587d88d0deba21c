//! Files that an evicted session wrote beside others: their size is found out before any client is
//! told.

use std::pin::pin;

use tokio::time::timeout;

use super::{
    leases::{Holder, chmod, extend, getattr, list, open, size, with_files},
    world::{Client, FakeOss},
    *,
};

const AWHILE: Duration = Duration::from_millis(1500);

/// A file that two sessions have open for writing. The first has reported 5 bytes.
async fn shared(a: &mut Client<'_>, b: &mut Holder<'_>) -> u64 {
    let f = a.one(create("f", 2)).await.ino;
    a.one(extend(f, 5)).await;
    let n = b.request(open(f, 2));
    b.send(&n).await;
    f
}

async fn evict(w: &World, uuid: u8) {
    w.client_that(9, false, &[uuid]).await;
}

fn stores(oss: &FakeOss, chunks: &[(u64, u32)]) {
    *oss.stored.lock() = chunks.iter().copied().collect();
}

#[tokio::test(start_paused = true)]
async fn what_was_not_reported_is_there_for_all_from_the_same_moment_on() {
    let (w, oss) = with_files().await;
    let (mut a, mut b) = (w.client(1).await, Holder::new(&w, 2).await);
    let f = shared(&mut a, &mut b).await;
    stores(&oss, &[(0, 9000), (2, 7)]);
    oss.refuse.store(true, Ordering::Relaxed);
    evict(&w, 1).await;
    let (look, again) = (b.request(getattr(f)), b.request(open(f, 2)));
    let set =
        b.request(Op::Setattr(pb::SetAttr { ino: f, mtime_ns: Some(7), ..Default::default() }));
    {
        let mut all = pin!(async { tokio::join!(b.send(&look), b.send(&again), b.send(&set)) });
        for _ in 0..6 {
            assert!(
                timeout(AWHILE, &mut all).await.is_err(),
                "answered before it is known how far the file goes"
            );
            b.renew().await;
        }
        oss.looks.lock().clear();
        oss.refuse.store(false, Ordering::Relaxed);
        let began = tokio::time::Instant::now();
        let (look, _, set) = all.await;
        assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
        let end = (8 << 20) + 7;
        assert_eq!((size(&look), size(&set)), (end, end));
        assert_eq!(set.results[0].attr.unwrap().mtime_ns, 7, "what is set later stays");
    }
    let looks = std::mem::take(&mut *oss.looks.lock());
    let asked: Vec<_> =
        looks.iter().map(|r| (r.chunk.ino, r.chunk.index, r.offset, r.epoch)).collect();
    assert_eq!(asked, [(f, 0, 0, 1), (f, 2, 0, 1), (f, 2, 0, 1)], "two pages, and the last block");
    assert!(oss.evicted.lock().contains(&a.session) && oss.trims.lock().is_empty());
    // Once.
    sleep(Duration::from_secs(2)).await;
    assert!(oss.looks.lock().is_empty());
}

/// A list that names a file through the operation before does not wait before it goes to the log;
/// as when the eviction comes just then.
#[tokio::test(start_paused = true)]
async fn a_time_that_is_set_meanwhile_stays() {
    let (w, oss) = with_files().await;
    let (mut a, mut b) = (w.client(1).await, Holder::new(&w, 2).await);
    let f = shared(&mut a, &mut b).await;
    stores(&oss, &[(0, 9000)]);
    oss.refuse.store(true, Ordering::Relaxed);
    evict(&w, 1).await;
    let set = Op::Setattr(pb::SetAttr { ino: 0, mtime_ns: Some(7), ..Default::default() });
    let ops = [lookup("f"), set.clone()].map(|op| pb::Op { op: Some(op) }).into();
    let set = pb::MetaRequest { ops, ..b.request(set) };
    {
        let mut set = pin!(b.send(&set));
        assert!(
            timeout(AWHILE, &mut set).await.is_err(),
            "answered before it is known how far the file goes"
        );
        oss.refuse.store(false, Ordering::Relaxed);
        let is = set.await.results[1].attr.unwrap();
        assert_eq!((is.mtime_ns, is.size), (7, 9000));
    }
    let is = b.one(getattr(f)).await.results[0].attr.unwrap();
    assert_eq!((is.mtime_ns, is.size), (7, 9000));
}

/// Its chains may not answer for long.
#[tokio::test(start_paused = true)]
async fn names_go_and_move_while_the_end_is_not_known() {
    let (w, oss) = with_files().await;
    let (mut a, mut b) = (w.client(1).await, Holder::new(&w, 2).await);
    let f = shared(&mut a, &mut b).await;
    b.one(Op::Link(pb::Link { ino: f, parent: ROOT_INO, name: b"g".to_vec().into() })).await;
    stores(&oss, &[(0, 9000)]);
    oss.refuse.store(true, Ordering::Relaxed);
    evict(&w, 1).await;
    for change in [rename("f", "h"), unlink("g")] {
        let change = b.request(change);
        let reply = timeout(AWHILE, b.send(&change)).await.expect("it waits for the file");
        assert_eq!((reply.results[0].ino, reply.results[0].attr), (f, None));
        // Once more, as after a lost answer.
        assert_eq!(b.send(&change).await.results[0].attr, None);
    }
    oss.refuse.store(false, Ordering::Relaxed);
    assert_eq!(size(&b.one(getattr(f)).await), 9000);
    let moved = b.one(rename("h", "f")).await.results[0].attr.unwrap();
    assert_eq!((moved.size, moved.nlink), (9000, 1));
}

/// Not before they know of the eviction, nor of what is to be trimmed.
#[tokio::test(start_paused = true)]
async fn storage_servers_are_asked_when_it_is_time() {
    let (w, oss) = with_files().await;
    let (mut a, mut b) = (w.client(1).await, Holder::new(&w, 2).await);
    let f = b.one(create("f", 2)).await.results[0].ino;
    b.one(extend(f, 5000)).await;
    stores(&oss, &[(0, 4096)]);
    oss.refuse.store(true, Ordering::Relaxed);
    let (cut, late) = (b.request(set_size(f, 3)), a.request(vec![open(f, 2)]));
    {
        let mut both = pin!(async { tokio::join!(b.send(&cut), a.send(&late)) });
        assert!(timeout(AWHILE, &mut both).await.is_err(), "the cut is refused");
        evict(&w, 1).await;
    }
    oss.busy.store(true, Ordering::Relaxed);
    sleep(AWHILE).await;
    b.renew().await;
    assert!(oss.looks.lock().is_empty() && oss.trims.lock().is_empty());
    oss.refuse.store(false, Ordering::Relaxed);
    sleep(AWHILE).await;
    b.renew().await;
    assert_eq!(oss.looks.lock().len(), 0, "it has not done with what the session sent");
    oss.busy.store(false, Ordering::Relaxed);
    stores(&oss, &[(0, 3)]);
    assert_eq!(size(&b.one(getattr(f)).await), 3);
    assert_eq!((oss.trims.lock().len(), oss.looks.lock().len()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_finds_out_too() {
    let (mut w, oss) = with_files().await;
    let f = {
        let (mut a, mut b) = (w.client(1).await, Holder::new(&w, 2).await);
        shared(&mut a, &mut b).await
    };
    stores(&oss, &[(0, 70)]);
    oss.refuse.store(true, Ordering::Relaxed);
    evict(&w, 1).await;
    w.kill(0);
    w.start(0).await;
    w.leader().await;
    let mut c = Holder::new(&w, 3).await;
    let look = c.request(getattr(f));
    assert!(timeout(AWHILE * 2, c.send(&look)).await.is_err());
    oss.refuse.store(false, Ordering::Relaxed);
    assert_eq!(size(&c.one(getattr(f)).await), 70);
}

/// Its report waits for that, and it is not evicted for being late with it.
#[tokio::test(start_paused = true)]
async fn the_other_writer_is_not_evicted_meanwhile() {
    let (w, oss) = with_files().await;
    let (mut a, mut b, mut c) =
        (w.client(1).await, Holder::new(&w, 2).await, Holder::new(&w, 3).await);
    let f = shared(&mut a, &mut b).await;
    oss.refuse.store(true, Ordering::Relaxed);
    evict(&w, 1).await;
    let stat = c.request(getattr(f));
    let mut stat = pin!(c.send(&stat));
    for _ in 0..10 {
        assert!(timeout(AWHILE, &mut stat).await.is_err());
        b.renew().await;
    }
    oss.refuse.store(false, Ordering::Relaxed);
    // It has its time, though it was asked long ago.
    assert!(timeout(AWHILE, &mut stat).await.is_err());
    let number = b.poll(vec![]).await.reports[0].number;
    b.one(extend(f, 40)).await;
    let (r, _) = tokio::join!(stat, timeout(AWHILE, b.poll(vec![number])));
    assert_eq!(size(&r), 40);
}

/// A request that does not need the file's size does not wait; one that does waits less long than
/// would make the client give this server up.
#[tokio::test(start_paused = true)]
async fn all_else_goes_on_while_no_storage_server_answers() {
    let (w, oss) = with_files().await;
    let (mut a, mut b, mut c) =
        (w.client(1).await, Holder::new(&w, 2).await, Holder::new(&w, 3).await);
    let f = shared(&mut a, &mut b).await;
    oss.refuse.store(true, Ordering::Relaxed);
    evict(&w, 1).await;
    // The storage server refuses the session from its next heartbeats on.
    sleep(Duration::from_secs(2)).await;
    b.renew().await;
    c.renew().await;
    let at_once = async {
        let r = c.one(list()).await;
        let e = &r.results[0].entries[0];
        assert_eq!((e.ino, e.attr), (f, None), "listed, without what is not known");
        let again = c.request(mkdir("d"));
        c.send(&again).await;
        c.send(&again).await;
    };
    timeout(AWHILE, at_once).await.expect("waits for the file's end");
    let more = b.request(extend(f, 40));
    let leader = w.leader().await;
    let asked = w.ask_at(leader, Role::Client, opcode::META, more.encode_to_vec().into());
    let alive = async {
        for _ in 0..4 {
            sleep(Duration::from_millis(900)).await;
            b.renew().await;
            c.renew().await;
        }
    };
    let (told, ()) = tokio::join!(asked, alive);
    assert_eq!(told.unwrap_err().code, Code::Overloaded);
    stores(&oss, &[(0, 70)]);
    oss.refuse.store(false, Ordering::Relaxed);
    assert_eq!(size(&b.send(&more).await), 40);
    assert!(!oss.looks.lock().is_empty());
}

/// If no other session writes the file, it is trimmed as usual; and a file that is gone keeps
/// nothing waiting.
#[tokio::test(start_paused = true)]
async fn alone_nothing_is_looked_for() {
    let (w, oss) = with_files().await;
    let (mut a, mut b) = (w.client(1).await, Holder::new(&w, 2).await);
    let f = a.one(create("f", 2)).await.ino;
    stores(&oss, &[(0, 70)]);
    evict(&w, 1).await;
    assert_eq!(size(&b.one(getattr(f)).await), 0);
    b.one(chmod(f, 0o600)).await;
    assert!(oss.looks.lock().is_empty());
    let g = {
        let mut d = w.client(4).await;
        let g = d.one(create("g", 2)).await.ino;
        b.one(open(g, 2)).await;
        g
    };
    oss.refuse.store(true, Ordering::Relaxed);
    evict(&w, 4).await;
    let gone = b.request(unlink("g"));
    let look = b.request(getattr(g));
    let mut both = pin!(async { tokio::join!(b.send(&gone), b.send(&look)) });
    assert!(timeout(AWHILE, &mut both).await.is_err(), "somebody has it open");
    oss.refuse.store(false, Ordering::Relaxed);
    both.await;
}
