//! Saves a file so that it appears as a whole or not at all.

use std::sync::Arc;

use strake_client::File;
use strake_fabric::Buf;
use strake_proto::{Code, Error, Result};

use super::{Inner, Session, path};
use crate::{Direction, Failed, Policy, Report, Transfer};

/// Longest name of a file, bytes.
const NAME_MAX: usize = 255;
/// Bytes of host memory written at a time.
const PIECE: usize = 4 << 20;

/// The content of a new file: bytes at its beginning, then consecutive ranges of the device's
/// memory.
#[derive(Clone, Copy, Debug)]
pub struct Content<'a> {
    /// Bytes of host memory.
    pub head: &'a [u8],
    /// Address and bytes of each range.
    pub device: &'a [(u64, u64)],
}

impl Content<'_> {
    fn transfers(&self, file: &Arc<File>) -> Vec<Transfer> {
        let mut offset = self.head.len() as u64;
        let one = |(gpu, len): &(u64, u64)| {
            let t = Transfer { file: file.clone(), offset, gpu: *gpu, len: *len };
            offset = offset.saturating_add(*len);
            t
        };
        self.device.iter().map(one).collect()
    }
}

impl Session {
    /// Writes a file under a temporary name, makes it durable (fsync), and then renames it to
    /// `path`, replacing what was there. A reader sees the old file or the new one; after a failure
    /// or a crash the old one is there. `mode`: permissions.
    ///
    /// Errors as for [`crate::Bridge::save`], and those of creating and renaming files.
    pub fn replace(
        &self,
        path: &str,
        mode: u32,
        content: Content<'_>,
        policy: Policy,
    ) -> Result<Report, Failed> {
        let asked = content.device.iter().fold(0u64, |sum, (_, len)| sum.saturating_add(*len));
        let nothing = || Report::nothing(Direction::Save, policy, asked, content.device.len());
        let refused = |error| Failed { error, report: Box::new(nothing()) };
        let inner = self.inner().map_err(refused)?;
        inner.runtime.block_on(async {
            let place = path::resolve(&inner.client, &inner.creds, path).await.map_err(refused)?;
            if place.found.is_some_and(|a| a.mode & libc::S_IFMT != libc::S_IFREG) {
                return Err(refused(Error::new(
                    Code::Inval,
                    format!("path '{path}': is not a regular file"),
                )));
            }
            let name = temporary(&place.name).map_err(refused)?;
            let created =
                inner.client.create(&inner.creds, place.parent, &name, mode, 2, true, None).await;
            let file = Arc::new(
                created.map_err(|e| refused(e.context(format!("path '{path}': new file"))))?.0,
            );
            let written = inner.write(&file, content, policy).await;
            // A part that was abandoned may still hold a clone of it.
            let closed = File::clone(&file).close().await;
            let outcome = match (written, closed) {
                (Ok(report), Ok(())) => {
                    let to = (place.parent, &place.name[..]);
                    match inner.client.rename(&inner.creds, (place.parent, &name), to, 0).await {
                        Ok(()) => return Ok(report),
                        Err(e) => Err(Failed {
                            error: e.context(format!("naming it '{path}'")),
                            report: Box::new(report),
                        }),
                    }
                }
                (Ok(report), Err(error)) => Err(Failed { error, report: Box::new(report) }),
                (Err(failed), _) => Err(failed),
            };
            if let Err(e) = inner.client.unlink(&inner.creds, place.parent, &name).await {
                tracing::warn!(
                    "the unfinished file {} could not be removed: {e}",
                    String::from_utf8_lossy(&name)
                );
            }
            outcome
        })
    }
}

impl Inner {
    async fn write(
        &self,
        file: &Arc<File>,
        content: Content<'_>,
        policy: Policy,
    ) -> Result<Report, Failed> {
        let all = content.transfers(file);
        let report = self.bridge.save(&all, policy).await?;
        let finish = async {
            let mut at = 0;
            for piece in content.head.chunks(PIECE) {
                crate::FileIo::write(&**file, at, Buf::copy_from(piece)).await?;
                at += piece.len() as u64;
            }
            file.fsync().await
        };
        match finish.await {
            Ok(()) => Ok(report),
            Err(error) => Err(Failed { error, report: Box::new(report) }),
        }
    }
}

/// A hidden name in the folder of the final name.
fn temporary(name: &[u8]) -> Result<Vec<u8>> {
    let mut random = [0; 8];
    getrandom::fill(&mut random).map_err(|e| Error::new(Code::Io, format!("random bytes: {e}")))?;
    let end = format!(".{:016x}.new", u64::from_le_bytes(random));
    let kept = &name[..name.len().min(NAME_MAX - 1 - end.len())];
    Ok([b".", kept, end.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_unfinished_files_are_hidden_short_enough_and_differ() {
        let (a, b) = (temporary(b"model").unwrap(), temporary(b"model").unwrap());
        assert!(a != b && a.starts_with(b".model.") && a.ends_with(b".new"));
        assert_eq!(temporary(&[b'x'; 255]).unwrap().len(), 255);
    }
}
