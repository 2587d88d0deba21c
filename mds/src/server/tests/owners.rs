//! Sessions belong to their clients: guessing ids lets no other client close or use them, and no
//! client can have all of them.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use bytes::Bytes;
use strake_fabric::Message;
use strake_proto::Result;

use super::{world::Client, *};

async fn call<R: prost::Message + Default>(
    conn: &dyn strake_fabric::Connection,
    opcode: u16,
    body: &impl prost::Message,
) -> Result<R> {
    let m = Message::new(opcode, body.encode_to_vec());
    let r = conn.call(m, Duration::from_secs(40)).await?;
    Ok(R::decode(r.body).unwrap())
}

#[tokio::test(start_paused = true)]
async fn a_session_is_touched_only_by_who_knows_its_uuid() {
    let w = World::new(1, |_| ()).await;
    let at = w.leader().await as u32 + 1;
    let uuid: Bytes = vec![9; 16].into();
    let open = pb::SessionOpenRequest {
        level: strake_proto::FEATURE_LEVEL,
        client_uuid: uuid.clone(),
        proves: true,
        ..Default::default()
    };
    let own = w.net.connect(at, Role::Client);
    let r: pb::SessionOpenReply = call(&*own, opcode::SESSION_OPEN, &open).await.unwrap();
    let mut c = Client { world: &w, session: r.session, open: r, seq: 0 };
    // On the connection that it was opened on nothing more is needed.
    let _: pb::MetaReply =
        call(&*own, opcode::META, &c.request(vec![mkdir("mine")])).await.unwrap();

    let stranger = w.net.connect(at, Role::Client);
    let session = c.session;
    let poison = pb::MetaRequest {
        seq: u64::MAX - 1,
        lowest_unanswered: u64::MAX - 1,
        ..c.request(vec![mkdir("poison")])
    };
    c.seq -= 1;
    let renew = pb::SessionRenewRequest {
        level: strake_proto::FEATURE_LEVEL,
        session,
        hello: true,
        connection: u64::MAX,
        ..Default::default()
    };
    let guess = pb::SessionRenewRequest { client_uuid: vec![8; 16].into(), ..renew.clone() };
    let recall = pb::RecallRequest { session, acknowledged: u64::MAX, ..Default::default() };
    for (what, e) in [
        (
            "close",
            call::<pb::SessionCloseReply>(
                &*stranger,
                opcode::SESSION_CLOSE,
                &pb::SessionCloseRequest { session },
            )
            .await
            .err(),
        ),
        ("change", call::<pb::MetaReply>(&*stranger, opcode::META, &poison).await.err()),
        (
            "read",
            call::<pb::MetaReply>(&*stranger, opcode::META, &c.request(vec![lookup("mine")]))
                .await
                .err(),
        ),
        (
            "renew",
            call::<pb::SessionRenewReply>(&*stranger, opcode::SESSION_RENEW, &renew).await.err(),
        ),
        (
            "guess",
            call::<pb::SessionRenewReply>(&*stranger, opcode::SESSION_RENEW, &guess).await.err(),
        ),
        ("recall", call::<pb::RecallReply>(&*stranger, opcode::RECALL, &recall).await.err()),
        (
            "wait",
            call::<pb::LockWaitReply>(
                &*stranger,
                opcode::LOCK_WAIT,
                &pb::LockWaitRequest { session, ..Default::default() },
            )
            .await
            .err(),
        ),
    ] {
        assert_eq!(e.map(|e| e.code), Some(Code::Access), "{what}");
    }
    let _: pb::MetaReply =
        call(&*own, opcode::META, &c.request(vec![mkdir("still")])).await.unwrap();

    // Its client uses another connection, and names its uuid.
    let again = w.net.connect(at, Role::Client);
    let renew = pb::SessionRenewRequest {
        level: strake_proto::FEATURE_LEVEL,
        session,
        client_uuid: uuid,
        ..Default::default()
    };
    let _: pb::SessionRenewReply = call(&*again, opcode::SESSION_RENEW, &renew).await.unwrap();
    let _: pb::MetaReply =
        call(&*again, opcode::META, &c.request(vec![mkdir("again")])).await.unwrap();
    let close = pb::SessionCloseRequest { session };
    let _: pb::SessionCloseReply = call(&*again, opcode::SESSION_CLOSE, &close).await.unwrap();
    let e = call::<pb::MetaReply>(&*stranger, opcode::META, &c.request(vec![mkdir("late")]))
        .await
        .unwrap_err();
    assert_eq!(e.code, Code::NoSession, "that it has ended anybody may know");
}

#[tokio::test(start_paused = true)]
async fn one_connection_does_not_open_all_sessions() {
    let w = World::new(1, |_| ()).await;
    let greedy = w.net.connect(w.leader().await as u32 + 1, Role::Client);
    let mut refused = None;
    for n in 0..1000u64 {
        let client_uuid = [n.to_le_bytes(), [7; 8]].concat().into();
        let open = pb::SessionOpenRequest {
            level: strake_proto::FEATURE_LEVEL,
            client_uuid,
            ..Default::default()
        };
        if let Err(e) = call::<pb::SessionOpenReply>(&*greedy, opcode::SESSION_OPEN, &open).await {
            refused = Some((n, e));
            break;
        }
    }
    let (n, e) = refused.unwrap();
    assert!(
        n == 64 && e.code == Code::Overloaded && e.message.contains("one connection"),
        "{n}: {e}"
    );
    w.client(1).await.one(mkdir("another")).await;
}

