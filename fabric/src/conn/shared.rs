//! The state of a connection after its handshake: calls and their windows, the limits of handlers,
//! and the end of the connection.
//!
//! **Windows.** A caller holds a slot (and its payload's bytes) from before its request is queued
//! until it is answered or given up, and longer if the request is still to be written. A receiver
//! runs a limited number of handlers; a handler's place is free again when its response is written.
//! When all places are taken the reader stops, which fills the socket and then the peer's window.
//! It stops for a limited time only, because the answers to this end's own calls come through the
//! same reader and a handler may be waiting for one; then it refuses requests as `Overloaded`.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use strake_proto::{
    Code, Error, Result,
    frame::{FLAG_PAYLOAD_SUMMED, FLAG_REGIONS, Header, Kind, MAX_BODY, MAX_PAYLOAD},
    opcode,
};
use strake_runtime::{Env, quiet::Quiet};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch},
    time::{Instant, timeout},
};

use super::{
    bulk::{self, Bulk, INLINE, Loan},
    liveness::Liveness,
    options::Options,
    room::{Room, Taken, Until},
};
use crate::{
    Buf, BufMut, Connection, Lend, Message, Pool, Role, Service, Traffic, Transport,
    traffic::Counter,
};

static BROKEN: Quiet = Quiet::new();

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Phase {
    Open,
    /// Takes no new requests and ends when those that run are answered.
    Draining,
    Closed,
}

/// What a connection needs to run, known when its handshake is over.
pub(super) struct Setup {
    pub env: Env,
    pub options: Options,
    pub pool: Pool,
    pub version: u16,
    pub role: Role,
    pub bulk: Option<Arc<dyn Bulk>>,
    pub addr: String,
    pub id: u64,
    pub counter: Counter,
    pub service: Option<Arc<dyn Service>>,
    pub room: Room,
    pub passes_on: bool,
}

/// A frame on its way out.
pub(crate) struct Outgoing {
    pub header: Header,
    pub body: Bytes,
    pub payload: Vec<Buf>,
    /// Reservations that are held until the frame is written.
    pub hold: Hold,
}

pub(crate) enum Hold {
    Nothing,
    Request(Arc<Slot>),
    #[allow(dead_code)] // held for its drop
    Response(Place),
}

/// A payload that was already moved to its destination.
pub(crate) struct Placed {
    pub len: u32,
    pub crc: Option<u32>,
}

impl Outgoing {
    pub fn place(&mut self, p: &Placed) {
        self.header.flags = FLAG_REGIONS | if p.crc.is_some() { FLAG_PAYLOAD_SUMMED } else { 0 };
        self.header.payload_len = p.len;
        self.header.payload_crc = p.crc.unwrap_or(0);
    }
}

/// A caller's place in the window.
pub(crate) struct Slot {
    _call: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
    /// The caller has given up; if the request is not written yet, it need not be.
    pub abandoned: AtomicBool,
}

/// A handler's place, with the bytes of the request it handles.
pub(crate) struct Place {
    pub _handler: OwnedSemaphorePermit,
    pub _bytes: OwnedSemaphorePermit,
    /// Reservation of a long body.
    pub _body: Option<Until>,
    /// Reservation of a client's payload.
    pub _upload: Option<Taken>,
    /// Reservations of the answer.
    pub answer: Option<(OwnedSemaphorePermit, Taken)>,
    pub answer_body: Option<Taken>,
}

/// A call that is to be answered.
pub(crate) struct Waiter {
    tx: oneshot::Sender<Result<Message>>,
    /// Memory that the peer may reach until the answer.
    pub loans: Vec<u64>,
    /// The peer may not ask for room for its reply (again). It may ask once per call, because rooms
    /// are memory, and never for the answer to a ROOM request.
    pub asked: bool,
    /// Bytes of foreign memory that the reply may be written to.
    pub foreign: Option<u32>,
    /// Held as long as this waiter, because of the loans: also when the caller has given up, and
    /// also for loans made later.
    _slot: Arc<Slot>,
}

impl Waiter {
    pub fn answer(self, result: Result<Message>) {
        let _ = self.tx.send(result);
    }
}

/// Calls that wait for answers.
struct Pending {
    waiting: BTreeMap<u64, Waiter>,
    next_id: u64,
    /// Why no more calls can be made.
    over: Option<Error>,
}

