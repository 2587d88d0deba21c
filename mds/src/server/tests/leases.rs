//! Leases through whole servers: what waits for what, which sessions are asked, what a failover
//! leaves.

use super::{world::Client, *};
use crate::leases::rows::Reporting;
use std::future::Future;
use tokio::time::{Instant, timeout};

const TERM: Duration = Duration::from_millis(1500);
/// A request that takes this long had to wait.
const AWHILE: Duration = Duration::from_millis(700);

/// A client that caches nothing and says so.
pub(super) struct Holder<'a> {
    pub c: Client<'a>,
    w: &'a World,
    connection: u64,
    acknowledged: u64,
}

impl<'a> Holder<'a> {
    pub(super) async fn new(w: &'a World, uuid: u8) -> Holder<'a> {
        Holder::of(w, w.client(uuid).await).await
    }

    pub(super) async fn of(w: &'a World, c: Client<'a>) -> Holder<'a> {
        let mut h = Holder { c, w, connection: 0, acknowledged: 0 };
        assert_eq!(h.hello(false).await, 1500);
        h
    }

    pub(super) async fn hello(&mut self, lives_on: bool) -> u32 {
        self.connection += 1;
        self.renewal(self.connection, true, lives_on).await.unwrap()
    }

    pub(super) async fn hello_again(&mut self) {
        self.hello(false).await;
    }

    pub(super) async fn renew(&self) -> u32 {
        self.renewal(self.connection, false, false).await.unwrap()
    }

    async fn renewal(&self, connection: u64, hello: bool, lives_on: bool) -> Result<u32, Code> {
        let r = pb::SessionRenewRequest {
            level: strake_proto::FEATURE_LEVEL,
            session: self.c.session,
            connection,
            hello,
            lives_on,
            ..Default::default()
        };
        let r: Result<pb::SessionRenewReply, _> =
            self.w.ask(Role::Client, opcode::SESSION_RENEW, &r).await;
        r.map(|r| r.lease_ms).map_err(|e| e.code)
    }

    pub(super) fn request(&mut self, op: Op) -> pb::MetaRequest {
        pb::MetaRequest { connection: self.connection, ..self.c.request(vec![op]) }
    }

    pub(super) async fn send(&self, r: &pb::MetaRequest) -> pb::MetaReply {
        let r: pb::MetaReply = self.w.ask(Role::Client, opcode::META, r).await.unwrap();
        assert!(r.results.iter().all(|r| r.status.is_none()), "{:?}", r.results);
        r
    }

    pub(super) async fn one(&mut self, op: Op) -> pb::MetaReply {
        let r = self.request(op);
        self.send(&r).await
    }

    pub(super) fn recall(&self, reported: Vec<u64>) -> pb::RecallRequest {
        let (session, connection, acknowledged) =
            (self.c.session, self.connection, self.acknowledged);
        pb::RecallRequest { session, connection, acknowledged, reported, ..Default::default() }
    }

    /// Acknowledges earlier recalls, and waits for more.
    pub(super) async fn poll(&mut self, reported: Vec<u64>) -> pb::RecallReply {
        let r = self.recall(reported);
        let r: pb::RecallReply = self.w.ask(Role::Client, opcode::RECALL, &r).await.unwrap();
        self.acknowledged = r.recalls.iter().map(|r| r.number).fold(self.acknowledged, u64::max);
        r
    }

    /// Forgets what it must forget, and returns that.
    pub(super) async fn forget(&mut self) -> Vec<u64> {
        let r = self.poll(vec![]).await;
        let more = timeout(Duration::from_millis(100), self.poll(vec![])).await;
        assert!(more.is_err(), "nothing else: {more:?}");
        r.recalls.iter().map(|r| r.ino).collect()
    }
}

pub(super) fn getattr(ino: u64) -> Op {
    Op::Getattr(pb::GetAttr { ino })
}
pub(super) fn chmod(ino: u64, mode: u32) -> Op {
    Op::Setattr(pb::SetAttr { ino, mode: Some(mode), ..Default::default() })
}
pub(super) fn open(ino: u64, flags: u32) -> Op {
    Op::Open(pb::Open { ino, flags })
}
pub(super) fn list() -> Op {
    Op::Readdir(pb::Readdir { dir: ROOT_INO, attrs: true, ..Default::default() })
}
pub(super) fn extend(ino: u64, end: u64) -> Op {
    Op::Extend(pb::Extend { ino, end, holes: false })
}
pub(super) fn size(r: &pb::MetaReply) -> u64 {
    r.results[0].attr.unwrap().size
}

