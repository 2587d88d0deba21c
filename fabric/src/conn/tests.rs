//! Connections that lend memory, over pipes within this process: a table replaces the keys and
//! windows of RDMA. So the code above the transport is tested without a device, and it is shown
//! that a fabric needs no more than this file.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Weak,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use async_trait::async_trait;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Result, frame::Region, opcode};
use strake_runtime::Env;
use tokio::sync::watch;

use super::{
    Bulk, Loan, Options, Streams,
    bulk::{AskRoom, Regions},
};
use crate::{
    Buf, BufMut, Connection, Endpoint, Fabric, Foreign, Identity, Lend, Listener, Message, Peer,
    Pool, Service, Transport, conformance,
};

const LONG: Duration = Duration::from_secs(20);

enum Lent {
    Payload(Buf),
    Room(BufMut),
    Foreign(Lend),
}

impl Lent {
    /// The address at `at` in lent foreign memory, if the loan allows this direction and length.
    fn foreign(&self, room: bool, at: u64, len: usize) -> Result<*mut u8> {
        let Lent::Foreign(what) = self else { return Err(refused("a key for something else")) };
        let m = what.memory();
        if matches!(what, Lend::Room(_)) != room || at + len as u64 > m.len() {
            return Err(refused("beyond what was lent"));
        }
        Ok(std::ptr::with_exposed_provenance_mut::<u8>((m.addr() + at) as usize))
    }
}

/// What one end lends to the other, by key.
#[derive(Default)]
struct Table {
    next: u32,
    lent: BTreeMap<u32, Lent>,
    loans: BTreeMap<u64, Vec<u32>>,
}

impl Table {
    fn add(&mut self, lent: Lent) -> Region {
        self.next += 1;
        let len = match &lent {
            Lent::Payload(b) => b.len(),
            Lent::Room(b) => b.len(),
            Lent::Foreign(what) => what.memory().len() as usize,
        };
        self.lent.insert(self.next, lent);
        Region { addr: 0, key: self.next, len: len as u32 }
    }
}

/// One end's view: what it lends, and what it can reach.
struct Memory {
    ours: Arc<Mutex<Table>>,
    theirs: Arc<Mutex<Table>>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    fetched: AtomicUsize,
    put: AtomicUsize,
    revoked: AtomicUsize,
}

fn refused(what: &str) -> Error {
    Error::new(Code::Disconnected, format!("refused: {what}"))
}

#[async_trait]
impl Bulk for Memory {
    async fn lend(&self, payload: Vec<Buf>, room: Option<BufMut>) -> Result<Loan> {
        let mut whole = BufMut::unpooled(payload.iter().map(Buf::len).sum());
        let mut at = 0;
        for b in &payload {
            whole[at..at + b.len()].copy_from_slice(b);
            at += b.len();
        }
        let mut t = self.ours.lock();
        let mut regions = Regions::default();
        if at > 0 {
            // In two parts, so that their order matters.
            let mut whole = whole.freeze();
            let first = whole.split_to(at / 2);
            regions.payload = vec![t.add(Lent::Payload(first)), t.add(Lent::Payload(whole))];
        }
        regions.room = room.map(|r| t.add(Lent::Room(r)));
        let id = u64::from(t.next);
        t.loans.insert(id, regions.payload.iter().chain(&regions.room).map(|r| r.key).collect());
        Ok(Loan { id, regions })
    }

    async fn lend_foreign(&self, what: &Lend) -> Result<Loan> {
        let mut t = self.ours.lock();
        let region = t.add(Lent::Foreign(what.clone()));
        let id = u64::from(t.next);
        t.loans.insert(id, vec![region.key]);
        let regions = match what {
            Lend::Payload(_) => Regions { payload: vec![region], room: None },
            Lend::Room(_) => Regions { payload: Vec::new(), room: Some(region) },
        };
        Ok(Loan { id, regions })
    }

    fn revoke(&self, loan: u64) {
        let mut t = self.ours.lock();
        for key in t.loans.remove(&loan).unwrap_or_default() {
            t.lent.remove(&key);
            self.counts.revoked.fetch_add(1, SeqCst);
        }
    }