#[tokio::test(start_paused = true)]
async fn too_many_groups_and_too_much_work_are_refused_before_the_log() {
    let w = World::new(1, |_| ()).await;
    let mut c = w.client(1).await;
    let creds = Some(pb::Creds { uid: 5, gid: 5, groups: vec![5; 70_000] });
    let many = pb::MetaRequest { creds, ..c.request(vec![mkdir("a")]) };
    assert_eq!(c.send(&many).await.unwrap_err().code, Code::TooBig);
    // Groups that appear more than once are logged once.
    let creds = Some(pb::Creds { uid: 0, gid: 5, groups: [9, 7].repeat(20_000) });
    let double = pb::MetaRequest { creds, ..c.request(vec![mkdir("b")]) };
    assert!(c.send(&double).await.unwrap()[0].status.is_none());
    // Heavy lists run one after the other, and all of them do.
    let long = |n: usize| (0..1500).map(|i| mkdir(&format!("{n}-{i}"))).collect::<Vec<_>>();
    let (mut a, mut b) = (w.client(2).await, w.client(3).await);
    let (a, b) = tokio::join!(a.run(long(1)), b.run(long(2)));
    assert!(a.unwrap().iter().chain(&b.unwrap()).all(|r| r.status.is_none()));
}

#[tokio::test(start_paused = true)]
async fn a_session_that_jumps_in_its_numbers_harms_itself_alone() {
    let w = World::new(1, |_| ()).await;
    let (mut a, mut b) = (w.client(1).await, w.client(2).await);
    a.one(mkdir("a")).await;
    b.one(mkdir("b")).await;
    let server = w.server().await;
    let log = || server.mds.member.machine.namespace.version();
    let before = log();
    let numbered = |c: &mut Client<'_>, seq, lowest, name: &str| {
        let own = c.seq;
        let r = pb::MetaRequest { seq, lowest_unanswered: lowest, ..c.request(vec![mkdir(name)]) };
        c.seq = own;
        r
    };
    // Neither the ends of the range, nor numbers that no client reaches, get as far as the log.
    for seq in [u64::MAX, u64::MAX - 1, 1 << 63, a.seq + (1 << 48) + 1] {
        let r = numbered(&mut a, seq, seq, "jump");
        let e = a.send(&r).await.unwrap_err();
        assert!(e.code == Code::Inval && e.message.contains("increase by one"), "{seq}: {e}");
    }
    let r = numbered(&mut a, 0, 0, "none");
    assert_eq!(a.send(&r).await.unwrap_err().code, Code::Inval);
    assert_eq!(log(), before);
    // Refused requests changed nothing: the session continues.
    a.one(mkdir("goes on")).await;
    // As far as it may: then all lower numbers are used up, for this session.
    let far = a.seq + (1 << 40);
    let r = numbered(&mut a, far, far, "far");
    assert!(a.send(&r).await.unwrap()[0].status.is_none());
    let before = log();
    let r = numbered(&mut a, far - 1, far - 1, "behind");
    assert_eq!(a.send(&r).await.unwrap_err().code, Code::ReplyGone);
    assert_eq!(log(), before, "what is behind is not logged either");
    a.seq = far;
    a.one(mkdir("still")).await;
    b.one(mkdir("untouched")).await;
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_changes_leaves_the_next_turn_to_another_client() {
    const EACH: usize = 900;
    let w = World::new(1, |_| ()).await;
    let mut victim = w.client(9).await;
    let at = w.leader().await as u32 + 1;
    let (flood, own) = (w.net.connect(at, Role::Client), w.net.connect(at, Role::Client));
    let done = Arc::new(AtomicUsize::new(0));
    let mut tasks = Vec::new();
    let mut clients = Vec::new();
    for n in 1..=4u8 {
        clients.push(w.client(n).await);
    }
    for (n, c) in clients.iter_mut().enumerate() {
        for i in 0..EACH {
            let r = pb::MetaRequest {
                lowest_unanswered: 1,
                ..c.request(vec![mkdir(&format!("{n}-{i}"))])
            };
            let (flood, done) = (flood.clone(), done.clone());
            tasks.push(tokio::spawn(async move {
                let r = call::<pb::MetaReply>(&*flood, opcode::META, &r).await;
                done.fetch_add(usize::from(r.is_ok()), Relaxed);
                r.map(|_| ())
            }));
        }
    }
    // All of them have been asked by then, and none is answered.
    tokio::task::yield_now().await;
    let r = victim.request(vec![mkdir("victim")]);
    let _: pb::MetaReply = call(&*own, opcode::META, &r).await.unwrap();
    let before = done.load(Relaxed);
    assert!(before <= 600, "{before} were before it");
    for t in tasks {
        // Those beyond the number that may wait are told so.
        let r = t.await.unwrap();
        assert!(r.is_ok() || r.as_ref().is_err_and(|e| e.code == Code::Overloaded), "{r:?}");
    }
    assert!(done.load(Relaxed) > 1024, "what waited had its turn later");
    assert_eq!(w.server().await.mds.changes.fair.changes.in_work(), 0);
}
