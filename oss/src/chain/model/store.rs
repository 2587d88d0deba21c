//! What a replica of the model has stored.

use std::collections::BTreeMap;

use strake_proto::{
    ChunkId, Result,
    data::{Version, Writer},
};

use crate::chain::{Committed, Local, OpId};

/// Writers that a chunk remembers: fewer than [`strake_proto::data::KEPT_WRITERS`], so that runs
/// exceed the limit.
pub(super) const KEPT: usize = 8;

/// A chunk is the list of updates applied to it; every update has its own number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Chunk {
    pub state: Committed,
    pub list: Vec<u64>,
}

pub(super) struct Store {
    pub chunks: BTreeMap<ChunkId, Chunk>,
    pub values: BTreeMap<OpId, (ChunkId, u64)>,
}

impl Store {
    /// How many other changes a chunk got after the one with this value.
    pub(super) fn changes_since(&self, chunk: ChunkId, value: u64) -> usize {
        self.chunks
            .get(&chunk)
            .map_or(0, |c| c.list.iter().rev().position(|v| *v == value).unwrap_or(0))
    }
}

impl Local for Store {
    fn committed(&self, chunk: &ChunkId) -> Result<Committed> {
        Ok(self.chunks.get(chunk).map(|c| c.state.clone()).unwrap_or_default())
    }
    fn commit(&mut self, op: OpId, version: Version, writer: Writer) -> Result<()> {
        let (chunk, value) = self.values[&op];
        let c = self.chunks.entry(chunk).or_default();
        let kept = c.list.len().saturating_sub(KEPT);
        assert!(!c.list[kept..].contains(&value), "update {value} applied twice to {chunk}");
        c.list.push(value);
        c.state.version = version;
        c.state.writers.push(writer);
        if c.state.writers.len() > KEPT {
            c.state.writers.remove(0);
        }
        Ok(())
    }
}
