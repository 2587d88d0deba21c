//! Removing a file's data when there is much of it, or it is damaged or not on every replica.

use std::time::Duration;

use strake_fabric::{Buf, Role};
use strake_proto::{
    ChunkId, Code,
    checksum::block_sums,
    data::{DataReply, DataRequest, FLAG_TOMBSTONE, Kind, ListEntry, Version, Writer},
    map::ChainExt,
    opcode, pb,
};
use tokio::time::Instant;

use super::{
    bed::{CHAIN, Cluster, bytes, chunk},
    scrub::{filled, flip_record, in_sync, key},
};
use crate::{
    device::mem::Op,
    engine::{Update, record::header_key},
};

/// Puts a chunk into one target's store, bypassing the chain.
async fn plant(c: &Cluster, target: usize, index: u64, update: Update) {
    let node = &c.nodes[target].server.as_ref().unwrap().node;
    let engine = node.targets.all()[0].engine.clone();
    let staged = engine.stage(key(index), update).await.unwrap();
    engine.commit(staged, Version { epoch: 1, number: 1 }, Vec::new()).unwrap();
}

fn some() -> Update {
    let data = b"some bytes";
    Update::Write { offset: 0, sums: block_sums(0, [&data[..]]), data: vec![Buf::copy_from(data)] }
}

/// All records of a target, tombstones included.
async fn listed(c: &Cluster, target: u32) -> Vec<ListEntry> {
    let (mut all, mut after) = (Vec::new(), ChunkId { ino: 0, data: 0, index: 0 });
    loop {
        let r = DataRequest { len: 4096, ..DataRequest::new(CHAIN, 0, target, after) };
        let (_, list) =
            c.call_as(Role::Server, target, opcode::LIST_CHUNKS, &r, &[]).await.unwrap();
        let page = ListEntry::decode_all(&list).unwrap();
        let Some(last) = page.last() else { return all };
        after = last.chunk;
        all.extend(page);
    }
}

fn gone(c: &Cluster) -> DataRequest {
    let epoch = c.request(0, 0).epoch;
    DataRequest {
        len: u32::MAX,
        flags: FLAG_TOMBSTONE,
        ..DataRequest::new(CHAIN, epoch, c.head(), chunk(0))
    }
}

async fn ask(c: &Cluster, r: &DataRequest) -> DataReply {
    c.call_as(Role::Server, r.target, opcode::TRIM, r, &[]).await.unwrap().0
}

