//! Writes, punches and reads, while replicas die, return and are cut off.

use super::*;

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
        assert_eq!((r.version.number, r.boot_ids.len(), r.stable), (seq as u64 + 1, 3, false));
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
    assert_eq!(
        (again.version, again.stable, again.boot_ids),
        (first.version, true, first.boot_ids)
    );
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
    assert!(c.flush().await.unwrap().boot_ids.len() >= 2);
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
    assert!(stable.stable && stable.boot_ids.len() == 3);
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
        c.flush().await.unwrap().boot_ids,
        unstable.boot_ids,
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
    assert_eq!(flushed.boot_ids, again.boot_ids);
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
    assert_eq!((first.version.number, first.boot_ids.len(), first.stable), (2, 3, false));
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
