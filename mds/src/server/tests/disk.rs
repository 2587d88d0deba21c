//! Servers on folders and loopback TCP.

use std::{net::TcpListener, path::Path, time::Duration};

use prost::Message as _;
use strake_fabric::{Endpoint, Fabric, Identity, Message, Pool, tcp::TcpFabric};
use strake_proto::{Code, Error, Result, cap::derive_key, ids::ROOT_INO, opcode, pb};
use strake_runtime::Env;
use tokio::time::{sleep, timeout};

use crate::server::{Config, MdsServer, start_on_disk};
use pb::members_request::Change;

pub(super) const KEY: [u8; 32] = [8; 32];

/// Ports that were free a moment ago.
fn free_ports(n: usize) -> Vec<u16> {
    let held: Vec<TcpListener> =
        (0..n).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    held.iter().map(|l| l.local_addr().unwrap().port()).collect()
}

pub(super) fn configs(dir: &Path, n: usize) -> Vec<Config> {
    let ports = free_ports(n);
    let at = |i: usize| Endpoint::Tcp("127.0.0.1".into(), ports[i]);
    let peers: Vec<(u64, Endpoint)> = (0..n).map(|i| (i as u64 + 1, at(i))).collect();
    (0..n)
        .map(|i| Config {
            peers: peers.clone(),
            ..Config::new(i as u64 + 1, at(i), dir.join(format!("m{i}")))
        })
        .collect()
}

pub(super) async fn start_all(cfgs: &[Config]) -> Vec<Option<MdsServer>> {
    let mut all = Vec::new();
    for c in cfgs {
        all.push(Some(start_on_disk(c.clone(), Env::system(), KEY).await.unwrap()));
    }
    all
}

pub(super) fn client_fabric() -> TcpFabric {
    let identity = Identity::client(derive_key(&KEY, "strake client v1"));
    TcpFabric::new(Env::system(), identity, None, Pool::default(), Default::default())
}

