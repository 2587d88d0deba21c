//! Space, cost and concurrency.

use std::{collections::BTreeMap, time::Duration};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use strake_proto::Code;

use super::{crash::Powered, *};
use crate::device::mem::{OPS, Op};

#[tokio::test]
async fn a_full_device_says_so_and_deletes_give_everything_back() {
    let bed = Bed::new(300).await;
    let e = bed.open().await;
    let mut written = 0;
    let full = loop {
        match apply(&e, key(written), write(0, &pattern(written, 8 * 4096 - 5)), 1).await {
            Ok(()) => written += 1,
            Err(e) => break e,
        }
    };
    assert_eq!(full.code, Code::NoSpc);
    assert!(full.message.contains("delete files"), "{full}");
    assert_eq!(written, (300 - 16 - 4) / 8);
    e.flush().await.unwrap();
    // The reserve lets every file shrink although no space is free.
    for i in 0..written.min(16) {
        apply(&e, key(i), Update::Truncate { len: 10_000 }, 2).await.unwrap();
    }
    // Space that an update gives back is available to the next one without an explicit flush.
    apply(&e, key(99), write(0, &pattern(99, 40 * 4096)), 1).await.unwrap();
    for i in (0..written).chain([99]) {
        apply(&e, key(i), Update::Remove, 3).await.unwrap();
    }
    e.flush().await.unwrap();
    assert_eq!((e.usage().used, e.usage().chunks), (0, 0));
    apply(&e, key(0), write(0, &pattern(1, 280 * 4096)), 4).await.unwrap();
    assert_eq!(read_all(&e, key(0)).await.unwrap(), pattern(1, 280 * 4096));
}

/// Fills a target and continues with updates that take no more space in the end, against a model.
/// Only new data is refused.
#[tokio::test]
async fn on_a_full_target_everything_goes_on_but_new_data() {
    for seed in 0..6 {
        let mut rng = StdRng::seed_from_u64(seed);
        // 32 blocks are kept for overwriting.
        let bed = Bed::new(2048).await;
        let mut e = bed.open().await;
        let mut model: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
        let mut n = 0;
        let mut fill = async |e: &Engine, model: &mut BTreeMap<u64, Vec<u8>>, n: &mut u64| loop {
            *n += 1;
            let data = pattern(*n, rng.random_range(1..200_000));
            match apply(e, key(*n), write(0, &data), *n).await {
                Ok(()) => drop(model.insert(*n, data)),
                Err(e) if e.code == Code::NoSpc => return,
                Err(e) => panic!("{e}"),
            }
        };
        fill(&e, &mut model, &mut n).await;
        let mut rng = StdRng::seed_from_u64(seed ^ 77);
        for step in 0..200 {
            n += 1;
            let (at, old) = model
                .iter()
                .nth(rng.random_range(0..model.len()))
                .map(|(k, v)| (*k, v.clone()))
                .unwrap();
            let from = rng.random_range(0..old.len());
            match rng.random_range(0..10) {
                0 => {
                    apply(&e, key(at), Update::Truncate { len: from as u32 + 1 }, n).await.unwrap();
                    model.get_mut(&at).unwrap().truncate(from + 1);
                }
                1 if model.len() > 2 => {
                    apply(&e, key(at), Update::Remove, n).await.unwrap();
                    model.remove(&at);
                }
                2 => fill(&e, &mut model, &mut n).await,
                3 => {
                    let len = (old.len() - from).min(9000);
                    apply(&e, key(at), Update::Punch { offset: from as u32, len: len as u32 }, n)
                        .await
                        .unwrap();
                    // Zeroed parts take no space any more, so writing them counts as new data.
                    model.get_mut(&at).unwrap()[from..from + len].fill(0);
                    let data = pattern(n, old.len());
                    match apply(&e, key(at), write(0, &data), n).await {
                        Ok(()) => drop(model.insert(at, data)),
                        Err(e) => assert_eq!(e.code, Code::NoSpc),
                    }
                }
                4 => {
                    e.flush().await.unwrap();
                    drop(e);
                    e = bed.open().await;
                }
                _ => {
                    let len = rng.random_range(1..=(old.len() - from).min(30 * 4096));
                    let data = pattern(n, len);
                    let holes = e.read(&key(at), 0, old.len() as u32).await.unwrap();
                    assert_eq!(holes.len as usize, old.len());
                    let there = old.iter().all(|b| *b != 0);
                    match apply(&e, key(at), write(from as u32, &data), n).await {
                        Ok(()) => {
                            model.get_mut(&at).unwrap()[from..from + len].copy_from_slice(&data)
                        }
                        Err(e) => assert!(
                            e.code == Code::NoSpc && !there,
                            "seed {seed}, step {step}: {e}"
                        ),
                    }
                }
            }
        }
        e.flush().await.unwrap();
        drop(e);
        let e = bed.open().await;
        for (at, data) in &model {
            assert!(read_all(&e, key(*at)).await.unwrap() == *data, "seed {seed}: chunk {at}");
        }
    }
}

