//! What self-tests need: memory of the device, and patterns.

use std::sync::Arc;

use strake_fabric::{Buf, BufMut};
use strake_proto::layout::splitmix64;

use crate::{GpuMem, fault::Fault};

/// Memory of the device that is freed at the end.
pub struct Scratch {
    device: Arc<dyn GpuMem>,
    pub addr: u64,
}

impl Scratch {
    /// `len` bytes.
    pub fn new(device: &Arc<dyn GpuMem>, len: u64) -> Result<Scratch, Fault> {
        let addr = device.alloc(len)?;
        Ok(Scratch { device: device.clone(), addr })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(e) = self.device.free(self.addr) {
            tracing::debug!("memory of a self-test was not freed: {e}");
        }
    }
}

/// Fills a buffer with numbers that follow from `seed`, which changes.
pub fn pattern(mut b: BufMut, seed: &mut u64) -> Buf {
    for word in b.chunks_exact_mut(8) {
        word.copy_from_slice(&splitmix64(seed).to_le_bytes());
    }
    b.freeze()
}
