//! Makes, finds and counts holes, compares them with a model, and checks that they survive
//! failures.

use std::collections::BTreeSet;

use crate::{common::*, left::*};
use strake_client::{Client, Config, File, Former, Handover as _};
use strake_fabric::Buf;
use strake_fuse::HandoverMemory;
use strake_proto::{Code, layout::splitmix64};

const RW: u32 = 2;
const BLOCK: usize = 4096;
const TIB: u64 = 1 << 40;

async fn file(c: &Client, stripe: u32, count: i32) -> File {
    c.create(&user(), c.root(), b"f", 0o644, RW, false, striped(stripe, count)).await.unwrap().0
}

async fn content(f: &File) -> Vec<u8> {
    join(&f.read(0, 64 << 20).await.unwrap())
}

/// A file as a local file system would have it.
#[derive(Default)]
struct Model {
    bytes: Vec<u8>,
    stored: BTreeSet<usize>,
}

impl Model {
    fn write(&mut self, at: usize, byte: u8, len: usize) {
        self.bytes.resize(self.bytes.len().max(at + len), 0);
        self.bytes[at..at + len].fill(byte);
        self.stored.extend(at / BLOCK..(at + len).div_ceil(BLOCK));
    }
    fn punch(&mut self, at: usize, len: usize) {
        let end = (at + len).min(self.bytes.len());
        self.bytes[at.min(end)..end].fill(0);
        let all = &self.bytes;
        self.stored
            .retain(|b| all[b * BLOCK..((b + 1) * BLOCK).min(all.len())].iter().any(|b| *b != 0));
    }
    fn truncate(&mut self, size: usize) {
        self.bytes.resize(size, 0);
        self.stored.retain(|b| b * BLOCK < size);
    }
    /// The next offset from `at` on that holds data (`data` is true) or lies in a hole.
    fn seek(&self, at: usize, data: bool) -> Option<u64> {
        let size = self.bytes.len();
        let is = |b: &usize| self.stored.contains(b) == data;
        let found = (at / BLOCK..size.div_ceil(BLOCK)).find(is).map(|b| (b * BLOCK).max(at) as u64);
        if at >= size {
            None
        } else if data {
            found
        } else {
            Some(found.unwrap_or(size as u64))
        }
    }
}

async fn check(f: &File, m: &Model, at: usize) {
    let none = |r: strake_proto::Result<u64>| match r {
        Err(e) if e.code == Code::NxIo => None,
        r => Some(r.unwrap()),
    };
    assert_eq!(none(f.seek_data(at as u64).await), m.seek(at, true), "data from {at}");
    assert_eq!(none(f.seek_hole(at as u64).await), m.seek(at, false), "hole from {at}");
}

