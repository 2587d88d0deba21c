//! NVIDIA's library, for files that are not ours. It is opened at run time when the first such file
//! is registered, and is not called before.

use std::{
    cell::Cell,
    ffi::{CStr, c_char, c_int, c_long, c_uint, c_void},
    fs::File,
    os::fd::BorrowedFd,
    sync::OnceLock,
};

use strake_gds::local::library::{Library, candidates};

use crate::{
    abi::{self, Descriptor, Event, IoVec, Params, Status},
    errors::{CallError, Done, say},
};

type Slabs = unsafe extern "C" fn(*const usize, *const usize, c_int) -> Status;

macro_rules! functions {
    ($($field:ident = $symbol:literal: $type:ty;)*) => {
        /// The real library's functions; older versions lack some.
        #[allow(missing_docs, reason = "named as in the interface")]
        pub struct Vendor {
            library: Library,
            $(pub $field: Option<$type>,)*
        }

        impl Vendor {
            fn of(library: Library) -> Vendor {
                Vendor {
                    library,
                    // SAFETY: the symbol is a function of cuFile's interface with this type, or is
                    // missing.
                    $($field: unsafe { library.function::<$type>($symbol) },)*
                }
            }
        }
    };
}

functions! {
    driver_open = c"cuFileDriverOpen": unsafe extern "C" fn() -> Status;
    driver_close = c"cuFileDriverClose_v2": unsafe extern "C" fn() -> Status;
    use_count = c"cuFileUseCount": unsafe extern "C" fn() -> c_long;
    handle_register = c"cuFileHandleRegister": unsafe extern "C" fn(*mut *mut c_void, *mut Descriptor) -> Status;
    handle_deregister = c"cuFileHandleDeregister": unsafe extern "C" fn(*mut c_void);
    buf_register = c"cuFileBufRegister": unsafe extern "C" fn(*const c_void, usize, c_int) -> Status;
    buf_deregister = c"cuFileBufDeregister": unsafe extern "C" fn(*const c_void) -> Status;
    read = c"cuFileRead": unsafe extern "C" fn(*mut c_void, *mut c_void, usize, i64, i64) -> isize;
    write = c"cuFileWrite": unsafe extern "C" fn(*mut c_void, *const c_void, usize, i64, i64) -> isize;
    readv = c"cuFileReadv": unsafe extern "C" fn(*mut c_void, *const IoVec, usize, i64, c_uint) -> isize;
    writev = c"cuFileWritev": unsafe extern "C" fn(*mut c_void, *const IoVec, usize, i64, c_uint) -> isize;
    read_async = c"cuFileReadAsync": Stream;
    write_async = c"cuFileWriteAsync": Stream;
    stream_register = c"cuFileStreamRegister": unsafe extern "C" fn(*mut c_void, c_uint) -> Status;
    stream_deregister = c"cuFileStreamDeregister": unsafe extern "C" fn(*mut c_void) -> Status;
    batch_setup = c"cuFileBatchIOSetUp": unsafe extern "C" fn(*mut *mut c_void, c_uint) -> Status;
    batch_submit = c"cuFileBatchIOSubmit": unsafe extern "C" fn(*mut c_void, c_uint, *mut Params, c_uint) -> Status;
    batch_status = c"cuFileBatchIOGetStatus": unsafe extern "C" fn(*mut c_void, c_uint, *mut c_uint, *mut Event, *mut libc::timespec) -> Status;
    batch_cancel = c"cuFileBatchIOCancel": unsafe extern "C" fn(*mut c_void) -> Status;
    batch_destroy = c"cuFileBatchIODestroy": unsafe extern "C" fn(*mut c_void);
    version = c"cuFileGetVersion": unsafe extern "C" fn(*mut c_int) -> Status;
    set_size = c"cuFileSetParameterSizeT": unsafe extern "C" fn(c_int, usize) -> Status;
    set_bool = c"cuFileSetParameterBool": unsafe extern "C" fn(c_int, u8) -> Status;
    set_string = c"cuFileSetParameterString": unsafe extern "C" fn(c_int, *const c_char) -> Status;
    set_posix_slabs = c"cuFileSetParameterPosixPoolSlabArray": Slabs;
    set_gpu_slabs = c"cuFileSetParameterGpuBounceBufferSlabArray": Slabs;
    bar_size = c"cuFileGetBARSizeInKB": unsafe extern "C" fn(c_int, *mut usize) -> Status;
    topology = c"cuFileExportPCIeTopology": unsafe extern "C" fn(*const c_char) -> Status;
    get_p2p = c"cuFileDriverGetP2PFlags": unsafe extern "C" fn(c_int, *mut c_int) -> Status;
    set_p2p = c"cuFileDriverSetP2PFlags": unsafe extern "C" fn(c_int, c_int) -> Status;
}

/// Error codes that versions before [`NEGATIVE_SINCE`] return as positive numbers, as if they were
/// numbers of bytes.
const CODES: std::ops::RangeInclusive<c_int> = 5001..=5099;
/// The first version that returns errors as negative numbers.
const NEGATIVE_SINCE: c_int = 1160;

/// The range that a call was asked to read or write.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// The descriptor, where the file has one.
    pub fd: Option<c_int>,
    pub offset: i64,
    pub most: usize,
}

impl Range {
    /// Whether the file ends exactly `n` bytes behind the range's offset.
    fn ends(&self, n: usize) -> bool {
        let (Some(fd), Some(end)) =
            (self.fd, i64::try_from(n).ok().and_then(|n| self.offset.checked_add(n)))
        else {
            return false;
        };
        // SAFETY: cuFile requires programs to keep the descriptor open as long as the handle. If it
        // now means another file, only the comparison of sizes is wrong.
        rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) }).is_ok_and(|s| s.st_size == end)
    }
}

