//! The controller of a device: its connection, its keep-alive, and its reset after a failure. Runs
//! on one thread, which mostly sleeps.

use std::{
    ffi::{CString, c_void},
    fs::File,
    io::Read,
    path::Path,
    ptr,
    sync::{
        atomic::Ordering::SeqCst,
        mpsc::{Receiver, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use rustix::{
    process::{Resource, getrlimit},
    thread::{CapabilitySet, capabilities},
};
use strake_proto::{Code, Error, Result};

use super::{
    Shared,
    env::Env,
    transport::{Transport, TransportId},
};
use crate::device::{api::BLOCK, nvme::Format};

/// How often the admin queue is polled. Polling sends the keep-alives that fabrics expect every few
/// seconds.
const LOOK: Duration = Duration::from_millis(500);
/// Pause between two polls of a reset in progress.
const STEP: Duration = Duration::from_micros(100);
/// Pause between two attempts to reset a controller.
const AGAIN: Duration = Duration::from_millis(500);
/// Where Identify Controller says that the write cache is volatile (NVMe Base 2.0, figure 275).
const VWC: usize = 525;
/// Bits of the register CSTS (NVMe Base 2.0, 3.1.3.6): ready, and fatal status. The register reads
/// as all ones if the controller is gone.
const RDY: u32 = 1;
const CFS: u32 = 2;
/// Offset of the command register in a PCI function's configuration space, and its bit that enables
/// access to memory (PCI Local Bus 3.0, 6.2.2).
const COMMAND: usize = 4;
const MEMORY: u8 = 2;
/// Words that are more than `struct spdk_nvme_transport_id` needs in any release.
const TRANSPORT_ID: usize = 1024;

/// Messages to the thread.
pub(super) enum Event {
    /// A queue pair of this generation failed, or could not be made.
    Failed(u64),
    Close,
}

/// A controller and the namespace on it. The pointers are SPDK's, valid until it is detached.
#[derive(Clone, Copy)]
pub(super) struct Controller {
    env: &'static Env,
    pub at: *mut c_void,
    pub namespace: *mut c_void,
}

// SAFETY: SPDK takes locks of its own around a controller; queue pairs, which have none, stay on
// their threads.
unsafe impl Send for Controller {}

/// How many bytes of memory this process may lock; `None` if there is no limit.
fn lock_limit() -> Option<u64> {
    let capable = capabilities(None).is_ok_and(|c| c.effective.contains(CapabilitySet::IPC_LOCK));
    // The capability of a user namespace does not count.
    let unlimited = capable
        && std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| has_all_users(&map));
    getrlimit(Resource::Memlock).current.filter(|_| !unlimited)
}

/// Whether a `uid_map` (user_namespaces(7)) is that of the initial namespace.
fn has_all_users(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// Checks that the memory of a controller on PCIe can be accessed, and returns an error if not.
/// Waits while its PCI function is being reset, because the kernel blocks reads of the
/// configuration space then. Otherwise SPDK could read garbage as capabilities without a time
/// limit, and wait for the controller for ever. A reset that begins right after this check can
/// still cause that.
fn answers_memory(transport: &Transport) -> Result<()> {
    let Transport::Pcie(address) = transport else { return Ok(()) };
    let function = format!("/sys/bus/pci/devices/{address}");
    let mut header = [0; COMMAND + 1];
    let read = File::open(format!("{function}/config")).and_then(|mut f| f.read_exact(&mut header));
    read.map_err(|e| Error::from(e).context(format_args!("{function}/config")))?;
    // A virtual function has no such bit of its own: the bit is always zero.
    let is_virtual = Path::new(&function).join("physfn").exists();
    match header[COMMAND] {
        c if c != u8::MAX && (is_virtual || c & MEMORY != 0) => Ok(()),
        _ => Err(Error::new(Code::NxIo, "the PCI function allows no access to its memory")),
    }
}

impl Controller {
    /// Blocks while the controller is reached and set up.
    pub(super) fn connect(env: &'static Env, id: &TransportId) -> Result<Controller> {
        // The kernel may not lock the memory that SPDK and DPDK map for the controller. Neither
        // reports that, and the controller then transfers nothing there.
        if let (Transport::Pcie(_), Some(limit)) = (&id.transport, lock_limit()) {
            let m = format!(
                "{id}: this process may lock only {} KiB of memory, but a controller on PCIe must \
                 reach all of its buffers; run the server without a limit (LimitMEMLOCK=infinity, \
                 ulimit -l unlimited) or with CAP_IPC_LOCK",
                limit >> 10
            );
            return Err(Error::new(Code::Perm, m));
        }
        let text = CString::new(id.of_spdk())
            .map_err(|_| Error::new(Code::Inval, "a zero byte in a transport id"))?;
        let mut parsed = vec![0u64; TRANSPORT_ID];
        // SAFETY: zeroed memory, larger and no less aligned than the structure; a valid string.
        let rc = unsafe {
            (env.api.spdk_nvme_transport_id_parse)(parsed.as_mut_ptr().cast(), text.as_ptr())
        };
        if rc != 0 {
            return Err(Error::new(Code::Inval, format!("{id}: SPDK does not accept it ({rc})")));
        }
        // SAFETY: a parsed transport id; no options.
        let at = unsafe { (env.api.spdk_nvme_connect)(parsed.as_ptr().cast(), ptr::null(), 0) };
        if at.is_null() {
            let look = match id.transport {
                Transport::Pcie(_) => "is it bound to vfio-pci?",
                Transport::Tcp(_) | Transport::Rdma(_) => {
                    "is its target up, and does it allow this host?"
                }
            };
            return Err(Error::new(
                Code::NxIo,
                format!("{id}: no such controller can be reached; {look}"),
            ));
        }
        let mut c = Controller { env, at, namespace: ptr::null_mut() };
        match c.find(id.namespace) {
            Ok(()) => Ok(c),
            Err(e) => {
                c.detach(false);
                Err(e.context(id))
            }
        }
    }

    fn find(&mut self, namespace: u32) -> Result<()> {
        // SAFETY: a connected controller; a null namespace is asked nothing.
        let ns = unsafe { (self.env.api.spdk_nvme_ctrlr_get_ns)(self.at, namespace) };
        // SAFETY: as above.
        if ns.is_null() || !unsafe { (self.env.api.spdk_nvme_ns_is_active)(ns) } {
            return Err(Error::new(
                Code::NoDev,
                format!("the controller has no active namespace {namespace}"),
            ));
        }
        self.namespace = ns;
        Ok(())
    }

    pub(super) fn format(&self) -> Result<Format> {
        let (api, ns) = (&self.env.api, self.namespace);
        // SAFETY: an active namespace of a connected controller.
        let (sector, metadata, blocks) = unsafe {
            let metadata = (api.spdk_nvme_ns_get_md_size)(ns);
            (
                (api.spdk_nvme_ns_get_sector_size)(ns),
                metadata,
                (api.spdk_nvme_ns_get_num_sectors)(ns),
            )
        };
        let shift = if sector.is_power_of_two() { sector.trailing_zeros() } else { 0 };
        Format::new(blocks, shift, metadata)
    }

    /// Most bytes of one command.
    pub(super) fn most(&self) -> u64 {
        // SAFETY: an active namespace of a connected controller.
        let most = unsafe { (self.env.api.spdk_nvme_ns_get_max_io_xfer_size)(self.namespace) };
        u64::from(most).min(1 << 20) / BLOCK * BLOCK
    }

    /// Whether acknowledged data can be lost before a flush.
    pub(super) fn is_volatile(&self) -> bool {
        // SAFETY: the controller's 4096 bytes of Identify, which SPDK keeps as NVMe lays them out.
        unsafe { *(self.env.api.spdk_nvme_ctrlr_get_data)(self.at).add(VWC) & 1 == 1 }
    }

    /// Whether a controller on PCIe works, according to its status register: a dead one would not
    /// answer a command. Controllers over a network are checked by their keep-alives.
    pub(super) fn works(&self, transport: &Transport) -> bool {
        // SAFETY: a connected controller, whose registers are mapped.
        let status = || unsafe { (self.env.api.spdk_nvme_ctrlr_get_regs_csts)(self.at) };
        !matches!(transport, Transport::Pcie(_)) || status() & (RDY | CFS) == RDY
    }

    /// Call only when no queue pair of it is left. `failed`: it would not answer a proper shutdown.
    pub(super) fn detach(self, failed: bool) {
        // SAFETY: connected, and not used any more.
        unsafe {
            if failed {
                (self.env.api.spdk_nvme_ctrlr_fail)(self.at);
            }
            (self.env.api.spdk_nvme_detach)(self.at);
        }
    }

    /// Runs until the device is dropped and all of its queue pairs are gone.
    pub(super) fn serve(
        mut self,
        shared: &Shared,
        id: &TransportId,
        format: Format,
        events: &Receiver<Event>,
    ) {
        let mut closed = false;
        while !closed {
            let failed = match events.recv_timeout(LOOK) {
                Ok(Event::Failed(generation)) => generation == shared.generation.load(SeqCst),
                Ok(Event::Close) | Err(RecvTimeoutError::Disconnected) => break,
                // SAFETY: a connected controller; its admin queue is this thread's.
                Err(RecvTimeoutError::Timeout) => unsafe {
                    (self.env.api.spdk_nvme_ctrlr_process_admin_completions)(self.at) < 0
                        || !self.works(&id.transport)
                },
            };
            if failed {
                closed = self.recover(shared, id, format, events);
            }
        }
        while shared.pairs.load(SeqCst) > 0 {
            thread::sleep(Duration::from_millis(1));
        }
        self.detach(!shared.is_up());
    }

    /// Resets the controller until it works again. Returns whether the device was dropped
    /// meanwhile.
    fn recover(
        &mut self,
        shared: &Shared,
        id: &TransportId,
        format: Format,
        events: &Receiver<Event>,
    ) -> bool {
        tracing::warn!("{id}: the controller fails; resetting it");
        // Disconnect first. Then the controller reaches no memory any more when queue pairs free
        // theirs, and freeing a queue pair asks nothing of a dead controller.
        let mut cut = self.disconnect(id);
        shared.set_up(false);
        while shared.pairs.load(SeqCst) > 0 {
            thread::sleep(Duration::from_millis(1));
        }
        if shared.volatile && shared.written.load(SeqCst) > shared.flushed.load(SeqCst) {
            // The same namespace may have returned without the contents of its cache, so no flush
            // can vouch for them.
            shared.lost.store(true, SeqCst);
            tracing::error!(
                "{id}: reset with unflushed writes; flushes fail until this target is opened again"
            );
        }
        let mut last = Error::new(Code::Io, "");
        loop {
            match cut.and_then(|()| self.reconnect(id, format, events)) {
                Ok(true) => break,
                Ok(false) => return true,
                Err(e) if e != last => {
                    tracing::warn!("{e}; trying again");
                    last = e;
                }
                Err(_) => {}
            }
            if let Ok(Event::Close) = events.recv_timeout(AGAIN) {
                return true;
            }
            cut = self.disconnect(id);
        }
        tracing::info!("{id}: the controller works again");
        *shared.controller.lock() = *self;
        shared.generation.fetch_add(1, SeqCst);
        shared.set_up(true);
        false
    }

    /// Stops the controller, or ends the connection to it: the first half of a reset.
    fn disconnect(&self, id: &TransportId) -> Result<()> {
        // SAFETY: a connected controller; its admin queue is this thread's.
        let rc = unsafe { (self.env.api.spdk_nvme_ctrlr_disconnect)(self.at) };
        // It is disconnected already, by an attempt that failed before the second half.
        if rc == -libc::EBUSY {
            return Ok(());
        }
        if rc != 0 {
            return Err(Error::new(
                Code::Io,
                format!("{id}: the controller cannot be reset ({rc})"),
            ));
        }
        // SAFETY: as above; an error once it is disconnected. How long a controller takes to stop
        // is limited by what it says of itself.
        while unsafe { (self.env.api.spdk_nvme_ctrlr_process_admin_completions)(self.at) } >= 0 {
            thread::sleep(STEP);
        }
        Ok(())
    }

    /// The second half of a reset; `false` if the device was dropped meanwhile.
    fn reconnect(
        &mut self,
        id: &TransportId,
        format: Format,
        events: &Receiver<Event>,
    ) -> Result<bool> {
        answers_memory(&id.transport).map_err(|e| e.context(id))?;
        // SAFETY: a controller that is disconnected and has no queue pairs. It is locked until
        // polling it says other than `EAGAIN`.
        unsafe { (self.env.api.spdk_nvme_ctrlr_reconnect_async)(self.at) };
        let rc = loop {
            // It may take minutes. On `Close`, the controller is detached by this thread, which
            // owns its recursive lock, and then ends. It must take no other robust lock of SPDK
            // after that.
            if let Ok(Event::Close) = events.try_recv() {
                return Ok(false);
            }
            // SAFETY: as above.
            match unsafe { (self.env.api.spdk_nvme_ctrlr_reconnect_poll_async)(self.at) } {
                rc if rc == -libc::EAGAIN => thread::sleep(STEP),
                rc => break rc,
            }
        };
        if rc != 0 {
            return Err(Error::new(
                Code::Io,
                format!("{id}: the controller cannot be reset ({rc})"),
            ));
        }
        self.find(id.namespace).map_err(|e| e.context(id))?;
        match self.format()? {
            f if f == format => Ok(true),
            _ => Err(Error::new(Code::Io, format!("{id}: its size or format has changed"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::has_all_users;

    #[test]
    fn a_user_namespace_is_not_the_machine() {
        assert!(has_all_users("         0          0 4294967295\n"));
        for map in ["", "0 1000 1\n", "0 100000 65536\n", "0 0 1\n1 1 4294967294\n"] {
            assert!(!has_all_users(map), "{map}");
        }
    }
}
