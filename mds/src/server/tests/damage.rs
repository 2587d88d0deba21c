//! Metadata that is damaged on one member's disk: clients see the good copies, and the member gets
//! one.

use std::{fs, os::unix::fs::FileExt as _, path::Path};

use strake_runtime::Env;
use tokio::time::timeout;

use super::{
    disk::{KEY, ask, configs, leader_of, start_all, transfer},
    *,
};
use crate::server::{Config, MdsServer, start_on_disk};

fn raft(w: &World, i: usize) -> pb::RaftStatus {
    w.mds[i].as_ref().unwrap().1.status().raft.unwrap()
}

fn notices(w: &World, i: usize) -> String {
    w.mds[i].as_ref().unwrap().1.status().notices.join("\n")
}

/// Every read that meets the damage, and every change, is answered normally.
#[tokio::test(start_paused = true)]
async fn what_the_leader_cannot_read_another_one_answers() {
    let ways = [
        ("look up", lookup("spoilt-name")),
        ("list", Op::Readdir(pb::Readdir { dir: ROOT_INO, limit: 100, ..Default::default() })),
        ("make again", mkdir("spoilt-name")),
        ("rename", rename("spoilt-name", "other")),
        ("rename over", rename("good", "spoilt-name")),
    ];
    for (what, op) in ways {
        let w = World::new(3, |_| ()).await;
        let mut c = w.client(1).await;
        c.one(mkdir("spoilt-name")).await;
        c.one(mkdir("good")).await;
        let leader = w.leader().await;
        w.stores[leader].spoil(b"spoilt-name");
        let answer = c.run(vec![op]).await.unwrap_or_else(|e| panic!("{what}: {e}"));
        let code = answer[0].status.as_ref().map_or(0, |s| s.code);
        let wanted = if what == "make again" { Code::Exist as u32 } else { 0 };
        assert_eq!(code, wanted, "{what}: {answer:?}");
        assert_ne!(w.leader().await, leader, "{what}");
        until("it has a copy", || raft(&w, leader).damages == 1 && !raft(&w, leader).no_state)
            .await;
        until("it keeps up", || raft(&w, leader).applied == raft(&w, w_leader(&w)).applied).await;
        let said = notices(&w, leader);
        assert!(
            said.contains("damaged 1 times") && said.contains("check its disk"),
            "{what}: {said}"
        );
        let good = w_leader(&w);
        assert!(!notices(&w, good).contains("damaged"), "{what}");
        // It may lead again, and reads the state.
        w.mds[good].as_ref().unwrap().1.node().transfer(leader as u64 + 1).await.unwrap();
        c.run(vec![lookup("spoilt-name")]).await.unwrap();
        assert_eq!((w.leader().await, raft(&w, leader).damages), (leader, 1), "{what}");
    }
}

fn w_leader(w: &World) -> usize {
    w.mds.iter().position(|m| m.as_ref().is_some_and(|(_, s)| s.leads())).unwrap_or(0)
}

/// No client reads it: the members read all their state by themselves.
#[tokio::test(start_paused = true)]
async fn damage_that_nobody_meets_is_found() {
    let w = World::new(3, |c| c.scrub_every_s = 600).await;
    let mut c = w.client(1).await;
    c.one(mkdir("spoilt-name")).await;
    let leader = w.leader().await;
    let follower = (leader + 1) % 3;
    sleep(std::time::Duration::from_secs(300)).await;
    w.stores[follower].spoil(b"spoilt-name");
    sleep(std::time::Duration::from_secs(100)).await;
    assert_eq!(raft(&w, follower).damages, 0, "not yet");
    sleep(std::time::Duration::from_secs(400)).await;
    assert_eq!((raft(&w, follower).damages, raft(&w, follower).no_state), (1, false));
    assert_eq!(w.leader().await, leader);
    sleep(std::time::Duration::from_secs(1300)).await;
    assert!((0..3).all(|i| raft(&w, i).damages == u64::from(i == follower)));
}

/// There is no other copy: readable data is returned, the rest is an error that says so.
#[tokio::test(start_paused = true)]
async fn a_lone_server_names_its_damage() {
    let w = World::new(1, |_| ()).await;
    let mut c = w.client(1).await;
    c.one(mkdir("spoilt-name")).await;
    c.one(mkdir("good")).await;
    w.stores[0].spoil(b"spoilt-name");
    assert_eq!(c.run(vec![lookup("spoilt-name")]).await.unwrap_err().code, Code::Corrupt);
    c.one(lookup("good")).await;
    c.one(mkdir("new")).await;
    let said = notices(&w, 0);
    assert!(said.contains("a flipped bit") && said.contains("'Damaged metadata'"), "{said}");
}

/// Folders, each with an attribute of 60 kB, so that what they take is soon more than the store
/// keeps in memory.
const FOLDERS: u64 = 1300;

fn attribute(i: u64) -> Vec<u8> {
    let mut rng = i;
    (0..7500).flat_map(|_| strake_proto::layout::splitmix64(&mut rng).to_le_bytes()).collect()
}

fn list(session: u64, seq: u64, ops: Vec<Op>) -> pb::MetaRequest {
    let ops = ops.into_iter().map(|op| pb::Op { op: Some(op) }).collect();
    let creds = Some(pb::Creds::default());
    pb::MetaRequest { session, seq, lowest_unanswered: seq, creds, ops, ..Default::default() }
}

