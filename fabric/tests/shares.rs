//! What is finite is shared: who is silent, or stops in the middle of a frame, keeps nobody else
//! out.

use std::{sync::Arc, time::Duration};

use strake_fabric::{
    Connection, Endpoint, Env, Fabric, Identity, Listener, Message, Pool, TcpFabric,
    conformance::TestService,
    tcp::{
        Options,
        handshake::{self, Party},
    },
};
use strake_proto::{
    WIRE_VERSION,
    checksum::crc32c,
    frame::{Header, Kind, MAX_BODY, MAX_PAYLOAD},
    opcode,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
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
    let mut s = raw(at).await;
    handshake::dial(&mut s, &Party::new(client_identity(), None, [2; 32])).await.unwrap();
    s
}

fn header(body: &[u8], body_len: u32, payload_len: u32) -> [u8; 64] {
    let h = Header {
        version: WIRE_VERSION,
        kind: Kind::Request,
        flags: 0,
        opcode: opcode::ECHO,
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
    let payload = if payload == 0 { vec![] } else { vec![Pool::default().get_now(payload).freeze()] };
    let m = Message::new(opcode::ECHO, vec![7; body]).with_payload(payload);
    assert_eq!(conn.call(m, LONG).await.unwrap().body.len(), body);
}

/// Whether the other end closes it soon.
async fn is_closed(s: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    timeout(Duration::from_secs(5), s.read_to_end(&mut rest)).await.is_ok()
}

#[tokio::test]
async fn silent_strangers_make_place_for_who_shakes_hands() {
    let options = Options { max_half_open: 8, handshake_timeout: LONG, ..Options::default() };
    let (_f, guard) = serve(16 << 20, options).await;
    let client = fabric(client_identity(), 16 << 20, Options { handshake_timeout: LONG, ..Options::default() });
    let there = client.connect(guard.endpoint(), None).await.unwrap();
    let mut mute = Vec::new();
    for _ in 0..40 {
        mute.push(raw(guard.endpoint()).await);
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
    // All of the pool.
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
    assert!(is_closed(&mut stuck).await);
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
    // And who does not go on at all is not kept for ever.
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
        // What nobody reads may not fit.
        let _ = timeout(Duration::from_millis(200), s.write_all(&body[1..])).await;
        stuck.push(s);
    }
    let client = fabric(client_identity(), 64 << 20, Options::default());
    let conn = client.connect(guard.endpoint(), None).await.unwrap();
    let began = Instant::now();
    echo(&*conn, 1000, 0).await;
    assert!(began.elapsed() < Duration::from_millis(500), "short ones wait for nothing: {:?}", began.elapsed());
    for s in &mut stuck {
        assert!(is_closed(s).await);
    }
    echo(&*conn, MAX_BODY as usize, 0).await;
}
