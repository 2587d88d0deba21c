//! Cost of the chunk engine compared with the device below it: the same sizes and queue depths for
//! both, in one run.
//!
//! `cargo run --release -p strake-bench --example engine_bench -- FOLDER [MiB]` makes a target in
//! `FOLDER/bench-target` and removes it. Prints rates and CPU time of the whole process per
//! operation and per GB; ratios matter, not absolute figures.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use futures_util::stream::{self, StreamExt, TryStreamExt};
use strake_fabric::{Buf, Pool};
use strake_oss::{
    device::{self, Device},
    engine::{
        Engine, Key, Options, TargetIdentity, TargetLayout, Update, create_target_dir,
        open_target_dir,
    },
};
use strake_proto::{ChunkId, Result, checksum::block_sums, data::Version};

const MIB: usize = 1 << 20;
const DEPTH: usize = 32;
const SMALL: usize = 20_000;

fn cpu() -> Duration {
    let u = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u.tv_sec as u64, u.tv_nsec as u32)
}

async fn measure<F: Future<Output = Result<()>>>(
    name: &str,
    ops: usize,
    bytes: usize,
    run: F,
) -> Result<()> {
    let (start, cpu_start) = (Instant::now(), cpu());
    run.await?;
    let (wall, used) = (start.elapsed().as_secs_f64(), (cpu() - cpu_start).as_secs_f64());
    let gb = (ops * bytes) as f64 / 1e9;
    println!(
        "{name:<34} {:>8.2} GB/s {:>9.0} op/s {:>7.2} us CPU/op {:>7.3} CPU s/GB",
        gb / wall,
        ops as f64 / wall,
        used * 1e6 / ops as f64,
        used / gb
    );
    Ok(())
}

/// Runs `op(0..count)` with [`DEPTH`] at a time.
async fn each<F: Future<Output = Result<()>>>(
    count: usize,
    op: impl FnMut(usize) -> F,
) -> Result<()> {
    stream::iter(0..count)
        .map(op)
        .map(Ok)
        .try_buffer_unordered(DEPTH)
        .try_for_each(|()| async { Ok(()) })
        .await
}

fn spread(i: usize, of: usize) -> usize {
    i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % of
}

fn bytes(pool: &Pool, len: usize) -> (Buf, Vec<u32>) {
    let mut b = pool.get_now(len);
    b.iter_mut().enumerate().for_each(|(i, x)| *x = (i ^ (i >> 8)) as u8);
    let b = b.freeze();
    let sums = block_sums(0, [&b[..]]);
    (b, sums)
}

async fn raw(path: &Path, mib: usize) -> Result<()> {
    std::fs::File::create(path)?.set_len((mib * MIB) as u64)?;
    let d: Arc<dyn Device> = device::open(path)?;
    let pool = Pool::default();
    let ((big, _), (small, _)) = (bytes(&pool, MIB), bytes(&pool, 4096));
    let (d, pool) = (&d, &pool);
    let write = |len: usize, at: usize, b: &Buf| {
        let b = b.clone();
        async move { d.write((at * len) as u64, vec![b]).await }
    };
    let read = |len: usize, at: usize| async move {
        d.read((at * len) as u64, pool.get(len).await?).await.map(|_| ())
    };
    println!("device: {}, direct: {}", d.name(), d.direct());
    measure("device write 1 MiB", mib, MIB, each(mib, |i| write(MIB, i, &big))).await?;
    measure("device write 1 MiB again", mib, MIB, each(mib, |i| write(MIB, i, &big))).await?;
    d.flush().await?;
    measure("device read 1 MiB", mib, MIB, each(mib, |i| read(MIB, i))).await?;
    measure(
        "device write 4 KiB random",
        SMALL,
        4096,
        each(SMALL, |i| write(4096, spread(i, mib * 256), &small)),
    )
    .await?;
    d.flush().await?;
    measure(
        "device read 4 KiB random",
        SMALL,
        4096,
        each(SMALL, |i| read(4096, spread(i, mib * 256))),
    )
    .await
}

fn key(index: usize) -> Key {
    Key { chain: 1, chunk: ChunkId { ino: 1, data: 1, index: index as u64 } }
}

async fn update(e: &Engine, index: usize, offset: usize, data: Buf, sums: Vec<u32>) -> Result<()> {
    loop {
        let update =
            Update::Write { offset: offset as u32, data: vec![data.clone()], sums: sums.clone() };
        match e.stage(key(index), update).await {
            Ok(staged) => {
                return e.commit(staged, Version { epoch: 1, number: 1 }, Vec::new()).map(|_| ());
            }
            // Another operation of this run holds the chunk; a chain would queue behind it.
            Err(e) if e.code == strake_proto::Code::Busy => tokio::task::yield_now().await,
            Err(e) => return Err(e),
        }
    }
}

async fn engine(path: &Path, mib: usize) -> Result<()> {
    let id = TargetIdentity {
        fs_uuid: [0; 16],
        target_uuid: [1; 16],
        target_id: 0,
        node: "bench".into(),
        incarnation: 0,
    };
    create_target_dir(path, TargetLayout::File { size: ((mib * 3 + 64) * MIB) as u64 }, id).await?;
    let pool = Pool::default();
    let e = open_target_dir(path, None, pool.clone(), Options::default()).await?.whole()?;
    let ((big, big_sums), (small, small_sums)) = (bytes(&pool, MIB), bytes(&pool, 4096));
    let e = &e;
    // Chunks of 4 MiB.
    let write = |i: usize, len: usize, b: &Buf, sums: &[u32]| {
        let (b, sums) = (b.clone(), sums.to_vec());
        async move { update(e, i * len / (4 * MIB), i * len % (4 * MIB), b, sums).await }
    };
    let read = |i: usize, len: usize| async move {
        e.read(&key(i * len / (4 * MIB)), (i * len % (4 * MIB)) as u32, len as u32)
            .await
            .map(|_| ())
    };
    let with_flush = |name: &'static str, ops, len, run| async move {
        measure(name, ops, len, async {
            let run: std::pin::Pin<Box<dyn Future<Output = Result<()>>>> = run;
            run.await?;
            e.flush().await
        })
        .await
    };
    with_flush(
        "engine write 1 MiB + flush",
        mib,
        MIB,
        Box::pin(each(mib, |i| write(i, MIB, &big, &big_sums))),
    )
    .await?;
    with_flush(
        "engine overwrite 1 MiB + flush",
        mib,
        MIB,
        Box::pin(each(mib, |i| write(i, MIB, &big, &big_sums))),
    )
    .await?;
    measure("engine read 1 MiB", mib, MIB, each(mib, |i| read(i, MIB))).await?;
    let random = |i| write(spread(i, mib * 256), 4096, &small, &small_sums);
    with_flush("engine write 4 KiB random + flush", SMALL, 4096, Box::pin(each(SMALL, random)))
        .await?;
    measure(
        "engine read 4 KiB random",
        SMALL,
        4096,
        each(SMALL, |i| read(spread(i, mib * 256), 4096)),
    )
    .await
}

#[tokio::main(worker_threads = 2)]
async fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().unwrap_or_else(|| ".".into());
    let mib: usize = args.next().and_then(|s| s.parse().ok()).unwrap_or(512);
    let (file, target) =
        (Path::new(&folder).join("bench-device"), Path::new(&folder).join("bench-target"));
    let result = async {
        raw(&file, mib).await?;
        engine(&target, mib).await
    }
    .await;
    let _ = std::fs::remove_file(&file);
    let _ = std::fs::remove_dir_all(&target);
    result
}
