//! Why calls fail, and how programs learn of it.

use std::{ffi::c_int, fs::OpenOptions, io::Write, panic::AssertUnwindSafe, panic::catch_unwind};

use strake_gds::{Fault, Unavailable};
use strake_proto::{Code, Error};

use crate::{
    abi::{self, Status},
    set,
};

/// Why a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    /// A code of cuFile's.
    Op(c_int),
    /// An error number of the CUDA driver.
    Cuda(c_int),
    /// An errno of the file system.
    Os(c_int),
}

/// The result of a call that may fail with [`CallError`].
pub type Done<T> = Result<T, CallError>;

/// Logs a reason for people, because codes say little. `STRAKE_GDS_LOG` names a file or `stderr`.
pub fn say(text: impl FnOnce() -> String) {
    let Some(to) = set::os("STRAKE_GDS_LOG") else { return };
    let line = format!("strake_cufile[{}]: {}\n", std::process::id(), text());
    if to == "stderr" {
        let _ = std::io::stderr().write_all(line.as_bytes());
    } else if let Ok(mut f) = OpenOptions::new().create(true).append(true).open(to) {
        let _ = f.write_all(line.as_bytes());
    }
}

impl CallError {
    /// The return value of control calls. Errno values there come from opening files.
    pub fn status(self) -> Status {
        match self {
            CallError::Op(code) => Status::of(code),
            CallError::Cuda(cu_err) => Status { err: abi::CUDA_DRIVER_ERROR, cu_err },
            CallError::Os(libc::EACCES | libc::EPERM) => Status::of(abi::PERMISSION_DENIED),
            CallError::Os(_) => Status::of(abi::INTERNAL_ERROR),
        }
    }

    /// The return value of calls that move bytes: -1 with errno set, or a negative code. Never a
    /// value that could be a number of bytes.
    pub fn negative(self) -> isize {
        match self {
            CallError::Op(code) => -(code as isize),
            CallError::Cuda(_) => -(abi::CUDA_DRIVER_ERROR as isize),
            CallError::Os(errno) => {
                // SAFETY: errno of the calling thread.
                unsafe { *libc::__errno_location() = errno };
                -1
            }
        }
    }

    /// As [`CallError::negative`], for batch events, which have no errno: the negative errno
    /// itself.
    pub fn in_event(self) -> isize {
        match self {
            CallError::Os(errno) => -(errno as isize),
            other => other.negative(),
        }
    }

    /// The error of a call that moves bytes.
    pub fn of_io(e: &Error) -> CallError {
        match e.code {
            Code::OpNotSupp => CallError::Op(abi::IO_NOT_SUPPORTED),
            Code::NoDev => CallError::Op(abi::CUDA_DRIVER_ERROR),
            // The client has stopped retrying: "try again" would make the program loop.
            _ if e.errno() == libc::EAGAIN => CallError::Os(libc::EIO),
            _ => CallError::Os(e.errno()),
        }
    }

    /// The error of connecting to the cluster and opening a file there.
    pub fn of_open(e: &Error) -> CallError {
        match e.code {
            Code::Access
            | Code::Perm
            | Code::RoFs
            | Code::NoEnt
            | Code::BadCap
            | Code::Unauthenticated => CallError::Op(abi::PERMISSION_DENIED),
            Code::Inval => CallError::Op(abi::INVALID_VALUE),
            Code::NoDev => CallError::Op(abi::DEVICE_NOT_FOUND),
            _ => CallError::Op(abi::INTERNAL_ERROR),
        }
    }
}

impl From<&Fault> for CallError {
    fn from(f: &Fault) -> CallError {
        match f {
            Fault::Foreign { .. } | Fault::Freed { .. } => CallError::Op(abi::CUDA_POINTER_INVALID),
            Fault::Beyond { .. } => CallError::Op(abi::CUDA_POINTER_RANGE_ERROR),
            // CUDA_ERROR_STREAM_CAPTURE_*: the stream records a graph, and a call must not wait for
            // it.
            Fault::Driver { code: 900..=908, .. } => CallError::Op(abi::ASYNC_NOT_SUPPORTED),
            Fault::Driver { code, .. } => CallError::Cuda(*code),
            Fault::Damaged { .. } | Fault::Export { .. } | Fault::Sums { .. } => {
                CallError::Os(libc::EIO)
            }
            Fault::Detour { .. } | Fault::BadCopy { .. } => CallError::Os(libc::EIO),
            Fault::ContextGone
            | Fault::NoMemory { .. }
            | Fault::NotStraight { .. }
            | Fault::Pin { .. } => CallError::Op(abi::CUDA_DRIVER_ERROR),
        }
    }
}

impl From<&Unavailable> for CallError {
    fn from(why: &Unavailable) -> CallError {
        match why {
            Unavailable::NoDevice { .. } => CallError::Op(abi::DEVICE_NOT_FOUND),
            Unavailable::Device(f) => f.into(),
            _ => CallError::Op(abi::CUDA_DRIVER_ERROR),
        }
    }
}

/// Runs `f`. A panic becomes an error of the call and does not unwind into the program.
pub fn caught<T>(f: impl FnOnce() -> Done<T>) -> Done<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|cause| {
        let text = cause.downcast_ref::<&str>().copied();
        let text = text
            .or_else(|| cause.downcast_ref::<String>().map(String::as_str))
            .unwrap_or("no text");
        say(|| format!("a bug in this library: {text}"));
        Err(CallError::Op(abi::INTERNAL_ERROR))
    })
}

/// The body of a control call.
pub fn control(f: impl FnOnce() -> Done<()>) -> Status {
    caught(f).map_or_else(CallError::status, |()| Status::OK)
}

/// The body of a call that moves bytes. On success errno stays as it is.
pub fn moving(f: impl FnOnce() -> Done<usize>) -> isize {
    // The number of bytes always fits into `isize`, because larger requests are refused.
    caught(f)
        .and_then(|n| isize::try_from(n).map_err(|_| CallError::Op(abi::INTERNAL_ERROR)))
        .unwrap_or_else(CallError::negative)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_went_wrong_looks_like_bytes() {
        for code in Code::ALL {
            let e = Error::new(*code, "x");
            for w in [CallError::of_io(&e), CallError::of_open(&e)] {
                assert!(
                    w.negative() < 0 && w.in_event() < 0 && w.status().err >= 5000,
                    "{code:?}: {w:?}"
                );
                assert_ne!(w, CallError::Os(libc::EAGAIN), "{code:?}");
            }
        }
        let fault = Fault::Driver { call: "x", code: 700, name: "y".into() };
        assert_eq!(CallError::from(&fault).status(), Status { err: 5011, cu_err: 700 });
        assert_eq!(CallError::from(&fault).negative(), -5011);
    }

    #[test]
    fn a_panic_is_an_error_of_its_call() {
        assert_eq!(control(|| panic!("on purpose")), Status::of(abi::INTERNAL_ERROR));
        assert_eq!(moving(|| panic!("on purpose")), -5030);
        assert_eq!(moving(|| Err(CallError::Os(libc::ENOSPC))), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(moving(|| Ok(usize::MAX)), -5030);
    }
}
