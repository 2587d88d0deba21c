//! The reader of a connection: frames from the socket to callers and handlers. Headers and bodies
//! pass through one small buffer, so that many small frames cost one system call; payloads go from
//! the socket into a pool buffer.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use prost::Message as _;
use strake_proto::{
    Code, Error, Result,
    checksum::crc32c,
    frame::{FLAG_PAYLOAD_SUMMED, FLAG_REGIONS, HEADER_LEN, Header, Kind, MAX_PAYLOAD, Region},
    opcode, pb,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    time::{Instant, timeout},
};

use super::{
    bulk::{AskRoom, INLINE, REGIONS_HEAD, Regions, no_memory},
    room::{Charge, SHORT_BODY},
    shared::{Hold, Outgoing, Owed, Phase, Place, Placed, Shared, Waiter, outgoing, sum},
};
use crate::{Buf, BufMut, Message, Peer, Road, Role, Service};

/// Payloads with at least this much still to come are read in parts as large as the kernel allows.
const LARGE: usize = 128 << 10;

/// Minimum rate of a frame in bytes per second, while others wait for memory.
pub(super) const LEAST_RATE: u32 = 4 << 20;

/// How long a connection whose frame has stopped stays open before it is closed.
const LINGER: Duration = Duration::from_secs(1);

/// The receiving side of a stream.
pub trait Incoming: AsyncRead + Send + Unpin + 'static {
    /// Asks the kernel to wake the reader only when this many bytes are there, or as many as fit:
    /// each wakeup costs two context switches. False where the stream has no such option.
    fn wake_at(&self, _bytes: usize) -> bool {
        false
    }
}

/// A pipe within the process.
impl Incoming for tokio::io::ReadHalf<tokio::io::DuplexStream> {}

/// Size of the read-ahead buffer. Payload bytes that were read ahead must be copied into the
/// payload's buffer, so this is small.
const AHEAD: usize = 8 << 10;

/// The socket with the bytes that were read ahead.
struct Inbox<'a, R> {
    shared: &'a Shared,
    rd: R,
    buf: Box<[u8]>,
    start: usize,
    end: usize,
    /// Whether a frame has begun and then stopped.
    stopped: AtomicBool,
}

