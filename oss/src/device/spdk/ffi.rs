//! SPDK's and DPDK's functions, with our own declarations, from the libraries of the machine. The
//! prototypes are the same in every release of SPDK from v22.01 to v26.05. The only structure known
//! here is [`Completion`], which NVMe fixes.

use std::{
    error::Error as _,
    ffi::{CStr, c_char, c_int, c_void},
};

use libloading::os::unix;
use strake_proto::{Code, Error, Result};

/// `struct spdk_nvme_cpl`: a completion queue entry (NVMe Base 2.0, 3.3.3.2).
#[repr(C)]
pub(super) struct Completion {
    dw0: u32,
    dw1: u32,
    head: u16,
    queue: u16,
    command: u16,
    /// The lowest bit is the phase.
    pub status: u16,
}

const _: () = assert!(size_of::<Completion>() == 16);

pub(super) type Done = extern "C" fn(*mut c_void, *const Completion);

/// In the order in which they must be opened. Their symbols are global, because SPDK's libraries
/// are linked against fewer than they use.
const LIBRARIES: &[(&str, bool)] = &[
    ("libcrypto.so.3", false),
    ("libssl.so.3", false),
    ("librte_eal.so", true),
    ("librte_pci.so", true),
    ("librte_bus_pci.so", true),
    ("librte_mempool.so", true),
    ("librte_mempool_ring.so", true),
    ("librte_ring.so", true),
    ("librte_power.so", false),
    ("libspdk_env_dpdk.so", true),
    ("libspdk_sock_posix.so", true),
    ("libspdk_nvme.so", true),
];

macro_rules! functions {
    ($($name:ident: fn($($arg:ty),*) $(-> $out:ty)?;)*) => {
        /// The functions, as long as this process lives.
        pub(super) struct Api { $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $out)?,)* }

        impl Api {
            fn find() -> Result<Api> {
                Ok(Api { $($name: {
                    // SAFETY: the function of that name has this prototype in every release of SPDK
                    // and DPDK from v22.01 on.
                    unsafe { symbol::<unsafe extern "C" fn($($arg),*) $(-> $out)?>(stringify!($name)) }?
                },)* })
            }
        }
    };
}

functions! {
    rte_eal_init: fn(c_int, *mut *mut c_char) -> c_int;
    rte_version: fn() -> *const c_char;
    rte_eal_iova_mode: fn() -> c_int;
    spdk_env_dpdk_post_init: fn(bool) -> c_int;
    spdk_iommu_is_enabled: fn() -> bool;
    spdk_dma_zmalloc: fn(usize, usize, *mut u64) -> *mut c_void;
    spdk_dma_free: fn(*mut c_void);
    spdk_mem_register: fn(*mut c_void, usize) -> c_int;
    spdk_nvme_transport_id_parse: fn(*mut c_void, *const c_char) -> c_int;
    spdk_nvme_connect: fn(*const c_void, *const c_void, usize) -> *mut c_void;
    spdk_nvme_detach: fn(*mut c_void) -> c_int;
    spdk_nvme_ctrlr_fail: fn(*mut c_void);
    spdk_nvme_ctrlr_disconnect: fn(*mut c_void) -> c_int;
    spdk_nvme_ctrlr_reconnect_async: fn(*mut c_void);
    spdk_nvme_ctrlr_reconnect_poll_async: fn(*mut c_void) -> c_int;
    spdk_nvme_ctrlr_get_data: fn(*mut c_void) -> *const u8;
    // A union of one 32-bit word, which is returned like the word itself.
    spdk_nvme_ctrlr_get_regs_csts: fn(*mut c_void) -> u32;
    spdk_nvme_ctrlr_get_ns: fn(*mut c_void, u32) -> *mut c_void;
    spdk_nvme_ctrlr_process_admin_completions: fn(*mut c_void) -> i32;
    spdk_nvme_ctrlr_alloc_io_qpair: fn(*mut c_void, *const c_void, usize) -> *mut c_void;
    spdk_nvme_ctrlr_free_io_qpair: fn(*mut c_void) -> c_int;
    spdk_nvme_ns_is_active: fn(*mut c_void) -> bool;
    spdk_nvme_ns_get_sector_size: fn(*mut c_void) -> u32;
    spdk_nvme_ns_get_md_size: fn(*mut c_void) -> u32;
    spdk_nvme_ns_get_num_sectors: fn(*mut c_void) -> u64;
    spdk_nvme_ns_get_max_io_xfer_size: fn(*mut c_void) -> u32;
    spdk_nvme_ns_cmd_read: fn(*mut c_void, *mut c_void, *mut c_void, u64, u32, Done, *mut c_void, u32) -> c_int;
    spdk_nvme_ns_cmd_write: fn(*mut c_void, *mut c_void, *mut c_void, u64, u32, Done, *mut c_void, u32) -> c_int;
    spdk_nvme_ns_cmd_flush: fn(*mut c_void, *mut c_void, Done, *mut c_void) -> c_int;
    spdk_nvme_qpair_process_completions: fn(*mut c_void, u32) -> i32;
}

const INSTALL: &str = "build SPDK (v22.01 or later) with its own DPDK and --with-shared, install both and run ldconfig, \
                       or name their folders in LD_LIBRARY_PATH";

