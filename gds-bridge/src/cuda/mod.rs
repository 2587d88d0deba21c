//! Memory of an NVIDIA GPU, through the driver library, which is opened at run time.

mod export;
mod pins;
mod sums;
mod table;

use std::{
    collections::VecDeque,
    ffi::{CStr, c_char, c_int, c_void},
    fmt,
    path::Path,
    ptr,
    sync::{Arc, OnceLock},
};

use export::Export;
use strake_fabric::Foreign;
use sums::{Kernel, Sums};
use table::{Handle, Table};

use crate::{
    Tier, Unavailable,
    fault::Fault,
    local::{CuFile, Nvidia},
    mem::{Before, GpuMem, Mark, Stream},
    pins::Registry,
};

/// The driver's library, which is part of the kernel driver and not of the toolkit.
const LIBRARY: &str = "libcuda.so.1";

// CUresult.
const OUT_OF_MEMORY: c_int = 2;
const DEINITIALIZED: c_int = 4;
const NO_DEVICE: c_int = 100;
const INVALID_CONTEXT: c_int = 201;
const CONTEXT_IS_DESTROYED: c_int = 709;
// CUpointer_attribute.
const CONTEXT: c_int = 1;
const MEMORY_TYPE: c_int = 2;
const DEVICE_ORDINAL: c_int = 9;
const RANGE_START: c_int = 11;
const RANGE_SIZE: c_int = 12;
/// CU_MEMORYTYPE_DEVICE.
const DEVICE_MEMORY: u32 = 2;
/// CU_MEMHOSTREGISTER_PORTABLE: pinned for every context.
const PORTABLE: u32 = 1;
/// CU_STREAM_NON_BLOCKING: does not wait for the default stream.
const NON_BLOCKING: u32 = 1;
/// CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED.
const CAPTURE_UNSUPPORTED: c_int = 900;
/// CU_EVENT_DISABLE_TIMING, and CU_EVENT_BLOCKING_SYNC: a waiting thread sleeps.
const QUIET_EVENT: u32 = 2 | 1;

/// Waits for a stream of the program, unless it records a graph: waiting would end the recording.
///
/// # Safety
/// The stream is one of the process, and was not destroyed.
unsafe fn wait(table: &Table, stream: *mut c_void) -> c_int {
    let mut recording = 0;
    // SAFETY: writes one number; of the stream the caller's promise.
    match unsafe { (table.stream_capturing)(stream, &mut recording) } {
        0 if recording != 0 => CAPTURE_UNSUPPORTED,
        // SAFETY: the caller's promise.
        0 => unsafe { (table.stream_wait)(stream) },
        code => code,
    }
}

/// One GPU, in its primary context: the one that PyTorch and everything that uses the CUDA runtime
/// use. Clones are the same.
#[derive(Clone)]
pub struct Cuda(Arc<Gpu>);

struct Gpu {
    table: Table,
    device: c_int,
    context: Handle,
    name: String,
    export: Export,
    registry: Arc<Registry>,
    pci: Result<String, String>,
    /// The kernel that computes checksums, or why there is none; loaded at first use.
    kernel: OnceLock<Result<Kernel, String>>,
}

// SAFETY: the driver's functions may be called by any thread, and the context is only handed back
// to them.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// The driver's information about an address.
struct Place {
    context: Handle,
    memory: u32,
    device: c_int,
    start: u64,
    size: u64,
}

impl Cuda {
    /// Opens a device by its number among those that the driver shows to this process.
    pub fn open(device: u32) -> Result<Cuda, Unavailable> {
        Cuda::open_library(Path::new(LIBRARY), device)
    }

    /// The number of the device whose context the calling thread has; 0 if it has none. May be the
    /// first call to the driver in this process.
    pub fn of_thread() -> Result<u32, Unavailable> {
        let table = Table::open(Path::new(LIBRARY))?;
        table.start(0)?;
        let mut found = 0;
        // SAFETY: each call writes one value, which lives through it.
        unsafe { table.call("cuDeviceGetCount", (table.device_count)(&mut found)) }
            .map_err(Unavailable::Device)?;
        if found < 1 {
            return Err(Unavailable::NoDevice { wanted: 0, found: 0 });
        }
        let mut device = 0;
        // SAFETY: as above.
        let code = unsafe { (table.context_device)(&mut device) };
        Ok(if code == 0 { u32::try_from(device).unwrap_or(0) } else { 0 })
    }

