//! Decay of data and table: noticed, limited to its chunk, repaired by a replacement.

use strake_proto::Code;
use strake_store::{Batch, MetaStore, Reader};

use super::*;
use crate::engine::record::{self, Segment, segment_key};

async fn two_chunks() -> (Bed, Vec<u8>, Vec<u8>) {
    let bed = Bed::new(1024).await;
    let e = bed.open().await;
    let (a, b) = (pattern(1, 9000), pattern(2, 300_000));
    apply(&e, key(0), write(0, &a), 1).await.unwrap();
    apply(&e, key(1), write(0, &b), 1).await.unwrap();
    e.flush().await.unwrap();
    (bed, a, b)
}

#[tokio::test]
async fn every_flipped_bit_of_a_block_is_found() {
    let (bed, a, b) = two_chunks().await;
    let e = bed.open().await;
    let start = 256 * BLOCK; // first fit: chunk 0 has the first three blocks
    for bit in (0..3 * BLOCK * 8).step_by(7) {
        bed.device.flip_bit(start + bit / 8, (bit % 8) as u8);
        let block = (bit / 8 / BLOCK) as u32;
        let err = e.read(&key(0), block * 4096, 10).await.unwrap_err();
        assert_eq!(err.code, Code::Corrupt);
        assert!(err.message.contains(&format!("block {block} ")), "{err}");
        bed.device.flip_bit(start + bit / 8, (bit % 8) as u8);
    }
    assert_eq!(read_all(&e, key(0)).await.unwrap(), a);
    bed.device.flip_bit(start + 5000, 1);
    // A partial overwrite of a bad block must not make it look good.
    assert_eq!(e.stage(key(0), write(4100, b"x")).await.err().unwrap().code, Code::Corrupt);
    assert_eq!(read(&e, key(0), 0, 4096).await.unwrap(), a[..4096]);
    assert_eq!(read_all(&e, key(1)).await.unwrap(), b);
    apply(&e, key(0), replace(&a), 1).await.unwrap();
    assert_eq!(read_all(&e, key(0)).await.unwrap(), a);
    assert!(e.usage().checksum_errors > 0);
}

#[tokio::test]
async fn every_flipped_bit_of_a_record_costs_its_chunk_only_and_a_replacement_heals() {
    let (bed, a, b) = two_chunks().await;
    let victim = key(0).chunk;
    let records: Vec<_> =
        bed.table.prefix(b"").map(Result::unwrap).filter(|(k, _)| k.len() > 28).collect();
    let mine = |k: &[u8]| k[21..29] == victim.index.to_be_bytes();
    let mut flips = 0;
    for (k, v) in records.iter().filter(|(k, _)| mine(k)) {
        for bit in 0..v.len() * 8 {
            let mut bad = v.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            let put = |value: Vec<u8>| {
                let mut batch = Batch::default();
                batch.put(k.clone(), value);
                bed.table.commit(batch).unwrap();
            };
            put(bad);
            let e = bed.open().await;
            assert_eq!(
                e.read(&key(0), 0, 100).await.unwrap_err().code,
                Code::Corrupt,
                "bit {bit} of {k:02x?}"
            );
            assert_eq!(e.stage(key(0), write(0, b"x")).await.err().unwrap().code, Code::Corrupt);
            assert!(e.usage().checksum_errors > 0);
            assert_eq!(e.list(CHAIN, None, 10).unwrap().len(), 2);
            if bit % 64 == 0 {
                assert_eq!(read_all(&e, key(1)).await.unwrap(), b);
                apply(&e, key(0), replace(&a), 1).await.unwrap();
                assert_eq!(read_all(&e, key(0)).await.unwrap(), a);
                assert_eq!(e.meta(&key(0)).unwrap().unwrap().version, version(1));
            }
            drop(e);
            put(v.to_vec());
            flips += 1;
        }
    }
    assert!(flips > 700, "{flips}");
}

