//! The functions of the interface. Unless a comment says otherwise, pointers must be as cuFile's
//! interface requires.
#![allow(non_snake_case, reason = "the interface's names")]
#![allow(clippy::missing_safety_doc, reason = "the interface's: see above")]

use std::{
    ffi::{CStr, CString, c_char, c_int, c_long, c_uint, c_void},
    slice,
    time::Instant,
};

use crate::{
    abi::{self, Descriptor, Event, IoVec, Level1, Level2, Level3, Params, Properties, Status},
    batch::{Batch, duration},
    driver::{Driver, Handle, OurFile},
    errors::{CallError, Done, control, moving, say},
    io::{self, Asked, Order},
    set,
    stats::{self, Access, By, Stats},
    vendor::{self, Range, Vendor},
};

const BAD: CallError = CallError::Op(abi::INVALID_VALUE);

/// Marks this library, so that it can recognise itself.
#[unsafe(no_mangle)]
pub extern "C" fn strake_cufile() -> c_int {
    1
}

/// Passes a call back that the real library makes to its own function.
macro_rules! own_call {
    ($field:ident($($arg:expr),*)) => {
        if let Some(f) = vendor::inside().and_then(|r| r.$field) {
            // SAFETY: the real library's own arguments.
            return unsafe { f($($arg),*) };
        }
    };
}

unsafe fn put<T>(to: *mut T, value: T) -> Done<()> {
    if to.is_null() {
        return Err(BAD);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Opens the driver; counts the opens if it is open already.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverOpen() -> Status {
    own_call!(driver_open());
    control(|| Driver::get()?.open(true))
}

/// Undoes one open of the driver; the last one closes it.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose_v2() -> Status {
    own_call!(driver_close());
    control(|| Driver::get()?.close())
}

/// The older name of [`cuFileDriverClose_v2`].
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverClose() -> Status {
    cuFileDriverClose_v2()
}

/// How often the driver is open.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileUseCount() -> c_long {
    own_call!(use_count());
    Driver::get().map_or(0, Driver::uses)
}

/// The version of the interface.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetVersion(version: *mut c_int) -> Status {
    own_call!(version(version));
    // SAFETY: the caller's promise.
    control(|| unsafe { put(version, set::version()) })
}

/// The properties of the driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetProperties(props: *mut Properties) -> Status {
    control(|| {
        let d = Driver::get()?;
        let p = Properties {
            max_batch_io_size: d.params.lock().batch() as c_uint,
            ..*d.properties.lock()
        };
        // SAFETY: the caller's promise.
        unsafe { put(props, p) }
    })
}

fn set_property(set: impl FnOnce(&mut Properties)) -> Status {
    control(|| {
        set(&mut Driver::get()?.properties.lock());
        Ok(())
    })
}

fn small(n: usize) -> c_uint {
    n.try_into().unwrap_or(c_uint::MAX)
}

/// Keeps the value and reports it; it has no effect here.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetPollMode(poll: u8, threshold: usize) -> Status {
    set_property(|p| {
        p.dcontrolflags = p.dcontrolflags & !1 | c_uint::from(poll != 0);
        p.poll_thresh_size = threshold;
    })
}

/// Keeps the value and reports it; it has no effect here.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetMaxDirectIOSize(kib: usize) -> Status {
    set_property(|p| p.max_direct_io_size = kib)
}

/// Keeps the value and reports it; it has no effect here.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetMaxCacheSize(kib: usize) -> Status {
    set_property(|p| p.max_device_cache_size = small(kib))
}

/// Keeps the value and reports it; it has no effect here.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetMaxPinnedMemSize(kib: usize) -> Status {
    set_property(|p| p.max_device_pinned_mem_size = small(kib))
}