impl<R: Incoming> Inbox<'_, R> {
    fn io(&self, e: std::io::Error) -> Error {
        self.stopped.fetch_or(e.kind() == std::io::ErrorKind::TimedOut, Relaxed);
        Error::new(Code::Disconnected, format!("receiving from {} failed: {e}", self.shared.addr))
    }

    /// Reads some bytes ahead. `false` at the end of the stream. `within`: a frame has begun, so
    /// the stream must make progress.
    async fn fill(&mut self, within: bool) -> Result<bool> {
        self.buf.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let to = &mut self.buf[self.end..];
        let n = if within {
            go_on(self.shared, &mut self.rd, to).await
        } else {
            self.rd.read(to).await
        };
        let n = n.map_err(|e| self.io(e))?;
        self.end += n;
        self.shared.received(n);
        Ok(n > 0)
    }

    async fn header(&mut self) -> Result<Header> {
        while self.end - self.start < HEADER_LEN {
            if !self.fill(self.end > self.start).await? {
                let m = match self.end - self.start {
                    0 => format!("{} closed the connection", self.shared.addr),
                    n => format!(
                        "{} closed the connection within a frame ({n} bytes of a header)",
                        self.shared.addr
                    ),
                };
                return Err(Error::new(Code::Disconnected, m));
            }
        }
        let mut bytes = [0; HEADER_LEN];
        bytes.copy_from_slice(&self.buf[self.start..self.start + HEADER_LEN]);
        self.start += HEADER_LEN;
        Header::decode(&bytes)
    }

    /// Fills `to`, first from what was read ahead.
    async fn exact(&mut self, to: &mut [u8]) -> Result<()> {
        let ahead = to.len().min(self.end - self.start);
        to[..ahead].copy_from_slice(&self.buf[self.start..self.start + ahead]);
        self.start += ahead;
        let mut at = ahead;
        let large = to.len() - at >= LARGE;
        let begun = Instant::now();
        while at < to.len() {
            let n = self.part(&mut to[at..], large).await.map_err(|e| self.io(e))?;
            if n == 0 {
                let m = format!("{} closed the connection within a frame", self.shared.addr);
                return Err(Error::new(Code::Disconnected, m));
            }
            at += n;
            self.shared.received(n);
            if at < to.len() && self.shared.is_short() && begun.elapsed() > time_for(to.len()) {
                return Err(self.io(too_slow()));
            }
        }
        if large {
            self.rd.wake_at(1);
        }
        Ok(())
    }

    /// Reads what is there. If much is still to come, waits until the kernel holds as much as it
    /// can, but only so long that a slow sender is not taken for dead.
    async fn part(&mut self, to: &mut [u8], large: bool) -> std::io::Result<usize> {
        if large && self.rd.wake_at(to.len()) {
            if let Ok(r) = timeout(self.shared.options.silence / 10, self.rd.read(to)).await {
                return r;
            }
            self.rd.wake_at(1);
        }
        go_on(self.shared, &mut self.rd, to).await
    }

    async fn body(&mut self, h: &Header, charge: Option<&Charge>) -> Result<Bytes> {
        let len = h.body_len as usize;
        let body = if len <= self.end - self.start {
            let b = Bytes::copy_from_slice(&self.buf[self.start..self.start + len]);
            self.start += len;
            b
        } else {
            let mut b = vec![0; len];
            self.exact(&mut b).await?;
            match charge {
                Some(charge) => charge.on(b),
                None => Bytes::from(b),
            }
        };
        if crc32c(&body) != h.body_crc {
            return Err(Error::new(Code::Protocol, "frame body checksum mismatch"));
        }
        Ok(body)
    }

    /// The requester's regions, if it sent any. If none holds payload, the payload follows the
    /// frame.
    async fn regions(&mut self, h: &Header) -> Result<Option<Regions>> {
        if h.flags & FLAG_REGIONS == 0 {
            return Ok(None);
        }
        if self.shared.bulk().is_none() {
            return Err(Error::new(Code::Protocol, "payload regions on a transport without them"));
        }
        let mut head = [0; REGIONS_HEAD];
        self.exact(&mut head).await?;
        let mut all = [&head[..], &vec![0; Regions::rest(&head)?]].concat();
        self.exact(&mut all[REGIONS_HEAD..]).await?;
        let regions = Regions::decode(&all)?;
        if !regions.payload.is_empty() && regions.payload_len() != u64::from(h.payload_len) {
            let m = format!(
                "payload regions of {} bytes for a payload of {}",
                regions.payload_len(),
                h.payload_len
            );
            return Err(Error::new(Code::Protocol, m));
        }
        Ok(Some(regions))
    }

    async fn payload(&mut self, h: &Header, mut to: BufMut) -> Result<Payload> {
        self.exact(&mut to).await?;
        to.came_by(self.shared.stream_road(to.len()));
        Ok(checked(h, to))
    }

    /// Reads and discards a payload that is not wanted.
    async fn skip(&mut self, len: u32) -> Result<()> {
        let mut left = len as usize;
        while left > 0 {
            if self.start == self.end && !self.fill(true).await? {
                return Err(Error::new(Code::Disconnected, "the connection ended within a frame"));
            }
            let n = left.min(self.end - self.start);
            self.start += n;
            left -= n;
        }
        Ok(())
    }
}

/// Reads the rest of a frame, which must make progress: it may hold memory that others wait for.
async fn go_on<R: Incoming>(s: &Shared, rd: &mut R, to: &mut [u8]) -> std::io::Result<usize> {
    let mut waited = Duration::ZERO;
    loop {
        let pause = s.options.frame_pause_full;
        if let Ok(r) = timeout(pause, rd.read(to)).await {
            return r;
        }
        waited += pause;
        if waited >= s.options.frame_pause || s.is_short() {
            return Err(too_slow());
        }
    }
}

fn too_slow() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "a frame began but did not continue")
}

