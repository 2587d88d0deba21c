//! Several bridges in one process: shared memory is registered once, counted once, and released
//! with the last bridge.

use std::sync::Arc;

use crate::ram::*;
use strake_fabric::{Pool, REGION};
use strake_fake_gpu::FakeGpu;
use strake_gds::{Bridge, GpuMem, Options, Policy, Report, Tier, Transfer};

const BOUNCE: Policy = Policy::Require(Tier::BounceTcp);
/// The slots of one bridge: 3 workers with two slots of 256 KiB each.
const SLOTS: u64 = 6 * 256 * KIB;
const ONE: u64 = REGION as u64;

async fn over_limit(mem: &FakeGpu, pool: &Pool, limit: u64) -> Bridge {
    let options = Options {
        workers: 3,
        slots: 2,
        slot_bytes: 256 << 10,
        pinned_limit: Some(limit),
        ..Options::default()
    };
    Bridge::open(Arc::new(mem.clone()), Arc::new(pool.clone()), options).await.unwrap()
}

async fn save(bridge: &Bridge, mem: &FakeGpu, pool: &Pool) -> Report {
    let data = pattern(7, 2 * MIB);
    let (out, tensor) = (Ram::new(9, Vec::new(), pool), device(mem, &data));
    let all = [Transfer { file: out.clone(), offset: 0, gpu: tensor, len: 2 * MIB }];
    let r = bridge.save(&all, BOUNCE).await.unwrap();
    assert!(*out.bytes.lock() == data && r.is_all(Tier::BounceTcp), "{r}");
    mem.free(tensor).unwrap();
    r
}

#[tokio::test]
async fn two_devices_use_one_registration_of_the_clients_buffers_until_the_last_bridge_is_gone() {
    let (first, pool) = (FakeGpu::new(), Pool::new(ONE));
    first.limit_pins(1 << 30);
    let second = first.beside();
    let (a, b) =
        (over(&first, Arc::new(pool.clone())).await, over(&second, Arc::new(pool.clone())).await);
    for (bridge, mem) in [(&a, &first), (&b, &second), (&b, &second), (&a, &first)] {
        let r = save(bridge, mem, &pool).await;
        assert_eq!(r.staged, 0, "it is pinned for both: {r}");
    }
    assert_eq!(
        (a.pinned_buffers(), b.pinned_buffers(), first.pinned()),
        (ONE, ONE, 2 * SLOTS + ONE)
    );
    let told = first.pins();
    assert_eq!((told.made, told.twice, told.stray), (13, 0, 0), "{told:?}");
    // Open another bridge of the same device; then close the first bridge, which registered the
    // memory.
    let c = over(&second, Arc::new(pool.clone())).await;
    drop(a);
    for bridge in [&b, &c] {
        assert_eq!(save(bridge, &second, &pool).await.staged, 0);
    }
    assert_eq!(first.pinned(), 2 * SLOTS + ONE);
    drop((b, c));
    let told = first.pins();
    assert_eq!((first.pinned(), told.made, told.twice, told.stray), (0, 19, 0, 0));
    // After that a new bridge registers everything again.
    let d = over(&second, Arc::new(pool.clone())).await;
    assert_eq!(save(&d, &second, &pool).await.staged, 0);
}

#[tokio::test]
async fn the_limit_holds_for_all_bridges_together_and_what_they_share_counts_once() {
    let (mem, pool) = (FakeGpu::new(), Pool::new(2 * ONE));
    mem.limit_pins(1 << 30);
    let limit = 2 * SLOTS + ONE;
    let a = over_limit(&mem, &pool, limit).await;
    assert_eq!(a.notice(), None);
    let b = over_limit(&mem, &pool, limit).await;
    let notice = b.notice().unwrap();
    assert!(notice.contains("6 pinned slots of 256 KiB and 0 pinned regions"), "{notice}");
    assert!(
        notice.contains(&format!("other bridges of this process have {} bytes", SLOTS + ONE)),
        "{notice}"
    );
    save(&a, &mem, &pool).await;
    assert_eq!(save(&b, &mem, &pool).await.staged, 0, "it takes nothing of the limit");
    assert_eq!((mem.pinned(), mem.pins().twice), (limit, 0));
    let c = over_limit(&mem, &pool, limit).await;
    let notice = c.notice().unwrap();
    assert!(
        notice.starts_with("nothing is pinned: ")
            && notice.contains("other bridges of this process"),
        "{notice}"
    );
    // The limit allows more when another bridge is closed.
    drop(b);
    let d = over_limit(&mem, &pool, limit).await;
    assert!(
        d.notice().unwrap().contains("6 pinned slots of 256 KiB and 0 pinned regions"),
        "{:?}",
        d.notice()
    );
    assert_eq!(
        save(&d, &mem, &pool).await.staged,
        0,
        "the other one's region is pinned for it, too"
    );
    drop((a, c, d));
    assert_eq!((mem.pinned(), mem.pins().stray), (0, 0));
}