/// Registers a file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleRegister(
    handle: *mut *mut c_void,
    of: *mut Descriptor,
) -> Status {
    own_call!(handle_register(handle, of));
    control(|| {
        // SAFETY: the caller's promise.
        let (Some(of), false) = (unsafe { of.as_mut() }, handle.is_null()) else { return Err(BAD) };
        let d = Driver::opened()?;
        let registered = d.register(of);
        d.stats.control(|b| &mut b.hdl_register_ops, &registered);
        // SAFETY: the caller's promise.
        unsafe { put(handle, registered? as *mut c_void) }
    })
}

/// Deregisters a file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileHandleDeregister(handle: *mut c_void) {
    own_call!(handle_deregister(handle));
    control(|| {
        let d = Driver::open_one()?;
        let done = d.deregister(handle);
        d.stats.control(|b| &mut b.hdl_deregister_ops, &done);
        done
    });
}

fn device_of(d: &Driver, addr: u64) -> Option<(u32, [u8; 16])> {
    let (_, cuda) = d.cuda_of_thread().ok()?;
    let n = cuda.device_of(addr).ok()??;
    Some((n, d.cuda(n).ok()?.uuid().unwrap_or_default()))
}

fn buf_register(d: &Driver, addr: *const c_void, len: usize, flags: c_int) -> Done<()> {
    let (end, _) = ((addr as u64).checked_add(len as u64), flags);
    if addr.is_null() || len == 0 || end.is_none() {
        return Err(BAD);
    }
    let (_, cuda) = d.cuda_of_thread()?;
    if let Some(n) = cuda.device_of(addr as u64).map_err(|f| CallError::from(&f))? {
        strake_gds::GpuMem::check(&d.cuda(n)?, addr as u64, len as u64)
            .map_err(|f| CallError::from(&f))?;
    } else {
        // Host memory, or an invalid address: check that both ends can be read.
        crate::host::get(addr as u64, 1)?;
        crate::host::get(addr as u64 + len as u64 - 1, 1)?;
    }
    let mut all = d.buffers.lock();
    // Read with the buffers locked: a thread that opens the real library's driver registers them
    // under the same lock.
    let vendor = d.vendor_if_open();
    if all.contains_key(&(addr as u64)) {
        return Err(CallError::Op(abi::MEMORY_ALREADY_REGISTERED));
    }
    if let Some(vendor) = vendor {
        // SAFETY: the program registers this memory, so it exists.
        vendor.control(vendor.buf_register, |f| unsafe { f(addr, len, flags) })?;
    }
    all.insert(addr as u64, len);
    Ok(())
}

/// Registers memory. Our files do not depend on it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBufRegister(
    addr: *const c_void,
    len: usize,
    flags: c_int,
) -> Status {
    own_call!(buf_register(addr, len, flags));
    control(|| {
        let d = Driver::opened()?;
        let done = buf_register(&d, addr, len, flags);
        d.stats.buffer(device_of(&d, addr as u64), Some(len as u64), &done);
        done
    })
}

/// Deregisters memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBufDeregister(addr: *const c_void) -> Status {
    own_call!(buf_deregister(addr));
    control(|| {
        let d = Driver::open_one()?;
        let done = d.buffers.lock().remove(&(addr as u64)).map(drop).ok_or(BAD);
        if let (Ok(()), Some(vendor)) = (done, d.vendor_if_open()) {
            // SAFETY: an address, which the real library need not have registered.
            let _ = vendor.control(vendor.buf_deregister, |f| unsafe { f(addr) });
        }
        d.stats.buffer(device_of(&d, addr as u64), None, &done);
        done
    })
}

/// Reads or writes with the library that has the file.
fn move_bytes(
    handle: *mut c_void,
    asked: &Asked,
    other: impl FnOnce(&Vendor, *mut c_void, &Range) -> Done<usize>,
) -> Done<usize> {
    let d = Driver::open_one()?;
    match &*d.handle(handle)? {
        Handle::Ours(of) => io::transfer(&d, of, asked),
        Handle::Vendor(h) => {
            d.stats.passed_on(if asked.access == Access::Read { "reads" } else { "writes" });
            other(d.vendor()?, h.word(), &h.range(asked.offset, asked.size))
        }
    }
}

