//! A device: protection domain, shared receive queue, registrations of pool memory.

use std::{
    collections::BTreeMap,
    ffi::c_int,
    os::fd::{AsRawFd, BorrowedFd},
    ptr::null_mut,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};

use super::{
    limits::{DEPTH, MESSAGE},
    locked::{Budget, Had, Locked, What},
    probe::{look_at, name_of},
    registered::Registered,
    stage::Stage,
    verbs::{self, Context, Lib, Pd, RecvWr, Sge, Srq, SrqInitAttr, os_error},
};
use crate::{Buf, BufMut, Foreign, Pool, REGION, Region, buf::ALIGN};

/// Bit of a completion's id that marks a receive buffer.
pub const RECV: u64 = 1 << 63;

/// The queue pair of a connection, as its device sees it.
pub trait QueuePair: Send + Sync {
    /// Destroys it. From then on the device touches none of its memory. The device holds its own
    /// lock during the call.
    fn destroy(&self);
}

pub struct Device {
    pub lib: &'static Lib,
    pub ctx: *mut Context,
    pub name: String,
    pd: *mut Pd,
    srq: *mut Srq,
    /// Number of buffers of the shared receive queue.
    pub messages: u32,
    /// Maximum number of concurrent READs, as target and as source.
    pub reads: (u8, u8),
    /// The device checks windows against the bounds of the registration only, so lent memory gets a
    /// registration of its own (soft-RoCE, as of Linux 6.1).
    loose: bool,
    /// Registered regions by their id. Holds the regions: unmapped memory must not stay registered.
    regions: Mutex<BTreeMap<u64, Whole>>,
    inbox: Inbox,
    /// Present on each device that is set up.
    pub stage: Option<Arc<Stage>>,
    pub pool: Pool,
    /// Number of devices that share the limit for registered memory.
    devices: usize,
    /// A key of this protection domain could not be invalidated.
    spoilt: Arc<AtomicBool>,
    /// The connections of this protection domain, including some that are gone.
    queues: Mutex<Vec<Weak<dyn QueuePair>>>,
    /// For tests: as if no destination of a fetch could be registered.
    #[cfg(test)]
    pub starved: AtomicBool,
}

/// A region of the pool, and its registration.
type Whole = (Arc<Registered>, Arc<Region>);

/// The buffers of the shared receive queue.
struct Inbox {
    /// Held for its memory.
    _memory: BufMut,
    start: *mut u8,
    mr: Option<Registered>,
}

// SAFETY: the libraries' objects may be used by any thread; what they point to lives as long as
// this value.
unsafe impl Send for Device {}
// SAFETY: as above; the libraries lock for themselves.
unsafe impl Sync for Device {}

/// The error when bytes of a dma-buf cannot be registered. Whatever the kernel or a driver reports,
/// it means that they cannot be lent, so that callers can work without lending.
fn no_dma_buf(name: &str, len: usize, e: &std::io::Error) -> Error {
    match e.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS) => verbs::missing(format!(
            "device {name} cannot register memory of other devices (dma-buf); use a device, \
             driver and kernel that can"
        )),
        _ => Error::new(
            Code::OpNotSupp,
            format!("device {name}: {len} bytes of a dma-buf cannot be registered: {e}"),
        ),
    }
}

impl Device {
    /// Sets up a device for use, as one of `devices`, with a shared receive queue of `messages`.
    pub fn open(
        lib: &'static Lib,
        ctx: *mut Context,
        pool: Pool,
        messages: u32,
        devices: usize,
    ) -> Result<Arc<Device>> {
        let attr = look_at(lib, ctx)?;
        let name = name_of(lib, ctx);
        // All of them may complete on one queue pair, in addition to everything that it sends.
        let messages = messages.min(attr.max_srq_wr as u32).min(attr.max_cqe as u32 - DEPTH as u32);
        // SAFETY: an open context.
        let pd = unsafe { (lib.ibv_alloc_pd)(ctx) };
        if pd.is_null() {
            return Err(os_error(&format!("device {name}: a protection domain")));
        }
        let mut memory = pool.get_now(messages as usize * MESSAGE);
        let start = memory.as_mut_ptr();
        let cap = |n: c_int| n.clamp(1, 16) as u8;
        let mut device = Device {
            lib,
            ctx,
            name,
            pd,
            srq: null_mut(),
            messages,
            reads: (cap(attr.max_qp_rd_atom), cap(attr.max_qp_init_rd_atom)),
            loose: attr.vendor_id == verbs::SOFT_ROCE,
            regions: Mutex::default(),
            inbox: Inbox { _memory: memory, start, mr: None },
            stage: None,
            pool,
            devices,
            spoilt: Arc::default(),
            queues: Mutex::default(),
            #[cfg(test)]
            starved: false.into(),
        };
        let mut init =
            SrqInitAttr { srq_context: null_mut(), max_wr: messages, max_sge: 1, srq_limit: 0 };
        // SAFETY: a protection domain and attributes that outlive the call.
        device.srq = unsafe { (lib.ibv_create_srq)(pd, &raw mut init) };
        if device.srq.is_null() {
            return Err(os_error(&format!("device {}: a shared receive queue", device.name)));
        }
        device.inbox.mr = Some(device.register_for_good(start, messages as usize * MESSAGE)?);
        let mut stage = Stage::new(&device.pool, Budget::here().piece(devices));
        let (start, len) = stage.memory();
        stage.registered(device.register_for_good(start, len)?);
        device.stage = Some(Arc::new(stage));
        for i in 0..messages {
            device.post_recv(i)?;
        }
        Ok(Arc::new(device))
    }

