//! Libraries in place of NVIDIA's, which tests compile from `tests/standin`.

use std::{
    ffi::{CString, c_void},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    process::Command,
};

/// Compiles a source file of `tests/standin` to the library `to`. Prints a message and returns
/// `None` where there is no compiler.
pub fn compile(source: &str, to: PathBuf, flags: &[&str]) -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/standin").join(source);
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", "-o"]);
    match cc.arg(&to).arg(source).args(flags).output() {
        Ok(out) => assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr)),
        Err(e) => {
            println!("skipped: no C compiler here ({e})");
            return None;
        }
    }
    Some(to)
}

/// A function that only the library in place of another has.
pub fn own(library: &Path, name: &str) -> *mut c_void {
    let (library, name) =
        (CString::new(library.as_os_str().as_bytes()).unwrap(), CString::new(name).unwrap());
    // SAFETY: opens a library that is open already, and looks up a name.
    let f = unsafe { libc::dlsym(libc::dlopen(library.as_ptr(), libc::RTLD_NOW), name.as_ptr()) };
    assert!(!f.is_null());
    f
}
