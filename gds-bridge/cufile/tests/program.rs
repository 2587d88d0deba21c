//! A program that uses cuFile, compiled here, on a real mount. The CUDA driver is a stand-in;
//! NVIDIA's library is a stand-in or missing.

#[path = "../../../fuse/tests/it/common/mod.rs"]
mod common;
mod mounted;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use mounted::{Mounted, cc, library};

macro_rules! tries {
    ($($test:ident: $what:literal;)*) => {
        $(#[test]
        fn $test() {
            let Some(m) = Mounted::new() else { return };
            m.ok(m.program(&[$what]));
        })*
    };
}

tries! {
    files_are_read_and_written_and_the_mount_sees_the_same: "io";
    a_file_that_is_cut_meanwhile_is_read_as_far_as_it_goes: "cut";
    what_cannot_be_has_its_code: "errors";
    a_context_that_is_destroyed_ends_calls: "gone";
    calls_in_a_stream_come_in_its_order: "streams";
    calls_in_a_stream_store_bytes_or_what_went_wrong: "told-in-streams";
    a_context_that_is_destroyed_under_a_call_in_a_stream_is_told_where_bytes_are: "gone-in-stream";
    batches_end_entry_by_entry: "batches";
    a_child_has_nothing_of_it: "forks";
    a_child_may_be_the_first_to_open_it: "early-fork";
}

#[test]
fn statistics_say_what_was_done() {
    let Some(m) = Mounted::new() else { return };
    m.ok(m.program(&["statistics"]));
    let stats: serde_json::Value = serde_json::from_str(&m.left("stats")).unwrap();
    let (read, write) = (&stats["read"], &stats["write"]);
    assert_eq!(
        (read["calls"].as_u64(), read["failed"].as_u64(), read["bytes"].as_u64()),
        (Some(2), Some(1), Some(12288))
    );
    assert_eq!((write["calls"].as_u64(), write["bytes"].as_u64()), (Some(1), Some(8192)));
    let sum = |v: &serde_json::Value| {
        v.as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum::<u64>()
    };
    for (way, bytes) in [(read, 12288), (write, 8192)] {
        assert_eq!(sum(&way["by_tier"]), bytes, "{stats}");
        assert_eq!((sum(&way["by_transport"]), sum(&way["checksums"])), (bytes, bytes), "{stats}");
        assert_eq!(
            (way["by_tier"]["gpu-rdma"].as_u64(), way["by_tier"]["local-gds"].as_u64()),
            (Some(0), Some(0))
        );
        assert!(
            way["unavailable"]["gpu-rdma"].as_str().is_some_and(|why| !why.is_empty()),
            "{stats}"
        );
    }
    assert_eq!(stats["passed_on"].as_object().map(|o| o.len()), Some(0));
}

#[test]
fn statistics_tell_both_tiers_of_a_call_that_changed_between_them() {
    let Some(m) = Mounted::new() else { return };
    // The load reads a file that the program saved before; the save is its second save of the file.
    for (what, way, before) in [("load", "read", 0), ("save", "write", 8 << 20)] {
        let out = m.ok(m.program(&["switched", what]));
        let said = String::from_utf8_lossy(&out.stdout);
        if said.contains("skipped") {
            return println!("{said}");
        }
        let stats: serde_json::Value = serde_json::from_str(&m.left("stats")).unwrap();
        let of = &stats[way];
        let (bounced, pageable) = (&of["by_tier"]["bounce-tcp"], &of["by_tier"]["pageable"]);
        let (bounced, pageable) = (bounced.as_u64().unwrap(), pageable.as_u64().unwrap());
        assert!(
            bounced > before && pageable > 0 && bounced + pageable == before + (8 << 20),
            "{stats}"
        );
        assert_eq!(of["bytes"].as_u64(), Some(before + (8 << 20)), "{stats}");
        assert_eq!((of["switches"].as_u64(), of["failed"].as_u64()), (Some(1), Some(0)), "{stats}");
    }
}

