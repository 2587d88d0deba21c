//! Clients that follow no rules: ids that were never given out, numbers that mean nothing, more
//! than a client may have.

use super::*;
use crate::leases::Limits;

async fn code(w: &World, opcode: u16, body: &impl prost::Message) -> Option<Code> {
    let r = w.ask_at(w.leader().await, Role::Client, opcode, body.encode_to_vec().into()).await;
    r.err().map(|e| e.code)
}

#[tokio::test(start_paused = true)]
async fn sessions_that_nobody_was_given_are_refused() {
    let w = World::new(1, |_| ()).await;
    let (mut c, mut gone) = (w.client(1).await, w.client(2).await);
    let d = c.one(mkdir("d")).await.ino;
    let close = pb::SessionCloseRequest { session: gone.session };
    let late = gone.request(vec![mkdir("late")]);
    assert_eq!(code(&w, opcode::SESSION_CLOSE, &close).await, None);
    assert_eq!(
        code(&w, opcode::META, &late).await,
        Some(Code::NoSession),
        "a closed session's request"
    );
    for session in [0, c.session ^ 1 << 40, c.session + 1000, u64::MAX, gone.session] {
        let read = pb::MetaRequest { session, ..c.request(vec![lookup("d")]) };
        let change = pb::MetaRequest { session, seq: 1, ..c.request(vec![unlink("d")]) };
        let renew = pb::SessionRenewRequest {
            level: strake_proto::FEATURE_LEVEL,
            session,
            hello: true,
            connection: u64::MAX,
            ..Default::default()
        };
        let recall = pb::RecallRequest {
            session,
            acknowledged: u64::MAX,
            reported: vec![1],
            ..Default::default()
        };
        let wait = pb::LockWaitRequest { session, ..Default::default() };
        let close = pb::SessionCloseRequest { session };
        for (op, refused) in [
            (opcode::META, code(&w, opcode::META, &read).await),
            (opcode::META, code(&w, opcode::META, &change).await),
            (opcode::SESSION_RENEW, code(&w, opcode::SESSION_RENEW, &renew).await),
            (opcode::RECALL, code(&w, opcode::RECALL, &recall).await),
            (opcode::LOCK_WAIT, code(&w, opcode::LOCK_WAIT, &wait).await),
            (opcode::SESSION_CLOSE, code(&w, opcode::SESSION_CLOSE, &close).await),
        ] {
            assert_eq!(refused, Some(Code::NoSession), "{op:#x} of session {session:#x}");
        }
    }
    assert_eq!(c.one(lookup("d")).await.ino, d);
}

#[tokio::test(start_paused = true)]
async fn a_number_that_was_used_runs_nothing_else() {
    let w = World::new(1, |_| ()).await;
    let mut c = w.client(1).await;
    let first = c.request(vec![mkdir("a")]);
    let made = c.send(&first).await.unwrap();
    let other = pb::MetaRequest { ops: c.request(vec![mkdir("b")]).ops, ..first.clone() };
    assert_eq!(c.send(&other).await.unwrap(), made, "the answer of the first");
    assert_eq!(c.fails(lookup("b")).await, Code::NoEnt);
    // A request that its sender calls answered does not run, whatever it asks for.
    c.one(mkdir("c")).await;
    let old = pb::MetaRequest { ops: c.request(vec![mkdir("b")]).ops, ..first };
    assert_eq!(code(&w, opcode::META, &old).await, Some(Code::ReplyGone));
    assert_eq!(c.fails(lookup("b")).await, Code::NoEnt);
    let none = pb::MetaRequest { seq: 0, ..c.request(vec![mkdir("b")]) };
    assert_eq!(code(&w, opcode::META, &none).await, Some(Code::Inval));
}

