//! The one buffer type from socket to disk: page-aligned, pooled, shared by reference.
//!
//! A [`Pool`] hands out [`BufMut`]s of power-of-two capacity from 4 KiB up. A filled one is frozen
//! into a [`Buf`], which can be sliced and cloned without copying. It goes back to the pool when
//! the last clone is dropped. Memory is zeroed once, when it comes from the system, and not again:
//! **the contents of a fresh buffer are unspecified** (they are some earlier buffer's), so the code
//! that takes a buffer must fill it before handing it on. Buffers up to 4 MiB lie in [`Region`]s,
//! which an io_uring registers once. Larger ones are mappings of their own, of which only the pages
//! written take memory and time: a peer may announce much and send little.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    fmt,
    num::NonZero,
    ops::{Deref, DerefMut, Range},
    ptr,
    ptr::NonNull,
    sync::{Arc, atomic::AtomicU64, atomic::Ordering::Relaxed},
};

use bytes::Bytes;
use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use strake_proto::{Code, Error, Result};
use strake_runtime::SharedMemory;
use tokio::sync::Semaphore;

use crate::{
    region::{Arena, Place, REGION, Region},
    traffic::{ByTransport, Transport, Went},
};

/// Alignment of every pooled buffer: enough for `O_DIRECT` and for registration.
pub const ALIGN: usize = 4096;
/// Largest limit of a [`Pool::default`].
pub const DEFAULT_LIMIT: u64 = 256 << 20;
const DANGLING: NonZero<usize> = NonZero::new(ALIGN).unwrap();

/// Aligned memory of `cap` initialised bytes; `cap` is 0 or a power of two of at least [`ALIGN`].
struct Block {
    ptr: NonNull<u8>,
    cap: usize,
    /// Its place in the pool's arena. `None`: an allocation of its own, or a mapping if it is
    /// larger than [`REGION`].
    place: Option<Place>,
}

// SAFETY: a block owns its memory exclusively, like a `Box<[u8]>`.
unsafe impl Send for Block {}
// SAFETY: shared references only read it.
unsafe impl Sync for Block {}

impl Block {
    fn layout(cap: usize) -> Layout {
        #[expect(
            clippy::expect_used,
            reason = "callers bound lengths far below: the wire by 16 MiB, files by their requests"
        )]
        Layout::from_size_align(cap, ALIGN).expect("a buffer length below isize::MAX")
    }

    fn new(cap: usize) -> Block {
        if cap == 0 {
            // Dangling but aligned, as slices of length 0 need.
            return Block { ptr: NonNull::without_provenance(DANGLING), cap, place: None };
        }
        let layout = Block::layout(cap);
        let ptr = if cap > REGION {
            map(cap)
        } else {
            // SAFETY: the layout's size is `cap`, which is not 0.
            NonNull::new(unsafe { alloc_zeroed(layout) })
        };
        Block { ptr: ptr.unwrap_or_else(|| handle_alloc_error(layout)), cap, place: None }
    }
}

/// A mapping of `cap` bytes, which the kernel zeroes page by page when they are first touched.
/// Aligned to a page, which is at least [`ALIGN`].
fn map(cap: usize) -> Option<NonNull<u8>> {
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new private mapping at an address of the kernel's choice touches no memory in use.
    let at = unsafe { mmap_anonymous(ptr::null_mut(), cap, prot, MapFlags::PRIVATE) };
    NonNull::new(at.ok()?.cast())
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.cap == 0 || self.place.is_some() {
            return;
        }
        if self.cap > REGION {
            // SAFETY: mapped in `new` with this very length, and owned by this value alone.
            let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.cap) };
        } else {
            // SAFETY: allocated in `new` with this very layout, and owned by this value alone.
            unsafe { dealloc(self.ptr.as_ptr(), Block::layout(self.cap)) }
        }
    }
}

/// Allocates buffers. Clones share one pool.
#[derive(Clone)]
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    limit: u64,
    /// Memory left below the limit, in units of [`ALIGN`].
    room: Semaphore,
    arena: Mutex<Arena>,
    used_bytes: AtomicU64,
    waits: AtomicU64,
    /// Number of callers that wait now.
    waiting: AtomicU64,
    allocations: AtomicU64,
}