#[test]
fn statistics_of_an_older_version_fit_its_structs() {
    let Some(m) = Mounted::new() else { return };
    let mut c = m.program(&["old-statistics"]);
    c.env("STRAKE_CUFILE_VERSION", "1150");
    m.ok(c);
}

#[test]
fn files_of_other_file_systems_are_the_real_librarys() {
    let Some(m) = Mounted::new() else { return };
    m.ok(m.with_recorder(&["foreign"]));
    let record = m.left("record");
    let want = [
        "set size 9 8",
        "set bool 1 0",
        "driver open",
        "handle register fd=-7",
        "buf register 1048576 0",
        "handle register fd=",
        "read 1 1 100 5 6",
        "write 1 1 100 7 8",
        "read async 1 9",
        "batch setup 8",
        "batch submit 1 2 0 1",
        "batch status 0",
        "batch destroy 1",
        "handle deregister 1",
        "buf deregister",
        "driver close",
        "end 5001",
    ];
    let lines: Vec<&str> = record.lines().collect();
    assert_eq!(lines.len(), want.len(), "{record}");
    for (line, want) in lines.iter().zip(want) {
        assert!(line.starts_with(want), "'{line}' is not '{want}':\n{record}");
    }
    let stats: serde_json::Value = serde_json::from_str(&m.left("stats")).unwrap();
    let passed = &stats["passed_on"];
    assert_eq!(
        (passed["handles"].as_u64(), passed["reads"].as_u64(), passed["writes"].as_u64()),
        (Some(1), Some(2), Some(2))
    );
    assert_eq!(stats["read"]["bytes"].as_u64(), Some(1000), "the batch's own entry");
}

/// Error codes that versions up to 1.15 return from failed calls never count as bytes, however many
/// bytes were requested.
#[test]
fn what_the_real_library_says_of_failures_never_looks_like_bytes() {
    let Some(m) = Mounted::new() else { return };
    for (says, want, errno, len, size, version) in [
        ("5006", "-5006", "0", "100", "0", "1200"),
        ("5027", "-5027", "0", "100", "0", "1140"),
        ("101", "-5030", "0", "100", "0", "1200"),
        ("-1", "-1", "6", "100", "0", "1200"),
        // Versions from 1.16 on put the code into errno.
        ("-1", "-1", "5008", "100", "0", "1160"),
        ("-1", "-1", "5024", "100", "0", "1160"),
        ("-5011", "-5011", "0", "100", "0", "1200"),
        ("100", "100", "0", "100", "0", "1140"),
        ("5006", "-5006", "0", "1048576", "1048576", "1140"),
        ("5006", "-5006", "0", "1048576", "5015", "1200"),
        ("5006", "5006", "0", "1048576", "5016", "1140"),
        ("5100", "5100", "0", "1048576", "1048576", "1140"),
        ("5006", "-5006", "0", "5006", "1048576", "1150"),
        ("5006", "5006", "0", "5006", "1048576", "1160"),
    ] {
        let mut c = m.with_recorder(&["one-foreign", want, errno, len, size]);
        c.env("SAYS", says).env("VERSION", version).env("ERRNO", errno);
        m.ok(c);
    }
    let record = m.left("record");
    // The programs closed nothing. At the exit of the process the real library is not called,
    // because its own exit may be over.
    assert!(
        record.contains("end 5001") && !record.contains("close") && !record.contains("deregister"),
        "{record}"
    );
}

/// Version 1.15 refuses to register files on FUSE with 5027. Error codes of calls with the real
/// library's handles are passed on unchanged.
#[test]
fn what_the_real_library_refuses_has_its_own_code() {
    let Some(m) = Mounted::new() else { return };
    for code in ["5027", "5008", "5011", "5099"] {
        let mut c = m.with_recorder(&["refused", "0", code]);
        c.env("REFUSES_FILES", code);
        m.ok(c);
        assert_eq!(
            m.taken("record").matches("handle register fd=").count(),
            2,
            "its driver's own, and the program's"
        );
        let mut c = m.with_recorder(&["passed-on", code]);
        c.env("REFUSES", code);
        m.ok(c);
        let record = m.taken("record");
        let calls = ["read 1", "write 1", "readv 1", "read async 1", "batch submit 1"];
        // The real library was called exactly once per call: no answer was made up here, and
        // nothing was retried.
        let asked = calls.map(|call| record.lines().filter(|line| line.starts_with(call)).count());
        assert_eq!(asked, [1; 5], "{record}");
    }
}

