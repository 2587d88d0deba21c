//! The TCP fabric: what every fabric must do, and what only a network can do to it.

use std::{
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use strake_fabric::{
    Connection, Endpoint, Fabric, Identity, Listener, Message, Pool, Role, TcpFabric,
    conformance::{self, GATED, TestService},
    tcp::{
        Options,
        handshake::{self, Party},
    },
};
use strake_proto::{
    Code,
    checksum::crc32c,
    frame::{Header, Kind, MAX_BODY, MAX_PAYLOAD},
    opcode,
};
use strake_runtime::Env;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const LONG: Duration = Duration::from_secs(60);

fn fabric_with(identity: Identity, cluster: Option<[u8; 16]>, options: Options) -> TcpFabric {
    TcpFabric::new(Env::system(), identity, cluster, Pool::default(), options)
}

fn server() -> TcpFabric {
    fabric_with(Identity::server(&[1; 32]), Some([5; 16]), Options::default())
}

fn client_identity() -> Identity {
    Identity::client(Identity::server(&[1; 32]).client_key)
}

fn here() -> Endpoint {
    "tcp:127.0.0.1:0".parse().unwrap()
}

async fn serve(f: &TcpFabric) -> (Arc<TestService>, Listener) {
    let service = Arc::new(TestService::default());
    let guard = f.listen(&here(), service.clone()).await.unwrap();
    (service, guard)
}

fn echo(text: &str) -> Message {
    Message::new(opcode::ECHO, text.to_string())
}

async fn works(conn: &dyn Connection) {
    assert_eq!(conn.call(echo("ok"), LONG).await.unwrap().body, "ok");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conforms_on_threads() {
    let dialer = fabric_with(client_identity(), None, Options::default());
    conformance::all(&dialer, &server(), &here()).await;
}

#[tokio::test]
async fn conforms_in_one_thread() {
    conformance::all(&server(), &server(), &here()).await;
}

#[tokio::test]
async fn the_service_learns_the_role() {
    let f = server();
    let (service, guard) = serve(&f).await;
    let client = fabric_with(client_identity(), None, Options::default());
    works(&*client.connect(guard.endpoint(), None).await.unwrap()).await;
    service.until(|s| s.disconnected.load(SeqCst) == 1).await;
    works(&*f.connect(guard.endpoint(), None).await.unwrap()).await;
    service.until(|s| s.disconnected.load(SeqCst) == 2).await;
    let peers = service.peers.lock();
    assert_eq!((peers[0].role, peers[1].role), (Role::Client, Role::Server));
    assert!(peers[0].id != peers[1].id && peers[0].addr.starts_with("tcp:127.0.0.1:"));
}

#[tokio::test]
async fn strangers_are_refused_and_others_served_on() {
    let f = server();
    let (_service, guard) = serve(&f).await;
    let friend = f.connect(guard.endpoint(), None).await.unwrap();
    for (identity, cluster, code) in [
        (Identity::client([9; 32]), None, Code::Unauthenticated),
        (Identity::server(&[9; 32]), None, Code::Unauthenticated),
        (client_identity(), Some([6; 16]), Code::Unauthenticated),
    ] {
        let stranger = fabric_with(identity, cluster, Options::default());
        let e = stranger.connect(guard.endpoint(), None).await.err().unwrap();
        assert_eq!(e.code, code, "{e}");
    }
    let mut s = raw(&guard).await;
    let newer = Party { versions: (50, 60), ..Party::new(client_identity(), None, [1; 32]) };
    let e = handshake::dial(&mut s, &newer).await.unwrap_err();
    assert!(e.code == Code::Protocol && e.message.contains("50 to 60"), "{e}");
    works(&*friend).await;
}

#[tokio::test]
async fn nobody_listening_and_nobody_answering() {
    let f = server();
    let (_s, guard) = serve(&f).await;
    let at = guard.endpoint().clone();
    drop(guard);
    // The port is free a moment after the guard is gone.
    while f.connect(&at, None).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert_eq!(f.connect(&at, None).await.err().unwrap().code, Code::Disconnected);

    let mute = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = Endpoint::Tcp("127.0.0.1".into(), mute.local_addr().unwrap().port());
    let options = Options { handshake_timeout: Duration::from_millis(50), ..Options::default() };
    let hasty = fabric_with(client_identity(), None, options);
    assert_eq!(hasty.connect(&at, None).await.err().unwrap().code, Code::TimedOut);
}

async fn raw(guard: &Listener) -> TcpStream {
    let Endpoint::Tcp(host, port) = guard.endpoint() else { unreachable!() };
    TcpStream::connect((host.as_str(), *port)).await.unwrap()
}

/// A socket after the handshake, for a test to write any bytes to.
async fn shaken(guard: &Listener) -> TcpStream {
    let mut s = raw(guard).await;
    handshake::dial(&mut s, &Party::new(client_identity(), None, [1; 32])).await.unwrap();
    s
}

fn header(body: &[u8], payload: usize) -> Header {
    Header {
        version: 1,
        kind: Kind::Request,
        flags: 0,
        opcode: opcode::ECHO,
        status: 0,
        deadline_ms: 0,
        request_id: 9,
        body_len: body.len() as u32,
        payload_len: payload as u32,
        body_crc: crc32c(body),
        payload_crc: 0,
        trace: 0,
    }
}

#[tokio::test]
async fn bad_frames_end_their_connection_only() {
    let f = server();
    let (service, guard) = serve(&f).await;
    let friend = f.connect(guard.endpoint(), None).await.unwrap();
    let good = [&header(b"hello", 0).encode()[..], b"hello"].concat();
    let mut bad: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".repeat(8),
        header(b"", 0).encode()[..63].to_vec(),
        [&header(b"hello", 0).encode()[..], b"hel"].concat(),
        [&header(b"hello", 0).encode()[..], b"hellp"].concat(),
        [&header(b"", 100).encode()[..], &[7; 99]].concat(),
        Header { body_len: MAX_BODY + 1, ..header(b"", 0) }.encode().to_vec(),
        Header { payload_len: MAX_PAYLOAD + 1, ..header(b"", 0) }.encode().to_vec(),
        Header { version: 2, ..header(b"", 0) }.encode().to_vec(),
        Header { kind: Kind::Hello, ..header(b"", 0) }.encode().to_vec(),
        Header { kind: Kind::GoAway, ..header(b"x", 0) }.encode().to_vec(),
    ];
    bad.extend((0..64 * 8).step_by(5).map(|bit| {
        let mut b = good.clone();
        b[bit / 8] ^= 1 << (bit % 8);
        b
    }));
    for (i, bytes) in bad.iter().enumerate() {
        let mut s = shaken(&guard).await;
        s.write_all(bytes).await.unwrap();
        s.shutdown().await.unwrap();
        let mut rest = Vec::new();
        let _ = s.read_to_end(&mut rest).await; // a reset is fine, an answer is not
        assert!(rest.is_empty(), "case {i} was answered");
        service.until(|s| s.disconnected.load(SeqCst) == i + 1).await;
        works(&*friend).await;
    }
    // The same bytes undamaged are answered, even when sent one at a time.
    let mut s = shaken(&guard).await;
    s.set_nodelay(true).unwrap();
    for b in &good {
        s.write_all(&[*b]).await.unwrap();
    }
    let mut answer = [0; 69];
    s.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer[64..], b"hello");
}

