//! The file system as a library: names, attributes and striped file I/O over the metadata and
//! storage servers.
//!
//! ```no_run
//! # async fn example(fabric: std::sync::Arc<dyn strake_fabric::Fabric>) -> strake_proto::Result<()> {
//! use strake_client::{Client, Config, Creds};
//!
//! let config = Config::new(vec!["tcp:mds1:7400".parse()?, "tcp:mds2:7400".parse()?]);
//! let client = Client::connect(config, strake_runtime::Env::system(), fabric).await?;
//! let me = Creds { uid: 1000, gid: 1000, groups: vec![] };
//! let (file, _) = client.create(&me, client.root(), b"data", 0o644, 2, false, None).await?;
//! file.write_all_at(0, b"hello").await?;
//! file.close().await?; // stable on every in-sync replica from here on
//! client.close().await
//! # }
//! ```
//!
//! `docs/client.md` says what is cached, for how long, and what happens to unstable bytes when
//! servers fail.
//!
//! Where to read, by folder:
//!
//! | folder | what |
//! |---|---|
//! | `api/` | what callers see: [`Client`] with its handles ([`Locks`], [`Copies`], …), [`File`], names |
//! | `metadata/` | the connection to the metadata leader, the session, opens, followers |
//! | `leases/` | what is answered from memory under leases, and recalls of it |
//! | `locks/` | file locks, and locks of pages for memory mappings |
//! | `data/` | requests to storage servers: connections, replicas, retries |
//! | `read/` | the read cache and read-ahead |
//! | `write/` | write-back, unstable writes, flushes, grants of space |
//! | `inode/` | what all handles of one file share |
//! | `handover/` | what a client leaves to the next client of the same mount |
//! | `shared/` | retries, and servers that do not answer |
//!
//! `core.rs` wires them, `background.rs` has the background tasks. In each folder `service.rs` (in
//! `write/` also `held_writes.rs`) has the state of a service; the files beside it have the
//! operations on it.
//!
//! Pure tables without clock, task or socket: `leases/table.rs`, `leases/recent_lookups.rs`,
//! `locks/pages.rs`, `locks/waiting_list.rs`, `write/dirty.rs`, `write/grants.rs`,
//! `write/unstable.rs`, `write/ranges.rs`, `read/cache.rs`, `read/readahead.rs`,
//! `metadata/request_ids.rs`, `metadata/ops.rs`, `data/route.rs`, `shared/retry.rs`,
//! `inode/report.rs`, `inode/losses.rs`, `inode/missing.rs`.

#![warn(missing_docs)]
#![cfg_attr(not(test), warn(clippy::unwrap_used, clippy::expect_used))]

mod api;
mod background;
mod config;
mod core;
mod data;
mod handover;
mod inode;
pub mod leases;
mod locks;
mod metadata;
mod read;
pub mod rows;
mod shared;
mod write;

pub use api::{
    client::Client,
    copies::Copies,
    file::{AppendPart, AsOf, File, Landed, Turn},
    layouts::{LayoutInfo, Layouts},
    names::{DirPage, Mode},
    seals::Seals,
    servers::Servers,
    space::Space,
    xattrs::Xattrs,
};
pub use config::{Config, FOREVER, FollowerReads, Stats};
pub use data::foreign::Arrived;
pub use handover::{
    Appended, FileRecord, Handover, KeptWrite, LeftWrite, OperationRecord, WriteKind, WriteRecord,
    operation::{Caller, Operation},
    takeover::Former,
};
pub use leases::lease_cache::{Forget, Forgetting};
pub use locks::{
    Holder, Lock, LockKind, LockType, Locked, Locks, MAX_WAITS, Programs,
    page_uses::Using,
    unlocking::{Unlocking, Unlocks},
};
#[doc(hidden)]
pub use locks::{pages, unlocking, waiting_list};
pub use strake_proto::{
    ids::ROOT_INO,
    pb::{Attr, Creds, Layout, LayoutSpec, SetAttr, StatfsReply, Transports},
};
#[doc(hidden)]
pub use write::dirty;