fn plain(access: Access, base: *const c_void, size: usize, offset: i64, base_offset: i64) -> Asked {
    Asked {
        access,
        by: By::Call,
        order: Order::Default,
        base: base as u64,
        size,
        offset,
        base_offset,
    }
}

/// Reads, as pread(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileRead(
    handle: *mut c_void,
    base: *mut c_void,
    size: usize,
    offset: i64,
    base_offset: i64,
) -> isize {
    own_call!(read(handle, base, size, offset, base_offset));
    moving(|| {
        move_bytes(
            handle,
            &plain(Access::Read, base, size, offset, base_offset),
            |vendor, h, range| {
                // SAFETY: the program's arguments, with the handle that the library knows.
                vendor.moving(vendor.read, range, |f| unsafe {
                    f(h, base, size, offset, base_offset)
                })
            },
        )
    })
}

/// Writes, as pwrite(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileWrite(
    handle: *mut c_void,
    base: *const c_void,
    size: usize,
    offset: i64,
    base_offset: i64,
) -> isize {
    own_call!(write(handle, base, size, offset, base_offset));
    moving(|| {
        move_bytes(
            handle,
            &plain(Access::Write, base, size, offset, base_offset),
            |vendor, h, range| {
                // SAFETY: the program's arguments, with the handle that the library knows.
                vendor.moving(vendor.write, range, |f| unsafe {
                    f(h, base, size, offset, base_offset)
                })
            },
        )
    })
}

/// Moves pieces one after the other, as preadv(2) and pwritev(2). An error of any piece fails the
/// call.
fn pieces(of: &OurFile, d: &Driver, access: Access, all: &[IoVec], offset: i64) -> Done<usize> {
    let mut done = 0usize;
    for v in all {
        let at = i64::try_from(done).ok().and_then(|n| offset.checked_add(n)).ok_or(BAD)?;
        let asked = Asked { by: By::Vector, ..plain(access, v.base, v.len, at, 0) };
        let n = io::transfer(d, of, &asked)?;
        done += n;
        if n < v.len {
            break;
        }
    }
    Ok(done)
}

unsafe fn vector(
    access: Access,
    handle: *mut c_void,
    iov: *const IoVec,
    n: usize,
    offset: i64,
    flags: c_uint,
) -> isize {
    moving(|| {
        let d = Driver::open_one()?;
        let handle = d.handle(handle)?;
        if flags != 0 || n > libc::UIO_MAXIOV as usize || (iov.is_null() && n > 0) {
            return Err(BAD);
        }
        // SAFETY: as many as the program says, just checked for null.
        let all = if n == 0 { &[][..] } else { unsafe { slice::from_raw_parts(iov, n) } };
        let whole = all.iter().try_fold(0usize, |sum, v| sum.checked_add(v.len)).ok_or(BAD)?;
        match &*handle {
            Handle::Ours(of) => pieces(of, &d, access, all, offset),
            Handle::Vendor(h) => {
                let (vendor, range, h) = (d.vendor()?, h.range(offset, whole), h.word());
                d.stats.passed_on(if access == Access::Read { "reads" } else { "writes" });
                let f = if access == Access::Read { vendor.readv } else { vendor.writev };
                // SAFETY: the program's arguments, with the handle that the library knows.
                vendor.moving(f, &range, |f| unsafe { f(h, iov, n, offset, flags) })
            }
        }
    })
}

/// Reads into several pieces of memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileReadv(
    h: *mut c_void,
    iov: *const IoVec,
    n: usize,
    offset: i64,
    flags: c_uint,
) -> isize {
    own_call!(readv(h, iov, n, offset, flags));
    // SAFETY: the caller's promise.
    unsafe { vector(Access::Read, h, iov, n, offset, flags) }
}

