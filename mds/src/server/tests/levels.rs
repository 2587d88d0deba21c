//! Feature levels: reports, raising, and what older programs are told.

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::Mutex;
use prost::Message as _;
use strake_proto::{Error, FEATURE_LEVEL, Result};
use strake_store::{Batch, MetaStore as _, Reader as _};

use super::*;
use pb::members_request::Change;

/// Members with these ids pretend that they know level 0 only.
type Older = Arc<Mutex<BTreeSet<u64>>>;

/// A cluster that has this level at first.
async fn world(first: u32, older: &[u64]) -> (World, Older) {
    let older: Older = Arc::new(Mutex::new(older.iter().copied().collect()));
    let of_config = older.clone();
    let w = World::new(3, move |cfg| {
        cfg.begin_at_level(first);
        if of_config.lock().contains(&cfg.id) {
            cfg.pretend_level(0);
        }
    });
    (w.await, older)
}

async fn raise(w: &World, evict: bool) -> Result<()> {
    let change = Some(Change::Raise(pb::RaiseRequest { to: 1, evict }));
    let body = pb::MembersRequest { change, levels: false };
    w.ask::<pb::MembersReply>(Role::Server, opcode::MEMBERS, &body).await.map(drop)
}

async fn levels(w: &World) -> pb::Levels {
    let body = pb::MembersRequest { change: None, levels: true };
    let r: pb::MembersReply = w.ask(Role::Server, opcode::MEMBERS, &body).await.unwrap();
    r.levels.expect("asked for, of the leader")
}

/// Raises the level once everybody has reported.
async fn raised(w: &World) {
    for _ in 0..600 {
        if raise(w, false).await.is_ok() {
            return;
        }
        sleep(Duration::from_millis(50)).await;
    }
    raise(w, false).await.unwrap();
}

fn level_of(w: &World, i: usize) -> u32 {
    let map = w.mds[i].as_ref().unwrap().1.status().map.unwrap();
    map.level
}

async fn all_have(w: &World, level: u32) {
    until("the level is everywhere", || (0..w.mds.len()).all(|i| level_of(w, i) == level)).await;
}

fn is_told(e: &Error, code: Code) {
    assert_eq!(e.code, code, "{e}");
    for word in ["feature level 1", "knows level 0", "run a newer strake"] {
        assert!(e.message.contains(word), "{e}");
    }
    assert!(!e.message.contains('\n'), "one sentence: {e}");
}

fn renewal(session: u64, level: u32) -> pb::SessionRenewRequest {
    pb::SessionRenewRequest { session, level, ..Default::default() }
}

fn opening(uuid: u8, level: u32) -> pb::SessionOpenRequest {
    let client_uuid = vec![uuid; 16].into();
    pb::SessionOpenRequest {
        client_uuid,
        hostname: format!("h{uuid}"),
        level,
        ..Default::default()
    }
}