#[tokio::test]
async fn a_registration_that_went_with_its_context_is_made_anew_by_another_device() {
    let (first, pool) = (FakeGpu::new(), Pool::new(ONE));
    first.limit_pins(1 << 30);
    let second = first.beside();
    let (a, b) =
        (over(&first, Arc::new(pool.clone())).await, over(&second, Arc::new(pool.clone())).await);
    assert_eq!(save(&b, &second, &pool).await.staged, 0);
    first.destroy();
    assert_eq!(first.pinned(), SLOTS, "what the first has registered is gone");
    let before = second.copied();
    assert_eq!(save(&b, &second, &pool).await.staged, 0);
    let now = second.copied();
    assert_eq!(now.save_pinned - before.save_pinned, 2 * MIB, "the device finds it pinned, too");
    assert_eq!(now.save_pageable, before.save_pageable);
    drop(a);
    assert_eq!(save(&b, &second, &pool).await.staged, 0);
    drop(b);
    let told = first.pins();
    assert_eq!((first.pinned(), told.twice, told.stray), (0, 0, 0));
}

#[tokio::test]
async fn a_tier_without_pinned_memory_stages_what_another_bridge_has_pinned() {
    let (mem, pool) = (FakeGpu::new(), Pool::new(ONE));
    mem.limit_pins(1 << 30);
    let a = over(&mem, Arc::new(pool.clone())).await;
    save(&a, &mem, &pool).await;
    // This bridge may pin nothing itself.
    let b = over_limit(&mem, &pool, 1000).await;
    let (out, tensor) = (Ram::new(9, Vec::new(), &pool), device(&mem, &pattern(3, MIB)));
    let all = [Transfer { file: out.clone(), offset: 0, gpu: tensor, len: MIB }];
    let before = mem.copied();
    let r = b.save(&all, Policy::Require(Tier::Pageable)).await.unwrap();
    let now = mem.copied();
    assert!(r.is_all(Tier::Pageable) && r.staged == MIB, "{r}");
    assert_eq!(
        (now.save_pinned - before.save_pinned, now.save_pageable - before.save_pageable),
        (0, MIB)
    );
    assert!(*out.bytes.lock() == mem.peek(tensor, MIB).unwrap());
}

#[test]
fn host_memory_refuses_what_is_pinned_as_a_driver_does() {
    let mem = FakeGpu::new();
    mem.limit_pins(1 << 30);
    let other = mem.beside();
    let mut pages = strake_fabric::BufMut::unpooled(4 * 4096);
    let at = |n: usize| pages_at(&mut pages, n);
    let starts: Vec<*mut u8> = (0..4).map(at).collect();
    // SAFETY: the pages live until the end of the test, where they are released.
    unsafe {
        mem.pin(starts[1], 2 * 4096).unwrap();
        assert!(other.pin(starts[1], 4096).unwrap_err().to_string().contains("pinned already"));
        assert!(mem.pin(starts[0], 2 * 4096).is_err() && mem.pin(starts[2], 2 * 4096).is_err());
        mem.pin(starts[0], 4096).unwrap();
        other.pin(starts[3], 4096).unwrap();
    }
    assert_eq!((mem.pinned(), other.pinned()), (4 * 4096, 4 * 4096));
    for start in [starts[1], starts[0], starts[3], starts[3]] {
        mem.unpin(start);
    }
    let told = mem.pins();
    assert_eq!((told.made, told.twice, told.stray, mem.pinned()), (3, 3, 1, 0));
}

fn pages_at(b: &mut strake_fabric::BufMut, n: usize) -> *mut u8 {
    b.as_mut_ptr().wrapping_add(n * 4096)
}
