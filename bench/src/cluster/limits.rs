//! The limits of the machine without StrakeFS, measured in the same run: each figure of the file
//! system is divided by one of these.

use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use io_uring::{IoUring, opcode, types};
use strake_fabric::{BufMut, Pool};
use strake_proto::{Code, Error, Result, layout::splitmix64};

const MIB: usize = 1 << 20;

/// Bytes per second of one loopback TCP stream, 1 MiB writes.
pub fn socket_copy(bytes: u64) -> Result<u64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    let sender = thread::spawn(move || -> std::io::Result<()> {
        let (mut s, _) = listener.accept()?;
        let block = vec![7u8; MIB];
        for _ in 0..bytes / MIB as u64 {
            s.write_all(&block)?;
        }
        Ok(())
    });
    let mut s = TcpStream::connect(addr)?;
    let mut block = vec![0u8; MIB];
    for _ in 0..bytes / MIB as u64 {
        s.read_exact(&mut block)?;
    }
    sender.join().map_err(|_| Error::new(Code::Io, "sender failed"))??;
    Ok(bytes / MIB as u64 * MIB as u64)
}

/// 128-byte round trips over loopback TCP by `pairs` pairs of threads for `limit`. Returns their
/// number.
pub fn round_trips(pairs: u64, limit: Duration) -> Result<u64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    let echo = |mut s: TcpStream| -> std::io::Result<()> {
        s.set_nodelay(true)?;
        let mut block = [0u8; 128];
        // Ends when the other side closes the connection.
        while s.read_exact(&mut block).is_ok() {
            s.write_all(&block)?;
        }
        Ok(())
    };
    thread::scope(|scope| -> Result<u64> {
        let callers: Vec<_> = (0..pairs)
            .map(|_| {
                scope.spawn(move || -> std::io::Result<u64> {
                    let mut s = TcpStream::connect(addr)?;
                    s.set_nodelay(true)?;
                    let (start, mut block, mut n) = (Instant::now(), [7u8; 128], 0);
                    while start.elapsed() < limit {
                        s.write_all(&block)?;
                        s.read_exact(&mut block)?;
                        n += 1;
                    }
                    Ok(n)
                })
            })
            .collect();
        for _ in 0..pairs {
            let (s, _) = listener.accept()?;
            scope.spawn(move || echo(s));
        }
        let mut sum = 0;
        for c in callers {
            sum += c.join().map_err(|_| Error::new(Code::Io, "a caller failed"))??;
        }
        Ok(sum)
    })
}

/// A file of `bytes` next to the cluster's data, fully written (no holes), to measure the device's
/// own speed.
pub fn scratch(path: &Path, bytes: u64) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)?;
    uring(
        &file,
        Pattern {
            write: true,
            block: MIB,
            depth: 16,
            span: bytes,
            count: bytes / MIB as u64,
            random: false,
        },
    )?;
    file.sync_all()?;
    Ok(file)
}

#[derive(Clone, Copy)]
pub struct Pattern {
    pub write: bool,
    pub block: usize,
    pub depth: usize,
    /// Bytes of the file used.
    pub span: u64,
    pub count: u64,
    pub random: bool,
}

/// Runs `count` operations at `depth` through io_uring with O_DIRECT, with buffers of a pool, as
/// the storage servers do. The write pattern ends with fdatasync.
pub fn uring(file: &File, p: Pattern) -> Result<()> {
    let pool = Pool::default();
    uring_with(file, p, (0..p.depth).map(|_| pool.get_now(p.block)).collect())
}

/// As [`uring`] with ordinary memory, as fio does: with pages of 4 KiB the kernel may have to split
/// 1 MiB into several requests.
pub fn uring_on_small_pages(file: &File, p: Pattern) -> Result<()> {
    uring_with(file, p, (0..p.depth).map(|_| BufMut::unpooled(p.block)).collect())
}

fn uring_with(file: &File, p: Pattern, mut bufs: Vec<BufMut>) -> Result<()> {
    let mut ring = IoUring::new(p.depth as u32)?;
    let mut seed = 42;
    let blocks = p.span / p.block as u64;
    let (mut issued, mut done) = (0u64, 0u64);
    let mut free: Vec<usize> = (0..p.depth).collect();
    while done < p.count {
        while issued < p.count
            && let Some(slot) = free.pop()
        {
            let n = if p.random { splitmix64(&mut seed) % blocks } else { issued % blocks };
            let (fd, at) = (types::Fd(file.as_raw_fd()), n * p.block as u64);
            let ptr = bufs[slot].as_mut_ptr();
            let op = if p.write {
                opcode::Write::new(fd, ptr, p.block as u32).offset(at).build()
            } else {
                opcode::Read::new(fd, ptr, p.block as u32).offset(at).build()
            };
            // SAFETY: the buffer of a slot lives in `bufs` until the ring is drained and is used by
            // one operation at a time: the slot is free only after its completion.
            unsafe {
                ring.submission()
                    .push(&op.user_data(slot as u64))
                    .map_err(|e| Error::new(Code::Io, e.to_string()))?
            };
            issued += 1;
        }
        ring.submit_and_wait(1)?;
        for c in ring.completion() {
            if c.result() != p.block as i32 {
                return Err(std::io::Error::from_raw_os_error(-c.result().min(0)).into());
            }
            free.push(c.user_data() as usize);
            done += 1;
        }
    }
    if p.write {
        file.sync_data()?;
    }
    Ok(())
}

/// 4 KiB appends followed by fdatasync, one at a time, for `limit`. Returns their number.
pub fn synced_appends(path: &Path, limit: Duration) -> Result<u64> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    let (start, block, mut n) = (Instant::now(), [1u8; 4096], 0);
    while start.elapsed() < limit {
        file.write_all(&block)?;
        file.sync_data()?;
        n += 1;
    }
    fs::remove_file(path)?;
    Ok(n)
}

/// fio's figure (bytes per second) for the same pattern on the same file, `None` where fio is not
/// installed.
pub fn fio(path: &Path, p: Pattern) -> Option<f64> {
    let mode = match (p.write, p.random) {
        (true, false) => "write",
        (true, true) => "randwrite",
        (false, false) => "read",
        (false, true) => "randread",
    };
    let out = Command::new("fio")
        .args([
            "--name=limit",
            "--ioengine=io_uring",
            "--direct=1",
            "--output-format=json",
            "--thread",
        ])
        .arg(format!("--filename={}", path.display()))
        .arg(format!("--rw={mode}"))
        .arg(format!("--bs={}", p.block))
        .arg(format!("--iodepth={}", p.depth))
        .arg(format!("--size={}", p.span))
        .arg(format!("--io_size={}", p.count * p.block as u64))
        // As our pattern does; it is included in the time.
        .args(p.write.then_some("--end_fsync=1"))
        .output()
        .ok()?;
    let v: serde_json::Value = serde_json::from_slice(&out.stdout).ok()?;
    v["jobs"][0][if p.write { "write" } else { "read" }]["bw_bytes"].as_f64()
}