    /// The device on which an address lies, by the number of [`Cuda::open`]. `None`: on none that
    /// the driver knows, so it may be host memory or invalid.
    pub fn device_of(&self, addr: u64) -> Result<Option<u32>, Fault> {
        let _current = self.0.enter()?;
        let p = self.0.place(addr)?;
        Ok(if p.memory == DEVICE_MEMORY { u32::try_from(p.device).ok() } else { None })
    }

    /// The device's UUID.
    pub fn uuid(&self) -> Result<[u8; 16], Fault> {
        let mut uuid = [0; 16];
        // SAFETY: writes sixteen bytes.
        self.0.table.call("cuDeviceGetUuid", unsafe {
            (self.0.table.device_uuid)(&mut uuid, self.0.device)
        })?;
        Ok(uuid)
    }

    /// Returns when everything is done that the program gave to one of its streams before. Null is
    /// the default stream: of the calling thread's context, or of the device's primary context if
    /// the thread has none. An error is of the wait or of the work waited for; the number is the
    /// driver's.
    ///
    /// # Safety
    /// The stream is one of the process, and was not destroyed.
    pub unsafe fn wait_for(&self, stream: *mut c_void) -> Result<(), (Fault, i32)> {
        let table = &self.0.table;
        // SAFETY: the caller's promise.
        let mut code = unsafe { wait(table, stream) };
        if code == INVALID_CONTEXT
            && let Ok(_current) = self.0.enter()
        {
            // SAFETY: as above.
            code = unsafe { wait(table, stream) };
        }
        table.call("cuStreamSynchronize", code).map_err(|f| (f, code))
    }

    /// As [`Cuda::wait_for`], for the default stream of the device's primary context.
    pub fn wait_for_default(&self) -> Result<(), Fault> {
        let _current = self.0.enter()?;
        // SAFETY: null is the default stream.
        let code = unsafe { wait(&self.0.table, ptr::null_mut()) };
        self.0.table.call("cuStreamSynchronize", code)
    }

    /// As [`Cuda::open`], with a file other than `libcuda.so.1`.
    pub fn open_library(library: &Path, device: u32) -> Result<Cuda, Unavailable> {
        let table = Table::open(library)?;
        let none =
            |found: c_int| Unavailable::NoDevice { wanted: device, found: found.max(0) as u32 };
        table.start(device)?;
        let failed = Unavailable::Device;
        let mut found = 0;
        // SAFETY: each call writes one value, which lives through it.
        unsafe { table.call("cuDeviceGetCount", (table.device_count)(&mut found)) }
            .map_err(failed)?;
        let wanted =
            c_int::try_from(device).ok().filter(|n| *n < found).ok_or_else(|| none(found))?;
        let (mut number, mut context) = (0, ptr::null_mut());
        let mut name: [c_char; 128] = [0; 128];
        // SAFETY: as above; the name's length is given, and the driver ends it with a zero.
        unsafe {
            table.call("cuDeviceGet", (table.device)(&mut number, wanted)).map_err(failed)?;
            table
                .call("cuDeviceGetName", (table.device_name)(name.as_mut_ptr(), 127, number))
                .map_err(failed)?;
            table
                .call("cuDevicePrimaryCtxRetain", (table.context_retain)(&mut context, number))
                .map_err(failed)?;
        }
        // SAFETY: the last byte was never written.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let name = format!("{name} (device {device})");
        let kernel = OnceLock::new();
        // An older driver does not know these attributes, and cannot export memory.
        let export = Export::of(library, export::attribute_of(table.device_attribute, number));
        let (registry, pci) = (pins::registry_of(library), pins::pci_of(library, number));
        Ok(Cuda(Arc::new(Gpu {
            table,
            device: number,
            context,
            name,
            export,
            registry,
            pci,
            kernel,
        })))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if let Some(Ok(kernel)) = self.kernel.take()
            && let Ok(_current) = self.enter()
        {
            self.unload(&kernel);
        }
        // SAFETY: retained once, by `open`.
        unsafe { (self.table.context_release)(self.device) };
    }
}

impl Table {
    /// Initializes the driver; harmless if it was done before.
    fn start(&self, wanted: u32) -> Result<(), Unavailable> {
        // SAFETY: the flags of cuInit are 0.
        match unsafe { (self.init)(0) } {
            0 => Ok(()),
            NO_DEVICE => Err(Unavailable::NoDevice { wanted, found: 0 }),
            code => Err(Unavailable::Device(self.fault("cuInit", code))),
        }
    }

