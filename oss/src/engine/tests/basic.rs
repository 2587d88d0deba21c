//! The effect of each call, one at a time.

use strake_proto::Code;

use super::*;

#[tokio::test]
async fn writes_are_read_back_before_and_after_a_flush_and_a_restart() {
    let bed = Bed::new(4096).await;
    let e = bed.open().await;
    assert_eq!(e.meta(&key(0)).unwrap(), None);
    assert_eq!(e.read(&key(0), 0, 100).await.unwrap().len, 0);
    let data = pattern(1, 700_001);
    apply(&e, key(0), write(0, &data), 1).await.unwrap();
    for _ in 0..2 {
        assert_eq!(read_all(&e, key(0)).await.unwrap(), data);
        for (offset, len) in [
            (0, 1),
            (4095, 2),
            (4096, 4096),
            (262_143, 3),
            (699_999, 500),
            (700_001, 5),
            (800_000, 1),
        ] {
            let end = (offset + len).min(data.len()).max(offset.min(data.len()));
            let want = &data[offset.min(data.len())..end];
            assert_eq!(
                read(&e, key(0), offset as u32, len as u32).await.unwrap(),
                want,
                "{offset}+{len}"
            );
        }
        e.flush().await.unwrap();
    }
    drop(e);
    let e = bed.open().await;
    assert_eq!(read_all(&e, key(0)).await.unwrap(), data);
    let meta = e.meta(&key(0)).unwrap().unwrap();
    assert_eq!((meta.len, meta.version, meta.tombstone), (700_001, version(1), false));
    assert_eq!(meta.writers, vec![Writer { session: 9, seq: 1, version: version(1) }]);
    assert_eq!((e.usage().chunks, e.usage().used), (1, 171 * BLOCK));
}

#[tokio::test]
async fn a_staged_update_is_invisible_and_exclusive_and_leaves_nothing_when_dropped() {
    let bed = Bed::new(1024).await;
    let e = bed.open().await;
    let staged = e.stage(key(0), write(0, &pattern(1, 5000))).await.unwrap();
    assert_eq!(e.meta(&key(0)).unwrap(), None);
    assert_eq!(e.stage(key(0), Update::Remove).await.err().unwrap().code, Code::Busy);
    assert_eq!(e.usage().used, 2 * BLOCK);
    drop(staged);
    assert_eq!(e.usage().used, 0);
    apply(&e, key(0), write(0, &pattern(2, 10)), 1).await.unwrap();
}

#[tokio::test]
async fn bad_updates_are_refused() {
    let bed = Bed::new(1024).await;
    let e = bed.open().await;
    let Update::Write { data, mut sums, .. } = write(0, &pattern(1, 9000)) else { unreachable!() };
    sums[1] ^= 1;
    let code = |r: strake_proto::Result<crate::engine::Staged>| r.err().unwrap().code;
    assert_eq!(
        code(e.stage(key(0), Update::Write { offset: 0, data: data.clone(), sums }).await),
        Code::Resend
    );
    assert_eq!(
        code(e.stage(key(0), Update::Write { offset: 0, data: data.clone(), sums: vec![] }).await),
        Code::Resend
    );
    assert_eq!(code(e.stage(key(0), write((16 << 20) - 1, &[1, 2])).await), Code::Inval);
    assert_eq!(code(e.stage(key(0), write(u32::MAX, &[1, 2])).await), Code::Inval);
    let tombstone = Update::Replace { data, sums: vec![], tombstone: true, damaged: vec![] };
    assert_eq!(code(e.stage(key(0), tombstone).await), Code::Inval);
    assert_eq!(e.usage().used, 0);
}

