//! Batches of reads and writes.

use std::{
    ffi::{c_uint, c_void},
    slice,
    sync::Arc,
    time::Instant,
};

use super::{BAD, put};
use crate::{
    abi::{Event, Params, Status},
    batch::{Batch, duration},
    driver::Driver,
    errors::{Done, control},
};

/// Makes a batch for up to `n` entries.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSetUp(batch: *mut *mut c_void, n: c_uint) -> Status {
    own_call!(batch_setup(batch, n));
    control(|| {
        let d = Driver::open_one()?;
        let done = if batch.is_null() || n == 0 || n as usize > d.params.lock().batch() {
            Err(BAD)
        } else {
            Ok(())
        };
        d.stats.control(|b| &mut b.batch_setup_ops, &done);
        done?;
        let id = d.new_id();
        d.batches.write().insert(id, Arc::new(Batch::new(n as usize)));
        // SAFETY: the caller's promise.
        unsafe { put(batch, id as *mut c_void) }
    })
}

fn batch_of(d: &Driver, batch: *mut c_void) -> Done<Arc<Batch>> {
    d.batches.read().get(&(batch as u64)).cloned().ok_or(BAD)
}

/// Submits entries, all or none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOSubmit(
    batch: *mut c_void,
    n: c_uint,
    all: *mut Params,
    flags: c_uint,
) -> Status {
    own_call!(batch_submit(batch, n, all, flags));
    control(|| {
        let (d, begun) = (Driver::open_one()?, Instant::now());
        let submit = || {
            let batch = batch_of(&d, batch)?;
            if n == 0 || all.is_null() || flags != 0 {
                return Err(BAD);
            }
            // SAFETY: as many as the program says, just checked for null.
            batch.submit(*d, unsafe { slice::from_raw_parts(all, n as usize) })
        };
        let done = submit();
        d.stats.submitted(n as usize, begun.elapsed(), &done);
        done
    })
}

/// Reports the entries that have ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOGetStatus(
    batch: *mut c_void,
    least: c_uint,
    n: *mut c_uint,
    events: *mut Event,
    timeout: *mut libc::timespec,
) -> Status {
    own_call!(batch_status(batch, least, n, events, timeout));
    control(|| {
        let d = Driver::open_one()?;
        let batch = batch_of(&d, batch)?;
        if n.is_null() || events.is_null() {
            return Err(BAD);
        }
        // SAFETY: the caller's promises.
        let (room, limit) = unsafe { (n.read(), timeout.as_ref()) };
        let limit = limit.map(|t| duration(t.tv_sec, t.tv_nsec).ok_or(BAD)).transpose()?;
        if room == 0 || least > room {
            return Err(BAD);
        }
        let none = Event { cookie: std::ptr::null_mut(), status: 0, ret: 0 };
        // A separate buffer, because the program's memory may be uninitialised. No batch has more
        // entries.
        let mut found = vec![none; (room as usize).min(1 << 16)];
        let told = batch.ended(least as usize, &mut found, limit)?;
        // SAFETY: the program promises space for that many events.
        unsafe {
            std::ptr::copy_nonoverlapping(found.as_ptr(), events, told);
            n.write(told as c_uint);
        }
        Ok(())
    })
}

/// Cancels the entries that have not begun.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIOCancel(batch: *mut c_void) -> Status {
    own_call!(batch_cancel(batch));
    control(|| {
        let d = Driver::open_one()?;
        let done = batch_of(&d, batch).and_then(|b| b.cancel());
        d.stats.control(|b| &mut b.batch_cancel_ops, &done);
        done
    })
}

/// Cancels the entries that have not begun, and destroys the batch.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFileBatchIODestroy(batch: *mut c_void) {
    own_call!(batch_destroy(batch));
    control(|| {
        let d = Driver::open_one()?;
        let found = d.batches.write().remove(&(batch as u64)).ok_or(BAD);
        let done = found.map(|b| b.destroy(true));
        d.stats.control(|b| &mut b.batch_destroy_ops, &done);
        done
    });
}
