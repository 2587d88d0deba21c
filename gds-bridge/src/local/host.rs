//! Reads of copies on this node into host memory, where cuFile would read into a device's.

use std::{
    os::fd::{AsRawFd, BorrowedFd, RawFd},
    ptr,
};

use parking_lot::Mutex;
use strake_fabric::BufMut;

use super::{
    cufile::{Counters, CuFile},
    rounds::Rounds,
};
use crate::{HostMem, fault::Fault, mem::GpuMem};

/// The code of cuFile for an address that is none of the device's.
const WRONG_ADDRESS: isize = -5012;

/// Reads by pread(2). It counts as cuFile does.
pub struct HostCuFile {
    memory: HostMem,
    rounds: Rounds,
    counters: Mutex<Counters>,
}

impl HostCuFile {
    pub fn new(memory: HostMem) -> HostCuFile {
        HostCuFile { memory, rounds: Rounds::default(), counters: Mutex::default() }
    }
}

impl CuFile for HostCuFile {
    fn register(&self, file: BorrowedFd<'_>) -> Result<u64, Fault> {
        Ok(file.as_raw_fd() as u64)
    }

    fn deregister(&self, _handle: u64) {}

    fn read(&self, handle: u64, to: u64, len: usize, offset: u64) -> isize {
        // In place as long as it is held, also if the program frees it meanwhile.
        let Ok(held) = self.memory.export(to, len as u64) else { return WRONG_ADDRESS };
        // Aligned, as reads of files that were opened with O_DIRECT must be.
        let mut bytes = BufMut::unpooled(len);
        // SAFETY: the file is open as long as it is registered, and the buffer has `len` bytes.
        let n = unsafe {
            libc::pread(handle as RawFd, bytes.as_mut_ptr().cast(), len, offset as libc::off_t)
        };
        // As of cuFile: -1, and the reason in errno.
        let Ok(moved) = usize::try_from(n) else { return n };
        let to: *mut u8 = ptr::with_exposed_provenance_mut(held.addr() as usize);
        // SAFETY: `len` bytes are held there. The program uses none of them during a call that
        // moves them.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), moved) };
        let mut c = self.counters.lock();
        (c.straight, c.bytes) = (c.straight + 1, c.bytes + moved as u64);
        n
    }

    fn rounds(&self) -> &Rounds {
        &self.rounds
    }

    fn counters(&self) -> Result<Counters, Fault> {
        Ok(*self.counters.lock())
    }
}
