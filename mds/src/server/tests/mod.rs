//! Whole servers: groups of one and three members, fake storage servers, raw requests.

mod anew;
mod away;
mod damage;
mod disk;
mod endings;
mod followers;
mod full_disk;
mod holding;
mod hostile;
mod leases;
mod levels;
mod locks;
mod members;
mod owners;
mod places;
mod size_recovery;
mod spoilt;
mod world;

use std::{sync::atomic::Ordering, time::Duration};

use prost::Message as _;
use strake_fabric::Role;
use strake_proto::{
    Bound, CapKey, Code, Rights,
    cap::CAP_LEN,
    data::{FLAG_TOMBSTONE, Kind},
    ids::ROOT_INO,
    opcode, pb,
};
use tokio::time::sleep;

use pb::{ReplicaState, op::Op};
use world::{KEY, World, until};

fn create(name: &str, flags: u32) -> Op {
    Op::Create(pb::Create {
        parent: ROOT_INO,
        name: name.as_bytes().to_vec().into(),
        mode: 0o644,
        flags,
        ..Default::default()
    })
}
fn lookup(name: &str) -> Op {
    Op::Lookup(pb::Lookup { parent: ROOT_INO, name: name.as_bytes().to_vec().into() })
}
fn unlink(name: &str) -> Op {
    Op::Unlink(pb::Unlink { parent: ROOT_INO, name: name.as_bytes().to_vec().into() })
}
fn rename(from: &str, to: &str) -> Op {
    Op::Rename(pb::Rename {
        parent: ROOT_INO,
        name: from.as_bytes().to_vec().into(),
        new_parent: ROOT_INO,
        new_name: to.as_bytes().to_vec().into(),
        flags: 0,
    })
}
fn mkdir(name: &str) -> Op {
    Op::Mkdir(pb::Mkdir {
        parent: ROOT_INO,
        name: name.as_bytes().to_vec().into(),
        mode: 0o755,
        umask: 0,
    })
}
fn set_size(ino: u64, size: u64) -> Op {
    Op::Setattr(pb::SetAttr { ino, size: Some(size), ..Default::default() })
}

#[tokio::test(start_paused = true)]
async fn one_member_serves_names_exactly_once() {
    let w = World::new(1, |_| ()).await;
    let mut c = w.client(1).await;
    assert_eq!((c.open.root, c.open.term_ms), (ROOT_INO, 30_000));
    assert_eq!(c.open.fs_uuid.len(), 16);
    let made = c.one(mkdir("a")).await.ino;
    assert_eq!(c.one(lookup("a")).await.ino, made);
    assert_eq!(c.fails(mkdir("a")).await, Code::Exist);
    let request = c.request(vec![rename("a", "b")]);
    let first = c.send(&request).await.unwrap();
    // The same request again, as from a client that lost the answer: the answer, not ENOENT.
    assert_eq!(c.send(&request).await.unwrap(), first);
    assert_eq!(c.fails(lookup("a")).await, Code::NoEnt);
    assert_eq!(c.one(lookup("b")).await.ino, made);
    let mut no_number = c.request(vec![mkdir("x")]);
    no_number.seq = 0;
    assert_eq!(c.send(&no_number).await.unwrap_err().code, Code::Inval);
    // The same client again gets a session; after closing it, nothing more runs.
    let close = pb::SessionCloseRequest { session: c.session };
    let _: pb::SessionCloseReply =
        w.ask(Role::Client, opcode::SESSION_CLOSE, &close).await.unwrap();
    assert_eq!(c.run(vec![lookup("b")]).await.unwrap_err().code, Code::NoSession);
    assert_eq!(c.renew(false, &[]).await.unwrap_err().code, Code::NoSession);
    let status = w.server().await.status();
    assert_eq!((status.role.as_str(), status.node, status.sessions.len()), ("mds", 1, 0));
    assert_eq!(status.map.unwrap().nodes[0].endpoints, vec!["sim:1"]);
}

