//! The functions of the interface. Unless a comment says otherwise, pointers must be as cuFile's
//! interface requires.
//!
//! Here: the driver, and what only the real library can answer. `registrations.rs` has files,
//! memory and streams, `transfers.rs` reads and writes, `batches.rs`, `stats.rs` and `params.rs`
//! what their names say.
#![allow(non_snake_case, reason = "the interface's names")]
#![allow(clippy::missing_safety_doc, reason = "the interface's: see above")]

use std::ffi::{c_char, c_int, c_long};

use crate::{
    abi::{self, Status},
    driver::{Driver, real},
    errors::{CallError, Done, control},
    set,
    vendor::Vendor,
};

/// Passes a call back that the real library makes to its own function.
macro_rules! own_call {
    ($field:ident($($arg:expr),*)) => {
        if let Some(f) = crate::vendor::inside().and_then(|r| r.$field) {
            // SAFETY: the real library's own arguments.
            return unsafe { f($($arg),*) };
        }
    };
}

mod batches;
mod params;
mod registrations;
mod stats;
mod transfers;

const BAD: CallError = CallError::Op(abi::INVALID_VALUE);

unsafe fn put<T>(to: *mut T, value: T) -> Done<()> {
    if to.is_null() {
        return Err(BAD);
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Marks this library, so that it can recognise itself.
#[unsafe(no_mangle)]
pub extern "C" fn strake_cufile() -> c_int {
    1
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

/// A call that does not concern files: the real library answers it, if there is one.
fn ask_vendor<F: Copy>(
    f: impl FnOnce(&Vendor) -> Option<F>,
    call: impl FnOnce(F) -> Status,
) -> Status {
    control(|| {
        Driver::open_one()?;
        let vendor = real().map_err(|_| CallError::Op(abi::PLATFORM_NOT_SUPPORTED))?;
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