/// Writes several pieces of memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileWritev(
    h: *mut c_void,
    iov: *const IoVec,
    n: usize,
    offset: i64,
    flags: c_uint,
) -> isize {
    own_call!(writev(h, iov, n, offset, flags));
    // SAFETY: the caller's promise.
    unsafe { vector(Access::Write, h, iov, n, offset, flags) }
}

/// Pointers of a call in a stream. Their targets are read when the stream reaches the call.
struct Later {
    base: *mut c_void,
    size: *mut usize,
    offset: *mut i64,
    base_offset: *mut i64,
    bytes: *mut isize,
}

/// A call in the order of its stream: waits for the work that the program queued before it. Work
/// queued later comes after the call.
///
/// # Safety
/// Pointers as cuFile's interface requires.
unsafe fn in_stream(
    access: Access,
    handle: *mut c_void,
    p: &Later,
    stream: *mut c_void,
) -> Done<()> {
    let d = Driver::open_one()?;
    let handle = d.handle(handle)?;
    if p.base.is_null()
        || p.size.is_null()
        || p.offset.is_null()
        || p.base_offset.is_null()
        || p.bytes.is_null()
    {
        return Err(BAD);
    }
    match &*handle {
        Handle::Ours(of) => {
            let cuda = d.cuda(of.home)?;
            // SAFETY: the program's stream.
            if let Err((fault, code)) = unsafe { cuda.wait_for(stream) } {
                say(|| format!("waiting for a stream: {fault}"));
                return Err(match CallError::from(&fault) {
                    recording @ CallError::Op(abi::ASYNC_NOT_SUPPORTED) => recording,
                    _ => CallError::Cuda(code),
                });
            }
            // SAFETY: not null, and the program promises that they point to values.
            let (size, offset, base_offset) =
                unsafe { (p.size.read(), p.offset.read(), p.base_offset.read()) };
            let asked =
                Asked { order: Order::Settled, ..plain(access, p.base, size, offset, base_offset) };
            let n = moving(|| io::transfer(&d, of, &asked));
            // SAFETY: as above.
            unsafe { p.bytes.write(n) };
            Ok(())
        }
        Handle::Vendor(h) => {
            let (vendor, h) = (d.vendor()?, h.word());
            d.stats.passed_on(if access == Access::Read { "reads" } else { "writes" });
            let f = if access == Access::Read { vendor.read_async } else { vendor.write_async };
            // SAFETY: the program's arguments, with the handle that the library knows.
            vendor.control(f, |f| unsafe {
                f(h, p.base, p.size, p.offset, p.base_offset, p.bytes, stream)
            })
        }
    }
}

/// Reads in the order of a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileReadAsync(
    handle: *mut c_void,
    base: *mut c_void,
    size: *mut usize,
    offset: *mut i64,
    base_offset: *mut i64,
    bytes: *mut isize,
    stream: *mut c_void,
) -> Status {
    own_call!(read_async(handle, base, size, offset, base_offset, bytes, stream));
    // SAFETY: the caller's promise.
    control(|| unsafe {
        in_stream(Access::Read, handle, &Later { base, size, offset, base_offset, bytes }, stream)
    })
}

/// Writes in the order of a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileWriteAsync(
    handle: *mut c_void,
    base: *mut c_void,
    size: *mut usize,
    offset: *mut i64,
    base_offset: *mut i64,
    bytes: *mut isize,
    stream: *mut c_void,
) -> Status {
    own_call!(write_async(handle, base, size, offset, base_offset, bytes, stream));
    // SAFETY: the caller's promise.
    control(|| unsafe {
        in_stream(Access::Write, handle, &Later { base, size, offset, base_offset, bytes }, stream)
    })
}

/// All known stream flags.
const STREAM_FLAGS: c_uint = 15;

