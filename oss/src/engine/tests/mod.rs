//! Tests of the chunk store as a whole.

mod basic;
mod block;
mod crash;
mod damage;
mod dir;
mod load;
mod lost;

use std::sync::Arc;

use strake_fabric::{Buf, Pool};
use strake_proto::{
    ChainId, ChunkId,
    checksum::block_sums,
    data::{Version, Writer},
};
use strake_store::MemStore;

use super::{Engine, Key, Options, TargetIdentity, Update};
use crate::device::{BLOCK, MemDevice};

pub(super) const CHAIN: ChainId = 7;

pub(super) fn key(index: u64) -> Key {
    Key { chain: CHAIN, chunk: ChunkId { ino: 5, data: 6, index } }
}

pub(super) fn identity() -> TargetIdentity {
    TargetIdentity {
        fs_uuid: [1; 16],
        target_uuid: [2; 16],
        target_id: 3,
        node: "oss1".into(),
        incarnation: 0,
    }
}

/// Device, table and options that outlive the engines opened on them.
pub(super) struct Bed {
    pub device: Arc<MemDevice>,
    pub table: MemStore,
    pub options: Options,
}

impl Bed {
    pub(super) async fn new(blocks: u64) -> Bed {
        let bed = Bed {
            device: Arc::new(MemDevice::new((256 + blocks) * BLOCK)),
            table: MemStore::new(),
            options: Options::default(),
        };
        Engine::format(&*bed.device, &bed.table, identity()).await.unwrap();
        bed
    }

    pub(super) async fn open(&self) -> Arc<Engine> {
        self.try_open().await.unwrap()
    }

    pub(super) async fn try_open(&self) -> strake_proto::Result<Arc<Engine>> {
        let table = Arc::new(self.table.clone());
        Engine::open(self.device.clone(), table, Pool::default(), self.options.clone()).await
    }
}

/// Bytes that differ everywhere and by seed, none of them zero.
pub(super) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut step = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 24) as u8 | 1
    };
    (0..len).map(|_| step()).collect()
}

pub(super) fn write(offset: u32, data: &[u8]) -> Update {
    Update::Write {
        offset,
        sums: block_sums(u64::from(offset), [data]),
        data: vec![Buf::copy_from(data)],
    }
}

pub(super) fn replace(data: &[u8]) -> Update {
    Update::Replace {
        sums: block_sums(0, [data]),
        data: vec![Buf::copy_from(data)],
        tombstone: false,
        damaged: vec![],
    }
}

pub(super) fn version(number: u64) -> Version {
    Version { epoch: 1, number }
}

pub(super) async fn apply(
    e: &Engine,
    key: Key,
    update: Update,
    number: u64,
) -> strake_proto::Result<()> {
    let staged = e.stage(key, update).await?;
    e.commit(
        staged,
        version(number),
        vec![Writer { session: 9, seq: number, version: version(number) }],
    )?;
    Ok(())
}

/// The chunk's bytes from `offset`, checked against the returned checksums.
pub(super) async fn read(
    e: &Engine,
    key: Key,
    offset: u32,
    len: u32,
) -> strake_proto::Result<Vec<u8>> {
    let out = e.read(&key, offset, len).await?;
    let bytes: Vec<u8> = out.data.iter().flat_map(|b| b.to_vec()).collect();
    assert_eq!(bytes.len(), out.len as usize);
    assert_eq!(block_sums(u64::from(offset), [&bytes[..]]), out.sums);
    Ok(bytes)
}

pub(super) async fn read_all(e: &Engine, key: Key) -> strake_proto::Result<Vec<u8>> {
    read(e, key, 0, 16 << 20).await
}
