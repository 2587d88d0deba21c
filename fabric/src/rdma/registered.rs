//! A registration: memory that a device may reach for as long as this value lives.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use super::{
    locked::Locked,
    verbs::{Lib, Mr},
};

/// Memory that the device may reach.
pub struct Registered {
    pub lib: &'static Lib,
    pub mr: *mut Mr,
    /// `None`: it is not memory of this process.
    pub _locked: Option<Locked>,
    /// Set when the key cannot be invalidated, for memory that peers reach by this registration's
    /// own key. `None`: it is for local use, and peers can do nothing with its key.
    pub open: Option<Arc<AtomicBool>>,
}

// SAFETY: the libraries' objects may be used by any thread.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    pub fn lkey(&self) -> u32 {
        // SAFETY: a registration is valid until it is dropped.
        unsafe { (*self.mr).lkey }
    }

    /// The key of memory that was registered with remote rights of its own.
    pub fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.mr).rkey }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: made by `ibv_reg_mr` or `ibv_reg_dmabuf_mr`, and this is its only owner.
        let rc = unsafe { (self.lib.ibv_dereg_mr)(self.mr) };
        if rc != 0 {
            tracing::error!("memory stays registered: {}", std::io::Error::from_raw_os_error(rc));
            if let Some(spoilt) = &self.open {
                spoilt.store(true, SeqCst);
            }
        }
    }
}
