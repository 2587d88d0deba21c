//! What callers of the client see.

pub mod client;
pub mod file;
pub mod names;
