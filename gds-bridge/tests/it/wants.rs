//! Tiers that fail because something is missing: what the reports say, and what later calls do.

use std::sync::Arc;

use crate::ram::*;
use strake_fabric::{Pool, REGION, Transport};
use strake_fake_gpu::FakeGpu;
use strake_gds::{
    Bridge, Checksums, Fault, Network, Options, Policy, Tier, Transfer, Unavailable, plan::Standing,
};
use strake_proto::Code;

/// A client that reaches servers by RDMA.
struct Reach(Pool);

impl Network for Reach {
    fn pool(&self) -> &Pool {
        &self.0
    }
    fn no_rdma(&self) -> Option<String> {
        None
    }
}

const RDMA: Policy = Policy::Require(Tier::BounceRdma);
const BOUNCED: Policy = Policy::AtLeast(Tier::BounceTcp);

async fn with_rdma(pins: u64, pool: &Pool) -> (FakeGpu, Bridge) {
    let mem = FakeGpu::new();
    mem.limit_pins(pins);
    let bridge = over(&mem, Arc::new(Reach(pool.clone()))).await;
    (mem, bridge)
}

#[tokio::test]
async fn a_payload_outside_the_pools_regions_is_called_that() {
    let pool = Pool::new(REGION as u64);
    let (mem, bridge) = with_rdma(1 << 30, &pool).await;
    let file = Ram::by(1, pattern(1, MIB), &pool, |_| Transport::Rdma);
    let tensor = device(&mem, &vec![0; 1 << 20]);
    let all = [whole(&file, tensor)];
    assert!(bridge.load(&all, RDMA).await.unwrap().is_all(Tier::BounceRdma));
    // Fill the pool, so that the next payloads lie elsewhere.
    let full = loop {
        // A worker may still hold what it has copied.
        let all = pool.get_now(REGION);
        if all.region().is_some() {
            break all;
        }
        std::thread::yield_now();
    };
    assert!(pool.get_now(4096).region().is_none());
    let failed = bridge.load(&all, RDMA).await.unwrap_err();
    let text = failed.to_string();
    assert!(text.contains("pool of buffers was full") && !text.contains("pinned_limit"), "{text}");
    let r = bridge.load(&all, BOUNCED).await.unwrap();
    assert!(r.by_tier[Tier::BounceRdma] == 0 && r.moved() == MIB, "{r}");
    drop(full);
    assert!(
        bridge.load(&all, RDMA).await.unwrap().is_all(Tier::BounceRdma),
        "a call that allows nothing else tries"
    );
}

#[tokio::test]
async fn bounce_rdma_is_not_lost_and_found_by_each_call_where_little_may_be_pinned() {
    let pool = Pool::new(64 << 20);
    let (mem, bridge) = with_rdma(6 * 256 * KIB + 4 * MIB, &pool).await;
    let file = Ram::by(1, pattern(1, 6 * MIB), &pool, |_| Transport::Rdma);
    let tensor = device(&mem, &vec![0; 6 << 20]);
    let all = [whole(&file, tensor)];
    assert!(matches!(bridge.standings()[Tier::BounceRdma], Standing::Available(_)));
    // These buffers use up the region that is registered already.
    let taken: Vec<_> = (0..4).map(|_| pool.get_now(1 << 20)).collect();
    let first = bridge.load(&all, BOUNCED).await.unwrap();
    let rests = |why: &Unavailable| matches!(why, Unavailable::Resting(Fault::NotStraight { .. }));
    assert!(first.switches.iter().any(|s| s.from == Tier::BounceRdma && rests(&s.why)), "{first}");
    let copied = mem.copied();
    for _ in 0..3 {
        let r = bridge.load(&all, BOUNCED).await.unwrap();
        assert!(
            r.is_all(Tier::BounceTcp)
                && r.switches.is_empty()
                && r.by_transport[Transport::Rdma] == 6 * MIB,
            "{r}"
        );
        assert!(r.unavailable.iter().any(|(t, why)| *t == Tier::BounceRdma && rests(why)), "{r}");
        assert!(r.to_string().contains("avoid it for a while"), "{r}");
    }
    // No self-test ran either.
    assert_eq!(mem.copied().load_pinned - copied.load_pinned, 3 * 6 * MIB);
    // A call that allows only this tier tries it.
    let failed = bridge.load(&all, RDMA).await.unwrap_err();
    assert!(
        failed.error.code == Code::Io
            && failed.error.message.contains("registered with the device"),
        "{failed}"
    );
    // An explicit self-test makes the bridge try the tier again.
    drop(taken);
    bridge.self_test().await;
    let r = bridge.load(&all, BOUNCED).await.unwrap();
    assert!(r.by_tier[Tier::BounceRdma] > 0, "{r}");
}

#[tokio::test]
async fn a_device_without_room_for_sums_copies_unverified_and_the_report_says_so() {
    let (mem, pool) = (FakeGpu::new(), Pool::new(64 << 20));
    mem.limit_pins(1 << 30);
    mem.play_sums();
    let options = Options {
        workers: 2,
        slots: 2,
        slot_bytes: 256 << 10,
        pinned_limit: Some(1 << 30),
        verify_on_gpu: true,
        ..Options::default()
    };
    let bridge =
        Bridge::open(Arc::new(mem.clone()), Arc::new(pool.clone()), options).await.unwrap();
    let file = Ram::new(1, pattern(1, MIB), &pool);
    let tensor = device(&mem, &vec![0; 1 << 20]);
    let all = [Transfer { file: file.clone(), offset: 0, gpu: tensor, len: MIB }];
    for policy in [Policy::Require(Tier::BounceTcp), Policy::Require(Tier::Pageable)] {
        mem.limit_room(MIB + 4096);
        assert_eq!(bridge.load(&all, policy).await.unwrap().checksums, Checksums::Gpu);
        mem.limit_room(MIB + 4095);
        for r in
            [bridge.load(&all, policy).await.unwrap(), bridge.save(&all, policy).await.unwrap()]
        {
            assert!(
                r.moved() == MIB && r.switches.is_empty() && r.checksums == Checksums::Host,
                "{r}"
            );
            let why = r.not_on_gpu.unwrap();
            assert!(
                why.contains("did not sum all of the data")
                    && why.contains("no memory for 4096 bytes"),
                "{why}"
            );
        }
        let standings = bridge.standings();
        for tier in [Tier::BounceTcp, Tier::Pageable] {
            assert!(matches!(standings[tier], Standing::Available(_)), "{standings:?}");
        }
    }
    assert!(mem.peek(tensor, MIB).unwrap() == *file.bytes.lock());
}