    async fn take_back(&self, loan: u64) -> Result<Option<BufMut>> {
        let mut t = self.ours.lock();
        let mut room = None;
        for key in t.loans.remove(&loan).unwrap_or_default() {
            if let Some(Lent::Room(r)) = t.lent.remove(&key) {
                room = Some(r);
            }
        }
        Ok(room)
    }

    async fn fetch(&self, from: &[Region], mut to: BufMut) -> Result<BufMut> {
        let t = self.theirs.lock();
        let mut at = 0;
        for r in from {
            let (start, len) = (r.addr as usize, r.len as usize);
            let b = match t.lent.get(&r.key).ok_or_else(|| refused("a key that opens nothing"))? {
                Lent::Payload(b) => b,
                other => {
                    let from = other.foreign(false, r.addr, len)?;
                    // SAFETY: the lender of foreign memory keeps it in place, and the table's lock
                    // keeps the loan.
                    unsafe { to[at..at + len].as_mut_ptr().copy_from(from, len) };
                    at += len;
                    continue;
                }
            };
            let b = b.get(start..start + len).ok_or_else(|| refused("beyond what was lent"))?;
            to[at..at + len].copy_from_slice(b);
            at += len;
        }
        assert_eq!(at, to.len());
        self.counts.fetched.fetch_add(at, SeqCst);
        Ok(to)
    }

    async fn put(&self, payload: Vec<Buf>, to: Region) -> Result<()> {
        let mut t = self.theirs.lock();
        let lent = t.lent.get_mut(&to.key).ok_or_else(|| refused("a key that opens nothing"))?;
        let mut at = to.addr as usize;
        for b in payload {
            match &mut *lent {
                Lent::Room(room) => room[at..at + b.len()].copy_from_slice(&b),
                other => {
                    let to = other.foreign(true, at as u64, b.len())?;
                    // SAFETY: as in `fetch`.
                    unsafe { to.copy_from(b.as_ptr(), b.len()) };
                }
            }
            at += b.len();
            self.counts.put.fetch_add(b.len(), SeqCst);
        }
        Ok(())
    }
}

struct Listening {
    service: Arc<dyn Service>,
    /// Closed when the listener is dropped.
    stop: Weak<watch::Sender<()>>,
    stopping: watch::Receiver<()>,
}

#[derive(Clone)]
struct InMemory {
    streams: Streams,
    listeners: Arc<Mutex<BTreeMap<Endpoint, Listening>>>,
    counts: Arc<Counts>,
    /// The tables of all connections, of both ends.
    tables: Arc<Mutex<Vec<Arc<Mutex<Table>>>>>,
}

impl InMemory {
    fn new() -> InMemory {
        let identity = Identity::server(&[1; 32]);
        let streams =
            Streams::new(Env::system(), identity, None, Pool::new(512 << 20), Options::default());
        InMemory {
            streams,
            listeners: Arc::default(),
            counts: Arc::default(),
            tables: Arc::default(),
        }
    }

    fn ends(&self) -> (Arc<dyn Bulk>, Arc<dyn Bulk>) {
        let (a, b) = (Arc::<Mutex<Table>>::default(), Arc::<Mutex<Table>>::default());
        self.tables.lock().extend([a.clone(), b.clone()]);
        let end = |ours: &Arc<Mutex<Table>>, theirs: &Arc<Mutex<Table>>| {
            Arc::new(Memory {
                ours: ours.clone(),
                theirs: theirs.clone(),
                counts: self.counts.clone(),
            })
        };
        (end(&a, &b), end(&b, &a))
    }

    /// A connection whose ends move payloads by these tables.
    async fn join(
        &self,
        near: Arc<dyn Bulk>,
        far: Arc<dyn Bulk>,
        service: Arc<dyn Service>,
    ) -> Arc<dyn Connection> {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let served = self.streams.clone();
        let (rd, wr) = tokio::io::split(theirs);
        self.streams.env.spawn(async move {
            let admit = |_| Ok(());
            let (shared, ()) =
                served.welcome(rd, wr, Some(far), "memory".into(), service, admit).await.unwrap();
            shared.closed().await;
        });
        let (rd, wr) = tokio::io::split(ours);
        self.streams.connect_over(rd, wr, Some(near), "memory".into(), None).await.unwrap()
    }

    /// What is still lent, over all connections.
    fn lent(&self) -> usize {
        self.tables.lock().iter().map(|t| t.lock().lent.len()).sum()
    }
}

