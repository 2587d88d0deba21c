//! Payloads from memory to memory: lending memory to the other end, and reading and writing what
//! the other end lends.

use std::sync::Arc;

use async_trait::async_trait;
use strake_proto::{Code, Error, Result, frame};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::{
    loans::Lent,
    queue::{Held, Op, Queue, State, Wr, new_wr},
    registered::Registered,
    stage::cut,
    verbs::{self, Mw, SendWr, Sge, op, os_error},
};
use crate::{
    Buf, BufMut, Lend, REGION,
    conn::{
        Bulk, Loan,
        bulk::{MAX_PARTS, Regions, no_memory},
    },
};

/// A part of a payload, and its registration.
struct Part {
    buf: Buf,
    mr: Arc<Registered>,
}

impl Queue {
    /// Splits the payload into parts that can be registered, at most [`MAX_PARTS`]; copies where
    /// necessary.
    fn parts(&self, payload: Vec<Buf>) -> Vec<Buf> {
        let whole: Vec<Buf> = payload.into_iter().filter(|b| !b.is_empty()).collect();
        let fits = whole.len() <= MAX_PARTS && whole.iter().all(|b| b.region().is_some());
        if fits { whole } else { self.copied(&whole) }
    }

    fn copied(&self, from: &[Buf]) -> Vec<Buf> {
        let mut left: usize = from.iter().map(Buf::len).sum();
        let (mut i, mut at, mut out) = (0, 0, Vec::new());
        while left > 0 {
            let mut to = self.device.pool.get_now(left.min(REGION));
            let mut filled = 0;
            while filled < to.len() {
                let n = (from[i].len() - at).min(to.len() - filled);
                to[filled..filled + n].copy_from_slice(&from[i][at..at + n]);
                filled += n;
                at += n;
                if at == from[i].len() {
                    (i, at) = (i + 1, 0);
                }
            }
            left -= filled;
            out.push(to.freeze());
        }
        out
    }

    /// Permits for this many operations.
    async fn room(&self, n: usize) -> Result<OwnedSemaphorePermit> {
        match self.ops.clone().acquire_many_owned(n as u32).await {
            Ok(p) => Ok(p),
            Err(_) => Err(self.gone(&self.state.lock())),
        }
    }

    /// Posts an operation that needs one of the permits.
    fn post_op(
        &self,
        s: &mut State,
        wr: &mut SendWr,
        room: &mut OwnedSemaphorePermit,
        held: Held,
        done: Option<oneshot::Sender<Held>>,
    ) -> Result<()> {
        let none = || Error::new(Code::Io, "an operation without a reserved slot");
        let _room = room.split(1).ok_or_else(none)?;
        self.post(s, wr, Wr::Op(Op { _room, held, done }))
    }

    /// Allocates as many spare windows as will be bound. After this, only the end of the connection
    /// can make binding fail.
    fn windows(&self, s: &mut State, n: usize) -> Result<()> {
        while s.loans.spare.len() < n {
            let w = self.new_window(s)?;
            s.loans.spare.push(w);
        }
        Ok(())
    }

    fn new_window(&self, s: &mut State) -> Result<*mut Mw> {
        if s.destroyed() {
            return Err(self.gone(s));
        }
        // SAFETY: an open context, whose device was found to have windows.
        let w = match unsafe { (*self.device.ctx).ops.alloc_mw } {
            // SAFETY: a valid protection domain.
            Some(alloc) => unsafe { alloc(self.device.pd(), verbs::MW_TYPE_2) },
            None => std::ptr::null_mut(),
        };
        if w.is_null() {
            return Err(os_error(&format!("device {}: a memory window", self.device.name)));
        }
        s.loans.windows.push(w);
        Ok(w)
    }

    /// Binds a window to exactly these bytes.
    fn bind(
        &self,
        s: &mut State,
        room: &mut OwnedSemaphorePermit,
        mr: &Registered,
        at: (*const u8, usize),
        access: u32,
    ) -> Result<(*mut Mw, frame::Region)> {
        let w = s
            .loans
            .spare
            .pop()
            .ok_or_else(|| Error::new(Code::Io, "a memory window that was not made"))?;
        // SAFETY: a window that is not bound and that nobody else uses.
        let key = unsafe { (*w).rkey };
        // The lowest byte of a key is its user's to choose: another one each time.
        let key = (key & !0xff) | (key.wrapping_add(1) & 0xff);
        let mut wr = new_wr(op::BIND_MW);
        (wr.mw, wr.mw_rkey, wr.mw_mr) = (w, key, mr.mr);
        (wr.mw_addr, wr.mw_length, wr.mw_access) = (at.0.addr() as u64, at.1 as u64, access);
        self.post_op(s, &mut wr, room, Held::default(), None)?;
        // SAFETY: as above.
        unsafe { (*w).rkey = key };
        Ok((w, frame::Region { addr: wr.mw_addr, key, len: at.1 as u32 }))
    }