#[tokio::test]
async fn a_healed_chunk_is_whole_after_a_restart() {
    let (bed, a, _) = two_chunks().await;
    let mut batch = Batch::default();
    batch.put(segment_key(&key(0), 0), b"junk".to_vec());
    bed.table.commit(batch).unwrap();
    let e = bed.open().await;
    apply(&e, key(0), replace(&a), 2).await.unwrap();
    e.flush().await.unwrap();
    drop(e);
    let e = bed.open().await;
    assert_eq!(read_all(&e, key(0)).await.unwrap(), a);
    assert_eq!((e.usage().checksum_errors, e.usage().used), (0, (3 + 74) * BLOCK));
}

/// A record decays while the target is served, its own checksum too. Replacing the record leaves a
/// table that opens without error.
#[tokio::test]
async fn a_record_that_decays_and_is_replaced_leaves_a_table_that_opens() {
    let (bed, a, _) = two_chunks().await;
    let k = segment_key(&key(0), 0);
    let good = bed.table.get(&k).unwrap().unwrap();
    for bit in [9, 100, good.len() * 8 - 1] {
        let e = bed.open().await;
        let mut bad = bed.table.get(&k).unwrap().unwrap().to_vec();
        bad[bit / 8] ^= 1 << (bit % 8);
        let mut batch = Batch::default();
        batch.put(k.clone(), bad);
        bed.table.commit(batch).unwrap();
        assert_eq!(read_all(&e, key(0)).await.unwrap_err().code, Code::Corrupt);
        apply(&e, key(0), replace(&a), 1).await.unwrap();
        e.flush().await.unwrap();
        drop(e);
        let e = bed.open().await;
        assert_eq!(read_all(&e, key(0)).await.unwrap(), a, "bit {bit}");
    }
}

/// A check finds what a read would, takes nothing from memory, and reports the place.
#[tokio::test]
async fn a_look_finds_each_damaged_block_and_record() {
    let (bed, a, b) = two_chunks().await;
    let e = bed.open().await;
    assert_eq!(
        (read_all(&e, key(0)).await.unwrap(), read_all(&e, key(1)).await.unwrap()),
        (a.clone(), b)
    );
    let look = async |n| e.check_whole(&key(n)).await.unwrap();
    assert_eq!(look(7).await, None);
    let whole = look(0).await.unwrap();
    assert_eq!(
        (whole.len, whole.bytes, whole.version, whole.is_whole()),
        (9000, 3 * 4096, version(1), true)
    );
    // Chunk 0 lies in the first three blocks, chunk 1 in the 74 after them.
    for block in [2, 4, 5, 66, 67, 76] {
        bed.device.flip_bit((256 + block) * BLOCK + 9, 5);
    }
    let one = |part: std::ops::Range<u32>| std::iter::once(part).collect::<Vec<_>>();
    assert_eq!(look(0).await.unwrap().damaged, one(8192..9000));
    let damaged = [4096..12_288, 63 * 4096..65 * 4096, 73 * 4096..300_000];
    assert_eq!(look(1).await.unwrap().damaged, damaged);
    assert_eq!(e.usage().checksum_errors, 6);
    let part = e.check(&key(1), 8192..16_384).await.unwrap().unwrap();
    assert_eq!((part.damaged, part.bytes), (one(8192..12_288), 8192));
    bed.device.flip_bit((256 + 2) * BLOCK + 9, 5);
    // Damaged records: memory has them, and writes them again.
    let records: Vec<_> = [record::header_key(&key(0)), segment_key(&key(0), 0)].into();
    for k in &records {
        let good = bed.table.get(k).unwrap().unwrap();
        for bit in (0..good.len() * 8).step_by(11) {
            let mut bad = good.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            let mut batch = Batch::default();
            batch.put(k.clone(), bad);
            bed.table.commit(batch).unwrap();
            let found = look(0).await.unwrap();
            assert_eq!((found.healed, found.is_whole()), (1, true), "bit {bit}");
            assert_eq!(look(0).await.unwrap().healed, 0, "it is on its way");
            e.flush().await.unwrap();
            assert_eq!(bed.table.get(k).unwrap().unwrap(), good, "bit {bit}");
        }
    }
    assert_eq!(read_all(&e, key(0)).await.unwrap(), a);
}

