//! Files as the bridge sees them.

use async_trait::async_trait;
use strake_client::File;
use strake_fabric::Buf;
use strake_proto::{Code, Error, Result};

/// A file that parts are read from and written to, many at a time.
#[async_trait]
pub trait FileIo: Send + Sync + 'static {
    /// What tells it from other files, for messages and to find ranges that overlap.
    fn id(&self) -> u64;

    /// The bytes of a range, verified; fewer only where the file ends.
    async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>>;

    /// Writes all of it, or fails.
    async fn write(&self, offset: u64, data: Buf) -> Result<()>;
}

#[async_trait]
impl FileIo for File {
    fn id(&self) -> u64 {
        self.ino()
    }

    async fn read(&self, offset: u64, len: usize) -> Result<Vec<Buf>> {
        File::read(self, offset, len).await
    }

    async fn write(&self, offset: u64, data: Buf) -> Result<()> {
        let len = data.len();
        match File::write(self, offset, vec![data]).await? {
            n if n < len => Err(Error::new(Code::NoSpc, "no space left for all of the bytes")),
            _ => Ok(()),
        }
    }
}
