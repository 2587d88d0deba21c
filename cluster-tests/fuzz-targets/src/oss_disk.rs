//! The contents of a target's device and of its chunk table: superblocks and records, alone and in
//! a whole target that is opened.

use std::sync::Arc;

use bytes::Bytes;
use strake_fabric::{Buf, Pool};
use strake_oss::{
    device::{BLOCK, Device, MemDevice},
    engine::{
        Engine, Key, Options, Position, TargetIdentity, Update,
        record::{
            Header, SCRUB_KEY, Segment, TABLE_DIGEST_KEY, TARGET_KEY, decode_target, encode_target,
            header_key, parse_header_key, parse_segment_key, segment_key,
        },
        superblock::Superblock,
        table_digest::{Mark, TableDigest},
    },
};
use strake_proto::{
    ChunkId,
    checksum::{block_sums, crc32c},
    data::{Version, Writer},
};
use strake_store::{Batch, MemStore, MetaStore};

use crate::{input::Input, world};

/// The first byte chooses between one record and a whole target.
pub fn run(data: &[u8]) {
    let mut i = Input(data);
    match i.u8() % 4 {
        0 => superblock(i.0),
        1 => records(&mut i),
        _ => world::run(target(&mut i)),
    }
}

/// Puts `bytes` into an otherwise correct block, with a correct checksum.
fn summed_block(bytes: &[u8]) -> Vec<u8> {
    let mut b = vec![0; BLOCK as usize];
    b[..8].copy_from_slice(b"STRAKEOS");
    b[8..12].copy_from_slice(&1u32.to_le_bytes());
    b[12..16].copy_from_slice(&(BLOCK as u32).to_le_bytes());
    let n = bytes.len().min(BLOCK as usize - 20);
    b[16..16 + n].copy_from_slice(&bytes[..n]);
    let at = b.len() - 4;
    let crc = crc32c(&b[..at]);
    b[at..].copy_from_slice(&crc.to_le_bytes());
    b
}

fn superblock(data: &[u8]) {
    let _ = Superblock::decode(data);
    if let Some(m) = Mark::decode(data) {
        assert_eq!(Mark::decode(&m.encode()), Some(m));
    }
    let block = summed_block(data);
    if let Ok(s) = Superblock::decode(&block) {
        let again = s.encode().expect("a name that was read fits");
        assert_eq!(Superblock::decode(&again).expect("what was encoded"), s);
    }
}

fn sealed(key: &[u8], body: &[u8]) -> Bytes {
    let mut v = body.to_vec();
    v.extend_from_slice(&crc32c(&[key, body].concat()).to_le_bytes());
    v.into()
}

/// What decodes must be exactly what `encode` makes.
fn records(i: &mut Input) {
    let kind = i.u8();
    let (key, body) = (i.bytes(), i.0);
    let body = [&[1], body].concat();
    let value = if kind & 4 == 0 { sealed(key, &body) } else { Bytes::copy_from_slice(&body) };
    let _ = (parse_header_key(key), parse_segment_key(key));
    if let Ok(t) = TableDigest::decode(&sealed(TABLE_DIGEST_KEY, &body)) {
        assert_eq!(t.encode(), sealed(TABLE_DIGEST_KEY, &body));
    }
    if let Ok(p) = Position::decode(&sealed(SCRUB_KEY, &body)) {
        assert_eq!(p.encode(), sealed(SCRUB_KEY, &body));
    }
    match kind % 3 {
        0 => {
            if let Ok(h) = Header::decode(key, &value) {
                assert_eq!(h.encode(key), value);
            }
        }
        1 => {
            if let Ok(s) = Segment::decode(key, &value) {
                // Adjoining runs are merged, so the bytes may differ.
                assert_eq!(Segment::decode(key, &s.encode(key)).expect("what was encoded"), s);
            }
        }
        _ => {
            if let Ok(uuid) = decode_target(&sealed(TARGET_KEY, &body)) {
                assert_eq!(encode_target(&uuid)[..], sealed(TARGET_KEY, &body)[..]);
            }
        }
    }
}

fn key(i: &mut Input) -> Key {
    let index = i.u8();
    Key { chain: 1, chunk: ChunkId { ino: 2, data: 3, index: u64::from(index % 4) } }
}