/// How long this many bytes may take while others wait for memory.
fn time_for(bytes: usize) -> Duration {
    Duration::from_secs(1) + Duration::from_secs(bytes as u64) / LEAST_RATE
}

enum Payload {
    Whole(Vec<Buf>),
    Damaged,
}

fn checked(h: &Header, got: BufMut) -> Payload {
    if h.flags & FLAG_PAYLOAD_SUMMED != 0 && crc32c(&got) != h.payload_crc {
        return Payload::Damaged;
    }
    Payload::Whole(if got.is_empty() { Vec::new() } else { vec![got.freeze()] })
}

fn damaged() -> Error {
    Error::new(Code::Resend, "a payload was damaged in transit; send it again")
}

/// Reads until the connection ends, and says why it did.
pub(super) async fn run<R: Incoming>(
    s: &Arc<Shared>,
    rd: R,
    peer: &Arc<Peer>,
    service: Option<&Arc<dyn Service>>,
) -> Error {
    let mut inbox = Inbox {
        shared: s,
        rd,
        buf: vec![0; AHEAD].into(),
        start: 0,
        end: 0,
        stopped: AtomicBool::new(false),
    };
    loop {
        let done = match inbox.header().await {
            Ok(h) if h.version != s.version => Err(Error::new(
                Code::Protocol,
                format!("frame of wire version {} after agreeing on {}", h.version, s.version),
            )),
            Ok(h) => match h.kind {
                Kind::Request => request(s, &mut inbox, &h, peer, service).await,
                Kind::Response => response(s, &mut inbox, &h).await,
                Kind::GoAway => {
                    s.peer_goes_away();
                    empty(&h)
                }
                Kind::KeepAlive => empty(&h),
                Kind::Hello => {
                    Err(Error::new(Code::Protocol, "handshake frame after the handshake"))
                }
            },
            Err(e) => Err(e),
        };
        if let Err(e) = done {
            if inbox.stopped.into_inner() && service.is_some() {
                // It keeps no memory any more. If it were closed at once, the peer would reconnect
                // at once.
                s.go_away();
                let _ = timeout(LINGER, s.closed()).await;
            }
            return e;
        }
    }
}

fn empty(h: &Header) -> Result<()> {
    if h.body_len == 0 && h.payload_len == 0 {
        return Ok(());
    }
    Err(Error::new(Code::Protocol, format!("{:?} frame that should be empty", h.kind)))
}

async fn response<R: Incoming>(
    s: &Arc<Shared>,
    inbox: &mut Inbox<'_, R>,
    h: &Header,
) -> Result<()> {
    let placed = h.flags & FLAG_REGIONS != 0;
    let behind = if placed { 0 } else { h.payload_len };
    let charge = match body_room(s, h, s.passes_on).await {
        Ok(charge) => charge,
        Err(e) => {
            inbox.skip(h.body_len).await?;
            inbox.skip(behind).await?;
            if let Some(waiting) = s.take_waiting(h.request_id) {
                waiting.answer(Err(e));
            }
            return Ok(());
        }
    };
    let body = inbox.body(h, charge.as_ref()).await?;
    let Some(waiting) = s.take_waiting(h.request_id) else {
        // The caller has given up this call.
        return inbox.skip(behind).await;
    };
    let result = if h.status != 0 {
        inbox.skip(behind).await?;
        let e = pb::Status::decode(body).map_or_else(
            |_| {
                Error::new(
                    Code::from_wire(u32::from(h.status)),
                    "the peer's error came without a readable text",
                )
            },
            Error::from,
        );
        Err(e)
    } else if placed {
        Ok(Message { opcode: h.opcode, trace: h.trace, body, ..Message::default() })
    } else {
        match response_buffer(s, h.payload_len as usize).await {
            Ok(buf) => match inbox.payload(h, buf).await? {
                Payload::Whole(payload) => Ok(Message {
                    opcode: h.opcode,
                    trace: h.trace,
                    body,
                    payload,
                    ..Message::default()
                }),
                Payload::Damaged => Err(damaged()),
            },
            Err(e) => {
                inbox.skip(behind).await?;
                Err(e)
            }
        }
    };
    if waiting.loans.is_empty() && !placed {
        waiting.answer(result);
    } else {
        s.env.spawn(settle(s.clone(), *h, waiting, result));
    }
    Ok(())
}

