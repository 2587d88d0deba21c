//! One connection's queue pair: work requests posted, completions, and credits between the two
//! ends.
//!
//! All memory that the device may touch is held by the record of its work request ([`Wr`]) or by a
//! loan. These are dropped only after the completion, or after the queue pair is destroyed
//! ([`Queue::end`]), whatever became of the callers.

use std::{
    collections::VecDeque, ffi::CStr, os::fd::RawFd, ptr::null_mut, sync::Arc, task::Waker,
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};
use tokio::{
    io::unix::AsyncFd,
    sync::{Notify, OwnedSemaphorePermit, Semaphore, oneshot},
    time::{Instant, sleep},
};

use super::{
    cm::{Id, non_blocking},
    device::{Device, QueuePair, RECV},
    limits::{DEPTH, MESSAGE, OPS, RETURNS, SENDS},
    loans::Loans,
    rails::Taken,
    registered::Registered,
    verbs::{self, CompChannel, Cq, QpInitAttr, SendWr, Sge, Wc, event, op, os_error, send_flag},
};
use crate::BufMut;

/// Messages that the other end may have sent without being told that they were received.
pub const CREDITS: u16 = 32;
/// How long to look for completions after the last one before sleeping.
const SPIN: Duration = Duration::from_micros(50);
/// After this long without a completion, probe the other end.
const PROBE: Duration = Duration::from_secs(15);
/// How long the last messages may take when this end closes.
const LINGER: Duration = Duration::from_millis(200);
/// How long an abandoned call may wait for completions. They arrive within microseconds on a
/// correct device.
const FLUSH: Duration = Duration::from_millis(20);
/// Completions taken at once.
const BATCH: usize = 16;

pub struct Queue {
    /// Dropped first: memory stranded after the end has registrations, which must not outlive the
    /// device.
    pub state: Mutex<State>,
    pub device: Arc<Device>,
    /// Dropped after the device: the library owns the device's context, and keeps it open while it
    /// has an id.
    id: Id,
    qp: *mut verbs::Qp,
    cq: *mut Cq,
    channel: *mut CompChannel,
    /// Dropped before the channel is destroyed.
    fd: Option<AsyncFd<RawFd>>,
    pub ops: Arc<Semaphore>,
    wake: Notify,
    pub addr: String,
    /// Only at the end that connected.
    pub rail: Option<Taken>,
}

// SAFETY: the library's objects allow any thread; the queue pair is used under the lock of `state`
// only.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

/// What a posted work request holds, until its completion.
pub enum Wr {
    Message {
        _buf: BufMut,
        _mr: Arc<Registered>,
    },
    Return,
    Probe,
    Op(Op),
    /// Held until the queue pair is gone.
    Stranded {
        _held: Held,
    },
}

/// An operation on payloads.
pub struct Op {
    pub _room: OwnedSemaphorePermit,
    pub held: Held,
    pub done: Option<oneshot::Sender<Held>>,
}

/// What an operation needs. Registrations come first: they must be dropped before the memory.
#[derive(Default)]
#[allow(dead_code)] // held for their drop
pub struct Held {
    pub mrs: Vec<Arc<Registered>>,
    pub bufs: Vec<crate::Buf>,
    pub to: Option<BufMut>,
    pub place: Option<super::stage::Place>,
}

#[derive(Default)]
pub struct State {
    posted: Vec<Option<Wr>>,
    unused: Vec<usize>,
    /// Number of requests posted and not completed.
    under_way: usize,
    /// Received and not read yet. Copied, so that a slow reader keeps no buffer of the shared
    /// receive queue.
    inbox: VecDeque<Bytes>,
    /// Messages received that the other end has not been told of.
    owed: u32,
    /// Messages that may be sent now, and the number if the other end has emptied all its buffers.
    credits: u32,
    most_credits: u32,
    /// Longest message that the other end takes.
    message: usize,
    sends: usize,
    returns: usize,
    pub loans: Loans,
    reader: Option<Waker>,
    writer: Option<Waker>,
    /// Why nothing more can be sent or received.
    over: Option<Error>,
    /// The path or the device failed: neither end closed or broke the connection.
    path_broke: bool,
    /// Number of dropped halves of the stream.
    dropped: u32,
    /// The queue pair is in its error state: nothing is sent or served any more, and what was
    /// posted is completed.
    stopped: bool,
    /// The queue pair is destroyed.
    destroyed: bool,
}