#[tokio::test(start_paused = true)]
async fn the_death_of_the_leader_loses_and_repeats_nothing() {
    let mut w = World::new(3, |_| ()).await;
    let leader = w.leader().await;
    let (session, request, first) = {
        let mut c = w.client(1).await;
        c.one(mkdir("kept")).await;
        let request = c.request(vec![mkdir("once")]);
        let first = c.send(&request).await.unwrap();
        // Followers name the leader.
        for i in (0..3).filter(|i| *i != leader) {
            let e = w
                .ask_at(i, Role::Client, opcode::META, request.encode_to_vec().into())
                .await
                .unwrap_err();
            assert_eq!((e.code, e.leader as usize), (Code::NotLeader, leader + 1));
        }
        (c.session, request, first)
    };
    w.kill(leader);
    let next = w.leader().await;
    assert_ne!(next, leader);
    let reply: pb::MetaReply = w.ask(Role::Client, opcode::META, &request).await.unwrap();
    assert_eq!(reply.results, first, "the reply cache is replicated");
    let list = pb::MetaRequest { session, seq: 0, ..request.clone() };
    let look = |name: &str| pb::MetaRequest {
        ops: vec![pb::Op { op: Some(lookup(name)) }],
        ..list.clone()
    };
    let r: pb::MetaReply = w.ask(Role::Client, opcode::META, &look("kept")).await.unwrap();
    assert!(r.results[0].ino > 1);
    // All three members come into the map; the dead one returns and follows.
    w.start(leader).await;
    until("three members in the map", || {
        let s = w.mds[next].as_ref().unwrap().1.status();
        s.map.unwrap().nodes.len() == 3
    })
    .await;
    until("the member that was dead has caught up", || {
        let of = |i: usize| w.mds[i].as_ref().unwrap().1.status().raft.unwrap().applied;
        of(leader) == of(next)
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn files_get_chains_and_capabilities_by_their_open_flags() {
    let w = World::new(1, |c| {
        c.expect_targets = 2;
        c.default_copies = 2;
    })
    .await;
    let mut c = w.client(1).await;
    assert_eq!(c.fails(create("early", 2)).await, Code::NoSpc, "no target yet");
    let (_a, _b) = (w.oss(1).await, w.oss(2).await);
    until("chains", || w.mds[0].as_ref().unwrap().1.status().map.unwrap().sets.len() == 2).await;
    let key = CapKey::from_cluster_key(&KEY);
    let now = 1_700_000_000_000;
    let r = c.one(create("f", 2)).await;
    let layout = r.layout.clone().unwrap();
    let cap = key.open(&r.capability, now).unwrap();
    assert_eq!((cap.ino, cap.data, cap.session), (r.ino, layout.components[0].data_id, c.session));
    assert_eq!((cap.session_epoch, cap.rights), (c.open.epoch, Rights(7)));
    assert!(cap.expiry_ms >= now + 600_000);
    let chain = layout.components[0].chains[0];
    assert_eq!(cap.bound, Bound::One { chain, bits: 28 }, "chunks of 4 MiB");
    for (flags, rights) in
        [(0, Some(Rights::READ)), (1, Some(Rights(6))), (2, Some(Rights(7))), (3, None)]
    {
        let r = c.one(Op::Open(pb::Open { ino: r.ino, flags })).await;
        let got =
            r.capability.len().eq(&CAP_LEN).then(|| key.open(&r.capability, now).unwrap().rights);
        assert_eq!(got, rights, "flags {flags}");
    }
    assert!(c.one(mkdir("d")).await.capability.is_empty());
    // A target that falls silent is taken out; the chain continues with the other.
    w.oss(3).await.up.store(false, Ordering::Relaxed);
    _a.up.store(false, Ordering::Relaxed);
    let map = || w.mds[0].as_ref().unwrap().1.status().map.unwrap();
    until("the silent target is out of its chains", || {
        let out = |r: &pb::Replica| r.target != 0 || r.state() != ReplicaState::ReplicaServing;
        map().chains.iter().all(|c| c.replicas.iter().all(out))
    })
    .await;
    assert!(
        map().chains.iter().any(|c| c.replicas.len() == 2 && c.replicas[0].state() == ReplicaState::ReplicaServing)
    );
}

/// As when the disk of a lone server was full while a change of the map was under way.
#[tokio::test(start_paused = true)]
async fn a_map_change_of_which_nobody_knows_does_not_stop_those_that_follow() {
    let w = World::new(1, |_| ()).await;
    let oss = w.oss(1).await;
    let server = w.server().await;
    let alive = || server.status().map.unwrap().targets[0].alive;
    until("it is alive", alive).await;
    let mds = &server.mds;
    let lost = mds.member.with_lead(|l| {
        let proposal =
            l.manager.tick(mds.member.env.boot() + Duration::from_secs(60), &mds.member.map());
        l.manager.resolved(false);
        Ok(proposal.is_some())
    });
    assert!(lost.unwrap() && mds.member.with_lead(|l| Ok(l.manager.in_doubt())).unwrap());
    oss.up.store(false, Ordering::Relaxed);
    until("it is seen that it is dead", || !alive()).await;
}

#[tokio::test(start_paused = true)]
async fn a_shrink_is_answered_when_the_bytes_are_gone() {
    let w = World::new(1, |_| ()).await;
    let oss = w.oss(1).await;
    let mut c = w.client(1).await;
    until("chains", || w.mds[0].as_ref().unwrap().1.status().map.unwrap().sets.len() == 1).await;
    let f = c.one(create("f", 2)).await;
    c.one(Op::Extend(pb::Extend { ino: f.ino, end: 10 << 20, holes: false })).await;
    oss.refuse.store(true, Ordering::Relaxed);
    let cut = c.request(vec![set_size(f.ino, (4 << 20) + 5)]);
    let r = {
        let held = c.send(&cut);
        tokio::pin!(held);
        tokio::select! {
            biased;
            r = &mut held => panic!("answered while the bytes are there: {r:?}"),
            () = sleep(Duration::from_secs(5)) => (),
        }
        let data_id = f.layout.as_ref().unwrap().components[0].data_id;
        let wanted = pb::PendingItem { key: f.ino, ino: f.ino, data_id, size: (4 << 20) + 5 };
        assert_eq!(pending(&w, 3, 0).await, [wanted]);
        oss.refuse.store(false, Ordering::Relaxed);
        held.await.unwrap()
    };
    assert_eq!(r[0].attr.as_ref().unwrap().size, (4 << 20) + 5);
    let trims = std::mem::take(&mut *oss.trims.lock());
    let t = &trims[0];
    assert_eq!(
        (t.kind, t.chunk.ino, t.chunk.index, t.len, t.session),
        (Kind::None, f.ino, 2, 5, 0)
    );
    assert_eq!(t.chunk.data, f.layout.unwrap().components[0].data_id);
    assert_eq!(t.epoch, 1);
    // Growing afterwards needs no storage server.
    c.one(set_size(f.ino, 1 << 30)).await;
    assert!(oss.trims.lock().is_empty());
}

/// What `strake fsck` asks for.
async fn pending(w: &World, kind: u32, after: u64) -> Vec<pb::PendingItem> {
    let request = pb::PendingRequest { kind, after, limit: 10, inos: (1..100).collect() };
    w.ask::<pb::PendingReply>(Role::Server, opcode::PENDING, &request).await.unwrap().items
}

#[tokio::test(start_paused = true)]
async fn nobody_writes_before_what_a_dead_writer_left_is_cut() {
    let w = World::new(1, |_| ()).await;
    let oss = w.oss(1).await;
    let status = || w.mds[0].as_ref().unwrap().1.status();
    until("chains", || status().map.unwrap().sets.len() == 1).await;
    let mut dead = w.client(1).await;
    let f = dead.one(create("f", 2)).await;
    dead.one(Op::Extend(pb::Extend { ino: f.ino, end: 5, holes: false })).await;
    let mut c = w.client(2).await;
    oss.refuse.store(true, Ordering::Relaxed);
    while status().sessions.len() == 2 {
        sleep(Duration::from_secs(1)).await;
        c.renew(false, &[]).await.unwrap();
    }
    c.one(Op::Open(pb::Open { ino: f.ino, flags: 0 })).await;
    let open = c.request(vec![Op::Open(pb::Open { ino: f.ino, flags: 1 })]);
    let r = {
        let held = c.send(&open);
        tokio::pin!(held);
        tokio::select! {
            biased;
            r = &mut held => panic!("answered while the bytes are there: {r:?}"),
            () = sleep(Duration::from_secs(10)) => (),
        }
        oss.refuse.store(false, Ordering::Relaxed);
        held.await.unwrap()
    };
    assert!(oss.evicted.lock().contains(&dead.session), "cut before its writes were fenced");
    assert!(!r[0].capability.is_empty() && r[0].writer > 0);
    let t = oss.trims.lock()[0].clone();
    assert_eq!((t.chunk.ino, t.chunk.index, t.len), (f.ino, 1, 5));
}

#[tokio::test(start_paused = true)]
async fn removed_files_live_while_open_and_their_chunks_go_after() {
    let w = World::new(1, |_| ()).await;
    let oss = w.oss(1).await;
    let mut c = w.client(1).await;
    until("chains", || w.mds[0].as_ref().unwrap().1.status().map.unwrap().sets.len() == 1).await;
    let f = c.one(create("f", 2)).await;
    let kept = c.one(Op::Open(pb::Open { ino: f.ino, flags: 0 })).await;
    assert_eq!(kept.ino, f.ino);
    c.one(unlink("f")).await;
    c.one(Op::Close(pb::Close { ino: f.ino })).await;
    // Past the grace period after the election; the session stays alive by its requests.
    for _ in 0..10 {
        sleep(Duration::from_secs(5)).await;
        c.renew(false, &[]).await.unwrap();
    }
    c.one(Op::Getattr(pb::GetAttr { ino: f.ino })).await;
    assert_eq!(w.server().await.status().orphans, 1);
    assert!(oss.trims.lock().is_empty());
    let data_id = f.layout.as_ref().unwrap().components[0].data_id;
    let wanted = pb::PendingItem { key: f.ino, ino: f.ino, data_id, size: 0 };
    assert_eq!(pending(&w, 1, 0).await, [wanted]);
    assert_eq!(pending(&w, 4, 0).await.len(), 1);
    assert_eq!((pending(&w, 1, f.ino).await, pending(&w, 2, 0).await), (vec![], vec![]));
    oss.refuse.store(true, Ordering::Relaxed);
    c.one(Op::Close(pb::Close { ino: f.ino })).await;
    until("the deletion waits", || w.mds[0].as_ref().unwrap().1.status().gc_queue == 1).await;
    let queued = pending(&w, 2, 0).await;
    assert_eq!(
        (queued.len(), queued[0].ino, queued[0].data_id, queued[0].size),
        (1, f.ino, data_id, 0)
    );
    oss.refuse.store(false, Ordering::Relaxed);
    until("the chunks are removed", || !oss.trims.lock().is_empty()).await;
    let t = oss.trims.lock()[0].clone();
    assert_eq!((t.chunk.ino, t.chunk.index, t.len), (f.ino, 0, u32::MAX));
    let status = || w.mds[0].as_ref().unwrap().1.status();
    until("the queue is empty", || status().gc_queue == 0 && status().orphans == 0).await;
    assert_eq!(c.fails(Op::Getattr(pb::GetAttr { ino: f.ino })).await, Code::NoEnt);
}

#[tokio::test(start_paused = true)]
async fn chunks_go_when_nothing_that_an_evicted_session_sent_can_come_after() {
    let w = World::new(1, |_| ()).await;
    let oss = w.oss(1).await;
    let status = || w.mds[0].as_ref().unwrap().1.status();
    until("chains", || status().map.unwrap().sets.len() == 1).await;
    let f = w.client(1).await.one(create("f", 2)).await;
    let mut c = w.client(2).await;
    oss.busy.store(true, Ordering::Relaxed);
    // The first one is evicted for this.
    w.client_that(3, false, &[1]).await;
    let unlink = c.request(vec![unlink("f")]);
    {
        let mut answered = std::pin::pin!(c.send(&unlink));
        tokio::select! {
            biased;
            r = &mut answered => panic!("answered while something may still be written there: {r:?}"),
            () = until("the deletion waits", || status().gc_queue == 1) => (),
        }
        sleep(Duration::from_secs(5)).await;
        let early = oss.trims.lock().iter().any(|t| t.flags & FLAG_TOMBSTONE != 0);
        assert!(!early && status().gc_queue == 1, "a write of the evicted session may still come");
        oss.busy.store(false, Ordering::Relaxed);
        answered.await.unwrap();
    }
    until("the chunks are removed", || status().gc_queue == 0).await;
    let t = oss.trims.lock().last().cloned().unwrap();
    assert_eq!((t.chunk.ino, t.chunk.index, t.flags & FLAG_TOMBSTONE), (f.ino, 0, FLAG_TOMBSTONE));
}

/// The network delivers each request twice.
#[tokio::test(start_paused = true)]
async fn an_open_and_a_close_that_come_twice_count_once() {
    let (w, _oss) = leases::with_files().await;
    let mut c = leases::Holder::new(&w, 2).await;
    let f = c.one(create("f", 2)).await.results[0].ino;
    let server = w.server().await;
    let opens = || server.status().sessions[0].opens;
    assert_eq!(opens(), 1);
    let close = || Op::Close(pb::Close { ino: f });
    let mut asked = 100;
    for (ops, is) in [
        (vec![close()], 0),
        (vec![leases::open(f, 0), close()], 0),
        (vec![leases::open(f, 0); 2], 1),
    ] {
        for op in ops {
            asked += 1;
            let r = pb::MetaRequest { seq: asked, lowest_unanswered: asked, ..c.request(op) };
            for _ in 0..2 {
                c.send(&r).await;
            }
        }
        assert_eq!(opens(), is);
    }
    // Two handles, of which one is closed; and one that is opened for writing, which is asked for
    // again.
    let r = pb::MetaRequest { seq: 200, lowest_unanswered: 200, ..c.request(close()) };
    for _ in 0..2 {
        c.send(&r).await;
    }
    assert_eq!(opens(), 1, "the other handle is open");
    let written =
        pb::MetaRequest { seq: 201, lowest_unanswered: 201, ..c.request(leases::open(f, 2)) };
    for _ in 0..2 {
        assert!(!c.send(&written).await.results[0].capability.is_empty());
    }
    for seq in [202, 203] {
        let r = pb::MetaRequest { seq, lowest_unanswered: seq, ..c.request(close()) };
        c.send(&r).await;
    }
    assert_eq!(opens(), 0);
}

#[tokio::test(start_paused = true)]
async fn opens_are_reasserted_to_a_new_leader_and_orphans_wait_for_them() {
    let mut w = World::new(3, |_| ()).await;
    let oss = w.oss(1).await;
    let (session, ino) = {
        let mut c = w.client(1).await;
        let server = w.server().await;
        until("chains", || server.status().map.unwrap().sets.len() == 1).await;
        let f = c.one(create("f", 2)).await;
        c.one(unlink("f")).await;
        (c.session, f.ino)
    };
    let leader = w.leader().await;
    w.kill(leader);
    let renew = |reassert| pb::SessionRenewRequest {
        level: strake_proto::FEATURE_LEVEL,
        session,
        reassert,
        opens: vec![ino],
        ..Default::default()
    };
    let _: pb::SessionRenewReply =
        w.ask(Role::Client, opcode::SESSION_RENEW, &renew(true)).await.unwrap();
    for _ in 0..8 {
        sleep(Duration::from_secs(6)).await;
        let _: pb::SessionRenewReply =
            w.ask(Role::Client, opcode::SESSION_RENEW, &renew(false)).await.unwrap();
    }
    assert_eq!(w.server().await.status().orphans, 1);
    // The holder dies: its term runs out, the file is removed, and storage servers are told to
    // fence it.
    let server = w.server().await;
    until("the orphan is freed", || {
        server.status().orphans == 0 && server.status().sessions.is_empty()
    })
    .await;
    until("its chunks are removed", || !oss.trims.lock().is_empty()).await;
    until("the session is fenced", || oss.evicted.lock().contains(&session)).await;
    let e = w
        .ask::<pb::SessionRenewReply>(Role::Client, opcode::SESSION_RENEW, &renew(true))
        .await
        .unwrap_err();
    assert_eq!(e.code, Code::NoSession);
}

#[tokio::test(start_paused = true)]
async fn a_file_without_a_name_lives_as_long_as_it_is_open() {
    let w = World::new(1, |c| (c.root_uid, c.root_gid) = (5, 6)).await;
    let _oss = w.oss(1).await;
    let mut c = w.client(1).await;
    let server = w.server().await;
    until("chains", || server.status().map.unwrap().sets.len() == 1).await;
    let top = c.one(Op::Getattr(pb::GetAttr { ino: ROOT_INO })).await.attr.unwrap();
    assert_eq!((top.uid, top.gid, top.mode), (5, 6, 0o040_755), "as configured");
    let make = pb::Tmpfile {
        parent: ROOT_INO,
        mode: 0o600,
        flags: 2,
        linkable: true,
        ..Default::default()
    };
    let f = c.one(Op::Tmpfile(make)).await;
    assert_eq!((f.capability.len(), f.attr.unwrap().nlink), (64, 0));
    for _ in 0..4 {
        sleep(Duration::from_secs(6)).await;
        c.one(Op::Getattr(pb::GetAttr { ino: f.ino })).await;
    }
    assert_eq!(server.status().orphans, 1);
    c.one(Op::Close(pb::Close { ino: f.ino })).await;
    until("it is freed", || server.status().orphans == 0).await;
}

#[tokio::test(start_paused = true)]
async fn hostile_clients_are_refused_without_harm() {
    let w = World::new(1, |_| ()).await;
    let mut c = w.client(1).await;
    c.one(mkdir("d")).await;
    let before = w.server().await.status().map.unwrap();
    for op in [opcode::REGISTER, opcode::HEARTBEAT, opcode::PENDING, opcode::RAFT, opcode::SNAPSHOT]
    {
        let e = w.ask_at(0, Role::Client, op, Default::default()).await.unwrap_err();
        assert_eq!(e.code, Code::Access, "{op:#x}");
    }
    for op in [
        opcode::META,
        opcode::SESSION_OPEN,
        opcode::SESSION_RENEW,
        opcode::SESSION_CLOSE,
        opcode::MAP,
    ] {
        for garbage in [
            &b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"[..],
            &[0x0a, 0x7f, 1],
            &[0x2a, 0xff, 0xff, 0xff, 0xff, 0x0f],
        ] {
            let r = w.ask_at(0, Role::Client, op, bytes::Bytes::copy_from_slice(garbage)).await;
            assert!(
                matches!(r.as_ref().unwrap_err().code, Code::Protocol),
                "{op:#x} {garbage:?}: {r:?}"
            );
        }
    }
    for op in [opcode::READ, 0, 0xffff] {
        assert_eq!(
            w.ask_at(0, Role::Client, op, Default::default()).await.unwrap_err().code,
            Code::OpNotSupp
        );
    }
    let mut foreign = c.request(vec![mkdir("e")]);
    foreign.session = 999;
    assert_eq!(c.send(&foreign).await.unwrap_err().code, Code::NoSession);
    foreign.session = 0;
    assert_eq!(c.send(&foreign).await.unwrap_err().code, Code::NoSession);
    let nothing = pb::Op { op: None };
    let mut long = c.request(vec![]);
    long.ops = vec![nothing.clone(); 10_000];
    assert_eq!(c.send(&long).await.unwrap_err().code, Code::TooBig);
    // None of 2 million operations is decoded, whoever sends them.
    let bomb = [0x2a, 0].repeat(2 << 20);
    for op in [opcode::META, opcode::SESSION_OPEN] {
        let e = w.ask_at(0, Role::Client, op, bomb.clone().into()).await.unwrap_err();
        assert_eq!(e.code, Code::TooBig);
    }
    long.ops = vec![nothing];
    let refused = c.send(&long).await;
    assert!(refused.is_err() || refused.unwrap()[0].status.as_ref().unwrap().code != 0);
    // Servers' reports count only if they fit the map, too.
    for h in [
        pb::HeartbeatRequest { level: strake_proto::FEATURE_LEVEL, ..Default::default() },
        pb::HeartbeatRequest {
            level: strake_proto::FEATURE_LEVEL,
            node: 1001,
            ..Default::default()
        },
    ] {
        let r = w.ask::<pb::HeartbeatReply>(Role::Server, opcode::HEARTBEAT, &h).await;
        assert_eq!(r.unwrap_err().code, Code::Stale);
    }
    let r = w
        .ask::<pb::RegisterReply>(
            Role::Server,
            opcode::REGISTER,
            &pb::RegisterRequest { level: strake_proto::FEATURE_LEVEL, ..Default::default() },
        )
        .await;
    assert_eq!(r.unwrap_err().code, Code::Inval);
    assert_eq!(w.server().await.status().map.unwrap(), before);
    c.one(lookup("d")).await;
    let echo = w.ask_at(0, Role::Client, opcode::ECHO, "hello".into()).await.unwrap();
    assert_eq!(&echo.body[..], b"hello");
    let noisy = pb::SessionOpenRequest {
        level: strake_proto::FEATURE_LEVEL,
        client_uuid: vec![9; 16].into(),
        hostname: "\x1b[2J".into(),
        ..Default::default()
    };
    let r = w.ask::<pb::SessionOpenReply>(Role::Client, opcode::SESSION_OPEN, &noisy).await;
    assert_eq!(r.unwrap_err().code, Code::Inval);
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_refuses_changes_and_recovers() {
    let w = World::new(1, |_| ()).await;
    let mut c = w.client(1).await;
    c.one(mkdir("before")).await;
    w.logs[0].set_fault(Some(strake_proto::Error::new(Code::NoSpc, "no space left on device")));
    let r = c.request(vec![mkdir("during")]);
    let body: bytes::Bytes = r.encode_to_vec().into();
    let sent = tokio::time::timeout(
        Duration::from_secs(20),
        w.ask_at(0, Role::Client, opcode::META, body),
    )
    .await;
    let e = sent.expect("an answer").unwrap_err();
    assert!(
        matches!(e.code, Code::NoSpc | Code::NotLeader | Code::Disconnected | Code::Overloaded),
        "{e:?}"
    );
    w.logs[0].set_fault(None);
    let made = c.send(&r).await.unwrap();
    assert_eq!(c.one(lookup("during")).await.ino, made[0].ino);
    c.one(lookup("before")).await;
}