pub(crate) struct Shared {
    pub env: Env,
    pub options: Options,
    pub pool: Pool,
    pub version: u16,
    pub addr: String,
    /// Dropped when the connection is closed: a holder of a closed connection must not keep its
    /// device.
    bulk: RwLock<Option<Arc<dyn Bulk>>>,
    /// The stream goes over RDMA, that is, there was a bulk.
    over_rdma: bool,
    out: mpsc::Sender<Outgoing>,
    pending: Mutex<Pending>,
    window: Arc<Semaphore>,
    window_bytes: Arc<Semaphore>,
    pub handlers: Arc<Semaphore>,
    pub handler_bytes: Arc<Semaphore>,
    /// Shares for bodies and answers.
    pub room: Room,
    /// The answers are for clients of this server.
    pub passes_on: bool,
    phase: watch::Sender<Phase>,
    /// The peer takes no more requests.
    going_away: AtomicBool,
    pub liveness: Arc<Liveness>,
    /// Counts traffic for status displays.
    pub counter: Counter,
}

pub(super) fn sum(payload: &[Buf]) -> u32 {
    use strake_proto::checksum::{combine, crc32c};
    payload.iter().fold(0, |crc, b| combine(crc, crc32c(b), b.len()))
}

fn frame(s: &Shared, kind: Kind) -> Outgoing {
    let header = Header {
        version: s.version,
        kind,
        flags: 0,
        opcode: 0,
        status: 0,
        deadline_ms: 0,
        request_id: 0,
        body_len: 0,
        payload_len: 0,
        body_crc: 0,
        payload_crc: 0,
        trace: 0,
    };
    Outgoing { header, body: Bytes::new(), payload: Vec::new(), hold: Hold::Nothing }
}

/// `TooBig` for sizes that no receiver accepts.
fn check_size(op: u16, body: usize, payload: usize) -> Result<()> {
    if body > MAX_BODY as usize || payload > MAX_PAYLOAD as usize {
        let m = format!("message {op:#06x} too large to send (body {body}, payload {payload})");
        return Err(Error::new(Code::TooBig, m));
    }
    Ok(())
}

/// Fills in lengths and checksums. `TooBig` for sizes that no receiver accepts.
pub(super) fn outgoing(
    s: &Shared,
    kind: Kind,
    id: u64,
    op: u16,
    m: Message,
    hold: Hold,
) -> Result<Outgoing> {
    let payload_len = m.payload_len();
    check_size(op, m.body.len(), payload_len)?;
    let mut f = frame(s, kind);
    let summed = payload_len > 0 && !m.is_covered;
    f.header.flags = if summed { FLAG_PAYLOAD_SUMMED } else { 0 };
    f.header.opcode = op;
    f.header.request_id = id;
    f.header.body_len = m.body.len() as u32;
    f.header.payload_len = payload_len as u32;
    f.header.body_crc = strake_proto::checksum::crc32c(&m.body);
    f.header.payload_crc = if summed { sum(&m.payload) } else { 0 };
    f.header.trace = m.trace;
    f.body = m.body;
    f.payload = m.payload;
    f.hold = hold;
    Ok(f)
}

impl Shared {
    /// The state of a new connection, whose frames go to `out`.
    pub(super) fn new(setup: Setup, out: mpsc::Sender<Outgoing>) -> Shared {
        let o = &setup.options;
        Shared {
            window: Arc::new(Semaphore::new(o.max_inflight)),
            window_bytes: Arc::new(Semaphore::new(o.max_inflight_bytes)),
            handlers: Arc::new(Semaphore::new(o.max_handlers)),
            handler_bytes: Arc::new(Semaphore::new(o.max_inflight_bytes)),
            room: setup.room,
            passes_on: setup.passes_on,
            options: setup.options,
            env: setup.env,
            pool: setup.pool,
            version: setup.version,
            addr: setup.addr,
            over_rdma: setup.bulk.is_some(),
            bulk: RwLock::new(setup.bulk),
            counter: setup.counter,
            out,
            pending: Mutex::new(Pending { waiting: BTreeMap::new(), next_id: 1, over: None }),
            phase: watch::Sender::new(Phase::Open),
            going_away: AtomicBool::new(false),
            liveness: Arc::default(),
        }
    }

    /// Whether no frame waits to be written.
    pub fn is_out_empty(&self) -> bool {
        self.out.capacity() == self.out.max_capacity()
    }