#[tokio::test]
async fn holes_and_cut_ends_read_as_zeros() {
    let bed = Bed::new(4096).await;
    let e = bed.open().await;
    apply(&e, key(0), write(10_000, &pattern(1, 10)), 1).await.unwrap();
    let mut want = vec![0; 10_000];
    want.extend(pattern(1, 10));
    assert_eq!(read_all(&e, key(0)).await.unwrap(), want);
    assert_eq!(e.usage().used, BLOCK);
    apply(&e, key(0), write(0, &pattern(2, 10_005)), 2).await.unwrap();
    apply(&e, key(0), Update::Truncate { len: 5000 }, 3).await.unwrap();
    apply(&e, key(0), Update::Truncate { len: 6000 }, 4).await.unwrap();
    assert_eq!(e.meta(&key(0)).unwrap().unwrap().len, 5000);
    apply(&e, key(0), write(3_000_000, b"x"), 5).await.unwrap();
    let mut want = pattern(2, 5000);
    want.resize(3_000_000, 0);
    want.push(b'x');
    assert_eq!(read_all(&e, key(0)).await.unwrap(), want);
    for (offset, len) in
        [(8292, (1 << 20) + 50), (8193, 2 << 20), (9000, (1 << 20) - 808), (4999, 1 << 20)]
    {
        let got = read(&e, key(0), offset, len).await.unwrap();
        assert_eq!(got, want[offset as usize..(offset + len) as usize], "{offset}+{len}");
    }
    apply(&e, key(0), Update::Truncate { len: 0 }, 6).await.unwrap();
    e.flush().await.unwrap();
    assert_eq!((e.usage().used, e.usage().chunks), (0, 1));
}

#[tokio::test]
async fn removal_leaves_a_tombstone_until_it_is_forgotten() {
    let bed = Bed::new(4096).await;
    let e = bed.open().await;
    for i in 0..5 {
        apply(&e, key(i), write(0, &pattern(i, 300_000)), 1).await.unwrap();
    }
    e.flush().await.unwrap();
    apply(&e, key(1), Update::Remove, 2).await.unwrap();
    apply(&e, key(3), Update::Remove, 2).await.unwrap();
    let meta = e.meta(&key(1)).unwrap().unwrap();
    assert!(
        meta.tombstone && meta.len == 0 && meta.version == version(2) && meta.writers.len() == 2
    );
    assert_eq!(read_all(&e, key(1)).await.unwrap(), []);
    let flags = |e: &Engine| {
        e.list(CHAIN, None, 100)
            .unwrap()
            .iter()
            .map(|x| (x.chunk.index, x.tombstone))
            .collect::<Vec<_>>()
    };
    assert_eq!(flags(&e), vec![(0, false), (1, true), (2, false), (3, true), (4, false)]);
    apply(&e, key(3), write(0, b"again"), 3).await.unwrap();
    assert_eq!(e.forget_tombstones(CHAIN, (5, 6), 0, 9).unwrap().forgotten, 1);
    assert_eq!(e.forget_tombstones(CHAIN, (5, 7), 0, 9).unwrap(), crate::engine::Forgot::default());
    assert_eq!(flags(&e), vec![(0, false), (2, false), (3, false), (4, false)]);
    e.flush().await.unwrap();
    drop(e);
    let e = bed.open().await;
    assert_eq!(flags(&e), vec![(0, false), (2, false), (3, false), (4, false)]);
    assert_eq!(e.meta(&key(1)).unwrap(), None);
    assert_eq!((e.usage().chunks, e.usage().used), (4, (3 * 74 + 1) * BLOCK));
}

#[tokio::test]
async fn replace_takes_the_place_of_everything_and_keeps_zeros_as_holes() {
    let bed = Bed::new(4096).await;
    let e = bed.open().await;
    apply(&e, key(0), write(0, &pattern(1, 600_000)), 1).await.unwrap();
    let mut data = pattern(2, 400_000);
    data[8192..300_000].fill(0);
    apply(&e, key(0), replace(&data), 9).await.unwrap();
    assert_eq!(read_all(&e, key(0)).await.unwrap(), data);
    let meta = e.meta(&key(0)).unwrap().unwrap();
    assert_eq!((meta.version, meta.writers.len()), (version(9), 1));
    e.flush().await.unwrap();
    assert_eq!(e.usage().used, (2 + 98 - 73) * BLOCK);
    let gone = Update::Replace { data: vec![], sums: vec![], tombstone: true, damaged: vec![] };
    apply(&e, key(0), gone, 10).await.unwrap();
    e.flush().await.unwrap();
    assert_eq!((e.usage().used, e.usage().chunks), (0, 0));
    assert!(e.meta(&key(0)).unwrap().unwrap().tombstone);
}