/// Takes back what was lent to the call, and then completes it; with the bytes that the peer wrote
/// to the lent memory if the header says so.
async fn settle(s: Arc<Shared>, h: Header, mut waiting: Waiter, result: Result<Message>) {
    let mut room = None;
    for loan in std::mem::take(&mut waiting.loans) {
        let Some(bulk) = s.bulk() else { return waiting.answer(Err(s.over())) };
        match bulk.take_back(loan).await {
            Ok(r) => room = r.or(room),
            Err(e) => return waiting.answer(Err(e)),
        }
    }
    let placed = h.status == 0 && h.flags & FLAG_REGIONS != 0;
    let foreign = waiting.foreign;
    waiting.answer(match (result, room) {
        (Ok(m), None) if placed && foreign.is_some_and(|room| h.payload_len <= room) => {
            s.counter.received(h.payload_len.into());
            Ok(Message { placed: h.payload_len, ..m })
        }
        (Ok(mut m), Some(mut room)) if placed && room.len() >= h.payload_len as usize => {
            room.truncate(h.payload_len as usize);
            room.came_by(Road::Rdma);
            s.counter.received(h.payload_len.into());
            match checked(&h, room) {
                Payload::Whole(p) => {
                    m.payload = p;
                    Ok(m)
                }
                Payload::Damaged => Err(damaged()),
            }
        }
        (Ok(_), _) if placed => {
            let e = Error::new(
                Code::Protocol,
                format!("{} wrote a reply outside of the region for it", s.addr),
            );
            s.fail(&e);
            Err(e)
        }
        (result, _) => result,
    });
}

/// Answers a ROOM request: lends a buffer to the call that it names.
async fn lend_room(s: Arc<Shared>, body: Bytes) -> Result<Message> {
    let ask = AskRoom::decode(&body)?;
    let over = || Error::new(Code::NoEnt, "nobody waits for that reply");
    let bulk = s.bulk().ok_or_else(over)?;
    if !s.may_have_room(ask.request_id) {
        return Err(over());
    }
    let room = pool_buffer(&s, ask.len as usize).await;
    let loan = bulk.lend(Vec::new(), Some(room)).await?;
    if !s.add_loan(ask.request_id, loan.id) {
        bulk.take_back(loan.id).await?;
        return Err(over());
    }
    Ok(Message::new(opcode::ROOM, loan.regions.encode()))
}

/// A buffer for an arriving payload. Goes beyond the pool's limit if the pool stays full for too
/// long.
pub(super) async fn pool_buffer(s: &Shared, len: usize) -> BufMut {
    match timeout(s.options.room_wait, s.pool.get(len)).await {
        Ok(Ok(b)) => b,
        _ => s.pool.get_now(len),
    }
}

/// Waits for the pool only for a while: the holders of its buffers may be waiting for a response
/// that comes after this one. A response that is passed on to a client stays within the pool's
/// limit: that client may ask for much and read nothing.
async fn response_buffer(s: &Arc<Shared>, len: usize) -> Result<BufMut> {
    if len == 0 {
        return Ok(s.pool.get_now(0));
    }
    match waiting_for_room(s, s.pool.get(len)).await {
        Some(Ok(b)) => Ok(b),
        _ if s.passes_on => {
            let m = "the relaying server has no memory for this answer; try again later";
            Err(Error::new(Code::Overloaded, m))
        }
        _ => Ok(s.pool.get_now(len)),
    }
}

/// Polls once: `Ready` only if the result is there without waiting.
pub(super) async fn at_once<T>(mut what: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    std::future::poll_fn(|cx| Poll::Ready(what.as_mut().poll(cx))).await
}