#[async_trait]
impl Fabric for InMemory {
    async fn connect(
        &self,
        to: &Endpoint,
        back: Option<Arc<dyn Service>>,
    ) -> Result<Arc<dyn Connection>> {
        let (near, far) = tokio::io::duplex(64 << 10);
        let (ours, theirs) = self.ends();
        {
            let listeners = self.listeners.lock();
            let l = listeners.get(to).filter(|l| l.stop.strong_count() > 0);
            let l =
                l.ok_or_else(|| Error::new(Code::Disconnected, format!("nobody listens at {to}")))?;
            let (f, service, stop) = (self.streams.clone(), l.service.clone(), l.stopping.clone());
            let (rd, wr) = tokio::io::split(far);
            self.streams.env.spawn(async move {
                if let Ok((shared, ())) =
                    f.welcome(rd, wr, Some(theirs), "memory".into(), service, |_| Ok(())).await
                {
                    f.attend(&shared, stop).await;
                }
            });
        }
        let (rd, wr) = tokio::io::split(near);
        self.streams.connect_over(rd, wr, Some(ours), to.to_string(), back).await
    }

    async fn listen(&self, at: &Endpoint, service: Arc<dyn Service>) -> Result<Listener> {
        let (stop, stopping) = watch::channel(());
        let stop = Arc::new(stop);
        self.listeners
            .lock()
            .insert(at.clone(), Listening { service, stop: Arc::downgrade(&stop), stopping });
        Ok(Listener::new(at.clone(), Box::new(stop)))
    }

    fn pool(&self) -> &Pool {
        &self.streams.pool
    }
}

#[tokio::test(start_paused = true)]
async fn conforms_with_lent_memory() {
    let f = InMemory::new();
    conformance::all(&f, &f, &Endpoint::Sim(1)).await;
    assert!(f.counts.fetched.load(SeqCst) > 1 << 20 && f.counts.put.load(SeqCst) > 1 << 20);
    // Loans of connections that ended in the middle end with the connection; this table does not
    // know of that end.
    f.tables.lock().clear();
}

