//! Memory that the kernel pins for devices. What all devices together have registered counts
//! against one limit of the process (`RLIMIT_MEMLOCK`), and so do the buffers registered with
//! io_uring. This module divides the limit, so that long-lived registrations never take the room of
//! short-lived ones.

use std::sync::{
    OnceLock,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};

use super::{limits::PLACES, probe::probe};
use crate::{REGION, buf::ALIGN};

const UNLIMITED: u64 = u64::MAX;
/// The largest piece that goes through a device's stage, bytes.
const LARGEST_PIECE: u64 = 256 << 10;

/// The purpose of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A region of a pool or of kept memory, by a device. Long-lived. See [`Budget::region`].
    Region,
    /// A region of a pool, by an io_uring. Long-lived.
    Ring,
    /// A payload by itself, for one request.
    Once,
    /// Buffers of the stream, and the stage that payloads go through: without them nothing works.
    /// Never refused.
    Stream,
}

#[derive(Debug, Default)]
struct Used {
    region: u64,
    ring: u64,
    once: u64,
    stream: u64,
}

/// Bytes of regions that one device has registered.
#[derive(Clone, Copy, Debug, Default)]
pub struct Had {
    pub pool: u64,
    pub kept: u64,
}

/// The limit and what is taken of it. Half of it is for regions, in equal parts for each device,
/// because a region that two devices have registered counts twice. A quarter is for payloads that
/// are registered by themselves, of which an io_uring may have half. The rest is for receive
/// buffers, whose number is limited, and for queues.
pub struct Budget {
    pub limit: u64,
    used: Mutex<Used>,
    /// RDMA is used by this process, or will be. Before that, an io_uring takes what the kernel
    /// gives.
    rdma: AtomicBool,
}

/// Reserved room; given back when dropped.
pub struct Locked {
    budget: &'static Budget,
    what: What,
    bytes: u64,
}

impl Budget {
    const fn new(limit: u64) -> Budget {
        let used = Mutex::new(Used { region: 0, ring: 0, once: 0, stream: 0 });
        Budget { limit, used, rdma: AtomicBool::new(false) }
    }

    /// The budget of this process, with the limit that it had at the first call.
    pub fn here() -> &'static Budget {
        static HERE: OnceLock<Budget> = OnceLock::new();
        HERE.get_or_init(|| Budget::new(limit()))
    }

    /// From now on, reserves room for RDMA.
    pub fn keep_for_rdma(&self) {
        self.rdma.store(true, Relaxed);
    }

    /// Room for a region, for one of `devices` devices that has registered `had` already. `kept`:
    /// the region is of kept memory, and must leave room for a pool of this many bytes. `None`:
    /// there is no room now.
    pub fn region(&'static self, had: Had, devices: usize, kept: Option<u64>) -> Option<Locked> {
        let bytes = REGION as u64;
        let pool = kept.map_or(had.pool, |pool| had.pool.max(pool));
        if had.kept.saturating_add(pool).saturating_add(bytes) > self.share_or_one(devices) {
            return None;
        }
        self.take(What::Region, bytes)
    }

    /// Each device's part of the half for regions.
    fn share(&self, devices: usize) -> u64 {
        self.limit / 2 / devices.max(1) as u64
    }

    /// As `share`, but at least one region where the half has room for one: the first device gets
    /// it, and others work without.
    fn share_or_one(&self, devices: usize) -> u64 {
        self.share(devices).max((self.limit / 2).min(REGION as u64))
    }

    /// Reserves room; `None`: there is none now.
    pub fn take(&'static self, what: What, bytes: u64) -> Option<Locked> {
        let mut u = self.used.lock();
        let (eighth, quarter) = (self.limit / 8, self.limit / 4);
        // A ring may have taken more before RDMA was used. The kernel also counts queues, which
        // drivers create.
        let in_all = u.region + u.ring + u.once + u.stream + bytes <= self.limit - self.limit / 16;
        let fits = match what {
            What::Region => in_all && u.region + bytes <= self.limit / 2,
            What::Once => in_all && u.once + u.ring.min(eighth) + bytes <= quarter,
            What::Ring if !self.rdma.load(Relaxed) => true,
            What::Ring => in_all && u.ring + bytes <= eighth && u.once + u.ring + bytes <= quarter,
            What::Stream => true,
        };
        if !fits {
            return None;
        }
        *u.of(what) += bytes;
        Some(Locked { budget: self, what, bytes })
    }

    /// Number of receive buffers of `size` bytes for each of `devices` devices.
    pub fn receives(&self, size: usize, devices: usize) -> u64 {
        self.limit / 8 / size as u64 / devices.max(1) as u64
    }

    /// Size of each place of a device's stage in bytes, a power of two. All places of all `devices`
    /// devices together are at most a 32nd of the limit.
    pub fn piece(&self, devices: usize) -> usize {
        let most = self.limit / 32 / (PLACES * devices.max(1)) as u64;
        1 << most.clamp(ALIGN as u64, LARGEST_PIECE).ilog2()
    }

    /// How large a pool may be, in bytes, so that each of `devices` devices can register it; and a
    /// sentence if that is less than wanted.
    pub fn pool(&self, wanted: u64, devices: usize) -> (u64, Option<String>) {
        let limit = self.limit;
        let may = self.share_or_one(devices) / REGION as u64 * REGION as u64;
        if may >= wanted {
            return (wanted, None);
        }
        let m = format!(
            "RDMA: only {may} of the wanted {wanted} bytes are used for buffers, because the \
             limit for locked memory is {limit} bytes{}; raise it (ulimit -l, LimitMEMLOCK=)",
            shared_by(devices)
        );
        (may, Some(m))
    }

    /// The error when there is no room for a payload of this length.
    pub fn refusal(&self, len: usize) -> Error {
        let m = format!(
            "{len} more bytes cannot be registered for RDMA; the limit for locked memory is {} \
             bytes, raise it (ulimit -l, LimitMEMLOCK=)",
            self.limit
        );
        // A larger one never lies in a region of a pool.
        Error::new(if len > REGION { Code::NoMem } else { Code::Overloaded }, m)
    }
}