/// Lets the reader wait for at most `Options::room_wait`, while this end sends signs of life.
async fn waiting_for_room<T>(s: &Arc<Shared>, room: impl Future<Output = T>) -> Option<T> {
    tokio::pin!(room);
    // The timer and the two counters are only set up if it must wait.
    if let Poll::Ready(r) = at_once(room.as_mut()).await {
        return Some(r);
    }
    let _owed = s.owe();
    s.stalled.store(true, Relaxed);
    let r = timeout(s.options.room_wait, room).await.ok();
    s.stalled.store(false, Relaxed);
    r
}

/// A buffer for a request's payload. A payload larger than the whole pool, which may be small where
/// little memory may be locked, takes all of the pool. A request of another server waits only
/// briefly and then goes beyond the limit: what that server forwards lies in its own pool
/// meanwhile, and our pool may be full of requests that wait for memory in its pool.
async fn request_buffer(s: &Shared, len: usize, from: Role) -> Result<BufMut> {
    if len == 0 {
        return Ok(s.pool.get_now(0));
    }
    let lens = [len];
    let room = s.pool.get_all(&lens);
    let room = match from {
        Role::Server => match timeout(s.options.room_wait / 4, room).await {
            Ok(room) => room,
            Err(_) => return Ok(s.pool.get_now(len)),
        },
        _ => room.await,
    };
    Ok(room?.swap_remove(0))
}

/// Reserves memory for a body that comes from or goes to a client, before it is read. What servers
/// send each other is limited by what clients may send them.
async fn body_room(s: &Arc<Shared>, h: &Header, of_client: bool) -> Result<Option<Charge>> {
    if h.body_len <= SHORT_BODY || !of_client {
        return Ok(None);
    }
    match waiting_for_room(s, s.room.bodies.take(h.body_len as usize)).await {
        Some(room) => Ok(Some(Charge::new(room))),
        None => Err(Error::new(
            Code::Overloaded,
            "this server has too many long requests; try again later",
        )),
    }
}

async fn request<R: Incoming>(
    s: &Arc<Shared>,
    inbox: &mut Inbox<'_, R>,
    h: &Header,
    peer: &Arc<Peer>,
    service: Option<&Arc<dyn Service>>,
) -> Result<()> {
    let arrived = Instant::now();
    let owed = s.owe();
    let body_room = body_room(s, h, peer.role == Role::Client).await;
    let body = match &body_room {
        Ok(charge) => inbox.body(h, charge.as_ref()).await?,
        Err(_) => {
            inbox.skip(h.body_len).await?;
            Bytes::new()
        }
    };
    let regions = inbox.regions(h).await?;
    let lent = regions.is_some();
    let Regions { payload: parts, room } = regions.unwrap_or_default();
    let len = h.payload_len as usize;
    let behind = if parts.is_empty() { h.payload_len } else { 0 };
    let mut answer = Answer {
        shared: s.clone(),
        header: *h,
        arrived,
        place: None,
        room,
        lent,
        streamed: behind as usize > INLINE,
        is_bounded: false,
        _owed: owed,
        done: false,
    };
    let body_room = match body_room {
        Ok(room) => room,
        Err(e) => {
            inbox.skip(behind).await?;
            answer.send(Err(e), None);
            return Ok(());
        }
    };
    if h.opcode == opcode::ROOM && s.bulk().is_some() && s.phase() != Phase::Closed {
        inbox.skip(behind).await?;
        let asked = lend_room(s.clone(), body);
        s.env.spawn(async move { answer.send(asked.await, None) });
        return Ok(());
    }
    let refusal = match service {
        _ if s.phase() != Phase::Open => {
            Some(Error::new(Code::Disconnected, "this server is shutting down"))
        }
        None => Some(crate::unknown_opcode(h.opcode)),
        Some(_) => None,
    };
    let (Some(service), None) = (service, &refusal) else {
        inbox.skip(behind).await?;
        answer.send(Err(refusal.unwrap_or_else(|| crate::unknown_opcode(h.opcode))), None);
        return Ok(());
    };
    let room = async {
        let mut place = Place {
            _body: body_room.map(Charge::until),
            ..place(s, h.body_len as usize + len).await?
        };
        if peer.role == Role::Client && len > INLINE {
            place._upload = Some(s.room.uploads.take(len).await);
        }
        Ok((place, request_buffer(s, len, peer.role).await?))
    };
    let refusal = match waiting_for_room(s, room).await {
        Some(Ok((place, buf))) => {
            answer.place = Some(place);
            let (service, peer) = (service.clone(), peer.clone());
            let m = Message { opcode: h.opcode, trace: h.trace, body, ..Message::default() };
            if !parts.is_empty() {
                s.env.spawn(fetch_and_handle(answer, parts, buf, m, peer, service));
                return Ok(());
            }
            match inbox.payload(h, buf).await? {
                Payload::Whole(payload) => {
                    s.env.spawn(handle(answer, Message { payload, ..m }, peer, service));
                    return Ok(());
                }
                Payload::Damaged => damaged(),
            }
        }
        Some(Err(e)) => {
            inbox.skip(behind).await?;
            e
        }
        None => {
            inbox.skip(behind).await?;
            Error::new(
                Code::Overloaded,
                "this server has too many requests running; try again later",
            )
        }
    };
    answer.send(Err(refusal), None);
    Ok(())
}

