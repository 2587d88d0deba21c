//! Which memory and processors are near a device, according to sysfs, and how to use them. All of
//! it is best effort: what is unknown or refused is reported, but never a failure.

use std::{fs, io, path::Path, ptr};

use libc::{c_int, c_long, c_uint, c_ulong};
use parking_lot::Mutex;
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::{Deserialize, Serialize};

/// The largest node number that Linux supports.
const LAST_NODE: u32 = 1023;
/// MPOL_F_NODE and MPOL_F_ADDR of get_mempolicy(2): returns the node of a page.
const NODE_OF_ADDRESS: c_ulong = 1 | 2;
/// MPOL_MF_MOVE of mbind(2): pages that were touched are moved, too.
const MOVE: c_uint = 2;
const WORD: u32 = c_ulong::BITS;

/// The NUMA node of a device, and what was placed there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numa {
    /// Its number; `None`: unknown.
    pub node: Option<u32>,
    /// Why it is unknown.
    pub why: Option<String>,
    /// Number of pinned slots whose memory lies there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<usize>,
    /// Number of worker threads that run on its processors only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
}

impl Numa {
    /// For a device at this PCI address (or why it is unknown), according to `sysfs`.
    pub(crate) fn of(sysfs: &Path, pci: Result<String, String>) -> Numa {
        match pci.and_then(|pci| node_of(sysfs, &pci)) {
            Ok(node) => Numa { node: Some(node), ..Numa::default() },
            Err(why) => Numa { why: Some(why), ..Numa::default() },
        }
    }
}

/// The node of a device, with its memory and processors.
pub(crate) struct Near {
    pub node: u32,
    /// Whether the node has memory; otherwise why it is not used.
    pub memory: Result<(), String>,
    /// Processors there that this process may use; `None`: all that it may use are there.
    pub cpus: Result<Option<CpuSet>, String>,
}

impl Near {
    pub fn of(sysfs: &Path, node: u32) -> Near {
        let allowed = sched_getaffinity(None).map_err(|e| format!("sched_getaffinity: {e}"));
        Near {
            node,
            memory: has_memory(sysfs, node),
            cpus: allowed.and_then(|allowed| {
                near(&list_of(sysfs, &format!("node{node}/cpulist"))?, &allowed)
            }),
        }
    }
}

/// Whether this machine has more than one node: otherwise everything is near.
pub(crate) fn has_several(sysfs: &Path) -> bool {
    list_of(sysfs, "online")
        .is_ok_and(|l| l.iter().map(|(a, b)| u64::from(b - a) + 1).sum::<u64>() > 1)
}

fn near(there: &List, allowed: &CpuSet) -> Result<Option<CpuSet>, String> {
    if there.is_empty() {
        return Err("it has no processors".into());
    }
    let (mut both, mut all) = (CpuSet::new(), true);
    for cpu in (0..CpuSet::MAX_CPU).filter(|c| allowed.is_set(*c)) {
        if there.iter().any(|(a, b)| (*a as usize..=*b as usize).contains(&cpu)) {
            both.set(cpu);
        } else {
            all = false;
        }
    }
    match both.count() {
        0 => Err("this process may use none of its processors".into()),
        _ => Ok((!all).then_some(both)),
    }
}

fn has_memory(sysfs: &Path, node: u32) -> Result<(), String> {
    // Kernels without the first file have the second.
    let with = list_of(sysfs, "has_memory").or_else(|_| list_of(sysfs, "has_normal_memory"))?;
    if has(&with, node) { Ok(()) } else { Err("it has no memory".into()) }
}

/// The node of a PCI device.
fn node_of(sysfs: &Path, pci: &str) -> Result<u32, String> {
    // The text comes from a driver: it must not lead to another path.
    if pci.is_empty()
        || !pci.bytes().all(|b| b.is_ascii_hexdigit() || b == b':' || b == b'.')
        || pci.contains("..")
    {
        return Err(format!("'{}' is not a PCI address", pci.escape_default()));
    }
    let path = sysfs.join("bus/pci/devices").join(pci).join("numa_node");
    let text = read(&path)?;
    let node = match text.trim().parse::<i64>() {
        Ok(-1) => {
            return Err(format!("the system does not say to which node device {pci} belongs"));
        }
        Ok(n) => u32::try_from(n).ok().filter(|n| *n <= LAST_NODE),
        Err(_) => None,
    };
    let node = node.ok_or_else(|| {
        format!("{} says '{}', which is not a node", path.display(), shown(&text))
    })?;
    let online = list_of(sysfs, "online")?;
    if has(&online, node) {
        Ok(node)
    } else {
        Err(format!("node {node}, of device {pci}, is not online"))
    }
}