    fn fault(&self, call: &'static str, code: c_int) -> Fault {
        let mut name = ptr::null();
        // SAFETY: writes one pointer, to a constant string or null.
        let known = unsafe { (self.error_name)(code, &mut name) } == 0 && !name.is_null();
        let name = if known {
            // SAFETY: just checked.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "an error for which this driver has no name".into()
        };
        Fault::Driver { call, code, name }
    }

    fn call(&self, call: &'static str, code: c_int) -> Result<(), Fault> {
        match code {
            0 => Ok(()),
            DEINITIALIZED | INVALID_CONTEXT | CONTEXT_IS_DESTROYED => Err(Fault::ContextGone),
            code => Err(self.fault(call, code)),
        }
    }
}

/// Makes the device's context current on this thread until dropped.
struct Current<'a>(&'a Gpu);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut ours = ptr::null_mut();
        // SAFETY: writes one pointer.
        unsafe { (self.0.table.context_pop)(&mut ours) };
    }
}

impl Gpu {
    fn enter(&self) -> Result<Current<'_>, Fault> {
        // SAFETY: the context was retained.
        self.table.call("cuCtxPushCurrent", unsafe { (self.table.context_push)(self.context) })?;
        Ok(Current(self))
    }

    fn kernel(&self) -> Result<&Kernel, String> {
        let load = || {
            let _current = self.enter().map_err(|e| e.to_string())?;
            let kernel = self
                .load_kernel()
                .map_err(|e| format!("the driver does not accept the checksum kernel: {e}"))?;
            match self.try_kernel(&kernel) {
                Ok(()) => Ok(kernel),
                Err(why) => {
                    self.unload(&kernel);
                    Err(why)
                }
            }
        };
        self.kernel.get_or_init(load).as_ref().map_err(Clone::clone)
    }

    fn place(&self, addr: u64) -> Result<Place, Fault> {
        let mut p = Place { context: ptr::null_mut(), memory: 0, device: -1, start: 0, size: 0 };
        let asked = [CONTEXT, MEMORY_TYPE, DEVICE_ORDINAL, RANGE_START, RANGE_SIZE];
        let to: [*mut c_void; 5] = [
            (&raw mut p.context).cast(),
            (&raw mut p.memory).cast(),
            (&raw mut p.device).cast(),
            (&raw mut p.start).cast(),
            (&raw mut p.size).cast(),
        ];
        // SAFETY: as many attributes as places, each of the size that its attribute has on 64-bit
        // machines.
        let code = unsafe { (self.table.pointer_attributes)(5, asked.as_ptr(), to.as_ptr(), addr) };
        self.table.call("cuPointerGetAttributes", code)?;
        Ok(p)
    }
}

/// An event recorded after what a stream of the program had been given.
struct Noted {
    gpu: Arc<Gpu>,
    event: Handle,
}

// SAFETY: an event may be waited for and destroyed by any thread.
unsafe impl Send for Noted {}

impl Before for Noted {
    fn wait(self: Box<Self>) -> Result<(), Fault> {
        let _current = self.gpu.enter()?;
        // SAFETY: the event was recorded and not destroyed.
        self.gpu
            .table
            .call("cuEventSynchronize", unsafe { (self.gpu.table.event_wait)(self.event) })
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.enter() else { return };
        // SAFETY: nothing else has it; if the event is still pending, the driver keeps it until it
        // is over.
        unsafe { (self.gpu.table.event_destroy)(self.event) };
    }
}

impl GpuMem for Cuda {
    fn name(&self) -> String {
        self.0.name.clone()
    }

    fn refuses(&self, tier: Tier) -> Option<Unavailable> {
        self.0.export.refuses(tier, &self.0.name)
    }

    fn check(&self, addr: u64, len: u64) -> Result<(), Fault> {
        let _current = self.0.enter()?;
        let (mut at, mut left) = (addr, len);
        loop {
            let p = self.0.place(at)?;
            // Memory of pools and mappings has no context, but a device.
            let ours =
                p.context == self.0.context || (p.context.is_null() && p.device == self.0.device);
            // The driver does not distinguish freed memory from memory that never existed.
            if p.memory != DEVICE_MEMORY || !ours || at < p.start || at - p.start >= p.size {
                let beyond = Fault::Beyond { addr, len, end: at };
                return Err(if at > addr { beyond } else { Fault::Foreign { addr } });
            }
            let here = p.size - (at - p.start);
            if left <= here {
                return Ok(());
            }
            let end = p.start + p.size;
            // Adjacent mappings are one range to their owner; adjacent allocations are not.
            if !p.context.is_null() {
                return Err(Fault::Beyond { addr, len, end });
            }
            (at, left) = (end, left - here);
        }
    }