/// Registers a stream. Our files do not depend on it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileStreamRegister(stream: *mut c_void, flags: c_uint) -> Status {
    own_call!(stream_register(stream, flags));
    control(|| {
        let d = Driver::open_one()?;
        if flags & !STREAM_FLAGS != 0 {
            return Err(BAD);
        }
        if let Some(vendor) = d.vendor_if_open() {
            // SAFETY: the program's stream.
            vendor.control(vendor.stream_register, |f| unsafe { f(stream, flags) })?;
        }
        d.streams.lock().insert(stream as usize, flags);
        Ok(())
    })
}

/// Deregisters a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileStreamDeregister(stream: *mut c_void) -> Status {
    own_call!(stream_deregister(stream));
    control(|| {
        let d = Driver::open_one()?;
        d.streams.lock().remove(&(stream as usize)).ok_or(BAD)?;
        if let Some(vendor) = d.vendor_if_open() {
            // SAFETY: the program's stream, which the real library need not have registered.
            let _ = vendor.control(vendor.stream_deregister, |f| unsafe { f(stream) });
        }
        Ok(())
    })
}

/// Makes a batch for up to `n` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSetUp(batch: *mut *mut c_void, n: c_uint) -> Status {
    own_call!(batch_setup(batch, n));
    control(|| {
        let d = Driver::open_one()?;
        let done = if batch.is_null() || n == 0 || n as usize > d.params.lock().batch() {
            Err(BAD)
        } else {
            Ok(())
        };
        d.stats.control(|b| &mut b.batch_setup_ops, &done);
        done?;
        let id = d.new_id();
        d.batches.write().insert(id, std::sync::Arc::new(Batch::new(n as usize)));
        // SAFETY: the caller's promise.
        unsafe { put(batch, id as *mut c_void) }
    })
}

fn batch_of(d: &Driver, batch: *mut c_void) -> Done<std::sync::Arc<Batch>> {
    d.batches.read().get(&(batch as u64)).cloned().ok_or(BAD)
}

/// Submits entries, all or none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSubmit(
    batch: *mut c_void,
    n: c_uint,
    all: *mut Params,
    flags: c_uint,
) -> Status {
    own_call!(batch_submit(batch, n, all, flags));
    control(|| {
        let (d, begun) = (Driver::open_one()?, Instant::now());
        let submit = || {
            let batch = batch_of(&d, batch)?;
            if n == 0 || all.is_null() || flags != 0 {
                return Err(BAD);
            }
            // SAFETY: as many as the program says, just checked for null.
            batch.submit(*d, unsafe { slice::from_raw_parts(all, n as usize) })
        };
        let done = submit();
        d.stats.submitted(n as usize, begun.elapsed(), &done);
        done
    })
}

/// Reports the entries that have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOGetStatus(
    batch: *mut c_void,
    least: c_uint,
    n: *mut c_uint,
    events: *mut Event,
    timeout: *mut libc::timespec,
) -> Status {
    own_call!(batch_status(batch, least, n, events, timeout));
    control(|| {
        let d = Driver::open_one()?;
        let batch = batch_of(&d, batch)?;
        if n.is_null() || events.is_null() {
            return Err(BAD);
        }
        // SAFETY: the caller's promises.
        let (room, limit) = unsafe { (n.read(), timeout.as_ref()) };
        let limit = limit.map(|t| duration(t.tv_sec, t.tv_nsec).ok_or(BAD)).transpose()?;
        if room == 0 || least > room {
            return Err(BAD);
        }
        let none = Event { cookie: std::ptr::null_mut(), status: 0, ret: 0 };
        // A separate buffer, because the program's memory may be uninitialised. No batch has more
        // entries.
        let mut found = vec![none; (room as usize).min(1 << 16)];
        let told = batch.ended(least as usize, &mut found, limit)?;
        // SAFETY: the program promises space for that many events.
        unsafe {
            std::ptr::copy_nonoverlapping(found.as_ptr(), events, told);
            n.write(told as c_uint);
        }
        Ok(())
    })
}

/// Cancels the entries that have not begun.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOCancel(batch: *mut c_void) -> Status {
    own_call!(batch_cancel(batch));
    control(|| {
        let d = Driver::open_one()?;
        let done = batch_of(&d, batch).and_then(|b| b.cancel());
        d.stats.control(|b| &mut b.batch_cancel_ops, &done);
        done
    })
}

