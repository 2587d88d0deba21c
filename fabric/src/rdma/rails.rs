//! Rails: the ports of this machine's RDMA devices, and the choice of the best one to reach a peer.
//! The kernel's information about them is read when it is needed and older than a second
//! ([`Ports`]); choosing is pure ([`order`]); results of connections are remembered ([`Ledger`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::CStr,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path as File,
    ptr::null_mut,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use strake_proto::{Code, Error, Result};
use tokio::time::{Instant, timeout};

/// A path on which a connection failed is tried last for this long.
const FAILURE_STANDS: Duration = Duration::from_secs(30);
/// Information about this machine's ports is valid for this long.
const FRESH: Duration = Duration::from_secs(1);
/// A connection waits at most this long for that information to be read again.
const LONGEST_LOOK: Duration = Duration::from_millis(100);
/// Each path has at least this long to answer.
const SHORTEST_SHARE: Duration = Duration::from_millis(50);

/// An address of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    pub address: IpAddr,
    /// Length of the subnet prefix in bits.
    pub prefix: u32,
    /// NUMA node of the device, if it has one.
    pub node: Option<u32>,
    pub active: bool,
}

/// From a local address to the peer's address. Without the first, from the one that the kernel's
/// routes give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Path {
    pub from: Option<IpAddr>,
    pub to: IpAddr,
}

impl Rail {
    fn reaches(&self, to: IpAddr) -> bool {
        let bits = |a: IpAddr| match a {
            IpAddr::V4(a) => u128::from(a.to_bits()) << 96,
            IpAddr::V6(a) => a.to_bits(),
        };
        let differ = bits(self.address) ^ bits(to);
        self.address.is_ipv4() == to.is_ipv4() && differ.leading_zeros() >= self.prefix
    }
}

/// What [`order`] considers beside the rails.
#[derive(Clone, Debug, Default)]
pub struct Met {
    /// Number of connections that are open or being made.
    pub open: BTreeMap<Path, usize>,
    /// Paths on which a connection failed recently.
    pub failed: BTreeSet<Path>,
    /// NUMA nodes that the process is bound to. Empty: it is bound to none, and all are near.
    pub near: BTreeSet<u32>,
    /// Which of equal paths comes first.
    pub turn: usize,
}

/// The paths to a peer that has these addresses, the best first. Paths that did not fail recently
/// come first; then those from ports whose subnet contains the address, before those by the
/// kernel's routes; then those from near devices, before far ones; then those with the fewest
/// connections that share one of their ends. A port that is not active is left out. An address of
/// this machine is reached from itself.
pub fn order(rails: &[Rail], peer: &[IpAddr], met: &Met) -> Vec<Path> {
    let mut all = Vec::new();
    for &to in peer {
        let own = rails.iter().any(|r| r.address == to);
        let leads = |r: &&Rail| r.active && if own { r.address == to } else { r.reaches(to) };
        let found = all.len();
        for r in rails.iter().filter(leads) {
            let far = !met.near.is_empty() && r.node.is_some_and(|n| !met.near.contains(&n));
            all.push((Path { from: Some(r.address), to }, far));
        }
        if all.len() == found {
            all.push((Path { from: None, to }, false));
        }
    }
    let shared = |p: &Path| {
        let shares = |o: &Path| {
            usize::from(o.to == p.to) + usize::from(o.from.is_some() && o.from == p.from)
        };
        met.open.iter().map(|(o, n)| shares(o) * n).sum::<usize>()
    };
    let n = all.len().max(1);
    let rank = |(i, (p, far)): (usize, (Path, bool))| {
        (
            (
                met.failed.contains(&p),
                p.from.is_none(),
                far,
                shared(&p),
                (i + n - met.turn % n) % n,
            ),
            p,
        )
    };
    let mut ranked: Vec<_> = all.into_iter().enumerate().map(rank).collect();
    ranked.sort();
    ranked.into_iter().map(|(_, p)| p).collect()
}

