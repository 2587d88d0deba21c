//! Export of the device's memory as dma-buf, for network cards that access it directly.

use std::{
    ffi::{c_int, c_ulonglong, c_void},
    os::fd::{FromRawFd, OwnedFd},
    path::Path,
};

use strake_fabric::Foreign;

use super::{Gpu, table::find};
use crate::{Tier, Unavailable, fault::Fault};

// CUdevice_attribute.
const DMA_BUF_SUPPORTED: c_int = 124;
const FLUSH_OPTIONS: c_int = 117;
const WRITES_ORDERING: c_int = 118;
/// CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: the device sees writes of others without a flush.
const ORDERED: c_int = 100;
/// CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: cuFlushGPUDirectRDMAWrites works.
const BY_HOST: c_int = 1;
/// CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD.
const DMA_BUF_FD: c_int = 1;
/// CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, and ..._TO_OWNER.
const CURRENT_CONTEXT: c_int = 0;
const TO_OWNER: c_int = 100;

const EXPORT: &str = "cuMemGetHandleForAddressRange";
const FLUSH: &str = "cuFlushGPUDirectRDMAWrites";

type ExportRange = unsafe extern "C" fn(*mut c_void, u64, usize, c_int, c_ulonglong) -> c_int;
type FlushWrites = unsafe extern "C" fn(c_int, c_int) -> c_int;

/// Export functions of a device and its driver. A driver without them still works for everything
/// else.
pub struct Export {
    library: String,
    dma_buf: bool,
    export: Option<ExportRange>,
    flush: Option<FlushWrites>,
    ordering: c_int,
    flush_options: c_int,
}

impl Export {
    /// `attribute`: reads an attribute of the device; 0 where the driver does not know it.
    pub fn of(library: &Path, attribute: impl Fn(c_int) -> c_int) -> Export {
        // SAFETY: functions of these names have these types in the driver's API.
        let (export, flush) = unsafe {
            let export: Option<ExportRange> = find(library, c"cuMemGetHandleForAddressRange");
            let flush: Option<FlushWrites> = find(library, c"cuFlushGPUDirectRDMAWrites");
            (export, flush)
        };
        Export {
            library: library.display().to_string(),
            dma_buf: attribute(DMA_BUF_SUPPORTED) == 1,
            export,
            flush,
            ordering: attribute(WRITES_ORDERING),
            flush_options: attribute(FLUSH_OPTIONS),
        }
    }

    fn is_ordered(&self) -> bool {
        self.ordering >= ORDERED
    }

    /// Why the device cannot be used for this tier.
    pub fn refuses(&self, tier: Tier, device: &str) -> Option<Unavailable> {
        if tier != Tier::GpuRdma {
            return None;
        }
        let old = |symbol: &str| Unavailable::OldLibrary {
            library: self.library.clone(),
            symbol: symbol.into(),
        };
        match self {
            e if !e.dma_buf => Some(Unavailable::NoDmaBuf { device: device.into() }),
            e if e.export.is_none() => Some(old(EXPORT)),
            e if e.is_ordered() => None,
            e if e.flush_options & BY_HOST == 0 => {
                Some(Unavailable::NoFlush { device: device.into() })
            }
            e if e.flush.is_none() => Some(old(FLUSH)),
            _ => None,
        }
    }
}

impl Gpu {
    /// Exports the whole pages around a range; only the range is lent.
    pub fn export_range(&self, addr: u64, len: u64) -> Result<Foreign, Fault> {
        let refused = |why: String| Fault::Export { bytes: len, why };
        let export =
            self.export.export.ok_or_else(|| refused(format!("the driver has no {EXPORT}")))?;
        // SAFETY: a plain question.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as u64;
        let (start, end) = (addr - addr % page, (addr + len).next_multiple_of(page));
        let _current = self.enter()?;
        let mut fd: c_int = -1;
        // SAFETY: the handle of this type is one descriptor, which is written there; the driver
        // refuses ranges that it does not know.
        let code =
            unsafe { export((&raw mut fd).cast(), start, (end - start) as usize, DMA_BUF_FD, 0) };
        self.table.call(EXPORT, code).map_err(|e| match e {
            Fault::Driver { .. } => refused(e.to_string()),
            e => e,
        })?;
        if fd < 0 {
            return Err(refused(format!("{EXPORT} gave no descriptor")));
        }
        // SAFETY: just opened for this caller, who is its only owner.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Foreign::dma_buf(fd, addr - start, addr, len))
    }

    /// Makes the device see writes of others, where it does not do so by itself.
    pub fn flush_writes(&self) -> Result<(), Fault> {
        let Some(flush) = self.export.flush.filter(|_| !self.export.is_ordered()) else {
            return Ok(());
        };
        let _current = self.enter()?;
        // SAFETY: it touches no memory of this process.
        self.table.call(FLUSH, unsafe { flush(CURRENT_CONTEXT, TO_OWNER) })
    }
}

/// Device attributes are requested by number.
pub fn attribute_of(
    ask: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int,
    device: c_int,
) -> impl Fn(c_int) -> c_int {
    move |attribute| {
        let mut value = 0;
        // SAFETY: writes one value, which lives through the call.
        if unsafe { ask(&mut value, attribute, device) } == 0 { value } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn export(
        _: *mut c_void,
        _: u64,
        _: usize,
        _: c_int,
        _: c_ulonglong,
    ) -> c_int {
        0
    }

    unsafe extern "C" fn flush(_: c_int, _: c_int) -> c_int {
        0
    }

    #[test]
    fn what_a_device_lacks_is_told_by_name() {
        let all = |dma_buf, ordering, flush_options, old: bool, no_flush: bool| Export {
            library: "libcuda.so.1".into(),
            dma_buf,
            export: (!old).then_some(export as ExportRange),
            flush: (!no_flush).then_some(flush as FlushWrites),
            ordering,
            flush_options,
        };
        let of = |e: Export| e.refuses(Tier::GpuRdma, "A GPU").map(|u| u.kind());
        assert_eq!(of(all(true, 100, 0, false, true)), None, "ordered: nothing is to be flushed");
        assert_eq!(of(all(true, 0, 1, false, false)), None);
        assert_eq!(of(all(false, 100, 1, false, false)), Some("no-dma-buf"));
        assert_eq!(of(all(true, 100, 1, true, false)), Some("old-library"));
        assert_eq!(of(all(true, 0, 2, false, false)), Some("no-flush"));
        assert_eq!(of(all(true, 0, 1, false, true)), Some("old-library"));
        assert!(all(false, 0, 0, true, true).refuses(Tier::BounceTcp, "A GPU").is_none());
    }
}