#[test]
fn memory_is_registered_beside_the_real_librarys_opening() {
    let Some(m) = Mounted::new() else { return };
    let mut c = m.with_recorder(&["beside"]);
    // Milliseconds that opening takes, so that the registration runs during it.
    c.env("SLOW", "500");
    m.ok(c);
    assert!(m.left("record").matches("buf register").count() >= 1);
}

#[test]
fn a_real_library_that_hangs_holds_nobody_who_does_not_need_it() {
    let Some(m) = Mounted::new() else { return };
    let mut c = m.with_recorder(&["hangs"]);
    c.env("HANGS", "1");
    m.ok(c);
    // The driver open was called once and hung; nothing came after it.
    let record = m.left("record");
    assert!(record.starts_with("driver open\n") && !record.contains("register"), "{record}");
}

#[test]
fn what_ended_is_told_when_the_real_library_does_not_tell() {
    let Some(m) = Mounted::new() else { return };
    let mut c = m.with_recorder(&["half"]);
    c.env("NO_STATUS", "1");
    m.ok(c);
}

/// A program with more rights than the user who started it takes no key, library or output file
/// from the environment.
#[test]
fn privileged_programs_take_nothing_from_the_environment() {
    let Some(m) = Mounted::new() else { return };
    if Path::new("/etc/strake/client.key").exists() {
        println!("skipped: this machine has a client key in its usual place");
        return;
    }
    let mut c = m.with_recorder(&["refused", "5025", "5008"]);
    c.env("SECURE", "1");
    m.ok(c);
    for name in ["log", "stats", "record"] {
        assert_eq!(m.left(name), "", "{name}");
    }
}

#[test]
fn without_a_real_library_other_files_are_not_supported_and_ours_are() {
    let Some(m) = Mounted::new() else { return };
    m.ok(m.program(&["refused", "0", "5008"]));
    // The real library would hang here, so it is not even opened.
    if !Path::new("/proc/modules").exists() {
        let mut c = m.program(&["refused", "0", "5008"]);
        c.env("STRAKE_CUFILE_REAL", m.dir.path().join("recorder.so"));
        m.ok(c);
        assert!(m.left("log").contains("/proc/modules"), "{}", m.left("log"));
    } else {
        println!("skipped: this kernel has modules");
    }
    assert_eq!(m.left("record"), "");
    // This library itself is not opened as the real one either, under whatever name it is found.
    let mut c = m.with_recorder(&["refused", "0", "5008"]);
    c.env("STRAKE_CUFILE_REAL", library());
    m.ok(c);
    let mut c = m.with_recorder(&["refused", "0", "5008"]);
    c.env("STRAKE_CUFILE_REAL", "libcufile.so.0");
    m.ok(c);
    assert!(
        m.left("log").contains("is StrakeFS's own library of that interface"),
        "{}",
        m.left("log")
    );
    // The real library's result for a file is passed on.
    let mut c = m.with_recorder(&["refused", "0", "0"]);
    m.ok(c);
    c = m.with_recorder(&["refused", "0", "5030"]);
    c.env("SAYS", "5008");
    m.ok(c);
}