#[tokio::test]
async fn the_last_writers_are_kept() {
    let bed = Bed::new(4096).await;
    let e = bed.open().await;
    for n in 1..=80 {
        apply(&e, key(0), write(0, &[1]), n).await.unwrap();
    }
    e.flush().await.unwrap();
    drop(e);
    let e = bed.open().await;
    let seqs: Vec<u64> = e.meta(&key(0)).unwrap().unwrap().writers.iter().map(|w| w.seq).collect();
    assert_eq!(seqs, (17..=80).collect::<Vec<_>>());
}

#[tokio::test]
async fn listings_page_through_memory_and_store() {
    let bed = Bed::new(8192).await;
    let e = bed.open().await;
    for i in 0..3000 {
        let k = Key { chain: CHAIN, chunk: ChunkId { ino: i % 3, data: 1, index: i } };
        apply(&e, k, write(0, &[1]), 1).await.unwrap();
        if i % 7 == 0 {
            e.flush().await.unwrap();
        }
    }
    apply(&e, Key { chain: CHAIN + 1, chunk: key(0).chunk }, write(0, &[1]), 1).await.unwrap();
    for page in [1, 10, 999, 5000] {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let got = e.list(CHAIN, after, page).unwrap();
            assert!(got.len() <= page);
            let Some(last) = got.last() else { break };
            after = Some(last.chunk);
            all.extend(got);
        }
        assert_eq!(all.len(), 3000);
        assert!(all.is_sorted_by(|a, b| a.chunk < b.chunk));
    }
    let of = e.chunks_of(CHAIN, 1, 1, 1501, 10).unwrap();
    assert_eq!(
        of.iter().map(|x| x.chunk.index).take(3).collect::<Vec<_>>(),
        vec![1501, 1504, 1507]
    );
    assert_eq!(e.chunks_of(CHAIN, 1, 1, 0, 5000).unwrap().len(), 1000);
}

#[tokio::test]
async fn identity_is_kept_and_a_strange_table_is_refused() {
    let bed = Bed::new(1024).await;
    let e = bed.open().await;
    assert_eq!(e.identity(), identity());
    let joined = TargetIdentity { target_id: 44, node: "elsewhere".into(), ..identity() };
    e.set_identity(joined.clone()).await.unwrap();
    let other = TargetIdentity { target_uuid: [9; 16], ..identity() };
    assert_eq!(e.set_identity(other.clone()).await.unwrap_err().code, Code::Inval);
    drop(e);
    assert_eq!(bed.open().await.identity(), joined);
    let second = Bed::new(1024).await;
    let mixed =
        Bed { device: bed.device.clone(), table: MemStore::new(), options: Options::default() };
    assert_eq!(mixed.try_open().await.err().unwrap().code, Code::Corrupt);
    Engine::format(&*second.device, &second.table, other).await.unwrap();
    let mixed = Bed {
        device: bed.device.clone(),
        table: second.table.clone(),
        options: Options::default(),
    };
    let e = mixed.try_open().await.err().unwrap();
    assert!(e.message.contains("another target"), "{e}");
    let small = MemDevice::new(1 << 20);
    assert_eq!(
        Engine::format(&small, &MemStore::new(), identity()).await.unwrap_err().code,
        Code::Inval
    );
}

