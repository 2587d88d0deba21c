//! Reads and writes, at once and in the order of a stream.

use std::{
    ffi::{c_uint, c_void},
    slice,
};

use super::BAD;
use crate::{
    abi::{self, IoVec, Status},
    driver::{Driver, Handle, OurFile},
    errors::{CallError, Done, control, moving, say},
    io::{self, Asked, Order},
    stats::{Access, By},
    vendor::{Range, Vendor},
};

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
