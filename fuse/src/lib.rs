//! The StrakeFS mount: turns kernel requests into [`strake_client`] calls.
//!
//! The layers, from the lowest: [`vfs`] says what each request means in plain types, and has the
//! client execute it; `transport` speaks a kernel protocol (`/dev/fuse`, by our own implementation
//! or, with the feature `fuser`, through the fuser crate) and calls [`vfs`]; [`mount()`] wires both;
//! [`supervisor`] keeps a mount alive. Below all of them: how to mount (`config`), the mountpoint,
//! the kernel's [`table`] of mounts, and the memory that outlives a daemon (`handover`).
//! `docs/fuse.md` says what the kernel may cache, what is local to one mount and what does not work.

#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

mod config;
#[doc(hidden)]
pub mod fuzzing;
mod handover;
mod mount;
mod mountpoint;
pub mod supervisor;
pub mod table;
mod transport;
pub mod vfs;

pub use config::{MountConfig, Transport};
pub use handover::{HandoverMemory, LeftRequest};
pub use mount::{Mount, attach, learn, mount, serve};
pub use mountpoint::{can_mount, fusermount, remount};
pub use rustix::mount::MountFlags;
pub use transport::dev::Interim;
#[cfg(feature = "fuser")]
pub use transport::fuser::{MountedSession, OPEN_FLAGS, negotiate};
pub use vfs::MAX_REQUEST;
