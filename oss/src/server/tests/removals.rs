//! Truncating and removing files, and requests for them that come late.

use super::*;

#[tokio::test(start_paused = true)]
async fn trim_removes_cuts_and_lets_resync_know() {
    let mut c = Cluster::start(3).await;
    for i in 0..40u64 {
        c.write(i, 0, &bytes(i, 6000), i + 1).await.unwrap();
    }
    c.kill(2);
    assert!(c.trim(11, 100).await.stable);
    c.boot(2).await;
    c.whole().await;
    for t in 0..3 {
        assert_eq!(c.read(t, 9, 0, 9000).await.unwrap().1.len(), 6000);
        assert_eq!(c.read(t, 10, 0, 9000).await.unwrap().1, bytes(10, 6000)[..100]);
        assert_eq!(c.read(t, 11, 0, 9000).await.unwrap().1.len(), 0);
        assert_eq!(c.read(t, 39, 0, 9000).await.unwrap().1.len(), 0);
    }
    let list = |t| DataRequest { len: 100, ..DataRequest::new(CHAIN, 0, t, bed::chunk(0)) };
    let from = |r: DataRequest| DataRequest {
        chunk: strake_proto::ChunkId { ino: 0, data: 0, index: 0 },
        ..r
    };
    let listed = async |c: &Cluster, t| {
        c.call_as(Role::Server, t, opcode::LIST_CHUNKS, &from(list(t)), &[]).await.unwrap().0.len
    };
    c.trim(0, u32::MAX).await;
    for t in 0..3 {
        assert_eq!(
            listed(&c, t).await,
            40,
            "target {t} knows that the chunks of a file of no bytes are removed"
        );
    }
    let gone = |index, len| DataRequest {
        len,
        flags: FLAG_TOMBSTONE,
        ..DataRequest::new(CHAIN, c.request(0, 0).epoch, c.head(), bed::chunk(index))
    };
    let trim = async |c: &Cluster, role, r| c.call_as(role, c.head(), opcode::TRIM, &r, &[]).await;
    for part in [gone(1, u32::MAX), gone(0, 5)] {
        assert_eq!(trim(&c, Role::Server, part).await.unwrap_err().code, Code::Inval);
    }
    assert_eq!(trim(&c, Role::Client, gone(0, u32::MAX)).await.unwrap_err().code, Code::Access);
    trim(&c, Role::Server, gone(0, u32::MAX)).await.unwrap();
    for t in 0..3 {
        assert_eq!(listed(&c, t).await, 0, "target {t} keeps no tombstones of a deleted file");
    }
}

/// A client had sent the write twice, because the first connection was silent. The network delivers
/// the first copy after the file was removed.
#[tokio::test(start_paused = true)]
async fn a_write_that_comes_when_its_file_was_removed_leaves_no_chunk() {
    let c = Cluster::start(2).await;
    let data = bytes(1, 6000);
    let copy = c.write_request(0, 0, &data, 1);
    let other = c.write_request(1, 0, &data, 2);
    c.write(0, 0, &data, 1).await.unwrap();
    let gone = DataRequest {
        len: u32::MAX,
        flags: FLAG_TOMBSTONE,
        ..DataRequest::new(CHAIN, c.request(0, 0).epoch, c.head(), bed::chunk(0))
    };
    // One write is in work at the moment of the removal.
    let trim = c.call_as(Role::Server, c.head(), opcode::TRIM, &gone, &[]);
    let (trimmed, written) = tokio::join!(trim, c.call(c.head(), opcode::WRITE, &other, &data));
    trimmed.unwrap();
    // It was applied and removed, or refused, depending on the order.
    assert!(written.is_ok() || written.is_err_and(|e| e.code == Code::Stale));
    for late in [&copy, &other] {
        assert_eq!(
            c.call(c.head(), opcode::WRITE, late, &data).await.unwrap_err().code,
            Code::Stale
        );
    }
    for t in 0..2 {
        for index in 0..2 {
            assert_eq!(
                c.read(t, index, 0, 9000).await.unwrap(),
                (Version::default(), vec![]),
                "an absent chunk"
            );
        }
    }
}

