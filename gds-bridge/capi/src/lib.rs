//! The bridge for programs in C and all languages that can call C. `include/strakegds.h` documents
//! the functions; this is their implementation.
//!
//! Every function is guarded: a panic becomes an error (`EIO`) of its call and never unwinds into
//! C.

mod guard;
mod types;

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

use guard::{Texts, guarded, guarded_ptr};
use strake_client::File;
use strake_gds::{
    Direction, Failed, FileIo, Policy, Report, Strict, Transfer,
    session::{Content, Session, Started},
};
use strake_proto::{Code, Error, Result};
pub use types::{Options, Range, ReportOut};

/// The version of the interface.
const ABI: c_int = 4;

/// `struct strakegds`.
pub struct Bridge(Arc<Session>);

/// `struct strakegds_file`.
pub struct OpenFile {
    file: Arc<File>,
    session: Arc<Session>,
    policy: Mutex<Policy>,
}

impl OpenFile {
    /// The file as calls get it: with its policy.
    fn for_calls(&self) -> Result<Arc<dyn FileIo>> {
        match *self.policy.lock().unwrap_or_else(PoisonError::into_inner) {
            Policy::Prefer => Ok(self.file.clone()),
            policy => Ok(Arc::new(Strict::new(self.file.clone(), policy)?)),
        }
    }
}

fn inval(m: impl Into<String>) -> Error {
    Error::new(Code::Inval, m)
}

/// # Safety
/// `p` is null or valid for reading while the reference is used.
unsafe fn given<'a, T>(p: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { p.as_ref() }.ok_or_else(|| inval(format!("{what} is NULL")))
}

/// # Safety
/// `p` is null or a string with a zero at its end.
unsafe fn text<'a>(p: *const c_char, what: &str) -> Result<&'a str> {
    if p.is_null() {
        return Err(inval(format!("{what} is NULL")));
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(p) }.to_str().map_err(|_| inval(format!("{what} is not UTF-8")))
}

/// # Safety
/// As [`text`].
unsafe fn policy(p: *const c_char) -> Result<Policy> {
    // SAFETY: the caller's promise.
    if p.is_null() { Ok(Policy::Prefer) } else { unsafe { text(p, "policy") }?.parse() }
}

/// # Safety
/// `p` is valid for `n` ranges unless that is 0.
unsafe fn ranges<'a>(p: *const Range, n: usize) -> Result<&'a [Range]> {
    match (p.is_null(), n) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(inval("ranges is NULL")),
        // SAFETY: the caller's promise.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(p, n) }),
    }
}

/// # Safety
/// `to` is null or valid for writing.
unsafe fn put_out<T>(to: *mut T, value: T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(inval(format!("{what} is NULL")));
    }
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// The version of the interface.
#[unsafe(no_mangle)]
pub extern "C" fn strakegds_abi() -> c_int {
    ABI
}

/// The error text of the thread's last call; empty if it succeeded.
#[unsafe(no_mangle)]
pub extern "C" fn strakegds_error() -> *const c_char {
    Texts::error()
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_open(
    options: *const Options,
    bridge: *mut *mut Bridge,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promises; options are read as far as their size goes.
        let setup = unsafe { Options::read(options) }?;
        if bridge.is_null() {
            return Err(inval("bridge is NULL"));
        }
        let opened = Box::into_raw(Box::new(Bridge(Arc::new(Session::open(&setup)?))));
        // SAFETY: just checked.
        unsafe { put_out(bridge, opened, "bridge") }
    })
}

/// # Safety
/// The bridge is open or null, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_close(bridge: *mut Bridge) {
    guarded(|| {
        if !bridge.is_null() {
            // SAFETY: made by `strakegds_open`, and closed once, as the caller promises.
            drop(unsafe { Box::from_raw(bridge) });
        }
        Ok(())
    });
}

/// # Safety
/// The bridge is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_tiers(bridge: *mut Bridge) -> *const c_char {
    guarded_ptr(|| {
        // SAFETY: the caller's promise.
        let s = &unsafe { given(bridge, "bridge") }?.0;
        let tiers = serde_json::json!({ "device": s.device().name(), "notice": s.notice(), "tiers": s.tiers()? });
        Ok(Texts::answer(tiers.to_string()))
    })
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_file_open(
    bridge: *mut Bridge,
    path: *const c_char,
    flags: c_int,
    mode: u32,
    file: *mut *mut OpenFile,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let (session, path) = unsafe { (&given(bridge, "bridge")?.0, text(path, "path")?) };
        if file.is_null() {
            return Err(inval("file is NULL"));
        }
        let opened = Arc::new(session.open_file(path, flags as u32, mode)?);
        let opened = Box::into_raw(Box::new(OpenFile {
            file: opened,
            session: session.clone(),
            policy: Mutex::default(),
        }));
        // SAFETY: just checked.
        unsafe { put_out(file, opened, "file") }
    })
}