/// Cancels the entries that have not begun, and destroys the batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIODestroy(batch: *mut c_void) {
    own_call!(batch_destroy(batch));
    control(|| {
        let d = Driver::open_one()?;
        let found = d.batches.write().remove(&(batch as u64)).ok_or(BAD);
        let done = found.map(|b| b.destroy(true));
        d.stats.control(|b| &mut b.batch_destroy_ops, &done);
        done
    });
}

/// Sets how much is counted: 0 to 3.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetStatsLevel(level: c_int) -> Status {
    control(|| Driver::get()?.stats.set_level(level))
}

/// How much is counted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsLevel(level: *mut c_int) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { put(level, Driver::get()?.stats.level()) })
}

fn counting(f: impl FnOnce(&Stats)) -> Status {
    control(|| {
        f(&Driver::open_one()?.stats);
        Ok(())
    })
}

/// Starts counting.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsStart() -> Status {
    counting(Stats::start)
}

/// Stops counting.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsStop() -> Status {
    counting(Stats::stop)
}

/// Resets the counters.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileStatsReset() -> Status {
    counting(Stats::reset)
}

/// The counters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL1(to: *mut Level1) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { stats::put(to, &Driver::open_one()?.stats.level3(1)?.detailed.basic) })
}

/// The counters with histograms of sizes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL2(to: *mut Level2) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { stats::put(to, &Driver::open_one()?.stats.level3(2)?.detailed) })
}

/// The counters with histograms of sizes and figures per GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetStatsL3(to: *mut Level3) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { stats::put(to, &Driver::open_one()?.stats.level3(3)?) })
}

/// The value of a parameter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterSizeT(n: c_int, value: *mut usize) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { put(value, Driver::get()?.params.lock().size(n)?) })
}

/// The value of a parameter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterBool(n: c_int, value: *mut bool) -> Status {
    // SAFETY: the caller's promise.
    control(|| unsafe { put(value, Driver::get()?.params.lock().bool(n)?) })
}

/// The value of a parameter, as a string that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterString(n: c_int, to: *mut c_char, len: c_int) -> Status {
    control(|| {
        let text = Driver::get()?.params.lock().string(n)?;
        let text = text.as_bytes_with_nul();
        if to.is_null() || usize::try_from(len).map_or(true, |room| room < text.len()) {
            return Err(BAD);
        }
        // SAFETY: the program promises the space, and the length was just checked.
        unsafe { std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len()) };
        Ok(())
    })
}

/// The smallest and largest value of a parameter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterMinMaxValue(
    n: c_int,
    least: *mut usize,
    most: *mut usize,
) -> Status {
    control(|| {
        let (a, b) = Driver::get()?.params.lock().bounds(n)?;
        if most.is_null() {
            return Err(BAD);
        }
        // SAFETY: the caller's promise.
        unsafe { put(least, a).and_then(|()| put(most, b)) }
    })
}

/// The driver, while parameters may be set.
fn before() -> Done<&'static Driver> {
    let d = Driver::get()?;
    if d.uses() > 0 { Err(CallError::Op(abi::DRIVER_ALREADY_OPEN)) } else { Ok(d) }
}

/// Sets a parameter.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetParameterSizeT(n: c_int, value: usize) -> Status {
    own_call!(set_size(n, value));
    control(|| before()?.params.lock().set_size(n, value))
}

/// Sets a parameter.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileSetParameterBool(n: c_int, value: u8) -> Status {
    own_call!(set_bool(n, value));
    control(|| before()?.params.lock().set_bool(n, value != 0))
}

/// Sets a parameter.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterString(n: c_int, value: *const c_char) -> Status {
    own_call!(set_string(n, value));
    control(|| {
        if value.is_null() {
            return Err(BAD);
        }
        // SAFETY: the program promises a string that ends with a zero.
        let value: CString = unsafe { CStr::from_ptr(value) }.into();
        before()?.params.lock().set_string(n, value)
    })
}

