//! Memory that the kernel keeps in place for devices. What all devices together have registered counts against one limit of the
//! process (`RLIMIT_MEMLOCK`), so it is shared out here: what stays registered never takes what comes and goes its room.

use std::sync::OnceLock;

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};

use crate::REGION;

const UNLIMITED: u64 = u64::MAX;

/// What memory is registered for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A region of a pool. Stays.
    Pool,
    /// A region of kept memory, where that leaves a pool of so many bytes its room. Stays.
    Kept { pool: u64 },
    /// A payload by itself, for one request.
    Once,
    /// Buffers of the stream, without which nothing works. Never refused.
    Stream,
}

#[derive(Debug, Default)]
struct Used {
    pool: u64,
    kept: u64,
    once: u64,
    stream: u64,
}

/// The limit and what is taken of it. Half of it is for regions, a quarter for what is registered by itself; the rest is for receive
/// buffers, which their number bounds, and for queues.
pub struct Budget {
    pub limit: u64,
    used: Mutex<Used>,
}

/// Room that is taken; given back when dropped.
pub struct Locked {
    budget: &'static Budget,
    what: What,
    bytes: u64,
}

impl Budget {
    const fn new(limit: u64) -> Budget {
        Budget { limit, used: Mutex::new(Used { pool: 0, kept: 0, once: 0, stream: 0 }) }
    }

    /// This process's, with the limit that it had when this was first asked for.
    pub fn here() -> &'static Budget {
        static HERE: OnceLock<Budget> = OnceLock::new();
        HERE.get_or_init(|| Budget::new(limit()))
    }

    /// `None`: there is no room now.
    pub fn take(&'static self, what: What, bytes: u64) -> Option<Locked> {
        let mut u = self.used.lock();
        let regions = self.limit / 2;
        let fits = match what {
            What::Pool => u.pool + u.kept + bytes <= regions,
            What::Kept { pool } => u.kept.saturating_add(u.pool.max(pool)).saturating_add(bytes) <= regions,
            What::Once => u.once + bytes <= self.limit / 4,
            What::Stream => true,
        };
        if !fits {
            return None;
        }
        *u.of(what) += bytes;
        Some(Locked { budget: self, what, bytes })
    }

    /// Receive buffers of `size` bytes for each of so many devices.
    pub fn receives(&self, size: usize, devices: usize) -> u64 {
        self.limit / 8 / size as u64 / devices.max(1) as u64
    }

    /// How large a pool may be to be registered, bytes, and a sentence if that is less than wanted.
    pub fn pool(&self, wanted: u64) -> (u64, Option<String>) {
        let limit = self.limit;
        let may = limit / 2 / REGION as u64 * REGION as u64;
        if may >= wanted {
            return (wanted, None);
        }
        let m = format!(
            "RDMA: of the {wanted} bytes wanted for buffers only {may} are used, because the limit for locked memory is {limit} bytes; \
             raise it (ulimit -l, LimitMEMLOCK=)"
        );
        (may, Some(m))
    }

    /// Why there is no room for a payload of so many bytes.
    pub fn refusal(&self, len: usize) -> Error {
        let m = format!(
            "{len} bytes cannot be registered for RDMA beside others; the limit for locked memory is {} bytes, raise it (ulimit -l, \
             LimitMEMLOCK=)",
            self.limit
        );
        // A larger one lies in no region of a pool, ever.
        Error::new(if len > REGION { Code::NoMem } else { Code::Overloaded }, m)
    }
}

