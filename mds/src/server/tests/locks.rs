//! Locks through whole servers: waiting, turns, and what a failover and an eviction leave.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{leases::Holder, world::Client, *};
use pb::{LockKind, LockType};
use tokio::time::{Instant, timeout};

fn span(r#type: LockType) -> Option<pb::LockSpan> {
    Some(pb::LockSpan { start: 0, end: u64::MAX, r#type: r#type as i32, pid: 1 })
}
fn set(ino: u64, owner: u64, r#type: LockType) -> Op {
    Op::SetLock(pb::SetLock {
        ino,
        owner,
        kind: LockKind::LockPosix as i32,
        span: span(r#type),
        undo: false,
        ..Default::default()
    })
}
fn write(ino: u64, owner: u64) -> Op {
    set(ino, owner, LockType::LockWrite)
}
/// By an owner that has waited for it.
fn waited(ino: u64, owner: u64, wait: u64) -> Op {
    let Op::SetLock(l) = write(ino, owner) else { unreachable!() };
    Op::SetLock(pb::SetLock { patient: true, wait, ..l })
}
fn unlock(ino: u64, owner: u64) -> Op {
    set(ino, owner, LockType::LockUnlock)
}
fn wait(id: u64, ino: u64, owner: u64) -> pb::LockWait {
    pb::LockWait { id, ino, owner, kind: 0, span: span(LockType::LockWrite), trying: false }
}

/// The error of a lock that is refused, from the log or without an entry.
async fn code(c: &mut Client<'_>, op: Op) -> Option<Code> {
    match c.run(vec![op]).await {
        Ok(r) => r[0].status.as_ref().filter(|s| s.code != 0).map(|s| Code::from_wire(s.code)),
        Err(e) => Some(e.code),
    }
}

async fn list(
    w: &World,
    session: u64,
    waits: Vec<pb::LockWait>,
) -> Result<pb::LockWaitReply, Code> {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let r = pb::LockWaitRequest { session, waits, number: NUMBER.fetch_add(1, Ordering::Relaxed) };
    w.ask(Role::Client, opcode::LOCK_WAIT, &r).await.map_err(|e| e.code)
}

async fn file(c: &mut Client<'_>, name: &str) -> u64 {
    let o = pb::Mknod {
        parent: ROOT_INO,
        name: name.as_bytes().to_vec().into(),
        mode: 0o100_644,
        ..Default::default()
    };
    c.one(Op::Mknod(o)).await.ino
}

async fn world(members: usize) -> (World, std::sync::Arc<world::FakeOss>) {
    let w = World::new(members, |_| ()).await;
    let oss = w.oss(1).await;
    until("chains", || {
        w.mds.iter().flatten().any(|(_, s)| s.status().map.unwrap().sets.len() == 1)
    })
    .await;
    (w, oss)
}

#[tokio::test(start_paused = true)]
async fn what_was_refused_without_an_entry_does_not_run_when_it_arrives_again() {
    let (w, _oss) = world(1).await;
    let (mut a, mut b) = (w.client(1).await, w.client(2).await);
    let f = file(&mut a, "f").await;
    a.one(write(f, 1)).await;
    let request = b.request(vec![write(f, 1)]);
    let answer = async || match b.send(&request).await {
        Ok(r) => Code::from_wire(r[0].status.as_ref().map_or(0, |s| s.code)),
        Err(e) => e.code,
    };
    assert_eq!(answer().await, Code::LockConflict);
    a.one(unlock(f, 1)).await;
    assert_eq!((answer().await, w.server().await.status().locks), (Code::LockConflict, 0));
    // Its sender has the answer, and confirms that with its next request.
    let next = b.request(vec![write(f, 2)]);
    assert!(b.send(&next).await.is_ok());
    assert_eq!(
        (b.send(&request).await.unwrap_err().code, w.server().await.status().locks),
        (Code::ReplyGone, 1)
    );
}

#[tokio::test(start_paused = true)]
async fn a_conflict_costs_no_entry_and_a_waiter_is_told_in_its_turn() {
    let (w, _oss) = world(1).await;
    let (mut a, mut b, mut c) = (w.client(1).await, w.client(2).await, w.client(3).await);
    let f = file(&mut a, "f").await;
    a.one(write(f, 1)).await;
    let applied = || w.mds[0].as_ref().unwrap().1.status().raft.unwrap().applied;
    let before = applied();
    for _ in 0..50 {
        assert_eq!(code(&mut b, write(f, 1)).await, Some(Code::LockConflict));
    }
    assert!(applied() < before + 40, "refused from the state");
    // A list without news is answered all the same.
    let began = Instant::now();
    assert_eq!(
        list(&w, b.session, vec![wait(7, f, 1)]).await.unwrap(),
        pb::LockWaitReply::default()
    );
    assert!(began.elapsed() >= Duration::from_secs(3));
    let first = list(&w, b.session, vec![wait(7, f, 1)]);
    let second = list(&w, c.session, vec![wait(9, f, 1)]);
    let rest = async {
        sleep(Duration::from_millis(100)).await;
        a.one(unlock(f, 1)).await;
        // It is not a's again, although it is free: the first waiter has its turn. A request that
        // would wait is refused at once, one that would not gets the final answer.
        let again = code(&mut a, waited(f, 1, 0)).await;
        let began = Instant::now();
        let (tried, ()) = tokio::join!(code(&mut a, write(f, 2)), async {
            sleep(Duration::from_millis(300)).await;
            b.one(waited(f, 1, 7)).await;
        });
        assert!(began.elapsed() >= Duration::from_millis(300));
        (again, tried)
    };
    let (first, again) = tokio::join!(first, rest);
    assert_eq!(first.unwrap().ready, [7]);
    assert_eq!(again, (Some(Code::LockConflict), Some(Code::LockConflict)));
    assert_eq!(w.server().await.status().lock_waits, 0, "it has what it waited for");
    let (second, ()) = tokio::join!(second, async {
        sleep(Duration::from_millis(100)).await;
        b.one(unlock(f, 1)).await;
    });
    assert_eq!(second.unwrap().ready, [9]);
    c.one(waited(f, 1, 9)).await;
    let status = w.server().await.status();
    assert_eq!((status.locks, status.lock_waits), (1, 0));
    assert_eq!(status.sessions.iter().map(|s| s.locks).collect::<Vec<_>>(), [0, 0, 1]);
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_nobody_takes_goes_to_the_next_one() {
    let (w, _oss) = world(1).await;
    let (mut a, b, c) = (w.client(1).await, w.client(2).await, w.client(3).await);
    let f = file(&mut a, "f").await;
    a.one(write(f, 1)).await;
    let mut waits = Box::pin(async {
        tokio::join!(list(&w, b.session, vec![wait(1, f, 1)]), async {
            sleep(Duration::from_millis(10)).await;
            list(&w, c.session, vec![wait(1, f, 1)]).await
        })
    });
    assert!(timeout(Duration::from_millis(100), &mut waits).await.is_err());
    a.one(unlock(f, 1)).await;
    let began = Instant::now();
    // The first never returns; the second learns of its turn in its next list at the latest.
    let (first, second) = waits.await;
    assert_eq!(first.unwrap().ready, [1]);
    let second = match second.unwrap() {
        r if r.ready.is_empty() => list(&w, c.session, vec![wait(1, f, 1)]).await.unwrap(),
        r => r,
    };
    assert_eq!(second.ready, [1]);
    assert!(began.elapsed() >= Duration::from_secs(2) && began.elapsed() < Duration::from_secs(6));
}

#[tokio::test(start_paused = true)]
async fn who_gives_up_waiting_is_in_nobodys_way() {
    let (w, _oss) = world(1).await;
    let (mut a, b, mut c) = (w.client(1).await, w.client(2).await, w.client(3).await);
    let f = file(&mut a, "f").await;
    a.one(write(f, 1)).await;
    let old = list(&w, b.session, vec![wait(1, f, 1)]);
    let (old, none) = tokio::join!(old, async {
        sleep(Duration::from_millis(50)).await;
        list(&w, b.session, vec![]).await
    });
    assert_eq!((old.unwrap(), none.unwrap()), Default::default());
    a.one(unlock(f, 1)).await;
    c.one(write(f, 1)).await;
    // Nor is one whose session has ended.
    let waits = list(&w, b.session, vec![wait(2, f, 2)]);
    let (r, ()) = tokio::join!(waits, async {
        sleep(Duration::from_millis(50)).await;
        let close = pb::SessionCloseRequest { session: b.session };
        let _: pb::SessionCloseReply =
            w.ask(Role::Client, opcode::SESSION_CLOSE, &close).await.unwrap();
    });
    assert!(r.is_ok_and(|r| r == Default::default()));
    c.one(unlock(f, 1)).await;
    a.one(write(f, 1)).await;
    assert_eq!(list(&w, b.session, vec![wait(2, f, 2)]).await, Err(Code::NoSession));
    let invalid = pb::LockWait { span: None, ..wait(1, f, 1) };
    assert_eq!(list(&w, a.session, vec![invalid]).await, Err(Code::Inval));
    let many = (0..2_000).map(|i| wait(i, f, i)).collect();
    assert_eq!(list(&w, a.session, many).await, Err(Code::TooBig));
}

#[tokio::test(start_paused = true)]
async fn a_circle_across_clients_is_refused_to_the_one_who_closes_it() {
    let (w, _oss) = world(1).await;
    let (mut a, mut b) = (w.client(1).await, w.client(2).await);
    let (f, g) = (file(&mut a, "f").await, file(&mut a, "g").await);
    a.one(write(f, 1)).await;
    b.one(write(g, 5)).await;
    let first = list(&w, a.session, vec![wait(1, g, 1)]);
    let (first, ()) = tokio::join!(first, async {
        sleep(Duration::from_millis(50)).await;
        let r = list(&w, b.session, vec![wait(3, f, 6), wait(4, f, 5)]).await.unwrap();
        assert_eq!(
            (r.deadlock, r.ready),
            (vec![4], vec![]),
            "another owner of that client may wait"
        );
        b.one(unlock(g, 5)).await;
    });
    assert_eq!(first.unwrap().ready, [1]);
}

#[tokio::test(start_paused = true)]
async fn locks_and_their_waiters_outlive_the_leader() {
    let (mut w, _oss) = world(3).await;
    let leader = w.leader().await;
    let (f, holder, seq, waiting) = {
        let (mut a, b) = (w.client(1).await, w.client(2).await);
        let f = file(&mut a, "f").await;
        a.one(write(f, 1)).await;
        let poll = timeout(Duration::from_secs(1), list(&w, b.session, vec![wait(1, f, 1)])).await;
        assert!(poll.is_err(), "it waits");
        (f, a.session, a.seq, b.session)
    };
    w.kill(leader);
    w.leader().await;
    let mut c = w.client(3).await;
    // The new leader lets leases of the old one run out before it answers about the state.
    c.one(Op::Getattr(pb::GetAttr { ino: f })).await;
    assert_eq!(
        code(&mut c, write(f, 1)).await,
        Some(Code::LockConflict),
        "nobody had to claim it again"
    );
    let (told, ()) = tokio::join!(list(&w, waiting, vec![wait(1, f, 1)]), async {
        sleep(Duration::from_millis(100)).await;
        let ops = vec![pb::Op { op: Some(unlock(f, 1)) }];
        let seq = seq + 1;
        let creds = Some(pb::Creds::default());
        let r = pb::MetaRequest {
            session: holder,
            seq,
            lowest_unanswered: seq,
            creds,
            ops,
            ..Default::default()
        };
        let r: pb::MetaReply = w.ask(Role::Client, opcode::META, &r).await.unwrap();
        assert!(r.results[0].status.is_none());
    });
    assert_eq!(told.unwrap().ready, [1]);
    assert_eq!(code(&mut c, waited(f, 1, 0)).await, Some(Code::LockConflict), "the waiter's turn");
    let began = Instant::now();
    c.one(write(f, 1)).await;
    assert!(
        began.elapsed() > Duration::from_secs(1),
        "it was kept for the waiter, who did not come"
    );
}

#[tokio::test(start_paused = true)]
async fn the_lock_of_an_evicted_client_is_given_when_nothing_of_it_can_arrive_any_more() {
    let (w, oss) = world(1).await;
    let (mut a, mut b) = (w.client(1).await, w.client(2).await);
    let f = file(&mut a, "f").await;
    a.one(write(f, 1)).await;
    let evicted = a.session;
    let waiting = async {
        loop {
            b.renew(false, &[]).await.unwrap();
            let r = list(&w, b.session, vec![wait(1, f, 1)]).await.unwrap();
            if r.ready == [1] {
                return;
            }
        }
    };
    timeout(Duration::from_secs(60), waiting)
        .await
        .expect("a silent client's locks go with its session");
    b.one(waited(f, 1, 1)).await;
    assert!(oss.evicted.lock().contains(&evicted), "the storage server knew before");
    // A session that cannot be told delays the lock for as long as its lease may run.
    drop(a);
    let mut c = w.client(3).await;
    oss.up.store(false, Ordering::Relaxed);
    let dead = pb::SessionOpenRequest {
        level: strake_proto::FEATURE_LEVEL,
        client_uuid: vec![4; 16].into(),
        dead: vec![vec![2; 16].into()],
        ..Default::default()
    };
    let _: pb::SessionOpenReply = w.ask(Role::Client, opcode::SESSION_OPEN, &dead).await.unwrap();
    let began = Instant::now();
    // The client retries on its own when the server is overloaded.
    c.one(write(f, 1)).await;
    assert!(began.elapsed() > Duration::from_secs(1), "{:?}", began.elapsed());
}

/// Answers these questions about locks, and asks for new ones.
async fn questions(w: &World, a: &Holder<'_>, locks_checked: Vec<u64>) -> Vec<pb::Recall> {
    let r = pb::RecallRequest { checks_locks: true, locks_checked, ..a.recall(vec![]) };
    let r: pb::RecallReply = w.ask(Role::Client, opcode::RECALL, &r).await.unwrap();
    r.locks
}

/// Returns a conflicting lock, 0: none.
async fn in_the_way(b: &mut Client<'_>, ino: u64) -> u64 {
    let get = pb::GetLock {
        ino,
        owner: 1,
        kind: LockKind::LockPosix as i32,
        span: span(LockType::LockWrite),
    };
    b.one(Op::GetLock(get)).await.lock.map_or(0, |l| l.session)
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_told_once_its_holder_has_given_up_what_was_closed() {
    let (w, _oss) = world(1).await;
    let (mut a, mut b) = (Holder::new(&w, 1).await, w.client(2).await);
    let f = file(&mut b, "f").await;
    for asks in [true, false] {
        a.one(write(f, 1)).await;
        let holder = async {
            let asked = questions(&w, &a, vec![]).await;
            assert_eq!(asked.iter().map(|q| q.ino).collect::<Vec<_>>(), [f]);
            sleep(Duration::from_millis(200)).await;
            // It was closed, and its unlock was on the way.
            a.one(unlock(f, 1)).await;
            questions(&w, &a, vec![asked[0].number]).await;
        };
        if asks {
            let (found, ()) = tokio::join!(in_the_way(&mut b, f), holder);
            assert_eq!(found, 0);
        } else {
            let (tried, ()) = tokio::join!(code(&mut b, write(f, 1)), holder);
            assert_eq!(tried, None);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_holder_that_does_not_answer_is_waited_for_once() {
    let (w, _oss) = world(1).await;
    let (mut a, mut b) = (Holder::new(&w, 1).await, w.client(2).await);
    let f = file(&mut b, "f").await;
    a.one(write(f, 1)).await;
    // A session that has its connection, and does not ask for its recalls.
    let took = async |b: &mut Client<'_>| {
        let began = Instant::now();
        assert_eq!(code(b, write(f, 1)).await, Some(Code::LockConflict));
        began.elapsed()
    };
    assert!(took(&mut b).await >= Duration::from_secs(2));
    assert!(took(&mut b).await < Duration::from_millis(100));
    // It is asked again once it does, and does not answer.
    let (first, asked) = tokio::join!(took(&mut b), async {
        sleep(Duration::from_millis(1)).await;
        questions(&w, &a, vec![]).await
    });
    assert!(first < Duration::from_millis(100) && asked.is_empty());
    let (second, asked) = tokio::join!(took(&mut b), questions(&w, &a, vec![]));
    assert!(second >= Duration::from_secs(2) && asked.len() == 1);
    assert!(took(&mut b).await < Duration::from_millis(100));
    // A late answer counts.
    questions(&w, &a, vec![asked[0].number]).await;
    let (third, _) = tokio::join!(took(&mut b), async {
        let asked = questions(&w, &a, vec![]).await;
        questions(&w, &a, asked.iter().map(|q| q.number).collect()).await
    });
    assert!(third < Duration::from_millis(100), "{third:?}");
    // A program of an older version is not waited for.
    let _: pb::RecallReply =
        timeout(Duration::from_secs(4), w.ask(Role::Client, opcode::RECALL, &a.recall(vec![])))
            .await
            .unwrap()
            .unwrap();
    assert!(took(&mut b).await < Duration::from_millis(100));
}

fn pages(ino: u64, r#type: LockType) -> Op {
    let Op::SetLock(l) = set(ino, 1, r#type) else { unreachable!() };
    Op::SetLock(pb::SetLock { kind: LockKind::LockPages as i32, patient: true, ..l })
}
fn wait_for_pages(id: u64, ino: u64, r#type: LockType) -> pb::LockWait {
    pb::LockWait {
        id,
        ino,
        owner: 1,
        kind: LockKind::LockPages as i32,
        span: span(r#type),
        trying: false,
    }
}

#[tokio::test(start_paused = true)]
async fn who_may_write_a_file_knows_that_others_have_pages_before_they_have() {
    let (w, _oss) = world(1).await;
    let (mut a, mut b) = (Holder::new(&w, 1).await, Holder::new(&w, 2).await);
    let f = file(&mut a.c, "f").await;
    let open = || Op::Open(pb::Open { ino: f, flags: 2 });
    assert!(!b.one(open()).await.results[0].pages, "nobody has any");
    let took = Instant::now();
    let (_, asked) = tokio::join!(a.one(pages(f, LockType::LockRead)), async {
        let asked = b.poll(vec![]).await.reports;
        assert_eq!(asked.iter().map(|r| (r.ino, r.pages)).collect::<Vec<_>>(), [(f, true)]);
        sleep(Duration::from_millis(300)).await;
        b.poll(asked.iter().map(|r| r.number).collect()).await
    });
    assert!(took.elapsed() >= Duration::from_millis(300) && asked.reports.is_empty());
    // It knows now.
    a.one(pages(f, LockType::LockUnlock)).await;
    let took = Instant::now();
    a.one(pages(f, LockType::LockWrite)).await;
    assert!(took.elapsed() < Duration::from_millis(100));
    assert!(b.one(open()).await.results[0].pages, "another process of it would be told so");
    assert!(!a.one(open()).await.results[0].pages, "they are its own");
    let cut = pb::SetAttr { ino: f, size: Some(0), ..Default::default() };
    let (cut, ()) = tokio::join!(b.one(Op::Setattr(cut)), async {
        let asked = a.poll(vec![]).await.reports;
        assert_eq!(asked.iter().map(|r| r.pages).collect::<Vec<_>>(), [false], "how long it is");
        a.poll(asked.iter().map(|r| r.number).collect()).await;
    });
    assert!(cut.results[0].pages);
    // A new connection may be another process.
    b.hello_again().await;
    a.one(pages(f, LockType::LockUnlock)).await;
    let (_, asked) = tokio::join!(a.one(pages(f, LockType::LockWrite)), async {
        let asked = b.poll(vec![]).await.reports;
        b.poll(asked.iter().map(|r| r.number).collect()).await;
        asked.len()
    });
    assert_eq!(asked, 1);
}

#[tokio::test(start_paused = true)]
async fn who_has_pages_is_asked_for_them_as_long_as_somebody_waits() {
    let (w, _oss) = world(1).await;
    let (mut a, mut b, mut c) = (Holder::new(&w, 1).await, w.client(2).await, w.client(3).await);
    let f = file(&mut b, "f").await;
    a.one(pages(f, LockType::LockRead)).await;
    assert_eq!(code(&mut b, pages(f, LockType::LockRead)).await, None, "any number looks");
    assert_eq!(code(&mut b, pages(f, LockType::LockUnlock)).await, None);
    assert_eq!(code(&mut b, pages(f, LockType::LockWrite)).await, Some(Code::LockConflict));
    let mut asked = a.poll(vec![]).await.reports;
    assert_eq!(asked.iter().map(|r| (r.ino, r.pages)).collect::<Vec<_>>(), [(f, true)]);
    let listed = list(&w, b.session, vec![wait_for_pages(1, f, LockType::LockWrite)]);
    let ((), ready) = tokio::join!(
        async {
            sleep(Duration::from_millis(100)).await;
            // One that wants to read, too, comes after it.
            assert_eq!(code(&mut c, pages(f, LockType::LockRead)).await, Some(Code::LockConflict));
            for _ in 0..3 {
                // It answered, and has the lock nevertheless: its own request was on the way.
                a.poll(asked.iter().map(|r| r.number).collect()).await;
                asked = a.poll(vec![]).await.reports;
                assert_eq!(asked.iter().map(|r| (r.ino, r.pages)).collect::<Vec<_>>(), [(f, true)]);
            }
            a.one(pages(f, LockType::LockUnlock)).await;
        },
        listed
    );
    assert_eq!(ready.unwrap().ready, [1]);
    assert_eq!(
        code(&mut c, pages(f, LockType::LockRead)).await,
        Some(Code::LockConflict),
        "another owner is next in turn"
    );
    let Op::SetLock(l) = pages(f, LockType::LockWrite) else { unreachable!() };
    assert_eq!(code(&mut b, Op::SetLock(pb::SetLock { wait: 1, ..l })).await, None);
    // A session that neither answers nor is heard of is evicted.
    let (mut d, began) = (w.client(4).await, Instant::now());
    let waits = async {
        while code(&mut d, pages(f, LockType::LockWrite)).await.is_some() {
            let _ = list(&w, d.session, vec![wait_for_pages(1, f, LockType::LockWrite)]).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waits).await.unwrap();
    assert!(began.elapsed() >= Duration::from_millis(3500), "{:?}", began.elapsed());
}
