//! The public interface of the client.

pub mod client;
pub mod copies;
pub mod file;
pub mod layouts;
pub mod names;
pub mod seals;
pub mod servers;
pub mod space;
pub mod xattrs;