/// # Safety
/// The file is open or null, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_file_close(file: *mut OpenFile) -> c_int {
    guarded(|| {
        if file.is_null() {
            return Ok(());
        }
        // SAFETY: made by `strakegds_file_open`, and closed once, as the caller promises.
        let f = unsafe { Box::from_raw(file) };
        f.session.close(File::clone(&f.file))
    })
}

/// # Safety
/// The file is open, and the policy as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_file_policy(file: *mut OpenFile, how: *const c_char) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promises.
        let (f, policy) = unsafe { (given(file, "file")?, policy(how)?) };
        *f.policy.lock().unwrap_or_else(PoisonError::into_inner) = policy;
        Ok(())
    })
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_file_size(file: *mut OpenFile, size: *mut u64) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promises.
        unsafe {
            let f = given(file, "file")?;
            put_out(size, f.session.size(&f.file)?, "size")
        }
    })
}

/// # Safety
/// The file is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_file_sync(file: *mut OpenFile) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let f = unsafe { given(file, "file") }?;
        f.session.fsync(&f.file)
    })
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_rename(
    bridge: *mut Bridge,
    from: *const c_char,
    to: *const c_char,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promises.
        unsafe { given(bridge, "bridge")?.0.rename(text(from, "from")?, text(to, "to")?) }
    })
}

/// Writes the report for the caller; returns the error, if the call failed.
///
/// # Safety
/// `to` passed [`ReportOut::check`].
unsafe fn told(outcome: Result<Report, Failed>, to: *mut ReportOut) -> Result<()> {
    let (report, error) = match outcome {
        Ok(report) => (report, None),
        Err(Failed { error, report }) => (*report, Some(error)),
    };
    Texts::set_report(&report);
    // SAFETY: the caller's promise.
    unsafe { ReportOut::write(to, &report) };
    error.map_or(Ok(()), Err)
}

/// # Safety
/// `p` is valid for `n` ranges unless that is 0.
unsafe fn transfers(session: &Arc<Session>, p: *const Range, n: usize) -> Result<Vec<Transfer>> {
    let transfer = |(i, r): (usize, &Range)| {
        // SAFETY: the caller's promise.
        let f =
            unsafe { r.file.as_ref() }.ok_or_else(|| inval(format!("range {i}: file is NULL")))?;
        if !Arc::ptr_eq(&f.session, session) {
            return Err(inval(format!("range {i}: the file belongs to another bridge")));
        }
        Ok(Transfer { file: f.for_calls()?, offset: r.offset, gpu: r.address, len: r.length })
    };
    // SAFETY: the caller's promise.
    unsafe { ranges(p, n) }?.iter().enumerate().map(transfer).collect()
}

/// # Safety
/// Pointers as the header says.
unsafe fn call(
    direction: Direction,
    bridge: *mut Bridge,
    all: *const Range,
    n: usize,
    how: *const c_char,
    report: *mut ReportOut,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promises.
        let (session, policy) = unsafe { (&given(bridge, "bridge")?.0, policy(how)?) };
        // SAFETY: as above.
        unsafe { ReportOut::check(report) }?;
        // SAFETY: as above.
        let all = unsafe { transfers(session, all, n) }?;
        let outcome = match direction {
            Direction::Load => session.load(&all, policy),
            Direction::Save => session.save(&all, policy),
        };
        // SAFETY: the caller's promise.
        unsafe { told(outcome, report) }
    })
}

/// # Safety
/// Pointers as the header says.
unsafe fn start(
    direction: Direction,
    bridge: *mut Bridge,
    all: *const Range,
    n: usize,
    how: *const c_char,
    stream: *mut c_void,
    to: *mut *mut Started,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promises.
        let (session, policy) = unsafe { (&given(bridge, "bridge")?.0, policy(how)?) };
        if to.is_null() {
            return Err(inval("call is NULL"));
        }
        // SAFETY: as above.
        let started = unsafe {
            session.start(direction, transfers(session, all, n)?, policy, stream as u64)
        }?;
        // SAFETY: just checked.
        unsafe { put_out(to, Box::into_raw(Box::new(started)), "call") }
    })
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_start_load(
    bridge: *mut Bridge,
    ranges: *const Range,
    n: usize,
    policy: *const c_char,
    stream: *mut c_void,
    call: *mut *mut Started,
) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { start(Direction::Load, bridge, ranges, n, policy, stream, call) }
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_start_save(
    bridge: *mut Bridge,
    ranges: *const Range,
    n: usize,
    policy: *const c_char,
    stream: *mut c_void,
    call: *mut *mut Started,
) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { start(Direction::Save, bridge, ranges, n, policy, stream, call) }
}

/// # Safety
/// The call was started and is not finished.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_is_done(call: *mut Started) -> c_int {
    let mut done = 0;
    let failed = guarded(|| {
        // SAFETY: the caller's promise.
        done = c_int::from(unsafe { given(call, "call") }?.is_done());
        Ok(())
    });
    if failed != 0 { failed } else { done }
}

