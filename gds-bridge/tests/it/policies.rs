//! The combined policies of a call, its files and its bridge.

use std::sync::Arc;

use crate::ram::*;
use strake_fabric::Pool;
use strake_fake_gpu::FakeGpu;
use strake_gds::{Direction, Fault, Policy, Strict, Tier};
use strake_proto::Code;

const BOUNCE: Policy = Policy::Require(Tier::BounceTcp);

fn driver_error() -> Fault {
    Fault::Driver { call: "cuMemcpyHtoDAsync", code: 999, name: "CUDA_ERROR_UNKNOWN".into() }
}

/// The policy may come from the call, the file or the bridge.
#[tokio::test]
async fn require_and_at_least_never_degrade_in_mid_run() {
    for policy in [BOUNCE, Policy::AtLeast(Tier::BounceTcp)] {
        let (any, ways) = (Policy::Prefer, [Direction::Load, Direction::Save]);
        for (direction, [call, of_file, of_bridge]) in ways.into_iter().flat_map(|d| {
            [[policy, any, any], [any, policy, any], [any, any, policy]].map(|p| (d, p))
        }) {
            let (mem, pool) = (FakeGpu::new(), Pool::new(64 << 20));
            mem.limit_pins(1 << 30);
            let bridge = demanding(&mem, Arc::new(pool.clone()), of_bridge).await;
            let file = Ram::new(1, pattern(3, 5 * MIB), &pool);
            let tensor = device(&mem, &pattern(4, 5 * MIB));
            let mut all = [whole(&file, tensor)];
            all[0].file = Arc::new(Strict::new(file, of_file).unwrap());
            let before = mem.copied();
            mem.fail_pinned_after(9, driver_error());
            let r = if direction == Direction::Load {
                bridge.load(&all, call).await
            } else {
                bridge.save(&all, call).await
            };
            let failed = r.unwrap_err();
            assert!(
                failed.error.code == Code::Io && failed.error.message.contains("allows no other"),
                "{failed}"
            );
            assert_eq!(failed.report.policy, policy);
            assert!(failed.error.message.contains("999: CUDA_ERROR_UNKNOWN"), "{failed}");
            let (r, now) = (failed.report, mem.copied());
            assert!(r.moved() > 0 && r.moved() < r.asked && r.by_tier[Tier::Pageable] == 0, "{r}");
            assert_eq!(r.switches[0].to, None);
            // The device's own counters show no other bytes, either.
            assert_eq!(
                (now.load_pageable, now.save_pageable),
                (before.load_pageable, before.save_pageable)
            );
            // After the fault is removed, the next call runs the self-test itself and succeeds.
            mem.mend();
            assert!(bridge.load(&all, call).await.unwrap().is_all(Tier::BounceTcp));
        }
    }
}

#[tokio::test]
async fn policies_that_exclude_each_other_move_nothing() {
    let (mem, pool) = (FakeGpu::new(), Pool::new(64 << 20));
    let bridge = demanding(&mem, Arc::new(pool.clone()), Policy::AtLeast(Tier::BounceTcp)).await;
    let file = Ram::new(1, pattern(3, MIB), &pool);
    let tensor = device(&mem, &pattern(4, 2 * MIB));
    let mut all = [whole(&file, tensor), whole(&Ram::new(2, pattern(5, MIB), &pool), tensor + MIB)];
    let before = mem.copied();
    let refused = |failed: strake_gds::Failed, words: [&str; 2]| {
        assert!(failed.error.code == Code::Inval && failed.report.moved() == 0, "{failed}");
        assert!(failed.report.asked == 2 * MIB && failed.report.ranges == [0, 0], "{failed}");
        assert!(words.iter().all(|w| failed.error.message.contains(w)), "{failed}");
    };
    let failed = bridge.load(&all, Policy::Require(Tier::Pageable)).await.unwrap_err();
    refused(failed, ["call is require:pageable", "bridge is at-least:bounce-tcp"]);
    let own = Strict::new(all[1].file.clone(), Policy::Require(Tier::BounceTcp)).unwrap();
    let twice = Strict::new(Arc::new(own.clone()), Policy::AtLeast(Tier::GpuRdma)).err().unwrap();
    assert_eq!(twice.code, Code::Inval);
    all[1].file = Arc::new(own);
    let failed = bridge.save(&all, Policy::AtLeast(Tier::BounceRdma)).await.unwrap_err();
    refused(failed, ["file of range 1 is require:bounce-tcp", "policies is at-least:bounce-rdma"]);
    assert_eq!(mem.copied(), before);
    assert!(bridge.load(&all, Policy::Prefer).await.unwrap().is_all(Tier::BounceTcp));
}
