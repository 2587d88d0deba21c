//! What the server notes about a target in its chunk table, beside the chunks: the states of its
//! chains, how far the scrub got, and what was found damaged.

use std::sync::Arc;

use strake_proto::{ChainId, Code, Error, Result, pb};
use strake_store::MetaStore;

use super::{
    chain_views::ChainViews,
    chunk::Key,
    findings::{self, Found},
    position::{self, Position},
};
use crate::device::Device;

/// The notes of one target. Each is durable with the next sync of the table, which a flush that
/// commits something makes, too.
pub struct TargetNotes {
    table: Arc<dyn MetaStore>,
    device: Arc<dyn Device>,
    /// Sync on tokio's blocking threads.
    offload: bool,
    views: ChainViews,
}

impl TargetNotes {
    pub(super) fn open(
        table: Arc<dyn MetaStore>,
        device: Arc<dyn Device>,
        offload: bool,
    ) -> Result<TargetNotes> {
        let views = ChainViews::open(table.clone())?;
        Ok(TargetNotes { table, device, offload, views })
    }

    /// Writes newer states of chains to the table, before anything is done in their epochs.
    /// Durable with the next sync.
    pub fn note_chain_views<'a>(&self, chains: impl Iterator<Item = &'a pb::Chain>) -> Result<()> {
        self.views.note(chains)
    }

    /// Chains that this target has a view of.
    pub fn known_chains(&self) -> Vec<ChainId> {
        self.views.chains()
    }

    /// The views of this target's chains, including those that it has left.
    pub fn chain_views(&self) -> Vec<pb::ChainSight> {
        self.views.all()
    }

    /// The position of the scrub that was last recorded. An unreadable one counts as none: the
    /// scrub begins anew.
    pub fn scrub_position(&self) -> Result<Position> {
        position::load(&*self.table, &self.device.name())
    }

    /// Records the position of the scrub; durable with the next sync of the table.
    pub fn note_scrub_position(&self, p: &Position) -> Result<()> {
        position::store(&*self.table, p)
    }

    /// Findings of earlier runs of the server, at most `most`, in key order. Unreadable records are
    /// left out.
    pub fn findings(&self, most: usize) -> Vec<(Key, Found)> {
        findings::load(&*self.table, &self.device.name(), most)
    }

    /// Records that a chunk is damaged, or (`None`) no longer is. Durable with the next sync of the
    /// table.
    pub fn note_finding(&self, key: &Key, found: Option<&Found>) -> Result<()> {
        findings::store(&*self.table, key, found)
    }

    /// Makes the table, and with it the notes so far, durable.
    pub async fn sync(&self) -> Result<()> {
        let table = self.table.clone();
        if !self.offload {
            return table.sync();
        }
        let task = tokio::task::spawn_blocking(move || table.sync());
        task.await.map_err(|e| Error::new(Code::Io, format!("sync: {e}")))?
    }
}
