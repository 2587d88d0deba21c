//! Damage on the last good copy during a resync from it.

use std::time::Duration;

use strake_fabric::Role;
use strake_proto::{
    ChunkId, Code,
    checksum::block_sums,
    data::{DataRequest, Kind, ListEntry, Version},
    map::ChainExt,
    opcode,
    pb::ReplicaState,
};

use super::{
    bed::{CHAIN, Cluster, bytes, chunk},
    flip_everywhere, flip_now,
    scrub::{counts, filled, flip_record, in_sync, is_whole, key, scrubbed, status},
};
use crate::engine::record::{header_key, segment_key};

/// What [`damage`] makes unreadable: chunk, first byte, end.
const BAD: [(u64, u32, u32); 3] = [(0, 4096, 5000), (1, 8192, 12_288), (2, 262_144, 524_288)];

/// Damages a partial block, a block, and the record of 64 blocks, at a target without a cache.
fn damage(c: &Cluster, want: &[Vec<u8>]) {
    let mut short = want[0][4096..].to_vec();
    short.resize(4096, 0);
    flip_now(c, 0, &short);
    flip_now(c, 0, &want[1][8192..12_288]);
    flip_record(c, 0, &segment_key(&key(2), 1), 700);
}

/// Checks that everything damaged is an error at this target, and everything else is good.
async fn is_whole_but_for_what_is_bad(c: &Cluster, i: u32, want: &[Vec<u8>]) {
    let away = c.authority.states().iter().any(|(_, s)| *s != ReplicaState::ReplicaServing);
    let code = if away { Code::NotServing } else { Code::Corrupt };
    for (index, from, to) in BAD {
        let all = &want[index as usize];
        for at in [from, to - 1] {
            let e = c.read(i, index, at, 1).await.unwrap_err();
            assert_eq!(e.code, code, "byte {at} of chunk {index} at {i}: {e}");
        }
        assert!(
            c.read(i, index, 0, from).await.unwrap().1 == all[..from as usize],
            "chunk {index} at {i}"
        );
        let rest = c.read(i, index, to, (16 << 20) - to).await.unwrap().1;
        assert!(rest == all[to as usize..], "chunk {index} at {i}");
    }
    assert!(c.read(i, 3, 0, 16 << 20).await.unwrap().1 == want[3]);
}

/// Node 1 has lost everything, and node 0 has nothing in memory.
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
    let r = DataRequest { chunk: ChunkId { ino: 0, data: 0, index: 0 }, ..r };
    let (_, list) = c.call_as(Role::Server, 1, opcode::LIST_CHUNKS, &r, &[]).await.unwrap();
    ListEntry::decode_all(&list).unwrap().iter().map(|e| e.chunk.index).collect()
}

#[tokio::test(start_paused = true)]
async fn a_chunk_whose_record_is_damaged_keeps_no_other_one_from_being_sent() {
    let (mut c, _) = wiped().await;
    flip_record(&c, 0, &header_key(&key(0)), 100);
    c.boot(1).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(stored(&c).await, [1, 2, 3]);
    // The chunk's version is not known, so the other replica does not come into sync.
    assert_eq!(c.authority.chain().state_of(1), Some(ReplicaState::ReplicaSyncing));
    assert_eq!(c.read(0, 0, 0, 10).await.unwrap_err().code, Code::Corrupt);
}

/// Stand-in bytes for damaged blocks are checked against their checksums, too.
#[tokio::test(start_paused = true)]
async fn what_comes_with_damage_is_checked_as_what_comes_without() {
    let (mut c, _) = wiped().await;
    flip_record(&c, 0, &header_key(&key(0)), 100);
    c.boot(1).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let data = bytes(1, 9000);
    let put = DataRequest {
        kind: Kind::Replace,
        len: 9000,
        version: Version { epoch: 1, number: 9 },
        sums: block_sums(0, [&data[..]]),
        damaged: std::iter::once(4096..8192).collect(),
        ..DataRequest::new(CHAIN, c.authority.chain().epoch, 1, chunk(7))
    };
    for at in [0, 5000, 8999] {
        let mut flipped = data.clone();
        flipped[at] ^= 1;
        let e = c.call_as(Role::Server, 1, opcode::SYNC_PUT, &put, &flipped).await.unwrap_err();
        assert_eq!(e.code, Code::Resend, "byte {at}");
    }
    c.call_as(Role::Server, 1, opcode::SYNC_PUT, &put, &data).await.unwrap();
    let s = status(&c, 1);
    assert_eq!((counts(&s), s.findings[0].offset, s.findings[0].bytes), ((1, 0, 1), 4096, 4096));
}

