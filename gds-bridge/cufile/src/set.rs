//! Settings from environment variables. A program with more rights than the user who started it
//! (set-user-ID, file capabilities) ignores all of them: they could make it load any library,
//! overwrite any file, or connect to any server.

use std::ffi::c_int;

pub use strake_gds::local::library::variable as os;

use crate::abi;

/// A variable's value as text, if it is set and not empty.
pub fn text(name: &str) -> Option<String> {
    os(name)?.into_string().ok()
}

/// The version of the interface that programs are told; it also decides the layout of structs.
pub fn version() -> c_int {
    let named = text("STRAKE_CUFILE_VERSION").and_then(|v| v.parse().ok());
    named.filter(|v| (1000..10_000).contains(v)).unwrap_or(abi::VERSION)
}
