//! Checks of what every [`Fabric`] must do; they panic where it does not. For tests of any
//! transport: give [`all`] two ends of it. Waits only for conditions, so it runs under tokio's
//! paused time too.
#![allow(clippy::expect_used, reason = "a check panics where a transport does not conform")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use futures_util::future::join_all;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Result, opcode};
use tokio::sync::{Notify, Semaphore};

use crate::{Buf, Connection, Endpoint, Fabric, Message, Peer, Role, Service};

const LONG: Duration = Duration::from_secs(60);
/// Answered once the gate is open.
pub const GATED: u16 = 0x70;
/// Answered with an error.
pub const FAILS: u16 = 0x71;
/// Answered with what the caller's own service answers to an echo of the body.
pub const BACK: u16 = 0x72;
/// Its handler panics.
pub const PANICS: u16 = 0x73;
/// Answered with as many payload bytes as the body says, under an opcode whose payload the
/// transport covers with a checksum.
pub const GENERATE: u16 = 0x74;

/// A connection whose peer answers nothing: calls fail at once. It is open until it is closed.
#[derive(Default)]
pub struct Open(AtomicBool);

#[async_trait]
impl Connection for Open {
    async fn call(&self, _: Message, _: Duration) -> Result<Message> {
        Err(Error::new(Code::Disconnected, "nobody"))
    }
    fn is_closed(&self) -> bool {
        self.0.load(SeqCst)
    }
    fn addr(&self) -> String {
        "nowhere".into()
    }
    fn close(&self) {
        self.0.store(true, SeqCst);
    }
}

/// A service that echoes, and waits, fails or calls back when asked to.
#[derive(Default)]
pub struct TestService {
    /// Requests that are being handled now.
    pub running: AtomicUsize,
    /// Most requests that were handled at the same time.
    pub most_running: AtomicUsize,
    /// Requests whose handling has ended.
    pub handled: AtomicUsize,
    /// Peers that have gone.
    pub disconnected: AtomicUsize,
    /// Wakes tasks that watch the counters.
    pub changed: Notify,
    /// The peer of each request, in order of arrival.
    pub peers: Mutex<Vec<Peer>>,
    gate: Gate,
}

struct Gate(Semaphore);

impl Default for Gate {
    fn default() -> Gate {
        Gate(Semaphore::new(0))
    }
}

impl TestService {
    /// Lets `n` gated requests finish.
    pub fn open(&self, n: usize) {
        self.gate.0.add_permits(n);
    }

    /// Waits until `is` holds for the counters.
    pub async fn until(&self, is: impl Fn(&TestService) -> bool) {
        loop {
            let changed = self.changed.notified();
            if is(self) {
                return;
            }
            changed.await;
        }
    }

    async fn answer(&self, peer: &Peer, m: Message) -> Result<Message> {
        match m.opcode {
            GATED => {
                let gone = |_| Error::new(Code::Io, "gate gone");
                self.gate.0.acquire().await.map_err(gone)?.forget();
                Ok(Message { payload: Vec::new(), ..m })
            }
            FAILS => Err(Error { code: Code::NotLeader, message: "as asked".into(), leader: 7 }),
            BACK => {
                let back = peer.back.clone().ok_or_else(|| Error::new(Code::Io, "no way back"))?;
                back.call(Message { opcode: opcode::ECHO, ..m }, LONG).await
            }
            PANICS => panic!("as asked"),
            GENERATE => {
                let n = m.body.iter().rev().fold(0usize, |n, b| (n << 8) | usize::from(*b));
                Ok(Message { payload: vec![pattern(n, 3)], ..m })
            }
            opcode::ECHO => Ok(m),
            other => Err(crate::unknown_opcode(other)),
        }
    }
}

struct Running<'a>(&'a TestService);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, SeqCst);
        self.0.handled.fetch_add(1, SeqCst);
        self.0.changed.notify_waiters();
    }
}

