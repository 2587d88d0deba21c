//! File I/O on a healthy cluster: striping against a model, sizes between mounts, caches, appends.

use std::time::Duration;

use crate::common::*;
use strake_client::{AppendPart, File};
use strake_fabric::Buf;
use strake_proto::{Code, layout::splitmix64, pb};

const RW: u32 = 2;

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut s = seed;
    (0..len.div_ceil(8)).flat_map(|_| splitmix64(&mut s).to_le_bytes()).take(len).collect()
}

#[tokio::test(start_paused = true)]
async fn striped_io_of_random_sizes_equals_a_model() {
    for (targets, copies, stripe, count) in
        [(4u32, 1u32, 65536u32, -1i32), (3, 3, 1 << 20, 2), (2, 2, 262_144, 1)]
    {
        let c = Cluster::new(targets, copies);
        let a = c.client(1).await;
        let b = c.client(2).await;
        let (f, _) = a
            .create(&user(), a.root(), b"f", 0o644, RW, true, striped(stripe, count))
            .await
            .unwrap();
        let mut model: Vec<u8> = Vec::new();
        let mut rnd = u64::from(stripe);
        for i in 0..60 {
            let mut next = |n: u64| splitmix64(&mut rnd) % n;
            let bits = next(21);
            let (offset, len) = (next(3 << 20) as usize, next(1 << bits) as usize);
            match next(8) {
                0..4 => {
                    let data = pattern(i, len);
                    let cut = next(len as u64 + 1) as usize;
                    let segments = vec![Buf::copy_from(&data[..cut]), Buf::copy_from(&data[cut..])];
                    assert_eq!(f.write(offset as u64, segments).await.unwrap(), len);
                    if len > 0 && model.len() < offset + len {
                        model.resize(offset + len, 0);
                    }
                    if len > 0 {
                        model[offset..offset + len].copy_from_slice(&data);
                    }
                }
                4 => {
                    f.truncate(offset as u64).await.unwrap();
                    model.resize(offset, 0);
                }
                _ => {
                    let got = join(&f.read(offset as u64, len).await.unwrap());
                    let end = (offset + len).min(model.len());
                    assert!(got == model[offset.min(end)..end], "read {i} of {len} at {offset}");
                }
            }
            assert_eq!(f.attr().size, model.len() as u64);
        }
        f.fsync().await.unwrap();
        assert_eq!(a.stats().unstable_bytes, 0);
        let (g, attr) = b.open(&user(), f.ino(), 0).await.unwrap();
        assert_eq!(attr.size, model.len() as u64);
        let mut got = vec![0; model.len() + 10];
        assert_eq!(g.read_into(0, &mut got).await.unwrap(), model.len());
        assert!(got[..model.len()] == model);
        f.close().await.unwrap();
        g.close().await.unwrap();
        assert_eq!(c.mds.opens(), 0);
        a.close().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn parallel_writers_of_one_file_fill_it_completely() {
    let c = Cluster::new(4, 2);
    let a = c.client(1).await;
    let (f, _) =
        a.create(&user(), a.root(), b"f", 0o644, RW, true, striped(65536, -1)).await.unwrap();
    let data = pattern(7, 8 << 20);
    let writes = data.chunks(100_000).enumerate().map(|(i, part)| {
        let (f, part) = (f.clone(), part.to_vec());
        tokio::spawn(async move { f.write_all_at(i as u64 * 100_000, &part).await })
    });
    for w in writes.collect::<Vec<_>>() {
        w.await.unwrap().unwrap();
    }
    assert!(join(&f.read(0, 9 << 20).await.unwrap()) == data);
    f.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn overlapping_writes_land_in_the_order_they_were_called() {
    let c = Cluster::new(3, 1);
    c.oss.faults(|f| f.write_delay = Duration::from_millis(3));
    let a = c.client(1).await;
    let (f, _) =
        a.create(&user(), a.root(), b"f", 0o644, RW, true, striped(65536, -1)).await.unwrap();
    let mut running = Vec::new();
    for i in 0..20u8 {
        let mut w =
            Box::pin(f.write(u64::from(i) * 1000, vec![Buf::copy_from(&vec![i + 1; 150_000])]));
        // Polled once, so that the order of the calls is known; then half of them are dropped.
        assert!(tokio::time::timeout(Duration::ZERO, &mut w).await.is_err());
        if i % 2 == 0 {
            running.push(w);
        }
    }
    for w in running {
        w.await.unwrap();
    }
    // The last call was dropped half way. A read waits for the writes that come before it.
    f.write_all_at(0, &[99]).await.unwrap();
    f.truncate(19_000 + 150_000).await.unwrap();
    let got = join(&f.read(0, 1 << 20).await.unwrap());
    let mut want = vec![0; 19_000 + 150_000];
    for i in 0..20usize {
        want[i * 1000..i * 1000 + 150_000].fill(i as u8 + 1);
    }
    want[0] = 99;
    assert!(got == want);
}

#[tokio::test(start_paused = true)]
async fn another_mount_sees_growth_within_a_second_and_at_fsync() {
    let c = Cluster::new(2, 1);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, RW, true, None).await.unwrap();
    let (g, _) = b.open(&user(), f.ino(), 0).await.unwrap();
    assert_eq!(g.read(0, 100).await.unwrap().len(), 0);
    f.write_all_at(0, b"hello").await.unwrap();
    assert_eq!(f.attr().size, 5, "at once for the writer");
    tokio::time::sleep(Duration::from_millis(1000)).await;
    assert_eq!(join(&g.read(0, 100).await.unwrap()), b"hello");
    f.write_all_at(5, b" world").await.unwrap();
    assert_eq!(c.mds.size_of(f.ino()), 5);
    assert_eq!(a.getattr(&user(), f.ino()).await.unwrap().size, 11);
    assert_eq!(c.mds.size_of(f.ino()), 11, "reported before the attributes were shown");
    f.write_all_at(11, b"!").await.unwrap();
    f.fsync().await.unwrap();
    assert_eq!(b.getattr(&user(), f.ino()).await.unwrap().size, 12);
}

#[tokio::test(start_paused = true)]
async fn a_layout_set_while_it_was_open_is_never_read_past() {
    let c = Cluster::new(2, 1);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, RW, true, None).await.unwrap();
    let ino = f.ino();
    f.close().await.unwrap();
    let (old, _) = b.open(&user(), ino, 0).await.unwrap();
    assert_eq!(old.read(0, 100).await.unwrap().len(), 0);
    a.layouts().set(&user(), ino, Some(pb::LayoutSpec::default())).await.unwrap();
    let (f, _) = a.open(&user(), ino, RW).await.unwrap();
    f.write_all_at(0, b"hello").await.unwrap();
    f.fsync().await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(
        old.read(0, 100).await.unwrap_err().code,
        Code::Stale,
        "not zeros from where nothing was written"
    );
    let (new, _) = b.open(&user(), ino, 0).await.unwrap();
    assert_eq!(join(&new.read(0, 100).await.unwrap()), b"hello");
}

#[tokio::test(start_paused = true)]
async fn extending_cuts_nothing_off() {
    let c = Cluster::new(2, 1);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, RW, true, None).await.unwrap();
    let (g, _) = b.open(&user(), f.ino(), RW).await.unwrap();
    f.write_all_at(0, &[7; 1000]).await.unwrap();
    f.fsync().await.unwrap();
    assert_eq!(g.extend(10).await.unwrap().size, 1000, "longer already");
    assert_eq!(g.extend(1010).await.unwrap().size, 1010);
    let mut want = vec![7; 1000];
    want.resize(1010, 0);
    assert!(join(&g.read(0, 2000).await.unwrap()) == want);
    assert_eq!(g.extend(u64::MAX).await.unwrap_err().code, Code::FBig);
}

