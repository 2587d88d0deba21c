//! The reader of a connection: frames from the socket to callers and handlers. Headers and bodies pass through one small
//! buffer, so that many small frames cost one system call; payloads go from the socket into a pool buffer.

use std::{
    os::fd::AsRawFd,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use bytes::Bytes;
use prost::Message as _;
use strake_proto::{
    Code, Error, Result,
    checksum::crc32c,
    frame::{FLAG_PAYLOAD_SUMMED, HEADER_LEN, Header, Kind},
    pb,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    net::tcp::OwnedReadHalf,
    time::{Instant, timeout},
};

use super::conn::{Hold, Outgoing, Owed, Phase, Place, Shared, outgoing};
use crate::{Buf, BufMut, Message, Peer, Service};

/// Payloads with at least so much still to come are waited for in as large parts as the kernel allows.
const LARGE: usize = 128 << 10;

/// The receiving side of a stream.
pub trait Incoming: AsyncRead + Send + Unpin + 'static {
    /// Wake the reader only when so many bytes are there, or as many as fit: each time costs two context switches. False
    /// where there is no such thing.
    fn wake_at(&self, _bytes: usize) -> bool {
        false
    }
}

impl Incoming for OwnedReadHalf {
    fn wake_at(&self, bytes: usize) -> bool {
        let bytes = bytes as libc::c_int;
        let (fd, value) = (self.as_ref().as_raw_fd(), (&raw const bytes).cast());
        // SAFETY: `value` points to a `c_int`, whose size is given. Failure leaves the reader woken more often.
        unsafe {
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, value, size_of::<libc::c_int>() as u32) == 0
        }
    }
}

/// A pipe within the process.
impl Incoming for tokio::io::ReadHalf<tokio::io::DuplexStream> {}

/// Bytes read ahead. What is read ahead of a payload must be copied into its buffer, so it is kept small.
const AHEAD: usize = 8 << 10;