#[tokio::test(start_paused = true)]
async fn numbers_that_mean_nothing_are_refused() {
    let (w, _oss) = leases::with_files().await;
    let mut c = w.client(1).await;
    let file = c.one(create("f", 0)).await.ino;
    let set = |flags| {
        Op::Setxattr(pb::SetXattr { ino: file, name: "user.a".into(), value: "v".into(), flags })
    };
    for flags in [3 << 2, 1 << 31] {
        assert_eq!(c.fails(set(flags)).await, Code::Inval);
        let Op::Rename(r) = rename("f", "g") else { unreachable!() };
        assert_eq!(c.fails(Op::Rename(pb::Rename { flags: flags | 4, ..r })).await, Code::Inval);
    }
    // Neither for reading nor for writing: there is no right to the data. Unknown bits change
    // nothing.
    assert!(c.one(Op::Open(pb::Open { ino: file, flags: 3 })).await.capability.is_empty());
    assert!(c.one(create("h", 3)).await.capability.is_empty());
    let tmpfile =
        Op::Tmpfile(pb::Tmpfile { parent: ROOT_INO, flags: 3, mode: 0o600, ..Default::default() });
    assert!(c.one(tmpfile).await.capability.is_empty());
    let rights = |cap: &[u8]| {
        let cap: [u8; CAP_LEN] = cap.try_into().unwrap();
        CapKey::from_cluster_key(&KEY).open(&cap, 0).unwrap().rights
    };
    // Except the bit with which the kernel asks for the right to execute it.
    let strange = c.one(Op::Open(pb::Open { ino: file, flags: !0x23 })).await;
    assert_eq!(rights(&strange.capability), Rights::READ);
    let unknown = pb::Op { op: None };
    let request = pb::MetaRequest { ops: vec![unknown], ..c.request(vec![lookup("f")]) };
    let r = c.send(&request).await.unwrap();
    assert_eq!(Code::from_wire(r[0].status.as_ref().unwrap().code), Code::OpNotSupp);
    let lock = |kind, r#type| {
        let span = Some(pb::LockSpan { start: 0, end: 9, r#type, pid: 1 });
        Op::SetLock(pb::SetLock { ino: file, kind, owner: 1, span, ..Default::default() })
    };
    for op in [lock(77, 1), lock(0, 77)] {
        let refused = match c.run(vec![op]).await {
            Ok(r) => Code::from_wire(r[0].status.as_ref().map_or(0, |s| s.code)),
            Err(e) => e.code,
        };
        assert_eq!(refused, Code::Inval);
    }
    let pending = pb::PendingRequest { kind: 77, limit: 10, ..Default::default() };
    let r = w.ask::<pb::PendingReply>(Role::Server, opcode::PENDING, &pending).await;
    assert_eq!(r.unwrap_err().code, Code::Inval);
}

#[tokio::test(start_paused = true)]
async fn a_member_that_says_what_nobody_knows_is_harmless() {
    let w = World::new(3, |_| ()).await;
    let mut c = w.client(1).await;
    let leader = w.leader().await;
    let from = ((leader + 1) % 3) as u64 + 1;
    let (to, cluster, stamp) = (leader as u64 + 1, w.cluster.to_vec().into(), 1000 + from);
    let batch = pb::RaftBatch {
        level: strake_proto::FEATURE_LEVEL,
        from,
        to,
        cluster,
        stamp,
        disk: !0,
        ..Default::default()
    };
    w.ask_at(leader, Role::Server, opcode::RAFT, batch.encode_to_vec().into()).await.unwrap();
    c.one(mkdir("d")).await;
    let r = w
        .ask::<pb::MembersReply>(Role::Server, opcode::MEMBERS, &pb::MembersRequest::default())
        .await
        .unwrap();
    assert_eq!(r.members.iter().filter(|m| m.voter).count(), 3);
}

#[tokio::test(start_paused = true)]
async fn nobody_is_on_record_as_writing_more_than_a_session_may() {
    let w = World::new(1, |c| c.limit_leases(Limits { of_writer: 3, ..Limits::default() })).await;
    let _oss = w.oss(1).await;
    until("chains", || {
        w.mds.iter().flatten().any(|(_, s)| s.status().map.unwrap().sets.len() == 1)
    })
    .await;
    let (mut c, mut other) = (w.client(1).await, w.client(2).await);
    for name in ["a", "b"] {
        c.one(create(name, 1)).await;
    }
    let third = c.request(vec![create("c", 1)]);
    let made = c.send(&third).await.unwrap();
    assert!(super::super::wire::ok(&made[0]));
    // Closing it gives up nothing: what it wrote may not be reported yet.
    c.one(Op::Close(pb::Close { ino: made[0].ino })).await;
    assert_eq!(c.fails(create("d", 1)).await, Code::Overloaded);
    assert_eq!(c.fails(lookup("d")).await, Code::NoEnt);
    let again = c.send(&third).await.unwrap();
    assert_eq!(
        (again[0].ino, again[0].writer),
        (made[0].ino, made[0].writer),
        "its answer is still there"
    );
    c.one(create("for-reading", 0)).await;
    other.one(create("d", 1)).await;
    c.one(Op::Release(pb::Release { ino: made[0].ino, writer: made[0].writer, surplus: false }))
        .await;
    c.one(create("e", 1)).await;
    assert_eq!(c.fails(create("g", 1)).await, Code::Overloaded);
}

#[tokio::test(start_paused = true)]
async fn a_list_moves_one_name_between_deep_directories() {
    let w = World::new(1, |_| ()).await;
    let mut c = w.client(1).await;
    let under = |parent, name: &str| {
        Op::Mkdir(pb::Mkdir {
            parent,
            name: name.as_bytes().to_vec().into(),
            mode: 0o755,
            umask: 0,
        })
    };
    let mut deep = c.one(mkdir("top")).await.ino;
    let a_shallow = c.one(under(deep, "a")).await.ino;
    let b_shallow = c.one(under(deep, "b")).await.ino;
    for _ in 0..4 {
        // Parent 0 is what the operation before has made.
        let down = (0..500).map(|i| under(if i == 0 { deep } else { 0 }, "d")).collect();
        deep = c.run(down).await.unwrap().last().unwrap().ino;
    }
    let (a, b) = (c.one(under(deep, "a")).await.ino, c.one(under(deep, "b")).await.ino);
    for dir in [a, a_shallow] {
        c.one(under(dir, "v")).await;
        c.one(under(dir, "w")).await;
    }
    let mv = |from, to, name: &str| {
        let name: bytes::Bytes = name.as_bytes().to_vec().into();
        let (parent, new_parent, new_name) = (from, to, name.clone());
        Op::Rename(pb::Rename { parent, name, new_parent, new_name, flags: 0 })
    };
    let code = |r: &[pb::OpResult]| {
        Code::from_wire(r.last().unwrap().status.as_ref().map_or(0, |s| s.code))
    };
    // The same request gets the same answer again, and nothing was moved.
    let both = c.request(vec![mv(a, b, "v"), mv(a, b, "w")]);
    for _ in 0..2 {
        assert_eq!(code(&c.send(&both).await.unwrap()), Code::TooBig);
    }
    c.one(mv(a, b, "v")).await;
    c.one(mv(a, b, "w")).await;
    let r = c.run(vec![mv(a_shallow, b_shallow, "v"), mv(a_shallow, b_shallow, "w")]).await;
    assert!(r.unwrap().iter().all(|r| r.status.as_ref().is_none_or(|s| s.code == 0)));
}