async fn handle(mut answer: Answer, m: Message, peer: Arc<Peer>, service: Arc<dyn Service>) {
    if peer.role == Role::Client {
        answer.is_bounded = true;
        if !answer.payload_room(service.answer_len(&m)).await {
            return answer.send(Err(answer.shared.over()), None);
        }
    }
    let r = service.handle(&peer, m).await;
    answer.finish(r).await;
}

/// Fetches the payload from the requester's memory, and handles the request.
async fn fetch_and_handle(
    mut answer: Answer,
    parts: Vec<Region>,
    to: BufMut,
    m: Message,
    peer: Arc<Peer>,
    service: Arc<dyn Service>,
) {
    let Some(bulk) = answer.shared.bulk() else { return };
    let got = match bulk.fetch(&parts, to).await {
        Ok(mut got) => {
            got.came_by(Road::Rdma);
            answer.shared.counter.received(got.len() as u64);
            checked(&answer.header, got)
        }
        Err(e) => return answer.send(Err(e), None),
    };
    match got {
        Payload::Whole(payload) => handle(answer, Message { payload, ..m }, peer, service).await,
        Payload::Damaged => answer.send(Err(damaged()), None),
    }
}

async fn place(s: &Shared, bytes: usize) -> Result<Place> {
    let closed = |_| Error::new(Code::Disconnected, "connection closed");
    let handler = s.handlers.clone().acquire_owned().await.map_err(closed)?;
    let bytes = bytes.min(s.options.max_inflight_bytes) as u32;
    let bytes = s.handler_bytes.clone().acquire_many_owned(bytes).await.map_err(closed)?;
    Ok(Place {
        _handler: handler,
        _bytes: bytes,
        _body: None,
        _upload: None,
        answer: None,
        answer_body: None,
    })
}

/// A request's answer, which is sent exactly once: a handler that panics answers with an error.
struct Answer {
    shared: Arc<Shared>,
    header: Header,
    arrived: Instant,
    place: Option<Place>,
    /// Where the requester wants the payload to be written.
    room: Option<Region>,
    /// The requester has memory lent to this request until it is answered.
    lent: bool,
    /// A large payload came through the stream: the requester had no memory to lend, so it is not
    /// asked for more.
    streamed: bool,
    /// It is for a client, which may not read it, so the memory it takes is limited.
    is_bounded: bool,
    _owed: Owed,
    done: bool,
}

impl Answer {
    /// Waits until enough of the payloads that were asked for before is written. False: the caller
    /// no longer waits for the answer.
    async fn payload_room(&mut self, len: usize) -> bool {
        let s = &self.shared;
        let Some(place) = self.place.as_mut().filter(|_| len > INLINE) else { return true };
        let bytes = len.min(s.options.max_inflight_bytes) as u32;
        let Ok(own) = s.room.payloads.clone().acquire_many_owned(bytes).await else { return false };
        place.answer = Some((own, s.room.pool.take(len).await));
        !self.is_late() && self.shared.phase() != Phase::Closed
    }