/// The socket with what was read ahead.
struct Inbox<'a, R> {
    shared: &'a Shared,
    rd: R,
    buf: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<R: Incoming> Inbox<'_, R> {
    fn io(&self, e: std::io::Error) -> Error {
        Error::new(Code::Disconnected, format!("receiving from {} failed: {e}", self.shared.addr))
    }

    /// Reads some bytes ahead. `false` at the end of the stream.
    async fn fill(&mut self) -> Result<bool> {
        self.buf.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let n = self.rd.read(&mut self.buf[self.end..]).await.map_err(|e| self.io(e))?;
        self.end += n;
        self.shared.received.fetch_add(n as u64, Relaxed);
        Ok(n > 0)
    }

    async fn header(&mut self) -> Result<Header> {
        while self.end - self.start < HEADER_LEN {
            if !self.fill().await? {
                let m = match self.end - self.start {
                    0 => format!("{} closed the connection", self.shared.addr),
                    n => format!("{} closed the connection within a frame ({n} bytes of a header)", self.shared.addr),
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
        while at < to.len() {
            let n = self.part(&mut to[at..], large).await.map_err(|e| self.io(e))?;
            if n == 0 {
                let m = format!("{} closed the connection within a frame", self.shared.addr);
                return Err(Error::new(Code::Disconnected, m));
            }
            at += n;
            self.shared.received.fetch_add(n as u64, Relaxed);
        }
        if large {
            self.rd.wake_at(1);
        }
        Ok(())
    }

    /// As much as there is, and of a large rest as much as fits into the kernel at once. Looks for less in time for a slow
    /// sender to be seen alive.
    async fn part(&mut self, to: &mut [u8], large: bool) -> std::io::Result<usize> {
        if large && self.rd.wake_at(to.len()) {
            if let Ok(r) = timeout(self.shared.options.silence / 10, self.rd.read(to)).await {
                return r;
            }
            self.rd.wake_at(1);
        }
        self.rd.read(to).await
    }

    async fn body(&mut self, h: &Header) -> Result<Bytes> {
        let len = h.body_len as usize;
        let body = if len <= self.end - self.start {
            let b = Bytes::copy_from_slice(&self.buf[self.start..self.start + len]);
            self.start += len;
            b
        } else {
            let mut b = vec![0; len];
            self.exact(&mut b).await?;
            Bytes::from(b)
        };
        if crc32c(&body) != h.body_crc {
            return Err(Error::new(Code::Protocol, "frame body checksum mismatch"));
        }
        Ok(body)
    }

    async fn payload(&mut self, h: &Header, mut to: BufMut) -> Result<Payload> {
        self.exact(&mut to).await?;
        if h.flags & FLAG_PAYLOAD_SUMMED != 0 && crc32c(&to) != h.payload_crc {
            return Ok(Payload::Damaged);
        }
        Ok(Payload::Whole(if to.is_empty() { Vec::new() } else { vec![to.freeze()] }))
    }

    /// Reads a payload that nobody wants.
    async fn skip(&mut self, len: u32) -> Result<()> {
        let mut left = len as usize;
        while left > 0 {
            if self.start == self.end && !self.fill().await? {
                return Err(Error::new(Code::Disconnected, "the connection ended within a frame"));
            }
            let n = left.min(self.end - self.start);
            self.start += n;
            left -= n;
        }
        Ok(())
    }
}

enum Payload {
    Whole(Vec<Buf>),
    Damaged,
}

fn damaged() -> Error {
    Error::new(Code::Resend, "a payload was damaged on its way; send it again")
}

/// Reads until the connection ends, and says why it did.
pub(super) async fn run<R: Incoming>(
    s: &Arc<Shared>,
    rd: R,
    peer: &Arc<Peer>,
    service: Option<&Arc<dyn Service>>,
) -> Error {
    let mut inbox = Inbox { shared: s, rd, buf: vec![0; AHEAD].into(), start: 0, end: 0 };
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
                Kind::Hello => Err(Error::new(Code::Protocol, "handshake frame after the handshake")),
            },
            Err(e) => Err(e),
        };
        if let Err(e) = done {
            return e;
        }
    }
}

fn empty(h: &Header) -> Result<()> {
    if h.body_len == 0 && h.payload_len == 0 {
        return Ok(());
    }
    Err(Error::new(Code::Protocol, format!("{:?} frame that is not empty", h.kind)))
}

async fn response<R: Incoming>(s: &Arc<Shared>, inbox: &mut Inbox<'_, R>, h: &Header) -> Result<()> {
    let body = inbox.body(h).await?;
    let Some(waiting) = s.take_waiting(h.request_id) else {
        // Given up by its caller.
        return inbox.skip(h.payload_len).await;
    };
    if h.status != 0 {
        inbox.skip(h.payload_len).await?;
        let e = pb::Status::decode(body).map_or_else(
            |_| Error::new(Code::from_wire(u32::from(h.status)), "the peer's error came without a readable text"),
            Error::from,
        );
        let _ = waiting.send(Err(e));
        return Ok(());
    }
    let buf = response_buffer(s, h.payload_len as usize).await;
    let result = match inbox.payload(h, buf).await? {
        Payload::Whole(payload) => Ok(Message { opcode: h.opcode, trace: h.trace, body, payload }),
        Payload::Damaged => Err(damaged()),
    };
    let _ = waiting.send(result);
    Ok(())
}

/// Waits for the pool a while only: who holds its buffers may be waiting for a response behind this one.
async fn response_buffer(s: &Arc<Shared>, len: usize) -> BufMut {
    if len == 0 {
        return s.pool.get_now(0);
    }
    match waiting_for_room(s, s.pool.get(len)).await {
        Some(Ok(b)) => b,
        _ => s.pool.get_now(len),
    }
}

