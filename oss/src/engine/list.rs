//! Listings over the table in the store and the changes in memory, and forgetting tombstones.

use std::{collections::BTreeMap, ops::Bound, sync::Arc};

use strake_proto::{ChainId, ChunkId, Result, data::ListEntry};

use super::{
    Engine, Key, Shared,
    overlay::Slot,
    record::{Header, header_key, parse_header_key},
};

/// Changed records looked at in one step.
const STEP: usize = 1024;

/// Chunks of one chain, from a bound on.
struct Span {
    from: Bound<Key>,
    to: Key,
}

const LAST: ChunkId = ChunkId { ino: u64::MAX, data: u64::MAX, index: u64::MAX };

impl Engine {
    /// Chunks of a chain after `after` in order of their ids, tombstones included, at most `max`. A chunk whose record is
    /// damaged is listed with version 0 and no length. Each entry was true at some moment of the call.
    pub fn list(&self, chain: ChainId, after: Option<ChunkId>, max: usize) -> Result<Vec<ListEntry>> {
        let key = |chunk| Key { chain, chunk };
        let first = ChunkId { ino: 0, data: 0, index: 0 };
        let from = after.map_or(Bound::Included(key(first)), |c| Bound::Excluded(key(c)));
        self.shared.scan(Span { from, to: key(LAST) }, max)
    }

    /// As [`Engine::list`], of one file's data from `from_index` on.
    pub fn chunks_of(
        &self,
        chain: ChainId,
        ino: u64,
        data: u64,
        from_index: u64,
        max: usize,
    ) -> Result<Vec<ListEntry>> {
        let key = |index| Key { chain, chunk: ChunkId { ino, data, index } };
        self.shared.scan(Span { from: Bound::Included(key(from_index)), to: key(u64::MAX) }, max)
    }

    /// Drops the tombstones of a file's data on a chain, when nobody can ask for it any more. Returns how many there were.
    pub fn forget_tombstones(&self, chain: ChainId, ino: u64, data: u64) -> Result<usize> {
        let (mut forgotten, mut from) = (0, 0);
        loop {
            let page = self.chunks_of(chain, ino, data, from, STEP)?;
            let mut s = self.shared.state.lock();
            s.check()?;
            for chunk in page.iter().filter(|e| e.tombstone).map(|e| e.chunk) {
                let key = Key { chain, chunk };
                // A chunk with an update on its way, or written again meanwhile, is left alone.
                let again = s.headers.get(&key).flatten().is_some_and(|h| !h.meta.tombstone);
                if !again && !s.staging.contains(&key) {
                    s.headers.put(key, None);
                    s.committed += 1;
                    forgotten += 1;
                }
            }
            match page.last().and_then(|e| e.chunk.index.checked_add(1)) {
                Some(next) if page.len() == STEP => from = next,
                _ => return Ok(forgotten),
            }
        }
    }
}

impl Shared {
    /// Memory first, then the store: what is flushed in between is found in both, memory's word counts.
    fn scan(self: &Arc<Self>, mut span: Span, max: usize) -> Result<Vec<ListEntry>> {
        let mut out = Vec::new();
        while out.len() < max {
            let (changed, more) = self.state.lock().headers.changed(span.from, Bound::Included(span.to), STEP);
            let end = match changed.last_key_value() {
                Some((last, _)) if more => *last,
                _ => span.to,
            };
            self.merge(&span, end, changed, max, &mut out)?;
            if end == span.to {
                break;
            }
            span.from = Bound::Excluded(end);
        }
        Ok(out)
    }

    /// Chunks from the span's start to `end`, both from `changed` and the store.
    fn merge(
        &self,
        span: &Span,
        end: Key,
        mut changed: BTreeMap<Key, Slot<Header>>,
        max: usize,
        out: &mut Vec<ListEntry>,
    ) -> Result<()> {
        let (from, to) = (span.from.map(|k| header_key(&k)), header_key(&end));
        let from = from.as_ref().map(|b| &b[..]);
        for pair in self.table.range(from, Bound::Included(&to)) {
            let (k, v) = pair?;
            let Some(key) = parse_header_key(&k) else { continue };
            while let Some(entry) = changed.first_entry().filter(|e| *e.key() < key) {
                let (k, h) = entry.remove_entry();
                push(k, h.as_deref(), max, out);
            }
            if out.len() >= max {
                return Ok(());
            }
            match changed.remove(&key) {
                Some(newer) => push(key, newer.as_deref(), max, out),
                None => {
                    let stored = Header::decode(&k, &v).unwrap_or_else(|e| {
                        self.note_damage(&key, &e);
                        Header::damaged()
                    });
                    push(key, Some(&stored), max, out);
                }
            }
        }
        for (k, h) in changed {
            push(k, h.as_deref(), max, out);
        }
        Ok(())
    }
}

fn push(key: Key, header: Option<&Header>, max: usize, out: &mut Vec<ListEntry>) {
    if let Some(Header { meta, .. }) = header
        && out.len() < max
    {
        out.push(ListEntry { chunk: key.chunk, version: meta.version, len: meta.len, tombstone: meta.tombstone });
    }
}
