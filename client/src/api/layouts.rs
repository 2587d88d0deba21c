//! How files are striped.

use std::sync::Arc;

use strake_proto::{Ino, Result, pb};

use crate::{core::Core, handover::operation::Caller};

/// The result of [`Layouts::get`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayoutInfo {
    /// The layout of a regular file.
    pub layout: Option<pb::Layout>,
    /// A directory's own default, if it has one.
    pub spec: Option<pb::LayoutSpec>,
    /// What a file created in the directory now would get (without chains).
    pub effective: Option<pb::Layout>,
}

/// The layouts of files and directories: [`crate::Client::layouts`].
#[derive(Clone, Copy)]
pub struct Layouts<'a> {
    pub(crate) core: &'a Arc<Core>,
}

impl Layouts<'_> {
    /// How a file is striped, or the default layout that a directory gives to new files.
    pub async fn get(self, creds: &pb::Creds, ino: Ino) -> Result<LayoutInfo> {
        let r =
            self.core.metadata.read_op(creds, pb::op::Op::Getlayout(pb::GetLayout { ino })).await?;
        Ok(LayoutInfo { layout: r.layout, spec: r.spec, effective: r.effective })
    }

    /// Sets a directory's default layout (`None` deletes it), or the layout of a file without data.
    /// `EEXIST` when the file has data, `EBUSY` while it is open for writing.
    pub async fn set(
        self,
        caller: impl Into<Caller<'_>>,
        ino: Ino,
        layout: Option<pb::LayoutSpec>,
    ) -> Result<()> {
        self.core
            .files
            .once_closed(caller.into(), pb::op::Op::Setlayout(pb::SetLayout { ino, layout }))
            .await
            .map(drop)
    }
}