impl State {
    /// Whether the next connection should prefer another path. Also true if this end gave up
    /// because of a silence in which its last messages did not arrive; but not if the peer closed
    /// the connection or refused something, because then it was reached.
    fn path_to_blame(&self) -> bool {
        self.path_broke || self.over.is_none() && self.sends > 0
    }

    pub fn destroyed(&self) -> bool {
        self.destroyed
    }

    /// To be called before the queue pair is destroyed while it may be in use: by a call that was
    /// abandoned, or with its task.
    fn ends(&mut self) {
        self.path_broke |= self.over.is_none() && self.sends > 0;
    }

    /// Holds what the device may still touch after an error.
    pub fn strand(&mut self, held: Held) {
        self.posted.push(Some(Wr::Stranded { _held: held }));
    }
}

pub fn new_wr(opcode: std::ffi::c_int) -> SendWr {
    // SAFETY: all zeros are a value of this plain struct.
    let mut wr: SendWr = unsafe { std::mem::zeroed() };
    wr.opcode = opcode;
    wr.send_flags = send_flag::SIGNALED;
    wr
}

impl Queue {
    /// For an id whose device is known. The queue pair is made later, by [`Queue::make`].
    pub fn new(device: Arc<Device>, id: Id, addr: String) -> Queue {
        Queue {
            state: Mutex::new(State { message: MESSAGE, ..State::default() }),
            device,
            id,
            qp: null_mut(),
            cq: null_mut(),
            channel: null_mut(),
            fd: None,
            ops: Arc::new(Semaphore::new(OPS)),
            wake: Notify::new(),
            addr,
            rail: None,
        }
    }

    /// Makes the queue pair. After an error, the only thing left to do is to refuse the connection.
    pub fn make(&mut self) -> Result<()> {
        let q = self;
        let lib = q.device.lib;
        // SAFETY: an open context; each object is made from valid ones, and `Drop` takes back what
        // was made.
        unsafe {
            q.channel = (lib.ibv_create_comp_channel)(q.device.ctx);
            if q.channel.is_null() {
                return Err(os_error("a completion channel"));
            }
            q.fd = Some(non_blocking((*q.channel).fd)?);
            // A peer that ignores credits may fill every shared buffer before the first poll, and
            // completions that overflow are lost.
            let entries = (DEPTH as u32 + q.device.messages) as i32;
            q.cq = (lib.ibv_create_cq)(q.device.ctx, entries, null_mut(), q.channel, 0);
            if q.cq.is_null() {
                return Err(os_error("a completion queue"));
            }
            let mut init: QpInitAttr = std::mem::zeroed();
            init.send_cq = q.cq;
            init.recv_cq = q.cq;
            init.srq = q.device.srq();
            init.max_send_wr = DEPTH as u32;
            init.max_send_sge = 1;
            init.qp_type = verbs::QPT_RC;
            if (lib.rdma_create_qp)(q.id.raw, q.device.pd(), &raw mut init) != 0 {
                return Err(os_error("a queue pair"));
            }
            q.qp = (*q.id.raw).qp;
        }
        Ok(())
    }

    pub fn id(&self) -> &Id {
        &self.id
    }

    /// Sets what the other end accepts.
    pub fn set_peer(&self, g: &super::greeting::Greeting) {
        let mut s = self.state.lock();
        s.credits = u32::from(g.credits);
        s.most_credits = s.credits;
        s.message = (g.message as usize).min(MESSAGE);
    }

    /// Why the connection is over.
    pub fn gone(&self, s: &State) -> Error {
        s.over
            .clone()
            .unwrap_or_else(|| Error::new(Code::Disconnected, format!("{} is closed", self.addr)))
    }