    /// Sends a sign of life.
    pub fn keep_alive(&self) {
        self.send(frame(self, Kind::KeepAlive));
    }

    /// A buffer for an arriving payload. Goes beyond the pool's limit if the pool stays full for
    /// too long.
    pub async fn pool_buffer(&self, len: usize) -> BufMut {
        match timeout(self.options.room_wait, self.pool.get(len)).await {
            Ok(Ok(b)) => b,
            _ => self.pool.get_now(len),
        }
    }

    /// Counts bytes that came through the stream.
    pub fn received(&self, bytes: usize) {
        self.liveness.received(bytes);
        self.counter.received(bytes as u64);
    }

    /// Whether anything waits for memory for arriving data, or may soon have to.
    pub fn is_short(&self) -> bool {
        self.pool.is_waited_for() || self.room.is_short()
    }

    /// Counts bytes that went into the stream.
    pub fn sent(&self, bytes: usize) {
        self.liveness.sent(bytes);
        self.counter.sent(bytes as u64);
    }

    /// The [`Bulk`] that moves payloads beside the stream, if there is one.
    pub fn bulk(&self) -> Option<Arc<dyn Bulk>> {
        self.bulk.read().clone()
    }

    /// How a payload of this length counts if it goes through the stream.
    pub fn stream_transport(&self, len: usize) -> Transport {
        match self.over_rdma {
            false => Transport::Tcp,
            true if len > INLINE => Transport::RdmaStream,
            true => Transport::Rdma,
        }
    }

    /// Queues a frame. The queue holds as many frames as the windows allow, so a full queue means
    /// that the peer violates the windows. A closed queue means that the connection is over.
    pub fn send(&self, f: Outgoing) {
        if let Err(mpsc::error::TrySendError::Full(_)) = self.out.try_send(f) {
            self.fail(&Error::new(Code::Protocol, format!("{} exceeds its window", self.addr)));
        }
    }

    /// Resolves when the connection is closed.
    pub async fn closed(&self) {
        let _ = self.phase.subscribe().wait_for(|p| *p == Phase::Closed).await;
    }

    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Ends the connection. Later causes are ignored.
    pub fn fail(&self, cause: &Error) {
        let waiting = {
            let mut p = self.pending.lock();
            if p.over.is_none() || self.phase() != Phase::Closed {
                p.over = Some(cause.clone());
            }
            std::mem::take(&mut p.waiting)
        };
        self.counter.close();
        if self.phase.send_replace(Phase::Closed) != Phase::Closed {
            match cause.code {
                Code::Protocol => {
                    BROKEN.warn(|| format!("closing the connection to {}: {cause}", self.addr))
                }
                _ => tracing::debug!(peer = %self.addr, "connection ended: {cause}"),
            }
        }
        self.window.close();
        self.window_bytes.close();
        self.room.payloads.close();
        let bulk = self.bulk.write().take();
        drop(bulk);
        for w in waiting.into_values() {
            w.answer(Err(self.gone(cause)));
        }
    }

    fn gone(&self, cause: &Error) -> Error {
        match cause.code {
            Code::Disconnected => cause.clone(),
            _ => {
                Error::new(Code::Disconnected, format!("connection to {} lost: {cause}", self.addr))
            }
        }
    }

    /// The error of a call that cannot be made, or was not answered, because the connection is
    /// over.
    pub fn over(&self) -> Error {
        let cause = self.pending.lock().over.clone();
        self.gone(
            &cause.unwrap_or_else(|| {
                Error::new(Code::Disconnected, format!("{} is closed", self.addr))
            }),
        )
    }

    pub fn is_over(&self) -> bool {
        self.going_away.load(Relaxed) || self.phase() == Phase::Closed
    }

    /// The peer has announced that it takes no more requests.
    pub fn peer_goes_away(&self) {
        self.going_away.store(true, Relaxed);
        let mut p = self.pending.lock();
        p.over.get_or_insert_with(|| {
            Error::new(Code::Disconnected, format!("{} is shutting down", self.addr))
        });
    }

    /// Asks the peer to make a new connection for further requests.
    pub fn go_away(&self) {
        self.send(frame(self, Kind::GoAway));
    }

    /// Tells the peer that no more requests are taken, answers those that run for at most `limit`,
    /// and closes.
    pub async fn drain(&self, limit: Duration) {
        self.phase.send_if_modified(|p| {
            let open = *p == Phase::Open;
            if open {
                *p = Phase::Draining;
            }
            open
        });
        self.go_away();
        let all = self.handlers.acquire_many(self.options.max_handlers as u32);
        let _ = timeout(limit, all).await;
        self.fail(&Error::new(Code::Disconnected, "this process stopped listening"));
    }

