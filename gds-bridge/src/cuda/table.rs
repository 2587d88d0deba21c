//! The parts of the driver library that are used: our own declarations, opened at run time.
//!
//! Names and types are those of CUDA's driver API, whose symbols never change their meaning: a
//! changed function gets a new name with a version suffix. Results are plain numbers here, because
//! a driver may return one that is in no list of today.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    path::Path,
};

use crate::{Unavailable, local::library::Library};

/// An opaque context, stream or event.
pub type Handle = *mut c_void;

macro_rules! functions {
    ($($field:ident = $symbol:literal($($arg:ty),*);)*) => {
        /// The driver's functions.
        pub struct Table {
            $(pub $field: unsafe extern "C" fn($($arg),*) -> c_int,)*
        }

        impl Table {
            /// Opens the library and looks up all functions. It stays open until the process ends.
            pub fn open(library: &Path) -> Result<Table, Unavailable> {
                let name = library.display().to_string();
                let opened = Library::load(library)
                    .map_err(|why| Unavailable::NoLibrary { library: name.clone(), why })?;
                let missing = |symbol: &CStr| Unavailable::OldLibrary {
                    library: name.clone(),
                    symbol: symbol.to_string_lossy().into_owned(),
                };
                Ok(Table {
                    // SAFETY: the symbol is a function of the driver's API of this very type.
                    $($field: unsafe { opened.function($symbol) }.ok_or_else(|| missing($symbol))?,)*
                })
            }
        }
    };
}

functions! {
    init = c"cuInit"(c_uint);
    device_count = c"cuDeviceGetCount"(*mut c_int);
    device = c"cuDeviceGet"(*mut c_int, c_int);
    device_name = c"cuDeviceGetName"(*mut c_char, c_int, c_int);
    device_attribute = c"cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
    context_retain = c"cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
    device_uuid = c"cuDeviceGetUuid"(*mut [u8; 16], c_int);
    context_device = c"cuCtxGetDevice"(*mut c_int);
    context_release = c"cuDevicePrimaryCtxRelease_v2"(c_int);
    context_set = c"cuCtxSetCurrent"(Handle);
    context_push = c"cuCtxPushCurrent_v2"(Handle);
    context_pop = c"cuCtxPopCurrent_v2"(*mut Handle);
    context_wait = c"cuCtxSynchronize"();
    pointer_attributes = c"cuPointerGetAttributes"(c_uint, *const c_int, *const *mut c_void, u64);
    alloc = c"cuMemAlloc_v2"(*mut u64, usize);
    free = c"cuMemFree_v2"(u64);
    host_register = c"cuMemHostRegister_v2"(*mut c_void, usize, c_uint);
    host_unregister = c"cuMemHostUnregister"(*mut c_void);
    stream_create = c"cuStreamCreate"(*mut Handle, c_uint);
    stream_destroy = c"cuStreamDestroy_v2"(Handle);
    stream_wait = c"cuStreamSynchronize"(Handle);
    stream_capturing = c"cuStreamIsCapturing"(Handle, *mut c_int);
    to_device = c"cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, Handle);
    to_host = c"cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, Handle);
    event_create = c"cuEventCreate"(*mut Handle, c_uint);
    event_destroy = c"cuEventDestroy_v2"(Handle);
    event_record = c"cuEventRecord"(Handle, Handle);
    event_wait = c"cuEventSynchronize"(Handle);
    module_load = c"cuModuleLoadData"(*mut Handle, *const c_void);
    module_unload = c"cuModuleUnload"(Handle);
    module_function = c"cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
    launch = c"cuLaunchKernel"(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
    error_name = c"cuGetErrorName"(c_int, *mut *const c_char);
}

/// Looks up a function that only newer drivers have.
///
/// # Safety
/// `F` is the type of the function of this name.
pub unsafe fn find<F: Copy>(library: &Path, symbol: &CStr) -> Option<F> {
    // SAFETY: the caller's promise.
    Library::load(library).ok().and_then(|l| unsafe { l.function(symbol) })
}
