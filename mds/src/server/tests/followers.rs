//! Reads by members that do not lead: what they answer, when they wait, and when they refuse. See
//! `docs/follower-reads.md`.

use super::{
    leases::{Holder, chmod, extend, getattr, list, timed},
    world::Client,
    *,
};
use tokio::time::Instant;

/// The members that do not lead, once all know the leader.
async fn followers(w: &World) -> [usize; 2] {
    let leader = w.leader().await;
    let knows = |i: usize| {
        w.mds[i]
            .as_ref()
            .is_none_or(|(_, s)| s.node().leadership().borrow().leader == leader as u64 + 1)
    };
    until("all know the leader", || (0..3).all(knows)).await;
    [(leader + 1) % 3, (leader + 2) % 3]
}

async fn tell(w: &World, at: usize, request: &pb::MetaRequest) -> Result<pb::MetaReply, Code> {
    let request = pb::MetaRequest { follower: true, ..request.clone() };
    let m = w
        .ask_at(at, Role::Client, opcode::META, request.encode_to_vec().into())
        .await
        .map_err(|e| e.code)?;
    Ok(pb::MetaReply::decode(m.body).unwrap())
}

async fn ask(w: &World, at: usize, c: &mut Client<'_>, op: Op) -> Result<pb::OpResult, Code> {
    let r = tell(w, at, &c.request(vec![op])).await?;
    assert!(r.granted.is_empty() && r.results.len() == 1);
    let result = r.results.into_iter().next().unwrap();
    match &result.status {
        Some(s) => Err(Code::from_wire(s.code)),
        None => Ok(result),
    }
}

/// How many lists this member has answered though it does not lead, and how many not.
fn counted(w: &World, i: usize) -> (u64, u64) {
    let s = w.mds[i].as_ref().unwrap().1.status();
    (s.follower_reads, s.follower_refusals)
}

#[tokio::test(start_paused = true)]
async fn followers_tell_what_was_answered_before() {
    let w = World::new(3, |_| ()).await;
    let (mut c, mut reader) = (w.client(1).await, w.client(2).await);
    let both = followers(&w).await;
    for n in 0..40 {
        let d = c.one(mkdir(&format!("d{n}"))).await.ino;
        c.one(chmod(d, 0o700 + n)).await;
        for f in both {
            let found =
                ask(&w, f, &mut reader, lookup(&format!("d{n}"))).await.unwrap().attr.unwrap();
            assert_eq!((found.ino, found.mode & 0o7777), (d, 0o700 + n));
            assert_eq!(
                ask(&w, f, &mut reader, list()).await.unwrap().entries.len(),
                n as usize + 1
            );
        }
    }
    // Refused operations are answers, and come with the same rights.
    assert_eq!(ask(&w, both[0], &mut reader, lookup("none")).await, Err(Code::NoEnt));
    let other = pb::Creds { uid: 7, gid: 7, groups: vec![] };
    let look = pb::MetaRequest {
        creds: Some(other),
        ..reader.request(vec![lookup("d0"), Op::Access(pb::Access { ino: 0, mask: 4 })])
    };
    let r = tell(&w, both[0], &look).await.unwrap().results;
    assert_eq!(Code::from_wire(r[1].status.as_ref().unwrap().code), Code::Access);
    let space = ask(&w, both[0], &mut reader, Op::Statfs(pb::Statfs::default())).await.unwrap();
    assert_eq!(space.statfs.unwrap().inodes, 41);
    assert_eq!(both.map(|f| counted(&w, f)), [(83, 0), (80, 0)]);
    // The leader answers it like any other read.
    let leader = w.leader().await;
    assert_eq!(ask(&w, leader, &mut reader, list()).await.unwrap().entries.len(), 40);
    assert_eq!(counted(&w, leader), (0, 0));
}

