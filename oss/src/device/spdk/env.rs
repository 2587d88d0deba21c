//! State that exists once per process: the libraries, DPDK's memory, its list of PCI devices, and
//! which namespaces are open.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{CStr, CString, c_char},
    ptr,
    sync::{Arc, OnceLock, mpsc},
};

use parking_lot::Mutex;
use strake_fabric::{REGION, Region};
use strake_proto::{Code, Error, Result};

use super::{
    ffi::{self, Api},
    transport::{PciAddress, Transport, TransportId},
};
use crate::device::api::BLOCK;

/// Most regions registered: 4 GiB of buffers.
const MAX_REGIONS: usize = 1024;

/// `RTE_IOVA_VA` of DPDK: devices use virtual addresses.
const IOVA_VA: i32 = 2;

/// The PCI devices that targets of this process named before DPDK starts (DPDK may use these and no
/// others), and whether one needs RDMA.
static ANNOUNCED: Mutex<(BTreeSet<PciAddress>, bool)> = Mutex::new((BTreeSet::new(), false));

/// See the module.
pub(super) struct Env {
    pub api: Api,
    allowed: BTreeSet<PciAddress>,
    /// Started for RDMA, which needs hugepages.
    rdma: bool,
    /// A controller on PCIe can use memory that SPDK did not allocate: an IOMMU translates this
    /// process's addresses. With physical addresses, SPDK would find wrong pages, or pages that
    /// move.
    virtual_addresses: bool,
    regions: Mutex<Regions>,
    open: Mutex<BTreeSet<(Transport, u32)>>,
}

#[derive(Default)]
struct Regions {
    /// Held until the process ends, because SPDK knows their pages.
    held: BTreeMap<u64, Arc<Region>>,
    full: bool,
}

/// Announces a device before the first one is opened.
pub(super) fn announce(id: &TransportId) {
    let mut a = ANNOUNCED.lock();
    match id.transport {
        Transport::Pcie(at) => drop(a.0.insert(at)),
        Transport::Rdma(_) => a.1 = true,
        Transport::Tcp(_) => {}
    }
}

/// Whether an IOMMU of this machine translates fewer bits than DPDK's virtual addresses have,
/// according to its capability register (Intel VT-d 11.4.2, MGAW). DPDK does not check.
fn narrow_iommu() -> bool {
    let Ok(units) = std::fs::read_dir("/sys/class/iommu") else { return false };
    units.flatten().any(|unit| {
        let register =
            std::fs::read_to_string(unit.path().join("intel-iommu/cap")).unwrap_or_default();
        u64::from_str_radix(register.trim(), 16).is_ok_and(|cap| (cap >> 16 & 0x3f) + 1 < 48)
    })
}

/// The arguments for DPDK. Only the allowed PCI devices are named, because DPDK takes the devices
/// that it looks at from their drivers.
fn arguments(
    allowed: &BTreeSet<PciAddress>,
    rdma: bool,
    narrow: bool,
    core: usize,
    process: u32,
) -> Vec<String> {
    let mut args: Vec<String> =
        ["strake", "--no-telemetry", "--no-shconf", "--log-level=lib.eal:4", "-l"]
            .map(String::from)
            .into();
    args.push(core.to_string());
    if allowed.is_empty() {
        args.push("--no-pci".into());
    }
    for at in allowed {
        args.extend(["-a".into(), at.to_string()]);
    }
    if allowed.is_empty() && !rdma {
        // Data lies in ordinary memory; this memory is for SPDK's own requests.
        args.extend(["--no-huge", "--legacy-mem", "-m", "256", "--iova-mode=va"].map(String::from));
    } else {
        args.extend(
            ["--match-allocations", "--huge-unlink", "--base-virtaddr=0x200000000000"]
                .map(String::from),
        );
        args.push(format!("--file-prefix=strake_{process}"));
        if narrow {
            args.push("--iova-mode=pa".into());
        }
    }
    args
}

/// The environment, made at the first call from what was announced until then. An error is final.
pub(super) fn get(core: usize) -> Result<&'static Env> {
    static ENV: OnceLock<Result<Env>> = OnceLock::new();
    let env = ENV.get_or_init(|| {
        // DPDK pins the thread that starts it, and keeps it.
        let (made, env) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name("spdk-env".into());
        let started = thread.spawn(move || {
            let _ = made.send(start(core));
            loop {
                std::thread::park();
            }
        });
        started.map_err(Error::from)?;
        env.recv().unwrap_or_else(|_| Err(Error::new(Code::Io, "SPDK's first thread ended")))
    });
    env.as_ref().map_err(Clone::clone)
}