/// Like the metadata servers: repeats until everything is gone. Returns the number of requests.
async fn remove_for_good(c: &Cluster) -> usize {
    let (mut r, mut rounds) = (DataRequest { offset: 1, ..gone(c) }, 1);
    loop {
        let done = ask(c, &r).await;
        if done.stable {
            return rounds;
        }
        let (seq, index) = (u64::from(done.len - 1), done.version.number);
        assert!((seq, index) > (r.seq, r.chunk.index), "it comes forward");
        (r.seq, r.chunk.index, rounds) = (seq, index, rounds + 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_cut_of_many_chunks_ends_in_steps_that_each_end_soon() {
    let c = Cluster::start(2).await;
    c.flush().await.unwrap();
    for index in 0..4000 {
        for target in 0..2 {
            plant(&c, target, index, if index < 3000 { some() } else { Update::Remove }).await;
        }
    }
    let version = Version { epoch: 1, number: 0 };
    let mut cut = DataRequest { flags: 0, version, offset: 10, len: 4, ..gone(&c) };
    cut.chunk.index = 1;
    let mut rounds = 0;
    loop {
        rounds += 1;
        let number = ask(&c, &DataRequest { seq: 0, ..cut.clone() }).await.version.number;
        let begun = Instant::now();
        let done = ask(&c, &DataRequest { seq: number, ..cut.clone() }).await;
        // A page of chunks would take some seventy.
        assert!(begun.elapsed() < Duration::from_millis(20), "{:?}", begun.elapsed());
        if done.stable {
            break;
        }
        assert!(done.len == 1 && done.version.number > cut.chunk.index);
        (cut.chunk.index, cut.len) = (done.version.number, u32::MAX);
    }
    assert!(rounds > 4, "{rounds}");
    for target in 0..2 {
        let all = listed(&c, target).await;
        assert_eq!(all.len(), 4000, "tombstones of a file that is there stay");
        assert_eq!(
            all.iter().filter(|e| !e.tombstone).map(|e| (e.chunk.index, e.len)).collect::<Vec<_>>(),
            [(0, 4)]
        );
    }
    // A caller that did everything in another epoch asks only whether it is still so.
    (cut.chunk.index, cut.len) = (u64::MAX, u32::MAX);
    let number = ask(&c, &DataRequest { seq: 0, ..cut.clone() }).await.version.number;
    let done = ask(&c, &DataRequest { seq: number, ..cut.clone() }).await;
    assert_eq!((done.stable, done.boot_ids.len()), (true, 2));
    let forgotten = DataRequest { seq: 1, offset: 10, chunk: chunk(u64::MAX), ..gone(&c) };
    let done = ask(&c, &forgotten).await;
    assert_eq!((done.stable, done.boot_ids.len()), (true, 2));
    assert_eq!(listed(&c, 1).await.len(), 4000);
    // A caller that does not know of steps waits for all of it.
    assert!(ask(&c, &gone(&c)).await.stable);
    for target in 0..2 {
        assert_eq!(listed(&c, target).await, []);
    }
}

/// A FORWARD that the network delayed until its file was removed made a chunk on the tail alone; or
/// on the head, which was the tail then.
#[tokio::test(start_paused = true)]
async fn what_only_some_replicas_have_of_a_removed_file_goes_too() {
    let c = Cluster::start(3).await;
    c.flush().await.unwrap();
    for index in 0..20_000 {
        for target in 0..3 {
            plant(&c, target, index, Update::Remove).await;
        }
    }
    plant(&c, 0, 20_001, some()).await;
    plant(&c, 1, 20_005, some()).await;
    plant(&c, 2, 7, some()).await;
    for index in 20_003..20_053 {
        plant(&c, 2, index, some()).await;
    }
    plant(&c, 2, 40_000, Update::Remove).await;
    for node in &c.nodes {
        node.device.set_latency(&[Op::Flush], Duration::from_millis(2));
    }
    // One request for each flush.
    assert_eq!(remove_for_good(&c).await, 2);
    for target in 0..3 {
        assert_eq!(listed(&c, target).await, [], "target {target}");
        assert_eq!(c.nodes[target as usize].server.as_ref().unwrap().status().targets[0].chunks, 0);
    }
}

/// The network delays a copy of a removal's FORWARD until the tombstones are forgotten.
#[tokio::test(start_paused = true)]
async fn a_removal_that_comes_again_when_its_tombstone_is_forgotten_leaves_none() {
    let c = Cluster::start(2).await;
    c.write(0, 0, b"some bytes", 1).await.unwrap();
    let (tail, number) = (1 - c.head(), 2);
    let (version, prev) = (Version { epoch: 1, number }, Version { epoch: 1, number: 1 });
    let writers = vec![Writer { session: 0, seq: 0, version: prev }];
    let late =
        DataRequest { kind: Kind::Remove, target: tail, len: 0, version, writers, ..gone(&c) };
    let send = |r: DataRequest| {
        let c = &c;
        async move { c.call_as(Role::Server, tail, opcode::FORWARD, &r, &[]).await.map(|r| r.0.stable) }
    };
    remove_for_good(&c).await;
    assert_eq!(listed(&c, tail).await, []);
    assert!(send(late.clone()).await.unwrap());
    // A copy of a truncation that found nothing, from a time when the file was there.
    let writers = vec![Writer { session: 0, seq: 0, version: Version::default() }];
    assert!(send(DataRequest { flags: 0, writers, ..late }).await.unwrap());
    assert_eq!(listed(&c, tail).await, []);
}

/// A resync stores a chunk that only its source has, while the file is removed for good.
#[tokio::test(start_paused = true)]
async fn a_chunk_that_is_stored_by_a_fill_while_its_file_is_removed_is_not_taken() {
    // The resync waits for long after it has sent a chunk.
    let mut c = Cluster::start_with(2, |cfg| cfg.sync_rate = 1).await;
    c.kill(1);
    c.write(0, 0, &bytes(1, 6000), 1).await.unwrap();
    c.boot(1).await;
    let chunks = |c: &Cluster| c.nodes[1].server.as_ref().unwrap().status().targets[0].chunks;
    while c.authority.chain().state_of(1) != Some(pb::ReplicaState::ReplicaSyncing)
        || chunks(&c) == 0
    {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let data = bytes(2, 6000);
    let put = DataRequest {
        kind: Kind::Replace,
        len: 6000,
        version: Version { epoch: 1, number: 1 },
        sums: block_sums(0, [&data[..]]),
        ..DataRequest::new(CHAIN, c.authority.chain().epoch, 1, chunk(7))
    };
    c.nodes[1].device.set_latency(&[Op::Write], Duration::from_millis(500));
    let removed = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let begun = Instant::now();
        remove_for_good(&c).await;
        assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
    };
    let stored = c.call_as(Role::Server, 1, opcode::SYNC_PUT, &put, &data);
    let (stored, ()) = tokio::join!(stored, removed);
    assert_eq!((stored.unwrap_err().code, listed(&c, 1).await), (Code::Stale, vec![]));
    // A late tombstone of the resync would stay, too.
    let tombstone = DataRequest { flags: FLAG_TOMBSTONE, len: 0, sums: vec![], ..put };
    c.call_as(Role::Server, 1, opcode::SYNC_PUT, &tombstone, &[]).await.unwrap();
    assert_eq!(listed(&c, 1).await, []);
}

/// The only copy has a damaged record, so its version is not known. Its file is removed all the
/// same, and then the chain can be resynced.
#[tokio::test(start_paused = true)]
async fn a_chunk_whose_record_is_damaged_goes_with_its_file() {
    let mut c = Cluster::start(2).await;
    filled(&c).await;
    c.kill(1);
    c.wipe(1).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    c.authority.tick();
    c.kill(0);
    c.boot(0).await;
    flip_record(&c, 0, &header_key(&key(0)), 100);
    c.boot(1).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(c.read(0, 0, 0, 10).await.unwrap_err().code, Code::Corrupt);
    remove_for_good(&c).await;
    in_sync(&c).await;
    for target in 0..2 {
        assert_eq!(listed(&c, target).await, []);
    }
}
