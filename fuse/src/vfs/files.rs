//! Requests about open files.

use std::sync::Arc;

use strake_fabric::Buf;
use strake_proto::{Code, Error, Ino, Result, pb};

use super::{Caller, OpenFile, Opened, Place, Vfs, names::masked};

impl Vfs {
    pub async fn open(&self, caller: Caller, ino: Ino, flags: i32) -> Result<Opened> {
        let (file, _) = self.client.open(&self.creds(caller), ino, flags as u32).await?;
        Ok(self.keep(OpenFile { file, ino, flags }))
    }

    /// open(2) with `O_CREAT`.
    pub async fn create(
        &self,
        caller: Caller,
        parent: Ino,
        name: &[u8],
        mode: u32,
        umask: u32,
        flags: i32,
    ) -> Result<(pb::Attr, Opened)> {
        let exclusive = flags & libc::O_EXCL != 0;
        let mode = masked(mode, umask) & 0o7777;
        let creds = self.creds(caller);
        // The kernel believes the file new and will not cut it; the client does if another mount was faster.
        let (file, attr) = self.client.create(&creds, parent, name, mode, flags as u32, exclusive, None).await?;
        let ino = attr.ino;
        Ok((attr, self.keep(OpenFile { file, ino, flags })))
    }

    fn keep(&self, open: OpenFile) -> Opened {
        let clean_close = !open.writes();
        Opened { handle: self.files.insert(open), clean_close }
    }

    /// What [`Vfs::read`] would return, if it needs not wait. To be called within the runtime.
    pub fn read_ready(&self, handle: u64, offset: u64, len: usize) -> Option<Vec<Buf>> {
        self.files.get(handle).ok()?.file.read_ready(offset, len)
    }

    /// Exactly the bytes of `[offset, offset + len)` that the file has, in segments.
    pub async fn read(&self, handle: u64, offset: u64, len: usize) -> Result<Vec<Buf>> {
        self.files.get(handle)?.file.read(offset, len).await
    }

    /// Returns the bytes written, all of them or an error.
    pub async fn write(&self, handle: u64, place: Place, data: Buf) -> Result<usize> {
        let open = self.files.get(handle)?;
        let len = data.len();
        match place {
            Place::At(offset) => open.file.write(offset, vec![data]).await,
            Place::End => open.file.append(vec![data]).await.map(|_| len),
        }
    }

    /// close(2) of one descriptor: what the handle wrote is stable and its size recorded, or this is the error.
    pub async fn flush(&self, handle: u64) -> Result<()> {
        let open = self.files.get(handle)?;
        if open.writes() { open.file.flush().await } else { Ok(()) }
    }

    pub async fn fsync(&self, handle: u64) -> Result<()> {
        self.files.get(handle)?.file.fsync().await
    }

    /// The last descriptor and mapping of the handle are gone.
    pub async fn release(&self, handle: u64) {
        if let Some(open) = self.files.remove(handle) {
            self.end_file(open).await;
        }
    }

    pub(super) async fn end_file(&self, open: Arc<OpenFile>) {
        if let Err(e) = open.file.clone().close().await {
            tracing::warn!(ino = open.ino, "closing a file: {e}");
        }
    }

    /// fallocate(2) mode 0: the file reaches at least to `offset + len`. Space is not reserved.
    pub async fn fallocate(&self, handle: u64, offset: u64, len: u64, mode: i32) -> Result<()> {
        if mode != 0 {
            return Err(Error::new(Code::OpNotSupp, format!("fallocate mode {mode:#x} is not supported")));
        }
        let open = self.files.get(handle)?;
        let end = offset.checked_add(len).ok_or_else(|| Error::new(Code::FBig, "fallocate beyond the largest file"))?;
        if self.getattr(open.ino).await?.size < end {
            open.file.extend(end).await?;
        }
        Ok(())
    }
}