/// First and last number of each run.
type List = Vec<(u32, u32)>;

fn has(list: &List, n: u32) -> bool {
    list.iter().any(|(a, b)| (*a..=*b).contains(&n))
}

fn list_of(sysfs: &Path, name: &str) -> Result<List, String> {
    let path = sysfs.join("devices/system/node").join(name);
    let text = read(&path)?;
    parse(text.trim()).ok_or_else(|| {
        format!("{} says '{}', which is not a list of numbers", path.display(), shown(&text))
    })
}

/// `0-3,8-11`, as the kernel writes sets; empty text is the empty set.
fn parse(text: &str) -> Option<List> {
    if text.is_empty() {
        return Some(List::new());
    }
    let number = |s: &str| {
        s.parse::<u32>().ok().filter(|n| *n <= 1 << 20 && s.bytes().all(|b| b.is_ascii_digit()))
    };
    let run = |s: &str| {
        let (a, b) = s.split_once('-').unwrap_or((s, s));
        let run = (number(a)?, number(b)?);
        (run.0 <= run.1).then_some(run)
    };
    text.split(',').map(run).collect()
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The content of a file, for a message.
fn shown(text: &str) -> String {
    text.trim().chars().take(40).flat_map(char::escape_default).collect()
}

/// Makes pages come from a node as long as it has free memory, and moves pages there that were
/// touched already, unless they are held in place: mbind(2).
pub(crate) fn prefer(start: *mut u8, len: usize, node: u32) -> io::Result<()> {
    let mut mask = [0 as c_ulong; (LAST_NODE / WORD) as usize + 1];
    let word = mask.get_mut((node / WORD) as usize).ok_or(io::ErrorKind::InvalidInput)?;
    *word |= 1 << (node % WORD);
    // The kernel uses one bit less than it is told.
    let bits = c_ulong::from(LAST_NODE) + 2;
    // SAFETY: it changes where pages lie, and no byte of them; the mask has so many bits.
    let code = unsafe {
        let mode = libc::MPOL_PREFERRED as c_ulong;
        libc::syscall(libc::SYS_mbind, start, len as c_ulong, mode, mask.as_ptr(), bits, MOVE)
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The node of the page at an address; touches the page: get_mempolicy(2).
pub(crate) fn node_at(at: *const u8) -> io::Result<u32> {
    let mut node: c_int = -1;
    // SAFETY: writes one number; the address is only looked up.
    let code: c_long = unsafe {
        let (mask, bits) = (ptr::null_mut::<c_ulong>(), 0 as c_ulong);
        libc::syscall(libc::SYS_get_mempolicy, &raw mut node, mask, bits, at, NODE_OF_ADDRESS)
    };
    if code != 0 {
        return Err(io::Error::last_os_error());
    }
    u32::try_from(node).map_err(|_| io::Error::other("no node"))
}

/// Placement of the slots and threads of a bridge.
pub(crate) struct Placing {
    numa: Numa,
    several: bool,
    near: Option<Near>,
    /// The error of mbind(2).
    refused: Mutex<Option<String>>,
}

impl Placing {
    pub fn of(sysfs: &Path, pci: Result<String, String>) -> Placing {
        let numa = Numa::of(sysfs, pci);
        let near = numa.node.map(|n| Near::of(sysfs, n));
        Placing { numa, several: has_several(sysfs), near, refused: Mutex::default() }
    }

    /// The node from which memory should come; `None`: no such node is known, or it has no memory.
    fn node(&self) -> Option<u32> {
        self.near.as_ref().filter(|n| n.memory.is_ok()).map(|n| n.node)
    }

    /// The node to which memory is moved; `None` also if the machine has only one.
    pub fn moves_to(&self) -> Option<u32> {
        self.node().filter(|_| self.several)
    }

    /// Makes this memory come from the node.
    pub fn prepare(&self, start: *mut u8, len: usize) {
        let Some(node) = self.node() else { return };
        if let Err(e) = prefer(start, len, node) {
            self.refused.lock().get_or_insert(format!("mbind: {e}"));
        }
    }

    /// Processors for the threads; `None`: they may run anywhere.
    pub fn cpus(&self) -> Option<CpuSet> {
        *self.near.as_ref()?.cpus.as_ref().ok()?
    }

    /// The result, and a notice about it. `slots`: their start addresses; they were touched.
    /// `threads`: why each could not be moved.
    pub fn done(self, slots: &[*const u8], threads: &[Option<String>]) -> (Numa, Option<String>) {
        let Placing { mut numa, several, near, refused } = self;
        let Some(near) = near else {
            let why = numa.why.as_ref().filter(|_| several);
            let said =
                why.map(|why| format!("slots and threads are not placed near the device: {why}"));
            return (numa, said);
        };
        let (node, mut said) = (near.node, Vec::new());
        let at: io::Result<Vec<u32>> = slots.iter().map(|s| node_at(*s)).collect();
        numa.slots = at.ok().map(|at| at.into_iter().filter(|n| *n == node).count());
        let elsewhere = numa.slots.map_or(0, |there| slots.len() - there);
        if elsewhere > 0 || several {
            let why = near.memory.err().or(refused.into_inner());
            let why = why
                .or_else(|| (elsewhere > 0).then(|| format!("{elsewhere} found no memory there")));
            said.extend(
                why.map(|why| format!("slots are not all on node {node}, the device's: {why}")),
            );
        }
        let against = near
            .cpus
            .err()
            .or_else(|| threads.iter().flatten().next().map(|e| format!("sched_setaffinity: {e}")));
        numa.threads = Some(match &against {
            Some(_) => 0,
            None => threads.len(),
        });
        said.extend(against.map(|why| {
            format!("threads are not all on the processors of node {node}, the device's: {why}")
        }));
        (numa, (!said.is_empty()).then(|| said.join("; ")))
    }
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    const PCI: &str = "0000:3b:00.0";

    /// A made-up `/sys`, gone at the end.
    struct Sys(std::path::PathBuf);

    impl Sys {
        fn new(name: &str, files: &[(&str, &str)]) -> Sys {
            let root = std::env::temp_dir().join(format!("strake-numa-{name}-{}", process::id()));
            let sys = Sys(root);
            for (path, text) in files {
                sys.write(path, text);
            }
            sys
        }

        fn write(&self, path: &str, text: &str) {
            let path = match path {
                "device" => self.0.join("bus/pci/devices").join(PCI).join("numa_node"),
                other => self.0.join("devices/system/node").join(other),
            };
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn lists_are_read_as_the_kernel_writes_them_and_nothing_else_is() {
        assert_eq!(parse("0-3,8-11"), Some(vec![(0, 3), (8, 11)]));
        assert_eq!(parse("7"), Some(vec![(7, 7)]));
        assert_eq!(parse(""), Some(vec![]));
        for bad in [
            "a",
            "1-",
            "-1",
            "3-1",
            "1,,2",
            "1;2",
            "+1",
            " 1",
            "0-4294967295",
            "99999999999999999999",
            "0x1",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_node_of_a_device_is_what_the_system_says_or_there_is_a_reason() {
        let s = Sys::new("node", &[("device", "1"), ("online", "0-1")]);
        let of = || Numa::of(&s.0, Ok(PCI.into()));
        assert_eq!((of().node, of().why), (Some(1), None));
        for (says, why) in [
            ("-1", "does not say"),
            ("2", "node 2, of device 0000:3b:00.0, is not online"),
            ("-2", "is not a node"),
            ("70000", "is not a node"),
            ("one\u{7}", "'one\\u{7}', which is not a node"),
            ("", "is not a node"),
        ] {
            s.write("device", says);
            assert!(of().node.is_none() && of().why.unwrap().contains(why), "{says}: {:?}", of());
        }
        s.write("device", "0");
        s.write("online", "some");
        assert!(of().why.unwrap().contains("not a list of numbers"));
        for wrong in ["", "..", "../../etc", "0000:3b:00.0/..", "x"] {
            let numa = Numa::of(&s.0, Ok(wrong.into()));
            assert!(numa.why.unwrap().contains("is not a PCI address"), "{wrong}");
        }
        let missing = Numa::of(&s.0, Ok("0000:01:00.0".into())).why.unwrap();
        assert!(missing.contains("0000:01:00.0/numa_node: No such file"), "{missing}");
        assert_eq!(
            Numa::of(&s.0, Err("it does not tell".into())).why.as_deref(),
            Some("it does not tell")
        );
    }

    #[test]
    fn processors_are_those_of_the_node_that_the_process_may_use() {
        let set = |cpus: &[usize]| {
            let mut s = CpuSet::new();
            cpus.iter().for_each(|c| s.set(*c));
            s
        };
        let near = |list: &str, allowed: &[usize]| near(&parse(list).unwrap(), &set(allowed));
        assert_eq!(near("0-3,8-11", &[2, 3, 4, 8]), Ok(Some(set(&[2, 3, 8]))));
        assert_eq!(near("0-3", &[1, 2]), Ok(None), "they are there already");
        assert_eq!(near("4-7", &[0, 1]), Err("this process may use none of its processors".into()));
        assert_eq!(near("", &[0]), Err("it has no processors".into()));
        assert_eq!(near("2000,3", &[3, 4]), Ok(Some(set(&[3]))), "more than a mask has");
    }

    #[test]
    fn a_node_without_memory_gets_none_and_it_is_told() {
        let files =
            [("device", "1"), ("online", "0-1"), ("has_memory", "0"), ("node1/cpulist", "4000")];
        let s = Sys::new("memory", &files);
        let placing = Placing::of(&s.0, Ok(PCI.into()));
        let mut page = vec![0u8; 4096];
        placing.prepare(page.as_mut_ptr(), 4096);
        assert!(placing.cpus().is_none() && placing.refused.lock().is_none());
        let (numa, said) = placing.done(&[], &[None]);
        let said = said.unwrap();
        assert_eq!((numa.node, numa.threads), (Some(1), Some(0)));
        assert!(
            said.contains("slots are not all on node 1, the device's: it has no memory"),
            "{said}"
        );
        assert!(said.contains("threads are not all on the processors of node 1"), "{said}");
        // Older kernels. A machine with one node has nothing to report.
        fs::remove_file(s.0.join("devices/system/node/has_memory")).unwrap();
        s.write("has_normal_memory", "0-1");
        assert_eq!(has_memory(&s.0, 1), Ok(()));
        let unknown = |s: &Sys| Placing::of(&s.0, Err("nobody knows".into())).done(&[], &[]).1;
        assert!(unknown(&s).unwrap().contains("nobody knows"));
        s.write("online", "0");
        assert_eq!(unknown(&s), None);
    }

    #[test]
    fn memory_comes_from_the_node_that_it_was_asked_of() {
        let len = 1 << 20;
        // SAFETY: a new mapping, which is let go at the end of the test.
        let start: *mut u8 = unsafe {
            let (prot, flags) = (
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
            );
            rustix::mm::mmap_anonymous(ptr::null_mut(), len, prot, flags).unwrap().cast()
        };
        match prefer(start, len, 0) {
            Err(e) if [libc::EPERM, libc::ENOSYS].contains(&e.raw_os_error().unwrap_or(0)) => {
                println!("skipped: mbind is refused here: {e}");
            }
            done => {
                done.unwrap();
                assert_eq!(node_at(start).unwrap(), 0);
                // SAFETY: the mapping, which nobody else has.
                let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
                bytes.fill(7);
                prefer(start, len, 0).unwrap();
                // Where another node has memory, it moves there and keeps its content.
                let with = list_of(Path::new("/sys"), "has_memory").unwrap_or_default();
                match with.iter().flat_map(|(a, b)| *a..=*b).find(|n| *n != 0) {
                    Some(other) => {
                        prefer(start, len, other).unwrap();
                        assert_eq!(node_at(start).unwrap(), other);
                        prefer(start, len, 0).unwrap();
                    }
                    None => {
                        println!("skipped: moving memory, because one node alone has some here")
                    }
                }
                assert!(bytes.iter().all(|b| *b == 7), "what is there stays");
                // Checks the policy itself; it does not affect other memory.
                let (mut mode, mut mask): (c_int, [c_ulong; 16]) = (-1, [0; 16]);
                let by_address: c_ulong = 2;
                // SAFETY: writes a number and as many bits as there are.
                let code = unsafe {
                    libc::syscall(
                        libc::SYS_get_mempolicy,
                        &raw mut mode,
                        mask.as_mut_ptr(),
                        1024 as c_ulong,
                        start,
                        by_address,
                    )
                };
                assert_eq!((code, mode, mask[0]), (0, libc::MPOL_PREFERRED, 1));
                assert!(prefer(start, len, LAST_NODE).is_err(), "there is no such node");
            }
        }
        assert!(prefer(start, len, LAST_NODE + 1).is_err());
        // SAFETY: mapped above.
        unsafe { rustix::mm::munmap(start.cast(), len).unwrap() };
    }
}