/// The chain comes into sync with the good data. The lost data stays an error on both replicas,
/// also over a restart, until it is written anew.
#[tokio::test(start_paused = true)]
async fn what_has_no_good_copy_is_damaged_at_both_and_all_else_is_there_twice() {
    let (mut c, mut want) = wiped().await;
    damage(&c, &want);
    c.boot(1).await;
    c.write(1, 400_000, b"while it is filled", 49).await.unwrap();
    want[1][400_000..400_018].copy_from_slice(b"while it is filled");
    in_sync(&c).await;
    for i in [0, 1] {
        is_whole_but_for_what_is_bad(&c, i, &want).await;
        let s = scrubbed(&c, i as usize).await;
        assert_eq!((counts(&s), s.findings.len()), ((3, 0, 3), 3), "target {i}: {:?}", s.findings);
        assert!(s.findings.iter().all(|f| f.lost && !f.record));
    }
    // The replicas do not try for ever to repair one from the other.
    tokio::time::sleep(Duration::from_secs(60)).await;
    let errors =
        || [0, 1].map(|i| c.nodes[i].server.as_ref().unwrap().status().targets[0].checksum_errors);
    let before = errors();
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(errors(), before);

    c.kill(1);
    c.boot(1).await;
    in_sync(&c).await;
    is_whole_but_for_what_is_bad(&c, 1, &want).await;
    assert_eq!(counts(&scrubbed(&c, 1).await), (3, 0, 3));
    // The replica that was resynced now has the data alone, and resyncs the other one.
    c.kill(0);
    c.wipe(0).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    c.boot(0).await;
    in_sync(&c).await;
    is_whole_but_for_what_is_bad(&c, 0, &want).await;

    let part = c.write(1, 9000, b"part of a bad block", 50).await.unwrap_err();
    assert_eq!(part.code, Code::Corrupt);
    for (seq, (index, from, to)) in BAD.into_iter().enumerate() {
        let data = want[index as usize][from as usize..to as usize].to_vec();
        c.write(index, from, &data, 60 + seq as u64).await.unwrap();
    }
    for i in [0, 1] {
        is_whole(&c, i, &want).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(status(&c, i as usize).lost, 0);
    }
    assert!(c.authority.states().iter().all(|(_, s)| *s == ReplicaState::ReplicaServing));
}

#[tokio::test(start_paused = true)]
async fn a_good_copy_that_comes_back_mends_what_was_carried_over_too() {
    let mut c = Cluster::start(3).await;
    let want = filled(&c).await;
    c.kill(1);
    c.kill(2);
    c.wipe(2).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    c.authority.tick();
    c.kill(0);
    c.boot(0).await;
    damage(&c, &want);
    c.boot(2).await;
    while c.authority.chain().state_of(2) != Some(ReplicaState::ReplicaServing) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    is_whole_but_for_what_is_bad(&c, 2, &want).await;
    c.boot(1).await;
    in_sync(&c).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    for i in 0..3 {
        is_whole(&c, i, &want).await;
        assert_eq!(status(&c, i as usize).lost, 0, "target {i}");
    }
    assert_eq!((counts(&status(&c, 1)), counts(&status(&c, 2))), ((0, 0, 0), (3, 3, 0)));
}

/// Readers and writers wait for it, as for a chunk without any copy in service.
#[tokio::test(start_paused = true)]
async fn a_good_copy_that_is_away_is_waited_for() {
    let mut c = Cluster::start(2).await;
    let mut want = filled(&c).await;
    c.kill(1);
    tokio::time::sleep(Duration::from_secs(3)).await;
    c.authority.tick();
    flip_everywhere(&c, 0, &want[1][8192..12_288]).await;
    for _ in 0..2 {
        let read = DataRequest { offset: 9000, len: 10, ..c.request(0, 1) };
        let e = c.call(0, opcode::READ, &read, &[]).await.unwrap_err();
        assert!(
            e.code == Code::NotServing && e.message.contains("a replica does not answer"),
            "{e}"
        );
        let e = c
            .call(0, opcode::WRITE, &c.write_request(1, 9000, b"part", 50), b"part")
            .await
            .unwrap_err();
        assert!(
            e.code == Code::NotServing && e.message.contains("a replica does not answer"),
            "{e}"
        );
    }
    assert!(
        c.read(0, 1, 12_288, 5000).await.unwrap().1 == want[1][12_288..17_288],
        "all else is served"
    );
    c.boot(1).await;
    in_sync(&c).await;
    c.write(1, 9000, b"part", 50).await.unwrap();
    want[1][9000..9004].copy_from_slice(b"part");
    for i in 0..2 {
        is_whole(&c, i, &want).await;
    }
    assert_eq!(status(&c, 0).lost, 0);
}

