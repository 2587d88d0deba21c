//! What clients may do, evictions, and which metadata group a server follows.

use super::*;

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
        opcode::STATUS,
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