/// Opens and uses a formatted target with strange records or superblocks.
async fn target(i: &mut Input<'_>) {
    let device = Arc::new(MemDevice::new(4 << 20));
    let table = MemStore::new();
    let id = TargetIdentity {
        fs_uuid: [1; 16],
        target_uuid: [2; 16],
        target_id: 3,
        node: "n".into(),
        incarnation: 0,
    };
    Engine::format(&*device, &table, id).await.expect("a device of 4 MiB");
    if i.u8() == 0 {
        for copy in 0..2 {
            let block = match i.u8() % 3 {
                0 => continue,
                1 => summed_block(i.bytes()),
                _ => vec![i.u8(); BLOCK as usize],
            };
            device.write(copy * BLOCK, vec![Buf::copy_from(&block)]).await.expect("memory");
        }
    }
    // As older versions make it: with a digest, a target with any strange record would be refused.
    let _ = table.commit(Batch { ops: vec![(Bytes::from_static(TABLE_DIGEST_KEY), None)] });
    for _ in 0..i.u8() % 8 {
        let (key, value) = pair(i);
        let _ = table.commit(Batch { ops: vec![(key, Some(value))] });
    }
    let open = || {
        Engine::open(device.clone(), Arc::new(table.clone()), Pool::default(), Options::default())
    };
    let Ok(engine) = open().await else { return };
    for number in 0..32 {
        if i.is_empty() {
            break;
        }
        act(&engine, i, number).await;
    }
    let _ = engine.flush().await;
    drop(engine);
    // What it wrote to the strange table must not make it worse.
    open().await.expect("it opened before");
}

fn pair(i: &mut Input) -> (Bytes, Bytes) {
    let k = key(i);
    match i.u8() % 8 {
        0 => (Bytes::copy_from_slice(i.bytes()), Bytes::copy_from_slice(i.bytes())),
        1 => (Bytes::from_static(TARGET_KEY), sealed(TARGET_KEY, &[&[1], i.bytes()].concat())),
        2..5 => {
            let key = header_key(&k);
            let value = sealed(&key, &[&[1], i.bytes()].concat());
            (key, value)
        }
        _ => {
            let key = segment_key(&k, i.u8() % 4);
            let mut s = Segment::empty();
            for _ in 0..1 + i.u8() % 4 {
                let at = usize::from(i.u8() % 64);
                (s.blocks[at], s.sums[at]) = (i.number().wrapping_add(200), i.u32());
            }
            s.blocks.iter_mut().filter(|b| **b != u64::MAX).for_each(|b| *b &= (1 << 47) - 1);
            let value = if i.u8() & 1 == 0 {
                s.encode(&key)
            } else {
                sealed(&key, &[&[1], i.bytes()].concat())
            };
            (key, value)
        }
    }
}

async fn act(engine: &Arc<Engine>, i: &mut Input<'_>, number: u64) {
    let key = key(i);
    match i.u8() % 8 {
        0 if i.u8() & 1 == 0 => drop(engine.meta(&key)),
        0 => {
            if let Ok(Some(look)) = engine.check_whole(&key).await {
                assert!(
                    look.damaged.iter().all(|d| d.start < d.end && d.end <= look.len),
                    "{look:?}"
                );
            }
        }
        1 => drop(engine.list(1, None, usize::from(i.u8())).map(|l| l.len())),
        2 => drop(engine.flush().await),
        3 | 4 => {
            let (offset, len) = (u32::from(i.u16()), i.number() as u32);
            if let Ok(r) = engine.read(&key, offset, len).await {
                assert_eq!(r.data.iter().map(Buf::len).sum::<usize>(), r.len as usize);
            }
        }
        _ => {
            let (offset, bytes) = (u32::from(i.u16()), i.bytes());
            let right = block_sums(u64::from(offset), [bytes]);
            let (data, sums) = (vec![Buf::copy_from(bytes)], right);
            let update = match i.u8() % 8 {
                0 => Update::Truncate { len: i.number() as u32 },
                1 => Update::Remove,
                2 => {
                    let (sums, tombstone) = (block_sums(0, [bytes]), i.u8() & 1 == 1);
                    let damaged = (0..i.u8() % 3).map(|_| i.u32()..i.u32()).collect();
                    Update::Replace { data, sums, tombstone, damaged }
                }
                3 => Update::Write {
                    offset: i.u32(),
                    data,
                    sums: vec![i.u32(); usize::from(i.u8())],
                },
                _ => Update::Write { offset, data, sums },
            };
            let version = Version { epoch: 1, number: number + 1 };
            if let Ok(staged) = engine.stage(key, update).await
                && i.u8() != 0
            {
                let _ = engine.commit(
                    staged,
                    version,
                    vec![Writer { session: 1, seq: number, version }],
                );
            }
        }
    }
}