/// More overwrites at once than the reserve holds: they wait for each other's blocks.
#[tokio::test]
async fn overwrites_at_once_share_what_is_kept() {
    let bed = Bed::new(2048).await;
    let e = bed.open().await;
    let mut n = 0;
    while apply(&e, key(n), write(0, &pattern(n, 20 * 4096)), 1).await.is_ok() {
        n += 1;
    }
    let all = (0..16).map(|i| {
        let e = e.clone();
        tokio::spawn(async move {
            for round in 2..8 {
                let staged =
                    e.stage(key(i), write(0, &pattern(i * round, 20 * 4096))).await.unwrap();
                // As if in flight along the chain.
                tokio::time::sleep(Duration::from_millis(5)).await;
                e.commit(staged, version(round), vec![]).unwrap();
            }
        })
    });
    for r in futures_util::future::join_all(all).await {
        r.unwrap();
    }
    for i in 0..16 {
        assert!(read_all(&e, key(i)).await.unwrap() == pattern(i * 7, 20 * 4096));
    }
}

/// The same when the file system below a sparse target is full.
#[tokio::test]
async fn a_full_file_system_below_refuses_new_data_first() {
    let bed = Bed::new(2048).await;
    let e = bed.open().await;
    apply(&e, key(0), write(0, &pattern(1, 100_000)), 1).await.unwrap();
    bed.device.set_spare(32 * BLOCK - 1);
    assert_eq!(apply(&e, key(1), write(0, b"new"), 1).await.unwrap_err().code, Code::NoSpc);
    apply(&e, key(0), write(5000, &pattern(2, 50_000)), 2).await.unwrap();
    assert_eq!(
        apply(&e, key(0), write(99_000, &pattern(2, 50_000)), 2).await.unwrap_err().code,
        Code::NoSpc
    );
    apply(&e, key(0), Update::Truncate { len: 7 }, 3).await.unwrap();
    bed.device.set_spare(32 * BLOCK);
    apply(&e, key(1), write(0, b"new"), 1).await.unwrap();
}

#[tokio::test]
async fn writes_to_fragmented_space_are_cut_into_pieces() {
    let bed = Bed::new(276).await;
    let e = bed.open().await;
    for i in 0..256 {
        apply(&e, key(i), write(0, &pattern(i, 4096)), 1).await.unwrap();
    }
    for i in (0..256).step_by(2) {
        apply(&e, key(i), Update::Remove, 2).await.unwrap();
    }
    e.flush().await.unwrap();
    let data = pattern(1000, 128 * 4096);
    apply(&e, key(500), write(0, &data), 1).await.unwrap();
    e.flush().await.unwrap();
    drop(e);
    let e = bed.open().await;
    assert_eq!(read_all(&e, key(500)).await.unwrap(), data);
    assert_eq!(read(&e, key(500), 5000, 300_000).await.unwrap(), data[5000..305_000]);
}

#[tokio::test]
async fn a_4_kib_overwrite_costs_about_4_kib() {
    let bed = Bed::new(8192).await;
    let table = Powered::new(&bed, None);
    let e = Engine::open(bed.device.clone(), table.clone(), Pool::default(), Options::default())
        .await
        .unwrap();
    apply(&e, key(0), write(0, &pattern(1, 16 << 20)), 1).await.unwrap();
    e.flush().await.unwrap();
    let (start, table_start) = (bed.device.counters(), *table.written.lock());
    for i in 0..200u32 {
        apply(&e, key(0), write(i * 7919 % 4096 * 4096, &pattern(9, 4096)), 2).await.unwrap();
        e.flush().await.unwrap();
    }
    let (end, table_end) = (bed.device.counters(), *table.written.lock());
    // One block of data, and the mark of its flush.
    assert_eq!((end.write_bytes - start.write_bytes, end.reads - start.reads), (200 * 2 * 4096, 0));
    assert_eq!(end.flushes - start.flushes, 200);
    assert_eq!(table_end.0 - table_start.0, 200);
    let each = (table_end.1 - table_start.1) / 200;
    // 2 KiB of it are the header with 64 writers.
    assert!(each < 2600, "{each} bytes of table per overwrite");
}

#[tokio::test]
async fn appends_read_nothing_and_partial_overwrites_one_block_at_each_end() {
    let bed = Bed::new(8192).await;
    let e = bed.open().await;
    apply(&e, key(0), write(0, &pattern(1, 10_000)), 1).await.unwrap();
    apply(&e, key(0), write(12_288, &pattern(2, 100)), 2).await.unwrap();
    apply(&e, key(0), write(1 << 20, &pattern(2, 5000)), 3).await.unwrap();
    assert_eq!(bed.device.counters().reads, 4, "only the copies of the superblock and of the mark");
    apply(&e, key(0), write(100, &pattern(3, 9000)), 4).await.unwrap();
    assert_eq!(bed.device.counters().reads, 6);
}