/// What a pool is doing; in bytes unless noted otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// Most memory that [`Pool::get`] gives out.
    pub limit: u64,
    /// Capacity of the buffers in use. [`Pool::get_now`] may take it beyond the limit.
    pub used: u64,
    /// Memory kept for reuse.
    pub free: u64,
    /// How often [`Pool::get`] or [`Pool::get_all`] had to wait.
    pub waits: u64,
    /// Number of buffers that did not fit into a region.
    pub allocations: u64,
}

impl Default for Pool {
    /// A limit of 256 MiB or an eighth of the machine's memory, whichever is smaller.
    fn default() -> Pool {
        let info = rustix::system::sysinfo();
        let memory = info.totalram as u64 * u64::from(info.mem_unit);
        Pool::new((memory / 8).clamp(16 << 20, DEFAULT_LIMIT))
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pool").field(&self.stats()).finish()
    }
}

/// The capacity a buffer of `len` bytes gets.
fn capacity(len: usize) -> usize {
    if len == 0 { 0 } else { len.max(ALIGN).next_power_of_two() }
}

impl Pool {
    /// A pool whose buffers in use take at most `limit` bytes (rounded down to 4 KiB). Regions, at
    /// least one, are kept for reuse up to the same limit. Buffers above 4 MiB, and those for which
    /// no region has enough contiguous memory, are allocated in addition.
    pub fn new(limit: u64) -> Pool {
        Pool::over(Arena::default(), limit)
    }

    fn over(arena: Arena, limit: u64) -> Pool {
        let pages = (limit / ALIGN as u64).min(Semaphore::MAX_PERMITS as u64 / 2) as usize;
        Pool {
            shared: Arc::new(Shared {
                limit: (pages * ALIGN) as u64,
                room: Semaphore::new(pages),
                arena: Mutex::new(arena),
                used_bytes: AtomicU64::new(0),
                waits: AtomicU64::new(0),
                waiting: AtomicU64::new(0),
                allocations: AtomicU64::new(0),
            }),
        }
    }

    /// A pool whose buffers lie in kept memory from `offset` on, in as many regions as fit. Buffers
    /// that do not fit lie elsewhere ([`Buf::kept`] tells).
    pub fn kept(memory: Arc<SharedMemory>, offset: usize) -> Pool {
        let limit = (memory.len().saturating_sub(offset) / REGION * REGION) as u64;
        Pool::over(Arena::kept(memory, offset), limit)
    }

    /// The block of kept memory in which a buffer of an earlier process lay, all of it visible.
    /// `None` if there is no such block or it is in use.
    pub fn take_kept(&self, at: usize, capacity: usize) -> Option<BufMut> {
        let s = &self.shared;
        let place = s.arena.lock().take_at(at, capacity, s.regions())?;
        s.used_bytes.fetch_add(capacity as u64, Relaxed);
        let block = Block { ptr: place.as_ptr(), cap: capacity, place: Some(place) };
        Some(BufMut::new(block, capacity, Some(Home { pool: s.clone(), pages: 0 })))
    }

    /// A buffer of exactly `len` visible bytes (contents unspecified), start aligned to [`ALIGN`].
    /// Waits while the pool's limit is reached, first come first served; `NoMem` if `len` alone is
    /// beyond it.
    pub async fn get(&self, len: usize) -> Result<BufMut> {
        let s = &self.shared;
        let cap = capacity(len);
        if cap as u64 > s.limit {
            let m =
                format!("a buffer of {len} bytes is more than the whole pool of {} bytes", s.limit);
            return Err(Error::new(Code::NoMem, m));
        }
        let pages = (cap / ALIGN) as u32;
        s.wait_for(pages).await?;
        Ok(self.take(len, cap, pages))
    }

    /// Buffers of these lengths. Waits once, until the pool has memory for all of them; what
    /// exceeds the whole pool is allocated in addition. A caller that already holds buffers of the
    /// pool must set a time limit: others may do the same, and wait for each other.
    pub async fn get_all(&self, lens: &[usize]) -> Result<Vec<BufMut>> {
        let wanted: usize = lens.iter().map(|l| capacity(*l) / ALIGN).sum();
        let mut room = wanted.min((self.shared.limit / ALIGN as u64) as usize) as u32;
        self.shared.wait_for(room).await?;
        let each = |len: &usize| {
            let cap = capacity(*len);
            let pages = ((cap / ALIGN) as u32).min(room);
            room -= pages;
            self.take(*len, cap, pages)
        };
        Ok(lens.iter().map(each).collect())
    }