#[tokio::test(start_paused = true)]
async fn writes_punches_and_cuts_equal_a_model() {
    for (targets, copies, stripe, count) in
        [(4u32, 1u32, 65536u32, -1i32), (3, 3, 1 << 20, 2), (2, 2, 262_144, 1)]
    {
        let c = Cluster::new(targets, copies);
        let a = c.client(1).await;
        let f = file(&a, stripe, count).await;
        let mut m = Model::default();
        let mut rnd = u64::from(stripe);
        for i in 0..120u8 {
            let mut next = |n: usize| (splitmix64(&mut rnd) % n as u64) as usize;
            let bits = next(20);
            let (mut at, mut len) = (next(2 << 20), 1 + next(1 << bits));
            if next(3) == 0 {
                (at, len) = (at / BLOCK * BLOCK, len.next_multiple_of(BLOCK));
            }
            match next(8) {
                0..3 => {
                    f.write_all_at(at as u64, &vec![i | 1; len]).await.unwrap();
                    m.write(at, i | 1, len);
                }
                3..5 => {
                    f.punch(at as u64, len as u64 * 3).await.unwrap();
                    m.punch(at, len * 3);
                }
                5 => {
                    f.truncate(at as u64).await.unwrap();
                    m.truncate(at);
                }
                _ => {
                    f.fsync().await.unwrap();
                    assert_eq!(
                        a.space().allocated(f.ino()).await.unwrap(),
                        (m.stored.len() * BLOCK) as u64
                    );
                }
            }
            for at in [0, at, at + len, next(2 << 20)] {
                check(&f, &m, at).await;
            }
            assert!(content(&f).await == m.bytes, "after step {i}");
        }
        f.fsync().await.unwrap();
        let ino = f.ino();
        f.close().await.unwrap();
        // `allocated` works while no client has the file open, and for a write-only handle.
        assert_eq!(a.space().allocated(ino).await.unwrap(), (m.stored.len() * BLOCK) as u64);
        let b = c.client(2).await;
        let g = b.open(&user(), ino, 1).await.unwrap().0;
        check(&g, &m, 0).await;
        assert_eq!(b.space().allocated(ino).await.unwrap(), (m.stored.len() * BLOCK) as u64);
        g.punch(0, TIB).await.unwrap();
        g.close().await.unwrap();
        assert_eq!(a.space().allocated(ino).await.unwrap(), 0);
        a.close().await.unwrap();
        b.close().await.unwrap();
        assert_eq!(c.mds.opens(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn two_blocks_in_16_tib_are_found_without_walking_between() {
    let c = Cluster::new(4, 1);
    let a = c.client(1).await;
    let f = file(&a, 65536, -1).await;
    let end = 16 * TIB;
    f.write_all_at(end - 4096, &[7; 4096]).await.unwrap();
    f.write_all_at(TIB + 5, &[8]).await.unwrap();
    let before = a.stats().data_requests;
    assert_eq!(f.seek_data(0).await.unwrap(), TIB);
    assert_eq!(f.seek_hole(0).await.unwrap(), 0);
    assert_eq!(f.seek_hole(TIB + 1).await.unwrap(), TIB + 4096);
    assert_eq!(f.seek_data(TIB + 4096).await.unwrap(), end - 4096);
    assert_eq!(f.seek_hole(end - 1).await.unwrap(), end);
    assert_eq!(f.seek_data(end).await.unwrap_err().code, Code::NxIo);
    assert_eq!(a.space().allocated(f.ino()).await.unwrap(), 8192);
    f.punch(TIB + 1, 14 * TIB).await.unwrap();
    assert_eq!(f.seek_data(0).await.unwrap(), end - 4096);
    assert!(a.stats().data_requests - before < 60, "{} requests", a.stats().data_requests - before);
    assert_eq!(join(&f.read(end - 4097, 10_000).await.unwrap()), [&[0][..], &[7; 4096]].concat());
    f.truncate(TIB).await.unwrap();
    assert_eq!(f.seek_data(0).await.unwrap_err().code, Code::NxIo);
    f.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_file_written_from_front_to_end_costs_no_question() {
    let c = Cluster::new(3, 1);
    let a = c.client(1).await;
    let f = file(&a, 65536, -1).await;
    for i in 0..50u64 {
        f.write_all_at(i * 10_000, &[1; 10_000]).await.unwrap();
        f.write_all_at(i * 5000, &[2; 100]).await.unwrap();
    }
    f.append(vec![Buf::copy_from(&[3; 77])]).await.unwrap();
    f.fsync().await.unwrap();
    let before = a.stats().data_requests;
    assert!(!a.getattr(&user(), f.ino()).await.unwrap().sparse);
    assert_eq!((f.seek_data(5).await.unwrap(), f.seek_hole(5).await.unwrap()), (5, 500_077));
    assert_eq!(a.stats().data_requests, before);
    // From here on the file may have holes: checked before and after the metadata server knows.
    f.write_all_at(600_000, &[1]).await.unwrap();
    assert_eq!(f.seek_hole(5).await.unwrap(), 503_808);
    assert!(a.getattr(&user(), f.ino()).await.unwrap().sparse);
    f.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn bad_arguments_and_rights() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let f = file(&a, 65536, -1).await;
    f.write_all_at(0, &[1; 9000]).await.unwrap();
    assert_eq!(f.punch(0, 0).await.unwrap_err().code, Code::Inval);
    for (at, len) in [(9000, 1), (u64::MAX, 1), (u64::MAX, u64::MAX), (1 << 50, 5)] {
        f.punch(at, len).await.unwrap();
    }
    assert!(content(&f).await == [1; 9000]);
    f.punch(8999, u64::MAX).await.unwrap();
    assert_eq!(content(&f).await[8998..], [1, 0]);
    let r = a.open(&user(), f.ino(), 0).await.unwrap().0;
    assert_eq!(r.punch(0, 1).await.unwrap_err().code, Code::BadF);
    assert_eq!(r.seek_data(u64::MAX).await.unwrap_err().code, Code::NxIo);
    r.close().await.unwrap();
    f.close().await.unwrap();
}

/// Lost punches and writes are resent in their original order, whichever of them was lost.
#[tokio::test(start_paused = true)]
async fn punches_that_were_lost_are_made_again_in_order() {
    for copies in [1, 2] {
        let c = Cluster::new(3, copies);
        let a = c.client(1).await;
        let f = file(&a, 65536, -1).await;
        f.write_all_at(0, &[1; 400_000]).await.unwrap();
        f.fsync().await.unwrap();
        f.write_all_at(0, &[2; 300_000]).await.unwrap();
        f.punch(100_000, 150_000).await.unwrap();
        f.write_all_at(150_000, &[3; 10]).await.unwrap();
        c.restart(&[0, 1, 2]);
        // This punch runs before the client notices the loss. It hits lost bytes: they are resent,
        // and the punched range must stay a hole.
        f.punch(50_000, 10).await.unwrap();
        let mut want = vec![1; 400_000];
        want[..300_000].fill(2);
        want[100_000..250_000].fill(0);
        want[150_000..150_010].fill(3);
        want[50_000..50_010].fill(0);
        f.fsync().await.unwrap();
        assert!(a.stats().replays > 0);
        assert!(content(&f).await == want);
        assert_eq!(f.seek_hole(0).await.unwrap(), 102_400);
        c.restart(&[0, 1, 2]);
        assert!(content(&f).await == want, "stable now");
        f.close().await.unwrap();
    }
}

/// A lost chunk is in no list of chunks. Resent writes must not overwrite a later punch of it.
#[tokio::test(start_paused = true)]
async fn a_punch_of_lost_chunks_holds() {
    let c = Cluster::new(3, 1);
    let a = c.client(1).await;
    let f = file(&a, 65536, -1).await;
    f.write_all_at(0, &[1; 300_000]).await.unwrap();
    c.restart(&[0, 1, 2]);
    f.punch(0, 200_000).await.unwrap();
    f.fsync().await.unwrap();
    let mut want = vec![1; 300_000];
    want[..200_000].fill(0);
    assert!(content(&f).await == want);
    f.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn unstable_punches_outlive_a_daemon() {
    for restarted in [false, true] {
        let (c, keep) = (Cluster::new(3, 2), HandoverMemory::create([7; 16], 64 << 20).unwrap());
        let kept = |byte: u8, len: usize| {
            let mut b = keep.pool().get_now(len);
            b.fill(byte);
            vec![b.freeze()]
        };
        std::thread::scope(|s| {
            s.spawn(|| {
                let paused = tokio::runtime::Builder::new_current_thread()
                    .enable_all()
                    .start_paused(true)
                    .build();
                paused.unwrap().block_on(async {
                    let a =
                        c.client_with(1, Config { handover: Some(keep.clone()), ..config() }).await;
                    let f = file(&a, 65536, -1).await;
                    f.write(0, kept(1, 300_000)).await.unwrap();
                    f.fsync().await.unwrap();
                    f.write(0, kept(2, 150_000)).await.unwrap();
                    f.punch(100_000, 100_000).await.unwrap();
                    f.write(120_000, kept(3, 5)).await.unwrap();
                    std::mem::forget((a, f));
                });
            });
        });
        if restarted {
            c.restart(&[0, 1, 2]);
        }
        let next = HandoverMemory::open(keep.fd().try_clone_to_owned().unwrap()).unwrap();
        let b = c.client_with(2, Config { handover: Some(next.clone()), ..config() }).await;
        let former = Former { ino: 102, flags: RW, uid: 1000, gid: 1000 };
        let f = b
            .take_over(&[former], &operations(&next.left_requests()))
            .await
            .pop()
            .unwrap()
            .unwrap();
        f.fsync().await.unwrap();
        assert_eq!(b.stats().replays > 0, restarted);
        let mut want = vec![1; 300_000];
        want[..100_000].fill(2);
        want[100_000..200_000].fill(0);
        want[120_000..120_005].fill(3);
        assert!(content(&f).await == want);
        assert_eq!(
            f.seek_hole(0).await.unwrap(),
            102_400,
            "the metadata servers were told of holes"
        );
        assert!(b.getattr(&user(), 102).await.unwrap().sparse);
        f.close().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_dirty_replica_sends_who_looks_for_holes_to_the_tail() {
    let c = Cluster::new(3, 3);
    let a = c.client(1).await;
    let f = file(&a, 65536, -1).await;
    f.write_all_at(200_000, &[1; 5]).await.unwrap();
    c.oss.faults(|f| f.dirty = BTreeSet::from([0, 1]));
    for chain_tail in [2, 0, 1] {
        c.oss.faults(|f| f.dirty = (0..3).filter(|t| *t != chain_tail).collect());
        assert_eq!(f.seek_data(0).await.unwrap(), 196_608);
    }
    f.close().await.unwrap();
}