    pub fn pd(&self) -> *mut Pd {
        self.pd
    }

    pub fn is_spoilt(&self) -> bool {
        self.spoilt.load(SeqCst)
    }

    /// Adds a connection that is up. It ends at once if the device is spoilt.
    pub fn enter(&self, q: Arc<dyn QueuePair>) {
        let mut all = self.queues.lock();
        all.retain(|q| q.strong_count() > 0);
        all.push(Arc::downgrade(&q));
        drop(all);
        self.end_if_spoilt();
    }

    /// To be called, without the lock of a connection, after registrations with keys of their own
    /// were dropped. A key that could not be invalidated opens its memory to every queue pair of
    /// this protection domain. So all of them are destroyed when this returns; without them the key
    /// opens nothing. New connections get a protection domain of their own, see
    /// `RdmaFabric::device`.
    pub fn end_if_spoilt(&self) {
        if !self.is_spoilt() {
            return;
        }
        // Held until the end, so that concurrent callers wait until all are destroyed, too.
        let mut all = self.queues.lock();
        let left: Vec<Arc<dyn QueuePair>> =
            std::mem::take(&mut *all).iter().filter_map(Weak::upgrade).collect();
        if !left.is_empty() {
            tracing::error!(
                "device {}: all its connections end, because a memory key cannot be revoked",
                self.name
            );
        }
        left.iter().for_each(|q| q.destroy());
        drop(all);
    }

    pub fn srq(&self) -> *mut Srq {
        self.srq
    }

    /// Gives a receive buffer to the queue.
    pub fn post_recv(&self, i: u32) -> Result<()> {
        let lkey = self.inbox.mr.as_ref().map_or(0, Registered::lkey);
        let addr = self.inbox.start.wrapping_add(i as usize * MESSAGE).addr() as u64;
        let mut sge = Sge { addr, length: MESSAGE as u32, lkey };
        let mut wr = RecvWr {
            wr_id: RECV | u64::from(i),
            next: null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
        };
        let mut bad = null_mut();
        // SAFETY: queue and request are valid; the buffer is registered and is nobody's until its
        // completion.
        match unsafe { ((*self.ctx).ops.post_srq_recv)(self.srq, &raw mut wr, &raw mut bad) } {
            0 => Ok(()),
            rc => {
                let e = Error::from(std::io::Error::from_raw_os_error(rc));
                Err(e.context(format!("device {}: a receive buffer", self.name)))
            }
        }
    }

    /// Copies the start of a receive buffer that was completed and not posted again.
    pub fn copy_received(&self, i: u32, to: &mut [u8]) {
        assert!(to.len() <= MESSAGE);
        let from = self.inbox.start.wrapping_add(i as usize * MESSAGE);
        // SAFETY: within the buffers' memory, in one that the device is done with and nobody else
        // uses.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
    }

    fn register(&self, start: *mut u8, len: usize, locked: Locked) -> Result<Registered> {
        // Without remote rights of its own: those are for windows.
        let access = verbs::LOCAL_WRITE | verbs::MW_BIND;
        // SAFETY: the domain is valid; callers hold the memory for longer than the result.
        let mr = unsafe { (self.lib.ibv_reg_mr)(self.pd, start.cast(), len, access) };
        if mr.is_null() {
            let e = std::io::Error::last_os_error();
            let m = format!(
                "device {}: {len} bytes cannot be registered ({e}); the limit for locked memory is {} bytes, raise it \
                 (ulimit -l, LimitMEMLOCK=) or give the process a smaller pool",
                self.name,
                Budget::here().limit
            );
            return Err(Error::new(Code::NoMem, m));
        }
        Ok(Registered { lib: self.lib, mr, _locked: Some(locked), open: None })
    }

    /// Registers the device's own memory.
    fn register_for_good(&self, start: *mut u8, len: usize) -> Result<Registered> {
        let room = Budget::here()
            .take(What::Stream, len as u64)
            .ok_or_else(|| Budget::here().refusal(len))?;
        self.register(start, len, room)
    }

