//! Tests on a real device, or soft-RoCE: `cluster-tests/vm/run` has one. Elsewhere each test prints
//! why it does not run.
//!
//! `STRAKE_RDMA_ADDR` names the address of an RDMA port of this machine; `STRAKE_RDMA_REMOTE` an
//! endpoint of another one that runs [`peer_that_serves`], and `STRAKE_RDMA_LINK` the network
//! interface that leads there.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use strake_proto::{
    checksum::crc32c,
    frame::{FLAG_PAYLOAD_SUMMED, FLAG_REGIONS, Header, Kind, Region},
    opcode,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{verbs::op, *};
use crate::{
    Buf, Message, Role, Transports,
    conformance::{self, TestService},
    conn::{bulk::Regions, handshake, handshake::Party},
};

pub const LONG: Duration = Duration::from_secs(30);

/// Where to listen; `None` without a device, with the reason printed.
pub fn here() -> Option<Endpoint> {
    if let Err(e) = probe() {
        println!("skipped: {e}");
        return None;
    }
    let Ok(addr) = std::env::var("STRAKE_RDMA_ADDR") else {
        println!("skipped: STRAKE_RDMA_ADDR names no address of an RDMA port");
        return None;
    };
    Some(Endpoint::Rdma(addr, 0))
}

pub fn fabric_of(identity: Identity, cluster: Option<[u8; 16]>, options: Options) -> RdmaFabric {
    let (limit, why) = pool_limit(64 << 20).unwrap();
    if let Some(why) = why {
        println!("{why}");
    }
    RdmaFabric::new(Env::system(), identity, cluster, Pool::new(limit), options).unwrap()
}

pub fn server() -> RdmaFabric {
    fabric_of(Identity::server(&[1; 32]), Some([5; 16]), Options::default())
}

pub fn client_identity() -> Identity {
    Identity::client(Identity::server(&[1; 32]).client_key)
}

pub async fn serve(f: &RdmaFabric, at: &Endpoint) -> (Arc<TestService>, Listener) {
    let service = Arc::new(TestService::default());
    let guard = f.listen(at, service.clone()).await.unwrap();
    (service, guard)
}