    /// As [`Pool::get`], but never waits: goes beyond the limit if need be. For small or rare
    /// buffers.
    pub fn get_now(&self, len: usize) -> BufMut {
        self.take(len, capacity(len), 0)
    }

    /// Whether any caller waits for a buffer.
    pub fn is_waited_for(&self) -> bool {
        self.shared.waiting.load(Relaxed) > 0
    }

    /// What the pool is doing now.
    pub fn stats(&self) -> PoolStats {
        let s = &self.shared;
        PoolStats {
            limit: s.limit,
            used: s.used_bytes.load(Relaxed),
            free: s.arena.lock().spare() as u64,
            waits: s.waits.load(Relaxed),
            allocations: s.allocations.load(Relaxed),
        }
    }

    fn take(&self, len: usize, cap: usize, pages: u32) -> BufMut {
        let s = &self.shared;
        let in_region = (ALIGN..=REGION).contains(&cap);
        let place = if in_region { s.arena.lock().take(cap, s.regions()) } else { None };
        let block = match place {
            Some(place) => Block { ptr: place.as_ptr(), cap, place: Some(place) },
            None => {
                s.allocations.fetch_add(u64::from(cap > 0), Relaxed);
                Block::new(cap)
            }
        };
        s.used_bytes.fetch_add(cap as u64, Relaxed);
        BufMut::new(block, len, Some(Home { pool: s.clone(), pages }))
    }
}

impl Shared {
    /// Reserves this many pages of the limit; the buffers give them back.
    async fn wait_for(&self, pages: u32) -> Result<()> {
        let permit = match self.room.try_acquire_many(pages) {
            Ok(p) => p,
            Err(_) => {
                self.waits.fetch_add(1, Relaxed);
                let _waits = Waits::new(&self.waiting);
                let closed = |_| Error::new(Code::NoMem, "the buffer pool is closed");
                self.room.acquire_many(pages).await.map_err(closed)?
            }
        };
        permit.forget();
        Ok(())
    }

    /// Maximum number of regions.
    fn regions(&self) -> usize {
        (self.limit as usize / REGION).max(1)
    }

    fn put(&self, block: Block, pages: u32) {
        self.used_bytes.fetch_sub(block.cap as u64, Relaxed);
        if let Some(place) = &block.place {
            self.arena.lock().put(place, block.cap);
        }
        self.room.add_permits(pages as usize);
    }
}

/// Counts a caller that waits for memory.
struct Waits<'a>(&'a AtomicU64);