    fn settle(&self) -> Result<(), Fault> {
        let _current = self.0.enter()?;
        // SAFETY: waits for the context that is current.
        self.0.table.call("cuCtxSynchronize", unsafe { (self.0.table.context_wait)() })
    }

    unsafe fn before(&self, stream: u64) -> Result<Box<dyn Before>, Fault> {
        let (table, _current) = (&self.0.table, self.0.enter()?);
        let stream = stream as Handle;
        let (mut event, mut recording) = (ptr::null_mut(), 0);
        // SAFETY: writes one number; of the stream the caller's promise.
        table.call("cuStreamIsCapturing", unsafe {
            (table.stream_capturing)(stream, &mut recording)
        })?;
        if recording != 0 {
            // The event would become part of the graph.
            let name = "the stream is recording a graph, which cannot be waited for".into();
            return Err(Fault::Driver { call: "cuEventRecord", code: CAPTURE_UNSUPPORTED, name });
        }
        // SAFETY: writes one handle.
        table.call("cuEventCreate", unsafe { (table.event_create)(&mut event, QUIET_EVENT) })?;
        let noted = Noted { gpu: self.0.clone(), event };
        // SAFETY: the event was just made; of the stream the caller's promise.
        table.call("cuEventRecord", unsafe { (table.event_record)(event, stream) })?;
        Ok(Box::new(noted))
    }

    fn alloc(&self, len: u64) -> Result<u64, Fault> {
        let _current = self.0.enter()?;
        let mut addr = 0;
        // SAFETY: writes one address.
        match unsafe { (self.0.table.alloc)(&mut addr, len as usize) } {
            OUT_OF_MEMORY => Err(Fault::NoMemory { bytes: len }),
            code => self.0.table.call("cuMemAlloc", code).map(|()| addr),
        }
    }

    fn free(&self, addr: u64) -> Result<(), Fault> {
        let _current = self.0.enter()?;
        // SAFETY: the driver refuses what it has not allocated.
        self.0.table.call("cuMemFree", unsafe { (self.0.table.free)(addr) })
    }

    fn registry(&self) -> Arc<Registry> {
        self.0.registry.clone()
    }

    fn is_gone(&self) -> bool {
        matches!(self.0.enter(), Err(Fault::ContextGone))
    }

    fn pci(&self) -> Result<String, String> {
        self.0.pci.clone()
    }

    unsafe fn pin(&self, start: *mut u8, len: usize) -> Result<(), Fault> {
        let _current = self.0.enter()?;
        // SAFETY: the memory stays mapped, as the caller promised.
        let code = unsafe { (self.0.table.host_register)(start.cast(), len, PORTABLE) };
        self.0.table.call("cuMemHostRegister", code).map_err(|e| match e {
            Fault::Driver { .. } => Fault::Pin { bytes: len as u64, why: e.to_string() },
            e => e,
        })
    }

    fn unpin(&self, start: *mut u8) {
        let Ok(_current) = self.0.enter() else { return };
        // SAFETY: was registered by `pin` in this context; when that is gone, so is the
        // registration.
        let code = unsafe { (self.0.table.host_unregister)(start.cast()) };
        if let Err(e) = self.0.table.call("cuMemHostUnregister", code) {
            tracing::debug!("{e}");
        }
    }

    fn sums(&self) -> Result<(), String> {
        self.0.kernel().map(|_| ())
    }

    fn export(&self, addr: u64, len: u64) -> Result<Foreign, Fault> {
        self.0.export_range(addr, len)
    }

    fn arrived(&self) -> Result<(), Fault> {
        self.0.flush_writes()
    }

    fn cufile(&self, prober: &Path) -> Result<Arc<dyn CuFile>, Unavailable> {
        Ok(Nvidia::open(prober)?)
    }

    fn stream(&self) -> Result<Box<dyn Stream>, Fault> {
        let mut stream = ptr::null_mut();
        let table = &self.0.table;
        // SAFETY: the context was retained; the calling thread is the stream's own. The second call
        // writes one handle.
        unsafe {
            table.call("cuCtxSetCurrent", (table.context_set)(self.0.context))?;
            table.call("cuStreamCreate", (table.stream_create)(&mut stream, NON_BLOCKING))?;
        }
        let (marks, spare) = (VecDeque::new(), Vec::new());
        let sums = Sums::default();
        Ok(Box::new(CudaStream {
            gpu: self.0.clone(),
            stream,
            marks,
            spare,
            given: 0,
            broken: None,
            sums,
        }))
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({})", self.0.name)
    }
}

