//! Properties of the driver, and parameters.

use std::{
    ffi::{CStr, CString, c_char, c_int, c_uint},
    slice,
};

use super::{BAD, put};
use crate::{
    abi::{self, Properties, Status},
    driver::Driver,
    errors::{CallError, Done, control},
};

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
