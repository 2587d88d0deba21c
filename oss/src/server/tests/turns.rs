//! One client sends as many requests as it can over many connections; another is still answered.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};

use strake_fabric::{Connection, Fabric, Identity, Message, Pool, TcpFabric};
use strake_proto::{CapKey, Capability, SessionId, cap::derive_key};
use strake_runtime::Env;

use super::{
    bed::chunk,
    tcp::{KEY, authority, call, config},
    *,
};
use crate::server::start_on_disk;

const CONNECTIONS: usize = 64;
/// How many requests each connection keeps in flight.
const AT_A_TIME: usize = 8;
const LONG: Duration = Duration::from_secs(30);

fn runtime(threads: usize) -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .unwrap()
}

fn request(session: SessionId) -> DataRequest {
    let cap = Capability {
        ino: 4,
        data: 9,
        session,
        session_epoch: 1,
        expiry_ms: u64::MAX,
        rights: Rights::READ.and(Rights::WRITE),
        bound: strake_proto::Bound::Any,
        as_of: 0,
    };
    let cap = Some(CapKey::from_cluster_key(&KEY).seal(&cap));
    DataRequest { cap, session, len: 4096, ..DataRequest::new(CHAIN, 1, 0, chunk(0)) }
}

async fn connect(at: &strake_fabric::Endpoint) -> Arc<dyn Connection> {
    let identity = Identity::client(derive_key(&KEY, "strake client v1"));
    TcpFabric::new(Env::system(), identity, None, Pool::default(), Default::default())
        .connect(at, None)
        .await
        .unwrap()
}

#[test]
fn endless_reads_on_64_connections_leave_the_next_turn_to_another_client() {
    let dir = tempfile::tempdir().unwrap();
    let (servers, flood, victim) = (runtime(2), runtime(1), runtime(1));
    let (server, _keep) = servers.block_on(async {
        let (authority, mds) = authority().await;
        let mut cfg = config(0, dir.path(), mds.endpoint());
        cfg.max_requests = 8;
        let server = start_on_disk(cfg, Env::system(), KEY).await.unwrap();
        {
            let mut map = authority.map.lock();
            let replicas =
                vec![pb::Replica { target: 0, state: pb::ReplicaState::ReplicaServing as i32 }];
            map.chains =
                vec![pb::Chain { id: CHAIN, epoch: 1, replicas, preferred: vec![0], lost: false }];
            map.version += 1;
        }
        let data = bytes(1, 4096);
        let sums = block_sums(0, [&data[..]]);
        let write =
            || DataRequest { kind: Kind::Write, seq: 1, sums: sums.clone(), ..request(SESSION) };
        call(&server, opcode::WRITE, write, &data).await;
        (server, (authority, mds))
    });
    let at = server.endpoint();
    let (answered, refused) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let over = Arc::new(AtomicBool::new(false));
    for _ in 0..CONNECTIONS {
        let conn = flood.block_on(connect(&at));
        for _ in 0..AT_A_TIME {
            let (conn, over) = (conn.clone(), over.clone());
            let (answered, refused) = (answered.clone(), refused.clone());
            flood.spawn(async move {
                while !over.load(SeqCst) {
                    let m = Message::new(opcode::READ, request(SESSION).encode());
                    let counts =
                        if conn.call(m, LONG).await.is_ok() { &answered } else { &refused };
                    counts.fetch_add(1, SeqCst);
                }
            });
        }
    }
    std::thread::sleep(Duration::from_secs(1));
    // Each request is answered at the first try, and none waits for all requests of the other
    // client.
    let (slowest, first) = victim.block_on(async {
        let (conn, mut slowest) = (connect(&at).await, Duration::ZERO);
        let first = answered.load(SeqCst);
        for _ in 0..20 {
            let began = std::time::Instant::now();
            let m = Message::new(opcode::READ, request(SESSION + 1).encode());
            conn.call(m, LONG).await.expect("it has its turn");
            slowest = slowest.max(began.elapsed());
        }
        (slowest, first)
    });
    let others = answered.load(SeqCst) - first;
    println!(
        "20 reads, the slowest {slowest:?}, among {others} of another client, which was refused {refused:?}"
    );
    over.store(true, SeqCst);
    assert!(others > 0, "the other one was busy all the time");
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    // Its turn came before requests that had waited longer.
    assert!(others < 20 * CONNECTIONS * AT_A_TIME, "{others}");
    drop((flood, victim));
    servers.block_on(server.shutdown()).unwrap();
}
