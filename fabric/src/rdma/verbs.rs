//! The parts of `libibverbs` and `librdmacm` that are used: our own declarations, opened at run
//! time.
//!
//! Functions are looked up under the symbol version that the declarations describe, so a different
//! ABI counts as missing instead of being misread. The calls of the data path are not symbols:
//! headers inline them to calls through pointers in the device's context, so layouts matter. Those
//! below belong to the stable ABI (rdma-core since version 17, measured on 44) on 64-bit machines,
//! and are checked at compile time.

use std::{
    error::Error as _,
    ffi::{CString, c_char, c_int, c_void},
    mem::offset_of,
    sync::OnceLock,
};

use libloading::os::unix;
use strake_proto::{Code, Error, Result};

/// An opaque object of the libraries, used through its pointer only.
#[repr(C)]
pub struct Opaque {
    _private: [u8; 0],
}

pub type Pd = Opaque;
pub type Srq = Opaque;

/// `struct ibv_context`, as far as it is used.
#[repr(C)]
pub struct Context {
    pub device: *mut DeviceHead,
    pub ops: Ops,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
}

type Unused = *const c_void;

/// Start of `struct ibv_device`.
#[repr(C)]
pub struct DeviceHead {
    _ops: [Unused; 2],
    _node_type: c_int,
    pub transport_type: c_int,
}

/// `struct ibv_context_ops`: what the headers' inline functions call.
#[repr(C)]
pub struct Ops {
    _a: [Unused; 7],
    pub alloc_mw: Option<unsafe extern "C" fn(*mut Pd, c_int) -> *mut Mw>,
    _bind_mw: Unused,
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    _b: Unused,
    pub poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int,
    pub req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
    _c: [Unused; 7],
    pub post_srq_recv: unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int,
    _d: [Unused; 4],
    pub post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    _e: [Unused; 6],
}

/// Start of `struct ibv_comp_channel`.
#[repr(C)]
pub struct CompChannel {
    pub context: *mut Context,
    pub fd: c_int,
}

/// Start of `struct ibv_cq`.
#[repr(C)]
pub struct Cq {
    pub context: *mut Context,
}

/// Start of `struct ibv_qp`.
#[repr(C)]
pub struct Qp {
    pub context: *mut Context,
}

