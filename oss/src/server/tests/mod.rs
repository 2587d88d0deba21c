//! Clusters of storage servers under failures.

mod backpressure;
mod bed;
mod bounds;
mod copies;
mod endings;
mod grants;
mod kept;
mod leaving;
mod numbers;
mod refused;
mod refused_targets;
mod rot;
mod scrub;
mod tcp;
mod trims;
mod turns;

use std::time::Duration;

use bed::{CHAIN, Cluster, SESSION, bytes};
use strake_fabric::Role;
use strake_proto::{
    Code, Incarnation, Result, Rights,
    checksum::block_sums,
    data::{DataRequest, FLAG_REPLAY, FLAG_STABLE, FLAG_TOMBSTONE, Kind, Version, Writer},
    layout::MAX_CHUNK,
    map::ChainExt,
    opcode, pb,
};
use tokio::time::Instant;

use crate::device::mem::Op;

#[tokio::test(start_paused = true)]
async fn writes_of_all_sizes_are_read_from_every_replica() {
    let c = Cluster::start(3).await;
    let mut model = vec![0u8; MAX_CHUNK as usize];
    let mut end = 0;
    let cases = [
        (0, 1),
        (1, 4096),
        (4095, 2),
        (8192, 4096),
        (100_000, 70_001),
        (300_000, 1 << 20),
        (5, 12_000),
    ];
    for (seq, (offset, len)) in cases.into_iter().enumerate() {
        let data = bytes(seq as u64, len);
        let r = c.write(0, offset, &data, seq as u64 + 1).await.unwrap();
        assert_eq!((r.version.number, r.stamps.len(), r.stable), (seq as u64 + 1, 3, false));
        model[offset as usize..offset as usize + len].copy_from_slice(&data);
        end = end.max(offset as usize + len);
        for t in 0..3 {
            let (v, got) = c.read(t, 0, 0, MAX_CHUNK as u32).await.unwrap();
            assert_eq!(v, r.version);
            assert!(got == model[..end], "target {t} after write {seq}");
        }
    }
    let (_, part) = c.read(1, 0, 4000, 5000).await.unwrap();
    assert_eq!(part, model[4000..9000]);
    let whole = bytes(9, MAX_CHUNK as usize);
    c.write(1, 0, &whole, 100).await.unwrap();
    assert!(c.read(2, 1, 0, MAX_CHUNK as u32).await.unwrap().1 == whole);
    assert_eq!(c.read(0, 7, 0, 10).await.unwrap(), (Version::default(), vec![]), "an absent chunk");
}

#[tokio::test(start_paused = true)]
async fn a_repeated_write_is_answered_and_not_applied_again() {
    let c = Cluster::start(3).await;
    let first = c.write(0, 0, b"first", 1).await.unwrap();
    c.write(0, 0, b"other", 2).await.unwrap();
    let again = c.write(0, 0, b"first", 1).await.unwrap();
    assert_eq!((again.version, again.stable, again.stamps), (first.version, true, first.stamps));
    assert_eq!(c.read(0, 0, 0, 5).await.unwrap().1, b"other");
}

#[tokio::test(start_paused = true)]
async fn acknowledged_writes_survive_the_death_of_any_replica_while_writing() {
    for victim in 0..3 {
        let mut c = Cluster::start(3).await;
        for i in 0..10u64 {
            c.write(i, 0, &bytes(i, 10_000), i + 1).await.unwrap();
        }
        c.kill(victim);
        for i in 10..20u64 {
            c.write(i, 0, &bytes(i, 10_000), i + 1).await.unwrap();
        }
        c.write(3, 100, b"changed while one was away", 50).await.unwrap();
        c.boot(victim).await;
        c.whole().await;
        for i in 0..20u64 {
            let mut want = bytes(i, 10_000);
            if i == 3 {
                want[100..126].copy_from_slice(b"changed while one was away");
            }
            for t in 0..3 {
                assert!(
                    c.read(t, i, 0, 10_000).await.unwrap().1 == want,
                    "victim {victim}, chunk {i}, target {t}"
                );
            }
        }
    }
}

