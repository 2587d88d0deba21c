//! The cache of read bytes: which reads need no message, what invalidates cached bytes, and how
//! much memory they take.

use std::{sync::Arc, time::Duration};

use crate::common::*;
use parking_lot::Mutex;
use strake_client::{Client, Config, File, Forget, Forgetting, rows::Holder};
use strake_proto::{Ino, layout::splitmix64, pb};

const RW: u32 = 2;
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut s = seed;
    (0..len.div_ceil(8)).flat_map(|_| splitmix64(&mut s).to_le_bytes()).take(len).collect()
}

async fn put(c: &Client, name: &[u8], data: &[u8]) -> Ino {
    let (f, _) =
        c.create(&user(), c.root(), name, 0o644, RW, true, striped(1 << 20, -1)).await.unwrap();
    f.write_all_at(0, data).await.unwrap();
    let ino = f.ino();
    f.close().await.unwrap();
    ino
}

async fn open(c: &Client, ino: Ino) -> File {
    c.open(&user(), ino, 0).await.unwrap().0
}

async fn get(f: &File, at: usize, len: usize) -> Vec<u8> {
    join(&f.read(at as u64, len).await.unwrap())
}

/// Counts of file requests to metadata servers and of all requests to storage servers.
fn asked(c: &Client) -> (u64, u64) {
    let s = c.stats();
    (s.operations, s.data_requests)
}

#[tokio::test(start_paused = true)]
async fn to_open_read_and_close_a_file_once_more_costs_no_message() {
    let c = Cluster::new(2, 1);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let data = pattern(1, 100_000);
    let ino = put(&a, b"f", &data).await;
    for reader in [&a, &b] {
        for _ in 0..2 {
            let f = open(reader, ino).await;
            assert!(get(&f, 0, MIB).await == data);
            f.close().await.unwrap();
        }
        let before = asked(reader);
        for _ in 0..20 {
            let f = open(reader, ino).await;
            assert!(get(&f, 0, MIB).await == data);
            assert!(get(&f, 5000, 10).await == data[5000..5010]);
            f.close().await.unwrap();
            tokio::time::sleep(Duration::from_secs(3)).await;
        }
        assert_eq!(asked(reader), before);
        assert_eq!(reader.stats().cached_opens, 20 + 1);
    }
    // The cache serves the file until it changes.
    let (f, _) = a.open(&user(), ino, RW).await.unwrap();
    f.write_all_at(10, b"new").await.unwrap();
    f.close().await.unwrap();
    assert_eq!(
        get(&open(&b, ino).await, 8, 6).await,
        [&data[8..10], b"new", &data[13..14]].concat()
    );
}

#[tokio::test(start_paused = true)]
async fn a_leader_that_was_elected_again_is_greeted_on_a_new_connection() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let ino = put(&a, b"f", b"bytes").await;
    let look = async |want| {
        let before = asked(&a).0;
        assert_eq!(a.getattr(&user(), ino).await.unwrap().size, 5);
        assert_eq!(asked(&a).0 - before, want);
    };
    look(0).await;
    let taken = || Holder::counts().iter().find(|(row, _)| *row == "no-leases").map(|(_, n)| *n);
    assert_eq!(taken(), Some(0));
    c.mds.elect_again();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(taken(), Some(1));
    look(1).await;
    look(0).await;
}

/// Records the inodes that a mount's kernel would be told to forget, each with the number of
/// requests that the metadata servers had answered by then.
#[derive(Clone)]
struct Kernel(Arc<Mds>, Arc<Mutex<Vec<(Ino, u64)>>>);

impl Forget for Kernel {
    fn forget(&self, inos: &[Ino], _names: bool) -> Option<Forgetting> {
        let (kernel, inos) = (self.clone(), inos.to_vec());
        // The kernel confirms only after a while.
        Some(Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            kernel.1.lock().extend(inos.iter().map(|ino| (*ino, kernel.0.asked())));
        }))
    }
}