#[async_trait]
impl Service for TestService {
    async fn handle(&self, peer: &Peer, m: Message) -> Result<Message> {
        let n = self.running.fetch_add(1, SeqCst) + 1;
        self.most_running.fetch_max(n, SeqCst);
        self.changed.notify_waiters();
        let _running = Running(self);
        self.answer(peer, m).await
    }

    fn disconnected(&self, peer: &Peer) {
        self.peers.lock().push(peer.clone());
        self.disconnected.fetch_add(1, SeqCst);
        self.changed.notify_waiters();
    }
}

/// Bytes that differ by position and by seed.
pub fn pattern(len: usize, seed: usize) -> Buf {
    let bytes: Vec<u8> =
        (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 8) ^ seed.wrapping_mul(101)) as u8).collect();
    Buf::copy_from(&bytes)
}

fn echo(body: impl Into<Bytes>, payload: Vec<Buf>) -> Message {
    Message { opcode: opcode::ECHO, trace: 77, body: body.into(), payload, ..Message::default() }
}

fn flat(payload: &[Buf]) -> Vec<u8> {
    payload.iter().flat_map(|b| b.iter().copied()).collect()
}

macro_rules! checks {
    ($($check:ident)*) => {
        /// Runs every check between two fabrics of one cluster and reports how long each took. `at`
        /// is where `listener` can listen (anew for each check). Checks cannot be run one by one: a
        /// transport that conforms passes all of them.
        pub async fn all(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) {
            $(
                let start = std::time::Instant::now();
                $check(dialer, listener, at).await;
                println!("{}: {:?}", stringify!($check), start.elapsed());
            )*
        }
    };
}

// The checks are private: the compiler finds one that is not listed here.
checks! { sizes concurrency answers_in_any_order errors back_calls timeouts_and_dropped_calls windows endings }

struct Ends {
    service: Arc<TestService>,
    back: Arc<TestService>,
    conn: Arc<dyn Connection>,
    guard: crate::Listener,
}

async fn meet(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) -> Ends {
    let (service, back) = (Arc::new(TestService::default()), Arc::new(TestService::default()));
    let guard = listener.listen(at, service.clone()).await.expect("listen");
    let conn = dialer.connect(guard.endpoint(), Some(back.clone())).await.expect("connect");
    Ends { service, back, conn, guard }
}

/// Bodies and payloads of all sizes come back as they were, payloads aligned and in one piece.
async fn sizes(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) {
    let e = meet(dialer, listener, at).await;
    for body in [0usize, 1, 63, 64, 2048, 2049, 8191, 8192, 70_000, 4 << 20] {
        for payload in [0usize, 1, 4095, 4096, 65_536, 1_000_003, 16 << 20] {
            if body > 8192 && payload > 65_536 && body != 4 << 20 {
                continue;
            }
            let whole = pattern(payload, body);
            let (a, b) = (payload / 3, payload / 2);
            let parts = vec![
                whole.slice(0..a),
                whole.slice(a..b),
                whole.slice(b..b),
                whole.slice(b..payload),
            ];
            let text = pattern(body, 1);
            let got = e.conn.call(echo(text.to_vec(), parts), LONG).await.expect("echo");
            assert!(got.body[..] == text[..] && got.trace == 77, "body of {body}");
            assert!(flat(&got.payload) == whole[..], "payload of {payload}");
            assert_eq!(got.payload.len(), usize::from(payload > 0));
            assert!(
                got.payload.iter().all(|b| b.as_ptr().addr().is_multiple_of(crate::buf::ALIGN))
            );
        }
    }
    for n in [0usize, 5, 4096, 3 << 20] {
        let ask = Message::new(GENERATE, n.to_le_bytes().to_vec());
        let got = e.conn.call(ask, LONG).await.expect("generate");
        assert!(flat(&got.payload) == pattern(n, 3)[..]);
    }
    for (body, payload) in [((4 << 20) + 1, 0), (0, (16 << 20) + 1)] {
        let too_big = echo(vec![0; body], vec![pattern(payload, 0)]);
        assert_eq!(e.conn.call(too_big, LONG).await.expect_err("too big").code, Code::TooBig);
    }
    assert!(e.conn.call(echo("still here", vec![]), LONG).await.is_ok());
}

