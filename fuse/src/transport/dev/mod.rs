//! Our own implementation of the `/dev/fuse` protocol, without a library.
//!
//! `channel` reads requests and writes replies; `copies` revokes what the kernel was told;
//! `request`, `reply`, `init` and `notify` are the protocol itself, pure; `session` runs the
//! threads; `progress` knows how far the threads have come; `interim` answers while no daemon does;
//! `mapped` and `pages` order memory mappings with all other changes, `shared` with other nodes;
//! `moved` makes the kernel forget earlier places of directories; `interrupts` releases callers
//! that were killed; `running` knows which programs run; `serve` runs requests; `answer` asks the
//! [VFS core](crate::vfs) and makes the replies; `kept` is what the next daemon must know of the
//! negotiation; `start` begins it all. See `docs/fuse.md`.

mod abi;
mod answer;
mod channel;
mod copies;
pub(crate) mod fuzzing;
mod init;
mod interim;
mod interrupts;
mod kept;
mod mapped;
mod moved;
mod notify;
mod order;
mod pages;
mod progress;
mod reply;
mod request;
mod running;
mod serve;
mod session;
mod shared;
mod start;

pub use interim::Interim;
pub(crate) use notify::{Notice, inode_changed, name_changed};
pub(crate) use serve::Serve;
pub(crate) use session::Session;
pub(crate) use start::{attach, start};