/// As in NVIDIA's wheel: there is no `libcufile.so`, and no setting names the library. The first
/// `libcufile.so.0` in the search path is this library.
#[test]
fn the_real_library_is_found_by_the_name_that_the_wheel_gives_it() {
    let Some(m) = Mounted::new() else { return };
    let there = m.dir.path().join("wheel");
    std::fs::create_dir(&there).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorder.c");
    cc(&["-shared", "-fPIC", "-Wl,-soname,libcufile.so.0"], &there.join("libcufile.so.0"), &source);
    let mut c = m.with_recorder(&["refused", "0", "0"]);
    c.env_remove("STRAKE_CUFILE_REAL")
        .env("LD_LIBRARY_PATH", std::env::join_paths([m.dir.path(), &there]).unwrap());
    m.ok(c);
    assert_eq!(
        m.left("record").matches("handle register fd=").count(),
        2,
        "its driver's own, and the program's"
    );
}

#[test]
fn a_mount_that_lies_is_not_believed() {
    let Some(m) = Mounted::new() else { return };
    let table = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    std::fs::write(m.dir.path().join("stranger"), table().replace("user_id=0", "user_id=12345"))
        .unwrap();
    std::fs::write(m.dir.path().join("nothing"), "").unwrap();
    let refused = |here: &str, set: &[(&str, &str)]| {
        let mut c = m.with_recorder(&["refused", here, "0"]);
        c.envs(set.iter().copied());
        m.ok(c);
    };
    refused("0", &[]);
    refused("5025", &[("FORGE", "ino")]);
    refused("5008", &[("FORGE", "uuid")]);
    refused("5004", &[("FORGE", "version")]);
    // A mount of our type that gives no valid answer, or not now: its files never bypass the
    // bridge.
    refused("5004", &[("FORGE", "garbage")]);
    refused("5004", &[("FORGE", "25")]);
    refused("5030", &[("FORGE", "5")]);
    refused("5030", &[("FORGE", "110")]);
    refused("0", &[("FORGE", "4"), ("ONCE", "1")]);
    let elsewhere = m.left("record").matches("handle register fd=").count();
    assert_eq!(elsewhere, 9 * 2, "one elsewhere each time, and that of the driver's own");
    // A mount of another type that uses the same ioctl number: its files go to the real library.
    std::fs::write(m.dir.path().join("another"), table().replace("fuse.strake", "fuse.other"))
        .unwrap();
    let another = m.dir.path().join("another").to_str().unwrap().to_string();
    refused("0", &[("FORGE", "garbage"), ("MOUNTINFO", &another)]);
    refused("0", &[("FORGE", "25"), ("MOUNTINFO", &another)]);
    assert_eq!(m.left("record").matches("handle register fd=").count(), elsewhere + 2 * 3);
    let path = |name: &str| m.dir.path().join(name).to_str().unwrap().to_string();
    refused("5025", &[("MOUNTINFO", &path("stranger"))]);
    refused("5025", &[("MOUNTINFO", &path("nothing"))]);
    assert!(m.left("log").contains("made by user 12345"), "{}", m.left("log"));
}

#[test]
fn connections_that_cannot_be_say_why() {
    let Some(m) = Mounted::new() else { return };
    for (name, value, code, word) in [
        ("STRAKE_GDS_KEY", "/nowhere/key", "5025", "/nowhere/key"),
        ("STRAKE_GDS_POLICY", "fastest", "5022", "`fastest` is not a policy"),
        (
            "STRAKE_GDS_POLICY",
            "/elsewhere=prefer",
            "5022",
            "no StrakeFS is mounted at `/elsewhere`",
        ),
        ("STRAKE_GDS_FABRIC", "ether", "5022", "'ether'"),
        ("STRAKE_GDS_MDS", "a b", "5022", "a b"),
    ] {
        let mut c = m.program(&["refused", code, "5008"]);
        c.env(name, value);
        m.ok(c);
        assert!(m.left("log").contains(word), "{name}: {}", m.left("log"));
    }
}

#[test]
fn a_policy_that_cannot_be_met_fails_the_call() {
    let Some(m) = Mounted::new() else { return };
    // A policy for all mounts, and one for this mount.
    for policy in
        ["require:gpu-rdma".into(), format!("prefer,{}=at-least:gpu-rdma", m.at.path().display())]
    {
        let mut c = m.program(&["policy"]);
        c.env("STRAKE_GDS_POLICY", policy);
        m.ok(c);
        assert!(m.left("log").contains("gpu-rdma"), "{}", m.left("log"));
        let stats: serde_json::Value = serde_json::from_str(&m.left("stats")).unwrap();
        assert_eq!(
            (stats["write"]["failed"].as_u64(), stats["write"]["host_memory"].as_u64()),
            (Some(1), Some(100))
        );
    }
}

