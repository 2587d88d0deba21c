//! The newest state of each of its chains that this target acted on, kept in the chunk table.
//!
//! Metadata servers that lost their newest state ask for it, to learn which replicas may be in sync
//! (`docs/membership.md`, "After a recovery"). The target writes a chain's view to the table before
//! it does anything in that epoch. The table's syncs keep the order of writes. So if an update that
//! was made stable in an epoch survives, that epoch's view survives, too.

use std::{collections::BTreeMap, sync::Arc};

use bytes::{BufMut, Bytes, BytesMut};
use parking_lot::Mutex;
use strake_proto::{ChainId, Code, Error, Result, pb};
use strake_store::{Batch, MetaStore};

use super::record::{self, CHAIN_VIEW_PREFIX};

/// More replicas than any chain has.
const MAX_REPLICAS: usize = 16;

/// The state of a chain as of an epoch.
#[derive(Clone, Debug, PartialEq)]
struct ChainView {
    pub epoch: u64,
    pub replicas: Vec<pb::Replica>,
    /// Learned since this target was opened.
    pub lived: bool,
}

fn key(chain: ChainId) -> Bytes {
    let mut b = BytesMut::with_capacity(5);
    b.put_u8(CHAIN_VIEW_PREFIX);
    b.put_u32(chain);
    b.freeze()
}

/// Format, epoch, number of replicas, then target and state of each; see `docs/formats.md`, "Chunk
/// store".
fn encode(key: &[u8], epoch: u64, replicas: &[pb::Replica]) -> Bytes {
    let mut b = BytesMut::with_capacity(14 + replicas.len() * 5);
    b.put_u8(record::FORMAT);
    b.put_u64_le(epoch);
    b.put_u8(replicas.len() as u8);
    for r in replicas {
        b.put_u32_le(r.target);
        b.put_u8(r.state as u8);
    }
    record::seal(key, b)
}

fn decode(key: &[u8], value: &[u8]) -> Result<ChainView> {
    let bad = || Error::new(Code::Corrupt, "the chunk table's record of a chain is damaged");
    let body = record::unseal(key, value)?;
    let (epoch, rest) = body.split_first_chunk::<8>().ok_or_else(bad)?;
    let (count, rest) = rest.split_first().ok_or_else(bad)?;
    let (each, left) = rest.as_chunks::<5>();
    if each.len() != usize::from(*count) || !left.is_empty() || each.len() > MAX_REPLICAS {
        return Err(bad());
    }
    let replica = |b: &[u8; 5]| {
        let state = i32::from(b[4]);
        pb::ReplicaState::try_from(state).map_err(|_| bad())?;
        Ok(pb::Replica { target: u32::from_le_bytes([b[0], b[1], b[2], b[3]]), state })
    };
    let replicas = each.iter().map(replica).collect::<Result<_>>()?;
    Ok(ChainView { epoch: u64::from_le_bytes(*epoch), replicas, lived: false })
}

/// Reads all views of a table. A damaged one is left out, as if the target had never known of that
/// chain.
fn load(table: &dyn MetaStore) -> Result<BTreeMap<ChainId, ChainView>> {
    let mut all = BTreeMap::new();
    for pair in table.prefix(&[CHAIN_VIEW_PREFIX]) {
        let (k, v) = pair?;
        let chain = k.get(1..).and_then(|b| b.try_into().ok()).map(u32::from_be_bytes);
        match (chain, decode(&k, &v)) {
            (Some(chain), Ok(view)) => drop(all.insert(chain, view)),
            (_, e) => {
                tracing::error!("the record of a chain ({k:02x?}) cannot be read: {:?}", e.err())
            }
        }
    }
    Ok(all)
}

/// The views of one target's chains, in memory and in its table.
pub(super) struct ChainViews {
    table: Arc<dyn MetaStore>,
    known: Mutex<BTreeMap<ChainId, ChainView>>,
}

impl ChainViews {
    pub(super) fn open(table: Arc<dyn MetaStore>) -> Result<ChainViews> {
        let known = Mutex::new(load(&*table)?);
        Ok(ChainViews { table, known })
    }

    /// See [`TargetNotes::note_chain_views`](super::TargetNotes::note_chain_views).
    pub(super) fn note<'a>(&self, chains: impl Iterator<Item = &'a pb::Chain>) -> Result<()> {
        let mut views = self.known.lock();
        let mut batch = Batch::default();
        let mut seen = Vec::new();
        for c in chains.filter(|c| c.replicas.len() <= MAX_REPLICAS) {
            let known = views.get(&c.id);
            if known.is_some_and(|s| s.lived && s.epoch >= c.epoch) {
                continue;
            }
            if known.is_none_or(|s| s.epoch != c.epoch || s.replicas != c.replicas) {
                let key = key(c.id);
                let value = encode(&key, c.epoch, &c.replicas);
                batch.put(key, value);
            }
            seen.push((
                c.id,
                ChainView { epoch: c.epoch, replicas: c.replicas.clone(), lived: true },
            ));
        }
        if !batch.is_empty() {
            self.table.commit(batch)?;
        }
        views.extend(seen);
        Ok(())
    }

    pub(super) fn chains(&self) -> Vec<ChainId> {
        self.known.lock().keys().copied().collect()
    }

    pub(super) fn all(&self) -> Vec<pb::ChainSight> {
        let views = self.known.lock();
        let view = |(chain, s): (&ChainId, &ChainView)| pb::ChainSight {
            chain: *chain,
            epoch: s.epoch,
            replicas: s.replicas.clone(),
            lived: s.lived,
        };
        views.iter().map(view).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn replicas() -> Vec<pb::Replica> {
        vec![pb::Replica { target: 3, state: 1 }, pb::Replica { target: 0x0102_0304, state: 4 }]
    }

    #[test]
    fn records_have_the_documented_bytes() {
        let k = key(0x0a0b);
        assert_eq!(&k[..], b"c\0\0\x0a\x0b");
        let v = encode(&k, 9, &replicas());
        assert_eq!(&v[..20], b"\x01\x09\0\0\0\0\0\0\0\x02\x03\0\0\0\x01\x04\x03\x02\x01\x04");
        assert_eq!(
            decode(&k, &v).unwrap(),
            ChainView { epoch: 9, replicas: replicas(), lived: false }
        );
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let k = key(1);
        let good = encode(&k, 9, &replicas());
        assert!(decode(&key(2), &good).is_err(), "of another chain");
        for n in 0..good.len() {
            assert!(decode(&k, &good[..n]).is_err(), "cut at {n}");
        }
        let unknown = encode(&k, 9, &[pb::Replica { target: 1, state: 99 }]);
        assert_eq!(decode(&k, &unknown).unwrap_err().code, Code::Corrupt);
    }
}