#[tokio::test]
async fn two_owners_of_a_block_and_blocks_outside_stop_the_opening() {
    let (bed, ..) = two_chunks().await;
    let mut segment = Segment::empty();
    for (block, words) in [
        (257, "chunk 5.6.0 of chain 7 and"),
        (5, "of 256.."),
        (1 << 40, "of 256.."),
        (1280, "of 256.."),
    ] {
        segment.blocks[9] = block;
        let k = segment_key(&key(2), 0);
        let mut batch = Batch::default();
        batch.put(k.clone(), segment.encode(&k));
        bed.table.commit(batch).unwrap();
        let e = bed.try_open().await.err().unwrap();
        assert_eq!(e.code, Code::Corrupt);
        let named = e.message.contains("5.6.2")
            && (e.message.contains(words) || e.message.contains("5.6.0"));
        assert!(named, "{e}");
    }
}

/// A record that could not be read when the target was opened lost its blocks to others. It must
/// not count again when it becomes readable.
#[tokio::test]
async fn a_record_that_was_unreadable_once_stays_damaged() {
    let (bed, a, _) = two_chunks().await;
    let k = segment_key(&key(0), 0);
    let good = bed.table.get(&k).unwrap().unwrap();
    let put = |value: bytes::Bytes| {
        let mut batch = Batch::default();
        batch.put(k.clone(), value);
        bed.table.commit(batch).unwrap();
    };
    put(bytes::Bytes::from_static(b"junk"));
    let e = bed.open().await;
    put(good);
    apply(&e, key(5), write(0, &pattern(5, 9000)), 1).await.unwrap();
    assert_eq!(read_all(&e, key(0)).await.unwrap_err().code, Code::Corrupt);
    apply(&e, key(0), replace(&a), 1).await.unwrap();
    e.flush().await.unwrap();
    assert_eq!(read_all(&e, key(0)).await.unwrap(), a);
    assert_eq!(read_all(&e, key(5)).await.unwrap(), pattern(5, 9000));
    drop(e);
    assert_eq!(bed.open().await.usage().used, (3 + 3 + 74) * BLOCK);
}

/// Blocks stored without a good copy, zeros or not, stay damaged over a restart until they are
/// written anew.
#[tokio::test]
async fn a_chunk_is_stored_with_what_is_damaged_of_it() {
    let (bed, ..) = two_chunks().await;
    let e = bed.open().await;
    let mut data = pattern(7, 300_000);
    data[8192..12_288].fill(0);
    let parts = vec![8192..12_288, 65_536..73_728, 299_008..300_000];
    let with = |damaged: Vec<std::ops::Range<u32>>| match replace(&data) {
        Update::Replace { data, sums, tombstone, .. } => {
            Update::Replace { data, sums, tombstone, damaged }
        }
        other => other,
    };
    for beyond in [
        300_000..303_105,
        303_104..303_105,
        8192..1 << 30,
        std::ops::Range { start: 8192, end: 4096 },
    ] {
        let used = e.usage().used;
        let refused = apply(&e, key(1), with(std::iter::once(beyond.clone()).collect()), 4)
            .await
            .unwrap_err();
        assert_eq!((refused.code, e.usage().used), (Code::Inval, used), "{beyond:?}");
    }
    apply(&e, key(1), with(parts.clone()), 5).await.unwrap();
    e.flush().await.unwrap();
    drop(e);
    let e = bed.open().await;
    let look = e.check_whole(&key(1)).await.unwrap().unwrap();
    assert_eq!((look.damaged, look.version, look.len), (parts.clone(), version(5), 300_000));
    for p in &parts {
        let code = async |at| read(&e, key(1), at, 1).await.err().map(|e| e.code);
        assert_eq!(
            (code(p.start).await, code(p.end - 1).await),
            (Some(Code::Corrupt), Some(Code::Corrupt))
        );
        assert_eq!((code(p.start - 1).await, code(p.end).await), (None, None));
        let part = apply(&e, key(1), write(p.start + 1, b"in a bad block"), 6).await.unwrap_err();
        assert_eq!(part.code, Code::Corrupt);
    }
    for p in &parts {
        apply(&e, key(1), write(p.start, &data[p.start as usize..p.end as usize]), 6)
            .await
            .unwrap();
    }
    assert!(read_all(&e, key(1)).await.unwrap() == data);
}
