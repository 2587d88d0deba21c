//! Types and numbers of cuFile's interface, version 1.20 (`cuFileGetVersion` returns 1200), in our
//! own declarations: integers and pointers in the layout of a C compiler for 64-bit machines.
//! Enumerations that a program passes in are plain integers, because it may pass any number.

use std::{
    ffi::{c_int, c_uint, c_void},
    mem::offset_of,
};

/// The value that [`crate::api::cuFileGetVersion`] returns: 1000 per major version plus 10 per
/// minor version.
pub const VERSION: c_int = 1200;

/// The first version with counters for vector calls.
pub const VECTORS_SINCE: c_int = 1160;
/// Size of [`Level1`] in versions before [`VECTORS_SINCE`], without those counters.
pub const OLD_LEVEL1: usize = offset_of!(Level1, readv_ops);

macro_rules! codes {
    ($($name:ident = $n:literal;)*) => {
        $(#[allow(missing_docs, reason = "named as in the interface")] pub const $name: c_int = $n;)*
    };
}

codes! {
    SUCCESS = 0;
    DRIVER_NOT_INITIALIZED = 5001;
    DRIVER_VERSION_MISMATCH = 5004;
    DRIVER_CLOSING = 5006;
    PLATFORM_NOT_SUPPORTED = 5007;
    IO_NOT_SUPPORTED = 5008;
    CUDA_DRIVER_ERROR = 5011;
    CUDA_POINTER_INVALID = 5012;
    CUDA_POINTER_RANGE_ERROR = 5014;
    INVALID_FILE_TYPE = 5018;
    INVALID_FILE_OPEN_FLAG = 5019;
    INVALID_VALUE = 5022;
    MEMORY_ALREADY_REGISTERED = 5023;
    PERMISSION_DENIED = 5025;
    DRIVER_ALREADY_OPEN = 5026;
    HANDLE_NOT_REGISTERED = 5027;
    HANDLE_ALREADY_REGISTERED = 5028;
    DEVICE_NOT_FOUND = 5029;
    INTERNAL_ERROR = 5030;
    BATCH_FULL = 5037;
    ASYNC_NOT_SUPPORTED = 5038;
}

/// `CUfileError_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// One of the codes.
    pub err: c_int,
    /// The CUDA driver's, where `err` is [`CUDA_DRIVER_ERROR`].
    pub cu_err: c_int,
}

impl Status {
    /// Success.
    pub const OK: Status = Status { err: SUCCESS, cu_err: 0 };

    /// A status with one of cuFile's codes.
    pub const fn of(err: c_int) -> Status {
        Status { err, cu_err: 0 }
    }
}

/// `CU_FILE_HANDLE_TYPE_OPAQUE_FD`.
pub const OPAQUE_FD: c_int = 1;

/// `CUfileDescr_t`; of the union only its descriptor is named.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Descriptor {
    /// What the union holds.
    pub kind: c_int,
    /// The union, as large as a pointer: a descriptor in its first four bytes.
    pub handle: u64,
    /// Not used.
    pub operations: *const c_void,
}

impl Descriptor {
    /// The descriptor in the union.
    pub fn fd(&self) -> c_int {
        let [a, b, c, d, ..] = self.handle.to_ne_bytes();
        c_int::from_ne_bytes([a, b, c, d])
    }
}

/// `CUfileDrvProps_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "named as in the interface")]
pub struct Properties {
    pub nvfs_major: c_uint,
    pub nvfs_minor: c_uint,
    pub poll_thresh_size: usize,
    pub max_direct_io_size: usize,
    pub dstatusflags: c_uint,
    pub dcontrolflags: c_uint,
    pub fflags: c_uint,
    pub max_device_cache_size: c_uint,
    pub per_buffer_cache_size: c_uint,
    pub max_device_pinned_mem_size: c_uint,
    pub max_batch_io_size: c_uint,
    pub max_batch_io_timeout_msecs: c_uint,
}

/// `CUFILE_BATCH`.
pub const BATCH: c_int = 1;
/// `CUFILE_READ`.
pub const READ: c_int = 0;
/// `CUFILE_WRITE`.
pub const WRITE: c_int = 1;

/// `CUfileIOParams_t`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "named as in the interface")]
pub struct Params {
    pub mode: c_int,
    pub base: *mut c_void,
    pub file_offset: i64,
    pub base_offset: i64,
    pub size: usize,
    pub handle: *mut c_void,
    pub opcode: c_int,
    pub cookie: *mut c_void,
}

/// `CUFILE_CANCELED`.
pub const CANCELED: c_int = 8;
/// `CUFILE_COMPLETE`.
pub const COMPLETE: c_int = 0x10;
/// `CUFILE_FAILED`.
pub const FAILED: c_int = 0x40;

/// `CUfileIOEvents_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "named as in the interface")]
pub struct Event {
    pub cookie: *mut c_void,
    pub status: c_int,
    /// The number of bytes, or a negative error.
    pub ret: isize,
}

// SAFETY: the cookie is never dereferenced, only returned to the program.
unsafe impl Send for Event {}

/// `CUfileIOVec_t`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs, reason = "named as in the interface")]
pub struct IoVec {
    pub base: *mut c_void,
    pub len: usize,
}