#[repr(C)]
pub struct Mr {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

#[repr(C)]
pub struct Mw {
    pub context: *mut Context,
    pub pd: *mut Pd,
    pub rkey: u32,
    pub handle: u32,
    pub kind: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Sge {
    pub addr: u64,
    pub length: u32,
    pub lkey: u32,
}

/// `struct ibv_send_wr`; its unions contain only the members that are used.
#[repr(C)]
pub struct SendWr {
    pub wr_id: u64,
    pub next: *mut SendWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
    pub opcode: c_int,
    pub send_flags: u32,
    /// Immediate data in network byte order, or the key to invalidate.
    pub imm_or_key: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    _wr: [u64; 3],
    pub mw: *mut Mw,
    pub mw_rkey: u32,
    pub mw_mr: *mut Mr,
    pub mw_addr: u64,
    pub mw_length: u64,
    pub mw_access: u32,
}

#[repr(C)]
pub struct RecvWr {
    pub wr_id: u64,
    pub next: *mut RecvWr,
    pub sg_list: *mut Sge,
    pub num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Wc {
    pub wr_id: u64,
    pub status: c_int,
    pub opcode: c_int,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Network byte order.
    pub imm: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    _end: [u32; 2],
}

#[repr(C)]
pub struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *mut Cq,
    pub recv_cq: *mut Cq,
    pub srq: *mut Srq,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
    pub qp_type: c_int,
    pub sq_sig_all: c_int,
}

#[repr(C)]
pub struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

/// `struct ibv_device_attr`, 232 bytes.
#[repr(C)]
pub struct DeviceAttr {
    _a: [u64; 12],
    pub vendor_id: u32,
    _vendor: [u32; 3],
    pub max_qp_wr: c_int,
    pub device_cap_flags: u32,
    pub max_sge: c_int,
    _b: [c_int; 2],
    pub max_cqe: c_int,
    _mr: [c_int; 2],
    pub max_qp_rd_atom: c_int,
    _c: [c_int; 2],
    pub max_qp_init_rd_atom: c_int,
    _d: [c_int; 4],
    pub max_mw: c_int,
    _e: [c_int; 9],
    pub max_srq_wr: c_int,
    _f: [c_int; 3],
}

/// Start of `struct rdma_cm_id`.
#[repr(C)]
pub struct CmId {
    pub verbs: *mut Context,
    pub channel: *mut CmChannel,
    pub context: *mut c_void,
    pub qp: *mut Qp,
    _src: [u64; 16],
    /// A `sockaddr_storage`.
    pub dst: libc::sockaddr_storage,
}

/// `struct rdma_event_channel`.
#[repr(C)]
pub struct CmChannel {
    pub fd: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct ConnParam {
    pub private_data: *const c_void,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

#[repr(C)]
pub struct CmEvent {
    pub id: *mut CmId,
    pub listen_id: *mut CmId,
    pub event: c_int,
    pub status: c_int,
    pub conn: ConnParam,
    _ud: [u64; 4],
}

const _: () = {
    assert!(
        offset_of!(Context, ops) == 8
            && size_of::<Ops>() == 256
            && offset_of!(Context, cmd_fd) == 264
    );
    assert!(offset_of!(Ops, alloc_mw) == 56 && offset_of!(Ops, dealloc_mw) == 72);
    assert!(offset_of!(Ops, poll_cq) == 88 && offset_of!(Ops, req_notify_cq) == 96);
    assert!(offset_of!(Ops, post_srq_recv) == 160 && offset_of!(Ops, post_send) == 200);
    assert!(offset_of!(DeviceHead, transport_type) == 20 && offset_of!(CompChannel, fd) == 8);
    assert!(size_of::<Mr>() == 48 && offset_of!(Mr, lkey) == 36 && offset_of!(Mr, rkey) == 40);
    assert!(size_of::<Mw>() == 32 && offset_of!(Mw, rkey) == 16 && offset_of!(Mw, kind) == 24);
    assert!(size_of::<Sge>() == 16);
    assert!(
        size_of::<SendWr>() == 128
            && offset_of!(SendWr, opcode) == 28
            && offset_of!(SendWr, imm_or_key) == 36
    );
    assert!(
        offset_of!(SendWr, remote_addr) == 40
            && offset_of!(SendWr, rkey) == 48
            && offset_of!(SendWr, mw) == 80
    );
    assert!(
        offset_of!(SendWr, mw_rkey) == 88
            && offset_of!(SendWr, mw_mr) == 96
            && offset_of!(SendWr, mw_addr) == 104
    );
    assert!(offset_of!(SendWr, mw_length) == 112 && offset_of!(SendWr, mw_access) == 120);
    assert!(size_of::<RecvWr>() == 32 && offset_of!(RecvWr, num_sge) == 24);
    assert!(
        size_of::<Wc>() == 48 && offset_of!(Wc, byte_len) == 20 && offset_of!(Wc, wc_flags) == 36
    );
    assert!(size_of::<QpInitAttr>() == 64 && offset_of!(QpInitAttr, max_send_wr) == 32);
    assert!(offset_of!(QpInitAttr, qp_type) == 52 && size_of::<SrqInitAttr>() == 24);
    assert!(offset_of!(DeviceAttr, vendor_id) == 96);
    assert!(size_of::<DeviceAttr>() == 232 && offset_of!(DeviceAttr, device_cap_flags) == 116);
    assert!(offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(
        offset_of!(DeviceAttr, max_qp_rd_atom) == 144
            && offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156
    );
    assert!(offset_of!(DeviceAttr, max_mw) == 176 && offset_of!(DeviceAttr, max_srq_wr) == 216);
    assert!(offset_of!(CmId, qp) == 24 && offset_of!(CmId, dst) == 160);
    assert!(size_of::<CmEvent>() == 80 && offset_of!(CmEvent, conn) == 24);
    assert!(size_of::<ConnParam>() == 24 && offset_of!(ConnParam, srq) == 14);
};

pub const LOCAL_WRITE: c_int = 1;
pub const REMOTE_WRITE: u32 = 2;
pub const REMOTE_READ: u32 = 4;
pub const MW_BIND: c_int = 16;
pub const CAP_MW_2B: u32 = 1 << 24;
/// `vendor_id` of soft-RoCE.
pub const SOFT_ROCE: u32 = 0xff_ffff;
pub const MW_TYPE_2: c_int = 2;
pub const QPT_RC: c_int = 2;
pub const TRANSPORT_IWARP: c_int = 1;
/// Fields of a completion: a SEND was received; it has immediate data.
pub const WC_RECV: c_int = 128;
pub const WC_WITH_IMM: u32 = 2;
pub const PS_TCP: c_int = 0x106;

pub mod op {
    use std::ffi::c_int;
    pub const WRITE: c_int = 0;
    pub const SEND_WITH_IMM: c_int = 3;
    pub const READ: c_int = 4;
    pub const LOCAL_INV: c_int = 7;
    pub const BIND_MW: c_int = 8;
}

pub mod send_flag {
    pub const SIGNALED: u32 = 2;
}

/// Whether a completion's status (`enum ibv_wc_status`) means that nothing gets through, or that
/// the device fails: retries exceeded, no response in time, fatal, general. All others are caused
/// by one of the ends: something was refused, or the connection was closed.
pub fn is_of_the_path(status: c_int) -> bool {
    matches!(status, 12 | 19..=21)
}

pub mod event {
    use std::ffi::c_int;
    pub const ADDR_RESOLVED: c_int = 0;
    pub const ADDR_ERROR: c_int = 1;
    pub const ROUTE_RESOLVED: c_int = 2;
    pub const ROUTE_ERROR: c_int = 3;
    pub const CONNECT_REQUEST: c_int = 4;
    pub const CONNECT_ERROR: c_int = 6;
    pub const UNREACHABLE: c_int = 7;
    pub const REJECTED: c_int = 8;
    pub const ESTABLISHED: c_int = 9;
    pub const DISCONNECTED: c_int = 10;
    pub const DEVICE_REMOVAL: c_int = 11;
}

/// Reasons of a rejection (IBTA CM): no listener at that port; the listener rejected it.
pub const REJ_NO_LISTENER: c_int = 8;
pub const REJ_BY_LISTENER: c_int = 28;

macro_rules! library {
    ($($field:ident $version:literal { $($name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)* })*) => {
        /// The functions of both libraries.
        #[cfg_attr(test, derive(Clone))]
        pub struct Lib {
            $($(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*)*
            pub reg_dmabuf: fn() -> Result<RegDmaBuf>,
        }

        impl Lib {
            fn load(from: &Handles) -> Result<Lib> {
                Ok(Lib { reg_dmabuf, $($($name: {
                    let p = from.$field.symbol(stringify!($name), $version)?;
                    // SAFETY: a function of this name and version has this type.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(p) }
                },)*)* })
            }
        }
    };
}

library! {
    ibverbs "IBVERBS_1.1" {
        ibv_get_device_list: fn(*mut c_int) -> *mut *mut DeviceHead;
        ibv_free_device_list: fn(*mut *mut DeviceHead);
        ibv_get_device_name: fn(*mut DeviceHead) -> *const c_char;
        ibv_open_device: fn(*mut DeviceHead) -> *mut Context;
        ibv_close_device: fn(*mut Context) -> c_int;
        ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
        ibv_alloc_pd: fn(*mut Context) -> *mut Pd;
        ibv_dealloc_pd: fn(*mut Pd) -> c_int;
        ibv_reg_mr: fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
        ibv_dereg_mr: fn(*mut Mr) -> c_int;
        ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
        ibv_destroy_cq: fn(*mut Cq) -> c_int;
        ibv_get_cq_event: fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events: fn(*mut Cq, u32);
        ibv_create_srq: fn(*mut Pd, *mut SrqInitAttr) -> *mut Srq;
        ibv_destroy_srq: fn(*mut Srq) -> c_int;
        ibv_wc_status_str: fn(c_int) -> *const c_char;
    }
    // These two never changed.
    ibverbs "IBVERBS_1.0" {
        ibv_create_comp_channel: fn(*mut Context) -> *mut CompChannel;
        ibv_destroy_comp_channel: fn(*mut CompChannel) -> c_int;
    }
    rdmacm "RDMACM_1.0" {
        rdma_create_event_channel: fn() -> *mut CmChannel;
        rdma_destroy_event_channel: fn(*mut CmChannel);
        rdma_create_id: fn(*mut CmChannel, *mut *mut CmId, *mut c_void, c_int) -> c_int;
        rdma_destroy_id: fn(*mut CmId) -> c_int;
        rdma_bind_addr: fn(*mut CmId, *mut libc::sockaddr) -> c_int;
        rdma_resolve_addr: fn(*mut CmId, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        rdma_resolve_route: fn(*mut CmId, c_int) -> c_int;
        rdma_create_qp: fn(*mut CmId, *mut Pd, *mut QpInitAttr) -> c_int;
        rdma_destroy_qp: fn(*mut CmId);
        rdma_connect: fn(*mut CmId, *mut ConnParam) -> c_int;
        rdma_listen: fn(*mut CmId, c_int) -> c_int;
        rdma_accept: fn(*mut CmId, *mut ConnParam) -> c_int;
        rdma_reject: fn(*mut CmId, *const c_void, u8) -> c_int;
        rdma_disconnect: fn(*mut CmId) -> c_int;
        rdma_migrate_id: fn(*mut CmId, *mut CmChannel) -> c_int;
        rdma_get_cm_event: fn(*mut CmChannel, *mut *mut CmEvent) -> c_int;
        rdma_ack_cm_event: fn(*mut CmEvent) -> c_int;
        rdma_get_src_port: fn(*mut CmId) -> u16;
    }
}

/// `ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access)`.
pub type RegDmaBuf = unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;

/// Newer than all other functions used, and only needed for GPU memory: libraries without it work
/// for everything else.
fn reg_dmabuf() -> Result<RegDmaBuf> {
    static FOUND: OnceLock<RegDmaBuf> = OnceLock::new();
    if let Some(f) = FOUND.get() {
        return Ok(*f);
    }
    let p = Handle::open("libibverbs.so.1")?.symbol("ibv_reg_dmabuf_mr", "IBVERBS_1.12")?;
    // SAFETY: a function of this name and version has this type.
    let f = unsafe { std::mem::transmute::<*mut c_void, RegDmaBuf>(p) };
    Ok(*FOUND.get_or_init(|| f))
}

struct Handles {
    ibverbs: Handle,
    rdmacm: Handle,
}

struct Handle {
    raw: *mut c_void,
    file: &'static str,
}

const INSTALL: &str =
    "install rdma-core (Debian: apt install rdma-core ibverbs-providers librdmacm1)";

impl Handle {
    fn open(file: &'static str) -> Result<Handle> {
        // SAFETY: the libraries' constructors are their own affair.
        let opened = unsafe { unix::Library::open(Some(file), unix::RTLD_NOW | unix::RTLD_LOCAL) };
        let library = opened.map_err(|e| {
            let why = e.source().map_or(e.to_string(), ToString::to_string);
            missing(format!("{file} cannot be opened ({why}); {INSTALL}"))
        })?;
        // It is never closed.
        Ok(Handle { raw: library.into_raw(), file })
    }

    fn symbol(&self, name: &str, version: &str) -> Result<*mut c_void> {
        unsafe extern "C" {
            fn dlvsym(
                handle: *mut c_void,
                name: *const c_char,
                version: *const c_char,
            ) -> *mut c_void;
        }
        let c = |s: &str| CString::new(s).map_err(|_| missing("a symbol's name".into()));
        let (n, v) = (c(name)?, c(version)?);
        // SAFETY: an open handle and NUL-terminated names.
        let p = unsafe { dlvsym(self.raw, n.as_ptr(), v.as_ptr()) };
        if p.is_null() {
            let m = format!(
                "{} has no {name} ({version}): it is too old or another vendor's; {INSTALL}",
                self.file
            );
            return Err(missing(m));
        }
        Ok(p)
    }
}

pub fn missing(what: String) -> Error {
    Error::new(Code::OpNotSupp, format!("RDMA is not available: {what}"))
}

/// The libraries, opened once. While they are missing, each call looks again.
pub fn lib() -> Result<&'static Lib> {
    static LIB: OnceLock<Lib> = OnceLock::new();
    if let Some(lib) = LIB.get() {
        return Ok(lib);
    }
    let ibverbs = Handle::open("libibverbs.so.1")?;
    let lib = Lib::load(&Handles { ibverbs, rdmacm: Handle::open("librdmacm.so.1")? })?;
    Ok(LIB.get_or_init(|| lib))
}

/// The error of a call that returned −1 or NULL.
pub fn os_error(what: &str) -> Error {
    Error::from(std::io::Error::last_os_error()).context(what.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_that_are_missing_or_others_are_named() {
        let e = Handle::open("libstrake-is-not-there.so.9").err().unwrap();
        assert!(
            e.code == Code::OpNotSupp
                && e.message.contains("libstrake-is-not-there.so.9 cannot be opened"),
            "{e}"
        );
        // A library that exists, but is not part of rdma-core.
        let other = Handle::open("libc.so.6").unwrap();
        for (name, version) in [("ibv_reg_mr", "IBVERBS_1.1"), ("malloc", "IBVERBS_1.1")] {
            let e = other.symbol(name, version).err().unwrap();
            let said = format!(
                "libc.so.6 has no {name} ({version}): it is too old or another vendor's; install rdma-core"
            );
            assert!(e.code == Code::OpNotSupp && e.message.contains(&said), "{e}");
        }
    }
}
