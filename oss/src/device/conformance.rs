//! What every [`Device`] must do, as functions that panic if it does not. For tests of any device:
//! give [`all`] one whose contents may be lost.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use strake_fabric::{Buf, BufMut, Pool};
use strake_proto::Code;

use super::api::{BLOCK, Device};
pub use super::random::{Done, random_io};

/// Bytes that [`all`] uses, from the start of the device.
pub const SIZE: u64 = 8 << 20;

const PAGE: usize = BLOCK as usize;

/// A buffer filled by a function.
pub fn fill(pool: &Pool, len: usize, with: impl Fn(usize) -> u8) -> BufMut {
    let mut b = pool.get_now(len);
    b.iter_mut().enumerate().for_each(|(i, x)| *x = with(i));
    b
}

/// Reads from a device.
pub async fn read(d: &dyn Device, pool: &Pool, offset: u64, len: usize) -> Vec<u8> {
    d.read(offset, pool.get_now(len)).await.unwrap().to_vec()
}

/// Panics unless the device holds `want` there.
async fn has(d: &dyn Device, pool: &Pool, offset: u64, want: &[u8]) {
    let got = read(d, pool, offset, want.len()).await;
    if let Some(at) = got.iter().zip(want).position(|(g, w)| g != w) {
        panic!("{}: {} and not {} at {offset} + {at}", d.name(), got[at], want[at]);
    }
}

/// Everything below except [`bad_blocks`], [`power_cut`], [`flushed`] and [`random_io`], which need
/// special devices.
pub async fn all(d: Arc<dyn Device>) {
    assert!(d.capacity() >= SIZE && d.capacity().is_multiple_of(BLOCK), "{} bytes", d.capacity());
    assert!(!d.name().is_empty());
    vectors(&*d).await;
    concurrency(&*d).await;
    order(&*d).await;
    refusals(&*d).await;
    abandoned(&*d).await;
    discards(&*d).await;
    metered(&*d);
}

/// Writes of several buffers, whole or in odd pieces, few or many, small or large, land one after
/// the other.
async fn vectors(d: &dyn Device) {
    let pool = Pool::default();
    // Blocks never written read as something, in full.
    assert_eq!(read(d, &pool, SIZE - BLOCK, PAGE).await.len(), PAGE);
    let whole = fill(&pool, 3 * PAGE, |i| (i / 7) as u8).freeze();
    d.write(BLOCK, vec![whole.slice(0..PAGE), whole.slice(PAGE..3 * PAGE)]).await.unwrap();
    has(d, &pool, BLOCK, &whole).await;
    let odd = [0..1, 1..5000, 5000..5001, 5001..3 * PAGE].map(|r| Buf::copy_from(&whole[r]));
    d.write(1 << 20, odd.to_vec()).await.unwrap();
    has(d, &pool, 1 << 20, &whole).await;
    let many: Vec<Buf> = (0..1500).map(|i| fill(&pool, PAGE, |_| i as u8).freeze()).collect();
    d.write(2 << 20, many).await.unwrap();
    for i in [0u64, 1023, 1024, 1499] {
        has(d, &pool, (2 << 20) + i * BLOCK, &[i as u8; PAGE]).await;
    }
    // More than a controller takes at once, and than lies in one region of a pool.
    let large = fill(&pool, SIZE as usize, |i| (i / 4096 * 3 + i % 251) as u8).freeze();
    d.write(0, vec![large.clone()]).await.unwrap();
    has(d, &pool, 0, &large).await;
}

/// More operations at a time than a device takes do not mix.
async fn concurrency(d: &dyn Device) {
    let pool = &Pool::default();
    join_all((0..1000u64).map(|i| async move {
        let b = fill(pool, PAGE, |n| (i as usize * 31 + n) as u8).freeze();
        d.write(i * BLOCK, vec![b.clone()]).await.unwrap();
        has(d, pool, i * BLOCK, &b).await;
    }))
    .await;
    d.flush().await.unwrap();
    d.flush().await.unwrap();
}

/// An operation that begins after a write returned sees it, with flushes in between and without.
async fn order(d: &dyn Device) {
    let pool = &Pool::default();
    join_all((0..16u64).map(|at| async move {
        for version in 0..50u8 {
            d.write(at * 2 * BLOCK, vec![fill(pool, 2 * PAGE, |_| version).freeze()])
                .await
                .unwrap();
            if version % 10 == at as u8 % 10 {
                d.flush().await.unwrap();
            }
            let half = at % 2 * BLOCK;
            has(d, pool, at * 2 * BLOCK + half, &[version; PAGE]).await;
        }
    }))
    .await;
}