    /// READs the peer's regions into one place of this end, given by address and key. `held` keeps
    /// that place until all READs are done, and is given back then.
    async fn read_from(&self, from: &[frame::Region], to: (u64, u32), held: Held) -> Result<Held> {
        let mut room = self.room(from.len()).await?;
        let rx = {
            let mut s = self.state.lock();
            let (mut at, lkey) = to;
            let (tx, rx) = oneshot::channel();
            let mut end = Some((held, tx));
            for (i, r) in from.iter().enumerate() {
                let mut sge = Sge { addr: at, length: r.len, lkey };
                let mut wr = new_wr(op::READ);
                (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
                (wr.remote_addr, wr.rkey) = (r.addr, r.key);
                at += u64::from(r.len);
                // The last one holds everything: they complete in order, and `post` fails for all
                // or none of the rest.
                let last = if i + 1 == from.len() { end.take() } else { None };
                let (held, done) = last.map_or((Held::default(), None), |(h, d)| (h, Some(d)));
                if let Err(e) = self.post_op(&mut s, &mut wr, &mut room, held, done) {
                    // Posted READs may still write: the memory is held until the queue pair is
                    // gone.
                    if let Some((held, _)) = end {
                        s.strand(held);
                    }
                    return Err(e);
                }
            }
            rx
        };
        rx.await.map_err(|_| self.gone(&self.state.lock()))
    }

    /// As [`Bulk::fetch`], through the device's stage.
    async fn fetch_in_pieces(&self, from: &[frame::Region], mut to: BufMut) -> Result<BufMut> {
        let none = || Error::new(Code::Io, "a device that was not set up");
        let stage = self.device.stage.as_ref().ok_or_else(none)?;
        let mut at = 0;
        while at < to.len() {
            let n = stage.piece().min(to.len() - at);
            // Released after each piece, so that a small payload does not wait for a whole large
            // one.
            let place = stage.place().await?;
            let goal = (place.addr(), place.lkey());
            let held = Held { place: Some(place), ..Held::default() };
            let done = self.read_from(&cut(from, at, n), goal, held).await?;
            let place = done.place.ok_or_else(none)?;
            place.copy_to(&mut to[at..at + n]);
            at += n;
        }
        Ok(to)
    }
}

#[async_trait]
impl Bulk for Queue {
    async fn lend(&self, payload: Vec<Buf>, to: Option<BufMut>) -> Result<Loan> {
        let device = &self.device;
        let part =
            |buf: Buf| Ok(Part { mr: device.to_lend(buf.region(), buf.as_ptr(), buf.len())?, buf });
        let parts = self.parts(payload).into_iter().map(part).collect::<Result<Vec<_>>>()?;
        let to_mr =
            to.as_ref().map(|b| device.to_lend(b.region(), b.as_ptr(), b.len())).transpose()?;
        let mut room = self.room(parts.len() + usize::from(to.is_some())).await?;
        let mut s = self.state.lock();
        let s = &mut *s;
        self.windows(s, parts.len() + usize::from(to.is_some()))?;
        let mut regions = Regions::default();
        let mut windows = Vec::with_capacity(parts.len() + 1);
        let mut bound = || {
            for p in &parts {
                let (w, r) = self.bind(
                    s,
                    &mut room,
                    &p.mr,
                    (p.buf.as_ptr(), p.buf.len()),
                    verbs::REMOTE_READ,
                )?;
                windows.push(w);
                regions.payload.push(r);
            }
            if let (Some(b), Some(mr)) = (&to, &to_mr) {
                let (w, r) =
                    self.bind(s, &mut room, mr, (b.as_ptr(), b.len()), verbs::REMOTE_WRITE)?;
                windows.push(w);
                regions.room = Some(r);
            }
            Ok(())
        };
        let bound = bound();
        let (payload, mut mrs): (Vec<_>, Vec<_>) = parts.into_iter().map(|p| (p.buf, p.mr)).unzip();
        mrs.extend(to_mr);
        // Also after an error: the connection is over then, and some windows are open until its
        // queue pair is gone.
        let lent = Lent { _mrs: mrs, _payload: payload, room: to, _foreign: None, windows };
        let id = s.loans.add(lent);
        bound.map(|()| Loan { id, regions })
    }

