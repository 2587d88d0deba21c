//! `/dev/fuse` through the fuser crate: `session` negotiates and runs, `requests` translates,
//! `signals` looks for interrupted callers.

mod requests;
mod session;
mod signals;

pub(crate) use requests::Requests;
pub use session::{MountedSession, OPEN_FLAGS, negotiate};
