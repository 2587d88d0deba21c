//! The meaning of kernel requests: the file system as a set of calls in plain types, for any
//! transport.
//!
//! Inode numbers are StrakeFS inode numbers, which are never reused, so there is no inode table and
//! no lookup count. Open files and directories are in tables by handle number. Every call may run
//! concurrently with any other.
//!
//! [`Vfs`] holds the parts ([`Names`], [`Files`], [`Dirs`], [`Xattrs`], [`Locks`]), each with the
//! state that it needs. What several parts need lies below them: `base` (the client and the mount's
//! memory), the tables of open files and directories, `folders` and `gone` (directories that were
//! removed), `claims` (lookups of a rename), `known` (what is shown while no server answers).

mod base;
mod calls;
mod claims;
mod dirs;
mod files;
mod folders;
mod gone;
mod groups;
mod handles;
mod ioctl;
mod known;
mod locks;
mod names;
mod open_file;
#[doc(hidden)]
pub mod owners;
mod parts;
mod records;
mod restart;
mod subtree;
mod types;
mod validity;
mod xattr;

pub use dirs::Dirs;
pub use files::Files;
pub(crate) use files::{Released, makes_zeros};
pub(crate) use groups::parse as groups_in;
pub(crate) use known::Known;
pub use locks::Locks;
pub(crate) use locks::{Leaving, Queue, Soon};
pub use names::Names;
pub(crate) use names::exchanges;
pub use parts::{Vfs, View};
pub use strake_client::{Holder, Lock, LockKind, LockType};
pub use subtree::find_subtree;
pub(crate) use types::is_dir;
pub use types::{Caller, Change, CopyRange, Entry, MAX_REQUEST, Opened, Place, Stat, Time};
pub(crate) use xattr::map_part;
pub use xattr::{MAP_HEAD, MAP_PART, Xattrs};
