//! A file or block device by plain `pread` and `pwrite` on tokio's blocking threads: for machines
//! without io_uring.

use std::{os::unix::fs::FileExt, path::Path, sync::Arc};

use async_trait::async_trait;
use strake_fabric::{Buf, BufMut, Pool};
use strake_proto::{Code, Error, Result};
use tokio::sync::{RwLock, Semaphore};

use super::{
    api::{Device, check_range},
    meter::{Begun, Class, Meter},
    node::Node,
};

/// Most operations at a time.
const DEPTH: usize = 64;

/// A file, block device or namespace through plain system calls on tokio's blocking threads.
pub struct FileDevice {
    node: Arc<Node>,
    depth: Arc<Semaphore>,
    /// Changes hold it shared until they end. A flush takes it exclusively for a moment, to wait
    /// for the changes before it.
    barrier: Arc<RwLock<()>>,
    pool: Pool,
    meter: Arc<Meter>,
}

impl FileDevice {
    /// Opens a file, block device or NVMe namespace that exists.
    pub fn open(path: &Path) -> Result<FileDevice> {
        Ok(FileDevice::on(Arc::new(Node::open(path)?)))
    }

    pub(super) fn on(node: Arc<Node>) -> FileDevice {
        let depth = Arc::new(Semaphore::new(DEPTH));
        FileDevice {
            node,
            depth,
            barrier: Arc::default(),
            pool: Pool::default(),
            meter: Arc::default(),
        }
    }

    /// Runs on a blocking thread, whether or not the caller waits for it.
    async fn run<T: Send + 'static>(
        &self,
        changes: bool,
        begin: impl FnOnce(&Meter) -> Option<Begun> + Send + 'static,
        work: impl FnOnce(&Node) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let gone =
            |e: &dyn std::fmt::Display| Error::new(Code::Io, format!("{}: {e}", self.node.name));
        let permit = self.depth.clone().acquire_owned().await.map_err(|e| gone(&e))?;
        let shared = if changes { Some(self.barrier.clone().read_owned().await) } else { None };
        let (node, meter) = (self.node.clone(), self.meter.clone());
        let task = tokio::task::spawn_blocking(move || {
            let begun = begin(&meter);
            let result = work(&node);
            begun.into_iter().for_each(|op| meter.end(op));
            drop((permit, shared));
            result
        });
        task.await.map_err(|e| gone(&e))?
    }
}

#[async_trait]
impl Device for FileDevice {
    fn capacity(&self) -> u64 {
        self.node.capacity
    }
    fn direct(&self) -> bool {
        self.node.direct
    }
    fn name(&self) -> String {
        self.node.name.clone()
    }
    fn spare(&self) -> u64 {
        self.node.spare()
    }
    fn meter(&self) -> &Meter {
        &self.meter
    }
    fn rotates(&self) -> bool {
        self.node.rotates
    }

    async fn read(&self, offset: u64, mut buf: BufMut) -> Result<BufMut> {
        let len = buf.len() as u64;
        check_range(&self.node.name, self.node.capacity, offset, len)?;
        self.run(
            false,
            move |m| Some(m.begin(Class::Read, len)),
            move |node| {
                node.file
                    .read_exact_at(&mut buf, offset)
                    .map_err(|e| node.error("read", offset, len, e.into()))?;
                Ok(buf)
            },
        )
        .await
    }

    async fn write(&self, offset: u64, bufs: Vec<Buf>) -> Result<()> {
        let len = bufs.iter().map(|b| b.len() as u64).sum();
        check_range(&self.node.name, self.node.capacity, offset, len)?;
        let bufs = self.node.aligned(&self.pool, bufs);
        self.run(
            true,
            move |m| Some(m.begin(Class::Change, len)),
            move |node| {
                let mut at = offset;
                for b in &bufs {
                    node.file
                        .write_all_at(b, at)
                        .map_err(|e| node.error("write", offset, len, e.into()))?;
                    at += b.len() as u64;
                }
                Ok(())
            },
        )
        .await
    }

    async fn flush(&self) -> Result<()> {
        drop(self.barrier.write().await);
        self.run(
            false,
            |m| Some(m.begin_flush()),
            |node| node.file.sync_data().map_err(|e| node.error("flush", 0, 0, e.into())),
        )
        .await
    }

    async fn discard(&self, offset: u64, len: u64) -> Result<()> {
        check_range(&self.node.name, self.node.capacity, offset, len)?;
        if !self.node.can_discard {
            return Ok(());
        }
        self.run(
            true,
            |_| None,
            move |node| {
                use rustix::fs::{FallocateFlags, fallocate};
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(&node.file, flags, offset, len)
                    .map_err(|e| node.error("discard", offset, len, std::io::Error::from(e).into()))
            },
        )
        .await
    }
}
