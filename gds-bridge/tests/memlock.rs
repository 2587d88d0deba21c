//! A small limit of lockable memory. This test needs its own process, because the limit applies to
//! the process.

#[path = "it/ram/mod.rs"]
mod ram;

use std::sync::Arc;

use ram::{MIB, Ram, device, pattern, whole};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use strake_fabric::Pool;
use strake_fake_gpu::FakeGpu;
use strake_gds::{Bridge, Options, Policy, Tier};

#[tokio::test]
async fn a_limit_of_8_mib_makes_a_smaller_pool_that_says_so() {
    let limit = getrlimit(Resource::Memlock);
    let maximum = limit.maximum.map_or(8 * MIB, |m| m.min(8 * MIB));
    setrlimit(Resource::Memlock, Rlimit { current: Some(maximum), maximum: limit.maximum })
        .unwrap();
    if maximum < 8 * MIB {
        println!("skipped: no more than {maximum} bytes may be locked here, this test wants 8 MiB");
        return;
    }
    let (mem, pool) = (FakeGpu::new(), Pool::new(64 << 20));
    // Really locked: nothing is simulated here.
    let bridge = Bridge::open(Arc::new(mem.clone()), Arc::new(pool.clone()), Options::default())
        .await
        .unwrap();
    let notice = bridge.notice().unwrap();
    assert!(notice.contains("12 pinned slots of 256 KiB and 0 pinned regions"), "{notice}");
    assert!(notice.contains("RLIMIT_MEMLOCK is 8388608 bytes"), "{notice}");
    assert_eq!((mem.pinned(), locked()), (3 * MIB, 3 * MIB));
    let file = Ram::new(1, pattern(1, 5 * MIB + 3), &pool);
    let tensor = device(&mem, &vec![0; 6 << 20]);
    let r = bridge.load(&[whole(&file, tensor)], Policy::Require(Tier::BounceTcp)).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp) && r.staged == r.asked, "{r}");
    assert!(mem.peek(tensor, 5 * MIB + 3).unwrap() == *file.bytes.lock());
    drop(bridge);
    assert_eq!((mem.pinned(), locked()), (0, 0));

    // More memory is requested than may be locked: the system decides, unless the process is exempt
    // from its limit.
    let options = Options { pinned_limit: Some(1 << 30), ..Options::default() };
    let bridge =
        Bridge::open(Arc::new(mem.clone()), Arc::new(pool.clone()), options).await.unwrap();
    if mem.pinned() > 8 * MIB {
        println!("skipped the rest: this process may lock more than its limit (CAP_IPC_LOCK)");
        return;
    }
    assert!(bridge.notice().unwrap().contains("mlock"), "{:?}", bridge.notice());
    let r = bridge.load(&[whole(&file, tensor)], Policy::Require(Tier::BounceTcp)).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp));
}

/// Bytes that the kernel has locked for this process (`VmLck` of proc(5)).
fn locked() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmLck:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}