/// The other copy does not answer, and it is not known yet that it is away.
#[tokio::test(start_paused = true)]
async fn an_update_onto_a_bad_block_is_not_refused_because_nobody_answered() {
    let c = Cluster::start(2).await;
    let mut want = filled(&c).await;
    let (head, other) = if c.head() == 0 { (0, 1) } else { (1, 0) };
    flip_everywhere(&c, head, &want[1][8192..12_288]).await;
    c.net.cut.lock().insert(other);
    let request = c.write_request(1, 9000, b"part", 50);
    let e = loop {
        let Err(e) = c.call(head, opcode::WRITE, &request, b"part").await else {
            panic!("nobody has the block")
        };
        c.authority.tick();
        if e.code != Code::TimedOut {
            break e;
        }
    };
    assert!(e.is_retryable(), "{e}");
    c.net.cut.lock().clear();
    in_sync(&c).await;
    c.write(1, 9000, b"part", 50).await.unwrap();
    want[1][9000..9004].copy_from_slice(b"part");
    for i in 0..2 {
        is_whole(&c, i, &want).await;
    }
}

#[tokio::test(start_paused = true)]
async fn only_a_resync_carries_damage_and_only_such_as_can_be() {
    let c = Cluster::start(1).await;
    c.write(0, 0, b"data", 1).await.unwrap();
    let data = bytes(1, 9000);
    let with = |damaged: &[(u32, u32)]| DataRequest {
        kind: Kind::Replace,
        len: 9000,
        version: Version { epoch: 1, number: 9 },
        sums: block_sums(0, [&data[..]]),
        damaged: damaged.iter().map(|(a, b)| *a..*b).collect(),
        ..DataRequest::new(CHAIN, c.authority.chain().epoch, 0, chunk(0))
    };
    let code = async |op, r: DataRequest, data: &[u8]| {
        c.call_as(Role::Server, 0, op, &r, data).await.unwrap_err().code
    };
    // These are valid requests: they are refused only because this replica is in sync.
    for damaged in [&[][..], &[(0, 4096)], &[(0, 9000)], &[(0, 4096), (4096, 8192), (8192, 9000)]] {
        assert_eq!(
            code(opcode::SYNC_PUT, with(damaged), &data).await,
            Code::NotServing,
            "{damaged:?}"
        );
    }
    let many: Vec<(u32, u32)> = (0..2048).map(|_| (0, 4096)).collect();
    for damaged in [
        &[(0, 0)][..],
        &[(0, 4095)],
        &[(1, 4096)],
        &[(4096, 0)],
        &[(8192, 12_288)],
        &[(8192, u32::MAX)],
        &[(0, 4096), (0, 4096)],
        &[(4096, 8192), (0, 4096)],
        &many[..],
    ] {
        assert_eq!(
            code(opcode::SYNC_PUT, with(damaged), &data).await,
            Code::Inval,
            "{:?}",
            damaged.first()
        );
    }
    let gone = DataRequest {
        len: 0,
        sums: vec![],
        flags: strake_proto::data::FLAG_TOMBSTONE,
        ..with(&[(0, 4096)])
    };
    assert_eq!(code(opcode::SYNC_PUT, gone, &[]).await, Code::Inval);
    let write = DataRequest { kind: Kind::Write, ..with(&[(0, 4096)]) };
    for op in [opcode::WRITE, opcode::FORWARD] {
        assert_eq!(code(op, write.clone(), &data).await, Code::Inval);
    }
    assert_eq!(code(opcode::FORWARD, with(&[(0, 4096)]), &data).await, Code::Inval);
    assert_eq!(
        code(opcode::READ, DataRequest { kind: Kind::None, ..with(&[(0, 4096)]) }, &[]).await,
        Code::Inval
    );
    assert_eq!(c.read(0, 0, 0, 9000).await.unwrap().1, b"data");
}