impl Used {
    fn of(&mut self, what: What) -> &mut u64 {
        match what {
            What::Region => &mut self.region,
            What::Ring => &mut self.ring,
            What::Once => &mut self.once,
            What::Stream => &mut self.stream,
        }
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        *self.budget.used.lock().of(self.what) -= self.bytes;
    }
}

fn shared_by(devices: usize) -> String {
    if devices > 1 { format!(", which {devices} RDMA devices share") } else { String::new() }
}

/// The most memory that this process may register, in bytes; `u64::MAX`: no limit.
fn limit() -> u64 {
    let of = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/user").ok();
    if is_exempt(&of("/proc/self/status"), namespace.as_ref().and_then(|n| n.to_str())) {
        return UNLIMITED;
    }
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(UNLIMITED)
}

/// Whether the process is exempt from the limit: it has CAP_IPC_LOCK in the machine's initial user
/// namespace. Processes in another user namespace never have that. `namespace`: the target of
/// `/proc/self/ns/user`; a kernel without user namespaces has no such file. (The map of user ids
/// does not tell: another namespace may have the same map.)
fn is_exempt(status: &str, namespace: Option<&str>) -> bool {
    const IPC_LOCK: u32 = 14;
    /// `PROC_USER_INIT_INO` of the kernel.
    const OF_THE_MACHINE: &str = "user:[4026531837]";
    let caps = status.lines().find_map(|l| l.strip_prefix("CapEff:")).unwrap_or_default();
    let capable = u64::from_str_radix(caps.trim(), 16).unwrap_or(0) & (1 << IPC_LOCK) != 0;
    capable && namespace.is_none_or(|n| n == OF_THE_MACHINE)
}

/// The size of a pool for [`super::RdmaFabric::new`] under this process's limit for locked memory
/// and with this machine's devices, and a text for people if it is smaller than wanted. `NoMem`:
/// the limit allows none. Also reserves room for RDMA: the caller is going to use it.
pub fn pool_limit(wanted: u64) -> Result<(u64, Option<String>)> {
    Budget::here().keep_for_rdma();
    match Budget::here().pool(wanted, probe().map_or(1, |devices| devices.len())) {
        (0, why) => {
            Err(Error::new(Code::NoMem, why.unwrap_or_else(|| "RDMA: no memory is wanted".into())))
        }
        other => Ok(other),
    }
}