#[tokio::test(start_paused = true)]
async fn scattered_blocks_are_read_within_the_pools_limit_or_on_top_of_it() {
    let bed = Bed::new(1024).await;
    let pool = Pool::new(1 << 20);
    let table = Arc::new(bed.table.clone());
    let e =
        Engine::open(bed.device.clone(), table, pool.clone(), bed.options.clone()).await.unwrap();
    // From the last block to the first, so that no two adjoin on the device.
    let data = pattern(1, 128 * 4096);
    for (n, at) in (0..128).rev().enumerate() {
        let at = at * 4096;
        apply(&e, key(0), write(at as u32, &data[at..at + 4096]), n as u64 + 1).await.unwrap();
    }
    let whole = |out: super::super::ReadOut| {
        out.data.iter().flat_map(|b| b.to_vec()).collect::<Vec<u8>>() == data
    };
    let first = e.read_in_limit(&key(0), 0, 1 << 20).await.unwrap();
    assert_eq!(pool.stats().used, 128 * 4096);
    let second = e.read_in_limit(&key(0), 0, 1 << 20).await.unwrap();
    assert_eq!(
        e.read_in_limit(&key(0), 0, 1).await.err().unwrap().code,
        Code::Overloaded,
        "the pool is used up"
    );
    assert!(whole(e.read(&key(0), 0, 1 << 20).await.unwrap()), "who must not wait gets more");
    let chunk = key(0);
    let waits = e.read_in_limit(&chunk, 0, 1 << 20);
    let frees = async {
        tokio::task::yield_now().await;
        assert!(whole(first));
    };
    let (third, ()) = tokio::join!(waits, frees);
    assert!(whole(second) && whole(third.unwrap()));
    assert_eq!(pool.stats().used, 0);
}

#[tokio::test]
async fn a_punch_frees_whole_blocks_and_zeroes_parts_of_others() {
    let bed = Bed::new(4096).await;
    let e = bed.open().await;
    let data = pattern(1, 300_000);
    apply(&e, key(0), write(0, &data), 1).await.unwrap();
    let mut want = data.clone();
    let mut used = 74;
    for (n, (offset, len, freed)) in
        [(4096, 8192, 2), (20_000, 100, 0), (20_100, 9000, 2), (28_672, 1, 0), (290_000, 10_000, 3)]
            .into_iter()
            .enumerate()
    {
        apply(&e, key(0), Update::Punch { offset, len }, n as u64 + 2).await.unwrap();
        want[offset as usize..(offset + len) as usize].fill(0);
        used -= freed;
        assert!(read_all(&e, key(0)).await.unwrap() == want, "{offset}+{len}");
        e.flush().await.unwrap();
        assert_eq!(e.usage().used, used * BLOCK, "{offset}+{len}");
        assert_eq!(e.extents(CHAIN, 5, 6, (0, 0), 0).unwrap().bytes, used * BLOCK);
    }
    // The rest of a block whose other parts were zeroed before: the block becomes a hole.
    apply(&e, key(0), Update::Punch { offset: 28_673, len: 4095 }, 8).await.unwrap();
    e.flush().await.unwrap();
    assert_eq!(e.usage().used, (used - 1) * BLOCK);
    let meta = e.meta(&key(0)).unwrap().unwrap();
    assert_eq!((meta.len, meta.version, meta.writers.len()), (300_000, version(8), 7));
    // Beyond the end, across it, the whole chunk, and with the largest numbers.
    for (n, (offset, len)) in
        [(300_000, 5), (1 << 24, u32::MAX), (0, u32::MAX)].into_iter().enumerate()
    {
        apply(&e, key(0), Update::Punch { offset, len }, 9 + n as u64).await.unwrap();
    }
    e.flush().await.unwrap();
    assert_eq!((e.usage().used, e.usage().chunks), (0, 1));
    assert!(read_all(&e, key(0)).await.unwrap() == vec![0; 300_000]);
}