#[tokio::test(start_paused = true)]
async fn a_time_that_was_set_after_a_write_stays() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, RW, true, None).await.unwrap();
    f.write_all_at(0, b"hello").await.unwrap();
    let set = pb::SetAttr { ino: f.ino(), mtime_ns: Some(12345), ..Default::default() };
    a.setattr(&user(), set).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let ino = f.ino();
    f.close().await.unwrap();
    let attr = a.getattr(&user(), ino).await.unwrap();
    assert_eq!((attr.mtime_ns, attr.size), (12345, 5));
}

#[tokio::test(start_paused = true)]
async fn read_ahead_serves_a_sequential_reader_and_never_old_bytes() {
    let c = Cluster::new(4, 1);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let (f, _) =
        a.create(&user(), a.root(), b"f", 0o644, RW, true, striped(1 << 20, -1)).await.unwrap();
    let mut data = pattern(3, 24 << 20);
    f.write_all_at(0, &data).await.unwrap();
    let ino = f.ino();
    f.close().await.unwrap();
    let (g, _) = b.open(&user(), ino, RW).await.unwrap();
    for at in (0..data.len()).step_by(256 << 10) {
        assert!(join(&g.read(at as u64, 256 << 10).await.unwrap()) == data[at..at + (256 << 10)]);
    }
    let ahead = b.stats().cached_bytes;
    assert!(ahead > 20 << 20, "only {ahead} bytes came from read-ahead");
    // Writes into read-ahead data are seen at once, the client's own and another mount's.
    for at in (0..4u64 << 20).step_by(1 << 20) {
        g.read(at, 1 << 20).await.unwrap();
    }
    g.write_all_at(5 << 20, b"mine").await.unwrap();
    data[5 << 20..(5 << 20) + 4].copy_from_slice(b"mine");
    assert!(join(&g.read(5 << 20, 1 << 20).await.unwrap()) == data[5 << 20..6 << 20]);
    let (f, _) = a.open(&user(), ino, RW).await.unwrap();
    f.write_all_at(7 << 20, b"theirs").await.unwrap();
    assert_eq!(join(&g.read(7 << 20, 6).await.unwrap()), b"theirs");
    // O_DIRECT reads nothing ahead.
    let before = b.stats().cached_bytes;
    let (d, _) = b.open(&user(), f.ino(), 0o40000).await.unwrap();
    for at in (8u64 << 20..16 << 20).step_by(1 << 20) {
        d.read(at, 1 << 20).await.unwrap();
    }
    assert_eq!(b.stats().cached_bytes, before);
}