unsafe fn set_slabs(pool: usize, sizes: *const usize, counts: *const usize, len: c_int) -> Status {
    control(|| {
        let Some(n) =
            usize::try_from(len).ok().filter(|n| *n > 0 && !sizes.is_null() && !counts.is_null())
        else {
            return Err(BAD);
        };
        // SAFETY: as many as the program says, just checked for null.
        let (sizes, counts) =
            unsafe { (slice::from_raw_parts(sizes, n), slice::from_raw_parts(counts, n)) };
        before()?.params.lock().set_slabs(pool, sizes, counts)
    })
}

unsafe fn get_slabs(pool: usize, sizes: *mut usize, counts: *mut usize, len: c_int) -> Status {
    control(|| {
        let params = Driver::get()?.params.lock();
        let (s, c) = params.slabs(pool).ok_or(BAD)?;
        if sizes.is_null() || counts.is_null() || usize::try_from(len) != Ok(s.len()) {
            return Err(BAD);
        }
        // SAFETY: as many as the program says.
        unsafe {
            std::ptr::copy_nonoverlapping(s.as_ptr(), sizes, s.len());
            std::ptr::copy_nonoverlapping(c.as_ptr(), counts, c.len());
        }
        Ok(())
    })
}

/// Keeps the values for the real library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterPosixPoolSlabArray(
    s: *const usize,
    c: *const usize,
    n: c_int,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { set_slabs(0, s, c, n) }
}

/// The values that were set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterPosixPoolSlabArray(
    s: *mut usize,
    c: *mut usize,
    n: c_int,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { get_slabs(0, s, c, n) }
}

/// Keeps the values for the real library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileSetParameterGpuBounceBufferSlabArray(
    s: *const usize,
    c: *const usize,
    n: c_int,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { set_slabs(1, s, c, n) }
}

/// The values that were set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetParameterGpuBounceBufferSlabArray(
    s: *mut usize,
    c: *mut usize,
    n: c_int,
) -> Status {
    // SAFETY: the caller's promise.
    unsafe { get_slabs(1, s, c, n) }
}

/// A call that does not concern files: the real library answers it, if there is one.
fn ask_vendor<F: Copy>(
    f: impl FnOnce(&Vendor) -> Option<F>,
    call: impl FnOnce(F) -> Status,
) -> Status {
    control(|| {
        Driver::open_one()?;
        let vendor = Vendor::get().map_err(|_| CallError::Op(abi::PLATFORM_NOT_SUPPORTED))?;
        vendor.control(f(vendor), call)
    })
}

/// Returns the real library's answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileGetBARSizeInKB(gpu: c_int, size: *mut usize) -> Status {
    own_call!(bar_size(gpu, size));
    // SAFETY: the program's arguments.
    ask_vendor(|r| r.bar_size, |f| unsafe { f(gpu, size) })
}

/// Returns the real library's answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileExportPCIeTopology(file: *const c_char) -> Status {
    own_call!(topology(file));
    // SAFETY: the program's arguments.
    ask_vendor(|r| r.topology, |f| unsafe { f(file) })
}

/// Returns the real library's answer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileDriverGetP2PFlags(of: c_int, flags: *mut c_int) -> Status {
    own_call!(get_p2p(of, flags));
    // SAFETY: the program's arguments.
    ask_vendor(|r| r.get_p2p, |f| unsafe { f(of, flags) })
}

/// Returns the real library's answer.
#[unsafe(no_mangle)]
pub extern "C" fn cuFileDriverSetP2PFlags(of: c_int, flags: c_int) -> Status {
    own_call!(set_p2p(of, flags));
    // SAFETY: the program's arguments.
    ask_vendor(|r| r.set_p2p, |f| unsafe { f(of, flags) })
}
