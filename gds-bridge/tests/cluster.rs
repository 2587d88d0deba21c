//! Files of a cluster, by the real client, to a device and back. The cluster is the one in memory of the client's own tests.

#[path = "../../client/tests/common/mod.rs"]
mod common;
mod ram;

use std::sync::Arc;

use common::*;
use ram::{KIB, MIB, over, pattern};
use strake_client::{Client, File};
use strake_gds::{Direction, GpuMem, HostMem, Policy, Tier, Transfer};
use strake_proto::Code;

const RW: u32 = 2;
const BOUNCE: Policy = Policy::Require(Tier::BounceTcp);

async fn written(c: &Client, name: &[u8], bytes: &[u8], stripe: u32) -> File {
    let (f, _) = c.create(&user(), c.root(), name, 0o644, RW, true, striped(stripe, -1)).await.unwrap();
    for (i, part) in bytes.chunks(1 << 20).enumerate() {
        f.write_all_at((i as u64) << 20, part).await.unwrap();
    }
    f.fsync().await.unwrap();
    f
}

fn range(f: &File, offset: u64, gpu: u64, len: u64) -> Transfer {
    Transfer { file: Arc::new(f.clone()), offset, gpu, len }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn striped_files_arrive_and_what_is_saved_is_read_by_another_mount() {
    let cluster = Cluster::new(4, 2);
    let (a, b) = (cluster.client(1).await, cluster.client(2).await);
    let mem = HostMem::new();
    mem.limit_pins(1 << 30);
    let bridge = over(&mem, Arc::new(a.clone())).await;
    let data: Vec<Vec<u8>> = (0..3).map(|i| pattern(i, 2 * MIB + 4321 * i)).collect();
    let mut files = Vec::new();
    for (i, d) in data.iter().enumerate() {
        files.push(written(&a, format!("f{i}").as_bytes(), d, [64 << 10, 256 << 10, 1 << 20][i]).await);
    }
    let tensor = mem.alloc(8 * MIB).unwrap();
    let all = [
        range(&files[0], 0, tensor, 2 * MIB),
        range(&files[1], 1000, tensor + 2 * MIB, MIB + 77),
        range(&files[2], 300 * KIB + 3, tensor + 4 * MIB + 1, 700_000),
    ];
    let before = mem.copied();
    let r = bridge.load(&all, BOUNCE).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp) && r.direction == Direction::Load, "{r}");
    assert_eq!(mem.copied().load_pinned - before.load_pinned, r.moved());
    for (t, d) in all.iter().zip(&data) {
        assert!(mem.peek(t.gpu, t.len).unwrap() == d[t.offset as usize..][..t.len as usize]);
    }

    // A checkpoint: two tensors into one new file, with a gap between them.
    let (out, _) = a.create(&user(), a.root(), b"out", 0o644, RW, true, striped(65536, -1)).await.unwrap();
    let saves = [range(&out, 0, tensor, 2 * MIB), range(&out, 3 * MIB + 5, tensor + 2 * MIB, MIB + 77)];
    let r = bridge.save(&saves, BOUNCE).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp) && r.staged == 0, "{r}");
    out.fsync().await.unwrap();
    assert_eq!(a.stats().unstable_bytes, 0);
    let (seen, attr) = b.open(&user(), out.ino(), 0).await.unwrap();
    assert_eq!(attr.size, 4 * MIB + 5 + 77);
    let mut want = vec![0; attr.size as usize];
    want[..2 << 20].copy_from_slice(&data[0][..2 << 20]);
    want[(3 << 20) + 5..].copy_from_slice(&data[1][1000..][..(1 << 20) + 77]);
    assert!(join(&seen.read(0, 5 << 20).await.unwrap()) == want);

    // What the other mount saved, with the hole as zeros, comes back here.
    let device = mem.alloc(attr.size).unwrap();
    let r = bridge.load(&[range(&out, 0, device, attr.size)], BOUNCE).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp) && mem.peek(device, attr.size).unwrap() == want);

    let e = bridge.load(&[range(&out, MIB, device, attr.size)], BOUNCE).await.unwrap_err();
    assert!(e.error.code == Code::Io && e.error.message.contains("the file ends after"), "{e}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_full_and_closed_files_fail_with_their_own_errors() {
    let cluster = Cluster::new(2, 2);
    let c = cluster.client(1).await;
    let mem = HostMem::new();
    mem.limit_pins(1 << 30);
    let bridge = over(&mem, Arc::new(c.clone())).await;
    let data = pattern(9, 2 * MIB);
    let f = written(&c, b"f", &data, 65536).await;
    let tensor = ram::device(&mem, &vec![0; 2 << 20]);
    let all = [range(&f, 0, tensor, 2 * MIB)];

    // One bad copy: the other one is taken, and nothing wrong arrives.
    cluster.oss.faults(|f| f.corrupt.insert(0));
    let uncached = c.open(&user(), f.ino(), 0o40000).await.unwrap().0;
    let r = bridge.load(&[range(&uncached, 0, tensor, 2 * MIB)], BOUNCE).await.unwrap();
    assert!(r.is_all(Tier::BounceTcp) && mem.peek(tensor, 2 * MIB).unwrap() == data);
    assert!(c.stats().corrupt_replies > 0);
    // None that is good: an error, and the bytes are not counted.
    cluster.oss.faults(|f| f.corrupt.insert(1));
    let failed = bridge.load(&[range(&uncached, 0, tensor, 2 * MIB)], Policy::Prefer).await.unwrap_err();
    assert!(failed.error.code == Code::Corrupt && failed.report.moved() < 2 * MIB, "{failed}");
    cluster.oss.faults(|f| f.corrupt.clear());

    cluster.oss.faults(|f| f.full = true);
    let failed = bridge.save(&all, Policy::Prefer).await.unwrap_err();
    assert!(failed.error.code == Code::NoSpc && failed.report.switches.is_empty(), "{failed}");
    cluster.oss.faults(|f| f.full = false);
    bridge.save(&all, BOUNCE).await.unwrap();

    let read_only = c.open(&user(), f.ino(), 0).await.unwrap().0;
    let failed = bridge.save(&[range(&read_only, 0, tensor, 100)], BOUNCE).await.unwrap_err();
    assert_eq!((failed.error.code, failed.report.moved()), (Code::BadF, 0));
    read_only.clone().close().await.unwrap();
    let failed = bridge.load(&[range(&read_only, 0, tensor, 100)], BOUNCE).await.unwrap_err();
    assert_eq!(failed.error.code, Code::BadF);
}