#[tokio::test(start_paused = true)]
async fn what_was_lent_is_taken_back_before_the_caller_sees_the_answer() {
    let f = InMemory::new();
    let service = Arc::new(conformance::TestService::default());
    let at = Endpoint::Sim(1);
    let _guard = f.listen(&at, service.clone()).await.unwrap();
    let conn = f.connect(&at, None).await.unwrap();
    for len in [0, 4096, 4097, 100_000, 16 << 20] {
        let payload = conformance::pattern(len, 3);
        let m = Message::new(opcode::ECHO, "x").with_payload(vec![payload.clone()]);
        let got = conn.call(m, LONG).await.unwrap();
        assert!(got.payload_len() == len && got.payload.iter().all(|b| b[..] == payload[..]));
        assert!(
            got.went == Transport::Rdma
                && got.payload.iter().all(|b| b.transport() == Transport::Rdma),
            "{len}"
        );
        assert_eq!(f.lent(), 0, "{len}");
    }
    // A call that was abandoned lends until it is answered.
    let m =
        Message::new(conformance::GATED, "").with_payload(vec![conformance::pattern(100_000, 1)]);
    assert_eq!(conn.call(m, Duration::from_millis(10)).await.unwrap_err().code, Code::TimedOut);
    assert_eq!(f.lent(), 2);
    service.open(1);
    while f.lent() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Repeatedly asks for room for one answer.
struct Greedy(Mutex<Vec<Result<Message>>>);

#[async_trait]
impl Service for Greedy {
    async fn handle(&self, peer: &Peer, m: Message) -> Result<Message> {
        let back = peer.back.clone().ok_or_else(|| refused("no way back"))?;
        for id in [1, 1, 1, 77] {
            let ask = AskRoom { request_id: id, len: 1 << 20 };
            let got = back.call(Message::new(opcode::ROOM, ask.encode()), LONG).await;
            self.0.lock().push(got);
        }
        Ok(m)
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_gets_room_once_for_an_answer_that_is_waited_for() {
    let f = InMemory::new();
    let at = Endpoint::Sim(1);
    let greedy = Arc::new(Greedy(Mutex::default()));
    let _guard = f.listen(&at, greedy.clone()).await.unwrap();
    let conn = f.connect(&at, None).await.unwrap();
    // The first call of a connection has the id 1.
    conn.call(Message::new(0x75, ""), LONG).await.unwrap();
    let got: Vec<_> = greedy.0.lock().drain(..).map(|r| r.map(drop).map_err(|e| e.code)).collect();
    assert_eq!(got, [Ok(()), Err(Code::NoEnt), Err(Code::NoEnt), Err(Code::NoEnt)]);
    assert_eq!(f.lent(), 0);
}

/// Delays each loan.
struct Slow(Arc<dyn Bulk>);

#[async_trait]
impl Bulk for Slow {
    async fn lend(&self, payload: Vec<Buf>, room: Option<BufMut>) -> Result<Loan> {
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.0.lend(payload, room).await
    }
    async fn lend_foreign(&self, what: &Lend) -> Result<Loan> {
        self.0.lend_foreign(what).await
    }
    fn revoke(&self, loan: u64) {
        self.0.revoke(loan);
    }
    async fn take_back(&self, loan: u64) -> Result<Option<BufMut>> {
        self.0.take_back(loan).await
    }
    async fn fetch(&self, from: &[Region], to: BufMut) -> Result<BufMut> {
        self.0.fetch(from, to).await
    }
    async fn put(&self, payload: Vec<Buf>, to: Region) -> Result<()> {
        self.0.put(payload, to).await
    }
}

/// Answers with more than fits into a frame.
struct Verbose;

#[async_trait]
impl Service for Verbose {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        Ok(m.with_payload(vec![conformance::pattern(100_000, 5)]))
    }
}

/// A server asks the client that connected only for room. If the server lent memory for the answer
/// to that, a client that withholds the answer would hold as much memory as it likes.
#[tokio::test(start_paused = true)]
async fn a_request_for_room_is_no_reason_to_lend_any() {
    let f = InMemory::new();
    let (ours, theirs) = f.ends();
    let conn = f.join(Arc::new(Slow(ours)), theirs, Arc::new(Verbose)).await;
    let asks = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        // The server waits for the answer to its first request.
        let ask = AskRoom { request_id: 1, len: 16 << 20 };
        conn.call(Message::new(opcode::ROOM, ask.encode()), LONG)
            .await
            .map(drop)
            .map_err(|e| e.code)
    };
    let (answer, asked) = tokio::join!(conn.call(Message::new(0x75, ""), LONG), asks);
    assert_eq!(asked, Err(Code::NoEnt));
    assert_eq!(answer.unwrap().payload_len(), 100_000);
    assert_eq!(f.lent(), 0);
}

/// Has no memory to lend, or to write from.
struct Poor(Arc<dyn Bulk>, Code);

impl Poor {
    fn none<T>(&self) -> Result<T> {
        Err(Error::new(self.1, "as asked"))
    }
}

#[async_trait]
impl Bulk for Poor {
    async fn lend(&self, _: Vec<Buf>, _: Option<BufMut>) -> Result<Loan> {
        self.none()
    }
    async fn lend_foreign(&self, what: &Lend) -> Result<Loan> {
        self.0.lend_foreign(what).await
    }
    fn revoke(&self, loan: u64) {
        self.0.revoke(loan);
    }
    async fn take_back(&self, loan: u64) -> Result<Option<BufMut>> {
        self.0.take_back(loan).await
    }
    async fn fetch(&self, from: &[Region], to: BufMut) -> Result<BufMut> {
        self.0.fetch(from, to).await
    }
    async fn put(&self, _: Vec<Buf>, _: Region) -> Result<()> {
        self.none()
    }
}

#[tokio::test(start_paused = true)]
async fn payloads_go_through_the_stream_where_no_memory_may_be_registered() {
    for code in [Code::NoMem, Code::Overloaded, Code::Io] {
        for (near, far) in [(true, false), (false, true), (true, true)] {
            let f = InMemory::new();
            let (ours, theirs) = f.ends();
            let poor = |bulk: Arc<dyn Bulk>, is| {
                if is { Arc::new(Poor(bulk, code)) as Arc<dyn Bulk> } else { bulk }
            };
            let conn = f
                .join(
                    poor(ours, near),
                    poor(theirs, far),
                    Arc::<conformance::TestService>::default(),
                )
                .await;
            for len in [4096, 4097, 16 << 20] {
                let payload = conformance::pattern(len, 3);
                let parts = vec![payload.slice(0..len / 3), payload.slice(len / 3..len)];
                let got =
                    conn.call(Message::new(opcode::ECHO, "x").with_payload(parts), LONG).await;
                if len > 4096 && code == Code::Io {
                    assert_eq!(got.unwrap_err().code, code, "other errors are the call's");
                    continue;
                }
                let got = got.unwrap();
                assert!(
                    got.payload_len() == len && got.payload.iter().all(|b| b[..] == payload[..]),
                    "{len} {code:?}"
                );
                // It was not direct, and both ends of the call report that.
                let transport = |streamed| {
                    if streamed && len > 4096 { Transport::RdmaStream } else { Transport::Rdma }
                };
                assert_eq!(
                    (got.went, got.payload[0].transport()),
                    (transport(near), transport(true)),
                    "{len} {near} {far}"
                );
                assert_eq!(f.lent(), 0, "{len} {code:?}");
            }
            // Room for it is requested, and refused.
            let n: usize = 100_000;
            let got = conn
                .call(Message::new(conformance::GENERATE, n.to_le_bytes().to_vec()), LONG)
                .await;
            assert_eq!(
                got.map(|m| m.payload_len()).map_err(|e| e.code),
                if code == Code::Io { Err(code) } else { Ok(n) }
            );
            let moved = f.counts.put.load(SeqCst) + f.counts.fetched.load(SeqCst);
            assert_eq!(moved > 0, far && !near, "{near} {far}: the request's, by the server");
        }
    }
}

/// Answers READ with a pattern of the length in its body, and WRITE with the checksum of what
/// came; both when the gate is open.
struct Disk(tokio::sync::Semaphore);

#[async_trait]
impl Service for Disk {
    async fn handle(&self, _: &Peer, m: Message) -> Result<Message> {
        let _open = self.0.acquire().await;
        if m.opcode == opcode::WRITE {
            let sum = super::shared::sum(&m.payload);
            return Ok(Message::new(opcode::WRITE, sum.to_le_bytes().to_vec()));
        }
        let len = usize::from_le_bytes(m.body[..].try_into().expect("a number"));
        let payload = vec![conformance::pattern(len, 9)];
        Ok(Message { payload, is_covered: true, ..Message::new(opcode::READ, "") })
    }
}

fn read_of(len: usize, answer_room: usize) -> Message {
    let m = Message::new(opcode::READ, len.to_le_bytes().to_vec());
    Message { answer_room, is_covered: true, ..m }
}

/// Memory outside of any buffer, all of it `fill`.
fn device(len: usize, fill: u8) -> (Arc<Vec<Cell>>, Foreign) {
    let keep =
        Arc::new((0..len).map(|_| Cell(std::cell::UnsafeCell::new(fill))).collect::<Vec<_>>());
    // SAFETY: cells may be written while they are shared; they are looked at when nobody writes.
    let all = unsafe { Foreign::host(keep.as_ptr().cast_mut().cast(), len as u64, keep.clone()) };
    (keep, all)
}

#[repr(transparent)]
struct Cell(std::cell::UnsafeCell<u8>);

// SAFETY: only addresses are shared; the tests order the accesses.
unsafe impl Sync for Cell {}

fn bytes(of: &Arc<Vec<Cell>>) -> Vec<u8> {
    // SAFETY: nobody writes at that moment.
    of.iter().map(|c| unsafe { *c.0.get() }).collect()
}

#[tokio::test(start_paused = true)]
async fn foreign_memory_is_read_and_written_where_it_lies() {
    let f = InMemory::new();
    let at = Endpoint::Sim(1);
    let disk = Arc::new(Disk(tokio::sync::Semaphore::new(1)));
    let _guard = f.listen(&at, disk).await.unwrap();
    let conn = f.connect(&at, None).await.unwrap();
    assert!(conn.lends());
    let (memory, all) = device(1 << 20, 7);
    for (from, room, len) in [(0, 1 << 20, 1 << 20), (5, 100_000, 99_999), (3, 9000, 4097)] {
        let part = all.slice(from..from + room);
        let m = Message { lend: Some(Lend::Room(part.clone())), ..read_of(len, room as usize) };
        let got = conn.call(m, LONG).await.unwrap();
        assert!(got.placed as usize == len && got.payload.is_empty(), "{} of {len}", got.placed);
        let want = conformance::pattern(len, 9);
        assert_eq!(bytes(&memory)[from as usize..from as usize + len], want[..]);
        let m = Message {
            lend: Some(Lend::Payload(part.slice(0..len as u64))),
            is_covered: true,
            ..Message::new(opcode::WRITE, "")
        };
        let got = conn.call(m, LONG).await.unwrap();
        assert_eq!(got.body[..], super::shared::sum(&[want]).to_le_bytes());
        assert_eq!((got.went, f.lent()), (Transport::Rdma, 0));
    }
    // A payload that comes with its frame is not written there; one longer than the room is
    // refused.
    let before = bytes(&memory);
    let small = Message { lend: Some(Lend::Room(all.clone())), ..read_of(4096, 1 << 20) };
    let got = conn.call(small, LONG).await.unwrap();
    assert_eq!((got.placed, got.payload_len()), (0, 4096));
    let long = Message { lend: Some(Lend::Room(all.slice(0..5000))), ..read_of(5001, 5000) };
    assert_eq!(conn.call(long, LONG).await.unwrap_err().code, Code::NoEnt);
    // Requests whose payload the transport sums are refused, too, and those with another payload.
    for m in [
        Message::new(opcode::ECHO, ""),
        read_of(1, 1).with_payload(vec![conformance::pattern(1, 1)]),
    ] {
        let m = Message { lend: Some(Lend::Payload(all.clone())), ..m };
        assert_eq!(conn.call(m, LONG).await.unwrap_err().code, Code::Inval);
    }
    assert!(bytes(&memory) == before && f.lent() == 0 && f.counts.revoked.load(SeqCst) == 0);
}

#[tokio::test(start_paused = true)]
async fn foreign_memory_is_out_of_reach_when_a_call_has_ended_in_any_way() {
    let f = InMemory::new();
    let at = Endpoint::Sim(1);
    let disk = Arc::new(Disk(tokio::sync::Semaphore::new(0)));
    let _guard = f.listen(&at, disk.clone()).await.unwrap();
    let (memory, all) = device(1 << 20, 7);
    let conn = f.connect(&at, None).await.unwrap();
    let ask = || Message { lend: Some(Lend::Room(all.clone())), ..read_of(1 << 20, 1 << 20) };
    // Too late; dropped; ended with the connection.
    assert_eq!(conn.call(ask(), Duration::from_millis(10)).await.unwrap_err().code, Code::TimedOut);
    assert_eq!((f.lent(), Arc::strong_count(&memory)), (0, 2));
    {
        let call = conn.call(ask(), LONG);
        tokio::pin!(call);
        assert!(tokio::time::timeout(Duration::from_millis(10), &mut call).await.is_err());
        assert_eq!(f.lent(), 1);
    }
    assert_eq!(f.lent(), 0);
    let conn = f.connect(&at, None).await.unwrap();
    let (ended, ()) = tokio::join!(conn.call(ask(), LONG), async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        conn.close();
    });
    assert_eq!((ended.unwrap_err().code, f.lent()), (Code::Disconnected, 0));
    assert_eq!(f.counts.revoked.load(SeqCst), 3);
    disk.0.add_permits(9);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(bytes(&memory), [7; 1 << 20], "written by a late answer");
}

#[tokio::test]
async fn over_tcp_nothing_is_lent_and_nothing_sent() {
    let tcp = crate::TcpFabric::new(
        Env::system(),
        Identity::server(&[1; 32]),
        None,
        Pool::new(16 << 20),
        Options::default(),
    );
    let service = Arc::new(conformance::TestService::default());
    let guard = tcp.listen(&"tcp:127.0.0.1:0".parse().unwrap(), service.clone()).await.unwrap();
    let conn = tcp.connect(guard.endpoint(), None).await.unwrap();
    let (_memory, all) = device(8192, 7);
    let m = Message { lend: Some(Lend::Payload(all)), ..Message::new(opcode::WRITE, "") };
    let e = conn.call(m, LONG).await.unwrap_err();
    assert!(
        e.code == Code::OpNotSupp && e.message.contains("not connected by RDMA") && !conn.lends(),
        "{e}"
    );
    assert_eq!(service.handled.load(SeqCst), 0);
}
