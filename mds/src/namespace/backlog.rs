//! What is still to be done outside of the state: chunks to delete, files to trim, files without a
//! name to free, evictions that storage servers must know.

use prost::Message;
use strake_proto::{Code, Error, Ino, Result, pb};

use super::{keys, state::State};

/// See the module.
pub struct Backlog<'a>(pub(super) &'a State);

impl Backlog<'_> {
    /// The oldest `limit` sets of chunks to delete, with the numbers for `GcDone`.
    pub fn gc_queue(&self, limit: usize) -> Vec<(u64, pb::GcRecord)> {
        let numbers = self.0.lowest(keys::GC, limit);
        // What cannot be read now is tried again later.
        let Ok(view) = self.0.store.snapshot() else { return Vec::new() };
        let record = |n| pb::GcRecord::decode(view.get(&keys::numbered(keys::GC, n)).ok()??).ok();
        numbers.into_iter().filter_map(|n| Some((n, record(n)?))).collect()
    }

    /// How many sets there are, counted up to `limit`.
    pub fn gc_waiting(&self, limit: usize) -> usize {
        self.0.lowest(keys::GC, limit).len()
    }

    /// Up to `limit` files whose chunks must be trimmed, by inode id.
    pub fn trims(&self, limit: usize) -> Vec<(Ino, pb::Trim, pb::Layout)> {
        let of = |ino| self.0.inode(ino).and_then(|r| Some((ino, r.trim?, r.layout?)));
        self.0.lowest(keys::TRIM, limit).into_iter().filter_map(of).collect()
    }

    /// The trim that an inode waits for.
    pub fn trim_of(&self, ino: Ino) -> Option<pb::Trim> {
        self.0.inode(ino)?.trim
    }

    /// A file that evicted sessions wrote beside others, until its size is found out.
    pub fn endless(&self, ino: Ino) -> Result<Option<pb::InodeRecord>> {
        Ok(self.0.looking(|t| t.inode(ino))?.filter(|r| r.fence != 0))
    }

    /// Up to `limit` files without a name, by inode id.
    pub fn orphans(&self, limit: usize) -> Vec<Ino> {
        self.0.lowest(keys::ORPHAN, limit)
    }

    /// Up to `limit` chunks that will be removed, of the kinds and in the order that
    /// `PendingRequest` names.
    pub fn pending(
        &self,
        request: &pb::PendingRequest,
        limit: usize,
    ) -> Result<Vec<pb::PendingItem>> {
        let after = request.after;
        let item = |key, ino, layout: Option<pb::Layout>, size| {
            let data_id = layout?.components.first()?.data_id;
            Some(pb::PendingItem { key, ino, data_id, size })
        };
        // Items without chunks are kept with data id 0, so that a page is short only at the end.
        let bare = |key, ino| pb::PendingItem { key, ino, data_id: 0, size: 0 };
        let read = |prefix| self.0.list(prefix, after, limit).into_iter();
        Ok(match request.kind {
            1 => read(keys::ORPHAN)
                .map(|(ino, _)| {
                    item(ino, ino, self.0.inode(ino).and_then(|r| r.layout), 0)
                        .unwrap_or(bare(ino, ino))
                })
                .collect(),
            2 => read(keys::GC)
                .map(|(n, v)| {
                    let g = pb::GcRecord::decode(v).unwrap_or_default();
                    item(n, g.ino, g.layout, 0).unwrap_or(bare(n, g.ino))
                })
                .collect(),
            3 => read(keys::TRIM)
                .map(|(ino, v)| {
                    let size = pb::Trim::decode(v).map_or(u64::MAX, |t| t.size);
                    item(ino, ino, self.0.inode(ino).and_then(|r| r.layout), size)
                        .unwrap_or(bare(ino, ino))
                })
                .collect(),
            4 => {
                let written = |ino: &&Ino| self.0.inode(**ino).is_some_and(|r| r.writers > 0);
                request
                    .inos
                    .iter()
                    .take(limit)
                    .filter(written)
                    .map(|ino| bare(*ino, *ino))
                    .collect()
            }
            kind => {
                return Err(Error::new(
                    Code::Inval,
                    format!("unknown kind {kind} of pending deletions"),
                ));
            }
        })
    }

    /// Evictions with a number above `number`, oldest first; the last 10,000 are kept.
    pub fn evicted_after(&self, number: u64) -> Vec<pb::Evicted> {
        let all = self.0.list(keys::EVICTED, number, usize::MAX);
        let decoded =
            all.into_iter().filter_map(|(n, v)| Some((n, pb::EvictedRecord::decode(v).ok()?)));
        decoded
            .map(|(n, r)| pb::Evicted {
                number: n,
                session: r.session,
                min_epoch: r.min_epoch,
                below: r.below,
            })
            .collect()
    }

    /// The number of the first eviction after the one with this number.
    pub fn eviction_after(&self, number: u64) -> Option<u64> {
        self.0.list(keys::EVICTED, number, 1).first().map(|(n, _)| *n)
    }
}
