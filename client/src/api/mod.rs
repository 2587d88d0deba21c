//! The public interface of the client.

mod allocated;
pub mod client;
pub mod file;
pub mod names;