async fn fill(cfgs: &[Config], session: u64) -> Vec<u64> {
    let mut inos = Vec::new();
    for i in 0..FOLDERS {
        let r: pb::MetaReply =
            ask(cfgs, opcode::META, &list(session, 2 * i + 1, vec![mkdir(&format!("d{i}"))]))
                .await
                .unwrap();
        inos.push(r.results[0].ino);
        let set = pb::SetXattr {
            ino: inos[i as usize],
            name: "user.a".into(),
            value: attribute(i).into(),
            flags: 0,
        };
        let r: pb::MetaReply =
            ask(cfgs, opcode::META, &list(session, 2 * i + 2, vec![Op::Setxattr(set)]))
                .await
                .unwrap();
        assert!(r.results[0].status.as_ref().is_none_or(|s| s.code == 0), "{:?}", r.results[0]);
    }
    inos
}

/// Reads everything from the leader.
async fn all_is_right(cfgs: &[Config], session: u64, inos: &[u64]) {
    for (i, ino) in inos.iter().enumerate() {
        let get = Op::Getxattr(pb::GetXattr { ino: *ino, name: "user.a".into() });
        let ops = vec![lookup(&format!("d{i}")), get];
        let r: pb::MetaReply = ask(cfgs, opcode::META, &list(session, 0, ops))
            .await
            .unwrap_or_else(|e| panic!("d{i}: {e}"));
        assert_eq!(
            (r.results[0].ino, &r.results[1].data[..]),
            (*ino, &attribute(i as u64)[..]),
            "d{i}"
        );
    }
}

fn files(dir: &Path) -> Vec<std::path::PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    paths.flat_map(|p| if p.is_dir() { files(&p) } else { vec![p] }).collect()
}

/// One bit in every 20 kB of the tables in a state.
fn flip(state: &Path) {
    let tables =
        files(state).into_iter().filter(|f| f.parent().is_some_and(|p| p.ends_with("tables")));
    let mut flipped = 0;
    for table in tables {
        let f = fs::File::options().read(true).write(true).open(table).unwrap();
        for at in (0..f.metadata().unwrap().len()).step_by(20_000) {
            let mut b = [0];
            f.read_exact_at(&mut b, at).unwrap();
            f.write_all_at(&[b[0] ^ 4], at).unwrap();
            flipped += 1;
        }
    }
    assert!(flipped > 1000, "{flipped} bits");
}

async fn healthy(m: &MdsServer, what: &str) {
    let done = async {
        loop {
            let s = m.status().raft.unwrap();
            if !s.no_state
                && s.damage.is_empty()
                && s.applied > 0
                && s.applied == s.committed
                && s.leader != 0
            {
                return;
            }
            sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    timeout(std::time::Duration::from_secs(60), done)
        .await
        .unwrap_or_else(|_| panic!("{what}: {:?}", m.status().raft));
}

/// Real files, real bits: those of the leader while it serves, those of a follower while it is
/// down, and the list of tables.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bits_that_flip_on_a_members_disk_are_seen_by_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let mut cfgs = configs(dir.path(), 3);
    // Little is served from memory.
    cfgs.iter_mut().for_each(|c| c.cache_bytes = 1 << 20);
    let mut all = start_all(&cfgs).await;
    let open = pb::SessionOpenRequest {
        level: strake_proto::FEATURE_LEVEL,
        client_uuid: vec![1; 16].into(),
        ..Default::default()
    };
    let s: pb::SessionOpenReply = ask(&cfgs, opcode::SESSION_OPEN, &open).await.unwrap();
    let inos = fill(&cfgs, s.session).await;

    let leader = leader_of(&all).await;
    flip(&cfgs[leader].dir.join("state"));
    all_is_right(&cfgs, s.session, &inos).await;
    let was = all[leader].as_ref().unwrap();
    healthy(was, "the leader").await;
    assert_eq!(was.status().raft.unwrap().damages, 1);
    transfer(&cfgs, &all, leader).await;
    all_is_right(&cfgs, s.session, &inos).await;
    assert_eq!((leader_of(&all).await, was.status().raft.unwrap().damages), (leader, 1));

    for (round, follower) in [(leader + 1) % 3, (leader + 2) % 3].into_iter().enumerate() {
        all[follower].take().unwrap().shutdown().await;
        let state = cfgs[follower].dir.join("state");
        if round == 0 {
            flip(&state);
        } else {
            let lists = files(&state).into_iter().filter(|f| f.ends_with("current"));
            lists.for_each(|f| {
                let mut bytes = fs::read(&f).unwrap();
                bytes[0] ^= 1;
                fs::write(&f, bytes).unwrap();
            });
        }
        let started = loop {
            match start_on_disk(cfgs[follower].clone(), Env::system(), KEY).await {
                Err(e) if e.code == Code::Busy => sleep(std::time::Duration::from_millis(20)).await,
                r => break r.unwrap(),
            }
        };
        all[follower] = Some(started);
        let now = all[follower].as_ref().unwrap();
        healthy(now, "a follower").await;
        transfer(&cfgs, &all, follower).await;
        all_is_right(&cfgs, s.session, &inos).await;
        healthy(now, "a follower").await;
        let (raft, said) = (now.status().raft.unwrap(), now.status().notices.join("\n"));
        let aside = cfgs[follower].dir.join("state.damaged");
        // Found when it was opened, or by a read; the list always when it was opened.
        let at_start = said.contains("set aside");
        assert!(
            at_start == aside.exists() && raft.damages == u64::from(!at_start),
            "{raft:?} {said}"
        );
        assert!(at_start || round == 0, "{said}");
    }
}