fn start(core: usize) -> Result<Env> {
    let (allowed, rdma) = ANNOUNCED.lock().clone();
    let api = ffi::load()?;
    let huge = !allowed.is_empty() || rdma;
    let args = arguments(&allowed, rdma, narrow_iommu(), core, std::process::id());
    let text: Vec<CString> = args.iter().filter_map(|a| CString::new(a.as_str()).ok()).collect();
    // DPDK reorders the pointers, but does not write to the strings.
    let mut argv: Vec<*mut c_char> = text.iter().map(|a| a.as_ptr().cast_mut()).collect();
    let hint = if huge {
        "are there hugepages (vm.nr_hugepages), and does the server run as root?"
    } else {
        "see its output above"
    };
    // SAFETY: `argv` has as many valid strings as said, kept until after the call; this is the only
    // thread that starts DPDK.
    if unsafe { (api.rte_eal_init)(argv.len() as i32, argv.as_mut_ptr()) } < 0 {
        return Err(Error::new(
            Code::NoMem,
            format!("DPDK does not start with '{}'; {hint}", args.join(" ")),
        ));
    }
    std::mem::forget(text); // it may look at them later
    // SAFETY: DPDK is started; `true` where its memory is of the old, fixed kind.
    let rc = unsafe { (api.spdk_env_dpdk_post_init)(!huge) };
    // SAFETY: a constant string.
    let version = unsafe { CStr::from_ptr((api.rte_version)()) }.to_string_lossy().into_owned();
    if rc != 0 {
        let m = format!(
            "SPDK does not work with {version} ({rc}): install the DPDK that belongs to \
                     it"
        );
        return Err(Error::new(Code::OpNotSupp, m));
    }
    // SAFETY: SPDK's environment is there.
    let (iommu, mode) = unsafe { ((api.spdk_iommu_is_enabled)(), (api.rte_eal_iova_mode)()) };
    let virtual_addresses = iommu && mode == IOVA_VA;
    tracing::info!("SPDK on {version}; PCI devices allowed: {}", allowed.len());
    if !allowed.is_empty() && !virtual_addresses {
        tracing::warn!(
            "no IOMMU covers the addresses of this process: data of devices on PCIe is copied, \
             which costs more CPU"
        );
    }
    Ok(Env {
        api,
        allowed,
        rdma,
        virtual_addresses,
        regions: Mutex::default(),
        open: Mutex::default(),
    })
}

impl Env {
    /// Takes a namespace for one device of this process. `Busy`: another device has it. `Perm`: it
    /// was announced too late.
    pub(super) fn claim(&'static self, id: &TransportId) -> Result<Claim> {
        let late = match id.transport {
            Transport::Pcie(at) if !self.allowed.contains(&at) => {
                Some("uses only the PCI devices of that time")
            }
            Transport::Rdma(_) if !self.rdma => Some("was started without support for RDMA"),
            _ => None,
        };
        if let Some(why) = late {
            let m = format!(
                "{id} was not among the targets when SPDK started, and SPDK {why}: restart this server"
            );
            return Err(Error::new(Code::Perm, m));
        }
        let key = (id.transport.clone(), id.namespace);
        if !self.open.lock().insert(key.clone()) {
            return Err(Error::new(Code::Busy, format!("{id} is in use: another target has it")));
        }
        Ok(Claim { env: self, key })
    }

    /// Whether a controller reaches that memory directly, without a copy.
    pub(super) fn reaches(&self, transport: &Transport, region: Option<&Arc<Region>>) -> bool {
        match (transport, region) {
            // The kernel's sockets reach all memory.
            (Transport::Tcp(_), _) => true,
            (Transport::Pcie(_), _) if !self.virtual_addresses => false,
            (_, Some(region)) => self.register(region),
            (_, None) => false,
        }
    }

    fn register(&self, region: &Arc<Region>) -> bool {
        let mut r = self.regions.lock();
        if r.held.contains_key(&region.id()) {
            return true;
        }
        if r.full || r.held.len() == MAX_REGIONS {
            return false;
        }
        // SAFETY: the region is mapped, starts at a multiple of 2 MiB, is of whole ones and is held
        // from here on.
        let rc = unsafe { (self.api.spdk_mem_register)(region.as_ptr().cast(), REGION) };
        if rc != 0 {
            r.full = true;
            let have = (r.held.len() * REGION) >> 20;
            tracing::warn!(
                "SPDK registers no more than {have} MiB of buffers ({rc}); data in the other \
                 buffers is copied, which costs more CPU"
            );
            return false;
        }
        r.held.insert(region.id(), region.clone());
        true
    }

    /// Memory that every controller reaches.
    pub(super) fn allocate(&'static self, len: usize) -> Option<Dma> {
        // SAFETY: no address is asked for, so none is written.
        let at = unsafe { (self.api.spdk_dma_zmalloc)(len, BLOCK as usize, ptr::null_mut()) };
        ptr::NonNull::new(at.cast()).map(|at| Dma { env: self, at, len })
    }
}

/// A namespace that is taken for one device of this process.
pub(super) struct Claim {
    env: &'static Env,
    key: (Transport, u32),
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.env.open.lock().remove(&self.key);
    }
}

/// Memory of [`Env::allocate`].
pub(super) struct Dma {
    env: &'static Env,
    at: ptr::NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its memory alone, and any thread may free it.
unsafe impl Send for Dma {}

impl Dma {
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `len` bytes that this value owns, zeroed when made.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl Drop for Dma {
    fn drop(&mut self) {
        // SAFETY: made by `spdk_dma_zmalloc`, and not used any more.
        unsafe { (self.env.api.spdk_dma_free)(self.at.as_ptr().cast()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_pci_device_is_looked_at_that_no_target_names() {
        let has = |args: &[String], what: &str| args.iter().any(|a| a == what);
        let none = arguments(&BTreeSet::new(), false, true, 1, 7);
        assert!(has(&none, "--no-pci") && has(&none, "--no-huge") && !has(&none, "-a"), "{none:?}");
        let rdma = arguments(&BTreeSet::new(), true, false, 1, 7);
        assert!(has(&rdma, "--no-pci") && !has(&rdma, "--no-huge"), "{rdma:?}");
        let two = ["0000:3b:00.0", "0000:5e:00.0"].map(|a| a.parse().unwrap()).into();
        let pcie = arguments(&two, false, true, 1, 7);
        let named: Vec<&str> =
            pcie.iter().skip_while(|a| *a != "-a").take(4).map(String::as_str).collect();
        assert_eq!(named, ["-a", "0000:3b:00.0", "-a", "0000:5e:00.0"]);
        assert!(!has(&pcie, "--no-pci"), "with names, all others are left alone");
        assert!(
            has(&pcie, "--iova-mode=pa")
                && has(&none, "--iova-mode=va")
                && !has(&rdma, "--iova-mode=pa")
        );
    }
}
