//! What the environment sets. A program that runs with more rights than who started it (set-user-ID, file capabilities) believes none of it: it could load
//! any library, write over any file, or be sent to anybody's servers.

use std::ffi::{OsString, c_int};

use crate::abi;

/// Whether whoever started the program has fewer rights than it.
fn privileged() -> bool {
    // SAFETY: reads a word that the kernel gave the process.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// A variable that is set to something.
pub fn os(name: &str) -> Option<OsString> {
    if privileged() { None } else { std::env::var_os(name).filter(|v| !v.is_empty()) }
}

/// The same, as text.
pub fn text(name: &str) -> Option<String> {
    os(name)?.into_string().ok()
}

/// The version of the interface that programs are told and have structs of.
pub fn version() -> c_int {
    let named = text("STRAKE_CUFILE_VERSION").and_then(|v| v.parse().ok());
    named.filter(|v| (1000..10_000).contains(v)).unwrap_or(abi::VERSION)
}