/// # Safety
/// The call was started or is null, and is not used any more; the report as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_finish(call: *mut Started, report: *mut ReportOut) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        unsafe { ReportOut::check(report) }?;
        if call.is_null() {
            return Err(inval("call is NULL"));
        }
        // SAFETY: made by `start`, and finished once, as the caller promises.
        let outcome = unsafe { Box::from_raw(call) }.finish();
        // SAFETY: the caller's promise.
        unsafe { told(outcome, report) }
    })
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_load(
    bridge: *mut Bridge,
    ranges: *const Range,
    n: usize,
    policy: *const c_char,
    report: *mut ReportOut,
) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(Direction::Load, bridge, ranges, n, policy, report) }
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_save(
    bridge: *mut Bridge,
    ranges: *const Range,
    n: usize,
    policy: *const c_char,
    report: *mut ReportOut,
) -> c_int {
    // SAFETY: the caller's promises.
    unsafe { call(Direction::Save, bridge, ranges, n, policy, report) }
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_replace(
    bridge: *mut Bridge,
    path: *const c_char,
    mode: u32,
    all: *const Range,
    n: usize,
    how: *const c_char,
    report: *mut ReportOut,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promises.
        let (session, path) = unsafe { (&given(bridge, "bridge")?.0, text(path, "path")?) };
        // SAFETY: the caller's promises.
        let (all, policy) = unsafe { (ranges(all, n)?, policy(how)?) };
        // SAFETY: as above.
        unsafe { ReportOut::check(report) }?;
        let device: Vec<(u64, u64)> = all.iter().map(|r| (r.address, r.length)).collect();
        let outcome = session.replace(path, mode, Content { head: &[], device: &device }, policy);
        // SAFETY: the caller's promise.
        unsafe { told(outcome, report) }
    })
}

/// The report of the thread's last load or save.
#[unsafe(no_mangle)]
pub extern "C" fn strakegds_report_json() -> *const c_char {
    Texts::report()
}

/// # Safety
/// The bridge is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_settle(bridge: *mut Bridge) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        Ok(unsafe { given(bridge, "bridge") }?.0.device().settle()?)
    })
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_alloc(
    bridge: *mut Bridge,
    length: u64,
    address: *mut u64,
) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        let device = unsafe { given(bridge, "bridge") }?.0.device().clone();
        if address.is_null() {
            return Err(inval("address is NULL"));
        }
        let addr = device.alloc(length)?;
        // SAFETY: just checked.
        unsafe { put_out(address, addr, "address") }
    })
}

/// # Safety
/// The bridge is open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_free(bridge: *mut Bridge, address: u64) -> c_int {
    guarded(|| {
        // SAFETY: the caller's promise.
        Ok(unsafe { given(bridge, "bridge") }?.0.device().free(address)?)
    })
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_put(
    bridge: *mut Bridge,
    to: u64,
    from: *const c_void,
    length: usize,
) -> c_int {
    guarded(|| {
        if from.is_null() && length > 0 {
            return Err(inval("from is NULL"));
        }
        // SAFETY: the caller's promise.
        let session = &unsafe { given(bridge, "bridge") }?.0;
        let from = if length == 0 { ptr::dangling() } else { from.cast::<u8>() };
        // SAFETY: just checked, and the caller's promise of its length.
        Ok(session.put(to, unsafe { std::slice::from_raw_parts(from, length) })?)
    })
}

/// # Safety
/// Pointers as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn strakegds_get(
    bridge: *mut Bridge,
    to: *mut c_void,
    from: u64,
    length: usize,
) -> c_int {
    guarded(|| {
        if to.is_null() && length > 0 {
            return Err(inval("to is NULL"));
        }
        // SAFETY: the caller's promise.
        let session = &unsafe { given(bridge, "bridge") }?.0;
        let to = if length == 0 { ptr::dangling_mut() } else { to.cast::<u8>() };
        // SAFETY: just checked, and the caller's promise of its length; C has no other references
        // to it.
        Ok(session.get(from, unsafe { std::slice::from_raw_parts_mut(to, length) })?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::fail;

    #[test]
    fn a_panic_is_an_error_of_its_call() {
        assert_eq!(guarded(|| panic!("on purpose")), -Code::Io.errno());
        // SAFETY: the text of this thread.
        let said = unsafe { CStr::from_ptr(strakegds_error()) }.to_str().unwrap();
        assert!(said.contains("on purpose"), "{said}");
        assert_eq!(guarded(|| Ok(())), 0);
        // SAFETY: as above.
        assert!(unsafe { CStr::from_ptr(strakegds_error()) }.is_empty());
        assert_eq!(fail(&inval("a zero\0within")), -libc::EINVAL);
    }
}