    /// Reserves memory for an answer's long body until it is written.
    async fn body_room(&mut self, len: usize) -> Result<()> {
        let s = &self.shared;
        let Some(place) = self.place.as_mut().filter(|_| len > SHORT_BODY as usize) else {
            return Ok(());
        };
        let Ok(room) = timeout(s.options.room_wait, s.room.answers.take(len)).await else {
            let m = "this server has too many long answers that were not read; try again later";
            return Err(Error::new(Code::Overloaded, m));
        };
        place.answer_body = Some(room);
        Ok(())
    }

    /// The caller's deadline began before the request was sent, so after that time the caller has
    /// certainly given up.
    fn is_late(&self) -> bool {
        let limit = Duration::from_millis(u64::from(self.header.deadline_ms));
        self.header.deadline_ms > 0 && self.arrived.elapsed() > limit && !self.lent
    }

    /// Sends the answer. A large payload is moved to the requester's memory first, where the
    /// transport can.
    async fn finish(mut self, mut result: Result<Message>) {
        let mut placed = None;
        if let Ok(len) = result.as_ref().map(|m| m.body.len())
            && self.is_bounded
            && let Err(e) = self.body_room(len).await
        {
            result = Err(e);
        }
        let bulk = self.shared.bulk();
        if let (Some(bulk), Ok(m)) = (bulk, &mut result)
            && m.payload_len() > INLINE
            && !self.streamed
            && m.payload_len() <= MAX_PAYLOAD as usize
        {
            let len = m.payload_len() as u32;
            let crc = (!m.is_covered).then(|| sum(&m.payload));
            let brought = async {
                let room = match self.room.filter(|r| r.len >= len) {
                    Some(r) => r,
                    None => self.ask_room(len).await?,
                };
                bulk.put(m.payload.clone(), room).await
            };
            match brought.await {
                Ok(()) => {
                    self.shared.counter.sent(len.into());
                    m.payload.clear();
                    placed = Some(Placed { len, crc });
                }
                Err(e) if no_memory(&e) => {}
                Err(e) => result = Err(e),
            }
        }
        self.send(result, placed);
    }

    async fn ask_room(&mut self, len: u32) -> Result<Region> {
        let ask = AskRoom { request_id: self.header.request_id, len };
        self.lent = true;
        let s = &self.shared;
        let got = s.call(Message::new(opcode::ROOM, ask.encode()), s.options.silence * 5).await?;
        let room = Regions::decode(&got.body)?.room.filter(|r| r.len >= len);
        room.ok_or_else(|| {
            Error::new(Code::Protocol, format!("{} gave a reply region that is too small", s.addr))
        })
    }

    fn send(&mut self, result: Result<Message>, placed: Option<Placed>) {
        self.done = true;
        let late = self.is_late();
        let (s, h) = (&self.shared, &self.header);
        let hold = self.place.take().map_or(Hold::Nothing, Hold::Response);
        if late {
            return;
        }
        let mut hold = Some(hold);
        let framed = result.and_then(|mut m| {
            m.trace = h.trace;
            let held = hold.take().unwrap_or(Hold::Nothing);
            let mut f = outgoing(s, Kind::Response, h.request_id, h.opcode, m, held)?;
            if let Some(p) = &placed {
                f.place(p);
            }
            Ok(f)
        });
        let frame = framed.or_else(|e| failure(s, h, &e, hold.take().unwrap_or(Hold::Nothing)));
        match frame {
            Ok(f) => s.send(f),
            Err(e) => s.fail(&e),
        }
    }
}

fn failure(s: &Shared, h: &Header, e: &Error, hold: Hold) -> Result<Outgoing> {
    let body = Bytes::from(e.to_status().encode_to_vec());
    let m = Message { opcode: h.opcode, trace: h.trace, body, ..Message::default() };
    let mut f = outgoing(s, Kind::Response, h.request_id, h.opcode, m, hold)?;
    f.header.status = e.code as u16;
    Ok(f)
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.done {
            self.send(
                Err(Error::new(
                    Code::Io,
                    "the server failed while it handled this request; see its log",
                )),
                None,
            );
        }
    }
}
