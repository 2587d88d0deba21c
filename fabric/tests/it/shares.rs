//! Limited resources are shared: a connection that is silent, or stops in the middle of a frame,
//! does not keep others out.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use strake_fabric::{
    Connection, Endpoint, Fabric, Identity, Listener, Message, Peer, Pool, Service, TcpFabric,
    conformance::TestService,
    tcp::{
        Options,
        handshake::{self, Party},
    },
};
use strake_proto::{
    Code, Result, WIRE_VERSION,
    checksum::crc32c,
    frame::{Header, Kind, MAX_BODY, MAX_PAYLOAD},
    opcode,
};
use strake_runtime::Env;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};

const LONG: Duration = Duration::from_secs(60);

fn fabric(identity: Identity, pool: u64, options: Options) -> TcpFabric {
    TcpFabric::new(Env::system(), identity, None, Pool::new(pool), options)
}

fn client_identity() -> Identity {
    Identity::client(Identity::server(&[1; 32]).client_key)
}

async fn serve(pool: u64, options: Options) -> (TcpFabric, Listener) {
    let f = fabric(Identity::server(&[1; 32]), pool, options);
    let at: Endpoint = "tcp:127.0.0.1:0".parse().unwrap();
    let guard = f.listen(&at, Arc::new(TestService::default())).await.unwrap();
    (f, guard)
}

async fn raw(at: &Endpoint) -> TcpStream {
    let Endpoint::Tcp(host, port) = at else { unreachable!() };
    TcpStream::connect((host.as_str(), *port)).await.unwrap()
}

/// A client's connection on which frames are written by hand.
async fn shaken(at: &Endpoint) -> TcpStream {
    shake(raw(at).await).await
}

/// A connection that sends one byte and then nothing.
async fn begun(at: &Endpoint) -> TcpStream {
    let mut s = raw(at).await;
    s.write_all(&[0]).await.unwrap();
    s
}

async fn shake(mut s: TcpStream) -> TcpStream {
    handshake::dial(&mut s, &Party::new(client_identity(), None, [2; 32])).await.unwrap();
    s
}

fn header(body: &[u8], body_len: u32, payload_len: u32) -> [u8; 64] {
    header_of(opcode::ECHO, body, body_len, payload_len)
}

fn header_of(opcode: u16, body: &[u8], body_len: u32, payload_len: u32) -> [u8; 64] {
    let h = Header {
        version: WIRE_VERSION,
        kind: Kind::Request,
        flags: 0,
        opcode,
        status: 0,
        deadline_ms: 0,
        request_id: 1,
        body_len,
        payload_len,
        body_crc: crc32c(body),
        payload_crc: 0,
        trace: 0,
    };
    h.encode()
}

async fn echo(conn: &dyn Connection, body: usize, payload: usize) {
    let payload =
        if payload == 0 { vec![] } else { vec![Pool::default().get_now(payload).freeze()] };
    let m = Message::new(opcode::ECHO, vec![7; body]).with_payload(payload);
    assert_eq!(conn.call(m, LONG).await.unwrap().body.len(), body);
}

/// Whether the other end closes the connection within 5 s.
async fn is_closed(s: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    timeout(Duration::from_secs(5), s.read_to_end(&mut rest)).await.is_ok()
}

#[tokio::test]
async fn silent_strangers_make_place_for_who_shakes_hands() {
    let options = Options { max_half_open: 16, handshake_timeout: LONG, ..Options::default() };
    let (_f, guard) = serve(16 << 20, options).await;
    let client = fabric(
        client_identity(),
        16 << 20,
        Options { handshake_timeout: LONG, ..Options::default() },
    );
    let there = client.connect(guard.endpoint(), None).await.unwrap();
    let mut mute = Vec::new();
    for _ in 0..40 {
        mute.push(begun(guard.endpoint()).await);
    }
    let began = Instant::now();
    let new = client.connect(guard.endpoint(), None).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    echo(&*new, 5, 0).await;
    echo(&*there, 5, 0).await;
    assert!(is_closed(&mut mute[0]).await, "the oldest made place");
}