/// Many calls at a time, each with its own answer.
async fn concurrency(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) {
    let e = meet(dialer, listener, at).await;
    let calls = (0..2000usize).map(|i| {
        let e = &e;
        async move {
            let payload = if i % 7 == 0 { vec![pattern(i * 13, i)] } else { vec![] };
            let got = e.conn.call(echo(i.to_string(), payload), LONG).await.expect("echo");
            assert_eq!(got.body, i.to_string());
            assert!(
                flat(&got.payload) == if i % 7 == 0 { pattern(i * 13, i).to_vec() } else { vec![] }
            );
        }
    });
    join_all(calls).await;
    assert_eq!(e.service.handled.load(SeqCst), 2000);
}

/// A slow request does not delay others.
async fn answers_in_any_order(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) {
    let e = meet(dialer, listener, at).await;
    let slow = e.conn.call(Message::new(GATED, "slow"), LONG);
    let fast = async {
        for _ in 0..20 {
            e.conn.call(echo("fast", vec![pattern(5000, 1)]), LONG).await.expect("echo");
        }
        e.service.open(1);
    };
    let (slow, ()) = tokio::join!(slow, fast);
    assert_eq!(slow.expect("gated").body, "slow");
}

/// Errors of the service arrive whole, unknown requests and panics are errors of one call only.
async fn errors(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) {
    let e = meet(dialer, listener, at).await;
    let got = e.conn.call(Message::new(FAILS, ""), LONG).await.expect_err("fails");
    assert_eq!((got.code, got.leader, &got.message[..]), (Code::NotLeader, 7, "as asked"));
    let got = e.conn.call(Message::new(0x7fff, ""), LONG).await.expect_err("unknown");
    assert_eq!(got.code, Code::OpNotSupp);
    assert!(e.conn.call(Message::new(PANICS, ""), LONG).await.is_err());
    assert!(e.conn.call(echo("still here", vec![]), LONG).await.is_ok());
}

/// Requests go both ways over one connection, nested too, and need a service to go to.
async fn back_calls(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) {
    let e = meet(dialer, listener, at).await;
    let calls = (0..50).map(|i| e.conn.call(Message::new(BACK, i.to_string()), LONG));
    for (i, got) in join_all(calls).await.into_iter().enumerate() {
        assert_eq!(got.expect("called back").body, i.to_string());
    }
    assert_eq!(e.back.handled.load(SeqCst), 50);
    let deaf = dialer.connect(e.guard.endpoint(), None).await.expect("connect");
    let got = deaf.call(Message::new(BACK, "x"), LONG).await.expect_err("no service");
    assert_eq!(got.code, Code::OpNotSupp);
}

/// A call ends at its deadline. Abandoned calls free their slots, and their late answers are
/// discarded.
async fn timeouts_and_dropped_calls(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) {
    let e = meet(dialer, listener, at).await;
    let got =
        e.conn.call(Message::new(GATED, ""), Duration::from_millis(30)).await.expect_err("late");
    assert_eq!(got.code, Code::TimedOut);
    for round in 0..4 {
        // More than any window, all dropped while they run or wait.
        let calls = (0..400).map(|_| e.conn.call(Message::new(GATED, ""), LONG));
        tokio::select! {
            biased;
            _ = join_all(calls) => panic!("the gate is closed"),
            () = e.service.until(|s| s.running.load(SeqCst) > 0) => {}
        }
        e.service.open(1000);
        e.service.until(|s| s.running.load(SeqCst) == 0).await;
        for i in 0..300 {
            let body = format!("{round}.{i}");
            let got =
                e.conn.call(echo(body.clone(), vec![pattern(10, i)]), LONG).await.expect("echo");
            assert_eq!(got.body, body);
        }
        e.service.gate.0.forget_permits(usize::MAX);
    }
}