    /// Removes and returns the waiter of this answer.
    pub fn take_waiting(&self, id: u64) -> Option<Waiter> {
        self.pending.lock().waiting.remove(&id)
    }

    /// Whether a call waits for this answer, the answer may be large, and the peer asks for room
    /// for the first time.
    pub fn may_have_room(&self, id: u64) -> bool {
        let mut p = self.pending.lock();
        let waiter = p.waiting.get_mut(&id).filter(|w| !w.tx.is_closed());
        waiter.is_some_and(|w| !std::mem::replace(&mut w.asked, true))
    }

    /// Adds a loan to this call. False: the call no longer waits for its answer.
    pub fn add_loan(&self, id: u64, loan: u64) -> bool {
        let mut p = self.pending.lock();
        let waiter = p.waiting.get_mut(&id).filter(|w| !w.tx.is_closed());
        waiter.is_some_and(|w| {
            w.loans.push(loan);
            true
        })
    }

    async fn slot(&self, payload: usize) -> Result<Arc<Slot>> {
        let closed = |_| self.over();
        let call = self.window.clone().acquire_owned().await.map_err(closed)?;
        let bytes = payload.min(self.options.max_inflight_bytes) as u32;
        let bytes = self.window_bytes.clone().acquire_many_owned(bytes).await.map_err(closed)?;
        Ok(Arc::new(Slot { _call: call, _bytes: bytes, abandoned: AtomicBool::new(false) }))
    }

    pub async fn call(self: &Arc<Self>, mut request: Message, limit: Duration) -> Result<Message> {
        let start = Instant::now();
        let op = request.opcode;
        let call = async {
            let foreign = request.lend.take();
            let payload = request.payload_len();
            check_size(op, request.body.len(), payload)?;
            let room = request.answer_room.min(MAX_PAYLOAD as usize);
            let room = if self.bulk().is_some() { room } else { 0 };
            let lent = foreign.as_ref().map_or(0, |what| what.memory().len() as usize);
            let slot = self.slot(payload.max(room).max(lent)).await?;
            let (tx, rx) = oneshot::channel();
            // Dropped last, because its drop may end the connection.
            let mut lending = None;
            let (loan, placed) = match &foreign {
                None => self.lend(&mut request, room).await?,
                Some(what) => {
                    let (loan, placed, held) = self.lend_foreign(&request, what).await?;
                    lending = Some(held);
                    (Some(loan), placed)
                }
            };
            let went =
                if placed.is_some() { Transport::Rdma } else { self.stream_transport(payload) };
            let foreign = foreign.map(|what| {
                if matches!(what, Lend::Room(_)) { what.memory().len() as u32 } else { 0 }
            });
            let asked = op == opcode::ROOM || foreign.is_some();
            let mut waiter = Waiter { tx, loans: Vec::new(), asked, foreign, _slot: slot.clone() };
            let mut f = outgoing(self, Kind::Request, 0, op, request, Hold::Request(slot.clone()))?;
            if let Some(p) = &placed {
                f.place(p);
                self.counter.sent(p.len.into());
            }
            if let Some(loan) = &loan {
                waiter.loans.push(loan.id);
                f.header.flags |= FLAG_REGIONS;
                f.payload.insert(0, loan.regions.encode().into());
            }
            let left = limit.saturating_sub(start.elapsed()).as_millis();
            f.header.deadline_ms = u32::try_from(left).unwrap_or(u32::MAX).max(1);
            f.header.request_id = self.register(waiter)?;
            let _waiting = Waiting { shared: self, slot, id: f.header.request_id };
            self.liveness.wake();
            self.send(f);
            let answer = rx.await.unwrap_or_else(|_| Err(self.over()))?;
            drop(lending);
            Ok(Message { went, ..answer })
        };
        timeout(limit, call).await.unwrap_or_else(|_| {
            let m = format!("{} did not answer request {op:#06x} within {limit:?}", self.addr);
            Err(Error::new(Code::TimedOut, m))
        })
    }