/// Tries one after the other until one succeeds. All are tried within `limit`: one that is silent
/// ends with its share of the time that is left, and only the last may take longer. Returns the
/// last failure if none succeeds; `None` if `all` is empty.
pub async fn in_turn<X, T, F: Future<Output = Result<T>>>(
    all: Vec<X>,
    limit: Duration,
    mut one: impl FnMut(X) -> F,
) -> Option<Result<T>> {
    let (start, mut left) = (Instant::now(), all.len() as u32);
    let mut last = None;
    for x in all {
        let share = (limit.saturating_sub(start.elapsed()) / left).max(SHORTEST_SHARE);
        left -= 1;
        let ended = match left {
            0 => one(x).await,
            _ => timeout(share, one(x)).await.unwrap_or_else(|_| {
                Err(Error::new(
                    Code::TimedOut,
                    format!("no answer within {share:?}; trying another route"),
                ))
            }),
        };
        match ended {
            Err(e) => last = Some(Err(e)),
            well => return Some(well),
        }
    }
    last
}

/// The ports and near NUMA nodes of this machine, as last read.
#[derive(Default)]
struct Seen {
    rails: Vec<Rail>,
    near: BTreeSet<u32>,
}

/// This machine's ports. Reading them takes some hundred system calls, which may wait for a driver.
/// So it is done on threads that may block, without a lock that others need, and not for each
/// connection.
pub struct Ports {
    look: fn() -> (Vec<Rail>, BTreeSet<u32>),
    seen: Mutex<Option<(Instant, Arc<Seen>)>>,
    /// Held by the reader, also when no task waits for the result any more.
    reading: Arc<tokio::sync::Mutex<()>>,
}

impl Default for Ports {
    fn default() -> Ports {
        Ports::new(|| (here(File::new("/sys"), &addresses()), near()))
    }
}

impl Ports {
    fn new(look: fn() -> (Vec<Rail>, BTreeSet<u32>)) -> Ports {
        Ports { look, seen: Mutex::default(), reading: Arc::default() }
    }

    fn fresh(&self) -> bool {
        self.seen.lock().as_ref().is_some_and(|(at, _)| at.elapsed() < FRESH)
    }

    /// Reads them on this thread.
    fn read(&self) -> Arc<Seen> {
        let (rails, near) = (self.look)();
        let seen = Arc::new(Seen { rails, near });
        *self.seen.lock() = Some((Instant::now(), seen.clone()));
        seen
    }

    /// The last result, however old. Reads on this thread only if nothing was read before.
    fn last(&self) -> Arc<Seen> {
        let seen = self.seen.lock().as_ref().map(|(_, seen)| seen.clone());
        seen.unwrap_or_else(|| self.read())
    }

    /// Makes sure that the information is fresh. One task reads for all that wait, however long a
    /// driver blocks it.
    pub async fn refresh(self: &Arc<Ports>) {
        if self.fresh() {
            return;
        }
        let one = self.reading.clone().lock_owned().await;
        if self.fresh() {
            return;
        }
        let ports = self.clone();
        let reads = move || {
            ports.read();
            drop(one);
        };
        // If the reader panics, the previous information stays.
        let _ = tokio::task::spawn_blocking(reads).await;
    }

    /// As [`Ports::refresh`], but a device whose driver hangs must not block the use of the others:
    /// after a short time the previous information is good enough.
    pub async fn refresh_in_time(self: &Arc<Ports>) {
        let known = self.seen.lock().is_some();
        if known {
            let _ = timeout(LONGEST_LOOK, self.refresh()).await;
        } else {
            self.refresh().await;
        }
    }

    /// Has old information read again in the background; on this thread where that is not possible.
    fn refresh_soon(self: &Arc<Ports>) {
        if self.fresh() {
            return;
        }
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) if self.reading.try_lock().is_ok() => {
                let ports = self.clone();
                runtime.spawn(async move { ports.refresh().await });
            }
            Ok(_) => {}
            Err(_) => drop(self.read()),
        }
    }
}

/// Results of a process's connections.
#[derive(Default)]
pub struct Ledger {
    pub ports: Arc<Ports>,
    open: Mutex<BTreeMap<Path, usize>>,
    failed: Mutex<BTreeMap<Path, Instant>>,
    turn: Mutex<usize>,
}