/// A storage server that starts decides from it which of its targets the cluster has.
#[tokio::test(start_paused = true)]
async fn the_latest_map_is_told_by_the_leader_alone_and_to_servers() {
    let w = World::new(3, |_| ()).await;
    let _oss = w.oss(1).await;
    let ask = async |at: usize, role: Role, latest: bool| {
        let body = pb::MapRequest { have: 0, latest }.encode_to_vec().into();
        let m = w.ask_at(at, role, opcode::MAP, body).await.map_err(|e| e.code)?;
        Ok(pb::MapReply::decode(m.body).unwrap().map.map_or(0, |m| m.targets.len()))
    };
    let both = followers(&w).await;
    let leader = w.leader().await;
    assert_eq!(ask(leader, Role::Server, true).await, Ok(1));
    assert_eq!(ask(leader, Role::Client, false).await, Ok(1));
    for f in both {
        assert_eq!(ask(f, Role::Server, true).await, Err(Code::NotLeader));
        assert!(ask(f, Role::Client, false).await.is_ok());
    }
    // Each may cost the leader a round to the others.
    assert_eq!(ask(leader, Role::Client, true).await, Err(Code::Access));
    // A former leader that is cut off does not know what was agreed on since its lease was over.
    w.net.cut_off.lock().insert(leader as u32 + 1);
    sleep(Duration::from_millis(250)).await;
    assert!(ask(leader, Role::Server, true).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn a_follower_does_not_tell_what_a_holder_has_not_forgotten_was() {
    let w = World::new(3, |_| ()).await;
    let (mut a, mut b) = (Holder::new(&w, 1).await, Holder::new(&w, 2).await);
    let mut c = w.client(3).await;
    let both = followers(&w).await;
    let d = a.one(mkdir("d")).await.results[0].ino;
    let e = a.one(mkdir("e")).await.results[0].ino;
    assert_eq!(b.one(getattr(d)).await.granted, [d]);
    let change = a.request(chmod(d, 0o700));
    let began = Instant::now();
    let early = async {
        sleep(Duration::from_millis(50)).await;
        // All have applied it, and the holder still answers with the old state.
        for f in both {
            let applied = |i: usize| w.mds[i].as_ref().unwrap().1.node().status().applied;
            assert_eq!(applied(f), applied(w.leader().await));
            assert_eq!(
                ask(&w, f, &mut c, getattr(d)).await,
                Err(Code::NotLeader),
                "only the leader can wait for that"
            );
            let walk = pb::MetaRequest { ..c.request(vec![lookup("e"), lookup("d")]) };
            assert_eq!(tell(&w, f, &walk).await.err(), Some(Code::NotLeader));
            let (r, took) = timed(ask(&w, f, &mut c, getattr(e))).await;
            assert!(
                r.unwrap().ino == e && took < Duration::from_millis(20),
                "others do not wait: {took:?}"
            );
        }
        assert!(began.elapsed() < Duration::from_millis(400));
    };
    let (_, (), forgot) = tokio::join!(a.send(&change), early, async {
        sleep(Duration::from_millis(400)).await;
        b.forget().await
    });
    assert!(forgot == [d] && began.elapsed() >= Duration::from_millis(400));
    for f in both {
        assert_eq!(
            ask(&w, f, &mut c, getattr(d)).await.unwrap().attr.unwrap().mode & 0o7777,
            0o700
        );
    }
    // An entry takes effect as a whole: the directory and the inode that moved.
    assert_eq!(b.one(getattr(e)).await.granted, [e]);
    let change = a.request(rename("e", "f"));
    let ((), forgot) = tokio::join!(
        async {
            a.send(&change).await;
        },
        async {
            sleep(Duration::from_millis(200)).await;
            for op in [getattr(e), getattr(ROOT_INO), lookup("e"), lookup("f")] {
                assert_eq!(ask(&w, both[0], &mut c, op).await, Err(Code::NotLeader));
            }
            assert_eq!(ask(&w, both[0], &mut c, getattr(d)).await.unwrap().ino, d);
            b.forget().await
        }
    );
    assert_eq!(forgot, [e]);
    assert_eq!(ask(&w, both[0], &mut c, lookup("f")).await.unwrap().ino, e);
}

#[tokio::test(start_paused = true)]
async fn a_follower_that_is_cut_off_or_without_a_leader_answers_nothing() {
    let mut w = World::new(3, |_| ()).await;
    let (mut c, session) = (w.client(1).await, w.client(2).await.session);
    let [f, g] = followers(&w).await;
    let d = c.one(mkdir("d")).await.ino;
    assert_eq!(ask(&w, f, &mut c, getattr(d)).await.unwrap().ino, d);
    w.net.cut_off.lock().insert(f as u32 + 1);
    let (r, took) = timed(ask(&w, f, &mut c, getattr(d))).await;
    assert!(r == Err(Code::NotServing) && took <= Duration::from_millis(310), "{took:?}");
    c.one(chmod(d, 0o700)).await;
    assert_eq!(ask(&w, f, &mut c, getattr(d)).await, Err(Code::NotServing));
    w.net.cut_off.lock().clear();
    let told = async {
        while ask(&w, f, &mut c, getattr(d))
            .await
            .ok()
            .and_then(|r| r.attr)
            .map(|a| a.mode & 0o7777)
            != Some(0o700)
        {
            sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), told).await.expect("it has caught up");
    // The leader is cut off and believes for a while that it still leads: it gives no frontiers
    // once its lease is over.
    let leader = w.leader().await;
    w.net.cut_off.lock().insert(leader as u32 + 1);
    sleep(Duration::from_millis(250)).await;
    let request = pb::FrontierRequest {
        level: strake_proto::FEATURE_LEVEL,
        member: f as u64 + 1,
        ..Default::default()
    };
    let (r, took) =
        timed(w.ask_at(leader, Role::Server, opcode::FRONTIER, request.encode_to_vec().into()))
            .await;
    assert!(
        matches!(r.as_ref().map_err(|e| e.code), Err(Code::NotLeader | Code::Disconnected)),
        "{r:?} {took:?}"
    );
    w.net.cut_off.lock().clear();
    // No member leads.
    w.leader().await;
    for i in (0..3).filter(|i| *i != g) {
        w.kill(i);
    }
    sleep(Duration::from_secs(3)).await;
    let ops = vec![pb::Op { op: Some(getattr(d)) }];
    let request = pb::MetaRequest { session, ops, ..Default::default() };
    assert_eq!(tell(&w, g, &request).await.err(), Some(Code::NotServing));
}

#[tokio::test(start_paused = true)]
async fn nothing_is_told_before_a_new_leaders_grace_is_over() {
    let mut w = World::new(3, |_| ()).await;
    let (a, b) = (Holder::new(&w, 1).await.c.session, Holder::new(&w, 2).await.c.session);
    let leader = w.leader().await;
    w.kill(leader);
    let leader = w.leader().await;
    let began = Instant::now();
    let follower = (0..3).find(|i| w.mds[*i].is_some() && *i != leader).unwrap();
    let ops = vec![pb::Op { op: Some(getattr(ROOT_INO)) }];
    let look = pb::MetaRequest { session: a, ops, ..Default::default() };
    while let Err(e) = tell(&w, follower, &look).await {
        assert!(e == Code::NotServing && began.elapsed() < Duration::from_secs(3), "{e:?}");
        sleep(Duration::from_millis(10)).await;
    }
    assert!(
        began.elapsed() > Duration::from_millis(1400),
        "{:?}: nobody said hello",
        began.elapsed()
    );
    assert!(b > a);
}

#[tokio::test(start_paused = true)]
async fn followers_know_who_writes_and_leave_that_to_the_leader() {
    let w = World::new(3, |_| ()).await;
    let _oss = w.oss(1).await;
    until("chains", || {
        w.mds.iter().flatten().all(|(_, s)| s.status().map.unwrap().sets.len() == 1)
    })
    .await;
    let (mut a, mut b) = (Holder::new(&w, 1).await, w.client(2).await);
    let [f, _] = followers(&w).await;
    let file = a.one(create("f", 1)).await.results[0].clone();
    assert_eq!(ask(&w, f, &mut b, getattr(file.ino)).await, Err(Code::NotLeader));
    assert_eq!(ask(&w, f, &mut b, lookup("f")).await, Err(Code::NotLeader));
    assert_eq!(ask(&w, f, &mut b, list()).await.unwrap().entries[0].attr, None);
    assert_eq!(
        ask(&w, f, &mut a.c, getattr(file.ino)).await.unwrap().attr.unwrap().size,
        0,
        "its own writes it knows itself"
    );
    a.one(extend(file.ino, 100)).await;
    a.one(Op::Release(pb::Release { ino: file.ino, writer: file.writer, surplus: false })).await;
    assert_eq!(ask(&w, f, &mut b, getattr(file.ino)).await.unwrap().attr.unwrap().size, 100);
    assert_eq!(ask(&w, f, &mut b, list()).await.unwrap().entries[0].attr.unwrap().size, 100);
    // Followers answer only reads.
    let refused = [
        Op::Open(pb::Open { ino: file.ino, flags: 0 }),
        Op::Close(pb::Close { ino: file.ino }),
        Op::GetLock(pb::GetLock { ino: file.ino, ..Default::default() }),
        unlink("f"),
    ];
    for op in refused {
        let r = pb::MetaRequest { ..b.request(vec![lookup("f"), op]) };
        assert_eq!(tell(&w, f, &r).await.err(), Some(Code::NotLeader));
    }
    let unknown =
        pb::MetaRequest { ops: vec![pb::Op { op: None }], ..b.request(vec![lookup("f")]) };
    assert_eq!(tell(&w, f, &unknown).await.err(), Some(Code::NotLeader));
}

#[tokio::test(start_paused = true)]
async fn forged_and_ended_sessions_and_strangers_are_refused() {
    let w = World::new(3, |_| ()).await;
    let (mut c, gone) = (w.client(1).await, w.client(2).await.session);
    let [f, g] = followers(&w).await;
    let close = pb::SessionCloseRequest { session: gone };
    w.ask::<pb::SessionCloseReply>(Role::Client, opcode::SESSION_CLOSE, &close).await.unwrap();
    for session in [0, gone, c.session ^ 1 << 40, u64::MAX] {
        let look = pb::MetaRequest { session, ..c.request(vec![list()]) };
        assert_eq!(tell(&w, f, &look).await.err(), Some(Code::NotServing), "{session:#x}");
        let leader = w.leader().await;
        assert_eq!(tell(&w, leader, &look).await.err(), Some(Code::NoSession), "{session:#x}");
    }
    assert!(ask(&w, f, &mut c, list()).await.is_ok());
    // Frontiers are for servers, and only the leader gives them.
    let ask_frontier = |at: usize, role, r: pb::FrontierRequest| {
        let w = &w;
        async move {
            w.ask_at(at, role, opcode::FRONTIER, r.encode_to_vec().into()).await.map_err(|e| e.code)
        }
    };
    let (leader, r) = (
        w.leader().await,
        pb::FrontierRequest {
            level: strake_proto::FEATURE_LEVEL,
            member: f as u64 + 1,
            ..Default::default()
        },
    );
    assert_eq!(ask_frontier(leader, Role::Client, r).await.err(), Some(Code::Access));
    assert_eq!(ask_frontier(g, Role::Server, r).await.err(), Some(Code::NotLeader));
    let told = ask_frontier(leader, Role::Server, pb::FrontierRequest { member: u64::MAX, ..r })
        .await
        .unwrap();
    let told = pb::FrontierReply::decode(told.body).unwrap();
    assert!(told.index > 0 && told.unsettled.is_empty());
    // Long lists of operations as ever.
    let many = pb::MetaRequest {
        ops: vec![pb::Op::default(); 8193],
        follower: true,
        ..c.request(vec![list()])
    };
    assert_eq!(tell(&w, f, &many).await.err(), Some(Code::TooBig));
}

#[tokio::test(start_paused = true)]
async fn a_member_whose_state_is_replaced_tells_nothing_of_it() {
    let mut w = World::new(3, |_| ()).await;
    let session = w.client(1).await.session;
    let [f, _] = followers(&w).await;
    w.kill(f);
    {
        let mut c = w.client(2).await;
        for n in 0..50 {
            c.one(mkdir(&format!("d{n}"))).await;
        }
    }
    // It returns without its state, like a new member, and is asked all the time.
    let i = w.join().await;
    let learn = pb::MembersRequest {
        change: Some(pb::members_request::Change::Learn(pb::MemberLearn {
            endpoint: format!("sim:{}", i + 1),
        })),
        levels: false,
    };
    let ops = vec![pb::Op { op: Some(list()) }];
    let look = pb::MetaRequest { session, ops, ..Default::default() };
    let asking = async {
        let mut refused = 0;
        loop {
            match tell(&w, i, &look).await {
                Ok(r) => return (refused, r.results[0].entries.len()),
                Err(Code::NotServing) => refused += 1,
                Err(e) => panic!("{e:?}"),
            }
            sleep(Duration::from_millis(1)).await;
        }
    };
    let (asked, learned) = tokio::join!(
        tokio::time::timeout(Duration::from_secs(20), asking),
        w.ask::<pb::MembersReply>(Role::Server, opcode::MEMBERS, &learn)
    );
    learned.unwrap();
    let (refused, names) = asked.expect("it is taken in");
    assert!(refused > 0 && names == 50, "{refused} refusals, then {names} names");
}