    /// Hands a request to the device. After an error the connection is over.
    pub fn post(&self, s: &mut State, wr: &mut SendWr, record: Wr) -> Result<()> {
        if s.destroyed || s.over.is_some() {
            return Err(self.gone(s));
        }
        let i = s.unused.pop().unwrap_or_else(|| {
            s.posted.push(None);
            s.posted.len() - 1
        });
        s.posted[i] = Some(record);
        wr.wr_id = i as u64;
        let mut bad = null_mut();
        // SAFETY: the queue pair is not destroyed, the request points to lists that outlive the
        // call, and to memory that its record holds.
        let rc = unsafe { ((*self.device.ctx).ops.post_send)(self.qp, wr, &raw mut bad) };
        if rc == 0 {
            s.under_way += 1;
            return Ok(());
        }
        // Its record stays: requests posted before it may use what the record holds.
        let e = Error::from(std::io::Error::from_raw_os_error(rc))
            .context(format!("sending to {}", self.addr));
        self.fail(s, Error { code: Code::Disconnected, ..e });
        Err(self.gone(s))
    }

    /// Marks the connection as over. The task that polls takes it down.
    fn fail(&self, s: &mut State, why: Error) {
        s.over.get_or_insert(why);
        self.ops.close();
        for w in s.reader.take().into_iter().chain(s.writer.take()) {
            w.wake();
        }
        self.wake.notify_one();
    }

    /// Processes a batch of completions and returns their number.
    fn poll(&self) -> usize {
        let mut wcs = [Wc::default(); BATCH];
        let mut s = self.state.lock();
        if s.destroyed {
            return 0;
        }
        let n = self.poll_locked(&mut s, &mut wcs);
        self.settle(&mut s);
        n
    }

    fn poll_locked(&self, s: &mut State, wcs: &mut [Wc; BATCH]) -> usize {
        // SAFETY: the completion queue lives as long as `self`; there is room for so many.
        let n =
            unsafe { ((*self.device.ctx).ops.poll_cq)(self.cq, BATCH as i32, wcs.as_mut_ptr()) };
        if n < 0 {
            self.fail(
                s,
                Error::new(
                    Code::Disconnected,
                    format!("completions of {} cannot be read", self.addr),
                ),
            );
            return 0;
        }
        for wc in &wcs[..n as usize] {
            if wc.wr_id & RECV != 0 {
                self.received(s, wc);
            } else {
                self.completed(s, wc);
            }
        }
        n as usize
    }

    fn received(&self, s: &mut State, wc: &Wc) {
        let buffer = (wc.wr_id & !RECV) as u32;
        // Another kind of completion says nothing about the buffer, which may contain an earlier
        // message.
        let sent = wc.opcode == verbs::WC_RECV
            && wc.wc_flags & verbs::WC_WITH_IMM != 0
            && wc.byte_len as usize <= MESSAGE;
        let mut message = vec![0; if wc.status == 0 && sent { wc.byte_len as usize } else { 0 }];
        self.device.copy_received(buffer, &mut message);
        if let Err(e) = self.device.post_recv(buffer) {
            self.fail(s, e);
        }
        if wc.status != 0 {
            return self.broken(s, wc);
        }
        let returned = if sent { u32::from_be(wc.imm) } else { 0 };
        s.credits = s.credits.saturating_add(returned);
        if message.is_empty() {
            s.owed += 1;
        } else {
            s.inbox.push_back(message.into());
        }
        if !sent || s.inbox.len() as u32 + s.owed > u32::from(CREDITS) || s.credits > s.most_credits
        {
            let m = format!("{} exceeds its credits, or sent an invalid message", self.addr);
            self.fail(s, Error::new(Code::Protocol, m));
        }
        if let Some(w) = s.reader.take() {
            w.wake();
        }
    }

    fn completed(&self, s: &mut State, wc: &Wc) {
        let i = wc.wr_id as usize;
        let Some(record) = s.posted.get_mut(i).and_then(Option::take) else { return };
        s.unused.push(i);
        s.under_way -= 1;
        match &record {
            Wr::Message { .. } => s.sends -= 1,
            Wr::Return => s.returns -= 1,
            Wr::Probe | Wr::Op(_) | Wr::Stranded { .. } => {}
        }
        if wc.status != 0 {
            // The queue pair is in its error state: the device is done with this request, but
            // others may be under way.
            return self.broken(s, wc);
        }
        if let Wr::Op(Op { held, done: Some(done), .. }) = record {
            let _ = done.send(held);
        }
    }

