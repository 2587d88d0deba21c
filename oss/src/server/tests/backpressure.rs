//! How long a resync takes while applications read.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use super::*;
use crate::{device::mem::Op, server::Config};

const CHUNKS: u64 = 40;
const LATENCY: Duration = Duration::from_millis(4);

/// Returns the milliseconds until the second replica, which was away, is resynced, and how many
/// reads the others answered meanwhile.
async fn filled(tune: fn(&mut Config), reads: bool) -> (u64, u64) {
    let mut c = Cluster::start_with(2, tune).await;
    c.kill(1);
    for i in 0..CHUNKS {
        c.write(i, 0, &bytes(i, 50_000), i + 1).await.unwrap();
    }
    for n in &c.nodes {
        n.device.set_latency(&[Op::Read, Op::Write], LATENCY);
    }
    c.boot(1).await;
    let (c, stop, answered) =
        (Arc::new(c), Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let reader = {
        let (c, stop, answered) = (c.clone(), stop.clone(), answered.clone());
        tokio::spawn(async move {
            while reads && !stop.load(Ordering::Relaxed) {
                c.read(0, 3, 0, 5000).await.unwrap();
                answered.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
        })
    };
    let begun = Instant::now();
    c.whole().await;
    stop.store(true, Ordering::Relaxed);
    let took = begun.elapsed();
    reader.await.unwrap();
    for i in 0..CHUNKS {
        assert!(c.read(1, i, 0, 50_000).await.unwrap().1 == bytes(i, 50_000), "chunk {i}");
    }
    (took.as_millis() as u64, answered.load(Ordering::Relaxed))
}

#[tokio::test(start_paused = true)]
async fn a_fill_takes_four_times_as_long_beside_readers_and_ends() {
    let one = |cfg: &mut Config| cfg.sync_parallel = 1;
    let ((alone, none), (beside, reads)) = (filled(one, false).await, filled(one, true).await);
    assert!(none == 0 && reads > 50, "{reads} reads");
    assert!(
        beside > alone * 2 && beside < alone * 6,
        "{alone} ms alone, {beside} ms beside readers"
    );
}

#[tokio::test(start_paused = true)]
async fn a_fill_with_a_limit_stays_above_an_eighth_of_it() {
    // 40 chunks of 50 kB at 100 kB/s.
    let limited = |cfg: &mut Config| cfg.sync_rate = 100_000;
    let ((alone, _), (beside, _)) = (filled(limited, false).await, filled(limited, true).await);
    assert!((19_000..24_000).contains(&alone), "{alone} ms");
    assert!(
        beside >= alone - 1000 && beside < alone * 8,
        "{alone} ms alone, {beside} ms beside readers"
    );
}