impl<'a> Waits<'a> {
    fn new(waiting: &'a AtomicU64) -> Waits<'a> {
        waiting.fetch_add(1, Relaxed);
        Waits(waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

/// The pool a buffer returns to, and the part of its limit that the buffer takes.
struct Home {
    pool: Arc<Shared>,
    pages: u32,
}

/// A buffer owned by one holder, to be filled. Goes back to its pool when dropped.
pub struct BufMut {
    block: Block,
    len: usize,
    home: Option<Home>,
    /// The transport that brought its bytes.
    transport: Transport,
    /// The transports that sent its bytes since it was filled.
    went: Went,
}

impl BufMut {
    fn new(block: Block, len: usize, home: Option<Home>) -> BufMut {
        BufMut { block, len, home, transport: Transport::Local, went: Went::default() }
    }

    /// Notes the transport that brought its bytes. A new buffer, and one that is written again, has
    /// [`Transport::Local`].
    pub fn came_by(&mut self, transport: Transport) {
        self.transport = transport;
    }

    /// A zeroed buffer that belongs to no pool.
    pub fn unpooled(len: usize) -> BufMut {
        BufMut::new(Block::new(capacity(len)), len, None)
    }

    /// Makes the bytes read-only, so that they can be shared.
    pub fn freeze(self) -> Buf {
        let range = 0..self.len;
        Buf { owner: Owner::Pooled(Arc::new(self)), range }
    }

    /// Shortens the visible length.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Start of the memory, for the kernel to read from. Valid for [`BufMut::capacity`] bytes.
    pub fn as_ptr(&self) -> *const u8 {
        self.block.ptr.as_ptr()
    }

    /// Start of the memory, for the kernel to write to. Valid for [`BufMut::capacity`] bytes.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.block.ptr.as_ptr()
    }

    /// The region it lies in, if it lies in one.
    pub fn region(&self) -> Option<&Arc<Region>> {
        self.block.place.as_ref().map(|p| &p.region)
    }

    /// Bytes behind the pointer: the length rounded up to a power of two of at least 4 KiB.
    pub fn capacity(&self) -> usize {
        self.block.cap
    }
}

impl Drop for BufMut {
    fn drop(&mut self) {
        if let Some(home) = self.home.take() {
            let block = std::mem::replace(&mut self.block, Block::new(0));
            home.pool.put(block, home.pages);
        }
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BufMut({} bytes)", self.len)
    }
}

impl Deref for BufMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len <= cap` bytes behind `ptr` are initialised and owned by this value.
        unsafe { std::slice::from_raw_parts(self.block.ptr.as_ptr(), self.len) }
    }
}

impl DerefMut for BufMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.block.ptr.as_ptr(), self.len) }
    }
}

/// Location of a [`Buf`] in kept memory: its block, for [`Pool::take_kept`], and its range in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptAt {
    /// Position of the block in the kept memory, bytes.
    pub block: usize,
    /// Length of the block, bytes.
    pub capacity: usize,
    /// Where the bytes begin in the block.
    pub start: usize,
    /// Number of bytes.
    pub len: usize,
}

/// Read-only shared bytes: a slice of a pooled buffer, or of a `Bytes`.
#[derive(Clone)]
pub struct Buf {
    owner: Owner,
    range: Range<usize>,
}

#[derive(Clone)]
enum Owner {
    Pooled(Arc<BufMut>),
    Bytes(Bytes),
}

impl Buf {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    /// A part of this one, sharing its memory. Panics when out of range, like slicing.
    #[must_use]
    pub fn slice(&self, r: Range<usize>) -> Buf {
        assert!(r.start <= r.end && r.end <= self.len());
        Buf {
            owner: self.owner.clone(),
            range: self.range.start + r.start..self.range.start + r.end,
        }
    }

    /// Takes the first `n` bytes off, without copying. Panics when there are fewer.
    #[must_use]
    pub fn split_to(&mut self, n: usize) -> Buf {
        let head = self.slice(0..n);
        self.range.start += n;
        head
    }

    /// A copy of `bytes`, aligned, outside of any pool.
    pub fn copy_from(bytes: &[u8]) -> Buf {
        let mut b = BufMut::unpooled(bytes.len());
        b.copy_from_slice(bytes);
        b.freeze()
    }

    /// The region it lies in, if it lies in one.
    pub fn region(&self) -> Option<&Arc<Region>> {
        match &self.owner {
            Owner::Pooled(b) => b.region(),
            Owner::Bytes(_) => None,
        }
    }

    /// The transport that brought its bytes. Copied bytes have [`Transport::Local`].
    pub fn transport(&self) -> Transport {
        match &self.owner {
            Owner::Pooled(b) => b.transport,
            Owner::Bytes(_) => Transport::Local,
        }
    }

    /// Notes that all of it was sent by this transport and has arrived.
    pub fn sent_by(&self, transport: Transport) {
        if let Owner::Pooled(b) = &self.owner {
            b.went.add(transport, self.len());
        }
    }

    /// Bytes sent by each transport since the whole buffer, of which this may be a part, was
    /// filled. Bytes sent twice count twice.
    pub fn went(&self) -> ByTransport {
        match &self.owner {
            Owner::Pooled(b) => b.went.look(),
            Owner::Bytes(_) => ByTransport::default(),
        }
    }

    /// Its location in kept memory, if it lies there.
    pub fn kept(&self) -> Option<KeptAt> {
        let Owner::Pooled(b) = &self.owner else { return None };
        let at = b.block.place.as_ref()?.kept_at()?;
        Some(KeptAt {
            block: at,
            capacity: b.block.cap,
            start: self.range.start,
            len: self.range.len(),
        })
    }

    /// Whether start address and length are multiples of [`ALIGN`], as `O_DIRECT` wants them.
    pub fn is_aligned(&self) -> bool {
        self.as_ptr().addr().is_multiple_of(ALIGN) && self.len().is_multiple_of(ALIGN)
    }

    /// The buffer for writing again, if this is its only holder and it starts where the memory
    /// starts.
    pub fn try_mut(self) -> Result<BufMut, Buf> {
        let Buf { owner, range } = self;
        match owner {
            Owner::Pooled(b) if range.start == 0 => match Arc::try_unwrap(b) {
                Ok(mut b) => {
                    b.truncate(range.end);
                    (b.transport, b.went) = (Transport::Local, Went::default());
                    Ok(b)
                }
                Err(b) => Err(Buf { owner: Owner::Pooled(b), range }),
            },
            owner => Err(Buf { owner, range }),
        }
    }
}

impl From<Bytes> for Buf {
    /// Without copying; not aligned.
    fn from(b: Bytes) -> Buf {
        let range = 0..b.len();
        Buf { owner: Owner::Bytes(b), range }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len())
    }
}

impl Deref for Buf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.owner {
            Owner::Pooled(b) => &b[self.range.clone()],
            Owner::Bytes(b) => &b[self.range.clone()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn buffers_are_aligned_exact_and_reused() {
        let pool = Pool::new(64 << 20);
        pool.get_now(1);
        for len in [0, 1, 100, 4096, 4097, 1 << 20, (1 << 20) + 1, 16 << 20, 20 << 20] {
            let before = pool.stats();
            for _ in 0..3 {
                let mut b = pool.get(len).await.unwrap();
                assert_eq!(b.len(), len);
                assert!(b.as_ptr().addr().is_multiple_of(ALIGN) && b.capacity() >= len);
                b.fill(7);
                assert!(b.freeze().iter().all(|x| *x == 7));
            }
            let after = pool.stats();
            assert_eq!(after.used, 0);
            let outside = if capacity(len) > REGION { 3 } else { 0 };
            assert_eq!(after.allocations - before.allocations, outside, "{len}");
            assert_eq!(after.free, REGION as u64, "one region, used again");
        }
    }

    /// Number of its pages that are resident in memory.
    fn resident(b: &BufMut) -> usize {
        let mut pages = vec![0u8; b.capacity() / ALIGN];
        // SAFETY: the buffer's memory is mapped, and there is a byte for each of its pages: none is
        // smaller.
        let rc = unsafe {
            libc::mincore(b.as_ptr().cast_mut().cast(), b.capacity(), pages.as_mut_ptr())
        };
        assert_eq!(rc, 0);
        pages.iter().filter(|p| **p & 1 == 1).count()
    }

    #[test]
    fn a_big_buffer_is_zero_and_takes_memory_for_what_is_written() {
        let pool = Pool::new(64 << 20);
        for len in [REGION + 1, 16 << 20] {
            for mut b in [pool.get_now(len), BufMut::unpooled(len)] {
                assert_eq!(resident(&b), 0, "{len}");
                b[0] = 7;
                // One page, or one huge page.
                assert!(resident(&b) <= (2 << 20) / ALIGN, "{len}");
                assert!(b[1..].iter().all(|x| *x == 0) && b[0] == 7);
            }
        }
        assert_eq!(pool.stats().used, 0);
    }

    #[test]
    fn marks_stay_with_the_bytes_and_not_with_the_memory() {
        let pool = Pool::new(64 << 20);
        let mut b = pool.get_now(100);
        assert_eq!(b.transport, Transport::Local);
        b.came_by(Transport::Tcp);
        let b = b.freeze();
        let part = b.slice(10..30);
        assert_eq!(
            (part.transport(), Buf::copy_from(&part).transport()),
            (Transport::Tcp, Transport::Local)
        );
        part.sent_by(Transport::Rdma);
        b.slice(30..40).sent_by(Transport::RdmaStream);
        assert_eq!(
            (b.went()[Transport::Rdma], b.went()[Transport::RdmaStream], b.went().sum()),
            (20, 10, 30)
        );
        drop(part);
        // Written again, or used by another holder: nothing of it is left.
        let b = b.try_mut().unwrap().freeze();
        assert_eq!((b.transport(), b.went().sum()), (Transport::Local, 0));
        drop(b);
        let again = pool.get_now(100).freeze();
        assert_eq!((again.transport(), again.went().sum()), (Transport::Local, 0));
        assert_eq!(Buf::from(Bytes::from_static(b"x")).transport(), Transport::Local);
    }

    #[tokio::test(start_paused = true)]
    async fn get_waits_at_the_limit_and_get_now_does_not() {
        let pool = Pool::new(1 << 20);
        let a = pool.get(512 << 10).await.unwrap();
        let b = pool.get(512 << 10).await.unwrap().freeze();
        let mut waiting = tokio_task(pool.clone(), 4096);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        let extra = pool.get_now(4096);
        assert_eq!(pool.stats().used, (1 << 20) + 4096);
        drop(extra);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "what came from beyond the limit makes no room");
        let part = b.slice(10..20);
        drop(b);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "a slice keeps its buffer");
        drop(part);
        assert_eq!((&mut waiting).await.unwrap(), 4096);
        drop(a);
        assert_eq!(pool.stats().waits, 1);
        assert_eq!(pool.get(2 << 20).await.unwrap_err().code, Code::NoMem);
        assert!(pool.get(1 << 20).await.is_ok(), "all room came back");
    }

    #[tokio::test(start_paused = true)]
    async fn get_all_takes_the_room_of_all_at_once() {
        let pool = Pool::new(1 << 20);
        let lens = [4096, 1, 200 << 10, 256 << 10];
        let bufs = pool.get_all(&lens).await.unwrap();
        assert_eq!(bufs.iter().map(|b| b.len()).collect::<Vec<_>>(), lens);
        let room: u64 = bufs.iter().map(|b| b.capacity() as u64).sum();
        assert_eq!(pool.stats().used, room);
        let mut rest = tokio_task(pool.clone(), 512 << 10);
        tokio::task::yield_now().await;
        assert!(!rest.is_finished(), "room for {room} bytes is taken");
        drop(bufs);
        assert_eq!((&mut rest).await.unwrap(), 512 << 10);
        // Callers that want most of the pool in parts take turns.
        let each = (0..8).map(|_| async {
            let bufs = pool.get_all(&[64 << 10; 12]).await.unwrap();
            assert!(pool.stats().used <= 1 << 20);
            tokio::task::yield_now().await;
            drop(bufs);
        });
        futures_util::future::join_all(each).await;
        // More than the pool has: all of the pool, and additional memory.
        let most = pool.get_all(&[512 << 10; 3]).await.unwrap();
        assert_eq!(pool.stats().used, 3 << 19);
        let mut waiting = tokio_task(pool.clone(), 1);
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        drop(most);
        assert_eq!((&mut waiting).await.unwrap(), 1);
        assert!(pool.get_all(&[]).await.unwrap().is_empty());
        assert!(pool.get(1 << 20).await.is_ok(), "all room came back");
    }

    fn tokio_task(pool: Pool, len: usize) -> tokio::task::JoinHandle<usize> {
        tokio::spawn(async move { pool.get(len).await.unwrap().len() })
    }

    #[tokio::test]
    async fn kept_memory_of_one_size_makes_way_for_another() {
        let pool = Pool::new(REGION as u64);
        let small: Vec<BufMut> = (0..REGION / 4096).map(|_| pool.get_now(4096)).collect();
        let beyond = pool.get_now(4096);
        assert!(beyond.region().is_none() && small.iter().all(|b| b.region().is_some()));
        assert_eq!(pool.stats().free, 0);
        drop(small);
        let big = pool.get(REGION).await.unwrap();
        assert!(big.region().is_some());
        let s = pool.stats();
        assert_eq!((s.used, s.free, s.allocations), (REGION as u64 + 4096, 0, 1));
    }

    #[test]
    fn slices_splits_and_recovery() {
        let pool = Pool::new(1 << 20);
        let mut m = pool.get_now(8192);
        m.iter_mut().enumerate().for_each(|(i, b)| *b = (i / 100) as u8);
        let mut b = m.freeze();
        assert!(b.is_aligned() && b.slice(4096..8192).is_aligned());
        assert!(!b.slice(1..4097).is_aligned() && !b.slice(0..100).is_aligned());
        let head = b.split_to(100);
        assert!(head.iter().all(|x| *x == 0) && b.len() == 8092 && b[0] == 1);
        let b = b.try_mut().unwrap_err();
        drop(b);
        let mut m = head.try_mut().unwrap();
        assert_eq!(m.len(), 100);
        m[0] = 9;
        assert_eq!(m.freeze()[0], 9);
        let from = Buf::from(Bytes::from_static(b"hello"));
        assert_eq!(&from.slice(1..3)[..], b"el");
        assert!(from.try_mut().is_err());
        assert_eq!(&Buf::copy_from(b"xyz")[..], b"xyz");
        assert!(Buf::copy_from(b"").is_empty());
    }
}