    /// Lends the peer a large payload, and room for a large reply.
    async fn lend(&self, m: &mut Message, room: usize) -> Result<(Option<Loan>, Option<Placed>)> {
        let len = m.payload_len();
        let large = len > INLINE;
        let Some(bulk) = self.bulk().filter(|_| large || room > INLINE) else {
            return Ok((None, None));
        };
        let room = if room > INLINE { Some(self.pool_buffer(room).await) } else { None };
        let payload = if large { m.payload.clone() } else { Vec::new() };
        let loan = match bulk.lend(payload, room).await {
            Ok(loan) => loan,
            Err(e) if bulk::no_memory(&e) => return Ok((None, None)),
            Err(e) => return Err(e),
        };
        let placed = large.then(|| {
            let crc = (!m.is_covered).then(|| sum(&m.payload));
            m.payload.clear();
            Placed { len: len as u32, crc }
        });
        Ok((Some(loan), placed))
    }

    /// Lends foreign memory. Dropping the guard that is returned with the loan ends the loan, and
    /// the connection if need be.
    async fn lend_foreign(
        &self,
        m: &Message,
        what: &Lend,
    ) -> Result<(Loan, Option<Placed>, Lending)> {
        let none = || {
            Error::new(
                Code::OpNotSupp,
                format!("memory cannot be lent to {}, which is not connected by RDMA", self.addr),
            )
        };
        let bulk = self.bulk().ok_or_else(none)?;
        let len = what.memory().len();
        // The transport does not read foreign memory, so it cannot sum it.
        if !m.is_covered || !m.payload.is_empty() || len == 0 || len > u64::from(MAX_PAYLOAD) {
            let m = format!("{len} bytes of foreign memory for request {:#06x}", m.opcode);
            return Err(Error::new(Code::Inval, m));
        }
        let loan = bulk.lend_foreign(what).await?;
        let placed =
            matches!(what, Lend::Payload(_)).then_some(Placed { len: len as u32, crc: None });
        let lending = Lending { bulk, loan: loan.id };
        Ok((loan, placed, lending))
    }

    fn register(&self, waiter: Waiter) -> Result<u64> {
        let mut p = self.pending.lock();
        if let Some(cause) = &p.over {
            return Err(self.gone(cause));
        }
        let id = p.next_id;
        p.next_id += 1;
        p.waiting.insert(id, waiter);
        drop(p);
        self.liveness.awaits();
        Ok(id)
    }
}

/// Foreign memory that is lent to a call. When this is dropped, the peer can no longer reach it,
/// however the call ended.
struct Lending {
    bulk: Arc<dyn Bulk>,
    loan: u64,
}

impl Drop for Lending {
    fn drop(&mut self) {
        self.bulk.revoke(self.loan);
    }
}

/// A call that waits for its answer. When it is dropped for any reason, the call is no longer
/// waiting.
struct Waiting<'a> {
    shared: &'a Shared,
    slot: Arc<Slot>,
    id: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.shared.liveness.awaits_no_more();
        let mut p = self.shared.pending.lock();
        // Lent memory stays lent until the peer has answered, so the request must still be sent.
        if p.waiting.get(&self.id).is_some_and(|w| w.loans.is_empty()) {
            p.waiting.remove(&self.id);
            self.slot.abandoned.store(true, Relaxed);
        }
    }
}

/// A connection as its users hold it.
pub(super) struct Handle {
    shared: Arc<Shared>,
    /// The connection ends when this handle is dropped.
    owns: bool,
}

impl Handle {
    /// The handle of the end that connected.
    pub fn owner(shared: Arc<Shared>) -> Handle {
        Handle { shared, owns: true }
    }

    /// The handle of a service for requests in the other direction. It does not keep the connection
    /// open.
    pub fn back(shared: Arc<Shared>) -> Handle {
        Handle { shared, owns: false }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.owns {
            self.close();
        }
    }
}

#[async_trait]
impl Connection for Handle {
    async fn call(&self, request: Message, timeout: Duration) -> Result<Message> {
        self.shared.call(request, timeout).await
    }
    fn is_closed(&self) -> bool {
        self.shared.is_over()
    }
    fn lends(&self) -> bool {
        self.shared.over_rdma
    }
    fn addr(&self) -> String {
        self.shared.addr.clone()
    }
    fn traffic(&self) -> Traffic {
        self.shared.counter.look()
    }
    fn close(&self) {
        self.shared.fail(&Error::new(
            Code::Disconnected,
            format!("connection to {} was closed here", self.shared.addr),
        ));
    }
}