/// `CUfileOpCounter_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as in the interface")]
pub struct Counter {
    pub ok: u64,
    pub err: u64,
}

/// `CUfileStatsLevel1_t`. Rates are bytes or calls per second; latencies are microseconds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "named as in the interface")]
pub struct Level1 {
    pub read_ops: Counter,
    pub write_ops: Counter,
    pub hdl_register_ops: Counter,
    pub hdl_deregister_ops: Counter,
    pub buf_register_ops: Counter,
    pub buf_deregister_ops: Counter,
    pub read_bytes: u64,
    pub write_bytes: u64,
    pub read_bw: u64,
    pub write_bw: u64,
    pub read_lat_avg: u64,
    pub write_lat_avg: u64,
    pub read_ops_per_sec: u64,
    pub write_ops_per_sec: u64,
    pub read_lat_sum: u64,
    pub write_lat_sum: u64,
    pub batch_submit_ops: Counter,
    pub batch_complete_ops: Counter,
    pub batch_setup_ops: Counter,
    pub batch_cancel_ops: Counter,
    pub batch_destroy_ops: Counter,
    pub batch_enqueued_ops: Counter,
    pub batch_posix_enqueued_ops: Counter,
    pub batch_processed_ops: Counter,
    pub batch_posix_processed_ops: Counter,
    pub batch_nvfs_submit_ops: Counter,
    pub batch_p2p_submit_ops: Counter,
    pub batch_aio_submit_ops: Counter,
    pub batch_iouring_submit_ops: Counter,
    pub batch_mixed_submit_ops: Counter,
    pub batch_total_submit_ops: Counter,
    pub batch_read_bytes: u64,
    pub batch_write_bytes: u64,
    pub batch_read_bw: u64,
    pub batch_write_bw: u64,
    pub batch_submit_lat_avg: u64,
    pub batch_completion_lat_avg: u64,
    pub batch_submit_ops_per_sec: u64,
    pub batch_complete_ops_per_sec: u64,
    pub batch_submit_lat_sum: u64,
    pub batch_completion_lat_sum: u64,
    pub last_batch_read_bytes: u64,
    pub last_batch_write_bytes: u64,
    pub readv_ops: Counter,
    pub writev_ops: Counter,
    pub readv_bytes: u64,
    pub writev_bytes: u64,
    pub readv_bw: u64,
    pub writev_bw: u64,
    pub readv_lat_avg: u64,
    pub writev_lat_avg: u64,
    pub readv_ops_per_sec: u64,
    pub writev_ops_per_sec: u64,
    pub readv_lat_sum: u64,
    pub writev_lat_sum: u64,
}

/// `CUfileStatsLevel2_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "named as in the interface")]
pub struct Level2 {
    pub basic: Level1,
    pub read_sizes: [u64; 32],
    pub write_sizes: [u64; 32],
}

/// `CUfilePerGpuStats_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "named as in the interface")]
pub struct PerGpu {
    pub uuid: [u8; 16],
    pub read_bytes: u64,
    pub read_bw: u64,
    pub read_utilization: u64,
    pub read_duration: u64,
    pub reads: u64,
    pub p2p_reads: u64,
    pub nvfs_reads: u64,
    pub posix_reads: u64,
    pub unaligned_reads: u64,
    pub dr_reads: u64,
    pub sparse_regions: u64,
    pub inline_regions: u64,
    pub reads_err: u64,
    pub write_bytes: u64,
    pub write_bw: u64,
    pub write_utilization: u64,
    pub write_duration: u64,
    pub writes: u64,
    pub p2p_writes: u64,
    pub nvfs_writes: u64,
    pub posix_writes: u64,
    pub unaligned_writes: u64,
    pub dr_writes: u64,
    pub writes_err: u64,
    pub mmap: u64,
    pub mmap_ok: u64,
    pub mmap_err: u64,
    pub mmap_free: u64,
    pub reg_bytes: u64,
}

/// The number of GPUs that [`Level3`] has space for.
pub const GPUS: usize = 16;

/// `CUfileStatsLevel3_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "named as in the interface")]
pub struct Level3 {
    pub detailed: Level2,
    pub gpus: u32,
    pub per_gpu: [PerGpu; GPUS],
}

const _: () = assert!(size_of::<Status>() == 8);
const _: () = assert!(size_of::<Descriptor>() == 24 && offset_of!(Descriptor, handle) == 8);
const _: () = assert!(size_of::<Properties>() == 56 && offset_of!(Properties, fflags) == 32);
const _: () = assert!(
    size_of::<Params>() == 64
        && offset_of!(Params, handle) == 40
        && offset_of!(Params, cookie) == 56
);
const _: () = assert!(size_of::<Event>() == 24 && offset_of!(Event, ret) == 16);
const _: () = assert!(size_of::<Level1>() == 624 && offset_of!(Level1, readv_ops) == 512);
const _: () = assert!(size_of::<Level2>() == 1136 && size_of::<PerGpu>() == 248);
const _: () = assert!(size_of::<Level3>() == 5112 && offset_of!(Level3, per_gpu) == 1144);