    /// Registers a region for as long as anything else holds it. `None`: the limit leaves no room
    /// for it.
    fn whole(&self, region: &Arc<Region>) -> Option<Arc<Registered>> {
        let mut all = self.regions.lock();
        if let Some((r, _)) = all.get(&region.id()) {
            return Some(r.clone());
        }
        // Drops regions that nothing else holds: their pool is gone.
        all.retain(|_, (_, held)| Arc::strong_count(held) > 1);
        let kept = all.values().filter(|(_, r)| r.is_kept()).count();
        let had = Had { pool: ((all.len() - kept) * REGION) as u64, kept: (kept * REGION) as u64 };
        let kept = region.is_kept().then(|| self.pool.stats().limit);
        let locked = Budget::here().region(had, self.devices, kept)?;
        let made = self.register(region.as_ptr(), REGION, locked);
        let made = made
            .inspect_err(|e| tracing::debug!("a region is not registered: {e}"))
            .ok()
            .map(Arc::new)?;
        all.insert(region.id(), (made.clone(), region.clone()));
        Some(made)
    }

    /// The registration of the region in which the memory lies. If there is no region, or it cannot
    /// be registered whole, registers exactly these bytes, for `otherwise`. The caller holds the
    /// memory as long as the result. `Overloaded`: there is no room for it now, but may be later.
    fn registration(
        &self,
        region: Option<&Arc<Region>>,
        start: *mut u8,
        len: usize,
        otherwise: What,
    ) -> Result<Arc<Registered>> {
        if let Some(whole) = region.and_then(|r| self.whole(r)) {
            return Ok(whole);
        }
        // The kernel counts whole pages.
        let (first, end) = (start.addr() / ALIGN, (start.addr() + len).div_ceil(ALIGN));
        let room = Budget::here().take(otherwise, ((end - first) * ALIGN) as u64);
        let room = room.ok_or_else(|| Budget::here().refusal(len))?;
        self.register(start, len, room).map(Arc::new)
    }

    /// Start addresses of the registered regions of kept memory.
    #[cfg(test)]
    pub fn kept_regions(&self) -> Vec<u64> {
        let all = self.regions.lock();
        all.values().filter(|(_, r)| r.is_kept()).map(|(_, r)| r.as_ptr().addr() as u64).collect()
    }

    pub fn of_buf(&self, b: &Buf) -> Result<Arc<Registered>> {
        self.registration(b.region(), b.as_ptr().cast_mut(), b.len(), What::Once)
    }

    /// A registration under which a window may be bound to exactly these bytes. The caller holds
    /// the memory as long.
    pub fn to_lend(
        &self,
        region: Option<&Arc<Region>>,
        start: *const u8,
        len: usize,
    ) -> Result<Arc<Registered>> {
        self.registration(region.filter(|_| !self.loose), start.cast_mut(), len, What::Once)
    }

    /// Registers exactly these bytes of a dma-buf, with a key that opens them for one direction:
    /// the kernel binds no windows to such a registration. It does not count as locked memory: the
    /// pinned memory is the exporter's.
    pub fn of_dma_buf(
        &self,
        (fd, offset): (BorrowedFd<'_>, u64),
        memory: &Foreign,
        access: u32,
    ) -> Result<Registered> {
        let register = (self.lib.reg_dmabuf)()?;
        let len = memory.len() as usize;
        let local = if access & verbs::REMOTE_WRITE != 0 { verbs::LOCAL_WRITE } else { 0 };
        // SAFETY: a valid domain and an open descriptor, which the kernel checks and holds by
        // itself.
        let mr = unsafe {
            register(self.pd, offset, len, memory.addr(), fd.as_raw_fd(), local | access as c_int)
        };
        if !mr.is_null() {
            return Ok(Registered {
                lib: self.lib,
                mr,
                _locked: None,
                open: Some(self.spoilt.clone()),
            });
        }
        Err(no_dma_buf(&self.name, len, &std::io::Error::last_os_error()))
    }

    pub fn of_mut(&self, b: &mut BufMut) -> Result<Arc<Registered>> {
        #[cfg(test)]
        if self.starved.load(SeqCst) {
            return Err(Budget::here().refusal(b.capacity()));
        }
        let (start, len) = (b.as_mut_ptr(), b.capacity());
        self.registration(b.region(), start, len, What::Once)
    }

    /// As [`Device::of_mut`], for a message of the stream.
    pub fn of_message(&self, b: &mut BufMut) -> Result<Arc<Registered>> {
        let (start, len) = (b.as_mut_ptr(), b.capacity());
        self.registration(b.region(), start, len, What::Stream)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold the device, so nothing uses these any more; in reverse order of
        // their making.
        unsafe {
            if !self.srq.is_null() {
                (self.lib.ibv_destroy_srq)(self.srq);
            }
            self.inbox.mr = None;
            self.stage = None;
            self.regions.get_mut().clear();
            (self.lib.ibv_dealloc_pd)(self.pd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_cannot_be_registered_for_any_reason_is_memory_that_cannot_be_lent() {
        for errno in 1..600 {
            let e = no_dma_buf("mlx5_0", 4096, &std::io::Error::from_raw_os_error(errno));
            assert!(
                e.code == Code::OpNotSupp && e.message.contains("device mlx5_0"),
                "{errno}: {e}"
            );
        }
    }
}
