//! Extended attributes.

use std::sync::Arc;

use strake_proto::{Code, Error, Ino, Result, pb};

use crate::{core::Core, handover::operation::Caller};

/// POSIX ACLs, and their bits in `Attr.acls`.
const ACLS: [(&[u8], u32); 2] = [(b"system.posix_acl_access", 1), (b"system.posix_acl_default", 2)];
const S_IFMT: u32 = 0o170_000;
const S_IFLNK: u32 = 0o120_000;

/// Extended attributes of files and directories: [`crate::Client::xattrs`].
#[derive(Clone, Copy)]
pub struct Xattrs<'a> {
    pub(crate) core: &'a Arc<Core>,
}

impl Xattrs<'_> {
    /// The value of an extended attribute; `ENODATA` where there is none. Namespaces as in
    /// xattr(7).
    pub async fn get(self, creds: &pb::Creds, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        // Linux asks for the ACLs of every file that it checks, and few files have any.
        let acl = ACLS.iter().find(|(acl, _)| *acl == name).map(|(_, bit)| bit);
        if let (Some(bit), Some(attr)) =
            (acl, self.core.lease_cache.attr(self.core.shared.env.boot(), ino))
            && attr.acls & bit == 0
            && attr.mode & S_IFMT != S_IFLNK
        {
            return Err(Error::new(Code::NoData, "no such ACL"));
        }
        let o = pb::op::Op::Getxattr(pb::GetXattr { ino, name: name.to_vec().into() });
        Ok(self.core.metadata.read_op(creds, o).await?.data.to_vec())
    }

    /// `flags`: XATTR_CREATE 1, XATTR_REPLACE 2.
    pub async fn set(
        self,
        caller: impl Into<Caller<'_>>,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        flags: u32,
    ) -> Result<()> {
        let (name, value) = (name.to_vec().into(), value.to_vec().into());
        self.core
            .metadata
            .write_op(caller.into(), pb::op::Op::Setxattr(pb::SetXattr { ino, name, value, flags }))
            .await
            .map(drop)
    }

    /// The names of the extended attributes that the caller may see.
    pub async fn list(self, creds: &pb::Creds, ino: Ino) -> Result<Vec<Vec<u8>>> {
        let r =
            self.core.metadata.read_op(creds, pb::op::Op::Listxattr(pb::ListXattr { ino })).await?;
        Ok(r.names.iter().map(|n| n.to_vec()).collect())
    }

    /// Removes an extended attribute; `ENODATA` where there is none.
    pub async fn remove(self, caller: impl Into<Caller<'_>>, ino: Ino, name: &[u8]) -> Result<()> {
        let o = pb::op::Op::Removexattr(pb::RemoveXattr { ino, name: name.to_vec().into() });
        self.core.metadata.write_op(caller.into(), o).await.map(drop)
    }
}
