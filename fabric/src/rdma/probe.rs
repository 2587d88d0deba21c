//! The devices of this machine that can be used, and why others cannot.

use std::ffi::{CStr, c_int};

use strake_proto::{Error, Result};

use super::{
    cm,
    limits::{DEPTH, FEWEST},
    verbs::{self, Context, DeviceAttr, Lib},
};

/// Names of the devices that can be used. An error is one sentence that says what is missing.
pub fn probe() -> Result<Vec<String>> {
    let lib = verbs::lib()?;
    cm::see(lib)?;
    let mut n = 0;
    // SAFETY: a place for the count; the list is freed below, devices are closed before.
    let list = unsafe { (lib.ibv_get_device_list)(&raw mut n) };
    let (mut good, mut bad) = (Vec::new(), None);
    for i in 0..if list.is_null() { 0 } else { n as usize } {
        // SAFETY: within the list; an open device is closed once.
        unsafe {
            let ctx = (lib.ibv_open_device)(*list.add(i));
            if ctx.is_null() {
                bad = Some(verbs::os_error("a device cannot be opened"));
                continue;
            }
            match look_at(lib, ctx) {
                Ok(_) => good.push(name_of(lib, ctx)),
                Err(e) => bad = Some(e),
            }
            (lib.ibv_close_device)(ctx);
        }
    }
    if !list.is_null() {
        // SAFETY: the list from above.
        unsafe { (lib.ibv_free_device_list)(list) };
    }
    match (good.is_empty(), bad) {
        (false, _) => Ok(good),
        (true, Some(e)) => Err(e),
        (true, None) => Err(verbs::missing(
            "this machine has no RDMA device; load the driver of its network card and make sure \
             that /dev/infiniband/uverbs* can be read and written"
                .into(),
        )),
    }
}

/// The name of a device's context.
pub fn name_of(lib: &Lib, ctx: *mut Context) -> String {
    // SAFETY: an open context names its device, whose name is NUL-terminated.
    unsafe { CStr::from_ptr((lib.ibv_get_device_name)((*ctx).device)) }
        .to_string_lossy()
        .into_owned()
}

/// Limits of a device. The error is a text that says why the device cannot be used.
pub fn look_at(lib: &Lib, ctx: *mut Context) -> Result<DeviceAttr> {
    let name = name_of(lib, ctx);
    // SAFETY: an open context has a device.
    if unsafe { (*(*ctx).device).transport_type } == verbs::TRANSPORT_IWARP {
        return Err(verbs::missing(format!(
            "device {name} is an iWARP device, which cannot send immediate data; use InfiniBand \
             or RoCE"
        )));
    }
    // SAFETY: all zeros are a value of this plain struct, which is filled for an open context.
    let attr = unsafe {
        let mut attr: DeviceAttr = std::mem::zeroed();
        match (lib.ibv_query_device)(ctx, &raw mut attr) {
            0 => attr,
            rc => {
                return Err(Error::from(std::io::Error::from_raw_os_error(rc))
                    .context(format!("device {name}")));
            }
        }
    };
    // SAFETY: an open context.
    let windows = unsafe { (*ctx).ops.alloc_mw.is_some() && (*ctx).ops.dealloc_mw.is_some() };
    if !windows || attr.device_cap_flags & verbs::CAP_MW_2B == 0 || attr.max_mw == 0 {
        return Err(verbs::missing(format!(
            "device {name} has no memory windows of type 2B, so lent memory would not be bounded; \
             use another device"
        )));
    }
    if attr.max_srq_wr < FEWEST as c_int {
        return Err(verbs::missing(format!(
            "device {name} has no shared receive queues; use another device"
        )));
    }
    if attr.max_cqe < DEPTH as c_int + FEWEST as c_int {
        return Err(verbs::missing(format!(
            "device {name} has completion queues of at most {} entries, but {} are needed; use \
             another device",
            attr.max_cqe,
            DEPTH as u32 + FEWEST
        )));
    }
    Ok(attr)
}
