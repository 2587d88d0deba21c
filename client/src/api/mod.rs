//! What callers of the client see.

mod allocated;
pub mod client;
pub mod file;
pub mod names;
