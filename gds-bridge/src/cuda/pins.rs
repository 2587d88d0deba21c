//! State that the devices of one driver share in a process, and their PCI addresses.

use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_int},
    path::{Path, PathBuf},
    process, ptr,
    sync::{
        Arc,
        atomic::{AtomicPtr, Ordering},
    },
};

use parking_lot::Mutex;

use super::table::find;
use crate::pins::Registry;

/// The registries of a process, by the driver's library file.
struct Registries {
    pid: u32,
    all: Mutex<HashMap<PathBuf, Arc<Registry>>>,
}

static OURS: AtomicPtr<Registries> = AtomicPtr::new(ptr::null_mut());

/// The registries of this process. A child after fork(2) has its own: what its parent registered is
/// not registered there, and locks held by a thread of the parent would stay locked.
fn ours() -> &'static Registries {
    let pid = process::id();
    loop {
        let known = OURS.load(Ordering::Acquire);
        // SAFETY: null, or leaked below and never changed again but behind its lock.
        if let Some(r) = unsafe { known.as_ref() }
            && r.pid == pid
        {
            return r;
        }
        let new = Box::into_raw(Box::new(Registries { pid, all: Mutex::default() }));
        if OURS.compare_exchange(known, new, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: made above, and nobody else has seen it.
            drop(unsafe { Box::from_raw(new) });
        }
    }
}

/// The registry of this driver library.
pub fn registry_of(library: &Path) -> Arc<Registry> {
    ours().all.lock().entry(library.to_owned()).or_default().clone()
}

/// The PCI address of a device, as sysfs writes it.
pub fn pci_of(library: &Path, device: c_int) -> Result<String, String> {
    const SYMBOL: &CStr = c"cuDeviceGetPCIBusId";
    type Ask = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    // SAFETY: the function of this name has this type in the driver's API.
    let ask: Ask = unsafe { find(library, SYMBOL) }
        .ok_or("the driver library has no function cuDeviceGetPCIBusId")?;
    let mut text: [c_char; 32] = [0; 32];
    // SAFETY: the length is given, and the last byte stays a zero.
    match unsafe { ask(text.as_mut_ptr(), 31, device) } {
        // SAFETY: it ends with a zero.
        0 => Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().to_ascii_lowercase()),
        code => Err(format!("cuDeviceGetPCIBusId failed with {code}")),
    }
}
