//! Block devices below the chunk engine: one trait, several implementations.
//!
//! | implementation | what it is |
//! |---|---|
//! | [`UringDevice`] | a file, block device or NVMe namespace (`/dev/ngXnY`) through io_uring |
//! | [`SpdkDevice`] | an NVMe namespace, local or remote, by SPDK in this process |
//! | [`FileDevice`] | the same through plain system calls, where io_uring is not available |
//! | [`MemDevice`] | memory that models power loss, errors and bit flips; the simulator's disk |
//!
//! [`UringDevice`] bypasses the page cache where the file system allows it, and sends NVMe commands
//! to a namespace. Offsets and lengths are in bytes, and multiples of [`BLOCK`].

mod api;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod file;
pub mod mem;
mod meter;
mod node;
pub mod nvme;
#[cfg(any(test, feature = "conformance"))]
mod random;
pub mod spdk;
#[cfg(test)]
mod tests;
mod uring;

use std::{path::Path, sync::Arc};

pub use api::{BLOCK, Device};
pub use file::FileDevice;
pub use mem::MemDevice;
pub use meter::Meter;
pub use spdk::SpdkDevice;
use strake_proto::Result;
pub use uring::UringDevice;

/// The best device for a file, block device or NVMe namespace: io_uring, or plain system calls with
/// a notice. A path that begins with `spdk:`, or a link to one, is an SPDK device: opening it may
/// take a while and must not be done on a tokio thread.
pub fn open(path: &Path) -> Result<Arc<dyn Device>> {
    if let Some(text) = of_spdk(path) {
        return Ok(Arc::new(SpdkDevice::open(&text)?));
    }
    let node = Arc::new(node::Node::open(path)?);
    match UringDevice::on(node.clone(), uring::DEPTH) {
        Ok(d) => Ok(Arc::new(d)),
        Err(e) if node.namespace.is_some() => {
            let m = "NVMe commands need io_uring with large entries (Linux 5.19); name the block device of the namespace instead";
            Err(e.context(m))
        }
        Err(e) => {
            tracing::warn!("{e}; using plain reads and writes instead, which need more CPU");
            Ok(Arc::new(FileDevice::on(node)))
        }
    }
}

/// The SPDK device that `path` names, itself or as the target of a link. Such names are not paths:
/// no file is there.
pub fn of_spdk(path: &Path) -> Option<String> {
    let text = |p: &Path| p.to_str().filter(|t| t.starts_with(spdk::PREFIX)).map(String::from);
    text(path).or_else(|| text(&std::fs::read_link(path).ok()?))
}