    fn broken(&self, s: &mut State, wc: &Wc) {
        // SAFETY: a static, NUL-terminated text for every number.
        let why = unsafe { CStr::from_ptr((self.device.lib.ibv_wc_status_str)(wc.status)) }
            .to_string_lossy();
        // Requests after the first broken one are flushed, and so are those of a connection that
        // either end closed. Only the first cause counts.
        s.path_broke |= s.over.is_none() && verbs::is_of_the_path(wc.status);
        self.fail(
            s,
            Error::new(Code::Disconnected, format!("the connection to {} broke: {why}", self.addr)),
        );
    }

    /// Returns credits if it is time, and wakes a writer that can go on.
    fn settle(&self, s: &mut State) {
        if s.owed >= u32::from(CREDITS) / 2
            && s.credits >= 1
            && s.returns < RETURNS
            && s.over.is_none()
        {
            let mut wr = new_wr(op::SEND_WITH_IMM);
            wr.imm_or_key = std::mem::take(&mut s.owed).to_be();
            s.credits -= 1;
            s.returns += 1;
            let _ = self.post(s, &mut wr, Wr::Return);
        }
        if s.credits >= 2
            && s.sends < SENDS
            && let Some(w) = s.writer.take()
        {
            w.wake();
        }
    }

    /// Reads bytes of the stream. `None`: there are none yet, and `waker` is woken when there are.
    pub fn read(&self, to: &mut [u8], waker: &Waker) -> Option<Result<usize>> {
        let mut s = self.state.lock();
        let Some(m) = s.inbox.front_mut() else {
            if let Some(e) = &s.over {
                return Some(match e.code {
                    Code::Disconnected => Ok(0),
                    _ => Err(e.clone()),
                });
            }
            s.reader = Some(waker.clone());
            return None;
        };
        let n = to.len().min(m.len());
        to[..n].copy_from_slice(&m.split_to(n));
        if m.is_empty() {
            s.inbox.pop_front();
            s.owed += 1;
            self.settle(&mut s);
        }
        Some(Ok(n))
    }

