//! The StrakeFS mount: turns kernel requests into [`strake_client`] calls.
//!
//! Three layers, top to bottom: [`transport`](self) speaks a kernel protocol (`/dev/fuse`, by our
//! own implementation or through the fuser crate), [`vfs`] says what each request means in plain
//! types, and the client executes it. `docs/fuse.md` says what the kernel may cache, what is local
//! to one mount and what does not work.

mod handover;
mod mount;
mod mountpoint;
pub mod supervisor;
pub mod table;
mod transport;
pub mod vfs;

pub use handover::{HandoverMemory, LeftRequest};
pub use mount::{Mount, MountConfig, Transport, attach, learn, mount, serve};
pub use mountpoint::{can_mount, fusermount, remount};
pub use rustix::mount::MountFlags;
pub use transport::{
    dev::interim::Interim,
    kernel::{MAX_REQUEST, MountedSession, OPEN_FLAGS, negotiate},
};
