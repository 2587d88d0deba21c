//! The bridge on host memory: bytes that come by one transport or another.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::SeqCst},
};

use crate::ram::*;
use strake_fabric::{Pool, Transport};
use strake_fake_gpu::FakeGpu;
use strake_gds::{Bridge, Direction, Network, Policy, Tier, Unavailable};
use strake_proto::Code;

const BOUNCE: Policy = Policy::Require(Tier::BounceTcp);
const RDMA: Policy = Policy::Require(Tier::BounceRdma);

/// A client that reaches servers by RDMA or not, as the flag says.
struct Reach(Pool, Arc<AtomicBool>);

impl Network for Reach {
    fn pool(&self) -> &Pool {
        &self.0
    }
    fn no_rdma(&self) -> Option<String> {
        (!self.1.load(SeqCst)).then(|| "there is no device".into())
    }
}

/// A bridge of a client that has RDMA.
async fn with_rdma(pins: u64) -> (FakeGpu, Pool, Bridge, Arc<AtomicBool>) {
    let (mem, pool, rdma) = (FakeGpu::new(), Pool::new(64 << 20), Arc::new(AtomicBool::new(true)));
    mem.limit_pins(pins);
    let bridge = over(&mem, Arc::new(Reach(pool.clone(), rdma.clone()))).await;
    (mem, pool, bridge, rdma)
}

#[tokio::test]
async fn what_comes_by_rdma_straight_into_pinned_memory_is_bounce_rdma() {
    let (mem, pool, bridge, rdma) = with_rdma(1 << 30).await;
    let data = pattern(1, 3 * MIB + 100);
    let file = Ram::by(1, data.clone(), &pool, |_| Transport::Rdma);
    let tensor = device(&mem, &vec![0; data.len()]);
    let all = [whole(&file, tensor)];
    let before = mem.copied();
    for policy in [RDMA, Policy::AtLeast(Tier::BounceRdma)] {
        let r = bridge.load(&all, policy).await.unwrap();
        assert!(
            r.is_all(Tier::BounceRdma)
                && r.staged == 0
                && r.by_transport[Transport::Rdma] == r.asked,
            "{r}"
        );
        assert!(mem.peek(tensor, data.len() as u64).unwrap() == data);
        let r = bridge.save(&all, policy).await.unwrap();
        assert!(
            r.is_all(Tier::BounceRdma)
                && r.staged == 0
                && r.by_transport[Transport::Rdma] == r.asked,
            "{r}"
        );
    }
    let (now, len) = (mem.copied(), data.len() as u64);
    assert_eq!(
        (now.load_pinned - before.load_pinned, now.save_pinned - before.save_pinned),
        (2 * len, 2 * len)
    );
    assert_eq!(
        (now.load_pageable, now.save_pageable),
        (before.load_pageable, before.save_pageable)
    );
    // A policy that requires TCP is not met: a load copies nothing, and a save reports the tier
    // that its bytes took.
    let failed = bridge.load(&all, BOUNCE).await.unwrap_err();
    assert!(failed.error.message.contains("came over rdma"), "{failed}");
    assert_eq!((failed.error.code, failed.report.moved()), (Code::Io, 0));
    let failed = bridge.save(&all, BOUNCE).await.unwrap_err();
    assert!(failed.error.message.contains("which makes its tier bounce-rdma"), "{failed}");
    assert_eq!(failed.report.moved(), failed.report.by_tier[Tier::BounceRdma]);

    // When RDMA goes away, the call is refused before anything moves. When it comes back, the next
    // call finds it.
    rdma.store(false, SeqCst);
    let failed = bridge.load(&all, RDMA).await.unwrap_err();
    assert_eq!((failed.error.code, failed.report.moved()), (Code::OpNotSupp, 0));
    assert!(
        failed.error.message.contains("no storage server is reached by RDMA: there is no device"),
        "{failed}"
    );
    rdma.store(true, SeqCst);
    assert!(bridge.load(&all, RDMA).await.unwrap().is_all(Tier::BounceRdma));
}