impl Ledger {
    /// As [`order`], with the last information about this machine. `turn`: equal paths take turns
    /// with each call.
    pub fn order(&self, peer: &[IpAddr], turn: bool) -> Vec<Path> {
        let now = Instant::now();
        let seen = self.ports.last();
        self.ports.refresh_soon();
        let failed = {
            let mut failed = self.failed.lock();
            failed.retain(|_, at| now.duration_since(*at) < FAILURE_STANDS);
            failed.keys().copied().collect()
        };
        let turn = {
            let mut turns = self.turn.lock();
            let now = *turns;
            *turns = now.wrapping_add(usize::from(turn));
            now
        };
        let met = Met { open: self.open.lock().clone(), failed, near: seen.near.clone(), turn };
        order(&seen.rails, peer, &met)
    }

    /// Counts a connection on this path as long as the result lives.
    pub fn take(self: &Arc<Ledger>, path: Path) -> Taken {
        *self.open.lock().entry(path).or_default() += 1;
        Taken { ledger: self.clone(), path, well: false }
    }
}

/// A connection's place on its path. If it is dropped before [`Taken::well`] was called, it counts
/// as failed.
pub struct Taken {
    ledger: Arc<Ledger>,
    path: Path,
    well: bool,
}

impl Taken {
    /// The other end answered: the connection is up or was refused.
    pub fn well(&mut self) {
        self.well = true;
        self.ledger.failed.lock().remove(&self.path);
    }

    /// The connection was up and broke, and neither end caused it.
    pub fn broke(&self) {
        self.ledger.failed.lock().insert(self.path, Instant::now());
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if !self.well {
            self.broke();
        }
        let mut open = self.ledger.open.lock();
        if let Some(n) = open.get_mut(&self.path) {
            *n -= 1;
            if *n == 0 {
                open.remove(&self.path);
            }
        }
    }
}

/// An address of a network interface.
struct Address {
    interface: String,
    ip: IpAddr,
    prefix: u32,
}

fn addresses() -> Vec<Address> {
    let (mut all, mut head) = (Vec::new(), null_mut());
    // SAFETY: a success gives a list, whose entries are valid until it is freed below, once.
    unsafe {
        if libc::getifaddrs(&raw mut head) != 0 {
            return all;
        }
        let mut next = head;
        while let Some(a) = next.as_ref() {
            next = a.ifa_next;
            if let (Some(ip), Some(mask)) = (ip_of(a.ifa_addr), ip_of(a.ifa_netmask)) {
                let prefix = match mask {
                    IpAddr::V4(m) => m.to_bits().leading_ones(),
                    IpAddr::V6(m) => m.to_bits().leading_ones(),
                };
                let interface = CStr::from_ptr(a.ifa_name).to_string_lossy().into_owned();
                all.push(Address { interface, ip, prefix });
            }
        }
        libc::freeifaddrs(head);
    }
    all
}