#[test]
fn files_are_opened_for_the_programs_user() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become somebody else");
        return;
    }
    let Some(m) = Mounted::new() else { return };
    m.ok(m.program(&["permission"]));
}

/// Runs with NVIDIA's library, which `STRAKE_CUFILE_REAL` names. Its results are printed; only
/// impossible ones fail the test.
#[test]
fn the_real_library_gets_its_files() {
    let Some(real) = std::env::var_os("STRAKE_CUFILE_REAL") else {
        println!("skipped: STRAKE_CUFILE_REAL names no real libcufile");
        return;
    };
    let Some(m) = Mounted::new() else { return };
    let mut c = m.with_recorder(&["real"]);
    c.env("STRAKE_CUFILE_REAL", real);
    let out = m.ok(c);
    println!("{}\n{}", String::from_utf8_lossy(&out.stdout), m.left("log"));
}

/// Runs the shell command in `STRAKE_CUFILE_TRY`. It gets `MOUNT`, and finds this library first,
/// with the stand-in of the driver in `STANDIN`. For PyTorch and KvikIO: docs/gds.md, "Unmodified
/// programs".
#[test]
fn a_command_that_is_named_by_who_runs_the_tests() {
    let Ok(command) = std::env::var("STRAKE_CUFILE_TRY") else {
        println!("skipped: STRAKE_CUFILE_TRY names no command");
        return;
    };
    let Some(m) = Mounted::new() else { return };
    let mut c = m.shell(&command);
    c.env("STRAKE_GDS_LOG", m.dir.path().join("log"))
        .env("STRAKE_GDS_STATS", m.dir.path().join("stats"));
    let out = m.ok(c);
    println!("{}\n{}\n{}", String::from_utf8_lossy(&out.stdout), m.left("log"), m.left("stats"));
}