/// Unaligned, empty or beyond the end: `Inval`, and nothing changes.
async fn refusals(d: &dyn Device) {
    let (pool, end) = (Pool::default(), d.capacity());
    d.write(0, vec![fill(&pool, PAGE, |_| 5).freeze()]).await.unwrap();
    let bad = [
        (0, 0),
        (1, PAGE),
        (0, 100),
        (512, 512),
        (end, PAGE),
        (end - BLOCK, 2 * PAGE),
        (u64::MAX - 4095, PAGE),
    ];
    for (offset, len) in bad {
        assert_eq!(
            d.read(offset, pool.get_now(len)).await.unwrap_err().code,
            Code::Inval,
            "{offset} {len}"
        );
        let buf = fill(&pool, len, |_| 6).freeze();
        assert_eq!(
            d.write(offset, vec![buf]).await.unwrap_err().code,
            Code::Inval,
            "{offset} {len}"
        );
        if len > 0 {
            assert_eq!(
                d.discard(offset, len as u64).await.unwrap_err().code,
                Code::Inval,
                "{offset} {len}"
            );
        }
    }
    assert_eq!(d.write(0, vec![]).await.unwrap_err().code, Code::Inval);
    has(d, &pool, 0, &[5; PAGE]).await;
}

/// Abandoned operations end, and a flush waits for them, so they do not overwrite later writes.
async fn abandoned(d: &dyn Device) {
    let pool = &Pool::default();
    let value = |v: u8, len| fill(pool, len, |_| v).freeze();
    for round in 0..20 {
        // An operation for the others to queue behind.
        let ahead = d.write(SIZE / 2, vec![value(round, SIZE as usize / 2)]);
        let _ = tokio::time::timeout(Duration::ZERO, ahead).await;
        for i in 0..50 {
            let _ = tokio::time::timeout(Duration::ZERO, d.write(i * BLOCK, vec![value(1, PAGE)]))
                .await;
            let _ =
                tokio::time::timeout(Duration::ZERO, d.read(i * BLOCK, pool.get_now(PAGE))).await;
        }
        d.flush().await.unwrap();
        join_all((0..50).map(|i| d.write(i * BLOCK, vec![value(2, PAGE)]))).await;
        tokio::time::sleep(Duration::from_millis(2)).await;
        has(d, pool, 0, &[2; 50 * PAGE]).await;
    }
}

/// Discarded blocks can be written again.
async fn discards(d: &dyn Device) {
    let pool = &Pool::default();
    let data = fill(pool, 3 * PAGE, |i| (i / 5) as u8).freeze();
    d.discard(0, 1 << 20).await.unwrap();
    d.write(0, vec![data.clone()]).await.unwrap();
    d.flush().await.unwrap();
    has(d, pool, 0, &data).await;
}

/// The meter has everything that was done, unless it took longer than the meter remembers.
fn metered(d: &dyn Device) {
    let s = d.meter().summary();
    assert!(s.reads.is_some_and(|r| r.count > 0) && s.changes.is_some_and(|c| c.count > 0));
}

/// For a device with blocks that it cannot read, or cannot write. The error names the device and
/// the place, whatever the kernel or the controller called it, and all else works on. `offset` is
/// the place where reads (or else writes) fail.
pub async fn bad_blocks(d: &dyn Device, offset: u64, read_fails: bool) {
    let pool = &Pool::default();
    for _ in 0..3 {
        let e = match read_fails {
            true => d.read(offset, pool.get_now(PAGE)).await.err(),
            false => d.write(offset, vec![fill(pool, PAGE, |_| 1).freeze()]).await.err(),
        };
        let e = e.unwrap_or_else(|| panic!("no error at {offset}"));
        assert_eq!(e.code, Code::Io, "{e}");
        assert!(
            e.message.contains(&d.name()) && e.message.contains(&format!(" at {offset}")),
            "{e}"
        );
        d.write(0, vec![fill(pool, PAGE, |_| 3).freeze()]).await.unwrap();
        has(d, pool, 0, &[3; PAGE]).await;
    }
}

/// Writes, some flushed; `cut` turns the power off and on. Flushed data is there, the rest in part.
pub async fn power_cut(d: &dyn Device, cut: impl AsyncFnOnce()) {
    let pool = &Pool::default();
    let block = |v: u8| vec![fill(pool, PAGE, |_| v).freeze()];
    for i in 0..64 {
        d.write(i * BLOCK, block(1)).await.unwrap();
    }
    d.flush().await.unwrap();
    for i in 32..64 {
        d.write(i * BLOCK, block(2)).await.unwrap();
    }
    cut().await;
    for i in 0..64u64 {
        let got = read(d, pool, i * BLOCK, PAGE).await;
        assert!(got.iter().all(|b| *b == 1 || *b == 2 && i >= 32), "block {i}");
    }
    d.flush().await.unwrap();
}

/// Written and flushed data is there at any time after. Returns how often it was read, and how long
/// the longest read took.
pub async fn flushed(d: &dyn Device, time: Duration) -> (u64, Duration) {
    let pool = &Pool::default();
    let data = fill(pool, 1 << 20, |i| (i / 4096 * 7 + i % 249) as u8).freeze();
    d.write(0, vec![data.clone()]).await.unwrap();
    d.flush().await.unwrap();
    let (start, mut reads, mut longest) = (Instant::now(), 0, Duration::ZERO);
    while start.elapsed() < time {
        let begun = Instant::now();
        has(d, pool, 0, &data).await;
        (reads, longest) = (reads + 1, longest.max(begun.elapsed()));
    }
    d.flush().await.unwrap();
    (reads, longest)
}