pub(super) async fn timed<T>(f: impl Future<Output = T>) -> (T, Duration) {
    let began = Instant::now();
    (f.await, began.elapsed())
}

async fn lone() -> World {
    let w = World::new(1, |_| ()).await;
    w.leader().await;
    w
}

/// With a storage server, so that there can be files.
pub(super) async fn with_files() -> (World, std::sync::Arc<world::FakeOss>) {
    let w = lone().await;
    let oss = w.oss(1).await;
    until("chains", || {
        w.mds.iter().flatten().any(|(_, s)| s.status().map.unwrap().sets.len() == 1)
    })
    .await;
    (w, oss)
}

#[tokio::test(start_paused = true)]
async fn nobody_is_told_what_is_new_before_a_holder_has_forgotten_what_was() {
    let w = lone().await;
    let (mut a, mut b, mut c) =
        (Holder::new(&w, 1).await, Holder::new(&w, 2).await, w.client(3).await);
    let d = a.one(mkdir("d")).await.results[0].ino;
    let r = b.one(lookup("d")).await;
    assert_eq!(r.granted, [ROOT_INO, d]);
    let (change, read) = (a.request(chmod(d, 0o700)), c.request(vec![getattr(d)]));
    let began = Instant::now();
    let answers = async {
        // Sent again by an impatient client, it waits as well, even if it has run by then.
        let again = async {
            sleep(Duration::from_millis(100)).await;
            let r = a.send(&change).await;
            assert!(began.elapsed() >= Duration::from_millis(400), "the answer that is kept waits");
            r
        };
        let (first, at_once, second, _) =
            tokio::join!(a.send(&change), a.send(&change), again, async {
                sleep(Duration::from_millis(50)).await;
                let r = c.send(&read).await.unwrap();
                assert_eq!(r[0].attr.unwrap().mode & 0o7777, 0o700);
                assert!(began.elapsed() >= Duration::from_millis(400), "the reader waited");
            });
        assert!(began.elapsed() >= Duration::from_millis(400), "the writer waited");
        assert_eq!(
            (&first.granted, &second.granted),
            (&vec![d], &vec![d]),
            "its own copy is its own matter"
        );
        assert_eq!(first, at_once);
    };
    let ((), forgot) = tokio::join!(answers, async {
        sleep(Duration::from_millis(400)).await;
        b.forget().await
    });
    assert_eq!(forgot, [d]);
    assert!(began.elapsed() < Duration::from_millis(600));
    // A session that waits for recalls gets it at once.
    assert_eq!(b.one(getattr(d)).await.granted, [d]);
    let change = a.request(chmod(d, 0o755));
    let ((_, took), forgot) = tokio::join!(
        async {
            sleep(Duration::from_millis(100)).await;
            timed(a.send(&change)).await
        },
        b.forget()
    );
    assert!(forgot == [d] && took < Duration::from_millis(50), "{took:?}");
    // The holder is silent: its term ends.
    b.renew().await;
    assert_eq!(b.one(getattr(d)).await.granted, [d]);
    let (_, took) = timed(a.one(chmod(d, 0o711))).await;
    assert!(
        took > Duration::from_millis(1400) && took <= TERM + Duration::from_millis(50),
        "{took:?}"
    );
    assert!(b.one(getattr(d)).await.granted.is_empty(), "it has to renew first");
    // Whenever that is.
    for late in 0..8 {
        b.renew().await;
        assert_eq!(b.one(getattr(d)).await.granted, [d]);
        let wait = Duration::from_millis(1370 + late * 13);
        sleep(wait).await;
        let (_, took) = timed(a.one(chmod(d, 0o711))).await;
        assert!(
            took + wait > Duration::from_millis(1400)
                && took + wait <= TERM + Duration::from_millis(50),
            "{took:?}"
        );
        sleep(Duration::from_millis(1000 + late * 37)).await;
    }
    // Then nothing is left to wait for.
    let (_, took) = timed(a.one(chmod(d, 0o722))).await;
    assert!(took < Duration::from_millis(200), "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn own_changes_are_recalled_from_others_and_what_they_hit_besides_from_oneself() {
    let w = lone().await;
    let mut a = Holder::new(&w, 1).await;
    let (x, y) = (a.one(mkdir("x")).await, a.one(mkdir("y")).await);
    let (x, y) = (x.results[0].ino, y.results[0].ino);
    assert_eq!(a.one(list()).await.granted, [ROOT_INO, x, y]);
    let (made, took) = timed(a.one(mkdir("z"))).await;
    let z = made.results[0].ino;
    assert!(took < Duration::from_millis(200), "{took:?}");
    assert_eq!(
        made.granted,
        [ROOT_INO, z],
        "it goes on knowing the directory, and knows what it made"
    );
    // The replaced and the moved inode are not named.
    let change = a.request(rename("x", "y"));
    let mut polling =
        Holder { c: w.client(1).await, w: &w, connection: a.connection, acknowledged: 0 };
    assert_eq!(polling.c.session, a.c.session);
    let ((r, took), mut forgot) = tokio::join!(timed(a.send(&change)), async {
        sleep(Duration::from_millis(300)).await;
        polling.forget().await
    });
    forgot.sort_unstable();
    assert!(forgot == [x, y] && took >= Duration::from_millis(300));
    assert!(r.granted.contains(&ROOT_INO));
    // Given back with the request, they are not asked for.
    a.renew().await;
    assert!(a.one(list()).await.granted.contains(&z));
    let change = pb::MetaRequest { dropped: vec![x, z], ..a.request(rename("y", "z")) };
    let (_, took) = timed(a.send(&change)).await;
    assert!(took < Duration::from_millis(200), "{took:?}");
    // A refusal changes nothing, but its sender may cache it.
    let r = a.request(mkdir("z"));
    let r: pb::MetaReply = w.ask(Role::Client, opcode::META, &r).await.unwrap();
    assert!(r.results[0].status.is_some() && r.granted == [ROOT_INO]);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_arrives_again_gives_nothing_back() {
    let w = lone().await;
    let (mut a, mut b) = (Holder::new(&w, 1).await, Holder::new(&w, 2).await);
    let x = a.one(mkdir("x")).await.results[0].ino;
    let change = pb::MetaRequest { dropped: vec![x], ..a.request(rename("x", "y")) };
    a.send(&change).await;
    assert_eq!(a.one(getattr(x)).await.granted, [x], "it learns of it anew");
    // The network delivers a copy.
    let _: Result<pb::MetaReply, _> = w.ask(Role::Client, opcode::META, &change).await;
    let set = b.request(chmod(x, 0o700));
    let ((_, took), forgot) = tokio::join!(timed(b.send(&set)), async {
        sleep(Duration::from_millis(300)).await;
        a.forget().await
    });
    assert!(forgot == [x] && took >= Duration::from_millis(300), "{forgot:?}, {took:?}");
}

#[tokio::test(start_paused = true)]
async fn leases_are_for_those_who_said_hello_where_they_ask() {
    let (w, _oss) = with_files().await;
    let mut a = Holder { c: w.client(1).await, w: &w, connection: 1, acknowledged: 0 };
    assert!(a.one(getattr(ROOT_INO)).await.granted.is_empty(), "no hello");
    assert_eq!(a.renew().await, 0);
    assert_eq!(a.renewal(0, true, false).await, Ok(0), "it wants none");
    assert_eq!(a.hello(false).await, 1500);
    assert_eq!(a.one(getattr(ROOT_INO)).await.granted, [ROOT_INO]);
    assert_eq!(a.renewal(1, false, false).await, Ok(0), "a former connection");
    assert_eq!(a.renewal(1, true, false).await, Ok(0), "and a hello that comes late");
    let elsewhere = pb::MetaRequest { connection: 1, ..a.request(getattr(ROOT_INO)) };
    assert!(a.send(&elsewhere).await.granted.is_empty());
    for op in
        [Op::PathOf(pb::PathOf { ino: ROOT_INO }), Op::Getlayout(pb::GetLayout { ino: ROOT_INO })]
    {
        assert!(a.one(op).await.granted.is_empty(), "nobody remembers that");
    }
    // An open for writing makes others forget, and meanwhile only a sole writer gets a lease.
    let f = a.one(create("f", 0)).await.results[0].ino;
    let mut b = Holder::new(&w, 2).await;
    assert!(b.one(getattr(f)).await.granted == [f] && a.one(getattr(f)).await.granted == [f]);
    let write = b.request(open(f, 1));
    let ((r, took), forgot) = tokio::join!(timed(b.send(&write)), async {
        sleep(Duration::from_millis(300)).await;
        a.forget().await
    });
    assert!(took >= Duration::from_millis(300) && forgot == [f] && r.granted == [f]);
    let writer = r.results[0].writer;
    assert!(b.one(extend(f, 10)).await.granted == [f], "alone");
    let stat = a.request(getattr(f));
    let (r, ()) = tokio::join!(a.send(&stat), async {
        let n = b.poll(vec![]).await.reports[0].number;
        let _ = timeout(AWHILE, b.poll(vec![n])).await;
    });
    assert!(r.granted.is_empty() && size(&r) == 10);
    a.renew().await;
    b.one(Op::Release(pb::Release { ino: f, writer, surplus: false })).await;
    assert_eq!(a.one(getattr(f)).await.granted, [f]);
}

#[tokio::test(start_paused = true)]
async fn writers_report_before_others_are_told() {
    let (w, _oss) = with_files().await;
    let (mut a, mut b) = (Holder::new(&w, 1).await, Holder::new(&w, 2).await);
    let f = a.one(create("f", 1)).await.results[0].ino;
    let stat = b.request(getattr(f));
    let ((r, took), number) = tokio::join!(timed(b.send(&stat)), async {
        let asked = a.poll(vec![]).await;
        assert_eq!((asked.reports.len(), asked.reports[0].ino, asked.recalls.len()), (1, f, 0));
        // Without an answer, it is not repeated all the time.
        let (again, took) = timed(timeout(AWHILE, a.poll(vec![]))).await;
        assert!(again.is_err() && took == AWHILE);
        a.one(extend(f, 100)).await;
        let _ = timeout(AWHILE, a.poll(vec![asked.reports[0].number])).await;
        asked.reports[0].number
    });
    assert!(
        size(&r) == 100
            && r.granted.is_empty()
            && took >= AWHILE
            && took < AWHILE * 2
            && number > 0
    );
    // Listings for others leave it out.
    a.renew().await;
    assert_eq!(b.one(list()).await.results[0].entries[0].attr, None);
    assert!(a.one(list()).await.results[0].entries[0].attr.is_some());
    assert_eq!(size(&a.one(getattr(f)).await), 100, "a writer is not asked for its own sake");
    // A silent session may have written what it did not report. It is evicted, though its leases
    // are over.
    sleep(TERM).await;
    b.renew().await;
    let (r, took) = timed(b.one(lookup("f"))).await;
    let silent = TERM + took;
    assert!(silent > Duration::from_millis(3500) && silent < Duration::from_secs(5), "{silent:?}");
    assert_eq!(size(&r), 100);
    let (r, took) = timed(b.one(open(f, 0))).await;
    assert!(took < Duration::from_millis(200) && r.results[0].attr.is_some(), "{took:?}");
    assert!(b.one(list()).await.results[0].entries[0].attr.is_some());
}

/// An `Extend` waits for the trim of its file, and so does the report made with it: the session
/// that owes that is not to blame.
#[tokio::test(start_paused = true)]
async fn who_cannot_report_because_of_a_cut_is_not_evicted() {
    let (w, oss) = with_files().await;
    let (mut a, mut b) = (Holder::new(&w, 1).await, Holder::new(&w, 2).await);
    let f = a.one(create("f", 1)).await.results[0].ino;
    a.one(extend(f, 100)).await;
    oss.refuse.store(true, Ordering::Relaxed);
    let (cut, look) = (a.request(set_size(f, 50)), b.request(getattr(f)));
    let mut cutting = std::pin::pin!(a.send(&cut));
    assert!(timeout(AWHILE, &mut cutting).await.is_err());
    let mut looking = std::pin::pin!(b.send(&look));
    let excused =
        || Reporting::counts().iter().find(|(row, _)| *row == "report-excused").map(|(_, n)| *n);
    while excused() == Some(0) {
        assert!(
            timeout(AWHILE, &mut looking).await.is_err()
                && timeout(AWHILE, &mut cutting).await.is_err()
        );
        a.renew().await;
        b.renew().await;
    }
    oss.refuse.store(false, Ordering::Relaxed);
    cutting.await;
    let asked: pb::RecallReply =
        w.ask(Role::Client, opcode::RECALL, &a.recall(vec![])).await.unwrap();
    let reported = a.recall(vec![asked.reports[0].number]);
    let (answer, _) =
        tokio::join!(looking, w.ask::<pb::RecallReply>(Role::Client, opcode::RECALL, &reported));
    assert_eq!(size(&answer), 50);
    assert!(oss.evicted.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn one_who_renews_and_does_not_answer_is_evicted() {
    let (w, _oss) = with_files().await;
    let (mut a, mut b, mut c) =
        (Holder::new(&w, 1).await, Holder::new(&w, 2).await, Holder::new(&w, 3).await);
    let d = a.one(mkdir("d")).await.results[0].ino;
    assert_eq!(b.one(getattr(d)).await.granted, [d]);
    let renew = async {
        loop {
            match b.renewal(b.connection, false, false).await {
                Err(code) => return code,
                Ok(_) => sleep(Duration::from_millis(400)).await,
            }
        }
    };
    let change = a.request(chmod(d, 0o700));
    let (code, (_, took)) = tokio::join!(renew, timed(a.send(&change)));
    assert_eq!(code, Code::NoSession);
    assert!(took > Duration::from_secs(5) && took < Duration::from_secs(7), "{took:?}");
    // The same for reports.
    c.renew().await;
    let f = c.one(create("f", 1)).await.results[0].ino;
    let renew = async {
        while c.renewal(c.connection, false, false).await.is_ok() {
            sleep(Duration::from_millis(400)).await;
        }
    };
    let ((), (r, took)) = tokio::join!(renew, timed(a.one(getattr(f))));
    assert!(took > Duration::from_secs(5) && took < Duration::from_secs(7), "{took:?}");
    assert_eq!(size(&r), 0);
}

#[tokio::test(start_paused = true)]
async fn a_new_leader_waits_for_hellos_and_no_longer_than_a_term() {
    for all in [true, false] {
        let mut w = World::new(3, |_| ()).await;
        let leader = w.leader().await;
        let (a, b) = (Holder::new(&w, 1).await.c.session, Holder::new(&w, 2).await.c.session);
        w.kill(leader);
        w.leader().await;
        let began = Instant::now();
        let hello = |session| {
            let r = pb::SessionRenewRequest {
                level: strake_proto::FEATURE_LEVEL,
                session,
                connection: 7,
                hello: true,
                ..Default::default()
            };
            let w = &w;
            async move {
                w.ask::<pb::SessionRenewReply>(Role::Client, opcode::SESSION_RENEW, &r)
                    .await
                    .unwrap()
            }
        };
        assert_eq!(hello(a).await.lease_ms, 1500);
        if all {
            assert_eq!(hello(b).await.lease_ms, 1500);
        }
        assert!(began.elapsed() < Duration::from_millis(200), "hellos are answered at once");
        let ops = vec![pb::Op { op: Some(getattr(ROOT_INO)) }];
        let r = pb::MetaRequest { session: a, connection: 7, ops, ..Default::default() };
        let r: pb::MetaReply = w.ask(Role::Client, opcode::META, &r).await.unwrap();
        let took = began.elapsed();
        assert_eq!(r.granted, [ROOT_INO]);
        let at_once = took < Duration::from_millis(300);
        assert!(at_once == all && took <= TERM + Duration::from_millis(100), "{took:?}");
    }
}

/// An evicted session may not know it yet, and a new leader finds it in no list of sessions.
#[tokio::test(start_paused = true)]
async fn a_new_leader_waits_for_what_evicted_sessions_may_believe() {
    for members in [1, 3] {
        let mut w = World::new(members, |_| ()).await;
        let a = Holder::new(&w, 1).await.c.session;
        Holder::new(&w, 2).await;
        let by = w.client_that(9, false, &[2]).await.session;
        let evicted = Instant::now();
        let leader = w.leader().await;
        w.kill(leader);
        if members == 1 {
            w.start(leader).await;
        }
        w.leader().await;
        let elected = evicted.elapsed();
        for session in [a, by] {
            let r = pb::SessionRenewRequest {
                level: strake_proto::FEATURE_LEVEL,
                session,
                connection: 7,
                hello: true,
                ..Default::default()
            };
            let _: pb::SessionRenewReply =
                w.ask(Role::Client, opcode::SESSION_RENEW, &r).await.unwrap();
        }
        let ops = vec![pb::Op { op: Some(getattr(ROOT_INO)) }];
        let r = pb::MetaRequest { session: a, connection: 7, ops, ..Default::default() };
        let r: pb::MetaReply = w.ask(Role::Client, opcode::META, &r).await.unwrap();
        assert_eq!(r.granted, [ROOT_INO]);
        let answered = evicted.elapsed();
        println!(
            "{members} servers: elected {elected:?} after the eviction, answered {answered:?} after it"
        );
        assert!(
            answered >= TERM && answered <= elected + TERM + Duration::from_millis(100),
            "{elected:?} {answered:?}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_daemon_in_place_of_another_is_asked_to_forget_what_that_was_told() {
    let w = lone().await;
    let (mut a, mut b) = (Holder::new(&w, 1).await, Holder::new(&w, 2).await);
    let d = a.one(mkdir("d")).await.results[0].ino;
    assert_eq!(b.one(getattr(d)).await.granted, [d]);
    let change = a.request(chmod(d, 0o700));
    let ((_, took), forgot) = tokio::join!(timed(a.send(&change)), async {
        sleep(Duration::from_millis(300)).await;
        assert_eq!(b.hello(true).await, 1500);
        sleep(Duration::from_millis(300)).await;
        b.forget().await
    });
    assert!(forgot == [d] && took >= Duration::from_millis(600), "{took:?}");
    // A session that says it has forgotten is not waited for any more.
    assert_eq!(b.one(getattr(d)).await.granted, [d]);
    let change = a.request(chmod(d, 0o711));
    let ((_, took), _) = tokio::join!(timed(a.send(&change)), async {
        sleep(Duration::from_millis(300)).await;
        b.hello(false).await
    });
    assert!(took >= Duration::from_millis(300) && took < AWHILE, "{took:?}");
    // Nor is one that says goodbye.
    assert_eq!(b.one(getattr(d)).await.granted, [d]);
    let change = a.request(chmod(d, 0o722));
    let ((_, took), ()) = tokio::join!(timed(a.send(&change)), async {
        sleep(Duration::from_millis(300)).await;
        let close = pb::SessionCloseRequest { session: b.c.session };
        let _: pb::SessionCloseReply =
            w.ask(Role::Client, opcode::SESSION_CLOSE, &close).await.unwrap();
    });
    assert!(took >= Duration::from_millis(300) && took < AWHILE, "{took:?}");
}

#[tokio::test(start_paused = true)]
async fn who_may_not_ask_for_recalls_is_refused() {
    let w = lone().await;
    let mut a = Holder::new(&w, 1).await;
    let w = &w;
    let ask = |opcode, body: Vec<u8>| async move {
        w.ask_at(0, Role::Client, opcode, body.into()).await.map(drop).map_err(|e| e.code)
    };
    let recall = |r: pb::RecallRequest| ask(opcode::RECALL, r.encode_to_vec());
    let wrong = pb::RecallRequest { connection: 7, ..a.recall(vec![]) };
    assert_eq!(recall(wrong).await, Err(Code::Disconnected));
    assert_eq!(
        recall(pb::RecallRequest { connection: 0, ..a.recall(vec![]) }).await,
        Err(Code::Disconnected)
    );
    assert_eq!(
        recall(pb::RecallRequest { session: 99, ..a.recall(vec![]) }).await,
        Err(Code::NoSession)
    );
    // Long lists, also with one number per field.
    assert_eq!(recall(a.recall(vec![1; 65_537])).await, Err(Code::TooBig));
    assert_eq!(recall(a.recall(vec![u64::MAX; 65_537])).await, Err(Code::TooBig));
    assert_eq!(ask(opcode::RECALL, [0x20, 1].repeat(65_537)).await, Err(Code::TooBig));
    let working = pb::RecallRequest { working: vec![1; 65_537], ..a.recall(vec![]) };
    assert_eq!(recall(working).await, Err(Code::TooBig));
    // A request with reports does not wait, others do.
    for (reported, waits) in [(vec![1; 65_536], false), (vec![], true)] {
        let r = pb::RecallRequest { acknowledged: u64::MAX, ..a.recall(reported) };
        let (r, took) = timed(recall(r)).await;
        assert!(r.is_ok() && (took >= Duration::from_secs(3)) == waits, "{r:?} {took:?}");
    }
    a.renew().await;
    let many = pb::MetaRequest { dropped: vec![1; 65_537], ..a.request(getattr(ROOT_INO)) };
    assert_eq!(ask(opcode::META, many.encode_to_vec()).await, Err(Code::TooBig));
    let fewer = pb::MetaRequest { dropped: vec![300; 65_536], ..a.request(getattr(ROOT_INO)) };
    assert_eq!(ask(opcode::META, fewer.encode_to_vec()).await, Ok(()));
    // A request that waits on a connection that has ended is told so.
    let old = a.recall(vec![]);
    let (r, took) = tokio::join!(timed(recall(old)), async {
        sleep(Duration::from_millis(100)).await;
        a.hello(false).await
    })
    .0;
    assert!(r == Err(Code::Disconnected) && took < AWHILE, "{r:?} {took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_close_that_comes_late_closes_nothing() {
    let w = World::new(1, |_| ()).await;
    let _oss = w.oss(1).await;
    let server = w.server().await;
    until("chains", || server.status().map.unwrap().sets.len() == 1).await;
    let mut a = Holder::new(&w, 1).await;
    let opened = a.one(create("f", 2)).await;
    let ino = opened.results[0].ino;
    a.one(Op::Open(pb::Open { ino, flags: 2 })).await;
    let close = a.request(Op::Close(pb::Close { ino }));
    // It has closed one of them, and reports all open files on another connection.
    a.hello_again().await;
    let all = pb::SessionRenewRequest {
        level: strake_proto::FEATURE_LEVEL,
        session: a.c.session,
        connection: a.connection,
        reassert: true,
        opens: vec![ino],
        ..Default::default()
    };
    let _: pb::SessionRenewReply = w.ask(Role::Client, opcode::SESSION_RENEW, &all).await.unwrap();
    // Asked again and again, it stays refused.
    let late = w.ask::<pb::MetaReply>(Role::Client, opcode::META, &close);
    assert!(tokio::time::timeout(Duration::from_secs(3), late).await.is_err());
    assert_eq!(server.status().sessions[0].opens, 1);
}

/// It lists what was open when it was sent: if that were taken for what is open now, the file would
/// be freed with its last name.
#[tokio::test(start_paused = true)]
async fn a_reassertion_that_comes_late_changes_nothing() {
    let w = World::new(1, |_| ()).await;
    let _oss = w.oss(1).await;
    let server = w.server().await;
    until("chains", || server.status().map.unwrap().sets.len() == 1).await;
    let mut a = Holder::new(&w, 1).await;
    let ino = a.one(create("f", 2)).await.results[0].ino;
    let all = |a: &Holder, hello, opens: &[u64]| pb::SessionRenewRequest {
        level: strake_proto::FEATURE_LEVEL,
        session: a.c.session,
        connection: a.connection,
        reassert: true,
        hello,
        opens: opens.to_vec(),
        ..Default::default()
    };
    // It gave up a connection on which it had reported that nothing is open.
    let former = [false, true].map(|hello| all(&a, hello, &[]));
    a.hello_again().await;
    let _: pb::SessionRenewReply =
        w.ask(Role::Client, opcode::SESSION_RENEW, &all(&a, false, &[ino])).await.unwrap();
    for late in &former {
        let late = w.ask::<pb::SessionRenewReply>(Role::Client, opcode::SESSION_RENEW, late);
        assert!(
            tokio::time::timeout(Duration::from_secs(3), late).await.is_err(),
            "it stays refused"
        );
        assert_eq!(server.status().sessions[0].opens, 1);
    }
}
