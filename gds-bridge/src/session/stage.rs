//! Makes copies of sealed files on this node: reads them through the client, compares them with the
//! manifest, and writes them to a folder.

use std::{path::Path, time::SystemTime};

use futures_util::{StreamExt, TryStreamExt, stream};
use serde::Serialize;
use strake_client::File;
use strake_fabric::{Buf, REGION};
use strake_proto::{
    Code, Error, Result,
    checksum::BLOCK,
    seal::{self, DIGEST, Digest, Leaf},
};

use super::{Inner, Session};
use crate::{
    file::of_manifest,
    local::{Copy, Header, Making, Sealed, check_folder},
};

/// Pieces read concurrently, of [`REGION`] each.
const AHEAD: usize = 4;

/// An existing copy.
#[derive(Clone, Debug, Serialize)]
pub struct Staged {
    /// The path of the file, as given.
    pub path: String,
    /// The name of the copy, without its ending.
    pub name: String,
    /// Bytes of the file.
    pub size: u64,
    /// It existed before.
    pub already: bool,
}

impl Session {
    /// Makes a copy of a sealed file in a folder of this node, unless it exists. `done` is called
    /// with the bytes copied so far and the total. Nothing is left of an unfinished copy.
    ///
    /// `ENODATA` for a file that is not sealed, `EIO` for one whose content does not match its
    /// manifest, `ENOSPC`, `EPERM` for a folder that others may write to, or errors of the file
    /// system for the path.
    pub fn stage(&self, path: &str, dir: &Path, mut done: impl FnMut(u64, u64)) -> Result<Staged> {
        check_folder(dir)?;
        self.run(async |s| {
            // Not from the cache, which may have been read long ago.
            let file = s.open_file(path, libc::O_DIRECT as u32, 0, None).await?;
            let staged = s.stage(path, &file, dir, &mut done).await;
            file.close().await?;
            staged.map_err(|e| e.context(format!("path '{path}'")))
        })
    }
}

impl Inner {
    async fn stage(
        &self,
        path: &str,
        file: &File,
        dir: &Path,
        done: &mut impl FnMut(u64, u64),
    ) -> Result<Staged> {
        let (sealed, digests) = self.manifest(file).await?;
        let at =
            |already| Staged { path: path.into(), name: sealed.name(), size: sealed.size, already };
        match Copy::open(dir, &sealed) {
            Ok(Some(_)) => return Ok(at(true)),
            Ok(None) => {}
            // An unusable copy is in the way of a new one.
            Err(e)
                if matches!(
                    e.code,
                    Code::Corrupt | Code::Inval | Code::NoEnt | Code::OpNotSupp
                ) =>
            {
                crate::local::remove_named(dir, &sealed.name())?
            }
            Err(e) => return Err(e),
        }
        let staged_ns = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos() as u64;
        let mut making =
            Making::begin(dir, Header { sealed: sealed.clone(), staged_ns, path: path.into() })?;
        let (size, each) = (sealed.size, seal::extent_size(sealed.size));
        let pieces =
            (0..size.div_ceil(REGION as u64)).map(|n| {
                let offset = n * REGION as u64;
                let len = (REGION as u64).min(size - offset) as usize;
                async move {
                    Ok::<_, Error>((offset, whole(file.read(offset, len).await?, offset, len)?))
                }
            });
        let mut arriving = stream::iter(pieces).buffered(AHEAD);
        let (mut leaf, mut digests) = (Leaf::default(), digests.into_iter());
        while let Some((offset, bytes)) = arriving.try_next().await? {
            leaf.update(&bytes);
            making.push(&bytes)?;
            let end = offset + bytes.len() as u64;
            let extent_ends = end.is_multiple_of(each) || end == size;
            if extent_ends && digests.next() != Some(std::mem::take(&mut leaf).finish()) {
                let from = (end - 1) / each * each;
                let m =
                    format!("bytes {from} to {end} differ from what was sealed; run `lfs verify`");
                return Err(Error::new(Code::Corrupt, m));
            }
            done(end, size);
        }
        let new = tokio::task::spawn_blocking(|| making.publish());
        let new = new.await.map_err(|e| Error::new(Code::Io, e.to_string()))??;
        Ok(at(!new))
    }

    /// The file's content according to its manifest, and the digests of its extents, which match
    /// it.
    async fn manifest(&self, file: &File) -> Result<(Sealed, Vec<Digest>)> {
        let creds = self.fixed.clone().unwrap_or_else(super::mine);
        let not = || {
            Error::new(
                Code::NoData,
                "is not sealed, and only sealed files have copies: run `lfs seal` first",
            )
        };
        let info = match self.client.seals().get(&creds, file.ino(), None).await {
            Err(e) if e.code == Code::NoData => return Err(not()),
            r => r?.0,
        };
        let unfinished = || {
            Error::new(
                Code::NoData,
                "is immutable without a manifest: run `lfs seal` again to complete it",
            )
        };
        let manifest = info.manifest.ok_or_else(unfinished)?;
        let sealed = of_manifest(&self.client.fs_uuid(), file.ino(), &manifest)?;
        let mut digests = Vec::new();
        for page in 0..seal::pages(sealed.size) {
            let (_, bytes) = self.client.seals().get(&creds, file.ino(), Some(page)).await?;
            digests.extend(
                bytes.chunks_exact(DIGEST).map(|d| Digest::try_from(d).expect("as many bytes")),
            );
        }
        if digests.len() as u64 != seal::extents(sealed.size) || seal::root(&digests) != sealed.root
        {
            return Err(Error::new(Code::Corrupt, "has an inconsistent manifest"));
        }
        Ok((sealed, digests))
    }
}

const _: () =
    assert!(REGION.is_multiple_of(BLOCK) && (seal::EXTENT as usize).is_multiple_of(REGION));

/// Joins all bytes of a piece. A sealed file is as long as its manifest says.
fn whole(bufs: Vec<Buf>, offset: u64, len: usize) -> Result<Vec<u8>> {
    let bytes: Vec<u8> = bufs.iter().fold(Vec::with_capacity(len), |mut all, b| {
        all.extend_from_slice(b);
        all
    });
    if bytes.len() != len {
        let m = format!(
            "ends after {} bytes, earlier than its manifest says",
            offset + bytes.len() as u64
        );
        return Err(Error::new(Code::Corrupt, m));
    }
    Ok(bytes)
}