/// Opens the libraries for good, because DPDK's threads run their code as long as the process
/// lives. `NoEnt` with a message that says what to install.
pub(super) fn load() -> Result<Api> {
    open_all(LIBRARIES)?;
    // SAFETY: the function of that name has this prototype in every release of DPDK.
    let version = unsafe { symbol::<unsafe extern "C" fn() -> *const c_char>("rte_version") }?;
    // SAFETY: it may be called before all others, and returns a constant string.
    let version = unsafe { CStr::from_ptr(version()) }.to_string_lossy();
    if is_too_old(&version) {
        let m = format!("the SPDK of this machine is too old: it comes with {version}; {INSTALL}");
        return Err(Error::new(Code::OpNotSupp, m));
    }
    Api::find()
}

/// Whether this is the DPDK (as in `DPDK 21.11.0`) of an SPDK before v22.01, whose functions may
/// have other prototypes. SPDK's own libraries do not report their version.
fn is_too_old(dpdk: &str) -> bool {
    let mut numbers =
        dpdk.trim_start_matches(|c: char| !c.is_ascii_digit()).split('.').map(str::parse::<u32>);
    let (Some(Ok(year)), Some(Ok(month))) = (numbers.next(), numbers.next()) else { return false };
    (year, month) < (21, 11)
}

fn open_all(libraries: &[(&str, bool)]) -> Result<()> {
    for (name, needed) in libraries {
        // SAFETY: constructors of these libraries only register transports and drivers.
        match unsafe { unix::Library::open(Some(*name), unix::RTLD_LAZY | unix::RTLD_GLOBAL) } {
            // It is never closed.
            Ok(library) => std::mem::forget(library),
            Err(e) if *needed => {
                let why = e.source().map_or(e.to_string(), ToString::to_string);
                let m = format!("SPDK is not installed ({why}); {INSTALL}");
                return Err(Error::new(Code::NoEnt, m));
            }
            Err(_) => {}
        }
    }
    Ok(())
}

/// A function by its name.
///
/// # Safety
/// `F` is the type of a function pointer, and that of the function of this name.
unsafe fn symbol<F: Copy>(name: &str) -> Result<F> {
    // SAFETY: the caller's promise. A pointer to a function is never null, so `None` is.
    let found = unsafe { unix::Library::this().get::<Option<F>>(name) }.ok().and_then(|s| *s);
    found.ok_or_else(|| {
        let m = format!("the SPDK of this machine has no {name}; {INSTALL}");
        Error::new(Code::OpNotSupp, m)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_said_in_one_sentence() {
        let e = open_all(&[("libstrake_no_such.so", false), ("libstrake_nor_such.so", true)])
            .unwrap_err();
        assert_eq!(e.code, Code::NoEnt);
        assert!(
            e.message.contains("libstrake_nor_such.so") && e.message.contains("build SPDK"),
            "{e}"
        );
        // SAFETY: only looked up.
        let of = |name: &str| unsafe { symbol::<unsafe extern "C" fn()>(name) };
        let e = of("strake_no_such_function").unwrap_err();
        assert!(
            e.code == Code::OpNotSupp && e.message.contains("no strake_no_such_function;"),
            "{e}"
        );
        assert!(of("malloc").is_ok());
    }

    #[test]
    fn releases_before_the_first_one_that_is_known_are_too_old() {
        for (version, old) in [
            ("DPDK 16.07.2", true),
            ("DPDK 20.11.0", true),
            ("DPDK 21.08.0-rc4", true),
            ("DPDK 21.11.0", false),
            ("DPDK 22.03.0", false),
            ("DPDK 23.07.0", false),
            ("DPDK 26.03.0-rc1", false),
            // Unknown versions pass; the functions are looked up in any case.
            ("", false),
            ("DPDK main", false),
        ] {
            assert_eq!(is_too_old(version), old, "{version}");
        }
    }

    /// Not a test by itself: the next test runs it, with other libraries.
    #[test]
    fn process_that_loads_what_is_there() {
        if std::env::var("STRAKE_SPDK_STAND_IN").is_ok() {
            let e = load().err().expect("it is no SPDK");
            println!("said: {:?} {}", e.code, e.message);
        }
    }

    #[test]
    fn an_spdk_that_is_too_old_or_lacks_a_function_is_said_in_one_sentence() {
        let dir = tempfile::tempdir().unwrap();
        for (version, said) in [
            (
                "DPDK 20.11.0",
                "OpNotSupp the SPDK of this machine is too old: it comes with DPDK 20.11.0; build SPDK (v22.01 or later) ",
            ),
            (
                "DPDK 23.07.0",
                "OpNotSupp the SPDK of this machine has no rte_eal_init; build SPDK (v22.01 or later) ",
            ),
        ] {
            let source = dir.path().join("stand-in.c");
            std::fs::write(
                &source,
                format!("const char *rte_version(void) {{ return \"{version}\"; }}\n"),
            )
            .unwrap();
            for (name, _) in LIBRARIES
                .iter()
                .filter(|(name, _)| !name.starts_with("libcrypto") && !name.starts_with("libssl"))
            {
                let mut cc = std::process::Command::new("cc");
                let made = cc
                    .args(["-shared", "-fPIC", "-o"])
                    .arg(dir.path().join(name))
                    .arg(&source)
                    .status();
                assert!(made.is_ok_and(|s| s.success()), "cc {name}");
            }
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            child.args([
                "--exact",
                "--nocapture",
                "device::spdk::ffi::tests::process_that_loads_what_is_there",
            ]);
            let out = child
                .env("STRAKE_SPDK_STAND_IN", "1")
                .env("LD_LIBRARY_PATH", dir.path())
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&out.stdout);
            let line = text
                .lines()
                .find_map(|l| l.split_once("said: "))
                .unwrap_or_else(|| panic!("{text}"))
                .1;
            assert!(line.starts_with(said), "{line}");
        }
    }
}