/// Each version of a chunk is one byte repeated, so a reader notices reused space even if the
/// checksum does not.
#[tokio::test(start_paused = true)]
async fn readers_see_whole_versions_while_space_is_reused_under_them() {
    let mut bed = Bed::new(260).await;
    bed.options.cached_records = 32;
    let e = bed.open().await;
    for index in 0..4 {
        apply(&e, key(index), write(0, &vec![0; 20 * 4096]), 0).await.unwrap();
    }
    bed.device.set_latency(OPS, Duration::from_millis(2));
    bed.device.set_latency(&[Op::Read], Duration::from_millis(23));
    let len = 20 * 4096u32;
    let mut tasks = Vec::new();
    for index in 0..4u64 {
        let e = e.clone();
        tasks.push(tokio::spawn(async move {
            for n in 1..150u64 {
                let update = if n % 3 == 0 {
                    replace(&vec![n as u8; len as usize])
                } else {
                    write(0, &vec![n as u8; len as usize])
                };
                while let Err(err) = apply(&e, key(index), update.clone(), n).await {
                    assert_eq!(err.code, Code::NoSpc); // the others hold what is left
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        }));
    }
    for reader in 0..6u64 {
        let e = e.clone();
        tasks.push(tokio::spawn(async move {
            let mut last = [0; 4];
            for i in 0..100u64 {
                let index = (i + reader) % 4;
                let out = e.read(&key(index), 0, len).await.unwrap();
                let n = out.version.number;
                assert!(n >= last[index as usize], "went back");
                last[index as usize] = n;
                assert!(out.data.iter().all(|b| b.iter().all(|x| *x == n as u8)), "mixed versions");
            }
        }));
    }
    let flusher = {
        let e = e.clone();
        tokio::spawn(async move {
            loop {
                e.flush().await.unwrap();
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    };
    for t in tasks {
        t.await.unwrap();
    }
    assert!(e.usage().read_bytes > 599 * u64::from(len));
    flusher.abort();
    assert!(flusher.await.unwrap_err().is_cancelled());
    bed.device.set_latency(OPS, Duration::ZERO);
    e.flush().await.unwrap();
    e.shared.flush_now().await.unwrap();
    assert_eq!(e.usage().used, 80 * BLOCK);
}

#[tokio::test(start_paused = true)]
async fn concurrent_flushes_are_one() {
    let bed = Bed::new(1024).await;
    let e = bed.open().await;
    bed.device.set_latency(OPS, Duration::from_millis(3));
    apply(&e, key(0), write(0, b"x"), 1).await.unwrap();
    let before = bed.device.counters().flushes;
    let all = (0..50).map(|_| e.flush());
    assert!(futures_util::future::join_all(all).await.iter().all(Result::is_ok));
    assert_eq!(bed.device.counters().flushes - before, 1);
    assert!(!e.is_dirty());
}

#[tokio::test]
async fn a_failed_device_flush_stops_changes_and_a_failed_write_does_not() {
    let bed = Bed::new(1024).await;
    let e = bed.open().await;
    bed.device.fail(Op::Write, 0, Code::Io);
    assert_eq!(apply(&e, key(0), write(0, b"x"), 1).await.unwrap_err().code, Code::Io);
    apply(&e, key(0), write(0, b"y"), 1).await.unwrap();
    e.flush().await.unwrap();
    assert_eq!(e.usage().used, BLOCK);
    apply(&e, key(0), write(0, b"z"), 2).await.unwrap();
    bed.device.fail(Op::Flush, 0, Code::Io);
    let first = e.flush().await.unwrap_err();
    assert!(first.message.contains("restart"), "{first}");
    // The second attempt must not report success.
    assert_eq!(e.flush().await.unwrap_err(), first);
    assert_eq!(apply(&e, key(0), write(0, b"w"), 3).await.unwrap_err(), first);
    assert_eq!(read_all(&e, key(0)).await.unwrap(), b"z");
}

#[tokio::test]
async fn a_full_table_delays_durability_and_loses_nothing() {
    let bed = Bed::new(1024).await;
    let e = bed.open().await;
    apply(&e, key(0), write(0, b"x"), 1).await.unwrap();
    bed.table.fail_next(strake_store::mem::Fault::Commit, 1, Code::NoSpc);
    assert_eq!(e.flush().await.unwrap_err().code, Code::NoSpc);
    assert!(e.is_dirty());
    apply(&e, key(0), write(1, b"y"), 2).await.unwrap();
    // The table takes the commit, but cannot make it durable.
    bed.table.fail_next(strake_store::mem::Fault::Sync, 1, Code::NoSpc);
    assert_eq!(e.flush().await.unwrap_err().code, Code::NoSpc);
    assert!(e.is_dirty());
    apply(&e, key(1), write(0, b"z"), 3).await.unwrap();
    e.flush().await.unwrap();
    drop(e);
    assert_eq!(read_all(&*bed.open().await, key(0)).await.unwrap(), b"xy");
}
