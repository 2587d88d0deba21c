//! Damage on the last good copy while another one is made.

use std::time::Duration;

use strake_proto::{Code, data::DataRequest, map::ChainExt, opcode, pb::ReplicaState};

use super::{
    bed::{CHAIN, Cluster, chunk},
    scrub::{filled, flip_record, key},
};
use crate::engine::record::header_key;

/// Node 1 has lost all it had, and node 0 has nothing in memory.
async fn wiped() -> (Cluster, Vec<Vec<u8>>) {
    let mut c = Cluster::start(2).await;
    let want = filled(&c).await;
    c.kill(1);
    c.wipe(1).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    c.authority.tick();
    c.kill(0);
    c.boot(0).await;
    (c, want)
}

/// Chunks that target 1 has a version of.
async fn stored(c: &Cluster) -> Vec<u64> {
    let r = DataRequest { len: 100, ..DataRequest::new(CHAIN, 0, 1, chunk(0)) };
    let r = DataRequest { chunk: strake_proto::ChunkId { ino: 0, data: 0, index: 0 }, ..r };
    let (_, list) = c.call_as(strake_fabric::Role::Server, 1, opcode::LIST_CHUNKS, &r, &[]).await.unwrap();
    strake_proto::data::ListEntry::decode_all(&list).unwrap().iter().map(|e| e.chunk.index).collect()
}

#[tokio::test(start_paused = true)]
async fn a_chunk_whose_record_is_damaged_keeps_no_other_one_from_being_sent() {
    let (mut c, _) = wiped().await;
    flip_record(&c, 0, &header_key(&key(0)), 100);
    c.boot(1).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(stored(&c).await, [1, 2, 3]);
    // It is not known what the chunk was, so the other one is not in sync.
    assert_eq!(c.authority.chain().state_of(1), Some(ReplicaState::ReplicaSyncing));
    assert_eq!(c.read(0, 0, 0, 10).await.unwrap_err().code, Code::Corrupt);
}