/// `cuFileReadAsync` and `cuFileWriteAsync`.
pub type Stream = unsafe extern "C" fn(
    *mut c_void,
    *mut c_void,
    *mut usize,
    *mut i64,
    *mut i64,
    *mut isize,
    *mut c_void,
) -> Status;

static REAL: OnceLock<Result<Vendor, String>> = OnceLock::new();

thread_local! {
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

fn load(opened: fn()) -> Result<Vendor, String> {
    // Opening its driver would hang where this file cannot be read.
    if let Err(e) = File::open("/proc/modules") {
        return Err(format!("the real libcufile would hang here: /proc/modules: {e}"));
    }
    let mut all = Vec::new();
    for name in candidates() {
        match Library::open(&name) {
            Ok(library) => {
                opened();
                return Ok(Vendor::of(library));
            }
            Err(why) => all.push(why),
        }
    }
    Err(format!("the real libcufile is not available: {}", all.join("; ")))
}

impl Vendor {
    /// The real library. The search for it runs once, and calls `opened` if it has found it.
    pub fn get(opened: fn()) -> Done<&'static Vendor> {
        REAL.get_or_init(|| load(opened)).as_ref().map_err(|why| {
            say(|| why.clone());
            CallError::Op(abi::IO_NOT_SUPPORTED)
        })
    }

    /// The real library, if it has been opened.
    pub fn known() -> Option<&'static Vendor> {
        REAL.get()?.as_ref().ok()
    }

    /// Calls a function of the real library. If that calls interface functions that resolve to this
    /// library, they are passed back to it: see [`inside`].
    pub fn call<F: Copy, T>(&self, f: Option<F>, call: impl FnOnce(F) -> T) -> Done<T> {
        let Some(f) = f else {
            say(|| "the real libcufile is too old for this call".into());
            return Err(CallError::Op(abi::PLATFORM_NOT_SUPPORTED));
        };
        struct Out;
        impl Drop for Out {
            fn drop(&mut self) {
                INSIDE.set(INSIDE.get() - 1);
            }
        }
        INSIDE.set(INSIDE.get() + 1);
        let _out = Out;
        Ok(call(f))
    }

    /// As [`Vendor::call`], for a function that returns a status.
    pub fn control<F: Copy>(&self, f: Option<F>, call: impl FnOnce(F) -> Status) -> Done<()> {
        let s = self.call(f, call)?;
        match s.err {
            abi::SUCCESS => Ok(()),
            abi::CUDA_DRIVER_ERROR => Err(CallError::Cuda(s.cu_err)),
            // Positive values are cuFile's codes. A negative value is none and is not passed on.
            code if code > 0 => Err(CallError::Op(code)),
            _ => Err(CallError::Op(abi::INTERNAL_ERROR)),
        }
    }

    /// The version that the library reports; 0 if it reports none.
    fn number(&self) -> c_int {
        let mut n = 0;
        // SAFETY: writes one number.
        match self.control(self.version, |f| unsafe { f(&mut n) }) {
            Ok(()) => n,
            Err(_) => 0,
        }
    }

    /// Checks that a result is a number of bytes, and not an error code that looks like one.
    fn bytes(&self, n: usize, asked: &Range) -> Done<usize> {
        let code = c_int::try_from(n).ok().filter(|code| CODES.contains(code));
        let believed = match code {
            _ if n > asked.most => false,
            None => true,
            // As many bytes as requested: believed from a version that returns no such codes.
            Some(_) if n == asked.most => self.number() >= NEGATIVE_SINCE,
            // Fewer bytes: believed if the file ends there.
            Some(_) => asked.ends(n),
        };
        if believed {
            return Ok(n);
        }
        say(|| {
            format!(
                "the real libcufile returned {n} bytes although {} were requested: treated as an \
                 error",
                asked.most
            )
        });
        Err(CallError::Op(code.unwrap_or(abi::INTERNAL_ERROR)))
    }

    /// The same check for an event of a batch.
    pub fn event(&self, e: &mut Event, asked: &Range) {
        let Ok(n) = usize::try_from(e.ret) else { return };
        if let Err(w) = self.bytes(n, asked) {
            (e.status, e.ret) = (abi::FAILED, w.in_event());
        }
    }

    /// As [`Vendor::call`], for a function that moves bytes. Versions up to 1.15 return positive
    /// codes from failed calls.
    pub fn moving<F: Copy>(
        &self,
        f: Option<F>,
        asked: &Range,
        call: impl FnOnce(F) -> isize,
    ) -> Done<usize> {
        let n = self.call(f, call)?;
        match usize::try_from(n) {
            Ok(n) => self.bytes(n, asked),
            Err(_) if n == -1 => Err(CallError::Os(
                std::io::Error::last_os_error()
                    .raw_os_error()
                    .filter(|e| *e != 0)
                    .unwrap_or(libc::EIO),
            )),
            Err(_) => Err(CallError::Op(c_int::try_from(-n).unwrap_or(abi::INTERNAL_ERROR))),
        }
    }

    /// The path of the library, for people.
    pub fn place(&self) -> String {
        let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: asks the loader for the location of a function; the returned strings are the
        // loader's constants.
        unsafe {
            let at = self.library.symbol(c"cuFileRead");
            if libc::dladdr(at, info.as_mut_ptr()) == 0 || (*info.as_ptr()).dli_fname.is_null() {
                return "unknown".into();
            }
            CStr::from_ptr((*info.as_ptr()).dli_fname).to_string_lossy().into_owned()
        }
    }
}

/// The real library, if this thread is inside one of its functions. Then the library itself made
/// this call, which is passed back unchanged.
pub fn inside() -> Option<&'static Vendor> {
    if INSIDE.get() == 0 { None } else { Vendor::known() }
}
