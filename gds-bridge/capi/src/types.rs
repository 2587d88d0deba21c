//! The structs of the header.

use std::{
    ffi::c_char,
    mem::{MaybeUninit, offset_of},
    ptr,
};

use strake_fabric::{Transport, Use};
use strake_gds::{
    Checksum, Report, Tier,
    session::{Memory, Setup},
};
use strake_proto::Result;

use crate::{OpenFile, inval, text};

/// `struct strakegds_options`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Options {
    size: usize,
    mds: *const c_char,
    client_key: *const c_char,
    memory: *const c_char,
    fabric: *const c_char,
    pinned_limit: u64,
    workers: u32,
    slots: u32,
    slot_bytes: u32,
    accept_oss_checksum: u32,
    verify_on_gpu: u32,
    reserved: u32,
    local: *const c_char,
    policy: *const c_char,
}

/// Sizes of the options in versions 1, 2 and 3, which end before these fields.
const FIRST: usize = offset_of!(Options, verify_on_gpu);
const SECOND: usize = offset_of!(Options, local);
const THIRD: usize = offset_of!(Options, policy);

/// `struct strakegds_range`.
#[repr(C)]
pub struct Range {
    pub file: *mut OpenFile,
    pub offset: u64,
    pub address: u64,
    pub length: u64,
}

/// `struct strakegds_report`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ReportOut {
    size: usize,
    asked: u64,
    moved: u64,
    by_tier: [u64; Tier::ALL.len()],
    staged: u64,
    over_rdma: u64,
    switches: u32,
    checksum: u32,
    seconds: f64,
}

impl Options {
    /// # Safety
    /// `from` is null or points to options that are as large as their `size`, with pointers that
    /// are null or strings.
    pub unsafe fn read(from: *const Options) -> Result<Setup> {
        if from.is_null() {
            return Err(inval("options is NULL"));
        }
        // SAFETY: the options have at least a `size`.
        let size = unsafe { (&raw const (*from).size).read() };
        // Options of any other size, such as those of a newer version, would be read wrongly.
        let known = size_of::<Options>();
        let all = [FIRST, SECOND, THIRD, known];
        if !all.contains(&size) {
            return Err(inval(format!(
                "options: size is {size}, but this version of the library knows {all:?}"
            )));
        }
        // Fields that an older program does not have are zero, which is their default.
        let mut o = MaybeUninit::<Options>::zeroed();
        // SAFETY: the options have `size` bytes, which is no more than `o` has; every field may be
        // zero.
        let o = unsafe {
            ptr::copy_nonoverlapping(from.cast::<u8>(), o.as_mut_ptr().cast::<u8>(), size);
            o.assume_init()
        };
        if o.reserved != 0 {
            return Err(inval(format!("options: reserved is {}; it must be 0", o.reserved)));
        }
        let or = |p: *const c_char, what: &str, default| {
            // SAFETY: the caller's promise.
            if p.is_null() { Ok(default) } else { unsafe { text(p, what) } }
        };
        // SAFETY: as above.
        let mds = unsafe { text(o.mds, "options: mds") }?;
        let mut setup =
            Setup::new(mds, or(o.memory, "options: memory", "cuda:0")?.parse::<Memory>()?);
        setup.key = or(o.client_key, "options: client_key", strake_gds::session::KEY)?.into();
        setup.transports = match or(o.fabric, "options: fabric", "auto")? {
            "auto" => Use::Best,
            "tcp" => Use::Tcp,
            "rdma" => Use::Rdma,
            other => {
                return Err(inval(format!(
                    "options: fabric is '{other}'; expected auto, tcp or rdma"
                )));
            }
        };
        let or_default = |n: u32, default: usize| if n == 0 { default } else { n as usize };
        let d = &mut setup.options;
        d.pinned_limit = (o.pinned_limit > 0).then_some(o.pinned_limit);
        d.workers = or_default(o.workers, d.workers);
        d.slots = or_default(o.slots, d.slots);
        d.slot_bytes = or_default(o.slot_bytes, d.slot_bytes);
        d.accept_oss_checksum = o.accept_oss_checksum != 0;
        d.verify_on_gpu = o.verify_on_gpu != 0;
        d.policy = or(o.policy, "options: policy", "prefer")?.parse()?;
        if !o.local.is_null() {
            // SAFETY: the caller's promise.
            d.local = Some(unsafe { text(o.local, "options: local") }?.into());
        }
        Ok(setup)
    }
}

impl ReportOut {
    /// Checks, before a call does anything, that the report can be written.
    ///
    /// # Safety
    /// `to` is null or has at least a `size`.
    pub unsafe fn check(to: *const ReportOut) -> Result<()> {
        if to.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let (size, known) = (unsafe { (&raw const (*to).size).read() }, size_of::<ReportOut>());
        if size == known {
            return Ok(());
        }
        Err(inval(format!("report: size is {size}, but this version of the library knows {known}")))
    }

    /// # Safety
    /// `to` is null, or passed [`ReportOut::check`] and is valid for as many bytes as its `size`.
    pub unsafe fn write(to: *mut ReportOut, r: &Report) {
        if to.is_null() {
            return;
        }
        let size = size_of::<ReportOut>();
        let out = ReportOut {
            size,
            asked: r.asked,
            moved: r.moved(),
            by_tier: Tier::ALL.map(|t| r.by_tier[t]),
            staged: r.staged,
            over_rdma: r.by_transport[Transport::Rdma] + r.by_transport[Transport::RdmaStream],
            switches: r.switches.len() as u32,
            checksum: match r.checksum {
                None => 0,
                Some(Checksum::AtClient) => 1,
                Some(Checksum::AtOssOnly) => 2,
                Some(Checksum::OnGpu) => 3,
            },
            seconds: r.took.as_secs_f64(),
        };
        // SAFETY: `check` has compared its size, and the caller promises that many bytes.
        unsafe { ptr::write(to, out) };
    }
}

// The layout of a C compiler for 64-bit machines. The test's C program has the same assertions.
const _: () = assert!(
    size_of::<Options>() == 88
        && FIRST == 64
        && SECOND == 72
        && THIRD == 80
        && offset_of!(Options, reserved) == 68
);
const _: () = assert!(size_of::<Range>() == 32 && offset_of!(Range, length) == 24);
const _: () = assert!(size_of::<ReportOut>() == 96 && offset_of!(ReportOut, seconds) == 88);
