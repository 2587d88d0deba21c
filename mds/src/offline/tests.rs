//! Folders made by a real server, recovered with interruptions at every step, dumped and loaded.

use std::{
    fs,
    io::Cursor,
    net::TcpListener,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use prost::Message as _;
use strake_fabric::Endpoint;
use strake_proto::{Code, Incarnation, pb};
use strake_runtime::Env;
use tokio::time::{sleep, timeout};

use super::{
    dump,
    inspect::{self, inspect},
    load,
    recover::{Options, Recovery},
};
use crate::{
    data_dir::{Record, Sizes, State},
    namespace::Namespace,
    server::{Config, MdsServer, start_on_disk},
};
use pb::log_command::Command;

const KEY: [u8; 32] = [8; 32];

fn config(id: u64, dir: &Path) -> Config {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    Config::new(id, Endpoint::Tcp("127.0.0.1".into(), port), dir.to_path_buf())
}

async fn start(cfg: &Config) -> MdsServer {
    let started = async {
        loop {
            match start_on_disk(cfg.clone(), Env::system(), KEY).await {
                Ok(m) => return m,
                // The folder of a server that was just stopped.
                Err(e) if e.code == Code::Busy => sleep(Duration::from_millis(20)).await,
                Err(e) => panic!("{e}"),
            }
        }
    };
    let m = timeout(Duration::from_secs(30), started).await.unwrap();
    let leads = async {
        while !m.leads() {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(30), leads).await.expect("the only voter leads");
    m
}

/// A folder in which a server of id 1 made a file system with two sessions and one storage server.
async fn made(root: &Path) -> PathBuf {
    let dir = root.join("m1");
    let m = start(&config(1, &dir)).await;
    for n in 1..=2u8 {
        let open = pb::SessionOpenRequest {
            client_uuid: vec![n; 16].into(),
            hostname: "h".into(),
            ..Default::default()
        };
        propose(&m, Command::SessionOpen(open)).await;
    }
    let target = pb::RegisterTarget {
        uuid: vec![9; 16].into(),
        capacity: 1 << 40,
        stamp: 5,
        id: u32::MAX,
        ..Default::default()
    };
    let register = pb::RegisterRequest {
        name: "oss".into(),
        endpoints: vec!["tcp:oss:1".into()],
        targets: vec![target],
        ..Default::default()
    };
    propose(&m, Command::Register(register)).await;
    m.shutdown().await;
    let free = async {
        while inspect(&dir).is_err_and(|e| e.code == Code::Busy) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(30), free).await.unwrap();
    dir
}

async fn propose(m: &MdsServer, command: Command) {
    let c = pb::LogCommand { now_ns: 1, command: Some(command) };
    let reply = m.node().propose(Bytes::from(c.encode_to_vec())).await.unwrap();
    let reply = pb::LogReply::decode(reply).unwrap();
    assert_eq!(reply.status, None);
}

fn accept(dir: &Path) -> Recovery {
    Recovery::prepare(dir, &Options::default(), 77).unwrap()
}

fn state(dir: &Path) -> (pb::StateHeader, pb::ClusterMap, usize, Vec<pb::Evicted>) {
    let ns =
        Namespace::open(std::sync::Arc::new(Sizes::of(dir).unwrap().store(dir, 1 << 20).unwrap()))
            .unwrap();
    (ns.header(), ns.map().map.clone(), ns.sessions().len(), ns.backlog().evicted_after(0))
}

/// A group of one counts as whole; here it has two voters, one of which is gone.
fn with_lost_voter(dir: &Path) {
    let store = Sizes::of(dir).unwrap().store(dir, 1 << 20).unwrap();
    let ns = Namespace::open(std::sync::Arc::new(store)).unwrap();
    let h = ns.header();
    let conf = raft::eraftpb::ConfState { voters: vec![1, 2], ..Default::default() };
    let conf = protobuf::Message::write_to_bytes(&conf).unwrap();
    ns.apply(&[], (h.applied_index, h.applied_term), Some(&conf)).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_survivor_is_recovered_wherever_it_was_cut_short() {
    let root = tempfile::tempdir().unwrap();
    let origin = made(root.path()).await;
    assert!(accept(&origin).plan.needless, "its own only voter needs no recovery");
    with_lost_voter(&origin);
    let before = state(&origin);
    assert_eq!(before.2, 2);
    for steps in 0..3 {
        let dir = root.path().join(format!("cut{steps}"));
        copy(&origin, &dir);
        let first = accept(&dir);
        let (to, incarnation) = (first.plan.to, first.plan.incarnation);
        assert_eq!((to, incarnation.era()), (3, 1));
        assert!(!first.plan.may_lose, "of two voters each has all");
        if steps > 0 {
            first.mark().unwrap();
        }
        if steps > 1 {
            first.apply(&mut |_| ()).unwrap();
            fs::remove_dir_all(dir.join("log")).unwrap();
        }
        drop(first);
        if steps > 0 {
            let e = start_on_disk(config(1, &dir), Env::system(), KEY).await.err().unwrap();
            assert!(e.message.contains("strake mds recover"), "{e}");
            let other = Options { id: Some(9), ..Default::default() };
            let e = Recovery::prepare(&dir, &other, 1).err().unwrap();
            assert!(e.code == Code::Inval && e.message.contains("as metadata server 3"), "{e}");
        }
        let again = Recovery::prepare(&dir, &Options::default(), 12345).unwrap();
        assert_eq!(again.plan.resumed, steps > 0);
        if steps > 0 {
            assert_eq!(
                (again.plan.to, again.plan.incarnation),
                (to, incarnation),
                "what was begun is gone on with"
            );
        }
        again.run(5, |_| ()).unwrap();
        drop(again);
        assert!(accept(&dir).plan.needless, "done once is done");

        let (header, map, sessions, evicted) = state(&dir);
        assert_eq!(
            (sessions, map.former.clone(), Incarnation(map.incarnation).era()),
            (0, vec![1, 2], 1)
        );
        assert!(
            header.next_ino > before.0.next_ino
                && header.next_session >= 1 << 32
                && map.version >= 1 << 32
        );
        assert!(evicted.iter().any(|e| e.below && e.session == header.next_session), "{evicted:?}");
        assert_eq!(evicted.iter().filter(|e| !e.below).count(), 2);
        assert_eq!(header.applied_index, before.0.applied_index + 1, "the recovery is one entry");
        let m = start(&config(3, &dir)).await;
        propose(
            &m,
            Command::SessionOpen(pb::SessionOpenRequest {
                client_uuid: vec![1; 16].into(),
                ..Default::default()
            }),
        )
        .await;
        assert_eq!(m.node().group().await.unwrap().voters().map(|v| v.id).collect::<Vec<_>>(), [3]);
        m.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_folder_with_the_most_is_the_one_to_take() {
    let root = tempfile::tempdir().unwrap();
    let dir = made(root.path()).await;
    with_lost_voter(&dir);
    let behind = root.path().join("behind");
    copy(&dir, &behind);
    // The other one continues for a while: it is recovered, which is another era, or has more
    // entries.
    let more = root.path().join("more");
    copy(&dir, &more);
    accept(&more).run(1, |_| ()).unwrap();
    let (a, b) = (inspect(&behind).unwrap(), inspect(&more).unwrap());
    assert!(a.rank() < b.rank());
    assert_eq!(inspect::best(&[a.clone(), b.clone()]).unwrap().dir, more);
    assert!(inspect::is_complete(std::slice::from_ref(&a)), "one of two voters");
    let with = Options { others: vec![more.clone()], ..Default::default() };
    let e = Recovery::prepare(&behind, &with, 1).err().unwrap();
    assert!(e.code == Code::Inval && e.message.contains("has more"), "{e}");
    // A damaged log costs what the state lacks, not the state.
    let log = behind.join("log");
    let segment = fs::read_dir(&log)
        .unwrap()
        .map(|e| e.unwrap().path())
        .find(|p| p.to_string_lossy().contains("log-"))
        .unwrap();
    let mut bytes = fs::read(&segment).unwrap();
    bytes[4096 + 40] ^= 1;
    fs::write(&segment, bytes).unwrap();
    let damaged = accept(&behind);
    assert!(damaged.plan.log_lost.is_some() && damaged.plan.may_lose);
    damaged.run(1, |_| ()).unwrap();
    drop(damaged);
    start(&config(3, &behind)).await.shutdown().await;
    // A folder that is not a server's, or was never finished, cannot be recovered from.
    assert_eq!(inspect(&root.path().join("nowhere")).unwrap_err().code, Code::NoEnt);
    let mut unfinished = Record::read(&dir).unwrap().unwrap();
    unfinished.state = State::Loading;
    unfinished.write(&dir).unwrap();
    let e = Recovery::prepare(&dir, &Options::default(), 1).err().unwrap();
    assert!(e.message.contains("never completed"), "{e}");
}

fn load_options(id: Option<u64>, beyond: u64) -> load::Options {
    load::Options { cluster_key: KEY, id, beyond, random: (3, 4) }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dump_is_loaded_whole_or_not_at_all() {
    let root = tempfile::tempdir().unwrap();
    let dir = made(root.path()).await;
    let mut text = Vec::new();
    let written = dump::dump(&dir, &mut text, |_| ()).unwrap();
    assert_eq!(written.bytes, text.len() as u64);
    let lines: Vec<&[u8]> = text.split_inclusive(|b| *b == b'\n').collect();
    assert_eq!(lines.len() as u64, written.records + 2);
    let new = root.path().join("new");
    let load =
        |bytes: &[u8], o: &load::Options| load::load(&new, &mut Cursor::new(bytes), o, |_| ());

    // Cut off anywhere, with any line missing, twice, or in another place; any flipped byte.
    for n in (0..text.len()).step_by(97).chain([text.len() - 1]) {
        assert!(load(&text[..n], &load_options(None, 0)).is_err(), "cut at {n}");
        let mut flipped = text.clone();
        flipped[n] ^= 4;
        let e = load(&flipped, &load_options(None, 0)).err().unwrap();
        assert!(e.message.contains("line "), "{n}: {e}");
        assert!(!new.exists());
    }
    for n in 0..lines.len() {
        let without: Vec<u8> = lines
            .iter()
            .enumerate()
            .filter(|(i, _)| *i != n)
            .flat_map(|(_, l)| l.to_vec())
            .collect();
        assert_eq!(
            load(&without, &load_options(None, 0)).err().unwrap().code,
            Code::Corrupt,
            "without line {n}"
        );
        let twice: Vec<u8> =
            lines.iter().enumerate().flat_map(|(i, l)| l.repeat(1 + usize::from(i == n))).collect();
        assert_eq!(
            load(&twice, &load_options(None, 0)).err().unwrap().code,
            Code::Corrupt,
            "line {n} twice"
        );
    }
    let head = String::from_utf8(lines[0].to_vec()).unwrap();
    for (from, to, code) in [
        ("dump\":1", "dump\":2", Code::Protocol),
        ("\"format\":", "\"format\":9", Code::Protocol),
        ("\"index\":", "\"index\":9", Code::Corrupt),
    ] {
        let object = format!("{{{}", &head.trim_end()[18..]).replace(from, to);
        let other = [dump::frame(&object).into_bytes(), lines[1..].concat()].concat();
        assert_eq!(load(&other, &load_options(None, 0)).err().unwrap().code, code, "{to}");
    }
    for id in [1, 0, 1001] {
        assert_eq!(
            load(&text, &load_options(Some(id), 0)).err().unwrap().code,
            Code::Inval,
            "id {id}"
        );
        assert!(!new.exists());
    }

    // An interrupted load starts again; a server does not start on it.
    strake_store::make_folder(&new).unwrap();
    Record {
        member: 0,
        cluster: Record::read(&dir).unwrap().unwrap().cluster,
        state: State::Loading,
    }
    .write(&new)
    .unwrap();
    fs::create_dir(new.join("state")).unwrap();
    fs::write(new.join("state/rest"), "x").unwrap();
    let done = load(&text, &load_options(Some(7), 4)).unwrap();
    assert_eq!((done.member, done.incarnation.era(), done.records), (7, 5, written.records));
    let again = load(&text, &load_options(None, 0)).err().unwrap();
    assert_eq!(again.code, Code::Exist);
    let (_, map, sessions, _) = state(&new);
    assert_eq!((map.former.clone(), sessions, map.version), (vec![1], 0, 5 << 32));
    start(&config(7, &new)).await.shutdown().await;
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for e in fs::read_dir(from).unwrap() {
        let e = e.unwrap();
        let target = to.join(e.file_name());
        match e.file_type().unwrap().is_dir() {
            true => copy(&e.path(), &target),
            false => drop(fs::copy(e.path(), target).unwrap()),
        }
    }
}