/// A change gives back the lease on the inode behind the name, even if the change fails. So holders
/// of copies, such as the kernel, forget them before the client sends the change.
#[tokio::test(start_paused = true)]
async fn copies_of_what_a_change_gives_back_are_forgotten_before() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let ino = put(&a, b"f", b"bytes").await;
    let attr = a.lookup(&user(), a.root(), b"f").await.unwrap();
    let kernel = Kernel(c.mds.clone(), Arc::default());
    assert!(a.copies().keep(Arc::new(kernel.clone())));
    assert!(a.copies().attr_valid(&attr) > Duration::ZERO);
    let before = c.mds.asked();
    a.unlink(&user(), a.root(), b"f").await.unwrap();
    assert_eq!((a.copies().attr_valid(&attr), c.mds.asked()), (Duration::ZERO, before + 1));
    assert_eq!(kernel.1.lock()[..], [(ino, before)]);
    a.unlink(&user(), a.root(), b"f").await.unwrap_err();
    assert_eq!(kernel.1.lock().len(), 1, "nothing is known to be there");
}

#[tokio::test(start_paused = true)]
async fn small_reads_anywhere_are_kept_while_nobody_else_may_write() {
    let c = Cluster::new(4, 2);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let mut data = pattern(2, 8 * MIB);
    let ino = put(&a, b"f", &data).await;
    let f = open(&b, ino).await;
    let mut rnd = 3;
    let places: Vec<usize> =
        (0..200).map(|_| splitmix64(&mut rnd) as usize % (8 * MIB - 5000)).collect();
    let read_all = async |data: &[u8]| {
        for at in &places {
            assert!(get(&f, *at, 5000).await == data[*at..*at + 5000]);
        }
    };
    read_all(&data).await;
    let before = asked(&b);
    tokio::time::sleep(Duration::from_secs(30)).await;
    read_all(&data).await;
    assert_eq!(asked(&b), before);
    // While another client may write the file, each read asks the servers and sees the new bytes.
    let (w, _) = a.open(&user(), ino, RW).await.unwrap();
    for (i, at) in places.iter().enumerate().take(20) {
        w.write_all_at(*at as u64, &[i as u8; 100]).await.unwrap();
        data[*at..*at + 100].fill(i as u8);
        assert!(get(&f, *at, 5000).await == data[*at..*at + 5000]);
    }
    w.close().await.unwrap();
    read_all(&data).await;
    let before = asked(&b);
    read_all(&data).await;
    assert_eq!(asked(&b), before, "and is forgotten when he has gone");
    // Reads see the client's own writes, and the rest of the file stays cached.
    let (own, _) = b.open(&user(), ino, RW).await.unwrap();
    read_all(&data).await;
    own.write_all_at(places[7] as u64 + 3, b"mine").await.unwrap();
    data[places[7] + 3..places[7] + 7].copy_from_slice(b"mine");
    read_all(&data).await;
    own.punch(places[8] as u64, 100).await.unwrap();
    data[places[8]..places[8] + 100].fill(0);
    read_all(&data).await;
    own.fsync().await.unwrap();
    b.getattr(&user(), ino).await.unwrap();
    let before = asked(&b).1;
    read_all(&data).await;
    assert!(asked(&b).1 < before + 10, "nor does reporting them");
    let before = asked(&b);
    read_all(&data).await;
    assert_eq!(asked(&b), before);
}

#[tokio::test(start_paused = true)]
async fn memory_is_bounded_and_a_scan_leaves_what_is_read_again_and_again() {
    let c = Cluster::new(4, 1);
    let a = c.client(1).await;
    let b = c.client_with(2, Config { cache_bytes: 4 * MIB, ..config() }).await;
    let hot = pattern(4, 700 * KIB);
    let hot_ino = put(&a, b"hot", &hot).await;
    let big = pattern(5, 40 * MIB);
    let big_ino = put(&a, b"big", &big).await;
    let mut small = Vec::new();
    for i in 0..20u8 {
        small.push(put(&a, &[b's', i], &pattern(u64::from(i), 600 * KIB)).await);
    }
    for _ in 0..3 {
        assert!(get(&open(&b, hot_ino).await, 0, MIB).await == hot);
    }
    // Reads a large file in order with small and large reads, then at random, then many small
    // files.
    let f = open(&b, big_ino).await;
    for step in [128 * KIB, MIB] {
        for at in (0..big.len()).step_by(step) {
            assert!(get(&f, at, step).await == big[at..at + step]);
            assert!(b.stats().cache_bytes <= 4 * MIB as u64);
        }
    }
    let from_servers = b.stats().data_reads;
    assert!(from_servers < 200, "{from_servers} reads: nothing was read ahead");
    let mut rnd = 6;
    for _ in 0..400 {
        let at = splitmix64(&mut rnd) as usize % (big.len() - 9000);
        assert!(get(&f, at, 9000).await == big[at..at + 9000]);
    }
    for (i, ino) in small.iter().enumerate() {
        let f = open(&b, *ino).await;
        for at in (0..600).step_by(100) {
            let want = &pattern(i as u64, 600 * KIB)[at * KIB..(at + 100) * KIB];
            assert!(get(&f, at * KIB, 100 * KIB).await == want);
        }
        assert!(b.stats().cache_bytes <= 4 * MIB as u64);
    }
    let before = asked(&b);
    assert!(get(&open(&b, hot_ino).await, 0, MIB).await == hot);
    assert_eq!(asked(&b), before);
}