#[tokio::test(start_paused = true)]
async fn what_is_ready_is_read_without_waiting_and_never_old() {
    let c = Cluster::new(4, 2);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let data = pattern(5, 8 << 20);
    let (f, _) =
        a.create(&user(), a.root(), b"f", 0o644, RW, true, striped(1 << 20, -1)).await.unwrap();
    f.write_all_at(0, &data).await.unwrap();
    let ino = f.ino();
    f.close().await.unwrap();
    let (g, _) = b.open(&user(), ino, RW).await.unwrap();
    let step = 1 << 20;
    assert!(g.read_ready(0, step).is_none(), "nothing was read ahead");
    for i in 0..3 {
        assert!(
            join(&g.read((i * step) as u64, step).await.unwrap()) == data[i * step..(i + 1) * step]
        );
    }
    tokio::time::sleep(Duration::from_millis(50)).await; // the requested read-ahead arrives
    assert!(join(&g.read_ready(3 * step as u64, step).unwrap()) == data[3 * step..4 * step]);
    assert!(
        join(&g.read_ready(3 * step as u64, step).unwrap()) == data[3 * step..4 * step],
        "and once more"
    );
    // A write of this client invalidates the data, and so does a write of another client.
    g.write_all_at(4 * step as u64, b"new").await.unwrap();
    assert!(g.read_ready(4 * step as u64, 3).is_none());
    assert_eq!(join(&g.read(4 * step as u64, 3).await.unwrap()), b"new");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(g.read_ready(5 * step as u64, step).is_some(), "age does not");
    assert!(g.read_ready(100 << 20, step).is_none(), "beyond the end");
    let (f, _) = a.open(&user(), ino, RW).await.unwrap();
    f.write_all_at(7 * step as u64, b"theirs").await.unwrap();
    assert!(g.read_ready(5 * step as u64, step).is_none());
}