#[tokio::test(start_paused = true)]
async fn a_new_cluster_has_the_level_of_its_program() {
    let (w, _) = world(FEATURE_LEVEL, &[]).await;
    w.client(1).await;
    all_have(&w, FEATURE_LEVEL).await;
    raise(&w, false).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn the_level_is_raised_when_everybody_knows_it() {
    let (mut w, older) = world(0, &[3]).await;
    let oss = w.oss(1).await;
    oss.older.store(true, Ordering::Relaxed);
    let open: pb::SessionOpenReply =
        w.ask(Role::Client, opcode::SESSION_OPEN, &opening(1, 0)).await.unwrap();
    if w.leader().await == 2 {
        w.server().await.node().transfer(1).await.unwrap();
    }
    let e = loop {
        let e = raise(&w, false).await.unwrap_err();
        // The new leader has to hear of everybody first.
        if !e.message.contains("has not said") {
            break e;
        }
        let _: Result<pb::SessionRenewReply> =
            w.ask(Role::Client, opcode::SESSION_RENEW, &renewal(open.session, 0)).await;
        sleep(Duration::from_millis(300)).await;
    };
    assert_eq!(e.code, Code::OpNotSupp);
    for word in [
        "metadata server 3 knows level 0",
        "storage server oss-1 knows level 0",
        "the mount on h1 knows level 0",
    ] {
        assert!(e.message.contains(word), "{e}");
    }
    let told = levels(&w).await;
    assert_eq!((told.level, told.members.len(), told.sessions.len()), (0, 3, 1));
    assert_eq!(told.servers[0].knows, Some(0));

    // All are replaced by newer ones, and the cluster serves meanwhile.
    w.kill(2);
    older.lock().clear();
    w.start(2).await;
    oss.older.store(false, Ordering::Relaxed);
    let _: pb::SessionRenewReply =
        w.ask(Role::Client, opcode::SESSION_RENEW, &renewal(open.session, 1)).await.unwrap();
    raised(&w).await;
    all_have(&w, 1).await;
    raise(&w, false).await.unwrap();
    assert_eq!(levels(&w).await.level, 1);
    let mut c = w.client(2).await;
    c.one(mkdir("d")).await;
    until("storage servers have it", || oss.map.lock().level == 1).await;
}

#[tokio::test(start_paused = true)]
async fn older_programs_are_refused_in_one_sentence() {
    let (mut w, older) = world(0, &[]).await;
    let oss = w.oss(1).await;
    let old: pb::SessionOpenReply =
        w.ask(Role::Client, opcode::SESSION_OPEN, &opening(1, 0)).await.unwrap();
    // While it does not run, a member counts with what it last said, for a minute.
    let away = (w.leader().await + 1) % 3;
    until("it has reported", || w.mds[away].as_ref().unwrap().1.status().map.is_some()).await;
    sleep(Duration::from_secs(1)).await;
    w.kill(away);
    let e = raise(&w, false).await.unwrap_err();
    assert!(e.message.contains("the mount on h1 knows level 0"), "{e}");
    raise(&w, true).await.unwrap();

    let renew = renewal(old.session, 0);
    let renewed: Result<pb::SessionRenewReply> =
        w.ask(Role::Client, opcode::SESSION_RENEW, &renew).await;
    is_told(&renewed.unwrap_err(), Code::NoSession);
    let look = pb::MetaRequest {
        session: old.session,
        ops: vec![pb::Op { op: Some(lookup("x")) }],
        ..Default::default()
    };
    let looked: Result<pb::MetaReply> = w.ask(Role::Client, opcode::META, &look).await;
    is_told(&looked.unwrap_err(), Code::NoSession);
    let opened: Result<pb::SessionOpenReply> =
        w.ask(Role::Client, opcode::SESSION_OPEN, &opening(1, 0)).await;
    is_told(&opened.unwrap_err(), Code::OpNotSupp);
    let register = pb::RegisterRequest { name: "oss-7".into(), ..Default::default() };
    let registered: Result<pb::RegisterReply> =
        w.ask(Role::Server, opcode::REGISTER, &register).await;
    is_told(&registered.unwrap_err(), Code::Inval);
    let beat = pb::HeartbeatRequest { node: 1001, ..Default::default() };
    let beaten: Result<pb::HeartbeatReply> = w.ask(Role::Server, opcode::HEARTBEAT, &beat).await;
    let e = beaten.unwrap_err();
    is_told(&e, Code::Stale);
    assert!(e.message.contains("storage server 'oss-1'"), "{e}");
    drop(oss);

    // An older program on the folder of the member that was away is neither heard nor told
    // anything.
    older.lock().insert(away as u64 + 1);
    w.start(away).await;
    let leader = w.leader().await;
    let mut c = w.client(2).await;
    c.one(mkdir("d")).await;
    sleep(Duration::from_secs(10)).await;
    assert_eq!((level_of(&w, away), w.leader().await), (0, leader));
    // With its new program it goes on where it was.
    w.kill(away);
    older.lock().clear();
    w.start(away).await;
    all_have(&w, 1).await;

    // Nor is a new server with an older program taken in.
    older.lock().insert(4);
    let i = w.join().await;
    let learn = pb::MemberLearn { endpoint: format!("sim:{}", i + 1) };
    let body = pb::MembersRequest { change: Some(Change::Learn(learn)), levels: false };
    let learned: Result<pb::MembersReply> = w.ask(Role::Server, opcode::MEMBERS, &body).await;
    is_told(&learned.unwrap_err(), Code::Inval);
}

#[tokio::test(start_paused = true)]
async fn an_older_member_does_not_get_the_first_entry_of_a_new_cluster() {
    let (mut w, older) = world(FEATURE_LEVEL, &[3]).await;
    // If the older one led first, the cluster would have its level.
    let made_by_new = w.leader().await != 2;
    let mut c = w.client(1).await;
    c.one(mkdir("d")).await;
    sleep(Duration::from_secs(5)).await;
    if made_by_new {
        let header = w.mds[2].as_ref().unwrap().1.status().map.unwrap();
        assert!(header.fs_uuid.is_empty(), "it has applied nothing");
    }
    w.kill(2);
    older.lock().clear();
    w.start(2).await;
    all_have(&w, u32::from(made_by_new)).await;
}

/// A program from before levels skips `RaiseLevel` when it applies its log.
#[tokio::test(start_paused = true)]
async fn a_state_that_an_older_program_went_on_with_is_replaced() {
    let (mut w, _) = world(0, &[]).await;
    let mut c = w.client(1).await;
    raised(&w).await;
    all_have(&w, 1).await;
    c.one(mkdir("d")).await;
    let i = (w.leader().await + 1) % 3;
    let map = w.mds[i].as_ref().unwrap().1.status().map.unwrap();
    w.kill(i);
    let without = pb::ClusterMap { level: 0, level_index: 0, ..map };
    let mut b = Batch::default();
    b.put(bytes::Bytes::from_static(b"M"), without.encode_to_vec());
    w.stores[i].commit(b).unwrap();
    assert!(w.stores[i].get(b"M").unwrap().is_some());
    w.start(i).await;
    all_have(&w, 1).await;
}
