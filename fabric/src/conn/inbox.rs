//! What the reader of a connection has received. Headers and bodies pass through one small buffer, so
//! that many small frames cost one system call; payloads go from the socket into a pool buffer.

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
use strake_proto::{
    Code, Error, Result,
    checksum::crc32c,
    frame::{FLAG_PAYLOAD_SUMMED, FLAG_REGIONS, HEADER_LEN, Header},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    time::{Instant, sleep, timeout},
};

use super::{
    bulk::{REGIONS_HEAD, Regions},
    room::{Charge, SHORT_BODY},
    shared::Shared,
};
use crate::{Buf, BufMut};

/// Payloads with at least this much still to come are read in parts as large as the kernel allows.
const LARGE: usize = 128 << 10;

/// Minimum rate of a frame in bytes per second, while others wait for memory.
pub(super) const LEAST_RATE: u32 = 4 << 20;

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

/// How long the reservation of a body counts after the body has stopped or its connection has ended.
/// Its memory is free, but a peer that connects anew cannot send as much again at once.
const UNFINISHED: Duration = Duration::from_secs(2);

/// The reservation of a body of which a part is missing.
struct Unfinished<'a> {
    shared: &'a Shared,
    charge: Option<Charge>,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            self.shared.env.spawn(async move {
                sleep(UNFINISHED).await;
                drop(charge);
            });
        }
    }
}

/// The socket with the bytes that were read ahead.
pub(super) struct Inbox<'a, R> {
    shared: &'a Shared,
    rd: R,
    buf: Box<[u8]>,
    start: usize,
    end: usize,
    /// Whether a frame has begun, and no more of it is read.
    stopped: AtomicBool,
}

impl<'a, R> Inbox<'a, R> {
    pub fn new(shared: &'a Shared, rd: R) -> Inbox<'a, R> {
        let stopped = AtomicBool::new(false);
        Inbox { shared, rd, buf: vec![0; AHEAD].into(), start: 0, end: 0, stopped }
    }

    /// No more is read, though a frame has begun.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    /// Whether a frame has begun, and no more of it is read.
    pub fn has_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }
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

    pub async fn header(&mut self) -> Result<Header> {
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
    pub async fn exact(&mut self, to: &mut [u8]) -> Result<()> {
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

    pub async fn body(&mut self, h: &Header, charge: Option<&Charge>) -> Result<Bytes> {
        let len = h.body_len as usize;
        let body = if len <= self.end - self.start {
            let b = Bytes::copy_from_slice(&self.buf[self.start..self.start + len]);
            self.start += len;
            b
        } else {
            let mut b = vec![0; len];
            let mut unfinished = Unfinished { shared: self.shared, charge: charge.cloned() };
            self.exact(&mut b).await?;
            unfinished.charge = None;
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
    pub async fn regions(&mut self, h: &Header) -> Result<Option<Regions>> {
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

    pub async fn payload(&mut self, h: &Header, mut to: BufMut) -> Result<Payload> {
        self.exact(&mut to).await?;
        to.came_by(self.shared.stream_transport(to.len()));
        Ok(checked(h, to))
    }

    /// Reads and discards a payload that is not wanted.
    pub async fn skip(&mut self, len: u32) -> Result<()> {
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

pub(super) enum Payload {
    Whole(Vec<Buf>),
    Damaged,
}

pub(super) fn checked(h: &Header, got: BufMut) -> Payload {
    if h.flags & FLAG_PAYLOAD_SUMMED != 0 && crc32c(&got) != h.payload_crc {
        return Payload::Damaged;
    }
    Payload::Whole(if got.is_empty() { Vec::new() } else { vec![got.freeze()] })
}

pub(super) fn damaged() -> Error {
    Error::new(Code::Resend, "a payload was damaged in transit; send it again")
}

/// Polls once: `Ready` only if the result is there without waiting.
pub(super) async fn at_once<T>(mut what: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    std::future::poll_fn(|cx| Poll::Ready(what.as_mut().poll(cx))).await
}

/// Lets the reader wait for at most `Options::room_wait`, while this end sends signs of life.
pub(super) async fn waiting_for_room<T>(
    s: &Arc<Shared>,
    room: impl Future<Output = T>,
) -> Option<T> {
    tokio::pin!(room);
    // The timer and the two counters are only set up if it must wait.
    if let Poll::Ready(r) = at_once(room.as_mut()).await {
        return Some(r);
    }
    let _owed = s.liveness.owe();
    s.liveness.stalled.store(true, Relaxed);
    let r = timeout(s.options.room_wait, room).await.ok();
    s.liveness.stalled.store(false, Relaxed);
    r
}

/// Reserves memory for a body that comes from or goes to a client, before it is read. What servers
/// send each other is limited by what clients may send them.
pub(super) async fn body_room(
    s: &Arc<Shared>,
    h: &Header,
    of_client: bool,
) -> Result<Option<Charge>> {
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