impl Used {
    fn of(&mut self, what: What) -> &mut u64 {
        match what {
            What::Pool => &mut self.pool,
            What::Kept { .. } => &mut self.kept,
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

/// The most memory that this process may have registered, bytes; `u64::MAX`: no limit.
fn limit() -> u64 {
    let of = |file: &str| std::fs::read_to_string(file).unwrap_or_default();
    let namespace = std::fs::read_link("/proc/self/ns/user").ok();
    if is_exempt(&of("/proc/self/status"), namespace.as_ref().and_then(|n| n.to_str())) {
        return UNLIMITED;
    }
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current.unwrap_or(UNLIMITED)
}

/// Whether the limit does not hold: with CAP_IPC_LOCK over the machine, which nobody in another user namespace has. `namespace`: the
/// target of `/proc/self/ns/user`; a kernel without such namespaces has no such file. (The map of user ids does not tell: another
/// namespace may have the machine's.)
fn is_exempt(status: &str, namespace: Option<&str>) -> bool {
    const IPC_LOCK: u32 = 14;
    /// `PROC_USER_INIT_INO` of the kernel.
    const OF_THE_MACHINE: &str = "user:[4026531837]";
    let caps = status.lines().find_map(|l| l.strip_prefix("CapEff:")).unwrap_or_default();
    let capable = u64::from_str_radix(caps.trim(), 16).unwrap_or(0) & (1 << IPC_LOCK) != 0;
    capable && namespace.is_none_or(|n| n == OF_THE_MACHINE)
}

/// The size of a pool for [`super::RdmaFabric::new`] under this process's limit for locked memory, and what to tell people if it is
/// smaller. `NoMem`: the limit allows none.
pub fn pool_limit(wanted: u64) -> Result<(u64, Option<String>)> {
    match Budget::here().pool(wanted) {
        (0, why) => Err(Error::new(Code::NoMem, why.unwrap_or_else(|| "RDMA: no memory wanted".into()))),
        other => Ok(other),
    }
}

/// `NoMem`, in a sentence, where a pool of this size may not be registered as a whole.
pub fn whole_pool(size: u64) -> Result<()> {
    let b = Budget::here();
    if b.pool(size).0 >= size {
        return Ok(());
    }
    let m = format!(
        "RDMA is not used: buffers of {size} bytes may not be registered, because the limit for locked memory is {} bytes; raise it to \
         twice as much (ulimit -l, LimitMEMLOCK=), or ask for RDMA (fabric=rdma), which makes do with fewer",
        b.limit
    );
    Err(Error::new(Code::NoMem, m))
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
        assert_eq!(budget(UNLIMITED).pool(256 * MIB), (256 * MIB, None));
        assert_eq!(budget(1024 * MIB).pool(64 * MIB), (64 * MIB, None));
        let (may, why) = budget(8 * MIB).pool(256 * MIB);
        assert_eq!(may, 4 * MIB);
        let why = why.unwrap();
        assert!(why.contains("8388608") && why.contains("ulimit -l"), "{why}");
        assert_eq!(budget(7 * MIB).pool(256 * MIB).0, 0);
    }

    #[test]
    fn kept_memory_leaves_a_pool_and_single_payloads_their_room() {
        let region = REGION as u64;
        let b = budget(64 * MIB);
        let kept = What::Kept { pool: 16 * MIB };
        // 32 MiB for regions, 16 of them for the pool whether it has them yet or not.
        let first: Vec<_> = (0..4).map(|_| b.take(kept, region).expect("room beside the pool")).collect();
        assert!(b.take(kept, region).is_none());
        let pool: Vec<_> = (0..4).map(|_| b.take(What::Pool, region).expect("the pool's own")).collect();
        assert!(b.take(What::Pool, region).is_none() && b.take(kept, region).is_none());
        // Payloads by themselves have another share, and buffers of the stream ask nobody.
        let once = b.take(What::Once, 16 * MIB).unwrap();
        assert!(b.take(What::Once, 1).is_none() && b.take(What::Stream, 4096).is_some());
        drop(once);
        assert!(b.take(What::Once, 16 * MIB).is_some());
        drop((first, pool));
        let all: Vec<_> = (0..4).map(|_| b.take(kept, region)).collect();
        assert!(all.iter().all(Option::is_some), "all room came back");
        // The limit of most machines: never a region of kept memory.
        assert!(budget(8 * MIB).take(What::Kept { pool: 4 * MIB }, region).is_none());
        let none = budget(UNLIMITED);
        let many: Vec<_> = (0..128).map(|_| none.take(What::Kept { pool: UNLIMITED / 4 }, region)).collect();
        assert!(many.iter().all(Option::is_some));
    }

    #[test]
    fn who_is_refused_may_try_again_unless_it_never_fits() {
        let e = budget(8 * MIB).refusal(MIB as usize);
        assert!(e.code == Code::Overloaded && e.is_retryable() && e.message.contains("8388608"), "{e}");
        assert_eq!(budget(8 * MIB).refusal(REGION + 1).code, Code::NoMem);
    }

    #[test]
    fn the_capability_counts_in_the_machines_user_namespace_only() {
        let status = |caps: &str| format!("Name:\tx\nCapPrm:\t{caps}\nCapEff:\t{caps}\nCapBnd:\t000001ffffffffff\n");
        let (all, none, one) = ("000001ffffffffff", "0000000000000000", "0000000000004000");
        let machine = Some("user:[4026531837]");
        for (caps, namespace, exempt) in [
            (all, machine, true),
            (one, machine, true),
            (one, None, true),
            (none, machine, false),
            (none, None, false),
            // What `unshare --user --map-root-user` gives: all capabilities, none of which the kernel asks for here.
            (all, Some("user:[4026532281]"), false),
            ("", machine, false),
        ] {
            assert_eq!(is_exempt(&status(caps), namespace), exempt, "{caps} {namespace:?}");
        }
        assert!(!is_exempt("", machine));
    }
}