/// Runs the commands of the page, with other folders in them.
#[test]
fn a_program_in_python_is_served_as_the_page_says() {
    let Some(m) = Mounted::new() else { return };
    let (dir, here) = (m.dir.path(), Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/train.py"));
    let page = include_str!("../../../docs/gds.md").split_once("## Unmodified programs").unwrap().1;
    let lines = page.split_once("```sh\n").unwrap().1.split_once("```").unwrap().0;
    assert!(lines.contains("STRAKE_GDS_POLICY=at-least:bounce-tcp python3 train.py"), "{lines}");
    // Use `pageable`: under a small limit of locked memory nothing can be pinned.
    let lines = lines
        .replace("/opt/strake", dir.join("opt").to_str().unwrap())
        .replace(":bounce-tcp", ":pageable");
    let script = format!("set -e\n{lines}").replace("cufile STRAKE", "cufile:$STANDIN STRAKE");
    let python = Command::new("python3").arg("--version").output();
    if !python.is_ok_and(|p| p.status.success()) {
        println!("skipped: there is no python3");
        return;
    }
    std::fs::copy(here, dir.join("train.py")).unwrap();
    std::fs::copy(library(), dir.join("libstrake_cufile.so")).unwrap();
    // The library must be found only where the page puts it.
    std::fs::remove_file(dir.join("libcufile.so.0")).unwrap();
    // Then the alternative in the page's last line.
    let opt = dir.join("opt");
    let preload = format!(
        "LD_LIBRARY_PATH=$STANDIN LD_PRELOAD={}/cufile/libcufile.so.0 STRAKE_GDS_POLICY=at-least:pageable python3 train.py",
        opt.display()
    );
    for script in [script, preload] {
        let mut c = m.shell(&script);
        c.env_remove("LD_PRELOAD")
            .env("STRAKE_GDS_LOG", dir.join("log"))
            .env("STRAKE_GDS_STATS", dir.join("stats"));
        m.ok(c);
        let stats: serde_json::Value = serde_json::from_str(&m.left("stats")).unwrap();
        std::fs::remove_file(dir.join("stats")).unwrap();
        for way in ["read", "write"] {
            let bytes = stats[way]["by_tier"]
                .as_object()
                .unwrap()
                .values()
                .map(|n| n.as_u64().unwrap())
                .sum::<u64>();
            assert_eq!((bytes, stats[way]["failed"].as_u64()), (1_000_003, Some(0)), "{stats}");
        }
    }
}

/// Names that programs look up: KvikIO (26.10), `torch.cuda.gds` (2.9), and the rest of the
/// interface's 1.20.
const NAMES: &str = "
    HandleRegister HandleDeregister Read Write BufRegister BufDeregister DriverOpen DriverClose DriverClose_v2 DriverGetProperties
    DriverSetPollMode DriverSetMaxCacheSize DriverSetMaxPinnedMemSize DriverSetMaxDirectIOSize GetVersion UseCount
    BatchIOSetUp BatchIOSubmit BatchIOGetStatus BatchIOCancel BatchIODestroy ReadAsync WriteAsync StreamRegister StreamDeregister
    Readv Writev SetStatsLevel GetStatsLevel StatsStart StatsStop StatsReset GetStatsL1 GetStatsL2 GetStatsL3
    GetParameterSizeT GetParameterBool GetParameterString SetParameterSizeT SetParameterBool SetParameterString
    GetParameterMinMaxValue GetParameterPosixPoolSlabArray SetParameterPosixPoolSlabArray GetParameterGpuBounceBufferSlabArray
    SetParameterGpuBounceBufferSlabArray GetBARSizeInKB ExportPCIeTopology DriverGetP2PFlags DriverSetP2PFlags";

#[test]
fn every_name_that_programs_ask_for_is_there() {
    let lib = std::ffi::CString::new(library().to_str().unwrap()).unwrap();
    // SAFETY: opens the library that was built with this test, and looks names up.
    unsafe {
        let handle = libc::dlopen(lib.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        assert!(!handle.is_null());
        for name in NAMES.split_whitespace() {
            let symbol = std::ffi::CString::new(format!("cuFile{name}")).unwrap();
            assert!(!libc::dlsym(handle, symbol.as_ptr()).is_null(), "{symbol:?}");
        }
    }
}

/// Checks against NVIDIA's header, if there is one: the structs have the sizes that a compiler
/// gives them, and every function has the declared type.
#[test]
fn structs_are_those_of_the_header() {
    let Some(header) = std::env::var_os("STRAKE_CUFILE_HEADER").map(PathBuf::from) else {
        println!("skipped: STRAKE_CUFILE_HEADER names no cufile.h of version 1.20");
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    // The driver's header is not part of it; these are the names it needs from there.
    std::fs::write(dir.path().join("cuda.h"), "typedef int CUresult;\ntypedef void *CUstream;\n")
        .unwrap();
    let source = dir.path().join("layout.c");
    let header = std::fs::canonicalize(header).unwrap();
    let text = format!(
        "#include <stdint.h>\n#include <stddef.h>\n#include \"{}\"\n{LAYOUT}",
        header.display()
    );
    std::fs::write(&source, text).unwrap();
    let include = format!("-I{}", dir.path().display());
    if cc(&["-D_GNU_SOURCE", "-w", "-c", &include], &dir.path().join("layout.o"), &source) {
        println!("{} fits", header.display());
    }
}

const LAYOUT: &str = r#"
#define SIZE(type, n) _Static_assert(sizeof(type) == n, #type)
#define AT(type, field, n) _Static_assert(offsetof(type, field) == n, #type)
SIZE(CUfileError_t, 8); SIZE(CUfileDescr_t, 24); AT(CUfileDescr_t, handle, 8); SIZE(CUfileDrvProps_t, 56);
AT(CUfileDrvProps_t, nvfs.dcontrolflags, 28); AT(CUfileDrvProps_t, fflags, 32); AT(CUfileDrvProps_t, max_batch_io_size, 48);
SIZE(CUfileIOParams_t, 64); AT(CUfileIOParams_t, u.batch.file_offset, 16); AT(CUfileIOParams_t, u.batch.devPtr_offset, 24);
AT(CUfileIOParams_t, u.batch.size, 32); AT(CUfileIOParams_t, fh, 40); AT(CUfileIOParams_t, opcode, 48); AT(CUfileIOParams_t, cookie, 56);
SIZE(CUfileIOEvents_t, 24); AT(CUfileIOEvents_t, status, 8); AT(CUfileIOEvents_t, ret, 16); SIZE(CUfileIOVec_t, 16);
SIZE(CUfileStatsLevel1_t, 624); AT(CUfileStatsLevel1_t, read_lat_sum_us, 160); AT(CUfileStatsLevel1_t, batch_submit_ops, 176);
AT(CUfileStatsLevel1_t, batch_read_bytes, 416); AT(CUfileStatsLevel1_t, readv_ops, 512); SIZE(CUfileStatsLevel2_t, 1136);
SIZE(CUfilePerGpuStats_t, 248); AT(CUfilePerGpuStats_t, n_posix_reads, 72); AT(CUfilePerGpuStats_t, writes_bytes, 120);
AT(CUfilePerGpuStats_t, n_nvfs_writes, 168); AT(CUfilePerGpuStats_t, n_mmap, 208); SIZE(CUfileStatsLevel3_t, 5112);
AT(CUfileStatsLevel3_t, num_gpus, 1136); AT(CUfileStatsLevel3_t, per_gpu_stats, 1144);
_Static_assert(CU_FILE_DRIVER_NOT_INITIALIZED == 5001 && CU_FILE_DRIVER_VERSION_MISMATCH == 5004 && CU_FILE_DRIVER_CLOSING == 5006, "");
_Static_assert(CU_FILE_PLATFORM_NOT_SUPPORTED == 5007 && CU_FILE_IO_NOT_SUPPORTED == 5008 && CU_FILE_CUDA_DRIVER_ERROR == 5011, "");
_Static_assert(CU_FILE_CUDA_POINTER_INVALID == 5012 && CU_FILE_CUDA_POINTER_RANGE_ERROR == 5014 && CU_FILE_INVALID_FILE_TYPE == 5018, "");
_Static_assert(CU_FILE_INVALID_FILE_OPEN_FLAG == 5019 && CU_FILE_INVALID_VALUE == 5022 && CU_FILE_MEMORY_ALREADY_REGISTERED == 5023, "");
_Static_assert(CU_FILE_PERMISSION_DENIED == 5025 && CU_FILE_DRIVER_ALREADY_OPEN == 5026 && CU_FILE_HANDLE_NOT_REGISTERED == 5027, "");
_Static_assert(CU_FILE_HANDLE_ALREADY_REGISTERED == 5028 && CU_FILE_DEVICE_NOT_FOUND == 5029 && CU_FILE_INTERNAL_ERROR == 5030, "");
_Static_assert(CU_FILE_BATCH_FULL == 5037 && CU_FILE_ASYNC_NOT_SUPPORTED == 5038, "");
_Static_assert(CUFILE_PARAM_PROPERTIES_IO_BATCHSIZE == 9 && CUFILE_PARAM_PROPERTIES_BATCH_IO_TIMEOUT_MS == 11, "");
_Static_assert(CUFILE_PARAM_PROPERTIES_ALLOW_COMPAT_MODE == 1 && CUFILE_PARAM_GDS_FALLBACK_IO == 13 && CUFILE_PARAM_RDMA_TRANSPORT == 3, "");
_Static_assert(CUFILE_CANCELED == 8 && CUFILE_COMPLETE == 16 && CUFILE_FAILED == 64 && CUFILE_WRITE == 1 && CUFILE_BATCH == 1, "");
"#;