/// `NoMem`, with a sentence, unless each of `devices` devices may register a pool of this size as a
/// whole.
pub fn whole_pool(size: u64, devices: usize) -> Result<()> {
    let b = Budget::here();
    if b.share(devices) >= size {
        return Ok(());
    }
    let m = format!(
        "RDMA is not used: buffers of {size} bytes cannot be registered, because the limit for \
         locked memory is {} bytes{}. Raise it to {} bytes (ulimit -l, LimitMEMLOCK=), or set \
         fabric=rdma, which uses RDMA with fewer buffers",
        b.limit,
        shared_by(devices),
        size.saturating_mul(2 * devices.max(1) as u64)
    );
    Err(Error::new(Code::NoMem, m))
}

/// Room for a region that is registered with an io_uring. The kernel counts it together with what
/// RDMA has registered, once for each ring. `None`: what is left is reserved for RDMA.
pub fn for_ring() -> Option<Locked> {
    Budget::here().take(What::Ring, REGION as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn budget(limit: u64) -> &'static Budget {
        Box::leak(Box::new(Budget::new(limit)))
    }

    #[test]
    fn a_small_limit_makes_a_smaller_pool_and_says_so() {
        assert_eq!(budget(UNLIMITED).pool(256 * MIB, 8), (256 * MIB, None));
        assert_eq!(budget(1024 * MIB).pool(64 * MIB, 1), (64 * MIB, None));
        let (may, why) = budget(8 * MIB).pool(256 * MIB, 1);
        assert_eq!(may, 4 * MIB);
        let why = why.unwrap();
        assert!(why.contains("8388608 bytes; raise") && why.contains("ulimit -l"), "{why}");
        assert_eq!(budget(7 * MIB).pool(256 * MIB, 1).0, 0);
        // Each device registers all of it.
        let (may, why) = budget(64 * MIB).pool(256 * MIB, 2);
        assert!(
            may == 16 * MIB
                && why.as_ref().is_some_and(|m| m.contains("which 2 RDMA devices share")),
            "{why:?}"
        );
        // Except for one region, which one of them gets.
        assert_eq!(
            (budget(8 * MIB).pool(256 * MIB, 2).0, budget(7 * MIB).pool(256 * MIB, 2).0),
            (4 * MIB, 0)
        );
        let b = budget(8 * MIB);
        let first = b.region(Had::default(), 2, None);
        assert!(first.is_some() && b.region(Had::default(), 2, None).is_none());
    }

    /// Regions until there is no room, and the room.
    fn regions(
        b: &'static Budget,
        had: &mut Had,
        devices: usize,
        kept: Option<u64>,
    ) -> Vec<Locked> {
        let each = std::iter::from_fn(|| {
            let room = b.region(*had, devices, kept)?;
            *(if kept.is_some() { &mut had.kept } else { &mut had.pool }) += REGION as u64;
            Some(room)
        });
        each.take(1000).collect()
    }

    #[test]
    fn kept_memory_leaves_a_pool_and_single_payloads_their_room() {
        let (b, mut had) = (budget(64 * MIB), Had::default());
        // 32 MiB for regions, 16 of them for the pool whether it has them yet or not.
        let first = regions(b, &mut had, 1, Some(16 * MIB));
        let pool = regions(b, &mut had, 1, None);
        assert_eq!((first.len(), pool.len()), (4, 4));
        assert!(b.region(had, 1, Some(16 * MIB)).is_none());
        // Payloads by themselves have another share; buffers of the stream are never refused.
        let once = b.take(What::Once, 16 * MIB).unwrap();
        assert!(b.take(What::Once, 1).is_none() && b.take(What::Stream, 4096).is_some());
        drop(once);
        assert!(b.take(What::Once, 16 * MIB).is_some());
        drop((first, pool));
        assert_eq!(regions(b, &mut Had::default(), 1, Some(0)).len(), 8, "all room came back");
        // The limit of most machines: never a region of kept memory.
        assert!(regions(budget(8 * MIB), &mut Had::default(), 1, Some(4 * MIB)).is_empty());
        assert_eq!(
            regions(budget(UNLIMITED), &mut Had::default(), 1, Some(UNLIMITED / 4)).len(),
            1000
        );
    }

    #[test]
    fn each_device_registers_the_whole_pool() {
        for devices in 1..=4 {
            let b = budget(256 * MIB);
            let (pool, _) = b.pool(UNLIMITED, devices);
            let taken: Vec<_> =
                (0..devices).map(|_| regions(b, &mut Had::default(), devices, None)).collect();
            for of_one in &taken {
                assert_eq!(of_one.len() as u64 * REGION as u64, pool, "{devices}");
            }
            assert!(b.take(What::Once, 64 * MIB).is_some() && b.used.lock().region <= 128 * MIB);
        }
    }

    #[test]
    fn rings_leave_rdma_its_room_where_it_is_used_and_are_counted_in_any_case() {
        let rings = |b: &'static Budget| {
            std::iter::from_fn(|| b.take(What::Ring, REGION as u64)).take(1000).collect::<Vec<_>>()
        };
        let b = budget(64 * MIB);
        b.keep_for_rdma();
        let ring = rings(b);
        assert_eq!(ring.len(), 2, "an eighth");
        let pool = regions(b, &mut Had::default(), 1, None);
        assert_eq!(pool.len(), 8, "and regions have their half");
        let (stream, once) = (b.take(What::Stream, 10 * MIB), b.take(What::Once, 8 * MIB));
        assert!(stream.is_some() && once.is_some() && b.take(What::Once, 4096).is_none());
        drop(ring);
        assert!(b.take(What::Once, 2 * MIB).is_some(), "what a ring has not is theirs");
        // Not below 32 MiB.
        let small = budget(8 * MIB);
        small.keep_for_rdma();
        assert!(rings(small).is_empty());
        // Without RDMA the kernel decides. A process that begins to use RDMA later gets no more
        // than what is left.
        let b = budget(64 * MIB);
        let before: Vec<_> = (0..12).map(|_| b.take(What::Ring, REGION as u64).unwrap()).collect();
        b.keep_for_rdma();
        assert!(b.take(What::Ring, REGION as u64).is_none());
        let later = regions(b, &mut Had::default(), 1, None);
        assert_eq!(later.len(), 3, "12 MiB, and 4 are for what the kernel counts and nobody here");
        drop((before, later));
        assert_eq!(rings(budget(UNLIMITED)).len(), 1000);
    }

    #[test]
    fn pieces_that_go_through_a_stage_are_a_small_part_of_the_limit() {
        for (limit, devices, piece) in [
            (UNLIMITED, 1, 256 << 10),
            (8 * MIB, 1, 64 << 10),
            (8 * MIB, 2, 32 << 10),
            (8 * MIB, 3, 16 << 10),
            (65536, 1, 4096),
        ] {
            assert_eq!(budget(limit).piece(devices), piece, "{limit} {devices}");
        }
    }

    #[test]
    fn who_is_refused_may_try_again_unless_it_never_fits() {
        let e = budget(8 * MIB).refusal(MIB as usize);
        assert!(
            e.code == Code::Overloaded && e.is_retryable() && e.message.contains("8388608"),
            "{e}"
        );
        assert_eq!(budget(8 * MIB).refusal(REGION + 1).code, Code::NoMem);
    }

    #[test]
    fn the_capability_counts_in_the_machines_user_namespace_only() {
        let status = |caps: &str| {
            format!("Name:\tx\nCapPrm:\t{caps}\nCapEff:\t{caps}\nCapBnd:\t000001ffffffffff\n")
        };
        let (all, none, one) = ("000001ffffffffff", "0000000000000000", "0000000000004000");
        let machine = Some("user:[4026531837]");
        for (caps, namespace, exempt) in [
            (all, machine, true),
            (one, machine, true),
            (one, None, true),
            (none, machine, false),
            (none, None, false),
            // What `unshare --user --map-root-user` gives: all capabilities, none of which the
            // kernel asks for here.
            (all, Some("user:[4026532281]"), false),
            ("", machine, false),
        ] {
            assert_eq!(is_exempt(&status(caps), namespace), exempt, "{caps} {namespace:?}");
        }
        assert!(!is_exempt("", machine));
    }
}
