//! Sealed files, see `docs/seal.md`.

use std::sync::Arc;

use bytes::Bytes;
use strake_proto::{Code, Error, Ino, Result, pb};

use crate::{core::Core, handover::operation::Caller};

/// The seals of files: [`crate::Client::seals`].
#[derive(Clone, Copy)]
pub struct Seals<'a> {
    pub(crate) core: &'a Arc<Core>,
}

impl Seals<'_> {
    /// How a file is sealed; `ENODATA` where it is not. With `page` also the digests of that page
    /// of its manifest.
    pub async fn get(
        self,
        creds: &pb::Creds,
        ino: Ino,
        page: Option<u64>,
    ) -> Result<(pb::SealInfo, Bytes)> {
        let r = self
            .core
            .metadata
            .read_op(creds, pb::op::Op::GetSeal(pb::GetSeal { ino, page }))
            .await?;
        let info = r.seal.ok_or_else(|| {
            Error::new(Code::Protocol, "the metadata server's answer has no seal")
        })?;
        Ok((info, r.data))
    }

    /// One step of sealing a file, see `docs/seal.md`. Returns how it is sealed afterwards, `None`
    /// when it is not any more. `EBUSY` while the file is open for writing, `EPERM` for callers
    /// other than the owner and root, `ESTALE` when the named seal was undone.
    pub async fn step(
        self,
        caller: impl Into<Caller<'_>>,
        step: pb::Seal,
    ) -> Result<Option<pb::SealInfo>> {
        Ok(self.core.files.once_closed(caller.into(), pb::op::Op::Seal(step)).await?.seal)
    }
}
