//! Slots and threads near the device. This test needs its own process, because it looks at all
//! threads.

use std::{fs, path::Path, sync::Arc};

use crate::ram::*;
use strake_fabric::Pool;
use strake_fake_gpu::FakeGpu;
use strake_gds::{Bridge, Options, Policy, Tier};

fn write(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// The CPUs that the threads of bridges may use, as the kernel reports them.
fn of_threads() -> Vec<String> {
    let mut all = Vec::new();
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
        let field = |name: &str| {
            status.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim().to_string()
        };
        if field("Name:") == "strake-gds" {
            all.push(field("Cpus_allowed_list:"));
        }
    }
    all
}

#[tokio::test]
async fn a_bridge_lies_near_its_device_as_far_as_it_may_and_says_what_it_may_not() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path();
    let nodes = "devices/system/node";
    write(root, "bus/pci/devices/0000:3b:00.0/numa_node", "0\n");
    write(root, &format!("{nodes}/online"), "0-1\n");
    write(root, &format!("{nodes}/has_memory"), "0-1\n");
    // Only the first CPU that this process may use is near the device.
    let mask = rustix::thread::sched_getaffinity(None).unwrap();
    let near = (0..rustix::thread::CpuSet::MAX_CPU).find(|c| mask.is_set(*c)).unwrap();
    write(root, &format!("{nodes}/node0/cpulist"), &format!("{near}\n"));
    write(root, &format!("{nodes}/node1/cpulist"), "900-901\n");
    let (mem, pool) = (FakeGpu::new(), Pool::new(64 << 20));
    mem.limit_pins(1 << 30);
    let open = async |mem: &FakeGpu| {
        let options = Options {
            workers: 3,
            slots: 2,
            slot_bytes: 256 << 10,
            pinned_limit: Some(1 << 30),
            ..Options::default()
        };
        let options = Options { sysfs: root.into(), ..options };
        Bridge::open(Arc::new(mem.clone()), Arc::new(pool.clone()), options).await.unwrap()
    };
    // The device's location is unknown.
    let bridge = open(&mem).await;
    assert_eq!(bridge.numa().node, None);
    assert!(
        bridge.notice().unwrap().contains("not placed near the device: there is no GPU"),
        "{:?}",
        bridge.notice()
    );
    drop(bridge);

    mem.play_pci("0000:3b:00.0");
    let bridge = open(&mem).await;
    let numa = bridge.numa().clone();
    assert_eq!(
        (numa.node, numa.threads, of_threads()),
        (Some(0), Some(3), vec![near.to_string(); 3])
    );
    match bridge.notice() {
        None => assert!(
            numa.slots == Some(6) || Path::new("/sys/devices/system/node/node1").exists(),
            "{numa:?}"
        ),
        Some(refused) if refused.contains("mbind: ") => println!("skipped: {refused}"),
        Some(other) => panic!("{other}"),
    }
    let file = Ram::new(1, pattern(1, MIB), &pool);
    let tensor = device(&mem, &vec![0; 1 << 20]);
    bridge.load(&[whole(&file, tensor)], Policy::Require(Tier::BounceTcp)).await.unwrap();
    assert!(mem.peek(tensor, MIB).unwrap() == *file.bytes.lock());
    drop(bridge);

    // The near CPUs are not allowed for this process: the bridge works on the CPUs that are.
    write(root, &format!("{nodes}/node0/cpulist"), "902\n");
    let bridge = open(&mem).await;
    let notice = bridge.notice().unwrap();
    assert!(
        notice.contains("node 0, the device's: this process may use none of its processors"),
        "{notice}"
    );
    assert_eq!(bridge.numa().threads, Some(0));
    assert_ne!(of_threads(), vec!["902".to_string(); 3]);
    bridge.load(&[whole(&file, tensor)], Policy::Require(Tier::BounceTcp)).await.unwrap();
}
