//! Errors and texts of the thread that calls, and panics that become errors.

use std::{
    any::Any,
    cell::RefCell,
    ffi::{CString, c_char, c_int},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr,
};

use strake_gds::Report;
use strake_proto::{Code, Error, Result};

/// The last texts of this thread. The pointers that the program gets point into them.
#[derive(Default)]
pub struct Texts {
    error: CString,
    report: CString,
    answer: CString,
}

thread_local! {
    static TEXTS: RefCell<Texts> = RefCell::default();
}

impl Texts {
    pub fn error() -> *const c_char {
        TEXTS.with_borrow(|t| t.error.as_ptr())
    }

    pub fn report() -> *const c_char {
        TEXTS.with_borrow(|t| t.report.as_ptr())
    }

    pub fn set_report(report: &Report) {
        let json = serde_json::to_string(report).unwrap_or_else(|e| format!("\"{e}\""));
        TEXTS.with_borrow_mut(|t| t.report = without_zeros(json));
    }

    pub fn answer(text: String) -> *const c_char {
        TEXTS.with_borrow_mut(|t| {
            t.answer = without_zeros(text);
            t.answer.as_ptr()
        })
    }
}

fn without_zeros(mut text: String) -> CString {
    text.retain(|c| c != '\0');
    CString::new(text).unwrap_or_default()
}

/// Keeps the error's message for the thread and returns the negative errno.
pub fn fail(e: &Error) -> c_int {
    TEXTS.with_borrow_mut(|t| t.error = without_zeros(e.message.clone()));
    -e.code.errno()
}

fn panicked(cause: &(dyn Any + Send)) -> Error {
    let text = cause.downcast_ref::<&str>().copied();
    let text =
        text.or_else(|| cause.downcast_ref::<String>().map(String::as_str)).unwrap_or("no text");
    Error::new(Code::Io, format!("a bug in this library: {text}"))
}

fn caught<T>(f: impl FnOnce() -> Result<T>) -> Result<T> {
    // A panic leaves only this call's own state half done: the locks of bridges and files stay
    // consistent.
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|cause| Err(panicked(&*cause)))
}

/// Runs a function's body: 0 or a negative errno.
pub fn guarded(f: impl FnOnce() -> Result<()>) -> c_int {
    match caught(f) {
        Ok(()) => {
            TEXTS.with_borrow_mut(|t| t.error = CString::default());
            0
        }
        Err(e) => fail(&e),
    }
}

/// As [`guarded`], for a function that returns a text: null after an error.
pub fn guarded_ptr(f: impl FnOnce() -> Result<*const c_char>) -> *const c_char {
    let mut to = ptr::null();
    guarded(|| {
        to = f()?;
        Ok(())
    });
    to
}