/// The transport changes in the middle of a call.
#[tokio::test]
async fn a_switch_of_transports_in_mid_run_is_counted_to_the_byte_and_ends_strict_calls() {
    let turn = 2 * MIB;
    let transports = move |at| if at < turn { Transport::Rdma } else { Transport::Tcp };
    let data = pattern(1, 4 * MIB + 777);
    let (len, tail) = (data.len() as u64, 2 * MIB + 777);
    for direction in [Direction::Load, Direction::Save] {
        let (mem, pool, bridge, _) = with_rdma(1 << 30).await;
        let file = Ram::by(1, data.clone(), &pool, transports);
        let tensor = device(&mem, &data);
        let all = [whole(&file, tensor)];
        let call = async |policy| match direction {
            Direction::Load => bridge.load(&all, policy).await,
            Direction::Save => bridge.save(&all, policy).await,
        };
        for policy in [Policy::AtLeast(Tier::BounceTcp), Policy::AtLeast(Tier::Pageable)] {
            let before = mem.copied();
            let r = call(policy).await.unwrap();
            if r.by_tier[Tier::Pageable] > 0 {
                continue; // the self-test preferred pageable: the network makes no difference
            }
            assert_eq!(
                (r.by_tier[Tier::BounceRdma], r.by_tier[Tier::BounceTcp]),
                (turn, tail),
                "{r}"
            );
            assert_eq!(
                (r.by_transport[Transport::Rdma], r.by_transport[Transport::Tcp]),
                (turn, tail),
                "{r}"
            );
            assert_eq!(
                (r.moved(), r.ranges.iter().sum::<u64>(), r.by_transport.sum()),
                (len, len, len)
            );
            let now = mem.copied();
            assert_eq!(
                now.load_pinned + now.save_pinned - before.load_pinned - before.save_pinned,
                len
            );
            if direction == Direction::Load {
                let [s] = &r.switches[..] else { panic!("{r}") };
                let want = (
                    Tier::BounceRdma,
                    Some(Tier::BounceTcp),
                    &Unavailable::OtherTransport(Transport::Tcp),
                );
                assert_eq!((s.from, s.to, &s.why), want);
            }
        }
        for policy in [RDMA, Policy::AtLeast(Tier::BounceRdma)] {
            let before = mem.copied();
            let failed = call(policy).await.unwrap_err();
            assert!(
                failed.error.code == Code::Io && failed.error.message.contains("tcp ("),
                "{failed}"
            );
            let (r, now) = (failed.report, mem.copied());
            assert!(r.by_tier[Tier::BounceRdma] > 0 && r.moved() < len, "{r}");
            assert_eq!((r.moved(), r.by_transport.sum()), (r.by_tier.sum(), r.ranges.iter().sum()));
            if direction == Direction::Load {
                // No byte that came by another transport reached the device.
                assert_eq!(r.by_tier[Tier::BounceTcp], 0, "{r}");
                assert!(now.load_pinned - before.load_pinned <= turn);
            }
            assert_eq!(
                (now.load_pageable, now.save_pageable),
                (before.load_pageable, before.save_pageable)
            );
        }
    }
}

#[tokio::test]
async fn rdma_into_memory_that_is_not_registered_is_not_called_straight() {
    // First only slots and no region of the pool are pinned; then slots and one of several regions.
    for pins in [6 * 256 * KIB, 6 * 256 * KIB + 4 * MIB] {
        let (mem, pool, bridge, _) = with_rdma(pins).await;
        let file = Ram::by(1, pattern(1, 6 * MIB), &pool, |_| Transport::Rdma);
        let tensor = device(&mem, &vec![0; 6 << 20]);
        let all = [whole(&file, tensor)];
        // These buffers use up the region that is registered already.
        let _taken: Vec<_> = (0..4).map(|_| pool.get_now(1 << 20)).collect();
        let failed = bridge.load(&all, RDMA).await.unwrap_err();
        assert!(failed.error.message.contains("registered with the device"), "{failed}");
        assert!(
            failed.report.by_tier[Tier::BounceTcp] == 0 && failed.report.staged == 0,
            "{}",
            failed.report
        );
        let r = bridge.load(&all, Policy::AtLeast(Tier::BounceTcp)).await.unwrap();
        assert!(
            r.staged > 0
                && r.staged <= r.by_tier[Tier::BounceTcp]
                && r.by_transport[Transport::Rdma] == r.asked,
            "{r}"
        );
        assert!(mem.peek(tensor, 6 * MIB).unwrap() == *file.bytes.lock());
    }
}