/// Nothing is called written while fewer copies are in sync than `min_copies`: not a new update,
/// not one in flight when a replica died, and no flush. Reads continue, and writes do once enough
/// are back.
#[tokio::test(start_paused = true)]
async fn writes_wait_for_min_copies() {
    let mut c = Cluster::start(3).await;
    c.authority.map.lock().min_copies = 2;
    c.authority.map.lock().version += 1;
    c.write(0, 0, b"three", 1).await.unwrap();
    c.kill(2);
    // Two are enough.
    c.write(0, 0, b"two", 2).await.unwrap();
    c.kill(1);
    let under_way = c.write(0, 0, b"one", 3).await;
    assert_eq!(under_way.unwrap_err().code, Code::NotServing, "the second died under way");
    assert_eq!(
        c.authority.states().iter().filter(|s| s.1 == pb::ReplicaState::ReplicaServing).count(),
        1
    );
    let new = c.write(1, 0, b"new", 4).await.unwrap_err();
    assert_eq!(
        (new.code, new.message.contains("1 of the 2 copies")),
        (Code::NotServing, true),
        "{new}"
    );
    assert_eq!(c.flush().await.unwrap_err().code, Code::NotServing);
    c.read(c.head(), 0, 0, 3).await.unwrap();
    c.boot(1).await;
    c.write(1, 0, b"new", 4).await.unwrap();
    assert!(c.flush().await.unwrap().stamps.len() >= 2);
    // `min_copies` above the number of copies of the chain has no further effect.
    c.boot(2).await;
    c.whole().await;
    c.authority.map.lock().min_copies = 9;
    c.authority.map.lock().version += 1;
    tokio::time::sleep(Duration::from_secs(1)).await;
    c.write(1, 0, b"all", 5).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_cut_off_replica_answers_nothing_once_its_lease_is_over() {
    let c = Cluster::start(2).await;
    c.write(0, 0, b"old", 1).await.unwrap();
    c.net.cut.lock().insert(1);
    c.write(0, 0, b"new", 2).await.unwrap();
    assert_eq!(c.authority.chain().epoch, 2);
    // It still has the old view of the chain; a client with that view reaches it by another link.
    c.net.cut.lock().clear();
    c.net.cut.lock().insert(900);
    let old = DataRequest { epoch: 1, len: 3, ..c.request(1, 0) };
    assert_eq!(c.call(1, opcode::READ, &old, &[]).await.unwrap_err().code, Code::LeaseExpired);
    c.net.cut.lock().clear();
    c.whole().await;
    assert_eq!(c.read(1, 0, 0, 3).await.unwrap().1, b"new");
}

#[tokio::test(start_paused = true)]
async fn a_restart_of_all_loses_only_what_was_not_flushed_and_shows_in_the_stamps() {
    let mut c = Cluster::start(3).await;
    let data = bytes(1, 5000);
    let stable = {
        let make = || DataRequest { flags: FLAG_STABLE, ..c.write_request(0, 0, &data, 1) };
        c.retry(opcode::WRITE, &data, make).await.unwrap().0
    };
    assert!(stable.stable && stable.stamps.len() == 3);
    let unstable = c.write(0, 0, b"unflushed", 2).await.unwrap();
    for i in 0..3 {
        c.kill(i);
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    for i in 0..3 {
        c.boot(i).await;
    }
    c.whole().await;
    let (v, got) = c.read(2, 0, 0, 5000).await.unwrap();
    assert!(got == data && v == stable.version);
    assert_ne!(
        c.flush().await.unwrap().stamps,
        unstable.stamps,
        "the client learns that it must send again"
    );
    let replay = || DataRequest {
        flags: FLAG_REPLAY,
        version: unstable.version,
        ..c.write_request(0, 0, b"unflushed", 2)
    };
    let again = c.retry(opcode::WRITE, b"unflushed", replay).await.unwrap().0;
    assert!(again.version > unstable.version);
    assert_eq!(c.read(0, 0, 0, 9).await.unwrap().1, b"unflushed");
    let flushed = c.flush().await.unwrap();
    assert_eq!(flushed.stamps, again.stamps);
}

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

/// A punch is an update like any other: applied on all replicas, once, kept over restarts and
/// resync, and not undone by an older write that is resent.
#[tokio::test(start_paused = true)]
async fn a_punch_goes_down_the_chain_and_is_never_undone() {
    let mut c = Cluster::start(3).await;
    let data = bytes(1, 40_000);
    let write = c.write(0, 0, &data, 1).await.unwrap();
    let punch = async |c: &Cluster, index, seq, (offset, len)| {
        let empty = || DataRequest {
            kind: Kind::Punch,
            sums: vec![],
            ..c.write_request(index, offset, &[], seq)
        };
        c.retry(opcode::WRITE, &[], || DataRequest { len, ..empty() }).await.unwrap().0
    };
    let first = punch(&c, 0, 2, (4096, 20_000)).await;
    assert_eq!((first.version.number, first.stamps.len(), first.stable), (2, 3, false));
    c.write(0, 8192, b"after", 3).await.unwrap();
    let again = punch(&c, 0, 2, (4096, 20_000)).await;
    assert_eq!((again.version, again.stable), (first.version, true), "known, not applied again");
    let absent = punch(&c, 5, 4, (0, 4096)).await;
    assert_eq!(absent.version.number, 1);
    let mut want = data.clone();
    want[4096..24_096].fill(0);
    want[8192..8197].copy_from_slice(b"after");
    let found = vec![(0, 0, 4096), (0, 8192, 4096), (0, 20_480, 20_480)];
    let same = async |c: &Cluster| {
        for t in 0..3 {
            assert!(c.read(t, 0, 0, 50_000).await.unwrap().1 == want, "target {t}");
            assert_eq!(c.read(t, 5, 0, 50_000).await.unwrap().1, b"");
            assert_eq!(c.extents(t, (0, 0)).await, found, "target {t}");
        }
    };
    same(&c).await;
    // A replica that was away gets the holes too.
    c.kill(1);
    c.write(0, 39_999, &data[39_999..], 5).await.unwrap();
    c.boot(1).await;
    c.whole().await;
    same(&c).await;
    // An earlier write, resent after its loss, is ordered before the punch of another session.
    let theirs = strake_proto::Capability { session: SESSION + 1, ..c.cap(Rights::WRITE) };
    let their_punch = || DataRequest {
        cap: Some(c.key.seal(&theirs)),
        session: SESSION + 1,
        ..DataRequest {
            kind: Kind::Punch,
            sums: vec![],
            len: 4096,
            ..c.write_request(0, 0, &[], 1)
        }
    };
    c.retry(opcode::WRITE, &[], their_punch).await.unwrap();
    let replay = || DataRequest {
        flags: FLAG_REPLAY,
        version: write.version,
        ..c.write_request(0, 0, &data, 77)
    };
    assert_eq!(c.retry(opcode::WRITE, &data, replay).await.unwrap_err().code, Code::Overtaken);
    let want = [vec![0; 4096], want[4096..].to_vec()].concat();
    for t in 0..3 {
        assert!(c.read(t, 0, 0, 50_000).await.unwrap().1 == want, "target {t}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_session_gave_up_is_not_made_after_its_next_round_came() {
    let c = Cluster::start(2).await;
    let write = |seq, round, data: &'static [u8]| {
        let r = DataRequest { round, ..c.write_request(0, 0, data, seq) };
        let c = &c;
        async move { c.call(c.head(), opcode::WRITE, &r, data).await.err().map(|e| e.code) }
    };
    c.write(0, 0, b"first", 1).await.unwrap();
    // Write 2 is given up, and its copy waits somewhere.
    assert_eq!(write(3, 1, b"newer").await, None);
    assert_eq!(write(2, 0, b"late!").await, Some(Code::Overloaded));
    assert_eq!(c.read(0, 0, 0, 5).await.unwrap().1, b"newer");
    assert_eq!(write(4, 1, b"alive").await, None);
    // A flush announces the round as well; but not a flush of another session.
    let flush = |round, session| {
        let cap = strake_proto::Capability { session, ..c.cap(Rights::WRITE) };
        let r =
            DataRequest { round, session, cap: Some(c.key.seal(&cap)), ..c.request(c.head(), 0) };
        let c = &c;
        async move { c.call(c.head(), opcode::FLUSH, &r, &[]).await.err().map(|e| e.code) }
    };
    assert_eq!(flush(9, SESSION + 1).await, None);
    assert_eq!(write(5, 1, b"still").await, None);
    assert_eq!(flush(2, SESSION).await, None);
    assert_eq!(write(6, 1, b"late!").await, Some(Code::Overloaded));
    assert_eq!(write(6, 2, b"again").await, None);
    assert_eq!(write(6, 2, b"again").await, None, "known");
    for t in 0..2 {
        assert_eq!(c.read(t, 0, 0, 5).await.unwrap().1, b"again");
    }
}

/// The tail has no space, and refuses. Then it has space, another copy of the forward arrives, and
/// the client writes something else.
#[tokio::test(start_paused = true)]
async fn what_a_replica_refused_it_does_not_make_later() {
    let c = Cluster::start(2).await;
    let (head, tail) = (c.head(), 1 - c.head());
    let forward = |number, data: &'static [u8], seq| {
        let writers = vec![Writer { session: 0, seq: 0, version: Version::default() }];
        let version = Version { epoch: 1, number };
        let r = DataRequest {
            target: tail,
            version,
            cap: None,
            writers,
            ..c.write_request(0, 0, data, seq)
        };
        let c = &c;
        async move { c.call_as(Role::Server, tail, opcode::FORWARD, &r, data).await }
    };
    let device = &c.nodes[tail as usize].device;
    device.fail(Op::Write, 0, Code::NoSpc);
    assert_eq!(c.write(0, 0, b"refused", 1).await.unwrap_err().code, Code::NoSpc);
    assert_eq!(forward(1, b"refused", 1).await.unwrap_err().code, Code::NoSpc);
    assert_eq!(c.write(0, 0, b"other", 2).await.unwrap().version, Version { epoch: 1, number: 2 });
    assert_eq!(forward(1, b"refused", 1).await.unwrap_err().code, Code::VersionGap);
    for t in [head, tail] {
        assert_eq!(c.read(t, 0, 0, 9).await.unwrap().1, b"other");
    }
    // An applied update is not refused, even if it cannot be flushed.
    assert!(forward(2, b"other", 2).await.unwrap().0.stable);
    c.write(0, 0, b"third", 3).await.unwrap();
    device.fail(Op::Flush, 0, Code::NoSpc);
    let e = forward(3, b"third", 3).await.unwrap_err();
    assert!(e.code == Code::NotServing && e.message.contains("not flushed"), "{e}");
}

#[tokio::test(start_paused = true)]
async fn requests_without_right_are_refused() {
    let c = Cluster::start(1).await;
    c.write(0, 0, b"data", 1).await.unwrap();
    let code =
        async |op, r: DataRequest, data: &[u8]| c.call(0, op, &r, data).await.err().map(|e| e.code);
    let read = |cap| DataRequest { cap, len: 4, ..c.request(0, 0) };
    let seal = |change: &dyn Fn(&mut strake_proto::Capability)| {
        let mut cap = c.cap(Rights::READ);
        change(&mut cap);
        Some(c.key.seal(&cap))
    };
    assert_eq!(code(opcode::READ, read(seal(&|_| {})), &[]).await, None);
    let mut forged = c.key.seal(&c.cap(Rights::READ));
    forged[60] ^= 1;
    for cap in [
        None,
        Some(forged),
        seal(&|c| c.ino = 5),
        seal(&|c| c.data = 8),
        seal(&|c| c.expiry_ms = 1_700_000_000_000),
        seal(&|c| c.rights = Rights::WRITE),
    ] {
        assert_eq!(code(opcode::READ, read(cap), &[]).await, Some(Code::BadCap));
    }
    let w = c.write_request(0, 0, b"data", 2);
    let only_read = DataRequest { cap: seal(&|_| {}), ..w.clone() };
    assert_eq!(code(opcode::WRITE, only_read, b"data").await, Some(Code::BadCap));
    let other_session = DataRequest { session: SESSION + 1, ..w.clone() };
    assert_eq!(code(opcode::WRITE, other_session, b"data").await, Some(Code::BadCap));
    let flush = |cap| DataRequest { cap, ..c.request(0, 0) };
    let may = |c: &mut strake_proto::Capability| c.rights = Rights::WRITE;
    assert_eq!(code(opcode::FLUSH, flush(seal(&may)), &[]).await, None);
    let of_another = seal(&|c| (c.ino, c.rights) = (5, Rights::WRITE));
    for cap in [None, Some(forged), seal(&|_| {}), of_another] {
        assert_eq!(code(opcode::FLUSH, flush(cap), &[]).await, Some(Code::BadCap));
    }
    // A punch is refused like a write.
    let p = DataRequest { kind: Kind::Punch, sums: vec![], ..w.clone() };
    for (r, want) in [
        (DataRequest { cap: None, ..p.clone() }, Code::BadCap),
        (DataRequest { cap: seal(&|_| {}), ..p.clone() }, Code::BadCap),
        (DataRequest { session: SESSION + 1, ..p.clone() }, Code::BadCap),
        (DataRequest { session: 0, ..p.clone() }, Code::BadCap),
        (DataRequest { epoch: 9, ..p.clone() }, Code::StaleEpoch),
        (DataRequest { len: 0, ..p.clone() }, Code::Inval),
        (DataRequest { len: u32::MAX, offset: 1, ..p.clone() }, Code::Inval),
        (DataRequest { sums: vec![1], ..p.clone() }, Code::Inval),
    ] {
        assert_eq!(code(opcode::WRITE, r.clone(), &[]).await, Some(want), "{r:?}");
    }
    assert_eq!(code(opcode::WRITE, p.clone(), b"data").await, Some(Code::Inval), "with a payload");
    // Extents are for readers and for writers.
    let extents = |cap| DataRequest { cap, len: 9, ..c.request(0, 0) };
    for may in [Rights::READ, Rights::WRITE] {
        assert_eq!(code(opcode::EXTENTS, extents(seal(&|c| c.rights = may)), &[]).await, None);
    }
    for cap in [None, Some(forged), seal(&|c| c.data = 8), seal(&|c| c.rights = Rights::TRIM)] {
        assert_eq!(code(opcode::EXTENTS, extents(cap), &[]).await, Some(Code::BadCap));
    }
    let far = DataRequest { offset: u32::MAX, ..extents(seal(&|_| {})) };
    assert_eq!(code(opcode::EXTENTS, far, &[]).await, Some(Code::Inval));
    let stale = DataRequest { epoch: 9, ..extents(seal(&|_| {})) };
    assert_eq!(code(opcode::EXTENTS, stale, &[]).await, Some(Code::StaleEpoch));
    for op in [
        opcode::FORWARD,
        opcode::FORWARD_FLUSH,
        opcode::SYNC_LIST,
        opcode::SYNC_PUT,
        opcode::LIST_CHUNKS,
    ] {
        assert_eq!(code(op, w.clone(), b"data").await, Some(Code::Access));
    }
    let bad = [
        DataRequest { len: 5, ..w.clone() },
        DataRequest { sums: vec![], ..w.clone() },
        DataRequest { offset: u32::MAX, ..w.clone() },
        DataRequest { kind: Kind::Replace, ..w.clone() },
        DataRequest { kind: Kind::None, ..w.clone() },
    ];
    for r in bad {
        assert_eq!(code(opcode::WRITE, r.clone(), b"data").await, Some(Code::Inval), "{r:?}");
    }
    assert_eq!(code(opcode::WRITE, w.clone(), b"dat0").await, Some(Code::Resend));
    assert_eq!(
        code(opcode::WRITE, DataRequest { epoch: 9, ..w.clone() }, b"data").await,
        Some(Code::StaleEpoch)
    );
    c.authority.evicted.lock().push(pb::Evicted {
        number: 1,
        session: SESSION,
        min_epoch: 2,
        below: false,
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(code(opcode::WRITE, w, b"data").await, Some(Code::NoSession));
    assert_eq!(code(opcode::FLUSH, flush(seal(&may)), &[]).await, Some(Code::NoSession));
}

#[tokio::test(start_paused = true)]
async fn all_sessions_below_a_number_are_evicted_at_once() {
    let c = Cluster::start(1).await;
    c.write(0, 0, b"before", 1).await.unwrap();
    c.authority.evicted.lock().push(pb::Evicted {
        number: 7,
        session: SESSION,
        min_epoch: 0,
        below: true,
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    c.write(0, 0, b"at it!", 2).await.unwrap();
    c.authority.evicted.lock().push(pb::Evicted {
        number: 8,
        session: SESSION + 1,
        min_epoch: 0,
        below: true,
    });
    tokio::time::sleep(Duration::from_secs(1)).await;
    let w = c.write_request(0, 0, b"after!", 3);
    assert_eq!(c.call(0, opcode::WRITE, &w, b"after!").await.unwrap_err().code, Code::NoSession);
}

/// An eviction is acknowledged only when earlier updates of the session are done: until then they
/// may become visible.
#[tokio::test(start_paused = true)]
async fn an_eviction_is_over_when_the_sessions_last_update_is() {
    let c = Cluster::start(1).await;
    c.write(0, 0, b"before", 1).await.unwrap();
    c.nodes[0].device.set_latency(crate::device::mem::OPS, Duration::from_secs(2));
    let w = c.write_request(0, 0, b"late!!", 2);
    let writing = c.call(0, opcode::WRITE, &w, b"late!!");
    tokio::pin!(writing);
    assert!(tokio::time::timeout(Duration::from_millis(100), &mut writing).await.is_err());
    c.authority.evicted.lock().push(pb::Evicted {
        number: 3,
        session: SESSION,
        min_epoch: 2,
        below: false,
    });
    assert!(tokio::time::timeout(Duration::from_millis(600), &mut writing).await.is_err());
    assert_eq!(*c.authority.evicted_seen.lock(), 2);
    let after = c.write_request(0, 0, b"after!", 3);
    assert_eq!(
        c.call(0, opcode::WRITE, &after, b"after!").await.unwrap_err().code,
        Code::NoSession
    );
    let _ = writing.await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(*c.authority.evicted_seen.lock(), 3);
}

/// What a recovered metadata group asks for, and which groups a storage server follows.
#[tokio::test(start_paused = true)]
async fn a_target_tells_what_it_acted_on_last_and_follows_later_incarnations_only() {
    let mut c = Cluster::start(2).await;
    c.write(0, 0, b"both", 1).await.unwrap();
    c.flush().await.unwrap();
    c.kill(1);
    let until = Instant::now() + Duration::from_secs(20);
    while c.write(0, 0, b"one!", 2).await.is_err() {
        assert!(Instant::now() < until);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    c.flush().await.unwrap();
    let chain = c.authority.chain();
    assert_eq!((chain.serving().collect::<Vec<_>>(), chain.epoch > 1), (vec![0], true));
    // After a restart, it comes from the chunk table.
    c.kill(0);
    c.boot(0).await;
    let told = c.authority.sights.lock().clone();
    assert_eq!(
        (told.len(), told[0].epoch, &told[0].replicas, told[0].lived),
        (1, chain.epoch, &chain.replicas, false)
    );
    // A group recovered from an older state: the server registers and reports what it acts on now.
    let settle = || tokio::time::sleep(Duration::from_secs(2));
    settle().await;
    let now = c.authority.chain();
    let (first, later) = (Incarnation::default(), Incarnation::new(1, 5).unwrap());
    {
        let mut map = c.authority.map.lock();
        (map.incarnation, map.version) = (later.0, 1 << 32);
    }
    settle().await;
    let told = c.authority.sights.lock().clone();
    assert_eq!((told[0].epoch, told[0].lived), (now.epoch, true));
    let of = |c: &Cluster| {
        let node = &c.nodes[0].server.as_ref().unwrap().node;
        (node.targets.all()[0].engine.identity().incarnation, node.ctx.map.load().map.incarnation)
    };
    assert_eq!(of(&c), (later.0, later.0));
    // It follows neither the earlier group nor a twin of the later one, whatever their maps'
    // versions, and not after a restart either.
    for other in [first, Incarnation::new(1, 6).unwrap()] {
        {
            let mut map = c.authority.map.lock();
            (map.incarnation, map.version) = (other.0, map.version + 100);
        }
        settle().await;
        assert_eq!(of(&c), (later.0, later.0), "{other}");
    }
    c.authority.map.lock().incarnation = Incarnation::new(2, 1).unwrap().0;
    settle().await;
    assert_eq!(Incarnation(of(&c).0).era(), 2);
}

/// A restarted server has forgotten all evictions and learns them in parts: it serves no client
/// before it has the last part.
#[tokio::test(start_paused = true)]
async fn an_evicted_session_does_not_slip_in_after_a_restart() {
    let mut c = Cluster::start(1).await;
    c.write(0, 0, b"before", 1).await.unwrap();
    c.flush().await.unwrap();
    for number in 1..=5000 {
        let session = if number == 5000 { SESSION } else { 1000 + number };
        c.authority.evicted.lock().push(pb::Evicted {
            number,
            session,
            min_epoch: 2,
            below: false,
        });
    }
    c.kill(0);
    c.boot(0).await;
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let w = c.write_request(0, 0, b"after!", 2);
        match c.call(0, opcode::WRITE, &w, b"after!").await.map_err(|e| e.code) {
            Err(Code::NoSession) => break,
            Err(Code::LeaseExpired | Code::NotServing | Code::StaleEpoch) => {}
            other => panic!("{other:?}"),
        }
        assert!(Instant::now() < until, "it never serves");
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_damaged_block_is_repaired_from_another_replica_and_never_returned() {
    let c = Cluster::start(2).await;
    let data = bytes(3, 64 << 10);
    c.write(0, 0, &data, 1).await.unwrap();
    c.flush().await.unwrap();
    for damaged in 0..2u32 {
        flip_everywhere(&c, damaged, &data[8192..12288]).await;
        assert!(c.read(damaged, 0, 0, 64 << 10).await.unwrap().1 == data);
        let status = c.nodes[damaged as usize].server.as_ref().unwrap().status();
        assert!(status.targets[0].checksum_errors > 0);
    }
    // A partial write onto a damaged block of either replica needs the good copy first.
    for (seq, damaged) in [(2, 0u32), (3, 1)] {
        flip_everywhere(&c, damaged, &data[16384..20480]).await;
        c.write(0, 16384 + 4000, &[seq as u8], seq).await.unwrap();
        let mut want = data[16384..20384].to_vec();
        want.extend([seq as u8]);
        assert!(c.read(damaged, 0, 16384, 4001).await.unwrap().1 == want);
        c.write(0, 16384, &data[16384..20480], seq + 10).await.unwrap();
    }
    flip_everywhere(&c, 0, &data[8192..12288]).await;
    flip_everywhere(&c, 1, &data[8192..12288]).await;
    let e = c.read(0, 0, 0, 64 << 10).await.unwrap_err();
    assert_eq!(e.code, Code::Corrupt, "no good copy is left");
}

/// Damages every block of a target's device with these contents.
async fn flip_everywhere(c: &Cluster, target: u32, block: &[u8]) {
    c.flush().await.unwrap();
    flip_now(c, target, block);
}

fn flip_now(c: &Cluster, target: u32, block: &[u8]) {
    let device = &c.nodes[target as usize].device;
    let found = device.find(&block[..4000]);
    assert!(!found.is_empty(), "target {target} does not hold the block");
    found.into_iter().for_each(|at| device.flip_bit(at + 77, 3));
}

#[tokio::test(start_paused = true)]
async fn a_failed_device_leaves_the_chain_and_service_goes_on() {
    let c = Cluster::start(3).await;
    c.write(0, 0, b"before", 1).await.unwrap();
    c.nodes[1].device.fail(crate::device::mem::Op::Write, 0, Code::Io);
    c.write(1, 0, &bytes(1, 8192), 2).await.unwrap();
    let serving =
        c.authority.states().iter().filter(|(_, s)| *s == pb::ReplicaState::ReplicaServing).count();
    assert_eq!(serving, 2, "{:?}", c.authority.states());
    assert_eq!(c.read(2, 1, 0, 8192).await.unwrap().1, bytes(1, 8192));
    assert!(!c.nodes[1].server.as_ref().unwrap().status().notices.is_empty());
}

/// The file system below a target is full although the target itself has space: other replicas have
/// updates that it cannot store.
#[tokio::test(start_paused = true)]
async fn a_target_that_lacks_space_leaves_its_chain_and_comes_back_by_itself() {
    for victim in 0..3 {
        let c = Cluster::start(3).await;
        c.write(0, 0, b"before", 1).await.unwrap();
        c.nodes[victim].device.fail(crate::device::mem::Op::Write, 0, Code::NoSpc);
        let (epoch, data) = (c.authority.chain().epoch, bytes(1, 8192));
        let result = c.write(1, 0, &data, 2).await;
        // The tail has no successor: it refuses before any replica has the update. The others
        // find out too late.
        match victim {
            2 => assert_eq!(result.unwrap_err().code, Code::NoSpc),
            _ => assert_eq!(result.unwrap().version.number, 1),
        }
        assert_eq!(
            c.authority.chain().epoch > epoch,
            victim != 2,
            "target {victim}: {:?}",
            c.authority.states()
        );
        c.whole().await;
        c.write(1, 4096, b"after", 3).await.unwrap();
        for t in 0..3 {
            let (_, got) = c.read(t, 1, 4096, 5).await.unwrap();
            assert_eq!(got, b"after", "target {victim} was out, {t} is read");
            assert_eq!(c.read(t, 0, 0, 6).await.unwrap().1, b"before");
        }
        assert!(c.nodes[victim].server.as_ref().unwrap().status().notices.is_empty());
    }
}

/// The file system below a target has no space for its table, while the other replicas could apply
/// the truncations that wait for it.
#[tokio::test(start_paused = true)]
async fn a_target_whose_table_is_full_leaves_its_chain_when_asked() {
    use strake_store::mem::Fault;
    for victim in 0..3 {
        let c = Cluster::start(3).await;
        c.write(0, 0, b"before", 1).await.unwrap();
        c.whole().await;
        let (epoch, table) = (c.authority.chain().epoch, &c.nodes[victim].table);
        table.fail_next(Fault::Commit, u64::MAX, Code::NoSpc);
        let began = Instant::now();
        c.write(1, 0, b"not flushed", 2).await.unwrap();
        tokio::time::sleep(Duration::from_millis(900)).await;
        assert!(c.authority.full.lock().is_empty(), "for a moment only, as far as is known");
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert_eq!(*c.authority.full.lock(), [victim as u32].into());
        assert_eq!(c.authority.chain().epoch, epoch, "it waits until it is asked");
        c.authority.step_out.lock().insert(victim as u32);
        while c.authority.chain().epoch == epoch {
            assert!(began.elapsed() < Duration::from_secs(5));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        c.authority.step_out.lock().clear();
        let server = c.nodes[victim].server.as_ref().unwrap();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!(
            c.authority.chain().serving().count(),
            2,
            "target {victim} stays out while its table is full"
        );
        assert!(!server.status().notices.is_empty());
        c.write(1, 4096, b"after", 3).await.unwrap();
        table.fail_next(Fault::Commit, 0, Code::NoSpc);
        c.whole().await;
        for t in 0..3 {
            assert_eq!(
                c.read(t, 1, 4096, 5).await.unwrap().1,
                b"after",
                "target {victim} was out, {t} is read"
            );
            assert_eq!(c.read(t, 0, 0, 6).await.unwrap().1, b"before");
        }
        assert!(server.status().notices.is_empty());
    }
}

/// A late answer asks for something that no longer holds.
#[tokio::test(start_paused = true)]
async fn a_target_with_room_in_its_table_stays_though_it_is_asked_to_leave() {
    let c = Cluster::start(3).await;
    let epoch = c.authority.chain().epoch;
    c.authority.step_out.lock().extend([0, 1, 2, 77]);
    tokio::time::sleep(Duration::from_secs(3)).await;
    c.write(0, 0, b"goes on", 1).await.unwrap();
    assert_eq!(c.authority.chain().epoch, epoch);
}

#[tokio::test(start_paused = true)]
async fn writers_to_one_chunk_queue_and_all_succeed_with_a_resync_beside_them() {
    let mut c = Cluster::start(3).await;
    c.kill(1);
    c.write(0, 0, b"x", 1).await.unwrap();
    c.boot(1).await;
    let writes = (0..60u64).map(|i| {
        let c = &c;
        async move {
            for round in 0..5 {
                let data = bytes(i * 10 + round, 3000);
                c.write(i % 3, (i * 3000) as u32, &data, 100 + i * 10 + round).await.unwrap();
            }
        }
    });
    futures_util::future::join_all(writes).await;
    c.whole().await;
    for i in 0..60u64 {
        for t in 0..3 {
            let (_, got) = c.read(t, i % 3, (i * 3000) as u32, 3000).await.unwrap();
            assert_eq!(
                block_sums(0, [&got[..]]),
                block_sums(0, [&bytes(i * 10 + 4, 3000)[..]]),
                "{i} at {t}"
            );
        }
    }
}