#[tokio::test(start_paused = true)]
async fn appends_of_one_client_never_overlap() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let (f, _) = a.create(&user(), a.root(), b"log", 0o644, 0o2000 | 1, true, None).await.unwrap();
    let (g, _) = a.open(&user(), f.ino(), 0o2001).await.unwrap();
    let appends: Vec<_> = (0..50u8)
        .map(|i| {
            let f = if i % 2 == 0 { f.clone() } else { g.clone() };
            tokio::spawn(async move { f.append(vec![Buf::copy_from(&[i; 7])]).await.unwrap() })
        })
        .collect();
    let mut offsets = Vec::new();
    for a in appends {
        offsets.push(a.await.unwrap());
    }
    offsets.sort_unstable();
    assert_eq!(offsets, (0..50).map(|i| i * 7).collect::<Vec<u64>>());
    assert_eq!(f.read(0, 1).await.unwrap_err().code, Code::BadF, "opened for writing only");
}

/// The kernel splits a large append into pieces. No append of another client, or of another handle
/// of the same client, may land between them.
#[tokio::test(start_paused = true)]
async fn nobody_appends_between_the_pieces_of_an_append() {
    const APPEND: u32 = 0o2002;
    let c = Cluster::new(2, 1);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let (f, _) = a.create(&user(), a.root(), b"log", 0o644, APPEND, true, None).await.unwrap();
    let (g, _) = a.open(&user(), f.ino(), APPEND).await.unwrap();
    let bytes = |n: u8| vec![Buf::copy_from(&[n; 10])];
    let part = |call, offset, more| AppendPart { call: (1, call), offset, more };
    let other = |f: &File, n| {
        let f = f.clone();
        tokio::spawn(async move { f.append(vec![Buf::copy_from(&[n; 10])]).await.unwrap() })
    };
    let mut want = Vec::new();
    // Round 0: against another handle of this client. Round 1: against another client.
    for round in 0..2u8 {
        let end = want.len() as u64;
        let elsewhere =
            if round == 0 { g.clone() } else { b.open(&user(), f.ino(), APPEND).await.unwrap().0 };
        let first = f.append_in_turn(None, bytes(1), Some(part(1, 500, true)), ()).await.unwrap();
        assert_eq!((first.offset, first.len), (end, 10));
        let theirs = other(&elsewhere, 9);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!theirs.is_finished() && f.kept_end() == first.kept && first.kept.is_some());
        let second = f.append_in_turn(None, bytes(2), Some(part(1, 510, true)), ()).await.unwrap();
        let third = f.append_in_turn(None, bytes(3), Some(part(1, 520, false)), ()).await.unwrap();
        assert_eq!((second.offset, third.offset, third.kept), (end + 10, end + 20, None));
        assert!(!f.end_append(first.kept.unwrap()) && f.kept_end().is_none());
        assert_eq!(theirs.await.unwrap(), end + 30);
        // Another call is not a piece of the previous append and need not wait for it.
        let first = f.append_in_turn(None, bytes(4), Some(part(2, 530, true)), ()).await.unwrap();
        let next = f.append_in_turn(None, bytes(5), Some(part(3, 540, true)), ()).await.unwrap();
        assert!(first.kept != next.kept && next.offset == end + 50);
        // If the client ends the append, others continue at once. Otherwise they continue after a
        // timeout.
        for says in [true, false] {
            let theirs = other(&elsewhere, 8);
            tokio::time::sleep(Duration::from_millis(100)).await;
            assert!(!theirs.is_finished());
            let now = tokio::time::Instant::now();
            if says {
                assert!(f.end_append(next.kept.unwrap()));
            }
            let at = theirs.await.unwrap();
            assert!(says || now.elapsed() < Duration::from_secs(1), "{:?}", now.elapsed());
            if says {
                assert_eq!(at, end + 60);
                f.append_in_turn(None, bytes(6), Some(part(4, 0, true)), ()).await.unwrap();
            }
        }
        for n in [1, 2, 3, 9, 4, 5, 8, 6, 8] {
            want.extend([n; 10]);
        }
        assert_eq!(join(&f.read(0, 1000).await.unwrap()), want);
    }
    // A long append does not keep other clients from learning the size.
    let end = want.len() as u64;
    for n in 0..20 {
        let piece =
            f.append_in_turn(None, bytes(7), Some(part(5, 10 * n, n < 19)), ()).await.unwrap();
        assert_eq!(piece.offset, end + 10 * n);
        tokio::time::sleep(Duration::from_millis(300)).await;
        if n > 2 {
            let look =
                tokio::time::timeout(Duration::from_millis(150), b.getattr(&user(), f.ino())).await;
            assert_eq!(look.expect("told").unwrap().size, end + 10 * (n + 1));
        }
    }
    // A closed handle does not keep the end of the file.
    let h = b.open(&user(), f.ino(), APPEND).await.unwrap().0;
    assert!(
        f.append_in_turn(None, bytes(7), Some(part(6, 0, true)), ()).await.unwrap().kept.is_some()
    );
    let theirs = other(&h, 1);
    f.close().await.unwrap();
    tokio::time::timeout(Duration::from_millis(400), theirs).await.expect("at once").unwrap();
}

