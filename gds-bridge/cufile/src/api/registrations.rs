//! Registration of files, memory and streams.

use std::ffi::{c_int, c_uint, c_void};

use super::{BAD, put};
use crate::{
    abi::{self, Descriptor, Status},
    driver::Driver,
    errors::{CallError, Done, control},
};

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