/// Lets the reader wait, for at most `Options::room_wait`, while the peer gets signs of life.
async fn waiting_for_room<T>(s: &Arc<Shared>, room: impl Future<Output = T>) -> Option<T> {
    tokio::pin!(room);
    // A timer and two counters are for those who must wait.
    let now = std::future::poll_fn(|cx| std::task::Poll::Ready(room.as_mut().poll(cx))).await;
    if let std::task::Poll::Ready(r) = now {
        return Some(r);
    }
    let _owed = s.owe();
    s.stalled.store(true, Relaxed);
    let r = timeout(s.options.room_wait, room).await.ok();
    s.stalled.store(false, Relaxed);
    r
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
    let body = inbox.body(h).await?;
    let len = h.payload_len as usize;
    let mut answer = Answer { shared: s.clone(), header: *h, arrived, place: None, _owed: owed, done: false };
    let refusal = match service {
        _ if s.phase() != Phase::Open => Some(Error::new(Code::Disconnected, "this server is shutting down")),
        None => Some(crate::unknown_opcode(h.opcode)),
        Some(_) => None,
    };
    let (Some(service), None) = (service, &refusal) else {
        inbox.skip(h.payload_len).await?;
        answer.send(Err(refusal.unwrap_or_else(|| crate::unknown_opcode(h.opcode))));
        return Ok(());
    };
    let room = async {
        let place = place(s, h.body_len as usize + len).await?;
        Ok((place, if len == 0 { s.pool.get_now(0) } else { s.pool.get(len).await? }))
    };
    let refusal = match waiting_for_room(s, room).await {
        Some(Ok((place, buf))) => {
            answer.place = Some(place);
            match inbox.payload(h, buf).await? {
                Payload::Whole(payload) => {
                    let m = Message { opcode: h.opcode, trace: h.trace, body, payload };
                    let (service, peer) = (service.clone(), peer.clone());
                    s.env.spawn(async move {
                        let r = service.handle(&peer, m).await;
                        answer.send(r);
                    });
                    return Ok(());
                }
                Payload::Damaged => damaged(),
            }
        }
        Some(Err(e)) => {
            inbox.skip(h.payload_len).await?;
            e
        }
        None => {
            inbox.skip(h.payload_len).await?;
            Error::new(Code::Overloaded, "this server has too many requests running; try again later")
        }
    };
    answer.send(Err(refusal));
    Ok(())
}

async fn place(s: &Shared, bytes: usize) -> Result<Place> {
    let closed = |_| Error::new(Code::Disconnected, "connection closed");
    let handler = s.handlers.clone().acquire_owned().await.map_err(closed)?;
    let bytes = bytes.min(s.options.max_inflight_bytes) as u32;
    let bytes = s.handler_bytes.clone().acquire_many_owned(bytes).await.map_err(closed)?;
    Ok(Place { _handler: handler, _bytes: bytes })
}

/// A request's answer, which is sent exactly once: a handler that dies answers with an error.
struct Answer {
    shared: Arc<Shared>,
    header: Header,
    arrived: Instant,
    place: Option<Place>,
    _owed: Owed,
    done: bool,
}

impl Answer {
    fn send(&mut self, result: Result<Message>) {
        self.done = true;
        let (s, h) = (&self.shared, &self.header);
        let hold = self.place.take().map_or(Hold::Nothing, Hold::Response);
        // The caller counts from before the request was sent, so after that time it has gone for certain.
        let limit = Duration::from_millis(u64::from(h.deadline_ms));
        if h.deadline_ms > 0 && self.arrived.elapsed() > limit {
            return;
        }
        let mut hold = Some(hold);
        let framed = result.and_then(|mut m| {
            m.trace = h.trace;
            let held = hold.take().unwrap_or(Hold::Nothing);
            outgoing(s, Kind::Response, h.request_id, h.opcode, m, held)
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
    let m = Message { opcode: h.opcode, trace: h.trace, body, payload: Vec::new() };
    let mut f = outgoing(s, Kind::Response, h.request_id, h.opcode, m, hold)?;
    f.header.status = e.code as u16;
    Ok(f)
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.done {
            self.send(Err(Error::new(Code::Io, "the server failed while it handled this request; see its log")));
        }
    }
}