#[tokio::test(start_paused = true)]
async fn what_reaches_beyond_the_largest_size_is_cut() {
    const LARGEST: u64 = 1 << 50;
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, 0o2002, true, None).await.unwrap();
    let bytes = || vec![Buf::copy_from(&[5; 6]), Buf::copy_from(&[6; 6])];
    assert_eq!(f.write(LARGEST - 8, bytes()).await.unwrap(), 8);
    assert_eq!(f.attr().size, LARGEST);
    assert_eq!(join(&f.read(LARGEST - 9, 20).await.unwrap()), [0, 5, 5, 5, 5, 5, 5, 6, 6]);
    for at in [LARGEST, LARGEST + 1, u64::MAX] {
        assert_eq!(f.write(at, bytes()).await.unwrap_err().code, Code::FBig);
    }
    let part = AppendPart { call: (1, 1), offset: 0, more: true };
    assert_eq!(f.append_in_turn(None, bytes(), Some(part), ()).await.unwrap_err().code, Code::FBig);
    f.truncate(LARGEST - 5).await.unwrap();
    let cut = f.append_in_turn(None, bytes(), Some(part), ()).await.unwrap();
    assert_eq!((cut.offset, cut.len, cut.kept), (LARGEST - 5, 5, None));
    assert_eq!(
        join(&f.read(LARGEST - 6, 20).await.unwrap()),
        [5; 6],
        "one of the first write, five of this one"
    );
}

#[tokio::test(start_paused = true)]
async fn sync_writes_are_stable_when_they_return_and_errors_have_their_errno() {
    let c = Cluster::new(2, 2);
    let a = c.client(1).await;
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, RW | 0o10000, true, None).await.unwrap();
    f.write_all_at(0, &[7; 100_000]).await.unwrap();
    assert_eq!((a.stats().unstable_bytes, c.mds.size_of(f.ino())), (0, 100_000));
    c.restart(&[0, 1]);
    assert!(join(&f.read(0, 100_000).await.unwrap()) == [7; 100_000]);
    let e = a.create(&user(), a.root(), b"f", 0o644, RW, true, None).await.err().unwrap();
    assert_eq!((e.code, e.errno()), (Code::Exist, 17));
    assert_eq!(a.lookup(&user(), a.root(), b"none").await.unwrap_err().errno(), 2);
    assert_eq!(f.write_all_at(1 << 50, &[1]).await.unwrap_err().errno(), 27);
    c.oss.faults(|f| f.full = true);
    assert_eq!(f.write_all_at(0, &[1]).await.unwrap_err().errno(), 28);
    c.oss.faults(|f| f.full = false);
    f.write_all_at(0, &[1]).await.unwrap();
    let (g, attr) = a.open(&user(), f.ino(), RW | 0o1000).await.unwrap();
    assert_eq!(attr.size, 0, "O_TRUNC");
    f.close().await.unwrap();
    g.close().await.unwrap();
    assert_eq!(c.mds.opens(), 0);
}