#[tokio::test(start_paused = true)]
async fn without_memory_for_it_every_read_asks_storage_servers() {
    let c = Cluster::new(2, 1);
    let a = c.client_with(1, Config { cache_bytes: 0, ..config() }).await;
    let data = pattern(7, 4 * MIB);
    let f = open(&a, put(&a, b"f", &data).await).await;
    for _ in 0..2 {
        for at in (0..4).map(|n| n * MIB) {
            let before = asked(&a).1;
            assert!(get(&f, at, MIB).await == data[at..at + MIB]);
            assert_eq!(asked(&a).1, before + 1);
        }
    }
    assert_eq!((a.stats().cached_bytes, a.stats().cache_bytes), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_cut_by_its_number_is_read_anew() {
    let c = Cluster::new(2, 1);
    let a = c.client(1).await;
    let data = pattern(8, 10_000);
    let ino = put(&a, b"f", &data).await;
    for by_list in [false, true] {
        assert!(get(&open(&a, ino).await, 0, 10).await == data[..10]);
        for size in [0, 10] {
            let set = pb::SetAttr { ino, size: Some(size), ..Default::default() };
            match by_list {
                true => drop(
                    a.compound(&user(), vec![pb::Op { op: Some(pb::op::Op::Setattr(set)) }])
                        .await
                        .unwrap(),
                ),
                false => drop(a.setattr(&user(), set).await.unwrap()),
            }
        }
        assert_eq!(get(&open(&a, ino).await, 0, 20).await, [0; 10]);
        let (f, _) = a.open(&user(), ino, RW).await.unwrap();
        f.write_all_at(0, &data).await.unwrap();
        f.close().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_read_of_a_server_that_lost_writes_is_not_kept_when_they_are_written_again() {
    let c = Cluster::new(1, 1);
    let a = c.client(1).await;
    let (f, _) = a.create(&user(), a.root(), b"f", 0o644, RW, true, None).await.unwrap();
    f.write_all_at(0, &[1; 9000]).await.unwrap();
    f.fsync().await.unwrap();
    f.write_all_at(100, &[2; 50]).await.unwrap();
    c.restart(&[0]);
    assert_eq!(get(&f, 100, 50).await, [1; 50], "until it is noticed");
    f.fsync().await.unwrap();
    assert!(a.stats().replays > 0);
    assert_eq!(get(&f, 100, 50).await, [2; 50]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_read_from_memory_when_the_lease_is_over() {
    let c = Cluster::new(2, 1);
    let (a, b) = (c.client(1).await, c.client(2).await);
    let ino = put(&a, b"f", &[7; 5000]).await;
    let f = open(&b, ino).await;
    assert_eq!(get(&f, 0, 10).await, [7; 10]);
    assert!(f.read_ready(0, 10).is_some());
    MDS.iter().for_each(|n| c.net.set_silent(*n, true));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(f.read_ready(0, 10).is_none());
    MDS.iter().for_each(|n| c.net.set_silent(*n, false));
    assert_eq!(get(&f, 0, 10).await, [7; 10]);
    // A new leader does not know what the old one granted; the client drops its copies, too.
    c.mds.elect(2);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(f.read_ready(0, 10).is_none());
    let before = asked(&b).1;
    assert_eq!(get(&f, 0, 10).await, [7; 10]);
    assert_eq!(asked(&b).1, before + 1);
}
