//! The cost of a run for the whole machine.

use std::{fs, path::Path, time::Instant};

use strake_proto::{Code, Error, Result};

/// Started before the work, read after it.
pub struct Meter {
    start: Instant,
    busy: f64,
}

pub struct Cost {
    pub seconds: f64,
    /// CPU time of all processes and the kernel together.
    pub cpu_seconds: f64,
}

impl Meter {
    pub fn start() -> Result<Meter> {
        Ok(Meter { start: Instant::now(), busy: busy_seconds()? })
    }
    pub fn stop(&self) -> Result<Cost> {
        Ok(Cost {
            seconds: self.start.elapsed().as_secs_f64(),
            cpu_seconds: busy_seconds()? - self.busy,
        })
    }
}

/// Ticks per second of the kernel's counters for user space, on every architecture (proc(5)).
const USER_HZ: f64 = 100.0;

/// User, nice, system, irq and softirq time of all cores (`/proc/stat`, proc(5)).
fn busy_seconds() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let fields: Vec<f64> = text
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|f| f.parse().ok())
        .collect();
    let [user, nice, system, _idle, _iowait, irq, softirq, ..] = fields[..] else {
        return Err(Error::new(Code::Io, "/proc/stat has no cpu line"));
    };
    Ok((user + nice + system + irq + softirq) / USER_HZ)
}

/// Empties the kernel's page cache; false when not permitted.
pub fn drop_caches() -> bool {
    rustix::fs::sync();
    fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}

/// Cores, kernel, and the file system of the cluster's folder.
pub fn describe(cores: usize, dir: &Path) -> Result<String> {
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    // Numbers of statfs(2).
    let fs = match rustix::fs::statfs(dir).map_err(std::io::Error::from)?.f_type as u32 {
        0xef53 => "ext4",
        0x5846_5342 => "XFS",
        0x9123_683e => "Btrfs",
        0x0102_1994 => "tmpfs",
        0x794c_7630 => "overlay",
        _ => "another file system",
    };
    Ok(format!("{cores} cores, Linux {kernel}, data on {fs}"))
}