#[tokio::test(start_paused = true)]
async fn handles_that_nobody_closes_are_flushed_and_closed() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, RW, true, None).await.unwrap();
    f.write_all_at(0, b"hello").await.unwrap();
    let ino = f.ino();
    drop(f);
    while c.mds.opens() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!((a.stats().unstable_bytes, c.mds.size_of(ino)), (0, 5));
    // A cancelled open leaves nothing open.
    let who = user();
    let opening = a.open(&who, ino, 0);
    assert!(tokio::time::timeout(Duration::from_micros(50), opening).await.is_err());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!a.is_open(ino) && c.mds.opens() <= 1, "or it is kept open for later");
    a.close().await.unwrap();
    assert_eq!(c.mds.opens(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_is_known_under_a_lease_costs_no_request_until_somebody_changes_it() {
    let c = Cluster::new(2, 1);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, RW, true, None).await.unwrap();
    f.write_all_at(0, b"hello").await.unwrap();
    let ino = f.ino();
    f.close().await.unwrap();
    let first = b.getattr(&user(), ino).await.unwrap();
    let asked = c.mds.asked();
    for _ in 0..100 {
        assert_eq!(b.getattr(&user(), ino).await.unwrap(), first);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(c.mds.asked(), asked, "five seconds of stats, from memory");
    for size in [3, 9] {
        a.setattr(&user(), pb::SetAttr { ino, size: Some(size), ..Default::default() })
            .await
            .unwrap();
        assert_eq!(b.getattr(&user(), ino).await.unwrap().size, size);
    }
    // After a leader change the leases of the old leader end.
    c.mds.elect(2);
    a.setattr(&user(), pb::SetAttr { ino, size: Some(1), ..Default::default() }).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(b.getattr(&user(), ino).await.unwrap().size, 1);
    // The same holds after a lost session.
    b.getattr(&user(), ino).await.unwrap();
    c.mds.evict_all();
    a.setattr(&user(), pb::SetAttr { ino, size: Some(2), ..Default::default() }).await.unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(b.getattr(&user(), ino).await.unwrap().size, 2);
}

#[tokio::test(start_paused = true)]
async fn a_file_is_opened_again_without_a_request_until_somebody_changes_it() {
    let c = Cluster::new(2, 1);
    c.mds.want_releases();
    let (a, b) = (c.client(1).await, c.client(2).await);
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, RW, true, None).await.unwrap();
    f.write_all_at(0, b"hello").await.unwrap();
    let ino = f.ino();
    f.close().await.unwrap();
    // First wait for a lease: the writer stays on record for a moment after its close.
    while b.copies().attr_valid(&b.getattr(&user(), ino).await.unwrap()).is_zero() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let open = async |flags| b.open(&user(), ino, flags).await.unwrap();
    open(0).await.0.close().await.unwrap();
    let asked = c.mds.asked();
    for i in 0..100 {
        let (f, attr) = open(0).await;
        assert_eq!((attr.size, &join(&f.read(0, 9).await.unwrap())[..]), (5, &b"hello"[..]));
        // Handles are closed or only dropped, and two are open at a time.
        let (g, _) = open(0).await;
        if i % 2 == 0 {
            f.close().await.unwrap()
        } else {
            drop(f)
        }
        g.close().await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!((c.mds.asked(), c.mds.opens(), b.is_open(ino)), (asked, 1, false));
    let other = pb::Creds { uid: 77, gid: 77, groups: vec![] };
    b.open(&other, ino, 0).await.unwrap().0.close().await.unwrap();
    assert_eq!(c.mds.asked(), asked + 1, "whether somebody else may is not known");
    // The client closes the file at the servers only when it can no longer open it from its cache.
    let (held, _) = open(0).await;
    a.setattr(&user(), pb::SetAttr { ino, size: Some(3), ..Default::default() }).await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(c.mds.opens() == 1 && b.is_open(ino), "by who has it open");
    held.close().await.unwrap();
    assert_eq!((c.mds.opens(), open(0).await.1.size), (0, 3));
    // A new leader is told which files programs have open, but not the files that the client only
    // keeps open.
    let (held, _) = open(0).await;
    c.mds.elect(2);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(c.mds.opens(), 1);
    drop(held);
    open(0).await.0.close().await.unwrap();
    c.mds.elect(1);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(c.mds.opens(), 0);
    // The client does not keep a file open that it wrote: other clients must learn when its last
    // writer closes.
    open(0).await.0.close().await.unwrap();
    let (w, _) = open(RW).await;
    open(0).await.0.close().await.unwrap();
    w.close().await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(c.mds.opens(), 0);
    open(0).await.0.close().await.unwrap();
    assert_eq!(c.mds.opens(), 1);
    b.close().await.unwrap();
    assert_eq!(c.mds.opens(), 0);
}