    /// Sends as much as the credits allow. `None`: nothing may be sent, and `waker` is woken when
    /// something may.
    pub fn write(&self, mut from: &[std::io::IoSlice<'_>], waker: &Waker) -> Option<Result<usize>> {
        let (mut sent, mut skip) = (0, 0);
        let mut s = self.state.lock();
        if s.over.is_some() {
            return Some(Err(self.gone(&s)));
        }
        loop {
            while from.first().is_some_and(|f| f.len() == skip) {
                (from, skip) = (&from[1..], 0);
            }
            if from.is_empty() {
                return Some(Ok(sent));
            }
            if s.credits < 2 || s.sends >= SENDS {
                if sent > 0 {
                    return Some(Ok(sent));
                }
                s.writer = Some(waker.clone());
                return None;
            }
            let left = from.iter().map(|f| f.len()).sum::<usize>() - skip;
            let mut buf = self.device.pool.get_now(left.min(s.message));
            let mut at = 0;
            while at < buf.len() && !from.is_empty() {
                let n = (from[0].len() - skip).min(buf.len() - at);
                buf[at..at + n].copy_from_slice(&from[0][skip..skip + n]);
                at += n;
                skip += n;
                if skip == from[0].len() {
                    (from, skip) = (&from[1..], 0);
                }
            }
            if let Err(e) = self.send_message(&mut s, buf) {
                return Some(Err(e));
            }
            sent += at;
        }
    }

    fn send_message(&self, s: &mut State, mut buf: BufMut) -> Result<()> {
        let mr = self.device.of_message(&mut buf)?;
        let mut sge =
            Sge { addr: buf.as_ptr().addr() as u64, length: buf.len() as u32, lkey: mr.lkey() };
        let mut wr = new_wr(op::SEND_WITH_IMM);
        wr.imm_or_key = std::mem::take(&mut s.owed).to_be();
        (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
        s.credits -= 1;
        s.sends += 1;
        self.post(s, &mut wr, Wr::Message { _buf: buf, _mr: mr })
    }

    /// Notes that a half of the stream is dropped. After both, the connection ends.
    pub fn drop_half(&self) {
        let mut s = self.state.lock();
        s.dropped += 1;
        if s.dropped == 2 {
            self.ops.close();
            self.wake.notify_one();
        }
    }

    /// Polls until the connection is over. Takes it down then, or when dropped.
    pub async fn drive(self: Arc<Queue>) {
        let q = Ending(self);
        q.0.run().await;
        let broke = q.0.state.lock().path_to_blame();
        if let (Some(rail), true) = (&q.0.rail, broke) {
            rail.broke();
        }
        q.0.empty().await;
    }

    async fn run(&self) {
        let mut last = Instant::now();
        loop {
            let n = self.poll();
            let (over, dropped) = {
                let s = self.state.lock();
                (s.over.is_some(), s.dropped == 2)
            };
            if over {
                return;
            }
            if dropped {
                return self.linger().await;
            }
            if n > 0 {
                last = Instant::now();
            }
            if n > 0 || last.elapsed() < SPIN {
                tokio::task::yield_now().await;
                continue;
            }
            // SAFETY: the completion queue lives as long as `self`.
            if unsafe { ((*self.device.ctx).ops.req_notify_cq)(self.cq, 0) } != 0 {
                let e = os_error("completions");
                return self.fail(&mut self.state.lock(), e);
            }
            if self.poll() > 0 {
                last = Instant::now();
                continue;
            }
            tokio::select! {
                biased;
                () = self.wake.notified() => {}
                e = self.id.events.next() => self.at_event(e),
                r = self.completions() => if let Err(e) = r {
                    return self.fail(&mut self.state.lock(), e);
                },
                () = sleep(PROBE) => self.probe(),
            }
        }
    }

    /// Waits for the channel, and takes its events.
    async fn completions(&self) -> Result<()> {
        let fd = self
            .fd
            .as_ref()
            .ok_or_else(|| Error::new(Code::Disconnected, "a closed completion channel"))?;
        let mut ready = fd.readable().await?;
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: the channel lives as long as `self`; each event is acknowledged at once.
        unsafe {
            while (self.device.lib.ibv_get_cq_event)(self.channel, &raw mut cq, &raw mut context)
                == 0
            {
                (self.device.lib.ibv_ack_cq_events)(cq, 1);
            }
        }
        ready.clear_ready();
        Ok(())
    }

    fn at_event(&self, e: Result<super::cm::Event>) {
        let removed = e.as_ref().is_ok_and(|e| e.kind == event::DEVICE_REMOVAL);
        let why = match e {
            Ok(e) if e.kind == event::DISCONNECTED => {
                format!("{} closed the connection", self.addr)
            }
            Ok(e) if e.kind == event::DEVICE_REMOVAL => {
                format!("the device {} was removed", self.device.name)
            }
            Ok(_) => return,
            Err(e) => e.message,
        };
        // What arrived before the end must still be readable.
        while self.poll() > 0 {}
        let mut s = self.state.lock();
        s.path_broke |= s.over.is_none() && removed;
        self.fail(&mut s, Error::new(Code::Disconnected, why));
    }

    /// A WRITE of no bytes: the other end's device answers it, or the connection breaks.
    pub fn probe(&self) {
        let mut wr = new_wr(op::WRITE);
        let _ = self.post(&mut self.state.lock(), &mut wr, Wr::Probe);
    }

    /// Waits for the last messages to arrive.
    async fn linger(&self) {
        let start = Instant::now();
        while start.elapsed() < LINGER {
            self.poll();
            let arrived = {
                let s = self.state.lock();
                s.sends == 0 || s.over.is_some()
            };
            if arrived {
                return;
            }
            sleep(Duration::from_millis(1)).await;
        }
    }

    /// Stops the queue pair and takes the completions of all that was posted. This also returns its
    /// receive buffers to the shared queue: they would be lost with the queue pair.
    async fn empty(&self) {
        let start = Instant::now();
        self.stop(&mut self.state.lock());
        if self.state.lock().destroyed {
            return;
        }
        while start.elapsed() < LINGER {
            let n = self.poll();
            if n == 0 && self.state.lock().under_way == 0 {
                return;
            }
            sleep(Duration::from_millis(u64::from(n == 0))).await;
        }
    }

    fn stop(&self, s: &mut State) {
        self.fail(s, Error::new(Code::Disconnected, format!("{} is closed", self.addr)));
        if !std::mem::replace(&mut s.stopped, true) {
            // SAFETY: a valid id. A failure: it never was connected, or is not any more.
            unsafe { (self.device.lib.rdma_disconnect)(self.id.raw) };
        }
    }

    /// Destroys the queue pair. From then on the device touches no memory, and all that was held
    /// for it is dropped.
    pub fn end(&self) {
        self.destroy();
        self.device.end_if_spoilt();
    }

    /// Takes the completions of a stopped queue pair, and with them its receive buffers of the
    /// shared queue, for a short time: an abandoned call ends the queue pair at once, without
    /// [`Queue::empty`].
    fn flush(&self, s: &mut State, wcs: &mut [Wc; BATCH]) {
        let begun = std::time::Instant::now();
        loop {
            let n = self.poll_locked(s, wcs);
            if n == 0 && (s.under_way == 0 || begun.elapsed() >= FLUSH) {
                return;
            }
            if n == 0 {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }
}

impl QueuePair for Queue {
    fn destroy(&self) {
        let mut s = self.state.lock();
        if std::mem::replace(&mut s.destroyed, true) {
            return;
        }
        s.ends();
        self.stop(&mut s);
        let lib = self.device.lib;
        let mut wcs = [Wc::default(); BATCH];
        if !self.qp.is_null() {
            self.flush(&mut s, &mut wcs);
        }
        // SAFETY: id, windows and queue pair are valid and not used after this. First the windows:
        // they are bound to it.
        unsafe {
            for w in s.loans.windows.drain(..) {
                if let Some(dealloc) = (*self.device.ctx).ops.dealloc_mw {
                    dealloc(w);
                }
            }
            if !self.qp.is_null() {
                while self.poll_locked(&mut s, &mut wcs) > 0 {}
                (lib.rdma_destroy_qp)(self.id.raw);
            }
        }
        s.loans.spare.clear();
        if !self.cq.is_null() {
            while self.poll_locked(&mut s, &mut wcs) > 0 {}
        }
        // Under the lock: a caller that finds a loan gone can be sure that its key is dead.
        s.loans.end_all();
        let records = std::mem::take(&mut s.posted);
        drop(s);
        drop(records);
    }
}

/// Takes a connection down when its task ends in any way.
struct Ending(Arc<Queue>);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.end();
        self.fd = None;
        let lib = self.device.lib;
        // SAFETY: the queue pair is destroyed, all events are acknowledged; each object is made by
        // the library or null.
        unsafe {
            if !self.cq.is_null() {
                (lib.ibv_destroy_cq)(self.cq);
            }
            if !self.channel.is_null() {
                (lib.ibv_destroy_comp_channel)(self.channel);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_blamed_for_silence_and_for_nothing_that_the_peer_did() {
        let closed = || Some(Error::new(Code::Disconnected, "closed"));
        for (over, sends, path_broke, blamed) in [
            // Closed by this end with everything sent; given up in a silence.
            (None, 0, false, false),
            (None, 3, false, true),
            // Closed by the peer, with and without messages in flight.
            (closed(), 0, false, false),
            (closed(), 3, false, false),
            (closed(), 3, true, true),
        ] {
            let s = State { over, sends, path_broke, ..State::default() };
            assert_eq!(s.path_to_blame(), blamed, "{:?} {sends} {path_broke}", s.over);
        }
        // Ended in the middle by a call that was abandoned, which looks afterwards as if this end
        // had closed it.
        for (sends, before, blamed) in [(0, None, false), (3, None, true), (3, closed(), false)] {
            let mut s = State { over: before, sends, ..State::default() };
            s.ends();
            s.over = closed();
            assert_eq!(s.path_to_blame(), blamed, "{sends}");
        }
        // Flushed; refused by the peer's NIC; out of receive buffers there.
        for status in [5, 9, 10, 11, 13] {
            assert!(!verbs::is_of_the_path(status), "{status}");
        }
        assert!(verbs::is_of_the_path(12), "nobody acknowledges");
    }
}
