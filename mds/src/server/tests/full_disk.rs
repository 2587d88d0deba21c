//! A server on a small file system that fills: what is refused, what still works, and service again
//! without a restart.

use std::{
    fs::{self, File},
    io::Write as _,
    path::PathBuf,
    process::Command,
    sync::Arc,
    time::Duration,
};

use prost::Message as _;
use strake_fabric::{Connection, Fabric as _, Message};
use strake_proto::{Code, Error, Result, ids::ROOT_INO, opcode, pb};
use strake_runtime::Env;
use tokio::time::{sleep, timeout};

use super::{
    disk::{KEY, ask, client_fabric, configs, start_all},
    lookup, mkdir,
    world::until,
};

use crate::server::{Config, MdsServer, start_on_disk};
use pb::op::Op;

/// A file system of its own; unmounted when dropped.
struct Small(tempfile::TempDir);

impl Small {
    fn new(mib: u32) -> Option<Small> {
        let dir = tempfile::tempdir().unwrap();
        let size = format!("size={mib}m");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "strake-test"])
            .arg(dir.path())
            .output();
        if !mount.is_ok_and(|o| o.status.success()) {
            println!("skipped: mounting a tmpfs needs root");
            return None;
        }
        Some(Small(dir))
    }

    /// Uses all the space there is now, but not what a server gives up meanwhile.
    fn fill(&self) -> PathBuf {
        self.take(rustix::fs::statvfs(self.0.path()).unwrap().f_bavail)
    }

    /// Writes this many blocks, or as many as there is space for.
    fn take(&self, blocks: u64) -> PathBuf {
        let path = self.0.path().join("ballast");
        let mut f = File::create(&path).unwrap();
        for _ in 0..blocks {
            if f.write_all(&[0; 4096]).is_err() {
                break;
            }
        }
        path
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Sends each request once and says what came back.
struct Client {
    conn: Arc<dyn Connection>,
    session: u64,
    seq: u64,
}

impl Client {
    async fn new(cfgs: &[Config], leader: usize) -> Client {
        let open = pb::SessionOpenRequest {
            level: strake_proto::FEATURE_LEVEL,
            client_uuid: vec![1; 16].into(),
            ..Default::default()
        };
        let s: pb::SessionOpenReply = ask(cfgs, opcode::SESSION_OPEN, &open).await.unwrap();
        let conn = client_fabric().connect(&cfgs[leader].listen, None).await.unwrap();
        Client { conn, session: s.session, seq: 0 }
    }

    /// The results, or the first error among them.
    async fn send(&mut self, ops: Vec<Op>) -> Result<Vec<pb::OpResult>> {
        self.seq += 1;
        let r = pb::MetaRequest {
            session: self.session,
            seq: self.seq,
            lowest_unanswered: self.seq,
            creds: Some(pb::Creds::default()),
            ops: ops.into_iter().map(|op| pb::Op { op: Some(op) }).collect(),
            ..Default::default()
        };
        let answer = self
            .conn
            .call(Message::new(opcode::META, r.encode_to_vec()), Duration::from_secs(20))
            .await;
        let results = pb::MetaReply::decode(answer?.body).unwrap().results;
        match results.iter().find_map(|r| r.status.clone().filter(|s| s.code != 0)) {
            Some(s) => Err(Error::from(s)),
            None => Ok(results),
        }
    }

    async fn exists(&mut self, name: &str) -> bool {
        match self.send(vec![lookup(name)]).await {
            Ok(_) => true,
            Err(e) if e.code == Code::NoEnt => false,
            Err(e) => panic!("{e}"),
        }
    }

    /// Until there is space; everything else is a failure.
    async fn mkdir_in_time(&mut self, name: &str) {
        let made = async {
            while let Err(e) = self.send(vec![mkdir(name)]).await {
                assert!(matches!(e.code, Code::NoSpc | Code::Disconnected | Code::Exist), "{e}");
                if e.code == Code::Exist {
                    return;
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(Duration::from_secs(60), made).await.expect("service when there is space again");
    }
}

fn rmdir(name: &str) -> Op {
    Op::Rmdir(pb::Rmdir { parent: ROOT_INO, name: name.as_bytes().to_vec().into() })
}

async fn restarted(server: MdsServer, cfg: &Config) -> MdsServer {
    server.shutdown().await;
    let start = async {
        loop {
            match start_on_disk(cfg.clone(), Env::system(), KEY).await {
                Err(e) if e.code == Code::Busy => sleep(Duration::from_millis(20)).await,
                r => return r.unwrap(),
            }
        }
    };
    timeout(Duration::from_secs(60), start).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn somebody_else_fills_the_disk_of_a_lone_server() {
    let Some(disk) = Small::new(96) else { return };
    let cfgs = configs(disk.0.path(), 1);
    let mut all = start_all(&cfgs).await;
    let mut c = Client::new(&cfgs, 0).await;
    for n in 0..300 {
        c.send(vec![mkdir(&format!("d{n}"))]).await.unwrap();
    }
    let ballast = disk.fill();
    let reserve = cfgs[0].dir.join("reserve");
    until("the reserve is given up", || !reserve.exists()).await;
    assert_eq!(c.send(vec![mkdir("new")]).await.unwrap_err().code, Code::NoSpc);
    // Reads and removals go on, and so does a second client's session.
    for n in 0..200 {
        assert!(c.exists(&format!("d{n}")).await);
        c.send(vec![rmdir(&format!("d{n}"))]).await.unwrap();
    }
    let mut late = Client::new(&cfgs, 0).await;
    assert!(late.exists("d299").await && !late.exists("d0").await);
    let notices = all[0].as_ref().unwrap().status().notices;
    assert!(notices.iter().any(|n| n.contains("almost full")), "{notices:?}");
    fs::remove_file(ballast).unwrap();
    c.seq = 10_000;
    c.mkdir_in_time("after").await;
    assert!(reserve.exists());
    let _server = restarted(all[0].take().unwrap(), &cfgs[0]).await;
    let mut c = Client { seq: 20_000, ..Client::new(&cfgs, 0).await };
    assert!(
        c.exists("after").await
            && c.exists("d200").await
            && !c.exists("d199").await
            && !c.exists("new").await
    );
}

/// Its own changes fill it: the space of the log, the journal, flushes and compactions is part of
/// it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lone_server_fills_its_disk_itself() {
    let Some(disk) = Small::new(192) else { return };
    let cfgs = configs(disk.0.path(), 1);
    let mut all = start_all(&cfgs).await;
    let mut c = Client::new(&cfgs, 0).await;
    let name = |n: usize| format!("{}{n}", "x".repeat(240));
    let mut made = 0;
    let e = loop {
        let ops = (made..made + 100).map(|n| mkdir(&name(n))).collect();
        match c.send(ops).await {
            Ok(_) => made += 100,
            Err(e) => break e,
        }
        assert!(made < 1_000_000, "it never filled");
    };
    assert_eq!(e.code, Code::NoSpc, "{e}");
    assert!(made > 1000, "full after {made}");
    for n in 0..200 {
        assert!(c.exists(&name(n)).await);
        c.send(vec![rmdir(&name(n))]).await.unwrap();
    }
    assert!(c.exists(&name(made - 1)).await && !c.exists(&name(made)).await);
    let grown = Command::new("mount")
        .args(["-o", "remount,size=400m"])
        .arg(disk.0.path())
        .status()
        .unwrap();
    assert!(grown.success());
    c.mkdir_in_time("after").await;
    let _server = restarted(all[0].take().unwrap(), &cfgs[0]).await;
    let mut c = Client { seq: 1 << 40, ..Client::new(&cfgs, 0).await };
    assert!(
        c.exists("after").await && c.exists(&name(made - 1)).await && !c.exists(&name(199)).await
    );
}

/// Nothing is reserved, so that the store itself meets the full disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_met_the_end_of_the_disk_goes_on_by_itself() {
    let Some(disk) = Small::new(96) else { return };
    let mut cfgs = configs(disk.0.path(), 1);
    cfgs[0].reserve_bytes = Some(0);
    let mut all = start_all(&cfgs).await;
    let mut c = Client::new(&cfgs, 0).await;
    let mut acknowledged = Vec::new();
    for round in 0..3 {
        let ballast = disk.take(u64::MAX);
        let mut refused = 0;
        for n in 0..200 {
            let name = format!("r{round}-{n}");
            match c.send(vec![mkdir(&name)]).await {
                Ok(_) => acknowledged.push(name),
                Err(e) if e.code == Code::NoSpc => refused += 1,
                Err(e) => assert_eq!(e.code, Code::Disconnected, "{e}"),
            }
        }
        assert!(refused > 0, "no answer was 'full'");
        for name in &acknowledged {
            assert!(c.exists(name).await, "{name}");
        }
        fs::remove_file(ballast).unwrap();
        c.mkdir_in_time(&format!("after{round}")).await;
        acknowledged.push(format!("after{round}"));
    }
    let _server = restarted(all[0].take().unwrap(), &cfgs[0]).await;
    let mut c = Client { seq: 1 << 40, ..Client::new(&cfgs, 0).await };
    for name in &acknowledged {
        assert!(c.exists(name).await, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_with_a_full_disk_hurts_nobody() {
    let Some(disk) = Small::new(96) else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let mut cfgs = configs(elsewhere.path(), 3);
    cfgs[2].dir = disk.0.path().join("m3");
    cfgs[2].reserve_bytes = Some(0);
    let all = start_all(&cfgs).await;
    let server = |i: usize| all[i].as_ref().unwrap();
    let leads = || (0..3).find(|i| server(*i).leads());
    until("a leader", || leads().is_some()).await;
    let with_space = async {
        loop {
            match leads() {
                Some(2) => match server(2).node().transfer(1).await {
                    // Member 1 has not answered it yet, or another was elected meanwhile.
                    Ok(()) => {}
                    Err(e) => assert!(matches!(e.code, Code::Busy | Code::NotLeader), "{e}"),
                },
                Some(leader) => break leader,
                None => {}
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    let leader = timeout(Duration::from_secs(60), with_space).await.expect("a leader with space");
    let mut c = Client::new(&cfgs, leader).await;
    let ballast = disk.fill();
    for n in 0..300 {
        c.send(vec![mkdir(&format!("d{n}"))]).await.unwrap();
    }
    assert_eq!(leads(), Some(leader));
    fs::remove_file(ballast).unwrap();
    c.send(vec![mkdir("after")]).await.unwrap();
    let applied = |i: usize| server(i).status().raft.unwrap().applied;
    until("the follower has caught up", || applied(2) == applied(leader)).await;
}
