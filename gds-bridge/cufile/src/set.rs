//! What the environment sets. A program that runs with more rights than who started it
//! (set-user-ID, file capabilities) believes none of it: it could load any library, write over any
//! file, or be sent to anybody's servers.

use std::ffi::c_int;

pub use strake_gds::local::library::variable as os;

use crate::abi;

/// A variable that is set to something, as text.
pub fn text(name: &str) -> Option<String> {
    os(name)?.into_string().ok()
}

/// The version of the interface that programs are told and have structs of.
pub fn version() -> c_int {
    let named = text("STRAKE_CUFILE_VERSION").and_then(|v| v.parse().ok());
    named.filter(|v| (1000..10_000).contains(v)).unwrap_or(abi::VERSION)
}