#[tokio::test]
async fn bad_handshakes_are_dropped() {
    let options = Options {
        handshake_timeout: Duration::from_millis(100),
        max_half_open: 2,
        ..Options::default()
    };
    let f = fabric_with(Identity::server(&[1; 32]), None, options);
    let (service, guard) = serve(&f).await;
    // Four connections that send one byte take all places for a while; then the fifth is served.
    let mut mute = Vec::new();
    for _ in 0..4 {
        let mut s = raw(&guard).await;
        s.write_all(&[0]).await.unwrap();
        mute.push(s);
    }
    works(&*server().connect(guard.endpoint(), None).await.unwrap()).await;
    drop(mute);
    let mut s = raw(&guard).await;
    s.write_all(&[0x55; 64]).await.unwrap();
    let mut rest = Vec::new();
    let _ = s.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
    assert_eq!(service.handled.load(SeqCst), 1);
}

#[tokio::test]
async fn one_connection_too_many_is_told_so() {
    let few = Options { max_connections: 1, ..Options::default() };
    let f = fabric_with(Identity::server(&[1; 32]), None, few);
    let (service, guard) = serve(&f).await;
    let first = f.connect(guard.endpoint(), None).await.unwrap();
    let e = f.connect(guard.endpoint(), None).await.err().unwrap();
    assert_eq!(e.code, Code::Overloaded, "{e}");
    works(&*first).await;
    drop(first);
    service.until(|s| s.disconnected.load(SeqCst) == 1).await;
    // The place becomes free a moment later, when the connection's task has ended.
    while f.connect(guard.endpoint(), None).await.is_err() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_damaged_summed_payload_is_to_be_sent_again() {
    let f = server();
    let (_service, guard) = serve(&f).await;
    let mut s = shaken(&guard).await;
    let h = Header { flags: 1, opcode: conformance::FAILS, payload_crc: 5, ..header(b"", 10) };
    s.write_all(&[&h.encode()[..], &[1; 10]].concat()).await.unwrap();
    let mut answer = [0; 64];
    s.read_exact(&mut answer).await.unwrap();
    let answer = Header::decode(&answer).unwrap();
    assert_eq!((answer.status, answer.request_id), (Code::Resend as u16, 9));
}

#[tokio::test]
async fn a_peer_killed_in_mid_transfer() {
    let f = server();
    let (service, guard) = serve(&f).await;
    // The caller's process dies with half a payload sent.
    let mut s = shaken(&guard).await;
    s.write_all(&header(b"", 1 << 20).encode()).await.unwrap();
    s.write_all(&vec![1; 1 << 19]).await.unwrap();
    drop(s);
    service.until(|s| s.disconnected.load(SeqCst) == 1).await;
    assert_eq!(service.handled.load(SeqCst), 0);
    assert_eq!(f.pool().stats().used, 0, "its buffer is back");

    // The server's process dies with calls in flight.
    let doomed = server_with_env();
    let (service, guard) = serve(&doomed.1).await;
    let conn = f.connect(guard.endpoint(), None).await.unwrap();
    let calls =
        futures_util::future::join_all((0..10).map(|_| conn.call(Message::new(GATED, ""), LONG)));
    let kill = async {
        service.until(|s| s.running.load(SeqCst) == 10).await;
        doomed.0.kill();
    };
    let (answers, ()) = tokio::join!(calls, kill);
    assert!(answers.iter().all(|a| a.as_ref().is_err_and(|e| e.code == Code::Disconnected)));
}

fn server_with_env() -> (Env, TcpFabric) {
    let env = Env::system();
    let f = TcpFabric::new(
        env.clone(),
        Identity::server(&[1; 32]),
        None,
        Pool::default(),
        Options::default(),
    );
    (env, f)
}

/// Accepts a connection, does the handshake and then stays silent.
async fn mute_server(listener: tokio::net::TcpListener) -> TcpStream {
    let (mut s, _) = listener.accept().await.unwrap();
    handshake::answer(&mut s, &Party::new(Identity::server(&[1; 32]), None, [2; 32]))
        .await
        .unwrap();
    s
}

#[tokio::test]
async fn a_silent_peer_is_noticed_in_time_and_a_slow_handler_is_not_taken_for_one() {
    let silence = Duration::from_millis(400);
    let f = fabric_with(client_identity(), None, Options { silence, ..Options::default() });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = Endpoint::Tcp("127.0.0.1".into(), listener.local_addr().unwrap().port());
    let (conn, _mute) = tokio::join!(f.connect(&at, None), mute_server(listener));
    let start = tokio::time::Instant::now();
    let e = conn.unwrap().call(echo("anyone?"), LONG).await.unwrap_err();
    assert!(e.code == Code::Disconnected && e.message.contains("silent"), "{e}");
    assert!(start.elapsed() >= silence / 2);

    let slow =
        fabric_with(Identity::server(&[1; 32]), None, Options { silence, ..Options::default() });
    let (service, guard) = serve(&slow).await;
    let conn = f.connect(guard.endpoint(), None).await.unwrap();
    let call = conn.call(Message::new(GATED, "slow"), LONG);
    let later = async {
        tokio::time::sleep(silence * 4).await;
        service.open(1);
    };
    let (got, ()) = tokio::join!(call, later);
    assert_eq!(got.unwrap().body, "slow");
}

#[tokio::test]
async fn a_reader_without_room_refuses_instead_of_stopping_for_ever() {
    let tight =
        Options { max_handlers: 2, room_wait: Duration::from_millis(30), ..Options::default() };
    let f = fabric_with(Identity::server(&[1; 32]), None, tight);
    let (service, guard) = serve(&f).await;
    let conn = server().connect(guard.endpoint(), None).await.unwrap();
    let mut calls: FuturesUnordered<_> =
        (0..3).map(|_| conn.call(Message::new(GATED, ""), LONG)).collect();
    // The third is refused while the two still run.
    let refused = calls.next().await.unwrap().unwrap_err();
    assert_eq!(refused.code, Code::Overloaded, "{refused}");
    service.until(|s| s.running.load(SeqCst) == 2).await;
    service.open(2);
    while let Some(answer) = calls.next().await {
        answer.unwrap();
    }
    works(&*conn).await;
}

#[tokio::test]
async fn a_full_pool_holds_up_callers_but_not_answers() {
    let pool = Pool::new(1 << 20);
    let options = Options { room_wait: Duration::from_millis(30), ..Options::default() };
    let f = TcpFabric::new(Env::system(), Identity::server(&[1; 32]), None, pool.clone(), options);
    let (_service, guard) = serve(&server()).await;
    let conn = f.connect(guard.endpoint(), None).await.unwrap();
    let all = pool.get(1 << 20).await.unwrap();
    let got = conn
        .call(echo("").with_payload(vec![conformance::pattern(100_000, 1)]), LONG)
        .await
        .unwrap();
    assert!(got.payload[0][..] == conformance::pattern(100_000, 1)[..]);
    assert!(pool.stats().used > 1 << 20);
    drop((all, got));
    assert_eq!(pool.stats().used, 0);
}

/// Otherwise two servers that forward requests to each other could fill both pools and wait
/// forever.
#[tokio::test]
async fn a_full_pool_refuses_clients_but_not_servers() {
    let pool = Pool::new(1 << 20);
    let options = Options { room_wait: Duration::from_millis(40), ..Options::default() };
    let f = TcpFabric::new(Env::system(), Identity::server(&[1; 32]), None, pool.clone(), options);
    let (_service, guard) = serve(&f).await;
    let all = pool.get(1 << 20).await.unwrap();
    let call = async |from: &TcpFabric| {
        let conn = from.connect(guard.endpoint(), None).await.unwrap();
        let payload = conformance::pattern(100_000, 1);
        let got = conn.call(echo("").with_payload(vec![payload.clone()]), LONG).await?;
        assert!(got.payload[0][..] == payload[..]);
        Ok::<_, strake_proto::Error>(())
    };
    let client = fabric_with(client_identity(), None, Options::default());
    assert_eq!(call(&client).await.unwrap_err().code, Code::Overloaded);
    call(&server()).await.unwrap();
    drop(all);
    call(&client).await.unwrap();
    assert_eq!(pool.stats().used, 0);
}