#[tokio::test]
async fn half_a_payload_gives_its_memory_to_who_waits() {
    // This payload takes all of the pool.
    let (_f, guard) = serve(u64::from(MAX_PAYLOAD), Options::default()).await;
    let mut stuck = shaken(guard.endpoint()).await;
    stuck.write_all(&header(&[], 0, MAX_PAYLOAD)).await.unwrap();
    stuck.write_all(&[0; 100_000]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let client = fabric(client_identity(), 64 << 20, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    let began = Instant::now();
    echo(&*conn, 5, 1 << 20).await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    let began = Instant::now();
    assert!(is_closed(&mut stuck).await);
    assert!(
        began.elapsed() > Duration::from_millis(500),
        "not at once, or it would be made anew at once"
    );
}

/// A connection from another address.
async fn from_elsewhere(at: &Endpoint) -> TcpStream {
    let Endpoint::Tcp(host, port) = at else { unreachable!() };
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    socket.connect(format!("{host}:{port}").parse().unwrap()).await.unwrap()
}

#[tokio::test]
async fn halves_of_payloads_without_end_leave_half_of_the_memory_to_other_machines() {
    let (_f, guard) = serve(4 * u64::from(MAX_PAYLOAD), Options::default()).await;
    let mut halves = Vec::new();
    for _ in 0..16 {
        let at = guard.endpoint().clone();
        halves.push(tokio::spawn(async move {
            loop {
                let mut s = shake(from_elsewhere(&at).await).await;
                let _ = s.write_all(&header(&[], 0, MAX_PAYLOAD)).await;
                let _ = s.write_all(&[0; 100_000]).await;
                let _ = s.read_to_end(&mut Vec::new()).await;
            }
        }));
    }
    sleep(Duration::from_millis(500)).await;
    let client = fabric(client_identity(), 64 << 20, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    let began = Instant::now();
    for _ in 0..10 {
        echo(&*conn, 5, 1 << 20).await;
    }
    // Each call that waits for all of those would take about 0.8 s.
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    halves.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn who_goes_on_slowly_is_served_while_nobody_waits() {
    let options = Options { frame_pause: Duration::from_millis(800), ..Options::default() };
    let (_f, guard) = serve(u64::from(MAX_PAYLOAD), options).await;
    let mut slow = shaken(guard.endpoint()).await;
    slow.write_all(&header(&[], 0, 200_000)).await.unwrap();
    for _ in 0..8 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        slow.write_all(&[0; 25_000]).await.unwrap();
    }
    let mut answer = [0; 64];
    slow.read_exact(&mut answer).await.unwrap();
    // A connection that sends nothing more is closed in the end.
    slow.write_all(&header(&[], 0, 200_000)).await.unwrap();
    assert!(is_closed(&mut slow).await);
}

#[tokio::test]
async fn bodies_have_their_room_before_they_are_read() {
    let frame_pause = Duration::from_secs(2);
    let options = Options { max_body_bytes: 8 << 20, frame_pause, ..Options::default() };
    let (_f, guard) = serve(16 << 20, options).await;
    let body = vec![0; MAX_BODY as usize];
    let mut stuck = Vec::new();
    for _ in 0..4 {
        let mut s = shaken(guard.endpoint()).await;
        s.write_all(&header(&body, MAX_BODY, 0)).await.unwrap();
        // The server may not read this, so the write may block.
        let _ = timeout(Duration::from_millis(200), s.write_all(&body[1..])).await;
        stuck.push(s);
    }
    let client = fabric(client_identity(), 64 << 20, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    let began = Instant::now();
    echo(&*conn, 1000, 0).await;
    assert!(
        began.elapsed() < Duration::from_millis(500),
        "short ones wait for nothing: {:?}",
        began.elapsed()
    );
    for s in &mut stuck {
        assert!(is_closed(s).await);
    }
    echo(&*conn, MAX_BODY as usize, 0).await;
}

#[tokio::test]
async fn a_machine_whose_bodies_stop_has_less_memory_for_a_while() {
    // One body for each machine.
    let options = Options { max_body_bytes: 2 * MAX_BODY as usize, ..Options::default() };
    let (_f, guard) = serve(16 << 20, options).await;
    let body = vec![0; MAX_BODY as usize];
    let head = header(&body, MAX_BODY, 0);
    let began = Instant::now();
    let mut first = shake(from_elsewhere(guard.endpoint()).await).await;
    first.write_all(&head).await.unwrap();
    first.write_all(&body[1..]).await.unwrap();
    // The server sends a sign of life or GOAWAY; the peer connects anew at once.
    first.read_exact(&mut [0; 64]).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    drop(first);
    let client = fabric(client_identity(), 64 << 20, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    let mut served = Vec::new();
    while served.is_empty() {
        let mut s = shake(from_elsewhere(guard.endpoint()).await).await;
        let _ = timeout(Duration::from_secs(1), s.write_all(&[&head[..], &body].concat())).await;
        let status = loop {
            let mut answer = [0; 64];
            s.read_exact(&mut answer).await.unwrap();
            let h = Header::decode(&answer).unwrap();
            if h.kind == Kind::Response {
                break h.status;
            }
        };
        assert!(status == 0 || status == Code::Overloaded as u16, "{status}");
        served.extend((status == 0).then(|| began.elapsed()));
        echo(&*conn, MAX_BODY as usize, 0).await;
    }
    assert!(served[0] > Duration::from_secs(2), "{served:?}");
}

/// Answers reads with pool memory, as storage servers do; answers with long bodies, as metadata
/// servers do; and holds some requests back after reading them.
struct Answers {
    pool: Pool,
    made: AtomicUsize,
    gone: AtomicUsize,
    waiting: AtomicUsize,
    gate: Semaphore,
}

/// Answered with as many bytes of payload as its body says.
const READ: u16 = 1;
/// Answered with a long body.
const LIST: u16 = 2;
/// Answered when the gate is open.
const POLL: u16 = 3;

#[async_trait]
impl Service for Answers {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        match m.opcode {
            READ => {
                let mut b = self.pool.get(self.answer_len(&m)).await?;
                b.fill(7);
                self.made.fetch_add(1, SeqCst);
                Ok(Message::new(READ, "").with_payload(vec![b.freeze()]))
            }
            LIST => Ok(Message::new(LIST, vec![7; 1 << 20])),
            POLL => {
                drop(m);
                self.waiting.fetch_add(1, SeqCst);
                self.gate.acquire().await.unwrap().forget();
                Ok(Message::new(POLL, ""))
            }
            _ => Ok(m),
        }
    }
    fn answer_len(&self, m: &Message) -> usize {
        match m.opcode {
            READ => m.body[..].try_into().map_or(0, |len| u32::from_le_bytes(len) as usize),
            _ => 0,
        }
    }
    fn disconnected(&self, _: &Peer) {
        self.gone.fetch_add(1, SeqCst);
    }
}

async fn answering(pool: u64, options: Options) -> (Arc<Answers>, Listener) {
    let f = fabric(Identity::server(&[1; 32]), pool, options);
    let service = Arc::new(Answers {
        pool: f.pool().clone(),
        made: AtomicUsize::new(0),
        gone: AtomicUsize::new(0),
        waiting: AtomicUsize::new(0),
        gate: Semaphore::new(0),
    });
    let guard = f.listen(&"tcp:127.0.0.1:0".parse().unwrap(), service.clone()).await.unwrap();
    (service, guard)
}

fn reading(len: u32) -> Vec<u8> {
    len.to_le_bytes().to_vec()
}

/// A client with another address, which sends `times` requests and never reads an answer.
async fn greedy(at: &Endpoint, opcode: u16, body: &[u8], times: usize) -> TcpStream {
    let Endpoint::Tcp(host, port) = at else { unreachable!() };
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
    let mut s =
        shake(socket.connect(format!("{host}:{port}").parse().unwrap()).await.unwrap()).await;
    for _ in 0..times {
        s.write_all(&header_of(opcode, body, body.len() as u32, 0)).await.unwrap();
        s.write_all(body).await.unwrap();
    }
    s
}

#[tokio::test]
async fn who_reads_nothing_has_so_much_read_for_it_and_is_left_in_the_end() {
    let (service, guard) =
        answering(1 << 30, Options { frame_pause: Duration::from_secs(3), ..Options::default() })
            .await;
    let mute = greedy(guard.endpoint(), READ, &reading(4 << 20), 200).await;
    sleep(Duration::from_secs(2)).await;
    let used = service.pool.stats().used;
    assert!((8 << 20..=64 << 20).contains(&used), "{used} bytes wait for who does not read");
    assert_eq!(service.gone.load(SeqCst), 0, "nobody else needs them yet");
    let end = async {
        while service.gone.load(SeqCst) == 0 || service.pool.stats().used > 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(10), end).await.expect("it is not waited for any longer");
    assert!(
        service.made.load(SeqCst) < 30,
        "answers that cannot be sent are not read from the device"
    );
    drop(mute);
}

#[tokio::test]
async fn who_reads_nothing_leaves_memory_to_other_machines() {
    let (service, guard) = answering(64 << 20, Options::default()).await;
    let mut mute = Vec::new();
    for _ in 0..4 {
        mute.push(greedy(guard.endpoint(), READ, &reading(4 << 20), 100).await);
    }
    sleep(Duration::from_millis(500)).await;
    let client = fabric(client_identity(), 64 << 20, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    let began = Instant::now();
    let got = conn.call(Message::new(READ, reading(4 << 20)), LONG).await.unwrap();
    assert_eq!(got.payload_len(), 4 << 20);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert_eq!(service.gone.load(SeqCst), 0);
    // More memory is wanted than there is: connections that do not read are closed soon.
    let all = (0..12).map(|_| conn.call(Message::new(READ, reading(4 << 20)), LONG));
    let all = futures_util::future::join_all(all).await;
    assert!(all.iter().all(Result::is_ok));
    drop(mute);
}

#[tokio::test]
async fn long_answers_that_nobody_reads_are_bounded_and_short_ones_are_not_held_up() {
    let options = Options { max_answer_bytes: 16 << 20, ..Options::default() };
    let (service, guard) = answering(64 << 20, options).await;
    let mut mute = Vec::new();
    for _ in 0..3 {
        mute.push(greedy(guard.endpoint(), LIST, b"", 100).await);
    }
    sleep(Duration::from_millis(300)).await;
    let client = fabric(client_identity(), 64 << 20, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    let began = Instant::now();
    echo(&*conn, 1000, 0).await;
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    let got = conn.call(Message::new(LIST, ""), LONG).await.unwrap();
    assert_eq!(got.body.len(), 1 << 20);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    // A connection that does not read its waiting answers is closed.
    let left = async {
        while service.gone.load(SeqCst) == 0 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(15), left).await.expect("it is not waited for any longer");
    drop(mute);
}

#[tokio::test]
async fn a_request_that_waits_gives_back_the_room_of_its_body() {
    let (service, guard) =
        answering(16 << 20, Options { max_body_bytes: 8 << 20, ..Options::default() }).await;
    let body = vec![0; MAX_BODY as usize];
    let client = fabric(client_identity(), 64 << 20, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    let mut polls = Vec::new();
    for n in 0..6 {
        let (conn, m) = (conn.clone(), Message::new(POLL, body.clone()));
        polls.push(tokio::spawn(async move { conn.call(m, LONG).await }));
        let taken = async {
            while service.waiting.load(SeqCst) <= n {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(Duration::from_secs(5), taken).await.expect("there is room for each");
    }
    echo(&*conn, body.len(), 0).await;
    service.gate.add_permits(polls.len());
    for poll in polls {
        poll.await.unwrap().unwrap();
    }
}