    async fn lend_foreign(&self, what: &Lend) -> Result<Loan> {
        let memory = what.memory();
        let access =
            if matches!(what, Lend::Room(_)) { verbs::REMOTE_WRITE } else { verbs::REMOTE_READ };
        let at = || {
            (std::ptr::with_exposed_provenance::<u8>(memory.addr() as usize), memory.len() as usize)
        };
        let (mr, room) = match memory.exported() {
            Some(place) => (Arc::new(self.device.of_dma_buf(place, memory, access)?), None),
            None => (self.device.to_lend(None, at().0, at().1)?, Some(self.room(1).await?)),
        };
        let lent = {
            let mut s = self.state.lock();
            if s.destroyed() {
                let gone = self.gone(&s);
                drop((s, mr));
                self.device.end_if_spoilt();
                return Err(gone);
            }
            if room.is_some() {
                // Without a window nothing is open yet, and the connection goes on.
                let lacks = |e: Error| Error { code: Code::NoMem, ..e };
                self.windows(&mut s, 1).map_err(lacks)?;
            }
            let bound = match room {
                None => Ok((
                    Vec::new(),
                    frame::Region { addr: memory.addr(), key: mr.rkey(), len: at().1 as u32 },
                )),
                Some(mut room) => {
                    let bound = self.bind(&mut s, &mut room, &mr, at(), access);
                    bound.map(|(w, region)| (vec![w], region))
                }
            };
            bound.map(|(windows, region)| {
                let id = s.loans.add(Lent {
                    _mrs: vec![mr.clone()],
                    _payload: Vec::new(),
                    room: None,
                    _foreign: Some(memory.clone()),
                    windows,
                });
                (id, region)
            })
        };
        // The window may be open until the queue pair is gone, and the key until it is invalidated.
        let (id, region) = match lent {
            Ok(lent) => lent,
            Err(e) => {
                self.end();
                drop(mr);
                self.device.end_if_spoilt();
                return Err(e);
            }
        };
        let regions = match what {
            Lend::Payload(_) => Regions { payload: vec![region], room: None },
            Lend::Room(_) => Regions { payload: Vec::new(), room: Some(region) },
        };
        Ok(Loan { id, regions })
    }

    fn revoke(&self, loan: u64) {
        if self.state.lock().loans.get(loan).is_some() {
            self.end();
        }
    }

    async fn take_back(&self, loan: u64) -> Result<Option<BufMut>> {
        let n = self.state.lock().loans.get(loan).map_or(0, |l| l.windows.len());
        let mut room = self.room(n).await?;
        let done = {
            let mut s = self.state.lock();
            let s = &mut *s;
            let windows = s.loans.get(loan).map(|l| l.windows.clone()).unwrap_or_default();
            let mut done = None;
            for (i, w) in windows.iter().enumerate() {
                let mut wr = new_wr(op::LOCAL_INV);
                // SAFETY: a window of this loan.
                wr.imm_or_key = unsafe { (**w).rkey };
                let (tx, rx) = oneshot::channel();
                let last = i + 1 == windows.len();
                done = last.then_some(rx);
                self.post_op(s, &mut wr, &mut room, Held::default(), last.then_some(tx))?;
            }
            done
        };
        // They complete in order, so the last completion covers all of them.
        if let Some(done) = done
            && done.await.is_err()
        {
            return Err(self.gone(&self.state.lock()));
        }
        let mut s = self.state.lock();
        if s.destroyed() {
            // The loans were dropped with the queue pair, and with them the bytes written there.
            return Err(self.gone(&s));
        }
        let Some(mut lent) = s.loans.end(loan) else { return Ok(None) };
        let room = lent.room.take();
        // Under the lock, as in `end`: whoever finds the loan gone can rely on its registration
        // being gone.
        drop(lent);
        drop(s);
        self.device.end_if_spoilt();
        if self.device.is_spoilt() {
            return Err(self.gone(&self.state.lock()));
        }
        Ok(room)
    }

    async fn fetch(&self, from: &[frame::Region], mut to: BufMut) -> Result<BufMut> {
        if from.iter().map(|r| r.len as usize).sum::<usize>() != to.len() {
            return Err(Error::new(
                Code::Protocol,
                "regions whose length differs from the payload",
            ));
        }
        let mr = match self.device.of_mut(&mut to) {
            Ok(mr) => mr,
            // Neither this process's budget nor the kernel has room for it. In pieces it still
            // works.
            Err(e) if no_memory(&e) => return self.fetch_in_pieces(from, to).await,
            Err(e) => return Err(e),
        };
        let (at, lkey) = (to.as_mut_ptr().addr() as u64, mr.lkey());
        let held = Held { mrs: vec![mr], to: Some(to), ..Held::default() };
        self.read_from(from, (at, lkey), held)
            .await?
            .to
            .ok_or_else(|| self.gone(&self.state.lock()))
    }

    async fn put(&self, payload: Vec<Buf>, to: frame::Region) -> Result<()> {
        let part = |buf: Buf| Ok(Part { mr: self.device.of_buf(&buf)?, buf });
        let parts = self.parts(payload).into_iter().map(part).collect::<Result<Vec<_>>>()?;
        let mut room = self.room(parts.len()).await?;
        if parts.iter().map(|p| p.buf.len()).sum::<usize>() > to.len as usize {
            return Err(Error::new(Code::Protocol, "a payload longer than its region"));
        }
        let mut s = self.state.lock();
        let mut at = to.addr;
        for p in parts {
            let mut sge = Sge {
                addr: p.buf.as_ptr().addr() as u64,
                length: p.buf.len() as u32,
                lkey: p.mr.lkey(),
            };
            let mut wr = new_wr(op::WRITE);
            (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
            (wr.remote_addr, wr.rkey) = (at, to.key);
            at += p.buf.len() as u64;
            let held = Held { mrs: vec![p.mr], bufs: vec![p.buf], ..Held::default() };
            self.post_op(&mut s, &mut wr, &mut room, held, None)?;
        }
        Ok(())
    }
}
