//! The rows measured with the client library, without the kernel in between.

use futures_util::{StreamExt, TryStreamExt, stream};
use strake_client::{Client, File};
use strake_fabric::{Buf, Pool};
use strake_proto::{Code, Ino, Result, layout::splitmix64, pb};

use super::scale::{MIB, Scale};

/// Operations in flight.
const DEPTH: usize = 16;
const SMALL_DEPTH: usize = 64;

pub struct ByClient {
    client: Client,
    creds: pb::Creds,
    scale: Scale,
    large: File,
    dir: Ino,
}

const FOLDER: &[u8] = b"strake-bench-client";

impl ByClient {
    pub async fn new(client: Client, scale: Scale) -> Result<ByClient> {
        let creds = pb::Creds {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: vec![],
        };
        let root = client.root();
        let dir = match client.mkdir(&creds, root, FOLDER, 0o755).await {
            Err(e) if e.code == Code::Exist => client.lookup(&creds, root, FOLDER).await?.ino,
            r => r?.ino,
        };
        let (large, _) =
            client.create(&creds, dir, b"large", 0o644, libc::O_RDWR as u32, false, None).await?;
        Ok(ByClient { client, creds, scale, large, dir })
    }

    pub async fn write(&self) -> Result<f64> {
        let pool = Pool::default();
        let mut block = pool.get_now(MIB as usize);
        block.fill(0x5a);
        let block: Buf = block.freeze();
        stream::iter(0..self.scale.bytes / MIB)
            .map(|n| {
                let block = block.clone();
                async move { self.large.write(n * MIB, vec![block]).await }
            })
            .buffer_unordered(DEPTH)
            .try_for_each(|_| async { Ok(()) })
            .await?;
        self.large.fsync().await?;
        Ok(self.scale.bytes as f64)
    }

    /// Makes sure that the large file exists with its full size.
    pub async fn ensure_large(&self) -> Result<()> {
        if self.large.attr().size < self.scale.bytes {
            self.write().await?;
        }
        Ok(())
    }

    pub async fn read(&self) -> Result<f64> {
        stream::iter(0..self.scale.bytes / MIB)
            .map(|n| async move { self.large.read(n * MIB, MIB as usize).await })
            .buffer_unordered(DEPTH)
            .try_for_each(|_| async { Ok(()) })
            .await?;
        Ok(self.scale.bytes as f64)
    }

    pub async fn random_read(&self) -> Result<f64> {
        let (mut seed, blocks) = (7, self.scale.bytes / 4096);
        stream::iter(
            (0..self.scale.random_ops).map(move |_| splitmix64(&mut seed) % blocks * 4096),
        )
        .map(|at| async move { self.large.read(at, 4096).await })
        .buffer_unordered(SMALL_DEPTH)
        .try_for_each(|_| async { Ok(()) })
        .await?;
        Ok(self.scale.random_ops as f64)
    }

    async fn each<F: Future<Output = Result<()>>>(
        &self,
        job: impl Fn(Vec<u8>) -> F,
    ) -> Result<f64> {
        stream::iter(0..self.scale.files)
            .map(|n| job(format!("f{n:06}").into_bytes()))
            .buffer_unordered(SMALL_DEPTH)
            .try_for_each(|()| async { Ok(()) })
            .await?;
        Ok(self.scale.files as f64)
    }

    pub async fn create(&self) -> Result<f64> {
        self.each(|name| async move {
            let flags = libc::O_WRONLY as u32;
            let (file, _) =
                self.client.create(&self.creds, self.dir, &name, 0o644, flags, true, None).await?;
            file.close().await
        })
        .await
    }

    pub async fn ensure_files(&self) -> Result<f64> {
        self.each(|name| async move {
            match self.client.mknod(&self.creds, self.dir, &name, libc::S_IFREG | 0o644, 0).await {
                Err(e) if e.code != Code::Exist => Err(e),
                _ => Ok(()),
            }
        })
        .await
    }

    pub async fn stat(&self) -> Result<f64> {
        self.each(|name| async move {
            self.client.lookup(&self.creds, self.dir, &name).await.map(|_| ())
        })
        .await
    }

    pub async fn unlink_all(&self) -> Result<f64> {
        self.each(|name| async move {
            match self.client.unlink(&self.creds, self.dir, &name).await {
                Err(e) if e.code != Code::NoEnt => Err(e),
                _ => Ok(()),
            }
        })
        .await
    }

    pub async fn clean(self) -> Result<()> {
        self.unlink_all().await?;
        self.large.close().await?;
        self.client.unlink(&self.creds, self.dir, b"large").await?;
        let _ = self.client.rmdir(&self.creds, self.client.root(), FOLDER).await?;
        self.client.close().await
    }
}