/// The network delivers a chunk of a resync once more after the file was removed, when the replicas
/// behind the head have no tombstones of it any more.
#[tokio::test(start_paused = true)]
async fn a_chunk_of_a_fill_that_comes_when_its_file_was_removed_is_not_taken() {
    // The resync waits for long after it has sent the chunk.
    let mut c = Cluster::start_with(2, |cfg| cfg.sync_rate = 1).await;
    let chunks = |c: &Cluster| c.nodes[1].server.as_ref().unwrap().status().targets[0].chunks;
    c.kill(1);
    let data = bytes(1, 6000);
    let version = c.write(0, 0, &data, 1).await.unwrap().version;
    c.boot(1).await;
    while c.authority.chain().state_of(1) != Some(pb::ReplicaState::ReplicaSyncing)
        || chunks(&c) == 0
    {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let epoch = c.authority.chain().epoch;
    let put = DataRequest {
        kind: Kind::Replace,
        len: 6000,
        version,
        sums: block_sums(0, [&data[..]]),
        ..DataRequest::new(CHAIN, epoch, 1, bed::chunk(0))
    };
    c.call_as(Role::Server, 1, opcode::SYNC_PUT, &put, &data).await.unwrap();
    let gone = DataRequest {
        len: u32::MAX,
        flags: FLAG_TOMBSTONE,
        ..DataRequest::new(CHAIN, epoch, c.head(), bed::chunk(0))
    };
    c.call_as(Role::Server, c.head(), opcode::TRIM, &gone, &[]).await.unwrap();
    assert_eq!(chunks(&c), 0);
    let e = c.call_as(Role::Server, 1, opcode::SYNC_PUT, &put, &data).await.unwrap_err();
    assert_eq!((e.code, chunks(&c)), (Code::Stale, 0), "{e}");
}

/// The leader asks again because the connection broke, while the first request is in progress.
#[tokio::test(start_paused = true)]
async fn a_file_that_is_removed_twice_at_once_leaves_nothing_that_cannot_be_removed() {
    let c = Cluster::start(2).await;
    for index in 0..4 {
        c.write(index, 0, &bytes(index, 6000), index + 1).await.unwrap();
    }
    let gone = DataRequest {
        len: u32::MAX,
        flags: FLAG_TOMBSTONE,
        ..DataRequest::new(CHAIN, c.request(0, 0).epoch, c.head(), bed::chunk(0))
    };
    let trim = |after| {
        let (c, gone) = (&c, &gone);
        async move {
            tokio::time::sleep(Duration::from_micros(after)).await;
            c.call_as(Role::Server, c.head(), opcode::TRIM, gone, &[])
                .await
                .map(drop)
                .map_err(|e| e.code)
        }
    };
    let all = futures_util::future::join_all((0..40).map(|i| trim(i * 10))).await;
    assert!(all.iter().all(|r| matches!(r, Ok(()) | Err(Code::Overloaded))), "{all:?}");
    trim(0).await.unwrap();
    assert!((0..2).all(|t| c.nodes[t].server.as_ref().unwrap().status().targets[0].chunks == 0));
}

/// The TRIM came from another metadata server that was not heard of for long, or the network
/// delayed a copy of the request.
#[tokio::test(start_paused = true)]
async fn a_trim_that_comes_late_cuts_nothing_that_was_written_since() {
    let c = Cluster::start(3).await;
    let data = bytes(1, 6000);
    c.write(0, 0, &data, 1).await.unwrap();
    let cut = |seq, term| DataRequest {
        len: u32::MAX,
        seq,
        version: Version { epoch: term, number: 0 },
        ..DataRequest::new(CHAIN, c.request(0, 0).epoch, c.head(), bed::chunk(0))
    };
    let trim =
        async |r| c.call_as(Role::Server, c.head(), opcode::TRIM, &r, &[]).await.map(|r| r.0);
    let first = trim(cut(0, 3)).await.unwrap().version.number;
    let second = trim(cut(0, 4)).await.unwrap().version.number;
    assert_eq!(c.read(0, 0, 0, 9000).await.unwrap().1, data, "a number was asked for, that is all");
    trim(cut(second, 4)).await.unwrap();
    assert_eq!(c.read(0, 0, 0, 9000).await.unwrap().1.len(), 0);
    c.write(0, 0, &data, 2).await.unwrap();
    for late in [cut(first, 3), cut(second, 4), cut(0, 3)] {
        assert_eq!(trim(late).await.unwrap_err().code, Code::StaleEpoch);
    }
    for t in 0..3 {
        assert_eq!(c.read(t, 0, 0, 9000).await.unwrap().1, data);
    }
}