/// # Safety
/// Null, or an address as long as its family says.
unsafe fn ip_of(a: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: as the caller promises; such addresses are aligned for their family.
    unsafe {
        match i32::from(a.as_ref()?.sa_family) {
            libc::AF_INET => {
                let a = &*a.cast::<libc::sockaddr_in>();
                Some(Ipv4Addr::from(u32::from_be(a.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                Some(Ipv6Addr::from((*a.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

fn text(file: &File) -> String {
    std::fs::read_to_string(file).unwrap_or_default().trim().to_string()
}

fn names(folder: &File) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut all: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    all.sort();
    all
}

/// The rails that sysfs, mounted at `sys`, shows. Link-local addresses are left out: they are only
/// valid together with their interface.
fn here(sys: &File, addresses: &[Address]) -> Vec<Rail> {
    let (devices, nets) = (sys.join("class/infiniband"), sys.join("class/net"));
    let mut all = Vec::new();
    for device in names(&devices) {
        let folder = devices.join(&device);
        // Soft-RoCE is a child of its network interface.
        let places =
            [folder.join("device"), nets.join(text(&folder.join("parent"))).join("device")];
        let node = places.iter().find_map(|p| text(&p.join("numa_node")).parse().ok());
        for port in names(&folder.join("ports")) {
            let at = folder.join("ports").join(&port);
            let ndevs = at.join("gid_attrs/ndevs");
            // RoCE: each entry of the port's table of addresses belongs to an interface.
            let mut interfaces: BTreeSet<String> =
                names(&ndevs).iter().map(|n| text(&ndevs.join(n))).collect();
            // InfiniBand: interfaces of IPoIB are children of the device.
            interfaces.extend(names(&nets).into_iter().filter(|n| {
                let net = nets.join(n);
                let nth = text(&net.join("dev_port")).parse::<u32>().ok();
                net.join("device/infiniband").join(&device).exists()
                    && nth.map(|n| n + 1) == port.parse().ok()
            }));
            let active = text(&at.join("state")).contains("ACTIVE");
            let local = |ip: &IpAddr| matches!(ip, IpAddr::V6(a) if a.is_unicast_link_local());
            for a in addresses.iter().filter(|a| interfaces.contains(&a.interface) && !local(&a.ip))
            {
                all.push(Rail { address: a.ip, prefix: a.prefix, node, active });
            }
        }
    }
    all
}

/// NUMA nodes that this process is bound to; empty when it may run everywhere.
fn near() -> BTreeSet<u32> {
    let folder = File::new("/sys/devices/system/node");
    let number = |n: &String| n.strip_prefix("node")?.parse::<u32>().ok();
    let node = |n: &String| Some((number(n)?, text(&folder.join(n).join("cpulist"))));
    let nodes: Vec<_> = names(folder).iter().filter_map(node).collect();
    bound_to(&text(File::new("/proc/self/status")), &nodes)
}

/// `nodes`: their numbers and CPU lists.
fn bound_to(status: &str, nodes: &[(u32, String)]) -> BTreeSet<u32> {
    let allowed = ranges(
        status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap_or_default(),
    );
    let meets =
        |list: &str| ranges(list).iter().any(|a| allowed.iter().any(|b| a.0 <= b.1 && b.0 <= a.1));
    let near: BTreeSet<u32> =
        nodes.iter().filter(|(_, cpus)| meets(cpus)).map(|(n, _)| *n).collect();
    // A node without CPUs does not count.
    if near.len() == nodes.iter().filter(|(_, cpus)| !cpus.is_empty()).count() {
        BTreeSet::new()
    } else {
        near
    }
}

/// First and last of each range of a list like `0-3,8`.
fn ranges(list: &str) -> Vec<(u32, u32)> {
    let range = |r: &str| {
        let (a, b) = r.split_once('-').unwrap_or((r, r));
        Some((a.trim().parse().ok()?, b.trim().parse().ok()?))
    };
    list.split(',').filter_map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(s: &str) -> IpAddr {
        s.parse().unwrap()
    }

    fn rail(address: &str, prefix: u32, node: Option<u32>) -> Rail {
        Rail { address: ip(address), prefix, node, active: true }
    }

    fn paths(rails: &[Rail], peer: &[&str], met: &Met) -> Vec<String> {
        let peer: Vec<IpAddr> = peer.iter().map(|p| ip(p)).collect();
        let name = |p: Path| format!("{}>{}", p.from.map_or("*".into(), |f| f.to_string()), p.to);
        order(rails, &peer, met).into_iter().map(name).collect()
    }

    fn path(from: &str, to: &str) -> Path {
        Path { from: Some(ip(from)), to: ip(to) }
    }

    #[test]
    fn an_address_is_reached_from_its_subnet_and_otherwise_by_routes() {
        let two =
            [rail("10.0.1.7", 24, None), rail("10.0.2.7", 24, None), rail("fd00:1::7", 64, None)];
        for (peer, want) in [
            (&["10.0.2.1"][..], &["10.0.2.7>10.0.2.1"][..]),
            (&["fd00:1::1"], &["fd00:1::7>fd00:1::1"]),
            (&["10.9.9.9"], &["*>10.9.9.9"]),
            (&["10.9.9.9", "10.0.1.1"], &["10.0.1.7>10.0.1.1", "*>10.9.9.9"]),
            (&["10.0.1.7"], &["10.0.1.7>10.0.1.7"]),
            (&[], &[]),
        ] {
            assert_eq!(paths(&two, peer, &Met::default()), want);
        }
        assert_eq!(paths(&[], &["10.0.1.1"], &Met::default()), ["*>10.0.1.1"]);
        // An IPv4 address does not match an IPv6 subnet that begins with the same bits.
        assert_eq!(
            paths(&[rail("a00:100::", 24, None)], &["10.0.1.1"], &Met::default()),
            ["*>10.0.1.1"]
        );
        // One network for all: reached from each port, but this machine's own address only from
        // itself.
        let flat = [rail("10.0.0.7", 8, None), rail("10.0.0.8", 8, None)];
        assert_eq!(
            paths(&flat, &["10.0.1.1"], &Met::default()),
            ["10.0.0.7>10.0.1.1", "10.0.0.8>10.0.1.1"]
        );
        assert_eq!(paths(&flat, &["10.0.0.8"], &Met::default()), ["10.0.0.8>10.0.0.8"]);
    }

    #[test]
    fn near_rails_come_first_then_far_ones_and_those_that_failed_last() {
        let rails = [
            rail("10.0.1.7", 16, Some(0)),
            rail("10.0.2.7", 16, Some(1)),
            rail("10.0.3.7", 16, None),
        ];
        let peer = &["10.0.9.1"];
        let bound = Met { near: [1].into(), ..Met::default() };
        assert_eq!(
            paths(&rails, peer, &bound),
            ["10.0.2.7>10.0.9.1", "10.0.3.7>10.0.9.1", "10.0.1.7>10.0.9.1"]
        );
        // Busy near devices still come before far ones, which are used only if none is near.
        let busy = Met { open: [(path("10.0.2.7", "10.0.8.1"), 50)].into(), ..bound.clone() };
        assert_eq!(
            paths(&rails, peer, &busy),
            ["10.0.3.7>10.0.9.1", "10.0.2.7>10.0.9.1", "10.0.1.7>10.0.9.1"]
        );
        let failed = Met { failed: [path("10.0.2.7", "10.0.9.1")].into(), ..bound };
        assert_eq!(
            paths(&rails, peer, &failed),
            ["10.0.3.7>10.0.9.1", "10.0.1.7>10.0.9.1", "10.0.2.7>10.0.9.1"]
        );
        let mut down = rails.clone();
        down[2].active = false;
        assert_eq!(paths(&down, peer, &failed), ["10.0.1.7>10.0.9.1", "10.0.2.7>10.0.9.1"]);
        down.iter_mut().for_each(|r| r.active = false);
        assert_eq!(paths(&down, peer, &failed), ["*>10.0.9.1"]);
    }

    #[test]
    fn connections_are_spread_over_both_ends() {
        let flat = [rail("10.0.0.7", 8, None), rail("10.0.0.8", 8, None)];
        let peer = [ip("10.0.1.1"), ip("10.0.1.2")];
        for first in 0..4 {
            let mut met = Met { turn: first, ..Met::default() };
            for _ in 0..8 {
                let best = order(&flat, &peer, &met)[0];
                *met.open.entry(best).or_default() += 1;
            }
            let of = |is: &dyn Fn(&Path) -> bool| {
                met.open.iter().filter(|(p, _)| is(p)).map(|(_, n)| n).sum::<usize>()
            };
            for r in &flat {
                assert_eq!(of(&|p| p.from == Some(r.address)), 4, "{met:?}");
            }
            for to in peer {
                assert_eq!(of(&|p| p.to == to), 4, "{met:?}");
            }
        }
        // Processes that begin at the same time start with different paths.
        let first = |turn| order(&flat, &peer, &Met { turn, ..Met::default() })[0];
        let firsts: BTreeSet<Path> = (0..4).map(first).collect();
        assert_eq!(firsts.len(), 4);
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_is_remembered_for_a_while_and_a_success_forgets_it() {
        let (ledger, p) = (Arc::new(Ledger::default()), path("10.0.0.7", "10.0.1.1"));
        let failed = |l: &Ledger| {
            l.order(&[], false);
            l.failed.lock().contains_key(&p)
        };
        drop(ledger.take(p));
        assert!(failed(&ledger) && ledger.open.lock().is_empty());
        tokio::time::sleep(FAILURE_STANDS + Duration::from_secs(1)).await;
        assert!(!failed(&ledger));
        drop(ledger.take(p));
        let mut up = ledger.take(p);
        up.well();
        assert!(!failed(&ledger) && ledger.open.lock()[&p] == 1);
        up.broke();
        drop(up);
        assert!(failed(&ledger) && ledger.open.lock().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_path_leaves_the_others_their_time() {
        let limit = Duration::from_secs(1);
        let start = Instant::now();
        // Silent, refused, successful: time that the refusal did not use goes to those after it.
        let tries = |said: Vec<Option<bool>>| async move {
            let tried = Arc::new(Mutex::new(Vec::new()));
            let all = said.iter().copied().enumerate().collect();
            let got = in_turn(all, limit, |(i, answer): (usize, Option<bool>)| {
                tried.lock().push((i, start.elapsed()));
                async move {
                    match answer {
                        None => std::future::pending().await,
                        Some(true) => Ok(i),
                        Some(false) => Err(Error::new(Code::Disconnected, format!("refused {i}"))),
                    }
                }
            });
            let got = timeout(Duration::from_secs(5), got).await;
            let tried = tried.lock().clone();
            (got, tried)
        };
        let ms = Duration::from_millis;
        let (got, tried) = tries(vec![None, Some(false), Some(true)]).await;
        assert!(matches!(got, Ok(Some(Ok(2)))));
        for ((i, at), share) in tried.iter().zip([Duration::ZERO, limit / 3, limit / 3]) {
            assert!(*at >= share && *at < share + ms(5), "{i} after {at:?}");
        }
        // The last one has all the time that its caller gives it. If it is refused, that is the
        // error.
        let (got, tried) = tries(vec![None, None]).await;
        assert!(got.is_err() && tried.len() == 2);
        let (got, _) = tries(vec![None, Some(false)]).await;
        assert!(got.unwrap().unwrap().unwrap_err().message.contains("refused 1"));
        let (got, _) = tries(vec![]).await;
        assert!(got.unwrap().is_none());
        // Each has a minimum time, however many there are.
        let begun = start.elapsed();
        let (got, _) = tries([vec![None; 40], vec![Some(true)]].concat()).await;
        assert!(
            matches!(got, Ok(Some(Ok(40))))
                && start.elapsed() - begun < limit + 40 * SHORTEST_SHARE + ms(50)
        );
    }

    #[tokio::test]
    async fn a_driver_that_hangs_holds_up_one_thread_and_nobody_who_connects() {
        use std::sync::{
            Condvar, Mutex as Std,
            atomic::{AtomicUsize, Ordering::SeqCst},
        };
        static LOOKS: AtomicUsize = AtomicUsize::new(0);
        static HANGS: (Std<bool>, Condvar) = (Std::new(true), Condvar::new());
        let ports = Arc::new(Ports::new(|| {
            if LOOKS.fetch_add(1, SeqCst) > 0 {
                drop(HANGS.1.wait_while(HANGS.0.lock().unwrap(), |hangs| *hangs).unwrap());
            }
            (vec![rail("10.0.0.7", 8, None)], BTreeSet::new())
        }));
        ports.refresh_in_time().await;
        ports.seen.lock().as_mut().unwrap().0 -= FRESH;
        for _ in 0..3 {
            timeout(Duration::from_secs(30), ports.refresh_in_time())
                .await
                .expect("it waits for the driver");
            assert_eq!(ports.last().rails.len(), 1);
        }
        assert_eq!(LOOKS.load(SeqCst), 2);
        *HANGS.0.lock().unwrap() = false;
        HANGS.1.notify_all();
    }

    static LOOKS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn ports_are_read_once_for_many_and_again_when_that_is_old() {
        use std::sync::atomic::Ordering::SeqCst;
        thread_local!(static ASYNC: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
        let look: fn() -> (Vec<Rail>, BTreeSet<u32>) = || {
            assert!(!ASYNC.get(), "read on a thread that others need");
            std::thread::sleep(Duration::from_millis(20));
            (vec![rail("10.0.0.7", 8, None)], [LOOKS.fetch_add(1, SeqCst) as u32].into())
        };
        let ports = Arc::new(Ports::new(look));
        let many = (0..50).map(|_| {
            let ports = ports.clone();
            tokio::spawn(async move {
                ASYNC.set(true);
                ports.refresh().await;
                ASYNC.set(false);
                assert_eq!(ports.last().rails.len(), 1);
            })
        });
        for one in futures_util::future::join_all(many).await {
            one.unwrap();
        }
        assert_eq!(LOOKS.load(SeqCst), 1, "one reads for all");
        ports.refresh().await;
        assert_eq!(LOOKS.load(SeqCst), 1, "not old yet");
        ports.seen.lock().as_mut().unwrap().0 -= FRESH;
        ports.refresh_soon();
        let known = ports.last();
        assert!(known.near.contains(&0), "who cannot wait has what was known");
        let start = Instant::now();
        while ports.last().near.contains(&0) {
            assert!(start.elapsed() < Duration::from_secs(30));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(LOOKS.load(SeqCst), 2);
    }

    #[test]
    fn rails_are_what_sysfs_shows() {
        let sys = tempfile::tempdir().unwrap();
        let put = |at: &str, what: &str| {
            let at = sys.path().join("class").join(at);
            std::fs::create_dir_all(at.parent().unwrap()).unwrap();
            std::fs::write(at, what).unwrap();
        };
        // RoCE with a VLAN on it and an empty entry; IPoIB's second port, down; soft-RoCE near its
        // interface's node.
        put("infiniband/mlx5_0/device/numa_node", "1\n");
        put("infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n");
        put("infiniband/mlx5_0/ports/1/gid_attrs/ndevs/0", "eth0\n");
        put("infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1", "eth0.5\n");
        put("infiniband/mlx5_0/ports/1/gid_attrs/ndevs/2", "");
        put("infiniband/mlx4_0/device/numa_node", "-1\n");
        for (port, state) in [(1, "4: ACTIVE\n"), (2, "1: DOWN\n")] {
            put(&format!("infiniband/mlx4_0/ports/{port}/state"), state);
            put(&format!("net/ib{}/dev_port", port - 1), &format!("{}\n", port - 1));
            put(&format!("net/ib{}/device/infiniband/mlx4_0/x", port - 1), "");
        }
        put("infiniband/rxe0/parent", "eth1\n");
        put("infiniband/rxe0/ports/1/state", "4: ACTIVE\n");
        put("infiniband/rxe0/ports/1/gid_attrs/ndevs/0", "eth1\n");
        put("net/eth1/device/numa_node", "0\n");
        let address = |interface: &str, s: &str| Address {
            interface: interface.into(),
            ip: ip(s),
            prefix: 24,
        };
        let all = [
            address("lo", "127.0.0.1"),
            address("eth0", "10.0.0.1"),
            address("eth0", "fe80::1"),
            address("eth0.5", "10.0.5.1"),
            address("ib0", "10.1.0.1"),
            address("ib1", "10.1.1.1"),
            address("eth1", "10.2.0.1"),
            address("eth2", "10.3.0.1"),
        ];
        let found: BTreeMap<String, (Option<u32>, bool)> = here(sys.path(), &all)
            .into_iter()
            .map(|r| (r.address.to_string(), (r.node, r.active)))
            .collect();
        let want = [
            ("10.0.0.1", (Some(1), true)),
            ("10.0.5.1", (Some(1), true)),
            ("10.1.0.1", (None, true)),
            ("10.1.1.1", (None, false)),
            ("10.2.0.1", (Some(0), true)),
        ];
        assert_eq!(found, want.map(|(a, r)| (a.to_string(), r)).into());
        assert!(here(&sys.path().join("none"), &all).is_empty());
        assert!(addresses().iter().any(|a| a.ip == ip("127.0.0.1") && a.prefix == 8));
    }

    #[test]
    fn a_process_is_near_the_nodes_whose_cpus_it_may_use() {
        let two = [(0, "0-3,8-11".to_string()), (1, "4-7,12-15".to_string()), (2, String::new())];
        for (allowed, near) in
            [("0-15", &[][..]), ("5", &[1]), ("8-11", &[0]), ("3-4", &[]), ("0,9", &[0]), ("", &[])]
        {
            let status =
                format!("Name:\tx\nCpus_allowed_list:\t{allowed}\nMems_allowed_list:\t0-1\n");
            let want: BTreeSet<u32> = near.iter().copied().collect();
            assert_eq!(bound_to(&status, &two), want, "{allowed}");
        }
        assert!(bound_to("", &[]).is_empty());
        assert!(bound_to("Cpus_allowed_list:\t0", &[(0, "0-1".into())]).is_empty());
    }
}