pub async fn works(c: &dyn Connection) {
    let payload = conformance::pattern(300_000, 4);
    let m = Message::new(opcode::ECHO, "ok").with_payload(vec![payload.clone()]);
    let got = c.call(m, LONG).await.unwrap();
    assert!(got.body == "ok" && got.payload[0][..] == payload[..]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conforms_on_threads() {
    let Some(at) = here() else { return };
    let dialer = fabric_of(client_identity(), None, Options::default());
    let listener = server();
    conformance::all(&dialer, &listener, &at).await;
    settled(&dialer).await;
    settled(&listener).await;
}

#[tokio::test]
async fn conforms_in_one_thread() {
    let Some(at) = here() else { return };
    let f = server();
    conformance::all(&f, &f, &at).await;
    settled(&f).await;
}

#[tokio::test]
async fn little_memory_that_may_be_locked_is_enough() {
    let Some(at) = here() else { return };
    if Budget::here().limit > 8 << 20 {
        println!("skipped: this process may lock more than 8 MiB");
        return;
    }
    let f = server();
    assert_eq!(f.pool().stats().limit, 4 << 20);
    let (_service, guard) = serve(&f, &at).await;
    let conn = f.connect(guard.endpoint(), None).await.unwrap();
    works(&*conn).await;
    // Kept memory, of which no region may stay registered, and more at a time than may be
    // registered by itself.
    let kept = Pool::kept(strake_runtime::SharedMemory::create(64 << 20).unwrap(), 0);
    for round in 0..2 {
        let writes = (0..6).map(|n| {
            let (conn, want) = (&conn, conformance::pattern(1 << 20, round * 100 + n));
            let mut b = kept.get_now(1 << 20);
            b.copy_from_slice(&want);
            let b = b.freeze();
            assert!(b.region().is_some_and(|r| r.is_kept()));
            async move {
                let got = patient(&**conn, b).await.unwrap();
                assert!(got.payload.len() == 1 && got.payload[0][..] == want[..]);
            }
        });
        futures_util::future::join_all(writes).await;
    }
    for len in [3 << 20, 4 << 20] {
        let want = conformance::pattern(len, 2);
        assert!(patient(&*conn, want.clone()).await.unwrap().payload[0][..] == want[..], "{len}");
    }
    // More than the whole pool.
    let want = conformance::pattern(16 << 20, 1);
    assert!(patient(&*conn, want.clone()).await.unwrap().payload[0][..] == want[..]);
    for _ in 0..3 {
        works(&*conn).await;
    }
}

#[tokio::test]
async fn what_cannot_be_registered_where_it_goes_comes_in_pieces() {
    let Some(at) = here() else { return };
    let f = server();
    let (_service, guard) = serve(&f, &at).await;
    let client = fabric_of(client_identity(), None, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    works(&*conn).await;
    let device = f.devices.lock().values().find_map(Weak::upgrade).unwrap();
    let (stage, piece) = (device.stage.clone().unwrap(), Budget::here().piece(f.usable));
    assert_eq!(stage.moved.load(SeqCst), 0);
    device.starved.store(true, SeqCst);
    let mut pieces = 0;
    for len in [4097, piece, piece + 1, 3 << 20, 16 << 20] {
        let want = conformance::pattern(len, 3);
        assert!(patient(&*conn, want.clone()).await.unwrap().payload[0][..] == want[..], "{len}");
        pieces += len.div_ceil(piece) as u64;
        assert_eq!(stage.moved.load(SeqCst), pieces, "{len}");
    }
    // More at a time than there are places, in several parts each.
    let calls = (0..24).map(|n| {
        let (conn, parts) =
            (&conn, [5000 + n, 300_000, 77].map(|len| conformance::pattern(len, n)));
        async move {
            let m = Message::new(opcode::ECHO, "").with_payload(parts.to_vec());
            let got = conn
                .call(m, LONG)
                .await
                .unwrap()
                .payload
                .iter()
                .flat_map(|p| p.to_vec())
                .collect::<Vec<u8>>();
            assert!(got == parts.iter().flat_map(|p| p.iter().copied()).collect::<Vec<u8>>());
        }
    });
    futures_util::future::join_all(calls).await;
    device.starved.store(false, SeqCst);
    works(&*conn).await;
    drop((conn, device, stage));
    settled(&f).await;
}

/// An echo, repeated while the server is overloaded.
async fn patient(c: &dyn Connection, payload: Buf) -> Result<Message> {
    loop {
        let m = Message::new(opcode::ECHO, "").with_payload(vec![payload.clone()]);
        match c.call(m, LONG).await {
            Err(e) if e.code == Code::Overloaded => sleep(Duration::from_millis(20)).await,
            r => return r,
        }
    }
}

/// Waits until all buffers are back except those of the shared receive queue.
pub async fn settled(f: &RdmaFabric) {
    let open = || f.devices.lock().values().filter(|d| d.strong_count() > 0).count();
    let own = RECEIVES as usize * MESSAGE + limits::PLACES * Budget::here().piece(f.usable);
    let start = Instant::now();
    while f.pool().stats().used > (open() * own) as u64 {
        assert!(start.elapsed() < Duration::from_secs(5), "still out: {:?}", f.pool().stats());
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn strangers_are_refused_in_words_and_others_served_on() {
    let Some(at) = here() else { return };
    let f = server();
    let (service, guard) = serve(&f, &at).await;
    let friend = f.connect(guard.endpoint(), None).await.unwrap();
    for (identity, cluster) in [
        (Identity::client([9; 32]), None),
        (Identity::server(&[9; 32]), None),
        (client_identity(), Some([6; 16])),
    ] {
        let e = fabric_of(identity, cluster, Options::default())
            .connect(guard.endpoint(), None)
            .await
            .err()
            .unwrap();
        assert_eq!(e.code, Code::Unauthenticated, "{e}");
    }
    works(&*friend).await;
    drop(friend);
    service.until(|s| s.disconnected.load(SeqCst) == 1).await;
    assert_eq!(service.peers.lock()[0].role, Role::Server);
    let at = guard.endpoint().clone();
    drop(guard);
    let start = Instant::now();
    while f.connect(&at, None).await.is_ok() {
        assert!(start.elapsed() < LONG);
        sleep(Duration::from_millis(10)).await;
    }
    let e = f.connect(&at, None).await.err().unwrap();
    assert!(e.code == Code::Disconnected && e.message.contains("nobody listens"), "{e}");
}

#[tokio::test]
async fn one_connection_too_many_is_told_so() {
    let Some(at) = here() else { return };
    let few = Options { max_connections: 1, ..Options::default() };
    let f = fabric_of(Identity::server(&[1; 32]), None, few);
    let (_service, guard) = serve(&f, &at).await;
    let first = f.connect(guard.endpoint(), None).await.unwrap();
    let e = f.connect(guard.endpoint(), None).await.err().unwrap();
    assert_eq!(e.code, Code::Overloaded, "{e}");
    works(&*first).await;
}

/// A peer that has finished its handshake and then writes anything.
pub struct Raw {
    pub q: Arc<Queue>,
    pub rd: stream::ReadHalf,
    pub wr: stream::WriteHalf,
}

pub async fn raw(f: &RdmaFabric, at: &Endpoint) -> Raw {
    let q = f.dial(at).await.unwrap();
    let (rd, wr) = stream::halves(&q);
    let mut both = tokio::io::join(rd, wr);
    handshake::dial(&mut both, &Party::new(client_identity(), None, [1; 32])).await.unwrap();
    let (rd, wr) = both.into_inner();
    Raw { q, rd, wr }
}

pub fn frame(regions: &Regions, opcode: u16, body: &[u8], len: usize, crc: u32) -> Vec<u8> {
    let header = Header {
        version: 1,
        kind: Kind::Request,
        flags: FLAG_PAYLOAD_SUMMED | FLAG_REGIONS,
        opcode,
        status: 0,
        deadline_ms: 0,
        request_id: 9,
        body_len: body.len() as u32,
        payload_len: len as u32,
        body_crc: crc32c(body),
        payload_crc: crc,
        trace: 0,
    };
    [&header.encode()[..], body, &regions.encode()].concat()
}

impl Raw {
    /// Asks for this many bytes, to be written to a place.
    pub async fn ask(&mut self, len: usize, to: Region) {
        let regions = Regions { payload: Vec::new(), room: Some(to) };
        self.wr
            .write_all(&frame(&regions, conformance::GENERATE, &len.to_le_bytes(), 0, 0))
            .await
            .unwrap();
    }

    pub async fn answer(&mut self) -> Header {
        let mut answer = [0; 64];
        timeout(LONG, self.rd.read_exact(&mut answer)).await.unwrap().unwrap();
        let answer = Header::decode(&answer).unwrap();
        let mut body = vec![0; answer.body_len as usize];
        self.rd.read_exact(&mut body).await.unwrap();
        answer
    }

    /// Waits for the end of the connection, and returns the reason.
    pub async fn ends(&mut self) -> Error {
        let mut rest = Vec::new();
        let _ = timeout(LONG, self.rd.read_to_end(&mut rest)).await.expect("the connection ends");
        assert!(rest.is_empty(), "answered");
        self.q.gone(&self.q.state.lock())
    }
}

/// The number in the body of a request for so many bytes.
pub fn number(body: &[u8]) -> usize {
    usize::from_le_bytes(body.try_into().expect("a number"))
}

/// Whether a device refused the operation.
pub fn is_refusal(e: &Error) -> bool {
    e.code == Code::Disconnected
        && (e.message.contains("broke: ") || e.message.contains("closed the connection"))
}

pub fn read_of(len: usize) -> Message {
    Message {
        answer_room: len,
        is_covered: true,
        ..Message::new(opcode::READ, len.to_le_bytes().to_vec())
    }
}

#[tokio::test]
async fn who_sends_what_is_no_message_is_cut_off_and_others_served_on() {
    let Some(at) = here() else { return };
    let f = server();
    let (service, guard) = serve(&f, &at).await;
    let friend = f.connect(guard.endpoint(), None).await.unwrap();
    const WRITE_WITH_IMM: std::ffi::c_int = 1;
    const SEND: std::ffi::c_int = 2;
    // More credits than exist; no immediate data; a message whose bytes were written elsewhere.
    for (n, (opcode, credits)) in
        [(op::SEND_WITH_IMM, u32::MAX), (SEND, 0), (WRITE_WITH_IMM, 0)].iter().enumerate()
    {
        let mut peer = raw(&f, guard.endpoint()).await;
        let mut wr = queue::new_wr(*opcode);
        wr.imm_or_key = *credits;
        peer.q.post(&mut peer.q.state.lock(), &mut wr, queue::Wr::Probe).unwrap();
        let mut rest = Vec::new();
        let _ = timeout(LONG, peer.rd.read_to_end(&mut rest)).await.expect("the connection ends");
        service.until(|s| s.disconnected.load(SeqCst) == n + 1).await;
        works(&*friend).await;
    }
}

#[tokio::test]
async fn reads_that_one_end_makes_are_those_that_the_other_is_asked_to_serve() {
    let Some(at) = here() else { return };
    let f = server();
    let mut to = addresses(&at).await.unwrap()[0];
    let listening = Id::new(f.lib).unwrap();
    to.set_port(listening.listen(to, BACKLOG).unwrap());
    let id = Id::new(f.lib).unwrap();
    id.resolve(None, to, RESOLVE_MS, "here").await.unwrap();
    let mut q = Queue::new(f.device(&id).unwrap(), id, "here".into());
    q.make().unwrap();
    // Serves three READs, issues five.
    q.id().connect(&greeting().encode(), (3, 5)).unwrap();
    let e = timeout(LONG, listening.events.expect(event::CONNECT_REQUEST, "here"))
        .await
        .unwrap()
        .unwrap();
    let id = Id::of_request(f.lib, e.id).unwrap();
    assert_eq!(e.reads, (5, 3));
    id.reject(&greeting().encode());
}

/// In one thread, so that the server takes no completion before all have come.
#[tokio::test]
async fn who_fills_all_shared_buffers_at_once_takes_none_away() {
    let Some(at) = here() else { return };
    let f = server();
    let (service, guard) = serve(&f, &at).await;
    let friend = f.connect(guard.endpoint(), None).await.unwrap();
    let flooder = fabric_of(client_identity(), None, Options::default());
    // The second one finds as many buffers as the first.
    for n in 1..=2 {
        let peer = raw(&flooder, guard.endpoint()).await;
        sleep(Duration::from_millis(200)).await;
        let room = peer.q.ops.clone().acquire_owned().await.unwrap();
        let (done, arrived) = tokio::sync::oneshot::channel();
        let last = queue::Wr::Op(queue::Op {
            _room: room,
            held: queue::Held::default(),
            done: Some(done),
        });
        let all = (1..peer.q.device.messages).map(|_| queue::Wr::Probe).chain([last]);
        for (i, record) in all.enumerate() {
            let mut wr = queue::new_wr(op::SEND_WITH_IMM);
            peer.q.post(&mut peer.q.state.lock(), &mut wr, record).unwrap();
            if i % 64 == 63 {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        std::thread::sleep(Duration::from_millis(500));
        assert!(
            timeout(LONG, arrived).await.unwrap().is_ok(),
            "flood {n}: each has a buffer and is completed"
        );
        timeout(LONG, service.until(|s| s.disconnected.load(SeqCst) == n))
            .await
            .expect("it is cut off");
        timeout(LONG, works(&*friend)).await.expect("others are served on");
    }
}

/// Answers READ with more than was asked for, and with exactly that.
struct Reader;

#[async_trait]
impl Service for Reader {
    async fn handle(&self, _: &crate::Peer, m: Message) -> Result<Message> {
        let payload = vec![conformance::pattern(number(&m.body), 2)];
        Ok(Message { payload, is_covered: true, ..Message::default() })
    }
}

#[tokio::test]
async fn replies_are_written_to_the_offered_room_or_to_one_asked_for() {
    let Some(at) = here() else { return };
    let f = server();
    let guard = f.listen(&at, Arc::new(Reader)).await.unwrap();
    let conn = f.connect(guard.endpoint(), None).await.unwrap();
    // More bytes are sent than announced.
    for (len, more) in
        [(1 << 20, 0), (100, 0), (8192, 1), (5000, 1 << 20), (0, 70_000), (4 << 20, 0)]
    {
        let ask = Message { answer_room: len, ..read_of(len + more) };
        let got = conn.call(ask, LONG).await.unwrap();
        let want = conformance::pattern(len + more, 2);
        assert!(
            got.payload_len() == want.len() && got.payload.iter().all(|p| p[..] == want[..]),
            "{len} {more}"
        );
    }
    settled(&f).await;
}

#[tokio::test]
async fn a_call_given_up_lends_until_it_is_answered_and_breaks_nothing() {
    let Some(at) = here() else { return };
    let f = server();
    let (service, guard) = serve(&f, &at).await;
    let conn = f.connect(guard.endpoint(), None).await.unwrap();
    let used = f.pool().stats().used;
    let payload = f.pool().get_now(1 << 20).freeze();
    let m = Message::new(conformance::GATED, "").with_payload(vec![payload]);
    let e = conn.call(m, Duration::from_millis(100)).await.unwrap_err();
    assert_eq!(e.code, Code::TimedOut);
    assert!(f.pool().stats().used >= used + (1 << 20), "lent still");
    works(&*conn).await;
    service.open(1);
    settled(&f).await;
    works(&*conn).await;
}

#[tokio::test]
async fn an_idle_connection_costs_no_cpu() {
    let Some(at) = here() else { return };
    let f = server();
    let (_service, guard) = serve(&f, &at).await;
    let conns =
        futures_util::future::join_all((0..8).map(|_| f.connect(guard.endpoint(), None))).await;
    for c in &conns {
        works(&**c.as_ref().unwrap()).await;
    }
    sleep(Duration::from_millis(500)).await;
    let cpu = || {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
    };
    let before = cpu();
    sleep(Duration::from_secs(3)).await;
    let used = cpu() - before;
    println!("8 idle connections and their listener: {used:?} of CPU time in 3 s");
    assert!(used < Duration::from_millis(15), "{used:?}");
}

/// Not a test but the peer of the next one.
#[tokio::test]
async fn peer_that_is_killed() {
    let Ok(at) = std::env::var("STRAKE_RDMA_PEER") else { return };
    let f = fabric_of(client_identity(), None, Options::default());
    let conn = f.connect(&at.parse().unwrap(), None).await.unwrap();
    let big = Buf::copy_from(&conformance::pattern(4 << 20, 1));
    loop {
        let calls = (0..4).map(|_| {
            conn.call(Message::new(opcode::ECHO, "").with_payload(vec![big.clone()]), LONG)
        });
        futures_util::future::join_all(calls).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_killed_in_mid_transfer() {
    let Some(at) = here() else { return };
    let f = server();
    let (service, guard) = serve(&f, &at).await;
    let friend = f.connect(guard.endpoint(), None).await.unwrap();
    for round in 0..3 {
        let before = service.handled.load(SeqCst);
        let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rdma::tests::peer_that_is_killed"])
            .env("STRAKE_RDMA_PEER", guard.endpoint().to_string())
            .stdout(std::process::Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        timeout(LONG, service.until(|s| s.handled.load(SeqCst) > before + 1))
            .await
            .expect("it transfers");
        child.kill().await.unwrap();
        timeout(LONG, service.until(|s| s.disconnected.load(SeqCst) == round + 1))
            .await
            .expect("its end is noticed");
        works(&*friend).await;
    }
    settled(&f).await;
}

/// Echoes over a connection, several at a time, counted and compared, until one fails.
async fn transfer(c: &dyn Connection, done: &AtomicUsize) -> Error {
    let big = Buf::copy_from(&conformance::pattern(1 << 20, 1));
    loop {
        let calls = (0..4)
            .map(|_| c.call(Message::new(opcode::ECHO, "").with_payload(vec![big.clone()]), LONG));
        for got in futures_util::future::join_all(calls).await {
            match got {
                Ok(m) => assert!(m.payload[0][..] == big[..]),
                Err(e) => return e,
            }
            done.fetch_add(1, SeqCst);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_vanishes_in_mid_transfer_takes_nobody_else_along() {
    let var = |name| std::env::var(name).ok();
    let (Some(at), Some(device), Some(stays)) =
        (here(), var("STRAKE_RDMA_VANISH"), var("STRAKE_RDMA_STAYS"))
    else {
        println!(
            "skipped: STRAKE_RDMA_VANISH and STRAKE_RDMA_STAYS name no soft-RoCE device that may be removed, and no address of another one"
        );
        return;
    };
    let transports = |identity| {
        Transports::new(Env::system(), identity, None, Pool::new(64 << 20), Options::default())
    };
    let (far, near) = (transports(Identity::server(&[1; 32])), transports(client_identity()));
    let service = Arc::new(TestService::default());
    let mut guards = Vec::new();
    for at in [at, Endpoint::Rdma(stays, 0), "tcp:127.0.0.1:0".parse().unwrap()] {
        guards.push(far.listen(&at, service.clone()).await.unwrap());
    }
    let mut conns = Vec::new();
    for g in &guards {
        conns.push(near.connect(g.endpoint(), None).await.unwrap());
    }
    let done = [const { AtomicUsize::new(0) }; 3];
    let count = |n: usize| done[n].load(SeqCst);
    let more = async |ns: &[usize], by: usize| {
        let from: Vec<usize> = ns.iter().map(|n| count(*n)).collect();
        while ns.iter().zip(&from).any(|(n, from)| count(*n) < from + by) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let scene = async {
        more(&[0, 1, 2], 2).await;
        // soft-RoCE delays the removal until no process has the device open, and librdmacm keeps it
        // open.
        let removal =
            std::process::Command::new("rdma").args(["link", "delete", &device]).spawn().unwrap();
        while !conns[0].is_closed() {
            sleep(Duration::from_millis(5)).await;
        }
        // By the other device and by TCP they continue over the same connections, and new clients
        // find a path.
        more(&[1, 2], 8).await;
        let e = near.connect(guards[0].endpoint(), None).await.err().unwrap();
        println!("removed: {e}");
        assert_eq!(e.code, Code::Disconnected);
        let all: Vec<String> = guards.iter().map(|g| g.endpoint().to_string()).collect();
        let start = Instant::now();
        let mut new = None;
        for route in near.routes(&all).unwrap() {
            if let Ok(Ok(c)) =
                timeout(Duration::from_millis(1500), near.connect(&route, None)).await
            {
                new = Some(c);
                break;
            }
        }
        let new = new.expect("a route is left");
        println!("removed: a new connection by {} after {:?}", new.addr(), start.elapsed());
        assert_eq!(new.addr(), guards[1].endpoint().to_string());
        works(&*new).await;
        more(&[1, 2], 4).await;
        removal
    };
    let others =
        async { tokio::join!(transfer(&*conns[1], &done[1]), transfer(&*conns[2], &done[2])) };
    let (e, _removal) = timeout(4 * LONG, async {
        tokio::select! {
            both = async { tokio::join!(transfer(&*conns[0], &done[0]), scene) } => both,
            (one, other) = others => panic!("another one ended too: {one}; {other}"),
        }
    })
    .await
    .expect("the calls end, and those of others go on");
    assert!(
        e.code == Code::Disconnected && !e.message.contains("silent"),
        "found out by waiting only: {e}"
    );
    println!("removed: {e}; {} and {} calls by the others", count(1), count(2));
    // Everything that was made on it is released, although the test holds the connection.
    for f in [&far, &near] {
        let f = f.rdma.get().unwrap();
        let start = Instant::now();
        while f.devices.lock().values().filter_map(Weak::upgrade).any(|d| d.name == device) {
            assert!(start.elapsed() < LONG, "it is held");
            sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Not a test but the other machine's part of those in `link_tests.rs`.
#[tokio::test]
async fn peer_that_serves() {
    let Ok(all) = std::env::var("STRAKE_RDMA_SERVE") else { return };
    let f = server();
    let mut serving = Vec::new();
    for at in all.split(',') {
        serving.push(serve(&f, &at.parse().unwrap()).await);
    }
    println!("serving");
    std::future::pending::<()>().await;
}

#[tokio::test]
async fn what_is_missing_is_said_in_one_sentence_and_nothing_falls_back() {
    match probe() {
        Ok(devices) => println!("skipped: this machine has RDMA ({})", devices.join(", ")),
        Err(e) => {
            assert_eq!(e.code, Code::OpNotSupp, "{e}");
            assert!(
                e.message.starts_with("RDMA is not available: ") && !e.message.contains('\n'),
                "{e}"
            );
            assert!(e.message.contains("install") || e.message.contains("load"), "{e}");
            let made = RdmaFabric::new(
                Env::system(),
                Identity::client([1; 32]),
                None,
                Pool::new(16 << 20),
                Options::default(),
            );
            assert_eq!(made.err().unwrap().message, e.message);
        }
    }
}
