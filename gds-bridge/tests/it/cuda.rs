//! The CUDA side against a stand-in for the driver library, which is compiled here. It shows that
//! functions, types, pointer checks and error codes fit together as the API describes them. No GPU
//! and no real driver is involved.

use std::{
    ffi::{c_int, c_long, c_void},
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::ram::{MIB, Ram, pattern, whole};
use crate::standin::{compile, own};
use strake_fabric::Pool;
use strake_gds::{
    Bridge, Checksums, Cuda, Fault, GpuMem, Options, Policy, Tier, Transfer, Unavailable,
    plan::Standing,
};
use strake_proto::{Code, Error};

const BOUNCE: Policy = Policy::Require(Tier::BounceTcp);

fn standin(dir: &Path, flags: &[&str]) -> Option<PathBuf> {
    compile("libcuda.c", dir.join("libcuda.so.1"), flags)
}

fn set(library: &Path, what: c_int, n: c_long) {
    // SAFETY: the function has this type.
    let f: unsafe extern "C" fn(c_int, c_long) =
        unsafe { std::mem::transmute(own(library, "strake_standin_set")) };
    // SAFETY: it takes any numbers.
    unsafe { f(what, n) }
}

/// Bytes loaded from pinned memory, from other memory, saved to pinned memory, to other memory.
fn counts(library: &Path) -> [u64; 4] {
    // SAFETY: the function has this type.
    let f: unsafe extern "C" fn(c_int) -> u64 =
        unsafe { std::mem::transmute(own(library, "strake_standin_count")) };
    // SAFETY: these are its counters.
    [0, 1, 2, 3].map(|i| unsafe { f(i) })
}

fn number(library: &Path, of: &str) -> c_int {
    // SAFETY: the functions that are asked for here have this type.
    let f: unsafe extern "C" fn() -> c_int = unsafe { std::mem::transmute(own(library, of)) };
    // SAFETY: they take nothing.
    unsafe { f() }
}

struct Rig {
    library: PathBuf,
    gpu: Cuda,
    pool: Pool,
    _dir: tempfile::TempDir,
}

fn rig(flags: &[&str]) -> Option<Rig> {
    let dir = tempfile::tempdir().unwrap();
    let library = standin(dir.path(), flags)?;
    let gpu = Cuda::open_library(&library, 1).unwrap();
    Some(Rig { library, gpu, pool: Pool::new(64 << 20), _dir: dir })
}

impl Rig {
    async fn bridge(&self) -> Bridge {
        let options = Options {
            workers: 3,
            slots: 2,
            slot_bytes: 256 << 10,
            pinned_limit: Some(1 << 30),
            ..Options::default()
        };
        Bridge::open(Arc::new(self.gpu.clone()), Arc::new(self.pool.clone()), options)
            .await
            .unwrap()
    }
}

#[test]
fn without_the_library_there_is_one_sentence() {
    match Cuda::open(0) {
        Err(Unavailable::NoLibrary { library, why }) => {
            assert_eq!(library, "libcuda.so.1");
            assert!(why.contains("No such file"), "{why}");
        }
        other => println!("skipped: this machine has a driver library ({other:?})"),
    }
    let e = Cuda::open_library(Path::new("/nowhere/libcuda.so.1"), 0).unwrap_err().to_string();
    assert!(
        e.starts_with("/nowhere/libcuda.so.1 cannot be opened (")
            && e.contains("install the NVIDIA driver"),
        "{e}"
    );
    let dir = tempfile::tempdir().unwrap();
    let garbage = dir.path().join("libcuda.so.1");
    std::fs::write(&garbage, b"not a library").unwrap();
    assert!(matches!(Cuda::open_library(&garbage, 0), Err(Unavailable::NoLibrary { .. })));
}

#[test]
fn old_empty_and_failing_drivers_are_told_apart() {
    let open = |flags: &[&str], device| {
        let dir = tempfile::tempdir().unwrap();
        standin(dir.path(), flags).map(|library| Cuda::open_library(&library, device).unwrap_err())
    };
    let Some(old) = open(&["-DWITHOUT_EVENTS"], 0) else { return };
    assert!(
        matches!(&old, Unavailable::OldLibrary { symbol, .. } if symbol == "cuEventCreate"),
        "{old}"
    );
    assert_eq!(open(&["-DDEVICES=0"], 0), Some(Unavailable::NoDevice { wanted: 0, found: 0 }));
    assert_eq!(open(&["-DINIT=100"], 0), Some(Unavailable::NoDevice { wanted: 0, found: 0 }));
    assert_eq!(open(&[], 2), Some(Unavailable::NoDevice { wanted: 2, found: 2 }));
    assert_eq!(open(&[], u32::MAX), Some(Unavailable::NoDevice { wanted: u32::MAX, found: 2 }));
    let name = || "CUDA_ERROR_NOT_INITIALIZED".to_string();
    let failed = Fault::Driver { call: "cuInit", code: 3, name: name() };
    assert_eq!(open(&["-DINIT=3"], 0), Some(Unavailable::Device(failed)));
    // An unknown error number, as newer drivers may return.
    for code in [5000, -1, i32::MAX] {
        let e = open(&[&format!("-DINIT={code}")], 0).unwrap();
        assert!(
            matches!(&e, Unavailable::Device(Fault::Driver { code: c, .. }) if *c == code),
            "{e}"
        );
    }
}

#[test]
fn whole_pages_around_a_range_are_exported_and_writes_of_others_are_flushed_where_they_must_be() {
    use std::os::{fd::AsRawFd, unix::fs::FileExt};
    for unordered in [false, true] {
        let Some(r) = rig(if unordered { &["-DUNORDERED"] } else { &[] }) else { return };
        let gpu = &r.gpu;
        assert_eq!(gpu.refuses(Tier::GpuRdma), None);
        let a = gpu.alloc(20_000).unwrap();
        for (addr, len) in [(a, 20_000), (a + 1, 1), (a + 4095, 8193)] {
            let m = gpu.export(addr, len).unwrap();
            let (fd, offset) = m.exported().unwrap();
            assert_eq!((m.addr(), m.len(), offset), (addr, len, addr % 4096));
            let mut said = [0; 16];
            let file = std::fs::File::open(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
            file.read_exact_at(&mut said, 0).unwrap();
            let word = |at: usize| u64::from_le_bytes(said[at..at + 8].try_into().unwrap());
            assert_eq!(word(0), addr - addr % 4096);
            assert_eq!(word(8), (addr + len).next_multiple_of(4096) - word(0));
            let number = fd.as_raw_fd();
            drop(m);
            assert!(
                std::fs::read_link(format!("/proc/self/fd/{number}")).is_err(),
                "closed with the last holder"
            );
        }
        gpu.arrived().unwrap();
        assert_eq!(number(&r.library, "strake_standin_flushed"), i32::from(unordered));
    }
    let Some(r) = rig(&["-DWITHOUT_EXPORT"]) else { return };
    let old = r.gpu.refuses(Tier::GpuRdma).unwrap();
    assert!(
        matches!(&old, Unavailable::OldLibrary { symbol, .. } if symbol == "cuMemGetHandleForAddressRange"),
        "{old}"
    );
    let a = r.gpu.alloc(4096).unwrap();
    assert!(matches!(r.gpu.export(a, 1), Err(Fault::Export { .. })));
}

#[test]
fn addresses_are_checked_against_the_driver() {
    let Some(r) = rig(&["-DNO_DMA_BUF"]) else { return };
    let gpu = &r.gpu;
    assert_eq!(gpu.name(), "Stand-in GPU (device 1)");
    assert_eq!(gpu.refuses(Tier::GpuRdma), Some(Unavailable::NoDmaBuf { device: gpu.name() }));
    assert_eq!(gpu.refuses(Tier::BounceTcp), None);
    let (a, b) = (gpu.alloc(4096).unwrap(), gpu.alloc(4096).unwrap());
    assert_eq!(b, a + 4096, "side by side, so that only the driver's ranges tell them apart");
    gpu.check(a, 4096).unwrap();
    gpu.check(a + 4095, 1).unwrap();
    assert_eq!(gpu.check(a + 1, 4096), Err(Fault::Beyond { addr: a + 1, len: 4096, end: b }));
    let host = [0u8; 8];
    for foreign in [0, 1, u64::MAX, host.as_ptr() as u64, b + 4096] {
        assert_eq!(gpu.check(foreign, 1), Err(Fault::Foreign { addr: foreign }));
    }
    gpu.free(a).unwrap();
    assert_eq!(gpu.check(a, 1), Err(Fault::Foreign { addr: a }));
    assert!(matches!(gpu.free(a), Err(Fault::Driver { call: "cuMemFree", code: 1, .. })));
    assert_eq!(gpu.alloc(1 << 40), Err(Fault::NoMemory { bytes: 1 << 40 }));
    // Memory of another device's context, and memory without a context, which is checked by its
    // device.
    let other = Cuda::open_library(&r.library, 0).unwrap();
    let foreign = other.alloc(4096).unwrap();
    assert_eq!(gpu.check(foreign, 1), Err(Fault::Foreign { addr: foreign }));
    other.check(foreign, 4096).unwrap();
    set(&r.library, 4, 0);
    let (m, n) = (gpu.alloc(4096).unwrap(), gpu.alloc(4096).unwrap());
    gpu.check(m, 8192).unwrap();
    assert_eq!(gpu.check(m, 8193), Err(Fault::Beyond { addr: m, len: 8193, end: n + 4096 }));
    set(&r.library, 5, 0);
    let elsewhere = gpu.alloc(4096).unwrap();
    assert_eq!(gpu.check(elsewhere, 1), Err(Fault::Foreign { addr: elsewhere }));
    gpu.settle().unwrap();
    assert_eq!(number(&r.library, "strake_standin_settled"), 1);
    assert_eq!(
        number(&r.library, "strake_standin_depth"),
        0,
        "the thread's own context is as it was"
    );
}

#[test]
fn what_a_stream_of_the_program_was_given_is_waited_for_and_nothing_that_it_is_given_later() {
    let Some(r) = rig(&[]) else { return };
    type Create = unsafe extern "C" fn(*mut *mut c_void, u32) -> c_int;
    type Copy = unsafe extern "C" fn(u64, *const c_void, usize, *mut c_void) -> c_int;
    // SAFETY: the functions have these types.
    let (create, copy): (Create, Copy) = unsafe {
        let of = |name| own(&r.library, name);
        (
            std::mem::transmute::<*mut c_void, Create>(of("cuStreamCreate")),
            std::mem::transmute::<*mut c_void, Copy>(of("cuMemcpyHtoDAsync_v2")),
        )
    };
    let (mut stream, tensor) = (std::ptr::null_mut(), r.gpu.alloc(4096).unwrap());
    // SAFETY: writes one handle.
    assert_eq!(unsafe { create(&mut stream, 1) }, 0);
    let fill = |bytes: &[u8; 4096]| {
        // SAFETY: both buffers have 4096 bytes and live until the test has waited for the stream.
        assert_eq!(unsafe { copy(tensor, bytes.as_ptr().cast(), 4096, stream) }, 0);
    };
    // SAFETY: the stand-in keeps the memory of `tensor` at this address.
    let now = || unsafe { ((tensor - (1 << 60)) as *const u8).read() };
    let (first, second) = ([1; 4096], [2; 4096]);
    fill(&first);
    // SAFETY: the stream was made above.
    let before = unsafe { r.gpu.before(stream as u64) }.unwrap();
    fill(&second);
    assert_ne!(now(), 1, "the stand-in copies as late as it may");
    std::thread::spawn(move || before.wait()).join().unwrap().unwrap();
    assert_eq!(now(), 1);
    // SAFETY: as above.
    unsafe { r.gpu.before(stream as u64) }.unwrap().wait().unwrap();
    assert_eq!((now(), number(&r.library, "strake_standin_depth")), (2, 0));

    // A graph that is being recorded stays as it is.
    set(&r.library, 10, 1);
    let mut other = std::ptr::null_mut();
    // SAFETY: writes one handle.
    assert_eq!(unsafe { create(&mut other, 1) }, 0);
    // SAFETY: the stream was just made.
    let e = unsafe { r.gpu.before(other as u64) }.err().unwrap();
    assert!(e.to_string().contains("is recording a graph"), "{e}");
}

#[tokio::test]
async fn bytes_go_there_and_back_and_the_library_counts_the_same() {
    let Some(r) = rig(&[]) else { return };
    let bridge = r.bridge().await;
    let s = bridge.standings();
    assert!(
        matches!(s[Tier::BounceTcp], Standing::Available(_))
            && matches!(s[Tier::Pageable], Standing::Available(_))
    );
    let file = Ram::new(1, pattern(1, 3 * MIB + 99), &r.pool);
    let len = 3 * MIB + 99;
    let tensor = r.gpu.alloc(4 * MIB).unwrap();
    let before = counts(&r.library);
    let report = bridge.load(&[whole(&file, tensor)], BOUNCE).await.unwrap();
    assert!(report.is_all(Tier::BounceTcp) && report.staged > 0 && report.staged < len, "{report}");
    let loaded = counts(&r.library);
    assert_eq!([loaded[0] - before[0], loaded[1] - before[1]], [len, 0]);
    for (policy, pinned) in [(BOUNCE, true), (Policy::Require(Tier::Pageable), false)] {
        let before = counts(&r.library);
        let out = Ram::new(2, Vec::new(), &r.pool);
        let all = [Transfer { file: out.clone(), offset: 0, gpu: tensor, len }];
        bridge.save(&all, policy).await.unwrap();
        assert!(*out.bytes.lock() == *file.bytes.lock());
        let now = counts(&r.library);
        let want = if pinned { [len, 0] } else { [0, len] };
        assert_eq!([now[2] - before[2], now[3] - before[3]], want);
    }
    drop(bridge);
    assert_eq!(number(&r.library, "strake_standin_pins"), 0, "everything is let go");
}

#[tokio::test]
async fn errors_of_the_driver_end_calls_by_their_meaning() {
    let Some(r) = rig(&[]) else { return };
    // Nothing can be registered.
    set(&r.library, 3, 304);
    let bridge = r.bridge().await;
    let notice = bridge.notice().unwrap();
    assert!(
        notice.contains("cuMemHostRegister failed with 304: CUDA_ERROR_OPERATING_SYSTEM"),
        "{notice}"
    );
    assert!(matches!(
        bridge.standings()[Tier::BounceTcp],
        Standing::Unavailable(Unavailable::NotPinned(_))
    ));
    set(&r.library, 3, 0);
    let bridge = r.bridge().await;
    let file = Ram::new(1, pattern(1, 2 * MIB), &r.pool);
    let tensor = r.gpu.alloc(2 * MIB).unwrap();
    let all = [whole(&file, tensor)];
    // A copy fails with an unknown error code.
    set(&r.library, 2, 4711);
    let failed = bridge.load(&all, Policy::Prefer).await.unwrap_err();
    assert!(failed.error.code == Code::Io && failed.error.message.contains("4711"), "{failed}");
    assert_eq!(failed.report.moved(), 0);
    set(&r.library, 2, 0);

    // Memory is freed in the meantime: the driver's error code for this has several meanings.
    let Some(r) = rig(&[]) else { return };
    let bridge = r.bridge().await;
    let tensor = r.gpu.alloc(2 * MIB).unwrap();
    let gpu = r.gpu.clone();
    let hook = move |n| if n == 3 { gpu.free(tensor).map_err(Error::from) } else { Ok(()) };
    let freed = Ram::with(1, pattern(1, 2 * MIB), &r.pool, hook);
    let failed = bridge.load(&[whole(&freed, tensor)], Policy::Prefer).await.unwrap_err();
    assert!(failed.error.code == Code::Inval && failed.report.switches.is_empty(), "{failed}");
    assert!(
        failed.error.message.contains("does not belong to memory of this device's context"),
        "{failed}"
    );

    let Some(r) = rig(&[]) else { return };
    let bridge = r.bridge().await;
    let tensor = r.gpu.alloc(2 * MIB).unwrap();
    set(&r.library, 1, 5);
    let failed = bridge.load(&[whole(&file, tensor)], Policy::Prefer).await.unwrap_err();
    assert!(failed.error.code == Code::NoDev && failed.report.moved() < 2 * MIB, "{failed}");
    assert_eq!(
        bridge.load(&[whole(&file, tensor)], BOUNCE).await.unwrap_err().error.code,
        Code::NoDev
    );
}

#[tokio::test]
async fn two_devices_share_what_is_registered_also_after_the_first_one_is_gone() {
    let Some(r) = rig(&[]) else { return };
    let first = Cuda::open_library(&r.library, 0).unwrap();
    assert_eq!((first.pci(), r.gpu.pci()), (Ok("0000:3b:00.0".into()), Ok("0000:3c:00.0".into())));
    let pool = Pool::new(4 * MIB);
    let open = async |gpu: &Cuda| {
        let options = Options {
            workers: 3,
            slots: 2,
            slot_bytes: 256 << 10,
            pinned_limit: Some(1 << 30),
            ..Options::default()
        };
        Bridge::open(Arc::new(gpu.clone()), Arc::new(pool.clone()), options).await.unwrap()
    };
    let (a, b) = (open(&first).await, open(&r.gpu).await);
    assert_eq!(number(&r.library, "strake_standin_pins"), 13, "six slots each, and the pool once");
    let save = async |bridge: &Bridge, gpu: &Cuda| {
        let (out, tensor) = (Ram::new(2, Vec::new(), &pool), gpu.alloc(MIB).unwrap());
        let before = counts(&r.library);
        let report = bridge
            .save(&[Transfer { file: out, offset: 0, gpu: tensor, len: MIB }], BOUNCE)
            .await
            .unwrap();
        assert!(report.is_all(Tier::BounceTcp) && report.staged == 0, "{report}");
        assert_eq!(counts(&r.library)[2] - before[2], MIB, "the library finds it registered");
    };
    save(&a, &first).await;
    save(&b, &r.gpu).await;
    // The first bridge's context stays while the other bridge uses memory registered in it.
    drop((a, first));
    save(&b, &r.gpu).await;
    assert_eq!(number(&r.library, "strake_standin_pins"), 7);
    drop(b);
    for what in ["strake_standin_pins", "strake_standin_twice", "strake_standin_orphans"] {
        assert_eq!(number(&r.library, what), 0, "{what}");
    }
    let Some(old) = rig(&["-DNO_PCI"]) else { return };
    assert!(old.gpu.pci().unwrap_err().contains("cuDeviceGetPCIBusId failed with 101"));
}

/// A bridge whose parts are verified by the device.
async fn verified(r: &Rig) -> Bridge {
    let options = Options {
        workers: 2,
        slots: 2,
        slot_bytes: 256 << 10,
        pinned_limit: Some(1 << 30),
        verify_on_gpu: true,
        ..Options::default()
    };
    Bridge::open(Arc::new(r.gpu.clone()), Arc::new(r.pool.clone()), options).await.unwrap()
}

#[tokio::test]
async fn what_is_damaged_between_host_and_device_is_found_by_the_devices_sums() {
    let Some(r) = rig(&[]) else { return };
    let len = 2 * MIB + 4097;
    let file = Ram::new(1, pattern(1, len), &r.pool);
    let tensor = r.gpu.alloc(3 * MIB).unwrap();
    // An address that is not aligned to anything.
    let all = [Transfer { file: file.clone(), offset: 0, gpu: tensor + 3, len }];
    let bridge = verified(&r).await;
    for policy in [BOUNCE, Policy::Require(Tier::Pageable)] {
        for report in
            [bridge.load(&all, policy).await.unwrap(), bridge.save(&all, policy).await.unwrap()]
        {
            assert_eq!(
                (report.checksums, report.not_on_gpu.clone()),
                (Checksums::Gpu, None),
                "{report}"
            );
            assert!(
                report.to_string().contains("checksums: gpu") && report.is_all(policy_tier(policy)),
                "{report}"
            );
        }
    }
    for nth in [0, 3, 7] {
        let before = file.bytes.lock().clone();
        set(&r.library, 6, nth);
        let failed = bridge.load(&all, BOUNCE).await.unwrap_err();
        assert!(
            failed.error.code == Code::Corrupt && failed.error.message.contains("CRC32Cs differ"),
            "{failed}"
        );
        assert!(
            failed.report.moved() < len && failed.report.switches.is_empty(),
            "{}",
            failed.report
        );
        // Bytes that were damaged on the way from the device are not written.
        bridge.load(&all, BOUNCE).await.unwrap();
        set(&r.library, 6, nth);
        let failed = bridge.save(&all, BOUNCE).await.unwrap_err();
        assert_eq!(failed.error.code, Code::Corrupt, "{failed}");
        assert!(*file.bytes.lock() == before);
    }
    drop(bridge);
    assert_eq!(number(&r.library, "strake_standin_pins"), 0, "everything is let go");

    // Without device checksums the damage is not found, and the report says that only the host
    // verified.
    let bridge = r.bridge().await;
    set(&r.library, 6, 3);
    let report = bridge.load(&all, BOUNCE).await.unwrap();
    assert_eq!(report.checksums, Checksums::Host);
    assert!(
        report.to_string().contains("not verified on the GPU: it was not requested"),
        "{report}"
    );
    drop((bridge, r.gpu));
    assert_eq!(number(&r.library, "strake_standin_modules"), 0);
}

fn policy_tier(p: Policy) -> Tier {
    match p {
        Policy::Require(t) => t,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn a_kernel_that_cannot_be_had_or_is_wrong_is_not_used_and_the_report_says_so() {
    for (what, n, words) in
        [(7, 218, "does not accept the checksum kernel"), (8, 1, "does not work on this device")]
    {
        let Some(r) = rig(&[]) else { return };
        set(&r.library, what, n);
        let bridge = verified(&r).await;
        let file = Ram::new(1, pattern(1, MIB), &r.pool);
        let tensor = r.gpu.alloc(MIB).unwrap();
        let report = bridge.load(&[whole(&file, tensor)], BOUNCE).await.unwrap();
        assert!(report.is_all(Tier::BounceTcp) && report.checksums == Checksums::Host, "{report}");
        assert!(
            report.to_string().contains("not verified on the GPU: ")
                && report.to_string().contains(words),
            "{report}"
        );
        drop((bridge, r.gpu));
        assert_eq!(number(&r.library, "strake_standin_modules"), 0);
    }
}

#[tokio::test]
async fn a_device_without_memory_for_sums_keeps_its_tiers_and_the_report_says_so() {
    let Some(r) = rig(&[]) else { return };
    let bridge = verified(&r).await;
    let file = Ram::new(1, pattern(1, MIB), &r.pool);
    let tensor = r.gpu.alloc(MIB).unwrap();
    set(&r.library, 11, 1);
    let report = bridge.load(&[whole(&file, tensor)], BOUNCE).await.unwrap();
    assert!(report.is_all(Tier::BounceTcp) && report.checksums == Checksums::Host, "{report}");
    assert!(report.not_on_gpu.as_ref().unwrap().contains("no memory for 131072 bytes"), "{report}");
    assert!(matches!(bridge.standings()[Tier::BounceTcp], Standing::Available(_)));
    set(&r.library, 11, 0);
    assert_eq!(
        bridge.load(&[whole(&file, tensor)], BOUNCE).await.unwrap().checksums,
        Checksums::Gpu
    );
}