struct CudaStream {
    gpu: Arc<Gpu>,
    stream: Handle,
    /// Marks that were not waited for yet, with their events.
    marks: VecDeque<(u64, Handle)>,
    spare: Vec<Handle>,
    given: u64,
    /// An error of a copy ends the context, and with it this stream.
    broken: Option<Fault>,
    sums: Sums,
}

impl CudaStream {
    fn usable(&self) -> Result<(), Fault> {
        self.broken.clone().map_or(Ok(()), Err)
    }
}

impl Stream for CudaStream {
    unsafe fn load(&mut self, to: u64, from: *const u8, len: usize) -> Result<(), Fault> {
        self.usable()?;
        // SAFETY: `from` stays as it is until the copy is over, as the caller promised; the driver
        // knows its own addresses.
        let code = unsafe { (self.gpu.table.to_device)(to, from.cast(), len, self.stream) };
        self.gpu.table.call("cuMemcpyHtoDAsync", code)
    }

    unsafe fn save(&mut self, to: *mut u8, from: u64, len: usize) -> Result<(), Fault> {
        self.usable()?;
        // SAFETY: `to` is the copy's alone until it is over, as the caller promised.
        let code = unsafe { (self.gpu.table.to_host)(to.cast(), from, len, self.stream) };
        self.gpu.table.call("cuMemcpyDtoHAsync", code)
    }

    fn sum(&mut self, from: u64, len: usize) -> Result<u64, Fault> {
        self.usable()?;
        let no_kernel = |name| Fault::Driver { call: "cuModuleLoadData", code: 0, name };
        let kernel = self.gpu.kernel().map_err(no_kernel)?;
        self.sums.sum(&self.gpu, kernel, self.stream, from, len)
    }

    fn summed(&mut self, number: u64) -> Option<u32> {
        self.sums.summed(number).filter(|_| self.broken.is_none())
    }

    fn summed_blocks(&mut self, number: u64) -> Option<Vec<u32>> {
        self.sums.summed_blocks(number).filter(|_| self.broken.is_none())
    }

    fn mark(&mut self) -> Result<Mark, Fault> {
        self.usable()?;
        let table = &self.gpu.table;
        let event = match self.spare.pop() {
            Some(e) => e,
            None => {
                let mut event = ptr::null_mut();
                // SAFETY: writes one handle.
                table.call("cuEventCreate", unsafe {
                    (table.event_create)(&mut event, QUIET_EVENT)
                })?;
                event
            }
        };
        // SAFETY: event and stream are of this context and were not destroyed.
        let recorded =
            table.call("cuEventRecord", unsafe { (table.event_record)(event, self.stream) });
        if recorded.is_err() {
            self.spare.push(event);
        }
        recorded?;
        self.given += 1;
        self.marks.push_back((self.given, event));
        Ok(Mark(self.given))
    }

    fn wait(&mut self, mark: Mark) -> Result<(), Fault> {
        while let Some((n, event)) = self.marks.front().copied()
            && n <= mark.0
        {
            // SAFETY: the event was recorded and not destroyed.
            let code = unsafe { (self.gpu.table.event_wait)(event) };
            if let Err(e) = self.gpu.table.call("cuEventSynchronize", code) {
                self.broken.get_or_insert(e);
            }
            self.marks.pop_front();
            self.spare.push(event);
        }
        self.usable()
    }

    fn drain(&mut self) {
        // SAFETY: the stream was not destroyed. When it fails the context has ended, and with it
        // its copies.
        let code = unsafe { (self.gpu.table.stream_wait)(self.stream) };
        if let Err(e) = self.gpu.table.call("cuStreamSynchronize", code) {
            self.broken.get_or_insert(e);
        }
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        self.drain();
        self.sums.free(&self.gpu);
        for event in self.spare.drain(..).chain(self.marks.drain(..).map(|(_, e)| e)) {
            // SAFETY: ours, recorded nowhere any more.
            unsafe { (self.gpu.table.event_destroy)(event) };
        }
        // SAFETY: ours, and empty.
        unsafe { (self.gpu.table.stream_destroy)(self.stream) };
    }
}