/// Far more calls than fit: a bounded number runs at a time, and all are answered in the end.
async fn windows(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) {
    let e = meet(dialer, listener, at).await;
    let calls = join_all((0..1500).map(|_| e.conn.call(Message::new(GATED, "x"), LONG)));
    let opener = async {
        e.service.until(|s| s.running.load(SeqCst) >= 200).await;
        e.service.open(1500);
    };
    let (answers, ()) = tokio::join!(calls, opener);
    assert!(answers.iter().all(Result::is_ok));
    let most = e.service.most_running.load(SeqCst);
    assert!(most <= 512, "{most} handlers at a time");
    let big = pattern(4 << 20, 9);
    // RDMA by software in a virtual machine moves 10 MB/s, and a server refuses a call that finds
    // no memory within a second: there fewer are sent, and again where that is the answer.
    let soft_rdma = std::env::var_os("STRAKE_RDMA_SOFT").is_some();
    let large = || async {
        loop {
            match e.conn.call(echo("", vec![big.clone()]), LONG).await {
                Err(e) if e.code == Code::Overloaded && soft_rdma => {}
                answer => return answer.expect("echo"),
            }
        }
    };
    for answer in join_all((0..if soft_rdma { 24 } else { 64 }).map(|_| large())).await {
        assert_eq!(answer.payload_len(), 4 << 20);
    }
}

/// However a connection ends: calls in flight end, later ones fail at once, the service is told
/// once.
async fn endings(dialer: &dyn Fabric, listener: &dyn Fabric, at: &Endpoint) {
    let e = meet(dialer, listener, at).await;
    assert!(!e.conn.is_closed());
    let call = e.conn.call(Message::new(GATED, ""), LONG);
    let closer = async {
        e.service.until(|s| s.running.load(SeqCst) == 1).await;
        e.conn.close();
    };
    let (got, ()) = tokio::join!(call, closer);
    assert_eq!(got.expect_err("closed").code, Code::Disconnected);
    assert!(e.conn.is_closed());
    let got = e.conn.call(echo("", vec![]), LONG).await.expect_err("closed");
    assert_eq!(got.code, Code::Disconnected);
    e.service.until(|s| s.disconnected.load(SeqCst) == 1).await;
    e.back.until(|s| s.disconnected.load(SeqCst) == 1).await;
    let peer = e.service.peers.lock()[0].clone();
    assert!(matches!(peer.role, Role::Client | Role::Server));
    let back = peer.back.expect("a way back");
    assert_eq!(back.call(echo("", vec![]), LONG).await.expect_err("gone").code, Code::Disconnected);

    // Dropping the handle ends it too.
    let second = dialer.connect(e.guard.endpoint(), None).await.expect("connect");
    second.call(echo("", vec![]), LONG).await.expect("echo");
    drop(second);
    e.service.until(|s| s.disconnected.load(SeqCst) == 2).await;

    // And so does dropping the listener; what runs may finish first.
    let third = dialer.connect(e.guard.endpoint(), Some(e.back.clone())).await.expect("connect");
    let running = e.service.running.load(SeqCst);
    let call = third.call(Message::new(GATED, "last"), LONG);
    let end = async {
        e.service.until(|s| s.running.load(SeqCst) > running).await;
        let at = e.guard.endpoint().clone();
        drop(e.guard);
        e.service.open(10);
        at
    };
    let (got, at) = tokio::join!(call, end);
    assert!(got.is_ok_and(|m| m.body == "last") || third.is_closed());
    e.back.until(|s| s.disconnected.load(SeqCst) == 2).await;
    assert!(third.is_closed());
    assert!(dialer.connect(&at, None).await.is_err());
}