/// Asks one server after the other until the leader answers.
pub(super) async fn ask<R: prost::Message + Default>(
    cfgs: &[Config],
    opcode: u16,
    body: &impl prost::Message,
) -> Result<R> {
    let fabric = client_fabric();
    let body = body.encode_to_vec();
    let attempt = async {
        loop {
            for c in cfgs {
                let Ok(conn) = fabric.connect(&c.listen, None).await else { continue };
                match conn.call(Message::new(opcode, body.clone()), Duration::from_secs(5)).await {
                    Ok(m) => {
                        return R::decode(m.body)
                            .map_err(|e| Error::new(Code::Protocol, e.to_string()));
                    }
                    Err(e) if e.is_retryable() => (),
                    Err(e) => return Err(e),
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(60), attempt).await.expect("an answer within a minute")
}

fn mkdir(session: u64, seq: u64, name: &str) -> pb::MetaRequest {
    let op = pb::op::Op::Mkdir(pb::Mkdir {
        parent: ROOT_INO,
        name: name.as_bytes().to_vec().into(),
        mode: 0o755,
        umask: 0,
    });
    pb::MetaRequest {
        session,
        seq,
        lowest_unanswered: seq,
        creds: Some(pb::Creds::default()),
        ops: vec![pb::Op { op: Some(op) }],
        ..Default::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_members_on_disk_survive_a_leaders_end_and_a_full_restart() {
    let dir = tempfile::tempdir().unwrap();
    let cfgs = configs(dir.path(), 3);
    let mut all = start_all(&cfgs).await;
    let open = pb::SessionOpenRequest {
        level: strake_proto::FEATURE_LEVEL,
        client_uuid: vec![1; 16].into(),
        ..Default::default()
    };
    let s: pb::SessionOpenReply = ask(&cfgs, opcode::SESSION_OPEN, &open).await.unwrap();
    let first: pb::MetaReply = ask(&cfgs, opcode::META, &mkdir(s.session, 1, "a")).await.unwrap();
    assert!(first.results[0].ino > 1);
    let leader = all.iter().position(|m| m.as_ref().unwrap().leads()).unwrap();
    drop(all[leader].take());
    let again: pb::MetaReply = ask(&cfgs, opcode::META, &mkdir(s.session, 1, "a")).await.unwrap();
    assert_eq!(again, first, "a retry at the next leader");
    let second: pb::MetaReply = ask(&cfgs, opcode::META, &mkdir(s.session, 2, "b")).await.unwrap();
    assert!(second.results[0].ino > first.results[0].ino);
    for m in all.into_iter().flatten() {
        m.shutdown().await;
    }
    // A folder is released when its server is gone.
    let restart = async {
        loop {
            match start_on_disk(cfgs[0].clone(), Env::system(), KEY).await {
                Ok(m) => return m,
                Err(e) if e.code == Code::Busy => sleep(Duration::from_millis(20)).await,
                Err(e) => panic!("{e}"),
            }
        }
    };
    let mut all = vec![timeout(Duration::from_secs(60), restart).await.unwrap()];
    for c in &cfgs[1..] {
        all.push(start_on_disk(c.clone(), Env::system(), KEY).await.unwrap());
    }
    let r: pb::MetaReply = ask(&cfgs, opcode::META, &mkdir(s.session, 2, "b")).await.unwrap();
    assert_eq!(r, second);
}

pub(super) async fn leader_of(all: &[Option<MdsServer>]) -> usize {
    let found = async {
        loop {
            match all.iter().position(|m| m.as_ref().is_some_and(MdsServer::leads)) {
                Some(i) => return i,
                None => sleep(Duration::from_millis(20)).await,
            }
        }
    };
    timeout(Duration::from_secs(60), found).await.expect("a leader within a minute")
}

/// Makes member `to` the leader.
pub(super) async fn transfer(cfgs: &[Config], all: &[Option<MdsServer>], to: usize) {
    let done = async {
        while leader_of(all).await != to {
            let leader = leader_of(all).await;
            if let Err(e) = all[leader].as_ref().unwrap().node().transfer(cfgs[to].id).await {
                assert!(e.is_retryable() || e.code == Code::Busy, "{e}");
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_secs(60), done).await.expect("another leader within a minute");
}

/// Asks the leader, which may change on a slow machine, until it is done.
async fn change_members(cfgs: &[Config], all: &[Option<MdsServer>], change: Change) {
    let fabric = TcpFabric::new(
        Env::system(),
        Identity::server(&KEY),
        None,
        Pool::default(),
        Default::default(),
    );
    let body = pb::MembersRequest { change: Some(change), levels: false }.encode_to_vec();
    let done = async {
        loop {
            let at = &cfgs[leader_of(all).await].listen;
            let conn = fabric.connect(at, None).await.unwrap();
            match conn
                .call(Message::new(opcode::MEMBERS, body.clone()), Duration::from_secs(5))
                .await
            {
                Ok(_) => return,
                // An earlier try whose answer was lost.
                Err(e) if e.message.contains("is not a learner") => return,
                Err(e) => assert!(e.is_retryable() || e.code == Code::Busy, "{e}"),
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_secs(60), done).await.expect("a member changed within a minute");
}

/// A new member learns, takes the place of an old one, and the group goes on without it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let mut cfgs = configs(dir.path(), 4);
    let joiner = Config { join: true, ..cfgs.pop().unwrap() };
    for c in &mut cfgs {
        c.peers.pop();
    }
    let mut all = start_all(&cfgs).await;
    let open = pb::SessionOpenRequest {
        level: strake_proto::FEATURE_LEVEL,
        client_uuid: vec![1; 16].into(),
        ..Default::default()
    };
    let s: pb::SessionOpenReply = ask(&cfgs, opcode::SESSION_OPEN, &open).await.unwrap();
    let _: pb::MetaReply = ask(&cfgs, opcode::META, &mkdir(s.session, 1, "a")).await.unwrap();
    let old = (leader_of(&all).await + 1) % 3;
    drop(all[old].take());
    let new = start_on_disk(joiner.clone(), Env::system(), KEY).await.unwrap();
    change_members(
        &cfgs,
        &all,
        Change::Learn(pb::MemberLearn { endpoint: joiner.listen.to_string() }),
    )
    .await;
    // Busy until the learner has caught up.
    let step = pb::MemberStep { promote: vec![4], remove: vec![old as u64 + 1] };
    change_members(&cfgs, &all, Change::Step(step)).await;
    let leader = leader_of(&all).await;
    // The leader goes too: of the three members two are left, one of them the new one.
    drop(all[leader].take());
    let now: Vec<Config> = cfgs.iter().cloned().chain([joiner]).collect();
    let r: pb::MetaReply = ask(&now, opcode::META, &mkdir(s.session, 2, "b")).await.unwrap();
    assert!(r.results[0].ino > 1);
    // The new leader records the members it finds; the new member applies that when it starts.
    let recorded = async {
        let named = |id: usize| {
            new.status().map.unwrap_or_default().nodes.iter().any(|n| n.id == id as u32)
        };
        while !named(4) || named(old + 1) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(60), recorded)
        .await
        .expect("the map does not name the new member and forget the old one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn administration_answers_over_grpc() {
    let dir = tempfile::tempdir().unwrap();
    let mut cfgs = configs(dir.path(), 1);
    cfgs[0].admin = Some(([127, 0, 0, 1], free_ports(1)[0]).into());
    let _server = start_all(&cfgs).await;
    let open = pb::SessionOpenRequest {
        level: strake_proto::FEATURE_LEVEL,
        client_uuid: vec![1; 16].into(),
        hostname: "h".into(),
        ..Default::default()
    };
    let _: pb::SessionOpenReply = ask(&cfgs, opcode::SESSION_OPEN, &open).await.unwrap();
    let at = cfgs[0].admin.unwrap().to_string();
    let mut admin =
        pb::admin_client::AdminClient::new(strake_fabric::admin::connect(&at, &KEY).await.unwrap());
    let s = admin.status(pb::StatusRequest::default()).await.unwrap().into_inner();
    assert_eq!((s.role.as_str(), s.sessions[0].hostname.as_str()), ("mds", "h"));
    assert_eq!(s.raft.unwrap().leader, 1);
    let pool = |action| pb::PoolChangeRequest { pool: "fast".into(), action, targets: vec![] };
    admin.pool_change(pool(1)).await.unwrap();
    assert_eq!(admin.pool_change(pool(1)).await.unwrap_err().code(), tonic::Code::AlreadyExists);
    for n in 1..256 {
        let p = pb::PoolChangeRequest { pool: format!("p{n}"), ..pool(1) };
        admin.pool_change(p).await.unwrap();
    }
    let full = admin
        .pool_change(pb::PoolChangeRequest { pool: "more".into(), ..pool(1) })
        .await
        .unwrap_err();
    assert!(full.message().contains("there are 256 pools"), "{full}");
    admin.pool_change(pool(4)).await.unwrap();
    admin.pool_change(pool(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_server_on_the_same_folder_or_with_another_key_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cfgs = configs(dir.path(), 1);
    let running = start_on_disk(cfgs[0].clone(), Env::system(), KEY).await.unwrap();
    let twice = start_on_disk(cfgs[0].clone(), Env::system(), KEY).await.err().unwrap();
    assert_eq!(twice.code, Code::Busy);
    running.shutdown().await;
    let other = async {
        loop {
            match start_on_disk(cfgs[0].clone(), Env::system(), [9; 32]).await.err().unwrap() {
                e if e.code == Code::Busy => sleep(Duration::from_millis(20)).await,
                e => return e,
            }
        }
    };
    let e = timeout(Duration::from_secs(60), other).await.unwrap();
    assert!(e.message.contains("another cluster"), "{e}");
}

/// A member that is removed stops, says so in its folder, and is refused from then on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_member_ends_and_its_folder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let cfgs = configs(dir.path(), 3);
    let mut all = start_all(&cfgs).await;
    let open = pb::SessionOpenRequest {
        level: strake_proto::FEATURE_LEVEL,
        client_uuid: vec![1; 16].into(),
        ..Default::default()
    };
    let _: pb::SessionOpenReply = ask(&cfgs, opcode::SESSION_OPEN, &open).await.unwrap();
    let gone = (leader_of(&all).await + 1) % 3;
    let step = pb::MemberStep { promote: vec![], remove: vec![gone as u64 + 1] };
    change_members(&cfgs, &all, Change::Step(step)).await;
    let server = all[gone].take().unwrap();
    let cause = timeout(Duration::from_secs(60), server.stopped()).await.expect("it stops");
    assert_eq!(cause.code, Code::NotMember, "{cause}");
    server.shutdown().await;
    let refusal = async {
        loop {
            match start_on_disk(cfgs[gone].clone(), Env::system(), KEY).await {
                // The folder is still held.
                Err(e) if e.code == Code::Busy => sleep(Duration::from_millis(20)).await,
                r => return r.err().expect("it must not start"),
            }
        }
    };
    let e = timeout(Duration::from_secs(60), refusal).await.unwrap();
    assert!(e.code == Code::Inval && e.message.contains("was removed from its group"), "{e}");
}