#[tokio::test]
async fn a_punch_of_nothing_leaves_only_its_version() {
    let bed = Bed::new(512).await;
    let e = bed.open().await;
    apply(&e, key(0), Update::Punch { offset: 0, len: 4096 }, 1).await.unwrap();
    let meta = e.meta(&key(0)).unwrap().unwrap();
    assert!(
        meta.tombstone && meta.len == 0 && meta.version == version(1) && meta.writers.len() == 1
    );
    assert_eq!((e.usage().chunks, e.usage().used), (0, 0));
    apply(&e, key(0), write(0, b"there"), 2).await.unwrap();
    assert_eq!((e.usage().chunks, read_all(&e, key(0)).await.unwrap()), (1, b"there".to_vec()));
    assert_eq!(e.meta(&key(0)).unwrap().unwrap().writers.len(), 2);
}

/// A full device still takes a punch, which gives space back.
#[tokio::test]
async fn a_full_device_can_be_punched() {
    let bed = Bed::new(300).await;
    let e = bed.open().await;
    let mut n = 1;
    while apply(&e, key(n), write(0, &pattern(n, 4 * 4096)), 1).await.is_ok() {
        n += 1;
    }
    for i in 1..n {
        apply(&e, key(i), Update::Punch { offset: 100, len: 8192 }, 2).await.unwrap();
    }
    assert_eq!(read(&e, key(1), 0, 101).await.unwrap(), [&pattern(1, 100)[..], &[0]].concat());
    apply(&e, key(0), write(0, &pattern(0, 4096)), 1).await.unwrap();
}

#[tokio::test]
async fn extents_are_found_from_anywhere_in_pages() {
    let bed = Bed::new(4096).await;
    let e = bed.open().await;
    // Two blocks of a chunk far away, two runs in another, some of it flushed. Another file's data
    // does not appear.
    apply(&e, key(1 << 40), write(16 * 4096, &pattern(1, 8192)), 1).await.unwrap();
    e.flush().await.unwrap();
    apply(&e, key(3), write(0, &pattern(1, 300_000)), 1).await.unwrap();
    apply(&e, key(3), Update::Punch { offset: 8192, len: 270_336 }, 2).await.unwrap();
    let other = Key { chain: CHAIN, chunk: strake_proto::ChunkId { data: 7, ..key(3).chunk } };
    apply(&e, other, write(0, &pattern(1, 8192)), 1).await.unwrap();
    let found = |from, most| {
        let x = e.extents(CHAIN, 5, 6, from, most).unwrap();
        (x.found.iter().map(|e| (e.index, e.offset, e.len)).collect::<Vec<_>>(), x.next)
    };
    let (a, b, c) = ((3, 0, 8192), (3, 278_528, 24_576), (1 << 40, 65_536, 8192));
    for _ in 0..2 {
        assert_eq!(found((0, 0), 9), (vec![a, b, c], None));
        assert_eq!(found((3, 4096), 9), (vec![(3, 4096, 4096), b, c], None));
        assert_eq!(found((3, 8192), 1), (vec![b], Some((1 << 40, 65_536))));
        assert_eq!(found((3, 16 << 20), 1), (vec![c], None));
        assert_eq!(found((4, 0), 1), (vec![c], None));
        assert_eq!(found((1 << 40, 73_728), 1), (vec![], None));
        assert_eq!(found((u64::MAX, u32::MAX), 1), (vec![], None));
        e.flush().await.unwrap();
    }
}

/// One search for extents is limited, and the next one continues where it stopped.
#[tokio::test]
async fn a_look_for_extents_is_bounded() {
    let bed = Bed::new(5000).await;
    let e = bed.open().await;
    for i in 0..1124 {
        apply(&e, key(i), write(4096, &[1]), 1).await.unwrap();
    }
    let first = e.extents(CHAIN, 5, 6, (0, 0), 0).unwrap();
    assert_eq!((first.bytes, first.next), (1024 * BLOCK, Some((1024, 0))));
    let rest = e.extents(CHAIN, 5, 6, first.next.unwrap(), 0).unwrap();
    assert_eq!((rest.bytes, rest.next), (100 * BLOCK, None));
}
